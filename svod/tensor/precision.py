"""Rounding of 16-bit floats: the dtype in which an operation is computed, and the position where its result is rounded.

* An operation of one step (a sum, a product, a function of one instruction, a comparison, a move) is computed in the dtype of its operands.
* An operation of several steps on 16-bit floats is computed in float32, including its constants, and rounded once, to the dtype of its
result.

`rounds_once` and `rounds_to_self` decorate a method of Tensor that takes several steps:

    @rounds_once
    def addmm(self, mat1: Operand, mat2: Operand, *, beta: Scalar = 1, alpha: Scalar = 1) -> Self:

        float16 self, mat1, mat2  →  float32 in the body  →  a float16 result

In the body, all operands have 32 bits or more, so that methods called there do not round. `widened` and `rounded` are the two halves of
this, for graphs of other libraries, which declare the dtypes of their results themselves.
"""
from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeVar, cast

from svod.core.ir.dtype import DType, accumulator, promote
from svod.core.ir.variable import Dim
from svod.tensor.base import TensorBase, is_scalar, without_numpy

F = TypeVar("F", bound=Callable[..., Any])
V = TypeVar("V")


def is_half(dtype: DType) -> bool:
    """Whether `dtype` is a float of 16 bits."""
    return dtype.is_float and dtype.bits < 32


def common_half(tensors: Iterable[TensorBase]) -> DType | None:
    """The common dtype of tensors if it is a 16-bit float, else None."""
    dtype = functools.reduce(promote, [t.dtype for t in tensors])
    return dtype if is_half(dtype) else None


def widened(value: V) -> V:
    """Cast each tensor of 16-bit floats in `value` to float32, also inside lists, tuples and dictionaries."""
    return cast(V, _mapped(lambda t: t.cast(accumulator(t.dtype)) if is_half(t.dtype) else t, value))


def rounded(value: V, dtype: DType) -> V:
    """Cast each float tensor in `value` to `dtype`, also inside lists, tuples and dictionaries."""
    return cast(V, _mapped(lambda t: t.cast(dtype) if t.dtype.is_float else t, value))


def _mapped(change: Callable[[TensorBase], TensorBase], value: Any) -> Any:
    """Apply `change` to each tensor in `value`, also inside lists, tuples and dictionaries."""
    if isinstance(value, TensorBase):
        return change(value)
    if isinstance(value, dict):
        return {k: _mapped(change, v) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        made = [_mapped(change, v) for v in value]
        # named tuples take their fields as separate arguments
        return type(value)(*made) if hasattr(value, "_fields") else type(value)(made)
    return value


def rounds_once(method: F) -> F:
    """Decorate a method of several steps. Its operands are self and the parameters annotated `Operand`. If their common dtype is a
    16-bit float, the method computes in float32, and float results are rounded to it."""
    return _of_several_steps(method, common_half)


def rounds_to_self(method: F) -> F:
    """Like `rounds_once`, for a method whose result has self's float dtype regardless of its other operands: norms, losses."""
    return _of_several_steps(method, lambda operands: operands[0]._float_dtype())


def _of_several_steps(method: F, result_dtype: Callable[[Sequence[TensorBase]], DType | None]) -> F:
    """Wrap `method` between `widened` and `rounded`. `result_dtype` tells from the operands the dtype to which results are rounded;
    None: they are not rounded."""
    parameters = list(inspect.signature(method).parameters.values())
    names = {p.name for p in parameters if "Operand" in str(p.annotation)}
    places = {i for i, p in enumerate(parameters) if p.name in names}
    rest = next((i for i in places if parameters[i].kind is inspect.Parameter.VAR_POSITIONAL), len(parameters))

    @functools.wraps(method)
    def several_steps(self: Any, *args: Any, **kwargs: Any) -> Any:
        operands: list[TensorBase] = [self]

        def operand(value: Any) -> Any:
            if value is None or isinstance(value, Dim) or is_scalar(without_numpy(value)):
                return value
            operands.append(self._as_tensor(value))
            return operands[-1]
        given = [operand(a) if i in places or i >= rest else a for i, a in enumerate(args, 1)]
        named = {k: operand(v) if k in names else v for k, v in kwargs.items()}
        if any(is_half(t.dtype) for t in operands):
            self, given, named = widened(self), widened(given), widened(named)
        dtype = result_dtype(operands)
        made = method(self, *given, **named)
        return made if dtype is None else rounded(made, dtype)
    return cast(F, several_steps)
