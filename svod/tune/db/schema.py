"""The tables, their version, and the way from older versions to the newest.

Every table but `claims` holds records (`records.py`): its primary key is the digest of the row's content, its columns are the record's
fields, nested values are JSON text. Such rows are only ever inserted, so that merging two databases is set union. One column more,
`layer`, is local and no part of the content: 0 for what this database's own searches found, 1 for what was merged or imported.

    targets       what is known about machines with a target key
    kernels       what a kernel computes (AST as data, structure, flops, bytes); origins: where in a model it comes from
    searches      who searched what, with what; a row at the start and one at the end
    measurements  what each candidate did
    verdicts      verified, wrong, retracted
    claims        who searches what right now (never exported or merged)

`PRAGMA application_id` says that a file is a tuning database of svod, `PRAGMA user_version` holds the schema's version. A new version is
one more function in UPGRADES; a database of each older version is kept under tests and upgraded there.
"""
from __future__ import annotations

import sqlite3
from collections.abc import Callable
from typing import TYPE_CHECKING

from svod.errors import DatabaseError
from svod.tune.db.records import RECORDS, Record

if TYPE_CHECKING:
    from sqlite_utils import Database

APPLICATION_ID = 0x53564F44  # "SVOD"
SCHEMA_VERSION = 1

OWN, TEAM, SHIPPED = 0, 1, 2
LAYER_NAMES = ("own", "team", "shipped")

INTEGERS = frozenset({"codegen", "protocol", "noisy", "ast_version"})
NULLABLE = frozenset({"time", "anchor", "baseline", "ratio", "ratio_low", "ratio_high", "ended_at"})
REALS = NULLABLE | {"taken_at", "started_at", "flops", "bytes"}


class NewerSchema(DatabaseError):
    """The database was written by a newer svod."""


class ForeignDatabase(DatabaseError):
    """A file that is no tuning database of svod."""


def create_version_1(db: Database) -> None:
    """The tables of version 1, in an empty database."""
    def create(name: str, columns: tuple[str, ...], pk: str | tuple[str, ...]) -> None:
        types: dict[str, type] = {c: int if c in INTEGERS else float if c in REALS else str for c in columns}
        if name != "claims":
            types["layer"] = int
        not_null = [c for c in types if c not in NULLABLE]
        db.table(name).create(types, pk=pk, not_null=not_null)

    create("targets", ("id", "target", "facts"), "id")
    create("kernels", ("id", "kernel", "name", "ast", "ast_version", "structure", "flops", "bytes"), "id")
    create("origins", ("id", "kernel", "origin"), "id")
    create("searches", ("id", "search", "kernel", "target", "strategy", "executor", "config", "svod", "by", "started_at", "ended_at",
                        "outcome", "result"), "id")
    create("measurements", ("id", "kernel", "target", "chain", "linear", "status", "codegen", "compiler", "protocol", "step", "reason",
                            "time", "samples", "anchor", "baseline", "baseline_linear", "ratio", "ratio_low", "ratio_high", "noisy",
                            "search", "host", "taken_at"), "id")
    create("verdicts", ("id", "kernel", "target", "linear", "verdict", "codegen", "compiler", "by", "method", "reason", "search",
                        "taken_at"), "id")
    db.table("claims").create({"kernel": str, "target": str, "token": str, "host": str, "boot_id": str, "pid": int, "heartbeat": float,
                         "since": float}, pk=("kernel", "target"), not_null=["token", "host", "boot_id", "pid", "heartbeat", "since"])
    # a look-up reads only what may decide it: confirmed measurements, and those that condemn
    db.execute("CREATE INDEX measurements_deciding ON measurements(kernel, target) WHERE step = 'confirm' OR status = 'wrong'")
    for table in ("measurements", "verdicts"):
        db.execute(f"CREATE INDEX {table}_kernel_target ON {table}(kernel, target)")
    for table in ("kernels", "origins", "searches"):
        db.execute(f"CREATE INDEX {table}_kernel ON {table}(kernel)")


#: UPGRADES[v] turns a database of version v into one of version v + 1. 0 is an empty file.
UPGRADES: tuple[Callable[[Database], None], ...] = (create_version_1,)


def read_version(conn: sqlite3.Connection) -> int:
    """The schema's version; 0 for an empty database. Raises NewerSchema, ForeignDatabase, sqlite3.Error."""
    version = int(conn.execute("PRAGMA user_version").fetchone()[0])
    application = int(conn.execute("PRAGMA application_id").fetchone()[0])
    if application == 0 and version == 0:
        if conn.execute("SELECT count(*) FROM sqlite_master").fetchone()[0] == 0:
            return 0
        raise ForeignDatabase("it is an SQLite database of another program")
    if application != APPLICATION_ID:
        raise ForeignDatabase("it is an SQLite database of another program")
    if version > SCHEMA_VERSION:
        raise NewerSchema(f"it has schema version {version}, this svod knows versions up to {SCHEMA_VERSION}; update svod, "
                          "or name another database with --db or SVOD_TUNE_DB")
    return version


def upgrade(conn: sqlite3.Connection) -> None:
    """Bring the database up to date, all steps in one transaction; safe when several processes do it at once.

    Raises NewerSchema, ForeignDatabase, sqlite3.Error; the database is then as it was."""
    from sqlite_utils import Database  # imports for a tenth of a second: only where tables are made

    conn.execute("BEGIN IMMEDIATE")
    try:
        version = read_version(conn)  # another process may have been here meanwhile
        db = Database(conn)
        for step in UPGRADES[version:]:
            step(db)
        conn.execute(f"PRAGMA application_id = {APPLICATION_ID}")
        conn.execute(f"PRAGMA user_version = {SCHEMA_VERSION}")
        conn.execute("COMMIT")
    except BaseException:
        if conn.in_transaction:
            conn.execute("ROLLBACK")
        raise


def insert_statement(record: type[Record]) -> str:
    """Set union for one row: insert it, or, where it is known, keep the nearer layer."""
    columns = ("id", *record.types, "layer")
    return (f"INSERT INTO {record.table}({', '.join(f'[{c}]' for c in columns)}) VALUES ({', '.join(':' + c for c in columns)}) "
            "ON CONFLICT(id) DO UPDATE SET layer = excluded.layer WHERE excluded.layer < layer")


INSERT: dict[type[Record], str] = {r: insert_statement(r) for r in RECORDS}
