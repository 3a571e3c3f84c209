"""The sketches for groups, over the corpus: right numbers on the toy device, within the limits of different targets."""
from __future__ import annotations

import random
from dataclasses import replace

import pytest

from svod.compile.lower.linear import validate
from svod.compile.lower.lower import lower
from svod.core.cost.groups.group_sketch import group_heuristic, group_sketches
from svod.core.kernel.kernel import Kernel
from svod.core.kernel.scheduler import Scheduler
from svod.core.machine.target import Target
from tests.agreement import Case
from tests.chain_runs import KERNELS, case_of
from tests.core.corpus import CORPUS
from tests.draws import count
from tests.toy_backend.running import check, is_short
from tests.toy_backend.target import TOY

SMALL = replace(TOY, group_threads=32, shared_bytes=1 << 10, subgroup=8, units=2)
WIDE = replace(TOY, group_threads=256, shared_bytes=1 << 15, subgroup=32, units=16)
SINGLE = TOY.allowing(intrinsics=True, locals=False)
TARGETS = {"toy": TOY, "small": SMALL, "wide": WIDE, "single": SINGLE}


def check_sketch(case: Case, state: Scheduler, seed: int) -> None:
    """Check that a sketch is within the target's limits, and if it is short enough to run, that its numbers are right."""
    program = lower(state)
    for phase in program.spec.phases:
        assert phase.block <= state.target.group_threads and phase.shared_bytes <= state.target.shared_bytes
    if is_short(program):
        check(case, program, seed, " ".join(map(str, state.applied_opts)))
    else:
        validate(program)


@pytest.mark.slow
@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("name", KERNELS)
def test_sketches_compute_what_the_kernel_means(name: str, target: str) -> None:
    """The heuristic's state, and another sketch for one of the targets in turn."""
    case = case_of(name)
    if case.kernel.library_kernel is not None:
        return
    base = Scheduler(case.kernel, TARGETS[target])
    check_sketch(case, group_heuristic(base), 0)
    if list(KERNELS).index(name) % len(TARGETS) == list(TARGETS).index(target):
        for state in random.Random(name).sample(found := group_sketches(base), min(count(1), len(found))):
            check_sketch(case, state, 1)


@pytest.mark.slow
@pytest.mark.parametrize("target", [SMALL, WIDE, SINGLE], ids=["small", "wide", "single"])
@pytest.mark.parametrize("name", CORPUS)
def test_sketches_respect_the_limits(name: str, target: Target) -> None:
    for state in group_sketches(Scheduler(Kernel(CORPUS[name]()), target)):
        for phase in lower(state).spec.phases:
            assert phase.block <= target.group_threads and phase.shared_bytes <= target.shared_bytes


def threads(target: Target, name: str) -> int:
    return max(p.block for p in lower(group_heuristic(Scheduler(Kernel(CORPUS[name]()), target))).spec.phases)


def test_the_heuristic_uses_threads() -> None:
    assert threads(WIDE, "gemm") >= 16 and threads(WIDE, "sum_rows") >= 8 and threads(WIDE, "elementwise") >= 8
    assert threads(SINGLE, "gemm") == 1
