"""The programs of this installation."""
from __future__ import annotations

import os
import shlex
import shutil
from pathlib import Path

from svod.system.process.directories import working_directory
from svod.system.process.program import environment_folder, python


def program(name: str) -> str:
    """The command that calls program `name` of svod's from here: its name where PATH finds it, else its path in this environment;
    `python -m svod tune` where the programs do not lie beside the Python, as with a checkout."""
    if (Path(environment_folder()) / name).exists():
        return shlex.quote(_called(name))
    return f"{interpreter()} -m svod {name.removeprefix('svod-')}"


def interpreter() -> str:
    """The command that calls this environment's Python from here, which may be called python3 alone."""
    names = ("python", os.path.basename(python()))
    return shlex.quote(_called(next((n for n in names if (Path(environment_folder()) / n).exists()), "python")))


def _called(name: str) -> str:
    """The name of a file beside the Python where PATH finds it, else its path."""
    beside = Path(environment_folder()) / name
    on_path = shutil.which(name)
    if on_path is not None and Path(on_path).parent.resolve() == beside.parent.resolve():
        return name
    try:
        return str(beside.relative_to(working_directory() or Path(os.sep)))
    except ValueError:
        return str(beside)
