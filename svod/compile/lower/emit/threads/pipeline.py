"""Emits loops whose copies into shared memory start some iterations before they are read (PIPELINE). The loop tree has the steps and their
order (`svod.core.tree.ahead`, `between`, `early`, `barriers`).

    fill p[0];  COMMIT;  for i: WAIT 0;  BARRIER;  start to fill p[(i + 1) % 2] for i + 1;  COMMIT;  … p[i % 2] …

Instructions that read both operands from shared memory run asynchronously:

    for i: WAIT 1;  BARRIER;  start to fill p[(i + 2) % 4] for i + 2;  COMMIT;  MMASHARED of p[i % 4];  MMAWAIT 1;  and MMAWAIT 0 behind

For bulk copies, shared memory has one counter per buffer for the rows that have arrived:

    BULK_BEGIN; BARRIER; COPY_BULK to p[0]; for i: BULK_WAIT; BARRIER; COPY_BULK to p[(i + 1) % 2]; … p[i % 2] …; BULK_WAIT; BULK_END
"""
from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import NamedTuple

from svod.compile.lower.emit.intrinsics import Intrinsics
from svod.compile.lower.emit.state import OpenStage
from svod.compile.lower.emit.threads.copies import GroupCopies
from svod.compile.lower.linear import STORE_OPS
from svod.compile.lower.program import Instruction
from svod.core.ir.dtype import dtypes
from svod.core.kernel.layout import Layout, area_bytes, area_start
from svod.core.kernel.required import Lin
from svod.core.tree.nodes import AheadCopy, Barrier, Begin, Compute, Counters, Fetch, Load, Loop, Step, Wait

INDEX = dtypes.index
COUNT_BYTES = 8
_BEGIN = frozenset({"COPY_ASYNC", "COMMIT"})


class Buffers(NamedTuple):
    """The buffers of a copy, addressed inside the loops that are open."""

    base: list[Lin]                 # start of the region that each buffer holds
    layout: Layout
    offset: int                     # bytes before the first buffer
    elements: int                   # elements from the start of one buffer to the start of the next


class PipelinedLoop:
    """A loop whose copies run ahead, while its code is emitted. `bounds`: index values of its start and its end, which may be equal."""

    def __init__(self, intrinsics: Intrinsics, stage: OpenStage, node: Loop, bounds: tuple[int, int]):
        assert node.pipeline is not None
        self.ctx, self.b, self.facts, self.axes = intrinsics.ctx, intrinsics.b, intrinsics.facts, intrinsics.axes
        self.intrinsics, self.stage, self.node, self.pipeline = intrinsics, stage, node, node.pipeline
        self.copies = GroupCopies(self.ctx, self.axes)
        self.start, self.stop = bounds
        self.last = self.b.index((node.whole - 1) * node.stride)
        self.is_async = self.ctx.state.target.has_async_copies
        self.counts = -1                        # pointer to the counters of rows that have arrived; -1: there are none
        # -- the current position in the loop
        self.index = -1                         # the loop's index; -1: before the loop
        self.is_over = False                    # whether the loop is closed
        self.kept: list[Instruction] = []       # instructions of prepared copies that are not written yet
        self.products = 0                       # products of this iteration that were emitted so far
        self.left = list(self.pipeline.between)     # steps between products that were not emitted in this iteration yet
        # -- values known at that position
        self.loaded: dict[tuple[int, ...], list[int]] = {}      # offsets of a product → its operands, loaded before it
        self.following: dict[tuple[int, ...], list[int]] = {}   # offsets of a product of the next iteration → its operands

    def run(self, accs: list[int], inside: Callable[[list[int]], list[int]]) -> list[int]:
        """Emit the loop; returns the accumulators. `inside` emits one iteration: it takes accumulators and returns the new ones."""
        b, found, sums = self.b, self.pipeline, len(accs)
        self._take(found.prologue)
        first = self.following
        values = list(dict.fromkeys([v for of in first.values() for v in of]))
        self.index, carried = b.open(self.start, self.stop, self.node.stride, (*accs, *values))
        given = dict(zip(values, carried[sums:], strict=True))
        self.loaded = {at: [given[v] for v in of] for at, of in first.items()}
        self._take(found.body)
        outer, self.intrinsics.before_product = self.intrinsics.before_product, self._before_product
        following = inside(carried[:sums])
        self.intrinsics.before_product = outer
        self._take([step for _, step in self.left])
        self.stage.close_row(self.node.axis)
        self._write([i for i in self.kept if i.op not in _BEGIN])
        if found.under_way:
            following = self._wait_products(following, found.under_way)
        later = {given[v]: n for at, of in first.items() for v, n in zip(of, self.following[at], strict=True)}
        out = b.close(self.index, (*following, *[later[v] for v in carried[sums:]]))[:sums]
        out = self._wait_products(out, 0) if found.under_way else out
        self.stage.memo.clear()
        self.is_over = True
        self._take(found.epilogue)
        return out

    # -- steps ---------------------------------------------------------------------------------------------
    def _before_product(self, stage: OpenStage) -> list[int] | None:
        """Emit the steps of the loop that precede its next product, which belongs to `stage`. Returns the product's operands if an
        earlier step loaded them, otherwise None."""
        while self.left and self.left[0][0] <= self.products:
            self._take([self.left.pop(0)[1]])
        self.products += 1
        return self.loaded.get(tuple(stage.offsets))

    def _take(self, steps: Iterable[Step]) -> None:
        """Emit steps of the loop, in order."""
        for step in steps:
            if isinstance(step, Fetch):
                self._fetch(step)
            elif isinstance(step, Begin):
                begun = [i for i in self.kept if i.op in _BEGIN]
                size = -(-len(begun) // step.parts)
                self._write(begun[step.part * size:(step.part + 1) * size])
            elif isinstance(step, Wait):
                self._wait(step.left)
            elif isinstance(step, Barrier):
                self.ctx.group.shared.barrier()
            elif isinstance(step, Counters):
                self._count(step)
            else:
                self._load(step)

    def _fetch(self, step: Fetch) -> None:
        """Prepare the copies for a later iteration; then make readers load from the current iteration's buffers again."""
        b, in_prologue = self.b, self.index < 0
        self._open(step.ahead)
        buffer = self._buffer(step.ahead)
        for copy in self.pipeline.copies:
            b.kept_ops = (frozenset() if in_prologue or copy.turns.is_loop else STORE_OPS) | (frozenset() if step.begins else _BEGIN)
            self._fill(copy, buffer, step.barrier and copy is self.pipeline.copies[0])
        self._async("COMMIT")
        self.kept, b.kept, b.kept_ops = b.kept, [], frozenset()
        self.stage.close_row(self.node.axis)
        if not in_prologue:
            self.stage.open_row(self.node.axis, ({self.index: 1}, 0))
            self._read(0)

    def _write(self, kept: Iterable[Instruction]) -> None:
        """Write instructions of copies that were prepared earlier."""
        for op, dtype, lanes, src, arg in kept:
            self.b.store(op, dtype, lanes, src, arg)

    def _wait(self, left: int) -> None:
        """Wait until the current iteration's data has arrived; behind the loop, wait for the copies that no iteration reads. `left`: number
        of groups of copies that may be unfinished."""
        self._async("WAIT", left)
        if self.is_over:
            self._wait_past()
            return
        number = self._number()
        if self.counts >= 0:
            self._wait_bulk(number)

    def _load(self, step: Load) -> None:
        """Load operands of products: of the current iteration, or of the next one, for which the loop carries them."""
        in_prologue = self.index < 0
        if in_prologue:
            self._open(0)
        if step.ahead or in_prologue:
            self._read(step.ahead)
            self.following = self.intrinsics.load(self.stage, step.products)
        else:
            self.loaded |= self.intrinsics.load(self.stage, step.products)
        if in_prologue:
            self.stage.close_row(self.node.axis)

    def _open(self, ahead: int) -> None:
        """Open the loop's row at the index of an iteration `ahead` later, or of the last one if there is none. The index is an
        instruction even if it is constant, so that buffers get the same regions as inside the loop."""
        b, at = self.b, self.start if self.index < 0 else self.index
        later = b.alu("MIN", INDEX, 1, b.add(at, b.index(ahead * self.node.stride)), self.last)
        self.stage.open_row(self.node.axis, ({later: 1}, 0))

    # -- iterations ----------------------------------------------------------------------------------------
    def _iterations(self, at: int) -> int:
        """Emit the number of iterations from the first position of the loop to position `at`."""
        b = self.b
        apart = at if b.known(self.start) == 0 else b.alu("SUB", INDEX, 1, at, self.start)
        return b.alu("IDIV", INDEX, 1, apart, b.index(self.node.stride))

    def _number(self) -> int:
        """Emit the number of the current iteration; 0 before the loop."""
        return self.b.index(0) if self.index < 0 else self._iterations(self.index)

    def _buffer(self, ahead: int) -> int:
        """Emit the number of the buffer that the iteration `ahead` later reads."""
        b = self.b
        if self.index < 0:
            return b.index(ahead)
        return b.alu("MOD", INDEX, 1, b.add(self._number(), b.index(ahead)), b.index(self.pipeline.buffers))

    def _wait_products(self, accs: list[int], left: int) -> list[int]:
        """Wait until the products of at most `left` iterations are unfinished; returns the accumulators."""
        b = self.b
        return [b.load("MMAWAIT", b.dtype[v], b.num_lanes[v], (v,), left, ordered=True) for v in accs]

    def _async(self, op: str, arg: int | None = None) -> None:
        if self.is_async:
            self.b.store(op, dtypes.void, 1, (), arg)

    # -- bulk copies ---------------------------------------------------------------------------------------
    def _count(self, step: Counters) -> None:
        """Set up the counters of rows, or release them."""
        b, shared, buffers = self.b, self.ctx.group.shared, self.pipeline.buffers
        if step.ends:
            b.store("BULK_END", dtypes.void, 1, (self.counts,), buffers)
            return
        offset = shared.area(("counts", self.stage.index, self.node.loop.point), COUNT_BYTES * buffers)
        self.counts = shared.pointer(dtypes.int64, offset)
        rows = sum([copy.turns.parts for copy in self.pipeline.copies if copy.is_bulk])
        b.store("BULK_BEGIN", dtypes.void, 1, (self.counts,), (buffers, rows))

    def _wait_bulk(self, number: int) -> None:
        """Wait until all rows of iteration `number` have arrived."""
        b, count = self.b, self.pipeline.buffers
        of, turn = (b.alu(op, INDEX, 1, number, b.index(count)) for op in ("MOD", "IDIV"))
        b.store("BULK_WAIT", dtypes.void, 1, (self.counts, of, b.alu("MOD", INDEX, 1, turn, b.index(2))), None)

    def _wait_past(self) -> None:
        """Wait for the rows of the copies that were started past the last iteration."""
        if self.counts >= 0:
            iterations = self._iterations(self.b.alu("MAX", INDEX, 1, self.start, self.stop))
            for k in range(self.pipeline.ahead):
                self._wait_bulk(self.b.add(iterations, self.b.index(k)))

    # -- buffers -------------------------------------------------------------------------------------------
    def _buffers(self, node: Compute) -> Buffers:
        s, nest = node.stage, node.nest
        base, layout = [self.axes.placed_at(start) for start, _ in nest.written], node.layout
        assert layout is not None
        size = area_bytes(layout, self.facts.area(s, layout))
        offset = self.ctx.group.shared.area(s, size * nest.buffers, area_start(layout))
        return Buffers(base, layout, offset, size // self.facts.stored(s).itemsize)

    def _fill(self, ahead: AheadCopy, number: int, barrier: bool) -> None:
        """Emit a copy into buffer `number`, an index value. `barrier`: all threads wait before it."""
        node, turns, values = ahead.compute, ahead.turns, self.intrinsics.values
        s, buffers, shared = node.stage, self._buffers(node), self.ctx.group.shared
        assert node.body is not None
        if barrier:
            shared.barrier()
        pointer = shared.pointer(self.facts.stored(s), buffers.offset)
        stage = self.copies.open(node.body, turns, buffers.base)
        self.ctx.open_stages[s] = stage
        moved = self.b.mul(number, buffers.elements)

        def store(one: OpenStage) -> None:
            at = self.intrinsics.addresses.in_layout(one, pointer, buffers.layout, buffers.base)
            at = at._replace(start=self.b.add(at.start, moved))
            if ahead.is_bulk:
                values.copy_bulk(one, pointer, at.start, at.const, self.counts, number)
            elif ahead.is_async:
                values.copy_async(one, pointer, at.start, at.const)
            else:
                packed, width = self.facts.packed.get(s), one.chunk.width if one.frame.vector_axis >= 0 else 1
                value = values.result(one) if packed is None else self.intrinsics.packing.packed_value(one, packed, width)
                values.store(one, value, pointer, at, False)
        self.copies.emit(stage, turns, store)
        del self.ctx.open_stages[s]
        self.ctx.forget_values()

    def _read(self, ahead: int) -> None:
        """Make readers load from the buffers of the iteration `ahead` later, addressed inside the loops that are open."""
        b = self.b
        for copy in self.pipeline.copies:
            node = copy.compute
            number, s, buffers = self._buffer(ahead), node.stage, self._buffers(node)
            pointer = self.ctx.group.shared.pointer(self.facts.stored(s), buffers.offset)
            self.ctx.keep(s, pointer, buffers.layout, buffers.base, node.is_read_beyond, b.mul(number, buffers.elements))
            self.ctx.forget_values()
