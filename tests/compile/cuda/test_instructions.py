"""Every operation of LINEAR on every type compiles for every architecture. Compilation runs in a separate process, as LLVM aborts on
failure."""
from __future__ import annotations

import subprocess
import sys

import pytest

from svod.compile.cuda.intrinsics import check_intrinsics
from svod.compile.cuda.targets import ARCHITECTURES
from svod.errors import CompileError
from tests.draws import count


@pytest.mark.slow
@pytest.mark.parametrize("arch", sorted(ARCHITECTURES)[::1 if count(1) > 1 else 3])
def test_every_operation_on_every_type(arch: str) -> None:
    """Every third architecture is compiled; with more draws, all of them."""
    ran = subprocess.run([sys.executable, "-m", "tests.compile.cuda.compile_all", arch], capture_output=True, text=True, check=False)
    assert ran.returncode == 0 and "compiled 2076" in ran.stdout, ran.stdout[-300:] + ran.stderr[-2000:]


def test_what_is_not_in_the_list_is_refused_before_llvm_sees_it() -> None:
    check_intrinsics("call float @llvm.fma.f32(float 0.0, float 0.0, float 0.0)", "sm_75")
    for call, arch in (("llvm.exp.f32", "sm_90"), ("llvm.nvvm.cp.async.commit.group", "sm_75"), ("llvm.fma.f16", "sm_90"),
                       ("llvm.nvvm.mma.m16n8k16.row.col.bf16", "sm_75")):
        with pytest.raises(CompileError, match=call.replace(".", r"\.")):
            check_intrinsics(f"call float @{call}(float 0.0)", arch)
