"""svod-bench: ceilings of the machine, suites against peers, comparisons, reports. The commands are in `bench_commands.py`."""
from __future__ import annotations

from typing import NoReturn

from svod.cli import run_command


def main() -> NoReturn:
    """The console script."""
    run_command("svod-bench", "svod.cli.bench_commands")


if __name__ == "__main__":
    main()
