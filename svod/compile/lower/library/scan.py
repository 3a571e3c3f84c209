"""SCAN: combines, for each position of a row, all positions up to it.

Along an inner axis a vector holds neighbouring columns, and the loop over positions carries one combined value for each column:

    for each row and block of columns:   acc = identity;   for i:  acc = acc ∘ x[i, block];  y[i, block] = acc

If rows of columns are long, a core processes a strip of many neighbouring columns, position by position. Memory is then read along the
strip (one page holds many columns), and the carried values of the strip are in scratch memory.

A contiguous axis is scanned by vectors: inside a vector by log2(lanes) shifted combinations (Hillis and Steele, CACM 29(12), 1986). The
total of a vector is carried to the next one, so the dependent chain has one combination per vector.

    carry = identity;   for i by lanes:  v = x[i…];  v = shift(v, 1) ∘ v;  v = shift(v, 2) ∘ v; …
                                         y[i…] = carry ∘ v;  carry = carry ∘ last(v)

If there are fewer rows than cores, long rows are cut into parts: a first phase combines each part, and a second one starts each part from
the combination of the parts before it. That reads x twice.

Sums and products of floats are carried in float64 if the target has it, as in PyTorch: each result is rounded once, however long the row
is.
"""
from __future__ import annotations

import math
from itertools import accumulate

from svod.compile.lower.library.loops import Loops, cores, program
from svod.compile.lower.math import expand
from svod.compile.lower.program import Program
from svod.core.graph.library_kernel import scan_accumulator
from svod.core.ir.combiner import get_combiner
from svod.core.ir.dtype import DType, dtypes
from svod.core.ir.uop import Ops, UOp
from svod.core.machine.target import SAME, FloatRules, Target

MOST_BLOCK = 4               # maximum number of vectors in a block of neighbouring columns
STRIP_ELEMENTS = 1 << 11     # maximum number of columns of a strip, so that their carried values stay in the L1 cache
LEAST_STRIP = 4              # minimum number of blocks of a strip
PART_ELEMENTS = 1 << 16      # minimum number of positions of a part of a row

State = tuple[int, ...]


class ScanKind:
    """One kind of scan: its initial state, combination, and result. When two states are combined, the first is that of earlier
    positions. `rules`: the float rules of the target (`math.expand`)."""

    def __init__(self, combiner: str, source: DType, dtype: DType, rules: FloatRules):
        self.combiner, self.dtype, self.rules = combiner, dtype, rules
        self.is_position = combiner in ("ARGMAX", "ARGMIN")
        acc = scan_accumulator(combiner, source if self.is_position else dtype)
        second = {"LOGADDEXP": self._carried(acc), "ARGMAX": dtypes.int64, "ARGMIN": dtypes.int64}.get(combiner)
        if combiner in ("ADD", "MUL"):
            acc = self._carried(acc)
        self.types: tuple[DType, ...] = (acc,) if second is None else (acc, second)

    def _carried(self, acc: DType) -> DType:
        """Return the dtype in which sums and products are carried."""
        return dtypes.float64 if acc.is_float and self.rules.has_float64 else acc

    @property
    def rounds_sums(self) -> bool:
        """Whether sums of many positions are rounded to the dtype of the result at each addition."""
        return self.types[-1].is_float and self.types[-1] != dtypes.float64 and self.combiner in ("ADD", "LOGADDEXP")

    def identity(self, b: Loops, lanes: int) -> State:
        acc = self.types[0]
        if self.combiner == "LOGADDEXP":
            values: tuple[int | float, ...] = (-math.inf, 0.0)
        elif self.is_position:
            values = (acc.min if self.combiner == "ARGMAX" else acc.max, 0)
        elif self.combiner == "ADD":
            values = (-0.0 if acc.is_float else 0,)      # 0.0 + -0.0 is 0.0
        else:
            values = get_combiner(self.combiner).identity(acc)
        return tuple([b.const(d, lanes, v) for d, v in zip(self.types, values, strict=True)])

    def start(self, b: Loops, x: int, position: int, step: int = 1) -> State:
        """Emit the state of single elements at `position`; with each further lane, the position grows by `step`."""
        acc, lanes = b.cast(self.types[0], x), b.num_lanes[x]
        if self.combiner == "LOGADDEXP":
            return acc, b.const(self.types[1], lanes, 1.0)
        if not self.is_position:
            return (acc,)
        at = b.splat(b.cast(dtypes.int64, position), lanes)
        if lanes > 1 and step:
            at = b.alu("ADD", dtypes.int64, lanes, at, b.vconst(dtypes.int64, tuple(range(0, lanes * step, step))))
        return acc, at

    def combine(self, b: Loops, first: State, second: State) -> State:
        lanes = max(b.num_lanes[v] for v in (*first, *second))
        acc = self.types[0]
        if self.combiner == "LOGADDEXP":
            m, s = first
            n, t = second
            top = b.alu("MAX", acc, lanes, m, n)

            def scaled(peak: int, total: int) -> int:
                # an infinite peak minus itself would be NaN
                same = b.alu("CMPEQ", dtypes.bool, lanes, peak, top)
                distance = b.alu("WHERE", acc, lanes, same, b.const(acc, lanes, 0.0), b.alu("SUB", acc, lanes, peak, top))
                scale = b.cast(self.types[1], expand(b, Ops.EXP, acc, lanes, distance, rules=self.rules))
                return b.alu("MUL", self.types[1], lanes, total, scale)
            return top, b.alu("ADD", self.types[1], lanes, scaled(m, s), scaled(n, t))
        if self.is_position:
            x, i = first
            y, j = second
            low, high = (x, y) if self.combiner == "ARGMAX" else (y, x)
            wins = b.alu("CMPLE", dtypes.bool, lanes, low, high)
            if acc.is_float:
                wins = b.either(wins, b.alu("CMPNE", dtypes.bool, lanes, y, y))
            return b.alu("WHERE", acc, lanes, wins, y, x), b.alu("WHERE", dtypes.int64, lanes, wins, j, i)
        return get_combiner(self.combiner).combine(first, second, b.compute(self.types, lanes))

    def result(self, b: Loops, state: State) -> int:
        if self.is_position:
            return b.cast(self.dtype, state[1])
        value = state[0]
        if self.combiner == "LOGADDEXP":
            acc, lanes = self.types[0], b.num_lanes[value]
            value = b.alu("ADD", acc, lanes, value, expand(b, Ops.LOG, acc, lanes, b.cast(acc, state[1]), rules=self.rules))
        return b.cast(self.dtype, value)


def lower_scan(node: UOp, target: Target) -> Program:
    """Return the Program of a SCAN."""
    options, (shape,) = node.arg[1:]
    operator = ScanKind(options[0], node.src[0].dtype, node.dtype, target.float_rules)
    lanes = min(target.lanes(t) for t in operator.types)
    if _keeps_order(operator, target) and shape[2] == 1:
        lanes = 1       # as in columns, which are added one after the other
    return _columns(node, operator, shape, lanes, target) if shape[2] > 1 else _rows(node, operator, shape, lanes, target)


def _keeps_order(operator: ScanKind, target: Target) -> bool:
    """Whether the values of a row are combined one after the other, whatever the number of rows, threads and lanes: what rounds does not
    depend on these under the policy "same"."""
    return target.numerics == SAME and operator.combiner in ("ADD", "MUL", "LOGADDEXP") and operator.types[-1].is_float


def _columns(node: UOp, operator: ScanKind, shape: tuple[int, ...], lanes: int, target: Target) -> Program:
    outer, n, inner = shape
    while lanes > inner:
        lanes //= 2
    vectors = min(MOST_BLOCK, inner // lanes)
    width = lanes * vectors
    share = min(STRIP_ELEMENTS, inner // -(-target.threads // outer)) // width * width
    strip = share if share >= LEAST_STRIP * width else width
    blocks = -(-inner // strip)
    b = Loops()
    y, x = b.args(node)
    size = len(operator.types)
    offsets = list(accumulate((-(-strip * t.itemsize // 64) * 64 for t in operator.types), initial=0))

    def block(it: int) -> None:
        column = b.least(b.mul(b.mod(it, blocks), strip), b.index(inner - strip))   # the last block is moved back
        base = b.calc("ADD", b.mul(b.over(it, blocks), n * inner), column)
        if strip > width:
            long_strip(base)
            return

        def position(i: int, *carried: int) -> tuple[int, ...]:
            at = b.calc("ADD", base, b.mul(i, inner))
            following: list[int] = []
            for v in range(vectors):
                element = operator.start(b, b.get(x, at, lanes, v * lanes), i, 0)
                state = operator.combine(b, carried[v * size:(v + 1) * size], element)
                b.put(y, at, operator.result(b, state), offset=v * lanes)
                following += state
            return tuple(following)
        b.loop(b.index(0), b.index(n), position, *(operator.identity(b, lanes) * vectors))

    def long_strip(base: int) -> None:
        areas = [b.scratch(t, o) for t, o in zip(operator.types, offsets, strict=False)]

        def keep(j: int, v: int, state: State) -> None:
            for area, s in zip(areas, state, strict=True):
                b.put(area, j, s, offset=v * lanes)

        def position(i: int) -> None:
            row = b.calc("ADD", base, b.mul(i, inner))

            def columns(j: int) -> None:
                at = b.calc("ADD", row, j)
                for v in range(vectors):
                    element = operator.start(b, b.get(x, at, lanes, v * lanes), i, 0)
                    state = operator.combine(b, tuple([b.get(a, j, lanes, v * lanes, ordered=True) for a in areas]), element)
                    b.put(y, at, operator.result(b, state), offset=v * lanes)
                    keep(j, v, state)
            b.loop(b.index(0), b.index(strip), columns, step=width)

        def start(j: int) -> None:
            for v in range(vectors):
                keep(j, v, operator.identity(b, lanes))
        b.loop(b.index(0), b.index(strip), start, step=width)
        b.loop(b.index(0), b.index(n), position)
    b.loop(*b.bounds(), block)
    scratch = offsets[-1] if strip > width else 0
    return program(node, (), (b, outer * blocks, cores(target, outer * n * inner, outer * blocks), scratch))


def _rows(node: UOp, operator: ScanKind, shape: tuple[int, ...], lanes: int, target: Target) -> Program:
    rows, n, _ = shape
    parts = 1
    if rows < target.threads and n >= 2 * PART_ELEMENTS and not operator.is_position and not _keeps_order(operator, target):
        parts = min(-(-target.threads // rows), n // PART_ELEMENTS)
    chunk = -(-n // (parts * lanes)) * lanes
    parts = -(-n // chunk)
    threads = cores(target, rows * n, rows * parts)
    totals = tuple(rows * parts * t.itemsize for t in operator.types) if parts > 1 else ()
    phases = [] if parts == 1 else [(_totals(node, operator, n, parts, chunk, lanes), rows * parts, threads, 0)]
    b = Loops()
    y, x = b.args(node)

    def part(it: int) -> None:
        row, first, last = _span(b, it, n, parts, chunk)
        carry = operator.identity(b, 1)
        if parts > 1:
            temps = [b.pure("TEMP", t, 1, (), k) for k, t in enumerate(operator.types)]
            begin = b.minus(it, b.mod(it, parts))
            carry = tuple(b.loop(begin, it, lambda k, *c: operator.combine(b, c, tuple([b.get(t, k) for t in temps])), *carry))

        def element(i: int, width: int, *carried: int) -> tuple[int, ...]:
            state = operator.start(b, b.get(x, i, width), b.minus(i, row))
            step = 1
            while step < width:
                moved = (*([0] * step), *range(width, 2 * width - step))
                before = tuple([b.pure("SHUFFLE", b.dtype[s], width, (e, s), moved)
                                for e, s in zip(operator.identity(b, width), state, strict=True)])
                state = operator.combine(b, before, state)
                step *= 2
            whole = operator.combine(b, tuple([b.splat(c, width) for c in carried]), state)
            b.put(y, i, operator.result(b, whole))
            if width == 1:
                return whole
            return operator.combine(b, carried, tuple([b.pure("EXTRACT", b.dtype[s], 1, (s,), width - 1) for s in state]))
        b.span(first, last, lanes, element, *carry)
    b.loop(*b.bounds(), part)
    return program(node, totals, *phases, (b, rows * parts, threads, 0))


def _span(b: Loops, it: int, n: int, parts: int, chunk: int) -> tuple[int, int, int]:
    """Emit (first position of the row of iteration `it`, first position of its part, end of its part)."""
    row = b.mul(b.over(it, parts), n)
    begin = b.mul(b.mod(it, parts), chunk)
    return row, b.calc("ADD", row, begin), b.calc("ADD", row, b.least(b.plus(begin, chunk), b.index(n)))


def _totals(node: UOp, operator: ScanKind, n: int, parts: int, chunk: int, lanes: int) -> Loops:
    """Make the phase that combines the positions of each part, in any order."""
    b = Loops()
    _, x = b.args(node)
    temps = [b.pure("TEMP", t, 1, (), k) for k, t in enumerate(operator.types)]

    def part(it: int) -> None:
        _, first, last = _span(b, it, n, parts, chunk)
        middle = b.minus(last, b.mod(b.minus(last, first), lanes))
        state = tuple(b.loop(first, middle, lambda i, *c: operator.combine(b, c, operator.start(b, b.get(x, i, lanes), i)),
                             *operator.identity(b, lanes), step=lanes))
        width = lanes
        while width > 1:
            width //= 2
            low, high = (tuple([b.pure("SHUFFLE", b.dtype[s], width, (s,), tuple(range(k, k + width))) for s in state]) for k in (0, width))
            state = operator.combine(b, low, high)
        state = tuple(b.loop(middle, last, lambda i, *c: operator.combine(b, c, operator.start(b, b.get(x, i), i)), *state))
        for t, s in zip(temps, state, strict=True):
            b.put(t, it, s)
    b.loop(*b.bounds(), part)
    return b
