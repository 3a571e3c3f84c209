"""Weights of PyTorch modules as constants of plans: read and packed once, and again after they changed.

A set of weights is known by the identity of its tensors. Whether it is still what it was is asked before every run: another address
(`p.data = …`), another version (an in-place write, `load_state_dict`), or other numbers among a few of each tensor (`p.data.add_(…)`, NumPy
and writes in inference mode, which count no version) make it a new set. Numbers on a GPU are not looked at.
"""
from __future__ import annotations

import ctypes
import weakref
from collections.abc import Sequence
from operator import attrgetter
from typing import Any

import numpy as np
import torch

from svod.tensor import Tensor
from svod.torch.memory import gpu_of, inverse, order_in_memory, svod_dtype, svod_tensor

_version = attrgetter("_version")
_address = torch.Tensor.data_ptr


SAMPLES, MOST_SAMPLES = 16, 4096        # words of four bytes that are compared: of a tensor, of all together
_GOLDEN = (5 ** 0.5 - 1) / 2


class Weights:
    """A set of weights, as it was when it was made. `tensors`: constants over their memory. `plans`: those that have them as constants."""

    def __init__(self, given: Sequence[Any]) -> None:
        self._versioned = not any(t.is_inference() for t in given)      # tensors of inference mode count no writes
        self._addresses = list(map(_address, given))
        self._versions = list(map(_version, given)) if self._versioned else []
        self._gone: list[Any] = []      # references whose tensors are no more: their identities may be those of others by now
        self._alive = [weakref.ref(t, self._gone.append) for t in given]
        self._content = Content([t for t in given if not gpu_of(t)])
        self.tensors = [constant(t) for t in given]
        self.plans: dict[Any, Any] = {}

    def holds(self, given: Sequence[Any]) -> bool:
        """Whether tensors that have the same identities are unchanged."""
        return (not self._gone and list(map(_address, given)) == self._addresses
                and (not self._versioned or list(map(_version, given)) == self._versions)
                and self._content.is_unchanged())


class Content:
    """A few numbers of each of some tensors, read in one go. It holds no memory: the tensors have to be alive, where they were."""

    def __init__(self, tensors: Sequence[Any]) -> None:
        most = max(1, min(SAMPLES, MOST_SAMPLES // max(1, len(tensors))))
        words = np.concatenate([np.zeros(0, np.int64), *(sampled(t, most) for t in tensors)])
        first, last = (int(words.min()), int(words.max())) if len(words) else (0, -1)
        # the addresses between the first word and the last, of which only those of the tensors are read
        between: Any = (ctypes.c_uint32 * (last - first + 1)).from_address(4 * first)
        self._memory = np.ctypeslib.as_array(between)
        self._places = words - first
        self._values = self._read()

    def _read(self) -> bytes:
        return self._memory.take(self._places).tobytes()

    def is_unchanged(self) -> bool:
        return not self._values or self._read() == self._values


def sampled(t: Any, most: int) -> np.ndarray[Any, np.dtype[np.int64]]:
    """The addresses, in words, of up to `most` words of a tensor, spread over it; of doubles the half that holds the exponent."""
    address, size = t.data_ptr(), t.element_size()
    span = size * (1 + sum(s * (n - 1) for n, s in zip(t.shape, t.stride(), strict=True))) if t.numel() else 0
    step = max(1, size // 4)        # words from one place to the next
    places = span // 4 // step
    if address % 4 or not places:
        return np.zeros(0, np.int64)
    chosen = np.arange(places) if places <= most else (places * ((np.arange(most) * _GOLDEN) % 1)).astype(np.int64)
    half = step - 1 if t.dtype.is_floating_point else 0
    found: np.ndarray[Any, np.dtype[np.int64]] = address // 4 + step * chosen + half
    return found


def constant(t: Any) -> Tensor:
    """The svod tensor over the memory of a PyTorch tensor that nobody writes any more; a copy of one with gaps."""
    order = order_in_memory(t.shape, t.stride())
    if 0 in t.shape:
        return Tensor.zeros(tuple(t.shape), dtype=svod_dtype(t.dtype))
    if order is None:
        t, order = t.contiguous(), tuple(range(t.ndim))
    held = svod_tensor(t.permute(order), shared=False)
    return held if order == tuple(range(t.ndim)) else held.permute(inverse(order))
