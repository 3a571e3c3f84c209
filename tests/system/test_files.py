"""Files are replaced atomically; links and pipes are kept."""
from __future__ import annotations

import errno
import os
import stat
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any, NoReturn

import pytest

from svod.system.files import write_file, write_text
from tests.patience import NEVER


def test_a_file_is_replaced_whole(tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    write_text(path, "one")
    write_text(path, "two")
    assert path.read_text() == "two" and [p.name for p in tmp_path.iterdir()] == ["a.txt"]


def test_a_link_stays_and_its_target_is_written(tmp_path: Path) -> None:
    target, link = tmp_path / "target", tmp_path / "link"
    target.write_text("old")
    link.symlink_to(target)
    write_text(link, "new")
    assert link.is_symlink() and target.read_text() == "new"


def test_a_pipe_is_written_to(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    got: list[str] = []
    reader = threading.Thread(target=lambda: got.append(pipe.read_text()))
    reader.start()
    write_text(pipe, "through")
    reader.join(NEVER)
    assert got == ["through"] and pipe.is_fifo()


def test_a_missing_folder_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(OSError):
        write_text(tmp_path / "none" / "a", "x")


def test_a_full_disk_leaves_what_was_there_and_names_the_file(tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    write_text(path, "one")

    def fail(f: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")
    with pytest.raises(OSError, match=r"a\.txt"):
        write_file(path, fail)
    assert path.read_text() == "one" and [p.name for p in tmp_path.iterdir()] == ["a.txt"]


@pytest.fixture
def umask() -> Iterator[None]:
    before = os.umask(0o077)
    yield
    os.umask(before)


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def test_a_new_file_has_the_mode_that_the_umask_leaves(tmp_path: Path, umask: None) -> None:
    for mask in (0o077, 0o022, 0o007, 0):
        os.umask(mask)
        write_text(tmp_path / f"{mask}", "x")
        assert mode(tmp_path / f"{mask}") == 0o666 & ~mask


@pytest.mark.parametrize("old", [0o600, 0o640, 0o664, 0o755, 0o400])
def test_a_file_that_is_replaced_keeps_its_mode(old: int, tmp_path: Path, umask: None) -> None:
    path = tmp_path / "a"
    path.write_text("old")
    path.chmod(old)
    write_text(path, "new")
    assert mode(path) == old and path.read_text() == "new"


@pytest.mark.skipif(os.getuid() != 0, reason="only root gives files to others")
def test_a_file_that_is_replaced_keeps_its_owner(tmp_path: Path) -> None:
    path = tmp_path / "a"
    path.write_text("old")
    os.chown(path, 12345, 54321)
    path.chmod(0o660)
    write_text(path, "new")
    assert (path.stat().st_uid, path.stat().st_gid, mode(path)) == (12345, 54321, 0o660) and path.read_text() == "new"


@pytest.mark.parametrize("length", [243, 244, 250, 255])
def test_names_of_all_lengths(length: int, tmp_path: Path) -> None:
    path = tmp_path / ("n" * length)
    write_text(path, "one")
    write_text(path, "two")
    assert path.read_text() == "two" and len(list(tmp_path.iterdir())) == 1
    with pytest.raises(OSError, match="too long"):
        write_text(tmp_path / ("n" * 256), "x")


@pytest.mark.parametrize("call", ["open", "replace", "fchmod"])
def test_a_file_that_cannot_be_replaced_is_written_in_place(call: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The cases are a directory that cannot be written, a file that is a mount point, and a file of another user."""
    path, other = tmp_path / "a", tmp_path / "b"
    path.write_text("something longer than what follows")
    os.link(path, other)

    def refuse(*args: Any, **kwargs: Any) -> NoReturn:
        raise OSError(errno.EBUSY, "Device or resource busy")
    monkeypatch.setattr(os, call, refuse)
    write_text(path, "new")
    monkeypatch.undo()
    assert path.read_text() == other.read_text() == "new", "it is the same file"
    assert sorted(p.name for p in tmp_path.iterdir()) == ["a", "b"]


@pytest.mark.parametrize("call", ["open", "replace"])
def test_a_full_disk_leaves_the_old_file(call: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "a").write_text("old")

    def refuse(*args: Any, **kwargs: Any) -> NoReturn:
        raise OSError(errno.ENOSPC, "No space left on device")
    monkeypatch.setattr(os, call, refuse)
    with pytest.raises(OSError, match="No space left"):
        write_text(tmp_path / "a", "new")
    monkeypatch.undo()
    assert [(p.name, p.read_text()) for p in tmp_path.iterdir()] == [("a", "old")]


def test_what_fails_leaves_a_file_that_is_written_in_place_as_it_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "a"
    path.write_text("old")

    def refuse(*args: Any, **kwargs: Any) -> NoReturn:
        raise OSError(errno.EROFS, "Read-only file system")

    def fail(f: IO[bytes]) -> NoReturn:
        f.write(b"half")
        raise ValueError("of the caller")
    monkeypatch.setattr(os, "open", refuse)
    with pytest.raises(ValueError, match="of the caller"):
        write_file(path, fail)
    monkeypatch.undo()
    assert path.read_text() == "old"


def test_links_that_lead_in_a_circle_are_an_error(tmp_path: Path) -> None:
    (tmp_path / "a").symlink_to(tmp_path / "b")
    (tmp_path / "b").symlink_to(tmp_path / "a")
    with pytest.raises(OSError):
        write_text(tmp_path / "a", "x")
    (tmp_path / "c").symlink_to(tmp_path / "d")
    write_text(tmp_path / "c", "through a link to what is not there yet")
    assert (tmp_path / "c").is_symlink() and (tmp_path / "d").is_file()
