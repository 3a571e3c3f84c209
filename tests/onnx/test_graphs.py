"""Unusual graphs of files: skipped nodes, nodes in any order, optional inputs, loops without an iteration, loops that data end."""
from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from click.testing import CliRunner
from onnx import TensorProto, helper, numpy_helper

import svod.onnx
from svod.errors import UnsupportedError
from svod.onnx import OnnxError
from svod.onnx.run import cli
from tests.onnx.test_model import info, model

N = helper.make_node
X = np.array([[1, -2, 3], [-4, 5, 6]], np.float32)
INT, BOOL, TEXT = TensorProto.INT64, TensorProto.BOOL, TensorProto.STRING


def with_what_svod_lacks() -> onnx.ModelProto:
    """A graph with a value in the middle that unsupported nodes read, next to a node that reads text and a branch with an unsupported
    node."""
    lacking = helper.make_graph([N("Unique", ["h"], ["u"])], "yes", [], [info("u", None)])
    other = helper.make_graph([N("Neg", ["h"], ["v"])], "no", [], [info("v", None)])
    nodes = [N("Relu", ["x"], ["h"]), N("Unique", ["h"], ["distinct"]), N("StringNormalizer", ["text"], ["words"]),
             N("If", ["c"], ["w"], then_branch=lacking, else_branch=other), N("Exp", ["h"], ["y"])]
    return model(nodes, [info("text", [1], TEXT), info("x", [2, 3]), info("c", [], BOOL)], [info("y", [2, 3]), info("distinct", None)])


def test_outputs_leave_out_what_they_do_not_depend_on(tmp_path: Path) -> None:
    m = svod.onnx.load(with_what_svod_lacks(), outputs=["h", "y"])
    assert [i.name for i in m.inputs] == ["x"]
    for h, y in (m(X), m(x=X), m({"x": X, "text": np.array(["a"])})):      # an input that is not read may still be given
        assert h.tolist() == np.maximum(X, 0).tolist()
        np.testing.assert_allclose(y, np.exp(h), rtol=1e-6)
    for wanted in (None, ["distinct"], ["w"], ["h", "words"]):
        with pytest.raises(UnsupportedError):
            svod.onnx.load(with_what_svod_lacks(), outputs=wanted)
    path = str(tmp_path / "m.onnx")
    onnx.save(with_what_svod_lacks(), path)
    assert CliRunner().invoke(cli, [path, "--outputs", "h,y"]).exit_code == 0
    assert CliRunner().invoke(cli, [path]).exit_code == 2


def test_what_is_left_out_decides_about_no_plan() -> None:
    nodes = [N("Slice", ["x", "a", "b"], ["part"]), N("Relu", ["x"], ["y"])]
    m = svod.onnx.load(model(nodes, [info("x", [2, 3]), info("a", [1], INT), info("b", [1], INT)], [info("y", None)]), outputs=["y"])
    assert not m.deciding and m(X).tolist() == np.maximum(X, 0).tolist()


@pytest.mark.parametrize("decides", [False, True])
def test_an_initializer_that_is_an_input_is_a_default(decides: bool) -> None:
    if decides:
        proto = model([N("Reshape", ["x", "w"], ["y"])], [info("x", [2, 3]), info("w", [1], INT)], [info("y", None)], {"w": np.array([6])})
        wanted, other, changed = X.reshape(6), np.array([-1]), X.reshape(-1)
    else:
        proto = model([N("Add", ["x", "w"], ["y"])], [info("x", [2, 3]), info("w", [3])], [info("y", None)], {"w": np.ones(3, np.float32)})
        wanted, other, changed = X + 1, np.full(3, 5, np.float32), X + 5
    m = svod.onnx.load(proto)
    assert [i.name for i in m.inputs] == ["x"] and [i.name for i in m.overridable] == ["w"]
    for _ in range(2):
        assert m(X).tolist() == wanted.tolist()
        assert m(X, w=other).tolist() == m({"x": X, "w": other}).tolist() == changed.tolist()
    session = svod.onnx.InferenceSession(proto.SerializeToString())
    assert [i.name for i in session.get_inputs()] == ["x"] and session.get_overridable_initializers()[0].name == "w"
    assert session.run(None, {"x": X, "w": other})[0].tolist() == changed.tolist()
    with pytest.raises(OnnxError, match="w: got float64"):
        m(X, w=np.ones(3))
    proto.ir_version = 3        # in this version, every initializer was also an input
    with pytest.raises(OnnxError, match="unknown: w"):
        svod.onnx.load(proto)(X, w=other)


def test_a_default_may_be_read_by_what_another_runtime_computes() -> None:
    proto = model([N("Relu", ["x"], ["h"]), N("Add", ["h", "w"], ["s"]), N("Unique", ["s"], ["y"])], [info("x", [2, 3]), info("w", [3])],
                  [info("y", None)], {"w": np.zeros(3, np.float32)}, opset=17)
    m = svod.onnx.load(proto, fallback="reference")
    assert m(X).tolist() == [0, 1, 3, 5, 6] and m(X, w=np.full(3, 9, np.float32)).tolist() == [9, 10, 12, 14, 15]


def test_nodes_in_any_order() -> None:
    """Nodes may be in any order, also if a subgraph reads a value of a later node."""
    yes, no = (helper.make_graph([N(op, ["h"], [f"{op}_"])], op, [], [info(f"{op}_", None)]) for op in ("Neg", "Exp"))
    nodes = [N("If", ["c"], ["y"], then_branch=yes, else_branch=no), N("Add", ["r", "r"], ["h"]), N("Relu", ["x"], ["r"]),
             N("Not", ["d"], ["c"])]
    m = svod.onnx.load(model(nodes, [info("x", [2, 3]), info("d", [], BOOL)], [info("y", None)]))
    assert m(X, np.array(False)).tolist() == (-2 * np.maximum(X, 0)).tolist()
    with pytest.raises(OnnxError, match="have a cycle: Add 'h' reads 'y', 'y'"):
        svod.onnx.load(model([N("Relu", ["x"], ["z"]), N("Add", ["y", "y"], ["h"]), N("Exp", ["h"], ["y"])], [info("x", [3])],
                             [info("z", None)]))


def test_an_output_that_is_listed_twice() -> None:
    m = svod.onnx.load(model([N("Relu", ["x"], ["y"])], [info("x", [2, 3])], [info("y", None), info("y", None)]))
    assert [a.tolist() for a in m(X)] == [np.maximum(X, 0).tolist()] * 2


@pytest.mark.slow
@pytest.mark.parametrize("x", [np.arange(5, dtype=np.float32), np.zeros(0, np.float32), np.ones(1, np.float32)])
@pytest.mark.parametrize("step", [-3, -2, -1, 1, 2, 5])
def test_slices_begin_at_an_element(x: Any, step: int) -> None:
    """The operator's specification: for a negative step the start is limited to 0 … n-1, and the end to -1 … n-1."""
    n = len(x)
    for start in (-100, -6, -5, -1, 0, 2, 4, 5, 100):
        for end in (-200, -6, -5, -2, 0, 3, 5, 100):
            first, last = (v + n if v < 0 else v for v in (start, end))
            if step < 0:
                places = range(min(max(first, 0), n - 1), min(max(last, -1), n - 1), step) if n else range(0)
            else:
                places = range(min(max(first, 0), n), min(max(last, 0), n), step)
            operands = {k: np.array([v]) for k, v in zip("abcd", (start, end, 0, step), strict=True)}
            m = svod.onnx.load(model([N("Slice", ["x", *"abcd"], ["y"])], [], [info("y", None)], {"x": x, **operands}))
            assert m().tolist() == [x[i] for i in places], (start, end, step)


# -- loops -----------------------------------------------------------------------------------------------------------------------
def loop(count: Any, condition: Any = None, shape: Any = (2,)) -> onnx.ModelProto:
    """A loop with s += x in each iteration, which collects the former values of s."""
    body = helper.make_graph([N("Identity", ["c"], ["c2"]), N("Add", ["s", "x"], ["s2"]), N("Identity", ["s2"], ["o"])], "body",
                             [info("i", [], INT), info("c", [], BOOL), info("s", [2])],
                             [info("c2", [], BOOL), info("s2", [2]), info("o", shape)])
    weights = {"n": np.array(count), "s0": np.zeros(2, np.float32), **({} if condition is None else {"go": np.array(condition)})}
    return model([N("Loop", ["n", "" if condition is None else "go", "s0"], ["s", "o"], body=body)], [info("x", [2])],
                 [info("s", None), info("o", None)], weights)


@pytest.mark.parametrize(("count", "condition"), [(0, None), (-1, None), (5, False), (0, True)])
def test_a_loop_that_takes_no_turn(count: int, condition: bool | None) -> None:
    s, o = svod.onnx.load(loop(count, condition))(np.ones(2, np.float32))
    assert s.tolist() == [0, 0] and o.shape == (0, 2) and o.dtype == np.float32
    _, o = svod.onnx.load(loop(count, condition, ("free",)))(np.ones(2, np.float32))
    assert o.shape == (0, 0)
    with pytest.raises(UnsupportedError, match="takes no turn, and its body does not declare the shape of 'o'"):
        svod.onnx.load(loop(count, condition, None))(np.ones(2, np.float32))


def test_a_loop_over_a_count_that_is_an_input() -> None:
    proto = loop(0)
    del proto.graph.initializer[0]
    proto.graph.input.append(info("n", [], INT))
    m = svod.onnx.load(proto)
    for n in (0, 2, 1):
        s, o = m(np.ones(2, np.float32), np.array(n))
        assert s.tolist() == [n, n] and o.shape == (n, 2)


def test_a_scan_over_no_steps() -> None:
    body = helper.make_graph([N("Add", ["s", "e"], ["s2"]), N("Mul", ["s2", "s2"], ["o"])], "body", [info("s", [2]), info("e", [2])],
                             [info("s2", [2]), info("o", [2])])
    m = svod.onnx.load(model([N("Scan", ["s0", "x"], ["s", "o"], body=body, num_scan_inputs=1, scan_output_axes=[1])],
                             [info("s0", [2]), info("x", ["n", 2])], [info("s", None), info("o", None)]))
    s, o = m(np.ones(2, np.float32), np.ones((0, 2), np.float32))
    assert s.tolist() == [1, 1] and o.shape == (2, 0)
    s, o = m(np.ones(2, np.float32), np.ones((3, 2), np.float32))
    assert s.tolist() == [4, 4] and o.tolist() == [[4, 9, 16]] * 2


def searching(**more: Any) -> onnx.ModelProto:
    """A loop that halves x until its sum is below 1, in at most 12 iterations."""
    body = helper.make_graph([N("Mul", ["s", "half"], ["s2"]), N("ReduceSum", ["s2"], ["t"], keepdims=0),
                              N("Greater", ["t", "one"], ["c2"]), N("Add", ["k", "step"], ["k2"]), *more.get("nodes", [])], "body",
                             [info("i", [], INT), info("c", [], BOOL), info("s", [3]), info("k", [], INT)],
                             [info("c2", [], BOOL), info("s2", more.get("shape", [3])), info("k2", [], INT), *more.get("outputs", [])])
    made = ["s", "k", *(["o"] if more.get("outputs") else [])]
    nodes = [N("ReduceSum", ["x"], ["t0"], keepdims=0), N("Greater", ["t0", "one"], ["go"]),
             N("Loop", ["" if more.get("endless") else "n", "go", "x", "zero"], made, body=body)]
    weights = {"n": np.array(12), "half": np.array(0.5, np.float32), "one": np.array(1, np.float32), "zero": np.array(0),
               "step": np.array(1)}
    return model(nodes, [info("x", [3])], [info("s", None), info("k", None, INT)], weights)


def test_a_loop_that_data_end_has_a_limit() -> None:
    m = svod.onnx.load(searching())
    for x in ([8, 8, 8], [0, 0.5, 0], [1e6, 0, 0], [1, 1, 0]):
        s, k = np.array(x, np.float32), 0
        while s.sum() > 1 and k < 12:
            s, k = s * np.float32(0.5), k + 1
        got = m(np.array(x, np.float32))
        assert got[0].tolist() == s.tolist() and got[1] == k
    assert len(m.plans) == 1
    for more, text in (({"endless": True}, "has no limit of turns"),
                       ({"nodes": [N("Identity", ["s2"], ["o"])], "outputs": [info("o", [3])]}, "collects something in each turn")):
        with pytest.raises(UnsupportedError, match=text):
            svod.onnx.load(searching(**more))(np.ones(3, np.float32))


def test_weights_of_the_sparse_form_may_be_given_too() -> None:
    proto = model([N("Add", ["x", "w"], ["y"])], [info("x", [2, 3]), info("w", [3])], [info("y", None)])
    values = numpy_helper.from_array(np.array([5], np.float32), "w")
    proto.graph.sparse_initializer.append(helper.make_sparse_tensor(values, numpy_helper.from_array(np.array([1]), "w_at"), [3]))
    m = svod.onnx.load(proto)
    assert m(X).tolist() == (X + np.array([0, 5, 0], np.float32)).tolist() and m(X, w=np.zeros(3, np.float32)).tolist() == X.tolist()
