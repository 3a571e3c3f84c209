"""Lowering: a Scheduler state becomes a Program of phases in LINEAR, emitted directly.

There is no expanded graph that is simplified back. Each stage's loops are opened in the state's order; UPCAST and UNROLL
positions are expanded while emitting, a value per distinct position of the axes it depends on; every address is (pointer, index at
its loop level, constant).

Example, `UPCAST(o0, 16)` on y[i] = x[i] + 1 over 100 positions becomes

    LOOP b in begin…end (7 iterations)        # ceil(100/16)
      i = MIN(b*16, 84)                       # the last tile is moved back, no mask
      STORE y[i:i+16] = LOAD x[i:i+16] + 1

Extents that an amount does not divide: an output axis moves its last tile back (recomputing a few positions) where tiles are
contiguous and the kernel does not read what it writes, else positions are guarded; a reduce axis runs its remainder as a second,
shorter copy of the body.

Extents that depend on variables: loops end where the variables say. Where an iteration covers several positions the body is there twice,
for iterations that are wholly inside, and, for what those leave, in smaller steps (`Values._tail_parts`): single rows, vectors under a
mask, half tiles of accumulators. A last tile of rows is moved back where there are rows enough for a whole one.

    UPCAST(o0, 64), n positions   →   LOOP i in 0…n-63 step 64: STORE y[i:i+64];   LOOP i in …n step 16: STORE y[i:i+16] if i+lane < n
"""
from __future__ import annotations

from svod.compile.lower.emit_phase import Emitted, Phase
from svod.compile.lower.emit_state import SLACK
from svod.compile.lower.program import Instr, PhaseSpec, Program, derive_spec
from svod.core.ir.dtype import DType
from svod.core.kernel.groups import check_groups, covered_extent, is_covered
from svod.core.kernel.kernel import Linear, ResolvedStage
from svod.core.kernel.layout import Layout, is_exact, lay_out, layouts
from svod.core.kernel.placement import Placement, fit, is_computed_once, is_derived, place_stages
from svod.core.kernel.scheduler import Scheduler


def lower(state: Scheduler) -> Program:
    """The Program of a state. Raises KernelOptError when the opts do not go together."""
    return Lowering(state).run()


class Lowering:
    """What the phases of one program share."""

    def __init__(self, state: Scheduler):
        self.state = state
        check_groups(state)
        self.on_grid = state.target.has_groups
        self.kernel = state.kernel
        self.plan: Placement = place_stages(state)
        self.layouts = layouts(state, self.plan)
        self.lane, self.orders = self.layouts.lanes, self.layouts.orders
        self.dots, self.packed = self.layouts.dots, self.layouts.packed
        self.derived = {s.index for s in self.kernel.stages if is_derived(s)}
        self.temps: list[int] = []
        self.temp_of: dict[int, tuple[int, Layout]] = {}
        self.unsafe: dict[int, int] = {}      # axis → extent that must be checked
        self.below: set[int] = set()          # those of them whose positions may also be negative: read backwards
        self.fixed: set[int] = set()          # axes whose last tile must not be moved back
        self.threads = 1 if self.on_grid else state.thread[1] if state.thread else state.split_reduce[1] if state.split_reduce else 1
        self._guards()

    # -- facts about stages, readers before what they read -----------------------------------------
    def _guards(self) -> None:
        """Axes whose positions may fall beyond the extent and must be checked: padded ones, and what kernels that read their own output
        would otherwise compute twice. Stages read at such positions inherit the check."""
        state, resolved = self.state, self.plan.resolved
        for s in range(len(self.kernel.stages) - 1, -1, -1):
            r = resolved[s]
            if r is None or self.plan.paths[s] is None:
                continue
            if s not in self.derived:
                for axis in r.axes:
                    extent = self.spanned(s, axis)
                    pieces = fit(state, state.axis_rows[axis], extent)
                    reduce = axis in r.stage.reds
                    if is_covered(state, axis, self._stores(s, axis)):
                        self.fixed.add(axis)
                        if extent > self.kernel.axes[axis].extent:
                            self.unsafe[axis] = self.kernel.axes[axis].extent
                    in_place = r.stage.is_output and bool(self.kernel.written)
                    if in_place and not reduce and not is_exact(pieces, extent):
                        self.fixed.add(axis)
                    chosen = state.dots[s]
                    varies = self.kernel.axes[axis].bound is not None
                    if varies and not reduce and self.plan.paths[s] == ():
                        self.fixed.add(axis)    # where the last tile ends is known when it runs
                    if (state.pads[axis] and not (chosen and chosen.axis == axis)) or axis in self.fixed or varies:
                        self.unsafe[axis] = self.kernel.axes[axis].extent
            if s in self.packed:
                axis = r.stage.outs[self.packed[s].dim]
                if self.packed[s].padded != self.kernel.axes[axis].extent:
                    self.unsafe[axis] = self.kernel.axes[axis].extent
            for node in r.nodes:
                if node.kind == "read":
                    outs = self.kernel.stages[node.arg].outs
                    for axis, lin in zip(outs, node.dims, strict=True):
                        if any(r.axes[a] in self.unsafe for a, _ in lin.coefs):
                            self.unsafe[axis] = self.kernel.axes[axis].extent
                            if any(r.axes[a] in (self.below if c > 0 else self.unsafe) for a, c in lin.coefs):
                                self.below.add(axis)

    def _stores(self, s: int, axis: int) -> bool:
        """Whether a phase stores the positions of `axis` of stage `s`."""
        return self.plan.paths[s] == () and axis in self.kernel.stages[s].outs

    def spanned(self, s: int, axis: int) -> int:
        """Positions of an axis of stage `s` that its loops span, padding included."""
        covered = is_covered(self.state, axis, self._stores(s, axis))
        return covered_extent(self.state, axis) if covered else self.state.axis_extent(axis)

    # -- the program ---------------------------------------------------------------------------------
    def run(self) -> Program:
        phases: list[PhaseSpec] = []
        code: list[tuple[Instr, ...]] = []
        # what reads only constants comes first: it runs once, at prepare
        for s in sorted(self.plan.roots, key=lambda s: not self.once(s)):
            r = self.plan.resolved[s]
            assert r is not None
            stage = r.stage
            split = self.state.split_reduce if stage.is_output else None
            if split and self.kernel.axes[split[0]].stage == s:
                emitted = self._split_phases(r, split)
            elif stage.is_output:
                emitted = [Phase(self).emit_output(r)]
            else:
                emitted = [Phase(self).emit_temp(r, self._temp(r))]
            for spec, instructions in emitted:
                phases.append(PhaseSpec(f"svod_p{len(phases)}", spec.extent, spec.threads, spec.scratch, spec.once, spec.counts, spec.block,
                                        spec.shared))
                code.append(instructions)
        return Program(derive_spec(self.kernel.ast, self.state.target, tuple(self.temps), tuple(phases)), tuple(code))

    def once(self, s: int) -> bool:
        """True for a root stage that reads nothing but constants of the plan."""
        return is_computed_once(self.state, self.plan, s)

    def new_temp(self, nbytes: int) -> int:
        self.temps.append(nbytes)
        return len(self.temps) - 1

    def _temp(self, r: ResolvedStage) -> tuple[int, Layout]:
        s = r.stage.index
        layout = self.layout(s, tuple(self.positions(s, i) for i in range(len(r.stage.outs))))
        found = self.new_temp(self.area(s, layout)), layout
        self.temp_of[s] = found
        return found

    def stored(self, s: int) -> DType:
        """The type in which a staged value lies in memory."""
        return self.packed[s].dtype if s in self.packed else self.kernel.stages[s].dtype

    def area(self, s: int, layout: Layout) -> int:
        """Bytes that a staged value takes, with room behind for what is read beyond its end."""
        packed = self.packed.get(s)
        beyond = layout.strides[packed.row_dim] * (packed.rows - 1) if packed is not None and packed.row_dim >= 0 else 0
        return (layout.size + beyond) * self.stored(s).itemsize + SLACK

    def positions(self, s: int, dim: int) -> int:
        """The positions of a dim of a staged value that may be read: whole groups for a dot instruction."""
        packed = self.packed.get(s)
        return packed.padded if packed is not None and packed.dim == dim else self.kernel.axes[self.kernel.stages[s].outs[dim]].extent

    def guarded(self, s: int, dim: int) -> bool:
        """Whether positions of a dim beyond those that are staged may be asked for."""
        packed = self.packed.get(s)
        return (packed is None or packed.dim != dim) and self.kernel.stages[s].outs[dim] in self.unsafe

    def layout(self, s: int, extents: tuple[int, ...], tiled: bool = True) -> Layout:
        """How a box of stage `s` lies in memory. Readers take it from the emitted stage (`Staged`), as it may differ between boxes."""
        return lay_out(self.state, self.layouts, s, extents, tiled and not self.on_grid)

    def _split_phases(self, r: ResolvedStage, split: tuple[int, int]) -> list[Emitted]:
        """A reduction cut over cores: partial results per part into a temporary, then a phase that combines them."""
        axis, parts = split
        extent = self.spanned(r.stage.index, axis)
        pieces = fit(self.state, self.state.axis_rows[axis], extent)
        step = pieces[0].stride
        chunk = -(-extent // (parts * step)) * step
        count = -(-extent // chunk)
        outs = r.stage.outs
        sizes = [self.kernel.axes[a].extent for a in outs]
        strides, total = [0] * len(outs), 1
        for i in range(len(outs) - 1, -1, -1):
            strides[i] = total
            total *= sizes[i]
        temps = [[self.new_temp(total * count * d.itemsize + SLACK) for d in red.dtypes] for red in r.reductions]
        partial = Phase(self).emit_partial(r, axis, chunk, count, temps, Linear(tuple((i, s) for i, s in enumerate(strides)), 0, ()), total)
        combine = Phase(self).emit_combine(r, count, temps, strides, total)
        return [partial, combine]
