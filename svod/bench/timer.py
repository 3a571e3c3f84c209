"""Takes samples: how many runs a sample has, and the cheap first look at a candidate (screening).

docs/measuring.md describes the protocol with its formulas and the reasons for its constants. `race.py` compares samples. The tuner and the
benchmarks use both. Every clock is a parameter, so that tests of the protocol need no real time.
"""
from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

from svod.core.machine.target import Target

PROTOCOL_REVISION = 1           # stored with every measurement of a search; raised when samples stop being comparable
DEVICE_PROTOCOL = 2             # the same on devices with groups of threads; 2: their second cache is filled anew before each run
BENCH_PROTOCOL = 3              # the same for runs of the benchmarks
MIN_SAMPLE_SECONDS = 200e-6     # a sample repeats inside until it lasts this long
WARM_BELOW_SECONDS = 1e-3       # shorter runs get an untimed one before each sample
MAX_REPEATS = 1 << 20
FIRST_RUN_FACTOR = 3.0          # screening: a first run above WARM_BELOW_SECONDS and slower than the incumbent by this factor is out,
COLD_SECONDS = 1e-3             # and so is one that exceeds the limit of a sample by this: twice the cost of a cold start
SAMPLE_FACTOR = 1.5             # screening: a sample slower than the incumbent by this factor is out

Clock = Callable[[], float]


def protocol_of(target: Target) -> int:
    """The protocol of a search's measurements on a target."""
    return DEVICE_PROTOCOL if target.has_groups else PROTOCOL_REVISION


@dataclass(frozen=True)
class Contestant:
    """Something to time. `run(n)` calls it n times, one after the other (`ExecutionPlan.repeat_timed`), and may return the seconds that
    they took by a clock of its own. One call stands for `unit` runs; a slice has a `unit` below 1."""

    run: Callable[[int], float | None]
    name: str = ""
    unit: float = 1

    def sample(self, repeats: int, warm: float | None, clock: Clock) -> float:
        """Seconds of `repeats` calls together, after untimed calls for `warm` seconds, one at least; None: after none."""
        if warm is not None:
            warm_up(self, warm, clock)
        start = clock()
        seconds = self.run(repeats)
        return clock() - start if seconds is None else seconds


@dataclass(frozen=True)
class Samples:
    """Seconds of one run for each sample; a sample is the mean of `repeats` calls of the contestant."""

    seconds: tuple[float, ...]
    repeats: int

    @property
    def best(self) -> float:
        return min(self.seconds)

    @property
    def median(self) -> float:
        return statistics.median(self.seconds)


def deadline(incumbent: float | None) -> float:
    """Seconds after which a first run is killed from outside, given the incumbent's seconds per run (of the same slice)."""
    return 2.0 if incumbent is None else max(100e-3, 5.0 * incumbent)


def time_calls(contestant: Contestant, repeats: int, clock: Clock = time.perf_counter) -> float:
    """Seconds of `repeats` calls together, by the contestant's own clock where it has one."""
    return contestant.sample(repeats, None, clock)


def take_sample(contestant: Contestant, repeats: int, seconds: float, clock: Clock = time.perf_counter, warm: float | None = None) -> float:
    """One sample: seconds of one run, the mean of `repeats` calls. Untimed calls for `warm` seconds precede it; without `warm` one call
    does, if a call takes about `seconds` below WARM_BELOW_SECONDS."""
    if warm is None and seconds < WARM_BELOW_SECONDS:
        warm = 0.0
    return contestant.sample(repeats, warm, clock) / (repeats * contestant.unit)


def warm_up(contestant: Contestant, seconds: float, clock: Clock = time.perf_counter) -> None:
    """Make untimed calls, at least one, until `seconds` have passed."""
    start = clock()
    contestant.run(1)
    while clock() - start < seconds:
        contestant.run(1)


def calibrate(contestant: Contestant, first: float | None = None, clock: Clock = time.perf_counter,
              min_sample: float = MIN_SAMPLE_SECONDS) -> tuple[int, float]:
    """(repeats, seconds per call): how many calls make a sample of at least `min_sample` seconds. `first` is the time of one call, where it
    is known. A trial that is too short gives the next estimate and is then dropped."""
    call = time_calls(contestant, 1, clock) if first is None else first
    repeats = 1
    while repeats * call < min_sample and repeats < MAX_REPEATS:
        # a first call is slower than later ones, so estimates are more often too low than too high: aim 20 % higher
        wanted = 1.2 * min_sample / call if call > 0 else 8.0 * repeats
        repeats = min(max(2 * repeats, math.ceil(min(wanted, MAX_REPEATS))), MAX_REPEATS)
        call = time_calls(contestant, repeats, clock) / repeats
    return repeats, call


def measure(contestant: Contestant, samples: int = 1, clock: Clock = time.perf_counter, min_sample: float = MIN_SAMPLE_SECONDS) -> Samples:
    """Calibrate, then take `samples` samples one after the other. For a comparison use `race.race`."""
    repeats, call = calibrate(contestant, None, clock, min_sample)
    return Samples(tuple(take_sample(contestant, repeats, call, clock) for _ in range(samples)), repeats)


Verdict = Literal["ok", "slow first run", "slow sample"]


@dataclass(frozen=True)
class Screening:
    """Outcome of a candidate's screening. `score` is the least time in seconds per run; that of the first run where it was out at once."""

    verdict: Verdict
    score: float
    first: float                # seconds per run in the first call
    samples: Samples


def screen_one(contestant: Contestant, incumbent: float | None, clock: Clock = time.perf_counter, cold: float = COLD_SECONDS) -> Screening:
    """One run of a candidate in a worker, then one sample. `incumbent` is the best so far in seconds per run (of the same slice),
    or None. `cold` is the seconds that a cold start may add to a call of any length. The process that started this one kills a run past its
    `deadline`."""
    call = time_calls(contestant, 1, clock)
    first = call / contestant.unit
    # a first call pays up to half a millisecond for cold code, page faults and sleeping workers: a short one says nothing
    if (incumbent is not None and call > WARM_BELOW_SECONDS
            and first > min(FIRST_RUN_FACTOR * incumbent, SAMPLE_FACTOR * incumbent + cold / contestant.unit)):
        return Screening("slow first run", first, first, Samples((), 1))
    repeats, call = calibrate(contestant, call, clock)
    sample = take_sample(contestant, repeats, call, clock)
    slow = incumbent is not None and sample > SAMPLE_FACTOR * incumbent
    return Screening("slow sample" if slow else "ok", sample, first, Samples((sample,), repeats))


def sample_again(contestant: Contestant, screening: Screening, runs: int, clock: Clock = time.perf_counter) -> Screening:
    """Extend a screening to `runs` samples; the score is their minimum."""
    taken, repeats = screening.samples.seconds, screening.samples.repeats
    more = tuple(take_sample(contestant, repeats, screening.score * contestant.unit, clock) for _ in range(runs - len(taken)))
    samples = Samples(taken + more, repeats)
    return Screening(screening.verdict, samples.best, screening.first, samples)


def better_half(screenings: Sequence[Screening]) -> list[int]:
    """Indices of the candidates that get more samples: the faster half (rounded up) of those with verdict ok, fastest first."""
    alive = sorted((s.score, i) for i, s in enumerate(screenings) if s.verdict == "ok")
    return [i for _, i in alive[:(len(alive) + 1) // 2]]


def screen(contestants: Sequence[Contestant], incumbent: float | None, runs: int = 3, clock: Clock = time.perf_counter) -> list[Screening]:
    """Screen a batch in this process: every contestant gets a first run and a sample, the better half gets `runs` samples. A candidate that
    beats the incumbent does not tighten the limits of later candidates: the order must not matter."""
    screenings = [screen_one(c, incumbent, clock) for c in contestants]
    for i in better_half(screenings):
        screenings[i] = sample_again(contestants[i], screenings[i], runs, clock)
    return screenings
