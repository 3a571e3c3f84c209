"""Positions in sorted sequences, and histograms, as expressions of comparisons, gathers and scatters."""
from __future__ import annotations

import math
from typing import Any

from svod.core.ir.dtype import dtypes
from svod.core.ir.variable import number_of, upper
from svod.errors import ShapeError
from svod.tensor.host import as_float
from svod.tensor.tensor import Tensor, where

MOST_COUNTED = 128         # elements of a sequence; with at most as many, counting those that precede a value is faster than halving


def searchsorted(sorted_sequence: Tensor, values: Any, right: bool = False) -> Tensor:
    """The position (int64) of each value in the ascending last axis of `sorted_sequence`: before equal elements, or after them with
    `right`. NaN comes last. There is one sequence for all values, or one for each row of values. Raises ShapeError for rows that do not
    match."""
    wanted = values if isinstance(values, Tensor) else Tensor(values)
    if sorted_sequence.ndim == 0 or (sorted_sequence.ndim != 1 and sorted_sequence.shape[:-1] != wanted.shape[:-1]):
        raise ShapeError(f"searchsorted of values {wanted.shape} in {sorted_sequence.shape}: all axes but the last must agree")
    sequence, wanted = (t.cast(dtypes.uint8) if t.dtype.kind == "b" else t for t in (sorted_sequence, wanted))
    if 0 in (*sequence.shape, *wanted.shape):
        return Tensor.full(wanted.shape, 0, dtypes.int64)
    if upper(sequence.shape[-1]) <= MOST_COUNTED:
        others = sequence if sequence.ndim == 1 else sequence.unsqueeze(-2)
        return _precedes(others, wanted.unsqueeze(-1), right).cast(dtypes.int32).sum(-1).cast(dtypes.int64)
    return _by_halving(sequence, wanted, right)


def _precedes(element: Tensor, value: Tensor, right: bool) -> Tensor:
    """Whether an element of a sequence comes before the position of a value."""
    found = element.le(value) if right else element.lt(value)
    if not value.dtype.is_float:
        return found
    nan = value.isnan()
    return found | (nan if right or not element.dtype.is_float else nan & element.eq(element))


def _by_halving(sequence: Tensor, values: Tensor, right: bool) -> Tensor:
    """Compute `searchsorted` by a binary search: each step decides one bit of the position."""
    n, flat = sequence.shape[-1], sequence.ravel()
    kind = dtypes.int32 if upper(math.prod(sequence.shape)) < 2 ** 31 else dtypes.int64
    count = Tensor.from_uop(number_of(n, kind))
    first = Tensor.full((), 0, kind)
    if sequence.ndim > 1:
        first = Tensor.arange(math.prod(sequence.shape[:-1]), dtype=kind).mul(count).reshape(*sequence.shape[:-1], 1)
    position = Tensor.full(values.shape, 0, kind)
    for bit in reversed(range(upper(n).bit_length())):
        further = position.add(1 << bit)
        before = _precedes(flat.take(further.minimum(count).add(first).sub(1), 0), values, right)
        position = further.where(further.le(count) & before, position)
    return position.cast(dtypes.int64)


def histc(x: Tensor, bins: int = 100, min: float = 0, max: float = 0) -> Tensor:
    """Count the elements in each of `bins` equal parts of min … max, by default from the least to the largest number; elements outside
    and NaN are not counted. The result has the dtype of `x`. Raises ShapeError for no bins or max below min."""
    if bins < 1 or max < min:
        raise ShapeError(f"histc with {bins} bins of {min} … {max}: there must be a bin, and max cannot be below min")
    t = as_float("histc", x).ravel()
    if 0 in t.shape:
        return Tensor.full((bins,), 0, t.dtype)
    low, high = (Tensor.full((), float(limit), t.dtype) for limit in (min, max))
    if min == max:
        low, high = where(t.isnan(), math.inf, t).min(), where(t.isnan(), -math.inf, t).max()
    part = t.sub(low).mul(bins).div(high.sub(low)).clamp(0, bins - 1)      # the last part includes max
    part = where(low.eq(high), bins // 2, part)         # equal elements lie in the middle, as if the parts began 1 below and ended 1 above
    place = where(t.ge(low) & t.le(high), part, bins).cast(dtypes.int32)      # out of range: skipped
    return Tensor.full((bins,), 0, dtypes.int32).scatter_add(0, place, 1).cast(t.dtype)
