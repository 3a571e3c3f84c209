"""Proposed opts: each one applies, or is refused with a reason."""
from __future__ import annotations

import random
from collections import Counter
from dataclasses import replace

import pytest

from svod.core.kernel.apply import apply_opt, apply_opts
from svod.core.kernel.scheduler import Opt, Scheduler
from svod.errors import KernelOptError
from svod.tune.search.actions import (
    REFERENCE_GRID,
    REFERENCE_PADTO,
    apply_tied,
    default_actions,
    divisors,
    lanes_of,
    loop_rows,
    mutations,
    neighbour_amounts,
    partial_amounts,
    reference_actions,
    register_amounts,
    thread_amounts,
    tile_amounts,
    unroll_amounts,
)
from tests.toy_backend.target import TOY
from tests.tune.search_kernels import TARGET, elementwise, gemm, row_reduce, softmax

KERNELS = {"gemm": gemm(48, 64, 40), "primes": gemm(197, 13, 31), "ones": gemm(1, 1, 1), "softmax": softmax(7, 1000),
           "sum": row_reduce(1000, 197), "elementwise": elementwise(12345)}


def base(name: str) -> Scheduler:
    return Scheduler(KERNELS[name], TARGET)


@pytest.mark.parametrize("n", [1, 2, 7, 12, 36, 97, 1000])
def test_divisors(n: int) -> None:
    assert divisors(n) == tuple(d for d in range(1, n + 1) if n % d == 0)


@pytest.mark.parametrize("extent", [1, 2, 3, 7, 13, 16, 31, 64, 197, 1000, 4096])
def test_amounts_fit_their_axis(extent: int) -> None:
    for amounts in (register_amounts(extent, 16, 32), unroll_amounts(extent), partial_amounts(extent, 16), tile_amounts(extent)):
        assert len(set(amounts)) == len(amounts)
        assert all(n == 0 or 1 < n < extent for n in amounts)
        assert extent not in amounts, "the whole axis is written 0, and only there"
    assert all(n <= 32 for n in unroll_amounts(extent))
    if extent == 1:
        assert not register_amounts(extent, 16, 32)
        assert not tile_amounts(extent)


def test_amounts_are_vectors_and_divisors() -> None:
    assert {16, 32, 48, 64} <= set(register_amounts(1000, 16, 32))
    assert {30, 14, 9, 6} <= set(register_amounts(997, 16, 32)), "results of 1, 2, 3, 4 vectors a row, a row of operands, one element"
    assert set(register_amounts(997, 8, 16)) == {2, 3, 4, 6, 8, 12, 14, 16, 24, 32}
    assert 14 not in register_amounts(20, 16, 32), "28 rows are computed for 20"
    assert {7, 14} <= set(register_amounts(56, 16, 32))
    assert {16, 32, 64, 128} <= set(partial_amounts(4096, 16))
    assert tile_amounts(1000) == (8, 20, 25, 50, 125, 250, 500), "divisors near powers of two"
    assert tile_amounts(197) == (8, 16, 32, 64, 128)
    assert thread_amounts(100, 2) == (2,)
    assert thread_amounts(100, 12) == (2, 3, 4, 6, 12)
    assert thread_amounts(3, 12) == (2, 3)
    assert thread_amounts(100, 1) == ()


@pytest.mark.parametrize("name", KERNELS)
def test_every_action_applies_or_says_why_not(name: str) -> None:
    random.seed(1)
    state = base(name)
    lanes = lanes_of(state.kernel, TARGET)
    for _ in range(4):
        following = []
        for opt in default_actions(state, lanes):
            try:
                new = apply_opt(state, opt)
            except KernelOptError as e:
                assert str(e)
                continue
            assert new.digest != state.digest, f"{opt} changes nothing"
            following.append(new)
        if not following:
            break
        state = random.choice(following)


def test_the_grid_reaches_each_kind_of_opt() -> None:
    ops = Counter(o.op for o in default_actions(apply_opt(base("primes"), Opt("UPCAST", "o0", 8)), 16))
    assert {"UPCAST", "UNROLL", "TILE", "THREAD", "LANES", "SWAP", "STAGE", "INLINE", "PADTO"} <= set(ops)
    assert sum(ops.values()) < 200


def test_groups_are_proposed_where_the_target_has_them() -> None:
    state, ops = Scheduler(KERNELS["primes"], TOY), {"LOCAL", "GROUP", "GROUPTOP", "SPLITK"}
    assert not ops & {o.op for o in default_actions(base("primes"), 16)}
    proposed = [o for o in default_actions(state, 4) if o.op in ops]
    assert {o.op for o in proposed} == ops and all(o.arg <= TOY.group_threads for o in proposed)
    for opt in proposed:
        assert apply_opt(state, opt).applied_opts == (opt,)
    bound = apply_opts(state, [Opt("LOCAL", "o0", 8), Opt("GROUP", "r0", 4)])
    assert Opt("UPCAST", "o0.in", 2) in set(reference_actions(bound)), "loops of threads have their positions in the reference grid too"
    alone = Scheduler(KERNELS["primes"], replace(TOY, group_threads=1))     # NOLOCALS
    assert {o.op for o in default_actions(alone, 4)} & ops == {"SPLITK"}


def test_only_rows_that_can_change_are_offered() -> None:
    state = apply_opt(base("gemm"), Opt("UPCAST", "o0", 0))
    assert [row.name for row, _, _ in loop_rows(state)] == ["o1", "r0"]
    assert all(o.op in ("STAGE", "INLINE") for o in default_actions(base("ones"), 16))


def test_outputs_that_the_caches_lose_may_be_streamed() -> None:
    """STREAM is proposed only for outputs that exceed the caches. A smaller output may be in the caches for the next kernel, and the time
    of one kernel alone does not show what it costs to lose that."""
    def offered(n: int) -> bool:
        return Opt("STREAM", "out") in set(default_actions(Scheduler(elementwise(n), replace(TARGET, l2=1 << 20, l3=1 << 25)), 16))
    assert offered(1 << 23)
    assert not offered(1 << 20), "twelve megabytes or fewer stay in a last cache of 32"
    assert not offered(1 << 10)


def test_a_split_of_a_dimension_is_made_of_all_its_loops() -> None:
    """In softmax the columns of the maximum, of the sum and of the output are split together, but not their rows."""
    state = base("softmax")
    opt = Opt("UPCAST", "s1.r0", 16)
    tied = apply_tied(state, opt, apply_opt(state, opt))
    assert {r.name for r in tied.rows if r.extent == 16} == {"s1.r0.in", "s3.r0.in", "o1.in"}
    assert tied.digest == apply_opts(state, [Opt("UPCAST", axis, 16) for axis in ("o1", "s3.r0", "s1.r0")]).digest
    # UNROLL only applies to reductions, and loops that were split differently are not changed
    opt = Opt("UNROLL", "s1.r0", 4)
    assert apply_tied(state, opt, apply_opt(state, opt)).applied_opts == (opt, Opt("UNROLL", "s3.r0", 4))
    other = apply_opt(state, Opt("UPCAST", "s3.r0", 8))
    assert apply_tied(other, opt, apply_opt(other, opt)) is None
    assert apply_tied(state, Opt("THREAD", "o0", 2), apply_opt(state, Opt("THREAD", "o0", 2))) is None
    for name in ("gemm", "sum", "elementwise"):
        kernel = base(name)
        assert all(apply_tied(kernel, o, kernel) is None for o in default_actions(kernel, 16)), "one stage has loops"


# -- the reference grid -------------------------------------------------------------------------------------------------------
def test_the_reference_grid_has_its_193_entries() -> None:
    counts = Counter(op for op, _, _ in REFERENCE_GRID)
    assert counts == {"UPCAST": 48, "UNROLL": 15, "LOCAL": 44, "GROUPTOP": 24, "GROUP": 12, "TC": 10, "SWAP": 10, "THREAD": 30}
    assert len(REFERENCE_GRID) == 193
    assert len(REFERENCE_GRID) + len(REFERENCE_PADTO) == 200


def test_positions_become_names() -> None:
    found = list(reference_actions(base("gemm")))
    assert Opt("UPCAST", "o0", 4) in found
    assert Opt("UPCAST", "o1", 0) in found
    assert Opt("UPCAST", "r0", 4) in found          # position 2: refused by no one but of no use to them either
    assert Opt("UNROLL", "r0", 4) in found
    assert Opt("SWAP", "o0", "o1") in found
    assert not any(o.op == "UNROLL" and o.axis != "r0" for o in found)
    live = apply_opt(base("gemm"), Opt("UPCAST", "o0", 0))
    assert Opt("UPCAST", "o1", 4) in set(reference_actions(live))
    assert Opt("THREAD", "o1", 2) in set(reference_actions(live))


def test_an_amount_equal_to_the_extent_is_left_to_the_whole_axis() -> None:
    found = list(reference_actions(Scheduler(gemm(4, 5, 7), TARGET)))
    assert Opt("UPCAST", "o0", 4) not in found
    assert Opt("UPCAST", "o1", 5) not in found
    assert Opt("UNROLL", "r0", 7) not in found
    assert {Opt("UPCAST", "o0", 0), Opt("UPCAST", "o1", 0), Opt("UNROLL", "r0", 0), Opt("UPCAST", "o0", 3)} <= set(found)
    assert Opt("THREAD", "o0", 4) in found          # THREAD has no whole axis in the grid


def test_padto_belongs_to_the_grid_only_when_asked_for() -> None:
    assert not any(o.op == "PADTO" for o in reference_actions(base("gemm")))
    assert sum(o.op == "PADTO" for o in reference_actions(base("gemm"), padto=True)) == 3


# -- mutations ----------------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(("amount", "extent", "expected"), [
    (8, 64, {4, 16}), (16, 64, {8, 32}), (32, 96, {16, 24, 48, 64}), (7, 56, {3, 4, 8, 14}), (0, 12, {6}), (2, 7, {4, 0}), (2, 2, set()),
])
def test_neighbours_of_an_amount(amount: int, extent: int, expected: set[int]) -> None:
    found = set(neighbour_amounts(amount, extent, 16))
    assert expected <= found
    assert amount not in found
    assert all(n == 0 or 1 < n < extent for n in found)


def test_mutations_change_one_thing() -> None:
    state = apply_opts(base("gemm"), [Opt("UPCAST", "o1", 16), Opt("UPCAST", "o0", 4), Opt("STAGE", "s1", "o1"), Opt("THREAD", "o0", 2)])
    found = list(mutations(base("gemm"), state.applied_opts, 16))
    assert found
    for m in found:
        new, old = m.applied_opts, state.applied_opts
        if len(new) == len(old):
            assert sum(a != b for a, b in zip(new, old, strict=True)) == 1
            changed = next((a, b) for a, b in zip(new, old, strict=True) if a != b)
            assert changed[0][:2] == changed[1][:2], "the named axis stays"
        else:
            assert len(new) == len(old) - 1
            assert all(o in old for o in new)
    chains = {m.applied_opts for m in found}
    assert state.applied_opts[:2] + state.applied_opts[3:] in chains
    assert any(Opt("UPCAST", "o1", 32) in c for c in chains)
    assert any(Opt("STAGE", "s1", "o0") in c for c in chains)


def test_what_is_tied_is_mutated_together_too() -> None:
    chain = [Opt("UPCAST", "s1.r0", 16), Opt("THREAD", "o0", 2), Opt("UPCAST", "s3.r0", 16), Opt("UPCAST", "o1", 32)]
    found = {m.applied_opts for m in mutations(base("softmax"), chain, 16)}
    wider = [o._replace(arg=32) for o in chain]
    assert (wider[0], chain[1], wider[2], chain[3]) in found, "both of 16"
    assert (wider[0], *chain[1:]) in found and (*chain[:2], wider[2], chain[3]) in found, "and each alone"
    assert (chain[1], chain[3]) in found, "left out together"


def test_blocks_of_a_row_are_mutated() -> None:
    kernel = KERNELS["softmax"]
    peak = next(s.name for s in kernel.stages if s.value.arg == ("MAX", 1))
    state = apply_opts(base("softmax"), [Opt("ONLINE", peak, 200), Opt("UPCAST", "o0", 7)])
    found = {m.applied_opts[0].arg for m in mutations(base("softmax"), state.applied_opts, 8) if m.applied_opts[0].op == "ONLINE"}
    assert found == {100, 125, 192, 200, 208, 250, 400}


def test_mutations_of_random_chains_replay_to_the_same_state() -> None:
    rng = random.Random(5)
    for name in KERNELS:
        start = state = base(name)
        for _ in range(4):
            options = list(default_actions(state, 16))
            rng.shuffle(options)
            for opt in options:
                try:
                    state = apply_opt(state, opt)
                    break
                except KernelOptError:
                    continue
        for m in mutations(start, state.applied_opts, 16):
            assert apply_opts(start, m.applied_opts).digest == m.digest
