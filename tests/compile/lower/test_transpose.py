"""Squares of strided accesses become transpositions in registers: results stay the same, and no strided access remains."""
from __future__ import annotations

import numpy as np
import pytest

from svod.compile.llvm.codegen import compile_object
from svod.compile.llvm.loaded import LoadedProgram, call_phase
from svod.compile.llvm.render import render
from svod.compile.lower.linear import validate
from svod.compile.lower.program import Instruction, PhaseSpec, Program, ProgramSpec
from svod.compile.lower.transpose import transpose_squares
from svod.core.ir.dtype import DType, dtypes, to_numpy
from svod.core.machine.target import Target
from tests.compile.native import TARGETS
from tests.interpreted import interpret

INDEX = dtypes.index


def strided(dtype: DType, lanes: int, stride: int, count: int, *, store: bool, swap: bool = False, active: int | None = None) -> Program:
    """Make a program of `count` strided loads of x that are stored contiguously to y, or of contiguous loads stored with the stride.
    `active`: number of lanes that are loaded; the others are 7."""
    code = [("ARG", dtype, 1, (), 0), ("ARG", dtype, 1, (), 1), ("CONST", INDEX, 1, (), 0), ("BEGIN", INDEX, 1, (), None),
            ("END_", INDEX, 1, (), None), ("LOOP", INDEX, 1, (3, 4), 1)]
    extra: tuple[int, ...] = ()
    if active is not None:
        code += [("VCONST", dtypes.bool, lanes, (), tuple(i < active for i in range(lanes))), ("CONST", dtype, lanes, (), 7)]
        extra = (len(code) - 2, len(code) - 1)
    order = list(range(count))
    if swap:
        order.reverse()
    for j in order:
        if store:
            code.append(("LOAD", dtype, lanes, (1, 2), j * lanes))
            code.append(("STORES", dtype, lanes, (0, 2, len(code) - 1), (j, stride)))
        else:
            code.append(("LOADS", dtype, lanes, (1, 2, *extra), (j, stride)))
            code.append(("STORE", dtype, lanes, (0, 2, len(code) - 1), (j * lanes, False)))
    code.append(("ENDLOOP", dtypes.void, 1, (5,), None))
    size = max(lanes * stride + count, count * lanes) + 1
    spec = ProgramSpec("strided", ((dtype, size), (dtype, size)), (0,), (), (PhaseSpec("p", 1, 1, 0),))
    return Program(spec, (tuple(Instruction(*i) for i in code),))


def run(program: Program, dtype: DType) -> np.ndarray:
    size = program.spec.params[0][1]
    x = np.arange(1, size + 1).astype(to_numpy(dtype))
    y = np.zeros(size, to_numpy(dtype))
    validate(program)
    interpret(program, [y, x])
    return y


@pytest.mark.parametrize("swap", [False, True])
@pytest.mark.parametrize("store", [False, True])
@pytest.mark.parametrize(("dtype", "lanes", "stride", "count"), [
    (dtypes.float32, 16, 17, 16), (dtypes.float32, 16, 64, 35), (dtypes.float64, 8, 8, 8), (dtypes.int8, 4, 9, 5),
    (dtypes.int16, 8, 31, 20)])
def test_squares_are_transposed(dtype: DType, lanes: int, stride: int, count: int, store: bool, swap: bool) -> None:
    before = strided(dtype, lanes, stride, count, store=store, swap=swap)
    after = Program(before.spec, (tuple(transpose_squares(list(before.code[0]))),))
    np.testing.assert_array_equal(run(after, dtype), run(before, dtype))
    left = sum(i[0] in ("LOADS", "STORES") for i in after.code[0])
    assert left == count % lanes


@pytest.mark.slow
@TARGETS
@pytest.mark.parametrize("store", [False, True])
@pytest.mark.parametrize("dtype", [dtypes.float32, dtypes.float64, dtypes.float16, dtypes.bfloat16, dtypes.int8, dtypes.uint16,
                                   dtypes.int32, dtypes.int64, dtypes.bool], ids=lambda d: d.name)
def test_transposed_registers_are_what_machine_code_computes(dtype: DType, store: bool, target: Target) -> None:
    """Machine code of the shuffles, with fences between their levels, transposes vectors of one, half a and two registers. The values are
    no NaNs, whose bits may change."""
    rng = np.random.default_rng(dtype.itemsize)
    register = target.vector_bytes // dtype.itemsize
    for lanes in {n for n in (4, register // 2, register, 2 * register) if 4 <= n <= 64}:
        before = strided(dtype, lanes, lanes + 3, lanes, store=store)
        after = Program(before.spec, (tuple(transpose_squares(list(before.code[0]))),))
        size = before.spec.params[0][1]
        x = rng.integers(0, 2 if dtype.kind == "b" else 120, size * dtype.itemsize, np.uint8).view(to_numpy(dtype))
        want, got = np.zeros_like(x), np.zeros_like(x)
        interpret(before, [want, x])
        for final in (False, True):
            got[:] = 0
            with LoadedProgram(compile_object(render(after, target), target, final), ("p",)) as loaded:
                call_phase(loaded.addresses[0], [got.ctypes.data, x.ctypes.data], [], 0, 0, 1)
            np.testing.assert_array_equal(got.view(np.uint8), want.view(np.uint8), err_msg=f"{lanes} lanes")


@pytest.mark.parametrize("active", [0, 1, 11, 16])
def test_a_mask_per_lane_is_one_per_row_of_the_square(active: int) -> None:
    before = strided(dtypes.int32, 16, 40, 33, store=False, active=active)
    after = Program(before.spec, (tuple(transpose_squares(list(before.code[0]), ragged=True)),))
    np.testing.assert_array_equal(run(after, dtypes.int32), run(before, dtypes.int32))
    assert sum(i[0] == "LOADS" for i in after.code[0]) == 1
    assert list(transpose_squares(list(before.code[0]))) == list(before.code[0])


@pytest.mark.parametrize("store", [False, True])
@pytest.mark.parametrize(("dtype", "lanes", "stride", "count"), [
    (dtypes.float32, 16, 14, 14), (dtypes.float32, 16, 40, 6), (dtypes.float32, 16, 64, 37), (dtypes.float64, 8, 9, 7),
    (dtypes.bool, 16, 16, 23), (dtypes.int16, 8, 31, 3)])
def test_parts_of_squares_are_transposed_under_masks(dtype: DType, lanes: int, stride: int, count: int, store: bool) -> None:
    before = strided(dtype, lanes, stride, count, store=store)
    after = Program(before.spec, (tuple(transpose_squares(list(before.code[0]), ragged=True)),))
    np.testing.assert_array_equal(run(after, dtype), run(before, dtype))
    rest = count % lanes
    assert sum(i[0] in ("LOADS", "STORES") for i in after.code[0]) == (rest if 3 * rest < lanes else 0)
    assert sum(len(i[3]) == (3, 4)[i[0] == "LOAD"] + (i[0] == "STORE") for i in after.code[0] if i[0] in ("LOAD", "STORE")) \
        == (lanes if rest and 3 * rest > lanes else 0)


def test_rows_closer_than_their_part_of_a_square_stay() -> None:
    """Stores of rows that are closer than a row of the square are not changed, as the rows of the square would overlap."""
    code = list(strided(dtypes.float32, 16, 9, 10, store=True).code[0])
    assert transpose_squares(code, ragged=True) is code


def test_what_is_no_square_stays() -> None:
    program = strided(dtypes.float32, 16, 17, 15, store=False)
    code = list(program.code[0])
    assert transpose_squares(code) is code


def test_loads_do_not_move_above_stores_to_the_same_memory() -> None:
    dtype, lanes = dtypes.float32, 4
    code = [("ARG", dtype, 1, (), 0), ("CONST", INDEX, 1, (), 0)]
    for j in range(lanes):
        code.append(("LOADS", dtype, lanes, (0, 1), (j, 8)))
        code.append(("STORE", dtype, lanes, (0, 1, len(code) - 1), (40 + j * lanes, False)))
    code = [Instruction(*i) for i in code]
    assert transpose_squares(code) is code


def test_stores_to_one_place_keep_their_order() -> None:
    """Of two stores to one element the later one stays last."""
    code = list(strided(dtypes.float32, 4, 8, 4, store=True).code[0])
    assert transpose_squares(code) is not code
    twice = [*code[:-1], Instruction("STORES", dtypes.float32, 4, (0, 2, len(code) - 3), (1, 8)), code[-1]]
    assert transpose_squares(twice) is twice
