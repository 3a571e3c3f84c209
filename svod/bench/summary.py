"""Computes the figures of a run from its samples: bounds, spreads, speed-ups, noise, geometric means. docs/measuring.md has the formulas.

    samples of each contestant, by round → median, spread, paired speed-ups, share of the ceiling → per case
    speed-ups of all cases → geometric means → per group, per suite
    seconds of search, rates over round neighbours → per suite
"""
from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, replace

from svod.bench.race import Ratio, median_interval, paired_ratio
from svod.bench.results import SVOD, CaseResult, ContestantResult, GroupResult, Load, Neighbour, Rates, Searching, Speedup, SuiteResult
from svod.bench.roofline import Bound

PRECISION = 0.01            # largest half width of the interval of a speed-up that counts as precisely known
NOISY = 0.05                # half width of the speed-up over the best peer above which a case is noisy
BUSY = 0.10                 # share of the machine that other processes may use: up to it, all contestants of a round slow down alike
PLACEMENTS = 3              # round r uses the copy r mod PLACEMENTS of the operands
ALL = "all"
BEST_PEER = "best peer"


@dataclass(frozen=True)
class Timed:
    """A contestant and its samples by round; None if it has no samples of its own."""

    outcome: ContestantResult
    seconds: Sequence[float] | None


def bound_beside(bound: Bound, flops: float, rate: float) -> Bound:
    """The bound of a kernel that arithmetic limits, from the `rate` (flops per second) of bare arithmetic in the same rounds."""
    return replace(bound, seconds=flops / rate, flops_per_second=rate)


def spread_of(seconds: Sequence[float]) -> float:
    """Half the width of the 95 % interval of the median, on a logarithmic scale; for fewer than six samples, half their range."""
    low, high = median_interval(seconds) or (min(seconds), max(seconds))
    return 0.5 * math.log(high / low)


def judge_case(*, name: str, title: str, suite: str, group: str, dtype: str, shapes: str, flops: float, bytes_read: float,
               bytes_written: float, bound: Bound | None, timed: Sequence[Timed], load: Load | None) -> CaseResult:
    """Compute all figures of a case."""
    own = {t.outcome.name: t.seconds for t in timed if t.outcome.status == "ok" and t.seconds}
    seconds = dict(own)
    same = {t.outcome.name: t.outcome.same_as for t in timed if t.outcome.same_as is not None}
    for copy, other in same.items():
        if other in own:
            seconds[copy] = own[other]
    lower = {t.outcome.name for t in timed if t.outcome.precision}
    best_peer = min((n for n in own if n not in SVOD and n not in lower), key=lambda n: statistics.median(own[n]), default=None)
    outcomes = []
    for t in timed:
        times = seconds.get(t.outcome.name)
        if times is None:
            outcomes.append(t.outcome)
            continue
        median = statistics.median(times)
        contestant = t.outcome.name
        others = {n: _speedup(times, other) for n, other in seconds.items()
                  if contestant not in (n, same.get(n)) and same.get(contestant) != n} if contestant in SVOD else {}
        outcomes.append(replace(t.outcome, samples=tuple(times), median=median, minimum=min(times), spread=spread_of(times),
                                speedups=others, ceiling_share=bound.seconds / median if bound is not None and median else None))
    rounds = min((len(v) for v in own.values()), default=0)
    case = CaseResult(name, title, suite, group, dtype, shapes, flops, bytes_read, bytes_written, bound, tuple(outcomes), best_peer, rounds,
                      all(half_width(s) <= PRECISION for o in outcomes for n, s in o.speedups.items() if n == best_peer), None, load)
    return replace(case, noisy=_noise(case))


def _speedup(times: Sequence[float], other: Sequence[float]) -> Speedup:
    """The speed-up, paired by round. Its interval includes the median of each placement of the operands: the placement has an effect,
    and more rounds do not make the interval narrower than that."""
    rounds = min(len(times), len(other))
    ratio: Ratio = paired_ratio(other[:rounds], times[:rounds])
    if ratio.low <= 0.0 or not math.isfinite(ratio.high):
        return Speedup(ratio.median, None, None)
    medians = [statistics.median(other[i] / times[i] for i in range(place, rounds, PLACEMENTS)) for place in range(min(rounds, PLACEMENTS))]
    return Speedup(ratio.median, min(ratio.low, *medians), max(ratio.high, *medians))


def neighbour_of(case: CaseResult, work: float, name: str, title: str, its_work: float, seconds: Sequence[float]) -> Neighbour:
    """Compare `case` with its round neighbour, which took `seconds` in the same rounds. `work` and `its_work` have the same unit."""
    best = case.svod
    if best is None:
        return Neighbour(name, title, statistics.median(seconds), None, f"{case.name} has no time")
    over = _speedup(best.samples, seconds)
    scale = work / its_work
    low, high = (None if x is None else scale * x for x in (over.low, over.high))
    return Neighbour(name, title, statistics.median(seconds), Speedup(scale * over.median, low, high))


def half_width(s: Speedup) -> float:
    """Half the width of the interval, on a logarithmic scale; infinite without an interval."""
    return 0.5 * math.log(s.high / s.low) if s.low is not None and s.high is not None else math.inf


def _noise(case: CaseResult) -> str | None:
    """The reason why the speed-up over the best peer, or without a peer the time, is doubtful; None if it is not."""
    if case.load is not None and case.load.foreign + case.load.steal > BUSY:
        return f"others used {100 * (case.load.foreign + case.load.steal):.0f} % of the machine"
    own, best = case.svod, case.outcome(case.best_peer or "")
    if own is None or own.spread is None:
        return None
    if best is None:
        return f"the median of {own.name} is known to {_precision(own.spread)} only" if own.spread > NOISY else None
    width = half_width(own.speedups[best.name])
    if width > NOISY:
        return f"the speed-up of {own.name} over {best.name} is known to {_precision(width)} only"
    return None


def _precision(half_width: float) -> str:
    return f"±{100 * half_width:.0f} %" if math.isfinite(half_width) else "no precision (too few rounds)"


def geometric_mean(values: Sequence[float]) -> float:
    """The geometric mean exp(mean(log)) of at least one positive number."""
    return math.exp(statistics.fmean(math.log(v) for v in values))


def group_results(cases: Sequence[CaseResult]) -> tuple[GroupResult, ...]:
    """Geometric means of each group, in order of appearance, and of all cases. A mean leaves out cases in which either contestant has no
    time; `cases` is the number of cases included. If both contestants run the same code, the case counts as 1."""
    names = list(dict.fromkeys(c.group for c in cases))
    return tuple(_means(group, [c for c in cases if group in (c.group, ALL)]) for group in ((*names, ALL) if len(names) > 1 else names))


def suite_results(cases: Sequence[CaseResult]) -> tuple[SuiteResult, ...]:
    """The figures of each suite of a run, in order of appearance."""
    members: dict[str, list[CaseResult]] = {}
    for c in cases:
        members.setdefault(c.suite, []).append(c)
    return tuple(SuiteResult(name, len(own), _means(name, own), _searching(own), _rates(own)) for name, own in members.items())


def _means(name: str, cases: Sequence[CaseResult]) -> GroupResult:
    collected: dict[str, list[float]] = {}
    shares: dict[str, list[float]] = {}
    for c in cases:
        for o in c.contestants:
            for other, s in o.speedups.items():
                collected.setdefault(f"{o.name}/{other}", []).append(s.median)
                if other == c.best_peer:
                    collected.setdefault(f"{o.name}/{BEST_PEER}", []).append(s.median)
            if o.same_as is not None and o.median is not None:
                for pair in (f"{o.name}/{o.same_as}", f"{o.same_as}/{o.name}"):
                    collected.setdefault(pair, []).append(1.0)
            if o.ceiling_share:
                shares.setdefault(o.name, []).append(o.ceiling_share)
    return GroupResult(name, {k: geometric_mean(v) for k, v in collected.items()}, {k: len(v) for k, v in collected.items()},
                       {k: geometric_mean(v) for k, v in shares.items()})


def _searching(cases: Sequence[CaseResult]) -> Searching | None:
    searches = [(o.search_seconds, c.name) for c in cases for o in c.contestants if o.search_seconds is not None]
    if not searches:
        return None
    seconds = [s for s, _ in searches]
    return Searching(len(searches), statistics.median(seconds), *max(searches), sum(seconds))


def _rates(cases: Sequence[CaseResult]) -> Rates | None:
    rates = [(c.neighbour.rate.median, c.name) for c in cases if c.neighbour is not None and c.neighbour.rate is not None]
    return Rates(len(rates), geometric_mean([r for r, _ in rates]), *min(rates)) if rates else None
