"""The programs of this installation."""
from __future__ import annotations

import os
import shutil
from pathlib import Path

from svod.system.process.directories import working_directory
from svod.system.process.program import environment_folder


def program(name: str) -> str:
    """The command that calls program `name` from here: its name where PATH finds it, else its path in this environment."""
    beside = Path(environment_folder()) / name
    on_path = shutil.which(name)
    if on_path is not None and Path(on_path).parent.resolve() == beside.parent.resolve():
        return name
    try:
        return str(beside.relative_to(working_directory() or Path(os.sep)))
    except ValueError:
        return str(beside)
