"""Copies into shared memory that run ahead of the loop that reads them (PIPELINE).

    fill p[0];  COMMIT;  for i: WAIT 0;  BARRIER;  start to fill p[(i + 1) % 2] for i + 1;  COMMIT;  … p[i % 2] …

One barrier an iteration: behind it, what was copied for this iteration is there, and nobody reads the buffer that is filled next. Where
copies are not asynchronous they are loaded before the iteration computes and stored behind it. Copies beyond the last iteration take its
data once more: they are not read."""
from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from svod.compile.lower.emit.addresses import Addresses
from svod.compile.lower.emit.context import PhaseContext
from svod.compile.lower.emit.packing import Packing
from svod.compile.lower.emit.regions import Regions
from svod.compile.lower.emit.state import OpenStage, Staged, StageLoop
from svod.compile.lower.emit.threads.copies import GroupCopies
from svod.compile.lower.emit.values import Address, Values
from svod.compile.lower.linear import STORE_OPS
from svod.core.ir.dtype import dtypes
from svod.core.kernel.groups import AREA
from svod.core.kernel.layout import Layout
from svod.core.kernel.required import Lin

INDEX = dtypes.index


class Buffers(NamedTuple):
    """The buffers of a copy under the loops that are open."""

    extents: list[int]              # of the region that each holds
    base: list[Lin]                 # where it starts
    layout: Layout
    offset: int                     # of the first buffer, bytes
    elements: int                   # from one buffer to the next


class CopiesAhead:
    """Emits a loop whose copies run ahead."""

    def __init__(self, ctx: PhaseContext, addresses: Addresses, values: Values, regions: Regions, copies: GroupCopies, packing: Packing):
        self.ctx, self.b, self.facts = ctx, ctx.b, ctx.facts
        self.addresses, self.values, self.regions, self.copies, self.packing = addresses, values, regions, copies, packing
        self.running: tuple[int, ...] = ()      # the copies of the loop that is open
        self.is_async = ctx.state.target.has_async_copies
        self.deferred: list[int] = []           # stores that follow what is computed meanwhile

    def of_loop(self, stage: OpenStage, loop: StageLoop) -> tuple[int, ...]:
        """The copies in a loop that run ahead."""
        children = self.facts.placement.children.get((stage.index, loop.point), ())
        return tuple(c for c in children if self.facts.nest.stages[c].buffers > 1)

    def run(self, stage: OpenStage, loop: StageLoop, whole: int, stride: int, accs: list[int],
            inside: Callable[[list[int]], list[int]]) -> list[int]:
        """`whole` iterations around `inside`, which takes accumulators and gives the next ones."""
        b, a, copies = self.b, loop.axis, self.of_loop(stage, loop)
        count = self.facts.nest.stages[copies[0]].buffers
        for k in range(count - 1):
            stage.open_row(a, ({}, min(k, whole - 1) * stride))
            for s in copies:
                self._fill(s, b.index(k), first=k == 0)
            stage.close_row(a)
            self._async("COMMIT")
        index, carried = b.open(b.index(0), b.index(whole * stride), stride, tuple(accs))
        self._async("WAIT", count - 2)
        self.ctx.group.shared.barrier()
        number = b.alu("IDIV", INDEX, 1, index, b.index(stride))
        later = b.alu("MIN", INDEX, 1, b.add(index, b.index((count - 1) * stride)), b.index((whole - 1) * stride))
        following = b.alu("MOD", INDEX, 1, b.add(number, b.index(count - 1)), b.index(count))
        stage.open_row(a, ({later: 1}, 0))
        for s in copies:
            self._fill(s, following, level=b.level)
        stage.close_row(a)
        self._async("COMMIT")
        deferred, self.deferred = self.deferred, []
        stage.open_row(a, ({index: 1}, 0))
        for s in copies:
            self._read(s, b.alu("MOD", INDEX, 1, number, b.index(count)))
        self.running = copies
        following_accs = inside(carried)
        self.running = ()
        stage.close_row(a)
        b.code[b.level] += deferred
        out = b.close(index, tuple(following_accs))
        stage.memo.clear()
        self._async("WAIT", 0)
        return out

    def _async(self, op: str, arg: int | None = None) -> None:
        if self.is_async:
            self.b.store(op, dtypes.void, 1, (), arg)

    def _buffers(self, s: int) -> Buffers:
        r = self.facts.placement.resolved[s]
        assert r is not None
        regions = [self.regions.required(s, i, True) for i in range(len(r.stage.outs))]
        extents, base = [region.extent for region in regions], [region.start for region in regions]
        layout = self.facts.shared_layout(s, tuple(extents))
        size = -(-self.facts.area(s, layout) // AREA) * AREA
        offset = self.ctx.group.shared.area(s, size * self.facts.nest.stages[s].buffers)
        return Buffers(extents, base, layout, offset, size // self.facts.stored(s).itemsize)

    def _fill(self, s: int, number: int, first: bool = False, level: int = -1) -> None:
        """Fill buffer `number`, an index value. `level`: of the loop behind whose body stores are deferred, or -1."""
        r, copy, buffers, shared = self.facts.placement.resolved[s], self.facts.nest.stages[s].copy, self._buffers(s), self.ctx.group.shared
        assert r is not None and copy is not None
        if first:
            shared.before_writing((buffers.offset,))
            shared.touched.add(buffers.offset)
        pointer = shared.pointer(self.facts.stored(s), buffers.offset)
        stage = self.copies.open(r, buffers.extents, buffers.base)
        self.ctx.open_stages[s] = stage
        self.copies.emit(stage, copy, lambda one: self._store(one, pointer, self.b.mul(number, buffers.elements), buffers, level))
        del self.ctx.open_stages[s]
        self.ctx.forget_values()

    def _store(self, stage: OpenStage, pointer: int, moved: int, buffers: Buffers, level: int) -> None:
        """Store the current position into the buffer that begins `moved` elements further."""
        b = self.b
        start, const, lane = self.addresses.in_layout(stage, pointer, buffers.layout, buffers.base)
        start = b.add(start, moved)
        width = stage.chunk.width if stage.vector_axis >= 0 else 1
        if self.is_async and (lane == 1 or width == 1) and self.values.copy_async(stage, pointer, start, const):
            return
        packed = self.facts.packed.get(stage.index)
        value = self.values.result(stage) if packed is None else self.packing.packed_value(stage, packed, width)
        before = len(b.code[b.level])
        self.values.store(stage, value, pointer, Address(start, const, lane, -1), False)
        if b.level == level:
            code = b.code[level]
            self.deferred += [n for n in code[before:] if b.op[n] in STORE_OPS]
            code[before:] = [n for n in code[before:] if b.op[n] not in STORE_OPS]

    def _read(self, s: int, number: int) -> None:
        """Let readers take buffer `number`, under the loops that are open."""
        b, buffers = self.b, self._buffers(s)
        beyond = any(self.regions.is_read_beyond(s, i) for i in range(len(buffers.base)))
        self.ctx.versions += 1
        pointer = self.ctx.group.shared.pointer(self.facts.stored(s), buffers.offset)
        self.ctx.staged[s] = Staged(-1, pointer, buffers.layout, tuple(buffers.base), b.level, self.ctx.versions, beyond,
                                    b.mul(number, buffers.elements))
        self.ctx.forget_values()
