"""The loops of the phase that combines the partial results of a split reduction. They follow from the memory layout of these partial
results, not from the state's rows.

    y[i] = Σ x[i, k], THREAD(r0, 3)     Phase out, partial results:   p[part, i] = Σ over the part's k
                                        Phase out, combined results:  Launch o0 by vectors; Loop part (3): y[i] += p[part, i]

Up to `MOST_UNROLLED` parts are added in straight-line code, more in a loop. On a grid the threads of a subgroup may share the parts of one
result.
"""
from __future__ import annotations

from typing import NamedTuple

from svod.core.kernel.copy_loops import CopyLoops, copy_loops
from svod.core.kernel.groups import combining_threads
from svod.core.kernel.kernel import LinearIndex, Node, ReduceNode, ResolvedStage
from svod.core.kernel.placement import NO_ROW, EmittedLoop, vector_width
from svod.core.kernel.scheduler import LOOP, UNROLL, Scheduler

MOST_UNROLLED = 8           # largest number of parts of one result that a thread adds without a loop


def index_of_parts(extents: list[int]) -> LinearIndex:
    """The element number of (position of the output, part) in the temporary that holds all partial results: one whole output after the
    other, the part as the last axis."""
    coefs, total = [], 1
    for a in reversed(range(len(extents))):
        coefs.append((a, total))
        total *= extents[a]
    return LinearIndex((*reversed(coefs), (len(extents), total)), 0, ())


class Combining(NamedTuple):
    """A stage as a reduction over its partial results. The last axis counts the parts; the stride of its loop is the number of threads that
    take the parts in turn."""

    r: ResolvedStage
    copy: CopyLoops
    extents: tuple[int, ...]
    order: tuple[int, ...]          # axes with loops, outermost first


def combining(state: Scheduler, r: ResolvedStage, parts: int) -> Combining:
    """Build the loops that combine `parts` partial results of each position of an output."""
    extents = [state.kernel.axes[a].extent for a in r.stage.outs]
    index, part, width, on_grid = index_of_parts(extents), len(extents), vector_width(state, r), state.target.has_groups
    combined = _combined(r, index)
    assert r.store is not None
    lane = next((i for i in reversed(range(part)) if r.store.coef(i) == 1), part - 1)
    dims = (*(i for i in range(part) if i != lane), *((lane,) if lane >= 0 else ()))
    pieces = copy_loops(combined, extents, dims, width, exact=on_grid).axes
    threads = combining_threads(state.target, index.coef(part) // width, parts) if on_grid else 1
    is_unrolled = parts <= MOST_UNROLLED * threads
    pieces.append((EmittedLoop(NO_ROW, UNROLL if is_unrolled else LOOP, parts // threads, threads),))
    return Combining(combined, CopyLoops(pieces, lane, width), (*extents, parts), tuple(range(part + (not is_unrolled))))


def _combined(r: ResolvedStage, index: LinearIndex) -> ResolvedStage:
    """Turn a stage into a reduction of its partial results over one more axis. The `arg` of a "part" node is (number of the reduction,
    component)."""
    nodes, reductions, axes = list(r.nodes), [], (*r.stage.outs, -1)
    for k, red in enumerate(r.reductions):
        first = len(nodes)
        nodes += [Node("part", "LOAD", d, (), (k, c), tuple(range(len(axes))), linear=index) for c, d in enumerate(red.dtypes)]
        reductions.append(ReduceNode(red.combiner, tuple(range(first, len(nodes))), red.dtypes))
    return ResolvedStage(r.stage, axes, nodes, reductions, r.value, r.store, r.store_slot, r.reads, r.after_reduce, r.lanes_bytes)
