"""The builder of LINEAR: equal expressions in a scope are one instruction, placed in the outermost possible loop; folding; memory order."""
from __future__ import annotations

import contextlib
import math
from typing import Any

import pytest

from svod.compile.lower.builder import Builder
from svod.core.ir.dtype import DType, dtypes
from svod.errors import ProgramTooLong

INDEX, F32, BOOL = dtypes.index, dtypes.float32, dtypes.bool


def names(b: Builder) -> list[str]:
    return [i[0] for i in b.finish()]


# -- scopes -------------------------------------------------------------------------------------------
def test_values_stand_where_their_last_operand_appears() -> None:
    b = Builder()
    p = b.pure("ARG", F32, 1, (), 0)
    outer, _ = b.open(b.index(0), b.index(8), 1)
    inner, _ = b.open(b.index(0), b.index(4), 1)
    row = b.mul(outer, 4)              # asked for inside, belongs outside
    at = b.add(row, inner)
    b.store("STORE", F32, 1, (p, at, b.load("LOAD", F32, 1, (p, row), 0)), (0, False))
    b.close(inner)
    b.close(outer)
    code = b.finish()
    ops = [i[0] for i in code]
    assert ops.index("MUL") < ops.index("LOAD") < [k for k, o in enumerate(ops) if o == "LOOP"][1] < ops.index("ADD") < ops.index("STORE")
    assert all(s < k for k, i in enumerate(code) for s in i[3]), "operands come first"


def test_the_same_expression_is_one_value_within_its_scope() -> None:
    b = Builder()
    x = b.pure("BEGIN", INDEX, 1, ())
    assert b.mul(x, 3) == b.mul(x, 3)
    values = []
    for _ in range(2):
        loop, _ = b.open(b.index(0), b.index(4), 1)
        values.append(b.add(loop, x))
        b.close(loop)
    assert values[0] != values[1], "a closed loop's values are gone"


def test_carried_values_and_results() -> None:
    b = Builder()
    zero = b.const(F32, 4, 0)
    loop, (acc,) = b.open(b.index(0), b.index(9), 3, (zero,))
    total, = b.close(loop, (b.alu("ADD", F32, 4, acc, acc),))
    assert b.type_of(acc) == b.type_of(total) == (F32, 4)
    assert names(b)[-5:] == ["LOOP", "CARRY", "ADD", "ENDLOOP", "RESULT"]
    assert b.level == 0


@pytest.mark.parametrize(("most", "enough"), [(2, False), (3, True)])
def test_a_builder_gives_up_at_the_instruction_that_is_too_much(most: int, enough: bool) -> None:
    b = Builder(most)
    p = b.pure("ARG", F32, 1, (), 0)
    at = b.index(4)
    assert b.index(4) == at
    with contextlib.nullcontext() if enough else pytest.raises(ProgramTooLong, match="this phase has 1 ARG, 1 CONST so far"):
        b.load("LOAD", F32, 1, (p, at), 0)
    assert len(b.op) == most


# -- constants and folding ------------------------------------------------------------------------------
@pytest.mark.parametrize(("dtype", "value", "kind"), [(F32, 1, float), (BOOL, 1, bool), (dtypes.int8, 3.0, int), (INDEX, True, int)])
def test_constants_have_the_python_type_of_their_dtype(dtype: DType, value: Any, kind: type) -> None:
    b = Builder()
    assert type(b.known(b.const(dtype, 1, value))) is kind


def test_negative_zero_and_nan_are_constants_of_their_own() -> None:
    b = Builder()
    assert b.const(F32, 1, 0.0) != b.const(F32, 1, -0.0)
    assert b.const(F32, 1, math.nan) == b.const(F32, 1, math.nan)
    assert b.const(F32, 1, 0.0) != b.const(F32, 2, 0.0) != b.const(dtypes.float64, 2, 0.0)


FOLDED: list[tuple[str, list[int], int]] = [
    ("ADD", [3, 4], 7), ("SUB", [3, 4], -1), ("MUL", [3, -4], -12), ("IDIV", [-7, 2], -4), ("MOD", [-7, 2], 1), ("IDIV", [7, 0], 0),
    ("MOD", [7, 0], 0), ("MIN", [3, 4], 3), ("MAX", [3, 4], 4),
]


@pytest.mark.parametrize(("op", "operands", "result"), FOLDED)
def test_index_arithmetic_is_folded(op: str, operands: list[int], result: int) -> None:
    b = Builder()
    assert b.known(b.alu(op, INDEX, 1, *[b.index(v) for v in operands])) == result


def test_identities() -> None:
    b = Builder()
    x = b.pure("BEGIN", INDEX, 1, ())
    assert b.add(x, b.index(0)) == b.add(b.index(0), x) == b.mul(x, 1) == x
    assert b.known(b.mul(x, 0)) == 0
    mask = b.alu("CMPLT", BOOL, 1, x, b.index(4))
    yes, no = b.const(BOOL, 1, True), b.const(BOOL, 1, False)
    assert b.alu("AND", BOOL, 1, mask, yes) == b.alu("OR", BOOL, 1, no, mask) == mask
    assert b.known(b.alu("AND", BOOL, 1, no, mask)) is False and b.known(b.alu("OR", BOOL, 1, mask, yes)) is True
    assert b.alu("WHERE", INDEX, 1, yes, x, b.index(9)) == x


def test_floats_are_not_folded() -> None:
    """Float operations are not folded: x + 0 differs from x for x = -0, and results must be rounded as the machine rounds."""
    b = Builder()
    one, zero = b.const(F32, 1, 1.0), b.const(F32, 1, 0.0)
    assert b.known(b.alu("ADD", F32, 1, one, zero)) is None


def test_vector_constants_fold_lane_by_lane() -> None:
    b = Builder()
    lanes = b.vconst(INDEX, (0, 1, 2, 3))
    inside = b.alu("CMPLT", BOOL, 4, b.alu("ADD", INDEX, 4, lanes, b.const(INDEX, 4, 2)), b.const(INDEX, 4, 4))
    assert b.op[inside] == "VCONST" and b.arg[inside] == (True, True, False, False)
    everywhere = b.alu("CMPLT", BOOL, 4, lanes, b.const(INDEX, 4, 9))
    assert b.known(everywhere) is True
    assert b.known(b.vconst(INDEX, (5, 5))) == 5


def test_scalars_are_splat() -> None:
    b = Builder()
    p = b.pure("ARG", F32, 1, (), 0)
    x = b.load("LOAD", F32, 1, (p, b.index(0)), 0)
    v = b.load("LOAD", F32, 8, (p, b.index(0)), 0)
    total = b.alu("ADD", F32, 8, x, v)
    assert [b.num_lanes[s] for s in b.src[total]] == [8, 8] and b.op[b.src[total][0]] == "SPLAT"
    assert b.splat(v, 8) == v and b.known(b.splat(b.const(F32, 1, 2), 8)) == 2.0


def test_casts() -> None:
    b = Builder()
    x = b.pure("BEGIN", INDEX, 1, ())
    assert b.cast(INDEX, x) == x and b.bitcast(INDEX, x) == x
    assert b.known(b.cast(F32, b.const(dtypes.int32, 4, 7))) == 7.0
    assert b.known(b.cast(F32, b.const(dtypes.int64, 1, (1 << 53) + 1))) is None, "it has to be rounded"
    assert b.known(b.cast(dtypes.int8, b.const(dtypes.int32, 1, 300))) is None, "it has to wrap"


# -- memory -------------------------------------------------------------------------------------------
def test_loads_stay_below_their_floor() -> None:
    """A load from scratch does not move above the loop that fills it."""
    b = Builder()
    p = b.pure("SCRATCH", F32, 1, (), 0)
    loop, _ = b.open(b.index(0), b.index(4), 1)
    b.store("STORE", F32, 1, (p, b.index(0), b.const(F32, 1, 1)), (0, False))
    b.load("LOAD", F32, 1, (p, b.index(0)), 0, floor=b.level)
    b.close(loop)
    ops = names(b)
    assert ops.index("LOOP") < ops.index("STORE") < ops.index("LOAD") < ops.index("ENDLOOP")


def test_loads_of_memory_that_was_written_again_are_others() -> None:
    b = Builder()
    p = b.pure("SCRATCH", F32, 1, (), 0)
    first = b.load("LOAD", F32, 1, (p, b.index(0)), 0, version=1)
    assert b.load("LOAD", F32, 1, (p, b.index(0)), 0, version=1) == first != b.load("LOAD", F32, 1, (p, b.index(0)), 0, version=2)
    assert b.load("LOAD", F32, 1, (p, b.index(0)), 0, ordered=True) != b.load("LOAD", F32, 1, (p, b.index(0)), 0, ordered=True)


def test_what_divides_an_index() -> None:
    b = Builder()
    begin = b.pure("BEGIN", INDEX, 1, ())
    i, _ = b.open(begin, b.pure("END_", INDEX, 1, ()), 1)
    j, _ = b.open(b.index(0), b.index(64), 8)
    assert [b.multiple_of(v) for v in (begin, i, j, b.index(12), b.index(0))] == [1, 1, 8, 12, 0]
    assert b.multiple_of(b.mul(i, 16)) == 16 and b.multiple_of(b.add(b.mul(i, 12), j)) == 4
    assert b.multiple_of(b.alu("MIN", INDEX, 1, j, b.index(20))) == 4
    assert b.multiple_of(b.alu("MOD", INDEX, 1, j, b.index(24))) == 1
    b.close(j)
    b.close(i)
