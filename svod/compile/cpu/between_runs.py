"""The state of the caches in which a kernel of a plan finds its operands, made anew before each timed run.

    constants           in memory: other kernels have run since they were read
    other arguments     in the caches of the cores: other kernels have just computed them, each core a contiguous part

A kernel that runs again and again by itself finds all of them in the caches of the core that needs them. That favours chains that read
constants which they have made larger, and arguments in an order of their own.
"""
from __future__ import annotations

from collections.abc import Sequence
from string import Template
from typing import Any

import numpy as np

from svod.compile.cpu.host import host_target
from svod.compile.cpu.runtime import native_object
from svod.compile.llvm.loaded import LoadedProgram
from svod.compile.lower.program import PhaseSpec, ProgramSpec
from svod.compile.plan.execution_plan import ExecutionPlan
from svod.compile.plan.plan_parts import PlanBuffer, PreparedKernel
from svod.core.ir.dtype import dtypes
from svod.core.machine.levels import CACHE_LINE_BYTES
from svod.system.once import once
from svod.system.process.program import package_text

# Declaration and call of the instruction that removes the line at %line from all caches. LLVM has none for other processors: constants stay
# in the caches there.
_FLUSH = {"x86_64": ("declare void @llvm.x86.sse2.clflush(ptr)", "call void @llvm.x86.sse2.clflush(ptr %line)")}


def between_runs_ir(arch: str) -> str:
    """The LLVM IR of `between_runs.ll` for an architecture."""
    declare, flush = _FLUSH.get(arch, ("", ""))
    return Template(package_text("svod.compile.cpu", "between_runs.ll")).substitute(
        DECLARE=declare, FLUSH=flush, CACHE_LINE_BYTES=CACHE_LINE_BYTES)


@once
def _programs() -> dict[str, LoadedProgram]:
    """The functions of `between_runs.ll` by name, compiled once in a process."""
    code = native_object("between_runs", between_runs_ir(host_target().arch))
    return {symbol: LoadedProgram(code, (symbol,)) for symbol in ("svod_flush", "svod_own")}


def between_runs(constants: Sequence[np.ndarray[Any, Any]], others: Sequence[np.ndarray[Any, Any]], threads: int) -> ExecutionPlan:
    """A plan that leaves the caches as other kernels of a plan do: without `constants`, and with a part of each of `others` in the caches
    of each of `threads` cores. The contents of the arrays stay as they are."""
    kernels, buffers = list[PreparedKernel](), list[PlanBuffer]()
    for symbol, arrays in (("svod_flush", constants), ("svod_own", others)):
        for array in arrays:
            memory = array.view(np.uint8).reshape(-1)
            lines = -(-memory.nbytes // CACHE_LINE_BYTES)
            spec = ProgramSpec(symbol, ((dtypes.uint8, memory.nbytes),), (0,), (), (PhaseSpec(symbol, lines, threads, 0),), ins=(0,))
            kernels.append(PreparedKernel(spec, _programs()[symbol], (len(buffers),), symbol))
            buffers.append(PlanBuffer(memory.nbytes, "output", memory, dtypes.uint8))
    return ExecutionPlan(kernels, buffers, list(range(len(buffers))), threads=threads)
