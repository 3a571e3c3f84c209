"""The search of one kernel, round by round, around a strategy (`strategies`).

    step 1      lower, build, time and verify the heuristic: it is the baseline, the first incumbent, and the result of a search that finds
                nothing better. With BEAM_SKETCHES=0 it is only the baseline: nothing starts from it
    step n      propose → limits → lower → filter → build → screen → race → verify → keep
    finish()    race the best once more; compile the finalists, the heuristic and a stored winner with passes, and time them at full size

A round drops candidates in this order: accumulators need more vector registers than BEAM_UPCAST_MAX; `len(LINEAR) ≥ BEAM_UOPS_MAX`; more
than 1000 times the work of the leanest candidate of the round (unknown work is exempt); this search or the database has seen the LINEAR
digest. Building and screening go in small chunks: a better incumbent shortens the rest of the round, and a spent budget ends it.
Candidates that were not built go back to the queue.

A search stops after BEAM_PATIENCE rounds without a gain above max(BEAM_MIN_PROGRESS, 0.5 %, the noise of the race), which an incumbent
has to keep when it is measured again, and when there is nothing left to try: unless the strategy can widen, which starts that patience
anew. Where the incumbents of two races in a row, by the races' own clock, were at 1.05 × the roofline bound, one round without a gain,
and none in sight, is enough; a noisy race, and one that refutes the bound, ends the row. It stops in any case when its budget is spent.
`BEAM_STRICT=reference`: after one round without a gain above BEAM_MIN_PROGRESS.

A KeyboardInterrupt leaves `step` at once. Earlier rounds are kept, and `result()` gives the best of them.
"""
from __future__ import annotations

import itertools
import logging
import math
import statistics
import time
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field

from svod.bench.race import Ratio
from svod.compile.backend import backend_named
from svod.config import BeamConfig
from svod.core.cost.cost import tiling_family
from svod.core.kernel.chain_text import chain_text
from svod.core.kernel.groups import most_threads
from svod.core.kernel.scheduler import Opt, Scheduler
from svod.errors import KernelOptError
from svod.tune.db.records import AT_BOUND, BUDGET_SPENT, canonical
from svod.tune.db.winners import WORST_RATIO, Standing, best_of, fits_its_times, is_slower
from svod.tune.measure.candidate import DROPPED, FAILED, SEEDS, Candidate, Origin, Status
from svod.tune.measure.measurer import Confirmed, Failure, Measurer, Screened
from svod.tune.search.events import (
    BaselineTimed,
    CandidateDropped,
    CandidateTimed,
    Improved,
    KernelFinished,
    KernelStarted,
    Listener,
    RoundFinished,
    nobody,
)
from svod.tune.search.strategies.registry import make_strategy
from svod.tune.search.strategies.strategy import Strategy

log = logging.getLogger("svod.tune")

MAX_WORK_RATIO = 1000          # A candidate with more than this many times the operations of the round's leanest one is dropped.
RELATIVE_PROGRESS = 0.005      # A round that gains less than this share is flat.
BOUND_REACHED = 1.05           # A search ends when its incumbent takes less than this many roofline bounds
BOUND_RACES = 2                # in this many races in a row: the machine may have been slower when the bound was measured.
BOUND_REFUTED = 0.95           # A time below this many bounds shows that the bound is wrong.
HOPELESS = 30.0                # The untouched kernel is not run if it is predicted to take this many times the heuristic's cycles.
CHUNK = 24                     # Candidates are built and screened in chunks of this size.
FIRST_CHUNK = 6                # The first chunk is smaller if the time is limited, as the pace is not known yet.
MOST_OF_A_CHUNK = 0.75         # If more than this share of a chunk is too slow, the incumbent is timed again.
SLOWER_MACHINE = 1.1           # If the incumbent then takes this many times its old time, the machine has become slower.
YARDSTICK_REACH = 4.0          # A baseline that takes more than this many times the incumbent is not raced along.
FINALISTS = 3                  # The least number of finalists; a wider beam has as many as it is wide.
PASSES_BRING = 1.25            # LLVM's passes may speed up one family by this factor: the best of each family within it is a finalist.
SEMIFINAL = 4                  # This many times the number of finalists are raced side by side, to choose them.
SEMIFINAL_SHARE = 0.25         # The semifinal takes this share of the seconds of a confirmation.
RACE_RUNS = 10                 # A race runs each candidate about this many times.
SEED_ROUND = 8                 # This many seeds are a round of their own.
CONFIRM_SECONDS = 3.0          # A confirmation takes at most this many seconds,
CONFIRM_SHARE = 0.2            # and at most this share of the search's seconds
CONFIRM_LEAST = 1.0            # unless that is less than this many seconds.
CONFIRM_FLOOR = 0.5            # Seconds that a confirmation always has, whatever the deadline is.
CONFIRM_ROUNDS = 15            # A confirmation usually has this many rounds, which limits the number of finalists.
ROUND_ENDS = 3                 # The ends of this many rounds predict the end of the next.
WIND_UP = 0.5                  # Seconds to store the results and to end the workers.
COMPILE_FLOOR, COMPILE_FACTOR = 1.0, 20   # The compile deadline is max(1 s, 20 × the median so far).


def _finalists(ranked: Sequence[Candidate], count: int, most: int) -> list[Candidate]:
    """The best `count` of `ranked` and the best of as many other families, as the passes may change the order; at most `most`."""
    chosen = list(ranked[:count])
    families = {tiling_family(c.state) for c in chosen}
    for c in ranked[count:]:
        if len(chosen) < min(2 * count, most) and c.score <= PASSES_BRING * ranked[0].score and tiling_family(c.state) not in families:
            families.add(tiling_family(c.state))
            chosen.append(c)
    return chosen


@dataclass(frozen=True)
class Finding:
    """The result of a search for one kernel. Times are seconds of one call; infinite where nothing was measured."""

    chain: tuple[Opt, ...]
    source: str                    # 'beam', 'database' or 'heuristic': who proposed the chain
    seconds: float
    heuristic_seconds: float
    verified: bool
    confirmed: bool                # timed at full size against the heuristic, with passes
    why: str                       # what ended the search
    linear: str                    # digest of the winner's LINEAR, without passes' influence: LINEAR has none
    speedup: Ratio                  # heuristic over winner
    winner: Candidate | None
    baseline: Candidate | None
    failure: str = ""              # where every candidate failed: how the heuristic's did


@dataclass
class Counts:
    """Totals of one search."""

    proposed: int = 0
    limited: int = 0
    duplicate: int = 0
    built: int = 0
    timed: int = 0                 # have a new LINEAR, compiled, ran, and have a sample
    wrong: int = 0
    failed: int = 0


@dataclass
class KernelSearch:
    """The search of one kernel. `base` is its untouched state, `heuristic` the heuristic's; `seeds` are more first states.

    `known` holds the LINEAR digests that the database has measurements of. Seeds from the database are exempt: they need a score of this
    run. After each round `record` gets its finished candidates. `calls` is the weight of this kernel in the model."""

    key: str
    name: str
    base: Scheduler
    heuristic: Scheduler
    config: BeamConfig
    measurer: Measurer
    seeds: Sequence[tuple[Scheduler, Origin]] = ()
    known: Collection[str] = ()
    bound: float = 0.0
    calls: float = 1.0
    grows: bool = True             # False: the seeds are measured, and nothing is proposed
    listener: Listener = nobody
    record: Callable[[Sequence[Candidate]], None] | None = None
    clock: Callable[[], float] = time.monotonic
    strategy_of: Callable[[Scheduler, BeamConfig], Strategy] = make_strategy

    history: list[float] = field(default_factory=list)
    counts: Counts = field(default_factory=Counts)
    spent: float = 0.0
    widened: int = 0               # how often the strategy did
    finished: bool = False
    why: str = ""
    noise: float = 0.0

    def __post_init__(self) -> None:
        self.strategy = self.strategy_of(self.base, self.config)
        self.cost = backend_named(self.base.target.device).cost
        self.strict = self.config.strict == "reference"
        self.patience = 1 if self.strict else self.config.patience
        self.digests: set[str] = set()
        self.pool: list[Candidate] = []            # screened or better; the strategy keeps some of the raced ones
        self.compile_seconds: list[float] = []
        self.confirmed: list[tuple[Candidate, Confirmed]] = []
        self.refuted: list[Candidate] = []         # right without passes, wrong with them
        self.unconfirmed = ""                      # why no finalist could be confirmed
        self.pace = 0.0                            # seconds to build and screen one candidate, in the latest chunk
        self.round_ends: deque[float] = deque(maxlen=ROUND_ENDS)       # seconds from the last chunk of a round to its end
        self.verify_pace = 0.0                     # seconds to verify one candidate, in the latest verification
        self.judged: list[Candidate] = []          # raced or verified in the latest round
        self.flat = 0
        self.wider = False                         # the strategy has widened and has not been given what to keep
        self.settled = float("inf")                # the least that an incumbent kept when it was measured again
        self.at_bound = 0                          # latest races in a row whose incumbent was at the roofline bound
        self.incumbent: Candidate | None = None
        self.told = float("inf")                   # the least time that was announced
        self.estimates: list[float] = []           # logarithms of the incumbent's seconds in each race as incumbent
        self.baseline = Candidate(self.heuristic, self.heuristic.applied_opts, Origin.HEURISTIC)
        self.stored = [Candidate(s, s.applied_opts, o) for s, o in self.seeds if o is Origin.DATABASE]
        self.first = [Candidate(s, s.applied_opts, o) for s, o in self.seeds if o is not Origin.DATABASE]

    @property
    def best(self) -> float:
        return self.incumbent.score if self.incumbent else float("inf")

    @property
    def round_end(self) -> float:
        """The expected seconds from the last chunk of the next round to its end: the longest of the latest rounds, as races that are
        repeated take several times as long as others."""
        return max(self.round_ends, default=0.0)

    @property
    def places(self) -> int:
        """The number of finalists, apart from the best of other families."""
        return max(FINALISTS, self.config.width)

    @property
    def compile_deadline(self) -> float:
        """The seconds that one candidate may compile."""
        floor = COMPILE_FACTOR * statistics.median(self.compile_seconds) if self.compile_seconds else self.config.timeout_sec
        return min(self.config.timeout_sec, max(COMPILE_FLOOR, floor))

    @property
    def closing(self) -> float:
        """The expected seconds for building and verifying the finalists, without timing them."""
        return (1 + self._most_finalists(CONFIRM_SECONDS) + len(self.stored)) * (self.pace + self.verify_pace)

    # -- steps ------------------------------------------------------------------------------------------------------------
    def step(self, deadline: float = float("inf")) -> None:
        """Run one round. After `deadline`, on `clock`, no further chunk begins. Raises what the measurer may raise."""
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
        """End the search. `result()` has its result."""
        self.finished, self.why = True, self.why or why

    def _time_baseline(self) -> None:
        self.listener(KernelStarted(self.key, self.name, len(self.seeds), self.bound))
        if self.config.sketches:
            self.strategy.seed([self.baseline])
        self._build_and_screen(self._prepare([self.baseline], exempt=True)[1])
        if self.baseline.status is Status.SCREENED:
            self.baseline.score = self.baseline.seconds
            self.baseline.status = Status.RACED
            self._verify([self.baseline])
        if not self.config.sketches:        # the search may propose it again
            self.pool.clear()
            self.digests.discard(self.baseline.linear)
        if self.baseline.status is Status.VERIFIED:
            if self.config.sketches:
                self._set_incumbent(self.baseline)
                self.settled = self.baseline.score
                self.strategy.keep(self.pool, self._verify)
            self.listener(BaselineTimed(self.key, self.baseline.score))
        self.history.append(self.best)
        self._report([self.baseline])

    def _round(self, deadline: float) -> None:
        started, before = self.clock(), self.incumbent
        self.judged.clear()
        seeds = self.strategy.seed([*self.stored, *self._untouched(), *self.first]) if len(self.history) == 1 else []
        # enough seeds are a round of their own: the first one is short, and what follows starts from the best of them
        seeds_alone = not self.grows or (len(seeds) >= SEED_ROUND and not self.strict)
        batch, candidates = self._prepare(seeds if seeds_alone else itertools.chain(seeds, self._propose()), exempt=False)
        if not batch:
            self.stop("nothing left to try")
            return
        self.counts.proposed += len(batch)
        left = self._build_in_chunks(candidates, deadline)
        self.strategy.requeue(left)
        built = self.clock()
        noisy = self._race(candidates)
        self.round_ends.append(self.clock() - built)
        # candidates of earlier rounds may have been raced or judged in this one
        self._report(dict.fromkeys([*(c for c in batch if c.status is not Status.QUEUED), *self.judged]))
        self.history.append(self.best)
        self._announce(batch, noisy, started)
        self._judge_progress(before, seeds_alone)

    def _untouched(self) -> list[Candidate]:
        """The untouched kernel. Left out where there are other seeds and it is hopeless: its first run would end with a killed child."""
        if not self.grows:
            return []
        others = self.config.sketches and not self.strict and self.incumbent is not None and (self.stored or self.first)
        if others and self.cost(self.base).cycles > HOPELESS * self.cost(self.heuristic).cycles:
            return []
        return [Candidate(self.base, self.base.applied_opts, Origin.UNTOUCHED)]

    def _propose(self) -> Iterator[Candidate]:
        """The strategy's proposals; one without any widens. None where that does not help."""
        found = False
        while not found:
            if self.wider:
                self.wider = False
                self.strategy.keep(self.pool, self._verify)
            for c in self.strategy.propose():
                found = True
                yield c
            if not found and not self._widen():
                return

    def _widen(self) -> bool:
        """Go on from everything measured so far with more of it, instead of ending; False where the strategy does not widen."""
        if not self.strategy.widen():
            return False
        self.widened, self.wider, self.flat = self.widened + 1, True, 0
        log.info("%s: nothing gained for now, the search goes on with more of what it has measured", self.name)
        return True

    def _announce(self, batch: Sequence[Candidate], noisy: bool, started: float) -> None:
        self.listener(RoundFinished(
            self.key, len(self.history) - 1, len(batch), sum(c.linear != "" and c.size > 0 for c in batch),
            sum(bool(c.samples) for c in batch), sum(c.status is Status.WRONG for c in batch),
            sum(c.status in FAILED for c in batch), self.strategy.queued, self.best,
            chain_text(self.incumbent.chain) if self.incumbent else "", self.clock() - started, noisy))

    def _judge_progress(self, before: Candidate | None, seeds_alone: bool) -> None:
        """End the search, or let it widen, where it makes no progress. `before`: the incumbent that the round began with.

        A gain counts when the incumbent keeps it in another measurement. A new incumbent may have won its race by luck, so the search goes
        on for the round that measures it again. A round of seeds alone is never flat, as nothing was proposed."""
        least = self.config.min_progress * 1e-6
        if not self.strict and self.best < float("inf"):
            least = max(least, self.best * max(RELATIVE_PROGRESS, self.noise))
        again = not self.strict and before is not None and (before is self.baseline or self._is_measured_again(before))
        settled = before.score if again and before else self.best
        if self.settled - settled > least:
            self.flat, self.settled = 0, settled
        else:
            self.flat += not seeds_alone
        promising = self.settled - self.best > least
        if self.best < BOUND_REFUTED * self.bound:
            # the ceilings were measured while the machine was busy: such a bound must not end the search
            log.info("%s: %.3g s is below the roofline bound of %.3g s, which is ignored from now on", self.name, self.best, self.bound)
            self.bound, self.at_bound = 0.0, 0
        if self.at_bound >= BOUND_RACES and self.flat and not promising:
            self.stop(AT_BOUND)
        elif self.flat >= self.patience + promising and not self._widen():
            self.stop(f"{self.flat} round{'s' * (self.flat > 1)} without a gain")

    # -- the parts of a round ---------------------------------------------------------------------------------------------
    def _prepare(self, proposals: Iterable[Candidate], *, exempt: bool) -> tuple[list[Candidate], list[Candidate]]:
        """Apply the limits, lower, filter. Candidates are lowered while more of them are proposed. Returns all, and those worth building.
        `exempt`: no limits, for the heuristic."""
        batch: list[Candidate] = []
        expected: set[str] = set()
        for c, answer in self.measurer.lower(self._within_limits(proposals, batch, exempt), 0 if exempt else self.config.uops_max):
            if isinstance(answer, Failure):
                c.fail(answer.status, answer.reason)
                continue
            c.linear, c.size, c.work, c.status = answer.digest, answer.size, answer.work, Status.LOWERED
            if c.linear not in expected and self._is_fresh(c, exempt):
                expected.add(c.linear)
                self.measurer.expect(c, self.compile_deadline)
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
        """The proposals that keep the limits on what a state takes; all are added to `batch`."""
        for c in proposals:
            batch.append(c)
            try:
                registers = self.cost(c.state).accumulators
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
        """Whether a LINEAR is still to be measured. The heuristic's and those of stored seeds need a score of this run."""
        return c.linear not in self.digests and (c.linear not in self.known or exempt or c.origin is Origin.DATABASE)

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
        """Build and screen. Returns the candidates that the deadline left no time for, as they were before lowering."""
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
            size = self._chunk_size(deadline - now)
            self._build_and_screen(ordered[start:start + size])
            start += size
            self.pace = (self.clock() - now) / size
        return []

    def _chunk_size(self, seconds: float) -> int:
        """The number of candidates that can be built within `seconds` at the pace of the latest ones."""
        if seconds == float("inf"):
            return CHUNK
        if self.pace == 0.0:
            return FIRST_CHUNK
        return max(1, min(CHUNK, int(seconds / self.pace)))

    def _build_and_screen(self, candidates: Sequence[Candidate]) -> None:
        built = []
        for c, answer in zip(candidates, self.measurer.build(candidates, passes=False, deadline=self.compile_deadline), strict=True):
            if isinstance(answer, Failure):
                self._drop(c, answer)
            else:
                c.built, c.status = answer, Status.BUILT
                self.compile_seconds.append(answer.seconds)
                self.counts.built += 1
                built.append(c)
        timings, slower = self._screen(built)
        for c, timing in zip(built, timings, strict=True):
            if isinstance(timing, Failure):
                self._drop(c, timing)
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
        timed again, and the candidates are held against its new time."""
        if self.incumbent is None:
            return self.measurer.screen(built, None), 1.0
        timings = self.measurer.screen(built, self.incumbent.seconds)
        slow = [t.status is Status.TIMEOUT if isinstance(t, Failure) else t.cut for t in timings]
        if sum(slow) <= MOST_OF_A_CHUNK * len(built):
            return timings, 1.0
        now = self.measurer.screen([self.incumbent], None)[0]        # without a limit: it might be cut by its own
        if isinstance(now, Failure) or now.seconds <= SLOWER_MACHINE * self.incumbent.seconds:
            return timings, 1.0
        again = [i for i, t in enumerate(timings) if slow[i] or isinstance(t, Screened)]
        for i, timing in zip(again, self.measurer.screen([built[i] for i in again], now.seconds), strict=True):
            timings[i] = timing
        return timings, now.seconds / self.incumbent.seconds

    def _drop(self, c: Candidate, failure: Failure) -> None:
        c.fail(failure.status, failure.reason)
        self.counts.failed += failure.status is not Status.LATE
        self._tell_dropped(c)

    def _tell_dropped(self, c: Candidate) -> None:
        self.listener(CandidateDropped(self.key, str(c.status), c.reason, chain_text(c.chain)))

    def _race(self, fresh: Sequence[Candidate]) -> bool:
        """Race the best of what was screened against the incumbent, then let the strategy keep. Whether the race was noisy."""
        noisy = False
        racers = self.strategy.racers([c for c in self.pool if c.status is Status.SCREENED])
        if self.incumbent is None and racers:
            first = racers.pop(0)
            first.score, first.status = first.seconds, Status.RACED
            self.strategy.keep(self.pool, self._verify)
            self._choose_incumbent()
        if self.incumbent is not None and racers:
            along = self._is_measured_again(self.incumbent)
            race = self.measurer.race([self.incumbent, *racers, *([self.baseline] if along else [])])
            noisy, self.noise = race.noisy, race.noise
            near = BOUND_REFUTED * self.bound <= race.anchor <= BOUND_REACHED * self.bound and not noisy
            self.at_bound = self.at_bound + 1 if near else 0
            if along:
                self._assess_again(race.ratios[-1])
            for c, ratio in zip(racers, race.ratios[1:1 + len(racers)], strict=True):
                if isinstance(ratio, Failure):
                    self._drop(c, ratio)
                else:
                    c.score, c.status, c.noisy = self.incumbent.score * ratio, Status.RACED, race.noisy
                    self.judged.append(c)
        self.strategy.keep(self.pool, self._verify)
        self._choose_incumbent()
        return noisy

    def _is_measured_again(self, c: Candidate) -> bool:
        """Whether the baseline is raced along with the incumbent `c`. An incumbent was the luckiest of its race. To remove that luck from
        its score, each race measures it again, against the baseline, which was not chosen by a race."""
        return c is not self.baseline and self.baseline.status is Status.VERIFIED and self.baseline.score <= YARDSTICK_REACH * c.score

    def _assess_again(self, ratio: float | Failure) -> None:
        """Score the incumbent by all its races as incumbent. `ratio`: the baseline's time over its own in the latest race."""
        assert self.incumbent is not None
        if not isinstance(ratio, Failure):
            self.estimates.append(math.log(self.baseline.score / ratio))
            self.incumbent.score = math.exp(statistics.fmean(self.estimates))

    def _choose_incumbent(self) -> None:
        best = min((c for c in self.pool if c.status is Status.VERIFIED), key=lambda c: c.order, default=None)
        if best is not None and best is not self.incumbent:
            self._set_incumbent(best)

    def _set_incumbent(self, c: Candidate) -> None:
        if self.incumbent is not None and c.score < self.told:
            self.listener(Improved(self.key, c.score, self.incumbent.score, chain_text(c.chain)))
        self.incumbent, self.told = c, min(self.told, c.score)
        self.estimates.clear()

    def _verify(self, candidates: Sequence[Candidate]) -> None:
        started = self.clock()
        verdicts = self.measurer.verify(candidates)
        self.verify_pace = (self.clock() - started) / len(candidates)
        for c, verdict in zip(candidates, verdicts, strict=True):
            c.known["how"] = verdict.how
            self.judged.append(c)
            if verdict.right:
                c.status = Status.VERIFIED
            else:
                wrong = verdict.right is False
                self._drop(c, Failure(Status.WRONG if wrong else verdict.status, verdict.reason))
                self.counts.wrong += wrong
        self.pool = [c for c in self.pool if c.status not in FAILED]

    def _report(self, candidates: Iterable[Candidate]) -> None:
        if self.record is not None:
            self.record(list(candidates))

    # -- the end ----------------------------------------------------------------------------------------------------------
    @property
    def improved(self) -> bool:
        """Whether the search has found a better chain than the heuristic's."""
        return self.incumbent is not None and self.incumbent is not self.baseline

    @property
    def lead(self) -> float:
        """Seconds of a call by which the best chain leads over the heuristic's."""
        return self.baseline.score - self.best if self.improved and self.baseline.score < float("inf") else 0.0

    def finish(self, seconds: float = CONFIRM_SECONDS, deadline: float = float("inf")) -> Finding:
        """Confirm the finalists within about `seconds`, or less after a short search, and by about `deadline` on `clock`. Where no finalist
        can be confirmed, the answer is that of `result()`."""
        self.stop(BUDGET_SPENT)
        seconds = min(seconds, max(CONFIRM_LEAST, CONFIRM_SHARE * self.spent))
        verified = self._race_the_best(SEMIFINAL_SHARE * seconds)
        most = self._most_finalists(seconds)
        finalists = _finalists(verified, min(self.places, most), most)
        # stored winners are always confirmed
        finalists += [c for c in self.stored if c.status is Status.VERIFIED and c not in finalists]
        baseline = self.baseline if self.baseline.status is Status.VERIFIED else None
        field_ = [*([baseline] if baseline else []), *finalists]
        built = []
        for c, answer in zip(field_, self.measurer.build(field_, passes=True, deadline=self.config.timeout_sec), strict=True):
            if isinstance(answer, Failure):
                log.info("%s: %s does not compile with passes: %s", self.name, chain_text(c.chain), answer.reason)
                self.unconfirmed = answer.reason
            else:
                c.built = answer
                built.append(c)
        # the passes make another binary, which is verified before it can win
        right = []
        for c, v in zip(built, self.measurer.verify(built), strict=True):
            if v.right:
                right.append(c)
            elif v.right is False:
                c.fail(Status.WRONG, f"with LLVM's passes: {v.reason}")
                self.refuted.append(c)
                self._forget(c)
            else:
                self.unconfirmed = v.reason
        left = max(CONFIRM_FLOOR, deadline - self.clock() - WIND_UP)
        answers = self.measurer.confirm(right, min(seconds, left)) if right else []
        self.confirmed = [(c, t) for c, t in zip(right, answers, strict=True) if isinstance(t, Confirmed)]
        if not self.confirmed:
            self.unconfirmed = next((t.reason for t in answers if isinstance(t, Failure)), self.unconfirmed)
            return self.result()
        return self._decide(baseline if baseline in right else None)

    def _most_finalists(self, seconds: float) -> int:
        """The number of finalists, at least one, that a confirmation of so many seconds has time for."""
        return max(1, min(2 * self.places, int(seconds / (CONFIRM_ROUNDS * max(self.best, 1e-9))) - 1))

    def _race_the_best(self, seconds: float) -> list[Candidate]:
        """All verified candidates, best first. Scores come from several races, and the best few of hundreds were the luckiest. So many as
        there is time for within `seconds` are raced side by side, and the new scores count as much as the old ones."""
        verified = sorted((c for c in self.pool if c.status is Status.VERIFIED and c is not self.baseline), key=lambda c: c.order)
        count = min(SEMIFINAL * self.places, int(seconds / (RACE_RUNS * max(self.best, 1e-9))))
        if min(count, len(verified)) <= self.places:
            return verified
        ratios = self.measurer.race(verified[:count]).ratios
        raced = []
        for c, r in zip(verified[:count], ratios, strict=True):
            if isinstance(r, Failure):
                self._drop(c, r)
                self._forget(c)
            else:
                raced.append((c, math.log(c.score), math.log(r)))
        shift = statistics.fmean(known - told for _, known, told in raced) if raced else 0.0
        for c, known, told in raced:
            c.score = math.exp((known + told + shift) / 2)
        return sorted((c for c in verified if c.status is Status.VERIFIED), key=lambda c: c.order)

    def _forget(self, c: Candidate) -> None:
        """Remove `c`, which turned out wrong. If it was the incumbent, the best of the others takes its place."""
        self.pool = [x for x in self.pool if x is not c]
        if self.incumbent is c:
            self.incumbent = self.baseline if self.baseline.status is Status.VERIFIED else None
            self._choose_incumbent()

    def _decide(self, baseline: Candidate | None) -> Finding:
        """Choose among the confirmed finalists by the database's rules (`svod.tune.db.winners`): the finding is what is used later."""
        for c, t in self.confirmed:
            c.score, c.known["confirmed"] = t.seconds, t
        reference = next((t for c, t in self.confirmed if c is baseline), None)
        usable = [(c, t) for c, t in self.confirmed if (not is_slower(t.low, t.ratio) and t.worst <= WORST_RATIO and (
            reference is None or fits_its_times(t.ratio, t.seconds, reference.seconds))) or baseline is None]
        winner, time_ = usable[best_of([Standing(t.high, c is baseline, len(c.chain), canonical([o.to_json() for o in c.chain]), c.linear)
                                        for c, t in usable])]
        speedup = Ratio(time_.ratio, time_.low, time_.high).inverse if reference is not None else Ratio(1.0, 1.0, 1.0)
        return self._found(winner, time_.seconds, reference.seconds if reference else float("inf"), True, speedup)

    def result(self) -> Finding:
        """The best verified so far, unconfirmed; the heuristic's chain where nothing was verified."""
        best = self.incumbent or (self.baseline if self.baseline.status is Status.VERIFIED else None)
        if best is None:
            failed = self.baseline.status in FAILED and self.baseline.status is not Status.LATE
            failure = (self.baseline.reason or str(self.baseline.status)) if failed else ""
            if failed or self.counts.failed + self.counts.wrong:
                why = "every candidate failed" + (f" ({failure})" if failure else "")
            else:
                why = f"{self.why or 'ended'} before anything was measured"
            why += ", the heuristic is used unverified"
            return Finding(self.baseline.chain, "heuristic", float("inf"), float("inf"), False, False, why, self.baseline.linear,
                           Ratio(1.0, 1.0, 1.0), None, None, failure)
        base = self.baseline.score if self.baseline.status is Status.VERIFIED else float("inf")
        ratio = base / best.score if base < float("inf") else 1.0
        return self._found(best, best.score, base, False, Ratio(ratio, ratio, ratio))

    def _found(self, winner: Candidate, seconds: float, heuristic: float, confirmed: bool, speedup: Ratio) -> Finding:
        source = "heuristic" if winner is self.baseline else "database" if winner.origin is Origin.DATABASE else "beam"
        self.listener(KernelFinished(self.key, seconds, heuristic, chain_text(winner.chain), self.why, True))
        baseline = self.baseline if self.baseline.status is Status.VERIFIED else None
        return Finding(winner.chain, source, seconds, heuristic, True, confirmed, self.why, winner.linear, speedup, winner, baseline)
