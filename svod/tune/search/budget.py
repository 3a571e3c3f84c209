"""The search budget of a model, divided among its kernels: the kernel whose round comes next, and the time to stop.

Kernels advance in interleaved rounds. Each kernel begins with two warm-up rounds: the heuristic, which is timed and verified, and the
first proposals. The kernels that take most of the model's time come first, so that a first gain is there within seconds. Then the next
round goes to the kernel with the largest

    calls × (time − expected time after more search)

and may take that kernel's share of the remaining time, so that a short budget reaches every kernel. A search that has widened its beam
instead of ending has little to gain: it waits until the others have widened as often, so that all kernels are searched with narrow beams
first. Where no gain is expected any more, the search with the largest distance from its bound comes first.

The expected time is at least the roofline bound, and at least what the kernel's own trend gives: gains that shrink by a constant factor q
from round to round (the ratio of the last two, at most 0.8) sum to gain·q/(1−q).
"""
from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeVar

WARM_UP_ROUNDS = 2        # one round for the heuristic and one for the first proposals
MAX_TREND = 0.8
NEGLIGIBLE = 1e-6         # a gain below this share of the time counts as none
MIN_ROUND = 1.5           # least seconds for a round: a shorter one is not worth its race

MODEL_SECONDS = 600.0     # default budget of a whole model
KERNEL_SECONDS = 40.0     # default budget of one kernel


class Budgeted(Protocol):
    """The interface of a kernel's search that the budget uses. Times are seconds of one call."""

    @property
    def calls(self) -> float: ...
    @property
    def history(self) -> Sequence[float]:
        """The kernel's best time after each round, in seconds of one call; infinite while nothing has been measured."""
    @property
    def bound(self) -> float: ...
    @property
    def spent(self) -> float:
        """Wall seconds that the kernel's search has taken so far."""
    @property
    def widened(self) -> int:
        """The number of times that the search continued with a wider beam instead of ending."""
    @property
    def finished(self) -> bool: ...


S = TypeVar("S", bound=Budgeted)


def _trend(history: Sequence[float]) -> tuple[float, float] | None:
    """The gain of the last round and the factor by which gains shrink; (0, 0) after two rounds without a gain. None while there are too few
    rounds to tell."""
    if len(history) < 3 or history[-2] == float("inf") or history[-3] == float("inf"):
        return None
    gain, before = history[-2] - history[-1], history[-3] - history[-2]
    if gain <= 0:
        gain = before / 2       # one flat round after a gain halves the expected gain, two flat rounds end it
        if gain <= 0:
            return 0.0, 0.0
    return gain, min(MAX_TREND, gain / before if before > 0 else MAX_TREND)


def expected_seconds(history: Sequence[float], bound: float) -> float:
    """The seconds that a kernel is expected to reach with more search; never below `bound`. `history`: its best time after each round."""
    trend = _trend(history)
    if trend is None:
        return bound
    gain, q = trend
    return max(bound, history[-1] - gain * q / (1 - q))


def expected_gain(kernel: Budgeted) -> float:
    """Seconds of model time that more rounds of this kernel may save."""
    if not kernel.history or kernel.history[-1] == float("inf"):
        return float("inf")
    return kernel.calls * max(0.0, kernel.history[-1] - expected_seconds(kernel.history, kernel.bound))


def gain_within(kernels: Iterable[Budgeted], seconds: float) -> float | None:
    """Seconds of model time that `seconds` more of searching are expected to save, by the trends of the kernels that have one: each round
    takes as long as its kernel's rounds took on average, and the rounds that gain most per second come first. None where no trend is known.
    """
    rounds: list[tuple[float, float]] = []      # for each possible round: gain per second, seconds
    known = False
    for k in kernels:
        trend = _trend(k.history)
        known = known or trend is not None
        if trend is None or k.finished:
            continue
        (gain, q), most = trend, max(0.0, k.history[-1] - k.bound)
        each, used = max(MIN_ROUND, k.spent / len(k.history)), 0.0
        while used < seconds and most > 0.0 and (gain := gain * q) > NEGLIGIBLE * k.history[-1]:
            rounds.append((k.calls * min(gain, most) / each, each))
            most, used = most - gain, used + each
    saved = 0.0
    for rate, each in sorted(rounds, reverse=True):
        saved += rate * min(each, seconds)
        seconds -= min(each, seconds)
    return saved if known else None


def possible_gain(kernel: Budgeted) -> float:
    """Seconds of model time that this kernel would save if it reached its bound."""
    return kernel.calls * max(0.0, kernel.history[-1] - kernel.bound)


@dataclass
class ModelBudget:
    """Wall seconds for all kernels of a model, and for each of them, as `clock` measures them."""

    total: float = MODEL_SECONDS
    per_kernel: float = KERNEL_SECONDS
    clock: Callable[[], float] = time.monotonic

    def __post_init__(self) -> None:
        self.started = self.clock()

    @property
    def elapsed(self) -> float:
        return self.clock() - self.started

    @property
    def until_end(self) -> float:
        """Seconds of the budget that are left; negative after its end."""
        return self.total - self.elapsed

    @property
    def left(self) -> float:
        return max(0.0, self.until_end)

    def next(self, kernels: Sequence[S]) -> S | None:
        """The kernel whose round comes next, or None when the budget is spent or every search has finished. Warm-up rounds follow the order
        of `kernels`, which should be sorted by their share of the run time, largest first."""
        if self.left <= 0:
            return None
        open_kernels = [k for k in kernels if not k.finished and k.spent < self.per_kernel]
        for k in open_kernels:
            if len(k.history) < WARM_UP_ROUNDS:
                return k
        return min(open_kernels, key=lambda k: (k.widened, -expected_gain(k), -possible_gain(k)), default=None)

    def deadline(self, kernel: S, kernels: Sequence[S]) -> float:
        """The time on `clock` at which the next round of this kernel has to end. It may take a share of the remaining time that is
        proportional to its expected gain."""
        limit = min(self.left, max(0.0, self.per_kernel - kernel.spent))
        if len(kernel.history) < WARM_UP_ROUNDS:        # leave the others time for their warm-up
            cold = sum(len(k.history) < WARM_UP_ROUNDS and not k.finished for k in kernels)
            return self.clock() + min(limit, max(MIN_ROUND, self.left / max(1, cold)))
        alike = [k for k in kernels if not k.finished and k.widened == kernel.widened]
        gain = expected_gain if any(expected_gain(k) > 0 for k in alike) else possible_gain
        total, own = sum(map(gain, alike)), gain(kernel)
        if 0 < total < float("inf"):
            limit = min(limit, max(MIN_ROUND, self.left * own / total))
        return self.clock() + limit
