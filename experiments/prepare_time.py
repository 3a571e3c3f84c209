"""What it costs to prepare a whole model without a search: seconds with everything cold and with warm caches, code compiled, memory.

    python experiments/prepare_time.py                     BERT base (12 layers, 128 tokens) and ResNet-18
    python experiments/prepare_time.py bert_base

Cold: an empty object cache and tuning database, in a new process. Warm: a new process that finds both as the first one left them. The time
is that of the first call of a jitted model: graph, schedule, heuristics or database, code, packed weights, and one run.
"""
from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(Path(__file__).resolve().parent / "models")]

import numpy as np  # noqa: E402

import svod  # noqa: E402


def bert_base() -> tuple[Callable[[svod.Tensor], svod.Tensor], tuple[int, ...]]:
    from bert_block import BertBlock
    blocks = [BertBlock(seed=i) for i in range(12)]

    def model(x: svod.Tensor) -> svod.Tensor:
        for i, block in enumerate(blocks):
            with svod.scope(f"layers.{i}"):
                x = block(x)
        return x
    return model, (1, 128, 768)


def resnet18() -> tuple[Callable[[svod.Tensor], svod.Tensor], tuple[int, ...]]:
    from resnet18 import ResNet18
    return ResNet18(), (1, 3, 224, 224)


MODELS: dict[str, Any] = {"bert_base": bert_base, "resnet18": resnet18}


def measure(name: str) -> None:
    from svod.compile.cpu import backend
    compiled = []
    compile_object = backend.compile_object

    def counted(ir: str, *args: Any, **more: Any) -> bytes:
        compiled.append(ir)
        return compile_object(ir, *args, **more)

    backend.compile_object = counted  # type: ignore[assignment]
    model, shape = MODELS[name]()
    x = svod.Tensor(np.random.default_rng(1).standard_normal(shape, dtype=np.float32))
    f = svod.jit(model)
    start = time.perf_counter()
    try:
        f(x)
    finally:
        backend.compile_object = compile_object
    seconds = time.perf_counter() - start
    kernels, memory = f.plans[0].kernels, f.plans[0].memory
    print(f"{seconds:6.2f} s   {len(kernels)} kernels, {len({k.key for k in kernels})} distinct, {len(compiled)} modules compiled (with "
          f"those of weights folded at capture); intermediates {memory.shared / 1e6:.2f} MB, "
          f"{memory.shared / max(1, memory.lower_bound):.3f} of the lower bound; packed weights {memory.kept / 1e6:.1f} MB")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="*", choices=[*MODELS, []], help="default: all")
    parser.add_argument("--measure", choices=MODELS, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.measure:
        measure(args.measure)
        return
    for name in args.models or MODELS:
        with tempfile.TemporaryDirectory() as folder:
            caches = {"SVOD_TUNE_DB": f"{folder}/db.sqlite", "SVOD_OBJECT_CACHE": f"{folder}/objects"}
            for state in ("cold", "warm"):
                print(f"{name:10} {state}", end=" ", flush=True)
                subprocess.run([sys.executable, __file__, "--measure", name], env={**os.environ, **caches}, check=True)


if __name__ == "__main__":
    main()
