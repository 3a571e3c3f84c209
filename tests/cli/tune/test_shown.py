"""The progress, the log and the tables of svod-tune."""
from __future__ import annotations

import io
import json
import os
import random
import re
import sys
import threading
import time
from dataclasses import fields, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from click.testing import CliRunner

from svod.bench.race import Ratio
from svod.bench.roofline import CurvePoint
from svod.cli.tune import waiting
from svod.cli.tune.command import cli
from svod.cli.tune.ending import CommandReport
from svod.cli.tune.event_log import EventLog, event_data
from svod.cli.tune.options import TuneOptions
from svod.cli.tune.plans.checks import ChosenRoundings
from svod.cli.tune.progress import LineProgress, LiveProgress, ProgressListener, make_progress, worker_rows, workers_in_words
from svod.cli.tune.report import KernelReport, dry_table, kernel_table, outcome_json, size_lines, work_lines
from svod.cli.tune.script import ScriptEnd
from svod.cli.tune.survey import SurveyRow
from svod.compile.llvm.codegen import CODEGEN_REVISION
from svod.errors import SvodError
from svod.tune.db import Verdict
from svod.tune.db.records import SizeTime
from svod.tune.db.winners import derive_winner
from svod.tune.search import events
from svod.tune.search.events import (
    BaselineTimed,
    CandidateDropped,
    CandidateTimed,
    DriverBusy,
    Improved,
    KernelFinished,
    KernelStarted,
    RoundFinished,
    SessionEnding,
    SessionFinished,
    SessionStarted,
)
from svod.tune.workers.executor import Activity
from tests.cli.tune.commands import BEAM, CEILINGS, ROOT, TARGET, a_row, records_of_winner
from tests.patience import NEVER


def show(progress: Any, row: SurveyRow) -> None:
    with progress:
        progress(SessionStarted("", 1, 60.0, "2 workers"))
        progress(KernelStarted(row.key, row.name, 3, 1e-6))
        progress(BaselineTimed(row.key, 1e-4))
        for event in (CandidateTimed(row.key, 5e-5, "UPCAST(o0, 4)"), CandidateTimed(row.key, 6e-5, "UPCAST(o0, 2)"),
                      *(CandidateDropped(row.key, status, "", "") for status in ("slow", "duplicate", "duplicate", "melted"))):
            progress(event)
        progress(Improved(row.key, 5e-5, 1e-4, "UPCAST(o0, 4)"))
        progress(RoundFinished(row.key, 1, 30, 20, 17, 0, 1, 4, 5e-5, "UPCAST(o0, 4)", 1.0, False))
        progress(KernelFinished(row.key, 4e-5, 1e-4, "UPCAST(o0, 8)", "budget spent", True))
        progress(SessionFinished("", 1, 3, 20.0, False))


def activity(*states: tuple[str, str, str], count: int = 1) -> list[Activity]:
    """The activity of workers of one machine: `count` workers for each of the given (kind, state, job)."""
    return [Activity(f"w-{kind}-{i}", kind, "alpha", state, 1.5 * i, job, int(state == "busy"))  # type: ignore[arg-type]
            for kind, state, job in states for i in range(count)]


FLEET = (("compile", "busy", "lower_candidate"), ("compile", "starting", ""), ("compile", "melting", ""),
         ("compile", "set aside", "the worker on far is another svod"), ("bench", "busy", "race_candidates"))


def test_workers_are_shown_one_by_one_or_counted() -> None:
    rows = worker_rows(activity(*FLEET), 5)
    assert [r[2] for r in rows] == ["lower", "starting", "melting", "set aside: the worker on far is another svod", "race"]
    assert rows[0][:2] == ("alpha", "w-compile-0") and worker_rows([], 3) == []
    rows = worker_rows(activity(*FLEET, count=20), 5)
    assert rows[0] == ("alpha", "20 × compile", "lower", "28.5 s") and len(rows) == 5, "the longest time"
    rows = worker_rows(activity(*FLEET, count=20), 3)
    assert len(rows) == 3 and rows[2][1] == "60 more"
    assert workers_in_words(activity(*FLEET, count=2)) == "2 workers lower, 2 race, 2 starting, 2 melting, 2 set aside"
    assert workers_in_words([]) == ""
    assert workers_in_words(activity(("bench", "busy", "machine_facts"))) == "1 worker machine facts"


def test_lines_tell_of_the_fleet_though_nothing_happens() -> None:
    """Lines are printed although no event comes, only time passes, as with a frozen cluster."""
    row, stream, now = a_row(), io.StringIO(), [0.0]
    workers = activity(*FLEET)
    progress = LineProgress([row], stream, BEAM, lambda: workers, clock=lambda: now[0])
    progress(SessionStarted("", 1, 100.0, "2 workers"))
    progress(BaselineTimed(row.key, 1e-4))
    for best in (8e-5, 7e-5):
        progress(CandidateTimed(row.key, best, ""))
        progress(RoundFinished(row.key, 1, 30, 20, 17, 0, 1, 4, best, "", 2.0, False))
    for _ in range(40):
        now[0] += 1.0
        progress.tick()
    lines = stream.getvalue().splitlines()
    assert len(lines) == 2 and lines[1].startswith("[  30 s] 2 candidates, 0.067 a second, ") and "70 s left" in lines[1]
    assert "14 % less time expected in another minute" in lines[1]
    assert lines[1].endswith("; 1 worker lower, 1 race, 1 starting, 1 melting, 1 set aside")
    assert progress.per_second == 0.0, "none in the last half minute"
    progress(DriverBusy("", "measuring what this machine can do"))
    now[0] += 15.0
    progress.tick()
    assert stream.getvalue().splitlines()[-1].endswith("1 set aside; measuring what this machine can do")
    progress(CandidateTimed(row.key, 1e-5, ""))
    assert not progress.driver


def test_the_log_of_events_is_json_a_line(tmp_path: Path) -> None:
    row, path = a_row(), tmp_path / "events.jsonl"
    for _ in range(2):      # a second command goes on with the file
        show(make_progress([row], io.StringIO(), BEAM, log=EventLog(os.fspath(path))), row)
    log, now = EventLog(os.fspath(path)), [0.0]
    progress = ProgressListener([row], lambda: activity(*FLEET), log, clock=lambda: now[0])
    progress(KernelFinished(row.key, float("inf"), float("nan"), "\x1b]0;\ud800", "every candidate failed", False))
    now[0] = 5.0
    progress.tick()
    lines = [json.loads(line, parse_constant=lambda text: pytest.fail(f"{text} is no JSON")) for line in path.read_text().splitlines()]
    log.close()
    assert [x["event"] for x in lines].count("session_started") == 2 and lines[-3]["event"] == "session_finished"
    timed = next(x for x in lines if x["event"] == "candidate_timed")
    assert timed["kernel"] == row.key and timed["seconds"] == 5e-5 and time.time() - timed["at"] < 100
    finished, fleet = lines[-2:]
    assert (finished["seconds"], finished["heuristic"], finished["verified"]) == (None, None, False)
    assert fleet["event"] == "fleet_sampled" and fleet["workers"][2]["state"] == "melting" and fleet["minute_gain"] is None


def test_every_event_is_logged_as_plain_json() -> None:
    """The fields of every event, also of ones that are added later, can be written as JSON."""
    makers = {"int": 1, "float": float("inf"), "str": "x", "bool": True, "float | None": None,
              "tuple[Activity, ...]": tuple(activity(*FLEET)), "Mapping[str, int]": {"slow": 2}}
    kinds = [k for k in vars(events).values() if isinstance(k, type) and issubclass(k, events.SearchEvent)]
    assert len(kinds) > 10
    for kind in kinds:
        data = event_data(kind(**{f.name: makers[str(f.type)] for f in fields(kind)}), 1.0)
        assert json.loads(json.dumps(data, allow_nan=False)) == data and set(data) == {"event", "at", *(f.name for f in fields(kind))}


def test_a_log_that_cannot_be_written_is_said_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    row = a_row()
    show(make_progress([row], io.StringIO(), BEAM, log=EventLog("/dev/full")), row)
    assert capsys.readouterr().err.count("/dev/full cannot be written: No space left on device; the search goes on without it") == 1
    result = CliRunner().invoke(cli, ["--from", os.fspath(ROOT / "pyproject.toml"), "--log-json", os.fspath(tmp_path / "none" / "x.jsonl")])
    assert isinstance(result.exception, SvodError | SystemExit) and "--log-json" in (result.output + str(result.exception))


def test_progress_in_lines() -> None:
    row, stream = a_row(), io.StringIO()
    progress = make_progress([row], stream, BEAM)
    assert isinstance(progress, LineProgress)
    show(progress, row)
    lines = stream.getvalue().splitlines()
    assert len(lines) == 3 and "100 µs →  50.0 µs   2.00× so far" in lines[0] and "2.50×" in lines[1] and "gemm model.py:12" in lines[0]
    assert lines[2].endswith("candidates: 3 timed (1 slow), 2 duplicate, 1 melted"), "an unknown status is said as it is"
    stream = io.StringIO()
    show(make_progress([row], stream, replace(BEAM, debug=1)), row)
    assert "round 1: 30 proposed, 17 timed" in stream.getvalue() and "budget spent" in stream.getvalue()


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_progress_on_a_terminal_fits_80_columns(monkeypatch: pytest.MonkeyPatch) -> None:
    from rich.console import Console
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setenv("LINES", "12")
    monkeypatch.setenv("TERM", "xterm")
    row, stream = a_row("a_kernel_with_a_rather_long_name"), Terminal()
    progress = make_progress([row], stream, BEAM)
    assert isinstance(progress, LiveProgress)
    show(progress, row)
    page = io.StringIO()
    Console(file=page, width=80, height=12).print(progress.render())
    assert max(map(len, page.getvalue().splitlines())) <= 80 and "2.50×" in page.getvalue() and "budget spent" in page.getvalue()
    assert len(page.getvalue().splitlines()) <= 12, "no more lines than the terminal has"
    assert "2 workers" in page.getvalue() and "a chain leads in 1 of 1 kernel so far" in " ".join(page.getvalue().split())
    slim, progress.console.width = io.StringIO(), 40
    Console(file=slim, width=40, height=12).print(progress.render())
    assert "a_kernel_wit" in slim.getvalue() and "2.50×" in slim.getvalue() and max(map(len, slim.getvalue().splitlines())) <= 40
    progress(SessionEnding("", 3))
    wide = io.StringIO()
    Console(file=wide, width=120, height=12).print(progress.render())
    assert "confirming what was found in 3 kernels" in wide.getvalue() and max(map(len, wide.getvalue().splitlines())) > 110
    assert f"{row.name} model.py:12" in wide.getvalue(), "a wide terminal cuts nothing"


def test_tables_fit_their_width() -> None:
    row = a_row("a_kernel_with_a_rather_long_name")
    outcome = KernelReport(row, (), "database", 1e-4, 4e-5, True, True, Ratio(2.5, 2.4, 2.6), "", "budget spent")
    for width in (80, 110, 140):
        lines = kernel_table([outcome], TARGET, CEILINGS, width)
        assert max(map(len, lines)) <= width and "2.50×" in lines[2]
        assert row.key[:8] in lines[2] and "model.py:12" in lines[2], "neither key nor origin are cut to uselessness"
        assert (row.name in lines[2]) == (width == 140) and ("GB/s" in lines[2]) == (width > 80)
        lines = dry_table([row, replace(row, decision="known")], {row.key: 1e-6}, width)
        assert max(map(len, lines)) <= width and "search" in lines[2] and "known" in lines[3] and row.key[:8] in lines[2]
    unmeasured = replace(outcome, tuned=None, verified=False)
    why = f"keeps the heuristic: {row.name} {row.key[:8]} (50 % of the time): budget spent"
    assert kernel_table([unmeasured], TARGET, None, 80) == [why], "what has no times pushes no rows aside"
    lines = kernel_table([outcome, *[unmeasured] * 6], TARGET, None, 80)
    assert len(lines) == 4 and lines[3].count(row.key[:8]) == 4 and "and 2 more" in lines[3]
    assert "2.50× " in kernel_table([outcome], TARGET, CEILINGS, 110)[2] and len(kernel_table([outcome], TARGET, CEILINGS, 110)) == 3
    doubtful = kernel_table([replace(outcome, speedup=Ratio(2.5, 1.8, 3.1))], TARGET, CEILINGS, 110)
    assert "2.50× ~" in doubtful[2] and doubtful[3] == "~ known to worse than ±5 %"


def test_gain_is_before_over_after_as_they_are_shown() -> None:
    """In every row of the table the gain is the ratio of the two times, to the digits shown. It is the paired ratio, which differs from the
    ratio of the recorded medians."""
    rng = random.Random(7)
    row = a_row()
    for _ in range(200):
        ratio, tuned = rng.uniform(0.3, 1.0), 10 ** rng.uniform(-7, -1)
        m = replace(records_of_winner(row.key, (), "l")[0], time=tuned, baseline=tuned / ratio * rng.uniform(0.9, 1.1), ratio=ratio,
                    ratio_low=0.99 * ratio, ratio_high=min(1.0, 1.01 * ratio))
        won = derive_winner([m], [Verdict(row.key, TARGET.key, "l", "verified", CODEGEN_REVISION)], {})
        assert won is not None
        shown = kernel_table([KernelReport(row, (), "database", won.heuristic_seconds, won.time, True, True, won.interval, "l", "")],
                             TARGET, CEILINGS, 80)[2]
        before, after, gain = re.findall(r"([\d.]+ (?:ns|µs|ms|s)) +([\d.]+ (?:ns|µs|ms|s)) +([\d.]+)×", shown)[0]
        in_seconds = [float(x.split()[0]) * {"ns": 1e-9, "µs": 1e-6, "ms": 1e-3, "s": 1.0}[x.split()[1]] for x in (before, after)]
        assert float(gain) == pytest.approx(in_seconds[0] / in_seconds[1], abs=0.0051), "to the digit shown"
        assert float(gain) == pytest.approx(1 / ratio, rel=0.011), "the gain is the paired one"


def test_shares_of_the_ceiling_that_a_busy_machine_gave_are_marked() -> None:
    """A kernel that was slowed down by a busy machine reaches a larger share of the ceiling than is shown. If the ceilings were measured on
    a busy machine, it reaches a smaller one."""
    quiet = KernelReport(a_row(), (), "database", 2e-3, 1e-3, True, True, None, "", "")
    busy, calm = replace(quiet, noisy=True), replace(CEILINGS, curve=(CurvePoint(1 << 20, 1e9, 1e9),))
    for outcome, ceilings, mark in ((quiet, calm, ""), (busy, calm, "≥"), (quiet, replace(calm, busy="x"), "≤"),
                                    (busy, replace(calm, busy="x"), "≈")):
        lines = kernel_table([outcome], TARGET, ceilings, 100)
        assert re.search(r" (≥ |≤ |≈ |)[\d.]+ %$", lines[2]).group(1).strip() == mark      # type: ignore[union-attr]
        assert [line[0] for line in lines[3:]] == [mark][:len(mark)]
        assert outcome_json(outcome, TARGET, ceilings)["rate"]["noisy"] is outcome.noisy
    refuted = kernel_table([replace(quiet, tuned=1e-9)], TARGET, replace(calm, busy="x"), 100)
    assert refuted[2].endswith(" –") and len(refuted) == 3, "no kernel exceeds a ceiling"


def test_what_is_left_out_is_explained() -> None:
    rows = [a_row("gemm", 0.6), replace(a_row("scatter", 0.14), decision="left out", why="a library kernel has one form"),
            replace(a_row("scatter", 0.1), decision="left out", why="a library kernel has one form"),
            replace(a_row("small", 0.001), decision="small"), replace(a_row("conv", 0.159), decision="left out", why="not among --only")]
    key = rows[0].key[:8]
    assert work_lines(rows, 8) == [
        "5 distinct kernels in 1 family: 1 kernel to search, 1 too small to matter (0.10 % of the time) keeps the heuristic, 3 left out",
        f"left out: scatter {key}, scatter {key} (24 % of the time): a library kernel has one form",
        f"left out: conv {key} (16 % of the time): not among --only"]


def test_sizes_are_told_with_the_names_that_the_user_gave() -> None:
    outcome = KernelReport(replace(a_row(), variables={"v0": "n"}), (), "database", 2e-6, 1e-6, True, True, None, "", "",
                           sizes=(SizeTime({"v0": 20}, 1e-6, 0.5),))
    assert size_lines([outcome]) == [f"gemm {outcome.row.key[:8]}: n=20 1.00 µs, 2.00×"]


def test_waiting_is_said(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(waiting, "QUIET_SECONDS", 60.0)
    with waiting.waiting("starting the workers"):
        waiting.say("a line")
    assert capsys.readouterr().err == "a line\n", "what ends soon says nothing"
    monkeypatch.setattr(waiting, "QUIET_SECONDS", 0.0)
    told = threading.Event()
    monkeypatch.setattr(waiting, "say", lambda text: (print(text, file=sys.stderr), told.set()))
    with waiting.waiting("starting the workers"):
        assert told.wait(NEVER)
    assert capsys.readouterr().err == "svod-tune: starting the workers …\n"
    monkeypatch.undo()
    monkeypatch.setattr(sys, "stderr", terminal := Terminal())
    monkeypatch.setenv("TERM", "xterm")
    with waiting.waiting("starting [the] workers"):
        waiting.say("a [line]")
    shown = terminal.getvalue()
    assert "starting [the] workers" in shown and "a [line]\n" in shown and "0:00:00" in shown
    assert shown.rstrip().endswith("\x1b[2K"), "the line is taken away"


@pytest.mark.parametrize(("seconds", "told"), [(40.0, "(60.0 s, 40 of them the script)"), (10.0, "(60.0 s)"), (None, "(60.0 s)")])
def test_a_script_that_took_more_than_its_half_of_the_budget_is_told(seconds: float | None, told: str) -> None:
    setting: Any = SimpleNamespace(clock=SimpleNamespace(elapsed=60.0, budget=30.0), options=TuneOptions("m.py"))
    captured: Any = SimpleNamespace(script=None if seconds is None else ScriptEnd("finished", 0, seconds))
    nothing: Any = None
    report = CommandReport(setting, captured, (), nothing, nothing, "", ChosenRoundings())
    assert report._summary(None) == f"nothing was left to search with beam 8 {told}"
