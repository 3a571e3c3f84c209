"""Maps NumPy's ufuncs to tensor operations: `np.exp(t)` is `t.exp()`, and `array + t` is a tensor.

NumPy passes a ufunc to its operand's `__array_ufunc__` if one operand is a tensor (NEP 13); the operators of arrays are ufuncs too. The
result is lazy and has the dtype of the tensor operation.
"""
from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

from svod.errors import UnsupportedError
from svod.tensor.base import is_scalar, scalar_dtype, without_numpy
from svod.tensor.creation import Creation

_OPERATORS: dict[str, Callable[..., Any]] = {
    "add": operator.add, "subtract": operator.sub, "multiply": operator.mul, "divide": operator.truediv, "true_divide": operator.truediv,
    "floor_divide": operator.floordiv, "remainder": operator.mod, "divmod": divmod, "power": operator.pow, "float_power": operator.pow,
    "matmul": operator.matmul, "negative": operator.neg, "positive": operator.pos, "invert": operator.invert,
    "equal": operator.eq, "not_equal": operator.ne, "less": operator.lt, "less_equal": operator.le, "greater": operator.gt,
    "greater_equal": operator.ge, "bitwise_and": operator.and_, "bitwise_or": operator.or_, "bitwise_xor": operator.xor,
    "left_shift": operator.lshift, "right_shift": operator.rshift}
_METHODS = {
    "absolute": "abs", "fabs": "abs", "rint": "round", "arccos": "acos", "arccosh": "acosh", "arcsin": "asin", "arcsinh": "asinh",
    "arctan": "atan", "arctanh": "atanh", "arctan2": "atan2", "degrees": "rad2deg", "radians": "deg2rad",
    **{name: name for name in (
        "ceil", "copysign", "cos", "cosh", "deg2rad", "exp", "exp2", "expm1", "floor", "fmod", "heaviside", "hypot", "isfinite", "isinf",
        "isnan", "log", "log10", "log1p", "log2", "logaddexp", "logical_and", "logical_not", "logical_or", "logical_xor", "maximum",
        "minimum", "rad2deg", "reciprocal", "sign", "signbit", "sin", "sinh", "sqrt", "square", "tan", "tanh", "trunc")}}


def apply_ufunc(make: type[Creation], ufunc: Any, method: str, inputs: tuple[Any, ...], options: dict[str, Any]) -> Any:
    """The result of a NumPy ufunc with a tensor among its operands; `make` is the tensor class.

    Raises UnsupportedError, with the alternative, for a ufunc without a tensor operation, for ufunc methods (`np.add.reduce`) and for
    options."""
    name = ufunc.__name__
    if method != "__call__":
        raise UnsupportedError(f"np.{name}.{method} of a Tensor: use its values, np.{name}.{method}(t.numpy(), …), or the tensor's own "
                               "operations, such as sum, cumsum and scatter_add")
    if options:
        said = ", ".join(f"{key}=" for key in options)
        raise UnsupportedError(f"np.{name} with a Tensor and {said}: options of NumPy's functions need arrays; convert the tensor, as in "
                               "array += t.numpy()")
    if name not in _OPERATORS and name not in _METHODS:
        raise UnsupportedError(f"np.{name} of a Tensor: tensors have no such operation; apply it to the values, np.{name}(t.numpy())")
    tensor: Any = next(value for value in inputs if isinstance(value, make))
    given = map(without_numpy, inputs)
    first, *others = [value if is_scalar(value) or isinstance(value, make) else tensor._beside(value) for value in given]
    if name in _OPERATORS:
        return _OPERATORS[name](first, *others)
    if is_scalar(first):        # methods belong to tensors, so a number is converted to one, in the dtype of the operation
        first = make.full((), first, scalar_dtype(next(o for o in others if isinstance(o, make)).dtype, first))
    return getattr(first, _METHODS[name])(*others)
