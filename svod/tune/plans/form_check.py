"""The times of a convolution's two forms inside a plan, which decide about its form from then on (`svod.tune.plans.pair_times`).

    the plan with each form → interleaved rounds of both → `FormTimes`

Whole plans are timed: the forms have different kernels, what is fused with a convolution depends on its form, and several short kernels
that are timed one by one take longer than in a run. Each kernel has its best known chain.
"""
from __future__ import annotations

import random
import time
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from svod.bench.race import confirm
from svod.bench.timer import Contestant, protocol_of, time_calls
from svod.compile.plan.compiler import compile_all
from svod.compile.plan.execution_plan import ExecutionPlan
from svod.compile.plan.unbound_plan import UnboundPlan, build_plan, synthetic_arrays
from svod.config import BenchConfig
from svod.tune.capture import plan_digest
from svod.tune.chains import choose_each
from svod.tune.db import FormTimes
from svod.tune.plans.check import MIN_ROUNDS, bytes_touched, check_values
from svod.tune.plans.forms import ConvolutionForm, Decided, decided_words
from svod.tune.plans.transformed import within_limit
from svod.tune.resolved import Resolved

MOST_OVER = 2.0         # most time of the least number of rounds over the time that was allowed
MOST_TIMED = 1 << 30    # Forms are not timed in a plan whose buffers have more bytes, as both plans have buffers of their own.


class BothForms(NamedTuple):
    """A plan with each form of a convolution."""

    form: ConvolutionForm
    direct: UnboundPlan
    transformed: UnboundPlan

    @classmethod
    def of(cls, form: ConvolutionForm, plan: UnboundPlan, other: UnboundPlan) -> BothForms:
        """`plan`: the plan with the form that the convolution has; `other`: that with its other form."""
        return cls(form, other, plan) if form.is_transformed else cls(form, plan, other)

    @property
    def can_be_timed(self) -> bool:
        """Whether both plans run on one device without calls of functions, within MOST_TIMED."""
        return all(not u.functions and not u.copies and bytes_touched(u) <= MOST_TIMED for u in self[1:])


class TimedForm(NamedTuple):
    """A convolution of the captured plan with the digest `plan`, and its predicted form. `decided`: the form that the next `prepare` gives
    it."""

    form: ConvolutionForm
    plan: str
    decided: Decided

    @property
    def times(self) -> FormTimes | None:
        """The record that decides about the form."""
        return self.decided.times

    @property
    def words(self) -> str:
        """The convolution, the form that the next `prepare` gives it, and the reason."""
        return decided_words(self.form, self.decided)

    def to_data(self) -> dict[str, Any]:
        """The form as plain data for JSON."""
        t = self.times
        return {"convolution": self.form.key, "described": self.form.described, "plan": self.plan, "lengths": list(self.form.lengths),
                "is_transformed": self.decided.form.is_transformed, "is_measured": t is not None,
                "is_predicted_transformed": self.form.is_transformed, "predicted": self.form.why,
                "times": None if t is None else {"direct_seconds": t.direct, "transformed_seconds": t.transformed, "ratio": t.ratio,
                                                 "ratio_low": t.ratio_low, "ratio_high": t.ratio_high, "noisy": t.noisy}}


def time_forms(both: BothForms, resolved: Resolved, seconds: float, bench: BenchConfig | None = None) -> FormTimes | None:
    """Time both forms, with the chains that `prepare` would choose now, over synthetic inputs; once these are compiled, within about
    `seconds`. Under the policy "fast" no kernel is rounded. Returns None if there is no time for enough rounds to know an interval. Raises
    CompileError, LaunchError."""
    bench, exact, target, pair = bench or BenchConfig(), resolved.exact, resolved.target, resolved.compiler.pair
    plans = [built_for_timing(unbound, exact, synthetic_arrays(unbound)) for unbound in (both.direct, both.transformed)]
    contestants = [Contestant(plan.repeat, name) for plan, name in zip(plans, ("direct", "transformed"), strict=True)]
    run = sum(time_calls(c, 1) for c in contestants)        # these runs also touch the intermediate buffers for the first time
    if run * MIN_ROUNDS > MOST_OVER * seconds:
        return None
    race = confirm(contestants, min_rounds=MIN_ROUNDS, precision=bench.precision, budget_seconds=seconds, rng=random.Random(0),
                   min_sample=bench.min_sample * 1e-6)
    ratio = race.ratios[1]
    return FormTimes(both.form.key, target.key, plan_digest(both.direct, target.key), both.form.described, both.form.lengths, pair.revision,
                     pair.key, protocol_of(target), race.seconds(0), race.seconds(1), ratio.median, ratio.low, ratio.high,
                     race.noisy is not None, time.time())


def built_for_timing(unbound: UnboundPlan, resolved: Resolved, arrays: Sequence[np.ndarray[Any, Any] | None]) -> ExecutionPlan:
    """A plan over synthetic arrays, each kernel with the chain that `prepare` would choose now. Raises CompileError, LaunchError."""
    choices = within_limit(unbound, choose_each(unbound.kernels, resolved), resolved)
    code = compile_all(unbound.kernels, choices, resolved.compiler)
    made = build_plan(unbound, code, arrays, threads=resolved.target.threads, device=resolved.target.device)
    made.set_variables(check_values(unbound))
    return made
