"""Makes the checked-in database of the current schema version: run once when a version is released, then never again for it.

    python -m tests.tune.db.make_version tests/tune/db/data/version_1.db
"""
from __future__ import annotations

import sys
from pathlib import Path

from svod.tune.db import OriginRecord, Record, Search, TargetFacts, files, schema
from svod.tune.db.schema import INSERT, insert_values
from tests.tune.db.samples import OTHER, TARGET, screened, verdict, winning

KERNEL = "k" * 32

#: Records of the database, all of which an upgrade to a later version must keep.
CONTENT: list[Record] = [
    *winning(0.5, "aa"), *winning(0.4, "bb"), *winning(0.8, "cc", target=OTHER), verdict("wrong", "bb", reason="row 3", by="a@b"),
    screened("dd", status="timeout", reason="10 s"), OriginRecord(KERNEL, "model.py:7"), TargetFacts(TARGET, {"model": "EPYC"}),
    Search("s1", KERNEL, TARGET, strategy="beam", executor="local", config={"width": 8}, started_at=5.0, ended_at=9.5, outcome="finished")]


def make(path: Path) -> None:
    conn = files.open_for_writing(path, wal=False)
    with schema.write_transaction(conn):
        for r in CONTENT:
            conn.execute(INSERT[type(r)], insert_values(r, schema.OWN))
    conn.execute("VACUUM")
    conn.close()


if __name__ == "__main__":
    make(Path(sys.argv[1]))
