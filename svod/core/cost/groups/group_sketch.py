"""Sketches for targets with groups, and the heuristic: the best of them by the cost model.

Every phase of a kernel is spread over threads by itself. A reduction that other stages read is computed inside the phase that reads it,
where the threads of the group share it, or in a phase of its own:

    softmax     one phase: a group a row        STAGE at the root: maxima, sums and the rest, each with a grid that suits it
"""
from __future__ import annotations

from collections.abc import Iterator
from math import inf

from svod.core.cost.groups.attention import ATTENTION
from svod.core.cost.groups.contractions import CONTRACTION
from svod.core.cost.groups.device import device_of
from svod.core.cost.groups.group_cost import group_cost
from svod.core.cost.groups.matrices import MATRIX_TILES
from svod.core.cost.groups.prices import GroupPrices
from svod.core.cost.groups.rows import ROWS
from svod.core.cost.groups.spread import ELEMENTWISE, REDUCTION, THREAD_ROW, TRANSPOSE, along_memory, short_unrolled
from svod.core.cost.groups.winograd import WINOGRAD_PHASES, least_cycles, products_of
from svod.core.cost.sketch import ALGORITHM_FACTOR
from svod.core.cost.sketch_facts import resolved, try_opt
from svod.core.cost.template import Apply, Choose, Do, Each, Hole, Maybe, Need, Only, Point, Template, schedule
from svod.core.kernel.placement import is_derived, place_stages, vector_width
from svod.core.kernel.scheduler import ROOT, Scheduler

TIE_SHARE = 0.015       # share of the cycles without the launch; predictions that differ by less are equal
MOST_SKETCHES = 24      # most sketches of a kernel, the fastest by prediction
SHARING_THREADS = 256   # threads of a group that share a reduction inside a phase


def group_heuristic(state: Scheduler) -> Scheduler:
    """The state that a kernel runs in if nothing was measured: of the sketches that are predicted fastest, the one with the shortest
    chain."""
    return best_sketch(state, GroupPrices())


def best_sketch(state: Scheduler, prices: GroupPrices) -> Scheduler:
    """`group_heuristic`, with the given cache of prices. A sketch with an algorithm has to be faster by ALGORITHM_FACTOR."""
    candidates = prices.cheapest(_generate(state, prices), 1, TIE_SHARE)
    best = min([s for _, s in candidates], key=lambda s: (len(s.applied_opts), group_cost(s).cycles), default=state)
    for _, other in _by_algorithm(state, prices, group_cost(best).cycles / ALGORITHM_FACTOR):
        return other
    return best


def group_sketches(state: Scheduler) -> list[Scheduler]:
    """The sketches that a search starts from, by predicted time: those without an algorithm, and the fastest with one."""
    prices = GroupPrices()
    found = [*prices.cheapest(_generate(state, prices), MOST_SKETCHES), *_by_algorithm(state, prices)]
    return [s for _, s in sorted(found, key=lambda one: one[0])]


# -- templates of whole kernels ----------------------------------------------------------------------

def _reductions_inside(p: Point) -> list[int]:
    """The stages that reduce inside the phase of another stage."""
    paths = place_stages(p.state).paths
    return [s.index for s in p.state.kernel.stages if s.has_reduce and paths[s.index]]


def _without_loops(p: Point) -> Scheduler:
    """Turn short reductions inside a phase into straight-line code, which each thread runs by itself."""
    state = p.state
    for s in _reductions_inside(p):
        state = short_unrolled(state, state.kernel.stages[s], THREAD_ROW, vector_width(state, resolved(state, s)))
    return state


def _shared_by_group(p: Point) -> Scheduler:
    """Let the threads of a group share the reduction `_INSIDE`, in vectors if it runs along memory."""
    state, parts, r = p.state, p[_PARTS], resolved(p.state, p[_INSIDE])
    lane, reds = along_memory(state, r), range(len(r.stage.outs), len(r.axes))
    axes = [state.kernel.axes[a] for a in r.axes]
    axis = axes[lane if lane in reds else max(reds, key=lambda a: axes[a].extent)]
    width = vector_width(state, r)
    if lane in reds and axis.extent % width == 0 and axis.extent >= width * parts:
        state = try_opt(state, "UPCAST", axis.name, width)
    return try_opt(state, "GROUP", axis.name, min(parts, state.rows[state.row_id(axis.name)].extent))


_INNER = Hole("", lambda p: [s.name for s in p.state.kernel.stages if s.has_reduce and not s.is_output])
_INSIDE = Hole("", _reductions_inside)
_PARTS = Hole("threads of a sum inside", lambda p: dict.fromkeys(
    (device_of(p.state.target).subgroup, min(SHARING_THREADS, p.state.target.group_threads))) if _reductions_inside(p) else ())

# Places the reductions that other stages read: where they are, or each in a phase of its own. Each thread computes a reduction inside
# another phase for itself, or all threads of a group share it.
PLACEMENT = Template("PLACEMENT", Maybe(Each(_INNER, Apply("STAGE", _INNER, ROOT))),
                     Choose(Do(_without_loops), [_PARTS, Need(Each(_INSIDE, Do(_shared_by_group)))]))

# Schedules the loops of one phase; the empty choice leaves them as they are.
PHASE = Choose(
    [],
    [Only(lambda p: not p.stage.reductions), Choose(ELEMENTWISE, TRANSPOSE)],
    [Only(lambda p: bool(p.stage.reductions)), Choose(MATRIX_TILES, CONTRACTION, REDUCTION)])

# Flattens a convolution to a matrix product. Tiles over the convolution's own axes would have gaps; tiles over its flattened pixels have
# none, whatever the extents of an image.
FLAT = Template("FLAT", Need(Apply("FLATTEN", lambda p: p.stage.stage.name)), MATRIX_TILES)


def _by_algorithm(state: Scheduler, prices: GroupPrices, limit: float = inf) -> list[tuple[float, Scheduler]]:
    """The fastest results of a convolution with fewer multiplications, with the fastest of its products: a list of one state with its
    cycles, or of none if it would take more than `limit` cycles."""
    found = list[tuple[float, Scheduler]]()
    if least_cycles(state) > limit:
        return found
    for _, start in prices.cheapest(schedule(WINOGRAD_PHASES, state), 1):
        found += prices.cheapest([start, *schedule(CONTRACTION, start, products_of(start.kernel))], 1, limit=limit)
    return found


def _generate(state: Scheduler, prices: GroupPrices) -> Iterator[Scheduler]:
    yield state
    flat = list(schedule(FLAT, state))
    if flat:
        yield from flat
        return
    for start in schedule(PLACEMENT, state):
        *others, last = [s for s in place_stages(start).roots if not is_derived(start.kernel.stages[s])]
        for s in others:
            start = next((best for _, best in prices.cheapest(schedule(PHASE, start, s), 1)), start)
        yield from schedule(PHASE, start, last)
    yield from schedule(Choose(ROWS, ATTENTION), state)
