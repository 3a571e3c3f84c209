"""The areas of a group's shared memory while a phase is emitted. The loop tree has the barriers (`svod.core.tree.barriers`)."""
from __future__ import annotations

from typing import Any

from svod.compile.lower.builder import Builder
from svod.core.ir.dtype import DType, dtypes
from svod.core.kernel.layout import AREA
from svod.errors import KernelOptError


class SharedMemory:
    """Allocates areas of shared memory, each identified by a key."""

    def __init__(self, b: Builder, limit: int):
        self.b, self.limit = b, limit
        self.size = 0                                       # bytes taken so far
        self.areas: dict[Any, tuple[int, int]] = {}         # key → (offset, bytes)

    def area(self, key: Any, nbytes: int, start: int = AREA) -> int:
        """Return the offset, a multiple of `start`, of the area with this key; it has at least `nbytes` bytes. Raises KernelOptError if
        the target has too little shared memory."""
        offset, size = self.areas.get(key, (0, -1))
        if size >= nbytes and offset % start == 0:
            return offset
        offset, whole = -(-self.size // start) * start, -(-nbytes // AREA) * AREA
        self.areas[key] = offset, whole
        self.size = offset + whole
        if self.size > self.limit:
            raise KernelOptError(f"staged values and partial results of a group take {self.size} bytes of shared memory or more; the "
                                 f"target has {self.limit}")
        return offset

    def pointer(self, dtype: DType, offset: int) -> int:
        return self.b.pure("SHARED", dtype, 1, (), offset)

    def barrier(self) -> None:
        """Emit a barrier: all threads of the group wait for each other."""
        self.b.store("BARRIER", dtypes.void, 1, (), None)
