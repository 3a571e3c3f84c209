"""The memory that a plan writes and that was there before: no other buffer of the plan may lie there, because reads and writes are ordered
buffer by buffer, as if their memory were apart.

    y += x, where y has bytes 0 … 400 and x 400 … 800    as it should be
    the same, x moves to 396 … 796                        an error
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
    """The places of a plan's buffers, by their numbers, and the buffers that it writes. A buffer that is not written is found in the
    written ones in logarithmic time: calls whose arguments are elsewhere each time look only at these."""

    def __init__(self, spans: Mapping[int, Span], written: Iterable[int]) -> None:
        """`written`: of numbers; they may be without a span. Raises SharedMemoryError as `move` does."""
        self._written = frozenset(written)
        self._spans: dict[int, Span] = {}
        self._order: list[tuple[int, int, int]] = []        # begin, end and number of each written buffer
        self._begins: list[int] = []
        self.move(spans)

    def move(self, spans: Mapping[int, Span]) -> dict[int, Span]:
        """Move buffers to these places. Returns the previous places of the ones that moved, as far as known. Raises SharedMemoryError if
        written memory overlaps another buffer; nothing has moved then."""
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
        """Raise SharedMemoryError for a buffer under a written one. Those are apart, so the last to begin before its end is nearest."""
        at = bisect_left(self._begins, end) - 1
        if at >= 0 and begin < end and self._order[at][1] > begin:
            first, last, written = self._order[at]
            raise _shared(written, number, min(end, last) - max(begin, first))


def _shared(written: int, other: int, nbytes: int) -> SharedMemoryError:
    return SharedMemoryError(f"buffer {written}, which is assigned to, and buffer {other} of the same plan share {nbytes} "
                             f"byte{'s' * (nbytes > 1)} of memory: two tensors over one array, or one array passed twice; make one of "
                             "them from a copy, or use one tensor for both")
