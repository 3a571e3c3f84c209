"""Checks that a program computes the values of its kernel: runs it by the interpreter of LINEAR and as machine code, against the
evaluator."""
from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from svod.compile.llvm.codegen import compile_object
from svod.compile.llvm.loaded import LoadedProgram, call_phase
from svod.compile.llvm.render import render
from svod.compile.lower.program import Program
from svod.core.ir.dtype import DType, dtypes, to_numpy
from svod.core.ir.uop import Ops
from svod.core.kernel.kernel import Kernel
from svod.core.machine.target import Target
from svod.core.spec.evaluate import evaluate
from svod.core.spec.values import from_float, to_float
from tests.interpreted import interpret

Array = np.ndarray[Any, np.dtype[Any]]
BORDER = 1 << 12          # bytes before and behind each buffer that machine code must not change
PATTERN = 0x5A
# allowed error, relative to the largest magnitude of an output
TOLERANCE = {"float64": 1e-11, "float32": 3e-5, "float16": 4e-3, "bfloat16": 3e-2}


def draw(dtype: DType, size: int, rng: np.random.Generator, vmin: int | None, vmax: int | None) -> Array:
    """Values in memory form: halves between -3 and 3, so that sums of products are exact in any order; indices also out of bounds."""
    if dtype.kind == "b":
        return rng.integers(0, 2, size).astype(np.bool_)
    if dtype.is_float:
        return from_float(rng.integers(-6, 7, size) / 2.0, dtype)
    low, high = vmin if vmin is not None else -3 if dtype.kind == "i" else 0, vmax if vmax is not None else 12
    return rng.integers(low, high + 1, size).astype(to_numpy(dtype))


@dataclass
class Case:
    """A kernel with inputs, values of its variables, and expected outputs."""

    kernel: Kernel
    seed: int = 0
    values: Mapping[str, int] = field(default_factory=dict)
    args: list[Array] = field(init=False)
    want: list[Array] = field(init=False)       # the expected outputs, in ascending order of their slots
    slots: tuple[int, ...] = field(init=False)

    def __post_init__(self) -> None:
        rng = np.random.default_rng(self.seed)
        params = [p.arg for p in self.kernel.params]
        meant = {u.src[0].src[0].src[0].arg.slot: u.dtype for u in self.kernel.ast.walk(Ops.BITCAST)
                 if u.src[0].op is Ops.LOAD and u.dtype.is_float and u.dtype.itemsize == u.src[0].dtype.itemsize}
        types = [meant.get(p.arg.slot, p.dtype) for p in self.kernel.params]     # 16-bit floats are drawn as numbers, then stored as bits
        drawn = [draw(t, p.size, rng, p.vmin, p.vmax) for t, p in zip(types, params, strict=True)]
        self.args = [a.view(to_numpy(p.dtype)) for a, p in zip(drawn, self.kernel.params, strict=True)]
        self.want = evaluate(self.kernel.ast, self.args, self.values)
        self.slots = tuple(sorted(set(self.kernel.outs)))

    def fresh(self) -> list[Array]:
        """Arguments to run on: outputs hold garbage, except where the kernel reads them or leaves elements alone."""
        out = [a.copy() for a in self.args]
        loaded = {u.src[0].src[0].arg.slot for u in self.kernel.ast.walk(Ops.LOAD)}
        for slot in self.slots:
            if slot not in loaded and self.covers(slot):
                out[slot].view(np.uint8)[:] = 0xA5 if out[slot].dtype != np.bool_ else 1
        return out

    def covers(self, slot: int) -> bool:
        """Whether the kernel writes every element of an output."""
        if self.values:
            return False
        n = 0
        for s in self.kernel.stages:
            if s.is_output and s.node.src[0].src[0].arg.slot == slot:
                size = 1
                for a in s.outs:
                    size *= self.kernel.axes[a].extent
                n += size
        return n >= int(self.kernel.params[slot].arg.size)

    def check(self, args: Sequence[Array], how: str) -> None:
        """Compare outputs; the AssertionError gives the position of the largest error."""
        for slot, want in zip(self.slots, self.want, strict=True):
            dtype = self.kernel.params[slot].dtype
            got = args[slot]
            if not dtype.is_float:
                wrong = np.flatnonzero(got != want)
                assert not wrong.size, f"{how}: output {slot} differs at {wrong[:8]} ({wrong.size} of {want.size}): " \
                                       f"got {got[wrong[:8]]}, want {want[wrong[:8]]}"
                continue
            g, w = to_float(got, dtype), to_float(want, dtype)
            finite = np.isfinite(w)
            scale = max(1.0, float(np.max(np.abs(w[finite]), initial=0.0)))
            bad = ~((g == w) | (np.isnan(g) & np.isnan(w)) | (np.abs(g - w) <= TOLERANCE[dtype.name] * scale))
            wrong = np.flatnonzero(bad)
            assert not wrong.size, f"{how}: output {slot} differs at {wrong[:8]} ({wrong.size} of {w.size}): " \
                                   f"got {g[wrong[:8]]}, want {w[wrong[:8]]}"


def parts_of(extent: int, slices: int) -> list[tuple[int, int]]:
    """Split a phase into `slices` parts, the last part first: results must not depend on the order or the worker of a part."""
    return [(extent * n // slices, extent * (n + 1) // slices) for n in reversed(range(slices))]


def run_interpreted(case: Case, program: Program, slices: int) -> None:
    args = case.fresh()
    interpret(program, args, slices=slices)
    case.check(args, f"interpreter, {slices} slices")


class _Guarded:
    """A copy of an array between two borders of a known pattern, 64-byte aligned."""

    def __init__(self, content: Array, slack: int = 0):
        self.raw = np.full(content.nbytes + slack + 2 * BORDER + 64, PATTERN, np.uint8)
        start = BORDER + (-(self.raw.ctypes.data + BORDER) % 64)
        self.start, self.stop = start, start + content.nbytes + slack
        self.array = self.raw[start:start + content.nbytes].view(content.dtype)
        self.array[:] = content
        self.address = self.array.ctypes.data if content.nbytes else self.raw.ctypes.data + start

    def intact(self) -> bool:
        return bool(np.all(self.raw[:self.start] == PATTERN) and np.all(self.raw[self.stop:] == PATTERN))


def run_native(case: Case, program: Program, target: Target, slices: int, final: bool = False) -> list[Array]:
    """Run machine code, each phase in `slices` parts with scratch full of garbage. Writes beyond a buffer are detected in its borders.
    Returns the outputs, in ascending order of their slots."""
    args = [_Guarded(a) for a in case.fresh()]
    temps = [_Guarded(np.full(n, 0xA5, np.uint8)) for n in program.spec.temps]
    symbols = tuple(p.symbol for p in program.spec.phases)
    with LoadedProgram(compile_object(render(program, target), target, final), symbols) as loaded:
        for phase, address in zip(program.spec.phases, loaded.addresses, strict=True):
            for begin, end in parts_of(phase.extent, min(slices, phase.extent)):
                scratch = _Guarded(np.full(phase.scratch_bytes, 0xFF, np.uint8))
                call_phase(address, [a.address for a in args + temps], (), scratch.address, begin, end)
                assert scratch.intact(), f"{phase.symbol} writes beyond its scratch of {phase.scratch_bytes} bytes"
    for i, a in enumerate(args):
        assert a.intact(), f"the program writes beyond argument {i}"
    for i, a in enumerate(temps):
        assert a.intact(), f"the program writes beyond temporary {i}"
    case.check([a.array for a in args], f"machine code, {slices} slices")
    return [args[slot].array for slot in case.slots]


def has_native(case: Case, target: Target) -> bool:
    """Whether the target has code for all of the kernel's types: conversions of float16 are instructions, never calls."""
    return "f16c" in target.features or target.arch != "x86_64" or all(u.dtype != dtypes.float16 for u in case.kernel.ast.toposort())


def steps(program: Program) -> int:
    """Approximate number of instructions that the interpreter would run: loops with constant bounds and loops over parts of a sum count
    exactly, others as 8 iterations."""
    total = 0
    for phase, code in zip(program.spec.phases, program.code, strict=True):
        stack = [1]
        for op, _, _, src, arg in code:
            if op == "LOOP":
                ends = [code[s] for s in src[:2]]
                part = [code[k][4] for s in ends[1][3] if ends[1][0] == "MIN" and code[s][0] == "ADD" and code[s][3][0] == src[0]
                        for k in code[s][3] if code[k][0] == "CONST"]
                if all(e[0] == "CONST" for e in ends):
                    n = max(0, -(-(ends[1][4] - ends[0][4]) // arg))
                elif part:          # from the start of a part to as much more, at most to the end
                    n = part[0] // arg
                elif ends[1][0] == "CONST" and ends[0][0] == "WHERE":       # work that the last part alone does
                    n = ends[1][4]
                else:
                    n = phase.extent if ends[1][0] == "END_" else 8
                stack.append(stack[-1] * max(n, 1))
            total += stack[-1]
            if op == "ENDLOOP":
                stack.pop()
    return total


