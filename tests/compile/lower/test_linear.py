"""LINEAR's executable specification: the interpreter against NumPy, and one broken program per rule of the grammar."""
from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from svod.compile.lower.linear import format_linear, validate
from svod.compile.lower.program import Instruction, PhaseSpec, Program, ProgramSpec
from svod.core.ir.dtype import DType, dtypes
from svod.core.spec.evaluate import from_float, to_float
from svod.errors import CompileError, LaunchError
from tests.interpreted import interpret

F32, I32, IDX, BOOL, VOID = dtypes.float32, dtypes.int32, dtypes.index, dtypes.bool, dtypes.void


def program(*phases: list[Instruction], params: tuple[tuple[DType, int], ...], outs: tuple[int, ...] = (0,),
            extents: tuple[int, ...] = (1,), temps: tuple[int, ...] = (), scratch: int = 0, variables: tuple[str, ...] = ()) -> Program:
    specs = tuple(PhaseSpec(f"p{k}", extent, 1, scratch) for k, extent in enumerate(extents))
    return Program(ProgramSpec("test", params, outs, temps, specs, variables), tuple(tuple(Instruction(*i) for i in p) for p in phases))


def const(value: Any, dtype: DType = IDX, lanes: int = 1) -> Instruction:
    return ("CONST", dtype, lanes, (), value)


def relu(n: int, lanes: int = 4) -> Program:
    """Make y = max(x, 0) in vectors of `lanes` elements, with a masked tail."""
    return program([
        ("ARG", F32, 1, (), 0), ("ARG", F32, 1, (), 1), ("BEGIN", IDX, 1, (), None), ("END_", IDX, 1, (), None),
        const(0.0, F32, lanes), ("VCONST", IDX, lanes, (), tuple(range(lanes))), const(lanes), const(n, IDX, lanes),
        ("LOOP", IDX, 1, (2, 3), 1),
        ("MUL", IDX, 1, (8, 6), None),
        ("SPLAT", IDX, lanes, (9,), None),
        ("ADD", IDX, lanes, (10, 5), None),
        ("CMPLT", BOOL, lanes, (11, 7), None),
        ("LOAD", F32, lanes, (1, 9, 12, 4), 0),
        ("MAX", F32, lanes, (13, 4), None),
        ("STORE", F32, lanes, (0, 9, 14, 12), (0, False)),
        ("ENDLOOP", VOID, 1, (8,), None),
    ], params=((F32, n), (F32, n)), extents=(-(-n // lanes),))


def dot(n: int, k: int) -> Program:
    """Make y[i] = sum over k of a[i, k] * b[k], with nested loops, a carried value, and an empty loop if k is 0."""
    return program([
        ("ARG", F32, 1, (), 0), ("ARG", F32, 1, (), 1), ("ARG", F32, 1, (), 2), ("BEGIN", IDX, 1, (), None), ("END_", IDX, 1, (), None),
        const(0), const(k), const(0.0, F32),
        ("LOOP", IDX, 1, (3, 4), 1),
        ("MUL", IDX, 1, (8, 6), None),
        ("LOOP", IDX, 1, (5, 6, 7), 1),
        ("CARRY", F32, 1, (10,), 0),
        ("ADD", IDX, 1, (9, 10), None),
        ("LOAD", F32, 1, (1, 12), 0),
        ("LOAD", F32, 1, (2, 10), 0),
        ("MULACC", F32, 1, (13, 14, 11), None),
        ("ENDLOOP", VOID, 1, (10, 15), None),
        ("RESULT", F32, 1, (10,), 0),
        ("STORE", F32, 1, (0, 8, 17), (0, False)),
        ("ENDLOOP", VOID, 1, (8,), None),
    ], params=((F32, n), (F32, max(n * k, 1)), (F32, max(k, 1))), extents=(n,))


@pytest.mark.parametrize("n", [1, 4, 7, 64])
@pytest.mark.parametrize("slices", [None, 3])
def test_masked_tail(n: int, slices: int | None) -> None:
    x, y = np.linspace(-1, 1, n, dtype=np.float32), np.full(n, np.nan, np.float32)
    p = relu(n)
    validate(p)
    interpret(p, [y, x], slices=slices)
    np.testing.assert_array_equal(y, np.maximum(x, 0))


def test_slices_run_what_they_say() -> None:
    x, y = np.ones(16, np.float32), np.zeros(16, np.float32)
    interpret(relu(16), [y, x], slices=[[(3, 4), (1, 2)]])
    np.testing.assert_array_equal(y, [0] * 4 + [1] * 4 + [0] * 4 + [1] * 4)


@pytest.mark.parametrize("n, k", [(1, 1), (5, 7), (3, 0)])
def test_loops_and_carried_values(n: int, k: int) -> None:
    draw = np.random.default_rng(0)
    a, b = draw.standard_normal(max(n * k, 1)).astype(np.float32), draw.standard_normal(max(k, 1)).astype(np.float32)
    y = np.full(n, np.nan, np.float32)
    p = dot(n, k)
    validate(p)
    interpret(p, [y, a, b])
    np.testing.assert_allclose(y, a[:n * k].reshape(n, k) @ b[:k], rtol=1e-5, atol=1e-6)


def test_loop_with_a_step() -> None:
    p = program([("ARG", I32, 1, (), 0), const(1), const(8), ("LOOP", IDX, 1, (1, 2), 3), ("CAST", I32, 1, (3,), None),
                 ("STORE", I32, 1, (0, 3, 4), (0, False)), ("ENDLOOP", VOID, 1, (3,), None)], params=((I32, 8),))
    y = np.zeros(8, np.int32)
    validate(p)
    interpret(p, [y])
    np.testing.assert_array_equal(y, [0, 1, 0, 0, 4, 0, 0, 7])


def test_strided_indexed_shuffled() -> None:
    x = np.arange(32, dtype=np.int32)
    p = program([
        ("ARG", I32, 1, (), 0), ("ARG", I32, 1, (), 1), const(2),
        ("VCONST", IDX, 4, (), (7, 0, 5, 5)), ("VCONST", IDX, 4, (), (9, 1, 3, 2)),
        ("VCONST", BOOL, 4, (), (True, False, True, False)), const(-1, I32, 4),
        ("LOADS", I32, 4, (1, 2), (1, 5)),                  # 3 8 13 18
        ("GATHER", I32, 4, (1, 3, 5, 6), 10),               # 17 -1 15 -1
        ("SHUFFLE", I32, 4, (7, 8), (0, 4, 3, 6)),          # 3 17 18 15
        ("SCATTER", I32, 4, (0, 4, 9), 0),
        ("STORES", I32, 4, (0, 2, 7, 5), (8, -3)),          # lanes 0 and 2 to 10 and 4
        ("EXTRACT", I32, 1, (9,), 2),
        ("STORE", I32, 1, (0, 2, 12), (9, False)),
    ], params=((I32, 16), (I32, 32)))
    y = np.zeros(16, np.int32)
    validate(p)
    interpret(p, [y, x])
    np.testing.assert_array_equal(y, [0, 17, 15, 18, 13, 0, 0, 0, 0, 3, 3, 18, 0, 0, 0, 0])


def test_temporaries_live_across_phases_and_scratch_is_poisoned_per_slice() -> None:
    first = [("TEMP", F32, 1, (), 0), ("BEGIN", IDX, 1, (), None), ("END_", IDX, 1, (), None), const(2.0, F32),
             ("LOOP", IDX, 1, (1, 2), 1), ("STORE", F32, 1, (0, 4, 3), (0, False)), ("ENDLOOP", VOID, 1, (4,), None)]
    second = [("ARG", F32, 1, (), 0), ("TEMP", F32, 1, (), 0), ("SCRATCH", F32, 1, (), 64), ("BEGIN", IDX, 1, (), None), const(0),
              ("LOAD", F32, 1, (2, 4), 0), ("STORE", F32, 1, (0, 3, 5), (0, False)),
              ("LOAD", F32, 1, (1, 3), 0), ("STORE", F32, 1, (2, 4, 7), (0, False)),
              ("LOAD", F32, 1, (2, 4), 0), ("STORE", F32, 1, (0, 3, 9), (3, False))]
    p = program(first, second, params=((F32, 6),), extents=(2, 3), temps=(12,), scratch=128)
    validate(p)
    y = np.zeros(6, np.float32)
    interpret(p, [y], slices=[[(0, 2)], [(0, 1), (1, 2), (2, 3)]])
    np.testing.assert_array_equal(y, [np.nan] * 3 + [2, 2, np.nan])


def test_bfloat16_memory_and_arithmetic() -> None:
    bf = dtypes.bfloat16
    draw = np.random.default_rng(1)
    a, b = (from_float(draw.standard_normal(8).astype(np.float32), bf) for _ in range(2))
    p = program([("ARG", bf, 1, (), 0), ("ARG", bf, 1, (), 1), ("ARG", bf, 1, (), 2), const(0), ("LOAD", bf, 8, (1, 3), 0),
                 ("LOAD", bf, 8, (2, 3), 0), ("MUL", bf, 8, (4, 5), None), ("STORE", bf, 8, (0, 3, 6), (0, False))], params=((bf, 8),) * 3)
    y = np.zeros(8, np.uint16)
    validate(p)
    interpret(p, [y, a, b])
    np.testing.assert_array_equal(y, from_float(to_float(a, bf) * to_float(b, bf), bf))


def test_variables() -> None:
    p = program([("ARG", I32, 1, (), 0), ("VAR", IDX, 1, (), "n"), const(0), ("CAST", I32, 1, (1,), None),
                 ("STORE", I32, 1, (0, 2, 3), (0, False))], params=((I32, 1),), variables=("n",))
    y = np.zeros(1, np.int32)
    validate(p)
    interpret(p, [y], {"n": 41})
    assert y[0] == 41
    with pytest.raises(LaunchError, match="'n'"):
        interpret(p, [y])


def test_accesses_out_of_bounds_name_the_instruction() -> None:
    p = dot(5, 7)
    args = [np.zeros(5, np.float32), np.zeros(35, np.float32), np.zeros(7, np.float32)]
    short = Program(ProgramSpec("test", ((F32, 5), (F32, 34), (F32, 7)), (0,), (), p.spec.phases), p.code)
    with pytest.raises(CompileError, match=r"%13 = LOAD float32 %1, %12 \[0\]: touches element 34 of argument 1, which has 34"):
        interpret(short, args)
    code = list(relu(7).code[0])
    code[13] = ("LOAD", F32, 4, (1, 9), 0)
    with pytest.raises(CompileError, match="touches element 7 of argument 1"):
        interpret(program(code, params=((F32, 7), (F32, 7)), extents=(2,)), [np.zeros(7, np.float32)] * 2)
    with pytest.raises(LaunchError, match="argument 0"):
        interpret(relu(8), [np.zeros(8), np.zeros(8, np.float32)])


def test_the_printed_form() -> None:
    assert format_linear(dot(2, 3)).splitlines()[1:] == """\
phase p0: extent 2, threads 1, scratch 0
  %0 = ARG float32 [0]
  %1 = ARG float32 [1]
  %2 = ARG float32 [2]
  %3 = BEGIN index
  %4 = END_ index
  %5 = CONST index [0]
  %6 = CONST index [3]
  %7 = CONST float32 [0.0]
  %8 = LOOP index %3, %4 [1]
    %9 = MUL index %8, %6
    %10 = LOOP index %5, %6, %7 [1]
      %11 = CARRY float32 %10 [0]
      %12 = ADD index %9, %10
      %13 = LOAD float32 %1, %12 [0]
      %14 = LOAD float32 %2, %10 [0]
      %15 = MULACC float32 %13, %14, %11
    ENDLOOP %10, %15
    %17 = RESULT float32 %10 [0]
    STORE float32 %0, %8, %17 [(0, False)]
  ENDLOOP %8""".splitlines()


BREAKS: dict[str, tuple[int, Instruction, str]] = {
    "forward": (9, ("MUL", IDX, 1, (8, 20), None), "not an earlier instruction"),
    "no value": (18, ("STORE", F32, 1, (0, 8, 16), (0, False)), "%16 has no value"),
    "scope": (18, ("STORE", F32, 1, (0, 8, 15), (0, False)), r"defined in the loop %10, which is closed"),
    "lanes": (15, ("MULACC", F32, 4, (13, 14, 11), None), "float32x1, needed is float32x4"),
    "type": (12, ("ADD", I32, 1, (9, 10), None), "index"),
    "arity": (12, ("ADD", IDX, 1, (9,), None), "takes 2 operands"),
    "transcendental": (15, ("EXP", F32, 1, (13,), None), "expanded by lowering"),
    "unknown": (15, ("FROBNICATE", F32, 1, (13,), None), "not an operation of LINEAR"),
    "pointer as value": (15, ("MULACC", F32, 1, (13, 0, 11), None), "is a pointer"),
    "value as pointer": (13, ("LOAD", F32, 1, (9, 12), 0), "%9 is not a pointer"),
    "element type": (0, ("ARG", I32, 1, (), 0), "parameter 0 is float32"),
    "slot": (0, ("ARG", F32, 1, (), 3), "has 3 parameters"),
    "input written": (18, ("STORE", F32, 1, (1, 8, 17), (0, False)), "argument 1 is not an output"),
    "float index": (13, ("LOAD", F32, 1, (1, 7), 0), "index %7 is float32x1"),
    "load arg": (13, ("LOAD", F32, 1, (1, 12), (0, 1)), "the arg is offset"),
    "mask": (13, ("LOAD", F32, 1, (1, 12, 7, 7), 0), "the mask %7"),
    "carried count": (16, ("ENDLOOP", VOID, 1, (10,), None), "carries 1 values"),
    "carried type": (16, ("ENDLOOP", VOID, 1, (10, 12), None), "next value %12"),
    "nesting": (16, ("ENDLOOP", VOID, 1, (8,), None), "closes %8"),
    "not closed": (19, ("CAST", I32, 1, (8,), None), "never closed"),
    "carry number": (11, ("CARRY", F32, 1, (10,), 1), "carries 1 values"),
    "result in its loop": (15, ("RESULT", F32, 1, (10,), 0), "stands in its loop"),
    "step": (8, ("LOOP", IDX, 1, (3, 4), 0), "positive integer"),
    "constant kind": (7, ("CONST", F32, 1, (), 0), "a float32 constant is a Python float"),
    "constant range": (7, ("CONST", dtypes.uint8, 1, (), 256), "does not fit uint8"),
    "comparison": (15, ("CMPLT", F32, 1, (13, 14), None), "a comparison gives bool"),
    "bits of floats": (15, ("XOR", F32, 1, (13, 14), None), "bools and integers"),
    "float function of ints": (12, ("SQRT", IDX, 1, (9,), None), "defined for floats"),
    "where": (15, ("WHERE", F32, 1, (13, 14, 11), None), "condition"),
    "splat": (15, ("SPLAT", I32, 4, (13,), None), "keeps the type float32"),
    "extract": (15, ("EXTRACT", F32, 1, (13,), 1), "one of 1 lanes"),
    "shuffle": (15, ("SHUFFLE", F32, 2, (13, 14), (0, 2)), "lane numbers below 2"),
    "bitcast": (15, ("BITCAST", dtypes.float64, 1, (13,), None), "differ in width"),
    "scratch": (2, ("SCRATCH", F32, 1, (), 8), "multiples of 64"),
    "products": (12, ("MMAWAIT", IDX, 1, (9,), -1), "how many groups"),
    "tile": (12, ("MMAWAIT", IDX, 1, (9, 9), 0), "takes one operand"),
    "temp": (2, ("TEMP", F32, 1, (), 0), "has 0 temporaries"),
    "variable": (3, ("VAR", IDX, 1, (), "n"), "variables are"),
}


@pytest.mark.parametrize("name", BREAKS)
def test_validation_refuses(name: str) -> None:
    at, instr, message = BREAKS[name]
    good = dot(5, 7)
    validate(good)
    code = list(good.code[0])
    code[at] = Instruction(*instr)
    with pytest.raises(CompileError, match=message):
        validate(Program(good.spec, (tuple(code),)))
