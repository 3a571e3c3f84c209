"""The LINEAR builder: hash-consed per loop level, so that each value stands at the level where its last dependency appears.

Instructions are kept in parallel lists while a phase is built and flattened once at the end. An operation on the same operands
is emitted once per scope; constants of index arithmetic are folded. Loads may be held below a level (`floor`), so that they do
not move above the stores they read from.
"""
from __future__ import annotations

from math import gcd
from typing import Any

from svod.compile.lower.program import Instr
from svod.core.ir.dtype import DType, dtypes

_INDEX = dtypes.index
_BOOL = dtypes.bool


class Builder:
    """Builds the LINEAR of one phase. Values are ints, valid until the loop they were made in is closed."""

    def __init__(self) -> None:
        self.op: list[str] = []
        self.dtype: list[DType] = []
        self.lanes: list[int] = []
        self.src: list[tuple[int, ...]] = []
        self.arg: list[Any] = []
        self.level_of: list[int] = []
        self.code: list[list[int]] = [[]]
        self.memo: list[dict[tuple[Any, ...], int]] = [{}]
        self.round = 0

    # -- primitives -----------------------------------------------------------------------------
    @property
    def level(self) -> int:
        """How many loops are open."""
        return len(self.code) - 1

    def _new(self, op: str, dtype: DType, lanes: int, src: tuple[int, ...], arg: Any, level: int) -> int:
        self.op.append(op)
        self.dtype.append(dtype)
        self.lanes.append(lanes)
        self.src.append(src)
        self.arg.append(arg)
        self.level_of.append(level)
        n = len(self.op) - 1
        self.code[level].append(n)
        return n

    def pure(self, op: str, dtype: DType, lanes: int, src: tuple[int, ...], arg: Any = None, floor: int = 0, version: int = 0) -> int:
        """A value without side effects, at the level of its last operand (at least `floor`); the same one twice (of one `version`) is
        one."""
        level = floor
        for s in src:
            x = self.level_of[s]
            if x > level:
                level = x
        key = (op, dtype.name, lanes, src, arg, version)
        memo = self.memo[level]
        found = memo.get(key)
        if found is None:
            found = memo[key] = self._new(op, dtype, lanes, src, arg, level)
        return found

    def type_of(self, v: int) -> tuple[DType, int]:
        return self.dtype[v], self.lanes[v]

    # -- constants ------------------------------------------------------------------------------
    def const(self, dtype: DType, lanes: int, value: bool | int | float) -> int:
        value = bool(value) if dtype.kind == "b" else float(value) if dtype.is_float else int(value)
        memo = self.memo[0]
        key = ("CONST", dtype.name, lanes, repr(value))   # repr keeps 0.0 and -0.0 apart
        found = memo.get(key)
        if found is None:
            found = memo[key] = self._new("CONST", dtype, lanes, (), value, 0)
        return found

    def vconst(self, dtype: DType, values: tuple[int | bool, ...]) -> int:
        if all(v == values[0] for v in values):
            return self.const(dtype, len(values), values[0])
        return self.pure("VCONST", dtype, len(values), (), values)

    def index(self, value: int) -> int:
        return self.const(_INDEX, 1, value)

    def known(self, v: int) -> Any:
        """The Python value of a scalar or splat constant, else None."""
        return self.arg[v] if self.op[v] == "CONST" else None

    def _elements(self, v: int, lanes: int) -> tuple[Any, ...] | None:
        if self.op[v] == "CONST":
            return (self.arg[v],) * lanes
        return self.arg[v] if self.op[v] == "VCONST" else None

    # -- arithmetic -----------------------------------------------------------------------------
    def splat(self, v: int, lanes: int) -> int:
        if self.lanes[v] == lanes:
            return v
        if self.op[v] == "CONST":
            return self.const(self.dtype[v], lanes, self.arg[v])
        return self.pure("SPLAT", self.dtype[v], lanes, (v,))

    def alu(self, op: str, dtype: DType, lanes: int, *args: int) -> int:
        """An elementwise operation of result type (dtype, lanes); scalar operands are splat."""
        if self.dtype[args[-1]] is _INDEX or dtype is _BOOL:
            folded = self._fold(op, dtype, lanes, args)
            if folded is not None:
                return folded
        if lanes > 1:
            args = tuple(a if self.lanes[a] == lanes else self.splat(a, lanes) for a in args)
        return self.pure(op, dtype, lanes, args)

    def _fold(self, op: str, dtype: DType, lanes: int, args: tuple[int, ...]) -> int | None:
        """Constant folding and identities of index arithmetic and masks."""
        if op == "WHERE":
            c = self.known(args[0])
            if c is None:
                return None
            chosen = args[1] if c else args[2]
            return chosen if self.lanes[chosen] == lanes else self.splat(chosen, lanes)
        fn = _FOLD.get(op)
        if fn is None:
            return None
        if len(args) == 2:
            a, b = args
            ka, kb = self.known(a), self.known(b)
            if ka is not None and kb is not None:
                return self.const(dtype, lanes, fn(ka, kb))
            if (op == "ADD" and (ka == 0 or kb == 0)) or (op == "MUL" and (ka == 1 or kb == 1)):
                other = b if ka is not None and ka == (0 if op == "ADD" else 1) else a
                return self.splat(other, lanes)
            if op == "MUL" and (ka == 0 or kb == 0):
                return self.const(dtype, lanes, 0)
            if op in ("AND", "OR") and dtype is _BOOL and (ka is not None or kb is not None):
                k, other = (ka, b) if ka is not None else (kb, a)
                if k is (op == "OR"):
                    return self.const(dtype, lanes, bool(k))
                return self.splat(other, lanes)
            ea, eb = self._elements(a, lanes), self._elements(b, lanes)
            if ea is not None and eb is not None:
                return self.vconst(dtype, tuple(fn(x, y) for x, y in zip(ea, eb, strict=True)))
            return None
        e = self._elements(args[0], lanes)
        return self.vconst(dtype, tuple(fn(x) for x in e)) if e is not None else None

    def cast(self, dtype: DType, v: int) -> int:
        if self.dtype[v] == dtype:
            return v
        k = self.known(v)
        exact = dtype == dtypes.float32 or dtype == dtypes.float64 or dtype is _INDEX
        if k is not None and exact and self.dtype[v].kind in "iub" and abs(k) < 1 << 24:
            return self.const(dtype, self.lanes[v], k)
        return self.pure("CAST", dtype, self.lanes[v], (v,))

    def bitcast(self, dtype: DType, v: int) -> int:
        """The bits of `v` as another type; more or fewer lanes where its elements are narrower or wider."""
        return v if self.dtype[v] == dtype else self.pure("BITCAST", dtype, self.lanes[v] * self.dtype[v].itemsize // dtype.itemsize, (v,))

    def add(self, a: int, b: int) -> int:
        return self.alu("ADD", _INDEX, 1, a, b)

    def mul(self, a: int, k: int) -> int:
        return self.alu("MUL", _INDEX, 1, a, self.index(k))

    def multiple_of(self, v: int) -> int:
        """A number that divides the scalar index `v` whatever the loops count; 0 for the constant 0."""
        op, src = self.op[v], self.src[v]
        if op == "CONST":
            return abs(int(self.arg[v]))
        if op == "LOOP":
            return gcd(self.multiple_of(src[0]), self.arg[v])
        if op == "MUL":
            return self.multiple_of(src[0]) * self.multiple_of(src[1])
        if op in ("ADD", "SUB", "MIN", "MAX"):
            return gcd(self.multiple_of(src[0]), self.multiple_of(src[1]))
        return 1

    # -- memory ---------------------------------------------------------------------------------
    def load(self, op: str, dtype: DType, lanes: int, src: tuple[int, ...], arg: Any, floor: int = 0, ordered: bool = False,
             version: int = 0) -> int:
        """A load at or below level `floor`; an `ordered` one stays where it is asked for and is never merged. Loads of different
        `version` are not the same either: the memory was written again between them; nor are loads of different rounds in the innermost
        loop, while `round` counts them: a value that waited for the next round would take a register."""
        if ordered:
            return self._new(op, dtype, lanes, src, arg, self.level)
        if self.round and (floor == self.level or any(self.level_of[s] == self.level for s in src)):
            version += self.round << 32
        return self.pure(op, dtype, lanes, src, arg, floor, version)

    def store(self, op: str, dtype: DType, lanes: int, src: tuple[int, ...], arg: Any) -> None:
        self._new(op, dtype, lanes, src, arg, self.level)

    # -- loops ----------------------------------------------------------------------------------
    def open(self, start: int, stop: int, step: int, init: tuple[int, ...] = ()) -> tuple[int, list[int]]:
        """Open a loop; returns its index value and the carried values."""
        self.code.append([])
        self.memo.append({})
        loop = self._new("LOOP", _INDEX, 1, (start, stop, *init), step, self.level)
        carried = [self._new("CARRY", self.dtype[v], self.lanes[v], (loop,), j, self.level) for j, v in enumerate(init)]
        return loop, carried

    def close(self, loop: int, following: tuple[int, ...] = ()) -> list[int]:
        """Close the innermost loop; returns the final carried values."""
        self._new("ENDLOOP", dtypes.void, 1, (loop, *following), None, self.level)
        body = self.code.pop()
        self.memo.pop()
        self.code[-1].extend(body)
        return [self._new("RESULT", self.dtype[v], self.lanes[v], (loop,), j, self.level) for j, v in enumerate(following)]

    def finish(self) -> tuple[Instr, ...]:
        """The flat instruction list; values are renumbered to positions."""
        order = self.code[0]
        position = {v: i for i, v in enumerate(order)}
        op, dtype, lanes, src, arg = self.op, self.dtype, self.lanes, self.src, self.arg
        return tuple((op[v], dtype[v], lanes[v], tuple([position[s] for s in src[v]]), arg[v]) for v in order)


_FOLD: dict[str, Any] = {
    "ADD": lambda a, b: a + b, "SUB": lambda a, b: a - b, "MUL": lambda a, b: a * b,
    "IDIV": lambda a, b: a // b if b else 0, "MOD": lambda a, b: a % b if b else 0,
    "MIN": min, "MAX": max, "CMPLT": lambda a, b: a < b, "CMPLE": lambda a, b: a <= b,
    "CMPEQ": lambda a, b: a == b, "CMPNE": lambda a, b: a != b,
    "AND": lambda a, b: a & b, "OR": lambda a, b: a | b, "XOR": lambda a, b: a ^ b,
    "NOT": lambda a: not a, "NEG": lambda a: -a,
}
