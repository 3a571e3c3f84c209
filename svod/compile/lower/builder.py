"""The LINEAR builder. It hash-conses values per loop level: each value is placed at the outermost level at which all its operands are
available.

Instructions are kept in parallel lists while a phase is built, and flattened at the end. An operation on the same operands is emitted once
per scope; constants of index arithmetic are folded. `floor` keeps a load inside a loop level, so that it does not move above the stores
that it reads from.
"""
from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable
from math import gcd
from typing import Any

from svod.compile.lower.program import Instruction
from svod.core.ir.dtype import DType, dtypes
from svod.core.machine.levels import CACHE_LINE_BYTES
from svod.errors import ProgramTooLong

_INDEX = dtypes.index
_BOOL = dtypes.bool
MOST_FREQUENT = 8     # number of operations, the most frequent ones, that the error of a too long program lists


class Builder:
    """Builds the LINEAR of one phase. Values are ints, valid until the loop in which they were created is closed. An instruction beyond the
    first `most` raises ProgramTooLong, so that a program that is too long is abandoned early."""

    def __init__(self, most: int = sys.maxsize) -> None:
        self.most = most
        self.op: list[str] = []
        self.dtype: list[DType] = []
        self.num_lanes: list[int] = []
        self.src: list[tuple[int, ...]] = []
        self.arg: list[Any] = []
        self.level_of: list[int] = []
        self.code: list[list[int]] = [[]]
        self.memo: list[dict[tuple[Any, ...], int]] = [{}]
        self.indices: dict[int, int] = {}       # constants of index arithmetic: number → value
        self.multiples: dict[int, int] = {}     # value → its `multiple_of`, cached
        self.open_loops: list[int] = []
        self.round = 0          # unrolled iteration of a reduce loop that does not share its loads with the others; 0: it does
        self.kept_ops: frozenset[str] = frozenset()     # operations whose instructions are put into `kept`, and written later
        self.kept: list[Instruction] = []

    # -- primitives -----------------------------------------------------------------------------
    @property
    def level(self) -> int:
        """The number of open loops."""
        return len(self.code) - 1

    def _new(self, op: str, dtype: DType, lanes: int, src: tuple[int, ...], arg: Any, level: int) -> int:
        n = len(self.op)
        if n >= self.most:
            most = ", ".join(f"{count} {op}" for op, count in Counter(self.op).most_common(MOST_FREQUENT))
            raise ProgramTooLong(f"it has more instructions than it may have; this phase has {most} so far")
        self.op.append(op)
        self.dtype.append(dtype)
        self.num_lanes.append(lanes)
        self.src.append(src)
        self.arg.append(arg)
        self.level_of.append(level)
        self.code[level].append(n)
        return n

    def pure(self, op: str, dtype: DType, lanes: int, src: tuple[int, ...], arg: Any = None, floor: int = 0, version: int = 0) -> int:
        """Emit an operation without side effects, at the level of its innermost operand, or at level `floor` if that is further in. Equal
        operations of one `version` share a value."""
        level = floor
        for s in src:
            x = self.level_of[s]
            if x > level:
                level = x
        key = (op, dtype.name, lanes, src, arg, version)
        memo = self.memo[level]
        value = memo.get(key)
        if value is None:
            value = memo[key] = self._new(op, dtype, lanes, src, arg, level)
        return value

    def type_of(self, v: int) -> tuple[DType, int]:
        return self.dtype[v], self.num_lanes[v]

    # -- constants ------------------------------------------------------------------------------
    def const(self, dtype: DType, lanes: int, value: bool | int | float) -> int:
        memo = self.memo[0]
        given = ("CONST", dtype.name, lanes, value if type(value) is int else repr(value))   # repr keeps 0.0 and -0.0 apart
        n = memo.get(given)
        if n is None:
            value = bool(value) if dtype.kind == "b" else float(value) if dtype.is_float else int(value)
            key = ("CONST", dtype.name, lanes, value if type(value) is int else repr(value))
            n = memo.get(key)
            if n is None:
                n = memo[key] = self._new("CONST", dtype, lanes, (), value, 0)
            memo[given] = n
        return n

    def vconst(self, dtype: DType, values: tuple[int | bool, ...]) -> int:
        if all(v == values[0] for v in values):
            return self.const(dtype, len(values), values[0])
        return self.pure("VCONST", dtype, len(values), (), values)

    def index(self, value: int) -> int:
        index = self.indices.get(value)
        if index is None:
            index = self.indices[value] = self.const(_INDEX, 1, value)
        return index

    def known(self, v: int) -> Any:
        """The Python value of a constant that is the same in all lanes; None for other values."""
        return self.arg[v] if self.op[v] == "CONST" else None

    def _elements(self, v: int, lanes: int) -> tuple[Any, ...] | None:
        if self.op[v] == "CONST":
            return (self.arg[v],) * lanes
        return self.arg[v] if self.op[v] == "VCONST" else None

    # -- arithmetic -----------------------------------------------------------------------------
    def splat(self, v: int, lanes: int) -> int:
        if self.num_lanes[v] == lanes:
            return v
        if self.op[v] == "CONST":
            return self.const(self.dtype[v], lanes, self.arg[v])
        return self.pure("SPLAT", self.dtype[v], lanes, (v,))

    def alu(self, op: str, dtype: DType, lanes: int, *args: int) -> int:
        """Emit an elementwise operation of result type (dtype, lanes). Scalar operands are broadcast."""
        if self.dtype[args[-1]] is _INDEX or dtype is _BOOL:
            folded = self._fold(op, dtype, lanes, args)
            if folded is not None:
                return folded
        if lanes > 1:
            for a in args:
                if self.num_lanes[a] != lanes:
                    args = tuple([a if self.num_lanes[a] == lanes else self.splat(a, lanes) for a in args])
                    break
        return self.pure(op, dtype, lanes, args)

    def _fold(self, op: str, dtype: DType, lanes: int, args: tuple[int, ...]) -> int | None:
        """Fold constants and apply identities of index arithmetic and masks."""
        fn = _FOLD.get(op)
        if fn is None:
            condition = self.known(args[0]) if op == "WHERE" else None
            return None if condition is None else self.splat(args[1] if condition else args[2], lanes)
        if len(args) == 2:
            return self._fold_pair(op, fn, dtype, lanes, *args)
        elements = self._elements(args[0], lanes)
        return self.vconst(dtype, tuple(fn(x) for x in elements)) if elements is not None else None

    def _fold_pair(self, op: str, fn: Callable[..., Any], dtype: DType, lanes: int, a: int, b: int) -> int | None:
        is_known_a, is_known_b = self.op[a] == "CONST", self.op[b] == "CONST"
        if is_known_a and is_known_b:
            return self.const(dtype, lanes, fn(self.arg[a], self.arg[b]))
        if (is_known_a or is_known_b) and (dtype is _BOOL or op in ("ADD", "MUL")):
            known, other = (self.arg[a], b) if is_known_a else (self.arg[b], a)
            if known == _NEUTRAL.get(op):
                return self.splat(other, lanes)
            if known == _ABSORBING.get(op):
                return self.const(dtype, lanes, known)
        if is_known_b and op == "MOD" and lanes == 1 and self.arg[b] > 0 and self.multiple_of(a) % self.arg[b] == 0:
            return self.index(0)
        if is_known_b and op in ("IDIV", "MOD") and lanes == 1 and self.op[a] == "ADD" and self.op[self.src[a][1]] == "CONST":
            return self._divide_sum(op, self.src[a][0], self.src[a][1], self.arg[b])
        elements_a = self._elements(a, lanes)
        elements_b = self._elements(b, lanes) if elements_a is not None else None
        if elements_a is None or elements_b is None:
            return None
        return self.vconst(dtype, tuple(map(fn, elements_a, elements_b)))

    def _divide_sum(self, op: str, v: int, added: int, divisor: int) -> int | None:
        """(v + added) divided by `divisor`, or the remainder, if `v` is a multiple of it: both are then known but for v // divisor. None if
        it is not, or if `added` is negative."""
        k = self.arg[added]
        if k < 0 or divisor <= 0 or self.multiple_of(v) % divisor:
            return None
        if op == "MOD":
            return self.index(k % divisor)
        return self.add(self.alu("IDIV", _INDEX, 1, v, self.index(divisor)), self.index(k // divisor))

    def cast(self, dtype: DType, v: int) -> int:
        """Convert `v` to another type. A float beyond the range of an integer type wraps, as in NumPy: a conversion instruction alone gives
        results that differ between machines, even between vectors and scalars. So conversion to a short or unsigned type passes through a
        wider or signed one."""
        if self.dtype[v] == dtype:
            return v
        if self.dtype[v].is_float and dtype.kind in "iu" and dtype.bits < 32:
            return self.cast(dtype, self.cast(dtypes.int32, v))
        if self.dtype[v].is_float and dtype.kind == "u":
            lanes, signed = self.num_lanes[v], dtypes.int32 if dtype.bits == 32 else dtypes.int64
            negative = self.alu("CMPLT", _BOOL, lanes, v, self.const(self.dtype[v], lanes, 0.0))
            wrapped, held = self.cast(dtype, self.cast(signed, v)), self.pure("CAST", dtype, lanes, (v,))
            return self.alu("WHERE", dtype, lanes, negative, wrapped, held)
        k = self.known(v)
        exact = dtype == dtypes.float32 or dtype == dtypes.float64 or dtype is _INDEX
        if k is not None and exact and self.dtype[v].kind in "iub" and abs(k) < 1 << 24:
            return self.const(dtype, self.num_lanes[v], k)
        return self.pure("CAST", dtype, self.num_lanes[v], (v,))

    def bitcast(self, dtype: DType, v: int) -> int:
        """Reinterpret the bits of `v` as another type: more lanes of narrower elements, or fewer of wider ones."""
        if self.dtype[v] == dtype:
            return v
        return self.pure("BITCAST", dtype, self.num_lanes[v] * self.dtype[v].itemsize // dtype.itemsize, (v,))

    def add(self, a: int, b: int) -> int:
        return self.alu("ADD", _INDEX, 1, a, b)

    def mul(self, a: int, k: int) -> int:
        return self.alu("MUL", _INDEX, 1, a, self.index(k))

    def multiple_of(self, v: int) -> int:
        """A number that divides the scalar index `v` in every iteration; 0 for the constant 0. Cached."""
        if v not in self.multiples:
            self.multiples[v] = self._compute_multiple(v)
        return self.multiples[v]

    def _compute_multiple(self, v: int) -> int:
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
        """Emit a load at loop level `floor` or further in. An `ordered` load stays where it is emitted and is never merged with an equal
        one. Loads of different `version` are not merged, as the memory was written between them, and loads of the innermost loop of
        different `round` are not merged either."""
        if ordered:
            return self._new(op, dtype, lanes, src, arg, self.level)
        if self.round and (floor == self.level or any(self.level_of[s] == self.level for s in src)):
            version += self.round << 32
        return self.pure(op, dtype, lanes, src, arg, floor, version)

    def prefetch(self, load: int, further: int) -> None:
        """Prefetch the cache lines that a LOAD or LOADS would read `further` elements later; do nothing if `further` is 0. Within an
        iteration, each line is prefetched once. An address may lie outside the argument: the instruction then does nothing."""
        if not further or self.op[load] not in ("LOAD", "LOADS"):
            return
        dtype, level, (pointer, index), arg = self.dtype[load], self.level_of[load], self.src[load][:2], self.arg[load]
        offset, stride = arg if self.op[load] == "LOADS" else (arg, 1)
        for lane in range(self.num_lanes[load]):
            element = offset + lane * stride + further
            key = ("PREFETCH", pointer, index, element * dtype.itemsize // CACHE_LINE_BYTES)
            if key not in self.memo[level]:
                self.memo[level][key] = self._new("PREFETCH", dtype, 1, (pointer, index), element, level)

    def store(self, op: str, dtype: DType, lanes: int, src: tuple[int, ...], arg: Any) -> None:
        if op in self.kept_ops:
            self.kept.append(Instruction(op, dtype, lanes, src, arg))
        else:
            self._new(op, dtype, lanes, src, arg, self.level)

    # -- loops ----------------------------------------------------------------------------------
    def open(self, start: int, stop: int, step: int, init: tuple[int, ...] = ()) -> tuple[int, list[int]]:
        """Open a loop; returns its index value and the carried values."""
        self.code.append([])
        self.memo.append({})
        loop = self._new("LOOP", _INDEX, 1, (start, stop, *init), step, self.level)
        self.open_loops.append(loop)
        carried = [self._new("CARRY", self.dtype[v], self.num_lanes[v], (loop,), j, self.level) for j, v in enumerate(init)]
        return loop, carried

    def close(self, loop: int, following: tuple[int, ...] = ()) -> list[int]:
        """Close the innermost loop; returns the final carried values."""
        self._new("ENDLOOP", dtypes.void, 1, (loop, *following), None, self.level)
        self.open_loops.pop()
        body = self.code.pop()
        self.memo.pop()
        self.code[-1].extend(body)
        return [self._new("RESULT", self.dtype[v], self.num_lanes[v], (loop,), j, self.level) for j, v in enumerate(following)]

    def finish(self) -> tuple[Instruction, ...]:
        """Return the phase's instructions in one list, with values renumbered to their positions in it."""
        order = self.code[0]
        position = [0] * len(self.op)
        for i, v in enumerate(order):
            position[v] = i
        op, dtype, lanes, src, arg = self.op, self.dtype, self.num_lanes, self.src, self.arg
        number, new = position.__getitem__, tuple.__new__      # takes a third of the time of calling Instruction(…)
        return tuple([new(Instruction, (op[v], dtype[v], lanes[v], tuple(map(number, src[v])), arg[v])) for v in order])


_NEUTRAL = {"ADD": 0, "MUL": 1, "AND": True, "OR": False}
_ABSORBING = {"MUL": 0, "AND": False, "OR": True}
_FOLD: dict[str, Callable[..., Any]] = {
    "ADD": lambda a, b: a + b, "SUB": lambda a, b: a - b, "MUL": lambda a, b: a * b,
    "IDIV": lambda a, b: a // b if b else 0, "MOD": lambda a, b: a % b if b else 0,
    "MIN": min, "MAX": max, "CMPLT": lambda a, b: a < b, "CMPLE": lambda a, b: a <= b,
    "CMPEQ": lambda a, b: a == b, "CMPNE": lambda a, b: a != b,
    "AND": lambda a, b: a & b, "OR": lambda a, b: a | b, "XOR": lambda a, b: a ^ b,
    "NOT": lambda a: not a, "NEG": lambda a: -a,
}
