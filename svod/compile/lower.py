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
"""
from __future__ import annotations

from svod.compile.emit_phase import Emitted, Phase
from svod.compile.nests import SLACK, Layout, block_of, is_contiguous, is_exact
from svod.compile.program import Instr, PhaseSpec, Program, ProgramSpec
from svod.core import dots
from svod.core.dtype import DType
from svod.core.kernel import Linear, Node, ResolvedStage
from svod.core.nest import Plan, fit, lane_row, plan
from svod.core.scheduler import UPCAST, Scheduler

SET_STRIDE = 2048               # bytes: rows so far apart share the sets of the first cache, or every second of them
LINE = 64


def lower(state: Scheduler) -> Program:
    """The Program of a state. Raises KernelOptError when the opts do not go together."""
    return Lowering(state).run()


class Lowering:
    """What the phases of one program share."""

    def __init__(self, state: Scheduler):
        self.state = state
        self.kernel = state.kernel
        self.plan: Plan = plan(state)
        self.temps: list[int] = []
        self.temp_of: dict[int, tuple[int, Layout]] = {}
        self.lane: dict[int, int] = {}        # stage → local axis that is the vector, or -1
        self.orders: dict[int, tuple[int, ...]] = {}
        self.tiles: dict[int, tuple[int, int]] = {}
        self.derived: set[int] = set()
        self.unsafe: dict[int, int] = {}      # axis → extent that must be checked
        self.below: set[int] = set()          # those of them whose positions may also be negative: read backwards
        self.fixed: set[int] = set()          # axes whose last tile must not be moved back
        self.dots: dict[int, dots.Plan] = {}  # stage → its dot instruction
        self.packed: dict[int, dots.Packed] = {}    # operands of dot instructions
        self.rows: set[int] = set()           # stages read in all lanes, laid out in rows along the sum
        self.threads = state.thread[1] if state.thread else state.split_reduce[1] if state.split_reduce else 1
        self._layouts()
        self._guards()

    # -- facts about stages, readers before what they read -----------------------------------------
    def _layouts(self) -> None:
        state, resolved = self.state, self.plan.resolved
        for s in range(len(self.kernel.stages) - 1, -1, -1):
            r = resolved[s]
            if r is None or self.plan.paths[s] is None:
                continue
            stage = r.stage
            if not stage.is_output:
                self.orders[s], self.tiles[s] = self._layout_order(s)
            if stage.is_output or stage.has_reduce:
                row = lane_row(state, r)
                self.lane[s] = r.axes.index(state.rows[row].axis) if row >= 0 else -1
                found = dots.plan_dot(state, r, self.lane[s])
                if found is not None:
                    self.dots[s] = found
                    self.packed.update({o.stage: p for o, p in zip(found.operands, found.packed, strict=True)})
            else:
                self.derived.add(s)
                self.lane[s] = self.orders[s][-1] if self.orders[s] else -1

    def _layout_order(self, s: int) -> tuple[tuple[int, ...], tuple[int, int]]:
        """The order in which a stage's dims are read: loops by depth, then register tiles, then the vector; and the dim that is
        read in whole tiles, with the tile's size (or (-1, 1))."""
        state, resolved = self.state, self.plan.resolved
        dims = len(self.kernel.stages[s].outs)
        rank = [-1.0] * dims
        here = resolved[s]
        copied = here is not None and any(n.kind == "load" for n in here.nodes)
        tiles: set[tuple[int, int]] = set()     # what each read could use
        for q in self.plan.readers[s]:
            r = resolved[q]
            if r is None or self.plan.paths[q] is None:
                continue
            lane = self.lane[q]
            depth = {row: i for i, row in enumerate(state.order[q])}
            for node in r.nodes:
                if node.kind != "read" or node.arg != s:
                    continue
                found = (-1, 1)
                # what is computed from scratch and read one element for all lanes keeps the order of the loops: its rows lie as those it is
                # computed from, in vectors
                tiles_inside = copied or any(a == lane for lin in node.dims for a, _ in lin.coefs)
                for i, lin in enumerate(node.dims):
                    for a, _ in lin.coefs:
                        ids = state.axis_rows[r.axes[a]]
                        value = max((depth[x] for x in ids if x in depth), default=0) * 1.0
                        if q in self.derived:
                            value = float(self.orders[q].index(a))
                        elif tiles_inside and any(state.rows[x].role == UPCAST and state.rows[x].extent > 1 for x in ids):
                            value = 500.0
                        if a == lane:
                            value = 1000.0
                            found = (i, self._tile_of(q, r, node, i, a))
                        rank[i] = max(rank[i], value)
                tiles.add(found)
        tile = tiles.pop() if len(tiles) == 1 else (-1, 1)
        packed = self.packed.get(s)
        if dims and max(rank) < 1000.0 and (packed is not None or self.plan.paths[s] == ()):
            # read as a value in all lanes: rows along the sum are few streams through memory, as it mostly lies there
            along = packed.dim if packed is not None else self._summed_dim(s)
            if along >= 0:
                rank[along] = 1000.0
                self.rows.add(s)
        if packed is not None and tile[0] == packed.dim:
            tile = (-1, 1)
        order = tuple(sorted(range(dims), key=lambda i: (rank[i], i)))
        return order, tile if tile[1] > 1 and not self.kernel.stages[s].has_reduce else (-1, 1)

    def _summed_dim(self, s: int) -> int:
        """The dim of a stage along which its readers' innermost reduce loop runs, or -1."""
        state = self.state
        for q in self.plan.readers[s]:
            r = self.plan.resolved[q]
            if r is None or q in self.derived:
                continue
            local = {axis: i for i, axis in enumerate(r.axes)}
            for row in reversed(state.order[q]):
                a = local[state.rows[row].axis]
                if a < len(r.stage.outs):
                    continue
                return next((i for n in r.nodes if n.kind == "read" and n.arg == s for i, lin in enumerate(n.dims) if lin.coef(a)), -1)
        return -1

    def _tile_of(self, q: int, r: ResolvedStage, node: Node, dim: int, local: int) -> int:
        """Positions of the reader's vector axis that stand side by side, if the dim is read in whole tiles of them, else 1."""
        lin = node.dims[dim]
        axis = r.axes[local]
        if lin.atoms or lin.const or lin.coefs != ((local, 1),) or self.plan.paths[q] != () or q in self.derived:
            return 1    # a stage inside another nest computes whatever part is asked for, not whole tiles of it
        pieces = fit(self.state, self.state.axis_rows[axis], self.state.axis_extent(axis))
        return block_of(pieces) if is_exact(pieces, self.state.axis_extent(axis)) and is_contiguous(pieces) else 1

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
                    extent = state.axis_extent(axis)
                    pieces = fit(state, state.axis_rows[axis], extent)
                    reduce = axis in r.stage.reds
                    in_place = r.stage.is_output and bool(self.kernel.written)
                    if in_place and not reduce and not is_exact(pieces, extent):
                        self.fixed.add(axis)
                    chosen = state.dots[s]
                    if (state.pads[axis] and not (chosen and chosen.axis == axis)) or axis in self.fixed:
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
                phases.append(PhaseSpec(f"svod_p{len(phases)}", spec.extent, spec.threads, spec.scratch, spec.once))
                code.append(instructions)
        params = tuple((p.dtype, p.arg.size) for p in self.kernel.params)
        return Program(ProgramSpec("kernel", params, self.kernel.outs, tuple(self.temps), tuple(phases)), tuple(code))

    def once(self, s: int) -> bool:
        """True for a root stage that reads nothing but constants of the plan."""
        r = self.plan.resolved[s]
        assert r is not None
        if r.stage.is_output:
            return False
        loads = [n for n in r.nodes if n.kind == "load"]
        return bool(loads or r.reads) and all(self.kernel.params[n.arg].arg.constant for n in loads) \
            and all(self.plan.paths[q] != () or self.once(q) for q in r.reads) and all(self._constant(q) for q in r.reads)

    def _constant(self, s: int) -> bool:
        r = self.plan.resolved[s]
        assert r is not None
        return all(self.kernel.params[n.arg].arg.constant for n in r.nodes if n.kind == "load") and all(self._constant(q) for q in r.reads)

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
        order = self.orders[s]
        dim, tile = self.tiles[s] if tiled else (-1, 1)
        packed = self.packed.get(s)
        if packed is not None:
            # by words of a group: a step along the summed dim is a part of a word's stride, everything else moves by whole words
            words = tuple(e // packed.group if d == packed.dim else e for d, e in enumerate(extents))
            found = self._layout(order, words, dim, tile, SET_STRIDE // (packed.group * packed.dtype.itemsize) if s in self.rows else 0)
            inside = tuple(n if d == packed.dim else n * packed.group for d, n in enumerate(found.strides))
            return found._replace(extents=extents, strides=inside, outer=found.outer * packed.group, size=found.size * packed.group)
        return self._layout(order, extents, dim, tile, SET_STRIDE // self.kernel.stages[s].dtype.itemsize if s in self.rows else 0)

    def _layout(self, order: tuple[int, ...], extents: tuple[int, ...], dim: int, tile: int, apart: int) -> Layout:
        """`apart`: rows of a multiple of so many elements get a line of the cache more, or they would share its sets; 0: none do."""
        strides = [0] * len(extents)
        if dim >= 0 and tile < extents[dim] and extents[dim] % tile == 0:
            size = tile
            for d in reversed(order):
                if d != dim:
                    strides[d] = size
                    size *= extents[d]
            strides[dim] = 1
            return Layout(extents, tuple(strides), order, dim, tile, size, size * (extents[dim] // tile))
        order = tuple(sorted(order, key=lambda d: extents[d] != 1))   # stable: axes of one position go outermost
        size = 1
        for d in reversed(order):
            strides[d] = size
            size *= extents[d]
            if apart and d == order[-1] and size % apart == 0:
                size += apart * LINE // SET_STRIDE
        return Layout(extents, tuple(strides), order, -1, 1, 0, size)

    def _split_phases(self, r: ResolvedStage, split: tuple[int, int]) -> list[Emitted]:
        """A reduction cut over cores: partial results per part into a temporary, then a phase that combines them."""
        axis, parts = split
        pieces = fit(self.state, self.state.axis_rows[axis], self.kernel.axes[axis].extent)
        step = pieces[0].stride
        extent = self.kernel.axes[axis].extent
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
