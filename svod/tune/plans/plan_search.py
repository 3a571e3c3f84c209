"""The search over the alternatives of a plan (`svod.tune.plans.alternatives`), by the times of whole plans.

    the plan by the rules → all images with channels last → one alternative after the other, those first whose kernels take most of the time
    each: the plan with it and without it, in interleaved rounds → it is taken where it is faster beyond noise
    at the end: the plan by the rules and the one that was chosen → `PlanTimes`, from which `prepare` makes the plan from then on

A kernel's time by itself does not decide: another order of axes changes the kernels that write and that read a buffer, and all alternatives
change what is in the caches. Each kernel has its best known chain.
"""
from __future__ import annotations

import logging
import random
import time
from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import numpy as np

from svod.bench.race import confirm
from svod.bench.timer import Contestant, protocol_of, time_calls
from svod.compile.plan.execution_plan import ExecutionPlan
from svod.compile.plan.unbound_plan import BufferSpec, UnboundPlan, synthetic_arrays
from svod.core.graph.buffer import aligned_empty
from svod.core.machine.target import SAME
from svod.core.schedule.cut import BY_RULES, Deviations
from svod.errors import SvodError
from svod.system.quantities import count
from svod.tune.capture import plan_digest
from svod.tune.db import PlanTimes
from svod.tune.plans.alternatives import Alternative, together
from svod.tune.plans.check import MIN_ROUNDS, bytes_touched
from svod.tune.plans.form_check import built_for_timing
from svod.tune.plans.pair_times import deciding_record, times_words
from svod.tune.resolved import Resolved

MOST_SEARCHED = 1 << 30     # A plan whose buffers have more bytes is not searched, as two plans are in memory at a time.
LEAST_KERNELS_SHARE = 0.01          # An alternative is tried if its kernels take at least this share of the plan's time.
TRIAL_SECONDS = 1.0         # most seconds for the rounds of one alternative
TRIAL_PRECISION = 0.003     # half of the interval of a ratio that ends these rounds
PLAN_SAMPLE_SECONDS = 0.02       # least time of a sample: the runs of one plan that follow each other, as those of a program do
FINAL_SECONDS = 3.0         # most seconds for the last rounds
FINAL_PRECISION = 0.005     # half of the interval that ends these
ALTERNATIVES_SHARE = 0.33   # largest share of a budget for the alternatives of plans

log = logging.getLogger("svod.tune")

PlanOf = Callable[[Deviations], UnboundPlan]


def can_be_searched(plan: UnboundPlan, resolved: Resolved) -> bool:
    """Whether the alternatives of a plan may be chosen: it runs on one device without calls of functions, at fixed sizes, and the policy
    does not fix the order of its sums. Kernels that are captured for another device, or have given chains, are those by the rules."""
    config = resolved.config
    return (resolved.target.numerics != SAME and not (config.noopt or resolved.opts or config.capture_device)
            and len(plan.calls) > 1 and not (plan.functions or plan.copies) and not any(c.variables or c.device for c in plan.calls)
            and bytes_touched(plan) <= MOST_SEARCHED)


def plan_record(plan: UnboundPlan, resolved: Resolved, timed: PlanTimes | None = None) -> PlanTimes | None:
    """The record that decides about the alternatives of a plan that is made by the rules; None where there is none."""
    return deciding_record(PlanTimes, plan_digest(plan, resolved.target.key), resolved, timed)


class ChosenPlan(NamedTuple):
    """A captured plan for which alternatives were considered. `plan`: the digest of the plan that is used from now on; `times`: the record
    that decides about it."""

    plan: str
    times: PlanTimes

    @property
    def lines(self) -> list[str]:
        """The choice in words: its effect on the whole plan, and how many values are treated otherwise in which way."""
        done = Counter(kind_of(a) for a in self.times.alternatives if self.times.is_faster)
        return [f"  {self.times.described}: {times_words(self.times)}",
                *(f"    {count(n, 'value')} {kind}" for kind, n in done.most_common())]

    def to_data(self) -> dict[str, Any]:
        """The choice as plain data for JSON."""
        t = self.times
        return {"plan": self.plan, "by_rules": t.kernel, "described": t.described, "is_faster": t.is_faster,
                "alternatives": list(t.alternatives), "by_rules_seconds": t.by_rules, "chosen_seconds": t.otherwise, "ratio": t.ratio,
                "ratio_low": t.ratio_low, "ratio_high": t.ratio_high, "noisy": t.noisy}


def kind_of(alternative: str) -> str:
    """What an alternative of a record does, without its key, its value and its kernels."""
    return alternative.split(" ", 3)[-1].partition(" (")[0]


class _Tried(NamedTuple):
    """A plan with some of its alternatives, ready to run. `chosen`: their keys."""

    chosen: frozenset[str]
    digest: str
    plan: ExecutionPlan


class PlanSearch:
    """A search over the alternatives of one plan. `plan_of`: makes the plan with choices; `seconds`: wall time of the search; `begun`: the
    record of an earlier search, with which it goes on."""

    def __init__(self, alternatives: Mapping[str, Alternative], plan_of: PlanOf, resolved: Resolved, seconds: float,
                 begun: PlanTimes | None = None) -> None:
        self.alternatives, self.plan_of, self.resolved = alternatives, plan_of, resolved
        self.final_seconds = min(FINAL_SECONDS, 0.25 * seconds)
        self.ends = time.monotonic() + seconds - self.final_seconds
        self.begun = begun.chosen.intersection(alternatives) if begun is not None and begun.is_faster else frozenset()
        self.is_interrupted = False         # whether Ctrl-C has ended it
        self.rng = random.Random(0)
        self.by_rules = plan_of(BY_RULES)
        self.memory = _PlanMemory(self.by_rules)
        self.tried: set[frozenset[str]] = set()

    @property
    def left(self) -> float:
        return self.ends - time.monotonic()

    def run(self) -> PlanTimes | None:
        """The times of the plan by the rules and of the best one that was found, which is the former where none is faster. None if there
        was no time to compare any. Ctrl-C ends the search. Raises CompileError, LaunchError."""
        first = self.made(frozenset())
        if self.left < 2 * MIN_ROUNDS * time_calls(Contestant(first.plan.repeat, "rules"), 1):
            return None
        best = self.made(self.begun) if self.begun else first
        singles, images, changed = self.in_order(first), self.images, True
        try:
            if len(images) > 1 and (found := self.new(best.chosen | images)) is not None and self.is_faster(found, best):
                best = found
            while changed and self.left > 0:
                changed = False
                for key in singles:
                    if self.left > 0 and (found := self.new(best.chosen ^ {key})) is not None and self.is_faster(found, best):
                        best, changed = found, True
        except KeyboardInterrupt:
            self.is_interrupted = True
        return self.times_of(first, best, sum(best.chosen ^ {key} not in self.tried for key in singles))

    @property
    def images(self) -> frozenset[str]:
        """The alternatives that are tried together at first: all images with channels last."""
        return frozenset(key for key, a in self.alternatives.items() if a.is_image)

    def in_order(self, first: _Tried) -> list[str]:
        """The alternatives that are tried one after the other: images first, and by the time of the kernels that they change."""
        seconds: dict[str, float] = {}
        for call, taken in zip(self.by_rules.calls, first.plan.profile(), strict=True):
            seconds[call.kernel] = seconds.get(call.kernel, 0.0) + taken
        share = {key: sum(seconds.get(k, 0.0) for k in a.kernels) / sum(seconds.values()) for key, a in self.alternatives.items()}
        return sorted([k for k in share if share[k] >= LEAST_KERNELS_SHARE], key=lambda k: (k not in self.images, -share[k]))

    def new(self, chosen: frozenset[str]) -> _Tried | None:
        """The plan with some alternatives; None if it has been tried, or its kernels cannot be compiled."""
        if chosen in self.tried:
            return None
        try:
            return self.made(chosen)
        except SvodError as e:
            log.info("a plan with %s is not tried: %s", count(len(chosen), "alternative"), e)
            return None

    def made(self, chosen: frozenset[str]) -> _Tried:
        """The plan with some alternatives."""
        self.tried.add(chosen)
        unbound = self.plan_of(together(self.alternatives[key] for key in chosen))
        plan = built_for_timing(unbound, self.resolved.exact, self.memory.arrays_for(unbound))
        return _Tried(chosen, plan_digest(unbound, self.resolved.target.key), plan)

    def is_faster(self, found: _Tried, best: _Tried) -> bool:
        """Whether a plan is another one than the best one so far, and faster beyond noise."""
        if found.digest == best.digest:
            return False
        race = confirm([Contestant(best.plan.repeat, "best"), Contestant(found.plan.repeat, "found")], min_rounds=MIN_ROUNDS,
                       precision=TRIAL_PRECISION, budget_seconds=min(TRIAL_SECONDS, max(0.0, self.left)), rng=self.rng,
                       min_sample=PLAN_SAMPLE_SECONDS)
        return race.ratios[1].high < 1.0

    def times_of(self, first: _Tried, best: _Tried, untried: int) -> PlanTimes:
        """The record of a plan. Without a faster alternative the plan by the rules is timed alone, and the ratio is 1."""
        race = confirm([Contestant(first.plan.repeat, "rules"), *[Contestant(best.plan.repeat, "best")] * (best is not first)],
                       min_rounds=MIN_ROUNDS, precision=FINAL_PRECISION, budget_seconds=self.final_seconds, rng=self.rng,
                       min_sample=PLAN_SAMPLE_SECONDS)
        last, pair, target = len(race.ratios) - 1, self.resolved.compiler.pair, self.resolved.target
        ratio = race.ratios[last]
        described = f"plan of {count(len(self.by_rules.calls), 'call')}, which has {count(len(self.alternatives), 'alternative')}"
        chosen = tuple(f"{key} {self.alternatives[key].described}" for key in sorted(best.chosen))
        return PlanTimes(first.digest, target.key, described, chosen, untried, pair.revision, pair.key, protocol_of(target),
                         race.seconds(0), race.seconds(last), ratio.median, ratio.low, ratio.high, race.noisy is not None, time.time())


class _PlanMemory:
    """The host memory of the plans of one search, which share it, so that weights are at the same addresses in each."""

    def __init__(self, plan: UnboundPlan) -> None:
        self.arrays: dict[BufferSpec, list[np.ndarray[Any, Any] | None]] = {}
        for spec, array in zip(plan.buffers, synthetic_arrays(plan), strict=True):
            self.arrays.setdefault(spec, []).append(array)

    def arrays_for(self, plan: UnboundPlan) -> list[np.ndarray[Any, Any] | None]:
        """An array for each buffer of a plan; None for intermediate ones."""
        used: dict[BufferSpec, int] = {}
        arrays: list[np.ndarray[Any, Any] | None] = []
        for spec in plan.buffers:
            if spec.kind == "intermediate":
                arrays.append(None)
                continue
            known, n = self.arrays.setdefault(spec, []), used.get(spec, 0)
            if n == len(known):
                made = aligned_empty(spec.size, spec.dtype)
                made.view(np.uint8)[:] = 0
                known.append(made)
            arrays.append(known[n])
            used[spec] = n + 1
        return arrays
