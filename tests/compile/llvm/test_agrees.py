"""Random LINEAR programs: machine code and the interpreter of LINEAR give the same bits."""
from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest

from svod.compile.llvm.codegen import compile_object
from svod.compile.llvm.loaded import LoadedProgram, call_phase
from svod.compile.llvm.render import render
from svod.compile.lower.linear import format_linear, validate
from svod.compile.lower.program import PhaseSpec, Program, ProgramSpec
from svod.core.ir.dtype import STORABLE, DType, dtypes, to_numpy
from svod.core.machine.target import Target
from tests.compile.native import BASELINE, BOOL, INDEX, TARGETS, Code, aligned
from tests.draws import an_eighth
from tests.interpreted import interpret

EXTENT, PITCH = 6, 400  # iterations of the phase; elements of the output that each may write
INTEGER = ("ADD", "SUB", "MUL", "MAX", "MIN", "IDIV", "MOD", "AND", "OR", "XOR", "SHL", "SHR")
UNARY = {"f": ("NEG", "ABS", "FLOOR", "CEIL", "TRUNC", "ROUND", "SQRT", "RECIPROCAL"), "i": ("NEG", "ABS", "NOT"), "u": ("NOT",),
         "b": ("NOT",)}
BINARY = {"f": ("ADD", "SUB", "MUL", "FDIV"), "i": INTEGER, "u": INTEGER, "b": ("AND", "OR", "XOR")}
COMPARE = ("CMPLT", "CMPLE", "CMPEQ", "CMPNE")


class Generator:
    """A generator of a random phase over one input and one output per dtype, all of PITCH * EXTENT elements; slot 2k is written, 2k+1
    read."""

    def __init__(self, seed: int, types: tuple[DType, ...]) -> None:
        self.rng = random.Random(seed)
        self.types = types
        self.code = Code()
        self.known: dict[tuple[DType, int], list[int]] = {}
        self.pointers = [(self.code.arg(2 * k, t), self.code.arg(2 * k + 1, t)) for k, t in enumerate(types)]
        self.written = 0

    def remember(self, value: int) -> int:
        _, dtype, lanes, _, _ = self.code.instructions[value]
        self.known.setdefault((dtype, lanes), []).append(value)
        return value

    def constant(self, dtype: DType, lanes: int) -> int:
        if dtype.kind == "b":
            return self.code.const(dtype, self.rng.random() < 0.5, lanes)
        if dtype.is_float:
            return self.code.const(dtype, self.rng.choice([0.0, -0.0, 1.0, -1.5, 0.1, 100.0, float("inf")]), lanes)
        return self.code.const(dtype, self.rng.choice([0, 1, 2, 3, 7, 8, 100] + ([-1, -3, -8] if dtype.kind == "i" else [])), lanes)

    def pick(self, dtype: DType, lanes: int) -> int:
        if self.rng.random() < 0.2:
            return self.constant(dtype, lanes)
        known = self.known.get((dtype, lanes))
        return self.rng.choice(known) if known else self.remember(self.load(dtype, lanes, self.base))

    def mask(self, lanes: int) -> int:
        return self.pick(BOOL, self.rng.choice((1, lanes)))

    def load(self, dtype: DType, lanes: int, base: int) -> int:
        k = self.types.index(dtype)
        pointer, masked = self.pointers[k][1], dtype != BOOL and self.rng.random() < 0.3
        extra = (self.mask(lanes), self.pick(dtype, lanes)) if masked else ()
        form = self.rng.choice(("LOAD", "LOAD", "LOADS", "GATHER"))
        if form == "GATHER":
            index = self.code.put("SPLAT", INDEX, lanes, (base,)) if lanes > 1 else base
            spread = self.code.put("VCONST" if lanes > 1 else "CONST", INDEX, lanes, (),
                                   tuple(self.rng.randrange(64) for _ in range(lanes)) if lanes > 1 else 5)
            return self.code.put(form, dtype, lanes, (pointer, self.code.alu("ADD", index, spread), *extra), self.rng.randrange(8))
        if form == "LOADS":
            stride = self.rng.choice([-7, -3, -2, -1, 0, 1, 2, 3, 5, 9])
            first = self.rng.randrange(8) + max(0, -stride * (lanes - 1))
            return self.code.put(form, dtype, lanes, (pointer, base, *extra), (first, stride))
        return self.code.put(form, dtype, lanes, (pointer, base, *extra), self.rng.randrange(8))

    def store(self, base: int) -> None:
        (dtype, lanes), values = self.rng.choice([item for item in self.known.items() if item[0][0] in self.types])
        k = self.types.index(dtype)
        value, extra = self.rng.choice(values), (self.mask(lanes),) if self.rng.random() < 0.3 else ()
        stride = self.rng.choice([-3, -1, 1, 1, 2])
        first = self.rng.randrange(PITCH // 2) + max(0, -stride * (lanes - 1))
        if stride == 1:
            self.code.store(self.pointers[k][0], base, value, offset=first, mask=extra)
        else:
            self.code.put("STORES", dtype, lanes, (self.pointers[k][0], base, value, *extra), (first, stride))

    def step(self) -> None:
        """Append one random instruction and its value."""
        rng, code = self.rng, self.code
        dtype, lanes = rng.choice(self.types), rng.choice((1, 4, 8, 16))
        what = rng.randrange(10)
        if what < 2:
            value = self.load(dtype, lanes, self.base)
        elif what < 3:
            value = code.put(rng.choice(UNARY[dtype.kind]), dtype, lanes, (self.pick(dtype, lanes),))
        elif what < 6:
            value = code.put(rng.choice(BINARY[dtype.kind]), dtype, lanes, (self.pick(dtype, lanes), self.pick(dtype, lanes)))
        elif what < 7:
            value = code.put(rng.choice(COMPARE), BOOL, lanes, (self.pick(dtype, lanes), self.pick(dtype, lanes)))
        elif what < 8:
            value = code.put("WHERE", dtype, lanes, (self.mask(lanes), self.pick(dtype, lanes), self.pick(dtype, lanes)))
        elif what < 9:
            of = rng.choice([t for t in self.types if dtype.is_float or not t.is_float])
            value = code.put("CAST", dtype, lanes, (self.pick(of, lanes),))
        else:
            half = max(1, lanes // 2)
            source = self.pick(dtype, half)
            order = tuple(rng.randrange(2 * half) for _ in range(lanes))
            value = code.put("SHUFFLE", dtype, lanes, (source, self.pick(dtype, half)), order)
        self.remember(value)

    def scoped(self, steps: int) -> None:
        for _ in range(steps):
            self.step()
            if self.rng.random() < 0.3:
                self.store(self.base)

    def build(self) -> Code:
        code, rng = self.code, self.rng
        outer = code.loop(code.put("BEGIN", INDEX, 1), code.put("END_", INDEX, 1), 1)
        self.base = code.put("MULACC", INDEX, 1, (outer, code.index(PITCH), code.index(0)))
        self.scoped(8)
        carried = [self.pick(rng.choice(self.types), rng.choice((1, 8))) for _ in range(2)]
        inner = code.loop(code.index(0), rng.choice((outer, code.index(3), code.index(1), code.index(0))), rng.choice((1, 2)), *carried)
        outside = {key: list(values) for key, values in self.known.items()}
        for j in range(2):
            self.remember(code.carry(inner, j))
        self.scoped(8)
        code.end(inner, *(self.pick(*code.instructions[c][1:3]) for c in carried))
        self.known = outside
        for j in range(2):
            self.remember(code.result(inner, j))
        self.scoped(5)
        for _ in range(4):
            self.store(self.base)
        code.end(outer)
        return code


def inputs(types: tuple[DType, ...], seed: int) -> list[np.ndarray[Any, Any]]:
    rng = np.random.default_rng(seed)
    arrays: list[np.ndarray[Any, Any]] = []
    for t in types:
        n = PITCH * EXTENT
        raw = rng.normal(0, 10, n).astype(np.float32) if t.is_float else rng.integers(0, 2 if t.kind == "b" else 90, n)
        if t == dtypes.bfloat16:
            raw = (raw.view(np.uint32) >> 16).astype(np.uint16)
        arrays += [np.zeros(n, to_numpy(t)), raw.astype(to_numpy(t))]
    return arrays


def plain(dtype: DType, x: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """Return the array with all NaNs replaced by the same one."""
    if dtype == dtypes.bfloat16:
        return np.where(x & 0x7FFF > 0x7F80, 0x7FC0, x)
    return np.where(np.isnan(x), np.nan, x) if dtype.is_float else x


@TARGETS
@pytest.mark.parametrize("seed", an_eighth(range(24)))
def test_random_programs(seed: int, target: Target) -> None:
    choice = random.Random(seed)
    types = (BOOL, *choice.sample([t for t in STORABLE if t != BOOL and not (target == BASELINE and t == dtypes.float16)], 3))
    code = Generator(seed, types).build()
    size = PITCH * EXTENT
    spec = ProgramSpec("random", tuple((t, size) for t in types for _ in range(2)), tuple(range(0, 2 * len(types), 2)), (),
                       (PhaseSpec("phase", EXTENT, 1, 0),))
    program = Program(spec, (tuple(code.instructions),))
    validate(program)
    want, got = inputs(types, seed), inputs(types, seed)
    interpret(program, want)
    scratch = aligned(64)
    with LoadedProgram(compile_object(render(program, target), target, final=bool(seed % 2)), ("phase",)) as loaded:
        for begin, end in ((0, 2), (2, EXTENT)):
            call_phase(loaded.addresses[0], [a.ctypes.data for a in got], [], scratch.ctypes.data, begin, end)
    for k, dtype in enumerate(types):
        np.testing.assert_array_equal(plain(dtype, got[2 * k]), plain(dtype, want[2 * k]), err_msg=f"{dtype}\n{format_linear(program)}")
    assert any(want[2 * k].any() for k in range(len(types)))
