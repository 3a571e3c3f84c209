"""ResNet-18 (He et al., 2015, https://arxiv.org/abs/1512.03385) with random weights, for inference: 1×3×224×224 float32 → 1×1000.

    svod-tune experiments/models/resnet18.py --beam 8 --budget 120
    python experiments/models/resnet18.py                 what the tuning database has, else heuristics
"""
from __future__ import annotations

from run_model import Array, glorot, run_model

# isort: split
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

import svod
from svod import Tensor

EPS = 1e-5


class ConvNorm(NamedTuple):
    """A convolution without bias and the batch norm after it: weight (O, C, K, K); mean, variance, gain and offset (O,)."""

    weight: Array
    mean: Array
    variance: Array
    gain: Array
    offset: Array
    stride: int
    padding: int

    def __call__(self, x: Tensor) -> Tensor:
        y = x.conv2d(Tensor(self.weight), stride=self.stride, padding=self.padding)
        return y.batch_norm(Tensor(self.mean), Tensor(self.variance), Tensor(self.gain), Tensor(self.offset), eps=EPS)

    def reference(self, x: Array) -> Array:
        """The same in NumPy: windows, one product, the norm as its formula has it."""
        k, s, p = self.weight.shape[-1], self.stride, self.padding
        padded = np.pad(x, ((0, 0), (0, 0), (p, p), (p, p)))
        windows = np.lib.stride_tricks.sliding_window_view(padded, (k, k), axis=(2, 3))[:, :, ::s, ::s]   # N C OH OW K K
        y = np.tensordot(windows, self.weight.astype(x.dtype), ((1, 4, 5), (1, 2, 3))).transpose(0, 3, 1, 2)
        mean, variance, gain, offset = (v.astype(x.dtype)[:, None, None] for v in self[1:5])
        return np.asarray((y - mean) / np.sqrt(variance + EPS) * gain + offset)


class Block(NamedTuple):
    """Two 3×3 convolutions beside a shortcut, which is a 1×1 convolution where the shape changes."""

    path: str
    conv1: ConvNorm
    conv2: ConvNorm
    downsample: ConvNorm | None

    def __call__(self, x: Tensor) -> Tensor:
        with svod.scope(self.path):
            with svod.scope("conv1"):
                y = self.conv1(x).relu()
            shortcut = x
            if self.downsample is not None:
                with svod.scope("downsample"):
                    shortcut = self.downsample(x)
            with svod.scope("conv2"):   # the sum and the last ReLU are part of its kernel
                return (self.conv2(y) + shortcut).relu()

    def reference(self, x: Array) -> Array:
        y = self.conv2.reference(np.maximum(self.conv1.reference(x), 0))
        return np.maximum(y + (x if self.downsample is None else self.downsample.reference(x)), 0)


class ResNet18:
    """(N, 3, H, W) → (N, classes) logits. `width` is the number of channels of the first stage, 64 in the paper; `blocks` of each stage, in
    ResNet-34 (3, 4, 6, 3)."""

    def __init__(self, width: int = 64, classes: int = 1000, blocks: Sequence[int] = (2, 2, 2, 2), seed: int = 0) -> None:
        rng = np.random.default_rng(seed)

        def conv(inputs: int, outputs: int, size: int, stride: int) -> ConvNorm:
            weight = glorot(rng, outputs, inputs, size, size, gain=2 ** 0.5)
            mean, offset = (rng.uniform(-0.1, 0.1, outputs).astype(np.float32) for _ in range(2))
            variance, gain = (rng.uniform(0.8, 1.2, outputs).astype(np.float32) for _ in range(2))
            return ConvNorm(weight, mean, variance, gain, offset, stride, size // 2)

        self.conv1 = conv(3, width, 7, 2)
        self.blocks = []
        inputs = width
        for stage, count in enumerate(blocks):
            outputs = width << stage
            for i in range(count):
                stride = 2 if stage and not i else 1
                conv1, conv2 = conv(inputs, outputs, 3, stride), conv(outputs, outputs, 3, 1)
                downsample = conv(inputs, outputs, 1, stride) if stride > 1 else None
                self.blocks.append(Block(f"layer{stage + 1}.{i}", conv1, conv2, downsample))
                inputs = outputs
        self.fc = glorot(rng, classes, inputs)
        self.fc_bias = rng.uniform(-0.1, 0.1, classes).astype(np.float32)

    def __call__(self, x: Tensor) -> Tensor:
        with svod.scope("conv1"):
            y = self.conv1(x).relu()
        with svod.scope("maxpool"):
            y = y.max_pool2d(3, stride=2, padding=1)
        for block in self.blocks:
            y = block(y)
        with svod.scope("avgpool"):
            y = y.mean((2, 3))
        with svod.scope("fc"):
            return y.linear(Tensor(self.fc), Tensor(self.fc_bias))

    def reference(self, x: Array) -> Array:
        """The same in NumPy, in float64."""
        y = np.maximum(self.conv1.reference(x.astype(np.float64)), 0)
        padded = np.pad(y, ((0, 0), (0, 0), (1, 1), (1, 1)))   # after a ReLU a zero never wins over what it stands beside
        y = np.lib.stride_tricks.sliding_window_view(padded, (3, 3), axis=(2, 3))[:, :, ::2, ::2].max((4, 5))
        for block in self.blocks:
            y = block.reference(y)
        return np.asarray(y.mean((2, 3)) @ self.fc.T + self.fc_bias)


if __name__ == "__main__":
    model = ResNet18()
    run_model(__doc__, model, np.random.default_rng(1).standard_normal((1, 3, 224, 224), dtype=np.float32), model.reference)
