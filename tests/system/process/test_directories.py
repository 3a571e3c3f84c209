"""Directories and lists of paths."""
from __future__ import annotations

import os
from pathlib import Path

import pytest

from svod.system.process import directories
from svod.system.process.directories import absolute, from_start, paths_from_start, split_paths

COLONS = pytest.mark.skipif(os.pathsep != ":", reason="on Windows entries are separated by semicolons")


@COLONS
@pytest.mark.parametrize(("spec", "entries"), [
    ("a.db:b.jsonl", ["a.db", "b.jsonl"]), ("a.db:https://h/x.jsonl:c.db", ["a.db", "https://h/x.jsonl", "c.db"]),
    ("a.db:https://h:8443/x.jsonl", ["a.db", "https://h:8443/x.jsonl"]), ("https://h:1:2", ["https://h:1", "2"]),
    ("a.db:https", ["a.db", "https"]), ("a.db:1/x.db", ["a.db", "1/x.db"]), ("HTTP://h/a:HTTPS://g/b", ["HTTP://h/a", "HTTPS://g/b"])])
def test_entries_of_a_list(spec: str, entries: list[str]) -> None:
    assert split_paths(spec) == entries


@COLONS
def test_a_colon_in_a_path_that_is_there_separates_nothing(tmp_path: Path) -> None:
    (tmp_path / "run:1" / "2026-11-26T10:00:00").mkdir(parents=True)
    (tmp_path / "a:b.db").touch()
    run, deep = f"{tmp_path}/run:1", f"{tmp_path}/run:1/2026-11-26T10:00:00"
    for whole in (run, f"{run}/tune.db", f"{deep}/tune.db", f"{tmp_path}/a:b.db"):
        assert split_paths(whole) == [whole]
        assert split_paths(f"x.db:{whole}:https://h:1/t.jsonl:{run}/u.db") == ["x.db", whole, "https://h:1/t.jsonl", f"{run}/u.db"]
    assert split_paths(f"{tmp_path}/run:2/tune.db") == [f"{tmp_path}/run", "2/tune.db"], "it is not there"
    assert split_paths(f"{tmp_path}/x.db:{tmp_path}/y.db") == [f"{tmp_path}/x.db", f"{tmp_path}/y.db"]


def test_relative_paths_count_from_the_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    start = os.getcwd()
    monkeypatch.chdir(tmp_path)
    assert from_start("tune.db") == os.path.join(start, "tune.db") and absolute("tune.db") == f"{tmp_path}/tune.db"
    assert paths_from_start(os.pathsep.join(["a.db", "/b/../c.db", "https://h/x.jsonl"])) == os.pathsep.join(
        [os.path.join(start, "a.db"), "/c.db", "https://h/x.jsonl"])
    assert from_start(str(tmp_path)) == str(tmp_path)


def test_a_directory_that_was_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    gone = tmp_path / "gone"
    gone.mkdir()
    monkeypatch.chdir(gone)
    gone.rmdir()
    assert directories.working_directory() is None
    assert os.path.isabs(absolute("x"))


def test_a_user_without_a_home(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    import platformdirs

    def refuse(*_: object, **__: object) -> str:
        raise RuntimeError("could not determine the home directory")
    for answer in (refuse, lambda *_, **__: "~/.local/share/svod", lambda *_, **__: "relhome/.cache/svod"):
        monkeypatch.setattr(platformdirs, "user_data_dir", answer)
        monkeypatch.setattr(platformdirs, "user_cache_dir", answer)
        assert directories.user_data() is None and directories.user_cache() is None
    monkeypatch.setattr(os.path, "expanduser", lambda path: path)
    assert absolute("~/x.db") == from_start("~/x.db") == "~/x.db", "no directory of that name is made"


def test_no_temporary_directory(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse() -> str:
        raise FileNotFoundError(2, "No usable temporary directory found in ['/tmp', '/somewhere']")
    monkeypatch.setattr(directories.tempfile, "gettempdir", refuse)
    with pytest.raises(FileNotFoundError, match=r"tried /tmp, /somewhere\); set TMPDIR"):
        directories.temporary()
