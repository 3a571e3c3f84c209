"""Templates that spread the loops of one phase over the threads of a group: elementwise stages, transposes, reductions.

    UPCAST(o1, 4) LOCAL(o1, 256)                          16 bytes a thread, neighbouring threads at neighbouring positions
    UPCAST(r0, 4) GROUP(r0, 256)                          a group a row
    UPCAST(r0, 4) GROUP(r0, 32) LOCAL(o0, 8)              a subgroup a row, eight rows a group
    LOCAL(o1, 64) GROUP(r0, 4)                            sums of columns: 64 threads along memory, four share the rows of a column
    GROUP(r0, 256) SPLITK(r0, 64)                         few results: parts of the sum in groups of their own
"""
from __future__ import annotations

from collections.abc import Callable, Iterable
from math import prod

from svod.core.cost.groups.device import DEVICE_LINE_BYTES, SECTOR_BYTES, device_of
from svod.core.cost.sketch_facts import contiguous_axes, extent_of, name_of, try_opt
from svod.core.cost.template import Apply, Choose, Do, Hole, Maybe, Only, Point, Template, Value, fact
from svod.core.kernel.groups import grid_rows
from svod.core.kernel.kernel import ResolvedStage, Stage
from svod.core.kernel.placement import place_stages
from svod.core.kernel.scheduler import Scheduler

GROUP_SIZES = (64, 128, 256)    # threads: enough to hide latency, few enough that several groups share a unit
WANTED_GROUPS_PER_UNIT = 4      # groups that a phase should have for each unit
MOST_PARTS = 64                 # most parts of a split sum for each thread that combines them
SHORT_AXIS = 8                  # positions; a shorter axis becomes straight-line code
THREAD_ROW = 32                 # positions; one thread may compute a shorter row


def amount_for(extent: int, threads: int, subgroup: int) -> int:
    """The number of threads along an axis of `extent` positions: at most `threads`, so that all rounds are about equally full; a multiple
    of `subgroup` if there are more threads than that."""
    if extent <= threads:
        return extent
    even = -(-extent // -(-extent // threads))
    return min(threads, -(-even // subgroup) * subgroup) if threads >= subgroup else threads


def thread_counts(state: Scheduler) -> tuple[int, ...]:
    """Sizes of groups to try, within the limits of the target."""
    limit = state.target.group_threads
    return tuple(dict.fromkeys(min(n, limit) for n in GROUP_SIZES))


def along_memory(state: Scheduler, r: ResolvedStage) -> int:
    """The local axis along which most of a stage's reads are contiguous; if none are, the one along which its store is; else -1."""
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
    """The output axis along which a stage's value is stored contiguously; for a temporary, the last axis. -1 if there is none."""
    outs = [a for a in range(len(r.stage.outs)) if extent_of(state, r, a) > 1]
    if r.store is None:
        return outs[-1] if outs else -1
    return next((a for a in reversed(outs) if r.store.coef(a) == 1), outs[-1] if outs else -1)


def spread_outputs(state: Scheduler, r: ResolvedStage, first: int, threads: int, most: int = 1 << 30) -> Scheduler:
    """Bind positions of the output to about `threads` threads: first along axis `first`, at most `most` of them, then along the axes
    outside of it, innermost first. Axes inside `first` are used only if `first` is short, since neighbouring threads lie along the last
    axis."""
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


def short_unrolled(state: Scheduler, stage: Stage, most: int = SHORT_AXIS, width: int = 1) -> Scheduler:
    """Turn short reduce loops into straight-line code, in vectors of `width` if these divide the loop."""
    for axis in stage.reds:
        row = state.rows[state.row_id(state.kernel.axes[axis].name)]
        if 1 < row.extent <= most:
            state = try_opt(state, "UPCAST", row.name, width) if width > 1 and row.extent % width == 0 else state
            state = try_opt(state, "UNROLL", row.name, 0)
    return state


def groups_of(state: Scheduler, root: int) -> int:
    """The number of groups in the grid of the phase that stores stage `root`."""
    return prod(state.rows[row].extent for row in grid_rows(state, place_stages(state), root))


def distinct(states: Iterable[Scheduler]) -> list[Scheduler]:
    """The states without duplicates, in order."""
    return list({s.digest: s for s in reversed(list(states))}.values())[::-1]


def over_threads(first: Value[int], threads: Value[int]) -> Do:
    """`spread_outputs` as a step of a template."""
    return Do(lambda p: spread_outputs(p.state, p.stage, p.get(first), p.get(threads)))


# -- elementwise stages ------------------------------------------------------------------------------

def _vectors(p: Point) -> list[int]:
    """Elements of a vector to try: they divide the row, so that each row begins at a multiple of a vector. A single row needs no divisor,
    as only its last vector is masked."""
    is_one_row = p.state.target.has_masked_memory and all(p.extent(a) == 1 for a in p.outs if a != p[STORED])
    return [n for n in dict.fromkeys((p.width, p.width // 2, 1)) if n <= 1 or p.extent(p[STORED]) % n == 0 or is_one_row]


STORED = fact(lambda p: a if (a := stored_along(p.state, p.stage)) >= 0 else None)
THREADS = Hole("threads", lambda p: thread_counts(p.state))
_LARGE = Hole("threads", lambda p: thread_counts(p.state)[-2:])
_VECTOR = Hole("vector", _vectors)

ELEMENTWISE = Template(
    "ELEMENTWISE", STORED, _LARGE, Choose(
        [_VECTOR, Apply("UPCAST", STORED, _VECTOR), over_threads(STORED, _LARGE)],
        [Only(lambda p: 1 < p.extent(p[STORED]) <= THREAD_ROW), Apply("UPCAST", STORED, 0), over_threads(STORED, _LARGE)],
        [over_threads(STORED, _LARGE), Apply("UPCAST", STORED, 4)]))      # a thread's positions are as far apart as the group is wide


# -- transposes --------------------------------------------------------------------------------------

def _read_axis(p: Point) -> int | None:
    """The output axis along which values are read, if it is not the one along which they are stored; else None."""
    read = along_memory(p.state, p.stage)
    return read if read in p.outs and read != p[STORED] else None


def _short_axes(p: Point) -> list[tuple[int, int]]:
    """Pairs of axes: a short axis, of which a thread takes all positions, and the other one, along which it takes a vector."""
    return [(short, other) for short, other in ((p[STORED], p[_READ]), (p[_READ], p[STORED]))
            if p.extent(short) <= SHORT_AXIS and p.extent(other) % p.width == 0]


def _tile(along_stored: Callable[[Point], int], along_read: Callable[[Point], int]) -> list[Apply]:
    """Steps that bind a tile of threads to both axes, smaller if an axis has fewer positions left."""
    return [Apply("LOCAL", STORED, lambda p: min(along_stored(p), p.left(p[STORED]))),
            Apply("LOCAL", _READ, lambda p: min(along_read(p), p.left(p[_READ])))]


def _width(p: Point) -> int:
    return p.width


def _side(p: Point) -> int:
    return 16 if p.state.target.group_threads >= 256 else 8


_READ = fact(_read_axis)
_SHORT = Hole("", _short_axes)

# A group covers whole sectors along both axes. If squares of vectors are transposed in registers, neighbouring threads together access
# whole sectors.
TRANSPOSE = Template(
    "TRANSPOSE", STORED, _READ, Choose(
        [THREADS, Choose(
            [Only(lambda p: p.width > 1 and not any(p.extent(a) % p.width for a in (p[STORED], p[_READ]))),
             Apply("UPCAST", STORED, _width), Apply("UPCAST", _READ, _width),
             *_tile(lambda p: DEVICE_LINE_BYTES // SECTOR_BYTES, lambda p: p[THREADS] * SECTOR_BYTES // DEVICE_LINE_BYTES)],
            [_SHORT, Apply("UPCAST", lambda p: p[_SHORT][0], 0), Apply("UPCAST", lambda p: p[_SHORT][1], _width),
             Apply("LOCAL", lambda p: p[_SHORT][1], lambda p: min(p[THREADS], p.left(p[_SHORT][1])))])],
        [*_tile(_side, _side), Maybe(Apply("UPCAST", _READ, 4))]))


# -- reductions --------------------------------------------------------------------------------------

def _summed_axis(p: Point) -> int:
    """The reduce axis that is contiguous in memory, else the longest; -1 if there is none."""
    reds = [a for a in p.reds if p.extent(a) > 1]
    return p[_LANE] if p[_LANE] in p.reds else max(reds, key=lambda a: (p.extent(a), a), default=-1)


def _result_lane(p: Point) -> int:
    """The output axis that is contiguous in memory, or -1."""
    return p[_LANE] if p[_LANE] in p.outs else -1


def _reduced_vectors(p: Point) -> Iterable[int]:
    """Elements of a vector to try, along the sum or along the results; a short axis of results may be one vector."""
    short = p.extent(p[_RESULT_LANE]) if p[_RESULT_LANE] >= 0 else 1
    return dict.fromkeys((p.width, *[short][:1 < short <= SHORT_AXIS], 1))


def _sum_vector(p: Point) -> int:
    return p[_REDUCED_VECTOR] if p[_SUMMED] == p[_LANE] else 1


def _result_vector(p: Point) -> int:
    return p[_REDUCED_VECTOR] if p.extent(p[_RESULT_LANE]) % p[_REDUCED_VECTOR] == 0 else 1


def _has_enough(p: Point) -> bool:
    """Whether each thread that shares a sum has at least a vector of it. Without vectors: at least two positions, or exactly one."""
    if p[_SUMMED] < 0:
        return True
    extent, vector, parts = p.extent(p[_SUMMED]), _sum_vector(p), p[_PARTS]
    return (vector == 1 or (extent % vector == 0 and extent >= vector * parts)) and (parts == 1 or extent >= 2 * parts or extent == parts)


def _unrolled(p: Point) -> Scheduler:
    """Unroll short reduce loops completely, else the innermost one by four, so that several loads are in flight at once."""
    r, state = p.stage, short_unrolled(p.state, p.stage.stage)
    loops = [x for x in state.order[r.stage.index] if state.rows[x].axis in r.stage.reds and state.rows[x].extent > 1]
    return try_opt(state, "UNROLL", state.rows[loops[-1]].name, 4) if loops else state


def _cuts(p: Point) -> list[int]:
    """Numbers of parts for a sum whose phase has too few groups for the units; some of them are multiples of a subgroup's threads."""
    if p[_SUMMED] < 0 or not p.stage.stage.is_output:
        return []
    wanted = WANTED_GROUPS_PER_UNIT * device_of(p.state.target).units // max(1, groups_of(p.state, p.stage.stage.index))
    left, subgroup = p.left(p[_SUMMED]), max(1, p.state.target.subgroup)
    enough = wanted, wanted // WANTED_GROUPS_PER_UNIT
    whole = [min(n // subgroup, left // subgroup, MOST_PARTS) * subgroup for n in enough]
    return [n for n in dict.fromkeys((*[min(n, left, MOST_PARTS) for n in enough], *whole)) if n > 1]


_LANE = fact(lambda p: along_memory(p.state, p.stage))
_SUMMED, _RESULT_LANE = fact(_summed_axis), fact(_result_lane)
_PARTS = Hole("threads of a sum", lambda p: dict.fromkeys(
    (1, min(4, p[THREADS]), min(device_of(p.state.target).subgroup, p[THREADS]), p[THREADS])))
_REDUCED_VECTOR = Hole("vector", _reduced_vectors)
_CUT = Hole("parts", _cuts)

# Threads lie along contiguous memory, which is either the sum or the results. The remaining threads of a group share the sum, or take more
# results.
REDUCTION = Template(
    "REDUCTION", _LANE, _SUMMED, _RESULT_LANE, THREADS, _PARTS, _REDUCED_VECTOR, Only(_has_enough),
    Apply("UPCAST", _SUMMED, _sum_vector), Apply("GROUP", _SUMMED, _PARTS), Apply("UPCAST", _RESULT_LANE, _result_vector), Do(_unrolled),
    over_threads(lambda p: p[_RESULT_LANE] if p[_RESULT_LANE] >= 0 else stored_along(p.state, p.stage), lambda p: p[THREADS] // p[_PARTS]),
    Maybe(_CUT, Apply("SPLITK", _SUMMED, _CUT)))
