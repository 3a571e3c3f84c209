"""Which outputs can be stored past the caches: lowering, the analysis of states and the sketches ask here.

A non-temporal store is of a whole vector at a multiple of its size, and pays where all stores are: a line that is written in both ways is
written to memory, fetched again and written again.

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
from svod.core.kernel.placement import EmittedLoop, fit, lane_row, place_stages
from svod.core.kernel.scheduler import LOOP, Scheduler

# vectors of a row from which on those at its ends cost little: stored in the ordinary way beside others like them (softmax over 88 gained
# 4-8 %, over 32 nothing), and beside those that go past the caches (a layer norm over 64 lost 40 % to STREAM)
MANY, MANY_PAST_CACHES = 64, 128


def can_stream(state: Scheduler) -> bool:
    """Whether STREAM changes how a state stores its output. Raises KernelOptError when its placements do not go together."""
    for r in place_stages(state).resolved:
        if r is not None and r.store is not None:
            row = lane_row(state, r)
            lane = r.axes.index(state.rows[row].axis) if row >= 0 else -1
            pieces = [fit(state, state.axis_rows[a], state.axis_extent(a)) for a in r.axes]
            if stores_whole_vectors(state, r, pieces, lane, row):
                return True
    return False


def aligns_rows(state: Scheduler, r: ResolvedStage, pieces: Sequence[Sequence[EmittedLoop]], lane: int, row: int) -> bool:
    """Whether lowering puts the vectors of the output stage `r` at multiples of their size although its rows begin elsewhere: rows of many
    vectors, with one loop over their tiles between a row and its tiles, that hold more than the second cache does. Arguments:
    `stores_whole_vectors`."""
    kernel, store, stage = state.kernel, r.store, r.stage
    if store is None or store.atoms or r.reductions or kernel.written or not 0 <= lane < len(stage.outs):
        return False
    own, width, extent = tuple(pieces[lane]), max(1, state.target.vector_bytes // r.lanes_bytes), state.axis_extent(r.axes[lane])
    loops, vector = [p for p in own if p.role == LOOP], next((p for p in own if p.row == row), None)
    if len(loops) != 1 or vector is None or loops[0].stride % width or store.coef(lane) * vector.stride != 1 or extent < MANY * width:
        return False
    if is_exact(own, extent) or not is_contiguous(own) or any(state.pads[a] or kernel.axes[a].bound is not None for a in r.axes):
        return False
    if kernel.params[r.store_slot].arg.size * stage.dtype.itemsize <= state.target.l2:
        return False
    order = state.order[stage.index]
    depth = order.index(loops[0].row)
    others = [(store.coef(a) * p.stride % width, p) for a in range(len(stage.outs)) if a != lane for p in pieces[a] if p.extent > 1]
    outer = [(step, p) for step, p in others if p.role == LOOP]
    if any(step for step, p in others if p.role != LOOP) or any(order.index(p.row) > depth for _, p in outer):
        return False
    if any((stage.index, d) in place_stages(state).children for d in range(depth + 1, len(order) + 1)):
        return False
    enough = prod(p.extent for _, p in outer) >= 4 * (state.thread[1] if state.thread else 1)    # else cores share rows, tile by tile
    return enough and any(step for step, _ in outer)


def leaves_tail(state: Scheduler, r: ResolvedStage, pieces: Sequence[Sequence[EmittedLoop]], lane: int, row: int) -> bool:
    """Whether lowering stores the last tile of the output stage `r`, which is moved back to somewhere between the multiples of the vector,
    in a loop of its own: of a single row of many vectors, over whose tiles the outermost and only loop goes. Arguments:
    `stores_whole_vectors`."""
    kernel, store, stage = state.kernel, r.store, r.stage
    if store is None or store.atoms or r.reductions or kernel.written or not 0 <= lane < len(stage.outs):
        return False
    own, width, extent = tuple(pieces[lane]), max(1, state.target.vector_bytes // r.lanes_bytes), state.axis_extent(r.axes[lane])
    loops = [p for a in range(len(stage.outs)) for p in pieces[a] if p.role == LOOP and p.extent > 1]
    vector = next((p for p in own if p.row == row), None)
    if len(loops) != 1 or loops[0].row != state.order[stage.index][0] or vector is None or store.coef(lane) * vector.stride != 1:
        return False
    if loops[0] not in own or loops[0].stride % width or vector.extent % width or store.const % width or extent % width == 0:
        return False
    if extent < MANY_PAST_CACHES * width or not is_contiguous(own):
        return False
    if any(state.pads[a] or kernel.axes[a].bound is not None for a in r.axes):
        return False
    return not any(store.coef(a) * p.stride % width for a in range(len(stage.outs)) if a != lane for p in pieces[a] if p.extent > 1)


def stores_whole_vectors(state: Scheduler, r: ResolvedStage, pieces: Sequence[Sequence[EmittedLoop]], lane: int, row: int) -> bool:
    """Whether all stores of the output stage `r` are of whole vectors at multiples of their size. `pieces`: its rows per local axis as they
    are emitted; `lane`, `row`: the local axis and the row that are the vector, or -1. Where an extent depends on a variable this holds for
    the iterations that are wholly inside."""
    kernel, store, outs = state.kernel, r.store, len(r.stage.outs)
    if store is None or store.atoms or not 0 <= lane < outs:
        return False
    if state.split_reduce is not None and kernel.axes[state.split_reduce[0]].stage == r.stage.index:
        return False    # the phase that combines the parts has loops of its own
    width = max(1, state.target.vector_bytes // r.lanes_bytes)
    vector = next((p for p in pieces[lane] if p.row == row and p.role != LOOP), None)
    if leaves_tail(state, r, pieces, lane, row):
        return True
    if aligns_rows(state, r, pieces, lane, row):
        return state.axis_extent(r.axes[lane]) >= MANY_PAST_CACHES * width
    if vector is None or vector.extent < 2 or vector.extent % width or store.coef(lane) * vector.stride != 1 or store.const % width:
        return False
    for a in range(outs):
        axis, own = r.axes[a], tuple(pieces[a])
        step, extent = store.coef(a), state.axis_extent(r.axes[a])
        if state.pads[axis]:
            return False    # positions beyond the extent are masked
        if any(step * p.stride % width for p in own if p.extent > 1 and p is not vector):
            return False
        if is_exact(own, extent) or kernel.axes[axis].bound is not None:
            continue
        if kernel.written:
            return False    # nothing is computed twice: the last tile is masked
        block = 1 + sum(p.stride * (p.extent - 1) for p in own if p.role != LOOP)
        moved = any(p.role == LOOP and p.extent > 1 for p in own)
        if moved and step * max(0, extent - block) % width:
            return False    # the last tile is moved back to there
        if a == lane and block > extent and extent % width:
            return False
    return True
