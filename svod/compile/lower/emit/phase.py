"""Emits the phases of a program. A phase's kind decides which memory its values are stored to."""
from __future__ import annotations

from svod.compile.lower.emit.context import PhaseContext
from svod.compile.lower.emit.facts import SLACK, ProgramFacts
from svod.compile.lower.emit.launch import Emitted, LaunchEmitter
from svod.compile.lower.emit.stages import NOWHERE, Stages
from svod.compile.lower.emit.state import OpenStage, Sink
from svod.compile.lower.emit.threads.groups import GroupThreads
from svod.core.ir.dtype import dtypes
from svod.core.kernel.groups import StageThreads, ThreadGroup
from svod.core.kernel.kernel import LinearIndex, ResolvedStage
from svod.core.tree.combine import index_of_parts
from svod.core.tree.launch import cores_of_phase
from svod.core.tree.nodes import Phase, PhaseKind


class PhaseEmitter:
    """Emits the instructions of one phase, which is one launch of the program."""

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
        """Emit the phase; returns its launch and its code."""
        return _EMIT[self.phase.kind](self, self.facts.placement.stage(self.phase.stage))

    # -- kinds of phases -------------------------------------------------------------------------------

    def emit_output(self, r: ResolvedStage) -> Emitted:
        stage = self.stages.open_root(self.phase.launch.frame)
        return self._emit(stage, self._store(r, self.phase.launch.is_non_temporal))

    def _store(self, r: ResolvedStage, stream: bool) -> Sink:
        """Return a sink that stores the output's values to elements of an argument."""
        store, slot = r.store, r.store_slot
        assert store is not None
        pointer = self.b.pure("ARG", self.kernel.params[slot].dtype, 1, (), slot)
        return lambda stage: self.values.store_linear(stage, self.values.result(stage), pointer, store, stream)

    def emit_temp(self, r: ResolvedStage) -> Emitted:
        index, layout = self.facts.temp(r)
        stage = self.stages.open_root(self.phase.launch.frame)
        return self._emit(stage, self.stages.copy_sink(r.stage.index, ("TEMP", index), layout, [NOWHERE] * len(layout.extents)))

    def emit_partial(self, r: ResolvedStage) -> Emitted:
        split, facts = self.phase.split, self.facts
        assert split is not None, "partial results are of a split reduction"
        *coefs, (_, total) = index_of_parts([self.kernel.axes[a].extent for a in r.stage.outs]).coefs
        components = {(k, c): d for k, red in enumerate(r.reductions) for c, d in enumerate(red.dtypes)}
        facts.parts = {of: facts.new_temp(total * split.parts * d.itemsize + SLACK) for of, d in components.items()}
        stage = self.stages.open_root(self.phase.launch.frame)
        self.ctx.split = split
        pointers = {of: self.b.pure("TEMP", d, 1, (), facts.parts[of]) for of, d in components.items()}
        flat = LinearIndex(tuple(coefs), 0, ())

        def sink(one: OpenStage) -> None:
            for of, pointer in pointers.items():
                self.values.store_linear(one, one.results[of], pointer, flat, False, extra={self.ctx.part: total})
        return self._emit(stage, sink)

    def emit_combine(self, r: ResolvedStage) -> Emitted:
        frame = self.phase.launch.frame
        threads = frame.pieces[-1][0].stride
        self.ctx.group = GroupThreads(self.b, self.state, ThreadGroup(1, threads), {r.stage.index: StageThreads(1, threads, threads)})
        thread = self.ctx.group.thread
        stage = OpenStage(frame, [*[NOWHERE] * frame.num_outs, ({thread: 1}, 0) if threads > 1 else NOWHERE])
        if threads > 1:
            stage.stores = self.b.alu("CMPEQ", dtypes.bool, 1, thread, self.b.index(0))
        return self._emit(stage, self._store(r, False))

    def _emit(self, stage: OpenStage, sink: Sink) -> Emitted:
        return self.launch.emit(stage, self.phase.launch, sink, cores_of_phase(self.facts.maker, self.phase), self.phase.is_once)


_EMIT = {PhaseKind.OUTPUT: PhaseEmitter.emit_output, PhaseKind.TEMPORARY: PhaseEmitter.emit_temp,
         PhaseKind.PARTIAL: PhaseEmitter.emit_partial, PhaseKind.COMBINE: PhaseEmitter.emit_combine}
