"""The choice of kernels to round, by what each costs in error and saves in time.

    effects of each kernel alone → those that save time, by seconds saved per error → the longest beginning of that list whose plan is
    within the limit → further kernels that still fit, one by one

Errors of single kernels do not add up exactly: they may cancel, or grow on their way to the outputs. So they only order the kernels, and
every set that is considered is measured as a whole plan.
"""
from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

MOST_EXTRAS = 48        # most kernels behind the longest beginning that are tried one by one

ErrorOf = Callable[[frozenset[str]], float]     # the error of the plan in which these kernels are rounded


class Effect(NamedTuple):
    """The effect of rounding one kernel alone. `before`, `after`: seconds of its calls in a run of the plan, in float32 and rounded;
    `error`: the error of the plan's outputs, infinite if they are not finite."""

    kernel: str
    before: float
    after: float
    error: float

    @property
    def saved(self) -> float:
        return self.before - self.after

    @property
    def worth(self) -> float:
        """Seconds saved per error."""
        return self.saved / self.error if self.error > 0.0 else math.inf


class Selection(NamedTuple):
    """The kernels to round, and the measured error of the plan in which they are."""

    kernels: frozenset[str]
    error: float


def select(effects: Sequence[Effect], error_of: ErrorOf, most: float) -> Selection:
    """Choose the kernels to round so that the error of the plan is at most `most`."""
    ranked = sorted([e for e in effects if e.saved > 0.0], key=lambda e: (-e.worth, -e.saved, e.kernel))
    names = [e.kernel for e in ranked]
    low, high, chosen = 0, len(names), Selection(frozenset(), 0.0)
    count = high                        # all of them first, as that is mostly the answer
    while low < high:
        tried = _measured(names[:count], error_of)
        if tried.error <= most:
            low, chosen = count, tried
        else:
            high = count - 1
        count = (low + high + 1) // 2
    for e in [e for e in ranked[low + 1:] if e.error <= most][:MOST_EXTRAS]:
        tried = _measured([*chosen.kernels, e.kernel], error_of)
        if tried.error <= most:
            chosen = tried
    return chosen


def _measured(kernels: Sequence[str], error_of: ErrorOf) -> Selection:
    names = frozenset(kernels)
    return Selection(names, error_of(names))
