"""Emits the positions that each thread of a group computes, and the combination of partial results over threads.

    LOCAL(o0, 8) GROUP(r0, 4)           t = LOCAL_ID;  o0 starts at t // 4;  r0 starts at t % 4
    the sum over the four of a row      lanes of a subgroup: acc += SHFL_XOR acc [2];  acc += SHFL_XOR acc [1]
    over five: not a power of two       p[t] = acc;  BARRIER;  acc = p[t - t % 5];  LOOP k in 1…5: acc += p[t - t % 5 + k]
    over several subgroups              shuffles in each;  its first lane: p[t // 32] = acc;  BARRIER;  acc = Σ p

All threads run the same loops: the ones that no opt has bound to threads. A thread beyond the last position repeats the work of another
thread. If threads share a reduction, or hold a row of a tile together, the first of them stores the result. If they hold a tile of
results, each stores the elements that it holds."""
from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial, reduce

from svod.compile.lower.builder import Builder
from svod.compile.lower.emit.threads.shared import SharedMemory
from svod.core.ir.combiner import get_combiner
from svod.core.ir.dtype import dtypes
from svod.core.ir.summation import blocked_loop
from svod.core.kernel.groups import BLOCK_ROLES, StageThreads, ThreadGroup, exchanging_threads, thread_digits
from svod.core.kernel.intrinsics import held_layout, held_threads, sharing_digits, shuffles_of
from svod.core.kernel.kernel import ResolvedStage
from svod.core.kernel.placement import EmittedLoop
from svod.core.kernel.required import Lin, add_lins
from svod.core.kernel.scheduler import Scheduler
from svod.core.machine.isa import Fragment
from svod.core.tree.threads import held_sides

INDEX, BOOL = dtypes.index, dtypes.bool
Alu = Callable[..., int]      # emits an elementwise operation (`Accumulators.alu`)
ONE_THREAD = StageThreads(1, 1, 1)
NOWHERE: Lin = ({}, 0)


class GroupThreads:
    """The threads of a group in one phase, as index values."""

    def __init__(self, b: Builder, state: Scheduler, group: ThreadGroup, stages: Mapping[int, StageThreads]):
        self.b, self.state, self.group, self.stages = b, state, group, dict(stages)
        self.shared = SharedMemory(b, state.target.shared_bytes)
        self.digits = thread_digits(state, self.stages)
        self.thread = b.pure("LOCAL_ID", INDEX, 1, ()) if group.threads > 1 else -1
        self.exchanges = False      # whether threads of a subgroup exchange values by shuffles

    def threads_of(self, s: int) -> StageThreads:
        return self.stages.get(s, ONE_THREAD)

    def _part(self, value: int, inner: int, extent: int, whole: int) -> int:
        """Emit value // inner % extent, without operations that cannot change the value. `whole`: `value` is less than this."""
        b = self.b
        if inner > 1:
            value = b.alu("IDIV", INDEX, 1, value, b.index(inner))
        return value if inner * extent >= whole else b.alu("MOD", INDEX, 1, value, b.index(extent))

    def _thread_of(self, own: StageThreads) -> int:
        """Emit the number of this thread among the threads that compute a stage. If the group has more threads, the others repeat the
        work of the first ones, or of the last one."""
        if own.threads == self.group.threads:
            return self.thread
        if self.group.threads % own.threads == 0:
            return self.b.alu("MOD", INDEX, 1, self.thread, self.b.index(own.threads))
        return self.b.alu("MIN", INDEX, 1, self.thread, self.b.index(own.threads - 1))

    def _reducer_of(self, own: StageThreads) -> int:
        """Emit the number of the part of a stage's reductions that this thread computes."""
        reducer = self._part(self._thread_of(own), 1, own.inner, own.threads)
        return reducer if own.reducers in (1, own.inner) else self.b.alu("MIN", INDEX, 1, reducer, self.b.index(own.reducers - 1))

    def stores(self, s: int) -> int:
        """Emit the condition that this thread stores its results of stage `s`; -1 if all threads store."""
        if self.group.threads == 1:
            return -1
        b, own = self.b, self.threads_of(s)
        firsts = sharing_digits(self.state, s)
        if own.inner > 1 and held_threads(self.state, s) == 1:
            firsts = [(1, own.inner)]
        digits = [self._part(self.thread, inner, extent, self.group.threads) for inner, extent in firsts]
        conditions = [b.alu("CMPEQ", BOOL, 1, digit, b.index(0)) for digit in digits]
        if own.threads < self.group.threads:
            conditions.insert(0, b.alu("CMPLT", BOOL, 1, self.thread, b.index(own.threads)))
        return reduce(partial(b.alu, "AND", BOOL, 1), conditions) if conditions else -1

    def origin(self, fragment: Fragment) -> tuple[Lin, Lin]:
        """Emit (row, column), in a tile, of the first element that this thread holds."""
        inner, row, column = 1, NOWHERE, NOWHERE
        for d in reversed(fragment.threads):
            at = self._part(self.thread, inner, d.extent, self.group.threads)
            row, column = add_lins(row, ({at: 1}, 0), d.rows), add_lins(column, ({at: 1}, 0), d.columns)
            inner *= d.extent
        return row, column

    def starts(self, r: ResolvedStage) -> dict[int, int]:
        """Emit this thread's position along each loop that is bound to threads: row of the state → position."""
        own = self.threads_of(r.stage.index)
        starts = {}
        for a in r.axes:
            for row in self.state.axis_rows[a]:
                if row in self.digits:
                    inner, extent = self.digits[row]
                    if a in r.stage.reds:
                        starts[row] = self._part(self._reducer_of(own), inner, extent, own.reducers)
                    else:
                        starts[row] = self._part(self._thread_of(own), inner, extent, own.threads)
        return starts

    def starts_of(self, r: ResolvedStage, pieces: Sequence[tuple[EmittedLoop, ...]], base: Sequence[Lin]) -> list[Lin]:
        """Emit the start of each axis in this thread's part of a stage. `base`: the starts of the first thread."""
        starts_at, fragment = list(base), held_layout(self.state, r.stage.index)
        if fragment is None and not any(p.role in BLOCK_ROLES for own in pieces for p in own):
            return starts_at
        starts, sides = self.starts(r), held_sides(self.state, r)
        for i, own in enumerate(pieces):
            for p in own:
                if p.role in BLOCK_ROLES:
                    starts_at[i] = add_lins(starts_at[i], ({self.b.mul(starts[p.row], p.stride): 1}, 0), 1)
            if fragment is not None and i in sides:
                starts_at[i] = add_lins(starts_at[i], self.origin(fragment)[sides[i]], 1)
        return starts_at

    # -- partial results -----------------------------------------------------------------------------------
    def over_columns(self, r: ResolvedStage, values: list[int], combiner: str, alu: Alu) -> list[int]:
        """Combine the components of a reduction over the threads that hold other columns of the same row of a tile."""
        for mask in () if r.combines else shuffles_of(self.state, r.stage.index):
            others = [self._shuffle(v, mask) for v in values]
            values = list(get_combiner(combiner).combine(tuple(values), tuple(others), alu, nan=self.b.dtype[values[0]].is_float))
        return values

    def combine(self, r: ResolvedStage, accs: list[int], alu: Alu, barrier: bool) -> list[int]:
        """Combine a stage's accumulators over the threads that share its reductions, so that each of these threads has the result.
        `barrier`: threads wait before they store to shared memory."""
        own = self.threads_of(r.stage.index)
        if own.reducers == 1:
            return accs
        lanes = exchanging_threads(self.state.target, own, self.group.threads)
        step = lanes // 2
        while step:
            others = [self._shuffle(v, step) for v in accs]
            accs = self.both(r, accs, others, alu)
            step //= 2
        return accs if lanes == own.reducers else self._through_memory(r, own, lanes, accs, alu, barrier)

    def _shuffle(self, v: int, mask: int) -> int:
        self.exchanges = True
        b = self.b
        return b.load("SHFL_XOR", b.dtype[v], b.num_lanes[v], (v,), mask, ordered=True)

    def both(self, r: ResolvedStage, accs: list[int], others: list[int], alu: Alu) -> list[int]:
        """Combine two lists of accumulators element by element; returns the results."""
        following: list[int] = []
        while len(following) < len(accs):
            for red in r.reductions:
                at, n = len(following), len(red.values)
                following += get_combiner(red.combiner).combine(tuple(accs[at:at + n]), tuple(others[at:at + n]), alu,
                                                                nan=red.dtypes[0].is_float)
        return following

    def _through_memory(self, r: ResolvedStage, own: StageThreads, lanes: int, accs: list[int], alu: Alu, barrier: bool) -> list[int]:
        """Store one partial result of every `lanes` threads to shared memory; then every thread combines the partial results of its
        position."""
        b, shared, s = self.b, self.shared, r.stage.index
        slots = self.group.threads // lanes
        areas = [shared.area((s, i, b.dtype[v], b.num_lanes[v]), slots * b.num_lanes[v] * b.dtype[v].itemsize) for i, v in enumerate(accs)]
        pointers = [shared.pointer(b.dtype[v], area) for area, v in zip(areas, accs, strict=True)]
        if barrier:
            shared.barrier()
        slot = self._part(self.thread, lanes, slots, self.group.threads)
        mask = () if lanes == 1 else (b.alu("CMPEQ", BOOL, 1, self._part(self.thread, 1, lanes, self.group.threads), b.index(0)),)
        for pointer, v in zip(pointers, accs, strict=True):
            b.store("STORE", b.dtype[v], b.num_lanes[v], (pointer, b.mul(slot, b.num_lanes[v]), v, *mask), (0, False))
        shared.barrier()
        first = self._first_slot(own, lanes)

        def read(at: int) -> list[int]:
            return [b.load("LOAD", b.dtype[v], b.num_lanes[v], (pointer, b.mul(at, b.num_lanes[v])), 0, ordered=True)
                    for pointer, v in zip(pointers, accs, strict=True)]

        def combined(start: int, stop: int, sizes: tuple[int, ...]) -> list[int]:
            """Combine the slots from `start` to `stop`, in nested blocks. `sizes`: slots of a block, innermost first."""
            if not sizes:
                loop, carried = b.open(b.add(start, b.index(1)), stop, 1, tuple(read(b.add(first, start))))
                return b.close(loop, tuple(self.both(r, carried, read(b.add(first, loop)), alu)))
            loop, carried = b.open(start, stop, sizes[-1], self._identities(r, accs))
            end = b.alu("MIN", INDEX, 1, b.add(loop, b.index(sizes[-1])), stop)
            return b.close(loop, tuple(self.both(r, carried, combined(loop, end, sizes[:-1]), alu)))
        count, rule = own.reducers // lanes, r.stage.sum_rule
        return combined(b.index(0), b.index(count), blocked_loop(rule, count, 1).sizes if rule is not None else ())

    def _identities(self, r: ResolvedStage, accs: list[int]) -> tuple[int, ...]:
        """Emit the neutral elements of a stage's accumulators, reduction by reduction."""
        b, found = self.b, list[int]()
        while len(found) < len(accs):
            for red in r.reductions:
                for d, v in zip(red.dtypes, get_combiner(red.combiner).identity(*red.dtypes), strict=True):
                    found.append(b.const(d, b.num_lanes[accs[len(found)]], v))
        return tuple(found)

    def _first_slot(self, own: StageThreads, lanes: int) -> int:
        """Emit the number of the first slot with a partial result of this thread's position."""
        b = self.b
        if own.local == 1:
            return b.index(0)
        position = self._part(self._thread_of(own), own.inner, own.local, own.threads)
        return b.mul(position, own.inner // lanes)
