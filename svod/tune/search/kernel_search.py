"""The search of one kernel, round by round, around a strategy (`strategies`).

    step 1      lower, build, time and verify the heuristic: it is the baseline, the first incumbent, and the result of a search that finds
                nothing better. With BEAM_SKETCHES=0 it is only the baseline: nothing starts from it
    step n      propose → limits → lower → filter → build → screen → race → verify → keep
    the end     the best are raced once more, compiled to their final code and timed at full size (`svod.tune.search.confirmation`)

A round drops a candidate for one of these reasons, checked in this order: its accumulators need more vector registers than
BEAM_UPCAST_MAX; its groups have more threads than BEAM_LOCAL_MAX; `len(LINEAR) ≥ BEAM_UOPS_MAX`; it has more than 1000 times the
operations of the round's leanest candidate (an unknown number is exempt); this search or the database has measured its LINEAR digest.
Building and screening go in small chunks: a better incumbent shortens the rest of the round, and a spent budget ends it. Candidates that
were not built go back to the queue.

A search stops after BEAM_PATIENCE rounds in a row without a gain, or when nothing is left to try. If the strategy can widen, it widens
instead, and the count of rounds begins anew. A gain is more than max(BEAM_MIN_PROGRESS, 0.5 %, the noise of the race), and the incumbent
has to keep it when it is measured again. A search whose incumbent took at most 1.05 × the roofline bound in two races in a row stops,
without widening, after one round without a gain, unless a gain waits to be measured again; a noisy race, or one below 0.95 × the bound,
does not count as one of the two. A spent budget always stops a search. With `BEAM_STRICT=reference` a search stops after one round without
a gain above BEAM_MIN_PROGRESS.

A KeyboardInterrupt leaves `step` at once. Earlier rounds are kept, and `svod.tune.search.confirmation.result` gives the best of them.
"""
from __future__ import annotations

import itertools
import logging
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass

from svod.compile.backend import backend_named
from svod.config import BeamConfig
from svod.core.cost.cost import Cost
from svod.core.kernel.chain_text import chain_text
from svod.core.kernel.groups import most_threads
from svod.core.kernel.scheduler import Scheduler
from svod.errors import KernelOptError
from svod.tune.db.records import AT_BOUND
from svod.tune.measure.candidate import DROPPED, FAILED, SEEDS, Candidate, Origin, Status
from svod.tune.measure.measurer import Failure, Measurer, Screened
from svod.tune.search.events import BaselineTimed, CandidateDropped, CandidateTimed, KernelStarted, Listener, RoundFinished, nobody
from svod.tune.search.lead import Lead
from svod.tune.search.pace import Pace
from svod.tune.search.progress import SearchGains
from svod.tune.search.strategies.registry import make_strategy
from svod.tune.search.strategies.strategy import Strategy

log = logging.getLogger("svod.tune")

MAX_WORK_RATIO = 1000          # A candidate with more than this many times the operations of the round's leanest one is dropped.
HOPELESS = 30.0                # The kernel without opts is not run if it is predicted to take this many times the heuristic's cycles.
MOST_OF_A_CHUNK = 0.75         # If more than this share of a chunk is too slow, the incumbent is timed again.
SLOWER_MACHINE = 1.1           # If the incumbent, timed again, takes this many times its old time, the machine has become slower.
SEED_ROUND = 8                 # With at least this many seeds, the first round measures only the seeds.


@dataclass
class SearchTotals:
    """The numbers of a search's candidates, by what happened to them."""

    proposed: int = 0
    limited: int = 0
    duplicate: int = 0
    built: int = 0
    timed: int = 0                 # candidates with a new LINEAR that compiled, ran and have a sample
    wrong: int = 0
    failed: int = 0


@dataclass(frozen=True)
class SearchedKernel:
    """A kernel that is searched. `base`: its state without opts; `heuristic`: its state under the heuristic's chain; `seeds`: more states
    to begin with. `known`: the LINEAR digests that the database has measurements of; seeds from the database are measured all the same, as
    they need a score of this run. `calls`: the weight of the kernel in the model. With `grows` False only the seeds are measured, and
    nothing is proposed."""

    key: str
    name: str
    base: Scheduler
    heuristic: Scheduler
    seeds: Sequence[tuple[Scheduler, Origin]] = ()
    known: Collection[str] = ()
    calls: float = 1.0
    grows: bool = True

    def cost(self, state: Scheduler) -> Cost:
        """The predicted cost of a state of the kernel."""
        return backend_named(self.base.target.device).cost(state)

    def candidates(self, *, stored: bool) -> list[Candidate]:
        """The seeds as candidates: the seeds from the database if `stored`, else all others."""
        return [Candidate(s, s.applied_opts, o) for s, o in self.seeds if (o is Origin.DATABASE) is stored]


class KernelSearch:
    """The search of one kernel. `record` is called after each round with the candidates that it finished. `bound`: the roofline's seconds
    of a call.

    history   the best seconds after each round
    pool      candidates that were screened, raced or verified; the strategy chooses the members of the beam from them
    judged    candidates that were raced or verified in the latest round
    digests   the LINEAR digests that this search has measured
    """

    def __init__(self, subject: SearchedKernel, config: BeamConfig, measurer: Measurer, *, bound: float = 0.0, listener: Listener = nobody,
                 clock: Callable[[], float] = time.monotonic,
                 strategy_of: Callable[[Scheduler, BeamConfig], Strategy] = make_strategy) -> None:
        self.subject, self.config, self.measurer, self.listener, self.clock = subject, config, measurer, listener, clock
        self.record: Callable[[Sequence[Candidate]], None] | None = None
        self.strategy = strategy_of(subject.base, config)
        self.lead = Lead(subject.key, Candidate(subject.heuristic, subject.heuristic.applied_opts, Origin.HEURISTIC), listener)
        self.stored = subject.candidates(stored=True)
        self.pace = Pace(config.timeout_sec)
        self.progress = SearchGains(config, bound)
        self.counts = SearchTotals()
        self.history: list[float] = []
        self.pool: list[Candidate] = []
        self.judged: list[Candidate] = []
        self.digests: set[str] = set()
        self.spent, self.finished, self.why = 0.0, False, ""
        self.widened = 0                           # the number of times that the strategy has widened
        self.is_wider = False                      # whether the strategy has widened and its `keep` has not been called since

    @property
    def key(self) -> str:
        return self.subject.key

    @property
    def name(self) -> str:
        return self.subject.name

    @property
    def calls(self) -> float:
        return self.subject.calls

    @property
    def bound(self) -> float:
        return self.progress.bound

    @property
    def round_end(self) -> float:
        """The expected seconds from the last chunk of candidates in the next round to the round's end."""
        return self.pace.round_end

    # -- steps ------------------------------------------------------------------------------------------------------------
    def step(self, deadline: float = float("inf")) -> None:
        """Run one round. After `deadline`, on `clock`, no further chunk of candidates is built. Raises the measurer's exceptions."""
        if self.finished:
            return
        started = self.clock()
        try:
            if not self.history:
                self._time_baseline()
            else:
                self._round(deadline)
        finally:
            self.spent += self.clock() - started

    def stop(self, why: str) -> None:
        """End the search for the reason `why`, unless it has ended for another."""
        self.finished, self.why = True, self.why or why

    def _time_baseline(self) -> None:
        self.listener(KernelStarted(self.key, self.name, len(self.subject.seeds), self.bound))
        baseline = self.lead.baseline
        if self.config.sketches:
            self.strategy.seed([baseline])
        self._build_and_screen(self._prepare([baseline], exempt=True)[1])
        if baseline.status is Status.SCREENED:
            baseline.score, baseline.status = baseline.seconds, Status.RACED
            self.verify([baseline])
        if not self.config.sketches:        # the heuristic's state is no seed, so the search may propose it as a new one
            self.pool.clear()
            self.digests.discard(baseline.linear)
        if self.lead.verified_baseline is not None:
            if self.config.sketches:
                self.lead.pass_to(baseline)
                self.progress.settled = baseline.score
                self.strategy.keep(self.pool, self.verify)
            self.listener(BaselineTimed(self.key, baseline.score))
        self.history.append(self.lead.best)
        self._report([baseline])

    def _round(self, deadline: float) -> None:
        started, before = self.clock(), self.lead.incumbent
        self.judged.clear()
        seeds: list[Candidate] = []
        if len(self.history) == 1:
            seeds = self.strategy.seed([*self.stored, *self._untouched(), *self.subject.candidates(stored=False)])
        # with enough seeds the first round measures only these: it is short, and the next one starts from the best of them
        seeds_alone = not self.subject.grows or (len(seeds) >= SEED_ROUND and not self.progress.strict)
        batch, candidates = self._prepare(seeds if seeds_alone else itertools.chain(seeds, self._propose()), exempt=False)
        if not batch:
            self.stop("nothing left to try")
            return
        self.counts.proposed += len(batch)
        left = self._build_in_chunks(candidates, deadline)
        self.strategy.requeue(left)
        built = self.clock()
        noisy = self._race(candidates)
        self.pace.end_round(self.clock() - built)
        # candidates of earlier rounds may have been raced or judged in this one
        self._report(dict.fromkeys([*(c for c in batch if c.status is not Status.QUEUED), *self.judged]))
        self.history.append(self.lead.best)
        self._announce(batch, noisy, started)
        self._judge_progress(before, proposed=not seeds_alone)

    def _untouched(self) -> list[Candidate]:
        """The kernel without opts, as a candidate. It is left out where there are other seeds and it is predicted to be far too slow
        (HOPELESS): its first run would end with a killed worker."""
        subject = self.subject
        if not subject.grows:
            return []
        others = self.config.sketches and not self.progress.strict and self.lead.incumbent is not None and subject.seeds
        if others and subject.cost(subject.base).cycles > HOPELESS * subject.cost(subject.heuristic).cycles:
            return []
        return [Candidate(subject.base, subject.base.applied_opts, Origin.UNTOUCHED)]

    def _propose(self) -> Iterator[Candidate]:
        """The strategy's proposals. A strategy that has none is widened, until it proposes something or cannot be widened any more."""
        found = False
        while not found:
            if self.is_wider:
                self.is_wider = False
                self.strategy.keep(self.pool, self.verify)
            for c in self.strategy.propose():
                found = True
                yield c
            if not found and not self._widen():
                return

    def _widen(self) -> bool:
        """Let the strategy keep more of the measured candidates and go on from these, instead of ending the search. Returns False where the
        strategy cannot widen."""
        if not self.strategy.widen():
            return False
        self.widened, self.is_wider, self.progress.flat = self.widened + 1, True, 0
        log.info("%s: nothing gained for now, the search goes on with more of what it has measured", self.name)
        return True

    def _announce(self, batch: Sequence[Candidate], noisy: bool, started: float) -> None:
        self.listener(RoundFinished(
            self.key, len(self.history) - 1, len(batch), sum(c.linear != "" and c.size > 0 for c in batch),
            sum(bool(c.samples) for c in batch), sum(c.status is Status.WRONG for c in batch),
            sum(c.status in FAILED for c in batch), self.strategy.queued, self.lead.best,
            chain_text(self.lead.incumbent.chain) if self.lead.incumbent else "", self.clock() - started, noisy))

    def _judge_progress(self, before: Candidate | None, *, proposed: bool) -> None:
        """End the search, or let it widen, where it makes no progress. `before`: the incumbent that the round began with. `proposed`: the
        round measured proposals, not only seeds."""
        again = not self.progress.strict and before is not None and (before is self.lead.baseline or self.lead.is_measured_again(before))
        why = self.progress.judge(self.name, self.lead.best, before.score if again and before else self.lead.best, proposed=proposed)
        if why == AT_BOUND or (why and not self._widen()):
            self.stop(why)

    # -- the parts of a round ---------------------------------------------------------------------------------------------
    def _prepare(self, proposals: Iterable[Candidate], *, exempt: bool) -> tuple[list[Candidate], list[Candidate]]:
        """Apply the limits to the proposals, lower them and drop duplicates; the first are lowered while later ones are still proposed.
        Returns all candidates, and those to build. `exempt`: apply no limits, for the heuristic."""
        batch: list[Candidate] = []
        expected: set[str] = set()
        for c, answer in self.measurer.lower(self._within_limits(proposals, batch, exempt), 0 if exempt else self.config.uops_max):
            if isinstance(answer, Failure):
                c.fail(answer.status, answer.reason)
                continue
            c.linear, c.size, c.work, c.status = answer.digest, answer.size, answer.work, Status.LOWERED
            if c.linear not in expected and self._is_fresh(c, exempt):
                expected.add(c.linear)
                self.measurer.expect(c, self.pace.compile_deadline)
        fresh = []
        for c in self._drop_bloated([c for c in batch if c.status is Status.LOWERED]):
            if self._is_fresh(c, exempt):
                self.digests.add(c.linear)
                fresh.append(c)
            else:
                c.fail(Status.DUPLICATE, "this LINEAR was measured before")
        for c in batch:
            self.counts.limited += c.status is Status.LIMIT
            self.counts.duplicate += c.status is Status.DUPLICATE
            if c.status in DROPPED:
                self._tell_dropped(c)
        return batch, fresh

    def _within_limits(self, proposals: Iterable[Candidate], batch: list[Candidate], exempt: bool) -> Iterator[Candidate]:
        """Yield the proposals within the limits on registers and on threads of a group. All proposals are added to `batch`."""
        for c in proposals:
            batch.append(c)
            try:
                registers = self.subject.cost(c.state).accumulators
            except KernelOptError as e:
                c.fail(Status.ERROR, str(e))
                continue
            if registers > self.config.upcast_max and not exempt:
                c.fail(Status.LIMIT, f"{registers} vector registers of accumulators; BEAM_UPCAST_MAX is {self.config.upcast_max}")
            elif (threads := most_threads(c.state)) > self.config.local_max and not exempt:
                c.fail(Status.LIMIT, f"groups of {threads} threads; BEAM_LOCAL_MAX is {self.config.local_max}")
            else:
                yield c

    def _is_fresh(self, c: Candidate, exempt: bool) -> bool:
        """Whether a candidate's LINEAR has not been measured yet. For the heuristic (`exempt`) and for seeds from the database, only
        measurements of this search count, as they need a score of this run."""
        return c.linear not in self.digests and (c.linear not in self.subject.known or exempt or c.origin is Origin.DATABASE)

    def _drop_bloated(self, lowered: Sequence[Candidate]) -> list[Candidate]:
        leanest = min((c.work for c in lowered if c.work is not None), default=None)
        kept = []
        for c in lowered:
            if leanest is not None and c.work is not None and c.work > MAX_WORK_RATIO * leanest:
                c.fail(Status.LIMIT, f"{c.work:g} operations, more than {MAX_WORK_RATIO} times the round's leanest ({leanest:g})")
            else:
                kept.append(c)
        return kept

    def _build_in_chunks(self, candidates: Sequence[Candidate], deadline: float) -> list[Candidate]:
        """Build and screen candidates, chunk by chunk. Returns those that the deadline left no time for, with the status they had before
        lowering."""
        ordered = sorted(candidates, key=lambda c: c.origin not in SEEDS)
        start = 0
        while start < len(ordered):
            now = self.clock()
            if start and now >= deadline:
                left = ordered[start:]
                for c in left:
                    self.digests.discard(c.linear)
                    c.status = Status.QUEUED
                return left
            size = self.pace.chunk_size(deadline - now)
            self._build_and_screen(ordered[start:start + size])
            start += size
            self.pace.building = (self.clock() - now) / size
        return []

    def _build_and_screen(self, candidates: Sequence[Candidate]) -> None:
        built = []
        for c, answer in zip(candidates, self.measurer.build(candidates, final=False, deadline=self.pace.compile_deadline), strict=True):
            if isinstance(answer, Failure):
                self.drop(c, answer)
            else:
                c.built, c.status = answer, Status.BUILT
                self.pace.compilations.append(answer.seconds)
                self.counts.built += 1
                built.append(c)
        timings, slower = self._screen(built)
        for c, timing in zip(built, timings, strict=True):
            if isinstance(timing, Failure):
                self.drop(c, timing)
                continue
            c.samples, c.seconds = timing.samples, timing.seconds / slower
            self.counts.timed += 1
            if timing.cut:
                c.fail(Status.SLOW, "more than the limit over the incumbent")
                self._tell_dropped(c)
            else:
                c.status = Status.SCREENED
                self.listener(CandidateTimed(self.key, c.seconds, chain_text(c.chain)))
                self.pool.append(c)

    def _screen(self, built: Sequence[Candidate]) -> tuple[list[Screened | Failure], float]:
        """The timings of these candidates, and the factor by which the machine is slower now than it was for the incumbent.

        A neighbour on the memory bus can take half of the bandwidth for seconds. If nearly all candidates are too slow, the incumbent is
        timed again, and the candidates are compared with its new time."""
        incumbent = self.lead.incumbent
        if incumbent is None:
            return self.measurer.screen(built, None), 1.0
        timings = self.measurer.screen(built, incumbent.seconds)
        slow = [t.status is Status.TIMEOUT if isinstance(t, Failure) else t.cut for t in timings]
        if sum(slow) <= MOST_OF_A_CHUNK * len(built):
            return timings, 1.0
        now = self.measurer.screen([incumbent], None)[0]        # None: a limit from its old time might cut the timing short
        if isinstance(now, Failure) or now.seconds <= SLOWER_MACHINE * incumbent.seconds:
            return timings, 1.0
        again = [i for i, t in enumerate(timings) if slow[i] or isinstance(t, Screened)]
        for i, timing in zip(again, self.measurer.screen([built[i] for i in again], now.seconds), strict=True):
            timings[i] = timing
        return timings, now.seconds / incumbent.seconds

    def drop(self, c: Candidate, failure: Failure) -> None:
        """Count and announce a candidate that failed."""
        c.fail(failure.status, failure.reason)
        self.counts.failed += failure.status is not Status.LATE
        self._tell_dropped(c)

    def _tell_dropped(self, c: Candidate) -> None:
        self.listener(CandidateDropped(self.key, str(c.status), c.reason, chain_text(c.chain)))

    def _race(self, fresh: Sequence[Candidate]) -> bool:
        """Race the best screened candidates against the incumbent, then let the strategy choose what it keeps. Returns whether the race was
        noisy."""
        noisy, lead = False, self.lead
        racers = self.strategy.racers([c for c in self.pool if c.status is Status.SCREENED])
        if lead.incumbent is None and racers:
            first = racers.pop(0)
            first.score, first.status = first.seconds, Status.RACED
            self.strategy.keep(self.pool, self.verify)
            lead.choose(self.pool)
        incumbent = lead.incumbent
        if incumbent is not None and racers:
            along = lead.is_measured_again(incumbent)
            race = self.measurer.race([incumbent, *racers, *([lead.baseline] if along else [])])
            noisy = race.noisy
            self.progress.see_race(race)
            if along:
                lead.assess_again(incumbent, race.ratios[-1])
            for c, ratio in zip(racers, race.ratios[1:1 + len(racers)], strict=True):
                if isinstance(ratio, Failure):
                    self.drop(c, ratio)
                else:
                    c.score, c.status, c.noisy = incumbent.score * ratio, Status.RACED, race.noisy
                    self.judged.append(c)
        self.strategy.keep(self.pool, self.verify)
        lead.choose(self.pool)
        return noisy

    def verify(self, candidates: Sequence[Candidate]) -> None:
        """Verify the outputs of the candidates; candidates that are wrong, or cannot be verified, leave the pool."""
        started = self.clock()
        verdicts = self.measurer.verify(candidates)
        self.pace.verifying = (self.clock() - started) / len(candidates)
        for c, verdict in zip(candidates, verdicts, strict=True):
            c.known["how"] = verdict.how
            self.judged.append(c)
            if verdict.right:
                c.status = Status.VERIFIED
            else:
                wrong = verdict.right is False
                self.drop(c, Failure(Status.WRONG if wrong else verdict.status, verdict.reason))
                self.counts.wrong += wrong
        self.pool = [c for c in self.pool if c.status not in FAILED]

    def _report(self, candidates: Iterable[Candidate]) -> None:
        if self.record is not None:
            self.record(list(candidates))
