"""Random numbers: the generator's published vectors, determinism, distributions."""
from __future__ import annotations

import numpy as np
import pytest

from svod.core.graph import graph
from svod.core.ir.dtype import dtypes
from svod.errors import DTypeError
from svod.tensor import Tensor
from svod.tensor.operations.random import threefry2x32
from tests.draws import a_half
from tests.graph_reference import evaluate_graph
from tests.tensor.checking import evaluate


@pytest.mark.parametrize(("counter", "key", "expected"), [
    # known answers of Random123, threefry2x32 with 20 rounds (kat_vectors of the authors' distribution)
    ((0x00000000, 0x00000000), (0x00000000, 0x00000000), (0x6B200159, 0x99BA4EFE)),
    ((0xFFFFFFFF, 0xFFFFFFFF), (0xFFFFFFFF, 0xFFFFFFFF), (0x1CB996FC, 0xBB002BE7)),
    ((0x243F6A88, 0x85A308D3), (0x13198A2E, 0x03707344), (0xC4923A9C, 0x483DF7A0)),
])
def test_threefry_gives_the_known_answers(counter: tuple[int, int], key: tuple[int, int], expected: tuple[int, int]) -> None:
    words = threefry2x32(graph.full((1,), counter[0], dtypes.uint32), graph.full((1,), counter[1], dtypes.uint32), key)
    assert tuple(int(evaluate_graph(w)[0]) for w in words) == expected


def test_the_seed_fixes_the_numbers() -> None:
    Tensor.manual_seed(7)
    a, b = Tensor.rand(5), Tensor.rand(5)
    first, second = evaluate(a), evaluate(b)
    assert not np.array_equal(first, second)
    np.testing.assert_array_equal(evaluate(a), first)
    Tensor.manual_seed(7)
    np.testing.assert_array_equal(evaluate(Tensor.rand(5)), first)
    Tensor.manual_seed(8)
    assert not np.array_equal(evaluate(Tensor.rand(5)), first)
    Tensor.manual_seed(7)
    # a longer tensor begins with the same numbers: each is a function of its position
    np.testing.assert_array_equal(evaluate(Tensor.rand(3, 4)).ravel()[:5], first)


@pytest.mark.parametrize("dtype", a_half(["float16", "bfloat16", "float32", "float64"]))
def test_rand_is_uniform_below_one(dtype: str) -> None:
    Tensor.manual_seed(1)
    t = Tensor.rand(100, 100, dtype=dtype)
    x = evaluate(t).astype(np.float64)
    assert t.dtype.name == dtype
    assert x.min() >= 0 and x.max() < 1
    # the mean of 10,000 numbers is off by at most five standard errors (0.0029)
    assert abs(x.mean() - 0.5) < 0.0145 and abs(x.var() - 1 / 12) < 0.005
    counts = np.histogram(x, 16, (0, 1))[0]
    assert ((counts - 625) ** 2 / 625).sum() < 60


@pytest.mark.parametrize("dtype", a_half(["float32", "float64"]))
def test_randn_is_normal(dtype: str) -> None:
    Tensor.manual_seed(2)
    x = evaluate(Tensor.randn(20000, dtype=dtype))
    assert np.isfinite(x).all()
    assert abs(x.mean()) < 0.036 and abs(x.var() - 1) < 0.05
    assert abs((np.abs(x) < 1).mean() - 0.6827) < 0.017
    y = evaluate(Tensor.normal(2000, mean=3.0, std=0.5))
    assert abs(y.mean() - 3) < 0.06 and abs(y.std() - 0.5) < 0.05


def test_randint_covers_its_range() -> None:
    Tensor.manual_seed(3)
    x = evaluate(Tensor.randint(-3, 4, (5000,)))
    assert x.dtype == np.int32 and set(x.tolist()) == set(range(-3, 4))
    assert np.bincount(x + 3).min() > 600
    assert set(evaluate(Tensor.randint(2, size=(50,), dtype="uint8")).tolist()) == {0, 1}
    wide = evaluate(Tensor.randint(-2 ** 63, 2 ** 63, (1000,), dtype="int64"))
    assert (wide < 0).mean() == pytest.approx(0.5, abs=0.1) and np.abs(wide.astype(np.float64)).max() > 2 ** 62
    big = evaluate(Tensor.randint(10 ** 10, 10 ** 12, (100,), dtype="int64"))
    assert big.min() >= 10 ** 10 and big.max() < 10 ** 12 and len(set(big.tolist())) == 100


def test_uniform_bounds_and_no_elements() -> None:
    x = evaluate(Tensor.uniform(1000, low=-2.0, high=3.0))
    assert x.min() >= -2 and x.max() < 3 and x.min() < -1.9 and x.max() > 2.9
    assert evaluate(Tensor.rand(0, 3)).shape == (0, 3)
    assert Tensor.zeros(2, 3, dtype="float64").rand_like().dtype == dtypes.float64


def test_errors_of_random() -> None:
    with pytest.raises(DTypeError, match="randint"):
        Tensor.rand(2, dtype="int32")
    with pytest.raises(DTypeError, match="not empty"):
        Tensor.randint(5, 5, (2,))
    with pytest.raises(DTypeError, match="uint8"):
        Tensor.randint(0, 300, (2,), dtype="uint8")
