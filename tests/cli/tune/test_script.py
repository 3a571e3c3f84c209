"""The script of svod-tune: its start, and the ways in which it ends."""
from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from svod.cli.tune import script as script_module
from svod.cli.tune.script import run_script
from svod.system.process.system_files import processes_with
from svod.tune import capture
from tests.cli.tune.commands import MODEL, ROOT, script
from tests.patience import NEVER


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
    """A clock that tests can set forward."""

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
    """The first kernel is waited for longer than later ones: the import of svod alone takes longer than the script may be idle later."""
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
        assert process.wait(NEVER) == 129 and not Path(f"/proc/{child}").exists()
