"""The shared memory of a group while a phase is emitted: its areas, and the barriers between writes and reads of them.

    fill p;  BARRIER;  … p[…] …;  BARRIER;  fill p      a barrier before what others wrote is read, and before what others read is written

Areas that are written one after the other share their barriers."""
from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from svod.compile.lower.builder import Builder
from svod.core.ir.dtype import DType, dtypes
from svod.core.kernel.layout import AREA
from svod.errors import KernelOptError

Loops = tuple[int, ...]


class SharedMemory:
    """Areas of shared memory by key, and the accesses since the last barrier."""

    def __init__(self, b: Builder, limit: int):
        self.b, self.limit = b, limit
        self.size = 0                                       # bytes taken so far
        self.areas: dict[Any, tuple[int, int]] = {}         # key → (offset, bytes)
        self.touched: set[int] = set()                      # offsets of areas that code emitted so far accesses
        self.written: set[int] = set()                      # offsets of areas written since the last barrier
        self.read: set[int] = set()                         # offsets of areas read since the last barrier
        self.loops: Loops | None = None                     # the loops around the last barrier; None: there is none yet
        self.outside: Loops = ()                            # the loops that run once per group, as the loop of the launch does

    def area(self, key: Any, nbytes: int, start: int = AREA) -> int:
        """The offset, a multiple of `start`, of the area with this key, of at least `nbytes` bytes. Raises KernelOptError if the target has
        too little shared memory."""
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

    def before_writing(self, offsets: Iterable[int]) -> None:
        """Emit a barrier if threads may still read the old content of these areas; in a loop, the content of the iteration before."""
        offsets = set(offsets)
        here = tuple(self.b.open_loops)
        since = self.read | self.written if self.loops == here else self.touched
        if here not in (self.loops, self.outside) or offsets & since:
            self.barrier()

    def wrote(self, offset: int) -> None:
        self.written.add(offset)
        self.touched.add(offset)

    def before_reading(self, offsets: Iterable[int]) -> None:
        """Emit a barrier if these areas were written since the last one."""
        offsets = set(offsets)
        if offsets & self.written:
            self.barrier()
        self.read |= offsets

    def barrier(self) -> None:
        self.b.store("BARRIER", dtypes.void, 1, (), None)
        self.written.clear()
        self.read.clear()
        self.loops = tuple(self.b.open_loops)
