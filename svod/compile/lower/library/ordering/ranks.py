"""SORT, ARGSORT and TOPK on a device with groups: a merge sort in which one thread computes the position of each element.

A single thread would run the merge passes of a row one after another. Here a phase merges runs of w into runs of 2·w, with one iteration
for each element. An element moves to its position in its own run plus the number of smaller elements in the neighbouring run; for an
element of the right run, equal ones count too. A binary search counts them (Satish, Harris and Garland, "Designing efficient sorting
algorithms for manycore GPUs", 2009):

    phase 0:      keys[e], positions[e] = key of x[e], e
    for each w:   low, high = the run that is merged with e's;   log2 w + 1 times:  halve it
                  keys[place], positions[place] = key of e, position of e
    the last phase stores y[place] = position instead, for the first k places; of SORT, whose keys have no positions, the element of key

Keys and positions alternate between two pairs of temporaries.
"""
from __future__ import annotations

from svod.compile.lower.library.loops import BOOL, GROUP, Loops, aligned, program
from svod.compile.lower.library.ordering.keys import element_of, key_type, sort_key
from svod.compile.lower.library.ordering.sort import POSITION
from svod.compile.lower.program import Program
from svod.core.graph.library_kernel import merge_passes
from svod.core.ir.dtype import DType
from svod.core.ir.uop import UOp
from svod.core.machine.target import Target


def lower_by_ranks(node: UOp, target: Target) -> Program:
    """Return the Program of a SORT, an ARGSORT or a TOPK for a target with groups."""
    rows, n = node.arg[2][0]
    block = min(GROUP, target.group_threads)
    passes = merge_passes(n)
    sizes = tuple([aligned(rows * n * t.itemsize) for t in _carried(node)])
    phases = [_phase(node, number, number == passes, block) for number in range(passes + 1)]
    return program(node, sizes * min(2, passes), *[(b, -(-rows * n // block), 1, 0) for b in phases], block=block)


def _carried(node: UOp) -> tuple[DType, ...]:
    """Return the types of what is moved of an element: of its key, and of its position unless its value is wanted."""
    key = key_type(node.src[0].dtype)
    return (key,) if node.arg[0] == "SORT" else (key, POSITION)


def _phase(node: UOp, number: int, is_last: bool, block: int) -> Loops:
    """Make phase `number`. Phase 0 reads x; every later phase merges runs of 2**(number - 1)."""
    name, options, ((rows, n),) = node.arg
    kept, descending = options if name == "TOPK" else (n, options[0])
    types = _carried(node)
    b = Loops()
    y, x = b.args(node)

    def area(half: int) -> list[int]:
        return [b.pure("TEMP", t, 1, (), half * len(types) + i) for i, t in enumerate(types)]

    def element(it: int) -> None:
        at, exists = b.thread(it, block, rows * n)
        row = b.over(at, n)
        begin = b.mul(row, n)
        place = b.minus(at, begin)
        if number == 0:
            moved = [sort_key(b, b.get(x, at), descending, one_zero=name != "SORT"), b.cast(POSITION, place)][:len(types)]
        else:
            source = area((number - 1) % 2)
            moved = [b.get(pointer, at) for pointer in source]
            place = _merged(b, source[0], moved[0], begin, place, n, 1 << (number - 1))
        if is_last:
            value = element_of(b, moved[0], node.dtype, descending) if name == "SORT" else b.cast(node.dtype, moved[1])
            b.put(y, b.calc("ADD", b.mul(row, kept), place), value, b.both(exists, b.below(place, b.index(kept))))
        else:
            for pointer, value in zip(area(number % 2), moved, strict=True):
                b.put(pointer, b.calc("ADD", begin, place), value, exists)
    b.loop(*b.bounds(), element)
    return b


def _merged(b: Loops, keys: int, key: int, begin: int, i: int, n: int, width: int) -> int:
    """Emit the position of element `i` of a row after runs of `width` are merged."""
    start = b.mul(b.over(i, 2 * width), 2 * width)
    is_left = b.below(b.minus(i, start), b.index(width))
    other = b.least(b.choose(is_left, b.plus(start, width), start), b.index(n))
    end = b.least(b.plus(other, width), b.index(n))

    def halve(_: int, low: int, high: int) -> tuple[int, int]:
        middle = b.over(b.calc("ADD", low, high), 2)
        found = b.get(keys, b.calc("ADD", begin, b.least(middle, b.index(n - 1))))
        less, greater = (b.alu("CMPLT", BOOL, 1, p, q) for p, q in ((found, key), (key, found)))
        is_before = b.either(b.both(is_left, less), b.no(b.either(is_left, greater)))
        is_open = b.below(low, high)
        return (b.choose(b.both(is_open, is_before), b.plus(middle, 1), low),
                b.choose(b.both(is_open, b.no(is_before)), middle, high))
    before, _ = b.loop(b.index(0), b.index(width.bit_length()), halve, other, end)
    return b.calc("ADD", b.choose(is_left, i, b.plus(i, -width)), b.minus(before, other))
