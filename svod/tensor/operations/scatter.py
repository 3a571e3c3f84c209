"""Scatter and the operations built on it, which write values at positions given by tensors. Names, signatures and rules are PyTorch's.

A scatter is a library kernel that loops over the values in order. Positions may repeat: the last value is kept, or all values are combined.
16-bit floats are combined in float32 and rounded once. Negative positions count from the end. A position out of range in a list or an array
raises an error. In a tensor, whose values are not known when the graph is built, it is skipped.
"""
from __future__ import annotations

import math
from typing import Any, Self

from svod.core.graph import graph
from svod.core.graph.shapes import broadcast_shapes, shape_of
from svod.core.ir.dtype import accumulator, dtypes
from svod.core.ir.uop import Ops
from svod.core.ir.variable import is_symbolic, number_of, upper
from svod.errors import DTypeError, ShapeError, UnsupportedError
from svod.tensor.base import Scalar, is_scalar
from svod.tensor.operations.elementwise import Operand
from svod.tensor.operations.ordered import Ordered
from svod.tensor.precision import rounds_once

_REDUCTIONS = {"sum": "ADD", "add": "ADD", "prod": "MUL", "multiply": "MUL", "amax": "MAX", "amin": "MIN"}


class Scatter(Ordered):
    """Scatter operations such as index_add, and selection of elements by a mask."""

    __slots__ = ()

    def scatter(self, dim: int, index: Operand, src: Operand, *, reduce: str | None = None) -> Self:
        """Copy self and write `out[index[i][j]][j] = src[i][j]` for dim 0; the last value for a position is kept. `reduce`: 'add' or
        'multiply'."""
        if reduce not in (None, "add", "multiply"):
            raise UnsupportedError(f"scatter with reduce={reduce!r}: use 'add', 'multiply', or scatter_reduce")
        return self._scatter("scatter", dim, index, src, "SET" if reduce is None else _REDUCTIONS[reduce])

    def scatter_add(self, dim: int, index: Operand, src: Operand) -> Self:
        """Copy self and add `src` at the positions of `scatter`."""
        return self._scatter("scatter_add", dim, index, src, "ADD")

    def scatter_reduce(self, dim: int, index: Operand, src: Operand, reduce: str, *, include_self: bool = True) -> Self:
        """Copy self and combine values by 'sum', 'prod', 'mean', 'amax' or 'amin' at the positions of `scatter`. Without `include_self`,
        an element that gets values is replaced, not combined. The mean of integers is rounded down."""
        if reduce not in ("sum", "prod", "mean", "amax", "amin"):
            raise UnsupportedError(f"scatter_reduce with reduce={reduce!r}: use 'sum', 'prod', 'mean', 'amax' or 'amin'")
        if reduce == "mean":
            return self._scatter_mean(dim, index, self._values_for("scatter_reduce", src), include_self)
        combiner = _REDUCTIONS[reduce]
        base = self
        if not include_self:
            neutral = {"ADD": 0, "MUL": 1, "MAX": self.dtype.min, "MIN": self.dtype.max}[combiner]
            base = self._scatter("scatter_reduce", dim, index, neutral, "SET")
        return base._scatter("scatter_reduce", dim, index, src, combiner)

    @rounds_once
    def _scatter_mean(self, dim: int, index: Operand, src: Operand, include_self: bool) -> Self:
        """Compute `scatter_reduce` by 'mean'."""
        total = self.scatter_reduce(dim, index, src, "sum", include_self=include_self)
        counts = self.full(self.shape, int(include_self), dtypes.int32)._scatter("scatter_reduce", dim, index, 1, "ADD")
        counts = counts.maximum(1).cast(self.dtype)
        return total.div(counts) if self.dtype.is_float else total.floor_divide(counts)

    def index_add(self, dim: int, index: Operand, source: Operand, *, alpha: Scalar = 1) -> Self:
        """Copy self and add `alpha · source[j]` to slice `index[j]` along an axis, for each j."""
        values = self._values_for("index_add", self._as_tensor(source))
        places = self._spread("index_add", dim, index, values)
        return self._scatter("index_add", dim, places, values, "ADD") if alpha == 1 else self._add_scaled(dim, places, values, alpha)

    @rounds_once
    def _add_scaled(self, dim: int, places: Self, values: Operand, alpha: Scalar) -> Self:
        """Compute `index_add` of alpha · values at `places`, which has one position per value."""
        return self._scatter("index_add", dim, places, values.mul(alpha), "ADD")

    def index_reduce(self, dim: int, index: Operand, source: Operand, reduce: str, *, include_self: bool = True) -> Self:
        """Copy self and combine `source[j]` with slice `index[j]` along an axis, for each j, as `scatter_reduce` does."""
        values = self._values_for("index_reduce", self._as_tensor(source))
        return self.scatter_reduce(dim, self._spread("index_reduce", dim, index, values), values, reduce, include_self=include_self)

    def index_copy(self, dim: int, index: Operand, source: Operand) -> Self:
        """Copy self and replace slice `index[j]` along an axis by `source[j]`, for each j; the last slice for a position is kept."""
        values = self._as_tensor(source)
        return self._scatter("index_copy", dim, self._spread("index_copy", dim, index, values), values, "SET")

    def index_fill(self, dim: int, index: Operand, value: Scalar) -> Self:
        """Copy self and fill the slices at `index` along an axis with a number."""
        at = self._axis("index_fill", dim)
        chosen = self._positions("index_fill", index, self.shape[at])
        # scatter one row of marks instead of whole slices
        marks = self.full((self.shape[at],), 0, dtypes.uint8)._scatter("index_fill", 0, chosen.ravel(), 1, "SET")
        return self.masked_fill(marks.cast(dtypes.bool).reshape(tuple(-1 if i == at else 1 for i in range(self.ndim))), value)

    def _put(self, tensors: list[tuple[int, Self]], value: Self) -> Self:
        """Copy self and replace the elements that these index tensors read by `value`, which is broadcast to them. The last value for an
        element is kept, and positions out of range are skipped. Single elements are scattered. Of slices a small scatter finds the value
        for each position, and a `where` selects it."""
        order, first, index = self._points(tensors)
        moved = self.permute(order)
        shape = (*moved.shape[:first], *index.shape, *moved.shape[first + len(tensors):])
        given = self.from_uop(graph.broadcast(value.uop, shape, "t[…] = value"))
        if 0 in shape:
            return self
        flat = moved.reshape(*moved.shape[:first], -1, *moved.shape[first + len(tensors):])
        extent, count = flat.shape[first], index.numel()
        place = index.ravel()
        place = place.where(place.ge(0), upper(extent))
        if flat.ndim == 1:
            changed = flat._scatter("t[…] = value", 0, place, given.ravel(), "SET")
        else:
            kind = dtypes.int32 if count < 2 ** 31 else dtypes.int64
            nothing, numbers = self.full((extent,), -1, kind), self.arange(count, dtype=kind)
            source = nothing._scatter("t[…] = value", 0, place, numbers, "SET")
            rows = given.reshape(*shape[:first], count, *shape[first + index.ndim:]).take(source.maximum(0), first)
            changed = rows.where(source.ge(0).reshape(*(extent if a == first else 1 for a in range(flat.ndim))), flat)
        return changed.reshape(moved.shape).permute([order.index(a) for a in range(self.ndim)])

    def _spread(self, name: str, dim: int, index: Operand, source: Self) -> Self:
        """Expand a list of positions along an axis to one position per element of `source`."""
        at = self._axis(name, dim)
        chosen = self._positions(name, index, self.shape[at])
        expected = (*self.shape[:at], chosen.numel(), *self.shape[at + 1:])
        if chosen.ndim > 1 or source.shape != expected:
            raise ShapeError(f"{name} into {self.shape} along axis {dim} at {chosen.shape} of {source.shape}: the index must be a "
                             f"list, and the values {expected}")
        return chosen.reshape(tuple(chosen.numel() if i == at else 1 for i in range(self.ndim))).expand(expected)

    def _values_for(self, name: str, src: Operand) -> Any:
        """Convert `src` to a number, or to a tensor of the dtype of self. Raises DTypeError for a tensor of another dtype."""
        if is_scalar(src):
            return src
        values = self._as_tensor(src)
        if values.dtype != self.dtype:
            raise DTypeError(f"{name} of {values.dtype.name} into {self.dtype.name}: cast the values first")
        return values

    def _scatter(self, name: str, dim: int, index: Operand, src: Operand, reduction: str) -> Self:
        at = self._axis(name, dim)
        chosen = self._positions(name, index, self.shape[at])
        if not chosen.dtype.is_int:
            raise DTypeError(f"{name} with an index of {chosen.dtype.name}: give integers")
        values = self._values_for(name, src)
        values = self.full(chosen.shape, values, self.dtype) if is_scalar(values) else values
        sizes = list(zip(chosen.shape, values.shape, self.shape, strict=False))
        if not chosen.ndim == values.ndim == self.ndim or any(c > v or (i != at and c > n) for i, (c, v, n) in enumerate(sizes)):
            raise ShapeError(f"{name} into {self.shape} along {dim} at {chosen.shape} of {values.shape}: all need the same number of "
                             "axes, and the index no larger extents than the values and, along other axes, than the tensor")
        if self.dtype.kind == "b" and reduction in ("ADD", "MUL"):
            raise DTypeError(f"{name} of bools: cast them to integers")
        if 0 in chosen.shape or 0 in self.shape:
            return self
        if is_symbolic(self.shape) or is_symbolic(chosen.shape):
            # a negative position counts from the real end; a position out of range must be out of range of the largest shape, too
            n, most = self.shape[at], upper(self.shape[at])
            wide = chosen.cast(dtypes.int64)
            wide = wide.add(self.from_uop(number_of(n, dtypes.int64))).where(wide.lt(0), wide)
            wide = wide.where(wide.ge(0), most)
            part = values.shrink([(0, c) for c in chosen.shape])
            return self._largest(0)._scatter(name, at, wide._largest(most), part._largest(0), reduction)._cut_to(self.shape)
        region = tuple(n if i == at else c for i, (c, n) in enumerate(zip(chosen.shape, self.shape, strict=True)))
        inner = self.shrink([(0, n) for n in region])
        placed = inner._placed(at, chosen, values.shrink([(0, c) for c in chosen.shape]), reduction)
        if region == self.shape:
            return placed
        pads = [(0, n - c) for c, n in zip(region, self.shape, strict=True)]
        return placed.pad(pads).where(self.full(region, True).pad(pads), self)

    def _placed(self, at: int, index: Self, values: Self, reduction: str) -> Self:
        """Run the scatter kernel on this tensor, viewed as (outer, n, inner)."""
        kind = accumulator(self.dtype) if self.dtype.is_float else dtypes.uint8 if self.dtype.kind == "b" else self.dtype
        if reduction not in ("ADD", "MUL") and self.dtype.is_float:
            kind = self.dtype
        # the index tells how many elements are placed along its axis, so it keeps that extent
        operands = [self.cast(kind)._in_three_axes(at), index._without_repeats(at, but_at=True), values._without_repeats(at).cast(kind)]
        placed = self.from_uop(graph.library_kernel("SCATTER", (reduction,), kind, *[t.uop for t in operands]))
        return placed.reshape(self.shape).cast(self.dtype)

    def _in_three_axes(self, at: int) -> Self:
        """Merge the axes before `at`, and those behind it."""
        return self.reshape(math.prod(self.shape[:at]), self.shape[at], math.prod(self.shape[at + 1:]))

    def _without_repeats(self, at: int, but_at: bool = False) -> Self:
        """View as three axes. An axis that repeats elements has extent 1; with `but_at` not the axis `at`."""
        if self.uop.op is not Ops.EXPAND:
            return self._in_three_axes(at)
        source, shape = self.uop.src[0], list(self.shape)
        for axes in (slice(0, at), *([] if but_at else [slice(at, at + 1)]), slice(at + 1, self.ndim)):
            single = shape_of(source)[axes]
            if all(n == 1 for n in single):
                shape[axes] = single
        return self.from_uop(graph.expand(source, shape))._in_three_axes(at)

    # -- chosen by a mask --------------------------------------------------------------------------
    def nonzero(self, *, size: int | None = None, fill_value: int = 0) -> Self:
        """The positions of the first `size` nonzero elements in row-major order, int64 (size, axes). Missing rows get `fill_value`.
        Computed by a running count and one scatter.

        Raises UnsupportedError without `size`, because the number of rows is not known when the graph is built."""
        if size is None:
            raise UnsupportedError(f"nonzero of {self.shape}: the number of rows depends on the values; give size=, the most there can be, "
                                   "or use numpy.nonzero(t.numpy())")
        flat = self._chosen_positions("nonzero", size)
        columns, stride = [], self.numel()
        for n in self.shape:
            stride //= max(1, n)
            columns.append(flat.floor_divide(max(1, stride)).remainder(max(1, n)))
        if not columns:
            return self.full((size, 0), 0, dtypes.int64)
        return self.stack(columns, 1).where(flat.ge(0).unsqueeze(1), fill_value).cast(dtypes.int64)

    def masked_select(self, mask: Operand, *, size: int | None = None, fill_value: Scalar = 0) -> Self:
        """The first `size` elements for which `mask` is True, in row-major order. Missing elements are `fill_value`.

        Raises UnsupportedError without `size`, as `nonzero` does."""
        chosen = self._as_tensor(mask).cast(dtypes.bool)
        if size is None:
            raise UnsupportedError(f"masked_select of {self.shape} with a mask of {chosen.shape}: the number of elements depends on the "
                                   "values; give size=, the most there can be, index with a NumPy mask, or use where()")
        shape = broadcast_shapes("masked_select", self.shape, chosen.shape)
        flat = chosen.broadcast_to(shape)._chosen_positions("masked_select", size)
        if flat.numel() == 0 or 0 in shape:
            return self.full((size,), fill_value, self.dtype)
        # -1 would select the last element
        return self.broadcast_to(shape).ravel().take(flat.maximum(0), 0).where(flat.ge(0), fill_value)

    def masked_scatter(self, mask: Operand, source: Operand) -> Self:
        """Replace elements for which `mask` is True by the elements of `source` in row-major order, then by zeros. A running count and a
        gather."""
        values: Self = self._values_for("masked_scatter", self._as_tensor(source))
        chosen = self._as_tensor(mask).cast(dtypes.bool).broadcast_to(self.shape)
        if 0 in self.shape or not values.numel():
            return self
        place = chosen.ravel().cumsum(0, dtypes.int32 if self.numel() < 2 ** 31 else dtypes.int64).sub(1).reshape(self.shape)
        flat, last = values.ravel(), values.numel() - 1
        return flat.take(place.clamp(0, last), 0).where(place.le(last), 0).where(chosen, self)

    def _chosen_positions(self, name: str, size: int) -> Self:
        """Flat positions of the nonzero elements, (size,), in int32 if that suffices; -1 after the last one."""
        if size < 0:
            raise ShapeError(f"{name} of {self.shape} with size={size}: it cannot be negative")
        n = self.numel()
        kind = dtypes.int32 if max(n, size) < 2 ** 31 else dtypes.int64
        nothing = self.full((size,), -1, kind)
        if size == 0 or n == 0:
            return nothing
        chosen = self.ravel().cast(dtypes.bool)
        # the scatter skips positions out of range, which are given to elements that are not chosen, or that come after the first `size`
        place = chosen.cumsum(0, kind).sub(1).where(chosen, size)
        return nothing._scatter(name, 0, place, self.arange(n, dtype=kind), "SET")
