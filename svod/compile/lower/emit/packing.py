"""Emits the copies that pack operands of dot and matrix instructions into groups.

    p[k/2, n, 2] ← b[k, n]:   x = LOAD b[k, n…];  y = LOAD b[k+1, n…];  STORE p ← SHUFFLE x, y       x0 y0 x1 y1 …

The copies fill the last group with zeros, so that readers need no partial groups; if a subgroup holds tiles, the last tile is filled as
well."""
from __future__ import annotations

from svod.compile.lower.emit.addresses import Addresses
from svod.compile.lower.emit.axes import Axes
from svod.compile.lower.emit.context import PhaseContext
from svod.compile.lower.emit.state import OpenStage
from svod.compile.lower.emit.values import Values
from svod.core.ir.dtype import dtypes
from svod.core.kernel.intrinsics import Packed, stored_node
from svod.core.kernel.layout import Layout
from svod.core.kernel.required import Lin, add_lins

WORD = dtypes.uint32
SIGN = 0x80


class Packing:
    """Emits the copies that pack operands."""

    def __init__(self, ctx: PhaseContext, axes: Axes, addresses: Addresses, values: Values):
        self.b, self.facts = ctx.b, ctx.facts
        self.axes, self.addresses, self.values = axes, addresses, values

    def store(self, stage: OpenStage, op: str, arg: int, layout: Layout, base: list[Lin]) -> None:
        """Store the groups at the current position into the area whose pointer is (op, arg)."""
        b = self.b
        p = self.facts.packed[stage.index]
        if p.is_held:
            value = self.packed_value(stage, p, stage.chunk.width if stage.frame.vector_axis >= 0 else 1)
            self.values.store_layout(stage, value, b.pure(op, p.dtype, 1, (), arg), layout, base, padded=True)
            return
        g, w, active = p.group, stage.chunk.width, stage.chunk.active
        lin: Lin = ({}, 0)
        const = lane = 0
        for i in range(len(layout.extents)):
            terms, c = add_lins(self.axes.start(stage, i), base[i], -1)
            if i == layout.tiled and layout.overlaps:
                lin = add_lins(lin, self.addresses.tile_at(layout, (terms, c)), 1)
                const += stage.offsets[i] * layout.strides[i]
            elif i == layout.tiled:
                lin = add_lins(lin, ({v: k * layout.outer // layout.tile for v, k in terms.items()}, 0), 1)
                position = c + stage.offsets[i]
                const += position // layout.tile * layout.outer + position % layout.tile * layout.strides[i]
            else:
                lin = add_lins(lin, (terms, 0), layout.strides[i])
                const += layout.strides[i] * (c + stage.offsets[i])
            if i == stage.frame.vector_axis:
                lane = layout.strides[i] * stage.frame.vector_stride
        start, _ = self.axes.apart(lin)
        if stage.frame.vector_axis == p.dim:
            value = self.packed_value(stage, p, w)
            words, used, step = w // g, active // g, lane
        else:
            first = stage.offsets[p.dim]
            parts = []
            for k in range(g):
                stage.offsets[p.dim] = first + k
                parts.append(self.packed_value(stage, p, w))
            stage.offsets[p.dim] = first
            value = self.interleaved(parts)
            words, used, step = w, active, lane // g
        if words == 1 or step == 1:
            extra = () if used == words else (b.vconst(dtypes.bool, tuple(k < used * g for k in range(words * g))),)
            b.store("STORE", p.dtype, words * g, (b.pure(op, p.dtype, 1, (), arg), start, value, *extra), (const, False))
            return
        extra = () if used == words else (b.vconst(dtypes.bool, tuple(k < used for k in range(words))),)
        word = b.alu("IDIV", dtypes.index, 1, start, b.index(g))
        b.store("STORES", WORD, words, (b.pure(op, WORD, 1, (), arg), word, b.bitcast(WORD, value), *extra), (const // g, step))

    def packed_value(self, stage: OpenStage, p: Packed, width: int) -> int:
        """Load the operand's narrow integer at the current position; 0 beyond the end of the summed axis."""
        b = self.b
        narrow = stored_node(stage.r, p)
        source = stage.r.nodes[narrow].dtype
        value = b.splat(self.values.evaluate(stage, narrow), width)
        padded = (p.dim, p.row_dim) if p.is_held else (p.dim,)
        inside = self.axes.guard(stage, padded) if not self.masked_zero(stage, narrow) else -1
        if inside >= 0:
            value = b.alu("WHERE", source, width, inside, value, b.const(source, width, 0))
        if not p.flipped:
            return b.cast(p.dtype, value)
        bits = b.alu("XOR", dtypes.uint8, width, b.bitcast(dtypes.uint8, value), b.const(dtypes.uint8, width, SIGN))
        return b.bitcast(p.dtype, bits)

    def masked_zero(self, stage: OpenStage, n: int) -> bool:
        """Whether a node is a load with a gate, or a bitcast of one, that gives 0 beyond the end of the summed axis."""
        node = stage.r.nodes[n]
        if node.kind == "bitcast":
            return self.masked_zero(stage, node.src[0])
        return node.kind == "load" and (node.gate < 0 or (stage.r.nodes[node.alt].kind == "const" and stage.r.nodes[node.alt].arg == 0))

    def interleaved(self, parts: list[int]) -> int:
        """Interleave vectors a, b, …: a0 b0 … a1 b1 …"""
        b = self.b
        size = 1        # elements of a block that the next step keeps together
        while len(parts) > 1:
            lanes = b.num_lanes[parts[0]]
            order = tuple(part * lanes + block * size + k for block in range(lanes // size) for part in (0, 1) for k in range(size))
            parts = [b.pure("SHUFFLE", b.dtype[x], 2 * lanes, (x, y), order) for x, y in zip(parts[::2], parts[1::2], strict=True)]
            size *= 2
        return parts[0]
