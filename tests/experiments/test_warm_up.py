"""The experiment that measures how long a machine takes to warm up: its columns, and its table for a small product."""
from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

import pytest

EXPERIMENTS = Path(__file__).resolve().parents[2] / "experiments"


@pytest.fixture
def experiment(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(EXPERIMENTS)
    return importlib.import_module("warm_up")


def test_runs_belong_to_the_time_at_which_they_begin(experiment: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """After a pause of 12 ms runs take 3.1 ms, from 20 ms on 1 ms."""
    now = [100.0]

    def run(times: int) -> None:
        now[0] += times * (3.1e-3 if now[0] - 100.0 < 32e-3 else 1e-3)
    monkeypatch.setattr(experiment.time, "sleep", lambda seconds: now.__setitem__(0, now[0] + seconds))
    monkeypatch.setattr(experiment.time, "perf_counter", lambda: now[0])
    columns: list[list[float]] = [[] for _ in experiment.SINCE]
    for column, seconds in experiment.after_a_pause(run, 12e-3):
        columns[column].append(seconds)
    assert [len(c) for c in columns] == [1, 1, 1, 1, 2, 1, 9, 20, 30, 40], "begun after 0, 3.1, … 21.7 ms, then every 1 ms"
    assert all(s == pytest.approx(3.1e-3 if i < 6 else 1e-3) for i, c in enumerate(columns) for s in c)


@pytest.mark.slow
def test_there_is_a_row_for_everyone_and_each_pause(experiment: Any, capsys: pytest.CaptureFixture[str]) -> None:
    experiment.main(["--kernels", "gemm_256", "--pauses", "1,3", "--rounds", "1"])
    _, _, *rows = capsys.readouterr().out.splitlines()
    labels = [tuple(cell.strip() for cell in r.split("|")[1:3]) for r in rows]
    who = {label.removeprefix("gemm_256, ") for label, _ in labels}
    assert {"hand-written", "heuristic"} <= who
    assert sorted(labels) == sorted((f"gemm_256, {w}", f"{p} ms") for w in who for p in (1, 3))
    assert all(r.split("|")[3].strip().endswith("s") for r in rows), "the first run begins when the pause ends"


def test_kernels_that_are_not_there_are_named(experiment: Any, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        experiment.main(["--kernels", "nosuch"])
    assert "nosuch" in capsys.readouterr().err
