"""An allocator of large arrays that reuses freed memory, which saves the page faults of fresh memory.

A fresh page of 4 KiB costs about a quarter of a microsecond, several times what a kernel needs to fill it: an output of 64 MB takes 5 ms
to compute and 8 ms to fault in. Each array of a megabyte or more therefore lies in a separate block. The block returns to the allocator
when the last view of the array is gone, and is handed out again to an array of nearly its size, the most recently used block first.
Smaller arrays come from the C library.

The kept memory is bounded (`Allocator.limit`): the least recently used block goes back to the system first. The system makes a page when
it is first touched, so an array that is never used takes no memory.
"""
from __future__ import annotations

import contextlib
import mmap
import threading
from typing import Any

import numpy as np

from svod.system.forksafe import remake_after_fork
from svod.system.process.memory import usable_memory

Array = np.ndarray[Any, np.dtype[Any]]

OWN_BLOCK_BYTES = 1 << 20       # bytes from which on an array has a separate block
LARGEST_BLOCK_SHARE = 1.25      # a block may be this much larger than the array it is given to
KEEP_AT_MOST = 1 << 30          # bytes
UNKNOWN_MEMORY = 8 << 30        # bytes that are assumed if the system does not report its memory
MOST_FREE_BLOCKS = 256          # most free blocks that are kept: a search looks at all of them
HUGE_PAGE = 2 << 20             # bytes


def private_memory(length: int) -> mmap.mmap:
    """Map `length` zero bytes, page-aligned. A forked child gets a copy of them (Python's anonymous mmap is shared by default)."""
    return mmap.mmap(-1, length, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)


def want_huge_pages(memory: mmap.mmap) -> None:
    """Ask for huge pages under `memory`; systems without them leave it as it is."""
    if hasattr(mmap, "MADV_HUGEPAGE"):
        with contextlib.suppress(OSError):
            memory.madvise(mmap.MADV_HUGEPAGE)


class _MappedBlock:
    """Mapped memory of one array. NumPy keeps this object as the base of the array and its views; when the last of them is gone, the
    memory returns to the allocator."""

    __slots__ = ("__array_interface__", "allocator", "memory", "nbytes")

    def __init__(self, allocator: Allocator, memory: mmap.mmap, address: int, nbytes: int) -> None:
        self.allocator, self.memory, self.nbytes = allocator, memory, nbytes
        self.__array_interface__ = {"version": 3, "shape": (nbytes,), "typestr": "|u1", "data": (address, False)}

    def __del__(self) -> None:
        self.allocator._take_back(self.memory)


class Allocator:
    """An allocator of mapped memory that keeps freed blocks. Threads may share it. A block may come back at any time, also while the
    garbage collector runs inside `allocate`."""

    def __init__(self, limit: int) -> None:
        self.limit = limit              # most bytes that are kept for reuse
        # a field, because blocks also come back at the end of the program, when the module's names are gone
        self.most_free = MOST_FREE_BLOCKS
        self.kept = 0                   # bytes that are kept now
        self._free: list[mmap.mmap] = []        # least recently used first
        self._lock = threading.Lock()
        remake_after_fork(self, "_lock", threading.Lock)

    def allocate(self, nbytes: int) -> Array:
        """Return `nbytes` uninitialised bytes, a flat uint8 array that begins at a multiple of the page size. Raises MemoryError."""
        length = -(-nbytes // mmap.PAGESIZE) * mmap.PAGESIZE
        memory = self._find(length)
        if memory is None:
            memory = self._map(length)
            if length >= HUGE_PAGE:
                want_huge_pages(memory)
        address = int(np.frombuffer(memory, np.uint8).__array_interface__["data"][0])
        return np.asarray(_MappedBlock(self, memory, address, nbytes))

    def release(self) -> int:
        """Return the kept memory to the system. Returns the number of bytes."""
        with self._lock:
            released, self.kept = self.kept, 0
            free, self._free = self._free, []
        free.clear()
        return released

    def _map(self, length: int) -> mmap.mmap:
        """Map new memory. If the system refuses, the kept memory is returned to it and the request is repeated."""
        try:
            return private_memory(length)
        except OSError:
            if not self.release():
                raise _no_memory(length) from None
        try:
            return private_memory(length)
        except OSError:
            raise _no_memory(length) from None

    def _find(self, length: int) -> mmap.mmap | None:
        with self._lock:
            fits = [i for i, m in enumerate(self._free) if length <= len(m) <= LARGEST_BLOCK_SHARE * length]
            if not fits:
                return None
            memory = self._free.pop(min(reversed(fits), key=lambda i: len(self._free[i])))
            self.kept -= len(memory)
            return memory

    def _take_back(self, memory: mmap.mmap) -> None:
        # Does not wait for the lock: this thread may hold it already, if the garbage collector runs inside `allocate`.
        if len(memory) > self.limit or not self._lock.acquire(blocking=False):
            return
        try:
            self._free.append(memory)
            self.kept += len(memory)
            while self.kept > self.limit or len(self._free) > self.most_free:
                self.kept -= len(self._free.pop(0))
        finally:
            self._lock.release()


def _no_memory(length: int) -> MemoryError:
    return MemoryError(f"an array of {length / 2**30:.1f} GiB: the system has no memory for it")


LARGE_ARRAYS = Allocator(min(KEEP_AT_MOST, (usable_memory() or UNKNOWN_MEMORY) // 16))
"""Where `aligned_empty` gets large arrays from."""
