"""Searches in sorted sequences and histograms against NumPy."""
from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import svod
from svod.errors import ShapeError
from svod.tensor import Tensor, searching
from svod.tensor.searching import histc, searchsorted
from tests.draws import draws
from tests.tensor.strategies import make

Array = np.ndarray[Any, np.dtype[Any]]
TYPES = ["float32", "float64", "float16", "int8", "int64", "uint8", "bool"]


def sequences(shape: tuple[int, ...], dtype: str, seed: int) -> Array:
    """Sorted rows with equal elements and, of floats, NaN at their ends, infinities and zeros."""
    return np.sort(make(shape, dtype, seed, special=True), -1)


@draws(12)
@given(n=st.sampled_from([1, 2, 7, 31, 128, 129, 300]), rows=st.integers(1, 5), width=st.integers(1, 9), dtype=st.sampled_from(TYPES),
       right=st.booleans(), most=st.sampled_from([0, 128]), seed=st.integers(0, 99))
def test_searches(n: int, rows: int, width: int, dtype: str, right: bool, most: int, seed: int) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(searching, "MOST_COUNTED", most)
        side = "right" if right else "left"
        values = make((rows, width), dtype, seed + 1, special=True)
        one, several = sequences((n,), dtype, seed), sequences((rows, n), dtype, seed)
        found = searchsorted(Tensor(one), Tensor(values), right)
        assert found.dtype.name == "int64" and np.array_equal(found.numpy(), np.searchsorted(one, values, side))
        assert np.array_equal(searchsorted(Tensor(several), Tensor(values), right).numpy(),
                              np.stack([np.searchsorted(r, v, side) for r, v in zip(several, values, strict=True)]))


@pytest.mark.parametrize("most", [0, 128])
def test_searches_of_a_length_that_varies(most: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(searching, "MOST_COUNTED", most)
    f = svod.jit(lambda s, x: searchsorted(s, x), dynamic="auto")
    for n in (5, 9, 70):
        edges, x = sequences((n,), "float32", n), make((n + 3,), "float32", n + 1)
        assert np.array_equal(np.asarray(f(edges, x)), np.searchsorted(edges, x))
        plans = len(f.plans)
    edges, x = sequences((33,), "float32", 33), make((41,), "float32", 34)
    assert np.array_equal(np.asarray(f(edges, x)), np.searchsorted(edges, x)) and len(f.plans) == plans, "a plan serves further lengths"


def test_searches_without_elements() -> None:
    assert searchsorted(Tensor.zeros(0), Tensor([1.0, 2.0])).tolist() == [0, 0]
    assert searchsorted(Tensor([1.0]), Tensor.zeros(0, 3)).shape == (0, 3)
    assert searchsorted(Tensor([1, 3, 3]), 3, True).item() == 3


@draws(8)
@given(n=st.integers(0, 300), bins=st.sampled_from([1, 3, 16, 100]), dtype=st.sampled_from(["float32", "float64"]), seed=st.integers(0, 99))
def test_histograms(n: int, bins: int, dtype: str, seed: int) -> None:
    x = (np.random.default_rng(seed).integers(-40, 41, n) / 8).astype(dtype)     # exact in either formula, also on the edges of parts
    for low, high in ((-4, 4), (0, 3)):
        exact = bins in (1, 16)
        counts = histc(Tensor(x), bins, low, high)
        assert counts.dtype.name == dtype and counts.numpy().sum() == ((x >= low) & (x <= high)).sum()
        if exact:
            assert counts.tolist() == np.histogram(x, bins, (low, high))[0].tolist()
    assert histc(Tensor(x), bins).numpy().sum() == n
    with_nan = np.append(x, [np.nan, np.inf]).astype(dtype)
    assert histc(Tensor(with_nan), bins, -9, 9).tolist() == histc(Tensor(x), bins, -9, 9).tolist()


@pytest.mark.parametrize("value", [0.0, -2.5, 1e9])
@pytest.mark.parametrize("bins", [1, 4, 5])
def test_a_histogram_of_equal_numbers_has_them_in_the_middle(value: float, bins: int) -> None:
    """Also where adding 1 does not change the number, and beside NaN."""
    counts = [3.0 * (k == bins // 2) for k in range(bins)]
    assert histc(Tensor(np.full(3, value, np.float32)), bins).tolist() == counts
    assert histc(Tensor(np.array([np.nan, value, value, value], np.float32)), bins).tolist() == counts


def test_a_number_is_searched_as_it_is_among_integers() -> None:
    assert searchsorted(Tensor([0, 1, 2]), 0.5).item() == 1 == searchsorted(Tensor([0, 1, 2]), Tensor(0.5)).item()


def test_what_is_refused_and_public_names() -> None:
    for call in (lambda: searchsorted(Tensor([[1.0]]), Tensor([[1.0], [2.0]])), lambda: searchsorted(Tensor(1.0), 2.0),
                 lambda: histc(Tensor([1.0]), 0), lambda: histc(Tensor([1.0]), 3, 2, 1)):
        with pytest.raises(ShapeError):
            call()
    assert svod.searchsorted is searchsorted and svod.histc is histc
