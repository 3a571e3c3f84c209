"""Reduce loops: accumulators carried through them or kept in scratch, remainders, parts of a split reduction.

    for r in K: acc += f(r)          →    LOOP r (acc) … ENDLOOP (acc + f(r));  RESULT
    for k: for n: acc[n] += f(k, n)  →    for n: scratch[n] = 0;  for k: for n: scratch[n] += f(k, n);  for n: … scratch[n]

Long sums of floats are cut into blocks (`svod.core.ir.summation`), each with accumulators of its own:

    for r in 4096: acc += f(r)       →    LOOP a in 4096 by 32 (acc): { LOOP r in a…a+32 (0): … ENDLOOP;  ENDLOOP (acc + RESULT) }
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
from svod.core.ir.summation import BlockedNest, blocked_nest
from svod.core.kernel.contraction import skipping_window
from svod.core.kernel.layout import is_exact
from svod.core.kernel.online import masked_limits
from svod.core.kernel.placement import EmittedLoop
from svod.core.kernel.required import Lin, Terms, add_lins, sum_lins
from svod.core.kernel.scheduler import UNROLL

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
        self.ctx = ctx
        total = prod(loop.piece.extent for loop in loops)
        self.offsets = [ctx.allocate(self.b.dtype[v].itemsize * self.b.num_lanes[v] * total + SLACK) for v in first]

    def another(self) -> ScratchAccumulators:
        """An area for a block's accumulators in the same iterations."""
        other = ScratchAccumulators(self.ctx, self.axes, self.first, self.loops, self.tile_shape)
        other.iteration = self.iteration
        return other

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


Inside = Callable[[list[int], ScratchAccumulators | None], list[int]]   # emits what adds to accumulators, carried or in scratch
Run = Callable[[int, int, list[int], ScratchAccumulators | None], list[int]]    # the same for iterations from a start to a stop
Looped = Callable[[int, int, int, list[int], ScratchAccumulators | None], list[int]]    # and with a step


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
        stage.first = first
        inner = [j for j in range(k, len(loops)) if loops[j].axis < stage.num_outs and loops[j].piece.extent > 1]
        end = inner[-1] + 1 if inner else len(loops)
        stage.blocks = self._blocks(stage, k, end)
        if not inner:
            self.accumulators.epilogue(stage, self._reduce(stage, k, end, first, None, emit_point), sink)
            return
        plan = self.intrinsics.plan_of(stage)
        in_registers = plan is not None and plan.dot.is_tile and not plan.dot.fragments
        shape = self.intrinsics.tile_shape(stage, plan) if plan is not None and in_registers else None
        scratch = ScratchAccumulators(self.ctx, self.axes, first, [loop for loop in loops[k:end] if loop.axis < stage.num_outs], shape)
        self._over_outputs(stage, scratch, 0, lambda: scratch.write(first))
        self._reduce(stage, k, end, [], scratch, emit_point)
        self._over_outputs(stage, scratch, 0, lambda: self.accumulators.epilogue(stage, scratch.read(), sink))

    def _blocks(self, stage: OpenStage, k: int, end: int) -> BlockedNest | None:
        """How the loops from number k on are cut into blocks. Accumulators in memory are read and written inside loop number `end`."""
        rule = stage.r.stage.sum_rule
        if rule is None:
            return None
        outs, iterations = stage.num_outs, [1] * k
        for loop in stage.loops[k:]:
            positions = stage.left(loop.axis, stage.number_of(loop)) if loop.axis >= outs else 1
            if loop.axis >= outs and self._is_cut(stage, loop.axis, stage.number_of(loop)) and self.ctx.split is not None:
                positions = min(positions, self.ctx.split.chunk)
            iterations.append(-(-positions // loop.piece.stride) if loop.axis >= outs else 1)
        unrolled = prod([p.extent for a in range(outs, len(stage.pieces)) for p in stage.pieces[a] if p.role == UNROLL])
        return blocked_nest(rule, iterations, unrolled, end if end < len(stage.loops) else -1)

    def _over_outputs(self, stage: OpenStage, scratch: ScratchAccumulators, j: int, body: Callable[[], None]) -> None:
        """The output loops from number j on that are not open. No stages live here, as what is read after the reduction lives outside its
        loops."""
        if j == len(scratch.loops):
            body()
            return
        if j in scratch.iteration:
            self._over_outputs(stage, scratch, j + 1, body)
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
            if stage.blocks is not None and stage.blocks.adds_to_memory:
                block = self._reduce(stage, k, len(stage.loops), stage.first, None, emit_point)
                scratch.write(self.accumulators.fold(stage, scratch.read(), block))
            else:
                scratch.write(self._reduce(stage, k, len(stage.loops), scratch.read(), None, emit_point))
            return []
        loop = stage.loops[k]

        def inside(values: list[int], memory: ScratchAccumulators | None) -> list[int]:
            emit_point(stage.index, loop.point)
            return self._reduce(stage, k + 1, end, values, memory, emit_point)

        if loop.axis >= stage.num_outs:
            return self._over_axis(stage, k, accs, scratch, inside)
        if scratch is not None:
            number = scratch.loops.index(loop)
            self.loops.counted(stage, loop.axis, loop.piece, scratch.iteration, number, lambda: inside([], scratch))
            return []
        stage.open_row(loop.axis, ({}, 0))   # an output loop of extent 1
        accs = inside(accs, None)
        stage.close_row(loop.axis)
        return accs

    def _over_axis(self, stage: OpenStage, k: int, accs: list[int], scratch: ScratchAccumulators | None, inside: Inside) -> list[int]:
        """One reduce loop: whole iterations, block by block where they are many, then a shorter copy of the body for the remainder."""
        b, loop = self.b, stage.loops[k]
        a, at = loop.axis, stage.number_of(loop)
        stride = stage.pieces[a][at].stride
        positions = stage.left(a, at)

        def looped(start: int, stop: int, step: int, values: list[int], memory: ScratchAccumulators | None) -> list[int]:
            index, carried = b.open(start, stop, step, tuple(values))
            return self._close(stage, index, self._with_row(stage, a, ({index: 1}, 0), lambda: inside(carried, memory)))

        if self.axes.bound(stage, a) is not None:
            return self._up_to_limit(stage, loop, positions, looped, accs, scratch)
        whole, rest = divmod(positions, stride)
        ahead = whole > 1 and bool(self.copies_ahead.of_loop(stage, loop))

        def run(start: int, stop: int, values: list[int], memory: ScratchAccumulators | None) -> list[int]:
            if not ahead:
                return looped(start, stop, stride, values, memory)
            return self.copies_ahead.run(stage, loop, (start, stop), whole, stride, values, lambda carried: inside(carried, memory))

        def remainder(values: list[int]) -> list[int]:
            def body(own: list[int], memory: ScratchAccumulators | None) -> list[int]:
                return self._remainder(stage, a, at, whole * stride, rest, lambda: inside(own, memory))
            return self._block(stage, values, scratch, body) if sizes else body(values, scratch)

        sizes = stage.blocks.loops[k].sizes if stage.blocks is not None else ()
        if self._is_cut(stage, a, at):
            accs = self._in_blocks(stage, sizes, stride, self._part_bounds(whole * stride), accs, scratch, run)
            if rest:
                index, carried = b.open(self._first_of_last_part(), b.index(1), 1, tuple(accs))
                accs = self._close(stage, index, remainder(carried))
            return accs
        if ahead or whole > 1 or (whole and not accs):      # where nothing is carried, one iteration is a loop as well
            accs = self._in_blocks(stage, sizes, stride, self._used_bounds(stage, a, whole * stride), accs, scratch, run)
        elif whole == 1:
            def once(own: list[int], memory: ScratchAccumulators | None) -> list[int]:
                return self._with_row(stage, a, ({}, 0), lambda: inside(own, memory))
            accs = self._block(stage, accs, scratch, once) if sizes else once(accs, scratch)
        return remainder(accs) if rest else accs

    # -- blocks --------------------------------------------------------------------------------------------
    def _in_blocks(self, stage: OpenStage, sizes: tuple[int, ...], stride: int, bounds: tuple[int, int], accs: list[int],
                   scratch: ScratchAccumulators | None, run: Run) -> list[int]:
        """`run` between two bounds, in blocks of so many iterations, level by level."""
        b = self.b

        def blocks(sizes: tuple[int, ...], start: int, stop: int, positions: int | None, own: list[int],
                   memory: ScratchAccumulators | None) -> list[int]:
            if not sizes:
                return run(start, stop, own, memory)
            step = sizes[-1] * stride
            index, carried = b.open(start, stop, step, tuple(own))
            end, whole = b.add(index, b.index(step)), None
            if positions is not None and positions % step == 0:
                whole = step
            else:
                end = b.alu("MIN", dtypes.index, 1, end, stop)
            return self._close(stage, index, self._block(stage, carried, memory, lambda *to: blocks(sizes[:-1], index, end, whole, *to)))
        start, stop = (b.known(bound) for bound in bounds)
        return blocks(sizes, *bounds, stop - start if start is not None and stop is not None else None, accs, scratch)

    def _block(self, stage: OpenStage, accs: list[int], scratch: ScratchAccumulators | None, body: Inside) -> list[int]:
        """Accumulators and what `body` adds to new ones."""
        if scratch is None:
            return self.accumulators.fold(stage, accs, body(stage.first, None))
        own = scratch.another()
        self._over_outputs(stage, own, 0, lambda: own.write(stage.first))
        body([], own)
        self._over_outputs(stage, own, 0, lambda: scratch.write(self.accumulators.fold(stage, scratch.read(), own.read())))
        return []

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

    def _up_to_limit(self, stage: OpenStage, loop: StageLoop, positions: int, looped: Looped, accs: list[int],
                     scratch: ScratchAccumulators | None) -> list[int]:
        """A reduce loop over an axis whose extent depends on variables: iterations that are wholly inside, then smaller ones for the
        rest."""
        b, a = self.b, loop.axis
        at = stage.number_of(loop)
        piece = stage.pieces[a][at]
        end = -(-positions // piece.stride) * piece.stride
        room = self.axes.room(stage, a)
        start, stop = self._part_bounds(end) if self._is_cut(stage, a, at) else (b.index(0), b.index(end))
        stop = b.alu("MIN", dtypes.index, 1, stop, room)
        sizes = stage.blocks.loops[stage.loops.index(loop)].sizes if stage.blocks is not None else ()

        def whole(stop: int) -> list[int]:
            return self._in_blocks(stage, sizes, piece.stride, (start, stop), accs, scratch,
                                   lambda start, stop, *to: looped(start, stop, piece.stride, *to))
        if not stage.is_last(a):
            return whole(stop)
        reach = stage.reach(a)
        stage.safe.add(a)
        if reach == 1:
            accs = whole(stop)
            stage.safe.discard(a)
            return accs
        middle = self.axes.whole_end(room, reach, piece.stride, stop)
        accs = whole(middle)
        stage.safe.discard(a)
        step = stage.tail_step(a)

        def tail(own: list[int], memory: ScratchAccumulators | None) -> list[int]:
            with stage.narrowed(a, step):
                return looped(b.alu("MAX", dtypes.index, 1, start, middle), stop, step if step < reach else piece.stride, own, memory)
        return self._block(stage, accs, scratch, tail) if sizes else tail(accs, scratch)

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

