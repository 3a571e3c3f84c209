"""ncnn on the CPU in float32, for whole models, which pnnx converts: modules from TorchScript, everything else from ONNX.

    model.pt, or model.onnx and inputs.npz
        pnnx fp16=0        →   model.ncnn.param, model.ncnn.bin, and model_ncnn.py, a script that runs them
    ncnn.Net               →   a network that is called with arrays

ncnn's arrays have no axis of a batch; the script tells which axis of each input and output pnnx took for one. Without the axes it is 233.
"""
from __future__ import annotations

import re
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import ncnn
import numpy as np
import onnx

from svod.bench.peers import Array, PreparedPeer, calls
from svod.bench.peers.onnx_models import exported, model_file
from svod.bench.suites.cases import Case
from svod.errors import UnsupportedError
from svod.system.process.directories import temporary_folder

CONVERT_SECONDS = 180.0
PNNX_TYPES = {"float32": "f32", "int64": "i64", "int32": "i32"}      # pnnx's names of the types that inputs may have
SCRIPT_INPUT = re.compile(r'ex\.input\("(in(\d+))", ncnn\.Mat\(.*batch_index=(\d+)\)')
SCRIPT_OUTPUT = re.compile(r"\b(out\d+)\.numpy\(batch_index=(\d+)\)")


@dataclass(frozen=True)
class Converted:
    """What pnnx's script says of a network: of each input its name, its place among the model's inputs and the axis of its batch; of each
    output its name and the axis of its batch."""

    inputs: Sequence[tuple[str, int, int]]
    outputs: Sequence[tuple[str, int]]

    @staticmethod
    def read(script: str) -> Converted:
        """Read a script. Raises UnsupportedError if it is not written as expected."""
        inputs = [(m[1], int(m[2]), int(m[3])) for m in SCRIPT_INPUT.finditer(script)]
        outputs = [(m[1], int(m[2])) for m in SCRIPT_OUTPUT.finditer(script)]
        if len(inputs) != script.count("ex.input(") or len(outputs) != script.count("ex.extract(") or not outputs:
            raise UnsupportedError("the script that pnnx writes is of another form: update ncnn and pnnx")
        return Converted(inputs, outputs)


class NcnnPeer:
    """ncnn as a peer. A network uses `threads` threads, and no type narrower than float32."""

    name = "ncnn"
    version = str(ncnn.__version__)
    outputs = "new arrays every run"

    def __init__(self, threads: int) -> None:
        self.threads = threads

    def prepare(self, case: Case, operands: Sequence[Array]) -> PreparedPeer:
        with temporary_folder("svod-pnnx-") as folder:
            arrays = _place_model(case, operands, folder)
            converted = convert(arrays, folder)
            net = self._load(folder)
        arrays = [a.astype(np.int32) if a.dtype == np.int64 else a for a in arrays]     # ncnn has no integers of 64 bits
        given = [(name, arrays[i], axis) for name, i, axis in converted.inputs]
        last: list[Array] = []

        def run() -> None:
            extractor = net.create_extractor()
            for name, array, axis in given:
                extractor.input(name, ncnn.Mat(array, batch_index=axis).clone())
            last[:] = [_extracted(extractor, name, axis) for name, axis in converted.outputs]
        return PreparedPeer(calls(run), lambda: list(last), False)

    def _load(self, folder: Path) -> Any:
        """The network of a folder. Raises UnsupportedError for an operation that ncnn lacks."""
        net = ncnn.Net()
        net.opt.num_threads = self.threads
        net.opt.use_vulkan_compute = False
        for narrow in ("use_fp16_packed", "use_fp16_storage", "use_fp16_arithmetic", "use_bf16_storage", "use_bf16_packed"):
            if hasattr(net.opt, narrow):        # depends on the release
                setattr(net.opt, narrow, False)
        param = folder / "model.ncnn.param"
        missing = missing_layers(param.read_text())
        if missing:
            raise UnsupportedError(f"ncnn has no layer {', '.join(missing)}, which pnnx left in the model")
        if net.load_param(str(param)) or net.load_model(str(folder / "model.ncnn.bin")):
            raise UnsupportedError("ncnn does not load what pnnx made of the model")
        return net


def missing_layers(param: str) -> list[str]:
    """The layers of a network, given by the text of its file, that ncnn lacks. Its lines after the second begin with a layer's type."""
    kinds = dict.fromkeys(line.split()[0] for line in param.splitlines()[2:] if line.strip())
    return [kind for kind in kinds if ncnn.layer_to_index(kind) < 0]


def convert(arrays: Sequence[Array], folder: Path) -> Converted:
    """Convert the model in `folder` for inputs like `arrays`. Raises UnsupportedError if pnnx fails."""
    strange = [str(a.dtype) for a in arrays if str(a.dtype) not in PNNX_TYPES]
    if strange:
        raise UnsupportedError(f"pnnx takes no inputs of {', '.join(dict.fromkeys(strange))}")
    source = next(name for name in ("model.pt", "model.onnx") if (folder / name).exists())
    shapes = ",".join(f"[{','.join(map(str, a.shape))}]{PNNX_TYPES[str(a.dtype)]}" for a in arrays)
    try:
        done = subprocess.run([program(), source, "fp16=0", f"inputshape={shapes}"], cwd=folder, capture_output=True, check=False,
                              stdin=subprocess.DEVNULL, timeout=CONVERT_SECONDS)
    except subprocess.TimeoutExpired:
        raise UnsupportedError(f"pnnx took more than {CONVERT_SECONDS:.0f} s for this model, and was ended") from None
    script = folder / "model_ncnn.py"
    if done.returncode or not script.exists():
        lines = done.stderr.decode(errors="replace").strip().splitlines()
        how = f"the signal {-done.returncode}" if done.returncode < 0 else f"the status {done.returncode}"
        raise UnsupportedError(f"pnnx does not convert this model: it ended with {how}{f': {lines[-1]:.120}' if lines else ''}")
    return Converted.read(script.read_text())


def program() -> str:
    """The program pnnx in its package, which is found without an import: that would import PyTorch."""
    spec = find_spec("pnnx")
    folders = spec.submodule_search_locations if spec is not None else None
    return str(Path(next(iter(folders or ["."]))) / "pnnx")


def _place_model(case: Case, operands: Sequence[Array], folder: Path) -> list[Array]:
    """Write a model into `folder`, as model.pt or model.onnx. Returns its inputs in the order of the graph's."""
    if case.op == "torch":
        with exported(case, "torchscript") as (path, feed):
            path.rename(folder / "model.pt")
            return list(feed.values())
    with model_file(case, operands) as (source, draw):
        model = onnx.load_from_string(source) if isinstance(source, bytes) else onnx.load(source)
    weights = {w.name for w in model.graph.initializer}
    inputs = [i for i in model.graph.input if i.name not in weights]
    del model.graph.input[:]        # old files list the weights among the inputs, and pnnx would ask for their shapes
    model.graph.input.extend(inputs)
    model.ir_version = max(model.ir_version, 4)
    onnx.save(model, folder / "model.onnx")
    drawn: Mapping[str, Array] = draw([(i.name, len(i.type.tensor_type.shape.dim), i.type.tensor_type.elem_type == onnx.TensorProto.FLOAT)
                                       for i in inputs])
    return [np.asarray(drawn[i.name]) for i in inputs]


def _extracted(extractor: Any, name: str, axis: int) -> Array:
    status, value = extractor.extract(name)
    if status:
        raise RuntimeError(f"ncnn ended with the status {status}")
    return np.asarray(value.numpy(batch_index=axis))
