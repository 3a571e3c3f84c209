"""Rows that the threads of a group hold in registers: what is reduced along them, and what is computed with the results.

    softmax of 4096 columns      UPCAST(s1.r0, 4) GROUP(s1.r0, 256) UNROLL(s1.r0, 0) … UPCAST(o1, 4) LOCAL(o1, 256) UPCAST(o1, 0)
    of 64 columns                UPCAST(s1.r0, 4) GROUP(s1.r0, 8) UNROLL(s1.r0, 0) … UPCAST(o1, 4) LOCAL(o1, 8) UPCAST(o1, 0) LOCAL(o0, 16)

Each thread has the same elements in all stages. Without loops they are loaded once, and what several stages compute of them is computed
once."""
from __future__ import annotations

from collections.abc import Iterator, Sequence
from math import gcd

from svod.core.cost.groups.spread import stored_along
from svod.core.cost.sketch_facts import extent_of, name_of, resolved, try_opt
from svod.core.kernel.kernel import ResolvedStage
from svod.core.kernel.placement import is_derived, place_stages, vector_width
from svod.core.kernel.scheduler import Scheduler

THREADS = (2, 4, 8, 16, 32, 64, 128, 256, 512, 1024)
GROUP = 128             # threads of a group that has several rows
MOST = 32               # elements of a thread
LONG = (512, 1024)      # threads for rows that are longer than that
AT_ONCE = 16            # elements of those that a thread loads at a time


def row_options(state: Scheduler) -> Iterator[Scheduler]:
    """Options of a phase that reduces rows and stores something for each of their elements."""
    placement = place_stages(state)
    inside = [s.index for s in state.kernel.stages if s.has_reduce and placement.paths[s.index]]
    roots = [s for s in placement.roots if not is_derived(state.kernel.stages[s])]
    if not inside or len(roots) != 1 or state.kernel.stages[roots[0]].has_reduce:
        return
    r = resolved(state, roots[0])
    stored = stored_along(state, r)
    if stored < 0:
        return
    extent, widest = extent_of(state, r, stored), vector_width(state, r)
    for threads in THREADS:
        if threads <= min(state.target.group_threads, extent) and extent <= threads * MOST:
            done = _held(state, r, inside, stored, threads, _width(extent, threads, widest))
            outer = next((a for a in range(stored - 1, -1, -1) if extent_of(state, r, a) > 1), -1)
            rows = gcd(extent_of(state, r, outer), GROUP // threads) if outer >= 0 and threads < GROUP else 1     # none is masked
            yield try_opt(done, "LOCAL", name_of(state, r, outer), rows) if rows > 1 else done
    for threads in LONG:        # few rows at a time, which the second cache keeps from stage to stage
        if threads <= state.target.group_threads and extent > threads * MOST:
            width = _width(extent, threads, widest)
            yield _held(state, r, inside, stored, threads, width, AT_ONCE // width)


def _width(extent: int, threads: int, widest: int) -> int:
    """Elements of a vector: the most that fill whole vectors of all threads, else that fill vectors and give each thread one."""
    fitting = [w for w in (widest, widest // 2, 1) if w and extent % w == 0 and threads * w <= extent]
    return next((w for w in fitting if extent % (threads * w) == 0), fitting[0])


def _held(state: Scheduler, r: ResolvedStage, inside: Sequence[int], stored: int, threads: int, width: int, vectors: int = 0) -> Scheduler:
    """A row of `threads` threads, with vectors of `width` elements, all of them or so many at a time."""
    for s in inside:
        stage = state.kernel.stages[s]
        name = state.kernel.axes[max(stage.reds, key=lambda a: state.kernel.axes[a].extent)].name
        state = try_opt(state, "UPCAST", name, width) if width > 1 else state
        state = try_opt(try_opt(state, "GROUP", name, threads), "UNROLL", name, vectors)
    name = name_of(state, r, stored)
    state = try_opt(state, "UPCAST", name, width) if width > 1 else state
    return try_opt(try_opt(state, "LOCAL", name, threads), "UPCAST", name, vectors)
