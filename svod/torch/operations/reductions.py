"""Sums, extrema and their positions, variances, scans, sorting."""
from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

from svod.core.ir.dtype import DType, dtypes
from svod.tensor import Tensor, where
from svod.tensor.searching import histc
from svod.torch.operations.table import aten, methods

Axes = int | Sequence[int] | None

methods("logsumexp")
methods("argmax argmin cumsum cumprod cummax cummin logcumsumexp aminmax argsort argsort.stable sort sort.stable topk kthvalue msort",
        widens=False)


def axes(dim: Axes) -> int | tuple[int, ...] | None:
    """Convert axes for Tensor's methods: an empty list of ATen means all axes (None)."""
    return dim if dim is None or isinstance(dim, int) else tuple(dim) or None


def _over_axes(method: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap a method of Tensor that takes axes first, to convert ATen's axes."""
    return lambda x, dim=None, *args, **options: method(x, axes(dim), *args, **options)


for _name in ("sum", "sum.dim_IntList", "mean", "mean.dim", "prod", "prod.dim_int"):
    aten(_name)(_over_axes(getattr(Tensor, _name.partition(".")[0])))
for _name in ("amax", "amin", "max", "min", "any", "any.dim", "any.dims", "all", "all.dim", "all.dims", "count_nonzero",
              "count_nonzero.dim_IntList"):
    aten(_name, widens=False)(_over_axes(getattr(Tensor, _name.partition(".")[0])))


@aten("nansum")
def nansum(x: Tensor, dim: Axes = None, keepdim: bool = False, dtype: DType | None = None) -> Tensor:
    """The sum of the elements that are not NaN."""
    return (x if dtype is None else x.cast(dtype)).nansum(axes(dim), keepdim)


@aten("max.dim", widens=False)
def max_with_position(x: Tensor, dim: int, keepdim: bool = False) -> tuple[Tensor, Any]:
    """The largest element along an axis, and its position."""
    return x.max(dim, keepdim), lambda: x.argmax(dim, keepdim)


@aten("min.dim", widens=False)
def min_with_position(x: Tensor, dim: int, keepdim: bool = False) -> tuple[Tensor, Any]:
    """The smallest element along an axis, and its position."""
    return x.min(dim, keepdim), lambda: x.argmin(dim, keepdim)


@aten("median", widens=False)
def median(x: Tensor) -> Tensor:
    """The lower of the two middle values of all elements; NaN if there are none."""
    if 0 in x.shape and x.dtype.is_float:
        return Tensor.full((), math.nan, x.dtype)
    return x.median()


@aten("median.dim", widens=False)
def median_with_position(x: Tensor, dim: int, keepdim: bool = False) -> tuple[Tensor, Any]:
    """The lower of the two middle values along an axis, and its position; NaN and its first position if there is one."""
    def position() -> Tensor:
        found = x.kthvalue((x.shape[dim] + 1) // 2, dim, keepdim).indices
        if not x.dtype.is_float:
            return found
        nan = x.isnan().cast(dtypes.uint8)
        return where(nan.max(dim, keepdim).ne(0), nan.argmax(dim, keepdim), found)
    return x.median(dim, keepdim), position


@aten("nanmedian", widens=False)
def nanmedian(x: Tensor) -> Tensor:
    """The lower of the two middle values of all elements that are not NaN; NaN if there are none."""
    if 0 in x.shape and x.dtype.is_float:
        return Tensor.full((), math.nan, x.dtype)
    return nanmedian_with_position(x.ravel(), 0)[0]


@aten("nanmedian.dim", widens=False)
def nanmedian_with_position(x: Tensor, dim: int, keepdim: bool = False) -> tuple[Tensor, Tensor]:
    """The lower of the two middle values along an axis that are not NaN, and its position; the first element if all are."""
    counts = x.isnan().logical_not().cast(dtypes.int64).sum(dim, keepdim=True)
    position = x.argsort(dim).gather(dim, counts.sub(1).maximum(0).floor_divide(2))      # NaN comes last
    value = x.gather(dim, position)
    return (value, position) if keepdim else (value.squeeze(dim), position.squeeze(dim))


@aten("histc")
def histogram(x: Tensor, bins: int = 100, min: float = 0, max: float = 0) -> Tensor:
    """Count the elements in equal parts of a range."""
    return histc(x, bins, min, max)


def _spread(method: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap a method of Tensor for a variance or a standard deviation, so that it takes ATen's options. The default correction is 1."""
    def compute(x: Tensor, dim: Axes = None, unbiased: bool = True, keepdim: bool = False, *, correction: float | None = None) -> Any:
        return method(x, axes(dim), int(unbiased) if correction is None else correction, keepdim)
    return compute


for _name in ("var.correction", "var.dim", "std.correction", "std.dim", "var_mean.correction", "var_mean.dim", "std_mean.correction"):
    aten(_name)(_spread(getattr(Tensor, _name.partition(".")[0])))


@aten("linalg_vector_norm")
def vector_norm(x: Tensor, p: float = 2, dim: Axes = None, keepdim: bool = False, dtype: DType | None = None) -> Tensor:
    """The p-norm (Σ |x|ᵖ)^(1/p) along axes."""
    chosen = axes(dim)
    return (x if dtype is None else x.cast(dtype)).norm(p, (chosen,) if isinstance(chosen, int) else chosen, keepdim)
