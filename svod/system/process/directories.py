"""Directories of a process: where it started, the user's own, and those for temporary files. Each may be missing."""
from __future__ import annotations

import os
import re
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from svod.system.process import STARTED_IN, current_directory

COMMON = "/tmp"     # a directory shared by all users of a machine, whatever TMPDIR is


def working_directory() -> Path | None:
    """The current directory; None if it was removed or is not accessible."""
    here = current_directory()
    return None if here is None else Path(here)


def from_start(path: str) -> str:
    """The absolute form of a path from the environment. A relative path refers to the directory in which svod was imported, even if the
    process has changed its directory since. A path that begins with `~` is returned unchanged if the user has no home."""
    return _below(STARTED_IN, path)


def absolute(path: str) -> str:
    """The absolute form of a path, relative to the current directory. A path that begins with `~` is returned unchanged if the user has
    no home."""
    return _below(current_directory() or STARTED_IN, path)


def _below(folder: str | None, path: str) -> str:
    path = os.path.expanduser(path)
    return path if path.startswith("~") else os.path.normpath(os.path.join(folder or os.sep, path))


def is_writable(path: Path) -> bool:
    """Whether `path` is a writable directory, or could be created: its nearest existing parent is writable. Leaves nothing behind."""
    for p in (path, *path.parents):
        if os.path.exists(p):       # not Path.exists, which raises if a directory on the way may not be searched
            return os.path.isdir(p) and takes_files(p)
    return False


def takes_files(directory: Path) -> bool:
    """Whether a file can be created in a directory; a file without a name is created to find out. The permissions alone say less: root
    passes all of them, and some file systems, such as /proc, take no files."""
    if not os.access(directory, os.W_OK | os.X_OK):
        return False
    try:
        with tempfile.TemporaryFile(dir=directory):
            return True
    except OSError:
        return False


def user_data() -> Path | None:
    """The platform's directory for the user's data of svod, which may be missing or read-only. None for a user without a home."""
    import platformdirs  # imported late: it takes 5 ms, and a process with configured directories does not need it

    return _absolute_or_none(platformdirs.user_data_dir)


def user_cache() -> Path | None:
    """The platform's directory for svod's cached files, which may be missing or read-only. None for a user without a home."""
    import platformdirs

    return _absolute_or_none(platformdirs.user_cache_dir)


def _absolute_or_none(ask: Callable[..., str]) -> Path | None:
    try:
        found = Path(ask("svod", appauthor=False))
    except (RuntimeError, KeyError, OSError):       # newer releases of platformdirs raise; older ones return "~/…" or a relative path
        return None
    return found if found.is_absolute() else None


# -- temporary files ----------------------------------------------------------------------------------------------------
def temporary() -> Path:
    """The directory for temporary files. Raises FileNotFoundError, whose message lists the directories tried, if none can be written."""
    try:
        return Path(tempfile.gettempdir())
    except OSError as e:
        tried = re.sub(r".*\[(.*)\].*", r"\1", str(e.strerror or e)).replace("'", "")
        raise FileNotFoundError(f"no directory for temporary files can be written (tried {tried}); set TMPDIR") from None


def common_temporary() -> Path:
    """The directory for temporary files that all users of this machine share: /tmp if it can be written, else `temporary()`."""
    return Path(COMMON) if os.path.isdir(COMMON) and os.access(COMMON, os.W_OK | os.X_OK) else temporary()


def temporary_places() -> list[str]:
    """Writable directories for temporary files, the one chosen by TMPDIR first."""
    try:
        chosen = [str(temporary())]
    except OSError:
        chosen = []
    return [*chosen, *(p for p in (COMMON, "/var/tmp", "/dev/shm") if os.path.isdir(p) and os.access(p, os.W_OK | os.X_OK))]


@contextmanager
def temporary_folder(prefix: str) -> Iterator[Path]:
    """A new temporary folder, removed when the context ends. Raises the errors of `temporary`."""
    with tempfile.TemporaryDirectory(prefix=prefix, dir=temporary(), ignore_cleanup_errors=True) as folder:
        yield Path(folder)


def kept_folder(prefix: str, parent: Path | None = None) -> Path:
    """A new folder that is not removed, in `parent` or, if that is None, in the directory for temporary files. Raises the errors of
    `temporary`."""
    return Path(tempfile.mkdtemp(prefix=prefix, dir=parent or temporary()))


def anonymous_file(name: str) -> int:
    """The descriptor of a file without a name, in memory if the system supports that."""
    if hasattr(os, "memfd_create"):
        with suppress(OSError):     # a sandbox refuses the call
            return os.memfd_create(name)
    fd, path = tempfile.mkstemp(prefix=name, dir=temporary())
    os.unlink(path)
    return fd


# -- lists of paths -----------------------------------------------------------------------------------------------------
def split_paths(text: str) -> list[str]:
    """The entries of a list of paths and addresses joined as in PATH. The colons of an address, before // and before a port, do not
    separate entries, nor does a colon inside a path that exists or whose directory exists: the longest such path is one entry."""
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
    """Whether an entry of a list of paths and addresses is the address of a server (http or https)."""
    return entry.lower().startswith(("http://", "https://"))


def paths_from_start(text: str) -> str:
    """Make the relative paths of a list of paths and addresses absolute, as `from_start` does."""
    return os.pathsep.join(e if is_address(e) else from_start(e) for e in split_paths(text))


def _is_one_path(parts: list[str]) -> bool:
    """Whether parts split at a separator are one path: it exists, or its directory exists and has all these separators in its name."""
    whole = os.path.expanduser(os.pathsep.join(parts))
    folder = os.path.dirname(whole)
    return bool(parts[0]) and (os.path.exists(whole) or (folder.count(os.pathsep) == len(parts) - 1 and os.path.isdir(folder)))
