"""The combiners of REDUCE: their components, identity, and the combination of two partial results, defined once for all IR levels.

`combine` calls an abstract `alu(op, *values)`, so that the NumPy evaluator, the UOp level and the LINEAR builder share it. A comparison
by `alu` gives a bool; any other operation gives the type of its operands (a WHERE, that of its branches). Every combiner is associative
and commutative except for floating-point rounding, so partial results may be combined in any order.

| name | components | meaning |
| --- | --- | --- |
| ADD, MUL | 1 | sum, product |
| MAX, MIN | 1 | extremum; a NaN propagates |
| AND, OR | 1 | logical for bools, bitwise for integers |
| ARGMAX, ARGMIN | 2 | (value, index) of the extremum; of equal values the first; a NaN is the extremum, as in NumPy |
| EXPSUM | 3 | (m, s, t): a maximum m, and two sums divided by exp(m); sums are scaled from the smaller m to the larger one, then added |
"""
from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

from svod.core.ir.dtype import DType
from svod.core.ir.uop import Ops
from svod.errors import UnsupportedError

V = TypeVar("V")
Alu = Callable[..., Any]  # alu(op: Ops, *values: V | float) -> V; a number among the values is a constant of the preceding value's type


@dataclass(frozen=True)
class Combiner:
    """One way to combine partial results of a reduction."""

    name: str
    components: int
    op: Ops              # the elementwise operation that combines the first components, such as MAX for ARGMAX

    def read_for(self, component: int) -> tuple[int, ...]:
        """Return the components of the two partial results from which a component of their combination is computed."""
        return (0, component) if self.components == 3 else tuple(range(self.components))

    def identity(self, *types: DType) -> tuple[bool | int | float, ...]:
        """Return the neutral element for components of these dtypes, as Python scalars of each dtype's kind.

        ARGMAX and ARGMIN have the largest index as neutral index, so that a real element wins every tie against it."""
        if len(types) != self.components:
            raise UnsupportedError(f"{self.name} combines {self.components} component(s), asked for the identity of {len(types)}")
        first = _scalar(types[0], _IDENTITY[self.op](types[0]))
        if self.components == 3:
            return first, 0.0, 0.0
        return (first,) if self.components == 1 else (first, types[1].max)

    def combine(self, a: tuple[V, ...], b: tuple[V, ...], alu: Alu, *, nan: bool = True) -> tuple[V, ...]:
        """Combine two partial results. `nan=False` promises that no first component is a NaN (as for integers), which saves the comparisons
        that detect NaNs; it only affects ARGMAX and ARGMIN."""
        if self.components == 1:
            return (alu(self.op, a[0], b[0]),)
        if self.components == 3:
            return _combine_scaled(a, b, alu)
        (av, ai), (bv, bi) = a, b
        # For ARGMAX: "not b <= a" is also true if a or b is NaN. So b is better only if a is not NaN (a == a).
        lo, hi = (av, bv) if self.op is Ops.MAX else (bv, av)
        if nan:
            better = alu(Ops.AND, alu(Ops.NOT, alu(Ops.CMPLE, hi, lo)), alu(Ops.CMPEQ, av, av))
            worse = alu(Ops.AND, alu(Ops.NOT, alu(Ops.CMPLE, lo, hi)), alu(Ops.CMPEQ, bv, bv))
            tie = alu(Ops.NOT, alu(Ops.OR, better, worse))
        else:
            better, tie = alu(Ops.CMPLT, lo, hi), alu(Ops.CMPEQ, av, bv)
        take_b = alu(Ops.OR, better, alu(Ops.AND, tie, alu(Ops.CMPLT, bi, ai)))
        return alu(Ops.WHERE, take_b, bv, av), alu(Ops.WHERE, take_b, bi, ai)


def _combine_scaled(a: tuple[V, ...], b: tuple[V, ...], alu: Alu) -> tuple[V, ...]:
    """Combine partial EXPSUMs. If the maxima are equal, neither side is scaled: the difference of two infinite maxima would be NaN."""
    scale = alu(Ops.EXP, alu(Ops.SUB, alu(Ops.MIN, a[0], b[0]), alu(Ops.MAX, a[0], b[0])))
    first, second = alu(Ops.CMPLT, a[0], b[0]), alu(Ops.CMPLT, b[0], a[0])
    of_a, of_b = alu(Ops.WHERE, first, scale, 1.0), alu(Ops.WHERE, second, scale, 1.0)
    sums = [alu(Ops.MULACC, x, of_a, alu(Ops.MUL, y, of_b)) for x, y in zip(a[1:], b[1:], strict=True)]
    return alu(Ops.MAX, a[0], b[0]), *sums


def _scalar(dtype: DType, value: int | float) -> bool | int | float:
    return bool(value) if dtype.kind == "b" else float(value) if dtype.is_float else int(value)


_IDENTITY: dict[Ops, Callable[[DType], int | float]] = {
    Ops.ADD: lambda d: 0, Ops.MUL: lambda d: 1, Ops.MAX: lambda d: d.min, Ops.MIN: lambda d: d.max,
    Ops.AND: lambda d: -1 if d.kind == "i" else d.max, Ops.OR: lambda d: 0,
}

COMBINERS: dict[str, Combiner] = {c.name: c for c in (
    Combiner("ADD", 1, Ops.ADD), Combiner("MUL", 1, Ops.MUL), Combiner("MAX", 1, Ops.MAX), Combiner("MIN", 1, Ops.MIN),
    Combiner("AND", 1, Ops.AND), Combiner("OR", 1, Ops.OR), Combiner("ARGMAX", 2, Ops.MAX), Combiner("ARGMIN", 2, Ops.MIN),
    Combiner("EXPSUM", 3, Ops.MAX),
)}


def get_combiner(name: str) -> Combiner:
    """Return the combiner called `name`. Raises UnsupportedError, which lists the known names, for any other name."""
    try:
        return COMBINERS[name]
    except KeyError:
        raise UnsupportedError(f"REDUCE with combiner {name!r}: svod knows {', '.join(COMBINERS)}") from None
