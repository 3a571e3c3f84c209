"""WINOGRAD on groups: its sketches, and any chains after it, give the numbers of the direct convolution, on the toy device and in the
emulator of NVIDIA's GPUs."""
from __future__ import annotations

import random
from contextlib import suppress
from dataclasses import replace

import pytest

from svod.compile.lower.lower import lower
from svod.core.cost.groups.contractions import CONTRACTION
from svod.core.cost.groups.winograd import WINOGRAD_PHASES, products_of
from svod.core.cost.template import schedule
from svod.core.kernel.apply import apply_opts
from svod.core.kernel.kernel import Kernel
from svod.core.kernel.scheduler import Opt, Scheduler
from svod.core.machine.target import Target
from svod.errors import KernelOptError
from svod.tensor import Tensor
from tests.agreement import Case
from tests.chains import group_state, try_opts
from tests.compile.cuda.running import check as emulate
from tests.compile.cuda.running import is_small
from tests.compile.cuda.target import card_target
from tests.core.corpus import data, kernel_of
from tests.draws import count
from tests.toy_backend.running import check, is_short, uses
from tests.toy_backend.target import TOY

MOST_STEPS = 150_000        # most instructions of a program on the toy device
WIDE = replace(TOY, group_threads=256, shared_bytes=1 << 15, subgroup=32, units=16)


def convolution(rng: random.Random, channels: tuple[int, ...], sides: tuple[int, ...]) -> Tensor:
    """A convolution with windows along one axis or two, with groups, padding and work on its results as drawn."""
    groups, (rows, columns) = rng.choice((1, 1, 2)), rng.choice(((3, 3), (3, 3), (5, 3), (3, 1), (1, 5)))
    n, c, o = rng.choice((1, 2)), groups * rng.choice(channels), groups * rng.choice(channels)
    height, width = (rng.choice(sides) + k - 1 for k in (rows, columns))
    y = data(n, c, height, width).conv2d(data(o, c // groups, rows, columns), groups=groups,
                                         padding=(rng.choice((0, rows // 2)), rng.choice((0, columns // 2))))
    return (y + data(o, 1, 1)).relu() if rng.random() < 0.5 else y


def sketch(rng: random.Random, target: Target) -> tuple[Case, Scheduler]:
    """A drawn convolution, and a sketch of it with a drawn schedule of its products."""
    while True:
        case = Case(Kernel(kernel_of(convolution(rng, (11, 12, 16, 17), (1, 2, 3, 5, 6, 7, 8)))), rng.randrange(100))
        starts = list(schedule(WINOGRAD_PHASES, Scheduler(case.kernel, target)))
        if starts:
            start = rng.choice(starts)
            return case, rng.choice(list(schedule(CONTRACTION, start, products_of(start.kernel))))


def test_sketches_compute_the_convolution_on_nvidias_gpus() -> None:
    rng, ran, found = random.Random(1), 0, set[str]()
    for _ in range(count(12)):
        case, state = sketch(rng, card_target(rng.choice(("sm_75", "sm_80", "sm_90"))))
        if is_small(lower(state)):
            program = emulate(case, state, rng.randrange(100))
            ran, found = ran + 1, found | {i.op for code in program.code for i in code}
    assert ran > 2 and {"SHARED", "COPY_ASYNC", "TEMP"} <= found


@pytest.mark.parametrize("m", [2, 3, 4])
def test_any_chain_computes_the_convolution(m: int) -> None:
    """Random chains, half of them with stages of the transforms at the root, whose copies may then lie in shared memory."""
    rng, ran, shared = random.Random(m), 0, 0
    for _ in range(count(30)):
        case = Case(Kernel(kernel_of(convolution(rng, (2, 3, 5), (1, 2, 3, 4, 5, 7)))), rng.randrange(100))
        state = Scheduler(case.kernel, rng.choice((TOY, WIDE)))
        with suppress(KernelOptError):
            state = apply_opts(state, (Opt("WINOGRAD", "out", m),))
        if not state.rewrites:
            continue
        products = state.kernel.stages[products_of(state.kernel)]
        if rng.random() < 0.5:
            state = try_opts(state, Opt("FLATTEN", products.name))
        if rng.random() < 0.5:
            copies = state.kernel.reads[products.index]
            roots = (products.index, *[s for copy in copies for s in state.kernel.reads[copy]])
            axes = [state.kernel.axes[a].name for a in state.kernel.stages[products.index].outs]
            state = try_opts(state, *[Opt("STAGE", state.kernel.stages[s].name, "root") for s in roots],
                             Opt("LOCAL", axes[-1], 2), *[Opt("STAGE", state.kernel.stages[s].name, axes[0]) for s in copies])
        state = group_state(rng, state, len(state.applied_opts) + rng.randint(0, 5))
        program = lower(state)
        if is_short(program, MOST_STEPS):
            ran, shared = ran + 1, shared + uses(program, "SHARED")
            check(case, program, rng.randrange(100), " ".join(map(str, state.applied_opts)))
    assert ran and shared
