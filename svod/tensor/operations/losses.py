"""Losses, forward only, and rotary embedding. Names and signatures are those of torch.nn.functional, with the input as self.

`reduction` is 'mean', 'sum' or 'none'.
"""
from __future__ import annotations

import math
from typing import Self

from svod.core.ir.dtype import dtypes
from svod.errors import ShapeError, UnsupportedError
from svod.tensor.operations.elementwise import Operand
from svod.tensor.operations.resample import Resample
from svod.tensor.precision import rounds_to_self


class Losses(Resample):
    """Losses of an output against a target."""

    __slots__ = ()

    def _reduced(self, name: str, reduction: str) -> Self:
        """Reduce the losses of all elements by `reduction`."""
        if reduction not in ("mean", "sum", "none"):
            raise UnsupportedError(f"{name} with reduction={reduction!r}: use 'mean', 'sum' or 'none'")
        return self if reduction == "none" else self.mean() if reduction == "mean" else self.sum()

    def _with_target(self, name: str, target: Operand) -> tuple[Self, Self]:
        y = self._as_tensor(target)
        if y.shape != self.shape:
            raise ShapeError(f"{name} of {self.shape} with a target of {y.shape}: the shapes must agree")
        return self._float(), y._float()

    @rounds_to_self
    def mse_loss(self, target: Operand, reduction: str = "mean") -> Self:
        """The squared error (x - y)²."""
        x, y = self._with_target("mse_loss", target)
        return x.sub(y).square()._reduced("mse_loss", reduction)

    @rounds_to_self
    def l1_loss(self, target: Operand, reduction: str = "mean") -> Self:
        """The absolute error |x - y|."""
        x, y = self._with_target("l1_loss", target)
        return x.sub(y).abs()._reduced("l1_loss", reduction)

    @rounds_to_self
    def huber_loss(self, target: Operand, reduction: str = "mean", delta: float = 1.0) -> Self:
        """Huber loss: d²/2 for d = |x - y| up to delta, delta · (d - delta/2) above."""
        x, y = self._with_target("huber_loss", target)
        d = x.sub(y).abs()
        return d.square().mul(0.5).where(d.le(delta), d.sub(delta / 2).mul(delta))._reduced("huber_loss", reduction)

    @rounds_to_self
    def smooth_l1_loss(self, target: Operand, reduction: str = "mean", beta: float = 1.0) -> Self:
        """Smooth L1 loss: d²/(2·beta) for d = |x - y| below beta, d - beta/2 above."""
        if beta == 0:
            return self.l1_loss(target, reduction)
        x, y = self._with_target("smooth_l1_loss", target)
        d = x.sub(y).abs()
        return d.square().mul(0.5 / beta).where(d.lt(beta), d.sub(beta / 2))._reduced("smooth_l1_loss", reduction)

    @rounds_to_self
    def binary_cross_entropy(self, target: Operand, weight: Operand | None = None, reduction: str = "mean") -> Self:
        """Binary cross entropy -(y·log(x) + (1-y)·log(1-x)) for probabilities x. Logarithms are clamped to at least -100, as in PyTorch."""
        x, y = self._with_target("binary_cross_entropy", target)
        loss = y.mul(x.log().maximum(-100.0)).add(y.neg().add(1).mul(x.neg().log1p().maximum(-100.0))).neg()
        return (loss if weight is None else loss.mul(weight))._reduced("binary_cross_entropy", reduction)

    @rounds_to_self
    def binary_cross_entropy_with_logits(self, target: Operand, weight: Operand | None = None, reduction: str = "mean",
                                         pos_weight: Operand | None = None) -> Self:
        """Binary cross entropy of sigmoid(x), without overflow: (1-y)·x + (1 + (p-1)·y) · softplus(-x) with p = `pos_weight`."""
        x, y = self._with_target("binary_cross_entropy_with_logits", target)
        soft = x.neg().maximum(0).add(x.abs().neg().exp().log1p())
        if pos_weight is not None:
            soft = soft.mul(self._as_tensor(pos_weight)._float().sub(1).mul(y).add(1))
        loss = y.neg().add(1).mul(x).add(soft)
        return (loss if weight is None else loss.mul(weight))._reduced("binary_cross_entropy_with_logits", reduction)

    @rounds_to_self
    def kl_div(self, target: Operand, reduction: str = "mean", log_target: bool = False) -> Self:
        """Kullback-Leibler divergence y · (log y - x) for log-probabilities x; with `log_target`, y is a logarithm, too.
        reduction='batchmean' divides the sum by the first extent."""
        x, y = self._with_target("kl_div", target)
        loss = y.exp().mul(y.sub(x)) if log_target else y.xlogy(y).sub(y.mul(x))
        if reduction == "batchmean":
            return loss.sum().div(float(self.shape[0] if self.shape else 1))
        return loss._reduced("kl_div", reduction)

    @rounds_to_self
    def nll_loss(self, target: Operand, weight: Operand | None = None, ignore_index: int = -100, reduction: str = "mean") -> Self:
        """Negative log-likelihood: -x[n, target[n], …] times the weight of the class, for log-probabilities x (N, C, …) or (C,) and
        class numbers (N, …). The mean divides by the sum of the weights. It is one gather."""
        y = self._as_tensor(target)
        at = 1 if self.ndim > 1 else 0
        expected = self.shape[:at] + self.shape[at + 1:]
        if self.ndim < 1 or y.shape != expected or not y.dtype.is_int:
            raise ShapeError(f"nll_loss of {self.shape} with a target of {y.dtype.name}{list(y.shape)}: the input is (N, C, …), the target "
                             f"integers of shape {expected}")
        counts = y.ne(ignore_index)
        chosen = y.where(counts, 0)
        scale = counts.cast(dtypes.float32)
        if weight is not None:
            scale = scale.mul(self._class_weights("nll_loss", weight, at).take(chosen, 0))
        picked = self._float().gather(at, chosen.unsqueeze(at)).squeeze(at).neg()
        loss = picked.where(counts, 0.0).mul(scale)     # 0 times an infinite loss that is ignored would be NaN
        if reduction == "mean":
            return loss.sum().div(scale.sum())
        return loss._reduced("nll_loss", reduction)

    @rounds_to_self
    def cross_entropy(self, target: Operand, weight: Operand | None = None, ignore_index: int = -100, reduction: str = "mean",
                      label_smoothing: float = 0.0) -> Self:
        """Cross entropy: `nll_loss` of log_softmax over axis 1 for a target of class numbers; -Σ p · log_softmax for probabilities p of
        the input's shape."""
        at = 1 if self.ndim > 1 else 0
        y, logs = self._as_tensor(target), self._float().log_softmax(at)
        classes = self.shape[at]
        if y.dtype.is_float:
            if y.shape != self.shape:
                raise ShapeError(f"cross_entropy of {self.shape} with probabilities of {y.shape}: the shapes must agree")
            p = y._float().mul(1 - label_smoothing).add(label_smoothing / classes) if label_smoothing else y._float()
            loss = p.mul(self._per_class(logs, weight, at)).sum(at).neg()
            if reduction == "mean":
                return loss.sum().div(float(max(1, loss.numel())))
            return loss._reduced("cross_entropy", reduction)
        plain = logs.nll_loss(y, weight, ignore_index, reduction)
        if not label_smoothing:
            return plain
        counts = y.ne(ignore_index)
        smooth = self._per_class(logs, weight, at).sum(at).neg().where(counts, 0.0)
        if reduction == "mean":
            scale = counts.cast(dtypes.float32)
            if weight is not None:
                scale = scale.mul(self._as_tensor(weight)._float().take(y.where(counts, 0), 0))
            smooth = smooth.sum().div(scale.sum())
        elif reduction == "sum":
            smooth = smooth.sum()
        return plain.mul(1 - label_smoothing).add(smooth.mul(label_smoothing / classes))

    def _per_class(self, logs: Self, weight: Operand | None, at: int) -> Self:
        """Multiply `logs` by the weights of the classes along axis `at`."""
        if weight is None:
            return logs
        return logs.mul(self._class_weights("cross_entropy", weight, at).reshape(-1, *(1,) * (self.ndim - at - 1)))

    def _class_weights(self, name: str, weight: Operand, at: int) -> Self:
        w = self._as_tensor(weight)._float()
        if w.shape != (self.shape[at],):
            raise ShapeError(f"{name} of {self.shape} with weights of {w.shape}: give one for each of {self.shape[at]} classes")
        return w

    # -- positions -------------------------------------------------------------------------------
    @rounds_to_self
    def rotary_embedding(self, cos: Operand, sin: Operand, interleaved: bool = False) -> Self:
        """Rotate pairs of features (…, L, E) by angles with the given cosines and sines, (L, E/2) or (…, L, E/2), from `rotary_angles`.
        A pair consists of one feature from each half of E, or of two neighbours with `interleaved` (Su et al., RoFormer, 2021)."""
        half = self.shape[-1] // 2 if self.ndim else 0
        c, s = self._as_tensor(cos)._float(), self._as_tensor(sin)._float()
        if self.ndim < 2 or self.shape[-1] % 2 or c.shape != s.shape or c.ndim < 1 or c.shape[-1] != half:
            raise ShapeError(f"rotary_embedding of {self.shape} with {c.shape} and {s.shape}: the features are (…, L, E) with an even E, "
                             "cosines and sines (…, L, E/2)")
        x = self._float()
        if interleaved:
            pairs = x.unflatten(-1, (half, 2))
            a, b = pairs.narrow(-1, 0, 1).squeeze(-1), pairs.narrow(-1, 1, 1).squeeze(-1)
        else:
            a, b = x.narrow(-1, 0, half), x.narrow(-1, half, half)
        turned = (a.mul(c).sub(b.mul(s)), b.mul(c).add(a.mul(s)))
        joined = self.stack(turned, -1).flatten(-2) if interleaved else self.cat(turned, -1)
        return joined

    @classmethod
    def rotary_angles(cls, length: int, features: int, base: float = 10000.0, start: int = 0) -> tuple[Self, Self]:
        """The (cos, sin) of position · base^(-2i/features) for positions from `start` on, each float32 (length, features/2)."""
        if features < 2 or features % 2 or length < 0:
            raise ShapeError(f"rotary_angles of {length} positions and {features} features: the features must be even and positive")
        steps = cls.arange(features // 2, dtype=dtypes.float64).mul(-2 * math.log(base) / features).exp()
        angles = cls.arange(start, start + length, dtype=dtypes.float64).unsqueeze(1).mul(steps)
        return angles.cos().cast(dtypes.float32), angles.sin().cast(dtypes.float32)
