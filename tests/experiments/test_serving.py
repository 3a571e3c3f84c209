"""The experiment that measures how many requests threads, replicas and processes serve: a row for each."""
from __future__ import annotations

import importlib
from pathlib import Path

import pytest

EXPERIMENTS = Path(__file__).resolve().parents[2] / "experiments"


@pytest.mark.slow
def test_each_way_has_its_row(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.syspath_prepend(EXPERIMENTS)
    experiment = importlib.import_module("serving")
    experiment.main(["--layers", "1", "--width", "32", "--rows", "1", "--seconds", "0.1", "--rounds", "1"])
    _, _, *rows = capsys.readouterr().out.splitlines()
    assert [r.split("|")[1].strip() for r in rows] == ["1 thread", "2 threads", "2 replicas", "2 processes"]
    assert all(float(r.split("|")[2]) > 0 for r in rows)
