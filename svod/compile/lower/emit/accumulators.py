"""Accumulators of a stage's reductions: initial values, the code of one iteration, and the combination of partial results.

    (m, s, a) = EXPSUM over b of (p[i, b], t[i, b], y[i, n, b]), 4 × 8 results a thread:  4 accumulators of m, 4 of s, 32 of a

If a component of a reduction is the same at several positions of the tile, a loop carries only one accumulator for it."""
from __future__ import annotations

from collections.abc import Iterable
from functools import cached_property
from itertools import zip_longest
from typing import Any

from svod.compile.lower import math
from svod.compile.lower.emit.facts import SLACK
from svod.compile.lower.emit.intrinsics import Intrinsics
from svod.compile.lower.emit.state import OpenStage, Sink
from svod.compile.lower.emit.threads.lines import Cell, Lines
from svod.core.ir.combiner import get_combiner
from svod.core.ir.dtype import dtypes
from svod.core.ir.uop import COMPARISONS, TRANSCENDENTAL, Ops, UOp
from svod.core.kernel.intrinsics import LINE_OF_QUAD, QUAD, TensorizePlan, exchanges_results, held_layout
from svod.core.kernel.kernel import ReduceNode, expand_reads, own_reduces
from svod.core.kernel.required import add_lins
from svod.core.kernel.scheduler import UNROLL
from svod.core.machine.target import SAME
from svod.core.tree.nodes import Chunk
from svod.errors import KernelOptError

CROWDED_SHARE = 0.75
"""Accumulators that fill this share of the vector registers leave none for loaded values that unrolled iterations share: each iteration
loads them again. A convolution of 5 taps with 12 accumulators of 16 registers (AVX2) takes 0.51 ms so, and 1.0 ms with shared loads. With 8
accumulators, 3×3 convolutions are 8 % faster with shared loads."""

Unrolled = list[tuple[tuple[int, ...], dict[int, int]]]     # positions of unrolled rows: (index per row, axis → offset)


class Accumulators:
    """The accumulators of one reduction of an open stage, by position of its tile."""

    def __init__(self, intrinsics: Intrinsics, stage: OpenStage):
        self.intrinsics, self.stage = intrinsics, stage
        self.ctx, self.b, self.axes, self.values = intrinsics.ctx, intrinsics.b, intrinsics.axes, intrinsics.values
        self.plan = intrinsics.plan_of(stage)
        self.in_order = self.ctx.state.target.numerics == SAME
        # per accumulator of the tile: number of the carried accumulator that stands for it; []: each accumulator is carried
        self.slots: list[int] = []
        self.corrections: dict[Any, int] = {}   # key of a correction of a dot instruction → number of its accumulator
        # position of a partial result → (number, vector width)
        self.partial = {key: (i, c.width) for i, (key, _, c) in enumerate(stage.frame.partial_positions())}
        self.first = self._identities()         # initial values

    def _identities(self) -> list[int]:
        """Make the initial values, and decide which accumulators are carried."""
        b, stage, plan, out = self.b, self.stage, self.plan, list[int]()
        tile, partial = stage.frame.out_positions(), stage.frame.partial_positions()
        reduce_lane = stage.frame.vector_axis >= stage.frame.num_outs
        if plan is not None and plan.dot.is_tile:
            return [self.intrinsics.tile_zero(stage, plan, i) for i in range(len(tile) * len(partial))]
        slots, carried = list[int](), dict[Any, int]()
        for offsets, oc in tile:
            for index, _, pc in partial:
                for k, red in enumerate(stage.r.reductions):
                    values = get_combiner(red.combiner).identity(*red.dtypes)
                    for c, (d, v) in enumerate(zip(red.dtypes, values, strict=True)):
                        at, width = self._depends(red, c, offsets, oc)
                        slots.append(carried.setdefault((k, c, index, at), len(out)))
                        if slots[-1] == len(out):
                            out.append(b.const(d, pc.width if reduce_lane else width, v))
        self.slots = slots if len(out) < len(slots) else []
        if plan is not None and plan.corrects >= 0:
            for offsets, oc in tile:
                for index, _, pc in partial:
                    key = self._correction(plan, offsets, oc, index)
                    if key not in self.corrections:
                        self.corrections[key] = len(out)
                        out.append(b.const(plan.dot.accumulator, pc.width if reduce_lane else oc.width, 0))
        return out

    def _depends(self, red: ReduceNode, component: int, offsets: dict[int, int], chunk: Chunk) -> tuple[Any, int]:
        """Return (key, lanes) of one component of a reduction at a position of the tile: positions with the same key share one
        accumulator."""
        if len(red.values) == 1:
            return (tuple(offsets.items()), chunk.offset), chunk.width
        axes = {a for c in get_combiner(red.combiner).read_for(component) for a in self.stage.r.nodes[red.values[c]].deps}
        own = tuple([(a, o) for a, o in offsets.items() if a in axes])
        return ((own, chunk.offset), chunk.width) if self.stage.frame.vector_axis in axes else ((own, -1), 1)

    def _spread(self, accs: list[int]) -> list[int]:
        """Expand the accumulators that are carried to one for each position of the tile."""
        return [accs[slot] for slot in self.slots] if self.slots else list(accs)

    def _merged(self, before: list[int], accs: list[int]) -> list[int]:
        """Reduce the accumulators of all positions to the carried ones. `before`: the carried accumulators so far; a position beyond the
        tile's end leaves its accumulator unchanged."""
        if not self.slots:
            return accs
        out = list(before)
        for slot, v in zip(self.slots, accs, strict=True):
            if v != before[slot]:
                out[slot] = v
        return out

    def _correction(self, plan: TensorizePlan, offsets: dict[int, int], chunk: Chunk, partial: tuple[Any, ...]) -> Any:
        """Return the key of the accumulator of a dot instruction's correction: the position along the axes of the summed operand, and
        the partial result."""
        axes = plan.operands[plan.corrects].axes
        return tuple(offsets.get(a, 0) for a in axes), chunk.offset if self.stage.frame.vector_axis in axes else 0, partial

    def accumulate(self, accs: list[int], blocks: tuple[int, ...]) -> list[int]:
        """Accumulate all expanded positions of one innermost iteration, reduction by reduction. `blocks`: sizes of nested blocks that
        have separate sums before they are added up, innermost first; () for none."""
        stage = self.stage
        return self._in_blocks(accs, stage.frame.positions((UNROLL,), range(stage.frame.num_outs, len(stage.frame.pieces))), blocks)

    def _in_blocks(self, accs: list[int], positions: Unrolled, sizes: tuple[int, ...]) -> list[int]:
        if not sizes:
            return self._accumulate(accs, positions)
        for at in range(0, len(positions), sizes[-1]):
            accs = self.fold(accs, self._in_blocks(self.first, positions[at:at + sizes[-1]], sizes[:-1]))
        return accs

    def fold(self, accs: list[int], block: list[int]) -> list[int]:
        """Combine the accumulators with the accumulators of a block of iterations; returns the results."""
        following = self.ctx.group.both(self.stage.r, self._spread(accs), self._spread(block), self.alu)
        return self._merged(accs, following)

    def _accumulate(self, accs: list[int], positions: Unrolled) -> list[int]:
        b, stage, plan, partial = self.b, self.stage, self.plan, self.partial
        outs = stage.frame.num_outs
        stage.memo.clear()
        carried, accs = accs, self._spread(accs)
        tile = stage.frame.out_positions()
        present = stage.frame.partial_positions()
        reduce_lane = stage.frame.vector_axis >= outs
        components = sum(len(red.values) for red in stage.r.reductions)
        masks: dict[Chunk, int] = {}
        reds = range(outs, len(stage.frame.pieces))
        vectors = sum(b.num_lanes[v] > 1 for v in carried)
        crowded = vectors >= CROWDED_SHARE * self.ctx.state.target.vector_registers
        for number, (_, unrolled) in enumerate(positions):
            if crowded and number:
                b.round = number
                stage.memo.clear()
            for index, offsets, pc in present:
                more = dict(unrolled)
                for a, o in offsets.items():
                    more[a] = more.get(a, 0) + o
                first, full = partial[index]
                summed: set[Any] = set()
                for t, (toff, oc) in enumerate(tile):
                    chunk = Chunk(pc.offset, full, pc.active) if reduce_lane else oc
                    if not stage.set_position(toff, chunk, more):
                        continue
                    at = (t * len(partial) + first) * components
                    guard = self.axes.guard(stage, reds)
                    if reduce_lane and stage.chunk.active < stage.chunk.width:
                        mask = masks.get(stage.chunk)
                        if mask is None:
                            mask = masks[stage.chunk] = self.values.prefix_mask(stage.chunk)
                        guard = mask if guard < 0 else b.alu("AND", dtypes.bool, stage.chunk.width, mask, guard)
                    if plan is not None and plan.dot.is_tile:
                        if guard >= 0:
                            raise KernelOptError("tiles cannot be masked: a reduce axis was padded; leave PADTO away")
                        accs[at] = self.intrinsics.tile_dot(stage, plan, accs[at])
                        continue
                    if plan is not None:
                        accs[at] = self._guarded(self.intrinsics.dot(stage, plan, accs[at], chunk.width), accs[at], guard)
                        key = self._correction(plan, toff, oc, index) if self.corrections else None
                        if key is not None and key not in summed:
                            summed.add(key)
                            n = self.corrections[key]
                            accs[n] = self._guarded(self.intrinsics.dot_correction(stage, plan, accs[n], chunk.width), accs[n], guard)
                        continue
                    for red in stage.r.reductions:
                        n = len(red.values)
                        accs[at:at + n] = self._add(red, accs[at:at + n], guard, chunk.width)
                        at += n
        b.round = 0
        return self._merged(carried, accs)

    def _guarded(self, value: int, acc: int, guard: int) -> int:
        """Select the new value of an accumulator where `guard` holds, otherwise the old one. `guard` -1: always the new one."""
        b = self.b
        return value if guard < 0 else b.alu("WHERE", b.dtype[acc], b.num_lanes[acc], guard, value, acc)

    def _add(self, red: ReduceNode, acc: list[int], guard: int, width: int) -> list[int]:
        """Combine the accumulators of one position with the values that the reduction reads there. `guard`: condition under which they
        count; -1: always."""
        b, stage = self.b, self.stage
        combiner = get_combiner(red.combiner)
        if self.in_order and guard >= 0 and red.dtypes[0].is_float:
            return [self._guarded(v, a, guard) for v, a in zip(self._add(red, acc, -1, width), acc, strict=True)]
        if red.combiner == "ADD" and guard < 0 and red.dtypes[0].is_float:
            node = stage.r.nodes[red.values[0]]
            if node.kind == "alu" and node.op == "MUL" and (not self.in_order or red.made_of in self._products):
                x, y = self.values.evaluate(stage, node.src[0]), self.values.evaluate(stage, node.src[1])
                return [b.alu("MULACC", red.dtypes[0], width, x, y, acc[0])]
        values = [self.values.evaluate(stage, v) for v in red.values]
        if guard >= 0:
            neutral = combiner.identity(*red.dtypes)
            values = [b.alu("WHERE", d, b.num_lanes[a], guard, v, b.const(d, b.num_lanes[a], n))
                      for d, a, v, n in zip(red.dtypes, acc, values, neutral, strict=True)]
        return list(combiner.combine(tuple(acc), tuple(values), self.alu, nan=red.dtypes[0].is_float))

    @cached_property
    def _products(self) -> frozenset[UOp]:
        """The reductions that sum products in the AST. If a stage is a product, its readers sum a value of it, wherever it is computed."""
        kernel, inlined, value = self.ctx.kernel, self.ctx.state.inlined, self.stage.r.stage.value
        products = [u for u in own_reduces(value) if u.src[0].op is Ops.MUL]
        return frozenset([expand_reads(u, lambda stage: kernel.stage_of[stage] in inlined) for u in products])

    def alu(self, op: Ops, *given: int | float) -> int:
        """Emit an elementwise operation for a combiner. It has as many lanes as the widest operand; a float becomes a constant."""
        b, args = self.b, list[int]()
        for a in given:
            args.append(b.const(b.dtype[args[-1]], 1, a) if isinstance(a, float) else a)
        width = max([b.num_lanes[a] for a in args])
        dtype = dtypes.bool if op in COMPARISONS else b.dtype[args[-1]]
        if op in TRANSCENDENTAL:
            return math.expand(b, op, dtype, width, *[b.splat(a, width) for a in args], rules=self.ctx.state.target.float_rules)
        return b.alu(op.value, dtype, width, *args)

    def epilogue(self, accs: list[int], sink: Sink, barrier: bool) -> None:
        """Combine the partial results of each position, within this thread and over the threads that share it, and give the stage's
        value to the sink. `barrier`: threads wait before they store partial results to shared memory."""
        stage, plan, accs = self.stage, self.plan, self._spread(accs)
        stage.memo.clear()
        if plan is not None and plan.dot.is_tile:
            (self._held_epilogue if plan.dot.fragments else self._tile_epilogue)(plan, accs, sink)
            return
        reduce_lane, group = stage.frame.vector_axis >= stage.frame.num_outs, self.ctx.group
        tile = stage.frame.out_positions()
        results: Iterable[list[int]] = (self._result(accs, t, *position) for t, position in enumerate(tile))
        components = [(k, c) for k, red in enumerate(stage.r.reductions) for c in range(len(red.values))]
        if group.threads_of(stage.index).reducers > 1:      # combine the accumulators of all positions in one go
            together = group.combine(stage.r, [v for values in results for v in values], self.alu, barrier)
            results = (together[at:at + len(components)] for at in range(0, len(together), len(components)))
        run, columns = self._run()
        found, frame, whole = list(results), stage.frame, stage.whole_vectors
        if run > 1:
            self._in_vectors(columns, run)
        elif reduce_lane:
            stage.frame = frame._replace(vector_axis=-1)
        for at in range(0, len(tile), run):
            (offsets, chunk), values = tile[at], found[at]
            if run > 1:
                chunk, values = Chunk(0, run, run), [self._beside(same) for same in zip(*found[at:at + run], strict=True)]
                stage.memo.clear()
            if stage.set_position(offsets, chunk):
                stage.results = dict(zip(components, values, strict=True))
                sink(stage)
        stage.frame, stage.whole_vectors = frame, whole

    def _in_vectors(self, columns: int, width: int) -> None:
        """Make each position of the stage a vector of `width` neighbouring results along local axis `columns`."""
        stage = self.stage
        stage.frame = stage.frame._replace(vector_axis=columns if width > 1 else -1, vector_stride=1)
        stage.whole_vectors = self.ctx.kernel.axes[stage.r.axes[columns]].extent % width == 0

    def _run(self) -> tuple[int, int]:
        """Return (count, axis) of the neighbouring positions whose results one thread holds in registers, in a stage with the layout of
        the opt HOLD; (1, -1) for other stages."""
        stage, state = self.stage, self.ctx.state
        fragment, chosen, last = held_layout(state, stage.index), state.dots[stage.index], stage.frame.num_outs - 1
        if stage.r.combines or fragment is None or chosen is None or (fragment.run.rows, fragment.run.columns) != (0, 1):
            return 1, -1
        return (fragment.run.extent, last) if stage.r.axes[last] == chosen.columns else (1, -1)

    def _beside(self, values: tuple[int, ...]) -> int:
        """Join the values of neighbouring positions in a vector; equal ones stay a scalar."""
        first, *others = values
        if all(v == first for v in others):
            return first
        for k, v in enumerate(others):
            first = self.b.pure("SHUFFLE", self.b.dtype[v], k + 2, (first, v), tuple(range(k + 2)))
        return first

    def _result(self, accs: list[int], t: int, offsets: dict[int, int], chunk: Chunk) -> list[int]:
        """Return this thread's partial result at position `t` of the tile: the components of all reductions."""
        stage, plan, partial = self.stage, self.plan, self.partial
        reduce_lane = stage.frame.vector_axis >= stage.frame.num_outs
        components = sum(len(red.values) for red in stage.r.reductions)
        at, first, found = t * len(partial) * components, 0, list[int]()
        if plan is not None and self.corrections:
            for index, (k, _) in partial.items():
                acc = accs[at + k]
                extra = accs[self.corrections[self._correction(plan, offsets, chunk, index)]]
                accs[at + k] = self.b.alu("SUB", self.b.dtype[acc], self.b.num_lanes[acc], acc, extra)
        for red in stage.r.reductions:
            n = len(red.values)
            parts = [accs[at + p * components + first:at + p * components + first + n] for p in range(len(partial))]
            found += self.ctx.group.over_columns(stage.r, self._combine_all(red, parts, reduce_lane), red.combiner, self.alu)
            first += n
        return found

    def _tile_epilogue(self, plan: TensorizePlan, accs: list[int], sink: Sink) -> None:
        """Store the rows of each tile. They pass through scratch memory, where the partial results of a position are added."""
        b, stage = self.b, self.stage
        rows, columns = self.intrinsics.tile_shape(stage, plan)
        dtype = plan.dot.accumulator
        count, words = len(self.partial), plan.dot.columns
        size = rows * words * dtype.itemsize
        areas = [self.ctx.scratch + i * (-(-size // 64) * 64) for i in range(count)]
        self.ctx.scratch = areas[-1] + -(-(size + SLACK) // 64) * 64
        pointers = [b.pure("SCRATCH", dtype, 1, (), a) for a in areas]
        for t, (offsets, chunk) in enumerate(stage.frame.out_positions()):
            for i, pointer in enumerate(pointers):
                b.store("TILESTORE", dtype, rows * columns, (pointer, b.index(0), accs[t * count + i]), (0, rows, words))
            for row in range(rows):
                if not stage.set_position({**offsets, plan.rows: offsets.get(plan.rows, 0) + row}, chunk):
                    continue
                total = -1
                for pointer in pointers:
                    part = b.load("LOAD", dtype, chunk.width, (pointer, b.index(0)), row * words, ordered=True)
                    total = part if total < 0 else b.alu("ADD", dtype, chunk.width, total, part)
                stage.results = {(0, 0): total}
                stage.memo.clear()
                sink(stage)

    def _held_epilogue(self, plan: TensorizePlan, accs: list[int], sink: Sink) -> None:
        """Store this thread's elements of each tile, after adding partial results. Neighbouring elements of a row are stored as a vector;
        or threads that share rows first exchange elements, and each stores a line of 16 bytes."""
        stage, count, lines = self.stage, len(self.partial), Lines(self.ctx)
        assert plan.dot.fragments is not None
        results = plan.dot.fragments[0]
        width = results.run.extent if (results.run.rows, results.run.columns) == (0, 1) else 1
        base, frame, whole, origin = stage.base, stage.frame, stage.whole_vectors, self.ctx.group.origin(results)
        positions, cells = stage.frame.out_positions(), list[Cell]()
        for t, (offsets, _) in enumerate(positions):
            total, = self._combine_all(stage.r.reductions[0], [[acc] for acc in accs[t * count:(t + 1) * count]], False)
            for k in range(0, results.num_elements, width):
                row, column = results.places[k]
                at = {**offsets, plan.rows: offsets.get(plan.rows, 0) + row, plan.columns: offsets.get(plan.columns, 0) + column}
                cells.append(Cell(at, self._part(total, k, width)))

        def open_tile(scale: int, width: int) -> None:
            """Move the stage's start to this thread's first element of the tile, and make each position a vector of `width` columns.
            `scale`: factor on the distance in columns between the threads of a row."""
            stage.base = list(base)
            for a, first, k in zip((plan.rows, plan.columns), origin, (1, scale), strict=True):
                stage.base[a] = add_lins(base[a], first, k)
            self._in_vectors(plan.columns, width)
            stage.linear.clear()
            stage.memo.clear()
        open_tile(1, width)
        quads = lines.quads(cells, plan.columns) if exchanges_results(self.ctx.state, stage.r, plan) else []
        if quads:
            found = [(quad[0].at, lines.exchanged([self._value_of(cell, width) for cell in quad])) for quad in quads]
            open_tile(QUAD.extent, LINE_OF_QUAD)
            for at, line in found:
                if stage.set_position(at, Chunk(0, LINE_OF_QUAD, LINE_OF_QUAD)):
                    stage.memo.clear()
                    self.values.put(stage, line)
                    sink(stage)
        else:
            for at, total in cells:
                if stage.set_position(at, Chunk(0, width, width)):
                    stage.results = {(0, 0): total}
                    stage.memo.clear()
                    sink(stage)
        stage.base, stage.frame, stage.whole_vectors = base, frame, whole
        stage.linear.clear()
        stage.memo.clear()

    def _part(self, total: int, first: int, width: int) -> int:
        """Extract neighbouring elements of a tile as a vector."""
        b = self.b
        if width == 1:
            return b.pure("EXTRACT", b.dtype[total], 1, (total,), first)
        return b.pure("SHUFFLE", b.dtype[total], width, (total,), tuple(range(first, first + width)))

    def _value_of(self, cell: Cell, width: int) -> int:
        """Compute the stage's value from the sums of a cell. Beyond the stage's end the value is arbitrary, and is not stored."""
        stage = self.stage
        stage.set_position(cell.at, Chunk(0, width, width))
        stage.results = {(0, 0): cell.total}
        stage.memo.clear()
        return self.values.result(stage)

    def _combine_all(self, red: ReduceNode, parts: list[list[int]], reduce_lane: bool) -> list[int]:
        """Combine partial results pairwise in a tree. `reduce_lane`: the lanes of a vector are partial results as well."""
        b = self.b
        combiner = get_combiner(red.combiner)
        nan = red.dtypes[0].is_float
        if len(parts) == 1 and b.num_lanes[parts[0][0]] == 1:
            return parts[0]
        by_width: dict[int, list[list[int]]] = {}
        for p in parts:
            by_width.setdefault(b.num_lanes[p[0]], []).append(p)
        scalars: list[list[int]] = []
        for width, group in by_width.items():
            while len(group) > 1:
                if self.in_order and len(group) % 2 == 0:      # halves, as of the lanes below: vectors of any length add alike
                    half = len(group) // 2
                    pairs = list(zip(group[:half], group[half:], strict=True))
                else:
                    pairs = list(zip_longest(group[::2], group[1::2]))
                group = [a if c is None else list(combiner.combine(tuple(a), tuple(c), self.alu, nan=nan)) for a, c in pairs]
            value = group[0]
            if reduce_lane:
                w = width
                while w > 2:
                    half = w // 2
                    low = [b.pure("SHUFFLE", b.dtype[v], half, (v, v), tuple(range(half))) for v in value]
                    high = [b.pure("SHUFFLE", b.dtype[v], half, (v, v), tuple(range(half, w))) for v in value]
                    value = list(combiner.combine(tuple(low), tuple(high), self.alu, nan=nan))
                    w = half
                if w == 2:
                    low = [b.pure("EXTRACT", b.dtype[v], 1, (v,), 0) for v in value]
                    high = [b.pure("EXTRACT", b.dtype[v], 1, (v,), 1) for v in value]
                    value = list(combiner.combine(tuple(low), tuple(high), self.alu, nan=nan))
            scalars.append(value)
        while len(scalars) > 1:
            a, c = scalars.pop(), scalars.pop()
            scalars.append(list(combiner.combine(tuple(c), tuple(a), self.alu, nan=nan)))
        return scalars[0]
