"""Residue analysis: for each integer of a phase, a modulus and a remainder, derived from the code that computes it.

    %5 = MUL %2, 16;  %7 = ADD %5, 4        %7 is 4 more than a multiple of 16
    LOAD float32x4 %0, %7 [8]               so the address is a multiple of 16 bytes: (16·%2 + 4 + 8)·4
"""
from __future__ import annotations

from collections.abc import Callable, Sequence
from math import gcd
from typing import NamedTuple

from svod.compile.lower.program import Instruction

WRAPS = 32          # integers of fewer bits may wrap around, so they are not analysed: in uint8, 240 + 32 is 16


class Residue(NamedTuple):
    """The numbers `remainder` + k·`modulus`. The modulus of a constant is 0."""

    modulus: int
    remainder: int

    def divisor(self, offset: int = 0) -> int:
        """Return the largest number that divides all these numbers plus `offset`; 0 if the sum is always 0."""
        return gcd(self.modulus, self.remainder + offset)


ANY_RESIDUE = Residue(1, 0)


def _either(a: Residue, b: Residue) -> Residue:
    """Return the residue of a value that is one of two values."""
    return Residue(gcd(a.modulus, b.modulus, a.remainder - b.remainder), a.remainder)


def _sum(a: Residue, b: Residue) -> Residue:
    return Residue(gcd(a.modulus, b.modulus), a.remainder + b.remainder)


def _negated(a: Residue) -> Residue:
    return Residue(a.modulus, -a.remainder)


def _product(a: Residue, b: Residue) -> Residue:
    """Return the residue of a product: (m k + r)(n l + s)."""
    return Residue(gcd(a.modulus * b.modulus, a.modulus * b.remainder, b.modulus * a.remainder), a.remainder * b.remainder)


def _low_bits(n: int) -> int:
    """Return the largest power of two that divides a number; 0 for 0."""
    return n & -n


def _and(a: Residue, b: Residue) -> Residue:
    """Return the residue of a bitwise AND: low bits that are 0 in one operand are 0 in the result."""
    low = [_low_bits(x.divisor()) for x in (a, b)]
    return Residue(max(low) if all(low) else 0, 0)


def _quotient(a: Residue, b: Residue) -> Residue:
    """Return the residue of a quotient by a constant; ANY_RESIDUE if the division may be inexact."""
    by = abs(b.remainder)
    if b.modulus or not by or a.divisor() % by:
        return ANY_RESIDUE
    return Residue(a.modulus // by, a.remainder // b.remainder)


_RESIDUE_RULES: dict[str, Callable[..., Residue]] = {
    "ADD": _sum, "SUB": lambda a, b: _sum(a, _negated(b)), "NEG": _negated,
    "MUL": _product, "MULACC": lambda a, b, c: _sum(_product(a, b), c),
    "MIN": _either, "MAX": _either, "WHERE": lambda c, a, b: _either(a, b), "CAST": lambda a: a, "SPLAT": lambda a: a,
    "AND": _and, "XOR": lambda a, b: Residue(_low_bits(gcd(a.divisor(), b.divisor())), 0),
    "QUOTIENT": _quotient, "SHR": lambda a, b: ANY_RESIDUE if b.modulus else _quotient(a, Residue(0, 1 << b.remainder)),
    "REMAINDER": lambda a, b: ANY_RESIDUE if b.modulus else Residue(gcd(a.modulus, b.remainder), a.remainder),
}


def residues(code: Sequence[Instruction]) -> list[Residue]:
    """Return the residue of each instruction that computes a scalar integer; ANY_RESIDUE for others."""
    known: list[Residue] = []
    for op, dtype, lanes, src, arg in code:
        residue = ANY_RESIDUE
        if lanes == 1 and dtype.is_int and dtype.bits >= WRAPS:
            if op == "CONST":
                residue = Residue(0, arg)
            elif op == "LOOP":
                residue = Residue(gcd(known[src[0]].modulus, arg), known[src[0]].remainder)
            elif op in _RESIDUE_RULES:
                residue = _RESIDUE_RULES[op](*[known[s] for s in src])
        known.append(residue)
    return known
