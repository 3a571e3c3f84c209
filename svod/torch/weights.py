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
from svod.torch.kept import Kept, Places
from svod.torch.memory import inverse, order_in_memory, svod_dtype, svod_tensor
from svod.torch.watch import Watch


class Weights:
    """A set of weights, as it was when it was made. `tensors`: constants over their memory. `plans`: those that have them as constants.
    `kept`: what the module of these weights keeps; several modules may have one graph."""

    def __init__(self, given: Sequence[Any], kept: Kept) -> None:
        self._given = list(given)       # held, so that none of another set is taken for one of these
        self._watch = Watch(given)
        self.is_unchanged = self._watch.is_unchanged        # tells whether the tensors are unchanged; every call asks
        self.tensors = [constant(t) for t in given]
        self.plans: dict[Any, Any] = {}
        self.kept = kept
        self._last: Any = None
        self._places: Places | None = None

    def turn_to(self, plan: Any, places: Places | None) -> None:
        """This plan runs next, over kept tensors at these places. Others let go of memory that would live as long as they do: what was kept
        elsewhere before, and large arguments and results."""
        last, self._last = self._last, plan
        if places is not self._places:
            self._places = places
            for other in list(self.plans.values()):
                if other is not plan:
                    other.let_go()
        elif last is not plan and last is not None and last.is_large:
            last.let_go()

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
