"""Programs in LINEAR that are interpreted in NumPy, instruction by instruction: the CPU's second compiler (`svod.compile.cpu.backend`).

    source    LINEAR as JSON            "binary"  the same, validated            loaded   a function per phase that interprets it

The functions have the signature of compiled phases, and the same runtime calls them from the same threads, so plans need no other code.
They help to locate a wrong result: if the interpreter gives another result than compiled code, LLVM or the printer of its text is wrong; if
it gives the same wrong result, lowering is wrong.
"""
from __future__ import annotations

import ctypes
from collections.abc import Callable

import numpy as np

from svod.compile.llvm.loaded import PHASE_FUNCTION
from svod.compile.lower.interpreter import run_phase
from svod.compile.lower.linear_text import decode_linear
from svod.compile.lower.program import Program, ProgramSpec
from svod.core.graph.buffer import Array
from svod.core.ir.dtype import to_numpy


class InterpretedProgram:
    """A loaded program whose phases interpret LINEAR. `addresses`: the functions of the phases, in order, valid until `close()`. Native
    code calls them, so an exception (or an interrupt) cannot propagate; it is stored until `take_failure`. Each plan uses a separate
    `copy`, so that it gets the failures of its own runs only."""

    def __init__(self, code: bytes, spec: ProgramSpec) -> None:
        """Decode the program. Raises CompileError if `code` is not LINEAR, or if its phases differ from those of `spec`."""
        self._make_functions(decode_linear(code, spec))

    def _make_functions(self, program: Program) -> None:
        self.program = program
        self._failure: BaseException | None = None
        self._functions = [PHASE_FUNCTION(self._phase(k)) for k in range(len(program.code))]
        self.addresses: tuple[int, ...] = tuple(ctypes.cast(f, ctypes.c_void_p).value or 0 for f in self._functions)

    def copy(self) -> InterpretedProgram:
        """Copy the program. The copy has addresses of its own, and stores failures separately."""
        made = object.__new__(InterpretedProgram)
        made._make_functions(self.program)
        return made

    def take_failure(self) -> BaseException | None:
        """Return the first failure since the last call; None if there was none."""
        failure, self._failure = self._failure, None
        return failure

    def close(self) -> None:
        """Release the functions; `addresses` must not be called any more."""
        self.addresses = ()
        self._functions = []

    def _phase(self, number: int) -> Callable[[int, int, int, int, int], None]:
        def run(args: int, variables: int, scratch: int, begin: int, end: int) -> None:
            try:
                self._run(number, args, variables, begin, end)
            except BaseException as error:      # the caller is native code, so ctypes would discard the exception
                self._failure = self._failure or error
        return run

    def _run(self, number: int, args: int, variables: int, begin: int, end: int) -> None:
        spec = self.program.spec
        count = len(spec.params) + len(spec.temps)
        pointers = (ctypes.c_void_p * count).from_address(args)
        arrays = [_memory(pointers[slot], size * dtype.itemsize).view(to_numpy(dtype)) for slot, (dtype, size) in enumerate(spec.params)]
        temps = [_memory(pointers[len(spec.params) + k], nbytes) for k, nbytes in enumerate(spec.temps)]
        values = (ctypes.c_int64 * len(spec.variables)).from_address(variables) if spec.variables else ()
        run_phase(self.program, number, arrays, temps, dict(zip(spec.variables, values, strict=True)), begin, end)


def _memory(address: int | None, nbytes: int) -> Array:
    """Return an array of the bytes at an address."""
    if not nbytes or not address:
        return np.empty(0, np.uint8)
    return np.ctypeslib.as_array((ctypes.c_uint8 * nbytes).from_address(address))
