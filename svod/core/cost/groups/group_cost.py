"""Predicts the time of a state on a target that launches grids of groups of threads, from its loop nest, without lowering it.

Per phase: the instructions of a group, the bytes that it moves through the first cache, through shared memory, from the second cache and
from memory, and how long a single thread waits. Each is turned into cycles of a unit, or of the device; the phase takes the longest of them
and a share of the others, and the launch. The prediction ranks states; it does not promise a time.
"""
from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from math import prod

from svod.core.cost.cost import Cost, CostPart, total
from svod.core.cost.footprint import bank_turns, lane_granules, line_turns, shared_granules, touched_bytes, turns_of, waves_of
from svod.core.cost.groups.device import DEVICE_LINE_BYTES, SECTOR_BYTES, Device, device_of, resident_groups
from svod.core.cost.groups.once import OnceInPhase
from svod.core.cost.groups.stage_shape import StageShape, positions_of, steps_of
from svod.core.cost.groups.tiles import REGISTER_BYTES, held_tiles
from svod.core.cost.runs import StageRuns, stage_runs
from svod.core.cost.work import Access, AccessKind, Coefs, StageWork, is_aligned, kind_of
from svod.core.ir.combiner import get_combiner
from svod.core.ir.dtype import dtypes
from svod.core.kernel.group_memory.copy import evenly
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
from svod.core.kernel.layout import area_bytes
from svod.core.kernel.loop_nest import LoopNest, copied_width, loop_nest, stored_bytes
from svod.core.kernel.placement import is_computed_once, vector_width
from svod.core.kernel.scheduler import UNROLL, UPCAST, Derived, Scheduler
from svod.core.machine.levels import MemorySpace
from svod.core.tree.nodes import AheadCopy
from svod.core.tree.passes import loop_tree
from svod.errors import KernelOptError

#: Terms of the cost of a phase.
TERMS = ("instructions", "first cache", "second cache", "memory", "latency", "copies ahead", "first and last blocks", "start of groups",
         "launch")


@dataclass
class Phase:
    """Resources that one phase uses, per group or in all."""

    groups: float
    threads: int
    registers: int = 0
    ahead: int = 0                  # registers of a thread for data of copies that run ahead, if they are not asynchronous
    held: int = 0                   # registers of a thread for stages that stay in registers
    shared: int = 0
    instructions: float = 0.0       # instructions of one group, summed over its threads
    products: float = 0.0           # part of `instructions` that belongs to stages with matrix instructions
    beside: float = 0.0             # part of `instructions` that belongs to other stages, except copies
    first: float = 0.0              # bytes through the first cache, in whole sectors, of one group
    turns: float = 0.0              # accesses to shared memory that are served one after the other, of one group
    second: float = 0.0             # bytes from the second cache, of one group
    memory: float = 0.0             # bytes from memory, of all groups
    latency: float = 0.0            # cycles of one thread in operations that wait for each other
    blocks: float = 0.0             # iterations of the loop whose copies run ahead
    block: int = 0                  # bytes that the copies of one such iteration move
    copied_ahead: int = 1           # how many iterations before their use copies start
    drained: float = 0.0            # cycles of one group in which no product is running
    last: float = 0.0               # bytes that a group moves outside of its loops over products
    accumulators: int = 0           # registers of a thread that live through the reduce loops; the largest number of any stage
    scratch: int = 0                # bytes of scratch memory, of all groups
    flops: float = 0.0              # floating point operations of all groups


@Derived
def group_cost(state: Scheduler) -> Cost:
    """The predicted cost of a state on a target with groups, cached on the state; `cycles` are clock cycles of the device. Raises
    KernelOptError if placements contradict each other, or a group stages more than its shared memory holds."""
    return total([pricer.price() for pricer in phase_pricers(state)])


def group_work(state: Scheduler) -> list[StageWork]:
    """The work of each stage of a state, as one thread does it. Raises KernelOptError as `group_cost` does."""
    return [counter.work for pricer in phase_pricers(state) for counter in pricer.counters()]


def phase_pricers(state: Scheduler) -> list[PhasePricer]:
    """A pricer for each phase of a state. Raises KernelOptError as `group_cost` does."""
    nest = loop_nest(state)
    runs = stage_runs(state.kernel, nest.stages, loop_tree(state))
    return [PhasePricer(state, nest, root, runs) for root in nest.placement.roots]


class PhasePricer:
    """Prices the phase that stores stage `root`. `nest` contains at least the stages of the phase, and the stages of other phases that
    they read. `runs`: how often the loops of the phase's stages run."""

    def __init__(self, state: Scheduler, nest: LoopNest, root: int, runs: Mapping[int, StageRuns]) -> None:
        self.state, self.nest, self.root, self.runs, self.device = state, nest, root, runs, device_of(state.target)
        self.loaded: set[tuple[int, float, float]] = set()      # (argument, bytes of a group, bytes of all groups) of loads counted so far

    def price(self) -> Cost:
        """The cost of the phase, including the combination of partial results; zero for a phase that is computed once, before a plan runs.
        Raises KernelOptError as `group_cost` does."""
        if is_computed_once(self.state, self.nest.placement, self.root):
            return Cost()
        phase, split = self.phase(), self.runs[self.root].parts
        phases = [phase]
        if split:
            phases.append(combining_phase(self.state, self.nest.stages[self.root].r, split))
        name = self.nest.stages[self.root].r.stage.name
        parts = [phase_cost(self.device, p, n) for p, n in zip(phases, (name, f"{name}, combined"), strict=False)]
        return Cost(sum([p.cycles for p in parts]), phase.accumulators, phase.scratch, phase.flops, sum([p.memory for p in phases]),
                    tuple(parts))

    # -- phases -----------------------------------------------------------------------------------------
    def phase(self) -> Phase:
        """Count the resources of the phase."""
        state, placement, root = self.state, self.nest.placement, self.root
        staged = sum([self._staged_bytes(at) for s, at in self.runs.items()
                      if at.nest.space is MemorySpace.SHARED and phase_of(placement, s) == root])
        if staged > state.target.shared_bytes:
            raise KernelOptError(f"staged values take {staged} bytes of shared memory; the target has {state.target.shared_bytes}")
        counters = self.counters()
        whole = next(c.shape for c in counters if c.r.stage.index == root)
        phase = Phase(whole.groups, whole.num_threads)
        wanted = [(c.shape, self.count(phase, c.shape, c)) for c in counters]
        phase.registers += phase.held + phase.ahead     # in addition to the registers for the results of the stage that the phase stores
        beyond = max(0, min(phase.ahead, phase.registers - self.device.registers_per_thread))
        phase.instructions += phase.threads * phase.blocks * self.device.spill_operations * beyond
        resident = resident_groups(self.device, phase.threads, phase.registers, phase.shared)
        for shape, accesses in wanted:
            self._traffic(phase, shape, accesses, resident)
        return phase

    def counters(self) -> list[StageCounter]:
        """A counter for each stage of the phase."""
        state, placement, once = self.state, self.nest.placement, OnceInPhase()
        group = group_of(state, placement, self.root)
        shapes = [StageShape(state, self.nest, at, self.root, group) for s, at in self.runs.items() if phase_of(placement, s) == self.root]
        return [StageCounter(state, self.nest, shape, once.known(shape)) for shape in shapes]

    def _staged_bytes(self, at: StageRuns) -> int:
        """Bytes of shared memory for a staged value, with all its buffers. Only a copy that runs ahead has several."""
        stage = at.nest
        assert stage.layout is not None
        itemsize = stored_bytes(self.state, self.nest.layouts, stage.r.stage.index)
        return area_bytes(stage.layout, itemsize * stage.layout.size) * (stage.buffers if at.copy is not None else 1)

    def _exchange(self, phase: Phase, shape: StageShape, results: int) -> None:
        """Count the exchange of partial results between threads that share the reductions of a stage. `results`: number of results
        exchanged at a time. Neighbours exchange registers in a tree; the remaining partial results go through shared memory, where each
        thread reads all of them."""
        s, times = shape.stage.r.stage.index, shape.times
        own = stage_threads(self.state, self.nest.placement, phase_of(self.nest.placement, s))[s]
        lanes = exchanging_threads(self.state.target, own, phase.threads)
        steps, left = lanes.bit_length() - 1, own.reducers // lanes
        phase.latency += times * steps * self.device.shared_cycles
        phase.instructions += times * steps * phase.threads * results * self.device.exchange_operations
        if left > 1:
            phase.shared += exchanged_bytes(self.state, self.nest.placement, s, phase.threads)
            phase.latency += times * (left * self.device.step_cycles + self.device.shared_cycles)
            phase.instructions += times * left * phase.threads * results * (self.device.access(1.0, shared=True) + 1.0)

    # -- one stage -----------------------------------------------------------------------------------------
    def count(self, phase: Phase, shape: StageShape, counter: StageCounter) -> list[Access]:
        """Count the instructions of a stage into its phase. Returns its accesses to memory."""
        counter.count()
        times, s, copy, pipeline = shape.times, shape.stage.r.stage.index, shape.at.copy, shape.at.pipeline
        accumulators = counter.accumulators
        phase.registers = max(phase.registers, self.device.base_registers + int(counter.registers))
        spilled = max(0.0, self.device.base_registers + counter.registers - self.device.registers_per_thread)
        if spilled and counter.tiles is not None and counter.tiles.dot.reads_shared:
            spilled = accumulators      # these products wait for each other, and each needs all accumulators in registers
        if counter.tiles is not None and counter.tiles.dot.reads_shared and (pipeline is None or not pipeline.under_way):
            phase.drained += times * prod([c for a, c in counter.work.loops if a >= counter.outs]) * self.device.drained_cycles
        threads = shape.num_threads
        own = threads * times * (counter.instructions + self.device.spill_operations * spilled * shape.body)
        phase.instructions += own
        if counter.tiles is not None:
            phase.products += own
        elif not shape.is_shared_copy:
            phase.beside += own
        phase.turns += times * counter.turns
        phase.first += times * counter.private
        phase.latency += times * shape.at.barriers * self.device.barrier_cycles
        phase.instructions += times * shape.at.barriers * self.device.barrier(phase.threads)
        # the latency of a copy that runs ahead is hidden: it is asynchronous, or stores its few loads after the computation
        if copy is None or (copy.turns.is_loop and not copy.is_async and not copy.is_bulk):
            phase.latency += times * counter.latency
        if reducers_of(self.state, s) > 1:
            self._exchange(phase, shape, sum([len(red.values) for red in counter.r.reductions]) * counter.work.rows)
        for _ in shuffles_of(self.state, s):
            phase.latency += times * self.device.shared_cycles
            phase.instructions += times * threads * counter.work.rows * self.device.exchange_operations
        self._keep(phase, shape, accumulators if counter.tiles is not None else counter.work.rows)
        phase.accumulators = max(phase.accumulators, int(accumulators))
        products = counter.tiles.products if counter.tiles is not None else 1.0
        phase.flops += 2.0 * counter.work.multiply_adds * products * times * threads * phase.groups
        return counter.accesses

    def _keep(self, phase: Phase, shape: StageShape, results: float) -> None:
        """Count the memory for a stage's value. `results`: registers of a thread for it."""
        s, times, copy, pipeline = shape.stage.r.stage.index, shape.times, shape.at.copy, shape.at.pipeline
        if shape.stage.space is MemorySpace.HELD and not shape.is_of_group:
            # results that the root does not read become an operand of another product, converted to half as many registers
            phase.held += int(results if s in self.nest.placement.stage(self.root).reads else results / 2)
        if shape.stage.space is MemorySpace.SCRATCH:
            phase.scratch += stored_bytes(self.state, self.nest.layouts, s) * prod(shape.stage.region)
        elif shape.stage.space is MemorySpace.SHARED:
            size = self._staged_bytes(shape.at)
            phase.shared += size
            if copy is not None and pipeline is not None:
                phase.drained += times * self.device.row_cycles * min(copy.turns.parts * copy.is_bulk, self.device.subgroup)
                phase.blocks, phase.copied_ahead = max(phase.blocks, times), pipeline.ahead
                phase.block += size // pipeline.buffers
                phase.ahead += self._registers_ahead(copy, size // pipeline.buffers, phase.threads)

    def _registers_ahead(self, copy: AheadCopy, nbytes: int, threads: int) -> int:
        """Registers of a thread for its part of a copy that runs ahead: for the data, or, if the copy is asynchronous, for its
        addresses."""
        if copy.is_async:
            return self.device.address_registers * -(-nbytes // (self.state.target.vector_bytes * threads))
        return 0 if copy.is_bulk else -(-nbytes // (REGISTER_BYTES * threads))

    def _traffic(self, phase: Phase, shape: StageShape, accesses: Sequence[Access], resident: int) -> None:
        """Count the bytes that a stage's accesses move through each cache, and the turns they take."""
        device, lanes = self.device, min(self.device.subgroup, shape.num_threads)
        subgroups = -(-shape.num_threads // device.subgroup)
        steady = [self._footprints(shape, a) for a in accesses]
        share = device.first * self.device.kept_share / resident
        has_tiles = shape.stage.r.stage.index in self.nest.layouts.dots and not device.is_software
        for a, footprints in zip(accesses, steady, strict=True):
            sectors = lanes if a.gathered else lane_granules(steps_of(shape.threads, a.coefs), lanes, a.width, SECTOR_BYTES)
            asked = shape.times * a.times * subgroups * sectors * SECTOR_BYTES
            is_tile = a.width > DEVICE_LINE_BYTES // self.device.line_threads       # each thread of a subgroup has a part of one access
            turns = 1 if device.is_software or is_tile else lanes if a.gathered else \
                line_turns(steps_of(shape.threads, a.coefs), lanes, a.width, DEVICE_LINE_BYTES)
            phase.first += max(asked, shape.times * a.times * subgroups * turns * self.device.first_bytes)
            moved = footprints[-1]
            for k in range(len(shape.serial) - 1, -1, -1):
                kept = sum([f[k + 1] for f in steady]) <= share
                if k < a.depth:
                    moved *= footprints[k] / footprints[k + 1] if kept else shape.serial[k].times
            keeps = device.is_software or is_tile or a.kind is not AccessKind.STORE     # The first cache of hardware keeps no stores.
            bytes_moved = min(moved, asked) if keeps else asked
            phase.second += bytes_moved
            phase.last += bytes_moved if has_tiles and a.depth == 0 else 0.0
            phase.memory += self._from_memory_once(phase, shape, a, footprints[0], resident)

    def _footprints(self, shape: StageShape, a: Access) -> list[float]:
        """Bytes that a group touches while the outermost k serial loops stand still: a list with k from 0 (the whole nest runs) to the
        number of loops (one innermost iteration)."""
        if a.gathered:
            one = float(shape.num_threads * SECTOR_BYTES * a.times / max(1.0, prod(run.times for run in shape.serial)))
            sizes = [one]
            for run in reversed(shape.serial):
                sizes.append(min(sizes[-1] * run.times, float(max(a.limit, SECTOR_BYTES))))
            return sizes[::-1]
        inside = [[*shape.threads, *shape.expanded, *reversed(shape.serial[k:])] for k in range(len(shape.serial) + 1)]
        return [touched_bytes(steps_of(runs, a.coefs), a.itemsize, a.limit, SECTOR_BYTES) for runs in inside]

    def _from_memory_once(self, phase: Phase, shape: StageShape, a: Access, of_group: float, resident: int) -> float:
        """Like `_from_memory`, but 0 if another stage of the phase has loaded the same data, and the second cache keeps it for all
        groups."""
        found = self._from_memory(phase, shape, a, of_group, resident)
        if a.kind is not AccessKind.LOAD or self.device.is_software:
            return found
        before, same = self.loaded, (a.number, of_group, found)
        at_once = min(phase.groups, resident * self.device.units)
        if same in before and of_group * at_once <= self.device.second * self.device.kept_share:
            return 0.0
        before.add(same)
        return found

    def _from_memory(self, phase: Phase, shape: StageShape, a: Access, of_group: float, resident: int) -> float:
        """Bytes that an access moves from memory, over all groups. The groups of one wave read data that they share only once; if the
        second cache holds the data, so do the groups of all waves together."""
        if a.gathered:
            return min(of_group * phase.groups, float(a.limit))
        inside = waves_of([run.times for run in shape.grid], resident * self.device.units)
        runs = [*shape.threads, *shape.expanded, *shape.serial]
        wave = [run._replace(times=n) for run, n in zip(shape.grid, inside, strict=True)]
        of_wave = touched_bytes(steps_of([*runs, *wave], a.coefs), a.itemsize, a.limit, SECTOR_BYTES)
        of_all = touched_bytes(steps_of([*runs, *shape.grid], a.coefs), a.itemsize, a.limit, SECTOR_BYTES)
        if a.kind is AccessKind.STORE and not self.device.is_software:      # sectors that are stored only in part are read first
            of_all *= 1.0 + shared_granules(steps_of(runs, a.coefs), steps_of(shape.grid, a.coefs), a.itemsize, SECTOR_BYTES)
        return of_all if of_all <= self.device.second * self.device.kept_share else max(of_all, of_wave * phase.groups / prod(inside))


def combining_phase(state: Scheduler, r: ResolvedStage, parts: int) -> Phase:
    """The resources of the phase that combines the partial results of a split reduction: a thread or a subgroup for each vector of
    results."""
    device, outputs = device_of(state.target), float(prod([state.kernel.axes[a].extent for a in r.stage.outs]))
    size = sum(d.itemsize for red in r.reductions for d in red.dtypes)
    width = vector_width(state, r)
    vectors = -(-outputs // width)
    threads = combining_threads(state.target, int(outputs) // width, parts)
    together = 1 if threads > 1 or device.is_software else int(min(device.packed_threads, vectors))
    phase = Phase(-(-vectors // together), threads * together, registers=device.base_registers + 2 * width)
    phase.instructions = together * parts * 2.0 * width
    phase.first = phase.second = float(parts * max(SECTOR_BYTES if outputs > 1 else 0, together * size * width))
    phase.memory = max(0.0, parts * outputs * size - device.second)
    rounds = max(1.0, parts / threads / device.iterations_in_flight)
    phase.latency = device.near_cycles * rounds + threads.bit_length() * device.shared_cycles
    return phase


def _ends(device: Device, phase: Phase, block: float) -> float:
    """Cycles in which none of the resident groups multiplies, in a phase that multiplies tiles: before the first block has arrived and
    after the last one. If no copy runs ahead, the whole latency of the phase counts. `block`: cycles until the copies of one iteration
    have arrived."""
    if not phase.last:
        return 0.0
    return (block if phase.blocks else phase.latency) + device.far_cycles + phase.last / device.second_bytes


def phase_cost(device: Device, phase: Phase, name: str = "") -> CostPart:
    """The cost of a phase in cycles of the device, with the cycles that each resource alone would take."""
    resident = resident_groups(device, phase.threads, phase.registers, phase.shared)
    busy = min(phase.groups, device.units)
    per_unit = -(-phase.groups // device.units)         # groups that the unit with most of them runs
    at_once = min(per_unit, resident)
    wasted = device.whole(phase.threads) / phase.threads
    # a software device runs a group on one part of a unit
    lanes = device.arithmetic if device.is_software else min(device.arithmetic, at_once * device.whole(phase.threads))
    at_the_same_time = device.product_overlap * min(phase.products, phase.beside) if at_once > 1 else 0.0
    arithmetic = per_unit * (phase.instructions - at_the_same_time) * wasted / lanes
    first = per_unit * (phase.first / device.first_bytes + phase.turns)
    second = max(phase.groups * phase.second / (device.second_bytes * device.units), per_unit * phase.second / device.alone_bytes)
    memory = max(phase.memory / (device.memory * device.units), phase.memory / (device.alone_bytes * busy))
    rounds = -(-per_unit // at_once)
    # a software device runs on a CPU, which overlaps accesses
    latency = 0.0 if device.is_software else rounds * phase.latency
    block = device.far_cycles + at_once * phase.block / device.second_bytes      # cycles until the copies of one iteration have arrived
    copied = 0.0 if device.is_software else rounds * phase.blocks * block / phase.copied_ahead
    arithmetic += per_unit * device.group_cycles + rounds * phase.drained
    ends = rounds * _ends(device, phase, block)
    parts = (arithmetic, first, second, memory, latency)
    longest = max(parts)
    # starting all groups takes at least this long, while groups that have started run already
    begun = 0.0 if device.is_software else phase.groups * device.begin_cycles
    cycles = device.launch_cycles + max(begun, ends + max(longest, copied) + device.unhidden_share * (sum(parts) - longest))
    return CostPart(name, cycles, tuple(zip(TERMS, (*parts, copied, ends, begun, device.launch_cycles), strict=True)))


class StageCounter:
    """Prices the work of one thread in a stage, in one iteration of the loops around the stage. `known`: nodes whose values an earlier
    stage has computed."""

    def __init__(self, state: Scheduler, nest: LoopNest, shape: StageShape, known: Collection[int] = ()) -> None:
        self.state, self.nest, self.shape, self.device = state, nest, shape, device_of(state.target)
        self.stage, self.r = shape.stage, shape.stage.r
        self.width = copied_width(state, nest.layouts, self.r)
        own = [(a, run.times) for a, run in zip(shape.axes_of_serial, shape.serial, strict=True) if a >= 0]
        self.work = StageWork(state, nest, shape.at, own, shape.outside, held=self._held(), known=known)
        self.outs, self.body = self.work.outs, self.work.body
        self.lanes = self.stage.num_lanes
        self.rows = shape.at.copy.turns.parts if shape.at.copy is not None and shape.at.copy.is_bulk else 0     # rows of a copy in bulk
        self.tiles = held_tiles(nest.layouts.dots.get(self.r.stage.index))
        if shape.is_shared_copy and shape.expanded:
            self.lanes = self.work.positions[self.stage.vector] = shape.expanded[0].times
        self.gaps = self.device.gaps(reducers_of(state, self.r.stage.index))
        self.subgroups = -(-shape.num_threads // self.device.subgroup)
        self.instructions = self.turns = self.latency = self.private = 0.0
        self.stored = 0.0           # part of `instructions` in the store
        self.accumulators = self.registers = 0.0
        self.waits = 0.0            # longest wait for a load, in cycles, in one innermost iteration
        self.accesses: list[Access] = []        # accesses to memory beyond the first cache

    def _held(self) -> list[int]:
        """Per axis, the elements that a thread has of a tile that HOLD lays out."""
        fragment, chosen = held_layout(self.state, self.r.stage.index), self.state.dots[self.r.stage.index]
        elements = [1] * len(self.stage.axes)
        if fragment is not None and chosen is not None:
            for side, axis in enumerate((chosen.rows, chosen.columns)):
                elements[self.r.axes.index(axis)] = prod([d.extent for d in fragment.elements if (d.rows, d.columns)[side]])
        return elements

    def count(self) -> None:
        work, device = self.work, self.device
        packed = self.nest.layouts.packed.get(self.r.stage.index)
        if packed is not None and stored_node(self.r, packed) != self.r.value:
            work.skipped.add(self.r.value)      # the value is stored in its narrow type, so it is never widened
        if self.state.target.has_pow2:          # POW2 includes the comparison and the scaling
            work.skipped.update([x for i, n in enumerate(self.r.nodes) if normal_power(self.r, n) >= 0 for x in (i, n.src[0])])
        self._reductions()
        for i, n, is_load in work.values():
            if n.kind == "load" and n.linear is not None:
                self._load(n, n.linear)
            elif is_load:
                self._read(i, n, self.tiles.number(i) if self.tiles is not None else -1)
            else:
                is_power = n.op == "EXP2" and n.dtype == dtypes.float32 and self.state.target.has_pow2
                self.instructions += (device.power_operations if is_power else device.operations[kind_of(n)]) \
                    * self._runs(n.deps) * work.share_of(i)
        before = self.instructions
        self._store()
        self.stored = self.instructions - before
        self.accumulators = sum(self._side_by_side(red, c, UPCAST) for red in self.r.reductions for c in range(len(red.values)))
        if self.tiles is not None:
            self.accumulators *= self.tiles.results.num_elements
        self.registers = self.accumulators * max(1.0, self.r.lanes_bytes / 4) + self._beside()
        if self.stage.space is not MemorySpace.HELD:
            self.instructions += device.iteration_operations * sum(work.runs_of_loop[1:])
        self.instructions += device.block_end_operations * work.at.block_ends * self.accumulators
        summed = work.summed()
        step = device.step_cycles if self.tiles is None else device.product_cycles
        self.latency += self.body / max(1.0, summed) * (max(0.0, summed - 1.0) * step)
        self.latency += self.waits * (1.0 + (self.body - 1.0) / device.iterations_in_flight)

    def _reductions(self) -> None:
        """Count the instructions that accumulate."""
        for red in self.r.reductions:
            tile = self.body * prod(self.work.positions)
            if self.tiles is not None:
                self.turns += tile * self.shape.num_threads / self.tiles.dot.threads * self.tiles.shared_bytes / self.device.first_bytes
                self.instructions += tile * self.tiles.dot.cost(self.state.target)
            else:
                combined = self.device.combined_operations[len(red.values)]
                self.instructions += self.body * sum(n * self._side_by_side(red, c) for c, n in enumerate(combined))

    def _side_by_side(self, red: ReduceNode, component: int, role: str = "") -> float:
        """Positions side by side that have their own value of a component of a reduction. `role`: count only loops of this role; "":
        all."""
        of = get_combiner(red.combiner).read_for(component)
        axes = {a for c in of for a in self.r.nodes[red.values[c]].deps} if len(of) < len(red.values) else range(len(self.stage.axes))
        return float(prod([self.work.side_by_side(a, role) * self.work.held[a] for a in axes]))

    def _beside(self) -> float:
        """Registers for the values that are added to accumulators. All loads of one unrolled iteration are in flight at once; a load under
        a condition needs a second register, for its predicate or address."""
        positions = self.work.positions
        if self.tiles is not None:
            return self.tiles.registers(positions)
        if not self.r.reductions:
            return float(prod(positions))
        return float(sum(prod(positions[a] for a in n.deps) * (2 if n.kind == "load" and n.gate >= 0 else 1) for n in self.r.nodes
                         if n.kind in ("load", "read") and any(a >= self.outs for a in n.deps)))

    def _runs(self, deps: tuple[int, ...]) -> float:
        """How often one thread computes a value that depends on these axes."""
        held = self.tiles is not None and (self.tiles.plan.rows in deps or self.tiles.plan.columns in deps)
        return self.work.runs(deps) * (self.tiles.results.num_elements if self.tiles is not None and held else 1.0)

    def _is_vector(self, coefs: Coefs, const: int, lanes: int) -> bool:
        """Whether the lanes of an access along the vector axis are contiguous, and each vector begins at a multiple of its size."""
        axis, loop = self.stage.vector, self.stage.vector_loop
        if axis < 0 or lanes < 2 or not (self.shape.is_shared_copy or (loop is not None and loop.stride == 1)):
            return False
        return dict(coefs).get(axis) == 1 and is_aligned(coefs, const, axis, lanes)

    def _elements_of(self, coefs: Coefs, const: int) -> int:
        """Elements that one instruction of an access moves: a vector, or a row of a square that is transposed in registers."""
        for width in (self.width, self.width // 2, self.width // 4):
            if width > 1 and self.lanes % width == 0 and (self._is_vector(coefs, const, width) or self._is_turned(coefs, const, width)):
                return width
        return 1

    def _is_turned(self, coefs: Coefs, const: int, lanes: int) -> bool:
        """Whether an axis other than the vector axis is contiguous over a full vector: `transpose_squares` then makes the access wide."""
        if lanes != min(self.width, self.lanes) or not dict(coefs).get(self.stage.vector):
            return False
        return any(
            c == 1 and a != self.stage.vector and is_aligned(coefs, const, a, lanes)
            and any(p.stride == 1 and p.extent % lanes == 0 and p.role in (UPCAST, UNROLL) for p in self.stage.axes[a]) for a, c in coefs)

    def _instructions_of(self, deps: tuple[int, ...], coefs: Coefs, const: int) -> tuple[float, int]:
        """(instructions of one thread, elements of each) for an access."""
        width = self._elements_of(coefs, const)
        return (self._runs(deps) / width, width) if width > 1 else (self._runs(deps) * self.work.distinct(deps, coefs), 1)

    def _load(self, n: Node, linear: LinearIndex) -> None:
        device, linear = self.device, evenly(self.r, linear) or linear
        count, elements = self._runs(n.deps), 1
        if self.shape.is_shared_copy and self.shape.expanded and self.stage.vector in n.deps:
            count, elements = count / self.lanes, self.lanes
        elif not linear.atoms and (n.gate < 0 or self.stage.vector not in self.r.nodes[n.gate].deps):
            count, elements = self._instructions_of(n.deps, linear.coefs, linear.const)
        rows, access = self.rows, self.work.load(n, linear, count, elements)
        self.instructions += -(-rows // self.shape.num_threads) * device.bulk_row_operations if rows else \
            count * (device.access(elements) * self.gaps + (device.mask_operations if n.gate >= 0 else 0.0))
        depth = access.depth - self.work.outside
        if depth == len(self.work.loops):
            self.waits = max(self.waits, device.far_cycles)
        else:
            self.latency += device.far_cycles * self.work.runs_of_loop[depth]
        self.accesses.append(access)

    def _read(self, number: int, n: Node, operand: int) -> None:
        """Count the read of a staged value by node `number`. `operand`: number of the operand whose tiles are read, or -1."""
        if self.nest.stages[n.arg].space in (MemorySpace.REGISTER, MemorySpace.HELD):
            return
        device, is_tile = self.device, self.tiles is not None and operand >= 0
        is_vector = self.shape.is_shared_copy and bool(self.shape.expanded) and self.stage.vector in n.deps \
            and self.nest.placement.paths[n.arg] == ()
        count, elements = (self.work.runs(n.deps), 1) if is_tile else (self._runs(n.deps) / self.lanes, self.lanes) if is_vector \
            else (self._runs(n.deps) * self.work.share_of(number), 1) if number in self.r.coarse \
            else self._instructions_of(n.deps, self.work.staged_coefs(n), 0)
        access = self.work.read(n, count, elements)
        if is_tile:
            self._read_tile(access, operand)
            return
        gaps = self.gaps if access.space is MemorySpace.GLOBAL else 1.0
        self.instructions += count * device.access(elements, access.space is MemorySpace.SHARED) * gaps
        lanes = min(self.state.target.group_threads, device.subgroup, self.shape.num_threads)
        if access.space is MemorySpace.SHARED:
            self.turns += count * self.subgroups * bank_turns(steps_of(self.shape.threads, access.coefs), lanes, access.width)
            self.waits = max(self.waits, device.shared_cycles)
        # each thread has its own area; the same element of neighbouring threads lies side by side
        elif access.space is MemorySpace.SCRATCH:
            self.private += count * self.subgroups * lanes * access.width
            self.waits = max(self.waits, device.shared_cycles)
        else:
            self.waits = max(self.waits, device.near_cycles)
            self.accesses.append(access)

    def _read_tile(self, access: Access, number: int) -> None:
        """Count the read of tiles of an operand."""
        assert self.tiles is not None
        tiles, count, layout = self.tiles, access.times, self.nest.stages[access.number].layout
        assert layout is not None
        if tiles.dot.reads_shared:      # counted with the products, which read shared memory themselves
            self.waits = max(self.waits, self.device.shared_cycles)
            return
        self.instructions += count * self.device.rounding_operations * tiles.words(number) if tiles.dot.significand else 0.0
        if access.space is MemorySpace.SHARED:
            self.instructions += count * tiles.reads(number, layout)
            self.turns += count * -(-self.shape.num_threads // tiles.dot.threads) * tiles.turns(number, layout)
            self.waits = max(self.waits, self.device.shared_cycles)
            return
        self.instructions += count * tiles.words(number) * self.device.access(1.0)
        self.waits = max(self.waits, self.device.near_cycles)
        size = tiles.dot.operands[number].itemsize
        self.accesses.append(access._replace(itemsize=size, elements=tiles.tile_bytes(number) // size))

    def _store(self) -> None:
        """Count the store of the stage's value."""
        r, stage, device = self.r, self.stage, self.device
        size = stored_bytes(self.state, self.nest.layouts, r.stage.index)
        if stage.space in (MemorySpace.REGISTER, MemorySpace.HELD):
            return
        runs = float(prod([c for a, c in self.work.loops if a < self.outs])) * self.work.rows
        if self.work.at.parts:
            size = sum(d.itemsize for red in r.reductions for d in red.dtypes)
        if stage.space is MemorySpace.SCRATCH:
            self.instructions += runs * device.access(1.0)
            self.private += runs * size * self.shape.num_threads
            return
        if self.rows:       # a bulk copy stores, without instructions of the threads
            self.turns += prod(stage.region) * size / device.first_bytes
            return
        place, count, elements = evenly(r, self.work.place) or self.work.place, runs, 1
        if self.tiles is not None:      # Threads store rows of the results, each row in sectors of its own.
            count *= self.tiles.results.num_elements / self.tiles.results.run.extent
            elements = SECTOR_BYTES // size * self.tiles.results.threads[0].extent
            if exchanges_results(self.state, r, self.tiles.plan):      # a quarter as many stores, each of whole sectors
                self.instructions += count * device.exchanged_word_operations
                count, elements = count / QUAD.extent, 2 * elements
        if 0 <= stage.vector < self.outs and (width := self._elements_of(place.coefs, place.const)) > 1:
            count, elements = runs / width, width
        self.instructions += count * device.access(elements)
        if stage.space is MemorySpace.SHARED:
            assert stage.layout is not None
            lanes = min(device.subgroup, self.shape.num_threads)
            places = tuple([stage.layout.place(p) * size for p in positions_of(tuple(self.shape.threads), self.outs, lanes)])
            self.turns += count * self.subgroups * turns_of(places, size * elements)
            return
        self.accesses.append(self.work.store(size, place, count, elements))
