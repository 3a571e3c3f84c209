"""Long sums of float32 against NumPy's float64: their errors do not grow with the length.

The limits are four times the largest errors of PyTorch 2.13 on a CPU for the same values and lengths (2^12 to 2^22): 1.5e-7 of the sum of
all elements, 9e-7 of sums along an outer axis; 6e-8 of running sums and products; 1.5e-6 of products of matrices up to 2^13."""
from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from svod import PrepareConfig, Tensor
from tests.draws import a_half, a_quarter

Array = np.ndarray[Any, np.dtype[Any]]
SUM, OUTER, SCAN, PRODUCT = 6e-7, 3.6e-6, 2.4e-7, 6e-6
LENGTHS = (1 << 16, 1_000_003, 1 << 22)


def equal(*shape: int) -> Array:
    return np.full(shape, 0.1, np.float32)


def uniform(*shape: int) -> Array:
    return np.random.default_rng(0).random(shape, np.float32)


def normal(*shape: int) -> Array:
    return np.random.default_rng(0).standard_normal(shape).astype(np.float32)


VALUES = (equal, uniform, normal)
LONG = [*((n, equal) for n in LENGTHS), *((LENGTHS[1], values) for values in (uniform, normal))]     # equal numbers have the largest errors


def error(got: Tensor, want: Any, scale: Any) -> float:
    """The largest error divided by `scale`, the result for absolute values."""
    return float(np.max(np.abs(got.numpy().astype(np.float64) - want) / scale))


@pytest.mark.parametrize(("n", "values"), a_half(LONG))
def test_sums_and_means(n: int, values: Callable[..., Array]) -> None:
    x, y = values(n), values(n, 2)
    x64, y64 = x.astype(np.float64), y.astype(np.float64)
    total, columns = np.abs(x64).sum(), np.abs(y64).sum(0)
    assert error(Tensor(x).sum(), x64.sum(), total) <= SUM
    assert error(Tensor(x).mean(), x64.mean(), total / n) <= SUM
    assert error(Tensor(x).nansum(), x64.sum(), total) <= SUM
    assert error(Tensor(y).mean(), y64.mean(), columns.sum() / (2 * n)) <= SUM
    assert error(Tensor(y).sum(0), y64.sum(0), columns) <= OUTER
    assert error(Tensor(y).mean(0), y64.mean(0), columns / n) <= OUTER
    assert error(Tensor(y).nanmean(0), y64.mean(0), columns / n) <= OUTER
    assert error(Tensor(x).reshape(1, n).sum(1), x64.sum(), total) <= SUM


@pytest.mark.parametrize(("n", "values"), a_quarter(LONG))
def test_norms_products_and_exponentials(n: int, values: Callable[..., Array]) -> None:
    """PyTorch's norms and products are worse: 2e-3 and 2e-2 of 2^22 equal values."""
    x, y = values(n), values(n, 2)
    x64, y64 = x.astype(np.float64), y.astype(np.float64)
    assert error(Tensor(x).norm(), np.sqrt((x64 ** 2).sum()), np.sqrt((x64 ** 2).sum())) <= SUM
    assert error(Tensor(x).norm(p=1), np.abs(x64).sum(), np.abs(x64).sum()) <= SUM
    assert error(Tensor(x).logsumexp(), np.log(np.exp(x64).sum()), np.log(np.exp(x64).sum())) <= SUM
    softmax = np.exp(x64) / np.exp(x64).sum()
    assert error(Tensor(x).softmax(0), softmax, softmax) <= 2 * SUM
    square = (x64 ** 2).sum()
    assert error((Tensor(x) * Tensor(x.copy())).sum(), square, square) <= PRODUCT
    assert error(Tensor(y).T @ Tensor(y), y64.T @ y64, np.abs(y64.T) @ np.abs(y64)) <= PRODUCT
    assert error(Tensor.einsum("nk,nk->k", Tensor(y), Tensor(y.copy())), (y64 ** 2).sum(0), (y64 ** 2).sum(0)) <= PRODUCT


@pytest.mark.parametrize("values", VALUES)
@pytest.mark.parametrize("n", a_quarter([383, 512, 769, 1024, 4096, 8191, 65_537]))
def test_products(n: int, values: Callable[..., Array]) -> None:
    """Factors of several sizes: rounding errors of equal products add up, and which sizes lose most depends on their bits."""
    a, b = values(11, n) * np.linspace(0.3, 3, 11, dtype=np.float32)[:, None], values(n, 5)
    a64, b64 = a.astype(np.float64), b.astype(np.float64)
    assert error(Tensor(a) @ Tensor(b), a64 @ b64, np.abs(a64) @ np.abs(b64)) <= PRODUCT
    image, taps = a[:3, :n - n % 9].reshape(1, -1, 3, 9), b[:n - n % 9].T.reshape(5, -1, 3, 3)
    want = np.stack([np.einsum("chw,ochw->o", image[0, :, :, at:at + 3].astype(np.float64), taps) for at in range(7)], 1)
    assert error(Tensor(image).conv2d(Tensor(taps))[0, :, 0], want, np.abs(want).max()) <= PRODUCT


@pytest.mark.parametrize("values", a_quarter(VALUES))
@pytest.mark.parametrize("shape", [(1 << 16,), (1_000_003,), (1 << 22,), (100_003, 5), (3, 70_001), (2, 30_011, 3)])
def test_running_sums_and_products(shape: tuple[int, ...], values: Callable[..., Array]) -> None:
    x = values(*shape)
    axis = 1 if len(shape) > 1 and shape[0] < 10 else 0
    x64 = x.astype(np.float64)
    assert error(Tensor(x).cumsum(axis), x64.cumsum(axis), np.abs(x64).cumsum(axis)) <= SCAN
    y = 1 + x * np.float32(4 / shape[axis])
    want = y.astype(np.float64).cumprod(axis)
    assert error(Tensor(y).cumprod(axis), want, want) <= SCAN
    want = np.logaddexp.accumulate(x64, axis)
    assert error(Tensor(x).logcumsumexp(axis), want, np.maximum(1, np.abs(want))) <= SCAN


@pytest.mark.parametrize(("n", "values"), a_half(LONG))
@pytest.mark.parametrize("offset", [0, 100, 10_000])
def test_variances(n: int, values: Callable[..., Array], offset: float) -> None:
    """The mean is rounded to float32: 10,000 ± 5e-4, of which the square is above a unit in the last place of a variance of 1."""
    x = values(n) + np.float32(offset)
    want = x.astype(np.float64).var()
    rounding = 1e-9 * float(np.float32(0.1 + offset)) ** 2 if values is equal else want     # equal numbers have no variance
    assert error(Tensor(x).var(correction=0), want, rounding) <= 1e-6
    assert error(Tensor(np.stack([x, x], 1)).var(0, correction=0), want, rounding) <= 1e-6
    assert Tensor(x).std().numpy() >= 0


@pytest.mark.parametrize("scale", [1e17, 1e30])
def test_variances_of_large_numbers(scale: float) -> None:
    """Neither the sum of the squared distances of 1e30 nor the square of the sum of all distances is a float32."""
    x = normal(1000) * np.float32(scale)
    x[0] *= 0.37
    with np.errstate(over="ignore"):
        want = x.astype(np.float64).var().astype(np.float32)
    np.testing.assert_allclose(Tensor(x).var(correction=0).numpy(), want, rtol=1e-6)
    np.testing.assert_allclose(Tensor(x).std(correction=0).numpy(), np.sqrt(want), rtol=1e-6)


@pytest.mark.parametrize(("n", "values"), a_half([(LENGTHS[0], normal), (LENGTHS[1], uniform), (LENGTHS[2], normal)]))
def test_norms_of_long_rows(n: int, values: Callable[..., Array]) -> None:
    x = values(n)
    x64 = x.astype(np.float64)
    want, rms = (x64 - x64.mean()) / np.sqrt(x64.var() + 1e-5), x64 / np.sqrt((x64 ** 2).mean() + 1e-5)
    assert error(Tensor(x).layer_norm(n), want, np.maximum(1, np.abs(want))) <= SUM
    assert error(Tensor(x).rms_norm(n, eps=1e-5), rms, np.maximum(1, np.abs(rms))) <= SUM
    columns = np.stack([x, 3 * x], 1)
    batch = Tensor(columns).transpose(0, 1).reshape(1, 2, n)
    assert error(batch.group_norm(2, eps=1e-5)[0, 0], want, np.maximum(1, np.abs(want))) <= SUM


@pytest.mark.parametrize("chain", ["", "SWAP(o0, r0)", "UNROLL(r0, 32) UNROLL(r0, 32)", "TILE(r0, 1024) SWAP(o0, r0)",
                                   "UPCAST(o0, 2) TILE(r0, 4096)", "UPCAST(r0, 3)"])
def test_any_opts_are_as_exact(chain: str) -> None:
    x = equal(1 << 20, 2)
    want = x.astype(np.float64).sum(0)
    got = Tensor(x).sum(0)
    plan = got.prepare(PrepareConfig(opts={"reduce_0": chain}))
    assert [k.opts_source for k in plan.kernels] == ["explicit"]
    plan.execute()
    assert error(got, want, want) <= OUTER
