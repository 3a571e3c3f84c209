"""Further features of modules: buffers, iteration over modules, dropout, containers, functional, losses, transformer layers."""
from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

import svod
import svod.nn.functional as F
from svod import Tensor, nn
from svod.errors import ArgumentError, StateError, UnsupportedError
from tests.draws import a_half

Array = np.ndarray[Any, np.dtype[Any]]


def drawn(*shape: int, seed: int = 0) -> Array:
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


class Net(nn.Module):
    def __init__(self) -> None:
        self.body = nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3), nn.ReLU())
        self.heads = nn.ModuleDict({"a": nn.Linear(3, 2), "b": nn.Linear(3, 1)})
        self.scale = nn.Parameter([2.0])
        self.register_buffer("offset", np.ones(1, np.float32))
        self.register_buffer("cache", Tensor.zeros(3), persistent=False)

    def forward(self, x: Tensor, head: str) -> Tensor:
        y: Tensor = self.heads[head](self.body(x)) * self.scale + self.offset
        return y


def test_parameters_buffers_and_state() -> None:
    net = Net()
    parameters, buffers = [n for n, _ in net.named_parameters()], [n for n, _ in net.named_buffers()]
    assert parameters == ["scale", "body.0.weight", "body.0.bias", "body.1.weight", "body.1.bias", "heads.a.weight", "heads.a.bias",
                          "heads.b.weight", "heads.b.bias"]
    assert buffers == ["offset", "cache", "body.1.running_mean", "body.1.running_var"]
    assert sorted(net.state_dict()) == sorted([*parameters, *(b for b in buffers if b != "cache")])
    assert len(list(net.parameters())) == 9 and len(list(net.buffers())) == 4
    trained = {n: drawn(*t.shape, seed=i) ** 2 for i, (n, t) in enumerate(net.state_dict().items())}
    net.load_state_dict(trained)        # strict: the cache is not part of the state
    net.cache = drawn(3)
    assert isinstance(net.cache, Tensor) and "cache" not in net.state_dict()
    assert {t.dtype.name for t in net.half().buffers()} == {"float16"}
    with pytest.raises(StateError, match="missing scale, unknown cache"):
        net.load_state_dict({"cache": np.zeros(3), **{n: a for n, a in trained.items() if n != "scale"}})
    for name in ("scale", "forward", "no name"):
        with pytest.raises(StateError, match="is taken, or no identifier"):
            net.register_buffer(name, Tensor.zeros(1))


def test_a_state_that_is_a_module_says_what_to_pass() -> None:
    with pytest.raises(ArgumentError, match=r"takes a mapping .* got Linear, pass its state_dict\(\)"):
        nn.Linear(2, 3).load_state_dict(nn.Linear(2, 3))    # type: ignore[arg-type]
    with pytest.raises(ArgumentError, match=r"got list$"):
        nn.Linear(2, 3).load_state_dict([1])    # type: ignore[arg-type]


def test_weights_with_gradients_are_detached() -> None:
    expected = drawn(3, 2)

    class Weight:       # like a PyTorch parameter, it refuses conversion to an array while it requires a gradient
        requires_grad = True

        def __array__(self, dtype: Any = None, copy: Any = None) -> Array:
            raise RuntimeError("Can't call numpy() on Tensor that requires grad")

        def detach(self) -> Array:
            return expected

    layer = nn.Linear(2, 3, bias=False).load_state_dict({"weight": Weight()})
    np.testing.assert_array_equal(layer.weight.numpy(), expected)


def test_walks_over_modules() -> None:
    net = Net()
    names = [name for name, _ in net.named_modules()]
    assert names == ["", "body", "body.0", "body.1", "body.2", "heads", "heads.a", "heads.b"]
    assert [type(m).__name__ for m in net.modules()][:3] == ["Net", "Sequential", "Linear"] and next(net.modules()) is net
    assert [n for n, _ in net.named_children()] == ["body", "heads"] and list(net.children()) == [net.body, net.heads]
    seen: list[Any] = []
    assert net.apply(seen.append) is net and seen[-1] is net and len(seen) == len(names)
    twice = nn.Sequential(nn.ReLU())
    twice.again = twice[0]
    assert len(list(twice.modules())) == 2


def test_module_dict() -> None:
    heads = nn.ModuleDict({"a": nn.Linear(3, 2)})
    heads["b"] = nn.ReLU()
    heads.update([("c", nn.Tanh())])
    assert list(heads) == list(heads.keys()) == ["a", "b", "c"] and len(heads) == 3 and "b" in heads and "x" not in heads
    assert next(iter(heads.values())) is heads["a"] and dict(heads.items())["c"] is heads["c"]
    del heads["b"]
    assert list(heads) == ["a", "c"]
    for name, module in (("d", 3), ("items", nn.ReLU())):
        with pytest.raises(StateError, match="not a Module, or the name is taken"):
            heads[name] = module  # type: ignore[assignment]


def test_training_changes_dropout_only() -> None:
    net, x = nn.Sequential(nn.Dropout(0.25), nn.Identity()), Tensor.ones(4000)
    assert not net.training and net(x).numpy().min() == 1
    assert net.train() is net and net.training and net[0].training
    values = net(x).numpy()
    assert set(np.unique(values)) == {0.0, np.float32(1 / 0.75)} and abs((values == 0).mean() - 0.25) < 0.05
    f = svod.jit(net, random="fresh")
    assert not np.array_equal(f(np.ones(100, np.float32)).numpy(), f(np.ones(100, np.float32)).numpy())
    assert net.eval() is net and f(np.ones(100, np.float32)).numpy().min() == 1, "a captured function sees it"
    assert nn.Dropout(1.0).train()(Tensor.ones(3)).tolist() == [0] * 3 and nn.Dropout(0).train()(x) is x
    with pytest.raises(ArgumentError, match=r"Dropout\(2\)"):
        nn.Dropout(2)
    with pytest.raises(UnsupportedError, match="training"):
        nn.BatchNorm1d(3).train()(Tensor(drawn(2, 3)))


def test_functional_is_the_methods_of_tensor() -> None:
    x, w = Tensor(drawn(3, 5)), Tensor(drawn(2, 5, seed=1))
    np.testing.assert_allclose(F.softmax(F.linear(x, w), dim=-1).numpy(), x.linear(w).softmax(-1).numpy())
    names = [n for n in vars(F) if not n.startswith("_") and n not in ("annotations", "Tensor")]
    assert len(names) > 60
    assert all(getattr(F, n) == getattr(Tensor, n) for n in names)


def logsumexp(a: Array) -> Array:
    top = a.max(-1, keepdims=True)
    return top + np.log(np.exp(a - top).sum(-1, keepdims=True))


@pytest.mark.parametrize("n", a_half([7, 1, 31]))
def test_losses(n: int) -> None:
    a, b, labels = drawn(n, 5), drawn(n, 5, seed=1), np.random.default_rng(2).integers(0, 5, n)
    logs, p = a - logsumexp(a), 1 / (1 + np.exp(-a))
    weight = np.abs(drawn(5, seed=3)) + 0.1
    bits = (b > 0).astype(np.float32)
    picked = -logs[np.arange(n), labels]
    small = np.abs(a - b) < 1
    cases: list[tuple[nn.Module, Any, Any, Any]] = [
        (nn.MSELoss(), a, b, ((a - b) ** 2).mean()), (nn.L1Loss("sum"), a, b, np.abs(a - b).sum()),
        (nn.MSELoss(reduction="none"), a, b, (a - b) ** 2), (nn.CrossEntropyLoss(), a, labels, picked.mean()),
        (nn.CrossEntropyLoss(Tensor(weight)), a, labels, (picked * weight[labels]).sum() / weight[labels].sum()),
        (nn.NLLLoss(), logs, labels, picked.mean()),
        (nn.BCEWithLogitsLoss(), a, bits, -(bits * np.log(p) + (1 - bits) * np.log(1 - p)).mean()),
        (nn.BCELoss(), p, bits, -(bits * np.log(p) + (1 - bits) * np.log(1 - p)).mean()),
        (nn.SmoothL1Loss(), a, b, np.where(small, 0.5 * (a - b) ** 2, np.abs(a - b) - 0.5).mean()),
        (nn.HuberLoss(), a, b, np.where(small, 0.5 * (a - b) ** 2, np.abs(a - b) - 0.5).mean()),
        (nn.KLDivLoss(reduction="sum"), logs, p, (p * (np.log(p) - logs)).sum())]
    for loss, x, y, want in cases:
        np.testing.assert_allclose(loss(Tensor(x), Tensor(y)).numpy(), want, rtol=2e-4, atol=1e-5, err_msg=type(loss).__name__)
    assert [name for name, _ in nn.CrossEntropyLoss(Tensor(weight)).named_buffers()] == ["weight"]
    with pytest.raises(TypeError, match=r"MSELoss takes the options \('reduction',\)"):
        nn.MSELoss(size_average=True)


@pytest.mark.parametrize(("module", "pads"), [
    (nn.ZeroPad2d(1), ((0, 0), (0, 0), (1, 1), (1, 1))), (nn.ZeroPad2d((1, 0, 2, 3)), ((0, 0), (0, 0), (2, 3), (1, 0))),
    (nn.ZeroPad1d((2, 1)), ((0, 0), (0, 0), (0, 0), (2, 1)))])
def test_padding(module: nn.Module, pads: Any) -> None:
    x = drawn(2, 3, 4, 5)
    np.testing.assert_array_equal(module(Tensor(x)).numpy(), np.pad(x, pads))


def test_padding_with_values_of_the_tensor() -> None:
    x = drawn(2, 3, 4, 5)
    np.testing.assert_array_equal(nn.ReflectionPad2d(2)(Tensor(x)).numpy(), np.pad(x, ((0, 0), (0, 0), (2, 2), (2, 2)), "reflect"))
    np.testing.assert_array_equal(nn.ReplicationPad2d(2)(Tensor(x)).numpy(), np.pad(x, ((0, 0), (0, 0), (2, 2), (2, 2)), "edge"))
    np.testing.assert_array_equal(nn.ConstantPad1d(1, 7.0)(Tensor(x)).numpy(), np.pad(x, ((0, 0),) * 3 + ((1, 1),), constant_values=7))
    assert nn.Unflatten(1, (3, 1))(Tensor(x)).shape == (2, 3, 1, 4, 5)


# -- transformer layers -----------------------------------------------------------------------------

def norm(x: Array, m: Any) -> Array:
    mean, var = x.mean(-1, keepdims=True), x.var(-1, keepdims=True)
    return np.asarray((x - mean) / np.sqrt(var + m.eps) * m.weight.numpy() + m.bias.numpy())


def attend(q: Array, k: Array, m: nn.MultiheadAttention, mask: Array | None = None) -> Array:
    d, heads = m.embed_dim, m.num_heads
    w, b = m.in_proj_weight.numpy(), m.in_proj_bias.numpy()  # type: ignore[union-attr]
    parts = [x @ w[i * d:(i + 1) * d].T + b[i * d:(i + 1) * d] for i, x in enumerate((q, k, k))]
    split = [p.reshape(p.shape[0], p.shape[1], heads, d // heads).transpose(0, 2, 1, 3) for p in parts]
    scores = split[0] @ split[1].transpose(0, 1, 3, 2) / math.sqrt(d // heads)
    if mask is not None:
        scores = scores + mask
    weights = np.exp(scores - logsumexp(scores))
    out = (weights @ split[2]).transpose(0, 2, 1, 3).reshape(q.shape)
    return np.asarray(out @ m.out_proj.weight.numpy().T + m.out_proj.bias.numpy())


def feed(x: Array, layer: Any, active: Any) -> Array:
    hidden = active(x @ layer.linear1.weight.numpy().T + layer.linear1.bias.numpy())
    return np.asarray(hidden @ layer.linear2.weight.numpy().T + layer.linear2.bias.numpy())


def fill(module: nn.Module) -> None:
    module.load_state_dict({n: drawn(*t.shape, seed=i) * 0.3 for i, (n, t) in enumerate(module.state_dict().items())})


@pytest.mark.slow
@pytest.mark.parametrize("norm_first", [False, True])
@pytest.mark.parametrize("length", [1, 7])
def test_transformer_layers(length: int, norm_first: bool) -> None:
    x, memory = drawn(2, length, 12), drawn(2, 5, 12, seed=1)
    causal = np.triu(np.full((length, length), -np.inf, np.float32), 1)
    layer = nn.TransformerEncoderLayer(12, 3, 20, norm_first=norm_first)
    fill(layer)
    relu = lambda a: np.maximum(a, 0)  # noqa: E731
    if norm_first:
        y = x + attend(norm(x, layer.norm1), norm(x, layer.norm1), layer.self_attn, causal)
        want = y + feed(norm(y, layer.norm2), layer, relu)
    else:
        y = norm(x + attend(x, x, layer.self_attn, causal), layer.norm1)
        want = norm(y + feed(y, layer, relu), layer.norm2)
    np.testing.assert_allclose(layer(Tensor(x), is_causal=True).numpy(), want, rtol=1e-3, atol=1e-4)
    np.testing.assert_allclose(layer(Tensor(x), Tensor(causal)).numpy(), want, rtol=1e-3, atol=1e-4)

    decoder = nn.TransformerDecoderLayer(12, 3, 20, norm_first=norm_first)
    fill(decoder)
    if norm_first:
        y = x + attend(norm(x, decoder.norm1), norm(x, decoder.norm1), decoder.self_attn)
        y = y + attend(norm(y, decoder.norm2), memory, decoder.multihead_attn)
        want = y + feed(norm(y, decoder.norm3), decoder, relu)
    else:
        y = norm(x + attend(x, x, decoder.self_attn), decoder.norm1)
        y = norm(y + attend(y, memory, decoder.multihead_attn), decoder.norm2)
        want = norm(y + feed(y, decoder, relu), decoder.norm3)
    np.testing.assert_allclose(decoder(Tensor(x), Tensor(memory)).numpy(), want, rtol=1e-3, atol=1e-4)


def test_stacks_of_transformer_layers() -> None:
    encoder = nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 2, 16), 3, nn.LayerNorm(8))
    names = list(encoder.state_dict())
    assert len(names) == 3 * 12 + 2 and {"layers.0.self_attn.in_proj_weight", "layers.2.linear1.bias", "norm.weight"} <= set(names)
    fill(encoder)
    x = drawn(1, 4, 8)
    y = Tensor(x)
    for layer in encoder.layers:
        y = layer(y)
    np.testing.assert_allclose(encoder(Tensor(x)).numpy(), encoder.norm(y).numpy(), rtol=1e-4, atol=1e-5)
    assert not np.array_equal(encoder.layers[0].linear1.weight.numpy(), encoder.layers[1].linear1.weight.numpy())
    decoder = nn.TransformerDecoder(lambda: nn.TransformerDecoderLayer(8, 2, 16, activation="gelu"), 2)
    assert decoder(Tensor(x), Tensor(x)).shape == (1, 4, 8)
    with pytest.raises(ArgumentError, match="use \"relu\", \"gelu\" or a function"):
        nn.TransformerEncoderLayer(8, 2, activation="swish")
    with pytest.raises(ArgumentError, match="a stack of layers needs"):
        nn.TransformerEncoder(lambda: 3, 1)
