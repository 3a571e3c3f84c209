"""Scans, sorting and scatter along and across axes whose extent depends on a variable: NumPy's results for several of its values."""
from __future__ import annotations

from itertools import product
from typing import Any

import numpy as np
import pytest

from svod import Tensor, Variable
from svod.errors import ShapeError
from tests.draws import a_half

Array = np.ndarray[Any, np.dtype[Any]]
N = Variable("n", 3, 29)
VALUES = (3, 17, 29)


def drawn(dtype: str) -> Array:
    """Few different numbers, so that the order of equal elements matters; NaNs among floats, the extreme values among integers."""
    rng = np.random.default_rng(0)
    a = rng.integers(-3, 4, (4, 29, 3)).astype(dtype)
    special = (np.nan, np.inf, -np.inf) if dtype == "float32" else (np.iinfo(dtype).min, np.iinfo(dtype).max)
    return np.where(rng.random(a.shape) < 0.2, rng.choice(special, a.shape).astype(dtype), a)


def descending(y: Array, axis: int) -> Array:
    """Stable positions in descending order."""
    return np.asarray(y.shape[axis] - 1 - np.flip(np.argsort(np.flip(y, axis), axis, kind="stable"), axis))


@pytest.mark.parametrize(("axis", "dtype"), a_half(product([0, 1, 2], ["float32", "int32"])))
def test_sorting(dtype: str, axis: int) -> None:
    a = drawn(dtype)
    for n in VALUES:
        x, y = Tensor(a)[:, :N.bind(n)], a[:, :n]
        up, down = np.argsort(y, axis, kind="stable"), descending(y, axis)
        for name, found, want in (
                ("argsort", x.argsort(axis), up), ("sort", x.sort(axis).values, np.take_along_axis(y, up, axis)),
                ("descending", x.sort(axis, descending=True).values, np.take_along_axis(y, down, axis)),
                ("positions", x.sort(axis, descending=True).indices, down),
                ("topk", x.topk(2, axis).indices, np.take(down, [0, 1], axis)),
                ("smallest", x.topk(1, axis, largest=False).indices, np.take(up, [0], axis))):
            np.testing.assert_array_equal(found.numpy(), want, f"{name} at n={n}")


@pytest.mark.parametrize("axis", [1, 2])
def test_scans_and_medians(axis: int) -> None:
    a = drawn("int32") % 5
    for n in VALUES:
        x, y = Tensor(a)[:, :N.bind(n)], a[:, :n]
        middle = np.take(np.sort(y, axis), [(y.shape[axis] - 1) // 2], axis)
        for name, found, want in (
                ("cumsum", x.cumsum(axis), np.cumsum(y, axis, dtype=np.int64)),
                ("cummax", x.cummax(axis).values, np.maximum.accumulate(y, axis)),
                ("computed", (x * 2).cumprod(axis, "float64"), np.cumprod(y * 2, axis, dtype=np.float64)),
                ("median", x.median(axis, keepdim=True), middle)):
            np.testing.assert_allclose(found.numpy(), want, rtol=1e-12, err_msg=f"{name} at n={n}")


def test_scatter_into_and_of_extents_that_depend_on_a_variable() -> None:
    rng = np.random.default_rng(1)
    a = rng.integers(-9, 9, (4, 29, 3))
    for n in VALUES:
        y = a[:, :n]
        at, of = rng.integers(-n - 2, n + 2, (4, 5, 3)), rng.integers(0, 9, (4, 5, 3))
        want = y.copy()
        for i, j, k in np.ndindex(*at.shape):
            if -n <= at[i, j, k] < n:       # counted from the real end, not from the end of the largest shape
                want[i, at[i, j, k], k] += of[i, j, k]
        np.testing.assert_array_equal(Tensor(a)[:, :N.bind(n)].scatter_add(1, Tensor(at), Tensor(of)).numpy(), want)
        places = rng.integers(-8, 8, (4, 29, 3))
        want = np.zeros((4, 8, 3), np.int64)
        for i, j, k in np.ndindex(*y.shape):
            want[i, places[i, j, k], k] += y[i, j, k]
        found = Tensor.zeros(4, 8, 3, dtype="int64").scatter_add(1, Tensor(places)[:, :N.bind(n)], Tensor(a)[:, :N.bind(n)])
        np.testing.assert_array_equal(found.numpy(), want)


def test_one_plan_sorts_every_length() -> None:
    a = drawn("float32")[0]
    plan = Tensor(a)[:N].sort(0).values.prepare()
    for n in VALUES:
        plan.execute(n=n)
        np.testing.assert_array_equal(plan.outputs[0].reshape(-1, 3)[:n], np.sort(a[:n], 0))


def test_more_than_there_may_be_is_refused() -> None:
    with pytest.raises(ShapeError, match=r"k=4: there are n=9 elements, and there may be only 3; give the variable a larger min"):
        Tensor.zeros(29)[:N.bind(9)].topk(4, 0)
