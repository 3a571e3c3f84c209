"""The rule that ends a search which makes no progress.

A gain counts when the incumbent keeps it in another measurement. A new incumbent may have won its race by luck, so the search goes on for
one more round, which measures it again.
"""
from __future__ import annotations

import logging

from svod.config import BeamConfig
from svod.tune.db.records import AT_BOUND
from svod.tune.measure.measurer import RaceResult

log = logging.getLogger("svod.tune")

RELATIVE_PROGRESS = 0.005      # A round that gains less than this share is flat.
BOUND_REACHED = 1.05           # An incumbent is at the roofline bound if its time is at most this many times the bound.
BOUND_RACES = 2                # Races in a row at the bound after which a search may end: in a single one the machine may have been faster.
BOUND_REFUTED = 0.95           # A time below this many bounds shows that the bound is wrong.


class SearchGains:
    """The gains of a search, round by round. `bound`: the roofline's seconds of a call; 0 where it is unknown. `settled`: the least seconds
    that an incumbent kept when it was measured again. `flat`: rounds in a row without a gain. `at_bound`: latest races in a row whose
    incumbent was at the bound. `noise`: the relative noise of the latest race."""

    def __init__(self, config: BeamConfig, bound: float) -> None:
        self.strict = config.strict == "reference"
        self.bound, self.settled, self.flat, self.at_bound, self.noise = bound, float("inf"), 0, 0, 0.0
        self._least, self._patience = config.min_progress * 1e-6, 1 if self.strict else config.patience

    def see_race(self, race: RaceResult) -> None:
        """Take note of a race's noise and of its incumbent's time."""
        self.noise = race.noise
        near = BOUND_REFUTED * self.bound <= race.anchor <= BOUND_REACHED * self.bound and not race.noisy
        self.at_bound = self.at_bound + 1 if near else 0

    def judge(self, name: str, best: float, settled: float, *, proposed: bool) -> str:
        """The reason to end a search after a round, or "". `best`: seconds of the incumbent. `settled`: seconds of the incumbent that this
        round began with, as its race measured them again. A round without proposals never counts as one without a gain."""
        least = self._least
        if not self.strict and best < float("inf"):
            least = max(least, best * max(RELATIVE_PROGRESS, self.noise))
        if self.settled - settled > least:
            self.flat, self.settled = 0, settled
        else:
            self.flat += proposed
        promising = self.settled - best > least
        if best < BOUND_REFUTED * self.bound:
            # the ceilings were measured while the machine was busy: such a bound must not end the search
            log.info("%s: %.3g s is below the roofline bound of %.3g s, which is ignored from now on", name, best, self.bound)
            self.bound, self.at_bound = 0.0, 0
        if self.at_bound >= BOUND_RACES and self.flat and not promising:
            return AT_BOUND
        return f"{self.flat} round{'s' * (self.flat > 1)} without a gain" if self.flat >= self._patience + promising else ""
