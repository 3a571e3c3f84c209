"""Compilation of LLVM IR text to object bytes.

Objects are position-independent ELF for one fixed triple per architecture, on every operating system. They reference no external symbols,
so the same bytes load on each of these systems, and a worker compiles for the given target and not for its own host.

Several threads may compile at once. Each call has a separate LLVM context, so a process forked from a forkserver that has loaded LLVM may
use it.
"""
from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import lru_cache
from typing import Any

import llvmlite
import llvmlite.binding as llvm

from svod.compile.llvm.elf import TRIPLES, undefined_symbols
from svod.compile.llvm.modules import CodeGenerator, LlvmModule
from svod.core.machine.isa import llvm_features
from svod.core.machine.target import Target
from svod.errors import CompileError
from svod.system.forksafe import remake_after_fork
from svod.system.monitor import Monitor

CODEGEN_REVISION = 21
"""Version of the generated code, increased when lowering, renderer, passes or attributes change it: older objects are not used again."""

COMPILER = f"llvmlite {llvmlite.__version__} llvm {'.'.join(map(str, llvm.llvm_version_info))}"
"""Versions of llvmlite and LLVM, recorded with measurements; part of an object's key."""

BASE_CPU = {"x86_64": "x86-64", "aarch64": "generic"}
SEARCH_OPT, FINAL_OPT = 1, 2
"""Effort of LLVM's code generator (0-3) while searching and for finalists. On a GEMM tile 1, 2 and 3 give equal speed (250 GFLOP/s of 258),
and 1 takes 4 to 10 % less time than 3; 0 is six times slower. Only the final effort includes loop strength reduction."""


@lru_cache(maxsize=1)
def initialize() -> None:
    """Register every architecture that LLVM was built with: a worker also compiles for other architectures."""
    llvm.initialize_all_targets()
    llvm.initialize_all_asmprinters()


def new_machine(arch: str, features: tuple[str, ...], opt: int) -> Any:
    initialize()
    if arch not in TRIPLES:
        raise CompileError(f"no code generator for {arch!r}; there are {', '.join(TRIPLES)}")
    of = llvm.Target.from_triple(TRIPLES[arch])
    enabled = ",".join("+" + f for f in features)
    return of.create_target_machine(cpu=BASE_CPU[arch], features=enabled, opt=opt, reloc="pic", codemodel="small")


class _Reduction:
    """Switches loop strength reduction, an option of LLVM's code generators that is global in the process. Threads that need the same
    setting generate code at the same time; a thread that needs the other one waits until they have finished."""

    def __init__(self) -> None:
        self._changed = Monitor()
        self._is_on: bool | None = None     # the current setting; None: unknown, as after a fork
        self._running = 0

    def switched(self, on: bool, generate: Callable[[], bytes]) -> bytes:
        """The result of `generate`, which runs with loop strength reduction on or off; first waits for threads that need the other one.
        It is no context: a Ctrl-C between the body and the end of one would leave the others waiting."""
        mine = 0
        try:
            with self._changed.lock:
                self._changed.wait_for(lambda: self._is_on == on or not self._running)
                if self._is_on != on:
                    llvm.set_option("svod", f"-disable-lsr={'false' if on else 'true'}")
                    self._is_on = on
                mine = 1
                self._running += mine
            return generate()
        finally:
            with self._changed.lock:
                self._running -= mine
                self._changed.notify_all()


_reduction = _Reduction()
remake_after_fork(sys.modules[__name__], "_reduction", _Reduction)


_idle: dict[tuple[Any, ...], list[CodeGenerator]] = {}       # code generators that no thread uses, by the `kind` of their machine


@contextmanager
def module_of(ir: str, make_machine: Callable[[], Any], kind: tuple[Any, ...], what: str) -> Iterator[tuple[LlvmModule, CodeGenerator]]:
    """Yield (the module of LLVM IR; a code generator that no other thread uses meanwhile). `kind` identifies the machines that
    `make_machine` makes. Raises CompileError, also for errors of LLVM inside the context. `what`: the target's name in messages."""
    try:
        module = LlvmModule(ir)
    except RuntimeError as error:
        raise CompileError(f"LLVM does not accept the module: {error}") from error
    idle = _idle.setdefault(kind, [])
    try:
        try:
            generator = idle.pop()
        except IndexError:
            generator = CodeGenerator(make_machine())
        module.verify()  # takes 0.1 ms
        module.aim(generator)
        yield module, generator
        idle.append(generator)
    except RuntimeError as error:
        raise CompileError(f"LLVM could not compile for {what}: {error}") from error
    finally:
        module.close()


def emit(module: LlvmModule, generator: CodeGenerator, reduction: bool, assembly: bool = False) -> bytes:
    """Generate the object of a module, or the text of its assembly. `reduction`: with loop strength reduction."""
    return _reduction.switched(reduction, lambda: module.emit(generator, assembly))


def _module_for(ir: str, target: Target, final: bool) -> AbstractContextManager[tuple[LlvmModule, CodeGenerator]]:
    """Parse LLVM IR for a CPU target; returns the context that `module_of` makes."""
    kind = target.arch, llvm_features(target.arch, target.features), FINAL_OPT if final else SEARCH_OPT
    return module_of(ir, lambda: new_machine(*kind), kind, target.key)


def compile_object(ir: str, target: Target, final: bool = False) -> bytes:
    """Compile a module to an ELF object; several threads may do so at once. `final`: with loop strength reduction, as for the finalists of
    a search. Without it, as during a search, compilation takes three quarters of the time, and the code is 2 to 4 % slower, convolutions up
    to 25 % (`experiments/search_compiler.py`).

    Raises CompileError if LLVM rejects the module, or if the object needs an external symbol."""
    with _module_for(ir, target, final) as (module, generator):
        code = emit(module, generator, reduction=final)
    outside = undefined_symbols(code)
    if outside:
        raise CompileError(f"the object calls {', '.join(outside)}; code for {target.key} must not need a library")
    return code


def assembly(ir: str, target: Target) -> str:
    """Return the assembly of the object that `compile_object(ir, target, final=True)` makes. Raises CompileError."""
    with _module_for(ir, target, True) as (module, generator):
        return emit(module, generator, reduction=True, assembly=True).decode()
