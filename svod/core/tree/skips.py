"""Skips: reduce loops leave out iterations that add nothing.

    a convolution with wide padding     Loop r1 (5)     →     Loop r1 (5), window: the taps that lie inside of the image
                                          Accumulate            Accumulate
    attention under a causal mask       Loop r0 (8)     →     Loop r0 (8), limits: the blocks of keys up to the last row of the group
                                          Accumulate            Accumulate

The phase that combines the parts of a split reduction skips none of them, as parts are no axis of the kernel.
"""
from __future__ import annotations

from functools import partial

from svod.core.kernel.algorithms.online import masked_limits
from svod.core.kernel.contraction import skipping_window, windows_of
from svod.core.tree.build import TreeMaker
from svod.core.tree.nodes import Ends, Loop, Phase, Span, Split, with_bodies, with_loops
from svod.core.tree.tails import is_split


def skips(maker: TreeMaker, phases: tuple[Phase, ...]) -> tuple[Phase, ...]:
    """Let the reduce loops of all phases skip iterations that add nothing."""
    on_grid, kernel = maker.state.target.has_groups, maker.kernel
    if not (masked_limits(kernel) if on_grid else any(windows_of(kernel, stage.index) for stage in kernel.stages)):
        return phases
    return tuple([p._replace(launch=with_bodies(partial(with_loops, partial(_skipping, maker, p.split)), p.launch)) for p in phases])


def _skipping(maker: TreeMaker, split: Split | None, node: Loop) -> Loop:
    """Let a loop skip the iterations that add nothing to any position of the tile. The loop comes back unchanged if such iterations are
    too few, or if its bounds must not vary."""
    frame, a, on_grid = node.frame, node.axis, maker.state.target.has_groups
    if a < frame.num_outs or frame.r.combines or node.span is not Span.ALL or is_split(split, node):
        return node
    window = skipping_window(maker.state, frame.r, a, frame.pieces[a])
    if window is not None:
        return node._replace(window=window)
    if not on_grid or not frame.r.stage.is_output or sum(p.extent > 1 for p in frame.pieces[a]) != 1 or node.rest:
        return node
    # All threads of a group run the same iterations. A tile that is moved back covers other rows than its number says, so masks that depend
    # on these rows are not used.
    limits = tuple([limit for limit in masked_limits(maker.kernel) if frame.ends(limit.output) is not Ends.MOVED_BACK])
    return node._replace(limits=limits) if limits else node
