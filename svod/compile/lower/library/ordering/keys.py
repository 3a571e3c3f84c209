"""Keys: integers that compare like elements, or in reverse for a descending order."""
from __future__ import annotations

from svod.compile.lower.library.loops import BOOL, Loops
from svod.core.ir.dtype import BY_NAME, DType, dtypes

CONSTANT_BITS = {"bfloat16": 16, "float16": 13}     # the low bits of a float32 that are 0 if it is converted from the type


def key_type(dtype: DType) -> DType:
    """Return the integer type whose comparison orders elements of a dtype."""
    if dtype.is_int:
        return dtype
    return dtypes.uint8 if dtype.kind == "b" else BY_NAME[f"int{max(32, dtype.bits)}"]


def sort_key(b: Loops, x: int, descending: bool, one_zero: bool = True) -> int:
    """Convert elements to keys.

    The bits of positive floats already compare like them; for negative ones all bits but the sign are flipped. All NaNs become the largest
    key of an ascending order. `one_zero`: whether both zeros become one key, otherwise -0 is less than 0."""
    kind, lanes = key_type(b.dtype[x]), b.num_lanes[x]
    if b.dtype[x].is_float:
        x = b.cast(BY_NAME[f"float{kind.bits}"], x)
        nan = b.alu("CMPNE", BOOL, lanes, x, x)
        bits, zero = b.bitcast(kind, x), b.const(kind, lanes, 0)
        if one_zero:
            bits = b.alu("WHERE", kind, lanes, b.alu("CMPEQ", BOOL, lanes, bits, b.const(kind, lanes, kind.min)), zero, bits)
        key = b.alu("WHERE", kind, lanes, nan, b.const(kind, lanes, kind.max), _flipped_below_zero(b, bits))
    else:
        key = b.cast(kind, x)
    return b.alu("NOT", kind, lanes, key) if descending else key


def element_of(b: Loops, key: int, dtype: DType, descending: bool) -> int:
    """Convert keys to the elements that have them."""
    kind, lanes = key_type(dtype), b.num_lanes[key]
    bits = b.alu("NOT", kind, lanes, key) if descending else key
    return b.cast(dtype, b.bitcast(BY_NAME[f"float{kind.bits}"], _flipped_below_zero(b, bits)) if dtype.is_float else bits)


def _flipped_below_zero(b: Loops, bits: int) -> int:
    """Flip all bits but the sign of negative integers."""
    kind, lanes = b.dtype[bits], b.num_lanes[bits]
    magnitude = b.alu("XOR", kind, lanes, bits, b.const(kind, lanes, kind.max))
    return b.alu("WHERE", kind, lanes, b.alu("CMPLT", BOOL, lanes, bits, b.const(kind, lanes, 0)), magnitude, bits)
