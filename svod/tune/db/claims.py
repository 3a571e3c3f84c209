"""Claims: who searches what right now, so that two processes do not search the same kernel.

A claim is a row of `claims` with a heartbeat, which a thread of the claiming process renews every few seconds. A claim is void after 30 s
without a heartbeat, or when its process on this machine is gone. Claims are taken with BEGIN IMMEDIATE, so exactly one of many wins.
"""
from __future__ import annotations

import os
import socket
import sqlite3
import threading
import uuid
from collections.abc import Callable
from types import TracebackType
from typing import TYPE_CHECKING, Annotated, NamedTuple

from msgspec import Meta

from svod.system.checked import checked
from svod.system.forksafe import remake_after_fork
from svod.system.process import system_files
from svod.tune.db.records import RecordError

if TYPE_CHECKING:
    from typing import Self

SILENCE = 30.0   # seconds without a heartbeat after which a claim is void
BEAT = 7.0       # seconds between heartbeats


class Holder(NamedTuple):
    """Who holds a claim."""

    kernel: str
    target: str
    host: str
    boot_id: str
    pid: Annotated[int, Meta(gt=0, lt=1 << 31)]
    heartbeat: float
    since: float
    token: str


COLUMNS = ", ".join(Holder._fields)


def boot_id() -> str:
    """The space that ids of processes count in: this machine's current boot and, as containers of one machine may have one host name, the
    namespace; "" where that is not known."""
    boot, namespace = system_files.boot_id(), system_files.process_namespace()
    return f"{boot}/{namespace}" if boot and namespace else ""


def is_void(holder: Holder, now: float) -> bool:
    """Whether a claim no longer counts: its heartbeat is 30 s away from `now`, or its process on this machine is gone."""
    if abs(now - holder.heartbeat) > SILENCE:
        return True
    if holder.host == socket.gethostname() and holder.boot_id == boot_id() and holder.boot_id:
        try:
            os.kill(holder.pid, 0)
        except ProcessLookupError:
            return True
        except OSError:
            return False  # alive, but of another user
    return False


def standing(conn: sqlite3.Connection, kernel: str, target: str, now: float) -> Holder | None:
    """Who holds a live claim on (kernel, target), or None."""
    row = conn.execute(f"SELECT {COLUMNS} FROM claims WHERE kernel = ? AND target = ?", (kernel, target)).fetchone()
    return None if row is None else live(row, now)


def live(row: sqlite3.Row, now: float) -> Holder | None:
    """The claim in a row of `COLUMNS`; None where it is void, or the row is no claim."""
    try:
        holder: Holder = checked(list(row), Holder, RecordError)
    except RecordError:
        return None
    return None if is_void(holder, now) else holder


def take(conn: sqlite3.Connection, kernel: str, target: str, now: float) -> str | None:
    """Claim (kernel, target) inside a write transaction; the claim's token, or None where a live claim stands."""
    if standing(conn, kernel, target, now) is not None:
        return None
    holder = Holder(kernel, target, socket.gethostname(), boot_id(), os.getpid(), heartbeat=now, since=now, token=uuid.uuid4().hex)
    conn.execute(f"INSERT OR REPLACE INTO claims({COLUMNS}) VALUES ({', '.join('?' * len(holder))})", holder)
    return holder.token


class Claim:
    """The right to search (kernel, target). A context manager; `release` is idempotent. The claim belongs to the process that took it: a
    forked child cannot renew or release it.

    `renew` and `release` are methods of the database. `token` is None where the database cannot be written and no other process knows of
    the claim."""

    def __init__(self, kernel: str, target: str, token: str | None, renew: Callable[[Claim], bool],
                 release: Callable[[Claim], None]) -> None:
        self.kernel, self.target, self.token = kernel, target, token
        self.lost = False       # another process has taken it
        self._renew, self._release = renew, release
        self.pid = os.getpid()

    @property
    def is_ours(self) -> bool:
        """Whether this process took the claim, rather than the one that it was forked from."""
        return self.pid == os.getpid()

    def renew(self) -> bool:
        """Renew the heartbeat. False where the claim is lost (another process took it) or belongs to the parent process."""
        return self.is_ours and (self.token is None or self._renew(self))

    def release(self) -> None:
        """Give the claim back; in a forked child nothing happens."""
        if self.is_ours:
            self._release(self)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.release()


class Heartbeat:
    """The thread that renews the claims of one database. It is a daemon: when the process ends, its claims become void."""

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
                    claim.lost = True
                    self.remove(claim)
