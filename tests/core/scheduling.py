"""Execution of schedules with the kernel evaluator; scheduling tests compare the results with the graph interpreter."""
from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from svod.core.ir.dtype import to_numpy
from svod.core.ir.uop import UOp
from svod.core.schedule.schedule import Schedule
from svod.core.schedule.schedule_check import check_schedule
from svod.core.spec.evaluate import evaluate

Array = np.ndarray[Any, np.dtype[Any]]


def run_schedule(schedule: Schedule, buffers: Mapping[UOp, Array]) -> dict[UOp, Array]:
    """Run a schedule; returns the contents of all buffers afterwards. `buffers`: the flat contents before."""
    check_schedule(schedule)
    memory = {b: np.array(a).ravel() for b, a in buffers.items()}
    for call in schedule.calls:
        for b in call.args:
            memory.setdefault(b, np.zeros(b.arg, to_numpy(b.dtype)))
        views = [memory[b][offset:] for b, offset in zip(call.args, call.offsets, strict=True)]
        for store, content in zip(call.ast.src, evaluate(call.ast, views), strict=True):
            views[store.src[0].src[0].arg.slot][:] = content
    for b in schedule.outputs:
        memory.setdefault(b, np.zeros(b.arg, to_numpy(b.dtype)))
    return memory
