"""A phase while its instructions are rewritten to legal ones: the instructions written so far, and the methods by which rules add more."""
from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from svod.compile.lower.intervals import Interval, intervals
from svod.compile.lower.legal.instructions import Instructions
from svod.compile.lower.program import Instruction, PhaseSpec
from svod.core.ir.dtype import DType, dtypes

BOOL = dtypes.bool


class Rewriting:
    """Rewrites a phase instruction by instruction: each instruction is kept, or a rule replaces it by others that compute the same value.
    Values are positions in `out`.

    An instruction that a rule adds is emitted once per scope: an equal one in an open loop is reused."""

    def __init__(self, phase: PhaseSpec, code: Sequence[Instruction], instructions: Instructions, rule_of: RuleOf) -> None:
        self.phase, self.code, self.instructions, self.rule_of = phase, code, instructions, rule_of
        self.out: list[Instruction] = []
        self.at: list[int] = []                                 # instruction of `code` → the position of its value in `out`
        self.made: list[dict[tuple[Any, ...], int]] = [{}]      # per open loop: instruction added by a rule → its position
        self._moved = False                                     # whether a value is at another position in `out` than in `code`
        self._intervals: list[Interval] | None = None

    def run(self) -> list[Instruction]:
        """Rewrite the phase; returns its instructions."""
        for position, instruction in enumerate(self.code):
            value = self.rewritten(instruction)
            self._moved |= value != position
            self.at.append(value)
            if instruction.op == "LOOP":
                self.made.append({})
            elif instruction.op == "ENDLOOP":
                self.made.pop()
        return self.out

    def rewritten(self, instruction: Instruction) -> int:
        """Rewrite the next instruction of `code`; returns its value."""
        op, dtype, lanes, src, arg = instruction
        if self._moved:
            return self.add(op, dtype, lanes, tuple([self.at[s] for s in src]), arg)
        if self.rule_of(op, dtype, self.out[src[0]].dtype if src else dtype) is not None:
            return self.add(op, dtype, lanes, src, arg)
        self.out.append(instruction)
        return len(self.out) - 1

    def add(self, op: str, dtype: DType, lanes: int, src: tuple[int, ...], arg: Any = None) -> int:
        """Add an instruction on values of `out`, or the instructions that its rule replaces it by; returns its value."""
        rule = self.rule_of(op, dtype, self.out[src[0]].dtype if src else dtype)
        value = rule(self, op, dtype, lanes, src, arg) if rule is not None else None
        if value is None:
            self.out.append(Instruction(op, dtype, lanes, src, arg))
            value = len(self.out) - 1
        return value

    def least(self, k: int) -> int:
        """Return the minimum value of operand k, an index, of the instruction that is currently rewritten."""
        if self._intervals is None:
            self._intervals = intervals(self.phase, self.code)
        return self._intervals[self.code[len(self.at)].src[k]][0]

    # -- instructions that rules add --------------------------------------------------------------
    def put(self, op: str, dtype: DType, lanes: int, *src: int, arg: Any = None) -> int:
        """Add an instruction for a rule; it is rewritten in turn if the renderer does not print it. Returns its value."""
        key = (op, dtype.name, lanes, src, repr(arg))
        for scope in self.made:
            if key in scope:
                return scope[key]
        value = self.made[-1][key] = self.add(op, dtype, lanes, src, arg)
        return value

    def alu(self, op: str, dtype: DType, lanes: int, *src: int) -> int:
        """Add an elementwise operation; returns its value."""
        return self.put(op, dtype, lanes, *src)

    def const(self, dtype: DType, lanes: int, value: bool | int | float) -> int:
        """Add a constant in all lanes; returns its value."""
        return self.put("CONST", dtype, lanes, arg=value)

    def cast(self, dtype: DType, v: int) -> int:
        """Convert `v` to another type; returns the result."""
        return v if self.out[v].dtype == dtype else self.put("CAST", dtype, self.out[v].lanes, v)

    def bitcast(self, dtype: DType, v: int) -> int:
        """Reinterpret the bits of `v` as another type of the same width; returns the result."""
        return v if self.out[v].dtype == dtype else self.put("BITCAST", dtype, self.out[v].lanes, v)

    def type_of(self, v: int) -> tuple[DType, int]:
        return self.out[v].dtype, self.out[v].lanes

    def known(self, v: int) -> Any:
        """Return the Python value of a constant that is the same in all lanes; None for other values."""
        return self.out[v].arg if self.out[v].op == "CONST" else None

    def elements(self, v: int) -> Sequence[Any]:
        """Return the values of a constant's lanes, only one if all are equal; () if `v` is no constant."""
        op, _, _, _, arg = self.out[v]
        return (arg,) if op == "CONST" else arg if op == "VCONST" else ()


Rule = Callable[[Rewriting, str, DType, int, tuple[int, ...], Any], int | None]
"""A function that adds instructions to compute another one's value, and returns that value; None: the instruction is kept."""
RuleOf = Callable[[str, DType, DType], Rule | None]
"""(operation, dtype, dtype of the first operand) → the rule for such an instruction; None: there is none."""
Rules = Mapping[str, Rule]
