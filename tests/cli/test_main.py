"""Common parts of the command lines: `python -m svod`, completion in shells."""
from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

import svod
from svod.cli import completion_variable
from svod.tune.db import TuningDB
from tests.draws import a_half
from tests.tune.db.samples import winning

ROOT = Path(__file__).parents[2]


def python(*arguments: str, **env: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, *arguments], capture_output=True, text=True, cwd=ROOT, check=False, env={**os.environ, **env})


@pytest.mark.slow
def test_python_m_svod_lists_the_tools_and_runs_them() -> None:
    listed = python("-m", "svod")
    assert listed.returncode == 0 and all(f"svod-{tool}" in listed.stdout for tool in ("tune", "db", "bench"))
    wrong = python("-m", "svod", "tuen")
    assert wrong.returncode == 2 and "there is no tool 'tuen'" in wrong.stderr and "svod-tune" in wrong.stderr and not wrong.stdout
    for tool in ("tune", "db", "bench"):
        shown = python("-m", "svod", tool, "--version")
        assert (shown.returncode, shown.stdout) == (0, f"svod {svod.__version__}\n")
    assert python("-m", "svod", "tune", "none.py").stderr.startswith("Usage: svod-tune")


@pytest.mark.slow
@pytest.mark.parametrize(("tool", "words", "completed"), [
    ("tune", "svod-tune --bu", "--budget"), ("tune", "svod-tune --actions ref", "reference"), ("db", "svod-db sh", "show"),
    ("bench", "svod-bench ce", "ceilings")])
def test_shells_complete_commands_and_options(tool: str, words: str, completed: str) -> None:
    done = python("-m", "svod", tool, COMP_WORDS=words, COMP_CWORD=str(words.count(" ")),
                  **{completion_variable(f"svod-{tool}"): "bash_complete"})
    assert done.returncode == 0 and done.stdout == f"plain,{completed}\n" and not done.stderr


@pytest.mark.parametrize("shell", a_half(["bash", "zsh"]))
def test_what_a_shell_evaluates_defines_a_completion(shell: str) -> None:
    done = python("-m", "svod", "tune", **{completion_variable("svod-tune"): f"{shell}_source"})
    assert done.returncode == 0 and "_SVOD_TUNE_COMPLETE" in done.stdout and "svod-tune" in done.stdout
    if shell == "bash":
        assert subprocess.run(["bash", "-n"], input=done.stdout, text=True, check=False).returncode == 0


def test_kernels_of_the_database_are_completed(tmp_path: Path) -> None:
    with TuningDB.open(tmp_path / "t.db") as db:
        db.record(winning(0.5, "aa", "a1" * 16))
    done = python("-m", "svod", "db", SVOD_TUNE_DB=str(tmp_path / "t.db"), COMP_WORDS="svod-db show a1", COMP_CWORD="2",
                  _SVOD_DB_COMPLETE="bash_complete")
    assert "plain,a1a1a1a1a1a1" in done.stdout.splitlines()


def test_dir_shows_the_public_names() -> None:
    assert set(svod.__all__) <= set(dir(svod)) <= {*svod.__all__, "__version__"}
    assert all(getattr(svod, name) is not None for name in dir(svod))
