"""The alternatives of plans in svod-tune: they are searched before the kernels, and the plan with them is tuned, reported and locked."""
from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from svod import PrepareConfig
from svod.cli.tune.plans import alternatives
from svod.tune.capture import read_capture, write_capture
from svod.tune.db import PlanTimes, TuningDB
from svod.tune.lock import LockedTimes, read_lock, write_lock
from svod.tune.plans.alternatives import alternatives_of
from svod.tune.resolved import resolve
from tests.cli.tune.commands import FakeSession, run
from tests.tune.db.samples import plan_times
from tests.tune.test_plan_search import IMAGES, kernels, keys_with


class Captured:
    """A captured network, and the record of its plan with channels last."""

    def __init__(self, directory: Path) -> None:
        kernels(db=":none:", capture=str(directory / "c"))
        self.path = directory / "c.jsonl"
        write_capture(self.path, read_capture(directory / "c"))
        content = read_capture(self.path)
        (self.plan,), (graph,) = content.plans, content.graphs.values()
        self.known = alternatives_of(graph)

    def times(self, ratio: float, revision: int) -> PlanTimes:
        words = tuple(f"{key} {self.known[key].described}" for key in sorted(IMAGES))
        return plan_times(ratio, self.plan.digest, self.plan.target, alternatives=words, untried=0, codegen=revision)


@pytest.fixture
def captured(tmp_path: Path) -> Captured:
    return Captured(tmp_path)


@pytest.fixture
def searched(captured: Captured, monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The budgets of searches, each of which finds the plan with channels last faster by a fifth."""
    budgets: list[float] = []

    class Search:
        is_interrupted = False

        def __init__(self, known: Any, plan_of: Any, resolved: Any, seconds: float, begun: PlanTimes | None) -> None:
            budgets.append(seconds)
            self.times = captured.times(0.8, resolved.compiler.pair.revision)

        def run(self) -> PlanTimes:
            return self.times
    monkeypatch.setattr(alternatives, "PlanSearch", Search)
    return budgets


def test_the_plan_with_alternatives_is_tuned_reported_recorded_and_locked(captured: Captured, searched: list[float], tmp_path: Path,
                                                                          fake: type[FakeSession]) -> None:
    db, lock, report = tmp_path / "t.db", tmp_path / "m.lock.jsonl", tmp_path / "r.json"
    done = run("--from", str(captured.path), "--db", str(db), "-o", str(lock), "--json", str(report), "--budget", "30")
    assert done.exit_code == 0 and searched == [pytest.approx(0.33 * 30)]
    assert "with 2 alternatives" in done.output and "(0.80×" in done.output and "2 values stored with channels last\n" in done.output
    assert "the alternatives of 1 plan, are in" in done.output
    data = json.loads(report.read_text())
    (choice,) = data["alternatives"]
    assert choice["is_faster"] and choice["by_rules"] == captured.plan.digest != choice["plan"] and len(choice["alternatives"]) == 2
    assert {k["kernel"] for k in data["kernels"]} == set(keys_with(IMAGES))
    with TuningDB.open(db) as opened:
        assert [r for r, _ in opened.select(PlanTimes)] == [x.record for x in read_lock(lock).times]
    again = run("--from", str(captured.path), "--db", str(db))
    assert len(searched) == 1 and "with 2 alternatives" in again.output         # the record decides


def test_a_dry_run_searches_nothing_and_shows_the_kernels_by_the_record(captured: Captured, searched: list[float], tmp_path: Path,
                                                                        fake: type[FakeSession]) -> None:
    report = tmp_path / "r.json"
    done = run("--from", str(captured.path), "--db", ":none:", "--dry-run", "--json", str(report))
    assert not searched and f"would first try {len(captured.known)} alternatives of whole plans" in done.output
    assert {k["kernel"] for k in json.loads(report.read_text())["kernels"]} == set(captured.plan.unbound.kernels)


def test_a_plan_that_is_not_searched_keeps_its_line_of_the_lock_file(captured: Captured, tmp_path: Path, fake: type[FakeSession],
                                                                     monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: Any) -> Any:
        raise MemoryError("no room")
    monkeypatch.setattr(alternatives, "PlanSearch", fails)
    revision = resolve(PrepareConfig(db=":none:")).compiler.pair.revision
    lock, line = tmp_path / "m.lock.jsonl", LockedTimes(captured.times(0.8, revision))
    write_lock(lock, [], None, times=[line])
    done = run("--from", str(captured.path), "--db", str(tmp_path / "t.db"), "-o", str(lock))
    assert "could not be searched: no room" in done.output and read_lock(lock).times == (line,)
