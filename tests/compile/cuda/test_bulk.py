"""Bulk copies by cp.async.bulk and mbarriers, run in the emulator. Rows arrive at once, or when a thread waits for them."""
from __future__ import annotations

import random
import re
from dataclasses import replace

import numpy as np
import pytest

from svod.compile.cuda import ptxas
from svod.compile.cuda.intrinsics import check_intrinsics
from svod.compile.cuda.ptx import emit_ptx
from svod.compile.cuda.queue import grid_of
from svod.compile.cuda.render import block_of, render, without_assumptions
from svod.compile.lower.linear import validate
from svod.compile.lower.lower import lower
from svod.compile.lower.program import Program
from svod.core.cost.groups.group_cost import group_cost
from svod.core.ir.dtype import dtypes
from svod.core.kernel.apply import apply_opts
from svod.core.kernel.loop_nest import loop_nest
from svod.core.kernel.scheduler import Opt, Scheduler
from svod.core.machine.target import Target
from svod.errors import CompileError
from tests.agreement import Case
from tests.compile.cuda.emulator import DeviceFault, Emulated, run_program
from tests.compile.cuda.target import card_target
from tests.compile.lower.test_intrinsics import gemm
from tests.draws import count

BF16 = dtypes.bfloat16
BULK = 16               # bytes: rows of any length, also those that a card's target leaves to cp.async
TARGET = replace(card_target("sm_90", group_threads=128), bulk_row=BULK)
ROWS = [Opt("UPCAST", "o0", 2), Opt("LOCAL", "o0", 2), Opt("LOCAL", "o1", 2), Opt("TILE", "r0", 2), Opt("STAGE", "s0", "r0"),
        Opt("STAGE", "s1", "r0")]
EXTENTS = (64, 96, 101, 104, 127, 128)


def product(m: int, n: int, k: int, transposed: bool, buffers: int, target: Target = TARGET) -> tuple[Case, Scheduler]:
    kernel = gemm(m, n, k, BF16, BF16, transposed=transposed)
    chain = [Opt("TC", "r0", ("mma_bf16", "o0", "o1")), *ROWS, Opt("PIPELINE", "r0", buffers)]
    return Case(kernel, m), apply_opts(Scheduler(kernel, target), chain)


def bulk_copies(program: Program) -> int:
    return sum(i.op == "COPY_BULK" for code in program.code for i in code)


def run(case: Case, source: str, program: Program) -> None:
    """Run LLVM IR in the emulator, also IR with planted errors."""
    args = case.fresh()
    module, phase = Emulated(source, 1), program.spec.phases[0]
    module.launch(phase.symbol, grid_of(phase, phase.extent), block_of(phase), 0, [*(a.ctypes.data for a in args), 0, phase.extent])
    case.check(args, "LLVM IR for NVIDIA's GPUs")


@pytest.mark.slow
def test_random_shapes() -> None:
    """Random shapes include primes: rows that are cut off, or not aligned to 16 bytes, are not copied in bulk."""
    ran = {True: 0, False: 0}
    for seed in range(count(4)):
        rng = random.Random(f"bulk {seed}")
        extents = ((64, 64, 96), (101, 64, 70))[seed] if seed < 2 else (rng.choice(EXTENTS), rng.choice(EXTENTS), rng.choice((70, 72, 96)))
        case, state = product(*extents, rng.random() < 0.5, rng.randint(2, 4))
        program = lower(state)
        validate(program)
        args = case.fresh()
        run_program(program, TARGET, args, seed=seed)
        case.check(args, f"{extents}: {[o.to_json() for o in state.applied_opts]}")
        copied = any(stage.bulk_rows for stage in loop_nest(state).stages.values())
        assert copied == (bulk_copies(program) > 0), "what the cost model reads"
        ran[bulk_copies(program) > 0] += 1
    assert ran[True] and ran[False], ran


@pytest.mark.parametrize("arch", ["sm_90", "sm_90a"])
def test_ptxas_accepts_them(arch: str) -> None:
    target = replace(card_target(arch, group_threads=128), bulk_row=BULK)
    program = lower(product(64, 64, 96, True, 2, target)[1])
    source = render(program, target)
    plain = without_assumptions(source)
    assert bulk_copies(program) and "cp.async.bulk" in emit_ptx(source, arch)
    assert "cp.async.bulk" not in emit_ptx(plain, arch), "threads copy what is not aligned"
    if ptxas.ptxas_version() is None:
        pytest.skip("there is no ptxas on PATH: the CUDA toolkit has it")
    for ir in (source, plain):
        _, (report,) = ptxas.assemble(emit_ptx(ir, arch), arch)
        assert not report.spill_loads and not report.spill_stores
    if ptxas.tool("nvdisasm") is None and ptxas.tool("cuobjdump") is None:
        pytest.skip("there is no nvdisasm: the package nvidia-cuda-nvdisasm has it")
    assert "UBLKCP" in ptxas.disassemble(ptxas.assemble(emit_ptx(source, arch), arch)[0])


def test_arguments_that_are_not_aligned() -> None:
    case, state = product(64, 64, 96, False, 3)
    program = lower(state)
    run(case, without_assumptions(render(program, TARGET)), program)


BARRIER_IN_LOOP = r"(?s)(mbarrier\.try_wait.*?)  call void @llvm\.nvvm\.barrier\.cta\.sync\.aligned\.all\(i32 0\)\n"
FAULTS = {
    "no wait": (r'call i32 asm sideeffect "\{ \.reg \.pred p; mbarrier.*', "add i32 0, 1"),
    "another phase": (r"(mbarrier\.try_wait.*, i32 )%\w+\)", r"\g<1>1)"),
    "fewer bytes expected": (r"(mbarrier\.arrive\.expect_tx.*, i32 )\d+\)", r"\g<1>16)"),
    "more arrivals expected": (r"(mbarrier\.init\.shared\(.*, i32 )\d+\)", r"\g<1>1000)"),
    "left behind": (r"  call void @llvm\.nvvm\.mbarrier\.inval.*", ""),
    "before all have read": (BARRIER_IN_LOOP, r"\1"),
}


@pytest.mark.slow
@pytest.mark.parametrize("planted", FAULTS)
def test_faults_are_found(planted: str) -> None:
    """The emulator finds a missing wait: the read gives the old content of shared memory."""
    case, state = product(64, 64, 96, True, 2)
    program = lower(state)
    source = render(program, TARGET)
    run(case, source, program)
    changed = re.sub(*FAULTS[planted], source)
    assert changed != source
    with pytest.raises((AssertionError, DeviceFault)), np.errstate(all="ignore"):
        run(case, changed, program)


def test_older_architectures_have_none() -> None:
    source = render(lower(product(64, 64, 96, True, 2)[1]), TARGET)
    check_intrinsics(source, "sm_90")
    with pytest.raises(CompileError, match="svod does not know"):
        check_intrinsics(source, "sm_80")
    assert not bulk_copies(lower(product(64, 64, 96, True, 2, card_target("sm_80", group_threads=128))[1]))


def test_short_rows_are_left_to_the_threads() -> None:
    def rows(least: int) -> list[int]:
        program = lower(product(64, 64, 96, True, 2, replace(TARGET, bulk_row=least))[1])
        return [i.lanes * i.dtype.itemsize for code in program.code for i in code if i.op == "COPY_BULK"]
    shortest, longest = min(rows(BULK)), max(rows(BULK))
    assert min(rows(shortest)) == shortest
    assert shortest not in rows(shortest + 1) and not rows(longest + 1)
    assert longest < card_target("sm_90").bulk_row


@pytest.mark.parametrize("upcast", [16, 2])
def test_what_they_are_expected_to_cost(upcast: int) -> None:
    """The cost model prefers ordinary copies for rows of 512 and of 64 bytes, because a subgroup starts its bulk copies one after the
    other."""
    kernel = gemm(256, 4096, 4096, BF16, BF16)
    chain = [Opt("TC", "r0", ("mma_bf16", "o0", "o1")), Opt("UPCAST", "o1", upcast), Opt("LOCAL", "o1", 2), Opt("LOCAL", "o0", 2),
             Opt("TILE", "r0", 2), Opt("STAGE", "s0", "r0"), Opt("STAGE", "s1", "r0"), Opt("PIPELINE", "r0", 2)]
    by_threads, in_bulk = (group_cost(apply_opts(Scheduler(kernel, replace(TARGET, bulk_row=least)), chain)).cycles for least in (0, BULK))
    assert in_bulk > by_threads


@pytest.mark.slow
@pytest.mark.parametrize(("columns", "bulk"), [(512, True), (510, False)])
def test_rows_that_are_long_enough_for_a_card(columns: int, bulk: bool) -> None:
    """A tile of 256 columns has rows of 512 bytes. Rows of 510 elements do not all begin at a multiple of 16 bytes."""
    target, kernel = replace(card_target("sm_90"), bulk_row=512), gemm(16, columns, 96, BF16, BF16)
    chain = [Opt("TC", "r0", ("mma_bf16", "o0", "o1")), Opt("UPCAST", "o1", 16), Opt("LOCAL", "o1", 2), Opt("TILE", "r0", 2),
             Opt("STAGE", "s0", "r0"), Opt("STAGE", "s1", "r0"), Opt("PIPELINE", "r0", 2)]
    program, case = lower(apply_opts(Scheduler(kernel, target), chain)), Case(kernel, columns)
    args = case.fresh()
    run_program(program, target, args)
    case.check(args, "LLVM IR for NVIDIA's GPUs")
    copied = {(i.op, i.lanes * i.dtype.itemsize) for i in program.code[0] if i.op.startswith("COPY")}
    assert (("COPY_BULK", target.bulk_row) in copied) == bulk and ("COPY_ASYNC", 16) in copied
