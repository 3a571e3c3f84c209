"""Directories that a process is given: where it started, the user's own, and those for temporary files. Each may be missing."""
from __future__ import annotations

import os
import re
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from svod.system.process import STARTED_IN, current_directory

COMMON = "/tmp"     # shared by all users of a machine, whatever TMPDIR says


def working_directory() -> Path | None:
    """The current directory; None where it was removed, or may not be seen."""
    here = current_directory()
    return None if here is None else Path(here)


def from_start(path: str) -> str:
    """The absolute form of a path that was given when the process started, in its environment: a relative one counts from the directory
    in which svod was imported, wherever the process has gone since. One that begins with `~` stays as it is for a user without a home."""
    return _below(STARTED_IN, path)


def absolute(path: str) -> str:
    """The absolute form of a path that is given now. One that begins with `~` stays as it is for a user without a home."""
    return _below(current_directory() or STARTED_IN, path)


def _below(folder: str | None, path: str) -> str:
    path = os.path.expanduser(path)
    return path if path.startswith("~") else os.path.normpath(os.path.join(folder or os.sep, path))


def is_writable(path: Path) -> bool:
    """Whether `path` can be written as a directory: it can, or it does not exist and its nearest existing parent can. Creates nothing."""
    for p in (path, *path.parents):
        if os.path.exists(p):       # not Path.exists, which raises where a directory on the way may not be searched
            return os.path.isdir(p) and os.access(p, os.W_OK | os.X_OK)
    return False


def user_data() -> Path | None:
    """The platform's directory for the user's data of svod. It may be missing or read-only. None for a user without a home."""
    import platformdirs  # 5 ms that a process which is told all its directories does not need

    return _absolute_or_none(platformdirs.user_data_dir)


def user_cache() -> Path | None:
    """The platform's directory for files that svod can make again. It may be missing or read-only. None for a user without a home."""
    import platformdirs

    return _absolute_or_none(platformdirs.user_cache_dir)


def _absolute_or_none(ask: Callable[..., str]) -> Path | None:
    try:
        found = Path(ask("svod", appauthor=False))
    except (RuntimeError, KeyError, OSError):       # newer releases of platformdirs; older ones give "~/…" or a relative path back
        return None
    return found if found.is_absolute() else None


# -- temporary files ----------------------------------------------------------------------------------------------------
def temporary() -> Path:
    """The directory for temporary files. Raises FileNotFoundError, whose message says which were tried, where none can be written."""
    try:
        return Path(tempfile.gettempdir())
    except OSError as e:
        tried = re.sub(r".*\[(.*)\].*", r"\1", str(e.strerror or e)).replace("'", "")
        raise FileNotFoundError(f"no directory for temporary files can be written (tried {tried}); set TMPDIR") from None


def common_temporary() -> Path:
    """The directory for temporary files that all users of this machine share: /tmp where it can be written, else `temporary`."""
    return Path(COMMON) if os.path.isdir(COMMON) and os.access(COMMON, os.W_OK | os.X_OK) else temporary()


def temporary_places() -> list[str]:
    """Directories for temporary files that can be written, those that people choose first."""
    try:
        chosen = [str(temporary())]
    except OSError:
        chosen = []
    return [*chosen, *(p for p in (COMMON, "/var/tmp", "/dev/shm") if os.path.isdir(p) and os.access(p, os.W_OK | os.X_OK))]


@contextmanager
def temporary_folder(prefix: str) -> Iterator[Path]:
    """A new folder that is removed at the end. Raises the errors of `temporary`."""
    with tempfile.TemporaryDirectory(prefix=prefix, dir=temporary(), ignore_cleanup_errors=True) as folder:
        yield Path(folder)


def kept_folder(prefix: str, parent: Path | None = None) -> Path:
    """A new folder in `parent`, else for temporary files, that stays. Raises the errors of `temporary`."""
    return Path(tempfile.mkdtemp(prefix=prefix, dir=parent or temporary()))


def anonymous_file(name: str) -> int:
    """The descriptor of a file without a name, in memory where the system can."""
    if hasattr(os, "memfd_create"):
        with suppress(OSError):     # a sandbox refuses the call
            return os.memfd_create(name)
    fd, path = tempfile.mkstemp(prefix=name, dir=temporary())
    os.unlink(path)
    return fd


# -- lists of paths -----------------------------------------------------------------------------------------------------
def split_paths(text: str) -> list[str]:
    """The entries of a list of paths and addresses joined as in PATH. The colons of an address, before // and before a port, separate
    nothing, nor does a colon inside a path that is there, or whose directory is there: the longest such path is one entry."""
    text = text.replace(os.pathsep, "\0")
    if os.pathsep == ":":
        text = re.sub(r"(?i)(?:(?<=^)|(?<=\0))(https?)\0//([^/\0]*)(?:\0(\d+)(?=[/\0]|$))?",
                      lambda m: f"{m[1]}://{m[2]}" + (f":{m[3]}" if m[3] else ""), text)
    parts = [part.strip() for part in text.split("\0")]
    entries, at = [], 0
    while at < len(parts):
        end = next((e for e in range(len(parts), at + 1, -1) if _is_one_path(parts[at:e])), at + 1)
        entries.append(os.pathsep.join(parts[at:end]))
        at = end
    return [e for e in entries if e]


def is_address(entry: str) -> bool:
    """Whether an entry of such a list is an address on a server."""
    return entry.lower().startswith(("http://", "https://"))


def paths_from_start(text: str) -> str:
    """A list of paths whose relative ones count from the directory in which the process started, as `from_start` has it."""
    return os.pathsep.join(e if is_address(e) else from_start(e) for e in split_paths(text))


def _is_one_path(parts: list[str]) -> bool:
    """Whether parts that a separator joined are one path: it is there, or a directory with a separator in its name, in which it would
    be."""
    whole = os.path.expanduser(os.pathsep.join(parts))
    folder = os.path.dirname(whole)
    return bool(parts[0]) and (os.path.exists(whole) or (folder.count(os.pathsep) == len(parts) - 1 and os.path.isdir(folder)))
