"""Makes weights of PyTorch modules constants of plans: they are read and packed once, and again after a change.

Before every run, the current weights are compared with their recorded state. They have changed if a tensor is another object, has another
address or form (`p.data = …`) or version (an in-place write, `load_state_dict`), or if a few sampled words of it differ. These are needed
for `p.data.add_(…)`, NumPy, and writes in inference mode, which do not change the version. Content on a GPU is not sampled.
"""
from __future__ import annotations

from collections.abc import Sequence
from operator import is_
from typing import Any

from svod.tensor import Tensor
from svod.torch.kept import TensorPlaces, WrittenArguments
from svod.torch.memory import inverse, order_in_memory, svod_dtype, svod_tensor
from svod.torch.watch import TensorWatch


class Weights:
    """A set of weights in the state in which it was read. `tensors`: constants over their memory. `plans`: the plans with these
    constants. `kept`: the tensors that the module of these weights keeps and writes; several modules may share one graph."""

    def __init__(self, given: Sequence[Any], kept: WrittenArguments) -> None:
        self._given = list(given)       # keeps the tensors alive, so that their ids are not reused
        self._watch = TensorWatch(given)
        self.is_unchanged = self._watch.is_unchanged  # a function that tells whether the tensors are unchanged; called before every run
        self.tensors = [constant(t) for t in given]
        self.plans: dict[Any, Any] = {}
        self.kept = kept
        self._last: Any = None
        self._places: TensorPlaces | None = None

    def turn_to(self, plan: Any, places: TensorPlaces | None) -> None:
        """Make `plan` the next to run, with kept tensors at `places`. Other plans release memory that they would keep alive: the former
        memory of kept tensors, and large arguments and results."""
        last, self._last = self._last, plan
        if places is not self._places:
            self._places = places
            for other in list(self.plans.values()):
                if other is not plan:
                    other.let_go()
        elif last is not plan and last is not None and last.is_large:
            last.let_go()

    def is_of(self, given: Sequence[Any]) -> bool:
        """Whether these are the same tensor objects."""
        return len(given) == len(self._given) and all(map(is_, given, self._given))


def constant(t: Any) -> Tensor:
    """The svod tensor over the memory of a PyTorch tensor that is not written any more; over a copy, if the tensor has gaps."""
    order = order_in_memory(t.shape, t.stride())
    if 0 in t.shape:
        return Tensor.zeros(tuple(t.shape), dtype=svod_dtype(t.dtype))
    if order is None:
        t, order = t.contiguous(), tuple(range(t.ndim))
    held = svod_tensor(t.permute(order), shared=False)
    return held if order == tuple(range(t.ndim)) else held.permute(inverse(order))
