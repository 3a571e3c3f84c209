"""The file format in which records are exported and imported: JSON Lines.

The first line is a header, `{"format": "svod-tune-db", "version": 2, "targets": [...]}`. Every further line is one record in the JSON
form of `records.py`, without fields that have their defaults. A record that is malformed, altered or of an unknown kind is skipped and
reported with its line. Unknown fields are kept. Files of version 1 are read. A file of a newer version is refused as a whole. The file is
data: nothing in it is executed or unpickled, and no chain in it is assumed to apply.
"""
from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from functools import partial
from pathlib import Path
from typing import NamedTuple, TypeVar

from svod.errors import DatabaseError
from svod.system.files import write_text
from svod.tune.db.records import Record, RecordError, canonical, parse_json, record_from_json

EXPORT_FORMAT = "svod-tune-db"
FORMAT_VERSION = 2
CAPTURE_FORMAT = "svod-capture"     # the format of captures, which users may import by mistake


R = TypeVar("R")


class Skipped(NamedTuple):
    """A record that was skipped, and the reason. `source`: the file or address; `record`: the record's line or table:id, "" if the whole
    source was skipped."""

    source: str
    reason: str
    record: str = ""

    @property
    def where(self) -> str:
        return f"{self.source}:{self.record}" if self.record else self.source


def admit(read: Callable[[], R], source: str, record: str, skipped: list[Skipped]) -> R | None:
    """The record that `read` returns. If it raises because the data is no valid record, returns None and adds an entry to `skipped`."""
    try:
        return read()
    except RecordError as e:
        skipped.append(Skipped(source, str(e), record))
    except Exception as e:  # untrusted data may raise any exception
        skipped.append(Skipped(source, f"it is no record: {type(e).__name__}: {e!s:.200}", record))
    return None


def write_records(path: Path, records: Iterable[Record]) -> int:
    """Write the records to `path`, all or none, in a stable order, so that a diff shows only changes. Returns their number.

    Raises FileError; an older file at `path` is then unchanged."""
    records = list(records)
    lines = sorted({(r.kind, r.id): canonical(r.to_json()) for r in records}.items())
    targets = sorted({t for r in records if isinstance(t := getattr(r, "target", None), str)})
    header = canonical({"format": EXPORT_FORMAT, "version": FORMAT_VERSION, "targets": targets})
    write_text(path, "".join(line + "\n" for line in (header, *(text for _, text in lines))))
    return len(lines)


def read_header(line: str, path: Path | str) -> frozenset[str]:
    """The targets that a file has records for, from its first line. Raises DatabaseError for another kind of file or a newer version."""
    foreign = f"{path} is not a file of svod's tuning records"
    if not line.strip():
        raise DatabaseError(f"{foreign}: " + ("its first line is empty" if line else "it is empty"))
    try:
        line.encode()
        header = parse_json(line, "the first line")
    except (UnicodeEncodeError, RecordError) as e:
        raise DatabaseError(f"{foreign}: {'it is not text' if isinstance(e, UnicodeEncodeError) else e}") from e
    if isinstance(header, dict) and header.get("format") == CAPTURE_FORMAT:
        raise DatabaseError(f"{foreign} but a capture: tune it with svod-tune --from {path}")
    if not isinstance(header, dict) or header.get("format") != EXPORT_FORMAT:
        raise DatabaseError(f'{foreign}: its first line is no {{"format": "{EXPORT_FORMAT}", …}}')
    version, targets = header.get("version"), header.get("targets", [])
    if not isinstance(version, int) or version < 1 or not isinstance(targets, list):
        raise DatabaseError(f"{foreign}: its header is malformed")
    if version > FORMAT_VERSION:
        raise DatabaseError(f"{path} has format version {version}, this svod reads up to {FORMAT_VERSION}; update svod")
    return frozenset(t for t in targets if isinstance(t, str))


def open_lines(path: Path, only_target: str | None = None) -> Iterator[tuple[int, str]]:
    """The lines of a file that hold records, with their numbers. With `only_target`, a file that has no records for it yields no line.

    Raises DatabaseError for another kind of file or a newer version, OSError where it cannot be read."""
    # surrogateescape: only a line that is not UTF-8 is malformed then, and the others are read
    with open(path, encoding="utf-8", errors="surrogateescape") as f:
        targets = read_header(f.readline(), path)
        if only_target is None or only_target in targets:
            yield from ((number, line) for number, line in enumerate(f, 2) if line.strip())


def parse_line(line: str) -> Record:
    """The record in a line. Raises RecordError."""
    try:
        line.encode()  # raises if the line had bytes that are not UTF-8
        return record_from_json(parse_json(line, "the line"))
    except UnicodeEncodeError:
        problem = RecordError("the line is not text in UTF-8")
    except RecordError as e:
        problem = e
    if line.endswith("\n"):
        raise problem
    raise RecordError(f"the line is cut off, the end of the file is missing ({problem})")


def iterate_records(path: Path, skipped: list[Skipped], only_target: str | None = None) -> Iterator[Record]:
    """The records of a file, one after the other; invalid ones are added to `skipped`. Raises the errors of `open_lines`."""
    for number, line in open_lines(path, only_target):
        record = admit(partial(parse_line, line), str(path), str(number), skipped)
        if record is not None:
            yield record


def read_records(path: Path, only_target: str | None = None) -> tuple[list[Record], list[Skipped]]:
    """Read all records of a file. Returns them, and the invalid ones that were skipped. Raises the errors of `open_lines`."""
    skipped: list[Skipped] = []
    return list(iterate_records(path, skipped, only_target)), skipped
