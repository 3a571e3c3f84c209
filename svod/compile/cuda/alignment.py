"""Of what a power of two addresses are multiples, from the code that computes them.

    LOAD float32x4 %0, %5 [8]      %5 = MUL %2, 4; %0 begins at a multiple of 16 bytes     16: (4·%2 + 8)·4 bytes
"""
from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from math import gcd

from svod.compile.lower.program import Instruction

WIDEST = 16         # bytes of the widest access, and of what pointers begin at a multiple of
WRAPS = 32          # bits below which integers wrap around where nobody cares: 240 + 32 of uint8 is 16
_GCD = frozenset({"ADD", "SUB", "MIN", "MAX"})
_SAME = frozenset({"CAST", "SPLAT", "NEG"})


class Multiples:
    """Numbers that divide the scalar integers of a phase."""

    def __init__(self, code: Sequence[Instruction]):
        self.code = code
        self.of = cache(self._of)

    def _of(self, v: int) -> int:
        """A number that divides a value whenever it is computed; 0 for the constant 0."""
        op, dtype, lanes, src, arg = self.code[v]
        if lanes > 1 or not dtype.is_int or dtype.bits < WRAPS:     # a float is rounded when it becomes an integer
            return 1
        if op == "CONST":
            return abs(int(arg))
        if op == "LOOP":
            return gcd(self.of(src[0]), arg)
        if op == "MUL":
            return self.of(src[0]) * self.of(src[1])
        if op == "MULACC":
            return gcd(self.of(src[0]) * self.of(src[1]), self.of(src[2]))
        if op in _GCD:
            return gcd(self.of(src[0]), self.of(src[1]))
        if op == "XOR":
            both = gcd(self.of(src[0]), self.of(src[1]))
            return both & -both
        if op == "WHERE":
            return gcd(self.of(src[1]), self.of(src[2]))
        if op in ("REMAINDER", "AND", "QUOTIENT", "SHR") and self.code[src[1]].op == "CONST":
            return self._by_constant(op, self.of(src[0]), self.code[src[1]].arg)
        return self.of(src[0]) if op in _SAME else 1

    @staticmethod
    def _by_constant(op: str, factor: int, known: int) -> int:
        """A number that divides what an operation gives of multiples of `factor` and a constant."""
        if op == "REMAINDER":
            return gcd(factor, known)
        if op == "AND":         # low bits that are 0 stay so
            return factor & -factor
        whole, rest = divmod(factor, abs(known) if op == "QUOTIENT" else 1 << known)
        return 1 if rest else whole

    def bytes_of(self, index: int, offset: int, itemsize: int) -> int:
        """The largest power of two up to `WIDEST` that divides the bytes of element `index + offset`."""
        return gcd(self.of(index) * itemsize, offset * itemsize, WIDEST)
