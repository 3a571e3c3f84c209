"""Checks a node's form and types by the schemas of the onnx package. Operators without a schema there, such as com.microsoft's, are not
checked."""
from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any

import onnx
from onnx import defs

from svod.onnx.values import Value, dtype_of, has_dtype, is_known
from svod.tensor import Tensor

_TYPE_WORDS = {"float32": "float", "float64": "double"}      # ONNX's names of types that differ from NumPy's


@cache
def schema_of(op: str, domain: str, version: int) -> defs.OpSchema | None:
    """The schema of an operator in a version of its operator set; None if the onnx package has none."""
    try:
        return defs.get_schema(op, version, domain)
    except defs.SchemaError:
        return None


def mistakes_in(node: onnx.NodeProto, domain: str, version: int) -> list[str]:
    """The faults in the form of a node: its numbers of inputs and outputs, and its attributes. Empty without a schema."""
    schema = schema_of(node.op_type, domain, version)
    if schema is None:
        return []
    found = []
    inputs, outputs = len(node.input), len(node.output)
    if not schema.min_input <= inputs <= schema.max_input:
        found.append(f"has {inputs} inputs, and takes {_between(schema.min_input, schema.max_input)}")
    if not schema.min_output <= outputs <= schema.max_output:
        found.append(f"has {outputs} outputs, and makes {_between(schema.min_output, schema.max_output)}")
    given = {a.name: a for a in node.attribute}
    for name, attribute in given.items():
        declared: Any = schema.attributes.get(name)
        if declared is None:
            known = ", ".join(sorted(schema.attributes)) or "none"
            found.append(f"has an attribute {name}, which version {version} of the operator does not have; its attributes are {known}")
        elif attribute.type != int(declared.type.value):
            kind = onnx.AttributeProto.AttributeType.Name(attribute.type).lower()
            found.append(f"has the attribute {name} as {kind}, and takes it as {declared.type.name.lower()}")
    found += [f"lacks the attribute {name}" for name, a in schema.attributes.items() if a.required and name not in given]
    return found


def _between(low: int, high: int) -> str:
    return str(low) if low == high else f"at least {low}" if high > 1 << 20 else f"{low} to {high}"


def type_mistake(op: str, domain: str, version: int, operands: Sequence[Value]) -> str | None:
    """The fault in the types of a node's operands, or None. Types that must be equal have the same name in a schema."""
    schema = schema_of(op, domain, version)
    if schema is None or not schema.inputs:
        return None
    seen: dict[str, str] = {}
    last = len(schema.inputs) - 1
    for i, operand in enumerate(operands):
        if not (isinstance(operand, Tensor) or (is_known(operand) and has_dtype(operand))):
            continue
        parameter, name = schema.inputs[min(i, last)], dtype_of(operand).name
        if f"tensor({_TYPE_WORDS.get(name, name)})" not in parameter.types:
            allowed = ", ".join(sorted(t.removeprefix("tensor(").removesuffix(")") for t in parameter.types))
            return f"its operand {parameter.name} is {name}; version {version} of the operator takes {allowed}"
        if parameter.is_homogeneous and seen.setdefault(parameter.type_str, name) != name:
            return f"its operands are {seen[parameter.type_str]} and {name}, and must have one type: a Cast is missing"
    return None
