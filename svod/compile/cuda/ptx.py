"""LLVM IR → PTX, in this process. LLVM aborts the process if it has no instruction for a call, so `check_intrinsics` runs first."""
from __future__ import annotations

import re
from functools import lru_cache
from typing import Any

import llvmlite.binding as llvm

from svod.compile.cuda.intrinsics import check_intrinsics
from svod.compile.cuda.targets import ARCHITECTURES
from svod.compile.llvm.codegen import initialize, module_of
from svod.errors import CompileError

TRIPLE = "nvptx64-nvidia-cuda"
_OUTSIDE = re.compile(r"\.extern \.func[^;]*?(\w+)\s*\(", re.S)


@lru_cache(maxsize=16)
def _machine(arch: str) -> tuple[Any, str]:
    """Return LLVM's code generator for an architecture, and its data layout."""
    initialize()
    known = ARCHITECTURES[arch]
    found = llvm.Target.from_triple(TRIPLE).create_target_machine(cpu=known.llvm_cpu, features=f"+ptx{known.ptx}", opt=3)
    return found, str(found.target_data)


def emit_ptx(ir: str, arch: str) -> str:
    """Compile a module to PTX, with LLVM's passes. Raises CompileError."""
    check_intrinsics(ir, arch)
    machine, layout = _machine(arch)
    with module_of(ir, TRIPLE, layout, machine, True, arch) as module:
        ptx = str(machine.emit_assembly(module))
    outside = _OUTSIDE.findall(ptx)
    if outside:
        raise CompileError(f"the PTX for {arch} calls {', '.join(sorted(set(outside)))}, which is nowhere defined")
    return ptx


def after_passes(ir: str, arch: str) -> str:
    """Return the module after LLVM's passes, as LLVM IR. Raises CompileError."""
    check_intrinsics(ir, arch)
    machine, layout = _machine(arch)
    with module_of(ir, TRIPLE, layout, machine, True, arch) as module:
        return str(module)
