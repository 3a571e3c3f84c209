"""Memory for a plan's results, new in each run: small arrays that nobody outside references any more are reused."""
from __future__ import annotations

import math
from sys import getrefcount
from typing import Any, NamedTuple

import numpy as np

from svod.compile.plan.plan_parts import address_of
from svod.core.graph.allocator import OWN_BLOCK_BYTES
from svod.core.graph.buffer import Array, aligned_empty
from svod.core.ir.dtype import DType

MOST_KEPT = 3       # arrays kept per result: the one in use, the one before, and one more


class ResultArray(NamedTuple):
    """An array of a result's shape, the owner that its views reference, and its address."""

    array: np.ndarray[Any, Any]
    owner: Any
    address: int


class ResultMemory:
    """Arrays for one result. A small array that nobody outside references any more is reused: an allocation takes longer than a small
    kernel.

    Views of an array reference its owner, so an array is free when both have as many references as at the beginning."""

    def __init__(self, shape: tuple[int, ...], dtype: DType) -> None:
        self.shape, self.dtype = shape, dtype
        self._size = math.prod(shape)
        self.nbytes = self._size * dtype.itemsize
        self._is_small = self.nbytes < OWN_BLOCK_BYTES
        self._kept: list[ResultArray] = []
        self._alone = (0, 0)

    def take(self, bound: Array | None) -> ResultArray:
        """Return memory that is not in use. `bound`: the array to which the plan holds an additional reference."""
        for memory in self._kept:
            of_array, of_owner = _references(memory)
            if (of_array - (memory.array is bound), of_owner) == self._alone:
                return memory
        array = aligned_empty(self._size, self.dtype).reshape(self.shape)
        memory = ResultArray(array, array.base, address_of(array))
        del array
        if self._is_small and memory.owner is not None:
            if len(self._kept) == MOST_KEPT:
                self._kept.pop(0)
            self._kept.append(memory)
            self._alone = _references(memory)
        return memory


def _references(memory: ResultArray) -> tuple[int, int]:
    """Count the references to the array and to its owner."""
    return getrefcount(memory[0]), getrefcount(memory[1])
