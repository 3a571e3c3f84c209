"""Required regions: the positions of a stage that its readers need."""
from __future__ import annotations

from svod.compile.lower.emit.axes import Axes
from svod.compile.lower.emit.context import PhaseContext
from svod.compile.lower.emit.state import Lin, RequiredDim, Terms, add_lins
from svod.core.kernel.kernel import ResolvedStage


class Regions:
    """The regions that readers need under the loops that are open."""

    def __init__(self, ctx: PhaseContext, axes: Axes):
        self.ctx = ctx
        self.facts = ctx.facts
        self.state = ctx.state
        self.kernel = ctx.kernel
        self.axes = axes

    def required(self, s: int, dim: int) -> RequiredDim:
        """The region that the readers of stage `s` need in a dim, under the loops opened so far."""
        full, unsafe = self.facts.positions(s, dim), self.facts.guarded(s, dim) and not self.is_read_inside(s, dim)
        start: Terms | None = None
        at = lo = hi = 0
        beyond = False      # the last iteration of a reduce loop, that variables end, covers more than there is
        for q in self.facts.placement.readers[s]:
            r = self.facts.placement.resolved[q]
            if r is None or self.facts.placement.paths[q] is None:
                continue
            for node in r.nodes:
                if node.kind != "read" or node.arg != s:
                    continue
                lin = node.dims[dim]
                if lin.atoms:
                    return RequiredDim(({}, 0), full, unsafe)
                base: Lin = ({}, lin.const)
                low = high = 0
                for a, c in lin.coefs:
                    beyond = beyond or (a >= len(r.stage.outs) and self.kernel.axes[r.axes[a]].bound is not None)
                    first, span = self.extent_of(q, a)
                    base = add_lins(base, first, c)
                    if c > 0:
                        high += c * (span - 1)
                    else:
                        low += c * (span - 1)
                terms, const = base
                if start is None:
                    start, at, lo, hi = terms, const, low, high
                elif start == terms:
                    lo, hi = min(lo, low + const - at), max(hi, high + const - at)
                else:
                    return RequiredDim(({}, 0), full, unsafe or beyond)
        assert start is not None
        extent = hi - lo + 1
        if not unsafe and extent >= full:
            return RequiredDim(({}, 0), full, beyond)
        return RequiredDim((start, at + lo), extent, beyond)

    def is_read_inside(self, s: int, dim: int) -> bool:
        """Whether the readers of stage `s` ask only for positions inside its dim."""
        if self.kernel.axes[self.kernel.stages[s].outs[dim]].bound is None:
            return False
        for q in self.facts.placement.readers[s]:
            r = self.facts.placement.resolved[q]
            if r is None or self.facts.placement.paths[q] is None:
                continue
            for node in r.nodes:
                if node.kind == "read" and node.arg == s:
                    lin = node.dims[dim]
                    if lin.atoms or not all(self.stays_inside(q, r, a) for a, _ in lin.coefs):
                        return False
        return True

    def stays_inside(self, q: int, r: ResolvedStage, a: int) -> bool:
        """Whether stage `q`, open or not, has only positions of local axis `a` that are inside."""
        if r.axes[a] not in self.facts.unsafe:
            return True
        stage = self.ctx.open_stages.get(q)
        if stage is not None:
            return a in stage.safe
        if a >= len(r.stage.outs) or self.facts.placement.paths[q] == ():
            return False
        return self.required(q, a).extent < self.facts.positions(q, a) and self.is_read_inside(q, a)

    def extent_of(self, q: int, a: int) -> tuple[Lin, int]:
        """(start, positions) of local axis `a` of stage `q`, open or not."""
        stage = self.ctx.open_stages.get(q)
        if stage is not None:
            span = stage.span(a)
            if stage.r.axes[a] not in self.facts.fixed:
                span = min(span, stage.bounds[a])
            return self.axes.start(stage, a), span
        r = self.facts.placement.resolved[q]
        assert r is not None
        if a < len(r.stage.outs):
            if self.facts.placement.paths[q] == ():
                return ({}, 0), self.state.axis_extent(r.axes[a])
            return self.required(q, a)[:2]
        extent = self.state.axis_extent(r.axes[a])
        return ({}, 0), extent
