"""Attention in one pass over blocks of keys for NVIDIA's GPUs: right numbers in the emulator, and the code that ptxas generates."""
from __future__ import annotations

import random
from dataclasses import replace

import numpy as np
import pytest

from svod import Tensor
from svod.compile.backend import backend_named
from svod.compile.cuda import ptxas
from svod.compile.cuda.ptx import emit_ptx
from svod.compile.cuda.render import block_of, render, without_assumptions
from svod.compile.lower.lower import lower
from svod.core.cost.groups.attention import ATTENTION
from svod.core.cost.groups.group_cost import group_cost
from svod.core.cost.groups.prices import GroupPrices
from svod.core.cost.template import schedule
from svod.core.graph.buffer import Array
from svod.core.kernel.algorithms.online import masked_limits
from svod.core.kernel.apply import apply_opts
from svod.core.kernel.chain_text import parse_chain
from svod.core.kernel.kernel import Kernel
from svod.core.kernel.loop_nest import loop_nest
from svod.core.kernel.scheduler import Scheduler
from svod.core.machine.levels import MemorySpace
from tests.agreement import Case
from tests.attention import KINDS, PLAIN, AttentionCase
from tests.compile.cuda.emulator import Emulated
from tests.compile.cuda.fake_driver import FakeDriver, stand_in
from tests.compile.cuda.target import card_target
from tests.compile.cuda.test_core_suite import A100, H100
from tests.compile.cuda.test_matrix import check
from tests.core.corpus import data, kernel_of
from tests.draws import a_half, count

CARDS = {"sm_80": A100, "sm_90": H100}
TRIES = 50      # random cases for each that is checked: some have no pass


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize("kind", KINDS)
def test_passes_of_random_shapes(kind: str, dtype: str, monkeypatch: pytest.MonkeyPatch) -> None:
    rng, ran = random.Random(f"{kind} {dtype}"), 0
    stand_in(FakeDriver(sizes={**CARDS[rng.choice(list(CARDS))], "group_threads": 128}), monkeypatch)
    for _ in range(TRIES * count(1)):
        heads, queries, keys = rng.choice((1, 2)), rng.choice((17, 32, 33, 40)), rng.choice((64, 67, 96))
        case = AttentionCase.draw(rng, kind, dtype, (heads, queries, keys, rng.choice((2, 3, 16, 17)), rng.choice((2, 5, 8, 16))))
        found = GroupPrices().cheapest(schedule(ATTENTION, Scheduler(case.kernel(), backend_named("CUDA").target())), 1 << 20)
        if found:
            _, state = rng.choice(found)
            assert any(o.op == "TC" for o in state.applied_opts) == (dtype != "float32")
            case.check(state.applied_opts, "CUDA")
            ran += 1
            if ran == count(1):
                return
    pytest.fail(f"{ran} of {TRIES * count(1)} cases have a pass")


def attention(heads: int, queries: int, keys: int, width: int, dtype: str) -> Kernel:
    q, k, v = (data(heads, n, width, dtype=dtype) for n in (queries, keys, keys))
    return Kernel(kernel_of(q.scaled_dot_product_attention(k, v, is_causal=True)))


@pytest.mark.slow
@pytest.mark.parametrize(("arch", "dtype"), [("sm_75", "float16"), ("sm_80", "bfloat16"), ("sm_90", "float32"), ("sm_90a", "bfloat16")])
def test_ptxas_accepts_the_fastest_pass(arch: str, dtype: str) -> None:
    """The fastest pass is one phase without spills and without local memory."""
    target = card_target(arch)
    _, state = GroupPrices().cheapest(schedule(ATTENTION, Scheduler(attention(12, 1024, 1024, 64, dtype), target)), 1)[0]
    assert state.rewrites and any(o.op == "TC" for o in state.applied_opts) == (dtype != "float32")
    if ptxas.ptxas_version() is None:
        pytest.skip("there is no ptxas on PATH: the CUDA toolkit has it")
    report, = ptxas.assemble(emit_ptx(render(lower(state), target), arch), arch)[1]
    assert not report.spill_stores and not report.spill_loads and not report.stack


def windowed(queries: int, keys: int, before: int, width: int) -> tuple[Tensor, Array]:
    """Make attention in which query i attends to the `width` keys up to key i + `before`; returns it with the expected result."""
    rng = np.random.default_rng(width)
    q, k, v = (rng.standard_normal(s).astype(np.float32) for s in ((2, queries, 5), (2, keys, 5), (2, keys, 16)))
    row, column = np.arange(queries)[:, None] + before, np.arange(keys)
    scores = np.where((column <= row) & (row - column < width), q.astype(np.float64) @ k.transpose(0, 2, 1), -np.inf)
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    rows, columns = Tensor.arange(queries).reshape(queries, 1) + before, Tensor.arange(keys)
    kept = (columns <= rows) & (rows - columns < width)
    out = (Tensor(q) @ Tensor(k).transpose(-2, -1)).where(kept, -np.inf).softmax(-1) @ Tensor(v)
    return out, weights / weights.sum(-1, keepdims=True) @ v


@pytest.mark.parametrize(("queries", "keys", "before", "width"), a_half([(70, 134, 0, 20), (64, 128, 64, 5), (96, 200, 100, 33)]))
def test_passes_begin_and_end_where_a_window_does(queries: int, keys: int, before: int, width: int,
                                                  monkeypatch: pytest.MonkeyPatch) -> None:
    stand_in(FakeDriver(sizes={**H100, "group_threads": 128}), monkeypatch)
    y, want = windowed(queries, keys, before, width)
    kernel = Kernel(kernel_of(y))
    _, state = GroupPrices().cheapest(schedule(ATTENTION, Scheduler(kernel, backend_named("CUDA").target())), 1)[0]
    assert sorted(limit.apart > 0 for limit in masked_limits(state.kernel)) == [False, True]
    y.prepare(replace(PLAIN, device="CUDA", opts={kernel.key: state.applied_opts})).execute()
    np.testing.assert_allclose(y.numpy(), want, rtol=2e-5, atol=2e-6)


def test_blocks_that_are_masked_for_all_rows_of_a_group_are_not_computed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Masked blocks are skipped: a NaN among the values spoils only rows whose group computes its block, where it has the weight 0."""
    stand_in(FakeDriver(sizes={**H100, "group_threads": 128}), monkeypatch)
    case = AttentionCase.draw(random.Random(1), "causal", "float32", (1, 96, 96, 3, 8))
    case.v[:, 70] = np.nan
    kernel, y = case.kernel(), case.tensor
    found = GroupPrices().cheapest(schedule(ATTENTION, Scheduler(kernel, backend_named("CUDA").target())), 1 << 20)
    state = next(s for _, s in found if [o.arg for o in s.applied_opts if o.op in ("ONLINE", "TILE")] == [32, 32])
    y.prepare(replace(PLAIN, device="CUDA", opts={kernel.key: state.applied_opts})).execute()
    np.testing.assert_array_equal(np.isnan(y.numpy()).any((0, 2)), np.arange(96) >= 64)


PHASES = {
    "float32": "STAGE(s2, root) STAGE(s3, root) STAGE(s5, root) UPCAST(s2.o1, 8) UPCAST(s2.o2, 8) LANES(s2.o2.in) LOCAL(s2.o2, 16) "
               "LOCAL(s2.o1, 8) TILE(s2.r0, 16) STAGE(s0, s2.r0) STAGE(s1, s2.r0) UNROLL(s2.r0.in, 4) PIPELINE(s2.r0, 2) GROUP(s3.r0, 32) "
               "UNROLL(s3.r0, 4) LOCAL(s3.o1, 8) GROUP(s5.r0, 32) UNROLL(s5.r0, 4) LOCAL(s5.o1, 8) UPCAST(o1, 4) UPCAST(o2, 8) "
               "LANES(o2.in) LOCAL(o2, 8) LOCAL(o1, 16) TILE(r0, 32) STAGE(s6, r0) STAGE(s7, r0) UNROLL(r0.in, 4)",
    "bfloat16": "STAGE(s2, root) STAGE(s3, root) STAGE(s5, root) TC(s2.r0, mma_bf16,s2.o1,s2.o2) UPCAST(s2.o1, 4) UPCAST(s2.o2, 8) "
                "LOCAL(s2.o1, 2) LOCAL(s2.o2, 4) TILE(s2.r0, 2) STAGE(s0, s2.r0) STAGE(s1, s2.r0) UNROLL(s2.r0.in2, 0) PIPELINE(s2.r0, 2) "
                "GROUP(s3.r0, 32) UNROLL(s3.r0, 4) LOCAL(s3.o1, 8) GROUP(s5.r0, 32) UNROLL(s5.r0, 4) LOCAL(s5.o1, 8) "
                "TC(r0, mma_bf16,o1,o2) UPCAST(o1, 4) UPCAST(o2, 8) LOCAL(o1, 4) TILE(r0, 4) STAGE(s6, r0) STAGE(s7, r0) UNROLL(r0.in2, 0)"}
"""The fastest chains, as predicted, that compute scores, maxima, sums and the rest in phases of their own."""


@pytest.mark.parametrize("dtype", a_half(PHASES))
def test_one_pass_is_predicted_faster_than_phases_where_scores_outgrow_the_caches(dtype: str) -> None:
    state = Scheduler(attention(48, 2048, 2048, 64, dtype), card_target("sm_90"))
    phases = group_cost(apply_opts(state, parse_chain(PHASES[dtype]))).cycles
    fastest, _ = GroupPrices().cheapest(schedule(ATTENTION, state), 1)[0]
    assert fastest < 0.8 * phases


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("kind", KINDS)
def test_passes_in_registers(kind: str, dtype: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Scores, weights and sums stay in the registers of the threads that computed them, for random shapes and lengths that no tile
    divides."""
    rng, ran = random.Random(f"held {kind} {dtype}"), 0
    stand_in(FakeDriver(sizes={**CARDS[rng.choice(list(CARDS))], "group_threads": 128}), monkeypatch)
    for _ in range(TRIES * count(1)):
        shape = rng.choice((2, 3)), rng.choice((17, 32, 33, 40)), rng.choice((64, 67)), rng.choice((3, 16, 24)), rng.choice((8, 17, 24))
        case = AttentionCase.draw(rng, kind, dtype, shape)
        found = passes_in_registers(case)
        if found:
            state = rng.choice(found)
            assert {"s2", "s3", "s5", "s6", "s8"} == held_stages(state)
            case.check(state.applied_opts, "CUDA")
            ran += 1
            if ran == count(1):
                return
    pytest.fail(f"{ran} of {TRIES * count(1)} cases have a pass")


def passes_in_registers(case: AttentionCase) -> list[Scheduler]:
    options = schedule(ATTENTION, Scheduler(case.kernel(), backend_named("CUDA").target()))
    return [state for _, state in GroupPrices().cheapest(options, 1 << 20) if held_stages(state)]


def held_stages(state: Scheduler) -> set[str]:
    return {state.kernel.stages[s].name for s, nest in loop_nest(state).stages.items() if nest.space is MemorySpace.HELD}


@pytest.mark.parametrize("chain", a_half([
    "HOLD(out, mma_f16,o0,r0) UPCAST(r0, 2) LOCAL(o0, 2)", "HOLD(out, mma_f16,o0,r0) UPCAST(r0, 2) UNROLL(r0, 2) UPCAST(o0, 2)",
    "TILE(r0, 16) HOLD(out, mma_f16,o0,r0.in) UPCAST(r0.in, 2)", "HOLD(out, mma_f16,o0,r0) LOCAL(o0, 3)"]))
def test_rows_shared_by_the_threads_of_a_tile(chain: str) -> None:
    """Sums and argmax over rows of a tile exchange registers between threads; 29 columns are no multiple of a tile."""
    for seed, made in enumerate((data(37, 29).sum(1), data(37, 29).argmax(1), data(3, 37, 29).max((0, 2)))):
        kernel = Kernel(kernel_of(made))
        text = chain if seed < 2 else chain.replace("r0", "r1")
        state = apply_opts(Scheduler(kernel, card_target("sm_80", group_threads=128)), parse_chain(text))
        program = check(Case(kernel, seed), state, seed)
        assert {i.arg for i in program.code[0] if i.op == "SHFL_XOR"} == {1, 2}


@pytest.mark.parametrize("chain", a_half([
    "SPLITK(r0, 2) HOLD(out, mma_f16,o0,o1)", "HOLD(out, mma_f16,o0,o1) UPCAST(o0, 2) SPLITK(r0, 3)",
    "HOLD(out, mma_f16,o0,r0) SPLITK(r0, 2)", "SPLITK(r0, 2) HOLD(out, mma_f16,o1,r0)"]))
def test_parts_of_sums_by_the_threads_of_a_tile(chain: str) -> None:
    """The phase that combines the parts has another layout than the phase that computes them."""
    for seed, (m, n, k) in enumerate(((17, 3, 31), (29, 9, 32), (32, 16, 48))):
        kernel = Kernel(kernel_of(data(m, k) @ data(k, n)))
        check(Case(kernel, seed), apply_opts(Scheduler(kernel, card_target("sm_80", group_threads=128)), parse_chain(chain)), seed)


@pytest.mark.parametrize("chain", a_half(["HOLD(out, mma_f16,o0,o1)", "LOCAL(s1.o0, 8) GROUP(s1.r0, 4) HOLD(out, mma_f16,o1,o0)",
                                   "TILE(o0, 16) STAGE(s1, o0) LOCAL(s1.o0, 4) GROUP(s1.r0, 8) HOLD(out, mma_f16,o0.in,o1)"]))
def test_tiles_that_read_sums(chain: str) -> None:
    """The norm of each row is computed by the threads of a tile, or by other threads that share it."""
    for seed, shape in enumerate(((33, 19), (37, 64))):
        kernel = Kernel(kernel_of((data(*shape) + data(*shape)).rms_norm(shape[1], data(shape[1]))))
        check(Case(kernel, seed), apply_opts(Scheduler(kernel, card_target("sm_80", group_threads=128)), parse_chain(chain)), seed)


@pytest.mark.slow
@pytest.mark.parametrize(("queries", "row"), [(32, "UPCAST(s3.o1, 2)"), (32, ""), (64, "LOCAL(s3.o1, 2)")])
def test_what_does_not_stay_in_registers_is_right_too(queries: int, row: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A stage with a HOLD layout is in shared memory if its reader has other threads; results are right then, too."""
    stand_in(FakeDriver(sizes={**A100, "group_threads": 128}), monkeypatch)
    case = AttentionCase.draw(random.Random(queries), "causal", "float16", (2, 70, 67, 16, 24))
    found = next(s for s in passes_in_registers(case) if any(str(o) == f"TILE(o1, {queries})" for o in s.applied_opts))
    chain = [o for o in found.applied_opts if str(o) not in ("LOCAL(s3.o1, 2)", "LOCAL(s3.o1, 4)", "UPCAST(s3.o1, 2)")]
    chain = [*chain[:-1], *parse_chain(row), *chain[-1:]] if row else chain
    assert not {"s2", "s3"} & held_stages(apply_opts(Scheduler(case.kernel(), found.target), chain))
    case.check(tuple(chain), "CUDA")


@pytest.mark.slow
def test_groups_with_most_blocks_begin_first(monkeypatch: pytest.MonkeyPatch) -> None:
    """With a causal mask the last queries have the most keys, so their groups begin first. Groups of several heads with the same number of
    keys begin together."""
    stand_in(FakeDriver(sizes={**A100, "group_threads": 128}), monkeypatch)
    case = AttentionCase.draw(random.Random(5), "causal", "float16", (3, 70, 70, 16, 8))
    state = next(s for s in passes_in_registers(case) if "TILE(o1, 32)" in map(str, s.applied_opts))
    loops = next(o.arg for o in state.applied_opts if o.op == "ORDER")
    assert loops[:2] == ("o1", "o0")
    program, kernel = lower(state), Case(case.kernel(), 1)
    args, (phase,) = kernel.fresh(), program.spec.phases
    numbers = [*[a.ctypes.data for a in args], 0, phase.extent]
    written = []
    for groups in (1, 3):
        args[0][:] = 9.0
        Emulated(without_assumptions(render(program, state.target)), 0).launch(phase.symbol, (groups, 1), block_of(phase), 0, numbers)
        written.append({(head, row) for head, row in np.argwhere((args[0].reshape(3, 70, 8) != 9.0).any(2)).tolist()})
    assert written == [{(0, row) for row in range(64, 70)}, {(head, row) for head in range(3) for row in range(64, 70)}]
