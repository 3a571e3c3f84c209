"""SCAN on a device with groups: rows are cut into chunks, on several levels, and a thread computes one chunk (Blelloch, "Prefix sums and
their applications", CMU-CS-90-190, 1990).

One thread would take the positions of a row one after the other. With chunks of k:

    totals 1[j] = x[j·k] ∘ … ∘ x[j·k + k - 1]                                  n/k threads
    totals 2[j] = the same of totals 1                                         n/k² threads, one chunk is left
    acc = identity;       for i:             acc = acc ∘ totals 2[i];  sums 2[i] = acc
    acc = sums 2[j - 1];  for i in chunk j:  acc = acc ∘ totals 1[i];  sums 1[i] = acc
    acc = sums 1[j - 1];  for i in chunk j:  acc = acc ∘ x[i];         y[i] = acc

Each line is a phase, and x is read twice. If there are columns, neighbouring threads have neighbouring columns. A row is one chunk if it is
short, or if there are enough columns to fill a device.

If sums are rounded to the type of the result, as the target has no float64, a thread sums its positions in blocks that start from zero, and
the total before a block is added to its sums. A result is then rounded once per addition in its block, and once per level of blocks.
"""
from __future__ import annotations

from typing import NamedTuple

from svod.compile.lower.library.loops import GROUP, Loops, aligned, program
from svod.compile.lower.library.scan import ScanKind, State
from svod.compile.lower.program import Program
from svod.core.ir.summation import SumRule, blocked_loop
from svod.core.ir.uop import UOp
from svod.core.machine.target import Target

ALONE = 256                     # maximum number of positions of a row that is a single chunk
LEVEL_POSITIONS = (1 << 12, 1 << 21)     # maximum number of positions of a row for one level of totals, and for two
MANY = 1 << 16                  # number of columns that fills a device
SCAN_SUMS = SumRule(16, 16)         # rule for chains of sums that are rounded to the type of the result


def lower_by_chunks(node: UOp, target: Target) -> Program:
    """Return the Program of a SCAN for a target with groups."""
    options, (shape,) = node.arg[1:]
    chunks = _Chunks(node, ScanKind(options[0], node.src[0].dtype, node.dtype, target.float_rules), shape, min(GROUP, target.group_threads))
    top = len(chunks.lengths) - 1
    up, down = range(top), range(top, -1, -1)
    phases = [*[chunks.phase(level, scans=False) for level in up], *[chunks.phase(level, scans=True) for level in down]]
    return program(node, chunks.temps, *phases, block=chunks.block)


def lengths_of(n: int, columns: int) -> tuple[list[int], int]:
    """Return (number of positions of each level, beginning with x; positions of a chunk). `n`: positions of a row; `columns`: number of
    neighbouring columns."""
    if n <= ALONE or columns >= MANY:
        return [n], n
    levels = 1 + sum(n > most for most in LEVEL_POSITIONS)
    chunk = next(k for k in range(int(n ** (1 / (levels + 1))), n + 1) if k ** (levels + 1) >= n)
    lengths = [n]
    while lengths[-1] > chunk:
        lengths.append(-(-lengths[-1] // chunk))
    return lengths, chunk


class _Temps(NamedTuple):
    """Pointers to the components of the totals and the sums of one level."""

    totals: State
    sums: State


class _Chunks:
    """The phases of one scan, and its temporaries: for each level but the first, the totals and the sums of every component of the
    state."""

    def __init__(self, node: UOp, operator: ScanKind, shape: tuple[int, ...], block: int) -> None:
        self.node, self.operator, self.block = node, operator, block
        self.outer, n, self.inner = shape
        self.lengths, self.chunk = lengths_of(n, self.outer * self.inner if self.inner > 1 else 1)
        self.temps = tuple([aligned(self.outer * length * self.inner * t.itemsize)
                            for length in self.lengths[1:] for _ in range(2) for t in operator.types])

    def phase(self, level: int, scans: bool) -> tuple[Loops, int, int, int]:
        """Make one phase of a level. `scans`: combine all positions up to each one; False: combine only the positions of each chunk, to
        a total."""
        b, length, inner = Loops(), self.lengths[level], self.inner
        y, x = b.args(self.node)
        chunks = -(-length // self.chunk)
        threads, none = self.outer * chunks * inner, self.operator.identity(b, 1)
        above, own = self._temps(b, level + 1), self._temps(b, level)

        def position(i: int, base: int, exists: int, before: State, carried: State) -> State:
            at = b.calc("ADD", base, b.mul(i, inner))
            element = tuple([b.get(t, at) for t in own.totals]) if level else self.operator.start(b, b.get(x, at), i)
            state = self.operator.combine(b, carried, element)
            whole = self.operator.combine(b, before, state) if before else state
            if scans and level:
                _keep(b, own.sums, at, whole, exists)
            elif scans:
                b.put(y, at, self.operator.result(b, whole), exists)
            return state

        def in_blocks(begin: int, end: int, sizes: tuple[int, ...], base: int, exists: int, before: State) -> State:
            """Combine the positions from `begin` to `end`, without the positions before them."""
            if not sizes:
                return tuple(b.loop(begin, end, lambda i, *carried: position(i, base, exists, before, carried), *none))

            def block(start: int, *carried: int) -> State:
                stop, left = b.least(b.plus(start, sizes[-1]), end), self.operator.combine(b, before, carried)
                return self.operator.combine(b, carried, in_blocks(start, stop, sizes[:-1], base, exists, left))
            return tuple(b.loop(begin, end, block, *none, step=sizes[-1]))

        def thread(it: int) -> None:
            at, exists = b.thread(it, self.block, threads)
            column, chunk = b.mod(at, inner), b.over(at, inner)
            base = b.calc("ADD", b.mul(b.over(chunk, chunks), length * inner), column)
            begin = b.mul(b.mod(chunk, chunks), self.chunk)
            carry = none
            if scans and chunks > 1:
                is_first, before = b.below(begin, b.index(1)), b.calc("MAX", b.plus(at, -inner), b.index(0))
                carry = tuple([b.choose(is_first, zero, b.get(t, before)) for zero, t in zip(carry, above.sums, strict=True)])
            end = b.least(b.plus(begin, self.chunk), b.index(length))
            if self.operator.rounds_sums:
                state = in_blocks(begin, end, blocked_loop(SCAN_SUMS, self.chunk, 1).sizes, base, exists, carry)
            else:
                state = tuple(b.loop(begin, end, lambda i, *carried: position(i, base, exists, (), carried), *carry))
            if not scans:
                _keep(b, above.totals, at, state, exists)
        b.loop(*b.bounds(), thread)
        return b, -(-threads // self.block), 1, 0

    def _temps(self, b: Loops, level: int) -> _Temps:
        """Return pointers to the temporaries of a level; empty for x itself, and above the last level."""
        kinds = self.operator.types
        if not 0 < level < len(self.lengths):
            return _Temps((), ())
        first = (level - 1) * 2 * len(kinds)
        pointers = [b.pure("TEMP", t, 1, (), first + k) for k, t in enumerate((*kinds, *kinds))]
        return _Temps(tuple(pointers[:len(kinds)]), tuple(pointers[len(kinds):]))


def _keep(b: Loops, temps: State, at: int, state: State, exists: int) -> None:
    for pointer, value in zip(temps, state, strict=True):
        b.put(pointer, at, value, exists)
