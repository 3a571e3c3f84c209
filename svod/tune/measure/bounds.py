"""Rounding-error bounds: how far a correct result may be from the reference, computed from a kernel AST as another kernel AST.

For each value v of the kernel the bound is E(v) = rel·|v| + abs. `rel` is a number known from the AST; `abs` is an expression over the
same inputs, or 0. With u the unit roundoff of a value's dtype (2^-24 for float32, 2^-11 for float16, 2^-8 for bfloat16):

    input, constant         E = 0
    a ± b                   rel = u, abs = E(a) + E(b)
    a · b                   rel = rel_a + rel_b + u, or the first-order product rule where an operand has an abs part
    a / b, 1/a, √a, e^a …   the derivative's bound at the worst point of [a - E, a + E], plus the function's own rounding
    max, min, |a|, -a       the operands' largest E, as these operations do not round
    Σ over n terms          rel = u, abs = g·Σ|x| + ΣE(x),  g = min(m, 6·√m + 8)·u, m additions between a term and the sum
    Σ of a · b, TF32        g + 2^-11 for each factor that may be rounded to 11 bits; integers below 2^11 are exact
    cast                    rel = rel + u of the narrower type
    a < b, floor(a), …      if the error of a may cross a step of the function, the full height of the step
    ±∞                      rel does not count, as a value that a constant (a mask) or a pole made infinite does not round

An element is *undecidable* where rounding decides whether it is a number, a NaN or infinite. Its bound is infinite, and a correct program
may give any value. These values are undecidable:

    √a, log a, a^b          [a - 2·E, a + 2·E] reaches both sides of 0, the border of the domain
    a^b                     a is not positive, and [b - 2·E, b + 2·E] holds an integer
    a / b, 1/b, a mod b     [b - 2·E, b + 2·E] reaches both sides of 0, the pole
    0 · ∞, 0 / 0            the 0 has an error
    WHERE                   the error of the condition may flip it, and one of the branches is NaN, undecidable, or infinitely far away
    argmax                  the error of another value may make it the extremum
    a load                  its index has an error
    anything else           an operand is undecidable

An argument whose whole interval is outside of the domain gives a NaN for certain. An argument that cannot leave the domain, such as a sum
of squares, has an interval that ends at 0 (value_ranges.py). The bound of a comparison with a float32 or float64 sum assumes that sums are
rounded to nearest: u = 1 + x is certainly 1 where x is small enough. log1p relies on that.

g covers any order of summation, vectors, partial sums and fused multiply-adds, in chains as long as lowering makes them
(`svod.core.ir.summation`): up to some length all additions in a row, for longer sums in blocks. The deterministic bound of m additions in a
row is m·u·Σ|x|. The probabilistic bound λ·√m·u·Σ|x| with λ = 6 fails with probability below 1e-7 (Higham and Mary, "A new approach to
probabilistic rounding error analysis", 2019). The accumulator's u counts, not the output's. Dot and matrix instructions of bfloat16 round
as often, in another order. They treat numbers below 2^-126 as zero; the bound leaves this out, because inputs are never drawn so small.

The reference computes with its own rounding, so a result is right when |got - want| ≤ 2·E. Where all inputs are small integers
and every intermediate is an integer that its dtype can represent, E is 0 and the comparison is exact. To decide this, the largest
magnitude of each value of the AST is computed.

The bound is a kernel AST again, evaluated by the same evaluator as the reference (`svod.core.spec.evaluate`); nothing is compiled.
"""
from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from svod.core.ir.dtype import DType, dtypes
from svod.core.ir.param import Param
from svod.core.ir.summation import SumRule, longest_path, sum_rule
from svod.core.ir.uop import COMPARISONS, Ops, UOp
from svod.tune.measure.value_ranges import ValueRange, range_of

UNIT = {dtypes.float16: 2.0**-11, dtypes.bfloat16: 2.0**-8, dtypes.float32: 2.0**-24, dtypes.float64: 2.0**-53}
SMALLEST_NORMAL = {dtypes.float16: 2.0**-24, dtypes.bfloat16: 2.0**-126, dtypes.float32: 2.0**-126, dtypes.float64: 2.0**-1022}
FUNCTION_ULPS = 8.0        # largest error of the code that replaces a function such as exp, in unit roundoffs: 4 ulp
SAFETY = 2.0               # factor of every bound, as both the program and the reference round
TINY = 1e-300              # least value of a divisor, so that none is 0
FINITE_OF_INFINITE = frozenset({Ops.EXP, Ops.EXP2, Ops.TANH, Ops.ERF})      # finite at -∞, the value of masked elements
POLES = {Ops.RECIPROCAL: 0, Ops.FDIV: 1, Ops.LOG: 0, Ops.LOG2: 0, Ops.POW: 0}       # op → index of the operand with a pole at 0
F64 = dtypes.float64


class ErrorBound(NamedTuple):
    """The bound E(v) = rel·|v| + abs of a value v. `abs`: a float64 expression; None: 0. `undecidable`: a bool expression that is true for
    elements where v may be anything; None: for no element."""

    rel: float = 0.0
    abs: UOp | None = None
    undecidable: UOp | None = None

    @property
    def is_zero(self) -> bool:
        return self.rel == 0.0 and self.abs is None and self.undecidable is None


NO_ERROR = ErrorBound()
# the largest magnitude of a value that is certainly an integer; None if the value may not be an integer
Magnitude = float | None


def _const(x: float) -> UOp:
    return UOp.const(F64, x)


def _abs(v: UOp) -> UOp:
    return v.alu(Ops.ABS) if v.dtype.is_signed else v


def _wide(v: UOp) -> UOp:
    return v.cast(F64)


def _abs64(v: UOp) -> UOp:
    return _wide(_abs(v))


def _max(a: UOp, b: UOp) -> UOp:
    return a.alu(Ops.MAX, b)


def _add(*terms: UOp | None) -> UOp | None:
    total: UOp | None = None
    for t in terms:
        if t is not None:
            total = t if total is None else total + t
    return total


def _any(*conditions: UOp | None) -> UOp | None:
    found: UOp | None = None
    for c in conditions:
        if c is not None and c is not found:
            found = c if found is None else found.alu(Ops.OR, c)
    return found


def _reaches(distance: UOp, e: UOp) -> UOp:
    """Whether the values of two correct programs may lie on different sides of a point. `distance`: from the reference's value to the
    point; `e`: the bound of the value's error. If e is NaN, because infinities cancelled in it, the answer is yes. If the distance is NaN,
    because the value is NaN, the answer is no."""
    zero = _const(0.0)
    return (zero <= distance) & (e * _const(SAFETY) < distance).alu(Ops.OR, e <= zero).alu(Ops.NOT)


COMBINED = 64       # most additions that combine partial results: of lanes, accumulators of a thread, threads of a group, and parts


def summation_factor(n: int, unit: float, rule: SumRule) -> float:
    """The factor g of the error bound g·Σ|x| of a sum of n terms: min(m, 6·√m + 8)·u, with m additions between a term and the sum."""
    m = min(n, longest_path(rule, n) + COMBINED)
    return min(float(m), 6.0 * math.sqrt(m) + 8.0) * unit


@dataclass
class _Analysis:
    """The analysis of one kernel AST, node by node from its inputs. `integers`: the inputs hold integers up to this magnitude; None: any
    reals. `significand`: bits to which factors of float32 in sums of products may be rounded; 0: they are not rounded."""

    integers: int | None
    significand: int

    def __post_init__(self) -> None:
        self.bounds: dict[UOp, ErrorBound] = {}
        self.sizes: dict[UOp, Magnitude] = {}
        self.ranges: dict[UOp, ValueRange] = {}
        self.read_as: dict[int, DType] = {}
        self.infinite: set[UOp] = set()         # nodes whose value may be infinite without an overflow

    def _at_pole(self, v: UOp) -> UOp | None:
        """E(v) for a function that is steep at 0: includes the error where a processor flushes denormal numbers to zero."""
        e = self.total(v)
        return None if e is None else e + _const(SMALLEST_NORMAL[v.dtype])

    def total(self, v: UOp) -> UOp | None:
        """E(v) as one float64 expression; None if it is 0."""
        b = self.bounds[v]
        return _add(None if b.rel == 0.0 else self._finite(v) * _const(b.rel), b.abs)

    def _finite(self, v: UOp) -> UOp:
        """The magnitude |v|, or 0 where v is infinite, because an infinity does not round."""
        size = _abs64(v)
        return (size < _const(math.inf)).alu(Ops.WHERE, size, _const(0.0)) if v in self.infinite else size

    def run(self, root: UOp) -> None:
        self.read_as.update(read_as(root))
        for u in root.toposort():
            self.ranges[u] = range_of(u, self.ranges)
            if u.dtype.is_float and self._may_be_infinite(u):
                self.infinite.add(u)
            size = self.size(u)
            if size is not None and u.dtype.is_float and size > 1.0 / UNIT[u.dtype]:
                size = None
            self.sizes[u] = size
            exact = u.dtype.is_float and size is not None and all(self.bounds[s].is_zero for s in u.src if s in self.bounds)
            exact = exact and not (u.op is Ops.REDUCE and u.arg[0] == "ADD" and self._rounded_factors(u.src[0]))
            self.bounds[u] = NO_ERROR if exact else self.bound(u)

    def _may_be_infinite(self, u: UOp) -> bool:
        if u.op is Ops.CONST:
            return math.isinf(u.arg)
        if u.op in POLES and not self._is_apart_from_zero(u.src[POLES[u.op]]):
            return True
        return u.op not in FINITE_OF_INFINITE and any(s in self.infinite for s in u.src)

    def _is_apart_from_zero(self, x: UOp) -> bool:
        return self.ranges[x].low > 0 or self.ranges[x].high < 0

    # -- magnitudes of integers -------------------------------------------------------------------------------------------
    def size(self, u: UOp) -> Magnitude:
        if u.op is Ops.CONST:
            return abs(float(u.arg)) if math.isfinite(u.arg) and float(u.arg).is_integer() else None
        if self.integers is None:
            return None
        if u.op is Ops.LOAD:
            return self._load_size(u)
        src = [self.sizes[s] for s in u.src]
        if u.op is Ops.BITCAST:
            load = u.src[0]
            return float(self.integers) if load.op is Ops.LOAD and load.src[0].src[0].arg.slot in self.read_as else None
        if u.op is Ops.REDUCE:
            return self._reduce_size(u, src)
        if u.op in (Ops.STAGE, Ops.INDEX, Ops.GEP, Ops.NEG, Ops.ABS, Ops.FLOOR, Ops.CEIL, Ops.TRUNC, Ops.ROUND):
            return src[0] if src else None
        if u.op in COMPARISONS or u.dtype.kind == "b":
            return 1.0
        if u.op is Ops.CAST:
            return src[0]
        if u.op is Ops.WHERE:
            return None if src[1] is None or src[2] is None else max(src[1], src[2])
        if any(s is None for s in src):
            return None
        known = [s for s in src if s is not None]
        rules: dict[Ops, Callable[..., float]] = {
            Ops.ADD: lambda a, b: a + b, Ops.SUB: lambda a, b: a + b, Ops.MUL: lambda a, b: a * b, Ops.MAX: max, Ops.MIN: max,
            Ops.MULACC: lambda a, b, c: a * b + c}
        rule = rules.get(u.op)
        return rule(*known) if rule is not None else None

    def _load_size(self, u: UOp) -> Magnitude:
        assert self.integers is not None
        param: Param = u.src[0].src[0].arg
        bounds = [abs(x) for x in (param.vmin, param.vmax) if x is not None]
        size = float(max(bounds)) if bounds and u.dtype.is_int else float(self.integers)
        if len(u.src) == 3:
            alternative = self.sizes[u.src[1]]
            return None if alternative is None else max(size, alternative)
        return size

    def _reduce_size(self, u: UOp, src: list[Magnitude]) -> Magnitude:
        if src[0] is None:
            return None
        combiner, count = u.arg
        if combiner == "ADD":
            return src[0] * terms(u)
        if combiner == "MUL":
            return src[0] ** terms(u) if terms(u) * math.log2(max(1.0, src[0])) < 64 else None
        known = [s for s in src[:count] if s is not None]
        return max(known) if len(known) == count else None

    # -- bounds -----------------------------------------------------------------------------------------------------------
    def bound(self, u: UOp) -> ErrorBound:
        op = u.op
        if op is Ops.REDUCE:
            flags = _any(*(self.bounds[v].undecidable for v in u.src[:u.arg[1]]))
            return self._reduce(u)._replace(undecidable=None if flags is None else _any_of(flags, u.src[u.arg[1]:]))
        if op is Ops.STAGE:
            return self.bounds[u.src[0]]
        if op is Ops.INDEX and u.src[0].op is Ops.STAGE:
            b, place = self.bounds[u.src[0]], self._unsure(u.src[1:])
            return ErrorBound(b.rel, _read(u, b.abs), _any(_read(u, b.undecidable), place.undecidable))
        if op is Ops.WHERE:
            return self._where(u)
        if op in COMPARISONS:
            return self._compare(u)
        own = self._operation(u)
        return own._replace(undecidable=_any(own.undecidable, *(self.bounds[s].undecidable for s in u.src)))

    def _operation(self, u: UOp) -> ErrorBound:
        """The bound of an operation, without the elements that are undecidable because an operand is: `bound` adds these."""
        op = u.op
        if op is Ops.GEP:
            return self.bounds[u.src[0]] if u.arg == 0 else self._component(u.src[0])
        if op is Ops.LOAD:
            return self._unsure(u.src)
        if op in (Ops.INDEX, Ops.SINK, Ops.STORE):
            return ErrorBound(0.0, self._largest(u.src[:2]))
        if op is Ops.CAST:
            return self._cast(u)
        if not u.src or (all(self.bounds[s].is_zero for s in u.src) and not u.dtype.is_float):
            return NO_ERROR
        if u.dtype.is_float:
            return self._float(u)
        return self._integer(u)

    def _largest(self, nodes: Sequence[UOp]) -> UOp | None:
        worst: UOp | None = None
        for n in nodes:
            e = self.total(n)
            if e is not None:
                worst = e if worst is None else _max(worst, e)
        return worst

    def _unsure(self, nodes: Sequence[UOp]) -> ErrorBound:
        """The bound of a value that is undecidable where one of `nodes` has an error, and exact elsewhere."""
        worst = self._largest(nodes)
        flags = _any(*(self.bounds[n].undecidable for n in nodes))
        return ErrorBound(undecidable=_any(None if worst is None else (worst <= _const(0.0)).alu(Ops.NOT), flags))

    def _reduce(self, u: UOp) -> ErrorBound:
        combiner, count = u.arg
        values, ranges = u.src[:count], u.src[count:]
        x = values[0]
        if not u.dtype.is_float:
            e = self._largest(values)
            return NO_ERROR if e is None else ErrorBound(0.0, UOp(Ops.REDUCE, F64, (e, *ranges), ("ADD", 1)))
        unit = UNIT[u.dtype]
        if combiner == "ADD":
            b = self.bounds[x]
            rule = sum_rule(u)
            assert rule is not None     # every sum of floats has a rule
            factor = summation_factor(terms(u), unit, rule) + b.rel + self._rounded_factors(x)
            magnitude = UOp(Ops.REDUCE, x.dtype, (_magnitude(x), *ranges), ("ADD", 1))
            own = None if b.abs is None else UOp(Ops.REDUCE, F64, (b.abs, *ranges), ("ADD", 1))
            return ErrorBound(unit, _add(_wide(magnitude) * _const(factor), own))
        if combiner == "MUL":
            e = self.total(x)
            grown = _abs64(x) if e is None else _abs64(x) + e
            product = UOp(Ops.REDUCE, F64, (grown * _const(1.0 + unit), *ranges), ("MUL", 1))
            return ErrorBound(unit, product - UOp(Ops.REDUCE, F64, (_abs64(x), *ranges), ("MUL", 1)))
        e = self.total(x)
        return NO_ERROR if e is None else ErrorBound(0.0, UOp(Ops.REDUCE, F64, (e, *ranges), ("MAX", 1)))

    def _component(self, reduce: UOp) -> ErrorBound:
        """The bound of a component of a REDUCE other than the first, such as the position of an extremum. It is certain where no other
        value, within its error, reaches the extremum."""
        combiner, count = reduce.arg
        (x, *others), ranges = reduce.src[:count], reduce.src[count:]
        e = self.total(x)
        if combiner not in ("ARGMAX", "ARGMIN") or not all(self.bounds[o].is_zero for o in others):
            return self._unsure([reduce])
        if e is None:
            return NO_ERROR
        value, error = _wide(x) if combiner == "ARGMAX" else _wide(x).alu(Ops.NEG), e * _const(SAFETY)
        least = _hoisted(UOp(Ops.REDUCE, F64, (value - error, *ranges), ("MAX", 1)), ranges)
        rivals = (value + error < least).alu(Ops.WHERE, _const(0.0), _const(1.0))
        return ErrorBound(undecidable=_const(1.0) < UOp(Ops.REDUCE, F64, (rivals, *ranges), ("ADD", 1)))

    def _cast(self, u: UOp) -> ErrorBound:
        x = u.src[0]
        b = self.bounds[x]
        if u.dtype.is_float:
            if x.dtype.is_float:
                narrower = UNIT[u.dtype] > UNIT[x.dtype]
                return ErrorBound(b.rel + (UNIT[u.dtype] if narrower else 0.0), b.abs)
            rounds = x.dtype.bits > -math.log2(UNIT[u.dtype])
            return ErrorBound(UNIT[u.dtype] if rounds else 0.0, self.total(x))
        e = self.total(x)
        if e is None:
            return NO_ERROR
        if u.dtype.kind == "b":
            return ErrorBound(0.0, _step(_reaches(_abs64(x), e)))
        return ErrorBound(0.0, _steps(x, e, Ops.TRUNC) if x.dtype.is_float else e)

    def _compare(self, u: UOp) -> ErrorBound:
        """The bound of a comparison. Its value, 0 or 1, is off by 1 where an operand is undecidable, or where the errors may flip it."""
        a, b = u.src
        if u.op is Ops.CMPLT and a.op is Ops.BITCAST and a.src[0].dtype.is_float and b.op is Ops.CONST and b.arg == 0:
            flags = self._sign_may_flip(a.src[0])
        else:
            flags = _any(*(self.bounds[s].undecidable for s in u.src), self._may_flip(a, b))
        return NO_ERROR if flags is None else ErrorBound(0.0, _step(flags))

    def _sign_may_flip(self, x: UOp) -> UOp | None:
        """A bool expression that is true where the sign bit of x is uncertain: near 0, and where x is a computed NaN. None: nowhere."""
        e = self.total(x)
        is_nan = None if e is None else x.alu(Ops.CMPNE, x)
        return _any(self.bounds[x].undecidable, self._meets_zero(x, e), is_nan)

    def _may_flip(self, a: UOp, b: UOp) -> UOp | None:
        e = _add(self.total(a), self.total(b))
        if e is None or a is b:     # a value compared with itself is a test for NaN, which no error flips
            return None
        if not (self._is_sum(a) or self._is_sum(b)):
            return _reaches((_wide(a) - _wide(b)).alu(Ops.ABS), e)
        (low_a, high_a), (low_b, high_b) = self._ends(a), self._ends(b)
        apart = (high_a < low_b).alu(Ops.OR, high_b < low_a)
        single = (high_a <= low_a) & (high_b <= low_b)
        numbers = a.alu(Ops.CMPEQ, a) & b.alu(Ops.CMPEQ, b)
        return numbers & apart.alu(Ops.OR, single).alu(Ops.NOT)

    def _is_sum(self, v: UOp) -> bool:
        """Whether v is a sum that every correct program rounds to v's dtype, and to the same number where its operands are the same."""
        return v.op in (Ops.ADD, Ops.SUB) and v.dtype in (dtypes.float32, dtypes.float64) and not self.bounds[v].is_zero

    def _ends(self, v: UOp) -> tuple[UOp, UOp]:
        """The least and the largest number that v may be in a correct program, in float64."""
        if self._is_sum(v):
            exact, e = _wide(v.src[0]).alu(v.op, _wide(v.src[1])), self.bounds[v].abs
            error = _const(0.0) if e is None else e * _const(SAFETY)
            return _wide((exact - error).cast(v.dtype)), _wide((exact + error).cast(v.dtype))
        total = self.total(v)
        error = _const(0.0) if total is None else total * _const(SAFETY)
        return _wide(v) - error, _wide(v) + error

    def _where(self, u: UOp) -> ErrorBound:
        c, a, b = u.src
        ea, eb, ec = self.total(a), self.total(b), self.total(c)
        flags_a, flags_b = self.bounds[a].undecidable, self.bounds[b].undecidable
        zero, no = _const(0.0), UOp.const(dtypes.bool, False)
        inner = None if ea is None and eb is None else c.alu(Ops.WHERE, ea or zero, eb or zero)
        flags = None if flags_a is None and flags_b is None else c.alu(Ops.WHERE, flags_a or no, flags_b or no)
        may_flip = _any(None if ec is None else zero < ec, self.bounds[c].undecidable)
        if may_flip is None:
            return ErrorBound(0.0, inner, flags)
        apart = (_wide(a) - _wide(b)).alu(Ops.ABS) if a.dtype.kind != "b" else _const(1.0)
        height = _add(apart, ea, eb) or zero
        either = _any(flags_a, flags_b, (height < _const(math.inf)).alu(Ops.NOT))
        assert either is not None
        return ErrorBound(0.0, _add(inner, may_flip.alu(Ops.WHERE, height, zero)), _any(flags, may_flip & either))

    def _integer(self, u: UOp) -> ErrorBound:
        """The bound of an operation on integers or truth values with an uncertain operand."""
        if u.op in (Ops.ADD, Ops.SUB):
            return ErrorBound(0.0, _add(*(self.total(s) for s in u.src)))
        if u.op in (Ops.NEG, Ops.ABS, Ops.MAX, Ops.MIN) or (u.dtype.kind == "b" and u.op in (Ops.AND, Ops.OR, Ops.XOR, Ops.NOT)):
            return ErrorBound(0.0, self._largest(u.src))
        return self._unsure(u.src)

    def _float(self, u: UOp) -> ErrorBound:
        unit = UNIT[u.dtype]
        src = u.src
        b = [self.bounds[s] for s in src]
        op = u.op
        if op is Ops.NEG or op is Ops.ABS:
            return b[0]
        if op in (Ops.MAX, Ops.MIN):
            return ErrorBound(0.0, self._largest(src))
        if op in (Ops.ADD, Ops.SUB):
            return ErrorBound(unit, _add(self.total(src[0]), self.total(src[1])))
        if op in (Ops.MUL, Ops.MULACC):
            p = self._product(src[0], src[1], unit)
            if op is Ops.MUL:
                return p
            product = self._finite(src[0]) * self._finite(src[1]) * _const(p.rel)
            return p._replace(rel=unit, abs=_add(product, p.abs, self.total(src[2])))
        if op in (Ops.FLOOR, Ops.CEIL, Ops.TRUNC, Ops.ROUND):
            e = self.total(src[0])
            return NO_ERROR if e is None else ErrorBound(0.0, _steps(src[0], e, op))
        if op in (Ops.BITCAST, Ops.IDIV):
            return self._unsure(src)._replace(rel=0.0 if op is Ops.BITCAST else unit)
        if op is Ops.MOD:
            return self._remainder(src[0], src[1], unit)
        if op in (Ops.RECIPROCAL, Ops.FDIV):
            return self._quotient(u, 2 * unit)
        if op is Ops.POW:
            return self._power(u, 2 * FUNCTION_ULPS * unit)
        return self._function(u, FUNCTION_ULPS * unit)

    def _product(self, x: UOp, y: UOp, unit: float) -> ErrorBound:
        bx, by = self.bounds[x], self.bounds[y]
        ex, ey = self.total(x), self.total(y)
        # ∞ · 0 is a NaN, and ∞ · b has the sign of b
        meets_zero = [(a, self._meets_zero(b, e)) for a, b, e in ((x, y, ey), (y, x, ex)) if a in self.infinite]
        undecidable = _any(*((_abs64(a) < _const(math.inf)).alu(Ops.NOT) & zero for a, zero in meets_zero if zero is not None))
        if bx.abs is None and by.abs is None:
            return ErrorBound(bx.rel + by.rel + unit, None, undecidable)
        cross = None if ex is None or ey is None else ex * ey
        error = _add(None if ex is None else ex * self._finite(y), None if ey is None else ey * self._finite(x), cross)
        return ErrorBound(unit, error, undecidable)

    def _quotient(self, u: UOp, unit: float) -> ErrorBound:
        a, d = (None, u.src[0]) if u.op is Ops.RECIPROCAL else (u.src[0], u.src[1])
        ba, bd = self.bounds[a] if a is not None else NO_ERROR, self.bounds[d]
        if ba.abs is None and bd.abs is None:
            return ErrorBound(ba.rel + bd.rel + unit, None)
        ea, ed = self.total(a) if a is not None else None, self._at_pole(d)
        above = _add(ea, None if ed is None else ed * self._finite(u))
        if above is None:
            return ErrorBound(unit)
        error, meets_zero = above / self._least(d, ed), self._meets_zero(d, ed)
        if self._is_apart_from_zero(d):
            return ErrorBound(unit, error)
        # a / 0 is certainly infinite if a is certainly not 0
        is_pole = _abs64(d) <= _const(0.0)
        if ea is not None:
            assert a is not None
            meets_zero = _any(meets_zero, is_pole & _reaches(_abs64(a), ea))
        return ErrorBound(unit, is_pole.alu(Ops.WHERE, _const(0.0), error), meets_zero)

    def _remainder(self, a: UOp, d: UOp, unit: float) -> ErrorBound:
        """The bound of a - d·⌊a/d⌋. The floor is certain where the quotient is not next to an integer."""
        ea, ed = self.total(a), self.total(d)
        quotient = _wide(a).alu(Ops.FDIV, _wide(d))
        error = _add(ea, None if ed is None else ed * (_abs64(quotient) + _const(1.0)))
        if error is None:
            return ErrorBound(unit)
        return ErrorBound(unit, error + _abs64(d) * _steps(quotient, error / self._least(d, ed), Ops.FLOOR), self._meets_zero(d, ed))

    def _least(self, x: UOp, e: UOp | None) -> UOp:
        """The least magnitude that x may have within its error `e`, for elements where that does not reach 0."""
        r = self.ranges[x]
        return _max(_abs64(x) if e is None else _abs64(x) - e, _const(max(r.low, -r.high, TINY)))

    def _meets_zero(self, x: UOp, e: UOp | None) -> UOp | None:
        """A bool expression that is true where two correct programs may disagree on whether x is 0, or on its sign. None: nowhere."""
        return None if e is None or self._is_apart_from_zero(x) else _reaches(_abs64(x), e)

    def _power(self, u: UOp, unit: float) -> ErrorBound:
        a, b = u.src
        ea, eb = self._at_pole(a), self.total(b)
        # the result is exp(b·log a): its relative error is the absolute error of the exponent
        log_a = (_const(0.0) < _abs64(a)).alu(Ops.WHERE, _abs64(a).alu(Ops.LOG).alu(Ops.ABS), _const(0.0))
        exponent = _add(_abs64(b) * log_a * _const(unit), None if eb is None else eb * log_a)
        if ea is not None:
            exponent = _add(exponent, (_abs64(b) if eb is None else _abs64(b) + eb) * ea / self._least(a, ea))
        assert exponent is not None
        undecidable = self._meets_zero(a, ea)
        if eb is not None and self.ranges[a].low <= 0:
            # a negative number only has integer powers; powers of 0 are 0, 1 or infinite; NaN to the power 0 is 1
            near_integer = _reaches((_wide(b) - _wide(b).alu(Ops.ROUND)).alu(Ops.ABS), eb)
            undecidable = _any(undecidable, (_const(0.0) < _wide(a)).alu(Ops.NOT) & near_integer)
        error = _abs64(u) * (exponent.alu(Ops.EXP) - _const(1.0))
        return ErrorBound(unit, (_const(0.0) < _abs64(a)).alu(Ops.WHERE, error, _const(0.0)), undecidable)

    def _function(self, u: UOp, unit: float) -> ErrorBound:
        x, e, op = u.src[0], self.total(u.src[0]), u.op
        # near a zero of the function its absolute error is about the rounding of its argument
        floor = _const(unit) if op in (Ops.LOG, Ops.LOG2, Ops.SIN, Ops.COS) else None
        if e is None:
            return ErrorBound(unit, floor)
        if op in (Ops.EXP, Ops.EXP2):
            return ErrorBound(unit, _abs64(u) * (e.alu(op) - _const(1.0)))
        near = self._at_pole(x)
        assert near is not None
        if op in (Ops.LOG, Ops.LOG2):
            slope = near / self._least(x, near)
            slope = slope if op is Ops.LOG else slope * _const(1.4426950408889634)
            return ErrorBound(unit, _add(slope, floor), self._meets_zero(x, near))
        if op is Ops.SQRT:
            low = _max(_wide(x) - near, _const(0.0))
            leaves = None if self.ranges[x].low >= 0 else self._meets_zero(x, e)
            return ErrorBound(unit, (_wide(x) + near).alu(Ops.SQRT) - low.alu(Ops.SQRT), leaves)
        steepest = {Ops.SIN: 1.0, Ops.COS: 1.0, Ops.TANH: 1.0, Ops.ERF: 1.1283791670955126}.get(op)
        if steepest is None:
            return self._unsure([x])
        # undecidable: the sine of a number that is huge in one program and infinite in another
        overflows = x.alu(Ops.CMPEQ, x) & (e < _const(math.inf)).alu(Ops.NOT) if op in (Ops.SIN, Ops.COS) else None
        return ErrorBound(unit, _add(e * _const(steepest), floor), overflows)

    def _rounded_factors(self, x: UOp) -> float:
        """The additional relative error of a product whose factors a matrix instruction may round; 0 if none is rounded."""
        if not self.significand or x.op is not Ops.MUL or x.dtype != dtypes.float32:
            return 0.0
        exact = [size is not None and size <= 2.0**self.significand for size in (self.sizes[s] for s in x.src)]
        return exact.count(False) * 2.0**-self.significand


def _read(index: UOp, of_stage: UOp | None) -> UOp | None:
    """The value of `of_stage`, an expression for each element of a stage, at the element that `index` reads. It becomes a stage of its own,
    over the axes that it reads. None if `of_stage` is None."""
    if of_stage is None:
        return None
    reads = _ranges_read(of_stage)
    kept = [(r, place) for r, place in zip(index.src[0].src[1:], index.src[1:], strict=True) if r in reads]
    stage = UOp(Ops.STAGE, of_stage.dtype, (of_stage, *(r for r, _ in kept)))
    return UOp(Ops.INDEX, of_stage.dtype, (stage, *(place for _, place in kept)))


def _any_of(flags: UOp, ranges: Sequence[UOp]) -> UOp | None:
    """Whether `flags` is true anywhere along `ranges`. Each operand of its ORs is reduced separately, over the axes that it reads."""
    parts = (f for f in flags.toposort(gate=lambda n: n.op is Ops.OR) if f.op is not Ops.OR)
    return _any(*(_any_along(f, ranges) for f in parts))


def _any_along(flag: UOp, ranges: Sequence[UOp]) -> UOp:
    """Whether `flag` is true anywhere along the axes of `ranges` that it reads."""
    read = [r for r in _ranges_read(flag) if r in ranges]
    return _hoisted(UOp(Ops.REDUCE, dtypes.bool, (flag, *read), ("OR", 1)), read) if read else flag


def _hoisted(reduce: UOp, ranges: Sequence[UOp]) -> UOp:
    """Make a REDUCE over `ranges` a stage of its own, over the other axes that it reads. Returns a read of that stage."""
    outer = [r for r in _ranges_read(reduce) if r not in ranges]
    return UOp(Ops.INDEX, reduce.dtype, (UOp(Ops.STAGE, reduce.dtype, (reduce, *outer)), *outer))


def _ranges_read(u: UOp) -> list[UOp]:
    """The axes that an expression of one stage reads."""
    return [n for n in u.toposort(gate=lambda n: n.op not in (Ops.STAGE, Ops.RANGE)) if n.op is Ops.RANGE]


def _step(flags: UOp) -> UOp:
    """The error of a truth value that may flip where `flags` is true: 1 there, and 0 elsewhere."""
    return flags.alu(Ops.WHERE, _const(1.0), _const(0.0))


def _steps(x: UOp, e: UOp, op: Ops) -> UOp:
    """The largest difference between two correct programs' roundings of x (`op`: ⌊x⌋, ⌈x⌉, …), where x has the error `e`."""
    return (_wide(x) + e * _const(SAFETY)).alu(op) - (_wide(x) - e * _const(SAFETY)).alu(op)


def _magnitude(x: UOp) -> UOp:
    """The magnitude |x|; for a product the product of its factors' magnitudes, in which the evaluator sees a contraction."""
    if x.op is Ops.MUL:
        return _abs(x.src[0]) * _abs(x.src[1])
    return _abs(x)


def terms(reduce: UOp) -> int:
    """The number of elements that a REDUCE combines for one result."""
    n = 1
    for r in reduce.src[reduce.arg[1]:]:
        n *= int(r.src[0].arg)
    return n


def read_as(ast: UOp) -> dict[int, DType]:
    """Slot of an integer parameter → the float dtype as which the kernel reads its bits, for parameters that are read in no other way.
    NumPy has no bfloat16, so its users pass the bits as uint16."""
    dtypes_of: dict[int, set[DType]] = {}
    for u in ast.toposort():
        for s in u.src:
            if s.op is Ops.LOAD and s.dtype.is_int:
                dtypes_of.setdefault(s.src[0].src[0].arg.slot, set()).add(u.dtype if u.op is Ops.BITCAST else s.dtype)
    return {slot: next(iter(found)) for slot, found in dtypes_of.items() if len(found) == 1 and all(d.is_float for d in found)}


def error_bounds(ast: UOp, integers: int | None = None, significand: int = 0) -> list[UOp | None]:
    """The error bounds of a kernel AST: for each STORE, a STORE of 2·E of its value, in float64, at the same coordinates; None where E is
    0. A bound of ∞ means that the element is undecidable. A bound of NaN means that E is unknown, except for an element that is itself NaN
    and certain.

    `integers`: all float inputs hold integers of at most this magnitude; None: any reals. `significand`: bits to which factors of float32
    in sums of products may be rounded; 0: they are not rounded. The i-th bound is stored to a PARAM of its own, at slot (number of
    parameters) + i and of the size of the original, so that in-place kernels keep their inputs."""
    analysis = _Analysis(integers, significand)
    analysis.run(ast)
    slots = 1 + max(u.arg.slot for u in ast.walk(Ops.PARAM))
    stores: list[UOp | None] = []
    for i, store in enumerate(ast.src):
        index, value, ranges = store.src[0], store.src[1], store.src[2:]
        e, undecidable = analysis.total(value), analysis.bounds[value].undecidable
        if e is None and undecidable is None:
            stores.append(None)
            continue
        e = e or _const(0.0)
        if value.dtype.is_float:
            e = e + _const(SMALLEST_NORMAL[value.dtype])
        bound = e * _const(SAFETY)
        if undecidable is not None:
            bound = undecidable.alu(Ops.WHERE, _const(math.inf), bound)
        param = UOp(Ops.PARAM, F64, index.src[0].src, Param(slots + i, index.src[0].arg.size))
        stores.append(UOp(Ops.STORE, dtypes.void, (UOp(Ops.INDEX, F64, (param, *index.src[1:])), bound, *ranges)))
    return stores


def may_be_undecidable(bound: UOp) -> bool:
    """Whether a bound of `error_bounds` has a condition under which an element is undecidable."""
    return bound.src[1].op is Ops.WHERE
