"""Claims: the processes that search kernels right now, so that no two of them search the same one.

A claim is a row of `claims` with a heartbeat, which a thread of the claiming process renews every few seconds. A claim is void after 30 s
without a heartbeat, or when its process on this machine is gone. Claims are taken with BEGIN IMMEDIATE, so exactly one of many wins.
"""
from __future__ import annotations

import logging
import os
import socket
import sqlite3
import threading
import time
import uuid
from types import TracebackType
from typing import TYPE_CHECKING, Annotated, NamedTuple

from msgspec import Meta

from svod.system.checked import checked
from svod.system.forksafe import remake_after_fork
from svod.system.process import system_files
from svod.tune.db.records import RecordError
from svod.tune.db.schema import write_transaction
from svod.tune.db.storage import Storage

if TYPE_CHECKING:
    from typing import Self

log = logging.getLogger("svod.tune.db")

CLAIM_EXPIRY_SECONDS = 30.0    # seconds without a heartbeat after which a claim is void
BEAT = 7.0       # seconds between heartbeats


class Holder(NamedTuple):
    """The process that holds a claim. `since`: when the claim was taken; `heartbeat`: when it was last renewed; both in seconds since
    the epoch."""

    kernel: str
    target: str
    host: str
    boot_id: str
    pid: Annotated[int, Meta(gt=0, lt=1 << 31)]
    heartbeat: float
    since: float
    token: str


HOLDER_COLUMNS = ", ".join(Holder._fields)


def boot_id() -> str:
    """A name for the range in which process ids are unique: the id of this machine's current boot and the kernel's PID namespace, as
    containers of one machine may share a host name. "" where either is unknown."""
    boot, namespace = system_files.boot_id(), system_files.process_namespace()
    return f"{boot}/{namespace}" if boot and namespace else ""


def is_void(holder: Holder, now: float) -> bool:
    """Whether a claim no longer counts: its heartbeat is more than 30 s away from `now`, or its process on this machine is gone."""
    if abs(now - holder.heartbeat) > CLAIM_EXPIRY_SECONDS:
        return True
    if holder.host == socket.gethostname() and holder.boot_id == boot_id() and holder.boot_id:
        try:
            os.kill(holder.pid, 0)
        except ProcessLookupError:
            return True
        except OSError:
            return False  # the process is alive and belongs to another user
    return False


def standing(conn: sqlite3.Connection, kernel: str, target: str, now: float) -> Holder | None:
    """The holder of a live claim on (kernel, target), or None."""
    row = conn.execute(f"SELECT {HOLDER_COLUMNS} FROM claims WHERE kernel = ? AND target = ?", (kernel, target)).fetchone()
    return None if row is None else live(row, now)


def live(row: sqlite3.Row, now: float) -> Holder | None:
    """Read a row of `HOLDER_COLUMNS` as a claim. Returns None if the claim is void or the row holds no valid claim."""
    try:
        holder: Holder = checked(list(row), Holder, RecordError)
    except RecordError:
        return None
    return None if is_void(holder, now) else holder


def take(conn: sqlite3.Connection, kernel: str, target: str, now: float) -> str | None:
    """Claim (kernel, target) inside a write transaction. Returns the claim's token, or None if a live claim exists already."""
    if standing(conn, kernel, target, now) is not None:
        return None
    holder = Holder(kernel, target, socket.gethostname(), boot_id(), os.getpid(), heartbeat=now, since=now, token=uuid.uuid4().hex)
    conn.execute(f"INSERT OR REPLACE INTO claims({HOLDER_COLUMNS}) VALUES ({', '.join('?' * len(holder))})", holder)
    return holder.token


class Claim:
    """The right to search (kernel, target). A context manager; `release` is idempotent. The claim belongs to the process that took it: a
    forked child cannot renew or release it. `token` is None where the database cannot be written and no other process knows of the
    claim."""

    def __init__(self, claims: Claims, kernel: str, target: str, token: str | None) -> None:
        self.kernel, self.target, self.token = kernel, target, token
        self.lost = False       # true once another process has taken the claim
        self._claims, self.pid = claims, os.getpid()

    @property
    def is_ours(self) -> bool:
        """Whether this process took the claim, rather than the one that it was forked from."""
        return self.pid == os.getpid()

    def renew(self) -> bool:
        """Renew the heartbeat. False where the claim is lost (another process took it) or belongs to the parent process."""
        return self.is_ours and (self.token is None or self._claims.renew(self))

    def release(self) -> None:
        """Give the claim back. Does nothing in a forked child, which does not own the claim."""
        if self.is_ours:
            self._claims.release(self)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.release()


class Heartbeat:
    """The thread that renews the claims of one handle. It is a daemon: when the process ends, its claims become void."""

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


class Claims:
    """The claims that are taken with one handle of a database. Where its file cannot be written they are valid within this process only."""

    def __init__(self, storage: Storage) -> None:
        self._storage = storage
        self.heartbeat = Heartbeat()
        self._held: set[tuple[str, str]] = set()        # (kernel, target) of claims that could not be written to the file
        remake_after_fork(self, "heartbeat", Heartbeat)
        remake_after_fork(self, "_held", set)

    def take(self, kernel: str, target: str) -> Claim | None:
        """Claim the right to search (kernel, target) and renew the claim until it is released. Returns None if a live process, this one
        included, holds it already; `holder` tells which."""
        storage = self._storage
        with storage.lock:
            file, token = storage.written(), None
            if file is not None:
                try:
                    with write_transaction(file.conn):
                        token = take(file.conn, kernel, target, time.time())
                except sqlite3.Error as e:
                    storage.give_up_writing(e)
                else:
                    if token is None:
                        return None
            claim = Claim(self, kernel, target, token)
            if token is not None:
                self.heartbeat.add(claim)
            elif (kernel, target) in self._held:
                return None
            else:
                self._held.add((kernel, target))
            return claim

    def renew(self, claim: Claim) -> bool:
        """Write the heartbeat of a claim; False where the claim is no longer this process's. A failed write returns True: the next
        heartbeat tries again."""
        renewed = self._change("UPDATE claims SET heartbeat = :now", claim)
        return renewed is None or renewed == 1

    def release(self, claim: Claim) -> None:
        """Give a claim back. Where that cannot be written, the claim becomes void when its heartbeat is too old."""
        self.heartbeat.remove(claim)
        if claim.token is None:
            self._held.discard((claim.kernel, claim.target))
        else:
            self._change("DELETE FROM claims", claim)

    def release_all(self, kernel: str, target: str) -> None:
        """Give back every claim of this process on (kernel, target), including one that `take` had made but not yet returned when an
        interrupt came."""
        with self.heartbeat.lock:
            claimed = [c for c in self.heartbeat.claims if (c.kernel, c.target) == (kernel, target)]
        for claim in claimed:
            claim.release()
        self._held.discard((kernel, target))

    def _change(self, change: str, claim: Claim) -> int | None:
        """Apply an SQL statement to the row of a claim. Returns the number of rows; None where the file cannot be written."""
        with self._storage.lock:
            self._storage.after_fork()
            file = self._storage.own
            if file is None or self._storage.path is None:
                return None
            try:
                with write_transaction(file.conn):
                    return file.conn.execute(f"{change} WHERE kernel = :kernel AND target = :target AND token = :token", {
                        "now": time.time(), "kernel": claim.kernel, "target": claim.target, "token": claim.token}).rowcount
            except sqlite3.Error as e:
                log.debug("the claim on %s could not be changed: %s", claim.kernel, e)
                return None

    def holder(self, kernel: str, target: str) -> Holder | None:
        """The process that searches (kernel, target) right now, or None."""
        with self._storage.lock:
            self._storage.after_fork()
            self._storage.open_own()
            file = self._storage.own
            try:
                return None if file is None else standing(file.conn, kernel, target, time.time())
            except sqlite3.Error as e:
                log.debug("the claims on %s cannot be read: %s", kernel, e)
                return None
