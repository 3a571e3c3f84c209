"""SORT, ARGSORT and TOPK by sorting networks (`network.py`), whose lanes are columns of rows.

If there are many rows, a lane has a whole row: as many rows as a vector has lanes are transposed, sorted and transposed back. Otherwise all
lanes belong to one row, which is cut into blocks that are sorted one by one:

    sort each of the columns of a block;   for 2, 4, 8, … lanes:  order them as one sequence
    transpose the block, whose columns follow each other then
    for 2, 4, 8, … blocks:                 merge their halves; vectors are the elements of the network, and its last steps order their lanes

The last block of a row ends with records that come behind all others. A block of a long row is a phase's iteration.
"""
from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple

from svod.compile.lower.library.loops import BOOL, Loops, aligned, cores, program
from svod.compile.lower.library.ordering.network import Columns, held_stages, transposed, transposed_records
from svod.compile.lower.library.ordering.records import Record, Records, record_types
from svod.compile.lower.program import Program
from svod.core.graph.library_kernel import operations
from svod.core.ir.dtype import DType
from svod.core.ir.uop import UOp
from svod.core.machine.levels import CORE_START_CYCLES
from svod.core.machine.target import Target

CHUNK = 64                  # neighbouring vectors that one iteration of a merge of blocks takes
KEPT_BITS = 4               # leading binary digits of the height of a column, which is rounded up to them
STEP_CYCLES = 0.3           # cycles of a network's step for 32 bytes of 32-bit keys, with their share of loads and stores
# A step of 64-bit keys takes so many times the cycles of one of 32-bit keys: with an instruction for a minimum, and where a minimum is a
# comparison and a choice.
LONG_STEP, CHOSEN_STEP = 1.7, 2.7
PAIR_STEP = 4.0             # cycles of a step of records of two parts, over those of one of 32-bit keys
SQUARE_CYCLES = 4.0         # cycles per vector to transpose a square of vectors
BLOCK_CYCLES = 200.0        # cycles that the loops over a block take beside the steps inside them
# Bytes per cycle between a core and the cache that all cores share, and between a core and memory.
CACHE_BYTES, DISTANT_BYTES = 32.0, 12.0


def column_height(n: int) -> int:
    """Return the vectors of columns of n elements."""
    unit = 1 << max(0, (n - 1).bit_length() - KEPT_BITS)
    return -(-n // unit) * unit


# -- cost ---------------------------------------------------------------------------------------------
class SortingWay(NamedTuple):
    """A way to sort rows, and the cycles that it takes."""

    cycles: float
    lower: Callable[[UOp, Target], Program]


def network_ways(node: UOp, target: Target, kept: int, descending: bool) -> list[SortingWay]:
    """Return the networks that sort rows and store the first `kept` results."""
    rows, n = node.arg[2][0]
    types = record_types(node)
    lanes, height, found = target.lanes(types[0]), column_height(n), []
    if lanes < 2:
        return []
    if rows >= lanes and height * len(types) * target.vector_bytes <= target.l2 // 2:
        rounds, start = _rounds(node, -(-rows // lanes), 1, target)
        found.append(SortingWay(start + rounds * height * (_sorting_steps(height) * step_cycles(types, target) + 2 * SQUARE_CYCLES),
                                partial(sort_columns, kept=kept, descending=descending)))
    height = lanes
    while height == lanes or height * lanes < 2 * n:
        blocks = -(-n // (lanes * height))
        if blocks <= 1 << held_stages(target, len(types)):
            rounds, start = _rounds(node, rows * blocks, 1 + 2 * (blocks - 1).bit_length(), target)
            found.append(SortingWay(start + rounds * _block_cycles(height, blocks, types, target),
                                    partial(sort_blocks, kept=kept, descending=descending, height=height)))
        height *= 2
    return found


def _rounds(node: UOp, iterations: int, phases: int, target: Target) -> tuple[int, float]:
    """Return (iterations that a core runs one after the other in each phase, the cycles until other cores have begun)."""
    used = cores(target, operations(node)[0], iterations)
    return -(-iterations // used), CORE_START_CYCLES * phases if used > 1 else 0.0


def step_cycles(types: Sequence[DType], target: Target) -> float:
    """Return the cycles of a step for one vector of records."""
    factor = 1.0 if types[0].bits == 32 else LONG_STEP if "avx512f" in target.features else CHOSEN_STEP
    return STEP_CYCLES * factor * -(-target.vector_bytes // 32) * (PAIR_STEP if len(types) > 1 else 1.0)


def _sorting_steps(height: int) -> int:
    stages = (height - 1).bit_length()
    return stages * (stages + 1) // 2


def _block_cycles(height: int, blocks: int, types: Sequence[DType], target: Target) -> float:
    """Return the cycles to sort a block of a row of `blocks` blocks, and for its part in merging them."""
    crossings, stages, levels = (x.bit_length() - 1 for x in (target.lanes(types[0]), height, 2 * blocks - 1))
    steps = _sorting_steps(height) + sum([stages + 4 * (k + 1) for k in range(crossings)])
    steps += sum([level + stages + crossings for level in range(1, levels + 1)])
    nbytes, held = len(types) * target.vector_bytes, held_stages(target, len(types))
    # passes over a block that does not fit the first cache; one part of the steps of a merge follows in blocks that do
    large = max(0, stages - (target.l1 // 2 // nbytes).bit_length() + 1)
    passes = [-(-k // held) + 1 for k in range(1, large + 1)] + [-(-large // held) + 2] * crossings
    moved = 2 * nbytes * (sum(passes) * _cycles_per_byte(height * nbytes, target) + 2 * levels * _cycles_per_byte(
        blocks * height * nbytes, target))
    squares = SQUARE_CYCLES * len(types) * (1 + 2 * levels)
    return height * (steps * step_cycles(types, target) + squares + moved) + BLOCK_CYCLES


def _cycles_per_byte(nbytes: int, target: Target) -> float:
    """Return the cycles to move a byte of so many that are read and written again and again."""
    return 0.0 if nbytes <= target.l2 else 1 / CACHE_BYTES if nbytes <= target.l3 else 1 / DISTANT_BYTES


# -- many rows ----------------------------------------------------------------------------------------
def sort_columns(node: UOp, target: Target, kept: int, descending: bool) -> Program:
    """Return the Program in which each lane has a row, of which the first `kept` results are stored."""
    rows, n = node.arg[2][0]
    b, height = Loops(), column_height(n)
    records = Records(b, node, target, descending)
    lanes, none = records.lanes, b.index(0)
    memory, nbytes = record_memory(b, records.types, height * lanes)
    columns = Columns(b, memory, none, none, height, target)

    def block(it: int) -> None:
        first = b.least(b.mul(it, lanes), b.index(rows - lanes))      # the last block is moved back
        load_columns(records, b.mul(first, n), n, lambda i, record, k: columns.put(i, record, k))
        b.loop(b.index(n), b.index(height), lambda i: columns.put(i, records.last(lanes)))
        columns.sort()
        begin, width, mask = b.mul(first, kept), *square_width(b, lanes, kept)

        def store(i: int) -> None:
            i = b.least(i, b.index(kept - width))
            square = [records.result(columns.get(i, min(k, width - 1))) for k in range(lanes)]
            for row, part in enumerate(transposed(b, square)):
                records.put(b.calc("ADD", b.plus(begin, row * kept), i), part, mask)
        b.loop(none, b.index(kept), store, step=width)
    b.loop(*b.bounds(), block)
    blocks = -(-rows // lanes)
    return program(node, (), (b, blocks, cores(target, operations(node)[0], blocks), nbytes))


def record_memory(b: Loops, types: Sequence[DType], count: int, offset: int = 0) -> tuple[list[int], int]:
    """Return (pointers to the parts of `count` records in scratch from `offset` on, the end of that memory)."""
    pointers = []
    for t in types:
        pointers.append(b.scratch(t, offset))
        offset += aligned(count * t.itemsize)
    return pointers, offset


def square_width(b: Loops, lanes: int, n: int) -> tuple[int, int | None]:
    """Return (number of columns of a square in rows of n elements, the mask of the lanes that have them)."""
    width = min(lanes, n)
    return width, b.vconst(BOOL, tuple(k < width for k in range(lanes))) if width < lanes else None


def load_columns(records: Records, begin: int, n: int, use: Callable[..., tuple[int, ...] | None], *init: int) -> list[int]:
    """Emit `use(i, record, k, *carried)` for each position i + k of as many rows of n elements as there are lanes, the first of which
    begins at `begin`; returns the last carried values. Squares are loaded and transposed."""
    b, lanes = records.b, records.lanes
    width, mask = square_width(b, lanes, n)

    def square(i: int, carried: tuple[int, ...], positions: range) -> tuple[int, ...]:
        rows = [records.keys(b.calc("ADD", b.plus(begin, row * n), i), lanes, mask) for row in range(lanes)]
        columns = transposed(b, rows)
        for k in positions:
            carried = use(i, records.record(columns[k], b.plus(i, k), 0), k, *carried) or ()
        return carried
    rest = n % width
    found = b.loop(b.index(0), b.index(n - rest), lambda i, *carried: square(i, carried, range(width)), *init, step=width)
    # the last square is moved back, and its first columns are not used again
    return list(square(b.index(n - width), tuple(found), range(width - rest, width))) if rest else found


# -- few rows -----------------------------------------------------------------------------------------
def sort_blocks(node: UOp, target: Target, kept: int, descending: bool, height: int) -> Program:
    """Return the Program in which all lanes have parts of a row, which is cut into blocks of `height` vectors. The first `kept` results of
    a row are stored."""
    row = _RowOfBlocks(node, target, kept, descending, height)
    levels = range(1, (row.blocks - 1).bit_length() + 1)
    phases = [row.sort(), *[phase for level in levels for phase in (row.merge(level), row.finish(level == levels[-1]))]]
    temps = [row.rows * row.blocks * row.length * t.itemsize for t in row.types if row.blocks > 1]
    return program(node, tuple(temps), *phases)


class _RowOfBlocks:
    """The phases that sort rows of several blocks. Temporaries have the sorted blocks of all rows, one for each part of records."""

    def __init__(self, node: UOp, target: Target, kept: int, descending: bool, height: int) -> None:
        self.node, self.target, self.kept, self.descending, self.height = node, target, kept, descending, height
        self.rows, self.n = node.arg[2][0]
        self.types = record_types(node)
        self.lanes = target.lanes(self.types[0])
        self.length = height * self.lanes
        self.blocks = -(-self.n // self.length)

    def _begin(self) -> tuple[Loops, Records, list[int]]:
        """Return the builder of a phase, its records, and pointers to the temporaries."""
        b = Loops()
        temps = [b.pure("TEMP", t, 1, (), i) for i, t in enumerate(self.types)] if self.blocks > 1 else []
        return b, Records(b, self.node, self.target, self.descending), temps

    def sort(self) -> tuple[Loops, int, int, int]:
        """Make the phase that sorts blocks."""
        b, records, temps = self._begin()
        lanes, height, is_one, none = self.lanes, self.height, self.blocks == 1, b.index(0)
        memory, nbytes = record_memory(b, self.types, self.length)
        if is_one:
            temps, nbytes = record_memory(b, self.types, self.length, nbytes)
        columns = Columns(b, memory, none, none, height, self.target)

        def iteration(it: int) -> None:
            self._fill(records, memory, it)
            columns.sort()
            width = 2
            while width <= lanes:
                columns.cross(width)
                width *= 2
            origin = none if is_one else b.mul(it, self.length)

            def square(i: int) -> None:
                for lane, record in enumerate(transposed_records(b, [columns.get(i, k) for k in range(lanes)])):
                    for pointer, v in zip(temps, record, strict=True):
                        b.put(pointer, b.calc("ADD", b.plus(origin, lane * height), i), v)
            b.loop(none, b.index(height), square, step=lanes)
            if is_one:
                self._copy(records, temps, none, it)
        b.loop(*b.bounds(), iteration)
        iterations = self.rows * self.blocks
        return b, iterations, cores(self.target, operations(self.node)[0], iterations), nbytes

    def merge(self, level: int) -> tuple[Loops, int, int, int]:
        """Make the phase that begins to merge the halves of 2**level blocks."""
        b, _, temps = self._begin()
        chunk = min(CHUNK, self.height)
        chunks = self.height // chunk

        def iteration(it: int) -> None:
            first, origin = b.mul(b.mod(it, chunks), chunk), b.mul(b.over(it, chunks), self.blocks * self.length)
            row = Columns(b, temps, origin, b.index(0), self.blocks * self.height, self.target, natural=True)
            row.merge(self.height << level, level, (first, b.plus(first, chunk)))
        b.loop(*b.bounds(), iteration)
        return b, self.rows * chunks, cores(self.target, operations(self.node)[0], self.rows * chunks), 0

    def finish(self, is_last: bool) -> tuple[Loops, int, int, int]:
        """Make the phase that ends a merge in each block."""
        b, records, temps = self._begin()

        def iteration(it: int) -> None:
            origin = b.mul(it, self.length)
            Columns(b, temps, origin, b.index(0), self.height, self.target, natural=True).finish(self.height)
            if is_last:
                self._copy(records, temps, origin, it)
        b.loop(*b.bounds(), iteration)
        return b, self.rows * self.blocks, cores(self.target, operations(self.node)[0], self.rows * self.blocks), 0

    # -- a block: number `it` among those of all rows --------------------------------------------------
    def _place(self, b: Loops, it: int, n: int) -> tuple[int, int, int]:
        """Return (the first position of a block, where it begins in an array with n elements of each row, those of the block)."""
        start = b.mul(b.mod(it, self.blocks), self.length)
        return start, b.calc("ADD", b.mul(b.over(it, self.blocks), n), start), b.least(b.minus(b.index(n), start), b.index(self.length))

    def _fill(self, records: Records, memory: Sequence[int], it: int) -> None:
        """Store the records of a block, and behind the last one those that come behind all others."""
        b = records.b
        start, at, count = self._place(b, it, self.n)
        whole = b.mul(b.over(b.plus(count, self.lanes - 1), self.lanes), self.lanes)

        def put(i: int, record: Record) -> None:
            for pointer, v in zip(memory, record, strict=True):
                b.put(pointer, i, v)
        b.span(b.index(0), count, self.lanes, lambda i, some: put(
            i, records.record(records.keys(b.calc("ADD", at, i), some), b.calc("ADD", start, i), 1)))
        b.loop(count, whole, lambda i: put(i, records.last(1)))
        b.loop(whole, b.index(self.length), lambda i: put(i, records.last(self.lanes)), step=self.lanes)

    def _copy(self, records: Records, memory: Sequence[int], origin: int, it: int) -> None:
        """Store the results of a block's sorted records, which begin at `origin` in memory."""
        b = records.b
        _, at, count = self._place(b, it, self.kept)
        b.span(b.index(0), count, self.lanes, lambda i, some: records.put(
            b.calc("ADD", at, i), b.get(memory[-1], b.calc("ADD", origin, i), some, ordered=True)))
