"""Narrowing of indices to 32 bits, or not if 32 are too few. tests/compile/cuda checks that programs compute the same."""
from __future__ import annotations

from svod.compile.lower.narrow import narrow_indices
from svod.compile.lower.program import Instruction, PhaseSpec
from svod.core.ir.dtype import dtypes

INDEX = dtypes.index


def kinds(code: list[tuple[str, tuple[int, ...], object]], extent: int) -> dict[str, str]:
    """Narrow a phase with this number of groups; returns the types of its instructions by operation."""
    instructions = tuple([Instruction(op, INDEX, 1, src, arg) for op, src, arg in code])
    return {i.op: i.dtype.name for i in narrow_indices(PhaseSpec("p", extent, 1, 0, block=32), instructions)}


def test_a_product_that_fits_has_32_bits_and_one_that_does_not_has_64() -> None:
    code: list[tuple[str, tuple[int, ...], object]] = [("BEGIN", (), None), ("CONST", (), 1 << 20), ("MUL", (0, 1), None)]
    assert kinds(code, 2047)["MUL"] == "int32"
    assert kinds(code, 2049)["MUL"] == "index"


def test_what_is_not_negative_is_divided_without_sign() -> None:
    found = kinds([("BEGIN", (), None), ("CONST", (), 7), ("IDIV", (0, 1), None)], 1000)
    assert found["IDIV"] == "uint32"
    signed = kinds([("BEGIN", (), None), ("CONST", (), 7), ("SUB", (0, 1), None), ("MOD", (2, 1), None)], 1000)
    assert signed["MOD"] == "int32"


def test_a_variable_may_be_anything() -> None:
    found = kinds([("VAR", (), "n"), ("CONST", (), 2), ("MUL", (0, 1), None)], 10)
    assert found["VAR"] == found["MUL"] == "index"


def test_the_last_step_of_a_loop_must_fit_too() -> None:
    most = (1 << 31) - 1
    for stop, name in ((most - 1, "int32"), (most, "index")):
        code: list[tuple[str, tuple[int, ...], object]] = [("CONST", (), 0), ("CONST", (), stop), ("LOOP", (0, 1), 2)]
        assert kinds(code, 1)["LOOP"] == name, stop


def test_bits_that_differ_are_those_of_the_larger_number() -> None:
    """The XOR of a position below 600 and 1023 is below 1024, so a product with it fits 32 bits. The XOR of a difference may be
    negative."""
    fits: list[tuple[str, tuple[int, ...], object]] = [("BEGIN", (), None), ("CONST", (), 1023), ("XOR", (0, 1), None),
                                                       ("CONST", (), (1 << 31) // 1024), ("MUL", (2, 3), None)]
    found = kinds(fits, 600)
    assert found["XOR"] == "int32" and found["MUL"] == "int32"
    assert kinds([*fits[:3], ("CONST", (), (1 << 31) // 1023 + 1), ("MUL", (2, 3), None)], 600)["MUL"] == "index"
    assert kinds([("BEGIN", (), None), ("CONST", (), 7), ("SUB", (0, 1), None), ("XOR", (2, 1), None)], 1000)["XOR"] == "index"
