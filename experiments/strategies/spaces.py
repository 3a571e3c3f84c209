"""Recorded spaces: kernels of the core suite's kinds, whose runs take far less than a millisecond, and what was measured of them.

A space is a file, `recorded/NAME.jsonl`: one state per line, with its chain, its LINEAR, the predicted cycles, and either seconds or why it
has none. States of one LINEAR share its measurement; only the first one has it. Features are not stored: they follow from the chain
(`svod.tune.search.features`), whichever they are today.
"""
from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from heuristics import kernels_of

# isort: split
from svod.bench.suites.cases import Case, CaseOperand, conv2d, layer_norm, matmul, reduction, softmax
from svod.compile.backend import backend_named
from svod.core.kernel.kernel import Kernel
from svod.core.machine.target import HOST, Target

FOLDER = Path(__file__).parent / "recorded"
CASES = {c.name: c for c in (
    matmul("gemm", "a product of matrices", (192, 224), (224, 256)),
    conv2d("conv", "a 3×3 convolution", 48, 64, 3, 28),
    softmax("softmax", "softmax of rows", 384, 768),
    layer_norm("layer_norm", "layer norm of rows", 384, 768),
    reduction("reduction", "sum over the first axis", "sum", (1024, 768), 0),
    Case("transpose", "a transposed operand and another, added", "core", "elementwise", "add_transposed",
         (CaseOperand((768, 512)), CaseOperand((512, 768))), (512, 768), "float32", 512 * 768, lambda x, y: (x.transpose(0, 1) + y).relu()),
)}


@dataclass(frozen=True)
class Recorded:
    """One state. `status`: ok; duplicate of another state's LINEAR; or why it was not timed. `seconds`: samples; `compiled`: seconds."""

    digest: str
    chain: list[Any]
    linear: str
    size: int
    predicted: float
    status: str
    compiled: float = 0.0
    seconds: tuple[float, ...] = ()
    reason: str = ""


@cache
def kernel_of(name: str) -> Kernel:
    """The kernel of a case, which has one."""
    [(_, kernel)] = kernels_of(CASES[name])
    return kernel


@cache
def target() -> Target:
    return backend_named(HOST).target()


def path_of(name: str) -> Path:
    return FOLDER / f"{name}.jsonl"


def read(name: str) -> Iterator[Recorded]:
    """The states that were recorded for a kernel; those that were timed again have all their samples. A line that was cut short by a kill
    is the last one and is left out."""
    states: dict[str, Recorded] = {}
    if path_of(name).exists():
        with path_of(name).open(encoding="utf-8") as lines:
            for line in lines:
                if line.endswith("\n"):
                    r = Recorded(**json.loads(line))
                    before = states[r.digest].seconds if r.digest in states else ()
                    states[r.digest] = replace(r, seconds=(*before, *r.seconds))
    yield from states.values()


def append(name: str, states: list[Recorded]) -> None:
    """Add states to a kernel's file, in one write."""
    FOLDER.mkdir(exist_ok=True)
    with path_of(name).open("a", encoding="utf-8") as file:
        file.write("".join(json.dumps(asdict(s), separators=(",", ":")) + "\n" for s in states))
