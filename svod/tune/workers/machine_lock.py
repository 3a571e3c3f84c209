"""One timing at a time on a device, over all svod processes of the machine.

Two searches that time kernels at once disturb each other. A bench worker holds this lock while it times. The operating system releases it
when the process dies. The lock is `flock` on two files per device:

    svod-bench-CPU.lock   held while timing; its text names the holder
    svod-bench-CPU.next   held by the process that waits for the first lock and gets it next: a process that has just released the first
                          lock cannot take it again before that process

The files are in the machine's common temporary directory, not in a user's runtime directory, because users share the cores. They are never
deleted: two holders could then lock two different inodes of one name.
"""
from __future__ import annotations

import contextlib
import fcntl
import logging
import os
import re
import time
from collections.abc import Callable
from pathlib import Path

from svod.core.machine.target import HOST
from svod.errors import TuneError
from svod.system.process import program
from svod.system.process.directories import common_temporary

log = logging.getLogger("svod.tune")
POLL = 0.02             # seconds between attempts to lock
ANNOUNCE_AFTER = 0.5    # seconds of waiting for the lock before a first message says so
ANNOUNCE_EVERY = 30.0   # seconds between further messages about the wait


def lock_directory() -> Path:
    """The directory of lock files. Raises TuneError where no directory for temporary files can be written."""
    try:
        return common_temporary()
    except OSError as e:
        raise TuneError(f"nothing can be timed: {e}") from None


class MachineLock:
    """The exclusive right to time on `device` ("CPU", "CUDA:0"). `acquire` and `release` are idempotent. Not thread-safe."""

    def __init__(self, device: str = HOST, directory: Path | None = None) -> None:
        self.device = device
        name = "svod-bench-" + re.sub(r"[^A-Za-z0-9]+", "-", device)
        self._path = (directory or lock_directory()) / f"{name}.lock"
        self._next_path = self._path.with_suffix(".next")
        self._fd: int | None = None     # descriptor of the locked file; None while the lock is not held

    @property
    def held(self) -> bool:
        return self._fd is not None

    def acquire(self, stop: Callable[[], bool] = lambda: False) -> bool:
        """Wait until this process may time. A wait longer than ANNOUNCE_AFTER is logged. False when `stop()` became true first. Raises
        TuneError when the lock file cannot be opened at all."""
        if self._fd is not None:
            return True
        started = time.monotonic()
        announced = started + ANNOUNCE_AFTER
        with contextlib.ExitStack() as opened:
            for path in (self._next_path, self._path):
                fd = _open(path)
                opened.callback(os.close, fd)
                while not _try_lock(fd):
                    if stop():
                        return False
                    if time.monotonic() >= announced:
                        log.warning("waiting to time on %s: %s is timing", self.device, self.holder() or "another svod process")
                        announced = time.monotonic() + ANNOUNCE_EVERY
                    time.sleep(POLL)
            self._fd = os.dup(fd)       # the duplicate keeps the lock after `opened` closes both descriptors
        waited = time.monotonic() - started
        if waited > ANNOUNCE_AFTER:
            log.info("timing on %s after a wait of %.1f s", self.device, waited)
        with contextlib.suppress(OSError):      # opened read-only, or the disk is full: the lock is held, only its label is missing
            os.ftruncate(self._fd, 0)
            os.pwrite(self._fd, f"process {os.getpid()} ({program.name()})".encode(), 0)
        return True

    def wait_for_others(self, seconds: float) -> None:
        """Wait while another process times, for at most `seconds`. For work that does not time anything and would disturb a timing."""
        end = time.monotonic() + seconds
        with contextlib.suppress(TuneError):        # nobody times where the file cannot be opened
            fd = _open(self._path)
            try:
                while not _try_lock(fd) and time.monotonic() < end:
                    time.sleep(POLL)
            finally:
                os.close(fd)

    def release(self) -> None:
        """Release the lock, so that the next process may time."""
        if self._fd is not None:
            with contextlib.suppress(OSError):
                os.ftruncate(self._fd, 0)
            os.close(self._fd)
            self._fd = None

    def holder(self) -> str:
        """The process that holds the lock, as it describes itself, e.g. `process 4242 (svod-tune)`; "" when unknown."""
        with contextlib.suppress(OSError, UnicodeDecodeError):
            return self._path.read_text()[:200].strip()
        return ""


def _open(path: Path) -> int:
    """Open or create a lock file that any user may lock. A symbolic link is refused, as every user may write to the directory."""
    flags = os.O_CLOEXEC | os.O_NOFOLLOW
    for attempt in (os.O_RDWR, os.O_RDWR | os.O_CREAT | os.O_EXCL, os.O_RDWR, os.O_RDONLY):
        # first without O_CREAT, which Linux refuses for another user's file in a sticky directory
        try:
            fd = os.open(path, attempt | flags, 0o666)
        except OSError as e:
            error = e
            continue
        if attempt & os.O_CREAT:
            with contextlib.suppress(OSError):
                os.fchmod(fd, 0o666)            # despite the umask: other users must be able to lock it
        return fd
    raise TuneError(f"cannot open the lock file {path}: {error.strerror}; timing needs it so that two searches do not disturb each other")


def _try_lock(fd: int) -> bool:
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True
