"""The check of the whole plan: the promised gain, the measured gain, and the kernels that make the difference."""
from __future__ import annotations

import random
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from svod.bench.load import watch_machine
from svod.bench.race import Confirmation, Ratio, paired_ratio
from svod.compile.cpu.host import host_target
from svod.compile.plan.compiler import Choice, Compiled, compile_all, compiler_for
from svod.compile.plan.unbound_plan import UnboundPlan
from svod.config import PrepareConfig
from svod.tune.plans import check as plan_check
from svod.tune.plans.check import Gain, InPlan, PlanCheck, bytes_touched, check_plan, differs, in_plan, promised_gain
from tests.plans import gemm_then_softmax, scaled

TARGET = host_target()


def compiled(unbound: UnboundPlan, *, tuned: bool) -> dict[str, Compiled]:
    compiler = compiler_for(TARGET, PrepareConfig(object_cache=":none:"))
    choices = {k: Choice(compiler.heuristic(v) if tuned else (), "x", "") for k, v in unbound.kernels.items()}
    return compile_all(unbound.kernels, choices, compiler)


def test_a_plan_is_timed_both_ways() -> None:
    unbound = gemm_then_softmax(64, 96, 64)
    gains = {k: Gain(2e-6, 1e-6) for k in unbound.kernels}
    found = check_plan(unbound, compiled(unbound, tuned=False), compiled(unbound, tuned=True), gains, TARGET, seconds=0.4,
                       rng=random.Random(1))
    assert found.promised == pytest.approx(2e-6) and found.predicted == pytest.approx(found.heuristic - 2e-6)
    assert found.changed == 2 and found.heuristic > 0 and found.measured > 0 and found.rounds >= 1
    assert found.gained == pytest.approx(found.heuristic * (1 - found.ratio.median))
    assert found.bytes_touched == 4 * (64 * 96 * 2 + 64 * 64 + 64 * 96) == bytes_touched(unbound)


def test_a_broken_promise_is_looked_into(monkeypatch: pytest.MonkeyPatch) -> None:
    """Both plans run the same code, so that the plan gains nothing, and every kernel gains less than was promised."""
    unbound = gemm_then_softmax(64, 96, 64)
    same = compiled(unbound, tuned=True)
    gains = {c.kernel: Gain(g, 1.0) for c, g in zip(unbound.calls, (3.0, 2.0), strict=True)}
    monkeypatch.setattr(plan_check, "time_inside", lambda *given: {c.kernel: [Gain(1e-3, 1e-3)] * 7 for c in unbound.calls})
    found = check_plan(unbound, same, same, gains, TARGET, seconds=1.0, rng=random.Random(1))
    assert found.changed == 0 and found.differs and found.fell_short
    assert [k.kernel for k in found.kernels] == [c.kernel for c in unbound.calls] and all(k.differs for k in found.kernels)
    first, second = found.explanation
    assert "gemm (block.linear)" in first and "instead of 2.00 s" in first and "softmax (block.softmax)" in second


def test_kernels_inside_a_plan() -> None:
    unbound = gemm_then_softmax(64, 96, 64)
    gemm = unbound.calls[0].kernel
    own = 4 * (64 * 96 + 64 * 64 + 64 * 96)
    small = replace(TARGET, l2=128 << 10, l3=0, threads=1)

    def inside(alone: Gain | None, *passes: Gain, touched: int = 1 << 20, target: Any = small) -> InPlan:
        return in_plan(unbound, gemm, alone, passes, touched, target)
    steady = [Gain(1.7e-3, 1.1e-3)] * 7
    cold = inside(Gain(1e-3, 1e-3), *steady)
    assert cold.differs and cold.promised == 0 and cold.measured == pytest.approx(6e-4) and cold.low == cold.high == pytest.approx(6e-4)
    assert "gains 600 µs a run though nothing was promised" in cold.reason
    assert "takes 1.70× its time alone, the tuned one 1.10×" in cold.reason
    assert f"operands ({own / 2**20:.1f} MB) stay in the second-level caches, in the plan 1.0 MB pass" in cold.reason
    assert "last-level cache" in inside(Gain(1e-3, 1e-3), *steady, target=replace(small, l2=own - 1, l3=own)).reason
    assert "it shares them with" in inside(Gain(1e-3, 1e-3), *steady, target=replace(small, l2=1, l3=1)).reason
    kept = inside(Gain(1.7e-3, 1.15e-3), *steady)
    assert not kept.differs and "MB" not in kept.reason, "within 15 %, and nothing is cold"
    assert not inside(Gain(1.7e-3, 1.6e-3), *steady[:5]).differs, "five passes have no interval"
    slower = inside(Gain(1.7e-3, 1.1e-3), *[Gain(1e-3, 1.2e-3)] * 6)
    assert slower.differs and "loses 200 µs a run instead of 600 µs" in slower.reason
    assert "its heuristic is another one" in inside(None, *steady).reason


def test_a_call_is_no_part_of_a_kernel_inside_a_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    unbound = gemm_then_softmax(64, 96, 64)
    gemm, softmax = (c.kernel for c in unbound.calls)

    class Timed:
        running = (0, 1)

        def __init__(self, *seconds: float) -> None:
            self.seconds = seconds

        def execute(self) -> None: ...

        def repeat_kernel(self, kernel: int, times: int) -> None: ...

        def profile(self, runs: int) -> list[float]:
            return [s + 0.5e-6 for s in self.seconds]
    asked: list[int] = []

    def empty_call(_: Any, repeats: int) -> float:
        asked.append(repeats)
        return 0.5e-6
    monkeypatch.setattr(plan_check, "time_calls", empty_call)
    base: Any = Timed(2e-6, 8e-6)
    best: Any = Timed(1e-6, 8e-6)
    found = plan_check.time_inside(base, best, unbound, lambda: 0.0, random.Random(0))
    assert set(asked) == {0}, "empty calls"
    assert all((g.heuristic, g.tuned) == pytest.approx((2e-6, 1e-6)) for g in found[gemm])
    assert all((g.heuristic, g.tuned) == pytest.approx((8e-6, 8e-6)) for g in found[softmax])


def test_kernels_shorter_than_a_call_can_tell_are_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """Kernels of some nanoseconds: their times inside the plan are those of the calls, and no gain or loss is told of them."""
    unbound = gemm_then_softmax(2, 3, 4)
    same = compiled(unbound, tuned=True)
    gains = {c.kernel: Gain(g, 3e-9) for c, g in zip(unbound.calls, (9e-3, 8e-3), strict=True)}
    softmax = unbound.calls[1].kernel
    empty = iter(range(10 ** 6))

    def plan(*seconds: float) -> Any:
        return SimpleNamespace(running=(0, 1), execute=lambda: None, repeat_kernel=lambda kernel, times: None,
                               profile=lambda runs: [s + 1.5e-6 for s in seconds])
    with monkeypatch.context() as patched:
        patched.setattr(plan_check, "time_calls", lambda contestant, repeats: 1e-6 * (1 + next(empty) % 2))
        inside = plan_check.time_inside(plan(9e-7, 5e-6), plan(8e-7, 9e-7), unbound, lambda: 0.0, random.Random(0))
    assert inside.keys() == {softmax}, "one of its times is beyond the spread of empty calls, 1 µs"
    monkeypatch.setattr(plan_check, "time_inside", lambda *given: {})
    found = check_plan(unbound, same, same, gains, TARGET, seconds=1.0, rng=random.Random(1))
    assert found.differs and found.kernels == found.losses == () and found.too_short == 2
    assert found.explanation == ("2 kernels are too short to be timed one by one",)


@pytest.mark.parametrize(("alone", "inside", "blamed"), [(2e-6, 2.5e-6, False), (2e-6, 3.5e-6, True), (1e-3, 1.05e-3, False),
                                                         (1e-3, 1.2e-3, True)])
def test_what_a_single_call_cannot_tell_is_not_blamed_on_caches(alone: float, inside: float, blamed: bool) -> None:
    unbound = gemm_then_softmax(64, 96, 64)
    found = in_plan(unbound, unbound.calls[0].kernel, Gain(alone, alone), [Gain(inside, alone)] * 7, 1 << 26, TARGET)
    fits = in_plan(unbound, unbound.calls[0].kernel, Gain(alone, alone), [Gain(inside, alone)] * 7, TARGET.l2, TARGET)
    assert "MB" not in fits.reason and ("the whole plan fits" in fits.reason) is blamed
    assert ("MB" in found.reason) is blamed and f"takes {inside / alone:.2f}× its time alone" in found.reason


def test_slow_plans_get_few_rounds_and_no_judgement(monkeypatch: pytest.MonkeyPatch) -> None:
    unbound = scaled(64, 3)
    code = compiled(unbound, tuned=True)
    monkeypatch.setattr(plan_check, "time_calls", lambda contestant, repeats: 1.0)      # seconds of one run of the plan

    def confirm(contestants: Any, *, min_rounds: int, **others: Any) -> Confirmation:
        rounds = ((1.0, 1.0),) * min_rounds
        load = watch_machine()()
        return Confirmation(rounds, (Ratio(1.0, 1.0, 1.0), paired_ratio([1.0] * min_rounds, [1.0] * min_rounds)), False, None, load)
    monkeypatch.setattr(plan_check, "confirm", confirm)
    gains = {k: Gain(1.0, 0.5) for k in unbound.kernels}
    found = check_plan(unbound, code, code, gains, TARGET, seconds=9.0)
    assert found.rounds == 2 and not found.differs and found.kernels == () and found.explanation == ()


def test_promises() -> None:
    unbound = scaled(100, 3)
    [key] = unbound.kernels
    assert promised_gain(unbound, {key: Gain(3e-6, 1e-6)}) == pytest.approx(6e-6) and promised_gain(unbound, {}) == 0


@pytest.mark.parametrize(("promised", "ratio", "expected"), [
    (0.5, Ratio(0.5, 0.49, 0.51), False), (0.5, Ratio(0.9, 0.88, 0.92), True), (0.5, Ratio(0.7, 0.56, 0.8), False),
    (0.2, Ratio(0.6, 0.58, 0.62), True), (0.2, Ratio(0.6, 0.5, 0.8), False), (0.0, Ratio(0.9, 0.89, 0.91), True),
    (0.01, Ratio(1.0, 0.999, 1.001), False), (0.5, Ratio(1.2, 0.0, float("inf")), False)])
def test_a_difference_is_beyond_noise_and_goes_both_ways(promised: float, ratio: Ratio, expected: bool) -> None:
    assert differs(1.0, ratio, promised) is expected


def test_explanations() -> None:
    check = PlanCheck(1.0, Ratio(0.9, 0.89, 0.91), 0.5, 15, None, 1, 2)

    def kernel(name: str, promised: float, measured: float, width: float = 0.01) -> InPlan:
        return InPlan(name, 1, Gain(promised, 0.0), Gain(measured, 0.0), measured - width, measured + width, f"{name} is to blame")
    assert check.fell_short and "no time left" in check.explanation[0]
    more, kept, less = kernel("more", 0.1, 0.2), kernel("kept", 0.25, 0.24), [kernel(n, 0.25, 0.02) for n in "abcd"]
    assert replace(check, kernels=(*less, more, kept)).explanation == ("a is to blame", "b is to blame", "c is to blame")
    above = replace(check, ratio=Ratio(0.2, 0.19, 0.21), kernels=(*less, more, kept))
    assert above.differs and not above.fell_short and above.explanation == ("more is to blame",)
    assert "too busy" in replace(check, kernels=(kernel("unclear", 0.25, 0.2, width=0.4),)).explanation[0]
    assert replace(check, kernels=(kept,)).explanation[0].endswith("or no kernel stands out")
    assert replace(check, kernels=(kept,), too_short=1).explanation[0].endswith("; 1 kernel is too short to be timed one by one")
    assert replace(check, promised=0.1).explanation == ()
