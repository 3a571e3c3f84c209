"""ARGSORT and TOPK on a device with groups: a merge sort in which one thread computes the position of each element.

A single thread would run the merge passes of a row one after another. Here a phase merges runs of w into runs of 2·w, with one iteration
for each element. An element moves to its position in its own run plus the number of smaller elements in the neighbouring run; for an
element of the right run, equal ones count too. A binary search counts them (Satish, Harris and Garland, "Designing efficient sorting
algorithms for manycore GPUs", 2009):

    phase 0:      keys[e], positions[e] = key of x[e], e
    for each w:   low, high = the run that is merged with e's;   log2 w + 1 times:  halve it
                  keys[place], positions[place] = key of e, position of e
    the last phase stores y[place] = position instead, for the first k places

Keys and positions alternate between two pairs of temporaries.
"""
from __future__ import annotations

from svod.compile.lower.library.loops import BOOL, GROUP, Loops, aligned, program
from svod.compile.lower.library.sort import POSITION, key_type, sort_key
from svod.compile.lower.program import Program
from svod.core.graph.library_kernel import merge_passes
from svod.core.ir.uop import UOp
from svod.core.machine.target import Target


def lower_by_ranks(node: UOp, target: Target) -> Program:
    """Return the Program of an ARGSORT or a TOPK for a target with groups."""
    rows, n = node.arg[2][0]
    block = min(GROUP, target.group_threads)
    passes = merge_passes(n)
    sizes = (aligned(rows * n * key_type(node.src[0].dtype).itemsize), aligned(rows * n * POSITION.itemsize))
    phases = [_phase(node, number, number == passes, block) for number in range(passes + 1)]
    return program(node, sizes * min(2, passes), *[(b, -(-rows * n // block), 1, 0) for b in phases], block=block)


def _phase(node: UOp, number: int, is_last: bool, block: int) -> Loops:
    """Make phase `number`. Phase 0 reads x; every later phase merges runs of 2**(number - 1)."""
    name, options, ((rows, n),) = node.arg
    kept, descending = (n, options[0]) if name == "ARGSORT" else options
    kind = key_type(node.src[0].dtype)
    b = Loops()
    y, x = b.args(node)

    def pair(half: int) -> tuple[int, int]:
        return b.pure("TEMP", kind, 1, (), half * 2), b.pure("TEMP", POSITION, 1, (), half * 2 + 1)

    def element(it: int) -> None:
        at, exists = b.thread(it, block, rows * n)
        row = b.over(at, n)
        begin = b.mul(row, n)
        place = b.minus(at, begin)
        if number == 0:
            key, position = sort_key(b, b.get(x, at), descending), b.cast(POSITION, place)
        else:
            keys, positions = pair((number - 1) % 2)
            key, position = b.get(keys, at), b.get(positions, at)
            place = _merged(b, keys, key, begin, place, n, 1 << (number - 1))
        if is_last:
            b.put(y, b.calc("ADD", b.mul(row, kept), place), b.cast(node.dtype, position), b.both(exists, b.below(place, b.index(kept))))
        else:
            for pointer, value in zip(pair(number % 2), (key, position), strict=True):
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
