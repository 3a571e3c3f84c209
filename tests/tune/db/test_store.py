"""TuningDB: looking up, recording, layers, `--fresh`, several processes."""
from __future__ import annotations

import multiprocessing as mp
import os
import sqlite3
import subprocess
import sys
from pathlib import Path

import pytest

from svod.errors import DatabaseError
from svod.tune.db import OWN, SHIPPED, TEAM, KernelRecord, Measurement, OriginRecord, Search, TuningDB, layers, origins_of
from svod.tune.db.moving import export, gc, merge
from svod.tune.db.transfer import read_records
from tests.patience import NEVER
from tests.tune.db.samples import OTHER, TARGET, confirmed, screened, verdict, winning

K = "k" * 32


@pytest.fixture(autouse=True)
def nothing_shipped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(layers, "shipped_files", lambda: ())


@pytest.fixture(params=["file", "memory"])
def db(request: pytest.FixtureRequest, tmp_path: Path) -> TuningDB:
    """A database in a file, and one in memory: both have to pass the same tests."""
    opened = TuningDB.open(tmp_path / "t.db" if request.param == "file" else ":none:")
    request.addfinalizer(opened.close)
    return opened


def test_what_is_recorded_is_found(db: TuningDB) -> None:
    assert db.winner(K, TARGET) is None and db.ranking(K, TARGET) == []
    records = [*winning(0.5, "aa"), *winning(0.7, "bb"), screened("cc")]
    assert db.record(records) == 6, "the kernel is one record"
    assert db.record(records) == 0
    won = db.winner(K, TARGET)
    assert won is not None and won.chain == confirmed().chain and won.linear == "aa" and won.layer == OWN
    assert [w.linear for w in db.ranking(K, TARGET)] == ["aa", "bb"]
    assert db.winner(K, OTHER) is None and db.winner("other", TARGET) is None
    db.record([verdict("wrong", "aa", reason="row 3")])
    won = db.winner(K, TARGET)
    assert won is not None and won.linear == "bb", "an answer that was given is not kept against new evidence"
    assert db.problem is None and db.skipped == []


def test_known_digests_tell_the_most_telling_measurement(db: TuningDB) -> None:
    db.record([screened("aa"), confirmed(0.5, "aa"), screened("bb", status="lost"), screened("cc", status="timeout"),
               screened("cc", status="crash", search="s2"), screened("dd", codegen=2), screened("", status="error"),
               screened("ee", target=OTHER), screened("ff", status="crash"), screened("ff", status="error")])
    known = db.known_digests(K, TARGET)
    assert {k: (m.status, m.step) for k, m in known.items()} == \
        {"aa": ("ok", "confirm"), "cc": (known["cc"].status, "screen"), "dd": ("ok", "screen")}, "a failure of one search is tried again"
    assert set(db.known_digests(K, TARGET, codegen=2)) == {"dd"}
    assert set(db.known_digests(K, TARGET, codegen=1, compiler="LLVM 22.1", protocol=1)) == {"aa", "cc"}
    assert not db.known_digests(K, TARGET, protocol=2) and not db.known_digests(K, TARGET, compiler="gcc")


def test_searches_have_a_beginning_and_an_end(db: TuningDB) -> None:
    search = db.begin_search(K, TARGET, strategy="beam", executor="local", config={"width": 8})
    db.record([screened("aa", search=search)])
    db.end_search(search, "budget", {"candidates": 1})
    rows = [s for s, _ in db.select(Search, K)]
    assert len(rows) == 2 and {s.search for s in rows} == {search}
    end = next(s for s in rows if s.ended_at is not None)
    assert end.outcome == "budget" and end.ended_at is not None and end.ended_at >= end.started_at and end.by
    with pytest.raises(DatabaseError, match="not begun"):
        db.end_search(search, "again")


def test_origins_are_a_set(db: TuningDB) -> None:
    db.record([OriginRecord(K, "b.py:1"), OriginRecord(K, "a.py:2"), OriginRecord(K, "b.py:1"), OriginRecord("x", "c.py:1")])
    assert origins_of(db, K)[K] == origins_of(db)[K] == ["a.py:2", "b.py:1"]


def test_looking_up_creates_nothing_and_needs_no_sqlite_utils(tmp_path: Path) -> None:
    code = ("import sys; from svod.tune.db import TuningDB; db = TuningDB.open(sys.argv[1]); assert db.winner('k', 't') is None; "
            "assert db.claims.holder('k', 't') is None; db.close(); assert 'sqlite_utils' not in sys.modules and 'ray' not in sys.modules")
    for path in (tmp_path / "sub" / "t.db", tmp_path / "made.db"):
        if path.name == "made.db":
            with TuningDB.open(path) as db:
                db.record(winning())
        subprocess.run([sys.executable, "-c", code, str(path)], check=True, cwd=Path(__file__).parents[3])
    assert not (tmp_path / "sub").exists()


def test_two_handles_see_each_other(tmp_path: Path) -> None:
    with TuningDB.open(tmp_path / "t.db") as a, TuningDB.open(tmp_path / "t.db") as b:
        assert b.winner(K, TARGET) is None
        a.record(winning(0.5, "aa"))
        assert (w := b.winner(K, TARGET)) is not None and w.linear == "aa"
        a.record(winning(0.4, "bb"))
        assert (w := b.winner(K, TARGET)) is not None and w.linear == "bb"


def test_fresh_reads_nothing_from_before_and_records(tmp_path: Path) -> None:
    with TuningDB.open(tmp_path / "t.db") as db:
        db.record(winning(0.4, "old"))
    with TuningDB.open(tmp_path / "t.db", fresh=True) as db:
        assert db.winner(K, TARGET) is None and db.known_digests(K, TARGET) == {}
        db.record(winning(0.6, "new"))
        assert (w := db.winner(K, TARGET)) is not None and w.linear == "new"
    with TuningDB.open(tmp_path / "t.db") as db:
        assert [w.linear for w in db.ranking(K, TARGET)] == ["old", "new"]


def test_read_only_never_writes_a_file(tmp_path: Path) -> None:
    with TuningDB.open(tmp_path / "t.db", read_only=True) as db:
        db.record(winning())
        assert db.winner(K, TARGET) is not None and db.path is None and db.problem is None
    assert not (tmp_path / "t.db").exists()


def test_none_is_memory_and_says_nothing(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with TuningDB.open(":none:") as db:
        db.record(winning())
        assert db.winner(K, TARGET) is not None
        with pytest.raises(DatabaseError, match=":none:"):
            db.retract(K, None, None, "")
    assert not caplog.records and list(tmp_path.iterdir()) == []


def test_layers_own_team_shipped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with TuningDB.open(tmp_path / "shipped.db") as db:
        db.record(winning(0.1, "ss"))
        export(db, tmp_path / "shipped.jsonl")
    monkeypatch.setattr(layers, "shipped_files", lambda: (tmp_path / "shipped.jsonl",))
    with TuningDB.open(tmp_path / "team.db") as db:
        db.record(winning(0.3, "tt"))
    spec = os.pathsep.join(str(tmp_path / name) for name in ("own.db", "team.db", "missing.db", "missing.jsonl"))
    with TuningDB.open(spec) as db:
        assert [(w.linear, w.layer) for w in db.ranking(K, TARGET)] == [("ss", SHIPPED), ("tt", TEAM)]
        db.record(winning(0.2, "oo"))
        assert [(w.linear, w.layer) for w in db.ranking(K, TARGET)] == [("ss", SHIPPED), ("oo", OWN), ("tt", TEAM)]
        assert {m.linear for m, _ in db.select(Measurement, K)} == {"oo", "tt"}, "the user's records"
        assert {m.linear: layer for m, layer in db.select(Measurement, K, shipped=True)} == {"oo": OWN, "tt": TEAM, "ss": SHIPPED}
        db.record([verdict("wrong", "tt")])
        assert [w.linear for w in db.ranking(K, TARGET)] == ["ss", "oo"], "a verdict holds across layers"
    with TuningDB.open(":none:") as db:
        assert db.winner(K, TARGET) is None, ":none: turns the shipped records off as well"


def test_what_tells_what_there_is_reads_the_users_records(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    other = "o" * 32
    with TuningDB.open(tmp_path / "shipped.db") as db:
        db.record([*winning(0.5, "aa"), *winning(0.4, "ss", other)])
        export(db, tmp_path / "shipped.jsonl", winners_only=True, anonymous=True)
    monkeypatch.setattr(layers, "shipped_files", lambda: (tmp_path / "shipped.jsonl",))
    with TuningDB.open(tmp_path / "own.db") as db:
        assert db.all_rankings() == {} and not db.tally(Measurement) and not db.select(KernelRecord), "nothing of it is the user's"
        assert (w := db.winner(other, TARGET)) is not None and w.layer == SHIPPED, "and its chains are known"
        assert db.targets_of(other) == [TARGET] and {k.kernel for k in db.family("s1")} == {K, other}
        assert not db.family("s1", shipped=False)
        db.record([*winning(0.9, "oo"), screened("pp", taken_at=1.0)])
        assert {place: [w.linear for w in ranked] for place, ranked in db.all_rankings().items()} == {(K, TARGET): ["aa", "oo"]}
        assert [w.linear for w in db.all_rankings(alone=True)[K, TARGET]] == ["oo"]
        assert export(db, tmp_path / "mine.jsonl") == 4 and export(db, tmp_path / "winners.jsonl", winners_only=True) == 3
        assert "ss" not in {getattr(r, "linear", "") for r in read_records(tmp_path / "mine.jsonl")[0]}
        assert gc(db, 1.0).measurements == 1
        db.retract(other, None, None, "slow here")
        assert db.winner(other, TARGET) is None, "a shipped chain can be retracted"
        assert db.restore(other, None, None, "") == 1 and db.winner(other, TARGET) is not None


def test_a_winner_that_ships_with_svod_does_not_decide_that_measurements_may_go(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with TuningDB.open(tmp_path / "shipped.db") as db:
        db.record(winning(0.5, "aa"))
        export(db, tmp_path / "shipped.jsonl")
    monkeypatch.setattr(layers, "shipped_files", lambda: (tmp_path / "shipped.jsonl",))
    with TuningDB.open(tmp_path / "own.db") as db:
        db.record([screened("pp", taken_at=1.0)])
        assert gc(db, 1.0).measurements == 0, "a winner that ships with svod may be gone with its next version"


def test_an_export_of_the_shipped_layer_does_not_become_own(tmp_path: Path) -> None:
    with TuningDB.open(tmp_path / "a.db") as a, TuningDB.open(tmp_path / "b.db") as b:
        a.record(winning(0.5, "aa"))
        assert merge(b, tmp_path / "a.db").added == 3
        assert (w := b.winner(K, TARGET)) is not None and w.layer == TEAM
        b.record(winning(0.5, "aa"))
        assert (w := b.winner(K, TARGET)) is not None and w.layer == OWN, "found here as well"
        assert merge(b, tmp_path / "a.db") == (0, 3, [])
        assert (w := b.winner(K, TARGET)) is not None and w.layer == OWN


def test_retracted_does_not_come_back(tmp_path: Path) -> None:
    with TuningDB.open(tmp_path / "a.db") as a, TuningDB.open(tmp_path / "b.db") as b:
        a.record(winning(0.5, "aa"))
        merge(b, tmp_path / "a.db")
        assert b.retract(K, None, None, "crashes in production") == 1
        assert b.winner(K, TARGET) is None
        merge(b, tmp_path / "a.db")
        a.record([confirmed(0.4, "aa", taken_at=2e9)])
        merge(b, tmp_path / "a.db")
        assert b.winner(K, TARGET) is None
        merge(a, tmp_path / "b.db")
        assert a.winner(K, TARGET) is None, "the retraction travels"
        assert b.retract("nothing", None, None, "") == 0


def test_a_retraction_is_taken_back_and_that_travels_too(tmp_path: Path) -> None:
    with TuningDB.open(tmp_path / "a.db") as a, TuningDB.open(tmp_path / "b.db") as b:
        a.record(winning(0.5, "aa"))
        assert a.retract(K, None, None, "a mistake") == 1
        merge(b, tmp_path / "a.db")
        assert b.winner(K, TARGET) is None
        assert a.restore(K, None, None, "it was the web server") == 1 and a.restore(K, None, None, "again") == 0
        assert (w := a.winner(K, TARGET)) is not None and w.linear == "aa"
        merge(b, tmp_path / "a.db")
        assert b.winner(K, TARGET) == w._replace(layer=TEAM)
        assert a.retract(K, None, None, "after all") == 1 and a.winner(K, TARGET) is None, "a later retraction is another one"
        a.record([verdict("wrong", "aa")])
        assert a.restore(K, None, None, "") == 1 and a.winner(K, TARGET) is None, "wrong stays wrong"


def test_failures_of_others_hide_no_candidate(tmp_path: Path) -> None:
    with TuningDB.open(tmp_path / "a.db") as a, TuningDB.open(tmp_path / "b.db") as b:
        a.record([screened("bad", status="wrong"), screened("slow", status="slow"), screened("fine")])
        merge(b, tmp_path / "a.db")
        assert set(a.known_digests(K, TARGET)) == {"bad", "slow", "fine"} and b.known_digests(K, TARGET) == {}


def test_merges_in_both_directions_give_one_winner(tmp_path: Path) -> None:
    """A search that found no faster chain here does not outrank a faster chain that a colleague measured on the same target."""
    with TuningDB.open(tmp_path / "a.db") as a, TuningDB.open(tmp_path / "b.db") as b:
        a.record(winning(1.0, "hh", ratio_low=1.0, ratio_high=1.0, baseline_linear="hh"))
        b.record(winning(0.4, "ff", baseline_linear="hh"))
        merge(a, tmp_path / "b.db")
        merge(b, tmp_path / "a.db")
        assert (w := a.winner(K, TARGET)) is not None and w.linear == "ff" and w.layer == TEAM
        assert b.winner(K, TARGET) == w._replace(layer=OWN)


def test_what_gc_removed_is_not_merged_again(tmp_path: Path) -> None:
    with TuningDB.open(tmp_path / "a.db") as a, TuningDB.open(tmp_path / "b.db") as b:
        b.record([*winning(), screened("old"), screened("new", taken_at=4e9)])
        merge(a, tmp_path / "b.db")
        assert gc(a, 3600.0).measurements == 1
        assert merge(a, tmp_path / "b.db").added == 0
        b.record([confirmed(0.4, "cc", taken_at=1.0)])
        assert merge(a, tmp_path / "b.db").added == 1, "what decides always comes"


def test_gc_keeps_what_decides(tmp_path: Path) -> None:
    with TuningDB.open(tmp_path / "t.db") as db:
        db.record([*winning(), screened("old"), screened("new", taken_at=4e9), screened("bad", status="wrong"),
                   screened("x", kernel="other")])
        assert gc(db, 3600.0) == (1, 0)
        assert set(db.known_digests(K, TARGET)) == {"aa", "new", "bad"} and set(db.known_digests("other", TARGET)) == {"x"}
        assert db.winner(K, TARGET) is not None


def test_a_handle_survives_a_fork(tmp_path: Path) -> None:
    with TuningDB.open(tmp_path / "t.db") as db:
        db.record(winning(0.5, "aa"))
        assert db.winner(K, TARGET) is not None
        pid = os.fork()
        if pid == 0:
            try:
                ok = db.winner(K, TARGET) is not None
                db.record(winning(0.4, "bb"))
                os._exit(0 if ok else 1)
            finally:
                os._exit(2)
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
        assert (w := db.winner(K, TARGET)) is not None and w.linear == "bb"
        assert db.record([screened("after")]) == 1


def _write_many(path: str, worker: int, barrier: mp.synchronize.Barrier, answers: mp.Queue[tuple[int, str | None]]) -> None:
    barrier.wait()
    with TuningDB.open(path) as db:
        added = sum(db.record([screened(f"w{worker}.{i}"), screened(f"shared{i}", taken_at=float(i))]) for i in range(200))
        answers.put((added, db.problem))


@pytest.mark.slow
def test_many_processes_write_at_once(tmp_path: Path) -> None:
    context = mp.get_context("spawn")
    barrier, answers = context.Barrier(4), context.Queue()
    workers = [context.Process(target=_write_many, args=(str(tmp_path / "t.db"), i, barrier, answers)) for i in range(4)]
    for w in workers:
        w.start()
    results = [answers.get(timeout=NEVER) for _ in workers]
    for w in workers:
        w.join(timeout=NEVER)
    assert [p for _, p in results] == [None] * 4, "none is turned away, also while the file is being made"
    assert sum(a for a, _ in results) == 4 * 200 + 200, "each shared record was new exactly once"
    with TuningDB.open(tmp_path / "t.db") as db:
        assert len(db.select(Measurement)) == 1000


def test_kernels_of_two_forms_are_both_kept(db: TuningDB) -> None:
    db.record([KernelRecord(K, ast=1, ast_version=1), KernelRecord(K, ast=2, ast_version=2)])
    assert sorted(k.ast_version for k, _ in db.select(KernelRecord, K)) == [1, 2]


def test_rows_are_plain_sql(tmp_path: Path) -> None:
    """Users may look at the database with sqlite3: it has readable names, JSON text, and one row per record."""
    with TuningDB.open(tmp_path / "t.db") as db:
        db.record(winning())
    conn = sqlite3.connect(tmp_path / "t.db")
    row = conn.execute("SELECT chain, status, noisy, layer FROM measurements").fetchone()
    assert row == ('[["UPCAST","o0",8],["ORDER","o0",["o0","r0"]],["NOLOCALS",null,null]]', "ok", 0, 0)
    assert conn.execute("SELECT count(*) FROM verdicts WHERE verdict = 'verified'").fetchone() == (1,)
    conn.close()
