"""The values of a graph's edges during translation.

    Tensor      computed when the plan runs
    Array       known now: weights, and small integers that determine shapes, axes and branches
    list        a sequence
    None        an optional that is absent
"""
from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from svod.core.graph import graph
from svod.core.graph.buffer import buffer_from_bytes
from svod.core.ir.dtype import BY_NAME, DType, dtypes, to_numpy
from svod.core.ir.variable import Dim, number_of
from svod.errors import UnsupportedError
from svod.onnx.registry import Array
from svod.tensor import Tensor

Value = Any

_FROM_NUMPY = {to_numpy(t): t for t in BY_NAME.values()      # keyed by NumPy's dtypes, because looking up their names is slow
           if t not in (dtypes.bfloat16, dtypes.index, dtypes.void)}


class Undecided(Exception):
    """Raised for a branch that has to be chosen before the translation can continue. `branch`: its number in the translation;
    `condition`: the tensor that decides, which is computed from data."""

    def __init__(self, branch: int, condition: Tensor) -> None:
        self.branch, self.condition = branch, condition


DIFFERS = "a size that differs from run to run: give that dimension a number, as in dims={…: 128} or --dim …=128"


def is_known(value: Value) -> bool:
    return isinstance(value, np.ndarray)


def size(n: Any) -> Any:
    """An extent: an int, or an expression over a Variable."""
    return n if isinstance(n, Dim) else int(n)


def value_of_sizes(sizes: Sequence[Any] | int) -> Value:
    """Extents, or their product, as int64: an array, or a tensor if one of them depends on a Variable."""
    items = np.array(sizes, object)
    if not has_dims(items):
        return items.astype(np.int64)
    return Tensor.stack([Tensor.from_uop(number_of(n, dtypes.int64)) for n in items.reshape(-1)], 0).reshape(items.shape)


def has_dims(value: Any) -> bool:
    """Whether a known value depends on a Variable."""
    return isinstance(value, np.ndarray) and value.dtype == object and any(isinstance(n, Dim) for n in value.reshape(-1))


def tensor_of(value: Value) -> Tensor:
    """Convert a value to a tensor. Raises UnsupportedError for sequences, absent optionals and types that tensors do not have."""
    if isinstance(value, Tensor):
        return value
    if isinstance(value, np.ndarray):
        if value.dtype.name == "bfloat16":
            return Tensor(value.astype(np.float32)).cast(dtypes.bfloat16)
        if value.dtype not in _FROM_NUMPY:
            raise UnsupportedError(f"values of the type {value.dtype.name}: svod computes with bool, integers of 8 to 64 bits, float16, "
                                   "bfloat16, float32 and float64")
        if not value.flags.aligned and not value.flags.writeable:   # a weight that kernels read where it lies
            part = buffer_from_bytes(value.reshape(-1).view(np.uint8), 0, _FROM_NUMPY[value.dtype], value.size)
            return Tensor.from_uop(graph.reshape(part, value.shape))
        return Tensor(value)
    raise UnsupportedError(f"a {'sequence' if isinstance(value, list) else type(value).__name__} where a tensor is needed")


def has_dtype(array: Array) -> bool:
    """Whether svod computes with the array's element type."""
    return array.dtype in _FROM_NUMPY or array.dtype.name in BY_NAME


def dtype_of(value: Value) -> DType:
    """The element type of a tensor or an array."""
    return value.dtype if isinstance(value, Tensor) else _FROM_NUMPY.get(value.dtype) or BY_NAME[value.dtype.name]


def is_narrow_integer(array: Array) -> bool:
    """Whether the elements are integers of 2 or 4 bits, in the types of ml_dtypes with one byte each."""
    return array.dtype not in _FROM_NUMPY and array.dtype.name in ("int2", "uint2", "int4", "uint4")


def shape_of(value: Value) -> tuple[int, ...]:
    return tuple(value.shape)


def array_of(t: Tensor) -> Array:
    """The elements of a computed tensor as an array; bfloat16 in the type of ml_dtypes."""
    if t.dtype is not dtypes.bfloat16:
        return t.numpy()
    return ml_bfloat16(t.bitcast(dtypes.uint16).numpy())


def ml_bfloat16(bits: Array) -> Array:
    """View the bits of bfloat16 numbers in the type of ml_dtypes."""
    import ml_dtypes
    return bits.view(ml_dtypes.bfloat16)


def tensor_as(values: Array, kind: DType) -> Tensor:
    """Convert the numbers of a float64 array to a tensor of another type."""
    return tensor_of(values.astype(to_numpy(kind))) if kind is not dtypes.bfloat16 else Tensor(values.astype(np.float32)).cast(kind)
