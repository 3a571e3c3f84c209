"""The loops of copies. They are derived from how the copy is read, or from the instruction that a packed operand is for; opts do not change
them.

    s1[512, 256] read by vectors of dim 0     for j in 0…256: for i in 0…512 by 64: 4 vectors of 16 along i
    the same, contiguous in memory along j    for j by 16: for i by 64: for 16 of these: a square of 16 × 16, transposed in registers
    the same of constants, at prepare         for j by 16: for i by 64: for 64 of these: for 16 of j: one element
    a row of 37 under a mask                  straight-line code: its masks are constants, and most of them go away
    where(j = 0, a[i], where(j = 1, b[i], …))  all j in one iteration: what differs between them is known
"""
from __future__ import annotations

from math import prod
from typing import NamedTuple

from svod.core.kernel.intrinsics import Packed
from svod.core.kernel.kernel import ResolvedStage
from svod.core.kernel.layout import Layout
from svod.core.kernel.placement import COPY_GROUP, COPY_ROWS, COPY_VECTOR, NO_ROW, EmittedLoop
from svod.core.kernel.scheduler import DOT, LOOP, UPCAST

MAX_TILE_VECTORS = 4            # most vectors side by side in one iteration of a copy loop
COMPUTED_TWICE = 16             # an iteration covers several vectors only if at most one in so many positions of the row is copied twice
MASKED_ROW_VECTORS = 16         # most vectors of a masked row that are copied without a loop
LINE_ELEMENTS = 16              # most neighbours in memory that a copy of single elements reads one after another
MAX_TILE_ROWS = 8               # most rows in one iteration of a copy loop, and most vectors in all these rows
MOST_CHOICES = 64               # most positions of the dims that choose among expressions, which become straight-line code


class CopyLoops(NamedTuple):
    """The loops of a copy stage. `vector`: the dim whose loop COPY_VECTOR is the vector; `width`: its lanes."""

    axes: list[tuple[EmittedLoop, ...]]     # per dim, outermost first
    vector: int                             # the dim of the vectors, or -1
    width: int
    last: int = -1                          # the dim whose innermost loop is inside those of all other dims; -1: that of the last dim


def copy_step(extent: int, width: int) -> int:
    """Positions of a row that one iteration of a copy covers: four or two vectors if they divide the row or copy few positions twice, else
    one vector."""
    for k in (MAX_TILE_VECTORS, 2):
        if extent % (k * width) == 0 or (extent > k * width and -extent % (k * width) * COMPUTED_TWICE <= extent):
            return k * width
    return min(extent, width)


def exact_step(extent: int, width: int) -> int:
    """Like `copy_step`, but the step always divides the row: several vectors, one vector, or a single position."""
    return next((k * width for k in (MAX_TILE_VECTORS, 2, 1) if extent % (k * width) == 0), 1)


def copy_loops(r: ResolvedStage, extents: list[int], order: tuple[int, ...], width: int, tile: int = 0, exact: bool = False,
               single: bool = False) -> CopyLoops:
    """Build the loops of a copy of `extents` positions. `order`: dims, outermost first; vectors of `width` lanes run along the last.
    `tile`: size of the layout's tiles along that dim, or 0. `exact`: no position may be computed twice. `single`: an iteration transposes
    one square, and not all squares of a step: less code to compile."""
    loops: list[tuple[EmittedLoop, ...]] = [(EmittedLoop(NO_ROW, LOOP, e, 1),) for e in extents]
    if not order:
        return CopyLoops(loops, -1, width)
    inner = order[-1]
    extent = extents[inner]
    if choosing := choosing_dims(r, extents, inner):
        step = _few_at_a_time(extents, choosing, extent, width) if exact else tile or min(extent, width)
        return _choosing_loops(loops, extents, choosing, inner, step, width)
    masked = _masked_source_dim(r, inner)
    if masked >= 0 and not tile and _has_squares(extents[masked], extent, width, exact):
        # The source is contiguous along another dim, under a mask: vectors run along it, and results are transposed in registers.
        loops[masked], loops[inner] = _split(extents[masked], width, COPY_VECTOR), _split(extent, width, COPY_ROWS)
        return CopyLoops(loops, masked, width)
    step = tile or _step(r, inner, extent, width, exact)
    loops[inner] = _split(extent, step, COPY_VECTOR)
    vectors = -(-step // width)
    square = min(step, width)
    source = _source_dim(r, inner)
    if source >= 0 and square >= 4 and square & (square - 1) == 0 and _has_squares(extents[source], step, square, exact) \
            and step % square == 0:
        # The source is contiguous along another dim: copy squares, which are transposed in registers.
        loops[source] = _split(extents[source], square, COPY_ROWS)
        if single:
            loops[inner] = _split_in_squares(extent, step, square)
    elif len(order) > 1 and vectors < MAX_TILE_VECTORS and step == extent:
        outer = order[-2]
        rows = next((k for k in (8, 4, 2) if extents[outer] % k == 0 and k * vectors <= MAX_TILE_ROWS), 1)
        if rows > 1:
            loops[outer] = _split(extents[outer], rows, COPY_ROWS)
    return CopyLoops(loops, inner, width)


def single_loops(r: ResolvedStage, extents: list[int], order: tuple[int, ...], width: int, tile: int = 0) -> CopyLoops | None:
    """Build the loops of a copy that moves one element at a time: a tenth of the code of vectors that are transposed. Neighbours in memory
    follow one another, so that a cache line that was read is used. None for copies that compute, or that read memory contiguously, and if
    the layout's tiles overlap."""
    source = _source_dim(r, order[-1]) if order else -1
    if source < 0 or any(n.kind not in ("load", "cast") for n in r.nodes) or (tile and extents[order[-1]] % tile):
        return None
    loops: list[tuple[EmittedLoop, ...]] = [(EmittedLoop(NO_ROW, LOOP, e, 1),) for e in extents]
    for dim, step in ((order[-1], tile), (source, next(n for n in range(LINE_ELEMENTS, 0, -1) if extents[source] % n == 0))):
        if 1 < step < extents[dim]:
            loops[dim] = EmittedLoop(NO_ROW, LOOP, extents[dim] // step, step), EmittedLoop(NO_ROW, LOOP, step, 1)
    return CopyLoops(loops, -1, width, source)


def packing_loops(r: ResolvedStage, extents: list[int], layout: Layout, packed: Packed, words: int) -> CopyLoops:
    """Build the loops that pack an operand for a dot instruction. `words`: groups in a vector register. If memory is contiguous along the
    summed dim, vectors run along it, in squares of words if the layout has another innermost dim. Else vectors run along the innermost dim,
    one for each element of the group."""
    loops: list[tuple[EmittedLoop, ...]] = [(EmittedLoop(NO_ROW, LOOP, e, 1),) for e in extents]
    inner, tile = layout.order[-1], layout.tile if layout.tiled >= 0 else 0
    if inner == packed.dim or _runs_along(r, packed.dim):
        loops[packed.dim] = _split(extents[packed.dim], min(extents[packed.dim], words * packed.group), COPY_VECTOR)
        if inner != packed.dim:
            loops[inner] = _split(extents[inner], tile or min(extents[inner], words), COPY_ROWS)
        return CopyLoops(loops, packed.dim, words * packed.group)
    loops[inner] = _split(extents[inner], tile or copy_step(extents[inner], words), COPY_VECTOR)
    loops[packed.dim] = (EmittedLoop(NO_ROW, LOOP, extents[packed.dim] // packed.group, packed.group),
                         EmittedLoop(COPY_GROUP, DOT, packed.group, 1))
    return CopyLoops(loops, inner, words)


def _has_squares(source: int, inner: int, square: int, exact: bool) -> bool:
    """Whether dims of these extents hold squares; `exact`: nothing but squares."""
    return source >= square <= inner and not (exact and (source % square or inner % square))


def _step(r: ResolvedStage, inner: int, extent: int, width: int, exact: bool) -> int:
    """Positions along the vector dim `inner` that one iteration of a copy without tiles covers: all of a short row under a mask."""
    if extent <= MASKED_ROW_VECTORS * width and any(n.gate >= 0 and inner in r.nodes[n.gate].deps for n in r.nodes):
        return extent
    return (exact_step if exact else copy_step)(extent, width)


def _choosing_loops(loops: list[tuple[EmittedLoop, ...]], extents: list[int], choosing: list[int], inner: int, step: int, width: int) \
        -> CopyLoops:
    """The loops of a copy whose dims `choosing` are straight-line code, for one vector of dim `inner` at a time."""
    for d in choosing:
        loops[d] = _split(extents[d], extents[d], COPY_ROWS)
    loops[inner] = _split(extents[inner], step, COPY_VECTOR)
    return CopyLoops(loops, inner, width)


def choosing_dims(r: ResolvedStage, extents: list[int], inner: int) -> list[int]:
    """The dims, other than `inner`, whose position decides which of several expressions the value is. [] if they have too many positions
    to be straight-line code."""
    conditions = {n.src[0] for n in r.nodes if n.kind == "alu" and n.op == "WHERE"}
    dims = sorted({r.nodes[c].deps[0] for c in conditions if r.nodes[c].op == "CMPEQ" and len(r.nodes[c].deps) == 1} - {inner})
    return dims if prod([extents[d] for d in dims]) <= MOST_CHOICES else []


def _few_at_a_time(extents: list[int], choosing: list[int], extent: int, width: int) -> int:
    """Positions of a vector dim of `extent` positions that a thread takes at a time: so few that it computes at most `MOST_CHOICES` values
    in all, and such that they divide the dim."""
    values = prod([extents[d] for d in choosing])
    return next((n for n in (width, width // 2) if n > 1 and extent % n == 0 and n * values <= MOST_CHOICES), 1)


def _split(extent: int, step: int, row: int) -> tuple[EmittedLoop, ...]:
    """Split a loop over `extent` positions into a loop of steps and the `step` positions of each."""
    return EmittedLoop(NO_ROW, LOOP, -(-extent // step), step), EmittedLoop(row, UPCAST, step, 1)


def _split_in_squares(extent: int, step: int, square: int) -> tuple[EmittedLoop, ...]:
    """Split a loop over `extent` positions, whose steps have one or more squares, into steps, squares and the positions of a square. If the
    steps do not divide the loop, an iteration copies a whole step."""
    if step == square or extent % step:
        return _split(extent, step, COPY_VECTOR)
    return (EmittedLoop(NO_ROW, LOOP, extent // step, step), EmittedLoop(NO_ROW, LOOP, step // square, square),
            EmittedLoop(COPY_VECTOR, UPCAST, square, 1))


def _source_dim(r: ResolvedStage, inner: int) -> int:
    """The dim, other than the vector dim `inner`, along which a copy reads memory contiguously; -1 if there is none."""
    loads = [n.linear for n in r.nodes if n.kind == "load" and n.linear is not None and n.gate < 0 and not n.linear.atoms]
    if len(loads) != 1 or loads[0].coef(inner) in (0, 1):
        return -1
    return next((d for d in range(len(r.stage.outs)) if d != inner and loads[0].coef(d) == 1), -1)


def _masked_source_dim(r: ResolvedStage, inner: int) -> int:
    """The dim, other than the vector dim `inner`, along which a copy reads memory contiguously under a mask that is the same for all
    positions of `inner`; -1 if there is none."""
    loads = [n for n in r.nodes if n.kind == "load"]
    if len(loads) != 1 or loads[0].gate < 0 or inner in r.nodes[loads[0].gate].deps:
        return -1
    linear = loads[0].linear
    assert linear is not None
    if linear.atoms or linear.coef(inner) in (0, 1):
        return -1
    return next((d for d in range(len(r.stage.outs)) if d != inner and linear.coef(d) == 1), -1)


def _runs_along(r: ResolvedStage, dim: int) -> bool:
    """Whether all loads of a copy are contiguous along a dim."""
    loads = [n.linear for n in r.nodes if n.kind == "load" and n.linear is not None]
    return bool(loads) and all(lin.coef(dim) == 1 and not lin.atoms for lin in loads)
