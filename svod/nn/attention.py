"""Multi-head attention."""
from __future__ import annotations

import math

from svod.errors import ShapeError
from svod.nn.linear import Linear
from svod.nn.module import Module, uniform
from svod.tensor import Tensor


class MultiheadAttention(Module):
    """Multi-head attention (Vaswani et al., 2017): softmax(q·kᵀ / sqrt(head)) · v per head, between linear projections. Parameters have
    PyTorch's names. Sequences are (batch, length, embed_dim), or (length, batch, embed_dim) with batch_first=False, which is PyTorch's
    default. `dropout` is not used in inference. Raises ShapeError."""

    def __init__(self, embed_dim: int, num_heads: int, dropout: float = 0.0, bias: bool = True, *, batch_first: bool = True) -> None:
        if num_heads < 1 or embed_dim % num_heads:
            raise ShapeError(f"MultiheadAttention of {embed_dim} features in {num_heads} heads: heads must divide the features")
        self.embed_dim, self.num_heads, self.batch_first = embed_dim, num_heads, batch_first
        self.in_proj_weight = uniform((3 * embed_dim, embed_dim), math.sqrt(6 / (4 * embed_dim)))
        self.in_proj_bias = Tensor.zeros(3 * embed_dim) if bias else None
        self.out_proj = Linear(embed_dim, embed_dim, bias)

    def forward(self, query: Tensor, key: Tensor | None = None, value: Tensor | None = None,
                key_padding_mask: Tensor | None = None, *, attn_mask: Tensor | None = None, is_causal: bool = False) -> Tensor:
        """Attend from a query (batch, L, embed_dim) to keys and values (batch, S, embed_dim), by default the query; returns (batch, L,
        embed_dim). `attn_mask` is added to the scores; a bool mask hides scores where it is True, and so does `key_padding_mask` (batch,
        S). Returns no weights."""
        key = query if key is None else key
        value = key if value is None else value
        if query.ndim != 3 or query.shape[-1] != self.embed_dim:
            raise ShapeError(f"MultiheadAttention of {query.shape}: the query must be (batch, length, {self.embed_dim})")
        if not self.batch_first:
            turned = {id(x): x.transpose(0, 1) for x in (query, key, value)}
            query, key, value = turned[id(query)], turned[id(key)], turned[id(value)]
        if key is query and value is query:
            q, k, v = query.linear(self.in_proj_weight, self.in_proj_bias).chunk(3, -1)
        else:
            weights = self.in_proj_weight.chunk(3, 0)
            biases = (None,) * 3 if self.in_proj_bias is None else self.in_proj_bias.chunk(3, 0)
            q, k, v = (x.linear(w, b) for x, w, b in zip((query, key, value), weights, biases, strict=True))
        heads = [t.unflatten(-1, (self.num_heads, -1)).transpose(1, 2) for t in (q, k, v)]
        # True hides a score here and keeps it in scaled_dot_product_attention, as in PyTorch
        mask = attn_mask.logical_not() if attn_mask is not None and attn_mask.dtype.kind == "b" else attn_mask
        if key_padding_mask is not None:
            shown = key_padding_mask.logical_not().reshape(key_padding_mask.shape[0], 1, 1, -1)
            mask = shown if mask is None else mask.logical_and(shown) if mask.dtype.kind == "b" else mask.where(shown, -math.inf)
        if is_causal and mask is not None:
            raise ShapeError("MultiheadAttention with a mask and is_causal: make the mask causal instead")
        result = heads[0].scaled_dot_product_attention(heads[1], heads[2], mask, is_causal=is_causal)
        joined: Tensor = self.out_proj(result.transpose(1, 2).flatten(2))
        return joined if self.batch_first else joined.transpose(0, 1)
