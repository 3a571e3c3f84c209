"""Emits values for the axes of an open stage: starts, extents that depend on variables, and conditions that positions are inside."""
from __future__ import annotations

from math import gcd
from typing import Any

from svod.compile.lower.emit.context import PhaseContext
from svod.compile.lower.emit.state import OpenStage
from svod.core.ir.dtype import dtypes
from svod.core.ir.uop import Ops, UOp
from svod.core.kernel.kernel import LinearIndex
from svod.core.kernel.placement import EmittedLoop
from svod.core.kernel.required import Lin, add_lins, sum_lins
from svod.core.tree.nodes import UNCHECKED, Ends, When
from svod.core.tree.tails import FEW_ROWS


class Axes:
    """Emits values for the axes of open stages."""

    def __init__(self, ctx: PhaseContext):
        self.ctx, self.b, self.facts, self.kernel = ctx, ctx.b, ctx.facts, ctx.kernel

    def start(self, stage: OpenStage, a: int) -> Lin:
        """Compute the start of axis `a` of the stage inside the loops opened so far. Offsets of unrolled positions are not included:
        addresses add them as constants. A tile that would cross the end of the axis is moved back to end there."""
        lin = stage.linear.get(a)
        if lin is None:
            terms, const = sum_lins(stage.opened[a])
            if stage.frame.ends(a) is Ends.MOVED_BACK:
                last = max(0, stage.frame.bounds[a] - stage.span(a))
                if terms:
                    terms, const = {self.b.alu("MIN", dtypes.index, 1, self.ssa((terms, const)), self.b.index(last)): 1}, 0
                else:
                    const = min(const, last)
            base_terms, base_const = stage.base[a]
            lin = stage.linear[a] = add_lins((terms, const), (base_terms, base_const), 1)
        return lin

    def placed_at(self, starts: Lin) -> Lin:
        """Translate a start given in loops of the state into index values: of the open loops, or of this thread's number."""
        state, group = self.facts.state, self.ctx.group
        (terms, const), seen = starts, set[tuple[int, int]]()
        found: Lin = ({}, const)
        for row, c in terms.items():
            stage = self.ctx.open_stages[state.stage_of_row(row)]
            a = stage.r.axes.index(state.rows[row].axis)
            if row in group.digits:
                stride = next(p.stride for p in self.facts.nest.stages[stage.index].axes[a] if p.row == row)
                found = add_lins(found, ({self.b.mul(group.starts(stage.r)[row], stride): 1}, 0), c // stride)
            elif (stage.index, a) not in seen:
                seen.add((stage.index, a))
                stride = next(p.stride for p in stage.frame.pieces[a] if p.row == row)
                start, common = add_lins(self.start(stage, a), stage.base[a], -1), gcd(c, stride)
                if common < stride:     # a region of a quotient: its start is the quotient of this one
                    by = self.b.index(stride // common)
                    start = {self.b.alu("IDIV", dtypes.index, 1, self.ssa(start), by): 1}, 0
                found = add_lins(found, start, c // common)
        return found

    def at(self, stage: OpenStage, lin: LinearIndex) -> Lin:
        """Evaluate an index (Σ coefficient·axis + constant) at the current position."""
        here: Lin = ({}, lin.const)
        for a, c in lin.coefs:
            here = add_lins(here, add_lins(self.start(stage, a), ({}, stage.offsets[a]), 1), c)
        return here

    def placed(self, place: list[Lin]) -> tuple[tuple[frozenset[tuple[int, int]], ...], tuple[int, ...]]:
        """Split a position with one `Lin` per dim into (the terms of each dim, the constant of each dim)."""
        return tuple([frozenset(terms.items()) for terms, _ in place]), tuple([const for _, const in place])

    def bound(self, stage: OpenStage, a: int) -> UOp | None:
        """Return the extent of axis `a` as an expression, if the axis's loops end at a variable; otherwise None. On a grid it is always
        None, because loops there have constant ends."""
        return None if self.facts.on_grid else self.variable_bound(stage, a)

    def variable_bound(self, stage: OpenStage, a: int) -> UOp | None:
        """Return the extent of axis `a` as an expression, if it depends on variables; otherwise None. On a grid, loops run to the
        largest extent, and guards compare positions with this one."""
        axis = stage.r.axes[a]
        return self.kernel.axes[axis].bound if axis >= 0 else None

    def limit(self, stage: OpenStage, a: int) -> int:
        """Emit the computation of the extent `variable_bound`, which must not be None; returns its value."""
        bound = self.variable_bound(stage, a)
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

    def room(self, stage: OpenStage, a: int) -> int:
        """Emit the number of positions between the start of the open loops and the end of an axis whose extent depends on variables."""
        at = add_lins(sum_lins(stage.opened[a]), stage.base[a], 1)
        return self.b.alu("SUB", dtypes.index, 1, self.limit(stage, a), self.ssa(at))

    def count(self, stage: OpenStage, a: int, piece: EmittedLoop) -> int:
        """Emit the number of iterations of a loop over an axis whose extent depends on variables, inside the loops opened so far."""
        b = self.b
        left = b.alu("IDIV", dtypes.index, 1, b.add(self.room(stage, a), b.index(piece.stride - 1)), b.index(piece.stride))
        return b.alu("MIN", dtypes.index, 1, b.index(piece.extent), left)

    def for_tail(self, when: When, rest: int) -> int:
        """Emit the condition that a tail handles a remainder of `rest` positions; -1: always."""
        if when is When.ANY:
            return -1
        few = self.b.alu("CMPLE", dtypes.bool, 1, rest, self.b.index(FEW_ROWS))
        return few if when is When.FEW else self.b.alu("NOT", dtypes.bool, 1, few)

    def whole_end(self, room: int, reach: int, stride: int, stop: int) -> int:
        """Emit the end of the iterations of a loop that stay inside `room` positions; at most `stop`. Iterations are `stride` apart, and
        each covers `reach` positions."""
        b = self.b
        count = b.alu("IDIV", dtypes.index, 1, b.alu("ADD", dtypes.index, 1, room, b.index(stride - reach)), b.index(stride))
        return b.alu("MAX", dtypes.index, 1, b.index(0), b.alu("MIN", dtypes.index, 1, stop, b.mul(count, stride)))

    def coordinate(self, stage: OpenStage, a: int) -> int:
        """Emit the value of axis `a` at the current position: a vector on the vector axis, otherwise a scalar."""
        b = self.b
        terms, const = self.start(stage, a)
        value = self.ssa((terms, const + stage.offsets[a]))
        if a != stage.frame.vector_axis:
            return value
        w, step = stage.chunk.width, stage.frame.vector_stride
        return b.alu("ADD", dtypes.index, w, b.splat(value, w), b.vconst(dtypes.index, tuple(i * step for i in range(w))))

    def ssa(self, lin: Lin) -> int:
        """Emit Σ coefficient·value + constant, summed from the outermost loop inwards."""
        b = self.b
        terms, const = lin
        level = b.level_of
        total = -1
        for _, v, c in sorted((level[v], v, c) for v, c in terms.items()):
            term = b.mul(v, c) if c != 1 else v
            total = term if total < 0 else b.add(total, term)
        if total < 0:
            return b.index(const)
        return b.add(total, b.index(const)) if const else total

    def apart(self, lin: Lin) -> tuple[int, int]:
        """Emit Σ coefficient·value without the constant; returns (that value, the constant)."""
        terms, const = lin
        return self.ssa((terms, 0)), const

    def first_together(self, stage: OpenStage, a: int, limit: int) -> int:
        """Round the current position down to the first of a block of positions that share the answer to "position < limit". The block's
        size divides the limit and everything that moves the position."""
        terms, const = add_lins(self.start(stage, a), ({}, stage.offsets[a]), 1)
        together = gcd(limit, *[c * self.b.multiple_of(v) for v, c in terms.items()])
        return self.ssa((terms, const - const % together))

    def guard(self, stage: OpenStage, axes: Any) -> int:
        """Emit the condition that the given axes of the stage are inside their extents; -1 if that is certain."""
        checked = stage.frame.checked
        if not checked:
            return -1
        result = -1
        for a in axes:
            limit = checked[a]
            if limit == UNCHECKED or a in stage.safe:
                continue
            b = self.b
            is_fixed = self.variable_bound(stage, a) is None
            value = self.first_together(stage, a, limit if is_fixed else 1) if stage.whole_vectors or a != stage.frame.vector_axis else \
                self.coordinate(stage, a)
            lanes = b.num_lanes[value]
            end = b.index(limit) if is_fixed else self.limit(stage, a)
            inside = b.alu("CMPLT", dtypes.bool, lanes, value, b.splat(end, lanes))
            if stage.r.axes[a] in self.facts.maker.checks.below:
                above = b.alu("CMPLE", dtypes.bool, lanes, b.const(dtypes.index, lanes, 0), value)
                inside = b.alu("AND", dtypes.bool, lanes, inside, above)
            result = inside if result < 0 else b.alu("AND", dtypes.bool, max(lanes, b.num_lanes[result]), result, inside)
        if result >= 0 and self.b.known(result) is True:
            return -1
        return result
