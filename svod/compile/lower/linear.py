"""The grammar of LINEAR (docs/ir.md, section 4) as code: validation and printing.

    validate(program)                        raises CompileError naming the first instruction that breaks the grammar
    format_linear(program)                   text for people, indented by loop

Its semantics are in svod/compile/lower/interpreter.py.
"""
from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NoReturn

from svod.compile.lower.program import Instruction, PhaseSpec, Program, ProgramSpec
from svod.core.ir.dtype import DType, dtypes
from svod.core.ir.uop import BINARY_OPS, COMPARISONS, TERNARY, TRANSCENDENTAL, UNARY
from svod.core.machine.isa import DOTS, MATRIX_LINE_BYTES, Dot
from svod.errors import CompileError

INDEX, BOOL = dtypes.index, dtypes.bool

ARITY: dict[str, int] = {op.value: n for n, ops in ((1, UNARY), (2, BINARY_OPS), (3, TERNARY)) for op in ops - TRANSCENDENTAL}
ARITY["SCALEB"], ARITY["POW2"] = 2, 1
# created by legalisation; defined for fewer operands than IDIV, MOD, SHL and SHR
LEGAL_INTEGER = frozenset({"QUOTIENT", "REMAINDER", "SHL_BELOW", "SHR_BELOW"})
ARITY.update(dict.fromkeys(LEGAL_INTEGER, 2))
COMPARES = frozenset(op.value for op in COMPARISONS)
FLOAT_ONLY = frozenset({"SQRT", "FLOOR", "CEIL", "TRUNC", "ROUND", "RECIPROCAL", "FDIV", "SCALEB", "POW2"})
BITS_ONLY = frozenset({"AND", "OR", "XOR", "NOT", "SHL", "SHR"})
POINTERS = frozenset({"ARG", "TEMP", "SCRATCH", "SHARED"})
LOADS_OPS = frozenset({"LOAD", "LOADS", "GATHER"})
STORE_OPS = frozenset({"STORE", "STORES", "SCATTER"})
# bulk copies of rows to shared memory, and the counters of their arrival
BULK_OPS = frozenset({"BULK_BEGIN", "COPY_BULK", "BULK_WAIT", "BULK_END"})
NO_VALUE = STORE_OPS | {"ENDLOOP", "TILESTORE", "PREFETCH", "BARRIER", "COPY_ASYNC", "COMMIT", "WAIT", *BULK_OPS}
TILE_OPS = frozenset({"TILEZERO", "TILELOAD", "TILEDOT", "TILESTORE"})
HELD_OPS = frozenset({"LOADMATRIX", "MMA", "MMASHARED"})      # operate on tiles that the threads of one or several subgroups hold together
SUBGROUP_OPS = HELD_OPS | {"SHFL_XOR"}           # instructions that the threads of a subgroup execute together


# -- printing ---------------------------------------------------------------------------------------
def format_instruction(i: int, instr: Instruction) -> str:
    """Format one instruction: `%7 = ADD float32x16 %5, %6`, with its arg at the end."""
    op, dtype, lanes, src, arg = instr
    kind = "" if dtype == dtypes.void else f" {dtype.name}" + (f"x{lanes}" if lanes != 1 else "")
    operands = ", ".join(f"%{s}" for s in src)
    result = "" if op in NO_VALUE else f"%{i} = "
    return result + str(op) + kind + (f" {operands}" if src else "") + ("" if arg is None else f" [{arg}]")


def format_linear(program: Program) -> str:
    """Format the whole program, a line per instruction, with bodies of loops indented."""
    lines = [f"program {program.spec.name}: params {[f'{d.name}[{n}]' for d, n in program.spec.params]}, outs {list(program.spec.outs)}, "
             f"temps {list(program.spec.temps)}"]
    for phase, code in zip(program.spec.phases, program.code, strict=True):
        lines.append(f"phase {phase.symbol}: extent {phase.extent}, threads {phase.threads}, scratch {phase.scratch_bytes}"
                     + (", once" if phase.once else "")
                     + (f", groups of {phase.block} threads, shared {phase.shared_bytes}" if phase.block > 1 or phase.shared_bytes else ""))
        depth = 1
        for i, instr in enumerate(code):
            depth -= instr.op == "ENDLOOP"
            lines.append("  " * max(depth, 1) + format_instruction(i, instr))
            depth += instr.op == "LOOP"
    return "\n".join(lines)


# -- validation -------------------------------------------------------------------------------------
def validate(program: Program) -> None:
    """Check types, lanes, operand order, loops and scopes of every phase, and slots, temporaries and scratch against the spec.

    Raises CompileError with the phase, the instruction and the rule that it breaks."""
    spec = program.spec
    if len(spec.phases) != len(program.code):
        raise CompileError(f"program {spec.name} describes {len(spec.phases)} phases and has code for {len(program.code)}")
    for phase, code in zip(spec.phases, program.code, strict=True):
        _PhaseCheck(spec, phase, code).run()


class _PhaseCheck:
    def __init__(self, spec: ProgramSpec, phase: PhaseSpec, code: Sequence[Instruction]):
        self.spec, self.phase, self.code = spec, phase, code
        self.open: list[int] = []                    # LOOPs around the current instruction, outermost first
        self.scope: list[int] = []                   # per instruction: the innermost LOOP around it; -1: outside of all loops
        self.ends: dict[int, tuple[int, ...]] = {}   # closed LOOP → final values
        self.tiles: set[int] = set()                 # values in tile registers
        self.varying: set[int] = set()               # values that may differ between the threads of a group
        self.at = 0

    def require(self, ok: bool, why: str) -> None:
        """Raise CompileError unless `ok`. Frequent checks test before they call `fail`, as making the text takes longer than the check."""
        if not ok:
            self.fail(why)

    def fail(self, why: str) -> NoReturn:
        raise CompileError(f"phase {self.phase.symbol}: {format_instruction(self.at, self.code[self.at])}: {why}")

    def kind(self, s: int) -> tuple[DType, int]:
        return self.code[s].dtype, self.code[s].lanes

    def operand(self, s: int, dtype: DType, lanes: int, what: str, tile: bool = False) -> None:
        own, width = self.kind(s)
        if own is dtype and width == lanes and (s in self.tiles) == tile and self.code[s].op not in POINTERS:
            return
        self.require((s in self.tiles) == tile, f"{what} %{s} is {'no' if tile else 'a'} tile")
        self.require(self.code[s].op not in POINTERS, f"{what} %{s} is a pointer")
        self.require((own, width) == (dtype, lanes), f"{what} %{s} is {own.name}x{width}, needed is {dtype.name}x{lanes}")

    def pointer_to(self, s: int, memory: str, dtype: DType) -> None:
        kind = f"no pointer to {dtype.name} in shared memory" if memory == "SHARED" else f"no argument of {dtype.name}"
        self.require(self.code[s][:2] == (memory, dtype), f"operand %{s} is {kind}")

    def run(self) -> None:
        for at, (op, dtype, lanes, src, arg) in enumerate(self.code):
            self.at = at
            if not (isinstance(dtype, DType) and isinstance(lanes, int) and lanes >= 1):
                self.fail("needs a dtype and at least one lane")
            self.operands_are_defined(op, src)
            self.note_tiles_and_threads(op, src, arg)
            check = _CHECKS.get(op)
            if check is None:
                self.fail("is not an operation of LINEAR")
            else:
                check(self, op, dtype, lanes, src, arg)
            if op == "LOOP":
                self.open.append(self.at)
            self.scope.append(self.open[-1] if self.open else -1)
            if op == "ENDLOOP":
                self.open.pop()
        if self.open:
            self.at = self.open[-1]
            self.fail("the loop is never closed")

    def operands_are_defined(self, op: str, src: tuple[int, ...]) -> None:
        for s in src:
            if not (isinstance(s, int) and 0 <= s < self.at):
                self.fail(f"operand %{s} is not an earlier instruction")
            if self.code[s].op in NO_VALUE:
                self.fail(f"operand %{s} has no value")
            if not (self.scope[s] == -1 or self.scope[s] in self.open or (op == "RESULT" and s in self.ends)):
                self.fail(f"operand %{s} is defined in the loop %{self.scope[s]}, which is closed")

    def note_tiles_and_threads(self, op: str, src: tuple[int, ...], arg: Any) -> None:
        """Note whether the instruction's value is a tile, and whether it may differ between the threads of a group."""
        carried = op in ("CARRY", "RESULT") and src and isinstance(arg, int) and self.code[src[0]].op == "LOOP"
        first = self.code[src[0]].src[2 + arg:3 + arg] if carried else ()      # the initial value of a carried value
        if op in ("TILEZERO", "TILELOAD", "TILEDOT") or not self.tiles.isdisjoint(first):
            self.tiles.add(self.at)
        if op in _OF_A_THREAD or (op in LOADS_OPS and self.phase.block > 1) or not self.varying.isdisjoint(src):
            self.varying.add(self.at)

    def constant(self, op: str, dtype: DType, lanes: int, src: tuple[int, ...], arg: Any) -> None:
        self.require(not src, "a constant has no operands")
        values = arg if op == "VCONST" else (arg,)
        self.require(op == "CONST" or (isinstance(arg, tuple) and len(arg) == lanes), f"needs a tuple of {lanes} values")
        python = bool if dtype.kind == "b" else float if dtype.is_float else int
        self.require(all(type(v) is python for v in values), f"a {dtype.name} constant is a Python {python.__name__}")
        self.require(not dtype.is_int or all(dtype.min <= v <= dtype.max for v in values), f"does not fit {dtype.name}")

    def scalar(self, op: str, dtype: DType, lanes: int, src: tuple[int, ...], arg: Any) -> None:
        self.require((dtype, lanes, src) == (INDEX, 1, ()), "is a scalar index without operands")
        self.require(op != "VAR" or arg in self.spec.variables, f"the program's variables are {self.spec.variables}")

    def barrier(self, op: str, dtype: DType, lanes: int, src: tuple[int, ...], arg: Any) -> None:
        self.require((dtype, lanes, src, arg) == (dtypes.void, 1, (), None), "has no type, no operands and no arg")
        self.runs_together()

    def runs_together(self) -> None:
        """Check that all threads of the group run this instruction equally often."""
        for loop in self.open:
            self.require(not any(s in self.varying for s in self.code[loop].src[:2]),
                         f"stands in the loop %{loop}, which the threads of a group may run a different number of times")

    def copy_async(self, op: str, dtype: DType, lanes: int, src: tuple[int, ...], arg: Any) -> None:
        if op != "COPY_ASYNC":
            self.require((dtype, lanes, src) == (dtypes.void, 1, ()), "has no type and no operands")
            self.require(arg is None if op == "COMMIT" else isinstance(arg, int) and arg >= 0, "the arg is how many copies may still run")
            return
        self.require(len(src) == 6, "takes two pointers with their indices, and two conditions")
        self.require(lanes * dtype.itemsize in (4, 8, 16), "copies 4, 8 or 16 bytes")
        self.copied(dtype, src, arg)

    def copied(self, dtype: DType, src: tuple[int, ...], arg: Any) -> None:
        """Check the operands of a copy to shared memory, from an argument or a temporary; conditions come after pointers and indices."""
        self.pointer_to(src[0], "SHARED", dtype)
        self.pointer_to(src[2], "TEMP" if self.code[src[2]].op == "TEMP" else "ARG", dtype)
        for s, of in zip((src[1], src[3], *src[4:]), (INDEX, INDEX, BOOL, BOOL), strict=False):
            self.operand(s, of, 1, "operand")
        self.require(_are_numbers(arg, 2), "the arg is two offsets")

    def copy_bulk(self, op: str, dtype: DType, lanes: int, src: tuple[int, ...], arg: Any) -> None:
        counts = src[-2:] if op == "COPY_BULK" else src
        self.require(len(src) == {"COPY_BULK": 7, "BULK_WAIT": 3}.get(op, 1), "has another number of operands")
        self.pointer_to(counts[0], "SHARED", dtypes.int64)
        for s in counts[1:]:
            self.operand(s, INDEX, 1, "operand")
        if op != "COPY_BULK":
            self.require((dtype, lanes) == (dtypes.void, 1), "has no type")
            pair = _are_numbers(arg, 2) and min(arg) > 0
            self.require(pair if op == "BULK_BEGIN" else isinstance(arg, int) and arg > 0 if op == "BULK_END" else arg is None,
                         "the arg is how many buffers there are, and how many copies fill one")
            self.runs_together()
            return
        self.require(lanes * dtype.itemsize % 16 == 0, "copies multiples of 16 bytes")
        self.copied(dtype, src[:5], arg)

    def exchange(self, op: str, dtype: DType, lanes: int, src: tuple[int, ...], arg: Any) -> None:
        self.require(len(src) == 1, "takes one operand")
        self.operand(src[0], dtype, lanes, "operand")
        size = self.phase.subgroup
        ok = isinstance(arg, int) and 0 < arg < size and arg & (arg - 1) == 0
        self.require(ok, f"needs a power of two below the {size} threads of a subgroup")
        self.runs_together()

    def held(self, op: str, dtype: DType, lanes: int, src: tuple[int, ...], arg: Any) -> None:
        """Check an instruction on a tile that the threads of a subgroup hold together, each with the elements of its fragment."""
        name = arg if op == "MMA" else arg[op == "LOADMATRIX"] if isinstance(arg, tuple) and len(arg) == (6 if op == "LOADMATRIX" else 3) \
            else None
        dot = DOTS.get(name) if isinstance(name, str) else None
        if dot is None or dot.fragments is None or dot.reads_shared != (op == "MMASHARED"):
            self.fail(f"{name!r} is no instruction of a subgroup{' with operands in shared memory' * (op == 'MMASHARED')}")
            return
        subgroups = dot.threads // max(1, self.phase.subgroup)
        self.require(dot.threads == subgroups * self.phase.subgroup and self.phase.block % dot.threads == 0,
                     f"{dot.name} takes whole subgroups of {dot.threads}, groups are of {self.phase.block} threads, subgroups of "
                     f"{self.phase.subgroup}")
        self.runs_together()
        if op == "MMASHARED":
            self.held_in_shared(dot, dtype, lanes, src, arg)
            return
        if op == "MMA":
            self.require(len(src) == 3, "takes an accumulator and two operands")
            for s, kind, fragment in zip(src, (dot.accumulator, *dot.operands), dot.fragments, strict=True):
                self.operand(s, kind, fragment.num_elements, "operand")
            self.require((dtype, lanes) == self.kind(src[0]), "has the type of its accumulator")
            return
        offset, _, number, *strides, lines = arg
        self.require(number in (0, 1) and all(isinstance(n, int) for n in (offset, *strides)) and lines in (1, 2, 4, 8), "the arg is an "
                     "offset, an instruction, 0 or 1 for the operand, the elements from row to row and from column to column, and 1, 2, 4 "
                     "or 8 lines of a row")
        self.require(len(src) == (2 if lines == 1 else 3), "takes a pointer and an index, and another one of lines that change places")
        if lines > 1:
            self.require(self.code[src[0]].op == "SHARED" and self.code[src[0]].arg % (8 * lines * MATRIX_LINE_BYTES) == 0,
                         f"rows of {lines} lines lie in an area of shared memory that begins at a multiple of "
                         f"{8 * lines * MATRIX_LINE_BYTES} bytes")
            self.operand(src[2], INDEX, 1, "index")
        self.require(self.code[src[0]].op in POINTERS - {"SCRATCH"} and self.code[src[0]].dtype == dtype,
                     f"operand %{src[0]} is no pointer to {dtype.name} that a subgroup shares")
        self.operand(src[1], INDEX, 1, "index")
        self.require((dtype, lanes) == (dot.operands[number], dot.fragments[1 + number].num_elements),
                     f"a thread holds {dot.fragments[1 + number].num_elements} {dot.operands[number].name}")

    def products_wait(self, op: str, dtype: DType, lanes: int, src: tuple[int, ...], arg: Any) -> None:
        self.require(len(src) == 1, "takes one operand")
        self.operand(src[0], dtype, lanes, "operand")
        self.require(isinstance(arg, int) and arg >= 0, "the arg is how many groups of products may still run")
        self.runs_together()

    def held_in_shared(self, dot: Dot, dtype: DType, lanes: int, src: tuple[int, ...], arg: Any) -> None:
        """Check a product of tiles in shared memory, which are stored in lines."""
        assert dot.fragments is not None
        self.require(len(src) == 5, "takes an accumulator, and a pointer and an index for each operand")
        self.operand(src[0], dot.accumulator, dot.fragments[0].num_elements, "accumulator")
        self.require((dtype, lanes) == self.kind(src[0]), "has the type of its accumulator")
        for number, (pointer, index, side) in enumerate(zip(src[1::2], src[2::2], arg[1:], strict=True)):
            own = dot.operands[number]
            self.pointer_to(pointer, "SHARED", own)
            self.operand(index, INDEX, 1, "index")
            self.require(_are_numbers(side, 4) and side[1] in (0, 1) and side[3] in (1, 2, 4, 8),
                         "the arg is an instruction and, for each operand, an offset, 0 or 1 for the dim that is cut into rows, "
                         "elements from row to row along it, and 1, 2, 4 or 8 lines of a row")
            line, lines = MATRIX_LINE_BYTES // own.itemsize, side[3]
            self.require(side[0] % line == 0 == side[2] % line, "lines begin at multiples of a line")
            self.require(lines == 1 or self.code[pointer].arg % (8 * lines * MATRIX_LINE_BYTES) == 0,
                         f"rows of {lines} lines lie in an area that begins at a multiple of {8 * lines * MATRIX_LINE_BYTES} bytes")

    def transcendental(self, op: str, dtype: DType, lanes: int, src: tuple[int, ...], arg: Any) -> None:
        self.fail("transcendental operations are expanded by lowering (svod.compile.lower.math)")

    def elementwise(self, op: str, dtype: DType, lanes: int, src: tuple[int, ...], arg: Any) -> None:
        if len(src) != ARITY[op]:
            self.fail(f"takes {ARITY[op]} operands")
        of = dtype
        if op in COMPARES:
            self.require(dtype == BOOL, "a comparison gives bool")
            of, _ = self.kind(src[0])
        elif op == "WHERE":
            if self.kind(src[0]) not in ((BOOL, lanes), (BOOL, 1)):
                self.fail(f"the condition %{src[0]} is not a bool of {lanes} lanes or one")
            src = src[1:]
        self.require(op not in FLOAT_ONLY or dtype.is_float, "is defined for floats")
        self.require(op != "POW2" or dtype == dtypes.float32, "is defined for float32")
        self.require(op not in LEGAL_INTEGER or dtype.is_int, "is defined for integers")
        self.require(op not in BITS_ONLY or not dtype.is_float, "is defined for bools and integers")
        for s in src:
            self.operand(s, of, lanes, "operand")

    def lanes_and_types(self, op: str, dtype: DType, lanes: int, src: tuple[int, ...], arg: Any) -> None:
        self.require(len(src) == 1 or (op == "SHUFFLE" and len(src) == 2), "wrong number of operands")
        of, width = self.kind(src[0])
        if self.code[src[0]].op in POINTERS:
            self.fail(f"operand %{src[0]} is a pointer")
        if op == "CAST":
            if width != lanes:
                self.fail(f"keeps the {width} lanes of its operand")
            return
        if op == "BITCAST":
            same = of.itemsize == dtype.itemsize and width == lanes
            self.require(same or (of.itemsize * width == dtype.itemsize * lanes and BOOL not in (of, dtype)),
                         f"{of.name}x{width} and {dtype.name}x{lanes} differ in width")
            return
        if of != dtype:
            self.fail(f"keeps the type {of.name} of its operand")
        if op == "SPLAT":
            if width != 1:
                self.fail(f"operand has {width} lanes, needed is a scalar")
        elif op == "EXTRACT":
            if not (lanes == 1 and isinstance(arg, int) and 0 <= arg < width):
                self.fail(f"takes one of {width} lanes")
        else:
            self.operand(src[-1], dtype, width, "operand")
            if not (isinstance(arg, tuple) and len(arg) == lanes and (not arg or (min(arg) >= -1 and max(arg) < width * len(src)))):
                self.fail(f"needs {lanes} lane numbers below {width * len(src)}")

    def dot(self, op: str, dtype: DType, lanes: int, src: tuple[int, ...], arg: Any) -> None:
        self.require(len(src) == 3, "takes an accumulator and two operands")
        self.operand(src[0], dtype, lanes, "accumulator")
        kinds = tuple(self.code[s].dtype for s in src[1:])
        known = [(d.accumulator, d.operands, d.group) for d in DOTS.values() if not d.is_tile]
        self.require((dtype, kinds, arg) in known, f"{dtype.name} of {arg} {' by '.join(k.name for k in kinds)} is no dot instruction")
        for s, k in zip(src[1:], kinds, strict=True):
            self.operand(s, k, lanes * arg, "operand")

    def tile(self, op: str, dtype: DType, lanes: int, src: tuple[int, ...], arg: Any) -> None:
        self.require(_are_numbers(arg, 3), "the arg is three numbers")
        if op == "TILEZERO":
            self.require(not src and lanes == arg[0] * arg[1], f"has {arg[0]}·{arg[1]} lanes and no operands")
        elif op == "TILEDOT":
            rows, columns, group = arg
            self.require(len(src) == 3, "takes an accumulator and two operands")
            kinds = tuple(self.code[s].dtype for s in src[1:])
            dot = next((d for d in DOTS.values() if d.is_tile and (d.accumulator, d.operands, d.group) == (dtype, kinds, group)), None)
            if dot is None:
                self.fail(f"{dtype.name} of {group} {' by '.join(k.name for k in kinds)} is no instruction")
                return
            self.require(1 <= rows <= dot.rows and 1 <= columns <= dot.columns, f"has {dot.rows} rows of {dot.columns} at most")
            self.operand(src[0], dtype, lanes, "accumulator", tile=True)
            self.require(lanes == rows * columns, f"has {rows}·{columns} lanes")
            for s, k, n in zip(src[1:], kinds, (rows, columns), strict=True):
                self.operand(s, k, n * group * dot.depth, "operand", tile=True)
        else:
            self.require(len(src) == (3 if op == "TILESTORE" else 2), "wrong number of operands")
            self.require(self.code[src[0]][:2] in ((p, dtype) for p in POINTERS), f"operand %{src[0]} is no pointer to {dtype.name}")
            self.require(op == "TILELOAD" or self.code[src[0]].op != "ARG", "tiles are stored to scratch")
            self.operand(src[1], INDEX, 1, "index")
            self.require(lanes % arg[1] == 0, f"{lanes} lanes are no {arg[1]} rows")
            if op == "TILESTORE":
                self.operand(src[2], dtype, lanes, "value", tile=True)

    def memory(self, op: str, dtype: DType, lanes: int, src: tuple[int, ...], arg: Any) -> None:
        store, indexed = op in STORE_OPS, op in ("GATHER", "SCATTER")
        plain = 3 if store else 2
        self.require(len(src) in ((plain, plain + 1) if store else (plain, plain + 2)), "wrong number of operands")
        pointer = self.code[src[0]]
        if pointer.op not in POINTERS:
            self.fail(f"operand %{src[0]} is not a pointer")
        if pointer.dtype != dtype:
            self.fail(f"the pointer %{src[0]} is to {pointer.dtype.name}")
        self.operand(src[1], INDEX, lanes if indexed else 1, "index")
        if store:
            self.operand(src[2], dtype, lanes, "value")
            if pointer.op == "ARG" and pointer.arg not in self.spec.outs:
                self.fail(f"argument {pointer.arg} is not an output {self.spec.outs}")
        if len(src) > plain:
            mask = src[plain]
            if self.kind(mask) not in ((BOOL, lanes), (BOOL, 1)):
                self.fail(f"the mask %{mask} is not a bool of {lanes} lanes or one")
            if not store:
                self.operand(src[3], dtype, lanes, "alternative")
        wanted = {"LOAD": "offset", "GATHER": "offset", "SCATTER": "offset", "STORE": "(offset, stream)"}.get(op, "(offset, stride)")
        shape_ok = isinstance(arg, int) if wanted == "offset" else isinstance(arg, tuple) and len(arg) == 2 and isinstance(arg[0], int)
        self.require(shape_ok, f"the arg is {wanted}")

    def prefetch(self, op: str, dtype: DType, lanes: int, src: tuple[int, ...], arg: Any) -> None:
        self.require(len(src) == 2 and lanes == 1 and isinstance(arg, int), "takes a pointer and an index, and has one lane and an offset")
        known = self.code[src[0]][:2] in (("ARG", dtype), ("TEMP", dtype))
        self.require(known, f"operand %{src[0]} is no argument or temporary of {dtype.name}")
        self.operand(src[1], INDEX, 1, "index")

    def pointer(self, op: str, dtype: DType, lanes: int, src: tuple[int, ...], arg: Any) -> None:
        spec = self.spec
        self.require(not src and lanes == 1 and dtype not in (INDEX, dtypes.void), "a pointer has an element type and no operands")
        self.require(isinstance(arg, int) and arg >= 0, "the arg is a number")
        if op == "ARG":
            self.require(arg < len(spec.params), f"the program has {len(spec.params)} parameters")
            own, _ = spec.params[arg]
            self.require(own == dtype, f"parameter {arg} is {own.name}")
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
                if self.code[s].op in POINTERS:
                    self.fail(f"initial value %{s} is a pointer")
            return
        head = self.code[src[0]]
        if head.op != "LOOP":
            self.fail(f"%{src[0]} is not a LOOP")
        init = head.src[2:]
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
        if not (isinstance(arg, int) and 0 <= arg < len(init)):
            self.fail(f"the loop carries {len(init)} values")
        if self.kind(init[arg]) != (dtype, lanes):
            self.fail(f"the carried value %{init[arg]} has another type")


_OF_A_THREAD = frozenset({"LOCAL_ID", *SUBGROUP_OPS})       # operations whose results differ between the threads of a group


def _are_numbers(arg: Any, count: int) -> bool:
    return isinstance(arg, tuple) and len(arg) == count and all(isinstance(n, int) for n in arg)


Check = Callable[[_PhaseCheck, str, DType, int, tuple[int, ...], Any], None]

_CHECKS: dict[str, Check] = {
    op: check for ops, check in (
        (ARITY, _PhaseCheck.elementwise), (LOADS_OPS | STORE_OPS, _PhaseCheck.memory), (("PREFETCH",), _PhaseCheck.prefetch),
        (("LOOP", "CARRY", "ENDLOOP", "RESULT"), _PhaseCheck.loop), (("DOT",), _PhaseCheck.dot), (TILE_OPS, _PhaseCheck.tile),
        (("CAST", "BITCAST", "SPLAT", "EXTRACT", "SHUFFLE"), _PhaseCheck.lanes_and_types), (("CONST", "VCONST"), _PhaseCheck.constant),
        (POINTERS, _PhaseCheck.pointer), (("BARRIER",), _PhaseCheck.barrier),
        (("SHFL_XOR",), _PhaseCheck.exchange), (HELD_OPS, _PhaseCheck.held), (("COPY_ASYNC", "COMMIT", "WAIT"), _PhaseCheck.copy_async),
        (("MMAWAIT",), _PhaseCheck.products_wait),
        (BULK_OPS, _PhaseCheck.copy_bulk),
        (("BEGIN", "END_", "VAR", "LOCAL_ID"), _PhaseCheck.scalar),
        ({o.value for o in TRANSCENDENTAL}, _PhaseCheck.transcendental))
    for op in ops
}
