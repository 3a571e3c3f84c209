"""Compilation of chosen chains: chains that fall back to the heuristic's, and errors that do not."""
from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from svod.compile.cpu import backend
from svod.compile.cpu.host import host_target
from svod.compile.plan import compiler as compiler_module
from svod.compile.plan import object_cache
from svod.compile.plan.compiler import Choice, Compilation, Compiled, Compiler, compile_all
from svod.compile.plan.object_cache import BAKED, Build, ObjectCache, Stored, stored_builds
from svod.core.kernel.kernel import Kernel
from svod.core.kernel.scheduler import Opt
from svod.errors import CompileError, KernelOptError, SvodError
from tests.core.corpus import CORPUS

KERNELS = [Kernel(build()) for build in list(CORPUS.values())[:3]]
KERNEL = KERNELS[0]
CHAIN = (Opt("UPCAST", "o0", 2),)


class Refusing(Compiler):
    """Cannot compile one chain."""

    def __init__(self, error: SvodError) -> None:
        super().__init__(host_target(1), ObjectCache(), 16)
        self.error = error

    def compile(self, kernel: Kernel, choice: Choice) -> Compiled:
        if choice.chain == CHAIN:
            raise self.error
        return super().compile(kernel, choice)


@pytest.mark.parametrize("error", [KernelOptError("no such axis"), CompileError("LLVM says no")])
@pytest.mark.parametrize("source", ["database", "beam"])
def test_a_found_chain_that_cannot_be_compiled_falls_back(error: SvodError, source: str, caplog: pytest.LogCaptureFixture) -> None:
    compiler = Refusing(error)
    with caplog.at_level(logging.WARNING, "svod"):
        found = compile_all({KERNEL.key: KERNEL}, {KERNEL.key: Choice(CHAIN, source, "")}, compiler)[KERNEL.key]
    assert found.source == "heuristic" and found.chain == compiler.heuristic(KERNEL)
    assert str(error) in found.why and str(error) in caplog.text


@pytest.mark.parametrize("error", [KernelOptError("no such axis"), CompileError("LLVM says no")])
def test_a_chain_that_was_asked_for_is_an_error(error: SvodError) -> None:
    with pytest.raises(type(error), match=str(error)):
        compile_all({KERNEL.key: KERNEL}, {KERNEL.key: Choice(CHAIN, "explicit", "")}, Refusing(error))


@pytest.fixture
def compiled(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The modules that LLVM has compiled, in order."""
    modules: list[str] = []
    original: Callable[..., bytes] = backend.compile_object

    def counted(ir: str, *args: Any, **more: Any) -> bytes:
        modules.append(ir)
        return original(ir, *args, **more)

    monkeypatch.setattr(backend, "compile_object", counted)
    return modules


NONE = Choice((), "none", "")


def test_threads_that_want_the_same_kernel_compile_it_once(compiled: list[str]) -> None:
    compiler = Compiler(host_target(1), ObjectCache(), 16)
    together = threading.Barrier(4)

    def work(kernel: Kernel) -> Compiled:
        together.wait()
        return compiler.compile(kernel, NONE)

    with ThreadPoolExecutor(4) as pool:
        found = list(pool.map(work, [KERNEL, KERNELS[1], KERNEL, KERNEL]))
    assert len(compiled) == 2
    assert found[0].loaded is found[2].loaded is found[3].loaded is not found[1].loaded


def test_a_failed_compilation_is_not_remembered(compiled: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    compiler = Compiler(host_target(1), ObjectCache(), 16)
    with monkeypatch.context() as patch, pytest.raises(CompileError, match="out of memory"):
        patch.setattr(compiler_module, "lower_kernel", lambda *_: (_ for _ in ()).throw(CompileError("out of memory")))
        compiler.compile(KERNEL, NONE)
    assert not compiled and compiler.compile(KERNEL, NONE).loaded.addresses


def test_of_the_kernels_in_memory_the_first_in_goes_first(compiled: list[str]) -> None:
    compiler = Compiler(host_target(1), ObjectCache(), 2)
    a, b, c = KERNELS
    first = compiler.compile(a, NONE)
    for kernel in (b, a, c, b, c):      # c evicts a, the first that was compiled, although a was used last
        compiler.compile(kernel, NONE)
    assert len(compiled) == 3 and 0 not in first.loaded.addresses
    again = compiler.compile(a, NONE)
    assert len(compiled) == 4 and again.loaded is not first.loaded and again.linear == first.linear


def test_the_heuristic_is_asked_once_a_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []
    original: Callable[[Any], Any] = backend.heuristic

    def counted(state: Any) -> Any:
        asked.append(state.kernel.key)
        return original(state)

    monkeypatch.setattr(backend, "heuristic", counted)
    compiler = Compiler(host_target(1), ObjectCache(), 2)
    a, b, c = KERNELS
    chains = [compiler.heuristic(k) for k in (a, b, a, b, c, a)]    # c evicts a
    assert asked == [k.key for k in (a, b, c, a)] and chains[0] == chains[2] == chains[5]


def test_the_predicted_time_of_a_chain_is_kept_among_the_objects(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def times(chain: tuple[Opt, ...]) -> float:
        return Compiler(host_target(1), ObjectCache(tmp_path), 2).predicted_times(KERNEL, chain)
    first, other = times(CHAIN), times(NONE.chain)
    assert first > 0 and first != other
    with pytest.raises(KernelOptError):
        times((Opt("UPCAST", "o9", 2),))
    monkeypatch.setattr(compiler_module, "apply_opts", None)
    assert (times(CHAIN), times(NONE.chain)) == (first, other)


@pytest.fixture
def two_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    """Kernels are compiled in two threads, also on a machine with one core."""
    monkeypatch.setattr(compiler_module, "usable_cores", lambda: 2)


class Watch:
    """Notes in which threads LLVM compiles, and calls `during` there."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.threads: list[str] = []
        self.during: Callable[[], object] = list
        original = backend.compile_object

        def watched(*args: Any, **more: Any) -> bytes:
            self.threads.append(threading.current_thread().name)
            self.during()
            return original(*args, **more)
        monkeypatch.setattr(backend, "compile_object", watched)


@pytest.fixture
def watch(monkeypatch: pytest.MonkeyPatch) -> Watch:
    return Watch(monkeypatch)


def compiler_with(cores: int) -> Compiler:
    return Compiler(replace(host_target(1), threads=cores), ObjectCache(), 16)


ALL = {k.key: k for k in KERNELS}


def threads_now() -> list[str]:
    return [t.name for t in threading.enumerate() if t.name.startswith("svod-compile")]


def test_data_is_kept_for_other_processes_and_targets_of_the_same_code(tmp_path: Path) -> None:
    first, again, other = (Compiler(host_target(threads), ObjectCache(tmp_path), 2) for threads in (1, 1, 3))
    assert first.kept("a") is None and first.lacks("a")
    first.keep("a", {"calls": [1, "x", None]})
    assert again.kept("a") == other.kept("a") == {"calls": [1, "x", None]}
    assert again.kept("b") is None and not again.lacks("a")
    newer = Compiler(host_target(1), ObjectCache(tmp_path), 2)
    newer.build = replace(first.build, code="another version of svod")
    assert newer.kept("a") is None
    nowhere = Compiler(host_target(1), ObjectCache(), 2)
    nowhere.keep("a", 1)        # without a directory nothing is kept
    assert nowhere.kept("a") is None and not nowhere.lacks("a")


def test_only_a_program_that_is_missing_has_a_baked_directory_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    read: list[Path] = []

    def noted(directory: Path) -> dict[Build, Stored]:
        read.append(directory)
        return stored_builds(directory)
    monkeypatch.setattr(object_cache, "stored_builds", noted)
    (tmp_path / "baked").mkdir()
    (tmp_path / "baked" / BAKED).touch()
    compiler = Compiler(host_target(1), ObjectCache(tmp_path / "own", tmp_path / "baked"), 16)
    assert compiler.kept("a schedule") is None
    chain = compiler.heuristic(KERNEL)
    assert compiler.predicted_times(KERNEL, chain) == 1 and compiler.linear_of(KERNEL, chain)
    assert not read
    compiler.compile(KERNEL, Choice(chain, "heuristic", ""))
    assert read == [tmp_path / "baked"]


@pytest.mark.usefixtures("two_cores")
@pytest.mark.parametrize("cores", [1, 2])
def test_kernels_are_compiled_in_threads_that_end(cores: int, watch: Watch) -> None:
    made = compile_all(ALL, dict.fromkeys(ALL, NONE), compiler_with(cores))
    assert [name.startswith("svod-compile") for name in watch.threads] == [cores > 1] * 3 and not threads_now()
    assert {k: c.linear for k, c in made.items()} == {k: compiler_with(cores).compile(v, NONE).linear for k, v in ALL.items()}


@pytest.mark.usefixtures("two_cores")
def test_an_error_in_a_thread_is_that_of_its_kernel(watch: Watch, caplog: pytest.LogCaptureFixture) -> None:
    def fail() -> None:
        if len(watch.threads) == 1:
            raise CompileError("LLVM says no")

    watch.during = fail
    with pytest.raises(CompileError, match="LLVM says no"):
        compile_all(ALL, dict.fromkeys(ALL, NONE), compiler_with(2))
    watch.threads.clear()
    with caplog.at_level(logging.WARNING, "svod"):
        found = compile_all({KERNEL.key: KERNEL}, {KERNEL.key: Choice(CHAIN, "database", "")}, compiler_with(2))[KERNEL.key]
    assert found.source == "heuristic" and KERNEL.key[:12] in caplog.text and "LLVM says no" in caplog.text


@pytest.mark.usefixtures("two_cores")
def test_what_was_begun_and_is_not_wanted_is_dropped() -> None:
    """An interruption ends the threads; another preparation of the same kernels then compiles them anew."""
    compiler = compiler_with(2)
    with pytest.raises(KeyboardInterrupt), Compilation(compiler) as compilation:
        compilation.begin(KERNEL, NONE)
        raise KeyboardInterrupt
    assert not threads_now() and not compiler._begun and compiler.compile(KERNEL, NONE).loaded.addresses


@pytest.mark.usefixtures("two_cores")
def test_two_preparations_share_what_one_has_begun(watch: Watch) -> None:
    compiler = compiler_with(2)
    with Compilation(compiler) as first, Compilation(compiler) as second:
        first.begin(KERNEL, NONE)
        second.begin(KERNEL, NONE)
        assert compiler.compile(KERNEL, NONE).loaded is compiler.compile(KERNEL, NONE).loaded
        first.begin(KERNEL, NONE)       # it was compiled already
    assert len(watch.threads) == 1


def test_a_cancelled_compilation_is_done_by_the_thread_that_waits_for_it(watch: Watch) -> None:
    compiler, going, done = compiler_with(2), threading.Event(), threading.Event()

    def wait() -> None:
        going.set()
        done.wait(60)
    watch.during = wait
    with ThreadPoolExecutor(1, "beside") as one:
        for kernel in KERNELS[:2]:
            compiler.begin(kernel, NONE, one.submit)
        going.wait(60)
        one.shutdown(wait=False, cancel_futures=True)
        done.set()
        assert all(compiler.compile(k, NONE).loaded.addresses for k in KERNELS[:2])
    assert watch.threads == ["beside_0", threading.current_thread().name] and not compiler._begun


@pytest.mark.usefixtures("two_cores")
@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_a_child_compiles_after_its_parent_has() -> None:
    compile_all(ALL, dict.fromkeys(ALL, NONE), compiler_with(2))
    child = os.fork()
    if not child:
        status = 1
        try:
            status = int(len(compile_all(ALL, dict.fromkeys(ALL, NONE), compiler_with(2))) != len(ALL))
        finally:
            os._exit(status)
    assert os.waitpid(child, 0)[1] == 0
