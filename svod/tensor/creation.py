"""Makes tensors of data, constants and ranges.

Python data gets the default dtypes: bool, float32, int32, and int64 for an int that needs it. A NumPy array keeps its dtype. A C-contiguous
array is not copied: a realised tensor reads its memory, and `assign` writes to it unless the array is read-only.
"""
from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Self

import numpy as np

from svod.core.graph import graph
from svod.core.graph.buffer import float32_to_bfloat16_bits
from svod.core.ir.dtype import DType, dtypes, to_numpy
from svod.core.ir.uop import Ops, UOp
from svod.core.ir.variable import Dim, layout_shape, number_of
from svod.errors import DTypeError, ShapeError
from svod.tensor.base import Array, DTypeLike, Scalar, TensorBase, as_dtype, check_integers, check_scalar, extents_argument, is_scalar


class Creation(TensorBase):
    """The methods of Tensor that make tensors."""

    __slots__ = ()

    def __init__(self, data: Any, dtype: DTypeLike | None = None) -> None:
        """See `Tensor`."""
        wanted = None if dtype is None else as_dtype(dtype)
        if isinstance(data, TensorBase):
            self._hold(data.uop if wanted is None else data.cast(wanted).uop)
        elif isinstance(data, Dim):
            own = dtypes.int32 if max(map(abs, data.bounds)) < 2 ** 31 else dtypes.int64
            self._hold(number_of(data, own if wanted is None else wanted))
        elif is_scalar(data) and not isinstance(data, np.generic):
            self._hold(_scalar_node(data, wanted))
        elif isinstance(data, (np.ndarray, np.generic)) or hasattr(data, "__array__") or hasattr(data, "__array_interface__"):
            self._hold_array(np.asarray(data), wanted)
        elif isinstance(data, (list, tuple, range)):
            array = array_of_lists(data)
            if wanted is not None:
                check_integers(array, wanted, "Tensor")
            self._hold_array(array, wanted, shared=False)
        else:
            raise DTypeError(f"Tensor from {type(data).__name__}: give a number, nested lists, a NumPy array or a Tensor")

    def _hold_array(self, array: Array, wanted: DType | None, shared: bool = True) -> None:
        """Use an array's memory, or a copy if the array is not contiguous or has another dtype than `wanted`. Raises DTypeError."""
        own = as_dtype(array.dtype)
        dtype = own if wanted is None else wanted
        if 0 in array.shape:
            self._hold(graph.full(array.shape, 0, dtype))
            return
        bits = float32_to_bfloat16_bits(array) if dtype == dtypes.bfloat16 else array
        kind, flags = to_numpy(dtype), bits.flags
        memory = bits if flags.c_contiguous and flags.aligned and bits.dtype == kind else np.require(bits, kind, ("C", "A"))
        shared = shared and memory is array
        self._become_memory(memory, dtype, shared, array if shared else None)

    @classmethod
    def from_numpy(cls, array: Array) -> Self:
        """Make a tensor of an array. It shares the memory of a C-contiguous array."""
        return cls(array)

    @classmethod
    def full(cls, shape: int | tuple[int, ...], fill_value: Scalar, dtype: DTypeLike | None = None) -> Self:
        """A constant tensor, of the scalar's default dtype unless `dtype` is given. It takes no memory."""
        sizes = extents_argument("full", shape)
        node = _scalar_node(fill_value, None if dtype is None else as_dtype(dtype))
        return cls.from_uop(graph.broadcast(node, sizes, "full"))

    @classmethod
    def zeros(cls, *shape: int | tuple[int, ...], dtype: DTypeLike = dtypes.default_float) -> Self:
        """A tensor of zeros."""
        return cls.full(extents_argument("zeros", *shape), 0, dtype)

    @classmethod
    def ones(cls, *shape: int | tuple[int, ...], dtype: DTypeLike = dtypes.default_float) -> Self:
        """A tensor of ones."""
        return cls.full(extents_argument("ones", *shape), 1, dtype)

    @classmethod
    def empty(cls, *shape: int | tuple[int, ...], dtype: DTypeLike = dtypes.default_float) -> Self:
        """A new buffer with undefined content, to be assigned to."""
        sizes, kind = extents_argument("empty", *shape), as_dtype(dtype)
        if 0 in sizes:
            return cls.full(sizes, 0, kind)
        return cls.from_uop(graph.storage_view(graph.buffer(kind, math.prod(layout_shape(sizes))), sizes))

    def full_like(self, fill_value: Scalar, dtype: DTypeLike | None = None) -> Self:
        """A constant tensor with the shape and, unless given, the dtype of self."""
        return self.full(self.shape, fill_value, self.dtype if dtype is None else dtype)

    def zeros_like(self, dtype: DTypeLike | None = None) -> Self:
        """Zeros with the shape and, unless given, the dtype of self."""
        return self.full_like(0, dtype)

    def ones_like(self, dtype: DTypeLike | None = None) -> Self:
        """Ones with the shape and, unless given, the dtype of self."""
        return self.full_like(1, dtype)

    def empty_like(self, dtype: DTypeLike | None = None) -> Self:
        """An uninitialised buffer with the shape and, unless given, the dtype of self."""
        return self.empty(self.shape, dtype=self.dtype if dtype is None else dtype)

    @classmethod
    def arange(cls, start: int | float, end: int | float | None = None, step: int | float = 1, dtype: DTypeLike | None = None) -> Self:
        """The numbers start, start + step, … below `end`, or above `end` for a negative step. `arange(n)` is 0 … n-1. Computed, not
        stored."""
        if isinstance(start, Dim) and end is None and step == 1:
            return cls.from_uop(graph.iota(start)).cast(dtypes.int32 if dtype is None else dtype)
        first, last = (0, start) if end is None else (start, end)
        first, last, step = (_number("arange", v) for v in (first, last, step))
        if step == 0:
            raise ShapeError(f"arange from {first} to {last} with step 0: it would never end")
        n = max(0, math.ceil((last - first) / step))
        whole = all(isinstance(v, int) for v in (first, last, step))
        fits = min(first, last) >= -2 ** 31 and max(first, last) < 2 ** 31
        kind = as_dtype(dtype) if dtype is not None else dtypes.default_float if not whole else dtypes.int32 if fits else dtypes.int64
        count = cls.from_uop(graph.iota(n, dtypes.int32 if whole and fits else dtypes.int64))
        # whole numbers are computed as integers, because float32 cannot represent 2**24 + 1
        node = count.uop if whole else graph.cast(count.uop, dtypes.float64)
        for op, value, neutral in ((Ops.MUL, step, 1), (Ops.ADD, first, 0)):
            if value != neutral:
                node = graph.alu(op, node, graph.full((n,), value, node.dtype))
        return cls.from_uop(node).cast(kind)

    @classmethod
    def linspace(cls, start: int | float, end: int | float, steps: int, dtype: DTypeLike = dtypes.default_float) -> Self:
        """`steps` evenly spaced values from `start` to `end`, both included."""
        if steps < 0:
            raise ShapeError(f"linspace with {steps} steps: the number cannot be negative")
        if steps == 1:
            return cls.full((1,), start, dtype)
        node = graph.cast(graph.iota(steps, dtypes.int32), dtypes.float64)
        step = (end - start) / max(1, steps - 1)
        scaled = graph.alu(Ops.MUL, node, graph.full((steps,), step, dtypes.float64))
        return cls.from_uop(graph.alu(Ops.ADD, scaled, graph.full((steps,), start, dtypes.float64))).cast(dtype)

    @classmethod
    def eye(cls, n: int, m: int | None = None, dtype: DTypeLike = dtypes.default_float) -> Self:
        """An n×m matrix (m defaults to n) with ones on the diagonal and zeros elsewhere. Computed, not stored."""
        return cls.from_uop(graph.alu(Ops.CMPEQ, *coordinates(n, n if m is None else m))).cast(dtype)


def coordinates(rows: int, columns: int, diagonal: int = 0) -> tuple[UOp, UOp]:
    """Two int32 matrices: the row of each element plus `diagonal`, and its column."""
    shape = (rows, columns)
    row = graph.broadcast(graph.reshape(graph.iota(rows), (rows, 1)), shape)
    if diagonal:
        row = graph.alu(Ops.ADD, row, graph.full(shape, diagonal, row.dtype))
    return row, graph.broadcast(graph.iota(columns), shape)


def _number(name: str, value: Any) -> Scalar:
    """Convert a number to a Python scalar. Raises DTypeError for a value that is not a number."""
    scalar = value.item() if isinstance(value, np.generic) else value
    if not is_scalar(scalar):
        raise DTypeError(f"{name} of {type(value).__name__}: give a number")
    return scalar


def _scalar_node(value: Scalar, dtype: DType | None) -> UOp:
    """A constant node of shape ()."""
    value = _number("a constant", value)
    if dtype is None:
        dtype = dtypes.bool if isinstance(value, bool) else dtypes.default_float if isinstance(value, float) else _integer_dtype(value)
    if dtype.is_int and isinstance(value, float) and not math.isfinite(value):
        raise DTypeError(f"Tensor of {value} as {dtype.name}: integers have no such value")
    return UOp.const(dtype, check_scalar(value, dtype, "Tensor"))


def _integer_dtype(value: int) -> DType:
    """The default integer dtype, or a wider one that can represent `value`. Raises DTypeError if none can."""
    dtype = next((d for d in (dtypes.default_int, dtypes.int64, dtypes.uint64) if d.min <= value <= d.max), None)
    if dtype is None:
        raise DTypeError(f"Tensor of {value}: no integer type is wide enough; write it as a float")
    return dtype


def array_of_lists(data: Sequence[Any]) -> Array:
    """Convert nested lists to an array of a default dtype. Raises ShapeError and DTypeError for lists that no tensor can hold."""
    try:
        array = np.array(data)
    except ValueError as err:
        raise ShapeError(f"Tensor from nested lists: they must be rectangular ({err})") from err
    except (TypeError, RuntimeError) as err:        # raised by tensors of other libraries
        raise DTypeError(f"Tensor from nested lists: {err}; Tensor.stack([Tensor(a), Tensor(b)]) joins tensors") from err
    if array.dtype == object:
        for v in array.flat:
            if not isinstance(v, int):
                raise DTypeError(f"Tensor from nested lists: they hold {type(v).__name__}; give numbers")
            _integer_dtype(v)
    if array.dtype.kind not in "biuf":
        raise DTypeError(f"Tensor from nested lists: they hold {array.dtype.type.__name__.rstrip('_')}; give numbers")
    if array.dtype == np.float64:
        return array.astype(np.float32)
    if array.dtype == np.int64 and array.size and array.min() >= -2 ** 31 and array.max() < 2 ** 31:
        return array.astype(np.int32)
    return array
