"""How long a machine takes after a pause until code runs as fast as it will: time of a run over the time since the pause ended.

    python experiments/warm_up.py                                   # a sum and a product: memory and arithmetic
    python experiments/warm_up.py --kernels gemv_4096 --pauses 12

Each kernel runs by the heuristic's chain and by the hand-written one of `chains/`, back to back after each pause, in random order.
"""
from __future__ import annotations

import argparse
import random
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from heuristics import kernels_of

# isort: split
from svod.bench.quantities import seconds
from svod.bench.suites import select_cases
from svod.compile.host import host_target
from svod.core.scheduler import Scheduler
from svod.core.serialize import ast_to_data
from svod.core.sketch import heuristic
from svod.tune.work import Context, Setup, compile_candidate

SINCE = (0.0, 2e-3, 4e-3, 8e-3, 12e-3, 16e-3, 20e-3, 30e-3)        # seconds: each column is from here to the next
UNTIL = 40e-3


def contestants(pattern: str) -> Iterator[tuple[str, Callable[[int], None]]]:
    """(kernel and who wrote its chain, run it that often)."""
    sys.path.append(str(Path(__file__).resolve().parent / "chains"))
    from run_chains import CHAINS
    target = host_target()
    for case in select_cases("core", pattern):
        name, kernel = next(kernels_of(case))
        context = Context(Setup(ast_to_data(kernel.ast), target))
        chosen = heuristic(Scheduler(kernel, target)).applied_opts
        for who, chain in (("heuristic", [o.to_json() for o in chosen]), ("hand-written", CHAINS[case.name](case, target))):
            runner = context.load(compile_candidate((chain, True), context))
            yield f"{name}, {who}", runner.contestant(1.0).run
        context.ready_for_timing()


def after_a_pause(run: Callable[[int], None], pause: float) -> Iterator[tuple[int, float]]:
    """(column, seconds) of runs back to back, from the end of a pause on."""
    time.sleep(pause)
    begin = time.perf_counter()
    start = begin
    while start - begin < UNTIL:
        run(1)
        end = time.perf_counter()
        yield max(i for i, s in enumerate(SINCE) if s <= start - begin), end - start
        start = end


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--kernels", default="sum_16m,gemm_512", metavar="PATTERNS", help="cases of the core suite (default: %(default)s)")
    parser.add_argument("--pauses", default="1,3,12,30", help="milliseconds, joined by commas (default: %(default)s)")
    parser.add_argument("--rounds", type=int, default=30, help="pauses of each length before each chain (default: %(default)s)")
    args = parser.parse_args(arguments)
    runs = dict(contestants(args.kernels))
    pauses = [float(p) * 1e-3 for p in args.pauses.split(",")]
    seen: dict[Any, list[list[float]]] = {(name, p): [[] for _ in SINCE] for name in runs for p in pauses}
    for _ in range(args.rounds):
        for name, pause in random.sample(list(seen), len(seen)):
            for column, taken in after_a_pause(runs[name], pause):
                seen[name, pause][column].append(taken)
    print("| kernel | pause | " + " | ".join(f"{s * 1e3:g} ms" for s in SINCE) + " |")
    print("| --- | ---: |" + " ---: |" * len(SINCE))
    for (name, pause), columns in seen.items():
        cells = (seconds(statistics.median(c)) if c else "–" for c in columns)
        print(f"| {name} | {pause * 1e3:g} ms | " + " | ".join(cells) + " |")


if __name__ == "__main__":
    main()
