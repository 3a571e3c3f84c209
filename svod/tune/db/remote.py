"""Layers over https: a `.jsonl` file on a server, with a local copy that is used while the server does not answer.

    SVOD_TUNE_DB=tuning.db:https://tuning.example.com/team.jsonl

The server is asked at most once an hour, and sends the file if it has changed (ETag). The file is untrusted, like every layer: its records
are checked one by one. Plain http is refused except for servers on this machine.
"""
from __future__ import annotations

import hashlib
import json
import logging
import shutil
import time
from pathlib import Path
from typing import IO, Any, NamedTuple
from urllib.parse import urlsplit

from svod import config
from svod.errors import DatabaseError
from svod.system.files import write_file, write_text
from svod.tune.db.transfer import read_header

log = logging.getLogger("svod.tune.db")

ASKED_EVERY = 3600.0        # seconds between requests to the server
ASKED_AGAIN = 300.0         # seconds until the next request after one that failed, if there is a local copy
PATIENCE = 5.0              # seconds without a byte after which a request fails
MOST_SECONDS = 60.0         # longest time of a whole transfer
MOST_DOWNLOAD_BYTES = 256 << 20
LONGEST_HEADER, CHUNK = 1 << 20, 1 << 16     # most bytes of a file's first line; bytes per read
LOOPBACK = ("127.0.0.1", "::1", "localhost")


class Remote(NamedTuple):
    """A .jsonl file of records on a server."""

    url: str

    def __str__(self) -> str:
        return self.url

    @property
    def copy(self) -> Path:
        """The path of the local copy, which need not exist yet."""
        return config.data_dir() / "layers" / f"{hashlib.blake2b(self.url.encode(), digest_size=12).hexdigest()}.jsonl"

    @property
    def name(self) -> str:
        return self.url

    def exists(self) -> bool:
        """Whether there is a local copy of the file."""
        return self.copy.exists()

    def fetched(self) -> tuple[Path | None, str | None]:
        """Bring the local copy up to date, if possible. Returns its path, or None if there is none, and the reason of a failure, or
        None."""
        state = _read_state(self.copy)
        if self.exists() and time.time() < state.get("ask_after", 0.0):
            return self.copy, None
        from http.client import HTTPException  # imported here for the reason given in `_fetch`
        try:
            _fetch(self.url, self.copy, state.get("etag", "") if self.exists() else "")
        except (OSError, HTTPException, ValueError, DatabaseError) as e:        # URLError and time-outs are OSErrors
            why = f"{self.url} cannot be read: {getattr(e, 'reason', None) or e}"
            if not self.exists():
                return None, f"{why}; there is no copy of it here"
            _write_state(self.copy, {**state, "ask_after": time.time() + ASKED_AGAIN})
            since = time.strftime("%Y-%m-%d %H:%M", time.localtime(self.copy.stat().st_mtime))
            return self.copy, f"{why}; the copy of {since} is used"
        return self.copy, None


def _fetch(url: str, path: Path, etag: str) -> None:
    """Bring the copy at `path` up to date with the file at `url`. `etag`: the ETag of the copy, "" without one. Raises OSError,
    HTTPException, ValueError, and DatabaseError for another kind of file."""
    import urllib.error  # imported here because this takes 50 ms, and few processes fetch a database
    import urllib.request

    _check_scheme(url)
    path.parent.mkdir(parents=True, exist_ok=True)
    request = urllib.request.Request(url, headers={"User-Agent": "svod", **({"If-None-Match": etag} if etag else {})})
    try:
        with urllib.request.urlopen(request, timeout=PATIENCE) as answer:
            _check_scheme(answer.url)       # the server may have redirected the request
            body = _Bounded(answer)
            start = b""
            while b"\n" not in start and len(start) < LONGEST_HEADER and (more := body.read(CHUNK)):
                start += more
            # the header is checked first, so that a login page does not replace the copy
            read_header(start.partition(b"\n")[0].decode(errors="surrogateescape"), url)

            def write(f: IO[bytes]) -> None:
                f.write(start)
                shutil.copyfileobj(body, f)
            write_file(path, write)
            etag = answer.headers.get("ETag") or ""
    except urllib.error.HTTPError as e:
        if e.code != 304:
            raise
    _write_state(path, {"url": url, "etag": etag, "ask_after": time.time() + ASKED_EVERY})


def _check_scheme(url: str) -> None:
    parts = urlsplit(url)
    if parts.scheme != "https" and parts.hostname not in LOOPBACK:
        raise ValueError("only https is used: anybody on the way can change what plain http carries")


class _Bounded:
    """The body of an answer; reading raises ValueError above MOST_DOWNLOAD_BYTES bytes or after MOST_SECONDS seconds."""

    def __init__(self, answer: Any) -> None:
        self.answer, self.bytes, self.end = answer, 0, time.monotonic() + MOST_SECONDS

    def read(self, size: int = -1, /) -> bytes:
        data: bytes = self.answer.read(size)
        self.bytes += len(data)
        if self.bytes > MOST_DOWNLOAD_BYTES:
            raise ValueError(f"it has more than {MOST_DOWNLOAD_BYTES >> 20} MiB")
        if time.monotonic() > self.end:
            raise ValueError(f"its transfer takes more than {MOST_SECONDS:g} s")
        return data


def _read_state(path: Path) -> dict[str, Any]:
    """Read the state of a local copy: its ETag, and the time at which the server is asked again."""
    try:
        state = json.loads(path.with_suffix(".json").read_text(encoding="utf-8"))
        return state if isinstance(state, dict) and isinstance(state.get("ask_after", 0.0), (int, float)) else {}
    except (OSError, ValueError, RecursionError):
        return {}


def _write_state(path: Path, state: dict[str, Any]) -> None:
    write_text(path.with_suffix(".json"), json.dumps(state) + "\n")
