"""A check that no other buffer of a plan overlaps memory that the plan writes: a plan orders reads and writes buffer by buffer, so it
assumes that buffers do not share memory.

    y += x, with y in bytes 0 … 400 and x in bytes 400 … 800    accepted
    the same, with x in bytes 396 … 796                         SharedMemoryError
"""
from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Mapping
from itertools import pairwise

from svod.core.graph.buffer import Array
from svod.errors import SharedMemoryError

Span = tuple[int, int]      # address of the first byte, and the address after the last byte


def span_of(array: Array) -> Span:
    """Return the address range of a C-contiguous array."""
    start: int = array.__array_interface__["data"][0]
    return start, start + array.nbytes


class WrittenMemory:
    """The address ranges of a plan's buffers, by buffer number, and the set of written buffers. Moving a buffer that is only read costs one
    binary search among the written buffers, so calls whose arguments have new addresses each time are cheap to check."""

    def __init__(self, spans: Mapping[int, Span], written: Iterable[int]) -> None:
        """`written`: the numbers of the written buffers, also of buffers that have no span yet. Raises SharedMemoryError as `move` does."""
        self._written = frozenset(written)
        self._spans: dict[int, Span] = {}
        self._order: list[tuple[int, int, int]] = []        # begin, end and number of each written buffer
        self._begins: list[int] = []
        self.move(spans)

    def move(self, spans: Mapping[int, Span]) -> dict[int, Span]:
        """Set the address ranges of buffers. Returns the previous ranges of the buffers that moved, if they had one. Raises
        SharedMemoryError if written memory would overlap another buffer; then no range has changed."""
        known = self._spans
        moved = {n: s for n, s in spans.items() if known.get(n) != s}
        before = {n: known[n] for n in moved if n in known}
        if self._written.isdisjoint(moved):
            for n, (begin, end) in moved.items():
                self._refuse(n, begin, end)
            known.update(moved)
        elif moved:
            self._sort({**known, **moved})
        return before

    def _sort(self, spans: dict[int, Span]) -> None:
        before = self._spans, self._order, self._begins
        order = sorted((*spans[n], n) for n in self._written if n in spans and spans[n][0] < spans[n][1])
        try:
            for (_, end, first), (begin, last, second) in pairwise(order):
                if begin < end:
                    raise _shared(first, second, min(end, last) - begin)
            self._spans, self._order, self._begins = spans, order, [begin for begin, _, _ in order]
            for n, (begin, end) in spans.items():
                if n not in self._written:
                    self._refuse(n, begin, end)
        except SharedMemoryError:
            self._spans, self._order, self._begins = before
            raise

    def _refuse(self, number: int, begin: int, end: int) -> None:
        """Raise SharedMemoryError if a buffer overlaps a written one. Written buffers do not overlap each other, so only the last one that
        begins before `end` needs a comparison."""
        at = bisect_left(self._begins, end) - 1
        if at >= 0 and begin < end and self._order[at][1] > begin:
            first, last, written = self._order[at]
            raise _shared(written, number, min(end, last) - max(begin, first))


def _shared(written: int, other: int, nbytes: int) -> SharedMemoryError:
    return SharedMemoryError(f"buffer {written}, which is assigned to, and buffer {other} of the same plan share {nbytes} "
                             f"byte{'s' * (nbytes > 1)} of memory: two tensors over one array, or one array passed twice; make one of "
                             "them from a copy, or use one tensor for both")
