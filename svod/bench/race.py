"""Compares contestants in interleaved rounds: a disturbance of the machine slows all of them down alike.

    round 1:  b  a  c        each a sample (timer.take_sample), in random order
    round 2:  a  c  b
    …
    score(a) = median over rounds of log(t(a, round) / median of the round)

`race` ranks contestants. `confirm` runs until the ratio of each contestant to the first is known to ±1 %, or until its time is used up. The
formulas are in docs/measuring.md.
"""
from __future__ import annotations

import math
import random
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache

from svod.bench.load import MachineLoad, Watch, watch_machine
from svod.bench.timer import MIN_SAMPLE_SECONDS, Clock, Contestant, calibrate, take_sample
from svod.system.quantities import seconds as duration

ANCHOR_TOLERANCE = 0.05
ANCHOR_SAMPLES = 3
VOID_REPEATS = 3                # a disturbed batch is repeated at most this often
CONFIDENCE = 0.95


@dataclass(frozen=True)
class Race:
    """The outcome of `race`. `rounds[r][i]` are seconds per run of contestant i in round r. `scores[i]` follow the module's formula: 0
    is the middle of the field, -0.1 is 10 % faster. `noisy` tells why the order may be wrong; None for a good race. `anchor` has the
    anchor's seconds before and after the last batch."""

    rounds: tuple[tuple[float, ...], ...]
    scores: tuple[float, ...]
    anchor: tuple[float, float]
    batches: int
    noisy: str | None
    load: MachineLoad

    @property
    def ranking(self) -> list[int]:
        """Indices, fastest first; equal scores keep their order."""
        return sorted(range(len(self.scores)), key=self.scores.__getitem__)

    def seconds(self, i: int) -> float:
        """Median seconds per run of contestant i."""
        return statistics.median(r[i] for r in self.rounds)


def race(contestants: Sequence[Contestant], rounds: int = 6, *, anchor: int = 0, rng: random.Random, clock: Clock = time.perf_counter,
         watch: Watch = watch_machine, min_sample: float = MIN_SAMPLE_SECONDS, void_repeats: int = VOID_REPEATS) -> Race:
    """Time all contestants in `rounds` interleaved rounds of random order.

    Contestant `anchor` (the incumbent) is also timed before the first and after the last round. If its time changes by more than 5 %, or
    the machine is busy, the batch is repeated. After `void_repeats` repetitions the race is marked noisy and scored over the rounds of all
    batches, so that one disturbance has less effect than in a single batch. Raises ValueError without contestants."""
    if not contestants or rounds < 1:
        raise ValueError(f"a race of {len(contestants)} contestants over {rounds} rounds was requested; it needs at least one of each")
    calibrated = [calibrate(c, None, clock, min_sample) for c in contestants]
    every: list[tuple[float, ...]] = []
    for batch in range(1, void_repeats + 2):
        seen = watch()
        start = _anchor_time(contestants[anchor], calibrated[anchor], clock)
        taken = [interleave(contestants, calibrated, rng, clock=clock) for _ in range(rounds)]
        end = _anchor_time(contestants[anchor], calibrated[anchor], clock)
        load = seen()
        every += taken
        reason = disturbance(contestants[anchor], start, end, load)
        if reason is None:
            return Race(tuple(taken), scores(taken), (start, end), batch, None, load)
    return Race(tuple(every), scores(every), (start, end), batch, reason, load)


def scores(rounds: Sequence[Sequence[float]]) -> tuple[float, ...]:
    """The score of each contestant: the median over rounds of log(t / median of the round)."""
    logs = []
    for times in rounds:
        middle = statistics.median(times)
        logs.append([math.log(t / middle) for t in times])
    return tuple(statistics.median(column) for column in zip(*logs, strict=True))


@dataclass(frozen=True)
class Ratio:
    """A paired ratio of times: its median over rounds, and the interval that contains the true median with 95 % confidence."""

    median: float
    low: float
    high: float

    @property
    def half_width(self) -> float:
        """Half the width of the interval on a logarithmic scale: 0.01 is ±1 %."""
        return 0.5 * math.log(self.high / self.low) if self.low > 0.0 else math.inf

    @property
    def inverse(self) -> Ratio:
        """The reciprocal ratio, from the same rounds; for a ratio of times it is a speed-up."""
        return Ratio(1.0 / self.median, 1.0 / self.high, 1.0 / self.low if self.low > 0.0 else math.inf)


@dataclass(frozen=True)
class Confirmation:
    """Outcome of `confirm`. `ratios[i]` is the time of contestant i over that of contestant 0."""

    rounds: tuple[tuple[float, ...], ...]
    ratios: tuple[Ratio, ...]
    reached: bool               # whether all intervals are within the requested precision
    noisy: str | None
    load: MachineLoad

    def seconds(self, i: int) -> float:
        """Median seconds per run of contestant i."""
        return statistics.median(r[i] for r in self.rounds)

    def ratio(self, i: int, j: int) -> Ratio:
        """Time of contestant i over that of contestant j, paired by round."""
        return paired_ratio([r[i] for r in self.rounds], [r[j] for r in self.rounds])


def confirm(contestants: Sequence[Contestant], *, min_rounds: int = 15, precision: float = 0.01, budget_seconds: float = 3.0,
            rng: random.Random, clock: Clock = time.perf_counter, watch: Watch = watch_machine,
            min_sample: float = MIN_SAMPLE_SECONDS) -> Confirmation:
    """Run at least `min_rounds` interleaved rounds, until each contestant's ratio to contestant 0 is known to ±`precision` with 95 %
    confidence or `budget_seconds` are used up. Contestant 0 (the heuristic, or the incumbent) is the anchor: if its time changes by more
    than 5 % from the first to the last three rounds, or the machine is busy, the result is marked noisy. Raises ValueError without
    contestants."""
    if not contestants:
        raise ValueError("a confirmation needs at least one contestant")
    calibrated = [calibrate(c, None, clock, min_sample) for c in contestants]
    begin, seen = clock(), watch()
    rounds: list[tuple[float, ...]] = []
    reached = False
    while len(rounds) < min_rounds or (not reached and clock() - begin < budget_seconds):
        rounds.append(interleave(contestants, calibrated, rng, clock=clock))
        if len(rounds) >= min_rounds:
            reached = all(r.half_width <= precision for r in _ratios(rounds))
    load = seen()
    start, end = (min(r[0] for r in part) for part in (rounds[:ANCHOR_SAMPLES], rounds[-ANCHOR_SAMPLES:]))
    return Confirmation(tuple(rounds), _ratios(rounds), reached, disturbance(contestants[0], start, end, load), load)


def paired_ratio(times: Sequence[float], base: Sequence[float]) -> Ratio:
    """Median of times[r] / base[r] over rounds, with the distribution-free 95 % interval of the median.

    The interval is [x(k), x(n+1-k)] of the sorted ratios with the largest k for which 2·P(B < k) ≤ 5 %, B binomial (n, ½): the sign test
    inverted (Conover, Practical Nonparametric Statistics, 3.2). Below six rounds no such k exists and the interval is unbounded."""
    ratios = [t / b for t, b in zip(times, base, strict=True)]
    return Ratio(statistics.median(ratios), *(median_interval(ratios) or (0.0, math.inf)))


def median_interval(values: Sequence[float]) -> tuple[float, float] | None:
    """The distribution-free 95 % interval of the median of independent values, as in `paired_ratio`; None for fewer than six."""
    ordered = sorted(values)
    k = _sign_rank(len(ordered))
    return (ordered[k - 1], ordered[-k]) if k else None


@lru_cache(maxsize=4096)
def _sign_rank(n: int) -> int:
    """The largest k with 2·P(B < k) ≤ 1 - CONFIDENCE for B binomial (n, ½); 0 if there is none. Exact below n = 1000."""
    limit = math.floor((1.0 - CONFIDENCE) / 2.0 * 2**n * (1 + 1e-12)) if n < 1000 else None
    if limit is None:           # the normal approximation has an error far below one rank at this size
        return max(0, math.floor((n - 1.959964 * math.sqrt(n)) / 2.0))
    total, k = 0, 0
    while k <= n:
        total += math.comb(n, k)
        if total > limit:
            break
        k += 1
    return k


def _ratios(rounds: Sequence[Sequence[float]]) -> tuple[Ratio, ...]:
    base = [r[0] for r in rounds]
    return tuple(Ratio(1.0, 1.0, 1.0) if i == 0 else paired_ratio([r[i] for r in rounds], base) for i in range(len(rounds[0])))


def interleave(contestants: Sequence[Contestant], calibrated: Sequence[tuple[int, float]], rng: random.Random, *,
               clock: Clock = time.perf_counter, pause: Callable[[], None] | None = None, warm: float | None = None) -> tuple[float, ...]:
    """One round: a sample of each contestant in random order. Returns seconds per run, in the given order. `calibrated` has the result
    of `timer.calibrate` for each. `pause` is called before each sample and waits until the threads of the previous contestant are idle.
    `warm`: seconds of untimed runs, as in `timer.take_sample`."""
    order = list(range(len(contestants)))
    rng.shuffle(order)
    times = [0.0] * len(order)
    for i in order:
        if pause is not None:
            pause()
        times[i] = take_sample(contestants[i], *calibrated[i], clock, warm)
    return tuple(times)


def _anchor_time(contestant: Contestant, calibrated: tuple[int, float], clock: Clock) -> float:
    return min(take_sample(contestant, *calibrated, clock) for _ in range(ANCHOR_SAMPLES))


def disturbance(anchor: Contestant, start: float, end: float, load: MachineLoad) -> str | None:
    """The reason why times cannot be trusted, or None: the anchor's time changed from `start` to `end` (seconds per run), or the machine
    was busy."""
    if abs(end / start - 1.0) > ANCHOR_TOLERANCE:
        return f"{anchor.name or 'the anchor'} took {duration(start)} before and {duration(end)} after"
    return load.busy
