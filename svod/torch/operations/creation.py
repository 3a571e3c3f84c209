"""Operations that make tensors without tensor operands."""
from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from svod.core.ir.dtype import DType, dtypes
from svod.core.ir.variable import Dim, number_of
from svod.errors import UnsupportedError
from svod.tensor import Tensor
from svod.torch.operations.table import aten


@aten("full")
def full(size: Sequence[int], value: Any, *, dtype: DType | None = None) -> Tensor:
    """A tensor filled with one number."""
    return Tensor.full(tuple(size), value, dtype)


@aten("full_like", "new_full", widens=False)
def full_like(x: Tensor, *args: Any, dtype: DType | None = None) -> Tensor:
    """A tensor filled with one number, with the shape of x, or with the shape that precedes the number."""
    shape = x.shape if len(args) == 1 else tuple(args[0])
    return Tensor.full(shape, args[-1], dtype or x.dtype)


def _filled(value: int, new: Sequence[str], like: Sequence[str]) -> None:
    """Register operations that fill a tensor with `value`: `new` take a size, `like` a tensor, with an optional size after it."""
    aten(*new)(lambda size, order=None, *, dtype=None: Tensor.full(tuple(size), value, dtype or dtypes.float32))
    aten(*like, widens=False)(lambda x, size=None, *, dtype=None: Tensor.full(x.shape if size is None else tuple(size), value,
                                                                              dtype or x.dtype))


_filled(0, ("zeros", "empty.memory_format", "empty_permuted"), ("zeros_like", "empty_like", "new_zeros", "new_empty"))
_filled(1, ("ones",), ("ones_like", "new_ones"))


@aten("arange", "arange.start", "arange.start_step")
def arange(start: float, end: float | None = None, step: float = 1, *, dtype: DType | None = None) -> Tensor:
    """The numbers start, start + step, … below `end`; with a single argument, 0, 1, … below it."""
    whole = all(isinstance(v, int | None) for v in (start, end, step))
    if dtype is not None and dtype.is_int and not whole:
        raise UnsupportedError("integers by steps that are none")       # PyTorch rounds start, end and step differently for each dtype
    return Tensor.arange(start, end, step, dtype or (dtypes.int64 if whole else dtypes.float32))


@aten("linspace")
def linspace(start: float, end: float, steps: int, *, dtype: DType | None = None) -> Tensor:
    """`steps` numbers from start to end."""
    if dtype is not None and dtype.is_int:
        raise UnsupportedError("integers by steps that are none")
    return Tensor.linspace(start, end, steps, dtype or dtypes.float32)


@aten("scalar_tensor")
def scalar_tensor(value: Any, *, dtype: DType | None = None) -> Tensor:
    """A tensor without axes."""
    if isinstance(value, Dim):
        return Tensor.from_uop(number_of(value, dtype or dtypes.float32))
    return Tensor.full((), value, dtype or dtypes.float32)


@aten("eye", "eye.m")
def eye(n: int, m: int | None = None, *, dtype: DType | None = None) -> Tensor:
    """The unit matrix."""
    return Tensor.eye(n, m, dtype or dtypes.float32)
