"""What the objects that emit one phase share: the facts of the program, the builder, the stages that are open, scratch memory."""
from __future__ import annotations

from svod.compile.lower.builder import Builder
from svod.compile.lower.emit.facts import ProgramFacts
from svod.compile.lower.emit.state import OpenStage, Staged
from svod.compile.lower.emit.threads.groups import GroupThreads
from svod.core.kernel.groups import ThreadGroup
from svod.core.tree.nodes import Split

ALIGN = 64      # bytes at multiples of which scratch areas stand


class PhaseContext:
    """One phase while it is emitted."""

    def __init__(self, facts: ProgramFacts):
        self.facts = facts
        self.state = facts.state
        self.kernel = facts.kernel
        self.b = Builder(facts.left)
        self.scratch = 0                                # bytes taken so far
        self.areas: dict[int, tuple[int, int]] = {}     # stage → (offset, bytes) of its scratch
        self.staged: dict[int, Staged] = {}             # the values of stages that can be read
        self.versions = 0                               # contents that scratch areas had so far
        self.open_stages: dict[int, OpenStage] = {}     # stages whose loops are open
        self.split: Split | None = None        # the reduction that the phase computes parts of
        self.group = GroupThreads(self.b, self.state, ThreadGroup(1, 1), {})
        self.part = -1                                  # number of the part: the index of the launch

    def allocate(self, nbytes: int) -> int:
        """The offset of a new scratch area."""
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

    def forget_values(self) -> None:
        """Forget the values of a loop that was closed."""
        for stage in self.open_stages.values():
            stage.memo.clear()
            stage.linear.clear()

    def stage_area(self, s: int, nbytes: int) -> int:
        """Scratch of a stage: one area, grown when a longer part of the stage needs more."""
        offset, size = self.areas.get(s, (0, -1))
        if size >= nbytes:
            return offset
        offset = self.allocate(nbytes)
        self.areas[s] = (offset, nbytes)
        return offset
