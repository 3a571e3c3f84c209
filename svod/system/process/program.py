"""The program that this process runs: its name and arguments, its Python interpreter, and svod's own files, which may be in a zip."""
from __future__ import annotations

import getpass
import importlib.util
import os
import socket
import sys
from importlib import resources
from pathlib import Path


def name() -> str:
    """The name of the program without its folder; "python" if it has none, as in an embedded Python."""
    return os.path.basename((command() or [""])[0]) or "python"


def arguments() -> list[str]:
    """The arguments of the program, without its name."""
    return command()[1:]


def command() -> list[str]:
    """The name of the program as it was given, and its arguments."""
    return list(getattr(sys, "argv", None) or [])


def become(words: list[str]) -> None:
    """Set the program's name and arguments for the rest of this process."""
    sys.argv = words


def why_no_python() -> str:
    """The reason why this process cannot start a second Python; "" if it can. In a frozen program, or one that embeds Python,
    `sys.executable` is the program itself: starting it would run the program again."""
    if getattr(sys, "frozen", False):
        return "this program is frozen: sys.executable is the program itself, no Python"
    if not sys.executable:
        return "sys.executable is empty (an embedded Python?)"
    if not getattr(sys, "orig_argv", True):
        return f"this Python is embedded in a program, so that sys.executable ({sys.executable}) may be that"
    if not os.access(python(), os.X_OK):
        return f"{python()}, which sys.executable names, cannot be run"
    return ""


def python() -> str:
    """The file of the Python that runs this process: `sys.executable`, unless the program has set that to another file than the running
    one."""
    named = sys.executable or ""
    try:
        running = os.readlink("/proc/self/exe")
    except OSError:             # no /proc
        return named
    if not os.access(running, os.X_OK) or (os.path.exists(named) and os.path.samefile(named, running)):
        return named            # `named` may link to the running file, as in a virtual environment; or an update has replaced that file
    return running


def package_roots() -> list[str]:
    """The directories from which this process imports svod, numpy and llvmlite, which a child needs on its sys.path. The directory of the
    user's script is left out: a `queue.py` beside a script must not replace a module of the standard library."""
    roots: list[str] = []
    for name in ("svod", "numpy", "llvmlite"):
        spec = importlib.util.find_spec(name)
        for location in (spec.submodule_search_locations or ()) if spec else ():
            root = str(Path(location).resolve().parent)
            if root not in roots:
                roots.append(root)
    return roots


def frozen_file() -> str:
    """The file of a frozen program, which holds its modules; "" for any other program."""
    return sys.executable if getattr(sys, "frozen", False) else ""


def environment_folder() -> str:
    """The folder of the programs installed in this Python environment."""
    return os.path.dirname(sys.executable or "")


def package_text(package: str, file: str) -> str:
    """The text of a file of a package of svod, which may be in a zip."""
    return resources.files(package).joinpath(file).read_text(encoding="utf-8")


def user_at_host() -> str:
    """The user and the host as user@host; the user's number if there is no name."""
    try:
        user = getpass.getuser()
    except (KeyError, OSError, ImportError):
        user = str(os.getuid()) if hasattr(os, "getuid") else "user"
    return f"{user}@{socket.gethostname()}"
