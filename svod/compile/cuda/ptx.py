"""LLVM IR → PTX, in this process. LLVM aborts the process if it has no instruction for a call, so `check_intrinsics` runs first."""
from __future__ import annotations

import re
from contextlib import AbstractContextManager
from typing import Any

import llvmlite.binding as llvm

from svod.compile.cuda.intrinsics import check_intrinsics
from svod.compile.cuda.targets import ARCHITECTURES
from svod.compile.llvm.codegen import initialize, module_of
from svod.compile.llvm.modules import CodeGenerator, LlvmModule
from svod.errors import CompileError

TRIPLE = "nvptx64-nvidia-cuda"
_OUTSIDE = re.compile(r"\.extern \.func[^;]*?(\w+)\s*\(", re.S)


def _machine(arch: str) -> Any:
    """Make LLVM's code generator for an architecture."""
    initialize()
    known = ARCHITECTURES[arch]
    return llvm.Target.from_triple(TRIPLE).create_target_machine(cpu=known.llvm_cpu, features=f"+ptx{known.ptx}", opt=3)


def _module(ir: str, arch: str) -> AbstractContextManager[tuple[LlvmModule, CodeGenerator]]:
    """Parse LLVM IR for an architecture and run LLVM's passes; returns the context that `module_of` makes."""
    check_intrinsics(ir, arch)
    return module_of(ir, lambda: _machine(arch), (TRIPLE, arch), True, arch)


def emit_ptx(ir: str, arch: str) -> str:
    """Compile a module to PTX, with LLVM's passes. Raises CompileError."""
    with _module(ir, arch) as (module, generator):
        ptx = module.emit(generator, assembly=True).decode()
    outside = _OUTSIDE.findall(ptx)
    if outside:
        raise CompileError(f"the PTX for {arch} calls {', '.join(sorted(set(outside)))}, which is nowhere defined")
    return ptx


def after_passes(ir: str, arch: str) -> str:
    """Return the module after LLVM's passes, as LLVM IR. Raises CompileError."""
    with _module(ir, arch) as (module, _):
        return str(module)
