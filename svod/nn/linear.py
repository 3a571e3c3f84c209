"""The layers Linear and Embedding."""
from __future__ import annotations

from svod.nn.module import Module, fan_in_bound, uniform
from svod.tensor import Tensor


class Linear(Module):
    """A linear layer x @ weightᵀ + bias: (…, in_features) → (…, out_features)."""

    def __init__(self, in_features: int, out_features: int, bias: bool = True) -> None:
        bound = fan_in_bound(in_features)
        self.weight = uniform((out_features, in_features), bound)
        self.bias = uniform((out_features,), bound) if bias else None

    def forward(self, x: Tensor) -> Tensor:
        return x.linear(self.weight, self.bias)


class Embedding(Module):
    """Looks up rows of a table at integer positions: (…) → (…, embedding_dim). The row `padding_idx` of a new table is zero."""

    def __init__(self, num_embeddings: int, embedding_dim: int, padding_idx: int | None = None) -> None:
        table = Tensor.randn(num_embeddings, embedding_dim)
        if padding_idx is not None:
            table = table.index_fill(0, [padding_idx], 0.0)
        self.weight = table.contiguous()

    def forward(self, x: Tensor) -> Tensor:
        return self.weight.take(x, 0)
