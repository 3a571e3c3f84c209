"""Fourier transforms with the names of torch.fft, by NumPy on the host. svod has no complex numbers: they are pairs (real, imaginary) in a
last axis of two, as `torch.view_as_real` gives them. `dim` counts the axes without it.

    spectrum = svod.fft.rfft(x)             # x (8, 100) → (8, 51, 2)
    svod.fft.irfft(spectrum, 100)           # back to (8, 100)
"""
from __future__ import annotations

from typing import Any

import numpy as np

from svod.errors import ShapeError
from svod.tensor.base import Array
from svod.tensor.host import as_float, on_host
from svod.tensor.tensor import Tensor


def _pairs(z: Array, dtype: Any) -> Array:
    return np.stack([z.real, z.imag], -1).astype(dtype, copy=False)


def _numbers(a: Array) -> Array:
    return np.asarray(a[..., 0] + 1j * a[..., 1])


def _run(a: Array, transform: str, n: int, dim: int, from_pairs: bool, to_pairs: bool) -> Array:
    given = _numbers(a) if from_pairs else a
    result = getattr(np.fft, transform)(given, n, dim)
    return _pairs(result, a.dtype) if to_pairs else np.ascontiguousarray(result, a.dtype)


def _transform(name: str, a: Any, n: int | None, dim: int, from_pairs: bool, to_pairs: bool) -> Tensor:
    """Lengths: `n` positions before and after, but n//2 + 1 numbers where one side is real."""
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
    shape[dim] = length // 2 + 1 if name == "rfft" else length
    result: Tensor = on_host(_run, t, shape=(*shape, 2) if to_pairs else tuple(shape), dtype=t.dtype.name,
                             transform=name, n=length, dim=dim, from_pairs=from_pairs, to_pairs=to_pairs)
    return result


def fft(a: Any, n: int | None = None, dim: int = -1) -> Tensor:
    """The transform of complex numbers (…, 2), of which `n` are used or zeros added. Runs on the host."""
    return _transform("fft", a, n, dim, True, True)


def ifft(a: Any, n: int | None = None, dim: int = -1) -> Tensor:
    """The inverse of `fft`. Runs on the host."""
    return _transform("ifft", a, n, dim, True, True)


def rfft(a: Any, n: int | None = None, dim: int = -1) -> Tensor:
    """The transform of real numbers: n//2 + 1 complex ones (…, 2), as the others mirror them. Runs on the host."""
    return _transform("rfft", a, n, dim, False, True)


def irfft(a: Any, n: int | None = None, dim: int = -1) -> Tensor:
    """The inverse of `rfft`: `n` real numbers, by default 2·(m - 1) of m complex ones. Runs on the host."""
    return _transform("irfft", a, n, dim, True, False)
