"""Fourier transforms with the names of torch.fft. svod has no complex dtype: complex numbers are pairs (real, imaginary) in an additional
last axis of two, as in `torch.view_as_real`. `dim` counts the axes without this one.

    spectrum = svod.fft.rfft(x)             # x (8, 100) → (8, 51, 2)
    svod.fft.irfft(spectrum, 100)           # back to (8, 100)

A short transform is a product with a matrix of roots of unity, as is one of up to `DIRECT` positions whose length has large prime
factors. Others are library kernels (`svod.compile.lower.library.fourier`); of more than `MOST_AT_ONCE` positions two, of a and of b
positions, with a rotation of each number between them (Cooley and Tukey, 1965). What is left is computed by NumPy on the host.
"""
from __future__ import annotations

import math
from collections.abc import Sequence
from functools import cache
from typing import Any, NamedTuple

import numpy as np

from svod.core.graph import graph
from svod.core.graph.library_kernel import fourier_table, has_fourier
from svod.core.ir.variable import is_symbolic
from svod.errors import ShapeError
from svod.tensor.base import Array
from svod.tensor.host import as_float, on_host
from svod.tensor.tensor import Tensor

__all__ = ["fft", "fft2", "fftfreq", "fftn", "fftshift", "ifft", "ifft2", "ifftn", "ifftshift", "irfft", "irfft2", "irfftn", "rfft",
           "rfft2", "rfftfreq", "rfftn"]
DIRECT = 512                # positions up to which a product with a matrix takes the place of a library kernel that there is not
DIRECT_ROW, DIRECT_COLUMN = 96, 16      # positions up to which the product is faster, along the last axis and along others
MOST_AT_ONCE = 1 << 15      # positions of one library kernel, whose scratch memory the second cache holds


class Parts(NamedTuple):
    """Complex numbers as two tensors, their real and their imaginary parts."""

    real: Tensor
    imag: Tensor

    def moved(self, source: int, destination: int) -> Parts:
        """Move axis `source` to `destination` in both parts."""
        return Parts(self.real.movedim(source, destination), self.imag.movedim(source, destination))


# -- complex numbers, not scaled -----------------------------------------------------------------------

def has_transform(n: int) -> bool:
    """Whether svod computes a transform of n positions, not NumPy on the host."""
    return _parts_of(n) is not None


def _is_step(n: int) -> bool:
    """Whether one library kernel, or one matrix product, transforms n positions."""
    return n <= DIRECT or (n <= MOST_AT_ONCE and has_fourier(n))


@cache
def _parts_of(n: int) -> tuple[int, ...] | None:
    """The lengths of the steps that transform n positions together: n itself, or two factors. None if there are none."""
    if _is_step(n):
        return (n,)
    return next(((a, n // a) for a in range(math.isqrt(n), 1, -1) if n % a == 0 and _is_step(a) and _is_step(n // a)), None)


def _roots(rows: int, columns: int, n: int, inverse: bool) -> Array:
    """Roots of unity exp(∓2πi·jk/n) for j < rows and k < columns, as a complex matrix."""
    turns = np.outer(np.arange(rows), np.arange(columns)) % n
    return np.asarray(np.exp((2j if inverse else -2j) * np.pi / n * turns))


@cache
def _matrix(n: int, columns: int, inverse: bool, dtype: str) -> Array:
    """The real parts of the roots, followed by their imaginary parts in further columns: (n, 2·columns)."""
    roots = _roots(n, columns, n, inverse)
    return np.concatenate([roots.real, roots.imag], 1).astype(dtype)


def _product(x: Tensor, imag: Tensor | None, columns: int, inverse: bool) -> Parts:
    """The first `columns` numbers of a transform along the last axis: one matrix product for real numbers, two for complex ones."""
    matrix = _matrix(x.shape[-1], columns, inverse, x.dtype.name)
    made = x.matmul(Tensor(matrix))
    if imag is not None:
        turned = np.concatenate([-matrix[:, columns:], matrix[:, :columns]], 1)
        made = made.add(imag.matmul(Tensor(turned)))
    return Parts(made[..., :columns], made[..., columns:])


def _step(parts: Sequence[Tensor], inverse: bool, pairs_out: bool = False) -> Tensor:
    """One library kernel, or one product, along axis 1: of pairs (o, n, k, 2), or of both parts (o, n, k). Returns pairs, or both parts
    (2, o, n, k)."""
    x = parts[0]
    if not has_fourier(x.shape[1]):
        real, imag = (x[..., 0], x[..., 1]) if x.ndim == 4 else parts
        made = _product(real.transpose(1, 2), imag.transpose(1, 2), x.shape[1], inverse).moved(-1, 1)
        return Tensor.stack([*made], -1 if pairs_out else 0)
    table = Tensor(fourier_table(x.shape[1], inverse).astype(x.dtype.name))
    operands = [t.contiguous().uop for t in (*parts, table)]
    return Tensor.from_uop(graph.library_kernel("FOURIER", (inverse, x.ndim == 4, pairs_out), x.dtype, *operands))


def _transformed(parts: Sequence[Tensor], inverse: bool, pairs_out: bool = False) -> Tensor:
    """As `_step`, for longer axes too: a·b positions are transforms of a positions, turned, and transforms of b positions."""
    outer, n, inner = parts[0].shape[:3]
    lengths = _parts_of(n)
    assert lengths is not None
    if len(lengths) == 1:
        return _step(parts, inverse, pairs_out)
    a, b = lengths
    first = _step([t.reshape(outer, a, b * inner, *t.shape[3:]) for t in parts], inverse).reshape(2, outer, a, b, inner)
    roots = _roots(a, b, n, inverse)[:, :, None]
    cosine, sine = (Tensor(part.astype(first.dtype.name)) for part in (roots.real, roots.imag))
    real, imag = first[0], first[1]
    if inner == 1 and has_fourier(b):
        table = Tensor(fourier_table(b, inverse).astype(first.dtype.name))
        factors = [part.reshape(a, b) for part in (cosine, sine)]
        operands = [t.contiguous().uop for t in (real.reshape(outer, a, b), imag.reshape(outer, a, b), table, *factors)]
        made = Tensor.from_uop(graph.library_kernel("TURNED_FOURIER", (inverse, pairs_out), first.dtype, *operands))
        return made.reshape(outer, n, 1, 2) if pairs_out else made.reshape(2, outer, n, 1)
    turned = real.mul(cosine).sub(imag.mul(sine)), real.mul(sine).add(imag.mul(cosine))
    second = _step([t.reshape(outer * a, b, inner) for t in turned], inverse).reshape(2, outer, a, b, inner)
    made = second.transpose(2, 3).reshape(2, outer, n, inner)       # number k + a·l is result l of transform k
    return made.movedim(0, -1) if pairs_out else made


def _is_by_kernel(x: Tensor, n: int, dim: int) -> bool:
    """Whether a library kernel transforms axis `dim` of x, to n positions: if it is long enough for vectors, and no size is symbolic."""
    if is_symbolic(x.shape) or 0 in x.shape:
        return False
    return n > DIRECT or (has_fourier(n) and n > (DIRECT_ROW if dim == x.ndim - 1 else DIRECT_COLUMN))


def along(x: Tensor, imag: Tensor | None, dim: int, inverse: bool = False, half: bool = False) -> Parts:
    """The unscaled transform of real (`imag` None) or complex numbers along `dim`; `half`: its first n//2 + 1 numbers only."""
    dim %= x.ndim
    n = x.shape[dim]
    kept = n // 2 + 1 if half else n
    if not _is_by_kernel(x, n, dim):
        moved = [None if part is None else part.movedim(dim, -1) for part in (x, imag)]
        assert moved[0] is not None
        return _product(moved[0], moved[1], kept, inverse).moved(-1, dim)
    box = math.prod(x.shape[:dim]), n, math.prod(x.shape[dim + 1:])
    if imag is None and n % 2 == 0 and half and box[2] == 1:
        both = _half_of_rows(x.reshape(box[:2]), inverse)
        made = Parts(both[0].unsqueeze(-1), both[1].unsqueeze(-1))
    elif imag is None and n % 2 == 0:
        made = _of_real(x.reshape(box), inverse, half)
    else:
        both = _transformed([x.reshape(box), (Tensor.zeros(x.shape, dtype=x.dtype) if imag is None else imag).reshape(box)], inverse)
        made = Parts(both[0], both[1])
    shape = (*x.shape[:dim], kept, *x.shape[dim + 1:])
    return Parts(*[part[:, :kept].reshape(shape) for part in made])


# -- real numbers --------------------------------------------------------------------------------------
# 2·h real numbers are transformed as h complex ones, of which each has two neighbours as its parts.

def _half_of_rows(x: Tensor, inverse: bool, pairs_out: bool = False) -> Tensor:
    """The first n/2 + 1 numbers of the unscaled transforms of real rows (o, n), for even n: (o, n/2 + 1, 2), or both parts (2, o, …)."""
    outer, n = x.shape
    z = _transformed([x.reshape(outer, n // 2, 1, 2)], inverse).reshape(2, outer, n // 2)
    roots = _roots(n // 2 + 1, 2, n, inverse)[:, 1]
    turns = [Tensor(part.astype(x.dtype.name)).uop for part in (roots.real, roots.imag)]
    return Tensor.from_uop(graph.library_kernel("UNPAIRED", (pairs_out,), x.dtype, z[0].uop, z[1].uop, *turns))


def _of_real(x: Tensor, inverse: bool, half: bool) -> Parts:
    """The unscaled transform of real numbers (o, n, k) along axis 1, for even n."""
    outer, n, inner = x.shape
    h = n // 2
    z = _transformed([x.reshape(outer, h, 1, 2)] if inner == 1 else [x[:, ::2], x[:, 1::2]], inverse)
    (zr, rr), (zi, ri) = ((Tensor.cat([part, part[:, :1]], 1), Tensor.cat([part[:, :1], part.flip(1)], 1)) for part in (z[0], z[1]))
    roots = _roots(h + 1, 2, n, inverse)[:, 1:]
    cosine, sine = (Tensor((0.5 * part).astype(x.dtype.name)) for part in (roots.real, roots.imag))
    odd_real, odd_imag = zi.add(ri), rr.sub(zr)
    real = zr.add(rr).mul(0.5).add(odd_real.mul(cosine)).sub(odd_imag.mul(sine))
    imag = zi.sub(ri).mul(0.5).add(odd_imag.mul(cosine)).add(odd_real.mul(sine))
    if half:
        return Parts(real, imag)
    return Parts(Tensor.cat([real, real[:, 1:h].flip(1)], 1), Tensor.cat([imag, imag[:, 1:h].flip(1).neg()], 1))


def real_inverse(z: Parts, n: int, dim: int = -1) -> Tensor:
    """The inverse of a half transform along `dim`, times n: the n real numbers whose transform begins with the n//2 + 1 numbers `z`."""
    dim %= z.real.ndim
    m = n // 2 + 1
    mirrored = np.arange(m) > 0
    if n % 2 == 0:
        mirrored[-1] = False
    if not _is_by_kernel(z.real, n, dim):
        roots = _roots(m, n, n, True) * (1 + mirrored)[:, None]
        cosine, sine = (Tensor(part.astype(z.real.dtype.name)) for part in (roots.real, roots.imag))
        moved = z.moved(dim, -1)
        return moved.real.matmul(cosine).sub(moved.imag.matmul(sine)).movedim(-1, dim)
    before, after = z.real.shape[:dim], z.real.shape[dim + 1:]
    box = math.prod(before), m, math.prod(after)
    real, imag = z.real.reshape(box), z.imag.reshape(box).mul(Tensor(mirrored.astype(z.real.dtype.name)[:, None]))
    if n % 2 == 0:
        return _to_real(real, imag, n).reshape(*before, n, *after)
    others = n - m      # the rest of the transform consists of the conjugates of numbers 1 … others, in reverse order
    real, imag = (Tensor.cat([t, t[:, 1:1 + others].flip(1).mul(sign)], 1) for t, sign in ((real, 1), (imag, -1)))
    return _transformed([real, imag], True)[0].reshape(*before, n, *after)


def _to_real(real: Tensor, imag: Tensor, n: int) -> Tensor:
    """The inverse of `_of_real`, times n, of its first n/2 + 1 numbers (o, n/2 + 1, k)."""
    outer, m, inner = real.shape
    h = m - 1
    (xr, cr), (xi, ci) = ((part[:, :h], part[:, 1:].flip(1)) for part in (real, imag))
    roots = _roots(h, 2, n, True)[:, 1:]
    cosine, sine = (Tensor(part.astype(real.dtype.name)) for part in (roots.real, roots.imag))
    apart_real, apart_imag = xr.sub(cr), xi.add(ci)
    turned_real = apart_real.mul(cosine).sub(apart_imag.mul(sine))
    turned_imag = apart_real.mul(sine).add(apart_imag.mul(cosine))
    parts = [xr.add(cr).sub(turned_imag), xi.sub(ci).add(turned_real)]
    if inner == 1:
        return _transformed(parts, True, pairs_out=True).reshape(outer, n, 1)
    both = _transformed(parts, True)
    return Tensor.stack([both[0], both[1]], 2).reshape(outer, n, inner)


# -- as torch.fft has them ----------------------------------------------------------------------------

def _numbers(a: Array) -> Array:
    return np.asarray(a[..., 0] + 1j * a[..., 1])


def _run(a: Array, transform: str, n: int, dim: int, from_pairs: bool, to_pairs: bool) -> Array:
    given = _numbers(a) if from_pairs else a
    result = getattr(np.fft, transform)(given, n, dim)
    pairs = np.stack([result.real, result.imag], -1) if to_pairs else result
    return np.ascontiguousarray(pairs, a.dtype)


def _fitted(t: Tensor, n: int, dim: int) -> Tensor:
    """Cut axis `dim` to n positions, or pad it with zeros."""
    have = t.shape[dim]
    if have == n:
        return t
    return t.shrink([(0, n if d == dim else size) for d, size in enumerate(t.shape)]) if have > n else \
        t.pad([(0, n - have if d == dim else 0) for d in range(t.ndim)])


def _by_svod(name: str, t: Tensor, n: int, dim: int, from_pairs: bool) -> Tensor:
    t = _fitted(t, n // 2 + 1 if name == "irfft" else n, dim)
    if name == "irfft":
        return real_inverse(Parts(t[..., 0].mul(1 / n), t[..., 1].mul(1 / n)), n, dim)
    real, imag = (t[..., 0], t[..., 1]) if from_pairs else (t, None)
    inverse = name == "ifft"
    if from_pairs and _is_by_kernel(real, n, dim):
        box = math.prod(t.shape[:dim]), n, math.prod(t.shape[dim + 1:-1]), 2
        pairs = _transformed([t.reshape(box)], inverse, pairs_out=True).reshape(t.shape)
    else:
        if name == "rfft" and dim == t.ndim - 1 and n % 2 == 0 and _is_by_kernel(t, n, dim):
            return _half_of_rows(t.reshape(math.prod(t.shape[:-1]), n), False, True).reshape(*t.shape[:-1], n // 2 + 1, 2)
        made = along(real, imag, dim, inverse, name == "rfft")
        pairs = Tensor.stack([made.real, made.imag], -1)
    return pairs.mul(1 / n) if inverse else pairs


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
    if has_transform(length) and not host:
        return _by_svod(name, t, length, dim, from_pairs)
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


# -- along several axes --------------------------------------------------------------------------------

def _axes(name: str, shape: Sequence[int], s: Sequence[int] | None, dim: Sequence[int] | None) -> list[tuple[int, int | None]]:
    """(axis, its length or None) of a transform along several axes. `shape`: without the pairs."""
    if dim is None:
        dim = range(len(shape) - len(s), len(shape)) if s is not None else range(len(shape))
    dims = [d % len(shape) if -len(shape) <= d < len(shape) else -1 for d in dim]
    if -1 in dims or len(set(dims)) < len(dims) or not dims or (s is not None and len(s) != len(dims)):
        raise ShapeError(f"{name} of {tuple(shape)} along {tuple(dim)}{'' if s is None else f' to {tuple(s)}'}: it takes different axes of "
                         f"the {len(shape)}, the pairs not counted, and a length for each or none")
    return list(zip(dims, s if s is not None else [None] * len(dims), strict=True))


def fftn(a: Any, s: Sequence[int] | None = None, dim: Sequence[int] | None = None) -> Tensor:
    """The transform of complex numbers (…, 2) along several axes, by default all, with lengths `s`. Raises ShapeError."""
    t = as_float("fftn", a)
    for d, n in _axes("fftn", t.shape[:-1], s, dim):
        t = fft(t, n, d)
    return t


def ifftn(a: Any, s: Sequence[int] | None = None, dim: Sequence[int] | None = None) -> Tensor:
    """The inverse of `fftn`. Raises ShapeError."""
    t = as_float("ifftn", a)
    for d, n in _axes("ifftn", t.shape[:-1], s, dim):
        t = ifft(t, n, d)
    return t


def rfftn(a: Any, s: Sequence[int] | None = None, dim: Sequence[int] | None = None) -> Tensor:
    """The transform of real numbers along several axes, of which the last keeps its first n//2 + 1 numbers (…, 2). Raises ShapeError."""
    t = as_float("rfftn", a)
    *others, (last, n) = _axes("rfftn", t.shape, s, dim)
    t = rfft(t, n, last)
    for d, n in others:
        t = fft(t, n, d)
    return t


def irfftn(a: Any, s: Sequence[int] | None = None, dim: Sequence[int] | None = None) -> Tensor:
    """The inverse of `rfftn`: the last axis has by default 2·(m - 1) positions. Raises ShapeError."""
    t = as_float("irfftn", a)
    *others, (last, n) = _axes("irfftn", t.shape[:-1], s, dim)
    for d, length in others:
        t = ifft(t, length, d)
    return irfft(t, n, last)


def fft2(a: Any, s: Sequence[int] | None = None, dim: Sequence[int] = (-2, -1)) -> Tensor:
    """`fftn` along the last two axes. Raises ShapeError."""
    return fftn(a, s, dim)


def ifft2(a: Any, s: Sequence[int] | None = None, dim: Sequence[int] = (-2, -1)) -> Tensor:
    """`ifftn` along the last two axes. Raises ShapeError."""
    return ifftn(a, s, dim)


def rfft2(a: Any, s: Sequence[int] | None = None, dim: Sequence[int] = (-2, -1)) -> Tensor:
    """`rfftn` along the last two axes. Raises ShapeError."""
    return rfftn(a, s, dim)


def irfft2(a: Any, s: Sequence[int] | None = None, dim: Sequence[int] = (-2, -1)) -> Tensor:
    """`irfftn` along the last two axes. Raises ShapeError."""
    return irfftn(a, s, dim)


def fftfreq(n: int, d: float = 1.0) -> Tensor:
    """The frequencies of the numbers of a transform of n samples that are `d` apart, in cycles per unit of d, float32."""
    return Tensor(np.fft.fftfreq(n, d).astype(np.float32))


def rfftfreq(n: int, d: float = 1.0) -> Tensor:
    """The frequencies of the numbers of `rfft`, as `fftfreq` has them."""
    return Tensor(np.fft.rfftfreq(n, d).astype(np.float32))


def fftshift(a: Any, dim: Sequence[int]) -> Tensor:
    """Move the number of frequency 0 to the middle of the axes `dim`, which count all axes of a."""
    t = as_float("fftshift", a)
    return t.roll([t.shape[d] // 2 for d in dim], list(dim))


def ifftshift(a: Any, dim: Sequence[int]) -> Tensor:
    """The inverse of `fftshift`."""
    t = as_float("ifftshift", a)
    return t.roll([-(t.shape[d] // 2) for d in dim], list(dim))


def __dir__() -> list[str]:
    """The public names, for completion."""
    return sorted(__all__)
