"""Checks of programs for NVIDIA's GPUs: runs in the emulator, compared with the evaluator."""
from __future__ import annotations

import random

from svod.compile.cuda.render import block_of
from svod.compile.lower.linear import validate
from svod.compile.lower.lower import lower
from svod.compile.lower.program import Program
from svod.core.kernel.scheduler import Scheduler
from tests.agreement import Case
from tests.compile.cuda.emulator import run_program

MOST_THREADS = 20_000       # largest launch of a program that a test runs


def is_small(program: Program) -> bool:
    """Whether a program launches few enough threads for a test."""
    return sum(p.extent * block_of(p) // (128 if p.block == 1 else 1) for p in program.spec.phases) <= MOST_THREADS


def check(case: Case, state: Scheduler, seed: int = 0) -> Program:
    """Check that the state's program is well formed and gives right numbers, with asynchronous copies delayed as `seed` draws it."""
    program, args = lower(state), case.fresh()
    validate(program)
    run_program(program, state.target, args, case.values, seed)
    case.check(args, "LLVM IR for NVIDIA's GPUs")
    return program


def run(case: Case, state: Scheduler, program: Program, rng: random.Random) -> dict[str, bool]:
    """Run the program of a random chain unless it is too large; returns the ways in which it ran."""
    if not is_small(program):
        return {}
    check(case, state, rng.randrange(100))
    ops = {i.op for code in program.code for i in code}
    return {"ran": True, "groups": any(p.block > 1 for p in program.spec.phases), "MMA": "MMA" in ops, "MMASHARED": "MMASHARED" in ops}
