"""Random numbers differ in each run, are the same for the same seed, and have the distributions of the operators."""
from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
from onnx import TensorProto, helper

import svod.onnx
from svod import Tensor
from svod.errors import UnsupportedError
from tests.draws import a_quarter
from tests.onnx.test_model import info, model

N = helper.make_node
MANY = 20_000
# operator: (attributes, operand, expected mean and standard deviation)
DRAWS: dict[str, tuple[dict[str, Any], Any, float, float]] = {
    "RandomNormal": ({"shape": [MANY], "mean": 3.0, "scale": 2.0}, None, 3, 2),
    "RandomUniform": ({"shape": [MANY], "low": -1.0, "high": 5.0}, None, 2, 6 / 12 ** 0.5),
    "RandomNormalLike": ({"mean": -1.0}, np.zeros(MANY, np.float32), -1, 1),
    "RandomUniformLike": ({}, np.zeros(MANY, np.float64), 0.5, 1 / 12 ** 0.5),
    "Bernoulli": ({"dtype": TensorProto.FLOAT}, np.full(MANY, 0.3, np.float32), 0.3, 0.21 ** 0.5),
    "Multinomial": ({"sample_size": MANY}, np.log(np.array([[1, 2, 5]], np.float32)), 1.5, 0.5 ** 0.5)}


def drawing(op: str, known: bool = False, **more: Any) -> svod.onnx.Model:
    attributes, x, _, _ = DRAWS[op]
    kind = TensorProto.DOUBLE if x is not None and x.dtype == np.float64 else TensorProto.FLOAT
    made = TensorProto.INT32 if op == "Multinomial" else kind
    inputs = [] if known or x is None else [info("x", list(x.shape), kind)]
    return svod.onnx.load(model([N(op, ["x"] if x is not None else [], ["y"], **attributes, **more)], inputs, [info("y", None, made)],
                                {"x": x} if known and x is not None else None, 17))


def run(m: svod.onnx.Model, op: str) -> Any:
    return m(*([DRAWS[op][1]] if m.inputs else [])).reshape(-1)


@pytest.mark.parametrize(("op", "known"), a_quarter(itertools.product(DRAWS, (False, True))))
def test_each_run_draws_other_numbers(op: str, known: bool) -> None:
    Tensor.manual_seed(7)
    m = drawing(op, known)
    first, second = run(m, op), run(m, op)
    assert (first != second).any() and len(m.plans) == 1
    for y in (first, second):
        mean, deviation = DRAWS[op][2:]
        np.testing.assert_allclose([y.mean(), y.std()], [mean, deviation], atol=0.05)
    Tensor.manual_seed(7)
    np.testing.assert_array_equal(run(drawing(op, known), op), first)


@pytest.mark.slow
@pytest.mark.parametrize("op", DRAWS)
def test_a_seed_gives_the_same_numbers_in_every_session(op: str) -> None:
    a, b, other = drawing(op, seed=1.0), drawing(op, seed=1.0), drawing(op, seed=2.0)
    first = run(a, op)
    Tensor.manual_seed(3)
    np.testing.assert_array_equal(run(b, op), first)
    second = run(a, op)
    assert (second != first).any() and (run(other, op) != first).any()
    np.testing.assert_array_equal(run(b, op), second)
    np.testing.assert_allclose([first.mean(), first.std()], DRAWS[op][2:], atol=0.05)


def test_turns_of_a_loop_draw_other_numbers() -> None:
    body = helper.make_graph([N("Identity", ["c"], ["c2"]), N("RandomNormal", [], ["o"], shape=[5], seed=4.0)], "body",
                             [info("i", [], TensorProto.INT64), info("c", [], TensorProto.BOOL)], [info("c2", [], TensorProto.BOOL),
                                                                                                            info("o", [5])])
    m = svod.onnx.load(model([N("Loop", ["n", ""], ["o"], body=body)], [], [info("o", None)], {"n": np.array(3)}))
    y = m()
    assert len(np.unique(y)) == 15


def test_numbers_decide_about_no_shape() -> None:
    nodes = [N("RandomUniform", [], ["u"], shape=[1], high=4.0), N("Cast", ["u"], ["n"], to=TensorProto.INT64),
             N("Expand", ["x", "n"], ["y"])]
    m = svod.onnx.load(model(nodes, [info("x", [1])], [info("y", None)]))
    with pytest.raises(UnsupportedError, match="computed from data that is not known"):
        m(np.ones(1, np.float32))
