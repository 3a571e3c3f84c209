"""Goals against made-up runs."""
from __future__ import annotations

import importlib
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from svod.bench.results import ContestantResult, Run, Speedup
from svod.bench.suites.suites import select_cases
from tests.bench.example_run import example_run

CHAINS = Path(__file__).resolve().parents[2] / "experiments" / "chains"


@pytest.fixture
def goals(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(CHAINS)
    return importlib.import_module("goals")


def test_what_a_ratio_meets(goals: Any) -> None:
    """A ratio meets a goal if its interval reaches the goal, and its median is within 3 % of it."""
    assert goals.credited(Speedup(0.98, 0.95, 1.01)) == pytest.approx(1.01)
    assert goals.credited(Speedup(0.96, 0.90, 1.20)) == pytest.approx(0.96 / 0.97)
    assert goals.credited(Speedup(1.2, None, None)) == 1.2
    assert goals.credited_share(ContestantResult("tuned", "ok")) is None
    assert goals.credited_share(ContestantResult("tuned", "ok", ceiling_share=0.84, spread=0.02)) == pytest.approx(0.857, abs=1e-3)


@pytest.mark.parametrize(("peer", "ceiling", "both", "either"), [
    (1.0, 0.9, True, True), (1.0, 0.8, False, True), (0.9, 0.9, False, True), (0.9, 0.8, False, False),
    (1.0, None, None, True), (0.9, None, False, None), (None, 0.9, None, True), (None, 0.8, False, None), (None, None, None, None),
])
def test_what_is_not_known_is_neither_met_nor_missed(peer: float | None, ceiling: float | None, both: bool | None, either: bool | None,
                                                     goals: Any) -> None:
    assert goals.Goal(0.95, 0.85).is_met(peer, ceiling) is both
    assert goals.Goal(0.95, 0.85, either=True).is_met(peer, ceiling) is either
    assert goals.Goal(0.95).is_met(peer, ceiling) is (None if peer is None else peer >= 0.95) and goals.Goal().is_met(peer, ceiling) is None


def test_goals_are_of_kernels_that_exist(goals: Any) -> None:
    assert set(goals.GOALS) <= {c.name for c in select_cases("core")}
    assert set(goals.MODELS) <= {c.name for c in select_cases("models")}


def verdicts(goals: Any, *runs: Run) -> dict[str, bool | None]:
    return {j.what: j.met for j in goals.judge(runs)}


def test_a_run_is_judged(goals: Any) -> None:
    run = example_run()
    found = verdicts(goals, run)
    assert found["GEMM 1024"] is found["GEMM 256"] is True and found["GEMM 1000, rate of its neighbour"] is True
    assert found["search of a kernel of core, median"] is found["search of a kernel of core, longest"] is True
    assert found["core, geometric mean over the best peer"] is True and found["random, of core's mean"] is None
    assert "GEMM 1024 bfloat16" not in found
    slow = verdicts(goals, example_run({"gemm_1024": 1.3, "gemm_1000": 1.3}))
    assert slow["GEMM 1024"] is slow["GEMM 1000, rate of its neighbour"] is False


def test_the_random_suite_is_held_to_the_mean_of_core(goals: Any) -> None:
    """All kernels of core again as random ones: their mean is 1 of core's; much slower ones are not 0.9 of it."""
    run = example_run()
    for slower, met in ((1.0, True), (1.5, False)):
        again = example_run({c.name: slower for c in run.cases})
        drawn = tuple(replace(c, suite="random", name=f"random_{c.name}") for c in again.cases if c.suite == "core")
        other = replace(again, cases=drawn, settings=replace(again.settings, started="2026-03-01T00:00:00Z"))
        assert verdicts(goals, run, other)["random, of core's mean"] is met


def test_the_table_has_a_line_for_each_goal(goals: Any) -> None:
    found = list(goals.judge([example_run()]))
    lines = goals.table(found).splitlines()
    assert len(lines) == len(found) + 2 and {line.count("|") for line in lines} == {5}
