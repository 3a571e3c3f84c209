"""Hand-written LINEAR for tests: a builder, and a way to run a phase natively on NumPy arrays."""
from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from svod.compile.cpu.host import host_target, make_target
from svod.compile.llvm.codegen import compile_object
from svod.compile.llvm.loaded import LoadedProgram, call_phase
from svod.compile.llvm.render import render
from svod.compile.lower.program import Instruction, PhaseSpec, Program, ProgramSpec
from svod.core.ir.dtype import DType, dtypes, to_numpy
from svod.core.machine.target import Target

INDEX, BOOL, VOID = dtypes.index, dtypes.bool, dtypes.void
CACHES = (32 << 10, 1 << 20, 0)
BASELINE = make_target("x86_64", "x86-64-v2", ("sse4",), CACHES, 1)
AVX2 = make_target("x86_64", "haswell", ("avx2", "f16c", "fma", "sse4"), CACHES, 1)
AVX512 = make_target("x86_64", "skylake-avx512", ("avx2", "avx512f", "f16c", "fma", "sse4"), CACHES, 1)  # with hardware gathers


def runnable_targets() -> dict[str, Target]:
    """List the host as a target, and the x86 targets above whose code the host can run."""
    host = host_target()
    others = {"baseline": BASELINE, "avx2": AVX2, "avx512": AVX512}
    return {"host": host} | {n: t for n, t in others.items() if t.arch == host.arch and set(t.features) <= set(host.features)}


TARGETS = pytest.mark.parametrize("target", [pytest.param(t, id=n) for n, t in runnable_targets().items()])


class Code:
    """A builder of the LINEAR of one phase. Every method appends an instruction and returns its number."""

    def __init__(self) -> None:
        self.instructions: list[Instruction] = []

    def put(self, op: str, dtype: DType, lanes: int, src: tuple[int, ...] = (), arg: Any = None) -> int:
        self.instructions.append(Instruction(op, dtype, lanes, src, arg))
        return len(self.instructions) - 1

    def arg(self, slot: int, dtype: DType) -> int:
        return self.put("ARG", dtype, 1, (), slot)

    def const(self, dtype: DType, value: Any, lanes: int = 1) -> int:
        return self.put("CONST", dtype, lanes, (), value)

    def index(self, value: int) -> int:
        return self.const(INDEX, value)

    def load(self, ptr: int, idx: int, lanes: int, offset: int = 0, mask: tuple[int, ...] = ()) -> int:
        return self.put("LOAD", self.instructions[ptr][1], lanes, (ptr, idx, *mask), offset)

    def store(self, ptr: int, idx: int, value: int, offset: int = 0, mask: tuple[int, ...] = (), stream: bool = False) -> int:
        lanes = self.instructions[value][2]
        return self.put("STORE", self.instructions[ptr][1], lanes, (ptr, idx, value, *mask), (offset, stream))

    def alu(self, op: str, *src: int) -> int:
        of = self.instructions[src[-1]]
        return self.put(op, BOOL if op.startswith("CMP") else of[1], of[2], src)

    def loop(self, start: int, stop: int, step: int, *init: int) -> int:
        return self.put("LOOP", INDEX, 1, (start, stop, *init), step)

    def carry(self, loop: int, j: int) -> int:
        of = self.instructions[self.instructions[loop][3][2 + j]]
        return self.put("CARRY", of[1], of[2], (loop,), j)

    def end(self, loop: int, *following: int) -> int:
        return self.put("ENDLOOP", VOID, 1, (loop, *following))

    def result(self, loop: int, j: int) -> int:
        of = self.instructions[self.instructions[loop][3][2 + j]]
        return self.put("RESULT", of[1], of[2], (loop,), j)


def program(code: Code, arrays: Sequence[np.ndarray[Any, Any]], variables: tuple[str, ...] = (), scratch: int = 0) -> Program:
    """Make a program with one phase, named `phase`, over `arrays`; the test chooses their element types."""
    spec = ProgramSpec("test", tuple((dtypes.uint8, a.nbytes) for a in arrays), (0,), (), (PhaseSpec("phase", 1, 1, scratch),), variables)
    return Program(spec, (tuple(code.instructions),))


def aligned(nbytes: int, alignment: int = 64) -> np.ndarray[Any, Any]:
    """Allocate zeroed bytes at an address that is a multiple of `alignment`."""
    raw = np.zeros(nbytes + alignment, np.uint8)
    start = -raw.ctypes.data % alignment
    return raw[start:start + nbytes]


def run(code: Code, arrays: Sequence[np.ndarray[Any, Any]], begin: int = 0, end: int = 1, variables: dict[str, int] | None = None,
        scratch: int = 0, target: Target | None = None, final: bool = False) -> None:
    """Compile the phase and run it in place on `arrays`, the arguments by slot."""
    values = variables or {}
    target = target or host_target()
    built = program(code, arrays, tuple(values), scratch)
    private = aligned(max(64, scratch))
    with LoadedProgram(compile_object(render(built, target), target, final), ("phase",)) as loaded:
        call_phase(loaded.addresses[0], [a.ctypes.data for a in arrays], list(values.values()), private.ctypes.data, begin, end)


def apply(op: str, dtype: DType, operands: Sequence[np.ndarray[Any, Any]], lanes: int, of: Sequence[DType] | None = None,
          constants: dict[int, Any] | None = None, target: Target | None = None, put: Any = None) -> np.ndarray[Any, Any]:
    """Apply one elementwise instruction to whole arrays, whose length is a multiple of `lanes`. Operand k has dtype `of[k]`, or is a
    constant."""
    of = of or [dtype] * len(operands)
    n = len(operands[0])
    out = np.zeros(n, to_numpy(dtype))
    code = Code()
    pointers = [code.arg(0, dtype), *(code.arg(1 + k, t) for k, t in enumerate(of))]
    start, stop = code.put("BEGIN", INDEX, 1), code.put("END_", INDEX, 1)
    loop = code.loop(start, stop, lanes)
    known = constants or {}
    values = [code.const(of[k], known[k], lanes) if k in known else code.load(pointers[1 + k], loop, lanes) for k in range(len(operands))]
    result = put(code, values) if put else code.put(op, dtype, lanes, tuple(values))
    code.store(pointers[0], loop, result)
    code.end(loop)
    run(code, [out, *operands], 0, n, target=target)
    return out
