"""Compilation of LLVM IR text to object bytes, and loading of objects as callable addresses.

Objects are position-independent ELF for one fixed triple per architecture, on every operating system. They reference no external symbols,
so the same bytes load on each of these systems, and a worker compiles for the given target and not for its own host.

Several threads may compile at once. Each call and each `LoadedProgram` has a separate LLVM context, so a process forked from a forkserver
that has loaded LLVM may use it.
"""
from __future__ import annotations

import ctypes
import platform
import struct
import sys
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import lru_cache
from typing import Any, NamedTuple

import llvmlite
import llvmlite.binding as llvm

from svod.compile.llvm.modules import CodeGenerator, LlvmModule
from svod.core.machine.isa import MACHINES, llvm_features
from svod.core.machine.target import Target
from svod.errors import CompileError, LaunchError
from svod.system.forksafe import remake_after_fork
from svod.system.process.processor import may_use_tiles

CODEGEN_REVISION = 16
"""Version of the generated code, increased when lowering, renderer, passes or attributes change it: older objects are not used again."""

COMPILER = f"llvmlite {llvmlite.__version__} llvm {'.'.join(map(str, llvm.llvm_version_info))}"
"""Versions of llvmlite and LLVM, recorded with measurements; part of an object's key."""

TRIPLES = {"x86_64": "x86_64-unknown-linux-gnu", "aarch64": "aarch64-unknown-linux-gnu"}
ELF_MACHINES = {62: "x86_64", 183: "aarch64"}  # number in the field e_machine of an ELF header → architecture
BASE_CPU = {"x86_64": "x86-64", "aarch64": "generic"}
SEARCH_OPT, FINAL_OPT = 1, 2
"""Effort of LLVM's code generator (0-3) while searching and for finalists. On a GEMM tile 1, 2 and 3 give equal speed (250 GFLOP/s of 258),
and 1 takes 4 to 10 % less time than 3; 0 is six times slower. Only the final effort includes loop strength reduction."""

PHASE_FUNCTION = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int64, ctypes.c_int64)


@lru_cache(maxsize=1)
def initialize() -> None:
    """Register every architecture that LLVM was built with: a worker also compiles for other architectures."""
    llvm.initialize_all_targets()
    llvm.initialize_all_asmprinters()


def _new_machine(arch: str, features: tuple[str, ...], opt: int) -> Any:
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
        self._changed = threading.Condition()
        self._is_on: bool | None = None     # the current setting; None: unknown, as after a fork
        self._running = 0

    @contextmanager
    def switched(self, on: bool) -> Iterator[None]:
        """Keep loop strength reduction on or off inside the context; first wait for threads that need the other setting."""
        with self._changed:
            self._changed.wait_for(lambda: self._is_on == on or not self._running)
            if self._is_on != on:
                llvm.set_option("svod", f"-disable-lsr={'false' if on else 'true'}")
                self._is_on = on
            self._running += 1
        try:
            yield
        finally:
            with self._changed:
                self._running -= 1
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
    with _reduction.switched(on=reduction):
        return module.emit(generator, assembly)


def _module_for(ir: str, target: Target, final: bool) -> AbstractContextManager[tuple[LlvmModule, CodeGenerator]]:
    """Parse LLVM IR for a CPU target; returns the context that `module_of` makes."""
    kind = target.arch, llvm_features(target.arch, target.features), FINAL_OPT if final else SEARCH_OPT
    return module_of(ir, lambda: _new_machine(*kind), kind, target.key)


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


def _architecture(code: bytes) -> str:
    """Return the architecture of an object. Raises CompileError if `code` is not a 64-bit little-endian ELF object of a known one."""
    arch = ELF_MACHINES.get(int.from_bytes(code[18:20], "little"))
    if code[:6] != b"\x7fELF\x02\x01" or len(code) < 64 or arch is None:
        raise CompileError(f"not a 64-bit little-endian ELF object for {' or '.join(TRIPLES)}")
    return arch


class ObjectSymbol(NamedTuple):
    """An entry of an object's symbol table. `is_defined`: whether the object contains it; its code takes `size` bytes."""

    name: str
    size: int
    is_defined: bool


def symbols_of(code: bytes) -> list[ObjectSymbol]:
    """Return the named symbols of an object. Raises CompileError if `code` is not an object."""
    _architecture(code)
    sections_at, = struct.unpack_from("<Q", code, 40)
    entry_size, count = struct.unpack_from("<HH", code, 58)
    # per section header: name, type, flags, address, offset, size, link, info, alignment, entry size
    headers = [struct.unpack_from("<IIQQQQIIQQ", code, sections_at + k * entry_size) for k in range(count)]
    symbols: list[ObjectSymbol] = []
    for header in headers:
        if header[1] != 2:  # SHT_SYMTAB
            continue
        strings = headers[header[6]][4]
        for at in range(header[4] + 24, header[4] + header[5], 24):  # the first symbol is empty
            name, _, _, section, _, size = struct.unpack_from("<IBBHQQ", code, at)
            if name:
                start = strings + name
                symbols.append(ObjectSymbol(code[start:code.index(b"\0", start)].decode(), size, section != 0))
    return symbols


def undefined_symbols(code: bytes) -> tuple[str, ...]:
    """Return the external names that an object needs. Raises CompileError if `code` is not an object."""
    return tuple(sorted(s.name for s in symbols_of(code) if not s.is_defined))


def _free(engine: Any, context: Any) -> None:
    """Delete an engine with the modules it owns, then their context."""
    engine.close()
    context.close()


class LoadedProgram:
    """An object in executable memory. `addresses`: the addresses of `symbols`, in order, valid until `close()`. `functions`: the same as
    (address, bytes of code, symbol).

    Each has its own engine, so that closing one frees only its own memory."""

    def __init__(self, code: bytes, symbols: Sequence[str]) -> None:
        """Load an object. Raises CompileError if `code` is not an object for this machine, or lacks one of `symbols`."""
        arch = _architecture(code)
        if arch != MACHINES.get(platform.machine().lower()):
            raise CompileError(f"the object is for {arch}, this machine is {platform.machine()}: it cannot be loaded here")
        may_use_tiles()     # has to be called before code with tile instructions runs
        context = llvm.create_context()
        # MCJIT needs a module to start from, and owns the machine that it is given
        empty = llvm.parse_assembly(f'target triple = "{TRIPLES[arch]}"', context)
        # llvmlite's memory manager (use_lmm) places the sections near each other. Code can address constants up to 2 GiB away; with LLVM's
        # own memory manager they may be further away, and the process ends.
        engine = llvm.create_mcjit_compiler(empty, _new_machine(arch, (), 0), use_lmm=True)
        # The finalizer holds both: Python ends objects in a garbage cycle in any order, but an engine must not outlive its context.
        self._free = weakref.finalize(self, _free, engine, context)
        self._free.atexit = False       # threads may still be running the code
        engine.add_object_file(llvm.ObjectFileRef.from_data(code))
        engine.finalize_object()
        self.addresses: tuple[int, ...] = tuple(engine.get_function_address(name) for name in symbols)
        sizes = {s.name: s.size for s in symbols_of(code)}
        self.functions = tuple((address, sizes.get(name, 0), name) for address, name in zip(self.addresses, symbols, strict=True))
        if 0 in self.addresses:
            missing = [name for name, address in zip(symbols, self.addresses, strict=True) if not address]
            self.close()
            raise CompileError(f"the object does not define {', '.join(missing)}")

    def close(self) -> None:
        """Free the code; the addresses must not be called any more. Closing twice is allowed."""
        self.addresses = ()
        self._free()

    def __enter__(self) -> LoadedProgram:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


def call_phase(address: int, args: Sequence[int], variables: Sequence[int], scratch: int, begin: int, end: int) -> None:
    """Run one phase in the calling thread: `args` are addresses (parameters, then temporaries), `scratch` an address aligned to 64 or 0.

    For tests and for screening in a child; a wrong pointer crashes the process."""
    if begin < 0:
        raise LaunchError(f"a phase runs iterations from 0 on, not from {begin}")
    pointers = (ctypes.c_void_p * max(1, len(args)))(*args)
    values = (ctypes.c_int64 * max(1, len(variables)))(*variables)
    PHASE_FUNCTION(address)(ctypes.addressof(pointers), ctypes.addressof(values), scratch, begin, end)
