"""SCATTER: stores values into a copy of the base, one after another, so that positions may repeat.

    for each row and block of columns:   copy base;   for j:  for k in block:  y[index[j, k], k] = y[index[j, k], k] ∘ value[j, k]

Columns are independent, so rows and blocks of columns are spread over the cores.
"""
from __future__ import annotations

from svod.compile.lower.library.loops import INDEX, Loops, cores, program
from svod.compile.lower.program import Program
from svod.core.ir.uop import UOp
from svod.core.machine.target import Target

BLOCK_BYTES = 256        # bytes of a row of columns that one core processes in its loop over positions


def lower_scatter(node: UOp, target: Target) -> Program:
    """Return the Program of a SCATTER."""
    (reduction,), ((outer, n, inner), (_, m, _), _) = node.arg[1:]
    lanes = target.lanes(node.dtype)
    width = min(inner, max(1, BLOCK_BYTES // node.dtype.itemsize))
    blocks = -(-inner // width)
    b = Loops()
    y, base, index, value = b.args(node)

    def copy(begin: int, end: int) -> None:
        def move(i: int, width: int) -> None:
            b.put(y, i, b.get(base, i, width))
        b.span(begin, end, lanes, move)

    def block(it: int) -> None:
        row, first = b.over(it, blocks), b.mul(b.mod(it, blocks), width)
        last = b.least(b.plus(first, width), b.index(inner))
        begin = b.mul(row, n * inner)
        if inner == 1:
            copy(begin, b.plus(begin, n))
        else:
            def line(i: int) -> None:
                at = b.calc("ADD", begin, b.mul(i, inner))
                copy(b.calc("ADD", at, first), b.calc("ADD", at, last))
            b.loop(b.index(0), b.index(n), line)

        def place(j: int) -> None:
            at = b.mul(b.calc("ADD", b.mul(row, m), j), inner)

            def column(k: int) -> None:
                source = b.calc("ADD", at, k)
                position = b.cast(INDEX, b.get(index, source))
                if node.src[1].dtype.is_signed:
                    position = b.choose(b.below(position, b.index(0)), b.plus(position, n), position)
                # positions outside of the row are ignored
                inside = b.both(b.below(b.index(-1), position), b.below(position, b.index(n)))
                where = b.calc("ADD", b.calc("ADD", begin, b.mul(b.choose(inside, position, b.index(0)), inner)), k)
                new = b.get(value, source)
                if reduction != "SET":
                    new = b.alu(reduction, node.dtype, 1, b.get(y, where, ordered=True), new)
                b.put(y, where, new, mask=inside)
            b.loop(first, last, column)
        b.loop(b.index(0), b.index(m), place)
    b.loop(*b.bounds(), block)
    return program(node, (), (b, outer * blocks, cores(target, outer * (n + m) * inner, outer * blocks), 0))
