"""svod.fft against numpy.fft in float64: lengths by products, by library kernels and by both, along any axis, cut and padded."""
from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest

import svod
from svod.errors import ShapeError
from svod.tensor import fft
from tests.draws import a_half

Array = np.ndarray[Any, Any]
LENGTHS = (1, 2, 3, 16, 17, 64, 96, 97, 98, 128, 500, 512, 1000, 1001, 1517, 2048, 4095)
LONG = (fft.MOST_AT_ONCE * 2, 40_000, 1031 * 2)


def of_pairs(a: Array) -> Array:
    return np.asarray(a[..., 0] + 1j * a[..., 1], complex)


def pairs(a: Array) -> Array:
    return np.stack([a.real, a.imag], -1) if np.iscomplexobj(a) else a


def check(got: Any, want: Array, dtype: str = "float32") -> None:
    want, got = pairs(want), got.numpy()
    assert got.dtype == dtype and got.shape == want.shape
    largest = np.abs(want).max(initial=1e-30)
    assert np.abs(got - want).max(initial=0) <= {"float32": 1e-6, "float64": 1e-14}[dtype] * largest


@pytest.mark.parametrize("name", ["fft", "ifft", "rfft", "irfft"])
@pytest.mark.parametrize("n", a_half([*LENGTHS, *LONG]))
def test_one_axis(name: str, n: int) -> None:
    rng, draw = np.random.default_rng(n), random.Random(n)
    before, after = draw.choice(((), (3,), (2, 1))), draw.choice(((), (), (5,), (17,))) if n < 5000 else ()
    dtype = draw.choice(("float32", "float32", "float64"))
    x = rng.standard_normal((*before, n, *after, *(() if name == "rfft" else (2,)))).astype(dtype)
    given = x.astype(float) if name == "rfft" else of_pairs(x.astype(float))
    for length in (None, n, max(1, n - 1), n + 2) if n < 5000 else (None,):
        if name == "irfft" and length is None and n == 1:
            continue
        check(getattr(svod.fft, name)(x, length, len(before)), getattr(np.fft, name)(given, length, len(before)), dtype)


@pytest.mark.parametrize("name", ["fft2", "ifft2", "rfft2", "irfft2", "fftn", "ifftn", "rfftn", "irfftn"])
def test_several_axes(name: str) -> None:
    rng, is_real = np.random.default_rng(1), name.startswith("r")
    x = rng.standard_normal((3, 18, 130, *(() if is_real else (2,)))).astype(np.float32)
    given = x.astype(float) if is_real else of_pairs(x)
    check(getattr(svod.fft, name)(x), getattr(np.fft, name)(given))
    check(getattr(svod.fft, name)(x, (20, 7), (2, 0)), getattr(np.fft, name)(given, (20, 7), (2, 0)))


def test_frequencies_and_shifts() -> None:
    for n in (1, 2, 7, 8):
        np.testing.assert_allclose(svod.fft.fftfreq(n, 0.5).numpy(), np.fft.fftfreq(n, 0.5), rtol=1e-6)
        np.testing.assert_allclose(svod.fft.rfftfreq(n).numpy(), np.fft.rfftfreq(n), rtol=1e-6)
    x = np.random.default_rng(0).standard_normal((5, 8, 2)).astype(np.float32)
    np.testing.assert_array_equal(svod.fft.fftshift(x, (0, 1)).numpy(), np.fft.fftshift(x, (0, 1)))
    np.testing.assert_array_equal(svod.fft.ifftshift(svod.fft.fftshift(x, (0, 1)), (0, 1)).numpy(), x)


def test_what_is_not_finite_stays_so() -> None:
    x = np.ones((2, 256), np.float32)
    x[0, 3] = np.nan
    got = svod.fft.rfft(x).numpy()
    assert np.isnan(got[0]).all() and np.isfinite(got[1]).all()


@pytest.mark.parametrize(("call", "words"), [
    (lambda: svod.fft.fftn(np.ones((3, 4, 2), np.float32), None, (0, 0)), "different axes"),
    (lambda: svod.fft.fft2(np.ones((4, 2), np.float32)), "different axes"),
    (lambda: svod.fft.rfftn(np.ones((3, 4), np.float32), (2,), (0, 1)), "a length for each"),
])
def test_errors_say_what_is_wrong(call: Any, words: str) -> None:
    with pytest.raises(ShapeError, match=words):
        call()
