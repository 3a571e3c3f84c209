"""Tensors that are made of nothing."""
from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from svod.core.ir.dtype import DType, dtypes
from svod.errors import UnsupportedError
from svod.tensor import Tensor
from svod.torch.operations.table import aten


@aten("full")
def full(size: Sequence[int], value: Any, *, dtype: DType | None = None) -> Tensor:
    """The same number everywhere."""
    return Tensor.full(tuple(size), value, dtype)


@aten("full_like", "new_full", widens=False)
def full_like(x: Tensor, *args: Any, dtype: DType | None = None) -> Tensor:
    """The same number everywhere, in the shape of x or in the shape given first."""
    shape = x.shape if len(args) == 1 else tuple(args[0])
    return Tensor.full(shape, args[-1], dtype or x.dtype)


@aten("zeros", "empty.memory_format")
def zeros(size: Sequence[int], *, dtype: DType | None = None) -> Tensor:
    """Zeros."""
    return Tensor.zeros(tuple(size), dtype=dtype or dtypes.float32)


@aten("ones")
def ones(size: Sequence[int], *, dtype: DType | None = None) -> Tensor:
    """Ones."""
    return Tensor.ones(tuple(size), dtype=dtype or dtypes.float32)


@aten("zeros_like", "empty_like", "new_zeros", "new_empty", widens=False)
def zeros_like(x: Tensor, size: Sequence[int] | None = None, *, dtype: DType | None = None) -> Tensor:
    """Zeros in the shape of x, or in `size`."""
    return Tensor.zeros(x.shape if size is None else tuple(size), dtype=dtype or x.dtype)


@aten("ones_like", "new_ones", widens=False)
def ones_like(x: Tensor, size: Sequence[int] | None = None, *, dtype: DType | None = None) -> Tensor:
    """Ones in the shape of x, or in `size`."""
    return Tensor.ones(x.shape if size is None else tuple(size), dtype=dtype or x.dtype)


@aten("empty_permuted")
def empty_permuted(size: Sequence[int], order: Sequence[int], *, dtype: DType | None = None) -> Tensor:
    """Zeros, as the content of new memory is undefined."""
    return Tensor.zeros(tuple(size), dtype=dtype or dtypes.float32)


def _numbers(start: float, end: float, step: float, dtype: DType | None) -> Tensor:
    whole = all(isinstance(v, int) for v in (start, end, step))
    if dtype is not None and dtype.is_int and not whole:
        raise UnsupportedError("integers by steps that are none")       # how PyTorch rounds each of the three depends on the dtype
    return Tensor.arange(start, end, step, dtype or (dtypes.int64 if whole else dtypes.float32))


@aten("arange")
def arange(end: float, *, dtype: DType | None = None) -> Tensor:
    """0, 1, … below `end`."""
    return _numbers(0, end, 1, dtype)


@aten("arange.start", "arange.start_step")
def arange_from(start: float, end: float, step: float = 1, *, dtype: DType | None = None) -> Tensor:
    """start, start + step, … below `end`."""
    return _numbers(start, end, step, dtype)


@aten("linspace")
def linspace(start: float, end: float, steps: int, *, dtype: DType | None = None) -> Tensor:
    """`steps` numbers from start to end."""
    if dtype is not None and dtype.is_int:
        raise UnsupportedError("integers by steps that are none")
    return Tensor.linspace(start, end, steps, dtype or dtypes.float32)


@aten("scalar_tensor")
def scalar_tensor(value: Any, *, dtype: DType | None = None) -> Tensor:
    """A tensor without axes."""
    return Tensor.full((), value, dtype or dtypes.float32)


@aten("eye", "eye.m")
def eye(n: int, m: int | None = None, *, dtype: DType | None = None) -> Tensor:
    """The unit matrix."""
    return Tensor.eye(n, m, dtype or dtypes.float32)
