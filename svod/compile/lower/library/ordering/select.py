"""TOPK: by insertion (`insertion.py`), by sorting rows (`sort.py`), or by selection, whichever is predicted to take least. Selection keeps
elements that may be among the best of their row, and sorts them when there are many.

    kept = []
    for each block of a row:   if its best key precedes the limit, or there is none:
                                   for i in block:  append key i, i to kept, if the key precedes the limit
                               if kept has `capacity` entries:  kept = the k best of kept;   limit = the last one's key
    the result is the order of the k best of kept

Elements come in the order of their positions, so one that is equal to the limit never takes the place of another one. Of n elements in
random order about k · ln(n / k) are kept after the first ones; a block without any costs a comparison per vector.
"""
from __future__ import annotations

import math

from svod.compile.lower.library.loops import BOOL, Loops, aligned, cores, program
from svod.compile.lower.library.ordering.insertion import insertion_ways
from svod.compile.lower.library.ordering.keys import key_type
from svod.compile.lower.library.ordering.network_sort import SortingWay
from svod.compile.lower.library.ordering.radix import ELEMENT
from svod.compile.lower.library.ordering.sort import COUNT_CYCLES, POSITION, RowOrder, row_keys, ways_to_order
from svod.compile.lower.program import Program
from svod.core.graph.library_kernel import operations
from svod.core.ir.uop import UOp
from svod.core.machine.target import Target

BLOCK_VECTORS = 8
CAPACITY_FACTOR = 4         # candidates that have memory, per element of the result
LEAST_CAPACITY = 64
VECTOR_CYCLES = 3.0         # cycles to compare a vector of elements with the limit
OFFER_CYCLES = 8.0          # cycles per element of a block that has one to keep, with its share of the sorts
SORT_FACTOR = 8             # a row of n elements is not selected from if k · SORT_FACTOR > n
SHORT_ROW = 128             # elements of a row up to which it is not selected from


def lower_topk(node: UOp, target: Target) -> Program:
    """Return the Program of a TOPK."""
    return min(ways_to_choose(node, target), key=lambda way: way.cycles).lower(node, target)


def ways_to_choose(node: UOp, target: Target) -> list[SortingWay]:
    """Return the ways to find the best elements of rows: by insertion, by sorting rows, and, unless rows are short or most elements are
    kept, by selection."""
    (k, largest), ((rows, n),) = node.arg[1:]
    found = [*insertion_ways(node, target), *ways_to_order(node, target, k, bool(largest))]
    if k * SORT_FACTOR <= n and n > SHORT_ROW:
        found.append(SortingWay(-(-rows // target.threads) * _selection_cycles(node, target), select_best))
    return found


def _selection_cycles(node: UOp, target: Target) -> float:
    """Return the cycles to select the best elements of a row, whose elements are in random order."""
    (k, _), ((_, n),) = node.arg[1:]
    lanes = target.lanes(key_type(node.src[0].dtype))
    width = BLOCK_VECTORS * lanes
    blocks = n / width
    with_better = min(blocks, k * (1 + math.log(max(1.0, blocks / k))))       # blocks that have an element to keep
    room = max(LEAST_CAPACITY, CAPACITY_FACTOR * k) + width
    cycles: float = n / lanes * VECTOR_CYCLES + with_better * width * OFFER_CYCLES + room * room / lanes * COUNT_CYCLES
    return cycles


def select_best(node: UOp, target: Target) -> Program:
    """Return the Program of a TOPK that keeps candidates."""
    (k, largest), ((rows, n),) = node.arg[1:]
    b = Loops()
    y, x = b.args(node)
    kind = key_type(node.src[0].dtype)
    lanes = target.lanes(kind)
    width = BLOCK_VECTORS * lanes
    capacity = max(LEAST_CAPACITY, CAPACITY_FACTOR * k)
    room = capacity + width
    areas, offset = [], 0
    for dtype, count in ((kind, room), (POSITION, room), (POSITION, k), (kind, k), (POSITION, k)):
        areas.append(b.scratch(dtype, offset))
        offset += aligned(count * dtype.itemsize)
    keys, positions, order, best_keys, best_positions = areas
    sorting = RowOrder(b, node.src[0].dtype, room, target, offset)
    none = b.index(0)

    def sort_kept(count: int) -> None:
        # keys that come behind all others fill a vector
        filled = b.calc("MAX", count, b.index(target.lanes(ELEMENT)))
        b.loop(count, filled, lambda i: b.put(keys, i, b.const(kind, 1, kind.max)))
        sorting.write(lambda i, some: b.get(keys, i, some, ordered=True), filled, order, none, k)

    def reduce_kept(_: int, count: int, limit: int, is_open: int) -> tuple[int, ...]:
        sort_kept(count)

        def gather(i: int) -> None:
            at = b.cast(b.dtype[none], b.get(order, i, ordered=True))
            b.put(best_keys, i, b.get(keys, at, ordered=True))
            b.put(best_positions, i, b.get(positions, at, ordered=True))
        b.loop(none, b.index(k), gather)
        for to, source in ((keys, best_keys), (positions, best_positions)):
            b.span(none, b.index(k), lanes, lambda i, some, to=to, source=source: b.put(to, i, b.get(source, i, some, ordered=True)))
        return b.index(k), b.get(keys, b.index(k - 1), ordered=True), b.const(BOOL, 1, False)

    def row(it: int) -> None:
        key = row_keys(b, x, b.mul(it, n), bool(largest))

        def offer(i: int, count: int, limit: int, is_open: int) -> int:
            one = key(i, 1)
            b.put(keys, count, one)
            b.put(positions, count, b.cast(POSITION, i))
            return b.choose(b.either(b.alu("CMPLT", BOOL, 1, one, limit), is_open), b.plus(count, 1), count)

        def block(start: int, count: int, limit: int, is_open: int) -> tuple[int, ...]:
            least = key(start, lanes)
            for v in range(1, BLOCK_VECTORS):
                least = b.alu("MIN", kind, lanes, least, key(b.plus(start, v * lanes), lanes))
            found = b.either(b.alu("CMPLT", BOOL, 1, b.over_lanes("MIN", least), limit), is_open)
            count, = b.loop(start, b.choose(found, b.plus(start, width), start), lambda i, c: (offer(i, c, limit, is_open),), count)
            full = b.choose(b.below(count, b.index(capacity)), none, b.index(1))
            return tuple(b.loop(none, full, reduce_kept, count, limit, is_open))
        whole = n // width * width
        count, limit, is_open = b.loop(none, b.index(whole), block, none, b.const(kind, 1, 0), b.const(BOOL, 1, True), step=width)
        count, = b.loop(b.index(whole), b.index(n), lambda i, c: (offer(i, c, limit, is_open),), count)
        sort_kept(count)

        def write(i: int) -> None:
            at = b.cast(b.dtype[none], b.get(order, i, ordered=True))
            b.put(y, b.calc("ADD", b.mul(it, k), i), b.cast(node.dtype, b.get(positions, at, ordered=True)))
        b.loop(none, b.index(k), write)
    b.loop(*b.bounds(), row)
    return program(node, (), (b, rows, cores(target, operations(node)[0], rows), offset + sorting.nbytes))
