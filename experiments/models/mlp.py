"""A perceptron of three layers, a few hundred wide: small enough to search at prepare time.

    python experiments/models/mlp.py                      what the tuning database has, else heuristics
    BEAM=4 python experiments/models/mlp.py               search what it does not have, within BEAM_BUDGET seconds
    svod-tune experiments/models/mlp.py --beam 8
"""
from __future__ import annotations

from run_model import Array, glorot, run_model

# isort: split
import itertools

import numpy as np

import svod
from svod import Tensor


class Perceptron:
    """Linear layers with ReLU between them and a softmax at the end: (batch, widths[0]) → (batch, widths[-1]), float32."""

    def __init__(self, widths: tuple[int, ...] = (256, 512, 384, 10), seed: int = 0) -> None:
        rng = np.random.default_rng(seed)
        self.weights = [glorot(rng, o, i, gain=2 ** 0.5) for i, o in itertools.pairwise(widths)]
        self.biases = [rng.uniform(-0.1, 0.1, o).astype(np.float32) for o in widths[1:]]

    def __call__(self, x: Tensor) -> Tensor:
        last = len(self.weights) - 1
        for i, (w, b) in enumerate(zip(self.weights, self.biases, strict=True)):
            with svod.scope(f"layers.{i}"):
                x = x.linear(Tensor(w), Tensor(b))
                if i < last:
                    x = x.relu()
        with svod.scope("softmax"):
            return x.softmax(-1)

    def reference(self, x: Array) -> Array:
        """The same in NumPy, in float64."""
        y = x.astype(np.float64)
        for i, (w, b) in enumerate(zip(self.weights, self.biases, strict=True)):
            y = y @ w.T + b
            if i < len(self.weights) - 1:
                y = np.maximum(y, 0)
        e = np.exp(y - y.max(-1, keepdims=True))
        return np.asarray(e / e.sum(-1, keepdims=True))


if __name__ == "__main__":
    model = Perceptron()
    run_model(__doc__, model, np.random.default_rng(1).standard_normal((64, 256), dtype=np.float32), model.reference)
