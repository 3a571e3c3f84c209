"""The data of emission: staged values, and open stages."""
from __future__ import annotations

from collections.abc import Callable, Mapping
from operator import ge, itemgetter
from typing import Any, NamedTuple

from svod.core.kernel.layout import Layout
from svod.core.kernel.placement import span
from svod.core.kernel.required import Lin
from svod.core.kernel.scheduler import LOOP
from svod.core.tree.nodes import Body, Chunk, Frame


class Held(NamedTuple):
    """The elements of a stage that a thread has in registers. `terms`: per dim, the index values that the start of the elements is made
    of; `values`: position relative to that start, per dim → value."""

    terms: tuple[frozenset[tuple[int, int]], ...]
    values: dict[tuple[int, ...], int]


class Staged(NamedTuple):
    """A stage's value for its readers: in memory (`layout`), in registers (`held`) or, if it is a single element, a scalar."""

    scalar: int
    pointer: int
    layout: Layout | None
    base: tuple[Lin, ...]
    floor: int                     # the loop level at or inside which loads must stay
    version: int                   # increases each time the stage is computed again and its area overwritten
    guarded: bool                  # readers may request positions beyond the extent, so they load under a gate
    buffer: int = -1               # index value: elements before the buffer to read, if there are several buffers; -1: there is one
    held: Held | None = None


# `frame`, `safe` and `ahead` of an open stage: its tile, the axes that stay inside their extents, elements that prefetches run ahead
Place = tuple[Frame, frozenset[int], dict[int, int]]


class OpenStage:
    """A stage while its code is emitted: this thread's part of it, the current position in its loops, and the values known there.
    `frame`, `safe` and `ahead` come from the innermost body of the loop tree around that position."""

    __slots__ = ("ahead", "base", "chunk", "frame", "linear", "memo", "of_group", "offsets", "offsets_of", "opened", "r", "results", "safe",
                 "steps", "stores", "whole_vectors")

    def __init__(self, frame: Frame, base: list[Lin], safe: frozenset[int] = frozenset()):
        self.r = r = frame.r
        # -- the part of this thread
        self.base = base                # per local axis: the start of this thread's part
        # per local axis: start of the group's first thread, number of positions from there to the start of its last thread
        self.of_group: list[tuple[Lin, int]] = []
        self.stores = -1                # the condition that this thread stores its results; -1: always
        self.whole_vectors = False      # whether every vector is entirely inside the stage or entirely outside
        self.steps: Mapping[int, int] = {}  # node → difference of its values in neighbouring lanes, if that is constant
        # -- the current position in the loops
        self.frame = frame
        self.safe = safe                # local axes whose positions are all known to be inside their extents
        self.opened: list[list[Lin]] = [[] for _ in base]     # per local axis: the values of the loops opened so far
        self.ahead: dict[int, int] = {}     # load that prefetches → how many elements ahead it prefetches
        self.offsets: list[int] = [0] * len(base)             # per local axis: the current position, relative to the start
        self.chunk = Chunk(0, 1, 1)
        # -- values known at that position
        # node → getter of the offsets that its value depends on
        self.offsets_of = {i: itemgetter(*n.deps) for i, n in enumerate(r.nodes) if n.deps}
        self.memo: dict[Any, int] = {}  # values at positions; cleared when a loop opens or closes
        self.linear: dict[Any, Any] = {}    # starts of axes and of addresses; cleared when a loop opens or closes
        self.results: dict[tuple[int, int], int] = {}   # (reduction, component) → value, while one position is stored

    @property
    def index(self) -> int:
        """The number of the stage."""
        return self.r.stage.index

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
        """Return the number of positions of axis `a` that one iteration of the loops opened so far covers."""
        pieces = self.frame.pieces[a]
        loops = [p for p in pieces if p.role == LOOP]
        return span([p for p in pieces if p.role != LOOP] + loops[len(self.opened[a]):])

    def enter(self, body: Body) -> Place:
        """Make a body the innermost one. Returns the state to restore with `leave`."""
        before = self.frame, self.safe, self.ahead
        self.frame, self.safe = body.frame, body.safe
        if body.prefetches:
            self.ahead = {**self.ahead, **{p.node: p.ahead * p.step for p in body.prefetches}}
        return before

    def leave(self, before: Place) -> None:
        """Make the body that was innermost before `enter` the innermost one again."""
        self.frame, self.safe, self.ahead = before

    def set_position(self, offsets: dict[int, int], chunk: Chunk, more: dict[int, int] | None = None) -> bool:
        """Set the current position. Returns False if all of it is beyond the end of an axis."""
        frame, bounds = self.frame, self.frame.bounds
        self.offsets = off = [0] * len(bounds)
        for a, o in offsets.items():
            off[a] = o
        if more:
            for a, o in more.items():
                off[a] += o
        active, lane = chunk.active, frame.vector_axis
        if lane >= 0:
            off[lane] += chunk.offset * frame.vector_stride
            room = bounds[lane] - off[lane]
            if active > 1 and (active - 1) * frame.vector_stride >= room:
                active = -(-room // frame.vector_stride)
        self.chunk = chunk if active == chunk.active else Chunk(chunk.offset, chunk.width, active)
        return active > 0 and not any(map(ge, off, bounds))


Sink = Callable[[OpenStage], None]      # stores the stage's value at the current position
