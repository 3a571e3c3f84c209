"""Common parts of the transformer blocks beside this file: layers with their NumPy counterparts, and random weights of the right size."""
from __future__ import annotations

from run_model import Array, glorot

# isort: split
from typing import NamedTuple

import numpy as np

from svod import Tensor


class Linear(NamedTuple):
    """x @ weightᵀ + bias: weight (out, in), bias (out,)."""

    weight: Array
    bias: Array

    @classmethod
    def random(cls, rng: np.random.Generator, inputs: int, outputs: int) -> Linear:
        return cls(glorot(rng, outputs, inputs), rng.uniform(-0.1, 0.1, outputs).astype(np.float32))

    def __call__(self, x: Tensor) -> Tensor:
        return x.linear(Tensor(self.weight), Tensor(self.bias))

    def reference(self, x: Array) -> Array:
        return np.asarray(x @ self.weight.astype(x.dtype).T + self.bias)


class LayerNorm(NamedTuple):
    """Layer norm over the last axis: gain and offset (features,)."""

    gain: Array
    offset: Array
    eps: float

    @classmethod
    def random(cls, rng: np.random.Generator, features: int, eps: float) -> LayerNorm:
        return cls(rng.uniform(0.8, 1.2, features).astype(np.float32), rng.uniform(-0.1, 0.1, features).astype(np.float32), eps)

    def __call__(self, x: Tensor) -> Tensor:
        return x.layer_norm(x.shape[-1], Tensor(self.gain), Tensor(self.offset), self.eps)

    def reference(self, x: Array) -> Array:
        return np.asarray((x - x.mean(-1, keepdims=True)) / np.sqrt(x.var(-1, keepdims=True) + self.eps) * self.gain + self.offset)


def split_heads(x: Tensor, heads: int) -> Tensor:
    """(N, T, heads · E) → (N, heads, T, E)."""
    n, t, features = x.shape
    return x.reshape(n, t, heads, features // heads).transpose(1, 2)


def merge_heads(x: Tensor) -> Tensor:
    """(N, heads, T, E) → (N, T, heads · E)."""
    n, heads, t, features = x.shape
    return x.transpose(1, 2).reshape(n, t, heads * features)


def attention_reference(query: Array, key: Array, value: Array, heads: int, causal: bool) -> Array:
    """Attention of (N, T, heads · E) operands, a loop over heads: softmax(q kᵀ / √E) v."""
    t, features = query.shape[1], query.shape[2] // heads
    out = np.empty_like(query)
    for h in range(heads):
        part = np.s_[:, :, h * features:(h + 1) * features]
        scores = query[part] @ key[part].transpose(0, 2, 1) / np.sqrt(features)
        if causal:
            scores[:, np.triu(np.ones((t, t), bool), 1)] = -np.inf
        e = np.exp(scores - scores.max(-1, keepdims=True))
        out[part] = e / e.sum(-1, keepdims=True) @ value[part]
    return out
