"""Sketches behind a bound are never priced, and phases are priced once: the choice is that of pricing every sketch by itself."""
from __future__ import annotations

import random
from contextlib import suppress
from dataclasses import replace

import pytest

from svod.core.cost.cost import Cost
from svod.core.cost.groups import group_sketch
from svod.core.cost.groups.group_cost import group_cost
from svod.core.cost.groups.prices import GroupPrices
from svod.core.cost.groups.spread import distinct
from svod.core.kernel.kernel import Kernel
from svod.core.kernel.scheduler import Scheduler
from svod.errors import KernelOptError
from tests.compile.cuda.target import card_target
from tests.core.corpus import CORPUS, data, gemm, kernel_of
from tests.core.cost.groups.test_group_cost import SOFTWARE

TARGETS = {"sm_90": card_target("sm_90"), "sm_75": card_target("sm_75"), "software": replace(SOFTWARE, device="WEBGPU")}
KERNELS = {
    "gemm": lambda: kernel_of(gemm(19, 24, 40)), "few results": lambda: kernel_of(gemm(16, 16, 256, "bfloat16")),
    "conv": CORPUS["conv3x3"], "attention": CORPUS["attention"], "layer norm": CORPUS["layer_norm_residual"],
    "products of tiles": lambda: kernel_of(data(2, 48, 20, 20).conv2d(data(48, 48, 3, 3), padding=1)),
    "columns": lambda: kernel_of(data(513, 37).sum(0)), "transpose": CORPUS["transpose"],
}
SAMPLE = 40     # sketches of attention that are priced on a target on which not all of them are


class Exhaustive(GroupPrices):
    """Prices every state, all of it, and says so where a bound is above the price."""

    def __init__(self) -> None:
        super().__init__()
        self.others = GroupPrices()         # its phases become known one by one

    def least(self, state: Scheduler) -> float:
        return 0.0

    def cost(self, state: Scheduler) -> Cost:
        cost = group_cost(state.copy(applied_opts=state.applied_opts))
        assert max(GroupPrices().least(state), self.others.least(state)) <= cost.cycles * (1 + 1e-12), state
        assert self.others.cost(state.copy(applied_opts=state.applied_opts)).cycles == cost.cycles, state
        group_cost.give(state, cost)
        return cost


@pytest.mark.slow
@pytest.mark.parametrize("target", [t for t in TARGETS if t != "sm_90"])
def test_a_sample_of_attention_is_priced_right(target: str) -> None:
    """A sample of the sketches of attention has the prices that bounds and prices phase by phase say; pricing all of them takes long."""
    states = distinct(group_sketch._generate(Scheduler(Kernel(KERNELS["attention"]()), TARGETS[target]), GroupPrices()))
    prices, priced = Exhaustive(), 0
    for state in random.Random(target).sample(states, SAMPLE):
        with suppress(KernelOptError):      # It fits no group.
            prices.cost(state)
            priced += 1
    assert priced >= SAMPLE // 2


@pytest.mark.slow
@pytest.mark.parametrize(("kernel", "target"), [(k, t) for k in KERNELS for t in TARGETS if k != "attention" or t == "sm_90"])
def test_the_choice_is_that_of_pricing_everything(kernel: str, target: str, monkeypatch: pytest.MonkeyPatch) -> None:
    base = Scheduler(Kernel(KERNELS[kernel]()), TARGETS[target])
    best, found = group_sketch.group_heuristic(base), group_sketch.group_sketches(base)
    monkeypatch.setattr(group_sketch, "GroupPrices", Exhaustive)
    assert best.applied_opts == group_sketch.group_heuristic(base).applied_opts
    if kernel in ("gemm", "layer norm"):
        assert [s.applied_opts for s in found] == [s.applied_opts for s in group_sketch.group_sketches(base)]


def test_most_sketches_are_not_priced() -> None:
    priced = []

    class Counting(GroupPrices):
        def cost(self, state: Scheduler) -> Cost:
            priced.append(state)
            return super().cost(state)
    base = Scheduler(Kernel(kernel_of(gemm(64, 64, 512, "bfloat16"))), TARGETS["sm_90"])
    states = list(group_sketch._generate(base, GroupPrices()))
    Counting().cheapest(iter(states), 1)
    assert len(priced) < len(states) / 3
