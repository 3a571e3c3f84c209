"""Objects in executable memory, as callable addresses.

LLVM takes as long to make the memory of a hundred objects executable as for one object (0.5 ms). Objects are therefore loaded in batches: a
program joins the open batch, and the batch is loaded when an address in it is asked for first. A plan asks for addresses once it has all
its kernels, so they are loaded together. The memory of a batch is freed when its last program is closed.
"""
from __future__ import annotations

import ctypes
import platform
import sys
import threading
import weakref
from collections.abc import Sequence
from typing import Any

import llvmlite.binding as llvm

from svod.compile.llvm.codegen import new_machine
from svod.compile.llvm.elf import TRIPLES, ObjectSymbol, architecture_of, symbols_of
from svod.core.machine.isa import MACHINES
from svod.errors import CompileError, LaunchError
from svod.system.forksafe import remake_after_fork
from svod.system.process.processor import may_use_tiles

PHASE_FUNCTION = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int64, ctypes.c_int64)
PREFIX = "svod"         # in names with this prefix, each object's number replaces it, so that objects of a batch do not clash
MOST_OBJECTS = 1 << 12  # in a batch; the number of an object has four hexadecimal digits


def _free(engine: Any, context: Any) -> None:
    """Delete an engine with the modules it owns, then their context."""
    engine.close()
    context.close()


class _Batch:
    """Objects that one engine loads together. `waiting`: number of an object → its bytes, until the engine has all of them."""

    def __init__(self) -> None:
        self.waiting: dict[int, bytes] = {}
        self.names: set[str] = set()        # symbols that the objects define for others, except renamed ones
        self.count = 0                      # objects so far
        self.engine: Any = None

    def load(self, arch: str) -> None:
        """Place the objects in executable memory. After an exception, and in a child forked meanwhile, it may be called again."""
        context = llvm.create_context()
        # MCJIT needs a module to start from, and owns the machine that it is given
        empty = llvm.parse_assembly(f'target triple = "{TRIPLES[arch]}"', context)
        # llvmlite's memory manager (use_lmm) places the sections near each other. Code can address constants up to 2 GiB away; with LLVM's
        # own memory manager they may be further away, and the process ends.
        engine = llvm.create_mcjit_compiler(empty, new_machine(arch, (), 0), use_lmm=True)
        # The finalizer holds both: Python ends objects in a garbage cycle in any order, but an engine must not outlive its context.
        weakref.finalize(self, _free, engine, context).atexit = False       # threads may still be running the code
        for code in list(self.waiting.values()):    # a program may be dropped meanwhile
            engine.add_object_file(llvm.ObjectFileRef.from_data(code))
        engine.finalize_object()
        self.engine = engine
        self.waiting.clear()


class _Open:
    """The batch that new programs join, and the lock under which batches change."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.batch = _Batch()

    def join(self, code: bytes, found: Sequence[ObjectSymbol]) -> tuple[_Batch, int]:
        """Add an object that has the symbols `found`. Returns its batch and its number there."""
        fixed = {s.name for s in found if s.is_global and not s.name.startswith(PREFIX)}
        with self.lock:
            batch = self.batch
            if batch.count == MOST_OBJECTS or not batch.names.isdisjoint(fixed):
                batch = self.batch = _Batch()
            number = batch.count
            named = bytearray(code)
            for symbol in found:
                if symbol.name.startswith(PREFIX):
                    named[symbol.at:symbol.at + len(PREFIX)] = _prefix(number).encode()
            batch.waiting[number] = bytes(named)
            batch.names |= fixed
            batch.count += 1
            return batch, number

    def engine_of(self, batch: _Batch, arch: str) -> Any:
        """Load a batch, which new programs then no longer join, and return its engine."""
        with self.lock:
            if batch.engine is None:
                if batch is self.batch:
                    self.batch = _Batch()
                batch.load(arch)
            return batch.engine


_open = _Open()
remake_after_fork(sys.modules[__name__], "_open", _Open)


def _prefix(number: int) -> str:
    return f"{number:0{len(PREFIX)}x}"


class LoadedProgram:
    """An object, placed in executable memory when its addresses are first asked for."""

    def __init__(self, code: bytes, symbols: Sequence[str]) -> None:
        """Take an object. Raises CompileError if `code` is not an object for this machine, or lacks one of `symbols`."""
        arch = architecture_of(code)
        if arch != MACHINES.get(platform.machine().lower()):
            raise CompileError(f"the object is for {arch}, this machine is {platform.machine()}: it cannot be loaded here")
        found = symbols_of(code)
        sizes = {s.name: s.size for s in found if s.is_defined and s.is_global}
        missing = [name for name in symbols if name not in sizes]
        if missing:
            raise CompileError(f"the object does not define {', '.join(missing)}")
        may_use_tiles()     # has to be called before code with tile instructions runs
        self._arch, self._symbols = arch, [(name, sizes[name]) for name in symbols]
        self._addresses: tuple[int, ...] | None = None
        self._batch: _Batch | None
        self._batch, self._number = _open.join(code, found)
        self._drop = weakref.finalize(self, self._batch.waiting.pop, self._number, None)

    @property
    def addresses(self) -> tuple[int, ...]:
        """The addresses of the symbols, in order, valid until `close()`, then none. Raises CompileError if one is missing."""
        batch = self._batch
        if self._addresses is None and batch is not None:
            engine, number = _open.engine_of(batch, self._arch), _prefix(self._number)
            names = [number + name[len(PREFIX):] if name.startswith(PREFIX) else name for name, _ in self._symbols]
            found = tuple(engine.get_function_address(name) for name in names)
            if 0 in found:
                raise CompileError(f"LLVM does not find {', '.join(n for n, a in zip(names, found, strict=True) if not a)} in the object")
            self._addresses = found
        return self._addresses or ()

    @property
    def functions(self) -> tuple[tuple[int, int, str], ...]:
        """The functions as (address, bytes of code, symbol)."""
        return tuple((address, size, name) for address, (name, size) in zip(self.addresses, self._symbols, strict=False))

    def close(self) -> None:
        """Give the code up; the addresses must not be called any more. Closing twice is allowed."""
        self._batch, self._addresses = None, ()
        self._drop()

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
