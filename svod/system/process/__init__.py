"""Reads the things that a process inherits or is given by its parent. Nothing else of svod looks at these: a test over the source says so.

Each of these may be missing, in a form nobody expects, or changed while the process runs: a container's limits, `nohup`, a program that
embeds Python, a user without a home. The functions here answer with a fallback, or raise one error that says what is missing.
"""
from __future__ import annotations

import os


def current_directory() -> str | None:
    """The current directory; None where it was removed, or may not be seen."""
    try:
        return os.getcwd()
    except OSError:
        return None


STARTED_IN = current_directory()        # when svod was imported
