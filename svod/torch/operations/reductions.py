"""Sums, extrema, their positions, variance, scans, order."""
from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from svod.core.ir.dtype import DType
from svod.tensor import Tensor
from svod.torch.operations.table import aten, methods

Axes = int | Sequence[int] | None

methods("logsumexp")
methods("argmax argmin cumsum cumprod logcumsumexp aminmax argsort argsort.stable topk kthvalue msort", widens=False)


def axes(dim: Axes) -> int | tuple[int, ...] | None:
    """Axes as Tensor takes them: ATen's empty list means all."""
    return dim if dim is None or isinstance(dim, int) else tuple(dim) or None


@aten("sum", "sum.dim_IntList")
def sum_(x: Tensor, dim: Axes = None, keepdim: bool = False, dtype: DType | None = None) -> Tensor:
    """The sum along axes; in int64 for integers."""
    return x.sum(axes(dim), keepdim, dtype)


@aten("nansum")
def nansum(x: Tensor, dim: Axes = None, keepdim: bool = False, dtype: DType | None = None) -> Tensor:
    """The sum of the elements that are not NaN."""
    return (x if dtype is None else x.cast(dtype)).nansum(axes(dim), keepdim)


@aten("mean", "mean.dim")
def mean(x: Tensor, dim: Axes = None, keepdim: bool = False, dtype: DType | None = None) -> Tensor:
    """The mean along axes."""
    return x.mean(axes(dim), keepdim, dtype)


@aten("prod", "prod.dim_int")
def prod(x: Tensor, dim: Axes = None, keepdim: bool = False, dtype: DType | None = None) -> Tensor:
    """The product along an axis."""
    return x.prod(axes(dim), keepdim, dtype)


@aten("amax", "max", widens=False)
def amax(x: Tensor, dim: Axes = None, keepdim: bool = False) -> Tensor:
    """The largest element along axes."""
    return x.max(axes(dim), keepdim)


@aten("amin", "min", widens=False)
def amin(x: Tensor, dim: Axes = None, keepdim: bool = False) -> Tensor:
    """The smallest element along axes."""
    return x.min(axes(dim), keepdim)


@aten("max.dim", widens=False)
def max_with_position(x: Tensor, dim: int, keepdim: bool = False) -> tuple[Tensor, Any]:
    """The largest element along an axis, and where it is."""
    return x.max(dim, keepdim), lambda: x.argmax(dim, keepdim)


@aten("min.dim", widens=False)
def min_with_position(x: Tensor, dim: int, keepdim: bool = False) -> tuple[Tensor, Any]:
    """The smallest element along an axis, and where it is."""
    return x.min(dim, keepdim), lambda: x.argmin(dim, keepdim)


@aten("any", "any.dim", "any.dims", widens=False)
def any_(x: Tensor, dim: Axes = None, keepdim: bool = False) -> Tensor:
    """Whether an element is not zero."""
    return x.any(axes(dim), keepdim)


@aten("all", "all.dim", "all.dims", widens=False)
def all_(x: Tensor, dim: Axes = None, keepdim: bool = False) -> Tensor:
    """Whether no element is zero."""
    return x.all(axes(dim), keepdim)


def _correction(correction: float | None) -> float:
    return 1 if correction is None else correction


@aten("var.correction", "var.dim")
def var(x: Tensor, dim: Axes = None, unbiased: bool = True, keepdim: bool = False, *, correction: float | None = None) -> Tensor:
    """The variance along axes."""
    return x.var(axes(dim), _correction(correction) if unbiased else 0, keepdim)


@aten("std.correction", "std.dim")
def std(x: Tensor, dim: Axes = None, unbiased: bool = True, keepdim: bool = False, *, correction: float | None = None) -> Tensor:
    """The standard deviation along axes."""
    return x.std(axes(dim), _correction(correction) if unbiased else 0, keepdim)


@aten("var_mean.correction", "var_mean.dim")
def var_mean(x: Tensor, dim: Axes = None, unbiased: bool = True, keepdim: bool = False, *,
             correction: float | None = None) -> tuple[Tensor, Tensor]:
    """The variance and the mean along axes."""
    return x.var_mean(axes(dim), _correction(correction) if unbiased else 0, keepdim)


@aten("std_mean.correction")
def std_mean(x: Tensor, dim: Axes = None, *, correction: float | None = None, keepdim: bool = False) -> tuple[Tensor, Tensor]:
    """The standard deviation and the mean along axes."""
    return x.std_mean(axes(dim), _correction(correction), keepdim)


@aten("linalg_vector_norm")
def vector_norm(x: Tensor, p: float = 2, dim: Axes = None, keepdim: bool = False, dtype: DType | None = None) -> Tensor:
    """(Σ |x|ᵖ)^(1/p) along axes."""
    chosen = axes(dim)
    return (x if dtype is None else x.cast(dtype)).norm(p, (chosen,) if isinstance(chosen, int) else chosen, keepdim)


@aten("sort", "sort.stable", widens=False)
def sort(x: Tensor, dim: int = -1, descending: bool = False, *, stable: bool | None = True) -> tuple[Tensor, Tensor]:
    """The elements in order along an axis, and where they were."""
    found = x.sort(dim, descending)
    return found[0], found[1]


@aten("cummax", widens=False)
def cummax(x: Tensor, dim: int) -> tuple[Tensor, Tensor]:
    """The running maximum, and where it is."""
    found = x.cummax(dim)
    return found[0], found[1]


@aten("cummin", widens=False)
def cummin(x: Tensor, dim: int) -> tuple[Tensor, Tensor]:
    """The running minimum, and where it is."""
    found = x.cummin(dim)
    return found[0], found[1]


@aten("count_nonzero", "count_nonzero.dim_IntList", widens=False)
def count_nonzero(x: Tensor, dim: Axes = None) -> Tensor:
    """The number of elements that are not zero."""
    return x.count_nonzero(axes(dim))
