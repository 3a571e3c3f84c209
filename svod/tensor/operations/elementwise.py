"""Elementwise arithmetic, comparisons and functions, with broadcasting and one promotion rule.

`svod.core.ir.dtype.promote` gives the common dtype of tensors. A Python or NumPy scalar takes the tensor's dtype unless it is of a higher
kind: a float with an integer tensor gives float32, an int with a bool tensor int32. Float functions of integers are computed in float32.
For 16-bit floats see `svod.tensor.precision`: in an operation of one step, a number takes their dtype, as in NumPy.

Integer operations trap on no target. As in NumPy, division by zero gives 0, and the smallest integer divided by -1 gives itself. A shift by
the width or more gives 0, or -1 for a negative integer shifted right.
"""
from __future__ import annotations

import math
from typing import Any, Self, TypeVar

from svod.core.graph import graph
from svod.core.graph.shapes import broadcast_shapes, shape_of
from svod.core.ir.dtype import DType, dtypes
from svod.core.ir.uop import Ops, UOp
from svod.core.ir.variable import Dim
from svod.core.machine.target import HOST
from svod.errors import DTypeError
from svod.tensor.base import Scalar, TensorBase, common_dtype, is_scalar, operand_uops, without_numpy
from svod.tensor.operations.movement import Movement
from svod.tensor.precision import is_half, rounded, rounds_once, widened

Operand = Any  # a tensor, a Python scalar, an array or nested lists


class Elementwise(Movement):
    """Operators and elementwise functions."""

    __slots__ = ()

    # -- operands and their common dtype ---------------------------------------------------------
    def _operand(self, x: Operand) -> TensorBase | Scalar:
        """Keep a tensor or a Python scalar; convert any other operand to a tensor."""
        value = without_numpy(x)
        if isinstance(value, Dim):
            return self._value(value)
        return value if isinstance(value, TensorBase) or is_scalar(value) else self._beside(value)

    def _beside(self, value: Any) -> Self:
        """Convert an array or list to a tensor on the device of self."""
        made = type(self)(value)
        return made if made._memory is None or self.device == HOST else self.from_uop(graph.copy(made.uop, self.device))

    def _pair(self, name: str, x: Operand, y: Operand) -> tuple[TensorBase | Scalar, TensorBase | Scalar, DType]:
        """Convert two operands; returns them with their common dtype."""
        a, b = self._operand(x), self._operand(y)
        return a, b, common_dtype(name, a, b)

    def _binary(self, op: Ops, name: str, x: Operand, y: Operand) -> Self:
        """Apply `op` to operands, promoted and broadcast."""
        a, b, dtype = self._pair(name, x, y)
        return self.from_uop(graph.alu(op, *operand_uops(name, dtype, a, b)))

    def _arithmetic(self, op: Ops, name: str, x: Operand, y: Operand) -> Self:
        """Apply `op` to operands, promoted and broadcast. For bools it is NumPy's logical operation; raises DTypeError if there is none."""
        a, b, dtype = self._pair(name, x, y)
        if dtype.kind == "b":
            if op not in _LOGIC_OF_BOOLS:
                raise DTypeError(f"{name} of bools: cast them to integers, or use ^ or logical_xor")
            op = _LOGIC_OF_BOOLS[op]
        return self.from_uop(graph.alu(op, *operand_uops(name, dtype, a, b)))

    @rounds_once
    def _function(self, op: Ops) -> Self:
        """Apply a float function that is a single instruction."""
        return self.from_uop(graph.alu(op, self._float().uop))

    # -- arithmetic ------------------------------------------------------------------------------
    def add(self, other: Operand, *, alpha: Scalar = 1) -> Self:
        """self + alpha * other."""
        return self._arithmetic(Ops.ADD, "add", self, other) if alpha == 1 else self._scaled(Ops.ADD, "add", other, alpha)

    def sub(self, other: Operand, *, alpha: Scalar = 1) -> Self:
        """self - alpha * other."""
        return self._arithmetic(Ops.SUB, "sub", self, other) if alpha == 1 else self._scaled(Ops.SUB, "sub", other, alpha)

    @rounds_once
    def _scaled(self, op: Ops, name: str, other: Operand, alpha: Scalar) -> Self:
        """Apply `op` to self and alpha * other. If other is a number, the product stays a number, which takes the dtype of self."""
        return self._arithmetic(op, name, self, other * alpha if is_scalar(other) else self._as_tensor(other).mul(alpha))

    def mul(self, other: Operand) -> Self:
        """self * other; for bools, logical and."""
        return self._arithmetic(Ops.MUL, "mul", self, other)

    def div(self, other: Operand, *, rounding_mode: str | None = None) -> Self:
        """Divide as floats: self / other. rounding_mode 'floor' is Python's `//`, and 'trunc' rounds toward zero as C does; both keep
        integers."""
        if rounding_mode == "floor":
            return self.floor_divide(other)
        if rounding_mode == "trunc":
            return self._divide_trunc(other)
        if rounding_mode is not None:
            raise DTypeError(f"div with rounding_mode {rounding_mode!r}: use None, 'floor' or 'trunc'")
        return self._true_divide(self, other)

    def _true_divide(self, x: Operand, y: Operand) -> Self:
        a, b, dtype = self._pair("div", x, y)
        if not dtype.is_float:
            dtype = dtypes.default_float
        return self.from_uop(graph.alu(Ops.FDIV, *operand_uops("div", dtype, a, b)))

    def floor_divide(self, other: Operand) -> Self:
        """The quotient self // other, rounded toward minus infinity."""
        return self._divide_floor("floor_divide", self, other)

    def remainder(self, other: Operand) -> Self:
        """The remainder self % other, with the sign of the divisor. It is exact for floats if the quotient is below 2**53."""
        return self._modulo("remainder", self, other)

    def _divide_trunc(self, other: Operand) -> Self:
        a, b, dtype = self._pair("div", self, other)
        if dtype.is_float:
            return self._truncated_quotient(other)
        floor = self._divide_floor("div", a, b)
        if not dtype.is_signed:
            return floor
        # add one if the quotient is negative and not a whole number; a quotient by zero stays 0
        x, y = (self.from_uop(u) for u in operand_uops("div", dtype, a, b))
        inexact = floor.mul(y).ne(x).logical_and(x.lt(0).ne(y.lt(0))).logical_and(y.ne(0))
        return floor.add(inexact.cast(floor.dtype))

    @rounds_once
    def _truncated_quotient(self, other: Operand) -> Self:
        return self._true_divide(self, other).trunc()

    def _divide_floor(self, name: str, x: Operand, y: Operand) -> Self:
        a, b, dtype = self._pair(name, x, y)
        if dtype.is_float:
            return self.from_uop(_floor_quotient(*operand_uops(name, dtype, a, b)))
        dtype = dtypes.int8 if dtype.kind == "b" else dtype
        dividend, divisor = operand_uops(name, dtype, a, b)
        if is_scalar(b) and b not in (0, -1):
            return self.from_uop(graph.alu(Ops.IDIV, dividend, divisor))
        zero, one = (graph.full(shape_of(divisor), v, dtype) for v in (0, 1))
        by_zero = graph.alu(Ops.CMPEQ, divisor, zero)
        safe = graph.alu(Ops.WHERE, by_zero, one, divisor)
        by_minus_one = None
        if dtype.is_signed:
            by_minus_one = graph.alu(Ops.CMPEQ, divisor, graph.full(shape_of(divisor), -1, dtype))
            safe = graph.alu(Ops.WHERE, by_minus_one, one, safe)
        quotient = graph.alu(Ops.WHERE, by_zero, zero, graph.alu(Ops.IDIV, dividend, safe))
        if by_minus_one is not None:
            quotient = graph.alu(Ops.WHERE, by_minus_one, graph.alu(Ops.NEG, dividend), quotient)
        return self.from_uop(quotient)

    def _modulo(self, name: str, x: Operand, y: Operand) -> Self:
        a, b, dtype = self._pair(name, x, y)
        if dtype.is_float:
            dividend, divisor = operand_uops(name, dtype, a, b)
            rest, divisor = truncated_remainder(dividend, divisor), graph.cast(divisor, dtypes.float64)
            zero = graph.full(shape_of(rest), 0.0, dtypes.float64)
            opposite = graph.alu(Ops.CMPNE, graph.alu(Ops.CMPLT, rest, zero), graph.alu(Ops.CMPLT, divisor, zero))
            across = graph.alu(Ops.AND, opposite, graph.alu(Ops.CMPNE, rest, zero))
            return self.from_uop(graph.cast(graph.alu(Ops.WHERE, across, graph.alu(Ops.ADD, rest, divisor), rest), dtype))
        dtype = dtypes.int8 if dtype.kind == "b" else dtype
        dividend, divisor = operand_uops(name, dtype, a, b)
        if is_scalar(b) and b not in (0, -1):
            return self.from_uop(graph.alu(Ops.MOD, dividend, divisor))
        shape = shape_of(divisor)
        # the remainder by 0 or -1 is 0, so these divisors are replaced by 1
        trivial = graph.alu(Ops.CMPEQ, divisor, graph.full(shape, 0, dtype))
        if dtype.is_signed:
            trivial = graph.alu(Ops.OR, trivial, graph.alu(Ops.CMPEQ, divisor, graph.full(shape, -1, dtype)))
        return self.from_uop(graph.alu(Ops.MOD, dividend, graph.alu(Ops.WHERE, trivial, graph.full(shape, 1, dtype), divisor)))

    def neg(self) -> Self:
        """-self."""
        if self.dtype.kind == "b":
            raise DTypeError("neg of bools: use ~ or logical_not")
        return self.from_uop(graph.alu(Ops.NEG, self.uop))

    def pow(self, exponent: Operand) -> Self:
        """The power self ** exponent. Whole exponents up to 32 become products, 0.5 a square root. 16-bit floats are computed in float32.

        Raises DTypeError for integers to a negative number. In a tensor of integer exponents, a negative one gives 0, except for a base of
        1 or -1."""
        return self._power(self, exponent)

    def _power(self, x: Operand, y: Operand) -> Self:
        a, b, dtype = self._pair("pow", x, y)
        if is_half(dtype):
            return rounded(self._power(*widened((a, b))), dtype)        # Python numbers are not rounded to 16 bits
        if dtype.kind == "b":
            dtype = dtypes.int8
        if dtype.is_int and is_scalar(b) and b < 0:
            raise DTypeError(f"pow of {dtype.name} to {b}: the result would not be an integer; cast the tensor to float32, or give a "
                             "float")
        base, exponent = operand_uops("pow", dtype, a, b)
        if dtype.is_float:
            return self.from_uop(base)._float_power(self.from_uop(exponent), b if is_scalar(b) else None)
        if is_scalar(b):
            return self.from_uop(base)._whole_power(int(b))
        return self._integer_power(base, exponent)

    def _float_power(self, exponent: Operand, number: Scalar | None) -> Self:
        """The power self ** exponent for operands of the same shape and float dtype. `number`: the exponent, if it is a number."""
        if number is not None and abs(number) <= 32 and number == int(number):
            return self._whole_power(int(number))
        return self.sqrt() if number == 0.5 else self.from_uop(graph.alu(Ops.POW, self.uop, exponent.uop))

    def _whole_power(self, n: int) -> Self:
        """self ** n by repeated squaring."""
        if n < 0:
            return self._whole_power(-n).reciprocal()
        result: Self | None = None
        square = self
        while n:
            if n & 1:
                result = square if result is None else result.mul(square)
            n >>= 1
            if n:
                square = square.mul(square)
        return self._full_like(1) if result is None else result

    def _integer_power(self, base: UOp, exponent: UOp) -> Self:
        """Powers of integers with a tensor of exponents, modulo 2**width: square and multiply over the bits of the exponent."""
        dtype, shape = base.dtype, shape_of(base)
        zero, one = graph.full(shape, 0, dtype), graph.full(shape, 1, dtype)
        result, square = one, base
        for bit in range(dtype.bits - (1 if dtype.is_signed else 0)):
            mask = graph.full(shape, 1 << bit, dtype)
            is_set = graph.alu(Ops.CMPNE, graph.alu(Ops.AND, exponent, mask), zero)
            result = graph.alu(Ops.WHERE, is_set, graph.alu(Ops.MUL, result, square), result)
            square = graph.alu(Ops.MUL, square, square)
        if dtype.is_signed:
            minus_one = graph.full(shape, -1, dtype)
            odd = graph.alu(Ops.CMPNE, graph.alu(Ops.AND, exponent, one), zero)
            of_minus_one = graph.alu(Ops.WHERE, odd, minus_one, one)
            negative = graph.alu(Ops.WHERE, graph.alu(Ops.CMPEQ, base, one), one,
                                 graph.alu(Ops.WHERE, graph.alu(Ops.CMPEQ, base, minus_one), of_minus_one, zero))
            result = graph.alu(Ops.WHERE, graph.alu(Ops.CMPLT, exponent, zero), negative, result)
        return self.from_uop(result)

    def _as_tensor(self, x: Operand) -> Self:
        return x if isinstance(x, type(self)) else self._beside(x)

    def __add__(self, other: Operand) -> Self: return self._arithmetic(Ops.ADD, "add", self, other)
    def __radd__(self, other: Operand) -> Self: return self._arithmetic(Ops.ADD, "add", other, self)
    def __sub__(self, other: Operand) -> Self: return self._arithmetic(Ops.SUB, "sub", self, other)
    def __rsub__(self, other: Operand) -> Self: return self._arithmetic(Ops.SUB, "sub", other, self)
    def __mul__(self, other: Operand) -> Self: return self._arithmetic(Ops.MUL, "mul", self, other)
    def __rmul__(self, other: Operand) -> Self: return self._arithmetic(Ops.MUL, "mul", other, self)
    def __truediv__(self, other: Operand) -> Self: return self._true_divide(self, other)
    def __rtruediv__(self, other: Operand) -> Self: return self._true_divide(other, self)
    def __floordiv__(self, other: Operand) -> Self: return self._divide_floor("floor_divide", self, other)
    def __rfloordiv__(self, other: Operand) -> Self: return self._divide_floor("floor_divide", other, self)
    def __divmod__(self, other: Operand) -> tuple[Self, Self]: return self // other, self % other
    def __rdivmod__(self, other: Operand) -> tuple[Self, Self]: return other // self, other % self
    def __mod__(self, other: Operand) -> Self: return self._modulo("remainder", self, other)
    def __rmod__(self, other: Operand) -> Self: return self._modulo("remainder", other, self)
    def __pow__(self, other: Operand) -> Self: return self._power(self, other)
    def __rpow__(self, other: Operand) -> Self: return self._power(other, self)
    def __neg__(self) -> Self: return self.neg()
    def __pos__(self) -> Self: return self
    def __abs__(self) -> Self: return self.abs()

    # -- comparisons -----------------------------------------------------------------------------
    def _compare(self, op: Ops, name: str, x: Operand, y: Operand) -> Self:
        """Apply a comparison to operands, promoted and broadcast. Integers compare exactly: a number out of an integer dtype's range is
        above or below all its values."""
        a, b = self._operand(x), self._operand(y)
        for number, other in ((a, b), (b, a)):
            if isinstance(number, int) and isinstance(other, TensorBase) and other.dtype.is_int:
                beyond = (number > other.dtype.max) - (number < other.dtype.min)
                if beyond:
                    below = (beyond < 0) == (number is a)       # the result of a < b
                    holds = {Ops.CMPEQ: False, Ops.CMPNE: True, Ops.CMPLT: below, Ops.CMPLE: below}[op]
                    return self.from_uop(graph.full(other.shape, holds, dtypes.bool))
        if isinstance(a, TensorBase) and isinstance(b, TensorBase):
            for signed, unsigned in ((a, b), (b, a)):
                if signed.dtype.kind == "i" and unsigned.dtype == dtypes.uint64:
                    return self._compare_with_unsigned(op, name, a, b, signed)
        return self._binary(op, name, a, b)

    def _compare_with_unsigned(self, op: Ops, name: str, a: TensorBase, b: TensorBase, signed: TensorBase) -> Self:
        """Compare a signed tensor with one of uint64, which have no common integer type. The result is exact, as in NumPy: negative
        numbers are below all others."""
        result = self._binary(op, name, a.cast(dtypes.uint64), b.cast(dtypes.uint64))
        negative = self.from_uop(signed.uop).lt(0)
        holds = {Ops.CMPEQ: False, Ops.CMPNE: True}.get(op, signed is a)       # the result if the signed operand is negative
        return result.logical_or(negative) if holds else result.logical_and(negative.logical_not())

    def eq(self, other: Operand) -> Self:
        """self == other, a bool tensor."""
        return self._compare(Ops.CMPEQ, "eq", self, other)

    def ne(self, other: Operand) -> Self:
        """Compare self != other; True if either is NaN."""
        return self._compare(Ops.CMPNE, "ne", self, other)

    def lt(self, other: Operand) -> Self:
        """self < other."""
        return self._compare(Ops.CMPLT, "lt", self, other)

    def le(self, other: Operand) -> Self:
        """self <= other."""
        return self._compare(Ops.CMPLE, "le", self, other)

    def gt(self, other: Operand) -> Self:
        """self > other."""
        return self._compare(Ops.CMPLT, "gt", other, self)

    def ge(self, other: Operand) -> Self:
        """self >= other."""
        return self._compare(Ops.CMPLE, "ge", other, self)

    def __eq__(self, other: Operand) -> Self: return NotImplemented if _is_no_value(other) else self.eq(other)  # type: ignore[override]
    def __ne__(self, other: Operand) -> Self: return NotImplemented if _is_no_value(other) else self.ne(other)  # type: ignore[override]
    def __lt__(self, other: Operand) -> Self: return self.lt(other)
    def __le__(self, other: Operand) -> Self: return self.le(other)
    def __gt__(self, other: Operand) -> Self: return self.gt(other)
    def __ge__(self, other: Operand) -> Self: return self.ge(other)
    __hash__ = object.__hash__  # identity, because == is elementwise

    # -- logic and bits --------------------------------------------------------------------------
    def logical_not(self) -> Self:
        """True if self is zero."""
        return self.from_uop(graph.alu(Ops.NOT, self.cast(dtypes.bool).uop))

    def _logical(self, op: Ops, name: str, other: Operand) -> Self:
        return self._binary(op, name, self.cast(dtypes.bool), self._as_tensor(other).cast(dtypes.bool))

    def logical_and(self, other: Operand) -> Self:
        """True if both operands are nonzero."""
        return self._logical(Ops.AND, "logical_and", other)

    def logical_or(self, other: Operand) -> Self:
        """True if either operand is nonzero."""
        return self._logical(Ops.OR, "logical_or", other)

    def logical_xor(self, other: Operand) -> Self:
        """True if exactly one operand is nonzero."""
        return self._logical(Ops.XOR, "logical_xor", other)

    def _bitwise(self, op: Ops, name: str, x: Operand, y: Operand) -> Self:
        a, b, dtype = self._pair(name, x, y)
        if dtype.is_float:
            raise DTypeError(f"{name} of {dtype.name}: it takes integers and bools")
        return self.from_uop(graph.alu(op, *operand_uops(name, dtype, a, b)))

    def bitwise_and(self, other: Operand) -> Self:
        """The bitwise and, self & other."""
        return self._bitwise(Ops.AND, "bitwise_and", self, other)

    def bitwise_or(self, other: Operand) -> Self:
        """The bitwise or, self | other."""
        return self._bitwise(Ops.OR, "bitwise_or", self, other)

    def bitwise_xor(self, other: Operand) -> Self:
        """The bitwise exclusive or, self ^ other."""
        return self._bitwise(Ops.XOR, "bitwise_xor", self, other)

    def bitwise_not(self) -> Self:
        """The bitwise complement ~self; for bools, logical not."""
        if self.dtype.is_float:
            raise DTypeError(f"bitwise_not of {self.dtype.name}: it takes integers and bools")
        return self.from_uop(graph.alu(Ops.NOT, self.uop))

    def bitwise_left_shift(self, other: Operand) -> Self:
        """self << other; 0 for a shift by the width or more."""
        return self._shift(Ops.SHL, "bitwise_left_shift", self, other)

    def bitwise_right_shift(self, other: Operand) -> Self:
        """self >> other. Signed integers keep their sign; a shift by the width or more gives 0 or -1."""
        return self._shift(Ops.SHR, "bitwise_right_shift", self, other)

    def _shift(self, op: Ops, name: str, x: Operand, y: Operand) -> Self:
        a, b, dtype = self._pair(name, x, y)
        if not dtype.is_int:
            raise DTypeError(f"{name} of {dtype.name}: it takes integers")
        value, amount = operand_uops(name, dtype, a, b)
        if is_scalar(b) and 0 <= b < dtype.bits:
            return self.from_uop(graph.alu(op, value, amount))
        shape = shape_of(value)
        zero, last = graph.full(shape, 0, dtype), graph.full(shape, dtype.bits - 1, dtype)
        inside = graph.alu(Ops.CMPLE, amount, last)
        if dtype.is_signed:
            inside = graph.alu(Ops.AND, inside, graph.alu(Ops.CMPLE, zero, amount))
        shifted = graph.alu(op, value, graph.alu(Ops.WHERE, inside, amount, zero))
        beyond = graph.alu(Ops.SHR, value, last) if op is Ops.SHR and dtype.is_signed else zero
        return self.from_uop(graph.alu(Ops.WHERE, inside, shifted, beyond))

    def __and__(self, other: Operand) -> Self: return self._bitwise(Ops.AND, "bitwise_and", self, other)
    def __rand__(self, other: Operand) -> Self: return self._bitwise(Ops.AND, "bitwise_and", other, self)
    def __or__(self, other: Operand) -> Self: return self._bitwise(Ops.OR, "bitwise_or", self, other)
    def __ror__(self, other: Operand) -> Self: return self._bitwise(Ops.OR, "bitwise_or", other, self)
    def __xor__(self, other: Operand) -> Self: return self._bitwise(Ops.XOR, "bitwise_xor", self, other)
    def __rxor__(self, other: Operand) -> Self: return self._bitwise(Ops.XOR, "bitwise_xor", other, self)
    def __invert__(self) -> Self: return self.bitwise_not()
    def __lshift__(self, other: Operand) -> Self: return self._shift(Ops.SHL, "bitwise_left_shift", self, other)
    def __rlshift__(self, other: Operand) -> Self: return self._shift(Ops.SHL, "bitwise_left_shift", other, self)
    def __rshift__(self, other: Operand) -> Self: return self._shift(Ops.SHR, "bitwise_right_shift", self, other)
    def __rrshift__(self, other: Operand) -> Self: return self._shift(Ops.SHR, "bitwise_right_shift", other, self)

    # -- choices ---------------------------------------------------------------------------------
    def where(self, condition: Operand, other: Operand) -> Self:
        """Select self if the bool `condition` is True, otherwise `other`. `svod.where(condition, x, y)` takes the condition first."""
        chooser = self._as_tensor(condition)
        if chooser.dtype.kind != "b":
            raise DTypeError(f"x.where(condition, y) with a condition of {chooser.dtype.name}: give bools, as `condition != 0`; where the "
                             "condition comes first: svod.where(condition, x, y)")
        return self._select(chooser, self, other)

    def masked_fill(self, mask: Operand, value: Operand) -> Self:
        """Replace elements by `value`, converted to the dtype of self, if `mask` is True for them."""
        scalar = without_numpy(value)
        if not is_scalar(scalar):
            return self._select(mask, self._as_tensor(scalar).cast(self.dtype), self)
        if self.dtype.kind == "b":
            scalar = bool(scalar)
        elif self.dtype.is_int and math.isfinite(scalar):
            scalar = int(scalar)
        return self._select(mask, type(self)(scalar, dtype=self.dtype), self)

    def _select(self, condition: Operand, x: Operand, y: Operand) -> Self:
        chooser = self._as_tensor(condition).cast(dtypes.bool)
        a, b = self._operand(x), self._operand(y)
        dtype = common_dtype("where", a, b)
        shape = broadcast_shapes("where", *(t.shape for t in (chooser, a, b) if isinstance(t, TensorBase)))
        branches = [graph.broadcast(t.cast(dtype).uop, shape, "where") if isinstance(t, TensorBase) else graph.full(shape, t, dtype)
                    for t in (a, b)]
        return self.from_uop(graph.alu(Ops.WHERE, graph.broadcast(chooser.uop, shape, "where"), *branches))

    def maximum(self, other: Operand) -> Self:
        """The larger of two operands; NaN if either is."""
        return self._arithmetic(Ops.MAX, "maximum", self, other)

    def minimum(self, other: Operand) -> Self:
        """The smaller of two operands; NaN if either is."""
        return self._arithmetic(Ops.MIN, "minimum", self, other)

    def clamp(self, min: Operand | None = None, max: Operand | None = None) -> Self:
        """Limit the elements to `min` … `max`, tensors or numbers. None is no limit."""
        if min is None and max is None:
            raise DTypeError("clamp without bounds: give min, max or both")
        low = self if min is None else self.maximum(min)
        return low if max is None else low.minimum(max)

    def clip(self, min: Operand | None = None, max: Operand | None = None) -> Self: return self.clamp(min, max)

    # -- rounding and signs ----------------------------------------------------------------------
    def abs(self) -> Self:
        """The absolute value. The smallest integer stays negative."""
        return self.from_uop(graph.alu(Ops.ABS, self.uop)) if self.dtype.is_signed else self

    def sign(self) -> Self:
        """The sign -1, 0 or 1; NaN stays NaN."""
        if self.dtype.kind == "b":
            return self
        negative: Operand = self._select(self.lt(0), -1, self) if self.dtype.is_signed else self
        return self._select(self.gt(0), 1, negative)

    def _rounded(self, op: Ops) -> Self:
        return self.from_uop(graph.alu(op, self.uop)) if self.dtype.is_float else self

    def floor(self) -> Self:
        """The largest whole number <= x. Integers stay unchanged."""
        return self._rounded(Ops.FLOOR)

    def ceil(self) -> Self:
        """The smallest whole number >= x. Integers stay unchanged."""
        return self._rounded(Ops.CEIL)

    def trunc(self) -> Self:
        """Round x toward zero. Integers stay unchanged."""
        return self._rounded(Ops.TRUNC)

    def round(self, decimals: int = 0) -> Self:
        """Round to the nearest multiple of 10**-decimals, ties to even. Integers stay unchanged if `decimals` is not negative."""
        if decimals == 0 or (decimals > 0 and not self.dtype.is_float):
            return self._rounded(Ops.ROUND)
        return self._rounded_to(decimals) if self.dtype.is_float else self.cast(dtypes.float64)._rounded_to(decimals).cast(self.dtype)

    @rounds_once
    def _rounded_to(self, decimals: int) -> Self:
        scale = 10.0 ** abs(decimals)
        return self.mul(scale).round().div(scale) if decimals > 0 else self.div(scale).round().mul(scale)

    # -- functions -------------------------------------------------------------------------------
    def exp(self) -> Self: return self._function(Ops.EXP)
    def exp2(self) -> Self: return self._function(Ops.EXP2)
    def log(self) -> Self: return self._function(Ops.LOG)
    def log2(self) -> Self: return self._function(Ops.LOG2)
    def sqrt(self) -> Self: return self._function(Ops.SQRT)
    def reciprocal(self) -> Self: return self._function(Ops.RECIPROCAL)
    def sin(self) -> Self: return self._function(Ops.SIN)
    def cos(self) -> Self: return self._function(Ops.COS)
    def tanh(self) -> Self: return self._function(Ops.TANH)
    def erf(self) -> Self: return self._function(Ops.ERF)

    @rounds_once
    def log10(self) -> Self:
        """The decimal logarithm, computed as log2(x) · log10(2)."""
        return self._float().log2().mul(math.log10(2))

    @rounds_once
    def tan(self) -> Self:
        """The tangent, computed as sin / cos."""
        x = self._float()
        return (x.sin() / x.cos())

    @rounds_once
    def rsqrt(self) -> Self:
        """The reciprocal square root 1 / sqrt(x)."""
        return self._float().sqrt().reciprocal()

    def square(self) -> Self:
        """x · x."""
        return self.mul(self)

    @rounds_once
    def log1p(self) -> Self:
        """The logarithm log(1 + x), accurate for small x: for √½ < 1 + x < √2 it is 2 atanh(x / (2 + x)) by its series. This does not
        rely on rounding errors, which compilers of devices may simplify away."""
        x = self._float()
        t = x / (x * 0.5 + 1)
        near = without_tiny(t)
        z = near.square() * 0.25
        terms = 10 if x.dtype == dtypes.float64 else 4
        series = z * (1 / (2 * terms + 1))
        for k in range(terms - 1, 0, -1):
            series = (series + 1 / (2 * k + 1)) * z
        small = x.lt(math.sqrt(2) - 1).logical_and(x.gt(math.sqrt(0.5) - 1))
        return self._select(small, t + near * series, (x + 1).log())

    @rounds_once
    def expm1(self) -> Self:
        """The function exp(x) - 1, accurate for small x: (u - 1) · x / log(u) with u = exp(x) rounded (Kahan)."""
        x = self._float()
        u = x.exp()
        plain = u - 1
        precise = plain * (x / u.log())
        return self._select(u.eq(1), x, self._select(plain.eq(-1).logical_or(u.eq(math.inf)), plain, precise))

    def isnan(self) -> Self:
        """True if x is NaN."""
        return self.ne(self) if self.dtype.is_float else self._full_like(False, dtypes.bool)

    def isinf(self) -> Self:
        """True if x is infinite."""
        return self.abs().eq(math.inf) if self.dtype.is_float else self._full_like(False, dtypes.bool)

    def isfinite(self) -> Self:
        """True if x is neither NaN nor infinite."""
        return self.abs().lt(math.inf) if self.dtype.is_float else self._full_like(True, dtypes.bool)


def _is_no_value(other: object) -> bool:
    """Whether `x == other` uses Python's default comparison, which is False: for None and strings."""
    return other is None or isinstance(other, str)


_LOGIC_OF_BOOLS = {Ops.ADD: Ops.OR, Ops.MUL: Ops.AND, Ops.MAX: Ops.OR, Ops.MIN: Ops.AND}


E = TypeVar("E", bound=Elementwise)


def without_tiny(x: E) -> E:
    """x, or 0 where |x| < 2^-30: its powers add nothing to a series that begins with 1, and may be subnormal, which is slow."""
    return x.where(x.abs().ge(2.0 ** -30), 0.0)


def truncated_remainder(dividend: UOp, divisor: UOp) -> UOp:
    """The remainder x - trunc(x / y) · y as float64, with the sign of x: x for an infinite y, NaN for an infinite x or a y of 0.

    Multiples of 2**24 · y are subtracted first: for floats of up to 24 bits, each product and difference is then exact in float64."""
    narrow = dividend.dtype.bits < 64
    rest, y = (graph.cast(u, dtypes.float64) for u in (dividend, divisor))
    shape = shape_of(rest)
    for factor in (2.0 ** 24, 1.0) if narrow else (1.0,):
        part = y if factor == 1.0 else graph.alu(Ops.MUL, y, graph.full(shape, factor, dtypes.float64))
        whole = graph.alu(Ops.TRUNC, graph.alu(Ops.FDIV, rest, part))
        is_rest = graph.alu(Ops.CMPEQ, whole, graph.full(shape, 0.0, dtypes.float64))
        # avoids 0 times an infinite y, which would be NaN
        rest = graph.alu(Ops.WHERE, is_rest, rest, graph.alu(Ops.SUB, rest, graph.alu(Ops.MUL, whole, part)))
    return rest


def _floor_quotient(dividend: UOp, divisor: UOp) -> UOp:
    """The floor of a quotient of floats. It is computed in float64, in which a quotient of narrower floats does not round to a whole
    number. A negative quotient that underflows to -0 gives -1, such as a finite number divided by an infinite one. An infinite dividend
    gives NaN, except for a divisor of zero."""
    result = dividend.dtype
    dividend, divisor = (graph.cast(u, dtypes.float64) for u in (dividend, divisor))
    dtype = dividend.dtype
    quotient = graph.alu(Ops.FDIV, dividend, divisor)
    shape = shape_of(quotient)

    def constant(value: float) -> UOp:
        return graph.full(shape, value, dtype)
    zero = constant(0.0)
    opposite = graph.alu(Ops.CMPNE, graph.alu(Ops.CMPLT, dividend, zero), graph.alu(Ops.CMPLT, divisor, zero))
    vanished = graph.alu(Ops.AND, graph.alu(Ops.CMPEQ, quotient, zero), graph.alu(Ops.CMPNE, dividend, zero))
    floor = graph.alu(Ops.WHERE, graph.alu(Ops.AND, opposite, vanished), constant(-1.0), graph.alu(Ops.FLOOR, quotient))
    infinite = graph.alu(Ops.CMPEQ, graph.alu(Ops.ABS, dividend), constant(math.inf))
    lost = graph.alu(Ops.AND, infinite, graph.alu(Ops.CMPNE, divisor, zero))
    return graph.cast(graph.alu(Ops.WHERE, lost, constant(math.nan), floor), result)
