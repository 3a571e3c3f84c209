"""Adapted chains of related kernels: right numbers at every extent, and threads, amounts and targets that fit."""
from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from svod import PrepareConfig, Tensor
from svod.core.kernel.kernel import Kernel
from svod.core.kernel.scheduler import Scheduler
from svod.core.machine.target import Target
from svod.tune.db import TEAM, TuningDB
from svod.tune.relatives import MOST_SEEDS, derived, is_compatible, is_similar, seeds_of_relatives
from tests.draws import draws
from tests.tune.db.samples import confirmed, verdict
from tests.tune.test_checks import described, evidence, kernel_of

EXTENT = st.sampled_from((1, 2, 3, 7, 13, 16, 24, 31, 64, 97, 100))
CHAIN: Any = (["UPCAST", "o0", 6], ["UPCAST", "o1", 16], ["LANES", "o1.in"], ["TILE", "r0", 32], ["UNROLL", "r0", 4], ["THREAD", "o1", 8])


def gemm(m: int, n: int, k: int) -> tuple[Tensor, np.ndarray[Any, Any]]:
    rng = np.random.default_rng(m * 10_000 + n * 100 + k)
    a, b = rng.random((m, k), np.float32), rng.random((k, n), np.float32)
    return (Tensor(a) @ Tensor(b)).relu(), np.maximum(a @ b, 0)


@pytest.mark.slow
@draws(12)
@given(EXTENT, EXTENT, EXTENT)
def test_a_re_derived_chain_gives_right_numbers(m: int, n: int, k: int) -> None:
    kernel, compiler = kernel_of(gemm(m, n, k)[0])
    for state in derived(Scheduler(kernel, compiler.target), CHAIN, threads=8):
        t, wanted = gemm(m, n, k)
        t.prepare(PrepareConfig(db=":none:", opts={kernel.key: [o.to_json() for o in state.applied_opts]})).execute()
        np.testing.assert_allclose(t.numpy(), wanted, rtol=1e-4, atol=1e-5)


def test_amounts_become_those_that_fit() -> None:
    kernel, compiler = kernel_of(gemm(5, 96, 64)[0])
    plain, snapped = derived(Scheduler(kernel, compiler.target), CHAIN, threads=8)
    opts = {(o.op, o.axis): o.arg for o in plain.applied_opts}
    assert opts["UPCAST", "o0"] in (0, 5), "six rows of five are all of them"
    assert opts["UPCAST", "o1"] == 16
    if compiler.target.threads > 1:
        assert opts["THREAD", "o1"] == compiler.target.threads, "all threads there stand for all threads here"
    assert {(o.op, o.axis): o.arg for o in snapped.applied_opts}["UPCAST", "o1"] == 16


def test_what_is_no_opt_here_is_left_out() -> None:
    kernel, compiler = kernel_of(gemm(16, 16, 16)[0])
    odd: Any = (["UPCAST", "o7", 4], ["STAGE", "s9", "o1"], ["NO_SUCH_OPT", "o0", 2], ["UPCAST", "o1", 8])
    for state in derived(Scheduler(kernel, compiler.target), odd):
        assert [o.to_json() for o in state.applied_opts] == [["UPCAST", "o1", 8]]


def test_relatives_are_of_the_same_structure_and_the_nearest_come_first(tmp_path: Any) -> None:
    kernel, compiler = kernel_of(gemm(64, 64, 64)[0])
    near, _ = kernel_of(gemm(64, 96, 64)[0])
    other, _ = kernel_of(Tensor(np.ones((64, 64), np.float32)).softmax(-1))
    base = Scheduler(kernel, compiler.target)
    with TuningDB.open(tmp_path / "t.db") as db:
        assert seeds_of_relatives(base, db, compiler.backend, is_compatible) == []
        db.record([*evidence(other, compiler, [["UPCAST", "o0", 2]], 0.5), *described(other)])
        assert seeds_of_relatives(base, db, compiler.backend, is_compatible) == []
        db.record([*evidence(near, compiler, [["UPCAST", "o0", 4], ["UPCAST", "o1", 8]], 0.5), *described(near)], layer=TEAM)
        found = seeds_of_relatives(base, db, compiler.backend, None)
        assert found and len(found) <= MOST_SEEDS
        assert any([o.to_json() for o in s.applied_opts] == [["UPCAST", "o0", 4], ["UPCAST", "o1", 8]] for s in found)


def test_the_same_kernel_on_a_similar_target_is_a_relative_under_the_switch(tmp_path: Any) -> None:
    kernel, compiler = kernel_of(gemm(64, 64, 64)[0])
    target = compiler.target
    theirs = target.key.rsplit("/", 1)[0] + "/t64"
    base = Scheduler(kernel, target)
    chain = (("UPCAST", "o0", 4), ("THREAD", "o1", 64))
    records = [confirmed(0.5, "aa", kernel.key, theirs, chain=chain), verdict("verified", "aa", kernel.key, theirs)]
    with TuningDB.open(tmp_path / "t.db") as db:
        db.record(records, layer=TEAM)
        assert seeds_of_relatives(base, db, compiler.backend, None) == []
        found = seeds_of_relatives(base, db, compiler.backend, is_compatible)
        assert found
        if target.threads > 1:
            assert all(["THREAD", "o1", target.threads] in [o.to_json() for o in s.applied_opts] for s in found)


@pytest.mark.parametrize(("changed", "similar", "compatible"), [
    ({}, True, True), ({"threads": 64}, True, True), ({"cpu": "znver4"}, True, True), ({"l2": 1 << 30}, True, False),
    ({"features": ("sse2",)}, True, False), ({"arch": "aarch64"}, False, False), ({"device": "CUDA"}, False, False)])
def test_similar_and_compatible_targets(changed: dict[str, Any], similar: bool, compatible: bool) -> None:
    ours = Target("x86_64", "znver5", ("avx2", "fma"), 32, 16, 48 << 10, 1 << 20, 32 << 20, 8)
    theirs = Target(**{**{f: getattr(ours, f) for f in ("arch", "cpu", "features", "vector_bytes", "vector_registers", "l1", "l2", "l3",
                                                        "threads", "device")}, **changed})
    assert (is_similar(theirs.key, ours), is_compatible(theirs.key, ours)) == (similar, compatible)


def test_a_kernel_is_no_relative_of_its_own(tmp_path: Any) -> None:
    kernel, compiler = kernel_of(gemm(64, 64, 64)[0])
    assert isinstance(kernel, Kernel)
    with TuningDB.open(tmp_path / "t.db") as db:
        db.record([*evidence(kernel, compiler, [["UPCAST", "o0", 4]], 0.5), *described(kernel)])
        assert seeds_of_relatives(Scheduler(kernel, compiler.target), db, compiler.backend, is_compatible) == []
