"""The machine code of the native runtime: loaded once per process, and stored in the object cache."""
from svod.compile.cpu import runtime as rt
from svod.compile.cpu.host import host_target
from svod.compile.llvm.codegen import compile_object
from svod.compile.llvm.loaded import LoadedProgram
from svod.compile.plan.object_cache import ObjectCache


def test_made_once():
    assert rt.runtime() is rt.runtime()
    assert all(rt.runtime().code.addresses)


def test_the_object_is_kept(tmp_path, monkeypatch):
    cache = ObjectCache(tmp_path)
    first = rt.native_object("runtime", rt.runtime_ir(rt.host_target().arch), cache)

    def fail(*args):
        raise AssertionError("compiled again")

    monkeypatch.setattr(rt, "compile_object", fail)
    assert rt.native_object("runtime", rt.runtime_ir(rt.host_target().arch), cache) == first
    assert all(LoadedProgram(first, rt.RUNTIME_SYMBOLS).addresses)


def test_other_architectures_compile():
    for arch in ("x86_64", "aarch64"):
        target = host_target()
        other = type(target)(**{**vars(target), "arch": arch, "features": ()})
        assert compile_object(rt.runtime_ir(arch), other, True)
    assert "fence" in rt.runtime_ir("riscv64") and "pause()" in rt.runtime_ir("x86_64")


def test_ticket_fields_fit_their_limits():
    assert rt.MAX_THREADS == (1 << 10) - 1 and rt.MAX_CHUNKS == (1 << 22) - 1
    assert rt.CFG_SETAFFINITY + 8 <= rt.CORES and rt.CORES + rt.CORES_BYTES <= rt.WORKERS
    assert rt.JOB_LONGER + 8 <= rt.CONFIG and rt.WORKERS % 64 == 0 and rt.WORKER_STRIDE % 64 == 0
