"""Sizes that differ from call to call: one plan for all of them, with PyTorch's numbers, shapes and strides."""
from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="the package torch is not installed")

from svod import Tensor, Variable  # noqa: E402
from svod.core.ir.symbolic import simplify  # noqa: E402
from svod.core.ir.variable import dim_of, shape_at, upper_shape  # noqa: E402
from svod.torch.functions import functions  # noqa: E402
from svod.torch.varying import sizes  # noqa: E402
from svod.torch.varying.merged import reshaped, without_merged  # noqa: E402

F = torch.nn.functional


@pytest.fixture(autouse=True)
def _fresh() -> None:
    torch._dynamo.reset()
    torch.manual_seed(0)


class Block(torch.nn.Module):
    """A layer of a transformer, written by hand."""

    def __init__(self, width: int, heads: int, causal: bool) -> None:
        super().__init__()
        self.heads, self.causal = heads, causal
        self.qkv, self.out = torch.nn.Linear(width, 3 * width), torch.nn.Linear(width, width)
        self.first, self.second = torch.nn.LayerNorm(width), torch.nn.LayerNorm(width)
        self.feed = torch.nn.Sequential(torch.nn.Linear(width, 2 * width), torch.nn.GELU(), torch.nn.Linear(2 * width, width))

    def forward(self, x: Any, mask: Any = None) -> Any:
        n, length, width = x.shape
        q, k, v = self.qkv(x).view(n, length, 3, self.heads, width // self.heads).permute(2, 0, 3, 1, 4)
        attended = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=self.causal)
        x = self.first(x + self.out(attended.transpose(1, 2).reshape(n, length, width)))
        return self.second(x + self.feed(x))


class Classifier(torch.nn.Module):
    """A classifier of padded sequences like BERT."""

    def __init__(self, width: int = 16, layers: int = 1) -> None:
        super().__init__()
        self.words, self.places = torch.nn.Embedding(50, width), torch.nn.Embedding(512, width)
        self.layers = torch.nn.ModuleList([Block(width, 2, False) for _ in range(layers)])
        self.last = torch.nn.Linear(width, 3)

    def forward(self, ids: Any, mask: Any) -> Any:
        x = self.words(ids) + self.places(torch.arange(ids.shape[1]))
        for layer in self.layers:
            x = layer(x, mask[:, None, None, :].bool())
        weight = mask[..., None].float()
        return self.last((x * weight).sum(1) / weight.sum(1))


class Encoder(torch.nn.Module):
    """PyTorch's encoder with a padding mask and a table of positions, whose length bounds that of the sequence."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.places = torch.nn.Embedding(50, 16), torch.nn.Parameter(torch.randn(300, 16))
        self.layers = torch.nn.TransformerEncoder(torch.nn.TransformerEncoderLayer(16, 2, 32, batch_first=True), 1,
                                                  enable_nested_tensor=False)

    def forward(self, ids: Any, mask: Any) -> Any:
        return self.layers(self.words(ids) + self.places[:ids.shape[1]], src_key_padding_mask=mask == 0)[:, 0]


class ByHand(torch.nn.Module):
    """Causal attention without the function for it."""

    def __init__(self) -> None:
        super().__init__()
        self.parts = torch.nn.ModuleList([torch.nn.Linear(16, 16) for _ in range(3)])

    def forward(self, x: Any) -> Any:
        n, length, width = x.shape
        q, k, v = (part(x).view(n, length, 2, width // 2).transpose(1, 2) for part in self.parts)
        future = torch.triu(torch.ones(length, length, dtype=torch.bool), 1)
        return ((q @ k.mT).masked_fill(future, float("-inf")).softmax(-1) @ v).transpose(1, 2).reshape(n, length, width)


def convolutions() -> Any:
    return torch.nn.Sequential(torch.nn.Conv2d(3, 8, 3, padding=1), torch.nn.BatchNorm2d(8), torch.nn.ReLU(), torch.nn.MaxPool2d(3, 2, 1),
                               torch.nn.Conv2d(8, 4, 3, stride=2, padding=1), torch.nn.AdaptiveAvgPool2d(1), torch.nn.Flatten(),
                               torch.nn.Linear(4, 5))


def sequences(n: int, length: int) -> tuple[Any, Any]:
    mask = (torch.arange(length) < torch.randint(1, length + 1, (n, 1))).long()
    return torch.randint(0, 50, (n, length)), mask


MODELS: dict[str, tuple[Callable[[], Any], Callable[[int, int], Any]]] = {
    "classifier": (Classifier, sequences), "encoder": (Encoder, sequences), "by hand": (ByHand, lambda n, m: (torch.randn(n, m, 16),)),
    "causal": (lambda: Block(16, 2, True), lambda n, m: (torch.randn(n, m, 16),)),
    "images": (convolutions, lambda n, m: (torch.randn(n, 3, m, 2 * m + 3),)),
}


def strides_of(t: Any) -> list[int]:
    return [s for n, s in zip(t.shape, t.stride(), strict=True) if n > 1]


def plans_of(before: set[Any]) -> list[int]:
    """The number of plans of each graph since `before`."""
    return [len(f.plans) for f in functions if f not in before]


@pytest.mark.slow
@pytest.mark.parametrize("name", MODELS)
def test_one_plan_for_each_graph(name: str) -> None:
    make, inputs = MODELS[name]
    model, before = make().eval(), set(functions)
    run = torch.compile(model, backend="svod", dynamic=True)
    for n, m in [(3, 17), (2, 5), (1, 7), (4, 13), (3, 1), (1, 1), (7, 61), (2, 2), (1, 31), (5, 100)]:
        given = inputs(n, m)
        got, wanted = run(*given), model(*given)
        torch.testing.assert_close(got, wanted, rtol=1e-4, atol=1e-5)
        assert strides_of(got) == strides_of(wanted)
    assert set(plans_of(before)) == {1}


@pytest.mark.slow
def test_requests_to_a_classifier_compile_one_plan() -> None:
    """PyTorch makes a graph of its own for a batch of 1."""
    model, before = Classifier(layers=2).eval(), set(functions)
    run = torch.compile(model, backend="svod", dynamic=True)
    rng = np.random.default_rng(0)
    for _ in range(30):
        given = sequences(int(rng.integers(1, 5)), int(rng.integers(10, 200)))
        torch.testing.assert_close(run(*given), model(*given), rtol=1e-4, atol=1e-5)
    assert plans_of(before) == [1, 1] and sum(f.prepared for f in functions if f not in before) == 2


def test_results_are_pytorchs_and_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    """A plan whose bounds a size exceeds is made anew. Linear layers see merged axes, and so does an output here."""
    monkeypatch.setattr(sizes, "WISHED_BOUND", sizes.LEAST_BOUND)
    linear, before = torch.nn.Linear(8, 6), set(functions)

    def function(x: Any) -> Any:
        y = linear(x)
        return y.relu(), x.flatten(0, 1) * 2, y.transpose(0, 1).contiguous().transpose(0, 1), x.shape[0] * x.shape[1], y.sum(1)
    run = torch.compile(function, backend="svod", dynamic=True)
    kept = []
    for n, m in [(3, 5), (2, 7), (5, 9), (7, 11), (3, 18)]:
        x = torch.randn(m, n, 8).transpose(0, 1)
        kept.append((run(x), function(x)))
    for got, wanted in kept:
        torch.testing.assert_close(got, wanted)
        assert [t.stride() for t in got if isinstance(t, torch.Tensor)] == [t.stride() for t in wanted if isinstance(t, torch.Tensor)]
    (made,) = (f for f in functions if f not in before)
    assert len(made.plans) == 1 and made.prepared == 2


def test_bounds_leave_room_within_ranges_and_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sizes, "MOST_TENSOR_BYTES", 1 << 20)
    before = set(functions)
    table = torch.nn.Parameter(torch.randn(100, 8))
    run = torch.compile(lambda x: x @ table[:x.shape[1]], backend="svod", dynamic=True)
    x = torch.randn(30, 40)
    torch.testing.assert_close(run(x), x @ table[:40])
    (made,) = (f for f in functions if f not in before)
    rows, columns = (n.declared.arg[1:3] for n in made.plans[0].sizes.dims.values())
    assert rows == (2, 288) and columns == (2, 100)


def test_a_graph_that_needs_the_numbers_says_which_operation(caplog: pytest.LogCaptureFixture) -> None:
    run = torch.compile(lambda x: F.interpolate(x, scale_factor=2, mode="linear"), backend="svod", dynamic=True)
    for n in range(2, 8):
        x = torch.randn(1, 1, n)
        torch.testing.assert_close(run(x), F.interpolate(x, scale_factor=2, mode="linear"))
    (warning,) = [r.getMessage() for r in caplog.records if r.levelno >= logging.WARNING]
    assert "has a plan for each set of sizes" in warning and "svod.interpolate" in warning and "test_sizes.py" in warning


def test_python_errors_are_no_reasons(caplog: pytest.LogCaptureFixture) -> None:
    """Arithmetic of Python on a size without a value raises a TypeError, which says nothing to the user."""
    run = torch.compile(lambda x: x.roll(1, 0), backend="svod", dynamic=True)
    for n in range(2, 8):
        x = torch.randn(n, 3)
        torch.testing.assert_close(run(x), x.roll(1, 0))
    text = " ".join(r.getMessage() for r in caplog.records if r.levelno >= logging.WARNING)
    assert "roll" in text and "it needs the value of a size that varies" in text and "unsupported operand" not in text


MERGED = {
    "linear": torch.nn.Linear(3, 7), "product": lambda a: a @ torch.ones(3, 4), "all": lambda a: a.flatten() + 1,
    "first": lambda a: (a.flatten(0, 1) + 1).unflatten(0, (a.shape[0], a.shape[1])), "last": lambda a: a.flatten(1, 2) * 2,
    "last and back": lambda a: (a.flatten(1, 2) + 1).unflatten(1, (a.shape[1], a.shape[2])),
    "axis of one": lambda a: (a.flatten(0, 1) + 1).unflatten(0, (a.shape[0], 1, a.shape[1])),
    "encoder": torch.nn.TransformerEncoderLayer(3, 1, 8, batch_first=True, dropout=0.0).eval(),
}


@pytest.mark.parametrize("kind", MERGED)
def test_axes_merge_that_are_empty_or_one(kind: str) -> None:
    f = MERGED[kind]
    run = torch.compile(f, backend="svod", dynamic=True)
    with torch.no_grad():
        for shape in ((2, 5), (0, 5), (2, 0), (0, 6), (3, 4), (1, 7), (1, 0), (0, 1), (4, 1)):
            a = torch.randn(*shape, 3)
            torch.testing.assert_close(run(a), f(a), rtol=1e-4, atol=1e-5)


N, M = Variable("n", 1, 9), Variable("m", 1, 18)
VALUES = {"n": 5, "m": 7}


def bound_to_values(shape: Sequence[Any]) -> tuple[Any, ...]:
    return tuple([n if isinstance(n, int) else dim_of(simplify(n.expr, {v.expr: v.bind(VALUES[v.name]).expr for v in (N, M)}))
                  for n in shape])


@pytest.mark.parametrize(("old", "news"), [
    ((N, M, 4), [(N * M, 4)]), ((N, M, 4), [(N * M, 2, 2)]), ((N, M, 2, 3), [(N * M, 6)]), ((2, N, 3, M), [(2 * N, 3 * M)]),
    ((N, M), [(N * M,), (N, M)]), ((N, M), [(N * M,), (M, N)]), ((3, M), [(3 * M,), (M, 3)])])
def test_axes_merge(old: Any, news: Any) -> None:
    """Reshaped at one set of sizes like an array. A copy and a view of merged axes have the same elements."""
    shape = shape_at(old, VALUES)
    whole = np.random.default_rng(0).standard_normal(upper_shape(old)).astype(np.float32)
    array, t = whole[tuple(map(slice, shape))], Tensor(whole)[tuple(slice(n) for n in bound_to_values(old))]
    for new in news:
        size = bound_to_values(new)
        t, array = reshaped(t, size), array.reshape(shape_at(new, VALUES))
        assert t.shape == size
        np.testing.assert_array_equal(without_merged(t).numpy(), array)


def test_complex_numbers_of_lengths_that_vary() -> None:
    def smoothed(a: torch.Tensor) -> torch.Tensor:
        return torch.fft.irfft(torch.fft.rfft(a) * 2)
    run = torch.compile(smoothed, backend="svod", dynamic=True, options={"strict": True})
    for rows, length in ((3, 64), (2, 30), (5, 128), (1, 2)):
        a = torch.randn(rows, length)
        torch.testing.assert_close(run(a), smoothed(a), rtol=1e-4, atol=1e-5)
