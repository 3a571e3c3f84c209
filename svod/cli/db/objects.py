"""Compiled objects that are shipped with a model: `svod-db bake` and `svod-db list --objects`."""
from __future__ import annotations

import os
import shlex
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from svod.cli.db.scripts import run_script
from svod.cli.tune.options import TuneOptions
from svod.compile.plan.object_cache import BAKED, make_directory, nearest_first, object_files, stored_builds
from svod.config import NONE, PrepareConfig
from svod.core.machine.target import threads_of
from svod.errors import DatabaseError
from svod.system.files import write_text
from svod.system.process.directories import is_writable
from svod.system.quantities import count, size
from svod.tune.resolved import resolve

MARK = "Compiled objects that svod-db bake has made. svod-db list --objects with this directory tells which machines they fit.\n"


class ObjectRow(NamedTuple):
    """The objects of one build in a directory. `unfit`: why they are not used here, such as differences from this machine and svod; ()
    where they fit."""

    directory: str
    target: str
    compiler: str
    objects: int
    bytes: int
    unfit: tuple[str, ...]


def object_rows(directories: Sequence[Path]) -> list[ObjectRow]:
    """A row for each build with objects in the directories, those that fit this process first, then the nearest ones."""
    here = resolve(PrepareConfig.from_env(db=NONE, beam=None)).compiler.build
    rows = [ObjectRow(str(d), build.target, build.compiler, stored.objects, stored.bytes,
                      (*build.differences(here), *([f"not loaded, as {stored.writers}"] if stored.writers else [])))
            for d in directories for build, stored in nearest_first(stored_builds(d), here)]
    return sorted(rows, key=lambda r: (r.directory, bool(r.unfit)))


def problems_of(directories: Sequence[Path], rows: Sequence[ObjectRow]) -> list[str]:
    """A line for each directory that has no objects, or damaged ones. Raises DatabaseError for one that cannot be read."""
    problems = []
    for directory in directories:
        try:
            os.listdir(directory)
        except OSError as e:
            raise DatabaseError(f"there are no objects in {directory}: {e.strerror}") from e
        files = len(object_files(directory))
        damaged = files - sum(r.objects for r in rows if r.directory == str(directory))
        if damaged:
            problems.append(f"{directory}: {damaged} of {count(files, 'object')} {'are' if damaged != 1 else 'is'} damaged and not used")
        elif not files:
            problems.append(f"{directory} has no objects; svod-db bake -o {shlex.quote(str(directory))} SCRIPT makes some")
    return problems


def described_objects(rows: Sequence[ObjectRow]) -> list[str]:
    """A line for each row: the number of objects, the target's key, and whether they fit here."""
    return [f"{r.directory}: {count(r.objects, 'object')}, {size(r.bytes)}, for {_target_of(r)}: "
            + ('does not fit here: ' + '; '.join(r.unfit) if r.unfit else 'fits here') for r in rows]


def _target_of(row: ObjectRow) -> str:
    """Describe what the objects of a row are for; schedules are for any machine."""
    if not row.target:
        return "any target"
    return row.target + ", any threads" * (not threads_of(row.target)) + f", {row.compiler}"


class Baked(NamedTuple):
    """The objects that a program has used, and its failure in words, or ""."""

    made: int
    known: int      # objects that were there before
    failure: str


def bake(options: TuneOptions, directory: Path, **variables: str) -> Baked:
    """Run a program with `directory` as its object cache, and mark it. Raises DatabaseError where the directory cannot be filled, or the
    program has used none of it."""
    directory = directory.absolute()
    if not is_writable(directory):
        raise DatabaseError(f"objects cannot be kept in {directory}: name a directory that can be written")
    make_directory(directory)       # a directory that is missing would be warned of
    before = _last_uses(directory)
    failure = run_script(options, ["bake", "-o", str(directory)], shown=True, SVOD_OBJECT_CACHE=str(directory), **variables)
    used = [path for path, last in _last_uses(directory).items() if before.get(path) != last]
    if not used:
        with suppress(OSError):         # it has had objects before
            directory.rmdir()
        raise DatabaseError(f"{options.subject} compiled no kernel" + (f"; {failure}" if failure else ""))
    write_text(directory / BAKED, MARK)
    known = sum(path in before for path in used)
    return Baked(len(used) - known, known, failure)


def _last_uses(directory: Path) -> dict[Path, int]:
    """The times at which objects were last written or read, in ns."""
    found: dict[Path, int] = {}
    for path in object_files(directory):
        with suppress(FileNotFoundError):       # another process has removed it since
            found[path] = path.stat().st_mtime_ns
    return found
