"""svod-db: look at the tuning database, move records between machines, retract them. The commands are in `commands.py`."""
from __future__ import annotations

from typing import NoReturn

from svod.cli import run_command


def main() -> NoReturn:
    """The console script."""
    run_command("svod-db", "svod.cli.db.commands")
