"""The program that this process runs: its name and arguments, the Python that runs it, and svod's own files, which may be in a zip."""
from __future__ import annotations

import getpass
import os
import socket
import sys
from importlib import resources


def name() -> str:
    """The name of the program that people know this process by; "python" where none was given, as in an embedded Python."""
    return os.path.basename((command() or [""])[0]) or "python"


def arguments() -> list[str]:
    """The arguments of the program, without its name."""
    return command()[1:]


def command() -> list[str]:
    """The name of the program as it was given, and its arguments."""
    return list(getattr(sys, "argv", None) or [])


def become(words: list[str]) -> None:
    """Let the rest of this process see `words` as the program's name and arguments."""
    sys.argv = words


def why_no_python() -> str:
    """The reason why this process cannot start a second Python; "" where it can. A frozen program, and one that embeds Python, is named by
    `sys.executable` itself: starting that would run the program once more."""
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
    """The file of the Python that runs this process: `sys.executable`, unless the program has made that the name of another file than the
    one that runs."""
    named = sys.executable or ""
    try:
        running = os.readlink("/proc/self/exe")
    except OSError:             # no /proc
        return named
    if not os.access(running, os.X_OK) or (os.path.exists(named) and os.path.samefile(named, running)):
        return named            # In a virtual environment this may be a link. An update may have replaced the file that runs.
    return running


def frozen_file() -> str:
    """The file of a frozen program, which holds its modules; "" for any other program."""
    return sys.executable if getattr(sys, "frozen", False) else ""


def environment_folder() -> str:
    """The folder of this environment's programs."""
    return os.path.dirname(sys.executable or "")


def package_text(package: str, file: str) -> str:
    """The text of a file of a package of svod, which may be in a zip."""
    return resources.files(package).joinpath(file).read_text(encoding="utf-8")


def user_at_host() -> str:
    """user@host; the number of a user who has no name."""
    try:
        user = getpass.getuser()
    except (KeyError, OSError, ImportError):
        user = str(os.getuid()) if hasattr(os, "getuid") else "user"
    return f"{user}@{socket.gethostname()}"
