"""Exports a PyTorch module of the suite torch as an ONNX file with its inputs. It is a separate process that ends before the file is run.

    python -m svod.bench.peers.torch_export NAME SEED FOLDER        writes model.onnx and inputs.npz
"""
from __future__ import annotations

import sys
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import torch

from svod.bench.suites.torch_modules import REAL, Decoding, make
from svod.system.process.program import arguments

OPSET = 17


def main(name: str, seed: str, folder: str) -> None:
    """Export a module. Any error of PyTorch ends the process."""
    torch.manual_seed(int(seed))
    # off: it makes a whole attention one operation, which TorchScript's exporter does not know
    torch.backends.mha.set_fastpath_enabled(False)
    module, args, kwargs = make(name, REAL)
    if isinstance(module, Decoding):
        sys.exit("a loop of calls is no single graph")
    named = [f"x{i}" for i in range(len(args))] + [k for k, v in kwargs.items() if isinstance(v, torch.Tensor)]
    target = Path(folder) / "model.onnx"
    with warnings.catch_warnings(), torch.inference_mode():
        warnings.simplefilter("ignore")
        torch.onnx.export(module, args, str(target), kwargs=kwargs, input_names=named, opset_version=OPSET, dynamo=False)
    tensors: list[Any] = [v for v in (*args, *kwargs.values()) if isinstance(v, torch.Tensor)]
    np.savez(Path(folder) / "inputs.npz", **{n: t.numpy() for n, t in zip(named, tensors, strict=True)})


if __name__ == "__main__":
    main(*arguments())
