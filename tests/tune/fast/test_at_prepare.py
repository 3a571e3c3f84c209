"""Plans under the policy "fast": chosen after the first run, stored, and used by the next prepare."""
from __future__ import annotations

import logging
import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

import svod
from svod import Tensor
from svod.compile.cpu.host import host_target
from svod.core.machine.target import FAST
from svod.errors import ConfigError, UnsupportedError
from svod.tune.db import Rounding, TuningDB
from svod.tune.fast import at_prepare
from svod.tune.fast.at_prepare import weights_digest
from svod.tune.fast.report import by_plan, sentence, to_data
from svod.tune.fast.trial import RoundedPlans, Times, relative_error
from svod.tune.lock import LockedRounding, write_lock
from svod.tune.resolved import resolve
from tests.tune.fast.two_products import V, W, X, exact, of, plan_of, rounded


@pytest.mark.usefixtures("candidates")
def test_kernels_are_chosen_after_the_first_run_and_stored(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    want = exact()
    y, plan = plan_of(of(tmp_path / "t.db", 1e-2))
    assert rounded(plan) == 0
    with caplog.at_level(logging.WARNING, "svod"):
        plan.execute()
    assert y.numpy().tobytes() == want.tobytes(), "the first run is in float32"
    assert {k.opts_source for k in plan.kernels} == {"fast"}
    assert rounded(plan) == 2 and "2 of 2 kernels" in caplog.text and "sample inputs" in caplog.text
    plan.execute()
    error = relative_error(y.numpy(), want)
    assert 0 < error <= 1e-2

    again, other = plan_of(of(tmp_path / "t.db"))
    assert rounded(other) == 2, "the stored choice, without a limit"
    other.execute()
    assert again.numpy().tobytes() == y.numpy().tobytes()
    with TuningDB.open(tmp_path / "t.db") as db:
        records, = by_plan(r for r, _ in db.select(Rounding))
    assert [r.used for r in records] == [True, True] and records[0].plan_error == pytest.approx(error)
    assert to_data(records)["error"] == records[0].plan_error and "2 of 2" in sentence(records)


@pytest.mark.usefixtures("candidates")
def test_the_limit_decides_how_many(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    y, plan = plan_of(of(tmp_path / "t.db", 1e-2))
    plan.execute()
    with TuningDB.open(tmp_path / "t.db") as db:
        records = [r for r, _ in db.select(Rounding)]
    alone = sorted(r.error for r in records if r.error is not None)
    between = (alone[0] + min(alone[1], records[0].plan_error)) / 2
    want = exact()
    y, plan = plan_of(of(tmp_path / "t.db", between))
    plan.execute()
    assert rounded(plan) == 1
    plan.execute()
    assert 0 < relative_error(y.numpy(), want) <= between
    assert rounded(plan_of(of(tmp_path / "t.db", 1e-2))[1]) == 2 and rounded(plan_of(of(tmp_path / "t.db", between))[1]) == 1
    with caplog.at_level(logging.WARNING, "svod"):
        y, plan = plan_of(of(tmp_path / "t.db", 1e-9))
        plan.execute()
        plan.execute()
    assert rounded(plan) == 0 and y.numpy().tobytes() == want.tobytes() and "stays in float32" in caplog.text


@pytest.mark.usefixtures("candidates")
def test_integer_outputs_stay_as_they_are(tmp_path: Path) -> None:
    """The columns of the weights are nearly equal, so rounding would change which of the products is the largest."""
    near = W[:, :1] * (1 + 1e-5 * np.sign(np.random.default_rng(1).standard_normal((len(W), 16)))).astype(np.float32)
    def outputs() -> tuple[list[Tensor], list[Tensor]]:
        weights = [Tensor(V), Tensor(near)]
        hidden = (Tensor(X) @ weights[0]).relu()
        return [(hidden @ weights[1]).argmax(-1), hidden], weights
    (found, weights), want = outputs(), outputs()[0][0].numpy()
    plan = Tensor.prepare_batch(found, of(tmp_path / "t.db", 1e-2), constants=weights)
    plan.execute()
    plan.execute()
    assert plan.kernels and rounded(plan) == 0 and np.array_equal(found[0].numpy(), want)


@pytest.mark.usefixtures("candidates")
def test_a_plan_in_which_nothing_is_rounded_saves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is not raced against itself, where one of two equal plans would come out as the faster one."""
    monkeypatch.setattr(RoundedPlans, "times", lambda self, kernels: Times(10.0, 9.98))
    plan_of(of(tmp_path / "t.db", 1e-9))[1].execute()
    with TuningDB.open(tmp_path / "t.db") as db:
        records = [r for r, _ in db.select(Rounding)]
    assert records and not any(r.used for r in records)
    assert all(0 < r.plan_before == r.plan_after < 10.0 and r.plan_error == 0.0 for r in records)


@pytest.mark.usefixtures("candidates")
def test_a_choice_that_the_plan_cannot_take_up_is_stored_and_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
                                                                  caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr(at_prepare, "exchange", lambda plan, code: False)
    plan = plan_of(of(tmp_path / "t.db", 1e-2))[1]
    with caplog.at_level(logging.WARNING, "svod"):
        plan.execute()
    assert rounded(plan) == 0 and "goes on in float32 until it is prepared again" in caplog.text
    assert rounded(plan_of(of(tmp_path / "t.db"))[1]) == 2


@pytest.mark.usefixtures("candidates")
def test_a_choice_is_for_its_weights(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    plan_of(of(tmp_path / "t.db", 1e-2))[1].execute()
    assert rounded(plan_of(of(tmp_path / "t.db"))[1]) == 2
    with caplog.at_level(logging.WARNING, "svod"):
        assert rounded(plan_of(of(tmp_path / "t.db"), w=W + 1)[1]) == 0
    assert "a plan runs in float32, as the choice of the tuning database is for other weights; choose them with" in caplog.text


@pytest.mark.usefixtures("candidates")
@pytest.mark.parametrize("is_captured", [False, True])
def test_a_capture_is_not_told_to_choose(is_captured: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A capture runs inside svod-tune, and reads no choice of the database, whether or not it has one."""
    config = of(tmp_path / "t.db")
    if is_captured:
        plan_of(of(tmp_path / "t.db", 1e-2))[1].execute()
        config = replace(config, capture=str(tmp_path / "captured"))
    with caplog.at_level(logging.WARNING, "svod"):
        assert rounded(plan_of(config)[1]) == 0
    assert ("a plan runs in float32, as no kernels are chosen" in caplog.text) is not is_captured
    assert ("a plan runs in float32, as it is captured" in caplog.text) is is_captured
    assert ("choose them with svod-tune" in caplog.text) is not is_captured


@pytest.mark.usefixtures("candidates")
@pytest.mark.parametrize(("weights", "options", "reason"), [
    (W + 1, {}, "a plan runs in float32, as the choice of the lock file {} is for other weights"),
    (W, {"max_error": 1e-9}, "kernels are chosen after a plan's first run, as the choice of the lock file {} has an error of")])
def test_the_reason_is_said_why_a_choice_of_a_lock_file_is_not_used(weights: np.ndarray, options: dict[str, float], reason: str,
                                                                    tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    plan_of(of(tmp_path / "t.db", 1e-2))[1].execute()
    lock = tmp_path / "m.lock.jsonl"
    with TuningDB.open(tmp_path / "t.db") as db:
        write_lock(lock, [], None, [LockedRounding(r) for r, _ in db.select(Rounding)])
    with caplog.at_level(logging.WARNING, "svod"):
        plan = plan_of(replace(of(":none:"), lock=str(lock), **options), w=weights)[1]
    assert rounded(plan) == 0 and reason.format(lock) in caplog.text and "no kernels are chosen" not in caplog.text


@pytest.mark.usefixtures("candidates")
def test_a_chain_with_other_code_is_not_used(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    plan_of(of(tmp_path / "t.db", 1e-2))[1].execute()
    with TuningDB.open(tmp_path / "t.db") as db:
        db.record([replace(r, linear="0" * 32, taken_at=r.taken_at + 1) for r, _ in db.select(Rounding)])
    with caplog.at_level(logging.WARNING, "svod"):
        assert rounded(plan_of(of(tmp_path / "t.db"))[1]) == 0
    assert "gives other code" in caplog.text


@pytest.mark.usefixtures("candidates")
def test_without_a_choice_a_plan_runs_in_float32_and_says_how_to_get_one(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "svod"):
        y, plan = plan_of(of(":none:"))
        plan.execute()
        plan_of(of(":none:"))[1].execute()
    assert y.numpy().tobytes() == exact().tobytes()
    assert caplog.text.count("svod-tune --numerics fast --max-error") == 1


def test_a_chain_that_is_given_may_round() -> None:
    y, plan = plan_of(replace(of(":none:"), opts={"gemm_0": [("ROUND", "out", "bfloat16")]}))
    plan.execute()
    assert rounded(plan) == 1 and 0 < relative_error(y.numpy(), exact()) < 1e-2


@pytest.mark.usefixtures("candidates")
def test_a_chain_that_is_given_stays(tmp_path: Path) -> None:
    plan = plan_of(replace(of(tmp_path / "t.db", 1e-2), opts={"gemm_0": "UPCAST(o1, 16)"}))[1]
    plan.execute()
    assert [k.chain for k in plan.kernels if k.chain == "UPCAST(o1, 16)"] == ["UPCAST(o1, 16)"] and rounded(plan) == 1
    with TuningDB.open(tmp_path / "t.db") as db:
        assert len(db.select(Rounding)) == 1


def test_fast_is_for_cpus_and_a_limit_for_fast() -> None:
    with pytest.raises(UnsupportedError, match="for CPUs"):
        resolve(svod.PrepareConfig(numerics="fast", device="CUDA:sm_90", db=":none:"))
    with pytest.raises(ConfigError, match="max_error"):
        resolve(svod.PrepareConfig(max_error=1e-2, db=":none:"))
    with pytest.raises(ConfigError, match="max_error"):
        svod.PrepareConfig(numerics="fast", max_error=-1.0)


def test_other_policies_have_their_keys() -> None:
    target = host_target()
    assert "numerics" not in target.key and target.allowing(True, True).key == target.key
    assert "numerics=fast" in target.allowing(True, True, numerics=FAST).key
    how = resolve(svod.PrepareConfig(numerics="fast", db=":none:"))
    assert (exact := how.exact).target.key == resolve(svod.PrepareConfig(db=":none:")).target.key and exact.exact is exact


def test_errors_of_outputs() -> None:
    a = np.array([1.0, -4.0, 2.0], np.float32)
    assert relative_error(a, a) == 0.0
    assert relative_error(a + np.array([0, 0, 1], np.float32), a) == 0.25
    assert relative_error(np.full(3, np.nan, np.float32), a) == math.inf
    wanted = np.array([np.inf, np.nan, 2.0], np.float32)
    assert relative_error(wanted, wanted) == 0.0
    assert relative_error(np.array([1.0, np.nan, 2.0], np.float32), wanted) == math.inf
    assert relative_error(np.zeros(2, np.float32), np.zeros(2, np.float32)) == 0.0
    assert relative_error(np.ones(2, np.float32), np.zeros(2, np.float32)) == math.inf
    positions = np.array([3, 7, 1])
    assert relative_error(positions, positions) == 0.0 and relative_error(positions + np.array([0, 0, 1]), positions) == math.inf


def test_the_digest_of_weights_is_of_their_content() -> None:
    small, large = np.arange(100, dtype=np.float32), np.arange(1 << 20, dtype=np.float32)
    one = weights_digest([(100, small), (1 << 20, large)])
    assert one == weights_digest([(100, small.copy()), (1 << 20, large.copy())])
    assert one != weights_digest([(100, small + 1), (1 << 20, large)]) != weights_digest([(100, small), (1 << 20, large + 1)]) != one
    for changed in (0, 7919, 1_000_003, large.size - 1):
        other = large.copy()
        other[changed] += 1
        assert weights_digest([(100, small), (1 << 20, other)]) != one, f"element {changed} alone differs"
    assert weights_digest([(0, large[:0]), (100, small)]) != weights_digest([(100, small), (0, large[:0])]), "empty constants count"
