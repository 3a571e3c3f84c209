"""Operations that process an axis in order: scans, sorts, the k largest elements. Each is a library kernel
(`svod.core.graph.library_kernel`).

A scan costs one combination per element. Sorts are stable (`svod.compile.lower.library`). 16-bit floats are summed in float32 and rounded
when they are stored. Integers are summed in 64 bits. NaN is the largest element, as in NumPy and PyTorch.

A library kernel needs constant extents. If an extent depends on a variable, the kernel runs on the largest shape: the elements are padded
with values that come last in its order, and the result is cut to the real extent. The work does not depend on the variable.
"""
from __future__ import annotations

import math
from typing import Any, Generic, NamedTuple, Self, TypeVar

from svod.core.graph import graph
from svod.core.ir.dtype import DType, dtypes
from svod.core.ir.variable import Dim, is_symbolic, lower, number_of, upper
from svod.errors import DTypeError, ShapeError
from svod.tensor.base import DTypeLike, Scalar, TensorBase, as_dtype
from svod.tensor.operations.reduction import ReductionMethods, sum_dtype
from svod.tensor.precision import rounds_once

TensorT = TypeVar("TensorT", bound=TensorBase)

# The k largest elements of n are found by k passes in vectors if k and k · n are at most these. The library kernel is slow on short rows,
# since it appends candidates one by one; it reads a long row only once.
MOST_PASSES = 4
MOST_ELEMENTS_OF_PASSES = 1 << 15


class Found(NamedTuple, Generic[TensorT]):
    """Values, and their int64 positions along the axis."""

    values: TensorT
    indices: TensorT


class Ordered(ReductionMethods):
    """Scans and sorts."""

    __slots__ = ()

    def _one_axis(self, name: str, dim: int | None, axis: int | None) -> int:
        if (dim is None) == (axis is None):
            raise ShapeError(f"{name} of {self.shape}: name one axis, as dim or as axis")
        return self._axis(name, axis if dim is None else dim)  # type: ignore[arg-type]

    # -- extents that depend on variables --------------------------------------------------------
    def _largest(self, fill: Scalar) -> Self:
        """Pad each extent that depends on a variable with `fill` to its largest value."""
        if not is_symbolic(self.shape):
            return self
        return self.from_uop(graph.pad(self.uop, tuple([(0, upper(n) - n) for n in self.shape]), fill))

    def _cut_to(self, shape: tuple[int, ...]) -> Self:
        """Cut each axis to its first elements, so that the result has `shape`."""
        return self if self.shape == shape else self.shrink([(0, n) for n in shape])

    def _last_in_order(self, descending: bool) -> Scalar:
        """The value that comes last in ascending or descending order."""
        if self.dtype.is_float:
            return -math.inf if descending else math.nan
        if self.dtype.kind == "b":
            return not descending
        return self.dtype.min if descending else self.dtype.max

    # -- scans -----------------------------------------------------------------------------------
    def cumsum(self, dim: int | None = None, dtype: DTypeLike | None = None, *, axis: int | None = None) -> Self:
        """Running sums along an axis. Integers and bools give int64, unsigned integers uint64, unless `dtype` is given."""
        return self._scan("cumsum", "ADD", dim, axis, dtype)

    def cumprod(self, dim: int | None = None, dtype: DTypeLike | None = None, *, axis: int | None = None) -> Self:
        """Running products along an axis, typed as `cumsum`."""
        return self._scan("cumprod", "MUL", dim, axis, dtype)

    def logcumsumexp(self, dim: int | None = None, *, axis: int | None = None) -> Self:
        """log(cumsum(exp(x))), shifted by the running maximum so that it does not overflow."""
        return self._float()._scan("logcumsumexp", "LOGADDEXP", dim, axis, self._float_dtype())

    def cummax(self, dim: int | None = None, *, axis: int | None = None) -> Found[Self]:
        """The (values, indices) of the running maximum along an axis. Of equal elements, or several NaN, the last one counts; NaN is the
        largest."""
        return self._running("cummax", "MAX", dim, axis)

    def cummin(self, dim: int | None = None, *, axis: int | None = None) -> Found[Self]:
        """The (values, indices) of the running minimum along an axis. Of equal elements, or several NaN, the last one counts; NaN is the
        smallest."""
        return self._running("cummin", "MIN", dim, axis)

    def _scan(self, name: str, combiner: str, dim: int | None, axis: int | None, dtype: DTypeLike | None) -> Self:
        at = self._one_axis(name, dim, axis)
        result = sum_dtype(self.dtype) if dtype is None else as_dtype(dtype)
        if result.kind == "b":
            raise DTypeError(f"{name} with dtype bool: use cummax for any so far, cummin for all so far")
        # a 16-bit result: elements are rounded before they are summed, as in PyTorch; other dtypes are converted by the kernel as it loads
        return (self.cast(result) if result.is_float and result.bits < 32 else self)._along(combiner, at, result)

    def _running(self, name: str, combiner: str, dim: int | None, axis: int | None) -> Found[Self]:
        at = self._one_axis(name, dim, axis)
        x = self.cast(dtypes.uint8) if self.dtype.kind == "b" else self
        return Found(x._along(combiner, at, x.dtype).cast(self.dtype), x._along(f"ARG{combiner}", at, dtypes.int64))

    def _along(self, combiner: str, at: int, dtype: DType) -> Self:
        """Run a scan as a library kernel on (outer, n, inner), a view of this tensor."""
        if is_symbolic(self.shape):
            return self._largest(0)._along(combiner, at, dtype)._cut_to(self.shape)
        shape = self.shape
        if 0 in shape:
            return self.full(shape, 0, dtype)
        box = (math.prod(shape[:at]), shape[at], math.prod(shape[at + 1:]))
        return self.from_uop(graph.reshape(graph.library_kernel("SCAN", (combiner,), dtype, graph.reshape(self.uop, box)), shape))

    @rounds_once
    def diff(self, n: int = 1, dim: int = -1, *, axis: int | None = None) -> Self:
        """Differences of neighbouring elements along an axis, taken n times."""
        at = self._axis("diff", dim if axis is None else axis)
        if n < 0:
            raise ShapeError(f"diff with n={n}: it cannot be negative")
        result = self
        for _ in range(min(n, self.shape[at])):
            size = result.shape[at]
            later, earlier = result.narrow(at, 1, size - 1), result.narrow(at, 0, size - 1)
            result = later.ne(earlier) if self.dtype.kind == "b" else later.sub(earlier)
        return result

    # -- order -----------------------------------------------------------------------------------
    def argsort(self, dim: int = -1, descending: bool = False, stable: bool = True, *, axis: int | None = None) -> Self:
        """The int64 positions that sort an axis. Always stable: equal elements keep their order, also in descending order."""
        at = self._axis("argsort", dim if axis is None else axis) if self.ndim else 0
        if is_symbolic(self.shape):
            return self._largest(self._last_in_order(descending)).argsort(at, descending)._cut_to(self.shape)
        if 0 in self.shape or self.ndim == 0:
            return self.full(self.shape, 0, dtypes.int64)
        return self.full(self.shape, 0, dtypes.int64) if self.shape[at] == 1 else self._by_rows(at, "ARGSORT", (bool(descending),))

    def sort(self, dim: int = -1, descending: bool = False, stable: bool = True, *, axis: int | None = None) -> Found[Self]:
        """Sort an axis; returns (values, indices), as `argsort`. If only the values are computed, -0 is before 0 among them."""
        at = dim if axis is None else axis
        if is_symbolic(self.shape):
            whole = self._largest(self._last_in_order(descending)).sort(at, descending)
            return Found(whole.values._cut_to(self.shape), whole.indices._cut_to(self.shape))
        positions = self.argsort(at, descending, stable)
        if self.ndim == 0 or 0 in self.shape or self.shape[at] == 1:
            return Found(self, positions)
        return Found(self._by_rows(self._axis("sort", at), "SORT", (bool(descending),), self.dtype), positions)

    def msort(self) -> Self:
        """Sort along the first axis; returns the values."""
        return self.sort(0).values

    def topk(self, k: int, dim: int = -1, largest: bool = True, sorted: bool = True, *, axis: int | None = None) -> Found[Self]:
        """The (values, indices) of the k largest (or smallest) elements along an axis, in order. Of equal elements the first are chosen."""
        at = self._axis("topk", dim if axis is None else axis)
        n = self.shape[at]
        if not 0 <= k <= lower(n):
            some = f"{n} elements" if lower(n) == n else f"{n} elements, and there may be only {lower(n)}; give the variable a larger min"
            raise ShapeError(f"topk of {self.shape} along axis {at} with k={k}: there are {some}")
        if is_symbolic(self.shape):
            whole = self._largest(self._last_in_order(largest)).topk(k, at, largest)
            shape = tuple([k if i == at else m for i, m in enumerate(self.shape)])
            return Found(whole.values._cut_to(shape), whole.indices._cut_to(shape))
        if k == 0 or 0 in self.shape:
            empty = self.narrow(at, 0, k)
            return Found(empty, empty.cast(dtypes.int64))
        in_turn = k == 1 or (k <= MOST_PASSES and k * n <= MOST_ELEMENTS_OF_PASSES)
        positions = self._first_in_turn(k, at, largest) if in_turn else self._by_rows(at, "TOPK", (k, bool(largest)))
        return Found(self.gather(at, positions), positions)

    def _first_in_turn(self, k: int, at: int, largest: bool) -> Self:
        """The int64 positions of the k first elements in order: each pass over the axis chooses one, beside those of the passes before it.

        Of equal values the one of the least rank is chosen. Elements of the axis have their positions, then come those that are given the
        value that comes last: a NaN where the smallest are chosen, and elements that were chosen."""
        n, combiner = self.shape[at], "ARGMAX" if largest else "ARGMIN"
        x = self.cast(dtypes.uint8) if self.dtype.kind == "b" else self
        x = x if k == 1 else self.from_uop(graph.contiguous(x.uop))
        place = self.from_uop(graph.reshape(graph.iota(n), tuple([n if i == at else 1 for i in range(self.ndim)]))).expand(*self.shape)
        last: Scalar = x.dtype.min if largest else x.dtype.max
        rank = place
        if x.dtype.is_float and not largest:
            rank = (place + n).where(x.isnan(), place)
            x = x.masked_fill(x.isnan(), last)
        chosen: list[Self] = []
        for _ in range(k):
            if chosen:
                is_chosen = place == chosen[-1]
                x, rank = x.masked_fill(is_chosen, last), rank.masked_fill(is_chosen, 2 * n)
            chosen.append(self.from_uop(graph.arg_reduce(x.uop, rank.uop, combiner, (at,))) % n)
        return self.cat(chosen, at).cast(dtypes.int64)

    def kthvalue(self, k: int, dim: int = -1, keepdim: bool = False, *, axis: int | None = None, keepdims: bool = False) -> Found[Self]:
        """The (value, index) of the k-th smallest element along an axis, counted from 1."""
        at = self._axis("kthvalue", dim if axis is None else axis)
        if not 1 <= k <= lower(self.shape[at]):
            raise ShapeError(f"kthvalue of {self.shape} along axis {at} with k={k}: k is counted from 1 to {lower(self.shape[at])}")
        value, index = (t.narrow(at, k - 1, 1) for t in self.topk(k, at, largest=False))
        return Found(value, index) if keepdim or keepdims else Found(value.squeeze(at), index.squeeze(at))

    def median(self, dim: int | None = None, keepdim: bool = False, *, axis: int | None = None, keepdims: bool = False) -> Self:
        """The median along an axis, or of all elements, without its position: the lower of two middle values, as in PyTorch; NaN if any
        element is."""
        wanted = axis if dim is None else dim
        if wanted is None:
            return self.ravel().median(0)
        at = self._axis("median", wanted)
        n = self.shape[at]
        if n == 0:
            raise ShapeError(f"median of {self.shape} along axis {at}: there is no element")
        ordered = self.sort(at).values
        middle = ordered._element(at, (n - 1) // 2)
        if self.dtype.is_float:
            last = ordered._element(at, n - 1)
            middle = last.where(last.isnan(), middle)
        return middle if keepdim or keepdims else middle.squeeze(at)

    def _element(self, at: int, position: int) -> Self:
        """Select one element along an axis, which is kept. A position that depends on a variable needs a gather instead of a view."""
        if isinstance(position, Dim):
            return self.take(self.from_uop(number_of(position, dtypes.int64)).reshape(1), at)
        return self.narrow(at, position, 1)

    def _by_rows(self, at: int, kernel: str, options: tuple[Any, ...], dtype: DType = dtypes.int64) -> Self:
        """Move an axis last, run a library kernel that gives a dtype on the rows, by default positions, and move the axis back."""
        order = [a for a in range(self.ndim) if a != at] + [at]
        moved = self.permute(order)
        rows = moved.reshape(-1, self.shape[at])
        result = self.from_uop(graph.library_kernel(kernel, options, dtype, rows.uop))
        back = sorted(range(self.ndim), key=order.__getitem__)
        return result.reshape(*moved.shape[:-1], result.shape[-1]).permute(back)
