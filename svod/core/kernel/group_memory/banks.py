"""Bank conflicts in shared memory, and the padding of rows that avoids them.

    64 rows of 16 floats, a thread a row      32 threads share 2 of the 32 banks; with rows of 17 floats each has its own bank
"""
from __future__ import annotations

from functools import lru_cache
from math import prod
from typing import NamedTuple

from svod.core.kernel.group_memory.copy import GroupCopy
from svod.core.kernel.layout import Layout

BANKS, BANK_BYTES = 32, 4       # number of banks, and bytes that one bank delivers per access
THREADS_SERVED_TOGETHER = 32    # threads whose accesses of one word each are served together


class SharedAccess(NamedTuple):
    """An access to shared memory by several threads at once. `elements`: the first element of each thread; `width`: elements of one thread;
    `weight`: relative frequency."""

    elements: tuple[int, ...]
    width: int
    weight: float


def conflicts(access: SharedAccess, itemsize: int) -> float:
    """The bank cycles that one access of the threads takes, times its weight."""
    nbytes = access.width * itemsize
    at_once = max(1, THREADS_SERVED_TOGETHER * BANK_BYTES // max(nbytes, BANK_BYTES))
    total = 0
    for first in range(0, len(access.elements), at_once):
        words = {(e * itemsize + b) // BANK_BYTES for e in access.elements[first:first + at_once] for b in range(0, nbytes, BANK_BYTES)}
        banks = [0] * BANKS
        for word in words:
            banks[word % BANKS] += 1
        total += max(banks)
    return total * access.weight


def with_row_pad(layout: Layout, pad: int) -> Layout:
    """The layout with `pad` elements of padding after each row of its innermost dim."""
    if not pad or len(layout.order) < 2:
        return layout
    strides, size = [0] * len(layout.extents), 1
    for d in reversed(layout.order):
        strides[d] = size
        size *= layout.extents[d]
        if d == layout.order[-1]:
            size += pad
    return layout._replace(strides=tuple(strides), size=size, row_pad=pad)


def copy_access(copy: GroupCopy, layout: Layout, threads: int) -> SharedAccess:
    """The store of the first turn of a copy, as an access of `threads` threads."""
    counts = copy.counts(layout.extents)
    elements = []
    for t in range(min(threads, prod(counts))):
        element, rest = 0, t
        for d, n in zip(reversed(copy.order), reversed(counts), strict=True):
            element += rest % n * layout.strides[d] * (copy.width if d == copy.vector else 1)
            rest //= n
        elements.append(element)
    whole = copy.vector < 0 or layout.strides[copy.vector] == 1
    return SharedAccess(tuple(elements), copy.width if whole else 1, 1.0 if whole else copy.width)


class ThreadDigit(NamedTuple):
    """A digit of the thread number t, as it moves an access along a dim: by positions · (t // inner % extent)."""

    inner: int
    extent: int
    positions: int


class SharedRead(NamedTuple):
    """A read of a value in shared memory. `apart`: per dim, the digits of the thread number that move the read; `width`: elements of a
    thread's vector along the innermost dim."""

    apart: tuple[tuple[ThreadDigit, ...], ...]
    width: int


@lru_cache(maxsize=1 << 14)
def padded_rows(layout: Layout, copy: GroupCopy | None, reads: tuple[SharedRead, ...], threads: int, itemsize: int) -> Layout:
    """Choose the padding of rows that gives the fewest bank conflicts for the copy and the reads. `threads`: number of threads that access
    memory at once."""
    if len(layout.order) < 2 or layout.extents[layout.order[-2]] == 1:
        return layout
    unit = max([1, *(r.width for r in reads), copy.width if copy is not None and copy.vector == layout.order[-1] else 1])
    best, fewest = layout, -1.0
    for pad in (0, unit, 2 * unit):
        candidate = with_row_pad(layout, pad)
        touched = [_read_access(candidate, r, threads) for r in reads]
        total = sum(conflicts(a, itemsize) for a in (*touched, *([copy_access(copy, candidate, threads)] if copy is not None else [])))
        if fewest < 0 or total < fewest:
            best, fewest = candidate, total
    return best


MATRIX = 8, 16          # lines of a matrix that ldmatrix loads, and bytes of each


def is_turned(layout: Layout, itemsize: int, summed: int) -> bool:
    """Whether a matrix of 4-byte numbers lies with another dim than `summed` innermost. Threads then load single numbers, as no instruction
    transposes them."""
    return itemsize == BANK_BYTES and len(layout.order) > 1 and layout.order[-1] != summed


def matrix_read(layout: Layout, itemsize: int, summed: int) -> SharedRead:
    """A read of a tile by a subgroup: eight threads at once read 16-byte lines of the innermost dim, at neighbouring positions of the next
    dim. Of a transposed matrix (`is_turned`) threads read single numbers."""
    (lines, nbytes), dims = MATRIX, range(len(layout.extents))
    line = layout.order[-2] if len(layout.order) > 1 else -1
    if is_turned(layout, itemsize, summed):
        across = nbytes // BANK_BYTES
        rows = {line: (ThreadDigit(1, across, 1),), layout.order[-1]: (ThreadDigit(across, lines, 1),)}
        return SharedRead(tuple([rows.get(d, ()) for d in dims]), 1)
    return SharedRead(tuple([(ThreadDigit(1, lines, 1),) if d == line else () for d in dims]), max(1, nbytes // itemsize))


READ_WEIGHT = 4.0       # weight of a read against a write, as values in shared memory are read more often than written


def _read_access(layout: Layout, read: SharedRead, threads: int) -> SharedAccess:
    steps = [(inner, extent, n * stride) for stride, digits in zip(layout.strides, read.apart, strict=True) for inner, extent, n in digits]
    elements = tuple([sum([t // inner % extent * step for inner, extent, step in steps]) for t in range(threads)])
    return SharedAccess(elements, read.width, READ_WEIGHT)
