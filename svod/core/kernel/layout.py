"""Layouts of staged values in memory. Dims lie in the order in which they are read, the readers' vector innermost; in tiles if all readers
read the same tiles.

    s1[i, k] read by a tile of 32 rows i in vectors, k summed up      [i/32][k][i%32]
    the same with 27 rows of 64                                       [3][k][27]               rows 0, 27 and 37 on: some lie twice
    an operand of bfloat16, read by an instruction                    [k/64][i][k%64]          lines of 16 bytes, swizzled
    s0[i, k] read in all lanes                                        [i][k]                   rows along the sum
"""
from __future__ import annotations

from collections.abc import Collection, Sequence
from math import prod
from typing import NamedTuple

from svod.core.kernel.intrinsics import Packed, plan_dot
from svod.core.kernel.intrinsics import TensorizePlan as DotPlan
from svod.core.kernel.kernel import LinearIndex, Node, ResolvedStage
from svod.core.kernel.placement import EmittedLoop, Placement, fit, is_derived, place_stages, span, vector_row
from svod.core.kernel.scheduler import LOCAL, LOOP, UPCAST, Derived, Scheduler
from svod.core.machine.isa import MATRIX_LINE_BYTES as LINE_BYTES
from svod.core.machine.levels import CACHE_LINE_BYTES

SET_STRIDE = 2048               # bytes; rows that are multiples of this apart begin in one or two sets of the first cache
MOST_SWIZZLE_LINES = 8          # most lines in a row of a swizzle: 128 bytes
TRANSPOSED_BYTES = 2            # bytes of the numbers that an instruction can transpose if lines do not run along the sum
AREA = 64                       # bytes; areas of shared memory begin at multiples of this
SWIZZLED = 1024                 # bytes; areas with a swizzle begin at multiples of this


class Swizzle(NamedTuple):
    """A permutation of the lines in each row that avoids bank conflicts: in the i-th block of eight lines of the area, line j of a row is
    stored at the place of line j XOR (i % `lines`). Then neither the lines of one row nor the same line of eight rows share a bank.

        rows of 4 lines:    0 1 2 3 | 0 1 2 3      rows 0 and 1
                            1 0 3 2 | 1 0 3 2      rows 2 and 3
    """

    line: int       # elements of a line
    lines: int      # lines of a row: 2, 4 or 8

    @property
    def together(self) -> int:
        """Elements of a block of eight lines, in which all rows have the same permutation."""
        return 8 * self.line

    @property
    def period(self) -> int:
        """Elements after which the pattern repeats."""
        return self.together * self.lines

    def place(self, element: int) -> int:
        """The place in memory of an element, in elements."""
        return element ^ element // self.together % self.lines * self.line


class Layout(NamedTuple):
    """The layout of a staged value in memory. Element (p0, p1, …) lies at Σ stride·p, where the tiled dim contributes (p // tile)·outer +
    (p % tile)·stride instead. If tiles do not divide that dim, the last tile is moved back, as that of its readers is, and the overlap with
    the tile before is stored twice."""

    extents: tuple[int, ...]
    strides: tuple[int, ...]
    order: tuple[int, ...]         # dims, outermost first
    tiled: int                     # the dim that is cut into tiles, or -1
    tile: int
    outer: int
    size: int                      # elements
    row_pad: int = 0               # elements of padding after each row of the innermost dim, in shared memory
    swizzle: Swizzle | None = None

    def place(self, position: Sequence[int]) -> int:
        """The element number of a position. The layout must not have a tile that was moved back."""
        at = sum([p // self.tile * self.outer + p % self.tile * n if d == self.tiled else p * n
                  for d, (p, n) in enumerate(zip(position, self.strides, strict=True))])
        return at if self.swizzle is None else self.swizzle.place(at)

    def flat(self, dims: Sequence[LinearIndex]) -> LinearIndex:
        """The element number of a read at the coordinates `dims`. The layout must have no tiles and no swizzle."""
        coefs, atoms, const = dict[int, int](), dict[int, int](), 0
        for lin, stride in zip(dims, self.strides, strict=True):
            const += lin.const * stride
            for total, terms in ((coefs, lin.coefs), (atoms, lin.atoms)):
                for x, c in terms:
                    total[x] = total.get(x, 0) + c * stride
        moving, looked_up = (tuple(sorted((x, c) for x, c in total.items() if c)) for total in (coefs, atoms))
        return LinearIndex(moving, const, looked_up)

    @property
    def overlaps(self) -> bool:
        """Whether the last tile is moved back, so that it overlaps the tile before."""
        return self.tiled >= 0 and self.extents[self.tiled] % self.tile != 0


def is_exact(pieces: tuple[EmittedLoop, ...], extent: int) -> bool:
    """Whether the loops of an axis cover exactly `extent` positions."""
    return prod([p.extent for p in pieces]) == extent


def block_of(pieces: tuple[EmittedLoop, ...]) -> int:
    """Positions of an axis that one iteration of its loops spans: the span of its rows that are no loops."""
    return span(p for p in pieces if p.role != LOOP)


def is_contiguous(pieces: tuple[EmittedLoop, ...]) -> bool:
    """Whether all rows of an axis that are no loops are inside of its loops, so that a tile is one contiguous block of positions."""
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
    """The alignment, in bytes, of an area of shared memory."""
    return SWIZZLED if layout.swizzle is not None else AREA


def area_bytes(layout: Layout, nbytes: int) -> int:
    """Bytes from one buffer of a copy to the next, if a buffer needs `nbytes`."""
    return -(-nbytes // area_start(layout)) * area_start(layout)


class TiledDim(NamedTuple):
    """The dim of a staged value that its readers read in whole tiles, and the positions of a tile."""

    dim: int
    tile: int


UNTILED = TiledDim(-1, 1)


class Layouts(NamedTuple):
    """The layouts of a state, by stage. `orders`: the stage's dims, outermost first; `tiles`: the dim read in whole tiles;
    `vector_axes`: the local axis of its vector, or -1; `packed`: the form of an operand of a dot instruction. Only for stages that are
    not copies: `vector_rows`, the vector's loop row; `dots`, the dot instruction. `rows`: stages of which readers load one value for all
    lanes, laid out with rows along the sum."""

    orders: dict[int, tuple[int, ...]]
    tiles: dict[int, TiledDim]
    vector_axes: dict[int, int]
    vector_rows: dict[int, int]
    dots: dict[int, DotPlan]
    packed: dict[int, Packed]
    rows: set[int]


@Derived
def layouts(state: Scheduler) -> Layouts:
    """The layouts of a state's stages, derived from their readers."""
    plan = place_stages(state)
    result = Layouts({}, {}, {}, {}, {}, {}, set())
    for s in range(len(state.kernel.stages) - 1, -1, -1):       # readers come before the stages that they read
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


SIDE_BY_SIDE, VECTOR = 1 << 20, 1 << 21     # ranks of dims, above any depth of a loop: in a register tile, and the vector


def _order(state: Scheduler, plan: Placement, layouts: Layouts, s: int) -> tuple[tuple[int, ...], TiledDim]:
    """The order of a stage's dims, as they are read (loops by depth, then register tiles, then the vector), and the dim that is read in
    whole tiles."""
    dims = len(state.kernel.stages[s].outs)
    rank = [-1] * dims
    here = plan.resolved[s]
    copied = here is not None and any(n.kind == "load" or _is_of_phase(state, plan, n) for n in here.nodes)
    uses: set[TiledDim] = set()     # tiles in which readers could read the value
    for q in plan.readers[s]:
        r = plan.resolved[q]
        if r is None or plan.paths[q] is None:
            continue
        ranked = set[tuple[Collection[int], ...]]()     # what moves the dims of the reads so far
        for node, moving in r.reads_with_axes():
            if node.arg == s:
                if (moved := _moved_by(state, node, moving)) not in ranked:
                    ranked.add(moved)
                    ranks = _ranks_of_read(state, layouts, r, moved, copied)
                    rank = [max(pair) for pair in zip(rank, ranks, strict=True)]
                if not state.target.has_groups:     # on a grid a thread reads single elements, not whole tiles
                    uses.add(_tile_of_read(state, plan, layouts.vector_axes[q], r, node))
    tiled = uses.pop() if len(uses) == 1 else UNTILED
    packed = layouts.packed.get(s)
    if dims and max(rank) < VECTOR and (packed is not None or plan.paths[s] == ()):
        # Each read takes one value for all lanes: rows along the sum then give few streams through memory, as the source is mostly laid out
        # like that.
        along = _summed_dim(state, plan, s) if packed is None else _innermost(here, packed)
        if along >= 0:
            rank[along] = VECTOR
            layouts.rows.add(s)
    if (packed is not None and tiled.dim == packed.dim) or tiled.tile <= 1 or state.kernel.stages[s].has_reduce:
        tiled = UNTILED
    return tuple(sorted(range(dims), key=lambda i: (rank[i], i))), tiled


def _innermost(r: ResolvedStage | None, packed: Packed) -> int:
    """The innermost dim of a packed operand: the one that is summed over; if tiles may be transposed, the one that is innermost in the
    source."""
    loads = [n.linear for n in r.nodes if n.kind == "load" and n.linear is not None] if r is not None else []
    by_row = packed.turns and loads and all(lin.coef(packed.row_dim) == 1 for lin in loads)
    return packed.row_dim if by_row else packed.dim


def _is_of_phase(state: Scheduler, plan: Placement, n: Node) -> bool:
    """Whether a node reads a value that another phase has stored in the memory of a device, which is read like an argument."""
    return state.target.has_groups and n.kind == "read" and plan.paths[n.arg] == ()


def _moved_by(state: Scheduler, node: Node, moving: tuple[frozenset[int], ...]) -> tuple[Collection[int], ...]:
    """Per dim of a read, the axes of the reader that order the dim: on a grid all that move it, also by a quotient such as o1 // 4, as
    neighbouring threads read neighbouring elements; else only those that move it evenly."""
    return moving if state.target.has_groups else tuple([tuple([a for a, _ in lin.coefs]) for lin in node.dims])


def _ranks_of_read(state: Scheduler, layouts: Layouts, r: ResolvedStage, dims: Sequence[Collection[int]], copied: bool) -> list[int]:
    """The rank of each dim of a staged value in one read, of which the axes in `dims` move each: the depth of the loop that moves it,
    SIDE_BY_SIDE in a register tile, or VECTOR; -1 if nothing moves it. `copied`: the value is loaded from memory, not computed from values
    in scratch memory."""
    s = r.stage.index
    lane = layouts.vector_axes[s]
    if is_derived(r.stage):
        at = {a: i for i, a in enumerate(layouts.orders[s])}
        return [max([VECTOR if a == lane else at[a] for a in axes], default=-1) for axes in dims]
    rows, depth = state.rows, {row: i for i, row in enumerate(state.order[s])}
    # A value that is computed from scratch memory, and of which a read broadcasts one element to all lanes, has the order of the loops that
    # compute it, not of its readers' tiles: vectors of its sources then become vectors of it.
    tiles_inside = copied or any(lane in axes for axes in dims)

    def rank_of(a: int) -> int:
        if a == lane:
            return VECTOR
        ids = state.axis_rows[r.axes[a]]
        if tiles_inside and any(rows[x].role in (UPCAST, LOCAL) and rows[x].extent > 1 for x in ids):
            return SIDE_BY_SIDE
        return max([depth.get(x, 0) for x in ids], default=0)
    return [max([rank_of(a) for a in axes], default=-1) for axes in dims]


def _tile_of_read(state: Scheduler, plan: Placement, lane: int, r: ResolvedStage, node: Node) -> TiledDim:
    """The dim that a read's vector moves along, and the positions of a tile of it; UNTILED if there is none."""
    dims = [i for i, lin in enumerate(node.dims) if any(a == lane for a, _ in lin.coefs)]
    return TiledDim(dims[-1], _tile_size(state, plan, r, node, dims[-1], lane)) if dims else UNTILED


def _summed_dim(state: Scheduler, plan: Placement, s: int) -> int:
    """The dim of a stage along which its readers' innermost reduce loop runs; -1 if there is none."""
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
    """The size of the tiles in which a reader reads a dim: the positions of its vector axis in a register tile; 1 if it does not read whole
    tiles."""
    lin = node.dims[dim]
    axis, extent = r.axes[local], state.axis_extent(r.axes[local])
    if lin.atoms or lin.const or lin.coefs != ((local, 1),) or is_derived(r.stage) or not _is_whole(state, plan, r, local):
        return 1
    kernel, pieces = state.kernel, fit(state, state.axis_rows[axis], extent)
    positions, block = kernel.axes[kernel.stages[node.arg].outs[dim]].extent, block_of(pieces)
    if not is_contiguous(pieces):
        return 1
    if not is_exact(pieces, extent) or positions % block:
        # Tiles that do not divide the dim: allowed if the reader's last tile is moved back to the end of the dim.
        moved = local < len(r.stage.outs) and bool(r.reductions) and positions == extent
        if not moved or kernel.written or state.pads[axis] or kernel.axes[axis].bound is not None:
            return 1
    return block


def _is_whole(state: Scheduler, plan: Placement, r: ResolvedStage, local: int) -> bool:
    """Whether a stage is computed along one of its axes as a whole, at each place: no loop around it decides which part, which need not be
    whole tiles."""
    path = plan.paths[r.stage.index] or ()
    if not path or local >= len(r.stage.outs):
        return True
    opened = {row for t, depth in path for row in state.order[t][:depth]}
    for q, node in plan.reads_of(r.stage.index):
        lin = node.dims[local]
        if lin.atoms or lin.const or len(lin.coefs) != 1 or lin.coefs[0][1] != 1 or is_derived(q.stage):
            return False
        a = lin.coefs[0][0]
        if state.pads[q.axes[a]] or not opened.isdisjoint(state.axis_rows[q.axes[a]]) or not _is_whole(state, plan, q, a):
            return False
    return True


def lay_out(state: Scheduler, layouts: Layouts, s: int, extents: tuple[int, ...], tiled: bool = True) -> Layout:
    """The layout of a region of stage `s` with these extents. A stage that is computed at several places of the loop tree may have
    another region, and so another layout, at each. `tiled`: the layout may be in tiles."""
    order = layouts.orders[s]
    dim, tile = layouts.tiles[s] if tiled else UNTILED
    if dim >= 0 and extents[dim] % tile and extents[dim] != state.kernel.axes[state.kernel.stages[s].outs[dim]].extent:
        dim, tile = UNTILED     # the region is a part of the dim, and need not end where a tile does
    packed = layouts.packed.get(s)
    if packed is not None and packed.line:
        return in_lines(order, extents, packed, packed.line)
    if packed is not None:
        # Strides in words of one group: a step along the summed dim is part of a word, a step along other dims is whole words.
        words = tuple(e // packed.group if d == packed.dim else e for d, e in enumerate(extents))
        laid = _lay_out(order, words, dim, tile, SET_STRIDE // (packed.group * packed.dtype.itemsize) if s in layouts.rows else 0)
        inside = tuple(n if d == packed.dim else n * packed.group for d, n in enumerate(laid.strides))
        return laid._replace(extents=extents, strides=inside, outer=laid.outer * packed.group, size=laid.size * packed.group)
    return _lay_out(order, extents, dim, tile, SET_STRIDE // state.kernel.stages[s].dtype.itemsize if s in layouts.rows else 0)


def in_lines(order: tuple[int, ...], extents: tuple[int, ...], packed: Packed, line: int) -> Layout:
    """The layout of an operand in lines of `line` elements. The innermost dim is cut into rows of 8, 4 or 2 lines, as many as fit. Rows of
    neighbouring positions of the tiles' other dim follow one another, and are swizzled. If tiles may begin anywhere along that dim, a row
    is one line."""
    inner = order[-1]
    other = packed.row_dim if inner == packed.dim else packed.dim
    whole = -(-extents[inner] // line)
    lines = min(MOST_SWIZZLE_LINES, whole & -whole) if packed.whole_tiles else 1
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
    """The swizzled layout of an operand in shared memory, for tiles that a subgroup holds. None if a line of a tile is not 16 contiguous
    bytes, or a tile needs more than one row of lines."""
    packed, order = layouts.packed[s], layouts.orders[s]
    inner, size = order[-1], packed.dtype.itemsize
    dot, number = next((plan.dot, n) for plan in layouts.dots.values() for n, o in enumerate(plan.operands) if o.stage == s)
    if not packed.whole_tiles or len(order) < 2 or (inner != packed.dim and size != TRANSPOSED_BYTES):
        return None
    laid = in_lines(order, extents, packed, LINE_BYTES // size)
    width = dot.depth if inner == packed.dim else (dot.rows, dot.columns)[number]
    return laid if laid.swizzle is not None and width <= laid.tile else None


def left_out(lines: int, parts: int) -> int:
    """Padding after each part of `lines` 16-byte lines, so that threads that copy neighbouring parts hit different banks: parts begin an
    odd multiple of an eighth, a quarter or half of the banks apart."""
    apart = max(1, MOST_SWIZZLE_LINES // parts)
    return (apart - lines) % (2 * apart)


def _lay_out(order: tuple[int, ...], extents: tuple[int, ...], dim: int, tile: int, apart: int) -> Layout:
    """The layout of `extents` in a given order. `dim`, `tile`: the dim in tiles, or -1. `apart`: elements; rows whose length is a
    multiple of this are padded by a cache line, so that they use different cache sets; 0: no padding."""
    strides = [0] * len(extents)
    if dim >= 0 and tile < extents[dim]:
        size = tile
        for d in reversed(order):
            if d != dim:
                strides[d] = size
                size *= extents[d]
        strides[dim] = 1
        return Layout(extents, tuple(strides), order, dim, tile, size, size * -(-extents[dim] // tile))
    order = tuple(sorted(order, key=lambda d: extents[d] != 1))   # stable sort: dims of one position go outermost
    size = 1
    for d in reversed(order):
        strides[d] = size
        size *= extents[d]
        if apart and d == order[-1] and size % apart == 0:
            size += apart * CACHE_LINE_BYTES // SET_STRIDE
    return Layout(extents, tuple(strides), order, -1, 1, 0, size)
