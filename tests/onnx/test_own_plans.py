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
from svod.onnx.model import Model
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
    m = layer()
    for _ in range(2):
        check(m, 2, 3)
    svod.complete()
    for _ in range(RUNS):
        check(m, 2, 3)
    ran = m.plans[1].runs
    x = RNG.standard_normal((2, 3, 7)).astype(np.float32)
    y, _ = m(Tensor(x))
    np.testing.assert_allclose(y.numpy(), np.maximum(x @ WEIGHT + BIAS, 0), rtol=1e-4, atol=1e-5)
    assert m.plans[1].runs == ran


@pytest.mark.parametrize("nodes", [
    [helper.make_node("Identity", ["x"], ["y"]), *SIZES],
    [helper.make_node("RandomNormal", [], ["r"], shape=[7]), helper.make_node("Sub", ["r", "r"], ["e"]),
     helper.make_node("Add", ["x", "e"], ["y"]), *SIZES]], ids=["returned", "random"])
def test_models_with_other_results_than_new_memory_keep_one_plan(nodes: Any, by_hand: list[background.BackgroundWork]) -> None:
    """Results that are an argument or a constant, and random numbers."""
    m = layer(nodes)
    for shape in ((2, 3), (2, 3), (2, 3), (5, 1), (5, 1)):
        x = RNG.standard_normal((*shape, 7)).astype(np.float32)
        y, z = m(x)
        np.testing.assert_array_equal(y, x)
        assert z.tolist() == [*shape, 7]
        svod.complete()
    assert len(by_hand) == 1 and len(m.plans) == 1


def test_where_every_run_computes_the_same_bits_there_are_no_own_plans(by_hand: list[background.BackgroundWork]) -> None:
    m = layer(config=svod.PrepareConfig(first_forms=False))
    for _ in range(5):
        check(m, 2, 3)
    assert not by_hand and m._own is None


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
    m = layer()
    for _ in range(2):
        check(m, 2, 3)
    svod.complete()
    for _ in range(RUNS):
        check(m, 2, 3)
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
