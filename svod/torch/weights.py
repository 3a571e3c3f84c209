"""Weights of PyTorch modules as constants of plans: read and packed once, and again after they changed.

A set of weights is known by the identity of its tensors. Whether it is still what it was is asked before every run: another address
(`p.data = …`) or another version (an in-place write, `load_state_dict`) makes it a new set.
"""
from __future__ import annotations

import weakref
from collections.abc import Sequence
from operator import attrgetter
from typing import Any

import torch

from svod.tensor import Tensor
from svod.torch.memory import array_over, inverse, order_in_memory, svod_dtype

_version = attrgetter("_version")
_address = torch.Tensor.data_ptr


class Weights:
    """A set of weights, as it was when it was made. `tensors`: constants over their memory. `plans`: those that have them as constants."""

    def __init__(self, given: Sequence[Any]) -> None:
        self._versioned = not any(t.is_inference() for t in given)      # tensors of inference mode count no writes
        self._addresses = list(map(_address, given))
        self._versions = list(map(_version, given)) if self._versioned else []
        self._gone: list[Any] = []      # references whose tensors are no more: their identities may be those of others by now
        self._alive = [weakref.ref(t, self._gone.append) for t in given]
        self.tensors = [constant(t) for t in given]
        self.plans: dict[Any, Any] = {}

    def holds(self, given: Sequence[Any]) -> bool:
        """Whether tensors that have the same identities are unchanged."""
        return (not self._gone and list(map(_address, given)) == self._addresses
                and (not self._versioned or list(map(_version, given)) == self._versions))


def constant(t: Any) -> Tensor:
    """The svod tensor over the memory of a PyTorch tensor that nobody writes any more; a copy of one with gaps."""
    order = order_in_memory(t.shape, t.stride())
    if 0 in t.shape:
        return Tensor.zeros(tuple(t.shape), dtype=svod_dtype(t.dtype))
    if order is None:
        t, order = t.contiguous(), tuple(range(t.ndim))
    held = Tensor._over(array_over(t.permute(order)), svod_dtype(t.dtype), False)
    return held if order == tuple(range(t.ndim)) else held.permute(inverse(order))
