"""Writes files that users name: whole or not at all. Only regular files are replaced."""
from __future__ import annotations

import os
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import IO


def write_file(path: Path, write: Callable[[IO[bytes]], object]) -> None:
    """Let `write` fill the file `path`: a reader sees the old file or the whole new one. Links are followed; a device or a pipe is
    written to, not replaced. Raises OSError, which names the file, and leaves the old file in place."""
    try:
        _write(path.resolve(), write)
    except OSError as e:
        e.filename = os.fspath(path)    # it may have no name, or that of the temporary file
        raise


def _write(path: Path, write: Callable[[IO[bytes]], object]) -> None:
    if path.exists() and not path.is_file():
        with open(path, "wb") as f:
            write(f)
        return
    fd, temporary = tempfile.mkstemp(dir=path.parent, prefix=path.name, suffix=".part")
    try:
        with os.fdopen(fd, "wb") as f:
            write(f)
            f.flush()
            os.fsync(f.fileno())
        os.chmod(temporary, 0o644)   # mkstemp made it private
        os.replace(temporary, path)
    except BaseException:
        os.unlink(temporary)
        raise


def write_text(path: Path, text: str) -> None:
    """Write `text` to `path`, as `write_file` does."""
    write_file(path, lambda f: f.write(text.encode()))
