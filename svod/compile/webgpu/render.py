"""LINEAR → WGSL: a module for each phase.

    BEGIN           launch[0].x + the group's number in a grid of up to two dimensions; groups from launch[0].y on do nothing
    LOCAL_ID        local_invocation_index; where threads exchange registers subgroup_id · size + subgroup_invocation_id
    SHFL_XOR        subgroupShuffleXor
    LOOP            for; a block for the loop over the phase's own group; an if for a loop with at most one iteration
    CARRY, RESULT   a variable of the function
    VAR             a number in the uniform buffer `launch`, which has begin, end, the variables, and the offset of each argument
    BARRIER         workgroupBarrier, and storageBarrier if the phase reads memory that it writes

Each phase has two modules: one for arguments that begin at multiples of a binding's alignment, and one for arguments at any address, which
accesses them element by element from the offset in `launch`. (With the offset in an `override`, naga folds constants once more and rejects
its own result.)
"""
from __future__ import annotations

import re
from typing import Any, NamedTuple

from svod.compile.lower.intervals import least_iterations
from svod.compile.lower.legal.legalize import legalize
from svod.compile.lower.linear import LOADS_OPS, POINTERS, STORE_OPS, validate
from svod.compile.lower.program import Instruction, PhaseSpec, Program, ProgramSpec
from svod.compile.lower.residues import residues
from svod.compile.webgpu.access import GLOBAL, PointerMemory, load, memories_of, store
from svod.compile.webgpu.alu import HANDLERS, WGSL_INSTRUCTIONS
from svod.compile.webgpu.hidden import hidden_operands
from svod.compile.webgpu.text import Facts, WgslWriter, register, widths
from svod.core.machine.target import Target
from svod.errors import CompileError, UnsupportedError

ENTRY, OTHER = "main", "OTHER"      # name of the entry point; name of the binding of the word described in `WgslPhase`
SOFTWARE_ITERATIONS = 65535     # iterations of all loops of a thread after which Mesa's software driver ends them without an error
MOST_ELEMENTS = (1 << 31) - (1 << 16)  # maximum elements of an argument: indices have 32 bits, and may be a little larger than the size


_HEAD = re.compile(r"^//// .*, bound: ((?:\w+:\d+ ?)*)\n", re.M)


class WgslPhase(NamedTuple):
    """A phase as WGSL. `bindings`: the contents of the bindings after the first: ("ARG", slot), ("TEMP", number) or (OTHER, 0), a word that
    a group sets if its subgroup size differs from the target's."""

    wgsl: str
    bindings: tuple[tuple[str, int], ...]


class PhaseModules(NamedTuple):
    """The forms of a phase: for arguments that are aligned to vectors, and for any arguments."""

    aligned: WgslPhase
    any: WgslPhase


def legal(program: Program, target: Target) -> Program:
    """Reduce the program to instructions that `render` prints."""
    return legalize(program, WGSL_INSTRUCTIONS)


def render(program: Program, target: Target) -> str:
    """Render the modules of a program, each after a line that names its bindings.

    Raises CompileError for instructions outside LINEAR; UnsupportedError for arguments too large for 32-bit indices, types that the adapter
    lacks, and more iterations than a software driver executes."""
    validate(program)
    program = legal(program, target)
    spec = program.spec
    for slot, (dtype, size) in enumerate(spec.params):
        if size > MOST_ELEMENTS:
            raise UnsupportedError(f"argument {slot} has {size} elements of {dtype.name}; {target.device} computes indices in 32 bits and "
                                   f"reaches {MOST_ELEMENTS}: use smaller tensors, or the CPU")
    text = []
    for phase, code in zip(spec.phases, program.code, strict=True):
        if target.software_lanes and (iterations := least_iterations(phase, code)) > SOFTWARE_ITERATIONS:
            raise UnsupportedError(f"the loops of a thread have {iterations} iterations; the driver in software of {target.device} ends "
                                   f"them after {SOFTWARE_ITERATIONS}: use the CPU, or another chain of a kernel by hand (GROUP, SPLITK)")
        facts = Facts(hidden_operands(code), residues(code))
        for aligned in (True, False):
            wgsl, bindings = _module(spec, phase, code, facts, target, aligned)
            bound = " ".join(f"{op}:{number}" for op, number in bindings)
            text.append(f"//// {phase.symbol} for {'aligned' if aligned else 'any'} arguments, bound: {bound}\n{wgsl}")
    return "".join(text)


def read_modules(source: str) -> list[PhaseModules]:
    """Read the modules from the text that `render` wrote. Raises CompileError for any other text."""
    first, *parts = _HEAD.split(source)
    if first or not parts or len(parts) % 4:
        raise CompileError(f"these are no modules of WGSL: {source[:80]!r}")
    modules = [WgslPhase(wgsl, tuple((op, int(n)) for op, n in re.findall(r"(\w+):(\d+)", bound)))
               for bound, wgsl in zip(parts[::2], parts[1::2], strict=True)]
    return [PhaseModules(*forms) for forms in zip(modules[::2], modules[1::2], strict=True)]


def launch_bytes(spec: ProgramSpec) -> int:
    """Return the size of a launch's numbers: begin, end, the variables, the start of each argument."""
    return 16 * -(-(2 + len(spec.variables) + len(spec.params)) // 4)


def _module(spec: ProgramSpec, phase: PhaseSpec, code: tuple[Instruction, ...], facts: Facts, target: Target, aligned: bool) -> WgslPhase:
    w = WgslWriter(target, spec, phase, code, facts, aligned)
    memories = memories_of(w)
    _Body(w, memories).write()
    used = {(m.op, m.number): m for m in memories.values()}
    bound = [m for m in used.values() if m.op in GLOBAL and m.accessed]
    head = ["enable f16;"] if w.uses_half else []
    head.append(f"@group(0) @binding(0) var<uniform> launch: array<vec4<i32>, {launch_bytes(spec) // 16}>;")
    for number, memory in enumerate(bound):
        head.append(memory.declare(number + 1))
    for op, nbytes in (("SCRATCH", phase.scratch_bytes), ("SHARED", phase.shared_bytes)):
        areas = sorted((m for m in used.values() if m.op == op and m.accessed), key=lambda m: m.number)
        for memory, end in zip(areas, [*[m.number for m in areas[1:]], nbytes], strict=False):
            head.append(memory.declare_private((end - memory.number) // memory.dtype.itemsize))
    if w.hides:
        head.append("var<private> unknown: u32;")      # it is 0, but compilers cannot know that (`WgslWriter.hide`)
    bindings = [(m.op, m.number) for m in bound]
    builtins = {"group_at": "@builtin(workgroup_id) group_at: vec3<u32>", "grid": "@builtin(num_workgroups) grid: vec3<u32>"}
    if phase.subgroup:
        head.append(f"@group(0) @binding({len(bound) + 1}) var<storage, read_write> other: array<u32>;")
        bindings.append((OTHER, 0))
        builtins |= {name: f"@builtin({name}) {name}: u32" for name in ("subgroup_size", "num_subgroups", "subgroup_id",
                                                                       "subgroup_invocation_id")}
    else:
        builtins["thread"] = "@builtin(local_invocation_index) thread: u32"
    main = [f"@compute @workgroup_size({phase.block})", f"fn {ENTRY}({', '.join(builtins.values())}) {{"]
    wgsl = "\n".join([*head, *w.helpers.values(), *main, *w.lines, "}", ""])
    return WgslPhase(wgsl, tuple(bindings))


class _Body:
    """Writes the function of a phase."""

    def __init__(self, w: WgslWriter, memories: dict[int, PointerMemory]) -> None:
        self.w, self.memories = w, memories
        self.carried: dict[int, list[list[str]]] = {}       # LOOP → names of the variables of each carried value
        shares = {(m.op, m.number) for i, m in memories.items() if m.op in GLOBAL and m.stored}
        self.storage_barrier = any((memories[i.src[0]].op, memories[i.src[0]].number) in shares for i in w.code if i.op in LOADS_OPS)

    def write(self) -> None:
        w = self.w
        size = w.phase.subgroup
        first = len(w.lines)
        if size:
            w.line(f"if (subgroup_size != {size}u || num_subgroups != {w.phase.block // size}u) {{ other[0] = 1u; }}")
            w.line(f"let thread = subgroup_id * {size}u + subgroup_invocation_id;")
        if w.phase.extent > w.target.global_limits[0]:
            w.line("let group = launch[0].x + i32(group_at.x + grid.x * group_at.y);")
        else:
            w.line("let group = launch[0].x + i32(group_at.x);")
        w.line("if (group >= launch[0].y) { return; }")
        for i, (op, dtype, lanes, src, arg) in enumerate(w.code):
            w.require(dtype)
            handler = HANDLERS.get(op)
            if handler is not None:
                handler(w, i, dtype, lanes, src, arg)
            elif op in LOADS_OPS:
                load(w, i, self.memories[src[0]])
            elif op in STORE_OPS:
                store(w, i, self.memories[src[0]])
                w.value.append([])
            else:
                self._other(i, op, src, arg)
        if w.hides:
            w.lines.insert(first, "  unknown = u32(launch[0].x) >> 31u;")

    def _other(self, i: int, op: str, src: tuple[int, ...], arg: Any) -> None:
        w = self.w
        if op == "BEGIN":
            w.value.append(["group"])
        elif op == "END_":
            w.value.append([w.let("group + 1i")])
        elif op == "LOCAL_ID":
            w.value.append([w.let("i32(thread)")])
        elif op == "VAR":
            w.value.append([w.let(w.launch_number(2 + w.spec.variables.index(arg)))])
        elif op == "LOOP":
            self._open(i, src, arg)
        elif op == "ENDLOOP":
            self._close(src)
        elif op in ("CARRY", "RESULT"):
            names = self.carried[src[0]][arg]
            w.value.append([w.let(name) for name in names])
        elif op == "BARRIER":
            w.line("workgroupBarrier();")
            if self.storage_barrier:
                w.line("storageBarrier();")
            w.value.append([])
        elif op in POINTERS:
            w.value.append([])
        else:
            raise CompileError(f"{op} is no instruction of {w.target.device}")

    def _open(self, i: int, src: tuple[int, ...], step: int) -> None:
        w = self.w
        start, stop = (w.value[s][0] for s in src[:2])
        names: list[list[str]] = []
        for j, s in enumerate(src[2:]):
            _, dtype, lanes, _, _ = w.code[s]
            own = [f"c{i}_{j}_{k}" for k in range(len(w.value[s]))]
            for name, width, text in zip(own, widths(lanes), w.value[s], strict=True):
                w.line(f"var {name}: {register(dtype, width)} = {text};")
            names.append(own)
        self.carried[i] = names
        condition = self._once(src)
        if condition is not None:
            w.open(f"if ({condition}) {{" if condition else "{")
            w.value.append([start])
        else:
            w.open(f"for (var at{i}: i32 = {start}; at{i} < {stop}; at{i} += {step}i) {{")
            w.value.append([f"at{i}"])

    def _once(self, src: tuple[int, ...]) -> str | None:
        """Return the condition of a loop that runs at most once ("": unconditionally); None for a loop that may run more often."""
        w = self.w
        start, stop = w.code[src[0]], w.code[src[1]]
        if start.op == "BEGIN" and stop.op == "END_":
            return ""
        if start.op == "CONST" and start.arg == 0 and stop.op == "WHERE":
            yes, no = (w.code[s] for s in stop.src[1:])
            if (yes.op, yes.arg, no.op, no.arg) == ("CONST", 1, "CONST", 0):
                return w.value[stop.src[0]][0]
        return None

    def _close(self, src: tuple[int, ...]) -> None:
        w = self.w
        for names, s in zip(self.carried[src[0]], src[1:], strict=True):
            for name, text in zip(names, w.value[s], strict=True):
                w.line(f"{name} = {text};")
        w.close()
        w.value.append([])


def groups_of(extent: int, limit: int) -> tuple[int, int]:
    """Return the dimensions of a grid with at least this number of groups."""
    if extent <= limit:
        return extent, 1
    rows = -(-extent // limit)
    return -(-extent // rows), rows
