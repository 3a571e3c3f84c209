"""Binds loops to levels of the machine, and stages to the threads of a group.

LOCAL, GROUP and GROUPTOP bind loops to the threads of a group. There are three ways in which the threads compute a stage:

    by position     the stage that the phase stores, and values that differ between its positions: each position of the LOCAL loops has as
                    many threads as share its largest reduction. If n threads share a reduction whose result is the same for n
                    neighbouring positions, these are the threads of the n positions, and no further ones are needed
    together        stages in shared memory, and values that are the same for all positions: all threads of the group compute them
    alone           values of one thread, without GROUP loops: every thread computes the values that it reads

    y[i] = Σ x[i, k],  LOCAL(o0, 8) GROUP(r0, 4)      32 threads; thread t has row t // 4 of the 8 and every fourth k from t % 4
    c = a·b,  TC(r0, (mma_f16,o0,o1)) LOCAL(o0, 4)    128 threads; the 32 threads of a subgroup hold its tiles together
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
# vectors of results; if a split reduction has fewer, combining each of them by one thread would leave most of a device idle
FEW_RESULTS = 1 << 12


class ThreadGroup(NamedTuple):
    """The threads of a group in one phase. `local`: positions that are computed at the same time; `reducers`: threads that compute one
    position, because they share its reductions or hold its tiles; `together`: the largest number of threads that any stage takes, which
    may be more than local · reducers."""

    local: int
    reducers: int
    together: int = 1

    @property
    def threads(self) -> int:
        return max(self.local * self.reducers, self.together)


class StageThreads(NamedTuple):
    """The threads of a group that compute a stage. Thread t has position t // inner, of `local` positions, and part t % inner of a
    reduction, of `reducers` parts. If a subgroup holds tiles of the stage, t % inner is the number in the subgroup, and a position is one
    or several tiles. Threads beyond the last position or part repeat the work of others, and store nothing."""

    local: int
    reducers: int
    inner: int

    @property
    def threads(self) -> int:
        return self.local * self.inner


ALONE = StageThreads(1, 1, 1)


def level_of(state: Scheduler, row: int) -> Level:
    """The level of the machine that a loop row is bound to."""
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
    """The output loops that become the grid of a phase, outermost first, up to the first that has a stage inside. The parts of a split
    reduction are a further dimension around them."""
    if placement.paths[stage] != () or is_derived(state.kernel.stages[stage]):
        return ()
    rows = state.order[stage][:first_reduce(state, stage)]
    count = next((depth for depth in range(1, len(rows)) if (stage, depth) in placement.children), len(rows))
    return rows[:count]


def space_of(state: Scheduler, placement: Placement, stage: int, positions: int, of_group: int, threads: int) -> MemorySpace:
    """The memory for a stage's value. `positions`: how many a thread needs at a time; `of_group`: how many all `threads` of a group need
    together. A copy lies in shared memory if that takes less than private copies; a stage with its own loops, if some of them are bound to
    threads."""
    if placement.paths[stage] == ():
        return MemorySpace.GLOBAL
    if has_own_threads(state, stage):
        return MemorySpace.SHARED
    if positions == 1:
        return MemorySpace.REGISTER
    shared = is_derived(state.kernel.stages[stage]) and of_group < threads * positions and state.target.shared_bytes > 0
    return MemorySpace.SHARED if shared else MemorySpace.SCRATCH


@Derived
def has_block_rows(state: Scheduler) -> bool:
    """Whether any loop is bound to the threads of a group, or any stage is computed in tiles that a subgroup holds."""
    return any(r.role in BLOCK_ROLES for r in state.rows) or any(held_threads(state, s.index) > 1 for s in state.kernel.stages)


def covered_extent(state: Scheduler, axis: int) -> int:
    """Positions that the loops of an axis cover, including positions beyond its end."""
    return prod(state.rows[r].extent for r in state.axis_rows[axis])


def is_covered(state: Scheduler, placement: Placement, stage: int, axis: int) -> bool:
    """Whether the loops of an axis cover whole tiles, with guards beyond its end, because threads or groups share the axis and no two of
    them may compute the same position."""
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
    if state.target.has_groups and is_covered(state, placement, stage, axis):
        return covered_extent(state, axis)
    return state.axis_extent(axis)


def _rows_of(state: Scheduler, axes: tuple[int, ...], role: str) -> int:
    rows = state.rows
    return prod([rows[r].extent for a in axes for r in state.axis_rows[a] if rows[r].role == role])


def reducers_of(state: Scheduler, stage: int) -> int:
    """The number of threads that share the reductions of a stage."""
    return _rows_of(state, state.kernel.stages[stage].reds, GROUP)


def local_threads(state: Scheduler, stage: int) -> int:
    """The number of positions of a stage that threads compute at the same time."""
    return _rows_of(state, state.kernel.stages[stage].outs, LOCAL)


def has_own_threads(state: Scheduler, stage: int) -> bool:
    """Whether a stage is bound to threads by its own LOCAL loops or tiles. Other stages are computed by the threads of their readers."""
    return local_threads(state, stage) > 1 or held_threads(state, stage) > 1


def whole_extent(state: Scheduler, stage: int, dim: int, extent: int) -> int:
    """How many positions of a dim are computed for a stage in shared memory if `extent` of them are required. Rounded up to whole rounds of
    its threads, to whole tiles that they hold, and to whole register tiles. Raises KernelOptError if the stage's loops cover fewer: its
    outermost loop is bound to threads, and the readers' threads go beyond the end of the axis."""
    axis = state.kernel.stages[stage].outs[dim]
    rows = state.axis_rows[axis]
    first = next((i for i, row in enumerate(rows) if state.rows[row].role in (LOCAL, DOT) and state.rows[row].extent > 1), len(rows))
    if first == len(rows):
        return extent
    whole = _round_up(extent, prod(state.rows[row].extent for row in rows[first:]))
    pieces = fit(state, rows, whole)
    if not is_exact(pieces, whole):     # then a tile is one contiguous block of positions
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
    """The root stage in whose phase a stage is computed."""
    path = placement.paths[stage]
    return next((outer for outer, _ in path or ()), stage)


class Positions(NamedTuple):
    """How the value of a stage differs between the threads of a group."""

    owner: int              # the stage whose LOCAL loops index the value; -1 if no stage's do: all threads have the same value
    by_reducers: bool       # The value differs between threads that share a reduction, as each reads another part.
    axes: frozenset[int] = frozenset()      # the axes of the owner that index the value
    by_tiles: bool = False  # The value differs between the threads that hold a tile of a reader, as each reads its own elements.


def positions_of(state: Scheduler, placement: Placement, stages: Sequence[int]) -> dict[int, Positions]:
    """`Positions` of each stage of a phase. `stages`: in topological order. If readers index a dim by different LOCAL loops, each thread
    needs the whole dim, so no LOCAL loop counts as indexing it."""
    bound = {role: {r.axis for r in state.rows if r.role == role} for role in BLOCK_ROLES}
    found: dict[int, Positions] = {}
    moved: dict[int, dict[int, int]] = {}       # stage → {local axis that LOCAL loops move: the stage with these loops}
    shared: dict[int, set[int]] = {}            # stage → local axes along which threads that share a reduction differ
    tiled: dict[int, set[int]] = {}             # stage → local axes along which the threads of a tile differ
    through: dict[int, dict[int, set[int]]] = {}    # stage → {local axis: axes of the owner that move it}
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
    """The local axes of the rows and columns of a stage's tiles, if a subgroup holds them; else none."""
    chosen, stage = state.dots[s], state.kernel.stages[s]
    if chosen is None or held_threads(state, s) == 1:
        return set()
    return {i for i, a in enumerate(stage.outs + stage.reds) if a in (chosen.rows, chosen.columns)}


def _reads_of(placement: Placement, s: int, readers: Collection[int]) -> list[tuple[int, tuple[frozenset[int], ...]]]:
    """(reader, per dim the axes of the reader that move it) for each read of a stage by one of `readers`."""
    return [(q, dims) for q in placement.readers[s] if q in readers for n, dims in placement.stage(q).reads_with_axes() if n.arg == s]


def _mover(owners: Sequence[Sequence[int]]) -> int:
    """The stage whose LOCAL loops move a dim in all reads of it; -1 if there is none, or the reads differ. `owners`: for each read, the
    stage whose LOCAL loops move each axis in the index, or -1."""
    found = {max(own, default=-1) for own in owners}
    return found.pop() if len(found) == 1 else -1


def stages_of(state: Scheduler, placement: Placement, root: int) -> list[int]:
    """The stages that the phase of stage `root` computes, in topological order."""
    return [s.index for s in state.kernel.stages if placement.paths[s.index] is not None and phase_of(placement, s.index) == root]


class PhaseThreads(NamedTuple):
    """How the threads of a group compute a phase. `stages`: in topological order; `positions`, `threads`: `Positions` and `StageThreads` of
    each."""

    stages: tuple[int, ...]
    positions: dict[int, Positions]
    threads: dict[int, StageThreads]

    def group(self, root: int) -> ThreadGroup:
        """The group of threads of the phase, which stores stage `root`."""
        own = self.threads[root]
        return ThreadGroup(own.local, own.inner, max([t.threads for t in self.threads.values()]))


def phase_threads(state: Scheduler, placement: Placement, root: int) -> PhaseThreads:
    """The threads of the phase that stores stage `root`, cached on the state."""
    phases = _phases(state)
    found = phases.get(root)
    if found is None:
        stages = tuple(stages_of(state, placement, root))
        if has_block_rows(state):
            where = positions_of(state, placement, stages)
            found = PhaseThreads(stages, where, _threads_of(state, where))
        else:
            found = PhaseThreads(stages, {s: Positions(root if s == root else -1, False) for s in stages}, dict.fromkeys(stages, ALONE))
        phases[root] = found
    return found


@Derived
def _phases(state: Scheduler) -> dict[int, PhaseThreads]:
    """The cache of `phase_threads`: phases of a state by their root."""
    return {}


def keep_threads(state: Scheduler, new: Scheduler) -> None:
    """Copy cached phases from `state` to `new`, the state after an opt, if the opt left their loops unchanged."""
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
    return phase_threads(state, placement, root).group(root)


def stage_threads(state: Scheduler, placement: Placement, root: int) -> dict[int, StageThreads]:
    """`StageThreads` of each stage in the phase of `root`."""
    return phase_threads(state, placement, root).threads


def _threads_of(state: Scheduler, where: dict[int, Positions]) -> dict[int, StageThreads]:
    """`StageThreads` of the stages of a phase. If n threads share a reduction whose result is the same for n neighbouring positions, the
    threads of these positions share it. Else each position gets further threads to share its reductions."""
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
    """For how many neighbouring positions of its owner's LOCAL loops a stage has the same value; 0 if not all positions with the same
    value are neighbours. The number of the stage's reducers if no LOCAL loop indexes the value."""
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
    """How many neighbouring threads combine their parts of a stage's reductions by shuffles: a power of two that divides the number of
    parts; 1 if they use no shuffles."""
    if own.reducers != own.inner or threads % own.threads or threads % max(1, target.subgroup):
        return 1
    lanes = 1
    while lanes < target.subgroup and own.reducers % (2 * lanes) == 0:
        lanes *= 2
    return lanes


def combining_threads(target: Target, results: int, parts: int) -> int:
    """How many threads add the parts of one result, or vector of results, of a split reduction: a subgroup if its size divides `parts` and
    there are few `results`, else one thread."""
    return target.subgroup if 1 < target.subgroup <= target.group_threads and parts % target.subgroup == 0 and results <= FEW_RESULTS else 1


def thread_digits(state: Scheduler, threads: dict[int, StageThreads]) -> dict[int, tuple[int, int]]:
    """Loop row bound to threads → (inner, extent): thread t of the stage has position t // inner % extent along the row."""
    digits = {}
    for s, t in threads.items():
        stage = state.kernel.stages[s]
        for role, axes, inner in ((LOCAL, stage.outs, t.inner), (GROUP, stage.reds, 1)):
            for row in reversed([x for a in axes for x in state.axis_rows[a] if state.rows[x].role == role]):
                digits[row] = (inner, state.rows[row].extent)
                inner *= state.rows[row].extent
    return digits


def most_threads(state: Scheduler) -> int:
    """Threads of the largest group of a state; 1 if no loop is bound to threads."""
    if not has_block_rows(state):
        return 1
    placement = place_stages(state)
    return max(group_of(state, placement, root).threads for root in placement.roots)


def exchanged_bytes(state: Scheduler, placement: Placement, stage: int, threads: int) -> int:
    """Bytes of shared memory that a stage's partial results take when `threads` threads exchange them, one per thread and result."""
    r = placement.resolved[stage]
    assert r is not None
    positions = prod(state.rows[x].extent for a in state.kernel.stages[stage].outs for x in state.axis_rows[a]
                     if state.rows[x].role not in (LOOP, *BLOCK_ROLES))
    return sum(-(-threads * positions * d.itemsize // AREA) * AREA for red in r.reductions for d in red.dtypes)


def _check_held(state: Scheduler, s: int, threads: int) -> None:
    """Raises KernelOptError if subgroups cannot hold the tiles of a stage in a group of `threads` threads."""
    held, name = held_threads(state, s), state.kernel.stages[s].name
    if held == 1:
        return
    if reducers_of(state, s) > 1:
        raise KernelOptError(f"a subgroup holds the tiles of stage {name}; the threads of a group cannot share their sums (GROUP)")
    if threads % held:
        raise KernelOptError(f"a group of {threads} threads has no whole parts of {held}, which hold the tiles of stage {name}")


def check_groups(state: Scheduler) -> None:
    """Raises KernelOptError if the loops bound to threads contradict each other, or a group exceeds the target's limits."""
    if not has_block_rows(state):
        return
    placement, target = place_stages(state), state.target
    for root in placement.roots:
        phase = phase_threads(state, placement, root)
        threads = phase.group(root).threads
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
