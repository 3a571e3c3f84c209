"""Compiling of objects: errors, independence of the host, threads and forked children."""
from __future__ import annotations

import concurrent.futures
import multiprocessing
import subprocess
import sys

import numpy as np
import pytest

from svod.compile.cpu.host import host_target, make_target
from svod.compile.llvm.codegen import COMPILER, compile_object
from svod.compile.llvm.elf import undefined_symbols
from svod.compile.llvm.loaded import LoadedProgram, call_phase
from svod.compile.llvm.render import render
from svod.compile.lower.program import PhaseSpec, Program, ProgramSpec
from svod.core.ir.dtype import dtypes
from svod.errors import CompileError, LaunchError
from tests.compile.native import AVX2, AVX512, CACHES, INDEX, Code

F32 = dtypes.float32
NEON = make_target("aarch64", "neoverse-v1", ("neon",), CACHES, 1)


def scale(factor: float, lanes: int = 8) -> Program:
    """Make a program with the phases `scale`, x[i] *= factor, and `shift`, x[i] += 1."""
    codes = []
    for op, value in (("MUL", factor), ("ADD", 1.0)):
        code = Code()
        p, begin, end = code.arg(0, F32), code.put("BEGIN", INDEX, 1), code.put("END_", INDEX, 1)
        loop = code.loop(begin, end, lanes)
        code.store(p, loop, code.alu(op, code.load(p, loop, lanes), code.const(F32, value, lanes)))
        code.end(loop)
        codes.append(tuple(code.instructions))
    spec = ProgramSpec("scale", ((F32, 64),), (0,), (), (PhaseSpec("scale", 64, 1, 0), PhaseSpec("shift", 64, 1, 0)))
    return Program(spec, tuple(codes))


def run_scale(factor: float) -> bool:
    target = host_target()
    x = np.arange(64, dtype=np.float32)
    with LoadedProgram(compile_object(render(scale(factor), target), target), ("scale", "shift")) as loaded:
        for address in loaded.addresses:
            call_phase(address, [x.ctypes.data], [], 0, 0, 64)
    return bool((x == np.arange(64, dtype=np.float32) * np.float32(factor) + 1).all())


FULL_MEMORY = """
import ctypes, mmap
from tests.compile.llvm.test_codegen import run_scale

system = ctypes.CDLL(None)
system.mmap.restype = ctypes.c_void_p
system.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long]
system.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]

def reserve(nbytes):
    return system.mmap(None, nbytes, 0, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS, -1, 0)

run_scale(2.5)
large = reserve(6 << 30)
while reserve(mmap.PAGESIZE) > large:      # no free page is left above
    pass
for place in (1 << 20, 5 << 30):           # the free pages that come next are 5 GiB apart
    system.munmap(large + place, mmap.PAGESIZE)
assert run_scale(3.5)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="needs mmap as Linux places it")
def test_sections_lie_side_by_side_in_a_process_with_little_room() -> None:
    done = subprocess.run([sys.executable, "-c", FULL_MEMORY], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("final", [False, True])
@pytest.mark.parametrize("target", [AVX2, AVX512, NEON], ids=lambda t: t.cpu)
def test_code_for_other_machines_and_the_same_every_time(target: object, final: bool) -> None:
    assert isinstance(target, type(NEON))
    ir = render(scale(2.0, 16), target)
    code = compile_object(ir, target, final)
    assert code == compile_object(ir, target, final)
    assert undefined_symbols(code) == ()
    assert int.from_bytes(code[18:20], "little") == {"x86_64": 62, "aarch64": 183}[target.arch]  # ELF e_machine
    # zmm registers only where the target has them: EVEX instructions start with 0x62
    assert target.arch != "x86_64" or (b"\x62\xf1\x7c\x48" in code) == ("avx512f" in target.features)


def gather(stride: int) -> str:
    """Make a loop of 64 iterations y[i] = x[stride·i], whose address loop strength reduction changes."""
    code = Code()
    x, y = code.arg(0, F32), code.arg(1, F32)
    loop = code.loop(code.put("BEGIN", INDEX, 1), code.put("END_", INDEX, 1), 1)
    code.store(y, loop, code.load(x, code.alu("MUL", loop, code.index(stride)), 1))
    code.end(loop)
    spec = ProgramSpec("gather", ((F32, 64 * stride), (F32, 64)), (1,), (), (PhaseSpec("gather", 64, 1, 0),))
    return render(Program(spec, (tuple(code.instructions),)), host_target())


def test_what_one_thread_searches_does_not_change_what_another_finishes() -> None:
    """LLVM's code generator options are global in a process, so code generation for a search must not affect another thread's final
    code."""
    target, ir, stride = host_target(), gather(67), 67
    alone = {final: compile_object(ir, target, final) for final in (True, False)}
    with concurrent.futures.ThreadPoolExecutor(4) as threads:
        assert all(threads.map(lambda i: compile_object(ir, target, i % 3 == 0) == alone[i % 3 == 0], range(48)))
    x = np.arange(64 * stride, dtype=np.float32)
    for code in alone.values():
        y = np.zeros(64, np.float32)
        with LoadedProgram(code, ("gather",)) as loaded:
            call_phase(loaded.addresses[0], [x.ctypes.data, y.ctypes.data], [], 0, 5, 60)
        assert (y[5:60] == x[5 * stride:60 * stride:stride]).all() and not y[:5].any() and not y[60:].any()
    assert alone[True] != alone[False]


def test_phases_run_in_threads_and_forked_children() -> None:
    with concurrent.futures.ThreadPoolExecutor(4) as threads:
        assert all(threads.map(run_scale, range(12)))
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["svod.compile.llvm.codegen"])
    with concurrent.futures.ProcessPoolExecutor(2, mp_context=context) as processes:
        assert all(processes.map(run_scale, range(6)))


def test_what_llvm_or_we_refuse() -> None:
    target = host_target()
    with pytest.raises(CompileError, match="does not accept"):
        compile_object("define void @f() { nonsense }", target)
    with pytest.raises(CompileError, match="sin"):
        compile_object("declare float @sinf(float)\ndefine float @f(float %x) {\n"
                       " %y = call float @sinf(float %x)\n ret float %y\n}", target)
    with pytest.raises(CompileError, match="nvptx64"):
        compile_object("", make_target("nvptx64", "sm_90", (), CACHES, 1))
    for damaged in (b"", b"not an object at all", b"\x7fELF\x01\x01" + bytes(60)):
        with pytest.raises(CompileError, match="ELF"):
            undefined_symbols(damaged)
    with pytest.raises(LaunchError, match="-1"):
        call_phase(0, [], [], 0, -1, 0)
    assert "llvm" in COMPILER
