"""svod-bench: ceilings of the machine, suites against peers, comparisons, reports. The commands are in `commands.py`."""
from __future__ import annotations

from typing import NoReturn

from svod.cli import run_command

# Threads of OpenBLAS spin for 2^26 cycles after a product, some 25 ms: on a core that the next contestant needs. 2^20 are 0.4 ms, longer
# than the gap between two runs and shorter than the pause between contestants.
OPENBLAS_SPIN = "20"


def main() -> NoReturn:
    """The console script."""
    run_command("svod-bench", "svod.cli.bench.commands", defaults={"OPENBLAS_THREAD_TIMEOUT": OPENBLAS_SPIN})
