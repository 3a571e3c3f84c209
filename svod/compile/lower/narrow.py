"""Index values that fit 32 bits as int32, for devices whose 64-bit arithmetic takes several instructions.

    MUL index %3, 4096         MUL int32 %3, 4096             %3 is below 512
    IDIV index %5, 7           CAST uint32 %5; IDIV uint32; CAST int32     %5 is not negative

What fits follows from the size of the launch and of its groups, and from constants: each value has an interval. A value outside 32 bits,
or of unknown size (a variable, an element of a tensor), stays an index. The result is LINEAR, but addresses and loop indices may be int32.
"""
from __future__ import annotations

from collections.abc import Callable
from typing import Any

from svod.compile.lower.program import Instruction, PhaseSpec
from svod.core.ir.dtype import DType, dtypes

_INDEX, _I32, _U32 = dtypes.index, dtypes.int32, dtypes.uint32
_LOW, _HIGH = -(1 << 31), (1 << 31) - 1
Interval = tuple[int, int]
_UNKNOWN: Interval = (-(1 << 63), (1 << 63) - 1)
_COMPARES = frozenset({"CMPLT", "CMPLE", "CMPEQ", "CMPNE"})
_WRAPS = frozenset({"ADD", "SUB", "MUL", "MULACC", "NEG", "SPLAT", "EXTRACT", "SHUFFLE"})     # of the low bits of operands


def fits(interval: Interval) -> bool:
    """Whether all numbers of an interval are 32-bit integers."""
    return interval[0] >= _LOW and interval[1] <= _HIGH


def _corners(f: Callable[[int, int], int]) -> Callable[[Interval, Interval], Interval]:
    def interval(a: Interval, b: Interval) -> Interval:
        values = [f(x, y) for x in a for y in b]
        return min(values), max(values)
    return interval


_PAIRS: dict[str, Callable[[Interval, Interval], Interval]] = {
    "ADD": lambda a, b: (a[0] + b[0], a[1] + b[1]), "SUB": lambda a, b: (a[0] - b[1], a[1] - b[0]), "MUL": _corners(lambda x, y: x * y),
    "MIN": lambda a, b: (min(a[0], b[0]), min(a[1], b[1])), "MAX": lambda a, b: (max(a[0], b[0]), max(a[1], b[1])),
    "IDIV": lambda a, b: _corners(lambda x, y: x // y)(a, b) if b[0] >= 1 else _UNKNOWN,
    "MOD": lambda a, b: (a if a[0] >= 0 and a[1] < b[0] else (0, b[1] - 1)) if b[0] >= 1 else _UNKNOWN,
    "AND": lambda a, b: (0, min(x[1] for x in (a, b) if x[0] >= 0)) if a[0] >= 0 or b[0] >= 0 else _UNKNOWN,
    "XOR": lambda a, b: (0, (1 << max(a[1], b[1]).bit_length()) - 1) if a[0] >= 0 and b[0] >= 0 else _UNKNOWN,
}


class _Narrowing:
    def __init__(self, phase: PhaseSpec, code: tuple[Instruction, ...]):
        self.phase, self.code = phase, code
        self.out: list[Instruction] = []
        self.at: list[int] = []                         # instruction of `code` → its position in `out`
        self.interval: list[Interval] = []
        self.casts: list[dict[tuple[int, str], int]] = [{}]        # (position, type) → its cast, per open loop

    def run(self) -> tuple[Instruction, ...]:
        for i, instruction in enumerate(self.code):
            self.interval.append(self._interval(i))
            self.at.append(self._emit(i, instruction))
            if instruction.op == "LOOP":
                self.casts.append({})
            elif instruction.op == "ENDLOOP":
                self.casts.pop()
        return tuple(self.out)

    # -- how large values are -----------------------------------------------------------------------
    def _interval(self, i: int) -> Interval:
        op, dtype, _, src, arg = self.code[i]
        known = [self.interval[s] for s in src] if dtype is _INDEX else []
        if dtype is not _INDEX:
            return _UNKNOWN
        if op == "CONST":
            return arg, arg
        if op == "VCONST":
            return min(arg), max(arg)
        if op in ("BEGIN", "END_"):
            return (0, self.phase.extent - 1) if op == "BEGIN" else (1, self.phase.extent)
        if op == "LOCAL_ID":
            return 0, self.phase.block - 1
        if op == "LOOP":
            (low, first), (_, stop) = known[:2]
            return low, max(first, stop - 1)
        if op in _PAIRS:
            return self._known(_PAIRS[op](known[0], known[1]))
        if op == "MULACC":
            return self._known(_PAIRS["ADD"](_PAIRS["MUL"](known[0], known[1]), known[2]))
        if op == "NEG":
            return self._known((-known[0][1], -known[0][0]))
        if op in ("WHERE", "SPLAT", "EXTRACT", "SHUFFLE"):
            values = known[1:] if op == "WHERE" else known
            return min(v[0] for v in values), max(v[1] for v in values)
        if op == "CAST":
            of = self.code[src[0]].dtype
            return (0, 1) if of.kind == "b" else (int(of.min), int(of.max)) if of.kind in "iu" and of.bits <= 32 else _UNKNOWN
        return _UNKNOWN

    @staticmethod
    def _known(interval: Interval) -> Interval:
        """What arithmetic modulo 2^64 gives."""
        return interval if _UNKNOWN[0] <= interval[0] and interval[1] <= _UNKNOWN[1] else _UNKNOWN

    # -- what is written ----------------------------------------------------------------------------
    def _put(self, op: str, dtype: DType, lanes: int, src: tuple[int, ...], arg: Any = None) -> int:
        self.out.append(Instruction(op, dtype, lanes, src, arg))
        return len(self.out) - 1

    def _as(self, s: int, dtype: DType) -> int:
        """The value of an instruction of `code` as another integer type."""
        return self._cast(self.at[s], dtype)

    def _cast(self, position: int, dtype: DType) -> int:
        own = self.out[position]
        if own.dtype == dtype:
            return position
        for scope in self.casts:
            if (position, dtype.name) in scope:
                return scope[position, dtype.name]
        if own.op in ("CONST", "VCONST"):
            made = self._put(own.op, dtype, own.lanes, (), own.arg)
        else:
            made = self._put("CAST", dtype, own.lanes, (position,))
        self.casts[-1][position, dtype.name] = made
        return made

    def _emit(self, i: int, instruction: Instruction) -> int:
        op, dtype, lanes, src, arg = instruction
        if op in _COMPARES and self.code[src[0]].dtype is _INDEX:
            kind = _I32 if all(fits(self.interval[s]) for s in src) else _INDEX
            return self._put(op, dtype, lanes, tuple([self._as(s, kind) for s in src]), arg)
        if dtype is not _INDEX:
            return self._other(instruction)
        small = fits(self.interval[i])
        if op in ("IDIV", "MOD"):
            return self._division(i, instruction)
        if op in ("CONST", "VCONST", "BEGIN", "END_", "LOCAL_ID"):
            return self._put(op, _I32 if small else _INDEX, lanes, (), arg)
        if op == "LOOP":
            return self._loop(i, instruction)
        if op == "CAST":
            return self._put(op, _I32 if small else _INDEX, lanes, (self.at[src[0]],), arg)
        whole = op in _WRAPS or all(fits(self.interval[s]) for s in src if self.code[s].dtype is _INDEX)
        kind = _I32 if small and whole and op in (*_WRAPS, "MIN", "MAX", "AND", "XOR", "WHERE") else _INDEX
        operands = tuple([self._as(s, kind) if self.code[s].dtype is _INDEX and op not in ("CARRY", "RESULT") else self.at[s] for s in src])
        return self._put(op, kind, lanes, operands, arg)

    def _loop(self, i: int, instruction: Instruction) -> int:
        op, _, lanes, src, arg = instruction
        whole = all(fits(self.interval[s]) for s in src[:2]) and self.interval[i][1] + arg <= _HIGH
        kind = _I32 if whole else _INDEX
        bounds = [self._as(s, kind) for s in src[:2]]
        return self._put(op, kind, lanes, (*bounds, *[self._carried(s) for s in src[2:]]), arg)

    def _carried(self, s: int) -> int:
        """What a loop carries: indices as such, as nothing is known of what they become."""
        return self._as(s, _INDEX) if self.code[s].dtype is _INDEX else self.at[s]

    def _division(self, i: int, instruction: Instruction) -> int:
        op, _, lanes, src, arg = instruction
        if not all(fits(self.interval[s]) for s in (*src, i)):
            return self._put(op, _INDEX, lanes, tuple([self._as(s, _INDEX) for s in src]), arg)
        positive = self.interval[src[0]][0] >= 0 and self.interval[src[1]][0] >= 1
        if not positive:
            return self._put(op, _I32, lanes, tuple([self._as(s, _I32) for s in src]), arg)
        divided = self._put(op, _U32, lanes, tuple([self._as(s, _U32) for s in src]), arg)
        return self._cast(divided, _I32)

    def _other(self, instruction: Instruction) -> int:
        """An instruction that makes no index: its operands keep their type, but for what a loop carries and what is converted."""
        op, dtype, lanes, src, arg = instruction
        if op == "ENDLOOP":
            return self._put(op, dtype, lanes, (self.at[src[0]], *[self._carried(s) for s in src[1:]]), arg)
        whole = op == "BITCAST" and self.code[src[0]].dtype is _INDEX
        return self._put(op, dtype, lanes, (self._as(src[0], _INDEX),) if whole else tuple([self.at[s] for s in src]), arg)


def narrow_indices(phase: PhaseSpec, code: tuple[Instruction, ...]) -> tuple[Instruction, ...]:
    """The code of a phase that is launched as groups, with indices as int32 where all values that they can have fit."""
    return _Narrowing(phase, code).run()
