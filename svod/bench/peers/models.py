"""The models of experiments/models as sequences of layers, so that every library can run them with the weights of the svod model.

    forward(layers, "resnet18", model, x)      layers.conv2d(…), layers.batch_norm(…), …

The `Layers` of a library compute at once (torch), emit nodes (ONNX) or are traced (JAX).
"""
from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol, TypeVar

from svod.bench.peers import Array
from svod.errors import UnsupportedError

V = TypeVar("V")


class Layers(Protocol[V]):
    """The layers that a library implements. V is its type of values. Weights are NumPy arrays in torch's layouts; linear weights are
    (out, in)."""

    def linear(self, x: V, weight: Array, bias: Array) -> V: ...
    def conv2d(self, x: V, weight: Array, stride: int, padding: int) -> V: ...
    def batch_norm(self, x: V, mean: Array, variance: Array, gain: Array, offset: Array, eps: float) -> V: ...
    def layer_norm(self, x: V, gain: Array, offset: Array, eps: float) -> V: ...
    def relu(self, x: V) -> V: ...
    def gelu(self, x: V, approximate: str) -> V: ...
    def softmax(self, x: V) -> V: ...
    def add(self, x: V, y: V) -> V: ...
    def max_pool2d(self, x: V, kernel: int, stride: int, padding: int) -> V: ...

    def spatial_mean(self, x: V) -> V:
        """The mean over both spatial axes: (N, C, H, W) → (N, C)."""
        ...

    def split(self, x: V, parts: int) -> Sequence[V]:
        """Equal parts of x along the last axis."""
        ...

    def attention(self, query: V, key: V, value: V, heads: int, width: int, causal: bool) -> V:
        """Attention with several heads; operands and result are (N, T, heads · width)."""
        ...


def forward(layers: Layers[V], script: str, model: Any, x: V) -> V:
    """Apply the model of `script` to x. Raises UnsupportedError for a model that is not written in layers."""
    if script not in MODELS:
        raise UnsupportedError(f"the model of {script} is written for svod only")
    result: V = MODELS[script](layers, model, x)
    return result


def _mlp(layers: Layers[V], model: Any, x: V) -> V:
    last = len(model.weights) - 1
    for i, (w, b) in enumerate(zip(model.weights, model.biases, strict=True)):
        x = layers.linear(x, w, b)
        x = layers.relu(x) if i < last else x
    return layers.softmax(x)


def _conv_norm(layers: Layers[V], c: Any, x: V) -> V:
    return layers.batch_norm(layers.conv2d(x, c.weight, c.stride, c.padding), c.mean, c.variance, c.gain, c.offset, 1e-5)


def _resnet18(layers: Layers[V], model: Any, x: V) -> V:
    y = layers.max_pool2d(layers.relu(_conv_norm(layers, model.conv1, x)), 3, 2, 1)
    for block in model.blocks:
        inner = _conv_norm(layers, block.conv2, layers.relu(_conv_norm(layers, block.conv1, y)))
        shortcut = y if block.downsample is None else _conv_norm(layers, block.downsample, y)
        y = layers.relu(layers.add(inner, shortcut))
    return layers.linear(layers.spatial_mean(y), model.fc, model.fc_bias)


def _linear(layers: Layers[V], layer: Any, x: V) -> V:
    return layers.linear(x, layer.weight, layer.bias)


def _norm(layers: Layers[V], layer: Any, x: V) -> V:
    return layers.layer_norm(x, layer.gain, layer.offset, layer.eps)


def _bert_block(layers: Layers[V], model: Any, x: V) -> V:
    query, key, value = (_linear(layers, part, x) for part in (model.query, model.key, model.value))
    y = layers.attention(query, key, value, model.heads, model.query.weight.shape[0] // model.heads, False)
    x = _norm(layers, model.norm1, layers.add(_linear(layers, model.output, y), x))
    y = layers.gelu(_linear(layers, model.up, x), "none")
    return _norm(layers, model.norm2, layers.add(_linear(layers, model.down, y), x))


def _gpt2_block(layers: Layers[V], model: Any, x: V) -> V:
    query, key, value = layers.split(_linear(layers, model.attention, _norm(layers, model.norm1, x)), 3)
    y = layers.attention(query, key, value, model.heads, model.projection.weight.shape[0] // model.heads, True)
    x = layers.add(_linear(layers, model.projection, y), x)
    y = layers.gelu(_linear(layers, model.up, _norm(layers, model.norm2, x)), "tanh")
    return layers.add(_linear(layers, model.down, y), x)


MODELS: Mapping[str, Callable[[Any, Any, Any], Any]] = {
    "mlp": _mlp,
    "resnet18": _resnet18,
    "bert_block": _bert_block,
    "gpt2_block": _gpt2_block,
}
