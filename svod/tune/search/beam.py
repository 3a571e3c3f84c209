"""BEAM: the best few of all states measured so far, and everything one change away from them.

One round, as this file sees it:

    propose   each new member of the beam × (actions + mutations) goes to the queue, by the digest of the state;
              the best predictions of the queue are measured, none that is clearly behind, and a fifth at random
    racers    the best 2 × width of the screened, the best of each protected sketch family, and a few more sketches of these families,
              so that one unlucky sample excludes no family: at most 4 × width
    keep      the best `width` of all raced states whose outputs are right,
              at most half of them from one family; a sketch family keeps one place for two rounds

A state reached by two chains is one candidate and keeps the shorter chain. Proposals that a round has no room for stay queued.
A proposal is clearly behind if it is predicted to take longer than each of the 4 × width fastest measured candidates: their predictions
show how far the predictions for this kernel are wrong. Only the random fifth may be behind.

A beam wider than FIRST_WIDTH begins with that width. Where the search would end for lack of gains, the width is doubled: a wide beam begins
as a narrow one does, candidate by candidate, and finds no less. A beam that widens takes the best of all that was raced; the proposals that
the narrow one had no room for are still queued. With `BEAM_STRICT=reference` the rules are those of the reference systems: single actions
only, all of them measured, and a beam of the full width from the start, taken from the latest round.
"""
from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from svod.compile.backend import backend_named
from svod.config import BeamConfig
from svod.core.cost.cost_model import tiling_family
from svod.core.kernel.apply import apply_opt
from svod.errors import KernelOptError
from svod.tune.measure.candidate import Candidate, Origin, Status, chain_order
from svod.tune.search.actions import apply_tied, default_actions, lanes_of, mutations, reference_actions

FIRST_WIDTH = 4            # of a wide beam, which doubles it until it has its own
RANDOM_SHARE = 0.2         # share of a round that is drawn at random
SKETCH_ROUNDS = 2          # rounds in which a sketch family keeps a place
LEAST_ROUND = 8            # least number of best predictions in a round, even if they are behind
JUDGES = 4                 # times width: the number of fastest candidates that define which predictions are clearly behind


class Beam:
    """What one search of a kernel tries and keeps. `base`: the untouched state. Filters, building, timing, verification, the database
    and the budget are the search's; the beam changes nothing that they measured."""

    def __init__(self, base: Any, config: BeamConfig) -> None:
        self.base, self.config = base, config
        self.strict = config.strict == "reference"
        self.reference_grid = self.strict or config.actions == "reference"
        self.width = config.width if self.strict else min(FIRST_WIDTH, config.width)
        self.lanes = lanes_of(base.kernel, base.target)
        self.cost = backend_named(base.target.device).cost
        self.random = random.Random(config.seed)
        self.members: list[Candidate] = []
        self.seen: dict[bytes, Candidate] = {}
        self.queue: dict[bytes, Candidate] = {}
        self.sketch_families: dict[Any, int] = {}     # family → first round in which it need not be kept
        self.round = 0

    @property
    def queued(self) -> int:
        """Proposals that wait for a later round."""
        return len(self.queue)

    @property
    def room(self) -> int:
        """The largest number of candidates of a round."""
        return self.config.round_size * self.width

    def widen(self) -> bool:
        """Double the width up to the configured one. False where the beam has it already. `keep` fills the beam."""
        if self.width >= self.config.width:
            return False
        self.width = min(2 * self.width, self.config.width)
        return True

    # -- propose ----------------------------------------------------------------------------------------------------------
    def offer(self, state: Any, origin: Origin) -> Candidate | None:
        """The candidate for `state` if it is new; a known one may get a shorter chain."""
        known = self.seen.get(state.digest)
        if known is not None:
            if chain_order(state.applied_opts) < chain_order(known.chain):
                known.state, known.chain = state, state.applied_opts
            return None
        candidate = Candidate(state, state.applied_opts, origin)
        self.seen[state.digest] = candidate
        return candidate

    def seed(self, candidates: Sequence[Candidate]) -> list[Candidate]:
        fresh = []
        for c in candidates:
            if c.digest not in self.seen:
                self.seen[c.digest] = c
                fresh.append(c)
                self.predict(c)
            if c.origin is Origin.SKETCH:
                self.sketch_families.setdefault(tiling_family(c.state), self.round + SKETCH_ROUNDS + 1)
        if self.strict or len(fresh) <= self.room:
            return fresh
        # the best prediction of each family first, then by prediction; later rounds propose what this one has no room for
        ranked = sorted(fresh, key=lambda c: c.predicted)
        leaders = {id(c) for c in {tiling_family(c.state): c for c in reversed(ranked)}.values()}
        ranked.sort(key=lambda c: (c.origin is Origin.SKETCH, id(c) not in leaders))
        self.requeue(ranked[self.room:])
        return ranked[:self.room]

    def actions(self, state: Any) -> Iterable[Any]:
        if self.reference_grid:
            return reference_actions(state, padto=self.config.padto)
        return default_actions(state, self.lanes)

    def expand(self, member: Candidate) -> None:
        """Queue all states one action or mutation away from `member`."""
        member.expanded = True
        for opt in self.actions(member.state):
            try:
                state = apply_opt(member.state, opt)
            except KernelOptError:
                continue
            self.enqueue(state, Origin.ACTION)
            tied = None if self.reference_grid else apply_tied(member.state, opt, state)
            if tied is not None:
                self.enqueue(tied, Origin.ACTION)
        if self.config.mutations and not self.strict:
            for state in mutations(self.base, member.chain, self.lanes):
                self.enqueue(state, Origin.MUTATION)

    def enqueue(self, state: Any, origin: Origin) -> None:
        candidate = self.offer(state, origin)
        if candidate is not None and self.predict(candidate):
            self.queue[candidate.digest] = candidate

    def propose(self) -> list[Candidate]:
        """Candidates for the next round; none when there is nothing left to try."""
        self.round += 1
        for member in self.members:
            if not member.expanded:
                self.expand(member)
        room = len(self.queue) if self.strict else self.room
        chosen = list(self.queue.values())
        ranked = sorted(chosen, key=lambda c: (c.predicted, *chain_order(c.chain)))
        limit = float("inf") if self.strict else self.behind()
        near = sum(c.predicted <= limit for c in ranked)
        if len(chosen) > room or near < len(chosen):
            # a fifth is random, whether few or many proposals are not behind
            best = min(room - int(room * RANDOM_SHARE), max(near, LEAST_ROUND))
            at_random = min(int(best * RANDOM_SHARE / (1 - RANDOM_SHARE)), len(ranked) - best, room - best)
            chosen = ranked[:best] + self.random.sample(ranked[best:], max(0, at_random))
        for c in chosen:
            del self.queue[c.digest]
            c.round = self.round
        return chosen

    def behind(self) -> float:
        """The predicted cycles above which a proposal is clearly behind; infinite until twice as many candidates were measured."""
        measured = sorted((c for c in self.seen.values() if c.samples and c.predicted < float("inf")), key=lambda c: c.seconds)
        judges = JUDGES * self.width
        return max(c.predicted for c in measured[:judges]) if len(measured) >= 2 * judges else float("inf")

    def requeue(self, candidates: Sequence[Candidate]) -> None:
        """Put back the candidates that a round had no time for."""
        for c in candidates:
            self.queue[c.digest] = c

    # -- keep -------------------------------------------------------------------------------------------------------------
    def protected(self) -> set[Any]:
        return {family for family, end in self.sketch_families.items() if self.round < end}

    def racers(self, screened: Sequence[Candidate]) -> list[Candidate]:
        """Which screened candidates are raced against the incumbent, best first."""
        ranked = sorted(screened, key=lambda c: (c.seconds, *chain_order(c.chain)))
        chosen = ranked[:2 * self.width]
        most = 2 * len(chosen)      # some kernels have sketches of dozens of families, and a race takes as long as it has racers
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
        """The beam that `pool` gives, best first: caps per family and kept places applied."""
        ranked = sorted(pool, key=lambda c: c.order)
        if self.strict:
            latest = [c for c in ranked if c.round == self.round]
            return (latest or ranked)[:self.width]
        leaders = {tiling_family(c.state): c for c in reversed(ranked)}
        protected = sorted((leaders[f] for f in self.protected() if f in leaders), key=lambda c: c.order)
        # places kept for sketches never push out the best, and the best sketches come first where there are too many
        kept = [*ranked[:1], *(c for c in protected if c is not ranked[0])][:self.width]
        taken = Counter(tiling_family(c.state) for c in kept)
        for c in ranked:
            if len(kept) < self.width and c not in kept and taken[tiling_family(c.state)] < -(-self.width // 2):
                kept.append(c)
                taken[tiling_family(c.state)] += 1
        return sorted(kept, key=lambda c: c.order)

    def keep(self, pool: Sequence[Candidate], verify: Callable[[Sequence[Candidate]], None]) -> None:
        while True:
            chosen = self.select([c for c in pool if c.status in (Status.RACED, Status.VERIFIED)])
            unsure = [c for c in chosen if c.status is Status.RACED]
            if not unsure:
                self.members = chosen
                return
            verify(unsure)

    def predict(self, candidate: Candidate) -> bool:
        """Predict the cycles of a candidate. Returns False, and marks it as failed, where its opts are legal one by one but not
        together."""
        try:
            candidate.predicted = self.cost(candidate.state).cycles
        except KernelOptError as e:
            candidate.fail(Status.ERROR, str(e))
            return False
        return True
