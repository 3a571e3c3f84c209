"""Draws random chains of opts, lowers, runs and checks them, and counts the outcomes.

A test defines how a chain is drawn, how its program is run, and the least share of its draws for each way of running. Each test counts its
own draws, so it does not depend on other tests. Chains over the corpus of kernels share one budget over all backends, `--chains`
(tests/draws.py); a quarter of the corpus runs by default, all of it with `--all`.
"""
from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from functools import cache

import pytest

from svod import Variable
from svod.compile.lower.linear import validate
from svod.compile.lower.lower import lower
from svod.compile.lower.program import Program
from svod.core.graph import graph
from svod.core.ir.uop import Ops
from svod.core.ir.variable import without_binds
from svod.core.kernel.kernel import Kernel
from svod.core.kernel.scheduler import Scheduler
from svod.core.machine.target import Target
from svod.core.schedule.schedule import create_schedule
from svod.errors import KernelOptError
from tests.agreement import Case
from tests.chains import group_state
from tests.core.corpus import CORPUS, data
from tests.draws import a_quarter
from tests.hand_kernels import HAND

KERNELS = {**CORPUS, **HAND}
PARTS = 4       # number of parts of the corpus; each is a separate test
N, M = Variable("n", 1, 13), Variable("m", 1, 17)
VARIABLE = {
    "rows": lambda: data(13, 17)[:N] * 2 + 1,
    "sums": lambda: data(13, 17)[:N, :M].sum(1),
    "softmax": lambda: data(13, 17)[:N, :M].softmax(-1),
    "gemm": lambda: data(13, 17)[:N, :M] @ data(17, 9)[:M],
}

Draw = Callable[[random.Random, str], tuple[Case, Scheduler]]
Run = Callable[[Case, Scheduler, Program, random.Random], Mapping[str, bool]]

each_part = pytest.mark.parametrize("part", a_quarter(range(PARTS)))


@cache
def case_of(name: str) -> Case:
    """A kernel of the corpus with its inputs and outputs, made once."""
    return Case(Kernel(KERNELS[name]()))


def part_of(part: int) -> list[str]:
    """The kernels of one part of the corpus: every fourth of them."""
    return list(KERNELS)[part::PARTS]


def run_chains(title: str, names: Iterable[str], chains: int, draw: Draw, run: Run, least: Mapping[str, float]) -> None:
    """Draw, lower, validate and run `chains` chains for each of `names`.

    `run` checks the numbers and says in which ways the chain ran, in none where it is passed over. A state that cannot be lowered is
    passed over too; where that is an error, `least` asks for "lowered". `least`: the smallest share of all draws for a way. An error names
    what was drawn and the chain.
    """
    drawn, seen = 0, Counter[str]()
    for name in names:
        for number in range(chains):
            rng = random.Random(f"{title} {name} {number}")
            case, state = draw(rng, name)
            drawn += 1
            try:
                program = lower(state)
            except KernelOptError:      # placements that a later opt has moved, or too much shared memory
                continue
            seen["lowered"] += 1
            try:
                validate(program)
                seen.update(run(case, state, program, rng))
            except Exception as e:
                raise AssertionError(f"{title} {name} {number}, {case.kernel}, {case.values}: "
                                     f"{[o.to_json() for o in state.applied_opts]}: {e}") from e
    few = {way: f"{seen[way]}, at least {share * drawn:.1f}" for way, share in least.items() if seen[way] < share * drawn}
    assert drawn and not few, f"of {drawn} chains too few ran: {few}"


def draw_groups(target: Target, longest: int) -> Draw:
    """Chains of 1 to `longest` opts, about half of them for groups, for kernels of the corpus."""
    def draw(rng: random.Random, name: str) -> tuple[Case, Scheduler]:
        case = case_of(name)
        return case, group_state(rng, Scheduler(case.kernel, target), rng.randint(1, longest))
    return draw


def draw_variable(target: Target) -> Draw:
    """Chains and values for a kernel of VARIABLE, whose extents depend on them."""
    def draw(rng: random.Random, name: str) -> tuple[Case, Scheduler]:
        sink, _, _ = without_binds(graph.sink(VARIABLE[name]().uop))
        call, = create_schedule(sink).calls
        values = {u.arg[0]: rng.randint(*u.arg[1:3]) for u in call.ast.walk(Ops.DEFINE_VAR)}
        case = Case(Kernel(call.ast), rng.randrange(100), values)
        return case, group_state(rng, Scheduler(case.kernel, target), rng.randint(0, 6))
    return draw
