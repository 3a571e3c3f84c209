"""Attention."""
from __future__ import annotations

from collections.abc import Callable

from svod.errors import UnsupportedError
from svod.tensor import Tensor
from svod.torch.operations.table import aten


def _grouped(query: Tensor, x: Tensor) -> Tensor:
    """Keys or values of few heads, each repeated for the heads of the query that share it."""
    return x.repeat_interleave(query.shape[-3] // x.shape[-3], -3)


@aten("scaled_dot_product_attention")
def attention(query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None = None, dropout_p: float = 0.0, is_causal: bool = False,
              scale: float | None = None, enable_gqa: bool = False) -> Tensor:
    """softmax(query @ keyᵀ · scale + mask) @ value."""
    if enable_gqa and query.shape[-3] != key.shape[-3]:
        key, value = _grouped(query, key), _grouped(query, value)
    return query.scaled_dot_product_attention(key, value, attn_mask, dropout_p, is_causal, scale)


@aten("_scaled_dot_product_flash_attention_for_cpu")
def flash_attention(query: Tensor, key: Tensor, value: Tensor, dropout_p: float = 0.0, is_causal: bool = False, *,
                    attn_mask: Tensor | None = None, scale: float | None = None) -> tuple[Tensor, Callable[[], Tensor]]:
    """What attention becomes on a CPU without gradients: the result, and logarithms that only training reads."""
    def logarithms() -> Tensor:
        raise UnsupportedError("the logsumexp of flash attention")
    return attention(query, key, value, attn_mask, dropout_p, is_causal, scale, query.shape[-3] != key.shape[-3]), logarithms
