"""`svod.kernel`: a kernel taken from a graph, optimised by hand, timed, checked and saved; chains as text."""
from __future__ import annotations

import shutil
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import svod
from svod import BeamConfig, PrepareConfig, Tensor
from svod.core.kernel.chain_text import chain_text, parse_chain
from svod.core.kernel.scheduler import Opt
from svod.errors import ArgumentError, ConfigError, KernelOptError, ScheduleError, TuneError
from svod.tune.db import Measurement, TuningDB

Array = np.ndarray[Any, np.dtype[Any]]


def drawn(*shape: int, seed: int = 0) -> Array:
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def product(m: int = 37, k: int = 24, n: int = 40) -> Tensor:
    return Tensor(drawn(m, k)) @ Tensor(drawn(k, n, seed=1))


def two_kernels() -> Tensor:
    x = product()
    return (x * x.sum()).sum(1)


@pytest.fixture
def database(tmp_path: Path) -> str:
    return str(tmp_path / "by_hand.db")


def test_constants_in_another_order_make_the_kernel_of_the_plan() -> None:
    weight = Tensor(drawn(40, 24)).realize()

    def turned() -> Tensor:
        return Tensor(drawn(37, 24)) @ weight.transpose(0, 1).contiguous()
    made, = turned().prepare(PrepareConfig(db=":none:"), constants=[weight]).kernels
    assert svod.kernel(turned(), constants=[weight]).key == made.key


def test_a_chain_step_by_step() -> None:
    naive = svod.kernel(product())
    k = naive.apply("UPCAST", "o0", 4).apply("UPCAST", "o1", 8)
    assert naive.chain == "" and k.chain == "UPCAST(o0, 4) UPCAST(o1, 8)" and k.opts[0] == Opt("UPCAST", "o0", 4)
    assert "tile o0 4 × o1 8 (vector)" in k.nest() and "tile" not in naive.nest()
    assert 0 < k.cost().cycles < naive.cost().cycles
    assert k.undo().chain == "UPCAST(o0, 4)" and k.undo(5).chain == "" == k.untouched().chain
    assert svod.kernel(product(), chain=k.chain).nest() == k.nest() == naive.apply(k.chain).nest()
    assert "o0 37 × o1 40 × r0 24" in repr(naive) and k.chain in repr(k)
    with pytest.raises(KernelOptError, match="o7"):
        k.apply("UPCAST", "o7", 4)


@pytest.mark.parametrize("shape", [(1, 1, 1), (1, 7, 1), (13, 1, 17), (64, 64, 64)])
def test_every_proposed_chain_is_read_back_and_right(shape: tuple[int, int, int]) -> None:
    k = svod.kernel(product(*shape))
    proposed = [k.heuristic(), *k.sketches()]
    for other in proposed:
        assert parse_chain(other.chain) == other.opts and k.apply(other.chain).nest() == other.nest()
    assert [s.cost().cycles for s in proposed[1:]] == sorted(s.cost().cycles for s in proposed[1:])
    for other in proposed[:3]:
        plan = product(*shape).prepare(PrepareConfig(opts={k.key: other.chain}, db=":none:"))
        plan.execute()
        np.testing.assert_allclose(plan.outputs[0].reshape(shape[0], shape[2]), drawn(*shape[:2]) @ drawn(*shape[1:], seed=1), rtol=1e-4,
                                   atol=1e-4)


@pytest.mark.parametrize("chain", [
    (Opt("UPCAST", "o0", 8),), (Opt("NOLOCALS", "out"),), (Opt("ORDER", "out", ("o1", "o0")), Opt("STAGE", "s1", "root")),
    (Opt("PREFETCH", "p1", -2), Opt("LANES", "o1.in"))])
def test_text_of_chains(chain: tuple[Opt, ...]) -> None:
    text = chain_text(chain)
    assert parse_chain(text) == chain == parse_chain(text.replace(") ", "), ")) == parse_chain(f"  {text}\n")


@pytest.mark.parametrize("text", ["UPCAST", "UPCAST(o0, 8", "UPCAST(o0, 8) and more", "(o0, 8)", "UPCAST()"])
def test_what_is_no_chain(text: str) -> None:
    with pytest.raises(KernelOptError, match="is not an opt; an opt is written"):
        parse_chain(text)


def test_one_of_several_kernels() -> None:
    with pytest.raises(ArgumentError, match=r"is computed by \d kernels, which one\?: 0: \w+_0 \(\w{12}\), 1: ") as raised:
        svod.kernel(two_kernels())
    first = svod.kernel(two_kernels(), 0)
    assert first.key == svod.kernel(two_kernels(), first.name).key == svod.kernel(two_kernels(), first.key[:12]).key
    assert first.key != svod.kernel(two_kernels(), 1).key and first.name in str(raised.value)
    with pytest.raises(ArgumentError, match="which='gemm_77' names 0 of them"):
        svod.kernel(two_kernels(), "gemm_77")
    with pytest.raises(ScheduleError, match="no kernel computes this tensor"):
        svod.kernel(Tensor(drawn(3)))
    with pytest.raises(ArgumentError, match="takes a tensor"):
        svod.kernel(drawn(3))  # type: ignore[arg-type]


@pytest.mark.slow
def test_times_and_checks() -> None:
    k = svod.kernel(product()).heuristic()
    timing, check = k.time(), k.check()
    assert timing.seconds > 0 and timing.flops == 2 * 37 * 24 * 40 and float(timing) == timing.seconds
    assert timing.bytes == 4 * (37 * 24 + 24 * 40 + 37 * 40)
    assert timing.flops_per_second == timing.flops / timing.seconds and "GFLOP/s" in str(timing) and "B/s" in str(timing)
    assert check and check.right and str(check).startswith("right: ")


def test_saved_chains_are_used(database: str) -> None:
    config = PrepareConfig(db=database)
    slow = svod.kernel(product(), config=config)
    k = slow.heuristic()
    slow.save()
    fast = k.save()
    winner = TuningDB.open(database).winner(k.key, k.state.target.key)
    assert winner is not None and tuple(Opt.from_json(list(o)) for o in winner.chain) == k.opts and fast.seconds > 0
    plan = product().prepare(config)
    assert plan.kernels[0].opts_source == "database" and [list(o) for o in plan.kernels[0].opts] == [o.to_json() for o in k.opts]


@pytest.mark.slow
def test_a_chain_that_rewrites_the_kernel(database: str) -> None:
    """ONLINE makes another kernel. Workers, the database and code are given the first one with the whole chain."""
    q, k, v = drawn(2, 5, 4), drawn(2, 24, 4, seed=1), drawn(2, 24, 3, seed=2)
    config = PrepareConfig(db=database)

    def attention() -> Tensor:
        return Tensor(q).scaled_dot_product_attention(Tensor(k), Tensor(v))
    plain = svod.kernel(attention(), config=config)
    online = plain.apply("ONLINE(s3, 8)").apply("UPCAST", "o2", 3)
    assert online.state.kernel is not plain.kernel and online.key == plain.key and online.untouched().nest() == plain.nest()
    assert online.undo().nest() == plain.apply("ONLINE(s3, 8)").nest() != plain.nest() == online.undo(2).nest()
    assert online.check() and online.time().flops == plain.time().flops and "phase svod_p0" in online.linear()
    online.save()
    saved = TuningDB.open(database).select(Measurement, plain.key, plain.state.target.key)
    assert online.opts in [tuple(Opt.from_json(list(o)) for o in m.chain) for m, _ in saved]
    plan = attention().prepare(PrepareConfig(opts={plain.key: online.chain}, db=":none:"))
    plan.execute()
    scores = np.einsum("hqw,hkw->hqk", q, k) / 2
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    np.testing.assert_allclose(plan.outputs[0].reshape(2, 5, 3), weights @ v / weights.sum(-1, keepdims=True), rtol=1e-4, atol=1e-5)


def test_a_wrong_kernel_is_not_saved(database: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from svod.tune import hand_kernel
    from svod.tune.measure.measurer import Verification
    monkeypatch.setattr(hand_kernel.WorkerMeasurer, "verify", lambda self, cs: [Verification(False, "every element", "element 3 is 7")])
    with pytest.raises(TuneError, match="is not saved: element 3 is 7"):
        svod.kernel(product(), config=PrepareConfig(db=database)).save()
    assert "wrong: element 3 is 7" in str(svod.kernel(product()).check())


@pytest.mark.slow
def test_a_search_from_there(database: str) -> None:
    k = svod.kernel(product(), config=PrepareConfig(db=database, beam=BeamConfig(width=0)))
    found = k.search(beam=2, budget=4)
    assert found.key == k.key and found.check()
    assert TuningDB.open(database).winner(k.key, k.state.target.key) is not None


def test_code(tmp_path: Path) -> None:
    k = svod.kernel(product()).heuristic()
    assert "phase svod_p0" in k.linear()
    assert "define void @svod_p0" in k.llvm()
    assert "svod_p0:" in k.asm()
    file = k.object(tmp_path / "k.o")
    assert file.read_bytes()[:4] == b"\x7fELF"
    if (objdump := shutil.which("objdump")) is not None:
        text = subprocess.run([objdump, "-d", str(file)], capture_output=True, text=True, check=True).stdout
        assert "<svod_p0>:" in text


def test_opts_of_a_plan_by_name_and_by_key() -> None:
    k = svod.kernel(product())
    for key in (k.key, k.key[:10], k.name, ""):
        plan = product().prepare(PrepareConfig(opts={key: "UPCAST(o0, 4)"}, db=":none:"))
        assert [list(o) for o in plan.kernels[0].opts] == [["UPCAST", "o0", 4]] and plan.kernels[0].opts_source == "explicit"
    with pytest.raises(ConfigError, match=r"'gemm_9' fits no kernel of the plan; its kernels are gemm_0 \("):
        product().prepare(PrepareConfig(opts={"gemm_9": "UPCAST(o0, 4)"}, db=":none:"))
    f = svod.jit(lambda x: x @ Tensor(drawn(24, 40)).exp(), config=PrepareConfig(opts={"": "UPCAST(o0, 4)"}, db=":none:"))
    np.testing.assert_allclose(f(drawn(37, 24)).numpy(), drawn(37, 24) @ np.exp(drawn(24, 40)), rtol=1e-4, atol=1e-3)


def test_library_kernels_and_functions_of_python() -> None:
    with pytest.raises(ArgumentError, match=r"scan_0 is a library kernel: it has one form and takes no opts"):
        svod.kernel(Tensor(drawn(8, 8)).cumsum(0))
    y = svod.custom_function(np.sin, product() * 2, dtype="float32", shape=(37, 40)) + 1
    with pytest.raises(ArgumentError, match=r"computed by 2 kernels, which one\?: 0: gemm_0 \(\w{12}\), 1: elementwise_2 "):
        svod.kernel(y)
    assert svod.kernel(y, "elementwise_2").nest().startswith("phase 0")


def test_a_kernel_of_a_plan() -> None:
    w = Tensor(drawn(24, 40))
    f = svod.jit(lambda x: (x @ w).exp().sum(1), config=PrepareConfig(db=":none:", threads=1))
    f(drawn(37, 24))
    plan = f.plans[0]
    k = svod.kernel(plan, plan.kernels[0].name)
    assert (k.key, k.chain, k.state.target.threads) == (plan.kernels[0].key, plan.kernels[0].chain, 1)
    assert k.nest() == plan.kernels[0].nest() and k.asm() == plan.kernels[0].asm() and k.check()
    assert svod.kernel(plan, 0, chain="UPCAST(o0, 2)").chain == "UPCAST(o0, 2)"
    with pytest.raises(ArgumentError, match=r"the plan runs \d kernels, which='gemm_77' names 0"):
        svod.kernel(plan, "gemm_77")
    twice = svod.jit(lambda x: ((x @ Tensor(drawn(24, 24))).exp() @ Tensor(drawn(24, 24))).exp(), config=PrepareConfig(db=":none:"))
    twice(drawn(24, 24))
    same = {k.key: k.name for k in reversed(twice.plans[0].kernels)}
    assert all(svod.kernel(twice.plans[0], key).name == name for key, name in same.items())
