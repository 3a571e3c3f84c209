"""Sketches of WINOGRAD: right at any extents, chosen where they pay, and priced in the order of measured times."""
from __future__ import annotations

import random
from dataclasses import replace

import pytest

from svod.compile.lower.lower import lower
from svod.core.cost.cpu import cost_of
from svod.core.cost.sketch import FINISH, heuristic
from svod.core.cost.sketch_winograd import WINOGRAD
from svod.core.cost.template import schedule
from svod.core.graph import graph
from svod.core.graph.storage import base_of
from svod.core.kernel.apply import algorithm_of, apply_opts
from svod.core.kernel.chain_text import parse_chain
from svod.core.kernel.kernel import Kernel
from svod.core.kernel.scheduler import Scheduler
from svod.core.schedule.schedule import create_schedule
from svod.tensor import Tensor
from tests.agreement import Case, run_interpreted, run_native
from tests.compile.native import AVX512, runnable_targets
from tests.core.corpus import data, kernel_of
from tests.draws import a_half

TWO = replace(AVX512, threads=2)
TARGETS = [replace(t, threads=2) for t in runnable_targets().values()]
FUSED = ("WINOGRAD(out, 4) UPCAST(s6.o4, 14) UPCAST(s6.o2, 32) LANES(s6.o2.in) UNROLL(s6.r0, 2) STAGE(s2, root) UPCAST(o1, 4) "
         "UPCAST(o2, {x}) UPCAST(o0, 16) LANES(o0.in) ORDER(out, o1,o0,o2) STAGE(s6, o1) STAGE(s5, o1) STAGE(s3, o1) THREAD(o1, 2)")


def sketches_of(state: Scheduler) -> list[Scheduler]:
    return list(schedule([WINOGRAD, FINISH], state, is_bounded=True))


def with_weights(channels: int, outputs: int, size: int, k: int, **options: int) -> Kernel:
    """A convolution whose taps are constants."""
    taps = data(outputs, channels, k, k)
    y = data(1, channels, size, size).conv2d(taps, **options)
    return Kernel(create_schedule(graph.sink(y.uop), frozenset({base_of(taps.uop)})).calls[-1].ast)


def random_convolution(rng: random.Random) -> Tensor:
    """Of 16 to 40 channels, on images of odd sizes, with or without padding, groups, a batch and an epilogue; in 2-D or along one axis."""
    groups, channels, outputs = rng.choice((1, 1, 2)), rng.choice((16, 17, 24)), rng.choice((16, 19, 40))
    rows, columns = rng.choice(((3, 3), (3, 3), (1, 3), (3, 1)))
    height, width = (rng.choice((4, 7, 9, 14, 19)) if n > 1 else rng.choice((1, 3)) for n in (rows, columns))
    x = data(rng.choice((1, 2)), groups * channels, height, width)
    y = x.conv2d(data(groups * outputs, channels, rows, columns), padding=(rows // 2, columns // 2), groups=groups)
    return (y + data(groups * outputs, 1, 1) + data(*y.shape)).relu() if rng.random() < 0.5 else y


@pytest.mark.parametrize("seed", a_half(range(6)))
def test_every_sketch_computes_the_convolution(seed: int) -> None:
    rng, ran = random.Random(seed), 0
    for _ in range(12):
        if ran >= 4:
            break
        case, target = Case(Kernel(kernel_of(random_convolution(rng))), seed), rng.choice(TARGETS or [TWO])
        found = sketches_of(Scheduler(case.kernel, target))
        for state in rng.sample(found, min(3, len(found))):
            assert algorithm_of(state.applied_opts) == state.applied_opts[:1]
            (run_native(case, lower(state), target, 2) if TARGETS else run_interpreted(case, lower(state), 2))
            ran += 1
    assert ran >= 4, "12 convolutions have too few sketches"


@pytest.mark.parametrize(("build", "pays"), [
    (lambda: with_weights(64, 64, 56, 3, padding=1), True), (lambda: with_weights(128, 128, 28, 3, padding=1), True),
    (lambda: with_weights(3, 64, 56, 3, padding=1), False), (lambda: with_weights(64, 64, 56, 3, padding=1, stride=2), False),
    (lambda: with_weights(64, 64, 56, 1), False),
])
def test_the_heuristic_chooses_it_where_it_pays(build: object, pays: bool) -> None:
    assert callable(build)
    assert bool(algorithm_of(heuristic(Scheduler(build(), TWO)).applied_opts)) == pays


def test_results_side_by_side_store_whole_lines() -> None:
    """64 channels of 224²: planes are a multiple of a page apart, and the lines of 16 results evict each other. With 16 neighbours at a
    time a convolution took 4.4 ms, with 4 of them 10.7 (two cores of an Intel Xeon with AMX)."""
    state = Scheduler(with_weights(64, 64, 224, 3, padding=1), TWO)
    wide, narrow = (cost_of(apply_opts(state, parse_chain(FUSED.format(x=x)))).cycles for x in (16, 4))
    assert wide < 0.85 * narrow
