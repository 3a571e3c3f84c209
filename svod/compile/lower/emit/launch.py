"""Emits the launch of a phase: its outermost loops become one loop from BEGIN to END, and everything else is emitted inside that.

    for i in 4: for j in 8: for k in 9: …    →    LOOP n in begin…end:  i = n // 8;  j = n % 8;  LOOP k …        extent 32
"""
from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from svod.compile.lower.emit.context import PhaseContext
from svod.compile.lower.emit.stages import Stages
from svod.compile.lower.emit.state import OpenStage, Sink
from svod.compile.lower.program import Count, Instruction, PhaseSpec
from svod.compile.lower.transpose import MIN_LANES, PAIR, transpose_squares
from svod.core.ir.dtype import dtypes
from svod.core.ir.symbolic import linear
from svod.core.ir.uop import Ops
from svod.core.kernel.required import Lin, add_lins
from svod.core.tree.nodes import Body, Launch, Part

# step of a loop with at most one iteration; since its index is then a multiple of this, addresses inside keep their known alignment
ALIGNED = 64


Emitted = tuple[PhaseSpec, tuple[Instruction, ...]]


class Cover(NamedTuple):
    """The positions of a launch's iteration that are computed, for axes whose extents depend on variables."""

    condition: int                  # index (always 0) of the loop around the body, which runs once or not at all; -1: no such loop
    parts: dict[int, int]           # axis → offset, in the iteration, of the part that is computed
    latest: dict[int, int]          # axis → largest start of a whole tile; tiles that would start later are moved back to it


Inside = Callable[[Cover, Body], None]      # emits a body at the positions that a cover describes


class LaunchEmitter:
    """Emits the launch of one phase."""

    def __init__(self, ctx: PhaseContext, stages: Stages):
        self.ctx, self.b, self.state, self.facts = ctx, ctx.b, ctx.state, ctx.facts
        self.stages, self.axes = stages, stages.axes

    def emit(self, stage: OpenStage, launch: Launch, sink: Sink, threads: int, once: bool = False) -> Emitted:
        """Emit a phase that `threads` cores share; returns its launch, with an empty symbol, and its code. `once`: the phase runs once,
        when the plan is made."""
        b, split = self.b, self.ctx.split
        begin, end = b.pure("BEGIN", dtypes.index, 1, ()), b.pure("END_", dtypes.index, 1, ())
        extent = launch.iterations * (split.parts if split is not None else 1)
        self.ctx.open_stages[stage.index] = stage
        counts = self._counts(stage, launch)
        body = launch.body
        if launch.last is not None:     # the last iteration has separate code, because only its vectors are not aligned
            last = b.index(extent - 1)
            self._iterations(stage, launch, body, counts, begin, b.alu("MIN", dtypes.index, 1, end, last), sink)
            self.ctx.forget_values()
            begin, body = b.alu("MAX", dtypes.index, 1, begin, last), launch.last
        self._iterations(stage, launch, body, counts, begin, end, sink)
        least = PAIR if self.facts.on_grid else MIN_LANES
        code = tuple(transpose_squares(list(b.finish()), self.state.target.has_mask_registers, least))
        self.facts.note_emitted(len(code))
        variable = () if all(c.is_constant for c in counts) else counts
        group = self.ctx.group
        return PhaseSpec("", extent, min(threads, extent) if threads > 1 else 1, self.ctx.scratch, once, variable, group.group.threads,
                         group.shared.size, self.state.target.subgroup if group.exchanges else 0), code

    def _counts(self, stage: OpenStage, launch: Launch) -> tuple[Count, ...]:
        """Return the iteration count of each loop of a launch, outermost first. In a split reduction, the number of parts precedes them."""
        split = self.ctx.split
        counts = [] if split is None else [Count((), split.parts, 1, split.parts)]
        seen: set[int] = set()
        for a, piece, _ in launch.loops:
            bound = self.axes.bound(stage, a)
            count = Count((), piece.extent, 1, piece.extent)
            moves, start = stage.base[a]
            if bound is not None and a not in seen and not moves:
                terms, const = linear(bound)
                if all(v.op is Ops.DEFINE_VAR for v in terms):
                    names = tuple(sorted((v.arg[0], k) for v, k in terms.items()))
                    count = Count(names, const - start, piece.stride, piece.extent)
            seen.add(a)
            counts.append(count)
        return tuple(counts)

    def _iterations(self, stage: OpenStage, launch: Launch, body: Body, counts: tuple[Count, ...], begin: int, end: int,
                    sink: Sink) -> None:
        """Emit iterations `begin` to `end` of a launch."""
        iteration, _ = self.b.open(begin, end, 1)
        indices = self._indices(stage, launch, counts, iteration)
        if self.ctx.split is not None:
            self.ctx.part, *indices = indices
        self._where_inside(stage, launch, body, indices,
                           lambda cover, inside: self._iteration(stage, launch, inside, indices, cover, sink))
        self.b.close(iteration)

    def _indices(self, stage: OpenStage, launch: Launch, counts: tuple[Count, ...], iteration: int) -> list[int]:
        """Emit the loop index of each entry of `counts` in an iteration of the launch; the innermost index changes fastest."""
        b, loops = self.b, launch.loops
        indices: list[int] = []
        rest = iteration
        for loop, count in zip(reversed(loops), reversed(counts[1:]), strict=False):
            n = b.index(loop.piece.extent) if count.is_constant else self.axes.count(stage, loop.axis, loop.piece)
            indices.append(b.alu("MOD", dtypes.index, 1, rest, n))
            rest = b.alu("IDIV", dtypes.index, 1, rest, n)
        if not counts:
            return []
        parts = [rest, *reversed(indices)]
        for k, (loop, count) in enumerate(zip(reversed(loops), reversed(counts), strict=False), 1):
            if loop.axis in launch.longest_first and count.is_constant:
                parts[-k] = b.alu("SUB", dtypes.index, 1, b.index(loop.piece.extent - 1), parts[-k])
        return parts

    def _iteration(self, stage: OpenStage, launch: Launch, body: Body, indices: list[int], cover: Cover, sink: Sink) -> None:
        """Emit one iteration of the launch."""
        moved: set[int] = set()     # axes whose start already includes the offset of the part
        for (a, piece, _), index in zip(launch.loops, indices, strict=True):
            start: Lin = ({self.b.mul(index, piece.stride): 1}, 0) if piece.extent > 1 else ({}, 0)
            if cover.condition >= 0 and self.axes.bound(stage, a) is not None:
                start = add_lins(start, ({cover.condition: 1}, 0), 1)
            if a in cover.parts and a not in moved:
                start = add_lins(start, ({cover.parts[a]: 1}, 0), 1)
                moved.add(a)
            if a in cover.latest:
                start = ({self.b.alu("MIN", dtypes.index, 1, self.axes.ssa(start), cover.latest[a]): 1}, 0)
            stage.open_row(a, start)
        self.stages.emit(stage, body, sink)
        for loop in launch.loops:
            stage.close_row(loop.axis)

    # -- extents that depend on variables ------------------------------------------------------------------
    def _where_inside(self, stage: OpenStage, launch: Launch, body: Body, indices: list[int], inside: Inside) -> None:
        """Emit one iteration of a launch. It has no guards if it lies inside all extents, is emitted in parts if only some of its
        positions do, and does nothing if none does."""
        b = self.b
        starts: dict[int, Lin] = {}     # starts of the axes whose extents depend on variables
        for (a, piece, _), index in zip(launch.loops, indices, strict=True):
            if self.axes.bound(stage, a) is not None:
                start: Lin = ({b.mul(index, piece.stride): 1}, 0) if piece.extent > 1 else ({}, 0)
                starts[a] = add_lins(starts.get(a, stage.base[a]), start, 1)
        if not starts:
            inside(Cover(-1, {}, {}), body)
            return
        left = {a: b.alu("SUB", dtypes.index, 1, self.axes.limit(stage, a), self.axes.ssa(here)) for a, here in starts.items()}
        some, everything, latest = self._conditions(stage, launch, left)
        self._where(everything, lambda index: inside(Cover(index, {}, latest), body))
        partly = launch.partly
        if partly is not None:
            condition = b.alu("AND", dtypes.bool, 1, some, b.alu("NOT", dtypes.bool, 1, everything))
            self._where(condition, lambda index: self._in_parts(launch, partly, left, Cover(index, {}, {}), inside))

    def _conditions(self, stage: OpenStage, launch: Launch, left: dict[int, int]) -> tuple[int, int, dict[int, int]]:
        """Emit the conditions of an iteration; returns (some position is inside the extents, all positions are, `Cover.latest`). `left`:
        axis → positions from the iteration's start to the extent."""
        b = self.b
        some = everything = -1
        latest: dict[int, int] = {}
        for a, positions in left.items():
            room, reach = positions, launch.frame.reach(a)
            if a in launch.moved_back:
                room = b.alu("SUB", dtypes.index, 1, self.axes.limit(stage, a), self.axes.ssa(stage.base[a]))
                latest[a] = b.alu("SUB", dtypes.index, 1, room, b.index(reach))
            inside = b.alu("CMPLE", dtypes.bool, 1, b.index(1), positions)
            some = self._and(some, inside)
            everything = self._and(everything, inside)
            if a in launch.ended:
                everything = self._and(everything, b.alu("CMPLE", dtypes.bool, 1, b.index(reach), room))
        return some, everything, latest

    def _and(self, a: int, b: int) -> int:
        """Emit `a AND b`; `a` -1 stands for no condition."""
        return b if a < 0 else self.b.alu("AND", dtypes.bool, 1, a, b)

    def _where(self, condition: int, body: Callable[[int], None]) -> None:
        """Emit `body` in a loop that runs once if the condition holds, otherwise not at all."""
        b = self.b
        loop, _ = b.open(b.index(0), b.alu("WHERE", dtypes.index, 1, condition, b.index(1), b.index(0)), ALIGNED)
        body(loop)
        b.close(loop)
        self.ctx.forget_values()

    def _in_parts(self, launch: Launch, parts: tuple[Part, ...] | Body, left: dict[int, int], cover: Cover, inside: Inside) -> None:
        """Emit the positions of an iteration that are inside the extents, axis by axis in the smaller steps of `parts`."""
        if isinstance(parts, Body):
            inside(cover, parts)
            return
        b, a = self.b, parts[0].axis
        rest = b.alu("MIN", dtypes.index, 1, b.index(launch.frame.reach(a)), left[a])
        conditions = [self.axes.for_tail(part.when, rest) for part in parts]
        for part, condition in zip(parts, conditions, strict=True):
            stop = rest if condition < 0 else b.alu("WHERE", dtypes.index, 1, condition, rest, b.index(0))
            loop, _ = b.open(b.index(0), stop, part.step)
            self._in_parts(launch, part.inside, left, cover._replace(parts={**cover.parts, a: loop}), inside)
            b.close(loop)
            self.ctx.forget_values()
