"""The state that the emitters of one phase share: facts of the program, the builder, open stages, and scratch memory."""
from __future__ import annotations

from collections.abc import Sequence

from svod.compile.lower.builder import Builder
from svod.compile.lower.emit.facts import ProgramFacts
from svod.compile.lower.emit.state import Held, OpenStage, Staged
from svod.compile.lower.emit.threads.groups import GroupThreads
from svod.core.kernel.groups import ThreadGroup
from svod.core.kernel.layout import Layout
from svod.core.kernel.required import Lin
from svod.core.tree.nodes import Split

ALIGN = 64      # bytes: scratch areas begin at multiples of this


class PhaseContext:
    """The state of one phase while its instructions are emitted."""

    def __init__(self, facts: ProgramFacts):
        self.facts = facts
        self.state = facts.state
        self.kernel = facts.kernel
        self.b = Builder(facts.left)
        self.scratch = 0                                # bytes of scratch taken so far
        self.areas: dict[int, tuple[int, int]] = {}     # stage → (offset, bytes) of its scratch
        self.staged: dict[int, Staged] = {}             # stage → its value in the form that its readers use
        self.versions = 0                               # counts how often scratch areas were filled
        self.open_stages: dict[int, OpenStage] = {}     # stages whose loops are open
        self.split: Split | None = None        # the split reduction, if the phase computes its partial results; otherwise None
        self.group = GroupThreads(self.b, self.state, ThreadGroup(1, 1), {})
        # index value: the number of the part that an iteration of the launch computes; -1 without parts
        self.part = -1

    def allocate(self, nbytes: int) -> int:
        """Take a new scratch area of `nbytes` bytes; returns its offset."""
        offset = self.scratch
        self.scratch += -(-nbytes // ALIGN) * ALIGN
        return offset

    def staged_value(self, s: int) -> Staged:
        staged = self.staged.get(s)
        if staged is None:
            index, layout = self.facts.temp_of[s]
            pointer = self.b.pure("TEMP", self.facts.stored(s), 1, (), index)
            guarded = any(self.facts.guarded(s, i) for i in range(len(layout.extents)))
            staged = self.staged[s] = Staged(-1, pointer, layout, (({}, 0),) * len(layout.extents), 0, 0, guarded)
        return staged

    def keep(self, s: int, pointer: int, layout: Layout | None, base: Sequence[Lin], guarded: bool, buffer: int = -1,
             held: Held | None = None) -> None:
        """Record where readers find a stage's value from here on; the arguments are fields of `Staged`."""
        self.versions += 1
        self.staged[s] = Staged(-1, pointer, layout, tuple(base), self.b.level, self.versions, guarded, buffer, held)

    def forget_values(self) -> None:
        """Drop cached values that the loop just closed may have defined."""
        for stage in self.open_stages.values():
            stage.memo.clear()
            stage.linear.clear()

    def stage_area(self, s: int, nbytes: int) -> int:
        """Return the offset of a stage's scratch area of at least `nbytes` bytes; a larger one replaces an area that is too small."""
        offset, size = self.areas.get(s, (0, -1))
        if size >= nbytes:
            return offset
        offset = self.allocate(nbytes)
        self.areas[s] = (offset, nbytes)
        return offset
