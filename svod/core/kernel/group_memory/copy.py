"""Copies of a region into shared memory that the threads of a group do together.

    s1[16, 64] ← b[k, n], 256 threads, vectors of 4      thread t copies row t // 16, vector t % 16: one vector each, rows contiguous in b
    s0[64, 16] ← a[m, k], read by [k][m]                 thread t loads 4 of row t // 4 and stores them to 4 rows, 64 + 4 elements apart

Neighbouring threads take neighbouring vectors of the memory that is read.
"""
from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from math import gcd, prod
from typing import NamedTuple

from svod.core.kernel.kernel import Along, LinearIndex, Node, ResolvedStage
from svod.core.kernel.layout import Layout
from svod.core.kernel.required import Lin

ASYNC_BYTES = (4, 8, 16)     # bytes that a thread may copy asynchronously at once
UNROLLED_TURNS = 8      # most turns of a copy that are emitted as straight-line code
BULK_BYTES = 16         # bytes; addresses and lengths of bulk copies are multiples of this
MOST_BULK = 1 << 20     # most bytes, and most copies, that one counter of arrivals can count


class GroupCopy(NamedTuple):
    """A copy by all threads of a group. `order`: its dims, outermost first; `vector`: the dim along which a thread copies `width` elements
    at once, or -1."""

    order: tuple[int, ...]
    vector: int
    width: int

    def part(self, extents: Sequence[int], is_row: bool = False) -> int:
        """The number of elements that a thread takes at once: a whole row, a vector, or one if vectors do not divide a row."""
        return extents[self.vector] if is_row else self.width if self.vector >= 0 and extents[self.vector] % self.width == 0 else 1

    def counts(self, extents: tuple[int, ...]) -> tuple[int, ...]:
        """Per dim of `order`, the number of parts that threads take."""
        return tuple(extents[d] // self.width if d == self.vector else extents[d] for d in self.order)


def group_copy(r: ResolvedStage, extents: tuple[int, ...], starts: tuple[Lin, ...], full: tuple[int, ...], order: tuple[int, ...],
               lanes: int, staged: Mapping[int, LinearIndex]) -> GroupCopy:
    """Plan the copy of a region by a group of threads. `full`: extents of the whole stage; `order`: dims of its layout, outermost first;
    `lanes`: elements of the widest access; `staged`: the places in memory of the values of other phases that it reads, by node."""
    sources = {**{i: n.linear for i, n in enumerate(r.nodes) if n.kind == "load" and n.linear is not None}, **staged}
    steps = [max([_step(r, linear, d, lanes) for linear in sources.values()], default=0) for d in range(len(extents))]
    if any(steps):      # dims with the smallest steps through the source go innermost, dims that do not move in it outermost
        order = tuple(sorted(order, key=lambda d: (steps[d] != 0, -steps[d])))
    order = tuple(sorted(order, key=lambda d: extents[d] != 1))
    inner = order[-1] if order else -1
    width = lanes
    while width > 1 and not _takes_vectors(r, sources, inner, extents, starts, full, width):
        width //= 2
    return GroupCopy(order, inner if width > 1 else -1, max(width, 1))


def _step(r: ResolvedStage, linear: LinearIndex, d: int, width: int) -> int:
    """The usual distance in memory, in elements, between neighbouring positions of dim `d`."""
    total, moved = linear.coef(d), [(a, c) for a, c in linear.atoms if d in r.nodes[a].deps]
    along = along_vector(r, d, width) if moved else {}
    return abs(total + sum([c * along[a].step for a, c in moved if a in along])) + sum([abs(c) for a, c in moved if a not in along])


def evenly(r: ResolvedStage, linear: LinearIndex) -> LinearIndex | None:
    """Replace the divisions in an index by coefficients: the usual step from one position to the next. None if the index depends on
    loaded values."""
    if not linear.atoms:
        return linear
    coefs = dict(linear.coefs)
    for d in sorted({d for a, _ in linear.atoms for d in r.nodes[a].deps}):
        along = along_vector(r, d, 1)
        if any(a not in along for a, _ in linear.atoms):
            return None
        coefs[d] = coefs.get(d, 0) + sum([c * along[a].step for a, c in linear.atoms])
    return LinearIndex(tuple(sorted((a, c) for a, c in coefs.items() if c)), linear.const, ())


def _takes_vectors(r: ResolvedStage, sources: Mapping[int, LinearIndex], d: int, extents: tuple[int, ...], starts: tuple[Lin, ...],
                   full: tuple[int, ...], width: int) -> bool:
    """Whether a region can be copied in vectors of `width` elements along dim `d`, each of them whole and aligned in the sources."""
    terms, const = starts[d]
    if extents[d] % width or full[d] % width or const % width or any(c % width for c in terms.values()):
        return False
    along = along_vector(r, d, width)
    for i, linear in sources.items():
        gate = r.nodes[i].gate
        if any(a not in along for a, _ in linear.atoms) or (gate >= 0 and gate not in along):
            return False
        step = linear.coef(d) + sum([c * along[a].step for a, c in linear.atoms])
        apart = [linear.const, *[c for a, c in linear.coefs if a != d], *[c * along[a].multiple for a, c in linear.atoms]]
        if step != 1 or any(c % width for c in apart):
            return False
    return True


def along_vector(r: ResolvedStage, d: int, width: int) -> dict[int, Along]:
    """The nodes of a copy whose values grow evenly inside vectors along dim `d`: node → `Along`. Vectors have `width` positions and begin
    at multiples of `width`.

        k % 256, k // 256 in vectors of 8 along k        steps 1 and 0, as 256 is a multiple of 8
    """
    if (d, width) not in r.along:
        r.along[d, width] = _grow_evenly(r, d, width)
    return r.along[d, width]


def _grow_evenly(r: ResolvedStage, d: int, width: int) -> dict[int, Along]:
    along: dict[int, Along] = {}
    for i, n in enumerate(r.nodes):
        if n.kind == "axis":
            along[i] = Along(1, width) if n.arg == d else Along(0, 1)
        elif n.kind == "const" and n.dtype.is_int:
            along[i] = Along(0, abs(int(n.arg)))
        elif d not in n.deps:
            along[i] = Along(0, 1)
        elif n.kind in ("alu", "cast") and all(s in along for s in n.src):
            found = _along(n, [along[s] for s in n.src], [r.nodes[s] for s in n.src], width)
            if found is not None:
                along[i] = found
    return along


def _along(n: Node, src: list[Along], nodes: list[Node], width: int) -> Along | None:
    """Compute the `Along` of an operation from the `Along` of each operand; None if the operation's value does not grow evenly."""
    if n.op in ("ADD", "SUB"):
        sign = 1 if n.op == "ADD" else -1
        return Along(src[0].step + sign * src[1].step, gcd(src[0].multiple, src[1].multiple))
    if n.op == "MUL" and not (src[0].step and nodes[1].kind != "const") and not (src[1].step and nodes[0].kind != "const"):
        steps = [a.step * int(k.arg) for a, k in zip(src, reversed(nodes), strict=True) if a.step]
        return Along(sum(steps), src[0].multiple * src[1].multiple)
    if n.op in ("IDIV", "MOD") and nodes[1].kind == "const" and nodes[1].arg > 0:
        by, (step, multiple) = int(nodes[1].arg), src[0]
        if step in (0, 1) and (not step or by % width == 0 == multiple % width):
            return Along(step, gcd(multiple, by)) if n.op == "MOD" else Along(0, multiple // by if multiple % by == 0 else 1)
        return None
    return None if any(a.step for a in src) else Along(0, 1)


def rows_in_bulk(node: Node, copy: GroupCopy, layout: Layout, extents: Sequence[int], start: Iterable[int], least: int) -> int:
    """The number of rows of a region if each row can be one bulk copy; else 0. A row must have `least` bytes or more, and begin at a
    multiple of `BULK_BYTES` bytes both in the argument that `node` loads and in shared memory. `start`: numbers that divide the terms of
    the region's first position along its rows."""
    inner, size = copy.vector, node.dtype.itemsize
    if node.kind != "load" or node.linear is None or node.linear.atoms or node.gate >= 0 or inner < 0 or layout.tiled >= 0 \
            or layout.swizzle is not None or layout.strides[inner] != 1 or node.linear.coef(inner) != 1:
        return 0
    apart = [*start, node.linear.const, extents[inner]]
    for d, extent in enumerate(extents):
        if d != inner:
            apart += [node.linear.coef(d), layout.strides[d] if extent > 1 else 0]
    fits = extents[inner] * size >= least and prod(extents) * size < MOST_BULK and all(n * size % BULK_BYTES == 0 for n in apart)
    return prod(extents) // extents[inner] if fits else 0
