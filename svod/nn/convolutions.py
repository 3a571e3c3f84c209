"""Layers of convolutions, transposed convolutions and pooling."""
from __future__ import annotations

import math
from typing import Any, ClassVar

from svod.errors import ShapeError, UnsupportedError
from svod.nn.module import Module, fan_in_bound, uniform
from svod.tensor import Tensor
from svod.tensor.operations.nn import IntOrInts, per_axis


class _Windows(Module):
    """A layer over windows of the last `spatial` axes; `operation` is the name of Tensor's method without its suffix, such as "conv" for
    conv2d."""

    operation = ""
    spatial: ClassVar[int] = 0

    def __init_subclass__(cls, spatial: int = 0) -> None:
        cls.spatial = spatial or cls.spatial

    def _extents(self, what: str, size: IntOrInts) -> tuple[int, ...]:
        return per_axis(type(self).__name__, what, size, self.spatial)

    def _apply(self, x: Tensor, *args: Any, **options: Any) -> Tensor:
        result: Tensor = getattr(x, f"{self.operation}{self.spatial}d")(*args, **options)
        return result


class _Conv(_Windows):
    """A convolution layer with a weight (out_channels, in_channels/groups, kernel…) and a bias. `padding_mode` is 'zeros' or a mode of
    `Tensor.pad`."""

    operation = "conv"

    def __init__(self, in_channels: int, out_channels: int, kernel_size: IntOrInts, stride: IntOrInts = 1, padding: IntOrInts | str = 0,
                 dilation: IntOrInts = 1, groups: int = 1, bias: bool = True, padding_mode: str = "zeros") -> None:
        kernel = self._extents("kernel_size", kernel_size)
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
            sides = [n for p in reversed(self._extents("padding", padding)) for n in (p, p)]
            x, padding = x.pad(sides, mode=self.padding_mode), 0
        return self._apply(x, self.weight, self.bias, self.stride, padding, self.dilation, self.groups)


class Conv1d(_Conv, spatial=1): """`Tensor.conv1d` of (N, C, L)."""
class Conv2d(_Conv, spatial=2): """`Tensor.conv2d` of (N, C, H, W)."""
class Conv3d(_Conv, spatial=3): """`Tensor.conv3d` of (N, C, D, H, W)."""


class _ConvTranspose(_Windows):
    """A transposed convolution layer with a weight (in_channels, out_channels/groups, kernel…) and a bias."""

    operation = "conv_transpose"

    def __init__(self, in_channels: int, out_channels: int, kernel_size: IntOrInts, stride: IntOrInts = 1, padding: IntOrInts = 0,
                 output_padding: IntOrInts = 0, groups: int = 1, bias: bool = True, dilation: IntOrInts = 1) -> None:
        kernel = self._extents("kernel_size", kernel_size)
        _check_groups(self, in_channels, out_channels, groups)
        self.stride, self.padding, self.output_padding, self.groups, self.dilation = stride, padding, output_padding, groups, dilation
        bound = fan_in_bound(out_channels // groups * math.prod(kernel))
        self.weight = uniform((in_channels, out_channels // groups, *kernel), bound)
        self.bias = uniform((out_channels,), bound) if bias else None

    def forward(self, x: Tensor) -> Tensor:
        return self._apply(x, self.weight, self.bias, self.stride, self.padding, self.output_padding, self.groups, self.dilation)


class ConvTranspose1d(_ConvTranspose, spatial=1): """`Tensor.conv_transpose1d` of (N, C, L)."""
class ConvTranspose2d(_ConvTranspose, spatial=2): """`Tensor.conv_transpose2d` of (N, C, H, W)."""
class ConvTranspose3d(_ConvTranspose, spatial=3): """`Tensor.conv_transpose3d` of (N, C, D, H, W)."""


class _Pool(_Windows):
    options: dict[str, Any]

    def forward(self, x: Tensor) -> Tensor:
        return self._apply(x, **self.options)


class _MaxPool(_Pool):
    """Max pooling: the largest value of each window of the last axes. `stride` defaults to the kernel size. `return_indices` is not
    supported."""

    operation = "max_pool"

    def __init__(self, kernel_size: IntOrInts, stride: IntOrInts | None = None, padding: IntOrInts = 0, dilation: IntOrInts = 1,
                 return_indices: bool = False, ceil_mode: bool = False) -> None:
        if return_indices:
            raise UnsupportedError(f"{type(self).__name__} with return_indices=True: only the values are computed")
        self.options = {"kernel_size": kernel_size, "stride": stride, "padding": padding, "dilation": dilation, "ceil_mode": ceil_mode}


class _AvgPool(_Pool):
    """Average pooling: the mean of each window of the last axes. `stride` defaults to the kernel size."""

    operation = "avg_pool"

    def __init__(self, kernel_size: IntOrInts, stride: IntOrInts | None = None, padding: IntOrInts = 0, ceil_mode: bool = False,
                 count_include_pad: bool = True) -> None:
        self.options = {"kernel_size": kernel_size, "stride": stride, "padding": padding, "ceil_mode": ceil_mode,
                        "count_include_pad": count_include_pad}


class MaxPool1d(_MaxPool, spatial=1): """`Tensor.max_pool1d`."""
class MaxPool2d(_MaxPool, spatial=2): """`Tensor.max_pool2d`."""
class MaxPool3d(_MaxPool, spatial=3): """`Tensor.max_pool3d`."""
class AvgPool1d(_AvgPool, spatial=1): """`Tensor.avg_pool1d`."""
class AvgPool2d(_AvgPool, spatial=2): """`Tensor.avg_pool2d`."""
class AvgPool3d(_AvgPool, spatial=3): """`Tensor.avg_pool3d`."""


def _check_groups(module: Module, in_channels: int, out_channels: int, groups: int) -> None:
    if groups < 1 or in_channels % groups or out_channels % groups:
        raise ShapeError(f"{type(module).__name__} from {in_channels} to {out_channels} channels in {groups} group(s): groups divide both")
