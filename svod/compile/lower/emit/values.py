"""Emits the nodes of a stage as instructions at one position, loads and stores included."""
from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from svod.compile.lower import math
from svod.compile.lower.emit.addresses import Address, Addresses, Base
from svod.compile.lower.emit.axes import Axes
from svod.compile.lower.emit.context import PhaseContext
from svod.compile.lower.emit.state import Held, OpenStage
from svod.core.ir.dtype import DType, dtypes
from svod.core.ir.uop import COMPARISONS, TRANSCENDENTAL
from svod.core.kernel.attention_weights import attention_weights
from svod.core.kernel.intrinsics import normal_power, stored_node
from svod.core.kernel.kernel import LinearIndex, Node
from svod.core.kernel.layout import Layout
from svod.core.kernel.required import Lin, Terms, add_lins
from svod.core.machine.target import SAME
from svod.core.tree.nodes import Chunk
from svod.errors import KernelOptError

COMPARES = frozenset(op.value for op in COMPARISONS)
_TRANSCENDENTAL = {op.value: op for op in TRANSCENDENTAL}


class SumOfAxes(NamedTuple):
    """Σ coefficient·axis + constant in a vector: `start` is the value in the first lane, `step` the difference between neighbouring
    lanes."""

    start: Lin
    step: int


class Values:
    """Emits values of nodes, loads and stores at the current position of an open stage."""

    def __init__(self, ctx: PhaseContext, axes: Axes, addresses: Addresses):
        self.ctx, self.b, self.state, self.kernel = ctx, ctx.b, ctx.state, ctx.kernel
        self.axes, self.addresses = axes, addresses
        self.on_grid = ctx.facts.on_grid        # on a grid, one scalar mask holds for all lanes
        self.rules = self.state.target.float_rules
        # under the policy "same", values do not depend on what is found about the kernel that computes them
        has_weights = self.rules.has_slow_subnormals and self.state.target.numerics != SAME
        self.attention_weights = attention_weights(self.kernel, self.state.inlined) if has_weights else frozenset()

    def evaluate(self, stage: OpenStage, n: int) -> int:
        """Emit the value of a node at the current position: a vector if lanes differ, otherwise a scalar."""
        key = self._key(stage, n)
        value = stage.memo.get(key)
        if value is None:
            value = stage.memo[key] = _EVAL[stage.r.nodes[n].kind](self, stage, stage.r.nodes[n])
            if n in stage.ahead:
                self.b.prefetch(value, stage.ahead[n])
        return value

    @staticmethod
    def _key(stage: OpenStage, n: int) -> Any:
        """Return the key under which a node's value at the current position is cached."""
        deps = stage.r.nodes[n].deps
        if stage.frame.vector_axis in deps:
            chunk = stage.chunk
            return n, chunk.width, chunk.active, stage.offsets_of[n](stage.offsets)
        return (n, stage.offsets_of[n](stage.offsets)) if deps else n

    def put(self, stage: OpenStage, value: int) -> None:
        """Set the stage's value at the current position, for a value that other code has computed."""
        stage.memo[self._key(stage, stage.r.value)] = value

    def in_vector(self, stage: OpenStage, n: int) -> tuple[int, int]:
        """Emit (value in the first lane, difference between neighbouring lanes) of a node that grows evenly in the vectors of a copy.
        For any other node: (value in all lanes, 0)."""
        step = stage.steps.get(n)
        if step is None or stage.frame.vector_axis not in stage.r.nodes[n].deps:
            return self.evaluate(stage, n), 0
        chunk, stage.chunk = stage.chunk, Chunk(stage.chunk.offset, 1, 1)
        value = self.evaluate(stage, n)
        stage.chunk = chunk
        return value, step

    def gate(self, stage: OpenStage, node: Node) -> int:
        """Emit the condition of a load; -1: it has none. The condition is a scalar if it is the same in all lanes of a copy's vector."""
        if node.gate < 0:
            return -1
        return self.in_vector(stage, node.gate)[0] if stage.steps.get(node.gate) == 0 else self.evaluate(stage, node.gate)

    def result(self, stage: OpenStage) -> int:
        """Emit the value of the stage at the current position."""
        return self.evaluate(stage, stage.r.value)

    def eval_const(self, stage: OpenStage, node: Node) -> int:
        return self.b.const(node.dtype, 1, node.arg)

    def eval_variable(self, stage: OpenStage, node: Node) -> int:
        return self.b.pure("VAR", dtypes.index, 1, (), node.arg)

    def eval_axis(self, stage: OpenStage, node: Node) -> int:
        return self.axes.coordinate(stage, node.arg)

    def eval_alu(self, stage: OpenStage, node: Node) -> int:
        b = self.b
        power = normal_power(stage.r, node) if self.state.target.has_pow2 else -1
        if power >= 0:
            x = self.evaluate(stage, power)
            return b.alu("POW2", node.dtype, b.num_lanes[x], x)
        if node.op in COMPARES and self.on_grid:
            compared = self.compared(stage, node)
            if compared >= 0:
                return compared
        args = [self.evaluate(stage, s) for s in node.src]
        lanes = max([b.num_lanes[a] for a in args])
        op = node.op
        if op in _TRANSCENDENTAL:
            args = [b.splat(a, lanes) for a in args]
            if op == "EXP" and (stage.r.stage.index, node.src[0]) in self.attention_weights:
                return math.expand_attention_weight(b, node.dtype, lanes, args[0], self.rules)
            return math.expand(b, _TRANSCENDENTAL[op], node.dtype, lanes, *args, rules=self.rules)
        if op == "RECIPROCAL":
            return b.alu("FDIV", node.dtype, lanes, b.const(node.dtype, lanes, 1), args[0])
        return b.alu(op, node.dtype, lanes, *args)

    def compared(self, stage: OpenStage, node: Node) -> int:
        """Emit a comparison of two sums of axes, with all constants on one side, so that the positions of a tile share the computation
        of the other side. Returns -1, and emits nothing, for other operands."""
        low, high = (self.sum_of_axes(stage, s) for s in node.src)
        if low is None or high is None:
            return -1
        b, (terms, const), step = self.b, add_lins(low.start, high.start, -1), low.step - high.step
        width = stage.chunk.width if step else 1
        value = b.splat(self.axes.ssa((terms, 0)), width)
        return b.alu(node.op, dtypes.bool, width, value, b.vconst(dtypes.index, tuple(-const - k * step for k in range(width))))

    def sum_of_axes(self, stage: OpenStage, n: int) -> SumOfAxes | None:
        """Return a node as a sum of axes and constants at the current position; None if it is no such sum."""
        node = stage.r.nodes[n]
        if node.dtype != dtypes.index:
            return None
        if node.kind == "const":
            return SumOfAxes(({}, node.arg), 0)
        if node.kind == "axis":
            a = node.arg
            start = add_lins(self.axes.start(stage, a), ({}, stage.offsets[a]), 1)
            return SumOfAxes(start, stage.frame.vector_stride if a == stage.frame.vector_axis else 0)
        if node.kind != "alu" or node.op not in ("ADD", "SUB", "MUL"):
            return None
        first, second = (self.sum_of_axes(stage, s) for s in node.src)
        if first is None or second is None:
            return None
        if node.op == "MUL":
            if second.start[0] or second.step:
                return None
            k = second.start[1]
            return SumOfAxes(add_lins(({}, 0), first.start, k), first.step * k)
        k = 1 if node.op == "ADD" else -1
        return SumOfAxes(add_lins(first.start, second.start, k), first.step + k * second.step)

    def eval_cast(self, stage: OpenStage, node: Node) -> int:
        return self.b.cast(node.dtype, self.evaluate(stage, node.src[0]))

    def eval_bitcast(self, stage: OpenStage, node: Node) -> int:
        return self.b.bitcast(node.dtype, self.evaluate(stage, node.src[0]))

    def eval_reduce(self, stage: OpenStage, node: Node) -> int:
        return stage.results[node.arg]

    def eval_part(self, stage: OpenStage, node: Node) -> int:
        assert node.linear is not None
        pointer = self.b.pure("TEMP", node.dtype, 1, (), self.ctx.facts.parts[node.arg])
        return self.load(stage, node.dtype, pointer, node.linear, -1, -1, 0, False)

    def eval_load(self, stage: OpenStage, node: Node) -> int:
        b = self.b
        slot: int = node.arg
        assert node.linear is not None
        pointer = b.pure("ARG", self.kernel.params[slot].dtype, 1, (), slot)
        gate = self.gate(stage, node)
        alt = self.evaluate(stage, node.alt) if node.gate >= 0 else b.const(node.dtype, 1, 0)
        if gate >= 0 and b.known(gate) is not None:
            if not b.known(gate):
                return alt
            gate = -1
        in_place = slot in self.kernel.written
        guards = [self.axes.guard(stage, node.deps)]
        if in_place and (stage.results or not stage.r.reductions):     # only the thread that stores a position reads it
            guards.append(stage.stores)
        for guard in guards:
            if guard >= 0:
                gate = guard if gate < 0 else b.alu("AND", dtypes.bool, max(b.num_lanes[gate], b.num_lanes[guard]), gate, guard)
        return self.load(stage, node.dtype, pointer, node.linear, gate, alt, 0, in_place)

    def eval_read(self, stage: OpenStage, node: Node) -> int:
        s: int = node.arg
        staged = self.ctx.staged_value(s)
        if staged.held is not None:
            return self.held_value(stage, node, staged.held)
        if staged.layout is None:
            return staged.scalar
        linear, base = self._relative(stage, node)
        gate = alt = -1
        if staged.guarded:
            gate, alt = self.axes.guard(stage, node.deps), self.b.const(node.dtype, 1, 0)
        # other threads may write the shared memory behind the area, so a load does not read past the area's end
        return self.load(stage, node.dtype, staged.pointer, linear, gate, alt, staged.floor, False, base,
                         slack=self.b.op[staged.pointer] != "SHARED", version=staged.version)

    def held_value(self, stage: OpenStage, node: Node, held: Held) -> int:
        """Return the element, at the current position, of a stage whose values this thread has in registers."""
        terms, place = self.axes.placed([self.axes.at(stage, lin) for lin in node.dims])
        value = held.values.get(place) if terms == held.terms else None
        if value is None:
            raise KernelOptError(f"stage {self.kernel.stages[node.arg].name} is read at another position than those that its threads hold")
        return value

    def load(self, stage: OpenStage, dtype: DType, pointer: int, linear: LinearIndex, gate: int, alt: int, floor: int, ordered: bool,
              base: Base | None = None, slack: bool = False, version: int = 0) -> int:
        """Emit a load at the current position. `gate`: its condition, -1 for none; `alt`: the value if that is false.
        `slack`: one vector past the end of the area may be read, so that contiguous loads need no mask."""
        b = self.b
        start, const, lane, vector = self.address(stage, linear, base)
        w = stage.chunk.width
        gate_lanes = b.num_lanes[gate] if gate >= 0 else 1
        lanes = w if (lane or vector >= 0 or gate_lanes > 1) else 1
        if lanes > 1 and stage.chunk.active < w and not (slack and vector < 0 and lane == 1):
            mask = self.prefix_mask(stage.chunk)
            gate = mask if gate < 0 else b.alu("AND", dtypes.bool, w, mask, gate)
            if alt < 0:
                alt = b.const(dtype, 1, 0)
        extra: tuple[int, ...] = ()
        if gate >= 0:
            extra = (gate if self.on_grid else b.splat(gate, lanes), b.splat(alt, lanes))
        if vector >= 0:
            index = b.alu("ADD", dtypes.index, lanes, b.splat(start, lanes), vector)
            return b.load("GATHER", dtype, lanes, (pointer, index, *extra), const, floor, ordered, version)
        if lanes == 1 or lane == 1:
            return b.load("LOAD", dtype, lanes, (pointer, start, *extra), const, floor, ordered, version)
        return b.load("LOADS", dtype, lanes, (pointer, start, *extra), (const, lane), floor, ordered, version)

    def address(self, stage: OpenStage, linear: LinearIndex, base: Base | None = None) -> Address:
        """Compute the address of an access at the current position. `base`: the start of the address, for staged values; None: it is
        computed from the loops."""
        b = self.b
        off = stage.offsets
        start, const = self.addresses.base_of(stage, linear) if base is None else base
        const += linear.const
        lane = 0
        for a, c in linear.coefs:
            const += c * off[a]
            if a == stage.frame.vector_axis:
                lane = c * stage.frame.vector_stride
        vector = -1
        for n, c in linear.atoms:
            value, step = self.in_vector(stage, n)
            lane += c * step
            known = b.known(value)
            if known is not None:
                const += c * known
            elif b.num_lanes[value] == 1:
                start = b.add(start, b.mul(value, c))
            else:
                w = b.num_lanes[value]
                term = b.alu("MUL", dtypes.index, w, value, b.const(dtypes.index, w, c)) if c != 1 else value
                vector = term if vector < 0 else b.alu("ADD", dtypes.index, w, vector, term)
        if vector >= 0 and lane:
            w = b.num_lanes[vector]
            vector = b.alu("ADD", dtypes.index, w, vector, b.vconst(dtypes.index, tuple(i * lane for i in range(w))))
            lane = 0
        return Address(start, const, lane, vector)

    def copy_async(self, stage: OpenStage, pointer: int, at: int, const: int) -> None:
        """Emit an asynchronous copy into shared memory, of the current position of the argument, or of the value of another phase, that
        the stage copies. Zeros are stored if the guard is false."""
        b, node = self.b, stage.r.nodes[stored_node(stage.r, self.ctx.facts.packed.get(stage.index))]
        width = stage.chunk.width if stage.frame.vector_axis >= 0 else 1
        source, (start, offset, _, _) = self._source(stage, node)
        gate = self.gate(stage, node)
        guard = self.axes.guard(stage, node.deps)
        if guard >= 0:
            gate = guard if gate < 0 else b.alu("AND", dtypes.bool, 1, gate, guard)
        inside = gate if gate >= 0 else b.const(dtypes.bool, 1, True)
        stores = stage.stores if stage.stores >= 0 else b.const(dtypes.bool, 1, True)
        b.store("COPY_ASYNC", node.dtype, width, (pointer, at, source, start, stores, inside), (const, offset))

    def _source(self, stage: OpenStage, node: Node) -> tuple[int, Address]:
        """Compute (pointer, address) of what a node loads from an argument, or reads of another phase, at the current position."""
        if node.kind == "load":
            assert node.linear is not None
            return self.b.pure("ARG", self.kernel.params[node.arg].dtype, 1, (), node.arg), self.address(stage, node.linear)
        staged = self.ctx.staged_value(node.arg)
        linear, base = self._relative(stage, node)
        return staged.pointer, self.address(stage, linear, base)

    def _relative(self, stage: OpenStage, node: Node) -> tuple[LinearIndex, Base]:
        """Compute the element number that a read addresses, and its base, once inside the open loops."""
        cached = stage.linear.get((node.arg, node.dims))
        if cached is None:
            cached = stage.linear[node.arg, node.dims] = self.addresses.relative(stage, self.ctx.staged_value(node.arg), node.dims)
        linear, base = cached
        return linear, base

    def copy_bulk(self, stage: OpenStage, pointer: int, at: int, const: int, counts: int, number: int) -> None:
        """Emit a bulk copy into shared memory, of the row at the current position of the argument that the stage copies. Counter
        `number` counts its arrival."""
        b, node = self.b, stage.r.nodes[stored_node(stage.r, self.ctx.facts.packed.get(stage.index))]
        assert node.linear is not None
        source = b.pure("ARG", self.kernel.params[node.arg].dtype, 1, (), node.arg)
        start, offset, _, _ = self.address(stage, node.linear)
        stores = stage.stores if stage.stores >= 0 else b.const(dtypes.bool, 1, True)
        b.store("COPY_BULK", node.dtype, stage.chunk.width, (pointer, at, source, start, stores, counts, number), (const, offset))

    def prefix_mask(self, chunk: Chunk) -> int:
        return self.b.vconst(dtypes.bool, tuple(i < chunk.active for i in range(chunk.width)))

    # -- stores --------------------------------------------------------------------------------------------
    def store_linear(self, stage: OpenStage, value: int, pointer: int, linear: LinearIndex, stream: bool,
                     extra: Terms | None = None) -> None:
        """Store a value at the current position of a flat index over the stage's axes. `extra`: terms to add to the index."""
        b = self.b
        at = self.address(stage, linear)
        start = at.start
        for v, c in (extra or {}).items():
            start = b.add(start, b.mul(v, c))
        self.store(stage, value, pointer, at._replace(start=start), stream)

    def store_layout(self, stage: OpenStage, value: int, pointer: int, layout: Layout, base: list[Lin], padded: bool = False) -> None:
        """Store a value at the current position of a staged area. A partial vector at the end of a single row in scratch memory is stored
        whole: what is behind the row is never read for its value, and a load of the whole vector waits until a masked store has reached
        the cache."""
        slack = self.b.op[pointer] == "SCRATCH" and layout.size == (layout.extents[layout.order[-1]] if layout.order else 1)
        self.store(stage, value, pointer, self.addresses.in_layout(stage, pointer, layout, base), False, padded, slack)

    def store(self, stage: OpenStage, value: int, pointer: int, address: Address, stream: bool, padded: bool = False,
              slack: bool = False) -> None:
        """Emit a store at an address. `padded`: the memory has room for positions beyond the extents, so these are stored as well,
        without a guard. `slack`: one vector past the end of the area may be written, so that contiguous stores need no mask."""
        b = self.b
        start, const, lane, vector = address
        w = stage.chunk.width if stage.frame.vector_axis >= 0 else 1
        outs = range(stage.frame.num_outs)
        guard = -1
        if b.op[pointer] not in ("SCRATCH", "SHARED") and not padded:
            # arguments and temporaries have no room for positions beyond an extent
            guard = self.axes.guard(stage, outs)
        if stage.stores >= 0:
            guard = stage.stores if guard < 0 else b.alu("AND", dtypes.bool, b.num_lanes[guard], guard, stage.stores)
        lanes = w if (lane or vector >= 0) else 1
        dtype = b.dtype[pointer]
        mask = guard
        if lanes > 1 and stage.chunk.active < w and not (slack and vector < 0 and lane == 1):
            prefix = self.prefix_mask(stage.chunk)
            mask = prefix if mask < 0 else b.alu("AND", dtypes.bool, w, prefix, mask)
        known = b.known(mask) if mask >= 0 else True
        if known is False:
            return
        extra = () if known is True else (mask if self.on_grid else b.splat(mask, lanes),)
        if vector >= 0:
            index = b.alu("ADD", dtypes.index, lanes, b.splat(start, lanes), vector)
            b.store("SCATTER", dtype, lanes, (pointer, index, b.splat(value, lanes), *extra), const)
        elif lanes == 1 or lane == 1:
            # Masked and unaligned stores at the end of an extent are not non-temporal: an unaligned non-temporal store would fault.
            is_aligned = stage.frame.is_aligned or b.multiple_of(start) % lanes == 0 == const % lanes
            stream = stream and lanes == stage.frame.width and not extra and is_aligned
            b.store("STORE", dtype, lanes, (pointer, start, b.splat(value, lanes), *extra), (const, stream))
        else:
            b.store("STORES", dtype, lanes, (pointer, start, b.splat(value, lanes), *extra), (const, lane))


_EVAL: dict[str, Callable[[Values, OpenStage, Node], int]] = {
    "const": Values.eval_const, "variable": Values.eval_variable, "axis": Values.eval_axis,
    "alu": Values.eval_alu, "cast": Values.eval_cast,
    "bitcast": Values.eval_bitcast, "load": Values.eval_load, "read": Values.eval_read, "reduce": Values.eval_reduce,
    "part": Values.eval_part,
}
