"""Branches whose conditions are computed from data: both branches and a selection, or a plan for each branch."""
from __future__ import annotations

from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper

import svod.onnx
from svod.errors import UnsupportedError
from svod.onnx import OnnxError
from tests.onnx.test_model import info, model

ONE = {"one": np.array([1]), "two": np.array([2]), "zero": np.array(0, np.float32)}


def is_positive(x: str, name: str) -> list[onnx.NodeProto]:
    """Whether the sum of x is above 0."""
    return [helper.make_node("ReduceSum", [x], [f"{name}_sum"], keepdims=0), helper.make_node("Greater", [f"{name}_sum", "zero"], [name])]


def graph(name: str, nodes: list[onnx.NodeProto], output: str) -> onnx.GraphProto:
    return helper.make_graph(nodes, name, [], [info(output, None)])


def slices(output: str, first: str, last: str) -> onnx.NodeProto:
    return helper.make_node("Slice", ["x", first, last], [output])


def of_unequal_shapes() -> onnx.ModelProto:
    branch = helper.make_node("If", ["c"], ["y"], "/choice", then_branch=graph("yes", [helper.make_node("Neg", ["x"], ["a"])], "a"),
                              else_branch=graph("no", [slices("b", "one", "two")], "b"))
    nodes = [*is_positive("x", "c"), branch, helper.make_node("Shape", ["y"], ["s"]), helper.make_node("Mul", ["y", "y"], ["z"])]
    return model(nodes, [info("x", ["n"])], [info("z", None), info("s", None, TensorProto.INT64)], ONE)


def test_branches_of_unequal_shapes_have_a_plan_each() -> None:
    m = svod.onnx.load(of_unequal_shapes())
    for x in ([1, 2, 3], [-1, 2, -3], [4, 1, 2], [0, -2, 1]):
        a = np.array(x, np.float32)
        wanted = -a if a.sum() > 0 else a[1:2]
        z, s = m(a)
        assert z.tolist() == (wanted * wanted).tolist() and s.tolist() == [len(wanted)]
    assert len(m.plans) == 3, "the condition, and each of the ways that were taken"


def test_branches_in_branches_are_chosen_when_they_are_reached() -> None:
    inner = helper.make_node("If", ["d"], ["i"], then_branch=graph("iyes", [slices("p", "one", "two")], "p"),
                             else_branch=graph("ino", [helper.make_node("Abs", ["x"], ["q"])], "q"))
    outer = helper.make_node("If", ["c"], ["y"], then_branch=graph("yes", [*is_positive("w", "d"), inner], "i"),
                             else_branch=graph("no", [helper.make_node("Concat", ["x", "x"], ["r"], axis=0)], "r"))
    equal = helper.make_node("If", ["c"], ["e"], then_branch=graph("eyes", [helper.make_node("Neg", ["x"], ["ea"])], "ea"),
                             else_branch=graph("eno", [helper.make_node("Exp", ["x"], ["eb"])], "eb"))
    m = svod.onnx.load(model([*is_positive("x", "c"), equal, outer], [info("x", [3]), info("w", [2])], [info("y", None), info("e", None)],
                             ONE))
    rng = np.random.default_rng(0)
    taken = set()
    for _ in range(12):
        x, w = rng.standard_normal(3).astype(np.float32), rng.standard_normal(2).astype(np.float32)
        y, e = m(x, w)
        taken.add((x.sum() > 0, w.sum() > 0))
        np.testing.assert_allclose(y, np.concatenate([x, x]) if x.sum() <= 0 else x[1:2] if w.sum() > 0 else np.abs(x), rtol=1e-6)
        np.testing.assert_allclose(e, -x if x.sum() > 0 else np.exp(x), rtol=1e-5)
    assert len(taken) == 4
    assert len(m.plans) == 5, "two conditions, three ways"


def test_a_condition_has_one_element() -> None:
    m = of_unequal_shapes()
    m.graph.node[2].input[0] = "many"
    m.graph.node.insert(2, helper.make_node("Greater", ["x", "zero"], ["many"]))
    with pytest.raises(OnnxError, match="the condition of an If has 3 elements"):
        svod.onnx.load(m)(np.ones(3, np.float32))


def test_what_a_branch_lacks_matters_only_where_it_is_taken() -> None:
    """One branch has a NonZero, which svod lacks; the other branch runs."""
    def lacking(a: np.ndarray[Any, Any], **options: Any) -> Any:
        branch = helper.make_node("If", ["c"], ["y"], "/choice", else_branch=graph("yes", [helper.make_node("Neg", ["x"], ["a"])], "a"),
                                  then_branch=graph("no", [helper.make_node("NonZero", ["x"], ["b"])], "b"))
        return svod.onnx.load(model([*is_positive("x", "c"), branch], [info("x", ["n"])], [info("y", None)], ONE, 17), **options)(a)

    assert lacking(np.array([-1, -2], np.float32)).tolist() == [1, 2]
    with pytest.raises(UnsupportedError, match="NonZero"):
        lacking(np.array([1, 2], np.float32))
    assert lacking(np.array([0, 2], np.float32), fallback="reference").tolist() == [[1]]
