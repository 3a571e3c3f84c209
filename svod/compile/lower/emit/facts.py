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
    """The memory of a stage that is computed in a phase of its own, and read in later phases."""

    number: int                     # number among the program's temporaries
    layout: Layout


class ProgramFacts:
    """Facts of a state, and the temporaries and the budget of instructions that its phases share. `most`: maximum number of instructions
    of all phases together."""

    def __init__(self, state: Scheduler, most: int = sys.maxsize):
        check_groups(state)
        self.state = state
        self.left = most                        # number of instructions that the phases not yet emitted may have
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
        """Return the memory space that holds a stage's value."""
        return self.nest.stages[s].space

    def note_emitted(self, instructions: int) -> None:
        """Count the instructions of a phase. Raises ProgramTooLong if all phases together have too many."""
        self.left -= instructions
        if self.left < 0:
            raise ProgramTooLong("it has more instructions than it may have")

    # -- stages and their memory --------------------------------------------------------------------------
    def new_temp(self, nbytes: int) -> int:
        """Add a temporary of `nbytes` bytes; returns its number."""
        self.temps.append(nbytes)
        return len(self.temps) - 1

    def temp(self, r: ResolvedStage) -> Temporary:
        """Add a temporary for a stage that is computed in a phase of its own."""
        s = r.stage.index
        layout = self.nest.stages[s].layout
        assert layout is not None
        temporary = Temporary(self.new_temp(self.area(s, layout)), layout)
        self.temp_of[s] = temporary
        return temporary

    def stored(self, s: int) -> DType:
        """Return the dtype that a staged value has in memory."""
        return self.packed[s].dtype if s in self.packed else self.kernel.stages[s].dtype

    def area(self, s: int, layout: Layout) -> int:
        """Return the bytes that a staged value takes, with room for reads beyond its end; shared memory needs no such room."""
        packed = self.packed.get(s)
        beyond = layout.strides[packed.row_dim] * (packed.rows - 1) if packed is not None and packed.row_dim >= 0 else 0
        return (layout.size + beyond) * self.stored(s).itemsize + (0 if self.space(s) is MemorySpace.SHARED else SLACK)

    def guarded(self, s: int, dim: int) -> bool:
        """Whether readers may request positions beyond the stored ones along a dim, so that they have to load under a gate."""
        packed = self.packed.get(s)
        return (packed is None or not packed.padded_to(dim)) and self.kernel.stages[s].outs[dim] in self.unsafe
