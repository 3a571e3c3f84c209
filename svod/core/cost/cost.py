"""The record of a prediction: `backend.cost(state)` of every backend."""
from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from svod.core.kernel.scheduler import Scheduler


@dataclass(frozen=True)
class Cost:
    """A prediction that ranks states; it does not promise a time. `cycles`: of the whole kernel, on one core or on the device."""

    cycles: float
    accumulators: int         # registers that live through the reduce loops, at most over the stages
    loads_per_fma: float      # of the stage with most multiply-adds
    scratch_bytes: int
    flops: float
    bytes_moved: float        # from memory


def tiling_family(state: Scheduler) -> tuple[Any, ...]:
    """A key that states share when they tile the same axes at the same levels and stage the same values, whatever the amounts."""
    rows = state.rows
    levels = tuple(tuple(rows[r].role for r in ids if rows[r].extent > 1) for ids in state.axis_rows)
    place = tuple(rows[p].axis if isinstance(p, int) else p for p in state.place)
    return levels, place
