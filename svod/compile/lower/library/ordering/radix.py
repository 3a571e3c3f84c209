"""Radix sort, least significant digit first: the positions of a row's keys in order, by passes over digits of 8 bits.

    elements[i] = key i - least key, i                        64 bits: a word of 32 bits of the difference above the position
    for each digit:   for i:  counts[digit of elements[i]] += 1
                      starts = exclusive prefix sums of counts
                      for i:  out[starts[digit of elements[i]]++] = elements[i];     elements, out = out, elements
    order[i] = position of elements[i]

A pass keeps the order of equal digits, so the sort is stable. A digit that is 0 in all elements has no pass: integers of a small range cost
what a narrow type costs. Keys of 64 bits are sorted by their low words, then the high words take the place of the low ones.

A row is cut into parts: a long one into one part per core, where each step is a phase; a short one into two parts of one core, which takes
their elements in turns. A count is loaded after it was stored, so elements of equal digits wait for each other, less so in turns. A part
counts its own digits, and stores its elements of a bucket behind those of the parts before it (Zagha and Blelloch, "Radix sort for vector
multiprocessors", Supercomputing 1991).
"""
from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple

from svod.compile.lower.library.loops import BOOL, INDEX, Keys, Loops
from svod.core.ir.dtype import BY_NAME, DType, dtypes
from svod.core.machine.target import Target

ELEMENT, COUNT = dtypes.uint64, dtypes.int32
DIGIT_BITS = 8
BUCKETS = 1 << DIGIT_BITS
WORD_BITS = 32
POSITION_MASK = (1 << WORD_BITS) - 1
WORD_MASK = POSITION_MASK << WORD_BITS


class RowPart(NamedTuple):
    """A part of a row: its number among the parts, and the range of its positions. All are values that a program computes."""

    number: int
    first: int
    last: int


class Radix:
    """Writes the steps of a radix sort for the positions from `first` to `last` of a row, or for some of its parts.

    `digits`: the numbers of the digits in which keys may differ, 0 for the least significant one. `elements`: a pointer to two halves of
    `room` elements each, which begin at `origin`. `counts`: a pointer to a table of `BUCKETS` counts for each part of the row, from
    `tables` on; `starts`: a pointer to a table for each part of this core. `least`: the value of the least key; `bits`: the value of an OR
    of the keys less the least one."""

    def __init__(self, b: Loops, kind: DType, digits: range, keys: Keys, target: Target, elements: int, room: int, counts: int,
                 starts: int):
        self.b, self.kind, self.digits, self.keys, self.room = b, kind, digits, keys, room
        self.elements, self.counts, self.starts = elements, counts, starts
        self.lanes = target.lanes(ELEMENT)
        self.origin = self.tables = b.index(0)
        self.least, self.bits = b.const(kind, 1, 0), b.const(ELEMENT, 1, 0)

    # -- elements -----------------------------------------------------------------------------------
    def _bitwise(self, op: str, bits: int, mask_or_shift: int) -> int:
        lanes = self.b.num_lanes[bits]
        return self.b.alu(op, ELEMENT, lanes, bits, self.b.const(ELEMENT, lanes, mask_or_shift))

    def _distance(self, i: int, lanes: int) -> int:
        """Emit the keys from `i` on less the least key, as unsigned integers."""
        b, unsigned = self.b, BY_NAME[f"uint{self.kind.bits}"]
        key, least = b.bitcast(unsigned, self.keys(i, lanes)), b.bitcast(unsigned, self.least)
        return b.cast(ELEMENT, b.alu("SUB", unsigned, lanes, key, b.splat(least, lanes)))

    def _address(self, half: int, i: int) -> int:
        return self.b.calc("ADD", self.b.calc("ADD", self.origin, half), i)

    def _get(self, half: int, i: int, lanes: int = 1) -> int:
        return self.b.get(self.elements, self._address(half, i), lanes, ordered=True)

    def _by_vectors(self, first: int, last: int, vector: Callable[[int, int], int], init: int) -> int:
        """Emit `vector(i, carried)` for the positions of a range, which are those of a vector at least; returns the last carried value."""
        b = self.b
        final = b.plus(last, -self.lanes)       # the last vector is moved back
        return b.loop(first, last, lambda i, carried: (vector(b.least(i, final), carried),), init, step=self.lanes)[0]

    def least_key(self, first: int, last: int) -> int:
        """Emit the least key of a range."""
        b, kind, lanes = self.b, self.kind, self.lanes
        return b.over_lanes("MIN", self._by_vectors(first, last, lambda i, least: b.alu("MIN", kind, lanes, least, self.keys(i, lanes)),
                                                    b.const(kind, lanes, kind.max)))

    def fill(self, first: int, last: int) -> int:
        """Store the elements of a range in the first half; returns an OR of their keys less the least key."""
        b, lanes = self.b, self.lanes
        steps = b.vconst(ELEMENT, tuple(range(lanes)))

        def vector(i: int, bits: int) -> int:
            distance = self._distance(i, lanes)
            position = b.alu("ADD", ELEMENT, lanes, b.splat(b.cast(ELEMENT, i), lanes), steps)
            element = b.alu("OR", ELEMENT, lanes, self._bitwise("SHL", distance, WORD_BITS), position)
            b.put(self.elements, self._address(b.index(0), i), element)
            return b.alu("OR", ELEMENT, lanes, bits, distance)
        return b.over_lanes("OR", self._by_vectors(first, last, vector, b.const(ELEMENT, lanes, 0)))

    @staticmethod
    def takes_word(digit: int) -> bool:
        """Whether elements get the next word of their keys before the pass over a digit."""
        return digit > 0 and digit * DIGIT_BITS % WORD_BITS == 0

    def take_word(self, digit: int, first: int, last: int) -> None:
        """Replace the words of elements by the next ones of their keys, if these differ."""
        b, half = self.b, self.half(digit)
        differs = b.alu("CMPNE", BOOL, 1, self._bitwise("SHR", self.bits, WORD_BITS), b.const(ELEMENT, 1, 0))

        def element(i: int) -> None:
            position = self._bitwise("AND", self._get(half, i), POSITION_MASK)
            high = self._bitwise("AND", self._distance(b.cast(INDEX, position), 1), WORD_MASK)
            b.put(self.elements, self._address(half, i), b.alu("OR", ELEMENT, 1, high, position))
        b.loop(first, b.choose(differs, last, first), element)

    # -- passes -------------------------------------------------------------------------------------
    def _digit_at(self, bits: int, shift: int) -> int:
        return self.b.cast(INDEX, self._bitwise("AND", self._bitwise("SHR", bits, shift), BUCKETS - 1))

    def _bucket(self, element: int, digit: int) -> int:
        return self._digit_at(element, WORD_BITS + digit * DIGIT_BITS % WORD_BITS)

    def _has_pass(self, digit: int) -> int:
        return self.b.alu("CMPNE", BOOL, 1, self._digit_at(self.bits, digit * DIGIT_BITS), self.b.index(0))

    def half(self, digit: int) -> int:
        """Emit the offset of the half that holds the elements before the pass over a digit."""
        b, half = self.b, self.b.index(0)
        for earlier in range(self.digits.start, digit):
            half = b.choose(self._has_pass(earlier), b.minus(b.index(self.room), half), half)
        return half

    def _until(self, digit: int, stop: int) -> int:
        """Emit `stop` if a digit has a pass, otherwise 0, which ends a loop before it starts."""
        return self.b.choose(self._has_pass(digit), stop, self.b.index(0))

    def _increase(self, pointer: int, at: int) -> int:
        """Increase a count; returns what it was."""
        count = self.b.get(pointer, at, ordered=True)
        self.b.put(pointer, at, self.b.alu("ADD", COUNT, 1, count, self.b.const(COUNT, 1, 1)))
        return count

    def _in_turns(self, digit: int, parts: Sequence[RowPart], body: Callable[[int, int], None]) -> None:
        """Emit `body(k, i)` for the positions i of the k-th of some parts, in turns, if the digit has a pass. The lengths of the parts do
        not increase."""
        b = self.b
        shortest = b.minus(parts[-1].last, parts[-1].first)

        def positions(i: int) -> None:
            for k, part in enumerate(parts):
                body(k, b.calc("ADD", part.first, i))
        b.loop(b.index(0), self._until(digit, shortest), positions)
        for k, part in enumerate(parts[:-1]):
            b.loop(b.calc("ADD", part.first, shortest), self._until(digit, part.last), partial(body, k))

    def count(self, digit: int, parts: Sequence[RowPart]) -> None:
        """Count the digits of the elements of some parts, in the table of each."""
        b, half, lanes = self.b, self.half(digit), 2 * self.lanes
        tables = [b.calc("ADD", self.tables, b.mul(part.number, BUCKETS)) for part in parts]
        zero = b.const(COUNT, lanes, 0)

        def clear(i: int) -> None:
            for table in tables:
                b.put(self.counts, b.calc("ADD", table, i), zero)
        b.loop(b.index(0), self._until(digit, b.index(BUCKETS)), clear, step=lanes)

        def element(k: int, i: int) -> None:
            self._increase(self.counts, b.calc("ADD", tables[k], self._bucket(self._get(half, i), digit)))
        self._in_turns(digit, parts, element)

    def move(self, digit: int, parts: Sequence[RowPart], count: int) -> None:
        """Move the elements of some of `count` parts to their places in the other half."""
        b, half = self.b, self.half(digit)
        other = b.minus(b.index(self.room), half)

        def start(bucket: int, total: int) -> tuple[int]:
            own = [total] * len(parts)
            for p in range(count):
                own = [b.choose(b.alu("CMPEQ", BOOL, 1, part.number, b.index(p)), total, at) for part, at in zip(parts, own, strict=True)]
                at = b.calc("ADD", self.tables, b.plus(bucket, p * BUCKETS))
                total = b.alu("ADD", COUNT, 1, total, b.get(self.counts, at, ordered=True))
            for k, at in enumerate(own):
                b.put(self.starts, b.plus(bucket, k * BUCKETS), at)
            return (total,)
        b.loop(b.index(0), self._until(digit, b.index(BUCKETS)), start, b.const(COUNT, 1, 0))

        def element(k: int, i: int) -> None:
            element = self._get(half, i)
            place = self._increase(self.starts, b.plus(self._bucket(element, digit), k * BUCKETS))
            b.put(self.elements, self._address(other, b.cast(INDEX, place)), element)
        self._in_turns(digit, parts, element)

    def write(self, first: int, last: int, order: int, at: int) -> None:
        """Store the positions of the sorted elements from `first` to `last` at `order[at + first]` and so on."""
        b, half = self.b, self.half(self.digits.stop)

        def positions(i: int, lanes: int) -> None:
            position = self._bitwise("AND", self._get(half, i, lanes), POSITION_MASK)
            b.put(order, b.calc("ADD", at, i), b.cast(b.dtype[order], position))
        b.span(first, last, self.lanes, positions)
