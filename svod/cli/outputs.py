"""Checks of a command's options before its work begins: output files, databases, numbers."""
from __future__ import annotations

import contextlib
import math
import os
import re
import shlex
from pathlib import Path
from typing import Any

import click

from svod.cli.installation import program
from svod.errors import ConfigError, DatabaseError
from svod.system.process.directories import takes_files
from svod.system.quantities import accepted_numbers, kind_of_number
from svod.tune.db import layers

SQLITE_HEADER = b"SQLite format 3\0"
FORMAT_FIELD = re.compile(rb'"format"\s*:\s*"([^"]*)"')    # the format that the first line of svod's files names
HEADER_BYTES = 4096                                   # bytes of a file that are searched for its format


class Number(click.FloatRange):
    """A finite number of a unit, such as "seconds", in a range; without a unit a share. The error for any other value gives the range."""

    def __init__(self, unit: str, **limits: Any) -> None:
        super().__init__(**limits)
        self.name, self.kind = unit or "share", kind_of_number(unit)

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        with contextlib.suppress(click.BadParameter):
            number: float = super().convert(value, param, ctx)
            if math.isfinite(number):
                return number
        self.fail(f"{value!r} is not usable; accepted: {_accepted(self.kind, self)}", param, ctx)


class CountType(click.IntRange):
    """An integer in a range. The error for any other value gives the range, and `hint`."""

    def __init__(self, hint: str = "", **limits: Any) -> None:
        super().__init__(**limits)
        self.hint = hint

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
        with contextlib.suppress(click.BadParameter):
            number: int = super().convert(value, param, ctx)
            return number
        self.fail(f"{value!r} is not usable; accepted: {_accepted('an integer', self)}{self.hint and '; '}{self.hint}", param, ctx)


def _accepted(kind: str, range: Number | CountType) -> str:
    assert range.min is not None, "every range has a lower limit"
    return accepted_numbers(kind, range.min, range.max, range.min_open)


def check_output(option: str, path: str | os.PathLike[str] | None, *read: str | os.PathLike[str] | None, stdout: bool = False,
                 format: str | None = None) -> None:
    """Raise ConfigError if the file `path`, given by `option`, cannot be written, as far as that shows without writing, or if it would
    replace a database or one of the files `read`, which the command reads. `format`: an existing file may only be replaced if it is empty
    or has this format of svod's; None: any file. None as `path` is valid, and with `stdout` also "-"."""
    if path is None or (stdout and os.fspath(path) == "-"):
        return
    if os.fspath(path) == "-":
        raise ConfigError(f"{option} -: this goes to a file, not to the standard output; name one")
    if os.fspath(path).startswith("--"):
        raise ConfigError(f"{option} {path}: {path} is an option; name a file, or ./{path} if that is its name")
    file = Path(path).absolute()
    if file.is_dir():
        raise ConfigError(f"{option} {path}: this is a directory; name a file in it")
    if not file.parent.is_dir():
        raise ConfigError(f"{option} {path}: the directory {file.parent} does not exist; make it first")
    if file.exists() and not os.access(file, os.W_OK):
        raise ConfigError(f"{option} {path}: the file cannot be written")
    if (file.is_file() or not file.exists()) and not takes_files(file.resolve().parent):
        raise ConfigError(f"{option} {path}: the directory {file.resolve().parent} cannot be written")
    if any(r is not None and file.exists() and os.path.exists(r) and file.samefile(r) for r in read):
        raise ConfigError(f"{option} {path}: the command reads this file; name another one to write")
    start = _beginning(file)
    if start.startswith(SQLITE_HEADER):
        raise ConfigError(f"{option} {path}: this is an SQLite database, which would be lost; name another file")
    found = FORMAT_FIELD.search(start)
    if format is not None and start and (found is None or found[1] != format.encode()):
        raise ConfigError(f"{option} {path}: this file was not written by {option}, and would be lost; name another one, or remove it "
                          "first")


def _beginning(file: Path) -> bytes:
    """The first bytes of a file; b"" if it is no regular file or cannot be read."""
    if not file.is_file() or not os.access(file, os.R_OK):
        return b""
    with open(file, "rb") as opened:
        return opened.read(HEADER_BYTES)


def check_is_there(plan: layers.DatabasePaths) -> None:
    """Raise DatabaseError if `plan` names databases but none of them exists. Records that ship with svod do not count."""
    files = [p for p in (plan.write, *plan.read) if p is not None]
    if files and not any(p.exists() for p in files):
        raise DatabaseError(f"there is no database at {files[0]}; {how_to_fill(plan)}")


def how_to_fill(plan: layers.DatabasePaths) -> str:
    """The advice for a database without kernels: the command that finds some."""
    named = "" if plan.write is None else f" --db {shlex.quote(str(plan.write))}"
    return f"tune something: {program('svod-tune')} SCRIPT --beam 8{named}"


def check_database(spec: str | None) -> None:
    """Raise DatabaseError if the file that --db names is no database and none can be created there. An existing database that cannot be
    written is accepted, as it can be read."""
    problem = layers.name_problem(layers.resolve(spec)) if spec is not None else None
    if problem is not None:
        raise DatabaseError(f"--db {spec}: {problem}")
