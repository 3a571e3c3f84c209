"""Counts how often the loops and barriers of a tree run, stage by stage. Prices are made of these counts.

    Launch o0 by 16 (7)                 out: its loops run 7 times, launched, and 18 times
      Compute s1                        s1: around it a loop that runs 7 times and moves dim 0; its own runs 4 times
        Loop o0 (4)
      Reduction
        Loop r0 by 4 (17), Tail of 2

Stages are counted in the bodies of whole iterations; a tail is one more iteration of its loop. A loop that skips iterations counts with the
average number of iterations that run."""
from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from math import ceil, prod
from typing import NamedTuple

from svod.core.kernel.algorithms.online import kept_blocks
from svod.core.kernel.kernel import Kernel
from svod.core.kernel.loop_nest import StageNest
from svod.core.kernel.scheduler import UNROLL
from svod.core.tree.nodes import (
    Accumulate,
    AheadCopy,
    Body,
    Compute,
    Inner,
    Loop,
    Phase,
    PhaseKind,
    Pipeline,
    Reduction,
    Update,
    barriers_of,
)
from svod.core.tree.tails import is_split


class LoopRuns(NamedTuple):
    """A loop of a stage, or around it, with several iterations."""

    row: int                    # the loop's row in the state, or NO_ROW
    moves: tuple[tuple[int, int], ...]      # (local axis of the stage, positions that one iteration moves along it)
    times: float                # iterations in one run of the loop; if a split reduction shares it, the sum over all parts
    is_launched: bool = False   # Cores or groups of threads claim the iterations.
    parts: int = 0              # number of parts that share the loop of a split reduction; 0 for other loops

    @property
    def axis(self) -> int:
        """The first axis that the loop moves, or -1."""
        return self.moves[0][0] if self.moves else -1

    @property
    def in_part(self) -> float:
        """Iterations of the loop in one part of a split reduction; all iterations if the loop is not split."""
        return ceil(self.times / self.parts) if self.parts else self.times


class StageRuns(NamedTuple):
    """How often the loops of a stage run. `around`: loops of other stages around it; `own`: loops of the stage itself; both outermost
    first. A copy that all threads of a group share has no loops of its own."""

    nest: StageNest
    around: tuple[LoopRuns, ...]
    own: tuple[LoopRuns, ...] = ()
    block_ends: float = 0.0     # blocks of a long sum that end in one iteration of the launched loops, or in one part of a split reduction
    updates: float = 0.0        # how often accumulators in memory are read and written, per launched iteration or per part
    barriers: float = 0.0       # barriers that one run of the stage meets: before its stores, of its exchanges, and behind stages inside
    copy: AheadCopy | None = None       # how the stage is copied, if the copy starts iterations before the one that reads it; else None
    pipeline: Pipeline | None = None    # the pipelined loop that copies the stage ahead, or that is one of the stage's own loops; else None

    @property
    def times(self) -> float:
        """How often the loops around the stage run it; a split loop among them counts with the iterations of all its parts."""
        return prod([loop.times for loop in self.around])

    @property
    def parts(self) -> int:
        """The number of parts of the stage's reduction; 0 if it is not split."""
        return max([loop.parts for loop in self.own], default=0)


def stage_runs(kernel: Kernel, nests: Mapping[int, StageNest], tree: Iterable[Phase]) -> dict[int, StageRuns]:
    """The counts of all stages of a tree, by stage number; readers come before the stages that they read. `nests`: the loop nest of each
    stage that a phase stores."""
    found: dict[int, StageRuns] = {}
    for phase in tree:
        if phase.kind is not PhaseKind.COMBINE:
            _Counter(kernel, phase, found).count(nests[phase.stage])
    return dict(sorted(found.items(), reverse=True))


class _Counter:
    """Counts the stages of one phase into `found`."""

    def __init__(self, kernel: Kernel, phase: Phase, found: dict[int, StageRuns]) -> None:
        self.kernel, self.phase, self.found = kernel, phase, found

    def count(self, nest: StageNest) -> None:
        """Count all stages of the phase. `nest`: loop nest of the stage that the phase stores."""
        launch = self.phase.launch
        own = [LoopRuns(p.row, ((a, p.stride),), float(p.extent), True) for a, p, _ in launch.loops if p.extent > 1]
        self._stage(StageRuns(nest, ()), launch.body, own)

    def _stage(self, one: StageRuns, body: Body, own: list[LoopRuns]) -> None:
        """Count a stage and the stages computed inside its loops. `own`: the stage's loops outside of `body`."""
        runs, ends, updates, barriers = 1.0, 0.0, 0.0, one.barriers
        while True:
            if body.stages:
                self._computed(body.stages, (*one.around, *own))
            node: Inner = body.inner
            barriers += runs * body.barrier
            while isinstance(node, (Reduction, Update)):
                if isinstance(node, Update):
                    ends, updates = ends + runs * node.in_block, updates + runs
                else:
                    results = prod([node.frame.loops[j].piece.extent for j in node.in_memory])
                    barriers += runs * results * (node.barrier + node.through_memory)
                node = node.inner
            if not isinstance(node, Loop):
                break
            loop = self._loop(node, one.nest, own)
            ends += runs * _ends(loop.in_part, node.blocks)
            blocks = runs * max(1, _ends(loop.in_part, node.blocks[:1]))
            runs *= loop.in_part
            if node.loop.piece.extent > 1 or loop.parts:
                own.append(loop)
            if node.pipeline is not None:
                one = one._replace(pipeline=node.pipeline)
                barriers += blocks * barriers_of((*node.pipeline.prologue, *node.pipeline.epilogue))
                barriers += runs * barriers_of((*node.pipeline.body, *node.pipeline.later))
                for copy in node.pipeline.copies:
                    self._computed((copy.compute,), (*one.around, *own), copy, node.pipeline)
            body = node.body
        if isinstance(node, Accumulate):
            reduced = node.frame.pieces[node.frame.num_outs:]
            ends += runs * _ends(prod([p.extent for pieces in reduced for p in pieces if p.role == UNROLL]), node.blocks)
        self.found[one.nest.r.stage.index] = StageRuns(one.nest, one.around, tuple(own), ends, updates, barriers, one.copy, one.pipeline)

    def _computed(self, stages: tuple[Compute, ...], around: Sequence[LoopRuns], copy: AheadCopy | None = None,
                  pipeline: Pipeline | None = None) -> None:
        """Count stages computed inside the loops `around`. `copy`, `pipeline`: as in StageRuns."""
        for node in stages:
            if node.before:
                self._computed(node.before, around)
            starts = [terms for terms, _ in node.nest.starts]
            moves = [tuple([(dim, terms[row]) for dim, terms in enumerate(starts) if row in terms]) for row, *_ in around]
            outer = tuple([LoopRuns(loop.row, own, *loop[2:]) for loop, own in zip(around, moves, strict=True)])
            one = StageRuns(node.nest, outer, barriers=node.barrier_first + node.barrier_to_store, copy=copy, pipeline=pipeline)
            if node.body is None or node.turns is not None:
                self.found[node.stage] = one
            else:
                self._stage(one, node.body, [])

    def _loop(self, node: Loop, nest: StageNest, outer: Sequence[LoopRuns]) -> LoopRuns:
        """Count the iterations of a loop. `outer`: the stage's loops around it."""
        piece, axes = node.loop.piece, nest.r.axes
        times = float(piece.extent)
        if node.window is not None:
            output, opened = node.window.output, {loop.row for loop in outer}
            tile = prod([p.extent for p in node.frame.pieces[output] if p.row not in opened])
            times *= node.window.used(tile, self.kernel.axes[axes[output]].extent, piece.extent)
        elif node.limits:
            launched = {loop.piece.row for loop in self.phase.launch.loops}
            tiles = [prod([p.extent for p in pieces if p.row not in launched]) for pieces in nest.axes]
            times = max(1.0, round(kept_blocks(self.kernel, node.limits, piece.extent, tiles)))
        split = self.phase.split
        parts = split.parts if split is not None and is_split(split, node) else 0
        return LoopRuns(piece.row, ((node.axis, piece.stride),), times, parts=parts)


def _ends(iterations: float, sizes: tuple[int, ...]) -> int:
    """The number of blocks, over all levels, that end in `iterations` iterations. `sizes`: iterations of a block on each level."""
    return sum([ceil(iterations / size) for size in sizes])
