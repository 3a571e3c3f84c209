"""Resources of phases on a device with groups of threads: their needs, and the share of a unit that they fill."""
from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import Any

from svod.compile.lower.program import PhaseSpec
from svod.core.cost.groups.device import device_of, resident_groups
from svod.core.machine.target import Target


@dataclass(frozen=True)
class PhaseResources:
    """A phase. `threads` of a group; `shared`: bytes that they share, with those that a launch asks for. `registers` of a thread, and bytes
    of its `stack` and of spills: None where the compiler does not say.

    `resident`: groups that a unit runs at a time. `occupancy`: their threads, in whole subgroups, over the most that a unit runs. Both are
    None where the registers or the limits of a unit are not known."""

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
        """Plain data."""
        return asdict(self)


def resources_of(target: Target, phase: PhaseSpec, threads: int, registers: int | None = None, stack: int | None = None,
                 spill_stores: int | None = None, spill_loads: int | None = None) -> PhaseResources:
    """The needs of a phase with groups of `threads` threads, and the groups that a unit of the target runs at a time."""
    resident = occupancy = None
    if registers is not None and target.unit_threads:
        device = device_of(target)
        resident = resident_groups(device, threads, registers, phase.shared_bytes)
        occupancy = resident * device.whole(threads) / device.unit_threads
    return PhaseResources(phase.symbol, threads, phase.shared_bytes, registers, stack, spill_stores, spill_loads, resident, occupancy)


def most(phases: Iterable[PhaseResources], what: str) -> int | None:
    """The largest figure of several phases; None where none is known."""
    return max((figure for p in phases if (figure := getattr(p, what)) is not None), default=None)


def least_occupancy(phases: Iterable[PhaseResources]) -> float | None:
    """The occupancy of the phase that fills a unit least; None where none is known."""
    return min((p.occupancy for p in phases if p.occupancy is not None), default=None)
