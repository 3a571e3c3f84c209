"""A search on the adapter: what it proposes is right there, and the next plan takes what it found."""
from __future__ import annotations

import sqlite3
from dataclasses import replace
from pathlib import Path

import numpy as np

from svod import Tensor
from svod.config import BeamConfig, PrepareConfig
from svod.core.machine.target import Target

RNG = np.random.default_rng(0)
X, W = (RNG.standard_normal(6).astype(np.float32) for _ in range(2))        # few chains differ


def test_a_search_measures_and_verifies_on_the_adapter(webgpu: Target, tmp_path: Path) -> None:
    db, w = tmp_path / "tune.db", Tensor(W).realize()
    config = PrepareConfig(device="WEBGPU", db=str(db))
    beam = BeamConfig(width=1, executor="inline", budget=5.0, kernel_budget=5.0, patience=1)
    (Tensor(X) * w).prepare(replace(config, beam=beam), constants=[w])
    with sqlite3.connect(db) as found:
        statuses = {status for status, in found.execute("SELECT status FROM measurements")}
    assert "ok" in statuses and statuses <= {"ok", "slow", "limit"}, "nothing that is proposed is wrong or fails"
    plan = (Tensor(X) * w).prepare(config, constants=[w])
    plan.execute()
    np.testing.assert_array_equal(plan.outputs[0], X * W)
    kernel, = plan.kernels
    assert kernel.opts_source == "database"
