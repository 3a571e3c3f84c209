"""svod-db shows the tuning database, moves records between machines and retracts them; see `commands.py`."""
from __future__ import annotations

from typing import NoReturn

from svod.cli import run_command


def main() -> NoReturn:
    """The console script."""
    run_command("svod-db", "svod.cli.db.commands")
