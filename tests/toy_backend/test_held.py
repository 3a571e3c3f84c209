"""HOLD on the toy device: stages laid out like results of its matrix instructions, in random chains. Right numbers, no race."""
from __future__ import annotations

import random

import pytest

from svod.compile.lower.lower import lower
from svod.compile.lower.program import Program
from svod.core.kernel.apply import apply_opts
from svod.core.kernel.chain_text import parse_chain
from svod.core.kernel.intrinsics import shuffles_of
from svod.core.kernel.kernel import Kernel
from svod.core.kernel.placement import is_derived
from svod.core.kernel.scheduler import Opt, Scheduler
from tests.agreement import Case
from tests.chain_runs import case_of, each_part, part_of, run_chains
from tests.chains import group_state, try_opts
from tests.core.corpus import data, kernel_of
from tests.draws import chains
from tests.toy_backend.running import check, run
from tests.toy_backend.target import TOY

LAID = ("toy_bf16", "toy_f16")


def a_hold(rng: random.Random, kernel: Kernel) -> Opt:
    """A HOLD opt for a stage with an output axis: any pair of its axes, legal or not."""
    stage = rng.choice([s for s in kernel.stages if s.outs and not is_derived(s)])
    rows = rng.choice(stage.outs)
    columns = rng.choice([a for a in (*stage.outs, *stage.reds) if a != rows] or [rows])
    return Opt("HOLD", stage.name, (rng.choice(LAID), kernel.axes[rows].name, kernel.axes[columns].name))


def draw(rng: random.Random, name: str) -> tuple[Case, Scheduler]:
    """Draw stages in several layouts between random opts."""
    case = case_of(name)
    state = group_state(rng, Scheduler(case.kernel, TOY), rng.choice((0, 0, 1, 2)))
    for _ in range(rng.choice((4, 8))):
        state = try_opts(state, a_hold(rng, state.kernel))
    return case, group_state(rng, state, len(state.applied_opts) + rng.randint(0, 4))


def run_held(case: Case, state: Scheduler, program: Program, rng: random.Random) -> dict[str, bool]:
    held = [s for s, chosen in enumerate(state.dots) if chosen is not None]
    return run(case, state, program, rng) and {"held": bool(held), "shared rows": any(shuffles_of(state, s) for s in held)}


@each_part
def test_random_chains(part: int) -> None:
    names = [name for name in part_of(part) if any(s.outs and not is_derived(s) for s in case_of(name).kernel.stages)]
    run_chains("held", names, chains(0.2), draw, run_held, {"held": 0.3, "shared rows": 0.03})


@pytest.mark.parametrize("chain", ["HOLD(out, toy_f16,o0,r0)", "HOLD(out, toy_f16,o0,r0) UPCAST(r0, 2) LOCAL(o0, 2)"])
def test_one_thread_of_a_row_stores_its_sum(chain: str) -> None:
    """The toy device reports two threads that store to one element as a race, even if they store the same value."""
    kernel = Kernel(kernel_of(data(37, 29).sum(1)))
    check(Case(kernel), lower(apply_opts(Scheduler(kernel, TOY), parse_chain(chain))))
