"""The short form of experiments/eight_processes.py: four processes, one of which is killed, tune the same kernels into one database."""
from __future__ import annotations

import importlib
from pathlib import Path

import pytest

EXPERIMENTS = Path(__file__).resolve().parents[2] / "experiments"


@pytest.mark.slow
def test_processes_share_a_database_and_nothing_is_lost_refused_or_done_twice(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(EXPERIMENTS)
    report = importlib.import_module("eight_processes").run(tmp_path, processes=4, seconds=12.0, kill_every=6.0)
    assert report.good, report
    assert report.killed == 1 and report.searches >= 4 and report.stored > 100 and report.in_database >= report.stored
