"""Checks of a command's options before its work begins: output files, databases, numbers."""
from __future__ import annotations

import math
import os
import re
from pathlib import Path
from typing import Any

import click

from svod.cli.installation import program
from svod.errors import ConfigError, DatabaseError
from svod.tune.db import layers

SQLITE_HEADER = b"SQLite format 3\0"
FORMAT = re.compile(rb'"format"\s*:\s*"([^"]*)"')     # the format that the first line of svod's files names
HEADER_BYTES = 4096                                   # bytes of a file that are searched for its format


class Finite(click.FloatRange):
    """A number in a range. It refuses nan, which click accepts in every range."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        number: float = super().convert(value, param, ctx)
        if math.isnan(number):
            self.fail(f"{value!r} is not a number.", param, ctx)
        return number


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
    if (file.is_file() or not file.exists()) and not os.access(file.resolve().parent, os.W_OK | os.X_OK):
        raise ConfigError(f"{option} {path}: the directory {file.resolve().parent} cannot be written")
    if any(r is not None and file.exists() and os.path.exists(r) and file.samefile(r) for r in read):
        raise ConfigError(f"{option} {path}: the command reads this file; name another one to write")
    start = _beginning(file)
    if start.startswith(SQLITE_HEADER):
        raise ConfigError(f"{option} {path}: this is an SQLite database, which would be lost; name another file")
    found = FORMAT.search(start)
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
        raise DatabaseError(f"there is no database at {files[0]}; {program('svod-tune')} SCRIPT --db {files[0]} makes one")


def check_database(spec: str | None) -> None:
    """Raise DatabaseError if the file that --db names is no database and none can be created there. An existing database that cannot be
    written is accepted, as it can be read."""
    problem = layers.name_problem(layers.resolve(spec)) if spec is not None else None
    if problem is not None:
        raise DatabaseError(f"--db {spec}: {problem}")
