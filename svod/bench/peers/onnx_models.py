"""ONNX models for the libraries that read them: cases of the suites as graphs, the files of the suite onnx, and exported modules.

    build_model(case, operands)         a kernel, or a model of experiments/models, from onnx.helper; weights are initializers
    exported(case, form)                a PyTorch module as a file, with its inputs
    model_file(case, operands)          a whole model of any suite
"""
from __future__ import annotations

import math
import subprocess
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, Literal

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

from svod.bench.peers import Array
from svod.bench.peers.models import forward
from svod.bench.suites.cases import Case, load_model
from svod.config import environment_with_svod
from svod.errors import UnsupportedError
from svod.system.process.directories import temporary_folder
from svod.system.process.program import python

EXPORT_SECONDS = 180.0
EXPORT_FORMS = {"onnx": ("model.onnx", "torch.onnx.export"), "torchscript": ("model.pt", "torch.jit.trace")}       # file and function
OPSET, IR_VERSION = 20, 9       # opset 20 is the first with Gelu
TYPES = {"float32": TensorProto.FLOAT, "float16": TensorProto.FLOAT16, "bfloat16": TensorProto.BFLOAT16, "int8": TensorProto.INT8,
         "int32": TensorProto.INT32}

Draw = Callable[[Sequence[tuple[str, int, bool]]], Mapping[str, Array]]     # makes the inputs from their names, ranks, and is-float32


@contextmanager
def exported(case: Case, form: Literal["onnx", "torchscript"] = "onnx") -> Iterator[tuple[Path, dict[str, Array]]]:
    """A file of a PyTorch module, and its inputs in the order of the graph's. A process writes it that has ended when the context begins;
    the file is removed when it ends. Raises UnsupportedError if the module cannot be exported."""
    with temporary_folder("svod-export-") as folder:
        command = [python(), "-P", "-m", "svod.bench.peers.torch_export", case.name, str(case.options["seed"]), str(folder), form]
        done = subprocess.run(command, env=environment_with_svod(), capture_output=True, text=True, check=False, timeout=EXPORT_SECONDS)
        if done.returncode:
            lines = done.stderr.strip().splitlines()
            raise UnsupportedError(f"{EXPORT_FORMS[form][1]}: {lines[-1] if lines else f'status {done.returncode}':.160}")
        with np.load(folder / "inputs.npz") as inputs:
            feed = dict(inputs)
        yield folder / EXPORT_FORMS[form][0], feed


@contextmanager
def model_file(case: Case, operands: Sequence[Array]) -> Iterator[tuple[str | bytes, Draw]]:
    """The ONNX file of a whole model, by path or content, and the function that draws its inputs. A path is valid within the context.
    Raises UnsupportedError for a module that cannot be exported."""
    if case.op == "onnx":
        yield case.options["source"], case.options["draw"]
    elif case.op == "torch":
        with exported(case) as (path, feed):
            yield str(path), lambda wanted: {name: feed[name] for name, _, _ in wanted}
    else:
        yield build_model(case, operands).SerializeToString(), lambda wanted: {f"x{i}": a for i, a in enumerate(operands)}


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
        raise UnsupportedError(f"{case.op} is not written for ONNX")
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
