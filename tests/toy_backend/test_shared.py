"""Values in shared memory that all threads of a group copy and compute together. The toy device reports races and missing barriers."""
from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from svod.compile.lower.lower import lower
from svod.compile.lower.program import Program
from svod.core.ir.uop import UOp
from svod.core.kernel.apply import apply_opts
from svod.core.kernel.kernel import Kernel
from svod.core.kernel.scheduler import Opt, Scheduler
from svod.core.machine.target import Target
from svod.core.tree.show import print_nest
from svod.errors import KernelOptError
from tests.agreement import Case
from tests.chain_runs import run_chains
from tests.chains import try_opts
from tests.core import corpus
from tests.core.corpus import CORPUS, data, kernel_of
from tests.draws import a_half, count
from tests.hand_kernels import Ast, constants_only, gemm, softmax
from tests.toy_backend.running import check, run
from tests.toy_backend.target import TOY

TILED = [["UPCAST", "o0", 2], ["UPCAST", "o1", 4], ["LOCAL", "o0", 4], ["LOCAL", "o1", 4], ["TILE", "r0", 8], ["STAGE", "s0", "r0"],
         ["STAGE", "s1", "r0"]]
ROWS = [["GROUP", "s1.r0", 8], ["GROUP", "s3.r0", 8], ["LOCAL", "o1", 8]]


def checked(ast: UOp, chain: Sequence[Sequence[Any]], target: Target = TOY, seeds: int = 2) -> Program:
    """The program of a chain, after a run with the right numbers on the toy device."""
    case = Case(Kernel(ast))
    program = lower(apply_opts(Scheduler(case.kernel, target), [Opt.from_json(o) for o in chain]))
    for seed in range(seeds):
        check(case, program, seed, f"toy device, {chain}")
    return program


def ops(program: Program, phase: int = -1) -> list[str]:
    return [i.op for i in program.code[phase]]


@pytest.mark.slow
@pytest.mark.parametrize("extents", [(16, 32, 32), (17, 33, 30), (8, 17, 9), (9, 16, 16), (31, 16, 41)])
def test_the_tiled_product(extents: tuple[int, int, int]) -> None:
    program = checked(gemm(*extents), TILED)
    phase, = program.spec.phases
    assert phase.block == 16 and phase.shared_bytes <= 2048


@pytest.mark.slow
def test_two_barriers_for_two_operands() -> None:
    """Both copies are between the same two barriers."""
    assert ops(checked(gemm(16, 32, 32), TILED)).count("BARRIER") == 2
    assert ops(checked(gemm(16, 32, 8), TILED[:4] + TILED[5:5] + [["STAGE", "s0", "o1"], ["STAGE", "s1", "o1"]])).count("BARRIER") == 1, \
        "nothing was read before the only copies"


def test_the_nest_shows_what_is_shared() -> None:
    """The nest has the two barriers that run: before the copies, and before they are read."""
    state = apply_opts(Scheduler(Kernel(gemm(64, 64, 64)), TOY), [Opt.from_json(o) for o in TILED])
    lines = print_nest(state).splitlines()
    assert any("copy s1[8, 16] into shared memory, by 16 threads in vectors of 4" in line for line in lines)
    assert sum("barrier" in line for line in lines) == ops(lower(state)).count("BARRIER") == 2


@pytest.mark.parametrize("threads", a_half([2, 3, 8, 16]))
@pytest.mark.parametrize("rows", [(2, 40), (5, 7), (12, 33)])
def test_threads_that_share_a_row(rows: tuple[int, int], threads: int) -> None:
    """The maximum and the sum of a row are the same for all threads of the row: they share both."""
    chain = [["GROUP", "s1.r0", threads], ["GROUP", "s3.r0", threads], ["LOCAL", "o1", threads]]
    if threads > rows[1]:
        return
    phase, = checked(softmax(*rows), chain).spec.phases
    assert phase.block == threads


def test_partial_results_go_through_shuffles_then_memory() -> None:
    four = ops(checked(softmax(4, 40), [["GROUP", "s1.r0", 4], ["GROUP", "s3.r0", 4], ["LOCAL", "o1", 4]]))
    assert four.count("SHFL_XOR") == 4 and "BARRIER" not in four and "SHARED" not in four
    eight = ops(checked(softmax(4, 40), ROWS))
    assert eight.count("SHFL_XOR") == 4 and eight.count("BARRIER") == 2, "one before each read of what the two subgroups found"
    three = ops(checked(softmax(4, 40), [["GROUP", "s1.r0", 3], ["LOCAL", "o1", 3]]))
    assert "SHFL_XOR" not in three and "BARRIER" in three
    none = ops(checked(softmax(4, 40), ROWS, replace(TOY, subgroup=0)))
    assert "SHFL_XOR" not in none and "BARRIER" in none


@pytest.mark.slow
def test_an_elementwise_stage_is_computed_together() -> None:
    """exp of a row once, by all threads, into shared memory; its sum and the quotient read it."""
    kernel = Kernel(softmax(12, 40))
    names = [s.name for s in kernel.stages if not s.is_output and not s.has_reduce]
    assert names
    for name in names:
        phase, = checked(softmax(12, 40), [*ROWS, ["STAGE", name, "o0"]]).spec.phases
        assert phase.shared_bytes >= 40 * 4


@pytest.mark.slow
def test_a_stage_with_loops_of_its_own_in_shared_memory() -> None:
    """Scores of attention: a product that all threads compute for their row, before each of them sums up its columns."""
    chain = [["LOCAL", "o2", 4], ["LOCAL", "s2.o2", 3], ["STAGE", "s2", "o1"]]
    program = checked(CORPUS["attention"](), chain)
    assert program.spec.phases[-1].shared_bytes >= 9 * 4 and "BARRIER" in ops(program)


def test_a_remainder_is_rounded_up_further() -> None:
    """Two positions of s3 are read at a time, and one at the end; its three threads compute three, and s1 has what all of them read."""
    chain = [["UPCAST", "r0", 2], ["LOCAL", "s3.o0", 3], ["PADTO", "o0", 8], ["LOCAL", "o0", 14], ["STAGE", "s1", "r0"]]
    assert checked(constants_only(11, 1, 13), chain).spec.phases[0].shared_bytes


def test_threads_of_a_shared_reduction_have_no_threads_of_their_own() -> None:
    a = Ast()
    x, y = a.param(1, 60), a.param(0, 1)
    i, k, r = a.axes(6, 10, 6)
    inner = a.stage(a.reduce("ADD", a.load(x, i * 10 + k), k), i)
    square = a.read(inner, r)
    ast = a.sink(a.store(y, UOp.const(r.dtype, 0), a.reduce("ADD", square * square, r)))
    checked(ast, [["GROUP", "r0", 3], ["STAGE", "s0", "r0"]])
    chain = [["GROUP", "r0", 3], ["STAGE", "s0", "r0"], ["GROUP", "s0.r0", 2]]
    with pytest.raises(KernelOptError, match="read inside a reduction that threads share"):
        apply_opts(Scheduler(Kernel(ast), TOY), [Opt.from_json(o) for o in chain])


def test_too_much_shared_memory() -> None:
    with pytest.raises(KernelOptError, match="bytes of shared memory or more; the target has 512"):
        checked(gemm(16, 32, 32), TILED, replace(TOY, shared_bytes=512))


SMALL = {
    "gemm": lambda: corpus.gemm(10, 9, 11),
    "gemm_tn": lambda: data(11, 9).transpose(0, 1) @ data(11, 10),
    "gemm_batched": lambda: data(2, 5, 7) @ data(2, 7, 6),
    "conv3x3": lambda: corpus.conv(2, 3, 5, 3, padding=1),
    "conv_stride": lambda: corpus.conv(2, 3, 7, 3, stride=2, padding=1),
    "layer_norm": lambda: data(5, 17).layer_norm(17, data(17), data(17)),
    "attention": lambda: corpus.attention(3, 4),
    "softmax": lambda: data(5, 19).softmax(-1),
}


def draw(rng: random.Random, name: str) -> tuple[Case, Scheduler]:
    """Draw a chain that stages every operand at a random position, after loops were bound to threads."""
    case = Case(Kernel(kernel_of(SMALL[name]())), rng.randrange(100))
    kernel = case.kernel
    opts = [Opt(rng.choice(("LOCAL", "UPCAST")), kernel.axes[a].name, rng.choice((2, 3, 4)))
            for a in kernel.stages[kernel.output].outs for _ in range(2)]
    opts += [Opt(rng.choice(("TILE", "GROUP")), kernel.axes[a].name, rng.choice((2, 3, 4))) for s in kernel.stages for a in s.reds]
    rng.shuffle(opts)
    state = try_opts(Scheduler(kernel, TOY), *opts)
    for s in kernel.stages:
        if not s.is_output:
            state = try_opts(state, Opt("STAGE", s.name, rng.choice([r.name for r in state.rows if r.role == "loop"])))
    return case, state


@pytest.mark.slow
@pytest.mark.parametrize("name", SMALL)
def test_random_stages_of_random_tiles(name: str) -> None:
    run_chains("shared", [name], count(8), draw, run, {"ran": 0.7, "shared": 0.35})
