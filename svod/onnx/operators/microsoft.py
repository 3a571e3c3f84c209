"""Operators of com.microsoft, which exported and optimised transformers have."""
from __future__ import annotations

import math
from collections.abc import Callable
from functools import reduce

import numpy as np

from svod.errors import UnsupportedError
from svod.onnx.operators.convolution import convolve
from svod.onnx.operators.products import shifted
from svod.onnx.operators.quantised import to_integers
from svod.onnx.registry import MICROSOFT, Node, axis_in, operator
from svod.tensor import Tensor, where


@operator("Gelu", domain=MICROSOFT)
def gelu(node: Node, x: Tensor) -> Tensor:
    return x.gelu()


@operator("BiasGelu", domain=MICROSOFT)
def bias_gelu(node: Node, x: Tensor, bias: Tensor) -> Tensor:
    return x.add(bias).gelu()


@operator("FastGelu", domain=MICROSOFT)
def fast_gelu(node: Node, x: Tensor, bias: Tensor | None = None) -> Tensor:
    return (x if bias is None else x.add(bias)).gelu("tanh")


@operator("QuickGelu", domain=MICROSOFT)
def quick_gelu(node: Node, x: Tensor) -> Tensor:
    return x.mul(x.mul(node.get("alpha", 1.702)).sigmoid())


def activated(node: Node, x: Tensor) -> Tensor:
    """The activation that a fused operator ends with."""
    name, params = node.get("activation", ""), node.get("activation_params") or []
    if name == "LeakyRelu":
        return x.leaky_relu(params[0] if params else node.get("leaky_relu_alpha", 0.01))
    if name == "Clip":
        return x.clamp(params[0], params[1])
    if name == "HardSigmoid":
        return x.mul(params[0]).add(params[1]).clamp(0.0, 1.0)
    functions: dict[str, Callable[[Tensor], Tensor]] = {
        "": lambda t: t, "Relu": Tensor.relu, "Sigmoid": Tensor.sigmoid, "Tanh": Tensor.tanh, "Gelu": Tensor.gelu}
    return functions[name](x)


@operator("FusedConv", domain=MICROSOFT)
def fused_conv(node: Node, x: Tensor, w: Tensor, bias: Tensor | None = None, z: Tensor | None = None) -> Tensor:
    y = convolve(node, x, w, bias)
    return activated(node, y if z is None else y.add(z))


@operator("FusedMatMul", domain=MICROSOFT)
def fused_matmul(node: Node, a: Tensor, b: Tensor) -> Tensor:
    def turned(t: Tensor, name: str) -> Tensor:
        batched = t.movedim(0, -2) if node.get(f"transBatch{name}", 0) else t
        return batched.transpose(-2, -1) if node.get(f"trans{name}", 0) and t.ndim > 1 else batched
    product, alpha = turned(a, "A").matmul(turned(b, "B")), node.get("alpha", 1.0)
    return product if alpha == 1.0 else product.mul(alpha)


@operator("FusedGemm", domain=MICROSOFT)
def fused_gemm(node: Node, a: Tensor, b: Tensor, c: Tensor | None = None) -> Tensor:
    from svod.onnx.operators.products import gemm
    result: Tensor = gemm(node, a, b, c)
    return activated(node, result)


# -- norms -----------------------------------------------------------------------------------------------------------------------
@operator("SimplifiedLayerNormalization")
@operator("SimplifiedLayerNormalization", domain=MICROSOFT)
def simplified_norm(node: Node, x: Tensor, scale: Tensor) -> Tensor:
    axis = axis_in(node.get("axis", -1), x.ndim)
    return x.rms_norm(x.shape[axis:], scale, node.get("epsilon", 1e-5)).cast(x.dtype)


@operator("SkipLayerNormalization", domain=MICROSOFT)
def skip_norm(node: Node, x: Tensor, skip: Tensor, gamma: Tensor, beta: Tensor | None = None,
              bias: Tensor | None = None) -> tuple[Tensor | None, ...]:
    total = x.add(skip) if bias is None else x.add(skip).add(bias)
    return total.layer_norm(total.shape[-1], gamma, beta, node.get("epsilon", 1e-12)).cast(x.dtype), None, None, total


@operator("SkipSimplifiedLayerNormalization", domain=MICROSOFT)
def skip_simplified(node: Node, x: Tensor, skip: Tensor, gamma: Tensor, bias: Tensor | None = None) -> tuple[Tensor | None, ...]:
    total = x.add(skip) if bias is None else x.add(skip).add(bias)
    return total.rms_norm(total.shape[-1], gamma, node.get("epsilon", 1e-12)).cast(x.dtype), None, None, total


@operator("EmbedLayerNormalization", domain=MICROSOFT)
def embed_norm(node: Node, ids: Tensor, segments: Tensor | None, words: Tensor, positions: Tensor, segment_table: Tensor | None = None,
               gamma: Tensor | None = None, beta: Tensor | None = None, mask: Tensor | None = None,
               places: Tensor | None = None) -> tuple[Tensor, ...]:
    at = Tensor(np.arange(ids.shape[1])) if places is None else places
    total = words.take(ids, 0).add(positions.take(at, 0))
    if segment_table is not None:       # without segments all tokens are of the first one
        total = total.add(segment_table[0] if segments is None else segment_table.take(segments, 0))
    out = total.layer_norm(total.shape[-1], gamma, beta, node.get("epsilon", 1e-12))
    lengths = Tensor.zeros(ids.shape[0], dtype="int32") if mask is None else mask.sum(1).cast("int32")
    return out, lengths, total


# -- attention -------------------------------------------------------------------------------------------------------------------
def multi_head(node: Node, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, extra: Tensor | None) -> Tensor:
    """(N, heads, L, E) operands give (N, L, heads · E). Keys beyond the number of steps stand before the first step."""
    steps, total = q.shape[2], k.shape[2]
    before = max(0, total - steps)
    added = [b for b in (mask_bias(node, mask, q.shape[0], total), extra) if b is not None]
    is_causal = bool(node.get("unidirectional", 0))
    if is_causal and (added or before):
        later = np.arange(total) > np.arange(steps).reshape(-1, 1) + before
        added.append(Tensor(np.where(later, np.finfo(np.float32).min, np.float32(0))))
    bias = reduce(Tensor.add, added) if added else None
    out = q.scaled_dot_product_attention(k, v, bias, is_causal=is_causal and bias is None, scale=node.get("scale") or None)
    return out.transpose(1, 2).reshape(q.shape[0], steps, -1)


def mask_bias(node: Node, mask: Tensor | None, batch: int, total: int) -> Tensor | None:
    """A mask of 1 for what counts, (N, S) or with axes between, or numbers of keys, (N,), as numbers that are added."""
    if mask is None:
        return None
    if mask.shape[0] != batch or (mask.ndim > 1 and mask.shape[-1] != total):
        raise UnsupportedError(f"{node} with a mask of {mask.shape} for {batch} × {total} keys")
    if mask.ndim == 1:
        mask = Tensor(np.arange(total)).lt(mask.reshape(-1, 1)).cast("int32")
    shaped = mask.reshape(mask.shape[0], 1, 1, mask.shape[1]) if mask.ndim == 2 else mask.unsqueeze(1) if mask.ndim == 3 else mask
    return where(shaped.ne(0), Tensor.zeros(1), Tensor.full((1,), node.get("mask_filter_value", -10000.0), "float32"))


@operator("Attention", domain=MICROSOFT)
def attention(node: Node, x: Tensor, w: Tensor, bias: Tensor | None = None, mask: Tensor | None = None, past: Tensor | None = None,
              extra: Tensor | None = None) -> tuple[Tensor, ...]:
    heads = node.need("num_heads")
    together = x.matmul(w) if bias is None else x.matmul(w).add(bias)
    sizes = node.get("qkv_hidden_sizes") or [together.shape[-1] // 3] * 3
    q, k, v = (t.reshape(x.shape[0], x.shape[1], heads, -1).transpose(1, 2) for t in together.split(list(sizes), -1))
    if past is not None:
        k, v = Tensor.cat([past[0], k], 2), Tensor.cat([past[1], v], 2)
    present = Tensor.stack([k, v], 0) if k.shape == v.shape else k
    return multi_head(node, q, k, v, mask, extra), present


@operator("MultiHeadAttention", domain=MICROSOFT)
def multi_head_attention(node: Node, q: Tensor, k: Tensor | None = None, v: Tensor | None = None, bias: Tensor | None = None,
                         mask: Tensor | None = None, extra: Tensor | None = None, past_key: Tensor | None = None,
                         past_value: Tensor | None = None) -> tuple[Tensor, ...]:
    heads = node.need("num_heads")
    if k is None:       # (N, L, heads, 3, E)
        q, k, v = (q[:, :, :, i].reshape(q.shape[0], q.shape[1], -1) for i in range(3))
    elif v is None:     # (N, S, heads, 2, E)
        k, v = (k[:, :, :, i].reshape(k.shape[0], k.shape[1], -1) for i in range(2))
    if bias is not None:
        width = q.shape[-1]
        q = q.add(bias[:width])
        k = k.add(bias[width:2 * width]) if k.ndim == 3 else k
        v = v.add(bias[2 * width:]) if v.ndim == 3 else v
    q, k, v = (t if t.ndim == 4 else t.reshape(t.shape[0], t.shape[1], heads, -1).transpose(1, 2) for t in (q, k, v))
    if past_key is not None and past_value is not None:
        k, v = Tensor.cat([past_key, k], 2), Tensor.cat([past_value, v], 2)
    return multi_head(node, q, k, v, mask, extra), k, v


@operator("RotaryEmbedding", domain=MICROSOFT)
def rotary(node: Node, x: Tensor, positions: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    from svod.onnx.operators.attention import rotary as turn
    at = positions.add(Tensor(np.arange(x.shape[-2 if x.ndim == 4 else 1]))) if positions.ndim == 1 else positions
    if at.ndim == 1:
        at = at.unsqueeze(0).broadcast_to((x.shape[0], at.shape[0]))
    heads = node.get("num_heads", 0)
    if x.ndim == 3 and not heads:
        node.attributes = {**node.attributes, "num_heads": x.shape[-1] // (2 * cos.shape[-1])}
    result: Tensor = turn(node, x, cos, sin, at)
    return result


# -- quantised -------------------------------------------------------------------------------------------------------------------
@operator("MatMulIntegerToFloat", domain=MICROSOFT)
def matmul_to_float(node: Node, a: Tensor, b: Tensor, a_scale: Tensor, b_scale: Tensor, a_zero: Tensor | None = None,
                    b_zero: Tensor | None = None, bias: Tensor | None = None) -> Tensor:
    wide = shifted(a, a_zero, -2).matmul(shifted(b, b_zero, -1)).cast(a_scale.dtype).mul(a_scale.mul(b_scale))
    return wide if bias is None else wide.add(bias)


@operator("DynamicQuantizeMatMul", domain=MICROSOFT)
def dynamic_matmul(node: Node, a: Tensor, b: Tensor, b_scale: Tensor, b_zero: Tensor | None = None, bias: Tensor | None = None) -> Tensor:
    from svod.onnx.operators.quantised import dynamic_quantize
    whole, scale, zero = dynamic_quantize(node, a)
    result: Tensor = matmul_to_float(node, whole, b, scale, b_scale, zero, b_zero, bias)
    return result


def dequantized(x: Tensor, scale: Tensor, zero: Tensor | None) -> Tensor:
    whole = x.cast("int32")
    return (whole if zero is None else whole.sub(zero.cast("int32"))).cast(scale.dtype).mul(scale)


def qlinear_binary(name: str, function: Callable[[Tensor, Tensor], Tensor]) -> None:
    @operator(name, domain=MICROSOFT)
    def compute(node: Node, a: Tensor, a_scale: Tensor, a_zero: Tensor | None, b: Tensor, b_scale: Tensor, b_zero: Tensor | None,
                scale: Tensor, zero: Tensor | None = None) -> Tensor:
        return to_integers(function(dequantized(a, a_scale, a_zero), dequantized(b, b_scale, b_zero)), scale, zero, a.dtype)


qlinear_binary("QLinearAdd", Tensor.add)
qlinear_binary("QLinearMul", Tensor.mul)


def quantised_softmax(node: Node, x: Tensor) -> Tensor:
    """Softmax as an operator set has it: before the 13th a row begins at the axis and ends with the tensor."""
    axis = axis_in(node.get("axis", -1), max(1, x.ndim))
    if node.need("opset") >= 13:
        return x.softmax(axis)
    return x.reshape(math.prod(x.shape[:axis]), math.prod(x.shape[axis:])).softmax(-1).reshape(x.shape)


def qlinear_unary(name: str, function: Callable[[Node, Tensor], Tensor]) -> None:
    @operator(name, domain=MICROSOFT)
    def compute(node: Node, x: Tensor, x_scale: Tensor, x_zero: Tensor | None, scale: Tensor, zero: Tensor | None = None) -> Tensor:
        return to_integers(function(node, dequantized(x, x_scale, x_zero)), scale, zero, x.dtype)


qlinear_unary("QLinearSigmoid", lambda node, x: x.sigmoid())
qlinear_unary("QLinearLeakyRelu", lambda node, x: x.leaky_relu(node.get("alpha", 0.01)))
qlinear_unary("QLinearSoftmax", quantised_softmax)
qlinear_unary("QLinearGlobalAveragePool", lambda node, x: x.mean(
    tuple(range(1, x.ndim - 1) if node.get("channels_last", 0) else range(2, x.ndim)), keepdim=True))


@operator("QLinearConcat", domain=MICROSOFT)
def qlinear_concat(node: Node, scale: Tensor, zero: Tensor, *operands: Tensor) -> Tensor:
    parts = [dequantized(*operands[i:i + 3]) for i in range(0, len(operands), 3)]
    return to_integers(Tensor.cat(parts, node.need("axis")), scale, zero, zero.dtype)


@operator("MatMulNBits", domain=MICROSOFT)
def matmul_n_bits(node: Node, a: Tensor, b: Tensor, scales: Tensor, zeros: Tensor | None = None, groups: Tensor | None = None,
                  bias: Tensor | None = None) -> Tensor:
    """Weights of 2, 4 or 8 bits, the first of a byte in its lowest bits, in blocks with a scale each: (columns, blocks, bytes)."""
    columns, rows, block, bits = node.need("N"), node.need("K"), node.need("block_size"), node.get("bits", 4)
    blocks = -(-rows // block)

    def unpacked(t: Tensor) -> Tensor:
        return Tensor.stack([t.bitwise_right_shift(at).bitwise_and((1 << bits) - 1) for at in range(0, 8, bits)], -1).cast("int32")
    whole = unpacked(b).reshape(columns, blocks, block)
    if zeros is None:
        middle: Tensor | int = 1 << (bits - 1)
    elif zeros.dtype.is_float:
        middle = zeros.reshape(columns, blocks, 1)
    else:
        middle = unpacked(zeros).reshape(columns, -1)[:, :blocks].reshape(columns, blocks, 1)
    weights = whole.sub(middle).cast(a.dtype).mul(scales.reshape(columns, blocks, 1)).reshape(columns, blocks * block)[:, :rows]
    product = a.matmul(weights.transpose(0, 1))
    return product if bias is None else product.add(bias)


