"""Layouts of staged values in memory: dims in the order in which they are read, the vector innermost, in tiles where all readers use the
same ones.

    s1[i, k] read by a tile of 32 rows i in vectors, k summed up      [i/32][k][i%32]
    the same with 27 rows of 64                                       [3][k][27]               rows 0, 27 and 37 on: some lie twice
    an operand of bfloat16 that an instruction reads there            [k/64][i][k%64]          lines of 16 bytes, swizzled
    s0[i, k] read in all lanes                                        [i][k]                   rows along the sum
"""
from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import NamedTuple

from svod.core.kernel.intrinsics import Packed, plan_dot
from svod.core.kernel.intrinsics import TensorizePlan as DotPlan
from svod.core.kernel.kernel import Node, ResolvedStage
from svod.core.kernel.placement import EmittedLoop, Placement, fit, is_derived, place_stages, span, vector_row
from svod.core.kernel.scheduler import LOCAL, LOOP, UPCAST, Derived, Scheduler
from svod.core.machine.isa import LINE as LINE_BYTES
from svod.core.machine.levels import CACHE_LINE_BYTES

SET_STRIDE = 2048               # bytes: rows so far apart share the sets of the first cache, or every second of them
MOST_LINES = 8                  # most lines of a row that change places: those of 128 bytes
WIDE = 2                        # bytes of numbers of which an instruction turns lines that lie across the sum
AREA = 64                       # bytes: areas of shared memory begin at multiples of this
SWIZZLED = 1024                 # bytes: those of such rows begin at multiples of this


class Swizzle(NamedTuple):
    """An exchange of lines between neighbouring rows: line j of a row lies where line j XOR i % `lines` would, in the i-th eight lines of
    the area. So neither the lines of a row meet in one bank of shared memory, nor the same line of eight rows.

        rows of 4 lines:    0 1 2 3 | 0 1 2 3      rows 0 and 1
                            1 0 3 2 | 1 0 3 2      rows 2 and 3
    """

    line: int       # elements
    lines: int      # lines of a row: 2, 4 or 8

    @property
    def together(self) -> int:
        """Elements of eight lines."""
        return 8 * self.line

    @property
    def period(self) -> int:
        """Elements after which it is the same again."""
        return self.together * self.lines

    def place(self, element: int) -> int:
        """The place of an element."""
        return element ^ element // self.together % self.lines * self.line


class Layout(NamedTuple):
    """The layout of a staged value in memory. Element (p0, p1, …) stands at Σ stride·p, that of the tiled dim at (p // tile)·outer + p %
    tile. Where tiles do not divide the dim, the last one is moved back, as its readers' is; the overlap with the one before is stored
    twice."""

    extents: tuple[int, ...]
    strides: tuple[int, ...]
    order: tuple[int, ...]         # dims, outermost first
    tiled: int                     # the dim cut into tiles, or -1
    tile: int
    outer: int
    size: int                      # elements
    row_pad: int = 0               # elements behind each row of the innermost dim, in shared memory
    swizzle: Swizzle | None = None

    def place(self, position: Sequence[int]) -> int:
        """The element that stands at a position; no tile of it was moved back."""
        at = sum([p // self.tile * self.outer + p % self.tile * n if d == self.tiled else p * n
                  for d, (p, n) in enumerate(zip(position, self.strides, strict=True))])
        return at if self.swizzle is None else self.swizzle.place(at)

    @property
    def overlaps(self) -> bool:
        """Whether the last tile is moved back into the one before."""
        return self.tiled >= 0 and self.extents[self.tiled] % self.tile != 0


def is_exact(pieces: tuple[EmittedLoop, ...], extent: int) -> bool:
    """Whether the loops of an axis have `extent` positions together."""
    return prod([p.extent for p in pieces]) == extent


def block_of(pieces: tuple[EmittedLoop, ...]) -> int:
    """Positions that the expanded rows of an axis cover."""
    return span(p for p in pieces if p.role != LOOP)


def is_contiguous(pieces: tuple[EmittedLoop, ...]) -> bool:
    """Whether the expanded rows are the innermost ones, so that a tile is one block of positions."""
    seen = False
    for p in reversed(pieces):
        if p.extent == 1:
            continue
        if p.role == LOOP:
            seen = True
        elif seen:
            return False
    return True


def area_start(layout: Layout) -> int:
    """Bytes of a multiple of which an area of shared memory begins."""
    return SWIZZLED if layout.swizzle is not None else AREA


def area_bytes(layout: Layout, nbytes: int) -> int:
    """Bytes from one buffer of an area to the next, each of `nbytes`."""
    return -(-nbytes // area_start(layout)) * area_start(layout)


class TiledDim(NamedTuple):
    """The dim of a staged value that its readers take in whole tiles, and a tile's positions."""

    dim: int
    tile: int


UNTILED = TiledDim(-1, 1)


class Layouts(NamedTuple):
    """The layouts of a state, per stage: the order of its dims, the dim read in whole tiles, and the local axis that is the vector (or
    -1). For stages that are not copies also the vector's loop row, the dot instruction and how its operands are packed. `rows`: stages
    read in all lanes, with rows along the sum."""

    orders: dict[int, tuple[int, ...]]
    tiles: dict[int, TiledDim]
    vector_axes: dict[int, int]
    vector_rows: dict[int, int]
    dots: dict[int, DotPlan]
    packed: dict[int, Packed]
    rows: set[int]


@Derived
def layouts(state: Scheduler) -> Layouts:
    """The layouts of a state's stages, which follow from their readers."""
    plan = place_stages(state)
    result = Layouts({}, {}, {}, {}, {}, {}, set())
    for s in range(len(state.kernel.stages) - 1, -1, -1):       # readers before what they read
        r = plan.resolved[s]
        if r is None or plan.paths[s] is None:
            continue
        if not r.stage.is_output:
            result.orders[s], result.tiles[s] = _order(state, plan, result, s)
        if is_derived(r.stage):
            result.vector_axes[s] = result.orders[s][-1] if result.orders[s] else -1
            continue
        row = result.vector_rows[s] = vector_row(state, r)
        result.vector_axes[s] = r.axes.index(state.rows[row].axis) if row >= 0 else -1
        dot = plan_dot(state, r, result.vector_axes[s])
        if dot is not None:
            result.dots[s] = dot
            result.packed.update({o.stage: p for o, p in zip(dot.operands, dot.packed, strict=True)})
    return result


SIDE_BY_SIDE, VECTOR = 1 << 20, 1 << 21     # ranks of dims, after the depth of any loop: in a register tile; the vector


def _order(state: Scheduler, plan: Placement, layouts: Layouts, s: int) -> tuple[tuple[int, ...], TiledDim]:
    """The order in which a stage's dims are read (loops by depth, register tiles, vector), and the dim that is read in whole tiles."""
    dims = len(state.kernel.stages[s].outs)
    rank = [-1] * dims
    here = plan.resolved[s]
    copied = here is not None and any(n.kind == "load" for n in here.nodes)
    uses: set[TiledDim] = set()     # the tiles that each read could use
    for q in plan.readers[s]:
        r = plan.resolved[q]
        if r is None or plan.paths[q] is None:
            continue
        for node in r.read_nodes:
            if node.arg == s:
                ranks = _ranks_of_read(state, layouts, r, node, copied)
                rank = [max(pair) for pair in zip(rank, ranks, strict=True)]
                if not state.target.has_groups:     # a thread reads elements, not whole tiles
                    uses.add(_tile_of_read(state, plan, layouts.vector_axes[q], r, node))
    tiled = uses.pop() if len(uses) == 1 else UNTILED
    packed = layouts.packed.get(s)
    if dims and max(rank) < VECTOR and (packed is not None or plan.paths[s] == ()):
        # read as a value in all lanes: rows along the sum are few streams through memory, as it mostly lies there
        along = _summed_dim(state, plan, s) if packed is None else _innermost(here, packed)
        if along >= 0:
            rank[along] = VECTOR
            layouts.rows.add(s)
    if (packed is not None and tiled.dim == packed.dim) or tiled.tile <= 1 or state.kernel.stages[s].has_reduce:
        tiled = UNTILED
    return tuple(sorted(range(dims), key=lambda i: (rank[i], i))), tiled


def _innermost(r: ResolvedStage | None, packed: Packed) -> int:
    """The innermost dim of an operand: the one along the sum, or, of tiles that may be turned, the one that memory has innermost."""
    loads = [n.linear for n in r.nodes if n.kind == "load" and n.linear is not None] if r is not None else []
    by_row = packed.turns and loads and all(lin.coef(packed.row_dim) == 1 for lin in loads)
    return packed.row_dim if by_row else packed.dim


def _ranks_of_read(state: Scheduler, layouts: Layouts, r: ResolvedStage, node: Node, copied: bool) -> list[int]:
    """Per dim of a staged value the rank of one read: the depth of the loop that moves it, SIDE_BY_SIDE or VECTOR, or -1 where nothing
    moves it. `copied`: the value is read from memory, not computed from scratch."""
    s = r.stage.index
    lane = layouts.vector_axes[s]
    if is_derived(r.stage):
        at = {a: i for i, a in enumerate(layouts.orders[s])}
        return [max([VECTOR if a == lane else at[a] for a, _ in lin.coefs], default=-1) for lin in node.dims]
    rows, depth = state.rows, {row: i for i, row in enumerate(state.order[s])}
    # what is computed from scratch and read one element for all lanes keeps the order of the loops: its rows lie as those it is
    # computed from, in vectors
    tiles_inside = copied or any(a == lane for lin in node.dims for a, _ in lin.coefs)

    def rank_of(a: int) -> int:
        if a == lane:
            return VECTOR
        ids = state.axis_rows[r.axes[a]]
        if tiles_inside and any(rows[x].role in (UPCAST, LOCAL) and rows[x].extent > 1 for x in ids):
            return SIDE_BY_SIDE
        return max([depth.get(x, 0) for x in ids], default=0)
    return [max([rank_of(a) for a, _ in lin.coefs], default=-1) for lin in node.dims]


def _tile_of_read(state: Scheduler, plan: Placement, lane: int, r: ResolvedStage, node: Node) -> TiledDim:
    """The dim that a read moves along with its vector, and the positions of a tile of it."""
    dims = [i for i, lin in enumerate(node.dims) if any(a == lane for a, _ in lin.coefs)]
    return TiledDim(dims[-1], _tile_size(state, plan, r, node, dims[-1], lane)) if dims else UNTILED


def _summed_dim(state: Scheduler, plan: Placement, s: int) -> int:
    """The dim of a stage along which its readers' innermost reduce loop runs, or -1."""
    for q in plan.readers[s]:
        r = plan.resolved[q]
        if r is None or is_derived(r.stage):
            continue
        local = {axis: i for i, axis in enumerate(r.axes)}
        for row in reversed(state.order[q]):
            a = local[state.rows[row].axis]
            if a < len(r.stage.outs):
                continue
            return next((i for n in r.nodes if n.kind == "read" and n.arg == s for i, lin in enumerate(n.dims) if lin.coef(a)), -1)
    return -1


def _tile_size(state: Scheduler, plan: Placement, r: ResolvedStage, node: Node, dim: int, local: int) -> int:
    """Positions of the reader's vector axis that stand side by side if the dim is read in tiles of them, else 1."""
    lin = node.dims[dim]
    axis, extent = r.axes[local], state.axis_extent(r.axes[local])
    if lin.atoms or lin.const or lin.coefs != ((local, 1),) or plan.paths[r.stage.index] != () or is_derived(r.stage):
        return 1    # a stage inside another nest computes whatever part is asked for, not whole tiles of it
    kernel, pieces = state.kernel, fit(state, state.axis_rows[axis], extent)
    positions, block = kernel.axes[kernel.stages[node.arg].outs[dim]].extent, block_of(pieces)
    if not is_contiguous(pieces):
        return 1
    if not is_exact(pieces, extent) or positions % block:
        # tiles that do not divide the dim: the reader's last one is to be moved back to the end of it
        moved = local < len(r.stage.outs) and bool(r.reductions) and positions == extent
        if not moved or kernel.written or state.pads[axis] or kernel.axes[axis].bound is not None:
            return 1
    return block


def lay_out(state: Scheduler, layouts: Layouts, s: int, extents: tuple[int, ...], tiled: bool = True) -> Layout:
    """The layout of a region of stage `s`. Readers take it from the emitted stage (`Staged`), as regions may differ."""
    order = layouts.orders[s]
    dim, tile = layouts.tiles[s] if tiled else UNTILED
    if dim >= 0 and extents[dim] % tile and extents[dim] != state.kernel.axes[state.kernel.stages[s].outs[dim]].extent:
        dim, tile = UNTILED     # a part of the dim, which ends elsewhere
    packed = layouts.packed.get(s)
    if packed is not None and packed.line:
        return in_lines(order, extents, packed, packed.line)
    if packed is not None:
        # in words of a group: a step along the summed dim is a part of a word's stride, everything else moves by whole words
        words = tuple(e // packed.group if d == packed.dim else e for d, e in enumerate(extents))
        laid = _lay_out(order, words, dim, tile, SET_STRIDE // (packed.group * packed.dtype.itemsize) if s in layouts.rows else 0)
        inside = tuple(n if d == packed.dim else n * packed.group for d, n in enumerate(laid.strides))
        return laid._replace(extents=extents, strides=inside, outer=laid.outer * packed.group, size=laid.size * packed.group)
    return _lay_out(order, extents, dim, tile, SET_STRIDE // state.kernel.stages[s].dtype.itemsize if s in layouts.rows else 0)


def in_lines(order: tuple[int, ...], extents: tuple[int, ...], packed: Packed, line: int) -> Layout:
    """The innermost dim cut into rows of 8, 4 or 2 lines of `line` elements, as many as fit, those of neighbouring positions of the other
    dim of the tiles one behind the other, and swizzled. Where tiles begin anywhere along the other dim a row is one line."""
    inner = order[-1]
    other = packed.row_dim if inner == packed.dim else packed.dim
    whole = -(-extents[inner] // line)
    lines = min(MOST_LINES, whole & -whole) if packed.whole_tiles else 1
    parts, row = whole // lines, line * lines
    outer = (extents[other] + (left_out(extents[other], parts) if lines == 1 < parts else 0)) * row
    strides, size = [0] * len(extents), parts * outer
    strides[inner], strides[other] = 1, row
    order = (*[d for d in order if d not in (inner, other)], other, inner)
    for d in reversed(order[:-2]):
        strides[d] = size
        size *= extents[d]
    return Layout(extents, tuple(strides), order, inner if parts > 1 else -1, row, outer, size,
                  swizzle=Swizzle(line, lines) if lines > 1 else None)


def swizzled_lines(layouts: Layouts, s: int, extents: tuple[int, ...]) -> Layout | None:
    """The layout in shared memory of a copy for tiles that a subgroup holds, if each line of a tile is 16 bytes beside each other, and the
    lines of a tile are in one row; else None."""
    packed, order = layouts.packed[s], layouts.orders[s]
    inner, size = order[-1], packed.dtype.itemsize
    dot, number = next((plan.dot, n) for plan in layouts.dots.values() for n, o in enumerate(plan.operands) if o.stage == s)
    if not packed.whole_tiles or len(order) < 2 or (inner != packed.dim and size != WIDE):
        return None
    laid = in_lines(order, extents, packed, LINE_BYTES // size)
    width = dot.depth if inner == packed.dim else (dot.rows, dot.columns)[number]
    return laid if laid.swizzle is not None and width <= laid.tile else None


def left_out(lines: int, parts: int) -> int:
    """Padding after each part of `lines` 16-byte lines, so that threads that copy neighbouring parts hit different banks: parts begin an
    odd multiple of an eighth, a quarter or half of the banks apart."""
    apart = max(1, MOST_LINES // parts)
    return (apart - lines) % (2 * apart)


def _lay_out(order: tuple[int, ...], extents: tuple[int, ...], dim: int, tile: int, apart: int) -> Layout:
    """The layout. `apart`: rows of a multiple of so many elements are padded by a cache line, for other sets; 0: no padding."""
    strides = [0] * len(extents)
    if dim >= 0 and tile < extents[dim]:
        size = tile
        for d in reversed(order):
            if d != dim:
                strides[d] = size
                size *= extents[d]
        strides[dim] = 1
        return Layout(extents, tuple(strides), order, dim, tile, size, size * -(-extents[dim] // tile))
    order = tuple(sorted(order, key=lambda d: extents[d] != 1))   # stable: axes of one position go outermost
    size = 1
    for d in reversed(order):
        strides[d] = size
        size *= extents[d]
        if apart and d == order[-1] and size % apart == 0:
            size += apart * CACHE_LINE_BYTES // SET_STRIDE
    return Layout(extents, tuple(strides), order, -1, 1, 0, size)
