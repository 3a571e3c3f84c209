"""Normalisation."""
from __future__ import annotations

from svod.errors import UnsupportedError
from svod.onnx.operators.elementwise import svod_type
from svod.onnx.registry import OnnxNode, axis_in, operator
from svod.tensor import Tensor


@operator("BatchNormalization")
def batch_norm(node: OnnxNode, x: Tensor, scale: Tensor, bias: Tensor, mean: Tensor, var: Tensor) -> Tensor:
    if node.get("training_mode", 0):
        raise UnsupportedError(f"{node} in training mode: svod runs models and does not train them")
    return x.batch_norm(mean, var, scale, bias, eps=node.get("epsilon", 1e-5)).cast(x.dtype)


@operator("InstanceNormalization")
def instance_norm(node: OnnxNode, x: Tensor, scale: Tensor, bias: Tensor) -> Tensor:
    return x.instance_norm(None, None, scale, bias, eps=node.get("epsilon", 1e-5)).cast(x.dtype)


@operator("LayerNormalization", 17)
def layer_norm(node: OnnxNode, x: Tensor, scale: Tensor, bias: Tensor | None = None) -> tuple[Tensor, ...]:
    axis = axis_in(node.get("axis", -1), x.ndim)
    out = x.layer_norm(x.shape[axis:], scale, bias, node.get("epsilon", 1e-5)).cast(x.dtype)
    if not any(node.asked[1:]):
        return (out,)
    axes, stash = tuple(range(axis, x.ndim)), svod_type(node.get("stash_type", 1), node)
    mean = x.mean(axes, keepdim=True)
    spread = x.sub(mean).square().mean(axes, keepdim=True).add(node.get("epsilon", 1e-5)).rsqrt()
    return out, mean.cast(stash), spread.cast(stash)


@operator("GroupNormalization", 18)
def group_norm_old(node: OnnxNode, x: Tensor, scale: Tensor, bias: Tensor) -> Tensor:
    """Group norm before opset 21: scale and bias have one element per group, not per channel."""
    groups = node.need("num_groups")
    each = x.shape[1] // groups
    return x.group_norm(groups, scale.repeat_interleave(each), bias.repeat_interleave(each), node.get("epsilon", 1e-5)).cast(x.dtype)


@operator("GroupNormalization", 21)
def group_norm(node: OnnxNode, x: Tensor, scale: Tensor, bias: Tensor) -> Tensor:
    return x.group_norm(node.need("num_groups"), scale, bias, node.get("epsilon", 1e-5)).cast(x.dtype)


@operator("RMSNormalization", 23)
def rms_norm(node: OnnxNode, x: Tensor, scale: Tensor) -> Tensor:
    axis = axis_in(node.get("axis", -1), x.ndim)
    return x.rms_norm(x.shape[axis:], scale, node.get("epsilon", 1e-5)).cast(scale.dtype)


@operator("LpNormalization")
def lp_normalization(node: OnnxNode, x: Tensor) -> Tensor:
    length = x.norm(float(node.get("p", 2)), node.get("axis", -1), keepdim=True)
    zero = length.eq(0)
    return x.div(length.masked_fill(zero, 1.0)).cast(x.dtype)


@operator("MeanVarianceNormalization", 9)
def mean_variance(node: OnnxNode, x: Tensor) -> Tensor:
    axes = tuple(node.get("axes") or (0, 2, 3))
    centred = x.sub(x.mean(axes, keepdim=True))
    return centred.div(centred.square().mean(axes, keepdim=True).sqrt().add(1e-9)).cast(x.dtype)
