"""Linear algebra with the names of torch.linalg, computed by NumPy (LAPACK) on the host, in float32 or float64. Axes before the last two
are batches. A matrix for which a function is undefined raises NumPy's LinAlgError when the plan runs.

    u, s, vh = svod.linalg.svd(a)           lazy: computed between the kernels that make `a` and those that read u, s and vh
"""
from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from svod.errors import ShapeError
from svod.tensor.base import Array
from svod.tensor.host import as_float, on_host, square
from svod.tensor.tensor import Tensor

__all__ = ["QR", "SVD", "Eigh", "SlogDet", "cholesky", "det", "eigh", "eigvalsh", "inv", "lstsq", "pinv", "qr", "slogdet", "solve", "svd",
           "svdvals"]


class SVD(NamedTuple):
    """The factors of a = U · diag(S) · Vh."""

    U: Tensor
    S: Tensor
    Vh: Tensor


class Eigh(NamedTuple):
    """Eigenvalues in ascending order, and eigenvectors as columns."""

    eigenvalues: Tensor
    eigenvectors: Tensor


class QR(NamedTuple):
    """The factors of a = Q · R, with orthonormal columns in Q and R upper triangular."""

    Q: Tensor
    R: Tensor


class SlogDet(NamedTuple):
    """The sign and logarithm of a determinant: det(a) = sign · exp(logabsdet)."""

    sign: Tensor
    logabsdet: Tensor


def _in(a: Array, *results: Any) -> Any:
    """Convert NumPy's results to the dtype of `a`, because some functions widen float32."""
    arrays = tuple(np.asarray(r, a.dtype, order="C") for r in results)
    return arrays if len(arrays) > 1 else arrays[0]


def _svd(a: Array, full_matrices: bool) -> Any: return _in(a, *np.linalg.svd(a, full_matrices))
def _svdvals(a: Array) -> Any: return _in(a, np.linalg.svd(a, compute_uv=False))
def _eigh(a: Array) -> Any: return _in(a, *np.linalg.eigh(a))
def _eigvalsh(a: Array) -> Any: return _in(a, np.linalg.eigvalsh(a))
def _qr(a: Array, mode: Any) -> Any: return _in(a, *np.linalg.qr(a, mode))
def _cholesky(a: Array) -> Any: return _in(a, np.linalg.cholesky(a))
def _inv(a: Array) -> Any: return _in(a, np.linalg.inv(a))
def _pinv(a: Array) -> Any: return _in(a, np.linalg.pinv(a))
def _det(a: Array) -> Any: return _in(a, np.linalg.det(a))
def _slogdet(a: Array) -> Any: return _in(a, *np.linalg.slogdet(a))
def _solve(a: Array, b: Array) -> Any: return _in(a, np.linalg.solve(a, b))
def _lstsq(a: Array, b: Array) -> Any: return _in(a, np.linalg.lstsq(a, b, rcond=None)[0])


def _matrices(name: str, a: Any) -> Tensor:
    t = as_float(name, a)
    if t.ndim < 2 or 0 in t.shape:
        raise ShapeError(f"{name} of {t.shape}: it takes matrices, (…, m, n), with an element or more")
    return t


def svd(a: Any, full_matrices: bool = True) -> SVD:
    """The singular value decomposition. U is (…, m, m) and Vh (…, n, n), or (…, m, k) and (…, k, n) without `full_matrices`, for
    k = min(m, n); S is (…, k), descending. Runs on the host."""
    t = _matrices("svd", a)
    *batch, m, n = t.shape
    k = min(m, n)
    shapes = ((*batch, m, m if full_matrices else k), (*batch, k), (*batch, n if full_matrices else k, n))
    return SVD(*on_host(_svd, t, shape=shapes, dtype=(t.dtype.name,) * 3, full_matrices=full_matrices))


def svdvals(a: Any) -> Tensor:
    """The singular values (…, min(m, n)), descending. Runs on the host."""
    t = _matrices("svdvals", a)
    return on_host(_svdvals, t, shape=(*t.shape[:-2], min(t.shape[-2:])), dtype=t.dtype.name)


def eigh(a: Any) -> Eigh:
    """Eigenvalues (…, n) and eigenvectors (…, n, n) of symmetric matrices; only their lower triangles are read. Runs on the
    host."""
    t = _matrices("eigh", a)
    n = square("eigh", t)
    return Eigh(*on_host(_eigh, t, shape=((*t.shape[:-2], n), t.shape), dtype=(t.dtype.name,) * 2))


def eigvalsh(a: Any) -> Tensor:
    """The eigenvalues (…, n) of symmetric matrices, ascending. Runs on the host."""
    t = _matrices("eigvalsh", a)
    return on_host(_eigvalsh, t, shape=(*t.shape[:-2], square("eigvalsh", t)), dtype=t.dtype.name)


def qr(a: Any, mode: str = "reduced") -> QR:
    """The QR decomposition: Q (…, m, k) and R (…, k, n) for k = min(m, n), or k = m with mode "complete". Runs on the host."""
    if mode not in ("reduced", "complete"):
        raise ShapeError(f"qr(mode={mode!r}): use \"reduced\" or \"complete\"")
    t = _matrices("qr", a)
    *batch, m, n = t.shape
    k = min(m, n) if mode == "reduced" else m
    return QR(*on_host(_qr, t, shape=((*batch, m, k), (*batch, k, n)), dtype=(t.dtype.name,) * 2, mode=mode))


def cholesky(a: Any) -> Tensor:
    """The lower triangular L with a = L · Lᵀ, of symmetric positive definite matrices. Runs on the host."""
    return _same("cholesky", _cholesky, a)


def inv(a: Any) -> Tensor:
    """The inverse of square matrices. Runs on the host."""
    return _same("inv", _inv, a)


def _same(name: str, fn: Any, a: Any) -> Tensor:
    t = _matrices(name, a)
    square(name, t)
    return on_host(fn, t, shape=t.shape, dtype=t.dtype.name)


def pinv(a: Any) -> Tensor:
    """The pseudo-inverse (…, n, m) of Moore and Penrose. Runs on the host."""
    t = _matrices("pinv", a)
    return on_host(_pinv, t, shape=(*t.shape[:-2], t.shape[-1], t.shape[-2]), dtype=t.dtype.name)


def det(a: Any) -> Tensor:
    """The determinant of each matrix: (…, n, n) → (…). Runs on the host."""
    t = _matrices("det", a)
    square("det", t)
    return on_host(_det, t, shape=t.shape[:-2], dtype=t.dtype.name)


def slogdet(a: Any) -> SlogDet:
    """The sign and the logarithm of the absolute value of the determinant. Runs on the host."""
    t = _matrices("slogdet", a)
    square("slogdet", t)
    return SlogDet(*on_host(_slogdet, t, shape=(t.shape[:-2], t.shape[:-2]), dtype=(t.dtype.name,) * 2))


def solve(a: Any, b: Any) -> Tensor:
    """Solve a · x = b for matrices `b` (…, n, k), or a vector (n,) with one matrix `a`. Runs on the host."""
    t, other = _matrices("solve", a), as_float("solve", b)
    n = square("solve", t)
    vector = other.ndim == 1 and t.ndim == 2
    if other.shape[-1 if vector else -2:][0] != n or (not vector and other.shape[:-2] != t.shape[:-2]):
        raise ShapeError(f"solve of {t.shape} and {other.shape}: b is (…, {n}, k) with the axes before as in a, or ({n},)")
    return on_host(_solve, t, other.cast(t.dtype), shape=other.shape, dtype=t.dtype.name)


def lstsq(a: Any, b: Any) -> Tensor:
    """The least-squares solution x (n, k) or (n,) for one matrix `a` (m, n) and `b` (m, k) or (m,). Runs on the host."""
    t, other = _matrices("lstsq", a), as_float("lstsq", b)
    if t.ndim != 2 or other.ndim not in (1, 2) or other.shape[0] != t.shape[0]:
        raise ShapeError(f"lstsq of {t.shape} and {other.shape}: a is (m, n), and b is (m, k) or (m,)")
    return on_host(_lstsq, t, other.cast(t.dtype), shape=(t.shape[1], *other.shape[1:]), dtype=t.dtype.name)


def __dir__() -> list[str]:
    """The public names, for completion."""
    return sorted(__all__)
