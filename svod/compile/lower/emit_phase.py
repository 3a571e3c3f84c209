"""One phase: its outermost loops become begin…end, the stages that live in its nest are computed at their points."""
from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from svod.compile.lower.emit_groups import GroupThreads
from svod.compile.lower.emit_reduce import Reductions, Sink
from svod.compile.lower.emit_state import (
    COPY_LANES,
    COPY_ROWS,
    MASKED_ROW_VECTORS,
    MAX_TILE_VECTORS,
    NO_POINT,
    Lin,
    Nest,
    Staged,
    add_lins,
    copy_step,
    exact_step,
    sum_lins,
)
from svod.compile.lower.prefetch import add_prefetches
from svod.compile.lower.program import Count, Instr
from svod.compile.lower.transpose import transpose_squares
from svod.core.ir.dtype import dtypes
from svod.core.ir.symbolic import linear
from svod.core.ir.uop import Ops
from svod.core.kernel.groups import group_of
from svod.core.kernel.kernel import Linear, Node, Reduction, ResolvedStage, Stage
from svod.core.kernel.layout import Layout, is_exact
from svod.core.kernel.non_temporal import aligns_rows, leaves_tail, stores_whole_vectors
from svod.core.kernel.placement import EmittedLoop, fit, lane_row
from svod.core.kernel.scheduler import LOOP, UNROLL, UPCAST

MIN_ITERATIONS = 64             # a phase offers at least this many iterations per core, so that cores and slices have something to share

ALIGNED = 64                    # a step that leaves alone what is known of the alignment of addresses


class Spec(NamedTuple):
    """What a phase's launch needs, before its symbol is known."""

    extent: int
    threads: int
    scratch: int
    once: bool
    counts: tuple[Count, ...] = ()
    block: int = 1
    shared: int = 0


Emitted = tuple[Spec, tuple[Instr, ...]]


class Phase(Reductions):
    """Emits one phase."""

    # -- kinds of phases -------------------------------------------------------------------------------
    def emit_output(self, r: ResolvedStage) -> Emitted:
        assert r.store is not None
        nest = self._root_nest(r)
        store, slot = r.store, r.store_slot
        pointer = self.b.pure("ARG", self.kernel.params[slot].dtype, 1, (), slot)
        self.aligns = not self.low.on_grid and aligns_rows(self.state, r, nest.pieces, nest.lane, nest.lane_row)
        stream = self.state.stream and not self.low.on_grid and stores_whole_vectors(self.state, r, nest.pieces, nest.lane, nest.lane_row)
        self.tail = stream and leaves_tail(self.state, r, nest.pieces, nest.lane, nest.lane_row)
        return self._launch(nest, lambda n, v: self._store_linear(n, v, pointer, store, stream), self.low.threads, False)

    def emit_temp(self, r: ResolvedStage, temp: tuple[int, Layout]) -> Emitted:
        index, layout = temp
        nest = self._root_nest(r)
        once = self.low.once(r.stage.index)
        threads = self.state.target.threads if once and not self.low.on_grid else self.low.threads
        sink = self._copy_sink(r.stage.index, ("TEMP", index), layout, [({}, 0)] * len(layout.extents))
        return self._launch(nest, sink, threads, once)

    def emit_partial(self, r: ResolvedStage, axis: int, chunk: int, count: int, temps: list[list[int]], flat: Linear,
                     total: int) -> Emitted:
        nest = self._root_nest(r)
        self.partial = (r.axes.index(axis), chunk, count)
        pointers = [[self.b.pure("TEMP", d, 1, (), t) for t, d in zip(group, red.dtypes, strict=True)]
                    for group, red in zip(temps, r.reductions, strict=True)]

        def sink(n: Nest, _: int) -> None:
            for k, group in enumerate(pointers):
                for c, pointer in enumerate(group):
                    self._store_linear(n, n.results[k, c], pointer, flat, False, extra={self.part: total})
        return self._launch(nest, sink, self.low.threads, False, values=False)

    def emit_combine(self, r: ResolvedStage, count: int, temps: list[list[int]], strides: list[int], total: int) -> Emitted:
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
        combined = ResolvedStage(r.stage, (*r.stage.outs, -1), nodes, reductions, r.value, r.store, r.store_slot,
                                 r.reads, r.after_reduce, r.lanes_bytes)
        extents = [self.kernel.axes[a].extent for a in r.stage.outs]
        order = tuple(range(part))
        lane = next((i for i in reversed(order) if r.store.coef(i) == 1), part - 1)
        width = self._width(r)
        pieces = self._derived_pieces(combined, extents, (*(i for i in order if i != lane), *((lane,) if lane >= 0 else ())), width,
                                      exact=self.low.on_grid)
        if self.kernel.written:     # nothing is computed twice in place
            for a, e, found in zip(r.stage.outs, extents, pieces, strict=True):
                if not is_exact(found, e):
                    self.low.fixed.add(a)
                    self.low.unsafe[a] = e
        pieces.append((EmittedLoop(-1, UNROLL if count <= 8 else LOOP, count, 1),))
        nest = Nest(combined, pieces, [*extents, count], [({}, 0)] * (part + 1), lane, COPY_LANES, width)
        store, slot = r.store, r.store_slot
        pointer = self.b.pure("ARG", self.kernel.params[slot].dtype, 1, (), slot)
        threads = self.low.threads if total >= 1 << 14 else 1
        return self._launch(nest, lambda n, v: self._store_linear(n, v, pointer, store, False), threads, False)

    def _width(self, r: ResolvedStage) -> int:
        return max(1, self.state.target.vector_bytes // r.lanes_bytes)

    # -- nests -----------------------------------------------------------------------------------------
    def _root_nest(self, r: ResolvedStage) -> Nest:
        s = r.stage.index
        width = self._width(r)
        if s in self.low.derived:
            layout = self.low.temp_of[s][1]
            extents = list(layout.extents)
            return self._derived_nest(r, extents, [({}, 0)] * len(extents), layout, width, exact=self.low.on_grid)
        self.group = GroupThreads(self.b, self.state, group_of(self.state, self.low.plan, s))
        extents = [self.low.spanned(s, a) for a in r.axes]
        return self._nest(r, extents, [({}, 0)] * len(extents), width)

    def _nest(self, r: ResolvedStage, extents: list[int], base: list[Lin], width: int) -> Nest:
        """The loops of a stage that are rows of the state, over the part that a thread computes."""
        pieces = [fit(self.state, self.state.axis_rows[a], e) for a, e in zip(r.axes, extents, strict=True)]
        self.group.bind(r, pieces, extents, base)
        return Nest(r, pieces, extents, base, self.low.lane[r.stage.index], lane_row(self.state, r), width)

    def _derived_nest(self, r: ResolvedStage, extents: list[int], base: list[Lin], layout: Layout, width: int,
                      exact: bool = False) -> Nest:
        """The loops of a copy over a box of its stage."""
        if r.stage.index in self.low.packed:
            return self._packed_nest(r, extents, base, layout)
        pieces = self._derived_pieces(r, extents, layout.order, width, layout.tile if layout.tiled >= 0 else 0, exact)
        return Nest(r, pieces, extents, base, layout.order[-1] if layout.order else -1, COPY_LANES, width)

    def _derived_pieces(self, r: ResolvedStage, extents: list[int], order: tuple[int, ...], width: int,
                        tile: int = 0, exact: bool = False) -> list[tuple[EmittedLoop, ...]]:
        """Loops of a copy: the innermost dim in vectors, a few of them side by side, the others as loops. A row of what is padded is
        straight-line code: its masks are constants then, and most of them go away. `exact`: no position is computed twice."""
        pieces: list[tuple[EmittedLoop, ...]] = [(EmittedLoop(-1, LOOP, e, 1),) for e in extents]
        if not order:
            return pieces
        inner = order[-1]
        e = extents[inner]
        n = tile or (exact_step(e, width) if exact else copy_step(e, width))
        if not tile and e <= MASKED_ROW_VECTORS * width and any(x.gate >= 0 and inner in r.nodes[x.gate].deps for x in r.nodes):
            n = e
        pieces[inner] = (EmittedLoop(-1, LOOP, -(-e // n), n), EmittedLoop(COPY_LANES, UPCAST, n, 1))
        vectors = -(-n // width)
        square = min(n, width)
        source = self._source_dim(r, inner)
        if source >= 0 and square >= 4 and square & (square - 1) == 0 and n % square == 0 and extents[source] >= square \
                and not (exact and extents[source] % square):
            # the source is contiguous along another dim: squares, which become transpositions in registers
            pieces[source] = (EmittedLoop(-1, LOOP, -(-extents[source] // square), square), EmittedLoop(COPY_ROWS, UPCAST, square, 1))
            return pieces
        if len(order) > 1 and vectors < MAX_TILE_VECTORS and n == e:
            outer = order[-2]
            k = next((k for k in (8, 4, 2) if extents[outer] % k == 0 and k * vectors <= 8), 1)
            if k > 1:
                pieces[outer] = (EmittedLoop(-1, LOOP, extents[outer] // k, k), EmittedLoop(COPY_ROWS, UPCAST, k, 1))
        return pieces

    def _source_dim(self, r: ResolvedStage, inner: int) -> int:
        """The dim along which a copy reads memory contiguously, if that is not its vector dim, else -1."""
        loads = [n.linear for n in r.nodes if n.kind == "load" and n.linear is not None and n.gate < 0 and not n.linear.atoms]
        if len(loads) != 1 or loads[0].coef(inner) in (0, 1):
            return -1
        return next((d for d in range(len(r.stage.outs)) if d != inner and loads[0].coef(d) == 1), -1)

    def _loops(self, nest: Nest) -> list[tuple[int, EmittedLoop, int]]:
        """(local axis, piece, depth in the state's order) of a stage's loops, outermost first."""
        r = nest.r
        if r.stage.index in self.low.derived or (r.axes and r.axes[-1] == -1):
            order = self.low.orders.get(r.stage.index, tuple(range(len(r.stage.outs))))
            out = [(a, nest.pieces[a][0], NO_POINT) for a in order]
            return out + [(a, nest.pieces[a][0], NO_POINT) for a in range(len(r.stage.outs), len(r.axes)) if nest.pieces[a][0].role == LOOP]
        local = {axis: i for i, axis in enumerate(r.axes)}
        out = []
        for depth, row in enumerate(self.state.order[r.stage.index]):
            a = local[self.state.rows[row].axis]
            out.append((a, next(p for p in nest.pieces[a] if p.row == row), depth))
        return out

    # -- launching ---------------------------------------------------------------------------------------
    def _launch(self, nest: Nest, sink: Sink, threads: int, once: bool, values: bool = True) -> Emitted:
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
                if a >= outs:
                    break
                if not self.low.on_grid and prefix and (extent >= MIN_ITERATIONS * threads
                                                        or (prefix == len(loops) - 1 and extent >= 4 * threads)):
                    break   # enough to share; the innermost loop stays a loop
                extent *= piece.extent
                prefix += 1
                if (s, depth + 1) in self.low.plan.children:
                    break
        else:
            extent = self.partial[2]
        self.nests[s] = nest
        counts = self._counts(nest, loops[:prefix])
        if self.tail:
            last = b.index(extent - 1)
            nest.aligned = True
            self._iterations(nest, loops, prefix, counts, begin, b.alu("MIN", dtypes.index, 1, end, last), sink, values)
            nest.aligned = False
            self._forget_values()
            begin = b.alu("MAX", dtypes.index, 1, begin, last)
        self._iterations(nest, loops, prefix, counts, begin, end, sink, values)
        code = tuple(transpose_squares(list(b.finish()), ragged=self.state.target.vector_bytes == 64))
        code = add_prefetches(code, dict(self.state.prefetch))
        variable = () if all(c.is_constant for c in counts) else counts
        return Spec(extent, min(threads, extent) if threads > 1 else 1, self.scratch, once, variable,
                    self.group.group.threads, self.group.shared), code

    def _iterations(self, nest: Nest, loops: list[tuple[int, EmittedLoop, int]], prefix: int, counts: tuple[Count, ...], begin: int,
                    end: int, sink: Sink, values: bool) -> None:
        """Iterations `begin` to `end` of a launch that is made of the `prefix` outermost loops."""
        b, s = self.b, nest.r.stage.index
        i, _ = b.open(begin, end, 1)
        if self.partial is not None:
            self.part = i
        values_of: list[int] = []
        rest = i
        for k in range(prefix - 1, -1, -1):
            if k == 0:
                values_of.append(rest)
            else:
                e = b.index(loops[k][1].extent) if counts[k].is_constant else self._count(nest, *loops[k][:2])
                values_of.append(b.alu("MOD", dtypes.index, 1, rest, e))
                rest = b.alu("IDIV", dtypes.index, 1, rest, e)
        values_of.reverse()

        def body(inside: int, parts: dict[int, int], latest: dict[int, int]) -> None:
            done: set[int] = set()
            for (a, piece, depth), v in zip(loops[:prefix], values_of, strict=True):
                start: Lin = ({b.mul(v, piece.stride): 1}, 0) if piece.extent > 1 else ({}, 0)
                if inside >= 0 and self._bound(nest, a) is not None:
                    start = add_lins(start, ({inside: 1}, 0), 1)
                if a in parts and a not in done:
                    start = add_lins(start, ({parts[a]: 1}, 0), 1)
                    done.add(a)
                if a in latest:
                    start = ({b.alu("MIN", dtypes.index, 1, self._ssa(start), latest[a]): 1}, 0)
                self._open_row(nest, a, start)
                self._children(s, depth + 1)
            self._walk(nest, loops, prefix, sink, values)
            for a, _, _ in loops[:prefix]:
                self._close_row(nest, a)
        self._where_inside(nest, loops[:prefix], values_of, body)
        b.close(i)

    def _counts(self, nest: Nest, loops: list[tuple[int, EmittedLoop, int]]) -> tuple[Count, ...]:
        """How often the loops that a launch is made of run."""
        if self.partial is not None:
            return (Count((), self.partial[2], 1, self.partial[2]),)
        found = []
        seen: set[int] = set()
        for a, piece, _ in loops:
            bound = self._bound(nest, a)
            count = Count((), piece.extent, 1, piece.extent)
            if bound is not None and a not in seen and not nest.base[a][0]:
                terms, const = linear(bound)
                if all(v.op is Ops.DEFINE_VAR for v in terms):
                    names = tuple(sorted((v.arg[0], k) for v, k in terms.items()))
                    count = Count(names, const - nest.base[a][1], piece.stride, piece.extent)
            seen.add(a)
            found.append(count)
        return tuple(found)

    def _where_inside(self, nest: Nest, loops: list[tuple[int, EmittedLoop, int]], values_of: list[int],
                      body: Callable[[int, dict[int, int], dict[int, int]], None]) -> None:
        """`body` for one iteration of a launch: where extents depend on variables, without guards if all that the iteration covers is
        inside, part by part if only a part is. It is given the index of the loop, of at most one iteration, that the condition is: an
        index that is 0, and without which nothing of the iteration is to be computed; and per axis the first position of the part, or
        the last one at which a whole tile starts, for those that are moved back to it."""
        b = self.b
        at: dict[int, Lin] = {}
        for (a, piece, _), v in zip(loops, values_of, strict=True):
            if self._bound(nest, a) is not None:
                start: Lin = ({b.mul(v, piece.stride): 1}, 0) if piece.extent > 1 else ({}, 0)
                at[a] = add_lins(at.get(a, nest.base[a]), start, 1)
        if not at:
            body(-1, {}, {})
            return
        some = all_in = -1
        whole = [a for a in at if self._is_last(nest, a, sum(other == a for other, _, _ in loops))]
        left = {a: b.alu("SUB", dtypes.index, 1, self._limit(nest, a), self._ssa(here)) for a, here in at.items()}
        latest: dict[int, int] = {}
        for a in at:
            room = left[a]
            if a in whole and self._moves_back(nest, a):
                room = b.alu("SUB", dtypes.index, 1, self._limit(nest, a), self._ssa(nest.base[a]))
                latest[a] = b.alu("SUB", dtypes.index, 1, room, b.index(self._reach(nest, a)))
            for reach, wanted in ((1, True), (self._reach(nest, a), a in whole)):
                if wanted:
                    inside = b.alu("CMPLE", dtypes.bool, 1, b.index(reach), left[a] if reach == 1 else room)
                    if reach == 1:
                        some = inside if some < 0 else b.alu("AND", dtypes.bool, 1, some, inside)
                    all_in = inside if all_in < 0 else b.alu("AND", dtypes.bool, 1, all_in, inside)

        def once(condition: int, emit: Callable[[int], None]) -> None:
            loop, _ = b.open(b.index(0), b.alu("WHERE", dtypes.index, 1, condition, b.index(1), b.index(0)), ALIGNED)
            emit(loop)
            b.close(loop)
            self._forget_values()

        def in_parts(inside: int, axes: list[int], parts: dict[int, int]) -> None:
            if not axes:
                body(inside, parts, {})
                return
            a = axes[0]
            rest = b.alu("MIN", dtypes.index, 1, b.index(self._reach(nest, a)), left[a])
            for step, condition in self._tail_parts(nest, a, rest):
                loop, _ = b.open(b.index(0), rest if condition < 0 else b.alu("WHERE", dtypes.index, 1, condition, rest, b.index(0)), step)
                with self._narrowed(nest, a, step):
                    in_parts(inside, axes[1:], {**parts, a: loop})
                b.close(loop)
                self._forget_values()
        nest.safe.update(whole)
        once(all_in, lambda inside: body(inside, {}, latest))
        nest.safe.difference_update(whole)
        cut = [a for a in whole if self._reach(nest, a) > 1]
        if cut:
            narrow = [a for a in cut if self._tail_step(nest, a) < self._reach(nest, a)]
            single = [a for a in whole if a not in cut]
            nest.safe.update(single)
            once(b.alu("AND", dtypes.bool, 1, some, b.alu("NOT", dtypes.bool, 1, all_in)), lambda inside: in_parts(inside, narrow, {}))
            nest.safe.difference_update(single)

    def _forget_values(self) -> None:
        """What was computed in a loop is not there behind it."""
        for n in self.nests.values():
            n.memo.clear()
            n.linear.clear()

    def _aligned_row(self, nest: Nest, a: int, piece: EmittedLoop, body: Callable[[], Any]) -> None:
        """The loop over a row of the output (`aligns_rows`): a vector up to the first multiple of its size, tiles, and vectors for what is
        left, the last of them moved back.

            for j in 0, 64 … n: y[i, j:j+64]   →   s = -(i*n) % 16;  if s: y[i, 0:16];  for j in s, s+64 … n-64: y[i, j:j+64];
                                                   for j in j, j+16 … n: y[i, j:j+16]
        """
        b, store, extent, tile, width = self.b, nest.r.store, nest.bounds[a], piece.stride, nest.width
        assert store is not None
        self._set_position(nest, {}, nest.chunk)
        start, const, _, _ = self._address(nest, store, None)
        past = b.alu("SUB", dtypes.index, 1, b.index(-const % width), start)
        first = b.alu("MOD", dtypes.index, 1, past, b.index(width))
        tiles = b.alu("IDIV", dtypes.index, 1, b.alu("SUB", dtypes.index, 1, b.index(extent), first), b.index(tile))
        rest = b.add(first, b.mul(tiles, tile))

        with self._narrowed(nest, a, width):
            self._loop_between(nest, a, width, b.index(0), first, body)
        nest.aligned = True
        self._loop_between(nest, a, tile, first, rest, body)
        nest.aligned = False
        with self._narrowed(nest, a, width):
            self._loop_between(nest, a, width, rest, b.index(extent), body)

    def _walk(self, nest: Nest, loops: list[tuple[int, EmittedLoop, int]], k: int, sink: Sink, values: bool) -> None:
        """Open the output loops from number k, then reduce, then store."""
        outs = len(nest.r.stage.outs)
        if not nest.r.reductions:
            if k < len(loops):
                a, piece, _ = loops[k]
                loop = self._aligned_row if self.aligns and nest.r.stage.is_output and a == nest.lane and piece.extent > 1 else self._loop
                loop(nest, a, piece, lambda: self._inside(nest, loops, k, sink, values))
                return
            self._body(nest, sink)
            return
        if k < len(loops) and loops[k][0] < outs:
            a, piece, _ = loops[k]
            self._loop(nest, a, piece, lambda: self._inside(nest, loops, k, sink, values))
            return
        inner = [j for j in range(k, len(loops)) if loops[j][0] < outs and loops[j][1].extent > 1]
        if inner:
            self._reduce_in_scratch(nest, loops, k, inner[-1] + 1, sink, values)
            return
        accs = self._reduce(nest, loops, k, self._identities(nest))
        self._epilogue(nest, accs, sink, values)

    def _inside(self, nest: Nest, loops: list[tuple[int, EmittedLoop, int]], k: int, sink: Sink, values: bool) -> None:
        """The body of output loop number k."""
        self._children(nest.r.stage.index, loops[k][2] + 1)
        self._walk(nest, loops, k + 1, sink, values)

    def _loop(self, nest: Nest, a: int, piece: EmittedLoop, body: Callable[[], Any]) -> None:
        """One output loop around `body`."""
        b = self.b
        if piece.extent == 1:
            self._open_row(nest, a, ({}, 0))
            body()
            self._close_row(nest, a)
            return
        stop = b.index(piece.extent * piece.stride)
        pieces = nest.pieces[a]
        if self._bound(nest, a) is not None:
            self._loop_to_limit(nest, a, piece, body)
            return
        if pieces[0].row != piece.row and not is_exact(pieces, nest.bounds[a]):
            # an inner loop of an axis that its amounts do not divide: no iterations wholly beyond the end
            terms, const = sum_lins(nest.opened[a])
            left = b.alu("SUB", dtypes.index, 1, b.index(nest.bounds[a] - const), self._ssa((terms, 0)))
            stop = b.alu("MIN", dtypes.index, 1, stop, left)
        self._loop_between(nest, a, piece.stride, b.index(0), stop, body)

    def _loop_to_limit(self, nest: Nest, a: int, piece: EmittedLoop, body: Callable[[], Any]) -> None:
        """One output loop of an axis whose extent depends on variables."""
        b = self.b
        room = self._room(nest, a)
        stop = b.alu("MIN", dtypes.index, 1, b.index(piece.extent * piece.stride), room)
        reach = self._reach(nest, a)
        if a in nest.safe or not self._is_last(nest, a):
            self._loop_between(nest, a, piece.stride, b.index(0), stop, body)
            return
        last = -1
        if self._moves_back(nest, a):
            last = b.alu("SUB", dtypes.index, 1, room, b.index(reach))
            middle = b.alu("WHERE", dtypes.index, 1, b.alu("CMPLE", dtypes.bool, 1, b.index(reach), room), stop, b.index(0))
        else:
            middle = self._whole_end(room, reach, piece.stride, stop) if reach > 1 else stop
        nest.safe.add(a)
        self._loop_between(nest, a, piece.stride, b.index(0), middle, body, last)
        nest.safe.discard(a)
        if reach > 1:
            parts = self._tail_parts(nest, a, b.alu("SUB", dtypes.index, 1, stop, middle))
            for step, condition in parts:
                with self._narrowed(nest, a, step):
                    end = stop if condition < 0 else b.alu("WHERE", dtypes.index, 1, condition, stop, middle)
                    self._loop_between(nest, a, step, middle, end, body)
            if not parts:
                self._loop_between(nest, a, piece.stride, middle, stop, body)

    def _children(self, s: int, depth: int) -> None:
        """Emit the stages that live at a point."""
        for child in self.low.plan.children.get((s, depth), ()):
            self._emit_stage(child)

    # -- what readers need ----------------------------------------------------------------------------
    def _hull(self, s: int, dim: int) -> tuple[Lin, int, bool]:
        """(start, extent) of what the readers of stage `s` need of its dim, under the loops opened so far, and whether they may ask for
        positions outside all the same (beyond the axis, where it is padded)."""
        full, unsafe = self.low.positions(s, dim), self.low.guarded(s, dim) and not self._is_read_inside(s, dim)
        start: Lin | None = None
        lo = hi = 0
        beyond = False      # the last iteration of a reduce loop, that variables end, covers more than there is
        for q in self.low.plan.readers[s]:
            r = self.low.plan.resolved[q]
            if r is None or self.low.plan.paths[q] is None:
                continue
            for node in r.nodes:
                if node.kind != "read" or node.arg != s:
                    continue
                lin = node.dims[dim]
                if lin.atoms:
                    return ({}, 0), full, unsafe
                base: Lin = ({}, lin.const)
                low = high = 0
                for a, c in lin.coefs:
                    beyond = beyond or (a >= len(r.stage.outs) and self.kernel.axes[r.axes[a]].bound is not None)
                    first, span = self._extent_of(q, a)
                    base = add_lins(base, first, c)
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
                    return ({}, 0), full, unsafe or beyond
        assert start is not None
        extent = hi - lo + 1
        if not unsafe and extent >= full:
            return ({}, 0), full, beyond
        return (start[0], start[1] + lo), extent, beyond

    def _is_read_inside(self, s: int, dim: int) -> bool:
        """Whether the readers of stage `s`, where they stand, ask for positions of its dim that are inside only."""
        if self.kernel.axes[self.kernel.stages[s].outs[dim]].bound is None:
            return False
        for q in self.low.plan.readers[s]:
            r = self.low.plan.resolved[q]
            if r is None or self.low.plan.paths[q] is None:
                continue
            for node in r.nodes:
                if node.kind == "read" and node.arg == s:
                    lin = node.dims[dim]
                    if lin.atoms or not all(self._stays_inside(q, r, a) for a, _ in lin.coefs):
                        return False
        return True

    def _stays_inside(self, q: int, r: ResolvedStage, a: int) -> bool:
        """Whether stage `q`, whose loops may or may not be open, has positions of local axis `a` that are inside only."""
        if r.axes[a] not in self.low.unsafe:
            return True
        nest = self.nests.get(q)
        if nest is not None:
            return a in nest.safe
        if a >= len(r.stage.outs) or self.low.plan.paths[q] == ():
            return False
        return self._hull(q, a)[1] < self.low.positions(q, a) and self._is_read_inside(q, a)

    def _extent_of(self, q: int, a: int) -> tuple[Lin, int]:
        """(start, positions) of local axis `a` of stage `q`, whose loops may or may not be open."""
        nest = self.nests.get(q)
        if nest is not None:
            pieces = nest.pieces[a]
            opened = len(nest.opened[a])
            loops = [p for p in pieces if p.role == LOOP]
            left = [p for p in pieces if p.role != LOOP] + loops[opened:]
            span = 1 + sum(p.stride * (p.extent - 1) for p in left)
            if nest.r.axes[a] not in self.low.fixed:
                span = min(span, nest.bounds[a])
            return self._axis(nest, a), span
        r = self.low.plan.resolved[q]
        assert r is not None
        if a < len(r.stage.outs):
            if self.low.plan.paths[q] == ():
                return ({}, 0), self.state.axis_extent(r.axes[a])
            return self._hull(q, a)[:2]
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
        extents = [e for _, e, _ in hulls]
        base: list[Lin] = [h for h, _, _ in hulls]
        width = self._width(r)
        guarded = any(outside for _, _, outside in hulls)
        reds = [self.low.spanned(s, a) for a in stage.reds]
        red_base: list[Lin] = [({}, 0)] * len(reds)
        scalar = all(e == 1 for e in extents)
        layout = self.low.layout(s, tuple(extents))
        if layout.tiled >= 0 and (base[layout.tiled][0] or base[layout.tiled][1]):
            layout = self.low.layout(s, tuple(extents), tiled=False)   # tiles are whole only when the box starts at 0
        if s in self.low.derived:
            nest = self._derived_nest(r, extents, base, layout, width)
        else:
            nest = self._nest(r, extents + reds, base + red_base, width)
        # a box of all positions is wider than what is read
        nest.safe.update(i for i in range(len(stage.outs)) if extents[i] < self.low.positions(s, i) and self._is_read_inside(s, i))
        outer = self.nests.get(s)
        self.nests[s] = nest
        self._children(s, 0)
        if scalar:
            got: list[int] = []
            self._walk(nest, self._loops(nest), 0, lambda n, v: got.append(v), True)
            self.env[s] = Staged(got[0], -1, None, tuple(base), b.level, 0, False)
        else:
            offset = self._area(s, self.low.area(s, layout))
            pointer = b.pure("SCRATCH", self.low.stored(s), 1, (), offset)
            self._walk(nest, self._loops(nest), 0, self._copy_sink(s, ("SCRATCH", offset), layout, base), True)
            self.versions += 1
            self.env[s] = Staged(-1, pointer, layout, tuple(base), b.level, self.versions, guarded)
        if outer is None:
            del self.nests[s]
        else:
            self.nests[s] = outer
        self._forget_values()

    def _area(self, s: int, nbytes: int) -> int:
        """Scratch of a stage: one area, grown when a longer part of the nest needs more."""
        found = self.areas.get(s)
        if found is not None and found[1] >= nbytes:
            return found[0]
        offset = self.scratch
        self.scratch += -(-nbytes // 64) * 64
        self.areas[s] = (offset, nbytes)
        return offset

    def _copy_sink(self, s: int, area: tuple[str, int], layout: Layout, base: list[Lin]) -> Sink:
        """Where the positions of a staged value go: `area` is the operation and arg of its pointer."""
        op, arg = area
        if s in self.low.packed:
            return lambda n, _: self._store_packed(n, op, arg, layout, base)
        pointer = self.b.pure(op, self.kernel.stages[s].dtype, 1, (), arg)
        return lambda n, v: self._store_layout(n, v, pointer, layout, base)

    def _body(self, nest: Nest, sink: Sink) -> None:
        """A stage without reduction: every position's value to the sink. Operands of dot instructions are evaluated there."""
        nest.memo.clear()
        chunks = self._lane_chunks(nest)
        for _, offsets in self._positions(nest, (UPCAST,), range(len(nest.r.stage.outs))):
            for chunk in chunks:
                if self._set_position(nest, offsets, chunk):
                    sink(nest, self._eval(nest, nest.r.value) if nest.r.stage.index not in self.low.packed else -1)
