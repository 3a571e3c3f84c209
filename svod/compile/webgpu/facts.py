"""Facts about the values of a phase before it is written: the remainders of indices, and operands to hide.

    i·16 + 4    from LOOP 0…n step 3    4 modulo 16: vectors of four elements of it begin where a vec4 does
"""
from __future__ import annotations

from collections.abc import Callable, Sequence
from math import gcd
from typing import NamedTuple

from svod.compile.lower.program import Instruction
from svod.compile.webgpu.hidden import hidden_operands


class Residue(NamedTuple):
    """Numbers `remainder` + k·`modulus`; the modulus of a constant is 0."""

    modulus: int
    remainder: int

    def is_multiple(self, n: int, offset: int = 0) -> bool:
        """Whether n divides all of them, plus an offset."""
        return self.modulus % n == 0 and (self.remainder + offset) % n == 0


ANY = Residue(1, 0)


def _either(a: Residue, b: Residue) -> Residue:
    """One of two numbers."""
    return Residue(gcd(a.modulus, b.modulus, a.remainder - b.remainder), a.remainder)


def _product(a: Residue, b: Residue) -> Residue:
    """(m k + r)(n l + s)"""
    return Residue(gcd(a.modulus * b.modulus, a.modulus * b.remainder, b.modulus * a.remainder), a.remainder * b.remainder)


_RULES: dict[str, Callable[..., Residue]] = {
    "ADD": lambda a, b: Residue(gcd(a.modulus, b.modulus), a.remainder + b.remainder),
    "SUB": lambda a, b: Residue(gcd(a.modulus, b.modulus), a.remainder - b.remainder),
    "MUL": _product, "MIN": _either, "MAX": _either, "WHERE": lambda c, a, b: _either(a, b),
    "MULACC": lambda a, b, c: _RULES["ADD"](_product(a, b), c),
}


class Facts:
    """`residue[i]`: of instruction i, where it is a scalar index. `hidden`: (i, k) where compilers must not see
    through operand k."""

    def __init__(self, code: Sequence[Instruction]) -> None:
        self.hidden = hidden_operands(code)
        self.residue: list[Residue] = []
        for op, dtype, lanes, src, arg in code:
            is_index = dtype.name == "index"
            residue = ANY
            if is_index and lanes == 1:
                if op == "CONST":
                    residue = Residue(0, arg)
                elif op == "LOOP":
                    start = self.residue[src[0]]
                    residue = Residue(gcd(start.modulus, arg), start.remainder)
                elif op in _RULES:
                    residue = _RULES[op](*[self.residue[s] for s in src])
            self.residue.append(residue)
