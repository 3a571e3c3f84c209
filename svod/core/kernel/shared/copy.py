"""How the threads of a group copy a region into shared memory together, and how it lies there.

    s1[16, 64] ← b[k, n], 256 threads, vectors of 4      thread t copies row t // 16, vector t % 16: one vector each, rows contiguous in b
    s0[64, 16] ← a[m, k], read by [k][m]                 thread t loads 4 of row t // 4 and stores them to 4 rows, 64 + 4 elements apart

Neighbouring threads take neighbouring vectors of the memory that is read.
"""
from __future__ import annotations

from collections.abc import Iterable, Sequence
from math import prod
from typing import NamedTuple

from svod.core.kernel.kernel import Node, ResolvedStage
from svod.core.kernel.layout import Layout
from svod.core.kernel.required import Lin

BULK = 16               # bytes of which addresses and lengths of bulk copies are multiples
MOST_BULK = 1 << 20     # bytes and copies that one count can tell are below this


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


def rows_in_bulk(node: Node, copy: GroupCopy, layout: Layout, extents: Sequence[int], start: Iterable[int], least: int) -> int:
    """The number of rows of a region if each can be copied at once: it has `least` bytes or more, and begins at a multiple of `BULK` bytes
    in the argument that `node` loads and in shared memory; else 0. `start`: numbers of whose multiples the region's first position along
    its rows is the sum."""
    inner, size = copy.vector, node.dtype.itemsize
    if node.kind != "load" or node.linear is None or node.linear.atoms or node.gate >= 0 or inner < 0 or layout.tiled >= 0 \
            or layout.swizzle is not None or layout.strides[inner] != 1 or node.linear.coef(inner) != 1:
        return 0
    apart = [*start, node.linear.const, extents[inner]]
    for d, extent in enumerate(extents):
        if d != inner:
            apart += [node.linear.coef(d), layout.strides[d] if extent > 1 else 0]
    fits = extents[inner] * size >= least and prod(extents) * size < MOST_BULK and all(n * size % BULK == 0 for n in apart)
    return prod(extents) // extents[inner] if fits else 0
