"""The toy device as a target: groups of threads, shared memory, short vectors, one core; and its matrix instructions."""
from __future__ import annotations

from svod.core.ir.dtype import DType, dtypes
from svod.core.machine.isa import DOTS, Digit, Dot, Fragment
from svod.core.machine.target import Target

TOY = Target(arch="toy", cpu="toy", features=("matrix",), vector_bytes=16, vector_registers=64, l1=1 << 14, l2=1 << 18, l3=1 << 22,
             threads=1, has_non_temporal=False, group_threads=64, shared_bytes=1 << 14, subgroup=4, has_async_copies=True, device="TOY")


def _instruction(name: str, accumulator: DType, operand: DType) -> Dot:
    """The layout of an instruction of 4×4×4: thread t has rows t//2 and t//2 + 2 of the results and of the left operand, in columns
    2·(t%2) and the next."""
    line = Fragment((Digit(2, 1, 0), Digit(2, 0, 2)), (Digit(2, 2, 0), Digit(2, 0, 1)))
    columns = Fragment((Digit(2, 0, 1), Digit(2, 2, 0)), (Digit(2, 0, 2), Digit(2, 1, 0)))
    return Dot(name, TOY.arch, ("matrix",), accumulator, (operand, operand), (operand,), 1, "", rows=4, columns=4, depth=4,
               base_cost=2.0, fragments=(line, line, columns))


def _of_two_subgroups() -> Dot:
    """Eight by eight by eight, of operands in shared memory: thread t has rows 4·(t//4) + t%4//2 and the one two further, in columns
    2·(t%2), the next, and those four further."""
    results = Fragment((Digit(2, 4, 0), Digit(2, 1, 0), Digit(2, 0, 2)), (Digit(2, 2, 0), Digit(2, 0, 4), Digit(2, 0, 1)))
    operand = dtypes.bfloat16
    return Dot("toy_shared", TOY.arch, ("matrix",), dtypes.float32, (operand, operand), (operand,), 1, "", rows=8, columns=8, depth=8,
               base_cost=4.0, fragments=(results,))


MATRIX = {d.name: d for d in (_of_two_subgroups(), _instruction("toy_bf16", dtypes.float32, dtypes.bfloat16),
                              _instruction("toy_f16", dtypes.float32, dtypes.float16),
                              _instruction("toy_s8", dtypes.int32, dtypes.int8))}
DOTS.update(MATRIX)
