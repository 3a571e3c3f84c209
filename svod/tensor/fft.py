"""Fourier transforms with the names of torch.fft. svod has no complex dtype: complex numbers are pairs (real, imaginary) in an additional
last axis of two, as in `torch.view_as_real`. `dim` counts the axes without this one.

    spectrum = svod.fft.rfft(x)             # x (8, 100) → (8, 51, 2)
    svod.fft.irfft(spectrum, 100)           # back to (8, 100)

A transform of up to `DIRECT` positions is a product with a matrix of roots of unity. A longer one, of a·b positions, consists of transforms
of a positions, a rotation of each number, and transforms of b positions (Cooley and Tukey, 1965). If the length has a prime factor above
`DIRECT`, NumPy computes the transform on the host.
"""
from __future__ import annotations

import math
from functools import cache
from typing import Any, NamedTuple

import numpy as np

from svod.errors import ShapeError
from svod.tensor.base import Array
from svod.tensor.host import as_float, on_host
from svod.tensor.tensor import Tensor

__all__ = ["fft", "ifft", "irfft", "rfft"]
DIRECT = 512


class Parts(NamedTuple):
    """Complex numbers as two tensors, their real and their imaginary parts."""

    real: Tensor
    imag: Tensor

    def moved(self, source: int, destination: int) -> Parts:
        """Move axis `source` to `destination` in both parts."""
        return Parts(self.real.movedim(source, destination), self.imag.movedim(source, destination))


# -- along the last axis, not scaled -------------------------------------------------------------------

@cache
def _split(n: int) -> tuple[int, int] | None:
    """The two factors of n that are closest to each other and both have a transform by products; None if there are none."""
    for a in range(math.isqrt(n), 1, -1):
        if n % a == 0 and (n // a <= DIRECT or _split(n // a) is not None):
            return a, n // a
    return None


def has_products(n: int) -> bool:
    """Whether a transform of n positions is computed by matrix products, not by NumPy on the host."""
    return n <= DIRECT or _split(n) is not None


def _roots(rows: int, columns: int, n: int, inverse: bool) -> Array:
    """Roots of unity exp(∓2πi·jk/n) for j < rows and k < columns, as a complex matrix."""
    turns = np.outer(np.arange(rows), np.arange(columns)) % n
    return np.asarray(np.exp((2j if inverse else -2j) * np.pi / n * turns))


@cache
def _matrix(n: int, columns: int, inverse: bool, dtype: str) -> Array:
    """The real parts of the roots, followed by their imaginary parts in further columns: (n, 2·columns)."""
    roots = _roots(n, columns, n, inverse)
    return np.concatenate([roots.real, roots.imag], 1).astype(dtype)


def _product(x: Tensor, imag: Tensor | None, n: int, columns: int, inverse: bool) -> Parts:
    """The first `columns` numbers of a transform: one matrix product for real numbers, two for complex ones."""
    matrix = _matrix(n, columns, inverse, x.dtype.name)
    made = x.matmul(Tensor(matrix))
    if imag is not None:
        turned = np.concatenate([-matrix[:, columns:], matrix[:, :columns]], 1)
        made = made.add(imag.matmul(Tensor(turned)))
    return Parts(made[..., :columns], made[..., columns:])


def transform(x: Tensor, imag: Tensor | None, inverse: bool = False, half: bool = False) -> Parts:
    """The unscaled transform of real (`imag` None) or complex numbers along the last axis; `half`: its first n//2 + 1 numbers only."""
    n = x.shape[-1]
    kept = n // 2 + 1 if half else n
    if n <= DIRECT:
        return _product(x, imag, n, kept, inverse)
    split = _split(n)
    assert split is not None
    a, b = split

    def columns(t: Tensor) -> Tensor:
        return t.reshape(*t.shape[:-1], a, b).transpose(-1, -2)
    first = _product(columns(x), None if imag is None else columns(imag), a, a, inverse)
    roots = _roots(b, a, n, inverse)
    cosine, sine = (Tensor(part.astype(x.dtype.name)) for part in (roots.real, roots.imag))
    turned = Parts(first.real.mul(cosine).sub(first.imag.mul(sine)), first.real.mul(sine).add(first.imag.mul(cosine)))
    second = transform(turned.real.transpose(-1, -2), turned.imag.transpose(-1, -2), inverse)

    def joined(t: Tensor) -> Tensor:
        return t.transpose(-1, -2).reshape(*t.shape[:-2], n)[..., :kept]
    return Parts(joined(second.real), joined(second.imag))


def real_inverse(z: Parts, n: int) -> Tensor:
    """The inverse of a half transform, times n: the n real numbers whose transform begins with the n//2 + 1 numbers `z`."""
    m = n // 2 + 1
    mirrored = np.arange(m) > 0
    if n % 2 == 0:
        mirrored[-1] = False
    if n <= DIRECT:
        roots = _roots(m, n, n, True) * (1 + mirrored)[:, None]
        cosine, sine = (Tensor(part.astype(z.real.dtype.name)) for part in (roots.real, roots.imag))
        return z.real.matmul(cosine).sub(z.imag.matmul(sine))
    others = n - m      # the rest of the transform consists of the conjugates of numbers 1 … others, in reverse order
    imag = z.imag.mul(Tensor(mirrored.astype(z.imag.dtype.name)))
    real, imag = (Tensor.cat([t, t[..., 1:1 + others].flip(-1).mul(sign)], -1) for t, sign in ((z.real, 1), (imag, -1)))
    return transform(real, imag, inverse=True).real


# -- as torch.fft has them ----------------------------------------------------------------------------

def _numbers(a: Array) -> Array:
    return np.asarray(a[..., 0] + 1j * a[..., 1])


def _run(a: Array, transform: str, n: int, dim: int, from_pairs: bool, to_pairs: bool) -> Array:
    given = _numbers(a) if from_pairs else a
    result = getattr(np.fft, transform)(given, n, dim)
    pairs = np.stack([result.real, result.imag], -1) if to_pairs else result
    return np.ascontiguousarray(pairs, a.dtype)


def _fitted(t: Tensor, n: int) -> Tensor:
    """Cut the last axis to n positions, or pad it with zeros."""
    have = t.shape[-1]
    return t[..., :n] if have >= n else t.pad([(0, 0)] * (t.ndim - 1) + [(0, n - have)])


def _by_products(name: str, t: Tensor, n: int, dim: int, from_pairs: bool, to_pairs: bool) -> Tensor:
    given = [t[..., 0], t[..., 1]] if from_pairs else [t]
    real, *imag = [_fitted(part.movedim(dim, -1), n // 2 + 1 if name == "irfft" else n) for part in given]
    if name == "irfft":
        return real_inverse(Parts(real, imag[0]), n).mul(1 / n).movedim(-1, dim)
    made = transform(real, imag[0] if imag else None, name == "ifft", name == "rfft").moved(-1, dim)
    pairs: Tensor = Tensor.stack([made.real, made.imag], -1)
    return pairs.mul(1 / n) if name == "ifft" else pairs


def _transform(name: str, a: Any, n: int | None, dim: int, from_pairs: bool, to_pairs: bool, host: bool = False) -> Tensor:
    """Compute the transform `name` of `n` positions, by products if the length allows it, else by NumPy. For a transform to or from real
    numbers, the complex side has n//2 + 1 numbers."""
    t = as_float(name, a)
    shape = list(t.shape[:-1] if from_pairs else t.shape)
    if (from_pairs and (not t.ndim or t.shape[-1] != 2)) or not shape:
        raise ShapeError(f"{name} of {t.shape}: {'complex numbers are pairs in a last axis of two' if from_pairs else 'it needs an axis'}")
    if not -len(shape) <= dim < len(shape):
        raise ShapeError(f"{name} of {t.shape} along {dim}: there are {len(shape)} axes, the pairs not counted")
    dim %= len(shape)
    length = n if n is not None else 2 * (shape[dim] - 1) if name == "irfft" else shape[dim]
    if length < 1:
        raise ShapeError(f"{name} of {t.shape} along {dim}: {length} positions; give n, at least 1")
    if has_products(length) and not host:
        return _by_products(name, t, length, dim, from_pairs, to_pairs)
    shape[dim] = length // 2 + 1 if name == "rfft" else length
    return on_host(_run, t, shape=(*shape, 2) if to_pairs else tuple(shape), dtype=t.dtype.name,
                             transform=name, n=length, dim=dim, from_pairs=from_pairs, to_pairs=to_pairs)


def fft(a: Any, n: int | None = None, dim: int = -1) -> Tensor:
    """The transform of complex numbers (…, 2) along `dim`, cut or padded with zeros to `n` positions. Raises ShapeError."""
    return _transform("fft", a, n, dim, True, True)


def ifft(a: Any, n: int | None = None, dim: int = -1, *, host: bool = False) -> Tensor:
    """The inverse of `fft`. `host`: NumPy computes it for every length, with NumPy's rounding. Raises ShapeError."""
    return _transform("ifft", a, n, dim, True, True, host)


def rfft(a: Any, n: int | None = None, dim: int = -1) -> Tensor:
    """The transform of real numbers: its first n//2 + 1 complex numbers (…, 2); the rest are their conjugates. Raises ShapeError."""
    return _transform("rfft", a, n, dim, False, True)


def irfft(a: Any, n: int | None = None, dim: int = -1) -> Tensor:
    """The inverse of `rfft`: `n` real numbers from m complex ones, by default 2·(m - 1). Raises ShapeError."""
    return _transform("irfft", a, n, dim, True, False)


def __dir__() -> list[str]:
    """The public names, for completion."""
    return sorted(__all__)
