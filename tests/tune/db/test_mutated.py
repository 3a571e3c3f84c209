"""Mutated and hostile records: the short form of experiments/mutated_records.py, and what it has found, one by one."""
from __future__ import annotations

import contextlib
import importlib
import sqlite3
import time
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from svod import config
from svod.cli.db.listing import winner_rows
from svod.core.kernel.chain_text import parse_chain
from svod.core.kernel.scheduler import Opt
from svod.errors import DatabaseError, KernelOptError
from svod.tune import capture, lock
from svod.tune.capture import read_capture
from svod.tune.db import Measurement, TuningDB, layers
from svod.tune.db.moving import gc, merge
from tests.draws import a_half
from tests.tune.db.samples import TARGET, screened, winning

EXPERIMENTS = Path(__file__).resolve().parents[3] / "experiments"
K = "k" * 32


@pytest.fixture(autouse=True)
def quiet_world(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(layers, "shipped_files", lambda: ())
    monkeypatch.setattr(config, "_said", set())


@pytest.mark.slow
def test_mutated_files_of_every_kind(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(EXPERIMENTS)
    mutated = importlib.import_module("mutated_records")
    counts, findings = mutated.run(range(24), records=30, processes=1, limit=60.0, tell=lambda text: None)
    assert not findings
    assert counts["records"] == 24 * 30 and all(counts[kind] for kind in ("jsonl", "database", "lock", "capture"))
    assert counts["chains of the database"] and counts["chains of the heuristic"]


def filled(path: Path) -> Path:
    with TuningDB.open(path) as db:
        db.record(winning(0.5, "aa"))
    return path


def change(path: Path, *statements: str, values: Any = ()) -> None:
    with closing(sqlite3.connect(path, isolation_level=None)) as conn:
        for statement in statements:
            conn.execute(statement, values)


@pytest.mark.parametrize("column", a_half(["heartbeat", "pid", "host", "token", "since"]))
@pytest.mark.parametrize("odd", ["now", b"\xff", -1, 1 << 40, 1e308])
def test_a_row_that_is_no_claim_holds_nothing(tmp_path: Path, column: str, odd: Any) -> None:
    path = filled(tmp_path / "t.db")
    now = time.time() + 1e6      # a time at which any valid claim is void, as its heartbeat is too old
    row = {"kernel": K, "target": TARGET, "token": "t", "host": "h", "boot_id": "b", "pid": 1, "heartbeat": now, "since": now, column: odd}
    change(path, f"INSERT INTO claims({', '.join(row)}) VALUES ({', '.join('?' * len(row))})", values=list(row.values()))
    with TuningDB.open(path) as db:
        assert db.claims.holder(K, TARGET) is None
        assert gc(db, 1e9).claims == 1
        claim = db.claims.take(K, TARGET)
        assert claim is not None and claim.token is not None and db.problem is None
        claim.release()


def test_what_was_pruned_is_read_as_numbers(tmp_path: Path) -> None:
    path, other = filled(tmp_path / "t.db"), tmp_path / "other.db"
    with TuningDB.open(other) as db:
        db.record([screened("bb")])
    change(path, "INSERT INTO pruned(kernel, target, before) VALUES (?, ?, ?)", values=(K, TARGET, "x"))
    with TuningDB.open(path) as db:
        assert merge(db, other).added == 1


def test_computed_columns_are_refused(tmp_path: Path) -> None:
    """A computed column could take any time and memory whenever a row is read."""
    path = filled(tmp_path / "t.db")
    change(path, "ALTER TABLE measurements ADD COLUMN x GENERATED ALWAYS AS (hex(zeroblob(50000000)))")
    with TuningDB.open(path) as db:
        assert db.winner(K, TARGET) is None and "computed column" in str(db.problem)
    with TuningDB.open(f"{tmp_path / 'own.db'}:{path}") as db:
        assert db.winner(K, TARGET) is None and "computed column" in db.skipped[0].reason


def test_names_that_are_no_text_are_an_error_of_the_database(tmp_path: Path) -> None:
    """SQLite's error message about the malformed schema contains the name, which is not UTF-8."""
    path = filled(tmp_path / "t.db")
    with closing(sqlite3.connect(path, isolation_level=None)) as conn:
        conn.execute("PRAGMA writable_schema = ON")
        conn.execute("UPDATE sqlite_master SET name = CAST(x'd5d5' AS TEXT), sql = 'CREATE NOTHING' WHERE name = 'measurements'")
    with TuningDB.open(path) as db:
        assert db.winner(K, TARGET) is None and "no text" in str(db.problem)
    with TuningDB.open(f"{tmp_path / 'own.db'}:{path}") as db:
        assert db.winner(K, TARGET) is None and "no text" in db.skipped[0].reason
        with pytest.raises(DatabaseError, match="no text"):
            merge(db, path)


def test_a_value_that_is_too_long_costs_no_memory(tmp_path: Path) -> None:
    path = filled(tmp_path / "t.db")
    change(path, "UPDATE measurements SET reason = zeroblob(100000000)")
    with TuningDB.open(path) as db:
        assert db.winner(K, TARGET) is None and "too big" in str(db.problem)


def test_a_database_without_ids_is_refused(tmp_path: Path) -> None:
    path = filled(tmp_path / "t.db")
    change(path, "ALTER TABLE measurements RENAME COLUMN id TO other")
    with TuningDB.open(tmp_path / "u.db") as db, pytest.raises(DatabaseError, match="no such column"):
        merge(db, path)


def test_an_interval_that_was_altered_makes_no_slow_chain_win(tmp_path: Path) -> None:
    path = tmp_path / "t.db"
    with TuningDB.open(path) as db:
        db.record(winning(28.9, "aa"))
    change(path, "UPDATE measurements SET ratio_low = 0.5")
    with TuningDB.open(path) as db:
        assert db.select(Measurement) and db.winner(K, TARGET) is None


def test_rows_that_are_no_records_are_not_listed(tmp_path: Path) -> None:
    path = filled(tmp_path / "t.db")
    with TuningDB.open(path) as db:
        db.record([screened("bb", kernel="x" * 32), screened("cc", kernel="y" * 32)])
    change(path, "UPDATE measurements SET target = x'ff' WHERE linear = 'bb'")
    change(path, "UPDATE measurements SET step = 5 WHERE linear = 'cc'")
    with TuningDB.open(path) as db:
        assert [r.kernel for r in winner_rows(db)] == [K] and len(db.skipped) >= 1


LONG = 200_000


@pytest.mark.slow
@pytest.mark.parametrize("text", ["(" * LONG, "UPCAST(" * LONG, "a" * LONG, f"UPCAST(o0, {'9' * LONG})", "UPCAST(o0, 4" + "," * LONG,
                                  "UPCAST(o0," + " " * LONG, "UPCAST(o0, 2" + " " * LONG + "(", " " * LONG + "x", "UPCAST(o0, 2)" * LONG])
def test_any_text_is_read_as_a_chain_or_refused_in_a_moment(text: str) -> None:
    started = time.process_time()
    with contextlib.suppress(KernelOptError):
        assert len(parse_chain(text)) in (1, LONG)
    assert time.process_time() - started < 5.0


def test_arguments_of_chains_are_numbers_words_or_several() -> None:
    assert parse_chain("UPCAST( o0 , 8 ), ORDER(o1, o0 , r0) STAGE(s1) TC(r0, vnni8) X(o0, ) Y(o0,-3)") == (
        Opt("UPCAST", "o0", 8), Opt("ORDER", "o1", ("o0", "r0")), Opt("STAGE", "s1", None), Opt("TC", "r0", "vnni8"), Opt("X", "o0", None),
        Opt("Y", "o0", -3))


def test_a_lock_file_of_long_chains_is_read_in_a_moment(tmp_path: Path) -> None:
    path = tmp_path / "m.lock.jsonl"
    line = f'{{"kernel": "k", "target": "t", "chain": "{"UPCAST(o0, 2) " * 7000}"}}\n'
    path.write_text('{"format": "svod-lock", "version": 1}\n' + line * 300)
    started = time.process_time()
    assert lock.locked_lines(path) == {}
    assert time.process_time() - started < 10.0


@pytest.mark.parametrize("ast", ["[]", "{}", "null", '{"nodes": [[0, 0, [], 0]]}', '{"nodes": [["SINK", "void", [5], null]]}',
                                 "[" * 500 + "]" * 500])
def test_a_capture_with_any_ast_is_read(tmp_path: Path, ast: str) -> None:
    path = tmp_path / "c.jsonl"
    path.write_text(capture.to_text([capture.header()]) + f'{{"kernel": "k", "target": "t", "ast": {ast}}}\n')
    found = read_capture(path)
    assert not found.plans and len(found.problems) == 1 and "line 2" in found.problems[0]
