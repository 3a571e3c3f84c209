"""Random chains of opts, also for groups of threads, over the corpus: right numbers on this machine's adapter."""
from __future__ import annotations

import random

import pytest

from svod.compile.backend import backend_named
from svod.compile.lower.lower import lower
from svod.compile.lower.program import Program
from svod.compile.plan.execution_plan import ExecutionPlan
from svod.core.graph.buffer import aligned_empty
from svod.core.ir.dtype import dtypes
from svod.core.kernel.apply import apply_opts
from svod.core.kernel.kernel import Kernel
from svod.core.kernel.scheduler import Opt, Scheduler
from svod.core.machine.target import Target
from tests.agreement import Case
from tests.chain_runs import VARIABLE, draw_groups, draw_variable, each_part, part_of, run_chains
from tests.draws import chains, count
from tests.hand_kernels import gemm

MOST_INSTRUCTIONS = 2500    # the driver compiles about ten thousand a second


def check(case: Case, program: Program, target: Target) -> None:
    """Check that the program gives right numbers on the device."""
    pair = backend_named("WEBGPU").compilers[0]
    code = pair.load(pair.binary_of(program, target), program.spec)
    arrays = []
    for array in case.fresh():
        arrays.append(aligned_empty(array.nbytes, dtypes.uint8).view(array.dtype))
        arrays[-1][:] = array
    constants = [p.arg.slot for p in case.kernel.params if p.arg.constant]
    plan = ExecutionPlan.of_kernel(program.spec, code, arrays, constants=constants, device="WEBGPU")
    plan.execute(**case.values)
    case.check(arrays, "WebGPU")


def run(case: Case, state: Scheduler, program: Program, rng: random.Random) -> dict[str, bool]:
    """Run the program of a random chain unless it is too long; returns the ways in which it ran."""
    if program.size > MOST_INSTRUCTIONS:
        return {}
    check(case, program, state.target)
    return {"ran": True, "groups": any(p.block > 1 for p in program.spec.phases)}


@each_part
def test_random_chains(part: int, webgpu: Target) -> None:
    run_chains("webgpu", part_of(part), chains(0.1), draw_groups(webgpu, 6), run, {"ran": 0.5, "groups": 0.2})


@pytest.mark.parametrize("ahead", [False, True])
def test_parts_of_a_sum_with_staged_operands(ahead: bool, webgpu: Target) -> None:
    """A sum of four blocks of 16 positions and one of 5 is split into three parts."""
    case = Case(Kernel(gemm(37, 41, 69)))
    chain = [Opt("LOCAL", "o0", 8), Opt("LOCAL", "o1", 8), Opt("TILE", "r0", 16), Opt("STAGE", "s0", "r0"), Opt("STAGE", "s1", "r0"),
             Opt("SPLITK", "r0", 3), *[Opt("PIPELINE", "r0", 2)][:ahead]]
    program = lower(apply_opts(Scheduler(case.kernel, webgpu), chain))
    assert program.spec.phases[0].extent == 3 * 5 * 6 and program.spec.phases[0].shared_bytes
    check(case, program, webgpu)


@pytest.mark.parametrize("name", VARIABLE)
def test_extents_that_depend_on_variables(name: str, webgpu: Target) -> None:
    run_chains("webgpu, variables", [name], count(4), draw_variable(webgpu), run, {"ran": 0.25})
