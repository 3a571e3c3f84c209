"""The machine lock: it has one holder at a time, also within a process; the holder's death releases it; waiting is announced and can be
stopped."""
from __future__ import annotations

import logging
import math
import os
import stat
import subprocess
import sys
import threading
from pathlib import Path
from types import SimpleNamespace

import pytest

from svod.errors import TuneError
from svod.system.process.program import package_roots
from svod.tune.workers import machine_lock
from svod.tune.workers.machine_lock import MachineLock, lock_directory
from tests.patience import wait_until

HOLD = """import sys; sys.path.insert(0, sys.argv[2])
from pathlib import Path
from svod.tune.workers.machine_lock import MachineLock
lock = MachineLock("CPU", Path(sys.argv[1])); lock.acquire(); print("held", flush=True); sys.stdin.read()
"""


def hold_elsewhere(directory: Path) -> subprocess.Popen[str]:
    other = subprocess.Popen([sys.executable, "-c", HOLD, str(directory), package_roots()[0]], stdin=subprocess.PIPE,
                             stdout=subprocess.PIPE, text=True)
    assert other.stdout is not None and other.stdout.readline() == "held\n"
    return other


def never_wait() -> bool:
    return True


def test_one_holder_at_a_time(tmp_path: Path) -> None:
    a, b = MachineLock("CPU", tmp_path), MachineLock("CPU", tmp_path)
    assert a.acquire() and a.acquire() and a.held
    assert not b.acquire(never_wait) and not b.held
    assert a.holder().startswith(f"process {os.getpid()}")
    a.release()
    a.release()
    assert b.acquire(never_wait)
    b.release()


def test_devices_do_not_wait_for_each_other(tmp_path: Path) -> None:
    a, b = MachineLock("CPU", tmp_path), MachineLock("CUDA:0", tmp_path)
    assert a.acquire() and b.acquire(never_wait)
    a.release()
    b.release()


def test_a_killed_holder_lets_go_and_waiting_is_announced(tmp_path: Path, caplog: pytest.LogCaptureFixture,
                                                          monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("svod.tune.workers.machine_lock.ANNOUNCE_AFTER", 0.05)
    other = hold_elsewhere(tmp_path)
    threading.Thread(target=lambda: wait_until(lambda: "waiting to time" in caplog.text) and other.kill()).start()
    lock = MachineLock("CPU", tmp_path)
    with caplog.at_level(logging.INFO, "svod.tune"):
        assert lock.acquire()
    lock.release()
    other.communicate()
    assert f"waiting to time on CPU: process {other.pid}" in caplog.text and "after a wait of" in caplog.text


def test_who_asks_again_queues_behind_who_waits(tmp_path: Path) -> None:
    first, second = MachineLock("CPU", tmp_path), MachineLock("CPU", tmp_path)
    assert first.acquire()
    thread = threading.Thread(target=second.acquire)
    thread.start()
    probe = MachineLock("CPU", tmp_path)
    while not probe._next_path.exists() or MachineLock("CPU", tmp_path).acquire(never_wait):
        pass
    import fcntl
    fd = os.open(probe._next_path, os.O_RDWR)
    try:
        while True:     # until the other thread holds its place in the queue
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                break
            fcntl.flock(fd, fcntl.LOCK_UN)
    finally:
        os.close(fd)
    first.release()
    assert not first.acquire(never_wait) or second.held
    thread.join()
    assert second.held
    second.release()


def test_files_can_be_locked_by_other_users(tmp_path: Path) -> None:
    before = os.umask(0o077)
    try:
        lock = MachineLock("CPU", tmp_path)
        assert lock.acquire()
    finally:
        os.umask(before)
    lock.release()
    assert {stat.S_IMODE(p.stat().st_mode) for p in tmp_path.iterdir()} == {0o666}


def test_no_symbolic_link_is_followed(tmp_path: Path) -> None:
    target = tmp_path / "precious"
    target.write_text("keep")
    (tmp_path / "svod-bench-CPU.lock").symlink_to(target)
    with pytest.raises(TuneError, match="lock file"):
        MachineLock("CPU", tmp_path).acquire()
    assert target.read_text() == "keep"


def test_a_missing_directory_is_named(tmp_path: Path) -> None:
    with pytest.raises(TuneError, match="nowhere"):
        MachineLock("CPU", tmp_path / "nowhere").acquire()


def test_the_directory_exists() -> None:
    assert lock_directory().is_dir()


def test_others_are_waited_for_and_not_for_ever(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The compilers of one search pause while another search times, for a limited time, and take no lock for it."""
    ours, theirs = MachineLock("TEST", tmp_path), MachineLock("TEST", tmp_path)
    now, released = 0.0, math.inf

    def sleep(seconds: float) -> None:
        nonlocal now
        now += seconds
        if now >= released:
            theirs.release()
    monkeypatch.setattr(machine_lock, "time", SimpleNamespace(monotonic=lambda: now, sleep=sleep))
    ours.wait_for_others(5.0)
    assert now == 0.0, "nobody times"
    assert theirs.acquire()
    ours.wait_for_others(0.2)
    assert 0.2 <= now < 0.2 + 2 * machine_lock.POLL
    released = now + 0.2
    ours.wait_for_others(20.0)
    assert released <= now < released + 2 * machine_lock.POLL
    assert theirs.acquire(lambda: True), "waiting has locked nothing"
    theirs.release()
