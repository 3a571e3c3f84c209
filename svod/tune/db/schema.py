"""The tables, their version, and the upgrades from older versions.

Nine tables hold records (`records.py`). The primary key is the digest of the row's content, the columns are the fields that records had in
format 1, nested values are JSON text, and later fields are in the JSON object `extra`: a new field needs no new schema. Rows of records
are only inserted, so merging two databases is set union. The column `layer` is local and no part of the content: 0 for records of this
database's own searches, 1 for records that were merged or imported.

    targets       facts about the machines with a target key
    kernels       descriptions of kernels: AST as data, structure, flops, bytes
    origins       the places in models that kernels come from
    searches      searches with their settings: a row at the start and one at the end
    measurements  times or failures of candidates
    verdicts      judgements on LINEARs: verified, wrong, retracted, restored
    roundings     the kernels of plans that may be rounded under the policy "fast", and whether they are
    form_times    the times of convolutions inside plans, directly and by transforms
    plan_times    the times of plans by the rules of the cut, and with alternatives

Two tables are local, and are never exported or merged:

    claims        the kernels that processes search right now
    pruned        (kernel, target, time) of measurements that `svod-db gc` removed, so that a later merge does not add them again

`PRAGMA application_id` marks a file as a tuning database of svod. `PRAGMA user_version` holds the version of its schema. A new version is
one more function in UPGRADES. A database of each older version is kept under tests and upgraded there.
"""
from __future__ import annotations

import sqlite3
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any

from svod.errors import DatabaseError
from svod.tune.db.records import RECORD_COLUMNS, RECORDS, FormTimes, PairTimes, PlanTimes, Record, RecordError, Rounding

if TYPE_CHECKING:
    from sqlite_utils import Database

APPLICATION_ID = 0x53564F44  # "SVOD" in ASCII
SCHEMA_VERSION = 7

FIRST_RECORDS = tuple([r for r in RECORDS if r not in (Rounding, FormTimes, PlanTimes)])      # the records that version 1 had

OWN, TEAM, SHIPPED = 0, 1, 2
LAYER_NAMES = ("own", "team", "shipped")


class NewerSchema(DatabaseError):
    """The database was written by a newer svod."""


class ForeignDatabase(DatabaseError):
    """The file is not a tuning database of svod."""


def create_version_1(db: Database) -> None:
    """The tables of version 1, in an empty database."""
    integers = {"codegen", "protocol", "noisy", "ast_version", "layer"}
    nullable = {"time", "anchor", "baseline", "ratio", "ratio_low", "ratio_high", "ended_at"}
    reals = {*nullable, "taken_at", "started_at", "flops", "bytes"}
    for record in FIRST_RECORDS:
        columns = {c: int if c in integers else float if c in reals else str for c in ("id", *RECORD_COLUMNS[record.kind], "layer")}
        db.table(record.table).create(columns, pk="id", not_null=columns.keys() - nullable)
    claims = {"kernel": str, "target": str, "token": str, "host": str, "boot_id": str, "pid": int, "heartbeat": float, "since": float}
    db.table("claims").create(claims, pk=("kernel", "target"), not_null=claims.keys() - {"kernel", "target"})
    for name in ("measurements", "verdicts"):
        db.table(name).create_index(("kernel", "target"), f"{name}_kernel_target")
    for name in ("kernels", "origins", "searches"):
        db.table(name).create_index(("kernel",), f"{name}_kernel")
    # a look-up reads only the measurements that may decide it: confirmed ones, and ones with wrong numbers
    db.execute("CREATE INDEX measurements_deciding ON measurements(kernel, target) WHERE step = 'confirm' OR status = 'wrong'")


def add_version_2(db: Database) -> None:
    """Add the column for later fields, make digests without fields that have their defaults, and add the table `pruned`."""
    for record in FIRST_RECORDS:
        db.execute(f"ALTER TABLE {record.table} ADD COLUMN extra TEXT NOT NULL DEFAULT '{{}}'")
        renamed = []
        for row in db.execute(f"SELECT * FROM {record.table}").fetchall():
            with suppress(RecordError):     # a row that is no record stays as it is: readers skip and report it
                renamed.append((record.from_row(row).id, row["id"]))
        db.conn.executemany(f"UPDATE OR REPLACE {record.table} SET id = ? WHERE id = ?", renamed)
    db.table("pruned").create({"kernel": str, "target": str, "before": float}, pk=("kernel", "target"))


def add_version_3(db: Database) -> None:
    """Index kernels by their structure, to find related ones. Drop a table that was never used."""
    db.execute("DROP TABLE IF EXISTS checks")
    db.table("kernels").create_index(("structure",), "kernels_structure")


def add_version_4(db: Database) -> None:
    """Index all columns by which measurements are counted, so that a count reads the index alone and no table."""
    db.execute("DROP INDEX IF EXISTS measurements_kernel_target")
    db.table("measurements").create_index(("kernel", "target", "status"), "measurements_counted")


def add_version_5(db: Database) -> None:
    """Add the table of roundings."""
    reals = ("max_error", "error", "before", "after", "plan_error", "plan_before", "plan_after", "taken_at")
    kinds = {c: float if c in reals else int if c in ("codegen", "used") else str for c in ("id", *RECORD_COLUMNS[Rounding.kind])}
    columns = {**kinds, "layer": int, "extra": str}
    db.table(Rounding.table).create(columns, pk="id", not_null=columns.keys() - {"error"})
    db.table(Rounding.table).create_index(("target", "plan"), "roundings_target_plan")


def add_version_6(db: Database) -> None:
    """Add the table of the times of forms."""
    _add_pair_times(db, FormTimes, {"direct", "transformed"}, set())


def add_version_7(db: Database) -> None:
    """Add the table of the times of plans."""
    _add_pair_times(db, PlanTimes, {"by_rules", "otherwise"}, {"untried"})


def _add_pair_times(db: Database, record: type[PairTimes], seconds: set[str], counts: set[str]) -> None:
    """Add the table of a kind of pair, with its columns of `seconds` and of `counts`."""
    reals = seconds | {"ratio", "ratio_low", "ratio_high", "taken_at"}
    integers = counts | {"codegen", "protocol", "noisy"}
    kinds = {c: float if c in reals else int if c in integers else str for c in ("id", *RECORD_COLUMNS[record.kind])}
    columns = {**kinds, "layer": int, "extra": str}
    db.table(record.table).create(columns, pk="id", not_null=columns.keys())
    db.table(record.table).create_index(("target",), f"{record.table}_target")


#: UPGRADES[v] turns a database of version v into one of version v + 1. 0 is an empty file.
UPGRADES: tuple[Callable[[Database], None], ...] = (create_version_1, add_version_2, add_version_3, add_version_4, add_version_5,
                                                      add_version_6, add_version_7)


def read_version(conn: sqlite3.Connection) -> int:
    """The schema's version; 0 for an empty database. Raises NewerSchema, ForeignDatabase, sqlite3.Error."""
    try:
        version = int(conn.execute("PRAGMA user_version").fetchone()[0])
    except sqlite3.DatabaseError as e:
        if e.sqlite_errorcode == sqlite3.SQLITE_NOTADB:
            raise ForeignDatabase(str(e)) from e
        raise
    application = int(conn.execute("PRAGMA application_id").fetchone()[0])
    if application == version == 0 and conn.execute("SELECT count(*) FROM sqlite_master").fetchone()[0] == 0:
        return 0
    if application != APPLICATION_ID:
        raise ForeignDatabase("it is an SQLite database of another program")
    ours = [r.table for r in RECORDS] + ["claims", "pruned"]
    for kind, name, sql in conn.execute("SELECT type, name, sql FROM sqlite_master"):
        if kind == "trigger" or (name in ours and (kind != "table" or str(sql).upper().startswith("CREATE VIRTUAL"))):
            raise ForeignDatabase(f"it has the {kind} {name!r:.40}, and svod makes plain tables only")
    computed = conn.execute(f"SELECT m.name, x.name FROM sqlite_master m, pragma_table_xinfo(m.name) x WHERE x.hidden > 1 "
                            f"AND m.name IN ({', '.join('?' * len(ours))})", ours).fetchone()
    if computed is not None:
        raise ForeignDatabase(f"its table {computed[0]} has the computed column {computed[1]!r:.40}, and svod makes plain columns only")
    if version > SCHEMA_VERSION:
        raise NewerSchema(f"it has schema version {version}, this svod knows versions up to {SCHEMA_VERSION}; update svod, "
                          "or name another database with --db or SVOD_TUNE_DB")
    return version


@contextmanager
def write_transaction(conn: sqlite3.Connection) -> Iterator[None]:
    """BEGIN IMMEDIATE … COMMIT; any error rolls back and leaves the database as it was before."""
    conn.execute("BEGIN IMMEDIATE")
    try:
        yield
        conn.execute("COMMIT")
    except BaseException:
        if conn.in_transaction:
            conn.execute("ROLLBACK")
        raise


def upgrade(conn: sqlite3.Connection) -> None:
    """Bring the database up to date, all steps in one transaction; safe when several processes do it at once.

    Raises NewerSchema, ForeignDatabase, sqlite3.Error; the database is then as it was."""
    from sqlite_utils import Database  # the import takes a tenth of a second, so only code that creates tables imports it

    with write_transaction(conn):
        for step in UPGRADES[read_version(conn):]:      # read again, as another process may have upgraded meanwhile
            step(Database(conn))
        conn.execute(f"PRAGMA application_id = {APPLICATION_ID}")
        conn.execute(f"PRAGMA user_version = {SCHEMA_VERSION}")


#: The columns of a record's row in the order in which INSERT takes their values; the layer comes after them.
ROW_COLUMNS: dict[type[Record], tuple[str, ...]] = {r: ("id", *RECORD_COLUMNS[r.kind], "extra") for r in RECORDS}


def insert_statement(record: type[Record]) -> str:
    """The INSERT statement for a kind of record: it adds a new row; for a known row it keeps the nearer of the two layers."""
    columns = (*ROW_COLUMNS[record], "layer")
    return (f"INSERT INTO {record.table}({', '.join(f'[{c}]' for c in columns)}) VALUES ({', '.join('?' * len(columns))}) "
            "ON CONFLICT(id) DO UPDATE SET layer = excluded.layer WHERE excluded.layer < layer")


INSERT: dict[type[Record], str] = {r: insert_statement(r) for r in RECORDS}


def insert_values(record: Record, layer: int) -> tuple[Any, ...]:
    """The values that the INSERT statement takes for a record, in the order of its columns."""
    row = record.to_row()
    return (*(row[c] for c in ROW_COLUMNS[type(record)]), layer)


def insert_rows(conn: sqlite3.Connection, records: Iterable[tuple[type[Record], tuple[Any, ...]]]) -> int:
    """Add rows to the tables of their kinds. Returns the number of rows that were new, or known only from a farther layer."""
    by_type: dict[type[Record], list[tuple[Any, ...]]] = {}
    for kind, row in records:
        by_type.setdefault(kind, []).append(row)
    return sum(conn.executemany(INSERT[t], rows).rowcount for t, rows in by_type.items())
