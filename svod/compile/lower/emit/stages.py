"""Emits stages: their loops, the stages inside these loops, and the stores into the memory where readers find the values."""
from __future__ import annotations

from svod.compile.lower.emit.addresses import Addresses
from svod.compile.lower.emit.axes import Axes
from svod.compile.lower.emit.context import PhaseContext
from svod.compile.lower.emit.intrinsics import Intrinsics
from svod.compile.lower.emit.loops import LoopEmitter
from svod.compile.lower.emit.packing import Packing
from svod.compile.lower.emit.reduce import ReduceLoops
from svod.compile.lower.emit.state import Held, OpenStage, Sink, Staged
from svod.compile.lower.emit.threads.copies import GroupCopies
from svod.compile.lower.emit.threads.groups import GroupThreads
from svod.compile.lower.emit.values import Values
from svod.core.kernel.groups import group_of, stage_threads
from svod.core.kernel.layout import Layout, area_start
from svod.core.kernel.loop_nest import StageNest
from svod.core.kernel.required import Lin, add_lins
from svod.core.machine.levels import OF_GROUP, MemorySpace
from svod.core.tree.nodes import Body, Compute, Frame, Loop, Reduction
from svod.errors import KernelOptError

NOWHERE: Lin = ({}, 0)


class Stages:
    """Emits stages and, inside their loops, the stages that are computed there."""

    def __init__(self, ctx: PhaseContext):
        self.ctx, self.b, self.state, self.kernel, self.facts = ctx, ctx.b, ctx.state, ctx.kernel, ctx.facts
        self.axes = Axes(ctx)
        self.addresses = Addresses(ctx, self.axes)
        self.values = Values(ctx, self.axes, self.addresses)
        self.loops = LoopEmitter(ctx, self.axes, self.values)
        self.packing = Packing(ctx, self.axes, self.addresses, self.values)
        self.intrinsics = Intrinsics(ctx, self.axes, self.addresses, self.values, self.packing)
        self.group_copies = GroupCopies(ctx, self.axes)

    def emit(self, stage: OpenStage, body: Body, sink: Sink) -> None:
        """Emit a body: the stages that it computes, then the loops of `stage` and its reduction. `sink` stores the value at each
        position."""
        before = stage.enter(body)
        self.compute_all(body)
        if isinstance(body.inner, Loop):
            self.loops.output(stage, body.inner, lambda inside: self.emit(stage, inside, sink))
        elif isinstance(body.inner, Reduction):
            ReduceLoops(self.loops, self.intrinsics, stage, self.compute_all).emit(body.inner, sink)
        else:
            self._store(stage, sink)
        stage.leave(before)

    def compute_all(self, body: Body) -> None:
        """Emit the stages that a body computes."""
        for node in body.stages:
            self.compute(node)
        if body.barrier:
            self.ctx.group.shared.barrier()

    def compute(self, node: Compute) -> None:
        """Emit the computation of one stage, for the region that its readers need here. A stage without a body emits nothing: each
        product that reads it computes it."""
        s, body = node.stage, node.body
        if body is None:
            return
        space = node.nest.space
        if node.barrier_first:
            self.ctx.group.shared.barrier()
        base, layout = [self.axes.placed_at(start) for start, _ in node.nest.written], node.layout
        assert layout is not None
        if node.turns is not None:
            stage = self.group_copies.open(body, node.turns, base)
        elif s in self.facts.derived:
            stage = OpenStage(body.frame, base, body.safe)
        else:
            stage = self._open_rows(body.frame, node.nest, base)
            if self.ctx.group.group.threads > 1 and space not in OF_GROUP:
                # each thread has a different region; the limits of loops apply to the region of the whole group
                whole = [(self.axes.placed_at(start), extent) for start, extent in node.nest.of_group]
                parts = [(start, extent - own) for (start, extent), own in zip(whole, stage.frame.bounds, strict=False)]
                stage.of_group[:len(parts)] = parts
        outer = self.ctx.open_stages.get(s)
        self.ctx.open_stages[s] = stage
        for one in node.before:
            self.compute(one)
        if node.barrier_to_store:
            self.ctx.group.shared.barrier()
        if space is MemorySpace.SHARED:
            self._emit_shared(stage, node, body, layout, base)
        elif space in OF_GROUP:
            self._emit_held(stage, body, base)
        else:
            self._emit_own(stage, node, body, layout, base)
        if outer is None:
            del self.ctx.open_stages[s]
        else:
            self.ctx.open_stages[s] = outer
        self.ctx.forget_values()

    def _emit_own(self, stage: OpenStage, node: Compute, body: Body, layout: Layout, base: list[Lin]) -> None:
        """Compute a stage whose value is private to each thread: a single element, or an area of scratch memory."""
        s, b = stage.index, self.b
        if all(extent == 1 for _, extent in node.nest.written):
            got: list[int] = []
            self.emit(stage, body, lambda one: got.append(self.values.result(one)))
            self.ctx.staged[s] = Staged(got[0], -1, None, tuple(base), b.level, 0, False)
            return
        offset = self.ctx.stage_area(s, self.facts.area(s, layout))
        pointer = b.pure("SCRATCH", self.facts.stored(s), 1, (), offset)
        self.emit(stage, body, self.copy_sink(s, ("SCRATCH", offset), layout, base))
        self.ctx.keep(s, pointer, layout, base, node.is_read_beyond)

    def _emit_shared(self, stage: OpenStage, node: Compute, body: Body, layout: Layout, base: list[Lin]) -> None:
        """Compute a stage into an area of shared memory."""
        s, shared = stage.index, self.ctx.group.shared
        offset = shared.area(s, self.facts.area(s, layout), area_start(layout))
        sink = self.copy_sink(s, ("SHARED", offset), layout, base)
        if node.turns is not None:
            self.group_copies.emit(stage, node.turns, sink)
        else:
            self.emit(stage, body, sink)
        self.ctx.keep(s, shared.pointer(self.facts.stored(s), offset), layout, base, node.is_read_beyond)

    def _emit_held(self, stage: OpenStage, body: Body, base: list[Lin]) -> None:
        """Compute this thread's elements of a stage whose tiles stay in registers."""
        held: dict[tuple[int, ...], int] = {}
        starts: set[tuple[frozenset[tuple[int, int]], ...]] = set()

        def keep(one: OpenStage) -> None:
            value, lane = self.values.result(one), one.frame.vector_axis
            terms, place = self.axes.placed([add_lins(self.axes.start(one, i), ({}, one.offsets[i]), 1) for i in range(one.frame.num_outs)])
            starts.add(terms)
            for k in range(one.chunk.active if lane >= 0 else 1):
                at = tuple([p + k * one.frame.vector_stride * (i == lane) for i, p in enumerate(place)])
                held[at] = value if self.b.num_lanes[value] == 1 else self.b.pure("EXTRACT", self.b.dtype[value], 1, (value,), k)
        self.emit(stage, body, keep)
        if len(starts) != 1:
            raise KernelOptError(f"the tiles of stage {stage.r.stage.name} do not start alike; its values do not stay in registers")
        self.ctx.keep(stage.index, -1, None, base, False, held=Held(starts.pop(), held))

    def copy_sink(self, s: int, area: tuple[str, int], layout: Layout, base: list[Lin]) -> Sink:
        """Return the sink that stores a staged value, position by position. `area`: (op, arg) of its pointer; `base`: the start of each
        dim."""
        op, arg = area
        if s in self.facts.packed:
            return lambda stage: self.packing.store(stage, op, arg, layout, base)
        pointer = self.b.pure(op, self.kernel.stages[s].dtype, 1, (), arg)
        return lambda stage: self.values.store_layout(stage, self.values.result(stage), pointer, layout, base)

    def _store(self, stage: OpenStage, sink: Sink) -> None:
        """Give each position of the register tile of a stage without reduction to the sink."""
        stage.memo.clear()
        for offsets, chunk in stage.frame.out_positions():
            if stage.set_position(offsets, chunk):
                sink(stage)

    def open_root(self, frame: Frame) -> OpenStage:
        """Open the stage of a phase: all its positions, or on a grid the positions of one thread."""
        s, base = frame.r.stage.index, [NOWHERE] * len(frame.pieces)
        if s in self.facts.derived:
            return OpenStage(frame, base)
        self.ctx.group = GroupThreads(self.b, self.state, group_of(self.state, self.facts.placement, s),
                                      stage_threads(self.state, self.facts.placement, s) if self.facts.on_grid else {})
        return self._open_rows(frame, self.facts.nest.stages[s], base[:frame.num_outs])

    def _open_rows(self, frame: Frame, nest: StageNest, base: list[Lin]) -> OpenStage:
        """Open a stage inside the open loops; in a group of threads, only this thread's part of it. `base`: the starts of its output
        axes."""
        starts: list[Lin] = base + [NOWHERE] * len(frame.r.stage.reds)
        stage = OpenStage(frame, self.ctx.group.starts_of(frame.r, nest.axes, starts))
        stage.of_group = list(zip(starts, frame.apart, strict=True))
        if self.facts.on_grid and stage.frame.vector_axis >= 0:
            stage.whole_vectors = self._has_whole_vectors(stage, nest)
        if self.facts.placement.paths[stage.index] == () or self.facts.space(stage.index) is MemorySpace.SHARED:
            stage.stores = self.ctx.group.stores(stage.index)
        return stage

    def _has_whole_vectors(self, stage: OpenStage, nest: StageNest) -> bool:
        """Whether every vector lies entirely inside its axis or entirely outside: vectors start at multiples of their width, and the
        width divides the extent."""
        a = stage.frame.vector_axis
        widths = {chunk.width for chunk in stage.frame.chunks()}
        strides = [p.stride for p in nest.axes[a] if p.row != stage.frame.vector_row and p.extent > 1]
        axis = self.kernel.axes[stage.r.axes[a]]
        whole = nest.region == stage.frame.bounds[:stage.frame.num_outs] and stage.frame.vector_stride == 1 and axis.bound is None
        (terms, const), _ = stage.of_group[a]
        apart = [axis.extent, const, *strides, *(c * self.b.multiple_of(v) for v, c in terms.items())]
        if a not in stage.frame.fixed:     # a last tile that is moved back ends at the end of the region
            apart.append(stage.frame.bounds[a])
        return whole and len(widths) == 1 and all(n % width == 0 for width in widths for n in apart)
