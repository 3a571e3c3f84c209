"""The forms of convolutions in svod-tune: the kernels of both are searched, both are timed, and the report says which one is taken."""
from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from svod.cli.tune.plans import checks
from svod.cli.tune.survey import survey
from svod.tune.capture import write_capture
from svod.tune.db import FormTimes, TuningDB
from svod.tune.lock import LockedTimes, read_lock, write_lock
from svod.tune.plans.form_check import BothForms
from tests.cli.tune.commands import TARGET, FakeSession, compiler, run
from tests.tune.test_forms import predicted


def test_the_kernels_of_both_forms_are_surveyed() -> None:
    case = predicted(True)
    assert case.found.other is not None
    rows = {r.key: r for r in survey(case.capture, TARGET, compiler())}
    own, other = case.capture.plans[0].unbound, case.found.other.unbound
    assert rows.keys() == own.kernels.keys() | other.kernels.keys()
    assert {key for key, r in rows.items() if r.only_in_form} == other.kernels.keys() - own.kernels.keys()
    assert sum(r.share for r in rows.values() if not r.only_in_form) == pytest.approx(1.0)
    assert all(r.seconds > 0 and r.calls >= 1 for r in rows.values())


@pytest.mark.parametrize(("ratio", "form"), [(1.5, "directly"), (0.5, "by transforms of blocks of")])
def test_the_faster_form_is_reported_recorded_and_locked(ratio: float, form: str, tmp_path: Path, fake: type[FakeSession],
                                                         monkeypatch: pytest.MonkeyPatch) -> None:
    case, timed = predicted(True), []

    def time_forms(both: BothForms, *_: Any) -> FormTimes:
        timed.append(both)
        return case.times(ratio)
    monkeypatch.setattr(checks, "time_forms", time_forms)
    write_capture(tmp_path / "c.jsonl", case.capture)
    db, lock, report = tmp_path / "t.db", tmp_path / "m.lock.jsonl", tmp_path / "r.json"
    done = run("--from", str(tmp_path / "c.jsonl"), "--db", str(db), "-o", str(lock), "--json", str(report))
    described = case.found.form.described
    assert done.exit_code == 0 and f"{described}: {form}" in done.output and f"({ratio:.2f}×" in done.output
    assert "; predicted: directly" in done.output and "the forms of 1 convolution, are in" in done.output
    (both,) = timed
    assert both.transformed.calls == case.capture.plans[0].unbound.calls
    (data,) = json.loads(report.read_text())["forms"]
    assert data["is_predicted_transformed"] and data["is_measured"] and data["is_transformed"] == (ratio < 1)
    with TuningDB.open(db) as opened:
        assert [r for r, _ in opened.select(FormTimes)] == [x.record for x in read_lock(lock).times] == [case.times(ratio)]


def test_a_form_that_is_not_timed_is_reported_by_its_record_or_its_prediction(tmp_path: Path, fake: type[FakeSession],
                                                                              monkeypatch: pytest.MonkeyPatch) -> None:
    case, db = predicted(True), tmp_path / "t.db"
    monkeypatch.setattr(checks, "time_forms", lambda *_: None)
    write_capture(tmp_path / "c.jsonl", case.capture)
    assert f"{case.found.form.words}\n" in run("--from", str(tmp_path / "c.jsonl"), "--db", str(db)).output
    with TuningDB.open(db) as opened:
        opened.record([case.times(1.5)])
    assert f"{case.found.form.described}: directly, measured" in run("--from", str(tmp_path / "c.jsonl"), "--db", str(db)).output


@pytest.mark.parametrize("db", ["t.db", ":none:"])
def test_new_times_go_before_those_of_the_lock_file_in_use(db: str, tmp_path: Path, fake: type[FakeSession],
                                                           monkeypatch: pytest.MonkeyPatch) -> None:
    case, lock = predicted(True), tmp_path / "m.lock.jsonl"
    monkeypatch.setattr(checks, "time_forms", lambda *_: case.times(1.5))
    write_capture(tmp_path / "c.jsonl", case.capture)
    write_lock(lock, [], None, times=[LockedTimes(case.times(0.5))])
    monkeypatch.setenv("SVOD_LOCK", str(lock))
    stored = db if db == ":none:" else str(tmp_path / db)
    done = run("--from", str(tmp_path / "c.jsonl"), "--db", stored, "-o", str(lock))
    assert f"{case.found.form.described}: directly, measured" in done.output
    assert [x.record for x in read_lock(lock).times] == [case.times(1.5)]


def test_under_the_policy_same_no_forms_are_timed(tmp_path: Path, fake: type[FakeSession], monkeypatch: pytest.MonkeyPatch) -> None:
    case, timed = predicted(True), []
    monkeypatch.setattr(checks, "time_forms", lambda *given: timed.append(given))
    write_capture(tmp_path / "c.jsonl", case.capture)
    done = run("--from", str(tmp_path / "c.jsonl"), "--db", str(tmp_path / "t.db"), "--numerics", "same")
    assert done.exit_code == 0 and not timed and case.found.form.described not in done.output
