"""Activation functions and gates of neural networks.

Names and signatures are those of torch.nn.functional.
"""
from __future__ import annotations

import math
from typing import Self

from svod.errors import ShapeError, UnsupportedError
from svod.tensor.operations.elementwise import Operand
from svod.tensor.operations.products import Products
from svod.tensor.precision import is_half, rounds_once


class Activations(Products):
    """Activation functions."""

    __slots__ = ()

    def relu(self) -> Self:
        """The rectifier max(x, 0)."""
        return self.maximum(0)

    def relu6(self) -> Self:
        """The clipped rectifier min(max(x, 0), 6)."""
        return self.clamp(0, 6)

    @rounds_once
    def leaky_relu(self, negative_slope: float = 0.01) -> Self:
        """Leaky ReLU: x for x > 0, otherwise negative_slope · x."""
        x = self._float()
        return x.where(x.gt(0), x.mul(negative_slope))

    @rounds_once
    def elu(self, alpha: float = 1.0) -> Self:
        """ELU: x for x > 0, otherwise alpha · (exp(x) - 1)."""
        x = self._float()
        return x.where(x.gt(0), x.expm1().mul(alpha))

    @rounds_once
    def sigmoid(self) -> Self:
        """The logistic function 1 / (1 + exp(-x))."""
        return self._float().neg().exp().add(1).reciprocal()

    @rounds_once
    def logsigmoid(self) -> Self:
        """The logarithm of the sigmoid, computed as min(x, 0) - log1p(exp(-|x|))."""
        x = self._float()
        return x.minimum(0).sub(x.abs().neg().exp().log1p())

    @rounds_once
    def silu(self) -> Self:
        """SiLU: x · sigmoid(x), computed as x / (1 + exp(-x))."""
        x = self._float()
        return x.div(x.neg().exp().add(1))

    def gelu(self, approximate: str = "none") -> Self:
        """GELU: x · Φ(x) with the error function ('none') or its tanh approximation ('tanh'; Hendrycks and Gimpel, 2016). 16-bit results
        are accurate even if Φ(x) is small; float32 results lose accuracy there, as in other libraries, because of cancellation in 1 +
        erf(x)."""
        if approximate not in ("none", "tanh"):
            raise UnsupportedError(f"gelu with approximate={approximate!r}: use 'none' or 'tanh'")
        return self._gelu_without_cancelling(approximate) if is_half(self.dtype) else self._gelu(approximate)

    def _gelu(self, approximate: str) -> Self:
        x = self._float()
        if approximate == "none":
            bell = x.mul(math.sqrt(0.5)).erf()
        else:
            bell = x.mul(x.mul(x).mul(0.044715).add(1)).mul(math.sqrt(2 / math.pi)).tanh()
        return x.mul(0.5).mul(bell.add(1))

    @rounds_once
    def _gelu_without_cancelling(self, approximate: str) -> Self:
        if approximate == "none":
            return self.mul(0.5).mul(self.mul(-math.sqrt(0.5)).erfc())
        y = self.mul(self).mul(0.044715).add(1).mul(self)
        return self.div(y.mul(-2 * math.sqrt(2 / math.pi)).exp().add(1))        # (1 + tanh(y)) / 2 = 1 / (1 + exp(-2y))

    @rounds_once
    def softplus(self, beta: float = 1.0, threshold: float = 20.0) -> Self:
        """Softplus: log(1 + exp(beta · x)) / beta, or x if beta · x is above the threshold."""
        x = self._float()
        scaled = x.mul(beta)
        # max(s, 0) + log1p(exp(-|s|)) does not overflow
        smooth = scaled.maximum(0).add(scaled.abs().neg().exp().log1p()).div(beta)
        return x.where(scaled.gt(threshold), smooth)

    @rounds_once
    def hardsigmoid(self) -> Self:
        """The piecewise linear sigmoid min(max(x + 3, 0), 6) / 6."""
        return self._float().add(3).clamp(0, 6).div(6)

    @rounds_once
    def hardswish(self) -> Self:
        """The piecewise approximation of SiLU, x · hardsigmoid(x)."""
        x = self._float()
        return x.mul(x.add(3).clamp(0, 6)).div(6)

    def hardtanh(self, min_val: float = -1.0, max_val: float = 1.0) -> Self:
        """Clamp x to min_val … max_val."""
        return self.clamp(min_val, max_val)

    @rounds_once
    def mish(self) -> Self:
        """Mish: x · tanh(softplus(x))."""
        x = self._float()
        return x.mul(x.softplus().tanh())

    @rounds_once
    def selu(self) -> Self:
        """SELU: scale · elu(x, alpha) with the constants of Klambauer et al., 2017."""
        return self._float().elu(1.6732632423543772).mul(1.0507009873554805)

    @rounds_once
    def celu(self, alpha: float = 1.0) -> Self:
        """CELU: x for x > 0, otherwise alpha · (exp(x / alpha) - 1)."""
        x = self._float()
        return x.where(x.gt(0), x.div(alpha).expm1().mul(alpha))

    def prelu(self, weight: Operand) -> Self:
        """PReLU: x for x > 0, otherwise weight · x. `weight` is one number, or one per channel (axis 1)."""
        w = self._as_tensor(weight)
        if w.numel() != 1:
            if self.ndim < 2 or w.shape != (self.shape[1],):
                raise ShapeError(f"prelu of {self.shape} with weights of {w.shape}: one weight, or one for each channel (axis 1)")
            w = w.reshape(-1, *(1,) * (self.ndim - 2))
        return self.where(self.gt(0), self.mul(w.reshape(()) if w.numel() == 1 else w))

    @rounds_once
    def threshold(self, threshold: float, value: float) -> Self:
        """Return x if it is above the threshold, otherwise `value`."""
        return self.where(self.le(threshold).logical_not(), value)

    def hardshrink(self, lambd: float = 0.5) -> Self:
        """Return x if |x| > lambd, otherwise 0."""
        return self.where(self.abs().le(lambd).logical_not(), 0)

    @rounds_once
    def softshrink(self, lambd: float = 0.5) -> Self:
        """Move x toward 0 by lambd; 0 if |x| <= lambd."""
        x = self._float()
        return x.sub(lambd).where(x.gt(lambd), x.add(lambd).where(x.lt(-lambd), x.mul(0)))

    @rounds_once
    def tanhshrink(self) -> Self:
        """The difference x - tanh(x)."""
        x = self._float()
        return x.sub(x.tanh())

    @rounds_once
    def softsign(self) -> Self:
        """Softsign: x / (1 + |x|)."""
        x = self._float()
        return x.div(x.abs().add(1))

    @rounds_once
    def glu(self, dim: int = -1) -> Self:
        """A gated linear unit: the first half of an axis times the sigmoid of the second half."""
        a, b = self._halves("glu", dim)
        return a.mul(b.sigmoid())

    @rounds_once
    def swiglu(self, dim: int = -1) -> Self:
        """SwiGLU: silu of the first half of an axis times the second half (Shazeer, 2020)."""
        a, b = self._halves("swiglu", dim)
        return a.silu().mul(b)

    def _halves(self, name: str, dim: int) -> tuple[Self, Self]:
        at = self._axis(name, dim)
        if self.shape[at] % 2:
            raise ShapeError(f"{name} of {self.shape} along axis {dim}: its extent must be even")
        x, half = self._float(), self.shape[at] // 2
        return x.narrow(at, 0, half), x.narrow(at, half, half)

    def dropout(self, p: float = 0.5, training: bool = False) -> Self:
        """The identity, because svod runs models only. Raises UnsupportedError for training."""
        if training:
            raise UnsupportedError(f"dropout with p={p} and training=True: svod runs models, it does not train them")
        return self
