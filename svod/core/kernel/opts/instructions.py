"""The opts that arrange positions for dot and matrix instructions of the target: TC and HOLD."""
from __future__ import annotations

from math import prod
from typing import Any

from svod.core.kernel import intrinsics as dots
from svod.core.kernel.opts.splits import check_registers, checked_groups, is_reduce, loop_row, split_row
from svod.core.kernel.placement import is_derived, place_stages
from svod.core.kernel.scheduler import DOT, INLINE, ROOT, IntrinsicChoice, Scheduler
from svod.core.machine.isa import DOTS, Dot
from svod.errors import KernelOptError


def tc(state: Scheduler, axis: str, arg: Any) -> Scheduler:
    """Sum narrow products by an instruction of the target (`svod.core.machine.isa.DOTS`): TC("r0", name); with tiles, over two output axes,
    TC("r0", (name, rows, columns)). Both operands become stages in their narrow type with the group innermost, first placed at the root,
    and padded with zeros to whole instructions. The axes then count instructions. TC has to come before these axes are split; its order
    with other opts is free.

        for r in K: c += wide(a[r])*wide(b[r, n])     p[r, n, i] = b[r*g + i, n];  for r in K/g: c += Σ a[r*g + i]*p[r, n, i], i < g
    """
    what = f"TC({axis}, {arg if isinstance(arg, (str, tuple)) else repr(arg)})"
    row = loop_row(state, axis, "TC")
    stage = state.stage_of_row(row)
    dot, names = _named_intrinsic(arg, what)
    if not is_reduce(state, row):
        raise KernelOptError(f"{what}: nothing is summed up along {axis}; name a reduce axis")
    if dot.fragments and any(o.op == "NOLOCALS" for o in state.applied_opts):
        raise KernelOptError(f"{what}: NOLOCALS keeps the groups of this state at one thread; a subgroup holds the tiles")
    if state.dots[stage]:
        raise KernelOptError(f"{what}: the stage has an instruction already")
    split = [(row, dot.positions), *_tile_rows(state, stage, dot, names, what)]
    for other, _ in split:
        a = state.rows[other].axis
        if len(state.axis_rows[a]) > 1 or state.pads[a] or (state.split_reduce and state.split_reduce.axis == a):
            raise KernelOptError(f"{what}: an instruction is chosen before its axes are split or padded")
    axes = [state.rows[other].axis for other, _ in split]
    try:
        operands = dots.check(state.kernel, state.target, stage, axes[0], dot, (axes[1], axes[2]) if dot.is_tile else (-1, -1))
    except KernelOptError as e:
        raise KernelOptError(f"{what}: {e}") from None
    _check_products(state, stage, axes[0], dot, what)
    extent = state.kernel.axes[axes[0]].extent
    padded = -(-extent // dot.positions) * dot.positions
    rows, pads, places, chosen = list(state.rows), list(state.pads), list(state.place), list(state.dots)
    if padded != extent:
        rows[row] = rows[row]._replace(extent=padded)
        pads[axes[0]] = padded
    for o in operands:
        if places[o.stage] == INLINE:
            places[o.stage] = ROOT
    chosen[stage] = IntrinsicChoice(axes[0], dot.name, *axes[1:])
    new = state.copy(rows=tuple(rows), pads=tuple(pads), place=tuple(places), dots=tuple(chosen))
    for other, n in split:
        new = split_row(new, other, n, DOT)
    check_registers(new, stage, what)
    place_stages(new)
    return checked_groups(new, what)


def _check_products(state: Scheduler, stage: int, axis: int, dot: Dot, what: str) -> None:
    """Raises KernelOptError if tiles of floats would sum too many products one after the other, and cannot be cut into blocks because tile
    registers cannot be added to each other."""
    others = prod([state.kernel.axes[a].extent for a in state.kernel.stages[stage].reds if a != axis])
    products = -(-state.kernel.axes[axis].extent // dot.positions) * others
    rule = state.kernel.stages[stage].sum_rule
    if dot.is_tile and not dot.fragments and rule is not None and products > rule.longest:
        raise KernelOptError(f"{what}: a tile would sum up {products} products in a row, rounding each time; at most "
                             f"{rule.longest} are right, as tiles are not added to one another")


def _named_intrinsic(arg: Any, what: str) -> tuple[Dot, list[str]]:
    """Parse TC's argument: (the instruction, the names of the axes of its rows and columns)."""
    name, *names = arg if isinstance(arg, tuple) and arg else (arg,)
    dot = DOTS.get(name) if isinstance(name, str) else None
    if dot is None:
        raise KernelOptError(f"{what}: needs the name of an instruction, one of {', '.join(DOTS)}")
    if len(names) != (2 if dot.is_tile else 0) or not all(isinstance(n, str) for n in names) or len(set(names)) != len(names):
        raise KernelOptError(f"{what}: {name} takes {'the axes of its rows and columns' if dot.is_tile else 'no axes'}")
    return dot, names


def _tile_rows(state: Scheduler, stage: int, dot: Dot, names: list[str], what: str) -> list[tuple[int, int]]:
    """(loop row, positions of a tile) of each output axis that a tile instruction takes."""
    out = []
    for name, amount in zip(names, (dot.rows, dot.columns), strict=False):
        row = loop_row(state, name, "TC")
        if state.stage_of_row(row) != stage or is_reduce(state, row):
            raise KernelOptError(f"{what}: {name} is no output axis of the stage")
        if state.kernel.axes[state.rows[row].axis].extent < 2:
            raise KernelOptError(f"{what}: {name} has one position")
        out.append((row, amount if dot.fragments else min(amount, state.rows[row].extent)))
    return out


def hold(state: Scheduler, axis: str, arg: Any) -> Scheduler:
    """Spread the positions of a stage over threads like the results of a matrix instruction, tile by tile: HOLD(stage, (instruction, rows,
    columns)). `rows` names the innermost loop of an output axis, `columns` that of an output or a reduce axis. The loops then count tiles,
    and LOCAL counts subgroups. Threads that have columns of the same row share a reduction along it, and all get the result. If all readers
    of the stage are laid out alike, its values stay in the registers of the threads that computed them; else they lie in shared memory.

        for o in N: for r in K: m[o] = max(m[o], x[o, r])     subgroups: for o in N/16: for r in K/8: each thread its own 2 × 2 positions;
                                                              m = max over the 4 threads of a row
    """
    what = f"HOLD({axis}, {arg if isinstance(arg, (str, tuple)) else repr(arg)})"
    s = state.stage_id(axis)
    stage, (dot, names) = state.kernel.stages[s], _named_intrinsic(arg, what)
    if dot.fragments is None or not dot.runs_on(state.target):
        raise KernelOptError(f"{what}: no threads of the target hold tiles of {dot.name}")
    if any(o.op == "NOLOCALS" for o in state.applied_opts):
        raise KernelOptError(f"{what}: NOLOCALS keeps the groups of this state at one thread; a subgroup holds the tiles")
    if is_derived(stage):
        raise KernelOptError(f"{what}: the loops of a copy follow from where it is read")
    if state.dots[s]:
        raise KernelOptError(f"{what}: the stage has an instruction already")
    if state.kernel.written:
        raise KernelOptError(f"{what}: a kernel that reads what it writes computes no position twice, as threads that share a row may")
    axes: list[int] = []
    for name, amount in zip(names, (dot.rows, dot.columns), strict=True):
        row = loop_row(state, name, "HOLD")
        a = state.rows[row].axis
        if state.stage_of_row(row) != s or (not axes and is_reduce(state, row)):
            raise KernelOptError(f"{what}: {name} is no {'axis' if axes else 'output axis'} of the stage")
        if state.axis_rows[a][-1] != row or state.pads[a] or a in axes or state.kernel.axes[a].bound is not None:
            raise KernelOptError(f"{what}: tiles are cut from the innermost loop of an axis that is not padded, and depends on no variable")
        axes.append(a)
        state = split_row(state, row, amount, DOT)
    chosen = list(state.dots)
    chosen[s] = IntrinsicChoice(-1, dot.name, *axes)
    new = state.copy(dots=tuple(chosen))
    check_registers(new, s, what)
    place_stages(new)
    return checked_groups(new, what)
