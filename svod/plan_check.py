"""The whole plan with heuristic and with tuned chains, timed against each other: did the model gain what its kernels promised?

    promised   Σ calls × (heuristic − tuned seconds), each kernel timed alone: what the searches found
    measured   the two plans in interleaved rounds over the same memory (bench/race.py, confirm)

Where less than 80 % of the promise arrives, the reason is looked for: groups of tuned kernels (families, the largest promises first)
are swapped into the heuristic plan one group at a time, and timed in the same rounds. A group that gains less inside the plan than
alone is blamed; that the plan touches more data between two of its runs than a cache holds explains it where that is so: kernels are
timed with their operands warm.
"""
from __future__ import annotations

import random
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from svod.bench.race import Confirmation, Ratio, confirm
from svod.bench.timer import Contestant, time_calls
from svod.compile.plan import ExecutionPlan
from svod.config import BenchConfig
from svod.core.family import family_key
from svod.core.target import Target
from svod.optimize import Compiled
from svod.outline import Outline, build_plan, synthetic_arrays

KEPT = 0.8                  # of the promised gain; less is looked into
WORTH_EXPLAINING = 0.02     # of the plan's time: a smaller promise is within what a plan varies by
MAX_GROUPS = 5
MIN_ROUNDS = 7              # interleaved rounds of a swap: enough for an interval


@dataclass(frozen=True)
class Gain:
    """What the search says about a kernel: seconds of one call alone, with the heuristic's and with the tuned chain."""

    heuristic: float
    tuned: float


@dataclass(frozen=True)
class Swap:
    """One group of kernels tuned and the rest of the plan with heuristics. Seconds of one run of the plan that the group gains:
    promised, and measured inside the plan, with the 95 % interval of the measurement."""

    kernels: tuple[str, ...]
    promised: float
    measured: float
    low: float
    high: float
    reason: str = ""

    @property
    def short(self) -> bool:
        """It gains less than it promised, beyond noise."""
        return self.high < KEPT * self.promised


@dataclass(frozen=True)
class PlanCheck:
    """Seconds of one run of the plan. `ratio`: tuned over heuristic, paired, with its 95 % interval. `predicted`: the heuristic plan's time
    less the promised gain. `changed`: kernels with another chain than the heuristic's. `swaps`: groups looked into, where less arrived
    than promised."""

    heuristic: float
    tuned: float
    ratio: Ratio
    promised: float
    rounds: int
    noisy: str | None
    bytes_touched: int
    changed: int
    swaps: tuple[Swap, ...] = field(default=())

    @property
    def predicted(self) -> float:
        return max(0.0, self.heuristic - self.promised)

    @property
    def gained(self) -> float:
        return self.heuristic * (1.0 - self.ratio.median)

    @property
    def fell_short(self) -> bool:
        """Less than 80 % of a promise worth the name arrived, beyond noise."""
        return falls_short(self.heuristic, self.ratio, self.promised)

    @property
    def explanation(self) -> str:
        """Why less arrived than was promised, in a sentence; empty where nothing is to be explained."""
        if not self.fell_short:
            return ""
        blamed = [s for s in self.swaps if s.short]
        if blamed:
            return blamed[0].reason
        if not self.swaps:
            return "there was no time left to find out why"
        if any(s.high - s.low > s.promised for s in self.swaps):
            return "the machine is too busy to tell which kernels are to blame"
        parts = sum(s.measured for s in self.swaps)
        if parts >= KEPT * sum(s.promised for s in self.swaps):
            return "each group of kernels keeps its promise alone, together they do not: they compete for the caches"
        return "the loss is spread over the kernels, none stands out"


def falls_short(heuristic: float, ratio: Ratio, promised: float) -> bool:
    """Whether a measured ratio is below 80 % of the promised gain even at the better end of its interval."""
    known = ratio.low > 0.0         # too few rounds for an interval say nothing
    return known and promised > WORTH_EXPLAINING * heuristic and heuristic * (1.0 - ratio.low) < KEPT * promised


def promised_gain(outline: Outline, gains: Mapping[str, Gain]) -> float:
    """Seconds of one run of the plan that the kernels promise."""
    return sum(n * (gains[k].heuristic - gains[k].tuned) for k, n in outline.counts.items() if k in gains)


def check_plan(outline: Outline, heuristic: Mapping[str, Compiled], tuned: Mapping[str, Compiled], gains: Mapping[str, Gain],
               target: Target, *, seconds: float = 3.0, bench: BenchConfig | None = None, rng: random.Random | None = None) -> PlanCheck:
    """Time the plan both ways within about `seconds`, over made-up inputs, and look into a gain that fell short.

    `heuristic`, `tuned`: code by kernel key; kernels whose chains are equal share it. Raises LaunchError when the plan cannot be built."""
    bench = bench or BenchConfig()
    rng = rng or random.Random(0)
    started = time.monotonic()
    arrays = synthetic_arrays(outline)

    def plan_of(chosen: Mapping[str, Compiled]) -> ExecutionPlan:
        return build_plan(outline, chosen, arrays, threads=target.threads)

    def left() -> float:
        return seconds - (time.monotonic() - started)

    base, best = plan_of(heuristic), plan_of(tuned)
    contestants = [Contestant(base.repeat, "heuristic"), Contestant(best.repeat, "tuned")]
    run = min(time_calls(c, 1) for c in contestants)        # also the first touch of the intermediates
    min_rounds = max(1, min(MIN_ROUNDS, int(0.25 * left() / run)))
    found = confirm(contestants, min_rounds=min_rounds, precision=bench.precision, budget_seconds=max(0.1, 0.5 * left()), rng=rng,
                    min_sample=bench.min_sample * 1e-6)
    promised = promised_gain(outline, gains)
    base_seconds, ratio = found.seconds(0), found.ratios[1]
    touched = bytes_touched(outline)
    swaps: tuple[Swap, ...] = ()
    if falls_short(base_seconds, ratio, promised) and left() > 2 * MIN_ROUNDS * base_seconds:
        groups = promising_groups(outline, gains)
        groups = groups[:max(1, int(left() / (MIN_ROUNDS * base_seconds)) - 1)]
        plans = [plan_of({**heuristic, **{k: tuned[k] for k in group}}) for group in groups]
        timed = confirm([contestants[0], *(Contestant(p.repeat) for p in plans)], min_rounds=MIN_ROUNDS, precision=bench.precision,
                        budget_seconds=max(0.1, left()), rng=rng, min_sample=bench.min_sample * 1e-6)
        swaps = tuple(sorted((_swap(outline, gains, group, timed, i, touched, target) for i, group in enumerate(groups, 1)),
                             key=lambda s: s.measured - s.promised))
    changed = sum(heuristic[k].chain != tuned[k].chain for k in outline.kernels)
    return PlanCheck(base_seconds, found.seconds(1), ratio, promised, len(found.rounds), found.noisy, touched, changed, swaps)


def promising_groups(outline: Outline, gains: Mapping[str, Gain]) -> list[tuple[str, ...]]:
    """Families of kernels by what they promise for a run of the plan, the largest first, at most MAX_GROUPS."""
    families: dict[str, list[str]] = {}
    for key in outline.counts:
        if key in gains and gains[key].heuristic > gains[key].tuned:
            families.setdefault(family_key(outline.kernels[key].ast), []).append(key)

    def promise(keys: Sequence[str]) -> float:
        return sum(outline.counts[k] * (gains[k].heuristic - gains[k].tuned) for k in keys)
    return sorted((tuple(keys) for keys in families.values()), key=lambda keys: (-promise(keys), keys))[:MAX_GROUPS]


def _swap(outline: Outline, gains: Mapping[str, Gain], group: tuple[str, ...], timed: Confirmation, contestant: int, touched: int,
          target: Target) -> Swap:
    base, ratio = timed.seconds(0), timed.ratios[contestant]
    promised = sum(outline.counts[k] * (gains[k].heuristic - gains[k].tuned) for k in group)
    found = Swap(group, promised, base * (1 - ratio.median), base * (1 - ratio.high), base * (1 - ratio.low))
    return Swap(found.kernels, found.promised, found.measured, found.low, found.high, _reason(outline, found, touched, target))


def _reason(outline: Outline, swap: Swap, touched: int, target: Target) -> str:
    names = names_of(outline, swap.kernels)
    what = f"{names} gain{'s' if len(swap.kernels) == 1 else ''} {_micro(swap.measured)} of {_micro(swap.promised)} inside the plan"
    if not swap.short:
        return what
    own = max(sum(p.arg.size * p.dtype.itemsize for p in outline.kernels[k].params) for k in swap.kernels)
    for name, size in (("last-level cache", target.l3 or target.l2 * target.threads), ("second-level cache", target.l2)):
        if own <= size < touched:
            return (f"{what}: timed alone {'its' if len(swap.kernels) == 1 else 'their'} operands ({_mega(own)}) stay in the {name} "
                    f"({_mega(size)}), in the plan {_mega(touched)} pass through it between two runs")
    return f"{what}, though the plan's data ({_mega(touched)}) fit the caches"


def names_of(outline: Outline, keys: Sequence[str]) -> str:
    """The names of a few kernels, for a sentence."""
    names = {c.kernel: c.name or c.kernel[:12] for c in reversed(outline.calls)}
    origins = {c.kernel: c.origin for c in reversed(outline.calls)}
    shown = [f"{names[k]} ({origins[k]})" if origins[k] else names[k] for k in keys[:3]]
    return ", ".join(shown) + (f" and {len(keys) - 3} more" if len(keys) > 3 else "")


def bytes_touched(outline: Outline) -> int:
    """Bytes of all buffers that one run of the plan reads or writes, intermediates counted once."""
    used = {n for c in outline.calls for n in c.args}
    return sum(outline.buffers[n].nbytes for n in used)


def _micro(seconds: float) -> str:
    return f"{1e6 * seconds:.0f} µs"


def _mega(size: float) -> str:
    return f"{size / (1 << 20):.1f} MB"
