"""The budget of a model over its kernels, on a clock of its own."""
from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import pytest

from svod.tune.search.budget import ModelBudget, expected_gain, expected_seconds, gain_within

INF = float("inf")


@dataclass
class Kernel:
    calls: float = 1.0
    history: Sequence[float] = ()
    bound: float = 0.0
    spent: float = 0.0
    widened: int = 0
    finished: bool = False
    left: list[float] = field(default_factory=list)      # times of rounds to come


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.mark.parametrize(("history", "bound", "expected"), [
    ([8.0], 1.0, 1.0),                      # no trend is known yet: the bound
    ([8.0, 4.0], 1.0, 1.0),
    ([16.0, 8.0, 4.0], 0.0, 0.0),           # gains halve: 4 - (2 + 1 + …)
    ([16.0, 8.0, 4.0], 3.0, 3.0),           # never below the bound
    ([10.0, 6.0, 5.0], 0.0, 5.0 - 1 / 3),   # gains shrink by 4: 1/4 + 1/16 + …
    ([10.0, 5.0, 5.0], 0.0, 2.5),           # one flat round: half the hope
    ([5.0, 5.0, 5.0], 0.0, 5.0),            # two flat rounds: none
    ([INF, 5.0, 4.0], 1.0, 1.0),
])
def test_what_a_kernel_can_be_expected_to_reach(history: list[float], bound: float, expected: float) -> None:
    assert expected_seconds(history, bound) == pytest.approx(expected)


@pytest.mark.parametrize(("kernels", "seconds", "saved"), [
    ([], 60.0, None),
    ([Kernel(history=[8.0, 4.0], spent=4.0)], 60.0, None),                                  # no trend yet
    ([Kernel(history=[16.0, 8.0, 4.0], spent=6.0)], 2.0, 2.0),                              # a round takes 2 s and halves what is left
    ([Kernel(history=[16.0, 8.0, 4.0], spent=6.0)], 4.0, 3.0),
    ([Kernel(history=[16.0, 8.0, 4.0], spent=6.0)], 1e9, 4.0),
    ([Kernel(history=[16.0, 8.0, 4.0], spent=6.0, bound=3.5)], 60.0, 0.5),                  # never below the bound
    ([Kernel(history=[16.0, 8.0, 4.0], spent=6.0, finished=True)], 60.0, 0.0),
    ([Kernel(history=[5.0, 5.0, 5.0], spent=6.0)], 60.0, 0.0),
    ([Kernel(history=[16.0, 8.0, 4.0], spent=6.0), Kernel(calls=10, history=[16.0, 8.0, 4.0], spent=6.0)], 2.0, 20.0),   # the best first
    ([Kernel(history=[16.0, 8.0, 4.0], spent=6.0), Kernel(calls=10, history=[16.0, 8.0, 4.0], spent=6.0)], 4.0, 30.0),
    ([Kernel(history=[16.0, 8.0, 4.0], spent=6.0), Kernel(history=[INF])], 2.0, 2.0),
])
def test_what_more_seconds_are_expected_to_save(kernels: list[Kernel], seconds: float, saved: float | None) -> None:
    assert gain_within(kernels, seconds) == (None if saved is None else pytest.approx(saved, rel=1e-4))


def test_a_kernel_that_was_never_timed_comes_first() -> None:
    assert expected_gain(Kernel()) == INF
    assert expected_gain(Kernel(history=[INF])) == INF


def test_every_kernel_is_warmed_up_before_gains_decide() -> None:
    budget = ModelBudget(100.0, 40.0, Clock())
    a, b = Kernel(calls=1), Kernel(calls=1000)
    order = []
    for _ in range(4):
        k = budget.next([a, b])
        assert k is not None
        order.append("ab"[k is b])
        k.history = [*k.history, 1.0]
    assert order == ["a", "a", "b", "b"], "what takes most of the time is searched first, not only timed"
    assert budget.next([a, b]) is b


def test_the_next_round_goes_where_calls_times_gain_is_largest() -> None:
    budget = ModelBudget(100.0, 40.0, Clock())
    slow = Kernel(calls=1, history=[10.0, 9.0], bound=5.0)
    often = Kernel(calls=100, history=[0.2, 0.2], bound=0.1)
    done = Kernel(calls=1000, history=[1.0, 1.0], bound=1.0)
    assert budget.next([slow, often, done]) is often
    often.finished = True
    assert budget.next([slow, often, done]) is slow


def test_kernels_that_widened_wait_for_those_that_have_not() -> None:
    budget = ModelBudget(100.0, 60.0, Clock())
    wide = Kernel(calls=1000, history=[9.0, 9.0, 9.0], bound=1.0, widened=1)
    wider = Kernel(calls=1000, history=[9.0, 9.0, 5.0], bound=1.0, widened=2)
    also = Kernel(calls=10, history=[9.0, 9.0, 9.0], bound=1.0, widened=1)
    narrow = Kernel(calls=1, history=[1.0, 0.99], bound=0.9)
    everything = [wider, also, wide, narrow]
    assert budget.next(everything) is narrow
    narrow.finished = True
    assert budget.next(everything) is wide, "neither can be expected to gain; it could gain more"
    assert budget.deadline(also, everything) == 1.5
    assert budget.deadline(wide, everything) == 60.0
    also.history = [9.0, 9.0, 8.0]
    assert budget.next(everything) is also
    wide.finished = also.finished = True
    assert budget.next(everything) is wider


def test_the_ends_of_the_budget() -> None:
    clock = Clock()
    budget = ModelBudget(10.0, 4.0, clock)
    k = Kernel(history=[1.0, 1.0])
    assert budget.deadline(k, [k]) == 4.0
    k.spent = 3.0
    assert budget.deadline(k, [k]) == 1.0
    k.spent = 4.0
    assert budget.next([k]) is None
    k.spent = 0.0
    clock.now = 9.0
    assert budget.deadline(k, [k]) == 10.0
    clock.now = 10.0
    assert budget.next([k]) is None
    assert budget.next([]) is None


def test_a_round_takes_its_share_of_what_is_left() -> None:
    budget = ModelBudget(100.0, 60.0, Clock())
    big = Kernel(history=[10.0, 10.0], bound=1.0)
    small = Kernel(history=[1.0, 1.0], bound=0.0)
    assert budget.deadline(big, [big, small]) == 60.0
    assert budget.deadline(small, [big, small]) == pytest.approx(10.0)
    tiny = Kernel(history=[0.01, 0.01], bound=0.0)
    assert budget.deadline(tiny, [big, small, tiny]) == 1.5


def replay(kernels: list[Kernel], budget: ModelBudget, clock: Clock, serial: bool) -> float:
    """The model's time at the end of a budget in which each round takes one second."""
    while budget.left > 0:
        k = next((k for k in kernels if not k.finished), None) if serial else budget.next(kernels)
        if k is None:
            break
        clock.now += 1.0
        k.history = [*k.history, min(k.left.pop(0), k.history[-1] if k.history else INF)]
        k.finished = not k.left
    return sum(k.calls * (k.history[-1] if k.history else 10.0) for k in kernels)


def test_interleaved_rounds_beat_one_kernel_after_the_other() -> None:
    """Eight kernels that gain most in their first rounds, with a budget that is enough to search half of them completely."""
    results = []
    for serial in (True, False):
        clock = Clock()
        kernels = [Kernel(calls=8.0 - i, left=[10.0, 4.0, 3.0, 2.6, 2.5, 2.5, 2.5, 2.5]) for i in range(8)]
        results.append(replay(kernels, ModelBudget(32.0, 40.0, clock), clock, serial))
    assert results[1] < 0.8 * results[0]
