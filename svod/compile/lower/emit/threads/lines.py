"""Exchanges results of a tile among the four threads that share its rows, so that each thread stores one line of 16 bytes.

    before: thread q of four has     columns 2q, 2q+1 of each of four groups of eight columns: four words, each in a different line
    after two exchanges it has       columns 8q … 8q+7: one line

In each exchange a thread trades half of its words with the thread whose number differs in one bit."""
from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from svod.compile.lower.emit.context import PhaseContext
from svod.core.ir.dtype import dtypes
from svod.core.kernel.intrinsics import LINE_OF_QUAD, QUAD

INDEX, BOOL, WORD = dtypes.index, dtypes.bool, dtypes.uint32


class Cell(NamedTuple):
    """Neighbouring results that a thread has in one row. `at`: axis → position of the first result; `total`: the sums of the results."""

    at: dict[int, int]
    total: int


class Lines:
    """Exchanges the words of four cells of a row."""

    def __init__(self, ctx: PhaseContext) -> None:
        self.ctx, self.b = ctx, ctx.b

    def quads(self, cells: Sequence[Cell], columns: int) -> list[tuple[Cell, ...]]:
        """Group the cells of each row in fours whose columns are one line apart; [] if the cells cannot be grouped so."""
        rows: dict[tuple[tuple[int, int], ...], list[Cell]] = {}
        for cell in cells:
            rows.setdefault(tuple(sorted((a, o) for a, o in cell.at.items() if a != columns)), []).append(cell)
        found = []
        for row in rows.values():
            row.sort(key=lambda cell: cell.at[columns])
            found += [tuple(row[k:k + QUAD.extent]) for k in range(0, len(row), QUAD.extent)]
        beside = all(cell.at[columns] == quad[0].at[columns] + k * LINE_OF_QUAD for quad in found for k, cell in enumerate(quad))
        return found if beside and all(len(quad) == QUAD.extent for quad in found) else []

    def exchanged(self, values: Sequence[int]) -> int:
        """Trade words of four lines with the three other threads of a row, so that this thread has all words of one line, which it
        stores. Returns that line. `values`: this thread's word of each line, as a vector of two elements."""
        b = self.b
        dtype = b.dtype[values[0]]
        words = [b.bitcast(WORD, v) for v in values]
        first, second = (words[:2], words[2:])
        low = self._exchange([first[0]], [first[1]], 1)         # words of line 0; in odd threads, of line 1
        high = self._exchange([second[0]], [second[1]], 1)
        line = self._exchange(low, high, 2)
        pairs = [b.pure("SHUFFLE", WORD, 2, (x, y), (0, 1)) for x, y in zip(line[::2], line[1::2], strict=True)]
        whole = b.pure("SHUFFLE", WORD, 4, tuple(pairs), (0, 1, 2, 3))
        return b.bitcast(dtype, whole)

    def _exchange(self, own: list[int], other: list[int], bit: int) -> list[int]:
        """Trade words with the thread whose number differs in `bit`. A thread whose bit is 0 keeps its `own` words and gives `other`
        away; a thread whose bit is 1 does the reverse. Returns the words of this thread's line, in the order of the threads that had
        them."""
        b, group = self.b, self.ctx.group
        digit = group.thread if bit == 1 else b.alu("IDIV", INDEX, 1, group.thread, b.index(bit))
        is_set = b.alu("CMPEQ", BOOL, 1, b.alu("MOD", INDEX, 1, digit, b.index(2)), b.index(1))

        def choose(one: int, zero: int) -> int:
            return b.alu("WHERE", WORD, 1, is_set, one, zero)
        group.exchanges = True
        got = [b.load("SHFL_XOR", WORD, 1, (choose(x, y),), bit, ordered=True) for x, y in zip(own, other, strict=True)]
        return [choose(g, x) for g, x in zip(got, own, strict=True)] + [choose(y, g) for g, y in zip(got, other, strict=True)]
