"""Functions that NumPy computes on the host: shapes, values, laziness, and refused arguments."""
from __future__ import annotations

from itertools import product
from typing import Any

import numpy as np
import pytest

import svod
from svod import Tensor
from svod.errors import DTypeError, ShapeError, SvodError
from svod.tensor import fft, host, linalg
from tests.draws import a_half

Array = np.ndarray[Any, np.dtype[Any]]


def drawn(*shape: int, seed: int = 0, dtype: str = "float64") -> Array:
    return np.random.default_rng(seed).standard_normal(shape).astype(dtype)


def close(found: Tensor, want: Any) -> None:
    assert found.shape == np.shape(want)
    np.testing.assert_allclose(found.numpy(), want, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(("shape", "dtype"), a_half(product(
    [(1, 1), (5, 3), (3, 7), (2, 4, 4), (2, 3, 1, 6)], ["float32", "float64"])), ids=str)
def test_decompositions(shape: tuple[int, ...], dtype: str) -> None:
    a = drawn(*shape, dtype=dtype)
    t = Tensor(a)
    for full in (True, False):
        u, s, vh = linalg.svd(t, full)
        k = min(shape[-2:])
        assert {x.dtype.name for x in (u, s, vh)} == {dtype}
        close((u[..., :k] * s.unsqueeze(-2)) @ vh[..., :k, :], a)
        close(s, np.linalg.svd(a, compute_uv=False))
    close(linalg.svdvals(t), np.linalg.svd(a, compute_uv=False))
    for mode in ("reduced", "complete"):
        q, r = linalg.qr(t, mode)
        close(q @ r, a)
        close(q.transpose(-1, -2) @ q, np.broadcast_to(np.eye(q.shape[-1]), (*shape[:-2], q.shape[-1], q.shape[-1])))
    close(linalg.pinv(t), np.linalg.pinv(a))


@pytest.mark.parametrize("shape", [(1, 1), (5, 5), (2, 3, 3)])
def test_square_matrices(shape: tuple[int, ...]) -> None:
    a = drawn(*shape)
    spd = a @ np.swapaxes(a, -1, -2) + np.eye(shape[-1])
    t, p, b = Tensor(a), Tensor(spd), drawn(*shape[:-1], 2, seed=1)
    close(linalg.inv(p) @ p, np.broadcast_to(np.eye(shape[-1]), shape))
    close(linalg.det(t), np.linalg.det(a))
    sign, log = linalg.slogdet(t)
    close(sign * log.exp(), np.linalg.det(a))
    lower = linalg.cholesky(p)
    close(lower @ lower.transpose(-1, -2), spd)
    values, vectors = linalg.eigh(p)
    close(vectors * values.unsqueeze(-2) @ vectors.transpose(-1, -2), spd)
    close(linalg.eigvalsh(p), np.linalg.eigvalsh(spd))
    close(p @ linalg.solve(p, Tensor(b)), b)


def test_equations() -> None:
    a, b = drawn(7, 3), drawn(7, seed=1)
    close(linalg.lstsq(Tensor(a), Tensor(b)), np.linalg.lstsq(a, b, rcond=None)[0])
    close(linalg.lstsq(a, drawn(7, 2)), np.linalg.lstsq(a, drawn(7, 2), rcond=None)[0])
    close(linalg.solve(np.eye(3) * 2, np.ones(3)), np.full(3, 0.5))
    with pytest.raises(np.linalg.LinAlgError):
        linalg.inv(Tensor(np.zeros((2, 2)))).numpy()


@pytest.mark.parametrize(("call", "said"), [
    (lambda: linalg.inv(np.ones((2, 3))), r"inv of \(2, 3\): it takes square matrices"), (lambda: linalg.svd(np.ones(3)), "takes matrices"),
    (lambda: linalg.solve(np.eye(3), np.ones((4, 1))), r"b is \(…, 3, k\)"), (lambda: linalg.lstsq(np.eye(3), np.ones(4)), "lstsq of"),
    (lambda: linalg.qr(np.eye(3), "full"), "use \"reduced\""), (lambda: linalg.eigh(np.ones((2, 3))), "square matrices")])
def test_what_linear_algebra_refuses(call: Any, said: str) -> None:
    with pytest.raises(ShapeError, match=said):
        call()
    with pytest.raises(DTypeError, match="of bools"):
        linalg.inv(np.ones((2, 2), bool))


@pytest.mark.slow
@pytest.mark.parametrize("n", [1, 2, 7, 30, 97, 523, 1026])      # 523 is prime: NumPy; 1026 = 27 · 38
def test_transforms(n: int) -> None:
    x = drawn(3, n, 2)
    z = x[..., 0] + 1j * x[..., 1]

    def pairs(c: Any) -> Array:
        return np.stack([c.real, c.imag], -1)
    close(fft.fft(Tensor(x)), pairs(np.fft.fft(z)))
    close(fft.ifft(fft.fft(Tensor(x))), x)
    close(fft.fft(Tensor(x), 5, 0), pairs(np.fft.fft(z, 5, 0)))
    real = x[..., 0].copy()
    close(fft.rfft(Tensor(real)), pairs(np.fft.rfft(real)))
    close(fft.irfft(fft.rfft(Tensor(real)), n), real)
    half = pairs(np.fft.rfft(real) + 0.5j)      # the imaginary parts of the first and the last number are ignored
    close(fft.irfft(Tensor(half), n), np.fft.irfft(half[..., 0] + 1j * half[..., 1], n))
    close(fft.rfft(Tensor(real.astype(np.float32))), pairs(np.fft.rfft(real)))
    assert fft.rfft(Tensor(real.astype(np.float32))).dtype.name == "float32"


def test_what_transforms_refuse() -> None:
    for call, said in ((lambda: fft.fft(np.ones(3)), "pairs in a last axis of two"),
                       (lambda: fft.rfft(np.ones(3), dim=2), "there are 1 axes"),
                       (lambda: fft.rfft(np.float32(1)), "needs an axis"), (lambda: fft.irfft(np.ones((1, 2))), "give n")):
        with pytest.raises(ShapeError, match=said):
            call()


@pytest.mark.parametrize("n", [1, 7, 40])
def test_sets_and_positions(n: int) -> None:
    a = np.random.default_rng(n).integers(0, 5, (n, 2))
    t = Tensor(a)
    values, inverse, counts = host.unique(t, True, True)
    want = np.unique(a, return_counts=True)
    assert host.unique(t).tolist() == values.tolist() == want[0].tolist() and counts.tolist() == want[1].tolist()
    assert inverse.shape == a.shape and np.array_equal(want[0][inverse.numpy()], a)
    flat = Tensor(a.reshape(-1))
    assert host.bincount(flat, minlength=9).tolist() == np.bincount(a.reshape(-1), minlength=9).tolist()
    weights = drawn(2 * n)
    close(host.bincount(flat, Tensor(weights)), np.bincount(a.reshape(-1), weights))


def test_what_sets_and_positions_refuse() -> None:
    for call, error in ((lambda: host.bincount(Tensor([1.5])), DTypeError), (lambda: host.bincount(Tensor([[1]])), ShapeError)):
        with pytest.raises(error):
            call()
    with pytest.raises(SvodError, match="reads the values of an argument"):
        svod.jit(lambda x: host.unique(x))(np.ones(3))


def test_in_captured_functions_and_by_their_public_names() -> None:
    f = svod.jit(lambda x: svod.linalg.inv(x * 2) @ x)
    a = drawn(4, 4) + np.eye(4) * 5
    for scale in (1, 3):
        close(f(a * scale), np.eye(4) / 2)
    assert len(f.plans) == 1
    close(svod.fft.irfft(svod.fft.rfft(Tensor(a)), 4), a)
    assert svod.unique(Tensor([3, 1, 3])).tolist() == [1, 3] and svod.bincount is host.bincount
