"""What the parts of an f32 GEMM take: the hand-written chain against itself with parts taken out, interleaved.

    python experiments/gemm_pieces.py 1024
    python experiments/gemm_pieces.py 2048 --seconds 30

A part is taken out of the LINEAR of the chain; what is left computes something else and is timed only:

    A stays     all tiles read the rows of the first operand that the first one reads: nothing of it comes from beyond the first caches
    C stays     all tiles are stored where the first one is
    no packing  one iteration of the loop that copies a panel of the second operand: the panel is read as it is
    none        all three: the register tile alone, over a panel in the second cache

The ratio of the chain's time to one of these bounds what prefetching, other orders of the loops or a cheaper copy of that part could gain.
A loop of multiply-adds alone takes part in the rounds: processors change their frequency, and what a ceiling was at another time, or at its
best, is no measure of what the chain loses.
"""
from __future__ import annotations

import argparse
import random
import sys
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).parent / "chains"))

from gemm import square

# isort: split
from svod.bench.ceiling_loops import CeilingLoops
from svod.bench.race import confirm
from svod.bench.suites.suites import select_cases
from svod.bench.timer import Contestant
from svod.compile.cpu.host import host_target
from svod.compile.llvm.codegen import LoadedProgram, compile_object
from svod.compile.llvm.render import render
from svod.compile.lower.linear import validate
from svod.compile.lower.lower import lower
from svod.compile.lower.program import Instruction, Program
from svod.compile.plan.execution_plan import ExecutionPlan
from svod.core.graph import graph
from svod.core.ir.dtype import DType, dtypes
from svod.core.kernel.apply import apply_opt
from svod.core.kernel.kernel import Kernel
from svod.core.kernel.scheduler import Opt, Scheduler
from svod.core.schedule.schedule import create_schedule
from svod.tensor import Tensor

PARTS = {"A stays": ("LOAD", 1), "C stays": ("STORE", 0)}      # instruction, slot of the argument


def tile_loop(code: tuple[Instruction, ...]) -> int:
    """The position of the loop over register tiles: the one directly around the loop that carries the accumulators."""
    around: list[int] = []
    for i, (op, _, _, src, _) in enumerate(code):
        if op == "LOOP":
            if len(src) > 2:
                return around[-1]
            around.append(i)
        elif op == "ENDLOOP":
            around.pop()
    raise ValueError("the chain has no loop that carries accumulators")


def copy_loop(code: tuple[Instruction, ...]) -> int:
    """The position of the loop that copies into scratch."""
    around: list[int] = []
    for i, (op, _, _, src, _) in enumerate(code):
        if op == "LOOP":
            around.append(i)
        elif op == "ENDLOOP":
            around.pop()
        elif op == "STORE" and code[src[0]].op == "SCRATCH":
            return around[-1]
    raise ValueError("the chain copies nothing into scratch: it reads the second operand where it lies; take a larger one")


def without(code: tuple[Instruction, ...], parts: list[tuple[str, int]], packing: bool) -> tuple[Instruction, ...]:
    """The phase with the accesses of `parts` kept where they are at first, and, without `packing`, one iteration of the copy."""
    tile, copied = tile_loop(code), -1 if packing else copy_loop(code)
    out: list[Instruction] = []
    at: list[int] = []      # where an instruction went

    def emit(op: str, dtype: DType, lanes: int, src: tuple[int, ...], arg: Any) -> int:
        out.append(Instruction(op, dtype, lanes, src, arg))
        return len(out) - 1

    def still(i: int) -> int:
        """Index value `i` in the first iteration of the tile loop."""
        op, dtype, lanes, src, arg = code[i]
        if i == tile:
            return at[src[0]]
        return emit(op, dtype, lanes, tuple(map(still, src)), arg) if op in ("ADD", "SUB", "MUL", "MIN", "MAX") else at[i]

    for i, (op, dtype, lanes, src, arg) in enumerate(code):
        moved = tuple(at[s] for s in src)
        if i == copied:
            moved = (moved[0], emit("CONST", dtypes.index, 1, (), arg), *moved[2:])
        elif (op, code[src[0]].arg if src and code[src[0]].op == "ARG" else -1) in parts:
            moved = (moved[0], still(src[1]), *moved[2:])
        at.append(emit(op, dtype, lanes, moved, arg))
    return tuple(out)


def variants(program: Program) -> dict[str, Program]:
    """The program, and what is left of it without its parts."""
    code, = program.code
    cuts: dict[str, tuple[list[tuple[str, int]], bool]] = {name: ([part], True) for name, part in PARTS.items()}
    cuts |= {"no packing": ([], False), "none": (list(PARTS.values()), False)}
    return {"chain": program, **{name: Program(program.spec, (without(code, *cut),)) for name, cut in cuts.items()}}


def plan_of(program: Program, arrays: list[np.ndarray[Any, Any]]) -> ExecutionPlan:
    validate(program)
    target = host_target()
    loaded = LoadedProgram(compile_object(render(program, target), target, True), [p.symbol for p in program.spec.phases])
    return ExecutionPlan.of_kernel(program.spec, loaded, arrays)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("size", type=int, choices=(512, 1024, 2048))
    parser.add_argument("--seconds", type=float, default=15.0)
    args = parser.parse_args()
    target, (case,) = host_target(), select_cases("core", f"gemm_{args.size}")
    operands = case.draw()
    kernel = Kernel(create_schedule(graph.sink((Tensor(operands[0]) @ Tensor(operands[1])).uop)).calls[0].ast)
    state = Scheduler(kernel, target)
    for op, axis, *more in square(case, target):
        state = apply_opt(state, Opt(op, axis, *(tuple(m) if isinstance(m, list) else m for m in more)))
    arrays = [np.zeros(args.size**2, np.float32), *(np.ascontiguousarray(o).ravel() for o in operands)]
    plans = {name: plan_of(program, arrays) for name, program in variants(lower(state)).items()}
    plans["chain"].execute()
    np.testing.assert_allclose(arrays[0].reshape(args.size, -1), operands[0] @ operands[1], atol=1e-2)
    loops = CeilingLoops(target)
    bare = loops.fma_round(dtypes.float32, target.threads)
    entries = [*((name, p.repeat, 2.0 * args.size**3) for name, p in plans.items()), ("multiply-adds", bare.run, bare.flops)]
    found = confirm([Contestant(run, name) for name, run, _ in entries], rng=random.Random(0), budget_seconds=args.seconds)
    for i, (name, _, work) in enumerate(entries):
        per_chain, share = found.ratio(0, i).median * work / entries[0][2], found.ratio(len(entries) - 1, i).median * work / bare.flops
        print(f"{name:13s} {work / found.seconds(i) / 1e9:6.1f} GFLOP/s   {per_chain:.3f} × the chain   {share:.3f} of the multiply-adds")
    if found.noisy:
        print(f"noisy: {found.noisy}")


if __name__ == "__main__":
    main()
