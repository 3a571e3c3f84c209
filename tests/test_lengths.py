"""Lengths that differ from call to call: `svod.jit` warns once, or makes one plan for all of them."""
from __future__ import annotations

import logging
from typing import Any

import numpy as np
import pytest

import svod
from svod import Tensor, nn
from svod.core.ir.variable import value_of
from svod.errors import ArgumentError, ShapeError
from svod.tracing.lengths import FEW
from tests.draws import a_half

Array = np.ndarray[Any, np.dtype[Any]]
LENGTHS = [5, 9, 2, 16, 31, 1, 7, 40, 64, 100, 3]


def drawn(*shape: int, seed: int = 0) -> Array:
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def softmax(a: Array) -> Array:
    e = np.exp(a - a.max(-1, keepdims=True))
    return e / e.sum(-1, keepdims=True)


def test_who_has_many_lengths_is_told_once(caplog: pytest.LogCaptureFixture) -> None:
    @svod.jit
    def scaled(rows: Tensor, by: float) -> Tensor:
        return rows * by
    with caplog.at_level(logging.WARNING, "svod.jit"):
        for i, n in enumerate(LENGTHS):
            np.testing.assert_array_equal(scaled(drawn(3, n), 2.0).numpy(), drawn(3, n) * 2)
            assert len(caplog.records) == (i >= FEW - 1)
    assert "scaled was captured for 4 lengths of axis 1 of rows (2 … 16)" in caplog.text
    assert ('n = svod.Variable("n", 1, 32), and scaled(… rows[:, :n.bind(length)] …), where rows is a svod.Tensor that is 32 long'
            in caplog.text)
    n = svod.Variable("n", 1, 32)
    rows = drawn(3, 32)
    for length in (2, 32):      # the lengths that the error names are accepted
        np.testing.assert_array_equal(scaled(Tensor(rows)[:, :n.bind(length)], 2.0).numpy(), rows[:, :length] * 2)


def test_the_advice_names_the_parameter_of_forward(caplog: pytest.LogCaptureFixture) -> None:
    class Scale(nn.Module):
        def forward(self, image: Tensor) -> Tensor:
            return image * 2
    f = svod.jit(Scale())
    with caplog.at_level(logging.WARNING, "svod.jit"):
        for n in LENGTHS[:FEW]:
            f(drawn(n, 3))
    assert "lengths of axis 0 of image" in caplog.text and "image[:n.bind(length)]" in caplog.text


def test_slices_by_a_variable_that_cannot_be_say_what_to_do() -> None:
    n = svod.Variable("n", 1, 16)
    with pytest.raises(ShapeError, match=r"axis of extent 5: n=5 is 1 … 16.*extent is 16 at least"):
        Tensor(drawn(5, 3))[:n.bind(5)]
    with pytest.raises(ShapeError, match=r"NumPy array is sliced as a tensor: svod.Tensor\(a\)\[:n\]"):
        drawn(16, 3)[:n.bind(5)]    # type: ignore[misc]
    np.testing.assert_array_equal(Tensor(rows := drawn(16, 3))[:n.bind(5)].numpy(), rows[:5])


def test_the_advice_for_an_int(caplog: pytest.LogCaptureFixture) -> None:
    f = svod.jit(lambda x, at: x + at)
    with caplog.at_level(logging.WARNING, "svod.jit"):
        for at in range(10):
            f(drawn(3), at)
    assert len(caplog.records) == 1 and "4 values of at (0 … 3)" in caplog.text and "n.bind(at)" in caplog.text


@pytest.mark.parametrize("dynamic", ["auto", "never"])
def test_who_decided_is_not_told(dynamic: Any, caplog: pytest.LogCaptureFixture) -> None:
    f = svod.jit(lambda x: x + 1, dynamic=dynamic)
    with caplog.at_level(logging.INFO, "svod.jit"):
        for n in LENGTHS:
            np.testing.assert_array_equal(f(drawn(n)).numpy(), drawn(n) + 1)
    assert not caplog.records
    with pytest.raises(ArgumentError, match="use \"tell\", \"auto\" or \"never\""):
        svod.jit(lambda x: x, dynamic=True)  # type: ignore[arg-type]


def attention(x: Tensor, mask: Tensor) -> Tensor:
    return (x @ x.T + mask).softmax(-1) @ x


PROGRAMS: dict[str, tuple[Any, Any, Any]] = {
    "rows": (lambda n: (drawn(n, 6),), lambda x: x.relu() + 1, lambda x: np.maximum(x, 0) + 1),
    "columns": (lambda n: (drawn(6, n),), lambda x: x * 2, lambda x: x * 2),
    "middle": (lambda n: (drawn(2, n, 5),), lambda x: x.sum(1), lambda x: x.sum(1)),
    "reduced": (lambda n: (drawn(n, 4),), lambda x: x.mean(0), lambda x: x.mean(0)),
    "two together": (lambda n: (drawn(n), drawn(n, seed=1)), lambda x, y: x * y, lambda x, y: x * y),
    "two apart": (lambda n: (drawn(n, 3), drawn(3, 2 * n, seed=1)), lambda x, y: x @ y, lambda x, y: x @ y),
    "attention": (lambda n: (drawn(n, 8), drawn(n, n, seed=1)), attention,
                  lambda x, m: softmax(x @ x.T + m) @ x),
    "an int": (lambda n: (drawn(7), n), lambda x, k: x * k, lambda x, k: x * k),
    "a structure": (lambda n: ({"a": drawn(n), "b": [drawn(3)]},), lambda d: (d["a"] * 2, d["b"][0] + d["a"].sum()),
                    lambda d: (d["a"] * 2, d["b"][0] + d["a"].sum())),
    "returned": (lambda n: (drawn(n),), lambda x: (x, x + 1), lambda x: (x, x + 1)),
    "float64": (lambda n: (drawn(n).astype(np.float64),), lambda x: x + 1, lambda x: x + 1),
}


@pytest.mark.parametrize("name", a_half(PROGRAMS))
def test_one_plan_for_all_lengths(name: str) -> None:
    make, program, reference = PROGRAMS[name]
    f = svod.jit(program, dynamic="auto")
    kept = []
    for n in LENGTHS:
        found, want = f(*make(n)), reference(*make(n))
        kept.append((found, want))
        found, want = (found, want) if isinstance(found, tuple) else ((found,), (want,))
        for a, b in zip(found, want, strict=True):
            assert a.shape == b.shape
            np.testing.assert_allclose(a.numpy(), b, rtol=1e-4, atol=1e-4)
    assert len(f.plans) <= 4, "the first length, a length of 1, and one for all"
    for found, want in kept:        # later calls do not overwrite results
        for a, b in zip(found if isinstance(found, tuple) else (found,), want if isinstance(want, tuple) else (want,), strict=True):
            np.testing.assert_allclose(a.numpy(), b, rtol=1e-4, atol=1e-4)


def test_a_variable_that_the_function_binds_itself() -> None:
    k, table = svod.Variable("k", 1, 9), Tensor(drawn(9)).realize()
    run = svod.jit(lambda x: (x * 2, table[:k.bind(4)] * 3), dynamic="auto")
    for n in LENGTHS:
        first, second = run(drawn(n))
        np.testing.assert_array_equal(first.numpy(), drawn(n) * 2)
        np.testing.assert_array_equal(second.numpy(), drawn(9)[:4] * 3)


def test_extents_that_a_function_returns_are_those_of_the_call() -> None:
    """Also in sums and shapes, of an int argument, and of a variable that the function binds itself."""
    k, table = svod.Variable("k", 1, 9), Tensor(drawn(9)).realize()

    @svod.jit(dynamic="auto")
    def measured(x: Tensor, times: Any) -> Any:
        return {"rows": x.shape[0], "shape": x.shape, "sum": [2 * x.shape[0] + 1, times]}, x * times, table[:k.bind(4)].shape[0]
    for n in LENGTHS:
        sizes, scaled, fixed = measured(drawn(n, 3), n + 1)
        assert sizes == {"rows": n, "shape": (n, 3), "sum": [2 * n + 1, n + 1]}
        assert (type(sizes["rows"]), type(sizes["sum"][1])) == (int, int)
        np.testing.assert_array_equal(scaled.numpy(), drawn(n, 3) * np.float32(n + 1))
        assert value_of(fixed) == 4
    up_to = svod.Variable("up_to", 1, 64)
    declared = svod.jit(lambda x: (x.shape[0], x + 1))
    for rows in (5, 17):
        extent, made = declared(Tensor(drawn(64, 3))[:up_to.bind(rows)])
        assert value_of(extent) == value_of(made.shape[0]) == rows


def test_weights_that_change() -> None:
    model = nn.Linear(6, 4)
    f = svod.jit(lambda x: model(x).relu(), dynamic="auto")

    def check(n: int) -> None:
        x = drawn(n, 6)
        np.testing.assert_allclose(f(x).numpy(), np.maximum(x @ model.weight.numpy().T + model.bias.numpy(), 0), rtol=1e-4, atol=1e-5)
    for n in (3, 5, 8):
        check(n)
    model.weight = Tensor(drawn(4, 6, seed=3))
    for n in (5, 3, 11):
        check(n)


def test_a_function_that_needs_its_length(caplog: pytest.LogCaptureFixture) -> None:
    f = svod.jit(lambda x: x * 2 if x.shape[0] > 6 else x * 3, dynamic="auto")
    with caplog.at_level(logging.INFO, "svod.jit"):
        for n in LENGTHS:
            np.testing.assert_array_equal(f(drawn(n)).numpy(), drawn(n) * (2 if n > 6 else 3))
    assert "has a plan for each length" in caplog.text


def test_an_argument_that_is_assigned_to() -> None:
    f = svod.jit(lambda x: x.assign(x + 1), dynamic="auto")
    for n in LENGTHS:
        x = drawn(n)
        f(x)
        np.testing.assert_array_equal(x, drawn(n) + 1)


def test_state_and_random_numbers() -> None:
    total = Tensor(np.zeros(4, np.float32)).clone().realize()

    def step(x: Tensor) -> Tensor:
        total.assign(total + x.sum(0))
        return x + Tensor.rand(4) * 0
    f = svod.jit(step, dynamic="auto", random="fresh")
    want = np.zeros(4, np.float32)
    for n in LENGTHS:
        np.testing.assert_array_equal(f(drawn(n, 4)).numpy(), drawn(n, 4))
        want += drawn(n, 4).sum(0)
        np.testing.assert_allclose(total.numpy(), want, rtol=1e-4, atol=1e-4)
