"""The layers that records are read from: databases, JSON Lines files, and memory, in the order of SVOD_TUNE_DB.

A spec is a list of paths joined by `os.pathsep`; a colon that is part of an existing path does not separate. An entry is a database file,
a `.jsonl` file on this machine or on a server (`remote.py`), or a directory with such files. New records are written to the first entry,
and all entries are read. The rank of a layer is 0 (own) for the first entry, 1 (team) for the others, and 2 for the records that ship with
svod. `:none:` turns all of them off.

The *user's records* are the records of the entries (`DatabasePaths.write` and `read`). *All layers* also include the files that ship with
svod (`DatabasePaths.shipped`). The docstring of `TuningDB`'s module says which of its methods read which of the two.

On a network file system WAL does not work between machines, so each host writes its own file `NAME.HOST.db`, in the directory of
`NAME.db`, and reads the files of all hosts.
"""
from __future__ import annotations

import os
import re
import sqlite3
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, Protocol, TypeVar

from svod import config
from svod.errors import DatabaseError
from svod.system.process import directories
from svod.tune.db import files
from svod.tune.db.records import KernelRecord, Measurement, Record, RecordError, Verdict
from svod.tune.db.remote import Remote
from svod.tune.db.schema import OWN, SHIPPED
from svod.tune.db.transfer import Skipped, admit, open_lines, parse_line

R = TypeVar("R", bound=Record)

FILE_NAME = "tuning.db"

# INDEXED BY: without it SQLite may choose the index of all measurements, and read hundreds of rows that the condition then drops
SELECT_DECIDING = ("SELECT * FROM measurements INDEXED BY measurements_deciding "
                   "WHERE {place}(step = 'confirm' OR status = 'wrong') LIMIT {most}")
MOST_DECIDING = 20_000      # most measurements that are read to decide about one kernel on one target

SELECT_TARGETS = ("SELECT DISTINCT target FROM measurements INDEXED BY measurements_deciding "
                  "WHERE kernel = ? AND (step = 'confirm' OR status = 'wrong') LIMIT 1000")
MOST_OF_A_FAMILY = 1000     # most descriptions of related kernels that are read

Source = Path | Remote

Deciding = tuple[list[tuple[Measurement, int]], list[Verdict]]  # measurements with their layer rank, verdicts


class DatabasePaths(NamedTuple):
    """The files that a spec (the value of SVOD_TUNE_DB) names. `write`: the file to write (None: memory only); `wal`: whether it uses
    SQLite's write-ahead log; `read`: the team's files; `shipped`: the files that ship with svod; `problem`: what is wrong with the spec,
    or None."""

    write: Path | None
    wal: bool
    read: tuple[Source, ...]
    shipped: tuple[Path, ...] = ()
    problem: str | None = None


def shipped_files() -> tuple[Path, ...]:
    """The files of records that ship with svod: package data where svod is installed, tune_db/ in a checkout."""
    package = Path(__file__).resolve().parents[2]
    for directory in (package / "shipped_db", package.parent / "tune_db"):
        if directory.is_dir():
            return tuple(sorted(directory.glob("*.jsonl")))
    return ()


def resolve(spec: str | None) -> DatabasePaths:
    """Find the files that a spec, the value of SVOD_TUNE_DB, names on this machine. Opens and creates nothing."""
    if spec is not None and spec.strip() == config.NONE:
        return DatabasePaths(None, False, ())
    if spec is None or not spec.strip(os.pathsep + " "):
        directory = config.data_dir()
        usual = directories.user_data()
        # if the user's data directory cannot be written, another one is used, but the file there is still read
        others = () if usual is None or usual == directory or not os.path.exists(usual / FILE_NAME) else (usual / FILE_NAME,)
        return _resolve_first(directory / FILE_NAME, others)
    entries = [Remote(e) if directories.is_address(e) else Path(directories.absolute(e)) for e in directories.split_paths(spec)]
    if homeless := [e for e in entries if str(e).startswith("~")]:
        return DatabasePaths(None, False, (), shipped_files(), f"{homeless[0]}: there is no such home directory; name the whole path")
    first = entries[0]
    rest = tuple(f for e in entries[1:] for f in _files_of(e))
    if isinstance(first, Remote) or first.suffix == ".jsonl":
        return DatabasePaths(None, False, (first, *rest), shipped_files(),
                             f"{first} comes first, where the database stands that is written, and .jsonl files are only read; put a .db "
                             f"file before it, as in tuning.db{os.pathsep}{first.name}, or svod-db import it")
    if os.path.isdir(first) or not (first.suffix or os.path.exists(first)):
        return _resolve_first(first / FILE_NAME, (*(f for f in _files_of(first) if f.name != FILE_NAME), *rest))
    return _resolve_first(first, rest)


def name_problem(plan: DatabasePaths) -> str | None:
    """Why the first entry of a spec cannot be used as a database: it is another kind of file, or cannot be created. None if it can be used.
    An existing database that cannot be written is no problem, as it can be read."""
    if plan.problem is not None or plan.write is None:
        return plan.problem
    if os.path.exists(plan.write):
        return files.foreign(plan.write)
    return files.unwritable(plan.write)


def _resolve_first(path: Path, read: tuple[Source, ...]) -> DatabasePaths:
    if not files.on_network(path):
        return DatabasePaths(path, True, read, shipped_files())
    mine = path.with_name(f"{path.stem}.{files.host_name()}{path.suffix}")
    family = sorted({path, *path.parent.glob(f"{path.stem}.*{path.suffix}")} - {mine})
    others: tuple[Source, ...] = tuple(p for p in family if p.exists())
    return DatabasePaths(mine, False, (*others, *(p for p in read if p not in others and p != mine)), shipped_files())


def _files_of(entry: Source) -> Sequence[Source]:
    if isinstance(entry, Remote):
        return [entry]
    # not Path.is_dir, which raises if permissions forbid to search a parent directory
    if os.path.isdir(entry) and os.access(entry, os.R_OK | os.X_OK):
        return sorted(p for p in entry.iterdir() if p.suffix in (".db", ".jsonl") and p.is_file())
    return [entry]


class Layer(Protocol):
    """A source of records. `name`: its name in messages."""

    name: str

    def deciding(self, kernel: str, target: str) -> Deciding:
        """The records that may decide about (kernel, target): confirmed and wrong measurements, and all verdicts."""
        ...

    def all_deciding(self) -> Deciding:
        """The records that may decide about any kernel and target; `deciding` returns them for one pair."""
        ...

    def tally(self, record: type[Record], columns: Sequence[str]) -> Counter[tuple[Any, ...]]:
        """Count the records of one kind by their values in these columns, which hold text."""
        ...

    def has(self, record: Record) -> bool:
        """Whether a record is in this layer."""
        ...

    def select(self, record: type[R], kernel: str | None, target: str | None, plan: str | None = None) -> Iterable[tuple[R, int]]:
        """Records of one kind with their ranks, optionally of one kernel, one target and one plan (where the kind has them)."""
        ...

    def family(self, structure: str) -> Iterable[KernelRecord]:
        """The descriptions of kernels with a structure (`svod.core.schedule.family`)."""
        ...

    def targets_of(self, kernel: str) -> Iterable[str]:
        """The targets that a kernel was confirmed on."""
        ...

    def version(self) -> int:
        """A number that changes when another process has changed the layer's content."""
        ...

    def close(self) -> None: ...


class SqliteLayer:
    """A database, read through one connection. Rows that are not valid records are skipped and added to `report`."""

    def __init__(self, conn: sqlite3.Connection, name: str, rank: int, report: list[Skipped]) -> None:
        self.conn, self.name, self.rank, self.report = conn, name, rank, report

    def deciding(self, kernel: str, target: str) -> Deciding:
        query = SELECT_DECIDING.format(place="kernel = ? AND target = ? AND ", most=MOST_DECIDING)
        measurements = list(self._records(Measurement, self.conn.execute(query, (kernel, target))))
        return measurements, [v for v, _ in self.select(Verdict, kernel, target)]

    def all_deciding(self) -> Deciding:
        query = SELECT_DECIDING.format(place="", most=-1)
        return list(self._records(Measurement, self.conn.execute(query))), [v for v, _ in self.select(Verdict, None, None)]

    def tally(self, record: type[Record], columns: Sequence[str]) -> Counter[tuple[Any, ...]]:
        names = "".join(f"{c}, " for c in columns)
        grouped = f" GROUP BY {names[:-2]}" if columns else ""
        rows = self.conn.execute(f"SELECT {names}count(*) FROM {record.table}{grouped}")
        return Counter({tuple(row[:-1]): row[-1] for row in rows if all(isinstance(value, str) for value in row[:-1])})

    def select(self, record: type[R], kernel: str | None, target: str | None, plan: str | None = None) -> Iterator[tuple[R, int]]:
        where = {n: v for n, v in (("kernel", kernel), ("target", target), ("plan", plan)) if v is not None and n in record.types}
        clause = " WHERE " + " AND ".join(f"{n} = :{n}" for n in where) if where else ""
        return self._records(record, self.conn.execute(f"SELECT * FROM {record.table}{clause}", where))

    def has(self, record: Record) -> bool:
        return self.conn.execute(f"SELECT 1 FROM {record.table} WHERE id = ?", (record.id,)).fetchone() is not None

    def family(self, structure: str) -> Iterator[KernelRecord]:
        rows = self.conn.execute("SELECT * FROM kernels WHERE structure = ? LIMIT ?", (structure, MOST_OF_A_FAMILY))
        return (k for k, _ in self._records(KernelRecord, rows))

    def targets_of(self, kernel: str) -> list[str]:
        return [t for t, in self.conn.execute(SELECT_TARGETS, (kernel,)) if isinstance(t, str)]

    def _records(self, record: type[R], rows: Iterable[sqlite3.Row]) -> Iterator[tuple[R, int]]:
        for row in rows:
            content = admit(partial(self._ranked, record, row), self.name, f"{record.table}:{row[0]!s:.40}", self.report)
            if content is not None:
                yield content

    def _ranked(self, record: type[R], row: sqlite3.Row) -> tuple[R, int]:
        """The record of a row and its rank. Raises RecordError, or IndexError where a column is missing."""
        layer = row["layer"]
        if not isinstance(layer, int) or not OWN <= layer <= SHIPPED:
            raise RecordError(f"its layer should be 0, 1 or 2, found {layer!r:.40}")
        content = record.from_row(row)  # type: ignore[arg-type]  # a Row is a mapping in all but name
        if self.rank != OWN:
            content.check_id(row["id"])
        elif isinstance(row["id"], str):
            content.__dict__["id"] = row["id"]      # svod wrote this row; to compute the digest would double the time of reading
        return content, max(self.rank, layer)

    def version(self) -> int:
        return int(self.conn.execute("PRAGMA data_version").fetchone()[0])

    def close(self) -> None:
        self.conn.close()


KERNEL = re.compile(r'"kernel"\s*:\s*"([^"\\]*)"')
STRUCTURE = re.compile(r'"structure"\s*:\s*"([^"\\]*)"')


class JsonlLayer:
    """A .jsonl file. Its lines are read when records of a target that its header names are first needed, and a line is parsed only when its
    kernel is looked up, so that a look-up in a file of 20,000 records parses only the few that it needs."""

    def __init__(self, path: Path, rank: int, report: list[Skipped]) -> None:
        self.path, self.name, self.rank, self.report = path, str(path), rank, report
        self._lines: dict[str | None, dict[str, list[tuple[int, str]]]] = {}        # target → kernel ("" if the line names none) → lines
        self._parsed: dict[int, Record | None] = {}
        self._families: dict[str, list[str]] | None = None      # structure → keys of its kernels; None: not read yet

    def _lines_of(self, target: str | None) -> dict[str, list[tuple[int, str]]]:
        target = None if None in self._lines else target    # None: the lines of all targets were read before
        if target not in self._lines:
            lines: dict[str, list[tuple[int, str]]] = {}
            try:
                for number, line in open_lines(self.path, target):
                    named = KERNEL.search(line)
                    lines.setdefault(named[1] if named else "", []).append((number, line))
            except (OSError, DatabaseError) as e:
                problem = Skipped(self.name, str(e))
                self.report.extend([problem] * (problem not in self.report))
            self._lines[target] = lines
        return self._lines[target]

    def _records(self, kernel: str | None, target: str | None, plan: str = "") -> Iterator[Record]:
        lines = self._lines_of(target)
        asked = lines.values() if kernel is None else [lines.get(kernel, []), lines.get("", [])]
        for number, line in (pair for part in asked for pair in part):
            if plan not in line:
                continue
            if number not in self._parsed:
                self._parsed[number] = admit(partial(parse_line, line), str(self.path), str(number), self.report)
            record = self._parsed[number]
            if record is not None:
                yield record

    def deciding(self, kernel: str, target: str) -> Deciding:
        measurements = [(m, rank) for m, rank in self.select(Measurement, kernel, target) if m.step == "confirm" or m.status == "wrong"]
        return measurements, [v for v, _ in self.select(Verdict, kernel, target)]

    def select(self, record: type[R], kernel: str | None, target: str | None, plan: str | None = None) -> Iterator[tuple[R, int]]:
        wanted = (("kernel", kernel), ("target", target), ("plan", plan))
        for r in self._records(kernel, target, plan if plan is not None and "plan" in record.types else ""):
            if isinstance(r, record) and all(value in (None, getattr(r, name, value)) for name, value in wanted):
                yield r, self.rank

    def all_deciding(self) -> Deciding:
        measurements = [(m, rank) for m, rank in self.select(Measurement, None, None) if m.step == "confirm" or m.status == "wrong"]
        return measurements, [v for v, _ in self.select(Verdict, None, None)]

    def tally(self, record: type[Record], columns: Sequence[str]) -> Counter[tuple[Any, ...]]:
        return Counter(tuple(getattr(r, c) for c in columns) for r, _ in self.select(record, None, None))

    def has(self, record: Record) -> bool:
        place = (getattr(record, name, None) for name in ("kernel", "target"))
        return any(r.id == record.id for r, _ in self.select(type(record), *place))

    def family(self, structure: str) -> Iterator[KernelRecord]:
        if self._families is None:
            self._families = {}
            for kernel, lines in self._lines_of(None).items():
                for named in (STRUCTURE.search(line) for _, line in lines):
                    if named:
                        self._families.setdefault(named[1], []).append(kernel)
        for kernel in dict.fromkeys(self._families.get(structure, [])[:MOST_OF_A_FAMILY]):
            yield from (k for k, _ in self.select(KernelRecord, kernel, None) if k.structure == structure)

    def targets_of(self, kernel: str) -> set[str]:
        return {m.target for m, _ in self.select(Measurement, kernel, None) if m.step == "confirm"}

    def version(self) -> int:
        return 0

    def close(self) -> None:
        self._lines.clear()
        self._parsed.clear()


def open_layers(paths: Iterable[Source], rank: int, report: list[Skipped]) -> list[Layer]:
    """The layers at these paths, for reading. Files that do not exist or cannot be read are added to `report`."""
    opened = (_open_layer(path, rank, report) for path in paths)
    return [layer for layer in opened if layer is not None]


def _open_layer(path: Source, rank: int, report: list[Skipped]) -> Layer | None:
    """The layer at `path`; None where nothing can be read."""
    if isinstance(path, Remote):
        copy, problem = path.fetched()
        report.extend([Skipped(str(path), problem)] if problem else [])
        return None if copy is None else JsonlLayer(copy, rank, report)
    if not os.path.exists(path):
        report.append(Skipped(str(path), "there is no such file; SVOD_TUNE_DB names it"))
        return None
    if not os.path.isfile(path):        # reading a pipe could wait without end
        report.append(Skipped(str(path), "this is no file, nor a directory that can be read; SVOD_TUNE_DB names it"))
        return None
    try:
        if path.suffix == ".jsonl":
            return JsonlLayer(path, rank, report)
        conn = files.open_for_reading(path)
    except files.CANNOT_OPEN as e:
        report.append(Skipped(str(path), files.complaint(path, e)))
        return None
    return None if conn is None else SqliteLayer(conn, str(path), rank, report)
