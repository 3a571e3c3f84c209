"""Nodes with known operands give the same bits, and the same errors, as the same nodes with these operands as inputs."""
from __future__ import annotations

import itertools
import warnings
from typing import Any

import ml_dtypes
import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

import svod.onnx
from svod.core.ir.uop import UOp
from svod.core.spec import graphs
from svod.errors import SvodError, UnsupportedError
from svod.onnx import OnnxError, operators
from svod.onnx.known import Known
from svod.onnx.operators import elementwise
from svod.onnx.registry import _operators
from svod.tensor import Tensor
from tests.draws import an_eighth
from tests.onnx.test_model import info, model
from tests.onnx.test_numbers import results

F, D, H, B = np.float32, np.float64, np.float16, ml_dtypes.bfloat16
U = np.uint8
OPSET = 22

FLOATS = [0.0, -0.0, 1.0, -1.5, 2.5, 0.5, -7.0, 3e4, 1e-7, np.inf, -np.inf, np.nan]
TYPES: dict[str, Any] = {k: np.dtype(k) for k in ("bool", "float16", "float32", "float64", *(f"{s}int{b}" for s in ("", "u")
                                                                                           for b in (8, 16, 32, 64)))}
TYPES["bfloat16"] = np.dtype(B)


def edges(kind: np.dtype[Any]) -> Any:
    """Numbers at the limits and in the middle of a type's range."""
    if kind.kind == "b":
        return np.array([False, True])
    if kind.kind not in "iu":
        return np.array([*FLOATS, *([2.0 ** 53 + 2, 5e-324] if kind == D else [])], kind)
    span = np.iinfo(kind)
    few = [0, 1, 2, 3, 7, 63, span.max, span.max - 1, span.min, *([-1, -2, -7, span.min + 1] if span.min < 0 else []),
           *([2 ** 53 + 1, *([-(2 ** 53) - 1] if span.min < 0 else [])] if span.bits == 64 else [])]
    return np.array(few, kind)


def pairs(kind: np.dtype[Any]) -> tuple[Any, Any]:
    """Pairs of every edge with every other one."""
    a, b = zip(*itertools.product(edges(kind), repeat=2), strict=True)
    return np.array(a, kind), np.array(b, kind)


def tensor_type(a: Any) -> int:
    return int(helper.np_dtype_to_tensor_dtype(a.dtype))


def both(nodes: list[onnx.NodeProto], operands: dict[str, Any], outputs: list[str], opset: int = OPSET) -> tuple[Any, Any]:
    """The outputs with the operands as weights, and with the operands as inputs."""
    weights = [numpy_helper.from_array(v, k) for k, v in operands.items()]
    inputs = [info(k, list(v.shape), tensor_type(v)) for k, v in operands.items()]
    made = [helper.make_empty_tensor_value_info(o) for o in outputs]
    opsets = [helper.make_opsetid("", opset), helper.make_opsetid("com.microsoft", 1)]

    def loaded(given: list[Any], kept: list[Any]) -> Any:
        return svod.onnx.load(helper.make_model(helper.make_graph(nodes, "g", given, made, kept), opset_imports=opsets, ir_version=10))

    def listed(results: Any) -> list[Any]:
        return list(results) if isinstance(results, tuple) else [results]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        known = listed(loaded([], weights)())
    return known, listed(loaded(inputs, [])(operands))


def assert_same_bits(a: Any, b: Any, what: str) -> None:
    """Every element has the same bits, or is a NaN in both."""
    assert a.dtype == b.dtype and a.shape == b.shape, what
    if a.dtype.kind in "biu":
        np.testing.assert_array_equal(a, b, what)
        return
    wide = [v.astype(D) for v in (a, b)]
    np.testing.assert_array_equal(*wide, what)
    signs = [np.where(np.isnan(v), False, np.signbit(v)) for v in wide]
    np.testing.assert_array_equal(*signs, f"{what}: signs")


def takes(op: str, kind: np.dtype[Any]) -> bool:
    """Whether the standard has an operator for a type."""
    word = {"float32": "float", "float64": "double"}.get(kind.name, kind.name)
    return f"tensor({word})" in onnx.defs.get_schema(op, OPSET).inputs[0].types


@pytest.mark.slow
@pytest.mark.parametrize("name", TYPES)
def test_functions_of_elements(name: str) -> None:
    """All operators of one and two operands on the edges of a type: these include division by zero, numbers beyond 2⁵³, and NaN."""
    kind = TYPES[name]
    (a, b), x = pairs(kind), edges(kind)
    nodes = [helper.make_node(op, ["x"], [op]) for op in elementwise._UNARY if takes(op, kind)]
    nodes += [helper.make_node(op, ["a", "b"], [op]) for op in [*elementwise._BINARY, "Max", "Min", "Sum"] if takes(op, kind)]
    nodes += [helper.make_node("Mod", ["a", "b"], [f"Mod{f}"], fmod=f) for f in (0, 1) if kind.kind in "iu" or (f and kind.kind == "f")]
    if kind.kind == "u":
        nodes += [helper.make_node("BitShift", ["a", "b"], [f"Shift{d}"], direction=d) for d in ("LEFT", "RIGHT")]
    nodes += [helper.make_node("Cast", ["x"], [f"to_{to}"], to=tensor_type(np.empty(0, t))) for to, t in TYPES.items()]
    names = [n.output[0] for n in nodes]
    for op, got, wanted in zip(names, *both(nodes, {"x": x, "a": a, "b": b}, names), strict=True):
        assert_same_bits(got, wanted, f"{op} of {name}")


def test_division_of_known_integers_is_exact_and_by_zero_gives_zero() -> None:
    a, b = np.array([-(2 ** 53 + 1), -7, 7, 7, -7, 0]), np.array([2, 2, -2, 0, 0, 0])
    known, run = both([helper.make_node("Div", ["a", "b"], ["y"])], {"a": a, "b": b}, ["y"], 17)
    assert known[0].tolist() == run[0].tolist() == [-4503599627370496, -3, -3, 0, 0, 0]


X23 = np.array([[1, -2, 3], [4, 5, -6]], F)
LONG = np.arange(-3, 9).reshape(3, 4)

# (operator, attributes, operands); opset 22 unless the attributes name another
CASES: list[tuple[str, dict[str, Any], list[Any]]] = [
    ("Identity", {}, [X23]), ("Shape", {}, [X23]), ("Shape", {"start": -1}, [X23]), ("Size", {}, [X23]),
    ("Reshape", {}, [LONG, np.array([2, -1])]), ("Reshape", {}, [LONG, np.array([0, 2, 2])]),
    ("Reshape", {"allowzero": 1}, [np.zeros((0, 3), F), np.array([3, 0])]), ("Flatten", {"axis": -1}, [X23]),
    ("Transpose", {"perm": [1, 0]}, [LONG]), ("Transpose", {}, [LONG]), ("Squeeze", {}, [X23[None]]),
    ("Squeeze", {}, [X23[None], np.array([0])]), ("Unsqueeze", {}, [X23, np.array([-1, 0])]),
    ("Expand", {}, [LONG[:, :1], np.array([2, 1, 5])]), ("Tile", {}, [X23, np.array([2, 1])]),
    ("Concat", {"axis": 1}, [X23, X23]),
    ("Split", {"axis": 1}, [X23, np.array([1, 2])]), ("Split", {"axis": 0, "num_outputs": 2}, [LONG]),
    ("Slice", {}, [LONG, np.array([-100, 5]), np.array([-200, 0]), np.array([0, 1]), np.array([-1, -2])]),
    ("Slice", {}, [LONG, np.array([1]), np.array([2 ** 62])]),
    ("Slice", {}, [LONG, np.array([9]), np.array([-9]), np.array([1]), np.array([-3])]),
    ("Pad", {}, [X23, np.array([1, 0, -1, 2]), np.array(7, F)]), ("Pad", {"mode": "reflect"}, [X23, np.array([0, 2, 0, 1])]),
    ("Pad", {"mode": "edge"}, [LONG, np.array([1, 1]), np.array(0), np.array([1])]),
    ("Pad", {"mode": "wrap"}, [X23, np.array([0, 1, 0, 1])]),
    ("DepthToSpace", {"blocksize": 2}, [np.arange(8, dtype=F).reshape(1, 4, 1, 2)]),
    ("SpaceToDepth", {"blocksize": 2}, [np.arange(8, dtype=F).reshape(1, 1, 2, 4)]),
    ("Trilu", {"upper": 0}, [LONG, np.array(1)]), ("ReverseSequence", {}, [LONG.astype(F), np.array([1, 2, 3, 1])]),
    ("Gather", {"axis": 1}, [LONG, np.array([[0, -1], [3, -4]])]),
    ("GatherElements", {"axis": 1}, [X23, np.array([[0, -1], [2, 1]])]),
    ("GatherND", {}, [LONG, np.array([[0, -1], [2, 1]])]),
    ("ScatterElements", {"axis": 1}, [X23, np.array([[1], [-1]]), X23[:, :1]]),
    ("ScatterElements", {"reduction": "add"}, [LONG, np.array([[0, 0, 1, 2], [0, 0, 1, 2]]), LONG[:2]]),
    ("ScatterND", {"reduction": "max"}, [X23, np.array([[0], [0]]), X23]),
    ("OneHot", {}, [np.array([0, -1, 7]), np.array(4), np.array([2, 9])]),
    ("TensorScatter", {"opset": 24}, [np.zeros((1, 2, 4, 1), F), np.ones((1, 2, 2, 1), F), np.array([1])]),
    ("ArgMax", {"axis": 1}, [np.array([[1, np.nan, 3], [2, 2, 1]], F)]),
    ("ArgMin", {"select_last_index": 1}, [np.array([3, 1, 1], F)]),
    ("TopK", {}, [np.array([3, 1, np.inf, 2, 1], F), np.array([3])]),
    ("Col2Im", {}, [np.arange(8, dtype=F).reshape(1, 4, 2), np.array([2, 3]), np.array([2, 2])]),
    ("Compress", {"axis": 1}, [X23, np.array([True, False, True])]), ("Compress", {}, [X23, np.array([False, True])]),
    ("ReduceSum", {}, [LONG, np.array([1])]), ("ReduceSum", {"keepdims": 0}, [LONG * 2 ** 62]), ("ReduceProd", {}, [LONG + 4]),
    ("ReduceMean", {"keepdims": 0}, [LONG]), ("ReduceMax", {}, [np.array([1, np.nan, 3], F)]),
    ("ReduceMin", {}, [np.array([-0.0, 0], F)]),
    ("ReduceSum", {}, [np.full(4097, 0.1, F)]), ("ReduceSum", {}, [np.array([1e8, 1, -1e8], F)]), ("ReduceL1", {}, [LONG]),
    ("ReduceL2", {}, [X23]), ("ReduceSumSquare", {}, [LONG]), ("ReduceLogSum", {}, [np.abs(X23)]), ("ReduceLogSumExp", {}, [X23]),
    ("CumSum", {"reverse": 1}, [LONG, np.array(1)]), ("CumSum", {"exclusive": 1}, [X23, np.array(0)]),
    ("CumProd", {"opset": 26}, [LONG, np.array(1)]),
    ("ConstantOfShape", {"value": numpy_helper.from_array(np.array([7]))}, [np.array([2, 3])]),
    ("ConstantOfShape", {}, [np.array([0, 2])]),
    ("Range", {}, [np.array(9), np.array(-3), np.array(-4)]), ("Range", {}, [np.array(0, F), np.array(1, F), np.array(0.1, F)]),
    ("Range", {}, [np.array(2), np.array(2), np.array(1)]),
    ("Range", {}, [np.array(0), np.array(2 ** 53 + 9), np.array(2 ** 52)]),
    ("EyeLike", {"k": 1}, [LONG]), ("Where", {}, [np.array([True, False, True]), X23, -X23]),
    ("Clip", {}, [X23, np.array(-1, F), np.array(2, F)]),
    ("IsInf", {"detect_negative": 0}, [np.array([np.inf, -np.inf, 1], F)]),
    ("CastLike", {}, [np.array([1.9, -1.9, 2 ** 31, np.nan], F), LONG]),
    ("BitCast", {"to": TensorProto.INT32, "opset": 26}, [X23]), ("Mean", {}, [X23, X23 * 3]), ("BitwiseNot", {}, [LONG]),
    ("Dropout", {}, [X23]), ("Hardmax", {}, [X23]), ("Softmax", {}, [X23]), ("LogSoftmax", {}, [X23]),
    ("MatMul", {}, [X23, LONG.astype(F)]),
    ("MatMul", {}, [LONG, LONG.T.copy()]), ("Gemm", {"alpha": 0.5}, [X23, LONG.astype(F)]),
    ("Einsum", {"equation": "ij,kj->ik"}, [X23, X23]),
    ("MatMulInteger", {}, [LONG.astype(U), LONG.T.astype(U)]), ("Det", {}, [np.array([[2, 1], [1, 3]], F)]),
    ("NegativeLogLikelihoodLoss", {}, [X23, np.array([0, 2])]), ("SoftmaxCrossEntropyLoss", {}, [X23, np.array([0, 2])]),
    ("GlobalAveragePool", {}, [X23.reshape(1, 2, 3)]), ("GlobalMaxPool", {}, [X23.reshape(1, 2, 3)]),
    ("GlobalLpPool", {}, [X23.reshape(1, 2, 3)]),
    *((op, {}, [np.concatenate([X23.ravel(), np.array(FLOATS, F)])]) for op in (
        "Relu", "LeakyRelu", "ThresholdedRelu", "Selu", "Elu", "Celu", "HardSigmoid", "HardSwish", "Shrink", "Sigmoid", "Softplus",
        "Softsign", "Gelu", "Mish")),
    ("PRelu", {}, [X23, np.array([0.5], F)]), ("Swish", {"opset": 24}, [X23]), ("SwiGLU", {"opset": 27}, [X23, -X23]),
    ("Scatter", {"axis": 1, "opset": 9}, [X23, np.array([[1], [2]]), X23[:, :1]]),
]

# files that are not covered: layers, graphs, random numbers, operators without operands, and one that needs known operands
LAYERS = {"attention", "control", "convolution", "norms", "quantised", "random", "recurrent", "resample", "signal"}
APART = {"Constant", "NonZero"}


@pytest.mark.parametrize(("op", "attributes", "operands"), an_eighth(CASES))
def test_a_node_has_one_meaning(op: str, attributes: dict[str, Any], operands: list[Any]) -> None:
    opset = attributes.get("opset", OPSET)
    plain = {k: v for k, v in attributes.items() if k != "opset"}
    names = [f"i{k}" for k in range(len(operands))]
    outputs = {"Split": ["y", "z"], "TopK": ["y", "z"]}.get(op, ["y"])
    node = helper.make_node(op, names, outputs, **plain)
    for got, wanted in zip(*both([node], dict(zip(names, operands, strict=True)), outputs, opset), strict=True):
        assert_same_bits(got, wanted, op)


@pytest.mark.parametrize("x", [X23 - 1, LONG, np.zeros(3, F), np.ones((2, 0), F)])
def test_positions_of_what_is_known_to_be_not_zero(x: Any) -> None:
    m = svod.onnx.load(model([helper.make_node("NonZero", ["x"], ["y"])], [], [info("y", None, TensorProto.INT64)], {"x": x}))
    np.testing.assert_array_equal(m(), np.stack(np.nonzero(x)))


def test_the_table_has_every_operator() -> None:
    assert operators.FILES
    tried = {c[0] for c in CASES} | elementwise._UNARY.keys() | elementwise._BINARY.keys()
    tried |= {"Max", "Min", "Sum", "Mod", "BitShift", "Cast"}
    own = {name for (domain, name), entries in _operators.items()
           if not domain and entries[0].function.__module__.rpartition(".")[2] not in LAYERS | {"fused"}}
    assert own - APART - tried == set()


# mistakes: (operator, attributes, operands, expected message)
MISTAKES: list[tuple[str, dict[str, Any], list[Any], str]] = [
    ("Reshape", {}, [X23, np.array([5])], "6 elements do not make 5"), ("Add", {}, [X23, np.ones((2, 2), F)], "broadcast"),
    ("Concat", {"axis": 0}, [X23, X23[0]], "other extents must agree"), ("Transpose", {"perm": [0, 5]}, [X23], "permute"),
    ("Squeeze", {}, [X23, np.array([1])], "must be 1"), ("Expand", {}, [X23, np.array([2, 2])], "expand|broadcast"),
    ("Unsqueeze", {}, [X23, np.array([0, 0])], "twice"), ("Split", {}, [X23, np.array([5, 5])], "split"),
    ("Slice", {}, [X23, np.array([0]), np.array([1]), np.array([7])], "axis|axes"),
    ("Slice", {}, [X23, np.array([0]), np.array([1]), np.array([0]), np.array([0])], "step"),
    ("Gather", {"axis": 4}, [X23, np.array([0])], "axis|axes"), ("MatMul", {}, [X23, X23], "matmul"),
    ("Tile", {}, [X23, np.array([-1, 1])], "negative"),
    ("Cast", {"to": TensorProto.STRING}, [X23], "string"), ("Range", {}, [np.array(0), np.array(3), np.array(0)], "step"),
    ("Where", {}, [np.array([True, False]), X23, X23], "broadcast"), ("Pad", {}, [X23, np.array([1, 1])], "pads"),
    ("ConstantOfShape", {}, [np.array([2, -1])], "negative"),
    ("GatherND", {}, [X23, np.array([[0, 0, 0]])], "3 positions"),
    ("OneHot", {}, [np.array([1]), np.array(-2), X23[0, :2]], "depth of -2"),
]


@pytest.mark.parametrize(("op", "operands", "text"), [
    ("Gather", [X23, np.array([0, 5])], "the index 5 is outside of an axis of 2"),
    ("GatherElements", [X23, np.array([[-3, 0, 0]])], "the index -3 is outside of an axis of 2"),
    ("GatherND", [X23, np.array([[0, 3]])], "the index 3 is outside of an axis of 3"),
    ("ScatterND", [X23, np.array([[2]]), X23[:1]], "the index 2 is outside of an axis of 2"),
    ("ScatterElements", [X23, np.array([[0, 2, 0]]), X23[:1]], "the index 2 is outside of an axis of 2")])
@pytest.mark.parametrize("as_weights", [True, False])
def test_known_indices_are_checked(op: str, operands: list[Any], text: str, as_weights: bool) -> None:
    """Indices are checked if they are known, whether the indexed tensor is known or not."""
    names = [f"i{k}" for k in range(len(operands))]
    given = dict(zip(names, operands, strict=True))
    weights = given if as_weights else {"i1": operands[1]}
    inputs = [info(n, list(o.shape)) for n, o in given.items() if n not in weights]
    m = svod.onnx.load(model([helper.make_node(op, names, ["y"])], inputs, [info("y", None)], weights))
    with pytest.raises(OnnxError, match=rf"{op} 'y' of \(2, 3\).*{text}"):
        m({n: o for n, o in given.items() if n not in weights})


@pytest.mark.parametrize("case", MISTAKES, ids=[f"{c[0]}-{i}" for i, c in enumerate(MISTAKES)])
def test_a_mistake_has_one_error(case: tuple[str, dict[str, Any], list[Any], str]) -> None:
    """The error names the node, its operator and the shapes of its operands."""
    op, attributes, operands, text = case
    said = []
    for as_weights in (True, False):
        with pytest.raises(SvodError, match=text) as e:
            results(op, operands, attributes, OPSET, as_weights)
        said.append(str(e.value))
    assert said[0] == said[1]
    assert isinstance(e.value, UnsupportedError if op == "Cast" else OnnxError)
    assert f"{op} 'o0'" in said[0]
    if op != "Cast":
        assert all(str(o.shape) in said[0] for o in operands)


@pytest.mark.parametrize("is_certain", [True, False])
def test_a_node_is_evaluated_once_in_a_walk(monkeypatch: pytest.MonkeyPatch, is_certain: bool) -> None:
    """Each node of a chain is evaluated once, both if all nodes are known exactly, and if a kernel may compute other bits."""
    computed: list[UOp] = []
    visited: list[UOp] = []
    one, order = graphs._value, UOp.toposort

    def counted_value(u: UOp, *rest: Any) -> Any:
        computed.append(u)
        return one(u, *rest)

    def counted_order(u: UOp, gate: Any = None) -> list[UOp]:
        visited.extend(order(u, gate))
        return order(u, gate)
    monkeypatch.setattr(graphs, "_value", counted_value)
    monkeypatch.setattr(UOp, "toposort", counted_order)
    known, length = Known(), 50
    t = Tensor(np.arange(5, dtype=F))
    known.note(t)
    if not is_certain:
        t = t.exp()
    for i in range(length):
        t = t + float(i)
        want = (np.arange(5) if is_certain else np.exp(np.arange(5.0))) + sum(range(i + 1))
        np.testing.assert_allclose(known.value(t), want, rtol=1e-6)
        settled = known.settled(t)
        assert isinstance(settled, np.ndarray) == is_certain
    nodes = len(order(t.uop))
    assert len(computed) <= 2 * nodes and len(visited) <= 8 * nodes, (len(computed), len(visited), nodes)


def test_a_value_is_known_once_its_memory_is() -> None:
    known, t = Known(), Tensor(np.arange(5, dtype=F))
    u = t + 1.0
    assert known.value(u) is None
    known.note(t)
    np.testing.assert_array_equal(known.value(u), np.arange(5) + 1)
