"""Comparison counting (Knuth, TAOCP 3, section 5.2): the place of a key of a short row is the number of keys that precede it.

    for i:   place = 0;   for j before i:  place += key j <= key i;   for j behind i:  place += key j < key i
             out[place] = i, or for SORT element i

A row costs n² comparisons, without branches. The lanes of a vector are the keys i of as many rows, or, of a single row, neighbouring i.
"""
from __future__ import annotations

from collections.abc import Callable

from svod.compile.lower.library.loops import BOOL, INDEX, Keys, Loops, aligned
from svod.core.ir.dtype import DType, dtypes
from svod.core.machine.target import Target

Stored = Callable[[int, int], int]       # (keys, their positions) → what is stored at their places
MOST_VECTORS = 4            # vectors of neighbouring keys that are compared with a key at a time


def type_to_compare(kind: DType) -> DType:
    """Return the integer type in which keys are compared: short ones in 32 bits, whose vectors have as many lanes as their counts."""
    return kind if kind.bits >= 32 else dtypes.int32


def _count_type(kind: DType) -> DType:
    return dtypes.int32 if type_to_compare(kind).bits == 32 else dtypes.int64


def _counted(b: Loops, places: int, precedes: int) -> int:
    """Emit `places`, increased by 1 in lanes where `precedes` holds."""
    count, lanes = b.dtype[places], b.num_lanes[places]
    return b.alu("ADD", count, lanes, places, b.alu("WHERE", count, lanes, precedes, b.const(count, lanes, 1), b.const(count, lanes, 0)))


def _store(b: Loops, y: int, base: int, place: int, value: int, kept: int) -> None:
    """Store values at `y[base + place]`, lane by lane, for places below `kept`."""
    lanes = b.num_lanes[place]
    inside = b.alu("CMPLT", BOOL, lanes, place, b.const(b.dtype[place], lanes, kept))
    where = b.alu("ADD", INDEX, lanes, b.cast(INDEX, place), base)
    b.scatter(y, where, b.splat(b.cast(b.dtype[y], value), lanes), inside)


def positions(_: int, position: int) -> int:
    """Stored by ARGSORT and TOPK."""
    return position


# -- many rows ----------------------------------------------------------------------------------------
def count_rows(b: Loops, key: Callable[[int], int], kind: DType, x: int, y: int, shape: tuple[int, int], kept: int,
               target: Target, stored: Stored) -> tuple[int, int]:
    """Store what `stored` makes of the first `kept` elements of each row of x in y, in order, by vectors of a position in several rows.
    `shape`: (rows, at least those of a vector; elements of a row). `key`: emits keys, of the type `kind`. Returns (number of iterations,
    bytes of scratch)."""
    rows, n = shape
    compared = type_to_compare(kind)
    lanes = target.lanes(compared)
    keys = b.scratch(compared, 0)
    none = b.const(_count_type(kind), lanes, 0)

    def block(it: int) -> None:
        first = b.least(b.mul(it, lanes), b.index(rows - lanes))       # the last block is moved back
        begin = b.mul(first, n)
        b.loop(b.index(0), b.index(n), lambda i: b.put(keys, b.mul(i, lanes), b.cast(compared, key(
            b.strided(x, b.calc("ADD", begin, i), lanes, n)))))
        base = b.alu("ADD", INDEX, lanes, b.splat(b.mul(first, kept), lanes), b.vconst(INDEX, tuple(range(0, lanes * kept, kept))))

        def position(i: int) -> None:
            def other(j: int) -> int:
                return b.get(keys, b.mul(j, lanes), lanes, ordered=True)
            own = other(i)
            place, = b.loop(b.index(0), i, lambda j, p: (_counted(b, p, b.alu("CMPLE", BOOL, lanes, other(j), own)),), none)
            place, = b.loop(b.plus(i, 1), b.index(n), lambda j, p: (_counted(b, p, b.alu("CMPLT", BOOL, lanes, other(j), own)),), place)
            _store(b, y, base, place, stored(b.cast(kind, own), i), kept)
        b.loop(b.index(0), b.index(n), position)
    b.loop(*b.bounds(), block)
    return -(-rows // lanes), aligned(n * lanes * compared.itemsize)


# -- one row ------------------------------------------------------------------------------------------
def counted_elements(kind: DType, n: int, target: Target) -> int:
    """Return the number of keys that memory is needed for: a whole number of blocks."""
    width = _block_vectors(kind, n, target) * target.lanes(type_to_compare(kind))
    return -(-n // width) * width


def _block_vectors(kind: DType, n: int, target: Target) -> int:
    return min(MOST_VECTORS, -(-n // target.lanes(type_to_compare(kind))))


def order_by_counting(b: Loops, kind: DType, keys: Keys, most: int, n: int, memory: int, target: Target, y: int, at: int,
                      kept: int, stored: Stored) -> None:
    """Store what `stored` makes of the first `kept` keys, in order, at `y[at]` and so on. `n`: the value of the number of keys, at most
    `most`; `memory`: a pointer to `counted_elements` keys of `type_to_compare`."""
    compared, count = type_to_compare(kind), _count_type(kind)
    lanes, vectors = target.lanes(compared), _block_vectors(kind, most, target)
    width = lanes * vectors
    steps = b.vconst(count, tuple(range(lanes)))

    b.span(b.index(0), n, lanes, lambda i, some: b.put(memory, i, b.cast(compared, keys(i, some))))
    # the keys that fill the last block come behind all others
    b.loop(n, b.index(counted_elements(kind, most, target)), lambda i: b.put(memory, i, b.const(compared, 1, compared.max)))

    def block(start: int) -> None:
        own = [b.get(memory, start, lanes, v * lanes, ordered=True) for v in range(vectors)]

        def compare(j: int, places: tuple[int, ...], middle: int) -> tuple[int, ...]:
            """Count key j. `middle`: the vector that has it; keys of vectors behind it also count an equal key."""
            key = b.splat(b.get(memory, j, ordered=True), lanes)
            found = []
            for v, (mine, place) in enumerate(zip(own, places, strict=True)):
                precedes = b.alu("CMPLE" if v > middle else "CMPLT", BOOL, lanes, key, mine)
                if v == middle:
                    earlier = b.alu("CMPLT", BOOL, lanes, b.splat(b.cast(count, b.minus(j, b.plus(start, v * lanes))), lanes), steps)
                    precedes = b.either(precedes, b.both(b.alu("CMPEQ", BOOL, lanes, key, mine), earlier))
                found.append(_counted(b, place, precedes))
            return tuple(found)
        places = b.loop(b.index(0), start, lambda j, *p: compare(j, p, -1), *[b.const(count, lanes, 0)] * vectors)
        for v in range(vectors):
            first = b.plus(start, v * lanes)
            places = b.loop(first, b.plus(first, lanes), lambda j, *p, v=v: compare(j, p, v), *places)
        places = b.loop(b.plus(start, width), n, lambda j, *p: compare(j, p, vectors), *places)
        for v, place in enumerate(places):
            position = b.alu("ADD", count, lanes, b.splat(b.cast(count, b.plus(start, v * lanes)), lanes), steps)
            _store(b, y, b.splat(at, lanes), place, stored(b.cast(kind, own[v]), position), kept)
    b.loop(b.index(0), n, block, step=width)
