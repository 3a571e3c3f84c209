"""Planted miscompiles: each changes one thing in LINEAR that a faulty lowering might get wrong, and verification must reject it.

The programs come from real chains through the real lowering; they run in the interpreter of LINEAR, and some through LLVM as well.
The unchanged program of every case passes, so that a rejection says something about the change."""
from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import pytest

from svod.compile.cpu.host import host_target
from svod.compile.llvm.codegen import compile_object
from svod.compile.llvm.loaded import LoadedProgram
from svod.compile.llvm.render import render
from svod.compile.lower.lower import lower
from svod.compile.lower.program import Instruction, Program
from svod.compile.plan.execution_plan import ExecutionPlan
from svod.core.ir.dtype import DType, dtypes
from svod.core.ir.uop import Ops
from svod.core.kernel.apply import apply_opts
from svod.core.kernel.kernel import Kernel
from svod.core.kernel.scheduler import Opt, Scheduler
from svod.errors import CompileError
from svod.tune.measure.verify import GuardedBuffers, Reference, verify
from tests.draws import a_half
from tests.interpreted import interpret
from tests.tune.search_kernels import TARGET, axis, elementwise, gather, gemm, kernel, load, param, row_reduce, softmax, store

Mutation = Callable[[Program], Program]
Match = Callable[[Instruction], bool]


# -- tools --------------------------------------------------------------------------------------------------------------------
def with_code(program: Program, phase: int, code: Sequence[Instruction]) -> Program:
    codes = list(program.code)
    codes[phase] = tuple(Instruction(*i) for i in code)
    return Program(program.spec, tuple(codes))


def find(program: Program, match: Match, phase: int = 0, last: bool = False) -> int:
    places = [i for i, instr in enumerate(program.code[phase]) if match(instr)]
    assert places, "nothing to change: the lowering has changed, choose another place"
    return places[-1 if last else 0]


def op(name: str, dtype: DType | None = None, lanes: int | None = None) -> Match:
    return lambda i: i[0] == name and (dtype is None or i[1] == dtype) and (lanes is None or i[2] == lanes)


def change(match: Match, edit: Callable[[Instruction], Instruction], *, phase: int = 0, last: bool = False) -> Mutation:
    """Edit the first (or last) instruction of a program that matches."""
    def mutate(program: Program) -> Program:
        at = find(program, match, phase, last)
        code = list(program.code[phase])
        code[at] = edit(code[at])
        return with_code(program, phase, code)
    return mutate


def bypass(match: Match, operand: int, *, phase: int = 0, last: bool = False) -> Mutation:
    """Replace the uses of an instruction's result by one of its operands, as if the instruction had been lost."""
    def mutate(program: Program) -> Program:
        at = find(program, match, phase, last)
        instead = program.code[phase][at][3][operand]
        code = [(o, d, n, tuple(instead if s == at and i > at else s for s in src), arg)
                for i, (o, d, n, src, arg) in enumerate(program.code[phase])]
        return with_code(program, phase, code)
    return mutate


def offset(by: int) -> Callable[[Instruction], Instruction]:
    """Shift the address of a memory instruction by some elements."""
    def edit(i: Instruction) -> Instruction:
        o, d, n, src, arg = i
        return o, d, n, src, (arg[0] + by, *arg[1:]) if isinstance(arg, tuple) else arg + by
    return edit


def argument(value: Any) -> Callable[[Instruction], Instruction]:
    return lambda i: (*i[:4], value)


def operation(name: str) -> Callable[[Instruction], Instruction]:
    return lambda i: (name, *i[1:])


def operands(*order: int) -> Callable[[Instruction], Instruction]:
    return lambda i: (*i[:3], tuple(i[3][k] for k in order), i[4])


def masked(lanes_written: int) -> Mutation:
    """Let the first store write only its first lanes, as if a remainder had been dropped."""
    def mutate(program: Program) -> Program:
        at = find(program, lambda i: i[0] == "STORE" and i[2] > 1)
        code = list(program.code[0])
        lanes = code[at][2]
        mask = Instruction("VCONST", dtypes.bool, lanes, (), tuple(k < lanes_written for k in range(lanes)))
        moved = [(o, d, n, tuple(s + (s >= at) for s in src), arg) for o, d, n, src, arg in code]
        o, d, n, src, arg = moved[at]
        return with_code(program, 0, [*moved[:at], mask, (o, d, n, (*src, at), arg), *moved[at + 1:]])
    return mutate


def without_phase(phase: int) -> Mutation:
    def mutate(program: Program) -> Program:
        phases = program.spec.phases[:phase] + program.spec.phases[phase + 1:]
        return Program(replace(program.spec, phases=phases), program.code[:phase] + program.code[phase + 1:])
    return mutate


def extent(by: int, phase: int = 0) -> Mutation:
    def mutate(program: Program) -> Program:
        phases = list(program.spec.phases)
        phases[phase] = replace(phases[phase], extent=phases[phase].extent + by)
        return Program(replace(program.spec, phases=tuple(phases)), program.code)
    return mutate


def new_constant(match: Match, operand: int, value: Any, *, phase: int = 0, last: bool = False) -> Mutation:
    """Give one operand of an instruction another constant, for this use only."""
    def mutate(program: Program) -> Program:
        at = find(program, match, phase, last)
        code = list(program.code[phase])
        old = code[code[at][3][operand]]
        assert old[0] == "CONST", f"operand {operand} is {old[0]}"
        constant = old._replace(src=(), arg=value(old.arg) if callable(value) else value)
        moved = [(o, d, n, tuple(s + 1 for s in src), arg) for o, d, n, src, arg in code]
        o, d, n, src, arg = moved[at]
        moved[at] = (o, d, n, tuple(0 if k == operand else s for k, s in enumerate(src)), arg)
        return with_code(program, phase, [constant, *moved])
    return mutate


def is_argument_load(i: Instruction) -> bool:
    return i[0] == "LOAD" and i[2] > 1


def loop_with_values(i: Instruction) -> bool:
    return i[0] == "LOOP" and len(i[3]) > 2


# -- kernels ------------------------------------------------------------------------------------------------------------------
def divide(n: int, dtype: DType) -> Kernel:
    y, a, b = (param(s, n, dtype) for s in range(3))
    i = axis(0, n)
    return kernel(store(y, i, load(a, i).alu(Ops.FDIV, load(b, i)), i))


def choose(n: int, dtype: DType) -> Kernel:
    y, a, b = (param(s, n, dtype) for s in range(3))
    i = axis(0, n)
    return kernel(store(y, i, (load(a, i) < load(b, i)).alu(Ops.WHERE, load(a, i), load(b, i) * 3), i))


class Case(NamedTuple):
    name: str
    kernel: Kernel
    chain: tuple[Opt, ...]
    mutation: Mutation


def chain(*opts: tuple[Any, ...]) -> tuple[Opt, ...]:
    return tuple(Opt(*o) for o in opts)


TILED = chain(("UPCAST", "o1", 16), ("UNROLL", "r0", 2))
STAGED = chain(("UPCAST", "o1", 16), ("STAGE", "s1", "o1"))
LANES = chain(("UPCAST", "o0", 16))
PARTIAL = chain(("UPCAST", "r0", 16))
CUT = chain(("THREAD", "r0", 2))
F32, F64, F16, BF16, I32, I8 = dtypes.float32, dtypes.float64, dtypes.float16, dtypes.bfloat16, dtypes.int32, dtypes.int8
HALF = gemm(5, 37, 9, F16, F32)
BRAIN = gemm(5, 37, 9, BF16, F32)

CASES = [
    Case("load off by one", gemm(5, 37, 9), TILED, change(is_argument_load, offset(1))),
    Case("load off by one, f64", gemm(5, 37, 9, F64), TILED, change(is_argument_load, offset(1))),
    Case("load off by one, bf16", BRAIN, TILED, change(is_argument_load, offset(-1), last=True)),
    Case("store off by one", elementwise(37), LANES, change(op("STORE"), offset(-1))),
    Case("store past the end", elementwise(37), LANES, change(op("STORE"), offset(1))),
    Case("remainder lane dropped", elementwise(37), LANES, masked(15)),
    Case("remainder lane dropped, i8", elementwise(37, I8), LANES, masked(15)),
    Case("first lane only, f16", HALF, TILED, masked(1)),
    Case("mask one lane short", row_reduce(3, 100), PARTIAL,
         change(op("VCONST", dtypes.bool), argument((True,) * 3 + (False,) * 13))),
    Case("mask one lane long", row_reduce(3, 100), PARTIAL,
         change(op("VCONST", dtypes.bool), argument((True,) * 5 + (False,) * 11))),
    Case("tail not neutralised", row_reduce(3, 100, "MAX"), PARTIAL, bypass(op("WHERE", F32, 16), 1)),
    Case("accumulator starts from 1", gemm(5, 37, 9), TILED, new_constant(loop_with_values, 2, 1.0)),
    Case("accumulator starts from 1, i32", gemm(5, 37, 9, I32), TILED, new_constant(loop_with_values, 2, 1)),
    Case("accumulator starts from NaN", row_reduce(3, 100), PARTIAL, new_constant(loop_with_values, 2, float("nan"))),
    Case("maximum starts from 0", row_reduce(3, 64, "MAX"), PARTIAL, new_constant(loop_with_values, 2, 0.0)),
    Case("minimum starts from 0, i32", row_reduce(3, 64, "MIN", I32), PARTIAL, new_constant(loop_with_values, 2, 0)),
    Case("product starts from 0", row_reduce(3, 64, "MUL"), PARTIAL, new_constant(loop_with_values, 2, 0.0)),
    Case("accumulator not carried", gemm(5, 37, 9), TILED, change(op("MULACC", F32, 16), lambda i: ("MUL", *i[1:3], i[3][:2], None))),
    Case("last iteration missing", gemm(5, 37, 9), TILED, new_constant(loop_with_values, 1, lambda n: n - 2)),
    Case("first iteration missing", gemm(5, 37, 9, F64), TILED, new_constant(loop_with_values, 0, 2)),
    Case("one iteration too many, f16", HALF, TILED, new_constant(loop_with_values, 1, lambda n: n + 2)),
    Case("loop step wrong", gemm(5, 37, 8), TILED, change(loop_with_values, argument(4))),
    Case("remainder of the reduction lost", gemm(5, 37, 9), TILED, bypass(op("MULACC"), 2, last=True)),
    Case("an unrolled iteration lost, bf16", BRAIN, TILED, bypass(op("MULACC"), 2)),
    Case("operands of a difference swapped", elementwise(37), LANES, change(op("SUB", F32), operands(1, 0))),
    Case("operands of a difference swapped, i32", elementwise(37, I32), LANES, change(op("SUB", I32), operands(1, 0))),
    Case("operands of a quotient swapped", divide(37, F64), LANES, change(op("FDIV"), operands(1, 0))),
    Case("branches of a choice swapped", choose(37, F32), LANES, change(op("WHERE", F32), operands(0, 2, 1))),
    Case("less instead of more", choose(37, F16), LANES, change(op("CMPLT"), operands(1, 0))),
    Case("another constant", elementwise(37, F64), LANES, change(op("CONST", F64, 8), argument(2.0 + 2**-40))),
    Case("another constant, i8", elementwise(37, I8), LANES, change(op("CONST", I8, 16), argument(3))),
    Case("epilogue lost", elementwise(37), LANES, bypass(op("MAX", F32), 0)),
    Case("minimum instead of maximum", elementwise(37, I8), LANES, change(op("MAX", I8), operation("MIN"))),
    Case("combining of lanes lost", row_reduce(3, 96), PARTIAL, bypass(op("ADD", F32, 8), 0)),
    Case("lanes combined twice", row_reduce(3, 96, "ADD", I32), PARTIAL, change(op("SHUFFLE", I32, 8), argument(tuple(range(8, 16))))),
    Case("last lane not combined", row_reduce(3, 96), PARTIAL, bypass(op("ADD", F32, 1), 0, last=True)),
    Case("combining phase missing", row_reduce(3, 100, "MAX"), CUT, without_phase(1)),
    Case("partials of a core missing", row_reduce(3, 100), CUT, extent(-1)),
    Case("partial combined twice", row_reduce(3, 100), CUT, change(op("LOAD"), offset(-3), phase=1, last=True)),
    Case("last row missing", gemm(5, 37, 9), TILED, extent(-1)),
    Case("scratch never filled", gemm(8, 32, 9), STAGED, change(op("STORE"), lambda i: (*i[:3], i[3], (i[4][0] + 16, i[4][1])))),
    Case("scratch read one row late", gemm(8, 32, 9), STAGED, change(op("LOAD", F32, 16), offset(-16), last=True)),
    Case("copy reads another row", gemm(8, 32, 9, F64), STAGED, change(op("LOAD"), offset(32))),
    Case("row stride wrong", gemm(5, 37, 9), TILED, new_constant(op("MUL", dtypes.index), 1, lambda n: n - 1, last=True)),
    Case("gathered index off by one", gather(13, 29, 5), (), change(op("LOAD", F32), offset(5))),
    Case("index of another row", gather(13, 29, 5), (), change(op("LOAD", I32), offset(1))),
    Case("the wrong buffer", elementwise(37), LANES, change(lambda i: i[0] == "ARG" and i[4] == 2, argument(1))),
    Case("sum instead of maximum", softmax(3, 37), (), change(op("MAX", F32), operation("ADD"))),
    Case("difference lost", softmax(3, 37), (), bypass(op("SUB", F32), 0)),
]


def run_interpreted(program: Program) -> Callable[[Sequence[Any]], None]:
    return lambda arrays: interpret(program, arrays)


def rejected(reference: Reference, program: Program) -> str:
    """Why verification rejects the program; "" when it does not."""
    try:
        result = verify(reference, run_interpreted(program), GuardedBuffers(reference.kernel))
    except CompileError as e:
        return f"it cannot run: {e}"       # an access outside of its buffer: in native code a guard or a crash
    return "" if result.right else result.reason


def lowered(case: Case) -> Program:
    return lower(apply_opts(Scheduler(case.kernel, TARGET), case.chain))


@pytest.mark.parametrize("case", a_half(CASES), ids=lambda c: c.name)
def test_a_planted_miscompile_is_rejected(case: Case) -> None:
    program, reference = lowered(case), Reference(case.kernel)
    assert not rejected(reference, program)
    mutant = case.mutation(program)
    assert mutant.digest != program.digest or mutant.spec != program.spec
    assert rejected(reference, mutant)


def test_there_are_enough_of_them_over_enough_dtypes() -> None:
    assert len(CASES) >= 20
    assert {F32, F64, F16, BF16, I32, I8} <= {c.kernel.params[0].dtype for c in CASES}


NATIVE = [c for c in CASES if c.name in {
    "remainder lane dropped", "accumulator starts from 1", "maximum starts from 0", "last iteration missing", "epilogue lost",
    "store past the end", "scratch never filled", "combining phase missing", "last row missing", "an unrolled iteration lost, bf16"}]


@pytest.mark.parametrize("case", NATIVE, ids=lambda c: c.name)
def test_a_planted_miscompile_is_rejected_in_machine_code(case: Case) -> None:
    target = host_target()
    reference = Reference(case.kernel)
    for program, right in ((lowered(case), True), (case.mutation(lowered(case)), False)):
        buffers = GuardedBuffers(case.kernel)
        with LoadedProgram(compile_object(render(program, target), target), [p.symbol for p in program.spec.phases]) as code:
            plan = ExecutionPlan.of_kernel(program.spec, code, buffers.arrays)
            result = verify(reference, lambda arrays, plan=plan: plan.execute(), buffers)  # type: ignore[misc]
        assert result.right is right
