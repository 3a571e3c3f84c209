"""SCATTER: stores values into a copy of the base, one after another, so that positions may repeat.

    for each row and block of columns:   copy base;   for j:  for k in block:  y[index[j, k], k] = y[index[j, k], k] ∘ value[j, k]

Columns are independent, so rows and blocks of columns are spread over the cores. If a position is that of all columns, the columns of a
block are vectors. If there are fewer blocks than cores and much more values than places, as in a histogram, the values are cut into parts:

    for each part:   table = identities;    for j in part:  table[index[j]] = table[index[j]] ∘ value[j]
    y = base ∘ tables
"""
from __future__ import annotations

from svod.compile.lower.library.loops import BOOL, INDEX, PARALLEL_ELEMENTS, Loops, aligned, cores, program
from svod.compile.lower.program import Program
from svod.core.graph.library_kernel import scattered_shape
from svod.core.ir.combiner import get_combiner
from svod.core.ir.dtype import dtypes
from svod.core.ir.uop import UOp
from svod.core.machine.levels import CACHE_LINE_BYTES
from svod.core.machine.target import SAME, Target

# smallest block of columns in bytes: cores that write neighbouring blocks wait for each other's lines, which costs little if the second
# cache does not keep a row of the base
BLOCK_BYTES = 512
BLOCK_BYTES_PAST_L2 = 2 * CACHE_LINE_BYTES
PARTS_PER_BLOCK = 2         # least number of parts, per block of columns that the cores could share instead
VALUES_PER_PLACE = 4        # least number of values per entry of a table for which values are cut into parts, each with a table
LEAST_SCATTERED_PART = 1 << 12       # minimum number of steps, of one value or one vector, of a part


def lower_scatter(node: UOp, target: Target) -> Program:
    """Return the Program of a SCATTER."""
    scatter = _Scatter(node, target)
    parts = scatter.most_parts
    return scatter.by_parts(parts) if parts >= PARTS_PER_BLOCK * scatter.blocks else scatter.by_blocks()


class _Scatter:
    """One SCATTER for a target: its extents, and how its columns are cut into blocks."""

    def __init__(self, node: UOp, target: Target) -> None:
        (self.reduction,), shapes = node.arg[1:]
        self.node, self.target, self.lanes = node, target, target.lanes(node.dtype)
        self.outer, self.n, self.inner = shapes[0]
        _, self.m, _ = scattered_shape(shapes)
        # elements from one row, position and column to the next; 0 along an axis of which all have the same element
        self.index_strides, self.value_strides = ([0 if n == 1 else s for n, s in zip(shape, (shape[1] * shape[2], shape[2], 1),
                                                                                     strict=True)] for shape in shapes[1:])
        self.is_by_rows = self.index_strides[2] == 0
        self.row_bytes = self.inner * node.dtype.itemsize
        blocks = self.row_bytes // self._least_block_bytes()
        if self.is_by_rows:
            blocks = min(blocks, -(-target.threads // self.outer))
        self.width = min(self.inner, _whole_lines(-(-self.row_bytes // max(1, blocks))) // node.dtype.itemsize)
        self.blocks = -(-self.inner // self.width)

    def _least_block_bytes(self) -> int:
        if self.target.has_groups:
            return CACHE_LINE_BYTES
        return BLOCK_BYTES if self.n * self.row_bytes <= self.target.l2 else BLOCK_BYTES_PAST_L2

    @property
    def most_parts(self) -> int:
        """The number of parts into which the values of a row may be cut: enough for all cores, unless parts become short. Under the policy
        "same" floats are added in the order of their positions."""
        in_order = self.target.numerics == SAME and self.node.dtype.is_float
        if self.reduction == "SET" or self.target.has_groups or in_order:
            return 1
        steps: int = self.m * (-(-self.inner // self.lanes) if self.is_by_rows else self.inner)
        most: int = min(self.target.threads // self.outer, steps // LEAST_SCATTERED_PART, self.m // (VALUES_PER_PLACE * self.n))
        return most

    def by_blocks(self) -> Program:
        """Return the program in which a core stores all values of a block of columns of a row. If there are fewer rows than cores, a large
        base is copied in a phase before."""
        b, n, inner = Loops(), self.n, self.inner
        y = b.args(self.node)[0]
        size = self.outer * n * inner
        copies_before = self.outer < self.target.threads and size >= PARALLEL_ELEMENTS

        def block(it: int) -> None:
            row, first = b.over(it, self.blocks), b.mul(b.mod(it, self.blocks), self.width)
            last = b.least(b.plus(first, self.width), b.index(inner))
            begin = b.mul(row, n * inner)
            if not copies_before and self.blocks == 1:
                self._copy(b, begin, b.plus(begin, n * inner))
            elif not copies_before:
                def line(i: int) -> None:
                    at = b.calc("ADD", begin, b.mul(i, inner))
                    self._copy(b, b.calc("ADD", at, first), b.calc("ADD", at, last))
                b.loop(b.index(0), b.index(n), line)
            self._store(b, y, begin, row, (b.index(0), b.index(self.m)), (first, last))
        b.loop(*b.bounds(), block)
        blocks = self.outer * self.blocks
        stores = b, blocks, cores(self.target, self.outer * (n + self.m) * inner, blocks), 0
        return program(self.node, (), *[self._copies(size)] * copies_before, stores)

    def _copies(self, size: int) -> tuple[Loops, int, int, int]:
        """Make the phase that copies the base."""
        b = Loops()

        def chunk(it: int) -> None:
            begin = b.mul(it, PARALLEL_ELEMENTS)
            self._copy(b, begin, b.least(b.plus(begin, PARALLEL_ELEMENTS), b.index(size)))
        b.loop(*b.bounds(), chunk)
        chunks = -(-size // PARALLEL_ELEMENTS)
        return b, chunks, min(self.target.threads, chunks), 0

    def _copy(self, b: Loops, begin: int, end: int) -> None:
        y, base, *_ = b.args(self.node)
        b.span(begin, end, self.lanes, lambda i, width: b.put(y, i, b.get(base, i, width)))

    def by_parts(self, parts: int) -> Program:
        """Return the program in which a core stores the values of a part of a row into a table of its own."""
        dtype, size, length = self.node.dtype, self.n * self.inner, -(-self.m // parts)
        stride = _whole_lines(size * dtype.itemsize) // dtype.itemsize       # elements from one table to the next
        # 0.0 + -0.0 is 0.0
        identity = -0.0 if self.reduction == "ADD" and dtype.is_float else get_combiner(self.reduction).identity(dtype)[0]
        b = Loops()
        table = b.pure("TEMP", dtype, 1, (), 0)

        def part(it: int) -> None:
            begin = b.mul(it, stride)
            b.span(begin, b.plus(begin, size), self.lanes, lambda i, width: b.put(table, i, b.const(dtype, width, identity)))
            first = b.mul(b.mod(it, parts), length)
            positions = first, b.least(b.plus(first, length), b.index(self.m))
            self._store(b, table, begin, b.over(it, parts), positions, (b.index(0), b.index(self.inner)))
        b.loop(*b.bounds(), part)
        tables = (b, self.outer * parts, min(self.target.threads, self.outer * parts), 0)
        temp = aligned(self.outer * parts * stride * dtype.itemsize)
        return program(self.node, (temp,), tables, self._combined(parts, stride))

    def _combined(self, parts: int, stride: int) -> tuple[Loops, int, int, int]:
        """Make the phase that adds the tables of all parts to the base, in chunks of a row's places."""
        dtype, size = self.node.dtype, self.n * self.inner
        places = _whole_lines(-(-PARALLEL_ELEMENTS // parts) * dtype.itemsize) // dtype.itemsize
        chunks = -(-size // places)
        b = Loops()
        y, base, *_ = b.args(self.node)
        table = b.pure("TEMP", dtype, 1, (), 0)

        def chunk(it: int) -> None:
            row, first = b.over(it, chunks), b.mul(b.mod(it, chunks), places)

            def place(i: int, width: int) -> None:
                at, own = b.calc("ADD", b.mul(row, size), i), b.calc("ADD", b.mul(row, parts * stride), i)
                value = b.get(base, at, width)
                for p in range(parts):
                    value = b.alu(self.reduction, dtype, width, value, b.get(table, b.plus(own, p * stride), width))
                b.put(y, at, value)
            b.span(first, b.least(b.plus(first, places), b.index(size)), self.lanes, place)
        b.loop(*b.bounds(), chunk)
        return b, self.outer * chunks, cores(self.target, self.outer * size * parts, self.outer * chunks), 0

    def _store(self, b: Loops, y: int, begin: int, row: int, positions: tuple[int, int], columns: tuple[int, int]) -> None:
        """Combine values of a range of positions and of columns with the elements of y from `begin` on, which are those of a row."""
        _, _, index, value = b.args(self.node)
        (first, last), dtype = columns, self.node.dtype

        def position(j: int) -> None:
            at_index, at_value = (b.calc("ADD", b.mul(row, o), b.mul(j, m)) for o, m, _ in (self.index_strides, self.value_strides))

            def place(k: int) -> tuple[int, int]:
                """Emit (the first column's element at the position for column k, whether the position is inside of the row)."""
                found = b.cast(INDEX, b.get(index, b.calc("ADD", at_index, b.mul(k, self.index_strides[2]))))
                if b.dtype[index].is_signed:
                    found = b.choose(b.below(found, b.index(0)), b.plus(found, self.n), found)
                # positions outside of the row are ignored; as unsigned numbers, negative ones are large
                inside = b.alu("CMPLT", BOOL, 1, b.cast(dtypes.uint64, found), b.const(dtypes.uint64, 1, self.n))
                return b.calc("ADD", begin, b.mul(found, self.inner)), inside

            def store(k: int, width: int, line: int, inside: int | None) -> None:
                stride = self.value_strides[2]
                new = b.splat(b.get(value, b.calc("ADD", at_value, b.mul(k, stride)), width if stride else 1), width)
                at = b.calc("ADD", line, k)
                if self.reduction != "SET":
                    new = b.alu(self.reduction, dtype, width, b.get(y, at, width, ordered=True, mask=inside), new)
                b.put(y, at, new, inside)
            if self.inner == 1:
                store(b.index(0), 1, *place(b.index(0)))
            elif self.is_by_rows:
                line, inside = place(b.index(0))
                b.span(first, b.choose(inside, last, first), self.lanes, lambda k, width: store(k, width, line, None))
            else:
                b.loop(first, last, lambda k: store(k, 1, *place(k)))
        b.loop(*positions, position)


def _whole_lines(nbytes: int) -> int:
    """Round bytes up to whole cache lines."""
    return -(-nbytes // CACHE_LINE_BYTES) * CACHE_LINE_BYTES
