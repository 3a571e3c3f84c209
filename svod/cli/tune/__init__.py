"""svod-tune runs a script, captures its kernels, tunes and verifies them, stores the winners and reports; see `command.py`."""
from __future__ import annotations

from typing import NoReturn

from svod.cli import run_command


def main() -> NoReturn:
    """The console script."""
    run_command("svod-tune", "svod.cli.tune.command")
