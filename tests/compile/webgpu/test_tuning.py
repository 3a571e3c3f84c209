"""A search on the adapter: its candidates give right results there, and the next plan uses the kernel that it found."""
from __future__ import annotations

import sqlite3
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

import svod
from svod import Tensor
from svod.compile.webgpu.backend import BACKEND
from svod.config import BeamConfig, PrepareConfig
from svod.core.ir.serialize import ast_to_data
from svod.core.machine.target import Target
from svod.errors import LaunchError
from svod.tune.at_prepare import begin_budget
from svod.tune.db import PlanTimes, TuningDB
from svod.tune.measure.context import KernelContext, Setup
from svod.tune.measure.work import compile_candidate, screen_candidate, verify_candidate
from tests.tune.test_plan_search import kernels

RNG = np.random.default_rng(0)
X, W = (RNG.standard_normal(6).astype(np.float32) for _ in range(2))        # few chains differ


@pytest.mark.slow
def test_a_search_measures_and_verifies_on_the_adapter(webgpu: Target, tmp_path: Path) -> None:
    db, w = tmp_path / "tune.db", Tensor(W).realize()
    config = PrepareConfig(device="WEBGPU", db=str(db))
    beam = BeamConfig(width=1, executor="inline", budget=60.0, kernel_budget=60.0, patience=1)
    (Tensor(X) * w).prepare(replace(config, beam=beam), constants=[w])
    with sqlite3.connect(db) as found:
        statuses = {status for status, in found.execute("SELECT status FROM measurements")}
    assert "ok" in statuses and statuses <= {"ok", "slow", "limit"}, "nothing that is proposed is wrong or fails"
    plan = (Tensor(X) * w).prepare(config, constants=[w])
    plan.execute()
    np.testing.assert_array_equal(plan.outputs[0], X * W)
    kernel, = plan.kernels
    assert kernel.opts_source == "database"


@pytest.mark.slow
def test_the_alternatives_of_a_plan_are_timed_on_the_adapter(webgpu: Target, tmp_path: Path) -> None:
    db = str(tmp_path / "tune.db")
    beam = BeamConfig(width=1, executor="inline", budget=20.0, kernel_budget=1.0, patience=1)
    begin_budget()
    kernels(device="WEBGPU", db=db, beam=beam)
    with TuningDB.open(db) as opened:
        ((times, _),) = opened.select(PlanTimes)
    assert times.target == webgpu.key
    used, by_rules = kernels(device="WEBGPU", db=db), kernels(device="WEBGPU", db=":none:")
    assert (used != by_rules) == times.is_faster


def test_a_worker_whose_device_is_lost_goes_on(webgpu: Target) -> None:
    """One candidate makes the worker lose the device; the kernel's other candidates are loaded on a new device."""
    kernel = svod.kernel(Tensor(X) * Tensor(W), config=PrepareConfig(device="WEBGPU", db=":none:")).state.kernel
    context = KernelContext(Setup(ast_to_data(kernel.ast), webgpu))
    programs = [compile_candidate((chain, True), context) for chain in ((), (["LOCAL", "o0", 2],))]
    first, _, _ = screen_candidate((programs[0], None, False), context)
    BACKEND.gpu.wgpu.destroy()
    with pytest.raises(LaunchError, match="lost"):
        screen_candidate((programs[1], None, False), context)
    for program in programs:
        again, _, _ = screen_candidate((program, None, False), context)
        assert again.seconds > 0 and first.seconds > 0
        assert verify_candidate((program, None, ((),), 60.0), context).right
