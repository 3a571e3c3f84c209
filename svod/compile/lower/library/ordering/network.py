"""Sorting networks over vectors in memory: the elements of a lane, one per vector, are a column (Batcher, "Sorting networks and their
applications", AFIPS 1968).

    for each block of 16 vectors:   sort it in registers, by odd-even merges
    for N = 32, 64, … vectors:      for i in N/2:  order (i, N-1-i)                     the halves are sorted: one is taken in reverse
                                    for d = N/4, N/8, … 1:   order (i, i+d)             for the i whose bit d is 0

`order` is a minimum and a maximum, so all lanes are sorted at once and no step depends on the elements. Several steps are one pass, which
holds their vectors in registers; passes over a block that fits the first cache come one after the other. Every pair is in ascending order,
so a column of any height is sorted as if it were longer and ended with the largest elements: pairs that reach beyond it are left out.
"""
from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from svod.compile.lower.library.loops import Loops
from svod.compile.lower.library.ordering.records import Record, ordered
from svod.core.machine.target import Target

Pairs = list[tuple[int, int]]
Span = tuple[int, int]      # values: the first position, and that behind the last one
HELD_VECTORS = {True: 4, False: 3}      # logarithm of the vectors that a pass holds: whether there are 32 registers → 16 or 8


class VectorPlace(NamedTuple):
    """A vector in memory: number `base` + `offset`; `is_reversed`: its lanes are taken in reverse."""

    base: int
    offset: int
    is_reversed: bool = False


def held_stages(target: Target, parts: int = 1) -> int:
    """Return the number of steps of a pass, which holds 2 to the power of it vectors of records of so many parts."""
    return HELD_VECTORS[target.vector_registers >= 32] - parts.bit_length() + 1


def sorting_pairs(n: int) -> Pairs:
    """Return the pairs of a network that sorts n elements: Batcher's odd-even merge sort without the pairs that reach beyond them."""
    pairs, size = [], 1
    while size < n:
        d = size
        while d:
            for start in range(d % size, n - d, 2 * d):
                pairs += [(i, i + d) for i in range(start, min(start + d, n - d)) if i // (2 * size) == (i + d) // (2 * size)]
            d //= 2
        size *= 2
    return pairs


def cleaning_pairs(n: int, stages: int) -> Pairs:
    """Return the pairs that sort 2**stages elements whose order is bitonic, of which there are the first n."""
    return [(t, t + d) for d in (1 << s for s in range(stages - 1, -1, -1)) for t in range(n - d) if not t & d]


class Columns:
    """Writes the passes over `height` vectors of records from number `first` on of those in `memory`, which begin at `origin`. Each part of
    the records (`records.py`) has a pointer in `memory`.

    `natural`: the vectors are one sequence, vector after vector and lane after lane; otherwise each lane is a sequence."""

    def __init__(self, b: Loops, memory: Sequence[int], origin: int, first: int, height: int, target: Target,
                 natural: bool = False) -> None:
        self.b, self.memory, self.origin, self.first, self.height, self.target = b, memory, origin, first, height, target
        self.lanes, self.natural = target.lanes(b.dtype[memory[0]]), natural
        self.stages = held_stages(target, len(memory))

    def part(self, first: int, height: int) -> Columns:
        """The same from another vector on, whose number is a value."""
        return Columns(self.b, self.memory, self.origin, first, height, self.target, self.natural)

    # -- vectors ------------------------------------------------------------------------------------
    def get(self, i: int, offset: int = 0) -> Record:
        """Load the vector i + offset."""
        b, at = self.b, self.b.calc("ADD", self.origin, self.b.mul(i, self.lanes))
        return tuple([b.get(pointer, at, self.lanes, offset * self.lanes, ordered=True) for pointer in self.memory])

    def put(self, i: int, record: Record, offset: int = 0) -> None:
        b, at = self.b, self.b.calc("ADD", self.origin, self.b.mul(i, self.lanes))
        for pointer, v in zip(self.memory, record, strict=True):
            b.put(pointer, at, v, offset=offset * self.lanes)

    def taken(self, record: Record, *lanes: int) -> Record:
        """The lanes of a vector with these numbers."""
        return tuple([self.b.pure("SHUFFLE", self.b.dtype[v], self.lanes, (v,), lanes) for v in record])

    def _in_order(self, records: Sequence[Record], pairs: Pairs) -> list[Record]:
        """Order pairs of vectors, one pair after the other."""
        records = list(records)
        for i, j in pairs:
            records[i], records[j] = ordered(self.b, records[i], records[j])
        return records

    def _pass(self, places: Sequence[VectorPlace], pairs: Pairs, within: Callable[[list[Record]], list[Record]] | None = None) -> None:
        """Order pairs of the vectors at some places. `within`: what is done with them afterwards."""
        backwards = range(self.lanes - 1, -1, -1)
        records = [self.get(p.base, p.offset) for p in places]
        records = [self.taken(r, *backwards) if p.is_reversed else r for p, r in zip(places, records, strict=True)]
        records = self._in_order(records, pairs)
        records = [self.taken(r, *backwards) if p.is_reversed else r for p, r in zip(places, records, strict=True)]
        for p, r in zip(places, within(records) if within else records, strict=True):
            self.put(p.base, r, p.offset)

    # -- blocks -------------------------------------------------------------------------------------
    def _each(self, size: int, body: Callable[[int, int], None]) -> None:
        """Emit `body(first vector, vectors)` for all blocks of `size` vectors: in a loop over whole blocks, and for the rest."""
        b, rest = self.b, self.height % size
        whole = b.plus(self.first, self.height - rest)
        if self.height >= size:
            b.loop(self.first, whole, lambda start: body(start, size), step=size)
        if rest:
            body(whole, rest)

    def _positions(self, d: int, rest: int, span: Span | None, body: Callable[[int, bool], None]) -> None:
        """Emit `body(i, is_before)` for the positions i of a span, which is 0 … d if it is None. `is_before`: whether i < rest."""
        b = self.b
        if rest:
            assert span is None, "a span stands for positions of one kind"
            b.loop(b.index(0), b.index(rest), lambda i: body(i, True))
        b.loop(*(span or (b.index(rest), b.index(d))), lambda i: body(i, False))

    def merge(self, size: int, steps: int, span: Span | None = None) -> None:
        """Emit the pass that begins to merge the halves of blocks of `size` vectors: the step that orders i and size-1-i, and those after
        it, together `steps`. Its vectors are d apart."""
        b, count = self.b, 1 << steps - 1
        d = size // 2 // count

        def block(start: int, present: int) -> None:
            missing, rest = divmod(size - present, d)       # vectors at the end that are missing

            def group(i: int, is_before: bool) -> None:
                found = max(0, count - missing - is_before)
                clean = cleaning_pairs(count, steps - 1)
                pairs = [(t, 2 * count - 1 - t) for t in range(count - found, count)]
                pairs += [*clean, *[(count + p, count + q) for p, q in clean if q < found]]
                up, down = b.calc("ADD", start, i), b.minus(start, i)
                places = [VectorPlace(up, t * d) for t in range(count)]
                places += [VectorPlace(down, size - 1 - (count - 1 - t) * d, self.natural) for t in range(found)]
                if found:
                    self._pass(places, pairs)
            if present > size // 2:
                self._positions(d, rest, span, group)
        self._each(size, block)

    def clean(self, size: int, steps: int, span: Span | None = None) -> None:
        """Emit a pass over blocks of `size` vectors, each in bitonic order: the steps that order i and i + size/2, then size/4, and so on.
        The last one of a natural sequence also orders the lanes of vectors."""
        b, count = self.b, 1 << steps
        d = size // count
        within = self._lanes_ordered if self.natural and d == 1 else None

        def block(start: int, present: int) -> None:
            missing, rest = divmod(present, d)

            def group(i: int, is_before: bool) -> None:
                found = missing + is_before
                if found > 1 or (found and within):
                    place = b.calc("ADD", start, i)
                    self._pass([VectorPlace(place, t * d) for t in range(found)], cleaning_pairs(found, steps), within)
            self._positions(d, rest, span, group)
        self._each(size, block)

    def _lanes_ordered(self, records: list[Record]) -> list[Record]:
        """Order the lanes of vectors, each in bitonic order."""
        result: list[Record] = []
        for k in range(0, len(records), self.lanes):
            columns = transposed_records(self.b, records[k:k + self.lanes])
            columns = self._in_order(columns, cleaning_pairs(self.lanes, self.lanes.bit_length() - 1))
            result += transposed_records(self.b, columns)
        return result

    # -- columns ------------------------------------------------------------------------------------
    def _block(self) -> int:
        """Return the vectors of blocks that fit the first cache; a power of two that is not less than the height if there is one block."""
        whole = 1 << (self.height - 1).bit_length()
        fitting = self.target.l1 // 2 // (self.target.vector_bytes * len(self.memory))
        block = min(self.height & -self.height, 1 << fitting.bit_length() - 1)
        return whole if self.height <= fitting or block < 1 << 2 * self.stages else block

    def sort(self) -> None:
        """Sort each column."""
        block = self._block()
        if block < self.height:
            self._each(block, lambda start, present: self.part(start, present).sort())
        else:
            block = 1 << self.stages
            self._each(block, lambda start, present: self._pass([VectorPlace(start, t) for t in range(present)], sorting_pairs(present)))
        size = 2 * block
        while size // 2 < self.height:
            first, *_ = self._steps(size // min(self._block(), size // 2) if self._block() < self.height else size)
            self.merge(size, first)
            self.finish(size >> first)
            size *= 2

    def finish(self, size: int) -> None:
        """Sort blocks of `size` vectors, each in bitonic order, and their columns."""
        block = self._block()
        is_cut = block < self.height
        for steps in self._steps(size // block if is_cut else size):
            self.clean(size, steps)
            size >>= steps
        if is_cut:
            self._each(block, lambda start, present: self.part(start, present).finish(size))

    def _steps(self, ratio: int) -> list[int]:
        """Return the steps of the passes after which blocks are shorter by a power of two. All but the first hold as many vectors as
        they can."""
        total = max(1, ratio).bit_length() - 1
        first = (total - 1) % self.stages + 1
        return [first, *[self.stages] * ((total - first) // self.stages)] if total else []

    def cross(self, width: int) -> None:
        """Order the columns of `width` neighbouring lanes as one sequence, column after column. Before, both halves of the lanes are such
        sequences. The height is a power of two, at least 2.

        One pass exchanges vectors i and height-1-i between the halves, orders their lanes, and has the first steps within columns."""
        b, lanes = self.b, self.lanes
        count = min(1 << self.stages - 1, self.height // 2)
        d = self.height // count

        def exchanged(record: Record, other: Record, mask: int) -> Record:
            """The first ones of the record and of lanes of `other`, and in the second lane of each pair the others. `mask`: the bits in
            which the lanes of a pair differ."""
            low, high = ordered(b, record, self.taken(other, *[k ^ mask for k in range(lanes)]))
            second = mask & ~(mask >> 1)
            order = tuple(k + lanes * bool(k & second) for k in range(lanes))
            return tuple([b.pure("SHUFFLE", b.dtype[p], lanes, (p, q), order) for p, q in zip(low, high, strict=True)])

        def group(i: int) -> None:
            up, down = b.calc("ADD", self.first, i), b.minus(self.first, i)
            places = [*[VectorPlace(up, t * d) for t in range(count)], *[VectorPlace(down, (t + 1) * d - 1) for t in range(count)]]
            records = [self.get(p.base, p.offset) for p in places]
            records = [exchanged(r, records[-1 - k], width - 1) for k, r in enumerate(records)]
            distance = width // 4
            while distance:
                records = [exchanged(r, r, distance) for r in records]
                distance //= 2
            clean = cleaning_pairs(count, count.bit_length() - 1)
            records = self._in_order(records, [*clean, *[(count + p, count + q) for p, q in clean]])
            for p, r in zip(places, records, strict=True):
                self.put(p.base, r, p.offset)
        b.loop(b.index(0), b.index(d // 2), group)
        self.finish(d)


def transposed(b: Loops, rows: Sequence[int]) -> list[int]:
    """Return the columns of a square, whose rows are vectors."""
    square, lanes = list(rows), len(rows)
    h = 1
    while h < lanes:
        low = tuple(j if not j & h else lanes + j - h for j in range(lanes))
        high = tuple(j + h if not j & h else lanes + j for j in range(lanes))
        for i in range(lanes):
            if not i & h:
                pair = square[i], square[i + h]
                square[i], square[i + h] = (b.pure("SHUFFLE", b.dtype[pair[0]], lanes, pair, order) for order in (low, high))
        h *= 2
    return square


def transposed_records(b: Loops, rows: Sequence[Record]) -> list[Record]:
    """Return the columns of a square of records."""
    return list(zip(*[transposed(b, part) for part in zip(*rows, strict=True)], strict=True))
