"""ONNX Runtime on the CPU. onnx.helper makes a model of the case, and a session optimises it; inputs and outputs are bound once.

Weights become initializers, which the session may pack.
"""
from __future__ import annotations

import math
import subprocess
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
from onnx import TensorProto, helper, numpy_helper

from svod.bench.peers import Array, PreparedPeer, calls
from svod.bench.peers.models import forward
from svod.bench.suites.cases import Case, load_model
from svod.config import environment_with_svod
from svod.core.graph.buffer import bfloat16_bits_to_float32
from svod.errors import UnsupportedError
from svod.system.process.directories import temporary_folder
from svod.system.process.program import python

EXPORT_SECONDS = 180.0
OPSET, IR_VERSION = 20, 9       # opset 20 is the first with Gelu
TYPES = {"float32": TensorProto.FLOAT, "float16": TensorProto.FLOAT16, "bfloat16": TensorProto.BFLOAT16, "int8": TensorProto.INT8,
         "int32": TensorProto.INT32}
NOT_THERE = ("NOT_IMPLEMENTED", "Type Error", "INVALID_GRAPH")      # words in a session's error that mean that an operation has no kernel


class OnnxRuntimePeer:
    """ONNX Runtime as a peer. An operation uses `threads` threads. They stop spinning when a run ends, so that they do not take cores
    from the next contestant."""

    name = "onnxruntime"
    version = str(ort.__version__)
    outputs = "bound once, reused"

    def __init__(self, threads: int) -> None:
        self.threads = threads
        ort.set_default_logger_severity(4)

    def prepare(self, case: Case, operands: Sequence[Array]) -> PreparedPeer:
        if case.op == "onnx":
            return self._prepare_file(case.options["source"], case.options["draw"])
        if case.op == "torch":
            return self._prepare_module(case)
        session = self._session(build_model(case, operands).SerializeToString(), spinning=False)
        binding = session.io_binding()
        kept = []
        for i, (a, o) in enumerate(zip(operands, case.operands, strict=True)):
            if not o.weight:
                binding.bind_input(f"x{i}", "cpu", 0, TYPES[o.dtype], a.shape, a.ctypes.data)
                kept.append(a)
        out = np.zeros(case.out_shape, np.uint16 if case.out_dtype == "bfloat16" else case.out_dtype)
        kept.append(out)
        binding.bind_output("y", "cpu", 0, TYPES[case.out_dtype], out.shape, out.ctypes.data)

        def run() -> None:
            session.run_with_iobinding(binding)
            kept[:1] = kept[:1]         # a reference to `kept`, so that this closure keeps the bound arrays alive
        return PreparedPeer(calls(run), lambda: bfloat16_bits_to_float32(out) if case.out_dtype == "bfloat16" else out, True)

    def _prepare_file(self, source: str | bytes, draw: Callable[[Any], Mapping[str, Array]]) -> PreparedPeer:
        """A session of a file, called as its users do: arrays in, new arrays out. `draw` makes the inputs from their names, ranks and
        types."""
        session = self._session(source, spinning=True)
        feed = draw([(i.name, len(i.shape), i.type == "tensor(float)") for i in session.get_inputs()])
        last: list[Any] = []

        def run() -> None:
            last[:] = session.run(None, feed)
        return PreparedPeer(calls(run), lambda: list(last), False)

    def _prepare_module(self, case: Case) -> PreparedPeer:
        """A PyTorch module, exported by a process that has ended when the session runs. Raises UnsupportedError if it cannot be
        exported."""
        with temporary_folder("svod-export-") as folder:
            done = subprocess.run([python(), "-P", "-m", "svod.bench.peers.torch_export", case.name, str(case.options["seed"]),
                                   str(folder)], env=environment_with_svod(), capture_output=True, text=True, check=False,
                                  timeout=EXPORT_SECONDS)
            if done.returncode:
                lines = done.stderr.strip().splitlines()
                raise UnsupportedError(f"torch.onnx.export: {lines[-1] if lines else f'status {done.returncode}':.160}")
            with np.load(Path(folder) / "inputs.npz") as inputs:
                feed = dict(inputs)
            return self._prepare_file(str(Path(folder) / "model.onnx"), lambda wanted: {name: feed[name] for name, _, _ in wanted})

    def _session(self, model: str | bytes, *, spinning: bool) -> Any:
        """A session of a file, given by path or content. `spinning`: whether its threads spin between runs, as is the default."""
        options = ort.SessionOptions()
        options.intra_op_num_threads = self.threads
        options.inter_op_num_threads = 1
        options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_ENABLE_ALL
        options.log_severity_level = 4
        if not spinning:
            options.add_session_config_entry("session.force_spinning_stop", "1")
        try:
            return ort.InferenceSession(model, options, providers=["CPUExecutionProvider"])
        except Exception as e:      # the library's own errors have no common base class
            text = " ".join(str(e).split())
            if any(word in text for word in NOT_THERE):
                raise UnsupportedError(f"ONNX Runtime does not run this on the CPU: {text:.120}") from None
            raise


def build_model(case: Case, operands: Sequence[Array]) -> Any:
    """The ONNX model of a case, with inputs x0, x1, … and output y. Raises UnsupportedError for an operation without an ONNX version."""
    graph = _Graph(case.operands[0].shape)
    names = []
    for i, (a, o) in enumerate(zip(operands, case.operands, strict=True)):
        if o.weight:
            names.append(graph.weight(a))
        else:
            graph.inputs.append(helper.make_tensor_value_info(f"x{i}", TYPES[o.dtype], o.shape))
            names.append(f"x{i}")
    if case.op == "model":
        result = forward(graph, case.options["script"], load_model(case.options["script"], case.options["kind"]), names[0])
    elif case.op in OPERATIONS:
        result = OPERATIONS[case.op](graph, case, *names)
    else:
        raise UnsupportedError(f"{case.op} is not written for ONNX Runtime")
    graph.nodes[-1].output[0] = "y"
    assert result == graph.last
    y = helper.make_tensor_value_info("y", TYPES[case.out_dtype], case.out_shape)
    made = helper.make_graph(graph.nodes, case.name, graph.inputs, [y], graph.initializers)
    return helper.make_model(made, opset_imports=[helper.make_opsetid("", OPSET)], ir_version=IR_VERSION)


class _Graph:
    """An ONNX graph: nodes in the order they run; values are names. It also implements the `Layers` of models."""

    def __init__(self, shape: tuple[int, ...]) -> None:
        self.shape = shape              # the shape of x0
        self.inputs: list[Any] = []
        self.nodes: list[onnx.NodeProto] = []
        self.initializers: list[onnx.TensorProto] = []
        self.last = ""

    def weight(self, array: Array | np.float32) -> str:
        name = f"w{len(self.initializers)}"
        self.initializers.append(numpy_helper.from_array(np.ascontiguousarray(array), name))
        return name

    def node(self, kind: str, *inputs: str, outputs: int = 1, **attributes: Any) -> str:
        return self.node_of_many(kind, *inputs, outputs=outputs, **attributes)[0]

    def node_of_many(self, kind: str, *inputs: str, outputs: int, **attributes: Any) -> list[str]:
        names = [f"v{len(self.nodes)}_{i}" for i in range(outputs)]
        self.nodes.append(helper.make_node(kind, inputs, names, **attributes))
        self.last = names[0]
        return names

    def linear(self, x: str, weight: Array, bias: Array) -> str:
        return self.node("Add", self.node("MatMul", x, self.weight(weight.T)), self.weight(bias))

    def conv2d(self, x: str, weight: Array, stride: int, padding: int) -> str:
        return self.node("Conv", x, self.weight(weight), strides=[stride] * 2, pads=[padding] * 4)

    def batch_norm(self, x: str, mean: Array, variance: Array, gain: Array, offset: Array, eps: float) -> str:
        return self.node("BatchNormalization", x, *map(self.weight, (gain, offset, mean, variance)), epsilon=eps)

    def layer_norm(self, x: str, gain: Array, offset: Array, eps: float) -> str:
        return self.node("LayerNormalization", x, self.weight(gain), self.weight(offset), axis=-1, epsilon=eps)

    def relu(self, x: str) -> str:
        return self.node("Relu", x)

    def gelu(self, x: str, approximate: str) -> str:
        return self.node("Gelu", x, approximate=approximate)

    def softmax(self, x: str) -> str:
        return self.node("Softmax", x, axis=-1)

    def add(self, x: str, y: str) -> str:
        return self.node("Add", x, y)

    def max_pool2d(self, x: str, kernel: int, stride: int, padding: int) -> str:
        return self.node("MaxPool", x, kernel_shape=[kernel] * 2, strides=[stride] * 2, pads=[padding] * 4)

    def spatial_mean(self, x: str) -> str:
        return self.node("Flatten", self.node("GlobalAveragePool", x))

    def split(self, x: str, parts: int) -> list[str]:
        return self.node_of_many("Split", x, outputs=parts, axis=-1, num_outputs=parts)

    def attention(self, query: str, key: str, value: str, heads: int, width: int, causal: bool) -> str:
        def apart(x: str, order: Sequence[int]) -> str:
            return self.node("Transpose", self.node("Reshape", x, self.weight(np.array([0, 0, heads, -1]))), perm=order)
        q, k, v = apart(query, (0, 2, 1, 3)), apart(key, (0, 2, 3, 1)), apart(value, (0, 2, 1, 3))
        scores = self.node("Mul", self.node("MatMul", q, k), self.weight(np.float32(1 / math.sqrt(width))))
        if causal:
            length = self.shape[1]
            scores = self.node("Add", scores, self.weight(np.triu(np.full((length, length), -np.inf, np.float32), 1)))
        together = self.node("Transpose", self.node("MatMul", self.softmax(scores), v), perm=(0, 2, 1, 3))
        return self.node("Reshape", together, self.weight(np.array([0, 0, -1])))


def _reduce(kind: str, g: _Graph, case: Case, x: str) -> str:
    return g.node(kind, x, g.weight(np.array([case.options["axis"]])), keepdims=0)


def _conv2d(g: _Graph, case: Case, x: str, w: str) -> str:
    o = case.options
    return g.node("Conv", x, w, strides=[o["stride"]] * 2, pads=[o["padding"]] * 4, group=o["groups"])


def _number(g: _Graph, case: Case, value: float) -> str:
    """A constant of a case's dtype, as an initializer."""
    return g.weight(np.asarray(value, "float16" if case.dtype == "float16" else "float32"))


def _rms_norm(g: _Graph, case: Case, x: str, gain: str) -> str:
    mean = g.node("ReduceMean", g.node("Mul", x, x), g.weight(np.array([-1])), keepdims=1)
    return g.node("Mul", g.node("Div", x, g.node("Sqrt", g.node("Add", mean, _number(g, case, case.options["eps"])))), gain)


def _attention(g: _Graph, case: Case, q: str, k: str, v: str) -> str:
    scores = g.node("MatMul", q, g.node("Transpose", k, perm=(0, 1, 3, 2)))
    scaled = g.node("Mul", scores, _number(g, case, 1 / math.sqrt(case.operands[0].shape[-1])))
    return g.node("MatMul", g.node("Softmax", scaled, axis=-1), v)


OPERATIONS: Mapping[str, Callable[..., str]] = {
    "matmul": lambda g, case, a, b: g.node("MatMulInteger" if case.dtype == "int8" else "MatMul", a, b),
    "linear_gelu": lambda g, case, x, w, b: g.node("Gelu", g.node("Gemm", x, w, b, transB=1)),
    "conv2d": _conv2d,
    "softmax": lambda g, case, x: g.node("Softmax", x, axis=-1),
    "layer_norm": lambda g, case, x, gain, offset: g.node("LayerNormalization", x, gain, offset, axis=-1, epsilon=case.options["eps"]),
    "rms_norm": _rms_norm,
    "attention": _attention,
    "sum": partial(_reduce, "ReduceSum"),
    "max": partial(_reduce, "ReduceMax"),
    "max_pool2d": lambda g, case, x: g.max_pool2d(x, *(case.options[k] for k in ("kernel", "stride", "padding"))),
    "gelu": lambda g, case, x: g.node("Gelu", x),
    "axpy": lambda g, case, x, y: g.node("Add", g.node("Mul", x, g.weight(np.float32(case.options["a"]))), y),
    "transpose": lambda g, case, x: g.node("Transpose", x, perm=(1, 0)),
    "heads_first": lambda g, case, x: g.node("Transpose", x, perm=(1, 0, 2)),
    "cast": lambda g, case, x: g.node("Cast", x, to=TYPES[case.options["to"]]),
}
