"""How to call a program of this installation."""
from __future__ import annotations

import shutil
import sys
from pathlib import Path


def program(name: str) -> str:
    """How to call a program of this installation from here: by name where that finds it, else by its path in this environment."""
    beside = Path(sys.executable).parent / name
    on_path = shutil.which(name)
    if on_path is not None and Path(on_path).parent.resolve() == beside.parent.resolve():
        return name
    try:
        return str(beside.relative_to(Path.cwd()))
    except ValueError:
        return str(beside)
