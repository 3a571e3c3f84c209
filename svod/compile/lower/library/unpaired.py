"""UNPAIRED: the transform of 2·h real numbers from that of their h pairs, which were transformed as complex numbers.

    with z[h] = z[0], for k = 0 … h:    even = (z[k] + conj z[h - k]) / 2,  odd = (z[k] - conj z[h - k]) / 2i,  y[k] = even + turn[k]·odd

On a CPU vectors run along k, and those of the numbers h - k are reversed; the ends of a row are scalar. On a device with groups a thread
computes one number.
"""
from __future__ import annotations

from svod.compile.lower.library.loops import GROUP, Loops, cores, program
from svod.compile.lower.program import Program
from svod.core.graph.library_kernel import operations
from svod.core.ir.dtype import DType
from svod.core.ir.uop import UOp
from svod.core.machine.target import Target


class _Rows:
    """The operands of a node, and its number at one place, or at neighbouring places, of a row."""

    def __init__(self, b: Loops, node: UOp) -> None:
        _, (self.pairs_out,), ((self.outer, self.half), *_) = node.arg
        self.b, self.dtype = b, node.dtype
        self.y, *self.z, self.cosines, self.sines = b.args(node)

    def number(self, row: int, k: int, at: int, mirrored: int, lanes: int, exists: int | None = None) -> None:
        """Store the numbers from k on. `at`, `mirrored`: where z[k] is in memory, and the last of the numbers z[h - k]."""
        b, dtype = self.b, self.dtype

        def op(name: str, *args: int) -> int:
            return b.alu(name, dtype, lanes, *args)
        zr, zi = (b.get(pointer, at, lanes) for pointer in self.z)
        rr, ri = (self.reversed(b.get(pointer, mirrored, lanes), lanes) for pointer in self.z)
        half = b.const(dtype, lanes, 0.5)
        cosine, sine = (op("MUL", b.get(pointer, k, lanes), half) for pointer in (self.cosines, self.sines))
        odd_real, odd_imag = op("ADD", zi, ri), op("SUB", rr, zr)
        real = op("MULACC", odd_real, cosine, op("MUL", op("ADD", zr, rr), half))
        imag = op("MULACC", odd_imag, cosine, op("MUL", op("SUB", zi, ri), half))
        real, imag = op("MULACC", op("NEG", odd_imag), sine, real), op("MULACC", odd_real, sine, imag)
        place = b.calc("ADD", b.mul(row, self.half + 1), k)
        if not self.pairs_out:
            b.put(self.y, place, real, exists)
            b.put(self.y, place, imag, exists, self.outer * (self.half + 1))
            return
        place = b.mul(place, 2)
        for part, v in enumerate(self.interleaved(real, imag, dtype, lanes)):
            b.put(self.y, place, v, exists, part * lanes)

    def reversed(self, v: int, lanes: int) -> int:
        return v if lanes == 1 else self.b.pure("SHUFFLE", self.dtype, lanes, (v,), tuple(reversed(range(lanes))))

    def interleaved(self, x: int, y: int, dtype: DType, lanes: int) -> tuple[int, int]:
        """Two vectors with the lanes of x and y in turns."""
        if lanes == 1:
            return x, y
        turns = [lane for i in range(lanes) for lane in (i, lanes + i)]
        low, high = (self.b.pure("SHUFFLE", dtype, lanes, (x, y), tuple(turns[i:i + lanes])) for i in (0, lanes))
        return low, high


def lower_unpaired(node: UOp, target: Target) -> Program:
    """Return the Program of an UNPAIRED on a CPU: an iteration for each row."""
    b = Loops()
    rows = _Rows(b, node)
    h, lanes = rows.half, target.lanes(node.dtype)

    def row(it: int) -> None:
        start = b.mul(it, h)
        end = b.plus(start, h)

        def numbers(k: int, width: int) -> None:
            rows.number(it, k, b.calc("ADD", start, k), b.minus(end, b.plus(k, width - 1)), width)
        for k in (0, h):
            rows.number(it, b.index(k), start, start, 1)
        b.span(b.index(1), b.index(h), lanes, numbers)
    b.loop(*b.bounds(), row)
    return program(node, (), (b, rows.outer, cores(target, operations(node)[0], rows.outer), 0))


def lower_unpaired_by_threads(node: UOp, target: Target) -> Program:
    """Return the Program of an UNPAIRED for a target with groups: a thread for each number."""
    b = Loops()
    rows, block = _Rows(b, node), min(GROUP, target.group_threads)
    h, count = rows.half, rows.outer * (rows.half + 1)

    def thread(it: int) -> None:
        at, exists = b.thread(it, block, count)
        row, k = b.over(at, h + 1), b.mod(at, h + 1)
        start = b.mul(row, h)
        rows.number(row, k, b.calc("ADD", start, b.mod(k, h)), b.calc("ADD", start, b.mod(b.minus(b.index(h), k), h)), 1, exists)
    b.loop(*b.bounds(), thread)
    return program(node, (), (b, -(-count // block), 1, 0), block=block)
