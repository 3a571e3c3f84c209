"""Evolve: a population of the fastest measured states, and children of two of them or of one.

    propose   a parent is the fastest of TOURNAMENT states drawn at random. A child of two parents has the opts of one on some axes and of
              the other on the remaining axes, or the first opts of one followed by the last opts of the other. A child of one parent is
              its mutation, or has one random opt more. BROOD times as many children are bred as a round measures; the round measures the
              children with the best predictions, and a fifth at random

While no state is measured, a child is the kernel with up to two random opts. Opts of a parent that do not apply to the child are
left out.
"""
from __future__ import annotations

from collections.abc import Sequence

from svod.config import BeamConfig
from svod.core.kernel.scheduler import Opt, Scheduler
from svod.tune.measure.candidate import Candidate, Origin
from svod.tune.search.cost_models import CostModel
from svod.tune.search.strategies.strategy import RANDOM_SHARE, Proposer

POPULATION = 8         # the fastest POPULATION × width measured states may become parents
TOURNAMENT = 3         # the fastest of this many states, drawn at random, becomes a parent
BROOD = 4              # children bred per candidate of a round
CROSSOVER_SHARE, MUTATION_SHARE = 0.3, 0.5      # shares of the children; the others get a random opt added
VAIN_CHILDREN = 20     # most attempts to breed a child, per candidate of a round; a round may then have fewer children


class Evolution(Proposer):
    """Proposes children of the fastest measured states."""

    def __init__(self, base: Scheduler, config: BeamConfig, model: CostModel | None = None) -> None:
        super().__init__(base, config, model)
        self.mutants: dict[bytes, list[Scheduler]] = {}       # digest of a parent → its mutations not proposed yet

    def propose(self) -> list[Candidate]:
        self.round += 1
        population = self.fastest(POPULATION * self.width)
        waiting = set(self.queue)
        for _ in range(VAIN_CHILDREN * self.room):
            if self.queued >= BROOD * self.room:
                break
            self.breed(population)
        ranked = self.ranked(self.queue.values())
        best = self.room - int(RANDOM_SHARE * self.room)
        others = ranked[best:]
        chosen = ranked[:best] + self.random.sample(others, min(self.room - best, len(others)))
        self.forget(set(self.queue) - waiting - {c.digest for c in chosen})
        return self.begin_round(chosen)

    def forget(self, digests: set[bytes]) -> None:
        """Remove children that were not chosen, so that later rounds may breed them again."""
        for d in digests:
            del self.queue[d], self.seen[d]

    def parent(self, population: Sequence[Candidate]) -> Candidate:
        return population[min(self.random.randrange(len(population)) for _ in range(TOURNAMENT))]

    def breed(self, population: Sequence[Candidate]) -> None:
        """Make one child of the population, and queue it if it is a new state."""
        draw = self.random.random()
        if not population:
            self.enqueue(self.step(self.step(self.base) or self.base) or self.base, Origin.WALK)
        elif draw < CROSSOVER_SHARE:
            self.enqueue(self.cross(self.parent(population).chain, self.parent(population).chain), Origin.CROSSOVER)
        elif draw < CROSSOVER_SHARE + MUTATION_SHARE:
            mutants = self.mutants_of(self.parent(population))
            if mutants:
                self.enqueue(mutants.pop(), Origin.MUTATION)
        else:
            grown = self.step(self.parent(population).state)
            if grown is not None:
                self.enqueue(grown, Origin.ACTION)

    def mutants_of(self, parent: Candidate) -> list[Scheduler]:
        """The mutations of a parent that were not proposed yet, in random order."""
        if not self.mutants.get(parent.digest):
            found = list({s.digest: s for s in self.mutate(parent.chain)}.values())
            self.random.shuffle(found)
            self.mutants[parent.digest] = found
        return self.mutants[parent.digest]

    def cross(self, first: Sequence[Opt], second: Sequence[Opt]) -> Scheduler:
        """A child of two chains: the state after opts of both."""
        if self.random.random() < 0.5:      # for each axis or stage, draw the parent whose opts on it are taken
            own = {axis for axis in dict.fromkeys(o.axis.split(".")[0] for o in (*first, *second)) if self.random.random() < 0.5}
            opts = [*(o for o in first if o.axis.split(".")[0] in own), *(o for o in second if o.axis.split(".")[0] not in own)]
        else:
            opts = [*first[:self.random.randint(0, len(first))], *second[self.random.randint(0, len(second)):]]
        state = self.base
        for opt in opts:
            state = self.after(state, opt) or state
        return state
