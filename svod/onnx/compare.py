"""Compares a model's values, node by node, with those of onnxruntime or of the onnx package's reference evaluator."""
from __future__ import annotations

from collections.abc import Mapping
from importlib.util import find_spec
from typing import Any, NamedTuple

import numpy as np
import onnx

from svod.onnx.fallback import RUNTIMES, check_runtime
from svod.onnx.model import Model, load
from svod.onnx.reader import OnnxError, Source
from svod.onnx.registry import Array
from svod.onnx.values import array_of
from svod.tensor import Tensor


class NodeDifference(NamedTuple):
    """The difference in the first output of a node, divided by the largest value; infinite if the shapes differ."""

    name: str
    op: str
    difference: float
    shape: tuple[int, ...]

    def __str__(self) -> str:
        return f"{self.difference:8.1e}  {self.op:24} {'×'.join(map(str, self.shape)) or 'scalar':16} {self.name}"


def compare(model: Model | Source, inputs: Mapping[str, Any], against: str | None = None) -> list[NodeDifference]:
    """The difference for each node that svod computes and that has numeric results, in the order of the nodes. `model`: a Model, or an
    argument of `load`. `against`: "onnxruntime" or "reference"; by default the first that is installed. Both sides return every value of
    the graph, so no fusion hides a difference. Raises OnnxError for a model of 2 GB or more, which other runtimes refuse."""
    check_runtime(against, "against")
    if not isinstance(inputs, Mapping):
        raise OnnxError('compare(model, inputs) takes arrays by the names of the inputs: compare("model.onnx", {"x": x})')
    if not isinstance(model, Model):
        model = load(model)
    runtime = against or (RUNTIMES[0] if find_spec("onnxruntime") is not None else RUNTIMES[1])
    feed = {name: array_of(v) if isinstance(v, Tensor) else v for name, v in model.checked(inputs).items()}
    if model.fallback is not None:
        model(feed)         # the first run finds all nodes that svod cannot compute
    nodes = {o: n for n in model.walk.needed(model.proto.graph, set(model.computed)) for o in list(n.output)[:1] if o}
    names = list(nodes)
    proto = model.walk.arrays.whole(model.proto)
    theirs = values_of(proto, names, feed, runtime)
    found = []
    whole = load(proto, outputs=[n for n in names if n in theirs], dims=model.dims, fallback=model.fallback, config=model.config)
    ours = whole(feed)
    for name, value in zip([n for n in names if n in theirs], ours if isinstance(ours, tuple) else (ours,), strict=True):
        other = theirs[name]
        if isinstance(value, np.ndarray) and isinstance(other, np.ndarray) and other.dtype.kind in "fiub":
            found.append(NodeDifference(name, nodes[name].op_type, relative_difference(value, other), tuple(other.shape)))
    return found


def values_of(proto: onnx.ModelProto, names: list[str], feed: Mapping[str, Array], runtime: str) -> dict[str, Any]:
    """Compute the values `names` with another runtime, after adding them to the outputs of `proto`."""
    have = {o.name for o in proto.graph.output}
    proto.graph.output.extend(onnx.helper.make_empty_tensor_value_info(n) for n in names if n not in have)
    wanted = [o.name for o in proto.graph.output if o.name in names]
    if runtime == "reference":
        from onnx.reference import ReferenceEvaluator
        run = ReferenceEvaluator(proto).run
    else:
        import onnxruntime
        run = onnxruntime.InferenceSession(proto.SerializeToString(), providers=["CPUExecutionProvider"]).run
    return dict(zip(wanted, run(wanted, dict(feed)), strict=True))


def relative_difference(ours: Array, theirs: Array) -> float:
    """The difference max |a - b| / max |b| in float64; infinite if the shapes differ, or if only one array has a NaN or an infinity at a
    position."""
    a, b = np.asarray(ours, np.float64), np.asarray(theirs, np.float64)
    if a.shape != b.shape:
        return float("inf")
    with np.errstate(invalid="ignore"):
        off = np.where((a == b) | (np.isnan(a) & np.isnan(b)), 0.0, np.abs(a - b))
    scale = np.abs(b[np.isfinite(b)]).max(initial=1e-30)
    return float(np.nan_to_num(off / scale, nan=np.inf, posinf=np.inf).max(initial=0.0))
