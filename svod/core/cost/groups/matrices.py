"""Sketches of contractions by matrix instructions whose tiles a subgroup holds: tiles per subgroup, subgroups per group, and staged
operands.

    TC(r0, (mma_bf16,o0,o1)) UPCAST(o0, 4) UPCAST(o1, 4) LOCAL(o0, 2) LOCAL(o1, 2)        128 × 64 results a group of four subgroups
    … TILE(r0, 2) STAGE(s0, r0) STAGE(s1, r0) UNROLL(r0.in2, 0)                           32 positions of the sum in shared memory at a time
    … PIPELINE(r0, 3)                                                                     the next ones are copied meanwhile
    TC(r0, (wgmma_bf16n256,o0,o1)) LOCAL(o0, 2) TILE(r0, 4) …                             tiles of four subgroups, operands always staged
    … TILE(o0, 8)                                                            large matrices: the grid visits 8 rows of groups by columns
    … SPLITK(r0, 4)                                                                       few tiles of results: each sum in four parts
"""
from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any, NamedTuple

from svod.core.cost.groups.contractions import CUT, has_copies
from svod.core.cost.groups.device import device_of
from svod.core.cost.sketch_facts import Instruction, bytes_of_arguments, instructions
from svod.core.cost.template import Apply, Choose, Each, Hole, Maybe, Need, Only, Point, Template
from svod.core.kernel.kernel import ResolvedStage
from svod.core.kernel.placement import place_stages
from svod.core.kernel.scheduler import Opt, Scheduler
from svod.core.machine.isa import DOTS

SUBGROUP_TILES = ((4, 8), (4, 4), (2, 8), (2, 4), (2, 2), (1, 4), (1, 2), (1, 1))       # tiles of a subgroup: rows × columns
SUBGROUPS = ((2, 2), (2, 4), (4, 2), (1, 4), (4, 1), (1, 2), (2, 1), (1, 1))            # subgroups of a group: rows × columns
# tiles and subgroups for instructions that several subgroups run together
WIDE_TILES, WIDE_GROUPS = ((2, 1), (1, 1)), ((2, 1), (1, 2), (1, 1))
BLOCK_INSTRUCTIONS = (2, 4)     # instructions along the sum whose operands are in shared memory at a time
ASYNCHRONOUS_BUFFERS = (3, 4, 2)        # buffers of an operand that is copied ahead; the number that usually is fastest comes first
SYNCHRONOUS_BUFFERS = (2,)      # buffers of copies through registers
CUT_BUFFERS = (4, 2)    # buffers if each sum is split
SQUARE_ROWS = 8         # rows of groups that the grid visits column by column


class _Block(NamedTuple):
    """Rows × columns: tiles of a subgroup, or subgroups of a group."""

    rows: int
    columns: int

    def __str__(self) -> str:
        return f"{self.rows} × {self.columns}"


def _instructions(p: Point) -> list[Instruction]:
    """The instructions for the sum of a phase. If one that reads shared memory has enough tiles for all units, only such instructions are
    tried."""
    if place_stages(p.state).paths[p.stage.stage.index] != ():
        return []
    fitting = instructions(p.state, p.stage.stage.index)
    wide = [x for x in fitting if x.has_tiles and x.dot.reads_shared]
    return [x for x in (wide if any(_fills_units(p.state, x.arg) for x in wide) else fitting)
            if x.dot.fragments is not None and _stores_lines(p.state, p.stage, x.arg)]


def _subgroups(p: Point) -> Iterator[_Block]:
    """Arrangements of subgroups in a group that do not exceed the tiles of the result."""
    (m, n), (down, across) = p[_TILES], p[_RESULTS]
    for block in WIDE_GROUPS if _is_wide(p) else SUBGROUPS:
        a, b = block
        if (m * a <= down or m * a == 1) and (n * b <= across or n * b == 1):
            yield _Block(a, b)


def _fills_units(state: Scheduler, arg: Any) -> bool:
    """Whether an instruction has a tile of results for each unit, so that no smaller instruction is faster."""
    name, *tile = arg
    rows, columns = (state.kernel.axis_by_name[axis].extent for axis in tile)
    return rows // DOTS[name].rows * (columns // DOTS[name].columns) >= device_of(state.target).units


def _stores_lines(state: Scheduler, r: ResolvedStage, arg: Any) -> bool:
    """Whether the columns of tiles are contiguous in the output; also true if no axis that is long enough for columns is contiguous
    there."""
    axes, (name, _, columns) = state.kernel.axes, arg
    at = next(a for a, axis in enumerate(r.axes) if axes[axis].name == columns)
    return r.store is None or r.store.coef(at) == 1 or not any(
        r.store.coef(a) == 1 and axes[r.axes[a]].extent >= DOTS[name].columns for a in range(len(r.stage.outs)))


def _is_wide(p: Point) -> bool:
    return p[_INSTRUCTION].dot.reads_shared


def _outer_loop(p: Point) -> str:
    """The loop around a block of the sum: the sum's outer loop, or the innermost loop if the block is the whole sum."""
    axis, state = p[_INSTRUCTION].axis, p.state
    if p[_WHOLE] > p[_BLOCK]:
        return axis
    return next((state.rows[x].name for x in reversed(state.order[p.stage.stage.index])), axis)


def _inside_block(p: Point) -> str:
    """The loop over the instructions of one block."""
    axis, state = p[_INSTRUCTION].axis, p.state
    return state.rows[-1].name if Opt("TILE", axis, p[_BLOCK]) in state.applied_opts else axis


def _is_far(p: Point) -> bool:
    """Whether operands are copied ahead, the second cache does not hold them, and the grid has several times `SQUARE_ROWS` rows of
    groups."""
    left, state = p.left(p[_INSTRUCTION].arg[1]), p.state
    return state.pipeline is not None and left % SQUARE_ROWS == 0 and left > SQUARE_ROWS \
        and bytes_of_arguments(state) > device_of(state.target).second


_INSTRUCTION = Hole("instruction", _instructions)
_RESULTS = Hole("", lambda p: (_Block(p.left(_rows(p)), p.left(_columns(p))),))      # numbers of tiles in the whole result
_TILES = Hole("tiles", lambda p: itertools.starmap(_Block, WIDE_TILES if _is_wide(p) else SUBGROUP_TILES))
_SUBGROUPS = Hole("subgroups", _subgroups)
_WHOLE = Hole("", lambda p: (p.left(p[_INSTRUCTION].axis),))        # number of instructions along the sum
_BLOCK = Hole("instructions a block", lambda p: BLOCK_INSTRUCTIONS)
_OPERAND = Hole("", lambda p: [p.state.kernel.stages[s].name for s in p.stage.reads])
_BUFFERS = Hole("buffers", lambda p: ASYNCHRONOUS_BUFFERS if p.state.target.has_async_copies else SYNCHRONOUS_BUFFERS)


def _axis(p: Point) -> str:
    return p[_INSTRUCTION].axis


def _rows(p: Point) -> str:
    return str(p[_INSTRUCTION].arg[1])


def _columns(p: Point) -> str:
    return str(p[_INSTRUCTION].arg[2])


_CUT_SUM = Need(CUT, Apply("SPLITK", _axis, CUT))

# Visiting the grid in squares, some rows of groups column by column, reads less at a time of matrices that the second cache does not hold.
# Without copies in shared memory, splitting the sum is worth it only for tiles of one subgroup.
MATRIX_TILES = Template(
    "MATRIX TILES", _INSTRUCTION, Need(Apply("TC", _axis, lambda p: p[_INSTRUCTION].arg)), _WHOLE, _RESULTS, _TILES,
    Apply("UPCAST", _rows, lambda p: p[_TILES].rows), Apply("UPCAST", _columns, lambda p: p[_TILES].columns),
    _SUBGROUPS, Apply("LOCAL", _rows, lambda p: p[_SUBGROUPS].rows), Apply("LOCAL", _columns, lambda p: p[_SUBGROUPS].columns), Choose(
        [_BLOCK, Apply("TILE", lambda p: _axis(p) if p[_WHOLE] > p[_BLOCK] else "", _BLOCK),
         Each(_OPERAND, Apply("STAGE", _OPERAND, _outer_loop)), Only(has_copies), Apply("UNROLL", _inside_block, 0),
         Maybe(_BUFFERS, Apply("PIPELINE", _axis, _BUFFERS)), Choose(
             [],
             [Only(lambda p: _is_wide(p) and _is_far(p)), Need(Apply("TILE", _rows, SQUARE_ROWS))],
             [Only(lambda p: p.state.pipeline is not None and p.state.pipeline.buffers in CUT_BUFFERS), _CUT_SUM])],
        [Only(lambda p: not _is_wide(p)), _CUT_SUM]))

