"""One block of GPT-2 small (Radford et al., 2019) with random weights: 1×256×768 float32, causal.

    svod-tune experiments/models/gpt2_block.py --beam 8
    python experiments/models/gpt2_block.py               what the tuning database has, else heuristics
    python experiments/models/gpt2_block.py --symbolic    one plan for every number of tokens; tuned once by
    svod-tune experiments/models/gpt2_block.py --beam 8 -- --symbolic
"""
from __future__ import annotations

from run_model import Array, run_model
from transformer import LayerNorm, Linear, attention_reference, merge_heads, split_heads

# isort: split
import math

import numpy as np

import svod
from svod import Tensor

EPS = 1e-5


class Gpt2Block:
    """(N, T, hidden) → the same shape: causal self-attention and a tanh-GELU perceptron of four times the width, each over a norm of its
    input and added to it."""

    def __init__(self, hidden: int = 768, heads: int = 12, seed: int = 0) -> None:
        rng = np.random.default_rng(seed)
        self.heads = heads
        self.norm1 = LayerNorm.random(rng, hidden, EPS)
        self.attention = Linear.random(rng, hidden, 3 * hidden)     # query, key and value in one product
        self.projection = Linear.random(rng, hidden, hidden)
        self.norm2 = LayerNorm.random(rng, hidden, EPS)
        self.up = Linear.random(rng, hidden, 4 * hidden)
        self.down = Linear.random(rng, 4 * hidden, hidden)

    def __call__(self, x: Tensor) -> Tensor:
        hidden = x.shape[-1]
        with svod.scope("ln_1"):
            y = self.norm1(x)
        with svod.scope("attn"):
            with svod.scope("c_attn"):
                together = self.attention(y)
            with svod.scope("self"):
                query, key, value = (split_heads(together[:, :, i * hidden:(i + 1) * hidden], self.heads) for i in range(3))
                y = merge_heads(query.scaled_dot_product_attention(key, value, is_causal=True))
            with svod.scope("c_proj"):
                x = self.projection(y) + x
        with svod.scope("ln_2"):
            y = self.norm2(x)
        with svod.scope("mlp"):
            with svod.scope("c_fc"):
                y = self.up(y).gelu("tanh")
            with svod.scope("c_proj"):
                return self.down(y) + x

    def reference(self, x: Array) -> Array:
        """The same in NumPy, in float64."""
        x = x.astype(np.float64)
        query, key, value = np.split(self.attention.reference(self.norm1.reference(x)), 3, axis=-1)
        x = x + self.projection.reference(attention_reference(query, key, value, self.heads, causal=True))
        y = self.up.reference(self.norm2.reference(x))
        y = 0.5 * y * (1 + np.tanh(math.sqrt(2 / math.pi) * (y + 0.044715 * y ** 3)))
        return x + self.down.reference(y)


if __name__ == "__main__":
    model = Gpt2Block()
    run_model(__doc__, model, np.random.default_rng(1).standard_normal((1, 256, 768), dtype=np.float32), model.reference, tokens=1)
