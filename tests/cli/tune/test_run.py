"""The steps of svod-tune, with a session that is not a search."""
from __future__ import annotations

import json
import os
import re
import signal
import socket
import sqlite3
import time
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from svod.bench.race import Ratio
from svod.cli.installation import program
from svod.cli.tune import capturing, ending, setting, workers
from svod.cli.tune import script as script_module
from svod.cli.tune.options import TuneOptions
from svod.cli.tune.plans import checks
from svod.errors import ConfigError, FileError, TuneError
from svod.system.quantities import seconds as in_words
from svod.tune.db import Measurement, TuningDB, files
from svod.tune.db.moving import import_file
from svod.tune.lock import Locked, locked_lines, write_lock
from svod.tune.plans.check import Gain, InPlan, name_of
from svod.tune.search.confirmation import Finding
from svod.tune.session import SessionResult
from svod.tune.workers.executor import InlineExecutor
from tests.cli.tune.commands import TARGET, FakeSession, NoExecutor, captured, run, script
from tests.draws import a_half


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


@pytest.mark.parametrize(("given", "kind"), [
    ({"budget": 19.0}, "local"), ({"budget": 20.0}, "ray"), ({"budget": 4.0, "workers": "ray:1"}, "ray:1"),
    ({"budget": 4.0, "address": "auto"}, "ray"), ({"budget": 4.0, "workers": "local:3"}, "local:3")])
def test_small_budgets_are_not_spent_on_starting_ray(given: dict[str, Any], kind: str) -> None:
    assert workers.kind_of(replace(TuneOptions("m.py"), **given)) == kind


def _leave_all(self: FakeSession) -> SessionResult:
    """A session whose budget is over when it begins."""
    self.result.unbegun = tuple(t.key for t in self.tasks)
    return self.result


@pytest.mark.parametrize("kind", ["ray", "local"])
def test_a_budget_that_was_over_before_the_search_is_status_1(tmp_path: Path, fake: type[FakeSession], monkeypatch: pytest.MonkeyPatch,
                                                              kind: str) -> None:
    monkeypatch.setattr(fake, "run", _leave_all)
    begun = time.monotonic() - 15.0
    monkeypatch.setattr(workers.Workers, "ready", lambda self: setattr(self._clock, "_started", begun) or InlineExecutor())
    done = run("--from", captured(tmp_path), "--db", str(tmp_path / "t.db"), "--budget", "20", "--workers", kind)
    report = done.output.partition("\n\n")[2]
    assert done.exit_code == 1, done.output
    assert re.search(r"^nothing was searched: .* of 20 s was over before .*\(waiting for the workers took 1\d\.\d s\)$", report, re.M)
    steps = re.findall(r"^(?:next|or): .*", report, re.M)
    assert " --budget 40 " in steps[0] and "3 kernels for which the budget was too short" in steps[0]
    assert [" --workers local " in s and " --budget 20 " in s for s in steps[1:]] == [True] * (kind == "ray")
    assert report.rstrip().endswith(steps[-1])


@pytest.mark.parametrize(("budget", "check"), a_half([(1.0, 0.5), (4.0, 0.6), (100.0, 4.0)]))
def test_the_plan_check_is_kept_back_from_the_budget(tmp_path: Path, fake: type[FakeSession], budget: float, check: float) -> None:
    assert run("--from", captured(tmp_path), "--db", str(tmp_path / "t.db"), "--budget", str(budget)).exit_code == 0
    assert fake.checked[0] == pytest.approx(check)
    [(_, searched)] = fake.begun
    assert 0 <= searched <= budget - check
    assert budget < 100 or searched > budget / 2


def test_chains_that_lose_inside_the_plan_are_given_up_and_said(tmp_path: Path, fake: type[FakeSession],
                                                               monkeypatch: pytest.MonkeyPatch) -> None:
    file, db, report = captured(tmp_path), str(tmp_path / "t.db"), tmp_path / "r.json"
    actual = checks.check_plan

    def check(unbound: Any, heuristic: Any, tuned: Any, *a: Any, **k: Any) -> Any:
        slower = tuple(InPlan(key, 1, None, Gain(1e-6, 2e-6), 0.0, 0.0, ratio=Ratio(2.0, 1.9, 2.1)) for key in unbound.kernels
                       if "gemm" in name_of(unbound, key) and heuristic[key].chain != tuned[key].chain)
        return replace(actual(unbound, heuristic, tuned, *a, **k), kernels=slower, noisy=None)
    monkeypatch.setattr(checks, "check_plan", check)
    done = run("--from", file, "--db", db, "--json", str(report))
    assert done.exit_code == 0 and "given up, as they lose here what they gain alone" in done.output
    assert "gemm (block.linear): inside the plan its chain takes 2.00 µs, the heuristic's 1.00 µs" in done.output
    data = json.loads(report.read_text())
    assert {k["name"]: k["source"] for k in data["kernels"]}["gemm"] == "heuristic"
    assert [line[:19] for p in data["plans"] for line in p["given_up"]] == ["gemm (block.linear)"]


def test_nothing_is_timed_long_after_the_budget(tmp_path: Path, fake: type[FakeSession], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(setting, "LATE_SECONDS", -1e3)
    done = run("--from", captured(tmp_path), "--db", str(tmp_path / "t.db"), "--budget", "1")
    assert done.exit_code == 0 and "a whole plan was not timed, as the budget is over" in done.output and not fake.checked


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


def test_a_lock_pins_no_chain_that_was_not_measured(tmp_path: Path, fake: type[FakeSession], monkeypatch: pytest.MonkeyPatch) -> None:
    """The heuristic's chains of kernels whose turn did not come are not written, and lines that they had stay."""
    file, lock, complete = captured(tmp_path), tmp_path / "l.jsonl", fake.run

    def search_one(self: FakeSession) -> SessionResult:
        self.result.unbegun = tuple(t.key for t in self.tasks[1:])
        self.tasks = self.tasks[:1]
        return complete(self)
    monkeypatch.setattr(fake, "run", search_one)
    done = run("--from", file, "--db", str(tmp_path / "t.db"), "-o", str(lock))
    assert "the chains of 1 kernel are in" in done.output and "; 2 kernels without a confirmed chain have no new line" in done.output
    [line] = locked_lines(lock).values()
    assert line.gain == pytest.approx(2.0)
    run("--from", file, "--dry-run", "--json", str(tmp_path / "dry.json"))
    keys = {k["kernel"] for k in json.loads((tmp_path / "dry.json").read_text())["kernels"]} - {line.kernel}
    earlier = Locked(min(keys), line.target, ())
    write_lock(lock, [earlier])
    run("--from", file, "--db", str(tmp_path / "u.db"), "-o", str(lock))
    assert set(locked_lines(lock).values()) == {line, earlier}


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
        raise FileError(f"{tmp_path / 'r.json'} cannot be written: No space left on device; make room")
    monkeypatch.setattr(ending, "write_text", full)
    arguments = ("--from", captured(tmp_path), "--db", str(tmp_path / "t.db"), "--json", str(tmp_path / "r.json"))
    for more in (), ("--dry-run",):
        done = run(*arguments, *more)
        assert done.exit_code == 4 and "r.json cannot be written: No space left on device" in done.output
    for db in (":none:", str(tmp_path / "t.db")):
        for option in ("-o", "--capture-to"):
            done = run("--from", captured(tmp_path), "--db", db, option, "/dev/full", "--fresh")
            assert done.exit_code == 4 and "/dev/full" in done.output and "are lost" not in done.output and "in a file" not in done.output


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
    monkeypatch.setattr(capturing, "run_script", lambda *a, **k: script_module.ScriptEnd("interrupted", -2, 1.0))
    done = run(script(tmp_path, ""), "--db", str(tmp_path / "u.db"))
    assert done.exit_code == 130 and "had prepared no kernel by then" in done.output


@pytest.mark.parametrize(("end", "status", "said"), a_half([
    (signal.SIGTERM, 143, "ended by SIGTERM; "), (signal.SIGHUP, 129, "ended by SIGHUP; "), (None, 1, "the cluster is gone; ")]))
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


@pytest.mark.parametrize("trouble", a_half(["foreign", "directory", "full"]))
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
        assert import_file(other, saved).added >= 6 and len(other.select(Measurement)) == 3


def test_no_database_is_asked_for(tmp_path: Path, fake: type[FakeSession]) -> None:
    done = run("--from", captured(tmp_path), "--db", ":none:")
    assert done.exit_code == 0 and "whole plan" in done.output and "the database is :none:" in done.output
    assert not list(tmp_path.glob("svod-tuned-*"))


def test_each_target_of_a_cluster_is_searched_and_reported(tmp_path: Path, fake: type[FakeSession],
                                                           monkeypatch: pytest.MonkeyPatch) -> None:
    """Plans are checked only for this machine's target. If another target cannot be searched, only the exit status changes."""
    far = replace(TARGET, cpu="far", threads=8)
    monkeypatch.setattr(fake, "lost", 5)
    monkeypatch.setattr(InlineExecutor, "targets", lambda self: [TARGET, far])
    file, db, report = captured(tmp_path), str(tmp_path / "t.db"), tmp_path / "r.json"
    arguments = ("--from", file, "--db", db, "--address", "auto", "--json", str(report))

    def searched() -> list[str]:
        return [target for target, _ in fake.begun]
    assert run(*arguments).exit_code == 0 and searched() == [TARGET.key]
    assert {k["target"] for k in json.loads(report.read_text())["kernels"]} == {TARGET.key}
    both = run(*arguments, "--fresh", "--target", "far", "--target", TARGET.key)
    assert both.exit_code == 0 and searched()[1:] == [far.key, TARGET.key]
    assert f"\ntarget {far.key}\n" in both.output and f"\ntarget {TARGET.key}\n" in both.output
    data = json.loads(report.read_text())
    assert {k["target"] for k in data["kernels"]} == {TARGET.key, far.key} and data["search"]["proposed"] == 80 and data["plans"]
    assert "--target far --target t2" in TuneOptions("m.py", target=("far", "t2")).command_line()
    alone = run(*arguments, "--fresh", "--target", "far")
    assert alone.exit_code == 0 and searched()[3:] == [far.key] and not json.loads(report.read_text())["plans"]
    failed = run(*arguments, "--fresh", "--target", "far", "--target", TARGET.key)
    assert failed.exit_code == 1 and f"{far.key}: no worker is left" in failed.output and searched()[4:] == [far.key, TARGET.key]
    refused = run(*arguments, "--target", "nobody")
    assert isinstance(refused.exception, ConfigError) and "--target nobody fits no target; present: " in str(refused.exception)


def test_without_workers(tmp_path: Path, fake: type[FakeSession], monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(self: Any, seconds: float | None) -> None:
        raise TuneError("no worker could be started: out of processes")
    monkeypatch.setattr(NoExecutor, "result", fail)
    done = run("--from", captured(tmp_path), "--db", str(tmp_path / "t.db"))
    assert done.exit_code == 1 and "no worker could be started" in done.output and "Traceback" not in done.output
