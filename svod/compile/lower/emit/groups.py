"""The threads of a group: which positions each computes, and how they combine partial results.

    LOCAL(o0, 8) GROUP(r0, 4)           t = LOCAL_ID;  o0 starts at t // 4;  r0 starts at t % 4
    the sum over the four of a row      p[t] = acc;  BARRIER;  acc = p[t - t % 4];  LOOP k in 1…4: acc += p[t - t % 4 + k]

All threads run the same loops: those that no opt has bound to threads. The first of the threads that share a reduction stores the phase's
results. Staged values are private: each thread computes what it reads."""
from __future__ import annotations

from collections.abc import Callable

from svod.compile.lower.builder import Builder
from svod.core.ir.combiner import get_combiner
from svod.core.ir.dtype import DType, dtypes
from svod.core.kernel.groups import AREA, BLOCK_ROLES, ThreadGroup, reducers_of
from svod.core.kernel.kernel import ResolvedStage
from svod.core.kernel.placement import EmittedLoop
from svod.core.kernel.required import Lin, add_lins
from svod.core.kernel.scheduler import GROUP, LOCAL, Scheduler
from svod.errors import KernelOptError

INDEX = dtypes.index
AluOf = Callable[[int], Callable[..., int]]      # elementwise operations on so many lanes


class GroupThreads:
    """The threads of a group of one phase as index values, and the memory they share."""

    def __init__(self, b: Builder, state: Scheduler, group: ThreadGroup):
        self.b, self.state, self.group = b, state, group
        self.shared = 0                                     # bytes of shared memory
        self.areas: dict[tuple[int, int, DType, int], int] = {}   # (stage, accumulator, type, lanes) → its pointer
        self.thread = self.position = self.reducer = -1
        if group.threads > 1:
            self.thread = b.pure("LOCAL_ID", INDEX, 1, ())
            self.position = self._part(self.thread, group.reducers, group.local, group.threads)
            self.reducer = self._part(self.thread, 1, group.reducers, group.threads)

    def _part(self, value: int, inner: int, extent: int, whole: int) -> int:
        """value // inner % extent, of a value below `whole`."""
        b = self.b
        if inner > 1:
            value = b.alu("IDIV", INDEX, 1, value, b.index(inner))
        return value if inner * extent == whole else b.alu("MOD", INDEX, 1, value, b.index(extent))

    @property
    def stores(self) -> int:
        """The condition that this thread stores what its phase computes, or -1 where all do."""
        return -1 if self.group.reducers == 1 else self.b.alu("CMPEQ", dtypes.bool, 1, self.reducer, self.b.index(0))

    def starts(self, r: ResolvedStage) -> dict[int, int]:
        """Per thread-bound row of a stage the position that this thread computes."""
        rows = self.state.rows
        starts = {}
        for role, axes, value, whole in ((LOCAL, r.stage.outs, self.position, self.group.local),
                                         (GROUP, r.stage.reds, self._reducer_of(r), reducers_of(self.state, r.stage.index))):
            bound = [x for a in axes for x in self.state.axis_rows[a] if rows[x].role == role]
            inner = 1
            for row in reversed(bound):
                starts[row] = self._part(value, inner, rows[row].extent, whole)
                inner *= rows[row].extent
        return starts

    def _reducer_of(self, r: ResolvedStage) -> int:
        """The part of a stage's reductions that this thread takes. Threads beyond the number of parts recompute the last one."""
        parts = reducers_of(self.state, r.stage.index)
        if parts in (1, self.group.reducers):
            return self.reducer
        return self.b.alu("MIN", INDEX, 1, self.reducer, self.b.index(parts - 1))

    def bind(self, r: ResolvedStage, pieces: list[tuple[EmittedLoop, ...]], bounds: list[int], base: list[Lin]) -> None:
        """Take the thread-bound loops out of a stage's loops, in place: axes start at positions that depend on the thread instead."""
        starts = self.starts(r)
        for i, own in enumerate(pieces):
            bound = [p for p in own if p.role in BLOCK_ROLES]
            if not bound:
                continue
            pieces[i] = tuple(p for p in own if p.role not in BLOCK_ROLES)
            bounds[i] = pieces[i][0].extent * pieces[i][0].stride if pieces[i] else 1
            for p in bound:
                base[i] = add_lins(base[i], ({self.b.mul(starts[p.row], p.stride): 1}, 0), 1)

    def combine(self, r: ResolvedStage, accs: list[int], alu_of: AluOf) -> list[int]:
        """The accumulators of a stage, of all reductions in turn, combined over the threads that share its reductions, so that all have
        the result. Threads of other positions do the same at the same time."""
        b, parts = self.b, reducers_of(self.state, r.stage.index)
        if parts == 1:
            return accs
        pointers = [self._area(r.stage.index, i, b.dtype[v], b.num_lanes[v]) for i, v in enumerate(accs)]
        self._barrier()     # what was there before has been read
        for pointer, v in zip(pointers, accs, strict=True):
            b.store("STORE", b.dtype[v], b.num_lanes[v], (pointer, b.mul(self.thread, b.num_lanes[v]), v), (0, False))
        self._barrier()
        first = b.alu("SUB", INDEX, 1, self.thread, self.reducer)

        def read(at: int) -> list[int]:
            return [b.load("LOAD", b.dtype[v], b.num_lanes[v], (pointer, b.mul(at, b.num_lanes[v])), 0, ordered=True)
                    for pointer, v in zip(pointers, accs, strict=True)]
        loop, carried = b.open(b.index(1), b.index(parts), 1, tuple(read(first)))
        others = read(b.add(first, loop))
        following: list[int] = []
        while len(following) < len(accs):
            for red in r.reductions:
                at, n = len(following), len(red.values)
                alu = alu_of(b.num_lanes[accs[at]])
                following += get_combiner(red.combiner).combine(tuple(carried[at:at + n]), tuple(others[at:at + n]), alu,
                                                                nan=red.dtypes[0].is_float)
        return b.close(loop, tuple(following))

    def _area(self, stage: int, number: int, dtype: DType, lanes: int) -> int:
        """A pointer to shared memory for one accumulator of every thread. Raises KernelOptError where the target has too little."""
        key = (stage, number, dtype, lanes)
        area = self.areas.get(key)
        if area is None:
            area = self.areas[key] = self.b.pure("SHARED", dtype, 1, (), self.shared)
            self.shared += -(-self.group.threads * lanes * dtype.itemsize // AREA) * AREA
            if self.shared > self.state.target.shared_bytes:
                raise KernelOptError(f"the partial results of a group take {self.shared} bytes of shared memory or more; the target has "
                                     f"{self.state.target.shared_bytes}")
        return area

    def _barrier(self) -> None:
        self.b.store("BARRIER", dtypes.void, 1, (), None)
