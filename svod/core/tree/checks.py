"""The positions of a state that are checked, and the axes of which no position may be computed twice.

    PADTO(o0, 8) of 13 positions        o0 is checked against 13
    y[i] += x[i], UPCAST(o0, 8)         the kernel reads what it writes: the last tile is not moved back, and checked
    s0[i] read at i of a checked axis   the axis of s0 is checked as well
"""
from __future__ import annotations

from svod.core.kernel.groups import is_covered, spanned
from svod.core.kernel.kernel import ResolvedStage
from svod.core.kernel.layout import Layouts, is_exact, layouts
from svod.core.kernel.placement import Placement, fit, is_derived, place_stages
from svod.core.kernel.scheduler import Scheduler


class Checks:
    """What is checked of a state."""

    def __init__(self, state: Scheduler) -> None:
        self.state, self.kernel = state, state.kernel
        self.placement: Placement = place_stages(state)
        self.layouts: Layouts = layouts(state)
        self.unsafe: dict[int, int] = {}        # axis → the extent that its positions are checked against
        self.below: set[int] = set()            # those of them whose positions may also be negative: read backwards
        self.fixed: set[int] = set()            # axes whose last tile must not be moved back
        for s in reversed(state.kernel.stages):         # readers before what they read
            if self.placement.paths[s.index] is None:
                continue
            r = self.placement.stage(s.index)
            if not is_derived(s):
                for axis in r.axes:
                    self._check_axis(r, axis)
            self._check_packed(r)
            self._check_reads(r)

    def fix(self, axis: int, extent: int) -> None:
        """Let no position of an axis be computed twice; those beyond its extent are masked."""
        self.fixed.add(axis)
        self.unsafe[axis] = extent

    def _check_axis(self, r: ResolvedStage, axis: int) -> None:
        """Check an axis of the state where it was padded, where variables end it, and where moving back its last tile would compute
        something twice that the kernel reads and writes."""
        state, kernel, s = self.state, self.kernel, r.stage.index
        extent = spanned(state, self.placement, s, axis)
        is_root, reduces, varies = self.placement.paths[s] == (), axis in r.stage.reds, kernel.axes[axis].bound is not None
        covered = is_covered(state, self.placement, s, axis)
        if covered:
            self.fixed.add(axis)
            if extent > kernel.axes[axis].extent:
                self.unsafe[axis] = kernel.axes[axis].extent
        in_place = r.stage.is_output and bool(kernel.written)
        if in_place and not reduces and not is_exact(fit(state, state.axis_rows[axis], extent), extent):
            self.fixed.add(axis)
        if varies and not reduces and is_root:
            self.fixed.add(axis)    # where the last tile ends is known when it runs
        chosen = state.dots[s]
        padded = state.pads[axis] and not (chosen and chosen.axis == axis)
        if padded or (axis in self.fixed and not (covered and is_root)) or varies:
            self.unsafe[axis] = kernel.axes[axis].extent

    def _check_packed(self, r: ResolvedStage) -> None:
        """Check the axes of a packed operand that are padded: its last group or tile is not full."""
        packed = self.layouts.packed.get(r.stage.index)
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
