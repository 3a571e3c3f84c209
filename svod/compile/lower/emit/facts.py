"""Facts about a state that all phases of a program share: where stages live and how they lie in memory, and which positions are checked."""
from __future__ import annotations

import sys
from typing import NamedTuple

from svod.core.ir.dtype import DType
from svod.core.kernel.group_memory.banks import with_row_pad
from svod.core.kernel.groups import check_groups, is_covered, spanned
from svod.core.kernel.kernel import ResolvedStage
from svod.core.kernel.layout import Layout, is_exact, lay_out, swizzled_lines
from svod.core.kernel.loop_nest import loop_nest
from svod.core.kernel.placement import fit, is_computed_once, is_derived
from svod.core.kernel.scheduler import Scheduler
from svod.core.machine.levels import OF_GROUP, MemorySpace
from svod.errors import ProgramTooLong

SLACK = 128                     # bytes behind each scratch area: a partial vector may be read past its end


class Temporary(NamedTuple):
    """Where a root stage lies for the phases behind it."""

    number: int                     # among the program's temporaries
    layout: Layout


class ProgramFacts:
    """Facts of a state, and what its phases share: the temporaries that they pass on, and the `most` instructions that they may have."""

    def __init__(self, state: Scheduler, most: int = sys.maxsize):
        check_groups(state)
        self.state = state
        self.left = most                        # instructions that the phases that are not emitted yet may have
        self.on_grid = state.target.has_groups      # a launch is a grid of groups of threads
        self.kernel = state.kernel
        self.nest = loop_nest(state)
        self.placement, self.layouts = self.nest.placement, self.nest.layouts
        self.dots, self.packed = self.layouts.dots, self.layouts.packed
        self.derived = {s.index for s in self.kernel.stages if is_derived(s)}
        self.temps: list[int] = []                          # bytes of each temporary
        self.temp_of: dict[int, Temporary] = {}    # root stage → its temporary
        self.unsafe: dict[int, int] = {}      # axis → extent that must be checked
        self.below: set[int] = set()          # those of them whose positions may also be negative: read backwards
        self.fixed: set[int] = set()          # axes whose last tile must not be moved back
        self.threads = 1 if self.on_grid else state.thread.cores if state.thread else state.split_reduce.parts if state.split_reduce else 1
        for s in reversed(range(len(self.kernel.stages))):      # readers before what they read
            r = self.placement.resolved[s]
            if r is None or self.placement.paths[s] is None:
                continue
            if s not in self.derived:
                for axis in r.axes:
                    self._check_axis(r, axis)
            self._check_packed(r)
            self._check_reads(r)

    # -- positions that must be checked -----------------------------------------------------------------
    def _check_axis(self, r: ResolvedStage, axis: int) -> None:
        """Check an axis of the state where it was padded, where variables end it, and where moving back its last tile would compute
        something twice that the kernel reads and writes."""
        state, kernel = self.state, self.kernel
        extent = self.spanned(r.stage.index, axis)
        reduces = axis in r.stage.reds
        varies = kernel.axes[axis].bound is not None
        covered = is_covered(state, self.placement, r.stage.index, axis)
        if covered:
            self.fixed.add(axis)
            if extent > kernel.axes[axis].extent:
                self.unsafe[axis] = kernel.axes[axis].extent
        in_place = r.stage.is_output and bool(kernel.written)
        if in_place and not reduces and not is_exact(fit(state, state.axis_rows[axis], extent), extent):
            self.fixed.add(axis)
        if varies and not reduces and self.placement.paths[r.stage.index] == ():
            self.fixed.add(axis)    # where the last tile ends is known when it runs
        chosen = state.dots[r.stage.index]
        padded = state.pads[axis] and not (chosen and chosen.axis == axis)
        if padded or (axis in self.fixed and not (covered and self.placement.paths[r.stage.index] == ())) or varies:
            self.unsafe[axis] = kernel.axes[axis].extent

    def _check_packed(self, r: ResolvedStage) -> None:
        """Check the axes of a packed operand that are padded: its last group or tile is not full."""
        packed = self.packed.get(r.stage.index)
        if packed is not None:
            for dim, axis in enumerate(r.stage.outs):
                extent = self.kernel.axes[axis].extent
                if packed.padded_to(dim) > extent:
                    self.unsafe[axis] = extent

    def _check_reads(self, r: ResolvedStage) -> None:
        """Check stages that are read at checked positions."""
        for node in r.nodes:
            if node.kind != "read":
                continue
            for axis, lin in zip(self.kernel.stages[node.arg].outs, node.dims, strict=True):
                if any(r.axes[a] in self.unsafe for a, _ in lin.coefs):
                    self.unsafe[axis] = self.kernel.axes[axis].extent
                    if any(r.axes[a] in (self.below if c > 0 else self.unsafe) for a, c in lin.coefs):
                        self.below.add(axis)

    def spanned(self, s: int, axis: int) -> int:
        """Positions of an axis of stage `s` that its loops span, padding included."""
        return spanned(self.state, self.placement, s, axis)

    def is_shared(self, s: int) -> bool:
        """Whether a stage is kept in the memory that the threads of a group share."""
        return self.nest.stages[s].space is MemorySpace.SHARED

    def is_held(self, s: int) -> bool:
        """Whether a stage stays in the registers of the threads that hold tiles of it."""
        return self.nest.stages[s].space is MemorySpace.HELD

    def is_of_group(self, s: int) -> bool:
        """Whether the threads of a group compute a stage together."""
        return self.nest.stages[s].space in OF_GROUP

    def shared_layout(self, s: int, extents: tuple[int, ...]) -> Layout:
        """How a region of a stage lies in shared memory."""
        layout = self.nest.stages[s].layout
        assert layout is not None
        if extents == layout.extents:
            return layout
        packed = self.packed.get(s)
        if layout.swizzle is not None and packed is not None and not packed.line:
            return swizzled_lines(self.layouts, s, extents) or self.layout(s, extents)
        return with_row_pad(self.layout(s, extents), layout.row_pad)

    def note_emitted(self, instructions: int) -> None:
        """Count the instructions of a phase. Raises ProgramTooLong where there are too many."""
        self.left -= instructions
        if self.left < 0:
            raise ProgramTooLong("it has more instructions than it may have")

    # -- stages and their memory --------------------------------------------------------------------------
    def once(self, s: int) -> bool:
        """Whether a root stage reads only constants of the plan."""
        return is_computed_once(self.state, self.placement, s)

    def new_temp(self, nbytes: int) -> int:
        """The number of a new temporary."""
        self.temps.append(nbytes)
        return len(self.temps) - 1

    def temp(self, r: ResolvedStage) -> Temporary:
        """A new temporary for a root stage."""
        s = r.stage.index
        layout = self.nest.stages[s].layout
        assert layout is not None
        temporary = Temporary(self.new_temp(self.area(s, layout)), layout)
        self.temp_of[s] = temporary
        return temporary

    def stored(self, s: int) -> DType:
        """The type in which a staged value lies in memory."""
        return self.packed[s].dtype if s in self.packed else self.kernel.stages[s].dtype

    def area(self, s: int, layout: Layout) -> int:
        """Bytes of a staged value, with room for reads beyond its end; of shared memory nobody reads beyond."""
        packed = self.packed.get(s)
        beyond = layout.strides[packed.row_dim] * (packed.rows - 1) if packed is not None and packed.row_dim >= 0 else 0
        return (layout.size + beyond) * self.stored(s).itemsize + (0 if self.is_shared(s) else SLACK)

    def positions(self, s: int, dim: int) -> int:
        """The readable positions of a dim of a staged value: whole groups for a dot instruction."""
        packed = self.packed.get(s)
        return (packed.padded_to(dim) if packed is not None else 0) or self.kernel.axes[self.kernel.stages[s].outs[dim]].extent

    def guarded(self, s: int, dim: int) -> bool:
        """Whether readers may ask for positions of a dim beyond the staged ones."""
        packed = self.packed.get(s)
        return (packed is None or not packed.padded_to(dim)) and self.kernel.stages[s].outs[dim] in self.unsafe

    def layout(self, s: int, extents: tuple[int, ...], tiled: bool = True) -> Layout:
        """How a region of stage `s` lies in memory. Readers take it from the emitted stage (`Staged`), as it may differ between regions."""
        return lay_out(self.state, self.layouts, s, extents, tiled and not self.on_grid)
