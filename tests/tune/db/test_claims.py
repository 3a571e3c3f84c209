"""Claims: exactly one process searches a kernel, and a dead one does not block it."""
from __future__ import annotations

import os
import socket
import sqlite3
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from svod.tune.db import TuningDB, claims, layers
from svod.tune.db.moving import export, gc, merge
from tests.patience import NEVER
from tests.tune.db.samples import TARGET, winning

K = "k" * 32
ROOT = Path(__file__).parents[3]


@pytest.fixture
def path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.setattr(layers, "shipped_files", lambda: ())
    yield tmp_path / "t.db"


def edit(path: Path, sql: str) -> None:
    conn = sqlite3.connect(path)
    conn.execute(sql)
    conn.commit()
    conn.close()


def test_one_claim_at_a_time(path: Path) -> None:
    with TuningDB.open(path) as a, TuningDB.open(path) as b:
        claim = a.claims.take(K, TARGET)
        assert claim is not None and b.claims.take(K, TARGET) is None and a.claims.take(K, TARGET) is None
        assert b.claims.take("other", TARGET) is not None and b.claims.take(K, "other") is not None
        holder = b.claims.holder(K, TARGET)
        assert holder is not None and holder.pid == os.getpid() and holder.kernel == K
        claim.release()
        claim.release()
        assert b.claims.holder(K, TARGET) is None
        with b.claims.take(K, TARGET) or pytest.fail("it is free"):
            assert a.claims.take(K, TARGET) is None
        assert a.claims.take(K, TARGET) is not None


def test_a_silent_claim_is_void_and_its_owner_learns_it(path: Path) -> None:
    with TuningDB.open(path) as a, TuningDB.open(path) as b:
        claim = a.claims.take(K, TARGET)
        assert claim is not None
        edit(path, f"UPDATE claims SET heartbeat = heartbeat - {claims.CLAIM_EXPIRY_SECONDS - 2}")
        assert b.claims.take(K, TARGET) is None
        edit(path, "UPDATE claims SET heartbeat = heartbeat - 4")
        assert b.claims.holder(K, TARGET) is None
        taken = b.claims.take(K, TARGET)
        assert taken is not None and not claim.renew() and taken.renew()
        claim.release()
        assert b.claims.holder(K, TARGET) is not None, "releasing a lost claim does not touch the new one"


def test_without_a_file_a_claim_holds_within_the_process() -> None:
    with TuningDB.open(":none:") as db:
        claim = db.claims.take(K, TARGET)
        assert claim is not None and db.claims.take(K, TARGET) is None and claim.renew()
        claim.release()
        assert (db.claims.take(K, TARGET) or pytest.fail("it was released")).renew()


def test_a_clock_from_the_future_does_not_block(path: Path) -> None:
    with TuningDB.open(path) as a, TuningDB.open(path) as b:
        assert a.claims.take(K, TARGET) is not None
        edit(path, "UPDATE claims SET heartbeat = heartbeat + 1e6")
        assert b.claims.take(K, TARGET) is not None


def test_the_heartbeat_renews(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(claims, "BEAT", 0.01)
    with TuningDB.open(path) as db:
        claim = db.claims.take(K, TARGET)
        assert claim is not None
        edit(path, "UPDATE claims SET heartbeat = heartbeat - 25")
        before = time.time() - 20
        for _ in range(1000):
            holder = db.claims.holder(K, TARGET)
            if holder is not None and holder.heartbeat > before:
                break
            time.sleep(0.01)
        assert holder is not None and holder.heartbeat > before
        assert any(t.name == "svod-claims" and t.daemon for t in threading.enumerate())


def test_the_claim_of_a_dead_process_is_void_at_once(path: Path) -> None:
    code = ("import os, sys; from svod.tune.db import TuningDB; db = TuningDB.open(sys.argv[1]); assert db.claims.take(*sys.argv[2:]); "
            "os._exit(0)")
    subprocess.run([sys.executable, "-c", code, str(path), K, TARGET], check=True, cwd=ROOT)
    conn = sqlite3.connect(path)
    assert conn.execute("SELECT count(*) FROM claims").fetchone() == (1,)
    conn.close()
    with TuningDB.open(path) as db:
        if claims.boot_id():
            assert db.claims.holder(K, TARGET) is None and db.claims.take(K, TARGET) is not None
        else:
            assert db.claims.take(K, TARGET) is None


def test_another_host_or_boot_counts_until_it_is_silent(path: Path) -> None:
    now = time.time()
    there = claims.Holder(K, TARGET, "elsewhere", "boot", 1 << 22, now, now, "t")
    assert not claims.is_void(there, now + claims.CLAIM_EXPIRY_SECONDS - 1) and claims.is_void(there, now + claims.CLAIM_EXPIRY_SECONDS + 1)


def test_a_process_of_another_container_counts_until_it_is_silent() -> None:
    """Two containers may have the same host name, and neither sees the processes of the other."""
    now, (boot, slash, namespace) = time.time(), claims.boot_id().partition("/")
    there = claims.Holder(K, TARGET, socket.gethostname(), f"{boot}{slash}{namespace[:-1]}", 1 << 22, now, now, "t")
    assert not claims.is_void(there, now)
    if boot:
        assert namespace == str(os.stat("/proc/self/ns/pid").st_ino)
        assert claims.is_void(there._replace(boot_id=claims.boot_id()), now), "it would be seen here"


def test_of_many_processes_exactly_one_gets_the_claim(path: Path) -> None:
    with TuningDB.open(path) as db:
        db.record(winning())
    code = ("import sys; from svod.tune.db import TuningDB; db = TuningDB.open(sys.argv[1]); sys.stdin.readline(); "
            "print(sum(db.claims.take(f'k{i}', 't') is not None for i in range(40)), flush=True); sys.stdin.readline()")
    children = [subprocess.Popen([sys.executable, "-c", code, str(path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
                                 cwd=ROOT) for _ in range(3)]
    for c in children:
        assert c.stdin is not None
        c.stdin.write("\n")
        c.stdin.flush()
    counts = [int(c.stdout.readline()) for c in children if c.stdout is not None]
    assert sum(counts) == 40
    for c in children:
        c.communicate("\n", timeout=NEVER)


def test_claims_do_not_travel(path: Path) -> None:
    with TuningDB.open(path) as a, TuningDB.open(path.with_name("b.db")) as b:
        a.record(winning())
        assert a.claims.take(K, TARGET) is not None
        merge(b, path)
        assert b.claims.holder(K, TARGET) is None
        export(a, path.with_name("x.jsonl"))
        assert "heartbeat" not in path.with_name("x.jsonl").read_text()


def test_gc_removes_void_claims(path: Path) -> None:
    with TuningDB.open(path) as db:
        assert db.claims.take(K, TARGET) is not None and db.claims.take("other", TARGET) is not None
        edit(path, f"UPDATE claims SET heartbeat = 0 WHERE kernel = '{K}'")
        assert gc(db, 0.0).claims == 1
        assert db.claims.holder("other", TARGET) is not None
