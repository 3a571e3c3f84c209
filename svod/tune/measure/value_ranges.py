"""Interval analysis of a kernel: for each node of its AST, an interval that holds its values for any inputs.

    |x|, x·x, √x, eˣ, max(x, 0)                [0, ∞]
    min(max(x, -1), 1)                         [-1, 1]
    1 - y·y, with y in [-1, 1]                 [0, 1]
    Σ of terms that are not negative           [0, ∞]

The intervals hold for every correct program of the AST, with fused multiply-adds and any order of summation: rounding is monotone, so a
value that is not negative before rounding is not negative afterwards. An interval says nothing about NaN: any node may also be NaN.
"""
from __future__ import annotations

import math
from collections.abc import Mapping
from typing import NamedTuple

import numpy as np

from svod.core.ir.dtype import DType
from svod.core.ir.uop import COMPARISONS, Ops, UOp
from svod.core.spec.values import round_to


class ValueRange(NamedTuple):
    """The interval of a value v: low ≤ v ≤ high, or v is NaN."""

    low: float = -math.inf
    high: float = math.inf


ANY_VALUE = ValueRange()
POSITIVE = ValueRange(0.0)      # zero included
NEGATIVE = ValueRange(high=0.0)
POSITIVE_RESULTS = frozenset({Ops.EXP, Ops.EXP2, Ops.SQRT})
POSITIVE_OF_POSITIVE = frozenset({Ops.RECIPROCAL, Ops.FDIV, Ops.POW})
ROUNDINGS = {Ops.FLOOR: np.floor, Ops.CEIL: np.ceil, Ops.TRUNC: np.trunc, Ops.ROUND: np.rint}


def range_of(u: UOp, known: Mapping[UOp, ValueRange]) -> ValueRange:
    """The interval of a node's values. `known`: the intervals of its sources."""
    if u.op is Ops.CONST:
        return ANY_VALUE if math.isnan(u.arg) else ValueRange(float(u.arg), float(u.arg))
    if not u.dtype.is_float:
        return ValueRange(0.0, 1.0) if u.dtype.kind == "b" or u.op in COMPARISONS else ANY_VALUE if u.dtype.is_signed else POSITIVE
    src = [known[s] for s in u.src]
    if u.op in (Ops.STAGE, Ops.INDEX) and u.src[0].op is not Ops.PARAM:
        return src[0]
    if u.op is Ops.GEP:
        return src[0] if u.arg == 0 else ANY_VALUE
    if u.op is Ops.REDUCE:
        return _reduced(u.arg[0], src[0])
    if u.op in POSITIVE_RESULTS or (u.op in POSITIVE_OF_POSITIVE and all(r.low >= 0 for r in src)):
        return POSITIVE
    if u.op is Ops.MOD:     # MOD has the sign of the divisor
        return ValueRange(0.0, src[1].high) if src[1].low >= 0 else ANY_VALUE
    low, high = _ends(u, src)
    return ValueRange(_rounded(low, u.dtype, -math.inf), _rounded(high, u.dtype, math.inf))


def _ends(u: UOp, src: list[ValueRange]) -> tuple[float, float]:
    """The ends of the interval of a node's exact result, before rounding; ANY_VALUE for an operation without a rule here."""
    op = u.op
    if op is Ops.NEG:
        return -src[0].high, -src[0].low
    if op is Ops.ABS:
        a = src[0]
        return max(0.0, a.low, -a.high), max(-a.low, a.high)
    if op is Ops.CAST:
        return src[0]
    if op in ROUNDINGS:
        return float(ROUNDINGS[op](src[0].low)), float(ROUNDINGS[op](src[0].high))
    if op is Ops.WHERE:
        return min(src[1].low, src[2].low), max(src[1].high, src[2].high)
    if op is Ops.MAX:
        return max(src[0].low, src[1].low), max(src[0].high, src[1].high)
    if op is Ops.MIN:
        return min(src[0].low, src[1].low), min(src[0].high, src[1].high)
    if op is Ops.ADD:
        return src[0].low + src[1].low, src[0].high + src[1].high
    if op is Ops.SUB:
        return src[0].low - src[1].high, src[0].high - src[1].low
    if op is Ops.MUL:
        return _product(u.src[0] is u.src[1], *src)
    if op is Ops.MULACC:
        low, high = _product(u.src[0] is u.src[1], *src[:2])
        return low + src[2].low, high + src[2].high
    return ANY_VALUE


def _product(is_square: bool, a: ValueRange, b: ValueRange) -> tuple[float, float]:
    # an infinite end means that values are finite and unbounded, so its product with 0 is 0 and not NaN
    ends = [0.0 if x == 0 or y == 0 else x * y for x in a for y in b]
    return max(0.0, min(ends)) if is_square else min(ends), max(ends)


def _reduced(combiner: str, x: ValueRange) -> ValueRange:
    if combiner in ("ADD", "MUL"):
        return POSITIVE if x.low >= 0 else NEGATIVE if combiner == "ADD" and x.high <= 0 else ANY_VALUE
    return x


def _rounded(end: float, dtype: DType, unknown: float) -> float:
    """Round an end of an interval to the dtype; returns `unknown` for NaN, which infinities that cancel give."""
    return unknown if math.isnan(end) else float(round_to(np.asarray(end, np.float64), dtype))
