"""The kinds of phases: the launch, and where the values go."""
from __future__ import annotations

from svod.compile.lower.emit.context import PhaseContext
from svod.compile.lower.emit.facts import PartialResults, ProgramFacts
from svod.compile.lower.emit.launch import Emitted, LaunchEmitter
from svod.compile.lower.emit.stages import NOWHERE, Stages
from svod.compile.lower.emit.state import OpenStage, Sink
from svod.compile.lower.emit.threads.groups import GroupThreads
from svod.core.ir.dtype import dtypes
from svod.core.kernel.copy_loops import copy_loops
from svod.core.kernel.groups import StageThreads, ThreadGroup, combining_threads
from svod.core.kernel.kernel import LinearIndex, Node, ReduceNode, ResolvedStage
from svod.core.kernel.layout import is_exact
from svod.core.kernel.non_temporal import stores_whole_vectors
from svod.core.kernel.placement import COPY_VECTOR, NO_ROW, EmittedLoop, vector_width
from svod.core.kernel.scheduler import LOOP, UNROLL
from svod.core.tree.launch import cores_of_phase
from svod.core.tree.nodes import NO_POINT, Launch, Phase, PhaseKind, StageLoop
from svod.core.tree.passes import apply_passes


class PhaseEmitter:
    """Emits one phase."""

    def __init__(self, facts: ProgramFacts, phase: Phase):
        self.facts, self.phase = facts, phase
        self.state = facts.state
        self.kernel = facts.kernel
        self.ctx = PhaseContext(facts)
        self.b = self.ctx.b
        self.stages = Stages(self.ctx)
        self.values = self.stages.values
        self.launch = LaunchEmitter(self.ctx, self.stages)

    def emit(self) -> Emitted:
        """The launch of the phase, and its code."""
        return _EMIT[self.phase.kind](self, self.facts.placement.stage(self.phase.stage))

    # -- kinds of phases -------------------------------------------------------------------------------

    def emit_output(self, r: ResolvedStage) -> Emitted:
        frame = self._launch.frame
        stream = self.state.stream and stores_whole_vectors(self.state, r, frame.pieces, frame.vector_axis, frame.vector_row)
        stage = self.stages.open_root(frame)
        return self._emit(stage, self._store(r, stream))

    def _store(self, r: ResolvedStage, stream: bool) -> Sink:
        """Store the values of the output to elements of an argument."""
        store, slot = r.store, r.store_slot
        assert store is not None
        pointer = self.b.pure("ARG", self.kernel.params[slot].dtype, 1, (), slot)
        return lambda stage: self.values.store_linear(stage, self.values.result(stage), pointer, store, stream)

    def emit_temp(self, r: ResolvedStage) -> Emitted:
        index, layout = self.facts.temp(r)
        stage = self.stages.open_root(self._launch.frame)
        return self._emit(stage, self.stages.copy_sink(r.stage.index, ("TEMP", index), layout, [NOWHERE] * len(layout.extents)))

    def emit_partial(self, r: ResolvedStage) -> Emitted:
        split = self.phase.split
        assert split is not None, "partial results are of a split reduction"
        parts = self.facts.partial_results(r, split.parts)
        stage = self.stages.open_root(self._launch.frame)
        self.ctx.split = split
        pointers = [[self.b.pure("TEMP", d, 1, (), t) for t, d in zip(group, red.dtypes, strict=True)]
                    for group, red in zip(parts.temps, r.reductions, strict=True)]
        flat = LinearIndex(tuple(enumerate(parts.strides)), 0, ())

        def sink(one: OpenStage) -> None:
            for k, group in enumerate(pointers):
                for c, pointer in enumerate(group):
                    self.values.store_linear(one, one.results[k, c], pointer, flat, False, extra={self.ctx.part: parts.total})
        return self._emit(stage, sink)

    def emit_combine(self, r: ResolvedStage) -> Emitted:
        parts = self.facts.parts_of[r.stage.index]
        combined, count, total = self._combined(r, parts), parts.num_parts, parts.total
        extents = [self.kernel.axes[a].extent for a in r.stage.outs]
        part = len(extents)
        assert r.store is not None
        lane = next((i for i in reversed(range(part)) if r.store.coef(i) == 1), part - 1)
        width = vector_width(self.state, r)
        dims = (*(i for i in range(part) if i != lane), *((lane,) if lane >= 0 else ()))
        pieces = copy_loops(combined, extents, dims, width, exact=self.facts.on_grid).axes
        if self.kernel.written:     # nothing is computed twice in place
            for a, e, own in zip(r.stage.outs, extents, pieces, strict=True):
                if not is_exact(own, e):
                    self.facts.maker.checks.fix(a, e)
        threads = combining_threads(self.state.target, total // width, count) if self.facts.on_grid else 1
        self.ctx.group = GroupThreads(self.b, self.state, ThreadGroup(1, threads), {r.stage.index: StageThreads(1, threads, threads)})
        thread = self.ctx.group.thread
        pieces.append((EmittedLoop(NO_ROW, UNROLL if count <= 8 * threads else LOOP, count // threads, threads),))
        loops = tuple([StageLoop(a, p[0], NO_POINT) for a, p in enumerate(pieces) if p[0].role == LOOP])
        maker = self.facts.maker
        frame = maker.make_frame(combined, tuple(pieces), (*extents, count), (0,) * len(pieces), lane, COPY_VECTOR, width, loops)
        self.phase, = apply_passes(maker, (self.phase._replace(launch=Launch(frame, 0, maker.loops_alone(frame))),))
        stage = OpenStage(frame, [*[NOWHERE] * part, ({thread: 1}, 0) if threads > 1 else NOWHERE])
        if threads > 1:
            stage.stores = self.b.alu("CMPEQ", dtypes.bool, 1, thread, self.b.index(0))
        return self._emit(stage, self._store(r, False))

    def _combined(self, r: ResolvedStage, parts: PartialResults) -> ResolvedStage:
        """The stage as a reduction of its partial results, over one more axis."""
        nodes = list(r.nodes)
        reductions = []
        part = len(r.stage.outs)
        flat = LinearIndex((*((i, s) for i, s in enumerate(parts.strides)), (part, parts.total)), 0, ())
        for red, group in zip(r.reductions, parts.temps, strict=True):
            values = []
            for t, d in zip(group, red.dtypes, strict=True):
                nodes.append(Node("temp", "LOAD", d, (), t, tuple(range(part + 1)), linear=flat))
                values.append(len(nodes) - 1)
            reductions.append(ReduceNode(red.combiner, tuple(values), red.dtypes))
        return ResolvedStage(r.stage, (*r.stage.outs, -1), nodes, reductions, r.value, r.store, r.store_slot, r.reads, r.after_reduce,
                             r.lanes_bytes)

    @property
    def _launch(self) -> Launch:
        assert self.phase.launch is not None, "the loops of the phase are known"
        return self.phase.launch

    def _emit(self, stage: OpenStage, sink: Sink) -> Emitted:
        return self.launch.emit(stage, self._launch, sink, cores_of_phase(self.facts.maker, self.phase), self.phase.is_once)


_EMIT = {PhaseKind.OUTPUT: PhaseEmitter.emit_output, PhaseKind.TEMPORARY: PhaseEmitter.emit_temp,
         PhaseKind.PARTIAL: PhaseEmitter.emit_partial, PhaseKind.COMBINE: PhaseEmitter.emit_combine}
