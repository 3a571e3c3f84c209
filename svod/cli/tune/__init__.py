"""svod-tune: run a script, capture its kernels, tune them, verify, remember, report. The command is in `tune_command.py`."""
from __future__ import annotations

from typing import NoReturn

from svod.cli import run_command


def main() -> NoReturn:
    """The console script."""
    run_command("svod-tune", "svod.cli.tune.command")


if __name__ == "__main__":
    main()
