"""`TuningDB`: what the rest of svod sees of the tuning database.

Guarantees
* Records are only added, never changed; adding one twice is adding it once. `record` stores all of its records or none.
* Many processes and threads may use one database at once; a writer waits up to 30 s for its turn. A handle survives a fork: the child
  opens connections of its own.
* A database that cannot be opened, read or written never stops a search or a `prepare`: what can be read is read, what is found is
  kept in memory (and offered to the file again by `store_again` and on `close`), the reason is in `problem` and logged once. What was
  stored stays stored.
* Reading validates: a record that is not what it should be is skipped, listed in `skipped`, and logged once per file.
* Looking up never creates a file, and never imports sqlite-utils; that happens when tables are made.

Only the process that drives a search writes. Workers never open the database.
"""
from __future__ import annotations

import getpass
import logging
import os
import socket
import sqlite3
import threading
import time
import uuid
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

from svod import config
from svod.errors import DatabaseError
from svod.system.forksafe import remake_after_fork
from svod.tune.db import claims, files, layers, transfer
from svod.tune.db.records import RECORDS, KernelRecord, Measurement, OriginRecord, Record, RecordError, Search, TargetFacts, Verdict
from svod.tune.db.schema import INSERT, OWN, SHIPPED, TEAM, ForeignDatabase, NewerSchema
from svod.tune.db.transfer import Skipped
from svod.tune.db.winners import Winner, rank_winners

if TYPE_CHECKING:
    from typing import Self

log = logging.getLogger("svod.tune.db")

R = TypeVar("R", bound=Record)

IN_MEMORY = "What is found now is kept in memory"

_abandoned: list[Any] = []  # connections inherited by a fork: closing them would drop the parent's locks

#: Which of several measurements of one LINEAR says most about it, first to last.
_TELLING = {("wrong", ""): 0, ("ok", "confirm"): 1, ("ok", "race"): 2, ("ok", "screen"): 3, ("slow", ""): 4, ("crash", ""): 5,
            ("timeout", ""): 6, ("error", ""): 7}


class Merged(NamedTuple):
    """What a merge or an import did: records that were new, records that were known, and what was skipped."""

    added: int
    known: int
    skipped: list[Skipped]


class Collected(NamedTuple):
    """What `gc` removed."""

    measurements: int
    claims: int


def whoami() -> str:
    """user@host, for the columns that say who."""
    try:
        user = getpass.getuser()
    except (KeyError, OSError, ImportError):
        user = str(os.getuid()) if hasattr(os, "getuid") else "user"
    return f"{user}@{socket.gethostname()}"


class TuningDB:
    """An open tuning database: the file that is written and all layers that are read. Use `TuningDB.open`; a context manager."""

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
        self._unwritable: str | None = "" if plan.write is None or read_only else None  # why nothing is written; "": nothing was asked for
        self._searches: dict[str, Search] = {}
        self._heartbeat = claims.Heartbeat()
        self._held: set[tuple[str, str]] = set()  # claims that hold within this process only
        self._memo: dict[tuple[str, str], list[Winner]] = {}
        self._memo_version: tuple[int, ...] = ()
        self._told = 0
        self._exported = False      # what is in memory was written to a file of its own
        if plan.problem is not None and not read_only:
            self._trouble(plan.problem)
        self._open_own()

    @classmethod
    def open(cls, spec: str | os.PathLike[str] | None = None, fresh: bool = False, read_only: bool = False) -> TuningDB:
        """The database that `spec` names (`PrepareConfig.db`, SVOD_TUNE_DB; None: the user's data directory; `:none:`: memory only).

        `fresh`: nothing that was there before is read; what is found is recorded. `read_only`: nothing is written to files.
        Never raises for a database that is missing, damaged, foreign, newer, or locked away: see `problem`."""
        return cls(layers.resolve(None if spec is None else os.fspath(spec)), fresh=fresh, read_only=read_only)

    # -- opening ------------------------------------------------------------------------------------------------------------
    @property
    def path(self) -> Path | None:
        """The file that is written, whether it exists yet or not; None: memory only."""
        return None if self._unwritable is not None else self.plan.write

    def _trouble(self, text: str, advice: str = "") -> None:
        if self.problem is None:
            self.problem = text
        config.log_once(log, logging.WARNING, f"tuning database: {text}{advice and f'. {advice}'}")

    def _open_own(self) -> None:
        """Open the written file if it exists, for writing where that is possible, else for reading."""
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
        """Why nothing could be stored, as far as that shows without writing; None: nothing stands in the way, or there is no file to write.
        Asked before hours of work, whose results would be lost."""
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
        self._pid, self._own, self._read = os.getpid(), None, None
        self._heartbeat = claims.Heartbeat()
        self._held.clear()
        self._memo.clear()
        self._open_own()

    def _memory_layer(self) -> layers.SqliteLayer:
        if self._memory is None:
            self._memory = layers.SqliteLayer(files.open_in_memory(), ":memory:", OWN, self.skipped)
        return self._memory

    def _layers(self) -> list[layers.Layer]:
        """All layers in order of trust. Files that appeared since are opened."""
        self._after_fork()
        if self.fresh:
            return [self._memory_layer()]
        if self._own is None:
            self._open_own()
        if self._read is None:
            opened = (layers.open_layer(path, rank, self.skipped) for path, rank in self.plan.read)
            self._read = [layer for layer in opened if layer is not None]
        return [layer for layer in (self._own, self._memory) if layer is not None] + self._read

    def _each(self, ask: Callable[[layers.Layer], Any]) -> list[Any]:
        """`ask` of every layer; one that turns out to be damaged is dropped and reported."""
        answers = []
        for layer in self._layers():
            try:
                answers.append(ask(layer))
            except sqlite3.Error as e:
                self.skipped.append(Skipped(layer.name, f"cannot be read: {e}"))
                if layer is self._own:
                    self._own = None
                    self._give_up(f"{layer.name} cannot be read: {e}", f"It was left as it is. {IN_MEMORY}")
                elif self._read is not None and layer in self._read:
                    self._read.remove(layer)
        self._tell_skipped()
        return answers

    def _tell_skipped(self) -> None:
        new, self._told = self.skipped[self._told:], len(self.skipped)
        for s in new:
            place = s.where.rpartition(":")[0] or s.where
            config.log_once(log, logging.WARNING, f"tuning database: records of {place} were skipped, the first: {s.reason} ({s.where})")

    # -- looking up ---------------------------------------------------------------------------------------------------------
    def ranking(self, kernel: str, target: str) -> list[Winner]:
        """All chains that may be used for this kernel and target, best first (`winners.py` has the rules); the others serve as seeds."""
        with self._lock:
            version = tuple(self._each(lambda layer: layer.version()))
            if version != self._memo_version:
                self._memo.clear()
                self._memo_version = version
            ranked = self._memo.get((kernel, target))
            if ranked is None:
                ranks: dict[str, int] = {}
                measurements: list[Measurement] = []
                verdicts: list[Verdict] = []
                for some, others in self._each(lambda layer: layer.deciding(kernel, target)):
                    for m, rank in some:
                        ranks[m.id] = min(rank, ranks.get(m.id, SHIPPED))
                        measurements.append(m)
                    verdicts.extend(others)
                ranked = self._memo[kernel, target] = rank_winners(measurements, verdicts, ranks) if measurements else []
            return ranked

    def winner(self, kernel: str, target: str) -> Winner | None:
        """The chain to use, or None: nothing confirmed and verified is known. Where today's LINEAR digest is not `Winner.linear` the chain
        is only a seed."""
        order = self.ranking(kernel, target)
        return order[0] if order else None

    def known_digests(self, kernel: str, target: str, codegen: int | None = None, compiler: str | None = None,
                      protocol: int | None = None) -> dict[str, Measurement]:
        """By LINEAR digest the most telling measurement there is, optionally only those of one code generator, compiler or timing
        protocol: what need not be compiled or timed again. Candidates whose worker was lost are not known."""
        best: dict[str, tuple[tuple[int, float, str], Measurement]] = {}
        for m, _ in self.select(Measurement, kernel, target):
            if not m.linear or m.status == "lost" or (codegen is not None and m.codegen != codegen) \
                    or (compiler is not None and m.compiler != compiler) or (protocol is not None and m.protocol != protocol):
                continue
            rank = (_TELLING[m.status, m.step if m.status == "ok" else ""], -m.taken_at, m.id)
            if m.linear not in best or rank < best[m.linear][0]:
                best[m.linear] = rank, m
        return {linear: m for linear, (_, m) in best.items()}

    def select(self, record: type[R], kernel: str | None = None, target: str | None = None) -> list[tuple[R, int]]:
        """All records of one kind with the rank of the nearest layer that holds them, in the order of their digests."""
        with self._lock:
            latest: dict[str, tuple[R, int]] = {}
            for some in self._each(lambda layer: list(layer.select(record, kernel, target))):
                for r, rank in some:
                    if r.id not in latest or rank < latest[r.id][1]:
                        latest[r.id] = r, rank
            return [latest[i] for i in sorted(latest)]

    # -- writing ------------------------------------------------------------------------------------------------------------
    def _sink(self) -> layers.SqliteLayer:
        """What is written now: the file, made if need be, else memory."""
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
        """`work` in a transaction on the file; where that fails, on memory from now on. `must`: raises DatabaseError instead."""
        with self._lock:
            self._memo.clear()
            sink = self._sink()
            if sink is not self._memory:
                try:
                    with files.write_transaction(sink.conn):
                        answer = work(sink.conn)
                except (sqlite3.Error, OSError) as e:
                    if must:
                        raise DatabaseError(f"{sink.name} cannot be written: {e}; nothing was changed") from e
                    self._give_up(f"{sink.name} cannot be written: {e}", f"What was stored is still there. {IN_MEMORY}")
                    sink = self._memory_layer()
                else:
                    if self.fresh:
                        with files.write_transaction(self._memory_layer().conn):
                            work(self._memory_layer().conn)
                    return answer
            if must:
                raise DatabaseError(self._unwritable or "there is no database to write to: it is :none:, or was opened read-only")
            with files.write_transaction(sink.conn):
                return work(sink.conn)

    def record(self, records: Iterable[Record], *, layer: int = OWN, must: bool = False) -> int:
        """Store records, all or none; returns how many were new (or known from a farther layer). Nothing is ever overwritten.
        `layer` says whose they are (OWN, TEAM).


        Where the file cannot be written they are kept in memory (`problem` says why), or, with `must`, DatabaseError is raised."""
        by_type: dict[type[Record], list[dict[str, Any]]] = {}
        for r in records:
            by_type.setdefault(type(r), []).append({**r.to_row(), "layer": layer})
        if not by_type:
            return 0

        def insert(conn: sqlite3.Connection) -> int:
            added = 0
            for kind, rows in by_type.items():
                added += conn.executemany(INSERT[kind], rows).rowcount
            return added
        return int(self._write(insert, must=must))

    def begin_search(self, kernel: str, target: str, *, strategy: str = "beam", executor: str = "",
                     config: Mapping[str, Any] | None = None, svod: str = "") -> str:
        """Announce a search in `searches`; returns its id, which its measurements and verdicts carry."""
        search = Search(uuid.uuid4().hex, kernel, target, strategy=strategy, executor=executor, config=config or {}, svod=svod,
                        by=whoami(), started_at=time.time())
        self._searches[search.search] = search
        self.record([search])
        return search.search

    def end_search(self, search: str, outcome: str, result: Mapping[str, Any] | None = None) -> None:
        """Say how a search ended: "finished", "budget", "interrupted", "failed"…, with counts and times. Raises DatabaseError for a search
        that this handle did not begin."""
        begun = self._searches.pop(search, None)
        if begun is None:
            raise DatabaseError(f"search {search!r} was not begun with this database handle, or has ended")
        self.record([replace(begun, ended_at=time.time(), outcome=outcome, result=result or {})])

    def retract(self, kernel: str, target: str | None, linear: str | None, reason: str) -> int:
        """Write `retracted` verdicts for the chains of a kernel that may win (optionally on one target, or one LINEAR): none of them is
        used again under the same code generator, whatever is merged later. Returns how many LINEARs. Raises DatabaseError where nothing
        can be written."""
        newest: dict[tuple[str, str], Measurement] = {}
        for m, _ in self.select(Measurement, kernel, target):
            at = (m.target, m.linear)
            if m.linear and linear in (None, m.linear) and (m.step == "confirm" or linear) \
                    and (at not in newest or m.codegen > newest[at].codegen):
                newest[at] = m
        verdicts = [Verdict(m.kernel, m.target, m.linear, "retracted", m.codegen, compiler=m.compiler, by=whoami(),
                            method="svod-db retract", reason=reason, taken_at=time.time()) for m in newest.values()]
        if verdicts:
            self.record(verdicts, must=True)
        return len(verdicts)

    # -- claims -------------------------------------------------------------------------------------------------------------
    def claim(self, kernel: str, target: str) -> claims.Claim | None:
        """The right to search (kernel, target), renewed until `release`; None: a live process holds it (`holder` says which), or this one.

        Where the file cannot be written the claim holds within this process only, and the search goes on all the same."""
        with self._lock:
            sink = self._sink()
            if sink is not self._memory:
                try:
                    with files.write_transaction(sink.conn):
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
        """The heartbeat of a claim; False where it is no longer this process's. One that cannot be written is tried at the next beat."""
        with self._lock:
            self._after_fork()
            if self._own is None or self._unwritable is not None:
                return True  # nobody can be told, nobody else can know
            try:
                with files.write_transaction(self._own.conn):
                    done = self._own.conn.execute("UPDATE claims SET heartbeat = ? WHERE kernel = ? AND target = ? AND token = ?",
                                                  (time.time(), claim.kernel, claim.target, claim.token))
            except sqlite3.Error as e:
                log.debug("claim on %s not renewed: %s", claim.kernel, e)
                return True
            return done.rowcount == 1

    def release_claim(self, claim: claims.Claim) -> None:
        """Give a claim back. Where that cannot be written it becomes void by its silence."""
        with self._lock:
            self._after_fork()
            self._heartbeat.remove(claim)
            if claim.token is None:
                self._held.discard((claim.kernel, claim.target))
            elif self._own is not None and self._unwritable is None:
                try:
                    with files.write_transaction(self._own.conn):
                        self._own.conn.execute("DELETE FROM claims WHERE kernel = ? AND target = ? AND token = ?",
                                               (claim.kernel, claim.target, claim.token))
                except sqlite3.Error as e:
                    log.debug("claim on %s not released: %s", claim.kernel, e)

    def holder(self, kernel: str, target: str) -> claims.Holder | None:
        """Who searches (kernel, target) right now, or None."""
        with self._lock:
            self._after_fork()
            self._open_own()
            if self._own is None:
                return None
            try:
                row = self._own.conn.execute("SELECT * FROM claims WHERE kernel = ? AND target = ?", (kernel, target)).fetchone()
            except sqlite3.Error as e:
                log.debug("claims of %s cannot be read: %s", self._own.name, e)
                return None
            holder = None if row is None else claims.holder_of(row)
            return None if holder is None or claims.is_void(holder, time.time()) else holder

    # -- moving records between databases -----------------------------------------------------------------------------------
    def export(self, path: Path, kernels: Iterable[str] | None = None, *, winners_only: bool = False) -> int:
        """Write records to a .jsonl file: of all kernels or of those given; with `winners_only` only what decides about the winners: their
        measurements and verifications, and everything that was found wrong or retracted. Returns how many. Raises OSError. Claims are
        never exported."""
        asked = None if kernels is None else set(kernels)
        measurements = [m for m, _ in self.select(Measurement) if asked is None or m.kernel in asked]
        chosen = self._records_of_winners(measurements, asked) if winners_only else self._records_of(measurements, asked)
        return transfer.write_records(path, chosen)

    def _records_of(self, measurements: Sequence[Measurement], asked: set[str] | None) -> list[Record]:
        """These measurements and everything beside them, of the kernels `asked` for (None: of all)."""
        return [*measurements, *self._described(measurements, asked),
                *(v for v, _ in self.select(Verdict) if asked is None or v.kernel in asked),
                *(s for s, _ in self.select(Search) if asked is None or s.kernel in asked)]

    def _records_of_winners(self, measurements: Sequence[Measurement], asked: set[str] | None) -> list[Record]:
        """What decides about the winners among these measurements."""
        pairs = sorted({(m.kernel, m.target) for m in measurements})
        winners = {w.measurement for k, t in pairs if (w := self.winner(k, t)) is not None}
        kept = [m for m in measurements if m.id in winners]
        code = {(m.kernel, m.target, m.linear) for m in kept}
        verdicts = [v for v, _ in self.select(Verdict) if asked is None or v.kernel in asked]
        return [*kept, *self._described(kept, {m.kernel for m in kept}),
                *(v for v in verdicts if v.verdict != "verified" or (v.kernel, v.target, v.linear) in code)]

    def _described(self, measurements: Sequence[Measurement], kernels: set[str] | None) -> list[Record]:
        """The facts about the targets of these measurements, and what is known about `kernels` (None: about all) themselves."""
        targets = {m.target for m in measurements}
        described: list[KernelRecord | OriginRecord] = [*(k for k, _ in self.select(KernelRecord)),
                                                        *(o for o, _ in self.select(OriginRecord))]
        return [*(t for t, _ in self.select(TargetFacts) if t.target in targets),
                *(r for r in described if kernels is None or r.kernel in kernels)]

    def import_file(self, path: Path) -> Merged:
        """Add the records of a .jsonl file, as the team's. Raises DatabaseError for a file that is none of ours, or cannot be read, or
        where nothing can be stored."""
        try:
            records, skipped = transfer.read_records(path)
        except OSError as e:
            raise DatabaseError(f"{path} cannot be read: {e.strerror or e}") from e
        added = self.record(records, layer=TEAM, must=True)
        return Merged(added, len(records) - added, skipped)

    def merge(self, path: Path) -> Merged:
        """Add the records of another database file, as the team's. Raises DatabaseError where it is none, or cannot be read or stored."""
        if self.plan.write is not None and path.exists() and self.plan.write.exists() and path.samefile(self.plan.write):
            raise DatabaseError(f"{path} is the database that is merged into; name another one")
        try:
            conn = files.open_for_reading(path)
            if conn is None:
                raise DatabaseError(f"{path} does not exist or is empty")
            records: list[Record] = []
            skipped: list[Skipped] = []
            for record in RECORDS:
                for row in conn.execute(f"SELECT * FROM {record.table}"):
                    try:
                        records.append(record.from_foreign_row(row))
                    except RecordError as e:
                        skipped.append(Skipped(f"{path}:{record.table}:{row['id']}", str(e)))
            conn.close()
        except (sqlite3.Error, OSError, NewerSchema, ForeignDatabase) as e:
            advice = "; svod-db import reads .jsonl files" if path.suffix == ".jsonl" else ""
            raise DatabaseError(f"{path} cannot be merged: {e}{advice}") from e
        added = self.record(records, layer=TEAM, must=True)
        return Merged(added, len(records) - added, skipped)

    def gc(self, older_than: float) -> Collected:
        """Remove void claims, and measurements that can decide nothing any more: only screened or raced, more than `older_than` seconds
        ago, of kernels that have a winner. Verdicts and confirmed measurements stay for ever. Raises DatabaseError."""
        settled = [(m.kernel, m.target) for m, _ in self.select(Measurement) if m.step == "confirm"]
        settled = sorted({pair for pair in settled if self.winner(*pair) is not None})
        horizon = time.time() - older_than

        def collect(conn: sqlite3.Connection) -> Collected:
            gone = 0
            for kernel, target in settled:
                gone += conn.execute("DELETE FROM measurements WHERE kernel = ? AND target = ? AND step != 'confirm' AND status != 'wrong' "
                                     "AND taken_at < ?", (kernel, target, horizon)).rowcount
            void = [h for h in map(claims.holder_of, conn.execute("SELECT * FROM claims").fetchall()) if claims.is_void(h, time.time())]
            for h in void:
                conn.execute("DELETE FROM claims WHERE kernel = ? AND target = ? AND token = ?", (h.kernel, h.target, h.token))
            return Collected(gone, len(void))
        collected: Collected = self._write(collect, must=True)
        assert self._own is not None, "_write(must=True) wrote to the file"
        try:
            self._own.conn.execute("VACUUM")
        except sqlite3.Error as e:
            raise DatabaseError(f"{self._own.name}: records were removed, but the file could not be made smaller: {e}") from e
        return collected

    # -- what could not be stored --------------------------------------------------------------------------------------------
    def store_again(self) -> bool:
        """Offer what had to be kept in memory to the file once more. True: everything is in the file, which is used again from now on."""
        with self._lock:
            self._after_fork()
            path = self.plan.write
            if path is None or self.read_only or self._unwritable is None:
                return path is not None and not self.read_only
            kept = self._kept()
            try:
                conn = files.open_for_writing(path, wal=self.plan.wal)
                try:
                    with files.write_transaction(conn):
                        for r, rank in kept:
                            conn.execute(INSERT[type(r)], {**r.to_row(), "layer": rank})
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
        """Write everything about the kernels of which something is kept in memory, for want of a file that can be written, to a .jsonl file
        that `import_file` reads. Returns how many records. Raises OSError."""
        with self._lock:
            kernels = {r.kernel for r, _ in self._kept() if not isinstance(r, TargetFacts)}  # type: ignore[attr-defined]
            count = self.export(path, kernels)
            self._exported = True
            return count

    def _kept(self) -> list[tuple[Record, int]]:
        """The records in memory, with their layer."""
        memory = self._memory
        return [] if memory is None else [(r, rank) for kind in RECORDS for r, rank in memory.select(kind, None, None)]

    # -- closing ------------------------------------------------------------------------------------------------------------
    def close(self) -> None:
        """Close all connections. What had to be kept in memory is offered to the file once more; if that fails, it is said."""
        with self._lock:
            self._heartbeat.stop()
            self._after_fork()
            if self._unwritable and not self.read_only and not self.store_again() and not self._exported and (kept := self._kept()):
                log.warning("tuning database: %s; %d records of this run are lost", self._unwritable, len(kept))
            for layer in (self._own, self._memory, *(self._read or ())):
                if layer is not None:
                    layer.close()
            self._own, self._memory, self._read = None, None, []

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()


def origins_of(db: TuningDB, kernel: str) -> list[str]:
    """Where in models a kernel comes from."""
    return sorted({o.origin for o, _ in db.select(OriginRecord, kernel)})
