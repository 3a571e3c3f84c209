"""Stages that are longer along one dim: beyond the old extent their loads are gated, and their values are filled in.

    X = STAGE(LOAD(p, c*5 + d) + 1, c:4, d:5)   →   STAGE(WHERE(d < 5, LOAD(p, c*5 + d, 0, d < 5) + 1, fill), c:4, d:8)
"""
from __future__ import annotations

from svod.core.ir.dtype import dtypes
from svod.core.ir.uop import Ops, UOp
from svod.core.kernel.kernel import own_reduces, reduce_parts
from svod.errors import KernelOptError


class Ranges:
    """New RANGEs of an AST, with unused numbers."""

    def __init__(self, ast: UOp) -> None:
        self._next = 1 + max(u.arg for u in ast.toposort() if u.op is Ops.RANGE)

    def new(self, extent: int) -> UOp:
        self._next += 1
        return UOp(Ops.RANGE, dtypes.index, (UOp.const(dtypes.index, extent),), self._next - 1)

    def like(self, *ranges: UOp) -> tuple[UOp, ...]:
        return tuple([self.new(r.src[0].arg) for r in ranges])


class Extension:
    """Extends stages, and values of their readers, from `extent` positions to `longer`. Raises KernelOptError where something is read at
    other positions than one by one."""

    def __init__(self, ranges: Ranges, extent: int, longer: int) -> None:
        self.extent, self.longer = extent, longer
        self._ranges = ranges
        self._made: dict[tuple[UOp, int], UOp] = {}

    def stage(self, stage: UOp, dim: int, fill: float | int) -> UOp:
        """A copy of a stage whose dim `dim` is extended. Beyond the old extent its loads are gated, and its values are `fill`."""
        made = self._made.get((stage, dim))
        if made is not None:
            return made
        fresh = dict(zip(stage.src[1:], self._ranges.like(*stage.src[1:]), strict=True))
        fresh[stage.src[1 + dim]] = self._ranges.new(self.longer)
        for r in own_reduces(stage.src[0]):
            fresh.update({k: self._ranges.new(k.src[0].arg) for k in reduce_parts(r)[1] if k not in fresh})
        value = self.filled(stage.src[0], stage.src[1 + dim], fill).substitute(fresh)
        made = self._made[stage, dim] = UOp(Ops.STAGE, value.dtype, (value, *[fresh[r] for r in stage.src[1:]]))
        return made

    def inside(self, k: UOp) -> UOp:
        """The condition that `k` is below the old extent."""
        return UOp(Ops.CMPLT, dtypes.bool, (k, UOp.const(dtypes.index, self.extent)))

    def filled(self, value: UOp, k: UOp, fill: float | int) -> UOp:
        """`value` with its loads gated and `fill` beyond the old extent of the RANGE `k`. The WHERE is needed because a value computed from
        gated loads may be nonzero there, or not finite (a quotient), and a factor of 0 would not cancel that."""
        gated = plain = self.gated(value, k)
        while plain.op in (Ops.CAST, Ops.BITCAST):      # casts of zero are zero
            plain = plain.src[0]
        is_load = plain.op is Ops.LOAD and len(plain.src) == 3 and plain.src[1].op is Ops.CONST and plain.src[1].arg == 0
        if fill == 0 and k in plain.toposort() and (is_load or plain.op is Ops.INDEX):
            return gated
        return UOp(Ops.WHERE, value.dtype, (self.inside(k), gated, UOp.const(value.dtype, fill)))

    def gated(self, value: UOp, k: UOp) -> UOp:
        """`value` with its loads that depend on the RANGE `k` gated to the old extent, and the stages that it reads at `k` extended."""
        inside = self.inside(k)
        done: dict[UOp, UOp] = {}
        depends: set[UOp] = {k}
        for u in value.toposort(gate=lambda n: n.op is not Ops.STAGE):
            src = u.src if u.op is Ops.STAGE else tuple(done[s] for s in u.src)
            new = u if src == u.src else u.replace(src=src)
            if u.op is not Ops.STAGE and any(s in depends for s in u.src):
                depends.add(u)
                if u.op is Ops.LOAD:
                    alt, gate = (src[1], inside & src[2]) if len(src) == 3 else (UOp.const(u.dtype, 0), inside)
                    new = u.replace(src=(src[0], alt, gate))
                elif u.op is Ops.INDEX and u.src[0].op is Ops.STAGE:
                    at = [i for i, e in enumerate(u.src[1:]) if e in depends]
                    if len(at) != 1 or u.src[1 + at[0]] is not k:
                        raise KernelOptError(f"the {self.extent} positions of a row become {self.longer}, and they are not read one by "
                                             "one: take a divisor")
                    new = u.replace(src=(self.stage(u.src[0], at[0], 0), *src[1:]))
            done[u] = new
        return done[value]
