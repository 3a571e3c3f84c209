"""Activations, products and norms that onnxruntime's optimiser fuses from several operators."""
from __future__ import annotations

from collections.abc import Callable

import numpy as np

from svod.onnx.operators.activations import hard_sigmoid, swish
from svod.onnx.operators.convolution import convolve
from svod.onnx.operators.products import gemm
from svod.onnx.registry import MICROSOFT, OnnxNode, axis_in, operator
from svod.tensor import Tensor

operator("Gelu", domain=MICROSOFT)(lambda node, x: x.gelu())
operator("BiasGelu", domain=MICROSOFT)(lambda node, x, bias: x.add(bias).gelu())
operator("FastGelu", domain=MICROSOFT)(lambda node, x, bias=None: (x if bias is None else x.add(bias)).gelu("tanh"))
operator("QuickGelu", domain=MICROSOFT)(lambda node, x: swish(x, node.get("alpha", 1.702)))


def activated(node: OnnxNode, x: Tensor) -> Tensor:
    """Apply the activation at the end of a fused operator."""
    name, params = node.get("activation", ""), node.get("activation_params") or []
    if name == "LeakyRelu":
        return x.leaky_relu(params[0] if params else node.get("leaky_relu_alpha", 0.01))
    if name == "Clip":
        return x.clamp(params[0], params[1])
    if name == "HardSigmoid":
        return hard_sigmoid(x, params[0], params[1])
    functions: dict[str, Callable[[Tensor], Tensor]] = {
        "": lambda t: t, "Relu": Tensor.relu, "Sigmoid": Tensor.sigmoid, "Tanh": Tensor.tanh, "Gelu": Tensor.gelu}
    return functions[name](x)


@operator("FusedConv", domain=MICROSOFT)
def fused_conv(node: OnnxNode, x: Tensor, w: Tensor, bias: Tensor | None = None, z: Tensor | None = None) -> Tensor:
    y = convolve(node, x, w, bias)
    return activated(node, y if z is None else y.add(z))


@operator("FusedMatMul", domain=MICROSOFT)
def fused_matmul(node: OnnxNode, a: Tensor, b: Tensor) -> Tensor:
    def turned(t: Tensor, name: str) -> Tensor:
        batched = t.movedim(0, -2) if node.get(f"transBatch{name}", 0) else t
        return batched.transpose(-2, -1) if node.get(f"trans{name}", 0) and t.ndim > 1 else batched
    product, alpha = turned(a, "A").matmul(turned(b, "B")), node.get("alpha", 1.0)
    return product if alpha == 1.0 else product.mul(alpha)


@operator("FusedGemm", domain=MICROSOFT)
def fused_gemm(node: OnnxNode, a: Tensor, b: Tensor, c: Tensor | None = None) -> Tensor:
    return activated(node, gemm(node, a, b, c))


# -- norms -----------------------------------------------------------------------------------------------------------------------
@operator("SimplifiedLayerNormalization")
@operator("SimplifiedLayerNormalization", domain=MICROSOFT)
def simplified_norm(node: OnnxNode, x: Tensor, scale: Tensor) -> Tensor:
    axis = axis_in(node.get("axis", -1), x.ndim)
    return x.rms_norm(x.shape[axis:], scale, node.get("epsilon", 1e-5)).cast(x.dtype)


@operator("SkipLayerNormalization", domain=MICROSOFT)
def skip_norm(node: OnnxNode, x: Tensor, skip: Tensor, gamma: Tensor, beta: Tensor | None = None,
              bias: Tensor | None = None) -> tuple[Tensor | None, ...]:
    total = x.add(skip) if bias is None else x.add(skip).add(bias)
    return total.layer_norm(total.shape[-1], gamma, beta, node.get("epsilon", 1e-12)).cast(x.dtype), None, None, total


@operator("SkipSimplifiedLayerNormalization", domain=MICROSOFT)
def skip_simplified(node: OnnxNode, x: Tensor, skip: Tensor, gamma: Tensor, bias: Tensor | None = None) -> tuple[Tensor | None, ...]:
    total = x.add(skip) if bias is None else x.add(skip).add(bias)
    return total.rms_norm(total.shape[-1], gamma, node.get("epsilon", 1e-12)).cast(x.dtype), None, None, total


@operator("EmbedLayerNormalization", domain=MICROSOFT)
def embed_norm(node: OnnxNode, ids: Tensor, segments: Tensor | None, words: Tensor, positions: Tensor, segment_table: Tensor | None = None,
               gamma: Tensor | None = None, beta: Tensor | None = None, mask: Tensor | None = None,
               places: Tensor | None = None) -> tuple[Tensor, ...]:
    at = Tensor(np.arange(ids.shape[1])) if places is None else places
    total = words.take(ids, 0).add(positions.take(at, 0))
    if segment_table is not None:       # without segments, all tokens belong to the first one
        total = total.add(segment_table[0] if segments is None else segment_table.take(segments, 0))
    out = total.layer_norm(total.shape[-1], gamma, beta, node.get("epsilon", 1e-12))
    lengths = Tensor.zeros(ids.shape[0], dtype="int32") if mask is None else mask.sum(1).cast("int32")
    return out, lengths, total
