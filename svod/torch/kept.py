"""Tensors that a module keeps and writes, such as key-value caches: they are the same objects in every call.

Before a run, one native pass checks the addresses and forms of all of them, as for weights. While these do not change, a plan stays bound
to their memory.
"""
from __future__ import annotations

from collections.abc import Callable, Sequence
from operator import is_
from typing import Any

from svod.torch.memory import gpu_of
from svod.torch.watch import TensorWatch


class WrittenArguments:
    """The arguments of a graph, given by `numbers`, that it writes and that live in the module. `bound`: they are the same tensors in
    every call."""

    def __init__(self, numbers: Sequence[int], *, bound: bool) -> None:
        self._numbers, self._is_bound = numbers, bound
        self._now: TensorPlaces | None = None

    def places(self, given: Sequence[Any]) -> TensorPlaces:
        """The addresses and forms of the tensors in this call: the same object as in the previous call, if nothing has changed."""
        now = self._now
        if now is not None and (self._is_bound or now.is_of([given[i] for i in self._numbers])) and now.is_unchanged():
            return now
        self._now = now = TensorPlaces([given[i] for i in self._numbers])
        return now


class TensorPlaces:
    """The addresses and forms of tensors. `can_stay`: whether a plan may stay bound to their memory. It may not for memory on a GPU,
    which has to be synchronised in each call."""

    def __init__(self, tensors: Sequence[Any]) -> None:
        self._tensors = list(tensors)
        self._watch = TensorWatch(tensors, numbers=False)
        self.is_unchanged: Callable[[], object] = self._watch.is_unchanged
        # part of the key of plans and so compared in each call: another thread may change a tensor in the meantime
        self.form = TensorForms(tuple(self._watch.forms))
        self.can_stay = not any(map(gpu_of, tensors))

    def is_of(self, tensors: Sequence[Any]) -> bool:
        """Whether these are the same tensor objects."""
        return all(map(is_, tensors, self._tensors))


class TensorForms:
    """Dtypes, sizes, strides and devices of tensors, as a part of keys: the hash is computed only once."""

    def __init__(self, forms: tuple[Any, ...]) -> None:
        self._forms, self._hash = forms, hash(forms)

    def __hash__(self) -> int:
        return self._hash

    def __eq__(self, other: object) -> bool:
        return isinstance(other, TensorForms) and self._forms == other._forms
