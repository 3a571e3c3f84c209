"""The times of a convolution's two forms inside a plan, which decide about its form from then on (`svod.tune.plans.forms`).

    the plan with each form → passes over both, in turns → seconds in the kernels that differ → `FormTimes`

The forms have different kernels, and kernels that are fused with a convolution belong to its form: what both plans have in common is left
out, so that a small convolution of a large model is timed as exactly as a large one. Each kernel has its best known chain.
"""
from __future__ import annotations

import random
import statistics
import time
from typing import Any, NamedTuple

from svod.bench.race import paired_ratio
from svod.bench.timer import protocol_of
from svod.compile.plan.compiler import compile_all
from svod.compile.plan.execution_plan import ExecutionPlan
from svod.compile.plan.unbound_plan import UnboundPlan, build_plan, synthetic_arrays
from svod.tune.capture import plan_digest
from svod.tune.chains import choose_each
from svod.tune.db import FormTimes
from svod.tune.plans.check import bytes_touched, check_values
from svod.tune.plans.forms import Form, form_words, times_words
from svod.tune.plans.inside import passes_inside
from svod.tune.plans.transformed import within_limit
from svod.tune.resolved import Resolved

MOST_TIMED = 1 << 30    # Forms are not timed in a plan whose buffers have more bytes, as both plans have buffers of their own.


class BothForms(NamedTuple):
    """A plan with each form of a convolution."""

    form: Form
    direct: UnboundPlan
    transformed: UnboundPlan

    @classmethod
    def of(cls, form: Form, plan: UnboundPlan, other: UnboundPlan) -> BothForms:
        """`plan`: the plan with the form that the convolution has; `other`: that with its other form."""
        return cls(form, other, plan) if form.is_transformed else cls(form, plan, other)

    @property
    def can_be_timed(self) -> bool:
        """Whether both plans run on one device without calls of functions, within MOST_TIMED."""
        return all(not u.functions and not u.copies and bytes_touched(u) <= MOST_TIMED for u in self[1:])


class TimedForm(NamedTuple):
    """A convolution of the plan with the digest `plan`. `times`: those of both forms; None: they were not timed."""

    form: Form
    plan: str
    times: FormTimes | None

    @property
    def words(self) -> str:
        """The convolution, the form that the next `prepare` gives it, and the reason."""
        if self.times is None:
            return self.form.words
        used = self.times.lengths if self.times.is_faster else None
        return f"{self.form.described}: {form_words(used)}, {times_words(self.times)}; before: {self.form.why}"

    def to_data(self) -> dict[str, Any]:
        """The form as plain data for JSON."""
        t = self.times
        return {"convolution": self.form.key, "described": self.form.described, "plan": self.plan, "lengths": list(self.form.lengths),
                "is_transformed": self.form.is_transformed if t is None else t.is_faster, "was_transformed": self.form.is_transformed,
                "why": self.form.why if t is None else times_words(t),
                "times": None if t is None else {"direct_seconds": t.direct, "transformed_seconds": t.transformed, "ratio": t.ratio,
                                                 "ratio_low": t.ratio_low, "ratio_high": t.ratio_high}}


def time_forms(both: BothForms, resolved: Resolved, seconds: float) -> FormTimes:
    """Time both forms, with the chains that `prepare` would choose now, over synthetic inputs; once these are compiled, within about
    `seconds`. Under the policy "fast" no kernel is rounded. Raises CompileError, LaunchError."""
    exact, target = resolved.exact, resolved.target
    direct, transformed = (_built(unbound, exact) for unbound in (both.direct, both.transformed))
    ends = time.monotonic() + seconds
    calls = both.direct.counts, both.transformed.counts
    differing = {k for k in calls[0] | calls[1] if calls[0].get(k) != calls[1].get(k)}
    passes = [tuple(sum(t for k, t in spent.items() if k in differing) for spent in pair)
              for pair in passes_inside((direct, transformed), (both.direct.calls, both.transformed.calls),
                                        lambda: ends - time.monotonic(), random.Random(0))]
    times = [[p[i] for p in passes] for i in (0, 1)]
    ratio, pair = paired_ratio(times[1], times[0]), resolved.compiler.pair
    return FormTimes(both.form.key, target.key, plan_digest(both.direct, target.key), both.form.described, both.form.lengths, pair.revision,
                     pair.key, protocol_of(target), statistics.median(times[0]), statistics.median(times[1]), ratio.median, ratio.low,
                     ratio.high, time.time())


def _built(unbound: UnboundPlan, resolved: Resolved) -> ExecutionPlan:
    choices = within_limit(unbound, choose_each(unbound.kernels, resolved), resolved)
    code = compile_all(unbound.kernels, choices, resolved.compiler)
    made = build_plan(unbound, code, synthetic_arrays(unbound), threads=resolved.target.threads, device=resolved.target.device)
    made.set_variables(check_values(unbound))
    return made
