"""Arithmetic, comparisons, logic, mathematical functions, casts."""
from __future__ import annotations

from collections.abc import Callable
from functools import reduce
from typing import Any

import numpy as np
import onnx

from svod.core.ir.dtype import BY_NAME, DType, dtypes
from svod.errors import UnsupportedError
from svod.onnx.reader import NUMPY_TYPES, SUPPORTED_TYPES, type_name
from svod.onnx.registry import OnnxNode, axis_in, operator
from svod.tensor import Tensor, where


def old_broadcast(node: OnnxNode, a: Tensor, b: Tensor) -> Tensor:
    """Broadcast the second operand as before opset 7: only with the attribute `broadcast`, and from `axis` on."""
    if not node.get("broadcast", 0) or "axis" not in node.attributes:
        return b
    axis = axis_in(node.get("axis"), a.ndim)
    return b.reshape(*b.shape, *(1,) * (a.ndim - axis - b.ndim))


def binary(name: str, function: Callable[[Tensor, Tensor], Tensor], exact: bool = False) -> None:
    @operator(name, exact=exact)
    def compute(node: OnnxNode, a: Tensor, b: Tensor) -> Tensor:
        return function(a, old_broadcast(node, a, b))


def unary(name: str, function: Callable[[Tensor], Tensor], exact: bool = False) -> None:
    @operator(name, exact=exact)
    def compute(node: OnnxNode, x: Tensor) -> Tensor:
        return function(x)


def divide(a: Tensor, b: Tensor) -> Tensor:
    return a.div(b, rounding_mode="trunc") if a.dtype.is_int else a.div(b)


def power(a: Tensor, b: Tensor) -> Tensor:
    """The power a ** b in the base's type, regardless of the exponent's."""
    return (a.pow(b) if a.dtype.is_float or b.dtype.is_int else a.cast(dtypes.float64).pow(b.cast(dtypes.float64))).cast(a.dtype)


_BINARY: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "Add": Tensor.add, "Sub": Tensor.sub, "Mul": Tensor.mul, "Div": divide, "Pow": power, "Equal": Tensor.eq, "Less": Tensor.lt,
    "Greater": Tensor.gt, "LessOrEqual": Tensor.le, "GreaterOrEqual": Tensor.ge, "And": Tensor.logical_and, "Or": Tensor.logical_or,
    "Xor": Tensor.logical_xor, "BitwiseAnd": Tensor.bitwise_and, "BitwiseOr": Tensor.bitwise_or, "BitwiseXor": Tensor.bitwise_xor}

_UNARY: dict[str, Callable[[Tensor], Tensor]] = {
    "Abs": Tensor.abs, "Neg": Tensor.neg, "Floor": Tensor.floor, "Ceil": Tensor.ceil, "Round": Tensor.round, "Sign": Tensor.sign,
    "Sqrt": Tensor.sqrt, "Exp": Tensor.exp, "Log": Tensor.log, "Sin": Tensor.sin, "Cos": Tensor.cos, "Tan": Tensor.tan,
    "Tanh": Tensor.tanh, "Asin": Tensor.asin, "Acos": Tensor.acos, "Atan": Tensor.atan, "Sinh": Tensor.sinh, "Cosh": Tensor.cosh,
    "Asinh": Tensor.asinh, "Acosh": Tensor.acosh, "Atanh": Tensor.atanh, "Erf": lambda x: x.erf().cast(x.dtype),
    "Reciprocal": Tensor.reciprocal, "Not": Tensor.logical_not, "BitwiseNot": Tensor.bitwise_not, "IsNaN": Tensor.isnan}

# Operators that compare elements, or map each element to another of its type without rounding.
_EXACT = {"Equal", "Less", "Greater", "LessOrEqual", "GreaterOrEqual", "Abs", "Neg", "Floor", "Ceil", "Round", "Sign", "IsNaN"}

for _name, _binary in _BINARY.items():
    binary(_name, _binary, _name in _EXACT)
for _name, _unary in _UNARY.items():
    unary(_name, _unary, _name in _EXACT)


@operator("IsInf", 10, exact=True)
def is_inf(node: OnnxNode, x: Tensor) -> Tensor:
    up, down = node.get("detect_positive", 1), node.get("detect_negative", 1)
    if up and down:
        return x.isinf()
    return x.isposinf() if up else x.isneginf() if down else Tensor.full(x.shape, False, "bool")


@operator("Mod", 10)
def mod(node: OnnxNode, a: Tensor, b: Tensor) -> Tensor:
    return a.fmod(b) if node.get("fmod", 0) else a.remainder(b)


@operator("BitShift", 11)
def bit_shift(node: OnnxNode, a: Tensor, b: Tensor) -> Tensor:
    left = node.need("direction") == "LEFT"
    shifted = a.bitwise_left_shift(b) if left else a.bitwise_right_shift(b)
    # if all bits are shifted out, the result is 0, or the sign
    beyond = a.lt(0).cast(a.dtype).neg() if a.dtype.is_signed and not left else 0
    return where(b.ge(a.dtype.bits), beyond, shifted)


def variadic(name: str, function: Callable[[Tensor, Tensor], Tensor], exact: bool = False) -> None:
    @operator(name, exact=exact)
    def compute(node: OnnxNode, *xs: Tensor) -> Tensor:
        return reduce(function, xs).cast(xs[0].dtype)


variadic("Sum", Tensor.add)
variadic("Max", Tensor.maximum, exact=True)
variadic("Min", Tensor.minimum, exact=True)


@operator("Mean")
def mean(node: OnnxNode, *xs: Tensor) -> Tensor:
    return (reduce(Tensor.add, xs) / len(xs)).cast(xs[0].dtype)


@operator("Where", 9, exact=True)
def choose(node: OnnxNode, condition: Tensor, x: Tensor, y: Tensor) -> Tensor:
    return where(condition, x, y)


@operator("Clip", 1, exact=True)
def clip_oldest(node: OnnxNode, x: Tensor) -> Tensor:
    return x if "min" not in node.attributes and "max" not in node.attributes else x.clamp(node.get("min"), node.get("max"))


@operator("Clip", 6, exact=True)
def clip_old(node: OnnxNode, x: Tensor) -> Tensor:
    """Clip before opset 11: a missing bound is float32's largest value, regardless of the type of x."""
    most = float(np.finfo(np.float32).max)
    return x.clamp(node.get("min", -most), node.get("max", most))


@operator("Clip", 11, exact=True)
def clip(node: OnnxNode, x: Tensor, low: Tensor | None = None, high: Tensor | None = None) -> Tensor:
    # if the bounds cross, the upper bound wins
    bounded = x if low is None else x.maximum(low)
    return bounded if high is None else bounded.minimum(high)


# -- types -----------------------------------------------------------------------------------------------------------------------
def svod_type(data_type: int, node: OnnxNode) -> DType:
    """The element type for a number in TensorProto's enumeration. Raises UnsupportedError."""
    name = NUMPY_TYPES.get(data_type)
    if name is None:
        raise UnsupportedError(f"{node} makes {type_name(data_type)}; {SUPPORTED_TYPES}")
    return BY_NAME[name]


@operator("Cast", 6, narrow=True)
def cast(node: OnnxNode, x: Tensor) -> Tensor:
    return x.cast(svod_type(node.need("to"), node))


@operator("Cast", 1)
def cast_old(node: OnnxNode, x: Tensor) -> Tensor:
    return x.cast(svod_type(onnx.TensorProto.DataType.Value(node.need("to")), node))


@operator("CastLike", 15, exact=True)
def cast_like(node: OnnxNode, x: Tensor, like: Tensor) -> Tensor:
    return x.cast(like.dtype)


@operator("BitCast", 26, exact=True)
def bit_cast(node: OnnxNode, x: Tensor) -> Tensor:
    kind = svod_type(node.need("to"), node)
    if x.dtype is kind:
        return x
    if kind.itemsize != x.dtype.itemsize:
        raise UnsupportedError(f"{node} reads elements of {x.dtype.itemsize} bytes as elements of {kind.itemsize}")
    return x.bitcast(kind)


def as_float(value: Any) -> float:
    """The first element of a known operand as a float."""
    return float(np.asarray(value).reshape(-1)[0])


