"""HOLD on the toy device: stages laid out like results of its matrix instructions, in random chains. Right numbers, no race."""
from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterator

import pytest

from svod.compile.lower.linear import validate
from svod.compile.lower.lower import lower
from svod.core.kernel.apply import apply_opt, apply_opts
from svod.core.kernel.chain_text import parse_chain
from svod.core.kernel.intrinsics import shuffles_of
from svod.core.kernel.kernel import Kernel
from svod.core.kernel.placement import is_derived
from svod.core.kernel.scheduler import Opt, Scheduler
from svod.errors import KernelOptError
from tests.agreement import Case
from tests.core.corpus import data, kernel_of
from tests.draws import count
from tests.toy_backend.interpreter import run_program
from tests.toy_backend.target import TOY
from tests.toy_backend.test_corpus import KERNELS, MOST_STEPS, case_of, group_state, steps_of_threads

LAID = ("toy_bf16", "toy_f16")


def a_hold(rng: random.Random, kernel: Kernel) -> Opt:
    """HOLD of a stage with an output axis: any pair of its axes, whether that is legal or not."""
    stage = rng.choice([s for s in kernel.stages if s.outs and not is_derived(s)])
    rows = rng.choice(stage.outs)
    columns = rng.choice([a for a in (*stage.outs, *stage.reds) if a != rows] or [rows])
    return Opt("HOLD", stage.name, (rng.choice(LAID), kernel.axes[rows].name, kernel.axes[columns].name))


@pytest.fixture(scope="module")
def ran() -> Iterator[Counter[str]]:
    seen: Counter[str] = Counter()
    yield seen
    if seen["drawn"] >= 100:
        assert seen["held"] >= 0.3 * seen["drawn"] and seen["shared rows"] >= 0.1 * seen["held"], dict(seen)


@pytest.mark.parametrize("name", KERNELS)
def test_random_chains(name: str, ran: Counter[str]) -> None:
    case = case_of(name)
    if not any(s.outs and not is_derived(s) for s in case.kernel.stages):
        return
    for seed in range(count(2)):
        rng = random.Random(f"held {name} {seed}")
        state = group_state(rng, Scheduler(case.kernel, TOY), rng.choice((0, 0, 1, 2)))
        for _ in range(rng.choice((4, 8))):
            try:
                state = apply_opt(state, a_hold(rng, state.kernel))
            except KernelOptError:
                continue
        state = group_state(rng, state, len(state.applied_opts) + rng.randint(0, 4))
        ran["drawn"] += 1
        held = [s for s, chosen in enumerate(state.dots) if chosen is not None]
        try:
            program = lower(state)
        except KernelOptError:
            continue
        if not held or steps_of_threads(program) > MOST_STEPS:
            continue
        validate(program)
        args = case.fresh()
        chain = f"{name}: {[o.to_json() for o in state.applied_opts]}"
        try:
            run_program(program, args, seed=seed)
        except Exception as e:
            raise AssertionError(f"{chain}: {e}") from e
        case.check(args, chain)
        ran.update(held=1, **{"shared rows": any(shuffles_of(state, s) for s in held)})


@pytest.mark.parametrize("chain", ["HOLD(out, toy_f16,o0,r0)", "HOLD(out, toy_f16,o0,r0) UPCAST(r0, 2) LOCAL(o0, 2)"])
def test_one_thread_of_a_row_stores_its_sum(chain: str) -> None:
    """The toy device takes two threads that store to one place for a race, also where they store the same."""
    kernel = Kernel(kernel_of(data(37, 29).sum(1)))
    program = lower(apply_opts(Scheduler(kernel, TOY), parse_chain(chain)))
    case = Case(kernel)
    args = case.fresh()
    run_program(program, args)
    case.check(args, chain)
