"""16-bit floats that are computed in float32 are widened as late as possible: they are moved, copied and multiplied as 16-bit numbers.

    WINDOW(PAD(CAST(x)))    →    CAST(WINDOW(PAD(x)))
"""
from __future__ import annotations

import math

from svod.core.ir.rewrite import Pattern, PatternMatcher, graph_rewrite
from svod.core.ir.uop import MOVEMENT, Ops, UOp


def _is_widening(u: UOp) -> bool:
    """Whether a node makes 32 or more bits of a 16-bit float."""
    return u.op is Ops.CAST and u.dtype.is_float and u.dtype.bits >= 32 and u.src[0].dtype.is_float and u.src[0].dtype.bits < 32


def _move_then_widen(u: UOp, cast: UOp) -> UOp | None:
    """A movement of 16-bit floats that were widened, with the conversion behind it, but before an EXPAND, which would repeat it. None: a
    fill may not be a number of 16 bits."""
    if not _is_widening(cast) or (u.op is Ops.PAD and u.arg[1] not in (0, math.inf, -math.inf)):
        return None
    x = cast.src[0]
    return UOp(Ops.CAST, cast.dtype, (UOp(u.op, x.dtype, (x,), u.arg),), cast.arg)


WIDEN_LAST = Pattern(MOVEMENT - {Ops.EXPAND}, (Pattern(Ops.CAST, name="cast"),), name="u"), _move_then_widen
"""The rule, for a PatternMatcher."""
_WIDENINGS = PatternMatcher([WIDEN_LAST])


def widened_last(sink: UOp) -> UOp:
    """Apply this rule everywhere in a graph."""
    return graph_rewrite(sink, _WIDENINGS) if any(_is_widening(u) for u in sink.toposort()) else sink
