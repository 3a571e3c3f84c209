"""Signal handlers and masks that a process inherits."""
from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from types import FrameType

import pytest

from svod.system.process import signals


@pytest.fixture(autouse=True)
def restored() -> Iterator[None]:
    before = {number: signal.getsignal(number) for number in (signal.SIGHUP, signal.SIGCHLD, signal.SIGUSR1)}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


def test_what_is_ignored_stays_ignored() -> None:
    """An ignored signal stays ignored, such as SIGHUP under nohup, and SIGINT in a shell's background jobs."""
    seen: list[int] = []

    def note(number: int, frame: FrameType | None) -> None:
        seen.append(number)
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    signal.signal(signal.SIGUSR1, signal.SIG_DFL)
    with signals.handled({signal.SIGHUP: note, signal.SIGUSR1: note}):
        os.kill(os.getpid(), signal.SIGHUP)
        os.kill(os.getpid(), signal.SIGUSR1)
    assert seen == [signal.SIGUSR1]
    assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN and signal.getsignal(signal.SIGUSR1) is signal.SIG_DFL
    signals.end_by(signal.SIGHUP)
    assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN


def test_handlers_are_set_by_the_main_thread_only() -> None:
    results: list[bool] = []
    thread = threading.Thread(target=lambda: results.append(signals.handle(signal.SIGUSR1, lambda *_: None)))
    thread.start()
    thread.join()
    assert results == [False]


def test_the_status_of_a_child_is_known_where_sigchld_was_ignored() -> None:
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    failing = [sys.executable, "-S", "-c", "raise SystemExit(7)"]
    assert subprocess.run(failing, check=False).returncode == 0, "which is why"
    signals.learn_of_children()
    assert subprocess.run(failing, check=False).returncode == 7


def test_a_worker_begins_with_nothing_blocked_or_ignored() -> None:
    program = ("import signal; from svod.system.process.signals import begin_as_worker; begin_as_worker(); "
               "assert not signal.pthread_sigmask(signal.SIG_BLOCK, ()); "
               "assert signal.getsignal(signal.SIGALRM) is signal.SIG_DFL and signal.getsignal(signal.SIGCHLD) is signal.SIG_DFL; "
               "assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN")

    with signals.interrupt_blocked():
        signal.signal(signal.SIGCHLD, signal.SIG_IGN)
        child = subprocess.Popen([sys.executable, "-c", program])
        signals.learn_of_children()
    assert child.wait() == 0
