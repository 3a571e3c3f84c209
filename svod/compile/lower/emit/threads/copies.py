"""Emits copies into shared memory that all threads of a group share.

    s1[16, 64], vectors of 4, 64 threads      u = t + k*64 for k in 0…4: row u // 16, vector u % 16

In each turn neighbouring threads copy neighbouring vectors. If the number of threads does not divide the number of vectors, only some of
the threads take part in the last turn."""
from __future__ import annotations

from svod.compile.lower.emit.axes import Axes
from svod.compile.lower.emit.context import PhaseContext
from svod.compile.lower.emit.state import OpenStage, Sink
from svod.core.ir.dtype import dtypes
from svod.core.kernel.copy_loops import CopyLoops
from svod.core.kernel.group_memory.copy import UNROLLED_TURNS, GroupCopy, along_vector
from svod.core.kernel.kernel import ResolvedStage
from svod.core.kernel.placement import COPY_VECTOR, NO_ROW, EmittedLoop
from svod.core.kernel.required import Lin, add_lins
from svod.core.kernel.scheduler import LOOP, UPCAST
from svod.core.tree.nodes import Chunk

INDEX = dtypes.index


class GroupCopies:
    """Emits the turns of a copy."""

    def __init__(self, ctx: PhaseContext, axes: Axes):
        self.ctx, self.b = ctx, ctx.b
        self.axes = axes

    def open(self, r: ResolvedStage, extents: list[int], base: list[Lin], rows: bool = False) -> OpenStage:
        """Open the stage of a copy of a region. `rows`: each part is a whole row, not a vector."""
        copy = self.ctx.facts.nest.stages[r.stage.index].copy
        assert copy is not None
        width = copy.part(extents, rows)
        pieces: list[tuple[EmittedLoop, ...]] = [(EmittedLoop(NO_ROW, LOOP, e, 1),) for e in extents]
        if copy.vector >= 0:
            whole = EmittedLoop(NO_ROW, LOOP, extents[copy.vector] // width, width)
            pieces[copy.vector] = (whole, EmittedLoop(COPY_VECTOR, UPCAST, width, 1))
        frame = self.ctx.facts.maker.copy_frame(r, CopyLoops(pieces, copy.vector, width), tuple(extents), ())
        stage = OpenStage(frame, base)
        stage.whole_vectors = True
        if width > 1:
            stage.steps = {n: along.step for n, along in along_vector(r, copy.vector, width).items()}
        return stage

    def emit(self, stage: OpenStage, copy: GroupCopy, sink: Sink) -> None:
        """Emit all turns, so that every part of the stage is stored once."""
        threads = self.ctx.group.group.threads
        counts = [stage.frame.pieces[d][0].extent for d in copy.order]
        parts = 1
        for n in counts:
            parts *= n
        whole, rest = divmod(parts, threads)

        def turn(at: Lin, below: int, last: bool) -> None:
            self._turn(stage, copy, counts, at, below, parts if last else -1, sink)
        thread = self.ctx.group.thread
        if whole > UNROLLED_TURNS:
            b = self.b
            loop, _ = b.open(b.index(0), b.index(whole * threads), threads)
            turn(({thread: 1, loop: 1}, 0), whole * threads, False)
            b.close(loop)
            self.ctx.forget_values()
        else:
            for k in range(whole):
                turn(({thread: 1}, k * threads), threads * (k + 1), False)
        if rest:
            turn(({thread: 1}, whole * threads), parts, True)

    def _turn(self, stage: OpenStage, copy: GroupCopy, counts: list[int], at: Lin, below: int, parts: int, sink: Sink) -> None:
        """Emit one turn: the copy of part number `at`, which is less than `below`. `parts`: the number of parts, if `at` may exceed it, so
        that such threads store nothing; else -1."""
        b = self.b
        if parts >= 0:
            value = self.axes.ssa(at)
            stage.stores = b.alu("CMPLT", dtypes.bool, 1, value, b.index(parts))
            at = ({b.alu("MIN", INDEX, 1, value, b.index(parts - 1)): 1}, 0)
        for d, n in zip(reversed(copy.order), reversed(counts), strict=True):
            (terms, const), at = self._split(at, n, below)
            below = -(-below // n)
            stride = stage.frame.pieces[d][0].stride
            stage.open_row(d, ({v: c * stride for v, c in terms.items()}, const * stride))
        width = stage.frame.width if stage.frame.vector_axis >= 0 else 1
        if stage.set_position({}, Chunk(0, width, width)):
            sink(stage)
        for d in copy.order:
            stage.close_row(d)
        stage.stores = -1

    def _split(self, at: Lin, n: int, below: int) -> tuple[Lin, Lin]:
        """(at % n, at // n) of a number less than `below`. Terms that `n` divides are divided one by one, so that the remainder is the same
        value in every turn."""
        b = self.b
        if below <= n:
            return at, ({}, 0)
        terms, const = at
        others = {v: c for v, c in terms.items() if c * b.multiple_of(v) % n}
        outer: Lin = ({}, const // n)
        for v, c in terms.items():
            if v not in others:
                outer = add_lins(outer, ({v: c // n} if c % n == 0 else {b.alu("IDIV", INDEX, 1, b.mul(v, c), b.index(n)): 1}, 0), 1)
        if not others:
            return ({}, const % n), outer
        value = self.axes.ssa((others, const % n))
        if value == self.ctx.group.thread and self.ctx.group.group.threads <= n:
            return ({value: 1}, 0), outer
        whole = b.alu("IDIV", INDEX, 1, value, b.index(n))
        return ({b.alu("MOD", INDEX, 1, value, b.index(n)): 1}, 0), add_lins(outer, ({whole: 1}, 0), 1)
