"""Convolutions, transposed convolutions, pooling."""
from __future__ import annotations

import math
from collections.abc import Sequence
from typing import ClassVar

from svod.errors import ShapeError, UnsupportedError
from svod.nn.module import Module, fan_in_bound, uniform
from svod.tensor import Tensor

IntOrInts = int | Sequence[int]


class _Windows(Module):
    """A layer over windows of the last `spatial` axes."""

    spatial: ClassVar[int]

    def __init_subclass__(cls, spatial: int = 0) -> None:
        cls.spatial = spatial


class _Conv(_Windows):
    """A weight (out_channels, in_channels/groups, kernel…) and a bias. `padding_mode` as in `Tensor.pad`, 'zeros' for none."""

    def __init__(self, in_channels: int, out_channels: int, kernel_size: IntOrInts, stride: IntOrInts = 1, padding: IntOrInts | str = 0,
                 dilation: IntOrInts = 1, groups: int = 1, bias: bool = True, padding_mode: str = "zeros") -> None:
        kernel = _extents(self, kernel_size, self.spatial)
        _check_groups(self, in_channels, out_channels, groups)
        self.stride, self.padding, self.dilation, self.groups, self.padding_mode = stride, padding, dilation, groups, padding_mode
        bound = fan_in_bound(in_channels // groups * math.prod(kernel))
        self.weight = uniform((out_channels, in_channels // groups, *kernel), bound)
        self.bias = uniform((out_channels,), bound) if bias else None

    def forward(self, x: Tensor) -> Tensor:
        padding = self.padding
        if self.padding_mode != "zeros":
            if isinstance(padding, str):
                raise ShapeError(f"{type(self).__name__} with padding {padding!r} and padding_mode {self.padding_mode!r}: give numbers")
            sides = [n for p in reversed(_extents(self, padding, self.spatial)) for n in (p, p)]
            x, padding = x.pad(sides, mode=self.padding_mode), 0
        name = f"conv{self.spatial}d"
        result: Tensor = getattr(x, name)(self.weight, self.bias, self.stride, padding, self.dilation, self.groups)
        return result


class Conv1d(_Conv, spatial=1):
    """(N, C, L)."""


class Conv2d(_Conv, spatial=2):
    """(N, C, H, W)."""


class Conv3d(_Conv, spatial=3):
    """(N, C, D, H, W)."""


class _ConvTranspose(_Windows):
    """A weight (in_channels, out_channels/groups, kernel…) and a bias."""

    def __init__(self, in_channels: int, out_channels: int, kernel_size: IntOrInts, stride: IntOrInts = 1, padding: IntOrInts = 0,
                 output_padding: IntOrInts = 0, groups: int = 1, bias: bool = True, dilation: IntOrInts = 1) -> None:
        kernel = _extents(self, kernel_size, self.spatial)
        _check_groups(self, in_channels, out_channels, groups)
        self.stride, self.padding, self.output_padding, self.groups, self.dilation = stride, padding, output_padding, groups, dilation
        bound = fan_in_bound(out_channels // groups * math.prod(kernel))
        self.weight = uniform((in_channels, out_channels // groups, *kernel), bound)
        self.bias = uniform((out_channels,), bound) if bias else None

    def forward(self, x: Tensor) -> Tensor:
        name = f"conv_transpose{self.spatial}d"
        sizes = (self.stride, self.padding, self.output_padding, self.groups, self.dilation)
        result: Tensor = getattr(x, name)(self.weight, self.bias, *sizes)
        return result


class ConvTranspose1d(_ConvTranspose, spatial=1):
    """(N, C, L)."""


class ConvTranspose2d(_ConvTranspose, spatial=2):
    """(N, C, H, W)."""


class ConvTranspose3d(_ConvTranspose, spatial=3):
    """(N, C, D, H, W)."""


class _MaxPool(_Windows):
    """The largest of each window of the last axes; `stride` defaults to the kernel's size. `return_indices` is not supported."""

    def __init__(self, kernel_size: IntOrInts, stride: IntOrInts | None = None, padding: IntOrInts = 0, dilation: IntOrInts = 1,
                 return_indices: bool = False, ceil_mode: bool = False) -> None:
        if return_indices:
            raise UnsupportedError(f"{type(self).__name__} with return_indices=True: only the values are computed")
        self.options = {"kernel_size": kernel_size, "stride": stride, "padding": padding, "dilation": dilation, "ceil_mode": ceil_mode}

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = getattr(x, f"max_pool{self.spatial}d")(**self.options)
        return result


class _AvgPool(_Windows):
    """The mean of each window of the last axes; `stride` defaults to the kernel's size."""

    def __init__(self, kernel_size: IntOrInts, stride: IntOrInts | None = None, padding: IntOrInts = 0, ceil_mode: bool = False,
                 count_include_pad: bool = True) -> None:
        self.options = {"kernel_size": kernel_size, "stride": stride, "padding": padding, "ceil_mode": ceil_mode,
                        "count_include_pad": count_include_pad}

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = getattr(x, f"avg_pool{self.spatial}d")(**self.options)
        return result


class MaxPool1d(_MaxPool, spatial=1):
    """`Tensor.max_pool1d`."""


class MaxPool2d(_MaxPool, spatial=2):
    """`Tensor.max_pool2d`."""


class MaxPool3d(_MaxPool, spatial=3):
    """`Tensor.max_pool3d`."""


class AvgPool1d(_AvgPool, spatial=1):
    """`Tensor.avg_pool1d`."""


class AvgPool2d(_AvgPool, spatial=2):
    """`Tensor.avg_pool2d`."""


class AvgPool3d(_AvgPool, spatial=3):
    """`Tensor.avg_pool3d`."""


def _extents(module: Module, size: IntOrInts, axes: int) -> tuple[int, ...]:
    sizes = (size,) * axes if isinstance(size, int) else tuple(size)
    if len(sizes) != axes:
        raise ShapeError(f"{type(module).__name__} with {sizes}: give one number, or one for each of {axes} axes")
    return sizes


def _check_groups(module: Module, in_channels: int, out_channels: int, groups: int) -> None:
    if groups < 1 or in_channels % groups or out_channels % groups:
        raise ShapeError(f"{type(module).__name__} from {in_channels} to {out_channels} channels in {groups} group(s): groups divides both")
