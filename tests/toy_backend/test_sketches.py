"""The sketches for groups, over the corpus: right numbers on the toy device, within the limits of targets that differ in them."""
from __future__ import annotations

import random
from dataclasses import replace
from functools import cache

import pytest

from svod.compile.lower.linear import validate
from svod.compile.lower.lower import lower
from svod.core.cost.groups.group_sketch import group_heuristic, group_sketches
from svod.core.kernel.kernel import Kernel
from svod.core.kernel.scheduler import Scheduler
from svod.core.machine.target import Target
from tests.agreement import Case
from tests.core.corpus import CORPUS
from tests.draws import count
from tests.toy_backend.interpreter import run_program
from tests.toy_backend.target import TOY
from tests.toy_backend.test_corpus import KERNELS, MOST_STEPS, steps_of_threads

SMALL = replace(TOY, group_threads=32, shared_bytes=1 << 10, subgroup=8, units=2)
WIDE = replace(TOY, group_threads=256, shared_bytes=1 << 15, subgroup=32, units=16)
SINGLE = TOY.allowing(intrinsics=True, locals=False)
TARGETS = {"toy": TOY, "small": SMALL, "wide": WIDE, "single": SINGLE}


@cache
def case_of(name: str) -> Case:
    return Case(Kernel(KERNELS[name]()))


def check(case: Case, state: Scheduler, seed: int) -> bool:
    """Whether a state was run: it is short enough."""
    program = lower(state)
    validate(program)
    for phase in program.spec.phases:
        assert phase.block <= state.target.group_threads and phase.shared_bytes <= state.target.shared_bytes
    if steps_of_threads(program) > MOST_STEPS:
        return False
    args = case.fresh()
    run_program(program, args, seed=seed)
    case.check(args, " ".join(map(str, state.applied_opts)))
    return True


@pytest.mark.slow
@pytest.mark.parametrize("name", KERNELS)
def test_sketches_compute_what_the_kernel_means(name: str) -> None:
    case = case_of(name)
    if case.kernel.library_kernel is not None:
        return
    rng = random.Random(name)
    for target in TARGETS.values():
        base = Scheduler(case.kernel, target)
        check(case, group_heuristic(base), 0)
        for state in rng.sample(found := group_sketches(base), min(count(2), len(found))):
            check(case, state, 1)


@pytest.mark.slow
@pytest.mark.parametrize("name", CORPUS)
def test_sketches_respect_the_limits(name: str) -> None:
    for target in (SMALL, WIDE, SINGLE):
        for state in group_sketches(Scheduler(Kernel(CORPUS[name]()), target)):
            for phase in lower(state).spec.phases:
                assert phase.block <= target.group_threads and phase.shared_bytes <= target.shared_bytes


def threads(target: Target, name: str) -> int:
    return max(p.block for p in lower(group_heuristic(Scheduler(Kernel(CORPUS[name]()), target))).spec.phases)


def test_the_heuristic_uses_threads() -> None:
    assert threads(WIDE, "gemm") >= 16 and threads(WIDE, "sum_rows") >= 8 and threads(WIDE, "elementwise") >= 8
    assert threads(SINGLE, "gemm") == 1
