"""Barriers: all threads of a group wait for each other between accesses to shared memory of which one is a store.

    Loop r0                     Loop r0
      Compute s0                  Compute s0, a barrier before it stores: the iteration before may still read s0
      Compute s1                  Compute s1
      Loop r0.in          →       a barrier after the stages: both are stored
        Accumulate                Loop r0.in
                                    Accumulate

A store waits if other threads may still read or store the old content. In the loop of the last barrier they may if the area was accessed
since; outside of all loops, if it was stored to before; in any other loop, always. A read waits for stores since the last barrier. Stages
that are stored one after the other share their barriers. The pass follows the accesses of a phase in the order in which they run, so it is
the last one."""
from __future__ import annotations

from collections.abc import Hashable, Iterable, Iterator
from contextlib import contextmanager
from itertools import count

from svod.core.kernel.groups import StageThreads, exchanging_threads, group_of, stage_threads
from svod.core.kernel.placement import is_derived
from svod.core.machine.levels import MemorySpace
from svod.core.tree.build import TreeMaker
from svod.core.tree.nodes import (
    Barrier,
    Body,
    Compute,
    Fetch,
    Inner,
    Load,
    Loop,
    Phase,
    Pipeline,
    Reduction,
    Span,
    Split,
    Step,
    Update,
    with_bodies,
)
from svod.core.tree.tails import is_split

Areas = set[Hashable]       # areas of shared memory: stages, and the partial results of stages


def barriers(maker: TreeMaker, phases: tuple[Phase, ...]) -> tuple[Phase, ...]:
    """Put barriers between the accesses of threads to shared memory; phases come back unchanged if the target has no groups."""
    if not maker.state.target.has_groups:
        return phases
    return tuple([_with_barriers(maker, p) for p in phases])


def _with_barriers(maker: TreeMaker, phase: Phase) -> Phase:
    if phase.launch.frame.r.combines:
        threads = phase.launch.frame.pieces[-1][0].stride
        stages = {phase.stage: StageThreads(1, threads, threads)}
    else:
        threads = group_of(maker.state, maker.placement, phase.stage).threads
        stages = {s: own for s, own in stage_threads(maker.state, maker.placement, phase.stage).items() if s in maker.nest.stages}
    if all(own.reducers == 1 for own in stages.values()) and all(maker.nest.stages[s].space is not MemorySpace.SHARED for s in stages):
        return phase
    return phase._replace(launch=with_bodies(_Barriers(maker, phase.split, stages, threads).launched, phase.launch))


class _Barriers:
    """Follows the accesses of one phase, and puts barriers into its bodies. `stages`: for each of its stages, the threads that compute
    it."""

    def __init__(self, maker: TreeMaker, split: Split | None, stages: dict[int, StageThreads], threads: int) -> None:
        self.nests, self.target = maker.nest.stages, maker.state.target
        self.dots, self.split, self.stages = maker.layouts.dots, split, stages
        self.threads = threads                  # threads of the group
        self.numbers = count()
        self.here: tuple[int, ...] = ()         # numbers of the loops that are open
        self.launch: tuple[int, ...] = ()       # the loop over the iterations of the launch
        self.loops: tuple[int, ...] | None = None       # the loops around the last barrier; None: there was none yet
        self.touched: Areas = set()             # areas stored to so far
        self.stored: Areas = set()              # areas stored to since the last barrier
        self.read: Areas = set()                # areas read since the last barrier

    # -- accesses ---------------------------------------------------------------------------------------
    def barrier(self) -> None:
        """Record a barrier, at which all threads wait."""
        self.stored, self.read, self.loops = set(), set(), self.here

    def before_storing(self, areas: Areas) -> bool:
        """Decide whether stores to some areas need a barrier before them; if so, record the barrier."""
        since = self.read | self.stored if self.loops == self.here else self.touched
        waits = self.here not in (self.loops, self.launch) or not areas.isdisjoint(since)
        if waits:
            self.barrier()
        return waits

    def store(self, area: Hashable) -> None:
        self.stored.add(area)
        self.touched.add(area)

    def before_reading(self, areas: Areas) -> bool:
        """Decide whether reads of some areas need a barrier before them; if so, record the barrier."""
        waits = not areas.isdisjoint(self.stored)
        if waits:
            self.barrier()
        self.read |= areas
        return waits

    def shared(self, stages: Iterable[int]) -> Areas:
        """The areas of those stages that lie in shared memory."""
        return {s for s in stages if s in self.nests and self.nests[s].space is MemorySpace.SHARED}

    def read_by(self, stages: Iterable[int]) -> Areas:
        """The areas of shared memory that are read if elements of these stages are used. An operand in registers is loaded from the
        stages that it copies, so their areas count."""
        own = tuple(stages)
        known = [self.nests[s] for s in own if s in self.nests]
        inside = [nest.r.reads for nest in known if nest.space is MemorySpace.HELD and is_derived(nest.r.stage)]
        return self.shared(own).union(*[self.read_by(reads) for reads in inside])

    @contextmanager
    def looped(self, loops: int) -> Iterator[None]:
        """Enter `loops` loops for the length of a `with` block."""
        outer = self.here
        self.here = (*outer, *[next(self.numbers) for _ in range(loops)])
        yield
        self.here = outer

    # -- nodes ------------------------------------------------------------------------------------------
    def launched(self, body: Body) -> Body:
        """Put barriers into the body of a launch."""
        with self.looped(1):
            self.launch = self.here
            return self.body(body)

    def body(self, body: Body) -> Body:
        """Put barriers into the stages of a body, then into its loop or statement."""
        stages = tuple([self.compute(c) for c in body.stages])
        waits = self.before_reading(self.shared([c.stage for c in stages]))
        return body._replace(stages=stages, inner=self.inner(body.inner), barrier=waits)

    def compute(self, node: Compute) -> Compute:
        """Put barriers into the computation of a stage, and before it."""
        s, reads, body = node.stage, node.nest.r.reads, node.body
        if body is None:
            return node
        first = self.before_reading(self.shared(reads))
        before = tuple([self.compute(c) for c in node.before])
        waits = self.before_reading(self.shared([c.stage for c in before]))
        is_shared = node.nest.space is MemorySpace.SHARED
        if is_shared:
            waits = self.before_storing({s}) or waits
        body = self.body(body)
        if is_shared:
            self.store(s)
        return node._replace(before=before, body=body, barrier_first=first, barrier_to_store=waits)

    def inner(self, node: Inner) -> Inner:
        """Put barriers into a loop, a reduction or a statement."""
        if isinstance(node, Loop):
            return self.loop(node)
        if isinstance(node, Reduction):
            return self.reduction(node)
        if isinstance(node, Update):
            return node._replace(inner=self.inner(node.inner))
        self.read |= self.read_by(node.frame.r.reads)
        return node

    def reduction(self, node: Reduction) -> Reduction:
        """Put barriers into the loops of a reduction, then before threads exchange its partial results."""
        r, s = node.frame.r, node.frame.r.stage.index
        inner = self.inner(node.inner)
        wide = [j for j in node.in_memory if node.frame.loops[j].piece.extent > 1]      # loops over accumulators in memory
        with self.looped(len(wide)):
            own, through, waits = self.stages.get(s), False, False
            is_tile = not r.combines and s in self.dots and self.dots[s].dot.is_tile
            if own is not None and own.reducers > 1 and not is_tile:
                through = exchanging_threads(self.target, own, self.threads) != own.reducers
            if through:
                parts = ("parts", s)
                waits = self.before_storing({parts})
                self.store(parts)
                self.before_reading({parts})
            self.read |= self.read_by(r.after_reduce)
        return node._replace(inner=inner, through_memory=through, barrier=waits)

    def loop(self, node: Loop) -> Loop:
        """Put barriers into the whole iterations of a loop, then into its tails."""
        split, pipeline, body = is_split(self.split, node), node.pipeline, node.body
        is_sum = node.axis >= node.frame.num_outs
        with self.looped(len(node.blocks) if node.span is Span.ALL else 0):
            if pipeline is not None:
                pipeline, body = self.pipelined(node, pipeline)
            elif node.span is not Span.NEVER:
                with self.looped(node.span is not Span.ONCE):
                    body = self.body(body)
        with self.looped(is_sum and split):
            tails = tuple([t._replace(body=self.body(t.body)) for t in node.tails])
        return node._replace(body=body, tails=tails, pipeline=pipeline)

    # -- pipelined loops --------------------------------------------------------------------------------
    def pipelined(self, node: Loop, found: Pipeline) -> tuple[Pipeline, Body]:
        """Follow a pipelined loop; returns its steps, with their barriers, and its body."""
        prologue = self.steps(node, found, found.prologue)
        with self.looped(1):
            self.steps(node, found, found.body)
            body = self.body(node.body)
            self.steps(node, found, found.later)
        self.steps(node, found, found.epilogue)
        return found._replace(prologue=prologue), body

    def steps(self, node: Loop, found: Pipeline, steps: Iterable[Step]) -> tuple[Step, ...]:
        """Follow steps of a pipelined loop; returns them with their barriers."""
        return tuple([self.step(node, found, step) for step in steps])

    def step(self, node: Loop, found: Pipeline, step: Step) -> Step:
        """Follow one step. Only the first copies may need a barrier: later ones fill other buffers, or come after barriers of the loop."""
        if isinstance(step, Barrier):
            self.barrier()
        elif isinstance(step, Fetch):
            copies = [copy.compute for copy in found.copies]
            if not step.ahead:
                areas: Areas = {c.stage for c in copies}
                step = step._replace(barrier=self.before_storing(areas))
                self.touched |= areas
            self.read = self.read.union(*[self.read_by(c.nest.r.reads) for c in copies])
        elif isinstance(step, Load):
            self.read |= self.read_by(node.frame.r.reads)
        return step
