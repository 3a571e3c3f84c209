"""svod-tune: options, the script's end in all its forms, what is searched, what is said, and one real end to end."""
from __future__ import annotations

import importlib.util
import io
import json
import os
import random
import re
import signal
import socket
import sqlite3
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from contextlib import closing
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from svod import config
from svod.bench.race import Ratio
from svod.bench.roofline import Ceilings, CurvePoint
from svod.cli.installation import program
from svod.cli.tune import run as tune_run
from svod.cli.tune import script as script_module
from svod.cli.tune import waiting
from svod.cli.tune.command import check, cli
from svod.cli.tune.event_log import EventLog, event_data
from svod.cli.tune.options import TuneOptions
from svod.cli.tune.progress import LineProgress, LiveProgress, Progress, make_progress, worker_rows, workers_in_words
from svod.cli.tune.report import KernelReport, dry_table, kernel_table, outcome_json, size_lines, work_lines
from svod.cli.tune.script import run_script
from svod.cli.tune.survey import Foresight, SurveyRow, choose_targets, decide, pick_target, rate_of, survey, work_of
from svod.compile.cpu.host import host_target
from svod.compile.llvm.codegen import CODEGEN_REVISION, COMPILER
from svod.compile.plan.compiler import Compiler, compiler_for
from svod.compile.plan.plan_parts import VariableSpec
from svod.core.cost.op_count import count_operations
from svod.errors import ConfigError, FormatError, SvodError, TuneError
from svod.system.process.system_files import processes_with
from svod.system.quantities import seconds as in_words
from svod.tune import capture
from svod.tune.db import Measurement, Search, TuningDB, Verdict, files, layers
from svod.tune.db.records import SizeTime
from svod.tune.db.winners import derive_winner
from svod.tune.lock import Locked, locked_lines, write_lock
from svod.tune.plan_check import Gain, InPlan, check_values, name_of
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
from svod.tune.search.kernel_search import Finding
from svod.tune.session import SessionResult
from svod.tune.unfinished import what_is_left
from svod.tune.workers.executor import Activity, InlineExecutor
from tests.plans import canonical, gemm_then_softmax, scaled
from tests.tune import search_kernels

ROOT = Path(__file__).parents[2]
TARGET = host_target()
BEAM = config.BeamConfig(width=4)
CEILINGS = Ceilings(TARGET.key, TARGET.threads, True, {"float32": (1e11, 2e11)}, {"memory": {"read": (1e10, 2e10), "copy": (1e10, 2e10)}},
                    (1e-9, 1e-7))
MODEL = """
import sys
import numpy as np
from svod.tensor import Tensor
x = Tensor(np.ones((16, 24), np.float32))
print((x @ x.permute(1, 0)).relu().numpy().sum(), *sys.argv[1:], __name__, flush=True)
"""


@pytest.fixture(autouse=True)
def own_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing of the user's is read or written."""
    monkeypatch.setattr(layers, "shipped_files", lambda: ())
    monkeypatch.setattr(tune_run, "cached_ceilings", lambda *a, **k: CEILINGS)
    monkeypatch.setenv("SVOD_OBJECT_CACHE", str(tmp_path / "objects"))
    for name in ("SVOD_TUNE_DB", "BEAM", "SVOD_CAPTURE"):
        monkeypatch.delenv(name, raising=False)


def script(tmp_path: Path, text: str) -> str:
    path = tmp_path / "model.py"
    path.write_text(text)
    return str(path)


def captured(tmp_path: Path, runs: int = 10) -> str:
    """A capture file of two plans."""
    plans = []
    for unbound, times in ((gemm_then_softmax(), runs), (scaled(64), 1)):
        seconds = dict(zip(unbound.kernels, (8e-6, 2e-6), strict=False))
        plans.append(capture.CapturedPlan(capture.plan_digest(unbound, TARGET.key), TARGET.key, unbound, seconds, times))
    capture.write_capture(tmp_path / "c.jsonl", capture.Capture(plans))
    return str(tmp_path / "c.jsonl")


def run(*arguments: str) -> Any:
    return CliRunner().invoke(cli, list(arguments))


def main(tmp_path: Path, *arguments: str, stdin: str = "", **env: str) -> subprocess.CompletedProcess[str]:
    """The console script in a process of its own."""
    return subprocess.run([sys.executable, "-m", "svod.cli.tune", *arguments], capture_output=True, text=True, cwd=tmp_path, check=False,
                          input=stdin, timeout=120, env={**os.environ, "PYTHONPATH": str(ROOT), "HOME": str(tmp_path), **env})


# -- options ------------------------------------------------------------------------------------------------------------

@pytest.mark.parametrize(("arguments", "said"), [
    (["none.py"], "none.py does not exist"), ([], "no script was given"), (["m.py", "--beam", "0"], "--dry-run"),
    (["m.py", "--epochs", "3"], "svod-tune m.py -- --epochs"), (["m.py", "-x"], "go after --"), (["m.py", "--budget", "0"], "--budget"),
    (["m.py", "--budget", "many"], "--budget"), (["m.py", "--budget", "nan"], "'nan' is not a number"),
    (["--from", "none.jsonl"], "none.jsonl does not exist"),
    (["m.py", "--capture-for", "nan"], "not a number"), (["m.py", "--from", "m.py"], "both"),
    (["m.py", "--workers", "local:2", "--address", "auto"], "--address auto needs Ray"),
    (["m.py", "--top", "0"], "--top"), (["."], "__main__"), (["-m", "no.such.module"], "there is no module 'no'"),
    (["-m", "m", "--from", "m.py"], "both"), (["weights.pt"], "weights.pt is no text and no program"),
])
def test_bad_options_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, arguments: list[str], said: str) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "m.py").write_text("")
    (tmp_path / "weights.pt").write_bytes(b"PK\3\4" + bytes(9))
    done = run(*arguments)
    assert done.exit_code == 2 and said in done.output, done.output


def test_an_onnx_file_without_the_package_onnx_is_refused_before_anything_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *package: None if name == "onnx" else find(name, *package))
    (tmp_path / "m.onnx").write_bytes(b"")
    done = run(str(tmp_path / "m.onnx"))
    assert done.exit_code == 2 and "m.onnx needs the package onnx" in done.output and "svod[onnx]" in done.output
    assert "to capture its kernels" not in done.output


@pytest.mark.parametrize(("arguments", "said"), [
    (["--json", "none/r.json"], "--json none/r.json: the directory"), (["--json", "."], "is a directory"),
    (["--capture-to", "m.py/c.jsonl"], "--capture-to m.py/c.jsonl: the directory"), (["--db", "m.py"], "not a tuning database"),
    (["--db", "other.db"], "not a tuning database"), (["--db", "m.py/t.db"], "is not a directory"),
    (["--db", "x.jsonl"], "put a .db file before it"), (["--db", "m.py:t.db"], "not a tuning database"),
    (["--address", "head"], "use auto or host:port"),
    (["--json", "m.py"], "--json m.py: the command reads this file"), (["--capture-to", "./m.py"], "the command reads this file"),
    (["--json", "other.db"], "an SQLite database, which would be lost"),
    (["--json", "notes.txt"], "--json notes.txt: this file was not written by --json, and would be lost"),
    (["-o", "report.json"], "was not written by --lock"), (["--capture-to", "notes.txt"], "was not written by --capture-to"),
])
def test_what_cannot_be_written_is_refused_before_the_script_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, arguments: list[str],
                                                                  said: str) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "m.py").write_text("open('ran', 'w')")
    with closing(sqlite3.connect(tmp_path / "other.db")) as other:
        other.execute("CREATE TABLE notes(x)")
        other.commit()
    (tmp_path / "notes.txt").write_text("what I found")
    (tmp_path / "report.json").write_text('{\n "format": "svod-tune-report"}')
    before = {p: p.read_bytes() for p in tmp_path.iterdir()}
    with pytest.raises(SvodError, match=re.escape(said)):
        CliRunner().invoke(cli, ["m.py", *arguments], catch_exceptions=False)
    assert {p: p.read_bytes() for p in tmp_path.iterdir()} == before


def test_options_stand_on_both_sides_and_the_rest_is_the_scripts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[TuneOptions] = []
    monkeypatch.setattr(tune_run, "tune", lambda options: seen.append(options) or 0)
    path = script(tmp_path, "")
    assert run("--beam", "3", path, "one", "--budget", "5", "--only", "a", "--only", "b", "--", "--beam", "9", "--", "-x").exit_code == 0
    [o] = seen
    assert (o.script, o.args, o.beam, o.budget, o.only) == (path, ("one", "--beam", "9", "--", "-x"), 3, 5.0, ("a", "b"))
    assert o.command_line(beam=6, fresh=True) == (f"{program('svod-tune')} {path} --beam 6 --budget 5 --only a --only b --fresh "
                                                   "-- one --beam 9 -- -x")
    monkeypatch.setenv("BEAM", "5")
    assert run(path).exit_code == 0 and seen[-1].beam == 5
    check(TuneOptions(None, source=path))


@pytest.mark.slow
@pytest.mark.parametrize(("options", "says"), [
    ([], "no size"), (["--dim", "seq=16"], "seq"), (["--dim", "rows=x"], "give a size or a range"),
    (["--dim", "rows=2", "--outputs", "z"], "z"),
    (["--shape", "x=2xhalf"], "give the input and its extents"), (["--shape", "w=2x8"], "no input w")])
def test_options_that_an_onnx_file_does_not_take_end_with_status_2(tmp_path: Path, capfd: pytest.CaptureFixture[str], options: list[str],
                                                                   says: str) -> None:
    onnx = pytest.importorskip("onnx", reason="needs the package onnx")
    x, y = (onnx.helper.make_tensor_value_info(name, 1, ["rows", 8]) for name in "xy")
    graph = onnx.helper.make_graph([onnx.helper.make_node("Softmax", ["x"], ["y"])], "g", [x], [y])
    onnx.save(onnx.helper.make_model(graph, opset_imports=[onnx.helper.make_opsetid("", 17)], ir_version=8), str(tmp_path / "m.onnx"))
    done = run(str(tmp_path / "m.onnx"), *options, "--db", ":none:")
    assert done.exit_code == 2 and says in capfd.readouterr().err and "nothing to tune" not in done.output


@pytest.mark.slow
def test_console_script_answers_bad_input_with_status_2(tmp_path: Path) -> None:
    path = script(tmp_path, "print('hello')")
    done = main(tmp_path, path, "--workers", "many")
    assert done.returncode == 2 and "use ray:N, local:N" in done.stderr and "Traceback" not in done.stderr
    done = main(tmp_path, path, BEAM="abc")
    assert done.returncode == 2 and "BEAM='abc'" in done.stderr and "Traceback" not in done.stderr
    done = main(tmp_path, path, "--beam", "2", "--db", ":none:", BEAM="abc")
    assert done.returncode == 5 and "prepared no kernel" in done.stderr and done.stdout == "hello\n", "BEAM is not used"


def test_scripts_that_give_nothing_to_tune(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    done = run(script(tmp_path, "print('hello')"), "--db", ":none:")
    assert done.exit_code == 5 and "prepared no kernel" in done.output and done.output.startswith("svod-tune: running")
    assert capfd.readouterr().out == "hello\n"
    done = run(script(tmp_path, "raise SystemExit('no data')"), "--db", ":none:")
    assert done.exit_code == 5 and "ended with status 1 before it prepared a kernel" in done.output
    (tmp_path / "bad.jsonl").write_text("{}")
    with pytest.raises(FormatError, match="not a capture"):
        CliRunner().invoke(cli, ["--from", str(tmp_path / "bad.jsonl")], catch_exceptions=False)


@pytest.mark.slow
def test_a_module_is_run_as_python_runs_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "package").mkdir()
    (tmp_path / "package" / "__init__.py").write_text("")
    (tmp_path / "package" / "__main__.py").write_text("from package import other\nimport sys\nprint(other.X, __name__, *sys.argv[1:])")
    (tmp_path / "package" / "other.py").write_text("X = 'imported'")
    done = main(tmp_path, "-m", "package", "--db", ":none:", "one", "--", "--beam", "9")
    assert done.returncode == 5 and done.stdout == "imported __main__ one --beam 9\n", done.stderr
    options = TuneOptions(None, ("a b",), module="package")
    assert options.subject == "package" and options.command_line().endswith(" -m package --beam 8 --budget 600 -- 'a b'")


@pytest.mark.slow
def test_json_has_the_standard_output_for_itself(tmp_path: Path) -> None:
    done = main(tmp_path, script(tmp_path, MODEL), "--dry-run", "--json", "-", "--db", ":none:")
    assert done.returncode == 0 and json.loads(done.stdout)["format"] == "svod-tune-report"
    assert "__main__" in done.stderr and "family" in done.stderr, "what the script prints, and the table"


@pytest.mark.slow
@pytest.mark.parametrize(("stdout", "status"), [(">&-", 4), (">/dev/full", 4), (">/dev/null", 0)])
def test_json_that_the_standard_output_does_not_take_is_said(tmp_path: Path, stdout: str, status: int) -> None:
    command = [sys.executable, "-m", "svod.cli.tune", script(tmp_path, MODEL), "--dry-run", "--json", "-", "--db", ":none:"]
    done = subprocess.run(["sh", "-c", f'"$@" {stdout}', "sh", *command], stderr=subprocess.PIPE, text=True, cwd=ROOT, check=False,
                          timeout=120)
    assert done.returncode == status and ("svod-tune: the standard output cannot be written: " in done.stderr) == (status == 4)


# -- the script ---------------------------------------------------------------------------------------------------------

def run_captured(tmp_path: Path, text: str, *args: str, **options: Any) -> Any:
    directory = tmp_path / "capture"
    directory.mkdir()
    end = run_script([script(tmp_path, text), *args], directory, **options)
    assert processes_with(f"SVOD_CAPTURE={directory}") == [], "the script is gone before anything is timed"
    return end, capture.read_capture(directory)


@pytest.mark.slow
def test_a_script_runs_as_main_with_its_arguments_and_streams(tmp_path: Path, capfd: pytest.CaptureFixture[str],
                                                             monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BEAM", "4")
    met: list[str] = []
    end, found = run_captured(tmp_path, MODEL + "import os; assert 'BEAM' not in os.environ", "a b", "--x",
                              on_news=lambda news: met.extend(news.kernels))
    assert end.why == "finished" and end.status == 0 and not end.failure
    assert "a b --x __main__" in capfd.readouterr().out
    assert len(found.plans) == 1 and set(met) <= set(found.kernels)


@pytest.mark.slow
def test_a_script_that_fails_is_captured_as_far_as_it_got(tmp_path: Path) -> None:
    end, found = run_captured(tmp_path, MODEL + "raise SystemExit(7)")
    assert end.why == "failed" and end.failure == "ended with status 7" and len(found.plans) == 1
    (tmp_path / "again").mkdir()
    end, _ = run_captured(tmp_path / "again", "import os, signal; os.kill(os.getpid(), signal.SIGSEGV)")
    assert end.failure == "was killed by SIGSEGV"


class Clock:
    """Seconds that can be made to pass."""

    def __init__(self) -> None:
        self.ahead = 0.0

    def __call__(self) -> float:
        return time.monotonic() + self.ahead

    def jump(self, seconds: float) -> None:
        self.ahead += seconds


@pytest.mark.slow
@pytest.mark.parametrize("stubborn", [False, True])
def test_a_script_that_never_ends_is_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stubborn: bool) -> None:
    waits = "import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN)\n" if stubborn else ""
    monkeypatch.setattr(script_module, "STOP_SECONDS", 0.2)
    monkeypatch.setattr(script_module, "TERM_SECONDS", 0.5)
    clock = Clock()
    end, found = run_captured(tmp_path, MODEL + waits + "import time\nwhile True: time.sleep(0.05)", idle=500, clock=clock,
                              on_news=lambda news: clock.jump(1000 * len(news.plans)))
    assert end.why == "idle" and not end.failure and len(found.plans) == 1


@pytest.mark.slow
def test_the_first_kernel_is_waited_for(tmp_path: Path) -> None:
    """Importing svod alone takes longer than this script may be idle later on."""
    end, found = run_captured(tmp_path, MODEL, idle=0.01, first=500.0)
    assert not end.failure and len(found.plans) == 1


@pytest.mark.slow
def test_a_capture_ends_after_its_time_at_the_next_prepare(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    text = MODEL + "try:\n    while True: (x + 1).numpy()\nfinally: print('clean end')"
    clock = Clock()
    end, found = run_captured(tmp_path, text, capture_for=500, clock=clock,
                              on_news=lambda news: clock.jump(250 * len(news.plans)))      # there are two plans
    assert end.why == "time" and len(found.plans) == 2
    out = capfd.readouterr()
    assert "clean end" in out.out and "Traceback" not in out.err


@pytest.mark.slow
def test_a_script_is_ended_with_its_share_once_there_is_a_plan(tmp_path: Path) -> None:
    clock = Clock()
    clock.jump(1000)        # a script that has prepared nothing is not ended
    end, found = run_captured(tmp_path, MODEL + "while True: (x + 1).numpy()", share=0.01, first=500.0, idle=500.0, clock=clock)
    assert end.why == "share" and found.plans and not end.failure
    assert "half of the budget" in end.words("m.py")[0]


def test_what_a_script_leaves_behind_is_ended(tmp_path: Path) -> None:
    end, _ = run_captured(tmp_path, "import subprocess, sys\n"
                          "subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(100)'], start_new_session=True)")
    assert end.why == "finished" and end.left_behind == 1


# -- survey -------------------------------------------------------------------------------------------------------------

def compiler() -> Compiler:
    return compiler_for(TARGET, config.PrepareConfig(object_cache=":none:"))


def records_of_winner(key: str, chain: Sequence[Any], linear: str) -> list[Any]:
    return [Measurement(key, TARGET.key, tuple(chain), linear, "ok", CODEGEN_REVISION, COMPILER, 1, "confirm", time=5e-6, baseline=1e-5,
                        ratio=0.5, ratio_low=0.49, ratio_high=0.51), Verdict(key, TARGET.key, linear, "verified", CODEGEN_REVISION)]


def test_a_script_is_gone_whatever_ends_its_run(tmp_path: Path) -> None:
    calls = iter(range(100))

    def clock() -> float:
        if next(calls) == 3:
            raise SystemExit(143)
        return 0.0
    with pytest.raises(SystemExit):
        run_script([script(tmp_path, "import time\ntime.sleep(100)")], tmp_path, clock=clock)
    assert not processes_with(f"SVOD_CAPTURE={tmp_path}")


@pytest.mark.slow
def test_a_closed_terminal_ends_the_script_too(tmp_path: Path) -> None:
    path = script(tmp_path, "import os, time\nprint(os.getpid(), flush=True)\ntime.sleep(100)")
    command = [sys.executable, "-m", "svod.cli.tune", path, "--db", ":none:"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, cwd=tmp_path,
                          env={**os.environ, "PYTHONPATH": str(ROOT), "HOME": str(tmp_path)}) as process:
        assert process.stdout is not None
        child = int(process.stdout.readline())
        process.send_signal(signal.SIGHUP)
        assert process.wait(60) == 129 and not Path(f"/proc/{child}").exists()


def test_workers_are_started_early_for_what_is_worth_a_search() -> None:
    def news(**seconds: float) -> capture.News:
        return capture.News(["big", "small"], [seconds] if seconds else [])
    with TuningDB.open(":none:") as db:
        assert Foresight(db, TARGET, BEAM).needs_search(news()), "where nothing was ever searched the first kernel says so"
        db.record([Search("s", "big", TARGET.key, ended_at=1.0, outcome="done"), *records_of_winner("big", (), "l")])
        foresight = Foresight(db, TARGET, BEAM)
        assert not foresight.needs_search(news()), "times are waited for"
        assert not foresight.needs_search(news(big=1.0, small=0.001)), "what is not known is too small to matter"
        assert foresight.needs_search(news(big=1.0, small=0.1))
        assert not Foresight(db, TARGET, BEAM).needs_search(capture.News(["big"], [{"big": 1.0}]))


def test_survey_weighs_and_decides(tmp_path: Path) -> None:
    found = capture.read_capture(captured(tmp_path, runs=1000))
    assert pick_target(found) == TARGET
    rows = survey(found, TARGET, compiler())
    gemm, softmax, scale = rows
    assert [r.name for r in rows] == ["gemm", "softmax", "scale"] and gemm.origins == ("block.linear",)
    assert gemm.share == pytest.approx(8e-3 / (1e-2 + 8e-6)) and gemm.calls == 1 and scale.calls == pytest.approx(1e-3)
    assert gemm.flops == 2 * 24 * 40 * 16
    with TuningDB.open(tmp_path / "t.db") as db:
        settings = config.PrepareConfig(db=str(tmp_path / "t.db"))
        decide(rows, TARGET, compiler(), db, settings, BEAM)
        assert [r.decision for r in rows] == ["search", "search", "small"]
        linear = compiler().linear_of(gemm.kernel, ())
        db.record(records_of_winner(gemm.key, (), linear))
        decide(rows, TARGET, compiler(), db, settings, BEAM)
        assert gemm.decision == "known" and gemm.winner is not None
        db.record([Search("s1", gemm.key, TARGET.key, ended_at=1.0, outcome="interrupted")])
        decide(rows, TARGET, compiler(), db, settings, BEAM)
        assert gemm.decision == "search" and gemm.why == "Ctrl-C ended its search"
        db.record([Search("s2", gemm.key, TARGET.key, ended_at=2.0, outcome="2 rounds without a gain", config={"width": 4})])
        decide(rows, TARGET, compiler(), db, settings, BEAM, top=1)
        assert [r.decision for r in rows] == ["known", "left out", "left out"]
        decide(rows, TARGET, compiler(), db, settings, BEAM, only=["block.soft", scale.key[:9]])
        assert [r.decision for r in rows] == ["left out", "search", "search"], "a kernel that was named is searched however small"
        db.record(records_of_winner(softmax.key, (), "of another code generator"))
        decide(rows, TARGET, compiler(), db, settings, BEAM)
        assert softmax.decision == "search" and "other code" in softmax.why
        scale.share, softmax.share = 0.007, 0.003
        decide(rows, TARGET, compiler(), db, settings, BEAM)
        assert [r.decision for r in rows] == ["known", "small", "small"], "a small kernel alone starts no search"
        scale.share = 0.011
        decide(rows, TARGET, compiler(), db, settings, BEAM)
        assert scale.decision == "search"
    found.plans[0].seconds.clear()
    assert survey(found, TARGET, compiler())[0].seconds > 0, "what was not timed is timed here"
    found.plans[0].target = "aarch64/other/neon/l1 64k/l2 1m/l3 0k/t4"
    assert pick_target(found) == TARGET


def test_the_bytes_of_a_gather_are_those_that_it_reads() -> None:
    flops, moved = work_of(canonical(search_kernels.gather(5, 1000, 6)), ())
    assert (flops, moved) == (0, 5 * 4 + 2 * 5 * 6 * 4), "positions, rows read and written; not the whole table"


def test_flops_and_rates() -> None:
    def row(kernel: Any, size: float) -> SurveyRow:
        return SurveyRow(kernel, "k", (), 1, 1e-3, 1.0, "", float(count_operations(kernel.ast).flops), size)
    assert row(canonical(search_kernels.gather(4, 5, 6)), 1).flops == 0, "index arithmetic is not counted"
    assert row(canonical(search_kernels.elementwise(10)), 1).flops == 30
    gemm = row(canonical(search_kernels.gemm(512, 512, 512)), 3 * 4 * 512 * 512)
    rate = rate_of(gemm, 2e-3, TARGET, CEILINGS)
    assert rate.unit == "GFLOP/s" and rate.value == pytest.approx(2 * 512**3 / 2e-3)
    assert rate.share == pytest.approx(rate.value / 2e11)
    size = 1 + max(1 << 20, TARGET.l3)
    large = row(canonical(search_kernels.elementwise(size)), 12.0 * size)
    rate = rate_of(large, 12 * size / 1e10, TARGET, CEILINGS)
    assert rate.unit == "GB/s" and rate.share == pytest.approx(0.5)
    small = row(canonical(search_kernels.elementwise(1000)), 8e3)
    assert rate_of(small, 1e-6, TARGET, CEILINGS).share is None, "its cache level was not measured"
    assert rate_of(large, 0.1, TARGET, None).share is None


# -- what is shown ------------------------------------------------------------------------------------------------------

def a_row(name: str = "gemm", share: float = 0.5) -> SurveyRow:
    kernel = canonical(search_kernels.gemm(8, 8, 8))
    return SurveyRow(kernel, name, ("/a/very/long/path/to/the/model.py:12", "layers.1"), 2, 1e-4, share, "f", 1024, 768)


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
    """Workers of one machine, `count` of each of the states (kind, state, job)."""
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
    """Only a clock and the workers move: what a frozen cluster looks like."""
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
    progress = Progress([row], lambda: activity(*FLEET), log, clock=lambda: now[0])
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
    """Whatever event is added later: its fields are what JSON has."""
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
    """Every row of the table from the records that it shows: paired ratios and medians of times differ, and one of them is the truth."""
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
    """A kernel that was slowed down reaches more than is shown, and less of ceilings that were."""
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


# -- the command, with a session that is not a search ---------------------------------------------------------------------

class FakeSession:
    """Finds for every kernel a chain that is twice as fast: the empty one. Records it as a session would."""

    interrupted = False

    def __init__(self, tasks: Sequence[Any], target: Any, *, db: TuningDB, listener: Any, budget: Any, **others: Any) -> None:
        self.tasks, self.db, self.listener, self.result = tasks, db, listener, SessionResult()

    def run(self) -> SessionResult:
        for t in self.tasks:
            linear = compiler().linear_of(t.kernel, ())
            self.result.rows += self.db.record(records_of_winner(t.key, (), linear))
            self.result.findings[t.key] = Finding((), "beam", 5e-6, 1e-5, True, True, "2 rounds without a gain", linear,
                                                  Ratio(2.0, 1.9, 2.1), None, None)
        self.result.interrupted, self.result.candidates, self.result.seconds = self.interrupted, 40, 2.0
        self.result.timed, self.result.searches = 30, len(self.tasks)
        return self.result


def test_a_run_in_which_every_candidate_fails_is_status_1(tmp_path: Path, fake: type[FakeSession], monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(self: FakeSession) -> SessionResult:
        why = "every candidate failed (error FormatError: not plain data), the heuristic is used unverified"
        self.result.findings = {t.key: Finding((), "heuristic", float("inf"), float("inf"), False, False, why, "", Ratio(1.0, 1.0, 1.0),
                                               None, None, "error FormatError: not plain data") for t in self.tasks}
        return self.result
    monkeypatch.setattr(FakeSession, "run", fail)
    done = run("--from", captured(tmp_path), "--db", str(tmp_path / "t.db"))
    assert done.exit_code == 1
    assert "nothing could be measured: every candidate of 3 kernels failed (error FormatError: not plain data)" in done.output


class NoExecutor:
    """Stands for workers; counts how often they were asked for."""

    started = 0

    def __init__(self, *a: Any, **k: Any) -> None:
        NoExecutor.started += 1

    def result(self, seconds: float | None = None) -> InlineExecutor:
        return InlineExecutor()

    def close(self) -> None:
        pass


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> type[FakeSession]:
    monkeypatch.setattr(tune_run, "TuneSession", FakeSession)
    monkeypatch.setattr(tune_run, "ExecutorStart", NoExecutor)
    monkeypatch.setattr(FakeSession, "interrupted", False)
    actual = tune_run.check_plan        # the empty chain is slower inside the plan: what it promises is taken at its word
    monkeypatch.setattr(tune_run, "check_plan", lambda *a, **k: replace(actual(*a, **k), kernels=()))
    NoExecutor.started = 0
    return FakeSession


@pytest.mark.slow
def test_a_second_run_finds_everything_and_starts_no_workers(tmp_path: Path, fake: type[FakeSession]) -> None:
    file, db, report = captured(tmp_path), str(tmp_path / "t.db"), tmp_path / "r.json"
    first = run("--from", file, "--db", db, "--json", str(report))
    assert first.exit_code == 0 and "3 kernels to search" in first.output
    assert "30 candidates timed in 2 s, 15 per second" in first.output
    data = json.loads(report.read_text())
    assert data["format"] == "svod-tune-report" and data["status"] == 0 and len(data["plans"]) >= 1
    stored = int(re.findall(r"^(\d+) measurements? stored in", first.output, re.M)[0])
    assert {k["source"] for k in data["kernels"]} == {"database"} and all(k["speedup"] for k in data["kernels"])
    assert [data["search"][name] for name in ("proposed", "timed", "searches", "measurements")] == [40, 30, 3, stored]
    assert data["database"]["path"] == db
    for name in ("heuristic", "measured"):
        shown = re.findall(rf"^  {name} +(\S+ \S+)", first.output, re.M)
        assert shown == [in_words(p[f"{name}_seconds"]) for p in data["plans"]], "the terminal and the file have one figure by one name"
    assert "whole plan" in first.output and "measured" in first.output and "next:" in first.output
    assert NoExecutor.started == 1
    second = run("--from", file, "--db", db)
    assert second.exit_code == 0 and "nothing to search with beam 8, 3 known" in second.output and NoExecutor.started == 1
    assert re.search(r"^gemm \w{8} +block\.linear .* 2\.00×", second.output, re.M) and "keep" not in second.output
    kept = [str(tmp_path / "l.jsonl"), str(tmp_path / "d.jsonl")]
    for _ in range(2):
        third = run("--from", file, "--db", db, "--json", str(report), "-o", kept[0], "--capture-to", kept[1], "--log-json", str(report))
        assert third.exit_code == 0, "each option replaces what it wrote"
    third = run("--from", file, "--db", db, "--fresh")
    assert "3 kernels to search" in third.output and NoExecutor.started == 2


@pytest.mark.parametrize(("arguments", "workers"), [
    (("--budget", "19"), "local"), (("--budget", "20"), "ray"), (("--budget", "4", "--workers", "ray:1"), "ray:1"),
    (("--budget", "4", "--address", "auto"), "ray"), (("--budget", "4", "--workers", "local:3"), "local:3")])
def test_small_budgets_are_not_spent_on_starting_ray(tmp_path: Path, fake: type[FakeSession], monkeypatch: pytest.MonkeyPatch,
                                                    arguments: tuple[str, ...], workers: str) -> None:
    asked: list[str] = []

    def start(spec: str, *a: Any, **k: Any) -> Any:
        asked.append(spec)
        raise TuneError("enough")
    monkeypatch.setattr(tune_run, "ExecutorStart", start)
    run("--from", captured(tmp_path), "--db", str(tmp_path / "t.db"), *arguments)
    assert asked == [workers]


@pytest.mark.parametrize(("budget", "check"), [(1.0, 0.5), (4.0, 0.6), (100.0, 4.0)])
def test_the_plan_check_is_kept_back_from_the_budget(tmp_path: Path, fake: type[FakeSession], budget: float, check: float,
                                                 monkeypatch: pytest.MonkeyPatch) -> None:
    searched: list[float] = []
    checked: list[float] = []

    def begin(self: FakeSession, *a: Any, budget: Any, **k: Any) -> None:
        searched.append(budget.total)
        FakeSession.__init__(self, *a, budget=budget, **k)
    monkeypatch.setattr(tune_run, "TuneSession", type("Session", (FakeSession,), {"__init__": begin}))
    actual = tune_run.check_plan
    monkeypatch.setattr(tune_run, "check_plan", lambda *a, seconds: [checked.append(seconds), actual(*a, seconds=0.01)][1])
    assert run("--from", captured(tmp_path), "--db", str(tmp_path / "t.db"), "--budget", str(budget)).exit_code == 0
    assert checked[0] == pytest.approx(check)
    assert len(searched) == 1 and 0 <= searched[0] <= budget - check
    assert budget < 100 or searched[0] > budget / 2


def test_chains_that_lose_inside_the_plan_are_given_up_and_said(tmp_path: Path, fake: type[FakeSession],
                                                               monkeypatch: pytest.MonkeyPatch) -> None:
    file, db, report = captured(tmp_path), str(tmp_path / "t.db"), tmp_path / "r.json"
    actual = tune_run.check_plan

    def check(unbound: Any, heuristic: Any, tuned: Any, *a: Any, **k: Any) -> Any:
        slower = tuple(InPlan(key, 1, None, Gain(1e-6, 2e-6), 0.0, 0.0, ratio=Ratio(2.0, 1.9, 2.1)) for key in unbound.kernels
                       if "gemm" in name_of(unbound, key) and heuristic[key].chain != tuned[key].chain)
        return replace(actual(unbound, heuristic, tuned, *a, **k), kernels=slower, noisy=None)
    monkeypatch.setattr(tune_run, "check_plan", check)
    done = run("--from", file, "--db", db, "--json", str(report))
    assert done.exit_code == 0 and "given up, as they lose here what they gain alone" in done.output
    assert "gemm (block.linear): inside the plan its chain takes 2.00 µs, the heuristic's 1.00 µs" in done.output
    data = json.loads(report.read_text())
    assert {k["name"]: k["source"] for k in data["kernels"]}["gemm"] == "heuristic"
    assert [line[:19] for p in data["plans"] for line in p["given_up"]] == ["gemm (block.linear)"]


def test_nothing_is_timed_long_after_the_budget(tmp_path: Path, fake: type[FakeSession], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tune_run, "LATE_SECONDS", -1e3)
    monkeypatch.setattr(tune_run, "check_plan", None)
    done = run("--from", captured(tmp_path), "--db", str(tmp_path / "t.db"), "--budget", "1")
    assert done.exit_code == 0 and "a whole plan was not timed, as the budget is over" in done.output


def test_a_damaged_capture_is_tuned_as_far_as_it_can_be_read(tmp_path: Path, fake: type[FakeSession]) -> None:
    file = Path(captured(tmp_path))
    file.write_bytes(file.read_bytes()[:-5])
    done = run("--from", str(file), "--db", str(tmp_path / "t.db"))
    assert done.exit_code == 6 and "is cut off" in done.output and "tuning what can be read" in done.output and "3 kernels" in done.output
    file.write_bytes(b"\n".join(line for line in file.read_bytes().split(b"\n") if not line.startswith(b'{"kernel"')))
    done = run("--from", str(file), "--db", str(tmp_path / "t.db"))
    assert done.exit_code == 5 and "could not be read" in done.output and "no plan that can be used" in done.output


def test_dry_run_searches_and_writes_nothing(tmp_path: Path, fake: type[FakeSession]) -> None:
    done = run("--from", captured(tmp_path), "--db", str(tmp_path / "t.db"), "--dry-run", "--json", str(tmp_path / "r.json"))
    assert done.exit_code == 0 and not NoExecutor.started and not (tmp_path / "t.db").exists()
    for word in ("family", "gemm", "softmax", "scale", "nothing", "search", f"next: {program('svod-tune')} --from"):
        assert word in done.output
    assert [k["decision"] for k in json.loads((tmp_path / "r.json").read_text())["kernels"]] == ["search"] * 3
    assert run("--from", captured(tmp_path), "--only", "nobody", "--dry-run").exit_code == 2
    options = ("--workers", "local:1", "--top", "2", "--only", "gemm", "--only", "softmax", "--fresh")
    small = run("--from", captured(tmp_path), "--dry-run", *options)
    assert small.output.splitlines()[-1].endswith("--beam 8 --budget 600 --workers local:1 --top 2 --only gemm --only softmax --fresh")


def test_dry_run_names_no_next_search_where_there_is_nothing_to_search(tmp_path: Path, fake: type[FakeSession]) -> None:
    file, db = captured(tmp_path), str(tmp_path / "t.db")
    run("--from", file, "--db", db)
    done = run("--from", file, "--db", db, "--dry-run")
    assert done.exit_code == 0 and "next:" not in done.output
    assert re.search(r"nothing to search with beam 8; to search anew, without what is known: .* --fresh$", done.output.splitlines()[-1])


def test_a_lock_keeps_the_lines_of_what_was_left_out(tmp_path: Path, fake: type[FakeSession]) -> None:
    file, db, lock = captured(tmp_path), str(tmp_path / "t.db"), tmp_path / "l.jsonl"
    run("--from", file, "--db", db, "-o", str(lock))
    before = locked_lines(lock)
    elsewhere = Locked("k" * 32, "another/target", ())
    write_lock(lock, [*before.values(), elsewhere])
    done = run("--from", file, "--db", db, "-o", str(lock), "--only", "gemm")
    assert done.exit_code == 0 and len(before) == 3
    assert set(locked_lines(lock).values()) == {*before.values(), elsewhere}
    lock.write_text(newer := '{"format": "svod-lock", "version": 9}\n{"kernel": "of tomorrow"}\n')
    refused = run(script(tmp_path, f"open({str(tmp_path / 'ran')!r}, 'w')"), "--db", db, "-o", str(lock))
    assert isinstance(refused.exception, ConfigError) and "update svod" in str(refused.exception)
    assert lock.read_text() == newer and not (tmp_path / "ran").exists()


def test_kernels_without_a_search_are_not_resumed(tmp_path: Path, fake: type[FakeSession]) -> None:
    done = run("--from", captured(tmp_path), "--db", str(tmp_path / "t.db"), "--resume", "--dry-run")
    assert "its search has not begun; it does without --resume" in " ".join(done.output.split()), done.output


def test_kernels_that_another_process_searches_are_left_to_it(tmp_path: Path, fake: type[FakeSession],
                                                              monkeypatch: pytest.MonkeyPatch) -> None:
    def leave(self: FakeSession) -> SessionResult:
        self.result.pending = tuple(t.key for t in self.tasks)
        return self.result
    monkeypatch.setattr(fake, "run", leave)
    done = run("--from", captured(tmp_path), "--db", str(tmp_path / "t.db"))
    assert done.exit_code == 0 and re.search(r"keep the heuristic: .*gemm \w{8}.* \(100 % of the time\): "
                                             "another process is searching it", done.output)
    assert done.output.rstrip().endswith("# when the other search has ended")


@pytest.mark.slow
def test_a_report_that_cannot_be_written_is_status_4(tmp_path: Path, fake: type[FakeSession], monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*a: Any) -> None:
        raise OSError(28, "No space left on device", str(tmp_path / "r.json"))
    monkeypatch.setattr(tune_run, "write_text", full)
    arguments = ("--from", captured(tmp_path), "--db", str(tmp_path / "t.db"), "--json", str(tmp_path / "r.json"))
    for more in (), ("--dry-run",):
        done = run(*arguments, *more)
        assert done.exit_code == 4 and "r.json cannot be written: No space left on device" in done.output
    for db in (":none:", str(tmp_path / "t.db")):
        for option in ("-o", "--capture-to"):
            done = run("--from", captured(tmp_path), "--db", db, option, "/dev/full", "--fresh")
            assert done.exit_code == 4 and "/dev/full" in done.output and "are lost" not in done.output and "in a file" not in done.output


def test_what_a_kernel_promises_is_the_mean_over_its_calls() -> None:
    unbound = gemm_then_softmax()
    n, m = VariableSpec("n", 1, 40), VariableSpec("m", 1, 24)
    key = unbound.calls[0].kernel
    calls = tuple(replace(unbound.calls[0], variables=v) for v in ((n,), (m,), (m,)))
    unbound = replace(unbound, calls=calls)
    assert check_values(unbound) == {"n": 20, "m": 12}
    sizes = (SizeTime({"v0": 20}, 4.0, 0.5), SizeTime({"v0": 12}, 1.0, 0.25), SizeTime({"v0": 1}, 9.0, 1.0))
    row = SurveyRow(unbound.kernels[key], "gemm", (), 3.0, 1.0, 1.0, "f", 1.0, 1.0)
    outcome = KernelReport(row, (), "database", 1.0, 1.0, True, True, None, "", "", sizes=sizes)
    gain = tune_run.gain_in(unbound, outcome)
    assert gain == Gain(pytest.approx((8.0 + 4.0 + 4.0) / 3), pytest.approx((4.0 + 1.0 + 1.0) / 3))
    assert tune_run.gain_in(unbound, replace(outcome, sizes=sizes[:1])) is None, "not timed at 12"


def test_an_interrupted_search_is_reported(tmp_path: Path, fake: type[FakeSession], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fake, "interrupted", True)
    done = run("--from", captured(tmp_path), "--db", str(tmp_path / "t.db"))
    assert done.exit_code == 130 and "ended early by Ctrl-C" in done.output and "measurements stored in" in done.output
    assert "goes on where this one was ended" in done.output

    def interrupt(self: Any) -> None:
        raise KeyboardInterrupt
    monkeypatch.setattr(fake, "run", interrupt)
    done = run("--from", captured(tmp_path), "--db", str(tmp_path / "u.db"))
    assert done.exit_code == 130 and "nothing was added" in done.output
    monkeypatch.setattr(tune_run, "run_script", lambda *a, **k: script_module.ScriptEnd("interrupted", -2, 1.0))
    done = run(script(tmp_path, ""), "--db", str(tmp_path / "u.db"))
    assert done.exit_code == 130 and "had prepared no kernel by then" in done.output


@pytest.mark.parametrize(("end", "status", "said"), [
    (signal.SIGTERM, 143, "ended by SIGTERM; "), (signal.SIGHUP, 129, "ended by SIGHUP; "), (None, 1, "the cluster is gone; ")])
@pytest.mark.parametrize("trouble", [False, True])
def test_what_was_found_before_an_early_end_is_kept_and_said(tmp_path: Path, fake: type[FakeSession], monkeypatch: pytest.MonkeyPatch,
                                                             end: signal.Signals | None, status: int, said: str, trouble: bool) -> None:
    complete = fake.run

    def search(self: FakeSession) -> SessionResult:
        complete(self)
        if end is None:
            raise TuneError("the cluster is gone")
        os.kill(os.getpid(), end)
        time.sleep(60)
        return self.result
    monkeypatch.setattr(fake, "run", search)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "t.db").write_text("no database" * trouble)
    monkeypatch.setenv("SVOD_TUNE_DB", str(tmp_path / "t.db"))
    done = run("--from", captured(tmp_path))
    kept = "what was found is kept in " if trouble else "6 measurements kept in "
    assert done.exit_code == status and f"svod-tune: {said}{kept}" in done.output, done.output
    assert len(list(tmp_path.glob("svod-tuned-*.jsonl"))) == trouble


def test_an_address_where_nobody_answers_ends_the_command_before_the_script(tmp_path: Path, fake: type[FakeSession]) -> None:
    path = script(tmp_path, f"open({str(tmp_path / 'ran')!r}, 'w')")
    with closing(socket.create_server(("127.0.0.1", 0))) as free:
        address = f"127.0.0.1:{free.getsockname()[1]}"
    done = run(path, "--db", ":none:", "--address", address)
    assert done.exit_code == 1 and f"cannot tune on the Ray cluster at '{address}': nobody answers there" in done.output
    assert not (tmp_path / "ran").exists() and NoExecutor.started == 0


@pytest.mark.parametrize("trouble", ["foreign", "directory", "full"])
def test_what_the_database_cannot_take_is_kept_in_a_file(tmp_path: Path, fake: type[FakeSession], monkeypatch: pytest.MonkeyPatch,
                                                          trouble: str) -> None:
    db = tmp_path / "t.db"
    if trouble == "foreign":
        db.write_bytes(b"this is no database" * 100)
    elif trouble == "directory":
        db = tmp_path / "file" / "t.db"
        (tmp_path / "file").write_text("not a directory")
    else:
        def full(*a: Any, **k: Any) -> Any:
            raise sqlite3.OperationalError("database or disk is full")
        monkeypatch.setattr(files, "open_for_writing", full)
        monkeypatch.setattr(files, "full_disk", lambda p: f"{p}: the disk is full, 4 KiB are left")
    before = db.read_bytes() if db.exists() else b""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("SVOD_TUNE_DB", str(db))
    done = run("--from", captured(tmp_path))
    assert done.exit_code == 4 and "whole plan" in done.output, "tuning goes on"
    assert "warning: " in done.output.partition("distinct kernel")[0], "it is said before the work"
    assert "could not be stored" in done.output and str(db) in done.output
    assert (db.read_bytes() if db.exists() else b"") == before
    [saved] = tmp_path.glob("svod-tuned-*.jsonl")
    assert f"import {saved.name}" in done.output
    monkeypatch.undo()
    with TuningDB.open(tmp_path / "other.db") as other:
        assert other.import_file(saved).added >= 6 and len(other.select(Measurement)) == 3


def test_no_database_is_asked_for(tmp_path: Path, fake: type[FakeSession]) -> None:
    done = run("--from", captured(tmp_path), "--db", ":none:")
    assert done.exit_code == 0 and "whole plan" in done.output and "the database is :none:" in done.output
    assert not list(tmp_path.glob("svod-tuned-*"))


def test_the_targets_that_are_tuned_for_are_chosen_among_those_present() -> None:
    own, far, wide = search_kernels.TARGET, replace(search_kernels.TARGET, cpu="far"), replace(search_kernels.TARGET, cpu="far", threads=64)
    assert choose_targets((), [far, own], own) == [own] and choose_targets((), [far], own) == [far]
    assert choose_targets(("far", own.key), [far, own], own) == [far, own]
    assert choose_targets((far.key, "far"), [far], own) == [far], "once, however often it is named"
    assert choose_targets(("t64", far.key), [far, wide], own) == [wide, far]
    less = replace(own, threads=1)
    assert choose_targets(("znver4/avx512f,fma/l1 32k/l2 1m/l3 32m/t1",), [own], less) == [less], "own options count where a machine fits"
    for asked, present, words in ((("nobody",), [own, far], "--target nobody fits no target; present: .*/far/.*/znver4/"),
                                  (("far",), [far, wide], "--target far fits several targets; present: .*t2; .*t64"),
                                  ((), [far, wide], "no machine of the cluster times this machine's target .*znver4.*choose with --target"),
                                  (("far",), [], "present: none, no machine of the cluster times")):
        with pytest.raises(ConfigError, match=words):
            choose_targets(asked, present, own)


def test_each_target_of_a_cluster_is_searched_and_reported(tmp_path: Path, fake: type[FakeSession],
                                                           monkeypatch: pytest.MonkeyPatch) -> None:
    """This machine's plans are checked; the other target's times are its own. A target that cannot be searched costs the status alone."""
    far = replace(TARGET, cpu="far", threads=8)
    searched: list[str] = []

    def begin(self: FakeSession, tasks: Any, target: Any, **others: Any) -> None:
        searched.append(target.key)
        if len(searched) == 5:
            raise TuneError("no worker is left that can bench")
        FakeSession.__init__(self, tasks, target, **others)
    monkeypatch.setattr(tune_run, "TuneSession", type("Session", (FakeSession,), {"__init__": begin}))
    monkeypatch.setattr(NoExecutor, "result", lambda self, seconds: InlineExecutor())
    monkeypatch.setattr(InlineExecutor, "targets", lambda self: [TARGET, far])
    file, db, report = captured(tmp_path), str(tmp_path / "t.db"), tmp_path / "r.json"
    arguments = ("--from", file, "--db", db, "--address", "auto", "--json", str(report))
    assert run(*arguments).exit_code == 0 and searched == [TARGET.key]
    assert {k["target"] for k in json.loads(report.read_text())["kernels"]} == {TARGET.key}
    both = run(*arguments, "--fresh", "--target", "far", "--target", TARGET.key)
    assert both.exit_code == 0 and searched[1:] == [far.key, TARGET.key]
    assert f"\ntarget {far.key}\n" in both.output and f"\ntarget {TARGET.key}\n" in both.output
    data = json.loads(report.read_text())
    assert {k["target"] for k in data["kernels"]} == {TARGET.key, far.key} and data["search"]["proposed"] == 80 and data["plans"]
    assert "--target far --target t2" in TuneOptions("m.py", target=("far", "t2")).command_line()
    alone = run(*arguments, "--fresh", "--target", "far")
    assert alone.exit_code == 0 and searched[3:] == [far.key] and not json.loads(report.read_text())["plans"]
    failed = run(*arguments, "--fresh", "--target", "far", "--target", TARGET.key)
    assert failed.exit_code == 1 and f"{far.key}: no worker is left" in failed.output and searched[4:] == [far.key, TARGET.key]
    refused = run(*arguments, "--target", "nobody")
    assert isinstance(refused.exception, ConfigError) and "--target nobody fits no target; present: " in str(refused.exception)


def test_without_workers(tmp_path: Path, fake: type[FakeSession], monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(self: Any, seconds: float | None) -> None:
        raise TuneError("no worker could be started: out of processes")
    monkeypatch.setattr(NoExecutor, "result", fail)
    done = run("--from", captured(tmp_path), "--db", str(tmp_path / "t.db"))
    assert done.exit_code == 1 and "no worker could be started" in done.output and "Traceback" not in done.output


# -- for real -----------------------------------------------------------------------------------------------------------

@pytest.mark.slow
def test_end_to_end(tmp_path: Path) -> None:
    """A real script, a real search on a local worker; then again, with everything known."""
    path = script(tmp_path, MODEL + "print(sys.stdin.read())\nraise RuntimeError('late')")
    arguments = (path, "--db", str(tmp_path / "t.db"), "--workers", "local:1", "--budget", "20", "--beam", "2",
                 "--json", str(tmp_path / "r.json"))
    env = {"SVOD_OBJECT_CACHE": str(tmp_path / "objects"), "XDG_DATA_HOME": str(tmp_path / "data")}
    done = main(tmp_path, *arguments, stdin="to the script", **env)
    assert done.returncode == 3, done.stderr
    assert done.stdout.splitlines()[1:] == ["to the script"], "stdout is the script's"
    assert "ended with status 1; tuning the 1 kernel" in done.stderr and "whole plan" in done.stderr
    [kernel] = json.loads((tmp_path / "r.json").read_text())["kernels"]
    assert kernel["verified"] and kernel["source"] == "database" and kernel["tuned_seconds"] > 0
    done = main(tmp_path, *arguments, **env)
    with TuningDB.open(tmp_path / "t.db", read_only=True) as db:
        first = [s for s, _ in db.select(Search) if s.ended_at is not None]
    assert first[0].config["budget"] == 20.0, "the budget that was given"
    left = what_is_left(first[:1], replace(BEAM, width=2))
    assert done.returncode == 3 and ("nothing to search with beam 2, 1 known" if left is None else "1 kernel to search") in done.stderr


STUBBORN = """
import sys, time
from svod.cli import run_command
from svod.cli.tune import run
from svod.tune.session import SessionResult
class Stubborn:
    def __init__(self, *a, **k):
        self.result = SessionResult()
    def run(self):
        while True:
            try:
                print("busy", file=sys.stderr, flush=True)
                time.sleep(100)
            except KeyboardInterrupt:
                pass
run.TuneSession = Stubborn
run_command("svod-tune", "svod.cli.tune.command")
"""


@pytest.mark.slow
def test_the_third_ctrl_c_ends_at_once(tmp_path: Path) -> None:
    command = [sys.executable, "-c", STUBBORN, "--from", captured(tmp_path), "--db", str(tmp_path / "t.db"), "--workers", "inline"]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True, cwd=tmp_path,
                          env={**os.environ, "PYTHONPATH": str(ROOT), "HOME": str(tmp_path)}) as process:
        assert process.stderr is not None
        said = []
        for line in process.stderr:
            said.append(line)
            if line == "busy\n":
                process.send_signal(signal.SIGINT)
        assert process.wait(60) == 130
    assert said.count("busy\n") == 3 and "ended at once" in said[-1] and "Traceback" not in "".join(said)


def test_waiting_is_said(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(waiting, "SILENCE", 60.0)
    with waiting.waiting("starting the workers"):
        waiting.say("a line")
    assert capsys.readouterr().err == "a line\n", "what ends soon says nothing"
    monkeypatch.setattr(waiting, "SILENCE", 0.0)
    told = threading.Event()
    monkeypatch.setattr(waiting, "say", lambda text: (print(text, file=sys.stderr), told.set()))
    with waiting.waiting("starting the workers"):
        assert told.wait(60)
    assert capsys.readouterr().err == "svod-tune: starting the workers …\n"
    monkeypatch.undo()
    monkeypatch.setattr(sys, "stderr", terminal := Terminal())
    monkeypatch.setenv("TERM", "xterm")
    with waiting.waiting("starting [the] workers"):
        waiting.say("a [line]")
    shown = terminal.getvalue()
    assert "starting [the] workers" in shown and "a [line]\n" in shown and "0:00:00" in shown
    assert shown.rstrip().endswith("\x1b[2K"), "the line is taken away"


@pytest.mark.slow
def test_ctrl_c_ends_first_the_script_then_the_tuning(tmp_path: Path) -> None:
    path = script(tmp_path, MODEL + "import time\ntime.sleep(100)")
    command = [sys.executable, "-m", "svod.cli.tune", path, "--db", str(tmp_path / "t.db"), "--workers", "local:1", "--budget", "60"]
    env = {**os.environ, "PYTHONPATH": str(ROOT), "HOME": str(tmp_path), "SVOD_OBJECT_CACHE": str(tmp_path / "objects")}
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=tmp_path, env=env)
    assert process.stdout is not None and process.stderr is not None
    try:
        assert "__main__" in process.stdout.readline()
        process.send_signal(signal.SIGINT)
        said = []
        for line in process.stderr:
            said.append(line)
            if line.startswith("svod-tune: searching"):
                time.sleep(0.8)
                process.send_signal(signal.SIGINT)
        process.wait(60)
    finally:
        process.kill()
        process.communicate()
    text = "".join(said)
    assert "was ended by Ctrl-C; the next Ctrl-C ends the tuning" in text and "Traceback" not in text
    assert process.returncode == 130 and ("stored in" in text or "kept in" in text), text
    with TuningDB.open(tmp_path / "t.db", read_only=True) as db:
        assert db.problem is None and db.select(Search)
