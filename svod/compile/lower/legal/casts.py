"""Conversions: by value (CAST) and of bits (BITCAST)."""
from __future__ import annotations

from typing import Any

import numpy as np

from svod.compile.lower.legal.builder import BOOL, Rewriting
from svod.compile.lower.legal.floats import F32, F64, U32, narrow, to_odd, widen
from svod.compile.lower.legal.integers import bits_of
from svod.core.ir.dtype import BY_NAME, DType, dtypes
from svod.core.spec.values import cast as cast_value
from svod.core.spec.values import constant

INDEX, I32 = dtypes.index, dtypes.int32


def is_half(dtype: DType) -> bool:
    return dtype.kind == "f" and dtype.bits == 16


def cast(b: Rewriting, op: str, dtype: DType, lanes: int, src: tuple[int, ...], arg: Any) -> int | None:
    """Rule for CAST. A conversion to bool is a comparison with 0. Conversions of 16-bit floats go through float32; float64 is first
    rounded to odd in float32, which avoids double rounding."""
    x, n = src[0], b.instructions
    of, _ = b.type_of(x)
    if of == dtype:
        return x
    if b.elements(x):
        return _of_constant(b, of, dtype, lanes, x)
    if dtype is BOOL:
        return b.alu("CMPNE", BOOL, lanes, x, b.const(of, lanes, 0.0 if of.is_float else 0))
    if is_half(of):
        if dtype != F32:
            return b.cast(dtype, b.cast(F32, x))
        return None if of.name in n.widened else widen(b, lanes, x)
    if is_half(dtype):
        if of == F32:
            return None if dtype.name in n.half_casts else narrow(b, dtype, lanes, x)
        return b.cast(dtype, to_odd(b, lanes, x) if of == F64 else b.cast(F32, x))
    return _to_integer(b, of, dtype, lanes, x) if dtype.is_int and of is not BOOL else None


def _to_integer(b: Rewriting, of: DType, dtype: DType, lanes: int, x: int) -> int | None:
    """Convert a number to an integer. A float becomes a short integer through int32; an integer is extended to 64 bits in its own
    signedness first. A number that a 32-bit index cannot hold becomes the nearest index, which is outside of every buffer."""
    n = b.instructions
    if of.is_float and dtype.bits < 32 and not n.has_short_integers:
        return b.cast(dtype, b.cast(I32, x))
    if dtype is INDEX:
        if n.index_bits == 64 or (of.is_int and of.bits <= 32 and of != dtypes.uint32):
            return None
        if of == dtypes.int64:
            x = b.alu("MAX", of, lanes, x, b.const(of, lanes, int(I32.min)))
        if of.is_int:
            x = b.alu("MIN", of, lanes, x, b.const(of, lanes, int(I32.max)))
        return b.cast(INDEX, b.cast(I32, x))
    if of.is_int and bits_of(b, of) < 64 == dtype.bits and of.kind != dtype.kind and not n.extends_by_source:
        return b.cast(dtype, b.cast(dtypes.int64 if of.kind == "i" else dtypes.uint64, x))
    return None


def _of_constant(b: Rewriting, of: DType, dtype: DType, lanes: int, x: int) -> int:
    """Convert a constant to another type."""
    with np.errstate(all="ignore"):
        values = [cast_value(constant(of, value), of, dtype).item() for value in b.elements(x)]
    return b.const(dtype, lanes, values[0]) if len(values) == 1 else b.put("VCONST", dtype, lanes, arg=tuple(values))


def in_32_bits(b: Rewriting, op: str, dtype: DType, lanes: int, src: tuple[int, ...], arg: Any) -> int | None:
    """Rule for operations on 8- or 16-bit numbers: compute in 32 bits, then wrap or round. float32 has more than twice the precision of
    16-bit floats, so +, -, *, / and sqrt are correctly rounded."""
    kind = {"f": F32, "i": I32, "u": U32}[b.type_of(src[0])[0].kind]
    wide = [b.cast(kind, s) for s in src]
    return b.alu(op, BOOL, lanes, *wide) if dtype is BOOL else b.cast(dtype, b.alu(op, kind, lanes, *wide))


def bitcast(b: Rewriting, op: str, dtype: DType, lanes: int, src: tuple[int, ...], arg: Any) -> int | None:
    """Rule for BITCAST. If the element widths differ, narrow elements are shifted into their positions in wide ones, or out of them."""
    x = src[0]
    of, width = b.type_of(x)
    if of == dtype:
        return x
    if dtype is BOOL:
        return b.cast(BOOL, b.bitcast(dtypes.uint8, x))
    if of is BOOL:
        return b.bitcast(dtype, b.cast(dtypes.uint8, x))
    if of.itemsize == dtype.itemsize or b.instructions.splits_lanes:
        return None
    word, result = (BY_NAME[f"uint{8 * d.itemsize}"] for d in (of, dtype))
    x = b.bitcast(word, x)
    return b.bitcast(dtype, _join(b, word, result, lanes, x) if width > lanes else _split(b, word, result, lanes, x))


def _join(b: Rewriting, of: DType, dtype: DType, lanes: int, x: int) -> int:
    """Join neighbouring lanes to one wide element, the first lane in its low bits."""
    count, total = dtype.bits // of.bits, -1
    for k in range(count):
        own = tuple(range(k, lanes * count, count))
        part = b.cast(dtype, b.put("EXTRACT", of, 1, x, arg=k) if lanes == 1 else b.put("SHUFFLE", of, lanes, x, arg=own))
        if k:
            part = b.alu("SHL", dtype, lanes, part, b.const(dtype, lanes, k * of.bits))
        total = b.alu("OR", dtype, lanes, total, part) if k else part
    return total


def _split(b: Rewriting, of: DType, dtype: DType, lanes: int, x: int) -> int:
    """Split each wide element into several lanes, its low bits first."""
    count = of.bits // dtype.bits
    copies = b.put("SPLAT", of, lanes, x) if lanes == count else b.put("SHUFFLE", of, lanes, x, arg=tuple(k // count for k in range(lanes)))
    places = b.put("VCONST", of, lanes, arg=tuple(k % count * dtype.bits for k in range(lanes)))
    return b.cast(dtype, b.alu("SHR", of, lanes, copies, places))
