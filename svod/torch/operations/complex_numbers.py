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


def _like(*operands: Any) -> Tensor:
    """The tensor in the operands, or the real part of the complex one."""
    found = next(v for v in operands if isinstance(v, (Complex, Tensor)))
    return found.real if isinstance(found, Complex) else found


def _is_complex(value: Any) -> bool:
    return isinstance(value, (Complex, complex))


@on_complex("mul.Tensor", "mul.Scalar")
def mul(x: Any, y: Any) -> Complex:
    """The product of two operands; a real one scales both parts of the other."""
    z, w = (x, y) if _is_complex(x) else (y, x)
    (a, b), (c, d), like = _parts(z), _parts(w), _like(x, y)
    if not _is_complex(w):
        return Complex(_tensor(a * c, like), _tensor(b * c, like))
    return Complex(_tensor(a * c - b * d, like), _tensor(a * d + b * c, like))


@on_complex("div.Tensor", "div.Scalar")
def div(x: Any, y: Any) -> Complex:
    """The quotient of two operands; a real one divides both parts of the other. Of a complex divisor c + di the larger part is divided by,
    as squares may overflow or underflow (R. L. Smith, "Algorithm 116: Complex division", CACM 5(8), 1962)."""
    (a, b), (c, d), like = _parts(x), _parts(y), _like(x, y)
    if not _is_complex(y):
        return Complex(_tensor(a, like).div(c), _tensor(b, like).div(c))
    (a, b), (c, d) = ([_tensor(part, like) for part in parts] for parts in ((a, b), (c, d)))
    larger = c.abs().ge(d.abs())
    first, second = where(larger, c, d), where(larger, d, c)
    ratio = where(first.eq(0), 0.0, second.div(first))
    least = first.add(second.mul(ratio))
    return Complex(where(larger, a.add(b.mul(ratio)), a.mul(ratio).add(b)).div(least),
                   where(larger, b.sub(a.mul(ratio)), b.mul(ratio).sub(a)).div(least))


@on_complex("reciprocal.default")
def reciprocal(z: Complex) -> Complex:
    """The quotient 1 / z."""
    return div(1.0, z)


@on_complex("add.Tensor", "add.Scalar")
def add(x: Any, y: Any, alpha: complex = 1) -> Complex:
    """The sum x + alpha · y."""
    if alpha != 1:
        y = mul(y, alpha) if isinstance(y, Complex) or (isinstance(y, Tensor) and isinstance(alpha, complex)) else y * alpha
    (a, b), (c, d), like = _parts(x), _parts(y), _like(x, y)
    real, imag = _tensor(a, like).add(c), _tensor(b, like).add(d)
    return Complex(real, imag.expand(*real.shape))      # the imaginary part of a real operand is a number


@on_complex("sub.Tensor", "sub.Scalar")
def sub(x: Any, y: Any, alpha: complex = 1) -> Complex:
    """The difference x - alpha · y."""
    return add(x, y, -alpha)


@on_complex("rsub.Tensor", "rsub.Scalar")
def rsub(x: Any, y: Any, alpha: complex = 1) -> Complex:
    """The difference y - alpha · x."""
    return add(y, x, -alpha)


MOST_POWER = 64     # largest integer exponent whose power is made of products


@on_complex("pow.Tensor_Scalar")
def power(z: Complex, exponent: complex) -> Complex:
    """The power of an integer exponent, by products. Raises UnsupportedError for other exponents."""
    real, imag = _parts(exponent)
    if imag or not float(real).is_integer() or abs(real) > MOST_POWER:
        raise UnsupportedError(f"a complex number to the power of {exponent}")
    n, square, made = abs(int(real)), z, None
    while n:
        if n & 1:
            made = square if made is None else mul(made, square)
        n >>= 1
        square = mul(square, square) if n else square
    if made is None:
        return Complex(Tensor.ones(z.shape, dtype=z.real.dtype), Tensor.zeros(z.shape, dtype=z.real.dtype))
    return made if real > 0 else reciprocal(made)


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
    if not fft.has_transform(x.shape[dim]):
        raise UnsupportedError(f"a Fourier transform of {x.shape[dim]} positions, which has a large prime factor")
    return Complex(*fft.along(x, imag, dim, inverse, half))


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
    if not fft.has_transform(last_dim_size):
        raise UnsupportedError(f"a Fourier transform of {last_dim_size} positions, which has a large prime factor")
    for d in others:
        z = _along(z.real, z.imag, d, True)
    made = fft.real_inverse(fft.Parts(z.real, z.imag), last_dim_size, last)
    factor = _scale(made.shape, dim, normalization)
    return made if factor == 1.0 else made.mul(factor)
