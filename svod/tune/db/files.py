"""Opening SQLite files that many processes use at once, and recognising network file systems."""
from __future__ import annotations

import os
import re
import shutil
import socket
import sqlite3
import time
from pathlib import Path
from typing import Any

from svod.errors import DatabaseError
from svod.system.process.directories import takes_files
from svod.system.process.system_files import mounts
from svod.tune.db import schema

BUSY_SECONDS = 30.0
OPEN_ATTEMPTS = 8
SIDE_FILES = ("-wal", "-journal")   # suffixes of the files in which SQLite keeps changes that are not in the database file yet
LEAST_FREE = 1 << 20            # bytes of free disk below which no database is created: the search of one kernel stores about 100 KB
MOST_VALUE_BYTES = 1 << 26               # most bytes of one value or row that SQLite accepts; every field of a record is shorter

#: Linux's names of the file systems on which WAL's shared memory does not work between machines.
NETWORK_FILE_SYSTEMS = frozenset({
    "nfs", "nfs4", "cifs", "smb", "smb2", "smb3", "smbfs", "ncpfs", "afs", "9p", "ceph", "lustre", "gpfs", "beegfs", "glusterfs",
    "orangefs", "pvfs2", "panfs", "wekafs", "gfs2", "ocfs2", "coda", "davfs",
    "fuse.sshfs", "fuse.glusterfs", "fuse.ceph", "fuse.davfs2", "fuse.s3fs",
    "fuse.rclone", "fuse.gcsfuse", "fuse.juicefs", "virtiofs"})


class UnwritableDatabase(DatabaseError):
    """The error for a database that is known to be impossible to create or write before this is tried."""


CANNOT_OPEN = sqlite3.Error, OSError, schema.NewerSchema, schema.ForeignDatabase, UnwritableDatabase   # errors of opening a database


def complaint(path: Path, error: Exception) -> str:
    """A sentence for users: why the database at `path` cannot be used, given the error of opening or reading it, and what to do."""
    if isinstance(error, UnwritableDatabase):
        return str(error)
    if isinstance(error, schema.ForeignDatabase):
        return f"{path} cannot be used: it is not a tuning database of svod: {error}; name another file, or move it away to start a new one"
    if isinstance(error, sqlite3.DatabaseError) and not isinstance(error, sqlite3.OperationalError):
        return (f"{path} is damaged and cannot be used ({' '.join(str(error).split())}); put a copy in its place, or move it away and "
                "import what was exported")
    if isinstance(error, schema.NewerSchema):
        return f"{path} cannot be used: {error}"
    return f"{path} cannot be opened: {(error.strerror if isinstance(error, OSError) else None) or error}"


def file_system_type(path: Path, mounts: str) -> str:
    """The type of the file system of `path`, from `mounts`, the text of /proc/self/mountinfo; "" if no mount point there contains it."""
    best, kind = -1, ""
    real = os.path.realpath(path)
    for line in mounts.splitlines():
        left, _, right = line.partition(" - ")
        columns, rest = left.split(), right.split()
        if len(columns) < 5 or not rest:
            continue
        point = re.sub(r"\\([0-7]{3})", lambda m: chr(int(m.group(1), 8)), columns[4])  # spaces are written as \040
        if (real == point or real.startswith(point.rstrip("/") + "/")) and len(point) >= best:
            best, kind = len(point), rest[0]
    return kind


def on_network(path: Path) -> bool:
    """Whether `path` is on a network file system. Known on Linux only; elsewhere the answer is no."""
    return file_system_type(path, mounts()) in NETWORK_FILE_SYSTEMS


def host_name() -> str:
    """The name of this host, for use in a file name: special characters are replaced by _."""
    return re.sub(r"[^A-Za-z0-9._-]", "_", socket.gethostname()) or "host"


def open_for_writing(path: Path, *, wal: bool) -> sqlite3.Connection:
    """Open the database at `path`, after creating or upgrading it if needed. Raises the errors of CANNOT_OPEN.

    A locked file is tried again: switching to WAL needs exclusive access and ignores the busy timeout."""
    if (reason := unwritable(path)) is not None:    # SQLite would open it for reading, and leave WAL's side files
        raise UnwritableDatabase(reason)
    path.parent.mkdir(parents=True, exist_ok=True)
    for attempt in range(OPEN_ATTEMPTS):
        conn = _connect(str(path))
        try:
            version = schema.read_version(conn)  # read before anything is written, so that a foreign file stays unchanged
            if (conn.execute("PRAGMA journal_mode").fetchone()[0] == "wal") != wal:  # a new file, or moved between file systems
                conn.execute(f"PRAGMA journal_mode = {'WAL' if wal else 'DELETE'}")
            if version < schema.SCHEMA_VERSION:
                schema.upgrade(conn)
            conn.execute("PRAGMA synchronous = NORMAL" if wal else "PRAGMA synchronous = FULL")
            return conn
        except sqlite3.OperationalError as e:
            conn.close()
            if "locked" not in str(e) or attempt == OPEN_ATTEMPTS - 1:
                raise
            time.sleep(0.02 * 2 ** attempt)
        except BaseException:
            conn.close()
            raise
    raise AssertionError("the last attempt returns or raises")


def open_for_reading(path: Path) -> sqlite3.Connection | None:
    """Open the database at `path` read-only; None if there is none or it is empty. Raises the errors of CANNOT_OPEN but UnwritableDatabase.

    The last connection to close removes WAL's side files if it was opened with mode=rw, and leaves them behind if with mode=ro. So a file
    that this process may write is opened with mode=rw and `query_only`. A file that it may not write is opened as immutable if it has no
    side files, or if its directory cannot be written, so that SQLite cannot create them: changes by its owner may then go unseen."""
    if not path.exists() or path.stat().st_size == 0:
        return None
    path = path.resolve()
    if on_network(path):
        modes = ["ro"]
    elif unwritable(path) is None:
        modes = ["rw"]
    else:
        has_side_files = any(os.path.exists(f"{path}{end}") for end in SIDE_FILES)
        modes = ["ro", "ro&immutable=1"] if has_side_files else ["ro&immutable=1"]
    for mode in modes:
        try:
            conn, version = _open_uri(f"{path.as_uri()}?mode={mode}")
            break
        except sqlite3.OperationalError:
            if mode is modes[-1] or os.access(path.parent, os.W_OK):
                raise
    if version == 0:
        conn.close()
        return None
    if version < schema.SCHEMA_VERSION:
        return _upgraded_copy(conn)
    return conn


def unwritable(path: Path) -> str | None:
    """The reason why a database at `path` cannot be created or written, as far as it shows without trying; None if none is found."""
    existing = path
    while not os.path.lexists(existing) and existing != existing.parent:
        existing = existing.parent
    if existing != path:
        if not os.path.isdir(existing):
            return f"{path} cannot be written: it cannot be made, as {existing} is not a directory"
        return None if takes_files(existing) else f"{path} cannot be written: it cannot be made, as no file can be made in {existing}"
    if os.path.exists(path) and not os.path.isfile(path):
        return f"{path} cannot be written: it is no regular file"
    if not os.access(path, os.W_OK):
        return f"{path} cannot be written: it is read-only"
    # SQLite creates its journal files in the same directory
    return None if takes_files(path.parent) else f"{path} cannot be written: its directory is read-only"


def full_disk(path: Path) -> str | None:
    """An error text if the disk of `path` is full; None if it is not, or if the free space is unknown."""
    directory = next((p for p in path.parents if p.is_dir()), path)
    try:
        usage = shutil.disk_usage(directory)
    except OSError:
        return None
    if usage.total and usage.free < LEAST_FREE:
        return f"{path}: the disk is full, {usage.free // 1024} KiB are left"
    return None


def foreign(path: Path) -> str | None:
    """The complaint that `path` is a file with content that is not a tuning database of svod; None: it is one, or cannot be read."""
    try:
        conn = open_for_reading(path)
    except schema.ForeignDatabase as e:
        return complaint(path, e)
    except CANNOT_OPEN:
        return None
    if conn is not None:
        conn.close()
    return None


def _open_uri(uri: str) -> tuple[sqlite3.Connection, int]:
    conn = _connect(uri)
    try:
        conn.execute("PRAGMA query_only = ON")
        return conn, schema.read_version(conn)
    except BaseException:
        conn.close()
        raise


def open_in_memory() -> sqlite3.Connection:
    """An empty database in memory."""
    conn = _connect(":memory:")
    schema.upgrade(conn)
    return conn


def _upgraded_copy(conn: sqlite3.Connection) -> sqlite3.Connection:
    """An upgraded copy in memory of an older database that is only read."""
    copy = _connect(":memory:")
    conn.backup(copy)
    conn.close()
    schema.upgrade(copy)
    return copy


class _Connection(sqlite3.Connection):
    """A connection that raises DatabaseError where the message of an SQLite error is not UTF-8, as it quotes a name of a damaged file."""

    def execute(self, *given: Any) -> sqlite3.Cursor:
        try:
            return super().execute(*given)
        except UnicodeDecodeError as e:
            raise sqlite3.DatabaseError("a name in it is no text in UTF-8") from e


def _connect(name: str) -> sqlite3.Connection:
    # isolation_level None: transactions are begun by hand, IMMEDIATE. Under contention a deferred one fails at once, whatever the timeout.
    conn = sqlite3.connect(name, timeout=BUSY_SECONDS, isolation_level=None, check_same_thread=False, uri=name.startswith("file:"),
                           factory=_Connection)
    conn.row_factory = sqlite3.Row
    conn.text_factory = lambda text: str(text, "utf-8", "replace")      # text that is not UTF-8 makes only its row invalid
    conn.execute("PRAGMA trusted_schema = OFF")
    conn.setlimit(sqlite3.SQLITE_LIMIT_LENGTH, MOST_VALUE_BYTES)
    return conn
