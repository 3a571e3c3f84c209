"""svod-bench measures the machine's ceilings, times suites against peers, compares runs and makes reports; see `commands.py`."""
from __future__ import annotations

from typing import NoReturn

from svod.cli import run_command

# By default the threads of OpenBLAS spin for 2^26 cycles after a product: some 25 ms on cores that the next contestant needs. 2^20 cycles
# are 0.4 ms, longer than the gap between two runs of a contestant and shorter than the pause between contestants.
OPENBLAS_SPIN = "20"


def main() -> NoReturn:
    """The console script."""
    run_command("svod-bench", "svod.cli.bench.commands", defaults={"OPENBLAS_THREAD_TIMEOUT": OPENBLAS_SPIN})
