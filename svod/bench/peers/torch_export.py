"""Exports a PyTorch module of the suite torch as a file with its inputs. It is a separate process that ends before the file is run.

    python -m svod.bench.peers.torch_export NAME SEED FOLDER onnx               writes model.onnx and inputs.npz
    python -m svod.bench.peers.torch_export NAME SEED FOLDER torchscript        writes model.pt and inputs.npz
"""
from __future__ import annotations

import sys
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import torch

from svod.bench.suites.torch_modules import REAL, Decoding, leaves, make
from svod.system.process.program import arguments

OPSET = 17


def main(name: str, seed: str, folder: str, form: str) -> None:
    """Export a module in a form. Any error of PyTorch ends the process."""
    torch.manual_seed(int(seed))
    # off: it makes a whole attention one operation, which TorchScript's exporter does not know
    torch.backends.mha.set_fastpath_enabled(False)
    module, args, kwargs = make(name, REAL)
    if isinstance(module, Decoding):
        sys.exit("a loop of calls is no single graph")
    named = [f"x{i}" for i, a in enumerate(args) if isinstance(a, torch.Tensor)]
    named += [k for k, v in kwargs.items() if isinstance(v, torch.Tensor)]
    function = _OfTensors(module, args, kwargs)
    tensors: list[Any] = [v for v in (*args, *kwargs.values()) if isinstance(v, torch.Tensor)]
    with warnings.catch_warnings(), torch.inference_mode():
        warnings.simplefilter("ignore")
        if form == "onnx":
            target = str(Path(folder) / "model.onnx")
            torch.onnx.export(function, tuple(tensors), target, input_names=named, opset_version=OPSET, dynamo=False)
        else:
            traced = torch.jit.trace(function, tuple(tensors), check_trace=False, strict=False)
            traced.save(str(Path(folder) / "model.pt"))
    np.savez(Path(folder) / "inputs.npz", **{n: t.numpy() for n, t in zip(named, tensors, strict=True)})


class _OfTensors(torch.nn.Module):  # type: ignore[misc]
    """A module as a function of tensors alone, as a trace needs it: from those among its arguments to those among its results."""

    def __init__(self, module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        super().__init__()
        self.module, self.args, self.kwargs = module, args, kwargs

    def forward(self, *tensors: Any) -> tuple[Any, ...]:
        given = iter(tensors)
        args = [next(given) if isinstance(a, torch.Tensor) else a for a in self.args]
        kwargs = {k: next(given) if isinstance(v, torch.Tensor) else v for k, v in self.kwargs.items()}
        return tuple(leaves(self.module(*args, **kwargs)))


if __name__ == "__main__":
    main(*arguments())
