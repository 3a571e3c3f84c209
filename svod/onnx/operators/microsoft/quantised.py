"""Quantised products, layers and weights of com.microsoft."""
from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np

from svod.core.ir.dtype import dtypes
from svod.errors import UnsupportedError
from svod.onnx.operators.convolution import average_pool
from svod.onnx.operators.indexing import wrapped
from svod.onnx.operators.products import shifted
from svod.onnx.operators.quantised import dynamic_quantize, requantized, to_integers
from svod.onnx.operators.recurrent import lstm
from svod.onnx.registry import MICROSOFT, OnnxNode, axis_in, operator
from svod.tensor import Tensor
from svod.tensor.precision import rounded, widened


@operator("MatMulIntegerToFloat", domain=MICROSOFT)
def matmul_to_float(node: OnnxNode, a: Tensor, b: Tensor, a_scale: Tensor, b_scale: Tensor, a_zero: Tensor | None = None,
                    b_zero: Tensor | None = None, bias: Tensor | None = None) -> Tensor:
    wide = shifted(a, a_zero, -2).matmul(shifted(b, b_zero, -1)).cast(a_scale.dtype).mul(a_scale.mul(b_scale))
    return wide if bias is None else wide.add(bias)


@operator("DynamicQuantizeMatMul", domain=MICROSOFT)
def dynamic_matmul(node: OnnxNode, a: Tensor, b: Tensor, b_scale: Tensor, b_zero: Tensor | None = None,
                   bias: Tensor | None = None) -> Tensor:
    whole, scale, zero = dynamic_quantize(node, a)
    return matmul_to_float(node, whole, b, scale, b_scale, zero, b_zero, bias)


def dequantized(x: Tensor, scale: Tensor, zero: Tensor | None) -> Tensor:
    whole = x.cast("int32")
    return (whole if zero is None else whole.sub(zero.cast("int32"))).cast(scale.dtype).mul(scale)


def qlinear_binary(name: str, function: Callable[[Tensor, Tensor], Tensor]) -> None:
    @operator(name, domain=MICROSOFT)
    def compute(node: OnnxNode, a: Tensor, a_scale: Tensor, a_zero: Tensor | None, b: Tensor, b_scale: Tensor, b_zero: Tensor | None,
                scale: Tensor, zero: Tensor | None = None) -> Tensor:
        return to_integers(function(dequantized(a, a_scale, a_zero), dequantized(b, b_scale, b_zero)), scale, zero, a.dtype)


qlinear_binary("QLinearAdd", Tensor.add)
qlinear_binary("QLinearMul", Tensor.mul)


def quantised_softmax(node: OnnxNode, x: Tensor) -> Tensor:
    """Softmax by the rules of the node's operator set: before version 13, a row extends from the axis to the tensor's end."""
    axis = axis_in(node.get("axis", -1), max(1, x.ndim))
    if node.need("opset") >= 13:
        return x.softmax(axis)
    return x.reshape(math.prod(x.shape[:axis]), math.prod(x.shape[axis:])).softmax(-1).reshape(x.shape)


def qlinear_unary(name: str, function: Callable[[OnnxNode, Tensor], Tensor]) -> None:
    @operator(name, domain=MICROSOFT)
    def compute(node: OnnxNode, x: Tensor, x_scale: Tensor, x_zero: Tensor | None, scale: Tensor, zero: Tensor | None = None) -> Tensor:
        return to_integers(function(node, dequantized(x, x_scale, x_zero)), scale, zero, x.dtype)


qlinear_unary("QLinearSigmoid", lambda node, x: x.sigmoid())
qlinear_unary("QLinearLeakyRelu", lambda node, x: x.leaky_relu(node.get("alpha", 0.01)))
qlinear_unary("QLinearSoftmax", quantised_softmax)


def quantised_average_pool(node: OnnxNode, x: Tensor) -> Tensor:
    is_last = node.get("channels_last", 0)
    y = average_pool(node, x.movedim(-1, 1) if is_last else x)
    return y.movedim(1, -1) if is_last else y


qlinear_unary("QLinearAveragePool", quantised_average_pool)
qlinear_unary("QLinearGlobalAveragePool", lambda node, x: x.mean(
    tuple(range(1, x.ndim - 1) if node.get("channels_last", 0) else range(2, x.ndim)), keepdim=True))


@operator("QLinearConcat", domain=MICROSOFT)
def qlinear_concat(node: OnnxNode, scale: Tensor, zero: Tensor, *operands: Tensor) -> Tensor:
    parts = [dequantized(*operands[i:i + 3]) for i in range(0, len(operands), 3)]
    return to_integers(Tensor.cat(parts, node.need("axis")), scale, zero, zero.dtype)


@operator("MatMulNBits", domain=MICROSOFT)
def matmul_n_bits(node: OnnxNode, a: Tensor, b: Tensor, scales: Tensor, zeros: Tensor | None = None, groups: Tensor | None = None,
                  bias: Tensor | None = None) -> Tensor:
    """A product with weights of 2, 4 or 8 bits, (columns, blocks, bytes), in blocks with a scale each; the first number of a byte is in
    its lowest bits. `groups`: for each row, the block with its scale and zero point; by default the block that contains the row."""
    columns, rows, block, bits = node.need("N"), node.need("K"), node.need("block_size"), node.get("bits", 4)
    blocks = -(-rows // block)

    def of_rows(t: Tensor) -> Tensor:
        """Repeat numbers per block for each of the block's rows."""
        each = t.reshape(columns, blocks)
        return each.repeat_interleave(block, 1)[:, :rows] if groups is None else each.take(groups[:rows], 1)

    def unpacked(t: Tensor) -> Tensor:
        return Tensor.stack([t.bitwise_right_shift(at).bitwise_and((1 << bits) - 1) for at in range(0, 8, bits)], -1).cast("int32")
    whole = unpacked(b).reshape(columns, blocks * block)[:, :rows]
    if zeros is None:
        middle: Tensor | int = 1 << (bits - 1)
    elif zeros.dtype.is_float:
        middle = of_rows(zeros)
    else:
        middle = of_rows(unpacked(zeros).reshape(columns, -1)[:, :blocks])
    weights = whole.sub(middle).cast(a.dtype).mul(of_rows(scales))
    product = a.matmul(weights.transpose(0, 1))
    return product if bias is None else product.add(bias)


@operator("QGemm", domain=MICROSOFT)
def quantised_gemm(node: OnnxNode, a: Tensor, a_scale: Tensor, a_zero: Tensor, b: Tensor, b_scale: Tensor, b_zero: Tensor,
                   c: Tensor | None = None, scale: Tensor | None = None, zero: Tensor | None = None) -> Tensor:
    """An exact product of integer matrices plus an int32 matrix `c`, which has the scale of the product. The result is floats, or, given
    `scale` and `zero`, integers quantised by them."""
    turned = [shifted(t.transpose(0, 1) if node.get(f"trans{n}", 0) else t, None, -1) for t, n in ((a, "A"), (b, "B"))]
    wide = turned[0].sub(a_zero.cast("int32")).matmul(turned[1].sub(b_zero.cast("int32")))
    wide = wide if c is None else wide.add(c)
    factor = a_scale.mul(b_scale).mul(node.get("alpha", 1.0))
    if scale is None or zero is None:
        return wide.cast(factor.dtype).mul(factor)
    return requantized(wide, factor.div(scale), zero)


@operator("GatherBlockQuantized", domain=MICROSOFT, narrow=True, exact=True)
def gather_block_quantised(node: OnnxNode, data: Tensor, index: Tensor, scales: Tensor, zeros: Tensor | None = None) -> Tensor:
    """Rows of weights that are quantised in blocks, each with its own scale. Integers of 4 bits have one element each; bytes have
    several elements of `bits` along the last axis, the first in the lowest bits. An index out of range gives zeros."""
    rank, bits, block = data.ndim, node.get("bits", 4), node.get("block_size", 128)
    axis, along = axis_in(node.get("gather_axis", 0), rank), axis_in(node.get("quantize_axis", 1), rank)
    packed = data.dtype is dtypes.uint8 and bits < 8
    if axis == along or (packed and axis == rank - 1):
        raise UnsupportedError(f"{node} along axis {axis}, with blocks along axis {along} of {rank}")
    at = wrapped(index, data.shape[axis])

    def rows(t: Tensor) -> Tensor:
        taken = t.take(at, axis)
        if not packed or t.dtype is not dtypes.uint8:
            return taken
        parts = [taken.bitwise_right_shift(first).bitwise_and((1 << bits) - 1) for first in range(0, 8, bits)]
        return Tensor.stack(parts, -1).flatten(-2)
    whole, factors, place = rows(data).cast("int32"), rows(scales), along + (index.ndim - 1 if along > axis else 0)
    n = whole.shape[place]

    def of_elements(t: Tensor) -> Tensor:
        sizes = [(0, n if i == place else m) for i, m in enumerate(factors.shape)]
        return t.shrink([(0, m) for m in factors.shape]).repeat_interleave(block, place).shrink(sizes)
    middle = 1 << (bits - 1) if data.dtype is dtypes.uint8 else 0
    shift: Tensor | int = middle if zeros is None else of_elements(rows(zeros).cast("int32"))
    wide = widened(of_elements(factors))
    return rounded(whole.sub(shift).cast(wide.dtype).mul(wide), scales.dtype)


@operator("DynamicQuantizeLSTM", domain=MICROSOFT)
def dynamic_lstm(node: OnnxNode, x: Tensor, w: Tensor, r: Tensor, bias: Tensor | None = None, lengths: Tensor | None = None,
                 h: Tensor | None = None, c: Tensor | None = None, peepholes: Tensor | None = None, w_scale: Tensor | None = None,
                 w_zero: Tensor | None = None, r_scale: Tensor | None = None, r_zero: Tensor | None = None) -> tuple[Tensor, ...]:
    """An LSTM with weights of 8 bits, (directions, inputs, 4 · hidden). Inputs and hidden states stay floats, whereas onnxruntime
    quantises them in each step."""
    def weights(t: Tensor, scale: Tensor | None, zero: Tensor | None) -> Tensor:
        assert scale is not None and zero is not None
        each, middle = (s.reshape(t.shape[0], 1, -1) for s in (scale, zero))
        return dequantized(t, each, middle).transpose(1, 2)
    return lstm(node, x, weights(w, w_scale, w_zero), weights(r, r_scale, r_zero), bias, lengths, h, c, peepholes)


# the values of 4-bit numbers, relative to a block's largest: FP4, and NF4 of Dettmers et al., "QLoRA", 2023
_FOUR_BITS = (
    [0.0, 0.0052083333, 0.6666667, 1.0, 0.33333333, 0.5, 0.16666667, 0.25],
    [-1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635, -0.18477343022823334,
     -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224,
     0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0])


@operator("MatMulBnb4", domain=MICROSOFT)
def matmul_bnb4(node: OnnxNode, a: Tensor, b: Tensor, largest: Tensor) -> Tensor:
    """A product with bitsandbytes' weights of 4 bits, (N, K) flattened, in blocks with their largest number each; the first number of a
    byte is in its highest bits.
    """
    columns, rows, block, is_nf4 = node.need("N"), node.need("K"), node.need("block_size"), node.need("quant_type")
    table = _FOUR_BITS[is_nf4] if is_nf4 else [*_FOUR_BITS[0], *(-v for v in _FOUR_BITS[0])]
    places = Tensor.stack([b.bitwise_right_shift(4), b.bitwise_and(15)], -1).reshape(-1)[:columns * rows]
    shares = Tensor(np.array(table, np.float32)).take(places.cast("int32"), 0)
    weights = shares.mul(largest.repeat_interleave(block, 0)[:columns * rows]).reshape(columns, rows)
    return a.matmul(weights.transpose(0, 1) if node.get("transB", 1) else weights)
