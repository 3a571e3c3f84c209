"""LINEAR as an executable specification (docs/ir.md, section 4): what is well formed, how it reads, and what it computes.

    validate(program)                        raises CompileError naming the first instruction that breaks the grammar
    format_linear(program)                   text for people, indented by loop
    interpret(program, args, variables)      runs every phase with NumPy over the given flat arrays, in place

The interpreter is the emulated device: lowering is tested on it without LLVM, and machine code against it. Every access that is
not masked off is checked against its buffer; scratch, shared memory and temporaries start as NaN (floats) or 0xA5 bytes, scratch anew for
every slice of a phase, so that code which reads what it never wrote, or what another slice left behind, gives visibly wrong numbers.
The threads of a group run one after another, each up to the next BARRIER.
"""
from __future__ import annotations

import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from svod.compile.lower.program import Instr, PhaseSpec, Program, ProgramSpec
from svod.core.ir.dtype import DType, dtypes, to_numpy
from svod.core.ir.uop import BINARY_OPS, COMPARISONS, TERNARY, TRANSCENDENTAL, UNARY, Ops
from svod.core.kernel.intrinsics import DOTS
from svod.core.spec.values import (
    FUNCTIONS,
    Array,
    apply_alu,
    bitcast,
    cast,
    constant,
    dot,
    held_dtype,
    hold,
    round_to,
    scaleb,
    tile_dot,
    unhold,
)
from svod.errors import CompileError, LaunchError

INDEX, BOOL = dtypes.index, dtypes.bool
Slices = Sequence[Sequence[tuple[int, int]]]

ARITY: dict[str, int] = {op.value: n for n, ops in ((1, UNARY), (2, BINARY_OPS), (3, TERNARY)) for op in ops - TRANSCENDENTAL}
ARITY["SCALEB"] = 2
COMPARES = frozenset(op.value for op in COMPARISONS)
FLOAT_ONLY = frozenset({"SQRT", "FLOOR", "CEIL", "TRUNC", "ROUND", "RECIPROCAL", "FDIV", "SCALEB"})
BITS_ONLY = frozenset({"AND", "OR", "XOR", "NOT", "SHL", "SHR"})
POINTERS = frozenset({"ARG", "TEMP", "SCRATCH", "SHARED"})
LOADS_OPS = frozenset({"LOAD", "LOADS", "GATHER"})
STORE_OPS = frozenset({"STORE", "STORES", "SCATTER"})
NO_VALUE = STORE_OPS | {"ENDLOOP", "TILESTORE", "PREFETCH", "BARRIER"}
TILE_OPS = frozenset({"TILEZERO", "TILELOAD", "TILEDOT", "TILESTORE"})


# -- printing ---------------------------------------------------------------------------------------
def format_instruction(i: int, instr: Instr) -> str:
    """One instruction: `%7 = ADD float32x16 %5, %6`, with its arg at the end."""
    op, dtype, lanes, src, arg = instr
    kind = "" if dtype == dtypes.void else f" {dtype.name}" + (f"x{lanes}" if lanes != 1 else "")
    operands = ", ".join(f"%{s}" for s in src)
    result = "" if op in NO_VALUE else f"%{i} = "
    return result + str(op) + kind + (f" {operands}" if src else "") + ("" if arg is None else f" [{arg}]")


def format_linear(program: Program) -> str:
    """The whole program, a line per instruction, bodies of loops indented."""
    lines = [f"program {program.spec.name}: params {[f'{d.name}[{n}]' for d, n in program.spec.params]}, outs {list(program.spec.outs)}, "
             f"temps {list(program.spec.temps)}"]
    for phase, code in zip(program.spec.phases, program.code, strict=True):
        lines.append(f"phase {phase.symbol}: extent {phase.extent}, threads {phase.threads}, scratch {phase.scratch_bytes}"
                     + (", once" if phase.once else "")
                     + (f", groups of {phase.block} threads, shared {phase.shared_bytes}" if phase.block > 1 or phase.shared_bytes else ""))
        depth = 1
        for i, instr in enumerate(code):
            depth -= instr[0] == "ENDLOOP"
            lines.append("  " * max(depth, 1) + format_instruction(i, instr))
            depth += instr[0] == "LOOP"
    return "\n".join(lines)


# -- validation -------------------------------------------------------------------------------------
def validate(program: Program) -> None:
    """Checks types, lanes, operand order, loops and scopes of every phase, and slots, temporaries and scratch against the spec.

    Raises CompileError with the phase, the instruction and what is wrong with it."""
    spec = program.spec
    if len(spec.phases) != len(program.code):
        raise CompileError(f"program {spec.name} describes {len(spec.phases)} phases and has code for {len(program.code)}")
    for phase, code in zip(spec.phases, program.code, strict=True):
        _PhaseCheck(spec, phase, code).run()


class _PhaseCheck:
    def __init__(self, spec: ProgramSpec, phase: PhaseSpec, code: Sequence[Instr]):
        self.spec, self.phase, self.code = spec, phase, code
        self.open: list[int] = []                    # LOOPs around the current instruction, outermost first
        self.scope: list[int] = []                   # per instruction: the innermost LOOP around it, -1 outside
        self.ends: dict[int, tuple[int, ...]] = {}   # closed LOOP → final values
        self.tiles: set[int] = set()                 # values in tile registers
        self.varying: set[int] = set()               # values that may differ between the threads of a group
        self.at = 0

    def require(self, ok: bool, why: str) -> None:
        if not ok:
            raise CompileError(f"phase {self.phase.symbol}: {format_instruction(self.at, self.code[self.at])}: {why}")

    def kind(self, s: int) -> tuple[DType, int]:
        return self.code[s][1], self.code[s][2]

    def operand(self, s: int, dtype: DType, lanes: int, what: str, tile: bool = False) -> None:
        found, width = self.kind(s)
        self.require((s in self.tiles) == tile, f"{what} %{s} is {'no' if tile else 'a'} tile")
        self.require(self.code[s][0] not in POINTERS, f"{what} %{s} is a pointer")
        self.require((found, width) == (dtype, lanes), f"{what} %{s} is {found.name}x{width}, needed is {dtype.name}x{lanes}")

    def run(self) -> None:
        for at, (op, dtype, lanes, src, arg) in enumerate(self.code):
            self.at = at
            self.require(isinstance(dtype, DType) and isinstance(lanes, int) and lanes >= 1, "needs a dtype and at least one lane")
            for s in src:
                self.require(isinstance(s, int) and 0 <= s < self.at, f"operand %{s} is not an earlier instruction")
                self.require(self.code[s][0] not in NO_VALUE, f"operand %{s} has no value")
                inside = self.scope[s] == -1 or self.scope[s] in self.open or (op == "RESULT" and s in self.ends)
                self.require(inside, f"operand %{s} is defined in the loop %{self.scope[s]}, which is closed")
            carried = op in ("CARRY", "RESULT") and src and isinstance(arg, int) and self.code[src[0]][0] == "LOOP"
            first = self.code[src[0]][3][2 + arg:3 + arg] if carried else ()      # what the loop starts with
            if op in ("TILEZERO", "TILELOAD", "TILEDOT") or any(s in self.tiles for s in first):
                self.tiles.add(at)
            if op == "LOCAL_ID" or (op in LOADS_OPS and self.phase.block > 1) or any(s in self.varying for s in src):
                self.varying.add(at)
            self.check(op, dtype, lanes, src, arg)
            if op == "LOOP":
                self.open.append(self.at)
            self.scope.append(self.open[-1] if self.open else -1)
            if op == "ENDLOOP":
                self.open.pop()
        if self.open:
            self.at = self.open[-1]
            self.require(False, "the loop is never closed")

    def check(self, op: str, dtype: DType, lanes: int, src: tuple[int, ...], arg: Any) -> None:
        if op in ARITY:
            self.elementwise(op, dtype, lanes, src)
        elif op in LOADS_OPS or op in STORE_OPS:
            self.memory(op, dtype, lanes, src, arg)
        elif op == "PREFETCH":
            self.prefetch(dtype, lanes, src, arg)
        elif op in ("LOOP", "CARRY", "ENDLOOP", "RESULT"):
            self.loop(op, dtype, lanes, src, arg)
        elif op == "DOT":
            self.dot(dtype, lanes, src, arg)
        elif op in TILE_OPS:
            self.tile(op, dtype, lanes, src, arg)
        elif op in ("CAST", "BITCAST", "SPLAT", "EXTRACT", "SHUFFLE"):
            self.lanes_and_types(op, dtype, lanes, src, arg)
        elif op in ("CONST", "VCONST"):
            self.require(not src, "a constant has no operands")
            values = arg if op == "VCONST" else (arg,)
            self.require(op == "CONST" or (isinstance(arg, tuple) and len(arg) == lanes), f"needs a tuple of {lanes} values")
            python = bool if dtype.kind == "b" else float if dtype.is_float else int
            self.require(all(type(v) is python for v in values), f"a {dtype.name} constant is a Python {python.__name__}")
            self.require(not dtype.is_int or all(dtype.min <= v <= dtype.max for v in values), f"does not fit {dtype.name}")
        elif op in POINTERS:
            self.pointer(op, dtype, lanes, src, arg)
        elif op == "BARRIER":
            self.require((dtype, lanes, src, arg) == (dtypes.void, 1, (), None), "has no type, no operands and no arg")
            for loop in self.open:
                self.require(not any(s in self.varying for s in self.code[loop][3][:2]),
                             f"stands in the loop %{loop}, which the threads of a group may run a different number of times")
        elif op in ("BEGIN", "END_", "VAR", "LOCAL_ID"):
            self.require((dtype, lanes, src) == (INDEX, 1, ()), "is a scalar index without operands")
            self.require(op != "VAR" or arg in self.spec.variables, f"the program's variables are {self.spec.variables}")
        elif op in {o.value for o in TRANSCENDENTAL}:
            self.require(False, "transcendental operations are expanded by lowering (svod.compile.lower.math)")
        else:
            self.require(False, "is not an operation of LINEAR")

    def elementwise(self, op: str, dtype: DType, lanes: int, src: tuple[int, ...]) -> None:
        self.require(len(src) == ARITY[op], f"takes {ARITY[op]} operands")
        of = dtype
        if op in COMPARES:
            self.require(dtype == BOOL, "a comparison gives bool")
            of = self.kind(src[0])[0]
        elif op == "WHERE":
            self.require(self.kind(src[0]) in ((BOOL, lanes), (BOOL, 1)), f"the condition %{src[0]} is not a bool of {lanes} lanes or one")
            src = src[1:]
        self.require(op not in FLOAT_ONLY or dtype.is_float, "is defined for floats")
        self.require(op not in BITS_ONLY or not dtype.is_float, "is defined for bools and integers")
        for s in src:
            self.operand(s, of, lanes, "operand")

    def lanes_and_types(self, op: str, dtype: DType, lanes: int, src: tuple[int, ...], arg: Any) -> None:
        self.require(len(src) == 1 or (op == "SHUFFLE" and len(src) == 2), "wrong number of operands")
        of, width = self.kind(src[0])
        self.require(self.code[src[0]][0] not in POINTERS, f"operand %{src[0]} is a pointer")
        if op == "CAST":
            self.require(width == lanes, f"keeps the {width} lanes of its operand")
            return
        if op == "BITCAST":
            same = of.itemsize == dtype.itemsize and width == lanes
            self.require(same or (of.itemsize * width == dtype.itemsize * lanes and BOOL not in (of, dtype)),
                         f"{of.name}x{width} and {dtype.name}x{lanes} differ in width")
            return
        self.require(of == dtype, f"keeps the type {of.name} of its operand")
        if op == "SPLAT":
            self.require(width == 1, f"operand has {width} lanes, needed is a scalar")
        elif op == "EXTRACT":
            self.require(lanes == 1 and isinstance(arg, int) and 0 <= arg < width, f"takes one of {width} lanes")
        else:
            self.operand(src[-1], dtype, width, "operand")
            ok = isinstance(arg, tuple) and len(arg) == lanes and all(-1 <= k < width * len(src) for k in arg)
            self.require(ok, f"needs {lanes} lane numbers below {width * len(src)}")

    def dot(self, dtype: DType, lanes: int, src: tuple[int, ...], arg: Any) -> None:
        self.require(len(src) == 3, "takes an accumulator and two operands")
        self.operand(src[0], dtype, lanes, "accumulator")
        kinds = tuple(self.kind(s)[0] for s in src[1:])
        known = [(d.accumulator, d.operands, d.group) for d in DOTS.values() if not d.is_tile]
        self.require((dtype, kinds, arg) in known, f"{dtype.name} of {arg} {' by '.join(k.name for k in kinds)} is no dot instruction")
        for s, k in zip(src[1:], kinds, strict=True):
            self.operand(s, k, lanes * arg, "operand")

    def tile(self, op: str, dtype: DType, lanes: int, src: tuple[int, ...], arg: Any) -> None:
        self.require(isinstance(arg, tuple) and len(arg) == 3 and all(isinstance(n, int) for n in arg), "the arg is three numbers")
        if op == "TILEZERO":
            self.require(not src and lanes == arg[0] * arg[1], f"has {arg[0]}·{arg[1]} lanes and no operands")
        elif op == "TILEDOT":
            rows, columns, group = arg
            self.require(len(src) == 3, "takes an accumulator and two operands")
            kinds = tuple(self.kind(s)[0] for s in src[1:])
            found = next((d for d in DOTS.values() if d.is_tile and (d.accumulator, d.operands, d.group) == (dtype, kinds, group)), None)
            if found is None:
                self.require(False, f"{dtype.name} of {group} {' by '.join(k.name for k in kinds)} is no instruction")
                return
            self.require(1 <= rows <= found.rows and 1 <= columns <= found.columns, f"has {found.rows} rows of {found.columns} at most")
            self.operand(src[0], dtype, lanes, "accumulator", tile=True)
            self.require(lanes == rows * columns, f"has {rows}·{columns} lanes")
            for s, k, n in zip(src[1:], kinds, (rows, columns), strict=True):
                self.operand(s, k, n * group * found.depth, "operand", tile=True)
        else:
            self.require(len(src) == (3 if op == "TILESTORE" else 2), "wrong number of operands")
            self.require(self.code[src[0]][:2] in ((p, dtype) for p in POINTERS), f"operand %{src[0]} is no pointer to {dtype.name}")
            self.require(op == "TILELOAD" or self.code[src[0]][0] != "ARG", "tiles are stored to scratch")
            self.operand(src[1], INDEX, 1, "index")
            self.require(lanes % arg[1] == 0, f"{lanes} lanes are no {arg[1]} rows")
            if op == "TILESTORE":
                self.operand(src[2], dtype, lanes, "value", tile=True)

    def memory(self, op: str, dtype: DType, lanes: int, src: tuple[int, ...], arg: Any) -> None:
        store, indexed = op in STORE_OPS, op in ("GATHER", "SCATTER")
        plain = 3 if store else 2
        self.require(len(src) in ((plain, plain + 1) if store else (plain, plain + 2)), "wrong number of operands")
        pointer = self.code[src[0]]
        self.require(pointer[0] in POINTERS, f"operand %{src[0]} is not a pointer")
        self.require(pointer[1] == dtype, f"the pointer %{src[0]} is to {pointer[1].name}")
        self.operand(src[1], INDEX, lanes if indexed else 1, "index")
        if store:
            self.operand(src[2], dtype, lanes, "value")
            self.require(pointer[0] != "ARG" or pointer[4] in self.spec.outs, f"argument {pointer[4]} is not an output {self.spec.outs}")
        if len(src) > plain:
            mask = src[plain]
            self.require(self.kind(mask) in ((BOOL, lanes), (BOOL, 1)), f"the mask %{mask} is not a bool of {lanes} lanes or one")
            if not store:
                self.operand(src[3], dtype, lanes, "alternative")
        wanted = {"LOAD": "offset", "GATHER": "offset", "SCATTER": "offset", "STORE": "(offset, stream)"}.get(op, "(offset, stride)")
        shape_ok = isinstance(arg, int) if wanted == "offset" else isinstance(arg, tuple) and len(arg) == 2 and isinstance(arg[0], int)
        self.require(shape_ok, f"the arg is {wanted}")

    def prefetch(self, dtype: DType, lanes: int, src: tuple[int, ...], arg: Any) -> None:
        self.require(len(src) == 2 and lanes == 1 and isinstance(arg, int), "takes a pointer and an index, and has one lane and an offset")
        self.require(self.code[src[0]][:2] == ("ARG", dtype), f"operand %{src[0]} is no argument of {dtype.name}")
        self.operand(src[1], INDEX, 1, "index")

    def pointer(self, op: str, dtype: DType, lanes: int, src: tuple[int, ...], arg: Any) -> None:
        spec = self.spec
        self.require(not src and lanes == 1 and dtype not in (INDEX, dtypes.void), "a pointer has an element type and no operands")
        self.require(isinstance(arg, int) and arg >= 0, "the arg is a number")
        if op == "ARG":
            self.require(arg < len(spec.params), f"the program has {len(spec.params)} parameters")
            self.require(spec.params[arg][0] == dtype, f"parameter {arg} is {spec.params[arg][0].name}")
        elif op == "TEMP":
            self.require(arg < len(spec.temps), f"the program has {len(spec.temps)} temporaries")
        else:
            size, memory = (self.phase.scratch_bytes, "scratch") if op == "SCRATCH" else (self.phase.shared_bytes, "shared memory")
            self.require(arg % 64 == 0, f"offsets into {memory} are multiples of 64 bytes")
            self.require(arg < size, f"the phase has {size} bytes of {memory}")

    def loop(self, op: str, dtype: DType, lanes: int, src: tuple[int, ...], arg: Any) -> None:
        self.require(len(src) >= (2 if op == "LOOP" else 1), "operands are missing")
        if op == "LOOP":
            self.require((dtype, lanes) == (INDEX, 1), "a loop's value is its index, a scalar index")
            self.operand(src[0], INDEX, 1, "start")
            self.operand(src[1], INDEX, 1, "stop")
            self.require(isinstance(arg, int) and arg >= 1, "the step is a positive integer")
            for s in src[2:]:
                self.require(self.code[s][0] not in POINTERS, f"initial value %{s} is a pointer")
            return
        head = self.code[src[0]]
        self.require(head[0] == "LOOP", f"%{src[0]} is not a LOOP")
        init = head[3][2:]
        if op == "ENDLOOP":
            self.require(bool(self.open) and self.open[-1] == src[0], f"closes %{src[0]}, the innermost open loop is {self.open[-1:]}")
            self.require(len(src) - 1 == len(init), f"the loop carries {len(init)} values")
            for s, first in zip(src[1:], init, strict=True):
                self.operand(s, *self.kind(first), "next value", first in self.tiles)
            self.ends[src[0]] = src[1:]
            return
        if op == "CARRY":
            self.require(src[0] in self.open, "stands outside its loop")
        else:
            self.require(src[0] in self.ends, "stands in its loop")
        self.require(isinstance(arg, int) and 0 <= arg < len(init), f"the loop carries {len(init)} values")
        self.require(self.kind(init[arg]) == (dtype, lanes), f"the carried value %{init[arg]} has another type")


# -- interpretation ---------------------------------------------------------------------------------
def interpret(program: Program, args: Sequence[Array], variables: Mapping[str, int] | None = None,
              slices: Slices | int | None = None) -> None:
    """Runs the phases in order over `args`: flat arrays in memory form by slot, outputs written in place.

    `slices`: what parts of each phase run, in which order: None, everything at once; a number, that many equal parts, last part
    first (what is right does not depend on the order); or, per phase, (begin, end) pairs. Every part gets newly poisoned scratch, as
    from another worker. Raises LaunchError for arguments or variables that do not fit, CompileError for an access out of bounds."""
    spec = program.spec
    if len(args) != len(spec.params):
        raise LaunchError(f"{spec.name} takes {len(spec.params)} arguments, got {len(args)}")
    for slot, (array, (dtype, size)) in enumerate(zip(args, spec.params, strict=True)):
        if array.dtype != to_numpy(dtype) or array.ndim != 1 or array.size < size or not array.flags.c_contiguous:
            raise LaunchError(f"argument {slot} of {spec.name} is a flat array of {size} {to_numpy(dtype)}, "
                              f"got {array.shape} of {array.dtype}")
    missing = [name for name in spec.variables if name not in (variables or {})]
    if missing:
        raise LaunchError(f"{spec.name} needs the variables {missing}")
    temps = poisoned_temporaries(program)
    with np.errstate(all="ignore"):
        for k, (phase, code) in enumerate(zip(spec.phases, program.code, strict=True)):
            run = PhaseInterpreter(spec, phase, code, args, temps, variables or {})
            for begin, end in _parts(phase.extent_at(variables or {}), slices if slices is None or isinstance(slices, int) else slices[k]):
                run(begin, end)


def poisoned_temporaries(program: Program) -> list[Array]:
    """The temporaries of a program, filled with values that no code may rely on."""
    temps = [np.full(n, 0xA5, np.uint8) for n in program.spec.temps]
    for code in reversed(program.code):                     # the first use decides the type of the poison
        for op, dtype, _, _, arg in code:
            if op == "TEMP":
                _poison(temps[arg], dtype)
    return temps


def run_phase(program: Program, number: int, args: Sequence[Array], temps: Sequence[Array], variables: Mapping[str, int], begin: int,
              end: int) -> None:
    """Runs iterations begin ≤ i < end of one phase. `args`: as for `interpret`; `temps`: the bytes of each temporary."""
    with np.errstate(all="ignore"):
        PhaseInterpreter(program.spec, program.spec.phases[number], program.code[number], args, temps, variables)(begin, end)


def _parts(extent: int, slices: Sequence[tuple[int, int]] | int | None) -> Sequence[tuple[int, int]]:
    if slices is None:
        return [(0, extent)]
    if isinstance(slices, int):
        return [(extent * n // slices, extent * (n + 1) // slices) for n in reversed(range(slices))]
    return slices


def _poison(raw: Array, dtype: DType) -> None:
    """Fills bytes with NaNs of a float dtype, else with 0xA5."""
    if dtype.is_float:
        whole = raw[:raw.size - raw.size % dtype.itemsize].view(to_numpy(dtype))
        whole[:] = unhold(constant(dtype, float("nan")), dtype)
    else:
        raw[:] = 0xA5


def _aligned(nbytes: int) -> Array:
    """So many bytes from a multiple of 64."""
    raw = np.empty(nbytes + 64, np.uint8)
    start = -raw.ctypes.data % 64
    return raw[start:start + nbytes]


Areas = dict[int, tuple[DType, Array]]      # by first byte: element type and bytes, up to the next area


def _areas(code: Sequence[Instr], op: str, memory: Array) -> Areas:
    """The areas of scratch or shared memory that code points to."""
    types = {instr[4]: instr[1] for instr in code if instr[0] == op}
    starts = sorted(types)
    return {a: (types[a], memory[a:b]) for a, b in zip(starts, [*starts[1:], memory.size], strict=False)}


def _poison_areas(areas: Areas) -> None:
    for dtype, raw in areas.values():
        _poison(raw, dtype)


class Memory:
    """What a pointer points to: elements in memory form. `is_private`: no other thread has access to it."""

    __slots__ = ("array", "dtype", "is_private", "name", "size")

    def __init__(self, array: Array, dtype: DType, name: str, is_private: bool):
        self.array, self.dtype, self.name, self.size, self.is_private = array, dtype, name, array.size, is_private


Step = Callable[[], None]


class Barrier(NamedTuple):
    """Where a thread waits: the instruction, and the positions of the loops around it."""

    instruction: int
    positions: tuple[int, ...]


class Pause(NamedTuple):
    """A step at which a thread waits for the others: a BARRIER, or a loop with one inside."""

    run: Callable[[], Iterator[Barrier]]


Body = list[Step | Pause]


def run_steps(body: Body) -> Iterator[Barrier]:
    """Run steps in order; yields where the thread waits."""
    for step in body:
        if isinstance(step, Pause):
            yield from step.run()
        else:
            step()

_INDEX_FUNCTIONS: dict[str, Callable[..., Any]] = {
    "ADD": operator.add, "SUB": operator.sub, "MUL": operator.mul, "MIN": min, "MAX": max, "NEG": operator.neg, "ABS": abs,
    "IDIV": lambda a, b: a // b if b else 0, "MOD": lambda a, b: a % b if b else 0, "MULACC": lambda a, b, c: a * b + c,
    "AND": operator.and_, "OR": operator.or_, "XOR": operator.xor, "NOT": operator.invert, "SHL": operator.lshift, "SHR": operator.rshift,
}


class ThreadState(NamedTuple):
    """What a thread of a group that waits has of its own."""

    registers: list[Any]
    carried: dict[int, list[Any]]
    scratch: Array
    waiting: Iterator[Barrier]


class PhaseInterpreter:
    """A phase translated to closures over one register file, which the threads of a group use in turn.

    Registers hold arrays of `lanes` elements in held form (svod.core.spec.values), scalar indices Python ints, pointers Memory. A subclass
    that is `watched` is told of every access."""

    watched = False

    def __init__(self, spec: ProgramSpec, phase: PhaseSpec, code: Sequence[Instr], args: Sequence[Array], temps: Sequence[Array],
                 variables: Mapping[str, int]):
        self.spec, self.phase, self.code, self.args, self.temps, self.variables = spec, phase, code, args, temps, variables
        self.regs: list[Any] = [None] * len(code)
        self.carried: dict[int, list[Any]] = {}
        self.scratch, self.shared = (_aligned(n) for n in (phase.scratch_bytes, phase.shared_bytes))
        self.scratch_areas, self.shared_areas = _areas(code, "SCRATCH", self.scratch), _areas(code, "SHARED", self.shared)
        self.begin = self.end = self.thread = 0
        self.steps: Body = []
        self.translate()

    def __call__(self, begin: int, end: int) -> None:
        """Runs iterations begin ≤ i < end, each as a group of threads where the phase has groups."""
        if self.phase.block == 1:
            self.begin, self.end = begin, end
            self.run_group(range(1))
        else:
            for group in range(begin, end):
                self.begin, self.end = group, group + 1
                self.run_group(range(self.phase.block))

    def run_group(self, threads: Sequence[int]) -> None:
        """Runs the threads of a group in the given order, each up to the next barrier. Raises CompileError where not all reach it."""
        start = list(self.regs)
        _poison_areas(self.shared_areas)
        waiting: dict[int, ThreadState] = {}
        reached: dict[int, Barrier] = {}
        for thread in threads:
            _poison_areas(self.scratch_areas)
            self.regs[:] = start
            self._resume(thread, run_steps(self.steps), waiting, reached)
        while waiting:
            self.check_barrier(reached)
            self.at_barrier()
            states, waiting, reached = waiting, {}, {}
            for thread in self.order(threads):
                state = states[thread]
                self.regs[:], self.scratch[:] = state.registers, state.scratch
                self.carried.clear()
                self.carried.update(state.carried)
                self._resume(thread, state.waiting, waiting, reached)
        self.regs[:] = start

    def _resume(self, thread: int, steps: Iterator[Barrier], waiting: dict[int, ThreadState], reached: dict[int, Barrier]) -> None:
        """Runs a thread on to its next barrier or its end."""
        self.thread = thread
        barrier = next(steps, None)
        if barrier is not None:
            reached[thread] = barrier
            waiting[thread] = ThreadState(list(self.regs), dict(self.carried), self.scratch.copy(), steps)

    def check_barrier(self, reached: Mapping[int, Barrier]) -> None:
        """Raises CompileError unless every thread of the group waits at the same barrier."""
        first = next(iter(reached.values()))
        if len(reached) < self.phase.block or any(b != first for b in reached.values()):
            others = self.phase.block - sum(b == first for b in reached.values())
            raise self.failed(first.instruction, f"{others} of the {self.phase.block} threads of the group do not reach it")

    def order(self, threads: Sequence[int]) -> Sequence[int]:
        """The order in which the threads of a group go on behind a barrier."""
        return threads

    def at_barrier(self) -> None:
        """Called when all threads of a group have reached a barrier."""

    def touched(self, i: int, memory: Memory, where: Array, write: bool) -> None:
        """Called for every access that is not masked off, after its elements were checked against the buffer."""

    def failed(self, i: int, why: str) -> CompileError:
        return CompileError(f"phase {self.phase.symbol}: {format_instruction(i, self.code[i])}: {why}")

    def translate(self) -> None:
        nest: list[Body] = [self.steps]
        open_loops: list[int] = []
        for i, (op, _, _, src, _) in enumerate(self.code):
            if op == "LOOP":
                nest.append([])
                open_loops.append(i)
            elif op == "ENDLOOP":
                body = nest.pop()
                open_loops.pop()
                nest[-1].append(self.loop(src[0], body, src[1:]))
            elif op == "BARRIER":
                nest[-1].append(self.barrier(i, tuple(open_loops)))
            elif (step := self.step(i)) is not None:
                nest[-1].append(step)

    def barrier(self, i: int, loops: tuple[int, ...]) -> Pause:
        def wait() -> Iterator[Barrier]:
            yield Barrier(i, tuple([self.regs[head] for head in loops]))
        return Pause(wait)

    def loop(self, head: int, body: Body, following: tuple[int, ...]) -> Step | Pause:
        regs, carried = self.regs, self.carried
        start, stop, *init = self.code[head][3]
        stride = self.code[head][4]
        steps: list[Step] = [step for step in body if not isinstance(step, Pause)]

        def run() -> None:
            carried[head] = [regs[s] for s in init]
            for position in range(regs[start], regs[stop], stride):
                regs[head] = position
                for step in steps:
                    step()
                carried[head] = [regs[s] for s in following]

        def pausing() -> Iterator[Barrier]:
            carried[head] = [regs[s] for s in init]
            for position in range(regs[start], regs[stop], stride):
                regs[head] = position
                yield from run_steps(body)
                carried[head] = [regs[s] for s in following]
        return run if len(steps) == len(body) else Pause(pausing)

    def is_index(self, s: int) -> bool:
        return self.code[s][1] is INDEX and self.code[s][2] == 1

    def step(self, i: int) -> Step | None:
        """The action of one instruction; None for what is done once, here: constants and pointers."""
        op, dtype, lanes, src, arg = self.code[i]
        regs, carried = self.regs, self.carried
        if op == "CONST":
            regs[i] = arg if self.is_index(i) else np.broadcast_to(constant(dtype, arg), (lanes,))
        elif op == "VCONST":
            array = np.array([constant(dtype, v) for v in arg])
            regs[i] = int(array[0]) if self.is_index(i) else array
        elif op == "VAR":
            regs[i] = int(self.variables[arg])
        elif op in POINTERS:
            regs[i] = self.memory(op, dtype, arg)
        elif op in ("BEGIN", "END_"):
            def bounds() -> None: regs[i] = self.begin if op == "BEGIN" else self.end
            return bounds
        elif op == "LOCAL_ID":
            def thread() -> None: regs[i] = self.thread
            return thread
        elif op in ("CARRY", "RESULT"):
            head = src[0]
            def carry() -> None: regs[i] = carried[head][arg]
            return carry
        elif op in ("TILELOAD", "TILESTORE"):
            return self.tile_memory(i)
        elif op == "TILEZERO":
            def zero() -> None: regs[i] = np.zeros(lanes, held_dtype(dtype))
            return zero
        elif op in STORE_OPS:
            return self.store(i)
        elif op in LOADS_OPS:
            return self.load(i)
        elif op != "PREFETCH":      # changes no value
            return self.compute(i)
        return None

    def memory(self, op: str, dtype: DType, arg: int) -> Memory:
        if op == "ARG":
            return Memory(self.args[arg][:self.spec.params[arg][1]], dtype, f"argument {arg}", False)
        if op == "TEMP":
            raw, name = self.temps[arg], f"temporary {arg}"
        else:
            areas, memory = (self.scratch_areas, "scratch") if op == "SCRATCH" else (self.shared_areas, "shared memory")
            raw, name = areas[arg][1], f"{memory} from byte {arg}"
        return Memory(raw[:raw.size - raw.size % dtype.itemsize].view(to_numpy(dtype)), dtype, name, op == "SCRATCH")

    def compute(self, i: int) -> Step:
        """An instruction that makes a value of other values."""
        op, _, _, src, _ = self.code[i]
        regs = self.regs
        if self.is_index(i) and op in _INDEX_FUNCTIONS and all(map(self.is_index, src)):
            function = _INDEX_FUNCTIONS[op]
            if len(src) == 2:
                a, b = src
                def index_step() -> None: regs[i] = function(regs[a], regs[b])
                return index_step
            def index_n() -> None: regs[i] = function(*[regs[s] for s in src])
            return index_n
        vector = self.vector_function(i)
        scalar = [self.is_index(s) for s in src]
        if self.is_index(i) or any(scalar):
            unbox = self.is_index(i)

            def boxed() -> None:
                result = vector(*[np.array([regs[s]], np.int64) if box else regs[s] for s, box in zip(src, scalar, strict=True)])
                regs[i] = int(result[0]) if unbox else result
            return boxed
        if len(src) == 1:
            x = src[0]
            def unary() -> None: regs[i] = vector(regs[x])
            return unary
        if len(src) == 2:
            x, y = src
            def binary() -> None: regs[i] = vector(regs[x], regs[y])
            return binary
        def nary() -> None: regs[i] = vector(*[regs[s] for s in src])
        return nary

    def vector_function(self, i: int) -> Callable[..., Any]:
        """The instruction as a function of arrays."""
        op, dtype, lanes, src, arg = self.code[i]
        of = self.code[src[0]][1]
        if op == "CAST":
            return lambda x: cast(x, of, dtype)
        if op == "BITCAST":
            return lambda x: bitcast(x, of, dtype)
        if op == "TILEDOT":
            return lambda acc, x, y: tile_dot(acc, x, y, *arg)
        if op == "DOT":
            return lambda acc, x, y: dot(acc, x, y, arg)
        if op == "SPLAT":
            return lambda x: np.broadcast_to(x, (lanes,))
        if op == "EXTRACT":
            return lambda x: x[arg:arg + 1]
        if op == "SHUFFLE":
            take, undefined = np.maximum(np.array(arg), 0), np.array(arg) < 0
            rubbish = constant(dtype, float("nan")) if dtype.is_float else np.array(True if dtype == BOOL else 0x5A, held_dtype(dtype))
            if undefined.any():
                return lambda *v: np.where(undefined, rubbish, np.concatenate(v)[take])
            return lambda *v: np.concatenate(v)[take]
        if op == "SCALEB":
            return lambda x, n: round_to(scaleb(x, n), dtype)
        uop = Ops[op]
        if (dtype.is_float and dtype.bits == 16) or dtype == dtypes.void:
            return lambda *v: apply_alu(uop, dtype, v)
        return FUNCTIONS[uop]

    # -- memory ---------------------------------------------------------------------------------------
    def addresses(self, i: int) -> Callable[[], Array]:
        """The positions an access touches, one per lane."""
        op, _, lanes, src, arg = self.code[i]
        regs, index = self.regs, src[1]
        if op in ("GATHER", "SCATTER"):
            return lambda: np.atleast_1d(np.asarray(regs[index])) + arg
        stride = arg[1] if op in ("LOADS", "STORES") else 1
        spread = np.arange(lanes) * stride + (arg if op == "LOAD" else arg[0])
        return lambda: regs[index] + spread

    def checked(self, i: int, memory: Memory, where: Array, mask: Array | None, write: bool) -> Array:
        """`where`, with masked-off lanes sent to 0, after checking the others."""
        used = where if mask is None else where[mask]
        if used.size and (used.min() < 0 or used.max() >= memory.size):
            bad = used[(used < 0) | (used >= memory.size)]
            raise self.failed(i, f"touches element {bad[0]} of {memory.name}, which has {memory.size}")
        self.touched(i, memory, used, write)
        return where if mask is None else np.where(mask, where, 0)

    def load(self, i: int) -> Step:
        op, dtype, lanes, src, arg = self.code[i]
        regs, memory, addresses = self.regs, self.regs[src[0]], self.addresses(i)
        array, size, index = memory.array, memory.size, src[1]
        if len(src) == 2 and op == "LOAD" and not self.watched:
            def contiguous() -> None:
                at = regs[index] + arg
                if at < 0 or at + lanes > size:
                    self.checked(i, memory, addresses(), None, False)
                regs[i] = hold(array[at:at + lanes].copy(), dtype)
            return contiguous
        if len(src) == 2:
            def spread() -> None:
                regs[i] = hold(array[self.checked(i, memory, addresses(), None, False)], dtype)
            return spread
        gate, alt = src[2], src[3]

        def masked() -> None:
            mask = np.broadcast_to(regs[gate], (lanes,))
            where = self.checked(i, memory, addresses(), mask, False)
            regs[i] = np.where(mask, hold(array[where], dtype), regs[alt]) if mask.any() else regs[alt]
        return masked

    def tile_memory(self, i: int) -> Step:
        op, dtype, lanes, src, (offset, rows, stride) = self.code[i]
        regs, memory, index = self.regs, self.regs[src[0]], src[1]
        spread = (np.arange(rows)[:, None] * stride + np.arange(lanes // rows)).ravel() + offset

        def load() -> None:
            regs[i] = hold(memory.array[self.checked(i, memory, regs[index] + spread, None, False)], dtype)

        def store() -> None:
            memory.array[self.checked(i, memory, regs[index] + spread, None, True)] = unhold(regs[src[2]], dtype)
        return load if op == "TILELOAD" else store

    def store(self, i: int) -> Step:
        op, dtype, lanes, src, arg = self.code[i]
        regs, memory, addresses = self.regs, self.regs[src[0]], self.addresses(i)
        array, size, index, value = memory.array, memory.size, src[1], src[2]
        if len(src) == 3 and op == "STORE" and not self.watched:
            offset = arg[0]

            def contiguous() -> None:
                at = regs[index] + offset
                if at < 0 or at + lanes > size:
                    self.checked(i, memory, addresses(), None, True)
                array[at:at + lanes] = unhold(regs[value], dtype)
            return contiguous
        gate = src[3] if len(src) == 4 else None

        def spread() -> None:
            mask = None if gate is None else np.broadcast_to(regs[gate], (lanes,))
            where, stored = self.checked(i, memory, addresses(), mask, True), unhold(regs[value], dtype)
            if mask is not None:
                where, stored = where[mask], stored[mask]
            array[where] = stored
        return spread
