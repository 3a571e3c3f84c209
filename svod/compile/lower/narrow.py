"""Narrows index values that fit 32 bits to int32, for devices whose 64-bit arithmetic takes several instructions.

    MUL index %3, 4096         MUL int32 %3, 4096             %3 is below 512
    IDIV index %5, 7           CAST uint32 %5; IDIV uint32; CAST int32     %5 is not negative

Interval analysis, from the size of the launch and of its groups and from constants, tells which values fit. A value outside 32 bits, or of
unknown size (a variable, an element of a tensor), stays an index. The result is LINEAR, but addresses and loop indices may be int32.
"""
from __future__ import annotations

from svod.compile.lower.intervals import Interval, intervals
from svod.compile.lower.legal.builder import Rewriting
from svod.compile.lower.legal.instructions import Instructions
from svod.compile.lower.linear import COMPARES
from svod.compile.lower.program import Instruction, PhaseSpec
from svod.core.ir.dtype import DType, dtypes

_INDEX, _I32, _U32 = dtypes.index, dtypes.int32, dtypes.uint32
_LOW, _HIGH = -(1 << 31), (1 << 31) - 1
# operations whose low bits depend only on the low bits of their operands
_WRAPS = frozenset({"ADD", "SUB", "MUL", "MULACC", "NEG", "SPLAT", "EXTRACT", "SHUFFLE"})


def fits(interval: Interval) -> bool:
    """Whether all numbers of an interval fit 32-bit integers."""
    return interval[0] >= _LOW and interval[1] <= _HIGH


class _Narrowing(Rewriting):
    def __init__(self, phase: PhaseSpec, code: tuple[Instruction, ...]):
        super().__init__(phase, code, Instructions(), lambda op, dtype, of: None)
        self.interval = intervals(phase, code)

    def _as(self, s: int, dtype: DType) -> int:
        """Return the value of an instruction of `code`, converted to another integer type."""
        return self._cast(self.at[s], dtype)

    def _cast(self, position: int, dtype: DType) -> int:
        own = self.out[position]
        if own.op in ("CONST", "VCONST") and own.dtype != dtype:
            return self.put(own.op, dtype, own.lanes, arg=own.arg)
        return self.cast(dtype, position)

    def rewritten(self, instruction: Instruction) -> int:
        i, (op, dtype, lanes, src, arg) = len(self.at), instruction
        if op in COMPARES and self.code[src[0]].dtype is _INDEX:
            kind = _I32 if all(fits(self.interval[s]) for s in src) else _INDEX
            return self.add(op, dtype, lanes, tuple([self._as(s, kind) for s in src]), arg)
        if dtype is not _INDEX:
            return self._other(instruction)
        small = fits(self.interval[i])
        if op in ("IDIV", "MOD"):
            return self._division(i, instruction)
        if op in ("CONST", "VCONST", "BEGIN", "END_", "LOCAL_ID"):
            return self.add(op, _I32 if small else _INDEX, lanes, (), arg)
        if op == "LOOP":
            return self._loop(i, instruction)
        if op == "CAST":
            return self.add(op, _I32 if small else _INDEX, lanes, (self.at[src[0]],), arg)
        whole = op in _WRAPS or all(fits(self.interval[s]) for s in src if self.code[s].dtype is _INDEX)
        kind = _I32 if small and whole and op in (*_WRAPS, "MIN", "MAX", "AND", "XOR", "WHERE") else _INDEX
        operands = tuple([self._as(s, kind) if self.code[s].dtype is _INDEX and op not in ("CARRY", "RESULT") else self.at[s] for s in src])
        return self.add(op, kind, lanes, operands, arg)

    def _loop(self, i: int, instruction: Instruction) -> int:
        op, _, lanes, src, arg = instruction
        whole = all(fits(self.interval[s]) for s in src[:2]) and self.interval[i][1] + arg <= _HIGH
        kind = _I32 if whole else _INDEX
        bounds = [self._as(s, kind) for s in src[:2]]
        return self.add(op, kind, lanes, (*bounds, *[self._carried(s) for s in src[2:]]), arg)

    def _carried(self, s: int) -> int:
        """Return a value that a loop carries. Carried indices are not narrowed, because their later values are unknown."""
        return self._as(s, _INDEX) if self.code[s].dtype is _INDEX else self.at[s]

    def _division(self, i: int, instruction: Instruction) -> int:
        op, _, lanes, src, arg = instruction
        if not all(fits(self.interval[s]) for s in (*src, i)):
            return self.add(op, _INDEX, lanes, tuple([self._as(s, _INDEX) for s in src]), arg)
        positive = self.interval[src[0]][0] >= 0 and self.interval[src[1]][0] >= 1
        if not positive:
            return self.add(op, _I32, lanes, tuple([self._as(s, _I32) for s in src]), arg)
        divided = self.add(op, _U32, lanes, tuple([self._as(s, _U32) for s in src]), arg)
        return self._cast(divided, _I32)

    def _other(self, instruction: Instruction) -> int:
        """Copy an instruction that does not compute an index. Its operands keep their narrowed types, except carried values and operands of
        BITCAST."""
        op, dtype, lanes, src, arg = instruction
        if op == "ENDLOOP":
            return self.add(op, dtype, lanes, (self.at[src[0]], *[self._carried(s) for s in src[1:]]), arg)
        whole = op == "BITCAST" and self.code[src[0]].dtype is _INDEX
        return self.add(op, dtype, lanes, (self._as(src[0], _INDEX),) if whole else tuple([self.at[s] for s in src]), arg)


def narrow_indices(phase: PhaseSpec, code: tuple[Instruction, ...]) -> tuple[Instruction, ...]:
    """Return the code of a phase that is launched as groups, with index values as int32 if they fit."""
    return tuple(_Narrowing(phase, code).run())
