"""Known remainders of integers, from which the alignment of addresses follows: an access wider than its alignment faults on a GPU."""
from __future__ import annotations

from math import gcd
from typing import Any

import pytest

from svod.compile.lower.program import Instruction
from svod.compile.lower.residues import residues
from svod.core.ir.dtype import DType, dtypes

INDEX, INT, FLOAT = dtypes.index, dtypes.int32, dtypes.float32
UNKNOWN = Instruction("VAR", INDEX, 1, (), "n")


def const(value: float, dtype: DType = INDEX) -> Instruction:
    return Instruction("CONST", dtype, 1, (), value)


def alu(op: str, *src: int, dtype: DType = INDEX, arg: Any = None) -> Instruction:
    return Instruction(op, dtype, 1, src, arg)


@pytest.mark.parametrize(("code", "nbytes"), [
    ((const(0),), 16), ((const(6),), 8), ((UNKNOWN,), 4),
    ((UNKNOWN, const(4), alu("MUL", 0, 1)), 16),
    ((UNKNOWN, const(6), alu("MUL", 0, 1)), 8),
    ((UNKNOWN, const(4), const(2), alu("MULACC", 0, 1, 2)), 8),
    ((UNKNOWN, const(4), alu("MUL", 0, 1), const(2), alu("ADD", 2, 3)), 8),
    ((UNKNOWN, const(4), alu("MUL", 0, 1), const(8), alu("MIN", 2, 3)), 16),
    ((UNKNOWN, const(12), alu("MUL", 0, 1), const(4), alu("XOR", 2, 3)), 16),
    ((UNKNOWN, const(8), alu("MUL", 0, 1), const(2), alu("QUOTIENT", 2, 3)), 16),
    ((UNKNOWN, const(8), alu("MUL", 0, 1), const(16), alu("QUOTIENT", 2, 3)), 4),
    ((UNKNOWN, const(8), alu("MUL", 0, 1), const(20), alu("REMAINDER", 2, 3)), 16),
    ((UNKNOWN, const(8), alu("MUL", 0, 1), const(6), alu("REMAINDER", 2, 3)), 8),
    ((UNKNOWN, const(8), alu("MUL", 0, 1), const(1), alu("SHR", 2, 3)), 16),
    ((UNKNOWN, const(8), alu("MUL", 0, 1), const(4), alu("SHR", 2, 3)), 4),
    ((UNKNOWN, const(2), alu("MUL", 0, 1), const(15), alu("AND", 2, 3)), 8),
    ((UNKNOWN, const(12), alu("AND", 0, 1)), 16), ((UNKNOWN, const(0), alu("AND", 0, 1)), 16),
    ((UNKNOWN, const(4), alu("MUL", 0, 1), const(2), alu("ADD", 2, 3), alu("ADD", 4, 3)), 16),
    ((const(4), UNKNOWN, alu("LOOP", 0, 1, arg=8)), 16), ((const(2), UNKNOWN, alu("LOOP", 0, 1, arg=8)), 8),
])
def test_what_divides_an_index(code: tuple[Instruction, ...], nbytes: int) -> None:
    assert gcd(residues(code)[-1].divisor() * 4, 16) == nbytes


def test_an_offset_counts() -> None:
    code = (UNKNOWN, const(4), alu("MUL", 0, 1))
    assert [gcd(residues(code)[2].divisor(offset) * 4, 16) for offset in (0, 1, 2, 3, 4)] == [16, 4, 8, 4, 16]


def test_a_float_is_rounded_when_it_becomes_an_index() -> None:
    """A float is rounded when it becomes an index: four times 0.3 gives the index 1."""
    number = alu("VAR", dtype=FLOAT, arg="x")
    code = (number, const(4.0, FLOAT), alu("MUL", 0, 1, dtype=FLOAT), alu("CAST", 2, dtype=INT), alu("CAST", 3))
    assert gcd(residues(code)[4].divisor() * 4, 16) == 4


def test_small_integers_wrap_around() -> None:
    """48 times 6, divided by 3, is 96; in eight bits the product wraps and the result is 10."""
    code = (alu("VAR", dtype=dtypes.uint8, arg="x"), const(48, dtypes.uint8), alu("MUL", 0, 1, dtype=dtypes.uint8),
            const(3, dtypes.uint8), alu("QUOTIENT", 2, 3, dtype=dtypes.uint8), alu("CAST", 4))
    assert gcd(residues(code)[5].divisor() * 4, 16) == 4
