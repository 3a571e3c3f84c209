"""Writing files that people name: whole or not at all, and only ever a regular file is replaced."""
from __future__ import annotations

import os
import tempfile
from pathlib import Path


def write_text(path: Path, text: str) -> None:
    """Write `text` to `path`: a reader sees the old file or the whole new one. Links are followed; a device or a pipe is written
    to, not replaced. Raises OSError; then what was there before is still there."""
    path = path.resolve()
    if path.exists() and not path.is_file():
        path.write_text(text, encoding="utf-8")
        return
    fd, temporary = tempfile.mkstemp(dir=path.parent, prefix=path.name, suffix=".part")
    try:
        with os.fdopen(fd, "w", encoding="utf-8") as f:
            f.write(text)
            f.flush()
            os.fsync(f.fileno())
        os.chmod(temporary, 0o644)   # mkstemp made it private
        os.replace(temporary, path)
    except BaseException:
        os.unlink(temporary)
        raise
