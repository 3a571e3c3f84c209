"""Compiled objects that are shipped with a model: `svod-db bake` and `svod-db list --objects`."""
from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from svod.cli.db.scripts import run_script
from svod.cli.tune.options import TuneOptions
from svod.compile.plan.object_cache import BAKED, stored_builds
from svod.config import NONE, PrepareConfig
from svod.core.machine.target import threads_of
from svod.errors import DatabaseError
from svod.system.files import write_text
from svod.system.process.directories import is_writable
from svod.system.quantities import count, size
from svod.tune.resolved import resolve

MARK = "Compiled objects that svod-db bake has made. svod-db list --objects with this directory tells which machines they fit.\n"


class ObjectRow(NamedTuple):
    """The objects of one build in a directory. `unfit`: the differences from this machine and svod, () where the objects fit."""

    directory: str
    target: str
    compiler: str
    objects: int
    bytes: int
    unfit: tuple[str, ...]


def object_rows(directories: Sequence[Path]) -> list[ObjectRow]:
    """A row for each build with objects in the directories, those that fit this process first."""
    here = resolve(PrepareConfig.from_env(db=NONE, beam=None)).compiler.build
    rows = [ObjectRow(str(d), build.target, build.compiler, *stored, tuple(build.differences(here)))
            for d in directories for build, stored in stored_builds(d).items()]
    return sorted(rows, key=lambda r: (r.directory, len(r.unfit), r.target))


def described_objects(rows: Sequence[ObjectRow]) -> list[str]:
    """A line for each row: the number of objects, the target's key, and whether they fit here."""
    return [f"{r.directory}: {count(r.objects, 'object')}, {size(r.bytes)}, for {r.target}" + ", any threads" * (not threads_of(r.target))
            + f", {r.compiler}: {'does not fit here: ' + '; '.join(r.unfit) if r.unfit else 'fits here'}" for r in rows]


def bake(options: TuneOptions, directory: Path, **variables: str) -> str:
    """Run a program with `directory` as its object cache, and mark it. Returns the program's failure in words, or "". Raises DatabaseError
    where the directory cannot be filled, or was not."""
    directory = directory.absolute()
    if not is_writable(directory):
        raise DatabaseError(f"objects cannot be kept in {directory}: name a directory that can be written")
    failure = run_script(options, ["bake", "-o", str(directory)], shown=True, SVOD_OBJECT_CACHE=str(directory), **variables)
    if not stored_builds(directory):
        raise DatabaseError(f"{options.subject} compiled no kernel" + (f"; {failure}" if failure else ""))
    write_text(directory / BAKED, MARK)
    return failure
