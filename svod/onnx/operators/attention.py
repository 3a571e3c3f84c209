"""Attention and rotary embedding, operators of ai.onnx."""
from __future__ import annotations

import math

import numpy as np

from svod.core.ir.dtype import DType, dtypes
from svod.onnx.operators.elementwise import svod_type
from svod.onnx.registry import OnnxNode, operator
from svod.tensor import Tensor, where
from svod.tensor.precision import widened


def heads_apart(x: Tensor, heads: int) -> Tensor:
    """Convert (N, L, heads · E) to (N, heads, L, E); an operand with four axes is returned unchanged."""
    return x if x.ndim == 4 else x.reshape(x.shape[0], x.shape[1], heads, -1).transpose(1, 2)


@operator("Attention", 23, multiplies=True)
def attention(node: OnnxNode, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None, past_key: Tensor | None = None,
              past_value: Tensor | None = None, lengths: Tensor | None = None) -> tuple[Tensor, ...]:
    flat = q.ndim == 3
    kind = q.dtype
    q_heads, kv_heads = (node.need("q_num_heads"), node.need("kv_num_heads")) if flat else (q.shape[1], k.shape[1])
    query, key, value = heads_apart(q, q_heads), heads_apart(k, kv_heads), heads_apart(v, kv_heads)
    if past_key is not None and past_value is not None:
        key, value = Tensor.cat([past_key, key], 2), Tensor.cat([past_value, value], 2)
    present = key, value
    if q_heads != kv_heads:
        key, value = (t.repeat_interleave(q_heads // kv_heads, 1) for t in (key, value))
    steps, total = query.shape[2], key.shape[2]
    scale = node.get("scale") or 1 / math.sqrt(query.shape[-1])
    bias: Tensor | None = None
    if mask is not None:
        bias = hiding(mask, kind) if mask.dtype is dtypes.bool else mask
        if bias.shape[-1] < total:
            short = total - bias.shape[-1]
            bias = bias.pad([(0, 0)] * (bias.ndim - 1) + [(0, short)], "constant", -math.inf)
    windows = [(-1, 0)] if node.get("is_causal", 0) else []
    for left, right in [*windows, (node.get("left_window_size", -1), node.get("right_window_size", -1))]:
        if left >= 0 or right >= 0:
            bias = added(bias, hiding(windowed(steps, total, past_key, lengths, left, right), kind))
    if lengths is not None:
        bias = added(bias, hiding(Tensor(np.arange(total)).lt(lengths.reshape(-1, 1, 1, 1)), kind))
    capped, wanted = node.get("softcap", 0.0), any(node.asked[3:])
    if not capped and not wanted and "softmax_precision" not in node.attributes and bias is None:
        out = query.scaled_dot_product_attention(key, value, scale=scale)
        return together(out, flat), *present
    # 16-bit floats are computed in 32 bits from here to the probabilities
    root = math.sqrt(scale)
    scores = widened(query).mul(root).matmul(widened(key).transpose(-2, -1).mul(root))
    soft = scores if not capped else scores.div(capped).tanh().mul(capped)
    masked = soft if bias is None else soft.add(bias)
    wide = svod_type(node.get("softmax_precision"), node) if node.get("softmax_precision") else masked.dtype
    probabilities = softmax_rows(masked.cast(wide)).cast(kind)
    out = probabilities.matmul(value)
    shown = {0: scores, 1: soft, 2: masked, 3: probabilities}[node.get("qk_matmul_output_mode", 0)]
    return together(out, flat), *present, shown.cast(kind)


def softmax_rows(scores: Tensor) -> Tensor:
    """Softmax of rows; a row in which all scores are masked gives zeros."""
    most = scores.max(-1, keepdim=True)
    exps = scores.sub(where(most.eq(-math.inf), most.mul(0.0).nan_to_num(0.0), most)).exp()
    total = exps.sum(-1, keepdim=True)
    return exps.div(where(total.eq(0), total.add(1), total))


def added(bias: Tensor | None, more: Tensor) -> Tensor:
    return more if bias is None else bias.add(more)


def hiding(seen: Tensor, kind: DType) -> Tensor:
    """Convert a mask to numbers to add to the scores: 0 for visible keys, minus infinity for others."""
    return where(seen, Tensor.zeros(1, dtype=kind), Tensor.full((1,), -math.inf, kind))


def windowed(steps: int, total: int, past: Tensor | None, lengths: Tensor | None, left: int, right: int) -> Tensor:
    """A mask of the keys within each step's window of `left` keys before and `right` keys after it; -1 is unlimited."""
    rows, columns = np.arange(steps).reshape(-1, 1), np.arange(total)
    if lengths is not None and past is None:
        at = Tensor(rows).add(lengths.reshape(-1, 1, 1, 1).sub(steps))
    else:
        at = Tensor(rows + (past.shape[2] if past is not None else 0))
    distance = Tensor(columns).sub(at)
    seen = distance.eq(distance)
    seen = seen.logical_and(distance.ge(-left)) if left >= 0 else seen
    return seen.logical_and(distance.le(right)) if right >= 0 else seen


def together(x: Tensor, flat: bool) -> Tensor:
    """Convert (N, heads, L, E) to (N, L, heads · E), if the operands had that form."""
    return x.transpose(1, 2).reshape(x.shape[0], x.shape[2], -1) if flat else x


@operator("RotaryEmbedding", 23)
def rotary(node: OnnxNode, x: Tensor, cos: Tensor, sin: Tensor, positions: Tensor | None = None) -> Tensor:
    heads, interleaved, width = node.get("num_heads", 0), bool(node.get("interleaved", 0)), node.get("rotary_embedding_dim", 0)
    whole = x.reshape(x.shape[0], x.shape[1], heads, -1) if x.ndim == 3 else x.transpose(1, 2)     # (N, L, heads, E)
    size = width or whole.shape[-1]
    c, s = (t.take(positions, 0) if positions is not None else t for t in (cos, sin))
    out = rotated(whole, c[..., :size // 2], s[..., :size // 2], interleaved)
    return out.reshape(x.shape) if x.ndim == 3 else out.transpose(1, 2)


def rotated(x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool) -> Tensor:
    """Rotate pairs of elements of x (N, L, heads, E) by angles (N or 1, L, pairs); the elements beyond 2 · pairs are left unchanged."""
    size = 2 * cos.shape[-1]
    out = x[..., :size].rotary_embedding(cos.unsqueeze(-2), sin.unsqueeze(-2), interleaved)
    return Tensor.cat([out, x[..., size:]], -1) if x.shape[-1] > size else out


@operator("LinearAttention", 27, exact=True)
def linear_attention(node: OnnxNode, query: Tensor, key: Tensor, value: Tensor, past: Tensor | None = None, decay: Tensor | None = None,
                     beta: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Linear attention: in every step, each head's state matrix decays and the product of the step's key and value is added to it. The
    state has the shape (N, heads, width of keys, width of values)."""
    q_heads, kv_heads, rule = node.need("q_num_heads"), node.need("kv_num_heads"), node.get("update_rule", "gated_delta")
    q, k, v = (widened(heads_apart(t, h)) for t, h in ((query, q_heads), (key, kv_heads), (value, kv_heads)))
    n, _, steps, width = k.shape
    state = Tensor.zeros(n, kv_heads, width, v.shape[-1], dtype=k.dtype) if past is None else widened(past)
    scale, outputs = node.get("scale", 0.0) or 1 / math.sqrt(q.shape[-1]), []
    # a factor per head, or per head and element of the key
    gate = None if decay is None or "gated" not in rule else widened(heads_apart(decay, kv_heads)).exp()
    rate = None if beta is None or "delta" not in rule else widened(heads_apart(beta, 1 if beta.shape[-1] == 1 else kv_heads))
    for t in range(steps):
        kt, vt = k[:, :, t].unsqueeze(-1), v[:, :, t].unsqueeze(-2)
        if gate is not None:
            state = state.mul(gate[:, :, t].unsqueeze(-1))
        if "delta" in rule:
            vt = vt.sub(kt.transpose(-2, -1).matmul(state))
            vt = vt if rate is None else vt.mul(rate[:, :, t].unsqueeze(-1))
        state = state.add(kt.mul(vt))
        shared = state if q_heads == kv_heads else state.repeat_interleave(q_heads // kv_heads, 1)
        outputs.append(q[:, :, t].unsqueeze(-2).matmul(shared).mul(scale).squeeze(-2))
    out = Tensor.stack(outputs, 2).transpose(1, 2).reshape(n, steps, -1).cast(query.dtype)
    return out, state.cast(query.dtype if past is None else past.dtype)
