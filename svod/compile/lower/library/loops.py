"""A LINEAR builder with short methods for the loops of library kernels."""
from __future__ import annotations

import math
from collections.abc import Callable

from svod.compile.lower.builder import Builder
from svod.compile.lower.program import DEFAULT_NAME, Instruction, PhaseSpec, Program, ProgramSpec
from svod.core.graph.library_kernel import result_shape
from svod.core.ir.dtype import DType, dtypes
from svod.core.ir.uop import COMPARISONS, Ops, UOp
from svod.core.machine.target import Target

INDEX, BOOL = dtypes.index, dtypes.bool
GROUP = 256                     # threads of a group, if the target allows as many
PARALLEL_ELEMENTS = 1 << 14     # elements; a phase with fewer runs on one core, which is done before another core starts
Keys = Callable[[int, int], int]         # (position in a row, lanes) → the keys from this position on


class Loops(Builder):
    """A LINEAR builder for scalar and vector loops. Methods on indices take and return scalar indices."""

    def args(self, node: UOp) -> tuple[int, ...]:
        """Return pointers to the result and to the operands."""
        types = (node.dtype, *(p.dtype for p in node.src))
        return tuple([self.pure("ARG", d, 1, (), slot) for slot, d in enumerate(types)])

    def scratch(self, dtype: DType, offset: int) -> int:
        return self.pure("SCRATCH", dtype, 1, (), offset)

    def bounds(self) -> tuple[int, int]:
        """Return (begin, end): the range of the phase's iterations that this call computes."""
        return self.pure("BEGIN", INDEX, 1, ()), self.pure("END_", INDEX, 1, ())

    def thread(self, it: int, block: int, count: int) -> tuple[int, int]:
        """Return (the number of this thread among the threads of all groups, at most `count - 1`; whether it is below `count`). `it`:
        the number of its group. `block`: the threads of a group."""
        number = self.calc("ADD", self.mul(it, block), self.pure("LOCAL_ID", INDEX, 1, ()))
        exists = self.below(number, self.index(count))
        return self.least(number, self.index(count - 1)), exists

    # -- indices ----------------------------------------------------------------------------------
    def calc(self, name: str, a: int, b: int) -> int:
        return self.alu(name, INDEX, 1, a, b)

    def plus(self, a: int, k: int) -> int:
        return self.calc("ADD", a, self.index(k))

    def minus(self, a: int, b: int) -> int:
        return self.calc("SUB", a, b)

    def least(self, a: int, b: int) -> int:
        return self.calc("MIN", a, b)

    def over(self, a: int, k: int) -> int:
        return self.calc("IDIV", a, self.index(k))

    def mod(self, a: int, k: int) -> int:
        return self.calc("MOD", a, self.index(k))

    def below(self, a: int, b: int) -> int:
        return self.alu("CMPLT", BOOL, 1, a, b)

    def choose(self, condition: int, a: int, b: int) -> int:
        """Select `a` where the condition holds, otherwise `b`, for values of any type."""
        return self.alu("WHERE", self.dtype[a], self.num_lanes[a], condition, a, b)

    # -- bools ------------------------------------------------------------------------------------
    def both(self, a: int, b: int) -> int:
        return self.alu("AND", BOOL, max(self.num_lanes[a], self.num_lanes[b]), a, b)

    def either(self, a: int, b: int) -> int:
        return self.alu("OR", BOOL, max(self.num_lanes[a], self.num_lanes[b]), a, b)

    def no(self, a: int) -> int:
        return self.alu("NOT", BOOL, self.num_lanes[a], a)

    # -- memory -----------------------------------------------------------------------------------
    def get(self, pointer: int, at: int, lanes: int = 1, offset: int = 0, ordered: bool = False, mask: int | None = None) -> int:
        """Load `lanes` elements; 0 where a mask is false. `ordered`: needed if the loops also write this memory."""
        dtype = self.dtype[pointer]
        src = (pointer, at) if mask is None else (pointer, at, mask, self.const(dtype, lanes, 0))
        return self.load("LOAD", dtype, lanes, src, offset, ordered=ordered)

    def strided(self, pointer: int, at: int, lanes: int, stride: int) -> int:
        """Load `lanes` elements that are `stride` elements apart."""
        return self.load("LOADS", self.dtype[pointer], lanes, (pointer, at), (0, stride))

    def put(self, pointer: int, at: int, value: int, mask: int | None = None, offset: int = 0) -> None:
        src = (pointer, at, value) if mask is None else (pointer, at, value, mask)
        self.store("STORE", self.dtype[pointer], self.num_lanes[value], src, (offset, False))

    def scatter(self, pointer: int, at: int, value: int, mask: int) -> None:
        """Store each lane of `value` at its own index, the lanes of `at`, where the mask is true."""
        self.store("SCATTER", self.dtype[pointer], self.num_lanes[value], (pointer, at, value, mask), 0)

    def over_lanes(self, op: str, v: int) -> int:
        """Combine the lanes of a vector, whose number is a power of two."""
        width = self.num_lanes[v]
        while width > 1:
            width //= 2
            low, high = (self.pure("SHUFFLE", self.dtype[v], width, (v,), tuple(range(k, k + width))) for k in (0, width))
            v = self.alu(op, self.dtype[v], width, low, high)
        return v

    # -- loops ------------------------------------------------------------------------------------
    def loop(self, start: int, stop: int, body: Callable[..., tuple[int, ...] | None], *init: int, step: int = 1) -> list[int]:
        """Emit `body(i, *carried)` for i from start to stop; returns the last carried values."""
        head, carried = self.open(start, stop, step, init)
        return self.close(head, tuple(body(head, *carried) or ()))

    def span(self, start: int, stop: int, lanes: int, body: Callable[..., tuple[int, ...] | None], *init: int) -> list[int]:
        """Emit `body(i, width, *carried)` for start ≤ i < stop: first by vectors of `lanes`, then one by one."""
        length = self.minus(stop, start)
        middle = self.calc("ADD", start, self.minus(length, self.mod(length, lanes)))
        carried = self.loop(start, middle, lambda i, *c: body(i, lanes, *c), *init, step=lanes) if lanes > 1 else list(init)
        return self.loop(middle if lanes > 1 else start, stop, lambda i, *c: body(i, 1, *c), *carried)

    def compute(self, types: tuple[DType, ...], lanes: int) -> Callable[..., int]:
        """Return the function `alu(op, *args)` that combiners call."""
        def alu(op: Ops, *args: int) -> int:
            return self.alu(op.value, BOOL if op in COMPARISONS else self.dtype[args[-1]], lanes, *args)
        return alu


def program(node: UOp, temps: tuple[int, ...], *phases: tuple[Loops, int, int, int], block: int = 1) -> Program:
    """Return the Program of `phases`: (loops, iterations, threads, bytes of scratch), each in groups of `block` threads."""
    name, options, shapes = node.arg
    size = math.prod(result_shape(name, options, shapes, [p.dtype for p in node.src]))
    params = ((node.dtype, size), *((p.dtype, p.arg.size) for p in node.src))
    specs = tuple(PhaseSpec(f"svod_p{i}", extent, threads, scratch, block=block) for i, (_, extent, threads, scratch) in enumerate(phases))
    code: tuple[tuple[Instruction, ...], ...] = tuple(loops.finish() for loops, _, _, _ in phases)
    read = tuple(sorted({p.arg.slot for p in node.src}))
    return Program(ProgramSpec(DEFAULT_NAME, params, (0,), temps, specs, ins=read), code)


def cores(target: Target, elements: int, iterations: int) -> int:
    """Return the number of cores that a phase asks for."""
    return min(target.threads, iterations) if elements >= PARALLEL_ELEMENTS else 1


def aligned(nbytes: int) -> int:
    """Round bytes of scratch up to whole cache lines, with room to read one vector past the end."""
    return (nbytes + 127) // 64 * 64
