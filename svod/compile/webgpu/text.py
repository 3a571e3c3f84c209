"""WGSL registers: how a shader represents the values of LINEAR.

    float32 × 4    one vec4<f32>              float32 × 7    two chunks: a vec4<f32> and a vec3<f32>
    int8 × 2       one vec2<i32>, each number wrapped to eight bits after every operation
    float16        f32, rounded to a float16 number after every operation; bfloat16 in the same way
    index          i32: `svod.compile.webgpu.render` checks that arguments are small enough for 32-bit indices
"""
from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

from svod.compile.lower.program import Instruction, PhaseSpec, ProgramSpec
from svod.compile.lower.residues import Residue
from svod.core.ir.dtype import DType, dtypes
from svod.core.machine.target import Target
from svod.core.spec.values import constant
from svod.errors import CompileError, UnsupportedError

REGISTER_TYPES = {
    "bool": "bool", "int8": "i32", "int16": "i32", "int32": "i32", "index": "i32", "int64": "i64",
    "uint8": "u32", "uint16": "u32", "uint32": "u32", "uint64": "u64",
    "float16": "f32", "bfloat16": "f32", "float32": "f32", "float64": "f64",
}
COMPONENTS = "xyzw"
CHUNK_LANES = 4     # lanes of a chunk
FEATURES = {"int64": "int64", "uint64": "int64", "float64": "float64"}
"""Dtype → the feature that a target needs for it (`Target.features`)."""


def widths(lanes: int) -> list[int]:
    """Return the lanes of each chunk of a value."""
    return [CHUNK_LANES] * (lanes // CHUNK_LANES) + ([lanes % CHUNK_LANES] if lanes % CHUNK_LANES else [])


def vector(scalar: str, width: int) -> str:
    """Return the type of a chunk."""
    return scalar if width == 1 else f"vec{width}<{scalar}>"


def register(dtype: DType, width: int) -> str:
    """Return the type of a chunk of values of a dtype."""
    return vector(REGISTER_TYPES[dtype.name], width)


def splat(scalar: str, width: int, value: str) -> str:
    """Broadcast a scalar to all lanes of a chunk."""
    return value if width == 1 else f"vec{width}<{scalar}>({value})"


def word(value: int, width: int) -> str:
    """Broadcast a u32 to all lanes."""
    return splat("u32", width, f"{value}u")


def lane(chunks: Sequence[str], lanes: int, k: int) -> str:
    """Return one lane of a value."""
    width = min(CHUNK_LANES, lanes - k // CHUNK_LANES * CHUNK_LANES)
    text = chunks[k // CHUNK_LANES]
    return text if width == 1 else f"{text}.{COMPONENTS[k % CHUNK_LANES]}"


class Facts(NamedTuple):
    """Facts about the instructions of a phase. `hidden`: the operands whose values are hidden from compilers, as (instruction, number of
    the operand); `residue`: the residue of each instruction's value."""

    hidden: frozenset[tuple[int, int]]
    residue: Sequence[Residue]


@dataclass
class WgslWriter:
    """The text of a phase while it is written. `value[i]`: the chunks of instruction i, each a name or a literal without side effects.
    `aligned`: whether arguments are aligned to vectors of 16 bytes."""

    target: Target
    spec: ProgramSpec
    phase: PhaseSpec
    code: Sequence[Instruction]
    facts: Facts
    aligned: bool
    lines: list[str] = field(default_factory=list)
    depth: int = 1
    value: list[list[str]] = field(default_factory=list)
    helpers: dict[str, str] = field(default_factory=dict)
    hides: bool = False
    uses_half: bool = False
    names: int = 0
    loaded: list[dict[str, str]] = field(default_factory=lambda: [{}])      # per open block: expression read there → its name

    def line(self, text: str) -> None:
        self.lines.append("  " * self.depth + text)

    def let(self, text: str) -> str:
        """Make a name for a value that is computed here."""
        self.names += 1
        self.lines.append(f"{'  ' * self.depth}let t{self.names} = {text};")
        return f"t{self.names}"

    def open(self, text: str) -> None:
        """Begin a block."""
        self.line(text)
        self.depth += 1
        self.loaded.append({})

    def close(self) -> None:
        """End the innermost block."""
        self.loaded.pop()
        self.depth -= 1
        self.line("}")

    def let_once(self, text: str) -> str:
        """Return the name of a value that stays the same in this phase: the name that this or an enclosing block already has for it, or a
        new one."""
        for block in self.loaded:
            if text in block:
                return block[text]
        self.loaded[-1][text] = self.let(text)
        return self.loaded[-1][text]

    def launch_number(self, at: int) -> str:
        """Return one of the numbers of a launch: begin, end, the variables, the start of each argument."""
        return f"launch[{at // CHUNK_LANES}].{COMPONENTS[at % CHUNK_LANES]}"

    def has(self, feature: str) -> bool:
        return feature in self.target.features

    def helper(self, name: str, text: Callable[[], str]) -> str:
        """Return the name of a function of the module, which is written once."""
        if name not in self.helpers:
            self.helpers[name] = ""         # reserves its place, before the code that needs it
            made = text()
            del self.helpers[name]
            self.helpers[name] = made
        return name

    def require(self, dtype: DType) -> None:
        """Raise UnsupportedError for a type that the adapter does not compute with."""
        feature = FEATURES.get(dtype.name)
        if feature is not None and not self.has(feature):
            raise UnsupportedError(f"{dtype.name} on {self.target.device}: the adapter {self.target.cpu} has no numbers of 64 bits "
                                   f"({feature}); cast to {narrower(dtype)}, or run on the CPU (unset SVOD_DEVICE)")

    # -- numbers ----------------------------------------------------------------------------------
    def literal(self, dtype: DType, value: Any) -> str:
        """Write a scalar constant."""
        if dtype.kind == "b":
            return "true" if value else "false"
        if dtype.kind == "f":
            return self._float(dtype, float(value))
        kind = REGISTER_TYPES[dtype.name]
        number = int(value)
        if dtype.name == "index" and not -1 << 31 <= number < 1 << 31:
            raise UnsupportedError(f"the index {number}: {self.target.device} computes indices in 32 bits; use smaller numbers in ranges, "
                                   "or the CPU (unset SVOD_DEVICE)")
        if kind == "i32":
            return "i32(-2147483648)" if number == -1 << 31 else f"{number}i" if number >= 0 else f"({number}i)"
        if kind == "i64":
            return f"(-{(1 << 63) - 1}li - 1li)" if number == -1 << 63 else f"{number}li" if number >= 0 else f"({number}li)"
        return f"{number}{'u' if kind == 'u32' else 'lu'}"

    def _float(self, dtype: DType, value: float) -> str:
        value = float(constant(dtype, value))       # a 16-bit number is in a 32-bit register
        if not math.isfinite(value) or (dtype.bits <= 32 and not np.isfinite(np.float32(value))):
            self.hides = True
            text = f"bitcast<f32>({'0x7fc00000u' if math.isnan(value) else '0x7f800000u' if value > 0 else '0xff800000u'} | unknown)"
            return f"f64({text})" if dtype.bits == 64 else text
        if dtype.bits == 64:
            text = repr(value)
            return f"({text}lf)" if value < 0 or text.startswith("-") else f"{text}lf"
        single = np.float32(value)
        if single != 0 and abs(single) < np.float32(2.0**-126):
            return f"bitcast<f32>({int(single.view(np.uint32))}u)"
        text = repr(float(np.format_float_scientific(single, unique=True)))
        return f"({text}f)" if text.startswith("-") else f"{text}f"

    def hide(self, dtype: DType, width: int, text: str) -> str:
        """Hide a chunk of floats from compilers, so that they know nothing of its value."""
        self.hides = True
        if REGISTER_TYPES[dtype.name] == "f64":
            return self.let(f"select({text}, -({text}), unknown != 0u)")
        bits = splat("u32", width, "unknown")
        return self.let(f"bitcast<{vector('f32', width)}>(bitcast<{vector('u32', width)}>({text}) | {bits})")

    def constant(self, dtype: DType, width: int, value: Any) -> str:
        """Write a constant in all lanes of a chunk."""
        return splat(REGISTER_TYPES[dtype.name], width, self.literal(dtype, value))


def narrower(dtype: DType) -> str:
    """Return the 32-bit type of the same kind."""
    return {"f": dtypes.float32, "i": dtypes.int32, "u": dtypes.uint32}[dtype.kind].name


def refuse(op: str, dtype: DType, why: str) -> CompileError:
    return CompileError(f"{op} of {dtype.name}: {why}")
