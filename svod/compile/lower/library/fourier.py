"""FOURIER, TURNED_FOURIER: transforms along one axis by mixed radices, in the order of Stockham: results come out in place.

With n = r·m·s, a pass makes transforms of r numbers that are m·s apart, and turns the results:

    y[q + s·(r·p + k)] = w^(s·p·k) · Σ j of x[q + s·(p + m·j)] · w^(n/r·j·k)        q < s, p < m, k < r;  w = exp(∓2πi/n)

s is 1 in the first pass, and grows by the radix with each. The first pass reads the argument, where the real and imaginary parts alternate,
and the last writes the result; between them the numbers lie in scratch memory, real and imaginary parts apart.

    rows (inner 1)      vectors along p in the first pass, whose results are transposed in registers; then along q
    columns             vectors along the inner axis: a block of columns has each element in a vector

A transform of r numbers is straight-line code: of 2 and 4 by sums, of a prime by pairs of terms, of a product by both factors (Cooley and
Tukey, 1965). On a device with groups each pass is a phase, and a thread computes one p and q.

TURNED_FOURIER is the second step of a transform whose first one is along the columns of a matrix: it multiplies the rows by factors,
transforms them, and writes the results side by side, which is their order in the whole.
"""
from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

from svod.compile.lower.library.loops import GROUP, Loops, aligned, cores, program
from svod.compile.lower.program import Program
from svod.compile.lower.transpose import MIN_LANES, transpose_squares
from svod.core.graph.library_kernel import fourier_passes, operations
from svod.core.ir.dtype import DType
from svod.core.ir.uop import UOp
from svod.core.machine.target import Target


class ComplexParts(NamedTuple):
    """The real and the imaginary part of a complex number, as values of the builder."""

    real: int
    imag: int


class _Arithmetic:
    """ComplexParts arithmetic in vectors. `sign`: of the exponent of the roots, -1 or, for an inverse transform, 1."""

    def __init__(self, b: Loops, dtype: DType, lanes: int, sign: int) -> None:
        self.b, self.dtype, self.lanes, self.sign = b, dtype, lanes, sign

    def _op(self, op: str, *args: int) -> int:
        return self.b.alu(op, self.dtype, self.lanes, *args)

    def add(self, x: ComplexParts, y: ComplexParts) -> ComplexParts:
        return ComplexParts(self._op("ADD", x.real, y.real), self._op("ADD", x.imag, y.imag))

    def sub(self, x: ComplexParts, y: ComplexParts) -> ComplexParts:
        return ComplexParts(self._op("SUB", x.real, y.real), self._op("SUB", x.imag, y.imag))

    def times(self, x: ComplexParts, factor: float) -> ComplexParts:
        c = self.b.const(self.dtype, self.lanes, factor)
        return ComplexParts(self._op("MUL", x.real, c), self._op("MUL", x.imag, c))

    def plus_times(self, x: ComplexParts, y: ComplexParts, factor: float) -> ComplexParts:
        """x + factor·y."""
        c = self.b.const(self.dtype, self.lanes, factor)
        return ComplexParts(self._op("MULACC", y.real, c, x.real), self._op("MULACC", y.imag, c, x.imag))

    def turned(self, x: ComplexParts) -> ComplexParts:
        """x times the fourth root of unity, sign·i."""
        back = self._op("NEG", x.imag if self.sign > 0 else x.real)
        return ComplexParts(back, x.real) if self.sign > 0 else ComplexParts(x.imag, back)

    def product(self, x: ComplexParts, y: ComplexParts) -> ComplexParts:
        """x·y, where y may be the same in all lanes."""
        b = self.b
        real, imag = (b.splat(v, self.lanes) for v in y)
        low = self._op("NEG", self._op("MUL", x.imag, imag))
        return ComplexParts(self._op("MULACC", x.real, real, low), self._op("MULACC", x.real, imag, self._op("MUL", x.imag, real)))

    def rotated(self, x: ComplexParts, j: int, n: int) -> ComplexParts:
        """x times exp(sign·2πi·j/n), a constant."""
        j %= n
        if 8 * j % n == 0:      # a multiple of an eighth of a turn
            for _ in range(8 * j // n // 2):
                x = self.turned(x)
            if 8 * j // n % 2:
                y = self.turned(x)
                return self.times(self.add(x, y), math.sqrt(0.5))
            return x
        c, s = (self.b.const(self.dtype, self.lanes, f(2 * math.pi * j / n)) for f in (math.cos, lambda a: self.sign * math.sin(a)))
        return self.product(x, ComplexParts(c, s))

    def transform(self, x: Sequence[ComplexParts]) -> list[ComplexParts]:
        """The transform of a few numbers, as straight-line code."""
        n = len(x)
        if n == 1:
            return list(x)
        if n == 2:
            return [self.add(*x), self.sub(*x)]
        if n == 4:
            even, odd = self.transform([x[0], x[2]]), self.transform([x[1], x[3]])
            turned = self.turned(odd[1])
            return [self.add(even[0], odd[0]), self.add(even[1], turned), self.sub(even[0], odd[0]), self.sub(even[1], turned)]
        a = next((f for f in (4, 2, 3) if n % f == 0), next((f for f in range(5, math.isqrt(n) + 1, 2) if n % f == 0), n))
        return self._prime(x) if a == n else self._product_of(x, a, n // a)

    def _prime(self, x: Sequence[ComplexParts]) -> list[ComplexParts]:
        """A transform of an odd prime number of numbers: terms j and n - j have equal cosines and opposite sines."""
        n, half = len(x), range(1, len(x) // 2 + 1)
        sums, apart = ([f(x[j], x[n - j]) for j in half] for f in (self.add, self.sub))
        total = x[0]
        for s in sums:
            total = self.add(total, s)
        out = [total] * n
        for k in half:
            angle = [2 * math.pi * (j * k % n) / n for j in half]
            even, odd = x[0], self.times(apart[0], math.sin(angle[0]))
            for j, (s, d) in enumerate(zip(sums, apart, strict=True)):
                even = self.plus_times(even, s, math.cos(angle[j]))
                odd = self.plus_times(odd, d, math.sin(angle[j])) if j else odd
            odd = self.turned(odd)
            out[k], out[n - k] = self.add(even, odd), self.sub(even, odd)
        return out

    def _product_of(self, x: Sequence[ComplexParts], a: int, b: int) -> list[ComplexParts]:
        """A transform of a·b numbers: transforms of a numbers that are b apart, turned, and transforms of b numbers."""
        first = [self.transform(x[j::b]) for j in range(b)]
        out: list[ComplexParts] = [x[0]] * (a * b)
        for k in range(a):
            out[k::a] = self.transform([self.rotated(first[j][k], j * k, a * b) for j in range(b)])
        return out


class _Radix(NamedTuple):
    """One pass over n = radix·m·s numbers. `table`: where its roots begin in the table: for each k from 1 on, those of all p."""

    radix: int
    m: int
    s: int
    table: int


Read = Callable[[int, int], ComplexParts]            # (a place, a constant to add) → the numbers from there on
Write = Callable[[int, int, ComplexParts], None]


def _passes(n: int) -> list[_Radix]:
    passes, s, table = list[_Radix](), 1, 0
    for r in fourier_passes(n):
        m = n // s // r
        passes.append(_Radix(r, m, s, table))
        s, table = s * r, table + (r - 1) * m * (m > 1)
    return passes


class RowTransform:
    """The passes over n numbers, and their code for one p and q. `roots`: the pointer to the table; `width`: lanes of a vector."""

    def __init__(self, b: Loops, dtype: DType, n: int, width: int, roots: int, inverse: bool) -> None:
        self.b, self.dtype, self.n, self.width, self.roots, self.inverse = b, dtype, n, width, roots, inverse
        self.passes = _passes(n)
        last = self.passes[-1]
        self.num_roots = last.table + (last.radix - 1) * last.m * (last.m > 1)

    def strided_load(self, pointer: int, at: int, offset: int, lanes: int, step: int) -> int:
        """Load numbers that are `step` apart."""
        if step == 1 or lanes == 1:
            return self.b.get(pointer, at, lanes, offset)
        return self.b.load("LOADS", self.dtype, lanes, (pointer, at), (offset, step))

    def strided(self, pointer: int, at: int, offset: int, value: int, lanes: int, step: int, exists: int | None = None) -> None:
        """Store numbers `step` apart."""
        if step == 1 or lanes == 1:
            self.b.put(pointer, at, value, exists, offset)
        else:
            self.b.store("STORES", self.dtype, lanes, (pointer, at, value), (offset, step))

    def product(self, x: ComplexParts, y: ComplexParts, lanes: int) -> ComplexParts:
        return _Arithmetic(self.b, self.dtype, lanes, 1).product(x, y)

    def emit(self, one: _Radix, lanes: int, p: int, q: int, read: Read, write: Write, along_p: bool = False) -> None:
        """Write the transforms of p and q, in `lanes` lanes. `read`, `write`: of numbers of the source and of the target, from their place
        on; `along_p`: lanes are neighbouring p."""
        arithmetic = _Arithmetic(self.b, self.dtype, lanes, 1 if self.inverse else -1)
        at, to = self.b.calc("ADD", q, self.b.mul(p, one.s)), self.b.calc("ADD", q, self.b.mul(p, one.s * one.radix))
        found = arithmetic.transform([read(at, j * one.m * one.s) for j in range(one.radix)])
        for k, value in enumerate(found):
            if k and one.m > 1:
                value = arithmetic.product(value, self._root(one, k, p, lanes if along_p else 1))
            write(to, k * one.s, value)

    def _root(self, one: _Radix, k: int, p: int, lanes: int) -> ComplexParts:
        """The roots by which results k of p, or of `lanes` neighbouring p, are turned."""
        at = one.table + (k - 1) * one.m
        return ComplexParts(*[self.b.get(self.roots, p, lanes, part * self.num_roots + at) for part in (0, 1)])


class _Transform(RowTransform):
    """The operands and passes of a node."""

    def __init__(self, b: Loops, node: UOp, target: Target) -> None:
        name, (inverse, *pairs, self.pairs_out), shapes = node.arg
        self.is_turned, self.pairs_in = name == "TURNED_FOURIER", pairs == [True]
        self.outer, n, self.inner = shapes[0][:3]
        if self.is_turned:
            self.inner, n = n, self.inner
            self.y, *self.x, roots, real, imag = b.args(node)
            self.factors = ComplexParts(real, imag)
        else:
            self.y, *self.x, roots = b.args(node)
        super().__init__(b, node.dtype, n, target.lanes(node.dtype), roots, inverse)

    def load_turned(self, row: int, column: int, at: int, offset: int, lanes: int) -> ComplexParts:
        """Load the products of numbers and factors: number `at` + `offset` of a column, and of further columns."""
        own, first = self.b.mul(column, self.n), self.b.mul(row, self.n * self.inner)
        x, factor = (ComplexParts(*[self.strided_load(p, self.b.calc("ADD", start, at), offset, lanes, self.n) for p in pointers])
                     for pointers, start in ((self.x, self.b.calc("ADD", first, own)), (self.factors, own)))
        return self.product(x, factor, lanes)

    def load(self, at: int, offset: int, lanes: int, step: int) -> ComplexParts:
        """Load numbers of the argument: `at` + `offset`, and further ones `step` apart."""
        if self.pairs_in:
            where = self.b.mul(at, 2)
            return ComplexParts(*[self.strided_load(self.x[0], where, 2 * offset + part, lanes, 2 * step) for part in (0, 1)])
        return ComplexParts(*[self.strided_load(x, at, offset, lanes, step) for x in self.x])

    def keep(self, at: int, offset: int, value: ComplexParts, lanes: int, step: int, exists: int | None = None) -> None:
        """Store numbers of the result: `at` + `offset`, and further ones `step` apart."""
        size = self.outer * self.n * self.inner
        for part, v in enumerate(value):
            if self.pairs_out:
                self.strided(self.y, self.b.mul(at, 2), 2 * offset + part, v, lanes, 2 * step, exists)
            else:
                self.strided(self.y, at, part * size + offset, v, lanes, step, exists)


def lower_fourier(node: UOp, target: Target) -> Program:
    """Return the Program of a FOURIER on a CPU."""
    b = Loops()
    t = _Transform(b, node, target)
    iterations, nbytes = _rows(b, t) if t.inner == 1 and not t.is_turned else _columns(b, t)
    made = program(node, (), (b, iterations, cores(target, operations(node)[0], iterations), nbytes))
    return Program(made.spec, tuple([tuple(transpose_squares(list(code), target.has_mask_registers, MIN_LANES)) for code in made.code]))


def scratch_areas(b: Loops, dtype: DType, numbers: int) -> tuple[list[ComplexParts], int]:
    """Two areas of scratch memory for so many numbers each, and the bytes of both."""
    size = aligned(numbers * dtype.itemsize)
    return [ComplexParts(*[b.scratch(dtype, (2 * i + part) * size) for part in (0, 1)]) for i in (0, 1)], 4 * size


def _rows(b: Loops, t: _Transform) -> tuple[int, int]:
    """Write the transforms of rows; returns (iterations, bytes of scratch)."""
    areas, nbytes = scratch_areas(b, t.dtype, t.n)

    def row(it: int) -> None:
        start = b.mul(it, t.n)
        for number, one in enumerate(t.passes):
            _pass_of_row(b, t, one, start if number == 0 else -1, start if number == len(t.passes) - 1 else -1, areas[number % 2],
                         areas[(number + 1) % 2])
    b.loop(*b.bounds(), row)
    return t.outer, nbytes


def _pass_of_row(b: Loops, t: _Transform, one: _Radix, start: int, end: int, source: ComplexParts, target: ComplexParts) -> None:
    """Write a pass over a row. `start`, `end`: where the row begins in the argument and in the result, for the first and the last pass."""
    def read(at: int, offset: int, lanes: int) -> ComplexParts:
        if start >= 0:
            return t.load(b.calc("ADD", start, at), offset, lanes, 1)
        return ComplexParts(*[b.get(pointer, at, lanes, offset, ordered=True) for pointer in source])

    def write(to: int, offset: int, value: ComplexParts, lanes: int, step: int) -> None:
        if end >= 0:
            t.keep(b.calc("ADD", end, to), offset, value, lanes, step)
        else:
            for pointer, v in zip(target, value, strict=True):
                t.strided(pointer, to, offset, v, lanes, step)
    vectors_of_row(b, t, one, read, write)


def vectors_of_row(b: Loops, t: RowTransform, one: _Radix, read: Callable[[int, int, int], ComplexParts],
                   write: Callable[[int, int, ComplexParts, int, int], None]) -> None:
    """Write the loops of a pass over a row. `read(at, constant, lanes)`; `write(to, constant, numbers, lanes, their distance)`."""
    along_p = one.s == 1
    along = one.m if along_p else one.s
    lanes, step = min(t.width, 1 << (along.bit_length() - 1)), one.radix if along_p else 1

    def vectors(other: int) -> None:
        def vector(i: int) -> None:
            # the last vector begins early enough to end with the row, and computes some numbers twice
            at = b.least(i, b.index(along - lanes)) if along % lanes else i
            t.emit(one, lanes, *((at, other) if along_p else (other, at)), lambda at, offset: read(at, offset, lanes),
                   lambda to, offset, value: write(to, offset, value, lanes, step), along_p)
        b.loop(b.index(0), b.index(along), vector, step=lanes)
    b.loop(b.index(0), b.index(1 if along_p else one.m), vectors)


def _columns(b: Loops, t: _Transform) -> tuple[int, int]:
    """Write the transforms of columns, a vector of columns at a time; returns (iterations, bytes of scratch)."""
    lanes = min(t.width, 1 << (t.inner.bit_length() - 1))
    blocks = -(-t.inner // lanes)
    areas, nbytes = scratch_areas(b, t.dtype, t.n * lanes)

    def columns(it: int) -> None:
        first = b.least(b.mul(b.mod(it, blocks), lanes), b.index(t.inner - lanes))
        row = b.over(it, blocks)
        start = b.calc("ADD", b.mul(row, t.n * t.inner), first)
        if t.is_turned:
            _turn_columns(b, t, lanes, row, first, areas[0])
        for number, one in enumerate(t.passes):
            _pass_of_columns(b, t, one, lanes, start if number == 0 and not t.is_turned else -1,
                             start if number == len(t.passes) - 1 else -1, areas[number % 2], areas[(number + 1) % 2])
    b.loop(*b.bounds(), columns)
    return t.outer * blocks, nbytes


def _turn_columns(b: Loops, t: _Transform, lanes: int, row: int, first: int, target: ComplexParts) -> None:
    """Write the copy of a block of columns, which lie one after the other in the arguments, to scratch memory, where they lie side by
    side. Squares are transposed in registers; the last one begins early enough to end with the columns."""
    square = min(lanes, t.n)

    def numbers(i: int) -> None:
        at = b.least(i, b.index(t.n - square)) if t.n % square else i
        for k in range(square):
            for pointer, v in zip(target, t.load_turned(row, first, at, k, lanes), strict=True):
                b.put(pointer, b.mul(at, lanes), v, offset=k * lanes)
    b.loop(b.index(0), b.index(t.n), numbers, step=square)


def _pass_of_columns(b: Loops, t: _Transform, one: _Radix, lanes: int, start: int, end: int, source: ComplexParts,
                     target: ComplexParts) -> None:
    """Write a pass over a block of columns. `start`, `end`: as in `_pass_of_row`."""
    def read(at: int, offset: int) -> ComplexParts:
        if start >= 0:
            return t.load(b.calc("ADD", start, b.mul(at, t.inner)), offset * t.inner, lanes, 1)
        return ComplexParts(*[b.get(pointer, b.mul(at, lanes), lanes, offset * lanes, ordered=True) for pointer in source])

    def write(to: int, offset: int, value: ComplexParts) -> None:
        if end >= 0:
            t.keep(b.calc("ADD", end, b.mul(to, t.inner)), offset * t.inner, value, lanes, 1)
        else:
            for pointer, v in zip(target, value, strict=True):
                b.put(pointer, b.mul(to, lanes), v, offset=offset * lanes)

    def positions(p: int) -> None:
        b.loop(b.index(0), b.index(one.s), lambda q: t.emit(one, lanes, p, q, read, write))
    b.loop(b.index(0), b.index(one.m), positions)


def lower_fourier_by_passes(node: UOp, target: Target) -> Program:
    """Return the Program of a FOURIER for a target with groups: a phase for each pass, a thread for each p and q of a column."""
    block, phases = min(GROUP, target.group_threads), []
    t = _Transform(Loops(), node, target)
    numbers, last = t.outer * t.n * t.inner, len(t.passes) - 1
    for number, one in enumerate(t.passes):
        b = Loops()
        threads = numbers // one.radix
        _pass_of_threads(b, _Transform(b, node, target), one, block, threads, number == 0, number == last, number % 2)
        phases.append((b, -(-threads // block), 1, 0))
    return program(node, (aligned(numbers * node.dtype.itemsize),) * (2 * min(2, last)), *phases, block=block)


def _pass_of_threads(b: Loops, t: _Transform, one: _Radix, block: int, threads: int, is_first: bool, is_last: bool, half: int) -> None:
    """Write a pass in which a thread computes one p and q of a column. `half`: which of the two temporaries it writes."""
    def area(i: int) -> ComplexParts:
        return ComplexParts(*[b.pure("TEMP", t.dtype, 1, (), 2 * i + part) for part in (0, 1)])

    def thread(it: int) -> None:
        at, exists = b.thread(it, block, threads)
        column, rest = b.mod(at, t.inner), b.over(at, t.inner)
        place, row = b.mod(rest, t.n // one.radix), b.over(rest, t.n // one.radix)
        base = b.calc("ADD", b.mul(row, t.n * t.inner), column)

        def read(where: int, offset: int) -> ComplexParts:
            number = b.calc("ADD", base, b.mul(where, t.inner))
            if is_first and t.is_turned:
                return t.load_turned(row, column, where, offset, 1)
            if is_first:
                return t.load(number, offset * t.inner, 1, 1)
            return ComplexParts(*[b.get(pointer, number, offset=offset * t.inner) for pointer in area(1 - half)])

        def write(where: int, offset: int, value: ComplexParts) -> None:
            number = b.calc("ADD", base, b.mul(where, t.inner))
            if is_last:
                t.keep(number, offset * t.inner, value, 1, 1, exists)
            else:
                for pointer, v in zip(area(half), value, strict=True):
                    b.put(pointer, number, v, exists, offset * t.inner)
        t.emit(one, 1, b.over(place, one.s), b.mod(place, one.s), read, write)
    b.loop(*b.bounds(), thread)
