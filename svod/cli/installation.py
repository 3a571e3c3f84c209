"""The programs of this installation."""
from __future__ import annotations

import shutil
import sys
from pathlib import Path


def program(name: str) -> str:
    """The command that calls program `name` from here: its name where PATH finds it, else its path in this environment."""
    beside = Path(sys.executable).parent / name
    on_path = shutil.which(name)
    if on_path is not None and Path(on_path).parent.resolve() == beside.parent.resolve():
        return name
    try:
        return str(beside.relative_to(Path.cwd()))
    except ValueError:
        return str(beside)
