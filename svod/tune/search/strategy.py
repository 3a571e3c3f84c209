"""The interface of search strategies: states in, chains out, measurements back.

A strategy only decides what to try and what to keep. Filters, building, timing, verification, the database and the budget are
the search's (`search.py`) and the same for all strategies. A strategy sees candidates by reference and must not change what
they measured.
"""
from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

from svod.config import BeamConfig
from svod.tune.measure.candidate import Candidate
from svod.tune.search.beam import Beam

Verify = Callable[[Sequence[Candidate]], None]


class Strategy(Protocol):
    """One search of one kernel. Everything random comes from the generator given at construction."""

    @property
    def queued(self) -> int:
        """Proposals waiting for a later round."""

    def seed(self, candidates: Sequence[Candidate]) -> list[Candidate]:
        """Take the seeds; those not seen before, to be measured in the next round beside its proposals."""

    def propose(self) -> list[Candidate]:
        """Candidates for the next round; none when there is nothing left to try."""

    def widen(self) -> bool:
        """Keep more from now on, as the search would end for lack of gains or of proposals otherwise; a `keep` follows before the next
        proposals. False where the strategy keeps as many as it was asked to."""

    def requeue(self, candidates: Sequence[Candidate]) -> None:
        """Take back what a round had no time for."""

    def racers(self, screened: Sequence[Candidate]) -> list[Candidate]:
        """Which screened candidates are raced against the incumbent, best first."""

    def keep(self, pool: Sequence[Candidate], verify: Verify) -> None:
        """Choose from all raced candidates; whatever is kept has been given to `verify` and found right."""


STRATEGIES: dict[str, Callable[..., Strategy]] = {"beam": Beam}


def make_strategy(name: str, base: Any, config: BeamConfig) -> Strategy:
    """The strategy registered under `name`, for a search from the untouched state `base`. Raises KeyError for another name."""
    return STRATEGIES[name](base, config)
