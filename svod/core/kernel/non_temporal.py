"""Decides which outputs can be stored non-temporally, past the caches, for lowering, the cost model and the sketches.

A non-temporal store writes a whole vector at a multiple of its size. It pays only if all stores of a cache line are non-temporal: a line
written in both ways is written to memory, fetched again and written again.

    y[128], UPCAST(o0, 32)          32 32 32 32        all of them
    y[100], UPCAST(o0, 32)          32 32 32 [32]      none: the last tile is moved back to 68
    y[9999], UPCAST(o0, 32)         32 32 … [32]       all but the last, which has a loop of its own (`leaves_tail`)
    y[8, 99], UPCAST(o1, 16)        rows begin at 99, 198, …: none
    y[99, 9999], UPCAST(o1, 16)     all but those at the ends of a long row (`aligns_rows`)
"""
from __future__ import annotations

from collections.abc import Sequence
from math import prod

from svod.core.kernel.kernel import ResolvedStage
from svod.core.kernel.layout import is_contiguous, is_exact
from svod.core.kernel.loop_nest import loop_nest
from svod.core.kernel.placement import NO_ROW, EmittedLoop, place_stages, span, vector_width
from svod.core.kernel.scheduler import LOOP, Scheduler, cut_of

# Least numbers of vectors in a row for which ordinary stores at the ends of the row cost little: if its other stores are ordinary as well,
# and if they are non-temporal.
MANY, MANY_PAST_CACHES = 64, 128


def has_non_temporal_stores(state: Scheduler) -> bool:
    """Whether STREAM changes how a state stores its output. Raises KernelOptError when its placements contradict each other."""
    stage = loop_nest(state).stages[state.kernel.output]
    row = stage.vector_loop.row if stage.vector_loop is not None else NO_ROW
    return state.target.has_non_temporal and stores_whole_vectors(state, stage.r, stage.axes, stage.vector, row)


class _OutputRow:
    """The output stage as rows of vectors. `axes`: the emitted loops per local axis; `lane`: the local axis of the vector; `row`: its loop
    row; -1 without a vector."""

    def __init__(self, state: Scheduler, r: ResolvedStage, axes: Sequence[Sequence[EmittedLoop]], lane: int, row: int) -> None:
        self.state, self.r, self.store, self.axes, self.lane = state, r, r.store, axes, lane
        self.width = vector_width(state, r)
        self.is_vector = r.store is not None and not r.store.atoms and 0 <= lane < len(r.stage.outs)
        self.own = tuple(axes[lane]) if self.is_vector else ()
        self.vector = next((p for p in self.own if p.row == row), None)
        self.extent = state.axis_extent(r.axes[lane]) if self.is_vector else 0

    def is_plain(self) -> bool:
        """Whether vectors along the row are contiguous in the output, and each position is stored once, without a mask."""
        if not self.is_vector or self.vector is None or self.store is None or self.r.reductions or self.state.kernel.written:
            return False
        if self.store.coef(self.lane) * self.vector.stride != 1 or not is_contiguous(self.own):
            return False
        return not any(self.state.pads[a] or self.state.kernel.axes[a].bound is not None for a in self.r.axes)

    def others(self) -> list[tuple[int, EmittedLoop]]:
        """The loops of the other output axes: (elements between iterations, modulo the vector's width; loop)."""
        assert self.store is not None
        return [(self.store.coef(a) * p.stride % self.width, p) for a in range(len(self.r.stage.outs)) if a != self.lane
                for p in self.axes[a] if p.extent > 1]


def aligns_rows(state: Scheduler, r: ResolvedStage, axes: Sequence[Sequence[EmittedLoop]], lane: int, row: int) -> bool:
    """Whether lowering aligns the vectors of the output stage `r` although its rows do not begin at aligned addresses. That takes rows of
    many vectors with a single loop over the tiles of a row, and an output larger than the second cache. Arguments: as for `_OutputRow`."""
    output = _OutputRow(state, r, axes, lane, row)
    if not output.is_plain() or output.extent < MANY * output.width or is_exact(output.own, output.extent):
        return False
    loops = [p for p in output.own if p.role == LOOP]
    if len(loops) != 1 or loops[0].stride % output.width:
        return False
    if state.kernel.params[r.store_slot].arg.size * r.stage.dtype.itemsize <= state.target.l2:
        return False
    order = state.order[r.stage.index]
    depth = order.index(loops[0].row)
    outer = [(step, p) for step, p in output.others() if p.role == LOOP]
    if any(step for step, p in output.others() if p.role != LOOP) or any(order.index(p.row) > depth for _, p in outer):
        return False
    if any((r.stage.index, d) in place_stages(state).children for d in range(depth + 1, len(order) + 1)):
        return False
    threads = state.thread.cores if state.thread else 1
    enough = prod(p.extent for _, p in outer) >= 4 * threads    # with fewer rows, cores share each row tile by tile
    return enough and any(step for step, _ in outer)


def leaves_tail(state: Scheduler, r: ResolvedStage, axes: Sequence[Sequence[EmittedLoop]], lane: int, row: int) -> bool:
    """Whether lowering stores the last tile of the output stage `r`, which is moved back off alignment, in a loop of its own: for a single
    row of many vectors whose outermost and only loop runs over the tiles. Arguments: as for `_OutputRow`."""
    output = _OutputRow(state, r, axes, lane, row)
    if not output.is_plain() or output.vector is None or output.store is None or output.extent < MANY_PAST_CACHES * output.width:
        return False
    loops = [p for a in range(len(r.stage.outs)) for p in axes[a] if p.role == LOOP and p.extent > 1]
    if len(loops) != 1 or loops[0] not in output.own or loops[0].row != state.order[r.stage.index][0]:
        return False
    if any(n % output.width for n in (loops[0].stride, output.vector.extent, output.store.const)) or output.extent % output.width == 0:
        return False
    return not any(step for step, _ in output.others())


def stores_whole_vectors(state: Scheduler, r: ResolvedStage, axes: Sequence[Sequence[EmittedLoop]], lane: int, row: int) -> bool:
    """Whether all stores of the output stage `r` are aligned whole vectors. If an extent depends on a variable, this is about the
    iterations that are wholly inside. Arguments: as for `_OutputRow`."""
    output = _OutputRow(state, r, axes, lane, row)
    if not output.is_vector:
        return False
    if cut_of(state, r.stage.index) is not None:
        return False    # the phase that combines the parts has loops of its own
    if leaves_tail(state, r, axes, lane, row):
        return True
    if aligns_rows(state, r, axes, lane, row):
        return output.extent >= MANY_PAST_CACHES * output.width
    vector, store, width = output.vector, output.store, output.width
    assert store is not None
    if vector is None or vector.role == LOOP or vector.extent < 2 or vector.extent % width:
        return False
    if store.coef(lane) * vector.stride != 1 or store.const % width:
        return False
    return all(_steps_by_vectors(output, a) for a in range(len(r.stage.outs)))


def _steps_by_vectors(output: _OutputRow, a: int) -> bool:
    """Whether all loops of an output axis, and its last tile, move the stored address by multiples of a vector."""
    state, width, own = output.state, output.width, tuple(output.axes[a])
    assert output.store is not None
    axis, step, extent = output.r.axes[a], output.store.coef(a), state.axis_extent(output.r.axes[a])
    if state.pads[axis]:
        return False    # positions beyond the extent are masked
    if any(step * p.stride % width for p in own if p.extent > 1 and p is not output.vector):
        return False
    if is_exact(own, extent) or state.kernel.axes[axis].bound is not None:
        return True
    if state.kernel.written:
        return False    # no position may be computed twice, so the last tile is masked
    block = span([p for p in own if p.role != LOOP])
    moved = any(p.role == LOOP and p.extent > 1 for p in own)
    if moved and step * max(0, extent - block) % width:
        return False    # the last tile is moved back to an unaligned address
    return not (a == output.lane and block > extent and extent % width)
