"""Facts about a state that all phases of a program share: placement and memory layout of stages, and positions that need checks."""
from __future__ import annotations

import sys
from typing import NamedTuple

from svod.core.ir.dtype import DType
from svod.core.kernel.groups import check_groups
from svod.core.kernel.kernel import ResolvedStage
from svod.core.kernel.layout import Layout
from svod.core.kernel.placement import is_derived
from svod.core.kernel.scheduler import Scheduler, cores_of
from svod.core.machine.levels import MemorySpace
from svod.core.tree.build import TreeMaker
from svod.core.tree.passes import loop_tree
from svod.errors import ProgramTooLong

SLACK = 128                     # bytes after each scratch area, as a partial vector may be read past its end


class Temporary(NamedTuple):
    """The memory of a stage that is a phase, for the phases after it."""

    number: int                     # number among the program's temporaries
    layout: Layout


class ProgramFacts:
    """Facts of a state, and the temporaries and the budget of instructions that its phases share. `most`: instructions that they may have
    together."""

    def __init__(self, state: Scheduler, most: int = sys.maxsize):
        check_groups(state)
        self.state = state
        self.left = most                        # instructions that phases not yet emitted may have
        self.on_grid = state.target.has_groups      # a launch is a grid of groups of threads
        self.kernel = state.kernel
        self.maker = maker = TreeMaker(state)
        self.nest = maker.nest
        self.placement, self.layouts = self.nest.placement, self.nest.layouts
        self.dots, self.packed = self.layouts.dots, self.layouts.packed
        self.derived = {s.index for s in self.kernel.stages if is_derived(s)}
        self.temps: list[int] = []                          # bytes of each temporary
        self.temp_of: dict[int, Temporary] = {}    # root stage → its temporary
        self.parts: dict[tuple[int, int], int] = {}     # (reduction, component) → temporary with the output's partial results
        self.unsafe = maker.checks.unsafe
        self.threads = 1 if self.on_grid else cores_of(state)
        self.tree = loop_tree(state)

    def space(self, s: int) -> MemorySpace:
        """The memory that a stage is kept in."""
        return self.nest.stages[s].space

    def note_emitted(self, instructions: int) -> None:
        """Count the instructions of a phase. Raises ProgramTooLong if all phases together have too many."""
        self.left -= instructions
        if self.left < 0:
            raise ProgramTooLong("it has more instructions than it may have")

    # -- stages and their memory --------------------------------------------------------------------------
    def new_temp(self, nbytes: int) -> int:
        """The number of a new temporary."""
        self.temps.append(nbytes)
        return len(self.temps) - 1

    def temp(self, r: ResolvedStage) -> Temporary:
        """Take a new temporary for a stage that is a phase."""
        s = r.stage.index
        layout = self.nest.stages[s].layout
        assert layout is not None
        temporary = Temporary(self.new_temp(self.area(s, layout)), layout)
        self.temp_of[s] = temporary
        return temporary

    def stored(self, s: int) -> DType:
        """The dtype of a staged value in memory."""
        return self.packed[s].dtype if s in self.packed else self.kernel.stages[s].dtype

    def area(self, s: int, layout: Layout) -> int:
        """Bytes of a staged value, with room for reads beyond its end; shared memory needs no such room."""
        packed = self.packed.get(s)
        beyond = layout.strides[packed.row_dim] * (packed.rows - 1) if packed is not None and packed.row_dim >= 0 else 0
        return (layout.size + beyond) * self.stored(s).itemsize + (0 if self.space(s) is MemorySpace.SHARED else SLACK)

    def guarded(self, s: int, dim: int) -> bool:
        """Whether readers may ask for positions of a dim beyond the staged ones, so that they have to load under a gate."""
        packed = self.packed.get(s)
        return (packed is None or not packed.padded_to(dim)) and self.kernel.stages[s].outs[dim] in self.unsafe
