"""Random chains over the corpus with loops bound to the threads of a group: the LLVM IR for NVIDIA's GPUs gives right numbers in the
emulator, and ptxas accepts it."""
from __future__ import annotations

import random
import re
from dataclasses import replace
from itertools import product

import numpy as np
import pytest

from svod.compile.cuda import ptxas
from svod.compile.cuda.ptx import emit_ptx
from svod.compile.cuda.render import dynamic_bytes, render, without_assumptions
from svod.compile.cuda.targets import ARCHITECTURES, STATIC_SHARED
from svod.compile.lower.lower import lower
from svod.compile.lower.program import Program
from svod.core.cost.groups.rows import ROWS
from svod.core.cost.template import schedule
from svod.core.ir.dtype import DType, dtypes
from svod.core.kernel.apply import apply_opts
from svod.core.kernel.kernel import Kernel
from svod.core.kernel.scheduler import Opt, Scheduler
from svod.errors import KernelOptError
from svod.tensor import Tensor
from tests.agreement import Case
from tests.chain_runs import KERNELS, VARIABLE, case_of, draw_groups, draw_variable, each_part, part_of, run_chains
from tests.chains import group_state
from tests.compile.cuda.emulator import run_program
from tests.compile.cuda.running import check, run
from tests.compile.cuda.target import card_target
from tests.core.corpus import kernel_of
from tests.draws import a_half, a_quarter, chains, count
from tests.hand_kernels import row_sums
from tests.toy_backend.test_faults import sum_of_groups

TARGET = card_target("sm_90", group_threads=64)
GENERIC = re.compile(r"\b(?:ld|st)(?:\.v\d)?\.[bfus]\d+")


@each_part
def test_random_chains_on_the_cpu(part: int) -> None:
    run_chains("cuda", part_of(part), chains(0.1), draw_groups(TARGET, 8), run, {"ran": 0.9, "groups": 0.6})


@pytest.mark.parametrize("name", VARIABLE)
def test_extents_that_depend_on_variables(name: str) -> None:
    run_chains("cuda, variables", [name], count(4), draw_variable(TARGET), run, {"ran": 0.5})


@pytest.mark.parametrize("name", a_quarter(sorted(KERNELS)[::6]))
def test_ptxas_accepts_random_chains(name: str) -> None:
    """ptxas accepts random chains of every sixth kernel for a random architecture, also without assumptions about arguments."""
    if ptxas.ptxas_version() is None:
        pytest.skip("there is no ptxas on PATH: the CUDA toolkit has it")
    rng = random.Random(f"ptxas {name}")
    arch = rng.choice(sorted(ARCHITECTURES))
    target = card_target(arch)
    while True:
        try:
            program = lower(group_state(rng, Scheduler(case_of(name).kernel, target), rng.randint(0, 6)))
            break
        except KernelOptError:
            continue
    source = render(program, target)
    for ir in (source, without_assumptions(source)):
        text = emit_ptx(ir, arch)
        assert not GENERIC.search(text), "LLVM knows where each pointer points to"
        _, reports = ptxas.assemble(text, arch)
        assert [r.symbol for r in reports] == sorted(p.symbol for p in program.spec.phases)


@pytest.mark.parametrize(("dtype", "shape"), a_half(product(
    [dtypes.float32, dtypes.bfloat16, dtypes.float64], [(48, 88), (40, 3), (3, 40), (21, 10)])), ids=str)
def test_a_transpose_in_registers(dtype: DType, shape: tuple[int, int]) -> None:
    """Squares are transposed in registers: all accesses to global memory have 16 bytes if these divide both axes. A short axis is not
    cut."""
    kernel = Kernel(kernel_of(Tensor(np.zeros(shape, np.float32)).cast(dtype.name).realize().transpose(0, 1).contiguous()))
    width = 16 // dtype.itemsize
    chain = [Opt("UPCAST", "o0", 0 if shape[1] < width else width), Opt("UPCAST", "o1", 0 if shape[0] < width else width),
             *[Opt("LOCAL", f"o{1 - a}", 3) for a in range(2) if shape[a] > 2 * width]]
    program = lower(apply_opts(Scheduler(kernel, TARGET), chain))
    accesses = [line.split()[0] for line in emit_ptx(render(program, TARGET), "sm_90").split("\n") if ".global." in line and "[" in line]
    assert all(a.endswith(("v4.b32", "v2.b64")) for a in accesses) == (shape == (48, 88)), accesses
    case = Case(kernel)
    args = case.fresh()
    run_program(program, TARGET, args)
    case.check(args, "a transpose")


@pytest.mark.slow
@pytest.mark.parametrize("columns", [3, 16, 31, 33, 64, 96, 129])
def test_rows_in_registers(columns: int) -> None:
    """A softmax and a norm keep short rows in one thread and longer ones in several. Each element is loaded once if none is masked."""
    for row in (lambda x: x.softmax(-1), lambda x: x / ((x * x).mean(-1, keepdim=True) + 1.0).sqrt()):
        kernel = Kernel(kernel_of(row(Tensor(np.zeros((6, columns), np.float32)))))
        case, base = Case(kernel, columns), Scheduler(kernel, TARGET)
        unrolled = [Opt("UNROLL", f"{s.name}.r0", 0) for s in kernel.stages if s.has_reduce]
        whole = [apply_opts(base, [*unrolled, Opt("UPCAST", "o1", 0), Opt("LOCAL", "o0", 2)])] if columns < 32 else []
        for state in [*whole, *schedule(ROWS, base)]:
            program = check(case, state)
            threads = next(o.arg for o in state.applied_opts if o.op == "GROUP") if state not in whole else 1
            if state not in whole and columns % threads == 0:
                loads = re.findall(r"ld\.global\.nc(?:\.v(\d))?", emit_ptx(render(program, TARGET), "sm_90"))
                assert sum(int(n or 1) for n in loads) == columns // threads, state


@pytest.mark.parametrize("rows", [1, 5])
def test_a_warp_adds_the_parts_of_a_sum(rows: int) -> None:
    kernel = Kernel(row_sums(rows, 2047))
    program = lower(apply_opts(Scheduler(kernel, TARGET), [Opt("GROUP", "r0", 4), Opt("SPLITK", "r0", 64)]))
    assert [p.block for p in program.spec.phases] == [4, 32] and "shfl.sync" in render(program, TARGET)
    case = Case(kernel, rows)
    args = case.fresh()
    run_program(program, TARGET, args)
    case.check(args, "parts that a warp adds")


def test_more_shared_memory_than_a_kernel_may_declare() -> None:
    program = sum_of_groups()
    phase = replace(program.spec.phases[0], shared_bytes=STATIC_SHARED + 64)
    large = Program(replace(program.spec, phases=(phase,)), program.code)
    assert dynamic_bytes(phase) == phase.shared_bytes
    values = np.arange(program.spec.params[0][1], dtype=np.float32)
    small_out, large_out = (np.zeros(program.spec.params[1][1], np.float32) for _ in range(2))
    run_program(program, TARGET, [values, small_out])
    run_program(large, TARGET, [values, large_out])
    np.testing.assert_array_equal(large_out, small_out)
    assert small_out.any()
    if ptxas.ptxas_version() is None:
        pytest.skip("there is no ptxas on PATH: the CUDA toolkit has it")
    report, = ptxas.assemble(emit_ptx(render(large, TARGET), "sm_90"), "sm_90")[1]
    assert report.shared == 0, "what a launch asks for is not declared"
