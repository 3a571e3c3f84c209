"""What is installed here, and how to call it from here."""
from __future__ import annotations

import shlex
import shutil
import sys
from importlib.util import find_spec
from pathlib import Path

INSTALL_LINE = f"{shlex.quote(sys.executable)} -m pip install 'svod[tune]'"   # the pip that belongs to this Python, whichever is in PATH


def missing_modules(needs: tuple[str, ...]) -> list[str]:
    """Those of `needs` that are not installed. Imports nothing."""
    return [name for name in needs if find_spec(name) is None]


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
