"""How the threads of a group copy a region into shared memory together, and how it lies there.

    s1[16, 64] ← b[k, n], 256 threads, vectors of 4      thread t copies row t // 16, vector t % 16: one vector each, rows contiguous in b
    s0[64, 16] ← a[m, k], read by [k][m]                 thread t loads 4 of row t // 4 and stores them to 4 rows, 64 + 4 elements apart

Neighbouring threads take neighbouring vectors of the memory that is read. Rows lie apart so that the threads that access the memory at
once meet in few of its banks.
"""
from __future__ import annotations

from collections.abc import Iterable
from math import prod
from typing import NamedTuple

from svod.core.kernel.kernel import ResolvedStage
from svod.core.kernel.layout import Layout
from svod.core.kernel.required import Lin

BANKS, BANK_BYTES = 32, 4       # of shared memory; a word of each is accessed at once
AT_ONCE = 32                    # threads that access it at once, where each takes one word


class GroupCopy(NamedTuple):
    """A copy by all threads of a group: its dims, outermost first, and the one along which a thread takes `width` elements (-1: none)."""

    order: tuple[int, ...]
    vector: int
    width: int

    def counts(self, extents: tuple[int, ...]) -> tuple[int, ...]:
        """Per dim of `order` how many parts of it there are for threads to take."""
        return tuple(extents[d] // self.width if d == self.vector else extents[d] for d in self.order)


def group_copy(r: ResolvedStage, extents: tuple[int, ...], starts: tuple[Lin, ...], full: tuple[int, ...], order: tuple[int, ...],
               lanes: int) -> GroupCopy:
    """How a group copies a region. `full`: the extents of the whole stage; `order`: the dims as they lie in memory; `lanes`: elements of
    the widest access."""
    loads = [n for n in r.nodes if n.kind == "load" and n.linear is not None]
    steps = [max([abs(n.linear.coef(d)) for n in loads if n.linear is not None], default=0) for d in range(len(extents))]
    if any(steps):      # along the smallest steps through memory; what does not move in it goes outside
        order = tuple(sorted(order, key=lambda d: (steps[d] != 0, -steps[d])))
    order = tuple(sorted(order, key=lambda d: extents[d] != 1))
    inner = order[-1] if order else -1
    width = lanes
    while width > 1 and not _takes_vectors(r, inner, extents, starts, full, width):
        width //= 2
    return GroupCopy(order, inner if width > 1 else -1, max(width, 1))


def _takes_vectors(r: ResolvedStage, d: int, extents: tuple[int, ...], starts: tuple[Lin, ...], full: tuple[int, ...], width: int) -> bool:
    """Whether a region is copied in whole vectors of `width` elements along dim `d`, each aligned where it is read."""
    terms, const = starts[d]
    if extents[d] % width or full[d] % width or const % width or any(c % width for c in terms.values()):
        return False
    for n in r.nodes:
        if n.kind != "load":
            continue
        assert n.linear is not None
        if n.linear.coef(d) != 1 or n.linear.const % width or any(c % width for a, c in n.linear.coefs if a != d):
            return False
        if any(c % width or d in r.nodes[a].deps for a, c in n.linear.atoms) or (n.gate >= 0 and d in r.nodes[n.gate].deps):
            return False
    return True


class Access(NamedTuple):
    """What threads touch at once: the first element of each, how many each takes, and how often it happens."""

    elements: tuple[int, ...]
    width: int
    weight: float


def conflicts(access: Access, itemsize: int) -> float:
    """How often the banks are asked for what one access of the threads touches."""
    nbytes = access.width * itemsize
    at_once = max(1, AT_ONCE * BANK_BYTES // max(nbytes, BANK_BYTES))
    total = 0
    for first in range(0, len(access.elements), at_once):
        words = {(e * itemsize + b) // BANK_BYTES for e in access.elements[first:first + at_once] for b in range(0, nbytes, BANK_BYTES)}
        banks = [0] * BANKS
        for word in words:
            banks[word % BANKS] += 1
        total += max(banks)
    return total * access.weight


def with_row_pad(layout: Layout, pad: int) -> Layout:
    """A layout with `pad` elements behind each row of its innermost dim."""
    if not pad or len(layout.order) < 2:
        return layout
    strides, size = [0] * len(layout.extents), 1
    for d in reversed(layout.order):
        strides[d] = size
        size *= layout.extents[d]
        if d == layout.order[-1]:
            size += pad
    return layout._replace(strides=tuple(strides), size=size, row_pad=pad)


def copy_access(copy: GroupCopy, layout: Layout, threads: int) -> Access:
    """What the first threads store at once."""
    counts = copy.counts(layout.extents)
    elements = []
    for t in range(min(threads, AT_ONCE, prod(counts))):
        element, rest = 0, t
        for d, n in zip(reversed(copy.order), reversed(counts), strict=True):
            element += rest % n * layout.strides[d] * (copy.width if d == copy.vector else 1)
            rest //= n
        elements.append(element)
    whole = copy.vector < 0 or layout.strides[copy.vector] == 1
    return Access(tuple(elements), copy.width if whole else 1, 1.0 if whole else copy.width)


class SharedRead(NamedTuple):
    """A read of a value in shared memory: per dim the positions by which the threads of a group are apart, by their loop rows; and the
    elements of a vector along the innermost dim."""

    terms: tuple[dict[int, int], ...]
    width: int


Digits = dict[int, tuple[int, int]]     # per loop row (inner, extent): thread t has position t // inner % extent


def padded_rows(layout: Layout, copy: GroupCopy | None, reads: Iterable[SharedRead], digits: Digits, threads: int,
                itemsize: int) -> Layout:
    """The layout with the padding of rows for which copy and reads meet in the fewest banks."""
    if len(layout.order) < 2 or layout.extents[layout.order[-2]] == 1:
        return layout
    reads = list(reads)
    unit = max([1, *(r.width for r in reads), copy.width if copy is not None and copy.vector == layout.order[-1] else 1])
    best, fewest = layout, -1.0
    for pad in (0, unit, 2 * unit):
        candidate = with_row_pad(layout, pad)
        touched = [_read_access(candidate, r, digits, threads) for r in reads]
        total = sum(conflicts(a, itemsize) for a in (*touched, *([copy_access(copy, candidate, threads)] if copy is not None else [])))
        if fewest < 0 or total < fewest:
            best, fewest = candidate, total
    return best


READ_WEIGHT = 4.0       # a value in shared memory is read more often than written


def _read_access(layout: Layout, read: SharedRead, digits: Digits, threads: int) -> Access:
    elements = []
    for t in range(min(threads, AT_ONCE)):
        element = 0
        for stride, terms in zip(layout.strides, read.terms, strict=True):
            for row, c in terms.items():
                if row in digits:
                    inner, extent = digits[row]
                    element += t // inner % extent * c * stride
        elements.append(element)
    return Access(tuple(elements), read.width, READ_WEIGHT)
