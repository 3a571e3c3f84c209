"""The functions that LLVM IR for NVIDIA's GPUs may call, and the PTX statements that it may contain as inline assembly, which is used for
instructions without an LLVM intrinsic. LLVM's code generator aborts the process on a call for which it has no instruction, so other calls
are refused before.

`tests/compile/cuda/test_instructions.py` compiles every form of code that LINEAR can produce for every architecture."""
from __future__ import annotations

import re

from svod.compile.cuda.targets import ARCHITECTURES
from svod.core.machine.isa import DOTS
from svod.errors import CompileError

_FLOATS = ("f32", "f64")
_INTEGERS = ("i8", "i16", "i32", "i64")
GENERIC: dict[str, tuple[str, ...]] = {
    **{f"llvm.{name}": _FLOATS for name in ("fabs", "sqrt", "floor", "ceil", "trunc", "roundeven", "fma", "maximum", "minimum")},
    **{f"llvm.{name}": _INTEGERS for name in ("smax", "smin", "umax", "umin", "abs")},
}
"""LLVM's own intrinsics that may be called: name → element types, each as a scalar and as vectors of any length."""

SPECIAL: dict[str, str] = {
    **{f"llvm.nvvm.read.ptx.sreg.{register}.{axis}": "" for register in ("tid", "ctaid", "nctaid") for axis in "xy"},
    "llvm.nvvm.barrier.cta.sync.aligned.all": "",
    "llvm.nvvm.shfl.sync.bfly.i32": "",
    "llvm.nvvm.f2tf32.rna": "mma.tf32",
    "llvm.nvvm.ex2.approx.ftz.f32": "",
    **{f"llvm.nvvm.ldmatrix.sync.aligned.m8n8.x{n}{kind}.b16.p3": "ldmatrix" for n in (1, 2, 4) for kind in ("", ".trans")},
    **{f"llvm.nvvm.cp.async.{what}": "cp.async" for what in ("commit.group", "wait.group", *(
        f"{kind}.shared.global.{n}{given}" for kind, n in (("ca", 4), ("ca", 8), ("cg", 16)) for given in ("", ".s")))},
    **{f"llvm.masked.load.v{n}i8.p1": "cp.async" for n in (4, 8, 16)},
    **{f"llvm.nvvm.mbarrier.{what}.shared": "tma" for what in ("init", "inval")},
    "llvm.memcpy.p3.p1.i64": "tma",
    **{dot.llvm: dot.features[0] for dot in DOTS.values() if dot.fragments and dot.llvm},
}
"""NVIDIA's intrinsics that may be called: name → the feature (`Architecture.features`) that an architecture needs; "": none."""

ASSEMBLY: dict[str, str] = {
    r"\.reg \.pred p|setp\.eq\.u32 p, 0, 0": "",
    r"fence\.proxy\.async\.shared::cta|mbarrier\.arrive\.(?:expect_tx\.)?shared::cta\.b64 _, \[\$0\](?:, \$1)?": "tma",
    r"cp\.async\.bulk\.shared::cluster\.global\.mbarrier::complete_tx::bytes \[\$0\], \[\$1\], \$2, \[\$3\]": "tma",
    r"mbarrier\.try_wait\.parity\.shared::cta\.b64 p, \[\$1\], \$2|selp\.b32 \$0, 1, 0, p": "tma",
    r"wgmma\.(?:fence|commit_group)\.sync\.aligned|wgmma\.wait_group\.sync\.aligned \d+": "wgmma",
    r"wgmma\.mma_async\.sync\.aligned\.m64n\d+k16\.f32\.(bf16|f16)\.\1 \{[$\d, ]+\}, \$\d+, \$\d+, p, 1, 1, [01], [01]": "wgmma",
    r"wgmma\.mma_async\.sync\.aligned\.m64n\d+k32\.s32\.s8\.s8 \{[$\d, ]+\}, \$\d+, \$\d+, p": "wgmma",
}
"""PTX statements that may be inline assembly: statement → the feature that an architecture needs; "": none."""

_ASM = re.compile(r'\basm\b(?: sideeffect)? "([^"]*)"')
_INTRINSIC_NAME = re.compile(r"@(llvm\.[\w.]+)")
_OVERLOAD = re.compile(r"(llvm\.[a-z]+)\.(?:v\d+)?([a-z]+\d+)")


def check_intrinsics(ir: str, arch: str) -> None:
    """Raise CompileError for a call or a PTX statement in `ir` that this module does not list for the architecture."""
    have = {"", *ARCHITECTURES[arch].features}
    for name in sorted(set(_INTRINSIC_NAME.findall(ir))):
        overloaded = _OVERLOAD.fullmatch(name)
        generic = overloaded is not None and overloaded[2] in GENERIC.get(overloaded[1], ())
        if not generic and SPECIAL.get(name, "none") not in have:
            raise CompileError(f"LLVM IR for {arch} calls {name}, which svod does not know that LLVM can compile for it")
    for text in _ASM.findall(ir):
        for statement in filter(None, (s.strip() for s in text.removeprefix("{").removesuffix("}").split(";"))):
            needs = next((feature for pattern, feature in ASSEMBLY.items() if re.fullmatch(pattern, statement)), "none")
            if needs not in have:
                raise CompileError(f"LLVM IR for {arch} has the assembly {statement[:60]!r}, which svod does not know for it")
