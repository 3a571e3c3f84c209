"""PREFETCH for packed constants that no cache keeps from one run to the next.

    … STAGE(s0, root) …                weights of 4 MB, read in the order in which they lie
    … STAGE(s0, root) … PREFETCH(s0, 48)

Between two runs of a kernel its plan reads the weights of all other kernels, so large weights come from memory in each run. A register tile
multiplies each vector of weights by few positions: the loads wait for memory, although its bandwidth is not used up. The cost model does
not predict this, as it does not know the plan. A prefetch of data that are cached costs next to nothing.
"""
from __future__ import annotations

from math import prod

from svod.core.cost.sketch_facts import try_opt
from svod.core.kernel.loop_nest import LoopNest, loop_nest, stored_bytes
from svod.core.kernel.opts.stages import MAX_PREFETCH
from svod.core.kernel.placement import is_computed_once
from svod.core.kernel.scheduler import LOOP, Scheduler

# a constant larger than the second cache divided by this is evicted before the next run, as other kernels use the cache
KEPT_L2_SHARE = 2
AHEAD_L1_SHARE = 4      # the distance between a load and its prefetch, in bytes, is the first cache divided by this


def ahead(state: Scheduler) -> Scheduler:
    """Add a PREFETCH for each large constant that is packed at prepare."""
    nest = loop_nest(state)
    for s in nest.placement.roots:
        layout = nest.stages[s].layout
        if layout is None or not is_computed_once(state, nest.placement, s):
            continue
        size = stored_bytes(state, nest.layouts, s)
        positions = _positions(nest, s)
        if positions and layout.size * size * KEPT_L2_SHARE > state.target.l2:
            iterations = state.target.l1 // AHEAD_L1_SHARE // (positions * size)
            state = try_opt(state, "PREFETCH", state.kernel.stages[s].name, max(1, min(iterations, MAX_PREFETCH)))
    return state


def _positions(nest: LoopNest, s: int) -> int:
    """Positions of stage `s` that one iteration of a reader's innermost loop reads in vectors; the maximum over its readers. 0 if all
    readers read single elements: they compute so long for each cache line that they need no prefetch."""
    most = 0
    for r, node in nest.placement.reads_of(s):
        reader, moving = nest.stages[r.stage.index], {a for lin in node.dims for a, _ in lin.coefs}
        if reader.vector in moving:
            most = max(most, prod(p.extent for a in moving for p in reader.axes[a] if p.role != LOOP))
    return most
