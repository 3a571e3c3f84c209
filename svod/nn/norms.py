"""Normalisation layers."""
from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

from svod.errors import ShapeError
from svod.nn.module import Module
from svod.tensor import Tensor


class _ChannelNorm(Module):
    """A norm with a weight and a bias per channel (axis 1). `axes`: the allowed numbers of axes of its input. `momentum` is ignored."""

    axes: ClassVar[tuple[int, ...]] = ()

    def __init_subclass__(cls, axes: tuple[int, ...] = ()) -> None:
        cls.axes = axes or cls.axes

    def __init__(self, num_features: int, eps: float = 1e-5, momentum: float | None = 0.1, affine: bool = True) -> None:
        self.eps = eps
        self.weight = Tensor.ones(num_features) if affine else None
        self.bias = Tensor.zeros(num_features) if affine else None

    def check_axes(self, x: Tensor) -> None:
        if x.ndim not in self.axes:
            raise ShapeError(f"{type(self).__name__} of {x.shape}: it takes {' or '.join(map(str, self.axes))} axes")


class _BatchNorm(_ChannelNorm):
    """Batch norm with stored statistics: (x - running_mean) / sqrt(running_var + eps) · weight + bias."""

    running_mean: Tensor
    running_var: Tensor

    def __init__(self, num_features: int, eps: float = 1e-5, momentum: float | None = 0.1, affine: bool = True) -> None:
        super().__init__(num_features, eps, momentum, affine)
        self.register_buffer("running_mean", Tensor.zeros(num_features))
        self.register_buffer("running_var", Tensor.ones(num_features))

    def forward(self, x: Tensor) -> Tensor:
        self.check_axes(x)
        return x.batch_norm(self.running_mean, self.running_var, self.weight, self.bias, self.training, eps=self.eps)


class BatchNorm1d(_BatchNorm, axes=(2, 3)): """`Tensor.batch_norm` of (N, C) or (N, C, L)."""
class BatchNorm2d(_BatchNorm, axes=(4,)): """`Tensor.batch_norm` of (N, C, H, W)."""
class BatchNorm3d(_BatchNorm, axes=(5,)): """`Tensor.batch_norm` of (N, C, D, H, W)."""


class LayerNorm(Module):
    """`Tensor.layer_norm` over the last axes, whose extents are `normalized_shape`."""

    def __init__(self, normalized_shape: int | Sequence[int], eps: float = 1e-5, elementwise_affine: bool = True,
                 bias: bool = True) -> None:
        self.normalized_shape = (normalized_shape,) if isinstance(normalized_shape, int) else tuple(normalized_shape)
        self.eps = eps
        self.weight = Tensor.ones(self.normalized_shape) if elementwise_affine else None
        self.bias = Tensor.zeros(self.normalized_shape) if elementwise_affine and bias else None

    def forward(self, x: Tensor) -> Tensor:
        return x.layer_norm(self.normalized_shape, self.weight, self.bias, self.eps)


class RMSNorm(Module):
    """RMS norm x / sqrt(mean(x²) + eps) · weight, with the mean over the last axes."""

    def __init__(self, normalized_shape: int | Sequence[int], eps: float | None = None, elementwise_affine: bool = True) -> None:
        self.normalized_shape = (normalized_shape,) if isinstance(normalized_shape, int) else tuple(normalized_shape)
        self.eps = eps
        self.weight = Tensor.ones(self.normalized_shape) if elementwise_affine else None

    def forward(self, x: Tensor) -> Tensor:
        return x.rms_norm(self.normalized_shape, self.weight, self.eps)


class GroupNorm(Module):
    """Layer norm over each of `num_groups` groups of channels (axis 1) and all later axes."""

    def __init__(self, num_groups: int, num_channels: int, eps: float = 1e-5, affine: bool = True) -> None:
        self.num_groups, self.eps = num_groups, eps
        self.weight = Tensor.ones(num_channels) if affine else None
        self.bias = Tensor.zeros(num_channels) if affine else None

    def forward(self, x: Tensor) -> Tensor:
        return x.group_norm(self.num_groups, self.weight, self.bias, self.eps)


class _InstanceNorm(_ChannelNorm):
    """Instance norm: layer norm of each channel over the axes after it."""

    def __init__(self, num_features: int, eps: float = 1e-5, momentum: float | None = 0.1, affine: bool = False) -> None:
        super().__init__(num_features, eps, momentum, affine)

    def forward(self, x: Tensor) -> Tensor:
        self.check_axes(x)
        return x.instance_norm(None, None, self.weight, self.bias, eps=self.eps)


class InstanceNorm1d(_InstanceNorm, axes=(3,)): """`Tensor.instance_norm` of (N, C, L)."""
class InstanceNorm2d(_InstanceNorm, axes=(4,)): """`Tensor.instance_norm` of (N, C, H, W)."""
class InstanceNorm3d(_InstanceNorm, axes=(5,)): """`Tensor.instance_norm` of (N, C, D, H, W)."""
