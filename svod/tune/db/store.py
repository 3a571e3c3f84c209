"""`TuningDB`, the tuning database as the rest of svod uses it.

Guarantees
* Records are only added, never changed. Adding one twice is adding it once. `record` stores all of its records or none.
* Many processes and threads may use one database at once. A writer waits up to 30 s for its turn. A handle survives a fork: the child
  opens its own connections.
* A database that cannot be opened, read or written never stops a search or a `prepare`. All layers that can be read are read. New
  records are kept in memory, and `store_again` and `close` offer them to the file again. `problem` holds the reason, which is logged once.
* Records are validated when they are read: an invalid one is skipped, listed in `skipped`, and logged once per file.
* A look-up never creates a file and never imports sqlite-utils, which only the creation of tables needs.

Only the process that drives a search writes. Workers never open the database.

Whose records a method reads is decided here, once:
* What asks for chains of a kernel, to use or to try them (`ranking`, `winner`, `barred`, `family`, `targets_of`), reads *all layers*.
* What tells what there is, or takes it elsewhere (`select`, `tally`, `export`, `gc`), reads the *user's records* alone: what ships with
  svod is not what the user found. A caller that asks about one kernel whose chain may come from there says `shipped=True`.
* `all_rankings` has the kernels of the user's records, with the chains that `ranking` has for them.
"""
from __future__ import annotations

import itertools
import logging
import os
import sqlite3
import threading
import time
import uuid
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

from svod import config
from svod.errors import DatabaseError
from svod.system.forksafe import remake_after_fork
from svod.system.process.program import user_at_host
from svod.tune.db import claims, files, layers, transfer
from svod.tune.db.records import (
    RECORDS,
    KernelRecord,
    Measurement,
    OriginRecord,
    Record,
    Search,
    TargetFacts,
    Verdict,
    anonymised,
    changed,
)
from svod.tune.db.schema import INSERT, OWN, ROW_COLUMNS, SHIPPED, TEAM, ForeignDatabase, NewerSchema, insert_values, write_transaction
from svod.tune.db.transfer import Skipped
from svod.tune.db.winners import Winner, barred_revisions, rank_winners, standing_bars

if TYPE_CHECKING:
    from typing import Self

log = logging.getLogger("svod.tune.db")

R = TypeVar("R", bound=Record)

TRIED = 2                   # searches that a candidate has to fail in before it is not tried again
MERGE_CACHE = 256 << 20     # bytes of pages that a merge keeps in memory
TAKEN_AT_ONCE = 10_000      # records of a merge that are in memory at once
IN_MEMORY = "What is found now is kept in memory"

_abandoned: list[Any] = []  # connections inherited through a fork: closing them would drop the parent's locks

Incoming = tuple[Record, tuple[Any, ...]]       # a record of others, and what INSERT takes for it
Known = Callable[[type[Record], Sequence[Any]], set[Any]]   # which of these ids of a kind are here, and no farther than the team's
KNOWN_AT_ONCE = 500         # ids that are looked for at once

#: Of several measurements of one LINEAR, the one with the lowest number says most about it.
_TELLING = {("wrong", ""): 0, ("ok", "confirm"): 1, ("ok", "race"): 2, ("ok", "screen"): 3, ("slow", ""): 4, ("crash", ""): 5,
            ("timeout", ""): 6, ("error", ""): 7}


class Merged(NamedTuple):
    """The result of a merge or an import: how many records were new, how many were known, and which were skipped."""

    added: int
    known: int
    skipped: list[Skipped]


class Collected(NamedTuple):
    """How many rows `gc` removed."""

    measurements: int
    claims: int


class TuningDB:
    """An open tuning database: the file that is written and all layers that are read. A context manager, made by `TuningDB.open`."""

    def __init__(self, plan: layers.DatabasePaths, *, fresh: bool, read_only: bool) -> None:
        self.plan, self.fresh, self.read_only = plan, fresh, read_only
        self.problem: str | None = None
        self.skipped: list[Skipped] = []
        self._lock = threading.RLock()
        remake_after_fork(self, "_lock", threading.RLock)
        self._pid = os.getpid()
        self._own: layers.SqliteLayer | None = None
        self._memory: layers.SqliteLayer | None = None
        self._read: list[layers.Layer] | None = None
        self._shipped: list[layers.Layer] | None = None
        self._unwritable: str | None = "" if plan.write is None or read_only else None  # why no file is written; "": none was asked for
        self._searches: dict[str, Search] = {}
        self._heartbeat = claims.Heartbeat()
        self._held: set[tuple[str, str]] = set()  # claims that hold within this process only
        self._memo: dict[tuple[str, str], list[Winner]] = {}
        self._memo_version: tuple[int, ...] = ()
        self._told = 0
        self._exported = False      # the records in memory were written to a file of their own
        if plan.problem is not None and not read_only:
            self._trouble(plan.problem)
        self._open_own()

    @classmethod
    def open(cls, spec: str | os.PathLike[str] | None = None, fresh: bool = False, read_only: bool = False) -> TuningDB:
        """The database that `spec` names (`PrepareConfig.db`, SVOD_TUNE_DB; None: the user's data directory; `:none:`: memory only).

        `fresh`: only records of this handle are read; they are stored as well. `read_only`: no file is written.
        Never raises for a database that is missing, damaged, foreign, newer, or not accessible: see `problem`."""
        return cls(layers.resolve(None if spec is None else os.fspath(spec)), fresh=fresh, read_only=read_only)

    # -- opening ------------------------------------------------------------------------------------------------------------
    @property
    def path(self) -> Path | None:
        """The file that is written, whether or not it exists yet; None: memory only."""
        return None if self._unwritable is not None else self.plan.write

    def _trouble(self, text: str, advice: str = "") -> None:
        if self.problem is None:
            self.problem = text
        config.log_once(log, logging.WARNING, f"tuning database: {text}{advice and f'. {advice}'}")

    def _open_own(self) -> None:
        """Open the file that is written, if it exists: for writing where that is possible, else for reading."""
        path = self.plan.write
        if path is None or self._own is not None or self._unwritable:
            return
        try:
            if not path.exists() or path.stat().st_size == 0:
                return
            conn = files.open_for_reading(path) if self.read_only else files.open_for_writing(path, wal=self.plan.wal)
        except (NewerSchema, ForeignDatabase) as e:
            self._give_up(f"{path} cannot be used: {e}", f"It was left as it is. {IN_MEMORY}")
            return
        except (sqlite3.Error, OSError) as e:
            if not isinstance(e, (sqlite3.OperationalError, OSError)):  # "file is not a database", "malformed"
                self._give_up(f"{path} cannot be used: {e}; move it away to start a new one", f"It was left as it is. {IN_MEMORY}")
                return
            try:
                conn = files.open_for_reading(path)
            except (sqlite3.Error, OSError, NewerSchema, ForeignDatabase) as again:
                self._give_up(f"{path} cannot be opened: {again}")
                return
            self._unwritable = self._unwritable or f"{path} cannot be written: {e}"
        if conn is not None:
            self._own = layers.SqliteLayer(conn, str(path), OWN, self.skipped)

    def obstacle(self) -> str | None:
        """Why nothing could be stored, as far as can be told without writing; None: there is no reason, or no file to write. A caller asks
        before hours of work whose results would be lost."""
        path = self.plan.write
        if self.problem is not None or path is None:
            return self.problem
        return files.unwritable(path) or files.full_disk(path)

    def _give_up(self, text: str, advice: str = IN_MEMORY) -> None:
        self._unwritable = text
        self._trouble(text, advice)

    def _after_fork(self) -> None:
        if self._pid == os.getpid():
            return
        _abandoned.append((self._own, self._read))
        self._pid, self._own, self._read, self._shipped = os.getpid(), None, None, None
        self._heartbeat = claims.Heartbeat()
        self._held.clear()
        self._memo.clear()
        self._open_own()

    def _memory_layer(self) -> layers.SqliteLayer:
        if self._memory is None:
            self._memory = layers.SqliteLayer(files.open_in_memory(), ":memory:", OWN, self.skipped)
        return self._memory

    def _users_layers(self) -> list[layers.Layer]:
        """The layers of the user's records, the nearest first. The written file is opened if it has appeared since."""
        self._after_fork()
        if self.fresh:
            return [self._memory_layer()]
        if self._own is None:
            self._open_own()
        if self._read is None:
            self._read = layers.open_layers(self.plan.read, TEAM, self.skipped)
        return [layer for layer in (self._own, self._memory) if layer is not None] + self._read

    def _shipped_layers(self) -> list[layers.Layer]:
        """The layers that ship with svod."""
        if self.fresh:
            return []
        if self._shipped is None:
            self._shipped = layers.open_layers(self.plan.shipped, SHIPPED, self.skipped)
        return self._shipped

    def _all_layers(self) -> list[layers.Layer]:
        """The layers of the user's records and those that ship with svod, the nearest first."""
        return [*self._users_layers(), *self._shipped_layers()]

    def _each(self, of: Sequence[layers.Layer], ask: Callable[[layers.Layer], Any]) -> list[Any]:
        """The result of `ask` for each of these layers. A layer that turns out to be damaged is dropped and reported."""
        answers = []
        for layer in of:
            try:
                answers.append(ask(layer))
            except sqlite3.Error as e:
                self.skipped.append(Skipped(layer.name, f"cannot be read: {e}"))
                if layer is self._own:
                    self._own = None
                    self._give_up(f"{layer.name} cannot be read: {e}", f"It was left as it is. {IN_MEMORY}")
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

    # -- looking up ---------------------------------------------------------------------------------------------------------
    def ranking(self, kernel: str, target: str) -> list[Winner]:
        """All chains that may be used for this kernel and target, best first, by the rules of `winners.py`."""
        with self._lock:
            version = tuple(self._each(self._all_layers(), lambda layer: layer.version()))
            if version != self._memo_version:
                self._memo.clear()
                self._memo_version = version
            if (kernel, target) not in self._memo:
                ranks: dict[str, int] = {}
                measurements: list[Measurement] = []
                verdicts: list[Verdict] = []
                for of_layer, verdicts_of_layer in self._each(self._all_layers(), lambda layer: layer.deciding(kernel, target)):
                    for m, rank in of_layer:
                        ranks[m.id] = min(rank, ranks.get(m.id, SHIPPED))
                        measurements.append(m)
                    verdicts += verdicts_of_layer
                self._memo[kernel, target] = rank_winners(measurements, verdicts, ranks)
            return self._memo[kernel, target]

    def all_rankings(self, *, alone: bool = False) -> dict[tuple[str, str], list[Winner]]:
        """`ranking` of every kernel and target that the user's records have evidence for. `alone`: by that evidence alone, as an export of
        it has them."""
        with self._lock:
            ranks: dict[str, int] = {}
            places: dict[tuple[str, str], tuple[list[Measurement], list[Verdict]]] = {}
            for of_layer, verdicts in self._each(self._users_layers(), lambda layer: layer.all_deciding()):
                for m, rank in of_layer:
                    ranks[m.id] = min(rank, ranks.get(m.id, SHIPPED))
                    places.setdefault((m.kernel, m.target), ([], []))[0].append(m)
                for v in verdicts:
                    places.setdefault((v.kernel, v.target), ([], []))[1].append(v)
            shipped = [] if alone else self._each(self._shipped_layers(), lambda layer: layer.tally(Measurement, ("kernel", "target")))
            shared = {(kernel, target) for of_layer in shipped for kernel, target in of_layer}
            return {place: self.ranking(*place) if place in shared else rank_winners(*evidence, ranks)
                    for place, evidence in places.items()}

    def tally(self, record: type[Record], *columns: str) -> Counter[tuple[Any, ...]]:
        """How many of the user's records of one kind have which values in these columns. What stands in several layers counts once, but for
        rows that are no valid records."""
        with self._lock:
            of = self._users_layers()
            nearest, seen = next(iter(of), None), set[str]()

            def ask(layer: layers.Layer) -> Counter[tuple[Any, ...]]:
                if layer is nearest:        # the largest by far, as a rule: its rows are counted, not read
                    return layer.tally(record, columns)
                new = [r for r, _ in layer.select(record, None, None) if r.id not in seen and not (nearest and nearest.has(r))]
                seen.update(r.id for r in new)
                return Counter(tuple(getattr(r, c) for c in columns) for r in new)
            return sum(self._each(of, ask), Counter[tuple[Any, ...]]())

    def winner(self, kernel: str, target: str) -> Winner | None:
        """The chain to use, or None. If today's LINEAR digest is not `Winner.linear`, the chain is only a seed."""
        return next(iter(self.ranking(kernel, target)), None)

    def barred(self, kernel: str, target: str) -> dict[str, int]:
        """Per LINEAR digest the last code generator revision under which it may not be used, by the verdicts of all layers."""
        with self._lock:
            evidence = self._each(self._all_layers(), lambda layer: layer.deciding(kernel, target))
            return barred_revisions((m for of_layer, _ in evidence for m, _ in of_layer), (v for _, verdicts in evidence for v in verdicts))

    def known_digests(self, kernel: str, target: str, codegen: int | None = None, compiler: str | None = None,
                      protocol: int | None = None) -> dict[str, Measurement]:
        """By LINEAR digest the most telling measurement of this database's own searches: such a candidate need not be compiled or timed
        again. `codegen`, `compiler` and `protocol` select one code generator, compiler and timing protocol. A candidate whose worker was
        lost is not known, nor is one that only others have measured: their failures hide no candidate here. A crash, a time-out or an
        error may have been the machine's: such a candidate is known once two searches have met it."""
        ranks, best = dict[str, tuple[int, float, str]](), dict[str, Measurement]()
        failed: dict[str, set[str]] = {}        # LINEAR digest → the searches in which it failed without a comparison of numbers
        for m, layer in self.select(Measurement, kernel, target):
            if layer != OWN or not m.linear or m.status == "lost" or (codegen is not None and m.codegen != codegen) \
                    or (compiler is not None and m.compiler != compiler) or (protocol is not None and m.protocol != protocol):
                continue
            if m.status in ("crash", "timeout", "error"):
                failed.setdefault(m.linear, set()).add(m.search)
                if len(failed[m.linear]) < TRIED:
                    continue
            rank = (_TELLING[m.status, m.step if m.status == "ok" else ""], -m.taken_at, m.id)
            if m.linear not in best or rank < ranks[m.linear]:
                ranks[m.linear], best[m.linear] = rank, m
        return best

    def select(self, record: type[R], kernel: str | None = None, target: str | None = None, *,
               shipped: bool = False) -> list[tuple[R, int]]:
        """The user's records of one kind, each with the rank of the nearest layer that holds it, in the order of their digests. `shipped`:
        and those that ship with svod."""
        with self._lock:
            of = self._all_layers() if shipped else self._users_layers()
            selected = [pair for of_layer in self._each(of, lambda layer: list(layer.select(record, kernel, target))) for pair in of_layer]
            nearest = {r.id: (r, rank) for r, rank in sorted(selected, key=lambda pair: -pair[1])}     # the last one of an id stays
            return [nearest[i] for i in sorted(nearest)]

    def tried_here(self, kernel: str, target: str, codegen: int) -> set[str]:
        """The LINEAR digests that were measured here with a code generator, whatever became of them; a lost worker is no measurement."""
        return {m.linear for m, layer in self.select(Measurement, kernel, target)
                if layer == OWN and m.codegen == codegen and m.status != "lost"}

    def family(self, structure: str, *, shipped: bool = True) -> list[KernelRecord]:
        """The descriptions of the kernels with a structure (`svod.core.schedule.family`), in the order of their digests. `shipped`: also of
        those that only ship with svod."""
        with self._lock:
            of = self._all_layers() if shipped else self._users_layers()
            found = {k.id: k for of_layer in self._each(of, lambda layer: list(layer.family(structure))) for k in of_layer}
            return [found[i] for i in sorted(found)]

    def targets_of(self, kernel: str) -> list[str]:
        """The targets that a kernel was confirmed on."""
        with self._lock:
            found = self._each(self._all_layers(), lambda layer: list(layer.targets_of(kernel)))
            return sorted({t for of_layer in found for t in of_layer})

    # -- writing ------------------------------------------------------------------------------------------------------------
    def _sink(self) -> layers.SqliteLayer:
        """Where records go now: the file, which is created if need be, else memory."""
        self._after_fork()
        if self._unwritable is None and self._own is None:
            assert self.plan.write is not None, "a plan without a file is unwritable"
            try:
                conn = files.open_for_writing(self.plan.write, wal=self.plan.wal)
            except (sqlite3.Error, OSError, NewerSchema, ForeignDatabase) as e:
                reason = f"{e.strerror}: {e.filename}" if isinstance(e, OSError) and e.filename else e
                self._give_up(f"{self.plan.write} cannot be written: {reason}")
            else:
                self._own = layers.SqliteLayer(conn, str(self.plan.write), OWN, self.skipped)
        if self._unwritable is not None or self._own is None:
            if self._unwritable and self.problem is None:
                self._trouble(self._unwritable, IN_MEMORY)
            return self._memory_layer()
        return self._own

    def _write(self, work: Callable[[sqlite3.Connection], Any], *, must: bool = False) -> Any:
        """Run `work` in a transaction on the file. Where that fails, later work is in memory, or, with `must`, DatabaseError is raised."""
        with self._lock:
            self._memo.clear()
            sink = self._sink()
            if sink is not self._memory:
                try:
                    with write_transaction(sink.conn):
                        answer = work(sink.conn)
                except (sqlite3.Error, OSError) as e:
                    if must:
                        raise DatabaseError(f"{sink.name} cannot be written: {e}; nothing was changed") from e
                    self._give_up(f"{sink.name} cannot be written: {e}", f"What was stored is still there. {IN_MEMORY}")
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

    def record(self, records: Iterable[Record], *, layer: int = OWN, must: bool = False) -> int:
        """Store records of `layer` (OWN, TEAM), all or none. Returns how many were new, or known only from a farther layer.

        Where the file cannot be written they are kept in memory (`problem` says why), or, with `must`, DatabaseError is raised."""
        records = list(records)
        return int(self._write(lambda conn: _insert(conn, records, layer), must=must)) if records else 0

    def begin_search(self, kernel: str, target: str, *, strategy: str = "beam", executor: str = "",
                     config: Mapping[str, Any] | None = None, svod: str = "") -> str:
        """Record the start of a search. Returns its id, which its measurements and verdicts carry."""
        search = Search(uuid.uuid4().hex, kernel, target, strategy=strategy, executor=executor, config=config or {}, svod=svod,
                        by=user_at_host(), started_at=time.time())
        self._searches[search.search] = search
        self.record([search])
        return search.search

    def end_search(self, search: str, outcome: str, result: Mapping[str, Any] | None = None) -> None:
        """Record the end of a search: its outcome ("finished", "budget", "interrupted", "failed"…), counts and times. Raises DatabaseError
        for a search that this handle did not begin."""
        begun = self._searches.pop(search, None)
        if begun is None:
            raise DatabaseError(f"search {search!r} was not begun with this database handle, or has ended")
        self.record([replace(begun, ended_at=time.time(), outcome=outcome, result=result or {})])

    def retract(self, kernel: str, target: str | None, linear: str | None, reason: str) -> int:
        """Write `retracted` verdicts for the chains of a kernel that may win, optionally of one target or one LINEAR. None of them is used
        again under the same code generator, whatever is merged later. Returns the number of LINEARs. Raises DatabaseError where nothing can
        be written."""
        newest: dict[tuple[str, str], Measurement] = {}
        for m, _ in self.select(Measurement, kernel, target, shipped=True):
            at = (m.target, m.linear)
            if m.linear and linear in (None, m.linear) and (m.step == "confirm" or linear) \
                    and (at not in newest or m.codegen > newest[at].codegen):
                newest[at] = m
        verdicts = [Verdict(m.kernel, m.target, m.linear, "retracted", m.codegen, compiler=m.compiler, by=user_at_host(),
                            method="svod-db retract", reason=reason, taken_at=time.time()) for m in newest.values()]
        if verdicts:
            self.record(verdicts, must=True)
        return len(verdicts)

    def restore(self, kernel: str, target: str | None, linear: str | None, reason: str) -> int:
        """Take back the `retracted` verdicts that stand for a kernel, optionally of one target or one LINEAR, by `restored` verdicts, which
        merges carry on as well. What was found wrong stays wrong. Returns the number of LINEARs. Raises DatabaseError where nothing can be
        written."""
        bars: dict[tuple[str, str], list[Verdict]] = {}
        for v in standing_bars([], (v for v, _ in self.select(Verdict, kernel, target, shipped=True))):
            if isinstance(v, Verdict) and v.verdict == "retracted" and linear in (None, v.linear):
                bars.setdefault((v.target, v.linear), []).append(v)
        verdicts = [Verdict(kernel, at, of, "restored", max(v.codegen for v in lifted), by=user_at_host(), method="svod-db retract --undo",
                            reason=reason, taken_at=time.time(), lifts=tuple(sorted(v.id for v in lifted)))
                    for (at, of), lifted in bars.items()]
        if verdicts:
            self.record(verdicts, must=True)
        return len(verdicts)

    # -- claims -------------------------------------------------------------------------------------------------------------
    def claim(self, kernel: str, target: str) -> claims.Claim | None:
        """The right to search (kernel, target), renewed until `release`; None: a live process holds it (`holder` says which), or this one.

        Where the file cannot be written the claim is valid within this process only."""
        with self._lock:
            sink = self._sink()
            if sink is not self._memory:
                try:
                    with write_transaction(sink.conn):
                        token = claims.take(sink.conn, kernel, target, time.time())
                except sqlite3.Error as e:
                    self._give_up(f"{sink.name} cannot be written: {e}", f"What was stored is still there. {IN_MEMORY}")
                else:
                    if token is None:
                        return None
                    claim = claims.Claim(kernel, target, token, self.renew_claim, self.release_claim)
                    self._heartbeat.add(claim)
                    return claim
            if (kernel, target) in self._held:
                return None
            self._held.add((kernel, target))
            return claims.Claim(kernel, target, None, self.renew_claim, self.release_claim)

    def renew_claim(self, claim: claims.Claim) -> bool:
        """Write the heartbeat of a claim; False where the claim is no longer this process's. A failed write waits for the next beat."""
        with self._lock:
            self._after_fork()
            renewed = self._change_claim("UPDATE claims SET heartbeat = :now", claim)
            return renewed is None or renewed == 1

    def release_claim(self, claim: claims.Claim) -> None:
        """Give a claim back. Where that cannot be written, the claim becomes void when its heartbeat is too old."""
        with self._lock:
            self._after_fork()
            self._heartbeat.remove(claim)
            if claim.token is None:
                self._held.discard((claim.kernel, claim.target))
            else:
                self._change_claim("DELETE FROM claims", claim)

    def release_claims(self, kernel: str, target: str) -> None:
        """Give back every claim of this process on (kernel, target), also one that was taken and not handed over before an interrupt."""
        with self._heartbeat.lock:
            claimed = [c for c in self._heartbeat.claims if (c.kernel, c.target) == (kernel, target)]
        for claim in claimed:
            claim.release()
        self._held.discard((kernel, target))

    def _change_claim(self, change: str, claim: claims.Claim) -> int | None:
        """Apply an SQL statement to the row of a claim. Returns the number of rows; None where the file cannot be written."""
        if self._own is None or self._unwritable is not None:
            return None
        try:
            with write_transaction(self._own.conn):
                return self._own.conn.execute(f"{change} WHERE kernel = :kernel AND target = :target AND token = :token", {
                    "now": time.time(), "kernel": claim.kernel, "target": claim.target, "token": claim.token}).rowcount
        except sqlite3.Error as e:
            log.debug("the claim on %s could not be changed: %s", claim.kernel, e)
            return None

    def holder(self, kernel: str, target: str) -> claims.Holder | None:
        """Who searches (kernel, target) right now, or None."""
        with self._lock:
            self._after_fork()
            self._open_own()
            if self._own is None:
                return None
            try:
                return claims.standing(self._own.conn, kernel, target, time.time())
            except sqlite3.Error as e:
                log.debug("claims of %s cannot be read: %s", self._own.name, e)
                return None

    # -- moving records between databases -----------------------------------------------------------------------------------
    def export(self, path: Path, kernels: Iterable[str] | None = None, *, winners_only: bool = False, anonymous: bool = False) -> int:
        """Write the user's records of all kernels, or of those given, to a .jsonl file. `winners_only`: only those that decide about the
        winners, which are their measurements, their verifications, and all wrong and retracted verdicts. Returns the number of records.
        Claims are never exported. `anonymous`: without people, machines, files and searches. Raises OSError."""
        asked = None if kernels is None else set(kernels)
        measurements = [m for m, _ in self.select(Measurement) if asked is None or m.kernel in asked]
        chosen = self._records_of_winners(measurements, asked) if winners_only else self._records_of(measurements, asked)
        return transfer.write_records(path, changed(chosen, anonymised) if anonymous else chosen)

    def _records_of(self, measurements: Sequence[Measurement], asked: set[str] | None) -> list[Record]:
        """These measurements and all other records of the kernels `asked` for (None: of all)."""
        return [*measurements, *self._described(measurements, asked),
                *(v for v, _ in self.select(Verdict) if asked is None or v.kernel in asked),
                *(s for s, _ in self.select(Search) if asked is None or s.kernel in asked)]

    def _records_of_winners(self, measurements: Sequence[Measurement], asked: set[str] | None) -> list[Record]:
        """The records that decide about the winners among these measurements."""
        winners = {ranking[0].measurement for ranking in self.all_rankings(alone=True).values() if ranking}
        kept = [m for m in measurements if m.id in winners]
        code = {(m.kernel, m.target, m.linear) for m in kept}
        verdicts = [v for v, _ in self.select(Verdict) if asked is None or v.kernel in asked]
        # a search verifies a chain in its races and again when it confirms it: one of these decides as much as all
        verified = {(v.kernel, v.target, v.linear, v.codegen): v for v in verdicts if v.verdict == "verified"}
        return [*kept, *self._described(kept, {m.kernel for m in kept}), *(v for v in verdicts if v.verdict != "verified"),
                *(v for (*place, _), v in verified.items() if tuple(place) in code)]

    def _described(self, measurements: Sequence[Measurement], kernels: set[str] | None) -> list[Record]:
        """The facts about the targets of these measurements, and the descriptions of `kernels` (None: of all)."""
        targets = {m.target for m in measurements}
        described: list[KernelRecord | OriginRecord] = [*(k for k, _ in self.select(KernelRecord)),
                                                        *(o for o, _ in self.select(OriginRecord))]
        return [*(t for t, _ in self.select(TargetFacts) if t.target in targets),
                *(r for r in described if kernels is None or r.kernel in kernels)]

    def import_file(self, path: Path) -> Merged:
        """Add the records of a .jsonl file, as the team's. Raises DatabaseError for a file that cannot be read or stored, or is foreign."""
        def read(skipped: list[Skipped], known: Known) -> Iterator[Incoming | None]:
            try:
                yield from ((r, insert_values(r, TEAM)) for r in transfer.iterate_records(path, skipped))
            except OSError as e:
                raise DatabaseError(f"{path} cannot be read: {e.strerror or e}") from e
        return self._take_in(read)

    def merge(self, path: Path) -> Merged:
        """Add the records of another database file, as the team's. Raises DatabaseError where it is none, or cannot be read or stored."""
        if self.plan.write is not None and path.exists() and self.plan.write.exists() and path.samefile(self.plan.write):
            raise DatabaseError(f"{path} is the database that is merged into; name another one")

        def read(skipped: list[Skipped], known: Known) -> Iterator[Incoming | None]:
            try:
                conn = files.open_for_reading(path)
                if conn is None:
                    raise DatabaseError(f"{path} does not exist or is empty")
                with closing(conn):
                    for record in RECORDS:
                        yield from _checked_rows(conn, path, record, skipped, known)
            except (sqlite3.Error, OSError, NewerSchema, ForeignDatabase) as e:
                advice = "; svod-db import reads .jsonl files" if path.suffix == ".jsonl" else ""
                raise DatabaseError(f"{path} cannot be merged: {e}{advice}") from e
        return self._take_in(read)

    def _take_in(self, read: Callable[[list[Skipped], Known], Iterator[Incoming | None]]) -> Merged:
        """Add the records that `read` gives, as the team's, all or none, without holding them in memory; None stands for one that is here.
        What `gc` removed stays away."""
        def add(conn: sqlite3.Connection) -> Merged:
            skipped: list[Skipped] = []
            conn.execute(f"PRAGMA cache_size = -{MERGE_CACHE >> 10}")      # random keys go to random pages
            pruned = {(kernel, target): before for kernel, target, before in conn.execute("SELECT kernel, target, before FROM pruned")
                      if isinstance(before, float)}
            added = count = 0

            def is_pruned(r: Record) -> bool:
                return isinstance(r, Measurement) and _is_prunable(r) and r.taken_at < pruned.get((r.kernel, r.target), 0.0)
            records = read(skipped, partial(_known, conn))
            while chunk := list(itertools.islice(records, TAKEN_AT_ONCE)):
                count += len(chunk)
                rows = ((type(r), row) for r, row in filter(None, chunk) if not (pruned and is_pruned(r)))
                added += _insert_rows(conn, rows)
            return Merged(added, count - added, skipped)
        next(read([], lambda kind, ids: set()), None)       # what cannot be read is refused before anything is made
        merged: Merged = self._write(add, must=True)
        return merged

    def gc(self, older_than: float) -> Collected:
        """Remove void claims, and measurements that can no longer decide anything: those screened or raced more than `older_than` seconds
        ago, of kernels that have a winner. Verdicts and confirmed measurements are never removed. Raises DatabaseError."""
        settled = sorted(place for place, ranking in self.all_rankings(alone=True).items() if ranking)
        horizon = time.time() - older_than

        def collect(conn: sqlite3.Connection) -> Collected:
            conn.executemany("INSERT OR REPLACE INTO pruned(kernel, target, before) VALUES (?, ?, ?)", [(*p, horizon) for p in settled])
            removed = conn.executemany("DELETE FROM measurements WHERE kernel = ? AND target = ? AND step != 'confirm' "
                                       "AND status != 'wrong' AND taken_at < ?", [(*pair, horizon) for pair in settled]).rowcount
            rows = conn.execute(f"SELECT {claims.COLUMNS} FROM claims").fetchall()
            void = [(row["kernel"], row["target"]) for row in rows if claims.live(row, time.time()) is None]
            conn.executemany("DELETE FROM claims WHERE kernel = ? AND target = ?", void)
            return Collected(removed, len(void))
        collected: Collected = self._write(collect, must=True)
        assert self._own is not None, "_write(must=True) wrote to the file"
        try:
            self._own.conn.execute("VACUUM")
        except sqlite3.Error as e:
            raise DatabaseError(f"{self._own.name}: records were removed, but the file could not be made smaller: {e}") from e
        return collected

    # -- what could not be stored --------------------------------------------------------------------------------------------
    def store_again(self) -> bool:
        """Offer the records in memory to the file once more. True: all of them are in the file, which is used again from now on."""
        with self._lock:
            self._after_fork()
            path = self.plan.write
            if path is None or self.read_only or self._unwritable is None:
                return path is not None and not self.read_only
            kept = self._kept()
            try:
                conn = files.open_for_writing(path, wal=self.plan.wal)
                try:
                    with write_transaction(conn):
                        for r, rank in kept:
                            conn.execute(INSERT[type(r)], insert_values(r, rank))
                finally:
                    conn.close()
            except (sqlite3.Error, OSError, NewerSchema, ForeignDatabase) as e:
                log.debug("%s still cannot be written: %s", path, e)
                return False
            if kept:
                log.warning("tuning database: %s can be written again; the %d records kept in memory were stored", path, len(kept))
            if self._own is not None:
                self._own.close()
            self._own, self._unwritable = None, None
            self._memo.clear()
            self._open_own()
            return True

    def export_unstored(self, path: Path) -> int:
        """Write all records of the kernels that have records in memory to a .jsonl file, which `import_file` reads. Returns their number.
        Raises OSError."""
        with self._lock:
            kernels = {r.kernel for r, _ in self._kept() if not isinstance(r, TargetFacts)}  # type: ignore[attr-defined]
            count = self.export(path, kernels)
            self._exported = True
            return count

    def _kept(self) -> list[tuple[Record, int]]:
        """The records in memory with their layers."""
        memory = self._memory
        return [] if memory is None else [(r, rank) for kind in RECORDS for r, rank in memory.select(kind, None, None)]

    # -- closing ------------------------------------------------------------------------------------------------------------
    def close(self) -> None:
        """Close all connections. The records in memory are offered to the file once more; a warning says so if that fails."""
        with self._lock:
            self._heartbeat.stop()
            self._after_fork()
            if self._unwritable and not self.read_only and not self.store_again() and not self._exported and (kept := self._kept()):
                log.warning("tuning database: %s; %d records of this run are lost", self._unwritable, len(kept))
            for layer in (self._own, self._memory, *(self._read or ()), *(self._shipped or ())):
                if layer is not None:
                    layer.close()
            self._own, self._memory, self._read, self._shipped = None, None, [], []

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()


def _insert(conn: sqlite3.Connection, records: Iterable[Record], layer: int) -> int:
    """Add records of `layer` inside a transaction. Returns how many were new, or known only from a farther layer."""
    return _insert_rows(conn, ((type(r), insert_values(r, layer)) for r in records))


def _insert_rows(conn: sqlite3.Connection, rows_: Iterable[tuple[type[Record], tuple[Any, ...]]]) -> int:
    by_type: dict[type[Record], list[tuple[Any, ...]]] = {}
    for kind, row in rows_:
        by_type.setdefault(kind, []).append(row)
    return sum(conn.executemany(INSERT[t], rows).rowcount for t, rows in by_type.items())


def _known(conn: sqlite3.Connection, kind: type[Record], ids: Sequence[Any]) -> set[Any]:
    """Those of these ids that the database has, of its own or of the team."""
    found = conn.execute(f"SELECT id FROM {kind.table} WHERE layer <= ? AND id IN ({', '.join('?' * len(ids))})", (TEAM, *ids))
    return {id for id, in found}


def _checked_rows(conn: sqlite3.Connection, path: Path, record: type[R], skipped: list[Skipped], known: Known) -> Iterator[Incoming | None]:
    """The records in a table of a stranger's database, whose ids are checked; None for a row whose id is `known`, as it adds nothing."""
    cursor = conn.execute(f"SELECT id, * FROM {record.table}")
    cursor.row_factory = None       # of tuples dictionaries are made faster than of rows
    names = [name for name, *_ in cursor.description][1:]
    rest = ROW_COLUMNS[record][1:]

    def read(row: tuple[Any, ...]) -> Incoming:
        values = dict(zip(names, row[1:], strict=True))
        content = record.from_row(values)
        content.check_id(row[0])
        return content, (content.id, *[values[c] for c in rest], TEAM)
    while rows := cursor.fetchmany(KNOWN_AT_ONCE):
        here = known(record, [row[0] for row in rows])
        for row in rows:
            if row[0] in here:
                yield None
            elif (content := transfer.admit(partial(read, row), str(path), f"{record.table}:{row[0]!s:.40}", skipped)) is not None:
                yield content


def _is_prunable(m: Measurement) -> bool:
    """Whether a measurement decides nothing once its kernel has a winner: what `gc` removes."""
    return m.step != "confirm" and m.status != "wrong"


def origins_of(db: TuningDB, kernel: str) -> list[str]:
    """The places in models that a kernel comes from."""
    return sorted({o.origin for o, _ in db.select(OriginRecord, kernel)})
