"""Export and import of records, merging of databases, and removal of records that no decision depends on.

    export, export_unstored   write records to a .jsonl file (`transfer.py`)
    import_file, merge        add the records of a .jsonl file or of another database
    gc                        removes records that no winner needs

Only the user's records are exported and removed. Imported and merged records get the layer TEAM.
"""
from __future__ import annotations

import itertools
import sqlite3
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from svod.errors import DatabaseError
from svod.tune.db import claims, files, transfer
from svod.tune.db.records import (
    RECORDS,
    KernelRecord,
    Measurement,
    OriginRecord,
    PairTimes,
    Record,
    Rounding,
    Search,
    TargetFacts,
    Verdict,
    anonymised,
    changed,
)
from svod.tune.db.schema import ROW_COLUMNS, TEAM, insert_rows, insert_values
from svod.tune.db.store import TuningDB
from svod.tune.db.transfer import Skipped

R = TypeVar("R", bound=Record)

MERGE_CACHE_BYTES = 256 << 20   # size of SQLite's page cache during a merge
MERGED_AT_ONCE = 10_000         # records of a merge that are in memory at once
SOUGHT_AT_ONCE = 500            # ids that one query looks for

Incoming = tuple[Record, tuple[Any, ...]]       # a record to add, and its row for INSERT
Known = Callable[[type[Record], Sequence[Any]], set[Any]]   # (kind, ids) → the ids that the user's or the team's layer has


class Merged(NamedTuple):
    """The result of a merge or an import: the numbers of new and of known records, and the skipped ones."""

    added: int
    known: int
    skipped: list[Skipped]


class Collected(NamedTuple):
    """The numbers of rows that `gc` removed."""

    measurements: int
    claims: int


def export(db: TuningDB, path: Path, kernels: Iterable[str] | None = None, *, winners_only: bool = False, anonymous: bool = False,
           roundings: bool = True) -> int:
    """Write the user's records of all kernels, or of the given ones, to a .jsonl file. `winners_only`: only the winners' measurements and
    verifications, all wrong and retracted verdicts, the choices of kernels to round, and the times of forms
    and of plans. `anonymous`: without names of
    people, machines, files and searches. `roundings`: with the choices of kernels to round, each whole if one of its kernels is asked for.
    Claims are never exported. Returns the number of records. Raises OSError."""
    asked = None if kernels is None else set(kernels)
    measurements = [m for m, _ in db.select(Measurement) if asked is None or m.kernel in asked]
    of_plans: list[Rounding | PairTimes] = [c for c, _ in db.pair_times() if asked is None or c.kernel in asked]
    of_plans += _roundings(db, asked) if roundings else []
    chosen = _records_of_winners(db, measurements, of_plans, asked) if winners_only else _records_of(db, measurements, of_plans, asked)
    return transfer.write_records(path, changed(chosen, anonymised) if anonymous else chosen)


def _records_of(db: TuningDB, measurements: Sequence[Measurement], of_plans: Sequence[Rounding | PairTimes],
                asked: set[str] | None) -> list[Record]:
    """The given measurements and records of plans, and all other records of the kernels `asked` for (None: of all kernels)."""
    kernels = None if asked is None else asked.union(r.kernel for r in of_plans)
    return [*measurements, *of_plans, *_described(db, [*measurements, *of_plans], kernels),
            *(v for v, _ in db.select(Verdict) if asked is None or v.kernel in asked),
            *(s for s, _ in db.select(Search) if asked is None or s.kernel in asked)]


def _roundings(db: TuningDB, asked: set[str] | None) -> list[Rounding]:
    """The records of all choices of kernels to round, or of the choices about a kernel that is asked for."""
    every = [r for r, _ in db.select(Rounding)]
    choices = {r.choice for r in every if asked is None or r.kernel in asked}
    return [r for r in every if r.choice in choices]


def _records_of_winners(db: TuningDB, measurements: Sequence[Measurement], of_plans: Sequence[Rounding | PairTimes],
                        asked: set[str] | None) -> list[Record]:
    """The measurements of winners among the given ones, the given records of plans, and the other records that decide about either."""
    winners = {ranking[0].measurement for ranking in db.all_rankings(alone=True).values() if ranking}
    kept = [m for m in measurements if m.id in winners]
    code = {(m.kernel, m.target, m.linear) for m in kept}
    verdicts = [v for v, _ in db.select(Verdict) if asked is None or v.kernel in asked]
    # a search verifies a chain in its races and again when it confirms it: one of these verdicts is enough
    verified = {(v.kernel, v.target, v.linear, v.codegen): v for v in verdicts if v.verdict == "verified"}
    used: list[Measurement | Rounding | PairTimes] = [*kept, *of_plans]
    return [*used, *_described(db, used, {r.kernel for r in used}), *(v for v in verdicts if v.verdict != "verified"),
            *(v for (*place, _), v in verified.items() if tuple(place) in code)]


def _described(db: TuningDB, records: Sequence[Measurement | Rounding | PairTimes], kernels: set[str] | None) -> list[Record]:
    """The facts about the targets of these records, and the descriptions of `kernels` (None: of all)."""
    targets = {r.target for r in records}
    described: list[KernelRecord | OriginRecord] = [*(k for k, _ in db.select(KernelRecord)),
                                                    *(o for o, _ in db.select(OriginRecord))]
    return [*(t for t, _ in db.select(TargetFacts) if t.target in targets),
            *(r for r in described if kernels is None or r.kernel in kernels)]


def import_file(db: TuningDB, path: Path) -> Merged:
    """Add the records of a .jsonl file to the team's layer. Raises DatabaseError for another kind of file, or if it cannot be read or its
    records cannot be stored."""
    def read(skipped: list[Skipped], known: Known) -> Iterator[Incoming | None]:
        try:
            yield from ((r, insert_values(r, TEAM)) for r in transfer.iterate_records(path, skipped))
        except OSError as e:
            raise DatabaseError(f"{path} cannot be read: {e.strerror or e}") from e
    return _take_in(db, read)


def merge(db: TuningDB, path: Path) -> Merged:
    """Add the records of another database file to the team's layer. Raises DatabaseError if it is no database or cannot be read, or if its
    records cannot be stored."""
    if db.plan.write is not None and path.exists() and db.plan.write.exists() and path.samefile(db.plan.write):
        raise DatabaseError(f"{path} is the database that is merged into; name another one")

    def read(skipped: list[Skipped], known: Known) -> Iterator[Incoming | None]:
        try:
            conn = files.open_for_reading(path)
            if conn is None:
                raise DatabaseError(f"{path} does not exist or is empty")
            with closing(conn):
                for record in RECORDS:
                    yield from _checked_rows(conn, path, record, skipped, known)
        except files.CANNOT_OPEN as e:
            advice = "; svod-db import reads .jsonl files" if path.suffix == ".jsonl" else ""
            raise DatabaseError(f"{files.complaint(path, e)}{advice}") from e
    return _take_in(db, read)


def _take_in(db: TuningDB, read: Callable[[list[Skipped], Known], Iterator[Incoming | None]]) -> Merged:
    """Add the records that `read` yields to the team's layer, all or none, without holding all in memory. `read` yields None for a record
    that the database has. Measurements that `gc` has removed are not added again."""
    def add(conn: sqlite3.Connection) -> Merged:
        skipped: list[Skipped] = []
        conn.execute(f"PRAGMA cache_size = -{MERGE_CACHE_BYTES >> 10}")      # digests as keys access pages at random
        pruned = {(kernel, target): before for kernel, target, before in conn.execute("SELECT kernel, target, before FROM pruned")
                  if isinstance(before, float)}
        added = count = 0

        def is_pruned(r: Record) -> bool:
            return isinstance(r, Measurement) and _is_prunable(r) and r.taken_at < pruned.get((r.kernel, r.target), 0.0)
        records = read(skipped, partial(_known, conn))
        while chunk := list(itertools.islice(records, MERGED_AT_ONCE)):
            count += len(chunk)
            rows = ((type(r), row) for r, row in filter(None, chunk) if not (pruned and is_pruned(r)))
            added += insert_rows(conn, rows)
        return Merged(added, count - added, skipped)
    next(read([], lambda kind, ids: set()), None)       # raises for an unreadable source before the database is created
    return db.storage.write(add, must=True)


def gc(db: TuningDB, older_than: float) -> Collected:
    """Remove void claims and measurements that can no longer decide anything: those that were only screened or raced, more than
    `older_than` seconds ago, of kernels that have a winner. Verdicts and confirmed measurements are never removed. Raises DatabaseError."""
    settled = sorted(place for place, ranking in db.all_rankings(alone=True).items() if ranking)
    horizon = time.time() - older_than

    def collect(conn: sqlite3.Connection) -> Collected:
        conn.executemany("INSERT OR REPLACE INTO pruned(kernel, target, before) VALUES (?, ?, ?)", [(*p, horizon) for p in settled])
        removed = conn.executemany("DELETE FROM measurements WHERE kernel = ? AND target = ? AND step != 'confirm' "
                                   "AND status != 'wrong' AND taken_at < ?", [(*pair, horizon) for pair in settled]).rowcount
        rows = conn.execute(f"SELECT {claims.HOLDER_COLUMNS} FROM claims").fetchall()
        void = [(row["kernel"], row["target"]) for row in rows if claims.live(row, time.time()) is None]
        conn.executemany("DELETE FROM claims WHERE kernel = ? AND target = ?", void)
        return Collected(removed, len(void))
    collected = db.storage.write(collect, must=True)
    db.storage.make_smaller()
    return collected


def export_unstored(db: TuningDB, path: Path) -> int:
    """Write all records of the kernels that have records in memory to a .jsonl file, which `import_file` reads. Returns their number.
    Raises OSError."""
    with db.storage.lock:
        kernels = {r.kernel for r, _ in db.storage.kept() if not isinstance(r, TargetFacts)}  # type: ignore[attr-defined]
        count = export(db, path, kernels)
        db.storage.exported = True
        return count


def _known(conn: sqlite3.Connection, kind: type[Record], ids: Sequence[Any]) -> set[Any]:
    """The subset of `ids` that the database has in the user's or the team's layer."""
    found = conn.execute(f"SELECT id FROM {kind.table} WHERE layer <= ? AND id IN ({', '.join('?' * len(ids))})", (TEAM, *ids))
    return {id for id, in found}


def _checked_rows(conn: sqlite3.Connection, path: Path, record: type[R], skipped: list[Skipped], known: Known) -> Iterator[Incoming | None]:
    """Yield the records in a table of an untrusted database after checking their ids; None for a row whose id is `known` already."""
    cursor = conn.execute(f"SELECT id, * FROM {record.table}")
    cursor.row_factory = None       # plain tuples, which become dictionaries faster than sqlite3.Row
    names = [name for name, *_ in cursor.description][1:]
    rest = ROW_COLUMNS[record][1:]

    def read(row: tuple[Any, ...]) -> Incoming:
        values = dict(zip(names, row[1:], strict=True))
        content = record.from_row(values)
        content.check_id(row[0])
        return content, (content.id, *[values[c] for c in rest], TEAM)
    while rows := cursor.fetchmany(SOUGHT_AT_ONCE):
        here = known(record, [row[0] for row in rows])
        for row in rows:
            if row[0] in here:
                yield None
            elif (content := transfer.admit(partial(read, row), str(path), f"{record.table}:{row[0]!s:.40}", skipped)) is not None:
                yield content


def _is_prunable(m: Measurement) -> bool:
    """Whether `gc` may remove a measurement: it decides nothing once its kernel has a winner."""
    return m.step != "confirm" and m.status != "wrong"
