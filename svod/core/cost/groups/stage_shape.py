"""Sorts the loops of a stage: loops of the grid, of the threads of a group, of iterations in one thread, of positions side by side.

    y[i] = Σ x[i, k], UPCAST(r0, 4) GROUP(r0, 32) LOCAL(o0, 8), 1024 × 4096
        grid      128 groups, 8 rows apart
        threads   32 that are 4 positions of k apart, for each of 8 rows
        serial    32 iterations, 128 positions of k apart
        expanded  4 positions of k
"""
from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from math import prod
from typing import NamedTuple

from svod.core.cost.footprint import Steps
from svod.core.cost.groups.device import device_of
from svod.core.cost.runs import LoopRuns, StageRuns
from svod.core.kernel.groups import ThreadGroup
from svod.core.kernel.loop_nest import LoopNest
from svod.core.kernel.placement import is_derived
from svod.core.kernel.scheduler import GROUP, LOCAL, LOOP, Scheduler
from svod.core.machine.levels import OF_GROUP, MemorySpace

Moves = tuple[tuple[int, int], ...]     # (local axis, positions that one step moves along it)


class Run(NamedTuple):
    """A loop: its number of iterations, and how far one step moves along each local axis."""

    times: int
    moves: Moves


def steps_of(runs: Sequence[Run], coefs: tuple[tuple[int, int], ...]) -> Steps:
    """(bytes that one step moves an access, iterations) of each loop. `coefs`: bytes per position of each local axis."""
    by_axis = dict(coefs)
    return tuple([(sum([n * by_axis.get(a, 0) for a, n in run.moves]), run.times) for run in runs])


@lru_cache(maxsize=1 << 12)
def positions_of(runs: tuple[Run, ...], dims: int, lanes: int) -> list[tuple[int, ...]]:
    """The position of each of `lanes` lanes along the first `dims` local axes, relative to the first lane."""
    positions = [(0,) * dims]
    for times, moves in runs:
        if len(positions) >= lanes:
            break
        step = [sum([n for a, n in moves if a == d]) for d in range(dims)]
        positions = [tuple([p + k * n for p, n in zip(at, step, strict=True)]) for k in range(times) for at in positions]
    return positions[:lanes]


class StageShape:
    """The loops of a stage inside the phase that stores stage `root`. `at`: how often they run."""

    def __init__(self, state: Scheduler, nest: LoopNest, at: StageRuns, root: int, group: ThreadGroup) -> None:
        self.state, self.nest, self.at, self.stage, self.root = state, nest, at, at.nest, root
        s = self.stage.r.stage.index
        self.own = {p.row: ((a, p.stride),) for a, loops in enumerate(self.stage.axes) for p in loops}
        self.is_of_group = self.stage.space in OF_GROUP and is_derived(self.stage.r.stage)     # shared out among all threads of the group
        self.is_shared_copy = self.is_of_group and self.stage.space is MemorySpace.SHARED
        self.grid = [Run(int(loop.times), loop.moves) for loop in (*at.around, *at.own) if loop.is_launched]
        self.serial = [self._of_part(loop) for loop in (*at.around, *at.own) if not loop.is_launched]       # outermost loop first
        # number of serial loops that belong to stages around this one
        self.outside = sum([not loop.is_launched for loop in at.around])
        # per serial loop: the stage's local axis, or -1 for a loop of another stage
        self.axes_of_serial = [*[-1] * self.outside, *[loop.axis for loop in at.own if not loop.is_launched]]
        self.expanded = self._copied_vector() if self.is_of_group else self._side_by_side()
        # the loop along which neighbouring threads lie comes first
        self.threads = self._copy_threads(group.threads) if self.is_of_group else self._threads(s, group.reducers, group.threads)
        self.num_threads, self.groups = group.threads, float(prod([run.times for run in self.grid]))
        device = device_of(state.target)
        if is_derived(state.kernel.stages[root]) and not device.is_software:
            self._pack(device.packed_threads)
        self.times = float(prod(run.times for run in self.serial[:self.outside]))
        self.body = float(prod(run.times for run in self.serial[self.outside:]))

    def _pack(self, most: int) -> None:
        """Let neighbouring iterations of the grid, at most `most`, be the threads of a group: no opt binds loops of a copy to threads, and
        hardware runs groups of single threads together."""
        left, packed, grid = most, list[Run](), list[Run]()
        for run in reversed(self.grid):
            taken = max(1, min(run.times, left))
            left //= taken
            packed.append(Run(taken, run.moves))
            grid.append(Run(-(-run.times // taken), tuple([(a, n * taken) for a, n in run.moves])))
        self.num_threads = int(min(self.groups, most))
        self.groups /= self.num_threads
        self.threads, self.grid = [run for run in packed if run.times > 1], grid[::-1]

    def _moves(self, row: int) -> Moves:
        """How far one step of a loop row moves along each local axis of the stage."""
        return self.own.get(row) or tuple([(a, terms[row]) for a, (terms, _) in enumerate(self.stage.starts) if row in terms])

    def _of_part(self, loop: LoopRuns) -> Run:
        """The iterations of a loop that one group runs. If SPLITK splits the loop, that is one part, and the parts join the grid."""
        own = int(loop.in_part)
        if loop.parts:
            self.grid.insert(0, Run(loop.parts, tuple([(a, n * own) for a, n in loop.moves])))
        return Run(own, loop.moves)

    def _side_by_side(self) -> list[Run]:
        return [Run(p.extent, ((a, p.stride),)) for a, loops in enumerate(self.stage.axes) for p in loops
                if p.role not in (LOOP, LOCAL, GROUP)]

    def _copied_vector(self) -> list[Run]:
        """The loop over the elements that a thread copies at once; [] for single elements."""
        a = self.stage.vector
        width = self.stage.axes[a][0].stride if a >= 0 else 1
        return [Run(width, ((a, 1),))] if a >= 0 and width > 1 else []

    def _copy_threads(self, threads: int) -> list[Run]:
        """The loops of a copy that threads run side by side, neighbouring threads at neighbouring parts. Remaining iterations become serial
        loops of a thread."""
        out, left, copy = list[Run](), threads, self.stage.copy
        for a in reversed(copy.order if copy is not None else range(len(self.stage.region))):
            p = self.stage.axes[a][0]
            if p.extent == 1:
                continue
            taken = max(1, min(p.extent, left))
            left //= taken
            out.append(Run(taken, ((a, p.stride),)))
            if taken < p.extent:
                self.serial.insert(self.outside, Run(-(-p.extent // taken), ((a, p.stride * taken),)))
                self.axes_of_serial.insert(self.outside, a)
        return out

    def _threads(self, s: int, reducers: int, threads: int) -> list[Run]:
        """The loops bound to threads: parts of reductions first, then positions of the output."""
        rows, kernel = self.state.rows, self.state.kernel
        out: list[Run] = []
        for q in (s, *[t for t, _ in reversed(self.nest.placement.paths[s] or ())]):
            bound = [x for a in kernel.stages[q].reds for x in self.state.axis_rows[a] if rows[x].role == GROUP]
            if bound:
                out = [Run(rows[x].extent, self._moves(x)) for x in reversed(bound)]
                break
        parts = prod(run.times for run in out)
        if parts < reducers:
            out.append(Run(reducers // parts, ()))
        local = [x for a in kernel.stages[self.root].outs for x in self.state.axis_rows[a] if rows[x].role == LOCAL]
        positions = [Run(rows[x].extent, self._moves(x)) for x in reversed(local)]
        # if the stage has the same value for several positions, their threads share its sum
        if out and prod([run.times for run in (*out, *positions)]) > threads:
            positions = [run for run in positions if run.moves]
        return [*out, *positions]
