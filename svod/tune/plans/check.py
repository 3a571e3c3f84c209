"""Timing of a whole plan with the heuristic's and with tuned chains, and comparison of its gain with the gains of its kernels.

    promised   Σ calls × (heuristic − tuned seconds), each kernel timed by itself: what the searches found
    measured   the two plans in interleaved rounds over the same memory (bench/race.py, confirm)

Then each plan is run kernel by kernel in its order, so that each kernel finds the caches as the one before left them. A search
times small kernels with their operands in the caches, and large ones with the caches about as a plan leaves them
(`svod.compile.cpu.between_runs`). In a plan other data passes through the caches between two runs of a kernel, and that may slow one of the
two chains more than the other. If the two figures above differ by more than 15 %, either way, each kernel's gain inside the plan
is compared with the promised gain, and the kernels that make the difference are named. A chain that is slower inside the plan than the
heuristic's is given up (`svod.tune.plans.settle`).
"""
from __future__ import annotations

import math
import random
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

from svod.bench.race import Ratio, confirm, median_interval, paired_ratio
from svod.bench.timer import Contestant, time_calls
from svod.compile.plan.compiler import Compiled
from svod.compile.plan.execution_plan import ExecutionPlan
from svod.compile.plan.unbound_plan import UnboundPlan, build_plan, synthetic_arrays
from svod.config import BenchConfig
from svod.core.machine.target import Target
from svod.system.quantities import count
from svod.system.quantities import seconds as duration
from svod.tune.measure.plan_sizes import plan_sizes
from svod.tune.plans.inside import passes_inside

PROMISE_TOLERANCE = 0.15            # a difference above this share of the promised gain, either way, is explained
WORTH_EXPLAINING = 0.02     # a difference below this share of the plan's time is not explained: plans vary as much by themselves
MIN_ROUNDS = 7              # least number of interleaved rounds: enough for a confidence interval
EXPLAINED = 3               # most kernels that are named
MOVED = 1.1                 # a kernel that takes more than this many times its time alone is slowed by the plan
# seconds; a kernel delayed by less does not count as slowed by the plan, as single calls are not timed more exactly
MOVED_SECONDS = 1e-6
UNKNOWN_RATIO = Ratio(1.0, 0.0, math.inf)


@dataclass(frozen=True)
class Gain:
    """Seconds of one call of a kernel with the heuristic's and with the tuned chain."""

    heuristic: float
    tuned: float

    @property
    def seconds(self) -> float:
        return self.heuristic - self.tuned


@dataclass(frozen=True)
class InPlan:
    """One kernel inside the plan; a run of the plan calls it `calls` times. `alone`: its times as the search measured them, None if they
    are not for today's heuristic; `inside`: its times in the plan's order. `low`, `high`: 95 % interval of the seconds that its tuned
    chain saves in a run of the plan."""

    kernel: str
    calls: int
    alone: Gain | None
    inside: Gain
    low: float
    high: float
    reason: str = ""
    ratio: Ratio = UNKNOWN_RATIO    # tuned time over heuristic's time, both inside the plan

    @property
    def promised(self) -> float:
        """Seconds that the kernel should save in one run of the plan, by its times measured alone."""
        return 0.0 if self.alone is None else self.calls * self.alone.seconds

    @property
    def measured(self) -> float:
        return self.calls * self.inside.seconds

    @property
    def differs(self) -> bool:
        """Whether the kernel's gain inside the plan is larger or smaller than its promised gain, beyond noise."""
        slack = PROMISE_TOLERANCE * abs(self.promised)
        return self.high < self.promised - slack or self.low > self.promised + slack


@dataclass(frozen=True)
class PlanCheck:
    """The result of a check. `heuristic`: seconds of one run of the plan with the heuristic's chains. `ratio`: tuned time over heuristic's
    time, paired, with its 95 % interval. `predicted`: the heuristic's time less the promised gain. `changed`: number of kernels with
    another chain than the heuristic's. `kernels`: the kernels with another chain or with a promised gain, timed inside the plan if there
    was time, sorted by the difference from the promised gain, largest first."""

    heuristic: float
    ratio: Ratio
    promised: float
    rounds: int
    noisy: str | None
    bytes_touched: int
    changed: int
    kernels: tuple[InPlan, ...] = field(default=())
    at: Mapping[str, int] = field(default_factory=dict)     # the values of the plan's variables in the check
    too_short: int = 0      # number of kernels that are left out of `kernels`, as single calls of theirs cannot be timed
    given_up: tuple[str, ...] = ()      # the chains that were slower inside the plan and are not used any more, in words

    @property
    def predicted(self) -> float:
        return max(0.0, self.heuristic - self.promised)

    @property
    def measured(self) -> float:
        """Seconds of one run with the tuned chains: the heuristic's seconds times the paired ratio, as the medians of both plans' times may
        come from different moments."""
        return self.heuristic * self.ratio.median

    @property
    def gained(self) -> float:
        return self.heuristic - self.measured

    @property
    def differs(self) -> bool:
        """Whether the gain of the whole plan differs from the promised gain by more than 15 % of it, beyond noise."""
        return differs(self.heuristic, self.ratio, self.promised)

    @property
    def losses(self) -> tuple[InPlan, ...]:
        """The kernels whose tuned chains are slower inside the plan than the heuristic's, beyond noise."""
        return tuple(k for k in self.kernels if k.ratio.low > 1.0)

    @property
    def fell_short(self) -> bool:
        return self.differs and self.gained < self.promised

    @property
    def explanation(self) -> tuple[str, ...]:
        """Why the gain differs from the promised one, with a line for each of the kernels that make most of the difference; empty if it
        does not differ."""
        if not self.differs:
            return ()
        short = f"{count(self.too_short, 'kernel')} {'are' if self.too_short > 1 else 'is'} too short to be timed one by one" \
            if self.too_short else ""
        if not self.kernels:
            return (short or "there was no time left to find out why",)
        way = 1.0 if self.gained > self.promised else -1.0
        to_blame = [k for k in self.kernels if k.differs and way * (k.measured - k.promised) > 0]
        if to_blame:
            return tuple(k.reason for k in to_blame[:EXPLAINED])
        if any(k.high - k.low > max(abs(k.promised), abs(self.gained - self.promised)) for k in self.kernels):
            return ("the machine is too busy to tell which kernels make the difference",)
        return ("kernel by kernel the plan gains what was promised, or no kernel stands out" + f"; {short}" * bool(short),)


def differs(heuristic: float, ratio: Ratio, promised: float) -> bool:
    """Whether the promised gain is outside of the interval of the measured gain, by more than 15 % of the promise and more than 2 % of the
    plan's time."""
    if ratio.low <= 0.0:        # too few rounds for an interval
        return False
    least, most = heuristic * (1.0 - ratio.high), heuristic * (1.0 - ratio.low)
    return max(least - promised, promised - most) > max(PROMISE_TOLERANCE * abs(promised), WORTH_EXPLAINING * heuristic)


def promised_gain(unbound: UnboundPlan, gains: Mapping[str, Gain]) -> float:
    """Seconds that all kernels together should save in one run of the plan, by their times measured alone."""
    return sum(n * gains[k].seconds for k, n in unbound.counts.items() if k in gains)


def check_values(unbound: UnboundPlan) -> dict[str, int]:
    """The values of its variables that a plan is timed with: the middle one of `plan_sizes`."""
    sizes = plan_sizes(c.variables for c in unbound.calls)
    return sizes[len(sizes) // 2]


def check_plan(unbound: UnboundPlan, heuristic: Mapping[str, Compiled], tuned: Mapping[str, Compiled], gains: Mapping[str, Gain],
               target: Target, *, seconds: float = 3.0, bench: BenchConfig | None = None, rng: random.Random | None = None) -> PlanCheck:
    """Time the plan with the heuristic's and with tuned code within about `seconds`, over synthetic inputs, and explain a gain that differs
    from the promised one.

    `heuristic`, `tuned`: code by kernel key; kernels whose chains are equal share it. `gains`: the gains of kernels timed alone with the
    same chains. Raises LaunchError when the plan cannot be built."""
    bench = bench or BenchConfig()
    rng = rng or random.Random(0)
    started = time.monotonic()
    arrays = synthetic_arrays(unbound)

    def left() -> float:
        return seconds - (time.monotonic() - started)

    base, best = (build_plan(unbound, chosen, arrays, threads=target.threads, device=target.device) for chosen in (heuristic, tuned))
    values = check_values(unbound)
    for plan in (base, best):
        plan.set_variables(values)
    contestants = [Contestant(base.repeat, "heuristic"), Contestant(best.repeat, "tuned")]
    run = min(time_calls(c, 1) for c in contestants)        # these runs also touch the intermediate buffers for the first time
    min_rounds = max(1, min(MIN_ROUNDS, int(0.25 * left() / run)))
    race = confirm(contestants, min_rounds=min_rounds, precision=bench.precision, budget_seconds=max(0.1, 0.5 * left()), rng=rng,
                    min_sample=bench.min_sample * 1e-6)
    changed = [k for k in unbound.kernels if heuristic[k].chain != tuned[k].chain]
    check = PlanCheck(race.seconds(0), race.ratios[1], promised_gain(unbound, gains), len(race.rounds), race.noisy,
                      bytes_touched(unbound), len(changed), at=values)
    wanted = [k for k in unbound.kernels if k in changed or k in gains]
    if not (changed or check.differs) or left() < 4 * MIN_ROUNDS * check.heuristic:
        return check
    inside = time_inside(base, best, unbound, left, rng)
    kernels = [in_plan(unbound, key, gains.get(key), inside[key], check.bytes_touched, target) for key in wanted if key in inside]
    return replace(check, kernels=tuple(sorted(kernels, key=lambda k: -abs(k.measured - k.promised))), too_short=len(wanted) - len(kernels))


def time_inside(base: ExecutionPlan, best: ExecutionPlan, unbound: UnboundPlan, left: Callable[[], float],
                rng: random.Random) -> dict[str, list[Gain]]:
    """Kernel key → for each pass of `passes_inside` the mean seconds of its calls with either plan's code, less the median time of an empty
    call. Kernels whose times are within the spread of those of empty calls are left out, as they are not known."""
    passes: dict[str, list[Gain]] = {k: [] for k in unbound.kernels}
    first = [Contestant(partial(plan.repeat_kernel, 0), "the first kernel") for plan in (base, best)]
    empty: list[float] = []
    for heuristic, tuned in passes_inside((base, best), unbound, left, rng):
        empty += [time_calls(contestant, 0) for contestant in first]
        for key, calls in unbound.counts.items():
            passes[key].append(Gain(heuristic[key] / calls, tuned[key] / calls))
    call_seconds = statistics.median(empty)
    tenths = statistics.quantiles(empty, n=10)
    resolution = tenths[-1] - tenths[0]
    inside = {k: [Gain(max(0.0, g.heuristic - call_seconds), max(0.0, g.tuned - call_seconds)) for g in gains]
              for k, gains in passes.items()}
    return {k: gains for k, gains in inside.items() if statistics.median(max(g.heuristic, g.tuned) for g in gains) > resolution}


def in_plan(unbound: UnboundPlan, key: str, alone: Gain | None, passes: Sequence[Gain], touched: int, target: Target) -> InPlan:
    """Compare one kernel's gain inside the plan, timed in passes, with the gain that it had alone."""
    calls = unbound.counts[key]
    low, high = median_interval([g.seconds for g in passes]) or (float("-inf"), float("inf"))
    inside = Gain(statistics.median(g.heuristic for g in passes), statistics.median(g.tuned for g in passes))
    timed = [g for g in passes if g.heuristic > 0.0]        # a time below the time of an empty call is noise
    ratio = paired_ratio([g.tuned for g in timed], [g.heuristic for g in timed]) if timed else UNKNOWN_RATIO
    comparison = InPlan(key, calls, alone, inside, calls * low, calls * high, ratio=ratio)
    return replace(comparison, reason=_reason(unbound, comparison, touched, target))


def _reason(unbound: UnboundPlan, k: InPlan, touched: int, target: Target) -> str:
    what = f"{name_of(unbound, k.kernel)} {'gains' if k.measured >= 0 else 'loses'} {duration(abs(k.measured))} a run"
    if k.alone is None:
        return f"{what}, and nothing was promised: its heuristic is another one since it was tuned"
    heuristic, tuned = k.inside.heuristic / k.alone.heuristic, k.inside.tuned / k.alone.tuned
    promised = f"instead of {duration(k.promised)}" if k.promised > 0 else "though nothing was promised"
    text = (f"{what} {promised}: inside the plan the heuristic's chain takes {heuristic:.2f}× its time alone, the "
            f"tuned one {tuned:.2f}×")
    pairs = (k.inside.heuristic, k.alone.heuristic), (k.inside.tuned, k.alone.tuned)
    if not any(now - then > max((MOVED - 1.0) * then, MOVED_SECONDS) for now, then in pairs):
        return text
    own = unbound.kernels[k.kernel].nbytes
    for name, size in (("second-level caches", target.l2 * target.threads), ("last-level cache", target.l3)):
        if own <= size < touched:
            return f"{text}; alone its operands ({_mega(own)}) stay in the {name}, in the plan {_mega(touched)} pass through in between"
    if touched > max(own, target.l2):
        return f"{text}; alone it has the caches for its {_mega(own)} of operands, in the plan it shares them with {_mega(touched)}"
    return f"{text}; not for its caches, the whole plan fits them: the machine was faster or slower then"


def name_of(unbound: UnboundPlan, key: str) -> str:
    """A kernel's name and where it is from, for a sentence."""
    call = next(c for c in unbound.calls if c.kernel == key)
    return f"{call.name or key[:12]} ({call.origin})" if call.origin else call.name or key[:12]


def bytes_touched(unbound: UnboundPlan) -> int:
    """Bytes of all buffers that one run of the plan reads or writes, intermediates counted once."""
    used = {n for c in unbound.calls for n in c.args}
    return sum(unbound.buffers[n].nbytes for n in used)


def _mega(size: float) -> str:
    return f"{size / (1 << 20):.1f} MB"
