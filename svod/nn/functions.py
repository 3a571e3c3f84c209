"""Tensor methods as modules, for use in a Sequential."""
from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from svod.errors import ArgumentError
from svod.nn.module import Module
from svod.tensor import Tensor


class _Function(Module):
    """A method of Tensor with fixed options."""

    method = ""
    names: tuple[str, ...] = ()

    def __init__(self, *args: Any, **options: Any) -> None:
        if len(args) > len(self.names):
            raise TypeError(f"{type(self).__name__} takes {len(self.names)} option(s) {self.names}, got {len(args)}")
        given = dict(zip(self.names, args, strict=False))
        known = {k: v for k, v in options.items() if k != "inplace"}     # PyTorch's `inplace` has no effect: tensors are values
        twice, wrong = set(given) & set(known), set(known) - set(self.names)
        if twice or wrong:
            raise TypeError(f"{type(self).__name__}: options {sorted(twice | wrong)} are given twice or unknown; it takes {self.names}")
        self.options = {**given, **known}

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = getattr(x, self.method)(**self.options)
        return result


class ReLU(_Function): method = "relu"
class ReLU6(_Function): method = "relu6"
class LeakyReLU(_Function): method, names = "leaky_relu", ("negative_slope",)
class ELU(_Function): method, names = "elu", ("alpha",)
class SELU(_Function): method = "selu"
class GELU(_Function): method, names = "gelu", ("approximate",)
class GLU(_Function): method, names = "glu", ("dim",)
class SiLU(_Function): method = "silu"
class CELU(_Function): method, names = "celu", ("alpha",)
class Hardtanh(_Function): method, names = "hardtanh", ("min_val", "max_val")
class Hardshrink(_Function): method, names = "hardshrink", ("lambd",)
class Softshrink(_Function): method, names = "softshrink", ("lambd",)
class Tanhshrink(_Function): method = "tanhshrink"
class Threshold(_Function): method, names = "threshold", ("threshold", "value")
class LogSigmoid(_Function): method = "logsigmoid"
class Softsign(_Function): method = "softsign"
class Mish(_Function): method = "mish"
class Sigmoid(_Function): method = "sigmoid"
class Hardsigmoid(_Function): method = "hardsigmoid"
class Hardswish(_Function): method = "hardswish"
class Tanh(_Function): method = "tanh"
class Softplus(_Function): method, names = "softplus", ("beta", "threshold")
class Softmax(_Function): method, names = "softmax", ("dim",)
class LogSoftmax(_Function): method, names = "log_softmax", ("dim",)
class PixelShuffle(_Function): method, names = "pixel_shuffle", ("upscale_factor",)
class PixelUnshuffle(_Function): method, names = "pixel_unshuffle", ("downscale_factor",)
class AdaptiveAvgPool1d(_Function): method, names = "adaptive_avg_pool1d", ("output_size",)
class AdaptiveAvgPool2d(_Function): method, names = "adaptive_avg_pool2d", ("output_size",)
class Upsample(_Function): method, names = "interpolate", ("size", "scale_factor", "mode", "align_corners")


class Identity(Module):
    """Returns its argument."""

    def forward(self, x: Any) -> Any:
        return x


class Dropout(Module):
    """Returns its argument; after `train()`, elements are 0 with probability `p`, and the others divided by 1 - p."""

    def __init__(self, p: float = 0.5, inplace: bool = False) -> None:
        if not 0 <= p <= 1:
            raise ArgumentError(f"Dropout({p}): the probability is between 0 and 1")
        self.p = p

    def forward(self, x: Tensor) -> Tensor:
        if not self.training or not self.p:
            return x
        return (x / (1 - self.p)).where(Tensor.rand(*x.shape) >= self.p, 0.0) if self.p < 1 else x * 0


class Unflatten(Module):
    """Axis `dim` split into axes of extents `unflattened_size`."""

    def __init__(self, dim: int, unflattened_size: Sequence[int]) -> None:
        self.dim, self.unflattened_size = dim, tuple(unflattened_size)

    def forward(self, x: Tensor) -> Tensor:
        return x.unflatten(self.dim, self.unflattened_size)


class _Pad(Module):
    """Axes at the end padded by `padding`: before and after the last axis, before and after the one before it, …; one number for all."""

    mode, axes = "constant", 1

    def __init__(self, padding: int | Sequence[int], value: float = 0.0) -> None:
        self.padding = (padding,) * (2 * self.axes) if isinstance(padding, int) else tuple(padding)
        self.value = value

    def forward(self, x: Tensor) -> Tensor:
        return x.pad(self.padding, self.mode, self.value)


class ConstantPad1d(_Pad): axes = 1
class ConstantPad2d(_Pad): axes = 2
class ConstantPad3d(_Pad): axes = 3
class ZeroPad1d(_Pad): axes = 1
class ZeroPad2d(_Pad): axes = 2
class ZeroPad3d(_Pad): axes = 3
class ReflectionPad1d(_Pad): mode, axes = "reflect", 1
class ReflectionPad2d(_Pad): mode, axes = "reflect", 2
class ReplicationPad1d(_Pad): mode, axes = "replicate", 1
class ReplicationPad2d(_Pad): mode, axes = "replicate", 2


class Flatten(Module):
    """Axes start_dim … end_dim merged into one."""

    def __init__(self, start_dim: int = 1, end_dim: int = -1) -> None:
        self.start_dim, self.end_dim = start_dim, end_dim

    def forward(self, x: Tensor) -> Tensor:
        return x.flatten(self.start_dim, self.end_dim)


class PReLU(Module):
    """x where positive, weight · x elsewhere, with one weight or one per channel (axis 1)."""

    def __init__(self, num_parameters: int = 1, init: float = 0.25) -> None:
        self.weight = Tensor.full((num_parameters,), init)

    def forward(self, x: Tensor) -> Tensor:
        return x.prelu(self.weight)
