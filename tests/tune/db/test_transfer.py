"""Moving records: files that are data, and merging as set union."""
from __future__ import annotations

import json
from dataclasses import replace
from itertools import permutations
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from svod.errors import DatabaseError
from svod.tune.db import SHIPPED, TEAM, Measurement, OriginRecord, Record, Rounding, Skipped, TargetFacts, TuningDB, derive_winner, layers
from svod.tune.db.moving import export, import_file, merge
from svod.tune.db.records import RECORD_COLUMNS, RECORDS, digest
from svod.tune.db.transfer import read_records, write_records
from tests.tune.db.make_version import CONTENT
from tests.tune.db.samples import OTHER, TARGET, choice, confirmed, form_times, plan_times, screened, verdict, winning

K, J = "k" * 32, "j" * 32
EVERYTHING = [*CONTENT, *choice(K, J), *choice(J, target=OTHER), form_times(0.5), plan_times(0.5)]


@pytest.fixture(autouse=True)
def nothing_shipped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(layers, "shipped_files", lambda: ())


def content(db: TuningDB) -> set[str]:
    return {r.id for kind in RECORDS for r, _ in db.select(kind)}


def test_a_file_keeps_everything_and_is_stable(tmp_path: Path) -> None:
    assert {type(r) for r in EVERYTHING} == set(RECORDS)
    assert write_records(tmp_path / "a.jsonl", EVERYTHING) == len({r.id for r in EVERYTHING})
    write_records(tmp_path / "b.jsonl", list(reversed(EVERYTHING)))
    assert (tmp_path / "a.jsonl").read_bytes() == (tmp_path / "b.jsonl").read_bytes()
    records, skipped = read_records(tmp_path / "a.jsonl")
    assert {r.id for r in records} == {r.id for r in EVERYTHING} and skipped == []
    with TuningDB.open(tmp_path / "t.db") as db:
        assert import_file(db, tmp_path / "a.jsonl").added == len({r.id for r in EVERYTHING})
        assert import_file(db, tmp_path / "a.jsonl").added == 0
        export(db, tmp_path / "c.jsonl")
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
        import_file(db, tmp_path / "a.jsonl")
    assert not (tmp_path / "t.db").exists()


def test_a_newer_format_is_refused_as_a_whole(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"format":"svod-tune-db","version":3}\n')
    with TuningDB.open(":none:") as db:
        with pytest.raises(DatabaseError, match=r"version 3.*update svod"):
            import_file(db, tmp_path / "a.jsonl")
        with pytest.raises(DatabaseError, match="cannot be read"):
            import_file(db, tmp_path / "missing.jsonl")


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
        count = export(db, tmp_path / "w.jsonl", winners_only=True)
        assert count == 2 + 3 + 2, "two winners with their verifications, one bad verdict, two kernels"
        assert export(db, tmp_path / "k.jsonl", [K], winners_only=True) == 4
    with TuningDB.open(str(tmp_path / "o.db") + ":" + str(tmp_path / "w.jsonl")) as db:
        assert [w.linear for w in db.ranking(K, TARGET)] == ["aa"]


def test_choices_of_kernels_to_round_travel_whole(tmp_path: Path) -> None:
    """A choice was measured as a set of kernels, so it is exported whole where one of them is asked for, with what describes them."""
    described = TargetFacts(TARGET, {"model": "EPYC"}), *(r for k in (K, J) for r in winning(kernel=k)[2:])
    with TuningDB.open(tmp_path / "t.db") as db, TuningDB.open(tmp_path / "o.db") as other:
        db.record([*described, *choice(K, J), *choice(J, plan="9c" * 16), *choice("x" * 32, plan="9d" * 16)])
        assert export(db, tmp_path / "k.jsonl", [K]) == 5, "two records of the choice, two kernels, the target"
        assert export(db, tmp_path / "w.jsonl", [K], winners_only=True, anonymous=True) == 4, "without the facts about the machine"
        assert export(db, tmp_path / "a.jsonl", roundings=False) == 2
        import_file(other, tmp_path / "w.jsonl")
        assert {(r.kernel, r.used, r.samples, layer) for r, layer in other.select(Rounding)} == {(K, True, "", TEAM), (J, False, "", TEAM)}
        merge(other, tmp_path / "t.db")
        assert len(other.select(Rounding)) == 6, "the anonymous copies have another content"


def test_choices_are_looked_up_by_their_plan(tmp_path: Path) -> None:
    """In files of both formats."""
    with TuningDB.open(tmp_path / "t.db") as db:
        db.record([*choice(K, J), *choice(J, plan="9c" * 16), *choice(K, plan="9c" * 16, target="another"), *winning(kernel=K)])
        export(db, tmp_path / "t.jsonl")
    for name in ("t.db", "t.jsonl"):
        with TuningDB.open(f"{tmp_path / 'o.db'}:{tmp_path / name}") as db:
            assert [(r.kernel, r.plan) for r, _ in db.select(Rounding, target=TARGET, plan="9c" * 16)] == [(J, "9c" * 16)], name
            assert len(db.select(Rounding, plan="9c" * 16)) == 2 and len(db.select(Rounding)) == 4
            assert len(db.select(Measurement, K, plan="9c" * 16)) == len(db.select(Measurement, K)), "measurements have no plan"


def test_an_anonymous_export_decides_the_same_and_names_nobody(tmp_path: Path) -> None:
    with TuningDB.open(tmp_path / "t.db") as db, TuningDB.open(tmp_path / "o.db") as other:
        host = {"machine": "secret-host", "executor": "secret", "sizes": [{"at": {"v0": 3}, "seconds": 1e-5, "ratio": 0.5}],
                "variables": {"v0": "secret_n"}}
        search = db.begin_search(K, TARGET)
        db.record([confirmed(0.5, "aa", host=host, search=search), verdict("verified", "aa", by="secret@host", search=search),
                   verdict("wrong", "zz", by="secret@host"), OriginRecord(K, "/home/secret/model.py:3"),
                   TargetFacts(TARGET, {"os": "secret"})])
        export(db, tmp_path / "w.jsonl", winners_only=True, anonymous=True)
        assert "secret" not in (tmp_path / "w.jsonl").read_text() and search not in (tmp_path / "w.jsonl").read_text()
        import_file(other, tmp_path / "w.jsonl")
        won = db.winner(K, TARGET)
        [theirs] = other.ranking(K, TARGET)
        assert won is not None and theirs == won._replace(layer=TEAM, measurement=theirs.measurement, sizes=theirs.sizes, search="")
        assert [s.at for s in theirs.sizes] == [{"v0": 3}], "the names of variables are the user's"
        import_file(db, tmp_path / "w.jsonl")
        assert [w.linear for w in db.ranking(K, TARGET)] == ["aa"]


@pytest.mark.parametrize("anonymous", [False, True])
def test_what_was_restored_is_not_barred_where_it_is_imported(tmp_path: Path, anonymous: bool) -> None:
    with TuningDB.open(tmp_path / "t.db") as db, TuningDB.open(tmp_path / "o.db") as other:
        db.record([confirmed(0.5, "aa"), verdict("verified", "aa")])
        assert db.retract(K, None, None, "a busy machine") == 1 and db.restore(K, None, None, "it was another") == 1
        export(db, tmp_path / "w.jsonl", winners_only=True, anonymous=anonymous)
        import_file(other, tmp_path / "w.jsonl")
        assert db.winner(K, TARGET) is not None and other.winner(K, TARGET) is not None


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


POOL: list[Record] = [*CONTENT, confirmed(0.3, "ee"), verdict("verified", "ee"), verdict("retracted", "aa"), screened("ff"),
                      verdict("restored", "aa", lifts=(verdict("retracted", "aa").id,)), confirmed(0.002, "ee", taken_at=7.0),
                      confirmed(1.0, "hh", ratio_low=1.0, ratio_high=1.0, baseline_linear="hh"), verdict(linear="hh"),
                      replace(confirmed(0.3, "gg"), extra={"power": 65.0}), verdict(linear="gg")]


@pytest.mark.slow
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
                merge(db, path)
            results.add((frozenset(content(db)), tuple(db.ranking(K, TARGET))))
    with TuningDB.open(directory / "left.db") as left, TuningDB.open(directory / "right.db") as right:
        merge(left, paths[0])
        merge(left, paths[1])
        merge(right, paths[2])
        merge(right, directory / "left.db")
        results.add((frozenset(content(right)), tuple(right.ranking(K, TARGET))))
    assert len(results) == 1


def test_files_of_an_older_and_of_a_newer_svod_keep_their_identity(tmp_path: Path) -> None:
    """Records of format 1 have all fields, and digests over all of them. Records of a newer svod have unknown fields: this svod keeps them,
    computes the same digest as the newer one, and exports both again."""
    newer = [{**confirmed(0.4, "nn").to_json(), "power": 65.0, "rounds": [3, 4]}, {**verdict(linear="nn").to_json(), "trust": "lab"}]
    for line in newer:
        line["id"] = digest(str(line["kind"]), {k: v for k, v in line.items() if k not in ("kind", "id")})
    first = [{"kind": r.kind, **{n: getattr(r, n) for n in RECORD_COLUMNS[r.kind]}} for r in (confirmed(0.5, "oo"), verdict(linear="oo"))]
    for line in first:
        line["id"] = digest(line["kind"], {k: v for k, v in line.items() if k not in ("kind", "id")}, version=1)
    for name, version, lines in (("newer", 2, newer), ("first", 1, first)):
        text = [{"format": "svod-tune-db", "version": version, "targets": [TARGET]}, *lines]
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(x) + "\n" for x in text))
    with TuningDB.open(tmp_path / "a.db") as a, TuningDB.open(tmp_path / "b.db") as b:
        assert import_file(a, tmp_path / "newer.jsonl") == (2, 0, []) and import_file(a, tmp_path / "first.jsonl") == (2, 0, [])
        assert [w.linear for w in a.ranking(K, TARGET)] == ["nn", "oo"]
        assert {m.id for m, _ in a.select(Measurement)} == {newer[0]["id"], confirmed(0.5, "oo").id}
        assert merge(b, tmp_path / "a.db").added == 4 and content(b) == content(a)
        export(b, tmp_path / "again.jsonl")
        exported = [json.loads(line) for line in (tmp_path / "again.jsonl").read_text().splitlines()[1:]]
        assert [x for x in exported if x.get("power")] == [json.loads(json.dumps(newer[0]))]
        b.record([confirmed(0.5, "oo"), verdict(linear="oo")])
        assert len(content(b)) == 4, "a record of format 1 and the same of today are one"


def test_every_line_of_a_hostile_file_is_skipped_with_a_reason(tmp_path: Path) -> None:
    good = confirmed(0.5, "aa").to_json()
    deep = json.dumps(good).replace('"load": 0.25', '"load": ' + "[" * 900 + "]" * 900)
    lines = [json.dumps({**good, "time": 0}).replace('"time": 0', '"time": 1' + "0" * 320), deep, '{"kind":"measurement"}', "null", "[[[[",
             json.dumps({**{k: v for k, v in good.items() if k != "id"}, "reason": "\ud800"}),
             json.dumps({**good, "id": "x"}),
             json.dumps({**good, "layer": -1}),
             json.dumps({**good, **{f"f{i}": 0 for i in range(100)}}), '{"kind": "pickle", "x": "os.system"}']
    (tmp_path / "a.jsonl").write_text('{"format":"svod-tune-db","version":2,"targets":["' + TARGET + '"]}\n' + "\n".join(lines) + "\n"
                                      + json.dumps(good) + "\n" + json.dumps(verdict(linear="aa").to_json()) + "\n")
    with TuningDB.open(tmp_path / "t.db") as db:
        merged = import_file(db, tmp_path / "a.jsonl")
        assert merged.added == 2 and [s.where.rsplit(":", 1)[1] for s in merged.skipped] == [str(n) for n in range(2, 2 + len(lines))]
    with TuningDB.open(str(tmp_path / "o.db") + ":" + str(tmp_path / "a.jsonl")) as db:
        assert [w.linear for w in db.ranking(K, TARGET)] == ["aa"] and len(db.skipped) >= len(lines) - 3


def test_rows_that_no_svod_wrote_cost_themselves_only(tmp_path: Path) -> None:
    import sqlite3
    with TuningDB.open(tmp_path / "a.db") as a:
        a.record([*winning(0.5, "aa"), *(confirmed(0.1, f"x{i}") for i in range(8)), *(verdict(linear=f"x{i}") for i in range(8))])
    conn = sqlite3.connect(tmp_path / "a.db")
    for i, change in enumerate(["layer = -1", "layer = 'own'", "reason = CAST(x'ff80' AS TEXT)", "samples = '" + "[" * 5000 + "'",
                                "extra = '{\"ratio\": 0.1}'", "time = 'x'", "extra = 7", "host = x'00'"]):
        conn.execute(f"UPDATE measurements SET {change} WHERE linear = 'x{i}'")
    conn.commit()
    conn.close()
    with TuningDB.open(str(tmp_path / "o.db") + ":" + str(tmp_path / "a.db")) as db:
        assert [w.linear for w in db.ranking(K, TARGET)] == ["aa"] and db.problem is None
        assert len([s for s in db.skipped if ":measurements:" in s.where]) == 8
        merged = merge(db, tmp_path / "a.db")
        assert len(merged.skipped) >= 6 and [w.linear for w in db.ranking(K, TARGET) if w.linear == "aa"]


def test_altered_rows_of_another_database_are_skipped(tmp_path: Path) -> None:
    import sqlite3
    with TuningDB.open(tmp_path / "a.db") as a:
        a.record([*winning(0.5, "aa"), *winning(0.6, "bb")])
    conn = sqlite3.connect(tmp_path / "a.db")
    conn.execute("UPDATE measurements SET ratio = 0.01, ratio_low = 0.01, ratio_high = 0.01 WHERE linear = 'bb'")
    conn.commit()
    conn.close()
    with TuningDB.open(tmp_path / "b.db") as b:
        merged = merge(b, tmp_path / "a.db")
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
            merge(db, other)
        assert content(db) == before


def test_the_pure_rule_agrees_with_the_database(tmp_path: Path) -> None:
    with TuningDB.open(tmp_path / "t.db") as db:
        db.record(POOL)
        measurements = [m for m in POOL if isinstance(m, Measurement) and m.target == TARGET]
        expected = derive_winner(measurements, [r for r in POOL if r.kind == "verdict"], {m.id: 0 for m in measurements})  # type: ignore[misc]
        assert db.winner(K, TARGET) == expected and expected is not None and expected.linear == "ee"
