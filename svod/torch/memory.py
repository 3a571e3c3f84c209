"""PyTorch tensors as arrays over the same memory, and back.

    a dense tensor whose axes lie in another order (channels_last)  ↔  a contiguous array and a permutation of its axes
    bfloat16  ↔  its bits as uint16
"""
from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from svod.core.ir.dtype import DType, dtypes
from svod.errors import UnsupportedError

Array = np.ndarray[Any, np.dtype[Any]]

DTYPES: dict[Any, DType] = {
    torch.bool: dtypes.bool, torch.uint8: dtypes.uint8, torch.int8: dtypes.int8, torch.uint16: dtypes.uint16, torch.int16: dtypes.int16,
    torch.uint32: dtypes.uint32, torch.int32: dtypes.int32, torch.uint64: dtypes.uint64, torch.int64: dtypes.int64,
    torch.float16: dtypes.float16, torch.bfloat16: dtypes.bfloat16, torch.float32: dtypes.float32, torch.float64: dtypes.float64,
}
TORCH_DTYPES: dict[DType, Any] = {v: k for k, v in DTYPES.items()}


def svod_dtype(dtype: Any) -> DType:
    """The svod dtype of a PyTorch dtype. Raises UnsupportedError for one that svod has not."""
    known = DTYPES.get(dtype)
    if known is None:
        raise UnsupportedError(f"svod has no {str(dtype).removeprefix('torch.')}")
    return known


def is_representable(t: Any) -> bool:
    """Whether svod can have the values of a tensor: dense, on the CPU, of a dtype that svod has."""
    return t.dtype in DTYPES and t.layout is torch.strided and t.device.type == "cpu" and not t.is_quantized


def order_in_memory(shape: Sequence[int], strides: Sequence[int]) -> tuple[int, ...] | None:
    """The axes of a dense tensor from the outermost in memory to the innermost: permuted by them it is contiguous. None for a tensor with
    gaps or repetitions."""
    order = sorted(range(len(shape)), key=lambda i: (-strides[i], i) if shape[i] != 1 else (-float("inf"), i))
    expected = 1
    for i in reversed(order):
        if shape[i] != 1 and strides[i] != expected:
            return tuple(range(len(shape))) if 0 in shape else None
        expected *= shape[i]
    natural = tuple(range(len(shape)))
    # axes of extent 1 have no place of their own: keep the order of the others, and the natural one where that is the same
    long = [i for i in order if shape[i] != 1]
    return natural if long == sorted(long) else tuple(order)


def inverse(order: Sequence[int]) -> tuple[int, ...]:
    """The permutation that undoes `order`."""
    back = [0] * len(order)
    for place, axis in enumerate(order):
        back[axis] = place
    return tuple(back)


def array_over(t: Any) -> Array:
    """The array over the memory of a CPU tensor, in its shape and strides; bfloat16 as its bits."""
    t = t.detach()
    if t.dtype is torch.bfloat16:
        return t.view(torch.int16).numpy().view(np.uint16)     # type: ignore[no-any-return]
    return t.numpy()       # type: ignore[no-any-return]


def tensor_over(array: Array, dtype: Any) -> Any:
    """The PyTorch tensor over an array's memory; `dtype`: bfloat16 for bits."""
    if dtype is torch.bfloat16:
        return torch.from_numpy(array.view(np.int16)).view(torch.bfloat16)
    return torch.from_numpy(array)


class _Writable:
    """The memory of a read-only array as writable, for a library that takes no other and does not write."""

    def __init__(self, array: Array) -> None:
        self.array = array
        self.__array_interface__ = {**array.__array_interface__, "data": (array.__array_interface__["data"][0], False)}


def tensor_to_read(array: Array) -> Any:
    """The PyTorch tensor over an array that may be read-only. Nobody may write to it."""
    return torch.from_numpy(array if array.flags.writeable else np.asarray(_Writable(array)))
