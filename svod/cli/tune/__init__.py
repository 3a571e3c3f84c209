"""svod-tune: run a script, capture its kernels, tune them, verify, remember, report. The command is in `command.py`."""
from __future__ import annotations

from typing import NoReturn

from svod.cli import run_command


def main() -> NoReturn:
    """The console script."""
    run_command("svod-tune", "svod.cli.tune.command")
