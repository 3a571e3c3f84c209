"""The interface of search strategies, and the base class that they share.

A strategy decides which candidates are tried and which are kept. `KernelSearch` does everything else in the same way for all strategies:
rounds, filters, building, timing, races, verification, the database and the budget. It calls these methods of a strategy in a round:

    seed       takes the states to begin with: the baseline, stored chains, the kernel without opts and the sketches
    propose    returns new candidates; none when nothing is left to try
    requeue    takes back the candidates that the round had no time for
    racers     chooses the screened candidates to race against the incumbent: the best 2 × width, the best of each protected sketch family,
               and a few more sketches of these families, so that one unlucky sample excludes no family; at most 4 × width
    keep       keeps the best `width` of all raced states whose outputs are right, at most half of them from one family; one state of each
               sketch family is kept for two rounds. The candidates themselves hold the results of the round
    widen      is called where the search would end: it increases the width to let the search go on, or returns False

A state reached by two chains is one candidate and keeps the shorter chain. A search with a larger configured width begins with FIRST_WIDTH,
and doubles its width where it would end for lack of gains. So its first candidates are exactly those of a narrow search, and its result is
no worse.
"""
from __future__ import annotations

import random
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Protocol

from svod.compile.backend import backend_named
from svod.config import BeamConfig
from svod.core.cost.cost import tiling_family
from svod.core.kernel.apply import apply_opt
from svod.core.kernel.scheduler import Opt, Scheduler
from svod.errors import KernelOptError
from svod.tune.measure.candidate import Candidate, Origin, Status, chain_order
from svod.tune.search.actions import apply_tied, default_actions, lanes_of, mutations
from svod.tune.search.cost_models import AnalyticCost, CostModel

FIRST_WIDTH = 4            # a search begins with at most this width, and doubles it up to the configured one
RANDOM_SHARE = 0.2         # share of a round that is drawn at random where the rest is chosen by prediction
SKETCH_ROUNDS = 2          # rounds in which one state of each sketch family is kept
STEP_TRIES = 20            # a random step gives up after this many opts that do not apply
TIED_SHARE = 0.5           # share of the random splits that are applied to all tied loops

Verify = Callable[[Sequence[Candidate]], None]


class Strategy(Protocol):
    """The interface of a search strategy for one kernel. A strategy never changes measured values."""

    @property
    def queued(self) -> int:
        """The number of proposals that wait for a later round."""

    def seed(self, candidates: Sequence[Candidate]) -> list[Candidate]:
        """Take the states that the search begins with. Returns the candidates to measure now."""

    def propose(self) -> Iterable[Candidate]:
        """Candidates for the next round, no state twice; none when there is nothing left to try. The search takes all of them from the
        iterable, one by one: it may lower the first before the last is found."""

    def requeue(self, candidates: Sequence[Candidate]) -> None:
        """Take back candidates that a round had no time for, to propose them again."""

    def racers(self, screened: Sequence[Candidate]) -> list[Candidate]:
        """Choose the screened candidates to race against the incumbent, best first."""

    def keep(self, pool: Sequence[Candidate], verify: Verify) -> None:
        """End a round: keep the best of the raced candidates. `verify`, called with candidates that are about to be kept, sets their
        status."""

    def widen(self) -> bool:
        """Increase the width, so that a search that would end goes on. Returns False where it cannot be increased."""


class Proposer(ABC):
    """The base of all strategies. It tracks the known and the queued candidates, and chooses the measured ones to race and to keep."""

    def __init__(self, base: Scheduler, config: BeamConfig, model: CostModel | None = None) -> None:
        self.base, self.config = base, config
        self.model = model or AnalyticCost()
        self.width = min(FIRST_WIDTH, config.width)
        self.lanes = lanes_of(base.kernel, base.target)
        self.cost = backend_named(base.target.device).cost
        self.random = random.Random(config.seed)
        self.members: list[Candidate] = []
        self.seen: dict[bytes, Candidate] = {}
        self.queue: dict[bytes, Candidate] = {}
        self.sketch_families: dict[tuple[Any, ...], int] = {}     # family → first round in which it need not be kept
        self.round = 0

    @property
    def queued(self) -> int:
        return len(self.queue)

    @property
    def room(self) -> int:
        """The largest number of candidates of a round."""
        return self.config.round_size * self.width

    def widen(self) -> bool:
        """Double the width up to the configured one. Returns False if the search has the configured width already."""
        if self.width >= self.config.width:
            return False
        self.width = min(2 * self.width, self.config.width)
        return True

    # -- propose ----------------------------------------------------------------------------------------------------------
    @abstractmethod
    def propose(self) -> Iterable[Candidate]: ...

    def begin_round(self, chosen: Iterable[Candidate]) -> list[Candidate]:
        """Take the chosen candidates out of the queue and mark them with the number of the round. Returns them."""
        chosen = list(chosen)
        for c in chosen:
            self.queue.pop(c.digest, None)
            c.round = self.round
        return chosen

    def offer(self, state: Scheduler, origin: Origin) -> Candidate | None:
        """A new candidate for `state`; None if the state is known, whose candidate then gets the chain if it is shorter."""
        known = self.seen.get(state.digest)
        if known is not None:
            if chain_order(state.applied_opts) < chain_order(known.chain):
                known.state, known.chain = state, state.applied_opts
            return None
        candidate = Candidate(state, state.applied_opts, origin)
        self.seen[state.digest] = candidate
        return candidate

    def enqueue(self, state: Scheduler, origin: Origin) -> bool:
        """Queue `state` if it is new and its cost can be predicted. Returns whether it was queued."""
        candidate = self.offer(state, origin)
        if candidate is None or not self.predict(candidate):
            return False
        self.queue[candidate.digest] = candidate
        return True

    def seed(self, candidates: Sequence[Candidate]) -> list[Candidate]:
        fresh = []
        for c in candidates:
            if c.digest not in self.seen:
                self.seen[c.digest] = c
                fresh.append(c)
                self.predict(c)
            if c.origin is Origin.SKETCH:
                self.sketch_families.setdefault(tiling_family(c.state), self.round + SKETCH_ROUNDS + 1)
        if len(fresh) <= self.room:
            return fresh
        # seeds that are no sketches come first, then the best sketch of each family, then the others, each by prediction; later rounds
        # propose the seeds that this one has no room for
        ranked = sorted(fresh, key=lambda c: c.predicted)
        leaders = {id(c) for c in {tiling_family(c.state): c for c in reversed(ranked)}.values()}
        ranked.sort(key=lambda c: (c.origin is Origin.SKETCH, id(c) not in leaders))
        self.requeue(ranked[self.room:])
        return ranked[:self.room]

    def requeue(self, candidates: Sequence[Candidate]) -> None:
        for c in candidates:
            self.queue[c.digest] = c

    def predict(self, candidate: Candidate) -> bool:
        """Predict the cycles of a candidate. Returns False, and marks it as failed, where its opts are legal one by one but not
        together."""
        try:
            candidate.predicted = self.cost(candidate.state).cycles
        except KernelOptError as e:
            candidate.fail(Status.ERROR, str(e))
            return False
        return True

    # -- moves ------------------------------------------------------------------------------------------------------------
    def after(self, state: Scheduler, opt: Opt) -> Scheduler | None:
        """The state after `opt`; None where it does not apply."""
        try:
            return apply_opt(state, opt)
        except KernelOptError:
            return None

    def after_tied(self, state: Scheduler, opt: Opt) -> Scheduler | None:
        """The state after `opt` on its loop and on all tied loops; None where no loop is tied, or `opt` does not apply."""
        after = self.after(state, opt)
        return None if after is None else apply_tied(state, opt, after)

    def mutate(self, chain: Sequence[Opt]) -> Iterable[Scheduler]:
        """The states of all chains that differ from `chain` by one opt, changed or left out."""
        return mutations(self.base, chain, self.lanes)

    def step(self, state: Scheduler) -> Scheduler | None:
        """The state after one random opt of the default grid, all kinds of opts being equally likely; None if STEP_TRIES opts in a row
        do not apply."""
        kinds: dict[str, list[Opt]] = {}
        for opt in default_actions(state, self.lanes):
            kinds.setdefault(opt.op, []).append(opt)
        names = list(kinds)
        for _ in range(STEP_TRIES if names else 0):
            opt = self.random.choice(kinds[self.random.choice(names)])
            after = self.after(state, opt)
            if after is not None:
                tied = self.after_tied(state, opt) if self.random.random() < TIED_SHARE else None
                return after if tied is None else tied
        return None

    # -- measured ---------------------------------------------------------------------------------------------------------
    def fastest(self, count: int) -> list[Candidate]:
        """At most `count` of the measured candidates, fastest first: by their time in races, or in screening if they were never raced."""
        alive = [c for c in self.seen.values() if c.status in (Status.SCREENED, Status.RACED, Status.VERIFIED)]
        return sorted(alive, key=lambda c: (c.fitness, *chain_order(c.chain)))[:count]

    def ranked(self, candidates: Iterable[Candidate]) -> list[Candidate]:
        """The candidates by predicted time, fastest first. The cost model learns from all measurements so far before it predicts."""
        candidates = list(candidates)
        self.model.learn(self.seen.values())
        expected = dict(zip(candidates, self.model.predictions(candidates), strict=True))
        return sorted(candidates, key=lambda c: (expected[c], *chain_order(c.chain)))

    # -- keep -------------------------------------------------------------------------------------------------------------
    def protected(self) -> set[tuple[Any, ...]]:
        return {family for family, end in self.sketch_families.items() if self.round < end}

    def racers(self, screened: Sequence[Candidate]) -> list[Candidate]:
        ranked = sorted(screened, key=lambda c: (c.seconds, *chain_order(c.chain)))
        chosen = ranked[:2 * self.width]
        most = 2 * len(chosen)      # a limit, as some kernels have sketches of dozens of families, and each racer makes the race longer
        protected = self.protected()
        missing = protected - {tiling_family(c.state) for c in (*chosen, *self.members)}
        others = []
        for c in ranked[2 * self.width:]:
            if tiling_family(c.state) in missing:
                missing.discard(tiling_family(c.state))
                chosen.append(c)
            elif c.origin is Origin.SKETCH and tiling_family(c.state) in protected:
                others.append(c)
        return [*chosen, *others[:self.width]][:most]

    def select(self, pool: Sequence[Candidate]) -> list[Candidate]:
        """The best `width` of `pool`, best first: at most half of one family, and one of each protected sketch family."""
        ranked = sorted(pool, key=lambda c: c.order)
        leaders = {tiling_family(c.state): c for c in reversed(ranked)}
        protected = sorted((leaders[f] for f in self.protected() if f in leaders), key=lambda c: c.order)
        # sketches that are kept never push out the best candidate, and the best sketches come first where there are too many
        kept = [*ranked[:1], *(c for c in protected if c is not ranked[0])][:self.width]
        taken = Counter(tiling_family(c.state) for c in kept)
        for c in ranked:
            if len(kept) < self.width and c not in kept and taken[tiling_family(c.state)] < -(-self.width // 2):
                kept.append(c)
                taken[tiling_family(c.state)] += 1
        return sorted(kept, key=lambda c: c.order)

    def keep(self, pool: Sequence[Candidate], verify: Verify) -> None:
        while True:
            chosen = self.select([c for c in pool if c.status in (Status.RACED, Status.VERIFIED)])
            unsure = [c for c in chosen if c.status is Status.RACED]
            if not unsure:
                self.members = chosen
                return
            verify(unsure)
