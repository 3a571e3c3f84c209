"""Tensor methods as modules, for use in a Sequential."""
from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from svod.errors import ArgumentError
from svod.nn.module import Module
from svod.tensor import Tensor


class Function(Module):
    """A module that calls a method of Tensor with fixed options."""

    method = ""
    names: tuple[str, ...] = ()

    def __init__(self, *args: Any, **options: Any) -> None:
        options.pop("inplace", None)        # PyTorch's `inplace` has no effect: tensors are values
        self.options = self._by_name(args, options)

    def _by_name(self, args: Sequence[Any], options: Mapping[str, Any]) -> dict[str, Any]:
        """The options by name. Raises TypeError for options that are unknown or given twice."""
        given = dict(zip(self.names, args, strict=False))
        wrong = sorted(options.keys() - set(self.names) | options.keys() & given.keys())
        if len(args) > len(self.names) or wrong:
            raise TypeError(f"{type(self).__name__} takes the options {self.names}; {wrong or args} are unknown or given twice")
        return {**given, **options}

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = getattr(x, self.method)(**self.options)
        return result


class ReLU(Function): method = "relu"
class ReLU6(Function): method = "relu6"
class LeakyReLU(Function): method, names = "leaky_relu", ("negative_slope",)
class ELU(Function): method, names = "elu", ("alpha",)
class SELU(Function): method = "selu"
class GELU(Function): method, names = "gelu", ("approximate",)
class GLU(Function): method, names = "glu", ("dim",)
class SiLU(Function): method = "silu"
class CELU(Function): method, names = "celu", ("alpha",)
class Hardtanh(Function): method, names = "hardtanh", ("min_val", "max_val")
class Hardshrink(Function): method, names = "hardshrink", ("lambd",)
class Softshrink(Function): method, names = "softshrink", ("lambd",)
class Tanhshrink(Function): method = "tanhshrink"
class Threshold(Function): method, names = "threshold", ("threshold", "value")
class LogSigmoid(Function): method = "logsigmoid"
class Softsign(Function): method = "softsign"
class Mish(Function): method = "mish"
class Sigmoid(Function): method = "sigmoid"
class Hardsigmoid(Function): method = "hardsigmoid"
class Hardswish(Function): method = "hardswish"
class Tanh(Function): method = "tanh"
class Softplus(Function): method, names = "softplus", ("beta", "threshold")
class Softmax(Function): method, names = "softmax", ("dim",)
class LogSoftmax(Function): method, names = "log_softmax", ("dim",)
class PixelShuffle(Function): method, names = "pixel_shuffle", ("upscale_factor",)
class PixelUnshuffle(Function): method, names = "pixel_unshuffle", ("downscale_factor",)
class AdaptiveAvgPool1d(Function): method, names = "adaptive_avg_pool1d", ("output_size",)
class AdaptiveAvgPool2d(Function): method, names = "adaptive_avg_pool2d", ("output_size",)
class Upsample(Function): method, names = "interpolate", ("size", "scale_factor", "mode", "align_corners")


class Identity(Module):
    """Returns its argument unchanged."""

    def forward(self, x: Any) -> Any:
        return x


class Dropout(Module):
    """Returns its argument unchanged; after `train()`, elements become 0 with probability `p`, and the others are divided by 1 - p."""

    def __init__(self, p: float = 0.5, inplace: bool = False) -> None:
        if not 0 <= p <= 1:
            raise ArgumentError(f"Dropout({p}): the probability is between 0 and 1")
        self.p = p

    def forward(self, x: Tensor) -> Tensor:
        if not self.training or not self.p:
            return x
        return (x / (1 - self.p)).where(Tensor.rand(*x.shape) >= self.p, 0.0) if self.p < 1 else x * 0


class Unflatten(Module):
    """Splits axis `dim` into axes of extents `unflattened_size`."""

    def __init__(self, dim: int, unflattened_size: Sequence[int]) -> None:
        self.dim, self.unflattened_size = dim, tuple(unflattened_size)

    def forward(self, x: Tensor) -> Tensor:
        return x.unflatten(self.dim, self.unflattened_size)


class _Pad(Module):
    """Pads the last axes. `padding`: before and after the last axis, before and after the axis before it, …; or one number for all
    sides."""

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
    """Merges the axes start_dim … end_dim into one."""

    def __init__(self, start_dim: int = 1, end_dim: int = -1) -> None:
        self.start_dim, self.end_dim = start_dim, end_dim

    def forward(self, x: Tensor) -> Tensor:
        return x.flatten(self.start_dim, self.end_dim)


class PReLU(Module):
    """PReLU: x for x > 0, otherwise weight · x, with a single weight or one per channel (axis 1)."""

    def __init__(self, num_parameters: int = 1, init: float = 0.25) -> None:
        self.weight = Tensor.full((num_parameters,), init)

    def forward(self, x: Tensor) -> Tensor:
        return x.prelu(self.weight)
