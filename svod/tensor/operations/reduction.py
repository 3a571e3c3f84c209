"""Reductions: sum, prod, extrema, their positions, mean and variance, any and all.

Axes are an int, a tuple, or None for all, named `dim`/`keepdim` as in PyTorch or `axis`/`keepdims` as in NumPy. 16-bit floats are summed in
float32 and rounded once. Integers are summed in 64 bits and give 64-bit results, as in NumPy.
"""
from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Self

from svod.core.graph import graph
from svod.core.graph.shapes import normalize_axes
from svod.core.ir.dtype import DType, accumulator, dtypes
from svod.errors import DTypeError, ShapeError
from svod.tensor.base import DTypeLike, as_dtype
from svod.tensor.operations.indexing import Indexing
from svod.tensor.precision import rounds_once

Axes = int | Sequence[int] | None


class ReductionMethods(Indexing):
    """Operations that reduce axes."""

    __slots__ = ()

    def _axes(self, name: str, dim: Axes, axis: Axes) -> tuple[int, ...]:
        if dim is not None and axis is not None:
            raise ShapeError(f"{name}: give the axes once, as dim or as axis")
        wanted = axis if dim is None else dim
        if not self.ndim and wanted in (0, -1, (0,), (-1,), [0], [-1]):     # a tensor without axes accepts these, as in PyTorch
            return ()
        return normalize_axes(name, wanted, self.ndim)

    def _reduce(self, combiner: str, axes: tuple[int, ...], keep: bool) -> Self:
        result = self.from_uop(graph.reduce_axis(self.uop, combiner, axes))
        return result if keep else result._without(axes)

    def _without(self, axes: tuple[int, ...]) -> Self:
        return self.reshape(tuple(n for i, n in enumerate(self.shape) if i not in axes))

    def _count(self, axes: tuple[int, ...]) -> int:
        return math.prod(self.shape[a] for a in axes)

    # -- sums ------------------------------------------------------------------------------------
    def sum(self, dim: Axes = None, keepdim: bool = False, dtype: DTypeLike | None = None, *, axis: Axes = None,
            keepdims: bool = False) -> Self:
        """The sum over axes. Integers and bools give int64, unsigned integers uint64, unless `dtype` is given."""
        return self._accumulate("sum", "ADD", self._axes("sum", dim, axis), keepdim or keepdims, dtype)

    def nansum(self, dim: Axes = None, keepdim: bool = False, *, axis: Axes = None, keepdims: bool = False) -> Self:
        """The sum of the elements that are not NaN."""
        return self._numbers().sum(dim, keepdim, axis=axis, keepdims=keepdims)

    @rounds_once
    def nanmean(self, dim: Axes = None, keepdim: bool = False, *, axis: Axes = None, keepdims: bool = False) -> Self:
        """The mean of the elements that are not NaN; NaN if all are NaN."""
        given = self._float()
        total = given._numbers().sum(dim, keepdim, axis=axis, keepdims=keepdims)
        return total.div(given.isnan().logical_not().sum(dim, keepdim, axis=axis, keepdims=keepdims))

    def _numbers(self) -> Self:
        """Replace NaN by 0."""
        return self.masked_fill(self.isnan(), 0) if self.dtype.is_float else self

    def prod(self, dim: Axes = None, keepdim: bool = False, dtype: DTypeLike | None = None, *, axis: Axes = None,
             keepdims: bool = False) -> Self:
        """The product over axes, with the dtype of `sum`."""
        return self._accumulate("prod", "MUL", self._axes("prod", dim, axis), keepdim or keepdims, dtype)

    def _accumulate(self, name: str, combiner: str, axes: tuple[int, ...], keep: bool, dtype: DTypeLike | None) -> Self:
        result = sum_dtype(self.dtype) if dtype is None else as_dtype(dtype)
        if result.kind == "b":
            raise DTypeError(f"{name} with dtype bool: use any or all")
        return self.cast(accumulator(result))._reduce(combiner, axes, keep).cast(result)

    def mean(self, dim: Axes = None, keepdim: bool = False, dtype: DTypeLike | None = None, *, axis: Axes = None,
             keepdims: bool = False) -> Self:
        """The arithmetic mean, a float: float32 for integers. NaN without elements."""
        axes = self._axes("mean", dim, axis)
        result = self._float_dtype() if dtype is None else as_dtype(dtype)
        wide = self.cast(accumulator(result))
        return wide._reduce("ADD", axes, keepdim or keepdims).div(wide._number(self._count(axes))).cast(result)

    @rounds_once
    def var(self, dim: Axes = None, correction: int | float = 1, keepdim: bool = False, *, unbiased: bool | None = None,
            axis: Axes = None, keepdims: bool = False) -> Self:
        """The variance: the sum of squared distances from the mean, divided by `count - correction`. NumPy's default correction is 0.

        The rounding error of the mean shifts all distances d by the same amount; Σd² - (Σd)²/count removes this shift."""
        axes = self._axes("var", dim, axis)
        if unbiased is not None:
            correction = 1 if unbiased else 0
        x = self._float()
        distances, keep = x.sub(x.mean(axes, keepdim=True)), keepdim or keepdims
        count = x._number(self._count(axes))
        off = distances._reduce("ADD", axes, keep)
        squares = distances.square()._reduce("ADD", axes, keep)
        total = squares.sub(off.mul(off.div(count))).maximum(0).where(squares < math.inf, squares)
        rest = max(0.0, count - correction) if isinstance(count, float) else count.sub(correction).maximum(0)
        return total.div(rest)

    @rounds_once
    def std(self, dim: Axes = None, correction: int | float = 1, keepdim: bool = False, *, unbiased: bool | None = None,
            axis: Axes = None, keepdims: bool = False) -> Self:
        """The standard deviation: the square root of `var`."""
        return self.var(dim, correction, keepdim, unbiased=unbiased, axis=axis, keepdims=keepdims).sqrt()

    @rounds_once
    def var_mean(self, dim: Axes = None, correction: int | float = 1, keepdim: bool = False, *, unbiased: bool | None = None,
                 axis: Axes = None, keepdims: bool = False) -> tuple[Self, Self]:
        """Both `var` and `mean`, as a tuple."""
        variance = self.var(dim, correction, keepdim, unbiased=unbiased, axis=axis, keepdims=keepdims)
        return variance, self.mean(dim, keepdim, axis=axis, keepdims=keepdims)

    @rounds_once
    def std_mean(self, dim: Axes = None, correction: int | float = 1, keepdim: bool = False, *, unbiased: bool | None = None,
                 axis: Axes = None, keepdims: bool = False) -> tuple[Self, Self]:
        """Both `std` and `mean`, as a tuple."""
        spread = self.std(dim, correction, keepdim, unbiased=unbiased, axis=axis, keepdims=keepdims)
        return spread, self.mean(dim, keepdim, axis=axis, keepdims=keepdims)

    # -- extrema ---------------------------------------------------------------------------------
    def max(self, dim: Axes = None, keepdim: bool = False, *, axis: Axes = None, keepdims: bool = False) -> Self:
        """The largest value, without its position (PyTorch's `amax`). NaN if any element is. Raises ShapeError without elements."""
        return self._extreme("max", "MAX", dim, axis, keepdim or keepdims)

    def min(self, dim: Axes = None, keepdim: bool = False, *, axis: Axes = None, keepdims: bool = False) -> Self:
        """The smallest value, without its position (PyTorch's `amin`). NaN if any element is. Raises ShapeError without elements."""
        return self._extreme("min", "MIN", dim, axis, keepdim or keepdims)

    def amax(self, dim: Axes = None, keepdim: bool = False) -> Self: return self.max(dim, keepdim)
    def amin(self, dim: Axes = None, keepdim: bool = False) -> Self: return self.min(dim, keepdim)

    def _extreme(self, name: str, combiner: str, dim: Axes, axis: Axes, keep: bool) -> Self:
        axes = self._axes(name, dim, axis)
        if self._count(axes) == 0:   # raised even if the result has no elements, as in NumPy and PyTorch
            raise ShapeError(f"{name} of {self.shape} over axes {axes}: there is no element")
        if self.dtype.kind == "b":
            combiner = "OR" if combiner == "MAX" else "AND"
        return self._reduce(combiner, axes, keep)

    def argmax(self, dim: int | None = None, keepdim: bool = False, *, axis: int | None = None, keepdims: bool = False) -> Self:
        """The int64 position of the largest value along an axis (None: in the flattened tensor). Of equal values the first counts; NaN
        is largest."""
        return self._arg_extreme("argmax", "ARGMAX", dim, axis, keepdim or keepdims)

    def argmin(self, dim: int | None = None, keepdim: bool = False, *, axis: int | None = None, keepdims: bool = False) -> Self:
        """The int64 position of the smallest value along an axis (None: in the flattened tensor). Of equal values the first counts; NaN
        is smallest."""
        return self._arg_extreme("argmin", "ARGMIN", dim, axis, keepdim or keepdims)

    def _arg_extreme(self, name: str, combiner: str, dim: int | None, axis: int | None, keep: bool) -> Self:
        if dim is not None and axis is not None:
            raise ShapeError(f"{name}: give the axis once, as dim or as axis")
        wanted = axis if dim is None else dim
        if wanted is None or (not self.ndim and wanted in (0, -1)):
            flat = self.ravel()._arg_extreme(name, combiner, 0, None, False)
            return flat.reshape((1,) * self.ndim) if keep else flat
        at = self._axis(name, wanted)
        values = self.cast(dtypes.uint8) if self.dtype.kind == "b" else self
        n = self.shape[at]
        positions = graph.reshape(graph.iota(n), tuple(n if i == at else 1 for i in range(self.ndim)))
        result = self.from_uop(graph.arg_reduce(values.uop, graph.broadcast(positions, self.shape), combiner, (at,)))
        return (result if keep else result._without((at,))).cast(dtypes.int64)

    def aminmax(self, *, dim: int | None = None, keepdim: bool = False) -> tuple[Self, Self]:
        """Both `min` and `max`, as a tuple."""
        return self.min(dim, keepdim), self.max(dim, keepdim)

    # -- truth -----------------------------------------------------------------------------------
    def any(self, dim: Axes = None, keepdim: bool = False, *, axis: Axes = None, keepdims: bool = False) -> Self:
        """True if at least one element is nonzero."""
        return self.cast(dtypes.bool)._reduce("OR", self._axes("any", dim, axis), keepdim or keepdims)

    def all(self, dim: Axes = None, keepdim: bool = False, *, axis: Axes = None, keepdims: bool = False) -> Self:
        """True if no element is zero."""
        return self.cast(dtypes.bool)._reduce("AND", self._axes("all", dim, axis), keepdim or keepdims)

    def count_nonzero(self, dim: Axes = None) -> Self:
        """The int64 number of nonzero elements."""
        return self.cast(dtypes.bool).sum(dim)

    # -- exponentials ----------------------------------------------------------------------------
    @rounds_once
    def logsumexp(self, dim: Axes = None, keepdim: bool = False, *, axis: Axes = None, keepdims: bool = False) -> Self:
        """The logarithm of a sum, log(sum(exp(x))), shifted by the maximum to avoid overflow."""
        axes = self._axes("logsumexp", dim, axis)
        x = self._float()
        if self._count(axes) == 0:
            return x._reduce("ADD", axes, keepdim or keepdims).full_like(-math.inf)
        peak = x.max(axes, keepdim=True)
        # an infinite maximum would cause inf - inf, which is NaN
        peak = peak.where(peak.isfinite(), 0.0)
        result = x.sub(peak).exp()._reduce("ADD", axes, True).log().add(peak)
        return result if keepdim or keepdims else result._without(axes)


def sum_dtype(dtype: DType) -> DType:
    """The dtype of a sum or product, by NumPy's rule: floats keep theirs, unsigned integers give uint64, other integers and bools int64."""
    if dtype.is_float:
        return dtype
    return dtypes.uint64 if dtype.kind == "u" else dtypes.int64
