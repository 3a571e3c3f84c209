"""Tensor methods as modules, for use in a Sequential."""
from __future__ import annotations

from typing import Any

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
    """Returns its argument, because svod runs models only."""

    def __init__(self, p: float = 0.5, inplace: bool = False) -> None:
        self.p = p

    def forward(self, x: Tensor) -> Tensor:
        return x


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
