"""Predicts the cost of a state on a CPU, by which the search ranks its proposals.

Per stage it estimates the issue slots of vector operations, spilled registers, the longest chain of additions, and misses of the first
cache (`caches.py`). A stage takes the time of the slowest of these and a share of the others; the times of stages are added.
"""
from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from heapq import heapify, heappop, heapreplace
from math import ceil, inf, prod
from typing import NamedTuple

from svod.core.cost.caches import ANYWHERE_BYTES, PAGE_BYTES, Traffic, caches_of, traffic
from svod.core.cost.cost import Cost, CostPart, total
from svod.core.cost.op_count import count_operations
from svod.core.cost.runs import LoopRuns, StageRuns, stage_runs
from svod.core.cost.work import Access, StageWork, Tile, has_constant_lanes, is_aligned, kind_of
from svod.core.kernel.contraction import product_of, windows_of
from svod.core.kernel.groups import phase_of
from svod.core.kernel.intrinsics import rate_of
from svod.core.kernel.kernel import LinearIndex, Node
from svod.core.kernel.loop_nest import LoopNest, LoopNestMaker, StageNest, loop_nest, stored_bytes
from svod.core.kernel.non_temporal import has_non_temporal_stores
from svod.core.kernel.placement import NO_ROW, is_computed_once, is_derived, vector_width
from svod.core.kernel.scheduler import LOOP, Derived, Scheduler, cores_of, cut_of
from svod.core.machine.levels import CACHE_LINE_BYTES, CORE_START_CYCLES
from svod.core.tree.build import TreeMaker
from svod.core.tree.launch import FEW_SUMS
from svod.core.tree.nodes import has_two_widths
from svod.core.tree.passes import counted_tree

# prices of single operations, in operations: of those that are computed by polynomials, and of roots
PRICE_OF_OPERATION = {"SQRT": 16.0, "TANH": 24.0, "ERF": 30.0, "LOG": 38.0, "LOG2": 38.0, "SIN": 47.0, "COS": 47.0, "POW": 190.0}


@dataclass(frozen=True)
class Cpu:
    """Prices on one core, in cycles or in *operations*: vector instructions, of which two are issued per cycle."""

    operations: tuple[float, ...] = (1.0, 1.5, 8.0, 14.0)   # price of each `OperationKind`; others are in `PRICE_OF_OPERATION`
    # price of combining two results, by their number of components: 2 for ARGMAX, 3 for EXPSUM
    combined_operations: tuple[float, ...] = (0.0, 1.0, 6.0, 30.0)
    across_operations: float = 5.0      # price of combining the lanes of one vector of partial results
    across_cycles: float = 20.0         # cycles until readers in the same loops can use the sums across lanes of a run of a stage
    issued_per_cycle: float = 2.0
    contention_share: float = 0.15      # unhidden share of the loads or the arithmetic, whichever are fewer, as one queue issues both
    latency_cycles: float = 4.0         # cycles until the result of a multiply-add or an addition can be used
    lookahead_operations: float = 400.0 # operations that a core looks ahead: sums that end within them overlap with the next ones
    loop_cycles: float = 1.5            # cycles for the bookkeeping of one iteration
    block_end_cycles: float = 2.0       # cycles at the end of a block of a long sum: one accumulator is added to another, and set to zero
    # cycles per row of a copy until vectors that lie across freshly stored ones can be loaded, as the store queue forwards none of these;
    # rows of more vectors, and copies of more vectors, have been stored before their first vectors are read
    awaited_row_cycles: float = 15.0
    awaited_row_vectors: int = 3
    awaited_vectors: int = 64
    spill_cycles: float = 5.0           # cycles per iteration for an accumulator in memory, which is stored and loaded again
    narrow_cycles: float = 1.5          # cycles per iteration for a second register of a sum in a narrow vector, if none is free
    mask_operations: float = 2.0        # price of making the mask of a load, if its lanes differ from one iteration to the next
    spread_mask_operations: float = 4.0 # price of spreading a mask to the lanes of one of several wide loads
    wide_mask_operations: float = 2.0   # price of a wide load under a mask that is shuffled after the load
    shuffled_step: int = 4              # largest distance of lanes, in elements, at which whole vectors are loaded and shuffled
    lane_loads: float = 1.5             # price, in loads, of one lane that is loaded separately
    masked_lane_loads: float = 4.0      # price, in loads, of one lane that is loaded separately under a bit of a mask
    # price, in loads, of one lane from a staged area: its rows mostly are a power of two apart and share cache sets
    staged_lane_loads: float = 8.0
    transposed_lane_loads: float = 0.5  # price, in loads, of one lane if squares are transposed in registers
    transposed_positions: int = 4       # least positions side by side for which separately stored lanes are transposed in registers
    lane_store_cycles: float = 3.0      # cycles to extract one lane from a vector and store it separately
    # cycles to store one lane if the lanes are multiples of a page apart, of half a page, or of a quarter, so that they evict each other
    evicting_store_cycles: tuple[float, float, float] = (40.0, 12.0, 4.0)
    launch_cycles: float = CORE_START_CYCLES    # cycles to wake the other cores for a phase
    combined_line_cycles: float = 60.0  # cycles for a cache line of partial results that another core has stored and one core combines
    unhidden_share: float = 0.4         # share of the other resources' time that is added to that of the slowest one
    unhidden_translations: float = 0.3  # share of address translations that is never hidden, as the oldest instructions wait for them

    def lane_store(self, stride: int) -> float:
        """Cycles to store one lane. `stride`: bytes between lanes."""
        near = [cycles for k, cycles in enumerate(self.evicting_store_cycles) if stride % (PAGE_BYTES >> k) == 0]
        return near[0] if near else self.lane_store_cycles


CPU = Cpu()
#: Terms of a stage's cost: instructions, lines into each cache and from memory, address translations, start of other cores.
TERMS = ("instructions", "first cache", "second cache", "memory", "page tables", "other cores", "launch")


@Derived
def cost_of(state: Scheduler) -> Cost:
    """The predicted cost of a state, cached on the state. Raises KernelOptError if its placements contradict each other."""
    pricer = _StatePricer(state, loop_nest(state))
    works = {work.r.stage.index: work for work in work_of(state)}
    return total([pricer.price(works[s]) for s in sorted(works, key=_pricing_order(state))])


def _pricing_order(state: Scheduler) -> Callable[[int], tuple[bool, int]]:
    """The order in which stages are priced: the output, then later stages first, so that readers come before the stages that they read."""
    return lambda s: (s != state.kernel.output, -s)


def bounds_of(state: Scheduler) -> Iterator[float]:
    """Lower bounds of the cycles that `cost_of` predicts. Each is at least as high as the one before, and took more time to compute; the
    last one is exact. Raises KernelOptError as `cost_of` does.

    The first bounds are those of the output alone: its instructions, then its memory accesses as well. They need no tree if no loop skips
    iterations; blocks of long sums and accumulators in memory are added last of all."""
    out, nests, found = state.kernel.output, LoopNestMaker(state), dict[int, float]()
    is_plain = state.split_reduce is None and not windows_of(state.kernel, out)
    if is_plain:
        alone = nests.make([out])
        at = _loops_of_output(state, alone)
        issue = IssuePricer(_work(state, alone, at), CPU).price()
        yield issue.cycles / _speedup(state, at, True, cores_of(state)) + _launch(state, True)
    nest = nests.make()
    loop_nest.give(state, nest)
    pricer, trees, runs, data = _StatePricer(state, nest), TreeMaker(state, nest), dict[int, StageRuns](), dict[int, Traffic]()
    if is_plain:
        work = _work(state, nest, at)
        data[out] = pricer.traffic(work)
        found[out] = pricer.cycles(work, issue, data[out])
        yield found[out]
    stages = [s for s in sorted(nest.stages, key=_pricing_order(state)) if not pricer.is_once(s)]
    for s in sorted(stages, key=lambda s: s in found):
        if s not in runs:
            root = phase_of(nest.placement, s)
            runs |= stage_runs(state.kernel, nest.stages, counted_tree(trees, trees.phases_of(root, cut_of(state, root))))
        work = _work(state, nest, runs[s])
        issue = IssuePricer(work, CPU).price()
        if s not in data:
            yield sum(found.values()) + pricer.least(work, issue)
            data[s] = pricer.traffic(work)
        found[s] = pricer.cycles(work, issue, data[s])
        yield sum(found.values())


def _loops_of_output(state: Scheduler, nest: LoopNest) -> StageRuns:
    """The loops of the output, none of which skips iterations or is split into parts."""
    out = nest.stages[state.kernel.output]
    loops = {p.row: LoopRuns(p.row, ((a, p.stride),), float(p.extent)) for a, own in enumerate(out.axes) for p in own if p.extent > 1}
    return StageRuns(out, (), tuple([loops[row] for row in state.order[out.r.stage.index] if row in loops]))


def within(states: Sequence[Scheduler], factor: float) -> dict[int, float]:
    """The states that are predicted to take at most `factor` times as long as the fastest of them: their numbers, in order, and cycles.
    The one with the lowest bound is always the next to be priced further, until no bound is low enough."""
    limit, exact = inf, dict[int, float]()
    bounds = [(next(more), number, more) for number, more in enumerate(map(bounds_of, states))]
    heapify(bounds)
    while bounds and bounds[0][0] <= limit:
        bound, number, more = bounds[0]
        higher = next(more, None)
        if higher is not None:
            heapreplace(bounds, (higher, number, more))
            continue
        heappop(bounds)
        exact[number] = bound
        limit = min(limit, factor * bound)
    return {number: exact[number] for number in sorted(exact) if exact[number] <= limit}


class _StatePricer:
    """Prices the stages of a state; readers come before the stages that they read."""

    def __init__(self, state: Scheduler, nest: LoopNest) -> None:
        self.state, self.placement, self.layouts, self.threads = state, nest.placement, nest.layouts, cores_of(state)
        kept = float(count_operations(state.kernel.ast).bytes_moved)
        self.memory = _Memory(state, nest, kept)
        # Phases that run at prepare have a memory of their own: they leave nothing in the caches for those of a run.
        self.at_prepare = _Memory(state, nest, kept)

    def least(self, work: StageWork, issue: IssueCost) -> float:
        """A lower bound of the cycles of a stage that does not run once: those of its instructions."""
        return issue.cycles / _speedup(self.state, work.at, self._is_phase(work), self.threads) + self._launched(work)

    def traffic(self, work: StageWork, is_once: bool = False) -> Traffic:
        """The price of the memory accesses of a stage."""
        state, kernel, r = self.state, self.state.kernel, work.r
        streamed = state.stream and r.store is not None and has_non_temporal_stores(state)
        non_temporal = float(kernel.params[r.store_slot].arg.size * stored_bytes(state, self.layouts, r.stage.index)) if streamed else 0.0
        if not kernel.written:      # a kernel that reads what it writes loads the stored data again
            self.memory.kept -= non_temporal    # the output stage comes first, and no stage reads it
        return (self.at_prepare if is_once else self.memory).of_stage(work, non_temporal)

    def cycles(self, work: StageWork, issue: IssueCost, data: Traffic) -> float:
        """The cycles of a stage that does not run once, on all cores, from the prices of its instructions and memory accesses."""
        cpu, slowest = CPU, max(issue.cycles, *data.cycles)
        cycles = slowest + (cpu.unhidden_share * (issue.cycles + sum(data.cycles) - slowest)
                            + cpu.unhidden_translations * data.translated + data.crossing)
        return cycles / _speedup(self.state, work.at, self._is_phase(work), self.threads) + self._launched(work)

    def price(self, work: StageWork) -> Cost:
        """The cost of a stage."""
        stage, s, is_phase = work.stage, work.r.stage.index, self._is_phase(work)
        is_once, issue = self.is_once(s), IssuePricer(work, CPU).price()
        scratch, data = 0 if is_phase else stored_bytes(self.state, self.layouts, s) * prod(stage.region), self.traffic(work, is_once)
        if is_once:
            return Cost(0.0, int(issue.accumulators), scratch, issue.flops, data.moved)
        cycles, speedup = self.cycles(work, issue, data), _speedup(self.state, work.at, is_phase, self.threads)
        terms = (*[c / speedup for c in (issue.cycles, *data.cycles, data.crossing)], self._launched(work))
        part = CostPart(stage.r.stage.name, cycles, tuple(zip(TERMS, terms, strict=True)))
        return Cost(cycles, int(issue.accumulators), scratch, issue.flops, data.moved, (part,))

    def _launched(self, work: StageWork) -> float:
        """Cycles to wake the other cores, and to combine the partial results of a split reduction, most of which other cores have
        stored."""
        state, stage = self.state, work.stage.r.stage
        waking, cut = _launch(state, self._is_phase(work)), cut_of(state, stage.index)
        if cut is None:
            return waking
        results, threads = prod([state.kernel.axes[a].extent for a in stage.outs]), state.target.threads
        lines = results * sum([d.itemsize for red in work.r.reductions for d in red.dtypes]) / CACHE_LINE_BYTES
        far = cut.parts * (1.0 - 1.0 / min(cut.parts, threads)) * lines
        return waking + CPU.combined_line_cycles * far / (1 if results < FEW_SUMS else threads)

    def _is_phase(self, work: StageWork) -> bool:
        return self.placement.paths[work.r.stage.index] == ()

    def is_once(self, s: int) -> bool:
        """Whether a stage is computed in a phase that runs once, at prepare."""
        return is_computed_once(self.state, self.placement, phase_of(self.placement, s))


def _launch(state: Scheduler, is_phase: bool) -> float:
    """Cycles to wake the other cores."""
    return CPU.launch_cycles if is_phase and cores_of(state) > 1 else 0.0


def _speedup(state: Scheduler, at: StageRuns, is_phase: bool, threads: int) -> float:
    """How many times faster `threads` cores run a stage than one core does: each core takes whole iterations of the parallel loop."""
    if threads < 2:
        return 1.0
    stage, parallel = at.nest.r.stage, state.thread
    found = [loop.times for loop in (*at.around, *at.own) if parallel is not None and loop.row == parallel.row]
    if found:
        shared = found[0]
    elif stage.is_output:
        shared = 1.0 if parallel is not None else float(threads)
    else:
        shared = prod([loop.times for loop in at.own if loop.axis < len(stage.outs)]) if is_phase else float(threads)
    return shared / -(-shared // threads)


def work_of(state: Scheduler) -> list[StageWork]:
    """The work of each stage of a state as one core does it: all loops run serially, in vectors; readers come before the stages that they
    read. Raises KernelOptError as `cost_of` does."""
    nest = loop_nest(state)
    return [_work(state, nest, at) for at in stage_runs(state.kernel, nest.stages, counted_tree(TreeMaker(state))).values()]


def _work(state: Scheduler, nest: LoopNest, at: StageRuns) -> StageWork:
    return StageWork(state, nest, at, [(loop.axis, loop.times) for loop in at.own], len(at.around), vector_width(state, at.nest.r))


# -- instructions -------------------------------------------------------------------------------------------
class IssueCost(NamedTuple):
    """The price of a stage's instructions."""

    cycles: float            # cycles of all runs of the stage
    accumulators: float      # vector registers that live through the reduce loops
    flops: float


class IssuePricer:
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
        if self.dot.corrects:    # each vector of results has another accumulator, for the correction
            self.arithmetic += work.body * vectors * work.tile / max(accumulators, 1.0)
            accumulators += vectors
        spills = self._spills(accumulators, vectors, is_transposed)
        launched = prod([loop.times for loop in work.at.own if loop.is_launched]) * max(1, work.at.parts)
        # accumulators in scratch memory are loaded and stored
        self.loads += 2.0 * accumulators * work.at.updates * launched * sum(len(red.values) for red in self.r.reductions)
        most, least = max(self.loads, self.arithmetic), min(self.loads, self.arithmetic)
        slots = (most + cpu.contention_share * least) / cpu.issued_per_cycle + spills
        ends = work.at.block_ends * launched
        overhead = cpu.loop_cycles * (sum(work.runs_of_loop[1:]) + ends) + cpu.block_end_cycles * ends * accumulators
        cycles = max(slots, self._chain(accumulators)) + overhead + store + self._awaited() + self._across()
        per_vector = stage.num_lanes / -(-stage.num_lanes // work.lanes) if stage.vector >= 0 else 1.0
        return IssueCost(cycles * work.at.times, accumulators, 2 * work.multiply_adds * self.dot.group * per_vector * work.at.times)

    def _count(self) -> None:
        """Count the operations of sums, loads and arithmetic."""
        for red in self.r.reductions:
            cost = self.dot.cost if len(red.values) == 1 else self.cpu.combined_operations[len(red.values)]
            self.arithmetic += self.work.body * self.work.tile * cost
            if self.stage.vector >= self.work.outs:     # the partial results of a row are in the lanes of a vector
                self.arithmetic += self.cpu.across_operations * max(1.0, cost) * self.work.runs(range(self.work.outs))
        for i, n, is_load in self.work.values():
            if is_load:
                self._load(i, n)
            else:
                price = PRICE_OF_OPERATION.get(n.op, self.cpu.operations[kind_of(n)])
                self.arithmetic += price * self.work.runs_of(i)

    def _load(self, i: int, n: Node) -> None:
        count = self.work.runs_of(i)
        for lin in n.dims if n.linear is None else (n.linear,):
            count *= self.work.distinct(n.deps, lin.coefs)
        known = n.gate >= 0 and has_constant_lanes(self.work, n.gate)
        if n.gate >= 0 and not known:
            self.arithmetic += self.cpu.mask_operations * count
        if self.stage.vector in n.deps:
            vectors, shuffles = self._lane_loads(n, known)
            self.arithmetic += shuffles * count
            count *= vectors
        self.loads += count * self.dot.load if n.kind == "read" else count

    def _lane_loads(self, n: Node, known: bool) -> tuple[float, float]:
        """(price in loads, shuffles) of one vector of a load or read, by the distance of its lanes in memory. `known`: the mask is a
        constant."""
        cpu, lanes, vector_loop = self.cpu, min(self.work.lanes, self.stage.num_lanes), self.stage.vector_loop
        step, aligned = self._staged_lanes(n, lanes) if n.linear is None else self._memory_lanes(n, lanes)
        assert vector_loop is not None
        step = abs(step * vector_loop.stride)
        if step <= 1 or (step <= cpu.shuffled_step and (n.gate < 0 or self.work.state.target.has_masked_memory)):
            shuffles = (step - 1.0) * (1.0 if n.gate < 0 or known else 1.0 + 2.0 * cpu.spread_mask_operations)
            if n.gate >= 0 and step > 1:
                shuffles += step * cpu.wide_mask_operations
            return (step if aligned else 2.0 * step), shuffles      # a wide vector that is not aligned touches two cache lines
        if n.linear is None:
            return cpu.staged_lane_loads * lanes, 0.0
        if n.gate < 0 and any(self._is_wide(a, lanes) for a, c in n.linear.coefs if c == 1 and a != self.stage.vector):
            return cpu.transposed_lane_loads * lanes, 0.0
        # lanes that share one bit of the mask are loaded in a branch, or not at all
        is_masked = n.gate >= 0 and self.stage.vector in self.r.nodes[n.gate].deps
        return (cpu.masked_lane_loads if is_masked else cpu.lane_loads) * lanes, 0.0

    def _staged_lanes(self, n: Node, lanes: int) -> tuple[int, bool]:
        """(elements between the lanes of a read of scratch memory, whether all its vectors are aligned)."""
        order, vector = self.work.nest.layouts.orders.get(n.arg), self.stage.vector
        inner = order[-1] if order else -1
        moved = [(dim, lin) for dim, lin in enumerate(n.dims) if lin.coef(vector)]
        steps = [lin.coef(vector) if inner in (dim, -1) else ANYWHERE_BYTES for dim, lin in moved]
        return max(steps, key=abs, default=ANYWHERE_BYTES), all(is_aligned(lin.coefs, 0, vector, lanes) for _, lin in moved)

    def _memory_lanes(self, n: Node, lanes: int) -> tuple[int, bool]:
        """(elements between the lanes of a load, whether all its vectors are aligned)."""
        linear, vector = n.linear, self.stage.vector
        assert linear is not None
        gathered = any(vector in self.r.nodes[x].deps for x, _ in linear.atoms)
        return ANYWHERE_BYTES if gathered else linear.coef(vector), is_aligned(linear.coefs, linear.const, vector, lanes)

    def _is_wide(self, a: int, lanes: int) -> bool:
        """Whether a whole vector of positions along axis `a` is computed side by side, so that the positions and the lanes form squares,
        which are transposed in registers."""
        region = self.stage.region
        return self.work.positions[a] >= lanes or (is_derived(self.r.stage) and a < len(region) and region[a] >= lanes)

    def _stores(self) -> tuple[float, bool]:
        """(cycles of the stores, whether lanes are stored separately)."""
        work, outs, lane = self.work, self.work.outs, self.stage.vector
        own = sum(1 for a, _ in work.loops if a < outs)
        store = (work.runs_of_loop[own] if all(a < outs for a, _ in work.loops[:own]) else work.body) * work.rows * self.dot.store
        linear = self.r.store
        if linear is None or not 0 <= lane < outs or linear.coef(lane) == 1:
            return store, False
        per_lane = self.cpu.lane_store(linear.coef(lane) * self.r.stage.dtype.itemsize)
        beside = max([work.positions[a] for a, c in linear.coefs if c == 1], default=1)
        # contiguous positions of one lane are stored together, and miss the cache once
        if beside >= self.cpu.transposed_positions:
            per_lane = self.cpu.transposed_lane_loads + (per_lane - self.cpu.lane_store_cycles) / beside
        return store * per_lane * min(work.lanes, self.stage.num_lanes), True

    def _spills(self, accumulators: float, vectors: float, is_transposed: bool) -> float:
        """Cycles for accumulators that do not fit the registers."""
        registers = accumulators + vectors + 1     # accumulators, a row of vectors, and one value in all lanes
        if is_transposed:
            registers += vectors - 1
        free = self.work.state.target.vector_registers - registers
        if not self.r.reductions:
            return 0.0
        cycles = self.cpu.spill_cycles * max(0.0, -free) + self.cpu.narrow_cycles * max(0.0, self._narrow_sums() - max(0.0, free))
        return cycles * self.work.body * self.work.tile / accumulators

    def _narrow_sums(self) -> float:
        """Sums in vectors that are narrower than the others of their rows, and that take a second register each, as the loop is unrolled:
        LLVM adds to the value in all lanes, instead of to the sum, if the narrow vector reads a part of that value's register."""
        work, stage = self.work, self.stage
        is_unrolled = 0 <= stage.vector < work.outs and work.tile > work.accumulators
        if not is_unrolled or not has_two_widths(stage.num_lanes, work.lanes):
            return 0.0
        product = product_of(self.r)
        if product is None or all(stage.vector in self.r.nodes[v].deps for v in product.src):
            return 0.0
        return work.accumulators / -(-stage.num_lanes // work.lanes)

    def _awaited(self) -> float:
        """Cycles that the readers of a copy in scratch memory wait for its stores, if they load vectors across the stored ones."""
        work, stage, s = self.work, self.stage, self.r.stage.index
        if not work.at.around or not work.nest.layouts.orders.get(s) or not any(
                self._lies_across(work.nest.stages[r.stage.index], node) for r, node in work.nest.placement.reads_of(s)):
            return 0.0
        length = stage.region[work.nest.layouts.orders[s][-1]]
        rows, vectors = prod(stage.region) / length, ceil(length / work.lanes)
        is_short = vectors <= self.cpu.awaited_row_vectors and rows * vectors <= self.cpu.awaited_vectors
        return self.cpu.awaited_row_cycles * rows if is_short else 0.0

    def _across(self) -> float:
        """Cycles that the readers of sums across lanes wait for, once for all sums of a run, which do not depend on each other."""
        work = self.work
        return self.cpu.across_cycles if self.r.reductions and self.stage.vector >= work.outs and work.at.around else 0.0

    def _lies_across(self, reader: StageNest, node: Node) -> bool:
        """Whether vectors of a read begin anywhere in the vectors that were stored, or skip elements."""
        moved = [lin for lin in node.dims if reader.vector >= 0 and lin.coef(reader.vector)]
        return any(abs(lin.coef(reader.vector)) > 1 or not is_aligned(lin.coefs, 0, reader.vector, self.work.lanes) for lin in moved)

    def _chain(self, accumulators: float) -> float:
        """Cycles of the longest chain of dependent additions."""
        if not self.r.reductions:
            return 0.0
        work, cpu = self.work, self.cpu
        # number of sums that a core works on at the same time
        ahead = 1.0 + cpu.lookahead_operations * work.body / (work.summed() * max(self.loads + self.arithmetic, 1.0))
        return cpu.latency_cycles * work.body * (work.tile / max(accumulators, 1.0)) / ahead


# -- memory -------------------------------------------------------------------------------------------------
class _Memory:
    """Prices the memory accesses of a state's stages. Readers come before the stages that they read.

    `kept`: bytes of arguments that a run of the kernel reads and writes. If they fit into a cache, the next run finds them there."""

    def __init__(self, state: Scheduler, nest: LoopNest, kept: float) -> None:
        self.state, self.nest, self.kept, self.caches = state, nest, kept, caches_of(state.target)
        self.threads = cores_of(state)
        self.readers: dict[int, list[tuple[int, ...]]] = {}     # argument → loop rows of each stage that reads it

    def of_stage(self, work: StageWork, non_temporal: float) -> Traffic:
        """Price the accesses of a stage over all its runs. `non_temporal`: bytes that it stores non-temporally."""
        stage, accesses, is_shared, parted = work.stage, list[Access](), list[bool](), self._parted_axes(work)
        crossing = dict[int, float]()       # stage of an earlier phase → cycles
        for _, n, is_load in work.values():
            if is_load and n.linear is not None:
                accesses.append(self._load(work, n, n.linear, parted))
                is_shared.append(self._is_shared(work.at, n))
            elif is_load:
                accesses.append(self._read(work, n, parted))
                is_shared.append(False)
                crossing[n.arg] = max(crossing.get(n.arg, 0.0), self._crossing(n, accesses[-1], parted))
        if (store := self._store(work, non_temporal)) is not None:
            accesses.append(store)
            is_shared.append(False)
        loops = [*[(loop.axis, loop.times) for loop in work.at.around], *work.loops]
        cost = traffic(self.caches, loops, work.outside, _body(stage), accesses, is_shared, self.kept)
        _, near, far = self.caches.levels
        # the result of an earlier phase lies in the caches of all cores
        cost = cost._replace(second=cost.second + sum(crossing.values()) * near.unforeseen * (1.0 - 1.0 / self.threads))
        if not non_temporal:
            return cost
        # Data go to memory, and come from there when they are read. A line whose neighbour is stored much later costs a separate access to
        # DRAM.
        size = stored_bytes(self.state, self.nest.layouts, work.r.stage.index)
        alone = stage.num_lanes * size <= CACHE_LINE_BYTES and (not work.loops or work.loops[-1][0] != stage.vector)
        of_line = 2.0 * far.streamed - near.streamed + (far.unforeseen - far.streamed) * alone
        return cost._replace(memory=cost.memory + non_temporal / CACHE_LINE_BYTES * of_line, moved=cost.moved + non_temporal)

    def _load(self, work: StageWork, n: Node, linear: LinearIndex, parted: set[int]) -> Access:
        """The access of a load. Other kernels of a plan have computed what is no constant, each core a part of it."""
        outermost = max(linear.coefs, key=lambda step: step[1], default=(-1, 0))[0]
        # kernels that share their outermost dims among cores find what they need where they are
        near = 1.0 if outermost in parted else 1.0 / self.threads
        access = work.load(n, linear)
        return access._replace(cores=self._reading_cores(access, parted), near=near)

    def _parted_axes(self, work: StageWork) -> set[int]:
        """The local axes of a stage along which each core has a part of its own. The cores share the outermost loop of a phase."""
        state, stage = self.state, work.stage
        if self.nest.placement.paths[stage.r.stage.index] == () and not stage.r.stage.is_output:
            return {loop.axis for loop in work.at.own[:1]}
        if state.split_reduce is not None:
            row, shared = state.axis_rows[state.split_reduce.axis][0], state.split_reduce.axis
        elif state.thread is not None:
            row, shared = state.thread.row, state.rows[state.thread.row].axis
        else:
            return set()
        moved = [a for a, (terms, _) in enumerate(stage.starts) if row in terms]
        return {*moved, *[i for i, a in enumerate(stage.r.axes) if a == shared]}

    def _reading_cores(self, access: Access, parted: set[int]) -> int:
        """The number of cores that each read all of the data; 1 if each reads a part of its own."""
        return self.threads if parted.isdisjoint([a for a, _ in access.coefs]) else 1

    def _is_shared(self, at: StageRuns, n: Node) -> bool:
        """Whether another stage inside the same loops loads the same argument."""
        rows, depth, seen = _rows(at), len(at.around), self.readers.setdefault(n.arg, [])
        shared = any(other[:depth] == rows[:depth] for other in seen)
        seen.append(rows)
        return shared

    def _read(self, work: StageWork, n: Node, parted: set[int]) -> Access:
        """The access of a read of a staged value."""
        access, layout = work.read(n), self.nest.stages[n.arg].layout
        outer = frozenset([row for t, depth in self.nest.placement.paths[n.arg] or () for row in self.state.order[t][:depth]])
        fixed = sum([row in outer for row in _rows(work.at)])
        tile = None
        if layout is not None and layout.tiled >= 0:
            (axis, _), *_ = n.dims[layout.tiled].coefs
            tile = Tile(axis, layout.tile, layout.outer * access.itemsize)
        is_once = is_computed_once(self.state, self.nest.placement, n.arg)
        return access._replace(fixed=fixed, is_made_inside=not is_once, is_evicted=is_once, tile=tile,
                               cores=self._reading_cores(access, parted) if is_once else 1)

    def _crossing(self, n: Node, access: Access, parted: set[int]) -> float:
        """Lines of an earlier phase's result that may lie in another core's cache when this stage reads them."""
        if self.nest.placement.paths[n.arg] != () or self.state.thread is None or is_computed_once(self.state, self.nest.placement, n.arg):
            return 0.0
        size = access.itemsize
        for a in self.state.kernel.stages[n.arg].outs:
            size *= self.state.axis_extent(a)
        return size / CACHE_LINE_BYTES * self._reading_cores(access, parted)

    def _store(self, work: StageWork, non_temporal: float) -> Access | None:
        """The store of a stage's value as an access; None if it is non-temporal."""
        r, stage = work.r, work.stage
        size = stored_bytes(self.state, self.nest.layouts, r.stage.index)
        if r.store is not None:
            return work.store(size, work.place) if not non_temporal else None
        layout = stage.layout
        assert layout is not None
        tile = Tile(layout.tiled, layout.tile, layout.outer * size) if layout.tiled >= 0 else None
        around = bool(work.at.around)
        return work.store(size, work.place)._replace(fixed=work.outside, is_made_inside=around, tile=tile)


def _rows(at: StageRuns) -> tuple[int, ...]:
    """The loop rows around the innermost body of a stage, outermost first. Loops of a copy have no row."""
    return tuple([loop.row for loop in (*at.around, *at.own) if loop.row != NO_ROW])


def _body(stage: StageNest) -> list[float]:
    """Positions of each axis in one innermost iteration."""
    return [float(prod([p.extent for p in group if p.role != LOOP])) for group in stage.axes]
