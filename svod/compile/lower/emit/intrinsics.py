"""Emits dot and matrix instructions: loads of their packed operands, and the instructions themselves.

    c[n] += a[k]·b[k, n]:     DOT c, (word of a in all lanes), (vector of words of p) [2]
    tiles:                    TILEDOT c, (rows of a), (rows of groups of b); afterwards TILESTORE to scratch, and rows from there
    tiles of a subgroup:      MMA c, (LOADMATRIX of a), (LOADMATRIX of b); each thread has some elements of each tile
    of several subgroups:     MMASHARED c, a in shared memory, b in shared memory

Operands are packed in whole groups (`packing`), so there are no partial groups here."""
from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from svod.compile.lower.emit.addresses import Address, Addresses
from svod.compile.lower.emit.axes import Axes
from svod.compile.lower.emit.context import PhaseContext
from svod.compile.lower.emit.packing import SIGN, WORD, Packing
from svod.compile.lower.emit.state import OpenStage, Staged
from svod.compile.lower.emit.values import Values
from svod.core.ir.dtype import dtypes
from svod.core.kernel.intrinsics import Operand, Packed, TensorizePlan
from svod.core.kernel.kernel import LinearIndex
from svod.core.kernel.required import add_lins
from svod.core.kernel.scheduler import DOT
from svod.core.machine.isa import Fragment
from svod.core.machine.levels import MemorySpace
from svod.core.tree.nodes import Chunk
from svod.errors import KernelOptError


class OperandAddress(NamedTuple):
    """An operand at the current position: its staged value, its element number as an index over the stage's axes, and its address."""

    staged: Staged
    linear: LinearIndex
    address: Address


class TileAddress(NamedTuple):
    """The address of a tile of an operand.

    `at`: an index value; a swizzled layout has a second one, along the lines, which is added after the swizzle. `const`: constant to add.
    `steps`: elements from row to row and from column to column. `lines`: lines in a row of the swizzled layout; 1 without swizzle."""

    at: tuple[int, ...]
    const: int
    steps: tuple[int, int]
    lines: int


def nothing_before(stage: OpenStage) -> list[int] | None:
    """Emit nothing before a product outside of pipelined loops, for which no operands were loaded earlier."""
    return None


class Intrinsics:
    """Emits products by the instructions that a state's opts chose."""

    def __init__(self, ctx: PhaseContext, axes: Axes, addresses: Addresses, values: Values, packing: Packing):
        self.ctx, self.b, self.state, self.kernel, self.facts = ctx, ctx.b, ctx.state, ctx.kernel, ctx.facts
        self.axes, self.addresses, self.values, self.packing = axes, addresses, values, packing
        # emits the code that a pipelined loop has before its next product, and returns that product's operands if they were loaded earlier,
        # otherwise None
        self.before_product: Callable[[OpenStage], list[int] | None] = nothing_before

    def plan_of(self, stage: OpenStage) -> TensorizePlan | None:
        """Return the dot or matrix instruction that computes the stage's sums; None if scalar code computes them, and in the phase that
        combines partial results."""
        return None if stage.r.combines else self.facts.dots.get(stage.index)

    def dot(self, stage: OpenStage, plan: TensorizePlan, acc: int, width: int) -> int:
        """Add the dot products of the groups at the current position to `acc`."""
        a, c = (self.dot_operand(stage, o, p, width) for o, p in zip(plan.operands, plan.packed, strict=True))
        return self.b.pure("DOT", plan.dot.accumulator, width, (acc, a, c), plan.dot.group)

    def dot_correction(self, stage: OpenStage, plan: TensorizePlan, acc: int, width: int) -> int:
        """Correct `acc` for the flipped sign bits of one operand: add the error that they cause in the groups at the current position."""
        at = plan.corrects
        p = plan.packed[1 - at]
        bits = self.b.const(p.dtype, width * p.group, SIGN if p.dtype.kind == "u" else -SIGN)
        vector = self.dot_operand(stage, plan.operands[at], plan.packed[at], width)
        src = (acc, bits, vector) if at else (acc, vector, bits)
        return self.b.pure("DOT", plan.dot.accumulator, width, src, p.group)

    def dot_operand(self, stage: OpenStage, o: Operand, p: Packed, width: int) -> int:
        """Load an operand's groups at the current position, one per lane."""
        node = stage.r.nodes[o.node]
        key: Any = ("dot", o.node, width, stage.chunk.active, *[stage.offsets[d] for d in node.deps])
        groups = stage.memo.get(key)
        if groups is None:
            groups = stage.memo[key] = self.load_groups(stage, o, p, width)
        return groups

    def load_groups(self, stage: OpenStage, o: Operand, p: Packed, width: int) -> int:
        b = self.b
        staged, _, (start, const, lane, vector) = self.operand_at(stage, o)
        g = p.group
        gate = self.axes.guard(stage, stage.r.nodes[o.node].deps) if staged.guarded else -1
        if vector < 0 and lane in (0, g):
            lanes = width * g if lane else g
            extra: tuple[int, ...] = ()
            if gate >= 0:
                extra = (self.per_element(gate, lanes), b.const(p.dtype, lanes, 0))
            value = b.load("LOAD", p.dtype, lanes, (staged.pointer, start, *extra), const, staged.floor, False, staged.version)
            b.prefetch(value, stage.ahead.get(o.node, 0))
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
            b.prefetch(value, stage.ahead.get(o.node, 0) // g)
        return b.bitcast(p.dtype, value)

    def per_element(self, gate: int, lanes: int) -> int:
        """Turn a condition with one lane per group into one with a lane per element, `lanes` in all."""
        b = self.b
        words = b.num_lanes[gate]
        if words == 1:
            return b.splat(gate, lanes)
        return b.pure("SHUFFLE", dtypes.bool, lanes, (gate,), tuple(i * words // lanes for i in range(lanes)))

    def tile_shape(self, stage: OpenStage, plan: TensorizePlan) -> tuple[int, int]:
        """Return (rows, columns) of a tile in this stage; fewer than the instruction's if the axes have fewer positions."""
        rows, columns = (next((p.extent for p in stage.frame.pieces[a] if p.role == DOT), 1) for a in (plan.rows, plan.columns))
        return rows, columns

    def tile_zero(self, stage: OpenStage, plan: TensorizePlan, number: int) -> int:
        """Emit a tile accumulator of zeros. Tile registers change in place, so a tile must not be merged with an equal one, or hoisted
        out of its loop."""
        if plan.dot.fragments:
            return self.b.const(plan.dot.accumulator, plan.dot.fragments[0].num_elements, 0)
        rows, columns = self.tile_shape(stage, plan)
        return self.b.load("TILEZERO", plan.dot.accumulator, rows * columns, (), (rows, columns, number), ordered=True)

    def tile_dot(self, stage: OpenStage, plan: TensorizePlan, acc: int) -> int:
        """Add the product of the tiles at the current position to `acc`."""
        if plan.dot.fragments:
            return self.held_dot(stage, plan, acc)
        rows, columns = self.tile_shape(stage, plan)
        g, depth = plan.dot.group, plan.dot.depth
        chosen = self.state.dots[stage.index]
        assert chosen is not None
        along = stage.r.axes.index(chosen.axis)
        values = []
        for o, p, lines, length, down in zip(plan.operands, plan.packed, (rows, depth), (depth * g, columns * g), (plan.rows, along),
                                             strict=True):
            staged, linear, (start, const, _, vector) = self.operand_at(stage, o)
            if vector >= 0:
                raise KernelOptError(f"stage {self.kernel.stages[o.stage].name} is gathered column by column; a tile has rows in memory")
            step = linear.coef(down) * (1 if down == plan.rows else g)
            beside = linear.coef(along) if down == plan.rows else linear.coef(plan.columns) // g
            if beside != 1 or staged.guarded:
                name = self.kernel.stages[o.stage].name
                raise KernelOptError(f"stage {name} does not lie in rows for tiles; leave its axes as TC put them, without PADTO")
            # Loaded in this loop, even if the address does not change in it: tile registers are few, and a hoisted tile would occupy one.
            values.append(self.b.load("TILELOAD", p.dtype, lines * length, (staged.pointer, start), (const, lines, step),
                                      max(staged.floor, self.b.level), False, staged.version))
        return self.b.pure("TILEDOT", plan.dot.accumulator, rows * columns, (acc, *values), (rows, columns, g))

    def held_dot(self, stage: OpenStage, plan: TensorizePlan, acc: int) -> int:
        """Add the product of the tiles at the current position to `acc`. Each tile is distributed over the registers of a subgroup's
        threads."""
        if plan.dot.reads_shared:
            return self.shared_dot(stage, plan, acc)
        b, dot = self.b, plan.dot
        self.ctx.group.exchanges = True
        operands = self.before_product(stage) or self.fragments(stage, plan)
        return b.load("MMA", dot.accumulator, b.num_lanes[acc], (acc, *operands), dot.name, b.level)

    def load(self, stage: OpenStage, products: tuple[tuple[int, ...], ...]) -> dict[tuple[int, ...], list[int]]:
        """Load the operands of products before they are computed; returns them by the offsets of each product along the stage's axes."""
        plan, offsets, chunk, found = self.plan_of(stage), stage.offsets, stage.chunk, dict[tuple[int, ...], list[int]]()
        assert plan is not None
        for one in products:
            stage.set_position(dict(enumerate(one)), Chunk(0, 1, 1))
            found[one] = self.fragments(stage, plan)
        stage.offsets, stage.chunk = offsets, chunk
        return found

    def fragments(self, stage: OpenStage, plan: TensorizePlan) -> list[int]:
        """Load or compute the elements of each operand's tile that this thread holds in registers at the current position."""
        return [self.fragment(stage, plan, number) for number in range(len(plan.operands))]

    def fragment(self, stage: OpenStage, plan: TensorizePlan, number: int) -> int:
        """Load or compute the elements of one operand's tile that this thread holds in registers at the current position."""
        b, dot, o, p = self.b, plan.dot, plan.operands[number], plan.packed[number]
        chosen = self.state.dots[stage.index]
        assert chosen is not None and dot.fragments is not None
        along = stage.r.axes.index(chosen.axis)
        sides = (along, plan.columns) if number else (plan.rows, along)
        if self.facts.space(o.stage) is MemorySpace.HELD:
            return self.computed_fragment(stage, o, p, dot.fragments[1 + number], sides)
        staged, tile = self.ctx.staged_value(o.stage), self.tile_at(stage, plan, o, sides)
        if b.op[staged.pointer] == "SCRATCH":
            name = self.kernel.stages[o.stage].name
            raise KernelOptError(f"stage {name} lies in the memory of one thread; a subgroup holds its tiles")
        # Loaded in the loop that multiplies, even if the address does not change in it: a hoisted fragment would occupy registers all
        # the time.
        return b.load("LOADMATRIX", p.dtype, dot.fragments[1 + number].num_elements, (staged.pointer, *tile.at),
                      (tile.const, dot.name, number, *tile.steps, tile.lines), max(staged.floor, b.level), False, staged.version)

    def computed_fragment(self, stage: OpenStage, o: Operand, p: Packed, fragment: Fragment, tile: tuple[int, int]) -> int:
        """Compute this thread's elements of an operand that is not stored in memory. `tile`: the local axes of the operand's rows and
        columns."""
        node, r = stage.r.nodes[o.node], self.facts.placement.stage(o.stage)
        key: Any = ("computed", o.node, *[stage.offsets[d] for d in node.deps])
        if key not in stage.memo:
            first = dict(zip(tile, self.ctx.group.origin(fragment), strict=True))
            base = [self.axes.at(stage, lin) for lin in node.dims]
            for d, lin in enumerate(node.dims):
                for a, c in lin.coefs:
                    base[d] = add_lins(base[d], first.get(a, ({}, 0)), c)
            extents = tuple([self.kernel.axes[a].extent for a in r.stage.outs])
            frame = self.facts.maker.make_frame(r, ((),) * len(base), extents, (0,) * len(base), -1, -1, 1, ())
            one, parts = OpenStage(frame, base), []
            along, across = (p.row_dim, p.dim) if node.dims[p.dim].coef(tile[1]) else (p.dim, p.row_dim)
            for row, column in fragment.places:
                one.offsets = [row * (d == along) + column * (d == across) for d in range(len(base))]
                parts.append(self.packing.packed_value(one, p, 1))
            stage.memo[key] = self.packing.interleaved(parts)
        return stage.memo[key]

    def tile_at(self, stage: OpenStage, plan: TensorizePlan, o: Operand, axes: tuple[int, int]) -> TileAddress:
        """Compute the address of an operand's tile at the current position. `axes`: the axes of the tile's rows and columns. If the
        position along another axis is beyond the end, the first tile is read instead; that result is never stored."""
        b, dims = self.b, stage.r.nodes[o.node].dims
        layout = self.ctx.staged_value(o.stage).layout
        if layout is None or layout.swizzle is None:
            staged, linear, (start, const, _, _) = self.operand_at(stage, o)
            at, steps, lines = [start], (linear.coef(axes[0]), linear.coef(axes[1])), 1
        else:
            staged, start, const, further, inner = self.in_rows(stage, o)
            if b.multiple_of(start) % layout.swizzle.period:
                start, further = b.index(0), b.add(start, further)
            at, lines = [start, further], layout.swizzle.lines
            down, across = (next(d for d, lin in enumerate(dims) if lin.coef(a)) for a in axes)
            steps = (1 if down == inner else layout.strides[down], 1 if across == inner else layout.strides[across])
        beside = [a for a in stage.r.nodes[o.node].deps if a not in (plan.rows, plan.columns)]
        gate = self.axes.guard(stage, beside) if staged.guarded else -1
        if gate >= 0:
            at[-1], const = b.add(at[-1], b.index(const)), 0
            at = [b.alu("WHERE", dtypes.index, 1, gate, index, b.index(0)) for index in at]
        return TileAddress(tuple(at), const, steps, lines)

    def in_rows(self, stage: OpenStage, o: Operand) -> tuple[Staged, int, int, int, int]:
        """Compute the address of an operand in a swizzled layout, or in a layout for MMASHARED. Returns (staged value, offset along all
        dims but the innermost, constant to add, offset along the innermost dim, number of the innermost dim)."""
        dims, staged = stage.r.nodes[o.node].dims, self.ctx.staged_value(o.stage)
        layout = staged.layout
        assert layout is not None
        inner = layout.order[-1]
        found = stage.linear.get(("rows", o.stage, dims))
        if found is None:
            others = layout._replace(strides=(*layout.strides[:inner], 0, *layout.strides[inner + 1:]), tiled=-1)
            found = stage.linear["rows", o.stage, dims] = self.addresses.relative(stage, staged._replace(layout=others), dims)
        start, const, _, _ = self.values.address(stage, *found)
        further, more = self.addresses.along(stage, staged, inner, dims[inner])
        return staged, start, const + more, further, inner

    def shared_dot(self, stage: OpenStage, plan: TensorizePlan, acc: int) -> int:
        """Add the product of the tiles at the current position to `acc`, by an instruction that reads them from shared memory."""
        b, dot, group = self.b, plan.dot, self.ctx.group
        src, sides = [acc], list[tuple[int, int, int, int]]()
        group.exchanges = True
        for number, (o, p) in enumerate(zip(plan.operands, plan.packed, strict=True)):
            staged, start, const, further, inner = self.in_rows(stage, o)
            assert staged.layout is not None and b.op[staged.pointer] == "SHARED"
            # whether the innermost dim, which is cut into lines, runs along the matrix's columns
            in_columns = (inner == p.dim) == (number == 0)
            src += [staged.pointer, b.add(start, further)]
            sides.append((const, int(in_columns), staged.layout.outer, staged.layout.tile // p.line))
        return b.load("MMASHARED", dot.accumulator, b.num_lanes[acc], tuple(src), (dot.name, *sides), ordered=True)

    def operand_at(self, stage: OpenStage, o: Operand) -> OperandAddress:
        dims = stage.r.nodes[o.node].dims
        staged = self.ctx.staged_value(o.stage)
        cached = stage.linear.get((o.stage, dims))
        if cached is None:
            cached = stage.linear[o.stage, dims] = self.addresses.relative(stage, staged, dims)
        linear, base = cached
        return OperandAddress(staged, linear, self.values.address(stage, linear, base))
