"""Rules for division and shifts of integers.

    IDIV, MOD       round to minus infinity; division by zero gives 0; MIN // -1 wraps, as in NumPy
    SHL, SHR        a shift by the width or more, or by a negative amount, gives 0 (arithmetic SHR: the sign in all bits)

are composed of instructions that are defined for fewer operands:

    QUOTIENT, REMAINDER         round to zero; the divisor is not 0, nor -1 where the dividend is MIN
    SHL_BELOW, SHR_BELOW        by 0 to the width - 1; for other amounts some value
"""
from __future__ import annotations

from typing import Any

from svod.compile.lower.legal.builder import BOOL, Rewriting
from svod.core.ir.dtype import BY_NAME, DType, dtypes


def bits_of(b: Rewriting, dtype: DType) -> int:
    """Return the width of an integer type in a register, in bits."""
    return b.instructions.index_bits if dtype is dtypes.index else dtype.bits


def unsigned(b: Rewriting, dtype: DType) -> DType:
    """Return the unsigned type of the same width."""
    return BY_NAME[f"uint{bits_of(b, dtype)}"]


def from_unsigned(b: Rewriting, dtype: DType, v: int) -> int:
    """Convert a value of the unsigned type of the same width to `dtype`; large values wrap."""
    return b.cast(dtype, b.cast(BY_NAME[f"int{bits_of(b, dtype)}"], v) if dtype is dtypes.index else v)


def divide(b: Rewriting, op: str, dtype: DType, lanes: int, src: tuple[int, ...], arg: Any) -> int | None:
    """Rule for IDIV and MOD.

    By a power of two they are a shift, which rounds to minus infinity, and a mask. By another positive number the remainder's sign, as a
    word of ones, is added to the quotient."""
    (x, y), known, remainder = src, b.known(src[1]), op == "MOD"

    def alu(name: str, *operands: int) -> int:
        return b.alu(name, dtype, lanes, *operands)
    if known == 0:
        return b.const(dtype, lanes, 0)
    if known is not None and known > 0 and known & (known - 1) == 0:
        return alu("AND", x, b.const(dtype, lanes, known - 1)) if remainder else \
            alu("SHR", x, b.const(dtype, lanes, known.bit_length() - 1))
    if dtype.kind == "u" or (dtype is dtypes.index and b.least(0) >= 0 and b.least(1) >= 0):
        return _divide_unsigned(b, remainder, dtype, lanes, x, y)
    if known is not None and known > 0:
        quotient = alu("QUOTIENT", x, y)
        rest = alu("SUB", x, alu("MUL", quotient, y))
        sign = alu("SHR", rest, b.const(dtype, lanes, bits_of(b, dtype) - 1))
        return alu("ADD", rest, alu("AND", sign, y)) if remainder else alu("ADD", quotient, sign)
    return _divide_signed(b, remainder, dtype, lanes, x, y)


def _divide_unsigned(b: Rewriting, remainder: bool, dtype: DType, lanes: int, x: int, y: int) -> int:
    """Divide numbers that are not negative; division by 0 gives 0."""
    kind = unsigned(b, dtype)

    def divided(divisor: int) -> int:
        return from_unsigned(b, dtype, b.alu("REMAINDER" if remainder else "QUOTIENT", kind, lanes, b.cast(kind, x), b.cast(kind, divisor)))
    if b.known(y) is not None or (dtype is dtypes.index and b.least(1) >= 1):
        return divided(y)
    zero = b.const(dtype, lanes, 0)
    is_zero = b.alu("CMPEQ", BOOL, lanes, y, zero)
    return b.alu("WHERE", dtype, lanes, is_zero, zero, divided(b.alu("WHERE", dtype, lanes, is_zero, b.const(dtype, lanes, 1), y)))


def _divide_signed(b: Rewriting, remainder: bool, dtype: DType, lanes: int, x: int, y: int) -> int:
    """Divide signed numbers by an unknown or a negative number."""
    zero, one = b.const(dtype, lanes, 0), b.const(dtype, lanes, 1)

    def alu(name: str, *operands: int) -> int:
        return b.alu(name, dtype, lanes, *operands)

    def test(name: str, left: int, right: int) -> int:
        return b.alu(name, BOOL, lanes, left, right)
    is_zero = None
    divisor, known = y, b.known(y)
    if known is None or known == -1:
        # MIN / -1 overflows; divided by 1 it gives the wrapped quotient
        is_zero = test("CMPEQ", y, zero)
        least = b.const(dtype, lanes, -1 << bits_of(b, dtype) - 1)
        overflows = b.alu("AND", BOOL, lanes, test("CMPEQ", x, least), test("CMPEQ", y, b.const(dtype, lanes, -1)))
        divisor = alu("WHERE", b.alu("OR", BOOL, lanes, is_zero, overflows), one, y)
    quotient = alu("QUOTIENT", x, divisor)
    rest = alu("SUB", x, alu("MUL", quotient, divisor))
    other_sign = test("CMPLT", alu("XOR", rest, divisor), zero)
    rounds_down = b.alu("AND", BOOL, lanes, other_sign, test("CMPNE", rest, zero))
    result = alu("ADD", rest, alu("WHERE", rounds_down, divisor, zero)) if remainder else \
        alu("SUB", quotient, b.cast(dtype, rounds_down))
    return result if is_zero is None else alu("WHERE", is_zero, zero, result)


def shift(b: Rewriting, op: str, dtype: DType, lanes: int, src: tuple[int, ...], arg: Any) -> int | None:
    """Rule for SHL and SHR; SHR of signed integers is arithmetic."""
    (x, amount), bits = src, bits_of(b, dtype)
    known = b.elements(amount)
    if known and all(0 <= n < bits for n in known):
        return None
    kind = unsigned(b, dtype)
    by = b.cast(kind, amount)       # a negative amount becomes a large unsigned one
    if op == "SHR" and dtype.kind == "i":
        least = b.alu("MIN", kind, lanes, by, b.const(kind, lanes, bits - 1))
        return b.alu("SHR_BELOW", dtype, lanes, x, from_unsigned(b, dtype, least))
    inside = b.alu("CMPLT", BOOL, lanes, by, b.const(kind, lanes, bits))
    return b.alu("WHERE", dtype, lanes, inside, b.alu(f"{op}_BELOW", dtype, lanes, x, amount), b.const(dtype, lanes, 0))


def subtract_from_zero(b: Rewriting, op: str, dtype: DType, lanes: int, src: tuple[int, ...], arg: Any) -> int | None:
    """Rule for NEG of an integer."""
    return b.alu("SUB", dtype, lanes, b.const(dtype, lanes, 0), src[0])


def by_extrema(b: Rewriting, op: str, dtype: DType, lanes: int, src: tuple[int, ...], arg: Any) -> int | None:
    """Rule for CMPLT and CMPLE with a constant: x < y is MAX(x, y) ≠ x, x ≤ y is MIN(x, y) = x."""
    if not any(b.elements(s) for s in src):
        return None
    x, y = src
    kind, _ = b.type_of(x)
    return b.alu("CMPNE", dtype, lanes, b.alu("MAX", kind, lanes, x, y), x) if op == "CMPLT" else \
        b.alu("CMPEQ", dtype, lanes, b.alu("MIN", kind, lanes, x, y), x)


def of_bools(b: Rewriting, op: str, dtype: DType, lanes: int, src: tuple[int, ...], arg: Any) -> int | None:
    """Rule for CMPLT and CMPLE of bools: NOT x AND y, NOT x OR y."""
    return b.alu("AND" if op == "CMPLT" else "OR", BOOL, lanes, b.alu("NOT", BOOL, lanes, src[0]), src[1])
