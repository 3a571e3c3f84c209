"""LLVM IR → PTX, in this process. LLVM aborts the process if it has no instruction for a call, so `check_intrinsics` runs first."""
from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import llvmlite.binding as llvm

from svod.compile.cuda.intrinsics import check_intrinsics
from svod.compile.cuda.targets import ARCHITECTURES
from svod.compile.llvm.codegen import emit, initialize, module_of
from svod.compile.llvm.modules import CodeGenerator, LlvmModule
from svod.errors import CompileError

TRIPLE = "nvptx64-nvidia-cuda"
_OUTSIDE = re.compile(r"\.extern \.func[^;]*?(\w+)\s*\(", re.S)


def _machine(arch: str) -> Any:
    """Make LLVM's code generator for an architecture."""
    initialize()
    known = ARCHITECTURES[arch]
    return llvm.Target.from_triple(TRIPLE).create_target_machine(cpu=known.llvm_cpu, features=f"+ptx{known.ptx}", opt=3)


@contextmanager
def _module(ir: str, arch: str) -> Iterator[tuple[LlvmModule, CodeGenerator]]:
    """Parse LLVM IR for an architecture and run LLVM's passes; yields the pair that `module_of` yields."""
    check_intrinsics(ir, arch)
    with module_of(ir, lambda: _machine(arch), (TRIPLE, arch), arch) as (module, generator):
        module.optimize(generator)
        yield module, generator


def emit_ptx(ir: str, arch: str) -> str:
    """Compile a module to PTX, with LLVM's passes. Raises CompileError."""
    with _module(ir, arch) as (module, generator):
        ptx = emit(module, generator, reduction=True, assembly=True).decode()
    outside = _OUTSIDE.findall(ptx)
    if outside:
        raise CompileError(f"the PTX for {arch} calls {', '.join(sorted(set(outside)))}, which is nowhere defined")
    return ptx


def after_passes(ir: str, arch: str) -> str:
    """Return the module after LLVM's passes, as LLVM IR. Raises CompileError."""
    with _module(ir, arch) as (module, _):
        return str(module)
