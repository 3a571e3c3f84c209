"""What a phase is emitted with: linear forms over index values, layouts of staged values, and a stage's nest while it is open."""
from __future__ import annotations

from typing import Any, NamedTuple

from svod.core.kernel.kernel import ResolvedStage
from svod.core.kernel.layout import Layout
from svod.core.kernel.placement import EmittedLoop

Terms = dict[int, int]          # index value → coefficient
Lin = tuple[Terms, int]         # Σ coefficient·value + constant

MAX_TILE_VECTORS = 4            # vectors side by side in derived copy loops
COMPUTED_TWICE = 16             # at most one in so many positions of a copied row, so that iterations are of several vectors
MASKED_ROW_VECTORS = 16         # vectors of a row under a mask that are copied without a loop
COPY_LANES, COPY_ROWS = -2, -3  # the row numbers of the vector in derived loops, and of the tile beside it
NO_POINT = -2                   # depth of a derived loop: no stage lives there
FEW_ROWS = 2                    # so many rows of a tile are computed one by one, where the tile is larger and the number known at run time
SLACK = 128                     # bytes behind each scratch area: a partial vector may be read past its end


def sum_lins(values: list[Lin]) -> Lin:
    total: Lin = ({}, 0)
    for v in values:
        total = add_lins(total, v, 1)
    return total


def add_lins(a: Lin, b: Lin, k: int) -> Lin:
    """a + k·b; terms that cancel vanish."""
    terms = dict(a[0])
    for v, c in b[0].items():
        n = terms.get(v, 0) + k * c
        if n:
            terms[v] = n
        else:
            terms.pop(v, None)
    return terms, a[1] + k * b[1]


class Staged(NamedTuple):
    """A stage's value for its readers: in memory (`layout`) or, for a single element, a scalar."""

    scalar: int
    pointer: int
    layout: Layout | None
    base: tuple[Lin, ...]
    floor: int                     # loads stay at or below this level
    version: int                   # which content of its area: an area is written again where a stage is computed twice
    guarded: bool                  # positions beyond the extent may be asked for: read under a gate


class Chunk(NamedTuple):
    """A part of the vector axis: `offset` of its first lane in positions of the row, vector `width`, lanes in use."""

    offset: int
    width: int
    active: int


def chunks_of(extent: int, width: int) -> tuple[Chunk, ...]:
    """The row of `extent` positions as vectors of at most `width` lanes, the last one narrower or masked."""
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


def copy_step(extent: int, width: int) -> int:
    """Positions of a row of `extent` that one iteration of a copy covers: several vectors of `width` where they divide it, or where the
    last ones, which are moved back then, compute little of it again."""
    for k in (MAX_TILE_VECTORS, 2):
        if extent % (k * width) == 0 or (extent > k * width and -extent % (k * width) * COMPUTED_TWICE <= extent):
            return k * width
    return min(extent, width)


def exact_step(extent: int, width: int) -> int:
    """`copy_step` that divides the row: several vectors, one, or single positions."""
    return next((k * width for k in (MAX_TILE_VECTORS, 2, 1) if extent % (k * width) == 0), 1)


class Nest:
    """One stage while it is emitted: its loops, the values of its axes, the current vector chunk."""

    __slots__ = ("aligned", "base", "bounds", "chunk", "lane", "lane_row", "lane_stride", "linear", "memo", "narrow", "offsets", "opened",
                 "partial", "pieces", "r", "results", "safe", "sums", "width")

    def __init__(self, r: ResolvedStage, pieces: list[tuple[EmittedLoop, ...]], bounds: list[int], base: list[Lin], lane: int,
                 lane_row: int, width: int):
        self.r = r
        self.pieces = pieces            # per local axis
        self.bounds = bounds            # per local axis: positions it spans here
        self.base = base                # per local axis: where it starts
        self.opened: list[list[Lin]] = [[] for _ in pieces]   # per local axis: values of the rows opened so far
        piece = next((p for p in pieces[lane] if p.row == lane_row), None) if lane >= 0 else None
        self.lane = lane if piece is not None and piece.extent > 1 else -1   # the local axis that is the vector
        self.lane_row = lane_row
        self.lane_stride = piece.stride if piece is not None else 1
        self.width = width
        self.offsets: list[int] = [0] * len(pieces)
        self.safe: set[int] = set()     # local axes all of whose positions are known to be inside here
        self.narrow: set[int] = set()   # local axes whose iterations are parts of a tile
        self.aligned = False            # whether tiles are inside, and their vectors at multiples of their size in the output
        self.chunk = Chunk(0, 1, 1)
        self.memo: dict[Any, int] = {}
        self.linear: dict[Any, Any] = {}
        self.results: dict[tuple[int, int], int] = {}   # (reduction, component) → value, while a position is stored
        self.sums: dict[Any, int] = {}   # what a correction of a dot instruction depends on → its accumulator
        self.partial: dict[tuple[int, ...], tuple[int, int]] = {}   # partial position → (number, vector width)
