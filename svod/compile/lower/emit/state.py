"""The data of emission: linear forms over index values, staged values, vectors of a row, and open stages."""
from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import product
from operator import ge, itemgetter
from typing import Any, NamedTuple

from svod.core.kernel.layout import Layout
from svod.core.kernel.placement import span
from svod.core.kernel.required import Lin
from svod.core.kernel.scheduler import LOOP, UPCAST
from svod.core.tree.nodes import Frame


class Held(NamedTuple):
    """The elements of a stage that a thread has in registers: by position, from where it starts in the terms of each dim."""

    terms: tuple[frozenset[tuple[int, int]], ...]
    values: dict[tuple[int, ...], int]


class Staged(NamedTuple):
    """A stage's value for its readers: in memory (`layout`), in registers (`held`) or, for a single element, a scalar."""

    scalar: int
    pointer: int
    layout: Layout | None
    base: tuple[Lin, ...]
    floor: int                     # loads stay at or below this level
    version: int                   # which content of its area: an area is written again where a stage is computed twice
    guarded: bool                  # positions beyond the extent may be asked for: read under a gate
    buffer: int = -1               # an index value: elements before the buffer that is read, of several; -1: there is one
    held: Held | None = None


class Chunk(NamedTuple):
    """A part of the vector axis: `offset` of its first lane in positions of the row, vector `width`, lanes in use."""

    offset: int
    width: int
    active: int


def chunks_of(extent: int, width: int) -> tuple[Chunk, ...]:
    """A row of `extent` positions as vectors of at most `width` lanes, the last one narrower or masked."""
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
    """A stage while it is emitted: its loops, the values of its axes, the current position and vector chunk."""

    __slots__ = ("apart", "base", "bounds", "chunk", "first", "frame", "group_base", "index", "linear", "memo", "narrow", "num_outs",
                 "offsets", "offsets_of", "opened", "partial", "pieces", "r", "results", "safe", "slots", "steps", "stores", "sums",
                 "vector_axis", "vector_row", "vector_stride", "whole_vectors", "width")

    def __init__(self, frame: Frame, base: list[Lin]):
        self.r = r = frame.r
        self.index = r.stage.index
        self.num_outs = frame.num_outs
        self.vector_axis, self.vector_row, self.width = frame.vector_axis, frame.vector_row, frame.width
        self._take(frame)
        self.apart = list(frame.apart)  # per local axis: positions by which the last thread of a group starts later
        self.base = base                # per local axis: where it starts
        self.group_base = base          # per local axis: where the first thread of the group starts
        self.stores = -1                # the condition that this thread stores what it computes; -1: it does
        self.steps: dict[int, int] = {}         # of nodes in a vector that move evenly: from lane to lane
        self.whole_vectors = False      # whether the positions of a vector are all inside the stage, or none
        self.opened: list[list[Lin]] = [[] for _ in frame.pieces]   # per local axis: values of the rows opened so far
        self.offsets: list[int] = [0] * len(frame.pieces)     # per local axis: the current position, from where the axis starts
        self.offsets_of = {i: itemgetter(*n.deps) for i, n in enumerate(r.nodes) if n.deps}     # node → offsets its value depends on
        self.safe: set[int] = set()     # local axes all of whose positions are known to be inside here
        self.narrow: set[int] = set()   # local axes whose iterations are parts of a tile
        self.chunk = Chunk(0, 1, 1)
        self.memo: dict[Any, int] = {}  # values at positions, while the loops that are open stay
        self.linear: dict[Any, Any] = {}    # starts of axes and of addresses, while the loops that are open stay
        self.results: dict[tuple[int, int], int] = {}   # (reduction, component) → value, while a position is stored
        self.first: list[int] = []      # the values that accumulators begin with
        self.slots: list[int] = []      # per accumulator of the tile the number of the one that is carried for it; empty: its own
        self.sums: dict[Any, int] = {}   # what a correction of a dot instruction depends on → its accumulator
        self.partial: dict[tuple[int, ...], tuple[int, int]] = {}   # partial position → (number, vector width)

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
        """Positions that the rows of an axis cover under the loops opened so far."""
        loops = [p for p in self.pieces[a] if p.role == LOOP]
        return span([p for p in self.pieces[a] if p.role != LOOP] + loops[len(self.opened[a]):])

    @contextmanager
    def cut(self, frame: Frame, narrow: int = -1, step: int = 0) -> Iterator[None]:
        """Take the loops of another frame. `narrow`: the local axis whose iterations are parts of a tile, of `step` positions; of several
        positions the last may be outside."""
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
        """The expanded positions of the given rows of the given local axes, the vector row excluded: (index per row, offset per axis)."""
        rows = []
        for a in axes:
            for p in self.pieces[a]:
                if p.role in kinds and not (a == self.vector_axis and p.row == self.vector_row):
                    rows.append((a, p))
        out = []
        for index in product(*(range(p.extent) for _, p in rows)):
            offsets: dict[int, int] = {}
            for i, (a, p) in zip(index, rows, strict=True):
                offsets[a] = offsets.get(a, 0) + i * p.stride
            out.append((index, offsets))
        return out

    def lane_chunks(self) -> tuple[Chunk, ...]:
        if self.vector_axis < 0:
            return (Chunk(0, 1, 1),)
        return chunks_of(next(p.extent for p in self.pieces[self.vector_axis] if p.row == self.vector_row), self.width)

    def set_position(self, offsets: dict[int, int], chunk: Chunk, more: dict[int, int] | None = None) -> bool:
        """Make a position current; False when it lies wholly beyond an axis that is expanded without a loop."""
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
        """Positions of the register tile, vectors of an output axis included."""
        outs = self.num_outs
        chunks = self.lane_chunks() if 0 <= self.vector_axis < outs else (Chunk(0, 1, 1),)
        return [(offsets, c) for _, offsets in self.positions((UPCAST,), range(outs)) for c in chunks]

    def partial_positions(self) -> list[tuple[tuple[Any, ...], dict[int, int], Chunk]]:
        """Partial results per position of the tile: upcast rows of reduce axes, vectors among them."""
        outs = self.num_outs
        chunks = self.lane_chunks() if self.vector_axis >= outs else (Chunk(0, 1, 1),)
        positions = self.positions((UPCAST,), range(outs, len(self.pieces)))
        return [((*index, c.offset), offsets, c) for index, offsets in positions for c in chunks]


Sink = Callable[[OpenStage], None]      # stores what a stage is at the current position
