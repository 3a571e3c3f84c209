"""Which outputs can be stored past the caches: lowering, the analysis of states and the sketches ask here.

A non-temporal store is of a whole vector at a multiple of its size, and pays where all stores are: a line that is written in both ways is
written to memory, fetched again and written again.

    y[128], UPCAST(o0, 32)          32 32 32 32        all of them
    y[100], UPCAST(o0, 32)          32 32 32 [32]      none: the last tile is moved back to 68
    y[8, 99], UPCAST(o1, 16)        rows begin at 99, 198, …: none
"""
from __future__ import annotations

from collections.abc import Sequence

from svod.core.kernel import ResolvedStage
from svod.core.layout import is_exact
from svod.core.nest import Piece, fit, lane_row, plan
from svod.core.scheduler import LOOP, Scheduler


def can_stream(state: Scheduler) -> bool:
    """Whether STREAM changes how a state stores its output. Raises KernelOptError when its placements do not go together."""
    for r in plan(state).resolved:
        if r is not None and r.store is not None:
            row = lane_row(state, r)
            lane = r.axes.index(state.rows[row].axis) if row >= 0 else -1
            pieces = [fit(state, state.axis_rows[a], state.axis_extent(a)) for a in r.axes]
            if stores_whole_vectors(state, r, pieces, lane, row):
                return True
    return False


def stores_whole_vectors(state: Scheduler, r: ResolvedStage, pieces: Sequence[Sequence[Piece]], lane: int, row: int) -> bool:
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
