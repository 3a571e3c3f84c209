"""Attention in one pass over blocks of the keys on the toy device, which reports threads that race or read what nobody has written."""
from __future__ import annotations

import random

import pytest

from svod.compile.backend import BACKENDS
from svod.compile.lower.lower import lower
from svod.core.cost.groups.attention import ATTENTION
from svod.core.cost.groups.prices import GroupPrices
from svod.core.cost.template import schedule
from svod.core.kernel.algorithms.online import masked_limits
from svod.core.kernel.apply import apply_opts
from svod.core.kernel.chain_text import parse_chain
from svod.core.kernel.kernel import Kernel
from svod.core.kernel.scheduler import Scheduler
from svod.errors import KernelOptError
from svod.tensor import Tensor
from tests.agreement import Case
from tests.attention import AttentionCase
from tests.core.corpus import data, kernel_of
from tests.draws import a_half, count
from tests.toy_backend.backend import BACKEND
from tests.toy_backend.running import check
from tests.toy_backend.target import TOY


@pytest.mark.parametrize(("kind", "dtype"), a_half([("causal", "bfloat16"), ("kept", "float16"), ("plain", "float32")]))
def test_no_thread_is_ahead_of_what_it_reads(kind: str, dtype: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(BACKENDS, TOY.device, BACKEND.__module__)
    for seed in range(count(1)):
        rng = random.Random(f"{kind} {seed}")
        case = AttentionCase.draw(rng, kind, dtype, (1, 16, 64, 3, rng.choice((2, 3, 4))))
        found = GroupPrices().cheapest(schedule(ATTENTION, Scheduler(case.kernel(), TOY)), 1 << 20)
        assert found
        case.check(rng.choice(found)[1].applied_opts, TOY.device)


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "dtype", "shape", "chain"), [
    ("added", "float16", (1, 1, 3, 3, 3), "ONLINE(s6, 2)"),     # the only row: its maximum has no axis
    # the mask is read for the columns of tiles, and has fewer columns than these
    ("kept", "float16", (2, 2, 5, 7, 5), "TC(s2.r0, toy_f16,s2.o1,s2.o2) STAGE(s0, o1)"),
    ("added", "float16", (2, 11, 5, 7, 2), "TC(s2.r0, toy_f16,s2.o1,s2.o2) STAGE(s0, o1)"),
    # tiles of keys start with blocks, and end after the last block
    ("plain", "bfloat16", (1, 2, 3, 2, 1), "ONLINE(s3, 2) TC(s2.r0, toy_shared,s2.o1,s2.o0) STAGE(s1, r0) STAGE(s0, r0)"),
    ("plain", "bfloat16", (1, 2, 3, 3, 2), "ONLINE(s3, 2) TC(s2.r0, toy_bf16,s2.o1,s2.o0) STAGE(s1, r0) STAGE(s0, o0)"),
    ("grouped", "float16", (1, 1, 5, 7, 2), "ONLINE(s3, 2) TC(s8.r0, toy_f16,s8.o1,s8.o0) STAGE(s6, r0) STAGE(s7, r0)"),
    ("kept", "float16", (1, 16, 13, 7, 3), "ONLINE(s3, 2) TC(s8.r0, toy_f16,s8.o0,s8.o1) TILE(o0, 2) STAGE(s6, o1) STAGE(s7, o1)"),
])
def test_tiles_that_begin_anywhere(kind: str, dtype: str, shape: tuple[int, int, int, int, int], chain: str,
                                   monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(BACKENDS, TOY.device, BACKEND.__module__)
    AttentionCase.draw(random.Random(1), kind, dtype, shape).check(parse_chain(chain), TOY.device)


@pytest.mark.slow
def test_all_parts_of_a_pass_under_a_window_are_combined() -> None:
    """A part has two blocks, so the number of parts differs from the number of blocks at which a row's window begins."""
    rows, columns = Tensor.arange(40).reshape(40, 1), Tensor.arange(40)
    scores = (data(40, 3) @ data(3, 40)).where(columns > rows - 4, float("-inf"))
    kernel = Kernel(kernel_of(scores.softmax(-1) @ data(40, 3)))
    state = apply_opts(Scheduler(kernel, TOY), parse_chain("ONLINE(s3, 2) SPLITK(r0, 10)"))
    assert [limit.apart for limit in masked_limits(state.kernel)] == [2]
    check(Case(kernel), lower(state))


def test_tiles_that_reach_beyond_an_operand_of_all_groups_are_refused() -> None:
    state = Scheduler(AttentionCase.draw(random.Random(1), "plain", "float16", (1, 16, 13, 7, 3)).kernel(), TOY)
    tiles = "ONLINE(s3, 2) TC(s8.r0, toy_f16,s8.o0,s8.o1) TILE(o0, 2)"
    with pytest.raises(KernelOptError, match=r"tiles of s8 reach to position 19 of s8\.o0, and s6 ends at 16: STAGE it at a loop"):
        lower(apply_opts(state, parse_chain(tiles)))
