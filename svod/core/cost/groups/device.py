"""The figures of a target with groups that the cost model uses: units, resident groups, and rates per clock cycle.

A *unit* runs groups: it is a streaming multiprocessor, a compute unit or an Xe core. Several groups are resident on one at a time, as many
as its threads, registers and shared memory allow; while some wait for memory, others compute.
"""
from __future__ import annotations

from dataclasses import dataclass

from svod.core.machine.target import Target

SECTOR_BYTES = 32           # bytes that memory and caches move at once
DEVICE_LINE_BYTES = 128     # bytes of a cache line; the first cache serves one line per turn


@dataclass(frozen=True)
class Device:
    """The figures of a target that the cost model uses, and its prices: in cycles of a unit, or in *instructions* of one thread.

    The rates are the same within a factor of 1.5 from sm_75 to sm_100 and on RDNA. Latencies and the times to start groups were measured on
    an H200, and are used for all hardware."""

    subgroup: int                       # threads in lockstep
    units: int
    unit_threads: int                   # resident threads of a unit
    unit_groups: int                    # most groups resident on a unit
    registers_per_thread: int
    unit_registers: int
    unit_shared: int                    # bytes of shared memory of a unit
    first: int                          # bytes of a unit's first cache
    second: int                         # bytes of the cache that all units share
    memory: float                       # bytes of memory per cycle for each unit, if all units load
    group_reserved: int = 0             # bytes of a unit's shared memory that each group takes in addition to its own
    is_software: bool = False

    # rates of one unit
    arithmetic: float = 128.0           # multiply-adds of 32 bits per cycle
    first_bytes: float = 128.0          # bytes per cycle of the first cache, or of shared memory: 32 banks of 4 bytes
    second_bytes: float = 40.0          # bytes per cycle of the second cache for one unit, while all units load
    alone_bytes: float = 64.0           # bytes per cycle of the second cache for one unit, while others are idle
    register_portion: int = 8           # registers of a thread are allocated in multiples of this
    unit_parts: int = 4                 # parts of a unit, each with its own registers; a subgroup lives in one part

    # latencies in cycles
    far_cycles: float = 600.0           # latency of memory
    near_cycles: float = 250.0          # latency of the second cache
    shared_cycles: float = 30.0         # latency of shared memory
    step_cycles: float = 5.0            # latency of one dependent operation
    product_cycles: float = 20.0     # latency of a matrix product, until the next one may add to it
    barrier_cycles: float = 40.0
    drained_cycles: float = 450.0       # from the last product of a block to the first one of the next, if all products are waited for
    # from one bulk copy of a row to the next in a subgroup: 555 cycles for 32 rows of each of two operands
    row_cycles: float = 17.0
    launch_cycles: float = 3000.0       # from a launch until the first group of a phase runs
    group_cycles: float = 20.0          # time of a unit to start one more group
    begin_cycles: float = 1.25          # time of the device to start one more group: 262144 empty groups take 162 µs

    # instructions of one thread
    operations: tuple[float, ...] = (1.0, 1.5, 8.0, 14.0)       # price of each `OperationKind`
    power_operations: float = 4.0       # price of POW2: few threads of a subgroup compute it at a time
    access_operations: float = 2.5      # price of an access to memory, with the arithmetic for its address
    iteration_operations: float = 4.0   # price of the bookkeeping of one iteration
    mask_operations: float = 2.0        # price of the condition of an access
    block_end_operations: float = 2.0   # price of an accumulator at the end of a block of a long sum
    spill_operations: float = 4.0       # price per iteration of a register that lives in memory
    exchange_operations: float = 2.0    # price of a result that neighbours exchange and combine in one step of a tree
    # price of combining two results, for each component, by their number of components
    combined_operations: tuple[tuple[float, ...], ...] = ((), (1.0,), (4.0, 4.0), (20.0, 5.0, 5.0))
    # price of a word that is exchanged before it is stored: four exchanges and twelve selects for four words
    exchanged_word_operations: float = 4.0
    rounding_operations: float = 2.0    # price of rounding a factor before its products
    bulk_row_operations: float = 8.0    # price of a bulk copy of a row: its addresses, the expected bytes, the copy

    # overlap
    unhidden_share: float = 0.2         # share of the other resources' time that is added to that of the slowest one
    product_overlap: float = 0.5        # share of the products that overlaps with other work of another group
    iterations_in_flight: float = 4.0   # iterations of a loop whose loads a thread has in flight at once
    kept_share: float = 0.75            # share of a cache that data may take and still be kept

    # registers and threads
    base_registers: int = 24            # registers of a thread for addresses and counters, in addition to values
    address_registers: int = 3          # registers of a thread for one asynchronous copy
    line_threads: int = 8               # threads that fill a cache line with the widest accesses
    packed_threads: int = 128           # threads of a group on hardware, if each thread works alone

    # Mesa's software driver runs the lanes of an access one by one and checks bounds for each: 10 to 20 ns for 8 lanes, twice as much for
    # four elements a lane; a multiply-add takes 0.5 ns (Zen 5). It runs the vectors of a group one after the other. If threads share a row,
    # each vector then reads with gaps, which the processor prefetches less well. Sums of rows of 16 KB on two cores of an EPYC: 40 ns for 8
    # lanes if each lane has a row, 64 ns if they share a row, 130 ns if they share a part of a row.
    software_access_operations: float = 20.0    # price of an access
    software_element_operations: float = 10.0   # additional price of each element of an access
    software_barrier_operations: float = 20.0   # price of a barrier for each thread: 10 ns for 8 lanes
    software_gaps: tuple[float, float] = (1.6, 3.2)     # factors on the price of accesses to a row that one vector, or several, share

    def whole(self, threads: int) -> int:
        """Round `threads` up to whole subgroups."""
        return -(-threads // self.subgroup) * self.subgroup

    def access(self, elements: float, shared: bool = False) -> float:
        """The price, in instructions, of an access to contiguous elements. Shared memory needs no arithmetic for addresses."""
        if self.is_software:
            return self.software_access_operations + self.software_element_operations * elements
        return 1.0 if shared else self.access_operations

    def gaps(self, parts: int) -> float:
        """The factor on the price of accesses to memory if `parts` threads share a row."""
        return self.software_gaps[parts > self.subgroup] if self.is_software and parts > 1 else 1.0

    def barrier(self, threads: int) -> float:
        """The price of a barrier, in instructions summed over the threads of a group; 0 on hardware, where it costs only latency."""
        return self.software_barrier_operations * self.whole(threads) if self.is_software else 0.0


def device_of(target: Target) -> Device:
    """The figures of a target. Figures that the target does not give are set to values of common devices."""
    subgroup = target.subgroup or target.software_lanes or min(32, max(1, target.group_threads))
    units = target.units or 64
    # 12 bytes per cycle and unit are common
    memory = target.memory_rate / (target.clock * units) if target.memory_rate and target.clock else 12.0
    return Device(subgroup, units, target.unit_threads or max(2 * target.group_threads, subgroup), target.unit_groups or 32,
                  target.registers_per_thread or 255, target.group_registers or 65536,
                  target.unit_shared_bytes or max(target.shared_bytes, 1), target.l1, max(target.l2, target.l3), memory,
                  target.group_reserved_bytes, target.software_lanes > 0)


def resident_groups(device: Device, threads: int, registers: int, shared: int) -> int:
    """How many groups a unit runs at a time; at least 1. `threads`: threads of a group; `registers`: registers of a thread; `shared`:
    bytes of shared memory of a group."""
    whole = device.whole(threads)
    allotted = -(-min(registers, device.registers_per_thread) // device.register_portion) * device.register_portion
    subgroups = device.unit_parts * (device.unit_registers // device.unit_parts // (device.subgroup * allotted))
    taken = shared + device.group_reserved
    return max(1, min(device.unit_groups, device.unit_threads // whole, subgroups * device.subgroup // whole,
                      device.unit_shared // taken if taken else device.unit_groups))
