"""Versions of the schema: every older database is upgraded and loses nothing; newer and foreign ones are left alone."""
from __future__ import annotations

import shutil
import sqlite3
from pathlib import Path

import pytest

from svod.errors import DatabaseError
from svod.tune.db import TuningDB, layers
from svod.tune.db.files import open_for_reading, open_for_writing
from svod.tune.db.moving import merge
from svod.tune.db.records import RECORD_COLUMNS, RECORDS
from svod.tune.db.schema import APPLICATION_ID, SCHEMA_VERSION, UPGRADES, ForeignDatabase, NewerSchema, read_version
from tests.tune.db.make_version import CONTENT, KERNEL
from tests.tune.db.samples import OTHER, TARGET

DATA = Path(__file__).parent / "data"


@pytest.fixture(autouse=True)
def nothing_shipped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(layers, "shipped_files", lambda: ())


def test_there_is_a_database_and_an_upgrade_for_each_version() -> None:
    assert len(UPGRADES) == SCHEMA_VERSION
    assert sorted(p.name for p in DATA.glob("version_*.db")) == sorted(f"version_{v}.db" for v in range(1, SCHEMA_VERSION + 1))


@pytest.mark.parametrize("old", sorted(DATA.glob("version_*.db")), ids=lambda p: p.stem)
@pytest.mark.parametrize("read_only", [False, True])
def test_a_database_of_every_version_is_upgraded_and_complete(old: Path, read_only: bool, tmp_path: Path) -> None:
    path = tmp_path / "t.db"
    shutil.copy(old, path)
    before = path.read_bytes()
    with TuningDB.open(path, read_only=read_only) as db:
        held = {r.id for kind in RECORDS for r, _ in db.select(kind)}
        assert held == {r.id for r in CONTENT} and db.problem is None and db.skipped == []
        assert (w := db.winner(KERNEL, TARGET)) is not None and w.linear == "aa"
        assert (w := db.winner(KERNEL, OTHER)) is not None and w.linear == "cc"
        if not read_only:
            assert db.record(CONTENT) == 0
    if read_only:
        assert path.read_bytes() == before
    else:
        conn = sqlite3.connect(path)
        assert read_version(conn) == SCHEMA_VERSION
        conn.close()


def test_a_newer_schema_is_refused_and_left_alone(tmp_path: Path) -> None:
    path = tmp_path / "t.db"
    shutil.copy(DATA / "version_1.db", path)
    conn = sqlite3.connect(path)
    conn.execute(f"PRAGMA user_version = {SCHEMA_VERSION + 1}")
    conn.close()
    before = path.read_bytes()
    with pytest.raises(NewerSchema, match=f"version {SCHEMA_VERSION + 1}.*update svod"):
        open_for_writing(path, wal=True)
    with pytest.raises(NewerSchema, match=f"version {SCHEMA_VERSION + 1}.*update svod"):
        open_for_reading(path)
    assert path.read_bytes() == before


def test_another_programs_database_is_refused_and_left_alone(tmp_path: Path) -> None:
    path = tmp_path / "t.db"
    conn = sqlite3.connect(path)
    conn.execute("CREATE TABLE places(url)")
    conn.commit()
    conn.close()
    before = path.read_bytes()
    with pytest.raises(ForeignDatabase):
        open_for_writing(path, wal=True)
    assert path.read_bytes() == before


def test_a_failed_upgrade_leaves_nothing_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def half(db: object) -> None:
        UPGRADES_BEFORE[0](db)  # type: ignore[arg-type]
        raise sqlite3.OperationalError("disk I/O error")
    UPGRADES_BEFORE = UPGRADES
    monkeypatch.setattr("svod.tune.db.schema.UPGRADES", (half,))
    with pytest.raises(sqlite3.OperationalError, match="disk"):
        open_for_writing(tmp_path / "t.db", wal=True)
    conn = sqlite3.connect(tmp_path / "t.db")
    assert conn.execute("SELECT count(*) FROM sqlite_master").fetchone() == (0,)
    assert conn.execute("PRAGMA user_version").fetchone() == (0,)
    conn.close()
    monkeypatch.undo()
    open_for_writing(tmp_path / "t.db", wal=True).close()
    conn = sqlite3.connect(tmp_path / "t.db")
    assert conn.execute("PRAGMA application_id").fetchone() == (APPLICATION_ID,)
    assert conn.execute("PRAGMA journal_mode").fetchone() == ("wal",)
    conn.close()


def test_a_database_with_triggers_or_with_views_for_tables_is_refused(tmp_path: Path) -> None:
    """A view over an endless query would hang a look-up, and a trigger would run when records are inserted."""
    for n, hostile in enumerate(["CREATE TRIGGER t AFTER INSERT ON verdicts BEGIN DELETE FROM measurements; END",
                                 "DROP TABLE verdicts; CREATE VIEW verdicts AS WITH RECURSIVE x(id) AS "
                                 "(SELECT 1 UNION ALL SELECT id FROM x) SELECT id, 'k' AS kernel FROM x",
                                 "DROP TABLE kernels; CREATE VIRTUAL TABLE kernels USING fts5(id)"]):
        path = tmp_path / f"{n}.db"
        open_for_writing(path, wal=False).close()
        conn = sqlite3.connect(path)
        conn.executescript(hostile)
        conn.close()
        for opened in (lambda path=path: open_for_reading(path), lambda path=path: open_for_writing(path, wal=False)):
            with pytest.raises(ForeignDatabase, match="plain tables"):
                opened()
        with TuningDB.open(tmp_path / "own.db") as db, pytest.raises(DatabaseError, match="plain tables"):
            merge(db, path)


def test_the_columns_of_a_table_are_the_fields_of_its_record(tmp_path: Path) -> None:
    conn = open_for_writing(tmp_path / "t.db", wal=True)
    for record in RECORDS:
        columns = [row["name"] for row in conn.execute(f"PRAGMA table_info({record.table})")]
        assert columns == ["id", *RECORD_COLUMNS[record.kind], "layer", "extra"] and set(RECORD_COLUMNS[record.kind]) <= set(record.types)
    query = layers.SELECT_DECIDING.format(place="kernel = ? AND target = ? AND ", most=5)
    plan = conn.execute(f"EXPLAIN QUERY PLAN {query}", ("k", "t")).fetchall()
    assert "measurements_deciding" in plan[0]["detail"], "a look-up does not read what was only screened"
    plan = conn.execute("EXPLAIN QUERY PLAN SELECT * FROM roundings WHERE target = ? AND plan = ?", ("t", "p")).fetchall()
    assert "roundings_target_plan (target=? AND plan=?)" in plan[0]["detail"], "choices are looked up by their plan"
    conn.close()
