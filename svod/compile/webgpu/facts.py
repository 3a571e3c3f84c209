"""Facts about the values of a phase before it is written: the sign of indices and their remainders, and operands to hide.

    i·16 + 4    from LOOP 0…n step 3    not negative, and 4 modulo 16: vectors of four elements of it begin where a vec4 does
"""
from __future__ import annotations

from collections.abc import Callable, Sequence
from math import gcd
from typing import NamedTuple

from svod.compile.lower.program import Instruction
from svod.compile.webgpu.hidden import hidden_operands

KEEPS_NONNEG = frozenset({"ADD", "MUL", "IDIV", "MOD", "MIN", "MAX", "MULACC", "SPLAT", "EXTRACT", "SHUFFLE"})


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
    """`nonneg[i]`, `residue[i]`: of instruction i, where it is an index; a residue is that of a scalar. `hidden`: (i, k) where compilers
    must not see through operand k."""

    def __init__(self, code: Sequence[Instruction]) -> None:
        self.hidden = hidden_operands(code)
        self.nonneg: list[bool] = []
        self.residue: list[Residue] = []
        for op, dtype, lanes, src, arg in code:
            is_index = dtype.name == "index"
            self.nonneg.append(is_index and self._is_nonneg(op, src, arg, code))
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

    def _is_nonneg(self, op: str, src: tuple[int, ...], arg: object, code: Sequence[Instruction]) -> bool:
        if op == "CONST":
            return isinstance(arg, int) and arg >= 0
        if op == "VCONST":
            return isinstance(arg, tuple) and min(arg) >= 0
        if op in ("BEGIN", "END_", "LOCAL_ID"):
            return True
        if op == "LOOP":
            return self.nonneg[src[0]]
        if op == "WHERE":
            return self.nonneg[src[1]] and self.nonneg[src[2]]
        if op == "CAST":
            return code[src[0]].dtype.kind in "bu"
        if op == "MOD":
            return self.nonneg[src[1]]
        return op in KEEPS_NONNEG and all(self.nonneg[s] for s in src)
