"""Mistakes with a file, its inputs and the command line: each raises an error of svod that names the mistake."""
from __future__ import annotations

import io
import os
import re
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from click.testing import CliRunner
from onnx import TensorProto, helper, numpy_helper

import svod.onnx
from svod.cli.tune.options import TuneOptions
from svod.errors import SvodError, UnsupportedError
from svod.onnx import OnnxError
from svod.onnx.run import cli, dimensions, make_feed, with_random_weights

N = helper.make_node
X = np.arange(8, dtype=np.float32).reshape(2, 4)
ONES = np.ones(4, np.float32)


def info(name: str, kind: int = TensorProto.FLOAT, shape: Any = (2, 4)) -> Any:
    return helper.make_tensor_value_info(name, kind, shape)


def model(nodes: list[Any], inputs: list[Any] | None = None, outputs: list[Any] | None = None, weights: list[Any] | None = None,
          **more: Any) -> onnx.ModelProto:
    graph = helper.make_graph(nodes, "g", [info("x")] if inputs is None else inputs, outputs or [info("y", shape=None)], weights or [])
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20), helper.make_opsetid("d", 1)], ir_version=10, **more)


def weight(values: Any, name: str = "w") -> Any:
    return numpy_helper.from_array(np.asarray(values), name)


MISTAKES = {
    "two initializers": (model([N("Add", ["x", "w"], ["y"])], weights=[weight(ONES), weight(7 * ONES)]), "two of the name 'w'"),
    "two inputs": (model([N("Relu", ["x"], ["y"])], [info("x"), info("x")]), "two of the name 'x'"),
    "types": (model([N("Add", ["x", "w"], ["y"])], weights=[weight(np.arange(4))]), "float32 and int64, and must have one type"),
    "a type": (model([N("And", ["x", "x"], ["y"])]), "float32; version 7 of the operator takes bool|takes bool"),
    "declared": (model([N("Relu", ["x"], ["y"])], outputs=[info("y", TensorProto.INT64)]), "declared as int64, and its nodes make float32"),
    "attribute": (model([N("Softmax", ["x"], ["y"], axes=1)]), "an attribute axes.*its attributes are axis"),
    "attribute's type": (model([N("Softmax", ["x"], ["y"], axis="1")]), "axis as string, and takes it as int"),
    "attribute missing": (model([N("Concat", ["x", "x"], ["y"])]), "lacks the attribute axis"),
    "too few": (model([N("Add", ["x"], ["y"])]), "has 1 inputs, and takes 2"),
    "too many": (model([N("Relu", ["x", "x"], ["y"])]), "has 2 inputs, and takes 1"),
    "outputs": (model([N("Relu", ["x"], ["y", "z"])], outputs=[info("z")]), "has 2 outputs, and makes 1"),
    "stride 0": (model([N("MaxPool", ["x"], ["y"], kernel_shape=[2], strides=[0])], [info("x", shape=(1, 2, 4))]), "cannot be computed"),
    "functions": (model([N("F", ["x"], ["y"], domain="d")], functions=[
        helper.make_function("d", a, ["a"], ["b"], [N(b, ["a"], ["b"], domain="d")], [helper.make_opsetid("d", 1)])
        for a, b in (("F", "G"), ("G", "F"))]), "functions cannot be put in place"),
}


@pytest.mark.parametrize("what", MISTAKES)
def test_models_with_a_mistake(what: str) -> None:
    proto, text = MISTAKES[what]
    with pytest.raises(OnnxError, match=text):
        svod.onnx.load(proto)(X[None] if what == "stride 0" else X)


def test_an_output_that_svods_form_of_an_operator_lacks() -> None:
    proto = model([N("Split", ["x"], ["y", "a", "b"], axis=1, num_outputs=2)], outputs=[info("b", shape=None)])
    with pytest.raises(UnsupportedError, match="'b' is an output that"):
        svod.onnx.load(proto)(X)


def test_what_is_no_model_is_shown(tmp_path: Path) -> None:
    path = tmp_path / "m.onnx"
    pointer = b"version https://git-lfs.github.com/spec/v1\noid sha256:00"
    for data, text in ((pointer, "git lfs pull"), (b"PK\3\4" + bytes(60), "begins with b'PK")):
        path.write_bytes(data)
        with pytest.raises(OnnxError, match=text):
            svod.onnx.load(path)
    path.write_bytes(model([N("Relu", ["x"], ["y"])]).SerializeToString()[:-3])
    with pytest.raises(OnnxError, match="cut off") as e:
        svod.onnx.load(path)
    assert "begins with" not in str(e.value)


def test_operators_of_a_set_that_is_not_known_yet() -> None:
    newer = [helper.make_opsetid("", onnx.defs.onnx_opset_version() + 1)]
    proto = helper.make_model(model([N("Relu", ["x"], ["y"])]).graph, opset_imports=newer)
    with pytest.raises(UnsupportedError, match=r"is of opset .* export the model with opset"):
        svod.onnx.load(proto)


def test_outputs_and_providers_that_are_not_there(caplog: pytest.LogCaptureFixture) -> None:
    proto = model([N("Split", ["x"], ["y", "z"], axis=1, num_outputs=2)], outputs=[info("y", shape=None), info("z", shape=None)])
    m = svod.onnx.load(proto)
    assert repr(m).startswith("<Model x float32[2, 4] → y ")
    with pytest.raises(OnnxError, match="no output 'a'; there are y, z"):
        m(X)["a"]
    with pytest.raises(OnnxError, match=r"give a list of names, outputs=\['yz'\]"):
        svod.onnx.load(proto, outputs="yz")
    svod.onnx.InferenceSession(proto.SerializeToString(), providers=["CPUExecutionProvider"])
    assert not caplog.records
    svod.onnx.InferenceSession(proto.SerializeToString(), providers=[("CUDAExecutionProvider", {}), "CPUExecutionProvider"])
    assert "no CUDAExecutionProvider and runs on the CPU" in caplog.text


def test_files_that_give_text() -> None:
    with pytest.raises(OnnxError, match="open it to read bytes"):
        svod.onnx.load(io.StringIO("text"))     # type: ignore[arg-type]


@pytest.mark.parametrize(("place", "text"), [
    ({"offset": "-4"}, "non-negative"), ({"offset": "abc"}, "does not say where"), ({"length": "-8"}, "non-negative"),
    ({"location": "a\0b"}, "cannot be read"), ({"location": ""}, "in which file"), ({"location": "pipe"}, "no file"),
    ({"location": "link"}, "outside of the model's folder"), ({"location": "up/secret"}, "outside of the model's folder"),
    ({"offset": "40"}, "has 0 bytes"), ({"length": "8"}, "has 8 bytes")])
def test_external_data_in_odd_places(place: dict[str, str], text: str, tmp_path: Path) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "data").write_bytes(ONES.tobytes())
    (tmp_path / "secret").write_bytes(ONES.tobytes())
    os.mkfifo(folder / "pipe")
    (folder / "link").symlink_to(tmp_path / "secret")
    (folder / "up").symlink_to(tmp_path)
    tensor = onnx.TensorProto(name="w", data_type=TensorProto.FLOAT, dims=[4], data_location=TensorProto.EXTERNAL)
    for key, value in {"location": "data", **place}.items():
        tensor.external_data.add(key=key, value=value)
    onnx.save(model([N("Add", ["x", "w"], ["y"])], weights=[tensor]), folder / "m.onnx")
    with pytest.raises(OnnxError, match=text):
        svod.onnx.load(folder / "m.onnx")(X)


@pytest.mark.parametrize(("feed", "text"), [
    ({"x": [[1, 2, 3, 4], [1]]}, "inhomogeneous"), ({"x": [["a"] * 4] * 2}, "str"), ({"x": None}, "got None"),
    ({"x": X.astype("f8"), "k": 1.5}, "(?s)x: got float64.*k: got float64, the model wants int64"),
    ({"x": X, "k": 1 << 70}, "k: got object"),
    ({"x": X, "k": True, "z": 1}, "unknown: z")])
def test_inputs_that_are_no_arrays_of_the_models_types(feed: dict[str, Any], text: str) -> None:
    m = svod.onnx.load(model([N("Identity", ["x"], ["y"])], [info("x"), info("k", TensorProto.INT64, ())]))
    with pytest.raises(OnnxError, match=text):
        m(feed)
    assert np.array_equal(m([[1, 2, 3, 4.5], [True, 0, 0, 0]], 3), [[1, 2, 3, 4.5], [1, 0, 0, 0]])
    with pytest.raises(OnnxError, match="by position and by name: x"):
        m(X, 1, x=X)
    with pytest.raises(OnnxError, match=r"such as x=\(1, 128\)"):
        m.prepare(x=(2, -4), k=())


@pytest.mark.parametrize("size", ["3", -1, True, (1, 4)])
def test_sizes_that_are_none(size: Any) -> None:
    with pytest.raises(OnnxError, match="give a size, such as 128, or a range"):
        svod.onnx.load(model([N("Relu", ["x"], ["y"])], [info("x", shape=("n", 4))]), dims={"n": size})


def test_a_session_says_what_it_does_not_take(tmp_path: Path) -> None:
    proto = model([N("NonZero", ["x"], ["y"])])
    with pytest.raises(SvodError, match=r"takes no fall_back; .* config, device, dims, fallback, outputs"):
        svod.onnx.InferenceSession(proto, fall_back="reference")
    options = svod.onnx.SessionOptions()
    options.graph_optimization_level = svod.onnx.GraphOptimizationLevel.ORT_ENABLE_ALL     # type: ignore[attr-defined]
    session = svod.onnx.InferenceSession(proto, options, svod.onnx.get_available_providers(), fallback="reference")
    assert session.get_session_options() is options
    with pytest.raises(OnnxError, match=r"run\(None, \{'x': …\}\)"):
        session.run("y", {"x": X})
    assert np.array_equal(session.run(None, {"x": X})[0], np.nonzero(X))        # the fallback computes the whole model on the host


def test_a_comparison_says_what_it_takes() -> None:
    m = svod.onnx.load(model([N("Relu", ["x"], ["y"])]))
    for inputs, text in (([X], "arrays by the names"), ({"z": X}, "missing: x"), ({"x": X}, "against='nothing'")):
        with pytest.raises(SvodError, match=text):
            svod.onnx.compare(m, inputs, against="nothing" if text.startswith("against") else None)     # type: ignore[arg-type]


# -- python -m svod.onnx.run, which svod-tune runs ------------------------------------------------------------------------------
def test_sizes_come_from_what_is_given_and_the_rest_is_asked_for() -> None:
    nodes = [N("MatMul", ["a", "b"], ["y"])]
    m = svod.onnx.load(model(nodes, [info("a", shape=("batch", "past + 1", 3)), info("b", shape=("batch", 3, "past + 1"))]))
    assert make_feed(m, {"a": (2, 5, 3)}, {}, ["svod-tune", "m.onnx"])["b"].shape == (2, 3, 5)
    assert make_feed(m, {}, {"b": np.ones((1, 3, 7), np.float32)}, ["svod-tune", "m.onnx"])["a"].shape == (1, 7, 3)
    with pytest.raises(OnnxError, match=r"svod-tune 'a b.onnx' --dim 'past [+] 1=128', or a range: --dim 'past [+] 1=1..512'"):
        make_feed(m, {}, {}, ["svod-tune", "a b.onnx"])
    # the suggested command keeps the given options
    with pytest.raises(OnnxError, match=r"svod-tune m.onnx --dim batch=2 --dim 'past [+] 1=128',"):
        make_feed(m, {}, {}, ["svod-tune", "m.onnx", "--dim", "batch=2"])
    with pytest.raises(OnnxError, match=r"--dim n=5..2: a range ends above its beginning, as in --dim n=1..512; one size is --dim n=5"):
        dimensions(["n=5..2"])
    with pytest.raises(OnnxError, match="both give a"):
        make_feed(m, {"a": (2, 5, 3)}, {"a": np.ones((2, 5, 3), np.float32)}, ["svod-tune", "m.onnx"])
    image = svod.onnx.load(model([N("Relu", ["x"], ["y"])], [info("x", shape=(None, 3, None, None))]))
    with pytest.raises(OnnxError, match=r"an axis of x has no size.*--shape x=1x3x224x224$"):
        make_feed(image, {}, {}, ["svod-tune", "m.onnx"])


def test_a_missing_size_is_answered_with_the_command_that_was_given(tmp_path: Path) -> None:
    path = str(tmp_path / "m.onnx")
    onnx.save(model([N("Relu", ["x"], ["y"])], [info("x", shape=("tokens", "width"))]), path)
    options = TuneOptions(path, beam=4, budget=30.0, device="CUDA:sm_90", compile_only=True, dim=("width=64",))
    _, _, *words = options.program
    result = CliRunner().invoke(cli, [*words, *options.asked])
    assert result.exit_code == 2
    assert f"{path} --beam 4 --budget 30 --device CUDA:sm_90 --dim width=64 --compile-only --dim tokens=128, or a range" in result.output


def test_random_weights_take_the_place_of_floats_alone(tmp_path: Path) -> None:
    two = helper.make_tensor("v", TensorProto.INT64, [1], [2])
    nodes = [N("ConstantOfShape", ["s"], ["w"]), N("ConstantOfShape", ["s"], ["i"], value=two),
             N("Gather", ["w", "i"], ["y"])]
    onnx.save(model(nodes, weights=[weight(np.array([3]), "s")]), tmp_path / "m.onnx")
    made = with_random_weights(str(tmp_path / "m.onnx"))
    assert [n.op_type for n in made.graph.node] == ["ConstantOfShape", "Gather"] and made.graph.initializer[1].name == "w"
    (tmp_path / "m.onnx").write_bytes(b"no model")
    with pytest.raises(OnnxError, match="no ONNX model"):
        with_random_weights(str(tmp_path / "m.onnx"))


@pytest.mark.parametrize(("words", "status", "text"), [
    (["--check"], 0, "m.onnx: 1 kernel, .*\nlargest difference to .*of the largest output"),     # memory-mapped weights
    (["--outputs", "h,y", "--check"], 0, "largest difference to .*of the largest output"),
    (["--outputs", "at"], 2, "fallback=\"onnxruntime\""), (["--outputs", "at", "--fallback", "reference"], 0, "m.onnx: 1 kernel,"),
    (["--dim", "n=5", "--dim", "n=6"], 2, "--dim n is given twice"), (["--dim", "n=99999999999999"], 2, "svod: Unable to allocate"),
    (["--random-weights", "--shape", "z=1"], 2, "no input z; use the names of its inputs: x")])
def test_a_run_of_a_file(words: list[str], status: int, text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    w = np.random.default_rng(0).standard_normal((64, 32)).astype(np.float32)
    nodes = [N("MatMul", ["x", "w"], ["h"]), N("Relu", ["h"], ["y"]), N("NonZero", ["h"], ["at"])]
    onnx.save(model(nodes, [info("x", shape=("batch", "n", 64)) if words[0] == "--dim" else info("x", shape=("batch", 64))],
                    [info("y", shape=None)], [weight(w)]), "m.onnx")
    if words[0] == "--dim":
        words = [*words, "--outputs", "y"]
    result = CliRunner().invoke(cli, ["m.onnx", *words])
    assert result.exit_code == status, result.output
    assert re.search(text, result.output), result.output


@pytest.mark.parametrize(("direction", "most"), [("forward", 6), ("bidirectional", 3)])
def test_layers_of_too_many_steps_are_refused(monkeypatch: pytest.MonkeyPatch, direction: str, most: int) -> None:
    monkeypatch.setattr("svod.nn.recurrent.MOST_STEPS", 6)
    ways = 1 + (direction == "bidirectional")

    def load(steps: int) -> Any:
        nodes = [N("GRU", ["x", "w", "r"], ["y"], hidden_size=2, direction=direction)]
        return svod.onnx.load(model(nodes, [info("x", shape=(steps, 1, 3))], [info("y", shape=(steps, ways, 1, 2))],
                                    [weight(np.ones((ways, 6, 3), np.float32)), weight(np.ones((ways, 6, 2), np.float32), "r")]))
    assert load(most)(np.ones((most, 1, 3), np.float32)).shape == (most, ways, 1, 2)
    with pytest.raises(UnsupportedError, match=f"over {most + 1} steps; svod unrolls up to {most}"):
        load(most + 1)(np.ones((most + 1, 1, 3), np.float32))
