"""Reductions of a stage: accumulators carried through the reduce loops, partial results, remainders, accumulators in scratch.

    for r in K: acc += f(r)    →    LOOP r (acc) … ENDLOOP (acc + f(r));  RESULT
"""
from __future__ import annotations

from collections.abc import Callable
from typing import Any

from svod.compile.lower import math
from svod.compile.lower.emit_intrinsics import DotValues
from svod.compile.lower.emit_state import SLACK, Chunk, Nest, Terms
from svod.core.ir.combiner import get_combiner
from svod.core.ir.dtype import DType, dtypes
from svod.core.ir.uop import TRANSCENDENTAL, Ops
from svod.core.kernel.intrinsics import TensorizePlan
from svod.core.kernel.kernel import Reduction
from svod.core.kernel.placement import EmittedLoop
from svod.core.kernel.scheduler import UNROLL, UPCAST
from svod.errors import KernelOptError

Sink = Callable[["Nest", int], None]


class Reductions(DotValues):
    """The part of a phase that reduces."""

    def _children(self, s: int, depth: int) -> None:
        """Emit the stages that live at a point."""
        raise NotImplementedError

    def _out_positions(self, nest: Nest) -> list[tuple[dict[int, int], Chunk]]:
        """Positions of the register tile, vectors of an output axis included."""
        outs = len(nest.r.stage.outs)
        chunks = self._lane_chunks(nest) if 0 <= nest.lane < outs else (Chunk(0, 1, 1),)
        return [(offsets, c) for _, offsets in self._positions(nest, (UPCAST,), range(outs)) for c in chunks]

    def _partial_positions(self, nest: Nest) -> list[tuple[tuple[Any, ...], dict[int, int], Chunk]]:
        """Partial results per position of the tile: upcast rows of reduce axes, vectors among them."""
        outs = len(nest.r.stage.outs)
        chunks = self._lane_chunks(nest) if nest.lane >= outs else (Chunk(0, 1, 1),)
        found = self._positions(nest, (UPCAST,), range(outs, len(nest.pieces)))
        return [((*index, c.offset), offsets, c) for index, offsets in found for c in chunks]

    def _identities(self, nest: Nest) -> list[int]:
        b = self.b
        out = []
        nest.partial = {key: (i, c.width) for i, (key, _, c) in enumerate(self._partial_positions(nest))}
        reduce_lane = nest.lane >= len(nest.r.stage.outs)
        found = self._dot_plan(nest)
        if found is not None and found.dot.is_tile:
            nest.sums.clear()
            return [self._tile_zero(nest, found, i) for i in range(len(self._out_positions(nest)) * len(nest.partial))]
        for _, oc in self._out_positions(nest):
            for _, _, pc in self._partial_positions(nest):
                width = pc.width if reduce_lane else oc.width
                for red in nest.r.reductions:
                    values = get_combiner(red.combiner).identity(*red.dtypes)
                    out += [b.const(d, width, v) for d, v in zip(red.dtypes, values, strict=True)]
        nest.sums.clear()
        if found is not None and found.corrects >= 0:
            for offsets, oc in self._out_positions(nest):
                for index, _, pc in self._partial_positions(nest):
                    key = self._sum_key(nest, found, offsets, oc, index)
                    if key not in nest.sums:
                        nest.sums[key] = len(out)
                        out.append(b.const(found.dot.accumulator, pc.width if reduce_lane else oc.width, 0))
        return out

    def _sum_key(self, nest: Nest, found: TensorizePlan, offsets: dict[int, int], chunk: Chunk, partial: tuple[Any, ...]) -> Any:
        """What a correction depends on: the position of the operand that is summed up, and the partial result."""
        axes = found.operands[found.corrects].axes
        return tuple(offsets.get(a, 0) for a in axes), chunk.offset if nest.lane in axes else 0, partial

    def _reduce(self, nest: Nest, loops: list[tuple[int, EmittedLoop, int]], k: int, accs: list[int]) -> list[int]:
        """Open the reduce loops from number k with the accumulators carried; returns the results."""
        b = self.b
        while k < len(loops) and loops[k][0] < len(nest.r.stage.outs):
            self._open_row(nest, loops[k][0], ({}, 0))   # an output loop of extent 1
            self._children(nest.r.stage.index, loops[k][2] + 1)
            accs = self._reduce(nest, loops, k + 1, accs)
            self._close_row(nest, loops[k][0])
            return accs
        if k == len(loops):
            return self._accumulate(nest, accs)
        a, _, depth = loops[k]
        row = loops[k][1].row
        pieces = nest.pieces[a]
        at = next(i for i, p in enumerate(pieces) if p.row == row)
        piece = pieces[at]

        def inside(values: list[int]) -> list[int]:
            self._children(nest.r.stage.index, depth + 1)
            return self._reduce(nest, loops, k + 1, values)

        def looped(start: int, stop: int, step: int, values: list[int]) -> list[int]:
            loop, carried = b.open(start, stop, step, tuple(values))
            self._open_row(nest, a, ({loop: 1}, 0))
            following = inside(carried)
            self._close_row(nest, a)
            out = b.close(loop, tuple(following))
            nest.memo.clear()
            return out

        extent = self._left(nest, a, at)
        if self._bound(nest, a) is not None:
            return self._up_to_limit(nest, a, piece, extent, self._is_cut(nest, a, at), looped, accs)
        whole, rest = divmod(extent, piece.stride)
        if self._is_cut(nest, a, at):
            start, stop = self._part_bounds(whole * piece.stride)
            accs = looped(start, stop, piece.stride, accs)
            if rest:
                loop, carried = b.open(self._first_of_last_part(), b.index(1), 1, tuple(accs))
                following = self._remainder(nest, a, at, whole * piece.stride, rest, lambda: inside(carried))
                accs = b.close(loop, tuple(following))
                nest.memo.clear()
            return accs
        if whole > 1:
            accs = looped(b.index(0), b.index(whole * piece.stride), piece.stride, accs)
        elif whole == 1:
            self._open_row(nest, a, ({}, 0))
            accs = inside(accs)
            self._close_row(nest, a)
        if rest:
            values = accs
            accs = self._remainder(nest, a, at, whole * piece.stride, rest, lambda: inside(values))
        return accs

    def _up_to_limit(self, nest: Nest, a: int, piece: EmittedLoop, extent: int, cut: bool,
                     looped: Callable[[int, int, int, list[int]], list[int]], accs: list[int]) -> list[int]:
        """A reduce loop of an axis whose extent depends on variables: iterations that are wholly inside, then smaller ones for the rest.
        `looped(start, stop, step, accumulators)` emits a loop."""
        b = self.b
        end = -(-extent // piece.stride) * piece.stride
        room = self._room(nest, a)
        start, stop = self._part_bounds(end) if cut else (b.index(0), b.index(end))
        stop = b.alu("MIN", dtypes.index, 1, stop, room)
        if not self._is_last(nest, a):
            return looped(start, stop, piece.stride, accs)
        reach = self._reach(nest, a)
        nest.safe.add(a)
        if reach == 1:
            accs = looped(start, stop, piece.stride, accs)
            nest.safe.discard(a)
            return accs
        middle = self._whole_end(room, reach, piece.stride, stop)
        accs = looped(start, middle, piece.stride, accs)
        nest.safe.discard(a)
        step = self._tail_step(nest, a)
        with self._narrowed(nest, a, step):
            return looped(b.alu("MAX", dtypes.index, 1, start, middle), stop, step if step < reach else piece.stride, accs)

    def _is_cut(self, nest: Nest, a: int, at: int) -> bool:
        """Whether this is the loop that the cores share: the outermost of the axis of a split reduction, in the output stage itself."""
        return self.partial is not None and nest.r.stage.is_output and self.partial[0] == a and at == 0

    def _part_bounds(self, end: int) -> tuple[int, int]:
        """(start, stop) of this part's positions, of `end`."""
        b = self.b
        assert self.partial is not None
        chunk = self.partial[1]
        start = b.mul(self.part, chunk)
        return start, b.alu("MIN", dtypes.index, 1, b.add(start, b.index(chunk)), b.index(end))

    def _first_of_last_part(self) -> int:
        """0 in the last part, else 1: the start of a loop up to 1 that the last part alone runs."""
        b = self.b
        assert self.partial is not None
        last = b.alu("CMPEQ", dtypes.bool, 1, self.part, b.index(self.partial[2] - 1))
        return b.alu("WHERE", dtypes.index, 1, last, b.index(0), b.index(1))

    def _left(self, nest: Nest, a: int, at: int) -> int:
        """Positions of a reduce axis that the rows from number `at` must cover."""
        pieces = nest.pieces[a]
        return nest.bounds[a] if all(p.extent == 1 for p in pieces[:at]) else pieces[at].extent * pieces[at].stride

    def _remainder(self, nest: Nest, a: int, at: int, start: int, rest: int, body: Callable[[], list[int]]) -> list[int]:
        """The last, shorter iteration of a reduce loop: the rows inside it are cut to the `rest` positions that are left."""
        pieces, bound = nest.pieces[a], nest.bounds[a]
        cut = []
        left, stride = rest, 1
        for p in reversed(pieces[at + 1:]):
            e = min(p.extent, left)
            cut.append(EmittedLoop(p.row, p.role, e, stride))
            stride *= e
            left = -(-left // e)
        cut.reverse()
        nest.pieces[a] = (*(p._replace(extent=1) for p in pieces[:at + 1]), *cut)
        nest.bounds[a] = rest
        lane_stride = nest.lane_stride
        if nest.lane == a:
            nest.lane_stride = next((p.stride for p in cut if p.row == nest.lane_row), lane_stride)
        self._open_row(nest, a, ({}, start))
        out = body()
        self._close_row(nest, a)
        nest.pieces[a], nest.bounds[a], nest.lane_stride = pieces, bound, lane_stride
        return out

    def _accumulate(self, nest: Nest, accs: list[int]) -> list[int]:
        """All expanded positions of one innermost iteration into the accumulators, reduction-major."""
        b = self.b
        outs = len(nest.r.stage.outs)
        nest.memo.clear()
        accs = list(accs)
        tile = self._out_positions(nest)
        partial = nest.partial
        present = self._partial_positions(nest)
        reduce_lane = nest.lane >= outs
        components = sum(len(red.values) for red in nest.r.reductions)
        masks: dict[Chunk, int] = {}
        found = self._dot_plan(nest)
        reds = range(outs, len(nest.pieces))
        crowded = 4 * sum(b.lanes[v] > 1 for v in accs) >= self.state.target.vector_registers
        for number, (_, unrolled) in enumerate(self._positions(nest, (UNROLL,), reds)):
            if crowded and number:
                b.round = number
                nest.memo.clear()
            for index, offsets, pc in present:
                more = dict(unrolled)
                for a, o in offsets.items():
                    more[a] = more.get(a, 0) + o
                slot = partial[index]
                full = slot[1]
                summed: set[Any] = set()
                for t, (toff, oc) in enumerate(tile):
                    chunk = Chunk(pc.offset, full, pc.active) if reduce_lane else oc
                    if not self._set_position(nest, toff, chunk, more):
                        continue
                    at = (t * len(partial) + slot[0]) * components
                    guard = self._guard(nest, reds)
                    if reduce_lane and nest.chunk.active < nest.chunk.width:
                        mask = masks.get(nest.chunk)
                        if mask is None:
                            mask = masks[nest.chunk] = self._prefix_mask(nest.chunk)
                        guard = mask if guard < 0 else b.alu("AND", dtypes.bool, nest.chunk.width, mask, guard)
                    if found is not None and found.dot.is_tile:
                        if guard >= 0:
                            raise KernelOptError("tiles cannot be masked: a reduce axis was padded; leave PADTO away")
                        accs[at] = self._tile_dot(nest, found, accs[at])
                        continue
                    if found is not None:
                        accs[at] = self._guarded(self._dot(nest, found, accs[at], chunk.width), accs[at], guard)
                        key = self._sum_key(nest, found, toff, oc, index) if nest.sums else None
                        if key is not None and key not in summed:
                            summed.add(key)
                            n = nest.sums[key]
                            accs[n] = self._guarded(self._dot_correction(nest, found, accs[n], chunk.width), accs[n], guard)
                        continue
                    for red in nest.r.reductions:
                        n = len(red.values)
                        accs[at:at + n] = self._combine_value(nest, red, accs[at:at + n], guard, chunk.width)
                        at += n
        b.round = 0
        return accs

    def _guarded(self, value: int, acc: int, guard: int) -> int:
        """The new value of an accumulator where `guard` holds."""
        b = self.b
        return value if guard < 0 else b.alu("WHERE", b.dtype[acc], b.lanes[acc], guard, value, acc)

    def _combine_value(self, nest: Nest, red: Reduction, acc: list[int], guard: int, width: int) -> list[int]:
        b = self.b
        combiner = get_combiner(red.combiner)
        if red.combiner == "ADD" and guard < 0 and red.dtypes[0].is_float:
            node = nest.r.nodes[red.values[0]]
            if node.kind == "alu" and node.op == "MUL":
                x, y = self._eval(nest, node.src[0]), self._eval(nest, node.src[1])
                return [b.alu("MULACC", red.dtypes[0], width, x, y, acc[0])]
        values = [self._eval(nest, v) for v in red.values]
        if guard >= 0:
            neutral = combiner.identity(*red.dtypes)
            values = [b.alu("WHERE", d, width, guard, v, b.const(d, width, n)) for d, v, n in zip(red.dtypes, values, neutral, strict=True)]
        return list(combiner.combine(tuple(acc), tuple(values), self._alu_for(red.dtypes, width), nan=red.dtypes[0].is_float))

    def _alu_for(self, types: tuple[DType, ...], width: int) -> Callable[..., int]:
        b = self.b

        def alu(op: Ops, *args: int) -> int:
            dtype = dtypes.bool if op in (Ops.CMPLT, Ops.CMPLE, Ops.CMPEQ, Ops.CMPNE) else b.dtype[args[-1]]
            if op in TRANSCENDENTAL:
                return math.expand(b, op, dtype, width, *[b.splat(a, width) for a in args],
                                   scales=self.state.target.has_scaleb)
            return b.alu(op.value, dtype, width, *args)
        return alu

    def _epilogue(self, nest: Nest, accs: list[int], sink: Sink, values: bool) -> None:
        """Combine the partial results of each position and store the stage's value."""
        if nest.r.axes and nest.r.axes[-1] >= 0:    # not in the phase that combines the parts of a cut reduction
            accs = self.group.combine(nest.r, accs, self._alu_for)
        nest.memo.clear()
        tile = self._out_positions(nest)
        partial = nest.partial
        reduce_lane = nest.lane >= len(nest.r.stage.outs)
        components = sum(len(red.values) for red in nest.r.reductions)
        lane = nest.lane
        found = self._dot_plan(nest)
        if found is not None and found.dot.is_tile:
            self._tile_epilogue(nest, found, accs, sink, values)
            return
        for t, (offsets, oc) in enumerate(tile):
            at = t * len(partial) * components
            if found is not None and nest.sums:
                for index, (k, _) in partial.items():
                    acc = accs[at + k]
                    extra = accs[nest.sums[self._sum_key(nest, found, offsets, oc, index)]]
                    accs[at + k] = self.b.alu("SUB", self.b.dtype[acc], self.b.lanes[acc], acc, extra)
            done: dict[tuple[int, int], int] = {}
            first = 0
            for k, red in enumerate(nest.r.reductions):
                n = len(red.values)
                parts = [accs[at + p * components + first:at + p * components + first + n] for p in range(len(partial))]
                for c, v in enumerate(self._combine_all(red, parts, reduce_lane)):
                    done[k, c] = v
                first += n
            if reduce_lane:
                nest.lane = -1
            ok = self._set_position(nest, offsets, oc)
            if ok:
                nest.results = done
                sink(nest, self._eval(nest, nest.r.value) if values else -1)
            nest.lane = lane

    def _tile_epilogue(self, nest: Nest, found: TensorizePlan, accs: list[int], sink: Sink, values: bool) -> None:
        """Rows of each tile by way of scratch; partial results are added there."""
        b = self.b
        rows, columns = self._tile_shape(nest, found)
        dtype = found.dot.accumulator
        count, words = len(nest.partial), found.dot.columns
        size = rows * words * dtype.itemsize
        areas = [self.scratch + i * (-(-size // 64) * 64) for i in range(count)]
        self.scratch = areas[-1] + -(-(size + SLACK) // 64) * 64
        pointers = [b.pure("SCRATCH", dtype, 1, (), a) for a in areas]
        for t, (offsets, chunk) in enumerate(self._out_positions(nest)):
            for i, pointer in enumerate(pointers):
                b.store("TILESTORE", dtype, rows * columns, (pointer, b.index(0), accs[t * count + i]), (0, rows, words))
            for row in range(rows):
                if not self._set_position(nest, {**offsets, found.rows: offsets.get(found.rows, 0) + row}, chunk):
                    continue
                total = -1
                for pointer in pointers:
                    part = b.load("LOAD", dtype, chunk.width, (pointer, b.index(0)), row * words, ordered=True)
                    total = part if total < 0 else b.alu("ADD", dtype, chunk.width, total, part)
                nest.results = {(0, 0): total}
                nest.memo.clear()
                sink(nest, self._eval(nest, nest.r.value) if values else -1)

    def _combine_all(self, red: Reduction, parts: list[list[int]], reduce_lane: bool) -> list[int]:
        """A tree over partial results, then across the lanes of those that are vectors on a reduce axis."""
        b = self.b
        combiner = get_combiner(red.combiner)
        nan = red.dtypes[0].is_float
        if len(parts) == 1 and b.lanes[parts[0][0]] == 1:
            return parts[0]
        by_width: dict[int, list[list[int]]] = {}
        for p in parts:
            by_width.setdefault(b.lanes[p[0]], []).append(p)
        scalars: list[list[int]] = []
        for width, group in by_width.items():
            alu = self._alu_for(red.dtypes, width)
            while len(group) > 1:
                group = [list(combiner.combine(tuple(group[i]), tuple(group[i + 1]), alu, nan=nan)) if i + 1 < len(group) else group[i]
                         for i in range(0, len(group), 2)]
            value = group[0]
            if reduce_lane:
                w = width
                while w > 2:
                    half = w // 2
                    low = [b.pure("SHUFFLE", b.dtype[v], half, (v, v), tuple(range(half))) for v in value]
                    high = [b.pure("SHUFFLE", b.dtype[v], half, (v, v), tuple(range(half, w))) for v in value]
                    value = list(combiner.combine(tuple(low), tuple(high), self._alu_for(red.dtypes, half), nan=nan))
                    w = half
                if w == 2:
                    low = [b.pure("EXTRACT", b.dtype[v], 1, (v,), 0) for v in value]
                    high = [b.pure("EXTRACT", b.dtype[v], 1, (v,), 1) for v in value]
                    value = list(combiner.combine(tuple(low), tuple(high), self._alu_for(red.dtypes, 1), nan=nan))
            scalars.append(value)
        while len(scalars) > 1:
            a, c = scalars.pop(), scalars.pop()
            scalars.append(list(combiner.combine(tuple(c), tuple(a), self._alu_for(red.dtypes, b.lanes[a[0]]), nan=nan)))
        return scalars[0]

    def _reduce_in_scratch(self, nest: Nest, loops: list[tuple[int, EmittedLoop, int]], k: int, end: int, sink: Sink, values: bool) -> None:
        """Output loops inside reduce loops: the accumulators of all their iterations live in scratch.

            for k0: for n: acc += …      acc[…] = 0;  for k0: for n: acc[n] += …;  for n: store acc[n]
        """
        b = self.b
        outs = len(nest.r.stage.outs)
        inner = [loop for loop in loops[k:end] if loop[0] < outs]
        identities = self._identities(nest)
        found = self._dot_plan(nest)
        shape = self._tile_shape(nest, found) if found is not None and found.dot.is_tile else None
        # one slot of scratch per accumulator, over the iterations of the inner loops
        counts = [piece.extent for _, piece, _ in inner]
        total = 1
        for n in counts:
            total *= n
        offsets = []
        for v in identities:
            nbytes = b.dtype[v].itemsize * b.lanes[v]
            offsets.append((self.scratch, nbytes))
            self.scratch += -(-(nbytes * total + SLACK) // 64) * 64
        iteration: dict[int, int] = {}

        def slot(number: int, dtype: DType, lanes: int) -> tuple[int, int]:
            pointer = b.pure("SCRATCH", dtype, 1, (), offsets[number][0])
            terms: Terms = {}
            scale = 1
            for j in range(len(inner) - 1, -1, -1):
                if j in iteration:
                    terms[iteration[j]] = scale
                scale *= inner[j][1].extent
            return pointer, self._ssa(({v: c * lanes for v, c in terms.items()}, 0))

        def over_outputs(j: int, body: Callable[[], None]) -> None:
            if j == len(inner):
                body()
                return
            # no stages here: what is read after the reduction lives outside its loops
            a, piece, _ = inner[j]
            self._counted(nest, a, piece, iteration, j, lambda: over_outputs(j + 1, body))

        def write(accs: list[int]) -> None:
            for i, v in enumerate(accs):
                pointer, at = slot(i, b.dtype[v], b.lanes[v])
                if shape is not None:
                    b.store("TILESTORE", b.dtype[v], b.lanes[v], (pointer, at, v), (0, *shape))
                    continue
                b.store("STORE", b.dtype[v], b.lanes[v], (pointer, at, v), (0, False))

        def read() -> list[int]:
            out = []
            for i, v in enumerate(identities):
                pointer, at = slot(i, b.dtype[v], b.lanes[v])
                if shape is not None:
                    out.append(b.load("TILELOAD", b.dtype[v], b.lanes[v], (pointer, at), (0, *shape), ordered=True))
                    continue
                out.append(b.load("LOAD", b.dtype[v], b.lanes[v], (pointer, at), 0, ordered=True))
            return out

        def main(j: int) -> None:
            if j == end:
                write(self._reduce(nest, loops, end, read()))
                return
            a, piece, depth = loops[j]
            if a < outs:
                number = inner.index(loops[j])

                def go() -> None:
                    self._children(nest.r.stage.index, depth + 1)
                    main(j + 1)
                self._counted(nest, a, piece, iteration, number, go)
                return
            pieces = nest.pieces[a]
            at = next(i for i, p in enumerate(pieces) if p.row == piece.row)
            stride = pieces[at].stride
            whole, rest = divmod(self._left(nest, a, at), stride)
            cut = self._is_cut(nest, a, at)

            def once() -> None:
                self._children(nest.r.stage.index, depth + 1)
                main(j + 1)
            def tail() -> list[int]:
                once()
                return []

            if self._bound(nest, a) is not None:
                def run(start: int, stop: int, step: int, accs: list[int]) -> list[int]:
                    self._loop_between(nest, a, step, start, stop, once)
                    return accs
                self._up_to_limit(nest, a, pieces[at], self._left(nest, a, at), cut, run, [])
                return
            if whole:
                start, stop = self._part_bounds(whole * stride) if cut else (b.index(0), b.index(whole * stride))
                self._loop_between(nest, a, stride, start, stop, once)
            if rest and cut:
                loop, _ = b.open(self._first_of_last_part(), b.index(1), 1)
                self._remainder(nest, a, at, whole * stride, rest, tail)
                b.close(loop)
                nest.memo.clear()
            elif rest:
                self._remainder(nest, a, at, whole * stride, rest, tail)

        over_outputs(0, lambda: write(identities))
        main(k)
        over_outputs(0, lambda: self._epilogue(nest, read(), sink, values))

    def _counted(self, nest: Nest, a: int, piece: EmittedLoop, iteration: dict[int, int], number: int, body: Callable[[], None]) -> None:
        """An output loop that counts iterations by one, for accumulators in scratch."""
        b = self.b
        if piece.extent == 1:
            self._open_row(nest, a, ({}, 0))
            body()
            self._close_row(nest, a)
            return
        stop = b.index(piece.extent)
        inside = False
        if self._bound(nest, a) is not None:
            stop = self._count(nest, a, piece)
            inside = a not in nest.safe and self._is_last(nest, a) and self._reach(nest, a) == 1
        if inside:
            nest.safe.add(a)
        loop, _ = b.open(b.index(0), stop, 1)
        iteration[number] = loop
        self._open_row(nest, a, ({b.mul(loop, piece.stride): 1}, 0))
        body()
        self._close_row(nest, a)
        if inside:
            nest.safe.discard(a)
        del iteration[number]
        b.close(loop)
        nest.memo.clear()

    def _loop_between(self, nest: Nest, a: int, stride: int, start: int, stop: int, body: Callable[[], Any], last: int = -1) -> None:
        """A loop over an axis, of outputs or of a reduction, from `start` below `stop`; positions beyond `last` are moved back to it."""
        b = self.b
        loop, _ = b.open(start, stop, stride)
        self._open_row(nest, a, ({loop if last < 0 else b.alu("MIN", dtypes.index, 1, loop, last): 1}, 0))
        body()
        self._close_row(nest, a)
        b.close(loop)
        nest.memo.clear()
