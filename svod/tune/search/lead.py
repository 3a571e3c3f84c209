"""The candidate that leads a search, its incumbent, and its gain over the heuristic."""
from __future__ import annotations

import math
import statistics
from collections.abc import Iterable

from svod.core.kernel.chain_text import chain_text
from svod.tune.measure.candidate import Candidate, Status
from svod.tune.measure.measurer import Failure
from svod.tune.search.events import Improved, Listener

YARDSTICK_REACH = 4.0          # The heuristic's candidate takes no part in races if it takes more than this many times the incumbent.


class Lead:
    """The incumbent of a search: the best verified candidate, against which others race; None before there is one. `baseline`: the
    heuristic's candidate.

    An incumbent was the luckiest of its race. To remove that luck from its score, each race measures it again, against the baseline, which
    was not chosen by a race."""

    def __init__(self, key: str, baseline: Candidate, listener: Listener) -> None:
        self.baseline = baseline
        self.incumbent: Candidate | None = None
        self._key, self._listener = key, listener
        self._told = float("inf")                   # seconds of the fastest incumbent announced so far
        self._estimates: list[float] = []           # logarithms of the incumbent's seconds in each race as incumbent

    @property
    def best(self) -> float:
        """Seconds of one call of the incumbent; infinite without one."""
        return self.incumbent.score if self.incumbent else float("inf")

    @property
    def verified_baseline(self) -> Candidate | None:
        """The heuristic's candidate, if it was verified."""
        return self.baseline if self.baseline.status is Status.VERIFIED else None

    @property
    def improved(self) -> bool:
        """Whether the search has found a better chain than the heuristic's."""
        return self.incumbent is not None and self.incumbent is not self.baseline

    @property
    def seconds(self) -> float:
        """Seconds of a call that the best chain saves over the heuristic's; 0 while there is no better one."""
        return self.baseline.score - self.best if self.improved and self.baseline.score < float("inf") else 0.0

    def is_measured_again(self, c: Candidate) -> bool:
        """Whether the baseline takes part in races with the incumbent `c`, which measure `c` again."""
        return c is not self.baseline and self.baseline.status is Status.VERIFIED and self.baseline.score <= YARDSTICK_REACH * c.score

    def assess_again(self, incumbent: Candidate, ratio: float | Failure) -> None:
        """Score the incumbent by all its races as incumbent. `ratio`: the baseline's time over its own in the latest race."""
        if not isinstance(ratio, Failure):
            self._estimates.append(math.log(self.baseline.score / ratio))
            incumbent.score = math.exp(statistics.fmean(self._estimates))

    def choose(self, pool: Iterable[Candidate]) -> None:
        """Make the best verified candidate of the pool the incumbent."""
        best = min((c for c in pool if c.status is Status.VERIFIED), key=lambda c: c.order, default=None)
        if best is not None and best is not self.incumbent:
            self.pass_to(best)

    def pass_to(self, c: Candidate) -> None:
        """Make `c` the incumbent, and announce it if it is faster than all incumbents before it."""
        if self.incumbent is not None and c.score < self._told:
            self._listener(Improved(self._key, c.score, self.incumbent.score, chain_text(c.chain)))
        self.incumbent, self._told = c, min(self._told, c.score)
        self._estimates.clear()

    def forget(self, c: Candidate, pool: Iterable[Candidate]) -> None:
        """Take the lead from `c`, which turned out wrong, and give it to the best verified candidate of the others."""
        if self.incumbent is c:
            self.incumbent = self.verified_baseline
            self.choose(pool)
