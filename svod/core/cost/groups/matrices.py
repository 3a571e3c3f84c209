"""Options of contractions by matrix instructions whose tiles a subgroup holds: tiles of each, subgroups side by side, what is staged.

    TC(r0, (mma_bf16,o0,o1)) UPCAST(o0, 4) UPCAST(o1, 4) LOCAL(o0, 2) LOCAL(o1, 2)        128 × 64 results a group of four subgroups
    … TILE(r0, 2) STAGE(s0, r0) STAGE(s1, r0) UNROLL(r0.in2, 0)                           32 positions of the sum in shared memory at a time
    … PIPELINE(r0, 3)                                                                     the next ones are copied meanwhile
    TC(r0, (wgmma_bf16n256,o0,o1)) LOCAL(o0, 2) TILE(r0, 4) …                             tiles of four subgroups, operands always staged
    … TILE(o0, 8)                                                            eight rows of groups, column by column, of large matrices
    … SPLITK(r0, 4)                                                                       few tiles of results: each sum in four parts
"""
from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from svod.core.cost.groups.contractions import PARTS
from svod.core.cost.groups.device import device_of
from svod.core.cost.groups.spread import groups_of
from svod.core.cost.sketch_facts import resolved, try_opt
from svod.core.kernel.intrinsics import applicable
from svod.core.kernel.kernel import ResolvedStage
from svod.core.kernel.placement import place_stages
from svod.core.kernel.scheduler import Scheduler
from svod.core.machine.isa import DOTS

_TILES = ((4, 8), (4, 4), (2, 8), (2, 4), (2, 2), (1, 4), (1, 2), (1, 1))       # of a subgroup: rows × columns
_SUBGROUPS = ((2, 2), (2, 4), (4, 2), (1, 4), (4, 1), (1, 2), (2, 1), (1, 1))   # of a group, likewise
_WIDE_TILES, _PARTS_OF_GROUP = ((2, 1), (1, 1)), ((2, 1), (1, 2), (1, 1))       # the same of instructions of several subgroups
_BLOCKS = (2, 4)        # instructions along the sum whose operands are in shared memory at a time
_BUFFERS = 3, 4, 2      # of an operand that is copied ahead, those first that took least where nothing is predicted; by way of registers 2
_OF_PARTS = 4, 2        # the same where each sum is cut
_HIGH = 8               # rows of groups that follow each other column by column
_FILL = 2               # groups per unit with which no sum is cut


def flat_options(state: Scheduler) -> Iterator[Scheduler]:
    """The contraction of the output with its axes merged: pixels of a convolution in tiles, whatever the extents of an image."""
    flat = try_opt(state, "FLATTEN", state.kernel.stages[state.kernel.output].name)
    if flat is not state:
        yield from matrix_options(flat, resolved(flat, flat.kernel.output))


def matrix_options(state: Scheduler, r: ResolvedStage) -> Iterator[Scheduler]:
    """Each instruction that computes the contraction of a phase, in tiles that its results fill."""
    if place_stages(state).paths[r.stage.index] != ():
        return
    found = applicable(state.kernel, state.target, r.stage.index)
    wide = [(axis, arg) for axis, arg in found if isinstance(arg, tuple) and DOTS[arg[0]].reads_shared]
    for axis, arg in wide if any(_fills_units(state, arg) for _, arg in wide) else found:
        if DOTS[arg[0] if isinstance(arg, tuple) else arg].fragments is None or not _stores_lines(state, r, arg):
            continue
        start = try_opt(state, "TC", axis, arg)
        if start is not state:
            yield from _blocks(start, r, axis, arg)


def _fills_units(state: Scheduler, arg: Any) -> bool:
    """Whether there is a tile of an instruction for each unit, so that no smaller instruction is faster."""
    name, *tile = arg
    rows, columns = (state.kernel.axis_by_name[axis].extent for axis in tile)
    return rows // DOTS[name].rows * (columns // DOTS[name].columns) >= device_of(state.target).units


def _stores_lines(state: Scheduler, r: ResolvedStage, arg: Any) -> bool:
    """Whether the columns of tiles lie beside each other in the output, if any axis of as many positions does."""
    axes, (name, _, columns) = state.kernel.axes, arg
    at = next(a for a, axis in enumerate(r.axes) if axes[axis].name == columns)
    return r.store is None or r.store.coef(at) == 1 or not any(
        r.store.coef(a) == 1 and axes[r.axes[a]].extent >= DOTS[name].columns for a in range(len(r.stage.outs)))


def _blocks(start: Scheduler, r: ResolvedStage, axis: str, arg: Any) -> Iterator[Scheduler]:
    _, rows, columns = arg
    down, across = (start.rows[start.row_id(name)].extent for name in (rows, columns))     # tiles of results
    is_wide = DOTS[arg[0]].reads_shared
    for m, n in _WIDE_TILES if is_wide else _TILES:
        for a, b in _PARTS_OF_GROUP if is_wide else _SUBGROUPS:
            if (m * a > down and m * a > 1) or (n * b > across and n * b > 1):
                continue
            block = start
            for op, name, amount in (("UPCAST", rows, m), ("UPCAST", columns, n), ("LOCAL", rows, a), ("LOCAL", columns, b)):
                block = try_opt(block, op, name, amount) if amount > 1 else block
            for staged in _staged(block, r, axis):
                yield staged
                if is_wide:     # others take longer than memory does
                    yield from _in_squares(staged, rows)
                if staged.pipeline is not None and staged.pipeline.buffers in _OF_PARTS:
                    yield from _cut(staged, r, axis)
            if not is_wide:
                yield from _cut(block, r, axis)


def _in_squares(state: Scheduler, rows: str) -> Iterator[Scheduler]:
    """Some rows of groups, column by column, then the next ones: the groups that run at a time read less of matrices that the second cache
    does not hold."""
    extent, kernel = state.rows[state.row_id(rows)].extent, state.kernel
    if state.pipeline is None or sum([p.arg.size * p.dtype.itemsize for p in kernel.params]) <= device_of(state.target).second:
        return
    done = try_opt(state, "TILE", rows, _HIGH) if extent % _HIGH == 0 and extent > _HIGH else state
    if done is not state:
        yield done


def _staged(state: Scheduler, r: ResolvedStage, axis: str) -> Iterator[Scheduler]:
    """Both operands in shared memory, a block of the sum at a time."""
    for block in _BLOCKS:
        whole = state.rows[state.row_id(axis)].extent
        done = try_opt(state, "TILE", axis, block) if whole > block else state
        inner = done.rows[-1].name if done is not state else axis
        outer = axis if whole > block else next((state.rows[x].name for x in reversed(state.order[r.stage.index])), axis)
        for s in r.reads:
            done = try_opt(done, "STAGE", state.kernel.stages[s].name, outer)
        if not any(isinstance(place, int) for place in done.place):
            continue
        done = try_opt(done, "UNROLL", inner, 0)
        yield done
        for buffers in _BUFFERS if state.target.has_async_copies else _BUFFERS[-1:]:
            ahead = try_opt(done, "PIPELINE", axis, buffers)
            if ahead is not done:
                yield ahead


def _cut(state: Scheduler, r: ResolvedStage, axis: str) -> Iterator[Scheduler]:
    """The sum cut into parts where the tiles are too few for the units."""
    few = _FILL * device_of(state.target).units // max(1, groups_of(state, r.stage.index))
    if few < 2 or not r.stage.is_output:
        return
    for parts in [n for n in PARTS if n <= few][-2:]:
        done = try_opt(state, "SPLITK", axis, parts)
        if done is not state:
            yield done
