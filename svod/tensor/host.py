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


# -- sets ---------------------------------------------------------------------------------------------

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
