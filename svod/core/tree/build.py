"""The loop tree of a state before any pass: each stage stands at the loop where its readers need it, and no loop has a tail yet.

    s1 read by out as s1[o1, r0], STAGE(s1, o1)

    Launch of out
      Loop o1
        Compute s1
        Reduction
          Loop r0
            Accumulate

The passes of `svod.core.tree.passes` turn it into the tree that runs. A tail has its own body, with smaller regions of the stages inside
it: `TreeMaker.cut_nests` computes these regions."""
from __future__ import annotations

from collections.abc import Mapping
from math import prod

from svod.core.kernel.copy_loops import CopyLoops
from svod.core.kernel.group_memory.banks import with_row_pad
from svod.core.kernel.group_memory.copy import UNROLLED_TURNS, along_vector
from svod.core.kernel.groups import BLOCK_ROLES, group_of, phase_of, spanned, stages_of
from svod.core.kernel.kernel import ResolvedStage
from svod.core.kernel.layout import Layout, is_exact, lay_out, swizzled_lines
from svod.core.kernel.loop_nest import Cut, Cuts, LoopNest, LoopNestMaker, StageNest, loop_nest, stage_copy
from svod.core.kernel.placement import COPY_VECTOR, NO_ROW, EmittedLoop, fit, is_computed_once, is_derived, vector_width
from svod.core.kernel.scheduler import LOOP, UPCAST, ReductionParts, Scheduler, cut_of
from svod.core.machine.levels import OF_GROUP, MemorySpace
from svod.core.tree.checks import Checks, checks_of
from svod.core.tree.combine import combining
from svod.core.tree.nodes import (
    NO_POINT,
    UNCHECKED,
    Accumulate,
    Body,
    Compute,
    Frame,
    Inner,
    Launch,
    Loop,
    Phase,
    PhaseKind,
    Reduction,
    Split,
    StageLoop,
    Store,
    Turns,
    Update,
)
from svod.core.tree.threads import thread_part

Nests = Mapping[int, StageNest]


class TreeMaker:
    """Builds the loop tree of one state: its phases, and the bodies inside their loops. `nest`: nests of some of its stages; stages without
    a nest are left out of all bodies. None: the nests of all stages."""

    def __init__(self, state: Scheduler, nest: LoopNest | None = None) -> None:
        self.state, self.kernel = state, state.kernel
        self.nest = nest or loop_nest(state)
        self.placement, self.layouts = self.nest.placement, self.nest.layouts
        self.checks = checks_of(state)

    def phases(self) -> tuple[Phase, ...]:
        """The phases of the state. Phases that run once, at prepare, come first."""
        once = {s: is_computed_once(self.state, self.placement, s) for s in self.placement.roots}
        return tuple([phase for s in sorted(self.placement.roots, key=lambda s: not once[s])
                      for phase in self.phases_of(s, cut_of(self.state, s), once[s])])

    def phases_of(self, s: int, split: ReductionParts | None, is_once: bool = False) -> tuple[Phase, ...]:
        """The phases of a root stage: one, or two if `split` cuts its reduction over cores or groups."""
        nest = self.nest.stages[s]
        frame = self.frame(nest) if not is_derived(nest.r.stage) else self.root_copy(nest)
        launch = Launch(frame, 0, self.body(frame, 0))
        if split is None:
            return (Phase(s, PhaseKind.OUTPUT if nest.r.stage.is_output else PhaseKind.TEMPORARY, is_once, launch),)
        cut = self._split(nest.r, split.axis, split.parts)
        second = self._combining_frame(nest.r, cut.parts)
        return (Phase(s, PhaseKind.PARTIAL, is_once, launch, cut),
                Phase(s, PhaseKind.COMBINE, is_once, Launch(second, 0, self.loops_alone(second))))

    def _split(self, r: ResolvedStage, axis: int, parts: int) -> Split:
        """Cut a reduction into at most `parts` parts. Each but the last has the same number of positions: whole iterations of its outermost
        loop."""
        extent = self._spanned(r.stage.index, axis)
        step = fit(self.state, self.state.axis_rows[axis], extent)[0].stride
        chunk = -(-extent // (parts * step)) * step
        return Split(r.axes.index(axis), chunk, -(-extent // chunk))

    # -- frames -----------------------------------------------------------------------------------------
    def frame(self, nest: StageNest) -> Frame:
        """The loops of a stage that is no copy, as the opts have scheduled them. With groups of threads: the loops of one thread."""
        state, r, s = self.state, nest.r, nest.r.stage.index
        bounds = (*nest.region, *[self._spanned(s, a) for a in r.stage.reds])
        part = thread_part(state, r, nest.axes, bounds)
        axis, row = self.layouts.vector_axes[s], self.layouts.vector_rows[s]
        of_row = {p.row: (a, p) for a, pieces in enumerate(part.pieces) for p in pieces if p.role == LOOP}
        loops = tuple([StageLoop(*of_row[x], depth + 1) for depth, x in enumerate(state.order[s])])
        return self.make_frame(r, part.pieces, part.bounds, part.apart, axis, row, vector_width(state, r), loops)

    def root_copy(self, nest: StageNest) -> Frame:
        """The loops of a copy that is a phase of its own."""
        assert nest.layout is not None, "a copy lies in memory"
        copy = stage_copy(self.state, nest.r, list(nest.layout.extents), self.layouts, nest.layout, is_root=True)
        return self.copy_frame(nest.r, copy, nest.layout.extents, nest.layout.order)

    def _combining_frame(self, r: ResolvedStage, parts: int) -> Frame:
        """The loops of the phase that combines the partial results of a split reduction. If the kernel writes one of its inputs, no
        position is computed twice."""
        combined, copy, extents, order = combining(self.state, r, parts)
        fixed = {a: e for a, e, own in zip(r.stage.outs, extents, copy.axes, strict=False) if not is_exact(own, e)}
        return self.copy_frame(combined, copy, extents, order, self.checks.fixing(fixed) if self.kernel.written else None)

    def copy_frame(self, r: ResolvedStage, copy: CopyLoops, extents: tuple[int, ...], order: tuple[int, ...],
                   checks: Checks | None = None) -> Frame:
        """The loops of a copy of `extents` positions. `order`: its axes, outermost loop first."""
        loops = [StageLoop(a, p, NO_POINT) for a in order for p in copy.axes[a] if p.role == LOOP]
        if copy.last >= 0:
            loops.append(loops.pop(max(i for i, loop in enumerate(loops) if loop.axis == copy.last)))
        apart = (0,) * len(extents)
        return self.make_frame(r, tuple(copy.axes), extents, apart, copy.vector, COPY_VECTOR, copy.width, tuple(loops), checks)

    def make_frame(self, r: ResolvedStage, pieces: tuple[tuple[EmittedLoop, ...], ...], bounds: tuple[int, ...], apart: tuple[int, ...],
                   lane: int, vector_row: int, width: int, loops: tuple[StageLoop, ...], checks: Checks | None = None) -> Frame:
        """Build a frame. `lane`: the local axis that is the vector if its row `vector_row` has several positions, or -1. `apart`: as
        `Frame.apart`. `checks`: the checked positions of this stage; None takes those of the whole state."""
        vector = next((p for p in pieces[lane] if p.row == vector_row), None) if lane >= 0 else None
        vector_axis, stride = (lane, vector.stride) if vector is not None and vector.extent > 1 else (-1, 1)
        unsafe, _, fixed = checks or self.checks
        checked = tuple([unsafe.get(axis, UNCHECKED) for axis in r.axes]) if unsafe else ()
        return Frame(r, pieces, bounds, frozenset([i for i, axis in enumerate(r.axes) if axis in fixed]), checked, vector_axis, vector_row,
                     stride, width, loops, apart)

    def _spanned(self, s: int, axis: int) -> int:
        return spanned(self.state, self.placement, s, axis)

    # -- bodies -----------------------------------------------------------------------------------------
    def body(self, frame: Frame, k: int) -> Body:
        """The body inside the outermost `k` loops of a stage: the stages that are placed there, then the next loop."""
        return Body(self._placed(frame, k), self._inner(frame, k))

    def _placed(self, frame: Frame, k: int) -> tuple[Compute, ...]:
        """The stages that are computed inside the outermost `k` loops of a stage."""
        if not self.placement.children:
            return ()
        return self._computed(frame.r.stage.index, frame.loops[k - 1].point if k else 0)

    def _computed(self, s: int, point: int) -> tuple[Compute, ...]:
        """The stages that are placed in stage `s` inside its loop at depth `point`."""
        found = self.placement.children.get((s, point))
        return () if found is None else tuple([self.compute(c) for c in found if c in self.nest.stages])

    def _inner(self, frame: Frame, k: int) -> Inner:
        """The next loop of a stage. Inside all output loops: its reduction, or a store if it has none."""
        if k < len(frame.loops) and frame.loops[k].axis < frame.num_outs:
            return Loop(frame, k, self.body(frame, k + 1))
        return self._reduction(frame, k) if frame.r.reductions else Store(frame)

    def _reduction(self, frame: Frame, k: int) -> Reduction:
        """A reduction over loop `k` and the loops inside it. Output loops among them need accumulators in memory: `Reduction.in_memory`."""
        outs, loops = frame.num_outs, frame.loops
        end = next((j + 1 for j in reversed(range(k, len(loops))) if loops[j].axis < outs and loops[j].piece.extent > 1), -1)
        return Reduction(frame, tuple([j for j in range(k, end) if loops[j].axis < outs]), self._inside_reduction(frame, k, end))

    def loops_alone(self, frame: Frame) -> Body:
        """The body of a frame whose loops have no stages inside them: of a copy, or of the phase that combines partial results."""
        return Body((), self._inner(frame, 0))

    def _inside_reduction(self, frame: Frame, k: int, end: int) -> Inner:
        """The loops of a reduction from number `k` on. `end`: accumulators in memory are read and written just outside loop number `end`;
        -1: they are carried in registers."""
        if k == end:
            return Update(self._inside_reduction(frame, k, -1))
        if k == len(frame.loops):
            return Accumulate(frame)
        return Loop(frame, k, Body(self._placed(frame, k + 1), self._inside_reduction(frame, k + 1, end)))

    def compute(self, s: int) -> Compute:
        """The node that computes a stage for its readers."""
        nest = self.nest.stages[s]
        frame, layout, turns = self._loops_and_memory(nest)
        if not is_derived(nest.r.stage):
            assert frame is not None
            return Compute(nest, self.body(frame, 0), layout=layout)
        body = None if frame is None else self.loops_alone(frame)
        return Compute(nest, body, self._computed(s, 0), layout, turns, frame is None)

    def recomputed(self, node: Compute, nest: StageNest) -> tuple[Compute, Frame | None]:
        """(`node` with another nest of its stage, the frame that its body has to have for this nest)."""
        frame, layout, turns = self._loops_and_memory(nest)
        return node._replace(nest=nest, layout=layout, turns=turns), frame

    def _loops_and_memory(self, nest: StageNest) -> tuple[Frame | None, Layout | None, Turns | None]:
        """The frame of a stage that is computed for its readers, the layout of its value in memory, and the turns in which threads copy it.
        A stage that is computed where it is multiplied has none of them."""
        if not is_derived(nest.r.stage):
            return self.frame(nest), self._layout(nest), None
        if nest.space is MemorySpace.HELD:
            return None, None, None
        layout = self._layout(nest)
        if nest.copy is not None:
            copied = self.in_turns(Compute(nest))
            assert copied.body is not None
            return copied.body.frame, layout, copied.turns
        copy = stage_copy(self.state, nest.r, list(layout.extents), self.layouts, layout)
        return self.copy_frame(nest.r, copy, layout.extents, layout.order), layout, None

    def in_turns(self, node: Compute, is_bulk: bool = False) -> Compute:
        """Let all threads of a group take parts of a copy in turn. `is_bulk`: a part is a whole row."""
        s, r, copy = node.stage, node.nest.r, self.nest.stages[node.stage].copy
        assert copy is not None
        extents = tuple([extent for _, extent in node.nest.written])
        width, threads = copy.part(extents, is_bulk), group_of(self.state, self.placement, phase_of(self.placement, s)).threads
        pieces: list[tuple[EmittedLoop, ...]] = [(EmittedLoop(NO_ROW, LOOP, e, 1),) for e in extents]
        if copy.vector >= 0:
            whole = EmittedLoop(NO_ROW, LOOP, extents[copy.vector] // width, width)
            pieces[copy.vector] = (whole, EmittedLoop(COPY_VECTOR, UPCAST, width, 1))
        counts = tuple([pieces[d][0].extent for d in copy.order])
        steps = {n: along.step for n, along in along_vector(r, copy.vector, width).items()} if width > 1 else {}
        frame = self.copy_frame(r, CopyLoops(pieces, copy.vector, width), extents, ())
        return node._replace(body=Body((), Store(frame)),
                             turns=Turns(copy.order, counts, threads, prod(counts) // threads > UNROLLED_TURNS, steps))

    def _layout(self, nest: StageNest) -> Layout:
        """The memory layout of the region that one computation of a stage writes. A stage computed at several places of the tree may have
        several layouts: one in tiles needs a region that starts at 0."""
        s, extents = nest.r.stage.index, tuple([extent for _, extent in nest.written])
        whole = self.nest.stages[s].layout      # a tail writes a part of the same area, so its rows and tiles have to match
        if nest.space not in OF_GROUP or whole is None:
            dim = -1 if self.state.target.has_groups else self.layouts.tiles[s].dim
            return lay_out(self.state, self.layouts, s, extents, dim >= 0 and nest.written[dim].start == ({}, 0))
        if extents == whole.extents:
            return whole
        packed = self.layouts.packed.get(s)
        if whole.swizzle is not None and packed is not None and not packed.line:
            return swizzled_lines(self.layouts, s, extents) or lay_out(self.state, self.layouts, s, extents, False)
        return with_row_pad(lay_out(self.state, self.layouts, s, extents, False), whole.row_pad)

    # -- smaller bodies ---------------------------------------------------------------------------------
    def has_stages(self, s: int, point: int) -> bool:
        """Whether any stage is computed inside the loop of stage `s` at depth `point`, or deeper."""
        return any(q == s and depth >= point for c in self.nest.stages for q, depth in self.placement.paths[c] or ())

    def cut(self, frame: Frame, a: int) -> Cut:
        """The loops over a local axis of a frame, including the ones that are bound to threads."""
        bound = [p for p in self.nest.stages[frame.r.stage.index].axes[a] if p.role in BLOCK_ROLES]
        return Cut((*bound, *frame.pieces[a]), frame.bounds[a])

    def cut_nests(self, s: int, cuts: Cuts) -> Nests:
        """The loop nests of all stages in the phase of stage `s`, after loops are shortened as `cuts` says. Stages inside a shortened loop
        compute smaller regions."""
        phase = stages_of(self.state, self.placement, phase_of(self.placement, s))
        return LoopNestMaker(self.state, cuts, self.nest.stages).make([q for q in phase if q in self.nest.stages]).stages
