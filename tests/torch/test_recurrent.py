"""Recurrent layers of PyTorch: whole in the graphs that svod gets, with the numbers of PyTorch."""
from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="the package torch is not installed")

import svod.torch  # noqa: E402
from svod.errors import UnsupportedError  # noqa: E402
from svod.torch import backend  # noqa: E402
from svod.torch.functions import functions  # noqa: E402

KINDS = {"LSTM": torch.nn.LSTM, "GRU": torch.nn.GRU, "RNN": torch.nn.RNN}
KINDS_AND_SLOW = ["GRU", *(pytest.param(kind, marks=pytest.mark.slow) for kind in ("LSTM", "RNN"))]
leaves = torch.utils._pytree.tree_leaves


@pytest.fixture(autouse=True)
def _fresh() -> Iterator[None]:
    torch._dynamo.reset()
    torch.manual_seed(0)
    yield
    torch._dynamo.utils.counters.clear()


def agree(got: Any, expected: Any, tolerance: float = 2e-6) -> None:
    for a, b in zip(leaves(got), leaves(expected), strict=True):
        torch.testing.assert_close(a, b, rtol=tolerance, atol=tolerance)
        assert a.is_contiguous() == b.is_contiguous()


class Tagger(torch.nn.Module):
    """A recurrent layer between others."""

    def __init__(self, kind: str, **form: Any) -> None:
        super().__init__()
        self.words, self.layer, self.tags = torch.nn.Embedding(11, 4), KINDS[kind](4, 3, batch_first=True, **form), torch.nn.Linear(3, 2)

    def forward(self, words: Any) -> Any:
        outputs, last = self.layer(self.words(words))
        return self.tags(outputs), last


@pytest.mark.parametrize("kind", KINDS_AND_SLOW)
def test_one_graph_serves_all_batches_and_lengths(kind: str) -> None:
    model, before = Tagger(kind).eval(), set(functions)
    run = torch.compile(model, backend="svod", dynamic=True, fullgraph=True, options={"strict": True})
    for shape in ((2, 3), (3, 5)):
        words = torch.randint(11, shape)
        agree(run(words), model(words))
    assert len(set(functions) - before) == 1


def test_other_backends_are_as_before() -> None:
    """Dynamo traces recurrent layers for svod alone, also if another backend compiles the same module between two lengths."""
    model, x = torch.nn.GRU(2, 3).eval(), torch.randn(3, 1, 2)
    kernels = dict(torch.ops.aten.gru.input.py_kernels)
    ours, theirs = torch.compile(model, backend="svod", fullgraph=True), torch.compile(model, backend="eager", fullgraph=True)
    agree(ours(x), model(x))
    assert torch._dynamo.config.allow_rnn is False and torch.ops.aten.gru.input.py_kernels == kernels
    with pytest.raises(torch._dynamo.exc.Unsupported, match="RNN, GRU, or LSTM"):
        theirs(x)
    agree(ours(x[:2]), model(x[:2]))


def test_the_first_layer_after_a_reset_of_dynamo() -> None:
    """`torch._dynamo.reset` drops callbacks. Those of svod are there again when the next trace begins, each once."""
    model, x = torch.nn.LSTM(3, 2).eval(), torch.randn(5, 2, 3)
    run = torch.compile(model, backend="svod", fullgraph=True, options={"strict": True})
    for _ in range(3):
        agree(run(x), model(x))
        torch._dynamo.reset()
    handler = torch._dynamo.callback.callback_handler
    for kept, called in ((handler.start_callbacks, backend._before_tracing), (handler.end_callbacks, backend._after_tracing)):
        assert [c.func for c in kept if getattr(c, "func", None) is called] == [called]
    agree(torch.compile(model, backend="svod", fullgraph=True)(x), model(x))


def _drawn(draw: random.Random) -> tuple[Any, Any, list[Any]]:
    """A recurrent layer, its input, and its first states, or none."""
    kind, size = draw.choice(list(KINDS)), lambda most: draw.choice([n for n in (1, 2, 3, 5, 7) if n <= most])
    wide, hidden, layers, steps, batch = size(7), draw.choice([2, 3, 5, 7]), size(2), size(5), size(5)
    both = draw.random() < 0.5
    form: dict[str, Any] = {"bias": draw.random() < 0.7, "batch_first": draw.random() < 0.5, "bidirectional": both}
    if kind == "LSTM":
        form["proj_size"] = draw.randrange(hidden)
    if kind == "RNN":
        form["nonlinearity"] = draw.choice(["tanh", "relu"])
    layer = KINDS[kind](wide, hidden, layers, dropout=0.5 * (layers > 1), **form).eval()
    batched = draw.random() < 0.8
    sides = ([batch, steps] if form["batch_first"] else [steps, batch]) if batched else [steps]
    out = form.get("proj_size") or hidden
    states = [torch.randn(layers * (1 + both), *[batch] * batched, n) for n in ([out, hidden] if kind == "LSTM" else [hidden])]
    given = [tuple(states) if kind == "LSTM" else states[0]] if draw.random() < 0.5 else []
    return layer, torch.randn(*sides, wide), given


@pytest.mark.parametrize("seed", [0, *(pytest.param(s, marks=pytest.mark.slow) for s in range(1, 60))])
def test_random_layers(seed: int) -> None:
    layer, x, given = _drawn(random.Random(seed))
    agree(svod.torch.compile(layer, x, *given, options={"strict": True})(x, *given), layer(x, *given))


@pytest.mark.parametrize(("kind", "hidden", "batch", "steps", "form"), [
    ("GRU", 16, 1, 40, {}), ("LSTM", 37, 3, 5, {"bidirectional": True}), ("RNN", 64, 1, 11, {"num_layers": 2}), ("GRU", 128, 2, 3, {}),
    ("LSTM", 16, 1, 23, {"batch_first": True})])
def test_results_of_earlier_calls_stay(kind: str, hidden: int, batch: int, steps: int, form: dict[str, Any]) -> None:
    """Each call has memory of its own, which all steps write and read."""
    layer = KINDS[kind](5, hidden, **form).eval()
    given = [torch.randn(*((batch, steps) if form.get("batch_first") else (steps, batch)), 5) for _ in range(4)]
    run = svod.torch.compile(layer, given[0], options={"strict": True})
    results = [run(x) for x in given]
    for x, got in zip(given, results, strict=True):
        agree(got, layer(x))


def test_pytorch_runs_layers_of_too_many_steps(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr("svod.nn.recurrent.MOST_STEPS", 12)
    model = torch.nn.GRU(2, 3, 2, bidirectional=True).eval()
    run, x = torch.compile(model, backend="svod"), torch.randn(4, 1, 2)
    for given in (x[:3], x, x):
        agree(run(given), model(given))
    warnings = [r.getMessage() for r in caplog.records if r.name == "svod.torch"]
    assert len(warnings) == 1 and "svod.gru" in warnings[0]
    with pytest.raises(UnsupportedError, match="over 4 steps; svod unrolls up to 3 of 4 layers"):
        torch.compile(model, backend="svod", options={"strict": True})(x)


@pytest.mark.slow
def test_lengths_and_batches_of_an_exported_layer() -> None:
    model, length = torch.nn.GRU(2, 3).eval(), torch.export.Dim("length")
    run = svod.torch.compile(model, torch.randn(3, 2, 2), dynamic_shapes=({0: length, 1: torch.export.Dim("batch")},))
    for shape in ((3, 2, 2), (5, 3, 2)):
        x = torch.randn(shape)
        agree(run(x), model(x))


@pytest.mark.slow
def test_states_of_bfloat16_are_rounded_at_each_step() -> None:
    model, x = torch.nn.LSTM(3, 4).eval().bfloat16(), torch.randn(3, 2, 3).bfloat16()
    agree(svod.torch.compile(model, x, options={"strict": True})(x), model(x), 2e-2)


@pytest.mark.slow
def test_layers_that_drop_elements_draw_pytorchs_numbers() -> None:
    model, x = torch.nn.GRU(2, 3, 2, dropout=0.5).train(), torch.randn(3, 2, 2)
    run = torch.compile(model, backend="svod", fullgraph=True)
    for _ in range(2):
        torch.manual_seed(1)
        got = run(x)
        torch.manual_seed(1)
        agree(got, model(x))
    with pytest.raises(UnsupportedError, match="drops elements"):
        torch.compile(model, backend="svod", options={"strict": True})(x)


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_packed_sequences(kind: str) -> None:
    model = KINDS[kind](2, 3).eval()
    run = torch.compile(lambda x, lengths: model(torch.nn.utils.rnn.pack_padded_sequence(x, lengths))[0].data * 2, backend="svod")
    for lengths in ((4, 2), (3, 3, 1)):
        x = torch.randn(lengths[0], len(lengths), 2)
        packed = torch.nn.utils.rnn.pack_padded_sequence(x, torch.tensor(lengths))
        agree(run(x, torch.tensor(lengths)), model(packed)[0].data * 2)
