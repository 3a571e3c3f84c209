"""Random chains of opts over a corpus of kernels: every program is well formed and agrees with the evaluator, as LINEAR and native.

`pytest tests/compile/lower/test_random_chains.py --chains 100` draws ten times as many. A failure names the kernel, the target and the
chain, which `tests/compile/lower/test_lower.py` keeps once it is understood.
"""
from __future__ import annotations

import random
from dataclasses import replace

import pytest

from svod.compile.lower.lower import lower
from svod.compile.lower.program import Program
from svod.core.cost.cpu import cost_of
from svod.core.kernel.apply import apply_opts
from svod.core.kernel.kernel import Kernel
from svod.core.kernel.opts.stages import MAX_PREFETCH
from svod.core.kernel.scheduler import Opt, Scheduler
from svod.errors import KernelOptError
from tests.agreement import Case, has_native, run_interpreted, run_native, steps
from tests.chain_runs import KERNELS, PARTS, case_of, each_part, part_of, run_chains
from tests.chains import random_state, try_opts
from tests.compile.native import runnable_targets
from tests.draws import an_eighth, chains, count
from tests.hand_kernels import SIZED

TARGETS = [replace(t, threads=4) for t in runnable_targets().values()]
MOST_INSTRUCTIONS = 6000      # longer programs take LLVM seconds
EXTENTS = (1, 1, 2, 3, 5, 7, 8, 11, 13, 16, 17, 23, 31, 33)
MOST_STEPS = 200_000          # the interpreter runs about a million a second
LEAST = {"lowered": 1.0, "both": 0.9}       # the limits above leave out few


def draw(rng: random.Random, case: Case) -> Scheduler:
    """Draw a chain for one of the targets, with hints among the other opts. Checks that each refusal has a reason."""
    refused: list[tuple[Opt, str]] = []
    state = random_state(rng, Scheduler(case.kernel, rng.choice(TARGETS)), rng.randint(1, 12), refused)
    assert all(why for _, why in refused)
    sources = (*(f"p{slot}" for slot in range(len(case.kernel.params))), *(s.name for s in case.kernel.stages))
    return try_opts(state, *[Opt("PREFETCH", source, rng.randint(1, MAX_PREFETCH)) for source in sources if rng.random() < 0.3])


def run(case: Case, state: Scheduler, program: Program, rng: random.Random) -> dict[str, bool]:
    """Run the program as LINEAR, in several launches of parts, and as machine code."""
    if program.size > MOST_INSTRUCTIONS:
        return {}
    slices = rng.randint(1, 4)
    linear, native = steps(program) <= MOST_STEPS, has_native(case, state.target)
    if linear:
        run_interpreted(case, program, slices)
    if native:
        run_native(case, program, state.target, slices, final=rng.random() < 0.25)
    return {"both": linear and native}


@each_part
def test_random_chains_agree_with_the_evaluator(part: int) -> None:
    run_chains("cpu", part_of(part), chains(0.3), lambda rng, name: (case_of(name), draw(rng, case_of(name))), run, LEAST)


@each_part
def test_random_extents(part: int) -> None:
    """Extents of 1, primes, and what no vector width divides, in every combination."""
    def sized(rng: random.Random, name: str) -> tuple[Case, Scheduler]:
        extents, build = SIZED[name]
        case = Case(Kernel(build(*(rng.choice(EXTENTS) for _ in range(extents)))), rng.randrange(100))
        return case, draw(rng, case)

    run_chains("cpu, extents", list(SIZED)[part::PARTS], count(4), sized, run, LEAST)


@pytest.mark.parametrize("name", an_eighth(KERNELS))
def test_equal_tables_give_equal_code(name: str) -> None:
    """If two orders of the same opts lead to the same table of axes, their programs and predicted costs are the same."""
    kernel = case_of(name).kernel
    compared = 0
    for seed in range(8):
        rng = random.Random(f"{name} {seed}")
        start = Scheduler(kernel, rng.choice(TARGETS))
        state = random_state(rng, start, rng.randint(2, 6))
        program = lower(state)
        for _ in range(4):
            opts = list(state.applied_opts)
            rng.shuffle(opts)
            try:
                other = apply_opts(start, opts)
            except KernelOptError:
                continue
            if other.digest == state.digest:
                compared += 1
                both = f"{[o.to_json() for o in state.applied_opts]} and {[o.to_json() for o in opts]}"
                assert lower(other).digest == program.digest, both
                assert cost_of(other) == cost_of(state), both
    assert compared or len(kernel.stages[kernel.output].outs + kernel.stages[kernel.output].reds) < 2, "nothing was compared"
