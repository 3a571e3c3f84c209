"""The loops of the phase that combines the parts of a cut sum. They follow from how the parts lie in memory, not from the state's rows.

    y[i] = Σ x[i, k], THREAD(r0, 3)     Phase out, partial results:   p[part, i] = Σ over the part's k
                                        Phase out, combined results:  Launch o0 by vectors; Loop part (3): y[i] += p[part, i]

Few parts are added in straight-line code. On a grid a subgroup may take the parts of a result in turn.
"""
from __future__ import annotations

from typing import NamedTuple

from svod.core.kernel.copy_loops import CopyLoops, copy_loops
from svod.core.kernel.groups import combining_threads
from svod.core.kernel.kernel import LinearIndex, Node, ReduceNode, ResolvedStage
from svod.core.kernel.placement import NO_ROW, EmittedLoop, vector_width
from svod.core.kernel.scheduler import LOOP, UNROLL, Scheduler

MOST_UNROLLED = 8           # parts of a result that a thread adds without a loop


def index_of_parts(extents: list[int]) -> LinearIndex:
    """The element of a position of an output of some extents, and of a part, among all parts: they lie one behind the other."""
    coefs, total = [], 1
    for a in reversed(range(len(extents))):
        coefs.append((a, total))
        total *= extents[a]
    return LinearIndex((*reversed(coefs), (len(extents), total)), 0, ())


class Combining(NamedTuple):
    """A stage as a reduction of the parts of its sums. The last axis is that of the parts; the stride of its piece is the number of threads
    that take them in turn."""

    r: ResolvedStage
    copy: CopyLoops
    extents: tuple[int, ...]
    order: tuple[int, ...]          # axes with loops, outermost first


def combining(state: Scheduler, r: ResolvedStage, parts: int) -> Combining:
    """The loops that combine so many parts of an output's sums."""
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
    """A stage as a reduction of the parts of its sums, over one more axis. A node of a part has the reduction and its component."""
    nodes, reductions, axes = list(r.nodes), [], (*r.stage.outs, -1)
    for k, red in enumerate(r.reductions):
        first = len(nodes)
        nodes += [Node("part", "LOAD", d, (), (k, c), tuple(range(len(axes))), linear=index) for c, d in enumerate(red.dtypes)]
        reductions.append(ReduceNode(red.combiner, tuple(range(first, len(nodes))), red.dtypes))
    return ResolvedStage(r.stage, axes, nodes, reductions, r.value, r.store, r.store_slot, r.reads, r.after_reduce, r.lanes_bytes)
