"""Complex numbers as pairs of svod tensors, and operations on them: Fourier transforms, products and sums, views.

All other operations on them run in PyTorch, on complex tensors made from the pairs.
"""
from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from operator import attrgetter
from typing import Any, TypeVar

import torch

from svod.core.ir.dtype import dtypes
from svod.errors import UnsupportedError
from svod.tensor import Tensor, fft, where
from svod.torch.fallback import Foreign
from svod.torch.operations import views

F = TypeVar("F", bound=Callable[..., Any])
COMPLEX: dict[str, Callable[..., Any]] = {}     # key: name of the overload; operations that read or make complex numbers


class Complex(Foreign):
    """Complex numbers as a real and an imaginary tensor."""

    def __init__(self, real: Tensor, imag: Tensor) -> None:
        dtype = {dtypes.float32: torch.complex64, dtypes.float64: torch.complex128}.get(real.dtype)
        if dtype is None:
            raise UnsupportedError(f"complex numbers of {real.dtype.name}")
        super().__init__([real, imag], torch.complex, torch.empty(real.shape, dtype=dtype, device="meta"))
        self.real, self.imag = real, imag

    @property
    def shape(self) -> tuple[Any, ...]:
        """The shape, with the sizes that vary as Dims."""
        return self.real.shape

    def numel(self) -> Any:
        """The number of complex numbers."""
        return self.real.numel()


def on_complex(*names: str) -> Callable[[F], F]:
    """Register a function for overloads that read or make complex numbers."""
    def put(function: F) -> F:
        for name in names:
            COMPLEX[f"aten.{name}"] = function
        return function
    return put


def _both(function: Callable[..., Any]) -> Callable[..., Complex]:
    """Apply a function of a tensor to both the real and the imaginary parts."""
    return lambda z, *args, **kwargs: Complex(function(z.real, *args, **kwargs), function(z.imag, *args, **kwargs))


for _name, _function in (("transpose.int", Tensor.transpose), ("permute.default", Tensor.permute), ("unsqueeze.default", Tensor.unsqueeze),
                         ("squeeze.dim", views.squeeze), ("squeeze.dims", views.squeeze), ("select.int", views.select),
                         ("slice.Tensor", views.slice_), ("expand.default", views.expand), ("neg.default", Tensor.neg)):
    COMPLEX[f"aten.{_name}"] = _both(_function)


@on_complex("view.default", "_unsafe_view.default", "reshape.default")
def view(z: Complex, size: Sequence[int]) -> Complex:
    """Change the shape of z."""
    return Complex(z.real.reshape(*size), z.imag.reshape(*size))


@on_complex("clone.default", "alias.default", "detach.default", "_to_copy.default", "resolve_conj.default", "resolve_neg.default")
def same(z: Tensor | Complex, dtype: Any = None) -> Complex:
    """Return z unchanged; real numbers become complex."""
    return z if isinstance(z, Complex) else Complex(z, Tensor.zeros(z.shape, dtype=z.dtype))


@on_complex("polar.default")
def polar(magnitude: Tensor, angle: Tensor) -> Complex:
    """Complex numbers from polar coordinates: magnitude · exp(i·angle)."""
    return Complex(magnitude.mul(angle.cos()), magnitude.mul(angle.sin()))


def _parts(value: Any) -> tuple[Any, Any]:
    """The real and the imaginary part of an operand."""
    if isinstance(value, Complex):
        return value.real, value.imag
    return (value.real, value.imag) if isinstance(value, complex) else (value, 0.0)


def _tensor(part: Any, like: Tensor) -> Tensor:
    return part if isinstance(part, Tensor) else Tensor.full(like.shape, part, dtype=like.dtype)


@on_complex("mul.Tensor")
def mul(x: Any, y: Any) -> Complex:
    """The product of two operands; a real one scales both parts of the other."""
    z, w = (x, y) if isinstance(x, Complex) else (y, x)
    real, imag = _parts(w)
    if not isinstance(w, (Complex, complex)):
        return Complex(z.real.mul(real), z.imag.mul(real))
    return Complex(z.real.mul(real).sub(z.imag.mul(imag)), z.real.mul(imag).add(z.imag.mul(real)))


@on_complex("add.Tensor")
def add(x: Any, y: Any, *, alpha: float = 1) -> Complex:
    """The sum x + alpha · y."""
    (a, b), (c, d) = _parts(x), _parts(y)
    like = next(v.real for v in (x, y) if isinstance(v, Complex))
    scaled = [part if alpha == 1 else part * alpha for part in (c, d)]
    return Complex(_tensor(a, like).add(scaled[0]), _tensor(b, like).add(scaled[1]))


@on_complex("sub.Tensor")
def sub(x: Any, y: Any, *, alpha: float = 1) -> Complex:
    """The difference x - alpha · y."""
    return add(x, y, alpha=-alpha)


@on_complex("abs.default")
def magnitude(z: Complex) -> Tensor:
    """The magnitude √(real² + imag²). Both parts are divided by the larger one first, because squares may overflow or underflow."""
    larger = z.real.abs().maximum(z.imag.abs())
    scale = where(larger.eq(0).logical_or(larger.isinf()), 1.0, larger)
    return z.real.div(scale).square().add(z.imag.div(scale).square()).sqrt().mul(larger)


on_complex("_conj.default", "_conj_physical.default", "conj_physical.default")(lambda z: Complex(z.real, z.imag.neg()))
on_complex("complex.default")(Complex)
on_complex("real.default")(attrgetter("real"))
on_complex("imag.default")(attrgetter("imag"))


@on_complex("view_as_real.default", "view_as_real_copy.default")
def pairs(z: Complex) -> Tensor:
    """The real and imaginary parts in a last axis of extent 2."""
    return Tensor.stack([z.real, z.imag], -1)


@on_complex("view_as_complex.default", "view_as_complex_copy.default")
def of_pairs(x: Tensor) -> Complex:
    """Complex numbers from a tensor with both parts in its last axis."""
    return Complex(views.select(x, -1, 0), views.select(x, -1, 1))


# -- Fourier transforms ------------------------------------------------------------------------------

def _scale(shape: Sequence[int], dims: Sequence[int], normalization: int) -> float:
    """The factor of a normalised transform over axes of n positions in all: 1 for mode 0, 1/√n for 1, 1/n for 2."""
    count = math.prod(shape[d] for d in dims)
    return 1.0 if normalization == 0 else count ** (-0.5 if normalization == 1 else -1.0)


def _along(x: Tensor, imag: Tensor | None, dim: int, inverse: bool, half: bool = False) -> Complex:
    """An unscaled Fourier transform along an axis. Raises UnsupportedError for lengths with a large prime factor."""
    if not fft.has_products(x.shape[dim]):
        raise UnsupportedError(f"a Fourier transform of {x.shape[dim]} positions, which has a large prime factor")
    moved = [None if part is None else part.movedim(dim, -1) for part in (x, imag)]
    assert moved[0] is not None
    return Complex(*fft.transform(moved[0], moved[1], inverse, half).moved(-1, dim))


def _scaled(z: Complex, factor: float) -> Complex:
    return z if factor == 1.0 else Complex(z.real.mul(factor), z.imag.mul(factor))


@on_complex("_fft_r2c.default")
def real_to_complex(x: Tensor, dim: Sequence[int], normalization: int, onesided: bool) -> Complex:
    """The transform of real numbers over the axes `dim`. The last of them is transformed first; with `onesided` only half of it is kept."""
    *others, last = dim
    z = _along(x, None, last, False, onesided)
    for d in others:
        z = _along(z.real, z.imag, d, False)
    return _scaled(z, _scale(x.shape, dim, normalization))


@on_complex("_fft_c2c.default")
def complex_to_complex(z: Complex, dim: Sequence[int], normalization: int, forward: bool) -> Complex:
    factor = _scale(z.real.shape, dim, normalization)
    for d in dim:
        z = _along(z.real, z.imag, d, not forward)
    return _scaled(z, factor)


@on_complex("_fft_c2r.default")
def complex_to_real(z: Complex, dim: Sequence[int], normalization: int, last_dim_size: int) -> Tensor:
    """The inverse of `real_to_complex`, with `last_dim_size` positions along the last axis."""
    *others, last = dim
    if not fft.has_products(last_dim_size):
        raise UnsupportedError(f"a Fourier transform of {last_dim_size} positions, which has a large prime factor")
    for d in others:
        z = _along(z.real, z.imag, d, True)
    half = fft.Parts(z.real, z.imag).moved(last, -1)
    made = fft.real_inverse(half, last_dim_size).movedim(-1, last)
    factor = _scale(made.shape, dim, normalization)
    return made if factor == 1.0 else made.mul(factor)
