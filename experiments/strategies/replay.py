"""Searches in a recorded space: a measurer that answers from the records, and strategies that stay inside of them.

A search runs as it does on hardware (`KernelSearch`: rounds, filters, races), with a measurer that answers from the table:

    screen    the least of three samples, drawn from those that were recorded: what a search sees is as noisy as the recording
    race      ratios of the least recorded samples, which count as the truth, with RACE_NOISE on each
    verify    all are right

A state that was not recorded is unavailable: a strategy does not get it as a proposal, and opts that lead to no recorded state do not
apply. A chain may pass through states on the way to recorded ones. So a state has fewer neighbours than in the kernel, for every strategy
alike.
"""
from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from spaces import Recorded, kernel_of, read, target

# isort: split
from svod.config import BeamConfig
from svod.core.cost.sketch import heuristic, sketches
from svod.core.kernel.apply import apply_opt
from svod.core.kernel.scheduler import Opt, Scheduler
from svod.errors import KernelOptError
from svod.tune.measure.candidate import Candidate, Origin, Status
from svod.tune.measure.measurer import Built, Confirmed, Failure, Lowered, RaceResult, Screened, Verification
from svod.tune.search.actions import apply_tied, default_actions, mutations
from svod.tune.search.kernel_search import KernelSearch, SearchedKernel
from svod.tune.search.strategies.strategy import Proposer, Strategy

RACE_NOISE = 0.01          # standard deviation of the logarithm of a ratio
SCREEN_SAMPLES = 3
SCREEN_SECONDS = 0.01      # seconds to screen a compiled candidate


class Space:
    """The recorded space of one kernel. `state_at` has a state for each digest on the way to a recorded one."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.base = Scheduler(kernel_of(name), target())
        self.rows: dict[bytes, Recorded] = {bytes.fromhex(r.digest): r for r in read(name)}
        self.measured: dict[str, Recorded] = {r.linear: r for r in self.rows.values() if r.seconds}
        self.state_at: dict[bytes, Scheduler] = {self.base.digest: self.base}
        for digest, row in self.rows.items():
            state = self.base
            for o in row.chain:
                state = apply_opt(state, Opt.from_json(o))
                self.state_at.setdefault(state.digest, state)
            self.state_at[digest] = state
        first = heuristic(self.base)
        self.heuristic = self.state_at.get(first.digest, first)
        self.sketches = [self.state_at.get(s.digest, s) for s in sketches(self.base)]
        self._after: dict[tuple[bytes, Opt, bool], Scheduler | None] = {}
        self._steps: dict[bytes, dict[str, list[Scheduler]]] = {}
        self._mutants: dict[bytes, list[Scheduler]] = {}

    @cached_property
    def best(self) -> float:
        """The least seconds that were recorded."""
        return min(min(r.seconds) for r in self.measured.values())

    def truth(self, linear: str) -> float:
        return min(self.measured[linear].seconds)

    def is_recorded(self, digest: bytes) -> bool:
        return digest in self.rows

    def after(self, state: Scheduler, opt: Opt, tied: bool = False) -> Scheduler | None:
        """The state after an opt, on all tied loops or on one; None where it does not apply or leads out of the space."""
        key = (state.digest, opt, tied)
        if key not in self._after:
            try:
                new = apply_opt(state, opt)
                new = apply_tied(state, opt, new) if tied else new
            except KernelOptError:
                new = None
            self._after[key] = None if new is None else self.state_at.get(new.digest)
        return self._after[key]

    def steps(self, state: Scheduler, lanes: int) -> Mapping[str, list[Scheduler]]:
        """All states one opt away, by the kind of opt."""
        if state.digest not in self._steps:
            found: dict[str, list[Scheduler]] = {}
            for opt in default_actions(state, lanes):
                for new in (self.after(state, opt), self.after(state, opt, tied=True)):
                    if new is not None:
                        found.setdefault(opt.op, []).append(new)
            self._steps[state.digest] = found
        return self._steps[state.digest]

    def mutants(self, state: Scheduler, lanes: int) -> list[Scheduler]:
        """All recorded states one change within the chain of a recorded state away."""
        if state.digest not in self._mutants:
            found = mutations(self.base, state.applied_opts, lanes)
            self._mutants[state.digest] = [s for s in found if self.is_recorded(s.digest)]
        return self._mutants[state.digest]


def inside(space: Space, strategy: type[Proposer]) -> type[Proposer]:
    """The strategy, with the space's states as all that there is."""

    class Inside(strategy):  # type: ignore[misc, valid-type]
        def after(self, state: Any, opt: Opt) -> Any | None:
            return space.after(state, opt)

        def after_tied(self, state: Any, opt: Opt) -> Any | None:
            return space.after(state, opt, tied=True)

        def mutate(self, chain: Sequence[Opt]) -> Iterable[Any]:
            state = self.base
            for opt in chain:
                state = apply_opt(state, opt)
            return space.mutants(state, self.lanes)

        def step(self, state: Any) -> Any | None:
            kinds = space.steps(state, self.lanes)
            return self.random.choice(kinds[self.random.choice(list(kinds))]) if kinds else None

        def offer(self, state: Any, origin: Origin) -> Candidate | None:
            return super().offer(space.state_at[state.digest], origin) if space.is_recorded(state.digest) else None
    return Inside


@dataclass
class RecordedMeasurer:
    """Answers from a space. `order` has the LINEARs as they were screened, `seconds` what compiling and screening took."""

    space: Space
    rng: random.Random
    order: list[str] = field(default_factory=list)
    seconds: float = 0.0

    def machine(self) -> dict[str, Any]:
        return {"machine": "a table"}

    def lower(self, candidates: Iterable[Candidate], limit: int) -> Iterator[tuple[Candidate, Lowered | Failure]]:
        for c in candidates:
            r = self.space.rows[c.digest]
            if not r.linear:
                yield c, Failure(Status(r.status), r.reason)
            elif limit and r.size >= limit:
                yield c, Failure(Status.LIMIT, f"{r.size} instructions; BEAM_UOPS_MAX is {limit}")
            else:
                yield c, Lowered(r.linear, r.size, None)

    def expect(self, candidate: Candidate, deadline: float) -> None:
        """There is nothing to prepare."""

    def build(self, candidates: Sequence[Candidate], *, final: bool, deadline: float) -> list[Built | Failure]:
        answers: list[Built | Failure] = []
        for c in candidates:
            row = self.space.measured.get(c.linear)
            if row is None:
                failed = next(r for r in self.space.rows.values() if r.linear == c.linear)
                answers.append(Failure(Status(failed.status) if failed.status in ("timeout", "crash") else Status.ERROR, failed.reason))
            else:
                self.seconds += row.compiled
                answers.append(Built(b"", (), None, c.linear, row.compiled, final))
        return answers

    def screen(self, candidates: Sequence[Candidate], incumbent: float | None) -> list[Screened | Failure]:
        answers: list[Screened | Failure] = []
        for c in candidates:
            samples = self.rng.choices(self.space.measured[c.linear].seconds, k=SCREEN_SAMPLES)
            self.seconds += SCREEN_SECONDS
            self.order.append(c.linear)
            answers.append(Screened(tuple(samples), incumbent is not None and min(samples) > 1.5 * incumbent))
        return answers

    def race(self, candidates: Sequence[Candidate]) -> RaceResult:
        self.seconds += SCREEN_SECONDS * len(candidates)
        truth = [self.space.truth(c.linear) * math.exp(self.rng.gauss(0, RACE_NOISE)) for c in candidates]
        return RaceResult(tuple(t / truth[0] for t in truth), truth[0], RACE_NOISE)

    def verify(self, candidates: Sequence[Candidate]) -> list[Verification]:
        return [Verification(True, "the table") for _ in candidates]

    def confirm(self, candidates: Sequence[Candidate], seconds: float) -> list[Confirmed | Failure]:
        raise NotImplementedError("a replayed search is not confirmed")


@dataclass(frozen=True)
class Found:
    """The incumbent after a round: its place among the measurements, the measurements of all rounds so far, the seconds of compiling and
    screening; and how much longer it takes than the best of the space, as a share."""

    measured: int
    timed: int
    seconds: float
    regret: float


def replay(space: Space, make: Callable[[Any, BeamConfig], Strategy], config: BeamConfig, measurements: int) -> list[Found]:
    """The incumbents of one search in the space, of at least `measurements` candidates if it does not end before."""
    return run(space, config, RecordedMeasurer(space, random.Random(config.seed)), make, measurements)


def run(space: Space, config: BeamConfig, measurer: RecordedMeasurer, make: Callable[[Any, BeamConfig], Strategy],
        measurements: int) -> list[Found]:
    """The incumbents of one search with this measurer."""
    seeds = [(s, Origin.SKETCH) for s in space.sketches] if config.sketches else []
    search = KernelSearch(SearchedKernel(space.name, space.name, space.base, space.heuristic, seeds), config, measurer, strategy_of=make)
    found: list[Found] = []
    while not search.finished and search.counts.timed < measurements:
        search.step()
        if search.lead.incumbent is not None:
            linear = search.lead.incumbent.linear
            at = len(measurer.order) - measurer.order[::-1].index(linear)       # a baseline that is proposed too is measured twice
            found.append(Found(at, search.counts.timed, measurer.seconds, space.truth(linear) / space.best - 1))
    return found


