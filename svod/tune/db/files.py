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

from svod.system.process.system_files import mounts
from svod.tune.db import schema

BUSY_SECONDS = 30.0
OPEN_ATTEMPTS = 8
LEAST_FREE = 1 << 20            # bytes of free disk below which no database is created: the search of one kernel stores about 100 KB
LONGEST = 1 << 26               # most bytes of one value or row that SQLite accepts; every field of a record is shorter
SQLITE_MAGIC = b"SQLite format 3\0"

#: The kernel's names of file systems on which WAL's shared memory does not work between machines.
NETWORK_FILE_SYSTEMS = frozenset({
    "nfs", "nfs4", "cifs", "smb", "smb2", "smb3", "smbfs", "ncpfs", "afs", "9p", "ceph", "lustre", "gpfs", "beegfs", "glusterfs",
    "orangefs", "pvfs2", "panfs", "wekafs", "gfs2", "ocfs2", "coda", "davfs",
    "fuse.sshfs", "fuse.glusterfs", "fuse.ceph", "fuse.davfs2", "fuse.s3fs",
    "fuse.rclone", "fuse.gcsfuse", "fuse.juicefs", "virtiofs"})


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
    """Open the database at `path`, after creating or upgrading it if needed. Raises sqlite3.Error, OSError, NewerSchema, ForeignDatabase.

    A locked file is tried again: switching to WAL needs exclusive access and ignores the busy timeout."""
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
    """Open the database at `path` read-only; None if there is none or it is empty. Raises the errors of `open_for_writing`.

    In a directory that cannot be written SQLite cannot create WAL's side files: the file is then opened as immutable."""
    if not path.exists() or path.stat().st_size == 0:
        return None
    uri = path.resolve().as_uri() + "?mode=ro"
    try:
        conn, version = _open_uri(uri)
    except sqlite3.OperationalError:
        if os.access(path.parent, os.W_OK) or not os.access(path, os.R_OK):
            raise
        conn, version = _open_uri(uri + "&immutable=1")
    if version == 0:
        conn.close()
        return None
    if version < schema.SCHEMA_VERSION:
        return _upgraded_copy(conn)
    return conn


def unwritable(path: Path) -> str | None:
    """Why a database at `path` cannot be created or written, judged by permissions and names; None if it can."""
    existing = path
    while not os.path.lexists(existing) and existing != existing.parent:
        existing = existing.parent
    if existing != path:
        if not existing.is_dir():
            return f"{path} cannot be made: {existing} is not a directory"
        return None if _may_write_in(existing) else f"{path} cannot be made: the directory {existing} cannot be written"
    if path.exists() and not path.is_file():
        return f"{path} is no regular file"
    if not os.access(path, os.W_OK):
        return f"{path} is read-only"
    # SQLite creates its journal files in the same directory
    return None if _may_write_in(path.parent) else f"{path} cannot be written: its directory is read-only"


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


def _may_write_in(directory: Path) -> bool:
    return os.access(directory, os.W_OK | os.X_OK)


def is_foreign(path: Path) -> bool:
    """Whether `path` is a file with content that is not a tuning database of svod. A file that cannot be read counts as ours."""
    try:
        with path.open("rb") as f:
            start = f.read(len(SQLITE_MAGIC))
    except OSError:
        return False
    if start and start != SQLITE_MAGIC:
        return True
    try:
        conn = open_for_reading(path)
    except schema.ForeignDatabase:
        return True
    except (sqlite3.Error, OSError, schema.NewerSchema):
        return False
    if conn is not None:
        conn.close()
    return False


def _open_uri(uri: str) -> tuple[sqlite3.Connection, int]:
    conn = _connect(uri)
    try:
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
    conn.setlimit(sqlite3.SQLITE_LIMIT_LENGTH, LONGEST)
    return conn
