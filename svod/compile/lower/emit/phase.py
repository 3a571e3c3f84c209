"""The kinds of phases: the launch, and where the values go."""
from __future__ import annotations

from svod.compile.lower.emit.context import PhaseContext
from svod.compile.lower.emit.facts import ProgramFacts, Temporary
from svod.compile.lower.emit.launch import Emitted, LaunchEmitter
from svod.compile.lower.emit.stages import Stages
from svod.compile.lower.emit.state import NO_POINT, OpenStage, Sink, SplitReduction, StageLoop
from svod.compile.lower.emit.threads.groups import GroupThreads
from svod.core.ir.dtype import dtypes
from svod.core.kernel.copy_loops import copy_loops
from svod.core.kernel.groups import StageThreads, ThreadGroup, combining_threads
from svod.core.kernel.kernel import LinearIndex, Node, ReduceNode, ResolvedStage
from svod.core.kernel.layout import is_exact
from svod.core.kernel.non_temporal import aligns_rows, leaves_tail, stores_whole_vectors
from svod.core.kernel.placement import COPY_VECTOR, NO_ROW, EmittedLoop, vector_width
from svod.core.kernel.required import Lin
from svod.core.kernel.scheduler import LOOP, UNROLL


class Phase:
    """Emits one phase."""

    def __init__(self, facts: ProgramFacts):
        self.facts = facts
        self.state = facts.state
        self.kernel = facts.kernel
        self.ctx = PhaseContext(facts)
        self.b = self.ctx.b
        self.stages = Stages(self.ctx)
        self.values = self.stages.values
        self.launch = LaunchEmitter(self.ctx, self.stages)

    # -- kinds of phases -------------------------------------------------------------------------------

    def emit_output(self, r: ResolvedStage) -> Emitted:
        assert r.store is not None
        stage = self.stages.open_root(r)
        store, slot = r.store, r.store_slot
        pointer = self.b.pure("ARG", self.kernel.params[slot].dtype, 1, (), slot)
        vector = (self.state, r, stage.pieces, stage.vector_axis, stage.vector_row)
        self.stages.aligns = not self.facts.on_grid and aligns_rows(*vector)
        stream = self.state.stream and stores_whole_vectors(*vector)
        tail = stream and leaves_tail(*vector)
        return self.launch.emit(stage, self._store(pointer, store, stream), self.facts.threads, tail=tail)

    def _store(self, pointer: int, linear: LinearIndex, stream: bool) -> Sink:
        """Store the values to elements of an argument."""
        return lambda stage: self.values.store_linear(stage, self.values.result(stage), pointer, linear, stream)

    def emit_temp(self, r: ResolvedStage, temp: Temporary) -> Emitted:
        index, layout = temp
        stage = self.stages.open_root(r)
        once = self.facts.once(r.stage.index)
        threads = self.state.target.threads if once and not self.facts.on_grid else self.facts.threads
        sink = self.stages.copy_sink(r.stage.index, ("TEMP", index), layout, [({}, 0)] * len(layout.extents))
        return self.launch.emit(stage, sink, threads, once)

    def emit_partial(self, r: ResolvedStage, axis: int, chunk: int, count: int, temps: list[list[int]], flat: LinearIndex,
                     total: int) -> Emitted:
        stage = self.stages.open_root(r)
        self.ctx.split = SplitReduction(r.axes.index(axis), chunk, count)
        pointers = [[self.b.pure("TEMP", d, 1, (), t) for t, d in zip(group, red.dtypes, strict=True)]
                    for group, red in zip(temps, r.reductions, strict=True)]

        def sink(one: OpenStage) -> None:
            for k, group in enumerate(pointers):
                for c, pointer in enumerate(group):
                    self.values.store_linear(one, one.results[k, c], pointer, flat, False, extra={self.ctx.part: total})
        return self.launch.emit(stage, sink, self.facts.threads)

    def emit_combine(self, r: ResolvedStage, count: int, temps: list[list[int]], strides: list[int], total: int) -> Emitted:
        assert r.store is not None
        nodes = list(r.nodes)
        reductions = []
        part = len(r.stage.outs)
        flat = LinearIndex((*((i, s) for i, s in enumerate(strides)), (part, total)), 0, ())
        for red, group in zip(r.reductions, temps, strict=True):
            values = []
            for t, d in zip(group, red.dtypes, strict=True):
                nodes.append(Node("temp", "LOAD", d, (), t, tuple(range(part + 1)), linear=flat))
                values.append(len(nodes) - 1)
            reductions.append(ReduceNode(red.combiner, tuple(values), red.dtypes))
        combined = ResolvedStage(r.stage, (*r.stage.outs, -1), nodes, reductions, r.value, r.store, r.store_slot,
                                 r.reads, r.after_reduce, r.lanes_bytes)
        extents = [self.kernel.axes[a].extent for a in r.stage.outs]
        order = tuple(range(part))
        lane = next((i for i in reversed(order) if r.store.coef(i) == 1), part - 1)
        width = vector_width(self.state, r)
        dims = (*(i for i in order if i != lane), *((lane,) if lane >= 0 else ()))
        pieces = copy_loops(combined, extents, dims, width, exact=self.facts.on_grid).axes
        if self.kernel.written:     # nothing is computed twice in place
            for a, e, loops in zip(r.stage.outs, extents, pieces, strict=True):
                if not is_exact(loops, e):
                    self.facts.fixed.add(a)
                    self.facts.unsafe[a] = e
        threads = combining_threads(self.state.target, total // width, count) if self.facts.on_grid else 1
        self.ctx.group = GroupThreads(self.b, self.state, ThreadGroup(1, threads), {r.stage.index: StageThreads(1, threads, threads)})
        thread = self.ctx.group.thread
        pieces.append((EmittedLoop(NO_ROW, UNROLL if count <= 8 * threads else LOOP, count // threads, threads),))
        base: list[Lin] = [*[({}, 0)] * part, ({thread: 1}, 0) if threads > 1 else ({}, 0)]
        stage = OpenStage(combined, pieces, [*extents, count], base, lane, COPY_VECTOR, width)
        if threads > 1:
            stage.stores = self.b.alu("CMPEQ", dtypes.bool, 1, thread, self.b.index(0))
        stage.loops = [StageLoop(a, p[0], NO_POINT) for a, p in enumerate(pieces) if p[0].role == LOOP]
        store, slot = r.store, r.store_slot
        pointer = self.b.pure("ARG", self.kernel.params[slot].dtype, 1, (), slot)
        return self.launch.emit(stage, self._store(pointer, store, False), self.facts.threads if total >= 1 << 14 else 1)
