"""PIPELINE: copies that run ahead of what reads them. The toy device makes asynchronous copies at the WAIT for them, not before."""
from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest

from svod.compile.lower.linear import validate
from svod.compile.lower.lower import lower
from svod.compile.lower.program import Instruction, Program
from svod.core.ir.dtype import dtypes
from svod.core.kernel.apply import apply_opts
from svod.core.kernel.kernel import Kernel
from svod.core.kernel.scheduler import Opt, Scheduler
from svod.core.machine.target import Target
from svod.errors import CompileError
from tests.agreement import Case
from tests.core.corpus import CORPUS
from tests.hand_kernels import gemm
from tests.toy_backend.interpreter import run_program
from tests.toy_backend.target import TOY
from tests.toy_backend.test_shared import TILED, checked, ops

BULK = replace(TOY, bulk_row=16)
WITHOUT = replace(TOY, has_async_copies=False)


@pytest.mark.slow
@pytest.mark.parametrize(("extents", "buffers", "target"), [
    *[pytest.param(extents, buffers, target, id=f"{'-'.join(map(str, extents))}-{how}-{buffers}")
      for extents in ((16, 32, 32), (17, 33, 30), (8, 16, 16), (9, 17, 70), (8, 19, 17))
      for how, target, numbers in (("asynchronous", TOY, (2, 3, 4)), ("by way of registers", WITHOUT, (3,))) for buffers in numbers],
    pytest.param((17, 33, 30), 2, WITHOUT, id="17-33-30-by way of registers-2"),
])
def test_products(extents: tuple[int, int, int], buffers: int, target: Target) -> None:
    """Products with complete and partial tiles, more buffers than iterations, and a remainder after the loop."""
    program = checked(gemm(*extents), [*TILED, ["PIPELINE", "r0", buffers]], target, seeds=1)
    assert ("COPY_ASYNC" in ops(program)) == target.has_async_copies


@pytest.mark.slow
@pytest.mark.parametrize("buffers", [2, 3])
@pytest.mark.parametrize(("extents", "bulk"), [((16, 32, 32), True), ((8, 16, 16), True), ((16, 32, 64), True), ((17, 33, 30), False),
                                               ((9, 17, 70), False)])
def test_rows_in_bulk(extents: tuple[int, int, int], bulk: bool, buffers: int) -> None:
    program = checked(gemm(*extents), [*TILED, ["PIPELINE", "r0", buffers]], BULK, seeds=1)
    assert ("COPY_BULK" in ops(program)) == bulk and ("COPY_ASYNC" in ops(program)) != bulk


@pytest.mark.parametrize("op", ["BULK_BEGIN", "COPY_BULK", "BULK_WAIT", "BARRIER"])
def test_what_is_missing_of_bulk_copies_is_found(op: str) -> None:
    program = lower(apply_opts(Scheduler(Kernel(gemm(16, 32, 64)), BULK), [Opt.from_json(o) for o in [*TILED, ["PIPELINE", "r0", 2]]]))
    code = tuple(Instruction("COMMIT", dtypes.void, 1, (), None) if i.op == op else i for i in program.code[0])
    case = Case(Kernel(gemm(16, 32, 64)))
    args = case.fresh()
    with pytest.raises((CompileError, AssertionError)), np.errstate(all="ignore"):
        run_program(replace(program, code=(code,)), args, seed=1)
        case.check(args, "toy device")


@pytest.mark.parametrize("target", [TOY, BULK], ids=["by threads", "in bulk"])
def test_each_barrier_is_needed(target: Target) -> None:
    program = lower(apply_opts(Scheduler(Kernel(gemm(16, 32, 64)), target), [Opt.from_json(o) for o in [*TILED, ["PIPELINE", "r0", 2]]]))
    barriers = [k for k, i in enumerate(program.code[0]) if i.op == "BARRIER"]
    for k in barriers:
        code = (*program.code[0][:k], Instruction("COMMIT", dtypes.void, 1, (), None), *program.code[0][k + 1:])
        with pytest.raises(CompileError):
            run_program(replace(program, code=(code,)), Case(Kernel(gemm(16, 32, 64))).fresh(), seed=1)
    assert len(barriers) == (3 if target is BULK else 1)


@pytest.mark.slow
def test_buffers_are_alike_before_the_loop_and_in_it() -> None:
    """s0 is read from the loop's position on and from its beginning, which in the first iteration are the same."""
    chain = [["GROUPTOP", "s1.r0", 3], ["LOCAL", "o0", 2], ["STAGE", "s1", "r0"], ["UPCAST", "r0", 2], ["STAGE", "s0", "r0"]]
    assert "COPY_ASYNC" in ops(checked(CORPUS["mean_var"](), [*chain, ["PIPELINE", "r0", 2]]))


def test_one_barrier_an_iteration() -> None:
    program = checked(gemm(16, 32, 64), [*TILED, ["PIPELINE", "r0", 2]])
    code = program.code[0]
    loops = [i for i, instr in enumerate(code) if instr.op == "LOOP"]
    ends = {instr.src[0]: i for i, instr in enumerate(code) if instr.op == "ENDLOOP"}
    main = next(i for i in loops if code[i].src[2:] and any(code[k].op == "BARRIER" for k in range(i, ends[i])))
    assert [code[k].op for k in range(main, ends[main])].count("BARRIER") == 1


@pytest.mark.slow
@pytest.mark.parametrize("name", ["conv3x3", "conv1x1", "gemm_batched", "gemm_f16", "gemm_tn", "gemm_nt"])
@pytest.mark.parametrize("target", [TOY, WITHOUT], ids=["asynchronous", "by way of registers"])
def test_other_contractions(name: str, target: Target) -> None:
    kernel = Kernel(CORPUS[name]())
    out = kernel.stages[kernel.output]
    widest = max(out.reds, key=lambda a: kernel.axes[a].extent)
    state = Scheduler(kernel, target)
    last = [a for a in out.outs if kernel.axes[a].extent > 3][-2:]
    loop = kernel.axes[widest].name
    chain = [*(Opt("LOCAL", kernel.axes[a].name, 4) for a in last), Opt("TILE", loop, 2)]
    chain += [Opt("STAGE", s.name, loop) for s in kernel.stages if not s.is_output]
    state = apply_opts(state, [*chain, Opt("PIPELINE", loop, 2)])
    program, case = lower(state), Case(kernel)
    validate(program)
    assert program.spec.phases[-1].shared_bytes
    args = case.fresh()
    run_program(program, args, seed=1)
    case.check(args, name)


def without(op: str, keep: Callable[[Instruction], bool] = lambda i: False) -> Program:
    """A pipelined product without one kind of its instructions."""
    program = lower(apply_opts(Scheduler(Kernel(gemm(16, 32, 64)), TOY), [Opt.from_json(o) for o in [*TILED, ["PIPELINE", "r0", 2]]]))
    code = list(program.code[0])
    for i, instr in enumerate(code):
        if instr.op == op and not keep(instr):
            code[i] = Instruction("COMMIT", instr.dtype, 1, (), None) if op != "COMMIT" else Instruction("WAIT", instr.dtype, 1, (), 99)
    return replace(program, code=(tuple(code),))


@pytest.mark.parametrize("op", ["WAIT", "COMMIT", "BARRIER"])
def test_what_is_missing_is_found(op: str) -> None:
    """Without its wait a copy has not ended where it is read; without the barrier others do not see it."""
    case = Case(Kernel(gemm(16, 32, 64)))
    args = case.fresh()
    with pytest.raises((CompileError, AssertionError)), np.errstate(all="ignore"):
        run_program(without(op), args, seed=1)
        case.check(args, "toy device")
