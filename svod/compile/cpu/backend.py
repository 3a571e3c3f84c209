"""The CPU as a backend: LINEAR is compiled through LLVM IR to an object, or interpreted; a native runtime runs launches on threads."""
from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

from svod.compile.backend import Backend, CompilerPair
from svod.compile.cpu.dot_rates import measured_cost
from svod.compile.cpu.host import host_target
from svod.compile.cpu.interpreted import InterpretedProgram
from svod.compile.cpu.pool import Arena
from svod.compile.cpu.queue import CpuQueue
from svod.compile.cpu.runtime import runtime
from svod.compile.llvm.codegen import CODEGEN_REVISION, COMPILER, assembly, compile_object
from svod.compile.llvm.loaded import LoadedProgram
from svod.compile.llvm.render import legal, render
from svod.compile.lower.linear_text import encode_linear, render_linear
from svod.compile.lower.program import Program, ProgramSpec
from svod.compile.plan.object_cache import ObjectCache
from svod.compile.plan.plan_parts import LoadedCode, PreparedKernel, Variant
from svod.core.cost.cost import Cost
from svod.core.cost.cpu import cost_of, work_of
from svod.core.cost.sketch import heuristic, quick_choice, sketches
from svod.core.cost.work import StageWork
from svod.core.kernel.scheduler import Scheduler
from svod.core.machine.target import HOST, Target


class Llvm(CompilerPair):
    """The compiler pair LINEAR → LLVM IR → ELF object."""

    name, key, revision = "llvm", COMPILER, CODEGEN_REVISION
    has_first_forms = True

    def legal(self, program: Program, target: Target) -> Program:
        return legal(program, target)

    def render(self, program: Program, target: Target, optimize: bool = True) -> str:
        return render(program, target, aligned=not optimize)

    def compile(self, source: str, target: Target, optimize: bool = True) -> bytes:
        return compile_object(source, target, final=optimize)

    def assemble(self, source: str, target: Target) -> str:
        return assembly(source, target)

    def load(self, code: bytes, spec: ProgramSpec) -> LoadedProgram:
        return LoadedProgram(code, [p.symbol for p in spec.phases])

    def functions(self, code: LoadedCode) -> Sequence[tuple[int, int, str]]:
        return code.functions if isinstance(code, LoadedProgram) else ()


class Interpreter(CompilerPair):
    """The compiler pair that compiles nothing: NumPy interprets LINEAR (`svod.compile.cpu.interpreted`)."""

    name, key, revision = "interpreter", "LINEAR, interpreted", CODEGEN_REVISION

    def render(self, program: Program, target: Target, optimize: bool = True) -> str:
        return render_linear(program)

    def compile(self, source: str, target: Target, optimize: bool = True) -> bytes:
        return encode_linear(source)

    def load(self, code: bytes, spec: ProgramSpec) -> InterpretedProgram:
        return InterpretedProgram(code, spec)


class CpuBackend(Backend):
    """The processor that this process runs on."""

    name = HOST
    compilers = (Llvm(), Interpreter())
    ceilings = "svod.bench.ceiling_loops"

    def target(self, threads: int | None = None) -> Target:
        return replace(host_target(threads), dot_cost=measured_cost)

    def cost(self, state: Scheduler) -> Cost:
        return cost_of(state)

    def work(self, state: Scheduler) -> list[StageWork]:
        return work_of(state)

    def heuristic(self, state: Scheduler) -> Scheduler:
        return heuristic(state)

    def quick_choice(self, state: Scheduler) -> Scheduler:
        return quick_choice(state)

    def sketches(self, state: Scheduler) -> list[Scheduler]:
        return sketches(state)

    def allocate(self, nbytes: int, touch: bool = True) -> Arena:
        return Arena(nbytes, 0, touch=touch)

    def queue(self, kernels: Sequence[PreparedKernel], variants: Sequence[Variant], addresses: Sequence[int],
              threads: int | None) -> CpuQueue:
        return CpuQueue(kernels, variants, addresses, threads)

    def start(self, cache: ObjectCache) -> Callable[[], object]:
        return partial(runtime, cache)


BACKEND = CpuBackend()
