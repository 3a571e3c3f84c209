"""Reduce loops: accumulators carried through them or kept in scratch, remainders, parts of a split reduction.

    for r in K: acc += f(r)          →    LOOP r (acc) … ENDLOOP (acc + f(r));  RESULT
    for k: for n: acc[n] += f(k, n)  →    for n: scratch[n] = 0;  for k: for n: scratch[n] += f(k, n);  for n: … scratch[n]
"""
from __future__ import annotations

from collections.abc import Callable
from math import prod

from svod.compile.lower.emit.accumulators import Accumulators
from svod.compile.lower.emit.axes import Axes
from svod.compile.lower.emit.context import PhaseContext
from svod.compile.lower.emit.facts import SLACK
from svod.compile.lower.emit.intrinsics import Intrinsics
from svod.compile.lower.emit.loops import LoopEmitter
from svod.compile.lower.emit.state import OpenStage, Sink, StageLoop
from svod.compile.lower.emit.threads.pipeline import CopiesAhead
from svod.core.ir.dtype import DType, dtypes
from svod.core.kernel.contraction import skipping_window
from svod.core.kernel.layout import is_exact
from svod.core.kernel.online import masked_limits
from svod.core.kernel.placement import EmittedLoop
from svod.core.kernel.required import Lin, Terms, add_lins, sum_lins

EmitPoint = Callable[[int, int], None]      # emits the stages that live at (stage, depth)


class ScratchAccumulators:
    """Accumulators of output loops inside reduce loops: one slot of scratch for each iteration of those output loops."""

    def __init__(self, ctx: PhaseContext, axes: Axes, first: list[int], loops: list[StageLoop], tile_shape: tuple[int, int] | None):
        self.b = ctx.b
        self.axes = axes
        self.first = first              # the values that they start with
        self.loops = loops              # the output loops, outermost first
        self.tile_shape = tile_shape    # (rows, columns) where they are tiles
        self.iteration: dict[int, int] = {}     # number of an open loop → its index
        total = prod(loop.piece.extent for loop in loops)
        self.offsets = [ctx.allocate(self.b.dtype[v].itemsize * self.b.num_lanes[v] * total + SLACK) for v in first]

    def _slot(self, number: int, dtype: DType, lanes: int) -> tuple[int, int]:
        """(pointer, index) of an accumulator in the iteration that is open."""
        terms: Terms = {}
        scale = lanes
        for j in reversed(range(len(self.loops))):
            if j in self.iteration:
                terms[self.iteration[j]] = scale
            scale *= self.loops[j].piece.extent
        pointer = self.b.pure("SCRATCH", dtype, 1, (), self.offsets[number])
        return pointer, self.axes.ssa((terms, 0))

    def read(self) -> list[int]:
        b, out = self.b, []
        for i, v in enumerate(self.first):
            dtype, lanes = b.type_of(v)
            if self.tile_shape is not None:
                out.append(b.load("TILELOAD", dtype, lanes, self._slot(i, dtype, lanes), (0, *self.tile_shape), ordered=True))
            else:
                out.append(b.load("LOAD", dtype, lanes, self._slot(i, dtype, lanes), 0, ordered=True))
        return out

    def write(self, accs: list[int]) -> None:
        b = self.b
        for i, v in enumerate(accs):
            dtype, lanes = b.type_of(v)
            if self.tile_shape is not None:
                b.store("TILESTORE", dtype, lanes, (*self._slot(i, dtype, lanes), v), (0, *self.tile_shape))
            else:
                b.store("STORE", dtype, lanes, (*self._slot(i, dtype, lanes), v), (0, False))


class ReduceLoops:
    """Opens the reduce loops of a stage."""

    def __init__(self, ctx: PhaseContext, axes: Axes, loops: LoopEmitter, intrinsics: Intrinsics, accumulators: Accumulators,
                 copies_ahead: CopiesAhead):
        self.ctx, self.b = ctx, ctx.b
        self.axes, self.loops, self.intrinsics, self.accumulators = axes, loops, intrinsics, accumulators
        self.copies_ahead = copies_ahead

    def reduce_all(self, stage: OpenStage, k: int, sink: Sink, emit_point: EmitPoint) -> None:
        """Emit the loops from number k on, the first of which reduces, and give the results to the sink."""
        loops, first = stage.loops, self.accumulators.identities(stage)
        inner = [j for j in range(k, len(loops)) if loops[j].axis < stage.num_outs and loops[j].piece.extent > 1]
        if not inner:
            self.accumulators.epilogue(stage, self._reduce(stage, k, len(loops), first, None, emit_point), sink)
            return
        end = inner[-1] + 1
        plan = self.intrinsics.plan_of(stage)
        in_registers = plan is not None and plan.dot.is_tile and not plan.dot.fragments
        shape = self.intrinsics.tile_shape(stage, plan) if plan is not None and in_registers else None
        scratch = ScratchAccumulators(self.ctx, self.axes, first, [loop for loop in loops[k:end] if loop.axis < stage.num_outs], shape)
        self._over_outputs(stage, scratch, 0, lambda: scratch.write(first))
        self._reduce(stage, k, end, [], scratch, emit_point)
        self._over_outputs(stage, scratch, 0, lambda: self.accumulators.epilogue(stage, scratch.read(), sink))

    def _over_outputs(self, stage: OpenStage, scratch: ScratchAccumulators, j: int, body: Callable[[], None]) -> None:
        """The output loops from number j on. No stages live here, as what is read after the reduction lives outside its loops."""
        if j == len(scratch.loops):
            body()
            return
        a, piece, _ = scratch.loops[j]
        self.loops.counted(stage, a, piece, scratch.iteration, j, lambda: self._over_outputs(stage, scratch, j + 1, body))

    def _reduce(self, stage: OpenStage, k: int, end: int, accs: list[int], scratch: ScratchAccumulators | None,
                emit_point: EmitPoint) -> list[int]:
        """Open the loops from number k on with carried accumulators, and return the results. Accumulators in scratch are read and
        written inside loop number `end`; the loops around it carry nothing."""
        if k == end:
            if scratch is None:
                return self.accumulators.accumulate(stage, accs)
            scratch.write(self._reduce(stage, k, len(stage.loops), scratch.read(), None, emit_point))
            return []
        loop = stage.loops[k]

        def inside(values: list[int]) -> list[int]:
            emit_point(stage.index, loop.point)
            return self._reduce(stage, k + 1, end, values, scratch, emit_point)

        if loop.axis >= stage.num_outs:
            return self._over_axis(stage, loop, accs, inside)
        if scratch is not None:
            number = scratch.loops.index(loop)
            self.loops.counted(stage, loop.axis, loop.piece, scratch.iteration, number, lambda: inside([]))
            return []
        stage.open_row(loop.axis, ({}, 0))   # an output loop of extent 1
        accs = inside(accs)
        stage.close_row(loop.axis)
        return accs

    def _over_axis(self, stage: OpenStage, loop: StageLoop, accs: list[int], inside: Callable[[list[int]], list[int]]) -> list[int]:
        """One reduce loop around `inside`: whole iterations, then a shorter copy of the body for the remainder."""
        b, a = self.b, loop.axis
        at = stage.number_of(loop)
        stride = stage.pieces[a][at].stride
        positions = stage.left(a, at)

        def looped(start: int, stop: int, step: int, values: list[int]) -> list[int]:
            index, carried = b.open(start, stop, step, tuple(values))
            return self._close(stage, index, self._with_row(stage, a, ({index: 1}, 0), lambda: inside(carried)))

        if self.axes.bound(stage, a) is not None:
            return self._up_to_limit(stage, loop, positions, looped, accs)
        whole, rest = divmod(positions, stride)
        ahead = whole > 1 and bool(self.copies_ahead.of_loop(stage, loop))
        if self._is_cut(stage, a, at):
            bounds = self._part_bounds(whole * stride)
            accs = self.copies_ahead.run(stage, loop, bounds, whole, stride, accs, inside) if ahead else looped(*bounds, stride, accs)
            if rest:
                index, carried = b.open(self._first_of_last_part(), b.index(1), 1, tuple(accs))
                accs = self._close(stage, index, self._remainder(stage, a, at, whole * stride, rest, lambda: inside(carried)))
            return accs
        if ahead:
            accs = self.copies_ahead.run(stage, loop, self._used_bounds(stage, a, whole * stride), whole, stride, accs, inside)
        elif whole > 1 or (whole and not accs):   # where nothing is carried, one iteration is a loop as well
            accs = looped(*self._used_bounds(stage, a, whole * stride), stride, accs)
        elif whole == 1:
            accs = self._with_row(stage, a, ({}, 0), lambda: inside(accs))
        if rest:
            values = accs
            accs = self._remainder(stage, a, at, whole * stride, rest, lambda: inside(values))
        return accs

    def _close(self, stage: OpenStage, loop: int, following: list[int]) -> list[int]:
        """Close a loop that carries accumulators."""
        out = self.b.close(loop, tuple(following))
        stage.memo.clear()
        return out

    def _with_row(self, stage: OpenStage, a: int, value: Lin, body: Callable[[], list[int]]) -> list[int]:
        """Emit `body` with a row of an axis open."""
        stage.open_row(a, value)
        out = body()
        stage.close_row(a)
        return out

    def _up_to_limit(self, stage: OpenStage, loop: StageLoop, positions: int,
                     looped: Callable[[int, int, int, list[int]], list[int]], accs: list[int]) -> list[int]:
        """A reduce loop over an axis whose extent depends on variables: iterations that are wholly inside, then smaller ones for the
        rest. `looped(start, stop, step, accumulators)` emits a loop."""
        b, a = self.b, loop.axis
        at = stage.number_of(loop)
        piece = stage.pieces[a][at]
        end = -(-positions // piece.stride) * piece.stride
        room = self.axes.room(stage, a)
        start, stop = self._part_bounds(end) if self._is_cut(stage, a, at) else (b.index(0), b.index(end))
        stop = b.alu("MIN", dtypes.index, 1, stop, room)
        if not stage.is_last(a):
            return looped(start, stop, piece.stride, accs)
        reach = stage.reach(a)
        stage.safe.add(a)
        if reach == 1:
            accs = looped(start, stop, piece.stride, accs)
            stage.safe.discard(a)
            return accs
        middle = self.axes.whole_end(room, reach, piece.stride, stop)
        accs = looped(start, middle, piece.stride, accs)
        stage.safe.discard(a)
        step = stage.tail_step(a)
        with stage.narrowed(a, step):
            return looped(b.alu("MAX", dtypes.index, 1, start, middle), stop, step if step < reach else piece.stride, accs)

    def _used_bounds(self, stage: OpenStage, a: int, end: int) -> tuple[int, int]:
        """(start, stop) of a reduce loop without the iterations that add nothing to all positions of the tile."""
        b = self.b
        window = skipping_window(self.ctx.state, stage.r, a, stage.pieces[a])
        if window is None:
            return self._unmasked_bounds(stage, a, end)
        first = b.mul(self.axes.ssa(self.axes.start(stage, window.output)), window.step)
        apart, span = b.index(window.apart), window.step * (stage.span(window.output) - 1)
        start = b.alu("SUB", dtypes.index, 1, b.index(window.low - span + window.apart - 1), first)
        stop = b.alu("SUB", dtypes.index, 1, b.index(window.high - 1 + window.apart), first)
        return (b.alu("MAX", dtypes.index, 1, b.index(0), b.alu("IDIV", dtypes.index, 1, start, apart)),
                b.alu("MIN", dtypes.index, 1, b.index(end), b.alu("IDIV", dtypes.index, 1, stop, apart)))

    def _unmasked_bounds(self, stage: OpenStage, a: int, end: int) -> tuple[int, int]:
        """(start, stop) of a loop over the blocks of a pass: of those whose scores are not all masked for all rows of the group. All of its
        threads run the same iterations."""
        b, facts = self.b, self.ctx.facts
        start, stop = b.index(0), b.index(end)
        if not facts.on_grid or not stage.r.stage.is_output or sum(p.extent > 1 for p in stage.pieces[a]) != 1 or end != stage.bounds[a]:
            return start, stop
        for limit in masked_limits(self.ctx.kernel):
            q = limit.output
            if stage.r.axes[q] not in facts.fixed and not is_exact(stage.pieces[q], stage.bounds[q]):
                continue            # its last tile is moved back
            first = self.axes.ssa(add_lins(stage.group_base[q], sum_lins(stage.opened[q]), 1))
            row = b.add(first, b.index(stage.span(q) + stage.apart[q] - 1)) if limit.step > 0 else first
            reach = b.add(b.mul(row, limit.step), b.index(limit.const))
            if limit.apart < 0:
                left = b.alu("MAX", dtypes.index, 1, b.index(0), b.add(reach, b.index(-limit.apart)))
                stop = b.alu("MIN", dtypes.index, 1, stop, b.alu("IDIV", dtypes.index, 1, left, b.index(-limit.apart)))
            else:
                over = b.alu("MAX", dtypes.index, 1, b.index(0), b.alu("SUB", dtypes.index, 1, b.index(0), reach))
                before = b.alu("IDIV", dtypes.index, 1, b.add(over, b.index(limit.apart - 1)), b.index(limit.apart))
                start = b.alu("MAX", dtypes.index, 1, start, b.alu("MIN", dtypes.index, 1, b.index(end), before))
        return start, stop

    def _is_cut(self, stage: OpenStage, a: int, at: int) -> bool:
        """Whether the cores share this loop: the outermost of the axis of a split reduction, in the output stage."""
        return self.ctx.split is not None and stage.r.stage.is_output and self.ctx.split.axis == a and at == 0

    def _part_bounds(self, end: int) -> tuple[int, int]:
        """(start, stop) of this part's positions."""
        b = self.b
        assert self.ctx.split is not None
        chunk = self.ctx.split.chunk
        start = b.mul(self.ctx.part, chunk)
        return start, b.alu("MIN", dtypes.index, 1, b.add(start, b.index(chunk)), b.index(end))

    def _first_of_last_part(self) -> int:
        """0 in the last part, else 1: the start of a loop to 1 that only the last part runs."""
        b = self.b
        assert self.ctx.split is not None
        last = b.alu("CMPEQ", dtypes.bool, 1, self.ctx.part, b.index(self.ctx.split.parts - 1))
        return b.alu("WHERE", dtypes.index, 1, last, b.index(0), b.index(1))

    def _remainder(self, stage: OpenStage, a: int, at: int, start: int, rest: int, body: Callable[[], list[int]]) -> list[int]:
        """The last, shorter iteration of a reduce loop: its inner rows are cut to the `rest` positions."""
        pieces, bound = stage.pieces[a], stage.bounds[a]
        cut = []
        left, stride = rest, 1
        for p in reversed(pieces[at + 1:]):
            e = min(p.extent, left)
            cut.append(EmittedLoop(p.row, p.role, e, stride))
            stride *= e
            left = -(-left // e)
        cut.reverse()
        stage.pieces[a] = (*(p._replace(extent=1) for p in pieces[:at + 1]), *cut)
        stage.bounds[a] = rest
        vector_stride = stage.vector_stride
        if stage.vector_axis == a:
            stage.vector_stride = next((p.stride for p in cut if p.row == stage.vector_row), vector_stride)
        out = self._with_row(stage, a, ({}, start), body)
        stage.pieces[a], stage.bounds[a], stage.vector_stride = pieces, bound, vector_stride
        return out

