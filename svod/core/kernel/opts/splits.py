"""Common parts of opts: checks of names and amounts, and splits of loop rows."""
from __future__ import annotations

from itertools import count
from typing import Any

from svod.core.kernel import intrinsics as dots
from svod.core.kernel.groups import check_groups
from svod.core.kernel.scheduler import INLINE, LOOP, UPCAST, AxisLoop, ReductionParts, Scheduler
from svod.core.machine.isa import DOTS
from svod.errors import KernelOptError


def loop_row(state: Scheduler, name: str, what: str) -> int:
    """The number of the loop row called `name`. Raises KernelOptError if there is none, or if opts cannot change its loop."""
    row = state.row_id(name)
    stage = state.kernel.stages[state.stage_of_row(row)]
    place = state.place[stage.index]
    if place == INLINE:
        raise KernelOptError(f"{what}({name}): stage {stage.name} is computed in place by its readers and has no loops; STAGE it first")
    if not stage.is_output and not stage.has_reduce:
        raise KernelOptError(f"{what}({name}): the copy loops of stage {stage.name} are derived from where it is read")
    if state.rows[row].role != LOOP:
        raise KernelOptError(f"{what}({name}): the axis is already {state.rows[row].role}")
    return row


def checked_amount(state: Scheduler, row: int, arg: Any, what: str) -> int:
    """The amount of a split, as a number of positions. Raises KernelOptError if it does not fit the row's extent."""
    r = state.rows[row]
    if not isinstance(arg, int) or isinstance(arg, bool) or arg < 0:
        raise KernelOptError(f"{what}({r.name}, {arg!r}): the amount must be an int ≥ 0 (0: the whole axis)")
    n = arg or r.extent
    if n == 1:
        raise KernelOptError(f"{what}({r.name}, {arg}): an amount of 1 changes nothing")
    if n > r.extent:
        raise KernelOptError(f"{what}({r.name}, {arg}): the axis has {r.extent} positions; PADTO rounds it up")
    if r.extent % n and state.axis_rows[r.axis][0] != row:
        raise KernelOptError(f"{what}({r.name}, {arg}): only the outermost part of an axis may be split with a remainder, "
                             f"{r.extent} % {n} ≠ 0")
    return n


def takes_no_argument(what: str, axis: str, arg: Any) -> None:
    """Raise KernelOptError for an opt that was given an argument."""
    if arg is not None:
        raise KernelOptError(f"{what}({axis}, {arg!r}): takes no argument")


def is_reduce(state: Scheduler, row: int) -> bool:
    """Whether a row belongs to a reduce axis."""
    return state.kernel.axes[state.rows[row].axis].kind == "r"


def free_name(state: Scheduler, name: str) -> str:
    """A name that no row has: `name`, or `name` followed by 2, 3, …."""
    taken = {x.name for x in state.rows}
    return name if name not in taken else next(other for k in count(2) if (other := f"{name}{k}") not in taken)


def keeps_nesting(state: Scheduler, order: tuple[int, ...]) -> bool:
    """Whether the rows of each axis have the same nesting in `order` as in the axis."""
    for ids in state.axis_rows:
        if len(ids) > 1:
            inside = [order.index(r) for r in ids if r in order]
            if inside != sorted(inside):
                return False
    return True


def split_row(state: Scheduler, row: int, n: int, role: str) -> Scheduler:
    """Split a loop row: it keeps its name and counts blocks of `n` positions; a new row with `role`, inside it, has the n positions of a
    block."""
    r = state.rows[row]
    name = free_name(state, f"{r.name}.in")
    left = -(-r.extent // n)
    rows = list(state.rows)
    rows[row] = AxisLoop(r.name, r.axis, left, r.stride * n, r.role)
    rows.append(AxisLoop(name, r.axis, n, r.stride, role))
    new = len(rows) - 1
    ids = state.axis_rows[r.axis]
    at = ids.index(row) + 1
    axis_rows = list(state.axis_rows)
    axis_rows[r.axis] = (*ids[:at], new, *ids[at:])
    if left > 1:
        return state.copy(rows=tuple(rows), axis_rows=tuple(axis_rows))
    # the loop is used up: it leaves the order, but its name stays
    _check_unused(state, row, n)
    stage = state.stage_of_row(row)
    order = list(state.order)
    order[stage] = tuple([x for x in order[stage] if x != row])
    return state.copy(rows=tuple(rows), axis_rows=tuple(axis_rows), order=tuple(order))


def _check_unused(state: Scheduler, row: int, n: int) -> None:
    """Raises KernelOptError if a split by `n` would use up a loop that a stage, PIPELINE or THREAD needs."""
    name = state.rows[row].name
    for s, place in enumerate(state.place):
        if place == row and isinstance(place, int):
            raise KernelOptError(f"an amount of {n} uses up {name}, and stage {state.kernel.stages[s].name} lives there; INLINE it or "
                                 f"STAGE it elsewhere first")
    if state.pipeline and state.pipeline.row == row:
        raise KernelOptError(f"an amount of {n} uses up {name}, whose copies run ahead")
    if (state.thread and state.thread.row == row) or (state.split_reduce and state.axis_rows[state.split_reduce.axis][0] == row):
        raise KernelOptError(f"an amount of {n} uses up {name}, whose iterations the cores share")


def with_order(state: Scheduler, stage: int, order: tuple[int, ...]) -> Scheduler:
    """The state with the loops of a stage in another order."""
    orders = list(state.order)
    orders[stage] = order
    return state.copy(order=tuple(orders))


def check_registers(state: Scheduler, stage: int, what: str) -> None:
    """Raises KernelOptError if the accumulators of a stage, or its values side by side, need more than twice the vector registers. Numbers
    of tiles that a thread holds must fit its registers, and tiles of a CPU core its tile registers."""
    try:
        dots.check_tiles(state, stage)
    except KernelOptError as e:
        raise KernelOptError(f"{what}: {e}") from None
    s = state.kernel.stages[stage]
    total = 1
    for axis in s.outs + s.reds:
        for row in state.axis_rows[axis]:
            if state.rows[row].role == UPCAST:
                total *= state.rows[row].extent
    chosen = state.dots[stage]
    fragments = DOTS[chosen.name].fragments if chosen is not None else None
    total *= fragments[0].num_elements if fragments else 1
    if fragments and 0 < state.target.registers_per_thread < total:
        raise KernelOptError(f"{what}: a thread has {total} numbers of tiles, and {state.target.registers_per_thread} registers")
    lanes = max(1, state.target.vector_bytes // 4)
    vectors = -(-total // lanes) if total >= lanes else total
    if vectors > 2 * state.target.vector_registers:
        raise KernelOptError(f"{what}: {total} values side by side need {vectors} vector registers; the target has "
                             f"{state.target.vector_registers}, and twice that is the limit")


def cut_reduction(state: Scheduler, row: int, n: int, what: str) -> Scheduler:
    """Split the reduction over a row of the output stage into `n` parts."""
    r = state.rows[row]
    if r.extent < n or state.axis_rows[r.axis][0] != row:
        raise KernelOptError(f"{what}: only the outermost part of a reduce axis of at least {n} iterations is cut")
    if not state.target.has_groups and (state.pads[r.axis] or any(
            not isinstance(p, str) and state.stage_of_row(p) == state.stage_of_row(row) for p in state.place)):
        raise KernelOptError(f"{what}: stages placed at loops of the output, or a padded axis, cannot be cut into parts")
    return state.copy(split_reduce=ReductionParts(r.axis, n))


def checked_groups(state: Scheduler, what: str) -> Scheduler:
    """Returns the state. Raises KernelOptError if the target cannot run its groups of threads."""
    try:
        check_groups(state)
    except KernelOptError as e:
        raise KernelOptError(f"{what}: {e}") from None
    return state
