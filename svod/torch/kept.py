"""Tensors that a module keeps and writes, such as key-value caches: the same ones in every call.

Where they lie and what they are is asked in one native pass before a run, as for weights, and not one by one; while nothing differs, a
plan stays bound to their memory.
"""
from __future__ import annotations

from collections.abc import Callable, Sequence
from operator import is_
from typing import Any

from svod.torch.memory import gpu_of
from svod.torch.watch import Watch, form_of


class Kept:
    """Arguments of a graph, by `numbers`, that it writes. `bound`: they are the same tensors in every call."""

    def __init__(self, numbers: Sequence[int], *, bound: bool) -> None:
        self.numbers = list(numbers)
        self._is_bound = bound
        self._forms: dict[Any, int] = {}
        self._now: Places | None = None

    def places(self, given: Sequence[Any]) -> Places:
        """Where they are in this call: the object of the call before, if nothing differs."""
        now = self._now
        if now is not None and (self._is_bound or now.is_of([given[i] for i in self.numbers])) and now.is_unchanged():
            return now
        tensors = [given[i] for i in self.numbers]
        form = tuple(map(form_of, tensors))
        self._now = now = Places(tensors, self._forms.setdefault(form, len(self._forms)))
        return now


class Places:
    """Where tensors are. `form`: a number for their types, sizes, strides and devices. `can_stay`: a plan may stay bound to their memory;
    that on a GPU has to be waited for in each call."""

    def __init__(self, tensors: Sequence[Any], form: int) -> None:
        self._tensors = list(tensors)
        self._watch = Watch(tensors, numbers=False)
        self.is_unchanged: Callable[[], object] = self._watch.is_unchanged
        self.form = form
        self.can_stay = not any(map(gpu_of, tensors))

    def is_of(self, tensors: Sequence[Any]) -> bool:
        """Whether these are the same tensors."""
        return all(map(is_, tensors, self._tensors))
