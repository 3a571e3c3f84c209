"""Weights of PyTorch modules as constants of plans: read and packed once, and again after they changed.

Whether a set of weights is still what it was is asked before every run: other tensors, another address or form (`p.data = …`), another
version (an in-place write, `load_state_dict`), or other numbers among a few of each tensor (`p.data.add_(…)`, NumPy and writes in
inference mode, which count no version) make it a new set. Numbers on a GPU are not looked at.
"""
from __future__ import annotations

from collections.abc import Sequence
from operator import is_
from typing import Any

from svod.tensor import Tensor
from svod.torch.kept import Kept
from svod.torch.memory import inverse, order_in_memory, svod_dtype, svod_tensor
from svod.torch.watch import Watch


class Weights:
    """A set of weights, as it was when it was made. `tensors`: constants over their memory. `plans`: those that have them as constants.
    `kept`: what the module of these weights keeps; several modules may have one graph."""

    def __init__(self, given: Sequence[Any], kept: Kept) -> None:
        self._given = list(given)       # held, so that none of another set is taken for one of these
        self._watch = Watch(given)
        self.is_unchanged = self._watch.is_unchanged        # whether the tensors are what they were: asked in every call
        self.tensors = [constant(t) for t in given]
        self.plans: dict[Any, Any] = {}
        self.kept = kept
        self._holding: list[Any] = []       # plans that may hold memory of a call; the one that runs next is the last

    def turn_to(self, plan: Any) -> None:
        """This plan runs next: the one before lets go of the memory of its last call, so that old caches do not live as long as plans."""
        holding = self._holding
        if not holding or holding[-1] is not plan:
            # another thread may run one of them: it is asked again
            self._holding = [*(p for p in holding if p is not plan and not p.let_go()), plan]

    def is_of(self, given: Sequence[Any]) -> bool:
        """Whether these are the same tensors."""
        return len(given) == len(self._given) and all(map(is_, given, self._given))


def constant(t: Any) -> Tensor:
    """The svod tensor over the memory of a PyTorch tensor that nobody writes any more; a copy of one with gaps."""
    order = order_in_memory(t.shape, t.stride())
    if 0 in t.shape:
        return Tensor.zeros(tuple(t.shape), dtype=svod_dtype(t.dtype))
    if order is None:
        t, order = t.contiguous(), tuple(range(t.ndim))
    held = svod_tensor(t.permute(order), shared=False)
    return held if order == tuple(range(t.ndim)) else held.permute(inverse(order))
