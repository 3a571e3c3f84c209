"""Runs programs on the toy device and checks them against the evaluator."""
from __future__ import annotations

import random
from dataclasses import replace

from svod.compile.lower.linear import validate
from svod.compile.lower.program import Program
from svod.core.kernel.scheduler import Scheduler
from tests.agreement import Case, steps
from tests.toy_backend.interpreter import run_program

MOST_STEPS = 40_000         # most instructions of all threads together; each takes about ten microseconds


def is_short(program: Program, most: int = MOST_STEPS) -> bool:
    """Whether all threads of all groups run at most `most` instructions, few enough for a test."""
    return sum(phase.block * steps(Program(replace(program.spec, phases=(phase,)), (code,)))
               for phase, code in zip(program.spec.phases, program.code, strict=True)) <= most


def uses(program: Program, op: str) -> bool:
    """Whether an instruction is in the program."""
    return any(i.op == op for code in program.code for i in code)


def check(case: Case, program: Program, seed: int = 0, how: str = "toy device") -> None:
    """Check that a program is well-formed, that no fault is reported, and that the numbers are right, for the order of groups and
    threads that `seed` draws."""
    validate(program)
    args = case.fresh()
    run_program(program, args, case.values, seed)
    case.check(args, how)


def run(case: Case, state: Scheduler, program: Program, rng: random.Random) -> dict[str, bool]:
    """Run a random chain's program, unless it is long; returns the ways in which it ran."""
    if not is_short(program):
        return {}
    check(case, program, rng.randrange(100))
    phases = program.spec.phases
    return {"ran": True, "groups": any(p.block > 1 for p in phases), "shared": any(p.shared_bytes for p in phases)}
