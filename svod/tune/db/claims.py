"""Who searches what right now: so that two processes on one machine do not search the same kernel.

A claim is a row of `claims` with a heartbeat. A thread of the claiming process renews it every few seconds; a claim that was silent for
30 s is void, and so is one whose process on this machine is gone. Claims are taken with BEGIN IMMEDIATE, so exactly one of many wins.
"""
from __future__ import annotations

import os
import socket
import sqlite3
import threading
import uuid
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, NamedTuple

from svod.system.forksafe import remake_after_fork

if TYPE_CHECKING:
    from typing import Self

SILENCE = 30.0   # seconds without a heartbeat that make a claim void
BEAT = 7.0       # seconds between heartbeats


class Holder(NamedTuple):
    """Who holds a claim."""

    kernel: str
    target: str
    host: str
    boot_id: str
    pid: int
    heartbeat: float
    since: float
    token: str


def boot_id() -> str:
    """Names the run of this machine, so that a process id is not mistaken for one from before a restart; "" where it has none."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    except OSError:
        return ""


def is_void(holder: Holder, now: float) -> bool:
    """Whether a claim no longer counts: silent for 30 s (or from a clock that far ahead), or its process on this machine is gone."""
    if abs(now - holder.heartbeat) > SILENCE:
        return True
    if holder.host == socket.gethostname() and holder.boot_id == boot_id() and holder.boot_id:
        try:
            os.kill(holder.pid, 0)
        except ProcessLookupError:
            return True
        except OSError:
            return False  # alive, but somebody else's
    return False


def take(conn: sqlite3.Connection, kernel: str, target: str, now: float) -> str | None:
    """Claim (kernel, target) inside a write transaction; the claim's token, or None where a live claim stands."""
    row = conn.execute("SELECT * FROM claims WHERE kernel = ? AND target = ?", (kernel, target)).fetchone()
    if row is not None and not is_void(holder_of(row), now):
        return None
    token = uuid.uuid4().hex
    conn.execute("INSERT OR REPLACE INTO claims(kernel, target, token, host, boot_id, pid, heartbeat, since) "
                 "VALUES (?, ?, ?, ?, ?, ?, ?, ?)",
                 (kernel, target, token, socket.gethostname(), boot_id(), os.getpid(), now, now))
    return token


def holder_of(row: sqlite3.Row) -> Holder:
    return Holder(*(row[name] for name in Holder._fields))


class Claim:
    """The right to search (kernel, target). A context manager; `release` is idempotent. It belongs to the process that took it: a forked
    child has no part in it.

    `renew` and `release` are the database's. `token` None: the database cannot be written, nobody else knows of the claim, and the search
    goes on all the same."""

    def __init__(self, kernel: str, target: str, token: str | None, renew: Callable[[Claim], bool],
                 release: Callable[[Claim], None]) -> None:
        self.kernel, self.target, self.token = kernel, target, token
        self._renew, self._release = renew, release
        self.pid = os.getpid()

    @property
    def is_ours(self) -> bool:
        """Whether this process took it, and not the one that it was forked from."""
        return self.pid == os.getpid()

    def renew(self) -> bool:
        """Say that the search is alive; False where the claim was lost (this process slept too long and another one took over) or is the
        parent's. The database's own heartbeat calls it as well; a long search need not."""
        return self.is_ours and (self.token is None or self._renew(self))

    def release(self) -> None:
        """Give it back; what a forked child inherited stays its parent's."""
        if self.is_ours:
            self._release(self)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.release()


class Heartbeat:
    """The thread that renews the claims of one database. A daemon: it ends with the process, and its claims become void."""

    def __init__(self) -> None:
        self.claims: set[Claim] = set()
        self.lock = threading.Lock()
        remake_after_fork(self, "lock", threading.Lock)
        self.stopped = threading.Event()
        self.thread: threading.Thread | None = None

    def add(self, claim: Claim) -> None:
        with self.lock:
            self.claims.add(claim)
            if self.thread is None:
                self.thread = threading.Thread(target=self._run, name="svod-claims", daemon=True)
                self.thread.start()

    def remove(self, claim: Claim) -> None:
        with self.lock:
            self.claims.discard(claim)

    def stop(self) -> None:
        self.stopped.set()

    def _run(self) -> None:
        while not self.stopped.wait(BEAT):
            with self.lock:
                claims = list(self.claims)
            for claim in claims:
                if not claim.renew():
                    self.remove(claim)
