"""Runs a user's script while its kernels are captured, and ends it with every process it started.

The script runs as `__main__` in a child process with its own arguments and our standard streams. It ends by itself, after
`capture_for` seconds, with its share of the budget, when no new kernel has come for a while, or by Ctrl-C. It is ended in steps: a flag
file (its next `prepare` raises StopCapture), SIGTERM, SIGKILL. Processes that it leaves behind are ended too, as they would disturb the
timing.
"""
from __future__ import annotations

import math
import os
import signal
import subprocess
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, TextIO

from svod import config
from svod.system.process.program import python
from svod.system.process.system_files import processes_with
from svod.tune.capture import FLUSH_SECONDS, CaptureWatch, News, request_stop

IDLE_SECONDS = 30.0         # seconds without a new kernel after which the capture counts as complete
POLL_SECONDS = 0.1          # seconds between looks at the capture
STOP_SECONDS = 2 * FLUSH_SECONDS + 0.5      # seconds for a script to write its counts of runs and end by itself
SCRIPT_END_SECONDS = 0.5    # seconds for the processes of a script to end by themselves after it
TERM_SECONDS = 2.0          # seconds between SIGTERM and SIGKILL

Why = Literal["finished", "failed", "time", "share", "idle", "interrupted"]


def failure_of(status: int) -> str:
    """What an exit status other than 0 tells, in words. Negative statuses are those of signals."""
    if status < 0:
        with suppress(ValueError):
            return f"was killed by {signal.Signals(-status).name}"
    return f"ended with status {status}"


@dataclass(frozen=True)
class ScriptEnd:
    """The end of a script. `status` is that of subprocess, negative for a signal. `left_behind` counts its processes that outlived it."""

    why: Why
    status: int
    seconds: float
    left_behind: int = 0

    @property
    def failure(self) -> str:
        """The failure of the script in words; empty where it did not fail."""
        return failure_of(self.status) if self.why == "failed" else ""

    def words(self, script: str) -> list[str]:
        """Lines for the user about why the script was ended, if it did not end by itself, and about processes that it left running."""
        ended = {"time": f"{script} was ended after {self.seconds:.0f} s, as --capture-for asked",
                 "share": f"{script} was ended after {self.seconds:.0f} s, with its half of the budget (--capture-for S lets it run on)",
                 "idle": f"{script} was ended after {self.seconds:.0f} s: no new kernel for long (--capture-for S waits longer)",
                 "interrupted": f"{script} was ended by Ctrl-C; the next Ctrl-C ends the tuning"}
        words = [ended[self.why]] if self.why in ended else []
        if self.left_behind:
            words.append(f"{self.left_behind} process{'es' * (self.left_behind > 1)} that {script} had started and left running "
                         f"{'were ended, as they' if self.left_behind > 1 else 'was ended, as it'} would disturb the timing")
        return words


def run_script(words: Sequence[str], directory: Path, *, capture_for: float | None = None, idle: float = IDLE_SECONDS,
               first: float = IDLE_SECONDS, share: float = math.inf, on_news: Callable[[News], None] = lambda news: None,
               clock: Callable[[], float] = time.monotonic, stdout: TextIO | None = None, device: str | None = None,
               numerics: str | None = None, kernels_of: str | None = None) -> ScriptEnd:
    """Run a program with captures in `directory` until it ends or `capture_for` seconds have passed. `words`: a script, or -m and a module,
    and its arguments. Without `capture_for` it is ended after `first` seconds without any kernel (it may have much to load), after `idle`
    seconds without a new kernel, or after `share` seconds if there is a plan by then. `on_news` is called with new kernels and plans as
    they come. `stdout`: the program's standard output; None: this process's. `device`: the program's SVOD_DEVICE; None: this process's.
    `numerics`: its SVOD_NUMERICS, likewise. `kernels_of`: the device whose kernels are captured; None: the device that the program runs on.

    When this returns or raises, the script and its processes are gone. A second KeyboardInterrupt, while the script is being ended, is
    raised. Raises OSError when the script cannot be started."""
    started = last_new = clock()
    watch = CaptureWatch(directory)
    child = subprocess.Popen([python(), *words], env=script_environment(directory, device, kernels_of, numerics), stdout=stdout)
    why: Why = "finished"
    patience, has_plan = max(first, idle), False
    try:
        try:
            while child.poll() is None:
                with suppress(subprocess.TimeoutExpired):
                    child.wait(POLL_SECONDS)
                news = watch.poll()
                now = clock()
                if news:
                    last_new, patience, has_plan = now, idle, has_plan or bool(news.plans)
                    on_news(news)
                if child.poll() is None:
                    if capture_for is not None and now - started >= capture_for:
                        why = "time"
                        break
                    if capture_for is None and now - last_new >= patience:
                        why = "idle"
                        break
                    if capture_for is None and now - started >= share and has_plan:
                        why = "share"
                        break
        except KeyboardInterrupt:
            why = "interrupted"
        if why == "finished":
            why = "finished" if child.returncode == 0 else "failed"
        else:
            _end_child(child, directory)
    finally:
        if child.poll() is None:
            child.kill()
            child.wait()
        left = _end_processes(directory)
    return ScriptEnd(why, child.returncode, clock() - started, left)


def script_environment(directory: Path, device: str | None = None, kernels_of: str | None = None,
                       numerics: str | None = None) -> dict[str, str]:
    """The environment variables of the script: its kernels for the device `kernels_of` are captured, it does not search, it runs on
    `device` under the policy `numerics`, and it can import this svod even from a checkout."""
    named = {"SVOD_DEVICE": device, "SVOD_CAPTURE_DEVICE": kernels_of, "SVOD_NUMERICS": numerics}
    given = {name: value for name, value in named.items() if value is not None}
    return config.environment_with_svod(SVOD_CAPTURE=str(directory), BEAM=None, **given)


def _end_child(child: subprocess.Popen[bytes], directory: Path) -> None:
    request_stop(directory)
    for seconds, signal_ in ((STOP_SECONDS, signal.SIGTERM), (TERM_SECONDS, signal.SIGKILL)):
        with suppress(subprocess.TimeoutExpired):
            child.wait(seconds)
            return
        child.send_signal(signal_)
    child.wait()


def _end_processes(directory: Path) -> int:
    """End the processes that the script has left running, unless they soon end by themselves, as multiprocessing's helpers do. Returns
    their number. They have SVOD_CAPTURE in their environment, which survives daemonising; without /proc none are found."""
    end = time.monotonic() + SCRIPT_END_SECONDS
    while (pids := processes_with(f"SVOD_CAPTURE={directory}")) and time.monotonic() < end:
        time.sleep(0.05)
    if not pids:
        return 0
    _signal_all(pids, signal.SIGTERM)
    end = time.monotonic() + TERM_SECONDS
    while (left := processes_with(f"SVOD_CAPTURE={directory}")) and time.monotonic() < end:
        time.sleep(0.02)
    _signal_all(left, signal.SIGKILL)
    return len(pids)


def _signal_all(pids: Sequence[int], what: signal.Signals) -> None:
    for pid in pids:
        with suppress(ProcessLookupError, PermissionError):
            os.kill(pid, what)
