"""OpenVINO and ncnn, which read files of whole models: the processor's types, pnnx's script, and what cannot be converted."""
from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest

from svod.bench.peers import PEER_LIBRARIES, load_peers
from svod.bench.suites.cases import Case, whole_model
from svod.bench.suites.reference import largest_error, reference
from svod.bench.suites.suites import select_cases
from svod.errors import UnsupportedError

onnx = pytest.importorskip("onnx")

from svod.bench.peers import onnx_models  # noqa: E402  # it needs onnx

NAMES = ("openvino", "openvino_bf16", "ncnn")
MLP = next(c for c in select_cases("models", "mlp"))
SCRIPT = """
            ex.input("in0", ncnn.Mat(in0.numpy(), batch_index=0).clone())
            ex.input("in1", ncnn.Mat(in1.numpy(), batch_index=233).clone())
            _, out0 = ex.extract("out0")
            out.append(torch.from_numpy(out0.numpy(batch_index=0)))
"""


def imported(name: str) -> ModuleType:
    for needed in PEER_LIBRARIES[name].needs:
        pytest.importorskip(needed, reason=f"{needed} is not installed")
    return __import__(PEER_LIBRARIES[name].module, fromlist=["peer"])


@pytest.fixture
def fake_openvino(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
    """The module of the peer over an OpenVINO that doubles the input `x`, and notes what it was told."""
    def install(capabilities: Sequence[str] = ("FP32",), error: str = "") -> Any:
        told: dict[str, Any] = {}

        class Result:
            def __init__(self, array: Any) -> None:
                self.array = array

            def to_tuple(self) -> tuple[Any, ...]:
                return (self.array,)

        class Core:
            def get_property(self, device: str, name: str) -> Sequence[str]:
                return capabilities

            def read_model(self, source: str | bytes) -> Any:
                if error:
                    raise RuntimeError(error)
                rank = SimpleNamespace(get_length=lambda: 2)
                given = SimpleNamespace(any_name="x", partial_shape=SimpleNamespace(rank=rank), element_type="f32")
                return SimpleNamespace(inputs=[given], reshape=lambda shapes: told.update(shapes=shapes))

            def compile_model(self, model: Any, device: str, options: dict[str, Any]) -> Any:
                told.update(device=device, options=options)
                return lambda feed: Result(2 * feed["x"])
        fake = ModuleType("openvino")
        fake.__dict__.update(__version__="0", Core=Core, Type=SimpleNamespace(f32="f32"))
        monkeypatch.setitem(sys.modules, "openvino", fake)
        # under another name, as other tests import the real one
        spec = spec_from_file_location("with_fake_openvino", Path(onnx_models.__file__).with_name("with_openvino.py"))
        assert spec is not None and spec.loader is not None
        module = module_from_spec(spec)
        spec.loader.exec_module(module)
        return module, told
    return install


def file_case() -> Case:
    return replace(whole_model("file", "", "onnx", "files", 1e-3),
                   options={"source": b"", "draw": lambda inputs: {name: np.ones((1, 3), np.float32) for name, _, _ in inputs}})


def test_openvino_is_told_threads_shapes_and_precision(fake_openvino: Callable[..., Any]) -> None:
    module, told = fake_openvino(["FP32", "BF16"])
    for peer, precision in ((module.OpenVinoPeer(3), "f32"), (module.OpenVinoBf16Peer(3), "bf16")):
        prepared = peer.prepare(file_case(), [])
        prepared.run(2)
        assert np.array_equal(prepared.output()[0], np.full((1, 3), 2.0))
        assert told["shapes"] == {"x": [1, 3]} and told["device"] == "CPU"
        assert told["options"] == {"INFERENCE_PRECISION_HINT": precision, "PERFORMANCE_HINT": "LATENCY", "INFERENCE_NUM_THREADS": 3}


def test_openvino_in_bfloat16_needs_a_processor_with_it(fake_openvino: Callable[..., Any]) -> None:
    module, _ = fake_openvino()
    with pytest.raises(UnsupportedError, match="no instructions for bfloat16"):
        module.OpenVinoBf16Peer(1).prepare(file_case(), [])
    module.OpenVinoPeer(1).prepare(file_case(), [])


def test_an_operation_that_openvino_lacks_is_no_failure(fake_openvino: Callable[..., Any]) -> None:
    with pytest.raises(UnsupportedError, match=r"OpenVINO does not run this: .* Loop3"):
        fake_openvino(error="OpenVINO does not support the following ONNX operations: Loop3")[0].OpenVinoPeer(1).prepare(file_case(), [])
    with pytest.raises(RuntimeError, match="no memory"):
        fake_openvino(error="no memory")[0].OpenVinoPeer(1).prepare(file_case(), [])


def test_only_whole_models_have_these_peers(monkeypatch: pytest.MonkeyPatch) -> None:
    assert [i.name for i in load_peers(NAMES, 1, {"kernels", "matmul"})[1]] == []
    for name in NAMES:
        monkeypatch.setitem(PEER_LIBRARIES, name, PEER_LIBRARIES[name]._replace(needs=("no_a", "no_b", "no_c")))
    for kinds in (MLP.kinds, {"onnx"}, {"torch"}):
        peers, infos = load_peers(NAMES, 1, kinds)
        assert not peers and [i.missing for i in infos] == ["no_a, no_b and no_c are not installed"] * 3
    assert [bool(PEER_LIBRARIES[name].precision) for name in NAMES] == [False, True, False]


@pytest.mark.parametrize("name", NAMES)
def test_a_model_is_computed_by_every_installed_library(name: str) -> None:
    peer = getattr(imported(name), PEER_LIBRARIES[name].peer)(1)
    operands = MLP.draw()
    try:
        prepared = peer.prepare(MLP, operands)
    except UnsupportedError as e:
        if "no instructions" in str(e):
            pytest.skip(str(e))
        raise
    prepared.run(2)
    allowed = 0.05 if PEER_LIBRARIES[name].precision else MLP.tolerance
    assert len(prepared.output()) == 1 and largest_error(prepared.output()[0], reference(MLP, operands)) <= allowed


# -- what pnnx writes ---------------------------------------------------------------------------------

def test_the_script_tells_inputs_and_outputs() -> None:
    with_ncnn: Any = imported("ncnn")
    found = with_ncnn.Converted.read(SCRIPT)
    assert found.inputs == [("in0", 0, 0), ("in1", 1, 233)] and found.outputs == [("out0", 0)]
    for other in ("", SCRIPT.replace("in1.numpy(), batch_index=233", "in1.squeeze(0).numpy()"), SCRIPT.replace("batch_index", "axis")):
        with pytest.raises(UnsupportedError, match="of another form"):
            with_ncnn.Converted.read(other)


def test_layers_that_ncnn_lacks_are_named() -> None:
    with_ncnn: Any = imported("ncnn")
    lines = ["7767517", "3 3", "Input in0 0 1 in0", "torch.where a 1 1 in0 1", "ReLU b 1 1 1 2", "torch.where c 1 1 2 out0", ""]
    assert with_ncnn.missing_layers("\n".join(lines)) == ["torch.where"]


@pytest.mark.parametrize(("body", "words"), [
    ("echo loading; echo 'no such operator' >&2; exit 3", "it ended with the status 3: no such operator"),
    ("kill -11 $$", "it ended with the signal 11"),
    ("exit 0", "it ended with the status 0"),
    ("sleep 60", "pnnx took more than 0 s"),
])
def test_what_pnnx_does_not_convert_is_said(body: str, words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with_ncnn: Any = imported("ncnn")
    program = tmp_path / "pnnx"
    program.write_text(f"#!/bin/sh\n{body}\n")
    program.chmod(0o755)
    (tmp_path / "model.onnx").touch()
    monkeypatch.setattr(with_ncnn, "program", lambda: str(program))
    if "sleep" in body:
        monkeypatch.setattr(with_ncnn, "CONVERT_SECONDS", 0.2)
    with pytest.raises(UnsupportedError, match=words):
        with_ncnn.convert([np.zeros((1, 3), np.float32)], tmp_path)


def test_pnnx_takes_few_types(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedError, match="takes no inputs of bool, float64"):
        imported("ncnn").convert([np.zeros(2, bool), np.zeros(2), np.zeros(2)], tmp_path)


@pytest.mark.parametrize("form", ["onnx", "torchscript"])
def test_a_module_that_cannot_be_exported_is_unsupported(form: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    failed = SimpleNamespace(returncode=1, stderr="Traceback\nValueError: a loop")
    monkeypatch.setattr(onnx_models.subprocess, "run", lambda *args, **kwargs: failed)
    case = replace(whole_model("unet", "", "torch", "others", 1e-3), options={"seed": 0})
    function = {"onnx": "torch.onnx.export", "torchscript": "torch.jit.trace"}[form]
    with pytest.raises(UnsupportedError, match=f"{function}: ValueError: a loop"), onnx_models.exported(case, form):
        pass
