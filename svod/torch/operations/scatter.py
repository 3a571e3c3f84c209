"""Writes of values to given positions."""
from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from svod.core.ir.dtype import dtypes
from svod.errors import UnsupportedError
from svod.tensor import Tensor
from svod.tensor import where as select
from svod.torch.operations.table import aten, methods
from svod.torch.operations.views import strided_positions

methods("scatter.src scatter.value scatter.reduce scatter.value_reduce scatter_add scatter_reduce.two index_add index_copy "
        "index_fill.int_Scalar masked_scatter", widens=False)


def _fitting(x: Tensor, value: Any) -> Any:
    return value.cast(x.dtype) if isinstance(value, Tensor) else value


@aten("index_put", "_unsafe_index_put", widens=False)
def index_put(x: Tensor, indices: Sequence[Tensor | None], values: Tensor, accumulate: bool = False) -> Tensor:
    """Write values to positions in integer tensors, one for each of x's first axes; returns the changed x."""
    given = [(i, t) for i, t in enumerate(indices) if t is not None]
    if any(t.dtype.kind == "b" for _, t in given):
        return _put_by_mask(x, given, values, accumulate)
    if not accumulate:
        return x._put(given, _fitting(x, values))
    order, first, places = x._points(given)
    moved = x.permute(order)
    after = moved.shape[first + len(given):]
    flat = moved.reshape(*moved.shape[:first], -1, *after)
    count = places.numel()
    spread = _fitting(x, values).broadcast_to((*moved.shape[:first], *places.shape, *after)).reshape(*moved.shape[:first], count, *after)
    return flat.index_add(first, places.reshape(-1), spread).reshape(moved.shape).permute([order.index(a) for a in range(x.ndim)])


def _put_by_mask(x: Tensor, given: Sequence[tuple[int, Tensor]], values: Tensor, accumulate: bool) -> Tensor:
    """Write one value to all positions where a mask over the first axes of x is True; returns the changed x."""
    (axis, mask), *others = given
    if others or axis or accumulate or values.numel() != 1:
        raise UnsupportedError("index_put with a mask and several values: their number depends on values")
    return select(mask.reshape(*mask.shape, *(1,) * (x.ndim - mask.ndim)), _fitting(x, values).reshape(), x)


@aten("index_reduce", widens=False)
def index_reduce(x: Tensor, dim: int, index: Tensor, source: Tensor, reduce: str, *, include_self: bool = True) -> Tensor:
    """Combine slices of `source` with the slices of x at positions in a list; returns the changed x."""
    if x.ndim == 0:
        return x.reshape(1).index_reduce(0, index, source.reshape(-1), reduce, include_self=include_self).reshape()
    return x.index_reduce(dim, index, source, reduce, include_self=include_self)


@aten("slice_scatter", widens=False)
def slice_scatter(x: Tensor, src: Tensor, dim: int = 0, start: int | None = None, end: int | None = None, step: int = 1) -> Tensor:
    """Replace x[start:end:step] along an axis; returns the changed x."""
    at, n = dim % x.ndim, x.shape[dim]
    begin, stop, step = slice(start, end, step).indices(n)
    src = _fitting(x, src)
    if begin >= stop:
        return x
    if step == 1:
        sides = [(begin, n - max(begin, stop)) if i == at else (0, 0) for i in range(x.ndim)]
        inside = Tensor.full(src.shape, True).pad(sides)
        return src.pad(sides).where(inside, x)
    return x.index_copy(at, Tensor.arange(begin, stop, step, dtype=dtypes.int64), src)


@aten("select_scatter", widens=False)
def select_scatter(x: Tensor, src: Tensor, dim: int, index: int) -> Tensor:
    """Replace x[index] along an axis; returns the changed x."""
    at = index % x.shape[dim]
    return slice_scatter(x, src.unsqueeze(dim % x.ndim), dim, at, at + 1)


@aten("as_strided_scatter", widens=False)
def as_strided_scatter(x: Tensor, src: Tensor, size: Sequence[int], stride: Sequence[int], storage_offset: int | None = None) -> Tensor:
    """Replace the elements of x, which is contiguous in PyTorch, at positions storage_offset + Σ index · stride; returns the changed x."""
    positions = Tensor(strided_positions(size, stride, storage_offset or 0).reshape(-1))
    return x.reshape(-1).index_copy(0, positions, _fitting(x, src).reshape(-1)).reshape(x.shape)


@aten("put", widens=False)
def put(x: Tensor, index: Tensor, source: Tensor, accumulate: bool = False) -> Tensor:
    """Write values to positions in the flattened x; returns the changed x."""
    return index_put(x.reshape(-1), [index], source, accumulate).reshape(x.shape)


@aten("diagonal_scatter", widens=False)
def diagonal_scatter(x: Tensor, src: Tensor, offset: int = 0, dim1: int = 0, dim2: int = 1) -> Tensor:
    """Replace a diagonal of x by the last axis of `src`: elements whose position along dim2 exceeds that along dim1 by `offset`. Returns
    the changed x."""
    a, b = dim1 % x.ndim, dim2 % x.ndim
    order = [*(i for i in range(x.ndim) if i not in (a, b)), a, b]
    rows, columns, n = x.shape[a], x.shape[b], src.shape[-1]
    if 0 in src.shape:
        return x
    before = (max(0, -offset), max(0, offset))
    sides = [(0, 0)] * (x.ndim - 2) + [(before[0], rows - n - before[0]), (before[1], columns - n - before[1])]
    inside = Tensor.arange(columns) - Tensor.arange(rows).unsqueeze(-1) == offset
    put: Tensor = _fitting(x, src).diag_embed().pad(sides).where(inside, x.permute(order))
    return put.permute([order.index(i) for i in range(x.ndim)])
