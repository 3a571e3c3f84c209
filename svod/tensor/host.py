"""Functions that NumPy computes on the host, between the kernels of a plan, and their declaration by `svod.custom_function`.

They are lazy if the result's shape is known beforehand; `unique` and `bincount` compute their argument at once.
"""
from __future__ import annotations

from collections.abc import Callable
from functools import cache, partial
from typing import Any, overload

import numpy as np

from svod.core.ir.dtype import dtypes
from svod.errors import DTypeError, ShapeError
from svod.tensor.base import Array
from svod.tensor.callbacks import custom_function
from svod.tensor.tensor import Tensor


@cache
def configured(fn: Callable[..., Any], *options: tuple[str, Any]) -> Callable[..., Any]:
    """Bind options to `fn`. Equal options return the same function object, so that a schedule that calls it is reused."""
    made: Callable[..., Any] = partial(fn, **dict(options))
    return made


@overload
def on_host(fn: Callable[..., Any], *tensors: Tensor, shape: Any, dtype: str, **options: Any) -> Tensor: ...
@overload
def on_host(fn: Callable[..., Any], *tensors: Tensor, shape: Any, dtype: tuple[str, ...], **options: Any) -> tuple[Tensor, ...]: ...
def on_host(fn: Callable[..., Any], *tensors: Tensor, shape: Any, dtype: Any, **options: Any) -> Any:
    """Declare a function of arrays that runs on the host; returns its lazy results of the given shapes and dtypes. Options are
    constants."""
    return custom_function(configured(fn, *sorted(options.items())), *tensors, shape=shape, dtype=dtype)


def as_float(name: str, x: Any) -> Tensor:
    """Convert an operand to a tensor of float32, or float64 if it has that dtype: NumPy computes in these."""
    t = x if isinstance(x, Tensor) else Tensor(x)
    if t.dtype.kind == "b":
        raise DTypeError(f"{name} of bools: cast them to floats first")
    return t if t.dtype in (dtypes.float32, dtypes.float64) else t.cast(dtypes.float32)


def square(name: str, t: Tensor) -> int:
    """The extent n of square matrices in the last two axes. Raises ShapeError for other tensors."""
    if t.ndim < 2 or t.shape[-1] != t.shape[-2]:
        raise ShapeError(f"{name} of {t.shape}: it takes square matrices, (…, n, n)")
    return t.shape[-1]


# -- sets and positions -------------------------------------------------------------------------------

def unique(x: Tensor, return_inverse: bool = False, return_counts: bool = False) -> Any:
    """The distinct values in ascending order. `return_inverse` adds the index of each element's value among them, in the shape of `x`;
    `return_counts` adds the number of times that each occurs. Runs on the host, at once: the shape of the result depends on the values,
    so a captured function cannot call it."""
    values, inverse, counts = np.unique(x.numpy(), return_inverse=True, return_counts=True)
    results = [Tensor(values), *([Tensor(inverse.reshape(x.shape))] if return_inverse else []),
               *([Tensor(counts)] if return_counts else [])]
    return tuple(results) if len(results) > 1 else results[0]


def bincount(x: Tensor, weights: Tensor | None = None, minlength: int = 0) -> Tensor:
    """Count how often each of 0, 1, … occurs in a vector of non-negative integers, or sum the weights of its occurrences. Runs on the
    host, at once, because the largest value determines the shape. Raises DTypeError and ShapeError."""
    if x.ndim != 1 or not x.dtype.is_int:
        raise (ShapeError if x.ndim != 1 else DTypeError)(f"bincount of {x.dtype.name}{list(x.shape)}: it takes a vector of integers")
    return Tensor(np.bincount(x.numpy(), None if weights is None else weights.numpy(), minlength))


def _searchsorted(sequence: Array, values: Array, side: Any) -> Array:
    if sequence.ndim == 1:
        return np.searchsorted(sequence, values, side)
    rows, wanted = sequence.reshape(-1, sequence.shape[-1]), values.reshape(-1, values.shape[-1])
    return np.stack([np.searchsorted(r, v, side) for r, v in zip(rows, wanted, strict=True)]).reshape(values.shape)


def searchsorted(sorted_sequence: Tensor, values: Any, right: bool = False) -> Tensor:
    """The position (int64) of each value in the ascending last axis of `sorted_sequence`: before equal elements, or after them with
    `right`. There is one sequence for all values, or one for each row of values. Runs on the host. Raises ShapeError for rows that do
    not match."""
    wanted = values if isinstance(values, Tensor) else Tensor(values)
    if sorted_sequence.ndim != 1 and sorted_sequence.shape[:-1] != wanted.shape[:-1]:
        raise ShapeError(f"searchsorted of values {wanted.shape} in {sorted_sequence.shape}: all axes but the last must agree")
    return on_host(_searchsorted, sorted_sequence, wanted, shape=wanted.shape, dtype="int64", side="right" if right else "left")


def _histc(x: Array, bins: int, low: float, high: float) -> Array:
    if low == high:
        low, high = (float(x.min()), float(x.max())) if x.size else (0.0, 1.0)
    low, high = (low - 1, high + 1) if low == high else (low, high)
    return np.histogram(x, bins, (low, high))[0].astype(x.dtype)


def histc(x: Tensor, bins: int = 100, min: float = 0, max: float = 0) -> Tensor:
    """Count the elements in each of `bins` equal parts of min … max, by default from the least to the largest element; elements outside
    are not counted. The result has the dtype of `x`. Runs on the host. Raises ShapeError for no bins or max below min."""
    if bins < 1 or max < min:
        raise ShapeError(f"histc with {bins} bins of {min} … {max}: there must be a bin, and max cannot be below min")
    t = as_float("histc", x)
    return on_host(_histc, t, shape=(bins,), dtype=t.dtype.name, bins=bins, low=float(min), high=float(max))
