"""Writes files that users name: whole or not at all, wherever the system allows that. Only regular files are replaced.

A new file has the mode that the umask leaves, one that is replaced keeps its mode and owner. A file whose directory cannot be written, or
that cannot be replaced (it is mounted on its own, or belongs to somebody else), is written in place. A full disk is no reason to: the old
file would be lost.
"""
from __future__ import annotations

import errno
import io
import os
import secrets
import shutil
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import IO

REFUSALS = (errno.EACCES, errno.EPERM, errno.EROFS, errno.EBUSY, errno.EXDEV)      # refusals of a new file or of its name


def write_file(path: Path, write: Callable[[IO[bytes]], object]) -> None:
    """Let `write` fill the file `path`: a reader sees the old file or the whole new one, unless it can only be written in place. Links are
    followed; a device or a pipe is written to, not replaced. Raises OSError, which names the file, and leaves the old file in place."""
    try:
        _write(Path(os.path.realpath(path)), write)
    except OSError as e:
        e.filename = os.fspath(path)    # it may have no name, or that of the temporary file
        raise


def _write(path: Path, write: Callable[[IO[bytes]], object]) -> None:
    if path.exists() and not path.is_file():
        with open(path, "wb") as f:
            write(f)
        return
    # the name is short, as that of the file may be as long as names can be
    temporary = path.parent / f".svod-{secrets.token_hex(8)}.part"
    try:
        beside = os.open(temporary, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)      # less what the umask takes
    except OSError as e:
        if e.errno not in REFUSALS or not path.is_file():
            raise
        content = io.BytesIO()
        write(content)
        _write_in_place(path, content)
        return
    try:
        with os.fdopen(beside, "w+b") as f:
            write(f)
            f.flush()
            os.fsync(f.fileno())
            replaced = _take_over(path, f.fileno()) and _replace(temporary, path)
            if not replaced:
                _write_in_place(path, f)
    finally:
        with suppress(FileNotFoundError):       # it has become the file
            os.unlink(temporary)


def _take_over(path: Path, new: int) -> bool:
    """Give the open file `new` the owner and the mode of the file that it replaces. False where it cannot have them."""
    try:
        old = os.stat(path)
    except FileNotFoundError:
        return True
    try:
        mine = os.fstat(new)
        if (mine.st_uid, mine.st_gid) != (old.st_uid, old.st_gid):
            os.fchown(new, old.st_uid, old.st_gid)
        os.fchmod(new, old.st_mode & 0o7777)
    except OSError:
        return False
    return True


def _replace(temporary: Path, path: Path) -> bool:
    """Give a file the name of another. False where that other can only be written in place."""
    try:
        os.replace(temporary, path)
    except OSError as e:
        if e.errno not in REFUSALS or not path.is_file():
            raise
        return False
    return True


def _write_in_place(path: Path, content: IO[bytes]) -> None:
    """Write all of `content` into a file that is there."""
    content.seek(0)
    with open(path, "r+b") as f:
        shutil.copyfileobj(content, f)
        f.truncate()


def write_text(path: Path, text: str) -> None:
    """Write `text` to `path`, as `write_file` does."""
    write_file(path, lambda f: f.write(text.encode()))
