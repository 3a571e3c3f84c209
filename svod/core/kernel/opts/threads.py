"""The opts for targets with groups of threads: they spread loops over threads and the grid, and let copies run ahead."""
from __future__ import annotations

from collections.abc import Callable
from typing import Any

from svod.core.kernel.groups import has_block_rows
from svod.core.kernel.opts.splits import checked_amount, checked_groups, cut_reduction, free_name, is_reduce, loop_row, split_row
from svod.core.kernel.scheduler import GROUP, LOCAL, AxisLoop, Pipelined, Scheduler
from svod.errors import KernelOptError

MAX_BUFFERS = 8


def _group_row(state: Scheduler, axis: str, arg: Any, what: str) -> tuple[int, int]:
    """(row, amount) of a split over the threads of a group. Raises KernelOptError if the target has no groups, or the amount is too
    large."""
    if not state.target.has_groups:
        raise KernelOptError(f"{what}({axis}): the target {state.target.arch} has no groups of threads")
    if any(o.op == "NOLOCALS" for o in state.applied_opts):
        raise KernelOptError(f"{what}({axis}): NOLOCALS keeps the groups of this state at one thread")
    row = loop_row(state, axis, what)
    n = checked_amount(state, row, arg, what)
    if n > state.target.group_threads:
        raise KernelOptError(f"{what}({axis}, {arg}): a group has at most {state.target.group_threads} threads")
    return row, n


def local(state: Scheduler, axis: str, arg: Any) -> Scheduler:
    """Bind n positions of an output axis to the threads of a group. If the stage is computed inside the loops of another stage, its value
    lies in shared memory, where all threads write and read it. Positions beyond the end of the axis are guarded.

        for o in N: y[o] = f(o)     grid o in N/n: threads o.in in n: y[o*n + o.in] = f(o*n + o.in)
    """
    row, n = _group_row(state, axis, arg, "LOCAL")
    if is_reduce(state, row):
        raise KernelOptError(f"LOCAL({axis}): the threads of a reduce axis combine partial results; use GROUP or GROUPTOP")
    return checked_groups(split_row(state, row, n, LOCAL), f"LOCAL({axis}, {arg})")


def group(state: Scheduler, axis: str, arg: Any) -> Scheduler:
    """Let n threads of a group share a reduction; neighbouring threads take neighbouring positions. Threads of one subgroup combine their
    partial results by shuffles, in a tree; threads of several subgroups, or of a target without shuffles, combine them through shared
    memory. All n have the result. A reduction that no LOCAL loop indexes is shared by all threads; one that is constant over n neighbouring
    threads, such as the maximum of a row for its elements, is shared by those n threads. Else each position of LOCAL loops has n threads of
    its own.

        for r in K: acc += f(r)     threads t in n: for r in K/n: acc += f(r*n + t);  p[t] = acc;  barrier;  acc = Σ p
    """
    return _share_reduction(state, axis, arg, "GROUP", split_row)


def grouptop(state: Scheduler, axis: str, arg: Any) -> Scheduler:
    """Let n threads of a group share a reduction, each taking a contiguous block of positions. The loop over the block keeps the name.

        for r in K: acc += f(r)     threads t in n: for r in K/n: acc += f(t*K/n + r);  p[t] = acc;  barrier;  acc = Σ p
    """
    return _share_reduction(state, axis, arg, "GROUPTOP", _split_top)


def _share_reduction(state: Scheduler, axis: str, arg: Any, what: str, split: Callable[[Scheduler, int, int, str], Scheduler]) -> Scheduler:
    row, n = _group_row(state, axis, arg, what)
    if not is_reduce(state, row):
        raise KernelOptError(f"{what}({axis}): nothing is summed up along an output axis; use LOCAL")
    if not state.target.shared_bytes:
        raise KernelOptError(f"{what}({axis}): the target {state.target.arch} has no shared memory")
    if state.split_reduce and state.split_reduce.axis == state.rows[row].axis:
        raise KernelOptError(f"{what}({axis}): the grid shares this axis already; GROUP comes before SPLITK")
    return checked_groups(split(state, row, n, GROUP), f"{what}({axis}, {arg})")


def _split_top(state: Scheduler, row: int, n: int, role: str) -> Scheduler:
    """Split a loop row into `n` blocks: a new row with `role` counts the blocks; the row keeps its name and has the positions of a
    block."""
    r = state.rows[row]
    left = -(-r.extent // n)
    if left == 1:
        return split_row(state, row, n, role)
    name = free_name(state, f"{r.name}.top")
    ids = state.axis_rows[r.axis]
    at = ids.index(row)
    axis_rows = list(state.axis_rows)
    axis_rows[r.axis] = (*ids[:at], len(state.rows), *ids[at:])
    rows = (*state.rows[:row], r._replace(extent=left), *state.rows[row + 1:], AxisLoop(name, r.axis, n, r.stride * left, role))
    return state.copy(rows=rows, axis_rows=tuple(axis_rows))


def nolocals(state: Scheduler, axis: str, arg: Any) -> Scheduler:
    """Keep the groups of every phase at one thread: LOCAL, GROUP and GROUPTOP are refused after it. It changes no loop."""
    if not state.target.has_groups:
        raise KernelOptError(f"NOLOCALS({axis}): the target {state.target.arch} has no groups of threads")
    if has_block_rows(state):
        raise KernelOptError(f"NOLOCALS({axis}): loops or tiles are bound to the threads of a group already")
    if any(o.op == "NOLOCALS" for o in state.applied_opts):
        raise KernelOptError(f"NOLOCALS({axis}): it was applied already")
    return state.copy()


def splitk(state: Scheduler, axis: str, arg: Any) -> Scheduler:
    """Split a reduce axis into n parts. Groups of the grid compute partial results for each part, and a second phase combines them. If the
    results are few and the size of a subgroup divides n, the threads of a subgroup combine one result together.

        grid i in M: for r in K: acc += f(i, r)     grid t in n, i in M: p[t, i] = Σ f(i, part t);  then  grid i in M: y[i] = Σ p[t, i]
    """
    if not state.target.has_groups:
        raise KernelOptError(f"SPLITK({axis}): the target {state.target.arch} has no grid of groups; THREAD cuts a reduction over cores")
    row = loop_row(state, axis, "SPLITK")
    n = checked_amount(state, row, arg, "SPLITK")
    if not is_reduce(state, row) or not state.kernel.stages[state.stage_of_row(row)].is_output:
        raise KernelOptError(f"SPLITK({axis}): only a reduce axis of the output stage is cut into parts")
    limit, *_ = state.target.global_limits
    if n > limit:
        raise KernelOptError(f"SPLITK({axis}, {arg}): a grid has at most {limit} groups")
    if state.split_reduce:
        raise KernelOptError(f"SPLITK({axis}): a reduction is cut into parts already")
    return cut_reduction(state, row, n, f"SPLITK({axis}, {arg})")


def pipeline(state: Scheduler, axis: str, arg: Any) -> Scheduler:
    """Copy the data of later iterations of a reduce loop into shared memory while the current one computes. The copies placed in the loop
    get n buffers and start n-1 iterations ahead: asynchronously if the target can, else through registers. With four buffers or more,
    instructions that read both operands from shared memory may finish after the next barrier, and copies start n-2 iterations ahead.

        for r: fill p; barrier; use p     fill p[0];  for r: barrier; start to fill p[(r+1) % 2]; use p[r % 2]
    """
    what = f"PIPELINE({axis}, {arg!r})"
    if not state.target.has_groups or not state.target.shared_bytes:
        raise KernelOptError(f"{what}: the target {state.target.arch} has no memory that the threads of a group share")
    row = loop_row(state, axis, "PIPELINE")
    if not is_reduce(state, row):
        raise KernelOptError(f"{what}: only the iterations of a reduce loop follow one another; groups run at the same time anyway")
    if not isinstance(arg, int) or isinstance(arg, bool) or not 2 <= arg <= MAX_BUFFERS:
        raise KernelOptError(f"{what}: needs the number of buffers, an int of 2 to {MAX_BUFFERS}")
    if state.pipeline is not None:
        raise KernelOptError(f"{what}: the loop {state.rows[state.pipeline.row].name} is pipelined already")
    if state.rows[row].extent < 2:
        raise KernelOptError(f"{what}: the loop has no later iterations")
    if not any(place == row and isinstance(place, int) for place in state.place):
        raise KernelOptError(f"{what}: nothing is staged in the loop; STAGE what it reads there first")
    return state.copy(pipeline=Pipelined(row, arg))
