"""Matrix instructions whose tiles a subgroup holds together: random chains give the right numbers on the toy device, what does not fit is
refused, and a layout that is not the device's gives wrong numbers."""
from __future__ import annotations

import random
from dataclasses import replace

import pytest

from svod.compile.lower.linear import validate
from svod.compile.lower.lower import lower
from svod.compile.lower.program import Instruction, Program
from svod.core.cost.groups.group_sketch import group_heuristic, group_sketches
from svod.core.ir.dtype import DType, dtypes
from svod.core.kernel.apply import apply_opts
from svod.core.kernel.intrinsics import applicable
from svod.core.kernel.kernel import Kernel
from svod.core.kernel.scheduler import Opt, Scheduler
from svod.core.machine.isa import DOTS
from svod.errors import CompileError, KernelOptError
from tests.agreement import Case
from tests.chain_runs import run_chains
from tests.chains import group_state, try_opts
from tests.compile.lower.test_intrinsics import gemm, windows, with_full_range
from tests.core.corpus import data, kernel_of
from tests.draws import a_half, count
from tests.toy_backend.interpreter import run_program
from tests.toy_backend.running import check, run, uses
from tests.toy_backend.target import MATRIX, TOY

BF16, F16, I8 = dtypes.bfloat16, dtypes.float16, dtypes.int8
KINDS = [(BF16, "toy_bf16"), (F16, "toy_f16"), (I8, "toy_s8")]
EXTENTS = (2, 3, 5, 7, 8, 11, 16, 17, 23, 33)
STAGED = [Opt("TILE", "r0", 2), Opt("STAGE", "s0", "r0"), Opt("STAGE", "s1", "r0"), Opt("PIPELINE", "r0", 2)]


def tensorized(kernel: Kernel, name: str, *chain: Opt) -> Scheduler:
    return apply_opts(Scheduler(kernel, TOY), [Opt("TC", "r0", (name, "o0", "o1")), *chain])


def random_case(rng: random.Random, dtype: DType) -> Case:
    """A contraction with extents of 1, primes, and numbers that no tile divides."""
    m, n, k = rng.choice(EXTENTS), rng.choice(EXTENTS), rng.choice((1, *EXTENTS))
    out = dtype if dtype.is_float and rng.random() < 0.5 else None
    kernel = windows(k, m, n, 3, dtype, dtype) if rng.random() < 0.25 and k > 1 else \
        gemm(m, n, k, dtype, dtype, transposed=rng.random() < 0.4, offset=rng.choice((0, 3)) if dtype.is_int else 0, out=out)
    seed = rng.randrange(100)
    return with_full_range(Case(kernel, seed), seed)


@pytest.mark.parametrize(("dtype", "name"), a_half(KINDS), ids=lambda v: v if isinstance(v, str) else v.name)
@pytest.mark.parametrize("staged", [False, True])
def test_random_shapes_and_chains(dtype: DType, name: str, staged: bool) -> None:
    def draw(rng: random.Random, _: str) -> tuple[Case, Scheduler]:
        case = random_case(rng, dtype)
        state = group_state(rng, Scheduler(case.kernel, TOY), rng.choice((0, 0, 1)))
        state = try_opts(state, Opt("TC", "r0", (name, "o0", "o1")), *(STAGED if staged else ()))
        return case, group_state(rng, state, len(state.applied_opts) + rng.randint(0, 5))

    def run_matrix(case: Case, state: Scheduler, program: Program, rng: random.Random) -> dict[str, bool]:
        ran = run(case, state, program, rng)
        return {way: did and uses(program, "MMA") for way, did in ran.items()}

    run_chains(f"toy matrix, {staged=}", [name], count(6), draw, run_matrix, {"ran": 0.5, "shared": 0.3 * staged})


@pytest.mark.slow
@pytest.mark.parametrize(("m", "n", "k"), [(17, 13, 11), (16, 8, 33)])
def test_sketches_with_the_instruction(m: int, n: int, k: int) -> None:
    """The heuristic of a larger product uses the instruction; small products may be faster without it."""
    case = Case(gemm(m, n, k, BF16, BF16, out=BF16), 1)
    found = [s for s in group_sketches(Scheduler(case.kernel, TOY)) if any(s.dots)]
    assert found and any(s.pipeline for s in found)
    assert any(group_heuristic(Scheduler(gemm(5 * m, 6 * n, 12 * k, BF16, BF16, out=BF16), TOY)).dots)
    for state in (group_heuristic(Scheduler(case.kernel, TOY)), *random.Random(m).sample(found, min(len(found), 3 * count(1)))):
        check(case, lower(state))


@pytest.mark.parametrize("chain", a_half([[["TILE", "o0", 2]], [["LOCAL", "o0", 4]], [["PADTO", "o0", 5]]]))
def test_tiles_beyond_the_end_of_an_axis_beside_them(chain: list[object]) -> None:
    """Seven products, two by two, by four subgroups, and as ten: what lies behind the operands is not read."""
    kernel = Kernel(kernel_of(data(7, 6, 11, dtype="float16") @ data(7, 11, 13, dtype="float16")))
    program = lower(apply_opts(Scheduler(kernel, TOY), [Opt("TC", "r0", ("toy_f16", "o1", "o2")), *map(Opt.from_json, chain)]))
    assert uses(program, "LOADMATRIX")
    check(Case(kernel), program)


def test_operands_are_copied_ahead_as_they_lie_in_memory() -> None:
    """Operands keep their layout in memory, without padding or transposition, so that copies are asynchronous, 16 bytes each, along the
    rows."""
    kernel = gemm(16, 16, 16, BF16, BF16)
    program = lower(tensorized(kernel, "toy_bf16", Opt("LOCAL", "o0", 2), Opt("LOCAL", "o1", 2), *STAGED))
    check(Case(kernel, 1), program)
    copies = [i for code in program.code for i in code if i.op == "COPY_ASYNC"]
    assert copies and all(i.lanes * i.dtype.itemsize == 16 for i in copies) and not uses(program, "TEMP")


def test_an_operand_that_is_whole_beside_the_pipelined_loop_is_not_read_beyond_its_end() -> None:
    kernel = gemm(7, 23, 16, F16, F16)
    program = lower(tensorized(kernel, "toy_f16", *STAGED, Opt("UNROLL", "r0.in2", 2), Opt("STAGE", "s1", "o0")))
    check(Case(kernel, 1), program)
    assert uses(program, "MMA") and uses(program, "COPY_ASYNC")


@pytest.mark.parametrize("number", range(3))
def test_another_layout_gives_wrong_numbers(number: int, monkeypatch: pytest.MonkeyPatch) -> None:
    kernel = gemm(8, 8, 8, BF16, BF16)
    state, right = tensorized(kernel, "toy_bf16"), MATRIX["toy_bf16"].fragments
    assert right is not None
    check(Case(kernel, 1), lower(state))
    turned = replace(right[number], threads=right[number].threads[::-1])
    wrong = (*right[:number], turned, *right[number + 1:])
    monkeypatch.setitem(DOTS, "toy_bf16", replace(MATRIX["toy_bf16"], fragments=wrong))
    with pytest.raises(AssertionError):
        check(Case(kernel, 1), lower(tensorized(kernel, "toy_bf16")))


def test_every_fragment_covers_its_tile_once() -> None:
    for dot in DOTS.values():
        shapes = (dot.rows, dot.columns), (dot.rows, dot.depth), (dot.depth, dot.columns)
        for fragment, (rows, columns) in zip(dot.fragments or (), shapes, strict=False):
            held = [(r0 + r, c0 + c) for r0, c0 in fragment.origins for r, c in fragment.places]
            assert sorted(held) == [(r, c) for r in range(rows) for c in range(columns)], dot.name


# -- what is refused ---------------------------------------------------------------------------------------
GEMM = gemm(8, 8, 8, BF16, BF16)


@pytest.mark.parametrize(("chain", "why"), [
    ([Opt("TC", "r0", ("toy_f16", "o0", "o1"))], "toy_f16 sums up float16 in float32; the stage bfloat16 by bfloat16"),
    ([Opt("TC", "r0", ("mma_bf16", "o0", "o1"))], "the target has no mma.bf16 on nvptx64"),
    ([Opt("TC", "r0", "toy_bf16")], "takes the axes of its rows and columns"),
    ([Opt("LOCAL", "o0", 2), Opt("TC", "r0", ("toy_bf16", "o0", "o1"))], "chosen before its axes are split"),
    ([Opt("TC", "r0", ("toy_bf16", "o0", "o1")), Opt("GROUP", "r0", 2)], "cannot share their sums"),
    ([Opt("TC", "r0", ("toy_bf16", "o0", "o1")), Opt("INLINE", "s0")], "only staged values are laid out"),
    ([Opt("NOLOCALS", "out"), Opt("TC", "r0", ("toy_bf16", "o0", "o1"))], "NOLOCALS keeps the groups of this state at one thread"),
], ids=str)
def test_what_does_not_fit_says_why(chain: list[Opt], why: str) -> None:
    with pytest.raises(KernelOptError, match=why.replace("(", r"\(")):
        apply_opts(Scheduler(GEMM, TOY), chain)


def test_a_group_has_a_limit_of_subgroups() -> None:
    kernel = gemm(128, 8, 8, BF16, BF16)
    with pytest.raises(KernelOptError, match="128 threads; the target allows 64"):
        tensorized(kernel, "toy_bf16", Opt("LOCAL", "o0", 32))


def test_targets_without_the_instruction_or_its_subgroups() -> None:
    assert applicable(GEMM, TOY, GEMM.output)
    for other in (replace(TOY, features=()), replace(TOY, subgroup=16), TOY.allowing(False, True), TOY.allowing(True, False)):
        assert not applicable(GEMM, other, GEMM.output)


# -- what is planted in LINEAR ---------------------------------------------------------------------------------
def edited(program: Program, op: str, **fields: object) -> Program:
    """The program with the first instruction `op` of its last phase changed."""
    code = program.code[-1]
    at = next(i for i, instruction in enumerate(code) if instruction.op == op)
    changed: Instruction = code[at]._replace(**fields)      # type: ignore[arg-type]
    return replace_last(program, (*code[:at], changed, *code[at + 1:]))


def replace_last(program: Program, code: tuple[Instruction, ...]) -> Program:
    return Program(program.spec, (*program.code[:-1], code))


@pytest.mark.parametrize(("op", "fields", "why"), [
    ("MMA", {"arg": "vnni8"}, "no instruction of a subgroup"),
    ("MMA", {"arg": "toy_f16"}, "needed is float16x4"),
    ("MMA", {"arg": "mma_bf16"}, "whole subgroups of 32"),
    ("LOADMATRIX", {"lanes": 8}, "a thread holds 4 bfloat16"),
    ("LOADMATRIX", {"arg": (0, "toy_bf16", 2, 8, 1, 1)}, "0 or 1 for the operand"),
    ("LOADMATRIX", {"arg": (0, "toy_bf16", 0, 8, 1, 3)}, "1, 2, 4 or 8 lines of a row"),
    ("LOADMATRIX", {"arg": (0, "toy_bf16", 0, 8, 1, 2)}, "another one of lines that change places"),
    ("LOADMATRIX", {"arg": (0, "toy_bf16", 0, 8)}, "no instruction of a subgroup"),
])
def test_validation_finds_what_is_wrong(op: str, fields: dict[str, object], why: str) -> None:
    with pytest.raises(CompileError, match=why):
        validate(edited(lower(tensorized(GEMM, "toy_bf16")), op, **fields))


def test_threads_that_give_different_addresses_are_reported() -> None:
    program = lower(tensorized(GEMM, "toy_bf16"))
    code = program.code[-1]
    thread = next(i for i, instruction in enumerate(code) if instruction.op == "LOCAL_ID")
    at = next(i for i, instruction in enumerate(code) if instruction.op == "LOADMATRIX")
    changed = code[at]._replace(src=(code[at].src[0], thread))
    case = Case(GEMM, 1)
    with pytest.raises(CompileError, match="different addresses of one tile"):
        run_program(replace_last(program, (*code[:at], changed, *code[at + 1:])), case.fresh())
