"""The opts that change loops: register tiles, order, vector lanes, cores, and padded extents."""
from __future__ import annotations

from typing import Any

from svod.core.kernel.opts.splits import (
    check_registers,
    checked_amount,
    cut_reduction,
    is_reduce,
    keeps_nesting,
    loop_row,
    split_row,
    takes_no_argument,
    with_order,
)
from svod.core.kernel.placement import first_reduce
from svod.core.kernel.scheduler import LOOP, UNROLL, UPCAST, ParallelLoop, Scheduler
from svod.errors import KernelOptError

MAX_UNROLL = 32


def upcast(state: Scheduler, axis: str, arg: Any) -> Scheduler:
    """Compute n positions of an axis side by side in registers. On an output axis: a register tile or vector lanes; on a reduce axis: n
    partial results.

        for o in N:                 for o in N/n:
            y[o] = f(o)                 y[o*n], …, y[o*n + n-1] = f(o*n), …, f(o*n + n-1)
    """
    row = loop_row(state, axis, "UPCAST")
    n = checked_amount(state, row, arg, "UPCAST")
    new = split_row(state, row, n, UPCAST)
    check_registers(new, state.stage_of_row(row), f"UPCAST({axis}, {arg})")
    return new


def unroll(state: Scheduler, axis: str, arg: Any) -> Scheduler:
    """Emit n iterations of a reduce axis as straight-line code, into the same accumulators.

        for r in K: acc += f(r)     for r in K/n: acc += f(r*n); …; acc += f(r*n + n-1)
    """
    row = loop_row(state, axis, "UNROLL")
    if not is_reduce(state, row):
        raise KernelOptError(f"UNROLL({axis}): an output axis has no accumulator; use UPCAST")
    n = checked_amount(state, row, arg, "UNROLL")
    if n > MAX_UNROLL:
        raise KernelOptError(f"UNROLL({axis}, {arg}): at most {MAX_UNROLL} iterations")
    return split_row(state, row, n, UNROLL)


def tile(state: Scheduler, axis: str, arg: Any) -> Scheduler:
    """Split a loop for cache blocking. The inner loop goes inside the other output loops; of a reduce axis, it becomes the innermost.

        for a in N: for b in M: …   for a in N/n: for b in M: for a.in in n: …
    """
    row = loop_row(state, axis, "TILE")
    n = checked_amount(state, row, arg, "TILE")
    if n == state.rows[row].extent:
        raise KernelOptError(f"TILE({axis}, {arg}): a tile of the whole axis changes nothing")
    stage = state.stage_of_row(row)
    new = split_row(state, row, n, LOOP)
    order = state.order[stage]
    at = len(order) if is_reduce(state, row) else max(first_reduce(state, stage), order.index(row) + 1)
    inner = new.axis_rows[state.rows[row].axis]
    # if the axis was split before, its loops keep their nesting
    at = min([at, *(order.index(r) for r in inner[inner.index(len(state.rows)) + 1:] if r in order)])
    return with_order(new, stage, (*order[:at], len(state.rows), *order[at:]))


def reorder(state: Scheduler, axis: str, arg: Any) -> Scheduler:
    """Change the order of a stage's loops: ORDER("out", ("o1", "o0")) puts the named loops in this order, and leaves the others where they
    are.

        for o0: for o1: for r0      for o1: for o0: for r0
    """
    stage = state.stage_id(axis)
    if not isinstance(arg, (tuple, list)) or len(arg) < 2 or len(set(arg)) != len(arg):
        raise KernelOptError(f"ORDER({axis}): needs two or more different loops of the stage, found {arg!r}")
    order = state.order[stage]
    ids = []
    for name in arg:
        row = loop_row(state, name, "ORDER")
        if state.stage_of_row(row) != stage:
            raise KernelOptError(f"ORDER({axis}): {name} is not a loop of stage {axis}")
        if row in order:    # a loop that is used up is not in the order
            ids.append(row)
    places = sorted(order.index(i) for i in ids)
    result = list(order)
    for at, i in zip(places, ids, strict=True):
        result[at] = i
    return _reordered(state, stage, tuple(result), f"ORDER({axis}, {','.join(arg)})")


def _reordered(state: Scheduler, stage: int, order: tuple[int, ...], what: str) -> Scheduler:
    if not keeps_nesting(state, order):
        raise KernelOptError(f"{what}: the parts of one axis keep their nesting")
    if state.thread and state.stage_of_row(state.thread.row) == stage and order[0] != state.thread.row:
        raise KernelOptError(f"{what}: the parallel loop stays outermost")
    if order == state.order[stage]:
        raise KernelOptError(f"{what}: that is the order already")
    return with_order(state, stage, order)


def swap(state: Scheduler, axis: str, arg: Any) -> Scheduler:
    """Exchange two loops of a stage: SWAP("o0", "o1").

        for o0: for o1: …           for o1: for o0: …
    """
    if not isinstance(arg, str):
        raise KernelOptError(f"SWAP({axis}): needs the name of another loop, found {arg!r}")
    a, b = loop_row(state, axis, "SWAP"), loop_row(state, arg, "SWAP")
    stage = state.stage_of_row(a)
    if stage != state.stage_of_row(b) or a == b:
        raise KernelOptError(f"SWAP({axis}, {arg}): two different loops of one stage are exchanged")
    order = list(state.order[stage])
    for row in (a, b):
        if row not in order:
            raise KernelOptError(f"SWAP({axis}, {arg}): {state.rows[row].name} has no iterations left")
    i, j = order.index(a), order.index(b)
    order[i], order[j] = order[j], order[i]
    return _reordered(state, stage, tuple(order), f"SWAP({axis}, {arg})")


def lanes(state: Scheduler, axis: str, arg: Any) -> Scheduler:
    """Choose the upcast axis of a stage that is the vector.

        for o: y[o, 0…7] scalar     for o: y[o, 0:8] as one vector
    """
    takes_no_argument("LANES", axis, arg)
    row = state.row_id(axis)
    stage = state.stage_of_row(row)
    tiles = state.dots[stage]
    if tiles is not None and tiles.columns >= 0:
        raise KernelOptError(f"LANES({axis}): the vector is a row of the stage's tiles")
    if state.rows[row].role != UPCAST:
        raise KernelOptError(f"LANES({axis}): only an upcast axis can be the vector")
    if state.vector_rows[stage] == row:
        raise KernelOptError(f"LANES({axis}): it is the vector already")
    if state.vector_rows[stage] >= 0:
        raise KernelOptError(f"LANES({axis}): the stage's vector was chosen already ({state.rows[state.vector_rows[stage]].name})")
    chosen = list(state.vector_rows)
    chosen[stage] = row
    return state.copy(vector_rows=tuple(chosen))


def thread(state: Scheduler, axis: str, arg: Any) -> Scheduler:
    """Spread a loop over n cores. An output loop becomes the outermost, and cores claim its iterations. A reduce axis is split into n
    parts: each core computes partial results, and a second phase combines them.

        for o in N: …               parallel(n) for o in N: …
        for r in K: acc += f(r)     parallel(n) for t in n: p[t] = Σ f(part t);  then  y = Σ p[t]
    """
    row = loop_row(state, axis, "THREAD")
    r = state.rows[row]
    stage = state.kernel.stages[state.stage_of_row(row)]
    if state.target.has_groups:
        raise KernelOptError(f"THREAD({axis}): the target {state.target.arch} launches a grid of groups; LOCAL and SPLITK share work there")
    if state.thread or state.split_reduce:
        raise KernelOptError(f"THREAD({axis}): the kernel is spread over cores already")
    if not stage.is_output:
        raise KernelOptError(f"THREAD({axis}): only the output stage is spread over cores; stage {stage.name} runs inside it")
    if not isinstance(arg, int) or arg < 2:
        raise KernelOptError(f"THREAD({axis}, {arg!r}): needs 2 or more cores")
    if arg > state.target.threads:
        raise KernelOptError(f"THREAD({axis}, {arg}): the target has {state.target.threads} cores")
    if r.extent < 2:
        raise KernelOptError(f"THREAD({axis}, {arg}): the axis has no iterations left to share")
    if is_reduce(state, row):
        return cut_reduction(state, row, arg, f"THREAD({axis}, {arg})")
    order = state.order[stage.index]
    order = (row, *[x for x in order if x != row])
    if not keeps_nesting(state, order):
        raise KernelOptError(f"THREAD({axis}, {arg}): an inner part of an axis cannot become the outermost loop")
    return with_order(state, stage.index, order).copy(thread=ParallelLoop(row, arg))


def padto(state: Scheduler, axis: str, arg: Any) -> Scheduler:
    """Round an axis' extent up to a multiple of n; positions beyond the original extent are masked.

        for o in 13: …              for o in 16: if o < 13: …
    """
    row = loop_row(state, axis, "PADTO")
    r = state.rows[row]
    extent = state.kernel.axes[r.axis].extent
    if extent == 1:
        raise KernelOptError(f"PADTO({axis}, {arg}): the axis has one position")
    if state.kernel.axes[r.axis].bound is not None:
        raise KernelOptError(f"PADTO({axis}, {arg}): how many positions the axis has depends on a variable; its loops end where they do")
    if len(state.axis_rows[r.axis]) > 1 or state.pads[r.axis] or (state.split_reduce and state.split_reduce.axis == r.axis):
        raise KernelOptError(f"PADTO({axis}, {arg}): an axis is padded before it is split")
    if not isinstance(arg, int) or arg < 2:
        raise KernelOptError(f"PADTO({axis}, {arg!r}): needs a multiple of 2 or more")
    padded = -(-extent // arg) * arg
    if padded == extent:
        raise KernelOptError(f"PADTO({axis}, {arg}): {extent} is a multiple of {arg} already")
    if padded >= 4 * extent:
        raise KernelOptError(f"PADTO({axis}, {arg}): {padded} is four times the {extent} positions or more")
    rows = list(state.rows)
    rows[row] = r._replace(extent=padded)
    pads = list(state.pads)
    pads[r.axis] = padded
    return state.copy(rows=tuple(rows), pads=tuple(pads))
