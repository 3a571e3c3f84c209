"""The choice of kernels to round, with made-up errors and times."""
from __future__ import annotations

import itertools
import math
import random

import pytest

from svod.tune.fast.selection import Effect, select


class Plan:
    """A plan whose error is that of its rounded kernels, combined by `how`; counts the sets that are measured."""

    def __init__(self, errors: dict[str, float], how: str = "sum") -> None:
        self.errors, self.how, self.measured = errors, how, list[frozenset[str]]()

    def error_of(self, kernels: frozenset[str]) -> float:
        self.measured.append(kernels)
        own = [self.errors[k] for k in kernels]
        return math.sqrt(sum(e * e for e in own)) if self.how == "squares" else sum(own)

    def effects(self, seconds: dict[str, tuple[float, float]]) -> list[Effect]:
        return [Effect(k, *seconds[k], self.errors[k]) for k in seconds]


def test_all_are_rounded_if_the_whole_plan_is_near_enough() -> None:
    plan = Plan({"a": 1e-3, "b": 2e-3})
    found = select(plan.effects({"a": (2.0, 1.0), "b": (2.0, 1.0)}), plan.error_of, 4e-3)
    assert found.kernels == {"a", "b"} and found.error == pytest.approx(3e-3) and len(plan.measured) == 1


def test_the_error_goes_where_it_saves_most() -> None:
    plan = Plan({"small": 1e-3, "large": 1e-3, "costly": 9e-3})
    times = {"small": (1.0, 0.9), "large": (9.0, 1.0), "costly": (10.0, 1.0)}
    assert select(plan.effects(times), plan.error_of, 2.5e-3).kernels == {"small", "large"}
    assert select(plan.effects(times), plan.error_of, 1.5e-3).kernels == {"large"}


def test_a_kernel_behind_one_that_does_not_fit_is_still_tried() -> None:
    plan = Plan({"a": 2e-3, "b": 5e-3, "c": 1e-3})
    found = select(plan.effects({"a": (9.0, 1.0), "b": (9.0, 1.0), "c": (1.0, 0.9)}), plan.error_of, 4e-3)
    assert found.kernels == {"a", "c"} and found.error == pytest.approx(3e-3)


def test_what_saves_no_time_stays() -> None:
    plan = Plan({"slower": 0.0, "same": 0.0, "faster": 1e-3})
    times = {"slower": (1.0, 2.0), "same": (1.0, 1.0), "faster": (2.0, 1.0)}
    assert select(plan.effects(times), plan.error_of, 1.0).kernels == {"faster"}
    assert select(plan.effects({"slower": (1.0, 2.0)}), plan.error_of, 1.0).kernels == frozenset()


@pytest.mark.parametrize("most", [0.0, 1e-9])
def test_a_limit_that_no_kernel_meets_keeps_float32(most: float) -> None:
    plan = Plan({"a": 1e-3, "b": math.inf})
    found = select(plan.effects({"a": (2.0, 1.0), "b": (2.0, 1.0)}), plan.error_of, most)
    assert found.kernels == frozenset() and found.error == 0.0


def test_infinite_errors_are_never_chosen() -> None:
    plan = Plan({"a": 1e-3, "b": math.inf})
    assert select(plan.effects({"a": (2.0, 1.0), "b": (9.0, 1.0)}), plan.error_of, 1.0).kernels == {"a"}


@pytest.mark.parametrize("how", ["sum", "squares"])
def test_any_choice_is_within_the_limit_and_near_the_best(how: str) -> None:
    rng = random.Random(3)
    for _ in range(60):
        names = "abcdefg"[:rng.randint(1, 7)]
        plan = Plan({k: 10 ** rng.uniform(-4, -2) for k in names}, how)
        effects = plan.effects({k: (rng.uniform(1.0, 5.0), rng.uniform(0.5, 1.5)) for k in names})
        most = 10 ** rng.uniform(-4, -1.5)
        found = select(effects, plan.error_of, most)
        assert found.error == plan.error_of(found.kernels) <= most
        assert len(plan.measured) <= 3 + 2 * len(names)
        saved = {e.kernel: e.saved for e in effects}
        sets = [s for n in range(len(names) + 1) for s in itertools.combinations(names, n) if plan.error_of(frozenset(s)) <= most]
        best = max(sum(saved[k] for k in s) for s in sets)
        assert sum(saved[k] for k in found.kernels) >= 0.5 * best
