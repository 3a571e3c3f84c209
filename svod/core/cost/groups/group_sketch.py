"""Sketches for targets with groups, and the heuristic: the best of them by the cost model.

Every phase of a kernel is spread over threads by itself. A reduction that other stages read is computed inside the phase that reads it,
where the threads of the group share it, or in a phase of its own:

    softmax     one phase: a group a row        STAGE at the root: maxima, sums and the rest, each with a grid that suits it
"""
from __future__ import annotations

from collections.abc import Iterator, Sequence

from svod.core.cost.groups.attention import attention_options
from svod.core.cost.groups.contractions import contraction_options
from svod.core.cost.groups.device import device_of
from svod.core.cost.groups.group_cost import group_cost
from svod.core.cost.groups.matrices import flat_options, matrix_options
from svod.core.cost.groups.prices import GroupPrices
from svod.core.cost.groups.rows import row_options
from svod.core.cost.groups.spread import ROW, along_memory, elementwise_options, reduction_options, short_unrolled, thread_counts
from svod.core.cost.sketch_facts import extent_of, factors_of, name_of, resolved, try_opt
from svod.core.kernel.placement import is_derived, place_stages, vector_width
from svod.core.kernel.scheduler import ROOT, Scheduler

TIE = 0.015             # predictions whose cycles behind the launch are this near each other say nothing
_MOST = 24              # sketches of a kernel, those predicted fastest


def group_heuristic(state: Scheduler) -> Scheduler:
    """The state that a kernel runs in when nothing is known about it: of the sketches predicted equal the one with the shortest chain."""
    return best_sketch(state, GroupPrices())


def best_sketch(state: Scheduler, prices: GroupPrices) -> Scheduler:
    """`group_heuristic` by these prices."""
    candidates = prices.cheapest(_generate(state, prices), 1, TIE)
    return min([s for _, s in candidates], key=lambda s: (len(s.applied_opts), group_cost(s).cycles), default=state)


def group_sketches(state: Scheduler) -> list[Scheduler]:
    """The states that a search starts from."""
    prices = GroupPrices()
    return [s for _, s in prices.cheapest(_generate(state, prices), _MOST)]


def _generate(state: Scheduler, prices: GroupPrices) -> Iterator[Scheduler]:
    yield state
    flat = list(flat_options(state))
    if flat:        # its axes as they are make tiles with gaps
        yield from flat
        return
    for base in _placements(state):
        for start in _shared_inside(base):
            roots = [s for s in place_stages(start).roots if not is_derived(start.kernel.stages[s])]
            sizes = thread_counts(state)
            for s in roots[:-1]:
                start = _best(start, s, sizes[1:2] or sizes, prices)
            yield from _options(start, roots[-1], sizes if len(roots) == 1 else sizes[1:] or sizes)
    yield from row_options(state)
    yield from attention_options(state)


def _placements(state: Scheduler) -> Iterator[Scheduler]:
    """Where the reductions live that other stages read: as they are, and each in a phase of its own."""
    yield state
    inner = [s for s in state.kernel.stages if s.has_reduce and not s.is_output]
    apart = state
    for s in inner:
        apart = try_opt(apart, "STAGE", s.name, ROOT)
    if apart is not state:
        yield apart


def _shared_inside(state: Scheduler) -> Iterator[Scheduler]:
    """Reductions inside a phase: computed by each thread, short ones without a loop, or shared by the threads of its group."""
    paths = place_stages(state).paths
    inside = [s.index for s in state.kernel.stages if s.has_reduce and paths[s.index]]
    alone = state
    for s in inside:
        alone = short_unrolled(alone, state.kernel.stages[s], ROW, vector_width(state, resolved(state, s)))
    yield alone
    for parts in dict.fromkeys((device_of(state.target).subgroup, min(256, state.target.group_threads))) if inside else ():
        done = state
        for s in inside:
            r = resolved(state, s)
            lane = along_memory(state, r)
            reds = range(len(r.stage.outs), len(r.axes))
            axis = lane if lane in reds else max(reds, key=lambda a: extent_of(state, r, a))
            extent, width = extent_of(state, r, axis), vector_width(state, r)
            if axis == lane and extent % width == 0 and extent >= width * parts:
                done = try_opt(done, "UPCAST", name_of(state, r, axis), width)
            done = try_opt(done, "GROUP", name_of(state, r, axis), min(parts, done.rows[done.row_id(name_of(state, r, axis))].extent))
        if done is not state:
            yield done


def _best(state: Scheduler, s: int, sizes: Sequence[int], prices: GroupPrices) -> Scheduler:
    return next((best for _, best in prices.cheapest(_options(state, s, sizes), 1)), state)


def _options(state: Scheduler, s: int, sizes: Sequence[int]) -> Iterator[Scheduler]:
    """The options of one phase, the others left as they are. `sizes`: threads of the groups of contractions."""
    r = resolved(state, s)
    yield state
    if not r.reductions:
        yield from elementwise_options(state, r)
        return
    operands = factors_of(state, r)
    if operands is not None:
        yield from matrix_options(state, r)
        yield from contraction_options(state, r, operands, sizes)
    yield from reduction_options(state, r)
