"""Every fault that the toy device reports, planted into a sum over the threads of each group:

    y[i] = Σ x[i, t]        each thread puts its element into shared memory; behind a barrier the first thread sums them up
"""
from __future__ import annotations

import re

import numpy as np
import pytest

from svod.compile.lower.builder import Builder
from svod.compile.lower.linear import format_linear, validate
from svod.compile.lower.program import PhaseSpec, Program, ProgramSpec
from svod.core.ir.dtype import dtypes
from svod.errors import CompileError
from tests.interpreted import interpret
from tests.toy_backend.interpreter import DeviceFault, run_program

GROUPS, THREADS = 5, 8
F32, INDEX, BOOL, VOID = dtypes.float32, dtypes.index, dtypes.bool, dtypes.void


def sum_of_groups(fault: str = "") -> Program:
    """The program with one planted fault."""
    b = Builder()
    x, y = (b.pure("ARG", F32, 1, (), slot) for slot in (0, 1))
    shared = b.pure("SHARED", F32, 1, (), 0)
    thread, zero = b.pure("LOCAL_ID", INDEX, 1, ()), b.index(0)
    first = b.alu("CMPEQ", BOOL, 1, thread, zero)
    i, _ = b.open(b.pure("BEGIN", INDEX, 1, ()), b.pure("END_", INDEX, 1, ()), 1)
    value = b.load("LOAD", F32, 1, (x, b.add(b.mul(i, THREADS), thread)), 0)
    if fault == "unwritten":        # the last thread stores nothing
        b.store("STORE", F32, 1, (shared, thread, value, b.alu("CMPLT", BOOL, 1, thread, b.index(THREADS - 1))), (0, False))
    else:
        b.store("STORE", F32, 1, (shared, zero if fault == "one slot" else thread, value), (0, False))
    if fault == "some threads":     # once more, by the first three threads only
        b.store("BARRIER", VOID, 1, (), None)
        some = b.alu("WHERE", INDEX, 1, b.alu("CMPLT", BOOL, 1, thread, b.index(3)), b.index(1), zero)
        loop, _ = b.open(zero, some, 1)
        b.store("BARRIER", VOID, 1, (), None)
        b.close(loop)
    elif fault == "other barriers":     # every thread waits once, but not at the same barrier
        for lower in (True, False):
            condition = b.alu("CMPLT", BOOL, 1, thread, b.index(4)) if lower else b.alu("CMPLE", BOOL, 1, b.index(4), thread)
            loop, _ = b.open(zero, b.alu("WHERE", INDEX, 1, condition, b.index(1), zero), 1)
            b.store("BARRIER", VOID, 1, (), None)
            b.close(loop)
    elif fault != "no barrier":
        b.store("BARRIER", VOID, 1, (), None)
    t, (acc,) = b.open(zero, b.index(THREADS), 1, (b.const(F32, 1, 0.0),))
    element = b.load("LOAD", F32, 1, (shared, t), 1 if fault == "beyond shared memory" else 0, ordered=True)
    (total,) = b.close(t, (b.alu("ADD", F32, 1, acc, element),))
    mask = () if fault == "all threads store" else (first,)
    at = zero if fault == "all groups store" else i
    b.store("STORE", F32, 1, (y, at, total, *mask), (1 if fault == "beyond the end" else 0, False))
    b.close(i)
    phase = PhaseSpec("svod_p0", GROUPS, 1, 0, block=THREADS, shared_bytes=4 * THREADS)
    return Program(ProgramSpec("sums", ((F32, GROUPS * THREADS), (F32, GROUPS)), (1,), (), (phase,), ins=(0,)), (b.finish(),))


@pytest.mark.parametrize("seed", range(3))
def test_without_a_fault_the_sums_are_right(seed: int) -> None:
    program = sum_of_groups()
    validate(program)
    x, y = np.arange(GROUPS * THREADS, dtype=np.float32), np.empty(GROUPS, np.float32)
    run_program(program, [x, y], seed=seed)
    assert y.tolist() == x.reshape(GROUPS, THREADS).sum(1).tolist()
    y[:] = 0
    interpret(program, [x, y], slices=2)
    assert y.tolist() == x.reshape(GROUPS, THREADS).sum(1).tolist()


@pytest.mark.parametrize(("fault", "report"), [
    ("no barrier", "threads . and . of a group, without a barrier between them, touch element|which no thread of the group has written"),
    ("one slot", "threads . and . of a group, without a barrier between them, touch element 0 of shared memory"),
    ("some threads", "5 of the 8 threads of the group do not reach it"),
    ("other barriers", "4 of the 8 threads of the group do not reach it"),
    ("beyond the end", "touches element 5 of argument 1, which has 5"),
    ("beyond shared memory", "touches element 8 of shared memory from byte 0, which has 8|element 7 of shared memory"),
    ("all threads store", "threads . and . of a group, without a barrier between them, touch element . of argument 1"),
    ("all groups store", "groups . and . of a phase touch element 0 of argument 1"),
    ("unwritten", "element 7 of shared memory from byte 0, which no thread of the group has written"),
])
@pytest.mark.parametrize("seed", range(3))
def test_a_planted_fault_is_reported(fault: str, report: str, seed: int) -> None:
    x, y = np.ones(GROUPS * THREADS, np.float32), np.empty(GROUPS, np.float32)
    with pytest.raises(CompileError) as error:
        run_program(sum_of_groups(fault), [x, y], seed=seed)
    assert re.search(report, str(error.value)), str(error.value)
    assert issubclass(DeviceFault, CompileError)


@pytest.mark.parametrize("fault", ["some threads", "other barriers"])
def test_validation_refuses_a_barrier_in_a_loop_that_threads_may_run_differently(fault: str) -> None:
    with pytest.raises(CompileError, match=r"BARRIER.*a different number of times"):
        validate(sum_of_groups(fault))


def test_linear_with_groups_as_text() -> None:
    text = format_linear(sum_of_groups())
    assert "phase svod_p0: extent 5, threads 1, scratch 0, groups of 8 threads, shared 32" in text
    assert "LOCAL_ID index" in text and "SHARED float32 [0]" in text and "\n    BARRIER\n" in text


def test_groups_are_a_part_of_the_digest() -> None:
    program = sum_of_groups()
    other = PhaseSpec("svod_p0", GROUPS, 1, 0, block=THREADS, shared_bytes=64)
    spec = ProgramSpec(program.spec.name, program.spec.params, (1,), (), (other,), ins=(0,))
    assert Program(spec, program.code).digest != program.digest
