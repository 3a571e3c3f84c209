"""Sorts the loops of a stage by what runs them: the grid, the threads of a group, iterations of one thread, positions side by side.

    y[i] = Σ x[i, k], UPCAST(r0, 4) GROUP(r0, 32) LOCAL(o0, 8), 1024 × 4096
        grid      128 groups, 8 rows apart
        threads   32 of them 4 positions of k apart, then 8 rows
        serial    32 iterations, 128 positions of k apart
        expanded  4 positions of k
"""
from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from math import prod
from typing import NamedTuple

from svod.core.cost.footprint import Steps
from svod.core.kernel.groups import ThreadGroup, grid_rows
from svod.core.kernel.loop_nest import LoopNest
from svod.core.kernel.online import kept_blocks, masked_limits
from svod.core.kernel.placement import is_derived
from svod.core.kernel.scheduler import GROUP, LOCAL, LOOP, Scheduler, cut_of
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


def computed_blocks(state: Scheduler, root: int, rows_of_grid: tuple[int, ...]) -> tuple[int, int]:
    """(loop row over the blocks of keys, blocks that a group computes on average) for attention whose mask excludes blocks; (-1, 0) for
    anything else."""
    stage = state.kernel.stages[root]
    if not stage.is_output or not masked_limits(state.kernel):
        return -1, 0
    loops = [x for a in stage.reds for x in state.axis_rows[a] if state.rows[x].extent > 1]
    if len(loops) != 1 or state.rows[loops[0]].role != LOOP:
        return -1, 0

    def tile(a: int) -> int:
        return prod([state.rows[x].extent for x in state.axis_rows[stage.outs[a]] if x not in rows_of_grid])
    return loops[0], max(1, round(kept_blocks(state.kernel, state.rows[loops[0]].extent, tile)))


class StageShape:
    """The loops of stage `s` inside the phase that stores stage `root`. `whole`: treat a split reduction as if it were not split."""

    def __init__(self, state: Scheduler, nest: LoopNest, s: int, root: int, group: ThreadGroup, whole: bool = False) -> None:
        self.state, self.nest, self.stage, self.root = state, nest, nest.stages[s], root
        self.own = {p.row: (a, p) for a, loops in enumerate(self.stage.axes) for p in loops}
        self.moved = {row: tuple((a, terms[row]) for a, (terms, _) in enumerate(self.stage.starts) if row in terms)
                      for row in {row for terms, _ in self.stage.starts for row in terms}}
        self.rows_of_grid = grid_rows(state, nest.placement, root)
        cut = None if whole else cut_of(state, root)
        self.cut_row, self.parts = (state.axis_rows[cut.axis][0], cut.parts) if cut is not None else (-1, 1)
        self.blocks_row, self.blocks = computed_blocks(state, root, self.rows_of_grid)
        self.is_cut = cut is not None and s == root         # its results are partial ones
        is_copy = is_derived(self.stage.r.stage) and s == root      # a copy that is its own phase, all of whose loops form the grid
        self.is_of_group = self.stage.space in OF_GROUP and is_derived(self.stage.r.stage)     # shared out among all threads of the group
        self.is_shared_copy = self.is_of_group and self.stage.space is MemorySpace.SHARED
        self.grid = [Run(p.extent, ((a, p.stride),)) for a, p in self.stage.loops] if is_copy else self._grid()
        around = [loop for loop in self.stage.around if loop.row not in self.rows_of_grid]
        self.outside = len(around)                  # number of serial loops that belong to stages around this one
        self.serial = [Run(self._of_part(loop.row, loop.iterations), self._moves(loop.row)) for loop in around]     # outermost loop first
        self.axes_of_serial = [-1] * len(around)    # per serial loop: the stage's local axis, or -1 for a loop of another stage
        if not (is_copy or self.is_of_group):
            self._add_own()
        self.expanded = self._copied_vector() if self.is_of_group else self._side_by_side()
        # the loop along which neighbouring threads lie comes first
        self.threads = self._copy_threads(group.threads) if self.is_of_group else self._threads(s, group.reducers, group.threads)
        self.num_threads = group.threads
        self.times = float(prod(run.times for run in self.serial[:self.outside]))
        self.body = float(prod(run.times for run in self.serial[self.outside:]))

    def _moves(self, row: int) -> Moves:
        """How far one step of a loop row moves along each local axis of the stage."""
        if row in self.own:
            a, p = self.own[row]
            return ((a, p.stride),)
        return self.moved.get(row, ())

    def _grid(self) -> list[Run]:
        loops = {p.row: p for own in self.nest.stages[self.root].axes for p in own}
        return [Run(loops[row].extent, self._moves(row)) for row in self.rows_of_grid if row in loops and loops[row].extent > 1]

    def _add_own(self) -> None:
        """Add the stage's own loops to the serial ones. Of a loop that SPLITK splits, only one part is serial."""
        for a, p in self.stage.loops:
            if p.row in self.rows_of_grid:
                continue
            self.serial.append(Run(self._of_part(p.row, p.extent), ((a, p.stride),)))
            self.axes_of_serial.append(a)

    def _of_part(self, row: int, times: int) -> int:
        """The iterations of a loop that one group runs. If SPLITK splits the loop, that is one part, and the parts join the grid; blocks
        that a mask excludes are not counted."""
        if row != self.cut_row:
            return self.blocks if row == self.blocks_row else times
        own = -(-times // self.parts)
        self.grid.insert(0, Run(self.parts, tuple([(a, n * own) for a, n in self._moves(row)])))
        return own

    def _side_by_side(self) -> list[Run]:
        return [Run(p.extent, ((a, p.stride),)) for a, loops in enumerate(self.stage.axes) for p in loops
                if p.role not in (LOOP, LOCAL, GROUP)]

    def _copied_vector(self) -> list[Run]:
        """The loop over the elements that a thread copies at once; [] for single elements."""
        a = self.stage.vector
        width = next((p.stride for axis, p in self.stage.loops if axis == a), self.stage.region[a] if a >= 0 else 1)
        return [Run(width, ((a, 1),))] if a >= 0 and width > 1 else []

    def _copy_threads(self, threads: int) -> list[Run]:
        """The loops of a copy that threads run side by side, neighbouring threads at neighbouring parts. Remaining iterations become serial
        loops of a thread."""
        out, left = list[Run](), threads
        for a, p in reversed(self.stage.loops):
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
        # if the stage is the same for some positions, their threads share its sum
        if out and prod([run.times for run in (*out, *positions)]) > threads:
            positions = [run for run in positions if run.moves]
        return [*out, *positions]
