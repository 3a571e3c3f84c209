"""ARGSORT and TOPK: the positions of a row's elements in order.

Elements are first converted to integers that compare like them (`keys.py`). Rows are ordered by comparison counting (`counting.py`), by a
radix sort (`radix.py`), or by a network (`network_sort.py`): by what is predicted to take least. TOPK first selects candidates if they are
few (`select.py`).

In a radix sort rows are spread over the cores, each of which sorts a row as two parts. If there are fewer rows than cores, long rows are
cut into parts, one for each core. Devices with groups use another algorithm (`ranks.py`).
"""
from __future__ import annotations

from collections.abc import Callable
from functools import partial, reduce

from svod.compile.lower.library.loops import Keys, Loops, aligned, cores, program
from svod.compile.lower.library.ordering.counting import count_rows, counted_elements, order_by_counting, positions, type_to_compare
from svod.compile.lower.library.ordering.keys import CONSTANT_BITS, key_type, sort_key
from svod.compile.lower.library.ordering.network_sort import SortingWay, network_ways
from svod.compile.lower.library.ordering.radix import BUCKETS, COUNT, DIGIT_BITS, ELEMENT, Radix, RowPart
from svod.compile.lower.program import Program
from svod.core.graph.library_kernel import operations
from svod.core.ir.dtype import DType, dtypes
from svod.core.ir.uop import UOp
from svod.core.machine.target import Target

POSITION = dtypes.int32
LEAST_SORTED_PART = 1 << 14         # minimum number of positions of a part of a row that is sorted
PARTS_OF_ROW = 2                # parts of a row that one core sorts
# Cycles per element of a pass over a digit, for elements in a core's own cache, in the cache of all cores, and in memory.
DIGIT_CYCLES = 5.0, 7.0, 11.0
BUCKET_CYCLES = 3.0             # cycles per bucket of a pass over a digit
COUNT_CYCLES = 2.5              # cycles to compare a vector of keys with one key and count those before it
COUNTED_PER_DIGIT = 64          # keys; with at most as many per digit, comparison counting takes less time than a radix sort

Step = Callable[[Radix, int, int, int, int], None]     # (…, row, part, first position, last position): writes a step of one part


def key_digits(dtype: DType) -> range:
    """Return the numbers of the digits in which keys of elements may differ."""
    return range(CONSTANT_BITS.get(dtype.name, 0) // DIGIT_BITS, key_type(dtype).bits // DIGIT_BITS)


def row_keys(b: Loops, x: int, begin: int, descending: bool) -> Keys:
    """Return the keys of the row that begins at `begin` in x."""
    return lambda i, lanes: sort_key(b, b.get(x, b.calc("ADD", begin, i), lanes), descending)


class RowOrder:
    """Orders the keys of one row on one core, in scratch memory of `nbytes` bytes that begins at `offset`. `dtype`: that of the elements;
    `most`: the maximum number of keys."""

    def __init__(self, b: Loops, dtype: DType, most: int, target: Target, offset: int = 0):
        self.b, self.kind, self.digits, self.most, self.target = b, key_type(dtype), key_digits(dtype), most, target
        self.is_counted = is_counted(dtype, most)
        if self.is_counted:
            compared = type_to_compare(self.kind)
            self.memory = b.scratch(compared, offset)
            self.nbytes = aligned(counted_elements(self.kind, most, target) * compared.itemsize)
            return
        halves, tables = aligned(2 * most * ELEMENT.itemsize), aligned(PARTS_OF_ROW * BUCKETS * COUNT.itemsize)
        self.elements, self.counts = b.scratch(ELEMENT, offset), b.scratch(COUNT, offset + halves)
        self.starts = b.scratch(COUNT, offset + halves + tables)
        self.nbytes = halves + 2 * tables

    def write(self, keys: Keys, n: int, order: int, at: int, kept: int) -> None:
        """Store the positions of the first `kept` keys in order at `order[at]` and so on. `n`: the value of the number of keys, which is
        at least the lanes of a vector for a radix sort."""
        b, none = self.b, self.b.index(0)
        if self.is_counted:
            order_by_counting(b, self.kind, keys, self.most, n, self.memory, self.target, order, at, kept, positions)
            return
        radix = Radix(b, self.kind, self.digits, keys, self.target, self.elements, self.most, self.counts, self.starts)
        radix.least = radix.least_key(none, n)
        radix.bits = radix.fill(none, n)
        length = b.over(b.plus(n, PARTS_OF_ROW - 1), PARTS_OF_ROW)
        parts = [RowPart(b.index(p), b.mul(length, p), b.least(b.mul(length, p + 1), n)) for p in range(PARTS_OF_ROW)]
        for digit in self.digits:
            if Radix.takes_word(digit):
                radix.take_word(digit, none, n)
            radix.count(digit, parts)
            radix.move(digit, parts, PARTS_OF_ROW)
        radix.write(none, b.index(kept), order, at)


def digit_cycles(n: int, kept: DType, buckets: int, parts: int, target: Target) -> float:
    """Return the cycles of a pass over a digit in one of the parts of a row of n elements, of which a pass moves the type `kept`."""
    nbytes = 2 * n * kept.itemsize
    of_element = DIGIT_CYCLES[(nbytes > target.l2 * parts) + (nbytes > max(target.l2 * parts, target.l3))]
    return n / parts * of_element + buckets * BUCKET_CYCLES


def is_counted(dtype: DType, n: int) -> bool:
    """Whether rows of n elements are ordered by comparison counting."""
    return n <= COUNTED_PER_DIGIT * min(4, len(key_digits(dtype)))


def lower_argsort(node: UOp, target: Target) -> Program:
    """Return the Program of an ARGSORT."""
    (descending,), ((_, n),) = node.arg[1:]
    return min(ways_to_order(node, target, n, descending), key=lambda way: way.cycles).lower(node, target)


def ways_to_order(node: UOp, target: Target, kept: int, descending: bool) -> list[SortingWay]:
    """Return the ways to order the elements of rows, of which the first `kept` positions are stored: by counting or, longer rows, by
    digits; and by networks."""
    (rows, n), dtype = node.arg[2][0], node.src[0].dtype
    parts = max(1, min(-(-target.threads // rows), n // LEAST_SORTED_PART)) if rows < target.threads else 1
    if is_counted(dtype, n):
        vectors = -(-n // target.lanes(type_to_compare(key_type(dtype))))
        cycles = -(-rows // target.threads) * n * vectors * COUNT_CYCLES
    else:
        of_digit = digit_cycles(n, ELEMENT, BUCKETS, parts, target)
        cycles = -(-rows * parts // target.threads) * len(key_digits(dtype)) * of_digit
    lower = partial(_order_by_parts, parts=parts) if parts > 1 else _order_rows
    return [SortingWay(cycles, partial(lower, kept=kept, descending=descending)), *network_ways(node, target, kept, descending)]


def _order_rows(node: UOp, target: Target, kept: int, descending: bool) -> Program:
    """Return the Program in which each iteration is a row, or a vector of short ones."""
    (rows, n), dtype = node.arg[2][0], node.src[0].dtype
    b = Loops()
    y, x = b.args(node)
    if is_counted(dtype, n) and rows >= target.lanes(type_to_compare(key_type(dtype))):
        key = partial(sort_key, b, descending=descending)
        blocks, nbytes = count_rows(b, key, key_type(dtype), x, y, (rows, n), kept, target, positions)
        return program(node, (), (b, blocks, cores(target, operations(node)[0], blocks), nbytes))
    order = RowOrder(b, dtype, n, target)

    def row(it: int) -> None:
        order.write(row_keys(b, x, b.mul(it, n), descending), b.index(n), y, b.mul(it, kept), kept)
    b.loop(*b.bounds(), row)
    return program(node, (), (b, rows, cores(target, operations(node)[0], rows), order.nbytes))


def _order_by_parts(node: UOp, target: Target, kept: int, descending: bool, parts: int) -> Program:
    """Return the Program of a radix sort in which each step is a phase, and each iteration is a part of a row."""
    (rows, n), dtype = node.arg[2][0], node.src[0].dtype
    kind, digits, length = key_type(dtype), key_digits(dtype), -(-n // parts)
    types = (ELEMENT, COUNT, kind, ELEMENT)     # elements, counts, the least key of each part, the bits of each part
    sizes = (rows * 2 * n, rows * parts * BUCKETS, rows * parts, rows * parts)

    def phase(step: Step, known: int = 2) -> tuple[Loops, int, int, int]:
        """Make the phase of `step(radix, row, part, first, last)`. `known`: 0 before the least key is known, 1 before the bits are."""
        b = Loops()
        _, x = b.args(node)
        elements, counts, least, bits = _temporaries(b, types)

        def iteration(it: int) -> None:
            row, part = b.over(it, parts), b.mod(it, parts)
            radix = Radix(b, kind, digits, row_keys(b, x, b.mul(row, n), descending), target, elements, n, counts, b.scratch(COUNT, 0))
            radix.origin, radix.tables = b.mul(row, 2 * n), b.mul(row, parts * BUCKETS)

            def of_row(op: str, pointer: int) -> int:
                return reduce(partial(b.alu, op, b.dtype[pointer], 1), [b.get(pointer, b.mul(row, parts), offset=p) for p in range(parts)])
            if known > 0:
                radix.least = of_row("MIN", least)
            if known > 1:
                radix.bits = of_row("OR", bits)
            first = b.mul(part, length)
            step(radix, row, part, first, b.least(b.plus(first, length), b.index(n)))
        b.loop(*b.bounds(), iteration)
        return b, rows * parts, min(target.threads, rows * parts), aligned(BUCKETS * COUNT.itemsize)

    def keep(number: int, found: Callable[[Radix, int, int], int]) -> Step:
        """Return the step that stores what a part found in a temporary."""
        def step(radix: Radix, row: int, part: int, first: int, last: int) -> None:
            b = radix.b
            b.put(_temporaries(b, types)[number], b.calc("ADD", b.mul(row, parts), part), found(radix, first, last))
        return step

    def write(radix: Radix, row: int, part: int, first: int, last: int) -> None:
        b = radix.b
        most = b.index(kept)
        radix.write(b.least(first, most), b.least(last, most), b.args(node)[0], b.mul(row, kept))

    def steps_of(digit: int) -> list[Step]:
        def take_word(radix: Radix, row: int, part: int, first: int, last: int) -> None:
            radix.take_word(digit, first, last)

        def count(radix: Radix, row: int, part: int, first: int, last: int) -> None:
            radix.count(digit, [RowPart(part, first, last)])

        def move(radix: Radix, row: int, part: int, first: int, last: int) -> None:
            radix.move(digit, [RowPart(part, first, last)], parts)
        return [*[take_word] * Radix.takes_word(digit), count, move]

    phases = [phase(keep(2, Radix.least_key), known=0), phase(keep(3, Radix.fill), known=1),
              *[phase(step) for digit in digits for step in steps_of(digit)], phase(write)]
    return program(node, tuple([size * t.itemsize for size, t in zip(sizes, types, strict=True)]), *phases)


def _temporaries(b: Loops, types: tuple[DType, ...]) -> list[int]:
    """Return pointers to the temporaries of a program."""
    return [b.pure("TEMP", t, 1, (), i) for i, t in enumerate(types)]
