"""From samples to figures: bounds, spreads, speed-ups, noise, geometric means. Pure functions; the formulas are in docs/measuring.md.

    samples of each contestant, by round → median, spread, paired speed-ups, share of the ceiling → per case
    speed-ups of all cases → geometric means → per group
"""
from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from svod.bench.ceilings import Ceilings
from svod.bench.race import Ratio, median_interval, paired_ratio
from svod.bench.results import SVOD, Bound, CaseResult, GroupResult, Load, Outcome, Speedup
from svod.core.dtype import BY_NAME

PRECISION = 0.01            # half the width of an interval of a speed-up that counts as known
NOISY_SPREAD = 0.05         # half the width of the interval of a median: more is said
NOISY_RATIO = 0.075         # half the width of the interval of the speed-up over the best peer: two runs could differ by 15 %
NOISY_DRIFT = 0.10          # how far the first and second half of a contestant's samples may lie apart
ALL = "all"
BEST_PEER = "best peer"


@dataclass(frozen=True)
class Timed:
    """A contestant and its samples in order of the rounds, from the first one on; None for one that has none of its own."""

    outcome: Outcome
    seconds: Sequence[float] | None


def bound_of(flops: float, bytes_read: float, bytes_written: float, dtype: str, ceilings: Ceilings, caches: Mapping[str, int]) -> Bound:
    """The roofline for operands of `bytes_read + bytes_written`, which stay in a cache between two runs if they fill half of it at most.

    `caches`: bytes of l2 (of one core) and l3 (shared). Operands spread over the cores' own caches, so that l2 counts once per thread.
    Operands that fill a cache by more than half stay there in part: such kernels may come out above their bound."""
    total = bytes_read + bytes_written
    room = {"l2": caches.get("l2", 0) * ceilings.threads / 2, "l3": caches.get("l3", 0) / 2, "memory": math.inf}
    level = next(name for name, size in room.items() if name in ceilings.bandwidth and total <= size)
    rate = ceilings.bytes_per_second("read", level)
    if bytes_written > 0.01 * total:
        rate = max(rate, ceilings.bytes_per_second("copy", level))
    compute = ceilings.flops_per_second(BY_NAME[dtype])
    seconds = max(flops / compute, total / rate)
    return Bound(seconds, "compute" if flops / compute >= total / rate else level, compute, rate, flops / total if total else 0.0)


def spread_of(seconds: Sequence[float]) -> float:
    """Half the width of the 95 % interval of the median, on the scale of logarithms; below six samples half the range of all."""
    low, high = median_interval(seconds) or (min(seconds), max(seconds))
    return 0.5 * math.log(high / low)


def drift_of(seconds: Sequence[float]) -> float:
    """How far the medians of the first and the second half lie apart, on the scale of logarithms."""
    if len(seconds) < 6:
        return 0.0
    half = len(seconds) // 2
    return abs(math.log(statistics.median(seconds[half:]) / statistics.median(seconds[:half])))


def judge_case(*, name: str, title: str, suite: str, group: str, dtype: str, shapes: str, flops: float, bytes_read: float,
               bytes_written: float, bound: Bound | None, timed: Sequence[Timed], noisy: str | None, load: Load | None) -> CaseResult:
    """All figures of a case. `noisy`: what was seen while timing; what the samples themselves show is added."""
    own = {t.outcome.name: t.seconds for t in timed if t.outcome.status == "ok" and t.seconds}
    seconds = dict(own)
    same = {t.outcome.name: t.outcome.same_as for t in timed if t.outcome.same_as is not None}
    for copy, other in same.items():
        if other in own:
            seconds[copy] = own[other]
    best_peer = min((n for n in own if n not in SVOD), key=lambda n: statistics.median(own[n]), default=None)
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
                      all(_half_width(s) <= PRECISION for o in outcomes for n, s in o.speedups.items() if n == best_peer), noisy, load)
    return replace(case, noisy=_noise(case))


def _speedup(times: Sequence[float], other: Sequence[float]) -> Speedup:
    ratio: Ratio = paired_ratio(other[:len(times)], times[:len(other)])
    bounded = ratio.low > 0.0 and math.isfinite(ratio.high)
    return Speedup(ratio.median, ratio.low if bounded else None, ratio.high if bounded else None)


def _half_width(s: Speedup) -> float:
    return 0.5 * math.log(s.high / s.low) if s.low is not None and s.high is not None else math.inf


def _noise(case: CaseResult) -> str | None:
    """Why the case's figures are doubtful: what was seen while timing, else what the samples show of svod and the best peer."""
    if case.noisy is not None:
        return case.noisy
    judged = [o for o in case.contestants if o.samples and o.same_as is None and (o.name in SVOD or o.name == case.best_peer)]
    for o in judged:
        if o.spread is not None and o.spread > NOISY_SPREAD:
            return f"the median of {o.name} is known to ±{100 * o.spread:.0f} % only"
        if drift_of(o.samples) > NOISY_DRIFT:
            return f"{o.name} drifted by {100 * math.expm1(drift_of(o.samples)):.0f} % while it was timed"
    for o in judged:
        s = o.speedups.get(case.best_peer or "")
        if s is not None and _half_width(s) > NOISY_RATIO:
            return f"the speed-up of {o.name} over {case.best_peer} is known to ±{100 * _half_width(s):.0f} % only"
    return None


def geometric_mean(values: Sequence[float]) -> float:
    """exp(mean(log)); of positive numbers, at least one."""
    return math.exp(statistics.fmean(math.log(v) for v in values))


def group_results(cases: Sequence[CaseResult]) -> tuple[GroupResult, ...]:
    """Geometric means per group, in order of appearance, and over everything. A case in which either side has no time is left out of
    that mean, and `cases` says how many went in."""
    names = list(dict.fromkeys(c.group for c in cases))
    out = []
    for group in (*names, ALL) if len(names) > 1 else names:
        members = [c for c in cases if group in (c.group, ALL)]
        collected: dict[str, list[float]] = {}
        shares: dict[str, list[float]] = {}
        for c in members:
            for o in c.contestants:
                for other, s in o.speedups.items():
                    collected.setdefault(f"{o.name}/{other}", []).append(s.median)
                    if other == c.best_peer:
                        collected.setdefault(f"{o.name}/{BEST_PEER}", []).append(s.median)
                if o.ceiling_share:
                    shares.setdefault(o.name, []).append(o.ceiling_share)
        out.append(GroupResult(group, {k: geometric_mean(v) for k, v in collected.items()}, {k: len(v) for k, v in collected.items()},
                               {k: geometric_mean(v) for k, v in shares.items()}))
    return tuple(out)
