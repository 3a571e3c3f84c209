"""Layers of transformers (Vaswani et al., 2017), with PyTorch's parameters. Sequences are (batch, length, d_model)."""
from __future__ import annotations

from collections.abc import Callable
from typing import Any

from svod.errors import ArgumentError
from svod.nn.attention import MultiheadAttention
from svod.nn.linear import Linear
from svod.nn.module import Module, ModuleList
from svod.nn.norms import LayerNorm
from svod.tensor import Tensor

Activation = str | Callable[[Tensor], Tensor]


class _Layer(Module):
    """The common part of encoder and decoder layers: two linear layers, and the choice of norms before or after each block."""

    def __init__(self, d_model: int, dim_feedforward: int, activation: Activation, norm_first: bool) -> None:
        if isinstance(activation, str) and activation not in ("relu", "gelu"):
            raise ArgumentError(f"{type(self).__name__}(activation={activation!r}): use \"relu\", \"gelu\" or a function of a tensor")
        self.linear1, self.linear2 = Linear(d_model, dim_feedforward), Linear(dim_feedforward, d_model)
        self.activation, self.norm_first = activation, norm_first

    def _feed_forward(self, x: Tensor) -> Tensor:
        hidden = self.linear1(x)
        active = getattr(hidden, self.activation)() if isinstance(self.activation, str) else self.activation(hidden)
        result: Tensor = self.linear2(active)
        return result

    def _added(self, x: Tensor, norm: Module, block: Callable[[Tensor], Tensor]) -> Tensor:
        """Add block(x) to x, with the norm before the block (`norm_first`) or after the sum."""
        result: Tensor = x + block(norm(x)) if self.norm_first else norm(x + block(x))
        return result


class TransformerEncoderLayer(_Layer):
    """Self-attention and two linear layers, each added to its input and normalised. `dropout` is not used."""

    def __init__(self, d_model: int, nhead: int, dim_feedforward: int = 2048, dropout: float = 0.1, activation: Activation = "relu",
                 layer_norm_eps: float = 1e-5, batch_first: bool = True, norm_first: bool = False) -> None:
        self.self_attn = MultiheadAttention(d_model, nhead, batch_first=batch_first)
        super().__init__(d_model, dim_feedforward, activation, norm_first)
        self.norm1, self.norm2 = LayerNorm(d_model, layer_norm_eps), LayerNorm(d_model, layer_norm_eps)

    def forward(self, src: Tensor, src_mask: Tensor | None = None, src_key_padding_mask: Tensor | None = None,
                is_causal: bool = False) -> Tensor:
        """The encoded sequence. Masks are as in MultiheadAttention."""
        attended = self._added(src, self.norm1, lambda x: self.self_attn(x, key_padding_mask=src_key_padding_mask, attn_mask=src_mask,
                                                                         is_causal=is_causal))
        return self._added(attended, self.norm2, self._feed_forward)


class TransformerDecoderLayer(_Layer):
    """Self-attention, attention to the encoder's result, and two linear layers, each added to its input and normalised."""

    def __init__(self, d_model: int, nhead: int, dim_feedforward: int = 2048, dropout: float = 0.1, activation: Activation = "relu",
                 layer_norm_eps: float = 1e-5, batch_first: bool = True, norm_first: bool = False) -> None:
        self.self_attn = MultiheadAttention(d_model, nhead, batch_first=batch_first)
        self.multihead_attn = MultiheadAttention(d_model, nhead, batch_first=batch_first)
        super().__init__(d_model, dim_feedforward, activation, norm_first)
        self.norm1, self.norm2, self.norm3 = (LayerNorm(d_model, layer_norm_eps) for _ in range(3))

    def forward(self, tgt: Tensor, memory: Tensor, tgt_mask: Tensor | None = None, memory_mask: Tensor | None = None,
                tgt_key_padding_mask: Tensor | None = None, memory_key_padding_mask: Tensor | None = None,
                tgt_is_causal: bool = False) -> Tensor:
        """The decoded sequence. `memory`: the encoder's result."""
        x = self._added(tgt, self.norm1, lambda x: self.self_attn(x, key_padding_mask=tgt_key_padding_mask, attn_mask=tgt_mask,
                                                                  is_causal=tgt_is_causal))
        x = self._added(x, self.norm2, lambda x: self.multihead_attn(x, memory, memory, memory_key_padding_mask, attn_mask=memory_mask))
        return self._added(x, self.norm3, self._feed_forward)


class _Stack(Module):
    """`num_layers` layers in sequence, then an optional norm. `layer`: a layer to copy, or a function that makes one."""

    def __init__(self, layer: Module | Callable[[], Module], num_layers: int, norm: Module | None = None) -> None:
        self.layers = ModuleList([_another(layer) for _ in range(num_layers)])
        self.num_layers, self.norm = num_layers, norm


def _another(layer: Any) -> Module:
    """A copy of `layer` that shares its tensors until weights are loaded into one of the two; or the result of a function that makes a
    layer."""
    if not isinstance(layer, Module):
        made = layer()
        if not isinstance(made, Module):
            raise ArgumentError(f"a stack of layers needs a layer or a function that makes one, got {type(layer).__name__}")
        return made
    copy: Module = object.__new__(type(layer))
    for name, value in layer.__dict__.items():
        copy.__dict__[name] = _another(value) if isinstance(value, Module) else value
    return copy


class TransformerEncoder(_Stack):
    """`num_layers` encoder layers with the initial values of `layer`, then `norm`."""

    def forward(self, src: Tensor, mask: Tensor | None = None, src_key_padding_mask: Tensor | None = None,
                is_causal: bool = False) -> Tensor:
        """The encoded sequence."""
        for layer in self.layers:
            src = layer(src, mask, src_key_padding_mask, is_causal)
        return src if self.norm is None else self.norm(src)


class TransformerDecoder(_Stack):
    """`num_layers` decoder layers with the initial values of `layer`, then `norm`."""

    def forward(self, tgt: Tensor, memory: Tensor, tgt_mask: Tensor | None = None, memory_mask: Tensor | None = None,
                tgt_key_padding_mask: Tensor | None = None, memory_key_padding_mask: Tensor | None = None,
                tgt_is_causal: bool = False) -> Tensor:
        """The decoded sequence."""
        for layer in self.layers:
            tgt = layer(tgt, memory, tgt_mask, memory_mask, tgt_key_padding_mask, memory_key_padding_mask, tgt_is_causal)
        return tgt if self.norm is None else self.norm(tgt)
