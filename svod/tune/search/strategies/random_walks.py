"""Random: chains of random opts, from the kernel without opts and from the seeds. Nothing is predicted and nothing is learned.

    propose   walks of 1 to WALK_STEPS steps; a step is a random opt of the default grid, each kind of opt as likely as another;
              half of the walks begin at the kernel without opts, half at one of the seeds
"""
from __future__ import annotations

from collections.abc import Iterator, Sequence

from svod.config import BeamConfig
from svod.core.kernel.scheduler import Scheduler
from svod.tune.measure.candidate import Candidate, Origin
from svod.tune.search.cost_models import CostModel
from svod.tune.search.strategies.strategy import Proposer

WALK_STEPS = 8            # most steps of a walk
VAIN_WALKS = 20        # most walks per candidate of a round; a round may then have fewer candidates


class RandomWalks(Proposer):
    """Proposes the ends of random walks."""

    def __init__(self, base: Scheduler, config: BeamConfig, model: CostModel | None = None) -> None:
        super().__init__(base, config, model)
        self.starts = [base]

    def seed(self, candidates: Sequence[Candidate]) -> list[Candidate]:
        self.starts += [c.state for c in candidates]
        return super().seed(candidates)

    def propose(self) -> Iterator[Candidate]:
        self.round += 1
        room, walks = self.room, VAIN_WALKS * self.room
        while room and (self.queue or walks):
            if not self.queue:
                walks -= 1
                self.walk()
            for c in self.begin_round(list(self.queue.values())[:room]):
                room -= 1
                yield c

    def walk(self) -> None:
        """Make one random walk, and queue the state at its end if that is new."""
        state = self.random.choice([self.base, self.random.choice(self.starts)])
        for _ in range(self.random.randint(1, WALK_STEPS)):
            state = self.step(state) or state
        self.enqueue(state, Origin.WALK)
