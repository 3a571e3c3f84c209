"""Ahead: copies into shared memory start several iterations before the one that reads them (PIPELINE).

    Loop r0                             Loop r0, s0 and s1 ahead
      Compute s0                          Reduction …
      Compute s1                  →
      Reduction …

Such a copy has several buffers: while an iteration reads one of them, copies for later iterations fill the others."""
from __future__ import annotations

from functools import partial

from svod.core.tree.build import TreeMaker
from svod.core.tree.nodes import Loop, Phase, Span, with_bodies, with_loops


def ahead(maker: TreeMaker, phases: tuple[Phase, ...]) -> tuple[Phase, ...]:
    """Let the copies in all pipelined loops run ahead; phases come back unchanged if the state has no PIPELINE."""
    if maker.state.pipeline is None:
        return phases
    return tuple([p._replace(launch=with_bodies(partial(with_loops, _ahead), p.launch)) for p in phases])


def _ahead(node: Loop) -> Loop:
    """Move the copies of a loop's body that have several buffers to `Loop.ahead`. A loop of a single iteration stays as it is."""
    copies = tuple([c for c in node.body.stages if c.nest.buffers > 1])
    if not copies or node.axis < node.frame.num_outs or node.span is not Span.ALL or node.whole <= 1:
        return node
    return node._replace(body=node.body._replace(stages=tuple([c for c in node.body.stages if c not in copies])), ahead=copies)
