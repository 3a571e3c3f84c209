"""SORT by sorting networks (`network.py`), whose lanes are columns of rows.

If there are many rows, a lane has a whole row: as many rows as a vector has lanes are transposed, sorted and transposed back. Otherwise all
lanes belong to one row, which is cut into blocks that are sorted one by one:

    sort each of the columns of a block;   for 2, 4, 8, … lanes:  order them as one sequence
    transpose the block, whose columns follow each other then
    for 2, 4, 8, … blocks:                 merge their halves; vectors are the elements of the network, and its last steps order their lanes

The last blocks of a row end with keys that come behind all others. A block of a long row is a phase's iteration.
"""
from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

from svod.compile.lower.library.counting import type_to_compare
from svod.compile.lower.library.keys import element_of, key_type, sort_key
from svod.compile.lower.library.loops import BOOL, Loops, aligned, cores, program
from svod.compile.lower.library.network import Columns, held_stages, transposed
from svod.compile.lower.program import Program
from svod.core.graph.library_kernel import operations
from svod.core.ir.dtype import DType
from svod.core.ir.uop import UOp
from svod.core.machine.target import Target

CHUNK = 64                  # neighbouring vectors that one iteration of a merge of blocks takes
KEPT_BITS = 4               # leading binary digits of the height of a column, which is rounded up to them
STEP_CYCLES = 0.3           # of a step for 32 bytes of 32-bit keys, with their share of loads and stores
LONG_STEP, CHOSEN_STEP = 1.7, 2.7       # times as many for 64-bit keys; where a minimum is a comparison and a choice
SQUARE_CYCLES = 4.0         # of a transposition, for one vector
BLOCK_CYCLES = 200.0        # of the loops of the passes over a block, beside those of their steps
SHARED_BYTES = 16.0         # per cycle, between a core and the cache that all cores share


def column_height(n: int) -> int:
    """Return the vectors of columns of n elements."""
    unit = 1 << max(0, (n - 1).bit_length() - KEPT_BITS)
    return -(-n // unit) * unit


# -- cost ---------------------------------------------------------------------------------------------
class SortingWay(NamedTuple):
    """A way to sort rows, and the cycles that it takes."""

    cycles: float
    lower: Callable[[UOp, Target], Program]


def network_ways(node: UOp, target: Target) -> list[SortingWay]:
    """Return the networks that sort the rows of a SORT."""
    rows, n = node.arg[2][0]
    kind = type_to_compare(key_type(node.dtype))
    lanes, height, found = target.lanes(kind), column_height(n), []
    if lanes < 2:
        return []
    if rows >= lanes and height * target.vector_bytes <= target.l2 // 2:
        rounds = -(-rows // (lanes * target.threads))
        found.append(SortingWay(rounds * height * (_sorting_steps(height) * _step_cycles(kind, target) + 2 * SQUARE_CYCLES), sort_columns))
    height = lanes
    while height == lanes or height * lanes < 2 * n:
        blocks = -(-n // (lanes * height))
        if blocks <= 1 << held_stages(target):
            rounds = -(-rows * blocks // target.threads)
            found.append(SortingWay(rounds * _block_cycles(height, blocks, kind, target), partial(sort_blocks, height=height)))
        height *= 2
    return found


def _step_cycles(kind: DType, target: Target) -> float:
    """Return the cycles of a step for one vector."""
    factor = 1.0 if kind.bits == 32 else LONG_STEP if "avx512f" in target.features else CHOSEN_STEP
    return STEP_CYCLES * factor * -(-target.vector_bytes // 32)


def _sorting_steps(height: int) -> int:
    stages = (height - 1).bit_length()
    return stages * (stages + 1) // 2


def _block_cycles(height: int, blocks: int, kind: DType, target: Target) -> float:
    """Return the cycles to sort a block of a row of `blocks` blocks, and for its part in merging them."""
    lanes, stages = target.lanes(kind), height.bit_length() - 1
    steps = _sorting_steps(height) + sum(stages + 4 * (k + 1) for k in range(lanes.bit_length() - 1))
    squares, passes = 1, 0
    for level in range(1, (blocks - 1).bit_length() + 1):
        steps += level + stages + lanes.bit_length() - 1
        squares += 2
        passes += 2
    if height * target.vector_bytes > target.l2:
        passes += steps // held_stages(target)
    moved = passes * 2 * target.vector_bytes / SHARED_BYTES
    return height * (steps * _step_cycles(kind, target) + squares * SQUARE_CYCLES + moved) + BLOCK_CYCLES


# -- elements -----------------------------------------------------------------------------------------
class KeyedElements:
    """The elements of the operand and of the result of a SORT, as keys of the type that is compared."""

    def __init__(self, b: Loops, node: UOp) -> None:
        self.b, self.dtype, (self.descending,) = b, node.dtype, node.arg[1]
        self.y, self.x = b.args(node)
        self.kind = type_to_compare(key_type(node.dtype))

    def get(self, at: int, lanes: int, mask: int | None = None) -> int:
        b = self.b
        return b.cast(self.kind, sort_key(b, b.get(self.x, at, lanes, mask=mask), self.descending, one_zero=False))

    def put(self, at: int, keys: int, mask: int | None = None) -> None:
        b = self.b
        b.put(self.y, at, element_of(b, b.cast(key_type(self.dtype), keys), self.dtype, self.descending), mask)


# -- many rows ----------------------------------------------------------------------------------------
def sort_columns(node: UOp, target: Target) -> Program:
    """Return the Program in which each lane has a row."""
    rows, n = node.arg[2][0]
    b = Loops()
    elements, height = KeyedElements(b, node), column_height(n)
    lanes = target.lanes(elements.kind)
    memory, none = b.scratch(elements.kind, 0), b.index(0)
    columns = Columns(b, memory, none, none, height, target)
    width = min(lanes, n)
    mask = b.vconst(BOOL, tuple(k < width for k in range(lanes))) if width < lanes else None

    def block(it: int) -> None:
        begin = b.mul(b.least(b.mul(it, lanes), b.index(rows - lanes)), n)      # the last block is moved back

        def at(row: int, i: int) -> int:
            return b.calc("ADD", b.plus(begin, row * n), b.least(i, b.index(n - width)))        # so are its last columns

        def load(i: int) -> None:
            first = b.least(i, b.index(n - width))
            for k, column in enumerate(transposed(b, [elements.get(at(row, i), lanes, mask) for row in range(lanes)])[:width]):
                columns.put(first, column, k)

        def store(i: int) -> None:
            first = b.least(i, b.index(n - width))
            square = [columns.get(first, min(k, width - 1)) for k in range(lanes)]
            for row, values in enumerate(transposed(b, square)):
                elements.put(at(row, i), values, mask)
        b.loop(none, b.index(n), load, step=width)
        b.loop(b.index(n), b.index(height), lambda i: columns.put(i, b.const(elements.kind, lanes, elements.kind.max)))
        columns.sort()
        b.loop(none, b.index(n), store, step=width)
    b.loop(*b.bounds(), block)
    blocks = -(-rows // lanes)
    return program(node, (), (b, blocks, cores(target, operations(node)[0], blocks), aligned(height * target.vector_bytes)))


# -- few rows -----------------------------------------------------------------------------------------
def sort_blocks(node: UOp, target: Target, height: int) -> Program:
    """Return the Program in which all lanes have parts of a row, which is cut into blocks of `height` vectors."""
    row = _RowOfBlocks(node, target, height)
    levels = range(1, (row.blocks - 1).bit_length() + 1)
    phases = [row.sort(), *[phase for level in levels for phase in (row.merge(level), row.finish(level == levels[-1]))]]
    temps = (row.rows * row.blocks * row.length * row.kind.itemsize,) if row.blocks > 1 else ()
    return program(node, temps, *phases)


class _RowOfBlocks:
    """The phases that sort rows of several blocks. A temporary has the sorted blocks of all rows."""

    def __init__(self, node: UOp, target: Target, height: int) -> None:
        self.node, self.target, self.height = node, target, height
        self.rows, self.n = node.arg[2][0]
        self.kind = type_to_compare(key_type(node.dtype))
        self.lanes = target.lanes(self.kind)
        self.length = height * self.lanes
        self.blocks = -(-self.n // self.length)

    def sort(self) -> tuple[Loops, int, int, int]:
        """Make the phase that sorts blocks."""
        b, kind, lanes, height = Loops(), self.kind, self.lanes, self.height
        elements, nbytes, is_one = KeyedElements(b, self.node), aligned(self.length * kind.itemsize), self.blocks == 1
        memory, sorted_keys = b.scratch(kind, 0), b.scratch(kind, nbytes) if is_one else b.pure("TEMP", kind, 1, (), 0)
        none = b.index(0)
        columns = Columns(b, memory, none, none, height, self.target)

        def iteration(it: int) -> None:
            self._fill(elements, memory, it)
            columns.sort()
            width = 2
            while width <= lanes:
                columns.cross(width)
                columns.finish()
                width *= 2
            origin = none if is_one else b.mul(it, self.length)

            def square(i: int) -> None:
                for lane, values in enumerate(transposed(b, [columns.get(i, k) for k in range(lanes)])):
                    b.put(sorted_keys, b.calc("ADD", b.plus(origin, lane * height), i), values)
            b.loop(none, b.index(height), square, step=lanes)
            if is_one:
                self._copy(elements, sorted_keys, none, it)
        b.loop(*b.bounds(), iteration)
        iterations = self.rows * self.blocks
        return b, iterations, cores(self.target, operations(self.node)[0], iterations), nbytes * (1 + is_one)

    def merge(self, level: int) -> tuple[Loops, int, int, int]:
        """Make the phase that begins to merge the halves of 2**level blocks."""
        b = Loops()
        memory, chunk = b.pure("TEMP", self.kind, 1, (), 0), min(CHUNK, self.height)
        chunks = self.height // chunk

        def iteration(it: int) -> None:
            first, origin = b.mul(b.mod(it, chunks), chunk), b.mul(b.over(it, chunks), self.blocks * self.length)
            row = Columns(b, memory, origin, b.index(0), self.blocks * self.height, self.target, natural=True)
            row.merge(self.height << level, level, (first, b.plus(first, chunk)))
        b.loop(*b.bounds(), iteration)
        return b, self.rows * chunks, min(self.target.threads, self.rows * chunks), 0

    def finish(self, is_last: bool) -> tuple[Loops, int, int, int]:
        """Make the phase that ends a merge in each block."""
        b = Loops()
        elements, memory = KeyedElements(b, self.node), b.pure("TEMP", self.kind, 1, (), 0)

        def iteration(it: int) -> None:
            origin = b.mul(it, self.length)
            Columns(b, memory, origin, b.index(0), self.height, self.target, natural=True).finish()
            if is_last:
                self._copy(elements, memory, origin, it)
        b.loop(*b.bounds(), iteration)
        return b, self.rows * self.blocks, min(self.target.threads, self.rows * self.blocks), 0

    # -- a block: number `it` among those of all rows --------------------------------------------------
    def _place(self, b: Loops, it: int) -> tuple[int, int]:
        """Return where the elements of a block begin, and their number."""
        start = b.mul(b.mod(it, self.blocks), self.length)
        at = b.calc("ADD", b.mul(b.over(it, self.blocks), self.n), start)
        return at, b.least(b.minus(b.index(self.n), start), b.index(self.length))

    def _fill(self, elements: KeyedElements, memory: int, it: int) -> None:
        """Store the keys of a block, and behind the last one those that come behind all others."""
        b = elements.b
        at, count = self._place(b, it)
        whole = b.mul(b.over(b.plus(count, self.lanes - 1), self.lanes), self.lanes)

        def fill(i: int, some: int) -> None:
            b.put(memory, i, b.const(self.kind, some, self.kind.max))
        b.span(b.index(0), count, self.lanes, lambda i, some: b.put(memory, i, elements.get(b.calc("ADD", at, i), some)))
        b.loop(count, whole, lambda i: fill(i, 1))
        b.loop(whole, b.index(self.length), lambda i: fill(i, self.lanes), step=self.lanes)

    def _copy(self, elements: KeyedElements, memory: int, origin: int, it: int) -> None:
        """Store the elements of a block's sorted keys, which begin at `origin` in memory, in the result."""
        b = elements.b
        at, count = self._place(b, it)
        b.span(b.index(0), count, self.lanes, lambda i, some: elements.put(
            b.calc("ADD", at, i), b.get(memory, b.calc("ADD", origin, i), some, ordered=True)))
