"""Models as functions: inputs and their errors, values that determine shapes, external weights, sessions."""
from __future__ import annotations

import io
import pickle
import re
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

import svod
import svod.onnx
from svod import Tensor, Variable
from svod.compile.plan.execution_plan import ExecutionPlan
from svod.errors import UnsupportedError
from svod.onnx import Model, OnnxError, reader
from svod.onnx.run import arrays_in, dimensions, make_feed, relative_difference, shapes_of
from svod.onnx.values import tensor_of
from tests.test_stale import Foreign

RNG = np.random.default_rng(3)
W = RNG.standard_normal((6, 4)).astype(np.float32)


def model(nodes: list[Any], inputs: list[Any], outputs: list[Any], weights: dict[str, Any] | None = None,
          opset: int = 20) -> onnx.ModelProto:
    graph = helper.make_graph(nodes, "g", inputs, outputs, [numpy_helper.from_array(v, k) for k, v in (weights or {}).items()])
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", opset), helper.make_opsetid("com.microsoft", 1)], ir_version=10)


def info(name: str, shape: list[Any] | None, kind: int = TensorProto.FLOAT) -> Any:
    return helper.make_tensor_value_info(name, kind, shape)


def product() -> onnx.ModelProto:
    return model([helper.make_node("MatMul", ["x", "w"], ["h"], "/fc/MatMul"), helper.make_node("Relu", ["h"], ["y"], "/act/Relu")],
                 [info("x", ["batch", 6])], [info("y", ["batch", 4])], {"w": W})


def test_a_model_is_a_function_of_arrays_and_tensors(tmp_path: Path) -> None:
    onnx.save(product(), tmp_path / "m.onnx")
    x = RNG.standard_normal((3, 6)).astype(np.float32)
    wanted = np.maximum(x @ W, 0)
    data = (tmp_path / "m.onnx").read_bytes()
    for source in (tmp_path / "m.onnx", str(tmp_path / "m.onnx"), data, io.BytesIO(data), product()):
        m = svod.onnx.load(source)
        np.testing.assert_allclose(m(x), wanted, rtol=1e-5)
    assert m.inputs == (("x", "float32", ("batch", 6)),) and m.outputs[0].name == "y"
    np.testing.assert_allclose(m(x=x), wanted, rtol=1e-5)
    out = m(Tensor(x))
    assert isinstance(out, Tensor)
    np.testing.assert_allclose(out.numpy(), wanted, rtol=1e-5)
    for n in (1, 7, 3):
        assert m(np.ones((n, 6), np.float32)).shape == (n, 4)
    assert len(m.plans) == 3, "a plan for each size that occurred"
    assert any("fc" in k.origin for k in m.prepare(x=(5, 6)).kernels), "kernels carry the names of nodes"


def difference(**options: Any) -> Model:
    nodes = [helper.make_node("Sub", ["a", "b"], ["y"])]
    return svod.onnx.load(model(nodes, [info("a", [3]), info("b", [3])], [info("y", None)], opset=13), **options)


def test_further_calls_of_a_signature_skip_the_checks(monkeypatch: pytest.MonkeyPatch) -> None:
    m, checks, checked = difference(), [], Model.checked
    a, b = RNG.standard_normal((2, 3)).astype(np.float32)
    monkeypatch.setattr(Model, "checked", lambda self, feed: checks.append(list(feed)) or checked(self, feed))
    for call in (lambda: m(a, b), lambda: m({"b": b, "a": a}), lambda: m(b=b, a=a), lambda: m(a, b=b)) * 2:
        assert np.array_equal(call(), a - b)
    assert checks == [["a", "b"], ["b", "a"]] and len(m.plans) == 1
    for wrong in ({"a": a}, {"a": a, "b": b.astype(np.float64)}, {"a": a, "b": b[:2]}, {"a": a, "b": b, "c": b}):
        with pytest.raises(OnnxError):
            m(wrong)
    checks.clear()
    m = difference(fallback="reference")
    for _ in range(3):      # a call may move operators to the other runtime, so each is checked
        assert np.array_equal(m(a, b), a - b)
    assert len(checks) == 3


def test_arrays_of_other_libraries_give_arrays() -> None:
    m = difference()
    a, b = RNG.standard_normal((2, 3)).astype(np.float32)
    for given in ((Foreign(a), b), (Foreign(a), Foreign(b)), (a, b)) * 2:
        out = m(*given)
        assert type(out) is np.ndarray and np.array_equal(out, a - b)
    assert isinstance(m(Tensor(a), Foreign(b)), Tensor)


def test_everything_that_does_not_fit_is_said_at_once() -> None:
    m = svod.onnx.load(model([helper.make_node("Add", ["a", "b"], ["y"])], [info("a", ["n", 2]), info("b", ["n", 2])], [info("y", None)]))
    with pytest.raises(OnnxError) as e:
        m(a=np.ones((2, 3), np.float64), c=1)
    text = str(e.value)
    assert "missing: b" in text and "unknown: c" in text
    assert "got float64, the model wants float32" in text and "got 3 on axis 1, expected 2" in text
    with pytest.raises(OnnxError, match="and 2 before for the dimension n"):
        m(np.ones((2, 2), np.float32), np.ones((3, 2), np.float32))


def test_what_svod_lacks_is_listed_before_anything_is_compiled() -> None:
    nodes = [helper.make_node("StringNormalizer", ["x"], ["a"], "first"), helper.make_node("Det", ["x"], ["y"]),
             helper.make_node("NoSuchThing", ["x"], ["b"], "odd", domain="com.microsoft"),
             helper.make_node("StringNormalizer", ["x"], ["c"])]
    with pytest.raises(UnsupportedError) as e:
        svod.onnx.load(model(nodes, [info("x", [2, 2])], [info("y", None)]))
    assert "2 operations" in str(e.value) and "StringNormalizer (opset 20) ×2, first at 'first'" in str(e.value)
    assert "com.microsoft.NoSuchThing" in str(e.value)


@pytest.mark.parametrize("change", ["cycle", "missing", "twice", "output", "cut", "text", "empty"])
def test_files_that_are_no_models(change: str) -> None:
    m = product()
    if change == "cycle":
        m.graph.node[0].input[0] = "y"
    elif change == "missing":
        m.graph.node[0].input[1] = "nothing"
    elif change == "twice":
        m.graph.node[1].output[0] = "h"
    elif change == "output":
        m.graph.output[0].name = "nothing"
    data = m.SerializeToString()
    source: bytes = {"cut": data[:len(data) // 2], "text": b"not a model at all", "empty": b""}.get(change, data)
    with pytest.raises(OnnxError):
        svod.onnx.load(source)


def test_external_data_is_mapped_and_stays_in_the_folder(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    onnx.save_model(product(), folder / "m.onnx", save_as_external_data=True, location="weights.bin", size_threshold=0)
    x = RNG.standard_normal((2, 6)).astype(np.float32)
    np.testing.assert_allclose(svod.onnx.load(folder / "m.onnx")(x), np.maximum(x @ W, 0), rtol=1e-5)
    (tmp_path / "outside.bin").write_bytes((folder / "weights.bin").read_bytes())
    m = onnx.load(folder / "m.onnx", load_external_data=False)
    next(e for e in m.graph.initializer[0].external_data if e.key == "location").value = "../outside.bin"
    (folder / "evil.onnx").write_bytes(m.SerializeToString())
    with pytest.raises(OnnxError, match="outside of the model's folder"):
        svod.onnx.load(folder / "evil.onnx")(x)
    (folder / "weights.bin").unlink()
    with pytest.raises(OnnxError, match="cannot be read"):
        svod.onnx.load(folder / "m.onnx")(x)


def test_inputs_whose_values_decide_are_part_of_the_key() -> None:
    nodes = [helper.make_node("Slice", ["x", "starts", "ends"], ["y"])]
    m = svod.onnx.load(model(nodes, [info("x", [8]), info("starts", [1], TensorProto.INT64), info("ends", [1], TensorProto.INT64)],
                             [info("y", None)]))
    assert m.deciding == {"starts", "ends"}
    x = np.arange(8, dtype=np.float32)
    for first, last in ((0, 3), (2, 8), (0, 3)):
        assert m(x, np.array([first]), np.array([last])).tolist() == x[first:last].tolist()
    assert len(m.plans) == 2


def test_shapes_that_the_graph_computes_are_known() -> None:
    nodes = [helper.make_node("Shape", ["x"], ["s"]), helper.make_node("Gather", ["s", "zero"], ["n"]),
             helper.make_node("Unsqueeze", ["n", "zero1"], ["n1"]), helper.make_node("Concat", ["n1", "minus"], ["to"], axis=0),
             helper.make_node("Reshape", ["x", "to"], ["y"])]
    m = svod.onnx.load(model(nodes, [info("x", ["b", 2, 3])], [info("y", None)],
                             {"zero": np.array(0), "zero1": np.array([0]), "minus": np.array([-1])}))
    assert m(np.ones((4, 2, 3), np.float32)).shape == (4, 6)


def test_a_branch_is_chosen_when_its_condition_is_known_and_computed_when_it_is_not() -> None:
    yes = helper.make_graph([helper.make_node("Neg", ["x"], ["a"])], "yes", [], [info("a", [3])])
    no = helper.make_graph([helper.make_node("Abs", ["x"], ["b"])], "no", [], [info("b", [3])])
    known = svod.onnx.load(model([helper.make_node("If", ["c"], ["y"], then_branch=yes, else_branch=no)],
                                 [info("x", [3]), info("c", [], TensorProto.BOOL)], [info("y", [3])]))
    x = np.array([-1, 2, -3], np.float32)
    assert known(x, np.array(True)).tolist() == [1, -2, 3] and known(x, np.array(False)).tolist() == [1, 2, 3]
    computed = svod.onnx.load(model([helper.make_node("ReduceSum", ["x"], ["t"], keepdims=0), helper.make_node("Greater", ["t", "zero"],
                                                                                                               ["c"]),
                                     helper.make_node("If", ["c"], ["y"], then_branch=yes, else_branch=no)], [info("x", [3])],
                                    [info("y", [3])], {"zero": np.array(0, np.float32)}))
    assert computed(x).tolist() == [1, 2, 3] and computed(np.array([5, 1, 1], np.float32)).tolist() == [-5, -1, -1]
    assert len(computed.plans) == 1


def test_one_plan_serves_all_sizes_of_a_variable() -> None:
    m = svod.onnx.load(product(), dims={"batch": Variable("batch", 1, 9)})
    for n in (1, 4, 9, 2):
        x = RNG.standard_normal((n, 6)).astype(np.float32)
        np.testing.assert_allclose(m(x), np.maximum(x @ W, 0), rtol=1e-5)
    assert len(m.plans) == 1
    with pytest.raises(OnnxError, match="1 to 9 were declared"):
        m(np.ones((10, 6), np.float32))
    with pytest.raises(OnnxError, match="no free dimension sequence"):
        svod.onnx.load(product(), dims={"sequence": 4})


def test_values_inside_the_graph_may_be_outputs() -> None:
    x = RNG.standard_normal((2, 6)).astype(np.float32)
    out = svod.onnx.load(product(), outputs=["h", "y"])(x)
    np.testing.assert_allclose(out["h"], x @ W, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(out[1], np.maximum(x @ W, 0), rtol=1e-5, atol=1e-6)
    with pytest.raises(OnnxError, match="no value 'nothing'"):
        svod.onnx.load(product(), outputs=["nothing"])


def test_a_session_is_used_as_onnxruntimes(tmp_path: Path) -> None:
    onnx.save(product(), tmp_path / "m.onnx")
    options = svod.onnx.SessionOptions()
    options.intra_op_num_threads = 1
    session = svod.onnx.InferenceSession(tmp_path / "m.onnx", options, providers=["CPUExecutionProvider"])
    x = RNG.standard_normal((2, 6)).astype(np.float32)
    [y] = session.run(None, {session.get_inputs()[0].name: x})
    np.testing.assert_allclose(y, np.maximum(x @ W, 0), rtol=1e-5)
    assert session.run(["y"], {"x": x})[0].shape == (2, 4)
    assert session.get_inputs()[0].type == "tensor(float)" and session.get_inputs()[0].shape == ["batch", 6]
    assert session.get_outputs()[0].name == "y" and session.get_modelmeta().graph_name == "g"
    with pytest.raises(OnnxError, match="no output 'z'"):
        session.run(["z"], {"x": x})


@pytest.mark.parametrize("op", ["Gelu", "BiasGelu", "FastGelu", "QuickGelu", "SkipLayerNormalization", "SimplifiedLayerNormalization",
                                "FusedMatMul"])
def test_operators_of_microsoft(op: str) -> None:
    """Operators of com.microsoft against formulas in NumPy, at extents that no vector length divides."""
    from math import erf
    x, s = RNG.standard_normal((3, 5, 13)).astype(np.float32), RNG.standard_normal((3, 5, 13)).astype(np.float32)
    g, b = RNG.standard_normal(13).astype(np.float32), RNG.standard_normal(13).astype(np.float32)
    gelu = np.vectorize(lambda v: 0.5 * v * (1 + erf(v / 2 ** 0.5)))
    total = (x + s).astype(np.float64)
    normed = (total - total.mean(-1, keepdims=True)) / np.sqrt(total.var(-1, keepdims=True) + 1e-12) * g + b
    cases: dict[str, tuple[list[Any], Any]] = {
        "Gelu": ([x], gelu(x)), "BiasGelu": ([x, b], gelu(x + b)), "QuickGelu": ([x], x / (1 + np.exp(-1.702 * x))),
        "FastGelu": ([x], 0.5 * x * (1 + np.tanh(0.7978845608 * (x + 0.044715 * x ** 3)))),
        "SkipLayerNormalization": ([x, s, g, b], normed),
        "SimplifiedLayerNormalization": ([x, g], x / np.sqrt((x ** 2).mean(-1, keepdims=True) + 1e-5) * g),
        "FusedMatMul": ([x, s.transpose(0, 2, 1).copy()], x @ s.transpose(0, 2, 1))}
    operands, wanted = cases[op]
    names = [f"i{n}" for n in range(len(operands))]
    m = svod.onnx.load(model([helper.make_node(op, names, ["y"], domain="com.microsoft")],
                             [info(n, list(o.shape)) for n, o in zip(names, operands, strict=True)], [info("y", None)]))
    np.testing.assert_allclose(m(*operands), wanted, rtol=1e-3, atol=1e-5)


def test_integer_products_are_exact() -> None:
    a, b = RNG.integers(0, 256, (5, 37)).astype(np.uint8), RNG.integers(-128, 128, (37, 3)).astype(np.int8)
    m = svod.onnx.load(model([helper.make_node("MatMulInteger", ["a", "b", "za"], ["y"])],
                             [info("a", [5, 37], TensorProto.UINT8), info("b", [37, 3], TensorProto.INT8)],
                             [info("y", None, TensorProto.INT32)], {"za": np.array(7, np.uint8)}))
    assert np.array_equal(m(a, b), (a.astype(np.int64) - 7) @ b.astype(np.int64))


def test_inputs_of_a_run_are_made_or_asked_for() -> None:
    m = svod.onnx.load(model([helper.make_node("Identity", ["x"], ["y"])], [info("x", ["batch", "sequence", 4])], [info("y", None)]))
    with pytest.raises(OnnxError, match=r"sequence has no size.*--dim sequence=128.*--dim sequence=1\.\.512"):
        make_feed(m, {}, {}, ["svod-tune", "m.onnx"])
    assert make_feed(m, {"x": (1, 3, 4)}, {}, ["svod-tune", "m.onnx"])["x"].shape == (1, 3, 4)
    sized = svod.onnx.load(m.proto, dims=dimensions(["sequence=5"]))
    assert make_feed(sized, {}, {}, ["svod-tune", "m.onnx"])["x"].shape == (1, 5, 4)
    assert shapes_of(["x=1x3x4", "a=b=2"]) == {"x": (1, 3, 4), "a=b": (2,)}
    for wrong in ("sequence", "sequence=x", "=4", "n=1..x"):
        with pytest.raises(OnnxError, match="--dim"):
            dimensions([wrong])
    with pytest.raises(OnnxError, match="no input z"):
        make_feed(m, {"z": (1,)}, {}, ["svod-tune", "m.onnx"])
    assert relative_difference(np.ones(3), np.ones(3) * 2) == 0.5 and relative_difference(np.ones(3), np.ones(4)) == float("inf")


def test_large_weights_are_mapped(tmp_path: Path) -> None:
    """The array of a weight is in the mapped pages of the file, and protobuf has no copy of it."""
    w = RNG.standard_normal((64, 128)).astype(np.float32)
    onnx.save(model([helper.make_node("MatMul", ["x", "w"], ["y"])], [info("x", [1, 64])], [info("y", None)], {"w": w}),
              tmp_path / "m.onnx")
    m = svod.onnx.load(tmp_path / "m.onnx")
    [t] = m.proto.graph.initializer
    assert not t.raw_data and m.proto.ByteSize() < 1000
    x = RNG.standard_normal((1, 64)).astype(np.float32)
    np.testing.assert_allclose(m(x), x @ w, rtol=1e-4, atol=1e-5)


def test_weights_at_every_address_have_their_values(tmp_path: Path) -> None:
    """Small weights are aligned when the file is read; large ones stay where they are, and tensors of them read them there."""
    kinds = [np.float32, np.float64, np.int64, np.int8, np.float16]
    large = [RNG.integers(-99, 99, (300, 1000 + i)).astype(kind) for i, kind in enumerate(kinds)]
    weights = {f"w{i}": w for i, w in enumerate([*large, *(w[:1, :7] for w in large), np.zeros((0, 3), np.float32), np.float32(2)])}
    ends = set()
    for shift in range(4):
        path = tmp_path / f"{shift}.onnx"
        given = model([helper.make_node("Identity", ["w0"], ["y"])], [], [info("y", None)], weights)
        given.producer_name += "x" * shift          # moves what follows in the file
        onnx.save(given, path)
        proto, arrays = reader.read_model(path)
        own = {t.name: arrays._stored(t) for t in proto.graph.initializer}
        ends |= {a.ctypes.data % 4 for a in own.values() if a.nbytes}
        for name, array in arrays.by_name(proto.graph.initializer).items():
            assert array.dtype == weights[name].dtype
            assert array.flags.aligned or (array.nbytes >= reader.LEFT_IN_FILE and array.ctypes.data == own[name].ctypes.data)
            np.testing.assert_array_equal(array, weights[name])
            np.testing.assert_array_equal(tensor_of(array).numpy(), weights[name])
    assert ends == {0, 1, 2, 3}


@pytest.mark.parametrize("cut", [0.1, 0.5, 0.99])
def test_a_file_that_is_cut_off_is_no_model(tmp_path: Path, cut: float) -> None:
    w = RNG.standard_normal((64, 128)).astype(np.float32)
    data = model([helper.make_node("MatMul", ["x", "w"], ["y"])], [info("x", [1, 64])], [info("y", None)], {"w": w}).SerializeToString()
    (tmp_path / "m.onnx").write_bytes(data[:int(cut * len(data))])
    with pytest.raises(OnnxError):
        svod.onnx.load(tmp_path / "m.onnx")


@pytest.mark.parametrize("runtime", ["reference", "onnxruntime"])
def test_what_svod_lacks_and_what_stands_behind_it_runs_on_the_host(runtime: str, caplog: pytest.LogCaptureFixture) -> None:
    if runtime == "onnxruntime":
        pytest.importorskip("onnxruntime", reason="onnxruntime is not installed")
    nodes = [helper.make_node("MatMul", ["x", "w"], ["h"]), helper.make_node("Relu", ["h"], ["r"]), helper.make_node("NonZero", ["r"],
                                                                                                                     ["at"]),
             helper.make_node("Cast", ["at"], ["y"], to=TensorProto.FLOAT)]
    m = svod.onnx.load(model(nodes, [info("x", ["n", 6])], [info("y", None), info("r", None)], {"w": W}, opset=17), fallback=runtime)
    x = RNG.standard_normal((3, 6)).astype(np.float32)
    y, r = m(x)
    np.testing.assert_allclose(r, np.maximum(x @ W, 0), rtol=1e-5, atol=1e-6)
    assert np.array_equal(y, np.stack(np.nonzero(r)).astype(np.float32))
    assert "NonZero and what stands behind: 50 % of the model's nodes" in caplog.text
    x = RNG.standard_normal((5, 6)).astype(np.float32)
    assert np.array_equal(m(x)[0], np.stack(np.nonzero(m(x)[1])))
    with pytest.raises(UnsupportedError, match="values that are not known"):
        svod.onnx.load(m.proto)(x)


def test_a_fallback_that_there_is_not() -> None:
    with pytest.raises(svod.SvodError, match="'onnxruntime' or 'reference'"):
        svod.onnx.load(product(), fallback="tensorrt")


def test_node_by_node_comparison_finds_nothing_where_all_is_right() -> None:
    m = svod.onnx.load(product())
    rows = svod.onnx.compare(m, {"x": RNG.standard_normal((3, 6)).astype(np.float32)}, against="reference")
    assert [r.op for r in rows] == ["MatMul", "Relu"] and all(r.difference < 1e-5 for r in rows)


def test_a_comparison_takes_a_path(tmp_path: Path) -> None:
    path = tmp_path / "model.onnx"
    onnx.save(product(), path)
    rows = svod.onnx.compare(path, {"x": RNG.standard_normal((3, 6)).astype(np.float32)}, against="reference")
    assert [r.op for r in rows] == ["MatMul", "Relu"] and all(r.difference < 1e-5 for r in rows)


def test_models_with_large_weights_are_handed_to_other_runtimes_whole(tmp_path: Path) -> None:
    """Weights are in the file, in an external file, or in a Constant's attribute; the other runtime gets the complete model or a part of
    it."""
    w = RNG.standard_normal((64, 128)).astype(np.float32)
    nodes = [helper.make_node("MatMul", ["x", "w"], ["h"]), helper.make_node("NonZero", ["h"], ["at"]),
             helper.make_node("Cast", ["at"], ["c"], to=TensorProto.FLOAT), helper.make_node("Transpose", ["c"], ["t"]),
             helper.make_node("Constant", [], ["v"], value=numpy_helper.from_array(np.ones((2, 1024), np.float32))),
             helper.make_node("MatMul", ["t", "v"], ["y"]), helper.make_node("MatMul", ["h", "u"], ["z"])]
    m = model(nodes, [info("x", [1, 64])], [info("y", None), info("z", None)], {"w": w, "u": w.T.copy()}, 17)
    x = RNG.standard_normal((1, 64)).astype(np.float32)
    onnx.save(m, tmp_path / "in.onnx")
    onnx.save_model(m, tmp_path / "beside.onnx", save_as_external_data=True, location="weights.bin", size_threshold=0,
                    convert_attribute=True)
    for source in (tmp_path / "in.onnx", tmp_path / "beside.onnx", (tmp_path / "in.onnx").read_bytes()):
        loaded = svod.onnx.load(source, fallback="reference")
        y, z = loaded(x)
        np.testing.assert_allclose(y, np.stack(np.nonzero(x @ w)).T.astype(np.float32) @ np.ones((2, 1024), np.float32))
        np.testing.assert_allclose(z, x @ w @ w.T, rtol=1e-3, atol=1e-3)
        assert loaded.proto.ByteSize() < 3000
        for whole in (loaded, svod.onnx.load(source, outputs=["z"])):
            rows = svod.onnx.compare(whole, {"x": x}, against="reference")
            assert [r.op for r in rows if r.difference < 1e-5 and r.op != "Constant"] == ["MatMul", "MatMul"]


def test_differences_to_another_runtime() -> None:
    a, nan, inf = np.array([1.0, 2.0]), np.array([np.nan, 2.0]), np.array([np.inf, 2.0])
    assert relative_difference(nan, nan) == relative_difference(inf, inf) == relative_difference(a, a) == 0
    for one, other in ((a, nan), (nan, a), (a, inf), (inf, -inf), (inf, nan)):
        assert relative_difference(one, other) == float("inf")


def of_its_own_size() -> onnx.ModelProto:
    """A graph that computes with the size n of its input: positions, a mask, and heads that are split and concatenated."""
    nodes = [helper.make_node("Shape", ["x"], ["s"]), helper.make_node("Gather", ["s", "i1"], ["n"]),
             helper.make_node("Unsqueeze", ["n", "axes0"], ["n1"]), helper.make_node("Cast", ["n"], ["nc"], to=TensorProto.INT64),
             helper.make_node("Slice", ["table", "zeros", "n1", "axes0"], ["positions"]),
             helper.make_node("Add", ["x", "positions"], ["h"]),
             helper.make_node("Concat", ["one", "n1", "heads"], ["split"], axis=0), helper.make_node("Reshape", ["h", "split"], ["h4"]),
             helper.make_node("Transpose", ["h4"], ["q"], perm=[0, 2, 1, 3]),
             helper.make_node("Transpose", ["h4"], ["k"], perm=[0, 2, 3, 1]),
             helper.make_node("MatMul", ["q", "k"], ["scores"]),
             helper.make_node("Range", ["i0", "nc", "i1"], ["r"]), helper.make_node("Unsqueeze", ["r", "axes0"], ["row"]),
             helper.make_node("Unsqueeze", ["r", "one"], ["column"]), helper.make_node("LessOrEqual", ["row", "column"], ["causal"]),
             helper.make_node("Where", ["causal", "scores", "low"], ["masked"]), helper.make_node("Softmax", ["masked"], ["p"], axis=-1),
             helper.make_node("MatMul", ["p", "q"], ["o"]), helper.make_node("Transpose", ["o"], ["t"], perm=[0, 2, 1, 3]),
             helper.make_node("Concat", ["one", "n1", "width"], ["join"], axis=0), helper.make_node("Reshape", ["t", "join"], ["y"]),
             helper.make_node("ConstantOfShape", ["n1"], ["c"], value=numpy_helper.from_array(np.array([2.0], np.float32))),
             helper.make_node("ReduceSum", ["c"], ["z"], keepdims=0)]
    weights = {"i0": np.array(0), "i1": np.array(1), "axes0": np.array([0]), "zeros": np.array([0]), "one": np.array([1]),
               "heads": np.array([2, 3]), "width": np.array([6]), "low": np.array(-1e9, np.float32),
               "table": RNG.standard_normal((12, 6)).astype(np.float32)}
    return model(nodes, [info("x", [1, "n", 6])], [info("y", None), info("z", None)], weights)


def test_a_size_seen_first_takes_no_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    """Inputs are copied to the layout of the largest sizes, which a bound of 37 rounds up, without a kernel."""
    m = svod.onnx.load(model([helper.make_node("Mul", ["x", "x"], ["y"])], [info("x", ["n", "m"])], [info("y", ["n", "m"])]),
                       dims={"n": Variable("n", 1, 37), "m": Variable("m", 1, 21)})
    m(np.ones((2, 3), np.float32))
    monkeypatch.setattr(ExecutionPlan, "__init__", None)
    for shape in ((37, 21), (1, 1), (13, 8)):
        x = RNG.standard_normal(shape).astype(np.float32)
        np.testing.assert_array_equal(m(x), x * x)
        np.testing.assert_array_equal(m(Tensor(x)).numpy(), x * x)
        np.testing.assert_array_equal(m(x[::-1, ::-1]), (x * x)[::-1, ::-1])


def test_several_sizes_without_variables_are_told_once(caplog: pytest.LogCaptureFixture) -> None:
    proto = model([helper.make_node("Mul", ["x", "x"], ["y"])], [info("x", ["n", "it's k", 2])], [info("y", None)])
    m = svod.onnx.load(proto)
    for _ in range(2):
        for shape in ((2, 3, 2), (2, 4, 2), (5, 4, 2)):
            m(np.ones(shape, np.float32))
    assert not caplog.records, "three sets of sizes, each seen twice"
    for shape in ((40, 3, 2), (41, 3, 2), (1, 1, 2)):
        m(np.ones(shape, np.float32))
    said, = [r.message for r in caplog.records]
    assert "4 sets of sizes ('n' 2 to 40, \"it's k\" 3 to 4)" in said
    advice = said.partition("load(…, dims=")[2].partition(") makes")[0]
    assert advice == """{'n': svod.Variable("n", 1, 128), "it's k": svod.Variable("d1", 1, 16)}"""
    caplog.clear()
    one_plan = svod.onnx.load(proto, dims=eval(advice, {"svod": svod}))
    for n in range(1, 9):
        np.testing.assert_array_equal(one_plan(np.full((n, n, 2), 3, np.float32)), 9)
    assert not caplog.records and len(one_plan.plans) == 1


@pytest.mark.slow
def test_what_a_graph_computes_from_a_variables_size_is_symbolic() -> None:
    proto = of_its_own_size()
    one_plan, each = svod.onnx.load(proto, dims={"n": Variable("n", 1, 12)}), svod.onnx.load(proto)
    for n in (12, 1, 7, 5):
        x = RNG.standard_normal((1, n, 6)).astype(np.float32)
        got, wanted = one_plan(x), each(x)
        assert isinstance(got[0], np.ndarray) and got[1] == 2 * n
        np.testing.assert_allclose(got[0], wanted[0], rtol=1e-4, atol=1e-5)
    assert len(one_plan.plans) == 1 and len(each.plans) == 4


@pytest.mark.parametrize(("batch", "width"), [(0, 1), (0, 2), (1, 1), (1, 2), (2, 1)])
def test_gather_nd_of_a_variables_size(batch: int, width: int) -> None:
    """Tuples of positions in axes whose sizes differ from run to run, some counted from the end, against NumPy."""
    places: list[Any] = [*[2, "n"][:batch], 3]
    proto = model([helper.make_node("GatherND", ["x", "i"], ["y"], batch_dims=batch)],
                  [info("x", [2, "n", 5]), helper.make_tensor_value_info("i", TensorProto.INT64, [*places, width])], [info("y", None)])
    m = svod.onnx.load(proto, dims={"n": Variable("n", 1, 12)})
    for n in (12, 1, 7):
        x = RNG.standard_normal((2, n, 5)).astype(np.float32)
        sizes = x.shape[batch:batch + width]
        shape = (*x.shape[:batch], 3)
        index = np.stack([RNG.integers(-size, size, shape) for size in sizes], -1)
        rows = np.indices(shape)[:batch]
        np.testing.assert_array_equal(m(x, index), x[(*rows, *np.moveaxis(index, -1, 0))])
    assert len(m.plans) == 1


def test_an_operator_that_needs_a_number_says_which_size_has_none() -> None:
    m = svod.onnx.load(model([helper.make_node("EyeLike", ["x"], ["y"])], [info("x", ["n", 3])], [info("y", None)]),
                       dims={"n": Variable("n", 1, 9)})
    with pytest.raises(UnsupportedError, match="differs from run to run: give that dimension a number"):
        m(np.ones((3, 3), np.float32))


def write_npy(path: Path) -> None:
    with path.open("wb") as f:
        np.save(f, X)


def write_damaged(path: Path) -> None:
    np.savez(path, a=X)
    content = bytearray(path.read_bytes())
    content[content.index(X.tobytes())] ^= 1
    path.write_bytes(content)


def write_half(path: Path) -> None:
    np.savez(path, a=X)
    path.write_bytes(path.read_bytes()[:-30])


def write_archive(path: Path) -> None:
    with zipfile.ZipFile(path, "w") as f:
        f.writestr("read me", "text")


X = np.linspace(0, 1, 7, dtype=np.float32)
NO_FILE = "this is no whole .npz file; make one with numpy.savez('inputs.npz', **{'x': array}), where x is the name of an input"


@pytest.mark.parametrize(("write", "said"), [
    (lambda path: path.write_bytes(b""), NO_FILE), (lambda path: path.write_text("text"), NO_FILE), (write_npy, NO_FILE),
    (write_half, NO_FILE), (lambda path: path.write_bytes(pickle.dumps({"a": X})), NO_FILE),
    (lambda path: path.mkdir(), NO_FILE),
    (write_archive, "read me is no array; store only arrays"), (write_damaged, "a is damaged"),
    (lambda path: np.savez(path, a=X, b=np.array([{}], object)), "b is damaged, or an array of Python objects; store numbers, as in"),
])
def test_inputs_that_are_no_file_of_arrays(tmp_path: Path, write: Callable[[Path], None], said: str) -> None:
    write(path := tmp_path / "x.npz")
    with pytest.raises(OnnxError, match=re.escape(f"--inputs {path}: {said}")) as caught:
        arrays_in(str(path))
    assert "pickle" not in str(caught.value)


def test_inputs_of_a_file_are_its_arrays_by_name(tmp_path: Path) -> None:
    np.savez(tmp_path / "x.npz", **{"a.1": X, "b": X[:0]})
    found = arrays_in(str(tmp_path / "x.npz"))
    assert list(found) == ["a.1", "b"] and np.array_equal(found["a.1"], X) and found["b"].shape == (0,)


@pytest.mark.parametrize("option", ["--shape", "--inputs"])
def test_names_that_are_no_inputs(option: str) -> None:
    m = svod.onnx.load(model([helper.make_node("Relu", ["x"], ["y"])], [info("x", [7])], [info("y", None)]))
    given: list[Any] = [{"z": (7,)}, {}] if option == "--shape" else [{}, {"z": X}]
    with pytest.raises(OnnxError, match=f"{option}: the model has no input z; use the names of its inputs: x"):
        make_feed(m, *given, ["svod-tune"])


def test_a_range_of_sizes_begins_at_one() -> None:
    proto = model([helper.make_node("Relu", ["x"], ["y"])], [info("x", [1, "n"])], [info("y", None)])
    with pytest.raises(OnnxError, match=r"at least one element, as in Variable\('n', 1, 9\)"):
        svod.onnx.load(proto, dims={"n": Variable("n", 0, 9)})
