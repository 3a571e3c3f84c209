"""The combiners of REDUCE, as data: components, identities, and one definition of the combination for every level.

`combine` is written against an abstract `alu(op, *values)`, so that the NumPy evaluator, the UOp level and the LINEAR builder
share it; comparisons passed to `alu` give bools, everything else the type of its (branch) operands. Every combiner here is
associative and commutative (floating-point rounding aside), so partial results may be combined in any order.

| name | components | meaning |
| --- | --- | --- |
| ADD, MUL | 1 | sum, product |
| MAX, MIN | 1 | extremum; a NaN propagates |
| AND, OR | 1 | of bools, or bitwise of integers |
| ARGMAX, ARGMIN | 2 | (value, index): the extremum and where it stands; of equal values the first; NaN is the extremum, as in NumPy |
| EXPSUM | 3 | (maximum, sum, sum): sums of what exp(maximum) was taken out of; those of the smaller maximum are scaled down, then added |
"""
from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

from svod.core.ir.dtype import DType
from svod.core.ir.uop import Ops
from svod.errors import UnsupportedError

V = TypeVar("V")
Alu = Callable[..., Any]  # alu(op: Ops, *values: V | float) -> V; a number is a constant of the type of the value before it


@dataclass(frozen=True)
class Combiner:
    """One way to combine partial results of a reduction."""

    name: str
    components: int
    op: Ops              # the elementwise operation on the first component: MAX for ARGMAX

    def read_for(self, component: int) -> tuple[int, ...]:
        """The components of both operands that a component of the combination is computed from."""
        return (0, component) if self.components == 3 else tuple(range(self.components))

    def identity(self, *types: DType) -> tuple[bool | int | float, ...]:
        """The neutral element for components of these dtypes, as Python scalars of each dtype's kind.

        The neutral index of ARGMAX and ARGMIN is the largest one, so that a real element wins every tie against it."""
        if len(types) != self.components:
            raise UnsupportedError(f"{self.name} combines {self.components} component(s), asked for the identity of {len(types)}")
        first = _scalar(types[0], _IDENTITY[self.op](types[0]))
        if self.components == 3:
            return first, 0.0, 0.0
        return (first,) if self.components == 1 else (first, types[1].max)

    def combine(self, a: tuple[V, ...], b: tuple[V, ...], alu: Alu, *, nan: bool = True) -> tuple[V, ...]:
        """The combination of two partial results. `nan=False` promises that the first component holds no NaN (integers)
        and saves the comparisons that look for it; it makes a difference to ARGMAX and ARGMIN only."""
        if self.components == 1:
            return (alu(self.op, a[0], b[0]),)
        if self.components == 3:
            return _combine_scaled(a, b, alu)
        (av, ai), (bv, bi) = a, b
        # "b is not at most a" is also true when either is NaN; it counts as better only if a itself is ordered
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
    """Combine partial EXPSUMs. Where the maxima are equal, infinite ones too, neither side is scaled: their difference may be NaN."""
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
    """The combiner of that name. Raises UnsupportedError that lists the known ones."""
    try:
        return COMBINERS[name]
    except KeyError:
        raise UnsupportedError(f"REDUCE with combiner {name!r}: svod knows {', '.join(COMBINERS)}") from None
