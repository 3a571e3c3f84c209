"""Long sums of floats in blocks: no accumulator takes more additions in a row than the sum rule allows, with any opts."""
from __future__ import annotations

import random
from dataclasses import replace
from itertools import product

import pytest

from svod.compile.lower.intervals import least_iterations
from svod.compile.lower.linear import validate
from svod.compile.lower.lower import lower
from svod.core.cost.cpu import cost_of
from svod.core.cost.groups.group_sketch import group_heuristic
from svod.core.cost.sketch import heuristic
from svod.core.ir import summation
from svod.core.ir.summation import (
    NARROW_PRODUCTS,
    PRODUCTS,
    SUMS,
    BlockedLoop,
    BlockedNest,
    SumRule,
    blocked_loop,
    blocked_nest,
    longest_path,
)
from svod.core.ir.uop import UOp
from svod.core.kernel.apply import apply_opts
from svod.core.kernel.chain_text import parse_chain
from svod.core.kernel.kernel import Kernel
from svod.core.kernel.scheduler import Opt, Scheduler
from svod.core.machine.target import Target
from svod.tensor import Tensor
from svod.tune.measure.bounds import COMBINED
from tests.addition_chains import addition_chains
from tests.agreement import Case, has_native, run_interpreted, run_native
from tests.chain_runs import KERNELS
from tests.chains import random_state
from tests.compile.cuda.target import card_target
from tests.compile.native import runnable_targets
from tests.core.corpus import conv, data, kernel_of
from tests.draws import a_quarter, an_eighth
from tests.toy_backend.interpreter import run_program
from tests.toy_backend.target import TOY

TARGETS = {"cpu": replace(runnable_targets()["host"], threads=4), "cuda": card_target("sm_90", 256), "toy": TOY,
           "no subgroups": replace(TOY, subgroup=0, has_async_copies=False, features=())}


def masked(x: Tensor) -> Tensor:
    return (x * (x > 0)).sum()


LONG = {
    "sum": (lambda: kernel_of(data(1_000_003).sum()), SUMS, 1_000_003),
    "rows": (lambda: kernel_of(data(3, 70_001).sum(1)), SUMS, 70_001),
    "columns": (lambda: kernel_of(data(70_001, 2).sum(0)), SUMS, 70_001),
    "middle": (lambda: kernel_of(data(311, 5, 307).sum((0, 2))), SUMS, 311 * 307),
    "squares": (lambda: kernel_of(data(40_009).square().sum()), SUMS, 40_009),
    "softmax": (lambda: kernel_of(data(2, 50_021).softmax(-1)), SUMS, 50_021),
    "matmul": (lambda: kernel_of(data(5, 20_011) @ data(20_011, 7)), PRODUCTS, 20_011),
    "dot": (lambda: kernel_of((data(100_003) * data(100_003)).sum()), PRODUCTS, 100_003),
    "float16 matmul": (lambda: kernel_of(data(5, 20_011, dtype="float16") @ data(20_011, 7, dtype="float16")), NARROW_PRODUCTS, 20_011),
    "mixed matmul": (lambda: kernel_of(data(5, 20_011, dtype="float16").cast("float32") @ data(20_011, 7)), PRODUCTS, 20_011),
    "masked": (lambda: kernel_of(masked(data(40_009))), SUMS, 40_009),
    "bfloat16": (lambda: kernel_of(data(300_007, dtype="bfloat16").sum()), SUMS, 300_007),
    "convolution": (lambda: kernel_of(conv(1200, 3, 5, 3)), PRODUCTS, 10_800),
}


def check(state: Scheduler, rule: SumRule, terms: int) -> None:
    program = lower(state)
    validate(program)
    chains = addition_chains(program)
    what = [o.to_json() for o in state.applied_opts]
    assert chains.longest <= rule.longest, what
    assert chains.path <= longest_path(rule, terms) + COMBINED, what


@pytest.mark.parametrize(("name", "target"), an_eighth(product(LONG, TARGETS)))
def test_no_chain_of_additions_is_long(name: str, target: str) -> None:
    build, rule, terms = LONG[name]
    base = Scheduler(Kernel(build()), TARGETS[target])
    for state in (base, group_heuristic(base) if base.target.has_groups else heuristic(base)):
        check(state, rule, terms)
    rng = random.Random(f"{name} {target}")
    for _ in range(6):
        check(random_state(rng, base, rng.randint(1, 8)), rule, terms)


def lower_one(ast: UOp, target: Target, *opts: Opt) -> Scheduler:
    return apply_opts(Scheduler(Kernel(ast), target), opts)


@pytest.mark.parametrize("opts", [
    [Opt("UNROLL", "r0", 32), Opt("UNROLL", "r0", 32)], [Opt("UNROLL", "r0", 25)], [Opt("TILE", "r0", 1000), Opt("TILE", "r0", 40)],
    [Opt("UPCAST", "o0", 2), Opt("UPCAST", "r0", 3)], [Opt("SWAP", "o0", "r0")], [Opt("TILE", "r0", 300), Opt("SWAP", "o0", "r0")],
    [Opt("THREAD", "r0", 4)], [Opt("THREAD", "r0", 3), Opt("UNROLL", "r0", 7)]], ids=str)
def test_opts_that_carry_accumulators_keep_the_law(opts: list[Opt]) -> None:
    check(lower_one(kernel_of(data(70_001, 2).sum(0)), TARGETS["cpu"], *opts), SUMS, 70_001)


@pytest.mark.parametrize("opts", [[Opt("GROUP", "r0", 64)], [Opt("GROUPTOP", "r0", 48)], [Opt("SPLITK", "r0", 200)],
                                  [Opt("GROUP", "r0", 32), Opt("SPLITK", "r0", 9)]], ids=str)
@pytest.mark.parametrize("target", ["cuda", "toy", "no subgroups"])
def test_threads_of_groups_keep_the_law(target: str, opts: list[Opt]) -> None:
    check(lower_one(kernel_of(data(3, 70_001).sum(1)), TARGETS[target], *opts), SUMS, 70_001)


def test_one_chain_is_seen() -> None:
    """Without the sum rule, the measured chain has as many additions as terms; the tests above rely on that measurement."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(summation, "SUMS", SumRule(1 << 30, 1 << 30))
        for opts in ([], [Opt("SWAP", "o0", "r0")], [Opt("UNROLL", "r0", 7)]):
            program = lower(lower_one(kernel_of(data(70_000, 2).sum(0)), TARGETS["cpu"], *opts))
            assert addition_chains(program).longest == 70_000


def test_short_sums_integers_and_extrema_have_one_chain() -> None:
    for x in (data(64, 2).sum(0), data(5000, 2, dtype="int32").sum(0), data(5000, 2).max(0), data(5000, 2).prod(0),
              data(3, 384) @ data(384, 2), data(3, 8192, dtype="bfloat16") @ data(8192, 2, dtype="bfloat16"),
              data(3, 8192, dtype="float16").cast("float32") @ data(8192, 2, dtype="float16").cast("float32")):
        program = lower(Scheduler(Kernel(kernel_of(x)), TARGETS["cpu"]))
        assert sum(i.op == "LOOP" for i in program.code[-1]) <= 3, x


@pytest.mark.parametrize("name", an_eighth(KERNELS))
def test_blocks_give_the_right_numbers(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Results are right if the rule allows only a few additions, so that every kernel has blocks, remainders, and accumulators in
    scratch."""
    monkeypatch.setattr(summation, "SUMS", SumRule(3, 2))
    monkeypatch.setattr(summation, "PRODUCTS", SumRule(5, 3))
    case = Case(Kernel(KERNELS[name]()))
    rng, target = random.Random(name), TARGETS["cpu"]
    base = Scheduler(case.kernel, target)
    for state in (base, random_state(rng, base, rng.randint(1, 8))):
        program = lower(state)
        validate(program)
        if program.size > 4000:
            continue
        run_interpreted(case, program, rng.randint(1, 3))
        if has_native(case, target):
            run_native(case, program, target, 2, final=False)


@pytest.mark.parametrize("n", [64, 2003, 2048, 65_536, 70_001])
def test_iterations_of_blocks_are_counted(n: int) -> None:
    """A thread with one sum has an iteration for each term, and a few more for each block."""
    program = lower(Scheduler(Kernel(kernel_of(data(n, 2).sum(0))), TARGETS["cpu"]))
    assert n <= sum(least_iterations(*pair) for pair in zip(program.spec.phases, program.code, strict=True)) <= 1.4 * n


def test_blocks_cost_something() -> None:
    base = Scheduler(Kernel(kernel_of(data(2, 100_000).sum(1))), TARGETS["cpu"])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(summation, "SUMS", SumRule(1 << 30, 1 << 30))
        without = Scheduler(Kernel(base.kernel.ast), base.target)
    assert cost_of(base).cycles > cost_of(without).cycles


# -- the sum rule itself -------------------------------------------------------------------------------
@pytest.mark.parametrize(("iterations", "additions", "blocks"), [
    (64, 1, BlockedLoop((), 64)), (65, 1, BlockedLoop((13,), 5)), (67, 1, BlockedLoop((16,), 5)), (300, 1, BlockedLoop((15, 240), 2)),
    (2, 32, BlockedLoop((), 64)), (3, 32, BlockedLoop((1,), 3)), (50, 5, BlockedLoop((2, 32), 2)), (1, 64, BlockedLoop((), 64))])
def test_blocks_of_a_loop(iterations: int, additions: int, blocks: BlockedLoop) -> None:
    assert blocked_loop(SumRule(64, 16), iterations, additions) == blocks


def test_accumulators_in_memory_take_a_sum_from_each_run() -> None:
    nest = blocked_nest(SumRule(64, 16), [10, 1, 20], 1, memory=2)
    assert nest.adds_to_memory and nest.loops == (BlockedLoop((), 10), BlockedLoop((), 1), BlockedLoop((), 20))
    assert blocked_nest(SumRule(64, 16), [3, 1, 20], 1, memory=2) == BlockedNest(
        BlockedLoop((), 1), (BlockedLoop((), 60), BlockedLoop((), 20), BlockedLoop((), 20)), False)
    assert summation.longest_path(SUMS, 64) == 64


@pytest.mark.parametrize("chain", a_quarter([
    "GROUP(r0, 8)", "LOCAL(o0, 2) GROUPTOP(r0, 5)", "SPLITK(r0, 7)", "UNROLL(r0, 5) GROUP(r0, 4)",
    "STAGE(s0, r0) LOCAL(o0, 4) LOCAL(o1, 4) PIPELINE(r0, 2)"]))
@pytest.mark.parametrize("target", ["toy", "no subgroups"])
def test_blocks_of_threads_give_the_right_numbers(target: str, chain: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(summation, "SUMS", SumRule(3, 2))
    monkeypatch.setattr(summation, "PRODUCTS", SumRule(3, 2))
    case = Case(Kernel(kernel_of(data(8, 43) @ data(43, 8))))
    program = lower(apply_opts(Scheduler(case.kernel, TARGETS[target]), parse_chain(chain)))
    validate(program)
    args = case.fresh()
    run_program(program, args)
    case.check(args, chain)
