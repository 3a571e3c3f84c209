"""Transcendental functions as vector instructions of LINEAR: EXP, EXP2, LOG, LOG2, SIN, COS, TANH, ERF, POW.

    expand(b, Ops.EXP, float32, 16, x) → id of a value made of MULACC, MUL, SCALEB, bit operations and selects

LLVM turns `llvm.exp` on 16 lanes into 16 calls of libm, so lowering expands these itself. Every expansion is branch-free, correct at ±0,
infinities, NaN, overflow and denormal arguments and results, and within `MAX_ULP` of the true value (a unit in the last place of the
result; tested over all 16-bit floats and by dense sampling of the others). float16 and bfloat16 are computed in float32 and rounded. SIN
and COS keep this bound for |x| ≤ `SIN_DOMAIN`; beyond it the result is some number in [-1, 1]. The bounds are for strict rules
(`FloatRules`): MULACC is fused, and sums are computed as written. Without these the last bits of a result may be lost, POW of float64 has
an error of y·log x units in the last place, and SIN and COS are accurate for |x| < 2^23, or for |x| < 2^13 if there is only float32.

If the target has POW2, EXP2 of float32 is that instruction and a scaling for denormal results, and EXP of 16-bit floats is 2^(x / ln 2).

The polynomials (`polynomials.json`) were fitted by experiments/polynomials.py, which prints their entries. Methods: scaling by powers of
two with one instruction where the target has it (SCALEB), else in two steps, with exponents that are read from the bits of `x + 1.5·2^23`
(rounding and integer conversion in one addition); Cody and Waite's argument reduction (Software Manual for the Elementary Functions, 1980)
with fused multiplications; log by its expansion around 1, and through atanh in float64; a rational function for TANH of float32; a
polynomial each for erf of small numbers and for the root of 1 - erf of others; double-double arithmetic (Dekker 1971) for POW of float64.
"""
from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from fractions import Fraction
from functools import partial
from typing import Protocol

import numpy as np

from svod.core.ir.dtype import DType, dtypes
from svod.core.ir.uop import Ops
from svod.core.machine.target import FloatRules
from svod.errors import UnsupportedError
from svod.system.process.program import package_text

F16, BF16, F32, F64 = dtypes.float16, dtypes.bfloat16, dtypes.float32, dtypes.float64


class MathBuilder(Protocol):
    """The methods of a builder of instructions that expansions call. Values are ids with a dtype and a number of lanes."""

    def alu(self, op: str, dtype: DType, lanes: int, *args: int) -> int: ...
    def const(self, dtype: DType, lanes: int, value: bool | int | float) -> int: ...
    def cast(self, dtype: DType, v: int) -> int: ...
    def bitcast(self, dtype: DType, v: int) -> int: ...
    def type_of(self, v: int) -> tuple[DType, int]: ...


# maximum errors in units in the last place, against the infinitely precise result
MAX_ULP: dict[Ops, dict[DType, float]] = {
    Ops.EXP: {F16: 0.6, BF16: 0.6, F32: 2, F64: 2}, Ops.EXP2: {F16: 0.6, BF16: 0.6, F32: 2, F64: 2},
    Ops.LOG: {F16: 0.6, BF16: 0.6, F32: 1, F64: 1}, Ops.LOG2: {F16: 0.6, BF16: 0.6, F32: 2, F64: 2},
    Ops.SIN: {F16: 0.6, BF16: 0.6, F32: 2, F64: 2}, Ops.COS: {F16: 0.6, BF16: 0.6, F32: 2, F64: 2},
    Ops.TANH: {F16: 0.6, BF16: 0.6, F32: 5.5, F64: 2}, Ops.ERF: {F16: 0.6, BF16: 0.6, F32: 0.9, F64: 1},
    Ops.POW: {F16: 0.6, BF16: 0.6, F32: 1, F64: 2},
}
SIN_DOMAIN: dict[DType, float] = {F16: 65504.0, BF16: 2.0**40, F32: 2.0**40, F64: 2.0**30}

def _single(*values: float) -> tuple[float, ...]:
    """Return the float32 numbers nearest to these decimals."""
    return tuple(float(np.float32(v)) for v in values)


# the polynomials by name, each with its maximum error and the bits of its coefficients, from the constant up
_TABLES = json.loads(package_text("svod.compile.lower", "polynomials.json"))
_FITTED: dict[str, tuple[float, ...]] = {
    name: _single(*t["coefficients"]) if t["bits"] == 24 else tuple(t["coefficients"]) for name, t in _TABLES.items()}

# (type, unit of the exponent of two) → polynomial of e^r, or of 2^r, for |r| up to half a unit
_EXP = {(F32, 1): _FITTED["EXP_NEAR_32"], (F32, 2): _FITTED["EXP_32"], (F64, 1): _FITTED["EXP_NEAR_64"], (F64, 2): _FITTED["EXP_64"]}
_EXP2 = {(F32, 1): _FITTED["EXP2_NEAR_32"], (F32, 2): _FITTED["EXP2_32"], (F64, 1): _FITTED["EXP2_NEAR_64"], (F64, 2): _FITTED["EXP2_64"]}

# a number from which erf is 1 in the type, and the polynomials of erf of small and of other numbers
_ERF = {F32: (3.9375, _FITTED["ERF_32"], _FITTED["ROOT_ERFC_32"]), F64: (6.0, _FITTED["ERF_64"], _FITTED["ROOT_ERFC_64"])}

# constants as sums of parts, each of the type's precision; the parts of π/2 are all positive, which keeps the sign of sin(-0.0)
_PI_2 = (1.5707963267948966, 6.123233995736765e-17, 1.082856673921914e-32)
_THIRD = (0.3333333333333333, 1.850371707708594e-17)
_LN2 = {F32: _single(0.6931472, -1.9046542e-09), F64: (0.6931471805599453, 2.3190468138462996e-17)}
_INV_LN2 = {F32: _single(1.442695, 1.925963e-08), F64: (1.4426950408889634, 2.0355273740931033e-17)}


def _short_parts(parts: Sequence[float], dtype: DType, bits: int, count: int) -> tuple[float, ...]:
    """Split a positive constant, given as a sum, into `count` numbers of `bits` bits and a last one of full precision. The product of one
    of the short numbers and a small integer is exact."""
    rest, out = sum(map(Fraction, parts)), []
    for _ in range(count):
        exponent = math.frexp(float(rest))[1]
        part = Fraction(math.floor(rest * Fraction(2)**(bits - exponent))) * Fraction(2)**(exponent - bits)
        out.append(float(part))
        rest -= part
    return (*out, float(np.float32(float(rest)) if dtype == F32 else float(rest)))


# short parts whose products are exact: of ln 2 with integers below 2^9 (2^11 for float64), of π/2 with integers below 2^13 (2^23)
_LN2_SHORT = {F32: _short_parts(_LN2[F64], F32, 14, 1), F64: _short_parts(_LN2[F64], F64, 41, 1)}
# least exponent of an attention's weight that is not 0: 2^26 times the smallest normal number, so that products with it are normal, too
_LEAST_EXPONENT = {F32: _single(-100 * _LN2[F64][0])[0], F64: -996 * _LN2[F64][0]}
_TWO_PI = {F32: _single(2 / math.pi)[0], F64: 2 / math.pi}
_PI_2_SHORT = {F32: _short_parts(_PI_2, F32, 11, 3), F64: _short_parts(_PI_2, F64, 30, 2)}


class _Vector:
    """Instructions on vectors of one float type. `word` is the unsigned integer type of the same width, `number` the signed one."""

    def __init__(self, b: MathBuilder, dtype: DType, lanes: int, rules: FloatRules):
        self.b, self.dtype, self.lanes, self.rules = b, dtype, lanes, rules
        self.double = dtype == F64
        self.number = dtypes.int64 if self.double else dtypes.int32
        self.word = dtypes.uint64 if self.double else dtypes.uint32
        self.mantissa = 52 if self.double else 23
        self.bias = 1023 if self.double else 127
        self.sign = 1 << (dtype.bits - 1)

    def c(self, value: float) -> int: return self.b.const(self.dtype, self.lanes, value)
    def w(self, value: int) -> int: return self.b.const(self.word, self.lanes, value)
    def add(self, x: int, y: int) -> int: return self.b.alu("ADD", self.dtype, self.lanes, x, y)
    def sub(self, x: int, y: int) -> int: return self.b.alu("SUB", self.dtype, self.lanes, x, y)
    def mul(self, x: int, y: int) -> int: return self.b.alu("MUL", self.dtype, self.lanes, x, y)
    def div(self, x: int, y: int) -> int: return self.b.alu("FDIV", self.dtype, self.lanes, x, y)
    def fma(self, x: int, y: int, z: int) -> int: return self.b.alu("MULACC", self.dtype, self.lanes, x, y, z)
    def square(self, x: int) -> int:
        """Return x² for a polynomial that begins with a constant. Where subnormal numbers are slow, 2^-100 (float64: 2^-900) is added,
        which does not change the polynomial, so that squares of tiny numbers are normal."""
        return self.fma(x, x, self.c(2.0**-900 if self.double else 2.0**-100)) if self.rules.has_slow_subnormals else self.mul(x, x)

    def scaleb(self, x: int, n: int) -> int: return self.b.alu("SCALEB", self.dtype, self.lanes, x, n)
    def floor(self, x: int) -> int: return self.b.alu("FLOOR", self.dtype, self.lanes, x)
    def nearest(self, x: int) -> int: return self.b.alu("ROUND", self.dtype, self.lanes, x)
    def where(self, mask: int, x: int, y: int) -> int:
        dtype, _ = self.b.type_of(x)
        return self.b.alu("WHERE", dtype, self.lanes, mask, x, y)

    def lt(self, x: int, y: int) -> int: return self.b.alu("CMPLT", dtypes.bool, self.lanes, x, y)
    def eq(self, x: int, y: int) -> int: return self.b.alu("CMPEQ", dtypes.bool, self.lanes, x, y)
    def ne(self, x: int, y: int) -> int: return self.b.alu("CMPNE", dtypes.bool, self.lanes, x, y)
    def both(self, x: int, y: int) -> int: return self.b.alu("AND", dtypes.bool, self.lanes, x, y)
    def integer(self, op: str, x: int, y: int) -> int: return self.b.alu(op, self.word, self.lanes, x, y)
    def bits(self, x: int) -> int: return self.b.bitcast(self.word, x)
    def value(self, bits: int) -> int: return self.b.bitcast(self.dtype, bits)

    def polynomial(self, x: int, coefficients: Sequence[float]) -> int:
        """Evaluate a polynomial at x by Horner's rule; coefficients from the constant up."""
        total = self.c(coefficients[-1])
        for k in reversed(coefficients[:-1]):
            total = self.fma(total, x, self.c(k))
        return total

    def at_most(self, x: int, high: float) -> int:
        """Limit x to at most `high`; NaN stays NaN."""
        hi = self.c(high)
        return self.where(self.lt(hi, x), hi, x)

    def clamp(self, x: int, low: float, high: float) -> int:
        """Limit x to [low, high]; NaN stays NaN."""
        lo = self.c(low)
        x = self.at_most(x, high)
        return self.where(self.lt(x, lo), lo, x)

    def absolute(self, x: int) -> int:
        return self.value(self.integer("AND", self.bits(x), self.w(self.sign - 1)))

    def with_sign_of(self, x: int, magnitude: int) -> int:
        """Return `magnitude` (not negative) with the sign of x."""
        return self.value(self.integer("OR", self.bits(magnitude), self.integer("AND", self.bits(x), self.w(self.sign))))


# -- exponentials -----------------------------------------------------------------------------------
def _powers(v: _Vector, x: int, scale: float) -> tuple[int, int, Callable[[int], int]]:
    """Return (a, unit, a function p → p · 2^(unit·a)), where a is x·scale/unit rounded to an integer.

    Adding 1.5·2^mantissa leaves the integer in the low bits of the sum. With SCALEB the unit is 1. Without it the unit is 2: the low bits
    plus the bias are the exponent of 2^a, for |a| below the bias, and two multiplications by 2^a reach denormals and infinity. If sums may
    not be computed as written (no strict rules), a is rounded and converted to an integer instead."""
    if not v.rules.is_strict:
        n = v.b.cast(v.number, v.nearest(v.mul(x, v.c(0.5 * scale))))
        power = v.value(v.integer("SHL", v.integer("ADD", v.b.bitcast(v.word, n), v.w(v.bias)), v.w(v.mantissa)))
        return v.b.cast(v.dtype, n), 2, lambda p: v.mul(v.mul(p, power), power)
    if v.rules.scales:
        magic = v.c(1.5 * 2.0**v.mantissa)
        a = v.sub(v.fma(x, v.c(scale), magic), magic)
        return a, 1, lambda p: v.scaleb(p, a)
    magic = v.c(1.5 * 2.0**v.mantissa + v.bias)
    t = v.fma(x, v.c(0.5 * scale), magic)
    power = v.value(v.integer("SHL", v.bits(t), v.w(v.mantissa)))
    return v.sub(t, magic), 2, lambda p: v.mul(v.mul(p, power), power)


def _limited(v: _Vector, x: int, least: float, most: float, power: Callable[[int], int]) -> int:
    """Compute a power of any x, which is 0 below `least` and infinite above `most`. Where subnormal numbers are slow, one comparison more
    keeps those out that would round to 0."""
    return _or_zero(v, v.at_most(x, most), least, power) if v.rules.has_slow_subnormals else power(v.clamp(x, least, most))


def _or_zero(v: _Vector, x: int, least: float, power: Callable[[int], int]) -> int:
    """Compute a power of x, or 0 for x below `least`, where no power is computed and so no subnormal number made."""
    tiny = v.lt(x, v.c(least))
    return v.where(tiny, v.c(0.0), power(v.where(tiny, v.c(0.0), x)))


def _exp(v: _Vector, x: int) -> int:
    return _limited(v, x, *((-746.0, 710.0) if v.double else (-104.0, 89.0)), partial(_exp_within, v))


def _exp_within(v: _Vector, x: int) -> int:
    """Compute e^x = 2^n · e^r with r = x - n·ln 2, for NaN and -104 ≤ x ≤ 89 (float64: -746 ≤ x ≤ 710). |r| ≤ ln 2 / 2, or ln 2 if n has
    to be even."""
    per_ln2, _ = _INV_LN2[v.dtype]
    a, unit, scaled = _powers(v, x, per_ln2)
    hi, lo = (_LN2 if v.rules.is_strict else _LN2_SHORT)[v.dtype]
    r = v.fma(a, v.c(-unit * lo), v.fma(a, v.c(-unit * hi), x))
    return scaled(v.polynomial(r, (1.0, 1.0, *_EXP[v.dtype, unit])))


def _exp_of_16_bits(v: _Vector, x: int) -> int:
    """Compute e^x = 2^(x / ln 2) for results of 16 bits: as long as these are finite and not 0, |x| < 104, and the product has an error
    of at most 2^-17."""
    return _exp2(v, v.mul(x, v.c(_INV_LN2[F32][0])))


def _exp2(v: _Vector, x: int, low: int | None = None, table: Sequence[float] | None = None) -> int:
    """Compute 2^(x + low), where `low` is a correction far below 1. `table`: another polynomial for |r| ≤ 1."""
    if v.rules.has_pow2 and v.dtype == F32 and low is None and table is None:
        small = v.lt(x, v.c(-126.0))        # the instruction flushes denormal powers to 0
        return v.mul(v.b.alu("POW2", F32, v.lanes, v.where(small, v.add(x, v.c(64.0)), x)), v.where(small, v.c(2.0**-64), v.c(1.0)))

    def within(limited: int) -> int:
        a, unit, scaled = _powers(v, limited, 1.0)
        r = v.sub(limited, a) if unit == 1 else v.fma(a, v.c(-2.0), limited)
        if low is not None:
            r = v.add(r, low)
        return scaled(v.polynomial(r, (1.0, *(table or _EXP2[v.dtype, unit]))))

    return _limited(v, x, *((-1076.0, 1025.0) if v.double else (-151.0, 129.0)), within)


# -- logarithms -------------------------------------------------------------------------------------
def _split(v: _Vector, x: int, normal: bool = False) -> tuple[int, int]:
    """Return (e, m) with x = 2^e · m, sqrt(1/2) ≤ m < sqrt(2), both floats, for finite x > 0. `normal`: x is not denormal.

    Integer arithmetic on the bits computes them; the exponent becomes a float when it is put into the low bits of 2^mantissa."""
    whole = 2.0**v.mantissa
    unbias = v.c(whole + v.bias)
    if not normal:
        lift = 54 if v.double else 25
        tiny = v.lt(x, v.c(2.0**(1 - v.bias)))
        x, unbias = v.where(tiny, v.mul(x, v.c(2.0**lift)), x), v.where(tiny, v.c(whole + v.bias + lift), unbias)
    root = 0x3FE6A09E667F3BCD if v.double else 0x3F3504F3             # the bits of sqrt(1/2)
    k = v.integer("ADD", v.bits(x), v.w((v.bias << v.mantissa) - root))
    exponent = v.integer("OR", v.integer("SHR", k, v.w(v.mantissa)), v.w((v.bias + v.mantissa) << v.mantissa))
    e = v.sub(v.value(exponent), unbias)
    m = v.value(v.integer("ADD", v.integer("AND", k, v.w((1 << v.mantissa) - 1)), v.w(root)))
    return e, m


def _log_domain(v: _Vector, x: int, y: int) -> int:
    """Complete the logarithm y of finite positive x: log 0 = -inf, log inf = inf, and NaN for negative x and NaN."""
    y = v.where(v.lt(x, v.c(math.inf)), y, v.c(math.inf))
    outside = v.where(v.eq(x, v.c(0.0)), v.c(-math.inf), v.c(math.nan))
    return v.where(v.lt(v.c(0.0), x), y, outside)


def _log1p_tail(v: _Vector, f: int) -> int:
    """Compute log(1 + f) - f. float32: -f²/2 + f³ q(f). float64: 2 atanh(s) - f = s (f²/2 + R) - f²/2 with R = 2 s² q(s²), s = f/(2 +
    f)."""
    if not v.double:
        square = v.mul(f, f)
        return v.fma(v.mul(f, square), v.polynomial(f, _FITTED["LOG_32"]), v.mul(square, v.c(-0.5)))
    half = v.mul(v.mul(f, f), v.c(0.5))
    s = v.div(f, v.add(f, v.c(2.0)))
    z = v.mul(s, s)
    return v.sub(v.mul(s, v.fma(v.add(z, z), v.polynomial(z, _FITTED["ATANH_64"]), half)), half)


def _log(v: _Vector, x: int) -> int:
    e, m = _split(v, x)
    f = v.sub(m, v.c(1.0))
    hi, lo = _LN2[v.dtype]
    y = v.fma(e, v.c(hi), v.add(f, v.fma(e, v.c(lo), _log1p_tail(v, f))))
    return _log_domain(v, x, y)


def _log2(v: _Vector, x: int) -> int:
    e, m = _split(v, x)
    f = v.sub(m, v.c(1.0))
    hi, lo = _INV_LN2[v.dtype]
    tail = v.mul(_log1p_tail(v, f), v.c(hi)) if v.double else v.mul(v.mul(f, f), v.polynomial(f, _FITTED["LOG2_32"]))
    y = v.add(e, v.fma(f, v.c(hi), v.fma(f, v.c(lo), tail)))
    return _log_domain(v, x, y)


# -- sine and cosine --------------------------------------------------------------------------------
def _sine(v: _Vector, x: int, quarter: int) -> int:
    """Compute sin(x + quarter·π/2): x = n·π/2 + r, |r| ≤ π/4; the last two bits of n + quarter select the sine or cosine of r and its sign.

    The reduction is done in float64, in which n·π/2 is exact as a fused product of n with two or three parts of π/2, or with short parts.
    With short parts n is an int32, so infinities are handled separately."""
    wide = v if v.double or not v.rules.has_float64 else _Vector(v.b, F64, v.lanes, v.rules)
    angle = v.b.cast(wide.dtype, x)
    parts: Sequence[float]
    if v.rules.is_strict:
        magic = wide.c(1.5 * 2.0**52)
        t = wide.fma(angle, wide.c(2 / math.pi), magic)
        n, turns, parts = wide.sub(t, magic), wide.bits(t), _PI_2 if v.double else _PI_2[:2]
    else:
        whole = v.b.cast(dtypes.int32, wide.nearest(wide.mul(angle, wide.c(_TWO_PI[wide.dtype]))))
        n, turns, parts = v.b.cast(wide.dtype, whole), v.b.bitcast(dtypes.uint32, whole), _PI_2_SHORT[wide.dtype]
    r = angle
    for part in parts:
        r = wide.fma(n, wide.c(-part), r)
    r = v.clamp(v.b.cast(v.dtype, r), -0.8125, 0.8125)
    if quarter:
        word, _ = v.b.type_of(turns)
        turns = v.b.alu("ADD", word, v.lanes, turns, v.b.const(word, v.lanes, quarter))
    turns = v.b.cast(v.word, turns)
    z = v.square(r)
    sine = v.mul(r, v.polynomial(z, (1.0, *(_FITTED["SIN_64"] if v.double else _FITTED["SIN_32"]))))
    cosine = v.polynomial(z, (1.0, -0.5, *(_FITTED["COS_64"] if v.double else _FITTED["COS_32"])))
    odd = v.ne(v.integer("AND", turns, v.w(1)), v.w(0))
    sign = v.integer("SHL", v.integer("AND", turns, v.w(2)), v.w(v.dtype.bits - 2))
    result = v.value(v.integer("XOR", v.bits(v.where(odd, cosine, sine)), sign))
    return result if v.rules.is_strict else v.where(v.lt(v.absolute(x), v.c(math.inf)), result, v.c(math.nan))


# -- sigmoid shapes ---------------------------------------------------------------------------------
def _tanh(v: _Vector, x: int) -> int:
    """Compute tanh x: a rational function of x for float32, else x + x³ P(x²) below 0.625 and 1 - 2 / (e^2x + 1) above."""
    if not v.double:
        limit = 9.03125         # tanh of it is 1 in float32
        x = v.clamp(x, -limit, limit)
        z = v.square(x)
        return v.clamp(v.div(v.mul(x, v.polynomial(z, _FITTED["TANH_32_P"])), v.polynomial(z, _FITTED["TANH_32_Q"])), -1.0, 1.0)
    a = v.absolute(x)
    z = v.square(a)
    near = v.fma(v.mul(a, z), v.polynomial(z, _FITTED["TANH_64"]), a)
    far = v.sub(v.c(1.0), v.div(v.c(2.0), v.add(_exp(v, v.add(a, a)), v.c(1.0))))
    return v.with_sign_of(x, v.where(v.lt(a, v.c(0.625)), near, far))


def _erf(v: _Vector, x: int) -> int:
    """Compute erf x, with a = |x|, as a + a P(a²) for small a, else as 1 - Q(a - 1)². Q is the square root of 1 - erf: a polynomial of
    lower degree approximates it. Both sums end with a rounding of a number to which the rest adds a small correction."""
    limit, near_table, far_table = _ERF[v.dtype]
    a = v.absolute(x)
    near = v.fma(a, v.polynomial(v.square(a), near_table), a)
    root = v.polynomial(v.sub(v.where(v.lt(v.c(limit), a), v.c(limit), a), v.c(1.0)), far_table)
    far = v.fma(v.b.alu("NEG", v.dtype, v.lanes, root), root, v.c(1.0))
    return v.with_sign_of(x, v.where(v.lt(a, v.c(0.859375)), near, far))


# -- powers -----------------------------------------------------------------------------------------
def _pow(v: _Vector, x: int, y: int) -> int:
    """Compute 2^(y · log2 |x|) with the sign of odd powers, and the special cases of IEEE 754's pow."""
    a = v.absolute(x)
    result = _magnitude_64(v, a, y) if v.double else _magnitude_32(v, a, y)
    one, infinity = v.c(1.0), v.c(math.inf)
    result = v.where(v.eq(a, one), one, result)
    half = v.mul(y, v.c(0.5))
    whole = v.eq(v.floor(y), y)
    odd = v.both(whole, v.ne(v.floor(half), half))
    flip = v.where(odd, v.integer("AND", v.bits(x), v.w(v.sign)), v.w(0))
    result = v.value(v.integer("XOR", v.bits(result), flip))
    negative = v.both(v.lt(x, v.c(0.0)), v.lt(a, infinity))
    result = v.where(v.b.alu("AND", dtypes.bool, v.lanes, negative, v.b.alu("NOT", dtypes.bool, v.lanes, whole)), v.c(math.nan), result)
    always = v.b.alu("OR", dtypes.bool, v.lanes, v.eq(y, v.c(0.0)), v.eq(x, one))
    return v.where(always, one, result)


def _log2_domain(v: _Vector, a: int, y: int) -> int:
    """Complete the logarithm y of finite positive a for 0, infinity and NaN."""
    y = v.where(v.lt(a, v.c(math.inf)), y, a)
    return v.where(v.eq(a, v.c(0.0)), v.c(-math.inf), y)


def _magnitude_32(v: _Vector, a: int, y: int) -> int:
    """Compute a^y in float64 with a logarithm accurate to about 2^-37, so that only the rounding to float32 matters."""
    if not v.rules.has_float64:
        return _exp2(v, v.mul(y, _log2_domain(v, a, _log2(v, a))))
    wide = _Vector(v.b, F64, v.lanes, v.rules)
    base = v.b.cast(F64, a)
    e, m = _split(wide, base, normal=True)
    f = wide.sub(m, wide.c(1.0))
    logarithm = _log2_domain(wide, base, wide.fma(f, wide.polynomial(f, _FITTED["POW_LOG2_32"]), e))
    return v.b.cast(v.dtype, _exp2(wide, wide.mul(v.b.cast(F64, y), logarithm), None, _FITTED["POW_EXP2_32"]))


def _magnitude_64(v: _Vector, a: int, y: int) -> int:
    """Compute a^y with log2 a as an unevaluated sum of two float64: log2 a = e + 2/ln 2 · atanh(s), s = (m - 1)/(m + 1)."""
    e, m = _split(v, a)

    def product(x: int, w: int) -> tuple[int, int]:
        """Return the exact product x·w as a sum of two numbers."""
        high = v.mul(x, w)
        return high, v.fma(x, w, v.sub(v.c(0.0), high))

    def total(x: int, w: int) -> tuple[int, int]:
        """Return the exact sum x + w as a sum of two numbers, if |x| ≥ |w| or x = 0."""
        high = v.add(x, w)
        return high, v.sub(w, v.sub(high, x))

    f, d = v.sub(m, v.c(1.0)), v.add(m, v.c(1.0))
    d_low = v.sub(m, v.sub(d, v.c(1.0)))
    inverse = v.div(v.c(1.0), d)
    s = v.mul(f, inverse)
    minus_s = v.sub(v.c(0.0), s)
    s_low = v.mul(v.fma(minus_s, d_low, v.fma(minus_s, d, f)), inverse)
    z, z_low = product(s, s)
    z_low = v.fma(v.add(s, s), s_low, z_low)
    # atanh(s) = s + s z (1/3 + z q(z)): the bracket, its product with z, and the product of that with s, each as a sum of two numbers
    third, third_low = _THIRD
    k, k_low = total(v.c(third), v.mul(z, v.polynomial(z, _FITTED["POW_ATANH_64"])))
    k_low = v.add(k_low, v.c(third_low))
    p, p_low = product(z, k)
    p_low = v.fma(z, k_low, v.fma(z_low, k, p_low))
    u, u_low = product(s, p)
    u_low = v.fma(s, p_low, v.fma(s_low, p, u_low))
    h, h_low = total(s, u)
    h_low = v.add(h_low, v.add(s_low, u_low))
    hi, lo = (2 * part for part in _INV_LN2[F64])
    g, g_low = product(h, v.c(hi))
    g_low = v.fma(h, v.c(lo), v.fma(h_low, v.c(hi), g_low))
    log, log_low = total(e, g)
    log_low = v.add(log_low, g_low)
    log = _log2_domain(v, a, log)
    t, t_low = product(y, log)
    t_low = v.fma(y, log_low, t_low)
    # the low part is meaningless if y log2 a overflows the exponent or is infinite
    t_low = v.where(v.lt(v.absolute(t), v.c(2000.0)), t_low, v.c(0.0))
    return _exp2(v, t, t_low)


_EXPANSIONS: dict[Ops, Callable[..., int]] = {
    Ops.EXP: _exp, Ops.EXP2: _exp2, Ops.LOG: _log, Ops.LOG2: _log2, Ops.SIN: partial(_sine, quarter=0), Ops.COS: partial(_sine, quarter=1),
    Ops.TANH: _tanh, Ops.ERF: _erf, Ops.POW: _pow,
}


def expand(b: MathBuilder, op: Ops, dtype: DType, lanes: int, *args: int, rules: FloatRules) -> int:
    """Expand a transcendental `op` on operands of (dtype, lanes) into instructions of `b`; returns the value. `rules`: the float rules of
    the target; the error bounds hold for strict ones.

    Raises UnsupportedError for an operation without an expansion and for types that are not floats."""
    expansion = _EXPANSIONS.get(op)
    if expansion is None or not dtype.is_float:
        raise UnsupportedError(f"{op.value} of {dtype.name} has no vector expansion; there are expansions of "
                               f"{', '.join(o.value for o in _EXPANSIONS)} for floats")
    if dtype.bits == 16:
        if op is Ops.EXP and rules.has_pow2:
            expansion = _exp_of_16_bits
        return b.cast(dtype, expansion(_Vector(b, F32, lanes, rules), *(b.cast(F32, x) for x in args)))
    return expansion(_Vector(b, dtype, lanes, rules), *args)


def expand_attention_weight(b: MathBuilder, dtype: DType, lanes: int, x: int, rules: FloatRules) -> int:
    """Expand e^x in float32 (float64) for x ≤ 0 or NaN where subnormal numbers are slow, with 0 in place of results below 2^-100 (2^-996).
    A subnormal number then comes neither from the expansion nor from products of the result with numbers above 2^-26."""
    v = _Vector(b, dtype, lanes, rules)
    return _or_zero(v, x, _LEAST_EXPONENT[dtype], partial(_exp_within, v))
