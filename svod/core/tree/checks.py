"""The positions of a state that are checked, and the axes of which no position may be computed twice.

    PADTO(o0, 8) of 13 positions        o0 is checked against 13
    y[i] += x[i], UPCAST(o0, 8)         the kernel reads what it writes: the last tile is not moved back; its positions are checked
    s0[i] read at i of a checked axis   the axis of s0 is checked as well
"""
from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from svod.core.kernel.groups import covered_extent, is_covered
from svod.core.kernel.kernel import ResolvedStage
from svod.core.kernel.layout import is_exact, layouts
from svod.core.kernel.placement import fit, is_derived, place_stages
from svod.core.kernel.scheduler import Derived, Scheduler


class Checks(NamedTuple):
    """The axes of a state whose positions need a check, or of which no position may be computed twice."""

    unsafe: Mapping[int, int]       # axis → the extent that its positions are checked against
    below: frozenset[int]           # axes of `unsafe` whose positions may also be negative, as they are read backwards
    fixed: frozenset[int]           # axes whose last tile must not be moved back

    def fixing(self, extents: Mapping[int, int]) -> Checks:
        """Add axes that must not compute any position twice, with their extents: positions beyond the extents are masked."""
        return Checks({**self.unsafe, **extents}, self.below, self.fixed.union(extents))


@Derived
def checks_of(state: Scheduler) -> Checks:
    """The checks of a state."""
    kernel = state.kernel
    if not (state.target.has_groups or any(state.pads) or kernel.written or any(a.bound is not None for a in kernel.axes)
            or layouts(state).packed):
        return Checks({}, frozenset(), frozenset())
    found = _Checker(state)
    return Checks(found.unsafe, frozenset(found.below), frozenset(found.fixed))


class _Checker:
    """Finds, stage by stage, the axes whose positions are checked against the axis' end, and those whose last tile is not moved back."""

    def __init__(self, state: Scheduler) -> None:
        self.state, self.kernel = state, state.kernel
        self.placement, self.layouts = place_stages(state), layouts(state)
        self.unsafe: dict[int, int] = {}
        self.below: set[int] = set()
        self.fixed: set[int] = set()
        for s in reversed(state.kernel.stages):         # readers come before the stages that they read
            if self.placement.paths[s.index] is None:
                continue
            r = self.placement.stage(s.index)
            if not is_derived(s):
                for axis in r.axes:
                    self._check_axis(r, axis)
            self._check_packed(r)
            self._check_reads(r)

    def _check_axis(self, r: ResolvedStage, axis: int) -> None:
        """Mark an axis as checked if it was padded, if its extent depends on variables, or if its last tile must not be moved back, as
        the kernel both reads and writes the positions that would be computed twice."""
        state, kernel, s = self.state, self.kernel, r.stage.index
        covered = is_covered(state, self.placement, s, axis)
        extent = covered_extent(state, axis) if covered else state.axis_extent(axis)
        is_root, reduces, varies = self.placement.paths[s] == (), axis in r.stage.reds, kernel.axes[axis].bound is not None
        if covered:
            self.fixed.add(axis)
            if extent > kernel.axes[axis].extent:
                self.unsafe[axis] = kernel.axes[axis].extent
        in_place = r.stage.is_output and bool(kernel.written)
        if in_place and not reduces and not is_exact(fit(state, state.axis_rows[axis], extent), extent):
            self.fixed.add(axis)
        if varies and not reduces and is_root:
            self.fixed.add(axis)    # the start of the last tile is known only at run time
        chosen = state.dots[s]
        padded = state.pads[axis] and not (chosen and chosen.axis == axis)
        if padded or (axis in self.fixed and not (covered and is_root)) or varies:
            self.unsafe[axis] = kernel.axes[axis].extent

    def _check_packed(self, r: ResolvedStage) -> None:
        """Mark the padded axes of a packed operand as checked: its last group or tile is not full."""
        packed = self.layouts.packed.get(r.stage.index)
        if packed is not None:
            for dim, axis in enumerate(r.stage.outs):
                extent = self.kernel.axes[axis].extent
                if packed.padded_to(dim) > extent:
                    self.unsafe[axis] = extent

    def _check_reads(self, r: ResolvedStage) -> None:
        """Mark an axis of a stage as checked if readers read it at positions of a checked axis."""
        for node in r.read_nodes if self.unsafe else ():
            for axis, lin in zip(self.kernel.stages[node.arg].outs, node.dims, strict=True):
                if any(r.axes[a] in self.unsafe for a, _ in lin.coefs):
                    self.unsafe[axis] = self.kernel.axes[axis].extent
                    if any(r.axes[a] in (self.below if c > 0 else self.unsafe) for a, c in lin.coefs):
                        self.below.add(axis)
