"""A program that compiles every operation of LINEAR on every type for an architecture and prints their number. LLVM aborts the process if
it cannot compile one.

    python -m tests.compile.cuda.compile_all sm_90
"""
from __future__ import annotations

import sys
from collections.abc import Iterator

from svod.compile.cuda import ptxas
from svod.compile.cuda.ptx import emit_ptx
from svod.compile.cuda.render import render
from svod.compile.lower.linear import ARITY, BITS_ONLY, COMPARES, FLOAT_ONLY, LEGAL_INTEGER, validate
from svod.compile.lower.program import Instruction, PhaseSpec, Program, ProgramSpec
from svod.core.ir.dtype import BY_NAME, DType, dtypes
from tests.compile.cuda.target import card_target

LANES = (1, 2, 3, 4, 7, 16)
TYPES = [d for d in BY_NAME.values() if d not in (dtypes.void, dtypes.index)]


def operations(dtype: DType) -> Iterator[str]:
    """List the elementwise operations of LINEAR on a type."""
    for op in sorted(ARITY):
        if op == "SCALEB" or (op == "POW2" and dtype != dtypes.float32):
            continue
        if (op in FLOAT_ONLY and not dtype.is_float) or (op in BITS_ONLY and dtype.is_float):
            continue
        if op in {"IDIV", "MOD", "SHL", "SHR"} | LEGAL_INTEGER and dtype.kind not in "iu":
            continue
        if op not in ("SUB", "NEG", "ABS", "MULACC") or dtype.kind != "b":
            yield op


def one(op: str, dtype: DType, lanes: int, to: DType | None = None) -> Program:
    """Make the kernel y = op(x, x, x), loaded and stored with a stride; with `to`, a conversion to that type."""
    out = dtypes.bool if op in COMPARES else to or dtype
    index = dtypes.index
    code = [Instruction("ARG", dtype, 1, (), 0), Instruction("ARG", out, 1, (), 1), Instruction("LOCAL_ID", index, 1, (), None),
            Instruction("CONST", index, 1, (), lanes), Instruction("MUL", index, 1, (2, 3), None),
            Instruction("LOAD", dtype, lanes, (0, 4), 0)]
    code.append(Instruction("LOADS", dtype, lanes, (0, 4), (1, 2)))
    condition = Instruction("CMPEQ", dtypes.bool, lanes, (5, 6), None)
    code.append(condition)
    count = 1 if op == "CAST" else ARITY[op]
    operands = (7, 5, 6) if op == "WHERE" else (5, 6, 5)[:count]
    code.append(Instruction(op, out, lanes, operands, None))
    code.append(Instruction("STORE", out, lanes, (1, 4, 8), (0, False)))
    size = 64 * lanes * 4
    spec = ProgramSpec("one", ((dtype, size), (out, size)), (1,), (), (PhaseSpec("svod_p0", 4, 1, 0, block=32),), ins=(0,))
    return Program(spec, (tuple(code),))


def main(arch: str) -> None:
    """Compile all kernels, a hundred in each module of PTX."""
    target, done = card_target(arch), 0
    programs = [one(op, dtype, lanes) for dtype in TYPES for op in operations(dtype) for lanes in LANES]
    programs += [one("CAST", dtype, lanes, to) for dtype in TYPES for to in TYPES if dtype != to for lanes in (1, 4)]
    for program in programs:
        validate(program)
        print(program.code[0][8], flush=True)
        text = emit_ptx(render(program, target), arch)
        if ptxas.ptxas_version() is not None and done % 40 == 0:
            ptxas.assemble(text, arch)
        done += 1
    print(f"compiled {done}")


if __name__ == "__main__":
    main(sys.argv[1])
