"""The heuristic for groups computes a convolution by WINOGRAD where that is predicted to pay, and prices its products as other ones."""
from __future__ import annotations

import random
from dataclasses import replace
from math import inf, isfinite

import pytest

from svod.core.cost.groups.group_cost import group_cost
from svod.core.cost.groups.group_sketch import group_heuristic, group_sketches
from svod.core.cost.groups.winograd import least_cycles, products_of
from svod.core.cost.sketch import ALGORITHM_FACTOR
from svod.core.graph import graph
from svod.core.graph.storage import base_of
from svod.core.kernel.apply import algorithm_of
from svod.core.kernel.kernel import Kernel
from svod.core.kernel.placement import is_computed_once, place_stages
from svod.core.kernel.scheduler import Scheduler
from svod.core.machine.target import SAME
from svod.core.schedule.schedule import create_schedule
from tests.compile.cuda.target import card_target
from tests.core.corpus import data, kernel_of
from tests.core.cost.groups.test_group_cost import SOFTWARE

H100 = card_target("sm_90")
TARGETS = {"sm_90": H100, "sm_75": card_target("sm_75"), "software": replace(SOFTWARE, device="WEBGPU")}


def convolution(batch: int, channels: int, side: int, stride: int = 1) -> Kernel:
    taps = data(channels, channels, 3, 3)
    y = data(batch, channels, side, side).conv2d(taps, padding=1, stride=stride)
    return Kernel(create_schedule(graph.sink(y.uop), frozenset({base_of(taps.uop)})).calls[-1].ast)


@pytest.mark.parametrize(("batch", "channels", "side", "chosen"), [
    (8, 128, 28, True), (32, 512, 7, True), (1, 512, 7, False), (1, 3, 28, False)])
def test_the_algorithm_is_chosen_where_it_is_predicted_to_pay(batch: int, channels: int, side: int, chosen: bool) -> None:
    base = Scheduler(convolution(batch, channels, side), H100)
    best, found = group_heuristic(base), group_sketches(base)
    assert bool(algorithm_of(best.applied_opts)) == chosen
    direct = min(group_cost(s).cycles for s in found if not algorithm_of(s.applied_opts))
    by_algorithm = [group_cost(s).cycles for s in found if algorithm_of(s.applied_opts)]
    assert chosen == (min(by_algorithm, default=direct) * ALGORITHM_FACTOR < direct)


@pytest.mark.parametrize("target", TARGETS)
def test_no_sketch_takes_less_than_the_bound(target: str) -> None:
    found, rng = 0, random.Random(target)
    for _ in range(4):
        batch, channels, outs, height, width = (rng.choice(n) for n in ((1, 3, 16), (8, 17, 96), (7, 48, 256), (5, 13, 28), (7, 20, 31)))
        y = data(batch, channels, height, width).conv2d(data(outs, channels, 3, 3), padding=1)
        base = Scheduler(Kernel(kernel_of(y)), TARGETS[target])
        cycles = [group_cost(s).cycles for s in group_sketches(base) if algorithm_of(s.applied_opts)]
        assert least_cycles(base) <= min(cycles, default=inf), (batch, channels, outs, height, width)
        assert bool(cycles) == isfinite(least_cycles(base))
        found += len(cycles)
    assert found


def test_weights_are_transformed_once() -> None:
    state = group_heuristic(Scheduler(convolution(8, 128, 28), H100))
    placement = place_stages(state)
    assert [is_computed_once(state, placement, s) for s in placement.roots] == [True, False, False, False]
    assert [p.name for p in group_cost(state).parts] == [state.kernel.stages[s].name for s in placement.roots[1:]]


def test_products_cost_as_much_as_a_product_of_arguments() -> None:
    """36 products of 128 × 128 and 128 × 392 numbers, whose operands are copied into shared memory."""
    state = group_heuristic(Scheduler(convolution(8, 128, 28), H100))
    name = state.kernel.stages[products_of(state.kernel)].name
    products = next(p.cycles for p in group_cost(state).parts if p.name == name)
    plain = group_heuristic(Scheduler(Kernel(kernel_of(data(36, 128, 128).permute(0, 2, 1) @ data(36, 128, 392))), H100))
    assert products == pytest.approx(group_cost(plain).cycles, rel=0.05)


@pytest.mark.parametrize("stride", [1, 2])
def test_it_is_not_tried_where_it_is_not_allowed(stride: int) -> None:
    target = replace(H100, numerics=SAME) if stride == 1 else H100
    assert not any(algorithm_of(s.applied_opts) for s in group_sketches(Scheduler(convolution(8, 128, 28, stride), target)))
