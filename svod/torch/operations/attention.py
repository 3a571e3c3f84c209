"""Attention operations."""
from __future__ import annotations

import math
from collections.abc import Callable

from svod.errors import UnsupportedError
from svod.tensor import Tensor
from svod.torch.operations.table import aten


def _grouped(query: Tensor, x: Tensor) -> Tensor:
    """Repeat keys or values with fewer heads, once for each query head that shares them."""
    return x.repeat_interleave(query.shape[-3] // x.shape[-3], -3)


@aten("scaled_dot_product_attention", widens=False)
def attention(query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None = None, dropout_p: float = 0.0, is_causal: bool = False,
              scale: float | None = None, enable_gqa: bool = False) -> Tensor:
    """Attention softmax(query @ keyᵀ · scale + mask) @ value."""
    if enable_gqa and query.shape[-3] != key.shape[-3]:
        key, value = _grouped(query, key), _grouped(query, value)
    return query.scaled_dot_product_attention(key, value, attn_mask, dropout_p, is_causal, scale)


@aten("_scaled_dot_product_flash_attention_for_cpu", widens=False)
def flash_attention(query: Tensor, key: Tensor, value: Tensor, dropout_p: float = 0.0, is_causal: bool = False, *,
                    attn_mask: Tensor | None = None, scale: float | None = None) -> tuple[Tensor, Callable[[], Tensor]]:
    """Attention on a CPU without gradients: the result, and a function for the logarithms that only training reads, which svod lacks."""
    def logarithms() -> Tensor:
        raise UnsupportedError("the logsumexp of flash attention")
    return attention(query, key, value, attn_mask, dropout_p, is_causal, scale, query.shape[-3] != key.shape[-3]), logarithms


def _kept(mask: Tensor | None, mask_type: int | None) -> Tensor | None:
    """Invert a mask of nn.MultiheadAttention, which is nonzero for scores to leave out: True for scores to keep, shape (…, L, S)."""
    if mask is None:
        return None
    kept = mask.eq(0)
    return kept.reshape(kept.shape[0], 1, 1, kept.shape[1]) if mask_type == 1 and mask.ndim == 2 else kept


def _self_attention(x: Tensor, heads: int, qkv: tuple[Tensor, Tensor | None], out: tuple[Tensor, Tensor | None],
                    kept: Tensor | None) -> Tensor:
    """Attention of (N, L, E) to itself, with the three projections in one weight (3E, E). A row without any kept score is NaN in
    PyTorch's fused layers, but zeros in its scaled_dot_product_attention."""
    n, length, width = x.shape
    parts = x.linear(*qkv).reshape(n, length, 3, heads, width // heads).permute(2, 0, 3, 1, 4)
    q, k, v = parts.unbind(0)
    attended = q.scaled_dot_product_attention(k, v, kept)
    if kept is not None:
        attended = attended.where(kept.any(-1, keepdim=True), math.nan)
    return attended.permute(0, 2, 1, 3).reshape(n, length, width).linear(*out)


@aten("_native_multi_head_attention", widens=False)
def multi_head_attention(query: Tensor, key: Tensor, value: Tensor, embed_dim: int, num_head: int, qkv_weight: Tensor,
                         qkv_bias: Tensor | None, proj_weight: Tensor, proj_bias: Tensor | None, mask: Tensor | None = None,
                         need_weights: bool = True, average_attn_weights: bool = True,
                         mask_type: int | None = None) -> tuple[Tensor, Callable[[], Tensor]]:
    """The attention of nn.MultiheadAttention of one tensor to itself, in evaluation mode. Calls that return the weights are left to
    PyTorch."""
    if query is not key or key is not value or need_weights:
        raise UnsupportedError("nn.MultiheadAttention of several tensors, or with its weights")

    def weights() -> Tensor:
        raise UnsupportedError("the weights of nn.MultiheadAttention")
    return _self_attention(query, num_head, (qkv_weight, qkv_bias), (proj_weight, proj_bias), _kept(mask, mask_type)), weights


@aten("_transformer_encoder_layer_fwd", widens=False)
def encoder_layer(x: Tensor, embed_dim: int, num_heads: int, qkv_weight: Tensor, qkv_bias: Tensor, proj_weight: Tensor, proj_bias: Tensor,
                  use_gelu: bool, norm_first: bool, eps: float, norm_weight_1: Tensor, norm_bias_1: Tensor, norm_weight_2: Tensor,
                  norm_bias_2: Tensor, ffn_weight_1: Tensor, ffn_bias_1: Tensor, ffn_weight_2: Tensor, ffn_bias_2: Tensor,
                  mask: Tensor | None = None, mask_type: int | None = None) -> Tensor:
    """nn.TransformerEncoderLayer in evaluation mode."""
    def norm(t: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        return t.layer_norm(embed_dim, weight, bias, eps)

    def attend(t: Tensor) -> Tensor:
        return _self_attention(t, num_heads, (qkv_weight, qkv_bias), (proj_weight, proj_bias), _kept(mask, mask_type))

    def feed(t: Tensor) -> Tensor:
        inner = t.linear(ffn_weight_1, ffn_bias_1)
        return (inner.gelu() if use_gelu else inner.relu()).linear(ffn_weight_2, ffn_bias_2)
    if norm_first:
        x = x + attend(norm(x, norm_weight_1, norm_bias_1))
        return x + feed(norm(x, norm_weight_2, norm_bias_2))
    x = norm(x + attend(x), norm_weight_1, norm_bias_1)
    return norm(x + feed(x), norm_weight_2, norm_bias_2)
