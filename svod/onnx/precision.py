"""In which type a node of 16-bit floats is computed, and where it is rounded: in float32, and once, at its end.

onnxruntime does the same on a CPU: it casts the operands of what has no kernel for 16 bits to float32, and the results back.

    x: float16 ─ widened ─ float32 ─ the operator's function, of any number of steps ─ float32 ─ rounded ─ float16

Nodes inside of nodes, such as those of a loop's body, are rounded each. Operators that are `exact` see to it themselves.
"""
from __future__ import annotations

from collections.abc import Sequence

from svod.core.ir.dtype import DType
from svod.onnx.registry import Node, Operator
from svod.onnx.schemas import schema_of
from svod.onnx.values import Value
from svod.tensor import Tensor
from svod.tensor.precision import is_half, rounded, widened


def computed(node: Node, operator: Operator, operands: Sequence[Value]) -> list[Value]:
    """The results of a node for its operands as its function takes them."""
    halves = {} if operator.exact or operator.raw else {i: o.dtype for i, o in enumerate(operands)
                                                        if isinstance(o, Tensor) and is_half(o.dtype)}
    results = operator.function(node, *(widened(list(operands)) if halves else operands))
    made = list(results) if isinstance(results, tuple) and not hasattr(results, "_fields") else [results]
    return made if not halves else [r if kind is None else rounded(r, kind)
                                    for r, kind in zip(made, _kinds(node, halves, len(made)), strict=True)]


def _kinds(node: Node, halves: dict[int, DType], count: int) -> list[DType | None]:
    """The 16-bit types of a node's results, which its schema ties to those of its operands; None for other types. Where the onnx package
    has no schema, floats are of the type of the first operand of 16 bits."""
    schema = schema_of(node.op, node.domain, node.version)
    if schema is None:
        return [next(iter(halves.values()))] * count
    inputs, outputs = schema.inputs, schema.outputs
    of_name = {inputs[min(i, len(inputs) - 1)].type_str: kind for i, kind in halves.items()}
    return [of_name.get(outputs[min(i, len(outputs) - 1)].type_str) for i in range(count)]
