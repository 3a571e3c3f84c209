"""The launch of a phase: its outermost loops become begin…end, and the rest is emitted inside.

    for i in 4: for j in 8: for k in 9: …    →    LOOP n in begin…end:  i = n // 8;  j = n % 8;  LOOP k …        extent 32
"""
from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from svod.compile.lower.emit.context import PhaseContext
from svod.compile.lower.emit.stages import Stages
from svod.compile.lower.emit.state import OpenStage, Sink, StageLoop
from svod.compile.lower.prefetch import Source, add_prefetches
from svod.compile.lower.program import Count, Instruction
from svod.compile.lower.transpose import MIN_LANES, PAIR, transpose_squares
from svod.core.ir.dtype import dtypes
from svod.core.ir.symbolic import linear
from svod.core.ir.uop import Ops
from svod.core.kernel.online import masked_limits
from svod.core.kernel.required import Lin, add_lins

MIN_ITERATIONS = 64             # a phase offers at least this many iterations per core, so that cores and slices have something to share
ALIGNED = 64                    # a step that leaves alone what is known of the alignment of addresses


class Spec(NamedTuple):
    """The launch of a phase, before its symbol is known."""

    extent: int
    threads: int
    scratch: int
    once: bool
    counts: tuple[Count, ...] = ()
    block: int = 1
    shared: int = 0
    subgroup: int = 0


Emitted = tuple[Spec, tuple[Instruction, ...]]


class Cover(NamedTuple):
    """The positions that an iteration of a launch covers and computes, where variables end axes."""

    condition: int                  # the index, which is 0, of a loop that runs once at most and holds everything computed; or -1
    parts: dict[int, int]           # axis → the first position of the part
    latest: dict[int, int]          # axis → the last position at which a whole tile starts: later ones are moved back to it


class LaunchEmitter:
    """Emits the launches of a phase's open stage."""

    def __init__(self, ctx: PhaseContext, stages: Stages):
        self.ctx, self.b, self.state, self.facts = ctx, ctx.b, ctx.state, ctx.facts
        self.stages, self.axes = stages, stages.axes

    def emit(self, stage: OpenStage, sink: Sink, threads: int, once: bool = False, tail: bool = False) -> Emitted:
        """Emit the phase. `tail`: its last iteration gets a loop of its own, as only its vectors are not aligned."""
        b = self.b
        begin, end = b.pure("BEGIN", dtypes.index, 1, ()), b.pure("END_", dtypes.index, 1, ())
        loops, extent = self._outermost(stage, threads)
        self.ctx.open_stages[stage.index] = stage
        counts = self._counts(stage, loops)
        if tail:
            last = b.index(extent - 1)
            stage.aligned = True
            self._iterations(stage, loops, counts, begin, b.alu("MIN", dtypes.index, 1, end, last), sink)
            stage.aligned = False
            self.ctx.forget_values()
            begin = b.alu("MAX", dtypes.index, 1, begin, last)
        self._iterations(stage, loops, counts, begin, end, sink)
        least = PAIR if self.facts.on_grid else MIN_LANES
        code = tuple(transpose_squares(list(b.finish()), self.state.target.has_mask_registers, least))
        code = add_prefetches(code, self._distances())
        self.facts.note_emitted(len(code))
        variable = () if all(c.is_constant for c in counts) else counts
        group = self.ctx.group
        return Spec(extent, min(threads, extent) if threads > 1 else 1, self.ctx.scratch, once, variable, group.group.threads,
                    group.shared.size, self.state.target.subgroup if group.exchanges else 0), code

    def _distances(self) -> dict[Source, int]:
        """What PREFETCH asks for, by pointer. A stage that has left the root since lies in a cache."""
        temporaries = {self.state.kernel.stages[s].name: ("TEMP", t.number) for s, t in self.facts.temp_of.items()}
        arguments = {f"p{slot}": ("ARG", slot) for slot in range(len(self.state.kernel.params))}
        sources = temporaries | arguments
        return {sources[name]: n for name, n in self.state.prefetch if name in sources}

    def _outermost(self, stage: OpenStage, threads: int) -> tuple[list[StageLoop], int]:
        """The loops that make the launch, and the number of their iterations."""
        split = self.ctx.split
        loops: list[StageLoop] = []
        extent = 1 if split is None else split.parts
        if split is not None and not self.facts.on_grid:
            return loops, extent
        for loop in stage.loops:
            if loop.axis >= stage.num_outs:
                break
            innermost = len(loops) == len(stage.loops) - 1
            if loops and not self.facts.on_grid and (extent >= MIN_ITERATIONS * threads or (innermost and extent >= 4 * threads)):
                break   # enough to share; the innermost loop stays a loop
            extent *= loop.piece.extent
            loops.append(loop)
            if (stage.index, loop.point) in self.facts.placement.children:
                break
        return loops, extent

    def _counts(self, stage: OpenStage, loops: list[StageLoop]) -> tuple[Count, ...]:
        """The iteration count of each loop of a launch, after that of the parts of a split reduction."""
        split = self.ctx.split
        counts = [] if split is None else [Count((), split.parts, 1, split.parts)]
        seen: set[int] = set()
        for a, piece, _ in loops:
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

    def _iterations(self, stage: OpenStage, loops: list[StageLoop], counts: tuple[Count, ...], begin: int, end: int, sink: Sink) -> None:
        """Iterations `begin` to `end` of a launch made of `loops`."""
        iteration, _ = self.b.open(begin, end, 1)
        self.ctx.group.shared.outside = (iteration,)
        indices = self._indices(stage, loops, counts, iteration)
        if self.ctx.split is not None:
            self.ctx.part, *indices = indices
        self._where_inside(stage, loops, indices, lambda cover: self._iteration(stage, loops, indices, cover, sink))
        self.b.close(iteration)

    def _indices(self, stage: OpenStage, loops: list[StageLoop], counts: tuple[Count, ...], iteration: int) -> list[int]:
        """The index of each count in an iteration of the launch; the innermost changes first. Groups to which a mask leaves most blocks
        begin first, as the last ones to end are short then."""
        b = self.b
        limits = masked_limits(self.ctx.kernel) if self.facts.on_grid and stage.r.stage.is_output else ()
        longest_last = {limit.output for limit in limits}.difference(limit.output for limit in limits if limit.step < 0)
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
            if loop.axis in longest_last and count.is_constant:
                parts[-k] = b.alu("SUB", dtypes.index, 1, b.index(loop.piece.extent - 1), parts[-k])
        return parts

    def _iteration(self, stage: OpenStage, loops: list[StageLoop], indices: list[int], cover: Cover, sink: Sink) -> None:
        """Emit one iteration of the launch."""
        moved: set[int] = set()     # axes that start where the part does
        for (a, piece, point), index in zip(loops, indices, strict=True):
            start: Lin = ({self.b.mul(index, piece.stride): 1}, 0) if piece.extent > 1 else ({}, 0)
            if cover.condition >= 0 and self.axes.bound(stage, a) is not None:
                start = add_lins(start, ({cover.condition: 1}, 0), 1)
            if a in cover.parts and a not in moved:
                start = add_lins(start, ({cover.parts[a]: 1}, 0), 1)
                moved.add(a)
            if a in cover.latest:
                start = ({self.b.alu("MIN", dtypes.index, 1, self.axes.ssa(start), cover.latest[a]): 1}, 0)
            stage.open_row(a, start)
            self.stages.emit_point(stage.index, point)
        self.stages.walk(stage, len(loops), sink)
        for loop in loops:
            stage.close_row(loop.axis)

    # -- extents that depend on variables ------------------------------------------------------------------
    def _where_inside(self, stage: OpenStage, loops: list[StageLoop], indices: list[int], body: Callable[[Cover], None]) -> None:
        """Emit `body` for one iteration of a launch: without guards if all of it lies inside, part by part if only some does."""
        b = self.b
        starts: dict[int, Lin] = {}     # of the axes that variables end
        for (a, piece, _), index in zip(loops, indices, strict=True):
            if self.axes.bound(stage, a) is not None:
                start: Lin = ({b.mul(index, piece.stride): 1}, 0) if piece.extent > 1 else ({}, 0)
                starts[a] = add_lins(starts.get(a, stage.base[a]), start, 1)
        if not starts:
            body(Cover(-1, {}, {}))
            return
        whole = [a for a in starts if stage.is_last(a, sum(loop.axis == a for loop in loops))]
        left = {a: b.alu("SUB", dtypes.index, 1, self.axes.limit(stage, a), self.axes.ssa(here)) for a, here in starts.items()}
        some, everything, latest = self._conditions(stage, whole, left)
        stage.safe.update(whole)
        self._where(everything, lambda index: body(Cover(index, {}, latest)))
        stage.safe.difference_update(whole)
        cut = [a for a in whole if stage.reach(a) > 1]
        if cut:
            narrow = [a for a in cut if stage.tail_step(a) < stage.reach(a)]
            single = [a for a in whole if a not in cut]
            partly = b.alu("AND", dtypes.bool, 1, some, b.alu("NOT", dtypes.bool, 1, everything))
            stage.safe.update(single)
            self._where(partly, lambda index: self._in_parts(stage, narrow, left, Cover(index, {}, {}), body))
            stage.safe.difference_update(single)

    def _conditions(self, stage: OpenStage, whole: list[int], left: dict[int, int]) -> tuple[int, int, dict[int, int]]:
        """(some position is inside, all are, `Cover.latest`) of an iteration with `left` positions of each axis from its start. The
        loops of the axes `whole` are all in the launch."""
        b = self.b
        some = everything = -1
        latest: dict[int, int] = {}
        for a, positions in left.items():
            room, reach = positions, stage.reach(a)
            if a in whole and self.axes.moves_back(stage, a):
                room = b.alu("SUB", dtypes.index, 1, self.axes.limit(stage, a), self.axes.ssa(stage.base[a]))
                latest[a] = b.alu("SUB", dtypes.index, 1, room, b.index(reach))
            inside = b.alu("CMPLE", dtypes.bool, 1, b.index(1), positions)
            some = self._and(some, inside)
            everything = self._and(everything, inside)
            if a in whole:
                everything = self._and(everything, b.alu("CMPLE", dtypes.bool, 1, b.index(reach), room))
        return some, everything, latest

    def _and(self, a: int, b: int) -> int:
        """`a AND b`; -1 stands for no condition."""
        return b if a < 0 else self.b.alu("AND", dtypes.bool, 1, a, b)

    def _where(self, condition: int, body: Callable[[int], None]) -> None:
        """A loop that runs once where the condition holds."""
        b = self.b
        loop, _ = b.open(b.index(0), b.alu("WHERE", dtypes.index, 1, condition, b.index(1), b.index(0)), ALIGNED)
        body(loop)
        b.close(loop)
        self.ctx.forget_values()

    def _in_parts(self, stage: OpenStage, axes: list[int], left: dict[int, int], cover: Cover, body: Callable[[Cover], None]) -> None:
        """The remaining positions of an iteration, in smaller steps along `axes`."""
        if not axes:
            body(cover)
            return
        b, a = self.b, axes[0]
        rest = b.alu("MIN", dtypes.index, 1, b.index(stage.reach(a)), left[a])
        for step, condition in self.axes.tail_parts(stage, a, rest):
            loop, _ = b.open(b.index(0), rest if condition < 0 else b.alu("WHERE", dtypes.index, 1, condition, rest, b.index(0)), step)
            with stage.narrowed(a, step):
                self._in_parts(stage, axes[1:], left, cover._replace(parts={**cover.parts, a: loop}), body)
            b.close(loop)
            self.ctx.forget_values()
