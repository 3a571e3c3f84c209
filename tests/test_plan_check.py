"""The check of the whole plan: what was promised, what arrived, and who is to blame for the difference."""
from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import pytest

from svod import plan_check
from svod.bench.load import watch_machine
from svod.bench.race import Confirmation, Ratio, paired_ratio
from svod.compile.host import host_target
from svod.config import BenchConfig, PrepareConfig
from svod.optimize import Choice, Compiled, compile_all, compiler_for
from svod.outline import Outline
from svod.plan_check import Gain, PlanCheck, Swap, bytes_touched, check_plan, falls_short, promised_gain, promising_groups
from tests.plans import gemm_then_softmax, scaled

TARGET = host_target()


def compiled(outline: Outline, *, tuned: bool) -> dict[str, Compiled]:
    compiler = compiler_for(TARGET, PrepareConfig(object_cache=":none:"))
    choices = {k: Choice(compiler.heuristic(v) if tuned else (), "x", "") for k, v in outline.kernels.items()}
    return compile_all(outline.kernels, choices, compiler)


def test_a_plan_is_timed_both_ways() -> None:
    outline = gemm_then_softmax(64, 96, 64)
    gains = {k: Gain(2e-6, 1e-6) for k in outline.kernels}
    found = check_plan(outline, compiled(outline, tuned=False), compiled(outline, tuned=True), gains, TARGET, seconds=0.4,
                       rng=random.Random(1))
    assert found.promised == pytest.approx(2e-6) and found.predicted == pytest.approx(found.heuristic - 2e-6)
    assert found.changed == 2 and found.heuristic > 0 and found.tuned > 0 and found.rounds >= 7
    assert found.gained == pytest.approx(found.heuristic * (1 - found.ratio.median))
    assert found.bytes_touched == 4 * (64 * 96 * 2 + 64 * 64 + 64 * 96) == bytes_touched(outline)


def test_a_broken_promise_is_looked_into() -> None:
    """Both plans run the same code, so nothing that was promised arrives, and every group is short of its promise."""
    outline = gemm_then_softmax(64, 96, 64)
    same = compiled(outline, tuned=True)
    gains = {k: Gain(2e-3, 1e-3) for k in outline.kernels}
    found = check_plan(outline, same, same, gains, TARGET, seconds=2.0, bench=BenchConfig(precision=0.05), rng=random.Random(1))
    assert found.changed == 0 and found.fell_short and len(found.swaps) == 2 and all(s.short for s in found.swaps)
    assert "inside the plan" in found.explanation and "block." in found.explanation
    small = replace(TARGET, l2=128 << 10, l3=0, threads=1)
    swap = found.swaps[0]
    assert "second-level cache" in plan_check._reason(outline, swap, 1 << 20, replace(small, l3=32 << 20))
    assert "last-level cache" in plan_check._reason(outline, swap, 1 << 20, small)
    assert "fit the caches" in plan_check._reason(outline, swap, 1, small)


def test_slow_plans_get_few_rounds_and_no_judgement(monkeypatch: pytest.MonkeyPatch) -> None:
    outline = scaled(64, 3)
    code = compiled(outline, tuned=True)
    monkeypatch.setattr(plan_check, "time_calls", lambda contestant, repeats: 1.0)      # seconds of one run of the plan

    def confirm(contestants: Any, *, min_rounds: int, **others: Any) -> Confirmation:
        rounds = ((1.0, 1.0),) * min_rounds
        load = watch_machine()()
        return Confirmation(rounds, (Ratio(1.0, 1.0, 1.0), paired_ratio([1.0] * min_rounds, [1.0] * min_rounds)), False, None, load)
    monkeypatch.setattr(plan_check, "confirm", confirm)
    gains = {k: Gain(1.0, 0.5) for k in outline.kernels}
    found = check_plan(outline, code, code, gains, TARGET, seconds=9.0)
    assert found.rounds == 2 and not found.fell_short and found.swaps == () and found.explanation == ""


def test_promises() -> None:
    outline = scaled(100, 3)
    [key] = outline.kernels
    assert promised_gain(outline, {key: Gain(3e-6, 1e-6)}) == pytest.approx(6e-6) and promised_gain(outline, {}) == 0
    both = gemm_then_softmax()
    gemm, softmax = (c.kernel for c in both.calls)
    assert promising_groups(both, {gemm: Gain(2e-6, 1e-6), softmax: Gain(9e-6, 1e-6)}) == [(softmax,), (gemm,)]
    assert promising_groups(both, {gemm: Gain(2e-6, 1e-6), softmax: Gain(1e-6, 1e-6)}) == [(gemm,)]


@pytest.mark.parametrize(("promised", "ratio", "short"), [
    (0.5, Ratio(0.5, 0.49, 0.51), False), (0.5, Ratio(0.9, 0.88, 0.92), True), (0.5, Ratio(0.7, 0.58, 0.8), False),
    (0.01, Ratio(1.0, 0.999, 1.001), False), (0.5, Ratio(1.2, 0.0, float("inf")), False)])
def test_falling_short_is_beyond_noise(promised: float, ratio: Ratio, short: bool) -> None:
    assert falls_short(1.0, ratio, promised) is short


def test_explanations() -> None:
    check = PlanCheck(1.0, 0.9, Ratio(0.9, 0.89, 0.91), 0.5, 15, None, 1, 2)
    assert "no time left" in check.explanation
    kept = Swap(("a",), 0.25, 0.24, 0.23, 0.25)
    assert "together they do not" in replace(check, swaps=(kept, kept)).explanation
    broken = Swap(("b",), 0.25, 0.02, 0.01, 0.03, "b gains nothing")
    assert replace(check, swaps=(broken, kept)).explanation == "b gains nothing"
    unclear = Swap(("c",), 0.25, 0.1, -0.2, 0.4)
    assert "too busy" in replace(check, swaps=(unclear,)).explanation
    weak = Swap(("d",), 0.25, 0.19, 0.17, 0.21)
    assert "none stands out" in replace(check, swaps=(weak, weak)).explanation
