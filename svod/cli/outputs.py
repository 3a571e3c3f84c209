"""What a command is asked for, looked at before the work and not after it: files and databases to write, numbers."""
from __future__ import annotations

import math
import os
from pathlib import Path
from typing import Any

import click

from svod.errors import ConfigError, DatabaseError
from svod.tune.db import layers
from svod.tune.db.schema import SHIPPED


class Finite(click.FloatRange):
    """A number in a range; nan, which is in every range for click, is in none."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        found: float = super().convert(value, param, ctx)
        if math.isnan(found):
            self.fail(f"{value!r} is not a number.", param, ctx)
        return found


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


def check_is_there(plan: layers.Plan) -> None:
    """Raise DatabaseError where a spec names databases and none of them exists; what ships with svod is none of them."""
    found = [p for p in (plan.write, *(p for p, rank in plan.read if rank != SHIPPED)) if p is not None]
    if found and not any(p.exists() for p in found):
        raise DatabaseError(f"there is no database at {found[0]}; svod-tune SCRIPT --db {found[0]} makes one")


def check_database(spec: str | None) -> None:
    """Raise DatabaseError where --db names no database and none can be made there. One that is there and cannot be written is not refused:
    it can be read."""
    problem = layers.name_problem(layers.resolve(spec)) if spec is not None else None
    if problem is not None:
        raise DatabaseError(f"--db {spec}: {problem}")
