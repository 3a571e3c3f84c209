"""BEAM: the best few of all states measured so far, and everything one change away from them.

    propose   every action on and every mutation of each new member of the beam goes to the queue, if its state is new;
              a round measures the candidates of the queue with the best predictions, unless they are clearly behind,
              and adds a fifth at random

Proposals that a round has no room for stay queued. A proposal is clearly behind if the analytic model predicts it to take longer than each
of the 4 × width fastest measured candidates: their predictions show how far the predictions for this kernel are wrong. Only the random
fifth may be behind. When the beam widens, its members are the best of all candidates raced so far; proposals that the narrow beam had no
room for are still queued.

With `BEAM_STRICT=reference` the rules are those of the reference systems: single actions only, all of them measured, and a beam of the full
width from the start, taken from the latest round.
"""
from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence

from svod.config import BeamConfig
from svod.core.kernel.scheduler import Opt, Scheduler
from svod.tune.measure.candidate import Candidate, Origin
from svod.tune.search.actions import default_actions, reference_actions
from svod.tune.search.cost_models import CostModel
from svod.tune.search.strategies.strategy import RANDOM_SHARE, Proposer

LEAST_ROUND = 8            # a round measures at least this many of the best predictions, even if they are behind
JUDGES = 4                 # the JUDGES × width fastest candidates define which predictions are clearly behind


class Beam(Proposer):
    """Proposes all states one change away from the members of the beam, the best predictions first."""

    def __init__(self, base: Scheduler, config: BeamConfig, model: CostModel | None = None) -> None:
        super().__init__(base, config, model)
        self.strict = config.strict == "reference"
        self.reference_grid = self.strict or config.actions == "reference"
        if self.strict:
            self.width = config.width

    @property
    def room(self) -> int:
        return sys.maxsize if self.strict else super().room

    # -- propose ----------------------------------------------------------------------------------------------------------
    def actions(self, state: Scheduler) -> Iterable[Opt]:
        if self.reference_grid:
            return reference_actions(state, padto=self.config.padto)
        return default_actions(state, self.lanes)

    def expand(self, member: Candidate) -> None:
        """Queue all states one action or mutation away from `member`."""
        member.expanded = True
        for opt in self.actions(member.state):
            state = self.after(member.state, opt)
            if state is None:
                continue
            self.enqueue(state, Origin.ACTION)
            tied = None if self.reference_grid else self.after_tied(member.state, opt)
            if tied is not None:
                self.enqueue(tied, Origin.ACTION)
        if self.config.mutations and not self.strict:
            for state in self.mutate(member.chain):
                self.enqueue(state, Origin.MUTATION)

    def propose(self) -> list[Candidate]:
        self.round += 1
        for member in self.members:
            if not member.expanded:
                self.expand(member)
        chosen = list(self.queue.values())
        ranked = self.ranked(chosen)
        limit = float("inf") if self.strict else self.behind()
        near = sum(c.predicted <= limit for c in ranked)
        if len(chosen) > self.room or near < len(chosen):
            # a fifth of the round is random, however many proposals are behind
            best = min(self.room - int(self.room * RANDOM_SHARE), max(near, LEAST_ROUND))
            at_random = min(int(best * RANDOM_SHARE / (1 - RANDOM_SHARE)), len(ranked) - best, self.room - best)
            chosen = ranked[:best] + self.random.sample(ranked[best:], max(0, at_random))
        return self.begin_round(chosen)

    def behind(self) -> float:
        """The predicted cycles above which a proposal is clearly behind; infinite until 2 × JUDGES × width candidates were measured."""
        measured = sorted((c for c in self.seen.values() if c.samples and c.predicted < float("inf")), key=lambda c: c.seconds)
        judges = JUDGES * self.width
        return max(c.predicted for c in measured[:judges]) if len(measured) >= 2 * judges else float("inf")

    # -- keep -------------------------------------------------------------------------------------------------------------
    def select(self, pool: Sequence[Candidate]) -> list[Candidate]:
        if not self.strict:
            return super().select(pool)
        ranked = sorted(pool, key=lambda c: c.order)
        latest = [c for c in ranked if c.round == self.round]
        return (latest or ranked)[:self.width]
