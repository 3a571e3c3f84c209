"""Files and databases that a command is asked to write: whether they can be is found out before the work, not after it."""
from __future__ import annotations

import os
from pathlib import Path

from svod.errors import ConfigError, DatabaseError


def check_output(option: str, path: str | os.PathLike[str] | None) -> None:
    """Raise ConfigError where the file that `option` names could not be written, as far as that shows without writing. None, and "-" for
    the standard output, are fine."""
    if path is None or os.fspath(path) == "-":
        return
    file = Path(path).absolute()
    if file.is_dir():
        raise ConfigError(f"{option} {path}: this is a directory; name a file in it")
    if not file.parent.is_dir():
        raise ConfigError(f"{option} {path}: the directory {file.parent} does not exist; make it first")
    if file.exists() and not os.access(file, os.W_OK):
        raise ConfigError(f"{option} {path}: the file cannot be written")
    if (file.is_file() or not file.exists()) and not os.access(file.resolve().parent, os.W_OK | os.X_OK):
        raise ConfigError(f"{option} {path}: the directory {file.resolve().parent} cannot be written")


def check_database(spec: str | None) -> None:
    """Raise DatabaseError where --db names no database and none can be made there. One that is there and cannot be written is not refused:
    it can be read."""
    from svod.tune.db import layers

    problem = layers.name_problem(layers.resolve(spec)) if spec is not None else None
    if problem is not None:
        raise DatabaseError(f"--db {spec}: {problem}")
