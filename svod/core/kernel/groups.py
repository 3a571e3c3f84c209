"""Which loops of a state are bound to which level of the machine, and what a group of threads computes.

LOCAL, GROUP and GROUPTOP bind loops to the threads of a group. The threads of a phase form a grid of two parts: the LOCAL loops of the
stage that the phase stores, and one part that all reductions of the phase share, as large as the largest of them.

    y[i] = Σ x[i, k],  LOCAL(o0, 8) GROUP(r0, 4)      32 threads; thread t has row t // 4 of the 8 and every fourth k from t % 4
"""
from __future__ import annotations

from math import prod
from typing import NamedTuple

from svod.core.kernel.placement import Placement, first_reduce, is_derived, place_stages, vector_row
from svod.core.kernel.scheduler import DOT, GROUP, LOCAL, LOOP, Scheduler
from svod.core.machine.levels import Level, MemorySpace
from svod.errors import KernelOptError

BLOCK_ROLES = (LOCAL, GROUP)
AREA = 64       # bytes: areas of shared memory begin at multiples of this


class ThreadGroup(NamedTuple):
    """The threads of a group of one phase: `local` positions, each computed by `reducers` threads that share its reductions."""

    local: int
    reducers: int

    @property
    def threads(self) -> int:
        return self.local * self.reducers


def level_of(state: Scheduler, row: int) -> Level:
    """The level of the machine to which a loop row is bound."""
    role = state.rows[row].role
    if role in BLOCK_ROLES:
        return Level.BLOCK
    if role == DOT:
        return Level.INTRINSIC
    if role != LOOP:
        r = place_stages(state).resolved[state.stage_of_row(row)]
        return Level.VECTOR if r is not None and vector_row(state, r) == row else Level.UNROLL
    if state.target.has_groups:
        return Level.GRID if row in grid_rows(state, place_stages(state), state.stage_of_row(row)) else Level.SERIAL
    return Level.CORE if state.thread is not None and state.thread.row == row else Level.SERIAL


def grid_rows(state: Scheduler, placement: Placement, stage: int) -> tuple[int, ...]:
    """The output loops that become the grid of a phase, outermost first, up to one with a stage inside; a cut reduction's parts."""
    cut = state.split_reduce is not None and state.kernel.axes[state.split_reduce.axis].stage == stage
    if placement.paths[stage] != () or is_derived(state.kernel.stages[stage]) or cut:
        return ()
    rows = state.order[stage][:first_reduce(state, stage)]
    count = next((depth for depth in range(1, len(rows)) if (stage, depth) in placement.children), len(rows))
    return rows[:count]


def space_of(placement: Placement, stage: int, positions: int) -> MemorySpace:
    """The memory of a stage of which `positions` are computed at a time. Values that are staged inside a phase belong to one thread."""
    if placement.paths[stage] == ():
        return MemorySpace.GLOBAL
    return MemorySpace.REGISTER if positions == 1 else MemorySpace.SCRATCH


def has_block_rows(state: Scheduler) -> bool:
    """Whether any loop is bound to the threads of a group."""
    return any(r.role in BLOCK_ROLES for r in state.rows)


def covered_extent(state: Scheduler, axis: int) -> int:
    """Positions that the loops of an axis cover, including those beyond its end."""
    return prod(state.rows[r].extent for r in state.axis_rows[axis])


def is_covered(state: Scheduler, placement: Placement, stage: int, axis: int) -> bool:
    """Whether the loops of an axis cover whole tiles, with guards beyond its end, because threads or groups share it and no position may
    be computed by two of them."""
    if not state.target.has_groups:
        return False
    stored = placement.paths[stage] == () and axis in state.kernel.stages[stage].outs
    return stored or any(state.rows[r].role in BLOCK_ROLES for r in state.axis_rows[axis])


def spanned(state: Scheduler, placement: Placement, stage: int, axis: int) -> int:
    """Positions of an axis of a stage that its loops span, padding included."""
    return covered_extent(state, axis) if is_covered(state, placement, stage, axis) else state.axis_extent(axis)


def reducers_of(state: Scheduler, stage: int) -> int:
    """The threads that share the reductions of a stage."""
    return prod(state.rows[r].extent for a in state.kernel.stages[stage].reds for r in state.axis_rows[a] if state.rows[r].role == GROUP)


def phase_of(placement: Placement, stage: int) -> int:
    """The output stage of the phase in which a stage is computed."""
    path = placement.paths[stage]
    return next((outer for outer, _ in path or ()), stage)


def group_of(state: Scheduler, placement: Placement, root: int) -> ThreadGroup:
    """The group of threads of the phase that stores stage `root`."""
    local = prod(state.rows[r].extent for a in state.kernel.stages[root].outs for r in state.axis_rows[a] if state.rows[r].role == LOCAL)
    inside = [s.index for s in state.kernel.stages if placement.paths[s.index] is not None and phase_of(placement, s.index) == root]
    return ThreadGroup(local, max(reducers_of(state, s) for s in inside))


def most_threads(state: Scheduler) -> int:
    """Threads of the largest group of a state; 1 where no loop is bound to threads."""
    if not has_block_rows(state):
        return 1
    placement = place_stages(state)
    return max(group_of(state, placement, root).threads for root in placement.roots)


def exchanged_bytes(state: Scheduler, placement: Placement, stage: int, threads: int) -> int:
    """Bytes of shared memory for the partial results that `threads` threads exchange in a stage."""
    r = placement.resolved[stage]
    assert r is not None
    s = state.kernel.stages[stage]
    positions = prod(state.rows[x].extent for a in s.outs + s.reds for x in state.axis_rows[a]
                     if state.rows[x].role not in (LOOP, *BLOCK_ROLES))
    return sum(-(-threads * positions * d.itemsize // AREA) * AREA for red in r.reductions for d in red.dtypes)


def check_groups(state: Scheduler) -> None:
    """Raises KernelOptError where the loops bound to threads contradict each other, or a group exceeds the target's limits."""
    if not has_block_rows(state):
        return
    placement, target = place_stages(state), state.target
    for s in state.kernel.stages:
        rows = [state.rows[r] for a in s.outs for r in state.axis_rows[a] if state.rows[r].role == LOCAL]
        if rows and placement.paths[s.index] != ():
            raise KernelOptError(f"stage {s.name} is computed inside a loop of another stage, so its loop {rows[0].name} cannot be the "
                                 "threads of a group; STAGE it at the root first")
    for root in placement.roots:
        threads = group_of(state, placement, root).threads
        if threads > target.group_threads:
            raise KernelOptError(f"a group would have {threads} threads; the target allows {target.group_threads}")
        needed = sum(exchanged_bytes(state, placement, s.index, threads) for s in state.kernel.stages
                     if placement.paths[s.index] is not None and phase_of(placement, s.index) == root and reducers_of(state, s.index) > 1)
        if needed > target.shared_bytes:
            raise KernelOptError(f"the partial results of a group take {needed} bytes of shared memory; the target has "
                                 f"{target.shared_bytes}")
