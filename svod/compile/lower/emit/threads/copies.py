"""Emits copies into shared memory that all threads of a group share.

    s1[16, 64], vectors of 4, 64 threads      u = t + k*64 for k in 0…4: row u // 16, vector u % 16

The copy proceeds in turns of one vector per thread, and neighbouring threads copy neighbouring vectors. If the number of threads does not
divide the number of vectors, only some of the threads take part in the last turn."""
from __future__ import annotations

from svod.compile.lower.emit.axes import Axes
from svod.compile.lower.emit.context import PhaseContext
from svod.compile.lower.emit.state import OpenStage, Sink
from svod.core.ir.dtype import dtypes
from svod.core.kernel.required import Lin, add_lins
from svod.core.tree.nodes import Body, Chunk, Turns

INDEX = dtypes.index


class GroupCopies:
    """Emits a copy that the threads of a group share, in turns of one vector per thread."""

    def __init__(self, ctx: PhaseContext, axes: Axes):
        self.ctx, self.b = ctx, ctx.b
        self.axes = axes

    def open(self, body: Body, turns: Turns, base: list[Lin]) -> OpenStage:
        """Open the stage of a copy."""
        stage = OpenStage(body.frame, base, body.safe)
        stage.whole_vectors, stage.steps = True, turns.steps
        return stage

    def emit(self, stage: OpenStage, turns: Turns, sink: Sink) -> None:
        """Emit all turns, so that every part of the stage is stored once."""
        b, threads, thread, end = self.b, turns.threads, self.ctx.group.thread, turns.whole * turns.threads
        if turns.is_loop:
            loop, _ = b.open(b.index(0), b.index(end), threads)
            self._turn(stage, turns, ({thread: 1, loop: 1}, 0), end, sink)
            b.close(loop)
            self.ctx.forget_values()
        else:
            for k in range(turns.whole):
                self._turn(stage, turns, ({thread: 1}, k * threads), threads * (k + 1), sink)
        if turns.rest:      # Threads beyond the last vector repeat it, and store nothing.
            number = self.axes.ssa(({thread: 1}, end))
            stage.stores = b.alu("CMPLT", dtypes.bool, 1, number, b.index(turns.parts))
            self._turn(stage, turns, ({b.alu("MIN", INDEX, 1, number, b.index(turns.parts - 1)): 1}, 0), turns.parts, sink)
            stage.stores = -1

    def _turn(self, stage: OpenStage, turns: Turns, at: Lin, below: int, sink: Sink) -> None:
        """Emit one turn: the copy of vector (or single element) number `at`, which is less than `below`."""
        frame = stage.frame
        for d, n in zip(reversed(turns.order), reversed(turns.counts), strict=True):
            (terms, const), at = self._split(at, n, below)
            below = -(-below // n)
            stride = frame.pieces[d][0].stride
            stage.open_row(d, ({v: c * stride for v, c in terms.items()}, const * stride))
        width = frame.width if frame.vector_axis >= 0 else 1
        if stage.set_position({}, Chunk(0, width, width)):
            sink(stage)
        for d in turns.order:
            stage.close_row(d)

    def _split(self, at: Lin, n: int, below: int) -> tuple[Lin, Lin]:
        """Emit (at % n, at // n) of a number less than `below`. Terms that `n` divides are divided one by one, so that the remainder is
        the same value in every turn."""
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
