"""`Storage`: the files of an open tuning database, and memory for records that cannot be written to a file.

    written   the file that records are added to; the first record creates it
    memory    records that cannot be written to the file; all records of a handle with `fresh`
    read      the team's databases and .jsonl files
    shipped   the files that come with svod

A layer that turns out to be damaged is dropped and reported. A handle survives a fork: the child opens its own connections.
"""
from __future__ import annotations

import logging
import os
import sqlite3
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar

from svod import config
from svod.errors import DatabaseError
from svod.system.forksafe import remake_after_fork
from svod.tune.db import files, layers
from svod.tune.db.records import RECORDS, Record
from svod.tune.db.schema import INSERT, OWN, SHIPPED, TEAM, insert_values, write_transaction
from svod.tune.db.transfer import Skipped

log = logging.getLogger("svod.tune.db")

T = TypeVar("T")

IN_MEMORY = "What is found now is kept in memory"

_abandoned: list[Any] = []  # connections inherited through a fork: closing them would drop the parent's locks


class Storage:
    """The layers of one handle. `lock` is held during each read or write. `changes` is increased by each event after which earlier results
    may be outdated. `problem`: the first reason why a file cannot be used. `skipped`: records and files that could not be read."""

    def __init__(self, plan: layers.DatabasePaths, *, fresh: bool, read_only: bool) -> None:
        self.plan, self.fresh, self.read_only = plan, fresh, read_only
        self.problem: str | None = None
        self.skipped: list[Skipped] = []
        self.changes = 0
        self.lock = threading.RLock()
        remake_after_fork(self, "lock", threading.RLock)
        self.own: layers.SqliteLayer | None = None
        self._pid = os.getpid()
        self._memory: layers.SqliteLayer | None = None
        self._read: list[layers.Layer] | None = None
        self._shipped: list[layers.Layer] | None = None
        # the reason why no file is written; "": none was asked for
        self._unwritable: str | None = "" if plan.write is None or read_only else None
        self._told = 0
        self.exported = False       # whether the records in memory were written to a file of their own
        if plan.problem is not None and not read_only:
            self._trouble(plan.problem)
        self.open_own()

    @property
    def path(self) -> Path | None:
        """The file that records are written to, whether or not it exists yet; None: records are only kept in memory."""
        return None if self._unwritable is not None else self.plan.write

    def _trouble(self, text: str, advice: str = "") -> None:
        if self.problem is None:
            self.problem = text
        config.log_once(log, logging.WARNING, f"tuning database: {text}{advice and f'. {advice}'}")

    def open_own(self) -> None:
        """Open the file that records are written to, if it exists: for writing where that is possible, else for reading."""
        path = self.plan.write
        if path is None or self.own is not None or self._unwritable:
            return
        try:
            if not path.exists() or path.stat().st_size == 0:
                return
            conn = files.open_for_reading(path) if self.read_only else files.open_for_writing(path, wal=self.plan.wal)
        except (sqlite3.OperationalError, OSError, files.UnwritableDatabase) as e:
            try:
                conn = files.open_for_reading(path)
            except files.CANNOT_OPEN as again:
                self.give_up(files.complaint(path, again))
                return
            self._unwritable = self._unwritable or files.complaint(path, e)
        except files.CANNOT_OPEN as e:
            self.give_up(files.complaint(path, e), f"It was left as it is. {IN_MEMORY}")
            return
        if conn is not None:
            self.own = layers.SqliteLayer(conn, str(path), OWN, self.skipped)

    def obstacle(self) -> str | None:
        """Why records could not be stored, as far as can be told without writing; None if they can, or if there is no file to write. For
        callers that are about to spend hours on work whose results would be lost."""
        path = self.plan.write
        if self.problem is not None or path is None:
            return self.problem
        return files.unwritable(path) or files.full_disk(path)

    def foresee(self) -> None:
        """Warn that nothing can be stored. Called before work whose results would be lost."""
        reason = self.obstacle() if self._unwritable is None else self._unwritable
        if reason:
            self.give_up(reason)

    def give_up(self, text: str, advice: str = IN_MEMORY) -> None:
        """Keep later records in memory, as the file cannot be used."""
        self._unwritable = text
        self._trouble(text, advice)

    def give_up_writing(self, error: Exception) -> None:
        """Keep later records in memory, as a write has failed."""
        self.give_up(f"{self.plan.write} cannot be written: {error}", f"What was stored is still there. {IN_MEMORY}")

    def after_fork(self) -> None:
        """Leave inherited connections alone and open new ones, if this is a forked child."""
        if self._pid == os.getpid():
            return
        _abandoned.append((self.own, self._read))
        self._pid, self.own, self._read, self._shipped = os.getpid(), None, None, None
        self.changes += 1
        self.open_own()

    def _memory_layer(self) -> layers.SqliteLayer:
        if self._memory is None:
            self._memory = layers.SqliteLayer(files.open_in_memory(), ":memory:", OWN, self.skipped)
        return self._memory

    def users_layers(self) -> list[layers.Layer]:
        """The layers of the user's records, the nearest first. Opens the file that is written if another process has created it since."""
        self.after_fork()
        if self.fresh:
            return [self._memory_layer()]
        if self.own is None:
            self.open_own()
        if self._read is None:
            self._read = layers.open_layers(self.plan.read, TEAM, self.skipped)
        return [layer for layer in (self.own, self._memory) if layer is not None] + self._read

    def shipped_layers(self) -> list[layers.Layer]:
        """The layers that ship with svod."""
        if self.fresh:
            return []
        if self._shipped is None:
            self._shipped = layers.open_layers(self.plan.shipped, SHIPPED, self.skipped)
        return self._shipped

    def all_layers(self) -> list[layers.Layer]:
        """The layers of the user's records and those that ship with svod, the nearest first."""
        return [*self.users_layers(), *self.shipped_layers()]

    def each(self, of: Sequence[layers.Layer], ask: Callable[[layers.Layer], T]) -> list[T]:
        """The result of `ask` for each of these layers. A layer that turns out to be damaged is dropped and reported."""
        answers = []
        for layer in of:
            try:
                answers.append(ask(layer))
            except sqlite3.Error as e:
                self.skipped.append(Skipped(layer.name, files.complaint(Path(layer.name), e)))
                if layer is self.own:
                    self.own = None
                    self.give_up(files.complaint(Path(layer.name), e), f"It was left as it is. {IN_MEMORY}")
                for opened in (self._read, self._shipped):
                    if opened is not None and layer in opened:
                        opened.remove(layer)
        self._tell_skipped()
        return answers

    def _tell_skipped(self) -> None:
        new, self._told = self.skipped[self._told:], len(self.skipped)
        for s in new:
            config.log_once(log, logging.WARNING, f"tuning database: records of {s.source} were skipped, "
                                                  f"the first: {s.reason} ({s.where})")

    def _sink(self) -> layers.SqliteLayer:
        """The layer that records are written to now: the file, which is created if need be; memory if it cannot be written."""
        self.after_fork()
        if self._unwritable is None and self.own is None:
            assert self.plan.write is not None, "a plan without a file is unwritable"
            try:
                conn = files.open_for_writing(self.plan.write, wal=self.plan.wal)
            except files.CANNOT_OPEN as e:
                self.give_up(files.complaint(self.plan.write, e))
            else:
                self.own = layers.SqliteLayer(conn, str(self.plan.write), OWN, self.skipped)
        if self._unwritable is not None or self.own is None:
            if self._unwritable and self.problem is None:
                self._trouble(self._unwritable, IN_MEMORY)
            return self._memory_layer()
        return self.own

    def written(self) -> layers.SqliteLayer | None:
        """The file that is written, which is created if need be; None: records are kept in memory."""
        sink = self._sink()
        return None if sink is self._memory else sink

    def write(self, work: Callable[[sqlite3.Connection], T], *, must: bool = False) -> T:
        """Run `work` in a transaction on the file and return its result. If the file cannot be written, `work` runs on the database in
        memory instead, and so does all later work; with `must`, DatabaseError is raised instead."""
        with self.lock:
            self.changes += 1
            sink = self._sink()
            if sink is not self._memory:
                try:
                    with write_transaction(sink.conn):
                        answer = work(sink.conn)
                except (sqlite3.Error, OSError) as e:
                    if must:
                        raise DatabaseError(f"{sink.name} cannot be written: {e}; nothing was changed") from e
                    self.give_up_writing(e)
                    sink = self._memory_layer()
                else:
                    if self.fresh:
                        with write_transaction(self._memory_layer().conn):
                            work(self._memory_layer().conn)
                    return answer
            if must:
                raise DatabaseError(self._unwritable or "there is no database to write to: it is :none:, or was opened read-only")
            with write_transaction(sink.conn):
                return work(sink.conn)

    def make_smaller(self) -> None:
        """Shrink the file by the space of removed records. Raises DatabaseError."""
        assert self.own is not None, "records were removed from a file"
        try:
            self.own.conn.execute("VACUUM")
        except sqlite3.Error as e:
            raise DatabaseError(f"{self.own.name}: records were removed, but the file could not be made smaller: {e}") from e

    def store_again(self) -> bool:
        """Try again to write the records in memory to the file. Returns True if all of them are in the file, which is used again from now
        on."""
        with self.lock:
            self.after_fork()
            path = self.plan.write
            if path is None or self.read_only or self._unwritable is None:
                return path is not None and not self.read_only
            kept = self.kept()
            try:
                conn = files.open_for_writing(path, wal=self.plan.wal)
                try:
                    with write_transaction(conn):
                        for r, rank in kept:
                            conn.execute(INSERT[type(r)], insert_values(r, rank))
                finally:
                    conn.close()
            except files.CANNOT_OPEN as e:
                log.debug("%s still cannot be written: %s", path, e)
                return False
            if kept:
                log.warning("tuning database: %s can be written again; the %d records kept in memory were stored", path, len(kept))
            if self.own is not None:
                self.own.close()
            self.own, self._unwritable = None, None
            self.changes += 1
            self.open_own()
            return True

    def kept(self) -> list[tuple[Record, int]]:
        """The records in memory with their layers."""
        memory = self._memory
        return [] if memory is None else [(r, rank) for kind in RECORDS for r, rank in memory.select(kind, None, None)]


    def close(self) -> None:
        """Close all connections, after a last attempt to write the records in memory to the file; if it fails, a warning is logged."""
        self.after_fork()
        if self._unwritable and not self.read_only and not self.store_again() and not self.exported and (kept := self.kept()):
            log.warning("tuning database: %s; %d records of this run are lost", self._unwritable, len(kept))
        for layer in (self.own, self._memory, *(self._read or ()), *(self._shipped or ())):
            if layer is not None:
                layer.close()
        self.own, self._memory, self._read, self._shipped = None, None, [], []
