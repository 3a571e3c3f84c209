"""Matrix products."""
from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from svod.tensor import Tensor
from svod.torch.operations.table import aten, methods, of_integers

methods("mm bmm dot matmul linear outer")
aten("mv")(Tensor.matmul)


@aten("addmm", "baddbmm", "addmv")
def addmm(added: Tensor, a: Tensor, b: Tensor, *, beta: float = 1, alpha: float = 1) -> Tensor:
    """The sum beta · added + alpha · (a @ b)."""
    alpha, beta = of_integers(alpha, a), of_integers(beta, a)
    product = a.matmul(b)
    product = product if alpha == 1 else product.mul(alpha)
    return product if beta == 0 else product.add(added if beta == 1 else added.mul(beta))


@aten("_int_mm")
def int_mm(a: Tensor, b: Tensor) -> Tensor:
    """The product of matrices of int8, exact in int32."""
    return a.cast("int32").matmul(b.cast("int32"))


@aten("addr")
def addr(added: Tensor, a: Tensor, b: Tensor, *, beta: float = 1, alpha: float = 1) -> Tensor:
    """The sum beta · added + alpha · (a ⊗ b), with an outer product."""
    product = a.outer(b).mul(alpha)
    return product if beta == 0 else product.add(added.mul(beta))


@aten("einsum")
def einsum(equation: str, operands: Sequence[Tensor], path: Any = None) -> Tensor:
    """A product of tensors with named axes."""
    return Tensor.einsum(equation, *operands)
