"""Converts PyTorch tensors to arrays over the same memory, or on a GPU to svod tensors over it, and back.

    a dense tensor with permuted axes (channels_last)  ↔  a contiguous array and a permutation of its axes
    bfloat16  ↔  its bits as uint16
    a tensor on cuda:1  ↔  a tensor on CUDA:1, by DLPack
"""
from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch

from svod.core.graph.buffer import buffer_of
from svod.core.graph.storage import base_of
from svod.core.ir.dtype import DType, dtypes
from svod.core.machine.target import HOST
from svod.errors import UnsupportedError
from svod.tensor import Tensor

Array = np.ndarray[Any, np.dtype[Any]]

DTYPES: dict[Any, DType] = {
    torch.bool: dtypes.bool, torch.uint8: dtypes.uint8, torch.int8: dtypes.int8, torch.uint16: dtypes.uint16, torch.int16: dtypes.int16,
    torch.uint32: dtypes.uint32, torch.int32: dtypes.int32, torch.uint64: dtypes.uint64, torch.int64: dtypes.int64,
    torch.float16: dtypes.float16, torch.bfloat16: dtypes.bfloat16, torch.float32: dtypes.float32, torch.float64: dtypes.float64,
}
MOST_WORK = 10_000          # most steps of NumPy's test whether two views share an element
TORCH_DTYPES: dict[DType, Any] = {v: k for k, v in DTYPES.items()}


def svod_dtype(dtype: Any) -> DType:
    """The svod dtype of a PyTorch dtype. Raises UnsupportedError for one that svod lacks."""
    known = DTYPES.get(dtype)
    if known is None:
        raise UnsupportedError(f"svod has no {str(dtype).removeprefix('torch.')}")
    return known


def is_representable(t: Any) -> bool:
    """Whether svod can represent a tensor: strided, not quantised, on the CPU or CUDA, and of a dtype that svod has."""
    return t.dtype in DTYPES and t.layout is torch.strided and (t.device.type == "cpu" or bool(gpu_of(t))) and not t.is_quantized


def gpu_of(t: Any) -> str:
    """svod's name of the GPU that holds a tensor, "CUDA:1"; "" if it is not on a GPU."""
    return f"CUDA:{t.device.index or 0}" if t.device.type == "cuda" else ""


def stream_of(t: Any) -> int:
    """PyTorch's current stream on the GPU of a tensor; 0 for the default stream, and for a tensor on the CPU."""
    return int(torch.cuda.current_stream(t.device).cuda_stream) if t.device.type == "cuda" else 0


def gpu_among(given: Sequence[Any]) -> str:
    """The GPU that a graph of these inputs runs on; "" for the CPU. CPU tensors without axes are allowed among tensors of a GPU, as in
    PyTorch. Raises UnsupportedError for tensors of several GPUs."""
    found = sorted({gpu_of(t) for t in given if isinstance(t, torch.Tensor)} - {""})
    if len(found) > 1:
        raise UnsupportedError(f"tensors on {' and '.join(found)} in one graph")
    return found[0] if found else ""


def order_in_memory(shape: Sequence[int], strides: Sequence[int]) -> tuple[int, ...] | None:
    """The axes of a dense tensor from the outermost in memory to the innermost: a permutation to this order makes it contiguous. None
    for a tensor with gaps or repeated elements."""
    order = sorted(range(len(shape)), key=lambda i: (-strides[i], i) if shape[i] != 1 else (-float("inf"), i))
    expected = 1
    for i in reversed(order):
        if shape[i] != 1 and strides[i] != expected:
            return tuple(range(len(shape))) if 0 in shape else None
        expected *= shape[i]
    natural = tuple(range(len(shape)))
    # axes of extent 1 may be anywhere: if the other axes are in natural order, the natural order is returned
    long = [i for i in order if shape[i] != 1]
    return natural if long == sorted(long) else tuple(order)


def inverse(order: Sequence[int]) -> tuple[int, ...]:
    """The permutation that undoes `order`."""
    return tuple(sorted(range(len(order)), key=order.__getitem__))


def array_over(t: Any) -> Array:
    """The array over the memory of a CPU tensor, with its shape and strides; bfloat16 as uint16 with its bits."""
    if t.requires_grad:
        t = t.detach()
    if t.dtype is torch.bfloat16:
        return t.view(torch.int16).numpy().view(np.uint16)     # type: ignore[no-any-return]
    return t.numpy()       # type: ignore[no-any-return]


def memory_over(t: Any) -> Array | Tensor:
    """The value that a plan reads for a contiguous tensor: the array over its memory, or the svod tensor on its GPU."""
    return Tensor.from_dlpack(t.detach(), stream=stream_of(t)) if gpu_of(t) else array_over(t)


def is_shared(a: Any, b: Any) -> bool:
    """Whether two tensors share the memory of an element; also True if the test would take more than MOST_WORK steps."""
    try:
        return np.shares_memory(np.asarray(_Places(a)), np.asarray(_Places(b)), max_work=MOST_WORK)     # type: ignore[arg-type]
    except np.exceptions.TooHardError:
        return True


def span_of(t: Any) -> tuple[int, int]:
    """The address of a tensor's first byte, and the address after its last."""
    begin = t.data_ptr()
    reach = 1 + sum((n - 1) * s for n, s in zip(t.shape, t.stride(), strict=True)) if t.numel() else 0
    return begin, begin + reach * t.element_size()


class _Places:
    """The addresses of a tensor's elements, as an array for `numpy.shares_memory`. The elements are not read, because they may be on a
    GPU."""

    def __init__(self, t: Any) -> None:
        size = t.element_size()
        self.__array_interface__ = {"version": 3, "data": (t.data_ptr() or size, True), "typestr": f"|V{size}", "shape": tuple(t.shape),
                                    "strides": tuple([s * size for s in t.stride()])}


def reader(t: Any, order: tuple[int, ...] | None) -> Callable[[Any], Array | Tensor]:
    """A function that reads the memory of tensors like `t`. `order`: the axes in the order in which they are contiguous; () for natural
    order; None for tensors with gaps, of which a copy is read."""
    over = memory_over if gpu_of(t) else array_over
    return over if order == () else lambda t: over(in_order(t, order))


def in_order(t: Any, order: tuple[int, ...] | None) -> Any:
    """Make a tensor contiguous: permute it to `order`, or copy it if `order` is None (as in `reader`)."""
    if order is None:
        return t.contiguous()
    return t.permute(order) if order else t


def svod_tensor(t: Any, *, shared: bool) -> Tensor:
    """The svod tensor over the memory of a contiguous tensor. `shared`: code outside svod may write to it."""
    memory = memory_over(t)
    if not isinstance(memory, Tensor):
        return Tensor._over(memory, svod_dtype(t.dtype), shared)
    buffer_of(base_of(memory.uop)).shared = shared
    return memory


def torch_tensor(made: Tensor, dtype: Any, *, copied: bool) -> Any:
    """The PyTorch tensor over the memory of a svod tensor, or over a copy of it."""
    if made.device != HOST:
        t = torch.from_dlpack(made)
        return t.clone() if copied else t
    array = made._memory if made._memory is not None else made._shared_values()
    return tensor_over(array.copy() if copied else array, dtype)


def tensor_over(array: Array, dtype: Any) -> Any:
    """The PyTorch tensor over an array's memory. `dtype` bfloat16: the array holds bits."""
    if dtype is torch.bfloat16:
        return torch.from_numpy(array.view(np.int16)).view(torch.bfloat16)
    return torch.from_numpy(array)


class _Writable:
    """Presents the memory of a read-only array as writable, for a library that accepts no other and does not write to it."""

    def __init__(self, array: Array) -> None:
        self.array = array
        self.__array_interface__ = {**array.__array_interface__, "data": (array.__array_interface__["data"][0], False)}


def tensor_to_read(array: Array) -> Any:
    """The PyTorch tensor over an array that may be read-only. No code may write to the tensor."""
    return torch.from_numpy(array if array.flags.writeable else np.asarray(_Writable(array)))
