"""ARGSORT and TOPK: the positions of a row's elements in order.

Elements are first converted to integers that compare like the elements (`sort_key`). ARGSORT is a bottom-up merge sort; keys and positions
alternate between two halves of memory:

    for w in 1, 2, 4, …:  for each pair of sorted runs of w:  for t:  out[t] = the smaller of both heads, the left one if they are equal

TOPK keeps the k best elements so far in a heap whose root is the worst of them; a better element takes the root's place:

    heap = the first k, sorted;   for the others:  if better than the root: put it there and let it sink;   sort the heap

Rows are spread over the cores. Devices with groups use another algorithm (`ranks.py`).
"""
from __future__ import annotations

import math
from collections.abc import Callable

from svod.compile.lower.library.loops import BOOL, Loops, aligned, cores, program
from svod.compile.lower.program import Program
from svod.core.graph.library_kernel import merge_passes
from svod.core.ir.dtype import BY_NAME, DType, dtypes
from svod.core.ir.uop import UOp
from svod.core.machine.target import Target

POSITION = dtypes.int32

Before = Callable[[int, int, int, int], int]     # (key, position, key, position) → whether the first pair precedes the second


def key_type(dtype: DType) -> DType:
    """Return the integer type whose comparison orders elements of a dtype."""
    if dtype.is_int:
        return dtype
    return dtypes.uint8 if dtype.kind == "b" else BY_NAME[f"int{max(32, dtype.bits)}"]


def sort_key(b: Loops, x: int, descending: bool) -> int:
    """Convert elements to integers that compare like them, or in reverse for a descending order.

    The bits of positive floats already do so; for negative ones all bits but the sign are flipped. Both zeros become one key, and all NaNs
    the largest one."""
    kind, lanes = key_type(b.dtype[x]), b.num_lanes[x]
    if b.dtype[x].is_float:
        wide = BY_NAME[f"float{kind.bits}"]
        x = b.cast(wide, x)
        nan = b.alu("CMPNE", BOOL, lanes, x, x)
        bits = b.bitcast(kind, x)
        zero = b.const(kind, lanes, 0)
        bits = b.alu("WHERE", kind, lanes, b.alu("CMPEQ", BOOL, lanes, bits, b.const(kind, lanes, kind.min)), zero, bits)
        magnitude = b.alu("XOR", kind, lanes, bits, b.const(kind, lanes, kind.max))
        negative = b.alu("CMPLT", BOOL, lanes, bits, zero)
        key = b.alu("WHERE", kind, lanes, nan, b.const(kind, lanes, kind.max), b.alu("WHERE", kind, lanes, negative, magnitude, bits))
    else:
        key = b.cast(kind, x)
    return b.alu("NOT", kind, lanes, key) if descending else key


class _SortedRow:
    """Memory for the keys and positions of one row: two halves of `n` elements each, and one more element that may be read past the end.
    It is scratch memory of the core that sorts. If there are fewer rows than cores it consists of temporaries, because scratch would be
    allocated for every core."""

    def __init__(self, b: Loops, kind: DType, rows: int, n: int, target: Target):
        self.b, self.n = b, n
        self.room = 2 * n + 1
        sizes = [aligned(self.room * d.itemsize) for d in (kind, POSITION)]
        self.temps = () if rows >= target.threads else tuple(rows * s for s in sizes)
        self.nbytes = 0 if self.temps else sum(sizes)
        if self.temps:
            self.keys, self.positions = (b.pure("TEMP", d, 1, (), i) for i, d in enumerate((kind, POSITION)))
        else:
            self.keys, self.positions = b.scratch(kind, 0), b.scratch(POSITION, sizes[0])
        self.origin = b.index(0)

    def begin(self, row: int) -> None:
        """Select the row whose memory the following code uses."""
        self.origin = self.b.mul(row, self.room) if self.temps else self.b.index(0)

    def at(self, i: int) -> int:
        return self.b.calc("ADD", self.origin, i)

    def get(self, i: int) -> tuple[int, int]:
        at = self.at(i)
        return self.b.get(self.keys, at, ordered=True), self.b.get(self.positions, at, ordered=True)

    def put(self, i: int, key: int, position: int, mask: int | None = None) -> None:
        at = self.at(i)
        self.b.put(self.keys, at, key, mask)
        self.b.put(self.positions, at, position, mask)

    def position(self, i: int, lanes: int = 1) -> int:
        return self.b.get(self.positions, self.at(i), lanes, ordered=True)

    def fill(self, x: int, row: int, descending: bool, lanes: int) -> None:
        """Store keys and positions of the n elements that begin at `row` in x."""
        b = self.b

        def element(i: int, width: int) -> None:
            position = b.splat(b.cast(POSITION, i), width)
            if width > 1:
                position = b.alu("ADD", POSITION, width, position, b.vconst(POSITION, tuple(range(width))))
            self.put(i, sort_key(b, b.get(x, b.calc("ADD", row, i), width), descending), position)
        b.span(b.index(0), b.index(self.n), lanes, element)

    def sort(self, before: Before) -> int:
        """Sort the first half; returns the offset of the result, 0 or n."""
        b, n = self.b, self.n
        passes = merge_passes(n)

        def one_pass(_: int, width: int, source: int) -> tuple[int, ...]:
            target = b.minus(b.index(n), source)
            double = b.mul(width, 2)
            runs = b.calc("IDIV", b.calc("ADD", b.plus(double, -1), b.index(n)), double)

            def merge(run: int) -> None:
                start = b.calc("MUL", run, double)
                middle = b.least(b.calc("ADD", start, width), b.index(n))
                end = b.least(b.calc("ADD", start, double), b.index(n))

                def step(t: int, i: int, j: int) -> tuple[int, ...]:
                    left, right = self.get(b.calc("ADD", source, i)), self.get(b.calc("ADD", source, j))
                    take_right = b.both(b.below(j, end), b.either(b.no(b.below(i, middle)), before(*right, *left)))
                    chosen = [b.choose(take_right, r, v) for v, r in zip(left, right, strict=True)]
                    self.put(b.calc("ADD", target, t), chosen[0], chosen[1])
                    return b.choose(take_right, i, b.plus(i, 1)), b.choose(take_right, b.plus(j, 1), j)
                b.loop(start, end, step, start, middle)
            b.loop(b.index(0), runs, merge)
            return double, target
        b.loop(b.index(0), b.index(passes), one_pass, b.index(1), b.index(0))
        return n if passes % 2 else 0


def lower_argsort(node: UOp, target: Target) -> Program:
    """Return the Program of an ARGSORT."""
    (descending,), ((rows, n),) = node.arg[1:]
    b = Loops()
    y, x = b.args(node)
    kind = key_type(node.src[0].dtype)
    area = _SortedRow(b, kind, rows, n, target)
    lanes = target.lanes(kind)

    def row(it: int) -> None:
        begin = b.mul(it, n)
        area.begin(it)
        area.fill(x, begin, descending, lanes)
        half = area.sort(lambda key, _p, other, _q: b.alu("CMPLT", BOOL, 1, key, other))

        def write(i: int, width: int) -> None:
            position = area.position(b.plus(i, half), width)
            b.put(y, b.calc("ADD", begin, i), b.cast(node.dtype, position))
        b.span(b.index(0), b.index(n), lanes, write)
    b.loop(*b.bounds(), row)
    return program(node, area.temps, (b, rows, cores(target, rows * n, rows), area.nbytes))


def lower_topk(node: UOp, target: Target) -> Program:
    """Return the Program of a TOPK."""
    (k, largest), ((rows, n),) = node.arg[1:]
    b = Loops()
    y, x = b.args(node)
    kind = key_type(node.src[0].dtype)
    heap = _SortedRow(b, kind, rows, k, target)
    depth = int(math.log2(k))

    # The element with the largest key is the best one. The root of the heap is the worst element in it.
    def worse(key: int, position: int, other: int, place: int) -> int:
        later = b.alu("CMPLT", BOOL, 1, place, position)
        return b.either(b.alu("CMPLT", BOOL, 1, key, other), b.both(b.alu("CMPEQ", BOOL, 1, key, other), later))

    def row(it: int) -> None:
        begin = b.mul(it, n)
        heap.begin(it)
        heap.fill(x, begin, not largest, target.lanes(kind))
        half = heap.sort(worse)
        if half:
            b.loop(b.index(0), b.index(k), lambda i: heap.put(i, *heap.get(b.plus(i, k))))

        def offer(i: int) -> None:
            key, position = sort_key(b, b.get(x, b.calc("ADD", begin, i)), not largest), b.cast(POSITION, i)
            root, _ = heap.get(b.index(0))
            better = b.alu("CMPLT", BOOL, 1, root, key)

            def sink(_: int, at: int) -> tuple[int, ...]:
                left = b.plus(b.mul(at, 2), 1)
                right = b.plus(left, 1)
                one, other = heap.get(b.least(left, b.index(k - 1))), heap.get(b.least(right, b.index(k - 1)))
                is_right = b.both(b.below(right, b.index(k)), worse(*other, *one))
                child, child_position = (b.choose(is_right, q, p) for p, q in zip(one, other, strict=True))
                sinks = b.both(b.below(left, b.index(k)), worse(child, child_position, key, position))
                heap.put(at, b.choose(sinks, child, key), b.choose(sinks, child_position, position))
                return (b.choose(sinks, b.choose(is_right, right, left), at),)
            last, = b.loop(b.index(0), b.choose(better, b.index(depth), b.index(0)), sink, b.index(0))
            heap.put(last, key, position, better)
        b.loop(b.index(k), b.index(n), offer)
        half = heap.sort(worse)

        def write(i: int) -> None:
            position = heap.position(b.minus(b.index(k - 1 + half), i))
            b.put(y, b.calc("ADD", b.mul(it, k), i), b.cast(node.dtype, position))
        b.loop(b.index(0), b.index(k), write)
    b.loop(*b.bounds(), row)
    return program(node, heap.temps, (b, rows, cores(target, rows * n, rows), heap.nbytes))
