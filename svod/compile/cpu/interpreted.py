"""Programs as LINEAR, run instruction by instruction in NumPy: what the second compiler of the CPU makes (`svod.compile.cpu.backend`).

    source    LINEAR as JSON            "binary"  the same, validated            loaded   a function per phase that interprets it

The functions have the signature of compiled phases and are called by the same runtime from the same threads, so a plan does not know the
difference. Where results differ from those of LLVM, LLVM or the printer of its text is at fault; where they do not, lowering is.
"""
from __future__ import annotations

import ctypes
import json
from collections.abc import Callable
from typing import Any

import numpy as np

from svod.compile.llvm.codegen import PHASE_FUNCTION
from svod.compile.lower.interpreter import run_phase
from svod.compile.lower.linear import validate
from svod.compile.lower.program import Instruction, Program, ProgramSpec
from svod.core.graph.buffer import Array
from svod.core.ir.dtype import BY_NAME, DType, to_numpy
from svod.errors import CompileError


def render_linear(program: Program) -> str:
    """LINEAR as text. Raises CompileError for code that its grammar does not have."""
    validate(program)
    phases = [[_to_data(instr) for instr in code] for code in program.code]
    return json.dumps(phases, separators=(",", ":"))


def encode_linear(source: str) -> bytes:
    """The text as bytes. Raises CompileError for text that is no LINEAR."""
    _read(source)
    return source.encode()


class InterpretedProgram:
    """Phases that interpret their LINEAR: `addresses`, in order, valid until `close()`. A failure in one, an interrupt too, has no
    caller to raise in: it is kept until `take_failure`. A plan calls a `copy` of its own, so it takes the failures of its own runs."""

    def __init__(self, code: bytes, spec: ProgramSpec) -> None:
        """Raises CompileError when `code` is no LINEAR, or has other phases than `spec`."""
        try:
            phases = _read(code.decode())
        except UnicodeDecodeError as error:
            raise CompileError(f"not LINEAR as text: {error}") from error
        if len(phases) != len(spec.phases):
            raise CompileError(f"the code has {len(phases)} phases, the program {spec.name} {len(spec.phases)}")
        program = Program(spec, phases)
        validate(program)
        self._make_functions(program)

    def _make_functions(self, program: Program) -> None:
        self.program = program
        self._failure: BaseException | None = None
        self._functions = [PHASE_FUNCTION(self._phase(k)) for k in range(len(program.code))]
        self.addresses: tuple[int, ...] = tuple(ctypes.cast(f, ctypes.c_void_p).value or 0 for f in self._functions)

    def copy(self) -> InterpretedProgram:
        """The same program with addresses and a failure of its own."""
        made = object.__new__(InterpretedProgram)
        made._make_functions(self.program)
        return made

    def take_failure(self) -> BaseException | None:
        """The first failure since the last call."""
        failure, self._failure = self._failure, None
        return failure

    def close(self) -> None:
        """The addresses must not be called any more."""
        self.addresses = ()
        self._functions = []

    def _phase(self, number: int) -> Callable[[int, int, int, int, int], None]:
        def run(args: int, variables: int, scratch: int, begin: int, end: int) -> None:
            try:
                self._run(number, args, variables, begin, end)
            except BaseException as error:      # native code called this: there is nobody to raise to, and ctypes drops it
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
    """The bytes at an address."""
    if not nbytes or not address:
        return np.empty(0, np.uint8)
    return np.ctypeslib.as_array((ctypes.c_uint8 * nbytes).from_address(address))


def _to_data(value: Any) -> Any:
    if isinstance(value, DType):
        return {"dtype": value.name}
    if isinstance(value, tuple):
        return [_to_data(v) for v in value]
    if isinstance(value, np.generic):
        return value.item()
    return value


def _from_data(value: Any) -> Any:
    if isinstance(value, dict):
        return BY_NAME[value["dtype"]]
    return tuple([_from_data(v) for v in value]) if isinstance(value, list) else value


def _read(source: str) -> tuple[tuple[Instruction, ...], ...]:
    try:
        return tuple(tuple(_instruction(row) for row in code) for code in json.loads(source))
    except (ValueError, KeyError, TypeError) as error:
        raise CompileError(f"not LINEAR as text: {error}") from error


def _instruction(row: Any) -> Instruction:
    op, dtype, lanes, src, arg = map(_from_data, row)
    if not isinstance(op, str) or not isinstance(dtype, DType) or not isinstance(lanes, int) or not isinstance(src, tuple):
        raise ValueError(f"{row!r:.80} is no instruction")
    return Instruction(op, dtype, lanes, src, arg)
