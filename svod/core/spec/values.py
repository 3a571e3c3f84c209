"""Elementwise operations in NumPy: the semantics shared by the evaluator and the LINEAR interpreter.

Arrays have two forms. *Memory* form is the content of buffers, of type `to_numpy(dtype)`: bfloat16 is the uint16 of its bits. *Held* form
is for computing: bool, the integers, float32 and float64 are themselves, index is int64, and 16-bit floats are float32 arrays with only
representable values: every operation on them is computed in float32 and rounded to nearest even.

Results that docs/ir.md leaves open raise no error: integers divided by zero (IDIV, MOD) give 0, and a float cast to an integer type that
cannot represent it gives NumPy's result. Callers silence NumPy's warnings with one `np.errstate(all="ignore")`.
"""
from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from svod.core.graph.buffer import bfloat16_bits_to_float32, float32_to_bfloat16_bits
from svod.core.ir.dtype import DType, dtypes, to_numpy
from svod.core.ir.uop import TRANSCENDENTAL, Ops
from svod.errors import UnsupportedError

Array = npt.NDArray[Any]

_HELD = {dtypes.float16: np.dtype(np.float32), dtypes.bfloat16: np.dtype(np.float32)}


def held_dtype(dtype: DType) -> np.dtype[Any]:
    """Return the NumPy dtype of `dtype`'s held form."""
    return _HELD.get(dtype) or to_numpy(dtype)


def to_float(array: Array, dtype: DType) -> Array:
    """Convert an array of a float dtype from memory form to numbers: float64 for float64, otherwise float32, which is exact."""
    if dtype == dtypes.bfloat16:
        return bfloat16_bits_to_float32(array)
    return array.astype(held_dtype(dtype), copy=False)


def from_float(array: Array, dtype: DType) -> Array:
    """Convert float32 or float64 numbers to the memory form of a float dtype, each rounded once to nearest, ties to even.

    A number that is too large becomes infinity; a NaN becomes a quiet NaN of the same sign."""
    if dtype != dtypes.bfloat16:
        with np.errstate(all="ignore"):
            return array.astype(to_numpy(dtype), copy=False)
    return float32_to_bfloat16_bits(_to_odd(array) if array.dtype == np.float64 else array)


def _to_odd(array: Array) -> Array:
    """Round float64 to float32 by round-to-odd, so that a second rounding to fewer bits gives the same result as one rounding from
    float64."""
    with np.errstate(all="ignore"):
        single = np.asarray(array.astype(np.float32), order="C")
        bits = single.view(np.uint32)
        bits = bits - (np.abs(single.astype(np.float64)) > np.abs(array))    # toward zero
        return np.where(np.isnan(array) | (single == array), single, (bits | np.uint32(1)).view(np.float32))


def hold(memory: Array, dtype: DType) -> Array:
    """Convert an array from memory form to held form."""
    return to_float(memory, dtype) if dtype.is_float else memory


def unhold(held: Array, dtype: DType) -> Array:
    """Convert an array from held form to memory form."""
    return from_float(held, dtype) if dtype.is_float else held.astype(to_numpy(dtype), copy=False)


def round_to(array: Array, dtype: DType) -> Array:
    """Round floats of any precision to `dtype`; returns held form."""
    if array.dtype == np.float32 and dtype == dtypes.float32:
        return array
    return to_float(from_float(array, dtype), dtype)


def constant(dtype: DType, value: bool | int | float) -> Array:
    """Make a 0-d array of a constant in held form; integers wrap to the range of `dtype`."""
    if dtype.is_float:
        return np.asarray(round_to(np.asarray(value, np.float64), dtype))
    if dtype.is_int:
        return np.asarray(int(value) & ((1 << dtype.bits) - 1), np.uint64).astype(held_dtype(dtype))
    return np.asarray(bool(value))


def cast(x: Array, source: DType, dtype: DType) -> Array:
    """CAST in held form: float → integer truncates toward zero and wraps, integer → integer wraps, any → bool is `!= 0`.

    An integer is converted to a 16-bit float through float32, as in machine code."""
    if dtype.kind == "b":
        return np.asarray(x != 0)
    if not dtype.is_float:
        # through int64 first: for values that wrap, NumPy's direct conversion of floats to narrow integers differs between machines
        if source.is_float:
            x = np.asarray(x)
            signed = x.astype(np.int64)
            x = np.where(x < 0, signed.astype(np.uint64), x.astype(np.uint64)) if dtype.name == "uint64" else signed
        return np.asarray(x).astype(held_dtype(dtype), copy=False)
    if not source.is_float:
        x = np.asarray(x).astype(held_dtype(dtype))
    return round_to(np.asarray(x), dtype)


def bitcast(x: Array, source: DType, dtype: DType) -> Array:
    """BITCAST in held form, between types of one width, or of a vector to another number of lanes with the same total bytes."""
    bits = np.ascontiguousarray(unhold(np.asarray(x), source)).view(to_numpy(dtype))
    return hold(bits.reshape(np.shape(x)) if source.itemsize == dtype.itemsize else bits, dtype)


def fma64(a: Array, b: Array, c: Array) -> Array:
    """Compute a*b + c of float64 with one rounding (to within 2^-50 ulp), by Dekker's exact product and Knuth's exact sum."""
    product = a * b
    split = 134217729.0                                  # 2^27 + 1 cuts a float64 into two halves of 26 bits
    a_hi, b_hi = a * split, b * split
    a_hi, b_hi = a_hi - (a_hi - a), b_hi - (b_hi - b)
    a_lo, b_lo = a - a_hi, b - b_hi
    error = ((a_hi * b_hi - product) + a_hi * b_lo + a_lo * b_hi) + a_lo * b_lo
    total = product + c
    back = total - product
    rest = (product - (total - back)) + (c - back)
    exact = total + (rest + error)
    # for infinities, NaNs, products that lost bits to underflow and splits that overflowed: the rounded product plus c
    return np.where(np.isfinite(exact) & (np.abs(product) > 1e-280), exact, total)


def _mulacc(a: Array, b: Array, c: Array) -> Array:
    if a.dtype == np.float32:
        return (a.astype(np.float64) * b + c).astype(np.float32)
    return fma64(a, b, c) if a.dtype == np.float64 else a * b + c


def dot(acc: Array, x: Array, y: Array, group: int) -> Array:
    """Compute acc[lane] + Σ x·y over each lane's group of `group` narrow numbers, in held form, as dot instructions of CPUs do.

    Integers wrap. For bfloat16 the products of a group are added from last to first, each sum is rounded to nearest even, and denormal
    operands, products and sums count as zeros of their sign (VDPBF16PS, Intel SDM volume 2)."""
    a, b = x.reshape(-1, group), y.reshape(-1, group)
    if acc.dtype != np.float32:
        return np.asarray((acc + (a.astype(np.int64) * b).sum(-1)).astype(acc.dtype))
    total = _flush(acc)
    for k in reversed(range(group)):
        total = _flush(_mulacc(_flush(a[:, k]), _flush(b[:, k]), total))
    return total


def tile_dot(acc: Array, x: Array, y: Array, rows: int, columns: int, group: int) -> Array:
    """Compute acc[m, n] + Σ x[m, k·group + i]·y[k, n·group + i] over k and i, on flat arrays in held form, as AMX instructions do.

    Integers wrap. For bfloat16 there is one sum over k for each i, which starts at 0, in the order of k, rounded to nearest even after each
    addition. These sums are added, then the accumulator. Denormals count as zeros (TDPBF16PS, Intel SDM volume 2)."""
    a = x.reshape(rows, -1, group)
    b = y.reshape(-1, columns, group)
    total = acc.reshape(rows, columns)
    if acc.dtype != np.float32:
        return np.asarray((total + np.einsum("mki,kni->mn", a.astype(np.int64), b.astype(np.int64))).astype(acc.dtype).ravel())
    sums = [np.zeros((rows, columns), np.float32) for _ in range(group)]
    for k in range(len(b)):
        for i in range(group):
            sums[i] = _flush(_mulacc(_flush(a[:, k, i])[:, None], _flush(b[k, :, i])[None, :], sums[i]))
    inner = sums[0]
    for more in sums[1:]:
        inner = _flush(inner + more)
    return _flush(_flush(total) + inner).ravel()


def round_factor(x: Array, significand: int) -> Array:
    """Round float32 numbers to `significand` significant bits, to nearest, ties away from 0; `significand` 0: no rounding."""
    if not significand:
        return x
    dropped = 24 - significand
    bits = np.ascontiguousarray(x).view(np.uint32) + np.uint32(1 << dropped - 1) & np.uint32(-1 << dropped & 0xFFFF_FFFF)
    return np.where(np.isnan(x), x, bits.view(np.float32))


def matrix_product(acc: Array, a: Array, b: Array, significand: int = 0) -> Array:
    """Compute acc + a·b of matrices in held form, as matrix instructions of a GPU do. `significand`: significant bits to which the factors
    are rounded first; 0: none. Integers wrap. Products of 16-bit floats are exact. NVIDIA does not document how their sums are rounded;
    here each result is rounded once, to nearest."""
    a, b = round_factor(a, significand), round_factor(b, significand)
    if acc.dtype.kind != "f":
        return np.asarray((acc + a.astype(np.int64) @ b.astype(np.int64)).astype(acc.dtype))
    return np.asarray((acc.astype(np.float64) + a.astype(np.float64) @ b.astype(np.float64)).astype(acc.dtype))


def _flush(x: Array) -> Array:
    """Replace denormal float32 numbers by zeros of their sign."""
    return np.asarray(np.where(np.abs(x) < np.float32(2.0**-126), np.copysign(np.float32(0), x), x))


def _pow(a: Array, b: Array) -> Array:
    if a.dtype.kind == "f":
        return np.asarray(np.power(a, b))
    return np.asarray(np.where(b < 0, 0, np.power(a, np.maximum(b, 0))).astype(a.dtype))   # negative powers of integers: unspecified


_erf = np.frompyfunc(math.erf, 1, 1)

OPERATION_VALUES: dict[Ops, Callable[..., Any]] = {
    Ops.NEG: np.negative, Ops.ABS: np.abs, Ops.RECIPROCAL: lambda x: np.ones((), x.dtype) / x, Ops.SQRT: np.sqrt, Ops.FLOOR: np.floor,
    Ops.CEIL: np.ceil, Ops.TRUNC: np.trunc, Ops.ROUND: np.rint, Ops.NOT: np.invert,
    Ops.EXP: np.exp, Ops.EXP2: np.exp2, Ops.LOG: np.log, Ops.LOG2: np.log2, Ops.SIN: np.sin, Ops.COS: np.cos, Ops.TANH: np.tanh,
    Ops.ERF: lambda x: np.asarray(_erf(x), np.float64), Ops.POW: _pow,
    Ops.ADD: np.add, Ops.SUB: np.subtract, Ops.MUL: np.multiply, Ops.FDIV: np.true_divide, Ops.IDIV: np.floor_divide,
    Ops.MOD: np.mod, Ops.MAX: np.maximum, Ops.MIN: np.minimum, Ops.AND: np.bitwise_and, Ops.OR: np.bitwise_or,
    Ops.XOR: np.bitwise_xor, Ops.SHL: np.left_shift, Ops.SHR: np.right_shift,
    Ops.CMPLT: np.less, Ops.CMPLE: np.less_equal, Ops.CMPEQ: np.equal, Ops.CMPNE: np.not_equal,
    Ops.WHERE: np.where, Ops.MULACC: _mulacc,
}


def scaleb(x: Array, n: Array) -> Array:
    """Compute x · 2^n of floats with one rounding. `n`: integers as floats; a NaN or infinity among them gives NaN."""
    defined = np.isfinite(n)
    whole = np.clip(np.where(defined, n, 0), -5000, 5000).astype(np.int32)
    return np.asarray(np.where(defined, np.ldexp(x, whole), np.nan).astype(x.dtype))


def apply_alu(op: Ops, dtype: DType, args: Sequence[Array]) -> Array:
    """Apply an ALU operation to operands in held form, which are broadcast against each other; returns held form of the result's `dtype`.

    Transcendental functions of float32 and narrower types are computed in float64 and rounded, so their error is about half an ulp."""
    function = OPERATION_VALUES.get(op)
    if function is None:
        raise UnsupportedError(f"{op.value} is not an elementwise operation with a NumPy meaning")
    if op in TRANSCENDENTAL and dtype.is_float:
        return round_to(np.asarray(function(*(np.asarray(a).astype(np.float64) for a in args))), dtype)
    result = np.asarray(function(*args))
    if dtype.bits == 16 and dtype.is_float and op not in (Ops.WHERE, Ops.NEG, Ops.ABS):
        return round_to(result, dtype)
    return result.astype(held_dtype(dtype), copy=False)
