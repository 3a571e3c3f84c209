"""Adds prefetches next to loads of arguments and temporaries, as PREFETCH(operand, distance) requests: a pass over the LINEAR of a phase.

    LOOP r step 2                            LOOP r step 2
      a = LOAD x, r*48 [0]        4 ahead      a = LOAD x, r*48 [0]
      …                              →         PREFETCH x, r*48 [4·2·48]
                                               …

The pass runs last, after squares of strided loads have become rows. The prefetched address is `distance` iterations ahead in the innermost
loop that moves the load, computed from how much the index grows per iteration. There is no prefetch if the index is looked up in the loop,
or if no loop is left. In one iteration each line of 64 bytes is prefetched once. Addresses may lie outside the argument: the instruction
then does nothing, and the address computation wraps around without being undefined.
"""
from __future__ import annotations

from collections.abc import Mapping

from svod.compile.lower.program import Instruction

LINE = 64       # bytes

Source = tuple[str, int]        # a pointer: ("ARG", slot) or ("TEMP", number)


def add_prefetches(code: tuple[Instruction, ...], distances: Mapping[Source, int]) -> tuple[Instruction, ...]:
    """The code with a PREFETCH after each LOAD and LOADS of a pointer in `distances`. `distances`: pointer → iterations ahead."""
    if not distances:
        return code
    out: list[Instruction] = []
    number: list[int] = []                          # position in `code` → in `out`
    around: list[int] = []                          # open loops
    asked: set[tuple[int, int, int, int]] = set()   # (innermost loop, pointer, index, line relative to it) of prefetches so far
    moved: dict[tuple[int, int], int] = {}          # (index, innermost loop) → growth in elements per iteration
    for at, (op, dtype, lanes, src, arg) in enumerate(code):
        number.append(len(out))
        out.append(Instruction(op, dtype, lanes, tuple([number[s] for s in src]), arg))
        if op == "LOOP":
            around.append(at)
        elif op == "ENDLOOP":
            around.pop()
        elif op in ("LOAD", "LOADS") and (code[src[0]].op, code[src[0]].arg) in distances:
            pointer, index = src[:2]
            if not around:
                continue
            here = index, around[-1]
            if here not in moved:
                moved[here] = _moved(code, index, around)
            ahead = distances[code[pointer].op, code[pointer].arg] * moved[here]
            if not ahead:
                continue
            offset, stride = arg if op == "LOADS" else (arg, 1)
            for lane in range(lanes):
                element = offset + lane * stride + ahead
                key = (around[-1], pointer, index, element * dtype.itemsize // LINE)
                if key not in asked:
                    asked.add(key)
                    out.append(Instruction("PREFETCH", dtype, 1, (number[pointer], number[index]), element))
    return tuple(out)


def _moved(code: tuple[Instruction, ...], index: int, around: list[int]) -> int:
    """How many elements an index grows per iteration of the innermost loop that moves it; 0 if no loop does, or the growth is unknown."""
    for loop in reversed(around):
        if not _is_once(code, loop):
            per_step = _slope(code, index, loop, {})
            if per_step is None:
                return 0
            if per_step:
                return per_step * int(code[loop].arg)
    return 0


def _is_once(code: tuple[Instruction, ...], loop: int) -> bool:
    """Whether a loop runs at most once: it is a condition, or an axis of one position."""
    start, stop = code[loop].src[:2]
    ends = code[stop].src[1:] if code[stop].op == "WHERE" else (stop,)
    if code[start].op != "CONST" or any(code[e].op != "CONST" for e in ends):
        return False
    return bool(max(code[e].arg for e in ends) - code[start].arg <= code[loop].arg)


def _slope(code: tuple[Instruction, ...], v: int, loop: int, known: dict[int, int | None]) -> int | None:
    """How much a scalar index grows with the index of `loop`; None if unknown. Divisions are treated as if the row did not end, and the
    last tile as if it were not moved back. `known`: cache of the growth of values."""
    if v <= loop:
        return int(v == loop)
    if v not in known:
        known[v] = _compute_slope(code, v, loop, known)
    return known[v]


def _compute_slope(code: tuple[Instruction, ...], v: int, loop: int, known: dict[int, int | None]) -> int | None:
    op, _, _, src, _ = code[v]
    if op == "CONST":
        return 0
    if op in ("LOOP", "MOD"):
        return _slope(code, src[0], loop, known)
    if op not in ("ADD", "SUB", "MUL", "MIN", "MAX", "IDIV", "WHERE"):
        return None
    a, b = _slope(code, src[-2], loop, known), _slope(code, src[-1], loop, known)
    if a is None or b is None:
        return None
    if op in ("ADD", "SUB"):
        return a + b if op == "ADD" else a - b
    if op == "IDIV":
        return 0
    if op == "MUL":
        factors = [(slope, other) for slope, other in ((a, src[1]), (b, src[0])) if slope]
        if not factors:
            return 0
        (slope, other), *more = factors
        return slope * int(code[other].arg) if not more and code[other].op == "CONST" else None
    return a or b if a == b or not (a and b) else None
