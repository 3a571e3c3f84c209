"""What a state costs on a target that launches grids of groups of threads, read from its loop nest without lowering it.

Per phase: the instructions of a group, the bytes that it moves through the first cache, through shared memory, from the second cache and
from memory, and how long a single thread waits. Each is turned into cycles of a unit, or of the device; the phase takes the longest of
them and a share of the others, and the launch. The prediction ranks states; it does not promise a time.
"""
from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from math import prod
from typing import NamedTuple

from svod.core.cost.cost import Cost
from svod.core.cost.footprint import bank_turns, lane_granules, line_turns, shared_granules, touched_bytes, turns_of, waves_of
from svod.core.cost.groups.device import (
    ALONE_BYTES,
    ARITHMETIC,
    BEGIN,
    DRAINED,
    FAR,
    FIRST_BYTES,
    LAUNCH,
    LINE,
    NEAR,
    ROW_APART,
    SECOND_BYTES,
    SECTOR,
    SHARED,
    STEP,
    Device,
    device_of,
    resident_groups,
)
from svod.core.cost.groups.once import OnceInPhase
from svod.core.cost.groups.stage_shape import StageShape, positions_of, steps_of
from svod.core.cost.groups.tiles import LATENCY, WORD, held_tiles
from svod.core.cost.work import block_ends, kind_of, masks_of
from svod.core.ir.combiner import get_combiner
from svod.core.ir.dtype import dtypes
from svod.core.kernel.group_memory.copy import ASYNC_BYTES, UNROLLED_TURNS, evenly
from svod.core.kernel.groups import (
    combining_threads,
    exchanged_bytes,
    exchanging_threads,
    group_of,
    phase_of,
    reducers_of,
    stage_threads,
)
from svod.core.kernel.intrinsics import QUAD, exchanges_results, held_layout, normal_power, shuffles_of, stored_node
from svod.core.kernel.kernel import LinearIndex, Node, ReduceNode, ResolvedStage
from svod.core.kernel.layout import Layout, area_bytes
from svod.core.kernel.loop_nest import LoopNest, StageNest, copied_ahead, copied_width, loop_nest, products_under_way, stored_bytes
from svod.core.kernel.placement import is_computed_once, vector_width
from svod.core.kernel.scheduler import DOT, GROUP, LOCAL, LOOP, UNROLL, UPCAST, Derived, Scheduler
from svod.core.machine.levels import MemorySpace
from svod.errors import KernelOptError

_OVERLAP = 0.2          # the share that is not hidden of what does not bound a phase
_ITERATION = 4.0        # instructions of one iteration's bookkeeping
_OPERATIONS = (1.0, 1.5, 8.0, 14.0)     # instructions of each OperationKind
_MASK = 2.0             # instructions for the condition of an access
_OWN = 24               # registers of a thread beside values: addresses, counters
_BLOCK_END = 2.0        # instructions of an accumulator at the end of a block of a long sum
_SPILL = 4.0            # instructions' worth of a register that lives in memory, each iteration
_TOGETHER = 8           # threads that fill a line with the widest accesses
_KEPT = 0.75            # the share of a cache that data may take and still be kept
_IN_FLIGHT = 4.0        # iterations of a loop whose loads a thread has under way at once
_BARRIER = 40.0         # cycles
_AT_THE_SAME_TIME = 0.5 # the share of products that a group does while another one computes something else
_GROUP = 20.0           # cycles until a unit has begun one more group
_EXCHANGED = 2          # barriers of one exchange of partial results
_COMBINED = {"ARGMAX": (4.0, 4.0), "ARGMIN": (4.0, 4.0), "EXPSUM": (20.0, 5.0, 5.0)}     # instructions that combine each component of two
_EXCHANGED_WORD = 4.0   # instructions of a word that threads exchange before it is stored: of four, four exchanges and twelve choices
_PACKED = 128           # single threads that run as one group on hardware
_ROUNDING = 2.0         # instructions that round a factor before its products
_ADDRESSES = 3          # registers of an asynchronous copy
_POWER = 4.0            # instructions' worth of a power of two that is an instruction: few threads of a subgroup at a time
_ROW = 8.0              # instructions of a row that is copied at once: its addresses, what is expected, the copy


@dataclass
class Access:
    """An access of a stage: of an argument or temporary (`limit`: its bytes), or of shared memory (`limit`: 0)."""

    coefs: tuple[tuple[int, int], ...]      # (local axis, bytes)
    width: int                              # bytes of one instruction
    times: float                            # instructions of one thread while the loops around the stage stand still
    depth: int                              # serial loops outside of which it stands
    limit: int
    itemsize: int
    irregular: bool = False
    is_store: bool = False
    slot: int = -1                          # the argument that is loaded


@dataclass
class Phase:
    """What one phase has used, per group and in all."""

    groups: float
    threads: int
    registers: int = 0
    ahead: int = 0                  # registers of what is copied ahead by way of them
    held: int = 0                   # registers of stages that stay with the threads that hold them
    shared: int = 0
    instructions: float = 0.0       # instructions of one group, by single threads
    products: float = 0.0           # the part of `instructions` in stages with matrix instructions
    beside: float = 0.0             # and those of other stages that are no copies
    first: float = 0.0              # bytes through the first cache, by one group, sectors whole
    turns: float = 0.0              # accesses to shared memory, one after the other, by one group
    second: float = 0.0             # bytes from the second cache, of one group
    memory: float = 0.0             # bytes from memory, of all groups
    latency: float = 0.0            # cycles of one thread that depend on each other
    blocks: float = 0.0             # iterations of a loop whose copies run ahead
    block: int = 0                  # bytes of the copies of one of them
    copied_ahead: int = 1           # iterations that copies run ahead
    drained: float = 0.0            # cycles in which no product is under way, of one group
    last: float = 0.0               # bytes that a group moves outside of the loops of its tiles


class PhaseCost(NamedTuple):
    """What one phase costs: `cycles` of the device, those of the phase that combines parts of its sums after it; the rest as in `Cost`."""

    cycles: tuple[float, ...] = ()
    moved: float = 0.0
    flops: float = 0.0
    accumulators: int = 0
    scratch: int = 0
    multiply_adds: float = 0.0          # multiply-adds of the stage with most of them
    loads_per_multiply_add: float = 0.0


def group_cost(state: Scheduler) -> Cost:
    """The predicted cost of a state on a target with groups, remembered on it: `cycles` of the device. Raises KernelOptError when its
    placements contradict each other, or a group stages more than its shared memory holds."""
    return GROUP_COST.of(state)


def _group_cost(state: Scheduler) -> Cost:
    nest = loop_nest(state)
    return cost_of_phases([PhasePricer(state, nest, root).price() for root in nest.placement.roots])


GROUP_COST = Derived(_group_cost)


def cost_of_phases(phases: Sequence[PhaseCost]) -> Cost:
    """The cost of phases that run one after the other."""
    most = max(phases, key=lambda p: p.multiply_adds)
    return Cost(sum([c for p in phases for c in p.cycles]), max([p.accumulators for p in phases]), most.loads_per_multiply_add,
                sum([p.scratch for p in phases]), sum([p.flops for p in phases]), sum([p.moved for p in phases]))


class PhasePricer:
    """Prices the phase that stores stage `root`. `nest`: of its stages, and of those of other phases that they read."""

    def __init__(self, state: Scheduler, nest: LoopNest, root: int) -> None:
        self.state, self.nest, self.root, self.device = state, nest, root, device_of(state.target)
        self.loaded: set[tuple[int, float, float]] = set()      # (argument, bytes of a group, bytes of all) that stages have loaded
        self.flops = 0.0
        self.accumulators = self.scratch = 0
        self.most_multiply_adds, self.loads_per_multiply_add = 0.0, 0.0

    def price(self) -> PhaseCost:
        """The cost; none for a phase that is computed before a plan runs. Raises KernelOptError as `group_cost` does."""
        if is_computed_once(self.state, self.nest.placement, self.root):
            return PhaseCost()
        phases, split = [self.phase()], self.state.split_reduce
        if split is not None and self.state.kernel.axes[split.axis].stage == self.root:
            phases.append(combining_phase(self.state, self.nest.stages[self.root].r, split.parts))
        return PhaseCost(tuple([phase_cycles(self.device, phase) for phase in phases]), sum([phase.memory for phase in phases]), self.flops,
                         self.accumulators, self.scratch, self.most_multiply_adds, self.loads_per_multiply_add)

    # -- phases -----------------------------------------------------------------------------------------
    def phase(self) -> Phase:
        """What the phase uses."""
        state, placement, root = self.state, self.nest.placement, self.root
        group = group_of(state, placement, root)
        inside = [s for s in self.nest.stages if phase_of(placement, s) == root]
        staged = sum([self._staged_bytes(self.nest.stages[s]) for s in inside if self.nest.stages[s].space is MemorySpace.SHARED])
        if staged > state.target.shared_bytes:
            raise KernelOptError(f"staged values take {staged} bytes of shared memory; the target has {state.target.shared_bytes}")
        shapes = {s: StageShape(state, self.nest, s, root, group) for s in inside}
        phase = Phase(float(prod([run.times for run in shapes[root].grid])), group.threads)
        once = OnceInPhase()
        counters = {s: StageCounter(state, self.nest, shapes[s], once.known(shapes[s])) for s in inside}
        wanted = [(shapes[s], self.count(phase, shapes[s], counters[s])) for s in inside]
        if phase.held:      # beside what the stage that the phase stores has summed up
            phase.registers += phase.held
        phase.registers += phase.ahead
        beyond = max(0, min(phase.ahead, phase.registers - self.device.registers_per_thread))
        phase.instructions += phase.threads * phase.blocks * _SPILL * beyond
        resident = resident_groups(self.device, phase.threads, phase.registers, phase.shared)
        for shape, accesses in wanted:
            self._traffic(phase, shape, accesses, resident)
        return phase

    def _staged_bytes(self, stage: StageNest) -> int:
        """Bytes of shared memory that a staged value takes, all of its buffers."""
        assert stage.layout is not None
        itemsize = stored_bytes(self.state, self.nest.layouts, stage.r.stage.index)
        return area_bytes(stage.layout, itemsize * stage.layout.size) * stage.buffers

    def _exchange(self, phase: Phase, shape: StageShape, results: int) -> None:
        """Count what threads do that share the reductions of a stage, of so many results at a time: neighbours exchange registers in a
        tree; what is left goes to shared memory, where each thread reads all of it."""
        s, times = shape.stage.r.stage.index, shape.times
        own = stage_threads(self.state, self.nest.placement, phase_of(self.nest.placement, s))[s]
        lanes = exchanging_threads(self.state.target, own, phase.threads)
        steps, left = lanes.bit_length() - 1, own.reducers // lanes
        phase.latency += times * steps * SHARED
        phase.instructions += times * steps * phase.threads * results * 2.0
        if left > 1:
            phase.shared += exchanged_bytes(self.state, self.nest.placement, s, phase.threads)
            phase.latency += times * (_EXCHANGED * _BARRIER + left * STEP + SHARED)
            phase.instructions += times * (left * phase.threads * results * (self.device.access(1.0, shared=True) + 1.0)
                                           + _EXCHANGED * self.device.barrier(phase.threads))

    def _is_waited_for(self, shape: StageShape, counter: StageCounter) -> bool:
        """Whether threads wait for what a stage loads. A copy that runs ahead is started and left alone, or stores its few loads later."""
        if shape.stage.buffers == 1:
            return True
        is_async = self.state.target.has_async_copies and all(a.width in ASYNC_BYTES for a in counter.accesses)
        return not (is_async or shape.stage.bulk_rows or counter.body <= UNROLLED_TURNS)

    # -- one stage -----------------------------------------------------------------------------------------
    def count(self, phase: Phase, shape: StageShape, counter: StageCounter) -> list[Access]:
        """Count the instructions of a stage into its phase. Returns its accesses of memory."""
        counter.count()
        times, s = shape.times, shape.stage.r.stage.index
        accumulators = counter.accumulators
        phase.registers = max(phase.registers, _OWN + int(counter.registers))
        spilled = max(0.0, _OWN + counter.registers - self.device.registers_per_thread)
        if spilled and counter.tiles is not None and counter.tiles.dot.reads_shared:
            spilled = accumulators      # products wait for each other, and each finds all registers in place
        if counter.tiles is not None and counter.tiles.dot.reads_shared and not products_under_way(self.state, self.nest):
            phase.drained += times * prod([c for a, c in counter.own if a >= counter.outs]) * DRAINED
        threads = shape.num_threads
        own = threads * times * (counter.instructions + _SPILL * spilled * shape.body)
        phase.instructions += own
        if counter.tiles is not None:
            phase.products += own
        elif not shape.is_shared_copy:
            phase.beside += own
        phase.turns += times * counter.turns
        phase.first += times * counter.private
        if self._is_waited_for(shape, counter):
            phase.latency += times * counter.latency
        if reducers_of(self.state, s) > 1:
            self._exchange(phase, shape, sum([len(red.values) for red in counter.r.reductions]) * prod(counter.positions[:counter.outs]))
        for _ in shuffles_of(self.state, s):
            phase.latency += times * SHARED
            phase.instructions += times * threads * counter.rows * 2.0
        if shape.stage.space is MemorySpace.HELD and not shape.is_of_group:
            # what becomes an operand has half as many registers soon
            results = accumulators if counter.tiles is not None else counter.rows
            phase.held += int(results if s in self.nest.placement.stage(self.root).reads else results / 2)
        if shape.stage.space is MemorySpace.SCRATCH:
            self.scratch += stored_bytes(self.state, self.nest.layouts, s) * prod(shape.stage.region)
        elif shape.stage.space is MemorySpace.SHARED:
            size = self._staged_bytes(shape.stage)
            phase.shared += size
            barriers = times * (_EXCHANGED if shape.stage.buffers == 1 else 1)
            phase.latency += barriers * _BARRIER
            phase.instructions += barriers * self.device.barrier(phase.threads)
            if shape.stage.buffers > 1:
                phase.drained += times * ROW_APART * min(shape.stage.bulk_rows, self.device.subgroup)
                phase.blocks, phase.copied_ahead = max(phase.blocks, times), copied_ahead(self.state, self.nest)
                phase.block += size // shape.stage.buffers
                phase.ahead += self._registers_ahead(shape.stage, size // shape.stage.buffers, phase.threads)
        self.accumulators = max(self.accumulators, int(accumulators))
        self.flops += 2.0 * counter.multiply_adds * times * threads * phase.groups
        if counter.multiply_adds > self.most_multiply_adds:
            self.most_multiply_adds = counter.multiply_adds
            self.loads_per_multiply_add = counter.loads / counter.multiply_adds
        return counter.accesses

    def _registers_ahead(self, stage: StageNest, nbytes: int, threads: int) -> int:
        """Registers of a thread for its part of a copy that runs ahead: of what it copies, or of the addresses of asynchronous copies."""
        if not self.state.target.has_async_copies:
            return -(-nbytes // (WORD * threads))
        return 0 if stage.bulk_rows else _ADDRESSES * -(-nbytes // (self.state.target.vector_bytes * threads))

    def _traffic(self, phase: Phase, shape: StageShape, accesses: Sequence[Access], resident: int) -> None:
        """Count what a stage's accesses move."""
        device, lanes = self.device, min(self.device.subgroup, shape.num_threads)
        subgroups = -(-shape.num_threads // device.subgroup)
        steady = [self._footprints(shape, a) for a in accesses]
        share = device.first * _KEPT / resident
        has_tiles = shape.stage.r.stage.index in self.nest.layouts.dots and not device.is_software
        for a, footprints in zip(accesses, steady, strict=True):
            sectors = lanes if a.irregular else lane_granules(steps_of(shape.threads, a.coefs), lanes, a.width, SECTOR)
            asked = shape.times * a.times * subgroups * sectors * SECTOR
            is_tile = a.width > LINE // _TOGETHER       # the threads of a subgroup have parts of one access
            turns = 1 if device.is_software or is_tile else lanes if a.irregular else \
                line_turns(steps_of(shape.threads, a.coefs), lanes, a.width, LINE)
            phase.first += max(asked, shape.times * a.times * subgroups * turns * FIRST_BYTES)
            moved = footprints[-1]
            for k in range(len(shape.serial) - 1, -1, -1):
                kept = sum([f[k + 1] for f in steady]) <= share
                if k < a.depth or shape.is_outside(k):
                    moved *= footprints[k] / footprints[k + 1] if kept else shape.serial[k].times
            keeps = device.is_software or is_tile or not a.is_store     # the first cache of hardware keeps no stores
            bytes_moved = min(moved, asked) if keeps else asked
            phase.second += bytes_moved
            phase.last += bytes_moved if has_tiles and a.depth == 0 else 0.0
            phase.memory += self._from_memory_once(phase, shape, a, footprints[0], resident)

    def _footprints(self, shape: StageShape, a: Access) -> list[float]:
        """Bytes that a group touches inside the first k serial loops, for k from 0 (all of them) to all (one iteration)."""
        if a.irregular:
            one = float(shape.num_threads * SECTOR * a.times / max(1.0, prod(run.times for run in shape.serial)))
            sizes = [one]
            for run in reversed(shape.serial):
                sizes.append(min(sizes[-1] * run.times, float(max(a.limit, SECTOR))))
            return sizes[::-1]
        runs = [*shape.threads, *shape.expanded]
        sizes = [touched_bytes(steps_of(runs, a.coefs), a.itemsize, a.limit, SECTOR)]
        for run in reversed(shape.serial):
            runs.append(run)
            sizes.append(touched_bytes(steps_of(runs, a.coefs), a.itemsize, a.limit, SECTOR))
        return sizes[::-1]

    def _from_memory_once(self, phase: Phase, shape: StageShape, a: Access, of_group: float, resident: int) -> float:
        """`_from_memory`, or nothing where another stage of the group has loaded the same and the second cache keeps it for all groups."""
        found = self._from_memory(phase, shape, a, of_group, resident)
        if a.slot < 0 or self.device.is_software:
            return found
        before, same = self.loaded, (a.slot, of_group, found)
        at_once = min(phase.groups, resident * self.device.units)
        if same in before and of_group * at_once <= self.device.second * _KEPT:
            return 0.0
        before.add(same)
        return found

    def _from_memory(self, phase: Phase, shape: StageShape, a: Access, of_group: float, resident: int) -> float:
        """Bytes that come from memory in all: what a wave of groups shares is read once, and stays where the second cache holds it."""
        if a.irregular:
            return min(of_group * phase.groups, float(a.limit))
        inside = waves_of([run.times for run in shape.grid], resident * self.device.units)
        runs = [*shape.threads, *shape.expanded, *shape.serial]
        wave = [run._replace(times=n) for run, n in zip(shape.grid, inside, strict=True)]
        of_wave = touched_bytes(steps_of([*runs, *wave], a.coefs), a.itemsize, a.limit, SECTOR)
        of_all = touched_bytes(steps_of([*runs, *shape.grid], a.coefs), a.itemsize, a.limit, SECTOR)
        if a.is_store and not self.device.is_software:      # what is stored in parts is read before
            of_all *= 1.0 + shared_granules(steps_of(runs, a.coefs), steps_of(shape.grid, a.coefs), a.itemsize, SECTOR)
        return of_all if of_all <= self.device.second * _KEPT else max(of_all, of_wave * phase.groups / prod(inside))


def combining_phase(state: Scheduler, r: ResolvedStage, parts: int) -> Phase:
    """The phase that combines the partial results of a reduction cut into parts: a thread or a subgroup for each vector of results."""
    outputs = float(prod([state.kernel.axes[a].extent for a in r.stage.outs]))
    size = sum(d.itemsize for red in r.reductions for d in red.dtypes)
    width = vector_width(state, r)
    vectors = -(-outputs // width)
    threads = combining_threads(state.target, int(outputs) // width, parts)
    together = 1 if threads > 1 or device_of(state.target).is_software else int(min(_PACKED, vectors))
    phase = Phase(-(-vectors // together), threads * together, registers=_OWN + 2 * width)
    phase.instructions = together * parts * 2.0 * width
    phase.first = phase.second = float(parts * max(SECTOR if outputs > 1 else 0, together * size * width))
    phase.memory = max(0.0, parts * outputs * size - device_of(state.target).second)
    phase.latency = NEAR * max(1.0, parts / threads / _IN_FLIGHT) + threads.bit_length() * SHARED
    return phase


def _ends(phase: Phase, block: float) -> float:
    """Cycles of the groups that run at once in which none multiplies, where tiles are multiplied: until the first block is there, and
    behind the last one; where no copy runs ahead, all that is waited for. `block`: cycles until the copies of an iteration are there."""
    if not phase.last:
        return 0.0
    return (block if phase.blocks else phase.latency) + FAR + phase.last / SECOND_BYTES


def phase_cycles(device: Device, phase: Phase) -> float:
    """Cycles of the device for a phase."""
    resident = resident_groups(device, phase.threads, phase.registers, phase.shared)
    busy = min(phase.groups, device.units)
    per_unit = -(-phase.groups // device.units)         # groups that the unit with most of them runs
    at_once = min(per_unit, resident)
    wasted = device.whole(phase.threads) / phase.threads
    lanes = ARITHMETIC if device.is_software else min(ARITHMETIC, at_once * device.whole(phase.threads))     # one has a part of it
    at_the_same_time = _AT_THE_SAME_TIME * min(phase.products, phase.beside) if at_once > 1 else 0.0
    arithmetic = per_unit * (phase.instructions - at_the_same_time) * wasted / lanes
    first = per_unit * (phase.first / FIRST_BYTES + phase.turns)
    second = max(phase.groups * phase.second / (SECOND_BYTES * device.units), per_unit * phase.second / ALONE_BYTES)
    memory = max(phase.memory / (device.memory * device.units), phase.memory / (ALONE_BYTES * busy))
    rounds = -(-per_unit // at_once)
    latency = 0.0 if device.is_software else rounds * phase.latency     # a processor goes on with the next access
    block = FAR + at_once * phase.block / SECOND_BYTES      # until the copies of an iteration are there
    copied = 0.0 if device.is_software else rounds * phase.blocks * block / phase.copied_ahead
    arithmetic += per_unit * _GROUP + rounds * phase.drained
    ends = rounds * _ends(phase, block)
    parts = (arithmetic, first, second, memory, latency)
    longest = max(parts)
    begun = 0.0 if device.is_software else phase.groups * BEGIN        # meanwhile groups before it do all of that
    return LAUNCH + max(begun, ends + max(longest, copied) + _OVERLAP * (sum(parts) - longest))


class StageCounter:
    """Counts the instructions of one thread in a stage, while the loops around it stand still. `known`: nodes whose values are there."""

    def __init__(self, state: Scheduler, nest: LoopNest, shape: StageShape, known: Collection[int] = ()) -> None:
        self.known = known
        self.state, self.nest, self.shape, self.device = state, nest, shape, device_of(state.target)
        self.stage, self.r = shape.stage, shape.stage.r
        self.outs = len(self.r.stage.outs)
        self.width = copied_width(state, nest.layouts, self.r)
        self.own = [(a, run.times) for a, run in zip(shape.axes_of_serial, shape.serial, strict=True) if a >= 0]
        self.runs_of_loop = [1.0]
        for _, count in self.own:
            self.runs_of_loop.append(self.runs_of_loop[-1] * count)
        self.body = self.runs_of_loop[-1]
        self.positions = [1] * len(self.stage.axes)     # side by side, per axis
        self.upcast = 1
        for a, group in enumerate(self.stage.axes):
            for p in group:
                if p.role not in (LOOP, DOT, LOCAL, GROUP):
                    self.positions[a] *= p.extent
                    self.upcast *= p.extent if p.role == UPCAST else 1
        self.lanes = self.stage.num_lanes
        self.tiles = held_tiles(nest.layouts.dots.get(self.r.stage.index))
        self.elements = [1] * len(self.stage.axes)      # of a tile that HOLD has laid out, those that a thread has, per axis
        self._hold()
        if shape.is_shared_copy and shape.expanded:
            self.lanes = self.positions[self.stage.vector] = shape.expanded[0].times
        self.gaps = self.device.gaps(reducers_of(state, self.r.stage.index))
        self.instructions = self.turns = self.latency = self.multiply_adds = self.loads = self.private = 0.0
        self.stored = 0.0           # the part of the instructions that stores
        self.accumulators = self.registers = 0.0
        self.waits = 0.0            # cycles of one innermost iteration that wait for loads
        self.accesses: list[Access] = []

    def _hold(self) -> None:
        fragment, chosen = held_layout(self.state, self.r.stage.index), self.state.dots[self.r.stage.index]
        if fragment is None or chosen is None:
            return
        for side, axis in enumerate((chosen.rows, chosen.columns)):
            a = self.r.axes.index(axis)
            self.elements[a] = prod([d.extent for d in fragment.elements if (d.rows, d.columns)[side]])
            self.positions[a] *= self.elements[a]

    @property
    def rows(self) -> float:
        """Results of a thread, whatever it reduces side by side."""
        return float(prod(self.positions[:self.outs]))

    def count(self) -> None:
        skip = {*masks_of(self.r), *self.known}
        packed = self.nest.layouts.packed.get(self.r.stage.index)
        if packed is not None and stored_node(self.r, packed) != self.r.value:
            skip.add(self.r.value)      # stored before it is made wide
        self._reductions(skip)
        for i, n in enumerate(self.r.nodes):
            if self.state.target.has_pow2 and normal_power(self.r, n) >= 0:
                skip.update((i, n.src[0]))      # the instruction does it
        for i, n in enumerate(self.r.nodes):
            if i in skip or n.dtype == dtypes.index:
                continue
            if n.kind == "load" and n.linear is not None:
                self._load(n, n.linear)
            elif n.kind == "read":
                self._read(n, self.tiles.number(i) if self.tiles is not None else -1)
            elif n.kind in ("alu", "cast"):
                weight = _POWER if n.op == "EXP2" and n.dtype == dtypes.float32 and self.state.target.has_pow2 else _OPERATIONS[kind_of(n)]
                self.instructions += weight * self._runs(n.deps)
        before = self.instructions
        self._store()
        self.stored = self.instructions - before
        if self.r.reductions:
            self.accumulators = sum(self._side_by_side(red, c, UPCAST) for red in self.r.reductions for c in range(len(red.values)))
        if self.tiles is not None:
            self.accumulators *= self.tiles.results.num_elements
        self.registers = self.accumulators * max(1.0, self.r.lanes_bytes / 4) + self._beside()
        self.instructions += _ITERATION * sum(self.runs_of_loop[1:]) if self.stage.space is not MemorySpace.HELD else 0.0
        self.instructions += _BLOCK_END * block_ends(self.r, self.own, self.stage.axes) * self.accumulators
        serial = prod(c for a, c in self.own if a >= self.outs)
        self.latency += self.body / max(1.0, serial) * (max(0.0, serial - 1.0) * (STEP if self.tiles is None else LATENCY))
        self.latency += self.waits * (1.0 + (self.body - 1.0) / _IN_FLIGHT)

    def _reductions(self, skip: set[int]) -> None:
        """Count what is summed up, and note the products that are part of that."""
        for red in self.r.reductions:
            product = self.r.nodes[red.values[0]]
            if red.combiner == "ADD" and product.kind == "alu" and product.op == "MUL":
                skip.add(red.values[0])
            tile = self.body * prod(self.positions)
            self.multiply_adds += tile * (self.tiles.products if self.tiles is not None else 1.0)
            if self.tiles is not None:
                self.turns += tile * self.shape.num_threads / self.tiles.dot.threads * self.tiles.shared_bytes / FIRST_BYTES
            if len(red.values) == 1:
                self.instructions += tile * (self.tiles.dot.cost(self.state.target) if self.tiles is not None else 1.0)
            else:
                self.instructions += self.body * sum(n * self._side_by_side(red, c) for c, n in enumerate(_COMBINED[red.combiner]))

    def _side_by_side(self, red: ReduceNode, component: int, role: str = "") -> float:
        """Positions side by side, of rows of a role alone, that have a component of a reduction of their own."""
        of = get_combiner(red.combiner).read_for(component)
        axes = {a for c in of for a in self.r.nodes[red.values[c]].deps} if len(of) < len(red.values) else range(len(self.positions))
        loops = [p.extent for a in axes for p in self.stage.axes[a]
                 if (p.role == role if role else p.role not in (LOOP, DOT, LOCAL, GROUP))]
        return float(prod(loops) * prod([self.elements[a] for a in axes]))

    def _beside(self) -> float:
        """Registers for what is added to accumulators: the loads of one unrolled iteration are all under way at once, each of those under
        a condition with a predicate or an address of its own."""
        if self.tiles is not None:
            return self.tiles.registers(self.positions)
        if not self.r.reductions:
            return float(prod(self.positions))
        return float(sum(prod(self.positions[a] for a in n.deps) * (2 if n.kind == "load" and n.gate >= 0 else 1) for n in self.r.nodes
                         if n.kind in ("load", "read") and any(a >= self.outs for a in n.deps)))

    def _depth(self, deps: tuple[int, ...]) -> int:
        """The number of own serial loops outside of which a value that depends on these axes stands."""
        return max([k + 1 for k, (a, _) in enumerate(self.own) if a in deps], default=0)

    def _runs(self, deps: tuple[int, ...]) -> float:
        """How often a value that depends on these axes is computed, by one thread."""
        held = self.tiles is not None and (self.tiles.plan.rows in deps or self.tiles.plan.columns in deps)
        return self._tile_runs(deps) * (self.tiles.results.num_elements if self.tiles is not None and held else 1.0)

    def _tile_runs(self, deps: tuple[int, ...]) -> float:
        """`_runs` of a whole tile, where a subgroup holds it."""
        return self.runs_of_loop[self._depth(deps)] * prod(self.positions[a] for a in deps)

    def _is_vector(self, coefs: tuple[tuple[int, int], ...], const: int, lanes: int) -> bool:
        """Whether the lanes of the vector axis are beside each other, and each vector begins at a multiple of its size."""
        axis = self.stage.vector
        loop = self.stage.vector_loop
        if axis < 0 or lanes < 2 or not (self.shape.is_shared_copy or (loop is not None and loop.stride == 1)):
            return False
        return dict(coefs).get(axis) == 1 and not const % lanes and not any(c % lanes for a, c in coefs if a != axis)

    def _elements_of(self, coefs: tuple[tuple[int, int], ...], const: int) -> int:
        """Elements of one instruction of an access: those of a vector, or of a row of a square that is turned in registers."""
        for width in (self.width, self.width // 2, self.width // 4):
            if width > 1 and self.lanes % width == 0 and (self._is_vector(coefs, const, width) or self._is_turned(coefs, const, width)):
                return width
        return 1

    def _is_turned(self, coefs: tuple[tuple[int, int], ...], const: int, lanes: int) -> bool:
        """Whether a different axis is contiguous over a full vector: `transpose_squares` then makes the access wide."""
        if lanes != min(self.width, self.lanes) or not dict(coefs).get(self.stage.vector):
            return False
        return not const % lanes and any(
            c == 1 and a != self.stage.vector and not any(other % lanes for b, other in coefs if b != a)
            and any(p.stride == 1 and p.extent % lanes == 0 and p.role in (UPCAST, UNROLL) for p in self.stage.axes[a]) for a, c in coefs)

    def _instructions_of(self, deps: tuple[int, ...], coefs: tuple[tuple[int, int], ...], const: int) -> tuple[float, int]:
        """(instructions of one thread, elements of each) of an access."""
        width = self._elements_of(coefs, const)
        return (self._runs(deps) / width, width) if width > 1 else (self._runs(deps) * self._distinct(deps, coefs), 1)

    def _distinct(self, deps: tuple[int, ...], coefs: tuple[tuple[int, int], ...]) -> float:
        """The share of the positions side by side that touch an element of their own: three taps of eight results beside each other read
        ten elements, not 24."""
        by_step: dict[int, list[int]] = {}
        for a, c in coefs:
            if c and a in deps:
                by_step.setdefault(abs(c), []).append(self.positions[a])
        return prod((1 + sum(n - 1 for n in own)) / prod(own) for own in by_step.values())

    def _load(self, n: Node, linear: LinearIndex) -> None:
        size = n.dtype.itemsize
        even = evenly(self.r, linear)
        irregular, linear = even is None, even or linear
        count, elements = self._runs(n.deps), 1
        if self.shape.is_shared_copy and self.shape.expanded and self.stage.vector in n.deps:
            count, elements = count / self.lanes, self.lanes
        elif not linear.atoms and (n.gate < 0 or self.stage.vector not in self.r.nodes[n.gate].deps):
            count, elements = self._instructions_of(n.deps, linear.coefs, linear.const)
        rows = self.stage.bulk_rows
        self.instructions += -(-rows // self.shape.num_threads) * _ROW if rows else \
            count * (self.device.access(elements) * self.gaps + (_MASK if n.gate >= 0 else 0.0))
        self.loads += count
        depth = self._depth(n.deps)
        if depth == len(self.own):
            self.waits = max(self.waits, FAR)
        else:
            self.latency += FAR * self.runs_of_loop[depth]
        limit = self.state.kernel.params[n.arg].arg.size * size
        self.accesses.append(Access(tuple((a, c * size) for a, c in linear.coefs), size * elements, count, self.shape.outside + depth,
                                     limit, size, irregular, slot=n.arg))

    def _read(self, n: Node, operand: int) -> None:
        """A read of a staged value, from where it lies. `operand`: of which tiles are read, or -1."""
        source = self.nest.stages[n.arg]
        if source.space in (MemorySpace.REGISTER, MemorySpace.HELD):
            return
        layout, size = source.layout, stored_bytes(self.state, self.nest.layouts, n.arg)
        assert layout is not None
        coefs: dict[int, int] = {}
        for lin, stride in zip(n.dims, layout.strides, strict=True):
            for a, c in lin.coefs:
                coefs[a] = coefs.get(a, 0) + c * stride
        flat = tuple(sorted(coefs.items()))
        if self.tiles is not None and operand >= 0:
            self._read_tile(n, operand, layout, tuple((a, c * size) for a, c in flat), source.space)
            return
        count, elements = self._instructions_of(n.deps, flat, 0)
        gaps = self.gaps if source.space is MemorySpace.GLOBAL else 1.0
        self.instructions += count * self.device.access(elements, source.space is MemorySpace.SHARED) * gaps
        self.loads += count
        lanes = min(self.state.target.group_threads, device_of(self.state.target).subgroup, self.shape.num_threads)
        subgroups = -(-self.shape.num_threads // device_of(self.state.target).subgroup)
        inbytes = tuple((a, c * size) for a, c in flat)
        depth = self._depth(n.deps)
        if source.space is MemorySpace.SHARED:
            self.turns += count * subgroups * bank_turns(steps_of(self.shape.threads, inbytes), lanes, size * elements)
            self.waits = max(self.waits, SHARED)
        elif source.space is MemorySpace.SCRATCH:       # each thread has its own; elements of neighbouring threads lie beside each other
            self.private += count * subgroups * lanes * size * elements
            self.waits = max(self.waits, SHARED)
        else:
            self.waits = max(self.waits, NEAR)
            self.accesses.append(Access(inbytes, size * elements, count, self.shape.outside + depth, layout.size * size, size))

    def _read_tile(self, n: Node, number: int, layout: Layout, inbytes: tuple[tuple[int, int], ...], space: MemorySpace) -> None:
        """A read of tiles of an operand."""
        assert self.tiles is not None
        tiles, count = self.tiles, self._tile_runs(n.deps)
        if tiles.dot.reads_shared:      # counted with the products
            self.waits = max(self.waits, SHARED)
            return
        self.loads += count
        self.instructions += count * _ROUNDING * tiles.words(number) if tiles.dot.significand else 0.0
        if space is MemorySpace.SHARED:
            self.instructions += count * tiles.reads(number, layout)
            self.turns += count * -(-self.shape.num_threads // tiles.dot.threads) * tiles.turns(number, layout)
            self.waits = max(self.waits, SHARED)
            return
        self.instructions += count * tiles.words(number) * self.device.access(1.0)
        self.waits = max(self.waits, NEAR)
        size = tiles.dot.operands[number].itemsize
        self.accesses.append(Access(inbytes, tiles.tile_bytes(number), count, self.shape.outside + self._depth(n.deps),
                                     layout.size * size, size))

    def _store(self) -> None:
        """The store of the stage's value."""
        r, stage = self.r, self.stage
        size = stored_bytes(self.state, self.nest.layouts, r.stage.index)
        if stage.space in (MemorySpace.REGISTER, MemorySpace.HELD):
            return
        own = [c for a, c in self.own if a < self.outs]
        runs = float(prod(own)) * prod(self.positions[:self.outs])
        if self.shape.is_cut:
            size = sum(d.itemsize for red in r.reductions for d in red.dtypes)
        if stage.space is MemorySpace.SCRATCH:
            self.instructions += runs * self.device.access(1.0)
            self.private += runs * size * self.shape.num_threads
            return
        if r.store is not None:
            even, limit = evenly(r, r.store), self.state.kernel.params[r.store_slot].arg.size * size
            coefs, const, irregular = (even or r.store).coefs, r.store.const, even is None
        else:
            layout = stage.layout
            assert layout is not None
            coefs, const, irregular, limit = tuple(enumerate(layout.strides)), 0, False, layout.size * size
        deps = tuple(range(self.outs))
        if stage.bulk_rows:     # no instruction of a thread's
            self.turns += prod(stage.region) * size / FIRST_BYTES
            return
        count, elements = runs, 1
        if self.tiles is not None:      # lines of results, each in sectors of its own
            count *= self.tiles.results.num_elements / self.tiles.results.run.extent
            elements = SECTOR // size * self.tiles.results.threads[0].extent
            if exchanges_results(self.state, r, self.tiles.plan):      # a fourth as many stores of whole sectors
                self.instructions += count * _EXCHANGED_WORD
                count, elements = count / QUAD.extent, 2 * elements
        if 0 <= stage.vector < self.outs and (width := self._elements_of(coefs, const)) > 1:
            count, elements = runs / width, width
        self.instructions += count * self.device.access(elements)
        inbytes = tuple((a, c * size) for a, c in coefs)
        if stage.space is MemorySpace.SHARED:
            assert stage.layout is not None
            lanes = min(device_of(self.state.target).subgroup, self.shape.num_threads)
            subgroups = -(-self.shape.num_threads // device_of(self.state.target).subgroup)
            places = tuple([stage.layout.place(p) * size for p in positions_of(tuple(self.shape.threads), self.outs, lanes)])
            self.turns += count * subgroups * turns_of(places, size * elements)
            return
        self.accesses.append(Access(inbytes, size * elements, count, self.shape.outside + self._depth(deps), limit, size, irregular, True))
