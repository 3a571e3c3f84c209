"""Meanings of database specs, and the recognition of network file systems."""
from __future__ import annotations

import os
from pathlib import Path

import pytest

from svod.system.process import directories
from svod.tune.db import TEAM, TuningDB, files, layers
from svod.tune.db.files import file_system_type, host_name
from svod.tune.db.layers import open_layers, shipped_files
from svod.tune.db.transfer import Skipped
from tests.tune.db.samples import TARGET, winning

K = "k" * 32

MOUNTS = r"""22 1 254:1 / / rw,relatime - ext4 /dev/vda1 rw
30 22 0:25 / /home rw shared:1 - nfs4 server:/home rw,vers=4.2
31 30 0:26 / /home/me/my\040data rw - fuse.sshfs me@there: rw
32 22 0:27 / /dev/shm rw - tmpfs tmpfs rw
garbage
33 22 0:28 / /home2 rw - xfs /dev/vdb rw"""


def test_file_system_types() -> None:
    assert file_system_type(Path("/var/x.db"), MOUNTS) == "ext4"
    assert file_system_type(Path("/home/me/x.db"), MOUNTS) == "nfs4"
    assert file_system_type(Path("/home/me/my data/x.db"), MOUNTS) == "fuse.sshfs"
    assert file_system_type(Path("/home2/x.db"), MOUNTS) == "xfs"
    assert file_system_type(Path("/x"), "") == ""
    assert {"nfs4", "fuse.sshfs", "lustre", "cifs"} <= files.NETWORK_FILE_SYSTEMS
    assert not {"ext4", "tmpfs", "overlay"} & files.NETWORK_FILE_SYSTEMS


def test_on_a_network_file_system_each_host_writes_its_own_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(layers, "shipped_files", lambda: ())
    monkeypatch.setattr(files, "on_network", lambda path: True)
    path = tmp_path / "tuning.db"
    monkeypatch.setattr(files, "host_name", lambda: "alpha")
    with TuningDB.open(path) as db:
        db.record(winning(0.5, "aa"))
        assert db.path == tmp_path / "tuning.alpha.db"
        assert db.storage.own is not None and db.storage.own.conn.execute("PRAGMA journal_mode").fetchone()[0] == "delete"
    monkeypatch.setattr(files, "host_name", lambda: "beta")
    with TuningDB.open(path) as db:
        assert (w := db.winner(K, TARGET)) is not None and w.layer == TEAM, "the other host's file is read"
        db.record(winning(0.4, "bb"))
        assert (w := db.winner(K, TARGET)) is not None and w.linear == "bb"
    assert sorted(p.name for p in tmp_path.iterdir()) == ["tuning.alpha.db", "tuning.beta.db"]


def test_resolving_specs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(layers, "shipped_files", lambda: (Path("/shipped.jsonl"),))
    (tmp_path / "dir").mkdir()
    for name in ("a.db", "b.jsonl", "tuning.db", "notes.txt"):
        (tmp_path / "dir" / name).touch()
    shipped = (Path("/shipped.jsonl"),)
    assert layers.resolve(":none:") == (None, False, (), (), None)
    assert layers.resolve(str(tmp_path / "x.db")) == (tmp_path / "x.db", True, (), shipped, None)
    d = tmp_path / "dir"
    assert layers.resolve(str(d)) == (d / "tuning.db", True, (d / "a.db", d / "b.jsonl"), shipped, None)
    assert layers.resolve(str(tmp_path / "new")).write == tmp_path / "new" / "tuning.db", "a directory that does not exist yet"
    (tmp_path / "nosuffix").touch()
    assert layers.resolve(str(tmp_path / "nosuffix")).write == tmp_path / "nosuffix", "a file is a file, whatever it is called"
    plan = layers.resolve(os.pathsep.join([str(tmp_path / "x.db"), "", str(d)]))
    assert plan.read == (d / "a.db", d / "b.jsonl", d / "tuning.db") and plan.shipped == shipped
    plan = layers.resolve(str(tmp_path / "x.jsonl"))
    assert plan.write is None and plan.read[0] == tmp_path / "x.jsonl"
    assert plan.problem is not None and "put a .db file before it" in plan.problem
    monkeypatch.chdir(tmp_path)
    assert layers.resolve("x.db").write == tmp_path / "x.db", "fixed at once: the process may change its directory"


def test_the_default_is_the_users_data_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(layers, "shipped_files", lambda: ())
    monkeypatch.setattr(directories, "user_data", lambda: tmp_path / "data")
    for spec in (None, "", " "):
        assert layers.resolve(spec) == (tmp_path / "data" / "tuning.db", True, (), (), None)


def test_a_home_that_cannot_be_written_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(layers, "shipped_files", lambda: ())
    monkeypatch.setattr(directories, "user_data", lambda: tmp_path / "home")
    with TuningDB.open(tmp_path / "home" / "tuning.db") as db:
        db.record(winning())
    monkeypatch.setattr(directories, "is_writable", lambda path: path != tmp_path / "home")
    monkeypatch.chdir(tmp_path)
    with TuningDB.open(None) as db:
        assert (w := db.winner(K, TARGET)) is not None and w.layer == TEAM
        db.record(winning(0.9, "bb"))
        assert db.path == tmp_path / ".svod" / "tuning.db" and db.path.exists()


def test_shipped_files_are_found_in_a_checkout() -> None:
    directory = Path(__file__).parents[3] / "tune_db"
    assert shipped_files() == tuple(sorted(directory.glob("*.jsonl")))


def test_host_names_fit_into_file_names(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("socket.gethostname", lambda: "a/b c.example")
    assert host_name() == "a_b_c.example"


def test_a_pipe_is_not_waited_for(tmp_path: Path) -> None:
    for name in ("pipe.jsonl", "pipe.db"):
        os.mkfifo(tmp_path / name)
    report: list[Skipped] = []
    assert open_layers([tmp_path / "pipe.jsonl", tmp_path / "pipe.db"], 1, report) == []
    assert [s.reason.partition(",")[0] for s in report] == ["this is no file"] * 2
