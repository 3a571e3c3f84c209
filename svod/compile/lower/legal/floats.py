"""Rules for float operations that some renderers lack, or print without the NaNs and signs of zeros that LINEAR promises."""
from __future__ import annotations

from typing import Any

from svod.compile.lower.legal.builder import BOOL, Rewriting
from svod.core.ir.dtype import DType, dtypes

F32, F64, U16, U32, U64 = dtypes.float32, dtypes.float64, dtypes.uint16, dtypes.uint32, dtypes.uint64
LARGEST_F64 = 1.7976931348623157e308


def reciprocal(b: Rewriting, op: str, dtype: DType, lanes: int, src: tuple[int, ...], arg: Any) -> int | None:
    """Rule for RECIPROCAL: 1 / x."""
    return b.alu("FDIV", dtype, lanes, b.const(dtype, lanes, 1.0), src[0])


def extremum(b: Rewriting, op: str, dtype: DType, lanes: int, src: tuple[int, ...], arg: Any) -> int | None:
    """Rule for MAX and MIN, whose result is NaN if an operand is. A comparison with NaN is false, so y is chosen if y is NaN; whether x is
    NaN is tested separately."""
    x, y = src
    if _is_number(b, x):
        x, y = y, x

    def is_nearer(v: int, w: int) -> int:
        return b.alu("CMPLT", BOOL, lanes, w, v) if op == "MAX" else b.alu("CMPLT", BOOL, lanes, v, w)
    if _is_number(b, y):
        return b.alu("WHERE", dtype, lanes, is_nearer(y, x), y, x)
    return b.alu("WHERE", dtype, lanes, b.alu("OR", BOOL, lanes, is_nearer(x, y), b.alu("CMPNE", BOOL, lanes, x, x)), x, y)


def _is_number(b: Rewriting, v: int) -> bool:
    """Whether a value is a constant that is not NaN."""
    known = b.known(v)
    return known is not None and known == known


def test_for_nan(b: Rewriting, op: str, dtype: DType, lanes: int, src: tuple[int, ...], arg: Any) -> int | None:
    """Rule for CMPNE and CMPEQ of a float with itself: float32 is tested by its bits, float64 by comparisons that are false only for
    NaN."""
    if src[0] != src[1]:
        return None
    of, x = b.type_of(src[0])[0], src[0]
    if of == F64:
        size, largest = b.alu("ABS", F64, lanes, x), b.const(F64, lanes, LARGEST_F64)
        is_number = b.alu("OR", BOOL, lanes, b.alu("CMPLE", BOOL, lanes, size, largest), b.alu("CMPLT", BOOL, lanes, largest, size))
        return is_number if op == "CMPEQ" else b.alu("NOT", BOOL, lanes, is_number)
    size = b.alu("AND", U32, lanes, b.bitcast(U32, b.cast(F32, x)), b.const(U32, lanes, 0x7FFFFFFF))
    infinity = b.const(U32, lanes, 0x7F800000)
    return b.alu("CMPLE", BOOL, lanes, size, infinity) if op == "CMPEQ" else b.alu("CMPLT", BOOL, lanes, infinity, size)


def round_by_floor(b: Rewriting, op: str, dtype: DType, lanes: int, src: tuple[int, ...], arg: Any) -> int | None:
    """Rule for ROUND (halves to even) and TRUNC, by the FLOOR of the absolute value. Whole numbers, infinities and NaN are returned
    unchanged."""
    x = src[0]

    def alu(name: str, *operands: int) -> int:
        return b.alu(name, dtype, lanes, *operands)

    def test(name: str, left: int, right: int) -> int:
        return b.alu(name, BOOL, lanes, left, right)
    size = alu("ABS", x)
    whole = down = alu("FLOOR", size)
    if op == "ROUND":
        half = b.const(dtype, lanes, 0.5)
        rest, halved = alu("SUB", size, down), alu("MUL", down, half)
        is_odd = test("CMPNE", alu("FLOOR", halved), halved)
        up = b.alu("OR", BOOL, lanes, test("CMPLT", half, rest), b.alu("AND", BOOL, lanes, test("CMPEQ", rest, half), is_odd))
        whole = alu("WHERE", up, alu("ADD", down, b.const(dtype, lanes, 1.0)), down)
    signed = alu("WHERE", test("CMPLT", x, b.const(dtype, lanes, 0.0)), alu("NEG", whole), whole)
    changes = b.alu("OR", BOOL, lanes, test("CMPLT", whole, size), test("CMPLT", size, whole))
    return alu("WHERE", changes, signed, x)


# -- 16-bit floats ------------------------------------------------------------------------------------
def sign_bit(b: Rewriting, op: str, dtype: DType, lanes: int, src: tuple[int, ...], arg: Any) -> int | None:
    """Rule for NEG and ABS of 16-bit floats."""
    raw = b.bitcast(U16, src[0])
    changed = b.alu("XOR", U16, lanes, raw, b.const(U16, lanes, 0x8000)) if op == "NEG" else \
        b.alu("AND", U16, lanes, raw, b.const(U16, lanes, 0x7FFF))
    return b.bitcast(dtype, changed)


def widen(b: Rewriting, lanes: int, x: int) -> int:
    """Convert the bits of a 16-bit float to float32; exact."""
    dtype, _ = b.type_of(x)
    word = b.cast(U32, b.bitcast(U16, x))
    if dtype == dtypes.bfloat16:
        return b.bitcast(F32, b.alu("SHL", U32, lanes, word, b.const(U32, lanes, 16)))
    # float16 has 5 bits of exponent, float32 has 8; multiplying by 2^112 corrects the bias, also for denormal numbers
    size = b.alu("AND", U32, lanes, word, b.const(U32, lanes, 0x7FFF))
    moved = b.bitcast(F32, b.alu("SHL", U32, lanes, size, b.const(U32, lanes, 13)))
    scaled = b.alu("MUL", F32, lanes, moved, b.const(F32, lanes, 2.0**112))
    raw, is_finite = b.bitcast(U32, scaled), b.alu("CMPLT", BOOL, lanes, size, b.const(U32, lanes, 0x7C00))
    raw = b.alu("WHERE", U32, lanes, is_finite, raw, b.alu("OR", U32, lanes, raw, b.const(U32, lanes, 0x7F800000)))
    sign = b.alu("SHL", U32, lanes, b.alu("AND", U32, lanes, word, b.const(U32, lanes, 0x8000)), b.const(U32, lanes, 16))
    return b.bitcast(F32, b.alu("OR", U32, lanes, raw, sign))


def narrow(b: Rewriting, dtype: DType, lanes: int, x: int) -> int:
    """Round float32 to a 16-bit float, to nearest even."""
    raw = b.bitcast(U32, x)
    result = _bits_of_bfloat16(b, lanes, x, raw) if dtype == dtypes.bfloat16 else _bits_of_float16(b, lanes, raw)
    return b.bitcast(dtype, b.cast(U16, result))


def _nearest_even(b: Rewriting, lanes: int, raw: int, dropped: int) -> int:
    """Add to a word the number after which cutting off its low `dropped` bits rounds to nearest even: one less than half of the last
    remaining place, or exactly half if the result would be odd."""
    def alu(name: str, v: int, w: int) -> int:
        return b.alu(name, U32, lanes, v, b.const(U32, lanes, w))
    odd = alu("AND", alu("SHR", raw, dropped), 1)
    return b.alu("ADD", U32, lanes, alu("ADD", raw, (1 << dropped - 1) - 1), odd)


def _bits_of_bfloat16(b: Rewriting, lanes: int, x: int, raw: int) -> int:
    """Compute the bits of bfloat16: the upper half of float32, rounded. A NaN keeps its sign and gets its quiet bit."""
    rounded = _nearest_even(b, lanes, raw, 16)
    quiet = b.alu("OR", U32, lanes, raw, b.const(U32, lanes, 0x400000))
    chosen = b.alu("WHERE", U32, lanes, b.alu("CMPNE", BOOL, lanes, x, x), quiet, rounded)
    return b.alu("SHR", U32, lanes, chosen, b.const(U32, lanes, 16))


def _bits_of_float16(b: Rewriting, lanes: int, raw: int) -> int:
    """Compute the bits of float16. Integer arithmetic moves the exponent of a normal number. A number below 2^-14 is rounded by adding
    0.5: the last place of that sum is the unit of denormal numbers. Numbers beyond the largest one become infinity; NaN stays NaN."""
    def alu(name: str, v: int, w: int) -> int:
        return b.alu(name, U32, lanes, v, b.const(U32, lanes, w))

    def choose(condition: int, v: int, w: int) -> int:
        return b.alu("WHERE", U32, lanes, condition, v, w)
    size = alu("AND", raw, 0x7FFFFFFF)
    normal = alu("SHR", alu("SUB", _nearest_even(b, lanes, size, 13), 112 << 23), 13)
    small = alu("SUB", b.bitcast(U32, b.alu("ADD", F32, lanes, b.bitcast(F32, size), b.const(F32, lanes, 0.5))), 0x3F000000)
    is_nan = b.alu("CMPLT", BOOL, lanes, b.const(U32, lanes, 0x7F800000), size)
    large = choose(is_nan, b.const(U32, lanes, 0x7E00), b.const(U32, lanes, 0x7C00))
    chosen = choose(b.alu("CMPLT", BOOL, lanes, size, b.const(U32, lanes, 113 << 23)), small, normal)
    # 65520: from here on numbers round to infinity
    chosen = choose(b.alu("CMPLT", BOOL, lanes, size, b.const(U32, lanes, 0x477FF000)), chosen, large)
    return b.alu("OR", U32, lanes, chosen, alu("AND", alu("SHR", raw, 16), 0x8000))


def to_odd(b: Rewriting, lanes: int, x: int) -> int:
    """Convert float64 to float32 rounded to odd: an inexact result has its last bit set, so that a second rounding gives the same result as
    a single one.

    (Boldo and Melquiond, "When double rounding is odd", 2005.)"""
    near = b.cast(F32, x)
    back = b.cast(F64, near)
    raw, one = b.bitcast(U32, near), b.const(U32, lanes, 1)
    beyond = b.alu("CMPLT", BOOL, lanes, b.alu("ABS", F64, lanes, x), b.alu("ABS", F64, lanes, back))
    toward_zero = b.alu("WHERE", U32, lanes, beyond, b.alu("SUB", U32, lanes, raw, one), raw)
    inexact = b.alu("OR", BOOL, lanes, b.alu("CMPLT", BOOL, lanes, back, x), b.alu("CMPLT", BOOL, lanes, x, back))
    return b.bitcast(F32, b.alu("WHERE", U32, lanes, inexact, b.alu("OR", U32, lanes, toward_zero, one), raw))
