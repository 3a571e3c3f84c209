"""Contractions, such as matmul and linear: one product over a common shape and one REDUCE over its last axis."""
from __future__ import annotations

from typing import Self

from svod.core.graph import graph
from svod.core.graph.shapes import broadcast_shapes, can_broadcast, normalize_axes
from svod.core.ir.dtype import DType, accumulator, dtypes, promote
from svod.core.ir.uop import Ops
from svod.errors import ShapeError
from svod.tensor.operations.elementwise import Operand
from svod.tensor.operations.scatter import Scatter
from svod.tensor.precision import rounds_once


class Linalg(Scatter):
    """Matrix products."""

    __slots__ = ()

    def matmul(self, other: Operand) -> Self:
        """`self @ other` by NumPy's rule: (…, M, K) @ (…, K, N) → (…, M, N) with leading axes broadcast. A vector is a row on the left
        and a column on the right. The result has the common dtype of the operands. 16-bit floats and narrow integers are accumulated in
        32 bits; the product of bools is any(a and b)."""
        a, b = self, self._as_tensor(other)
        if a.ndim == 0 or b.ndim == 0:
            raise ShapeError(f"matmul of shapes {a.shape} and {b.shape}: both need at least one axis")
        inner = -2 if b.ndim > 1 else -1
        if a.shape[-1] != b.shape[inner]:
            raise ShapeError(f"matmul of shapes {a.shape} and {b.shape}: axis -1 of the first has extent {a.shape[-1]}, axis {inner} of "
                             f"the second {b.shape[inner]}; they are summed over and must be equal")
        batch = broadcast_shapes("matmul", a.shape[:-2], b.shape[:-2], given=(a.shape, b.shape))
        # a matrix has one free axis, a vector none
        rows, columns = a.shape[-2:-1], b.shape[-1:] if b.ndim > 1 else ()
        k = a.shape[-1]
        left = a.reshape(*a.shape[:-2], *rows, *(1 for _ in columns), k)
        right = b.transpose(-2, -1) if b.ndim > 1 else b
        right = right.reshape(*b.shape[:-2], *(1 for _ in rows), *columns, k)
        return left._contract(right, (*batch, *rows, *columns, k), (-1,), promote(a.dtype, b.dtype))

    def dot(self, other: Operand) -> Self: return self.matmul(other)
    def mm(self, other: Operand) -> Self: return self.matmul(other)
    def bmm(self, other: Operand) -> Self: return self.matmul(other)
    def __matmul__(self, other: Operand) -> Self: return self.matmul(other)
    def __rmatmul__(self, other: Operand) -> Self: return self._as_tensor(other).matmul(self)

    @rounds_once
    def linear(self, weight: Operand, bias: Operand | None = None) -> Self:
        """A linear layer x @ weightᵀ + bias: (…, in) with weight (out, in), or (in,), and bias (out,)."""
        w = self._as_tensor(weight)
        if w.ndim not in (1, 2) or self.ndim == 0 or self.shape[-1] != w.shape[-1]:
            raise ShapeError(f"linear of {self.shape} with a weight of {w.shape}: the weight is (out, in), and in must be the last extent")
        result = self.matmul(w.T)
        if bias is None:
            return result
        added = self._as_tensor(bias)
        if not can_broadcast(added.shape, result.shape):
            raise ShapeError(f"linear of {self.shape} with a weight of {w.shape} and a bias of {added.shape}: the bias is (out,), here "
                             f"{w.shape[:-1]}")
        return result.add(added)

    def _with_bias(self, name: str, bias: Operand | None) -> Self:
        """Add a bias (O,) to this result of a convolution (N, O, …). Raises ShapeError for a bias of another shape."""
        if bias is None:
            return self
        b, channels = self._as_tensor(bias), self.shape[1]
        if b.shape != (channels,):
            raise ShapeError(f"{name} of {channels} channels with a bias of {b.shape}: the bias must be ({channels},)")
        return self.add(b.reshape(channels, *(1,) * (self.ndim - 2)))

    def _contract(self, other: Self, shape: tuple[int, ...], axes: tuple[int, ...], dtype: DType) -> Self:
        """The product of both operands, broadcast to `shape` and summed over `axes`, which are dropped.

        It consists of one MUL over the common shape and one REDUCE_AXIS; no array of that shape is stored."""
        inner = dtypes.bool if dtype.kind == "b" else accumulator(dtype)
        a, b = (graph.broadcast(t.cast(inner).uop, shape) for t in (self, other))
        multiply, add = (Ops.AND, "OR") if dtype.kind == "b" else (Ops.MUL, "ADD")
        total = graph.reduce_axis(graph.alu(multiply, a, b), add, axes)
        summed = normalize_axes("contraction", axes, len(shape))
        return self.from_uop(graph.reshape(total, tuple(n for i, n in enumerate(shape) if i not in summed))).cast(dtype)
