"""Layers against NumPy, their names against PyTorch's; parameters taken and given."""
from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import svod
from svod import nn
from svod.core.ir.origin import origin_of
from svod.errors import ShapeError, StateError, UnsupportedError
from svod.tensor import Tensor
from tests.draws import a_half
from tests.graph_reference import evaluate_graph
from tests.tensor.strategies import Array, make


def close(t: Tensor, expected: Any) -> None:
    """Compare by the interpreter of graphs, because layers consist of tested operations."""
    found = evaluate_graph(t.uop)
    assert found.shape == np.shape(expected)
    np.testing.assert_allclose(found, expected, rtol=2e-5, atol=2e-5)


def with_values(module: nn.Module, seed: int = 0) -> dict[str, Array]:
    """Set random parameters in the module."""
    state = {n: make(t.shape, "float32", seed + i) for i, (n, t) in enumerate(module.state_dict().items())}
    state = {n: abs(a) if n.endswith("var") else a for n, a in state.items()}
    module.load_state_dict(state)
    return state


def sigmoid(x: Array) -> Array:
    return 1 / (1 + np.exp(-x))


def test_linear_embedding_and_norms() -> None:
    x = make((2, 6, 5), "float32", 9)
    linear = nn.Linear(5, 3)
    s = with_values(linear)
    close(linear(Tensor(x)), x @ s["weight"].T + s["bias"])
    table = nn.Embedding(7, 4)
    s = with_values(table)
    close(table(Tensor([[1, 6]])), s["weight"][[[1, 6]]])
    norm = nn.BatchNorm1d(6)
    s = with_values(norm)
    scale = s["weight"] / np.sqrt(s["running_var"] + 1e-5)
    close(norm(Tensor(x)), (x - s["running_mean"][:, None]) * scale[:, None] + s["bias"][:, None])
    layer = nn.LayerNorm(5)
    s = with_values(layer)
    close(layer(Tensor(x)), (x - x.mean(-1, keepdims=True)) / np.sqrt(x.var(-1, keepdims=True) + 1e-5) * s["weight"] + s["bias"])
    group = nn.GroupNorm(2, 6)
    s = with_values(group)
    y = x.reshape(2, 2, 15)
    y = ((y - y.mean(-1, keepdims=True)) / np.sqrt(y.var(-1, keepdims=True) + 1e-5)).reshape(x.shape)
    close(group(Tensor(x)), y * s["weight"][:, None] + s["bias"][:, None])
    close(nn.InstanceNorm1d(6)(Tensor(x)), (x - x.mean(-1, keepdims=True)) / np.sqrt(x.var(-1, keepdims=True) + 1e-5))
    close(nn.RMSNorm(5, eps=1e-6)(Tensor(x)), x / np.sqrt((x ** 2).mean(-1, keepdims=True) + 1e-6))
    with pytest.raises(ShapeError, match="BatchNorm2d of"):
        nn.BatchNorm2d(6)(Tensor(x))


def test_convolutions() -> None:
    x = make((1, 2, 5), "float32", 3)
    conv = nn.Conv1d(2, 3, 3, padding=1, padding_mode="circular")
    s = with_values(conv)
    wide = np.pad(x, [(0, 0), (0, 0), (1, 1)], mode="wrap")
    close(conv(Tensor(x)), np.stack([np.tensordot(s["weight"], wide[0, :, i:i + 3], 2) + s["bias"] for i in range(5)], -1)[None])
    up = nn.ConvTranspose1d(2, 3, 2, stride=2)
    s = with_values(up)
    close(up(Tensor(x)), (np.einsum("ncl,cok->nolk", x, s["weight"]).reshape(1, 3, 10) + s["bias"][:, None]))
    assert nn.Conv2d(4, 6, (3, 5), groups=2).weight.shape == (6, 2, 3, 5)
    assert nn.ConvTranspose3d(4, 6, 2, groups=2).weight.shape == (4, 3, 2, 2, 2)
    close(nn.MaxPool1d(2)(Tensor(x)), x[..., :4].reshape(1, 2, 2, 2).max(-1))
    with pytest.raises(ShapeError, match=r"Conv2d from 4 to 5 channels in 2 group\(s\)"):
        nn.Conv2d(4, 5, 3, groups=2)
    with pytest.raises(ShapeError, match=r"Conv2d with kernel_size \(3,\): give one number, or one for each of 2 axes"):
        nn.Conv2d(4, 4, (3,))


class Convolution(nn.Conv2d):
    """A convolution defined by a user."""


class Norm(nn.BatchNorm2d):
    """A norm defined by a user."""


def test_a_subclass_keeps_the_axes_of_its_layer() -> None:
    x = Tensor.zeros(1, 2, 4, 4)
    assert Convolution(2, 3, 3)(x).shape == (1, 3, 2, 2) and Norm(2)(x).shape == x.shape


def test_attention() -> None:
    x, y = make((2, 4, 6), "float32", 1), make((2, 3, 6), "float32", 2)
    layer = nn.MultiheadAttention(6, 2)
    s = with_values(layer)
    assert list(s) == ["in_proj_weight", "in_proj_bias", "out_proj.weight", "out_proj.bias"]

    def expected(query: Array, key: Array, hidden: Array) -> Array:
        parts = zip(np.split(s["in_proj_weight"], 3), np.split(s["in_proj_bias"], 3), (query, key, key), strict=True)
        q, k, v = ((t @ w.T + b).reshape(2, -1, 2, 3).transpose(0, 2, 1, 3) for w, b, t in parts)
        scores = np.where(hidden, -np.inf, q @ k.transpose(0, 1, 3, 2) / np.sqrt(3))
        weights = np.exp(scores - scores.max(-1, keepdims=True))
        heads = weights / weights.sum(-1, keepdims=True) @ v
        return heads.transpose(0, 2, 1, 3).reshape(2, -1, 6) @ s["out_proj.weight"].T + s["out_proj.bias"]
    causal = np.triu(np.ones((4, 4), bool), 1)
    close(layer(Tensor(x), is_causal=True), expected(x, x, causal))
    close(layer(Tensor(x), attn_mask=Tensor(causal)), expected(x, x, causal))
    padding = np.array([[False, False, True], [False, True, False]])
    close(layer(Tensor(x), Tensor(y), Tensor(y), Tensor(padding)), expected(x, y, padding[:, None, None]))
    turned = nn.MultiheadAttention(6, 2, batch_first=False).load_state_dict(layer.state_dict())
    close(turned(Tensor(x).transpose(0, 1), is_causal=True), expected(x, x, causal).swapaxes(0, 1))
    close(turned(*(Tensor(t).transpose(0, 1) for t in (x, y, y)), Tensor(padding)), expected(x, y, padding[:, None, None]).swapaxes(0, 1))
    both = padding[:, None, None] | causal[:, :3]
    close(layer(Tensor(x), Tensor(y), Tensor(y), Tensor(padding), attn_mask=Tensor(causal[:, :3])), expected(x, y, both))
    added = Tensor(np.where(causal[:, :3], -np.inf, 0).astype(np.float32))
    close(layer(Tensor(x), Tensor(y), Tensor(y), Tensor(padding), attn_mask=added), expected(x, y, both))


def test_arguments_stand_where_pytorch_has_them() -> None:
    assert not nn.BatchNorm2d(4, 1e-5, 0.1, False).state_dict().keys() & {"weight", "bias"}
    assert list(nn.InstanceNorm1d(4, 1e-5, 0.1, True).state_dict()) == ["weight", "bias"]
    x = Tensor.zeros(1, 2, 7, 7)
    assert nn.MaxPool2d(2, 2, 0, 2, False, True)(x).shape == (1, 2, 3, 3) and nn.AvgPool2d(2, 2, 0, True, False)(x).shape == (1, 2, 4, 4)
    with pytest.raises(UnsupportedError, match="return_indices"):
        nn.MaxPool1d(2, return_indices=True)
    assert nn.MultiheadAttention(6, 2, 0.0).in_proj_bias is not None and nn.MultiheadAttention(6, 2, 0.1, False).in_proj_bias is None


def test_recurrent_cells() -> None:
    x, h, c = make((2, 4), "float32", 1), make((2, 3), "float32", 2), make((2, 3), "float32", 3)

    def products(cell: nn.Module) -> tuple[Array, Array]:
        s = with_values(cell)
        return x @ s["weight_ih"].T + s["bias_ih"], h @ s["weight_hh"].T + s["bias_hh"]
    rnn, lstm, gru = nn.RNNCell(4, 3), nn.LSTMCell(4, 3), nn.GRUCell(4, 3)
    a, b = products(rnn)
    close(rnn(Tensor(x), Tensor(h)), np.tanh(a + b))
    a, b = products(lstm)
    i, f, g, o = np.split(a + b, 4, -1)
    cell = sigmoid(f) * c + sigmoid(i) * np.tanh(g)
    found = lstm(Tensor(x), (Tensor(h), Tensor(c)))
    close(found[0], sigmoid(o) * np.tanh(cell))
    close(found[1], cell)
    a, b = products(gru)
    (ar, az, an), (br, bz, bn) = np.split(a, 3, -1), np.split(b, 3, -1)
    z = sigmoid(az + bz)
    close(gru(Tensor(x), Tensor(h)), (1 - z) * np.tanh(an + sigmoid(ar + br) * bn) + z * h)
    assert rnn(Tensor(x)).shape == lstm(Tensor(x))[0].shape == (2, 3)
    relu = nn.RNNCell(4, 3, nonlinearity="relu")
    a, b = products(relu)
    close(relu(Tensor(x), Tensor(h)), np.maximum(a + b, 0))
    with pytest.raises(UnsupportedError, match="RNNCell with nonlinearity 'sin'"):
        nn.RNNCell(4, 3, True, "sin")
    table = evaluate_graph(nn.Embedding(5, 3, padding_idx=1).weight.uop)
    assert not table[1].any() and table[[0, 2, 3, 4]].all()


@pytest.mark.parametrize(("name", "length", "batch", "wide", "hidden", "layers", "both"), a_half([
    ("RNN", 1, 2, 3, 5, 1, False), ("LSTM", 5, 3, 4, 7, 2, True), ("GRU", 4, 1, 1, 1, 2, True), ("GRU", 7, 2, 5, 3, 1, False)]))
def test_recurrent_layers(name: str, length: int, batch: int, wide: int, hidden: int, layers: int, both: bool) -> None:
    """Recurrent layers against steps in NumPy, layer by layer and in both directions, with and without given states and a batch axis."""
    count, pair = layers * (1 + both), name == "LSTM"
    layer = getattr(nn, name)(wide, hidden, layers, bidirectional=both)
    s = with_values(layer)
    x, h, c = (make(shape, "float32", i) for i, shape in enumerate([(length, batch, wide), *[(count, batch, hidden)] * 2]))

    def walk(steps: Array, suffix: str, state: list[Array]) -> list[Array]:
        found = []
        for t in steps:
            a, b = (v @ s[f"weight_{k}{suffix}"].T + s[f"bias_{k}{suffix}"] for v, k in ((t, "ih"), (state[0], "hh")))
            if name == "RNN":
                state[0] = np.tanh(a + b)
            elif pair:
                i, f, g, o = np.split(a + b, 4, -1)
                state[1] = sigmoid(f) * state[1] + sigmoid(i) * np.tanh(g)
                state[0] = sigmoid(o) * np.tanh(state[1])
            else:
                (ar, az, an), (br, bz, bn) = np.split(a, 3, -1), np.split(b, 3, -1)
                z = sigmoid(az + bz)
                state[0] = (1 - z) * np.tanh(an + sigmoid(ar + br) * bn) + z * state[0]
            found.append(state[0])
        return found

    def expected(x: Array, start: list[Array]) -> tuple[Array, list[Array]]:
        steps, last = x, []
        for n in range(layers):
            ways = []
            for back in range(1 + both):
                state = [v[len(last)] for v in start]
                found = walk(steps[::-1] if back else steps, f"_l{n}" + "_reverse" * back, state)
                ways.append(np.stack(found[::-1] if back else found))
                last.append(state)
            steps = np.concatenate(ways, -1)
        return steps, [np.stack([v[k] for v in last]) for k in range(1 + pair)]
    given = [h, c][:1 + pair]
    state = tuple(map(Tensor, given)) if pair else Tensor(h)
    for start, found in (([np.zeros_like(v) for v in given], layer(Tensor(x))), (given, layer(Tensor(x), state))):
        outputs, last = expected(x, start)
        close(found[0], outputs)
        for value, want in zip(found[1] if pair else (found[1],), last, strict=True):
            close(value, want)
    layer.batch_first = True
    close(layer(Tensor(x.swapaxes(0, 1).copy()), state)[0], expected(x, given)[0].swapaxes(0, 1))
    close(layer(Tensor(x[:, 0].copy()))[0], expected(x[:, :1], [np.zeros_like(v[:, :1]) for v in given])[0][:, 0])
    with pytest.raises(ShapeError, match=f"{name} of .* with states of .*: each is \\({count}, {batch}, {hidden}\\)"):
        layer(Tensor(x.swapaxes(0, 1).copy()), (Tensor(h[0]),) * 2 if pair else Tensor(h[0]))


class Model(nn.Module):
    """Modules as attributes, in a list, and shared names."""

    def __init__(self) -> None:
        self.stem = nn.Linear(4, 4)
        self.blocks = nn.ModuleList([nn.Sequential(nn.Linear(4, 4, bias=False), nn.GELU("tanh")), nn.Sequential(nn.ReLU(), nn.PReLU())])
        self.scale = Tensor.ones(1)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for block in self.blocks:
            x = block(x)
        return x.mul(self.scale)


def test_parameters_have_paths_and_kernels_know_them() -> None:
    model = Model()
    assert list(model.state_dict()) == ["scale", "stem.weight", "stem.bias", "blocks.0.0.weight", "blocks.1.1.weight"]
    assert origin_of(model.blocks[0](Tensor.zeros(2, 4)).uop) == "blocks.0.1"
    assert "(blocks): ModuleList(" in repr(model) and "weight=[4, 4]" in repr(model)
    narrow = Model().half()
    assert {t.dtype.name for t in narrow.parameters()} == {"float16"} and narrow.eval() is narrow
    assert svod.nn.Linear is nn.Linear


def test_an_array_in_the_place_of_a_parameter_is_one() -> None:
    layer = nn.Linear(3, 2, bias=False)
    layer.weight, layer.bias = np.eye(2, 3, dtype=np.float32), np.array([5, 6], np.float32)  # type: ignore[assignment]
    layer.note = np.zeros(2)  # type: ignore[attr-defined]
    assert list(layer.state_dict()) == ["weight", "bias"] and isinstance(layer.weight, Tensor)
    np.testing.assert_array_equal(evaluate_graph(layer(Tensor([[1.0, 2, 3]])).uop), [[6, 8]])


def test_load_state_dict_checks_before_it_takes() -> None:
    model = Model()
    before = model.state_dict()
    state = {n: np.full(t.shape, 2.0, np.float32) for n, t in before.items()}
    for wrong, match in (({n: a for n, a in state.items() if n != "scale"}, "missing scale, unknown nothing"),
                         ({**state, "head.weight": state["scale"]}, "unknown head.weight"),
                         ({**state, "scale": np.zeros(2, np.float32)}, r"shapes differ: scale \(2,\), the module's is \(1,\)")):
        with pytest.raises(StateError, match=match):
            model.load_state_dict(wrong)
    assert all(a is b for a, b in zip(model.state_dict().values(), before.values(), strict=True))
    model.load_state_dict({"scale": state["scale"], "other": state["scale"]}, strict=False)
    assert model.scale.item() == 2
    model.load_state_dict({**state, "stem.num_batches_tracked": np.array(3)})
    close(model(Tensor.ones(1, 4)), model(Tensor.ones(1, 4)).numpy())


def test_functions_as_modules() -> None:
    x = Tensor(make((1, 8, 2, 2), "float32", 0))
    assert nn.Softmax(dim=1)(x).uop is x.softmax(1).uop and nn.ReLU(inplace=True)(x).uop is x.relu().uop
    assert nn.Upsample(scale_factor=2.0)(x).shape == (1, 8, 4, 4) and nn.PixelShuffle(2)(x).shape == (1, 2, 4, 4)
    assert nn.Flatten()(x).shape == (1, 32) and nn.Dropout(0.1)(x) is x and nn.Identity()(x) is x
    assert nn.AdaptiveAvgPool2d(1)(x).shape == (1, 8, 1, 1)
    with pytest.raises(TypeError, match="Softmax"):
        nn.Softmax(axis=1)
    with pytest.raises(StateError, match="element 1 is a int"):
        nn.ModuleList([nn.ReLU(), 3])
    with pytest.raises(NotImplementedError, match="Module defines no forward"):
        nn.Module()(x)
