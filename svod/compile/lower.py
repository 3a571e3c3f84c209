"""Lowering: a Scheduler state becomes a Program of phases in LINEAR, emitted directly.

There is no expanded graph that is simplified back. Each stage's loops are opened in the state's order; UPCAST and UNROLL
positions are expanded while emitting, a value per distinct position of the axes it depends on; every address is (pointer, index at
its loop level, constant).

Example, `UPCAST(o0, 16)` on y[i] = x[i] + 1 over 100 positions becomes

    LOOP b in begin…end (7 iterations)        # ceil(100/16)
      i = MIN(b*16, 84)                       # the last tile is moved back, no mask
      STORE y[i:i+16] = LOAD x[i:i+16] + 1

Extents that an amount does not divide: an output axis moves its last tile back (recomputing a few positions) where tiles are contiguous
and the kernel does not read what it writes, else positions are guarded; a reduce axis runs its remainder as a second, shorter copy of the body.
"""
from __future__ import annotations

from collections.abc import Callable
from itertools import product
from typing import Any, NamedTuple

from svod.compile import math
from svod.compile.builder import Builder
from svod.compile.program import Instr, PhaseSpec, Program, ProgramSpec
from svod.core.combiner import get_combiner
from svod.core.dtype import DType, dtypes
from svod.core.kernel import Linear, Node, Reduction, ResolvedStage, Stage
from svod.core.nest import Piece, Plan, first_reduce, fit, lane_row, plan
from svod.core.scheduler import LOOP, ROOT, UNROLL, UPCAST, Scheduler
from svod.core.uop import TRANSCENDENTAL, Ops
from svod.errors import KernelOptError

Terms = dict[int, int]          # SSA index value → coefficient
Lin = tuple[Terms, int]         # Σ coefficient·value + constant
_TRANSCENDENTAL = {op.value: op for op in TRANSCENDENTAL}
_MIN_ITERATIONS = 64            # a phase offers at least this many iterations per core, so that cores and slices have something to share
_MAX_TILE_VECTORS = 4           # vectors side by side in derived copy loops
_COPY_LANES = -2                # the row number of the vector in derived loops
_NO_POINT = -2                  # depth of a derived loop: no stage lives there
_SLACK = 128                    # bytes behind each scratch area: a partial vector may be read past its end


class Layout(NamedTuple):
    """How a staged value lies in memory. Element (p0, p1, …) stands at Σ stride·p; the tiled dim at (p // tile)·outer + p % tile."""

    extents: tuple[int, ...]
    strides: tuple[int, ...]
    order: tuple[int, ...]         # dims, outermost first
    tiled: int                     # the dim cut into tiles, or -1
    tile: int
    outer: int
    size: int                      # elements


class Staged(NamedTuple):
    """A stage's value for its readers: in memory (`layout`) or, for a single element, a scalar."""

    scalar: int
    pointer: int
    layout: Layout | None
    base: tuple[Lin, ...]
    floor: int                     # loads stay at or below this level
    guarded: bool                  # positions beyond the extent may be asked for: read under a gate


def lower(state: Scheduler) -> Program:
    """The Program of a state. Raises KernelOptError when the opts do not go together."""
    return _Lowering(state).run()


class _Lowering:
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
            else:
                self.derived.add(s)
                self.lane[s] = self.orders[s][-1] if self.orders[s] else -1

    def _layout_order(self, s: int) -> tuple[tuple[int, ...], tuple[int, int]]:
        """The order in which a stage's dims are read: loops by depth, then register tiles, then the vector; and the dim that is
        read in whole tiles, with the tile's size (or (-1, 1))."""
        state, resolved = self.state, self.plan.resolved
        dims = len(self.kernel.stages[s].outs)
        rank = [-1.0] * dims
        tile: tuple[int, int] | None = None
        for q in self.plan.readers[s]:
            r = resolved[q]
            if r is None or self.plan.paths[q] is None:
                continue
            lane = self.lane[q]
            depth = {row: i for i, row in enumerate(state.order[q])}
            for node in r.nodes:
                if node.kind != "read" or node.arg != s:
                    continue
                for i, lin in enumerate(node.dims):
                    for a, _ in lin.coefs:
                        ids = state.axis_rows[r.axes[a]]
                        value = max((depth[x] for x in ids if x in depth), default=0) * 1.0
                        if q in self.derived:
                            value = float(self.orders[q].index(a))
                        elif any(state.rows[x].role == UPCAST and state.rows[x].extent > 1 for x in ids):
                            value = 500.0
                        if a == lane:
                            value = 1000.0
                            found = (i, self._tile_of(q, r, node, i, a))
                            tile = found if tile is None or tile == found else (-1, 1)
                        rank[i] = max(rank[i], value)
        order = tuple(sorted(range(dims), key=lambda i: (rank[i], i)))
        if tile is None or tile[1] < 2 or self.kernel.stages[s].has_reduce:
            tile = (-1, 1)
        return order, tile

    def _tile_of(self, q: int, r: ResolvedStage, node: Node, dim: int, local: int) -> int:
        """Positions of the reader's vector axis that stand side by side, if the dim is read in whole tiles of them, else 1."""
        lin = node.dims[dim]
        axis = r.axes[local]
        if lin.atoms or lin.const or lin.coefs != ((local, 1),) or q in self.derived:
            return 1
        pieces = fit(self.state, self.state.axis_rows[axis], self.state.axis_extent(axis))
        return _block(pieces) if _exact(pieces, self.state.axis_extent(axis)) else 1

    def _guards(self) -> None:
        """Axes whose positions may fall beyond the extent and must be checked: padded ones, tiles with gaps that do not divide, and
        what kernels that read their own output would otherwise compute twice. Stages read at such positions inherit the check."""
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
                    if state.pads[axis] or (not reduce and not _exact(pieces, extent) and (in_place or not _contiguous(pieces))):
                        self.unsafe[axis] = self.kernel.axes[axis].extent
            for node in r.nodes:
                if node.kind == "read":
                    outs = self.kernel.stages[node.arg].outs  # type: ignore[index]
                    for axis, lin in zip(outs, node.dims, strict=True):
                        if any(r.axes[a] in self.unsafe for a, _ in lin.coefs):
                            self.unsafe[axis] = self.kernel.axes[axis].extent

    # -- the program ---------------------------------------------------------------------------------
    def run(self) -> Program:
        phases: list[PhaseSpec] = []
        code: list[tuple[Instr, ...]] = []
        # what reads only constants comes first: it runs once, at prepare
        for s in sorted(self.plan.roots, key=lambda s: not self._once(s)):
            r = self.plan.resolved[s]
            assert r is not None
            stage = r.stage
            split = self.state.split_reduce if stage.is_output else None
            if split and self.kernel.axes[split[0]].stage == s:
                emitted = self._split_phases(r, split)
            elif stage.is_output:
                emitted = [_Phase(self).emit_output(r)]
            else:
                emitted = [_Phase(self).emit_temp(r, self._temp(r))]
            for spec, instructions in emitted:
                phases.append(PhaseSpec(f"svod_p{len(phases)}", spec.extent, spec.threads, spec.scratch, spec.once))
                code.append(instructions)
        params = tuple((p.dtype, p.arg.size) for p in self.kernel.params)
        return Program(ProgramSpec("kernel", params, self.kernel.outs, tuple(self.temps), tuple(phases)), tuple(code))

    def _once(self, s: int) -> bool:
        """True for a root stage that reads nothing but constants of the plan."""
        r = self.plan.resolved[s]
        assert r is not None
        if r.stage.is_output:
            return False
        loads = [n for n in r.nodes if n.kind == "load"]
        return bool(loads or r.reads) and all(self.kernel.params[n.arg].arg.constant for n in loads) \
            and all(self.plan.paths[q] != () or self._once(q) for q in r.reads) and all(self._constant(q) for q in r.reads)

    def _constant(self, s: int) -> bool:
        r = self.plan.resolved[s]
        assert r is not None
        return all(self.kernel.params[n.arg].arg.constant for n in r.nodes if n.kind == "load") and all(self._constant(q) for q in r.reads)  # type: ignore[index,arg-type]

    def new_temp(self, nbytes: int) -> int:
        self.temps.append(nbytes)
        return len(self.temps) - 1

    def _temp(self, r: ResolvedStage) -> tuple[int, Layout]:
        s = r.stage.index
        layout = self.layout(s, tuple(self.kernel.axes[a].extent for a in r.stage.outs))
        found = self.new_temp(layout.size * r.stage.dtype.itemsize + _SLACK), layout
        self.temp_of[s] = found
        return found

    def layout(self, s: int, extents: tuple[int, ...]) -> Layout:
        order = self.orders[s]
        dim, tile = self.tiles[s]
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
        return Layout(extents, tuple(strides), order, -1, 1, 0, size)

    def _split_phases(self, r: ResolvedStage, split: tuple[int, int]) -> list[_Emitted]:
        """A reduction cut over cores: partial results per part into a temporary, then a phase that combines them."""
        axis, parts = split
        for (s, depth), children in self.plan.children.items():
            if s == r.stage.index and depth and any(c not in r.in_reduce for c in children):
                raise KernelOptError("a reduction that is cut into parts cannot compute other stages inside its output loops")
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
        temps = [[self.new_temp(total * count * d.itemsize + _SLACK) for d in red.dtypes] for red in r.reductions]
        partial = _Phase(self).emit_partial(r, axis, chunk, count, temps, Linear(tuple((i, s) for i, s in enumerate(strides)), 0, ()), total)
        combine = _Phase(self).emit_combine(r, count, temps, strides, total)
        return [partial, combine]


class _Spec(NamedTuple):
    """What a phase's launch needs, before its symbol is known."""

    extent: int
    threads: int
    scratch: int
    once: bool


_Emitted = tuple[_Spec, tuple[Instr, ...]]


def _exact(pieces: tuple[Piece, ...], extent: int) -> bool:
    total = 1
    for p in pieces:
        total *= p.extent
    return total == extent


def _block(pieces: tuple[Piece, ...]) -> int:
    """Positions that the expanded rows of an axis cover."""
    return 1 + sum(p.stride * (p.extent - 1) for p in pieces if p.role != LOOP)


def _contiguous(pieces: tuple[Piece, ...]) -> bool:
    """True when the expanded rows are the innermost ones, so that a tile is one block of positions."""
    seen = False
    for p in reversed(pieces):
        if p.extent == 1:
            continue
        if p.role == LOOP:
            seen = True
        elif seen:
            return False
    return True


class _Chunk(NamedTuple):
    """A part of the vector axis: `offset` of its first lane in positions of the row, vector `width`, lanes in use."""

    offset: int
    width: int
    active: int


def _chunks(extent: int, width: int) -> tuple[_Chunk, ...]:
    """The row of `extent` positions as vectors of at most `width` lanes, the last one narrower or masked."""
    out = []
    at = 0
    while extent - at >= width:
        out.append(_Chunk(at, width, width))
        at += width
    rest = extent - at
    if rest:
        w = 1
        while w < rest:
            w *= 2
        out.append(_Chunk(at, w, rest))
    return tuple(out)


class _Nest:
    """One stage while it is emitted: its loops, the values of its axes, the current vector chunk."""

    __slots__ = ("base", "bounds", "chunk", "lane", "lane_row", "lane_stride", "linear", "memo", "offsets", "opened", "partial", "pieces", "r",
                 "results", "width")

    def __init__(self, r: ResolvedStage, pieces: list[tuple[Piece, ...]], bounds: list[int], base: list[Lin], lane: int, lane_row: int, width: int):
        self.r = r
        self.pieces = pieces            # per local axis
        self.bounds = bounds            # per local axis: positions it spans here
        self.base = base                # per local axis: where it starts
        self.opened: list[list[Lin]] = [[] for _ in pieces]   # per local axis: values of the rows opened so far
        piece = next((p for p in pieces[lane] if p.row == lane_row), None) if lane >= 0 else None
        self.lane = lane if piece is not None and piece.extent > 1 else -1   # the local axis that is the vector
        self.lane_row = lane_row
        self.lane_stride = piece.stride if piece is not None else 1
        self.width = width
        self.offsets: list[int] = [0] * len(pieces)
        self.chunk = _Chunk(0, 1, 1)
        self.memo: dict[Any, int] = {}
        self.linear: dict[Any, Any] = {}
        self.results: dict[tuple[int, int], int] = {}   # (reduction, component) → value, while a position is stored
        self.partial: dict[tuple[int, ...], tuple[int, int]] = {}   # partial position → (number, vector width)


Sink = Callable[["_Nest", int], None]


class _Phase:
    """Emits one phase."""

    def __init__(self, low: _Lowering):
        self.low = low
        self.state = low.state
        self.kernel = low.kernel
        self.b = Builder()
        self.scratch = 0
        self.areas: dict[int, tuple[int, int]] = {}     # stage → (offset, bytes) of its scratch
        self.env: dict[int, Staged] = {}
        self.nests: dict[int, _Nest] = {}               # stages whose loops are open
        self.partial: tuple[int, int, int] | None = None   # split reduction: local axis, chunk, number of parts
        self.part = -1

    # -- kinds of phases -------------------------------------------------------------------------------
    def emit_output(self, r: ResolvedStage) -> _Emitted:
        assert r.store is not None
        nest = self._root_nest(r)
        store, slot = r.store, r.store_slot
        pointer = self.b.pure("ARG", self.kernel.params[slot].dtype, 1, (), slot)
        return self._launch(nest, lambda n, v: self._store_linear(n, v, pointer, store, self.state.stream), self.low.threads, False)

    def emit_temp(self, r: ResolvedStage, temp: tuple[int, Layout]) -> _Emitted:
        index, layout = temp
        pointer = self.b.pure("TEMP", r.stage.dtype, 1, (), index)
        nest = self._root_nest(r)
        once = self.low._once(r.stage.index)
        threads = self.state.target.threads if once else self.low.threads
        return self._launch(nest, lambda n, v: self._store_layout(n, v, pointer, layout, [({}, 0)] * len(layout.extents)), threads, once)

    def emit_partial(self, r: ResolvedStage, axis: int, chunk: int, count: int, temps: list[list[int]], flat: Linear, total: int) -> _Emitted:
        nest = self._root_nest(r)
        self.partial = (r.axes.index(axis), chunk, count)
        pointers = [[self.b.pure("TEMP", d, 1, (), t) for t, d in zip(group, red.dtypes, strict=True)]
                    for group, red in zip(temps, r.reductions, strict=True)]

        def sink(n: _Nest, _: int) -> None:
            for k, group in enumerate(pointers):
                for c, pointer in enumerate(group):
                    self._store_linear(n, n.results[k, c], pointer, flat, False, extra={self.part: total})
        return self._launch(nest, sink, self.low.threads, False, values=False)

    def emit_combine(self, r: ResolvedStage, count: int, temps: list[list[int]], strides: list[int], total: int) -> _Emitted:
        assert r.store is not None
        nodes = list(r.nodes)
        reductions = []
        part = len(r.stage.outs)
        flat = Linear((*((i, s) for i, s in enumerate(strides)), (part, total)), 0, ())
        for red, group in zip(r.reductions, temps, strict=True):
            values = []
            for t, d in zip(group, red.dtypes, strict=True):
                nodes.append(Node("temp", "LOAD", d, (), t, tuple(range(part + 1)), linear=flat))
                values.append(len(nodes) - 1)
            reductions.append(Reduction(red.combiner, tuple(values), red.dtypes))
        combined = ResolvedStage(r.stage, (*r.stage.outs, -1), nodes, reductions, r.value, r.store, r.store_slot, r.reads, frozenset(), r.lanes_bytes)
        extents = [self.kernel.axes[a].extent for a in r.stage.outs]
        order = tuple(range(part))
        lane = next((i for i in reversed(order) if r.store.coef(i) == 1), part - 1)
        width = self._width(r)
        pieces = self._derived_pieces(extents, (*(i for i in order if i != lane), *((lane,) if lane >= 0 else ())), width)
        pieces.append((Piece(-1, UNROLL if count <= 8 else LOOP, count, 1),))
        nest = _Nest(combined, pieces, [*extents, count], [({}, 0)] * (part + 1), lane, _COPY_LANES, width)
        store, slot = r.store, r.store_slot
        pointer = self.b.pure("ARG", self.kernel.params[slot].dtype, 1, (), slot)
        threads = self.low.threads if total >= 1 << 14 else 1
        return self._launch(nest, lambda n, v: self._store_linear(n, v, pointer, store, self.state.stream), threads, False)

    def _width(self, r: ResolvedStage) -> int:
        return max(1, self.state.target.vector_bytes // r.lanes_bytes)

    # -- nests -----------------------------------------------------------------------------------------
    def _root_nest(self, r: ResolvedStage) -> _Nest:
        s = r.stage.index
        width = self._width(r)
        if s in self.low.derived:
            layout = self.low.temp_of[s][1]
            extents = list(layout.extents)
            return _Nest(r, self._derived_pieces(extents, layout.order, width, layout.tile if layout.tiled >= 0 else 0), extents,
                         [({}, 0)] * len(extents), self.low.lane[s], _COPY_LANES, width)
        extents = [self.state.axis_extent(a) for a in r.axes]
        pieces = [fit(self.state, self.state.axis_rows[a], e) for a, e in zip(r.axes, extents, strict=True)]
        return _Nest(r, pieces, extents, [({}, 0)] * len(extents), self.low.lane[s], lane_row(self.state, r), width)

    def _derived_pieces(self, extents: list[int], order: tuple[int, ...], width: int, tile: int = 0) -> list[tuple[Piece, ...]]:
        """Loops of a copy: the innermost dim in vectors, a few of them side by side, the others as loops."""
        pieces: list[tuple[Piece, ...]] = [(Piece(-1, LOOP, e, 1),) for e in extents]
        if not order:
            return pieces
        inner = order[-1]
        e = extents[inner]
        n = tile or next((k * width for k in (_MAX_TILE_VECTORS, 2, 1) if e % (k * width) == 0), min(e, width))
        pieces[inner] = (Piece(-1, LOOP, -(-e // n), n), Piece(_COPY_LANES, UPCAST, n, 1))
        vectors = -(-n // width)
        if len(order) > 1 and vectors < _MAX_TILE_VECTORS and n == e:
            outer = order[-2]
            k = next((k for k in (8, 4, 2) if extents[outer] % k == 0 and k * vectors <= 8), 1)
            if k > 1:
                pieces[outer] = (Piece(-1, LOOP, extents[outer] // k, k), Piece(-3, UPCAST, k, 1))
        return pieces

    def _loops(self, nest: _Nest) -> list[tuple[int, Piece, int]]:
        """(local axis, piece, depth in the state's order) of a stage's loops, outermost first."""
        r = nest.r
        if r.stage.index in self.low.derived or (r.axes and r.axes[-1] == -1):
            order = self.low.orders.get(r.stage.index, tuple(range(len(r.stage.outs))))
            out = [(a, nest.pieces[a][0], _NO_POINT) for a in order]
            return out + [(a, nest.pieces[a][0], _NO_POINT) for a in range(len(r.stage.outs), len(r.axes)) if nest.pieces[a][0].role == LOOP]
        local = {axis: i for i, axis in enumerate(r.axes)}
        out = []
        for depth, row in enumerate(self.state.order[r.stage.index]):
            a = local[self.state.rows[row].axis]
            out.append((a, next(p for p in nest.pieces[a] if p.row == row), depth))
        return out

    # -- launching ---------------------------------------------------------------------------------------
    def _launch(self, nest: _Nest, sink: Sink, threads: int, once: bool, values: bool = True) -> _Emitted:
        """The phase's outermost loops become begin…end, the rest is emitted inside."""
        b = self.b
        s = nest.r.stage.index
        loops = self._loops(nest)
        begin, end = b.pure("BEGIN", dtypes.index, 1, ()), b.pure("END_", dtypes.index, 1, ())
        outs = len(nest.r.stage.outs)
        prefix, extent = 0, 1
        if self.partial is None:
            while prefix < len(loops):
                a, piece, depth = loops[prefix]
                if a >= outs or (prefix and extent >= _MIN_ITERATIONS * threads):
                    break
                if prefix and prefix == len(loops) - 1 and extent >= 4 * threads:
                    break   # the innermost loop stays a loop
                extent *= piece.extent
                prefix += 1
                if (s, depth + 1) in self.low.plan.children:
                    break
        else:
            extent = self.partial[2]
        i, _ = b.open(begin, end, 1)
        self.nests[s] = nest
        if self.partial is not None:
            self.part = i
        values_of: list[int] = []
        rest = i
        for k in range(prefix - 1, -1, -1):
            e = loops[k][1].extent
            if k == 0:
                values_of.append(rest)
            else:
                values_of.append(b.alu("MOD", dtypes.index, 1, rest, b.index(e)))
                rest = b.alu("IDIV", dtypes.index, 1, rest, b.index(e))
        values_of.reverse()
        for (a, piece, depth), v in zip(loops[:prefix], values_of, strict=True):
            if piece.extent > 1:
                self._open_row(nest, a, ({b.mul(v, piece.stride): 1}, 0))
            else:
                self._open_row(nest, a, ({}, 0))
            self._children(s, depth + 1)
        self._walk(nest, loops, prefix, sink, values)
        b.close(i)
        code = b.finish()
        return _Spec(extent, min(threads, extent) if threads > 1 else 1, self.scratch, once), code

    def _open_row(self, nest: _Nest, a: int, value: Lin) -> None:
        nest.opened[a].append(value)
        nest.linear.clear()
        nest.memo.clear()

    def _close_row(self, nest: _Nest, a: int) -> None:
        nest.opened[a].pop()
        nest.linear.clear()
        nest.memo.clear()

    def _walk(self, nest: _Nest, loops: list[tuple[int, Piece, int]], k: int, sink: Sink, values: bool) -> None:
        """Open the output loops from number k, then reduce, then store."""
        outs = len(nest.r.stage.outs)
        if not nest.r.reductions:
            if k < len(loops):
                a, piece, depth = loops[k]
                self._loop(nest, a, piece, lambda: (self._children(nest.r.stage.index, depth + 1), self._walk(nest, loops, k + 1, sink, values)))
                return
            self._body(nest, sink)
            return
        if k < len(loops) and loops[k][0] < outs:
            a, piece, depth = loops[k]
            self._loop(nest, a, piece, lambda: (self._children(nest.r.stage.index, depth + 1), self._walk(nest, loops, k + 1, sink, values)))
            return
        inner = [j for j in range(k, len(loops)) if loops[j][0] < outs and loops[j][1].extent > 1]
        if inner:
            self._reduce_in_scratch(nest, loops, k, inner[-1] + 1, sink, values)
            return
        accs = self._reduce(nest, loops, k, self._identities(nest))
        self._epilogue(nest, accs, sink, values)

    def _loop(self, nest: _Nest, a: int, piece: Piece, body: Callable[[], Any]) -> None:
        """One output loop around `body`."""
        b = self.b
        if piece.extent == 1:
            self._open_row(nest, a, ({}, 0))
            body()
            self._close_row(nest, a)
            return
        stop = b.index(piece.extent * piece.stride)
        pieces = nest.pieces[a]
        if pieces[0].row != piece.row and not _exact(pieces, nest.bounds[a]):
            # an inner loop of an axis that its amounts do not divide: no iterations wholly beyond the end
            terms, const = _sum(nest.opened[a])
            left = b.alu("SUB", dtypes.index, 1, b.index(nest.bounds[a] - const), self._ssa((terms, 0)))
            stop = b.alu("MIN", dtypes.index, 1, stop, left)
        loop, _ = b.open(b.index(0), stop, piece.stride)
        self._open_row(nest, a, ({loop: 1}, 0))
        body()
        self._close_row(nest, a)
        b.close(loop)
        nest.memo.clear()

    def _children(self, s: int, depth: int) -> None:
        """Emit the stages that live at a point."""
        for child in self.low.plan.children.get((s, depth), ()):
            self._emit_stage(child)

    # -- values of axes ----------------------------------------------------------------------------------
    def _axis(self, nest: _Nest, a: int) -> Lin:
        """Where local axis `a` starts under the loops opened so far; expanded positions are added to it as constants."""
        found = nest.linear.get(a)
        if found is None:
            terms, const = _sum(nest.opened[a])
            pieces = nest.pieces[a]
            reduce = a >= len(nest.r.stage.outs)
            if terms and not reduce and nest.r.axes[a] not in self.low.unsafe and not _exact(pieces, nest.bounds[a]):
                n = len(nest.opened[a])
                loops = [p for p in pieces if p.role == LOOP]
                left = [p for p in pieces if p.role != LOOP] + loops[n:]
                span = 1 + sum(p.stride * (p.extent - 1) for p in left)
                last = nest.bounds[a] - span
                shifted = self.b.alu("MIN", dtypes.index, 1, self._ssa((terms, const)), self.b.index(max(0, last)))
                terms, const = {shifted: 1}, 0
            base_terms, base_const = nest.base[a]
            found = nest.linear[a] = _add((terms, const), (base_terms, base_const), 1)
        return found  # type: ignore[no-any-return]

    def _ssa(self, lin: Lin) -> int:
        """The value of Σ coefficient·value + constant, summed from the outermost loop inwards."""
        b = self.b
        terms, const = lin
        level = b.level_of
        total = -1
        for v, c in sorted(terms.items(), key=lambda t: (level[t[0]], t[0])):
            term = b.mul(v, c) if c != 1 else v
            total = term if total < 0 else b.add(total, term)
        if total < 0:
            return b.index(const)
        return b.add(total, b.index(const)) if const else total

    def _hull(self, s: int, dim: int) -> tuple[Lin, int]:
        """(start, extent) of what the readers of stage `s` need of its dim, under the loops opened so far."""
        axis = self.kernel.stages[s].outs[dim]
        full = self.kernel.axes[axis].extent
        start: Lin | None = None
        lo = hi = 0
        for q in self.low.plan.readers[s]:
            r = self.low.plan.resolved[q]
            if r is None or self.low.plan.paths[q] is None:
                continue
            for node in r.nodes:
                if node.kind != "read" or node.arg != s:
                    continue
                lin = node.dims[dim]
                if lin.atoms:
                    return ({}, 0), full
                base: Lin = ({}, lin.const)
                low = high = 0
                for a, c in lin.coefs:
                    first, span = self._extent_of(q, a)
                    base = _add(base, first, c)
                    if c > 0:
                        high += c * (span - 1)
                    else:
                        low += c * (span - 1)
                if start is None:
                    start, lo, hi = base, low, high
                elif start[0] == base[0]:
                    delta = base[1] - start[1]
                    lo, hi = min(lo, low + delta), max(hi, high + delta)
                else:
                    return ({}, 0), full
        assert start is not None
        extent = hi - lo + 1
        if axis not in self.low.unsafe and extent >= full:
            return ({}, 0), full
        return (start[0], start[1] + lo), extent

    def _extent_of(self, q: int, a: int) -> tuple[Lin, int]:
        """(start, positions) of local axis `a` of stage `q`, whose loops may or may not be open."""
        nest = self.nests.get(q)
        if nest is not None:
            pieces = nest.pieces[a]
            opened = len(nest.opened[a])
            loops = [p for p in pieces if p.role == LOOP]
            left = [p for p in pieces if p.role != LOOP] + loops[opened:]
            span = min(1 + sum(p.stride * (p.extent - 1) for p in left), nest.bounds[a]) if nest.r.axes[a] not in self.low.unsafe \
                else 1 + sum(p.stride * (p.extent - 1) for p in left)
            return self._axis(nest, a), span
        r = self.low.plan.resolved[q]
        assert r is not None
        if a < len(r.stage.outs):
            if self.low.plan.paths[q] == ():
                return ({}, 0), self.state.axis_extent(r.axes[a])
            return self._hull(q, a)
        extent = self.state.axis_extent(r.axes[a])
        return ({}, 0), extent

    # -- staged values -----------------------------------------------------------------------------------
    def _emit_stage(self, s: int) -> None:
        """Compute what the readers need of stage `s` at this point."""
        b = self.b
        r = self.low.plan.resolved[s]
        assert r is not None
        stage: Stage = r.stage
        hulls = [self._hull(s, i) for i in range(len(stage.outs))]
        extents = [e for _, e in hulls]
        base: list[Lin] = [h for h, _ in hulls]
        width = self._width(r)
        guarded = any(a in self.low.unsafe for a in stage.outs)
        reds = [self.state.axis_extent(a) for a in stage.reds]
        red_base: list[Lin] = [({}, 0)] * len(reds)
        scalar = all(e == 1 for e in extents)
        layout = self.low.layout(s, tuple(extents))
        if layout.tiled >= 0 and (base[layout.tiled][0] or base[layout.tiled][1]):
            self.low.tiles[s] = (-1, 1)   # tiles are whole only when the box starts at 0
            layout = self.low.layout(s, tuple(extents))
        if s in self.low.derived:
            pieces = self._derived_pieces(extents, layout.order, width, layout.tile if layout.tiled >= 0 else 0)
            nest = _Nest(r, pieces, extents, base, layout.order[-1] if layout.order else -1, _COPY_LANES, width)
        else:
            pieces = [fit(self.state, self.state.axis_rows[a], e) for a, e in zip(r.axes, extents + reds, strict=True)]
            nest = _Nest(r, pieces, extents + reds, base + red_base, self.low.lane[s], lane_row(self.state, r), width)
        outer = self.nests.get(s)
        self.nests[s] = nest
        self._children(s, 0)
        if scalar:
            got: list[int] = []
            self._walk(nest, self._loops(nest), 0, lambda n, v: got.append(v), True)
            self.env[s] = Staged(got[0], -1, None, tuple(base), b.level, False)
        else:
            offset = self._area(s, layout.size * stage.dtype.itemsize + _SLACK)
            pointer = b.pure("SCRATCH", stage.dtype, 1, (), offset)
            self._walk(nest, self._loops(nest), 0, lambda n, v: self._store_layout(n, v, pointer, layout, base), True)
            self.env[s] = Staged(-1, pointer, layout, tuple(base), b.level, guarded)
        if outer is None:
            del self.nests[s]
        else:
            self.nests[s] = outer
        for n in self.nests.values():
            n.memo.clear()

    def _area(self, s: int, nbytes: int) -> int:
        """Scratch of a stage: one area, grown when a longer part of the nest needs more."""
        found = self.areas.get(s)
        if found is not None and found[1] >= nbytes:
            return found[0]
        offset = self.scratch
        self.scratch += -(-nbytes // 64) * 64
        self.areas[s] = (offset, nbytes)
        return offset

    def _staged(self, s: int) -> Staged:
        found = self.env.get(s)
        if found is None:
            index, layout = self.low.temp_of[s]
            pointer = self.b.pure("TEMP", self.kernel.stages[s].dtype, 1, (), index)
            guarded = any(a in self.low.unsafe for a in self.kernel.stages[s].outs)
            found = self.env[s] = Staged(-1, pointer, layout, (({}, 0),) * len(layout.extents), 0, guarded)
        return found

    # -- bodies ------------------------------------------------------------------------------------------
    def _positions(self, nest: _Nest, kinds: tuple[str, ...], axes: range) -> list[tuple[tuple[int, ...], dict[int, int]]]:
        """The expanded positions of the given rows of the given local axes, the vector row excluded: (index per row, offset per axis)."""
        rows = []
        for a in axes:
            for p in nest.pieces[a]:
                if p.role in kinds and not (a == nest.lane and p.row == nest.lane_row):
                    rows.append((a, p))
        out = []
        for index in product(*(range(p.extent) for _, p in rows)):
            offsets: dict[int, int] = {}
            for i, (a, p) in zip(index, rows, strict=True):
                offsets[a] = offsets.get(a, 0) + i * p.stride
            out.append((index, offsets))
        return out

    def _lane_chunks(self, nest: _Nest) -> tuple[_Chunk, ...]:
        if nest.lane < 0:
            return (_Chunk(0, 1, 1),)
        return _chunks(next(p.extent for p in nest.pieces[nest.lane] if p.row == nest.lane_row), nest.width)

    def _set_position(self, nest: _Nest, offsets: dict[int, int], chunk: _Chunk, more: dict[int, int] | None = None) -> bool:
        """Make a position current; False when it lies wholly beyond an axis that is expanded without a loop."""
        off = nest.offsets
        for a in range(len(off)):
            off[a] = 0
        for a, o in offsets.items():
            off[a] += o
        if more:
            for a, o in more.items():
                off[a] += o
        active = chunk.active
        if nest.lane >= 0:
            off[nest.lane] += chunk.offset * nest.lane_stride
            room = nest.bounds[nest.lane] - off[nest.lane]
            if active > 1 and (active - 1) * nest.lane_stride >= room:
                active = -(-room // nest.lane_stride)
        nest.chunk = chunk if active == chunk.active else _Chunk(chunk.offset, chunk.width, active)
        return active > 0 and all(o < e for o, e in zip(off, nest.bounds, strict=True))

    def _body(self, nest: _Nest, sink: Sink) -> None:
        """A stage without reduction: every position's value to the sink."""
        nest.memo.clear()
        chunks = self._lane_chunks(nest)
        for _, offsets in self._positions(nest, (UPCAST,), range(len(nest.r.stage.outs))):
            for chunk in chunks:
                if self._set_position(nest, offsets, chunk):
                    sink(nest, self._eval(nest, nest.r.value))

    # -- reductions --------------------------------------------------------------------------------------
    def _out_positions(self, nest: _Nest) -> list[tuple[dict[int, int], _Chunk]]:
        """Positions of the register tile, vectors of an output axis included."""
        outs = len(nest.r.stage.outs)
        chunks = self._lane_chunks(nest) if 0 <= nest.lane < outs else (_Chunk(0, 1, 1),)
        return [(offsets, c) for _, offsets in self._positions(nest, (UPCAST,), range(outs)) for c in chunks]

    def _partial_positions(self, nest: _Nest) -> list[tuple[tuple[Any, ...], dict[int, int], _Chunk]]:
        """Partial results per position of the tile: upcast rows of reduce axes, vectors among them."""
        outs = len(nest.r.stage.outs)
        chunks = self._lane_chunks(nest) if nest.lane >= outs else (_Chunk(0, 1, 1),)
        return [((*index, c.offset), offsets, c) for index, offsets in self._positions(nest, (UPCAST,), range(outs, len(nest.pieces))) for c in chunks]

    def _identities(self, nest: _Nest) -> list[int]:
        b = self.b
        out = []
        nest.partial = {key: (i, c.width) for i, (key, _, c) in enumerate(self._partial_positions(nest))}
        reduce_lane = nest.lane >= len(nest.r.stage.outs)
        for _, oc in self._out_positions(nest):
            for _, _, pc in self._partial_positions(nest):
                width = pc.width if reduce_lane else oc.width
                for red in nest.r.reductions:
                    values = get_combiner(red.combiner).identity(*red.dtypes)
                    out += [b.const(d, width, v) for d, v in zip(red.dtypes, values, strict=True)]
        return out

    def _reduce(self, nest: _Nest, loops: list[tuple[int, Piece, int]], k: int, accs: list[int]) -> list[int]:
        """Open the reduce loops from number k with the accumulators carried; returns the results."""
        b = self.b
        while k < len(loops) and loops[k][0] < len(nest.r.stage.outs):
            self._open_row(nest, loops[k][0], ({}, 0))   # an output loop of extent 1
            self._children(nest.r.stage.index, loops[k][2] + 1)
            accs = self._reduce(nest, loops, k + 1, accs)
            self._close_row(nest, loops[k][0])
            return accs
        if k == len(loops):
            return self._accumulate(nest, accs)
        a, _, depth = loops[k]
        row = loops[k][1].row
        pieces = nest.pieces[a]
        at = next(i for i, p in enumerate(pieces) if p.row == row)
        piece = pieces[at]

        def inside(values: list[int]) -> list[int]:
            self._children(nest.r.stage.index, depth + 1)
            return self._reduce(nest, loops, k + 1, values)

        def looped(start: int, stop: int, values: list[int]) -> list[int]:
            loop, carried = b.open(start, stop, piece.stride, tuple(values))
            self._open_row(nest, a, ({loop: 1}, 0))
            following = inside(carried)
            self._close_row(nest, a)
            out = b.close(loop, tuple(following))
            nest.memo.clear()
            return out

        split = self.partial is not None and self.partial[0] == a and at == 0
        inner = 1
        for p in pieces[at + 1:]:
            inner *= p.extent
        extent = self._left(nest, a, at)
        step = piece.stride
        whole, rest = divmod(extent, step)
        if split:
            assert self.partial is not None
            chunk, count = self.partial[1], self.partial[2]
            origin = b.mul(self.part, chunk)
            stop = b.alu("MIN", dtypes.index, 1, b.add(origin, b.index(chunk)), b.index(whole * step))
            accs = looped(origin, stop, accs)
            if rest:
                last = b.alu("CMPEQ", dtypes.bool, 1, self.part, b.index(count - 1))
                start = b.alu("WHERE", dtypes.index, 1, last, b.index(0), b.index(1))
                loop, carried = b.open(start, b.index(1), 1, tuple(accs))
                following = self._remainder(nest, a, at, whole * step, rest, lambda: inside(carried))
                accs = b.close(loop, tuple(following))
                nest.memo.clear()
            return accs
        if whole > 1:
            accs = looped(b.index(0), b.index(whole * step), accs)
        elif whole == 1:
            self._open_row(nest, a, ({}, 0))
            accs = inside(accs)
            self._close_row(nest, a)
        if rest:
            values = accs
            accs = self._remainder(nest, a, at, whole * step, rest, lambda: inside(values))
        return accs

    def _left(self, nest: _Nest, a: int, at: int) -> int:
        """Positions of a reduce axis that the rows from number `at` must cover."""
        pieces = nest.pieces[a]
        if all(p.extent == 1 for p in pieces[:at]):
            return nest.bounds[a]
        extent = 1
        for p in pieces[at:]:
            extent *= p.extent
        return extent

    def _remainder(self, nest: _Nest, a: int, at: int, start: int, rest: int, body: Callable[[], list[int]]) -> list[int]:
        """The last, shorter iteration of a reduce loop: the rows inside it are cut to the `rest` positions that are left."""
        pieces, bound = nest.pieces[a], nest.bounds[a]
        cut = []
        left, stride = rest, 1
        for p in reversed(pieces[at + 1:]):
            e = min(p.extent, left)
            cut.append(Piece(p.row, p.role, e, stride))
            stride *= e
            left = -(-left // e)
        cut.reverse()
        nest.pieces[a] = (*(p._replace(extent=1) for p in pieces[:at + 1]), *cut)
        nest.bounds[a] = rest
        lane_stride = nest.lane_stride
        if nest.lane == a:
            nest.lane_stride = next((p.stride for p in cut if p.row == nest.lane_row), lane_stride)
        self._open_row(nest, a, ({}, start))
        out = body()
        self._close_row(nest, a)
        nest.pieces[a], nest.bounds[a], nest.lane_stride = pieces, bound, lane_stride
        return out

    def _accumulate(self, nest: _Nest, accs: list[int]) -> list[int]:
        """All expanded positions of one innermost iteration into the accumulators, reduction-major."""
        b = self.b
        outs = len(nest.r.stage.outs)
        nest.memo.clear()
        accs = list(accs)
        tile = self._out_positions(nest)
        partial = nest.partial
        present = self._partial_positions(nest)
        reduce_lane = nest.lane >= outs
        components = sum(len(red.values) for red in nest.r.reductions)
        masks: dict[_Chunk, int] = {}
        reds = range(outs, len(nest.pieces))
        for _, unrolled in self._positions(nest, (UNROLL,), reds):
            for index, offsets, pc in present:
                more = dict(unrolled)
                for a, o in offsets.items():
                    more[a] = more.get(a, 0) + o
                slot = partial[index]
                full = slot[1]
                for t, (toff, oc) in enumerate(tile):
                    chunk = _Chunk(pc.offset, full, pc.active) if reduce_lane else oc
                    if not self._set_position(nest, toff, chunk, more):
                        continue
                    at = (t * len(partial) + slot[0]) * components
                    guard = self._guard(nest, reds)
                    if reduce_lane and nest.chunk.active < nest.chunk.width:
                        mask = masks.get(nest.chunk)
                        if mask is None:
                            mask = masks[nest.chunk] = self._prefix_mask(nest.chunk)
                        guard = mask if guard < 0 else b.alu("AND", dtypes.bool, nest.chunk.width, mask, guard)
                    for red in nest.r.reductions:
                        n = len(red.values)
                        accs[at:at + n] = self._combine_value(nest, red, accs[at:at + n], guard, chunk.width)
                        at += n
        return accs

    def _combine_value(self, nest: _Nest, red: Reduction, acc: list[int], guard: int, width: int) -> list[int]:
        b = self.b
        combiner = get_combiner(red.combiner)
        if red.combiner == "ADD" and guard < 0 and red.dtypes[0].is_float:
            node = nest.r.nodes[red.values[0]]
            if node.kind == "alu" and node.op == "MUL":
                x, y = self._eval(nest, node.src[0]), self._eval(nest, node.src[1])
                return [b.alu("MULACC", red.dtypes[0], width, x, y, acc[0])]
        values = [self._eval(nest, v) for v in red.values]
        if guard >= 0:
            neutral = combiner.identity(*red.dtypes)
            values = [b.alu("WHERE", d, width, guard, v, b.const(d, width, n)) for d, v, n in zip(red.dtypes, values, neutral, strict=True)]
        return list(combiner.combine(tuple(acc), tuple(values), self._alu_for(red.dtypes, width), nan=red.dtypes[0].is_float))

    def _alu_for(self, types: tuple[DType, ...], width: int) -> Callable[..., int]:
        b = self.b

        def alu(op: Ops, *args: int) -> int:
            dtype = dtypes.bool if op in (Ops.CMPLT, Ops.CMPLE, Ops.CMPEQ, Ops.CMPNE) else b.dtype[args[-1]]
            return b.alu(op.value, dtype, width, *args)
        return alu

    def _epilogue(self, nest: _Nest, accs: list[int], sink: Sink, values: bool) -> None:
        """Combine the partial results of each position and store the stage's value."""
        nest.memo.clear()
        tile = self._out_positions(nest)
        partial = nest.partial
        reduce_lane = nest.lane >= len(nest.r.stage.outs)
        components = sum(len(red.values) for red in nest.r.reductions)
        lane = nest.lane
        for t, (offsets, oc) in enumerate(tile):
            at = t * len(partial) * components
            done: dict[tuple[int, int], int] = {}
            first = 0
            for k, red in enumerate(nest.r.reductions):
                n = len(red.values)
                parts = [accs[at + p * components + first:at + p * components + first + n] for p in range(len(partial))]
                for c, v in enumerate(self._combine_all(red, parts, reduce_lane)):
                    done[k, c] = v
                first += n
            if reduce_lane:
                nest.lane = -1
            ok = self._set_position(nest, offsets, oc)
            if ok:
                nest.results = done
                sink(nest, self._eval(nest, nest.r.value) if values else -1)
            nest.lane = lane

    def _combine_all(self, red: Reduction, parts: list[list[int]], reduce_lane: bool) -> list[int]:
        """A tree over partial results, then across the lanes of those that are vectors on a reduce axis."""
        b = self.b
        combiner = get_combiner(red.combiner)
        nan = red.dtypes[0].is_float
        if len(parts) == 1 and b.lanes[parts[0][0]] == 1:
            return parts[0]
        by_width: dict[int, list[list[int]]] = {}
        for p in parts:
            by_width.setdefault(b.lanes[p[0]], []).append(p)
        scalars: list[list[int]] = []
        for width, group in by_width.items():
            alu = self._alu_for(red.dtypes, width)
            while len(group) > 1:
                group = [list(combiner.combine(tuple(group[i]), tuple(group[i + 1]), alu, nan=nan)) if i + 1 < len(group) else group[i]
                         for i in range(0, len(group), 2)]
            value = group[0]
            if reduce_lane:
                w = width
                while w > 2:
                    half = w // 2
                    low = [b.pure("SHUFFLE", b.dtype[v], half, (v, v), tuple(range(half))) for v in value]
                    high = [b.pure("SHUFFLE", b.dtype[v], half, (v, v), tuple(range(half, w))) for v in value]
                    value = list(combiner.combine(tuple(low), tuple(high), self._alu_for(red.dtypes, half), nan=nan))
                    w = half
                if w == 2:
                    low = [b.pure("EXTRACT", b.dtype[v], 1, (v,), 0) for v in value]
                    high = [b.pure("EXTRACT", b.dtype[v], 1, (v,), 1) for v in value]
                    value = list(combiner.combine(tuple(low), tuple(high), self._alu_for(red.dtypes, 1), nan=nan))
            scalars.append(value)
        while len(scalars) > 1:
            a, c = scalars.pop(), scalars.pop()
            scalars.append(list(combiner.combine(tuple(c), tuple(a), self._alu_for(red.dtypes, b.lanes[a[0]]), nan=nan)))
        return scalars[0]

    def _reduce_in_scratch(self, nest: _Nest, loops: list[tuple[int, Piece, int]], k: int, end: int, sink: Sink, values: bool) -> None:
        """Output loops inside reduce loops: the accumulators of all their iterations live in scratch.

            for k0: for n: acc += …      acc[…] = 0;  for k0: for n: acc[n] += …;  for n: store acc[n]
        """
        b = self.b
        outs = len(nest.r.stage.outs)
        inner = [loop for loop in loops[k:end] if loop[0] < outs]
        identities = self._identities(nest)
        # one slot of scratch per accumulator, over the iterations of the inner loops
        counts = [piece.extent for _, piece, _ in inner]
        total = 1
        for n in counts:
            total *= n
        offsets = []
        for v in identities:
            nbytes = b.dtype[v].itemsize * b.lanes[v]
            offsets.append((self.scratch, nbytes))
            self.scratch += -(-(nbytes * total + _SLACK) // 64) * 64
        iteration: dict[int, int] = {}

        def slot(number: int, dtype: DType, lanes: int) -> tuple[int, int]:
            pointer = b.pure("SCRATCH", dtype, 1, (), offsets[number][0])
            terms: Terms = {}
            scale = 1
            for j in range(len(inner) - 1, -1, -1):
                if j in iteration:
                    terms[iteration[j]] = scale
                scale *= inner[j][1].extent
            return pointer, self._ssa(({v: c * lanes for v, c in terms.items()}, 0))

        def over_outputs(j: int, body: Callable[[], None]) -> None:
            if j == len(inner):
                body()
                return
            a, piece, depth = inner[j]

            def go() -> None:
                self._children(nest.r.stage.index, depth + 1)
                over_outputs(j + 1, body)
            self._counted(nest, a, piece, iteration, j, go)

        def write(accs: list[int]) -> None:
            for i, v in enumerate(accs):
                pointer, at = slot(i, b.dtype[v], b.lanes[v])
                b.store("STORE", b.dtype[v], b.lanes[v], (pointer, at, v), (0, False))

        def read() -> list[int]:
            out = []
            for i, v in enumerate(identities):
                pointer, at = slot(i, b.dtype[v], b.lanes[v])
                out.append(b.load("LOAD", b.dtype[v], b.lanes[v], (pointer, at), 0, ordered=True))
            return out

        def main(j: int) -> None:
            if j == end:
                write(self._reduce(nest, loops, end, read()))
                return
            a, piece, depth = loops[j]
            if a < outs:
                number = inner.index(loops[j])

                def go() -> None:
                    self._children(nest.r.stage.index, depth + 1)
                    main(j + 1)
                self._counted(nest, a, piece, iteration, number, go)
                return
            if self.partial is not None:
                raise KernelOptError("a reduction cut over cores keeps its output loops outside the reduce loops")
            pieces = nest.pieces[a]
            at = next(i for i, p in enumerate(pieces) if p.row == piece.row)
            whole, rest = divmod(self._left(nest, a, at), pieces[at].stride)

            def once() -> None:
                self._children(nest.r.stage.index, depth + 1)
                main(j + 1)
            if whole:
                self._counted_reduce(nest, a, pieces[at], whole, once)
            if rest:
                def tail() -> list[int]:
                    once()
                    return []
                self._remainder(nest, a, at, whole * pieces[at].stride, rest, tail)

        over_outputs(0, lambda: write(identities))
        main(k)
        over_outputs(0, lambda: self._epilogue(nest, read(), sink, values))

    def _counted(self, nest: _Nest, a: int, piece: Piece, iteration: dict[int, int], number: int, body: Callable[[], None]) -> None:
        """An output loop that counts iterations by one, for accumulators in scratch."""
        b = self.b
        if piece.extent == 1:
            self._open_row(nest, a, ({}, 0))
            body()
            self._close_row(nest, a)
            return
        loop, _ = b.open(b.index(0), b.index(piece.extent), 1)
        iteration[number] = loop
        self._open_row(nest, a, ({b.mul(loop, piece.stride): 1}, 0))
        body()
        self._close_row(nest, a)
        del iteration[number]
        b.close(loop)
        nest.memo.clear()

    def _counted_reduce(self, nest: _Nest, a: int, piece: Piece, whole: int, body: Callable[[], None]) -> None:
        b = self.b
        loop, _ = b.open(b.index(0), b.index(whole * piece.stride), piece.stride)
        self._open_row(nest, a, ({loop: 1}, 0))
        body()
        self._close_row(nest, a)
        b.close(loop)
        nest.memo.clear()

    # -- values --------------------------------------------------------------------------------------------
    def _eval(self, nest: _Nest, n: int) -> int:
        """The value of a node at the current position: a scalar where no lane depends on it, else a vector."""
        node = nest.r.nodes[n]
        off = nest.offsets
        deps = node.deps
        if nest.lane in deps:
            key: Any = (n, nest.chunk.width, nest.chunk.active, *[off[d] for d in deps])
        else:
            key = (n, *[off[d] for d in deps])
        found = nest.memo.get(key)
        if found is None:
            found = nest.memo[key] = _EVAL[node.kind](self, nest, node)
        return found

    def _eval_const(self, nest: _Nest, node: Node) -> int:
        return self.b.const(node.dtype, 1, node.arg)  # type: ignore[arg-type]

    def _eval_axis(self, nest: _Nest, node: Node) -> int:
        a: int = node.arg  # type: ignore[assignment]
        b = self.b
        terms, const = self._axis(nest, a)
        value = self._ssa((terms, const + nest.offsets[a]))
        if a != nest.lane:
            return value
        w = nest.chunk.width
        return b.alu("ADD", dtypes.index, w, b.splat(value, w), b.vconst(dtypes.index, tuple(i * nest.lane_stride for i in range(w))))

    def _eval_alu(self, nest: _Nest, node: Node) -> int:
        b = self.b
        args = [self._eval(nest, s) for s in node.src]
        lanes = max(b.lanes[a] for a in args)
        op = node.op
        if op in _TRANSCENDENTAL:
            return math.expand(b, _TRANSCENDENTAL[op], node.dtype, lanes, *[b.splat(a, lanes) for a in args])
        if op == "RECIPROCAL":
            return b.alu("FDIV", node.dtype, lanes, b.const(node.dtype, lanes, 1), args[0])
        return b.alu(op, node.dtype, lanes, *args)

    def _eval_cast(self, nest: _Nest, node: Node) -> int:
        return self.b.cast(node.dtype, self._eval(nest, node.src[0]))

    def _eval_bitcast(self, nest: _Nest, node: Node) -> int:
        return self.b.bitcast(node.dtype, self._eval(nest, node.src[0]))

    def _eval_reduce(self, nest: _Nest, node: Node) -> int:
        return nest.results[node.arg]  # type: ignore[index]

    def _eval_temp(self, nest: _Nest, node: Node) -> int:
        assert node.linear is not None
        pointer = self.b.pure("TEMP", node.dtype, 1, (), node.arg)
        return self._load(nest, node.dtype, pointer, node.linear, -1, -1, 0, False)

    def _eval_load(self, nest: _Nest, node: Node) -> int:
        b = self.b
        slot: int = node.arg  # type: ignore[assignment]
        assert node.linear is not None
        pointer = b.pure("ARG", self.kernel.params[slot].dtype, 1, (), slot)
        gate = self._eval(nest, node.gate) if node.gate >= 0 else -1
        alt = self._eval(nest, node.alt) if node.gate >= 0 else b.const(node.dtype, 1, 0)
        if gate >= 0 and b.known(gate) is not None:
            if not b.known(gate):
                return alt
            gate = -1
        guard = self._guard(nest, node.deps)
        if guard >= 0:
            gate = guard if gate < 0 else b.alu("AND", dtypes.bool, max(b.lanes[gate], b.lanes[guard]), gate, guard)
        return self._load(nest, node.dtype, pointer, node.linear, gate, alt, 0, slot in self.kernel.written)

    def _guard(self, nest: _Nest, axes: Any) -> int:
        """The condition that the given local axes are inside their extents, or -1 where that is certain."""
        unsafe = self.low.unsafe
        result = -1
        for a in axes:
            limit = unsafe.get(nest.r.axes[a])
            if limit is None:
                continue
            b = self.b
            terms, const = self._axis(nest, a)
            value = self._ssa((terms, const + nest.offsets[a]))
            if a == nest.lane:
                w = nest.chunk.width
                value = b.alu("ADD", dtypes.index, w, b.splat(value, w), b.vconst(dtypes.index, tuple(i * nest.lane_stride for i in range(w))))
            lanes = b.lanes[value]
            inside = b.alu("CMPLT", dtypes.bool, lanes, value, b.const(dtypes.index, lanes, limit))
            result = inside if result < 0 else b.alu("AND", dtypes.bool, max(lanes, b.lanes[result]), result, inside)
        if result >= 0 and self.b.known(result) is True:
            return -1
        return result

    def _eval_read(self, nest: _Nest, node: Node) -> int:
        s: int = node.arg  # type: ignore[assignment]
        staged = self._staged(s)
        if staged.layout is None:
            return staged.scalar
        cached = nest.linear.get((s, node.dims))
        if cached is None:
            cached = nest.linear[s, node.dims] = self._relative(nest, staged, node.dims)
        linear, base = cached
        gate = alt = -1
        if staged.floor == 0 and staged.guarded and s in self.low.temp_of:
            gate, alt = self._guard(nest, node.deps), self.b.const(node.dtype, 1, 0)
        return self._load(nest, node.dtype, staged.pointer, linear, gate, alt, staged.floor, False, base, slack=True)

    def _relative(self, nest: _Nest, staged: Staged, dims: tuple[Linear, ...]) -> tuple[Linear, Lin]:
        """Coordinates in a staged value → (element number over local axes, start)."""
        layout = staged.layout
        assert layout is not None
        coefs: dict[int, int] = {}
        atoms: dict[int, int] = {}
        start: Lin = ({}, 0)
        for i, lin in enumerate(dims):
            stride = layout.strides[i]
            here: Lin = ({}, lin.const)
            for a, c in lin.coefs:
                here = _add(here, self._axis(nest, a), c)
                coefs[a] = coefs.get(a, 0) + c * stride
            here = _add(here, staged.base[i], -1)
            if i == layout.tiled:
                # whole tiles: every coefficient is a multiple of the tile, expanded positions lie inside one
                here = ({v: c * layout.outer // layout.tile for v, c in here[0].items()},
                        here[1] // layout.tile * layout.outer + here[1] % layout.tile)
                start = _add(start, here, 1)
            else:
                start = _add(start, here, stride)
            for n, c in lin.atoms:
                atoms[n] = atoms.get(n, 0) + c * stride
        linear = Linear(tuple(sorted((a, c) for a, c in coefs.items() if c)), 0, tuple(sorted((n, c) for n, c in atoms.items() if c)))
        return linear, start

    def _load(self, nest: _Nest, dtype: DType, pointer: int, linear: Linear, gate: int, alt: int, floor: int, ordered: bool,
              base: Lin | None = None, slack: bool = False) -> int:
        """Load at the current position. `slack`: memory behind the area may be read, so partial vectors need no mask."""
        b = self.b
        start, const, lane, vector = self._address(nest, linear, base)
        w = nest.chunk.width
        gate_lanes = b.lanes[gate] if gate >= 0 else 1
        lanes = w if (lane or vector >= 0 or gate_lanes > 1) else 1
        if lanes > 1 and nest.chunk.active < w and not (slack and vector < 0):
            mask = self._prefix_mask(nest.chunk)
            gate = mask if gate < 0 else b.alu("AND", dtypes.bool, w, mask, gate)
            if alt < 0:
                alt = b.const(dtype, 1, 0)
        extra: tuple[int, ...] = ()
        if gate >= 0:
            extra = (b.splat(gate, lanes), b.splat(alt, lanes))
        if vector >= 0:
            index = b.alu("ADD", dtypes.index, lanes, b.splat(start, lanes), vector)
            return b.load("GATHER", dtype, lanes, (pointer, index, *extra), const, floor, ordered)
        if lanes == 1 or lane == 1:
            return b.load("LOAD", dtype, lanes, (pointer, start, *extra), const, floor, ordered)
        return b.load("LOADS", dtype, lanes, (pointer, start, *extra), (const, lane), floor, ordered)

    def _address(self, nest: _Nest, linear: Linear, base: Lin | None) -> tuple[int, int, int, int]:
        """(index value, constant, elements from lane to lane, vector index or -1) of an access at the current position.

        `base` given: the start of the local axes is already in it (staged values)."""
        b = self.b
        off = nest.offsets
        const = linear.const
        key = (linear, base is None)
        found = nest.linear.get(key)
        if found is None:
            if base is None:
                lin: Lin = ({}, 0)
                for a, c in linear.coefs:
                    lin = _add(lin, self._axis(nest, a), c)
            else:
                lin = base
            found = nest.linear[key] = (self._ssa((lin[0], 0)), lin[1])
        start, shift = found
        const += shift
        lane = 0
        for a, c in linear.coefs:
            const += c * off[a]
            if a == nest.lane:
                lane = c * nest.lane_stride
        vector = -1
        for n, c in linear.atoms:
            value = self._eval(nest, n)
            known = b.known(value)
            if known is not None:
                const += c * known
            elif b.lanes[value] == 1:
                start = b.add(start, b.mul(value, c))
            else:
                w = b.lanes[value]
                term = b.alu("MUL", dtypes.index, w, value, b.const(dtypes.index, w, c)) if c != 1 else value
                vector = term if vector < 0 else b.alu("ADD", dtypes.index, w, vector, term)
        if vector >= 0 and lane:
            w = b.lanes[vector]
            vector = b.alu("ADD", dtypes.index, w, vector, b.vconst(dtypes.index, tuple(i * lane for i in range(w))))
            lane = 0
        return start, const, lane, vector

    def _prefix_mask(self, chunk: _Chunk) -> int:
        return self.b.vconst(dtypes.bool, tuple(i < chunk.active for i in range(chunk.width)))

    # -- stores --------------------------------------------------------------------------------------------
    def _store_linear(self, nest: _Nest, value: int, pointer: int, linear: Linear, stream: bool, extra: Terms | None = None) -> None:
        """Store to a flat index over the local axes."""
        b = self.b
        start, const, lane, vector = self._address(nest, linear, None)
        for v, c in (extra or {}).items():
            start = b.add(start, b.mul(v, c))
        self._store(nest, value, pointer, start, const, lane, vector, stream)

    def _store_layout(self, nest: _Nest, value: int, pointer: int, layout: Layout, base: list[Lin]) -> None:
        """Store into a staged area."""
        lin: Lin = ({}, 0)
        const = lane = 0
        for i in range(len(layout.extents)):
            terms, c = _add(self._axis(nest, i), base[i], -1)
            if i == layout.tiled:
                lin = _add(lin, ({v: k * layout.outer // layout.tile for v, k in terms.items()}, 0), 1)
                position = c + nest.offsets[i]
                const += position // layout.tile * layout.outer + position % layout.tile
            else:
                lin = _add(lin, (terms, c), layout.strides[i])
                const += layout.strides[i] * nest.offsets[i]
            if i == nest.lane:
                lane = layout.strides[i] * nest.lane_stride
        start = self._ssa((lin[0], 0))
        self._store(nest, value, pointer, start, const + lin[1], lane, -1, False)

    def _store(self, nest: _Nest, value: int, pointer: int, start: int, const: int, lane: int, vector: int, stream: bool) -> None:
        b = self.b
        w = nest.chunk.width if nest.lane >= 0 else 1
        outs = range(len(nest.r.stage.outs))
        guard = self._guard(nest, outs) if pointer_is_output(b, pointer) else -1
        lanes = w if (lane or vector >= 0) else 1
        dtype = b.dtype[pointer]
        mask = guard
        if lanes > 1 and nest.chunk.active < w:
            prefix = self._prefix_mask(nest.chunk)
            mask = prefix if mask < 0 else b.alu("AND", dtypes.bool, w, prefix, mask)
        known = b.known(mask) if mask >= 0 else True
        if known is False:
            return
        extra = () if known is True else (b.splat(mask, lanes),)
        if vector >= 0:
            index = b.alu("ADD", dtypes.index, lanes, b.splat(start, lanes), vector)
            b.store("SCATTER", dtype, lanes, (pointer, index, b.splat(value, lanes), *extra), const)
        elif lanes == 1 or lane == 1:
            b.store("STORE", dtype, lanes, (pointer, start, b.splat(value, lanes), *extra), (const, stream and lanes > 1 and not extra))
        else:
            b.store("STORES", dtype, lanes, (pointer, start, b.splat(value, lanes), *extra), (const, lane))


def pointer_is_output(b: Builder, pointer: int) -> bool:
    """Scratch has room for positions beyond an extent; arguments and temporaries have not."""
    return b.op[pointer] != "SCRATCH"


def _sum(values: list[Lin]) -> Lin:
    total: Lin = ({}, 0)
    for v in values:
        total = _add(total, v, 1)
    return total


def _add(a: Lin, b: Lin, k: int) -> Lin:
    """a + k·b; terms that cancel vanish."""
    terms = dict(a[0])
    for v, c in b[0].items():
        n = terms.get(v, 0) + k * c
        if n:
            terms[v] = n
        else:
            terms.pop(v, None)
    return terms, a[1] + k * b[1]


_EVAL: dict[str, Callable[[_Phase, _Nest, Node], int]] = {
    "const": _Phase._eval_const, "axis": _Phase._eval_axis, "alu": _Phase._eval_alu, "cast": _Phase._eval_cast,
    "bitcast": _Phase._eval_bitcast, "load": _Phase._eval_load, "read": _Phase._eval_read, "reduce": _Phase._eval_reduce,
    "temp": _Phase._eval_temp,
}
