"""LINEAR → LLVM IR for NVIDIA's GPUs: the text of `svod/compile/llvm`, with the differences for GPUs.

    phase of 40 groups of 128 threads         define ptx_kernel void @svod_p0(ptr addrspace(1) noalias align 16 %a0, …, i64 %begin, …)
    BEGIN                                     %begin + ctaid.x: the group
    END_                                      the group after it
    LOCAL_ID                                  tid.x
    SHARED float32 [64]                       byte 64 of @svod_p0.shared; of @svod_dynamic if the phase needs more than STATIC_SHARED
    SCRATCH float32 [0]                       an alloca: local memory of the thread
    BARRIER                                   barrier.cta.sync
    SHFL_XOR float32 [16]                     shfl.sync.bfly
    LOADMATRIX, MMA                           ldmatrix, mma.sync (matrix.py)
    MMASHARED                                 wgmma (warpgroup.py)
    COPY_ASYNC, COMMIT, WAIT                  cp.async (copies.py)
    COPY_BULK, BULK_WAIT                      cp.async.bulk, mbarrier

In a phase with groups of one thread, iterations are independent: `PACKED` of them run as one block. Pointers are generic in the text; LLVM
infers their address space. An access is as wide as the alignment of its address allows, up to 16 bytes. A masked access is inside a branch,
which ptxas turns into a predicate. Arguments are assumed to be aligned to 16 bytes and not to overlap; `without_assumptions` rewrites a
module for arguments that are not.
"""
from __future__ import annotations

import re
from dataclasses import replace
from itertools import pairwise
from math import gcd
from typing import Any

from svod.compile.cuda.copies import HANDLERS as COPY_HANDLERS
from svod.compile.cuda.copies import by_bytes
from svod.compile.cuda.matrix import HANDLERS as MATRIX_HANDLERS
from svod.compile.cuda.matrix import THREAD
from svod.compile.cuda.targets import GRID, STATIC_SHARED, WIDEST_BYTES
from svod.compile.cuda.warpgroup import FENCE, Warpgroups
from svod.compile.cuda.warpgroup import HANDLERS as WARPGROUP_HANDLERS
from svod.compile.llvm.alu import LLVM_INSTRUCTIONS
from svod.compile.llvm.memory import Handler
from svod.compile.llvm.render import HANDLERS as COMMON_HANDLERS
from svod.compile.llvm.render import write_body
from svod.compile.llvm.text import SCALAR, LlvmWriter
from svod.compile.lower.legal.instructions import Instructions
from svod.compile.lower.legal.legalize import legalize
from svod.compile.lower.linear import TILE_OPS
from svod.compile.lower.narrow import narrow_indices
from svod.compile.lower.program import Instruction, PhaseSpec, Program
from svod.compile.lower.residues import residues
from svod.core.ir.dtype import DType
from svod.core.kernel.layout import SWIZZLED
from svod.core.machine.target import Target

PACKED = 128        # iterations of a phase without groups that run as one block
POINTER = "ptr addrspace(1) noalias align 16"
DYNAMIC = "svod_dynamic"       # a name that is the same in PTX: LLVM does not rename an external symbol
SREG = "llvm.nvvm.read.ptx.sreg."
ROLLED = '!0 = !{!"llvm.loop.unroll.disable"}'     # LLVM writes it as .pragma "nounroll" in PTX


def block_of(phase: PhaseSpec) -> int:
    """Return the number of threads of a block of a phase."""
    return PACKED if is_packed(phase) else phase.block


def is_packed(phase: PhaseSpec) -> bool:
    """Whether several iterations of a phase run as one block."""
    return phase.block == 1 and not phase.shared_bytes


def dynamic_bytes(phase: PhaseSpec) -> int:
    """Return the bytes of shared memory that a launch of a phase requests."""
    return phase.shared_bytes if phase.shared_bytes > STATIC_SHARED else 0


class Gpu(Warpgroups):
    """The rendering for GPUs: threads run in lockstep and have wide memory accesses, but no vector registers."""

    branches = True
    fences = False
    one_iteration = True
    widest_stride = 0

    def __init__(self, symbol: str, shared: str, code: tuple[Instruction, ...]):
        super().__init__(code)
        self.symbol, self.shared, self.residues = symbol, shared, residues(code)

    def alignment(self, w: LlvmWriter, ptr: int, idx: int, offset: int, lanes: int) -> int:
        size = w.code[ptr].dtype.itemsize
        whole = max(size, min(WIDEST_BYTES, 1 << (lanes * size).bit_length() - 1))
        return max(size, min(whole, gcd(self.residues[idx].divisor(offset) * size, WIDEST_BYTES)))

    def element_alignment(self, w: LlvmWriter, ptr: int) -> int:
        return w.code[ptr].dtype.itemsize

    def loop_metadata(self, w: LlvmWriter, begin: int, end: int) -> str:
        """Return metadata that keeps ptxas from unrolling a loop with wgmma and a constant number of iterations: unrolling takes seconds
        per loop and gains nothing. Other loops: no metadata."""
        if not any(x.op == "MMASHARED" for x in w.code[begin:end]):
            return ""
        w.declared.add(ROLLED)
        number = 1 + sum(line.startswith("!") and "distinct" in line for line in w.declared)
        w.declared.add(f"!{number} = distinct !{{!{number}, !0}}")
        return f", !llvm.loop !{number}"


def _family(w: LlvmWriter) -> Gpu:
    assert isinstance(w.family, Gpu)
    return w.family


def _begin(w: LlvmWriter, i: int, dtype: DType, lanes: int, src: tuple[int, ...], arg: Any) -> None:
    w.value[i] = "%group" if dtype.bits == 64 else w.temp("trunc i64 %group to i32")


def _end(w: LlvmWriter, i: int, dtype: DType, lanes: int, src: tuple[int, ...], arg: Any) -> None:
    after = w.temp("add nsw i64 %group, 1")
    w.value[i] = after if dtype.bits == 64 else w.temp(f"trunc i64 {after} to i32")


def _local_id(w: LlvmWriter, i: int, dtype: DType, lanes: int, src: tuple[int, ...], arg: Any) -> None:
    thread = w.call("i32", THREAD)
    w.value[i] = thread if dtype.bits == 32 else w.temp(f"zext i32 {thread} to i64")


def _arg(w: LlvmWriter, i: int, dtype: DType, lanes: int, src: tuple[int, ...], arg: Any) -> None:
    w.value[i] = f"%g{arg + (w.temp_base if w.code[i].op == 'TEMP' else 0)}"


def _var(w: LlvmWriter, i: int, dtype: DType, lanes: int, src: tuple[int, ...], arg: Any) -> None:
    w.value[i] = f"%n{w.variables[arg]}"


def _scratch(w: LlvmWriter, i: int, dtype: DType, lanes: int, src: tuple[int, ...], arg: Any) -> None:
    w.value[i] = f"%scratch{arg}"


def _shared(w: LlvmWriter, i: int, dtype: DType, lanes: int, src: tuple[int, ...], arg: Any) -> None:
    whole = f"addrspacecast (ptr addrspace(3) @{_family(w).shared} to ptr)"
    w.value[i] = w.temp(f"getelementptr i8, ptr {whole}, i64 {arg}")


def _barrier(w: LlvmWriter, i: int, dtype: DType, lanes: int, src: tuple[int, ...], arg: Any) -> None:
    if _family(w).products:
        w.lines.append(f'  call void asm sideeffect "{FENCE}", ""()')
    w.call("void", "llvm.nvvm.barrier.cta.sync.aligned.all", ("i32", "0"))


def _exchange(w: LlvmWriter, i: int, dtype: DType, lanes: int, src: tuple[int, ...], arg: Any) -> None:
    """Read the value of the thread whose number differs from this thread's in one bit, `arg`, in words of 32 bits."""
    scalar, operand = SCALAR[dtype.name], w.value[src[0]]
    bits = 1 if dtype.kind == "b" else dtype.bits

    def exchanged(word: str) -> str:
        return w.call("i32", "llvm.nvvm.shfl.sync.bfly.i32", *(("i32", x) for x in ("-1", word, str(arg), "31")))

    def one(x: str) -> str:
        if bits < 32:
            return w.temp(f"trunc i32 {exchanged(w.temp(f'zext {scalar} {x} to i32'))} to {scalar}")
        if bits == 32:
            word = x if scalar == "i32" else w.temp(f"bitcast {scalar} {x} to i32")
            return exchanged(word) if scalar == "i32" else w.temp(f"bitcast i32 {exchanged(word)} to {scalar}")
        halves = w.temp(f"bitcast {scalar} {x} to <2 x i32>")
        result = w.vector("i32", 2, (exchanged(w.temp(f"extractelement <2 x i32> {halves}, i64 {k}")) for k in range(2)))
        return w.temp(f"bitcast <2 x i32> {result} to {scalar}")
    parts = [operand] if lanes == 1 else (w.temp(f"extractelement <{lanes} x {scalar}> {operand}, i64 {k}") for k in range(lanes))
    w.value[i] = w.vector(scalar, lanes, map(one, parts))


HANDLERS: dict[str, Handler] = {
    **{op: handler for op, handler in COMMON_HANDLERS.items() if op not in (*TILE_OPS, "DOT", "PREFETCH")},
    **MATRIX_HANDLERS, **WARPGROUP_HANDLERS, **COPY_HANDLERS,
    "BEGIN": _begin, "END_": _end, "LOCAL_ID": _local_id, "ARG": _arg, "TEMP": _arg, "VAR": _var, "SCRATCH": _scratch, "SHARED": _shared,
    "BARRIER": _barrier, "SHFL_XOR": _exchange,
}


def _prologue(w: LlvmWriter, phase: PhaseSpec, pointers: int) -> None:
    """Write the beginning of a kernel: its memory, and the number of this thread's iteration."""
    w.lines += [f"  %g{k} = addrspacecast ptr addrspace(1) %a{k} to ptr" for k in range(pointers)]
    starts = sorted({i.arg for i in w.code if i.op == "SCRATCH"})
    w.lines += [f"  %scratch{a} = alloca [{b - a} x i8], align 16" for a, b in pairwise([*starts, phase.scratch_bytes])]

    def special(name: str) -> str:
        """Read a special register (thread or block number) as i64."""
        return w.temp(f"zext i32 {w.call('i32', name)} to i64")
    group = special(f"{SREG}ctaid.x")
    folded = -(-phase.extent // block_of(phase) if is_packed(phase) else phase.extent) > GRID[0]
    if folded:
        row, width = special(f"{SREG}ctaid.y"), special(f"{SREG}nctaid.x")
        group = w.temp(f"add nsw i64 {group}, {w.temp(f'mul nsw i64 {row}, {width}')}")
    if is_packed(phase):
        thread = special(THREAD)
        group = w.temp(f"add nsw i64 {w.temp(f'mul nsw i64 {group}, {PACKED}')}, {thread}")
    w.lines.append(f"  %group = add nsw i64 %begin, {group}")
    if folded or is_packed(phase):
        w.lines.append(f"  br i1 {w.temp('icmp slt i64 %group, %end')}, label %run, label %leave")
        w.label("run")


def _render_phase(phase: PhaseSpec, code: tuple[Instruction, ...], program: Program, target: Target, declared: set[str]) -> str:
    spec = program.spec
    shared = DYNAMIC if dynamic_bytes(phase) else f"{phase.symbol}.shared"
    if phase.shared_bytes:
        declared.add(f"@{DYNAMIC} = external addrspace(3) global [0 x i8], align {SWIZZLED}" if dynamic_bytes(phase) else
                     f"@{shared} = internal addrspace(3) global [{phase.shared_bytes} x i8] undef, align {SWIZZLED}")
    variables = {name: k for k, name in enumerate(spec.variables)}
    w = LlvmWriter(code, target, variables, len(spec.params), declared, Gpu(phase.symbol, shared, code))
    pointers = len(spec.params) + len(spec.temps)
    _prologue(w, phase, pointers)
    write_body(w, HANDLERS, phase.symbol)
    w.lines += ["  br label %leave", "leave:"]
    parameters = [f"{POINTER} %a{k}" for k in range(pointers)] + [f"i64 %n{k}" for k in range(len(variables))] + ["i64 %begin", "i64 %end"]
    body = "\n".join(line for line in w.lines if line)
    # at least one block per streaming multiprocessor: otherwise ptxas spills a few registers although more are available
    attributes = f'nounwind "no-builtins" "nvvm.maxntid"="{block_of(phase)}" "nvvm.minctasm"="1"'
    return f"define ptx_kernel void @{phase.symbol}({', '.join(parameters)}) {attributes} {{\n{body}\n  ret void\n}}\n"


def instructions(target: Target) -> Instructions:
    """Return the instructions that can be printed for an architecture. An architecture with matrix instructions for bfloat16 also has
    conversions from float32 to it."""
    halves = frozenset({"float16"})
    return replace(LLVM_INSTRUCTIONS, half_casts=halves | {"bfloat16"} if "mma.bf16" in target.features else halves, widened=halves)


def legal(program: Program, target: Target) -> Program:
    """Reduce the program to instructions that `render` prints, with 32-bit indices if they fit."""
    code = tuple([narrow_indices(phase, code) for phase, code in zip(program.spec.phases, program.code, strict=True)])
    return legalize(Program(program.spec, code), instructions(target))


def render(program: Program, target: Target) -> str:
    """Render the LLVM module of a program, with a kernel per phase. The arguments of a kernel are the addresses of parameters and
    temporaries, the values of variables, and the iterations to compute, begin ≤ i < end.

    Raises CompileError for an instruction outside LINEAR's grammar (docs/ir.md, section 4)."""
    program, declared = legal(program, target), set[str]()
    kernels = [_render_phase(phase, code, program, target, declared) for phase, code in zip(program.spec.phases, program.code, strict=True)]
    return "\n".join([*sorted(declared), *kernels])


_ACCESS = re.compile(r"((?: = load |  store )(?:<\d+ x (\w+)>|(\w+)) ?.*), align \d+")
_BYTES = {"i8": 1, "i16": 2, "i32": 4, "i64": 8, "float": 4, "double": 8}


def without_assumptions(source: str) -> str:
    """Change a module so that arguments may have any alignment and may overlap: no access is wider than an element."""
    source = by_bytes(source.replace(POINTER, "ptr addrspace(1)"))
    return _ACCESS.sub(lambda m: f"{m[1]}, align {_BYTES[m[2] or m[3]]}", source)
