"""The data of emission: linear forms over index values, staged values, vectors of a row, and open stages."""
from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from operator import ge, itemgetter
from typing import Any, NamedTuple

from svod.core.kernel.layout import Layout
from svod.core.kernel.placement import span
from svod.core.kernel.required import Lin
from svod.core.kernel.scheduler import LOOP, UPCAST
from svod.core.tree.nodes import Frame


class Held(NamedTuple):
    """The elements of a stage that a thread has in registers. `terms`: the index values of the start, per dim; `values`: constant position
    per dim → value."""

    terms: tuple[frozenset[tuple[int, int]], ...]
    values: dict[tuple[int, ...], int]


class Staged(NamedTuple):
    """A stage's value for its readers: in memory (`layout`), in registers (`held`) or, if it is a single element, a scalar."""

    scalar: int
    pointer: int
    layout: Layout | None
    base: tuple[Lin, ...]
    floor: int                     # the loop level at or inside which loads must stay
    version: int                   # counts the contents of the area, which is written again when the stage is computed again
    guarded: bool                  # readers may ask for positions beyond the extent, so they load under a gate
    buffer: int = -1               # index value: elements before the buffer to read, if there are several; else -1
    held: Held | None = None


class Chunk(NamedTuple):
    """One vector of the vector axis. `offset`: position of its first lane; `width`: its lanes; `active`: how many lanes are in use."""

    offset: int
    width: int
    active: int


def chunks_of(extent: int, width: int) -> tuple[Chunk, ...]:
    """Cut a row of `extent` positions into vectors of `width` lanes; the last one is narrower, with some lanes unused if need be."""
    out = []
    at = 0
    while extent - at >= width:
        out.append(Chunk(at, width, width))
        at += width
    rest = extent - at
    if rest:
        w = 1
        while w < rest:
            w *= 2
        out.append(Chunk(at, w, rest))
    return tuple(out)


class OpenStage:
    """A stage while it is emitted: its loops, the values of its axes, the current position and vector."""

    __slots__ = ("apart", "base", "bounds", "chunk", "frame", "group_base", "index", "linear", "memo", "narrow", "num_outs", "offsets",
                 "offsets_of", "opened", "pieces", "r", "results", "safe", "steps", "stores", "vector_axis", "vector_row",
                 "vector_stride", "whole_vectors", "width")

    def __init__(self, frame: Frame, base: list[Lin]):
        self.r = r = frame.r
        self.index = r.stage.index
        self.num_outs = frame.num_outs
        self.vector_axis, self.vector_row, self.width = frame.vector_axis, frame.vector_row, frame.width
        self._take(frame)
        self.apart = list(frame.apart)  # per local axis: how many positions after the first thread the last thread of the group starts
        self.base = base                # per local axis: the start of this thread's part
        self.group_base = base          # per local axis: the start of the first thread of the group
        self.stores = -1                # the condition that this thread stores its results; -1: always
        self.steps: dict[int, int] = {}         # node → how much its value grows from lane to lane, if evenly
        self.whole_vectors = False      # whether every vector is wholly inside the stage or wholly outside
        self.opened: list[list[Lin]] = [[] for _ in frame.pieces]   # per local axis: the loop values opened so far
        self.offsets: list[int] = [0] * len(frame.pieces)     # per local axis: the current position, relative to the start
        # node → picks the offsets that its value depends on
        self.offsets_of = {i: itemgetter(*n.deps) for i, n in enumerate(r.nodes) if n.deps}
        self.safe: set[int] = set()     # local axes all of whose positions are known to be inside their extents
        self.narrow: set[int] = set()   # local axes whose current iteration covers only a part of a tile
        self.chunk = Chunk(0, 1, 1)
        self.memo: dict[Any, int] = {}  # values at positions; cleared when a loop opens or closes
        self.linear: dict[Any, Any] = {}    # starts of axes and of addresses; cleared when a loop opens or closes
        self.results: dict[tuple[int, int], int] = {}   # (reduction, component) → value, while one position is stored

    def _take(self, frame: Frame) -> None:
        self.frame = frame
        self.pieces, self.bounds, self.vector_stride = frame.pieces, frame.bounds, frame.vector_stride()

    # -- loops ---------------------------------------------------------------------------------------------
    def open_row(self, a: int, value: Lin) -> None:
        self.opened[a].append(value)
        self.linear.clear()
        self.memo.clear()

    def close_row(self, a: int) -> None:
        self.opened[a].pop()
        self.linear.clear()
        self.memo.clear()

    def span(self, a: int) -> int:
        """Positions that the loops of an axis inside those opened so far cover."""
        loops = [p for p in self.pieces[a] if p.role == LOOP]
        return span([p for p in self.pieces[a] if p.role != LOOP] + loops[len(self.opened[a]):])

    @contextmanager
    def cut(self, frame: Frame, narrow: int = -1, step: int = 0) -> Iterator[None]:
        """Use the loops of another frame for a while. `narrow`: the local axis whose iterations then cover only `step` positions of a tile.
        With a step of 1 all positions are inside; with larger ones the last may be outside."""
        if frame is self.frame:
            yield
            return
        before, is_safe, narrows = self.frame, narrow in self.safe, narrow >= 0 and frame.pieces != self.pieces
        self._take(frame)
        if narrows:
            self.narrow.add(narrow)
            if step == 1:
                self.safe.add(narrow)
        yield
        self._take(before)
        if narrows:
            self.narrow.discard(narrow)
            if not is_safe:
                self.safe.discard(narrow)

    def positions(self, kinds: tuple[str, ...], axes: range) -> list[tuple[tuple[int, ...], dict[int, int]]]:
        """The expanded positions of the loops with these roles on these local axes, except the vector: (index per loop, axis → offset)."""
        return self.frame.positions(kinds, axes)

    def lane_chunks(self) -> tuple[Chunk, ...]:
        if self.vector_axis < 0:
            return (Chunk(0, 1, 1),)
        return chunks_of(next(p.extent for p in self.pieces[self.vector_axis] if p.row == self.vector_row), self.width)

    def set_position(self, offsets: dict[int, int], chunk: Chunk, more: dict[int, int] | None = None) -> bool:
        """Make a position current. Returns False if all of it is beyond the end of an axis."""
        self.offsets = off = [0] * len(self.bounds)
        for a, o in offsets.items():
            off[a] = o
        if more:
            for a, o in more.items():
                off[a] += o
        active = chunk.active
        if self.vector_axis >= 0:
            off[self.vector_axis] += chunk.offset * self.vector_stride
            room = self.bounds[self.vector_axis] - off[self.vector_axis]
            if active > 1 and (active - 1) * self.vector_stride >= room:
                active = -(-room // self.vector_stride)
        self.chunk = chunk if active == chunk.active else Chunk(chunk.offset, chunk.width, active)
        return active > 0 and not any(map(ge, off, self.bounds))

    def out_positions(self) -> list[tuple[dict[int, int], Chunk]]:
        """Positions of the register tile; each vector of an output axis is one."""
        outs = self.num_outs
        chunks = self.lane_chunks() if 0 <= self.vector_axis < outs else (Chunk(0, 1, 1),)
        return [(offsets, c) for _, offsets in self.positions((UPCAST,), range(outs)) for c in chunks]

    def partial_positions(self) -> list[tuple[tuple[Any, ...], dict[int, int], Chunk]]:
        """The partial results of a position of the tile, one for each upcast position or vector of reduce axes: (key, axis → offset,
        vector)."""
        outs = self.num_outs
        chunks = self.lane_chunks() if self.vector_axis >= outs else (Chunk(0, 1, 1),)
        positions = self.positions((UPCAST,), range(outs, len(self.pieces)))
        return [((*index, c.offset), offsets, c) for index, offsets in positions for c in chunks]


Sink = Callable[[OpenStage], None]      # stores the stage's value at the current position
