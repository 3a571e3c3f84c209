"""A database that cannot be used never stops svod: one warning says so, readable records are read, and no stored record is lost."""
from __future__ import annotations

import logging
import os
import re
import shutil
import signal
import sqlite3
import subprocess
import sys
import time
from pathlib import Path

import pytest

from svod import config
from svod.errors import DatabaseError
from svod.system.process.directories import takes_files
from svod.tune.db import Measurement, TuningDB, files, layers
from svod.tune.db.moving import export_unstored, import_file, merge
from tests.tune.db.samples import TARGET, screened, winning

K = "k" * 32


@pytest.fixture(autouse=True)
def quiet_world(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(layers, "shipped_files", lambda: ())
    monkeypatch.setattr(config, "_said", set())


def filled(path: Path) -> Path:
    with TuningDB.open(path) as db:
        db.record(winning(0.5, "aa"))
    return path


def warnings(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [r.getMessage() for r in caplog.records if r.levelno >= logging.WARNING]


@pytest.mark.parametrize("content", [b"not a database, but as long as one" * 99, b"xyz", b"SQLite format 3\0" + b"\xff" * 5000])
def test_not_a_database(tmp_path: Path, caplog: pytest.LogCaptureFixture, content: bytes) -> None:
    path = tmp_path / "t.db"
    path.write_bytes(content)
    with TuningDB.open(path) as db:
        assert db.winner(K, TARGET) is None and db.problem is not None and str(path) in db.problem
        db.record(winning())
        db.record([screened("bb")])
        assert db.winner(K, TARGET) is not None, "the search goes on in memory"
        claim = db.claims.take(K, TARGET)
        assert claim is not None and claim.renew()
        claim.release()
        assert len([w for w in warnings(caplog) if "cannot be used" in w]) == 1, "said once"
    assert path.read_bytes() == content
    assert any("records of this run are lost" in w for w in warnings(caplog))


def test_newer_schema_goes_on_in_memory(tmp_path: Path) -> None:
    path = filled(tmp_path / "t.db")
    conn = sqlite3.connect(path)
    conn.execute("PRAGMA user_version = 99")
    conn.close()
    with TuningDB.open(path) as db:
        assert db.problem is not None and "99" in db.problem and "update svod" in db.problem
        db.record(winning())
        assert db.winner(K, TARGET) is not None
        with pytest.raises(DatabaseError, match="99"):
            db.retract(K, None, None, "")
    conn = sqlite3.connect(path)
    assert conn.execute("SELECT count(*) FROM measurements").fetchone() == (1,)
    conn.close()


def test_a_directory_that_cannot_be_made(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with TuningDB.open(tmp_path / "file" / "sub" / "t.db") as db:
        assert db.winner(K, TARGET) is None
        db.record(winning())
        assert db.winner(K, TARGET) is not None and db.problem is not None and "cannot be written" in db.problem


def test_a_full_disk_keeps_what_was_stored(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = filled(tmp_path / "t.db")
    with TuningDB.open(path) as db:
        assert db.storage.own is not None
        pages = db.storage.own.conn.execute("PRAGMA page_count").fetchone()[0]
        db.storage.own.conn.execute(f"PRAGMA max_page_count = {pages}")  # SQLite's own "database or disk is full"
        batch = [screened(f"s{i}", host={"note": "x" * 2000}) for i in range(200)]
        assert db.record(batch) == 200
        assert db.problem is not None and "full" in db.problem
        assert (w := db.winner(K, TARGET)) is not None and w.linear == "aa", "what was stored is still read"
        assert len(db.known_digests(K, TARGET)) == 201, "and what is found now is known in this process"
        check = sqlite3.connect(path)
        assert check.execute("SELECT count(*) FROM measurements").fetchone() == (1,), "all of a batch or none"
        assert check.execute("PRAGMA integrity_check").fetchone() == ("ok",)
        check.close()
    assert any("can be written again" in w for w in warnings(caplog)), "there is room again at the end: nothing was lost"
    with TuningDB.open(path) as db:
        assert len(db.select(Measurement)) == 201


def test_obstacles_show_before_anything_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = filled(tmp_path / "t.db")
    (tmp_path / "file").write_text("")
    (tmp_path / "d.db").symlink_to("/dev/null")

    def obstacle(at: Path) -> str:
        with TuningDB.open(at) as db:
            return db.storage.obstacle() or ""
    assert obstacle(path) == "" and obstacle(tmp_path / "new" / "t.db") == ""
    assert "is not a directory" in obstacle(tmp_path / "file" / "t.db") and "no regular file" in obstacle(tmp_path / "d.db")
    before = sorted(tmp_path.iterdir())
    monkeypatch.setattr(shutil, "disk_usage", lambda at: shutil._ntuple_diskusage(1 << 40, 1 << 40, 1024))
    assert "1 KiB are left" in obstacle(path) and "1 KiB" in obstacle(tmp_path / "new" / "t.db")
    monkeypatch.setattr(os, "access", lambda at, mode: Path(at) != path)
    assert "read-only" in obstacle(path)
    monkeypatch.setattr(os, "access", lambda at, mode: Path(at) != tmp_path)
    assert "read-only" in obstacle(path) and "cannot be made" in obstacle(tmp_path / "new" / "t.db")
    assert sorted(tmp_path.iterdir()) == before


@pytest.mark.parametrize("begins", [b"", b"SQLite format 3\0"])
def test_one_text_for_a_file_that_is_no_database(tmp_path: Path, caplog: pytest.LogCaptureFixture, begins: bytes) -> None:
    path = tmp_path / "t.db"
    path.write_bytes(begins + b"no database" * 999)
    said = files.foreign(path)
    assert said is not None and f"{path} cannot be used: it is not a tuning database of svod" in said
    assert layers.name_problem(layers.resolve(str(path))) == said
    for read_only in (True, False):
        with TuningDB.open(path, read_only=read_only) as db:
            assert db.problem == said
    with TuningDB.open(os.pathsep.join([str(tmp_path / "u.db"), str(path)])) as db:
        assert db.winner(K, TARGET) is None and [s.reason for s in db.skipped] == [said]
        with pytest.raises(DatabaseError, match=re.escape(said)):
            merge(db, path)


@pytest.mark.parametrize("refused", ["", "t.db", "d"])
def test_reading_leaves_no_files_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, refused: str) -> None:
    """Whoever reads a database that nobody has open, whether or not the file or its directory may be written, leaves what was there."""
    path = filled(tmp_path / "d" / "t.db")
    unwritable = {"": None, "t.db": path, "d": path.parent}[refused]
    access = os.access
    monkeypatch.setattr(os, "access", lambda at, mode: access(at, mode) and (Path(at) != unwritable or not mode & os.W_OK))
    for read_only in (True, False):
        with TuningDB.open(path, read_only=read_only) as db, TuningDB.open(f"{tmp_path / 'u.db'}{os.pathsep}{path}") as other:
            assert db.winner(K, TARGET) is not None and other.winner(K, TARGET) is not None
        assert list(path.parent.iterdir()) == [path]


def test_a_directory_in_which_no_file_can_be_made_is_said_before_the_work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
                                                                          caplog: pytest.LogCaptureFixture) -> None:
    """Its permissions do not show it: they let root pass, and there are file systems without files of users."""
    assert not takes_files(Path("/proc")) and takes_files(tmp_path) and not any(tmp_path.iterdir())
    for spec in ("/proc/t.db", "/proc/d/t.db"):
        assert "cannot be written: it cannot be made, as no file can be made in /proc" in (layers.name_problem(layers.resolve(spec)) or "")
        with TuningDB.open(spec) as db:
            db.storage.foresee()
            assert db.problem is not None and db.path is None and any(spec in w and "kept in memory" in w for w in warnings(caplog))
            db.record(winning())
            assert db.winner(K, TARGET) is not None


def test_what_cannot_be_stored_is_exported(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "t.db"
    path.write_bytes(b"no database" * 999)
    with TuningDB.open(path) as db:
        db.record(winning(0.5, "aa"))
        assert not db.storage.store_again()
        assert export_unstored(db, tmp_path / "out.jsonl") == len(winning(0.5, "aa"))
    assert not any("lost" in w for w in warnings(caplog))
    with TuningDB.open(tmp_path / "u.db") as db:
        import_file(db, tmp_path / "out.jsonl")
        assert db.winner(K, TARGET) is not None


def test_an_export_of_what_is_left_over_is_complete(tmp_path: Path) -> None:
    """The disk fills up during a search: the file also has the records of the kernel that were stored before, so that it is complete."""
    path = filled(tmp_path / "t.db")
    with TuningDB.open(path) as db:
        db.record(winning(0.7, "other", kernel="x" * 32))
        assert db.storage.own is not None
        db.storage.own.conn.execute(f"PRAGMA max_page_count = {db.storage.own.conn.execute('PRAGMA page_count').fetchone()[0]}")
        db.record([screened(f"s{i}", host={"note": "x" * 2000}) for i in range(200)])
        assert db.path is None
        export_unstored(db, tmp_path / "out.jsonl")
    with TuningDB.open(tmp_path / "u.db") as db:
        import_file(db, tmp_path / "out.jsonl")
        assert (w := db.winner(K, TARGET)) is not None and w.linear == "aa" and len(db.select(Measurement)) == 201


def test_a_file_that_can_be_written_again_is_used_again(tmp_path: Path) -> None:
    blocker = tmp_path / "file"
    blocker.write_text("")
    with TuningDB.open(blocker / "t.db") as db:
        db.record(winning(0.5, "aa"))
        assert db.path is None and not db.storage.store_again()
        blocker.unlink()
        assert db.storage.store_again() and db.path == blocker / "t.db"
        db.record([screened("bb")])
    with TuningDB.open(blocker / "t.db") as db:
        assert len(db.select(Measurement)) == 2 and db.winner(K, TARGET) is not None


def test_a_read_only_file_and_directory(tmp_path: Path) -> None:
    """Run in a child process that has given up root's rights, as root may write anywhere."""
    path = filled(tmp_path / "d" / "t.db")
    path.chmod(0o444)
    (tmp_path / "d").chmod(0o555)
    closed = filled(tmp_path / "closed" / "c.db").parent
    for p in (tmp_path, *tmp_path.parents):
        if p.stat().st_uid == os.getuid() and p.stat().st_mode & 0o005 != 0o005:
            p.chmod(p.stat().st_mode | 0o055)
    code = """
import os, sys
from pathlib import Path
from svod.system.process.directories import is_writable
from svod.tune.db import TuningDB, layers, Measurement
from tests.tune.db.samples import TARGET, winning, screened
layers.shipped_files = lambda: ()
with TuningDB.open(":none:") as warm:  # imports what it needs while everything may be read
    warm.record([screened("bb")])
if os.getuid() == 0:
    os.setgid(65534); os.setuid(65534)
else:
    os.chmod(sys.argv[2], 0o000)
for name in ("c.db", "none.db", ""):    # what may not even be looked for
    assert not is_writable(Path(sys.argv[2], name, "deeper"))
    with TuningDB.open(os.path.join(sys.argv[2], name)) as db:
        assert db.problem, name
    with TuningDB.open(os.pathsep.join([sys.argv[1], os.path.join(sys.argv[2], name)]), read_only=True) as db:
        assert db.winner("k" * 32, TARGET) is not None, name
with TuningDB.open(sys.argv[1]) as db:
    assert db.winner("k" * 32, TARGET).linear == "aa", "it is read"
    assert db.problem is None, "reading needs no rights to write"
    db.record([screened("bb")])
    assert db.problem and "cannot be written" in db.problem, db.problem
    assert set(db.known_digests("k" * 32, TARGET)) == {"aa", "bb"}
"""
    closed.chmod(0o700)
    done = subprocess.run([sys.executable, "-c", code, str(path), str(closed)], capture_output=True, text=True, check=False,
                          cwd=Path(__file__).parents[3])
    assert done.returncode == 0, done.stderr
    assert "cannot be written" in done.stderr and "records of this run are lost" in done.stderr
    closed.chmod(0o700)
    (tmp_path / "d").chmod(0o755)
    assert sorted(p.name for p in (tmp_path / "d").iterdir()) == ["t.db"]


def test_a_damaged_database_is_dropped_when_it_is_found_out(tmp_path: Path) -> None:
    path = filled(tmp_path / "t.db")
    size = path.stat().st_size
    with path.open("r+b") as f:
        f.seek(4096)
        f.write(b"\xa5" * (size - 4096))
    with TuningDB.open(path) as db:
        assert db.winner(K, TARGET) is None
        assert db.problem is not None
        db.record(winning())
        assert db.winner(K, TARGET) is not None


def test_rows_that_are_no_records_are_skipped_and_reported(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = filled(tmp_path / "t.db")
    with TuningDB.open(path) as db:
        db.record(winning(0.4, "bb"))
    conn = sqlite3.connect(path)
    conn.execute("UPDATE measurements SET chain = '[[\"UPCAST\", {\"__import__\": \"os\"}]]' WHERE linear = 'bb'")
    conn.commit()
    conn.close()
    with TuningDB.open(path) as db:
        assert (w := db.winner(K, TARGET)) is not None and w.linear == "aa"
        assert len(db.skipped) == 1 and "chain" in db.skipped[0].reason
        assert len([w for w in warnings(caplog) if "skipped" in w]) == 1


def test_a_team_layer_that_cannot_be_read_is_reported_and_left_out(tmp_path: Path) -> None:
    (tmp_path / "bad.db").write_bytes(b"nonsense" * 1000)
    (tmp_path / "bad.jsonl").write_text("nonsense\n")
    filled(tmp_path / "good.db")
    spec = os.pathsep.join(str(tmp_path / n) for n in ("own.db", "bad.db", "bad.jsonl", "good.db"))
    with TuningDB.open(spec) as db:
        assert db.winner(K, TARGET) is not None and db.problem is None
        assert sorted(Path(s.where).name for s in db.skipped) == ["bad.db", "bad.jsonl"]


def test_a_lock_that_is_held_is_waited_for(tmp_path: Path) -> None:
    path = filled(tmp_path / "t.db")
    code = ("import sqlite3, sys, time; c = sqlite3.connect(sys.argv[1], isolation_level=None); c.execute('BEGIN IMMEDIATE'); "
            "print('held', flush=True); time.sleep(0.5); c.execute('COMMIT')")
    holder = subprocess.Popen([sys.executable, "-c", code, str(path)], stdout=subprocess.PIPE)
    assert holder.stdout is not None and holder.stdout.readline() == b"held\n"
    with TuningDB.open(path) as db:
        assert db.record([screened("bb")]) == 1 and db.problem is None
    holder.stdout.close()
    assert holder.wait() == 0


FULL = """
import os, resource, sys
from pathlib import Path
from svod import PrepareConfig, Tensor
from svod.errors import SvodError
from svod.system.process.directories import takes_files
from svod.tune.db import Measurement, TuningDB, files, layers
from svod.tune.db.moving import export
from svod.tune.lock import Locked, write_lock
from tests.tune.db.samples import TARGET, screened, winning
import numpy as np
layers.shipped_files = lambda: ()
directory, limit = Path(sys.argv[1]), int(sys.argv[2])
config = PrepareConfig(db=str(directory / "t.db"), object_cache=str(directory / "objects"))
lines = [Locked("k" * 32, TARGET, (), "x" * 5000)]
write_lock(directory / "m.lock.jsonl", lines)
with TuningDB.open(":none:") as warm:
    warm.record([screened("zz")])
resource.setrlimit(resource.RLIMIT_FSIZE, (limit, resource.RLIM_INFINITY))      # no file grows beyond: what a full disk says
with TuningDB.open(directory / "t.db") as db:
    for i in range(100):
        db.record([screened(f"{i}-{n}", host={"note": "x" * 2000}) for n in range(5)])
    assert db.problem and db.path is None, db.problem
    known = set(db.known_digests("k" * 32, TARGET))
    assert known >= {f"{i}-{n}" for i in range(100) for n in range(5)}, "what is found is known in this process"
    claim = db.claims.take("k" * 32, TARGET)
    assert claim is not None and claim.renew()
    claim.release()
    for write in (lambda: export(db, directory / "e.jsonl"), lambda: write_lock(directory / "m.lock.jsonl", lines * 100)):
        try:
            write()
        except OSError as e:
            print(type(e).__name__)
x = np.ones((16, 16), np.float32)
y = Tensor(x) @ Tensor(x)
y.prepare(config).execute()
assert (y.numpy() == 16).all()
resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
with TuningDB.open(directory / "t.db") as db:
    print(db.problem, len(db.select(Measurement)))
"""


@pytest.mark.slow
@pytest.mark.parametrize("limit", [0, 20_000, 200_000])
def test_files_that_cannot_grow(tmp_path: Path, limit: int) -> None:
    """A disk that becomes full at any point in the use of a database: nothing raises, and records that were stored before stay readable."""
    path = filled(tmp_path / "t.db")
    # Python does not notice that a file of bytecode was cut off: later processes would fail to import it.
    env = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[3]), "PYTHONDONTWRITEBYTECODE": "1"}
    done = subprocess.run([sys.executable, "-c", FULL, str(tmp_path), str(limit)], capture_output=True, text=True, check=False, env=env)
    assert done.returncode == 0, done.stderr
    *refused, last = done.stdout.splitlines()
    assert refused == ["FileError", "FileError"] and last.startswith("None "), done.stdout
    check = sqlite3.connect(path)
    assert check.execute("PRAGMA integrity_check").fetchone() == ("ok",)
    stored = {linear for (linear,) in check.execute("SELECT linear FROM measurements")}
    check.close()
    batches = [sum(f"{i}-{n}" in stored for n in range(5)) for i in range(100)]
    assert "aa" in stored and set(batches) <= {0, 5}, "all of a batch or none"
    with TuningDB.open(path) as db:
        assert (w := db.winner(K, TARGET)) is not None and w.linear == "aa"
    assert not (tmp_path / "e.jsonl").exists()
    assert len((tmp_path / "m.lock.jsonl").read_text().splitlines()) == 2, "the old file is whole"
    assert sorted(p.name for p in tmp_path.iterdir() if p.suffix == ".tmp") == []


WRITING = """
import sys
from svod.tune.db import TuningDB
from tests.tune.db.samples import screened
with TuningDB.open(sys.argv[1]) as db:
    i = int(sys.argv[2])
    while db.problem is None:
        db.record([screened(f"{i}-{n}", host={"note": "x" * 500}) for n in range(20)])
        print(i, flush=True)
        i += 1
"""


@pytest.mark.slow
def test_a_process_that_is_killed_in_mid_write_loses_nothing_that_it_has_stored(tmp_path: Path) -> None:
    path, said = tmp_path / "t.db", 0
    env = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[3])}
    stored: set[int] = set()
    for turn in range(6):
        command = [sys.executable, "-c", WRITING, str(path), str(turn * 100_000)]
        writer = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=env)
        assert writer.stdout is not None
        for _ in range(1 + 7 * turn):
            stored.add(int(writer.stdout.readline()))
        time.sleep(0.003 * turn)
        writer.send_signal(signal.SIGKILL)
        stored |= {int(line) for line in writer.stdout.read().splitlines() if line}
        writer.stdout.close()
        assert writer.wait() == -signal.SIGKILL and len(stored) > said
        said = len(stored)
        with TuningDB.open(path) as db:
            there = [m.linear for m, _ in db.select(Measurement)]
            assert db.problem is None and not db.skipped
        assert {f"{i}-{n}" for i in stored for n in range(20)} <= set(there)
        assert len(there) % 20 == 0, "all of a batch or none"
