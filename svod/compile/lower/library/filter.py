"""FILTER: rows filtered by blocks, two at a time: the real and the imaginary parts of the numbers that are transformed.

    for each row, each pair of its blocks:
      scratch = both blocks, zeros beyond the ends of the row
      passes of the transform; the last one multiplies what it writes by the factors of the row's channel
      passes of the inverse transform
      the first positions of both blocks → the result

All but the reading of the row and the writing of the result stays in scratch memory, which the second cache holds.
"""
from __future__ import annotations

from functools import partial

from svod.compile.lower.library.fourier import ComplexParts, RowTransform, scratch_areas, vectors_of_row
from svod.compile.lower.library.loops import Loops, cores, program
from svod.compile.lower.program import Program
from svod.compile.lower.transpose import MIN_LANES, transpose_squares
from svod.core.graph.library_kernel import operations
from svod.core.ir.uop import UOp
from svod.core.machine.target import Target
from svod.errors import UnsupportedError


class _Filter:
    """A FILTER: its operands, sizes and scratch memory, and the steps of one pair of blocks."""

    def __init__(self, b: Loops, node: UOp, target: Target) -> None:
        _, (self.before, self.step, self.results), ((self.outer, self.channels, self.size), *_, (_, self.n)) = node.arg
        self.b, self.lanes, self.dtype = b, target.lanes(node.dtype), node.dtype
        self.y, self.x, roots, back, *factors = b.args(node)
        self.transforms = [RowTransform(b, node.dtype, self.n, self.lanes, *given) for given in ((roots, False), (back, True))]
        self.factors = ComplexParts(*factors)
        self.areas, self.nbytes = scratch_areas(b, node.dtype, self.n)
        self.pairs = -(-self.results // (2 * self.step))

    @property
    def iterations(self) -> int:
        return int(self.outer * self.channels * self.pairs)

    def filter(self, it: int) -> None:
        b = self.b
        row, first = b.over(it, self.pairs), b.mul(b.mod(it, self.pairs), 2 * self.step)
        channel = b.mul(b.mod(row, self.channels), self.n)
        for part, area in enumerate(self.areas[0]):
            self.read(row, b.plus(first, part * self.step - self.before), area)
        count = 0
        for transform in self.transforms:
            for one in transform.passes:
                multiplies = not transform.inverse and one is transform.passes[-1]
                vectors_of_row(b, transform, one, partial(self.load, self.areas[count % 2]),
                               partial(self.keep, self.areas[(count + 1) % 2], channel if multiplies else None))
                count += 1
        for part, area in enumerate(self.areas[count % 2]):
            self.write(row, b.plus(first, part * self.step), area)

    def read(self, row: int, begin: int, area: int) -> None:
        """Copy a block that begins at position `begin` of a row, with zeros before and behind the row."""
        b = self.b
        left = b.calc("MAX", b.least(b.minus(b.index(0), begin), b.index(self.n)), b.index(0))
        right = b.calc("MAX", b.least(b.minus(b.index(self.size), begin), b.index(self.n)), left)
        start = b.calc("ADD", b.mul(row, self.size), begin)

        def zeros(i: int, lanes: int) -> None:
            b.put(area, i, b.const(self.dtype, lanes, 0))

        def numbers(i: int, lanes: int) -> None:
            b.put(area, i, b.get(self.x, b.calc("ADD", start, i), lanes))
        b.span(b.index(0), left, self.lanes, zeros)
        b.span(left, right, self.lanes, numbers)
        b.span(right, b.index(self.n), self.lanes, zeros)

    def load(self, area: ComplexParts, at: int, offset: int, lanes: int) -> ComplexParts:
        return ComplexParts(*[self.b.get(pointer, at, lanes, offset, ordered=True) for pointer in area])

    def keep(self, area: ComplexParts, channel: int | None, to: int, offset: int, value: ComplexParts, lanes: int, step: int) -> None:
        """Store numbers that are `step` apart; `channel`: where the factors begin by which they are multiplied before."""
        b, transform = self.b, self.transforms[0]
        if channel is not None:
            at = b.calc("ADD", channel, to)
            factors = [transform.strided_load(pointer, at, offset, lanes, step) for pointer in self.factors]
            value = transform.product(value, ComplexParts(*factors), lanes)
        for pointer, v in zip(area, value, strict=True):
            transform.strided(pointer, to, offset, v, lanes, step)

    def write(self, row: int, begin: int, area: int) -> None:
        """Copy the first positions of a block to position `begin` of a row of results, as far as the row goes."""
        b = self.b
        count = b.calc("MAX", b.least(b.minus(b.index(self.results), begin), b.index(self.step)), b.index(0))
        start = b.calc("ADD", b.mul(row, self.results), begin)

        def numbers(i: int, lanes: int) -> None:
            b.put(self.y, b.calc("ADD", start, i), b.get(area, i, lanes, ordered=True))
        b.span(b.index(0), count, self.lanes, numbers)


def lower_filter(node: UOp, target: Target) -> Program:
    """Return the Program of a FILTER on a CPU."""
    b = Loops()
    f = _Filter(b, node, target)
    b.loop(*b.bounds(), f.filter)
    made = program(node, (), (b, f.iterations, cores(target, operations(node)[0], f.iterations), f.nbytes))
    return Program(made.spec, tuple([tuple(transpose_squares(list(code), target.has_mask_registers, MIN_LANES)) for code in made.code]))


def refuse_filter(node: UOp, target: Target) -> Program:
    """Raise UnsupportedError: a device with groups of threads has no FILTER."""
    raise UnsupportedError(f"FILTER on {target.device}: it is for CPUs, whose caches hold a block")
