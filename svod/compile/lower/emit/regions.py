"""Required regions under the loops that are open, with their starts as values."""
from __future__ import annotations

from svod.compile.lower.emit.axes import Axes
from svod.compile.lower.emit.context import PhaseContext
from svod.core.kernel.kernel import ResolvedStage
from svod.core.kernel.required import RequiredDim, required_region


class Regions:
    """The regions that readers need under the loops that are open."""

    def __init__(self, ctx: PhaseContext, axes: Axes):
        self.ctx, self.facts, self.state, self.kernel = ctx, ctx.facts, ctx.state, ctx.kernel
        self.axes = axes

    def required(self, s: int, dim: int, of_group: bool = False) -> RequiredDim:
        """The region that the readers of stage `s` need in a dim, under the loops opened so far; `of_group`: in all threads."""
        full, region = self.facts.positions(s, dim), self._read_of(s, dim, of_group)
        packed = self.facts.packed.get(s)
        of_tiles = packed is not None and packed.is_held and dim == packed.row_dim     # they may begin anywhere, and end beyond the dim
        if region is None or (region.extent >= full and not of_tiles and not self.is_unsafe(s, dim)):
            return RequiredDim(({}, 0), full)
        return region

    def _read_of(self, s: int, dim: int, of_group: bool = False) -> RequiredDim | None:
        """What the readers of stage `s` ask for in a dim; None where that may be anything. Where the reads of one thread differ in more
        than a constant, those of all threads may not."""
        reads = list(self.facts.placement.reads_of(s))
        region = None if of_group else required_region(reads, dim, self.region_of)
        if region is None and (of_group or self.ctx.group.group.threads > 1):
            region = required_region(reads, dim, self.region_of_group)
        return region

    def is_read_beyond(self, s: int, dim: int) -> bool:
        """Whether readers of a required region may ask for positions outside it: it is the whole dim and they go beyond its end, or the
        last iteration of a reduce loop, that variables end, covers more than there is."""
        if any(a >= len(r.stage.outs) and self.kernel.axes[r.axes[a]].bound is not None
               for r, node in self.facts.placement.reads_of(s) for a, _ in node.dims[dim].coefs):
            return True
        return self.is_unsafe(s, dim) and self._read_of(s, dim) is None

    def is_unsafe(self, s: int, dim: int) -> bool:
        """Whether the readers of stage `s` may ask for positions outside its dim."""
        return self.facts.guarded(s, dim) and not self.is_read_inside(s, dim)

    def is_read_inside(self, s: int, dim: int) -> bool:
        """Whether the readers of stage `s` ask only for positions inside its dim, which variables end."""
        if self.kernel.axes[self.kernel.stages[s].outs[dim]].bound is None:
            return False
        return all(not lin.atoms and all(self.stays_inside(r, a) for a, _ in lin.coefs)
                   for r, node in self.facts.placement.reads_of(s) for lin in (node.dims[dim],))

    def stays_inside(self, r: ResolvedStage, a: int) -> bool:
        """Whether a stage, open or not, has only positions of local axis `a` that are inside."""
        if r.axes[a] not in self.facts.unsafe:
            return True
        q = r.stage.index
        stage = self.ctx.open_stages.get(q)
        if stage is not None:
            return a in stage.safe
        return a < len(r.stage.outs) and self.required(q, a).extent < self.facts.positions(q, a) and self.is_read_inside(q, a)

    def region_of(self, r: ResolvedStage, a: int) -> RequiredDim:
        """The positions of local axis `a` of a stage, open or not, under the loops opened so far."""
        stage = self.ctx.open_stages.get(r.stage.index)
        if stage is not None:
            span = stage.span(a)
            if a not in stage.frame.fixed:
                span = min(span, stage.bounds[a])
            return RequiredDim(self.axes.start(stage, a), span)
        if a < len(r.stage.outs):
            return self.computed(r.stage.index, a, False)
        return RequiredDim(({}, 0), self.facts.spanned(r.stage.index, r.axes[a]))

    def computed(self, s: int, dim: int, of_group: bool) -> RequiredDim:
        """The region that will be computed of a stage that is not open: the required one, and what threads compute beyond it."""
        start, extent = self.required(s, dim, of_group or self.facts.is_of_group(s))
        return RequiredDim(start, self.facts.nest.stages[s].reached(self.state, dim, extent))

    def region_of_group(self, r: ResolvedStage, a: int) -> RequiredDim:
        """`region_of` in all threads of the group together."""
        stage = self.ctx.open_stages.get(r.stage.index)
        if stage is not None:
            _, span = self.region_of(r, a)
            return RequiredDim(self.axes.group_start(stage, a), span + stage.apart[a])
        return self.computed(r.stage.index, a, True) if a < len(r.stage.outs) else self.region_of(r, a)
