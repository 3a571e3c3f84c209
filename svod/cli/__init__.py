"""The command lines. Each console script is a small `main` here that calls `run_command` with the module of its real commands.

`run_command` is the guard they share: a missing extra is answered with the line to paste, bad input with one line and exit status 2,
Ctrl-C with 130, a closed pipe with silence; none of them with a traceback.
"""
from __future__ import annotations

import importlib
import os
import shlex
import shutil
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NoReturn

from svod.errors import SvodError

EXIT_USAGE, EXIT_INTERRUPTED = 2, 130
INSTALL_LINE = f"{shlex.quote(sys.executable)} -m pip install 'svod[tune]'"   # the pip that belongs to this Python, whichever is in PATH


def missing_modules(needs: tuple[str, ...]) -> list[str]:
    """Those of `needs` that are not installed. Imports nothing."""
    return [name for name in needs if find_spec(name) is None]


def one_line(error: BaseException) -> str:
    """An error's message on one line."""
    return " ".join(str(error).split()) or type(error).__name__


def run_command(program: str, module: str, needs: tuple[str, ...] = ("click", "rich")) -> NoReturn:
    """Import `module`, call its click command `cli` and exit the process.

    `program` is the name in messages, `needs` what must be installed beyond the base."""
    missing = missing_modules(needs)
    if missing:
        print(f"{program} needs {' and '.join(missing)}, which the base install does not bring. Paste this:\n\n    {INSTALL_LINE}\n",
              file=sys.stderr)
        sys.exit(EXIT_USAGE)
    try:
        command: Any = importlib.import_module(module).cli
        command.main(prog_name=program, standalone_mode=True)  # click answers unknown options and missing arguments, with status 2
    except KeyboardInterrupt:
        print(f"{program}: interrupted", file=sys.stderr)
        sys.exit(EXIT_INTERRUPTED)
    except BrokenPipeError:
        # the reader has gone (`svod-db list | head`); Python must not flush into the closed pipe at exit
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(0)
    except (SvodError, OSError) as e:
        print(f"{program}: {one_line(e)}", file=sys.stderr)
        sys.exit(EXIT_USAGE)
    raise AssertionError("click ends the process")


def program(name: str) -> str:
    """How to call a program of this installation from here: by name where that finds it, else by its path in this environment."""
    beside = Path(sys.executable).parent / name
    found = shutil.which(name)
    if found is not None and Path(found).parent.resolve() == beside.parent.resolve():
        return name
    try:
        return str(beside.relative_to(Path.cwd()))
    except ValueError:
        return str(beside)
