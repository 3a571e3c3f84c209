"""The gains that svod-tune expects of kernels in a plan."""
from __future__ import annotations

from dataclasses import replace

import pytest

from svod.cli.tune.plans.checks import gain_in
from svod.cli.tune.report import KernelReport
from svod.cli.tune.survey import SurveyRow
from svod.compile.plan.plan_parts import VariableSpec
from svod.tune.db.records import SizeTime
from svod.tune.plans.check import Gain, check_values
from tests.plans import gemm_then_softmax


def test_what_a_kernel_promises_is_the_mean_over_its_calls() -> None:
    unbound = gemm_then_softmax()
    n, m = VariableSpec("n", 1, 40), VariableSpec("m", 1, 24)
    key = unbound.calls[0].kernel
    calls = tuple(replace(unbound.calls[0], variables=v) for v in ((n,), (m,), (m,)))
    unbound = replace(unbound, calls=calls)
    assert check_values(unbound) == {"n": 20, "m": 12}
    sizes = (SizeTime({"v0": 20}, 4.0, 0.5), SizeTime({"v0": 12}, 1.0, 0.25), SizeTime({"v0": 1}, 9.0, 1.0))
    row = SurveyRow(unbound.kernels[key], "gemm", (), 3.0, 1.0, 1.0, "f", 1.0, 1.0)
    outcome = KernelReport(row, (), "database", 1.0, 1.0, True, True, None, "", "", sizes=sizes)
    gain = gain_in(unbound, outcome)
    assert gain == Gain(pytest.approx((8.0 + 4.0 + 4.0) / 3), pytest.approx((4.0 + 1.0 + 1.0) / 3))
    assert gain_in(unbound, replace(outcome, sizes=sizes[:1])) is None, "not timed at 12"
