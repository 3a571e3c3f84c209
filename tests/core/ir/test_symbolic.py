"""Index arithmetic compared with Python's integers on random expressions, which include negative values."""
from __future__ import annotations

import random

import pytest

from svod.core.ir import symbolic as sy
from svod.core.ir.dtype import dtypes
from svod.core.ir.uop import Ops, UOp
from tests.draws import a_quarter

PYTHON = {
    Ops.ADD: lambda a, b: a + b, Ops.SUB: lambda a, b: a - b, Ops.MUL: lambda a, b: a * b, Ops.IDIV: lambda a, b: a // b,
    Ops.MOD: lambda a, b: a % b, Ops.MIN: min, Ops.MAX: max, Ops.CMPLT: lambda a, b: a < b, Ops.CMPLE: lambda a, b: a <= b,
    Ops.AND: lambda a, b: a and b, Ops.OR: lambda a, b: a or b, Ops.NOT: lambda a: not a,
}


def evaluate(u: UOp, env: dict[UOp, int]) -> int:
    values: dict[UOp, int] = {}
    for n in u.toposort():
        if n in env:
            values[n] = env[n]
        elif n.op is Ops.CONST:
            values[n] = n.arg
        elif n.op is not Ops.RANGE:
            values[n] = PYTHON[n.op](*(values[s] for s in n.src))
    return values[u]


def random_leaves(rng: random.Random) -> list[UOp]:
    ranges = [sy.make_range(rng.choice([1, 2, 3, 4, 6, 8, 12]), i) for i in range(3)]
    return [*ranges, UOp(Ops.DEFINE_VAR, dtypes.index, (), ("v", -5, 7))]


def random_expression(rng: random.Random, leaves: list[UOp], depth: int) -> UOp:
    if depth == 0 or rng.random() < 0.15:
        return rng.choice(leaves) if rng.random() < 0.7 else sy.const(rng.randint(-12, 12))
    op = rng.choice([Ops.ADD, Ops.ADD, Ops.SUB, Ops.MUL, Ops.IDIV, Ops.MOD, Ops.MIN, Ops.MAX])
    a = random_expression(rng, leaves, depth - 1)
    if op in (Ops.IDIV, Ops.MOD):
        return UOp(op, dtypes.index, (a, sy.const(rng.choice([-6, -3, -2, 1, 2, 3, 4, 6, 8, 12]))))
    if op is Ops.MUL and rng.random() < 0.8:
        return UOp(op, dtypes.index, (a, sy.const(rng.randint(-8, 12))))
    return UOp(op, dtypes.index, (a, random_expression(rng, leaves, depth - 1)))


def random_point(rng: random.Random, leaves: list[UOp]) -> dict[UOp, int]:
    return {x: rng.randint(*sy.bounds(x)) for x in leaves}


@pytest.mark.parametrize("seed", a_quarter(range(8)))
def test_simplified_expressions_agree_with_python(seed: int) -> None:
    rng = random.Random(seed)
    for _ in range(150):
        leaves = random_leaves(rng)
        e = random_expression(rng, leaves, 5)
        if rng.random() < 0.25:
            e = UOp(rng.choice([Ops.CMPLT, Ops.CMPLE]), dtypes.bool, (e, random_expression(rng, leaves, 2)))
            if rng.random() < 0.5:
                e = UOp(Ops.NOT, dtypes.bool, (e,))
        s = sy.simplify(e)
        assert sy.simplify(s) is s
        for _ in range(10):
            env = random_point(rng, leaves)
            got = evaluate(s, env)
            assert got == evaluate(e, env)
            if s.dtype == dtypes.index:
                assert sy.vmin(s) <= got <= sy.vmax(s)
                form = sy.affine(s)
                total = form.constant + sum(k * env[x] for x, k in form.coefficients.items())
                assert total + sum(k * evaluate(a, env) for a, k in form.atoms.items()) == got


@pytest.mark.parametrize("seed", a_quarter(range(6)))
def test_constraints_agree_with_python(seed: int) -> None:
    rng = random.Random(100 + seed)
    for _ in range(100):
        leaves = random_leaves(rng)
        valid: sy.Valid | None = ()
        conditions = []
        for _ in range(rng.randint(1, 4)):
            e = sy.simplify(random_expression(rng, leaves, 2))
            lo = rng.choice([None, rng.randint(-9, 6)])
            hi = rng.choice([None, rng.randint(-6, 9)])
            conditions.append((e, lo, hi))
            valid = None if valid is None else sy.constrain(valid, e, lo, hi)
        inner = sy.simplify(random_expression(rng, leaves, 4))
        assumed = inner if valid is None else sy.assuming(inner, valid)
        for _ in range(10):
            env = random_point(rng, leaves)
            wanted = all((lo is None or lo <= evaluate(e, env)) and (hi is None or evaluate(e, env) <= hi) for e, lo, hi in conditions)
            assert (valid is not None and bool(evaluate(sy.gate_of(valid), env))) == wanted
            if wanted:
                assert evaluate(assumed, env) == evaluate(inner, env)


def test_reshapes_come_back_without_division() -> None:
    i, j, k = sy.make_range(5, 0), sy.make_range(4, 1), sy.make_range(3, 2)
    flat = sy.add(sy.add(sy.scale(i, 12), sy.scale(j, 3)), k)
    assert sy.floormod(sy.floordiv(flat, 3), 4) is j
    assert sy.floordiv(flat, 12) is i
    r = sy.make_range(60, 3)
    assert sy.add(sy.scale(sy.floordiv(r, 12), 12), sy.floormod(r, 12)) is r
    parts = (sy.floordiv(r, 12), sy.floormod(sy.floordiv(r, 3), 4), sy.floormod(r, 3))
    assert sy.add(sy.add(sy.scale(parts[0], 12), sy.scale(parts[1], 3)), parts[2]) is r


def test_division_by_zero_is_refused() -> None:
    with pytest.raises(ZeroDivisionError):
        sy.idiv(sy.make_range(4, 0), sy.INDEX_ZERO)


def test_gates_decided_by_bounds_vanish() -> None:
    i = sy.make_range(8, 0)
    assert sy.constrain((), i, 0, 7) == ()
    assert sy.constrain((), i, 8, None) is None
    assert sy.constrain((), sy.shift(i, -1), 0, 5) == (sy.Constraint(i, 1, 6),)
