"""The launch of a phase: its outermost output loops, whose iterations cores or groups of threads claim.

    Launch of out                   Launch of out: o0, o1
      Loop o0                         Loop o2
        Loop o1           →             Store
          Loop o2
            Store

On CPUs a launch takes outer loops until each core has enough iterations; on grids it takes all output loops up to the first that has stages
inside. If a mask gives the last rows the most work, the last iterations run first. If non-temporal stores need aligned vectors, and only
those of the last iteration are not aligned, that iteration has a body of its own.
"""
from __future__ import annotations

from math import prod

from svod.core.kernel.algorithms.online import masked_limits
from svod.core.kernel.non_temporal import leaves_tail, stores_whole_vectors
from svod.core.kernel.scheduler import cores_of
from svod.core.tree.build import TreeMaker
from svod.core.tree.nodes import Body, Frame, Launch, Loop, Phase, PhaseKind

MIN_ITERATIONS = 64             # least number of iterations per core, so that cores have enough to share
FEW_SUMS = 1 << 14              # results; below so many, one core combines the partial results of a split reduction


def launch(maker: TreeMaker, phases: tuple[Phase, ...]) -> tuple[Phase, ...]:
    """Make the outermost output loops of every phase its launch."""
    return tuple([p._replace(launch=_launched(maker, p, p.launch)) for p in phases])


def cores_of_phase(maker: TreeMaker, phase: Phase) -> int:
    """The number of cores that share a phase; 1 on a grid. A phase that runs at prepare takes all cores of the machine. A phase that
    combines the parts of few sums takes one."""
    if maker.state.target.has_groups:
        return 1
    if phase.kind is PhaseKind.COMBINE and prod([maker.kernel.axes[a].extent for a in maker.kernel.stages[phase.stage].outs]) < FEW_SUMS:
        return 1
    return maker.state.target.threads if phase.kind is PhaseKind.TEMPORARY and phase.is_once else cores_of(maker.state)


def _launched(maker: TreeMaker, phase: Phase, one: Launch) -> Launch:
    state, frame = maker.state, one.frame
    count = launched_loops(maker, frame, phase.split.parts if phase.split else None, cores_of_phase(maker, phase))
    done = one._replace(num_loops=count, body=_inside(one.body, count), longest_first=_longest_first(maker, frame))
    output = (state, frame.r, frame.pieces, frame.vector_axis, frame.vector_row)
    if phase.kind is PhaseKind.OUTPUT and state.stream and stores_whole_vectors(*output):
        return done._replace(last=done.body if leaves_tail(*output) else None, is_non_temporal=True)
    return done


def launched_loops(maker: TreeMaker, frame: Frame, parts: int | None, cores: int) -> int:
    """How many outermost loops of a stage form its launch. `parts`: the number of parts of a split reduction, each of which runs all these
    loops; None if the reduction is not split."""
    on_grid, count, iterations = maker.state.target.has_groups, 0, parts or 1
    if parts is not None and not on_grid:
        return 0
    for loop in frame.loops:
        if loop.axis >= frame.num_outs:
            break
        innermost = count == len(frame.loops) - 1
        if count and not on_grid and (iterations >= MIN_ITERATIONS * cores or (innermost and iterations >= 4 * cores)):
            break   # enough iterations to share; with four per core already, the innermost loop stays a loop
        iterations *= loop.piece.extent
        count += 1
        if (frame.r.stage.index, loop.point) in maker.placement.children:
            break
    return count


def _inside(body: Body, count: int) -> Body:
    """The body inside of `count` loops."""
    for _ in range(count):
        assert isinstance(body.inner, Loop), "output loops come first"
        body = body.inner.body
    return body


def _longest_first(maker: TreeMaker, frame: Frame) -> frozenset[int]:
    """The local axes along which a mask leaves the last rows the most blocks to compute. These rows run first, so that the groups that
    finish last are the short ones."""
    if not maker.state.target.has_groups or not frame.r.stage.is_output:
        return frozenset()
    limits = masked_limits(maker.kernel)
    return frozenset({limit.output for limit in limits}.difference(limit.output for limit in limits if limit.step < 0))
