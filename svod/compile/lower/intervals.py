"""Interval analysis of the index values of a phase, from the size of the launch and of its groups, and from constants. Variables and
elements of tensors have unknown size.
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
    """Return the minimum and the maximum value of each index instruction of a phase; UNKNOWN for other instructions."""
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
    """Return the interval if it fits 64-bit numbers; otherwise UNKNOWN, because arithmetic wraps around."""
    return interval if UNKNOWN[0] <= interval[0] and interval[1] <= UNKNOWN[1] else UNKNOWN


def least_iterations(phase: PhaseSpec, code: Sequence[Instruction]) -> int:
    """Return a lower bound of the total iterations of all loops of one thread, as Mesa's software driver counts them; a loop of unknown
    length counts as empty. This driver leaves a loop after one more run of its body, in which all lanes are masked. Such a run counts as
    an iteration of the loop and of each loop inside it; only the very last one of the phase does not count. Compilers may unroll short
    loops, and so run fewer iterations.

        LOOP i 0 … n step 256:  LOOP j i … min(i + 256, n) step 1        the blocks of i have n iterations together"""
    total, values = 0, intervals(phase, code)
    opened = [1]                        # total iterations of each open loop, outermost first
    inside = [0]                        # number of loops already closed in each open loop
    covered: dict[int, int] = {}        # loop → total number of positions that it covers
    for i, (op, _, _, src, arg) in enumerate(code):
        if op == "LOOP":
            start, stop = src[:2]
            inside.append(0)
            if code[start].op == "BEGIN":       # the loop over the thread's own group
                opened.append(opened[-1])
                continue
            is_block = start in covered and _ends_a_block(code, start, stop)
            each = max(0, values[stop][0] - values[start][1])
            covered[i] = covered[start] if is_block else opened[-1] * each
            iterations = -(-covered[i] // arg) if is_block else opened[-1] * -(-each // arg)
            total += iterations + opened[-1]
            opened.append(iterations)
        elif op == "ENDLOOP":
            opened.pop()
            loops = inside.pop()
            total += loops * opened[-1] if src[0] in covered else 0
            inside[-1] += loops + 1
    return max(0, total - 1)


def _ends_a_block(code: Sequence[Instruction], loop: int, stop: int) -> bool:
    """Whether `stop` is the end of one step of a loop: index + step, or min(index + step, end of the loop)."""
    _, _, _, (_, end, *_), step = code[loop]
    places = [s for s in code[stop].src if s != end] if code[stop].op == "MIN" and end in code[stop].src else [stop]
    return any(code[s].op == "ADD" and loop in code[s].src and any(code[n].op == "CONST" and code[n].arg == step for n in code[s].src)
               for s in places)
