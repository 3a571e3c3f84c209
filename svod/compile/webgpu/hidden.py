"""Operands whose values must be hidden from compilers of WGSL, which simplify sums and products of floats as if these were real numbers:

    SUB(ADD(x, 1), 1)                       → x             a constant, or a term, on both sides
    SUB(x, x)                               → 0             although it is NaN for an infinite x
    MULACC(n, c2, MULACC(n, c1, x))         → n·(c1 + c2) + x
    MUL(x, 0), FDIV(x, 0), ADD(x, 0)        → 0, 0, x

To prevent that, `WgslWriter.hide` makes the inner operands of such sums, and zeros, values that a compiler cannot know.
"""
from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence

from svod.compile.lower.program import Instruction

Terms = frozenset[Hashable]
CONSTANT = "constant"
# maximum number of terms of a sum that are tracked; if a sum has more, the remainder is hidden and counts as one term
MOST_TERMS = 32
CONSTANTS = frozenset({"CONST", "VCONST"})
WITH_ZERO = {"ADD": 2, "SUB": 2, "MUL": 2, "FDIV": 2, "MULACC": 2}     # op → number of its first operands that must not be a known 0


def hidden_operands(code: Sequence[Instruction]) -> frozenset[tuple[int, int]]:
    """Return the operands of float instructions of a phase that must be hidden, as (instruction, number of the operand)."""
    hidden: set[tuple[int, int]] = set()
    terms: list[Terms] = []
    for i, (op, dtype, _, src, _) in enumerate(code):
        if dtype.kind != "f":
            terms.append(frozenset())
            continue
        for k, s in enumerate(src[:WITH_ZERO.get(op, 0)]):
            if code[s].op in CONSTANTS and _has_zero(code[s].arg):
                hidden.add((i, k))
        rule = _TERM_RULES.get(op)
        parts = rule(code, terms, src) if rule is not None else []
        shares = len(parts) == 2 and not parts[0].isdisjoint(parts[1])
        found: Terms = frozenset().union(*parts) if parts else frozenset({CONSTANT if op in CONSTANTS else i})
        if shares or len(found) > MOST_TERMS:
            at = _inner(op, code, src)
            hidden.add((i, at))
            found = frozenset({("hidden", i), *(parts[1 - at if op != "MULACC" else 0])})
        elif op == "FDIV" and src[1] in (src[0], *_factors(code, src[0])):
            hidden.add((i, 0))
        terms.append(found)
    return frozenset(hidden)


def _has_zero(value: object) -> bool:
    return any(v == 0 for v in value) if isinstance(value, tuple) else value == 0


def _inner(op: str, code: Sequence[Instruction], src: tuple[int, ...]) -> int:
    """Return the number of the operand of a sum to hide: the addend of a MULACC, otherwise the first operand that is not a constant."""
    return 2 if op == "MULACC" else int(code[src[0]].op in CONSTANTS)


def _factors(code: Sequence[Instruction], s: int) -> tuple[int, ...]:
    return code[s].src if code[s].op == "MUL" else ()


def _product(code: Sequence[Instruction], terms: Sequence[Terms], a: int, b: int) -> Terms:
    """Return the terms of a product: the terms of one factor if the other one is constant; otherwise the product is a single term."""
    for x, y in ((a, b), (b, a)):
        if code[y].op in CONSTANTS:
            return terms[x]
    return frozenset({("product", min(a, b), max(a, b))})


_TERM_RULES: dict[str, Callable[[Sequence[Instruction], Sequence[Terms], tuple[int, ...]], list[Terms]]] = {
    "ADD": lambda code, terms, src: [terms[s] for s in src], "SUB": lambda code, terms, src: [terms[s] for s in src],
    "MULACC": lambda code, terms, src: [_product(code, terms, src[0], src[1]), terms[src[2]]],
    "NEG": lambda code, terms, src: [terms[src[0]]], "SPLAT": lambda code, terms, src: [terms[src[0]]],
    "MUL": lambda code, terms, src: [_product(code, terms, src[0], src[1])],
}
