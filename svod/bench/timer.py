"""Takes samples: the number of runs in a sample, and the cheap first measurement of a candidate (screening).

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

from svod.compile.plan.running.background import complete
from svod.core.machine.target import Target

# protocol revision of a search's measurements, stored with each; raised when samples stop being comparable; 3: the caches are as in a plan
PROTOCOL_REVISION = 3
DEVICE_PROTOCOL = 2             # protocol revision for devices with groups of threads; 2: their second cache is refilled before each run
BENCH_PROTOCOL = 4              # protocol revision of benchmark runs
SPIN_DOWN_SECONDS = 12e-3       # seconds between contestants: libraries' threads spin for up to 10 ms after a run
MIN_SAMPLE_SECONDS = 200e-6     # a sample repeats the call until it lasts at least this long
WARM_BELOW_SECONDS = 1e-3       # calls shorter than this are preceded by an untimed call in each sample
MAX_REPEATS = 1 << 20
# Screening rejects a first run above WARM_BELOW_SECONDS that takes longer than FIRST_RUN_FACTOR times the incumbent's time, or that exceeds
# a sample's limit by COLD_SECONDS, which is twice the cost of a cold start.
FIRST_RUN_FACTOR = 3.0
COLD_SECONDS = 1e-3
SAMPLE_FACTOR = 1.5             # screening rejects a candidate whose sample exceeds this multiple of the incumbent's time

Clock = Callable[[], float]


def protocol_of(target: Target) -> int:
    """The revision of the measuring protocol for a search on a target."""
    return DEVICE_PROTOCOL if target.has_groups else PROTOCOL_REVISION


@dataclass(frozen=True)
class Contestant:
    """A piece of code to time. `run(n)` calls it n times in a row (`ExecutionPlan.repeat_timed`), and may return the seconds that the
    calls took by its own clock. One call stands for `unit` runs; a part of a kernel has a `unit` below 1."""

    run: Callable[[int], float | None]
    name: str = ""
    unit: float = 1

    def sample(self, repeats: int, warm: float | None, clock: Clock) -> float:
        """Seconds of `repeats` calls together. Before them, untimed calls are made for `warm` seconds, at least one; None: none."""
        if warm is not None:
            warm_up(self, warm, clock)
        start = clock()
        seconds = self.run(repeats)
        return clock() - start if seconds is None else seconds


@dataclass(frozen=True)
class Samples:
    """Samples in seconds of one run; each is the mean of `repeats` calls of the contestant."""

    seconds: tuple[float, ...]
    repeats: int

    @property
    def best(self) -> float:
        return min(self.seconds)

    @property
    def median(self) -> float:
        return statistics.median(self.seconds)


def deadline(incumbent: float | None) -> float:
    """Seconds after which another process kills a first run, given the incumbent's seconds per run (of the same part)."""
    return 2.0 if incumbent is None else max(100e-3, 5.0 * incumbent)


def time_calls(contestant: Contestant, repeats: int, clock: Clock = time.perf_counter) -> float:
    """Seconds of `repeats` calls together, by the contestant's own clock if it has one."""
    return contestant.sample(repeats, None, clock)


def take_sample(contestant: Contestant, repeats: int, seconds: float, clock: Clock = time.perf_counter, warm: float | None = None) -> float:
    """One sample: seconds of one run, the mean of `repeats` calls. Untimed calls for `warm` seconds precede it. If `warm` is None, one
    untimed call precedes it, provided that `seconds`, the estimated time of a call, is below WARM_BELOW_SECONDS."""
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
    """The number of calls that make a sample of at least `min_sample` seconds, and the seconds of one call. `first` is the time of one
    call, if it is known. A trial that is too short gives the next estimate and is then dropped. Plans that are there after the first call
    run their kernels' own forms from then on."""
    call = time_calls(contestant, 1, clock) if first is None else first
    complete()
    repeats = 1
    while repeats * call < min_sample and repeats < MAX_REPEATS:
        # a first call is slower than later ones, so estimates are more often too low than too high: aim 20 % higher
        wanted = 1.2 * min_sample / call if call > 0 else 8.0 * repeats
        repeats = min(max(2 * repeats, math.ceil(min(wanted, MAX_REPEATS))), MAX_REPEATS)
        call = time_calls(contestant, repeats, clock) / repeats
    return repeats, call


def measure(contestant: Contestant, samples: int = 1, clock: Clock = time.perf_counter, min_sample: float = MIN_SAMPLE_SECONDS) -> Samples:
    """Calibrate, then take `samples` samples one after the other. To compare contestants, use `race.race`."""
    repeats, call = calibrate(contestant, None, clock, min_sample)
    return Samples(tuple(take_sample(contestant, repeats, call, clock) for _ in range(samples)), repeats)


Verdict = Literal["ok", "slow first run", "slow sample"]


@dataclass(frozen=True)
class Screening:
    """Outcome of a candidate's screening. `score` is the least time in seconds per run; for a slow first run, the time of that run."""

    verdict: Verdict
    score: float
    first: float                # seconds per run in the first call
    samples: Samples


def screen_one(contestant: Contestant, incumbent: float | None, clock: Clock = time.perf_counter, cold: float = COLD_SECONDS) -> Screening:
    """Time one run of a candidate in a worker, then one sample. `incumbent` is the best time so far in seconds per run (of the same
    part), or None. `cold` is the number of seconds that a cold start may add to a call of any length. The parent process kills a run
    that exceeds its `deadline`."""
    call = time_calls(contestant, 1, clock)
    first = call / contestant.unit
    # a first call loses up to half a millisecond to cold code, page faults and sleeping workers: a short one is not judged
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
    """Screen a batch in this process: every contestant gets a first run and a sample, and the faster half gets `runs` samples. A
    candidate that beats the incumbent does not tighten the limits of later candidates, because their order must not matter."""
    screenings = [screen_one(c, incumbent, clock) for c in contestants]
    for i in better_half(screenings):
        screenings[i] = sample_again(contestants[i], screenings[i], runs, clock)
    return screenings
