"""Fixtures of the tests of svod-tune."""
from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from svod.bench.race import Ratio
from svod.cli.tune import ceilings, searching, workers
from svod.cli.tune.plans import checks
from svod.tune.db import layers
from svod.tune.plans.check import PlanCheck
from tests.cli.tune.commands import CEILINGS, FakeSession, NoExecutor


@pytest.fixture(autouse=True)
def own_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let a test use none of the user's files."""
    monkeypatch.setattr(layers, "shipped_files", lambda: ())
    monkeypatch.setattr(ceilings, "cached_ceilings", lambda *a, **k: CEILINGS)
    monkeypatch.setenv("SVOD_OBJECT_CACHE", str(tmp_path / "objects"))
    for name in ("SVOD_TUNE_DB", "BEAM", "SVOD_CAPTURE"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> type[FakeSession]:
    monkeypatch.setattr(searching, "TuneSession", FakeSession)
    monkeypatch.setattr(workers, "ExecutorStart", NoExecutor)
    for name, value in (("interrupted", False), ("begun", []), ("checked", []), ("lost", 0)):
        monkeypatch.setattr(FakeSession, name, value, raising=False)
    actual = checks.check_plan

    def check(*a: Any, seconds: float) -> PlanCheck:
        """Check a plan in a short time. It counts as twice as fast, and its kernels are not timed, so that the empty chain, which is
        slower inside it, is not given up."""
        FakeSession.checked.append(seconds)
        found = actual(*a, seconds=0.01)
        return replace(found, kernels=(), ratio=Ratio(0.5, 0.49, 0.51) if found.changed else found.ratio)
    monkeypatch.setattr(checks, "check_plan", check)
    NoExecutor.started = 0
    return FakeSession
