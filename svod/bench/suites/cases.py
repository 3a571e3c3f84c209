"""A benchmark case as data (its operation, its operands, its cost as a direct loop), and a function for each kind of case.

A case names its operation: `reference.py` computes it in NumPy, each file of `peers/` with its library, and `build` with svod. Operands are
drawn from a seed; every contestant gets the same memory, or a copy with the same bits. A weight is a constant of a model: a contestant may
pack it before the timing starts (svod does, and ONNX Runtime gets it as an initializer).
"""
from __future__ import annotations

import importlib
import math
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal

import numpy as np

from svod.core.graph.buffer import aligned_empty, float32_to_bfloat16_bits
from svod.core.ir.dtype import BY_NAME
from svod.errors import UnsupportedError

Array = np.ndarray[Any, Any]
Fill = Literal["normal", "positive", "integers"]

MODELS_DIR = Path(__file__).resolve().parents[3] / "experiments" / "models"
# the reference library of cases that each library runs in a separate process, by operation (also the suite's name)
REFERENCE = {"onnx": "onnxruntime", "torch": "torch", "blocks": "torch"}
# largest allowed difference, divided by the largest output; integers must be exact
TOLERANCE = {"float64": 1e-10, "float32": 1e-4, "float16": 2e-3, "bfloat16": 1.5e-2}

LOWER_TOLERANCE = 0.05      # the same for a whole model that a library computes in a type of lower precision than the model's


@dataclass(frozen=True)
class CaseOperand:
    """An operand of a case. `fill` is normal, positive (uniform in ½ … 1½, so that long sums have a meaningful relative error) or
    integers from -127 to 127."""

    shape: tuple[int, ...]
    dtype: str = "float32"
    weight: bool = False
    fill: Fill = "normal"

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * BY_NAME[self.dtype].itemsize

    def draw(self, rng: np.random.Generator) -> Array:
        """Draw random values, in 64-byte aligned memory; bfloat16 as uint16 with its bits."""
        kind = BY_NAME[self.dtype]
        out = aligned_empty(math.prod(self.shape), kind).reshape(self.shape)
        if self.fill == "integers":
            out[...] = rng.integers(-127, 128, self.shape)
            return out
        if self.fill == "positive":
            values = rng.random(self.shape, np.float32) + np.float32(0.5)
        else:
            values = rng.standard_normal(self.shape, np.float32)
        out[...] = float32_to_bfloat16_bits(values) if self.dtype == "bfloat16" else values
        return out

    def __str__(self) -> str:
        return "×".join(map(str, self.shape)) or "scalar"


@dataclass(frozen=True)
class Case:
    """One benchmark. `build(*operands)` computes it with svod: a function of Tensors that uses only their methods. `flops`: of a direct
    loop nest, where a multiply-add counts as two and a transcendental function as one; 0 for models, for which svod's plan gives the
    number. `neighbour`: a case of round extents whose rate is compared with this one's."""

    name: str
    title: str
    suite: str
    group: str
    op: str
    operands: tuple[CaseOperand, ...]
    out_shape: tuple[int, ...]
    out_dtype: str
    flops: float
    build: Callable[..., Any]
    options: Mapping[str, Any] = field(default_factory=lambda: MappingProxyType({}))
    neighbour: Case | None = None

    @property
    def dtype(self) -> str:
        """The dtype of the first operand; for a whole model, the dtype of its output."""
        return self.operands[0].dtype if self.operands else self.out_dtype

    @property
    def alone(self) -> bool:
        """Whether each library runs the case in a separate process, which draws the operands itself."""
        return self.op in REFERENCE

    @property
    def kinds(self) -> tuple[str, ...]:
        """What the case is to libraries (`Library.suites`): "kernels" if libraries run it in one process, and its operation."""
        return (self.op,) if self.alone else ("kernels", self.op)

    @property
    def limit(self) -> float | None:
        """The multiple of the fastest library's time above which svod is too slow; the case is timed until that is decided. None: no
        limit."""
        return self.options.get("limit")

    @property
    def bytes_read(self) -> int:
        return sum(o.nbytes for o in self.operands)

    @property
    def bytes_written(self) -> int:
        return math.prod(self.out_shape) * BY_NAME[self.out_dtype].itemsize

    @property
    def work(self) -> float:
        """The amount of work in a rate: flops, or bytes for a case without flops."""
        return self.flops or float(self.bytes_read + self.bytes_written)

    @property
    def shapes(self) -> str:
        return ", ".join(map(str, self.operands))

    @property
    def tolerance(self) -> float:
        """Largest allowed difference to the reference, divided by the largest value."""
        given: float | None = self.options.get("tolerance")
        return TOLERANCE.get(self.dtype, 0.0) if given is None else given

    def draw(self, seed: int = 0) -> list[Array]:
        """Draw the operands' values, which depend on the case's name and the seed only."""
        rng = np.random.default_rng([seed, *self.name.encode()])
        return [o.draw(rng) for o in self.operands]


# -- makers of cases ----------------------------------------------------------------------------------

def matmul(name: str, title: str, a: tuple[int, ...], b: tuple[int, ...], dtype: str = "float32", *, suite: str = "core",
           group: str = "gemm") -> Case:
    """A product a @ b by NumPy's rules. A product of int8 is exact, in int32."""
    fill: Fill = "integers" if dtype == "int8" else "normal"
    out = a[:-1] + b[-1:] if len(b) > 1 else a[:-1]
    flops = 2 * math.prod(a) * (b[-1] if len(b) > 1 else 1)
    operands = CaseOperand(a, dtype, fill=fill), CaseOperand(b, dtype, fill=fill)
    if dtype == "int8":
        return Case(name, title, suite, group, "matmul", operands, out, "int32", flops, lambda x, y: x.cast("int32") @ y.cast("int32"))
    return Case(name, title, suite, group, "matmul", operands, out, dtype, flops, lambda x, y: x @ y)


def linear_gelu(name: str, title: str, m: int, k: int, n: int) -> Case:
    """A linear layer with GELU, gelu(x @ weightᵀ + bias), on operands (m, k), (n, k), (n,)."""
    operands = CaseOperand((m, k)), CaseOperand((n, k), weight=True), CaseOperand((n,), weight=True)
    return Case(name, title, "core", "gemm", "linear_gelu", operands, (m, n), "float32", 2 * m * n * k + 6 * m * n,
                lambda x, w, b: x.linear(w, b).gelu())


def conv2d(name: str, title: str, channels: int, outputs: int, kernel: int, size: int, stride: int = 1, groups: int = 1, *,
           dtype: str = "float32", suite: str = "core") -> Case:
    """A convolution of one image, padded by half the kernel: (1, channels, size, size), (outputs, channels / groups, kernel, kernel)."""
    pad = kernel // 2
    out = (size + 2 * pad - kernel) // stride + 1
    weight = (outputs, channels // groups, kernel, kernel)
    operands = CaseOperand((1, channels, size, size), dtype), CaseOperand(weight, dtype, weight=True)
    return Case(name, title, suite, "conv", "conv2d", operands, (1, outputs, out, out), dtype, 2 * math.prod(weight) * out * out,
                lambda x, w: x.conv2d(w, stride=stride, padding=pad, groups=groups), {"stride": stride, "padding": pad, "groups": groups})


def softmax(name: str, title: str, rows: int, columns: int, *, dtype: str = "float32", suite: str = "core") -> Case:
    """Softmax over the last axis."""
    shape = (rows, columns)
    return Case(name, title, suite, "rows", "softmax", (CaseOperand(shape, dtype),), shape, dtype, 5 * rows * columns,
                lambda x: x.softmax(-1))


def layer_norm(name: str, title: str, rows: int, columns: int, *, dtype: str = "float32", suite: str = "core") -> Case:
    """Layer normalisation over the last axis, with gain and offset."""
    operands = CaseOperand((rows, columns), dtype), CaseOperand((columns,), dtype, True), CaseOperand((columns,), dtype, True)
    return Case(name, title, suite, "rows", "layer_norm", operands, (rows, columns), dtype, 7 * rows * columns,
                lambda x, g, b: x.layer_norm(columns, g, b, 1e-5), {"eps": 1e-5})


def rms_norm(name: str, title: str, rows: int, columns: int, *, dtype: str = "float32", suite: str = "core") -> Case:
    """RMS normalisation over the last axis, with gain."""
    operands = CaseOperand((rows, columns), dtype), CaseOperand((columns,), dtype, True)
    return Case(name, title, suite, "rows", "rms_norm", operands, (rows, columns), dtype, 4 * rows * columns,
                lambda x, g: x.rms_norm(columns, g, 1e-5), {"eps": 1e-5})


def attention(name: str, title: str, heads: int, length: int, width: int, *, dtype: str = "float32", suite: str = "core") -> Case:
    """Attention softmax(q kᵀ / √width) v without a mask, on three operands of (1, heads, length, width)."""
    shape = (1, heads, length, width)
    flops = 4 * heads * length * length * width + 5 * heads * length * length
    return Case(name, title, suite, "rows", "attention", (CaseOperand(shape, dtype),) * 3, shape, dtype, flops,
                lambda q, k, v: q.scaled_dot_product_attention(k, v))


def reduction(name: str, title: str, op: Literal["sum", "max"], shape: tuple[int, ...], axis: int, *, suite: str = "core") -> Case:
    """Sum or maximum over one axis."""
    out = shape[:axis] + shape[axis + 1:]
    return Case(name, title, suite, "reduction", op, (CaseOperand(shape, fill="positive"),), out, "float32", math.prod(shape),
                lambda x: x.sum(axis) if op == "sum" else x.max(axis), {"axis": axis})


def max_pool2d(name: str, title: str, channels: int, size: int) -> Case:
    """Max pooling of 3×3 with stride 2 and padding 1, as in ResNet."""
    out = (size + 2 - 3) // 2 + 1
    return Case(name, title, "core", "reduction", "max_pool2d", (CaseOperand((1, channels, size, size)),), (1, channels, out, out),
                "float32", 9 * channels * out * out, lambda x: x.max_pool2d(3, stride=2, padding=1),
                {"kernel": 3, "stride": 2, "padding": 1})


def gelu(name: str, title: str, count: int) -> Case:
    """GELU x · Φ(x), with the error function."""
    return Case(name, title, "core", "elementwise", "gelu", (CaseOperand((count,)),), (count,), "float32", 5 * count, lambda x: x.gelu())


def axpy(name: str, title: str, count: int) -> Case:
    """The elementwise expression 2.5 x + y."""
    return Case(name, title, "core", "elementwise", "axpy", (CaseOperand((count,)), CaseOperand((count,))), (count,), "float32", 2 * count,
                lambda x, y: x * 2.5 + y, {"a": 2.5})


def transpose(name: str, title: str, rows: int, columns: int, *, suite: str = "core") -> Case:
    """A transposed copy of a matrix."""
    return Case(name, title, suite, "elementwise", "transpose", (CaseOperand((rows, columns)),), (columns, rows), "float32", 0.0,
                lambda x: x.transpose(0, 1).contiguous())


def heads_first(name: str, title: str, length: int, heads: int, width: int, *, suite: str) -> Case:
    """A copy of (length, heads, width) as (heads, length, width), the layout of attention's operands: whole rows move."""
    return Case(name, title, suite, "elementwise", "heads_first", (CaseOperand((length, heads, width)),), (heads, length, width), "float32",
                0.0, lambda x: x.transpose(0, 1).contiguous())


def cast(name: str, title: str, rows: int, columns: int, to: str, *, suite: str) -> Case:
    """A conversion of float32 to another type."""
    shape = (rows, columns)
    return Case(name, title, suite, "elementwise", "cast", (CaseOperand(shape),), shape, to, 0.0, lambda x: x.cast(to),
                {"to": to, "tolerance": TOLERANCE[to]})


def model(name: str, title: str, script: str, kind: str, shape: tuple[int, ...], out_shape: tuple[int, ...]) -> Case:
    """A model of experiments/models with its weights as constants, on the input of its script."""
    return Case(name, title, "models", "models", "model", (CaseOperand(shape),), out_shape, "float32", 0.0,
                lambda x: load_model(script, kind)(x), {"script": script, "kind": kind})


def whole_model(name: str, title: str, suite: Literal["onnx", "torch", "blocks"], group: str, tolerance: float, **options: Any) -> Case:
    """A whole model in the form that each library loads: an ONNX file, or a PyTorch module."""
    return Case(name, title, suite, group, suite, (), (), "float32", 0.0, _from_elsewhere, {"tolerance": tolerance, **options})


def _from_elsewhere(*operands: Any) -> Any:
    raise UnsupportedError("an ONNX file or a PyTorch module is no expression of tensors")


_models: dict[str, Any] = {}


def load_model(script: str, kind: str) -> Any:
    """The model object: callable with a Tensor, with a NumPy `reference`. Raises UnsupportedError if experiments/models is missing."""
    if script not in _models:
        if not (MODELS_DIR / f"{script}.py").exists():
            raise UnsupportedError(f"the suite 'models' runs the scripts of experiments/models; {MODELS_DIR} does not have {script}.py: "
                                   "run svod-bench from a checkout")
        sys.path.insert(0, str(MODELS_DIR))
        try:
            _models[script] = getattr(importlib.import_module(script), kind)()
        finally:
            sys.path.remove(str(MODELS_DIR))
    return _models[script]
