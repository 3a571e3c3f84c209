"""Copies into shared memory that run ahead of the loop that reads them (PIPELINE).

    fill p[0];  COMMIT;  for i: WAIT 0;  BARRIER;  start to fill p[(i + 1) % 2] for i + 1;  COMMIT;  … p[i % 2] …

One barrier an iteration: behind it, what was copied for this iteration is there, and nobody reads the buffer that is filled next. Where
copies are not asynchronous they are loaded before the iteration computes and stored behind it. Copies beyond the last iteration take its
data once more: they are not read. Where the iteration is one piece of code with matrix instructions of a subgroup, asynchronous copies
begin between those, and the next iteration's first operands are loaded before its last products (early.py).

Products that read shared memory by themselves go on while later instructions run. From four buffers on, those of one iteration are
waited for behind the next one's, and copies run one iteration less ahead:

    for i: WAIT 1;  BARRIER;  start to fill p[(i + 2) % 4] for i + 2;  COMMIT;  MMASHARED of p[i % 4];  MMAWAIT 1;  and MMAWAIT 0 behind

Where the target has bulk copies, and all rows of a stage are long enough, lie inside an argument and begin at multiples of 16 bytes on both
sides, each copy is of a whole row. What has arrived is counted in shared memory, a count for each buffer of the loop:

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
_BATCHES = 2        # batches of copies that begin between matrix instructions


class Counts(NamedTuple):
    """What counts the rows that arrive. `parts`: rows of all stages, into one buffer of each."""

    pointer: int
    stages: frozenset[int]
    parts: int


class Buffers(NamedTuple):
    """The buffers of a copy under the loops that are open."""

    extents: list[int]              # of the region that each holds
    base: list[Lin]                 # where it starts
    layout: Layout
    offset: int                     # of the first buffer, bytes
    elements: int                   # from one buffer to the next


class CopiesAhead:
    """Emits a loop whose copies run ahead."""

    def __init__(self, ctx: PhaseContext, addresses: Addresses, values: Values, copies: GroupCopies, packing: Packing):
        self.ctx, self.b, self.facts = ctx, ctx.b, ctx.facts
        self.addresses, self.values, self.copies, self.packing = addresses, values, copies, packing
        self.is_async, self.least_row = ctx.state.target.has_async_copies, ctx.state.target.bulk_row
        self.counts: Counts | None = None       # of the loop that is open
        self.deferred: list[int] = []           # stores that follow what is computed meanwhile

    def run(self, stage: OpenStage, node: Loop, bounds: tuple[int, int], accs: list[int],
            inside: Callable[[list[int]], list[int]]) -> list[int]:
        """Iterations around `inside`, which takes accumulators and gives the next ones: those of the loop between `bounds`, maybe none."""
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
            following_accs = load_early(b, index, start, stride, following_accs)
        out = b.close(index, tuple(following_accs))[:sums]
        out = self._wait_products(out, 0) if late else out
        stage.memo.clear()
        self._async("WAIT", 0)
        self._end_bulk(self._iterations(start, b.alu("MAX", INDEX, 1, start, stop), stride), count, ahead)
        return out

    def _take_begun(self, first: int) -> list[int]:
        """Take what begins copies, and what commits them, out of the innermost loop's code from an instruction on, where each copy is one
        instruction of it, and none has a loop of turns."""
        b, code = self.b, self.b.code[self.b.level]
        begun = [n for n in code[first:] if b.op[n] in _BEGIN]
        if any(b.op[n] == "LOOP" for n in code[first:]) or any(b.op[c] != "CONST" for n in begun for c in b.src[n][4:]):
            return []
        code[first:] = [n for n in code[first:] if b.op[n] not in _BEGIN]
        return begun

    def _put_begun(self, begun: list[int], first: int) -> None:
        """Put what begins copies among the innermost loop's code from an instruction on. Between matrix instructions of a subgroup it comes
        in `_BATCHES` parts, in the first half, each behind the loads of operands before: all at once and first, they would keep shared
        memory from those loads, and one by one each makes ptxas 13.0 put three reads before it."""
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
        """The accumulators, when products of so many iterations are under way at most."""
        b = self.b
        return [b.load("MMAWAIT", b.dtype[v], b.num_lanes[v], (v,), left, ordered=True) for v in accs]

    def _open_iteration(self, stage: OpenStage, a: int, start: int) -> None:
        """Open the row of the loop at a value that no region takes for a number: buffers hold what they hold in the loop."""
        stage.open_row(a, ({start: 1}, 0))

    def _iterations(self, start: int, at: int, stride: int) -> int:
        """How many iterations there are from one position to another."""
        b = self.b
        return b.alu("IDIV", INDEX, 1, at if b.known(start) == 0 else b.alu("SUB", INDEX, 1, at, start), b.index(stride))

    def _begin_bulk(self, stage: OpenStage, loop: StageLoop, copies: tuple[Compute, ...], stride: int, count: int) -> Counts | None:
        """Make the counts of a loop whose iterations are `stride` apart; None: nothing is copied in bulk."""
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
        """Wait until all rows of iteration `number` are there."""
        if self.counts is not None:
            b = self.b
            of, turn = (b.alu(op, INDEX, 1, number, b.index(count)) for op in ("MOD", "IDIV"))
            b.store("BULK_WAIT", dtypes.void, 1, (self.counts.pointer, of, b.alu("MOD", INDEX, 1, turn, b.index(2))), None)

    def _end_bulk(self, iterations: int, count: int, ahead: int) -> None:
        """Wait for the copies that were begun past the last iteration, then give the counts back."""
        if self.counts is not None:
            for k in range(ahead):
                self._wait_bulk(self.b.add(iterations, self.b.index(k)), count)
            self.ctx.group.shared.barrier()
            self.b.store("BULK_END", dtypes.void, 1, (self.counts.pointer,), count)
            self.counts = None

    def _bulk_rows(self, node: Compute) -> int:
        """How many rows fill a buffer of a copy, under the loops that are open; 0 where it is not copied in bulk."""
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
        """Fill buffer `number`, an index value. `level`: of the loop behind whose body stores are deferred, or -1."""
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
        """Store the current position into the buffer that begins `moved` elements further."""
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
        """Let readers take buffer `number`, under the loops that are open."""
        b, s, buffers = self.b, node.stage, self._buffers(node)
        self.ctx.versions += 1
        pointer = self.ctx.group.shared.pointer(self.facts.stored(s), buffers.offset)
        self.ctx.staged[s] = Staged(-1, pointer, buffers.layout, tuple(buffers.base), b.level, self.ctx.versions, node.is_read_beyond,
                                    b.mul(number, buffers.elements))
        self.ctx.forget_values()
