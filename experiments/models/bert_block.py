"""One encoder block of BERT base (Devlin et al., 2018, https://arxiv.org/abs/1810.04805) with random weights: 1×128×768 float32.

    svod-tune experiments/models/bert_block.py --beam 8
    python experiments/models/bert_block.py               what the tuning database has, else heuristics
    python experiments/models/bert_block.py --symbolic    one plan for every number of tokens; tuned once by
    svod-tune experiments/models/bert_block.py --beam 8 -- --symbolic
"""
from __future__ import annotations

from run_model import Array, run_model
from transformer import LayerNorm, Linear, attention_reference, merge_heads, split_heads

# isort: split
import math

import numpy as np

import svod
from svod import Tensor

EPS = 1e-12


class BertBlock:
    """(N, T, hidden) → the same shape: self-attention and a GELU perceptron, each added to its input and normalised."""

    def __init__(self, hidden: int = 768, heads: int = 12, intermediate: int = 3072, seed: int = 0) -> None:
        rng = np.random.default_rng(seed)
        self.heads = heads
        self.query, self.key, self.value, self.output = (Linear.random(rng, hidden, hidden) for _ in range(4))
        self.norm1 = LayerNorm.random(rng, hidden, EPS)
        self.up = Linear.random(rng, hidden, intermediate)
        self.down = Linear.random(rng, intermediate, hidden)
        self.norm2 = LayerNorm.random(rng, hidden, EPS)

    def __call__(self, x: Tensor) -> Tensor:
        with svod.scope("attention"):
            parts = []
            for name, layer in (("query", self.query), ("key", self.key), ("value", self.value)):
                with svod.scope(name):
                    parts.append(split_heads(layer(x), self.heads))
            with svod.scope("self"):
                query, key, value = parts
                y = merge_heads(query.scaled_dot_product_attention(key, value))
            with svod.scope("output"):
                y = self.output(y) + x
            with svod.scope("norm"):
                x = self.norm1(y)
        with svod.scope("intermediate"):
            y = self.up(x).gelu()
        with svod.scope("output"):
            y = self.down(y) + x
        with svod.scope("norm"):
            return self.norm2(y)

    def reference(self, x: Array) -> Array:
        """The same in NumPy, in float64."""
        x = x.astype(np.float64)
        query, key, value = (layer.reference(x) for layer in (self.query, self.key, self.value))
        x = self.norm1.reference(self.output.reference(attention_reference(query, key, value, self.heads, causal=False)) + x)
        y = self.up.reference(x)
        y = 0.5 * y * (1 + np.vectorize(math.erf)(y / math.sqrt(2)))
        return self.norm2.reference(self.down.reference(y) + x)


if __name__ == "__main__":
    model = BertBlock()
    run_model(__doc__, model, np.random.default_rng(1).standard_normal((1, 128, 768), dtype=np.float32), model.reference, tokens=1)
