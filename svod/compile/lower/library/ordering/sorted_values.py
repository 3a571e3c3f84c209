"""SORT: the values of a row in order. Most rows are sorted by networks (`network_sort.py`), those of few digits and very long ones by a
radix sort of their keys, least significant digit first, and a few short ones by comparison counting: what is predicted to take least.

    the least key, of integers, which is subtracted
    counts of the first digit, and which bits of the keys differ
    for each digit whose bits differ:   counts; places of the buckets; each key to the next place of its bucket

The first pass reads the elements and the last one writes them; between them the keys lie in one of two halves of a temporary. A pass whose
digit is the same in all keys is a copy if it is the first or the last, and nothing otherwise. Keys are unsigned integers that compare like
the elements: -0 is before 0, and all NaNs are one key, the largest.

By digits, rows are spread over the cores, each of which sorts a row as two parts in turns; if there are fewer rows than cores, a row is cut
into a part for each core and each step is a phase (as in `radix.py`, whose passes carry positions).
"""
from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial, reduce
from itertools import pairwise
from typing import NamedTuple

from svod.compile.lower.library.loops import BOOL, INDEX, Loops, aligned, cores, program
from svod.compile.lower.library.ordering.counting import count_rows, counted_elements, order_by_counting, type_to_compare
from svod.compile.lower.library.ordering.keys import CONSTANT_BITS, element_of, key_type, sort_key
from svod.compile.lower.library.ordering.network_sort import SortingWay, network_ways
from svod.compile.lower.library.ordering.radix import COUNT, RowPart
from svod.compile.lower.library.ordering.sort import COUNT_CYCLES, LEAST_SORTED_PART, PARTS_OF_ROW, digit_cycles, is_counted
from svod.compile.lower.program import Program
from svod.core.graph.library_kernel import operations
from svod.core.ir.dtype import BY_NAME, DType
from svod.core.ir.uop import UOp
from svod.core.machine.target import Target

DIGIT_BITS = 8
LONG_DIGIT_BITS = 11            # bits of a digit in rows that are much longer than a table of counts
LEAST_LONG_ROW = 1 << 15        # elements of a row with such digits


class KeyDigit(NamedTuple):
    """A digit of the keys: so many bits from `shift` on."""

    shift: int
    bits: int


def digits_of(dtype: DType, n: int) -> list[KeyDigit]:
    """Return the digits in which keys of rows of n elements may differ, of about equal bits."""
    low, high = CONSTANT_BITS.get(dtype.name, 0), key_type(dtype).bits
    count = -(-(high - low) // (LONG_DIGIT_BITS if n >= LEAST_LONG_ROW else DIGIT_BITS))
    cuts = [low + (high - low) * i // count for i in range(count + 1)]
    return [KeyDigit(a, b - a) for a, b in pairwise(cuts)]


class SortedRow:
    """Writes the steps for one row of n elements, which begins at `at` in x and y.

    `keys`: a pointer to two halves of n keys each, which begin at `origin`; `counts`: a pointer to a table for each part of the row, from
    `tables` on; `starts`: a pointer to a table for each part of this core."""

    def __init__(self, b: Loops, node: UOp, target: Target, at: int, keys: int, counts: int, starts: int) -> None:
        (self.descending,), ((_, self.n),) = node.arg[1:]
        self.b, self.at, self.keys, self.counts, self.starts = b, at, keys, counts, starts
        self.y, self.x = b.args(node)
        self.dtype = node.dtype
        self.kind = key_type(node.dtype)
        self.sign = 1 << (self.kind.bits - 1) if self.kind.kind == "i" else 0       # without it, signed keys compare as unsigned ones
        self.unsigned = stored_type(node.dtype)
        self.digits = digits_of(node.dtype, self.n)
        self.buckets = 1 << max(d.bits for d in self.digits)
        self.lanes = target.lanes(self.unsigned)
        self.origin = self.tables = b.index(0)
        self.bits = self.least = b.const(self.unsigned, 1, 0)

    # -- keys ---------------------------------------------------------------------------------------
    def _bitwise(self, op: str, v: int, constant: int) -> int:
        lanes = self.b.num_lanes[v]
        return self.b.alu(op, self.unsigned, lanes, v, self.b.const(self.unsigned, lanes, constant))

    def key(self, i: int, lanes: int = 1) -> int:
        """Load elements from position i of the row on, as unsigned keys."""
        b = self.b
        key = sort_key(b, b.get(self.x, b.calc("ADD", self.at, i), lanes), self.descending, one_zero=False)
        key = self._bitwise("XOR", b.cast(self.unsigned, b.bitcast(BY_NAME[f"uint{self.kind.bits}"], key)), self.sign)
        return b.alu("SUB", self.unsigned, lanes, key, b.splat(self.least, lanes))

    def store_element(self, i: int, key: int) -> None:
        """Store the elements of unsigned keys from position i of the row on."""
        b, lanes = self.b, self.b.num_lanes[key]
        key = b.alu("ADD", self.unsigned, lanes, key, b.splat(self.least, lanes))
        bits = b.bitcast(self.kind, b.cast(BY_NAME[f"uint{self.kind.bits}"], self._bitwise("XOR", key, self.sign)))
        b.put(self.y, b.calc("ADD", self.at, i), element_of(b, bits, self.dtype, self.descending))

    def _digit(self, key: int, digit: KeyDigit) -> int:
        return self.b.cast(INDEX, self._bitwise("AND", self._bitwise("SHR", key, digit.shift), (1 << digit.bits) - 1))

    # -- passes -------------------------------------------------------------------------------------
    def _has_pass(self, p: int) -> int:
        return self.b.alu("CMPNE", BOOL, 1, self._digit(self.bits, self.digits[p]), self.b.index(0))

    def _half(self, p: int) -> int:
        """The offset of the half that pass p, which is not the first, reads."""
        b, half = self.b, self.origin
        for earlier in range(1, p):
            half = b.choose(self._has_pass(earlier), b.minus(b.plus(b.mul(self.origin, 2), self.n), half), half)
        return half

    def _read(self, p: int) -> Callable[..., int]:
        if p == 0:
            return self.key
        b, half = self.b, self._half(p)
        return lambda i, lanes=1: b.get(self.keys, b.calc("ADD", half, i), lanes, ordered=True)

    def _write(self, p: int) -> Callable[[int, int], None]:
        if p == len(self.digits) - 1:
            return self.store_element
        b = self.b
        place = self._half(p + 1) if p == 0 else b.minus(b.plus(b.mul(self.origin, 2), self.n), self._half(p))
        return lambda i, key: b.put(self.keys, b.calc("ADD", place, i), key)

    def _in_turns(self, parts: Sequence[RowPart], stop: Callable[[int], int], body: Callable[..., tuple[int, ...] | None],
                  *init: int) -> list[int]:
        """Emit `body(k, i, *carried)` for the positions i of the k-th of some parts, in turns. The lengths of the parts do not increase.
        `stop`: makes the ends of the loops."""
        b = self.b
        shortest = b.minus(parts[-1].last, parts[-1].first)

        def positions(i: int, *carried: int) -> tuple[int, ...]:
            for k, part in enumerate(parts):
                carried = body(k, b.calc("ADD", part.first, i), *carried) or ()
            return carried
        carried = b.loop(b.index(0), stop(shortest), positions, *init)
        for k, part in enumerate(parts[:-1]):
            carried = b.loop(b.calc("ADD", part.first, shortest), stop(part.last), partial(body, k), *carried)
        return carried

    def _clear(self, parts: Sequence[RowPart], stop: Callable[[int], int]) -> list[int]:
        b = self.b
        tables = [b.calc("ADD", self.tables, b.mul(part.number, self.buckets)) for part in parts]
        lanes = min(self.lanes, self.buckets)

        def clear(i: int) -> None:
            for table in tables:
                b.put(self.counts, b.calc("ADD", table, i), b.const(COUNT, lanes, 0))
        b.loop(b.index(0), stop(b.index(self.buckets)), clear, step=lanes)
        return tables

    def _increase(self, pointer: int, at: int) -> int:
        count = self.b.get(pointer, at, ordered=True)
        self.b.put(pointer, at, self.b.alu("ADD", COUNT, 1, count, self.b.const(COUNT, 1, 1)))
        return count

    def _until(self, p: int, does: bool = True) -> Callable[[int], int]:
        """Return what makes the end of a loop of pass p: 0, which ends it before it starts, if there is no such pass (or if there is)."""
        b, has = self.b, self._has_pass(p)
        return lambda stop: b.choose(has, *((stop, b.index(0)) if does else (b.index(0), stop)))

    def least_key(self, parts: Sequence[RowPart]) -> tuple[int]:
        """Return the least key of neighbouring parts, which have a vector of elements at least."""
        b, last = self.b, parts[-1].last
        final = b.plus(last, -self.lanes)       # the last vector is moved back

        def vector(i: int, least: int) -> tuple[int]:
            return (b.alu("MIN", self.unsigned, self.lanes, least, self.key(b.least(i, final), self.lanes)),)
        found, = b.loop(parts[0].first, last, vector, b.const(self.unsigned, self.lanes, self.unsigned.max), step=self.lanes)
        return (b.over_lanes("MIN", found),)

    def survey(self, parts: Sequence[RowPart]) -> tuple[int, int]:
        """Count the first digits of some parts; returns an OR and an AND of their keys."""
        b = self.b
        tables = self._clear(parts, lambda stop: stop)

        def element(k: int, i: int, some: int, every: int) -> tuple[int, int]:
            key = self.key(i)
            self._increase(self.counts, b.calc("ADD", tables[k], self._digit(key, self.digits[0])))
            return b.alu("OR", self.unsigned, 1, some, key), b.alu("AND", self.unsigned, 1, every, key)
        some, every = self._in_turns(parts, lambda stop: stop, element, b.const(self.unsigned, 1, 0),
                                     b.const(self.unsigned, 1, self.unsigned.max))
        return some, every

    def count(self, p: int, parts: Sequence[RowPart]) -> None:
        """Count the digits of pass p, which is not the first, in some parts."""
        b, until = self.b, self._until(p)
        tables, read = self._clear(parts, until), self._read(p)

        def element(k: int, i: int) -> None:
            self._increase(self.counts, b.calc("ADD", tables[k], self._digit(read(i), self.digits[p])))
        self._in_turns(parts, until, element)

    def move(self, p: int, parts: Sequence[RowPart], count: int) -> None:
        """Move the keys of some of `count` parts to their places, or copy them if pass p is the first or the last and has nothing to do."""
        b, until, read, write = self.b, self._until(p), self._read(p), self._write(p)

        def start(bucket: int, total: int) -> tuple[int]:
            own = [total] * len(parts)
            for q in range(count):
                own = [b.choose(b.alu("CMPEQ", BOOL, 1, part.number, b.index(q)), total, at) for part, at in zip(parts, own, strict=True)]
                total = b.alu("ADD", COUNT, 1, total,
                              b.get(self.counts, b.calc("ADD", self.tables, b.plus(bucket, q * self.buckets)), ordered=True))
            for k, at in enumerate(own):
                b.put(self.starts, b.plus(bucket, k * self.buckets), at)
            return (total,)
        b.loop(b.index(0), until(b.index(self.buckets)), start, b.const(COUNT, 1, 0))

        def element(k: int, i: int) -> None:
            key = read(i)
            place = self._increase(self.starts, b.plus(self._digit(key, self.digits[p]), k * self.buckets))
            write(b.cast(INDEX, place), key)
        self._in_turns(parts, until, element)
        if p in (0, len(self.digits) - 1):
            copied = self._until(p, does=False)
            for part in parts:
                b.span(b.least(part.first, copied(part.last)), copied(part.last), self.lanes, lambda i, lanes: write(i, read(i, lanes)))


Step = Callable[[SortedRow, list[RowPart]], tuple[int, ...] | None]      # writes a step for parts of a row; returns what it found in them


def stored_type(dtype: DType) -> DType:
    """Return the type of keys in memory."""
    return BY_NAME[f"uint{max(32, key_type(dtype).bits)}"]


def subtracts_least(dtype: DType) -> bool:
    """Whether the least key is subtracted from keys: integers of several digits often have a small range."""
    return dtype.is_int and dtype.bits >= 32


def lower_sort(node: UOp, target: Target) -> Program:
    """Return the Program of a SORT on a CPU."""
    return min(ways_to_sort(node, target), key=lambda way: way.cycles).lower(node, target)


def ways_to_sort(node: UOp, target: Target) -> list[SortingWay]:
    """Return the ways to sort the rows of a SORT: by counting or, longer ones, by digits; and by networks."""
    rows, n = node.arg[2][0]
    parts = max(1, min(-(-target.threads // rows), n // LEAST_SORTED_PART)) if rows < target.threads else 1
    if is_counted(node.dtype, n):
        vectors = -(-n // target.lanes(type_to_compare(key_type(node.dtype))))
        other = SortingWay(-(-rows // target.threads) * n * vectors * COUNT_CYCLES, _by_counting)
    else:
        cycles = [digit_cycles(n, stored_type(node.dtype), 1 << d.bits, parts, target) for d in digits_of(node.dtype, n)]
        other = SortingWay(-(-rows * parts // target.threads) * sum(cycles), partial(_by_parts, parts=parts) if parts > 1 else _by_rows)
    return [other, *network_ways(node, target, n, node.arg[1][0])]


def _by_rows(node: UOp, target: Target) -> Program:
    """Return the Program of a radix sort in which each iteration is a row."""
    rows, n = node.arg[2][0]
    b, unsigned = Loops(), stored_type(node.dtype)
    table = aligned(PARTS_OF_ROW * (1 << max(d.bits for d in digits_of(node.dtype, n))) * COUNT.itemsize)
    halves = aligned(2 * n * unsigned.itemsize)
    pointers = b.scratch(unsigned, 0), b.scratch(COUNT, halves), b.scratch(COUNT, halves + table)

    def row(it: int) -> None:
        one = SortedRow(b, node, target, b.mul(it, n), *pointers)
        length = -(-n // PARTS_OF_ROW)
        cuts = [min(length * p, n) for p in range(PARTS_OF_ROW + 1)]
        own = [RowPart(b.index(p), b.index(cuts[p]), b.index(cuts[p + 1])) for p in range(PARTS_OF_ROW)]
        if subtracts_least(node.dtype):
            one.least, = one.least_key(own)
        one.bits = b.alu("XOR", unsigned, 1, *one.survey(own))
        for p in range(len(one.digits)):
            if p:
                one.count(p, own)
            one.move(p, own, PARTS_OF_ROW)
    b.loop(*b.bounds(), row)
    return program(node, (), (b, rows, cores(target, operations(node)[0], rows), halves + 2 * table))


def _by_counting(node: UOp, target: Target) -> Program:
    """Return the Program for short rows."""
    (descending,), ((rows, n),) = node.arg[1:]
    b, kind = Loops(), key_type(node.dtype)
    y, x = b.args(node)
    key = partial(sort_key, b, descending=descending, one_zero=False)

    def element(key: int, _: int) -> int:
        return element_of(b, key, node.dtype, descending)
    compared = type_to_compare(kind)
    if rows >= target.lanes(compared):
        iterations, nbytes = count_rows(b, key, kind, x, y, (rows, n), n, target, element)
    else:
        iterations, nbytes = rows, aligned(counted_elements(kind, n, target) * compared.itemsize)

        def row(it: int) -> None:
            at = b.mul(it, n)
            order_by_counting(b, kind, lambda i, lanes: key(b.get(x, b.calc("ADD", at, i), lanes)), n, b.index(n), b.scratch(compared, 0),
                              target, y, at, n, element)
        b.loop(*b.bounds(), row)
    return program(node, (), (b, iterations, cores(target, operations(node)[0], iterations), nbytes))


def _by_parts(node: UOp, target: Target, parts: int) -> Program:
    """Return the Program in which each step is a phase, and each iteration is a part of a row."""
    rows, n = node.arg[2][0]
    unsigned, digits, length = stored_type(node.dtype), digits_of(node.dtype, n), -(-n // parts)
    buckets, has_least = 1 << max(d.bits for d in digits), subtracts_least(node.dtype)
    types = (unsigned, COUNT, unsigned, unsigned, unsigned)     # keys, counts, then of each part: the least key, an OR and an AND of keys
    sizes = (rows * 2 * n, rows * parts * buckets, *[rows * parts] * 3)

    def phase(step: Step, known: int = 3, finds: int = 3) -> tuple[Loops, int, int, int]:
        """Make the phase of a step. `known`: how many of the things that are found in parts are known; `finds`: where those of this step
        begin among them."""
        b = Loops()
        keys, counts, *found = [b.pure("TEMP", t, 1, (), i) for i, t in enumerate(types)]

        def iteration(it: int) -> None:
            row, part = b.over(it, parts), b.mod(it, parts)
            one = SortedRow(b, node, target, b.mul(row, n), keys, counts, b.scratch(COUNT, 0))
            one.origin, one.tables = b.mul(row, 2 * n), b.mul(row, parts * buckets)
            of_row = [reduce(partial(b.alu, op, unsigned, 1), [b.get(pointer, b.mul(row, parts), offset=p) for p in range(parts)])
                      for op, pointer in zip(("MIN", "OR", "AND"), found[:known], strict=False)]
            if known > 0 and has_least:
                one.least = of_row[0]
            if known > 1:
                one.bits = b.alu("XOR", unsigned, 1, *of_row[1:])
            first = b.mul(part, length)
            results = step(one, [RowPart(part, first, b.least(b.plus(first, length), b.index(n)))]) or ()
            for pointer, v in zip(found[finds:], results, strict=False):
                b.put(pointer, it, v)
        b.loop(*b.bounds(), iteration)
        return b, rows * parts, min(target.threads, rows * parts), aligned(buckets * COUNT.itemsize)

    def count(p: int) -> Step:
        return lambda row, own: row.count(p, own)

    def move(p: int) -> Step:
        return lambda row, own: row.move(p, own, parts)
    phases = [*[phase(SortedRow.least_key, known=0, finds=0)] * has_least, phase(SortedRow.survey, known=1, finds=1), phase(move(0)),
              *[phase(step(p)) for p in range(1, len(digits)) for step in (count, move)]]
    return program(node, tuple([size * t.itemsize for size, t in zip(sizes, types, strict=True)]), *phases)
