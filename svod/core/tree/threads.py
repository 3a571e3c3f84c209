"""The loops of a stage that one thread of a group runs: those that no opt has bound to threads.

    o0 of 64 = LOCAL 8 × UPCAST 8           one thread: 8 positions; threads start 8 apart, the last one 56 later than the first
    a tile of 16 × 8 that 32 threads hold   one thread: its elements, side by side
"""
from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from svod.core.kernel.groups import BLOCK_ROLES
from svod.core.kernel.intrinsics import held_layout
from svod.core.kernel.kernel import ResolvedStage
from svod.core.kernel.layout import is_exact
from svod.core.kernel.placement import EmittedLoop
from svod.core.kernel.scheduler import DOT, UPCAST, Scheduler
from svod.core.machine.isa import Fragment


class ThreadPart(NamedTuple):
    """The loops that one thread runs, by local axis."""

    pieces: tuple[tuple[EmittedLoop, ...], ...]
    bounds: tuple[int, ...]
    apart: tuple[int, ...]          # positions from the start of the first thread to the start of the last one, per local axis


def held_sides(state: Scheduler, r: ResolvedStage) -> dict[int, int]:
    """Local axis → 0 if it runs along the rows, 1 if along the columns, of the tiles that threads hold in registers; {} for other
    stages."""
    chosen = state.dots[r.stage.index]
    if held_layout(state, r.stage.index) is None or chosen is None:
        return {}
    return {r.axes.index(chosen.rows): 0, r.axes.index(chosen.columns): 1}


def thread_part(state: Scheduler, r: ResolvedStage, pieces: Sequence[tuple[EmittedLoop, ...]], bounds: Sequence[int]) -> ThreadPart:
    """The part that one thread has of loops over `bounds` positions per axis."""
    if not state.target.has_groups:
        return ThreadPart(tuple(pieces), tuple(bounds), (0,) * len(pieces))
    fragment, sides = held_layout(state, r.stage.index), held_sides(state, r)
    own, extents, apart = list(pieces), list(bounds), [0] * len(pieces)
    for i, of_axis in enumerate(pieces):
        bound = [p for p in of_axis if p.role in BLOCK_ROLES]
        if not bound and i not in sides:
            continue
        own[i] = tuple([p for p in of_axis if p.role not in BLOCK_ROLES])
        apart[i] = sum([(p.extent - 1) * p.stride for p in bound])
        if fragment is not None and i in sides:
            apart[i] += max(place[sides[i]] for place in fragment.origins)
            own[i] = (*[p for p in own[i] if p.role != DOT], *_elements(fragment, sides[i], of_axis[-1].row))
        if is_exact(of_axis, bounds[i]):
            extents[i] = own[i][0].extent * own[i][0].stride if own[i] else 1
        else:       # the last tile of all threads together ends where the region does
            extents[i] -= apart[i]
    return ThreadPart(tuple(own), tuple(extents), tuple(apart))


def _elements(fragment: Fragment, side: int, row: int) -> list[EmittedLoop]:
    """A thread's elements of a tile along its rows (`side` 0) or columns (1), as upcast loops."""
    steps = [(d.extent, (d.rows, d.columns)[side]) for d in fragment.elements]
    return [EmittedLoop(row, UPCAST, extent, step) for extent, step in steps if step]
