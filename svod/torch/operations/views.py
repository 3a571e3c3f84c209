"""Operations that move or select elements without computing: reshape, permute, slice, expand, pad, concatenation."""
from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from svod.core.ir.variable import upper
from svod.errors import UnsupportedError
from svod.tensor import Tensor
from svod.torch.operations.table import aten, methods

methods("permute unsqueeze flip diagonal narrow pixel_shuffle pixel_unshuffle tril triu roll repeat unfold stack", widens=False)
aten("view", "reshape", "_unsafe_view", "view_copy", "_reshape_alias", widens=False)(lambda x, size, *_: x.reshape(*size))
aten("view.dtype", widens=False)(Tensor.bitcast)
aten("transpose.int", widens=False)(Tensor.transpose)
aten("unbind.int", widens=False)(Tensor.unbind)
aten("split.Tensor", "split_with_sizes", "split_with_sizes_copy", "unsafe_split.Tensor", "unsafe_split_with_sizes",
     widens=False)(Tensor.split)
aten("permute_copy", widens=False)(Tensor.permute)
aten("unsqueeze_copy", widens=False)(Tensor.unsqueeze)
aten("t", widens=False)(lambda x: x if x.ndim < 2 else x.transpose(0, 1))
aten("numpy_T", widens=False)(lambda x: x.permute(*reversed(range(x.ndim))))


@aten("squeeze", "squeeze.dim", "squeeze.dims", "squeeze_copy.dims", widens=False)
def squeeze(x: Tensor, dim: int | Sequence[int] | None = None) -> Tensor:
    """Remove the axes among `dim` that have extent 1."""
    chosen = range(x.ndim) if dim is None else [dim] if isinstance(dim, int) else dim
    gone = {d % max(1, x.ndim) for d in chosen}
    return x.reshape(*(n for i, n in enumerate(x.shape) if n != 1 or i not in gone))


@aten("expand", "expand_copy", widens=False)
def expand(x: Tensor, size: Sequence[int], implicit: bool = False) -> Tensor:
    """Repeat axes of extent 1; -1 keeps an extent, and new axes are added in front."""
    return x.expand(*size)


@aten("slice.Tensor", "slice_copy.Tensor", widens=False)
def slice_(x: Tensor, dim: int = 0, start: int | None = None, end: int | None = None, step: int = 1) -> Tensor:
    """The slice x[start:end:step] along an axis."""
    if isinstance(end, int) and end >= upper(x.shape[dim]):
        end = None
    index: list[Any] = [slice(None)] * x.ndim
    index[dim] = slice(start, end, step)
    return x[tuple(index)]


@aten("select.int", "select_copy.int", widens=False)
def select(x: Tensor, dim: int, index: int) -> Tensor:
    """Select x[index] along an axis, which is dropped."""
    at: list[Any] = [slice(None)] * x.ndim
    at[dim] = index
    return x[tuple(at)]


@aten("cat", widens=False)
def cat(tensors: Sequence[Tensor], dim: int = 0) -> Tensor:
    """Concatenate tensors along an axis. Tensors of shape (0,) are left out, as in PyTorch."""
    kept = [t for t in tensors if t.shape != (0,)] or list(tensors[:1])
    return Tensor.cat(kept, dim) if len(kept) > 1 else kept[0]


@aten("constant_pad_nd", widens=False)
def constant_pad(x: Tensor, pad: Sequence[int], value: Any = 0) -> Tensor:
    """Pad the ends of the last axes; `pad` has pairs, the last axis first, and negative numbers remove elements."""
    return x.pad(tuple(pad), value=value) if pad else x


for _mode, _name in (("reflect", "reflection_pad"), ("replicate", "replication_pad")):
    aten(*[f"{_name}{n}d" for n in (1, 2, 3)], widens=False)(lambda x, padding, mode=_mode: x.pad(tuple(padding), mode=mode))


@aten("as_strided", "as_strided_copy", widens=False)
def as_strided(x: Tensor, size: Sequence[int], stride: Sequence[int], storage_offset: int | None = None) -> Tensor:
    """Elements of x, which is contiguous in PyTorch, at positions storage_offset + Σ index · stride."""
    begin, n = storage_offset or 0, math.prod(size)
    flat = x.reshape(-1)
    if tuple(stride) == tuple(math.prod(size[i + 1:]) for i in range(len(size))):
        return flat[begin:begin + n].reshape(*size)
    return flat.take(strided_positions(size, stride, begin), 0)


def strided_positions(size: Sequence[int], stride: Sequence[int], begin: int) -> np.ndarray[Any, np.dtype[np.int64]]:
    """The positions begin + Σ index · stride, in an array of shape `size`."""
    positions = begin + sum((np.arange(n).reshape(-1, *(1,) * (len(size) - 1 - i)) * s for i, (n, s) in
                             enumerate(zip(size, stride, strict=True))), np.zeros((1,) * len(size), np.int64))
    return np.broadcast_to(positions, size).astype(np.int64)


@aten("repeat_interleave.self_int", widens=False)
def repeat_interleave(x: Tensor, repeats: int, dim: int | None = None, output_size: int | None = None) -> Tensor:
    """Repeat each element several times in a row."""
    return x.repeat_interleave(repeats, dim)


@aten("im2col", widens=False)
def im2col(x: Tensor, kernel_size: Sequence[int], dilation: Sequence[int], padding: Sequence[int], stride: Sequence[int]) -> Tensor:
    """The windows of images as columns of a matrix."""
    if x.ndim != 4:
        raise UnsupportedError(f"im2col of {x.shape}: images are (N, C, H, W)")
    windows = x._windows("im2col", [(p, p) for p in padding], 0, kernel_size, stride, dilation)
    n, c, high, wide = windows.shape[:4]
    return windows.permute(0, 1, 4, 5, 2, 3).reshape(n, c * math.prod(kernel_size), high * wide)
