"""Values and memory of one position: nodes become instructions, addresses (pointer, index at its loop level, constant).

    y[o0] = x[2*o0 + 3] at o0 = i + 16   →   LOAD x, MUL(i, 2) [35]
"""
from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import product
from typing import TYPE_CHECKING, Any

from svod.compile.lower import math
from svod.compile.lower.builder import Builder
from svod.compile.lower.emit_groups import GroupThreads
from svod.compile.lower.emit_state import FEW_ROWS, Chunk, Lin, Nest, Staged, Terms, add_lins, chunks_of, sum_lins
from svod.core.ir.dtype import DType, dtypes
from svod.core.ir.uop import TRANSCENDENTAL, Ops, UOp
from svod.core.kernel.groups import ThreadGroup
from svod.core.kernel.kernel import Linear, Node
from svod.core.kernel.layout import Layout, is_contiguous, is_exact
from svod.core.kernel.placement import EmittedLoop
from svod.core.kernel.scheduler import LOOP

if TYPE_CHECKING:
    from svod.compile.lower.lower import Lowering

Base = tuple[int, int]          # an index value and a constant to add to it
_TRANSCENDENTAL = {op.value: op for op in TRANSCENDENTAL}


class Values:
    """The part of a phase that evaluates nodes, loads and stores."""

    def __init__(self, low: Lowering):
        self.low = low
        self.state = low.state
        self.kernel = low.kernel
        self.b = Builder()
        self.scratch = 0
        self.areas: dict[int, tuple[int, int]] = {}     # stage → (offset, bytes) of its scratch
        self.env: dict[int, Staged] = {}
        self.versions = 0                               # contents that scratch areas had so far
        self.nests: dict[int, Nest] = {}               # stages whose loops are open
        self.partial: tuple[int, int, int] | None = None   # split reduction: local axis, chunk, number of parts
        self.part = -1
        self.aligns = False                             # whether rows of the output are stored at multiples of the vector
        self.group = GroupThreads(self.b, self.state, ThreadGroup(1, 1))
        self.tail = False                               # whether the last tile of the output has a loop of its own

    def _open_row(self, nest: Nest, a: int, value: Lin) -> None:
        nest.opened[a].append(value)
        nest.linear.clear()
        nest.memo.clear()

    def _close_row(self, nest: Nest, a: int) -> None:
        nest.opened[a].pop()
        nest.linear.clear()
        nest.memo.clear()

    # -- values of axes ----------------------------------------------------------------------------------
    def _axis(self, nest: Nest, a: int) -> Lin:
        """Where local axis `a` starts under the loops opened so far; expanded positions are added to it as constants."""
        found = nest.linear.get(a)
        if found is None:
            terms, const = sum_lins(nest.opened[a])
            pieces = nest.pieces[a]
            reduce = a >= len(nest.r.stage.outs)
            moves = not reduce and nest.r.axes[a] not in self.low.fixed and not (nest.aligned and a == nest.lane)
            if terms and moves and not is_exact(pieces, nest.bounds[a]):
                n = len(nest.opened[a])
                loops = [p for p in pieces if p.role == LOOP]
                left = [p for p in pieces if p.role != LOOP] + loops[n:]
                span = 1 + sum(p.stride * (p.extent - 1) for p in left)
                last = nest.bounds[a] - span
                shifted = self.b.alu("MIN", dtypes.index, 1, self._ssa((terms, const)), self.b.index(max(0, last)))
                terms, const = {shifted: 1}, 0
            base_terms, base_const = nest.base[a]
            found = nest.linear[a] = add_lins((terms, const), (base_terms, base_const), 1)
        return found

    # -- extents that depend on variables ----------------------------------------------------------------
    def _bound(self, nest: Nest, a: int) -> UOp | None:
        """How many positions local axis `a` has, where that depends on variables."""
        return None if self.low.on_grid else self._variable_bound(nest, a)

    def _variable_bound(self, nest: Nest, a: int) -> UOp | None:
        """`_bound`; on a grid, where loops run over the most positions that there may be, guards alone ask for it."""
        axis = nest.r.axes[a]
        return self.kernel.axes[axis].bound if axis >= 0 else None

    def _limit(self, nest: Nest, a: int) -> int:
        """The value of `_variable_bound`."""
        bound = self._variable_bound(nest, a)
        assert bound is not None
        made: dict[UOp, int] = {}
        b = self.b
        for u in bound.toposort():
            if u.op is Ops.CONST:
                made[u] = b.index(u.arg)
            elif u.op is Ops.DEFINE_VAR:
                made[u] = b.pure("VAR", dtypes.index, 1, (), u.arg[0])
            else:
                made[u] = b.alu(u.op.value, dtypes.index, 1, *[made[s] for s in u.src])
        return made[bound]

    def _room(self, nest: Nest, a: int) -> int:
        """Positions that are left of an axis whose extent depends on variables, from where the loops opened so far stand."""
        at = add_lins(sum_lins(nest.opened[a]), nest.base[a], 1)
        return self.b.alu("SUB", dtypes.index, 1, self._limit(nest, a), self._ssa(at))

    def _count(self, nest: Nest, a: int, piece: EmittedLoop) -> int:
        """How often a loop of an axis runs whose extent depends on variables, from where the loops opened so far stand."""
        b = self.b
        left = b.alu("IDIV", dtypes.index, 1, b.add(self._room(nest, a), b.index(piece.stride - 1)), b.index(piece.stride))
        return b.alu("MIN", dtypes.index, 1, b.index(piece.extent), left)

    def _reach(self, nest: Nest, a: int) -> int:
        """Positions that one iteration of the innermost loop of an axis covers."""
        return 1 + sum(p.stride * (p.extent - 1) for p in nest.pieces[a] if p.role != LOOP)

    def _tail_step(self, nest: Nest, a: int) -> int:
        """Positions per iteration in which what whole iterations of the innermost loop of an axis leave is computed: single ones where as
        many cost as much in any grouping, a vector where the axis is the vector, half of a tile of accumulators."""
        reach, pieces = self._reach(nest, a), nest.pieces[a]
        if not is_contiguous(pieces):
            return reach
        if a == nest.lane:
            return nest.width if nest.lane_stride == 1 and reach % nest.width == 0 else reach
        if a >= len(nest.r.stage.outs) or not nest.r.reductions:
            return 1
        return -(-reach // 2)

    def _tail_parts(self, nest: Nest, a: int, rest: int) -> list[tuple[int, int]]:
        """(step, condition) of the loops for the `rest` positions that whole iterations leave of an output axis: one of them runs.
        A few rows of a tile of accumulators go one by one: batches of one are common. Without a choice the condition is -1."""
        b, step, reach = self.b, self._tail_step(nest, a), self._reach(nest, a)
        if a == nest.lane or not nest.r.reductions or not is_contiguous(nest.pieces[a]) or step <= FEW_ROWS:
            return [(step, -1)] if step < reach else []
        few = b.alu("CMPLE", dtypes.bool, 1, rest, b.index(FEW_ROWS))
        return [(1, few), (step, b.alu("NOT", dtypes.bool, 1, few))]

    def _moves_back(self, nest: Nest, a: int) -> bool:
        """Whether the last tile of accumulators of an axis may start earlier, where there are as many positions as it covers, and compute
        some of them again."""
        pieces = nest.pieces[a]
        return a != nest.lane and a < len(nest.r.stage.outs) and bool(nest.r.reductions) and self._reach(nest, a) > 1 \
            and not (nest.r.stage.is_output and self.kernel.written) and is_contiguous(pieces) and sum(p.role == LOOP for p in pieces) == 1

    @contextmanager
    def _narrowed(self, nest: Nest, a: int, step: int) -> Iterator[None]:
        """Iterations of the innermost loop of an axis cover `step` positions, of which the last may be outside."""
        if step == self._reach(nest, a):
            yield
            return
        pieces, lane_stride, safe = nest.pieces[a], nest.lane_stride, a in nest.safe
        cut: list[EmittedLoop] = []
        left, stride = step, 1
        for p in reversed(pieces):
            e = p.extent if p.role == LOOP else min(p.extent, left)
            cut.append(EmittedLoop(p.row, p.role, e, stride))
            stride *= e
            left = left if p.role == LOOP else -(-left // e)
        nest.pieces[a] = tuple(reversed(cut))
        if nest.lane == a:
            nest.lane_stride = next(p.stride for p in cut if p.row == nest.lane_row)
        nest.narrow.add(a)
        if step == 1:
            nest.safe.add(a)
        yield
        nest.narrow.discard(a)
        nest.pieces[a], nest.lane_stride = pieces, lane_stride
        if not safe:
            nest.safe.discard(a)

    def _is_last(self, nest: Nest, a: int, loops: int = 1) -> bool:
        """Whether all loops of the axis are open when `loops` more are."""
        return len(nest.opened[a]) + loops == sum(p.role == LOOP for p in nest.pieces[a])

    def _whole_end(self, room: int, reach: int, stride: int, stop: int) -> int:
        """Where the iterations end, each `stride` on and `reach` positions wide, that stay inside of `room`; at most `stop`."""
        b = self.b
        count = b.alu("IDIV", dtypes.index, 1, b.alu("ADD", dtypes.index, 1, room, b.index(stride - reach)), b.index(stride))
        return b.alu("MAX", dtypes.index, 1, b.index(0), b.alu("MIN", dtypes.index, 1, stop, b.mul(count, stride)))

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

    # -- positions ---------------------------------------------------------------------------------------
    def _positions(self, nest: Nest, kinds: tuple[str, ...], axes: range) -> list[tuple[tuple[int, ...], dict[int, int]]]:
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

    def _lane_chunks(self, nest: Nest) -> tuple[Chunk, ...]:
        if nest.lane < 0:
            return (Chunk(0, 1, 1),)
        return chunks_of(next(p.extent for p in nest.pieces[nest.lane] if p.row == nest.lane_row), nest.width)

    def _set_position(self, nest: Nest, offsets: dict[int, int], chunk: Chunk, more: dict[int, int] | None = None) -> bool:
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
        nest.chunk = chunk if active == chunk.active else Chunk(chunk.offset, chunk.width, active)
        return active > 0 and all(o < e for o, e in zip(off, nest.bounds, strict=True))

    # -- values --------------------------------------------------------------------------------------------
    def _eval(self, nest: Nest, n: int) -> int:
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

    def _eval_const(self, nest: Nest, node: Node) -> int:
        return self.b.const(node.dtype, 1, node.arg)

    def _eval_variable(self, nest: Nest, node: Node) -> int:
        return self.b.pure("VAR", dtypes.index, 1, (), node.arg)

    def _eval_axis(self, nest: Nest, node: Node) -> int:
        return self._coordinate(nest, node.arg)

    def _coordinate(self, nest: Nest, a: int) -> int:
        """The value of local axis `a` at the current position: a vector on the vector axis."""
        b = self.b
        terms, const = self._axis(nest, a)
        value = self._ssa((terms, const + nest.offsets[a]))
        if a != nest.lane:
            return value
        w = nest.chunk.width
        return b.alu("ADD", dtypes.index, w, b.splat(value, w), b.vconst(dtypes.index, tuple(i * nest.lane_stride for i in range(w))))

    def _eval_alu(self, nest: Nest, node: Node) -> int:
        b = self.b
        args = [self._eval(nest, s) for s in node.src]
        lanes = max(b.lanes[a] for a in args)
        op = node.op
        if op in _TRANSCENDENTAL:
            return math.expand(b, _TRANSCENDENTAL[op], node.dtype, lanes, *[b.splat(a, lanes) for a in args],
                               scales=self.state.target.has_scaleb)
        if op == "RECIPROCAL":
            return b.alu("FDIV", node.dtype, lanes, b.const(node.dtype, lanes, 1), args[0])
        return b.alu(op, node.dtype, lanes, *args)

    def _eval_cast(self, nest: Nest, node: Node) -> int:
        return self.b.cast(node.dtype, self._eval(nest, node.src[0]))

    def _eval_bitcast(self, nest: Nest, node: Node) -> int:
        return self.b.bitcast(node.dtype, self._eval(nest, node.src[0]))

    def _eval_reduce(self, nest: Nest, node: Node) -> int:
        return nest.results[node.arg]

    def _eval_temp(self, nest: Nest, node: Node) -> int:
        assert node.linear is not None
        pointer = self.b.pure("TEMP", node.dtype, 1, (), node.arg)
        return self._load(nest, node.dtype, pointer, node.linear, -1, -1, 0, False)

    def _eval_load(self, nest: Nest, node: Node) -> int:
        b = self.b
        slot: int = node.arg
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

    def _guard(self, nest: Nest, axes: Any) -> int:
        """The condition that the given local axes are inside their extents, or -1 where that is certain."""
        unsafe = self.low.unsafe
        result = -1
        for a in axes:
            limit = unsafe.get(nest.r.axes[a])
            if limit is None or a in nest.safe:
                continue
            b = self.b
            value = self._coordinate(nest, a)
            lanes = b.lanes[value]
            end = b.index(limit) if self._variable_bound(nest, a) is None else self._limit(nest, a)
            inside = b.alu("CMPLT", dtypes.bool, lanes, value, b.splat(end, lanes))
            if nest.r.axes[a] in self.low.below:
                above = b.alu("CMPLE", dtypes.bool, lanes, b.const(dtypes.index, lanes, 0), value)
                inside = b.alu("AND", dtypes.bool, lanes, inside, above)
            result = inside if result < 0 else b.alu("AND", dtypes.bool, max(lanes, b.lanes[result]), result, inside)
        if result >= 0 and self.b.known(result) is True:
            return -1
        return result

    def _eval_read(self, nest: Nest, node: Node) -> int:
        s: int = node.arg
        staged = self._staged(s)
        if staged.layout is None:
            return staged.scalar
        cached = nest.linear.get((s, node.dims))
        if cached is None:
            cached = nest.linear[s, node.dims] = self._relative(nest, staged, node.dims)
        linear, base = cached
        gate = alt = -1
        if staged.guarded:
            gate, alt = self._guard(nest, node.deps), self.b.const(node.dtype, 1, 0)
        return self._load(nest, node.dtype, staged.pointer, linear, gate, alt, staged.floor, False, base, slack=True,
                          version=staged.version)

    def _relative(self, nest: Nest, staged: Staged, dims: tuple[Linear, ...]) -> tuple[Linear, Base]:
        """Coordinates in a staged value → (element number over local axes, where the first position stands)."""
        layout = staged.layout
        assert layout is not None
        coefs: dict[int, int] = {}
        atoms: dict[int, int] = {}
        start: Lin = ({}, 0)
        for i, lin in enumerate(dims):
            stride = layout.strides[i]
            here: Lin = ({}, lin.const)
            for a, c in lin.coefs:
                here = add_lins(here, self._axis(nest, a), c)
                coefs[a] = coefs.get(a, 0) + c * stride
            here = add_lins(here, staged.base[i], -1)
            if i == layout.tiled and any(a in nest.narrow for a, _ in lin.coefs):
                start = add_lins(start, self._in_tiles(layout, here), 1)
            elif i == layout.tiled and layout.overlaps:
                start = add_lins(start, self._tile_at(layout, here), 1)
            elif i == layout.tiled:
                # whole tiles: every coefficient is a multiple of the tile, expanded positions lie inside one
                here = ({v: c * layout.outer // layout.tile for v, c in here[0].items()},
                        here[1] // layout.tile * layout.outer + here[1] % layout.tile * stride)
                start = add_lins(start, here, 1)
            else:
                start = add_lins(start, here, stride)
            for n, c in lin.atoms:
                atoms[n] = atoms.get(n, 0) + c * stride
        linear = Linear(tuple(sorted((a, c) for a, c in coefs.items() if c)), 0, tuple(sorted((n, c) for n, c in atoms.items() if c)))
        return linear, (self._ssa((start[0], 0)), start[1])

    def _in_tiles(self, layout: Layout, at: Lin) -> Lin:
        """Where a position of the tiled dim stands that need not be the first of a tile."""
        b = self.b
        value, tile = self._ssa(at), b.index(layout.tile)
        whole, rest = (b.alu(op, dtypes.index, 1, value, tile) for op in ("IDIV", "MOD"))
        return {whole: layout.outer, rest: layout.strides[layout.tiled]}, 0

    def _tile_at(self, layout: Layout, first: Lin) -> Lin:
        """Where the tile stands whose first position is given: the last one is moved back, and the next multiple tells which it is."""
        b, tile = self.b, layout.tile
        number = b.alu("IDIV", dtypes.index, 1, b.add(self._ssa(first), b.index(tile - 1)), b.index(tile))
        return {number: layout.outer}, 0

    def _load(self, nest: Nest, dtype: DType, pointer: int, linear: Linear, gate: int, alt: int, floor: int, ordered: bool,
              base: Base | None = None, slack: bool = False, version: int = 0) -> int:
        """Load at the current position. `slack`: a vector more behind the area may be read, so that contiguous ones need no mask."""
        b = self.b
        start, const, lane, vector = self._address(nest, linear, base)
        w = nest.chunk.width
        gate_lanes = b.lanes[gate] if gate >= 0 else 1
        lanes = w if (lane or vector >= 0 or gate_lanes > 1) else 1
        if lanes > 1 and nest.chunk.active < w and not (slack and vector < 0 and lane == 1):
            mask = self._prefix_mask(nest.chunk)
            gate = mask if gate < 0 else b.alu("AND", dtypes.bool, w, mask, gate)
            if alt < 0:
                alt = b.const(dtype, 1, 0)
        extra: tuple[int, ...] = ()
        if gate >= 0:
            extra = (b.splat(gate, lanes), b.splat(alt, lanes))
        if vector >= 0:
            index = b.alu("ADD", dtypes.index, lanes, b.splat(start, lanes), vector)
            return b.load("GATHER", dtype, lanes, (pointer, index, *extra), const, floor, ordered, version)
        if lanes == 1 or lane == 1:
            return b.load("LOAD", dtype, lanes, (pointer, start, *extra), const, floor, ordered, version)
        return b.load("LOADS", dtype, lanes, (pointer, start, *extra), (const, lane), floor, ordered, version)

    def _address(self, nest: Nest, linear: Linear, base: Base | None) -> tuple[int, int, int, int]:
        """(index value, constant, elements from lane to lane, vector index or -1) of an access at the current position.

        `base` given: the start of the local axes is already in it (staged values)."""
        b = self.b
        off = nest.offsets
        const = linear.const
        found = nest.linear.get(linear) if base is None else base
        if found is None:
            lin: Lin = ({}, 0)
            for a, c in linear.coefs:
                lin = add_lins(lin, self._axis(nest, a), c)
            found = nest.linear[linear] = (self._ssa((lin[0], 0)), lin[1])
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

    def _prefix_mask(self, chunk: Chunk) -> int:
        return self.b.vconst(dtypes.bool, tuple(i < chunk.active for i in range(chunk.width)))

    def _staged(self, s: int) -> Staged:
        found = self.env.get(s)
        if found is None:
            index, layout = self.low.temp_of[s]
            pointer = self.b.pure("TEMP", self.low.stored(s), 1, (), index)
            guarded = any(self.low.guarded(s, i) for i in range(len(layout.extents)))
            found = self.env[s] = Staged(-1, pointer, layout, (({}, 0),) * len(layout.extents), 0, 0, guarded)
        return found

    # -- stores --------------------------------------------------------------------------------------------
    def _store_linear(self, nest: Nest, value: int, pointer: int, linear: Linear, stream: bool, extra: Terms | None = None) -> None:
        """Store to a flat index over the local axes."""
        b = self.b
        start, const, lane, vector = self._address(nest, linear, None)
        for v, c in (extra or {}).items():
            start = b.add(start, b.mul(v, c))
        self._store(nest, value, pointer, start, const, lane, vector, stream)

    def _store_layout(self, nest: Nest, value: int, pointer: int, layout: Layout, base: list[Lin]) -> None:
        """Store into a staged area."""
        found = nest.linear.get(("store", pointer))
        if found is None:
            lin: Lin = ({}, 0)
            in_tile = lane = 0
            for i, stride in enumerate(layout.strides):
                terms, c = add_lins(self._axis(nest, i), base[i], -1)
                if i == layout.tiled and i in nest.narrow:
                    lin = add_lins(lin, self._in_tiles(layout, (terms, c)), 1)
                elif i == layout.tiled and layout.overlaps:
                    lin = add_lins(lin, self._tile_at(layout, (terms, c)), 1)
                elif i == layout.tiled:
                    lin = add_lins(lin, ({v: k * layout.outer // layout.tile for v, k in terms.items()}, 0), 1)
                    in_tile = c
                else:
                    lin = add_lins(lin, (terms, c), stride)
                if i == nest.lane:
                    lane = stride * nest.lane_stride
            found = nest.linear["store", pointer] = (self._ssa((lin[0], 0)), lin[1], in_tile, lane)
        start, const, in_tile, lane = found
        for i, stride in enumerate(layout.strides):
            if i == layout.tiled:
                position = in_tile + nest.offsets[i]
                const += position // layout.tile * layout.outer + position % layout.tile
            else:
                const += stride * nest.offsets[i]
        self._store(nest, value, pointer, start, const, lane, -1, False)

    def _store(self, nest: Nest, value: int, pointer: int, start: int, const: int, lane: int, vector: int, stream: bool) -> None:
        b = self.b
        w = nest.chunk.width if nest.lane >= 0 else 1
        outs = range(len(nest.r.stage.outs))
        guard = -1
        if pointer_is_output(b, pointer):
            guard, stores = self._guard(nest, outs), self.group.stores
            if stores >= 0:
                guard = stores if guard < 0 else b.alu("AND", dtypes.bool, b.lanes[guard], guard, stores)
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
            # what is stored under a mask at the end of an extent that depends on a variable, and what non-temporal stores would fault on
            stream = stream and lanes == nest.width and not extra and (nest.aligned or b.multiple_of(start) % lanes == 0 == const % lanes)
            b.store("STORE", dtype, lanes, (pointer, start, b.splat(value, lanes), *extra), (const, stream))
        else:
            b.store("STORES", dtype, lanes, (pointer, start, b.splat(value, lanes), *extra), (const, lane))


def pointer_is_output(b: Builder, pointer: int) -> bool:
    """Scratch has room for positions beyond an extent; arguments and temporaries have not."""
    return b.op[pointer] != "SCRATCH"


_EVAL: dict[str, Callable[[Values, Nest, Node], int]] = {
    "const": Values._eval_const, "variable": Values._eval_variable, "axis": Values._eval_axis,
    "alu": Values._eval_alu, "cast": Values._eval_cast,
    "bitcast": Values._eval_bitcast, "load": Values._eval_load, "read": Values._eval_read, "reduce": Values._eval_reduce,
    "temp": Values._eval_temp,
}
