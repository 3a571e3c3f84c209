"""Random chains of opts over a corpus of kernels: every program is well formed and agrees with the evaluator, as LINEAR and native.

The default run is a subset; `pytest tests/compile/lower/test_random_chains.py --chains 2000` is the full one. A failure names the kernel,
the target and the chain, which `tests/compile/lower/test_lower.py` keeps once it is understood.
"""
from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from functools import cache

import pytest

from svod.compile.lower.linear import validate
from svod.compile.lower.lower import lower
from svod.core.cost.cpu import cost_of
from svod.core.kernel.apply import apply_opt, apply_opts
from svod.core.kernel.kernel import Kernel
from svod.core.kernel.opts import MAX_PREFETCH
from svod.core.kernel.scheduler import Opt, Scheduler
from svod.errors import KernelOptError
from tests.agreement import Case, has_native, run_interpreted, run_native, steps
from tests.chains import random_state
from tests.compile.native import runnable_targets
from tests.core.corpus import CORPUS
from tests.hand_kernels import HAND, SIZED

KERNELS = {**CORPUS, **HAND}
TARGETS = [replace(t, threads=4) for t in runnable_targets().values()]
MOST_INSTRUCTIONS = 6000      # longer programs take LLVM seconds
EXTENTS = (1, 1, 2, 3, 5, 7, 8, 11, 13, 16, 17, 23, 31, 33)
MOST_STEPS = 100_000          # the interpreter runs about a million a second
LEAST_BOTH = 0.9              # of the chains run as LINEAR and native: the limits above leave out few


@cache
def case_of(name: str) -> Case:
    return Case(Kernel(KERNELS[name]()))


@pytest.fixture(scope="module")
def ran() -> Iterator[Counter[str]]:
    """Chains by how they ran ("all", "linear", "native", "both"). Fails at the end of the module where too many were passed over."""
    count: Counter[str] = Counter()
    yield count
    # of a few that were picked by name all may be long
    if count["all"] >= 100:
        assert count["both"] >= LEAST_BOTH * count["all"], f"too few chains ran both as LINEAR and native: {dict(count)}"


@pytest.mark.parametrize("name", KERNELS)
def test_random_chains_agree_with_the_evaluator(name: str, chains: int, ran: Counter[str]) -> None:
    case = case_of(name)
    for seed in range(-(-chains // len(KERNELS))):
        check_chain(case, random.Random(f"{name} {seed}"), name, ran)


def check_chain(case: Case, rng: random.Random, name: str, ran: Counter[str]) -> None:
    """One random chain: legal or refused with a reason, well formed, right as LINEAR in slices and as machine code. Counted in `ran`."""
    target = rng.choice(TARGETS)
    refused: list[tuple[Opt, str]] = []
    state = random_state(rng, Scheduler(case.kernel, target), rng.randint(1, 12), refused)
    assert all(why for _, why in refused)
    for source in (*(f"p{slot}" for slot in range(len(case.kernel.params))), *(s.name for s in case.kernel.stages)):
        if rng.random() < 0.3:      # a hint beside anything else, wherever it applies
            with suppress(KernelOptError):
                state = apply_opt(state, Opt("PREFETCH", source, rng.randint(1, MAX_PREFETCH)))
    chain = f"{name}, {target.vector_bytes}-byte vectors: {[o.to_json() for o in state.applied_opts]}"
    ran["all"] += 1
    try:
        program = lower(state)
        validate(program)
        if program.size > MOST_INSTRUCTIONS:
            return
        slices = rng.randint(1, 4)
        linear, native = steps(program) <= MOST_STEPS, has_native(case, target)
        if linear:
            run_interpreted(case, program, slices)
        if native:
            run_native(case, program, target, slices, passes=rng.random() < 0.25)
        ran.update(linear=linear, native=native, both=linear and native)
    except Exception as e:
        raise AssertionError(f"{chain}: {e}") from e


@pytest.mark.parametrize("name", SIZED)
def test_random_extents(name: str, chains: int, ran: Counter[str]) -> None:
    """Extents of 1, primes, and what no vector width divides, in every combination."""
    count, build = SIZED[name]
    for seed in range(-(-chains // (4 * len(SIZED)))):
        rng = random.Random(f"{name} {seed}")
        extents = [rng.choice(EXTENTS) for _ in range(count)]
        check_chain(Case(Kernel(build(*extents)), seed), rng, f"{name}{extents}", ran)


@pytest.mark.parametrize("name", KERNELS)
def test_equal_tables_give_equal_code(name: str) -> None:
    """Orders of the same opts that end in the same table are the same program, and cost the same."""
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
