"""Tests of kernels on an NVIDIA GPU: `pytest -m gpu`. Without a GPU each test is skipped with the reason. `.ci/gpu` also runs this file
under compute-sanitizer.

Layouts of matrix instructions, barriers and asynchronous copies are also checked in the emulator; these tests check the real hardware."""
from __future__ import annotations

import random
from collections import Counter
from dataclasses import replace

import pytest

from svod.compile.backend import Device
from svod.compile.lower.lower import lower
from svod.compile.lower.program import Program
from svod.compile.plan.execution_plan import ExecutionPlan
from svod.core.cost.groups.attention import ATTENTION
from svod.core.cost.groups.prices import GroupPrices
from svod.core.cost.template import schedule
from svod.core.ir.dtype import DType, dtypes
from svod.core.kernel.apply import apply_opts
from svod.core.kernel.intrinsics import applicable
from svod.core.kernel.scheduler import Opt, Scheduler
from svod.core.machine.isa import DOTS
from svod.core.machine.target import Target
from svod.errors import KernelOptError
from tests import attention
from tests.agreement import Case
from tests.chain_runs import KERNELS, draw_groups, run_chains
from tests.compile.cuda.test_bulk import BF16, BULK, ROWS
from tests.compile.cuda.test_core_suite import SMALL, check_case
from tests.compile.lower.test_intrinsics import gemm, windows, with_full_range
from tests.draws import count

pytestmark = pytest.mark.gpu
HELD = [d.name for d in DOTS.values() if d.fragments and d.arch == "nvptx64"]
OF_PRODUCTS = {dtypes.float32: "f32", dtypes.bfloat16: "bf16", dtypes.float16: "f16", dtypes.int8: "s8"}


def check(gpu: Device, case: Case, state: Scheduler) -> None:
    """Run a state on the device twice, and compare the results with the evaluator's."""
    program, constants = lower(state), [p.arg.slot for p in case.kernel.params if p.arg.constant]
    code = gpu.pair.load(gpu.pair.compile(gpu.pair.render(program, state.target), state.target), program.spec)
    for _ in range(2):
        args = case.fresh()
        ExecutionPlan.of_kernel(program.spec, code, args, constants=constants, device=state.target.device).execute()
        case.check(args, str([o.to_json() for o in state.applied_opts]))
    code.close()


def target_of(gpu: Device) -> Target:
    return gpu.backend.target().allowing(True, True, True)


# -- kernels -------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("name", KERNELS)
def test_random_chains(name: str, gpu: Device) -> None:
    def run(case: Case, state: Scheduler, program: Program, rng: random.Random) -> dict[str, bool]:
        check(gpu, case, state)
        return {"ran": True}

    run_chains("gpu", [name], count(6), draw_groups(target_of(gpu), 8), run, {"ran": 0.3})


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("name", HELD)
def test_matrix_instructions(name: str, transposed: bool, gpu: Device) -> None:
    """Products with operands staged and copied ahead, several tiles per subgroup and several subgroups, at shapes that no tile divides, and
    windows. Blocks have two, four or eight instructions, so rows in shared memory have 64, 128 or twice 128 bytes. Some sums are split into
    parts."""
    dot, target = DOTS[name], target_of(gpu)
    if not dot.runs_on(target):
        pytest.skip(f"{target.cpu} has no {' and '.join(dot.features)}")
    dtype = dot.operands[0]
    ran: Counter[int] = Counter()
    sizes = ((257, 511, 96), (200, 136, 264), (64, 70, 520))[:count(3)]
    for seed, (m, n, k) in enumerate(sizes):
        for kernel in (gemm(m, n, k, dtype, dtype, transposed=transposed), windows(k, m, n, 3, dtype, dtype)):
            case, state = with_full_range(Case(kernel, seed), seed), Scheduler(kernel, target)
            for opt in (Opt("TC", "r0", (name, "o0", "o1")), Opt("UPCAST", "o0", 2), Opt("LOCAL", "o0", 2), Opt("TILE", "r0", 2 << seed),
                        Opt("STAGE", "s0", "r0"), Opt("STAGE", "s1", "r0"), Opt("UNROLL", "r0.in2", 0),
                        Opt("PIPELINE", "r0", 2 + seed % 2), *[Opt("SPLITK", "r0", 2)][:seed]):
                try:
                    state = apply_opts(state, [opt])
                except KernelOptError:      # fewer tiles than that
                    continue
            try:
                lower(state)
            except KernelOptError:          # more shared memory than there is
                continue
            check(gpu, case, state)
            ran[seed] += 1
    assert len(ran) == len(sizes), ran


def test_rows_in_bulk(gpu: Device) -> None:
    if not target_of(gpu).bulk_row:
        pytest.skip(f"{target_of(gpu).cpu} has no cp.async.bulk")
    target = replace(target_of(gpu), bulk_row=BULK)
    for buffers in (2, 3):
        kernel = gemm(128, 128, 32 * 7, BF16, BF16)
        state = apply_opts(Scheduler(kernel, target), [Opt("TC", "r0", ("mma_bf16", "o0", "o1")), *ROWS, Opt("PIPELINE", "r0", buffers)])
        assert any(i.op == "COPY_BULK" for code in lower(state).code for i in code)
        check(gpu, Case(kernel, buffers), state)


@pytest.mark.parametrize("dtype", list(OF_PRODUCTS), ids=lambda d: OF_PRODUCTS[d])
def test_sketches_of_a_product(dtype: DType, gpu: Device) -> None:
    kernel, target = gemm(256, 384, 512, dtype, dtype), target_of(gpu)
    case = with_full_range(Case(kernel, 1), 1)
    base = Scheduler(kernel, target)
    found = [gpu.backend.heuristic(base), *gpu.backend.sketches(base)]
    assert any(any(s.dots) for s in found) or not applicable(kernel, target, kernel.output)
    for state in found[:count(len(found))]:
        check(gpu, case, state)


@pytest.mark.parametrize("name", SMALL)
def test_the_core_suite_at_small_sizes(name: str, gpu: Device) -> None:
    check_case(SMALL[name])


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("kind", attention.KINDS)
def test_attention_in_one_pass(kind: str, dtype: str, gpu: Device) -> None:
    """Attention by the heuristic's pass and by others, with scores in registers and in shared memory, for lengths that no tile divides."""
    rng = random.Random(f"gpu {kind} {dtype}")
    shape = rng.choice((2, 3)), rng.choice((130, 192, 257)), rng.choice((192, 257, 320)), rng.choice((24, 64)), rng.choice((40, 64, 128))
    case = attention.AttentionCase.draw(rng, kind, dtype, shape)
    found = [state for _, state in GroupPrices().cheapest(schedule(ATTENTION, Scheduler(case.kernel(), target_of(gpu))), 1 << 20)]
    held = [any(o.op == "HOLD" for o in state.applied_opts) for state in found]
    for state in (found[0], found[held.index(True)], found[held.index(False)]) if True in held else found[:2]:
        case.check(state.applied_opts, "CUDA")
