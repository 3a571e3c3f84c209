"""Loops bound to levels of the machine, and the stages that a group of threads computes.

LOCAL, GROUP and GROUPTOP bind loops to the threads of a group. A stage is computed by the threads in one of three ways:

    by position     the stage that the phase stores, and what is private to a position of it: each position of the LOCAL loops has as many
                    threads as its largest reduction is shared by; a reduction that is the same for as many neighbours is shared by these
    together        stages in shared memory, and values that are the same for all positions: all threads of the group
    alone           a private stage that is not shared by GROUP loops: every thread computes what it reads

    y[i] = Σ x[i, k],  LOCAL(o0, 8) GROUP(r0, 4)      32 threads; thread t has row t // 4 of the 8 and every fourth k from t % 4
    c = a·b,  TC(r0, (mma_f16,o0,o1)) LOCAL(o0, 4)    128 threads; those of subgroup t // 32 hold its tiles together
    softmax of a row,  LOCAL(o1, 32) GROUP(s1.r0, 32) GROUP(s3.r0, 32)     32 threads share the maximum, the sum and the row
"""
from __future__ import annotations

from collections.abc import Collection, Sequence
from math import prod
from typing import NamedTuple

from svod.core.kernel.intrinsics import held_threads
from svod.core.kernel.layout import AREA, is_exact
from svod.core.kernel.placement import Placement, first_reduce, fit, is_derived, place_stages, vector_row
from svod.core.kernel.scheduler import DOT, GROUP, LOCAL, LOOP, Derived, Scheduler
from svod.core.machine.levels import Level, MemorySpace
from svod.core.machine.target import Target
from svod.errors import KernelOptError

BLOCK_ROLES = (LOCAL, GROUP)
FEW_RESULTS = 1 << 12           # results of a cut reduction, in vectors, that by themselves would leave most of a device idle


class ThreadGroup(NamedTuple):
    """The threads of a group of one phase: `local` positions, each computed by `reducers` threads that share its reductions or hold its
    tiles. `together`: the most threads that one stage takes; the group may have more of them than positions need."""

    local: int
    reducers: int
    together: int = 1

    @property
    def threads(self) -> int:
        return max(self.local * self.reducers, self.together)


class StageThreads(NamedTuple):
    """The threads of a group that compute a stage: position = t // inner, of `local` ones; reducer = t % inner, of `reducers` that take
    part. Of a stage with tiles that a subgroup holds, t % inner is the thread in its subgroup, and a position is a tile, or several.
    Threads beyond the last position or reducer do what others do, and store nothing."""

    local: int
    reducers: int
    inner: int

    @property
    def threads(self) -> int:
        return self.local * self.inner


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
    """The output loops that become the grid of a phase, outermost first, up to one with a stage inside. Parts of a cut reduction stand
    around them."""
    if placement.paths[stage] != () or is_derived(state.kernel.stages[stage]):
        return ()
    rows = state.order[stage][:first_reduce(state, stage)]
    count = next((depth for depth in range(1, len(rows)) if (stage, depth) in placement.children), len(rows))
    return rows[:count]


def space_of(state: Scheduler, placement: Placement, stage: int, positions: int, of_group: int, threads: int) -> MemorySpace:
    """The memory of a stage of which a thread needs `positions` at a time, and all `threads` of its group `of_group`. A copy is shared
    where that is less than each thread's own; a stage with loops, where some of them are threads."""
    if placement.paths[stage] == ():
        return MemorySpace.GLOBAL
    if has_own_threads(state, stage):
        return MemorySpace.SHARED
    if positions == 1:
        return MemorySpace.REGISTER
    shared = is_derived(state.kernel.stages[stage]) and of_group < threads * positions and state.target.shared_bytes > 0
    return MemorySpace.SHARED if shared else MemorySpace.SCRATCH


def has_block_rows(state: Scheduler) -> bool:
    """Whether any loop is bound to the threads of a group, or a tile."""
    return any(r.role in BLOCK_ROLES for r in state.rows) or any(held_threads(state, s.index) > 1 for s in state.kernel.stages)


def covered_extent(state: Scheduler, axis: int) -> int:
    """Positions that the loops of an axis cover, including those beyond its end."""
    return prod(state.rows[r].extent for r in state.axis_rows[axis])


def is_covered(state: Scheduler, placement: Placement, stage: int, axis: int) -> bool:
    """Whether the loops of an axis cover whole tiles, with guards beyond its end, because threads or groups share it and no position may
    be computed by two of them."""
    if not state.target.has_groups:
        return False
    is_output, chosen = axis in state.kernel.stages[stage].outs, state.dots[stage]
    if placement.paths[stage] == () and is_output:
        return True
    in_tiles = held_threads(state, stage) > 1 and (is_output or (chosen is not None and axis == chosen.columns))
    shared = (*BLOCK_ROLES, DOT) if in_tiles else BLOCK_ROLES
    return any(state.rows[r].role in shared for r in state.axis_rows[axis])


def spanned(state: Scheduler, placement: Placement, stage: int, axis: int) -> int:
    """Positions of an axis of a stage that its loops span, padding included."""
    return covered_extent(state, axis) if is_covered(state, placement, stage, axis) else state.axis_extent(axis)


def _rows_of(state: Scheduler, axes: tuple[int, ...], role: str) -> int:
    rows = state.rows
    return prod([rows[r].extent for a in axes for r in state.axis_rows[a] if rows[r].role == role])


def reducers_of(state: Scheduler, stage: int) -> int:
    """The threads that share the reductions of a stage."""
    return _rows_of(state, state.kernel.stages[stage].reds, GROUP)


def local_threads(state: Scheduler, stage: int) -> int:
    """The positions of a stage that threads compute side by side."""
    return _rows_of(state, state.kernel.stages[stage].outs, LOCAL)


def has_own_threads(state: Scheduler, stage: int) -> bool:
    """Whether the threads that compute a stage are its own, of LOCAL loops or of tiles that they hold, and not those of its readers."""
    return local_threads(state, stage) > 1 or held_threads(state, stage) > 1


def whole_extent(state: Scheduler, stage: int, dim: int, extent: int) -> int:
    """Positions of a dim of a stage in shared memory, of which `extent` are required: rounded up to what its threads compute side by side,
    to whole tiles that they hold, and to whole register tiles where its loops do not divide them. Raises KernelOptError where its loops do
    not reach so far: readers in threads go beyond the end of an axis whose outermost loop is bound to the threads of the stage."""
    axis = state.kernel.stages[stage].outs[dim]
    rows = state.axis_rows[axis]
    first = next((i for i, row in enumerate(rows) if state.rows[row].role in (LOCAL, DOT) and state.rows[row].extent > 1), len(rows))
    if first == len(rows):
        return extent
    whole = _round_up(extent, prod(state.rows[row].extent for row in rows[first:]))
    pieces = fit(state, rows, whole)
    if not is_exact(pieces, whole):     # then a tile is one block of positions
        whole = _round_up(whole, prod(p.extent for p in pieces if p.role != LOOP))
        pieces = fit(state, rows, whole)
    covered = prod(p.extent for p in pieces)
    if whole > covered:
        name = state.kernel.stages[stage].name
        raise KernelOptError(f"{whole} positions of {name} are read at a time; the loops of its axis cover {covered}")
    return whole


def _round_up(extent: int, block: int) -> int:
    return -(-extent // block) * block


def phase_of(placement: Placement, stage: int) -> int:
    """The output stage of the phase in which a stage is computed."""
    path = placement.paths[stage]
    return next((outer for outer, _ in path or ()), stage)


class Positions(NamedTuple):
    """The threads of a group that compute different elements of a stage."""

    owner: int              # the stage whose LOCAL loops index the value; -1 where it is the same in all threads
    by_reducers: bool       # It differs between threads that share a reduction, as each reads a part of it.
    axes: frozenset[int] = frozenset()      # the axes of the owner that index it
    by_tiles: bool = False  # It differs between threads that hold a tile of a reader, each at its own elements.


def positions_of(state: Scheduler, placement: Placement, stages: Sequence[int]) -> dict[int, Positions]:
    """`Positions` of the stages of a phase, given in topological order. Reads of one dim that do not move alike ask for the whole dim."""
    bound = {role: {r.axis for r in state.rows if r.role == role} for role in BLOCK_ROLES}
    found: dict[int, Positions] = {}
    moved: dict[int, dict[int, int]] = {}       # stage → its local axes that LOCAL loops move, and the stage that these belong to
    shared: dict[int, set[int]] = {}            # stage → its local axes that the threads of a reduction move
    tiled: dict[int, set[int]] = {}             # stage → its local axes that the threads of a tile move
    through: dict[int, dict[int, set[int]]] = {}    # stage → its local axes, and those of the owner that move them
    for s in reversed(stages):
        stage = state.kernel.stages[s]
        own = {i: s for i, a in enumerate(stage.outs) if a in bound[LOCAL]}
        moved[s], shared[s], through[s], tiled[s] = {}, set(), {i: {i} for i in own}, _tiled_axes(state, s)
        if placement.paths[s] == () or has_own_threads(state, s):
            moved[s], owner = own, s
        else:
            reads = _reads_of(placement, s, found)
            for dim in range(len(stage.outs)):
                read = [(q, a) for q, dims in reads for a in dims[dim]]
                one = _mover([[moved[q].get(a, -1) for a in dims[dim]] for q, dims in reads])
                if one >= 0:
                    moved[s][dim], through[s][dim] = one, set[int]().union(*[through[q].get(a, ()) for q, a in read])
                for moving in (shared, tiled):
                    if any(a in moving[q] for q, a in read):
                        moving[s].add(dim)
            owner = max(moved[s].values(), default=-1)
        if bound[GROUP]:
            shared[s].update(i for i, a in enumerate(stage.outs + stage.reds) if a in bound[GROUP])
        found[s] = Positions(owner, any(i < len(stage.outs) for i in shared[s]), frozenset().union(*through[s].values()),
                             bool(tiled[s]) and not has_own_threads(state, s))
    return found


def _tiled_axes(state: Scheduler, s: int) -> set[int]:
    """The local axes of a stage of whose positions a tile has several, where a subgroup holds it."""
    chosen, stage = state.dots[s], state.kernel.stages[s]
    if chosen is None or held_threads(state, s) == 1:
        return set()
    return {i for i, a in enumerate(stage.outs + stage.reds) if a in (chosen.rows, chosen.columns)}


def _reads_of(placement: Placement, s: int, readers: Collection[int]) -> list[tuple[int, tuple[frozenset[int], ...]]]:
    """(reader, the axes of it that move each dim) of the reads of a stage by these."""
    return [(q, dims) for q in placement.readers[s] if q in readers for n, dims in placement.stage(q).reads_with_axes() if n.arg == s]


def _mover(owners: Sequence[Sequence[int]]) -> int:
    """The stage whose LOCAL loops move a dim in all of its reads, given by the axes of each; -1 where none do, or reads differ."""
    found = {max(own, default=-1) for own in owners}
    return found.pop() if len(found) == 1 else -1


def stages_of(state: Scheduler, placement: Placement, root: int) -> list[int]:
    """The stages that the phase of stage `root` computes, in topological order."""
    return [s.index for s in state.kernel.stages if placement.paths[s.index] is not None and phase_of(placement, s.index) == root]


class PhaseThreads(NamedTuple):
    """A phase as the threads of a group compute it: its stages in topological order, and of each the threads that move it and their
    number."""

    stages: tuple[int, ...]
    positions: dict[int, Positions]
    threads: dict[int, StageThreads]


def phase_threads(state: Scheduler, placement: Placement, root: int) -> PhaseThreads:
    """The threads of the phase that stores stage `root`, remembered on the state."""
    phases = _phases(state)
    found = phases.get(root)
    if found is None:
        stages = tuple(stages_of(state, placement, root))
        where = positions_of(state, placement, stages)
        found = phases[root] = PhaseThreads(stages, where, _threads_of(state, where))
    return found


@Derived
def _phases(state: Scheduler) -> dict[int, PhaseThreads]:
    """The phases of a state that were asked for, by their root."""
    return {}


def keep_threads(state: Scheduler, new: Scheduler) -> None:
    """Give `new`, the state after an opt, the known phases of `state` whose loops the opt has left as they were."""
    phases = _phases.known(state)
    if not phases or new.kernel is not state.kernel or new.dots is not state.dots:
        return
    before, after = place_stages(state), place_stages(new)
    if after.paths == before.paths and after.resolved is before.resolved:
        stages = state.kernel.stages
        _phases.give(new, {root: phase for root, phase in phases.items() if all(
            new.axis_rows[a] is state.axis_rows[a] for s in phase.stages for a in (*stages[s].outs, *stages[s].reds))})


def group_of(state: Scheduler, placement: Placement, root: int) -> ThreadGroup:
    """The group of threads of the phase that stores stage `root`."""
    threads = phase_threads(state, placement, root).threads
    own = threads[root]
    return ThreadGroup(own.local, own.inner, max([t.threads for t in threads.values()]))


def stage_threads(state: Scheduler, placement: Placement, root: int) -> dict[int, StageThreads]:
    """`StageThreads` of each stage of the phase of `root`."""
    return phase_threads(state, placement, root).threads


def _threads_of(state: Scheduler, where: dict[int, Positions]) -> dict[int, StageThreads]:
    """`StageThreads` of the stages of a phase. Reductions are shared by the threads of the positions for which they are the same, where
    these are neighbours and as many; else each position has threads of its own for that."""
    reducers = {s: reducers_of(state, s) for s in where}
    inside = {s for s, p in where.items() if reducers[s] == 1 or reducers[s] == _alike(state, s, p)}
    if any(held_threads(state, s) > 1 for s in where) or len(inside) < len(where):
        inside = set()
    inner: dict[int, int] = {}
    for s, p in where.items():
        key = p.owner if p.owner >= 0 else ~s
        inner[key] = max(inner.get(key, 1), 1 if s in inside and p.owner >= 0 else reducers[s], held_threads(state, s))
    found = {}
    for s, p in where.items():
        local, own = local_threads(state, p.owner) if p.owner >= 0 else 1, inner[p.owner if p.owner >= 0 else ~s]
        if s in inside and p.owner >= 0 and reducers[s] > 1:
            local, own = local // reducers[s], reducers[s]
        found[s] = StageThreads(local, reducers[s], own)
    return found


def _alike(state: Scheduler, s: int, where: Positions) -> int:
    """Neighbouring threads for which a stage that others read is the same, of those of the LOCAL loops of its owner; 0 where there are
    further ones beside them."""
    if where.owner in (-1, s):
        return reducers_of(state, s) if where.owner == -1 else 0
    outs, alike = state.kernel.stages[where.owner].outs, 1
    moving = False
    for a in range(len(outs) - 1, -1, -1):
        threads = prod([state.rows[x].extent for x in state.axis_rows[outs[a]] if state.rows[x].role == LOCAL])
        moving |= a in where.axes and threads > 1
        if a not in where.axes and threads > 1:
            if moving:
                return 0
            alike *= threads
    return alike


def exchanging_threads(target: Target, own: StageThreads, threads: int) -> int:
    """The number of neighbouring threads of a group that combine their parts of a stage's reductions by exchanging registers: a power of
    two that divides their number into whole parts; 1 where they do not."""
    if own.reducers != own.inner or threads % own.threads or threads % max(1, target.subgroup):
        return 1
    lanes = 1
    while lanes < target.subgroup and own.reducers % (2 * lanes) == 0:
        lanes *= 2
    return lanes


def combining_threads(target: Target, results: int, parts: int) -> int:
    """The threads of a group that add the parts of one of so many results of a cut reduction, or of a vector of them: a subgroup where it
    divides the parts and there are few results, else one."""
    return target.subgroup if 1 < target.subgroup <= target.group_threads and parts % target.subgroup == 0 and results <= FEW_RESULTS else 1


def thread_digits(state: Scheduler, threads: dict[int, StageThreads]) -> dict[int, tuple[int, int]]:
    """Per loop row that is bound to threads (inner, extent): a thread t of those that compute the stage has its position
    t // inner % extent."""
    digits = {}
    for s, t in threads.items():
        stage = state.kernel.stages[s]
        for role, axes, inner in ((LOCAL, stage.outs, t.inner), (GROUP, stage.reds, 1)):
            for row in reversed([x for a in axes for x in state.axis_rows[a] if state.rows[x].role == role]):
                digits[row] = (inner, state.rows[row].extent)
                inner *= state.rows[row].extent
    return digits


def most_threads(state: Scheduler) -> int:
    """Threads of the largest group of a state; 1 where no loop is bound to threads."""
    if not has_block_rows(state):
        return 1
    placement = place_stages(state)
    return max(group_of(state, placement, root).threads for root in placement.roots)


def exchanged_bytes(state: Scheduler, placement: Placement, stage: int, threads: int) -> int:
    """Bytes of shared memory for the partial results that `threads` threads exchange in a stage, one of each for a result."""
    r = placement.resolved[stage]
    assert r is not None
    positions = prod(state.rows[x].extent for a in state.kernel.stages[stage].outs for x in state.axis_rows[a]
                     if state.rows[x].role not in (LOOP, *BLOCK_ROLES))
    return sum(-(-threads * positions * d.itemsize // AREA) * AREA for red in r.reductions for d in red.dtypes)


def _check_held(state: Scheduler, s: int, threads: int) -> None:
    """Raises KernelOptError where a subgroup cannot hold the tiles of a stage in a group of so many threads."""
    held, name = held_threads(state, s), state.kernel.stages[s].name
    if held == 1:
        return
    if reducers_of(state, s) > 1:
        raise KernelOptError(f"a subgroup holds the tiles of stage {name}; the threads of a group cannot share their sums (GROUP)")
    if threads % held:
        raise KernelOptError(f"a group of {threads} threads has no whole parts of {held}, which hold the tiles of stage {name}")


def check_groups(state: Scheduler) -> None:
    """Raises KernelOptError where the loops bound to threads contradict each other, or a group exceeds the target's limits."""
    if not has_block_rows(state):
        return
    placement, target = place_stages(state), state.target
    for root in placement.roots:
        phase, threads = phase_threads(state, placement, root), group_of(state, placement, root).threads
        sharing = [s for s in phase.stages if phase.threads[s].reducers > 1]
        for s, where in phase.positions.items():
            if where.by_reducers and (s in sharing or has_own_threads(state, s)):
                raise KernelOptError(f"stage {state.kernel.stages[s].name} is read inside a reduction that threads share, each at other "
                                     "positions, so its own loops cannot be the threads of the group")
            if where.by_tiles and s in sharing:
                raise KernelOptError(f"the threads that hold a tile read stage {state.kernel.stages[s].name} each at other positions, and "
                                     "cannot share its sums; LOCAL gives it threads of its own")
        for s in phase.stages:
            _check_held(state, s, threads)
        if threads > target.group_threads:
            raise KernelOptError(f"a group would have {threads} threads; the target allows {target.group_threads}")
        needed = sum([exchanged_bytes(state, placement, s, threads) for s in sharing])
        if needed > target.shared_bytes:
            raise KernelOptError(f"the partial results of a group take {needed} bytes of shared memory; the target has "
                                 f"{target.shared_bytes}")
