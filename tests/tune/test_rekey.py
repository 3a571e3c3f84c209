"""`rekey`: adding records of kernels again under their current keys."""
from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np

from svod import Tensor
from svod.tune.db import OWN, TEAM, KernelRecord, Measurement, OriginRecord, TuningDB
from svod.tune.rekey import rekey
from tests.tune.test_checks import described, evidence, kernel_of


def test_records_of_an_older_key_are_found_under_todays(tmp_path: Path) -> None:
    kernel, compiler = kernel_of(Tensor(np.ones((32, 48), np.float32)).softmax(-1))
    old = "0" * 32
    records = [replace(r, kernel=old) for r in [*evidence(kernel, compiler, [["UPCAST", "o0", 2]], 0.5), *described(kernel),  # type: ignore[call-arg]
                                                OriginRecord(kernel.key, "model.py:3")]]
    with TuningDB.open(tmp_path / "t.db") as db:
        db.record(records)
        assert db.winner(kernel.key, compiler.target.key) is None
        done = rekey(db)
        assert (done.kernels, done.records, done.failed) == (1, 4, [])
        winner = db.winner(kernel.key, compiler.target.key)
        assert winner is not None and winner.ratio == 0.5
        assert db.winner(old, compiler.target.key) is not None, "evidence stays"
        assert rekey(db).records == 0
        assert {k.kernel for k, _ in db.select(KernelRecord)} == {old, kernel.key}


def test_what_others_measured_stays_theirs(tmp_path: Path) -> None:
    """Records of others stay in the team's layer: in the own layer their chains would be used without a check after a rekey."""
    kernel, compiler = kernel_of(Tensor(np.ones((32, 48), np.float32)).softmax(-1))
    old = "0" * 32
    with TuningDB.open(tmp_path / "t.db") as db:
        db.record([replace(r, kernel=old) for r in described(kernel)])  # type: ignore[call-arg]
        db.record([replace(r, kernel=old) for r in evidence(kernel, compiler, [["UPCAST", "o0", 2]], 0.5)], layer=TEAM)  # type: ignore[call-arg]
        rekey(db)
        winner = db.winner(kernel.key, compiler.target.key)
        assert winner is not None and winner.layer == TEAM
        assert {layer for _, layer in db.select(KernelRecord)} == {OWN}


def test_what_was_retracted_and_restored_stays_restored(tmp_path: Path) -> None:
    kernel, compiler = kernel_of(Tensor(np.ones((32, 48), np.float32)).softmax(-1))
    old = "0" * 32
    with TuningDB.open(tmp_path / "t.db") as db:
        db.record([replace(r, kernel=old) for r in [*evidence(kernel, compiler, [["UPCAST", "o0", 2]], 0.5), *described(kernel)]])  # type: ignore[call-arg]
        assert db.retract(old, None, None, "") == 1
        rekey(db)
        assert db.winner(kernel.key, compiler.target.key) is None
        assert db.restore(old, None, None, "") == 1
        rekey(db)
        assert db.winner(kernel.key, compiler.target.key) is not None


def test_a_description_that_cannot_be_read_is_told(tmp_path: Path) -> None:
    with TuningDB.open(tmp_path / "t.db") as db:
        db.record([KernelRecord("k" * 32, name="odd", ast={"nodes": [1, 2]})])
        done = rekey(db)
        assert done.kernels == 0 and [k for k, _ in done.failed] == ["k" * 32]
        assert not db.select(Measurement)
