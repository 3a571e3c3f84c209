"""The opts that decide where stages are computed, and how memory is read and written."""
from __future__ import annotations

from typing import Any

from svod.core.kernel import intrinsics as dots
from svod.core.kernel.kernel import LinearIndex, ResolvedStage
from svod.core.kernel.opts.splits import takes_no_argument
from svod.core.kernel.placement import is_derived, place_stages
from svod.core.kernel.scheduler import AUTO, INLINE, LOOP, ROOT, Scheduler, StagePlace
from svod.errors import KernelOptError

MAX_PREFETCH = 64


def stage(state: Scheduler, axis: str, arg: Any) -> Scheduler:
    """Compute a stage inside a loop of its reader: in each iteration, the part of it that is read there goes to scratch memory, laid out in
    the order of the reads. At "root", a separate phase computes the whole stage. In a phase with threads, copies that several threads read
    lie in shared memory, and all threads fill them together.

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


def inline(state: Scheduler, axis: str, arg: Any) -> Scheduler:
    """Recompute a stage where it is read. A stage with a reduction goes back to the innermost loop that does not repeat it.

        for n: { p[k] = b[k, n] };  … p[k] …        … b[k, n] …
    """
    takes_no_argument("INLINE", axis, arg)
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


def _with_place(state: Scheduler, s: int, place: StagePlace) -> Scheduler:
    new = state.copy(place=(*state.place[:s], place, *state.place[s + 1:]))
    place_stages(new)
    return new


def stream(state: Scheduler, axis: str, arg: Any) -> Scheduler:
    """Store the output past the caches (non-temporal), for results that the caches do not keep."""
    takes_no_argument("STREAM", axis, arg)
    s = state.kernel.stages[state.stage_id(axis)]
    if not s.is_output:
        raise KernelOptError(f"STREAM({axis}): only an output is streamed")
    if state.stream:
        raise KernelOptError(f"STREAM({axis}): it is streamed already")
    if not state.target.has_non_temporal:
        raise KernelOptError(f"STREAM({axis}): the target {state.target.arch} has no stores that go past the caches")
    return state.copy(stream=True)


def prefetch(state: Scheduler, axis: str, arg: Any) -> Scheduler:
    """Prefetch the data that loads of an argument, or of a stage at the root, will read n iterations later: PREFETCH("p1", n) for the
    second argument of the kernel, PREFETCH("s0", n) for a stage. Iterations are those of the innermost loop that moves the load.

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
    """The reads of the argument called `name`, or of the stage at the root with that name: (reading stage, index) each."""
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
    """Whether a loop moves local axis `a` of a stage. For a copy always true, as its loops are derived."""
    if is_derived(r.stage):
        return True
    return any(state.rows[row].role == LOOP and state.rows[row].extent > 1 for row in state.axis_rows[r.axes[a]])
