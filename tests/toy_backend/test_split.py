"""Sums cut into parts (SPLITK) whose operands are staged for a group: right numbers on the toy device without a race, each tile of each
part by a group of its own, and copies that run ahead inside a part."""
from __future__ import annotations

import random
from dataclasses import replace

import pytest

from svod.compile.lower.lower import lower
from svod.compile.lower.program import Program
from svod.core.cost.groups.group_cost import group_cost
from svod.core.cost.groups.group_sketch import group_heuristic
from svod.core.ir.dtype import dtypes
from svod.core.kernel.apply import apply_opt, apply_opts
from svod.core.kernel.kernel import Kernel
from svod.core.kernel.scheduler import Opt, Scheduler
from svod.core.machine.target import Target
from svod.core.tree.show import print_nest
from svod.errors import KernelOptError
from tests import hand_kernels
from tests.agreement import Case
from tests.chain_runs import run_chains
from tests.chains import group_state, try_opts
from tests.compile.cuda.target import card_target
from tests.compile.lower.test_intrinsics import gemm, windows
from tests.core.kernel.test_layout_of_stages import SERVER
from tests.draws import a_half, count
from tests.toy_backend.interpreter import DeviceFault, run_program
from tests.toy_backend.running import check, run, uses
from tests.toy_backend.target import TOY

BF16 = dtypes.bfloat16
BULK = replace(TOY, bulk_row=16)
EXTENTS = (1, 2, 7, 8, 11, 16, 23)
STEPS = {"": 1, "toy_bf16": 4, "toy_shared": 8}         # positions of the sum per instruction
STAGED = [Opt("STAGE", "s0", "r0"), Opt("STAGE", "s1", "r0")]


def kernel_of(rng: random.Random, name: str) -> Kernel:
    m, n, steps = rng.choice(EXTENTS), rng.choice(EXTENTS), rng.choice((4, 6, 7, 11, 16))
    if not name:
        return Kernel(hand_kernels.gemm(m, n, steps))
    k = steps * STEPS[name] - rng.choice((0, 0, 3))     # the last instruction may be partial
    return windows(k, max(m, 2), max(n, 2), 3, BF16, BF16) if rng.random() < 0.2 else \
        gemm(max(m, 2), max(n, 2), k, BF16, BF16, transposed=rng.random() < 0.5)


def draw(rng: random.Random, name: str) -> tuple[Case, Scheduler]:
    """Draw a state whose operands are staged in the loop that is split, with opts in several orders."""
    case = Case(kernel_of(rng, name), rng.randrange(100))
    chain = [Opt("TC", "r0", (name, "o0", "o1"))] if name else [Opt("LOCAL", "o0", rng.choice((2, 3, 4))), Opt("LOCAL", "o1", 2)]
    chain.append(Opt("TILE", "r0", 2))
    rest = [*STAGED, Opt("SPLITK", "r0", rng.choice((2, 3))), *[Opt("PIPELINE", "r0", rng.choice((2, 3)))][:rng.randint(0, 2)]]
    at = rng.randint(0, len(rest) - 1)
    state = try_opts(Scheduler(case.kernel, rng.choice((TOY, BULK))), *chain, *rest[at:], *rest[:at])
    return case, group_state(rng, state, len(state.applied_opts) + rng.randint(0, 2))


def run_split(case: Case, state: Scheduler, program: Program, rng: random.Random) -> dict[str, bool]:
    ran = run(case, state, program, rng)
    staged = bool(ran) and state.split_reduce is not None and program.spec.phases[0].shared_bytes > 0
    return {**ran, "staged": staged, "ahead": staged and state.pipeline is not None}


@pytest.mark.slow
@pytest.mark.parametrize("name", STEPS)
def test_random_shapes_and_chains(name: str) -> None:
    run_chains("split", [name], count(15), draw, run_split, {"ran": 0.4, "staged": 1 / 3, "ahead": 1 / 15})


GEMM = Kernel(hand_kernels.gemm(16, 32, 32))


def split(*opts: Opt, target: Target = TOY) -> Scheduler:
    return apply_opts(Scheduler(GEMM, target), [Opt("LOCAL", "o0", 4), Opt("LOCAL", "o1", 8), Opt("TILE", "r0", 4), *STAGED, *opts])


def test_each_tile_of_each_part_has_a_group_of_its_own() -> None:
    program = lower(split(Opt("SPLITK", "r0", 3)))
    partial, combining = program.spec.phases
    assert (partial.extent, partial.block) == (3 * 4 * 4, 32) and partial.shared_bytes and combining.block == 1
    check(Case(GEMM, 1), program)


@pytest.mark.parametrize("subgroup", a_half([4, 1]))
@pytest.mark.parametrize("name", ["row_sums", "in_place_accumulate", "argmax_rows"])
def test_a_subgroup_adds_the_parts_of_a_result(name: str, subgroup: int) -> None:
    """SPLITK where it divides the number of blocks; an output that is added to in place is read and stored by one thread."""
    make = {"row_sums": hand_kernels.row_sums, "in_place_accumulate": lambda m, n: hand_kernels.in_place_accumulate(m, 3, n),
            "argmax_rows": lambda m, n: hand_kernels.argmax_rows(m, n, dtypes.float32)}[name]
    for rows, columns, parts in ((1, 41, 8), (3, 70, 12), (7, 48, 16), (2, 37, 6)):
        kernel = Kernel(make(rows, columns))
        program = lower(apply_opt(Scheduler(kernel, replace(TOY, subgroup=subgroup)), Opt("SPLITK", "r0", parts)))
        partial, combining = program.spec.phases[:2]
        assert combining.block == (subgroup if partial.extent // kernel.axes[kernel.stages[0].outs[0]].extent % 4 == 0 else 1)
        check(Case(kernel, parts), program)


@pytest.mark.slow
@pytest.mark.parametrize("buffers", [2, 3])
@pytest.mark.parametrize("summed", [10, 12, 13])
def test_a_part_may_have_no_whole_iteration(summed: int, buffers: int) -> None:
    """Blocks of four in two parts of two, of 13 the third part has the one position that is left, and copies ahead of no iteration."""
    kernel = Kernel(hand_kernels.gemm(5, 9, summed))
    state = apply_opts(Scheduler(kernel, TOY), [Opt("LOCAL", "o0", 4), Opt("LOCAL", "o1", 8), Opt("TILE", "r0", 4), *STAGED,
                                                Opt("SPLITK", "r0", 3), Opt("PIPELINE", "r0", buffers)])
    program = lower(state)
    for seed in range(3):
        check(Case(kernel, seed), program, seed)


@pytest.mark.slow
@pytest.mark.parametrize("buffers", [2, 3])
def test_rows_are_copied_in_bulk_inside_a_part(buffers: int) -> None:
    program = lower(split(Opt("SPLITK", "r0", 3), Opt("PIPELINE", "r0", buffers), target=BULK))
    assert uses(program, "COPY_BULK")
    check(Case(GEMM, buffers), program, buffers)


@pytest.mark.parametrize("number", range(2))
def test_a_missing_barrier_is_a_race(number: int) -> None:
    """Behind what the threads have copied, and before they copy the next block over it."""
    program = lower(split(Opt("SPLITK", "r0", 2)))
    code = program.code[0]
    at = [i for i, instruction in enumerate(code) if instruction.op == "BARRIER"][number]
    without = (*code[:at], code[at]._replace(op="CONST", dtype=dtypes.index, arg=1), *code[at + 1:])
    with pytest.raises(DeviceFault, match=r"without a barrier|no thread of the group has written"):
        run_program(Program(program.spec, (without, *program.code[1:])), Case(GEMM, 1).fresh())


def test_the_loop_nest_shows_parts_and_what_runs_ahead() -> None:
    lines = [line.strip() for line in print_nest(split(Opt("SPLITK", "r0", 3), Opt("PIPELINE", "r0", 2))).splitlines()]
    assert "grid part of r0 in 0…3" in lines and "grid o0 in 0…16 by 4" in lines and "reduce r0 in its part of 0…32 by 4" in lines
    assert sum("1 ahead in 2 buffers" in line for line in lines) == 2


def test_cores_do_not_share_what_is_staged() -> None:
    """On a CPU a part is what a core does: stages at loops of the output would be computed by each of them."""
    with pytest.raises(KernelOptError, match="stages placed at loops of the output"):
        apply_opts(Scheduler(GEMM, SERVER), [Opt("TILE", "r0", 4), Opt("STAGE", "s1", "r0"), Opt("THREAD", "r0", 2)])


@pytest.mark.slow
def test_sketches_cut_the_sums_of_few_tiles() -> None:
    """A product of one tile of 64 by 64 results on a card: the fastest predicted copies ahead inside each part."""
    best = group_heuristic(Scheduler(gemm(64, 64, 1 << 14, BF16, BF16), card_target("sm_80")))
    assert best.split_reduce is not None and best.pipeline is not None and any(isinstance(place, int) for place in best.place)
    whole = [o for o in best.applied_opts if o.op != "SPLITK"]
    assert group_cost(best).cycles < group_cost(apply_opts(Scheduler(best.kernel, best.target), whole)).cycles / 2
