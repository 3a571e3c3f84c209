"""Computes values that are needed during translation: shapes, axes, branches, and values that depend on weights only.

A node with known operands is computed by its operator's own function, like any other. The resulting small graph is evaluated at once, in
NumPy (`svod.core.spec.graphs`), and each node of a graph once per translation. So a node has one meaning, and one set of errors, whether
its operands are known or not.

If NumPy and a kernel may compute different bits, as for an exponential, the value stays a tensor, and so does a value that depends on a
Variable. Such a tensor is evaluated only if an operator needs its value, for a shape or an axis.
"""
from __future__ import annotations

from typing import Any

import numpy as np

from svod.core.graph.storage import base_of
from svod.core.graph.traits import VARIABLES, traits_of
from svod.core.ir.dtype import dtypes
from svod.core.ir.uop import Ops, UOp
from svod.core.spec.graphs import GraphValues
from svod.onnx.registry import Array
from svod.onnx.values import Value, ml_bfloat16
from svod.tensor import Tensor

MOST_KNOWN = 4096       # most elements of a value that is computed during translation


class Known:
    """The buffers whose content is known during one translation."""

    def __init__(self) -> None:
        self._contents: dict[UOp, Array] = {}
        self._noted: set[UOp] = set()       # nodes that are known to depend on known memory only
        self._certain = GraphValues(_stored, MOST_KNOWN)
        self._computed = GraphValues(self._contents.get, MOST_KNOWN, bit_exact=False)

    def note(self, tensor: Tensor) -> None:
        """Record that a tensor does not vary from run to run, so that the content of the buffers that it reads is known."""
        for u in base_of(tensor.uop).toposort(gate=lambda n: n.op is not Ops.BUFFER and n not in self._noted):
            self._noted.add(u)
            if u.op is Ops.BUFFER and u not in self._contents and (content := _stored(u)) is not None:
                self._contents[u] = content
                self._computed.forget_unknown()

    def settled(self, value: Value) -> Value:
        """The result of a node with known operands: an array if it is small and exact, else the tensor."""
        if not isinstance(value, Tensor):
            return value
        found = _evaluated(self._certain, value)
        if found is None or found.dtype == object:
            self.note(value)
            return value
        return found

    def value(self, value: Value) -> Array | None:
        """The array that a value is known to be, with Dims for numbers that depend on Variables; None if it is not known."""
        if isinstance(value, np.ndarray):
            return value
        return _evaluated(self._computed, value) if isinstance(value, Tensor) else None


def _stored(node: UOp) -> Array | None:
    """The content of a BUFFER that has memory; None for others, such as keys of random numbers before a plan runs."""
    buffer = node.remarks.get("buffer")
    return buffer.array if buffer is not None and buffer.is_allocated else None


def _evaluated(values: GraphValues, tensor: Tensor) -> Array | None:
    found = values.of(tensor.uop)
    return ml_bfloat16(found) if found is not None and tensor.dtype is dtypes.bfloat16 else found


def differs(value: Any) -> bool:
    """Whether the shape of a value, or the value itself, depends on a Variable."""
    return isinstance(value, Tensor) and bool(traits_of(value.uop) & VARIABLES)
