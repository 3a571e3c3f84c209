"""Losses as modules, forward only."""
from __future__ import annotations

from typing import Any

from svod.nn.functions import Function
from svod.tensor import Tensor


class _Loss(Function):
    """A module that calls a loss of Tensor with fixed options: `loss(input, target)`."""

    names: tuple[str, ...] = ("reduction",)

    def __init__(self, *args: Any, **options: Any) -> None:
        given = self._by_name(args, options)
        for name, value in given.items():
            if isinstance(value, Tensor):
                self.register_buffer(name, value)
            else:
                setattr(self, name, value)
        self.given = tuple(given)

    def forward(self, input: Tensor, target: Any) -> Tensor:  # type: ignore[override]
        result: Tensor = getattr(input, self.method)(target, **{name: getattr(self, name) for name in self.given})
        return result


class CrossEntropyLoss(_Loss): method, names = "cross_entropy", ("weight", "ignore_index", "reduction", "label_smoothing")
class NLLLoss(_Loss): method, names = "nll_loss", ("weight", "ignore_index", "reduction")
class MSELoss(_Loss): method = "mse_loss"
class L1Loss(_Loss): method = "l1_loss"
class SmoothL1Loss(_Loss): method, names = "smooth_l1_loss", ("reduction", "beta")
class HuberLoss(_Loss): method, names = "huber_loss", ("reduction", "delta")
class KLDivLoss(_Loss): method, names = "kl_div", ("reduction", "log_target")
class BCELoss(_Loss): method, names = "binary_cross_entropy", ("weight", "reduction")
class BCEWithLogitsLoss(_Loss): method, names = "binary_cross_entropy_with_logits", ("weight", "reduction", "pos_weight")
