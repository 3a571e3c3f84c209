"""Memory for a plan's results, new in each run: arrays that nobody outside references any more are reused."""
from __future__ import annotations

import math
from collections.abc import Mapping
from sys import getrefcount
from typing import Any, NamedTuple

import numpy as np

from svod.compile.plan.plan_parts import address_of
from svod.core.graph.allocator import OWN_BLOCK_BYTES
from svod.core.graph.buffer import Array, aligned_empty
from svod.core.ir.dtype import DType

MOST_KEPT = 3       # small arrays kept per result: the one in use, the one before, and one more


class ResultArray(NamedTuple):
    """An array of a result's shape, the owner that its views reference, and its address."""

    array: np.ndarray[Any, Any]
    owner: Any
    address: int


class ResultMemory:
    """Arrays for one result. A small array that nobody outside references any more is reused, as an allocation takes longer than a small
    kernel. With `keeps_large`, so is a large one that nobody references at the next run, as the caches may still hold it.

    Views of an array reference its owner, so an array is free when both have as many references as at the beginning. Somebody who had it
    may have changed its shape, its dtype, or whether it can be written: it is not reused then."""

    def __init__(self, shape: tuple[int, ...], dtype: DType, *, keeps_large: bool = False) -> None:
        """`keeps_large`: keep the last array even if it is large, because the plan holds it until the next run in any case."""
        self.shape, self.dtype = shape, dtype
        self._size = math.prod(shape)
        self.nbytes = self._size * dtype.itemsize
        self._most = MOST_KEPT if self.nbytes < OWN_BLOCK_BYTES else int(keeps_large)
        self._kept: list[ResultArray] = []
        self._alone: tuple[Any, ...] = ()

    def take(self, bound: Mapping[int, Array], number: int) -> ResultArray:
        """Return memory that is not in use. `bound`: the plan's arrays by number; that with `number` may be the last result. If the caller
        references it in another way as well, it counts as in use."""
        for memory in self._kept:
            if _state(memory, memory.array is bound.get(number)) == self._alone:
                return memory
        array = aligned_empty(self._size, self.dtype).reshape(self.shape)
        memory = ResultArray(array, array.base, address_of(array))
        del array
        if self._most and memory.owner is not None:
            if len(self._kept) == self._most:
                self._kept.pop(0)
            self._kept.append(memory)
            self._alone = _state(memory)
        return memory

    def let_go(self) -> None:
        """Release the arrays. They stay valid for whoever references them."""
        self._kept.clear()


def _state(memory: ResultArray, bound: int = 0) -> tuple[Any, ...]:
    """The references to the array, less `bound`, and to its owner; the array's shape, dtype, and whether it can be written."""
    array = memory.array
    return getrefcount(memory[0]) - bound, getrefcount(memory[1]), array.shape, array.dtype, array.flags.writeable
