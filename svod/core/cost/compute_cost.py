"""What the instructions of a stage cost: vector loads, arithmetic, stores, accumulators, the bookkeeping of loops.

A value is counted at the loop it stands in: one that an inner loop does not change is computed once around that loop. Register tiles and
unrolled positions are counted one by one, a vector as one.
"""
from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

from svod.core.cost.memory_traffic import ANYWHERE, PAGE
from svod.core.ir.dtype import dtypes
from svod.core.ir.summation import blocked_nest
from svod.core.ir.uop import TRANSCENDENTAL
from svod.core.kernel.contraction import skipping_window
from svod.core.kernel.intrinsics import rate_of
from svod.core.kernel.kernel import LinearIndex, Node, ResolvedStage
from svod.core.kernel.loop_nest import LoopNest, StageNest
from svod.core.kernel.placement import EmittedLoop, is_derived, vector_width
from svod.core.kernel.scheduler import DOT, LOOP, UNROLL, UPCAST, Scheduler

_COSTLY = frozenset(op.value for op in TRANSCENDENTAL)
_COMBINED = {2: 6.0, 3: 30.0}     # operations that combine two results of so many components: ARGMAX; EXPSUM, with its exponential
_LATENCY = 4.0            # cycles of a multiply-add or add
_WINDOW = 400.0           # instructions that a core looks ahead: sums that end within them overlap with the next ones
_LOOP_CYCLES = 1.5        # cycles of bookkeeping in an iteration
_LANE_LOAD = 1.5          # loads' worth of one lane that is loaded by itself
_LANE_MASKED = 6.0        # the same under a mask
_MASK = 2.0               # operations that make the mask of a load whose lanes differ from one iteration to the next
_SPREAD = 4.0             # operations that bring a mask to the lanes of one of several wide loads
_WIDE_MASKED = 2.0        # operations' worth of a wide load under a mask that is shuffled after it
_LANE_READ = 8.0          # the same from a staged area, whose rows are mostly a power of two apart and share cache sets
_LANE_TURNED = 0.5        # the same where squares are transposed in registers
_SQUARE = 4               # positions side by side from which stores of lanes are transposed in registers
_LANE_STORE = 3.0         # cycles of one lane that is taken out of a vector and stored by itself
_CONTENTION = 0.15        # the share of loads that is not hidden behind arithmetic, or the other way round: they are issued from one queue
_SPILL_CYCLES = 5.0       # cycles for an accumulator in memory in each iteration: stored, and loaded again before it is used
_BLOCK_END = 2.0          # cycles of an accumulator at the end of a block of a long sum: it is added to another one, and made zero
_SHORT_STEP = 4           # elements between lanes up to which vectors are loaded and shuffled


class ComputeCost(NamedTuple):
    """The instructions of a stage."""

    cycles: float            # of all times the stage runs
    accumulators: float      # vector registers that live through the reduce loops
    flops: float
    loads: float             # of one time
    multiply_adds: float     # of one time
    reads: list[Node]        # the loads, and the reads of staged values


def compute_cost(state: Scheduler, nest: LoopNest, s: int) -> ComputeCost:
    """The instructions of stage `s`."""
    return _StageCounter(state, nest, nest.stages[s]).count()


def iterations(state: Scheduler, stage: StageNest, a: int, loop: EmittedLoop) -> float:
    """How many iterations of a loop run, on average: those that add zeros are skipped."""
    r = stage.r
    window = skipping_window(state, r, a, stage.axes[a]) if a >= len(r.stage.outs) else None
    if window is None:
        return loop.extent
    tile = math.prod(p.extent for p in stage.axes[window.output] if p.role != LOOP)
    return loop.extent * window.used(tile, state.kernel.axes[r.axes[window.output]].extent, loop.extent)


class _StageCounter:
    """Counts the instructions of one stage."""

    def __init__(self, state: Scheduler, nest: LoopNest, stage: StageNest) -> None:
        self.state, self.nest, self.stage = state, nest, stage
        self.r, self.vector = stage.r, stage.vector
        self.outs = len(stage.r.stage.outs)
        self.width = vector_width(state, stage.r)
        self.dot = rate_of(nest.layouts.dots.get(stage.r.stage.index), state.target)
        self.runs_of_loop = [1.0]                       # how often the body of the first k loops runs
        for a, loop in stage.loops:
            self.runs_of_loop.append(self.runs_of_loop[-1] * iterations(state, stage, a, loop))
        self.body = self.runs_of_loop[-1]
        self.expanded = [1.0] * len(stage.axes)         # positions side by side per axis; vectors on the vector axis
        self.upcast = [1.0] * len(stage.axes)           # those of them that have accumulators of their own
        for a, group in enumerate(stage.axes):
            for p in group:
                if p.role not in (LOOP, DOT):
                    positions = -(-p.extent // self.width) if p is stage.vector_loop else p.extent
                    self.expanded[a] *= positions
                    if p.role == UPCAST:
                        self.upcast[a] *= positions
        self.tile = math.prod(self.expanded)
        self.loads = self.alu = self.multiply_adds = 0.0
        self.reads: list[Node] = []

    def count(self) -> ComputeCost:
        skip = self._reductions()
        self._values(skip)
        store, is_turned = self._stores()
        accumulators = math.prod(self.upcast)
        vectors = self.expanded[self.vector] if 0 <= self.vector < self.outs else 1.0
        if self.dot.corrects:    # a sum beside it for each vector
            self.alu += self.body * vectors * self.tile / max(accumulators, 1.0)
            accumulators += vectors
        spills = self._spills(accumulators, vectors, is_turned)
        if self.r.reductions and self.stage.innermost < self.outs and any(a >= self.outs for a, _ in self.stage.loops):
            # accumulators in scratch
            self.loads += 2.0 * accumulators * self.body * sum(len(red.values) for red in self.r.reductions)
        slots = (max(self.loads, self.alu) + _CONTENTION * min(self.loads, self.alu)) / 2 + spills
        ends = block_ends(self.r, [(a, loop.extent) for a, loop in self.stage.loops], self.stage.axes)
        overhead = _LOOP_CYCLES * (sum(self.runs_of_loop[1:]) + ends) + _BLOCK_END * ends * accumulators
        cycles = max(slots, self._chain(accumulators)) + overhead + store
        num_lanes, times = self.stage.num_lanes, self.stage.times
        per_vector = num_lanes / -(-num_lanes // self.width) if self.vector >= 0 else 1.0
        return ComputeCost(cycles * times, accumulators, 2 * self.multiply_adds * self.dot.group * per_vector * times, self.loads,
                           max(self.multiply_adds, 1.0), self.reads)

    def _runs(self, deps: tuple[int, ...]) -> float:
        """How often a value that depends on these axes is computed."""
        k = 0
        for i, (a, _) in enumerate(self.stage.loops):
            if a in deps:
                k = i + 1
        times = self.runs_of_loop[k]
        for a in deps:
            times *= self.expanded[a]
        return times

    def _reductions(self) -> set[int]:
        """Count the reductions. Returns the nodes that cost nothing of their own: masks, and products inside multiply-adds."""
        skip = masks_of(self.r)
        for red in self.r.reductions:
            product = self.r.nodes[red.values[0]]
            if red.combiner == "ADD" and product.kind == "alu" and product.op == "MUL":
                skip.add(red.values[0])
            self.multiply_adds += self.body * self.tile
            self.alu += self.body * self.tile * (self.dot.cost if len(red.values) == 1 else _COMBINED[len(red.values)])
        return skip

    def _values(self, skip: set[int]) -> None:
        """Count loads and arithmetic."""
        for i, n in enumerate(self.r.nodes):
            if n.dtype == dtypes.index or i in skip:
                continue
            if n.kind == "load" or n.kind == "read":
                self._load(n)
            elif n.kind in ("alu", "cast"):
                self.alu += operation_weight(n) * self._runs(n.deps)

    def _load(self, n: Node) -> None:
        count = self._runs(n.deps) * _shared(n, self.expanded, self.stage, self.width)
        known = n.gate >= 0 and _is_known(self.r, n.gate, self.stage)
        if n.gate >= 0 and not known:
            self.alu += _MASK * count
        if self.vector in n.deps:
            vectors, shuffles = self._lane_loads(n, known)
            self.alu += shuffles * count
            count *= vectors
        self.loads += count * self.dot.load if n.kind == "read" else count
        self.reads.append(n)

    def _lane_loads(self, n: Node, known: bool) -> tuple[float, float]:
        """(cost in loads, shuffles) of one vector of a load or read, from how its lanes lie in memory. `known`: the mask is a constant."""
        lanes = min(self.width, self.stage.num_lanes)
        step, is_aligned = self._staged_step(n, lanes) if n.linear is None else self._memory_step(n, n.linear, lanes)
        assert self.stage.vector_loop is not None
        step = abs(step * self.stage.vector_loop.stride)
        if step <= 1 or (step <= _SHORT_STEP and (n.gate < 0 or self.state.target.has_masked_memory)):
            shuffles = (step - 1.0) * (1.0 if n.gate < 0 or known else 1.0 + 2.0 * _SPREAD)
            if n.gate >= 0 and step > 1:
                shuffles += step * _WIDE_MASKED
            return (step if is_aligned else 2.0 * step), shuffles       # a wide vector that is not aligned takes two lines
        if n.linear is None:
            return _LANE_READ * lanes, 0.0
        if n.gate < 0 and any(self._lies_beside(a, lanes) for a, c in n.linear.coefs if c == 1 and a != self.vector):
            return _LANE_TURNED * lanes, 0.0
        return (_LANE_LOAD if n.gate < 0 else _LANE_MASKED) * lanes, 0.0

    def _staged_step(self, n: Node, lanes: int) -> tuple[int, bool]:
        """Elements between the lanes of a read of scratch, and whether all its vectors are aligned."""
        order = self.nest.layouts.orders.get(n.arg)
        inner = order[-1] if order else -1
        moved = [(dim, lin) for dim, lin in enumerate(n.dims) if lin.coef(self.vector)]
        steps = [lin.coef(self.vector) if inner in (dim, -1) else ANYWHERE for dim, lin in moved]
        return max(steps, key=abs, default=ANYWHERE), not any(c % lanes for _, lin in moved for a, c in lin.coefs if a != self.vector)

    def _memory_step(self, n: Node, linear: LinearIndex, lanes: int) -> tuple[int, bool]:
        """Elements between lanes of a load, and whether all its vectors are aligned."""
        gathered = any(self.vector in self.r.nodes[x].deps for x, _ in linear.atoms)
        is_aligned = not (linear.const % lanes or any(c % lanes for a, c in linear.coefs if a != self.vector))
        return ANYWHERE if gathered else linear.coef(self.vector), is_aligned

    def _lies_beside(self, a: int, lanes: int) -> bool:
        """Whether a vector's positions of axis `a` lie side by side: with the lanes they form squares, which registers transpose."""
        region = self.stage.region
        return self.expanded[a] >= lanes or (is_derived(self.r.stage) and a < len(region) and region[a] >= lanes)

    def _stores(self) -> tuple[float, bool]:
        """Cycles of the stores, and whether lanes are stored one by one."""
        loops, outs, lane = self.stage.loops, self.outs, self.vector
        own = sum(1 for a, _ in loops if a < outs)
        store = self.runs_of_loop[own] if all(a < outs for a, _ in loops[:own]) else self.body
        for a in range(outs):
            store *= self.expanded[a]
        store *= self.dot.store
        linear = self.r.store
        if linear is None or not 0 <= lane < outs or linear.coef(lane) == 1:
            return store, False
        per_lane = _conflict(linear.coef(lane) * self.r.stage.dtype.itemsize)
        beside = max([self.expanded[a] for a, c in linear.coefs if c == 1], default=1.0)
        if beside >= _SQUARE:       # transposed in registers: a lane's positions side by side are stored at once, and miss once
            per_lane = _LANE_TURNED + (per_lane - _LANE_STORE) / beside
        return store * per_lane * min(self.width, self.stage.num_lanes), True

    def _spills(self, accumulators: float, vectors: float, is_turned: bool) -> float:
        """Cycles of accumulators that do not fit the registers."""
        registers = accumulators + vectors + 1     # accumulators, a row of vectors, what is read in all lanes
        if is_turned:
            registers += vectors - 1
        if not self.r.reductions or registers <= self.state.target.vector_registers:
            return 0.0
        return _SPILL_CYCLES * (registers - self.state.target.vector_registers) * self.body * self.tile / accumulators

    def _chain(self, accumulators: float) -> float:
        """Cycles of the longest chain of dependent additions."""
        if not self.r.reductions:
            return 0.0
        sums = math.prod(loop.extent for a, loop in self.stage.loops if a >= self.outs)
        ahead = 1.0 + _WINDOW * self.body / (sums * max(self.loads + self.alu, 1.0))     # sums that are under way at once
        return _LATENCY * self.body * (self.tile / max(accumulators, 1.0)) / ahead


def block_ends(r: ResolvedStage, loops: Sequence[tuple[int, float]], axes: Sequence[Sequence[EmittedLoop]]) -> float:
    """How many blocks of additions end in one run of a stage: 0 where its sums are short. `loops`: (local axis, iterations), outermost
    first; `axes`: all loops per local axis."""
    rule, outs = r.stage.sum_rule, len(r.stage.outs)
    if rule is None:
        return 0.0
    unrolled = math.prod([p.extent for own in axes[outs:] for p in own if p.role == UNROLL])
    iterations = [math.ceil(n) if a >= outs else 1 for a, n in loops]
    if math.prod(iterations) * unrolled <= rule.longest:
        return 0.0
    nest, runs, ends = blocked_nest(rule, iterations, unrolled), 1.0, 0.0
    for (_, n), blocked in zip(loops, nest.loops, strict=True):
        ends += runs * sum([-(-n // size) for size in blocked.sizes])
        runs *= n
    return ends + runs * sum([-(-unrolled // size) for size in nest.positions.sizes])


def operation_weight(n: Node) -> float:
    """Cost of an operation, in additions."""
    if n.op in _COSTLY:
        return 14.0
    return 8.0 if n.op in ("FDIV", "RECIPROCAL", "SQRT") else 1.5 if n.op in ("MAX", "MIN") else 1.0


def masks_of(r: ResolvedStage) -> set[int]:
    """The nodes that only masks of loads use."""
    gates = {n.gate for n in r.nodes if n.gate >= 0}
    used: set[int] = set()
    for i in range(len(r.nodes) - 1, -1, -1):
        (gates if i in gates and i not in used else used).update(r.nodes[i].src)
    return gates - used


def _shared(n: Node, expanded: list[float], nest: StageNest, width: int) -> float:
    """The share of distinct elements among those that a load reads over all expanded positions: neighbouring windows overlap."""
    share = 1.0
    for lin in n.dims if n.linear is None else (n.linear,):
        terms = [(abs(c) * (width if a == nest.vector else 1), expanded[a]) for a, c in lin.coefs if expanded[a] > 1.0]
        if len(terms) < 2:
            continue
        terms.sort()
        step, count = terms[0]
        for c, e in terms[1:]:
            if c % step == 0 and c <= count * step:
                more = count + c // step * (e - 1.0)
                share *= more / (count * e)
                count = more
            else:
                step, count = c, e
    return share


def _is_known(r: ResolvedStage, gate: int, nest: StageNest) -> bool:
    """Whether a mask is the same for each lane at every iteration, up to a part common to all lanes: it is then a constant."""
    moved = {a for a, _ in nest.loops} | {loop.moves for loop in nest.around}
    todo, seen = [gate], False
    while todo:
        n = r.nodes[todo.pop()]
        if n.kind == "alu" and n.op == "AND":
            todo += n.src
        elif nest.vector in n.deps:
            seen = True
            if not moved.isdisjoint(n.deps):
                return False
    return seen


def _conflict(stride: int) -> float:
    """Cycles of a one-lane store: stores a multiple of the cache's set stride apart evict each other."""
    return 40.0 if stride % PAGE == 0 else 12.0 if stride % (PAGE // 2) == 0 else 4.0 if stride % (PAGE // 4) == 0 else _LANE_STORE
