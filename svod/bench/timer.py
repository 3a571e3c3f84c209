"""Taking samples: how often something is run per sample, and the cheap first look at a candidate (screening).

The protocol, with its formulas and the reasons for its constants, is docs/measuring.md. `race.py` compares what was sampled. Both serve the
tuner and the benchmarks. Every clock is a parameter, so that the tests of the protocol need no machine.
"""
from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

PROTOCOL_REVISION = 1           # stored with every measurement of a search; raised when samples stop being comparable
BENCH_PROTOCOL = 3              # stored with every run of the benchmarks; the same for theirs
MIN_SAMPLE_SECONDS = 200e-6     # a sample repeats inside until it lasts this long
WARM_BELOW_SECONDS = 1e-3       # shorter runs get an untimed one before each sample
MAX_REPEATS = 1 << 20
FIRST_RUN_FACTOR = 3.0          # screening: a first run slower than this many incumbents (and than WARM_BELOW_SECONDS) is out,
COLD_SECONDS = 1e-3             # and one that is by more than this slower than a sample may be: twice what a cold start costs
SAMPLE_FACTOR = 1.5             # screening: a sample slower than this many incumbents is out

Clock = Callable[[], float]


@dataclass(frozen=True)
class Contestant:
    """Something to time. `run(n)` runs it n times back to back (`ExecutionPlan.repeat`); one call of `run(1)` stands for `unit` runs, less
    than 1 where it is a slice."""

    run: Callable[[int], None]
    name: str = ""
    unit: float = 1


@dataclass(frozen=True)
class Samples:
    """Seconds of one run, sample by sample; each sample is the mean of `repeats` calls of the contestant."""

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
    """Seconds of `repeats` calls together."""
    start = clock()
    contestant.run(repeats)
    return clock() - start


def take_sample(contestant: Contestant, repeats: int, seconds: float, clock: Clock = time.perf_counter, warm: float | None = None) -> float:
    """One sample: seconds of one run, the mean of `repeats` calls. Before it go untimed calls for `warm` seconds; for None one, where a
    call takes less than WARM_BELOW_SECONDS. `seconds`: what it takes, about."""
    if warm is not None or seconds < WARM_BELOW_SECONDS:
        warm_up(contestant, warm or 0.0, clock)
    return time_calls(contestant, repeats, clock) / (repeats * contestant.unit)


def warm_up(contestant: Contestant, seconds: float, clock: Clock = time.perf_counter) -> None:
    """Untimed calls, one at least, until `seconds` have passed."""
    start = clock()
    contestant.run(1)
    while clock() - start < seconds:
        contestant.run(1)


def calibrate(contestant: Contestant, first: float | None = None, clock: Clock = time.perf_counter,
              min_sample: float = MIN_SAMPLE_SECONDS) -> tuple[int, float]:
    """(repeats, seconds per call): how many calls make a sample of at least `min_sample` seconds. `first`: seconds of one call,
    when known. A try that was too short is used for the next estimate and thrown away."""
    call = time_calls(contestant, 1, clock) if first is None else first
    repeats = 1
    while repeats * call < min_sample and repeats < MAX_REPEATS:
        # A first call is slower than later ones, so the estimate is short of the mark more often than over it: aim 20 % higher.
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
    """Outcome of a candidate's screening. `score`: the least time seen, seconds per run; of the first run for one that was out at once."""

    verdict: Verdict
    score: float
    first: float                # seconds per run in the first call
    samples: Samples


def screen_one(contestant: Contestant, incumbent: float | None, clock: Clock = time.perf_counter, cold: float = COLD_SECONDS) -> Screening:
    """One run, then one sample: what a worker does with a candidate. `incumbent`: seconds per run of the best so far (of the same
    slice), None without one. `cold`: seconds that a cold start may add to a call, for short ones and long ones; beside a long one it is
    little. Killing a run past its `deadline` is up to whoever started this process."""
    call = time_calls(contestant, 1, clock)
    first = call / contestant.unit
    # a first call pays for cold code, page faults and sleeping workers, up to half a millisecond: a short one says nothing
    if (incumbent is not None and call > WARM_BELOW_SECONDS
            and first > min(FIRST_RUN_FACTOR * incumbent, SAMPLE_FACTOR * incumbent + cold / contestant.unit)):
        return Screening("slow first run", first, first, Samples((), 1))
    repeats, call = calibrate(contestant, call, clock)
    sample = take_sample(contestant, repeats, call, clock)
    slow = incumbent is not None and sample > SAMPLE_FACTOR * incumbent
    return Screening("slow sample" if slow else "ok", sample, first, Samples((sample,), repeats))


def sample_again(contestant: Contestant, screening: Screening, runs: int, clock: Clock = time.perf_counter) -> Screening:
    """Fill a screening up to `runs` samples; the score is their minimum."""
    taken, repeats = screening.samples.seconds, screening.samples.repeats
    more = tuple(take_sample(contestant, repeats, screening.score * contestant.unit, clock) for _ in range(runs - len(taken)))
    samples = Samples(taken + more, repeats)
    return Screening(screening.verdict, samples.best, screening.first, samples)


def better_half(screenings: Sequence[Screening]) -> list[int]:
    """Indices of those that deserve more samples: the faster half (rounded up) of the ones still in, fastest first."""
    alive = sorted((s.score, i) for i, s in enumerate(screenings) if s.verdict == "ok")
    return [i for _, i in alive[:(len(alive) + 1) // 2]]


def screen(contestants: Sequence[Contestant], incumbent: float | None, runs: int = 3, clock: Clock = time.perf_counter) -> list[Screening]:
    """Screen a batch in this process: every contestant gets a first run and a sample, the better half `runs` samples. A candidate
    that turns out faster than the incumbent does not tighten the limits of the ones after it: the order must not matter."""
    screenings = [screen_one(c, incumbent, clock) for c in contestants]
    for i in better_half(screenings):
        screenings[i] = sample_again(contestants[i], screenings[i], runs, clock)
    return screenings
