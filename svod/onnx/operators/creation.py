"""Operators without tensor operands: constants, ranges, identities, random numbers."""
from __future__ import annotations

from typing import Any

import numpy as np

from svod.core.ir.dtype import BY_NAME
from svod.errors import ShapeError, UnsupportedError
from svod.onnx.operators.elementwise import svod_type
from svod.onnx.registry import Array, OnnxNode, operator
from svod.onnx.values import has_dims, size, tensor_of
from svod.tensor import Tensor


@operator("Constant", raw=True)
def constant(node: OnnxNode) -> Array:
    for name, kind in (("value_int", np.int64), ("value_ints", np.int64), ("value_float", np.float32), ("value_floats", np.float32)):
        if name in node.attributes:
            return np.array(node.attributes[name], kind)
    if "value" in node.attributes:
        value: Array = node.attributes["value"]
        return value
    raise UnsupportedError(f"{node}: a constant of text or a sparse one")


@operator("ConstantOfShape", 9, known=("shape",))
def constant_of_shape(node: OnnxNode, shape: Array) -> Tensor:
    value: Any = node.get("value")
    fill = np.zeros(1, np.float32) if value is None else np.asarray(value).reshape(-1)
    return Tensor.full(tuple(map(size, shape)), fill[0].item(), BY_NAME[fill.dtype.name])


@operator("Range", 11, known=("start", "limit", "delta"))
def arange(node: OnnxNode, start: Array, limit: Array, delta: Array) -> Tensor:
    if delta.item() == 0:
        raise ShapeError("a step of 0")
    if has_dims(limit) and start.item() == 0 and delta.item() == 1:
        return counted(size(limit.item()), BY_NAME[start.dtype.name])
    if start.dtype.kind in "iu":
        return Tensor(np.arange(start.item(), limit.item(), delta.item(), dtype=start.dtype))
    return tensor_of(np.arange(float(start), float(limit), float(delta)).astype(start.dtype))


def counted(n: Any, dtype: Any) -> Tensor:
    """The numbers 0, 1, … below a size that depends on a Variable."""
    return Tensor.arange(n.bounds[1]).cast(dtype)[:n]


@operator("EyeLike", 9, exact=True)
def eye_like(node: OnnxNode, x: Tensor) -> Tensor:
    kind = svod_type(node.get("dtype"), node) if "dtype" in node.attributes else x.dtype
    rows, columns = x.shape
    return Tensor(np.eye(rows, columns, node.get("k", 0), np.float32)).cast(kind)
