"""Resources of phases on a device with thread groups, and their occupancy."""
from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import Any

from svod.compile.lower.program import PhaseSpec
from svod.core.cost.groups.device import device_of, resident_groups
from svod.core.machine.target import Target


@dataclass(frozen=True)
class PhaseResources:
    """The resources of a phase. `threads`: threads of a group. `shared`: bytes of shared memory of a group, including the bytes that a
    launch requests. `registers` per thread, and bytes of its `stack` and of spills: None if the compiler does not report them.

    `resident`: groups that a unit (SM) runs at the same time. `occupancy`: their threads, rounded up to whole subgroups, divided by the
    maximum that a unit runs. Both are None if the registers or the limits of a unit are unknown."""

    symbol: str
    threads: int
    shared: int
    registers: int | None = None
    stack: int | None = None
    spill_stores: int | None = None
    spill_loads: int | None = None
    resident: int | None = None
    occupancy: float | None = None

    def to_data(self) -> dict[str, Any]:
        """Return plain data."""
        return asdict(self)


def resources_of(target: Target, phase: PhaseSpec, threads: int, registers: int | None = None, stack: int | None = None,
                 spill_stores: int | None = None, spill_loads: int | None = None) -> PhaseResources:
    """Return the resources of a phase with groups of `threads` threads, with the occupancy of a unit of the target."""
    resident = occupancy = None
    if registers is not None and target.unit_threads:
        device = device_of(target)
        resident = resident_groups(device, threads, registers, phase.shared_bytes)
        occupancy = resident * device.whole(threads) / device.unit_threads
    return PhaseResources(phase.symbol, threads, phase.shared_bytes, registers, stack, spill_stores, spill_loads, resident, occupancy)


def most(phases: Iterable[PhaseResources], what: str) -> int | None:
    """Return the largest value of the figure `what` over several phases; None if none is known."""
    return max((figure for p in phases if (figure := getattr(p, what)) is not None), default=None)


def least_occupancy(phases: Iterable[PhaseResources]) -> float | None:
    """Return the lowest occupancy of the phases; None if none is known."""
    return min((p.occupancy for p in phases if p.occupancy is not None), default=None)
