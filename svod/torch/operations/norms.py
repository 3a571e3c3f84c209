"""Normalisation and softmax."""
from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from svod.core.ir.dtype import DType
from svod.errors import UnsupportedError
from svod.tensor import Tensor
from svod.torch.operations.table import aten

Later = Callable[[], Tensor]


def _moments(x: Tensor, axes: tuple[int, ...], eps: float) -> tuple[Later, Later]:
    """Functions that compute the mean, and 1 / sqrt(var + eps), along axes when they are called: only training and rare models read
    these results."""
    return (lambda: x.mean(axes, keepdim=True)), (lambda: x.var(axes, 0, keepdim=True).add(eps).rsqrt())


@aten("native_layer_norm")
def layer_norm(x: Tensor, shape: Sequence[int], weight: Tensor | None, bias: Tensor | None, eps: float) -> tuple[Tensor, Later, Later]:
    """The results of layer norm: the normalised tensor, the mean, and the reciprocal deviation."""
    return x.layer_norm(tuple(shape), weight, bias, eps), *_moments(x, tuple(range(x.ndim - len(shape), x.ndim)), eps)


@aten("_weight_norm_interface")
def weight_norm(v: Tensor, g: Tensor, dim: int = 0) -> tuple[Tensor, Tensor]:
    """The results of weight norm: v · g / norm, and the norm of v over all axes but `dim`."""
    norm = v.norm(dim=tuple(a for a in range(v.ndim) if a != dim % v.ndim), keepdim=True)
    return v.mul(g.div(norm)), norm


@aten("native_group_norm")
def group_norm(x: Tensor, weight: Tensor | None, bias: Tensor | None, n: int, channels: int, extent: int, groups: int,
               eps: float) -> tuple[Tensor, Later, Later]:
    """The results of group norm: the normalised tensor, and the mean and the reciprocal deviation of each group."""
    mean, deviation = _moments(x.reshape(n, groups, -1), (2,), eps)
    return x.group_norm(groups, weight, bias, eps), lambda: mean().reshape(n, groups), lambda: deviation().reshape(n, groups)


@aten("_native_batch_norm_legit_no_training")
def batch_norm(x: Tensor, weight: Tensor | None, bias: Tensor | None, mean: Tensor, var: Tensor, momentum: float,
               eps: float) -> tuple[Tensor, Tensor, Tensor]:
    """Batch norm with given statistics. The two empty tensors are the batch's statistics, which only training computes."""
    empty = Tensor.zeros(0)
    return x.batch_norm(mean, var, weight, bias, eps=eps), empty, empty


@aten("_native_batch_norm_legit.no_stats")
def batch_norm_of_batch(x: Tensor, weight: Tensor | None, bias: Tensor | None, training: bool, momentum: float,
                        eps: float) -> tuple[Tensor, Later, Later]:
    """Batch norm with the statistics of the batch; instance norm uses it."""
    if not training:
        raise UnsupportedError("batch norm without statistics outside of training")
    axes = (0, *range(2, x.ndim))
    centred = x - x.mean(axes, keepdim=True)
    scaled = centred * (centred.square().mean(axes, keepdim=True) + eps).rsqrt()
    per_channel = (-1,) + (1,) * (x.ndim - 2)
    scaled = scaled if weight is None else scaled * weight.reshape(per_channel)
    scaled = scaled if bias is None else scaled + bias.reshape(per_channel)
    mean, deviation = _moments(x, axes, eps)
    return scaled, lambda: mean().reshape(-1), lambda: deviation().reshape(-1)


@aten("_fused_rms_norm")
def rms_norm(x: Tensor, shape: Sequence[int], weight: Tensor | None, eps: float | None) -> tuple[Tensor, Later]:
    """The results of RMS norm: the normalised tensor, and 1 / sqrt(mean(x²) + eps)."""
    def deviation() -> Tensor:
        if eps is None:
            raise UnsupportedError("the deviation of an RMS norm without eps")
        return x.square().mean(tuple(range(x.ndim - len(shape), x.ndim)), keepdim=True).add(eps).rsqrt()
    return x.rms_norm(tuple(shape), weight, eps), deviation


@aten("_softmax", "softmax.int")
def softmax(x: Tensor, dim: int, to: bool | DType | None = None, dtype: DType | None = None) -> Tensor:
    """Softmax along an axis: exp(x) / Σ exp(x)."""
    wanted = to if isinstance(to, DType) else dtype
    x = x if wanted is None else x.cast(wanted)
    return x.softmax(dim) if x.ndim else x.reshape(1).softmax(0).reshape()


@aten("_log_softmax", "log_softmax.int")
def log_softmax(x: Tensor, dim: int, to: bool | DType | None = None, dtype: DType | None = None) -> Tensor:
    """The logarithm of softmax along an axis."""
    wanted = to if isinstance(to, DType) else dtype
    return (x if wanted is None else x.cast(wanted)).log_softmax(dim)


@aten("_safe_softmax")
def safe_softmax(x: Tensor, dim: int, dtype: DType | None = None) -> Tensor:
    """Softmax along an axis, with zeros for rows in which all elements are -inf."""
    x = x if dtype is None else x.cast(dtype)
    return x.softmax(dim).where(x.ne(-math.inf).any(dim, keepdim=True), 0)
