"""Reads and writes files that users name, with errors that name the file and say what to do.

A file is replaced atomically if the system allows that; only regular files are replaced.

A new file gets the mode that the umask leaves; a replaced one keeps its mode and owner. A file is overwritten in place if its directory
cannot be written, or if it cannot be replaced (it is a mount point, or belongs to another user). A full disk is no reason to overwrite in
place, because the old content would be lost.
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

from svod.errors import FileError

ADVICE = {
    errno.ENOENT: "make its directory first, or name another place", errno.ENOTDIR: "name a file in a directory",
    errno.EISDIR: "name a file in it", errno.ENOSPC: "make room, or name a place on another disk",
    errno.EDQUOT: "make room, or name a place on another disk", errno.ENAMETOOLONG: "give it a shorter name"}
ADVICE_TO_READ = ADVICE | {errno.ENOENT: "name a file that exists; a relative path counts from the current directory"}
REFUSALS = (errno.EACCES, errno.EPERM, errno.EROFS, errno.EBUSY, errno.EXDEV)      # errors: creating or renaming a file is refused


def write_file(path: Path, write: Callable[[IO[bytes]], object]) -> None:
    """Replace the file `path` by the bytes that `write` writes. A reader sees the old file or the complete new one, unless it can only
    be overwritten in place. Links are followed; a device or a pipe is written to, not replaced. Raises FileError; the old file then
    stays."""
    try:
        _write(Path(os.path.realpath(path)), write)
    except OSError as e:
        raise _file_error(path, "written", e) from e


def open_file(path: str | os.PathLike[str]) -> IO[bytes]:
    """Open a file to read its bytes. Raises FileError."""
    try:
        return open(path, "rb")
    except OSError as e:
        raise _file_error(path, "read", e) from e


def _file_error(path: str | os.PathLike[str], done: str, error: OSError) -> FileError:
    """Make the FileError for a file that cannot be read or written from the system's error. `done`: "read" or "written"."""
    advice = ADVICE_TO_READ if done == "read" else ADVICE
    new = FileError(f"{os.fspath(path)} cannot be {done}: {error.strerror or error}; "
                    f"{advice.get(error.errno or 0, f'name a file that may be {done}')}")
    new.errno = error.errno
    return new


def _write(path: Path, write: Callable[[IO[bytes]], object]) -> None:
    if path.exists() and not path.is_file():
        with open(path, "wb") as f:
            write(f)
        return
    # a short name, because the file's own name with a suffix might exceed the longest name allowed
    temporary = path.parent / f".svod-{secrets.token_hex(8)}.part"
    try:
        beside = os.open(temporary, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)      # the umask clears bits of this mode
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
        with suppress(FileNotFoundError):       # the temporary file has been renamed
            os.unlink(temporary)


def _take_over(path: Path, new: int) -> bool:
    """Give the open file `new` the owner and mode of the file that it will replace. Returns False if the system refuses."""
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
    """Rename a file to the name of another, which it replaces. Returns False if the other can only be overwritten in place."""
    try:
        os.replace(temporary, path)
    except OSError as e:
        if e.errno not in REFUSALS or not path.is_file():
            raise
        return False
    return True


def _write_in_place(path: Path, content: IO[bytes]) -> None:
    """Overwrite an existing file with all of `content`."""
    content.seek(0)
    with open(path, "r+b") as f:
        shutil.copyfileobj(content, f)
        f.truncate()


def write_text(path: Path, text: str) -> None:
    """Write `text` to `path`, with the guarantees of `write_file`. Raises FileError."""
    write_file(path, lambda f: f.write(text.encode()))
