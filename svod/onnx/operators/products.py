"""Matrix products."""
from __future__ import annotations

from svod.onnx.operators.elementwise import old_broadcast
from svod.onnx.registry import OnnxNode, operator
from svod.tensor import Tensor, linalg


@operator("MatMul")
def matmul(node: OnnxNode, a: Tensor, b: Tensor) -> Tensor:
    return a.matmul(b)


@operator("Gemm")
def gemm(node: OnnxNode, a: Tensor, b: Tensor, c: Tensor | None = None) -> Tensor:
    x = a.transpose(0, 1) if node.get("transA", 0) else a
    y = b.transpose(0, 1) if node.get("transB", 0) else b
    alpha, beta = node.get("alpha", 1.0), node.get("beta", 1.0)
    product = x.matmul(y)
    if alpha != 1.0:
        product = product.mul(alpha).cast(a.dtype)
    if c is None or beta == 0.0:
        return product
    addend = old_broadcast(node, product, c)
    return product.add(addend if beta == 1.0 else addend.mul(beta).cast(c.dtype))


@operator("Einsum", 12)
def einsum(node: OnnxNode, *xs: Tensor) -> Tensor:
    return Tensor.einsum(node.need("equation").replace(" ", ""), *xs)


@operator("MatMulInteger", 10)
def matmul_integer(node: OnnxNode, a: Tensor, b: Tensor, a_zero: Tensor | None = None, b_zero: Tensor | None = None) -> Tensor:
    return shifted(a, a_zero, -2).matmul(shifted(b, b_zero, -1))


def shifted(x: Tensor, zero: Tensor | None, axis: int) -> Tensor:
    """Subtract the zero point from integers, in 32 bits. A zero point per row of a, or per column of b, applies along the given axis."""
    wide = x.cast("int32")
    if zero is None:
        return wide
    z = zero.cast("int32")
    if z.ndim == 1 and z.shape[0] > 1 and axis == -2:
        z = z.unsqueeze(-1)
    return wide.sub(z)


@operator("Det", 11)
def det(node: OnnxNode, x: Tensor) -> Tensor:
    return linalg.det(x).cast(x.dtype)
