"""Quantisation, dequantisation, and quantised layers."""
from __future__ import annotations

from svod.core.ir.dtype import DType, accumulator, dtypes
from svod.errors import UnsupportedError
from svod.onnx.operators.convolution import convolve
from svod.onnx.operators.elementwise import svod_type
from svod.onnx.operators.products import shifted
from svod.onnx.registry import MICROSOFT, OnnxNode, axis_in, operator
from svod.tensor import Tensor
from svod.tensor.precision import widened


def along(node: OnnxNode, x: Tensor, scale: Tensor) -> Tensor:
    """Expand a scale or zero point for x: one per tensor, per element of an axis, or per block of an axis."""
    if scale.ndim == 0 or (scale.ndim == 1 and scale.shape[0] == 1):
        return scale.reshape(())
    axis, block = axis_in(node.get("axis", 1), x.ndim), node.get("block_size", 0)
    if block:
        return scale.repeat_interleave(block, axis).shrink([(0, n) for n in x.shape])
    if scale.ndim == 1:
        return scale.reshape(*(-1 if i == axis else 1 for i in range(x.ndim)))
    raise UnsupportedError(f"{node} of {x.shape} with scales of {scale.shape} and no block size")


def to_integers(x: Tensor, scale: Tensor, zero: Tensor | None, kind: DType, precision: DType | None = None) -> Tensor:
    """Quantise: round(x / scale) + zero, ties to even, limited to the type's range. The quotient is computed in `precision`, else in the
    scale's type, or in float32 for a 16-bit scale as in onnxruntime. The sum is computed in float32 or wider, because float16 cannot
    represent all integers of 16 bits."""
    precise = precision or accumulator(scale.dtype)
    whole = widened(x.cast(precise).div(scale.cast(precise)).round())
    return clamp_to(whole if zero is None else whole.add(zero.cast(whole.dtype)), kind)


def clamp_to(x: Tensor, kind: DType) -> Tensor:
    return x.clamp(kind.min, kind.max).cast(kind) if x.dtype.is_int else x.clamp(float(kind.min), float(kind.max)).cast(kind)


@operator("QuantizeLinear", 10, exact=True)
@operator("QuantizeLinear", domain=MICROSOFT, exact=True)
def quantize(node: OnnxNode, x: Tensor, scale: Tensor, zero: Tensor | None = None) -> Tensor:
    kind = zero.dtype if zero is not None else svod_type(node.get("output_dtype"), node) if node.get("output_dtype") else dtypes.uint8
    precision = svod_type(node.get("precision"), node) if node.get("precision") else None
    return to_integers(x, along(node, x, scale), None if zero is None else along(node, x, zero), kind, precision)


@operator("DequantizeLinear", 10, exact=True, narrow=True)
@operator("DequantizeLinear", domain=MICROSOFT, exact=True, narrow=True)
def dequantize(node: OnnxNode, x: Tensor, scale: Tensor, zero: Tensor | None = None) -> Tensor:
    s = along(node, x, scale)
    kind = svod_type(node.get("output_dtype"), node) if node.get("output_dtype") else scale.dtype
    whole = x.cast("int32") if zero is None else x.cast("int32").sub(along(node, x, zero).cast("int32"))
    wide = widened(s)
    return whole.cast(wide.dtype).mul(wide).cast(kind)


@operator("DynamicQuantizeLinear", 11)
def dynamic_quantize(node: OnnxNode, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Quantise x to uint8; returns it with its scale and zero point. The scale is 1 if the range of x is too small for a positive scale,
    as for zeros only."""
    low, high = x.min().minimum(0.0), x.max().maximum(0.0)
    span = high.sub(low).div(255.0)
    scale = span.masked_fill(span.eq(0), 1.0)
    zero = low.neg().div(scale).round().clamp(0.0, 255.0)
    return x.div(scale).round().add(zero).clamp(0.0, 255.0).cast("uint8"), scale, zero.cast("uint8")


def requantized(wide: Tensor, factor: Tensor, zero: Tensor) -> Tensor:
    """Convert an int32 sum to integers with the result's scale."""
    return clamp_to(wide.cast("float32").mul(factor).round().add(zero.cast("float32")), zero.dtype)


@operator("QLinearMatMul", 10)
def qlinear_matmul(node: OnnxNode, a: Tensor, a_scale: Tensor, a_zero: Tensor, b: Tensor, b_scale: Tensor, b_zero: Tensor, y_scale: Tensor,
                   y_zero: Tensor) -> Tensor:
    wide = shifted(a, a_zero, -2).matmul(shifted(b, b_zero, -1))
    row = a_scale.unsqueeze(-1) if a_scale.ndim == 1 and a_scale.shape[0] > 1 else a_scale
    return requantized(wide, row.cast("float32").mul(b_scale.cast("float32")).div(y_scale.cast("float32")), y_zero)


@operator("QLinearConv", 10)
def qlinear_conv(node: OnnxNode, x: Tensor, x_scale: Tensor, x_zero: Tensor, w: Tensor, w_scale: Tensor, w_zero: Tensor, y_scale: Tensor,
                 y_zero: Tensor, bias: Tensor | None = None) -> Tensor:
    per_channel = (-1, *(1,) * (w.ndim - 1))
    zero = w_zero.reshape(per_channel) if w_zero.ndim == 1 and w_zero.shape[0] > 1 else w_zero.reshape(())
    wide = convolve(node, x.cast("int32").sub(x_zero.reshape(()).cast("int32")), w.cast("int32").sub(zero.cast("int32")), bias)
    scale = w_scale.reshape(1, -1, *(1,) * (w.ndim - 2)) if w_scale.ndim == 1 and w_scale.shape[0] > 1 else w_scale.reshape(())
    return requantized(wide, x_scale.reshape(()).mul(scale).div(y_scale.reshape(())), y_zero.reshape(()))
