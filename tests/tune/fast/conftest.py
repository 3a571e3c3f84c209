"""Told times, and chains that any CPU runs, for the tests of the policy "fast"."""
from __future__ import annotations

from collections.abc import Iterator

import pytest

from svod import config
from svod.compile.plan.compiler import Choice
from svod.core.kernel.algorithms.rounding import can_round
from svod.core.kernel.chain_text import parse_chain
from svod.tune.fast import at_prepare
from svod.tune.fast.at_prepare import FastPlan
from svod.tune.fast.selection import Effect
from svod.tune.fast.trial import RoundedPlans, Times
from tests.tune.fast.two_products import needs_instructions


@pytest.fixture(autouse=True)
def told_times(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Rounded kernels save time, whatever the machine does meanwhile; lines that are said once are said again."""
    monkeypatch.setattr(config, "_said", set())
    monkeypatch.setattr(RoundedPlans, "effects", lambda self: [Effect(k, 2.0, 1.0, self.error_of(frozenset((k,)))) for k in self._rounded])
    monkeypatch.setattr(RoundedPlans, "times", lambda self, kernels: Times(10.0, 10.0 - len(kernels)))
    yield


@pytest.fixture(params=[pytest.param("instructions", marks=needs_instructions), "any CPU"])
def candidates(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """The chains of kernels that may be rounded: those of the heuristic, which need instructions, or ROUND alone, which any CPU runs."""
    if request.param == "any CPU":
        rounding = Choice(parse_chain("ROUND(out, bfloat16)"), "fast", "")
        monkeypatch.setattr(at_prepare, "_may_be_rounded", lambda kernel, resolved: can_round(kernel, "out"))
        monkeypatch.setattr(FastPlan, "_candidates", lambda self: {k: rounding for k, v in self._kernels.items() if can_round(v, "out")})
