"""How large the index values of a phase are: an interval for each instruction, from the size of the launch and of its groups, and from
constants. What a variable or an element of a tensor says is of unknown size.
"""
from __future__ import annotations

from collections.abc import Callable, Sequence

from svod.compile.lower.program import Instruction, PhaseSpec
from svod.core.ir.dtype import dtypes

Interval = tuple[int, int]
UNKNOWN: Interval = (-(1 << 63), (1 << 63) - 1)


def _corners(f: Callable[[int, int], int]) -> Callable[[Interval, Interval], Interval]:
    def interval(a: Interval, b: Interval) -> Interval:
        values = [f(x, y) for x in a for y in b]
        return min(values), max(values)
    return interval


_PAIRS: dict[str, Callable[[Interval, Interval], Interval]] = {
    "ADD": lambda a, b: (a[0] + b[0], a[1] + b[1]), "SUB": lambda a, b: (a[0] - b[1], a[1] - b[0]), "MUL": _corners(lambda x, y: x * y),
    "MIN": lambda a, b: (min(a[0], b[0]), min(a[1], b[1])), "MAX": lambda a, b: (max(a[0], b[0]), max(a[1], b[1])),
    "IDIV": lambda a, b: _corners(lambda x, y: x // y)(a, b) if b[0] >= 1 else UNKNOWN,
    "MOD": lambda a, b: (a if a[0] >= 0 and a[1] < b[0] else (0, b[1] - 1)) if b[0] >= 1 else UNKNOWN,
    "AND": lambda a, b: (0, min(x[1] for x in (a, b) if x[0] >= 0)) if a[0] >= 0 or b[0] >= 0 else UNKNOWN,
    "XOR": lambda a, b: (0, (1 << max(a[1], b[1]).bit_length()) - 1) if a[0] >= 0 and b[0] >= 0 else UNKNOWN,
}


def intervals(phase: PhaseSpec, code: Sequence[Instruction]) -> list[Interval]:
    """The least and the greatest value of each instruction of a phase that makes an index; UNKNOWN for others."""
    found: list[Interval] = []
    for instruction in code:
        found.append(_of(phase, code, instruction, found))
    return found


def _of(phase: PhaseSpec, code: Sequence[Instruction], instruction: Instruction, found: list[Interval]) -> Interval:
    op, dtype, _, src, arg = instruction
    if dtype is not dtypes.index:
        return UNKNOWN
    known = [found[s] for s in src]
    if op == "CONST":
        return arg, arg
    if op == "VCONST":
        return min(arg), max(arg)
    if op in ("BEGIN", "END_"):
        return (0, phase.extent - 1) if op == "BEGIN" else (1, phase.extent)
    if op == "LOCAL_ID":
        return 0, phase.block - 1
    if op == "LOOP":
        (low, first), (_, stop) = known[:2]
        return low, max(first, stop - 1)
    if op in _PAIRS:
        return _known(_PAIRS[op](known[0], known[1]))
    if op == "MULACC":
        return _known(_PAIRS["ADD"](_PAIRS["MUL"](known[0], known[1]), known[2]))
    if op == "NEG":
        return _known((-known[0][1], -known[0][0]))
    if op in ("WHERE", "SPLAT", "EXTRACT", "SHUFFLE"):
        values = known[1:] if op == "WHERE" else known
        return min(v[0] for v in values), max(v[1] for v in values)
    if op == "CAST":
        of = code[src[0]].dtype
        return (0, 1) if of.kind == "b" else (int(of.min), int(of.max)) if of.kind in "iu" and of.bits <= 32 else UNKNOWN
    return UNKNOWN


def _known(interval: Interval) -> Interval:
    """What arithmetic modulo 2^64 gives."""
    return interval if UNKNOWN[0] <= interval[0] and interval[1] <= UNKNOWN[1] else UNKNOWN


def least_iterations(phase: PhaseSpec, code: Sequence[Instruction]) -> int:
    """The iterations that a thread's loops have in all, counted where bounds are known: a thread has as many or more. What finds that a
    loop is over counts as one more, but for the last loop. Compilers may unroll short loops and have fewer."""
    within, total, values = [1], 0, intervals(phase, code)
    for op, _, _, src, arg in code:
        if op == "LOOP":
            start, stop = src[:2]
            if code[start].op == "BEGIN":       # the thread's own group
                times = 1
            else:
                times = max(0, -(-(values[stop][0] - values[start][1]) // arg))
                total += within[-1] * (times + 1)
            within.append(within[-1] * times)
        elif op == "ENDLOOP":
            within.pop()
    return max(0, total - 1)
