"""Dot and matrix instructions: operands staged in groups, and products of groups summed up.

    p[k/2, n, 2] ← b[k, n]:   x = LOAD b[k, n…];  y = LOAD b[k+1, n…];  STORE p ← SHUFFLE x, y       x0 y0 x1 y1 …
    c[n] += a[k]·b[k, n]:     DOT c, (word of a in all lanes), (vector of words of p) [2]
    tiles:                        TILEDOT c, (rows of a), (rows of groups of b); afterwards TILESTORE to scratch, and rows from there

The copies know where the sum ends: what is left of the last group is zero. The nests that read have whole groups only.
"""
from __future__ import annotations

from typing import Any

from svod.compile.lower.emit_state import COPY_LANES, Lin, Nest, Staged, add_lins, copy_step
from svod.compile.lower.emit_values import Values
from svod.core.ir.dtype import dtypes
from svod.core.kernel.intrinsics import Operand, Packed, TensorizePlan
from svod.core.kernel.kernel import Linear, ResolvedStage
from svod.core.kernel.layout import Layout
from svod.core.kernel.placement import EmittedLoop
from svod.core.kernel.scheduler import DOT, LOOP, UPCAST
from svod.errors import KernelOptError

WORD = dtypes.uint32
SIGN = 0x80


class DotValues(Values):
    """The part of a phase that packs the operands of dot instructions and reads them."""

    # -- reading ---------------------------------------------------------------------------------------
    def _dot_plan(self, nest: Nest) -> TensorizePlan | None:
        """The instruction that sums up in this nest; the phase that combines partial results has none."""
        return self.low.dots.get(nest.r.stage.index) if not nest.r.axes or nest.r.axes[-1] >= 0 else None

    def _dot(self, nest: Nest, found: TensorizePlan, acc: int, width: int) -> int:
        """`acc` and the sum of the groups at the current position."""
        a, c = (self._dot_operand(nest, o, p, width) for o, p in zip(found.operands, found.packed, strict=True))
        return self.b.pure("DOT", found.dot.accumulator, width, (acc, a, c), found.dot.group)

    def _dot_correction(self, nest: Nest, found: TensorizePlan, acc: int, width: int) -> int:
        """`acc` and what the flipped sign bits of one operand add to the sum of the groups at the current position."""
        at = found.corrects
        p = found.packed[1 - at]
        bits = self.b.const(p.dtype, width * p.group, SIGN if p.dtype.kind == "u" else -SIGN)
        vector = self._dot_operand(nest, found.operands[at], found.packed[at], width)
        src = (acc, bits, vector) if at else (acc, vector, bits)
        return self.b.pure("DOT", found.dot.accumulator, width, src, p.group)

    def _dot_operand(self, nest: Nest, o: Operand, p: Packed, width: int) -> int:
        """The groups of an operand at the current position, one per lane."""
        node = nest.r.nodes[o.node]
        key: Any = ("dot", o.node, width, nest.chunk.active, *[nest.offsets[d] for d in node.deps])
        found = nest.memo.get(key)
        if found is None:
            found = nest.memo[key] = self._load_groups(nest, o, p, width)
        return found

    def _load_groups(self, nest: Nest, o: Operand, p: Packed, width: int) -> int:
        b = self.b
        staged, _, start, const, lane, vector = self._operand_at(nest, o)
        g = p.group
        gate = self._guard(nest, nest.r.nodes[o.node].deps) if staged.guarded else -1
        if vector < 0 and lane in (0, g):
            lanes = width * g if lane else g
            extra: tuple[int, ...] = ()
            if gate >= 0:
                extra = (self._per_element(gate, lanes), b.const(p.dtype, lanes, 0))
            value = b.load("LOAD", p.dtype, lanes, (staged.pointer, start, *extra), const, staged.floor, False, staged.version)
            if lane or width == 1:
                return value
            return b.bitcast(p.dtype, b.splat(b.bitcast(WORD, value), width))
        pointer = b.pure(b.op[staged.pointer], WORD, 1, (), b.arg[staged.pointer])
        extra = () if gate < 0 else (b.splat(gate, width), b.const(WORD, width, 0))
        if vector >= 0:
            index = b.alu("ADD", dtypes.index, width, b.splat(start, width), vector)
            words = b.alu("IDIV", dtypes.index, width, index, b.const(dtypes.index, width, g))
            value = b.load("GATHER", WORD, width, (pointer, words, *extra), const // g, staged.floor, False, staged.version)
        else:
            word = b.alu("IDIV", dtypes.index, 1, start, b.index(g))
            value = b.load("LOADS", WORD, width, (pointer, word, *extra), (const // g, lane // g), staged.floor, False, staged.version)
        return b.bitcast(p.dtype, value)

    def _per_element(self, gate: int, lanes: int) -> int:
        """A gate per group as one per element."""
        b = self.b
        words = b.lanes[gate]
        if words == 1:
            return b.splat(gate, lanes)
        return b.pure("SHUFFLE", dtypes.bool, lanes, (gate,), tuple(i * words // lanes for i in range(lanes)))

    # -- tiles -----------------------------------------------------------------------------------------
    def _tile_shape(self, nest: Nest, found: TensorizePlan) -> tuple[int, int]:
        """(rows, columns) of a tile in this nest: an axis may have fewer positions."""
        rows, columns = (next((p.extent for p in nest.pieces[a] if p.role == DOT), 1) for a in (found.rows, found.columns))
        return rows, columns

    def _tile_zero(self, nest: Nest, found: TensorizePlan, number: int) -> int:
        """A new accumulator. Tiles change in place, so that none is merged with another, or made outside of the loop it is used in."""
        rows, columns = self._tile_shape(nest, found)
        return self.b.load("TILEZERO", found.dot.accumulator, rows * columns, (), (rows, columns, number), ordered=True)

    def _tile_dot(self, nest: Nest, found: TensorizePlan, acc: int) -> int:
        """`acc` and the products of the tiles at the current position."""
        rows, columns = self._tile_shape(nest, found)
        g, depth = found.dot.group, found.dot.depth
        chosen = self.state.dots[nest.r.stage.index]
        assert chosen is not None
        along = nest.r.axes.index(chosen.axis)
        values = []
        for o, p, lines, length, down in ((found.operands[0], found.packed[0], rows, depth * g, found.rows),
                                          (found.operands[1], found.packed[1], depth, columns * g, along)):
            staged, linear, start, const, _, vector = self._operand_at(nest, o)
            if vector >= 0:
                raise KernelOptError(f"stage {self.kernel.stages[o.stage].name} is gathered column by column; a tile has rows in memory")
            step = linear.coef(down) * (1 if down == found.rows else g)
            beside = linear.coef(along) if down == found.rows else linear.coef(found.columns) // g
            if beside != 1 or staged.guarded:
                name = self.kernel.stages[o.stage].name
                raise KernelOptError(f"stage {name} does not lie in rows for tiles; leave its axes as TC put them, without PADTO")
            # not moved out of the loop: registers are few, and those of what is outside are taken all the time
            values.append(self.b.load("TILELOAD", p.dtype, lines * length, (staged.pointer, start), (const, lines, step),
                                      max(staged.floor, self.b.level), False, staged.version))
        return self.b.pure("TILEDOT", found.dot.accumulator, rows * columns, (acc, *values), (rows, columns, g))

    def _operand_at(self, nest: Nest, o: Operand) -> tuple[Staged, Linear, int, int, int, int]:
        """An operand at the current position: (where it is staged, its elements over local axes, and what `_address` gives)."""
        dims = nest.r.nodes[o.node].dims
        staged = self._staged(o.stage)
        cached = nest.linear.get((o.stage, dims))
        if cached is None:
            cached = nest.linear[o.stage, dims] = self._relative(nest, staged, dims)
        linear, base = cached
        return staged, linear, *self._address(nest, linear, base)

    # -- packing ---------------------------------------------------------------------------------------
    def _packed_nest(self, r: ResolvedStage, extents: list[int], base: list[Lin], layout: Layout) -> Nest:
        """The loops that pack an operand: vectors along the sum where memory is contiguous along it (squares of words, where they do not
        stay side by side), else along the innermost dim, a vector per element of the group."""
        p = self.low.packed[r.stage.index]
        words = max(1, self.state.target.vector_bytes // WORD.itemsize)
        pieces: list[tuple[EmittedLoop, ...]] = [(EmittedLoop(-1, LOOP, e, 1),) for e in extents]
        inner, tile = layout.order[-1], layout.tile if layout.tiled >= 0 else 0
        if inner == p.dim or self._runs_along(r, p.dim):
            n = min(extents[p.dim], words * p.group)
            pieces[p.dim] = (EmittedLoop(-1, LOOP, -(-extents[p.dim] // n), n), EmittedLoop(COPY_LANES, UPCAST, n, 1))
            if inner != p.dim:
                m = tile or min(extents[inner], words)
                pieces[inner] = (EmittedLoop(-1, LOOP, -(-extents[inner] // m), m), EmittedLoop(-3, UPCAST, m, 1))
            return Nest(r, pieces, extents, base, p.dim, COPY_LANES, words * p.group)
        e = extents[inner]
        n = tile or copy_step(e, words)
        pieces[inner] = (EmittedLoop(-1, LOOP, -(-e // n), n), EmittedLoop(COPY_LANES, UPCAST, n, 1))
        pieces[p.dim] = (EmittedLoop(-1, LOOP, extents[p.dim] // p.group, p.group), EmittedLoop(-4, DOT, p.group, 1))
        return Nest(r, pieces, extents, base, inner, COPY_LANES, words)

    def _runs_along(self, r: ResolvedStage, dim: int) -> bool:
        """Whether all memory that a copy reads is contiguous along a dim."""
        loads = [n.linear for n in r.nodes if n.kind == "load" and n.linear is not None]
        return bool(loads) and all(lin.coef(dim) == 1 and not lin.atoms for lin in loads)

    def _store_packed(self, nest: Nest, op: str, arg: int, layout: Layout, base: list[Lin]) -> None:
        """Store the groups at the current position into the area whose pointer is (op, arg)."""
        b = self.b
        p = self.low.packed[nest.r.stage.index]
        g, w, active = p.group, nest.chunk.width, nest.chunk.active
        lin: Lin = ({}, 0)
        const = lane = 0
        for i in range(len(layout.extents)):
            terms, c = add_lins(self._axis(nest, i), base[i], -1)
            if i == layout.tiled and layout.overlaps:
                lin = add_lins(lin, self._tile_at(layout, (terms, c)), 1)
                const += nest.offsets[i] * layout.strides[i]
            elif i == layout.tiled:
                lin = add_lins(lin, ({v: k * layout.outer // layout.tile for v, k in terms.items()}, 0), 1)
                position = c + nest.offsets[i]
                const += position // layout.tile * layout.outer + position % layout.tile * layout.strides[i]
            else:
                lin = add_lins(lin, (terms, 0), layout.strides[i])
                const += layout.strides[i] * (c + nest.offsets[i])
            if i == nest.lane:
                lane = layout.strides[i] * nest.lane_stride
        start = self._ssa((lin[0], 0))
        if nest.lane == p.dim:
            value = self._packed_value(nest, p, w)
            words, used, step = w // g, active // g, lane
        else:
            first = nest.offsets[p.dim]
            parts = []
            for k in range(g):
                nest.offsets[p.dim] = first + k
                parts.append(self._packed_value(nest, p, w))
            nest.offsets[p.dim] = first
            value = self._interleaved(parts)
            words, used, step = w, active, lane // g
        if words == 1 or step == 1:
            extra = () if used == words else (b.vconst(dtypes.bool, tuple(k < used * g for k in range(words * g))),)
            b.store("STORE", p.dtype, words * g, (b.pure(op, p.dtype, 1, (), arg), start, value, *extra), (const, False))
            return
        extra = () if used == words else (b.vconst(dtypes.bool, tuple(k < used for k in range(words))),)
        word = b.alu("IDIV", dtypes.index, 1, start, b.index(g))
        b.store("STORES", WORD, words, (b.pure(op, WORD, 1, (), arg), word, b.bitcast(WORD, value), *extra), (const // g, step))

    def _packed_value(self, nest: Nest, p: Packed, width: int) -> int:
        """The narrow number at the current position, 0 behind the end of the sum."""
        b = self.b
        narrow = nest.r.nodes[nest.r.value].src[0]
        source = nest.r.nodes[narrow].dtype
        value = b.splat(self._eval(nest, narrow), width)
        inside = self._guard(nest, (p.dim,)) if not self._masked_zero(nest, narrow) else -1
        if inside >= 0:
            value = b.alu("WHERE", source, width, inside, value, b.const(source, width, 0))
        if not p.flipped:
            return b.cast(p.dtype, value)
        bits = b.alu("XOR", dtypes.uint8, width, b.bitcast(dtypes.uint8, value), b.const(dtypes.uint8, width, SIGN))
        return b.bitcast(p.dtype, bits)

    def _masked_zero(self, nest: Nest, n: int) -> bool:
        """Whether a node is a load, which is 0 behind the end already."""
        node = nest.r.nodes[n]
        if node.kind == "bitcast":
            return self._masked_zero(nest, node.src[0])
        return node.kind == "load" and (node.gate < 0 or (nest.r.nodes[node.alt].kind == "const" and nest.r.nodes[node.alt].arg == 0))

    def _interleaved(self, parts: list[int]) -> int:
        """Vectors a, b, … as one: a0 b0 … a1 b1 …"""
        b = self.b
        size = 1        # elements of a part that stay together
        while len(parts) > 1:
            lanes = b.lanes[parts[0]]
            order = tuple(part * lanes + block * size + k for block in range(lanes // size) for part in (0, 1) for k in range(size))
            parts = [b.pure("SHUFFLE", b.dtype[x], 2 * lanes, (x, y), order) for x, y in zip(parts[::2], parts[1::2], strict=True)]
            size *= 2
        return parts[0]
