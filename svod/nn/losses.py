"""Losses as modules, forward only."""
from __future__ import annotations

from typing import Any

from svod.nn.module import Module
from svod.tensor import Tensor


class _Loss(Module):
    """A loss of Tensor with fixed options: `loss(input, target)`."""

    method = ""
    names: tuple[str, ...] = ("reduction",)

    def __init__(self, *args: Any, **options: Any) -> None:
        given = dict(zip(self.names, args, strict=False))
        wrong = sorted(set(options) - set(self.names) | set(options) & set(given))
        if len(args) > len(self.names) or wrong:
            raise TypeError(f"{type(self).__name__} takes the options {self.names}; {wrong or args} are unknown or given twice")
        for name, value in {**given, **options}.items():
            if isinstance(value, Tensor):
                self.register_buffer(name, value)
            else:
                setattr(self, name, value)
        self.given = (*given, *options)

    def forward(self, input: Tensor, target: Any) -> Tensor:
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
