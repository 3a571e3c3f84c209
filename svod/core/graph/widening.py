"""A rewrite that moves conversions of 16-bit floats to wider floats above movements, so that memory and copies stay 16 bits wide.

    WINDOW(PAD(CAST(x)))    →    CAST(WINDOW(PAD(x)))
"""
from __future__ import annotations

import math

from svod.core.ir.rewrite import Pattern, PatternMatcher, graph_rewrite
from svod.core.ir.uop import MOVEMENT, Ops, UOp


def _is_widening(u: UOp) -> bool:
    """Whether a node converts a 16-bit float to a float of 32 or more bits."""
    return u.op is Ops.CAST and u.dtype.is_float and u.dtype.bits >= 32 and u.src[0].dtype.is_float and u.src[0].dtype.bits < 32


def _move_then_widen(u: UOp, cast: UOp) -> UOp | None:
    """Return the movement `u` on the 16-bit floats and the conversion after it; None if `cast` does not widen 16-bit floats, or if u is a
    PAD whose fill may not be a 16-bit number."""
    if not _is_widening(cast) or (u.op is Ops.PAD and u.arg[1] not in (0, math.inf, -math.inf)):
        return None
    x = cast.src[0]
    return UOp(Ops.CAST, cast.dtype, (UOp(u.op, x.dtype, (x,), u.arg),), cast.arg)


WIDEN_LAST = Pattern(MOVEMENT - {Ops.EXPAND}, (Pattern(Ops.CAST, name="cast"),), name="u"), _move_then_widen
"""The rule, for a PatternMatcher."""
_WIDENINGS = PatternMatcher([WIDEN_LAST])


def widened_last(sink: UOp) -> UOp:
    """Apply WIDEN_LAST everywhere in a graph."""
    return graph_rewrite(sink, _WIDENINGS) if any(_is_widening(u) for u in sink.toposort()) else sink
