"""The record of a prediction: `backend.cost(state)` of every backend."""
from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from svod.core.kernel.scheduler import Scheduler


@dataclass(frozen=True)
class Cost:
    """A prediction that ranks states; it does not promise a time. `cycles`: of the whole kernel, on one core or on the device."""

    cycles: float = 0.0
    accumulators: int = 0       # registers that live through the reduce loops, at most over the stages
    scratch_bytes: int = 0
    flops: float = 0.0
    bytes_moved: float = 0.0    # from memory


def total(costs: Sequence[Cost]) -> Cost:
    """The cost of stages or phases that run one after the other."""
    return Cost(sum([c.cycles for c in costs]), max([c.accumulators for c in costs]), sum([c.scratch_bytes for c in costs]),
                sum([c.flops for c in costs]), sum([c.bytes_moved for c in costs]))


def tiling_family(state: Scheduler) -> tuple[Any, ...]:
    """A key that states share when they tile the same axes at the same levels and stage the same values, whatever the amounts."""
    rows = state.rows
    levels = tuple(tuple(rows[r].role for r in ids if rows[r].extent > 1) for ids in state.axis_rows)
    place = tuple(rows[p].axis if isinstance(p, int) else p for p in state.place)
    return levels, place
