"""Every alternative of a plan gives the numbers of the plan by the rules, alone and with others, and does what it says."""
from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import pytest

import svod.prepare
from svod import Tensor
from svod.core.graph.graph import sink
from svod.core.ir.variable import Variable
from svod.core.schedule.schedule import create_schedule
from svod.prepare import prepare_tensors
from svod.tune.plans.alternatives import Alternative, PlanGraph, alternatives_of, together
from tests.core.convolution.test_by_fourier import direct

Array = np.ndarray[Any, Any]
Pick = Callable[[list[Alternative]], list[Alternative]]


class Value(NamedTuple):
    """A value as a Tensor, and in float64 by NumPy."""

    tensor: Tensor
    array: Array


class Made:
    """Makes the values of a random program."""

    def __init__(self, seed: int) -> None:
        self.draw, self.numbers = random.Random(seed), np.random.default_rng(seed)

    def of(self, *shape: int, scale: float = 1.0) -> Value:
        a = (self.numbers.standard_normal(shape) * scale).astype(np.float32)
        return Value(Tensor(a), a.astype(np.float64))

    def convolved(self, x: Value, channels: int, taps: int, groups: int = 1) -> Value:
        inputs = x.array.shape[1] // groups
        w = self.of(channels, inputs, taps, taps, scale=(inputs * taps * taps) ** -0.5)
        return Value(x.tensor.conv2d(w.tensor, padding=taps // 2, groups=groups), direct(x.array, w.array, taps // 2, groups))

    def times(self, x: Value, columns: int) -> Value:
        w = self.of(x.array.shape[-1], columns, scale=x.array.shape[-1] ** -0.5)
        return Value(x.tensor @ w.tensor, x.array @ w.array)


def relu(x: Value) -> Value:
    return Value(x.tensor.relu(), np.maximum(x.array, 0))


def added(x: Value, y: Value) -> Value:
    return Value(x.tensor + y.tensor, x.array + y.array)


def pooled(x: Value) -> Value:
    n, c, height, width = x.array.shape
    a = x.array[:, :, :height // 2 * 2, :width // 2 * 2].reshape(n, c, height // 2, 2, width // 2, 2)
    return Value(x.tensor.max_pool2d(2), a.max((3, 5)))


def images(seed: int) -> list[Value]:
    """A random network of convolutions: shortcuts, groups, poolings, joined channels, a mean, and a product of flattened images."""
    m = Made(seed)
    size, channels = m.draw.choice([(7, 7), (9, 5), (8, 12), (1, 6), (13, 13)]), m.draw.choice([1, 3, 8, 16])
    x = relu(m.convolved(m.of(m.draw.choice([1, 2]), 3, *size), channels, 3))
    for _ in range(m.draw.choice([1, 2])):
        shortcut = x if m.draw.random() < 0.5 else m.convolved(x, channels, 1)
        inner = relu(m.convolved(x, channels, m.draw.choice([1, 3]), channels if m.draw.random() < 0.3 else 1))
        x = relu(added(m.convolved(inner, channels, 3), shortcut))
    if min(size) > 1 and m.draw.random() < 0.7:
        x = pooled(x)
    if m.draw.random() < 0.5:
        other = relu(m.convolved(x, 5, 1))
        x = Value(Tensor.cat([x.tensor, other.tensor], 1), np.concatenate([x.array, other.array], 1))
        x = m.convolved(x, channels, 3)
    if m.draw.random() < 0.5:
        return [m.times(Value(x.tensor.mean((2, 3)), x.array.mean((2, 3))), 10), x]
    return [m.times(Value(x.tensor.reshape(x.array.shape[0], -1), x.array.reshape(x.array.shape[0], -1)), 10)]


def tokens(seed: int) -> list[Value]:
    """A random block of a transformer: a normalised value with several readers, an attention, a sum of two products."""
    m = Made(seed)
    count, width = m.draw.choice([1, 5, 7, 16]), m.draw.choice([8, 12, 17])
    x = m.of(m.draw.choice([1, 3]), count, width)
    shared = x
    for _ in range(m.draw.choice([1, 4])):
        shared = Value(shared.tensor * 0.5 + 1, shared.array * 0.5 + 1)
    mean, spread = x.array.mean(-1, keepdims=True), x.array.std(-1, keepdims=True)
    normal = Value((x.tensor - x.tensor.mean(-1, keepdim=True)) / (x.tensor.var(-1, keepdim=True, correction=0) + 0.1).sqrt(),
                   (x.array - mean) / np.sqrt(spread ** 2 + 0.1))
    q, k, v = (m.times(normal, 8) for _ in range(3))
    scores = q.array @ k.array.swapaxes(-1, -2) / 8 ** 0.5
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    attended = Value((q.tensor @ k.tensor.transpose(-1, -2) / 8 ** 0.5).softmax(-1) @ v.tensor,
                     weights / weights.sum(-1, keepdims=True) @ v.array)
    both = relu(added(m.times(attended, width), m.times(shared, width)))
    return [added(m.times(both, width), x), m.times(shared, 3), Value(normal.tensor.sum(1), normal.array.sum(1))]


def graph_of(values: list[Value]) -> PlanGraph:
    return PlanGraph(sink(*(v.tensor.uop for v in values)))


def check(values: list[Value], pick: Pick, monkeypatch: pytest.MonkeyPatch) -> list[Alternative]:
    """Compute values with the alternatives that `pick` picks, and compare them with float64. Returns the picked ones."""
    picked: list[Alternative] = []

    def chosen_for(by_rules: Any, graph: PlanGraph, resolved: Any) -> frozenset[str]:
        picked.extend(pick(list(alternatives_of(graph).values())))
        return frozenset(a.key for a in picked)
    monkeypatch.setattr(svod.prepare, "chosen_for", chosen_for)
    prepare_tensors([v.tensor for v in values], None).execute()
    for v in values:
        assert np.abs(v.tensor.numpy() - v.array).max() < 1e-5 * max(1.0, np.abs(v.array).max())
    return picked


@pytest.mark.parametrize("program", [images, tokens])
@pytest.mark.parametrize("seed", range(12))
def test_random_alternatives_together(program: Callable[[int], list[Value]], seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    draw = random.Random(seed)
    share = draw.choice([0.3, 0.6, 1.0])
    check(program(seed), lambda known: [a for a in known if draw.random() < share], monkeypatch)


@pytest.mark.parametrize("program", [images, tokens])
@pytest.mark.parametrize("seed", [12, 13])
def test_each_alternative_alone(program: Callable[[int], list[Value]], seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    known = alternatives_of(graph_of(program(seed)))
    assert known
    for key in known:
        (picked,) = check(program(seed), lambda found, key=key: [a for a in found if a.key == key], monkeypatch)    # type: ignore[misc]
        assert picked.key == key


def kinds(values: list[Value]) -> dict[str, Alternative]:
    """One alternative of each kind, by what it does in words."""
    return {a.described.split(" ", 2)[2].partition(" (")[0]: a for a in alternatives_of(graph_of(values)).values()}


def test_programs_have_alternatives_of_all_kinds() -> None:
    found = {kind for seed in range(12) for program in (images, tokens) for kind in kinds(program(seed))}
    assert found >= {"stored with channels last", "stored once for all readers", "computed anew by each reader",
                     "with the epilogue of its reduction in its readers", "summed in the kernel of its other contraction"}
    assert any("exchanged" in kind for kind in found)


def calls(values: list[Value], *chosen: Alternative) -> int:
    g = graph_of(values)
    return len(create_schedule(g.sink, g.constants, together(chosen)).calls)


def shared_by_two(operations: int) -> list[Value]:
    """A value of so many operations that two products read."""
    m = Made(0)
    x = m.of(8, 8)
    t, a = x
    for _ in range(operations):
        t, a = t * 3 + 1, a * 3 + 1
    return [m.times(Value(t, a), 4), m.times(Value(t, a), 5)]


def test_a_cheap_value_is_stored_once_or_computed_by_each_reader(monkeypatch: pytest.MonkeyPatch) -> None:
    cheap, costly = shared_by_two(1), shared_by_two(4)
    (stored,) = [a for a in alternatives_of(graph_of(cheap)).values() if "stored once" in a.described]
    (anew,) = [a for a in alternatives_of(graph_of(costly)).values() if "computed anew" in a.described]
    assert (calls(cheap), calls(cheap, stored)) == (2, 3)
    assert (calls(costly), calls(costly, anew)) == (3, 2)
    check(cheap, lambda known: [a for a in known if a.key == stored.key], monkeypatch)
    check(costly, lambda known: [a for a in known if a.key == anew.key], monkeypatch)


def test_an_image_is_written_and_read_with_channels_last() -> None:
    m = Made(0)
    values = [m.convolved(relu(m.convolved(m.of(1, 3, 6, 7), 16, 3)), 4, 3)]
    (a,) = [a for a in alternatives_of(graph_of(values)).values() if a.is_image]
    assert a.described.startswith("float32 1×16×6×7 stored with channels last")
    g = graph_of(values)
    before, after = (create_schedule(g.sink, g.constants, c) for c in (together([]), a.deviations))
    assert [c.args for c in before.calls] == [c.args for c in after.calls]
    assert all(x.ast is not y.ast for x, y in zip(before.calls, after.calls, strict=True))      # of the kernel that writes it, and reads it


def test_layers_with_the_same_kernels_have_one_alternative() -> None:
    m, x = Made(0), Made(1).of(1, 8, 6, 6)
    for _ in range(4):
        x = relu(m.convolved(x, 8, 3))
    shared = [a for a in alternatives_of(graph_of([x])).values() if a.is_image]
    assert [len(a.deviations.orders) for a in shared] == [3]


def test_outputs_and_operands_of_library_kernels_keep_their_order() -> None:
    m = Made(0)
    image = relu(m.convolved(m.of(1, 3, 6, 7), 16, 3))
    assert not [a for a in alternatives_of(graph_of([image, m.convolved(image, 4, 3)])).values() if a.deviations.orders]
    rows = m.times(m.of(6, 8), 7)
    assert not [a for a in alternatives_of(PlanGraph(sink(rows.tensor.sort(-1)[0].uop))).values() if a.deviations.orders]


def test_values_of_variable_extents_keep_their_order() -> None:
    n = Variable("n", 1, 16)
    m = Made(0)
    x = Tensor(m.numbers.standard_normal((16, 8)).astype(np.float32)).shrink(((0, n.bind(5)), None))
    y = (x @ m.of(8, 8).tensor).relu() @ m.of(8, 4).tensor
    assert not [a for a in alternatives_of(PlanGraph(sink(y.uop))).values() if a.deviations.orders]
