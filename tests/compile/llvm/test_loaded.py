"""Loading of objects: batches, freeing, threads, forks and errors."""
from __future__ import annotations

import concurrent.futures
import ctypes
import gc
import os
import resource
import threading
import weakref

import numpy as np
import pytest
from llvmlite.binding import ExecutionEngine

from svod.compile.cpu.host import host_target
from svod.compile.llvm import loaded
from svod.compile.llvm.codegen import compile_object
from svod.compile.llvm.loaded import LoadedProgram, call_phase
from svod.compile.llvm.render import render
from svod.errors import CompileError
from tests.compile.llvm.test_codegen import NEON, run_scale, scale

UNLIKE = """define float @{name}() {{
  ret float {value:.1f}
}}
"""


@pytest.fixture(autouse=True)
def open_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    """Programs of other tests join other batches."""
    monkeypatch.setattr(loaded, "_open", loaded._Open())


def value_of(program: LoadedProgram) -> float:
    """The result of a function without parameters."""
    return float(ctypes.CFUNCTYPE(ctypes.c_float)(program.addresses[0])())


def constant(name: str, value: float) -> LoadedProgram:
    """A program whose only function `name` returns `value`, a small integer."""
    return LoadedProgram(compile_object(UNLIKE.format(name=name, value=value), host_target()), (name,))


def load_and_close(code: bytes) -> None:
    with LoadedProgram(code, ("scale",)) as program:
        assert program.addresses


@pytest.mark.parametrize("name", ["svod_p0", "other"])
def test_programs_with_the_same_names_are_told_apart(name: str) -> None:
    """Programs whose names begin with the prefix share a batch; others with the same name do not."""
    programs = [constant(name, k) for k in range(20)]
    assert [value_of(p) for p in reversed(programs)] == [float(k) for k in reversed(range(20))]
    assert len({id(p._batch) for p in programs}) == (1 if name == "svod_p0" else 20)
    assert [p.functions[0][2] for p in programs] == [name] * 20 and all(p.functions[0][1] > 0 for p in programs)


def test_a_batch_that_is_loaded_or_full_is_joined_by_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loaded, "MOST_OBJECTS", 3)
    programs = [constant("svod_f", k) for k in range(7)]
    assert len({id(p._batch) for p in programs}) == 3
    assert value_of(programs[6]) == 6.0
    last = constant("svod_f", 7)
    assert last._batch is not programs[6]._batch
    assert [value_of(p) for p in (*programs, last)] == [float(k) for k in range(8)]


def test_a_program_that_is_dropped_before_its_batch_is_loaded_is_not_loaded() -> None:
    first, second, third = (constant("svod_f", k) for k in range(3))
    batch = first._batch
    assert batch is not None and batch is third._batch
    waiting = len(batch.waiting)
    second.close()
    del third
    gc.collect()
    assert len(batch.waiting) == waiting - 2
    assert value_of(first) == 0.0 and second.addresses == () and second.functions == ()


def test_a_batch_lives_as_long_as_one_of_its_programs() -> None:
    first, second = (constant("svod_f", k) for k in range(2))
    assert value_of(first) == 0.0
    batch = weakref.ref(first._batch)   # type: ignore[arg-type]
    first.close()
    gc.collect()
    assert value_of(second) == 1.0 and batch() is not None
    second.close()
    gc.collect()
    assert batch() is None


def test_a_forked_child_loads_what_its_parent_had_not_loaded() -> None:
    waiting = constant("svod_f", 5)
    pid = os.fork()
    if not pid:
        os._exit(int(value_of(waiting) + value_of(constant("svod_f", 3))))
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 8
    assert value_of(waiting) == 5.0


def test_a_load_that_does_not_finish_is_repeated(monkeypatch: pytest.MonkeyPatch) -> None:
    first, second = constant("svod_f", 4), constant("svod_f", 5)
    with monkeypatch.context() as patched:
        patched.setattr(ExecutionEngine, "finalize_object", _interrupted)
        with pytest.raises(KeyboardInterrupt):
            value_of(first)
    assert (value_of(second), value_of(first)) == (5.0, 4.0)


def _interrupted(engine: ExecutionEngine) -> None:
    raise KeyboardInterrupt


def test_a_child_forked_during_a_load_loads_the_batch_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    program, begun, go = constant("svod_f", 6), threading.Event(), threading.Event()
    finalize, parent = ExecutionEngine.finalize_object, os.getpid()

    def slowly(engine: ExecutionEngine) -> None:
        if os.getpid() == parent:
            begun.set()
            go.wait(20)
        finalize(engine)
    monkeypatch.setattr(ExecutionEngine, "finalize_object", slowly)
    thread = threading.Thread(target=value_of, args=(program,))
    thread.start()
    begun.wait()
    pid = os.fork()
    if not pid:
        loaded._open = loaded._Open()       # as in a process whose batch the fixture has not replaced
        os._exit(int(value_of(program)))
    go.set()
    thread.join()
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 6 and value_of(program) == 6.0


def test_a_name_that_ends_like_another_is_found_or_refused() -> None:
    """LLVM keeps one text for both names, of which one is renamed."""
    code = compile_object(UNLIKE.format(name="svod_f", value=1.0) + UNLIKE.format(name="my_svod_f", value=2.0), host_target())
    with pytest.raises(CompileError, match="does not find my_svod_f"):
        assert LoadedProgram(code, ("svod_f", "my_svod_f")).addresses
    assert value_of(LoadedProgram(code, ("svod_f",))) == 1.0


def test_threads_may_load_a_batch_while_others_join_it() -> None:
    codes = [compile_object(UNLIKE.format(name="svod_f", value=k), host_target()) for k in range(64)]

    def load(k: int) -> float:
        return value_of(LoadedProgram(codes[k], ("svod_f",)))
    with concurrent.futures.ThreadPoolExecutor(8) as threads:
        assert list(threads.map(load, range(64))) == [float(k) for k in range(64)]


def test_closing_frees_and_spares_the_others() -> None:
    target = host_target()
    first, second = (compile_object(render(scale(f), target), target) for f in (2.0, 3.0))
    kept = LoadedProgram(second, ("scale",))
    x = np.ones(64, np.float32)

    def peak() -> int:
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    for _ in range(20):
        load_and_close(first)
    before = peak()
    for _ in range(200):
        load_and_close(first)
    assert peak() - before < 4096, "200 loads and frees must not cost 4 MB"
    call_phase(kept.addresses[0], [x.ctypes.data], [], 0, 0, 64)
    assert (x == 3).all()
    kept.close()
    kept.close()
    assert kept.addresses == ()


def test_code_in_a_cycle_of_garbage_is_freed_in_order() -> None:
    """Python destroys the objects of a garbage cycle in any order, but an LLVM engine must be freed before its context."""
    target = host_target()
    code = compile_object(render(scale(2.0), target), target)

    class Owner:
        def __init__(self) -> None:
            self.owner, self.program = self, LoadedProgram(code, ("scale",))
            assert self.program.addresses     # a batch of its own
    owners = [Owner() for _ in range(50)]
    batches = [weakref.ref(owner.program._batch) for owner in owners]
    del owners
    gc.collect()
    assert not any(batch() for batch in batches)
    assert run_scale(3.0)


def test_a_symbol_that_is_missing_is_an_error_not_a_crash() -> None:
    target = host_target()
    code = compile_object(render(scale(2.0), target), target)
    with pytest.raises(CompileError, match="nothing"):
        LoadedProgram(code, ("scale", "nothing"))
    with pytest.raises(CompileError, match="ELF"):
        LoadedProgram(code[:3], ("scale",))
    with pytest.raises(CompileError, match="aarch64"):
        LoadedProgram(compile_object(render(scale(2.0), NEON), NEON), ("scale",))
