"""A module of LLVM IR on its way to machine code, in any number of threads at once.

    ir → LlvmModule(ir) → verify → optimize → emit → bytes

llvmlite takes one lock around every function of LLVM, and gives up Python's lock in each. Here the three long functions, which parse, run
passes and generate code, take no lock of llvmlite's. The short ones keep Python's lock: a thread that gives it up gets it back only after
the switch interval (5 ms) while another thread runs Python code. LLVM allows this because each module has its own context, and each
`CodeGenerator` is used by one thread at a time.
"""
from __future__ import annotations

import ctypes
from collections.abc import Callable
from functools import cached_property
from typing import Any

import llvmlite.binding as llvm
from llvmlite.binding import ffi

SPEED_LEVEL = 2     # LLVM's -O2

_WITHOUT_PYTHON = ctypes.CDLL("LLVM", handle=ffi.lib._handle)       # functions of these libraries give up Python's lock
_WITH_PYTHON = ctypes.PyDLL("LLVM", handle=ffi.lib._handle)         # and these keep it


def _function(name: str, is_long: bool = False) -> Any:
    """Return a function of llvmlite's library, with the types that llvmlite declares."""
    declared, function = getattr(ffi.lib, name), (_WITHOUT_PYTHON if is_long else _WITH_PYTHON)[name]
    function.argtypes, function.restype = declared.argtypes, declared.restype
    return function


_make_context, _free_context = _function("LLVMPY_ContextCreate"), _function("LLVMPY_ContextDispose")
_parse, _free_module = _function("LLVMPY_ParseAssembly", is_long=True), _function("LLVMPY_DisposeModule")
_verify, _print, _free_text = (_function(f"LLVMPY_{name}") for name in ("VerifyModule", "PrintModuleToString", "DisposeString"))
_set_triple, _set_layout = _function("LLVMPY_SetTarget"), _function("LLVMPY_SetDataLayout")
_make_passes, _free_passes = _function("LLVMPY_buildPerModuleDefaultPipeline"), _function("LLVMPY_DisposeNewModulePassManger")
_run_passes, _emit = (_function(f"LLVMPY_{name}", is_long=True) for name in ("RunNewModulePassManager", "TargetMachineEmitToMemory"))
_start, _size, _free_buffer = (_function(f"LLVMPY_{name}") for name in ("GetBufferStart", "GetBufferSize", "DisposeMemoryBuffer"))


class CodeGenerator:
    """LLVM's code generator for a target, and the passes before it. Used by one thread at a time."""

    def __init__(self, machine: Any) -> None:
        self.machine, self.triple, self.layout = machine, machine.triple.encode(), str(machine.target_data).encode()

    @cached_property
    def builder(self) -> Any:
        """LLVM's builder of passes: without vectorisers and unrolling, because LINEAR is already vectorised and unrolled."""
        options = llvm.create_pipeline_tuning_options(SPEED_LEVEL)
        options.loop_vectorization = False
        options.slp_vectorization = False
        options.loop_unrolling = False
        options.loop_interleaving = False
        return llvm.create_pass_builder(self.machine, options)


class LlvmModule:
    """A module in a context of its own. Used by one thread at a time; `close` frees it. Methods raise RuntimeError with LLVM's message."""

    def __init__(self, ir: str) -> None:
        """Parse LLVM IR."""
        self._context = _make_context()
        self._module = None
        try:
            self._module = _told(lambda said: _parse(self._context, ir.encode(), said))
        except BaseException:
            self.close()
            raise

    def verify(self) -> None:
        """Check the module. LLVM may abort the process on a module that parses but is invalid."""
        _told(lambda said: _verify(self._module, said))

    def optimize(self, generator: CodeGenerator) -> None:
        """Run the passes before code generation, for GPUs. On CPUs they would double the time of compilation for equal code: LINEAR has
        equal expressions and loads once, and outside of loops where it can (`experiments/search_compiler.py`)."""
        passes = _make_passes(generator.builder, SPEED_LEVEL)       # LLVM's passes can be run once
        try:
            _run_passes(passes, self._module, generator.builder)
        finally:
            _free_passes(passes)

    def aim(self, generator: CodeGenerator) -> None:
        """Set the target that the module is compiled for."""
        _set_triple(self._module, generator.triple)
        _set_layout(self._module, generator.layout)

    def emit(self, generator: CodeGenerator, assembly: bool = False) -> bytes:
        """Generate the object, or the text of its assembly."""
        buffer = _told(lambda said: _emit(generator.machine, self._module, int(not assembly), said))
        try:
            return ctypes.string_at(_start(buffer), _size(buffer))
        finally:
            _free_buffer(buffer)

    def __str__(self) -> str:
        text = ctypes.c_char_p()
        _print(self._module, ctypes.byref(text))
        return _taken(text)

    def close(self) -> None:
        """Free the module and its context."""
        if self._module:
            _free_module(self._module)
        _free_context(self._context)


def _told(call: Callable[[Any], Any]) -> Any:
    """Return the result of a function that writes a message if it fails. Raises RuntimeError with it."""
    message = ctypes.c_char_p()
    result = call(ctypes.byref(message))
    said = _taken(message)
    if said:
        raise RuntimeError(said)
    return result


def _taken(text: ctypes.c_char_p) -> str:
    """Return a text that LLVM has allocated, and free it."""
    if text.value is None:
        return ""
    content = text.value.decode()
    _free_text(text)
    return content
