"""Attention of com.microsoft: with the projection, of several heads, of groups of heads with a cache; quantised."""
from __future__ import annotations

from functools import reduce

import numpy as np

from svod.errors import UnsupportedError
from svod.onnx.operators.attention import rotary as turn
from svod.onnx.registry import MICROSOFT, Node, operator
from svod.tensor import Tensor, where


def multi_head(node: Node, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, extra: Tensor | None) -> Tensor:
    """(N, heads, L, E) operands give (N, L, heads · E). Keys beyond the number of steps stand before the first step."""
    steps, total = q.shape[2], k.shape[2]
    before = max(0, total - steps)
    added = [b for b in (mask_bias(node, mask, q.shape[0], total), extra) if b is not None]
    is_causal = bool(node.get("unidirectional", 0))
    if is_causal and (added or before):
        later = np.arange(total) > np.arange(steps).reshape(-1, 1) + before
        added.append(Tensor(np.where(later, np.finfo(np.float32).min, np.float32(0))))
    bias = reduce(Tensor.add, added) if added else None
    out = q.scaled_dot_product_attention(k, v, bias, is_causal=is_causal and bias is None, scale=node.get("scale") or None)
    return out.transpose(1, 2).reshape(q.shape[0], steps, -1)


def mask_bias(node: Node, mask: Tensor | None, batch: int, total: int) -> Tensor | None:
    """A mask of 1 for what counts, (N, S) or with axes between, or numbers of keys, (N,), as numbers that are added."""
    if mask is None:
        return None
    if mask.shape[0] != batch or (mask.ndim > 1 and mask.shape[-1] != total):
        raise UnsupportedError(f"{node} with a mask of {mask.shape} for {batch} × {total} keys")
    if mask.ndim == 1:
        mask = Tensor(np.arange(total)).lt(mask.reshape(-1, 1)).cast("int32")
    shaped = mask.reshape(mask.shape[0], 1, 1, mask.shape[1]) if mask.ndim == 2 else mask.unsqueeze(1) if mask.ndim == 3 else mask
    return where(shaped.ne(0), Tensor.zeros(1), Tensor.full((1,), node.get("mask_filter_value", -10000.0), "float32"))


@operator("Attention", domain=MICROSOFT)
def attention(node: Node, x: Tensor, w: Tensor, bias: Tensor | None = None, mask: Tensor | None = None, past: Tensor | None = None,
              extra: Tensor | None = None) -> tuple[Tensor, ...]:
    heads = node.need("num_heads")
    together = x.matmul(w) if bias is None else x.matmul(w).add(bias)
    sizes = node.get("qkv_hidden_sizes") or [together.shape[-1] // 3] * 3
    q, k, v = (t.reshape(x.shape[0], x.shape[1], heads, -1).transpose(1, 2) for t in together.split(list(sizes), -1))
    if past is not None:
        k, v = Tensor.cat([past[0], k], 2), Tensor.cat([past[1], v], 2)
    present = Tensor.stack([k, v], 0) if k.shape == v.shape else k
    return multi_head(node, q, k, v, mask, extra), present


@operator("MultiHeadAttention", domain=MICROSOFT)
def multi_head_attention(node: Node, q: Tensor, k: Tensor | None = None, v: Tensor | None = None, bias: Tensor | None = None,
                         mask: Tensor | None = None, extra: Tensor | None = None, past_key: Tensor | None = None,
                         past_value: Tensor | None = None) -> tuple[Tensor, ...]:
    heads = node.need("num_heads")
    if k is None:       # (N, L, heads, 3, E)
        q, k, v = (q[:, :, :, i].reshape(q.shape[0], q.shape[1], -1) for i in range(3))
    elif v is None:     # (N, S, heads, 2, E)
        k, v = (k[:, :, :, i].reshape(k.shape[0], k.shape[1], -1) for i in range(2))
    if bias is not None:
        width = q.shape[-1]
        q = q.add(bias[:width])
        k = k.add(bias[width:2 * width]) if k.ndim == 3 else k
        v = v.add(bias[2 * width:]) if v.ndim == 3 else v
    q, k, v = (t if t.ndim == 4 else t.reshape(t.shape[0], t.shape[1], heads, -1).transpose(1, 2) for t in (q, k, v))
    if past_key is not None and past_value is not None:
        k, v = Tensor.cat([past_key, k], 2), Tensor.cat([past_value, v], 2)
    return multi_head(node, q, k, v, mask, extra), k, v


@operator("RotaryEmbedding", domain=MICROSOFT)
def rotary(node: Node, x: Tensor, positions: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    at = positions.add(Tensor(np.arange(x.shape[-2 if x.ndim == 4 else 1]))) if positions.ndim == 1 else positions
    if at.ndim == 1:
        at = at.unsqueeze(0).broadcast_to((x.shape[0], at.shape[0]))
    heads = node.get("num_heads", 0)
    if x.ndim == 3 and not heads:
        node.attributes = {**node.attributes, "num_heads": x.shape[-1] // (2 * cos.shape[-1])}
    result: Tensor = turn(node, x, cos, sin, at)
    return result
