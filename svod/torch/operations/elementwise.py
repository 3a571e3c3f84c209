"""Arithmetic, comparisons, mathematical functions, activations, casts."""
from __future__ import annotations

from collections.abc import Callable
from typing import Any

from svod.core.ir.dtype import DType, dtypes
from svod.tensor import Tensor, where
from svod.torch.operations.table import aten, methods, of_integers

methods("exp exp2 expm1 log log2 log10 log1p sqrt rsqrt sin cos tan asin acos atan sinh cosh tanh asinh acosh atanh erf erfc reciprocal "
        "sigmoid square deg2rad rad2deg silu hardswish hardsigmoid mish selu celu softshrink leaky_relu softplus gelu threshold "
        "glu logit sinc round round.decimals")
methods("abs neg ceil floor trunc frac relu relu6 hardtanh hardshrink isnan isinf isfinite isposinf isneginf logical_not signbit "
        "nan_to_num bitwise_not masked_fill.Scalar masked_fill.Tensor", widens=False)
aten("_neg_view", widens=False)(Tensor.neg)       # PyTorch emits it for the imaginary part of a conjugate
methods("add.Tensor sub.Tensor add.Scalar sub.Scalar mul.Tensor mul.Scalar div.Tensor true_divide.Tensor div.Scalar "
        "div.Tensor_mode div.Scalar_mode floor_divide pow.Tensor_Tensor pow.Tensor_Scalar atan2 hypot logaddexp xlogy.Tensor "
        "lerp.Tensor lerp.Scalar addcdiv", promotes=True)
methods("maximum minimum logical_and logical_or logical_xor bitwise_and.Tensor bitwise_or.Tensor bitwise_xor.Tensor bitwise_and.Scalar "
        "bitwise_or.Scalar bitwise_xor.Scalar bitwise_left_shift.Tensor bitwise_right_shift.Tensor bitwise_left_shift.Tensor_Scalar "
        "bitwise_right_shift.Tensor_Scalar eq.Tensor ne.Tensor lt.Tensor le.Tensor gt.Tensor ge.Tensor eq.Scalar ne.Scalar lt.Scalar "
        "le.Scalar gt.Scalar ge.Scalar copysign.Tensor copysign.Scalar", promotes=True, widens=False)
# exact for a divisor of the same type: a number as divisor is rounded to the 16-bit float type first, as in PyTorch
methods("remainder.Tensor remainder.Scalar fmod.Tensor fmod.Scalar", promotes=True, widens=False)
aten("special_erfc")(Tensor.erfc)
aten("__lshift__.Tensor", "__lshift__.Scalar", promotes=True)(Tensor.bitwise_left_shift)
aten("__rshift__.Tensor", "__rshift__.Scalar", promotes=True)(Tensor.bitwise_right_shift)
aten("floor_divide.Scalar", promotes=True)(Tensor.floor_divide)
aten("xlogy.Scalar_Other", promotes=True)(Tensor.xlogy)
aten("max.other", promotes=True, widens=False)(Tensor.maximum)
aten("min.other", promotes=True, widens=False)(Tensor.minimum)
aten("where.self", "where.ScalarOther", "where.ScalarSelf", "where.Scalar", widens=False)(where)
aten("pow.Scalar", promotes=True)(lambda base, exponent: exponent.__rpow__(base))
methods("clamp_max clamp_max.Tensor", promotes=True, widens=False)
aten("clamp", "clamp.Tensor", "clamp_min", "clamp_min.Tensor", promotes=True, widens=False)(Tensor.clamp)


@aten("heaviside", promotes=True, widens=False)
def heaviside(x: Tensor, values: Any) -> Tensor:
    """The Heaviside step as in NumPy, but 0 at NaN."""
    step = x.heaviside(values)
    return where(x.isnan(), 0, step) if x.dtype.is_float else step


@aten("addcmul", promotes=True)
def addcmul(x: Tensor, a: Tensor, b: Tensor, *, value: float = 1) -> Tensor:
    """The sum x + value · a · b."""
    return x.addcmul(a, b, value=of_integers(value, x))


@aten("sign", "sgn", widens=False)
def sign(x: Tensor) -> Tensor:
    """The sign -1, 0 or 1; 0 for NaN, unlike NumPy, which gives NaN."""
    return where(x.isnan(), 0, x.sign()).cast(x.dtype) if x.dtype.is_float else x.sign()


@aten("rsub.Tensor", "rsub.Scalar", promotes=True)
def rsub(x: Tensor, other: Any, alpha: float = 1) -> Tensor:
    """The difference other - alpha · x."""
    return (x if alpha == 1 else x.mul(alpha)).neg().add(other)


@aten("elu")
def elu(x: Tensor, alpha: float = 1.0, scale: float = 1.0, input_scale: float = 1.0) -> Tensor:
    """ELU: scale · x for x > 0, else scale · alpha · (exp(input_scale · x) - 1)."""
    if scale == input_scale == 1.0:
        return x.elu(alpha)
    return where(x > 0, x, x.mul(input_scale).expm1().mul(alpha)).mul(scale)


@aten("log_sigmoid_forward")
def log_sigmoid(x: Tensor) -> tuple[Tensor, Tensor]:
    """log(sigmoid(x)), and an empty buffer that only training reads."""
    return x.logsigmoid(), Tensor.zeros(0, dtype=x.dtype)


@aten("_prelu_kernel")
def prelu(x: Tensor, weight: Tensor) -> Tensor:
    """PReLU: x for x > 0, else weight · x."""
    return where(x > 0, x, x * weight)


@aten("native_dropout", widens=False)
def dropout(x: Tensor, p: float, train: bool | None) -> tuple[Tensor, Callable[[], Tensor]]:
    """Dropout in inference: x unchanged, and a mask of ones."""
    return x.dropout(p, bool(train)), lambda: Tensor.ones(x.shape, dtype=dtypes.bool)


@aten("_to_copy", "to.dtype", "_conj", "resolve_conj", "resolve_neg", "clone", "contiguous", "alias", "detach", "lift_fresh_copy",
      "lift_fresh", "positive", "copy", widens=False)
def cast(x: Tensor, source: Any = None, dtype: DType | None = None, **_: Any) -> Tensor:
    """Cast x to `dtype`, if given. For `copy`, cast the second operand to the shape and dtype of the first."""
    if isinstance(source, Tensor):
        return source.cast(x.dtype).expand(x.shape)
    wanted = dtype or (source if isinstance(source, DType) else None)
    return x if wanted is None else x.cast(wanted)


@aten("fill.Scalar", "fill.Tensor", widens=False)
def fill(x: Tensor, value: Any) -> Tensor:
    """A tensor with the shape and dtype of x, filled with `value`."""
    return value.cast(x.dtype).expand(x.shape) if isinstance(value, Tensor) else x.full_like(value)
