"""Sketches of convolutions with fewer multiplications (`svod.core.kernel.algorithms.winograd`), for CPUs.

    WINOGRAD(out, 4) STAGE(U, root)                                            U once, at prepare
    … UPCAST(M.tiles, 14) UPCAST(M.o, 32) LANES(M.o.in)                        products: 28 vectors of results
    … PADTO(y, 16) UPCAST(y, 4) UPCAST(x, 4) UPCAST(o, 16) LANES(o.in)         a tile of results, transposed in registers
    … STAGE(M, root) STAGE(V, root) STAGE(x, root)                             all products of a point together
    … ORDER(out, y, o, x) TILE(y, 2) STAGE(M, y) STAGE(V, y) STAGE(x, y)       for blocks of rows that stay in a near cache

Channels are the innermost dim of all stages, so that every transform adds whole vectors, whatever the size of the image."""
from __future__ import annotations

from collections.abc import Iterator
from itertools import islice
from typing import NamedTuple

from svod.core.cost.sketch_contractions import tiles_of
from svod.core.cost.sketch_facts import bytes_of, extent_of, factors_of, name_of, resolved, try_opt
from svod.core.cost.template import Do, Hole, Point, Template, fact
from svod.core.kernel.algorithms.winograd import tile_sizes
from svod.core.kernel.kernel import ResolvedStage
from svod.core.kernel.placement import is_derived, vector_width
from svod.core.kernel.scheduler import ROOT, Scheduler
from svod.core.machine.levels import CACHE_LINE_BYTES

REGISTER_TILES = 3          # register tiles of the products to try
BLOCK_ROWS = (1, 2, 4, 8)   # rows of tiles in a block
BLOCK_CACHES = 2        # products and transformed data of a block may take so many times the second cache


class _Parts(NamedTuple):
    """The stages of a rewritten kernel. `windows`: the output's axes along which it has tiles; `lane`: its axis of the taps alone."""

    products: ResolvedStage
    taps: int
    data: int
    source: int             # the data before the transform
    windows: tuple[int, ...]
    lane: int


def _rewritten(p: Point) -> Scheduler | None:
    name = p.stage.stage.name
    after = try_opt(p.state, "WINOGRAD", name, p[_OUTPUTS])
    return None if after is p.state else after


def _parts(p: Point) -> _Parts | None:
    """Find the stages of a rewritten kernel; None if no axis is that of the taps alone."""
    state, kernel = p.state, p.state.kernel
    products = next(resolved(state, s.index) for s in reversed(kernel.stages) if s.has_reduce and not s.is_output)
    rows, operands = len(products.stage.outs) - len(p.outs), factors_of(state, products)
    if operands is None:
        return None
    windows = tuple([a for a in p.outs if extent_of(state, products, rows + a) < p.extent(a)])
    taps, data = sorted(operands, key=lambda x: rows + windows[0] in x.axes)
    lane = max((a for a in taps.axes - data.axes if a >= rows), key=lambda a: extent_of(state, products, a), default=-1)
    return _Parts(products, taps.stage, data.stage, _source(state, data.stage), windows, lane - rows) if lane >= 0 else None


def _source(state: Scheduler, s: int) -> int:
    """The first of the elementwise stages that a stage is computed from."""
    while True:
        reads = [q for q in state.kernel.reads[s] if is_derived(state.kernel.stages[q])]
        if not reads:
            return s
        s = reads[0]


def _blocks(p: Point) -> Iterator[int]:
    """Rows of tiles in a block; 0: a phase for each stage."""
    yield 0
    parts, first = p[_PARTS], p[_PARTS].windows[0]
    row = sum(bytes_of(p.state, s) for s in (parts.data, parts.products.stage.index)) // _tiles_along(p, first)
    for n in BLOCK_ROWS:
        if n * row <= BLOCK_CACHES * p.state.target.l2 and _tiles_along(p, first) >= n * p.state.target.threads:
            yield n


def _tiles_along(p: Point, window: int) -> int:
    return -(-p.extent(window) // p[_OUTPUTS])


def _staged(p: Point) -> Scheduler | None:
    """Compute the products, and what they read, in phases of their own, or block by block."""
    state, parts, n = p.state, p[_PARTS], p[_BLOCK]
    place = ROOT
    if n:
        place = p.name(parts.windows[0])
        state = try_opt(state, "TILE", place, n) if 1 < n < state.rows[state.row_id(place)].extent else state
        loops = [state.rows[row] for row in state.order[p.stage.stage.index] if state.rows[row].extent > 1]
        others = [a for a in p.outs if a not in (*parts.windows, parts.lane)]
        order = {axis: k for k, axis in enumerate([*others, *parts.windows[:-1], parts.lane, parts.windows[-1]])}
        loops.sort(key=lambda row: (order[p.stage.axes.index(row.axis)], -row.stride))
        if all(row.name != place for row in loops):
            return None
        state = try_opt(state, "ORDER", p.stage.stage.name, tuple([row.name for row in loops]))
    for s in (parts.products.stage.index, parts.data, parts.source):
        state = try_opt(state, "STAGE", state.kernel.stages[s].name, place)
    return state


def _register_tiles(p: Point) -> Iterator[tuple[int, int, int]]:
    """(lanes, tiles along the last window, tiles along the one before) of the products that are computed side by side: of few tiles all, so
    that the transformed taps are read once."""
    products = p[_PARTS].products
    lane, last, before = (extent_of(p.state, products, a) if a >= 0 else 1 for a in _axes_of_products(p))
    found = dict[tuple[int, int, int], None]()
    for n, m in tiles_of(lane, last * before, vector_width(p.state, products), p.state.target.vector_registers):
        if m <= last:
            found[n, m, 1] = None
        elif m % last == 0 and before % (m // last) == 0:
            found[n, last, m // last] = None
    yield from islice(found, REGISTER_TILES)


def _axes_of_products(p: Point) -> tuple[int, int, int]:
    """(vector axis, axis of tiles along the last window, along the one before or -1) of the products."""
    parts = p[_PARTS]
    rows = len(parts.products.stage.outs) - len(p.outs)
    return rows + parts.lane, rows + parts.windows[-1], rows + parts.windows[-2] if len(parts.windows) > 1 else -1


def _products(p: Point) -> Scheduler:
    state, products, (n, m, k) = p.state, p[_PARTS].products, p[_REGISTERS]
    lane, last, before = (name_of(state, products, a) if a >= 0 else "" for a in _axes_of_products(p))
    for axis, amount in ((before, k), (last, m), (lane, n)):
        state = try_opt(state, "UPCAST", axis, amount) if amount > 1 else state
    state = try_opt(state, "LANES", f"{lane}.in")
    state = try_opt(state, "UNROLL", name_of(state, products, len(products.stage.outs)), 2)
    return try_opt(state, "STAGE", state.kernel.stages[p[_PARTS].taps].name, ROOT)


def _tiles_beside(p: Point) -> Iterator[int]:
    """Tiles of results along the last window that are computed side by side: as many as a cache line holds, or half of them, if they divide
    the row, so that lines are stored once; and one, which is less code."""
    line = CACHE_LINE_BYTES // p.stage.stage.dtype.itemsize // p[_OUTPUTS]
    tiles = _tiles_along(p, p[_PARTS].windows[-1])
    yield from dict.fromkeys([next((n for n in (line, line // 2) if n > 1 and tiles % n == 0), 1), 1])


def _results(p: Point) -> Scheduler | None:
    """Tiles of the results, in vectors along the axis of the taps."""
    state, m = p.state, p[_OUTPUTS]
    for a in p[_PARTS].windows:
        name, extent = p.name(a), p.extent(a)
        state = try_opt(state, "PADTO", name, -(-extent // m) * m) if extent % m else state
        after = try_opt(state, "UPCAST", name, m * (p[_BESIDE] if a == p[_PARTS].windows[-1] else 1))
        if after is state:
            return None
        state = after
    lane = p.name(p[_PARTS].lane)
    return try_opt(try_opt(state, "UPCAST", lane, min(p.width, p.extent(p[_PARTS].lane))), "LANES", f"{lane}.in")


_OUTPUTS = Hole("outputs", lambda p: tile_sizes(p.state.kernel, p.stage.stage.name))
_PARTS = fact(_parts)
_REGISTERS = Hole("registers", _register_tiles)
_BLOCK = Hole("rows", _blocks)
_BESIDE = Hole("tiles", _tiles_beside)

WINOGRAD = Template("WINOGRAD", _OUTPUTS, Do(_rewritten), _PARTS, _REGISTERS, Do(_products), _BESIDE, Do(_results), _BLOCK, Do(_staged))
