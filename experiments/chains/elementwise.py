"""Chains for elementwise work and copies."""
from __future__ import annotations

from amounts import Chain, Maker, lanes, stream, thread

# isort: split
from svod.bench.suites.cases import Case
from svod.core.machine.target import Target


def flat(case: Case, target: Target) -> Chain:
    return [["UPCAST", "o0", 8 * lanes(case, target)], *stream(case, target), *thread("o0", target)]


def transpose(case: Case, target: Target) -> Chain:
    """Squares are turned in registers. The inner loop runs along the rows that are read; two lines of a row are written at a time."""
    n = lanes(case, target)
    return [["UPCAST", "o0", n], ["UPCAST", "o1", 2 * n], ["LANES", "o1.in"], ["ORDER", "out", ["o1", "o0"]],
            *stream(case, target), *thread("o1", target)]


CHAINS: dict[str, Maker] = {"gelu_4m": flat, "axpy_16m": flat, "transpose_4096": transpose}
