"""svod-tune with real scripts, searches and signals."""
from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from svod.tune.db import Search, TuningDB
from svod.tune.unfinished import what_is_left
from tests.cli.tune.commands import BEAM, MODEL, ROOT, captured, main, script
from tests.patience import NEVER


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
from svod.cli.tune import searching
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
searching.TuneSession = Stubborn
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
        assert process.wait(NEVER) == 130
    assert said.count("busy\n") == 3 and "ended at once" in said[-1] and "Traceback" not in "".join(said)


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
        said: list[str] = []
        for line in process.stderr:
            if line.startswith("[") and not any(earlier.startswith("[") for earlier in said):     # the first line about the search
                process.send_signal(signal.SIGINT)
            said.append(line)
        process.wait(NEVER)
    finally:
        process.kill()
        process.communicate()
    text = "".join(said)
    assert "was ended by Ctrl-C; the next Ctrl-C ends the tuning" in text and "Traceback" not in text
    assert process.returncode == 130 and ("stored in" in text or "kept in" in text), text
    with TuningDB.open(tmp_path / "t.db", read_only=True) as db:
        assert db.problem is None and db.select(Search)
