"""Runs of a plan in which some kernels are rounded, over its own inputs and constants, to measure errors and times.

The replicas of the plan have memory of their own for everything that they write. The error of an output is its largest difference from the
float32 plan's, over the largest value of that output; the error of a plan is the largest one of its outputs. Outputs of other types, such
as the positions of the largest values, have to be equal: else the error is infinite."""
from __future__ import annotations

import math
import random
import statistics
import time
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np

from svod.bench.race import confirm
from svod.bench.timer import Contestant, time_calls
from svod.compile.plan.compiler import Compiled
from svod.compile.plan.execution_plan import ExecutionPlan
from svod.compile.plan.running.exchange import with_code
from svod.compile.plan.unbound_plan import UnboundPlan
from svod.core.ir.dtype import DType, dtypes
from svod.tune.fast.selection import Effect
from svod.tune.plans.inside import passes_inside

Array = np.ndarray[Any, Any]

INSIDE_SECONDS = 3.0        # seconds after which no pass over the kernels of both plans begins
WHOLE_SECONDS = 2.0         # most seconds for timing the whole plans
WHOLE_ROUNDS = 7            # least interleaved rounds of the whole plans


class Times(NamedTuple):
    """Seconds of a run of the plan, in float32 and with the chosen kernels rounded."""

    before: float
    after: float


class RoundedPlans:
    """Replicas of a plan: one as it is, one in which kernels are exchanged. `exact`, `rounded`: the code of kernels, by key."""

    def __init__(self, plan: ExecutionPlan, unbound: UnboundPlan, exact: Mapping[str, Compiled], rounded: Mapping[str, Compiled]) -> None:
        self._unbound, self._exact, self._rounded = unbound, exact, rounded
        self._float32, self._tried = plan.replicate(), plan.replicate()
        self._float32.execute()
        self._wanted = [self._values(self._float32, i).copy() for i in range(len(unbound.outputs))]
        self._now: frozenset[str] = frozenset()

    @property
    def has_floats(self) -> bool:
        """Whether there are float outputs to compare."""
        return any(self._unbound.buffers[number].dtype.is_float for number in self._unbound.outputs)

    def error_of(self, kernels: frozenset[str]) -> float:
        """The error of the plan in which these kernels are rounded."""
        self._use(kernels)
        self._tried.execute()
        return max([relative_error(self._values(self._tried, i), wanted) for i, wanted in enumerate(self._wanted)], default=0.0)

    def effects(self) -> list[Effect]:
        """The effect of each kernel alone. Times are those inside both plans."""
        self._use(frozenset(self._rounded))
        ends = time.monotonic() + INSIDE_SECONDS
        passes = list(passes_inside((self._float32, self._tried), self._unbound, lambda: ends - time.monotonic(), random.Random(0)))
        times = {key: [statistics.median(spent[i].get(key, 0.0) for spent in passes) for i in (0, 1)] for key in self._rounded}
        return [Effect(key, before, after, self.error_of(frozenset((key,)))) for key, (before, after) in times.items()]

    def times(self, kernels: frozenset[str]) -> Times:
        """Time the plan as it is against the one in which these kernels are rounded, in interleaved rounds."""
        self._use(kernels)
        contestants = [Contestant(self._float32.repeat, "float32"), Contestant(self._tried.repeat, "fast")]
        race = confirm(contestants, min_rounds=WHOLE_ROUNDS, budget_seconds=WHOLE_SECONDS, rng=random.Random(0))
        before = race.seconds(0)
        return Times(before, before * race.ratios[1].median)

    def times_in_float32(self) -> Times:
        """The median time of a few runs of the plan as it is, for a plan in which nothing is rounded."""
        seconds = statistics.median(time_calls(Contestant(self._float32.repeat, "float32"), 1) for _ in range(WHOLE_ROUNDS))
        return Times(seconds, seconds)

    def code_of(self, kernels: frozenset[str]) -> dict[str, Compiled]:
        """The code of all kernels of the plan in which these are rounded."""
        return {**self._exact, **{key: self._rounded[key] for key in kernels}}

    def _use(self, kernels: frozenset[str]) -> None:
        if kernels != self._now:
            exchange(self._tried, self.code_of(kernels))
            self._now = kernels

    def _values(self, plan: ExecutionPlan, output: int) -> Array:
        return as_floats(plan.output_buffer(output), self._unbound.buffers[self._unbound.outputs[output]].dtype)


def exchange(plan: ExecutionPlan, code: Mapping[str, Compiled]) -> bool:
    """Let all further runs of a plan use this code, by kernel key. Returns False inside a run of the plan, without a change."""
    return plan.exchange([with_code(k, code[k.key]) if k.key in code else k for k in plan.every])()


def as_floats(values: Array, dtype: DType) -> Array:
    """Values of a float type as numbers of NumPy, which has no bfloat16."""
    return (values.view(np.uint16).astype(np.uint32) << 16).view(np.float32) if dtype == dtypes.bfloat16 else values


def relative_error(got: Array, wanted: Array) -> float:
    """The largest difference over the largest value that is wanted; infinite if there is a difference where the wanted value is not
    finite, if a value is not finite where it should be, or if any differ that are no floats."""
    if not wanted.size:
        return 0.0
    if wanted.dtype.kind != "f":
        return 0.0 if np.array_equal(got, wanted) else math.inf
    finite = np.isfinite(wanted)
    if not np.array_equal(got[~finite], wanted[~finite], equal_nan=True) or not np.isfinite(got[finite]).all():
        return math.inf
    known = wanted[finite].astype(np.float64)
    difference = float(np.abs(got[finite].astype(np.float64) - known).max(initial=0.0))
    return difference / largest if (largest := float(np.abs(known).max(initial=0.0))) else (math.inf if difference else 0.0)
