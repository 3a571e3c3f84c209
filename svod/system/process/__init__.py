"""Reads everything that a process inherits from its parent or its environment. No other code of svod does (a test checks the sources).

Each of these inputs may be missing, malformed, or change while the process runs: a container's limits, `nohup`, a program that embeds
Python, a user without a home. The functions return a fallback, or raise one error that names the missing input.
"""
from __future__ import annotations

import os


def current_directory() -> str | None:
    """The current directory; None if it was removed or is not accessible."""
    try:
        return os.getcwd()
    except OSError:
        return None


STARTED_IN = current_directory()        # the current directory when svod was imported, or None
