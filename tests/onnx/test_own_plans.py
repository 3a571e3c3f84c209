"""Own plans of sets of sizes beside the plan of a model whose free dimensions are variables."""
from __future__ import annotations

import logging
import os
import threading
from typing import Any

import numpy as np
import pytest
from onnx import TensorProto, helper

import svod
import svod.onnx
import tests.own_plans
from svod import Tensor, Variable
from svod.compile.plan.running import background
from svod.onnx import model as model_module
from svod.onnx.model import Model
from svod.tune.first_forms import has_first_forms
from tests.onnx.test_model import info, model
from tests.own_plans import RUNS, decide
from tests.patience import NEVER

RNG = np.random.default_rng(0)
WEIGHT, BIAS = RNG.standard_normal((7, 5)).astype(np.float32), RNG.standard_normal(5).astype(np.float32)
LAYER = [helper.make_node("MatMul", ["x", "w"], ["p"]), helper.make_node("Add", ["p", "b"], ["s"]), helper.make_node("Relu", ["s"], ["y"]),
         helper.make_node("ReduceMean", ["y"], ["z"], axes=[1], keepdims=0)]

SIZES = [helper.make_node("Shape", ["x"], ["sizes"]), helper.make_node("Cast", ["sizes"], ["z"], to=TensorProto.FLOAT)]


@pytest.fixture
def by_hand(monkeypatch: pytest.MonkeyPatch) -> list[background.BackgroundWork]:
    return tests.own_plans.by_hand(monkeypatch)


def layer(nodes: Any = LAYER, outputs: Any = ("y", "z"), **options: Any) -> Model:
    proto = model(nodes, [info("x", ["n", "m", 7])], [info(name, None) for name in outputs], {"w": WEIGHT, "b": BIAS}, opset=13)
    return svod.onnx.load(proto, dims={"n": Variable("n", 1, 11), "m": Variable("m", 1, 40)}, **options)


def check(m: Model, *shape: int, flip: bool = False) -> None:
    x = RNG.standard_normal((*shape, 7)).astype(np.float32)
    x = x[::-1] if flip else x
    y = np.maximum(x.astype(np.float64) @ WEIGHT + BIAS, 0)
    got = m(x)
    assert [type(g) for g in got] == [np.ndarray] * 2
    np.testing.assert_allclose(got[0], y, rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(got[1], y.mean(1), rtol=1e-4, atol=1e-5)


def decided() -> Model:
    """A layer with a plan of its own for 2 × 3, about which its runs have decided."""
    m = layer()
    for _ in range(2):
        check(m, 2, 3)
    svod.complete()
    for _ in range(RUNS):
        check(m, 2, 3)
    return m


@pytest.mark.parametrize("kept", [True, False])
@pytest.mark.parametrize("shape", [(1, 1), (3, 13), (11, 40)])
def test_results_are_right_before_while_and_after_runs_take_turns(shape: tuple[int, int], kept: bool, monkeypatch: pytest.MonkeyPatch,
                                                                  by_hand: list[background.BackgroundWork],
                                                                  caplog: pytest.LogCaptureFixture) -> None:
    decide(monkeypatch, kept)
    caplog.set_level(logging.INFO, "svod.onnx")
    m = layer()
    for _ in range(2):
        check(m, *shape)
    assert len(by_hand) == 1 and len(m.plans) == 1
    svod.complete()
    common, one = m.plans
    assert common.variables and not one.variables
    for number in range(RUNS):
        check(m, *shape, flip=number % 3 == 1)
    assert m.plans == ((common, one) if kept else (common,)) and one.runs == RUNS // 2
    for sizes in (shape, (5, 3), shape, (2, 17)):
        check(m, *sizes)
    assert one.runs == RUNS // 2 + 2 * kept
    assert len([text for text in caplog.messages if "a plan of its own for" in text]) == 1


def test_tensors_run_in_the_plan_for_all_sizes(by_hand: list[background.BackgroundWork], monkeypatch: pytest.MonkeyPatch) -> None:
    decide(monkeypatch, True)
    m = decided()
    ran = m.plans[1].runs
    x = RNG.standard_normal((2, 3, 7)).astype(np.float32)
    y, _ = m(Tensor(x))
    np.testing.assert_allclose(y.numpy(), np.maximum(x @ WEIGHT + BIAS, 0), rtol=1e-4, atol=1e-5)
    assert m.plans[1].runs == ran


def test_models_with_random_numbers_keep_one_plan(by_hand: list[background.BackgroundWork]) -> None:
    m = layer([helper.make_node("RandomNormal", [], ["r"], shape=[7]), helper.make_node("Add", ["x", "r"], ["y"]),
               helper.make_node("ReduceMean", ["y"], ["z"], axes=[1], keepdims=0)])
    x, drawn = RNG.standard_normal((2, 3, 7)).astype(np.float32), set[float]()
    for _ in range(5):
        y, z = m(x)
        difference = y - x
        np.testing.assert_allclose(difference, np.broadcast_to(difference[0, 0], x.shape), rtol=1e-4, atol=1e-5)
        np.testing.assert_allclose(z, y.mean(1), rtol=1e-4, atol=1e-5)
        drawn.add(float(difference[0, 0, 0]))
        svod.complete()
    assert len(by_hand) == 1 and len(m.plans) == 1 and len(drawn) == 5
    given, fixed = m._split({"x": x})
    made = m._jit.capture_apart(given, fixed, (), None)
    assert made.draws and made._is_apart and not made.is_pure, "the random numbers are the reason"


def test_models_with_other_results_than_new_memory_keep_one_plan(by_hand: list[background.BackgroundWork]) -> None:
    """Results that are an argument or a constant."""
    m = layer([helper.make_node("Identity", ["x"], ["y"]), *SIZES])
    for shape in ((2, 3), (2, 3), (2, 3), (5, 1), (5, 1)):
        x = RNG.standard_normal((*shape, 7)).astype(np.float32)
        y, z = m(x)
        np.testing.assert_array_equal(y, x)
        assert z.tolist() == [*shape, 7]
        svod.complete()
    assert len(by_hand) == 1 and len(m.plans) == 1


def test_where_every_run_computes_the_same_bits_there_are_no_own_plans(monkeypatch: pytest.MonkeyPatch,
                                                                       by_hand: list[background.BackgroundWork]) -> None:
    asked: list[Any] = []
    monkeypatch.setattr(model_module, "has_first_forms", lambda config: asked.append(config) or has_first_forms(config))
    m = layer(config=svod.PrepareConfig(first_forms=False))
    for _ in range(5):
        check(m, 2, 3)
    assert not by_hand and m._own is None and len(asked) == 1


def test_threads_that_call_meanwhile_get_right_results(monkeypatch: pytest.MonkeyPatch, by_hand: list[background.BackgroundWork]) -> None:
    decide(monkeypatch, True)
    m, wrong = layer(), list[BaseException]()

    def serve(shape: tuple[int, int]) -> None:
        try:
            for _ in range(RUNS):
                check(m, *shape)
        except BaseException as e:
            wrong.append(e)
    threads = [threading.Thread(target=serve, args=(shape,)) for shape in ((2, 3), (2, 3), (4, 31))]
    for t in threads:
        t.start()
    for t in threads:
        svod.complete()
        t.join(NEVER)
    assert not wrong


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this platform does not fork")
def test_a_child_counts_runs_anew(monkeypatch: pytest.MonkeyPatch, by_hand: list[background.BackgroundWork]) -> None:
    """It has neither the parent's own plans nor its thread, and computes right."""
    decide(monkeypatch, True)
    m = decided()
    assert len(m.plans) == 2
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            check(m, 2, 3)
            assert len(m.plans) == 1
            code = 0
        finally:
            os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    check(m, 2, 3)
    assert len(m.plans) == 2


def test_inputs_in_any_order_run_in_the_plan_that_was_made_for_their_order(monkeypatch: pytest.MonkeyPatch,
                                                                           by_hand: list[background.BackgroundWork]) -> None:
    decide(monkeypatch, True)
    proto = model([helper.make_node("Sub", ["a", "b"], ["y"])], [info("a", ["n", 7]), info("b", ["n", 7])], [info("y", None)], {}, opset=13)
    m = svod.onnx.load(proto, dims={"n": Variable("n", 1, 11)})

    def check_both(run: Any) -> None:
        for names in ("ab", "ba"):
            feed = {name: RNG.standard_normal((5, 7)).astype(np.float32) for name in names}
            np.testing.assert_allclose(run(feed), feed["a"] - feed["b"], rtol=1e-5, atol=1e-6)
    for run in (lambda feed: m(**feed), lambda feed: m.run(feed)[0].numpy()):
        for _ in range(3):
            check_both(run)
        svod.complete()
        for _ in range(RUNS + 3):
            check_both(run)
    assert len(m.plans) > 1 and all(plan.runs for plan in m.plans[1:])


def test_preparations_leave_the_assignments_of_other_threads_alone(monkeypatch: pytest.MonkeyPatch,
                                                                   by_hand: list[background.BackgroundWork]) -> None:
    """A pending assignment is computed once, by the thread that asks for it."""
    total = Tensor(np.zeros(5, np.float32)).realize()
    m = layer()
    for _ in range(2):
        check(m, 2, 3)
    total.assign(total + 1)
    before = total.uop
    svod.complete()
    assert len(m.plans) == 2 and total.uop is before
    assert total.realize().numpy().tolist() == [1] * 5


def test_assignments_beside_the_background_thread_count_once(monkeypatch: pytest.MonkeyPatch) -> None:
    tests.own_plans.by_hand(monkeypatch)
    monkeypatch.setattr(background, "_background", background._Background())
    decide(monkeypatch, False)
    total, calls = Tensor(np.zeros(5, np.float32)).realize(), 0
    for _ in range(3):
        m = layer()
        for number in range(150):
            check(m, 1 + number % 4, 3)
            total.assign(total + 1)
            total.realize()
            calls += 1
    svod.complete()
    assert total.numpy().tolist() == [calls] * 5
