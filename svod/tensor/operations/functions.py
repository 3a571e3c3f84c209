"""More elementwise functions, composed of those in `elementwise.py`: remainders, mixtures, comparisons within a tolerance, angles,
hyperbolic functions. Names and signatures are PyTorch's.
"""
from __future__ import annotations

import math
from typing import Self

from svod.core.ir.dtype import DType, dtypes
from svod.core.ir.variable import Dim
from svod.errors import DTypeError
from svod.tensor.base import Scalar, common_dtype, is_scalar, operand_uops, scalar_dtype, without_numpy
from svod.tensor.operations.elementwise import Elementwise, Operand, truncated_remainder, without_tiny
from svod.tensor.precision import rounds_once


class Functions(Elementwise):
    """Functions of one, two and three tensors."""

    __slots__ = ()

    def _partner(self, x: Operand) -> Self:
        """Convert an operand to a tensor. A number gets the dtype of an operation between it and this tensor."""
        value = without_numpy(x)
        if isinstance(value, Dim):
            return self._value(value)
        return type(self)(value, dtype=scalar_dtype(self.dtype, value)) if is_scalar(value) else self._as_tensor(value)

    def _meeting(self, name: str, y: Self) -> DType:
        """The common float dtype of this tensor and y: the default float if neither is a float."""
        dtype = common_dtype(name, self, y)
        return dtype if dtype.is_float else dtypes.default_float

    # -- quotients -------------------------------------------------------------------------------
    def true_divide(self, other: Operand) -> Self: return self.div(other)

    def fmod(self, other: Operand) -> Self:
        """The remainder of division rounded toward zero, with the sign of self, like C's %. The remainder of an integer by zero is 0."""
        dtype = common_dtype("fmod", self, self._operand(other))
        a, b = self.cast(dtype), self._partner(other).cast(dtype)
        if dtype.is_float:
            return self.from_uop(truncated_remainder(*operand_uops("fmod", dtype, a, b))).cast(dtype)
        rest = a.remainder(b)
        if not dtype.is_signed:
            return rest
        return rest.sub(b).where(rest.ne(0).logical_and(a.lt(0).ne(b.lt(0))), rest)

    def frac(self) -> Self:
        """The fractional part x - trunc(x)."""
        return self.sub(self.trunc())

    # -- mixtures --------------------------------------------------------------------------------
    @rounds_once
    def lerp(self, end: Operand, weight: Operand) -> Self:
        """The interpolation self + weight · (end - self), computed from the nearer end, as in PyTorch, so that weight 1 gives exactly
        `end`."""
        a = self._float()
        b, w = a._partner(end), a._partner(weight)
        distance = b.sub(a)
        return a.add(w.mul(distance)).where(w.abs().lt(0.5), b.sub(distance.mul(w.neg().add(1))))

    @rounds_once
    def addcmul(self, tensor1: Operand, tensor2: Operand, *, value: Scalar = 1) -> Self:
        """The sum self + value · tensor1 · tensor2."""
        return self.add(self._partner(tensor1).mul(tensor2), alpha=value)

    @rounds_once
    def addcdiv(self, tensor1: Operand, tensor2: Operand, *, value: Scalar = 1) -> Self:
        """The sum self + value · tensor1 / tensor2."""
        return self.add(self._partner(tensor1).div(tensor2), alpha=value)

    @rounds_once
    def logaddexp(self, other: Operand) -> Self:
        """The logarithm of a sum, log(exp(x) + exp(y)), without overflow."""
        y = self._partner(other)
        dtype = self._meeting("logaddexp", y)
        a, b = self._float(), y._float()
        top, distance = a.maximum(b), a.sub(b).abs().neg()
        # equal infinities have no difference (inf - inf is NaN)
        return top.where(a.eq(b).logical_and(top.isinf()), top.add(distance.exp().log1p())).cast(dtype)

    @rounds_once
    def hypot(self, other: Operand) -> Self:
        """The hypotenuse sqrt(x² + y²), scaled by the larger operand to avoid overflow."""
        y = self._partner(other)
        dtype = self._meeting("hypot", y)
        a, b = self._float().abs(), y._float().abs()
        top = a.maximum(b)
        ratio = a.minimum(b).div(top.where(top.ne(0), 1.0))
        result = top.mul(ratio.square().add(1).sqrt())
        return result.where(top.isfinite(), top.where(a.eq(math.inf).logical_or(b.eq(math.inf)).logical_not(), math.inf)).cast(dtype)

    def copysign(self, other: Operand) -> Self:
        """The value |x| with the sign of y; -0.0 counts as negative."""
        y = self._partner(other)
        dtype = self._meeting("copysign", y)
        size = self._float().cast(dtype).abs()
        return size.neg().where(y.signbit(), size)

    def signbit(self) -> Self:
        """True if x is negative; -0.0 counts as negative."""
        if not self.dtype.is_float:
            return self.lt(0) if self.dtype.is_signed else self._full_like(False, dtypes.bool)
        return self.bitcast(f"int{self.dtype.bits}").lt(0)

    @rounds_once
    def xlogy(self, other: Operand) -> Self:
        """The product x · log(y); 0 if x is 0, unless y is NaN."""
        y = self._partner(other)
        dtype = self._meeting("xlogy", y)
        a, b = self._float(), y._float()
        return a.mul(b.log()).where(a.ne(0).logical_or(b.isnan()), 0.0).cast(dtype)

    @rounds_once
    def logit(self, eps: float | None = None) -> Self:
        """The inverse of `sigmoid`, log(x / (1 - x)). With `eps`, x is clamped to eps … 1 - eps first."""
        x = self._float() if eps is None else self._float().clamp(eps, 1 - eps)
        return x.div(x.neg().add(1)).log()

    @rounds_once
    def sinc(self) -> Self:
        """The function sin(πx) / πx; 1 at 0. The sine's argument is the distance from the nearest whole number, which is exact."""
        x = self._float()
        whole = x.round()
        sine = x.sub(whole).mul(math.pi).sin()
        is_odd = whole.mul(0.5).floor().mul(2).ne(whole)
        return sine.neg().where(is_odd, sine).div(x.mul(math.pi)).where(x.ne(0), 1.0)

    # -- comparisons -----------------------------------------------------------------------------
    @rounds_once
    def isclose(self, other: Operand, rtol: float = 1e-05, atol: float = 1e-08, equal_nan: bool = False) -> Self:
        """True if |x - y| <= atol + rtol · |y| or x equals y, and with `equal_nan` also if both are NaN."""
        y = self._partner(other)
        dtype = common_dtype("isclose", self, y)
        a, b = self.cast(dtype), y.cast(dtype)
        same = a.eq(b)
        if equal_nan and dtype.is_float:
            same = same.logical_or(a.isnan().logical_and(b.isnan()))
        a, b = a._float(), b._float()
        near = a.sub(b).abs().le(b.abs().mul(rtol).add(atol))
        return same.logical_or(near.logical_and(a.isfinite()).logical_and(b.isfinite()))

    def isposinf(self) -> Self:
        """True if x is +inf."""
        return self.eq(math.inf) if self.dtype.is_float else self._full_like(False, dtypes.bool)

    def isneginf(self) -> Self:
        """True if x is -inf."""
        return self.eq(-math.inf) if self.dtype.is_float else self._full_like(False, dtypes.bool)

    def nan_to_num(self, nan: float = 0.0, posinf: float | None = None, neginf: float | None = None) -> Self:
        """Replace NaN and infinities. `posinf` and `neginf` default to the dtype's largest and smallest finite numbers."""
        if not self.dtype.is_float:
            return self
        largest = _LARGEST[self.dtype.name]
        x = self.where(self.isnan().logical_not(), nan)
        x = x.where(self.isposinf().logical_not(), largest if posinf is None else posinf)
        return x.where(self.isneginf().logical_not(), -largest if neginf is None else neginf)

    def clamp_min(self, min: Operand) -> Self: return self.clamp(min=min)
    def clamp_max(self, max: Operand) -> Self: return self.clamp(max=max)

    def heaviside(self, values: Operand) -> Self:
        """The step function: 0 below zero, 1 above, `values` at zero, and NaN at NaN, as in NumPy."""
        if self.dtype.kind == "b":
            raise DTypeError("heaviside of bools: cast them to numbers")
        step = self._partner(values).where(self.eq(0), self.gt(0).cast(self.dtype))
        return self.where(self.isnan(), step) if self.dtype.is_float else step

    # -- angles ----------------------------------------------------------------------------------
    @rounds_once
    def atan(self) -> Self:
        """The arctangent, in ±π/2."""
        x = self._float()
        a = x.abs()
        above = a.gt(1)
        angle = a.where(above.logical_not(), a.reciprocal())._small_angle()
        return angle.where(above.logical_not(), angle.neg().add(math.pi / 2)).copysign(x)

    def _small_angle(self) -> Self:
        """The arctangent of 0 … 1 by its series. The identity atan(t) = 2·atan(t / (1 + sqrt(1 + t²))), applied twice, first reduces t
        below tan(π/16)."""
        t = self
        for _ in range(2):
            t = t.div(t.square().add(1).sqrt().add(1))
        near = without_tiny(t)
        square = near.square()
        terms = 6 if t.dtype == dtypes.float32 else 12
        series = square.mul(0)
        for k in range(terms, 0, -1):
            series = series.add((-1) ** k / (2 * k + 1)).mul(square)
        return t.add(near.mul(series)).mul(4)

    @rounds_once
    def atan2(self, other: Operand) -> Self:
        """The angle of the point (other, self), in ±π. The signs of zeros matter, as in C."""
        o = self._partner(other)
        dtype = self._meeting("atan2", o)
        wide = dtypes.float64 if dtype == dtypes.float64 else dtypes.float32
        y, x = self.cast(wide), o.cast(wide)
        b, a = y.abs(), x.abs()
        low, high = a.minimum(b), a.maximum(b)
        # the ratio is 1 for equal infinities and 0 for equal zeros
        ratio = low.div(high.where(high.ne(0), 1.0)).where(low.ne(high).logical_or(high.isfinite()), 1.0)
        angle = ratio._small_angle()
        angle = angle.where(b.le(a), angle.neg().add(math.pi / 2))
        angle = angle.neg().add(math.pi).where(x.signbit(), angle)
        angle = angle.where(y.isnan().logical_or(x.isnan()).logical_not(), math.nan)
        return angle.copysign(y).cast(dtype)

    @rounds_once
    def asin(self) -> Self:
        """The arcsine, in ±π/2; NaN beyond ±1."""
        x = self._float()
        return x.atan2(x.neg().add(1).mul(x.add(1)).sqrt())

    @rounds_once
    def acos(self) -> Self:
        """The arccosine, in 0 … π; NaN beyond ±1."""
        x = self._float()
        return x.neg().add(1).sqrt().atan2(x.add(1).sqrt()).mul(2)

    # -- hyperbolic functions ----------------------------------------------------------------------
    @rounds_once
    def sinh(self) -> Self:
        """The hyperbolic sine (exp(x) - exp(-x)) / 2, without cancellation near zero."""
        x = self._float()
        half = x.abs().expm1()
        # e/2 + e/(2(e + 1)) with e = exp|x| - 1; (exp(|x|/2) / 2) · exp(|x|/2) if exp|x| overflows
        small = half.add(half.div(half.add(1))).mul(0.5)
        large = x.abs().mul(0.5).exp()
        size = small.where(half.lt(math.inf), large.mul(0.5).mul(large))
        return x.where(x.eq(0), size.copysign(x))

    @rounds_once
    def cosh(self) -> Self:
        """The hyperbolic cosine (exp(x) + exp(-x)) / 2."""
        half = self._float().abs().mul(0.5).exp()
        return half.mul(0.5).mul(half).add(half.reciprocal().mul(0.5).mul(half.reciprocal()))

    @rounds_once
    def asinh(self) -> Self:
        """The inverse hyperbolic sine log(x + sqrt(x² + 1)), computed by log1p."""
        x = self._float()
        a = x.abs()
        square = a.square()
        small = a.add(square.div(square.add(1).sqrt().add(1))).log1p()
        large = a.log().add(math.log(2))
        size = small.where(a.lt(1e18 if x.dtype == dtypes.float32 else 1e150), large)
        return x.where(x.eq(0), size.copysign(x))

    @rounds_once
    def acosh(self) -> Self:
        """The inverse hyperbolic cosine log(x + sqrt(x² - 1)), computed by log1p; NaN below 1."""
        x = self._float()
        t = x.sub(1)
        small = t.add(t.mul(t.add(2)).sqrt()).log1p()
        result = small.where(x.lt(1e18 if x.dtype == dtypes.float32 else 1e150), x.log().add(math.log(2)))
        return result.where(x.ge(1), math.nan)

    @rounds_once
    def atanh(self) -> Self:
        """The inverse hyperbolic tangent log((1 + x) / (1 - x)) / 2, computed by log1p; NaN beyond ±1."""
        x = self._float()
        a = x.abs()
        result = a.mul(2).div(a.neg().add(1)).log1p().mul(0.5)
        return x.where(x.eq(0), result.where(a.lt(1), result.where(a.le(1), math.nan)).copysign(x))

    @rounds_once
    def erfc(self) -> Self:
        """The complementary error function 1 - erf(x), within six units in the last place: exp(-x²) · P(q) / (1 + 2x) with q = (x - k) /
        (x + k) for x ≥ 0 (Shepherd and Laframboise, "Chebyshev approximation of (1 + 2x) exp(x²) erfc(x) in 0 ≤ x < ∞", 1981), 2 -
        erfc(-x) for x < 0."""
        x = self._float()
        k, limit, coefficients, low_bits = _ERFCX[x.dtype.name]
        a = x.abs().minimum(limit)
        # low bits are cleared, so that the square of `head` is exact
        head = a.bitcast(f"int{x.dtype.bits}").bitwise_and(-1 << low_bits).bitcast(x.dtype)
        bell = head.square().neg().exp().mul(head.sub(a).mul(head.add(a)).exp())
        q = a.sub(k).div(a.add(k))
        total = q.mul(coefficients[-1])
        for c in coefficients[-2:0:-1]:
            total = total.add(c).mul(q)
        result = bell.mul(total.add(coefficients[0]).div(a.mul(2).add(1)))
        return result.where(x.ge(0), result.neg().add(2))

    @rounds_once
    def deg2rad(self) -> Self:
        """Convert degrees to radians: x · π / 180."""
        return self._float().mul(math.pi / 180)

    @rounds_once
    def rad2deg(self) -> Self:
        """Convert radians to degrees: x · 180 / π."""
        return self._float().mul(180 / math.pi)


_LARGEST = {"float16": 65504.0, "bfloat16": 3.3895313892515355e38, "float32": 3.4028234663852886e38, "float64": 1.7976931348623157e308}

# for each dtype: k, an argument above which erfc is 0, the coefficients of P as ERFCX of experiments/polynomials.py fits them (errors
# 2^-25.3, 2^-54.3), and the number of low bits that are cleared so that a square is exact
_ERFCX: dict[str, tuple[float, float, tuple[float, ...], int]] = {
    "float32": (2.0, 10.3, (1.2769784, -0.09276415, -0.16603005, 0.16405778, -0.0542172, -0.008072705, 0.008669676, 0.00134584,
                            -0.0012653936, -0.0004313747), 12),
    "float64": (4.0, 27.5, (
        1.2329951186255526, -0.1396211168405634, 0.01537965210260503, 0.06809705425478464, -0.10103906603550496, 0.0937328349955651,
        -0.06633036582941709, 0.03716751557457656, -0.016197733865834493, 0.00503196972213719, -0.0007577745456134875,
        -0.0001992557405066434, 0.00015062679932864305, -2.4400939343390456e-05, -1.123529672187864e-05, 5.709952888017473e-06,
        3.1535841716730654e-07, -8.204701496775996e-07, 5.385803422794544e-08, 1.0129409606965824e-07, -7.539057254909596e-09,
        -8.171695994759744e-09), 27)}
