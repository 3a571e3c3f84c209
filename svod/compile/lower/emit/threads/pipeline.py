"""Emits loops whose copies into shared memory start iterations before they are read (PIPELINE).

    fill p[0];  COMMIT;  for i: WAIT 0;  BARRIER;  start to fill p[(i + 1) % 2] for i + 1;  COMMIT;  … p[i % 2] …

There is one barrier per iteration: after it the data of this iteration is in place, and no thread reads the buffer that is filled next.
Copies that are not asynchronous load before the iteration computes, and store after it. Copies for iterations past the last one repeat its
data, which is never read. If the iteration is straight-line code with matrix instructions of a subgroup, asynchronous copies start between
these instructions, and the next iteration's first operands are loaded before its last products (early.py).

Instructions that read both operands from shared memory run asynchronously. With four buffers or more, the products of one iteration are
waited for only after the next iteration has issued its own, and copies start one iteration later:

    for i: WAIT 1;  BARRIER;  start to fill p[(i + 2) % 4] for i + 2;  COMMIT;  MMASHARED of p[i % 4];  MMAWAIT 1;  and MMAWAIT 0 behind

If the target has bulk copies, each copy moves a whole row, provided that all rows of the stage are long enough, lie inside an argument, and
begin at multiples of 16 bytes on both sides. Shared memory has one counter per buffer for the rows that have arrived:

    BULK_BEGIN; BARRIER; COPY_BULK to p[0]; for i: BULK_WAIT; BARRIER; COPY_BULK to p[(i + 1) % 2]; … p[i % 2] …; BULK_WAIT; BULK_END
"""
from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from svod.compile.lower.emit.addresses import Addresses
from svod.compile.lower.emit.context import PhaseContext
from svod.compile.lower.emit.packing import Packing
from svod.compile.lower.emit.state import OpenStage, Staged
from svod.compile.lower.emit.threads.copies import GroupCopies
from svod.compile.lower.emit.threads.early import load_early
from svod.compile.lower.emit.values import Values
from svod.compile.lower.linear import STORE_OPS
from svod.core.ir.dtype import dtypes
from svod.core.kernel.group_memory.copy import rows_in_bulk
from svod.core.kernel.intrinsics import stored_node
from svod.core.kernel.layout import Layout, area_bytes, area_start
from svod.core.kernel.loop_nest import copied_ahead, products_under_way
from svod.core.kernel.required import Lin
from svod.core.tree.inside import readable
from svod.core.tree.nodes import Compute, Loop, StageLoop

INDEX = dtypes.index
COUNT_BYTES = 8
_BEGIN = frozenset({"COPY_ASYNC", "COMMIT"})
_BATCHES = 2        # number of groups in which copies are started between matrix instructions


class Counts(NamedTuple):
    """The counters of rows that arrive by bulk copies. `pointer`: their memory; `parts`: rows that one iteration copies, of all
    `stages`."""

    pointer: int
    stages: frozenset[int]
    parts: int


class Buffers(NamedTuple):
    """The buffers of a copy, under the loops that are open."""

    extents: list[int]              # of the region that each buffer holds
    base: list[Lin]                 # start of the region
    layout: Layout
    offset: int                     # of the first buffer, in bytes
    elements: int                   # from one buffer to the next


class CopiesAhead:
    """Emits loops whose copies run ahead."""

    def __init__(self, ctx: PhaseContext, addresses: Addresses, values: Values, copies: GroupCopies, packing: Packing):
        self.ctx, self.b, self.facts = ctx, ctx.b, ctx.facts
        self.addresses, self.values, self.copies, self.packing = addresses, values, copies, packing
        self.is_async, self.least_row = ctx.state.target.has_async_copies, ctx.state.target.bulk_row
        self.counts: Counts | None = None       # counters of the loop that is being emitted
        # stores of copies that are not asynchronous, to be emitted after the iteration's computation
        self.deferred: list[int] = []

    def run(self, stage: OpenStage, node: Loop, bounds: tuple[int, int], accs: list[int],
            inside: Callable[[list[int]], list[int]]) -> list[int]:
        """Emit a pipelined loop from `bounds[0]` to `bounds[1]`, which may be empty; returns the accumulators. `inside` emits one
        iteration: it takes accumulators and returns the new ones."""
        b, a, stride, (start, stop) = self.b, node.axis, node.stride, bounds
        copies = node.ahead
        count, last = node.ahead[0].nest.buffers, b.index((node.whole - 1) * stride)
        late, ahead = products_under_way(self.ctx.state, self.facts.nest), copied_ahead(self.ctx.state, self.facts.nest)
        self.counts = self._begin_bulk(stage, node.loop, copies, stride, count)
        for k in range(ahead):
            self._open_iteration(stage, a, b.alu("MIN", INDEX, 1, b.add(start, b.index(k * stride)), last))
            for copy in copies:
                self._fill(copy, b.index(k), first=k == 0)
            stage.close_row(a)
            self._async("COMMIT")
        index, carried = b.open(start, stop, stride, tuple(accs))
        self._async("WAIT", ahead - 1)
        number = self._iterations(start, index, stride)
        self._wait_bulk(number, count)
        self.ctx.group.shared.barrier()
        later = b.alu("MIN", INDEX, 1, b.add(index, b.index(ahead * stride)), last)
        following = b.alu("MOD", INDEX, 1, b.add(number, b.index(ahead)), b.index(count))
        stage.open_row(a, ({later: 1}, 0))
        first = len(b.code[b.level])
        for copy in copies:
            self._fill(copy, following, level=b.level)
        stage.close_row(a)
        self._async("COMMIT")
        begun = self._take_begun(first)
        deferred, self.deferred = self.deferred, []
        stage.open_row(a, ({index: 1}, 0))
        for copy in copies:
            self._read(copy, b.alu("MOD", INDEX, 1, number, b.index(count)))
        first = len(b.code[b.level])
        following_accs = inside(carried)
        stage.close_row(a)
        self._put_begun(begun, first)
        b.code[b.level] += deferred
        if late:
            following_accs = self._wait_products(following_accs, late)
        sums = len(following_accs)
        if self.is_async and self.counts is None:
            following_accs = load_early(b, index, start, stride, following_accs, {self._buffers(copy).offset for copy in copies})
        out = b.close(index, tuple(following_accs))[:sums]
        out = self._wait_products(out, 0) if late else out
        stage.memo.clear()
        self._async("WAIT", 0)
        self._end_bulk(self._iterations(start, b.alu("MAX", INDEX, 1, start, stop), stride), count, ahead)
        return out

    def _take_begun(self, first: int) -> list[int]:
        """Remove the instructions that start and commit copies from the innermost loop's code, beginning at index `first`; returns them.
        Removes none if a copy loops over turns, or is guarded."""
        b, code = self.b, self.b.code[self.b.level]
        begun = [n for n in code[first:] if b.op[n] in _BEGIN]
        if any(b.op[n] == "LOOP" for n in code[first:]) or any(b.op[c] != "CONST" for n in begun for c in b.src[n][4:]):
            return []
        code[first:] = [n for n in code[first:] if b.op[n] not in _BEGIN]
        return begun

    def _put_begun(self, begun: list[int], first: int) -> None:
        """Insert the instructions that start copies into the innermost loop's code, beginning at index `first`. If it has matrix
        instructions of a subgroup, the copies go between them in `_BATCHES` groups, in the first half, each after the operand loads before
        it. All copies at once would delay these loads; single copies make ptxas 13.0 put three reads before each."""
        code = self.b.code[self.b.level]
        ops = [self.b.op[n] for n in code[first:]]
        products = [first + k for k, op in enumerate(ops) if op == "MMA"] if "LOOP" not in ops else []
        size = -(-len(begun) // _BATCHES)
        for number in reversed(range(_BATCHES)):
            at = first
            if products:
                limit = products[(number + 1) * len(products) // (2 * _BATCHES)]
                loaded = max([first, *[first + k for k, op in enumerate(ops) if op == "LOADMATRIX" and first + k < limit]])
                at = min(next(k for k in products if k > loaded), products[max(0, len(products) // 2 - 1)]) + 1
            code[at:at] = begun[number * size:(number + 1) * size]

    def _wait_products(self, accs: list[int], left: int) -> list[int]:
        """Wait until the products of at most `left` iterations are still running; returns the accumulators."""
        b = self.b
        return [b.load("MMAWAIT", b.dtype[v], b.num_lanes[v], (v,), left, ordered=True) for v in accs]

    def _open_iteration(self, stage: OpenStage, a: int, start: int) -> None:
        """Open the row of the loop at an index value, even if it is constant, so that buffers get the same regions as inside the loop."""
        stage.open_row(a, ({start: 1}, 0))

    def _iterations(self, start: int, at: int, stride: int) -> int:
        """The number of iterations from position `start` to position `at`."""
        b = self.b
        return b.alu("IDIV", INDEX, 1, at if b.known(start) == 0 else b.alu("SUB", INDEX, 1, at, start), b.index(stride))

    def _begin_bulk(self, stage: OpenStage, loop: StageLoop, copies: tuple[Compute, ...], stride: int, count: int) -> Counts | None:
        """Set up the counters of rows for a loop with `count` buffers; None if nothing is copied in bulk. `stride`: positions from one
        iteration to the next."""
        rows: dict[int, int] = {}
        for node in copies if self.least_row else ():
            found = []
            for first in (0, stride):
                self._open_iteration(stage, loop.axis, self.b.index(first))
                found.append(self._bulk_rows(node))
                stage.close_row(loop.axis)
            if all(found):
                rows[node.stage] = found[0]
        if not rows:
            return None
        shared = self.ctx.group.shared
        offset = shared.area(("counts", stage.index, loop.point), COUNT_BYTES * count)
        counts = Counts(shared.pointer(dtypes.int64, offset), frozenset(rows), sum(rows.values()))
        self.b.store("BULK_BEGIN", dtypes.void, 1, (counts.pointer,), (count, counts.parts))
        shared.barrier()
        return counts

    def _wait_bulk(self, number: int, count: int) -> None:
        """Wait until all rows of iteration `number` have arrived."""
        if self.counts is not None:
            b = self.b
            of, turn = (b.alu(op, INDEX, 1, number, b.index(count)) for op in ("MOD", "IDIV"))
            b.store("BULK_WAIT", dtypes.void, 1, (self.counts.pointer, of, b.alu("MOD", INDEX, 1, turn, b.index(2))), None)

    def _end_bulk(self, iterations: int, count: int, ahead: int) -> None:
        """Wait for the copies that were started past the last iteration, then release the counters."""
        if self.counts is not None:
            for k in range(ahead):
                self._wait_bulk(self.b.add(iterations, self.b.index(k)), count)
            self.ctx.group.shared.barrier()
            self.b.store("BULK_END", dtypes.void, 1, (self.counts.pointer,), count)
            self.counts = None

    def _bulk_rows(self, node: Compute) -> int:
        """How many rows fill one buffer of a copy, under the loops that are open; 0 if it cannot be copied in bulk."""
        s, r, copy, (extents, base, layout, _, _) = node.stage, node.nest.r, node.nest.copy, self._buffers(node)
        assert copy is not None
        packed = self.facts.packed.get(s)
        stored = r.nodes[r.value if packed is None else stored_node(r, packed)]
        beyond = any(extent > readable(self.facts.maker, s, d) for d, extent in enumerate(extents))
        if beyond or copy.vector < 0 or any(a in self.facts.unsafe for a in r.axes):
            return 0
        terms, first = base[copy.vector]
        start = [first, *(c * self.b.multiple_of(v) for v, c in terms.items())]
        return rows_in_bulk(stored, copy, layout, extents, start, self.least_row)

    def _async(self, op: str, arg: int | None = None) -> None:
        if self.is_async:
            self.b.store(op, dtypes.void, 1, (), arg)

    def _buffers(self, node: Compute) -> Buffers:
        s, nest = node.stage, node.nest
        extents, base = [extent for _, extent in nest.written], [self.addresses.axes.placed_at(start) for start, _ in nest.written]
        layout = node.layout
        assert layout is not None
        size = area_bytes(layout, self.facts.area(s, layout))
        offset = self.ctx.group.shared.area(s, size * nest.buffers, area_start(layout))
        return Buffers(extents, base, layout, offset, size // self.facts.stored(s).itemsize)

    def _fill(self, node: Compute, number: int, first: bool = False, level: int = -1) -> None:
        """Emit the copy into buffer `number`, an index value. `first`: it is the first copy of the loop. `level`: the loop level at which
        stores are deferred to the end of the body, or -1."""
        s, r, copy, buffers, shared = node.stage, node.nest.r, node.nest.copy, self._buffers(node), self.ctx.group.shared
        assert copy is not None
        if first:
            shared.before_writing((buffers.offset,))
            shared.touched.add(buffers.offset)
        pointer = shared.pointer(self.facts.stored(s), buffers.offset)
        counts = self.counts if self.counts is not None and s in self.counts.stages else None
        stage = self.copies.open(r, buffers.extents, buffers.base, counts is not None)
        self.ctx.open_stages[s] = stage
        moved = self.b.mul(number, buffers.elements)

        def store(one: OpenStage) -> None:
            if counts is None:
                self._store(one, pointer, moved, buffers, level)
                return
            at = self.addresses.in_layout(one, pointer, buffers.layout, buffers.base)
            self.values.copy_bulk(one, pointer, self.b.add(at.start, moved), at.const, counts.pointer, number)
        self.copies.emit(stage, copy, store)
        del self.ctx.open_stages[s]
        self.ctx.forget_values()

    def _store(self, stage: OpenStage, pointer: int, moved: int, buffers: Buffers, level: int) -> None:
        """Store the current position into the buffer that begins `moved` elements after the first one."""
        b = self.b
        at = self.addresses.in_layout(stage, pointer, buffers.layout, buffers.base)
        at = at._replace(start=b.add(at.start, moved))
        width = stage.chunk.width if stage.vector_axis >= 0 else 1
        if self.is_async and (at.lane == 1 or width == 1) and self.values.copy_async(stage, pointer, at.start, at.const):
            return
        packed = self.facts.packed.get(stage.index)
        value = self.values.result(stage) if packed is None else self.packing.packed_value(stage, packed, width)
        before = len(b.code[b.level])
        self.values.store(stage, value, pointer, at, False)
        if b.level == level:
            code = b.code[level]
            self.deferred += [n for n in code[before:] if b.op[n] in STORE_OPS]
            code[before:] = [n for n in code[before:] if b.op[n] not in STORE_OPS]

    def _read(self, node: Compute, number: int) -> None:
        """Make buffer `number` the one that readers load from, under the loops that are open."""
        b, s, buffers = self.b, node.stage, self._buffers(node)
        self.ctx.versions += 1
        pointer = self.ctx.group.shared.pointer(self.facts.stored(s), buffers.offset)
        self.ctx.staged[s] = Staged(-1, pointer, buffers.layout, tuple(buffers.base), b.level, self.ctx.versions, node.is_read_beyond,
                                    b.mul(number, buffers.elements))
        self.ctx.forget_values()
