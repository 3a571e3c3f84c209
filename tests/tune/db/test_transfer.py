"""Moving records: files that are data, and merging as set union."""
from __future__ import annotations

import json
from itertools import permutations
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from svod.errors import DatabaseError
from svod.tune.db import SHIPPED, TEAM, Measurement, Record, Skipped, TuningDB, derive_winner, layers
from svod.tune.db.records import RECORDS
from svod.tune.db.transfer import read_records, write_records
from tests.tune.db.make_version import CONTENT
from tests.tune.db.samples import OTHER, TARGET, confirmed, screened, verdict, winning

K = "k" * 32


@pytest.fixture(autouse=True)
def nothing_shipped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(layers, "shipped_files", lambda: ())


def content(db: TuningDB) -> set[str]:
    return {r.id for kind in RECORDS for r, _ in db.select(kind)}


def test_a_file_keeps_everything_and_is_stable(tmp_path: Path) -> None:
    assert write_records(tmp_path / "a.jsonl", CONTENT) == len({r.id for r in CONTENT})
    write_records(tmp_path / "b.jsonl", list(reversed(CONTENT)))
    assert (tmp_path / "a.jsonl").read_bytes() == (tmp_path / "b.jsonl").read_bytes()
    records, skipped = read_records(tmp_path / "a.jsonl")
    assert {r.id for r in records} == {r.id for r in CONTENT} and skipped == []
    with TuningDB.open(tmp_path / "t.db") as db:
        assert db.import_file(tmp_path / "a.jsonl").added == len({r.id for r in CONTENT})
        assert db.import_file(tmp_path / "a.jsonl").added == 0
        db.export(tmp_path / "c.jsonl")
        assert (tmp_path / "c.jsonl").read_bytes() == (tmp_path / "a.jsonl").read_bytes(), "through a database and back"
        assert (w := db.winner(K, TARGET)) is not None and w.layer == TEAM
    assert sorted(p.name for p in tmp_path.glob("*.part")) == []


def test_malformed_records_are_skipped_with_their_line(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    write_records(path, winning())
    lines = path.read_bytes().splitlines()
    altered = json.loads(next(x for x in lines if b'"kind":"measurement"' in x))
    altered["ratio"] = 0.001
    bad = [b"{", b"null", b'{"kind":"exec","code":"1"}', json.dumps(altered).encode(), b"\xff\xfe", b"", b"\x80\x04\x95pickle"]
    path.write_bytes(b"\n".join([lines[0], *bad, *lines[1:]]) + b"\n")
    records, skipped = read_records(path)
    assert {r.id for r in records} == {r.id for r in winning()}
    assert [int(s.where.rpartition(":")[2]) for s in skipped] == [2, 3, 4, 5, 6, 8], "an empty line is nothing"
    assert "altered" in skipped[3].reason


@pytest.mark.parametrize("text", [
    "", "[]\n", "{}\n", '{"format":"other","version":1}\n', '{"format":"svod-tune-db","version":"1"}\n', "\x80\x04\n"])
def test_other_files_are_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / "a.jsonl").write_text(text)
    with TuningDB.open(tmp_path / "t.db") as db, pytest.raises(DatabaseError, match="not a file of svod's tuning records"):
        db.import_file(tmp_path / "a.jsonl")
    assert not (tmp_path / "t.db").exists()


def test_a_newer_format_is_refused_as_a_whole(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"format":"svod-tune-db","version":2}\n')
    with TuningDB.open(":none:") as db:
        with pytest.raises(DatabaseError, match=r"version 2.*update svod"):
            db.import_file(tmp_path / "a.jsonl")
        with pytest.raises(DatabaseError, match="cannot be read"):
            db.import_file(tmp_path / "missing.jsonl")


def test_a_file_for_another_target_is_not_read_beyond_its_header(tmp_path: Path) -> None:
    write_records(tmp_path / "a.jsonl", winning())
    with open(tmp_path / "a.jsonl", "a", encoding="utf-8") as f:
        f.write("damaged\n")
    skipped: list[Skipped] = []
    layer = layers.JsonlLayer(tmp_path / "a.jsonl", SHIPPED, skipped)
    assert layer.deciding(K, OTHER) == ([], []) and skipped == []
    measurements, verdicts = layer.deciding(K, TARGET)
    assert len(measurements) == len(verdicts) == 1 and measurements[0][1] == SHIPPED and len(skipped) == 1
    assert layer.deciding("other", TARGET) == ([], []) and len(skipped) == 1, "read once"


def test_an_export_of_winners_is_small_and_decides_the_same(tmp_path: Path) -> None:
    with TuningDB.open(tmp_path / "t.db") as db:
        db.record([*winning(0.5, "aa"), *winning(0.4, "bb"), verdict("wrong", "bb"), *winning(0.7, "cc"),
                   *(screened(f"s{i}") for i in range(50)), *winning(0.5, "aa", kernel="x" * 32)])
        db.begin_search(K, TARGET)
        count = db.export(tmp_path / "w.jsonl", winners_only=True)
        assert count == 2 + 3 + 2, "two winners with their verifications, one bad verdict, two kernels"
        assert db.export(tmp_path / "k.jsonl", [K], winners_only=True) == 4
    with TuningDB.open(str(tmp_path / "o.db") + ":" + str(tmp_path / "w.jsonl")) as db:
        assert [w.linear for w in db.ranking(K, TARGET)] == ["aa"]


def test_exporting_over_a_file_is_all_or_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "a.jsonl"
    write_records(path, winning())
    before = path.read_bytes()

    def full(fd: int) -> None:
        raise OSError(28, "No space left on device")
    monkeypatch.setattr("os.fsync", full)
    with pytest.raises(OSError, match="No space"):
        write_records(path, [screened("x")])
    assert path.read_bytes() == before and [p.name for p in tmp_path.iterdir()] == ["a.jsonl"]


POOL: list[Record] = [*CONTENT, confirmed(0.3, "ee"), verdict("verified", "ee"), verdict("retracted", "aa"), screened("ff")]


@settings(max_examples=12, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(st.sets(st.integers(0, len(POOL) - 1), max_size=6), min_size=3, max_size=3))
def test_merging_is_idempotent_commutative_and_associative(tmp_path_factory: pytest.TempPathFactory, parts: list[set[int]]) -> None:
    directory = tmp_path_factory.mktemp("merge")
    paths = [directory / f"{i}.db" for i in range(3)]
    for path, part in zip(paths, parts, strict=True):
        with TuningDB.open(path) as db:
            db.record([POOL[i] for i in part] or [screened("none")])
    results = set()
    for n, order in enumerate(permutations(paths)):
        with TuningDB.open(directory / f"all{n}.db") as db:
            for path in (*order, order[0]):
                db.merge(path)
            w = db.winner(K, TARGET)
            results.add((frozenset(content(db)), w))
    with TuningDB.open(directory / "left.db") as left, TuningDB.open(directory / "right.db") as right:
        left.merge(paths[0])
        left.merge(paths[1])
        right.merge(paths[2])
        right.merge(directory / "left.db")
        results.add((frozenset(content(right)), right.winner(K, TARGET)))
    assert len(results) == 1


def test_altered_rows_of_another_database_are_skipped(tmp_path: Path) -> None:
    import sqlite3
    with TuningDB.open(tmp_path / "a.db") as a:
        a.record([*winning(0.5, "aa"), *winning(0.6, "bb")])
    conn = sqlite3.connect(tmp_path / "a.db")
    conn.execute("UPDATE measurements SET ratio = 0.01, ratio_low = 0.01, ratio_high = 0.01 WHERE linear = 'bb'")
    conn.commit()
    conn.close()
    with TuningDB.open(tmp_path / "b.db") as b:
        merged = b.merge(tmp_path / "a.db")
        assert len(merged.skipped) == 1 and "altered" in merged.skipped[0].reason
        assert [w.linear for w in b.ranking(K, TARGET)] == ["aa"]
        assert [m.linear for m, _ in b.select(Measurement)] == ["aa"]


@pytest.mark.parametrize("make", ["missing", "empty", "text", "foreign", "itself"])
def test_what_cannot_be_merged_is_said_and_changes_nothing(tmp_path: Path, make: str) -> None:
    import sqlite3
    with TuningDB.open(tmp_path / "own.db") as db:
        db.record(winning())
        before = content(db)
        other = tmp_path / ("own.db" if make == "itself" else "other.db")
        if make == "empty":
            other.touch()
        elif make == "text":
            other.write_text("text " * 1000)
        elif make == "foreign":
            conn = sqlite3.connect(other)
            conn.execute("CREATE TABLE x(y)")
            conn.close()
        with pytest.raises(DatabaseError, match=other.name):
            db.merge(other)
        assert content(db) == before


def test_the_pure_rule_agrees_with_the_database(tmp_path: Path) -> None:
    with TuningDB.open(tmp_path / "t.db") as db:
        db.record(POOL)
        measurements = [m for m in POOL if isinstance(m, Measurement) and m.target == TARGET]
        expected = derive_winner(measurements, [r for r in POOL if r.kind == "verdict"], {m.id: 0 for m in measurements})  # type: ignore[misc]
        assert db.winner(K, TARGET) == expected and expected is not None and expected.linear == "ee"
