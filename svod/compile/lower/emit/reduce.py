"""Emits reduce loops, whose accumulators are carried in registers or stored in scratch memory, with their tails, and the parts of split
reductions.

    for r in K: acc += f(r)          →    LOOP r (acc) … ENDLOOP (acc + f(r));  RESULT
    for k: for n: acc[n] += f(k, n)  →    for n: scratch[n] = 0;  for k: for n: scratch[n] += f(k, n);  for n: … scratch[n]

Long sums of floats are cut into blocks (`svod.core.ir.summation`), each with separate accumulators:

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
from svod.compile.lower.emit.state import OpenStage, Sink
from svod.compile.lower.emit.threads.pipeline import PipelinedLoop
from svod.core.ir.dtype import DType, dtypes
from svod.core.kernel.required import Lin, Terms, add_lins, sum_lins
from svod.core.tree.nodes import Accumulate, Body, Inner, Loop, Reduction, Span, Update
from svod.core.tree.tails import is_split


class ScratchAccumulators:
    """Accumulators in scratch memory, for reductions with output loops inside reduce loops: one slot for each iteration of those output
    loops."""

    def __init__(self, ctx: PhaseContext, axes: Axes, first: list[int], loops: list[Loop], tile_shape: tuple[int, int] | None):
        self.b = ctx.b
        self.axes = axes
        self.first = first              # initial values
        self.loops = loops              # the output loops inside the reduce loops, outermost first
        self.tile_shape = tile_shape    # (rows, columns) of a tile register, if accumulators are tiles
        self.iteration: dict[int, int] = {}     # position in `loops` of a loop that is open → its index value
        self.ctx = ctx
        total = prod(node.loop.piece.extent for node in loops)
        self.offsets = [ctx.allocate(self.b.dtype[v].itemsize * self.b.num_lanes[v] * total + SLACK) for v in first]

    def another(self) -> ScratchAccumulators:
        """Make a second set of slots, for the accumulators of a block."""
        other = ScratchAccumulators(self.ctx, self.axes, self.first, self.loops, self.tile_shape)
        other.iteration = self.iteration
        return other

    def _slot(self, number: int, dtype: DType, lanes: int) -> tuple[int, int]:
        """Return (pointer, index) of accumulator `number` in the current iteration of the open loops."""
        terms: Terms = {}
        scale = lanes
        for j in reversed(range(len(self.loops))):
            if j in self.iteration:
                terms[self.iteration[j]] = scale
            scale *= self.loops[j].loop.piece.extent
        pointer = self.b.pure("SCRATCH", dtype, 1, (), self.offsets[number])
        return pointer, self.axes.ssa((terms, 0))

    def read(self) -> list[int]:
        b, out = self.b, []
        op, arg = ("LOAD", 0) if self.tile_shape is None else ("TILELOAD", (0, *self.tile_shape))
        for i, (dtype, lanes) in enumerate(map(b.type_of, self.first)):
            out.append(b.load(op, dtype, lanes, self._slot(i, dtype, lanes), arg, ordered=True))
        return out

    def write(self, accs: list[int]) -> None:
        b = self.b
        op, arg = ("STORE", (0, False)) if self.tile_shape is None else ("TILESTORE", (0, *self.tile_shape))
        for i, v in enumerate(accs):
            dtype, lanes = b.type_of(v)
            b.store(op, dtype, lanes, (*self._slot(i, dtype, lanes), v), arg)


Memory = ScratchAccumulators | None
# emits code that adds to accumulators, carried or in scratch memory; returns the carried accumulators after it
Inside = Callable[[list[int], Memory], list[int]]
Run = Callable[[int, int, list[int], Memory], list[int]]    # emits such code for the iterations from a start to a stop


class ReduceLoops:
    """Emits the loops of one reduction of an open stage. `compute_all` emits the stages that a body computes."""

    def __init__(self, loops: LoopEmitter, intrinsics: Intrinsics, stage: OpenStage, compute_all: Callable[[Body], None]):
        self.ctx, self.b, self.axes = intrinsics.ctx, intrinsics.b, loops.axes
        self.loops, self.intrinsics, self.stage, self.compute_all = loops, intrinsics, stage, compute_all
        self.sums = Accumulators(intrinsics, stage)

    def emit(self, node: Reduction, sink: Sink) -> None:
        """Emit the loops, and hand the results to the sink."""
        sums, plan = self.sums, self.sums.plan
        if not node.in_memory:
            sums.epilogue(self._emit(node.inner, sums.first, None), sink, node.barrier)
            return
        in_registers = plan is not None and plan.dot.is_tile and not plan.dot.fragments
        shape = self.intrinsics.tile_shape(self.stage, plan) if plan is not None and in_registers else None
        scratch = ScratchAccumulators(self.ctx, self.axes, sums.first, _loops_of(node), shape)
        self._over_outputs(scratch, 0, lambda: scratch.write(sums.first))
        self._emit(node.inner, [], scratch)
        self._over_outputs(scratch, 0, lambda: sums.epilogue(scratch.read(), sink, node.barrier))

    def _over_outputs(self, scratch: ScratchAccumulators, j: int, body: Callable[[], None]) -> None:
        """Emit `body` inside the output loops from number `j` on, except those that are open. The loops compute no stages, because every
        stage that is read after the reduction is placed outside of the reduction's loops."""
        if j == len(scratch.loops):
            body()
            return
        if j in scratch.iteration:
            self._over_outputs(scratch, j + 1, body)
            return
        self.loops.counted(self.stage, scratch.loops[j], scratch.iteration, j, lambda: self._over_outputs(scratch, j + 1, body))

    def _emit(self, node: Inner, accs: list[int], scratch: Memory) -> list[int]:
        """Emit a loop or statement of a reduction; returns the carried accumulators after it. Accumulators in scratch memory are read
        and written by an Update, and the loops around it carry nothing."""
        if isinstance(node, Accumulate):
            return self.sums.accumulate(accs, node.blocks)
        if isinstance(node, Update):
            assert scratch is not None
            if node.in_block:
                block = self._emit(node.inner, self.sums.first, None)
                scratch.write(self.sums.fold(scratch.read(), block))
            else:
                scratch.write(self._emit(node.inner, scratch.read(), None))
            return []
        assert isinstance(node, Loop)
        if node.axis >= self.stage.frame.num_outs:
            return self._over_axis(node, accs, scratch)
        if scratch is not None:
            number = next(j for j, loop in enumerate(scratch.loops) if loop.number == node.number)
            self.loops.counted(self.stage, node, scratch.iteration, number, lambda: self._body(node.body, [], scratch))
            return []
        return self._with_row(node, ({}, 0), node.body, accs, None)     # an output loop of extent 1

    def _body(self, body: Body, accs: list[int], scratch: Memory) -> list[int]:
        """Emit a body; returns the carried accumulators after it."""
        before = self.stage.enter(body)
        self.compute_all(body)
        out = self._emit(body.inner, accs, scratch)
        self.stage.leave(before)
        return out

    def _with_row(self, node: Loop, at: Lin, body: Body, accs: list[int], scratch: Memory) -> list[int]:
        """Emit a body with the loop of `node` open at position `at`; returns the carried accumulators after it."""
        self.stage.open_row(node.axis, at)
        out = self._body(body, accs, scratch)
        self.stage.close_row(node.axis)
        return out

    def _looped(self, node: Loop, body: Body, start: int, stop: int, step: int, accs: list[int], scratch: Memory) -> list[int]:
        """Emit a body in a loop that carries accumulators; returns them after the loop."""
        index, carried = self.b.open(start, stop, step, tuple(accs))
        return self._close(index, self._with_row(node, ({index: 1}, 0), body, carried, scratch))

    def _over_axis(self, node: Loop, accs: list[int], scratch: Memory) -> list[int]:
        """Emit one reduce loop: its full iterations, in blocks if it has blocks, then its tail."""
        b, stage, stride = self.b, self.stage, node.stride
        if node.span in (Span.TO_LIMIT, Span.WHOLE):
            return self._up_to_limit(node, accs, scratch)
        whole = node.whole

        def run(start: int, stop: int, values: list[int], memory: Memory) -> list[int]:
            if node.pipeline is None:
                return self._looped(node, node.body, start, stop, stride, values, memory)
            loop = PipelinedLoop(self.intrinsics, stage, node, (start, stop))
            return loop.run(values, lambda carried: self._body(node.body, carried, memory))

        def remainder(values: list[int]) -> list[int]:
            tail = node.tails[0]

            def body(own: list[int], memory: Memory) -> list[int]:
                return self._with_row(node, ({}, whole * stride), tail.body, own, memory)
            return self._block(values, scratch, body) if node.blocks else body(values, scratch)

        if is_split(self.ctx.split, node):
            accs = self._in_blocks(node.blocks, stride, self._part_bounds(whole * stride), accs, scratch, run)
            if node.tails:
                index, carried = b.open(self._first_of_last_part(), b.index(1), 1, tuple(accs))
                accs = self._close(index, remainder(carried))
            return accs
        if node.span is Span.ALL:
            accs = self._in_blocks(node.blocks, stride, self._used_bounds(node), accs, scratch, run)
        elif node.span is Span.ONCE:
            def once(own: list[int], memory: Memory) -> list[int]:
                return self._with_row(node, ({}, 0), node.body, own, memory)
            accs = self._block(accs, scratch, once) if node.blocks else once(accs, scratch)
        return remainder(accs) if node.tails else accs

    # -- blocks --------------------------------------------------------------------------------------------
    def _in_blocks(self, sizes: tuple[int, ...], stride: int, bounds: tuple[int, int], accs: list[int], scratch: Memory,
                   run: Run) -> list[int]:
        """Emit the code of `run` from the first bound to the second, in nested blocks. `sizes`: iterations of a block, innermost first;
        () for no blocks."""
        b = self.b

        def blocks(sizes: tuple[int, ...], start: int, stop: int, positions: int | None, own: list[int],
                   memory: Memory) -> list[int]:
            if not sizes:
                return run(start, stop, own, memory)
            step = sizes[-1] * stride
            index, carried = b.open(start, stop, step, tuple(own))
            end, whole = b.add(index, b.index(step)), None
            if positions is not None and positions % step == 0:
                whole = step
            else:
                end = b.alu("MIN", dtypes.index, 1, end, stop)
            return self._close(index, self._block(carried, memory, lambda *to: blocks(sizes[:-1], index, end, whole, *to)))
        start, stop = (b.known(bound) for bound in bounds)
        return blocks(sizes, *bounds, stop - start if start is not None and stop is not None else None, accs, scratch)

    def _block(self, accs: list[int], scratch: Memory, body: Inside) -> list[int]:
        """Let `body` add to new accumulators, then combine these with the given ones."""
        sums = self.sums
        if scratch is None:
            return sums.fold(accs, body(sums.first, None))
        own = scratch.another()
        self._over_outputs(own, 0, lambda: own.write(sums.first))
        body([], own)
        self._over_outputs(own, 0, lambda: scratch.write(sums.fold(scratch.read(), own.read())))
        return []

    def _close(self, loop: int, following: list[int]) -> list[int]:
        """Close a loop that carries accumulators; returns their final values."""
        out = self.b.close(loop, tuple(following))
        self.stage.memo.clear()
        return out

    def _up_to_limit(self, node: Loop, accs: list[int], scratch: Memory) -> list[int]:
        """Emit a reduce loop over an axis whose extent depends on variables: full iterations first, then smaller ones up to the extent."""
        b, stage, a, stride = self.b, self.stage, node.axis, node.stride
        at = node.frame.number_of(node.loop)
        end = -(-node.frame.left(a, at) // stride) * stride
        room = self.axes.room(stage, a)
        start, stop = self._part_bounds(end) if is_split(self.ctx.split, node) else (b.index(0), b.index(end))
        stop = b.alu("MIN", dtypes.index, 1, stop, room)

        def whole(stop: int) -> list[int]:
            return self._in_blocks(node.blocks, stride, (start, stop), accs, scratch,
                                   lambda start, stop, *to: self._looped(node, node.body, start, stop, stride, *to))
        if node.span is Span.TO_LIMIT:
            return whole(stop)
        reach = node.frame.reach(a)
        middle = self.axes.whole_end(room, reach, stride, stop) if node.tails else stop
        accs = whole(middle)
        if not node.tails:
            return accs
        last = node.tails[0]

        def tail(own: list[int], memory: Memory) -> list[int]:
            step = last.step if last.step < reach else stride
            return self._looped(node, last.body, b.alu("MAX", dtypes.index, 1, start, middle), stop, step, own, memory)
        return self._block(accs, scratch, tail) if node.blocks else tail(accs, scratch)

    def _used_bounds(self, node: Loop) -> tuple[int, int]:
        """Emit (start, stop) of a reduce loop, without iterations that add nothing to any position of the tile."""
        b, stage, window, end = self.b, self.stage, node.window, node.whole * node.stride
        if window is None:
            return self._unmasked_bounds(node, end)
        first = b.mul(self.axes.ssa(self.axes.start(stage, window.output)), window.step)
        apart, (least, most) = b.index(window.apart), window.reach(stage.span(window.output))
        start = b.alu("SUB", dtypes.index, 1, b.index(window.low - most + window.apart - 1), first)
        stop = b.alu("SUB", dtypes.index, 1, b.index(window.high - least - 1 + window.apart), first)
        return (b.alu("MAX", dtypes.index, 1, b.index(0), b.alu("IDIV", dtypes.index, 1, start, apart)),
                b.alu("MIN", dtypes.index, 1, b.index(end), b.alu("IDIV", dtypes.index, 1, stop, apart)))

    def _unmasked_bounds(self, node: Loop, end: int) -> tuple[int, int]:
        """Emit (start, stop) of an attention's loop over blocks of keys, without blocks in which the mask hides the scores of all rows
        of the group."""
        b, stage = self.b, self.stage
        start, stop = b.index(0), b.index(end)
        for limit in node.limits:
            q = limit.output
            start_of_group, apart = stage.of_group[q]
            first = self.axes.ssa(add_lins(start_of_group, sum_lins(stage.opened[q]), 1))
            row = b.add(first, b.index(stage.span(q) + apart - 1)) if limit.step > 0 else first
            reach = b.add(b.mul(row, limit.step), b.index(limit.const))
            if limit.apart < 0:
                left = b.alu("MAX", dtypes.index, 1, b.index(0), b.add(reach, b.index(-limit.apart)))
                stop = b.alu("MIN", dtypes.index, 1, stop, b.alu("IDIV", dtypes.index, 1, left, b.index(-limit.apart)))
            else:
                over = b.alu("MAX", dtypes.index, 1, b.index(0), b.alu("SUB", dtypes.index, 1, b.index(0), reach))
                before = b.alu("IDIV", dtypes.index, 1, b.add(over, b.index(limit.apart - 1)), b.index(limit.apart))
                start = b.alu("MAX", dtypes.index, 1, start, b.alu("MIN", dtypes.index, 1, b.index(end), before))
        return start, stop

    def _part_bounds(self, end: int) -> tuple[int, int]:
        """Emit (start, stop) of the positions that this part of a split reduction sums up. `end`: the number of positions of all parts."""
        b = self.b
        assert self.ctx.split is not None
        chunk = self.ctx.split.chunk
        start = b.mul(self.ctx.part, chunk)
        return start, b.alu("MIN", dtypes.index, 1, b.add(start, b.index(chunk)), b.index(end))

    def _first_of_last_part(self) -> int:
        """Emit the start of a loop that ends at 1 and that only the last part runs: 0 in the last part, otherwise 1."""
        b = self.b
        assert self.ctx.split is not None
        last = b.alu("CMPEQ", dtypes.bool, 1, self.ctx.part, b.index(self.ctx.split.parts - 1))
        return b.alu("WHERE", dtypes.index, 1, last, b.index(0), b.index(1))


def _loops_of(node: Reduction) -> list[Loop]:
    """Return the output loops inside the reduce loops of a reduction with accumulators in memory, outermost first."""
    found: list[Loop] = []
    inner: Inner = node.inner
    while isinstance(inner, Loop):
        if inner.number in node.in_memory:
            found.append(inner)
        inner = inner.body.inner
    return found
