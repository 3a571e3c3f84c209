"""TOPK of few elements of many rows: a lane has a row, whose best records so far are in registers, in order.

    for i:   new = record i
             for j in k:   best[j], new = the first of best[j] and new, the other

All records of a row differ by their positions. An element costs k orders of records, whatever the elements are.
"""
from __future__ import annotations

from svod.compile.lower.library.loops import Loops, cores, program
from svod.compile.lower.library.ordering.network import transposed
from svod.compile.lower.library.ordering.network_sort import SQUARE_CYCLES, SortingWay, load_columns, square_width, step_cycles
from svod.compile.lower.library.ordering.records import Record, Records, ordered, record_types
from svod.compile.lower.program import Program
from svod.core.graph.library_kernel import operations
from svod.core.ir.uop import UOp
from svod.core.machine.target import Target

SPARE_REGISTERS = 4             # vector registers that hold no records of the best


def insertion_ways(node: UOp, target: Target) -> list[SortingWay]:
    """Return this way, if there are enough rows and registers."""
    (k, _), ((rows, n),) = node.arg[1:]
    types = record_types(node)
    lanes = target.lanes(types[0])
    if lanes < 2 or rows < lanes or k * len(types) + SPARE_REGISTERS > target.vector_registers:
        return []
    rounds = -(-rows // (lanes * target.threads))
    return [SortingWay(rounds * n * (2 * k * step_cycles(types, target) + SQUARE_CYCLES), insert_best)]


def insert_best(node: UOp, target: Target) -> Program:
    """Return the Program of a TOPK by insertion."""
    (k, largest), ((rows, n),) = node.arg[1:]
    b = Loops()
    records = Records(b, node, target, bool(largest))
    lanes, parts = records.lanes, len(records.types)

    def insert(_: int, new: Record, __: int, *carried: int) -> tuple[int, ...]:
        best: list[int] = []
        for j in range(k):
            first, new = ordered(b, carried[j * parts:(j + 1) * parts], new)
            best += first
        return tuple(best)

    def block(it: int) -> None:
        first = b.least(b.mul(it, lanes), b.index(rows - lanes))      # the last block is moved back
        best = load_columns(records, b.mul(first, n), n, insert, *records.last(lanes) * k)
        found = [records.result(tuple(best[j * parts:(j + 1) * parts])) for j in range(k)]
        for start in range(0, k, lanes):
            square = found[start:start + lanes]
            width, mask = square_width(b, lanes, len(square))
            for row, part in enumerate(transposed(b, [square[min(j, width - 1)] for j in range(lanes)])):
                records.put(b.plus(b.mul(first, k), row * k + start), part, mask)
    b.loop(*b.bounds(), block)
    blocks = -(-rows // lanes)
    return program(node, (), (b, blocks, cores(target, operations(node)[0], blocks), 0))
