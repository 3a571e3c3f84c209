"""The record of a predicted cost, which `backend.cost(state)` of every backend returns."""
from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from svod.core.kernel.scheduler import Scheduler
from svod.system.quantities import digits


class CostPart(NamedTuple):
    """The prediction for one stage on a CPU, or for one phase on a device with groups."""

    name: str
    cycles: float                           # cycles of all cores, or of the device; terms overlap, so this is less than their sum
    terms: tuple[tuple[str, float], ...]    # (resource, cycles that it would take alone)

    def __str__(self) -> str:
        terms = sorted([t for t in self.terms if t[1] >= 0.5], key=lambda t: -t[1])
        return f"{self.name}: {digits(self.cycles)} cycles; longest first: {', '.join(f'{name} {digits(c)}' for name, c in terms)}"


@dataclass(frozen=True)
class Cost:
    """A predicted cost, good for ranking states but not as a time. `cycles`: cycles of the whole kernel, on all its cores or on the
    device."""

    cycles: float = 0.0
    accumulators: int = 0       # registers that live through the reduce loops; the largest number of any stage
    scratch_bytes: int = 0
    flops: float = 0.0
    bytes_moved: float = 0.0    # from and to memory
    parts: tuple[CostPart, ...] = ()

    def __str__(self) -> str:
        return "\n".join([f"{digits(self.cycles)} cycles", *map(str, self.parts)])


def total(costs: Sequence[Cost]) -> Cost:
    """The cost of stages or phases that run one after another."""
    return Cost(sum([c.cycles for c in costs]), max([c.accumulators for c in costs]), sum([c.scratch_bytes for c in costs]),
                sum([c.flops for c in costs]), sum([c.bytes_moved for c in costs]), tuple([p for c in costs for p in c.parts]))


def tiling_family(state: Scheduler) -> tuple[Any, ...]:
    """A key that is equal for states that tile the same axes at the same levels and stage the same values, with any amounts."""
    rows = state.rows
    levels = tuple(tuple(rows[r].role for r in ids if rows[r].extent > 1) for ids in state.axis_rows)
    place = tuple(rows[p].axis if isinstance(p, int) else p for p in state.place)
    return levels, place
