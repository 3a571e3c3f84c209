"""What the cost model assumes of a target with groups: its units, how many groups fit one, and its rates per clock cycle.

A *unit* is what runs groups: a streaming multiprocessor, a compute unit, an Xe core. Several groups are resident on one at a time, as many
as its threads, registers and shared memory allow; while some wait for memory, others compute.
"""
from __future__ import annotations

from dataclasses import dataclass

from svod.core.machine.target import Target

SECTOR = 32             # bytes that memory and caches move at once
LINE = 128              # bytes of a line: the first cache serves one in a turn, some sectors or all of it


@dataclass(frozen=True)
class Device:
    """The figures of a target that the model reads, and its prices: in cycles of a unit, or in *instructions* of one thread.

    The rates are the same within a factor of 1.5 from sm_75 to sm_100 and on RDNA. Latencies and times of groups were measured on an H200,
    and are taken for all of hardware."""

    subgroup: int                       # threads in lockstep
    units: int
    unit_threads: int                   # resident threads of a unit
    unit_groups: int                    # resident groups of a unit
    registers_per_thread: int
    unit_registers: int
    unit_shared: int                    # bytes
    first: int                          # bytes of a unit's cache
    second: int                         # bytes of the cache of all units
    memory: float                       # bytes of memory per cycle, for each unit
    group_reserved: int = 0             # bytes of a unit's shared memory that each group takes beside its own
    is_software: bool = False

    # rates of one unit
    arithmetic: float = 128.0           # multiply-adds of 32 bits per cycle
    first_bytes: float = 128.0          # bytes per cycle of the first cache, or of shared memory: 32 banks of 4 bytes
    second_bytes: float = 40.0          # bytes per cycle of the second cache, while all units ask for them
    alone_bytes: float = 64.0           # bytes per cycle of the second cache that one unit gets while others are idle
    register_portion: int = 8           # registers of a thread are allotted in such portions
    unit_parts: int = 4                 # parts of a unit, with registers of their own each; a subgroup lives in one

    # latencies in cycles
    far_cycles: float = 600.0           # memory
    near_cycles: float = 250.0          # second cache
    shared_cycles: float = 30.0         # shared memory
    step_cycles: float = 5.0            # one dependent operation
    product_cycles: float = 20.0     # a matrix product, until the next one may add to it
    barrier_cycles: float = 40.0
    drained_cycles: float = 450.0       # from the last product of a block to the first one of the next, where all are waited for
    row_cycles: float = 17.0            # from one row that a subgroup copies at once to the next: 555 for the 32 rows of each of two
    launch_cycles: float = 3000.0       # until the first group of a phase runs
    group_cycles: float = 20.0          # until a unit has begun one more group
    begin_cycles: float = 1.25          # until the device has begun one more group: 262144 groups take 162 µs whatever they do

    # instructions of one thread
    operations: tuple[float, ...] = (1.0, 1.5, 8.0, 14.0)       # of each `OperationKind`
    power_operations: float = 4.0       # a power of two that is an instruction: few threads of a subgroup at a time
    access_operations: float = 2.5      # an access of memory, with the arithmetic for its address
    iteration_operations: float = 4.0   # bookkeeping of one iteration
    mask_operations: float = 2.0        # the condition of an access
    block_end_operations: float = 2.0   # an accumulator at the end of a block of a long sum
    spill_operations: float = 4.0       # a register that lives in memory, each iteration
    exchange_operations: float = 2.0    # a result that neighbours exchange in a step of a tree, and combine
    exchanged_word_operations: float = 4.0      # a word that is exchanged before it is stored: of four, four exchanges and twelve choices
    rounding_operations: float = 2.0    # rounding of a factor before its products
    bulk_row_operations: float = 8.0    # a row that is copied at once: its addresses, the bytes that are expected, the copy

    # overlap
    unhidden_share: float = 0.2         # of all that does not bound a phase
    product_overlap: float = 0.5        # share of products that a group does while another one computes something else
    iterations_in_flight: float = 4.0   # iterations of a loop whose loads a thread has under way at once
    kept_share: float = 0.75            # share of a cache that data may take and still be kept

    # registers and threads
    base_registers: int = 24            # registers of a thread beside values: addresses, counters
    address_registers: int = 3          # registers of an asynchronous copy
    line_threads: int = 8               # threads that fill a line with the widest accesses
    packed_threads: int = 128           # single threads that run as one group on hardware

    # Mesa's software driver goes through the lanes one by one and checks bounds for each: 10 to 20 ns for 8 lanes, twice as much for four
    # elements a lane, beside 0.5 ns of a multiply-add (Zen 5). It runs the vectors of a group one after the other: what threads read that
    # share a row has gaps then, and the processor fetches it ahead less well. Sums of rows of 16 KB, two cores of an EPYC: 40 ns for 8
    # lanes with a row each, 64 with one row, 130 with a part of one.
    software_access_operations: float = 20.0    # an access
    software_element_operations: float = 10.0   # each element of an access
    software_barrier_operations: float = 20.0   # a barrier, of each thread: 10 ns for 8 lanes
    software_gaps: tuple[float, float] = (1.6, 3.2)     # factors on accesses of rows that one vector shares, and several

    def whole(self, threads: int) -> int:
        """Threads of the subgroups that so many threads take."""
        return -(-threads // self.subgroup) * self.subgroup

    def access(self, elements: float, shared: bool = False) -> float:
        """Instructions' worth of an access of so many elements beside each other. Shared memory needs no arithmetic for addresses."""
        if self.is_software:
            return self.software_access_operations + self.software_element_operations * elements
        return 1.0 if shared else self.access_operations

    def gaps(self, parts: int) -> float:
        """By how much accesses of memory cost more where so many threads share a row."""
        return self.software_gaps[parts > self.subgroup] if self.is_software and parts > 1 else 1.0

    def barrier(self, threads: int) -> float:
        """Instructions' worth of a barrier of a group, by single threads: on hardware it is latency alone."""
        return self.software_barrier_operations * self.whole(threads) if self.is_software else 0.0


def device_of(target: Target) -> Device:
    """The figures of a target. What its data do not say is as on most devices."""
    subgroup = target.subgroup or target.software_lanes or min(32, max(1, target.group_threads))
    units = target.units or 64
    memory = target.memory_rate / (target.clock * units) if target.memory_rate and target.clock else 12.0   # as much on most of them
    return Device(subgroup, units, target.unit_threads or max(2 * target.group_threads, subgroup), target.unit_groups or 32,
                  target.registers_per_thread or 255, target.group_registers or 65536,
                  target.unit_shared_bytes or max(target.shared_bytes, 1), target.l1, max(target.l2, target.l3), memory,
                  target.group_reserved_bytes, target.software_lanes > 0)


def resident_groups(device: Device, threads: int, registers: int, shared: int) -> int:
    """Groups of `threads` threads with so many registers each and `shared` bytes that a unit runs at a time; at least one."""
    whole = device.whole(threads)
    allotted = -(-min(registers, device.registers_per_thread) // device.register_portion) * device.register_portion
    subgroups = device.unit_parts * (device.unit_registers // device.unit_parts // (device.subgroup * allotted))
    taken = shared + device.group_reserved
    return max(1, min(device.unit_groups, device.unit_threads // whole, subgroups * device.subgroup // whole,
                      device.unit_shared // taken if taken else device.unit_groups))
