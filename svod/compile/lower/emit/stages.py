"""Stages: their loops, the stages inside these, and where values are staged for their readers."""
from __future__ import annotations

from collections.abc import Iterable

from svod.compile.lower.emit.accumulators import Accumulators
from svod.compile.lower.emit.addresses import Addresses
from svod.compile.lower.emit.axes import Axes
from svod.compile.lower.emit.context import PhaseContext
from svod.compile.lower.emit.intrinsics import Intrinsics
from svod.compile.lower.emit.loops import LoopEmitter
from svod.compile.lower.emit.packing import Packing
from svod.compile.lower.emit.reduce import ReduceLoops
from svod.compile.lower.emit.regions import Regions
from svod.compile.lower.emit.state import NO_POINT, Held, OpenStage, Sink, Staged, StageLoop
from svod.compile.lower.emit.threads.copies import GroupCopies
from svod.compile.lower.emit.threads.groups import GroupThreads
from svod.compile.lower.emit.threads.pipeline import CopiesAhead
from svod.compile.lower.emit.values import Values
from svod.core.kernel.groups import group_of, stage_threads, whole_extent
from svod.core.kernel.kernel import ResolvedStage
from svod.core.kernel.layout import Layout, area_start
from svod.core.kernel.loop_nest import stage_copy
from svod.core.kernel.placement import COPY_VECTOR, fit, vector_width
from svod.core.kernel.required import Lin, RequiredDim, add_lins
from svod.core.kernel.scheduler import UPCAST
from svod.errors import KernelOptError


class Stages:
    """Emits stages and, at the points of their loops, the stages that live there."""

    def __init__(self, ctx: PhaseContext):
        self.ctx, self.b, self.state, self.kernel, self.facts = ctx, ctx.b, ctx.state, ctx.kernel, ctx.facts
        self.aligns = False     # whether rows of the output are stored at multiples of the vector
        self.axes = Axes(ctx)
        self.addresses = Addresses(ctx, self.axes)
        self.values = Values(ctx, self.axes, self.addresses)
        self.loops = LoopEmitter(ctx, self.axes, self.values)
        self.regions = Regions(ctx, self.axes)
        self.packing = Packing(ctx, self.axes, self.addresses, self.values)
        intrinsics = Intrinsics(ctx, self.axes, self.addresses, self.values, self.packing)
        self.accumulators = Accumulators(ctx, self.axes, self.values, intrinsics)
        self.group_copies = GroupCopies(ctx, self.axes)
        self.copies_ahead = CopiesAhead(ctx, self.addresses, self.values, self.regions, self.group_copies, self.packing)
        self.reductions = ReduceLoops(ctx, self.axes, self.loops, intrinsics, self.accumulators, self.copies_ahead)

    def walk(self, stage: OpenStage, k: int, sink: Sink) -> None:
        """Open the output loops from number k, then reduce, then store."""
        loops, outs = stage.loops, stage.num_outs

        def inside() -> None:
            self.emit_point(stage.index, loops[k].point)
            self.walk(stage, k + 1, sink)

        if k < len(loops) and loops[k].axis < outs:
            a, piece, _ = loops[k]
            if self.aligns and stage.r.stage.is_output and a == stage.vector_axis and piece.extent > 1:
                self.loops.aligned_row(stage, a, piece, inside)
            else:
                self.loops.output(stage, a, piece, inside)
        elif not stage.r.reductions:
            self.body(stage, sink)
        else:
            self.reductions.reduce_all(stage, k, sink, self.emit_point)

    def emit_point(self, s: int, depth: int) -> None:
        """Emit the stages that live at a point."""
        children = [c for c in self.facts.placement.children.get((s, depth), ()) if c not in self.copies_ahead.running]
        for child in children:
            if not (self.facts.is_held(child) and child in self.facts.derived):     # that is computed where it is multiplied
                self.emit_stage(child)
        if children:    # here, not in a loop that reads what they stored
            self.ctx.group.shared.before_reading(self._shared_areas(children))

    def emit_stage(self, s: int) -> None:
        """Compute the part of stage `s` that its readers need at this point."""
        r = self.facts.placement.resolved[s]
        assert r is not None
        shared, of_group = self.facts.is_shared(s), self.facts.is_of_group(s)
        self.ctx.group.shared.before_reading(self._shared_areas(r.reads))
        regions = [self.regions.required(s, i, of_group) for i in range(len(r.stage.outs))]
        extents, base = [region.extent for region in regions], [region.start for region in regions]
        if of_group:
            extents = [whole_extent(self.state, s, i, extent) for i, extent in enumerate(extents)]
        beyond = any(self.regions.is_read_beyond(s, i) for i in range(len(extents)))
        layout = self.facts.shared_layout(s, tuple(extents)) if of_group else self.facts.layout(s, tuple(extents))
        if layout.tiled >= 0 and not of_group and base[layout.tiled] != ({}, 0):
            layout = self.facts.layout(s, tuple(extents), tiled=False)   # tiles are whole only when the region starts at 0
        if shared:
            stage = self.group_copies.open(r, extents, base) if s in self.facts.derived else self._open_rows(r, extents, base)
        else:
            stage = self._open_copy(r, extents, base, layout) if s in self.facts.derived else self._open_rows(r, extents, base)
            if self.ctx.group.group.threads > 1 and not of_group:
                self._of_group(stage, [self.regions.required(s, i, True) for i in range(len(r.stage.outs))])
        # a region of all positions is wider than what is read
        stage.safe.update(i for i, e in enumerate(extents) if e < self.facts.positions(s, i) and self.regions.is_read_inside(s, i))
        outer = self.ctx.open_stages.get(s)
        self.ctx.open_stages[s] = stage
        self.emit_point(s, 0)
        if shared:
            self._emit_shared(stage, layout, base, beyond)
        elif of_group:
            self._emit_held(stage, base)
        else:
            self._emit_own(stage, extents, layout, base, beyond)
        if outer is None:
            del self.ctx.open_stages[s]
        else:
            self.ctx.open_stages[s] = outer
        self.ctx.forget_values()

    def _shared_areas(self, stages: Iterable[int]) -> list[int]:
        """The areas of those of the stages that lie in shared memory."""
        found = [self.ctx.staged[s].pointer for s in stages if s in self.ctx.staged]
        return [self.b.arg[p] for p in found if p >= 0 and self.b.op[p] == "SHARED"]

    def _of_group(self, stage: OpenStage, whole: list[RequiredDim]) -> None:
        """Note what all threads of the group compute together of a stage that each of them has to itself."""
        count = len(whole)
        stage.group_base = [*(start for start, _ in whole), *stage.group_base[count:]]
        stage.apart = [*(extent - own for (_, extent), own in zip(whole, stage.bounds, strict=False)), *stage.apart[count:]]

    def _emit_own(self, stage: OpenStage, extents: list[int], layout: Layout, base: list[Lin], beyond: bool) -> None:
        """Compute what each thread has to itself: one element, or an area of scratch."""
        s, b = stage.index, self.b
        if all(e == 1 for e in extents):
            got: list[int] = []
            self.walk(stage, 0, lambda one: got.append(self.values.result(one)))
            self.ctx.staged[s] = Staged(got[0], -1, None, tuple(base), b.level, 0, False)
            return
        offset = self.ctx.stage_area(s, self.facts.area(s, layout))
        pointer = b.pure("SCRATCH", self.facts.stored(s), 1, (), offset)
        self.walk(stage, 0, self.copy_sink(s, ("SCRATCH", offset), layout, base))
        self.ctx.versions += 1
        self.ctx.staged[s] = Staged(-1, pointer, layout, tuple(base), b.level, self.ctx.versions, beyond)

    def _emit_shared(self, stage: OpenStage, layout: Layout, base: list[Lin], beyond: bool) -> None:
        """Fill an area of shared memory."""
        s, b, shared = stage.index, self.b, self.ctx.group.shared
        offset = shared.area(s, self.facts.area(s, layout), area_start(layout))
        shared.before_writing((offset,))
        sink = self.copy_sink(s, ("SHARED", offset), layout, base)
        copy = self.facts.nest.stages[s].copy
        if copy is not None:
            self.group_copies.emit(stage, copy, sink)
        else:
            self.walk(stage, 0, sink)
        shared.wrote(offset)
        self.ctx.versions += 1
        pointer = shared.pointer(self.facts.stored(s), offset)
        self.ctx.staged[s] = Staged(-1, pointer, layout, tuple(base), b.level, self.ctx.versions, beyond)

    def _emit_held(self, stage: OpenStage, base: list[Lin]) -> None:
        """Compute the elements of tiles that this thread holds."""
        held: dict[tuple[int, ...], int] = {}
        starts: set[tuple[frozenset[tuple[int, int]], ...]] = set()

        def keep(one: OpenStage) -> None:
            value, lane = self.values.result(one), one.vector_axis
            terms, place = self.axes.placed([add_lins(self.axes.start(one, i), ({}, one.offsets[i]), 1) for i in range(one.num_outs)])
            starts.add(terms)
            for k in range(one.chunk.active if lane >= 0 else 1):
                at = tuple([p + k * one.vector_stride * (i == lane) for i, p in enumerate(place)])
                held[at] = value if self.b.num_lanes[value] == 1 else self.b.pure("EXTRACT", self.b.dtype[value], 1, (value,), k)
        self.walk(stage, 0, keep)
        if len(starts) != 1:
            raise KernelOptError(f"the tiles of stage {stage.r.stage.name} do not start alike; its values do not stay in registers")
        self.ctx.versions += 1
        self.ctx.staged[stage.index] = Staged(-1, -1, None, tuple(base), self.b.level, self.ctx.versions, False,
                                              held=Held(starts.pop(), held))

    def copy_sink(self, s: int, area: tuple[str, int], layout: Layout, base: list[Lin]) -> Sink:
        """A sink for the positions of a staged value. `area`: op and arg of its pointer."""
        op, arg = area
        if s in self.facts.packed:
            return lambda stage: self.packing.store(stage, op, arg, layout, base)
        pointer = self.b.pure(op, self.kernel.stages[s].dtype, 1, (), arg)
        return lambda stage: self.values.store_layout(stage, self.values.result(stage), pointer, layout, base)

    def body(self, stage: OpenStage, sink: Sink) -> None:
        """A stage without reduction, position by position."""
        stage.memo.clear()
        chunks = stage.lane_chunks()
        for _, offsets in stage.positions((UPCAST,), range(stage.num_outs)):
            for chunk in chunks:
                if stage.set_position(offsets, chunk):
                    sink(stage)

    def open_root(self, r: ResolvedStage) -> OpenStage:
        """Open a stage that is a phase: all its positions, or those of one thread of a group."""
        s = r.stage.index
        if s in self.facts.derived:
            layout = self.facts.temp_of[s].layout
            return self._open_copy(r, list(layout.extents), [({}, 0)] * len(layout.extents), layout, self.facts.on_grid)
        self.ctx.group = GroupThreads(self.b, self.state, group_of(self.state, self.facts.placement, s),
                                      stage_threads(self.state, self.facts.placement, s) if self.facts.on_grid else {})
        return self._open_rows(r, list(self.facts.nest.stages[s].region), [({}, 0)] * len(r.stage.outs))

    def _open_rows(self, r: ResolvedStage, extents: list[int], base: list[Lin]) -> OpenStage:
        """Open a stage whose loops are rows of the state, over a region of its dims, or the thread's part of it."""
        bounds = extents + [self.facts.spanned(r.stage.index, a) for a in r.stage.reds]
        starts: list[Lin] = base + [({}, 0)] * len(r.stage.reds)
        nest = self.facts.nest.stages[r.stage.index]
        if nest.region == tuple(extents):
            pieces = list(nest.axes)
        else:       # a remainder
            pieces = [fit(self.state, self.state.axis_rows[a], e) for a, e in zip(r.axes, bounds, strict=True)]
        first = list(starts)
        apart = self.ctx.group.bind(r, pieces, bounds, starts)
        axis, row = self.facts.layouts.vector_axes[r.stage.index], self.facts.layouts.vector_rows[r.stage.index]
        stage = OpenStage(r, pieces, bounds, starts, axis, row, vector_width(self.state, r))
        stage.group_base, stage.apart = first, apart
        if self.facts.on_grid and stage.vector_axis >= 0:
            stage.whole_vectors = self._has_whole_vectors(stage)
        if self.facts.placement.paths[stage.index] == () or self.facts.is_shared(stage.index):
            stage.stores = self.ctx.group.stores(stage.index)
        local = {axis: i for i, axis in enumerate(r.axes)}
        for depth, row in enumerate(self.state.order[stage.index]):
            a = local[self.state.rows[row].axis]
            stage.loops.append(StageLoop(a, next(p for p in pieces[a] if p.row == row), depth + 1))
        return stage

    def _has_whole_vectors(self, stage: OpenStage) -> bool:
        """Whether vectors begin at multiples of their width in an axis that they divide."""
        a = stage.vector_axis
        widths = {chunk.width for chunk in stage.lane_chunks()}
        nest = self.facts.nest.stages[stage.index]
        strides = [p.stride for p in nest.axes[a] if p.row != stage.vector_row and p.extent > 1]
        axis = self.kernel.axes[stage.r.axes[a]]
        whole = nest.region == tuple(stage.bounds[:stage.num_outs]) and stage.vector_stride == 1 and axis.bound is None
        terms, const = stage.group_base[a]
        apart = [axis.extent, const, *strides, *(c * self.b.multiple_of(v) for v, c in terms.items())]
        if stage.r.axes[a] not in self.facts.fixed:     # its last tile ends where the region does
            apart.append(stage.bounds[a])
        return whole and len(widths) == 1 and all(n % width == 0 for width in widths for n in apart)

    def _open_copy(self, r: ResolvedStage, extents: list[int], base: list[Lin], layout: Layout, exact: bool = False) -> OpenStage:
        """Open a copy over a region of its stage; its loops follow its layout."""
        copy = stage_copy(self.state, r, extents, self.facts.layouts, layout, exact)
        stage = OpenStage(r, copy.axes, extents, base, copy.vector, COPY_VECTOR, copy.width)
        stage.loops = [StageLoop(a, copy.axes[a][0], NO_POINT) for a in layout.order]
        return stage
