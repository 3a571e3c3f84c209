"""The opts: each a pure function (state, axis, arg) → state that raises KernelOptError with the reason when it does not apply.

The docstrings show the loop nest before and after. Amounts are positions of the axis; 0 means the whole axis.
"""
from __future__ import annotations

from collections.abc import Callable
from math import prod
from typing import Any

from svod.core.kernel import intrinsics as dots
from svod.core.kernel.groups import check_groups, has_block_rows
from svod.core.kernel.kernel import Kernel, LinearIndex, ResolvedStage
from svod.core.kernel.online import is_pair
from svod.core.kernel.online import online as rewrite_online
from svod.core.kernel.placement import first_reduce, is_derived, place_stages
from svod.core.kernel.scheduler import (
    AUTO,
    DOT,
    GROUP,
    INLINE,
    LOCAL,
    LOOP,
    ROOT,
    UNROLL,
    UPCAST,
    IntrinsicChoice,
    Loop,
    ParallelLoop,
    Pipelined,
    ReductionParts,
    Scheduler,
    StagePlace,
)
from svod.core.machine.isa import DOTS, Dot
from svod.core.schedule.flatten import flatten as flat_ast
from svod.errors import KernelOptError

Rule = Callable[[Scheduler, str, Any], Scheduler]
MAX_UNROLL = 32
MAX_PREFETCH = 64
MAX_BUFFERS = 8


# -- what several opts ask --------------------------------------------------------------------------

def _loop_row(state: Scheduler, name: str, what: str) -> int:
    """The id of the loop row `name`, in a stage whose loops can be changed."""
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


def _amount(state: Scheduler, row: int, arg: Any, what: str) -> int:
    """The amount of a split, checked against the row's extent."""
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


def _takes_no_argument(what: str, axis: str, arg: Any) -> None:
    if arg is not None:
        raise KernelOptError(f"{what}({axis}, {arg!r}): takes no argument")


def _split(state: Scheduler, row: int, n: int, role: str) -> Scheduler:
    """Split `n` inner positions off a loop row: the row keeps its name with the outer positions, a row of `role` is appended."""
    r = state.rows[row]
    names = {x.name for x in state.rows}
    name, k = r.name + ".in", 2
    while name in names:
        name, k = f"{r.name}.in{k}", k + 1
    left = -(-r.extent // n)
    rows = list(state.rows)
    rows[row] = Loop(r.name, r.axis, left, r.stride * n, r.role)
    rows.append(Loop(name, r.axis, n, r.stride, role))
    new = len(rows) - 1
    ids = state.axis_rows[r.axis]
    at = ids.index(row) + 1
    axis_rows = list(state.axis_rows)
    axis_rows[r.axis] = (*ids[:at], new, *ids[at:])
    if left > 1:
        return state.copy(rows=tuple(rows), axis_rows=tuple(axis_rows))
    # used up: the loop is gone, its name stays
    _check_unused(state, row, n)
    stage = state.stage_of_row(row)
    order = list(state.order)
    order[stage] = tuple([x for x in order[stage] if x != row])
    return state.copy(rows=tuple(rows), axis_rows=tuple(axis_rows), order=tuple(order))


def _check_unused(state: Scheduler, row: int, n: int) -> None:
    """Raises KernelOptError when something needs the loop that a split by `n` would use up."""
    name = state.rows[row].name
    for s, place in enumerate(state.place):
        if place == row and isinstance(place, int):
            raise KernelOptError(f"an amount of {n} uses up {name}, and stage {state.kernel.stages[s].name} lives there; INLINE it or "
                                 f"STAGE it elsewhere first")
    if state.pipeline and state.pipeline.row == row:
        raise KernelOptError(f"an amount of {n} uses up {name}, whose copies run ahead")
    if (state.thread and state.thread.row == row) or (state.split_reduce and state.axis_rows[state.split_reduce.axis][0] == row):
        raise KernelOptError(f"an amount of {n} uses up {name}, whose iterations the cores share")


def _with_order(state: Scheduler, stage: int, order: tuple[int, ...]) -> Scheduler:
    orders = list(state.order)
    orders[stage] = order
    return state.copy(order=tuple(orders))


def _check_registers(state: Scheduler, stage: int, what: str) -> None:
    """Accumulators (or values side by side) of a stage, in vectors, must not exceed twice the vector registers, nor those that a thread has
    of tiles its registers; tiles of a core have their own."""
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


def _is_reduce(state: Scheduler, row: int) -> bool:
    return state.kernel.axes[state.rows[row].axis].kind == "r"


# -- opts -------------------------------------------------------------------------------------------

def upcast(state: Scheduler, axis: str, arg: Any) -> Scheduler:
    """n positions side by side in registers. On an output axis: a register tile or vector lanes; on a reduce axis: n partial results.

        for o in N:                 for o in N/n:
            y[o] = f(o)                 y[o*n], …, y[o*n + n-1] = f(o*n), …, f(o*n + n-1)
    """
    row = _loop_row(state, axis, "UPCAST")
    n = _amount(state, row, arg, "UPCAST")
    new = _split(state, row, n, UPCAST)
    _check_registers(new, state.stage_of_row(row), f"UPCAST({axis}, {arg})")
    return new


def unroll(state: Scheduler, axis: str, arg: Any) -> Scheduler:
    """n iterations of a reduce axis as straight-line code into the same accumulators.

        for r in K: acc += f(r)     for r in K/n: acc += f(r*n); …; acc += f(r*n + n-1)
    """
    row = _loop_row(state, axis, "UNROLL")
    if not _is_reduce(state, row):
        raise KernelOptError(f"UNROLL({axis}): an output axis has no accumulator; use UPCAST")
    n = _amount(state, row, arg, "UNROLL")
    if n > MAX_UNROLL:
        raise KernelOptError(f"UNROLL({axis}, {arg}): at most {MAX_UNROLL} iterations")
    return _split(state, row, n, UNROLL)


def tile(state: Scheduler, axis: str, arg: Any) -> Scheduler:
    """Split a loop for cache blocking. The inner loop goes inside the other output loops (reduce tiles: innermost).

        for a in N: for b in M: …   for a in N/n: for b in M: for a.in in n: …
    """
    row = _loop_row(state, axis, "TILE")
    n = _amount(state, row, arg, "TILE")
    if n == state.rows[row].extent:
        raise KernelOptError(f"TILE({axis}, {arg}): a tile of the whole axis changes nothing")
    stage = state.stage_of_row(row)
    new = _split(state, row, n, LOOP)
    order = state.order[stage]
    at = len(order) if _is_reduce(state, row) else max(first_reduce(state, stage), order.index(row) + 1)
    inner = new.axis_rows[state.rows[row].axis]
    # an axis cut before: the parts of one axis keep their nesting
    at = min([at, *(order.index(r) for r in inner[inner.index(len(state.rows)) + 1:] if r in order)])
    return _with_order(new, stage, (*order[:at], len(state.rows), *order[at:]))


def reorder(state: Scheduler, axis: str, arg: Any) -> Scheduler:
    """Order of a stage's loops: ORDER("out", ("o1", "o0")) puts the named loops, in this order, at the places they now have.

        for o0: for o1: for r0      for o1: for o0: for r0
    """
    stage = state.stage_id(axis)
    if not isinstance(arg, (tuple, list)) or len(arg) < 2 or len(set(arg)) != len(arg):
        raise KernelOptError(f"ORDER({axis}): needs two or more different loops of the stage, found {arg!r}")
    order = state.order[stage]
    ids = []
    for name in arg:
        row = _loop_row(state, name, "ORDER")
        if state.stage_of_row(row) != stage:
            raise KernelOptError(f"ORDER({axis}): {name} is not a loop of stage {axis}")
        if row in order:    # a loop that is used up has no place any more
            ids.append(row)
    places = sorted(order.index(i) for i in ids)
    result = list(order)
    for at, i in zip(places, ids, strict=True):
        result[at] = i
    return _reordered(state, stage, tuple(result), f"ORDER({axis}, {','.join(arg)})")


def _reordered(state: Scheduler, stage: int, order: tuple[int, ...], what: str) -> Scheduler:
    for row_ids in state.axis_rows:
        inside = [order.index(r) for r in row_ids if r in order]
        if inside != sorted(inside):
            raise KernelOptError(f"{what}: the parts of one axis keep their nesting")
    if state.thread and state.stage_of_row(state.thread.row) == stage and order[0] != state.thread.row:
        raise KernelOptError(f"{what}: the parallel loop stays outermost")
    if order == state.order[stage]:
        raise KernelOptError(f"{what}: that is the order already")
    return _with_order(state, stage, order)


def swap(state: Scheduler, axis: str, arg: Any) -> Scheduler:
    """Exchange two loops of a stage: SWAP("o0", "o1").

        for o0: for o1: …           for o1: for o0: …
    """
    if not isinstance(arg, str):
        raise KernelOptError(f"SWAP({axis}): needs the name of another loop, found {arg!r}")
    a, b = _loop_row(state, axis, "SWAP"), _loop_row(state, arg, "SWAP")
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
    """Which upcast axis of a stage is the vector.

        for o: y[o, 0…7] scalar     for o: y[o, 0:8] as one vector
    """
    _takes_no_argument("LANES", axis, arg)
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
    """Spread a loop over n cores. An output loop becomes the outermost, and cores claim its iterations. A reduce axis is cut into n
    parts: each core makes partial results, and a second phase combines them.

        for o in N: …               parallel(n) for o in N: …
        for r in K: acc += f(r)     parallel(n) for t in n: p[t] = Σ f(part t);  then  y = Σ p[t]
    """
    row = _loop_row(state, axis, "THREAD")
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
    if _is_reduce(state, row):
        return _cut_reduction(state, row, arg, f"THREAD({axis}, {arg})")
    order = state.order[stage.index]
    new = _with_order(state, stage.index, (row, *(x for x in order if x != row)))
    new = new.copy(thread=ParallelLoop(row, arg))
    for ids in new.axis_rows:
        inside = [new.order[stage.index].index(x) for x in ids if x in new.order[stage.index]]
        if inside != sorted(inside):
            raise KernelOptError(f"THREAD({axis}, {arg}): an inner part of an axis cannot become the outermost loop")
    return new


def _cut_reduction(state: Scheduler, row: int, n: int, what: str) -> Scheduler:
    """A reduction of the output stage cut into `n` parts."""
    r = state.rows[row]
    if r.extent < n or state.axis_rows[r.axis][0] != row:
        raise KernelOptError(f"{what}: only the outermost part of a reduce axis of at least {n} iterations is cut")
    if not state.target.has_groups and (state.pads[r.axis] or any(
            not isinstance(p, str) and state.stage_of_row(p) == state.stage_of_row(row) for p in state.place)):
        raise KernelOptError(f"{what}: stages placed at loops of the output, or a padded axis, cannot be cut into parts")
    return state.copy(split_reduce=ReductionParts(r.axis, n))


def stage(state: Scheduler, axis: str, arg: Any) -> Scheduler:
    """Compute the part of a stage that the loops inside a loop read, into scratch, laid out in the order of the reads. At "root": a
    phase of its own computes the whole stage. In a phase with threads, copies that several of them read lie in shared memory, and all
    threads fill them together.

        for n: for k: c += a[k]*b[k, n]     for n: { p[k] = b[k, n] for all k };  for k: c += a[k]*p[k]
    """
    s = state.stage_id(axis)
    st = state.kernel.stages[s]
    if st.is_output:
        raise KernelOptError(f"STAGE({axis}): an output is stored where it is computed")
    place: str | int
    if arg == ROOT:
        place = ROOT
    elif isinstance(arg, str):
        place = state.row_id(arg)
        if state.rows[place].role != LOOP:
            raise KernelOptError(f"STAGE({axis}, {arg}): {arg} is {state.rows[place].role}, a stage lives inside a loop")
        if place not in state.order[state.stage_of_row(place)]:
            raise KernelOptError(f"STAGE({axis}, {arg}): {arg} has no iterations left; name a loop around or inside it")
        around = state.kernel.stages[state.stage_of_row(place)]
        if around is st:
            raise KernelOptError(f"STAGE({axis}, {arg}): that is a loop of the stage itself")
        if is_derived(around):
            raise KernelOptError(f"STAGE({axis}, {arg}): the copy loops of stage {around.name} are derived from where it is read; "
                                 "no stage lives inside them")
    else:
        raise KernelOptError(f"STAGE({axis}, {arg!r}): needs the name of a loop, or \"root\"")
    if state.place[s] == place:
        raise KernelOptError(f"STAGE({axis}, {arg}): it lives there already")
    if state.split_reduce and place != ROOT and not state.target.has_groups:
        raise KernelOptError(f"STAGE({axis}, {arg}): a reduction that cores share keeps its stages in place")
    return _with_place(state, s, place)


def _with_place(state: Scheduler, s: int, place: StagePlace) -> Scheduler:
    new = state.copy(place=(*state.place[:s], place, *state.place[s + 1:]))
    place_stages(new)
    return new


def inline(state: Scheduler, axis: str, arg: Any) -> Scheduler:
    """Recompute a stage where it is read. A stage with a reduction goes back to the innermost loop that does not repeat it.

        for n: { p[k] = b[k, n] };  … p[k] …        … b[k, n] …
    """
    _takes_no_argument("INLINE", axis, arg)
    s = state.stage_id(axis)
    st = state.kernel.stages[s]
    if st.is_output:
        raise KernelOptError(f"INLINE({axis}): an output is stored")
    if s in dots.packed_stages(state):
        raise KernelOptError(f"INLINE({axis}): a dot instruction reads it in groups, as only staged values are laid out")
    place = AUTO if st.has_reduce else INLINE
    if state.place[s] == place:
        raise KernelOptError(f"INLINE({axis}): it is computed in place already")
    return _with_place(state, s, place)


def padto(state: Scheduler, axis: str, arg: Any) -> Scheduler:
    """Round an axis' extent up to a multiple of n, masking the tail.

        for o in 13: …              for o in 16: if o < 13: …
    """
    row = _loop_row(state, axis, "PADTO")
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


def stream(state: Scheduler, axis: str, arg: Any) -> Scheduler:
    """Store the output past the caches (non-temporal), for results that the caches do not keep."""
    _takes_no_argument("STREAM", axis, arg)
    s = state.kernel.stages[state.stage_id(axis)]
    if not s.is_output:
        raise KernelOptError(f"STREAM({axis}): only an output is streamed")
    if state.stream:
        raise KernelOptError(f"STREAM({axis}): it is streamed already")
    if not state.target.has_non_temporal:
        raise KernelOptError(f"STREAM({axis}): the target {state.target.arch} has no stores that go past the caches")
    return state.copy(stream=True)


def prefetch(state: Scheduler, axis: str, arg: Any) -> Scheduler:
    """Prefetch what the loads of an argument, or of a stage at the root, read n iterations later, counted in the innermost loop that
    moves them: PREFETCH("p1", n) for the second argument of the kernel, PREFETCH("s0", n) for a stage.

        for r in K: acc += x[r]     for r in K: acc += x[r]; prefetch x[r + n]
    """
    what = f"PREFETCH({axis}, {arg!r})"
    loads = _loads_of(state, axis, what)
    if not isinstance(arg, int) or isinstance(arg, bool) or not 1 <= arg <= MAX_PREFETCH:
        raise KernelOptError(f"{what}: needs how many iterations ahead, an int of 1 to {MAX_PREFETCH}")
    if any(name == axis for name, _ in state.prefetch):
        raise KernelOptError(f"{what}: {axis} is prefetched already")
    if not loads:
        raise KernelOptError(f"{what}: the kernel does not read {axis}")
    if not any(lin.coefs for _, lin in loads):
        raise KernelOptError(f"{what}: {axis} is read at one place or at positions that are looked up: where it is read later is not known")
    if not any(_is_moved(state, r, a) for r, lin in loads for a, _ in lin.coefs):
        raise KernelOptError(f"{what}: no loop is left that moves what is read of {axis}")
    return state.copy(prefetch=tuple(sorted((*state.prefetch, (axis, arg)))))


def _loads_of(state: Scheduler, name: str, what: str) -> list[tuple[ResolvedStage, LinearIndex]]:
    """The reads of an argument by its name, or of a stage at the root by its own."""
    placement, params = place_stages(state), [f"p{i}" for i in range(len(state.kernel.params))]
    staged = next((s for s in placement.roots if name == state.kernel.stages[s].name and s != state.kernel.output), -1)
    if staged >= 0:
        return [(r, lin) for r, n in placement.reads_of(staged) for lin in n.dims]
    if name not in params:
        raise KernelOptError(f"{what}: no such argument or stage at the root; the kernel has {', '.join(params)}")
    slot = params.index(name)
    return [(r, n.linear) for r, path in zip(placement.resolved, placement.paths, strict=True) if r is not None and path is not None
            for n in r.nodes if n.kind == "load" and n.arg == slot and n.linear is not None]


def _is_moved(state: Scheduler, r: ResolvedStage, a: int) -> bool:
    """Whether a loop moves local axis `a` of a stage. A copy has loops wherever it stands."""
    if is_derived(r.stage):
        return True
    return any(state.rows[row].role == LOOP and state.rows[row].extent > 1 for row in state.axis_rows[r.axes[a]])


def tc(state: Scheduler, axis: str, arg: Any) -> Scheduler:
    """Sum narrow products by an instruction of the target (`svod.core.machine.isa.DOTS`): TC("r0", name); with tiles, over two output
    axes, TC("r0", (name, rows, columns)). Both operands are staged in their narrow type with the group innermost, at first at the root,
    and padded with zeros to whole instructions. The axes then count instructions. TC comes before they are split, before or after any
    other opt.

        for r in K: c += wide(a[r])*wide(b[r, n])     p[r, n, i] = b[r*g + i, n];  for r in K/g: c += Σ a[r*g + i]*p[r, n, i], i < g
    """
    what = f"TC({axis}, {arg if isinstance(arg, (str, tuple)) else repr(arg)})"
    row = _loop_row(state, axis, "TC")
    stage = state.stage_of_row(row)
    dot, names = _named_intrinsic(arg, what)
    if not _is_reduce(state, row):
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
        new = _split(new, other, n, DOT)
    _check_registers(new, stage, what)
    place_stages(new)
    return _checked_groups(new, what)


def _check_products(state: Scheduler, stage: int, axis: int, dot: Dot, what: str) -> None:
    """Raises KernelOptError where tiles of floats that cannot be added to one another would sum up too many products in a row."""
    others = prod([state.kernel.axes[a].extent for a in state.kernel.stages[stage].reds if a != axis])
    products = -(-state.kernel.axes[axis].extent // dot.positions) * others
    rule = state.kernel.stages[stage].sum_rule
    if dot.is_tile and not dot.fragments and rule is not None and products > rule.longest:
        raise KernelOptError(f"{what}: a tile would sum up {products} products in a row, rounding each time; at most "
                             f"{rule.longest} are right, as tiles are not added to one another")


def _named_intrinsic(arg: Any, what: str) -> tuple[Dot, list[str]]:
    """The instruction that the argument of TC names, and the names of the axes of its rows and columns."""
    name, *names = arg if isinstance(arg, tuple) and arg else (arg,)
    dot = DOTS.get(name) if isinstance(name, str) else None
    if dot is None:
        raise KernelOptError(f"{what}: needs the name of an instruction, one of {', '.join(DOTS)}")
    if len(names) != (2 if dot.is_tile else 0) or not all(isinstance(n, str) for n in names) or len(set(names)) != len(names):
        raise KernelOptError(f"{what}: {name} takes {'the axes of its rows and columns' if dot.is_tile else 'no axes'}")
    return dot, names


def _tile_rows(state: Scheduler, stage: int, dot: Dot, names: list[str], what: str) -> list[tuple[int, int]]:
    """(row, positions of a tile) of the output axes that an instruction with tiles takes."""
    out = []
    for name, amount in zip(names, (dot.rows, dot.columns), strict=False):
        row = _loop_row(state, name, "TC")
        if state.stage_of_row(row) != stage or _is_reduce(state, row):
            raise KernelOptError(f"{what}: {name} is no output axis of the stage")
        if state.kernel.axes[state.rows[row].axis].extent < 2:
            raise KernelOptError(f"{what}: {name} has one position")
        out.append((row, amount if dot.fragments else min(amount, state.rows[row].extent)))
    return out


def hold(state: Scheduler, axis: str, arg: Any) -> Scheduler:
    """Lay out the positions of a stage like the results of a matrix instruction, tile by tile: HOLD(stage, (instruction, rows, columns)),
    where rows is the innermost loop of an output axis and columns that of an output or a reduce axis. The loops then count tiles, and LOCAL
    counts subgroups. Threads that have columns of the same row share what is reduced along it, and all have the result. Where a stage and
    all that read it are laid out alike, its values stay in the registers of the threads that computed them; else they lie in shared
    memory.

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
        row = _loop_row(state, name, "HOLD")
        a = state.rows[row].axis
        if state.stage_of_row(row) != s or (not axes and _is_reduce(state, row)):
            raise KernelOptError(f"{what}: {name} is no {'axis' if axes else 'output axis'} of the stage")
        if state.axis_rows[a][-1] != row or state.pads[a] or a in axes or state.kernel.axes[a].bound is not None:
            raise KernelOptError(f"{what}: tiles are cut from the innermost loop of an axis that is not padded, and depends on no variable")
        axes.append(a)
        state = _split(state, row, amount, DOT)
    chosen = list(state.dots)
    chosen[s] = IntrinsicChoice(-1, dot.name, *axes)
    new = state.copy(dots=tuple(chosen))
    _check_registers(new, s, what)
    place_stages(new)
    return _checked_groups(new, what)


def online(state: Scheduler, axis: str, arg: Any) -> Scheduler:
    """Compute a maximum over rows, the sum of exponentials relative to it and their weighted sums in one pass over blocks of n
    positions: ONLINE(stage of the maximum, n). Each block has its own maximum; where two blocks meet, the sums of the smaller maximum
    are scaled down (`svod/core/kernel/online.py`). ONLINE comes first; later opts see the stages of the blocks.

        for k: m = max(m, x[k]);            for b in K/n: { p = max of x[b*n…]; w[i] = exp(x[b*n + i] - p), i < n;
        for k: s += exp(x[k] - m);              (m, s, a) = expsum((m, s, a), (p, Σ w[i], Σ w[i]*v[b*n + i])) };
        for k: a += exp(x[k] - m)/s*v[k]    a = a/s
    """
    if not isinstance(arg, int) or isinstance(arg, bool):
        raise KernelOptError(f"ONLINE({axis}, {arg!r}): needs the positions of a block, an int")
    if any(o.op != "ONLINE" for o in state.applied_opts):
        raise KernelOptError(f"ONLINE({axis}, {arg}): it makes other stages of the kernel's, so it comes before all other opts")
    try:
        kernel = rewrite_online(state.kernel, axis, arg)
    except KernelOptError as e:
        raise KernelOptError(f"ONLINE({axis}, {arg}): {e}") from None
    new = Scheduler(kernel, state.target)
    for row, r in enumerate(new.rows):
        # both elements of a row's pair come out of one pass
        if is_pair(kernel, r.axis):
            new = _split(new, row, r.extent, UPCAST)
    return new.copy(online=(*state.online, (axis, arg)), applied_opts=state.applied_opts)


def flatten(state: Scheduler, axis: str, arg: Any) -> Scheduler:
    """A sum of products of two stages as a product of two matrices: FLATTEN(stage). The output axes that one factor alone has become
    one, as do those that are summed up, the one last along which the loads of the factors are contiguous
    (`svod/core/schedule/flatten.py`). FLATTEN comes first; later opts see the merged axes.

        for n, o, y, x: for c, i, j:                        for m in N*Y*X, o: for k in I*J*C:
            out[n, o, y, x] += a[n, y + i, x + j, c]*w[…]       out[m, o] += a[m // YX, m // X % Y + k // JC, …]*w[o, k]
    """
    if arg is not None:
        raise KernelOptError(f"FLATTEN({axis}, {arg!r}): takes a stage alone")
    if state.applied_opts:
        raise KernelOptError(f"FLATTEN({axis}): it makes other axes of the kernel's, so it comes before all other opts")
    known = state.kernel.rewritten.get((axis, 0))
    if known is None:
        stage = state.kernel.stages[state.stage_id(axis)]
        try:
            known = Kernel(flat_ast(state.kernel.ast, stage.node))
        except KernelOptError as e:
            raise KernelOptError(f"FLATTEN({axis}): {e}") from None
        state.kernel.rewritten[axis, 0] = known
    return Scheduler(known, state.target).copy(online=((axis, 0),), applied_opts=state.applied_opts)


# -- opts of targets with groups of threads -----------------------------------------------------------

def _group_row(state: Scheduler, axis: str, arg: Any, what: str) -> tuple[int, int]:
    """The row and the amount of a split over the threads of a group. Raises KernelOptError where the target has none."""
    if not state.target.has_groups:
        raise KernelOptError(f"{what}({axis}): the target {state.target.arch} has no groups of threads")
    if any(o.op == "NOLOCALS" for o in state.applied_opts):
        raise KernelOptError(f"{what}({axis}): NOLOCALS keeps the groups of this state at one thread")
    row = _loop_row(state, axis, what)
    n = _amount(state, row, arg, what)
    if n > state.target.group_threads:
        raise KernelOptError(f"{what}({axis}, {arg}): a group has at most {state.target.group_threads} threads")
    return row, n


def _checked_groups(state: Scheduler, what: str) -> Scheduler:
    try:
        check_groups(state)
    except KernelOptError as e:
        raise KernelOptError(f"{what}: {e}") from None
    return state


def local(state: Scheduler, axis: str, arg: Any) -> Scheduler:
    """n positions of an output axis become the threads of a group. A stage inside the loops of another one is then kept in shared memory,
    computed by all threads and read by all. Positions beyond the end of the axis are guarded.

        for o in N: y[o] = f(o)     grid o in N/n: threads o.in in n: y[o*n + o.in] = f(o*n + o.in)
    """
    row, n = _group_row(state, axis, arg, "LOCAL")
    if _is_reduce(state, row):
        raise KernelOptError(f"LOCAL({axis}): the threads of a reduce axis combine partial results; use GROUP or GROUPTOP")
    return _checked_groups(_split(state, row, n, LOCAL), f"LOCAL({axis}, {arg})")


def group(state: Scheduler, axis: str, arg: Any) -> Scheduler:
    """n threads of a group share a reduction; neighbouring threads take neighbouring positions. Threads of a subgroup combine their
    partial results by shuffles, in a tree; those of several subgroups, or of a target without shuffles, through shared memory. All n
    have the result. A reduction that no LOCAL loop indexes is shared by all threads; one that is constant over n neighbouring threads,
    such as the maximum of a row for its elements, by those n. Else each position of LOCAL loops has n threads of its own.

        for r in K: acc += f(r)     threads t in n: for r in K/n: acc += f(r*n + t);  p[t] = acc;  barrier;  acc = Σ p
    """
    return _share_reduction(state, axis, arg, "GROUP", _split)


def grouptop(state: Scheduler, axis: str, arg: Any) -> Scheduler:
    """n threads of a group share a reduction, each taking a block of positions. The loop keeps its name inside the block.

        for r in K: acc += f(r)     threads t in n: for r in K/n: acc += f(t*K/n + r);  p[t] = acc;  barrier;  acc = Σ p
    """
    return _share_reduction(state, axis, arg, "GROUPTOP", _split_top)


def _share_reduction(state: Scheduler, axis: str, arg: Any, what: str, split: Callable[[Scheduler, int, int, str], Scheduler]) -> Scheduler:
    row, n = _group_row(state, axis, arg, what)
    if not _is_reduce(state, row):
        raise KernelOptError(f"{what}({axis}): nothing is summed up along an output axis; use LOCAL")
    if not state.target.shared_bytes:
        raise KernelOptError(f"{what}({axis}): the target {state.target.arch} has no shared memory")
    if state.split_reduce and state.split_reduce.axis == state.rows[row].axis:
        raise KernelOptError(f"{what}({axis}): the grid shares this axis already; GROUP comes before SPLITK")
    return _checked_groups(split(state, row, n, GROUP), f"{what}({axis}, {arg})")


def _split_top(state: Scheduler, row: int, n: int, role: str) -> Scheduler:
    """Split `n` outer positions off a loop row: the row keeps its name with the inner positions, a row of `role` stands around it."""
    r = state.rows[row]
    left = -(-r.extent // n)
    if left == 1:
        return _split(state, row, n, role)
    names = {x.name for x in state.rows}
    name, k = f"{r.name}.top", 2
    while name in names:
        name, k = f"{r.name}.top{k}", k + 1
    ids = state.axis_rows[r.axis]
    at = ids.index(row)
    axis_rows = list(state.axis_rows)
    axis_rows[r.axis] = (*ids[:at], len(state.rows), *ids[at:])
    rows = (*state.rows[:row], r._replace(extent=left), *state.rows[row + 1:], Loop(name, r.axis, n, r.stride * left, role))
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
    """Cut a reduce axis into n parts, for each of which groups of the grid make partial results; a second phase combines them, with a
    subgroup for each of few results where it divides n.

        grid i in M: for r in K: acc += f(i, r)     grid t in n, i in M: p[t, i] = Σ f(i, part t);  then  grid i in M: y[i] = Σ p[t, i]
    """
    if not state.target.has_groups:
        raise KernelOptError(f"SPLITK({axis}): the target {state.target.arch} has no grid of groups; THREAD cuts a reduction over cores")
    row = _loop_row(state, axis, "SPLITK")
    n = _amount(state, row, arg, "SPLITK")
    if not _is_reduce(state, row) or not state.kernel.stages[state.stage_of_row(row)].is_output:
        raise KernelOptError(f"SPLITK({axis}): only a reduce axis of the output stage is cut into parts")
    limit, *_ = state.target.global_limits
    if n > limit:
        raise KernelOptError(f"SPLITK({axis}, {arg}): a grid has at most {limit} groups")
    if state.split_reduce:
        raise KernelOptError(f"SPLITK({axis}): a reduction is cut into parts already")
    return _cut_reduction(state, row, n, f"SPLITK({axis}, {arg})")


def pipeline(state: Scheduler, axis: str, arg: Any) -> Scheduler:
    """Copy what later iterations of a reduce loop read while this one computes: the copies into shared memory that stand in the loop get n
    buffers and run n-1 iterations ahead, by asynchronous copies where the target has them, else by way of registers. With four buffers or
    more, products that an instruction computes of shared memory alone go on behind the next barrier, and copies run n-2 ahead.

        for r: fill p; barrier; use p     fill p[0];  for r: barrier; start to fill p[(r+1) % 2]; use p[r % 2]
    """
    what = f"PIPELINE({axis}, {arg!r})"
    if not state.target.has_groups or not state.target.shared_bytes:
        raise KernelOptError(f"{what}: the target {state.target.arch} has no memory that the threads of a group share")
    row = _loop_row(state, axis, "PIPELINE")
    if not _is_reduce(state, row):
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


OPTS: dict[str, Rule] = {
    "UPCAST": upcast, "UNROLL": unroll, "LANES": lanes, "THREAD": thread, "TILE": tile, "ORDER": reorder, "SWAP": swap,
    "STAGE": stage, "INLINE": inline, "PADTO": padto, "STREAM": stream, "PREFETCH": prefetch, "TC": tc, "HOLD": hold, "ONLINE": online,
    "FLATTEN": flatten,
    "LOCAL": local, "GROUP": group, "GROUPTOP": grouptop, "NOLOCALS": nolocals, "SPLITK": splitk, "PIPELINE": pipeline,
}
