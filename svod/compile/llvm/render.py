"""LINEAR → LLVM IR as text: one module per program, one function per phase.

    LINEAR of a phase                               LLVM IR
    0 ARG float32 slot 0                            define void @relu(ptr %args, …, i64 %begin, i64 %end) {
    1 BEGIN                                         entry:
    2 END_                                            %t1 = getelementptr ptr, ptr %args, i64 0
    3 LOOP src 1, 2 step 16                           %v0 = load ptr, ptr %t1, align 8
    4 LOAD float32 x16 src 0, 3                       …guard…
    5 CONST float32 x16 0.0                         loop3:
    6 MAX src 4, 5                                    %v3 = phi i64 [%begin, %entry], [%n3, %loop3]
    7 STORE src 0, 3, 6                               %t2 = getelementptr float, ptr %v0, i64 %v3
    8 ENDLOOP src 3                                   %v4 = load <16 x float>, ptr %t2, align 4  …

The IR is written as text, because LLVM parses it in about 3 µs per line, which is faster than building the module by calls from Python.
Loops are rotated: a guard before the loop (omitted if start and stop are constants), the test at the bottom, carried values as phis. A
value defined in a loop is used outside only through RESULT, so no other phis are needed. LLVM's passes run later or not at all
(`codegen.py`), so the text already has the form that suits the code generator: vector types, shared base addresses with constant offsets,
no stack variables.
"""
from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from svod.compile.llvm.alu import HANDLERS as ALU_HANDLERS
from svod.compile.llvm.alu import ends_of_rounds, instructions
from svod.compile.llvm.memory import HANDLERS as MEMORY_HANDLERS
from svod.compile.llvm.memory import Handler
from svod.compile.llvm.text import LlvmWriter, Scope, register_type
from svod.compile.llvm.tiles import HANDLERS as TILE_HANDLERS
from svod.compile.llvm.tiles import assign_registers, begin_tiles, end_tiles
from svod.compile.lower.legal.legalize import legalize
from svod.compile.lower.program import Instruction, PhaseSpec, Program
from svod.core.ir.dtype import DType
from svod.core.machine.isa import llvm_features
from svod.core.machine.target import Target
from svod.errors import CompileError

SIGNATURE = "ptr noalias readonly %args, ptr noalias readonly %vars, ptr noalias align 64 %scratch, i64 %begin, i64 %end"
_PARAMETERS = "ptr %args, ptr %vars, ptr %scratch, i64 %begin, i64 %end"


def _begin(w: LlvmWriter, i: int, dtype: DType, lanes: int, src: tuple[int, ...], arg: Any) -> None:
    w.value[i] = "%begin"


def _end(w: LlvmWriter, i: int, dtype: DType, lanes: int, src: tuple[int, ...], arg: Any) -> None:
    w.value[i] = "%end"


def _trips(w: LlvmWriter, src: tuple[int, ...], step: int) -> int | None:
    """Return the number of iterations of a loop; None if it is unknown."""
    if step < 1:
        raise CompileError(f"LINEAR instruction LOOP with step {step}: steps are positive")
    start, stop = w.code[src[0]], w.code[src[1]]
    if start.op == "CONST" and stop.op == "CONST":
        return max(0, -int((start.arg - stop.arg) // step))
    return 1 if w.family.one_iteration and (start.op, stop.op) == ("BEGIN", "END_") else None


class _Loop:
    """A loop being written. `once`: constant bounds with one iteration; it becomes straight-line code."""

    def __init__(self, w: LlvmWriter, src: tuple[int, ...], step: int) -> None:
        start, trips = w.code[src[0]], _trips(w, src, step)
        self.once = trips == 1
        self.guarded = not trips
        self.start, self.stop, self.step = w.value[src[0]], w.value[src[1]], step
        self.type = register_type(start.dtype.name, 1)
        self.init = src[2:]
        self.before = w.block
        self.header_line = 0
        self.scope = w.scope
        self.results: list[str] = []


def _loop(w: LlvmWriter, i: int, dtype: DType, lanes: int, src: tuple[int, ...], arg: Any) -> None:
    loop = _Loop(w, src, arg)
    w.loops[i] = loop
    w.scope = Scope(loop.scope)     # addresses that the body adds are not valid after the loop
    if loop.once:
        w.value[i] = loop.start
        return
    if loop.guarded:
        w.lines.append(f"  br i1 {w.temp(f'icmp slt {loop.type} {loop.start}, {loop.stop}')}, label %loop{i}, label %done{i}")
    else:
        w.lines.append(f"  br label %loop{i}")
    w.label(f"loop{i}")
    # ENDLOOP inserts the phis here, which use the values at the end of the body
    loop.header_line = len(w.lines)
    w.lines.extend([""] * (1 + len(loop.init)))
    w.value[i] = f"%v{i}"


def _carry(w: LlvmWriter, i: int, dtype: DType, lanes: int, src: tuple[int, ...], arg: Any) -> None:
    loop = w.loops[src[0]]
    if i not in w.in_tiles:      # a tile already has its register
        w.value[i] = w.value[loop.init[arg]] if loop.once else f"%c{src[0]}.{arg}"


def _endloop(w: LlvmWriter, i: int, dtype: DType, lanes: int, src: tuple[int, ...], arg: Any) -> None:
    at = src[0]
    loop = w.loops[at]
    w.scope = loop.scope
    following = [w.value[s] for s in src[1:]]
    if loop.once:
        loop.results = following
        return
    bottom = w.block
    w.lines.append(f"  %n{at} = add nsw {loop.type} %v{at}, {loop.step}")
    again = w.temp(f"icmp slt {loop.type} %n{at}, {loop.stop}")
    w.lines.append(f"  br i1 {again}, label %loop{at}, label %done{at}{w.family.loop_metadata(w, at, i)}")
    w.lines[loop.header_line] = f"  %v{at} = phi {loop.type} [{loop.start}, %{loop.before}], [%n{at}, %{bottom}]"
    w.label(f"done{at}")
    for j, (first, following_j) in enumerate(zip(loop.init, following, strict=True)):
        if first in w.in_tiles:
            loop.results.append(w.value[first])
            continue
        ty = register_type(w.code[first].dtype.name, w.code[first].lanes)
        w.lines[loop.header_line + 1 + j] = f"  %c{at}.{j} = phi {ty} [{w.value[first]}, %{loop.before}], [{following_j}, %{bottom}]"
        if loop.guarded:
            w.lines.append(f"  %r{at}.{j} = phi {ty} [{w.value[first]}, %{loop.before}], [{following_j}, %{bottom}]")
            loop.results.append(f"%r{at}.{j}")
        else:
            loop.results.append(following_j)


def _result(w: LlvmWriter, i: int, dtype: DType, lanes: int, src: tuple[int, ...], arg: Any) -> None:
    w.value[i] = w.loops[src[0]].results[arg]


HANDLERS: dict[str, Handler] = {
    **MEMORY_HANDLERS, **ALU_HANDLERS, **TILE_HANDLERS,
    "BEGIN": _begin, "END_": _end, "LOOP": _loop, "CARRY": _carry, "ENDLOOP": _endloop, "RESULT": _result,
}


def _render_phase(spec: PhaseSpec, code: tuple[Instruction, ...], target: Target, variables: dict[str, int], temp_base: int,
                  declared: set[str], aligned: bool) -> str:
    streamed = {code[src[0]] for op, _, _, src, arg in code if op == "STORE" and arg[1]}
    if aligned or not streamed:
        return _render_function(f"@{spec.symbol}", spec, code, target, variables, temp_base, declared)
    # Non-temporal vector stores fault on a buffer that is not aligned. svod's own buffers are; memory that a user handed over may not be.
    plain = tuple(i._replace(arg=(i.arg[0], False)) if i.op == "STORE" else i for i in code)
    names = f"@{spec.symbol}.stream", f"@{spec.symbol}.plain"
    lines = [f"define void @{spec.symbol}({SIGNATURE}) #0 {{", "entry:"]
    bits = "0"
    for k, slot in enumerate(sorted(arg if op == "ARG" else temp_base + arg for op, _, _, _, arg in streamed)):
        lines += [f"  %p{k} = getelementptr ptr, ptr %args, i64 {slot}", f"  %a{k} = load i64, ptr %p{k}, align 8",
                  f"  %b{k} = or i64 {bits}, %a{k}"]
        bits = f"%b{k}"
    lines += [f"  %low = and i64 {bits}, {target.vector_bytes - 1}", "  %aligned = icmp eq i64 %low, 0",
              "  br i1 %aligned, label %stream, label %plain"]
    for label, name in zip(("stream", "plain"), names, strict=True):
        lines += [f"{label}:", f"  call void {name}({_PARAMETERS})", "  ret void"]
    parts = [_render_function(name, spec, body, target, variables, temp_base, declared, "internal ")
             for name, body in zip(names, (code, plain), strict=True)]
    return "\n".join([*parts, *lines, "}", ""])


def write_body(w: LlvmWriter, handlers: Mapping[str, Handler], symbol: str) -> None:
    """Write the instructions of a phase. Raises CompileError for one that has no handler."""
    def is_split(instruction: Instruction) -> bool:
        """Whether a LOOP or ENDLOOP belongs to a loop that is written as a loop."""
        loop = instruction if instruction.op == "LOOP" else w.code[instruction.src[0]]
        return _trips(w, loop.src, loop.arg) != 1
    ends = ends_of_rounds(w.code, is_split) if w.family.fences else ()
    try:
        for i, (op, dtype, lanes, src, arg) in enumerate(w.code):
            handlers[op](w, i, dtype, lanes, src, arg)
            if i in ends:
                w.lines.append('  call void asm sideeffect "", ""()')
    except KeyError as missing:
        raise CompileError(f"phase {symbol}: LINEAR instruction {i}, {w.code[i]!r}: {missing} does not exist here") from missing
    w.finish()


def _render_function(name: str, spec: PhaseSpec, code: tuple[Instruction, ...], target: Target, variables: dict[str, int], temp_base: int,
                     declared: set[str], linkage: str = "") -> str:
    w = LlvmWriter(code, target, variables, temp_base, declared)
    if any(op == "TILEDOT" for op, _, _, _, _ in code):
        assign_registers(w)
    write_body(w, HANDLERS, spec.symbol)
    if w.tiles:
        w.lines[1] += ("\n" if w.lines[1] else "") + begin_tiles(w)
        end_tiles(w)
    if w.streams and target.arch == "x86_64":
        # non-temporal stores are not ordered with the release by which the pool reports the phase as done
        w.lines.append("  call void @llvm.x86.sse.sfence()")
    body = "\n".join(w.lines)
    return f"define {linkage}void {name}({SIGNATURE}) #0 {{\n{body}\n  ret void\n}}\n"


def function_attributes(target: Target) -> str:
    """Return the attributes that fix the instruction set. `target-cpu` stays the baseline, so that only the features in the target's key
    are used; `tune-cpu` is the core whose scheduling model LLVM uses."""
    reserved = ("reserve-x18",) if target.arch == "aarch64" else ()     # a register that macOS and Windows reserve
    features = ",".join("+" + f for f in (*llvm_features(target.arch, target.features), *reserved))
    base = "x86-64" if target.arch == "x86_64" else "generic"
    width = f' "prefer-vector-width"="{target.vector_bytes * 8}"' if target.arch == "x86_64" else ""
    return f'nounwind "target-cpu"="{base}" "tune-cpu"="{target.cpu}" "target-features"="{features}"{width} "no-builtins"'


def legal(program: Program, target: Target) -> Program:
    """Reduce the program to instructions that `render` prints."""
    return legalize(program, instructions(target))


def render(program: Program, target: Target, aligned: bool = False) -> str:
    """Render the LLVM module of `program` for `target`: a function `void symbol(ptr args, ptr vars, ptr scratch, i64 begin, i64 end)` per
    phase. `aligned`: the code will only get buffers aligned to a vector, and may fault on others; this halves the code of kernels with
    streaming stores.

    Raises CompileError for an instruction outside LINEAR's grammar (docs/ir.md, section 4)."""
    program = legal(program, target)
    spec = program.spec
    variables = {name: k for k, name in enumerate(spec.variables)}
    declared: set[str] = set()
    functions = [_render_phase(phase, code, target, variables, len(spec.params), declared, aligned)
                 for phase, code in zip(spec.phases, program.code, strict=True)]
    return "\n".join([*functions, *sorted(declared), f"attributes #0 = {{ {function_attributes(target)} }}", "!0 = !{i32 1}", ""])
