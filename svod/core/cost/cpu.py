"""Prices of a stage's work on a processor, and the cost of a state: the search ranks its proposals by it.

Per stage: the issue slots of its vector operations, the registers they need and the longest chain of additions, and what its accesses
cost beyond the first cache (`caches.py`). A stage takes the slowest of these and a share of the others; stages are added up.
"""
from __future__ import annotations

from dataclasses import dataclass
from math import prod
from typing import NamedTuple

from svod.core.cost.caches import ANYWHERE, LINE, PAGE, Traffic, caches_of, traffic
from svod.core.cost.cost import Cost, CostPart, total
from svod.core.cost.op_count import count_operations
from svod.core.cost.work import Access, StageWork, Tile, block_ends, has_constant_lanes, is_aligned, kind_of
from svod.core.kernel.contraction import skipping_window
from svod.core.kernel.intrinsics import rate_of
from svod.core.kernel.kernel import Node
from svod.core.kernel.loop_nest import LoopNest, StageNest, loop_nest, stored_bytes
from svod.core.kernel.non_temporal import has_non_temporal_stores
from svod.core.kernel.placement import is_computed_once, is_derived, vector_width
from svod.core.kernel.scheduler import LOOP, Derived, Scheduler, cores_of


@dataclass(frozen=True)
class Cpu:
    """Prices of one core, in cycles, or in *operations*: vector instructions, of which two are issued per cycle."""

    operations: tuple[float, ...] = (1.0, 1.5, 8.0, 14.0)   # of each `OperationKind`
    combined_operations: tuple[float, ...] = (0.0, 1.0, 6.0, 30.0)      # by components of two results that are combined: of ARGMAX, EXPSUM
    issued_per_cycle: float = 2.0
    contention_share: float = 0.15      # share that is not hidden of the fewer of loads and arithmetic: one queue issues both
    latency_cycles: float = 4.0         # of a multiply-add or addition
    lookahead_operations: float = 400.0 # a core looks ahead so far: sums that end within them overlap with the next ones
    loop_cycles: float = 1.5            # of bookkeeping in an iteration
    block_end_cycles: float = 2.0       # of an accumulator at the end of a block of a long sum: it is added to another one, and made zero
    spill_cycles: float = 5.0           # of an accumulator in memory in each iteration: stored, and loaded again before it is used
    mask_operations: float = 2.0        # that make the mask of a load whose lanes differ from one iteration to the next
    spread_mask_operations: float = 4.0 # that bring a mask to the lanes of one of several wide loads
    wide_mask_operations: float = 2.0   # of a wide load under a mask that is shuffled after it
    shuffled_step: int = 4              # elements between lanes up to which whole vectors are loaded and shuffled
    lane_loads: float = 1.5             # loads' worth of one lane that is loaded by itself
    masked_lane_loads: float = 6.0      # the same under a mask
    staged_lane_loads: float = 8.0      # the same from a staged area, as its rows are mostly a power of two apart and share cache sets
    transposed_lane_loads: float = 0.5  # the same where squares are transposed in registers
    transposed_positions: int = 4       # positions side by side from which stores of lanes are transposed in registers
    lane_store_cycles: float = 3.0      # of one lane that is taken out of a vector and stored by itself
    evicting_store_cycles: tuple[float, float, float] = (40.0, 12.0, 4.0)   # lanes a page apart evict each other; half and a quarter of one
    launch_cycles: float = 2000.0       # of a phase that wakes other cores
    unhidden_share: float = 0.4         # of all that does not bound a stage
    unhidden_translations: float = 0.3  # share of translations that is never hidden: the oldest instructions wait for them

    def lane_store(self, stride: int) -> float:
        """Cycles of one lane's store, with so many bytes between lanes."""
        near = [cycles for k, cycles in enumerate(self.evicting_store_cycles) if stride % (PAGE >> k) == 0]
        return near[0] if near else self.lane_store_cycles


CPU = Cpu()
#: Terms of the cost of a stage: instructions, lines into each cache and from memory, translations of addresses, start of other cores.
TERMS = ("instructions", "first cache", "second cache", "memory", "page tables", "launch")


@Derived
def cost_of(state: Scheduler) -> Cost:
    """The predicted cost of a state, remembered on it. Raises KernelOptError when its placements contradict each other."""
    nest, kernel, cpu = loop_nest(state), state.kernel, CPU
    threads, costs = cores_of(state), list[Cost]()
    memory = _Memory(state, nest, kept=float(count_operations(kernel.ast).bytes_moved))
    for s, stage in nest.stages.items():
        is_phase = nest.placement.paths[s] == ()
        scratch = 0 if is_phase else stored_bytes(state, nest.layouts, s) * prod(stage.region)
        work = core_work(state, nest, s)
        issue = issue_cost(work, cpu)
        streamed = stage.r.store is not None and state.stream and has_non_temporal_stores(state)
        non_temporal = float(kernel.params[stage.r.store_slot].arg.size * stored_bytes(state, nest.layouts, s)) if streamed else 0.0
        if not kernel.written:      # else what goes past the caches is read again
            memory.kept -= non_temporal     # the output stage comes first: nothing reads it
        data = memory.of_stage(work, non_temporal)
        slowest = max(issue.cycles, *data.cycles)
        cycles = slowest + (cpu.unhidden_share * (issue.cycles + sum(data.cycles) - slowest) + cpu.unhidden_translations * data.translated)
        speedup, launch = _speedup(state, stage, is_phase, threads), cpu.launch_cycles if is_phase and threads > 1 else 0.0
        cycles = cycles / speedup + launch
        terms = (*[c / speedup for c in (issue.cycles, *data.cycles)], launch)
        part = CostPart(stage.r.stage.name, cycles, tuple(zip(TERMS, terms, strict=True)))
        is_once = is_computed_once(state, nest.placement, s)
        costs.append(Cost(0.0 if is_once else cycles, int(issue.accumulators), scratch, issue.flops, data.moved,
                          () if is_once else (part,)))
    return total(costs)


def _speedup(state: Scheduler, stage: StageNest, is_phase: bool, threads: int) -> float:
    """Speed-up of a stage by cores: each takes whole iterations of the parallel loop."""
    if threads < 2:
        return 1.0
    shared = 0
    if state.thread is not None:
        row = state.thread.row
        shared = next((loop.iterations for loop in stage.around if loop.row == row), 0)
        if not shared and stage.r.stage.index == state.kernel.output:
            shared = next((p.extent for group in stage.axes for p in group if p.row == row), 1)
    if not shared:
        shared = threads
        if is_phase and not stage.r.stage.is_output:
            shared = 1
            for a, loop in stage.loops:
                shared *= loop.extent if a < len(stage.region) else 1
    return shared / -(-shared // threads)


def work_of(state: Scheduler) -> list[StageWork]:
    """The work of each stage of a state as a core does it. Raises KernelOptError as `cost_of` does."""
    nest = loop_nest(state)
    return [core_work(state, nest, s) for s in nest.stages]


def core_work(state: Scheduler, nest: LoopNest, s: int) -> StageWork:
    """The work of stage `s` as a core does it: all loops one after the other, in vectors. Iterations that add zeros are skipped."""
    stage, loops = nest.stages[s], list[tuple[int, float]]()
    for a, loop in stage.loops:
        window = skipping_window(state, stage.r, a, stage.axes[a]) if a >= len(stage.r.stage.outs) else None
        share = 1.0
        if window is not None:
            tile = prod(p.extent for p in stage.axes[window.output] if p.role != LOOP)
            share = window.used(tile, state.kernel.axes[stage.r.axes[window.output]].extent, loop.extent)
        loops.append((a, loop.extent * share))
    return StageWork(state, nest, stage, loops, len(stage.around), vector_width(state, stage.r))


# -- instructions -------------------------------------------------------------------------------------------
class IssueCost(NamedTuple):
    """The instructions of a stage."""

    cycles: float            # of all times the stage runs
    accumulators: float      # vector registers that live through the reduce loops
    flops: float


def issue_cost(work: StageWork, cpu: Cpu) -> IssueCost:
    """The price of a stage's instructions."""
    return _Issue(work, cpu).price()


class _Issue:
    """Prices the instructions of one stage."""

    def __init__(self, work: StageWork, cpu: Cpu) -> None:
        self.work, self.cpu, self.stage, self.r = work, cpu, work.stage, work.r
        self.dot = rate_of(work.nest.layouts.dots.get(work.r.stage.index), work.state.target)
        self.loads = self.arithmetic = 0.0

    def price(self) -> IssueCost:
        work, cpu, stage = self.work, self.cpu, self.stage
        self._count()
        store, is_transposed = self._stores()
        accumulators = float(work.accumulators)
        vectors = float(work.positions[stage.vector]) if 0 <= stage.vector < work.outs else 1.0
        if self.dot.corrects:    # a sum beside it for each vector
            self.arithmetic += work.body * vectors * work.tile / max(accumulators, 1.0)
            accumulators += vectors
        spills = self._spills(accumulators, vectors, is_transposed)
        if self.r.reductions and stage.innermost < work.outs and any(a >= work.outs for a, _ in stage.loops):
            # accumulators in scratch
            self.loads += 2.0 * accumulators * work.body * sum(len(red.values) for red in self.r.reductions)
        most, least = max(self.loads, self.arithmetic), min(self.loads, self.arithmetic)
        slots = (most + cpu.contention_share * least) / cpu.issued_per_cycle + spills
        ends = block_ends(self.r, [(a, loop.extent) for a, loop in stage.loops], stage.axes)
        overhead = cpu.loop_cycles * (sum(work.runs_of_loop[1:]) + ends) + cpu.block_end_cycles * ends * accumulators
        cycles = max(slots, self._chain(accumulators)) + overhead + store
        per_vector = stage.num_lanes / -(-stage.num_lanes // work.lanes) if stage.vector >= 0 else 1.0
        return IssueCost(cycles * stage.times, accumulators, 2 * work.multiply_adds * self.dot.group * per_vector * stage.times)

    def _count(self) -> None:
        """Count what is summed up, loaded and computed."""
        for red in self.r.reductions:
            cost = self.dot.cost if len(red.values) == 1 else self.cpu.combined_operations[len(red.values)]
            self.arithmetic += self.work.body * self.work.tile * cost
        for _, n, is_load in self.work.values():
            if is_load:
                self._load(n)
            else:
                self.arithmetic += self.cpu.operations[kind_of(n)] * self.work.runs(n.deps)

    def _load(self, n: Node) -> None:
        count = self.work.runs(n.deps)
        for lin in n.dims if n.linear is None else (n.linear,):
            count *= self.work.distinct(n.deps, lin.coefs)
        known = n.gate >= 0 and has_constant_lanes(self.r, n.gate, self.stage)
        if n.gate >= 0 and not known:
            self.arithmetic += self.cpu.mask_operations * count
        if self.stage.vector in n.deps:
            vectors, shuffles = self._lane_loads(n, known)
            self.arithmetic += shuffles * count
            count *= vectors
        self.loads += count * self.dot.load if n.kind == "read" else count

    def _lane_loads(self, n: Node, known: bool) -> tuple[float, float]:
        """(cost in loads, shuffles) of one vector of a load or read, from how its lanes lie in memory. `known`: the mask is a constant."""
        cpu, lanes, vector_loop = self.cpu, min(self.work.lanes, self.stage.num_lanes), self.stage.vector_loop
        step, aligned = self._staged_lanes(n, lanes) if n.linear is None else self._memory_lanes(n, lanes)
        assert vector_loop is not None
        step = abs(step * vector_loop.stride)
        if step <= 1 or (step <= cpu.shuffled_step and (n.gate < 0 or self.work.state.target.has_masked_memory)):
            shuffles = (step - 1.0) * (1.0 if n.gate < 0 or known else 1.0 + 2.0 * cpu.spread_mask_operations)
            if n.gate >= 0 and step > 1:
                shuffles += step * cpu.wide_mask_operations
            return (step if aligned else 2.0 * step), shuffles      # a wide vector that is not aligned takes two lines
        if n.linear is None:
            return cpu.staged_lane_loads * lanes, 0.0
        if n.gate < 0 and any(self._is_wide(a, lanes) for a, c in n.linear.coefs if c == 1 and a != self.stage.vector):
            return cpu.transposed_lane_loads * lanes, 0.0
        return (cpu.lane_loads if n.gate < 0 else cpu.masked_lane_loads) * lanes, 0.0

    def _staged_lanes(self, n: Node, lanes: int) -> tuple[int, bool]:
        """Elements between the lanes of a read of scratch, and whether all its vectors are aligned."""
        order, vector = self.work.nest.layouts.orders.get(n.arg), self.stage.vector
        inner = order[-1] if order else -1
        moved = [(dim, lin) for dim, lin in enumerate(n.dims) if lin.coef(vector)]
        steps = [lin.coef(vector) if inner in (dim, -1) else ANYWHERE for dim, lin in moved]
        return max(steps, key=abs, default=ANYWHERE), all(is_aligned(lin.coefs, 0, vector, lanes) for _, lin in moved)

    def _memory_lanes(self, n: Node, lanes: int) -> tuple[int, bool]:
        """Elements between lanes of a load, and whether all its vectors are aligned."""
        linear, vector = n.linear, self.stage.vector
        assert linear is not None
        gathered = any(vector in self.r.nodes[x].deps for x, _ in linear.atoms)
        return ANYWHERE if gathered else linear.coef(vector), is_aligned(linear.coefs, linear.const, vector, lanes)

    def _is_wide(self, a: int, lanes: int) -> bool:
        """Whether a vector's positions of axis `a` lie side by side: with the lanes they form squares, which registers transpose."""
        region = self.stage.region
        return self.work.positions[a] >= lanes or (is_derived(self.r.stage) and a < len(region) and region[a] >= lanes)

    def _stores(self) -> tuple[float, bool]:
        """Cycles of the stores, and whether lanes are stored one by one."""
        work, outs, lane = self.work, self.work.outs, self.stage.vector
        own = sum(1 for a, _ in work.loops if a < outs)
        store = (work.runs_of_loop[own] if all(a < outs for a, _ in work.loops[:own]) else work.body) * work.rows * self.dot.store
        linear = self.r.store
        if linear is None or not 0 <= lane < outs or linear.coef(lane) == 1:
            return store, False
        per_lane = self.cpu.lane_store(linear.coef(lane) * self.r.stage.dtype.itemsize)
        beside = max([work.positions[a] for a, c in linear.coefs if c == 1], default=1)
        if beside >= self.cpu.transposed_positions:     # a lane's positions side by side are stored at once, and miss once
            per_lane = self.cpu.transposed_lane_loads + (per_lane - self.cpu.lane_store_cycles) / beside
        return store * per_lane * min(work.lanes, self.stage.num_lanes), True

    def _spills(self, accumulators: float, vectors: float, is_transposed: bool) -> float:
        """Cycles of accumulators that do not fit the registers."""
        registers = accumulators + vectors + 1     # accumulators, a row of vectors, what is read in all lanes
        if is_transposed:
            registers += vectors - 1
        beyond = registers - self.work.state.target.vector_registers
        if not self.r.reductions or beyond <= 0:
            return 0.0
        return self.cpu.spill_cycles * beyond * self.work.body * self.work.tile / accumulators

    def _chain(self, accumulators: float) -> float:
        """Cycles of the longest chain of dependent additions."""
        if not self.r.reductions:
            return 0.0
        work, cpu = self.work, self.cpu
        sums = prod(loop.extent for a, loop in self.stage.loops if a >= work.outs)
        ahead = 1.0 + cpu.lookahead_operations * work.body / (sums * max(self.loads + self.arithmetic, 1.0))    # sums under way at once
        return cpu.latency_cycles * work.body * (work.tile / max(accumulators, 1.0)) / ahead


# -- memory -------------------------------------------------------------------------------------------------
class _Memory:
    """Prices the accesses of the stages of a state, readers before what they read.

    `kept`: bytes of the arguments that pass through the caches from one run to the next."""

    def __init__(self, state: Scheduler, nest: LoopNest, kept: float) -> None:
        self.state, self.nest, self.kept, self.caches = state, nest, kept, caches_of(state.target)
        self.threads = state.thread.cores if state.thread else 1
        self.readers: dict[int, list[tuple[int, ...]]] = {}     # argument → loops of the stages that read it

    def of_stage(self, work: StageWork, non_temporal: float) -> Traffic:
        """The accesses of a stage over all its runs. `non_temporal`: bytes that it stores non-temporally."""
        stage, accesses, is_shared = work.stage, list[Access](), list[bool]()
        crossing = 0.0
        for _, n, is_load in work.values():
            if is_load and n.linear is not None:
                accesses.append(work.load(n, n.linear))
                is_shared.append(self._is_shared(stage, n))
            elif is_load:
                accesses.append(self._read(work, n))
                is_shared.append(False)
                crossing += self._crossing(stage, n, accesses[-1])
        if (store := self._store(work, non_temporal)) is not None:
            accesses.append(store)
            is_shared.append(False)
        loops = [*((loop.moves, float(loop.iterations)) for loop in stage.around), *work.loops]
        cost = traffic(self.caches, loops, work.outside, _body(stage), accesses, is_shared, self.kept)
        _, near, far = self.caches.levels
        # what a phase before has written lies in the caches of all cores
        cost = cost._replace(second=cost.second + crossing * near.unforeseen * (1.0 - 1.0 / self.threads))
        if not non_temporal:
            return cost
        # to memory, and from there when it is read again; a line whose neighbour is stored much later is a place of its own
        size = stored_bytes(self.state, self.nest.layouts, work.r.stage.index)
        alone = stage.num_lanes * size <= LINE and (not stage.loops or stage.innermost != stage.vector)
        of_line = 2.0 * far.streamed - near.streamed + (far.unforeseen - far.streamed) * alone
        return cost._replace(memory=cost.memory + non_temporal / LINE * of_line, moved=cost.moved + non_temporal)

    def _is_shared(self, stage: StageNest, n: Node) -> bool:
        """Whether a neighbour inside the same loops brings what is loaded."""
        around, seen = tuple([loop.row for loop in stage.around]), self.readers.setdefault(n.arg, [])
        shared = any(rows[:len(around)] == around for rows in seen)
        seen.append((*around, *_own_rows(stage)))
        return shared

    def _read(self, work: StageWork, n: Node) -> Access:
        """A read of a staged value, from where it lies."""
        access, layout = work.read(n), self.nest.stages[n.arg].layout
        outer = frozenset([row for t, depth in self.nest.placement.paths[n.arg] or () for row in self.state.order[t][:depth]])
        fixed = sum([row in outer for row in (*[loop.row for loop in work.stage.around], *_own_rows(work.stage))])
        tile = None
        if layout is not None and layout.tiled >= 0:
            (axis, _), *_ = n.dims[layout.tiled].coefs
            tile = Tile(axis, layout.tile, layout.outer * access.itemsize)
        return access._replace(fixed=fixed, is_made_inside=True, tile=tile)

    def _crossing(self, stage: StageNest, n: Node, access: Access) -> float:
        """Lines of an earlier phase's result that lie in another core's cache when this stage reads them."""
        if self.nest.placement.paths[n.arg] != () or self.threads < 2 or is_computed_once(self.state, self.nest.placement, n.arg):
            return 0.0
        size = access.itemsize
        for a in self.state.kernel.stages[n.arg].outs:
            size *= self.state.axis_extent(a)
        parallel = None
        if self.state.thread is not None:
            shared = self.state.rows[self.state.thread.row].axis
            parallel = next((i for i, a in enumerate(stage.r.axes) if a == shared), None)
        return size / LINE * (1.0 if any(a == parallel for a, _ in access.coefs) else self.threads)

    def _store(self, work: StageWork, non_temporal: float) -> Access | None:
        """The store of a stage's value; None for values in registers and for non-temporal stores."""
        r, stage = work.r, work.stage
        size = stored_bytes(self.state, self.nest.layouts, r.stage.index)
        if r.store is not None:
            return work.store(size, work.place) if not non_temporal else None
        if not stage.around and is_derived(r.stage):
            return None
        layout = stage.layout
        assert layout is not None
        tile = Tile(layout.tiled, layout.tile, layout.outer * size) if layout.tiled >= 0 else None
        return work.store(size, work.place)._replace(fixed=len(stage.around), is_made_inside=bool(stage.around), tile=tile)


def _own_rows(stage: StageNest) -> tuple[int, ...]:
    """The loop rows of a stage; a copy has none of its own."""
    return () if is_derived(stage.r.stage) else tuple([loop.row for _, loop in stage.loops])


def _body(stage: StageNest) -> list[float]:
    """Positions of each axis in one iteration of the innermost loop."""
    return [float(prod([p.extent for p in group if p.role != LOOP])) for group in stage.axes]
