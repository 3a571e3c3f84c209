"""The plans of single sets of sizes: when one is prepared, which of the two plans runs, and what is decided. No time is measured."""
from __future__ import annotations

import logging
import os
import threading
from collections import Counter
from collections.abc import Callable, Sequence

import numpy as np
import pytest

import svod
import tests.own_plans
from svod import Tensor
from svod.compile.plan.running import background
from svod.tracing import own_plans
from svod.tracing.own_plans import EVERY, MARGIN, MOST_OWN, MOST_SIZES, PAIRS, PAYS_BACK, TURN, WINS, OwnPlans, verdict
from tests.own_plans import RUNS, decide
from tests.patience import NEVER

log = logging.getLogger("svod.tests")


class OwnPlan:
    """A plan that only counts its completions."""

    def __init__(self) -> None:
        self.completions = 0

    def complete(self) -> None:
        self.completions += 1


@pytest.fixture
def by_hand(monkeypatch: pytest.MonkeyPatch) -> list[background.BackgroundWork]:
    return tests.own_plans.by_hand(monkeypatch)


def call(plans: OwnPlans[OwnPlan], size: int, make: Callable[[], OwnPlan | None] = OwnPlan) -> OwnPlan | None:
    """Run a call of one size; returns the plan that ran."""
    return plans.run({"n": size}, None, lambda one: one, lambda: make)


def new_plans() -> OwnPlans[OwnPlan]:
    return OwnPlans("model", log, 0.0)


@pytest.mark.parametrize(("ratios", "kept"), [
    ([0.999 - MARGIN] * PAIRS, True), ([0.5] * PAIRS, True), ([1 - MARGIN / 2] * PAIRS, False), ([1.0] * PAIRS, False),
    ([0.8] * WINS + [1.2] * (PAIRS - WINS), True), ([0.8] * (WINS - 1) + [1.2] * (PAIRS - WINS + 1), False), ([1.3] * PAIRS, False),
    ([], None), ([0.5], None), ([0.5] * (PAIRS - 1), None), ([1.2] * (PAIRS - WINS), None), ([1.2] * (PAIRS - WINS + 1), False)])
def test_an_own_plan_must_be_faster_by_a_margin_and_nearly_always(ratios: list[float], kept: bool | None) -> None:
    for common in (1e-6, 0.3):
        assert verdict([(common, common * r) for r in ratios]) == kept


@pytest.mark.parametrize("kept", [True, False])
def test_runs_take_turns_until_the_decision(kept: bool, by_hand: list[background.BackgroundWork], monkeypatch: pytest.MonkeyPatch,
                                            caplog: pytest.LogCaptureFixture) -> None:
    pairs = list[tuple[float, float]]()

    def judge(found: Sequence[tuple[float, float]]) -> bool | None:
        pairs[:] = found
        return kept if len(found) == PAIRS else None
    monkeypatch.setattr(own_plans, "verdict", judge)
    caplog.set_level(logging.INFO)
    plans = new_plans()
    assert call(plans, 3) is None and len(by_hand) == 1 and not plans.plans
    assert call(plans, 3) is None and len(by_hand) == 1, "the plan is prepared once"
    assert by_hand[0].step() and call(plans, 3) is None
    assert not by_hand[0].step()
    (own,) = plans.plans
    assert own.completions == 1
    ran = [call(plans, 3) for _ in range(RUNS)]
    assert ran[:-1] == ([None] * TURN + [own] * TURN) * PAIRS
    assert len(pairs) == PAIRS and all(seconds > 0 for pair in pairs for seconds in pair)
    assert plans.plans == [own] * kept and [call(plans, 3) for _ in range(5)] == [own if kept else None] * 5
    assert len(by_hand) == 1 and len(caplog.messages) == 1
    assert "model: a plan of its own for n 3 takes" in caplog.text and caplog.text.strip().endswith("kept" if kept else "dropped")


@pytest.mark.parametrize(("least", "prepare_seconds", "runs"), [(1e9, 0.0, 0), (0.0, 1e9, 0), (0.0, 0.0, 100 * EVERY + 1)])
def test_sizes_take_their_time_before_a_plan_is_prepared(least: float, prepare_seconds: float, runs: int, monkeypatch: pytest.MonkeyPatch,
                                                         by_hand: list[background.BackgroundWork]) -> None:
    for name, value in {"LEAST_RUN_SECONDS": least, "PAYS_BACK": PAYS_BACK, "LEAST_RUNS": runs}.items():
        monkeypatch.setattr(own_plans, name, value)
    plans = OwnPlans[OwnPlan]("model", log, prepare_seconds)
    assert {call(plans, n % 3) for n in range(300)} == {None} and not by_hand


@pytest.mark.parametrize("kept", [True, False])
def test_the_number_of_own_plans_is_bounded(kept: bool, by_hand: list[background.BackgroundWork], monkeypatch: pytest.MonkeyPatch) -> None:
    """A plan that is dropped leaves its place to another."""
    decide(monkeypatch, kept)
    plans = new_plans()
    for size in range(3 * MOST_OWN):
        call(plans, size)
        for work in by_hand[size:]:
            work.finish()
        assert len(plans.plans) <= MOST_OWN
        for _ in range(RUNS):
            call(plans, size)
    assert len(by_hand) == (MOST_OWN if kept else 3 * MOST_OWN)
    assert [call(plans, size) is not None for size in range(3 * MOST_OWN)] == [kept and size < MOST_OWN for size in range(3 * MOST_OWN)]


def test_the_number_of_sizes_that_are_known_is_bounded(by_hand: list[background.BackgroundWork], monkeypatch: pytest.MonkeyPatch) -> None:
    decide(monkeypatch, False)
    decided = new_plans()
    monkeypatch.setattr(own_plans, "LEAST_RUN_SECONDS", 1e9)
    counted = new_plans()
    for size in range(2 * MOST_SIZES + 1):
        call(counted, size)
        assert len(counted._candidates) <= MOST_SIZES
    for size in range(MOST_SIZES + 5):
        call(decided, size)
        while by_hand:
            by_hand.pop().finish()
        for _ in range(RUNS):
            call(decided, size)
    assert len(decided._candidates) == MOST_SIZES


def test_a_run_is_timed_in_every_so_many_until_there_are_own_plans(by_hand: list[background.BackgroundWork],
                                                                   monkeypatch: pytest.MonkeyPatch) -> None:
    decide(monkeypatch, False)
    plans = new_plans()
    assert sum(plans.is_due() for _ in range(5 * EVERY)) == 5
    call(plans, 1)
    by_hand[0].finish()
    assert all(plans.is_due() for _ in range(5 * EVERY))
    for _ in range(RUNS):
        call(plans, 1)
    assert sum(plans.is_due() for _ in range(5 * EVERY)) == 5


def fail() -> OwnPlan | None:
    raise MemoryError("no memory")


@pytest.mark.parametrize(("make", "message"), [(fail, "no plan of its own for n 0 (MemoryError: no memory)"), (lambda: None, "")])
def test_after_a_plan_that_cannot_be_made_none_is_prepared(make: Callable[[], OwnPlan | None], message: str,
                                                           caplog: pytest.LogCaptureFixture,
                                                           by_hand: list[background.BackgroundWork]) -> None:
    caplog.set_level(logging.INFO)
    plans = new_plans()
    for size in range(3):
        assert call(plans, size, make) is None
        for work in by_hand:
            work.finish()
    assert [call(plans, size) for size in range(3)] == [None] * 3
    assert len(by_hand) == 1 and message in caplog.text and len(caplog.messages) == bool(message)


def test_an_error_of_a_run_is_that_of_the_call(by_hand: list[background.BackgroundWork]) -> None:
    def run(one: OwnPlan | None) -> None:
        raise ValueError("of the run")
    plans = new_plans()
    call(plans, 1)
    by_hand[0].finish()
    for _ in range(RUNS + 1):
        with pytest.raises(ValueError, match="of the run"):
            plans.run({"n": 1}, None, run, lambda: OwnPlan)
    for _ in range(RUNS):
        call(plans, 1)
    assert not plans.plans, "without a time of its own it is dropped"


def test_complete_waits_for_a_preparation(by_hand: list[background.BackgroundWork]) -> None:
    plans = new_plans()
    call(plans, 1)
    svod.complete()
    assert [p.completions for p in plans.plans] == [1] and not by_hand[0].step()


def test_threads_that_call_at_once_make_one_plan_and_one_decision(monkeypatch: pytest.MonkeyPatch,
                                                                  caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr(own_plans, "LEAST_RUN_SECONDS", 0.0)
    decide(monkeypatch, True)
    caplog.set_level(logging.INFO)
    plans, made, ran, begin = new_plans(), list[OwnPlan](), Counter[OwnPlan | None](), threading.Barrier(4, timeout=NEVER)

    def make() -> OwnPlan:
        made.append(OwnPlan())
        return made[-1]

    def serve() -> None:
        begin.wait()
        for _ in range(RUNS):
            ran[call(plans, 7, make)] += 1
        begin.wait()
        svod.complete()
        for _ in range(RUNS):
            ran[call(plans, 7, make)] += 1
    threads = [threading.Thread(target=serve) for _ in range(4)]
    for t in threads:
        t.start()
    for t in threads:
        t.join(NEVER)
    assert len(made) == 1 and plans.plans == made and call(plans, 7) is made[0]
    assert len(caplog.messages) == 1 and ran.keys() == {None, made[0]}


def in_background(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let a background thread of the test's own work, where every run is enough for a preparation."""
    tests.own_plans.by_hand(monkeypatch)
    monkeypatch.setattr(background, "_background", background._Background())


class Waiting(OwnPlan):
    """A plan whose first completion waits until it is let go."""

    def __init__(self) -> None:
        super().__init__()
        self.begun, self.go_on = threading.Event(), threading.Event()

    def complete(self) -> None:
        self.begun.set()
        assert self.go_on.wait(NEVER)
        super().complete()


@pytest.mark.parametrize("callers", [1, 3])
def test_complete_waits_for_each_step_that_the_background_thread_takes(callers: int, monkeypatch: pytest.MonkeyPatch) -> None:
    in_background(monkeypatch)
    plans, own, making, go_on = new_plans(), Waiting(), threading.Event(), threading.Event()

    def make() -> OwnPlan:
        making.set()
        assert go_on.wait(NEVER)
        return own
    seen = list[list[OwnPlan]]()

    def complete() -> None:
        svod.complete()
        seen.append(plans.plans)
    call(plans, 1, make)
    threads = list[threading.Thread]()
    for begun, release in ((making, go_on), (own.begun, own.go_on)):
        assert begun.wait(NEVER)
        threads += [threading.Thread(target=complete, daemon=True) for _ in range(callers)]
        for t in threads[-callers:]:
            t.start()
            t.join(0.02)
        assert not seen, "the step in progress is waited for"
        release.set()
    for t in threads:
        t.join(NEVER)
    assert seen == [[own]] * 2 * callers and own.completions == 1


class Interrupted(OwnPlan):
    """A plan whose first completion is interrupted."""

    def complete(self) -> None:
        super().complete()
        if self.completions == 1:
            raise KeyboardInterrupt


def test_an_interrupted_step_is_taken_again(by_hand: list[background.BackgroundWork]) -> None:
    plans, own, calls = new_plans(), Interrupted(), list[int]()

    def make() -> OwnPlan:
        calls.append(1)
        if len(calls) == 1:
            raise KeyboardInterrupt
        return own
    call(plans, 1, make)
    for _ in range(2):
        with pytest.raises(KeyboardInterrupt):
            svod.complete()
        assert not plans.plans
    svod.complete()
    assert plans.plans == [own] and len(calls) == 2 and own.completions == 2


@pytest.mark.parametrize("steps", [0, 1])
@pytest.mark.skipif(not hasattr(os, "fork"), reason="this platform does not fork")
def test_a_child_drops_the_preparation_of_its_parent(steps: int, by_hand: list[background.BackgroundWork]) -> None:
    plans, made = new_plans(), list[OwnPlan]()

    def make() -> OwnPlan:
        made.append(OwnPlan())
        return made[-1]
    call(plans, 1, make)
    for _ in range(steps):
        assert by_hand[0].step()
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            svod.complete()
            code = plans.plans != [] or len(made) != steps or sum(p.completions for p in made)
        finally:
            os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    svod.complete()
    assert plans.plans == made and len(made) == 1


def test_complete_finds_whole_pieces_only(monkeypatch: pytest.MonkeyPatch) -> None:
    """Another thread may complete before and after any statement that makes a piece."""
    tests.own_plans.by_hand(monkeypatch)
    plans = new_plans()
    inner = own_plans._Preparation.__init__

    def init(self: own_plans._Preparation[OwnPlan], *args: object) -> None:
        svod.complete()
        inner(self, *args)     # type: ignore[arg-type]
        svod.complete()
        assert not plans.plans, "not published before it is whole"
    monkeypatch.setattr(own_plans._Preparation, "__init__", init)
    call(plans, 1)
    svod.complete()
    assert [p.completions for p in plans.plans] == [1]


class Slow:
    """A function whose assignment stays pending until it is let go."""

    def __init__(self) -> None:
        self.state, self.begun, self.go_on = Tensor(np.zeros(3, np.float32)).realize(), threading.Event(), threading.Event()

    def __call__(self, x: Tensor) -> Tensor:
        self.state.assign(self.state + x)
        self.begun.set()
        self.go_on.wait(NEVER)
        return x * 2


@pytest.mark.parametrize("apart", [True, False])
def test_a_capture_leaves_the_assignments_of_another_one_alone(apart: bool) -> None:
    """State of a function that one thread captures, while another thread captures another function."""
    slow, other = Slow(), svod.jit(lambda x: x + 1)
    f = svod.jit(slow)
    x, wrong = np.ones(3, np.float32), list[BaseException]()

    def beside() -> None:
        slow.begun.wait(NEVER)
        try:
            (other.capture_apart if apart else other)(np.ones(4, np.float32))
        except BaseException as e:
            wrong.append(e)
        slow.go_on.set()
    thread = threading.Thread(target=beside, daemon=True)
    thread.start()
    for calls in (1, 2, 3):
        np.testing.assert_array_equal(f(x).numpy(), 2 * x)
        thread.join(NEVER)
        np.testing.assert_array_equal(slow.state.numpy(), calls * x)
    assert not wrong


def test_there_is_no_plan_apart_of_a_function_that_assigns() -> None:
    pending, written = (Tensor(np.zeros(3, np.float32)).realize() for _ in range(2))
    pending.assign(pending + 1)

    def write(x: Tensor) -> Tensor:
        written.assign(written + x)
        return x * 2
    for f in (write, lambda x: x + pending):
        with pytest.raises(svod.SvodError, match="assign"):
            svod.jit(f).capture_apart(np.ones(3, np.float32))
    assert pending.numpy().tolist() == [1] * 3 and written.numpy().tolist() == [0] * 3
