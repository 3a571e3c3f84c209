"""Amounts that hand-written chains take from the target: a register tile, cores, whether to store past the caches.

A chain is made for a case of the suite and a target. Chains name axes, so that they are valid at other extents too; the search does not
know them.
"""
from __future__ import annotations

from collections.abc import Callable
from typing import Any

from svod.bench.suites.cases import Case
from svod.core.ir.dtype import BY_NAME
from svod.core.machine.target import Target

Opt = list[Any]
Chain = list[Opt]
Maker = Callable[[Case, Target], Chain]


def lanes(case: Case, target: Target) -> int:
    """Elements of the output in a vector; products of narrow numbers are summed up in float32."""
    return target.vector_bytes // max(4, BY_NAME[case.out_dtype].itemsize)


def tile(case: Case, target: Target) -> tuple[int, int]:
    """(rows, columns) of a register tile: six rows of four vectors are 24 accumulators, four vectors of the one operand and one element of
    the other: 29 of 32 registers. With 16 registers six rows of two."""
    return 6, (4 if target.vector_registers >= 32 else 2) * lanes(case, target)


def thread(axis: str, target: Target) -> Chain:
    """All cores on an axis."""
    return [["THREAD", axis, target.threads]] if target.threads > 1 else []


def stream(case: Case, target: Target) -> Chain:
    """Past the caches, for an output that the cores' own caches do not keep: an ordinary store reads the line first."""
    return [["STREAM", "out"]] if case.bytes_written > target.l2 * target.threads else []
