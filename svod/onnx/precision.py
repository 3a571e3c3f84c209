"""Rounding of 16-bit floats: a node is computed in float32 and its results are rounded once.

    x: float16 ─ widened ─ float32 ─ the operator's function, of any number of steps ─ float32 ─ rounded ─ float16

Operators marked `exact` move, choose or compare elements, or round by themselves.

The CPU has no instructions for products of float16. There nodes pass their unrounded results on to later nodes. Only values that leave the
graph or a branch, and results of Casts, are rounded. onnxruntime does the same on the CPU: it casts the operands of nodes without a 16-bit
kernel to float32 and their results back, and removes adjacent pairs of casts. Devices have matrix instructions for 16-bit floats, and
processors have them for bfloat16: there each node's result is rounded.
"""
from __future__ import annotations

from collections.abc import Sequence

from svod.core.ir.dtype import DType, dtypes
from svod.core.ir.uop import UOp
from svod.core.machine.target import HOST
from svod.onnx.registry import OnnxNode, Operator
from svod.onnx.schemas import schema_of
from svod.onnx.values import Value
from svod.tensor import Tensor
from svod.tensor.precision import is_half, rounded, widened


class Halves:
    """Decides for one translation where 16-bit floats are widened and rounded. `device`: the name of the device that computes the CPU's
    tensors; None: the CPU."""

    def __init__(self, device: str | None = None) -> None:
        self._is_host = device is None or device.upper().partition(":")[0] == HOST
        self._unrounded: dict[UOp, Tensor] = {}     # unrounded results, by the graph node of the rounded one

    def computed(self, node: OnnxNode, operator: Operator, operands: Sequence[Value]) -> list[Value]:
        """The results of a node, whose 16-bit operands are widened before if necessary."""
        taken = {i: o for i, o in enumerate(operands) if isinstance(o, Tensor) and is_half(o.dtype)}
        halves = {i: o.dtype for i, o in taken.items()}
        if not self._widens(node, operator, list(taken.values()), halves):
            halves = {}
        results = operator.function(node, *(self._widened(o) if i in halves else o for i, o in enumerate(operands)))
        made = list(results) if isinstance(results, tuple) and not hasattr(results, "_fields") else [results]
        return [self._rounded(r, _kind(node, halves, i)) for i, r in enumerate(made)] if halves else made

    def _widens(self, node: OnnxNode, operator: Operator, taken: Sequence[Tensor], halves: dict[int, DType]) -> bool:
        """Whether an operator's function gets float32 for the 16-bit operands `taken`, and its results are rounded."""
        if operator.raw:
            return False
        if operator.multiplies:     # matrix instructions read rounded operands
            return all(self._is_handed_on(half) for half in taken)
        if operator.exact:          # widening matters only if an earlier node passed on an unrounded value
            return any(half.uop in self._unrounded for half in taken) and _types_follow(node, halves)
        return True

    def _widened(self, half: Tensor) -> Tensor:
        return self._unrounded[half.uop] if half.uop in self._unrounded else widened(half)

    def _is_handed_on(self, half: Tensor) -> bool:
        """Whether later nodes read the unrounded float32 value of this float16 result."""
        return self._is_host and half.dtype is dtypes.float16 and half.device == HOST

    def _rounded(self, result: Value, kind: DType | None) -> Value:
        if kind is None or not isinstance(result, Tensor) or not result.dtype.is_float:
            return result
        half = rounded(result, kind)
        if self._is_handed_on(half) and result.dtype is dtypes.float32:
            self._unrounded[half.uop] = result
        return half


def _kind(node: OnnxNode, halves: dict[int, DType], output: int) -> DType | None:
    """The 16-bit type of an output, if the node's schema gives it the type of a 16-bit operand; None for another type. If the onnx
    package has no schema, the first 16-bit operand decides."""
    schema = schema_of(node.op, node.domain, node.version)
    if schema is None:
        return next(iter(halves.values()))
    inputs, outputs = schema.inputs, schema.outputs
    tied = {inputs[min(i, len(inputs) - 1)].type_str: kind for i, kind in halves.items()}
    return tied.get(outputs[min(output, len(outputs) - 1)].type_str)


def _types_follow(node: OnnxNode, halves: dict[int, DType]) -> bool:
    """Whether a node's schema gives each result the type of one of these operands, or a type that is no float."""
    schema = schema_of(node.op, node.domain, node.version)
    return schema is not None and all(_kind(node, halves, i) is not None or not any("float" in t or "double" in t for t in p.types)
                                      for i, p in enumerate(schema.outputs))
