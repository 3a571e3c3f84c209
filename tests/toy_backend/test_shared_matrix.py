"""Matrix instructions that read their operands from shared memory: random chains give the right numbers on the toy device without a race,
and what does not fit is refused."""
from __future__ import annotations

import random

import pytest

from svod.compile.lower.linear import validate
from svod.compile.lower.lower import lower
from svod.compile.lower.program import Program
from svod.core.cost.groups.group_sketch import group_sketches
from svod.core.ir.dtype import dtypes
from svod.core.kernel.apply import apply_opts
from svod.core.kernel.kernel import Kernel
from svod.core.kernel.scheduler import Opt, Scheduler
from svod.errors import CompileError, KernelOptError
from tests.agreement import Case
from tests.chain_runs import run_chains
from tests.chains import group_state
from tests.compile.lower.test_intrinsics import gemm, windows
from tests.draws import a_half, count
from tests.interpreted import interpret
from tests.toy_backend.interpreter import DeviceFault, run_program
from tests.toy_backend.running import run, uses
from tests.toy_backend.target import TOY
from tests.toy_backend.test_matrix import STAGED, edited, replace_last

BF16 = dtypes.bfloat16
EXTENTS = (2, 3, 7, 8, 11, 16, 23, 33)
GEMM = gemm(16, 16, 32, BF16, BF16)


def tensorized(kernel: Kernel, *chain: Opt) -> Scheduler:
    return apply_opts(Scheduler(kernel, TOY), [Opt("TC", "r0", ("toy_shared", "o0", "o1")), *chain])


@pytest.mark.parametrize("transposed", a_half([False, True]))
def test_random_shapes_and_chains(transposed: bool) -> None:
    def draw(rng: random.Random, _: str) -> tuple[Case, Scheduler]:
        m, n, k = rng.choice(EXTENTS), rng.choice(EXTENTS), rng.choice((17, 24, 33, 40))
        kernel = windows(k, m, n, 3, BF16, BF16) if rng.random() < 0.25 else \
            gemm(m, n, k, BF16, BF16, transposed=transposed, out=BF16 if rng.random() < 0.5 else None)
        state = group_state(rng, tensorized(kernel, *STAGED[:rng.choice((3, 3, 4))]), len(STAGED) + 1 + rng.randint(0, 4))
        return Case(kernel, rng.randrange(100)), state

    def run_matrix(case: Case, state: Scheduler, program: Program, rng: random.Random) -> dict[str, bool]:
        return {"matrix": bool(run(case, state, program, rng)) and uses(program, "MMASHARED")}

    run_chains("toy shared matrix", [f"{transposed=}"], count(36), draw, run_matrix, {"matrix": 0.25})


@pytest.mark.parametrize("transposed", [False, True])
def test_the_interpreter_computes_by_the_data_of_the_instruction(transposed: bool) -> None:
    kernel = gemm(13, 9, 24, BF16, BF16, transposed=transposed)
    case, state = Case(kernel, 1), tensorized(kernel, *STAGED)
    args = case.fresh()
    interpret(lower(state), args)
    case.check(args, "interpreter")


def test_operands_lie_as_in_memory() -> None:
    """The dim that memory has innermost is cut into lines, which are copied whole."""
    for transposed, cut in ((False, 1), (True, 0)):
        program = lower(tensorized(gemm(16, 16, 32, BF16, BF16, transposed=transposed), *STAGED))
        products = [i for i in program.code[0] if i.op == "MMASHARED"]
        assert products and all((left[1], right[1]) == (1, cut) for _, left, right in (i.arg for i in products))
        assert all(i.lanes == 8 for i in program.code[0] if i.op == "COPY_ASYNC")


def test_windows_lie_along_the_sum() -> None:
    """Tiles of shifted windows begin anywhere along their rows: those rows are not cut into lines."""
    kernel = windows(8, 16, 16, 3, BF16, BF16)
    program = lower(apply_opts(Scheduler(kernel, TOY), [Opt("TC", "r0", ("toy_shared", "o0", "o1")), Opt("STAGE", "s0", "r1"),
                                                        Opt("STAGE", "s1", "r1")]))
    assert {right[1] for i in program.code[0] if i.op == "MMASHARED" for right in i.arg[2:]} == {0}
    args = Case(kernel, 1).fresh()
    run_program(program, args)
    Case(kernel, 1).check(args, "toy device")


@pytest.mark.slow
def test_sketches_with_the_instruction() -> None:
    found = [s for s in group_sketches(Scheduler(gemm(32, 32, 64, BF16, BF16), TOY)) if any(d and d.name == "toy_shared" for d in s.dots)]
    assert found and all(uses(lower(s), "MMASHARED") for s in found)


def test_operands_elsewhere_are_refused() -> None:
    for chain in ((), STAGED[:2]):
        with pytest.raises(KernelOptError, match="reads shared memory; STAGE it at a loop of the sum"):
            lower(tensorized(GEMM, *chain))


def test_a_missing_barrier_is_a_race() -> None:
    program = lower(tensorized(GEMM, *STAGED[:3]))
    code = program.code[-1]
    at = next(i for i, instruction in enumerate(code) if instruction.op == "MMASHARED")
    before = max(i for i, instruction in enumerate(code[:at]) if instruction.op == "BARRIER")
    without = (*code[:before], code[before]._replace(op="CONST", dtype=dtypes.index, arg=1), *code[before + 1:])
    with pytest.raises(DeviceFault, match=r"without a barrier|no thread of the group has written"):
        run_program(replace_last(program, without), Case(GEMM, 1).fresh())


SIDES = ("toy_shared", (0, 1, 72, 1), (0, 1, 72, 1))


@pytest.mark.parametrize(("fields", "why"), [
    ({"arg": ("toy_bf16", *SIDES[1:])}, "no instruction of a subgroup with operands in shared memory"),
    ({"arg": ("toy_shared", (0, 2, 72, 1), SIDES[2])}, "0 or 1 for the dim"),
    ({"arg": ("toy_shared", (4, 1, 72, 1), SIDES[2])}, "lines begin at multiples of a line"),
    ({"arg": ("toy_shared", (0, 1, 72, 3), SIDES[2])}, "1, 2, 4 or 8 lines"),
    ({"lanes": 4}, "has the type of its accumulator"),
    ({"src": ()}, "takes an accumulator"),
])
def test_validation_finds_what_is_wrong(fields: dict[str, object], why: str) -> None:
    with pytest.raises(CompileError, match=why):
        validate(edited(lower(tensorized(GEMM, *STAGED)), "MMASHARED", **fields))


def test_swizzled_rows_begin_where_the_swizzle_does() -> None:
    program = lower(tensorized(GEMM, *STAGED))
    with pytest.raises(CompileError, match="rows of 2 lines lie in an area that begins at a multiple of 256 bytes"):
        validate(edited(program, "SHARED", arg=192))


@pytest.mark.parametrize("block", [2, 4, 8, 16])
def test_rows_have_as_many_lines_as_fit(block: int) -> None:
    """Blocks of 2, 4 and 8 instructions along the sum are rows of as many lines, one of 16 is two rows of 8."""
    kernel = gemm(8, 24, 8 * 2 * block, BF16, BF16, transposed=True)
    case, state = Case(kernel, block), tensorized(kernel, Opt("TILE", "r0", block), *STAGED[1:3])
    program = lower(state)
    validate(program)
    assert {side[3] for i in program.code[0] if i.op == "MMASHARED" for side in i.arg[1:]} == {min(8, block)}
    args = case.fresh()
    run_program(program, args)
    case.check(args, "toy device")
