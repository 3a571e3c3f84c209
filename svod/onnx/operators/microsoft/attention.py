"""Attention operators of com.microsoft: Attention and QAttention, which project their input; MultiHeadAttention; GroupQueryAttention
with a cache."""
from __future__ import annotations

import math
from functools import reduce
from typing import Any

import numpy as np

from svod.errors import UnsupportedError
from svod.onnx.operators.attention import heads_apart, rotated
from svod.onnx.operators.attention import rotary as turn
from svod.onnx.operators.products import shifted
from svod.onnx.registry import MICROSOFT, Array, OnnxNode, operator
from svod.onnx.values import size
from svod.tensor import Tensor, where
from svod.tensor.precision import rounded, widened


def multi_head(node: OnnxNode, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, extra: Tensor | None) -> Tensor:
    """Attention of operands (N, heads, L, E); returns (N, L, heads · E). If there are more keys than steps, the additional keys are
    earlier than the first step."""
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


def mask_bias(node: OnnxNode, mask: Tensor | None, batch: int, total: int) -> Tensor | None:
    """Convert a mask to numbers that are added to the scores. The mask is 1 for visible keys, (N, S) or with axes in between, or it has
    the number of visible keys, (N,)."""
    if mask is None:
        return None
    if mask.shape[0] != batch or (mask.ndim > 1 and mask.shape[-1] != total):
        raise UnsupportedError(f"{node} with a mask of {mask.shape} for {batch} × {total} keys")
    if mask.ndim == 1:
        mask = Tensor(np.arange(total)).lt(mask.reshape(-1, 1)).cast("int32")
    shaped = mask.reshape(mask.shape[0], 1, 1, mask.shape[1]) if mask.ndim == 2 else mask.unsqueeze(1) if mask.ndim == 3 else mask
    return where(shaped.ne(0), Tensor.zeros(1), Tensor.full((1,), node.get("mask_filter_value", -10000.0), "float32"))


@operator("Attention", domain=MICROSOFT)
def attention(node: OnnxNode, x: Tensor, w: Tensor, bias: Tensor | None = None, mask: Tensor | None = None, past: Tensor | None = None,
              extra: Tensor | None = None) -> tuple[Tensor, ...]:
    together = x.matmul(w) if bias is None else x.matmul(w).add(bias)
    return of_projection(node, together, mask, past, extra)


def of_projection(node: OnnxNode, together: Tensor, mask: Tensor | None, past: Tensor | None, extra: Tensor | None) -> tuple[Tensor, ...]:
    """Attention with queries, keys and values concatenated along the last axis, (N, L, 3 · heads · E)."""
    sizes = node.get("qkv_hidden_sizes") or [together.shape[-1] // 3] * 3
    q, k, v = (t.reshape(*together.shape[:2], node.need("num_heads"), -1).transpose(1, 2) for t in together.split(list(sizes), -1))
    if past is not None:
        k, v = Tensor.cat([past[0], k], 2), Tensor.cat([past[1], v], 2)
    present = Tensor.stack([k, v], 0) if k.shape == v.shape else k
    return multi_head(node, q, k, v, mask, extra), present


@operator("QAttention", domain=MICROSOFT)
def quantised_attention(node: OnnxNode, x: Tensor, w: Tensor, bias: Tensor, x_scale: Tensor, w_scale: Tensor, mask: Tensor | None = None,
                        x_zero: Tensor | None = None, w_zero: Tensor | None = None, past: Tensor | None = None) -> tuple[Tensor, ...]:
    """Attention with a projection of 8-bit integers, which is exact; all later operations are on floats."""
    if node.get("do_rotary", 0) or node.get("past_present_share_buffer", 0):
        raise UnsupportedError(f"{node} with a rotary embedding, or a past that is also its present")
    wide = shifted(x, x_zero, -2).matmul(shifted(w, w_zero, -1)).cast(bias.dtype)
    return of_projection(node, wide.mul(x_scale.mul(w_scale)).add(bias), mask, past, None)


@operator("MultiHeadAttention", domain=MICROSOFT, multiplies=True)
def multi_head_attention(node: OnnxNode, q: Tensor, k: Tensor | None = None, v: Tensor | None = None, bias: Tensor | None = None,
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
    q, k, v = (heads_apart(t, heads) for t in (q, k, v))
    if past_key is not None and past_value is not None:
        k, v = Tensor.cat([past_key, k], 2), Tensor.cat([past_value, v], 2)
    return multi_head(node, q, k, v, mask, extra), k, v


@operator("RotaryEmbedding", domain=MICROSOFT)
def rotary(node: OnnxNode, x: Tensor, positions: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    at = positions.add(Tensor(np.arange(x.shape[-2 if x.ndim == 4 else 1]))) if positions.ndim == 1 else positions
    if at.ndim == 1:
        at = at.unsqueeze(0).broadcast_to((x.shape[0], at.shape[0]))
    heads = node.get("num_heads", 0)
    if x.ndim == 3 and not heads:
        node.attributes = {**node.attributes, "num_heads": x.shape[-1] // (2 * cos.shape[-1])}
    return turn(node, x, cos, sin, at)


@operator("GroupQueryAttention", domain=MICROSOFT, known=("total",), exact=True)
def group_query_attention(node: OnnxNode, q: Tensor, k: Tensor | None = None, v: Tensor | None = None, past_key: Tensor | None = None,
                          past_value: Tensor | None = None, lengths: Tensor | None = None, total: Array | None = None,
                          cos: Tensor | None = None, sin: Tensor | None = None, places: Tensor | None = None,
                          bias: Tensor | None = None, sink: Tensor | None = None, key_scale: Tensor | None = None,
                          value_scale: Tensor | None = None, query_norm: Tensor | None = None, key_norm: Tensor | None = None,
                          valid: Tensor | None = None) -> tuple[Tensor, ...]:
    """Causal attention in which several heads share keys and values, with a cache (N, groups, rows, E). After this step, each batch has
    `lengths` + 1 rows in it, and the longest has `total`. A cache with more rows keeps its size; one with fewer grows."""
    if any(t is not None for t in (key_scale, value_scale, valid)) or node.get("sliding_window_cache", 0) or any(node.asked[3:]):
        raise UnsupportedError(f"{node} with a quantised cache, a cache of a window, padded queries, or scores as a result")
    heads, groups, causal = node.need("num_heads"), node.need("kv_num_heads"), bool(node.get("causal", 1))
    assert lengths is not None and total is not None
    query, key, value = apart(node, q, k, v)
    query, key = normed(node, query, query_norm, "q"), normed(node, key, key_norm, "k")
    steps, longest = q.shape[1], size(total.reshape(-1)[0])
    cached = past_key is not None and past_key.shape[2] != 0
    ends = lengths.reshape(-1).cast("int64").add(1)
    begins = ends.sub(steps).maximum(0) if cached else Tensor.zeros(q.shape[0], dtype="int64")
    if node.get("do_rotary", 0):
        assert cos is not None and sin is not None
        at = begins.unsqueeze(1).add(Tensor.arange(steps)) if places is None else places
        turns = [widened(t.take(at, 0)) for t in (cos, sin)]
        query, key = (rounded(rotated(widened(t), turns[0], turns[1], bool(node.get("rotary_interleaved", 0))), q.dtype)
                      for t in (query, key))
    query, key, value = (t.transpose(1, 2) for t in (query, key, value))
    present = tuple(appended(past if cached else None, new, begins, longest) for past, new in ((past_key, key), (past_value, value)))
    key, value = (t[:, :, :longest].repeat_interleave(heads // groups, 1) for t in present)
    rows, columns = begins.reshape(-1, 1, 1, 1).add(Tensor.arange(steps).reshape(-1, 1)), Tensor.arange(longest)
    seen = columns.le(rows) if causal else columns.lt(ends.reshape(-1, 1, 1, 1))
    window = node.get("local_window_size", -1)
    if window > 0:
        seen = seen.logical_and(columns.gt(rows.sub(window)))
    is_plain = causal and not cached and window <= 0 and bias is None and longest == steps
    out = scores_and_values(node, query, key, value, None if is_plain else seen, bias, sink)
    return out.transpose(1, 2).reshape(q.shape[0], steps, -1), *present


def apart(node: OnnxNode, q: Tensor, k: Tensor | None, v: Tensor | None) -> tuple[Tensor, ...]:
    """Queries, keys and values by head, (N, L, heads or groups, E), from three operands, or from one in which they are concatenated."""
    heads, groups = node.need("num_heads"), node.need("kv_num_heads")
    if k is None or v is None:
        width = q.shape[-1] // (heads + 2 * groups)
        q, k, v = q.split([heads * width, groups * width, groups * width], -1)
    if k.shape[1] != q.shape[1]:
        raise UnsupportedError(f"{node} with {k.shape[1]} keys for {q.shape[1]} queries")
    return tuple(t.reshape(t.shape[0], t.shape[1], n, -1) for t, n in ((q, heads), (k, groups), (v, groups)))


def normed(node: OnnxNode, x: Tensor, weight: Tensor | None, name: str) -> Tensor:
    """Divide the elements of each head by their root mean square, and multiply by a weight. Without a weight, x is unchanged."""
    if weight is None:
        return x
    small = node.get(f"{name}_norm_epsilon", node.get("qk_norm_epsilon", 1e-6))
    return rounded(widened(x).rms_norm(x.shape[-1], widened(weight), small), x.dtype)


def appended(past: Tensor | None, new: Tensor, begins: Tensor, longest: Any) -> Tensor:
    """Write the new rows of each batch into a cache (N, groups, rows, E), from the batch's own position on; without a past, from the
    first row on. The result has at least `longest` rows."""
    steps = new.shape[2]
    if past is None:
        return new.pad([(0, 0), (0, 0), (0, longest - steps), (0, 0)]) if longest > steps else new
    room = past.shape[2] if past.shape[2] >= longest else longest
    kept = past.pad([(0, 0), (0, 0), (0, room - past.shape[2]), (0, 0)])
    at = Tensor.arange(room).sub(begins.unsqueeze(1)).reshape(-1, 1, room, 1)
    moved = new if steps == 1 else new.gather(2, at.clamp(0, steps - 1).broadcast_to((*new.shape[:2], room, new.shape[3])))
    return where(at.ge(0).logical_and(at.lt(steps)), moved, kept)


def scores_and_values(node: OnnxNode, q: Tensor, k: Tensor, v: Tensor, seen: Tensor | None, bias: Tensor | None,
                      sink: Tensor | None) -> Tensor:
    """Attention softmax(q·k) · v with the node's options: a soft limit of the scores (`softcap`), and a term that is added to each row's
    sum of exponentials (`sink`, `smooth_softmax`). `seen`: a mask of the keys visible to each query; None: the keys up to the query's
    own position."""
    kind, scale, limit = q.dtype, node.get("scale", 0.0) or 1 / math.sqrt(q.shape[-1]), node.get("softcap", 0.0)
    q, k, v = (widened(t) for t in (q, k, v))
    bias = None if bias is None else widened(bias)
    smooth = sink is not None or node.get("smooth_softmax", 0) > 0
    if not limit and not smooth:
        masked = seen if bias is None or seen is None else where(seen, bias, -math.inf)
        return rounded(q.scaled_dot_product_attention(k, v, masked, is_causal=seen is None, scale=scale), kind)
    scores = q.matmul(k.transpose(-2, -1)).mul(scale)
    scores = scores.div(limit).tanh().mul(limit) if limit else scores
    scores = scores if bias is None else scores.add(bias)
    if seen is None:
        seen = Tensor.arange(scores.shape[-1]).le(Tensor.arange(scores.shape[-2]).unsqueeze(1))
    scores = where(seen, scores, -math.inf)
    if not smooth:
        return rounded(scores.softmax(-1).matmul(v), kind)
    rest = Tensor.zeros(1, 1, 1, 1) if sink is None else widened(sink).reshape(1, -1, 1, 1)
    most = scores.max(-1, keepdim=True).maximum(rest)
    shares = scores.sub(most).exp()
    return rounded(shares.div(shares.sum(-1, keepdim=True).add(rest.sub(most).exp())).matmul(v), kind)
