"""How the loops of one phase are spread over the threads of a group: the options for elementwise stages and for reductions.

    UPCAST(o1, 4) LOCAL(o1, 256)                          16 bytes a thread, neighbouring threads beside each other
    UPCAST(r0, 4) GROUP(r0, 256)                          a group a row
    UPCAST(r0, 4) GROUP(r0, 32) LOCAL(o0, 8)              a subgroup a row, eight rows a group
    LOCAL(o1, 64) GROUP(r0, 4)                            sums of columns: threads along memory, rows dealt out
    GROUP(r0, 256) SPLITK(r0, 64)                         few results: parts of the sum in groups of their own
"""
from __future__ import annotations

from collections.abc import Iterable, Iterator
from math import prod

from svod.core.cost.groups.device import LINE, SECTOR, device_of
from svod.core.cost.sketch_facts import contiguous_axes, extent_of, name_of, try_opt
from svod.core.kernel.groups import grid_rows, group_of
from svod.core.kernel.kernel import ResolvedStage, Stage
from svod.core.kernel.placement import place_stages, vector_width
from svod.core.kernel.scheduler import Scheduler

THREADS = (64, 128, 256)        # of a group: enough to hide latency, few enough that several groups share a unit
_FILL = 4                       # groups per unit that a phase should have
_MOST_PARTS = 64                # most parts of a cut sum, for each thread that combines them
SHORT = 8                       # positions of an axis that become straight-line code
ROW = 32                        # positions of a row that a thread may have whole


def amount_for(extent: int, threads: int, subgroup: int) -> int:
    """Threads along an axis of `extent` positions: at most `threads`, in whole subgroups where that is more than one, and as evenly as
    possible."""
    if extent <= threads:
        return extent
    even = -(-extent // -(-extent // threads))
    return min(threads, -(-even // subgroup) * subgroup) if threads >= subgroup else threads


def thread_counts(state: Scheduler) -> tuple[int, ...]:
    """Sizes of groups worth trying, within the limits of the target."""
    limit = state.target.group_threads
    return tuple(dict.fromkeys(min(n, limit) for n in THREADS))


def along_memory(state: Scheduler, r: ResolvedStage) -> int:
    """The local axis along which most of a stage's reads lie beside each other; of its store, where it reads nothing so; or -1."""
    votes = dict.fromkeys(range(len(r.axes)), 0.0)
    for i, n in enumerate(r.nodes):
        if n.kind in ("load", "read"):
            for a in contiguous_axes(state, r, i).direct:
                votes[a] += 1.0
    if r.store is not None:
        for a, c in r.store.coefs:
            votes[a] += 0.9 if c == 1 else 0.0
    best = max(votes, key=lambda a: (votes[a], extent_of(state, r, a)), default=-1)
    return best if best >= 0 and votes[best] > 0.0 and extent_of(state, r, best) > 1 else -1


def stored_along(state: Scheduler, r: ResolvedStage) -> int:
    """The output axis along which a stage is stored contiguously: the last one of its own temporary; or -1."""
    outs = [a for a in range(len(r.stage.outs)) if extent_of(state, r, a) > 1]
    if r.store is None:
        return outs[-1] if outs else -1
    return next((a for a in reversed(outs) if r.store.coef(a) == 1), outs[-1] if outs else -1)


def left_of(state: Scheduler, r: ResolvedStage, a: int) -> int:
    """Iterations left of the loop that carries the name of a local axis."""
    return state.rows[state.axis_rows[r.axes[a]][0]].extent if state.axis_rows[r.axes[a]] else 1


def spread_outputs(state: Scheduler, r: ResolvedStage, first: int, threads: int, most: int = 1 << 30) -> Scheduler:
    """Positions of the output bound to about `threads` threads: along axis `first`, at most `most` there, then along the axes outside of
    it, innermost first. Threads run fastest along the last axis, so axes inside of `first` are taken only where it is short."""
    subgroup = device_of(state.target).subgroup
    outs = len(r.stage.outs)
    outside = list(range(first - 1, -1, -1))
    inside = list(range(outs - 1, first, -1))
    budget = threads
    for a in (first, *outside, *inside) if first >= 0 else ():
        left = state.rows[state.row_id(name_of(state, r, a))].extent
        if budget < 2 or left < 2 or (a in inside and threads // max(budget, 1) >= subgroup):
            continue
        n = amount_for(left, min(budget, most) if a == first else budget, subgroup)
        done = try_opt(state, "LOCAL", name_of(state, r, a), n)
        if done is not state:
            state, budget = done, budget // n
    return state


def elementwise_options(state: Scheduler, r: ResolvedStage) -> Iterator[Scheduler]:
    """Options of a stage without reductions: threads along memory, each with a vector, one element, or several apart."""
    first, width = stored_along(state, r), vector_width(state, r)
    if first < 0:
        yield state
        return
    name = name_of(state, r, first)
    # rows begin at multiples of a vector where it divides them, or there is one: then only the last vector of all is masked
    is_one_row = state.target.has_masked_memory and all(extent_of(state, r, a) == 1 for a in range(len(r.stage.outs)) if a != first)
    for threads in thread_counts(state)[-2:]:
        for vector in dict.fromkeys((width, width // 2, 1)):
            if vector > 1 and extent_of(state, r, first) % vector and not is_one_row:
                continue
            done = try_opt(state, "UPCAST", name, vector) if vector > 1 else state
            yield spread_outputs(done, r, first, threads)
        if 1 < extent_of(state, r, first) <= ROW:       # whole rows
            yield spread_outputs(try_opt(state, "UPCAST", name, 0), r, first, threads)
        # several positions, a group apart
        yield try_opt(spread_outputs(state, r, first, threads), "UPCAST", name, 4)
    yield from _turned(state, r, first)


def _turned(state: Scheduler, r: ResolvedStage, stored: int) -> Iterator[Scheduler]:
    """Tiles of values that are read along one axis and stored along another: both have whole sectors in a group. Each thread turns a square
    of vectors in registers, where they divide both axes; of the neighbours that are served at a time, each sector is wanted by as many as
    fill it."""
    read = along_memory(state, r)
    if read in (-1, stored) or read >= len(r.stage.outs):
        return
    names, extents = [name_of(state, r, a) for a in (stored, read)], [extent_of(state, r, a) for a in (stored, read)]

    def tile(base: Scheduler, lines: int, along: int) -> Scheduler:
        for name, n in zip(names, (lines, along), strict=True):
            base = try_opt(base, "LOCAL", name, min(n, base.rows[base.row_id(name)].extent))
        return base
    width = vector_width(state, r)
    for threads in thread_counts(state):
        if width > 1 and not any(extent % width for extent in extents):
            square = try_opt(try_opt(state, "UPCAST", names[0], width), "UPCAST", names[1], width)
            yield tile(square, LINE // SECTOR, threads * SECTOR // LINE)
        for short, other in ((0, 1), (1, 0)):       # the threads have the whole of a short axis
            if extents[short] <= SHORT and extents[other] % width == 0:
                whole = try_opt(try_opt(state, "UPCAST", names[short], 0), "UPCAST", names[other], width)
                yield try_opt(whole, "LOCAL", names[other], min(threads, left_of(whole, r, (stored, read)[other])))
    side = 16 if state.target.group_threads >= 256 else 8
    done = tile(state, side, side)
    yield done
    yield try_opt(done, "UPCAST", names[1], 4)


def reduction_options(state: Scheduler, r: ResolvedStage) -> Iterator[Scheduler]:
    """Options of a stage with reductions: threads along memory, be that the sum or the results; the rest of a group shares the sum, or
    takes more results."""
    outs, subgroup = len(r.stage.outs), device_of(state.target).subgroup
    lane, first = along_memory(state, r), stored_along(state, r)
    reds = [a for a in range(outs, len(r.axes)) if extent_of(state, r, a) > 1]
    summed = lane if lane >= outs else max(reds, key=lambda a: (extent_of(state, r, a), a), default=-1)
    if 0 <= lane < outs:
        first = lane
    for threads in thread_counts(state):
        for parts in dict.fromkeys((1, min(4, threads), min(subgroup, threads), threads)):
            short = extent_of(state, r, lane) if 0 <= lane < outs else 1        # of the results along memory
            for vector in dict.fromkeys((vector_width(state, r), *[short][:1 < short <= SHORT], 1)):
                base = _shared_sum(state, r, summed, parts, vector if summed == lane else 1) if summed >= 0 else state
                if base is None:
                    continue
                if 0 <= lane < outs and vector > 1:
                    base = try_opt(base, "UPCAST", name_of(base, r, lane), vector) if extent_of(state, r, lane) % vector == 0 else base
                done = spread_outputs(_unrolled(base, r), r, first, threads // parts)
                yield done
                yield from _cut(done, r, summed)


def _shared_sum(state: Scheduler, r: ResolvedStage, axis: int, parts: int, vector: int) -> Scheduler | None:
    """A reduce axis shared by `parts` threads of a group, in vectors where it runs along memory. None where it has fewer positions."""
    extent, name = extent_of(state, r, axis), name_of(state, r, axis)
    if vector > 1 and (extent % vector or extent < vector * parts):
        return None
    if parts > 1 and extent < 2 * parts and extent != parts:
        return None
    state = try_opt(state, "UPCAST", name, vector) if vector > 1 else state
    return try_opt(state, "GROUP", name, parts) if parts > 1 else state


def short_unrolled(state: Scheduler, stage: Stage, most: int = SHORT, width: int = 1) -> Scheduler:
    """Short reduce loops as straight-line code, in vectors of `width` where those divide them."""
    for axis in stage.reds:
        row = state.rows[state.row_id(state.kernel.axes[axis].name)]
        if 1 < row.extent <= most:
            state = try_opt(state, "UPCAST", row.name, width) if width > 1 and row.extent % width == 0 else state
            state = try_opt(state, "UNROLL", row.name, 0)
    return state


def _unrolled(state: Scheduler, r: ResolvedStage) -> Scheduler:
    """Short reduce loops as straight-line code, else the innermost by four: loads are under way at once."""
    state = short_unrolled(state, r.stage)
    loops = [x for x in state.order[r.stage.index] if state.rows[x].axis in r.stage.reds and state.rows[x].extent > 1]
    return try_opt(state, "UNROLL", state.rows[loops[-1]].name, 4) if loops else state


def _cut(state: Scheduler, r: ResolvedStage, axis: int) -> Iterator[Scheduler]:
    """A sum cut into parts, where a phase has too few groups for the units."""
    if axis < 0 or not r.stage.is_output:
        return
    wanted = _FILL * device_of(state.target).units // max(1, groups_of(state, r.stage.index))
    left = state.rows[state.row_id(name_of(state, r, axis))].extent
    subgroup = max(1, state.target.subgroup)
    for parts in dict.fromkeys((min(wanted, left, _MOST_PARTS), min(wanted // _FILL, left, _MOST_PARTS),
                                *[min(n // subgroup, left // subgroup, _MOST_PARTS) * subgroup for n in (wanted, wanted // _FILL)])):
        if parts > 1:
            done = try_opt(state, "SPLITK", name_of(state, r, axis), parts)
            if done is not state:
                yield done


def groups_of(state: Scheduler, root: int) -> int:
    """Groups of the phase that stores a stage."""
    return prod(state.rows[row].extent for row in grid_rows(state, place_stages(state), root))


def threads_of(state: Scheduler, root: int) -> int:
    """Threads of a group of the phase that stores a stage."""
    return group_of(state, place_stages(state), root).threads


def distinct(states: Iterable[Scheduler]) -> list[Scheduler]:
    """The states that differ, in order."""
    return list({s.digest: s for s in reversed(list(states))}.values())[::-1]
