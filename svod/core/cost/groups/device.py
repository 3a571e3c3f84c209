"""What the cost model assumes of a target with groups: its units, how many groups fit one, and its rates per clock cycle.

A *unit* is what runs groups: a streaming multiprocessor, a compute unit, an Xe core. Several groups are resident on one at a time, as many
as its threads, registers and shared memory allow; while some wait for memory, others compute.
"""
from __future__ import annotations

from dataclasses import dataclass

from svod.core.machine.target import Target

SECTOR = 32             # bytes: what memory and caches move at once
LINE = 128              # bytes: of which the first cache serves one in a turn, some sectors or all of it
_ROUNDED = 8            # registers of a thread are allotted in such portions
_PARTS = 4              # parts of a unit, with registers of their own each; a subgroup lives in one

# Rates of one unit per clock cycle, the same within a factor of 1.5 from sm_75 to sm_100 and on RDNA: 128 multiply-adds of 32 bits, 128
# bytes of the first cache or of shared memory (32 banks of 4 bytes); per unit of the device 40 bytes of the second cache and 12 of memory.
ARITHMETIC, FIRST_BYTES, SECOND_BYTES, MEMORY_BYTES = 128.0, 128.0, 40.0, 12.0
ALONE_BYTES = 64.0              # bytes per cycle that one unit gets from the second cache while others are idle
FAR, NEAR, SHARED, STEP = 600.0, 250.0, 30.0, 5.0     # cycles of latency: memory, second cache, shared memory, one dependent operation
LAUNCH = 3000.0                 # cycles until the first group of a phase runs

# What was measured on one device, an H200, and is taken for all of hardware, in cycles.
BEGIN = 1.25                    # until the device has begun one more group: 262144 groups take 162 µs whatever they do
DRAINED = 450.0                 # from the last product of a block to the first one of the next, where all are waited for between them
ROW_APART = 17.0                # from one row that a subgroup copies at once to the next: 555 for the 32 rows of each of two

# Instructions' worth of an access by a thread, and of each of its elements beside. Mesa's software driver goes through the lanes one by one
# and checks bounds for each: 10 to 20 ns for 8 lanes, twice as much for four elements a lane, beside 0.5 ns of a multiply-add (Zen 5).
ACCESS, SOFTWARE_ACCESS, SOFTWARE_ELEMENT = 2.5, 20.0, 10.0
SOFTWARE_BARRIER = 20.0         # cycles of each thread at a barrier in software: 10 ns for 8 lanes
# It runs the vectors of a group one after the other. What threads read that share a row has gaps then, and the processor fetches it ahead
# less well: one vector reads on in the row by its own width, several each leave out what the others read (sums of rows of 16 KB, two cores
# of an EPYC: 40 ns for 8 lanes with a row each, 64 with one row, 130 with a part of one).
SOFTWARE_GAPS = (1.6, 3.2)


@dataclass(frozen=True)
class Device:
    """The figures of a target that the model reads."""

    subgroup: int               # threads in lockstep
    units: int
    unit_threads: int           # resident threads of a unit
    unit_groups: int            # resident groups of a unit
    registers_per_thread: int
    unit_registers: int
    unit_shared: int            # bytes
    first: int                  # bytes of a unit's cache
    second: int                 # bytes of the cache of all units
    memory: float               # bytes of memory per cycle, for each unit
    group_reserved: int = 0     # bytes of a unit's shared memory that each group takes beside its own
    is_software: bool = False

    def whole(self, threads: int) -> int:
        """Threads of the subgroups that so many threads take."""
        return -(-threads // self.subgroup) * self.subgroup

    def access(self, elements: float, shared: bool = False) -> float:
        """Instructions' worth of an access of so many elements beside each other. Shared memory needs no arithmetic for addresses."""
        if self.is_software:
            return SOFTWARE_ACCESS + SOFTWARE_ELEMENT * elements
        return 1.0 if shared else ACCESS

    def gaps(self, parts: int) -> float:
        """By how much accesses of memory cost more where so many threads share a row."""
        return SOFTWARE_GAPS[parts > self.subgroup] if self.is_software and parts > 1 else 1.0

    def barrier(self, threads: int) -> float:
        """Instructions' worth of a barrier of a group, by single threads: on hardware it is latency alone."""
        return SOFTWARE_BARRIER * self.whole(threads) if self.is_software else 0.0


def device_of(target: Target) -> Device:
    """The figures of a target. What its data do not say is as on most devices."""
    subgroup = target.subgroup or target.software_lanes or min(32, max(1, target.group_threads))
    units = target.units or 64
    memory = target.memory_rate / (target.clock * units) if target.memory_rate and target.clock else MEMORY_BYTES
    return Device(subgroup, units, target.unit_threads or max(2 * target.group_threads, subgroup), target.unit_groups or 32,
                  target.registers_per_thread or 255, target.group_registers or 65536,
                  target.unit_shared_bytes or max(target.shared_bytes, 1), target.l1, max(target.l2, target.l3), memory,
                  target.group_reserved_bytes, target.software_lanes > 0)


def resident_groups(device: Device, threads: int, registers: int, shared: int) -> int:
    """Groups of `threads` threads with so many registers each and `shared` bytes that a unit runs at a time; at least one."""
    whole = device.whole(threads)
    allotted = -(-min(registers, device.registers_per_thread) // _ROUNDED) * _ROUNDED
    subgroups = _PARTS * (device.unit_registers // _PARTS // (device.subgroup * allotted))
    taken = shared + device.group_reserved
    return max(1, min(device.unit_groups, device.unit_threads // whole, subgroups * device.subgroup // whole,
                      device.unit_shared // taken if taken else device.unit_groups))
