"""How many candidates a second a search gets through with 1 to 16 workers.

    python experiments/throughput.py                    # local workers
    python experiments/throughput.py --ray              # workers of an own Ray
    python experiments/throughput.py --real             # candidates are compiled and timed: 1 and 2 workers
    python experiments/throughput.py --suite core       # what a candidate of a real search costs on one core, kernel by kernel

A compilation sleeps for 50 ms and gives 100 kB, so that workers are not held up by cores that they lack. Proposals, lowering, the filter of
duplicates, messages and records are real; times come from a table. Efficiency: candidates per second and worker, over that of one worker.
It means something where the cores can lower as much: their time is in the last column, of the driver and of all workers, and before it the
efficiency at which this time fills all cores.

With --suite everything is real, on one worker and with kernels of one thread. Candidates are counted per second of processor time, of all
processes, which other programs of the machine change little.
"""
from __future__ import annotations

import argparse
import math
import resource
import statistics
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from heuristics import kernels_of

# isort: split
from svod.bench.suites.suites import select_cases
from svod.compile.cpu.host import host_target
from svod.config import BeamConfig, BenchConfig
from svod.core.kernel.kernel import Kernel
from svod.system.process.cores import usable_cores
from svod.tune.db import TuningDB
from svod.tune.measure.candidate import Candidate
from svod.tune.measure.measurer import Built, Failure
from svod.tune.measure.worker_measurer import WorkerMeasurer
from svod.tune.search.budget import ModelBudget
from svod.tune.search.events import RoundFinished
from svod.tune.search.strategies.strategy import FIRST_WIDTH
from svod.tune.session import KernelTask, TuneSession
from svod.tune.workers.jobs import WorkerConfig
from svod.tune.workers.start import make_executor

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))
from tests.tune.search_kernels import gemm  # noqa: E402
from tests.tune.told_measurer import ToldMeasurer  # noqa: E402

COMPILE_SECONDS = 0.05
OBJECT_BYTES = 100_000
JOBS = "tests.tune.told_jobs"
WORKERS = WorkerConfig(preload=(*WorkerConfig.preload, JOBS), job_modules=(JOBS,), paths=(str(ROOT),))
BENCH = BenchConfig(seconds=1.0)


class Trace:
    """Counts what is built."""

    built = 0

    def __call__(self, what: str, digests: Sequence[str]) -> None:
        if what == "build":
            self.built += len(digests)

    def again(self, items: int) -> None:
        raise RuntimeError("a worker was lost: the figures would be wrong")


class Candidates(ModelBudget):
    """Ends with the round in which so many candidates have been built."""

    def __init__(self, candidates: int, trace: Trace) -> None:
        super().__init__(math.inf, math.inf)
        self.candidates, self.trace = candidates, trace

    def next(self, kernels: Sequence[Any]) -> Any:
        return None if self.trace.built >= self.candidates else super().next(kernels)


class SlowCompiler(ToldMeasurer):
    """Times come from the table, and machine code from a compiler that sleeps."""

    compile_job = "compile_slowly"

    def build(self, candidates: Sequence[Candidate], *, passes: bool, deadline: float) -> list[Built | Failure]:
        self.note("build", candidates)
        return WorkerMeasurer.build(self, candidates, passes=passes, deadline=10.0)

    def expect(self, candidate: Candidate, deadline: float) -> None:
        WorkerMeasurer.expect(self, candidate, 10.0)

    def _compile_item(self, candidate: Candidate, passes: bool) -> Any:
        return COMPILE_SECONDS, OBJECT_BYTES, candidate.linear

    def machine(self) -> dict[str, Any]:
        return {}


class Counted(WorkerMeasurer):
    """Everything is real; what is built is counted."""

    trace: Trace

    def build(self, candidates: Sequence[Candidate], *, passes: bool, deadline: float) -> list[Built | Failure]:
        self.trace("build", [c.linear for c in candidates])
        return super().build(candidates, passes=passes, deadline=deadline)


def processor_seconds() -> tuple[float, float]:
    """Processor time so far, of this process and of those below it that have ended."""
    below = resource.getrusage(resource.RUSAGE_CHILDREN)
    return time.process_time(), below.ru_utime + below.ru_stime


def rate(workers: int, args: argparse.Namespace) -> tuple[float, float, float]:
    """Candidates per second, and the processor seconds of one: of this process, and of the workers."""
    kernel, target, trace = gemm(*args.shape), host_target(), Trace()
    before = processor_seconds()
    size = args.round or (40 if args.real else 320)
    config = BeamConfig(width=FIRST_WIDTH, round_size=-(-size // FIRST_WIDTH), patience=1000, strategy=args.strategy)

    def measurer(k: Any) -> WorkerMeasurer:
        if not args.real:
            return SlowCompiler(k, target, executor, config, BENCH, trace, faults=False)
        made = Counted(k, target, executor, config, BENCH)
        made.trace = trace
        return made
    with make_executor(f"{'ray' if args.ray else 'local'}:{workers}", None, WORKERS, "CPU" if args.real else "CPU:interpreter",
                       None if args.real else False, 60.0) as executor, TuningDB.open(":none:") as db:
        executor.wait_until_ready()
        # children start with their first item
        for _ in range(2):
            executor.run(f"{JOBS}:told", [("", 1)] * 4 * workers, kind="compile", deadline=60.0)
        session = TuneSession([KernelTask(kernel, name="gemm")], target, executor=executor, db=db, config=config, bench=BENCH,
                              budget=Candidates(args.candidates, trace), measurer_of=measurer)
        started = time.perf_counter()
        session.run()
        found = trace.built / (time.perf_counter() - started)
    used = [(after - b) / trace.built for b, after in zip(before, processor_seconds(), strict=True)]
    return found, used[0], used[1]


def per_core(kernel: Kernel, args: argparse.Namespace) -> float:
    """Candidates per second of one core."""
    target, trace, before = host_target(1), Trace(), sum(processor_seconds())
    config = BeamConfig(width=8)
    with make_executor("local:1", None, WORKERS) as executor, TuningDB.open(":none:") as db:
        TuneSession([KernelTask(kernel)], target, executor=executor, db=db, config=config, budget=Candidates(args.candidates, trace),
                    listener=lambda e: trace("build", [""] * e.timed) if isinstance(e, RoundFinished) else None).run()
    return trace.built / (sum(processor_seconds()) - before)


def report_suite(args: argparse.Namespace) -> None:
    print("| kernel | candidates per second and core |\n| --- | ---: |")
    found = []
    for case in select_cases(args.suite, args.kernels):
        for name, kernel in kernels_of(case):
            found.append(per_core(kernel, args))
            print(f"| {name} | {found[-1]:.1f} |", flush=True)
    print(f"| median | {statistics.median(found):.1f} |")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--candidates", type=int, default=600)
    parser.add_argument("--shape", type=int, nargs=3, default=[96, 128, 80], metavar=("M", "N", "K"))
    parser.add_argument("--round", type=int, help="candidates of a round: 320, where they are timed 40, as many as a beam of 4 has")
    parser.add_argument("--workers", type=int, nargs="+")
    parser.add_argument("--strategy", default="random", help="random's rounds are full")
    parser.add_argument("--ray", action="store_true")
    parser.add_argument("--real", action="store_true")
    parser.add_argument("--suite")
    parser.add_argument("--kernels", default="*", metavar="PATTERNS", help="cases of the suite, joined by commas")
    args = parser.parse_args()
    if args.suite:
        report_suite(args)
        return
    print("| workers | candidates per second | efficiency | processors allow | processor time of a candidate: driver, workers |")
    print("| ---: | ---: | ---: | ---: | ---: |")
    first = None
    for workers in args.workers or ([1, 2] if args.real else [1, 2, 4, 8, 16]):
        found, driver, below = rate(workers, args)
        first = first or found / workers
        allowed = min(1.0, usable_cores() / (driver + below) / (workers * first))
        print(f"| {workers} | {found:.1f} | {found / workers / first:.0%} | {allowed:.0%} | {driver * 1e3:.1f} ms, {below * 1e3:.1f} ms |",
              flush=True)


if __name__ == "__main__":
    main()
