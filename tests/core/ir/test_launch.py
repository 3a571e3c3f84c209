"""Launch-size expressions: the allowed operations, and every error of each."""
from __future__ import annotations

import random
from collections.abc import Mapping

import pytest

from svod.core.ir.dtype import dtypes
from svod.core.ir.launch import evaluate_extent
from svod.core.ir.uop import ALU, MOVEMENT, Ops, UOp
from svod.errors import LaunchError

INDEX = dtypes.index
N = UOp(Ops.DEFINE_VAR, INDEX, (), ("n", 1, 64))
M = UOp(Ops.DEFINE_VAR, INDEX, (), ("m", -9, 9))
ALLOWED = (Ops.ADD, Ops.SUB, Ops.MUL, Ops.IDIV, Ops.MOD, Ops.MAX, Ops.NEG, Ops.ABS)


def number(value: int) -> UOp:
    return UOp.const(INDEX, value)


def bind(var: UOp, value: UOp) -> UOp:
    return UOp(Ops.BIND, INDEX, (var, value))


def test_what_expressions_come_to() -> None:
    """Random expressions give the values of Python's integers, or an error exactly if Python divides by zero."""
    rng = random.Random(3)

    def python(op: Ops, *x: int) -> int:
        return {Ops.ADD: lambda: x[0] + x[1], Ops.SUB: lambda: x[0] - x[1], Ops.MUL: lambda: x[0] * x[1], Ops.IDIV: lambda: x[0] // x[1],
                Ops.MOD: lambda: x[0] % x[1], Ops.MAX: lambda: max(x), Ops.NEG: lambda: -x[0], Ops.ABS: lambda: abs(x[0])}[op]()

    def grow(depth: int) -> tuple[UOp, int]:
        if not depth:
            return rng.choice([(N, 7), (M, -4), (number(k := rng.randint(-5, 5)), k), (UOp.const(dtypes.bool, True), 1)])
        op = rng.choice(ALLOWED)
        parts = [grow(rng.randrange(depth)) for _ in range(1 if op in (Ops.NEG, Ops.ABS) else 2)]
        expr = UOp(op, INDEX, tuple(u for u, _ in parts))
        return rng.choice([expr, UOp(Ops.CAST, dtypes.int32, (expr,)), bind(UOp(Ops.DEFINE_VAR, INDEX, (), ("w", -10**9, 10**9)), expr)]), \
            python(op, *(v for _, v in parts))

    divided = 0
    for _ in range(300):
        try:
            expr, want = grow(4)
        except ZeroDivisionError:
            divided += 1
            continue
        if abs(want) < 10**9:
            assert evaluate_extent(expr, {"n": 7, "m": -4}) == want
    assert divided
    assert evaluate_extent(UOp(Ops.AFTER, INDEX, (N, UOp(Ops.STORE))), {"n": 5}) == 5      # the order has no effect on the value
    assert evaluate_extent(UOp(Ops.BITCAST, dtypes.int64, (N,)), {"n": 5}) == 5
    long = N
    for _ in range(3000):
        long = UOp(Ops.ADD, INDEX, (long, number(2)))
    assert evaluate_extent(long, {"n": 5}) == 6005
    assert evaluate_extent(bind(N, number(9)), {}) == 9                                     # a bound variable needs no value


BIG = number((1 << 63) - 1)
FAILURES: Mapping[str, tuple[UOp, str]] = {
    "float": (N * 2 + UOp.const(dtypes.float32, 2.5), "launch-size expression must be integer, got float constant 2.5"),
    "unsigned": (UOp.const(dtypes.uint64, 1 << 63), "launch-size constant 9223372036854775808 does not fit"),
    "missing": (UOp(Ops.DEFINE_VAR, INDEX, (), ("k", 0, 9)), "missing runtime value for launch-size variable k"),
    "outside": (M + 1, r"variable m=10 is outside bounds \[-9, 9\]"),
    "bound outside": (bind(N, number(65)), r"variable n=65 is outside bounds \[1, 64\]"),
    "bound inside an expression": (bind(N, M), r"variable m=10 is outside bounds"),
    "overflow": (BIG + N, "invalid launch-size arithmetic: ADD of 9223372036854775807 and 7 does not fit"),
    "negation": (UOp(Ops.NEG, INDEX, (number(-(1 << 63)),)), "invalid launch-size arithmetic: NEG of -9223372036854775808"),
    "cast": (UOp(Ops.CAST, dtypes.int8, (N * 0 + 300,)), "invalid launch-size arithmetic: CAST of 300 does not fit int8"),
    "bits": (UOp(Ops.BITCAST, dtypes.uint64, (N - 8,)), "invalid launch-size arithmetic: BITCAST of -1 does not fit uint64"),
    "float cast": (UOp(Ops.CAST, dtypes.float32, (N,)), "launch-size expression must be integer, got CAST to float32"),
    "division": (UOp(Ops.IDIV, INDEX, (N, N - 7)), "invalid launch-size arithmetic: IDIV of 7 and 0: division by zero"),
    "remainder": (UOp(Ops.MOD, INDEX, (N, N - 7)), "invalid launch-size arithmetic: MOD of 7 and 0: division by zero"),
}


@pytest.mark.parametrize("name", FAILURES)
def test_errors_of_launch_sizes(name: str) -> None:
    expr, said = FAILURES[name]
    with pytest.raises(LaunchError, match=said):
        evaluate_extent(expr, {"n": 7, "m": 10})


def test_no_other_operation_has_a_place_in_a_launch_size() -> None:
    for op in (ALU | MOVEMENT | {Ops.RANGE, Ops.LOAD, Ops.INDEX, Ops.SPECIAL, Ops.BUFFER, Ops.GATHER}) - set(ALLOWED):
        kind = "binary op" if op in (Ops.MIN, Ops.FDIV, Ops.POW, Ops.AND, Ops.SHL, Ops.CMPLT) else r"(binary )?op"
        with pytest.raises(LaunchError, match=f"unsupported {kind} in launch-size expression: {op.value};"):
            evaluate_extent(UOp(op, INDEX, (N, N)), {"n": 7})
