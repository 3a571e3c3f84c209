"""Type names and constants of LLVM text, and the state of one function while it is written.

The types of a dtype in registers and in memory are listed below. A 16-bit float is represented by its bits: for some operations on half and
bfloat LLVM calls library functions if the target lacks the instruction, and loads, shuffles and selects do not need the float type.

    dtype              register          memory
    bool               i1, <N x i1>      i8, <N x i8>: 0 or 1
    (u)int8 … 64       i8 … i64          the same
    index              i64               the same
    float16, bfloat16  i16, <N x i16>    the same: the bits
    float32, float64   float, double     the same
"""
from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import lru_cache
from typing import Any

import numpy as np

from svod.compile.lower.program import Instruction
from svod.core.ir.dtype import DType
from svod.core.machine.target import Target
from svod.core.spec import values
from svod.errors import CompileError

SCALAR = {
    "bool": "i1", "int8": "i8", "uint8": "i8", "int16": "i16", "uint16": "i16", "int32": "i32", "uint32": "i32", "int64": "i64",
    "uint64": "i64", "index": "i64", "float16": "i16", "bfloat16": "i16", "float32": "float", "float64": "double",
}
INTRINSIC_SUFFIX = {"i1": "i1", "i8": "i8", "i16": "i16", "i32": "i32", "i64": "i64", "float": "f32", "double": "f64"}


@lru_cache(maxsize=4096)
def register_type(name: str, lanes: int) -> str:
    """Return the LLVM type of a register: dtype by name, `lanes` 1 for a scalar."""
    return SCALAR[name] if lanes == 1 else f"<{lanes} x {SCALAR[name]}>"


@lru_cache(maxsize=4096)
def memory_type(name: str, lanes: int) -> str:
    """Return the LLVM type in memory: the register's type, except that a bool takes a byte."""
    return register_type("int8" if name == "bool" else name, lanes)


@lru_cache(maxsize=4096)
def overload(scalar: str, lanes: int) -> str:
    """Return the suffix of intrinsics for a type, e.g. `v16f32` or `f32`."""
    return INTRINSIC_SUFFIX[scalar] if lanes == 1 else f"v{lanes}{INTRINSIC_SUFFIX[scalar]}"


@lru_cache(maxsize=16384)
def _constant(dtype: DType, value: bool | int | float, text: str) -> str:
    number = values.constant(dtype, value)
    if dtype.kind == "b":
        return "true" if number else "false"
    if dtype.is_float and dtype.bits == 16:
        return str(values.unhold(number, dtype).view(np.uint16))
    # LLVM writes a float constant as the bits of the double of the same value
    return f"0x{int(number.astype(np.float64).view(np.uint64)):016X}" if dtype.is_float else str(number)


def constant(dtype: DType, value: bool | int | float) -> str:
    """Return the text of a scalar constant, rounded or wrapped to `dtype`."""
    return _constant(dtype, value, repr(value))     # the repr is part of the cache's key, because 0.0 and -0.0 are equal


def splat(dtype: DType, value: bool | int | float, lanes: int) -> str:
    """Return the text of a vector with a constant in every lane."""
    text = constant(dtype, value)
    return text if lanes == 1 else f"splat ({SCALAR[dtype.name]} {text})"


class Family:
    """The choices in LLVM text that differ between families of targets. The defaults are for CPUs with vector registers."""

    # whether a masked access is inside a branch; otherwise it accesses a private slot, or is one masked instruction
    branches = False
    fences = True               # whether empty statements keep LLVM from merging and moving instructions that lowering has placed
    one_iteration = False       # whether the range BEGIN … END_ is always one iteration
    widest_stride = 6
    """Largest stride for which loads of whole vectors and shuffles cost at most as much as a load and an insert per lane. On Zen 5, for 16
    lanes of float32, in ns per element: stride 2: 0.04 against 0.13, 4: 0.08 against 0.14, 6: 0.17 each, 8: 0.21 each."""

    def alignment(self, w: LlvmWriter, ptr: int, idx: int, offset: int, lanes: int) -> int:
        """Return the known alignment in bytes of the address `ptr[idx + offset]` of `lanes` elements."""
        return self.element_alignment(w, ptr)

    def element_alignment(self, w: LlvmWriter, ptr: int) -> int:
        """Return the known alignment in bytes of the elements at `ptr`. A parameter may lie at any address, as weights do in files, unless
        it is written. Processors load from any address, so the machine code does not change."""
        return 1 if w.code[ptr].op == "ARG" else w.code[ptr].dtype.itemsize

    def loop_metadata(self, w: LlvmWriter, begin: int, end: int) -> str:
        """Return the metadata for the back edge of the loop between these instructions."""
        return ""


PROCESSOR = Family()


class Scope:
    """What the instructions of a scope share with those after them, and with the loops inside. `addresses`: (pointer, index) → address.
    `picked`: (pointer, index, scalar mask, lanes, content) → (offset, address), the choices of an address; `conjunctions`: (mask, lanes) →
    its parts; both as in `memory.py`."""

    def __init__(self, around: Scope | None = None) -> None:
        self.addresses: dict[tuple[int, int], str] = dict(around.addresses) if around is not None else {}
        self.picked: dict[tuple[int, int, str, int, str], tuple[int, str]] = dict(around.picked) if around is not None else {}
        self.conjunctions: dict[tuple[int, int], Any] = dict(around.conjunctions) if around is not None else {}


class LlvmWriter:
    """One function while it is written. `value[i]` is the operand text of instruction i: a register or a constant."""

    def __init__(self, code: tuple[Instruction, ...], target: Target, variables: dict[str, int], temp_base: int,
                 declared: set[str], family: Family = PROCESSOR) -> None:
        self.code = code
        self.target = target
        self.family = family
        self.variables = variables          # name → position in `vars`
        self.temp_base = temp_base          # position in `args` of temporary 0
        self.declared = declared            # declarations that the module needs
        self.lines: list[str] = ["entry:", ""]
        self.slots: dict[tuple[str, str], str] = {}  # (memory type, content) → private stack slot: see `slot`
        self.masks: dict[tuple[int, int], str] = {}     # (lanes, number of lanes that are on) → mask: see `first_lanes`
        self.value: list[str] = [""] * len(code)
        self.scope = Scope()
        self.loops: dict[int, Any] = {}             # LOOP → its state (render.py)
        self.block = "entry"                # label of the block being written, for phis
        self.fresh = 0
        self.shuffles: dict[int, int] = {}          # SHUFFLE of two vectors → number of levels of shuffles nested in its operands
        self.streams = False
        self.in_tiles: set[int] = set()                 # values that are tiles
        self.tiles: dict[int, tuple[int, int]] = {}     # tile registers in use → (rows, bytes of a row)

    def temp(self, text: str) -> str:
        """Write `%tN = text` and return the register."""
        self.fresh = n = self.fresh + 1
        self.lines.append(f"  %t{n} = {text}")
        return f"%t{n}"

    def line(self, text: str) -> str:
        """Write a statement, which has no value."""
        self.lines.append(f"  {text}")
        return ""

    def label(self, name: str) -> None:
        """Begin a block."""
        self.lines.append(f"{name}:")
        self.block = name

    def fresh_label(self, kind: str) -> str:
        """Make a name for a block."""
        self.fresh += 1
        return f"{kind}{self.fresh}"

    def slot(self, mem: str, content: str) -> str:
        """Return a private stack slot with the constant `content` of memory type `mem` (`poison`: anything), for masked accesses whose mask
        is false."""
        key = mem, content
        if key not in self.slots:
            self.slots[key] = f"%slot{len(self.slots)}"
        return self.slots[key]

    def first_lanes(self, lanes: int, count: int) -> str:
        """Return a mask of the first `count` of 8 to 64 lanes, of which LLVM does not learn the value. Knowing that zeros replace the
        other lanes of a vector, it would take `vexpandpd`, which waits for the result of its previous execution."""
        return self.masks.setdefault((lanes, count), f"%first{count}_{lanes}")

    def finish(self) -> None:
        """Write the slots and masks that are used into the entry block."""
        text = []
        for (lanes, count), name in self.masks.items():
            text += [f'  {name}_bits = call i{lanes} asm "", "=r,0"(i{lanes} {(1 << count) - 1})',
                     f"  {name} = bitcast i{lanes} {name}_bits to <{lanes} x i1>"]
        for (mem, content), name in self.slots.items():
            text.append(f"  {name} = alloca {mem}, align 64")
            if content != "poison":
                text.append(f"  store {mem} {content}, ptr {name}, align 64")
        self.lines[1] = "\n".join(text)

    def define(self, i: int, text: str) -> None:
        """Write `%vi = text`, the value of instruction i."""
        self.lines.append(f"  %v{i} = {text}")
        self.value[i] = f"%v{i}"

    def call(self, result: str, name: str, *operands: tuple[str, str]) -> str:
        """Declare the function `name` and call it with (type, operand) pairs. Returns its value; "" if `result` is void."""
        self.declared.add(f"declare {result} @{name}({', '.join(t for t, _ in operands)})")
        text = f"call {result} @{name}({', '.join(f'{t} {x}' for t, x in operands)})"
        return self.line(text) if result == "void" else self.temp(text)

    def masked(self, kind: str, scalar: str, lanes: int, *operands: tuple[str, str]) -> str:
        """Call a masked memory intrinsic over `lanes` elements of the memory type `scalar`. It is declared with its signature from
        before LLVM 22; LLVM 22 translates that when it reads the text."""
        pointers = "p0" if kind in ("load", "store") else f"v{lanes}p0"
        result = f"<{lanes} x {scalar}>" if kind in ("load", "gather") else "void"
        return self.call(result, f"llvm.masked.{kind}.{overload(scalar, lanes)}.{pointers}", *operands)

    def either(self, bit: str, then: Callable[[], str], other: Callable[[], str] | None = None, mem: str = "", otherwise: str = "") -> str:
        """Write a branch: the code of `then` if a bit is set, otherwise the code of `other`. The result, of the memory type `mem` if there
        is one, is the value that the branch taken returns; `otherwise` is the value if `other` is missing."""
        before, inside = self.block, self.fresh_label("some")
        outside = self.fresh_label("else") if other is not None else ""
        after = self.fresh_label("after")
        self.lines.append(f"  br i1 {bit}, label %{inside}, label %{outside or after}")
        ends = []
        for label, body in ((inside, then), (outside, other)):
            if body is None:
                ends.append((otherwise, before))
                continue
            self.label(label)
            ends.append((body(), self.block))
            self.lines.append(f"  br label %{after}")
        self.label(after)
        return self.temp(f"phi {mem} " + ", ".join(f"[{x}, %{block}]" for x, block in ends)) if mem else ""

    def vector(self, scalar: str, lanes: int, parts: Iterable[str]) -> str:
        """Combine scalars into one operand. Each scalar is written directly before it is inserted."""
        if lanes == 1:
            return next(iter(parts))
        vec, whole = f"<{lanes} x {scalar}>", "poison"
        for k, part in enumerate(parts):
            whole = self.temp(f"insertelement {vec} {whole}, {scalar} {part}, i64 {k}")
        return whole

    def broadcast(self, scalar: str, lanes: int, operand: str) -> str:
        """Broadcast `operand` of the LLVM type `scalar` to all lanes."""
        if lanes == 1:
            return operand
        vec = f"<{lanes} x {scalar}>"
        if not operand.startswith("%"):
            return f"splat ({scalar} {operand})"
        one = self.temp(f"insertelement {vec} poison, {scalar} {operand}, i64 0")
        return self.temp(f"shufflevector {vec} {one}, {vec} poison, <{lanes} x i32> zeroinitializer")


def refuse(op: str, dtype: DType, why: str) -> CompileError:
    """Return the error for an instruction that LINEAR allows in general, but not in this form."""
    return CompileError(f"LINEAR instruction {op} on {dtype.name}: {why}. Lowering must not emit it; see docs/ir.md, section 4.")
