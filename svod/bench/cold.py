"""Timing with cold operands: each run reads another copy, so that none is in a cache any more when its turn comes again.

    hot:   k(x, w, y)  k(x, w, y)  k(x, w, y)            w stays in the caches
    cold:  k(x, w0, y) k(x, w1, y) … k(x, wn, y)  n copies of w together exceed the last-level cache twice

In a model, weights are read once per pass, and other kernels run in between: timed with warm weights, a kernel that
does not prefetch looks as good as one that does.
"""
from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from svod.bench.timer import Contestant
from svod.compile.llvm.codegen import LoadedProgram
from svod.compile.lower.program import ProgramSpec
from svod.compile.plan.execution_plan import ExecutionPlan
from svod.compile.plan.plan_parts import PlanBuffer, PreparedKernel

MAX_COPIES = 1024       # an operand below 2·L3/1024 then stays in the last-level cache; it is cold in the others


def copies_needed(cold_bytes: int, last_level_bytes: int) -> int:
    """How many copies of `cold_bytes` exceed twice the last-level cache, between 2 and MAX_COPIES."""
    return min(MAX_COPIES, max(2, -(-2 * last_level_bytes // max(1, cold_bytes))))


def cold_contestant(spec: ProgramSpec, loaded: LoadedProgram, arrays: Sequence[np.ndarray[Any, Any]], cold: Sequence[int],
                    last_level_bytes: int, *, threads: int | None = None, name: str = "") -> tuple[Contestant, ExecutionPlan]:
    """A contestant that rotates the operands in slots `cold` over copies, and the plan behind it. One call runs every copy once, without
    returning to Python in between."""
    count = copies_needed(sum(arrays[slot].nbytes for slot in cold), last_level_bytes)
    buffers = [PlanBuffer(a.nbytes, "output" if slot in spec.outs else "input", a) for slot, a in enumerate(arrays)]
    rows = [tuple(range(len(arrays)))]
    for _ in range(1, count):
        row = list(rows[0])
        for slot in cold:
            row[slot] = len(buffers)
            buffers.append(PlanBuffer(arrays[slot].nbytes, buffers[slot].kind, arrays[slot].copy()))
        rows.append(tuple(row))
    plan = ExecutionPlan([PreparedKernel(spec, loaded, row, spec.name) for row in rows], buffers, spec.outs, threads=threads)
    return Contestant(plan.repeat, name or spec.name, count), plan
