"""Random chains with loops bound to the threads of a group, over the corpus: the LLVM IR for NVIDIA's GPUs gives the right numbers, run on
the CPU, and ptxas accepts it."""
from __future__ import annotations

import random
import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pytest

from svod.compile.cuda import ptxas
from svod.compile.cuda.ptx import emit_ptx
from svod.compile.cuda.render import block_of, dynamic_bytes, render, without_assumptions
from svod.compile.cuda.targets import ARCHITECTURES, STATIC_SHARED
from svod.compile.lower.lower import lower
from svod.compile.lower.program import Program
from svod.core.cost.groups.rows import ROWS
from svod.core.cost.template import schedule
from svod.core.graph import graph
from svod.core.ir.dtype import DType, dtypes
from svod.core.ir.uop import Ops
from svod.core.ir.variable import without_binds
from svod.core.kernel.apply import apply_opts
from svod.core.kernel.kernel import Kernel
from svod.core.kernel.scheduler import Opt, Scheduler
from svod.core.schedule.schedule import create_schedule
from svod.core.spec.evaluate import evaluate
from svod.errors import KernelOptError
from svod.tensor import Tensor
from tests.agreement import Case, draw
from tests.compile.cuda.emulator import run_program
from tests.compile.cuda.target import card_target
from tests.core.corpus import kernel_of
from tests.draws import count
from tests.hand_kernels import row_sums
from tests.toy_backend.test_corpus import KERNELS, VARIABLE, case_of, group_state
from tests.toy_backend.test_faults import sum_of_groups

TARGET = card_target("sm_90", group_threads=64)
MOST_THREADS = 20_000       # that a program launches
GENERIC = re.compile(r"\b(?:ld|st)(?:\.v\d)?\.[bfus]\d+")


@pytest.fixture(scope="module")
def ran() -> Iterator[Counter[str]]:
    """Chains by what became of them. Fails at the end of the module where few ran."""
    seen: Counter[str] = Counter()
    yield seen
    if seen["drawn"] >= 100:
        assert seen["ran"] >= 0.6 * seen["drawn"] and seen["groups"] >= 0.4 * seen["ran"], dict(seen)


def threads_of(program: Program) -> int:
    return sum(p.extent * block_of(p) // (128 if p.block == 1 else 1) for p in program.spec.phases)


@pytest.mark.parametrize("name", KERNELS)
def test_random_chains_on_the_cpu(name: str, ran: Counter[str]) -> None:
    case = case_of(name)
    for seed in range(count(1)):
        rng = random.Random(f"cuda {name} {seed}")
        state = group_state(rng, Scheduler(case.kernel, TARGET), rng.randint(0, 8))
        ran["drawn"] += 1
        try:
            program = lower(state)
        except KernelOptError:
            continue
        if threads_of(program) > MOST_THREADS:
            continue
        args = case.fresh()
        try:
            run_program(program, TARGET, args, seed=seed)
            case.check(args, "LLVM IR for NVIDIA's GPUs")
        except Exception as e:
            raise AssertionError(f"{name}: {[o.to_json() for o in state.applied_opts]}: {e}") from e
        ran.update(ran=1, groups=any(p.block > 1 for p in program.spec.phases))


@pytest.mark.parametrize("name", VARIABLE)
def test_extents_that_depend_on_variables(name: str) -> None:
    sink, _, _ = without_binds(graph.sink(VARIABLE[name]().uop))
    call, = create_schedule(sink).calls
    kernel, ran = Kernel(call.ast), 0
    for seed in range(count(4)):
        rng = random.Random(f"cuda variable {name} {seed}")
        state = group_state(rng, Scheduler(kernel, TARGET), rng.randint(0, 6))
        try:
            program = lower(state)
        except KernelOptError:
            continue
        if threads_of(program) > MOST_THREADS:
            continue
        values = {u.arg[0]: rng.randint(*u.arg[1:3]) for u in kernel.ast.walk(Ops.DEFINE_VAR)}
        numbers = np.random.default_rng(seed)
        args = [draw(p.dtype, p.arg.size, numbers, p.arg.vmin, p.arg.vmax) for p in kernel.params]
        want, = evaluate(kernel.ast, args, values)
        run_program(program, TARGET, args, values, seed)
        chain = f"{values}: {[o.to_json() for o in state.applied_opts]}"
        np.testing.assert_allclose(args[kernel.outs[0]], want, rtol=1e-4, atol=1e-5, err_msg=chain)
        ran += 1
    assert ran >= 2


@pytest.mark.parametrize("name", sorted(KERNELS)[::6])
def test_ptxas_accepts_random_chains(name: str) -> None:
    """Of every sixth kernel, for an architecture drawn at random; without assumptions about arguments as well."""
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


@pytest.mark.parametrize("dtype", [dtypes.float32, dtypes.bfloat16, dtypes.float64], ids=str)
@pytest.mark.parametrize("shape", [(48, 88), (40, 3), (3, 40), (21, 10)])
def test_a_transpose_in_registers(dtype: DType, shape: tuple[int, int]) -> None:
    """Squares are turned there: all accesses of global memory are of 16 bytes, where those divide both axes. A short axis is whole."""
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
    """Softmax and a norm, short rows in one thread, longer ones in several. Each element is loaded once, where none are masked."""
    for row in (lambda x: x.softmax(-1), lambda x: x / ((x * x).mean(-1, keepdim=True) + 1.0).sqrt()):
        kernel = Kernel(kernel_of(row(Tensor(np.zeros((6, columns), np.float32)))))
        case, base = Case(kernel, columns), Scheduler(kernel, TARGET)
        unrolled = [Opt("UNROLL", f"{s.name}.r0", 0) for s in kernel.stages if s.has_reduce]
        whole = [apply_opts(base, [*unrolled, Opt("UPCAST", "o1", 0), Opt("LOCAL", "o0", 2)])] if columns < 32 else []
        for state in [*whole, *schedule(ROWS, base)]:
            program, args = lower(state), case.fresh()
            run_program(program, TARGET, args)
            case.check(args, str(state))
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
