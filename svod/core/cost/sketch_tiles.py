"""Sketches of matrix instructions for CPUs: a block of tiles in registers, so that operands are read rarely, and the place where each is
packed.

    TC(r0, (amx8, o0, o1)) UPCAST(o0, 2) UPCAST(o1, 2)                     4 tiles of results, 2 + 2 of operands
    … TILE(o0, 8)                                                          all columns are computed for rows that stay in a near cache
    … STAGE(s0, o0)                                                        rows packed by the core that uses them: of a TILE, or all
    … ORDER(out, (o1, o0)) STAGE(s1, o1)                                   columns packed by the core that uses them
"""
from __future__ import annotations

from typing import NamedTuple

from svod.core.cost.sketch_facts import try_opt
from svod.core.cost.template import Apply, Choose, Do, Hole, Maybe, Point, Template, fact
from svod.core.kernel.scheduler import Scheduler
from svod.core.machine.isa import DOTS

BLOCKS = ((2, 2), (1, 3), (3, 1), (1, 2), (2, 1), (1, 1))      # tiles of results in registers: rows × columns
L2_SHARE = 4            # an operand in a loop over blocks may take the second cache divided by this
BLOCKS_PER_CORE = 2     # least number of blocks per core
# share of the positions of tiles that is in the output, up to which tiles are no sketch: at 1/16 they multiply as fast as vectors do, and
# they are stored row by row. A transposed convolution with 2 of 16 columns and 20 of 32 rows took 380 us, in vectors 253 (AMX, bfloat16).
HARDLY_FILLED = 1 / 8


class _Axes(NamedTuple):
    """Names in a stage with a matrix instruction: the axes of its tiles and of its sum, and the stages of both operands."""

    rows: str
    columns: str
    summed: str
    row_operand: str
    column_operand: str


def _axes(p: Point) -> _Axes | None:
    """Find the names of `_Axes`. None if tiles are hardly filled, or if their columns are not contiguous in the output, although another
    axis of enough positions is."""
    state, r = p.state, p.stage
    chosen, axes = state.dots[r.stage.index], state.kernel.axes
    if chosen is None:      # TC was refused, as a tile would sum up too many products in a row
        return None
    dot, rows, columns = DOTS[chosen.name], axes[chosen.rows].extent, axes[chosen.columns].extent
    if _filled(rows, dot.rows) * _filled(columns, dot.columns) <= HARDLY_FILLED:
        return None
    if r.store is not None and r.store.coef(r.axes.index(chosen.columns)) != 1 and any(
            r.store.coef(a) == 1 and p.extent(a) >= DOTS[chosen.name].columns for a in range(len(r.stage.outs))):
        return None
    operands = {}
    for v in r.nodes[r.reductions[0].values[0]].src[:2]:
        operands[r.axes.index(chosen.rows) in r.nodes[v].deps] = state.kernel.stages[r.nodes[v].arg].name
    return _Axes(axes[chosen.rows].name, axes[chosen.columns].name, axes[chosen.axis].name, operands[True], operands[False])


def _filled(extent: int, positions: int) -> float:
    """The share of tiles along an axis of `extent` that is in the output, if each tile has so many positions."""
    return extent / (-(-extent // positions) * positions)


def _near(p: Point, axis: str) -> Scheduler:
    """Tile a loop over `axis`, so that the operand of a tile fits its share of the second cache, and each core gets some tiles."""
    state, chosen, target = p.state, p.state.dots[p.stage.stage.index], p.state.target
    assert chosen is not None
    row, (dtype, _) = state.rows[state.row_id(axis)], DOTS[chosen.name].operands
    summed = state.kernel.axes[chosen.axis].extent
    near = target.l2 // L2_SHARE // max(1, row.stride * summed * dtype.itemsize)
    n = min(near, row.extent // (BLOCKS_PER_CORE * target.threads))
    return try_opt(state, "TILE", axis, n) if n >= 2 else state


_AXES = fact(_axes)
_BLOCK = Hole("", lambda p: BLOCKS)
_ROWS, _COLUMNS = Hole("rows of tiles", lambda p: (p[_BLOCK][0],)), Hole("columns of tiles", lambda p: (p[_BLOCK][1],))
_STAGE_ROWS = Apply("STAGE", lambda p: p[_AXES].row_operand, lambda p: p[_AXES].rows)
_COLUMNS_OUTSIDE = Apply("ORDER", lambda p: p.stage.stage.name, lambda p: (p[_AXES].columns, p[_AXES].rows))

# Blocks of tiles. Operands are read in place, or packed by the core that uses them.
TILES = Template(
    "TILES", _AXES, _BLOCK, _ROWS, _COLUMNS,
    Apply("UPCAST", lambda p: p[_AXES].rows, _ROWS, must=True), Apply("UPCAST", lambda p: p[_AXES].columns, _COLUMNS, must=True),
    Maybe(Apply("UNROLL", lambda p: p[_AXES].summed, 2)), Choose(
        [],
        [Do(lambda p: _near(p, p[_AXES].rows)), Maybe(_STAGE_ROWS)],
        [_COLUMNS_OUTSIDE, Do(lambda p: _near(p, p[_AXES].columns))],
        [_STAGE_ROWS],
        [_COLUMNS_OUTSIDE, Apply("STAGE", lambda p: p[_AXES].column_operand, lambda p: p[_AXES].columns)]))
