"""The data of emission: linear forms over index values, staged values, vectors of a row, and open stages."""
from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import product
from operator import ge, itemgetter
from typing import Any, NamedTuple

from svod.core.ir.summation import BlockedNest
from svod.core.kernel.kernel import ResolvedStage
from svod.core.kernel.layout import Layout, block_of, is_contiguous
from svod.core.kernel.placement import EmittedLoop, span
from svod.core.kernel.required import Lin
from svod.core.kernel.scheduler import LOOP, UPCAST

NO_POINT = -1                   # point of a copy loop: no stage lives there


class StageLoop(NamedTuple):
    """A loop of a stage."""

    axis: int                       # local axis
    piece: EmittedLoop
    point: int                      # the depth inside this loop, in the state's order of the stage, where stages live; or NO_POINT


class SplitReduction(NamedTuple):
    """A reduction cut into parts: one iteration of its phase per part."""

    axis: int                       # local axis
    chunk: int                      # positions of a part
    parts: int


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

    __slots__ = ("aligned", "apart", "base", "blocks", "bounds", "chunk", "first", "group_base", "index", "linear", "loops", "memo",
                 "narrow", "num_outs", "offsets", "offsets_of", "opened", "partial", "pieces", "r", "results", "safe", "slots", "steps",
                 "stores", "sums", "vector_axis", "vector_row", "vector_stride", "whole_vectors", "width")

    def __init__(self, r: ResolvedStage, pieces: list[tuple[EmittedLoop, ...]], bounds: list[int], base: list[Lin], lane: int,
                 vector_row: int, width: int):
        self.r = r
        self.index = r.stage.index
        self.num_outs = len(r.stage.outs)
        self.pieces = pieces            # per local axis
        self.bounds = bounds            # per local axis: positions it spans here
        self.base = base                # per local axis: where it starts
        self.group_base = base          # per local axis: where the first thread of the group starts
        self.apart = [0] * len(pieces)  # per local axis: positions by which the last thread starts later
        self.stores = -1                # the condition that this thread stores what it computes; -1: it does
        self.steps: dict[int, int] = {}         # of nodes in a vector that move evenly: from lane to lane
        self.whole_vectors = False      # whether the positions of a vector are all inside the stage, or none
        self.opened: list[list[Lin]] = [[] for _ in pieces]   # per local axis: values of the rows opened so far
        piece = next((p for p in pieces[lane] if p.row == vector_row), None) if lane >= 0 else None
        self.vector_axis = lane if piece is not None and piece.extent > 1 else -1   # the local axis that is the vector
        self.vector_row = vector_row
        self.vector_stride = piece.stride if piece is not None else 1
        self.width = width
        self.loops: list[StageLoop] = []        # outermost first
        self.offsets: list[int] = [0] * len(pieces)     # per local axis: the current position, from where the axis starts
        self.offsets_of = {i: itemgetter(*n.deps) for i, n in enumerate(r.nodes) if n.deps}     # node → offsets its value depends on
        self.safe: set[int] = set()     # local axes all of whose positions are known to be inside here
        self.narrow: set[int] = set()   # local axes whose iterations are parts of a tile
        self.aligned = False            # whether tiles are inside, and their vectors at multiples of their size in the output
        self.chunk = Chunk(0, 1, 1)
        self.memo: dict[Any, int] = {}  # values at positions, while the loops that are open stay
        self.linear: dict[Any, Any] = {}    # starts of axes and of addresses, while the loops that are open stay
        self.results: dict[tuple[int, int], int] = {}   # (reduction, component) → value, while a position is stored
        self.blocks: BlockedNest | None = None      # how the reduce loops are cut; None: they are not
        self.first: list[int] = []      # the values that accumulators begin with
        self.slots: list[int] = []      # per accumulator of the tile the number of the one that is carried for it; empty: its own
        self.sums: dict[Any, int] = {}   # what a correction of a dot instruction depends on → its accumulator
        self.partial: dict[tuple[int, ...], tuple[int, int]] = {}   # partial position → (number, vector width)

    # -- loops ---------------------------------------------------------------------------------------------
    def open_row(self, a: int, value: Lin) -> None:
        self.opened[a].append(value)
        self.linear.clear()
        self.memo.clear()

    def close_row(self, a: int) -> None:
        self.opened[a].pop()
        self.linear.clear()
        self.memo.clear()

    def reach(self, a: int) -> int:
        """Positions that one iteration of the innermost loop of an axis covers."""
        return block_of(self.pieces[a])

    def span(self, a: int) -> int:
        """Positions that the rows of an axis cover under the loops opened so far."""
        loops = [p for p in self.pieces[a] if p.role == LOOP]
        return span([p for p in self.pieces[a] if p.role != LOOP] + loops[len(self.opened[a]):])

    def is_last(self, a: int, loops: int = 1) -> bool:
        """Whether all loops of the axis are open after `loops` more."""
        return len(self.opened[a]) + loops == sum(p.role == LOOP for p in self.pieces[a])

    def tail_step(self, a: int) -> int:
        """Positions per iteration for the remainder of the innermost loop of an axis: single positions where grouping does not make them
        cheaper, a vector where the axis is the vector, half of a tile of accumulators."""
        reach, pieces = self.reach(a), self.pieces[a]
        if not is_contiguous(pieces):
            return reach
        if a == self.vector_axis:
            return self.width if self.vector_stride == 1 and reach % self.width == 0 else reach
        if a >= self.num_outs or not self.r.reductions:
            return 1
        return -(-reach // 2)

    @contextmanager
    def narrowed(self, a: int, step: int) -> Iterator[None]:
        """Narrow the iterations of an axis's innermost loop to `step` positions, of which the last may be outside."""
        if step == self.reach(a):
            yield
            return
        pieces, vector_stride, safe = self.pieces[a], self.vector_stride, a in self.safe
        cut: list[EmittedLoop] = []
        left, stride = step, 1
        for p in reversed(pieces):
            e = p.extent if p.role == LOOP else min(p.extent, left)
            cut.append(EmittedLoop(p.row, p.role, e, stride))
            stride *= e
            left = left if p.role == LOOP else -(-left // e)
        self.pieces[a] = tuple(reversed(cut))
        if self.vector_axis == a:
            self.vector_stride = next(p.stride for p in cut if p.row == self.vector_row)
        self.narrow.add(a)
        if step == 1:
            self.safe.add(a)
        yield
        self.narrow.discard(a)
        self.pieces[a], self.vector_stride = pieces, vector_stride
        if not safe:
            self.safe.discard(a)

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

    def left(self, a: int, at: int) -> int:
        """Positions of a reduce axis that its rows from number `at` on must cover."""
        pieces = self.pieces[a]
        return self.bounds[a] if all(p.extent == 1 for p in pieces[:at]) else pieces[at].extent * pieces[at].stride

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

    def number_of(self, piece: StageLoop) -> int:
        """The number of a loop among the rows of its axis, as the axis is cut now."""
        return next(i for i, p in enumerate(self.pieces[piece.axis]) if p.row == piece.piece.row)


Sink = Callable[[OpenStage], None]      # stores what a stage is at the current position
