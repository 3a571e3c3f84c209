"""Nodes whose operands are all known are computed while the graph is walked, in NumPy: shapes, axes, branches.

The common ones are below, as they stand in every exported model by the hundred; the others are computed by the reference evaluator of
the onnx package. Layers are not, as nothing that they make decides about a shape, and the reference knows only the newest form of many.
"""
from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import onnx
from onnx.reference import ReferenceEvaluator

from svod.errors import ShapeError, UnsupportedError
from svod.onnx.registry import Array, Node, Operator
from svod.onnx.values import has_dims

#: Operators that are never computed here: what they give depends on more than their operands, or they hold graphs.
NEVER = frozenset({"If", "Loop", "Scan", "SequenceMap", "RandomNormal", "RandomUniform", "RandomNormalLike", "RandomUniformLike",
                   "Bernoulli", "Multinomial", "ConstantOfShape", "Constant"})

#: Layers: whole files of operators, and single ones.
_LAYER_FILES = frozenset({"attention", "convolution", "norms", "quantised", "recurrent", "resample", "signal"})
_LAYERS = frozenset({"Softmax", "LogSoftmax", "Hardmax", "MatMulInteger", "ReduceSumSquare", "ReduceLogSumExp", "GlobalAveragePool",
                     "GlobalLpPool", "GlobalMaxPool", "NegativeLogLikelihoodLoss", "SoftmaxCrossEntropyLoss"})


def may_decide(operator: Operator) -> bool:
    """Whether an operator is computed here where its operands are known."""
    file = operator.function.__module__.rpartition(".")[2]
    return operator.name not in NEVER and operator.name not in _LAYERS and file not in _LAYER_FILES


def _axes(node: Node, operands: Sequence[Array | None]) -> list[int] | None:
    given = node.get("axes") if len(operands) < 2 or operands[1] is None else operands[1]
    return None if given is None else [int(a) for a in np.atleast_1d(given)]


def _unsqueeze(node: Node, x: Array, *rest: Array | None) -> Array:
    axes = _axes(node, (x, *rest)) or []
    rank = x.ndim + len(axes)
    return np.expand_dims(x, tuple(a % rank for a in axes))


def _squeeze(node: Node, x: Array, *rest: Array | None) -> Array:
    axes = _axes(node, (x, *rest))
    return np.squeeze(x, None if axes is None else tuple(axes))


def _slice(node: Node, x: Array, *rest: Array | None) -> Array:
    if rest:
        starts, ends = rest[0], rest[1]
        axes = rest[2] if len(rest) > 2 and rest[2] is not None else None
        steps = rest[3] if len(rest) > 3 and rest[3] is not None else None
    else:
        starts, ends, axes, steps = node.need("starts"), node.need("ends"), node.get("axes"), None
    assert starts is not None and ends is not None
    index: list[Any] = [slice(None)] * x.ndim
    for i, (start, end) in enumerate(zip(starts, ends, strict=True)):
        axis, step = int(axes[i]) if axes is not None else i, int(steps[i]) if steps is not None else 1
        first, last, n = int(start), int(end), x.shape[axis]
        if step < 0 and last < -n:
            index[axis] = slice(first, None, step)
        else:
            index[axis] = slice(first, last, step)
    return np.asarray(x[tuple(index)])


def _cast(node: Node, x: Array) -> Array:
    if x.dtype == object and onnx.TensorProto.DataType.Name(node.need("to")) in ("INT64", "INT32"):
        return x
    return np.asarray(x.astype(onnx.helper.tensor_dtype_to_np_dtype(node.need("to"))))


def _divide(node: Node, a: Array, b: Array) -> Array:
    if object in (a.dtype, b.dtype):
        return np.asarray(a // b)
    if np.issubdtype(a.dtype, np.integer):
        return np.asarray(np.trunc(a / b) if np.abs(a).max(initial=0) < 1 << 52 else a // b).astype(a.dtype)
    return np.asarray(a / b)


def _reshape(node: Node, x: Array, shape: Array | None = None) -> Array:
    wanted = node.need("shape") if shape is None else shape
    sizes = [x.shape[i] if n == 0 and not node.get("allowzero", 0) else int(n) for i, n in enumerate(wanted)]
    return x.reshape(sizes)


def _gather(node: Node, x: Array, index: Array) -> Array:
    return np.asarray(np.take(x, index, axis=node.get("axis", 0)))


COMMON: dict[str, Callable[..., Any]] = {
    "Identity": lambda node, x: x, "Gather": _gather, "Unsqueeze": _unsqueeze, "Squeeze": _squeeze, "Slice": _slice, "Cast": _cast,
    "Concat": lambda node, *xs: np.concatenate(xs, node.get("axis", 1)), "Reshape": _reshape, "Div": _divide,
    "Add": lambda node, a, b: a + b, "Sub": lambda node, a, b: a - b, "Mul": lambda node, a, b: a * b,
    "Equal": lambda node, a, b: np.equal(a, b), "Less": lambda node, a, b: np.less(a, b), "Greater": lambda node, a, b: np.greater(a, b),
    "Not": lambda node, x: np.logical_not(x), "And": lambda node, a, b: np.logical_and(a, b), "Or": lambda node, a, b: np.logical_or(a, b),
    "Where": lambda node, c, a, b: np.where(c, a, b), "Neg": lambda node, x: -x, "Floor": lambda node, x: np.floor(x),
    "Ceil": lambda node, x: np.ceil(x), "Expand": lambda node, x, shape: x * np.ones([int(n) for n in shape], x.dtype),
    "Transpose": lambda node, x: np.transpose(x, node.get("perm")),
    "Range": lambda node, a, b, c: np.arange(float(a), float(b), float(c)).astype(a.dtype)}


def _of_dims(node: Node, own: Callable[..., Any] | None, operands: Sequence[Array | None]) -> Array:
    """What a node computes from sizes that depend on Variables."""
    try:
        if own is None or node.op == "Range":
            raise ShapeError("it is not computed from sizes that differ")
        made = np.asarray(own(node, *operands))
    except (ShapeError, TypeError, ValueError) as e:
        raise UnsupportedError(f"{node} of a size that differs from run to run: {e}") from e
    return made if made.dtype != object or has_dims(made) else made.astype(np.int64)


def evaluate(node: Node, proto: onnx.NodeProto, operands: Sequence[Array | None], opsets: dict[str, int]) -> list[Array | None]:
    """The results of a node with known operands. Raises UnsupportedError where the reference lacks it."""
    own = COMMON.get(node.op) if node.domain == "" and "broadcast" not in node.attributes else None
    if any(o is not None and o.dtype == object for o in operands):
        return [_of_dims(node, own, operands)]
    if own is not None:
        return [np.asarray(own(node, *operands))]
    names = [n for n in proto.input if n]
    values = dict(zip(names, (o for o in operands if o is not None), strict=True))
    graph = onnx.helper.make_graph([proto], "known", [onnx.helper.make_empty_tensor_value_info(n) for n in dict.fromkeys(names)],
                                   [onnx.helper.make_empty_tensor_value_info(o) for o in proto.output if o])
    model = onnx.helper.make_model(graph, opset_imports=[onnx.helper.make_opsetid(d, v) for d, v in opsets.items()])
    try:
        results = ReferenceEvaluator(model).run(None, values)
    except Exception as e:  # the reference raises whatever its NumPy code raises
        raise UnsupportedError(f"{node} cannot be computed from known values: {e}") from e
    # the reference makes numbers of arrays without axes
    found: Iterator[Any] = (np.asarray(r) if isinstance(r, np.generic) else r for r in results)
    return [next(found) if o else None for o in proto.output]
