"""Legalisation: rewrites LINEAR to the instructions that a renderer prints.

    MOD int32 %3, 7                          %5 = QUOTIENT int32 %3, 7
                                     →       %6 = MUL int32 %5, 7;  %7 = SUB int32 %3, %6       the remainder, of the dividend's sign
                                             %8 = SHR int32 %7, 31;  %9 = AND int32 %8, 7;  ADD int32 %7, %9

    ADD bfloat16 %3, %4              →       BITCAST, CAST, SHL, BITCAST of each;  ADD float32;  the bits rounded, SHR, CAST, BITCAST

It is the last pass over LINEAR, and depends on the renderer: chains, costs, digests and records refer to LINEAR before it, which is the
same for all renderers of a target. The results of the program do not change, except where LINEAR leaves them open.
"""
from __future__ import annotations

from functools import lru_cache
from typing import Any

from svod.compile.lower.legal.builder import Rewriting, Rule, RuleOf, Rules
from svod.compile.lower.legal.casts import bitcast, cast, in_32_bits, is_half
from svod.compile.lower.legal.floats import extremum, reciprocal, round_by_floor, sign_bit, test_for_nan
from svod.compile.lower.legal.instructions import Instructions
from svod.compile.lower.legal.integers import by_extrema, divide, of_bools, shift, subtract_from_zero
from svod.compile.lower.linear import ARITY, COMPARES
from svod.compile.lower.program import Program
from svod.core.ir.dtype import DType, dtypes

LANEWISE = frozenset(ARITY) - {"WHERE"}
STAYS_INTEGER = frozenset({"AND", "OR", "XOR", "MAX", "MIN"}) | COMPARES
"""Operations on integers whose results always fit the operands' type, so that they need no wrapping."""
STAYS_FLOAT = frozenset({"MAX", "MIN", "FLOOR", "CEIL", "TRUNC", "ROUND", "NEG", "ABS"}) | COMPARES
"""Operations on floats whose results are always numbers of the operands' type, so that they need no rounding."""


def _renamed(name: str) -> Rule:
    """Return the rule that replaces an operation by another one, on the same operands."""
    return lambda b, op, dtype, lanes, src, arg: b.alu(name, dtype, lanes, *src)


def _operand(b: Rewriting, op: str, dtype: DType, lanes: int, src: tuple[int, ...], arg: Any) -> int | None:
    """Rule for an operation that does not change the value: its first operand replaces it."""
    return src[0]


_OF_BOOLS: Rules = {"ADD": _renamed("OR"), "MUL": _renamed("AND"), "MAX": _renamed("OR"), "MIN": _renamed("AND")}
_OF_INTEGERS: Rules = {"IDIV": divide, "MOD": divide, "SHL": shift, "SHR": shift, "NEG": subtract_from_zero}
_KEEPS_WHOLE = frozenset({"FLOOR", "CEIL", "TRUNC", "ROUND"})


@lru_cache(maxsize=64)
def rules_for(n: Instructions) -> RuleOf:
    """Return the rules for a renderer that prints these instructions, as a function of (operation, dtype, dtype of the first operand)."""
    known: dict[tuple[str, DType, DType], Rule | None] = {}

    def rule_of(op: str, dtype: DType, of: DType) -> Rule | None:
        key = op, dtype, of
        if key not in known:
            known[key] = _rule(n, op, of)
        return known[key]
    return rule_of


def _rule(n: Instructions, op: str, of: DType) -> Rule | None:
    """Return the rule for an operation whose first operand has type `of`; None if the renderer prints the operation."""
    if op in ("CAST", "BITCAST"):
        return cast if op == "CAST" else bitcast
    if op not in LANEWISE:
        return None
    if (op in _KEEPS_WHOLE and not of.is_float) or (op == "ABS" and of.kind in "ub"):
        return _operand
    if of is dtypes.bool:
        return of_bools if op in ("CMPLT", "CMPLE") and not n.compares_bools else _OF_BOOLS.get(op)
    return _rule_of_integers(n, op, of) if of.is_int else _rule_of_floats(n, op, of)


def _rule_of_integers(n: Instructions, op: str, of: DType) -> Rule | None:
    if of.bits < 32 and not n.has_short_integers:
        return None if n.holds_wide and op in STAYS_INTEGER else in_32_bits
    if op in ("CMPLT", "CMPLE") and of == dtypes.int64 and not n.compares_int64:
        return by_extrema
    return _OF_INTEGERS.get(op)


def _rule_of_floats(n: Instructions, op: str, of: DType) -> Rule | None:
    if is_half(of):
        if op in ("NEG", "ABS") and not n.holds_wide:
            return sign_bit
        if not n.holds_wide or op not in STAYS_FLOAT:
            return in_32_bits
    if op in ("MAX", "MIN"):
        return None if n.keeps_nans else extremum
    if op in ("CMPNE", "CMPEQ"):
        return None if n.compares_nans else test_for_nan
    if op in ("TRUNC", "ROUND") and of == dtypes.float64 and not n.rounds_float64:
        return round_by_floor
    return reciprocal if op == "RECIPROCAL" else None


def legalize(program: Program, instructions: Instructions) -> Program:
    """Rewrite a program to the instructions that a renderer prints. Legalising twice changes nothing."""
    rule_of = rules_for(instructions)
    code = tuple([tuple(Rewriting(phase, code, instructions, rule_of).run())
                  for phase, code in zip(program.spec.phases, program.code, strict=True)])
    return Program(program.spec, code)
