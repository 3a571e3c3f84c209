"""Random chains of opts, those for groups among them, over the corpus: right numbers on the adapter that is here."""
from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterator

import numpy as np
import pytest

from svod.compile.backend import backend_named
from svod.compile.lower.lower import lower
from svod.compile.lower.program import Program
from svod.compile.plan.execution_plan import ExecutionPlan
from svod.core.graph import graph
from svod.core.graph.buffer import Array, aligned_empty
from svod.core.ir.dtype import dtypes
from svod.core.ir.uop import Ops
from svod.core.ir.variable import without_binds
from svod.core.kernel.apply import apply_opts
from svod.core.kernel.kernel import Kernel
from svod.core.kernel.scheduler import Opt, Scheduler
from svod.core.machine.target import Target
from svod.core.schedule.schedule import create_schedule
from svod.core.spec.evaluate import evaluate
from svod.errors import KernelOptError
from tests.agreement import Case, draw
from tests.draws import count
from tests.hand_kernels import gemm
from tests.toy_backend.test_corpus import KERNELS, VARIABLE, case_of, group_state

CHAINS = 1                  # per kernel
MOST_INSTRUCTIONS = 2500    # the driver compiles about ten thousand a second


def run(kernel: Kernel, program: Program, target: Target, args: list[Array], values: dict[str, int] | None = None) -> list[Array]:
    """The arguments after one run of a kernel's program on the device."""
    pair = backend_named("WEBGPU").compilers[0]
    code = pair.load(pair.binary_of(program, target), program.spec)
    arrays = []
    for array in args:
        arrays.append(aligned_empty(array.nbytes, dtypes.uint8).view(array.dtype))
        arrays[-1][:] = array
    constants = [p.arg.slot for p in kernel.params if p.arg.constant]
    plan = ExecutionPlan.of_kernel(program.spec, code, arrays, constants=constants, device="WEBGPU")
    plan.execute(**(values or {}))
    return arrays


@pytest.fixture(scope="module")
def ran() -> Iterator[Counter[str]]:
    """Chains by what became of them. Fails at the end of the module where few ran, or few of those in groups."""
    seen: Counter[str] = Counter()
    yield seen
    if seen["drawn"] >= 100:
        assert seen["ran"] >= 0.5 * seen["drawn"] and seen["groups"] >= 0.4 * seen["ran"], dict(seen)


@pytest.mark.parametrize("name", KERNELS)
def test_random_chains(name: str, webgpu: Target, ran: Counter[str]) -> None:
    case = case_of(name)
    for seed in range(count(CHAINS)):
        rng = random.Random(f"webgpu {name} {seed}")
        state = group_state(rng, Scheduler(case.kernel, webgpu), rng.randint(0, 6))
        ran["drawn"] += 1
        try:
            program = lower(state)
        except KernelOptError:      # placements that an opt has moved since, or too much shared memory
            continue
        if program.size > MOST_INSTRUCTIONS:
            continue
        try:
            args = case.fresh()
            case.check(run(case.kernel, program, webgpu, args), "WebGPU")
        except Exception as e:
            raise AssertionError(f"{name}: {[o.to_json() for o in state.applied_opts]}: {e}") from e
        ran.update(ran=1, groups=any(p.block > 1 for p in program.spec.phases))


@pytest.mark.parametrize("ahead", [False, True])
def test_parts_of_a_sum_with_staged_operands(ahead: bool, webgpu: Target) -> None:
    """Three parts of four blocks of 16 positions and one of 5."""
    case = Case(Kernel(gemm(37, 41, 69)))
    chain = [Opt("LOCAL", "o0", 8), Opt("LOCAL", "o1", 8), Opt("TILE", "r0", 16), Opt("STAGE", "s0", "r0"), Opt("STAGE", "s1", "r0"),
             Opt("SPLITK", "r0", 3), *[Opt("PIPELINE", "r0", 2)][:ahead]]
    program = lower(apply_opts(Scheduler(case.kernel, webgpu), chain))
    assert program.spec.phases[0].extent == 3 * 5 * 6 and program.spec.phases[0].shared_bytes
    case.check(run(case.kernel, program, webgpu, case.fresh()), "WebGPU")


@pytest.mark.parametrize("name", VARIABLE)
def test_extents_that_depend_on_variables(name: str, webgpu: Target) -> None:
    sink, _, _ = without_binds(graph.sink(VARIABLE[name]().uop))
    call, = create_schedule(sink).calls
    kernel, ran = Kernel(call.ast), 0
    for seed in range(count(4)):
        rng = random.Random(f"variable {name} {seed}")
        try:
            state = group_state(rng, Scheduler(kernel, webgpu), rng.randint(0, 6))
            program = lower(state)
        except KernelOptError:
            continue
        if program.size > MOST_INSTRUCTIONS:
            continue
        values = {u.arg[0]: rng.randint(*u.arg[1:3]) for u in kernel.ast.walk(Ops.DEFINE_VAR)}
        numbers = np.random.default_rng(seed)
        args = [draw(p.dtype, p.arg.size, numbers, p.arg.vmin, p.arg.vmax) for p in kernel.params]
        want, = evaluate(kernel.ast, args, values)
        got = run(kernel, program, webgpu, args, values)[kernel.outs[0]]
        np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-5, err_msg=f"{values}: {[o.to_json() for o in state.applied_opts]}")
        ran += 1
    assert ran
