"""Complete small models on the adapter, compared with NumPy: a block of a transformer, and a network of residual blocks."""
from __future__ import annotations

import math

import numpy as np
import pytest

import svod
from svod import Tensor, nn
from svod.config import PrepareConfig
from svod.core.graph.buffer import Array
from svod.core.machine.target import Target

CONFIG = PrepareConfig(db=":none:")
HEADS, WIDTH, LENGTH = 2, 12, 7


def set_values(model: nn.Module, rng: np.random.Generator) -> dict[str, Array]:
    """Set a model's parameters and buffers to random values that keep activations near 1; returns them by path."""
    drawn: dict[str, Array] = {}
    for path, tensor in model.state_dict().items():
        if np.issubdtype(tensor.numpy().dtype, np.floating):
            values = rng.standard_normal(tensor.shape) / math.sqrt(math.prod(tensor.shape[1:]))
            if path.endswith("running_var") or ("norm" in path and path.endswith("weight")):
                values = np.abs(1 + 0.2 * values)
            elif values.ndim == 1:
                values *= 0.2
            drawn[path] = values.astype(np.float32)
    model.load_state_dict({**model.state_dict(), **{path: Tensor(values) for path, values in drawn.items()}})
    return drawn


def softmax(x: Array) -> Array:
    e = np.exp(x - x.max(-1, keepdims=True))
    return np.asarray(e / e.sum(-1, keepdims=True))


def encoder_layer(x: Array, w: dict[str, Array], causal: bool) -> Array:
    """Compute a layer of a transformer, with norms after the sums, by NumPy in float64."""
    def norm(x: Array, name: str) -> Array:
        centred = x - x.mean(-1, keepdims=True)
        return np.asarray(centred / np.sqrt((centred**2).mean(-1, keepdims=True) + 1e-5) * w[f"{name}.weight"] + w[f"{name}.bias"])
    batch, length, width = x.shape
    q, k, v = (part.reshape(batch, length, HEADS, -1).transpose(0, 2, 1, 3) for part in
               np.split(x @ w["self_attn.in_proj_weight"].T + w["self_attn.in_proj_bias"], 3, -1))
    scores = q @ k.transpose(0, 1, 3, 2) / math.sqrt(width // HEADS)
    if causal:
        scores = np.where(np.tri(length, dtype=bool), scores, -np.inf)
    joined = (softmax(scores) @ v).transpose(0, 2, 1, 3).reshape(x.shape)
    x = norm(x + joined @ w["self_attn.out_proj.weight"].T + w["self_attn.out_proj.bias"], "norm1")
    hidden = np.maximum(x @ w["linear1.weight"].T + w["linear1.bias"], 0)
    return norm(x + hidden @ w["linear2.weight"].T + w["linear2.bias"], "norm2")


@pytest.mark.slow
@pytest.mark.parametrize("causal", [False, True])
def test_a_block_of_a_transformer(causal: bool, webgpu: Target) -> None:
    rng = np.random.default_rng(causal)
    model = nn.TransformerEncoderLayer(WIDTH, HEADS, dim_feedforward=20)
    weights = set_values(model, rng)
    model = model.to("WEBGPU")
    f = svod.jit(lambda x: model(x.to("WEBGPU"), is_causal=causal).to("CPU"), config=CONFIG)
    for _ in range(2):
        x = rng.standard_normal((2, LENGTH, WIDTH)).astype(np.float32)
        np.testing.assert_allclose(f(x).numpy(), encoder_layer(x.astype(np.float64), weights, causal), rtol=1e-4, atol=1e-4)


class Residual(nn.Module):
    """A residual block relu(shortcut(x) + two convolutions of x), whose first convolution has the stride."""

    def __init__(self, channels: int, out: int, stride: int) -> None:
        self.conv1, self.norm1 = nn.Conv2d(channels, out, 3, stride, 1, bias=False), nn.BatchNorm2d(out)
        self.conv2, self.norm2 = nn.Conv2d(out, out, 3, 1, 1, bias=False), nn.BatchNorm2d(out)
        self.short = nn.Conv2d(channels, out, 1, stride) if stride > 1 else None

    def forward(self, x: Tensor) -> Tensor:
        made: Tensor = self.norm2(self.conv2(self.norm1(self.conv1(x)).relu()))
        return (made + (x if self.short is None else self.short(x))).relu()


class Network(nn.Module):
    """A network of residual blocks at 32 × 32, 16 × 16 and 8 × 8 pixels, then a mean and a linear layer."""

    def __init__(self) -> None:
        self.stem, self.stem_norm = nn.Conv2d(3, 4, 3, 2, 1, bias=False), nn.BatchNorm2d(4)
        self.first, self.second = Residual(4, 4, 1), Residual(4, 8, 2)
        self.fc = nn.Linear(8, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = self.second(self.first(self.stem_norm(self.stem(x)).relu()))
        result: Tensor = self.fc(x.mean((2, 3)))
        return result


def network(x: Array, w: dict[str, Array]) -> Array:
    """Compute `Network` by NumPy in float64."""
    def conv(x: Array, name: str, stride: int) -> Array:
        kernel, bias = w[f"{name}.weight"], w.get(f"{name}.bias")
        size = kernel.shape[-1]
        edge = size // 2
        windows = np.lib.stride_tricks.sliding_window_view(np.pad(x, ((0, 0), (0, 0), (edge, edge), (edge, edge))), (size, size), (2, 3))
        made = np.einsum("nchwij,ocij->nohw", windows[:, :, ::stride, ::stride], kernel)
        return made if bias is None else made + bias.reshape(-1, 1, 1)

    def norm(x: Array, name: str) -> Array:
        mean, variance, weight, bias = (w[f"{name}.{part}"].reshape(-1, 1, 1) for part in ("running_mean", "running_var", "weight", "bias"))
        return np.asarray((x - mean) / np.sqrt(variance + 1e-5) * weight + bias)

    def residual(x: Array, name: str, stride: int) -> Array:
        made = norm(conv(np.maximum(norm(conv(x, f"{name}.conv1", stride), f"{name}.norm1"), 0), f"{name}.conv2", 1), f"{name}.norm2")
        return np.maximum(made + (conv(x, f"{name}.short", stride) if stride > 1 else x), 0)
    x = np.maximum(norm(conv(x, "stem", 2), "stem_norm"), 0)
    x = residual(residual(x, "first", 1), "second", 2)
    return np.asarray(x.mean((2, 3)) @ w["fc.weight"].T + w["fc.bias"])


@pytest.mark.slow
def test_a_network_of_residual_blocks(webgpu: Target) -> None:
    rng = np.random.default_rng(2)
    model = Network()
    weights = set_values(model, rng)
    model = model.to("WEBGPU")
    f = svod.jit(lambda x: model(x.to("WEBGPU")).to("CPU"), config=CONFIG)
    for _ in range(2):
        x = rng.standard_normal((1, 3, 32, 32)).astype(np.float32)
        np.testing.assert_allclose(f(x).numpy(), network(x.astype(np.float64), weights), rtol=1e-3, atol=1e-4)
