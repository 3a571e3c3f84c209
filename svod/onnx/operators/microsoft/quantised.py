"""Quantised products, layers and weights of com.microsoft."""
from __future__ import annotations

import math
from collections.abc import Callable

from svod.onnx.operators.products import shifted
from svod.onnx.operators.quantised import dynamic_quantize, to_integers
from svod.onnx.registry import MICROSOFT, Node, axis_in, operator
from svod.tensor import Tensor


@operator("MatMulIntegerToFloat", domain=MICROSOFT)
def matmul_to_float(node: Node, a: Tensor, b: Tensor, a_scale: Tensor, b_scale: Tensor, a_zero: Tensor | None = None,
                    b_zero: Tensor | None = None, bias: Tensor | None = None) -> Tensor:
    wide = shifted(a, a_zero, -2).matmul(shifted(b, b_zero, -1)).cast(a_scale.dtype).mul(a_scale.mul(b_scale))
    return wide if bias is None else wide.add(bias)


@operator("DynamicQuantizeMatMul", domain=MICROSOFT)
def dynamic_matmul(node: Node, a: Tensor, b: Tensor, b_scale: Tensor, b_zero: Tensor | None = None, bias: Tensor | None = None) -> Tensor:
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
    """Weights of 2, 4 or 8 bits, the first of a byte in its lowest bits, in blocks with a scale each: (columns, blocks, bytes). `groups`
    names for each row the block with its scale and zero point; by default a row has those of the block that it is in."""
    columns, rows, block, bits = node.need("N"), node.need("K"), node.need("block_size"), node.get("bits", 4)
    blocks = -(-rows // block)

    def of_rows(t: Tensor) -> Tensor:
        """Numbers of blocks as numbers of rows."""
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
