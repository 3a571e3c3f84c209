"""Rewrites that place conversions of 16-bit floats to wider floats: after movements, so that memory and copies stay 16 bits wide.

    WINDOW(PAD(CAST(x)))            →    CAST(WINDOW(PAD(x)))

A product's operand that is widened last is a copy of all windows, which instructions on 16-bit pairs read. Where a product reads each
element of the windows fewer times than these repeat an element of x, copying the windows takes longest, and x is widened before them:

    EXPAND(CAST(WINDOW(PAD(x))))    →    EXPAND(WINDOW(CAST(PAD(x))))
"""
from __future__ import annotations

import math

from svod.core.graph.shapes import size_of
from svod.core.ir.rewrite import Pattern, PatternMatcher, graph_rewrite
from svod.core.ir.uop import MOVEMENT, Ops, UOp


def _is_widening(u: UOp) -> bool:
    """Whether a node converts a 16-bit float to a float of 32 or more bits."""
    return u.op is Ops.CAST and u.dtype.is_float and u.dtype.bits >= 32 and u.src[0].dtype.is_float and u.src[0].dtype.bits < 32


def _is_exact(u: UOp) -> bool:
    """Whether a movement gives the same numbers on 16-bit floats and on wider ones: the fill of a PAD may not be a 16-bit number."""
    return u.op is not Ops.PAD or u.arg[1] in (0, math.inf, -math.inf)


def _move_then_widen(u: UOp, cast: UOp) -> UOp | None:
    """Return the movement `u` on the 16-bit floats and the conversion after it; None if `cast` does not widen 16-bit floats, or if u is a
    PAD whose fill may not be a 16-bit number."""
    if not _is_widening(cast) or not _is_exact(u):
        return None
    x = cast.src[0]
    return UOp(Ops.CAST, cast.dtype, (UOp(u.op, x.dtype, (x,), u.arg),), cast.arg)


WIDEN_LAST = Pattern(MOVEMENT - {Ops.EXPAND}, (Pattern(Ops.CAST, name="cast"),), name="u"), _move_then_widen
"""The rule, for a PatternMatcher."""
_WIDENINGS = PatternMatcher([WIDEN_LAST])


def _widen_then_window(u: UOp, cast: UOp) -> UOp | None:
    """Return the EXPAND `u` of windows that are widened before they are taken; None if it repeats an element of the windows at least as
    often as these repeat an element of their source, or if the movements after that have other results on wider floats."""
    if not _is_widening(cast):
        return None
    moved, node = list[UOp](), cast.src[0]
    while node.op in MOVEMENT and node.op is not Ops.EXPAND:
        moved.append(node)
        node = node.src[0]
    while moved and moved[-1].op is not Ops.WINDOW:     # movements below the innermost windows move 16-bit floats
        node = moved.pop()
    if not moved or not all(map(_is_exact, moved)) or size_of(u) * size_of(node) >= size_of(cast) * size_of(moved[0]):
        return None
    x = UOp(Ops.CAST, cast.dtype, (node,), cast.arg)
    for m in reversed(moved):
        x = UOp(m.op, cast.dtype, (x,), m.arg)
    return u.replace(src=(x,))


_FEW_READS = PatternMatcher([(Pattern(Ops.EXPAND, (Pattern(Ops.CAST, name="cast"),), name="u"), _widen_then_window)])


def widened_last(sink: UOp) -> UOp:
    """Apply WIDEN_LAST everywhere in a graph."""
    return graph_rewrite(sink, _WIDENINGS) if any(_is_widening(u) for u in sink.toposort()) else sink


def few_reads_widened_first(sink: UOp) -> UOp:
    """Widen 16-bit floats before windows that products read too seldom to be copied. To be applied after WIDEN_LAST."""
    return graph_rewrite(sink, _FEW_READS) if any(_is_widening(u) for u in sink.toposort()) else sink
