"""Files are written whole; links and pipes stay what they are."""
from __future__ import annotations

import errno
import os
import threading
from pathlib import Path

import pytest

from svod.system.files import write_file, write_text


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
    reader.join(10)
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
