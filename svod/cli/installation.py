"""The commands by which users call the programs of this installation, for messages."""
from __future__ import annotations

import os
import shlex
import shutil
from pathlib import Path

from svod.system.process.directories import working_directory
from svod.system.process.program import environment_folder, python


def program(name: str) -> str:
    """The command that calls svod's program `name`: its name if PATH finds it, else its path in this environment. If the programs are not
    in the folder of Python's executable, as with a checkout, the command is like `python -m svod tune`."""
    if (Path(environment_folder()) / name).exists():
        return shlex.quote(_called(name))
    return f"{interpreter()} -m svod {name.removeprefix('svod-')}"


def interpreter() -> str:
    """The command that calls this environment's Python; some environments have only `python3`, and no `python`."""
    names = ("python", os.path.basename(python()))
    return shlex.quote(_called(next((n for n in names if (Path(environment_folder()) / n).exists()), "python")))


def _called(name: str) -> str:
    """The name of a file in the folder of Python's executable, if PATH finds that file; else its path."""
    beside = Path(environment_folder()) / name
    on_path = shutil.which(name)
    if on_path is not None and Path(on_path).parent.resolve() == beside.parent.resolve():
        return name
    try:
        return str(beside.relative_to(working_directory() or Path(os.sep)))
    except ValueError:
        return str(beside)
