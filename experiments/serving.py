"""Requests per second of one model, served by threads, by replicas of its plan, and by processes.

    python experiments/serving.py --seconds 5
    python experiments/serving.py --cores 1,2,4 --width 1024 --rows 8

    threads      one caller; its plan runs on N threads
    replicas     N threads of Python, each with a replica of the plan that runs on one thread
    processes    N processes, forked after the plan was made; in each the plan runs on one thread

The model is a chain of dense layers. Callers ask again as soon as they have an answer. The ways take turns, a round of each, so that a busy
machine is as busy for all. Memory is the proportional set size, in which a page that N processes share counts as one Nth in each.
"""
from __future__ import annotations

import argparse
import multiprocessing
import statistics
import time
from collections.abc import Callable
from concurrent.futures import Executor, ProcessPoolExecutor, ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from svod import PrepareConfig, Tensor

START_SECONDS = 0.3     # seconds for all callers of a way to come up
WAYS = ("threads", "replicas", "processes")
_plans: list[Any] = []  # a plan for each caller, which forked processes inherit


class Served(NamedTuple):
    """The answers of one caller: seconds of each, and its process's memory in MB."""

    latencies: list[float]
    memory: float


def prepared(layers: int, width: int, rows: int, threads: int) -> Any:
    rng = np.random.default_rng(0)
    x = Tensor(rng.standard_normal((rows, width), np.float32))
    for _ in range(layers):
        x = (x @ Tensor(rng.standard_normal((width, width), np.float32) / np.float32(width) ** 0.5)).relu()
    plan = x.prepare(PrepareConfig(threads=threads))
    plan.execute()
    return plan


def ask(caller: int, begin: float, seconds: float) -> Served:
    """Run the caller's plan again and again from `begin`, of time.monotonic, on."""
    latencies, run = [], _plans[caller].execute
    run()
    time.sleep(max(0.0, begin - time.monotonic()))
    while (start := time.monotonic()) < begin + seconds:
        run()
        latencies.append(time.monotonic() - start)
    rollup = Path("/proc/self/smaps_rollup").read_text(encoding="ascii")
    return Served(latencies, int(rollup.split("\nPss:")[1].split()[0]) / 1024)


def served(way: str, cores: int, make: Callable[[int], Any], seconds: float) -> tuple[float, float, float, float]:
    """Requests per second, the median and the 99th percentile of their seconds, and MB of all processes."""
    callers = 1 if way == "threads" else cores
    plan = make(cores if way == "threads" else 1)
    _plans[:] = [plan, *(plan.replicate(threads=1) if way == "replicas" else plan for _ in range(callers - 1))]
    forked = multiprocessing.get_context("fork")
    pool: Executor = ProcessPoolExecutor(callers, forked) if way == "processes" else ThreadPoolExecutor(callers)
    with pool:
        begin = time.monotonic() + START_SECONDS
        found = list(pool.map(ask, range(callers), [begin] * callers, [seconds] * callers))
    times = sorted(t for f in found for t in f.latencies)
    memory = sum(f.memory for f in found) if way == "processes" else found[0].memory
    return len(times) / seconds, statistics.median(times), times[int(0.99 * len(times))], memory


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cores", default="1,2", help="numbers of threads, replicas and processes (default: %(default)s)")
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--width", type=int, default=512)
    parser.add_argument("--rows", type=int, default=8)
    parser.add_argument("--seconds", type=float, default=3.0, help="seconds of a round (default: %(default)s)")
    parser.add_argument("--rounds", type=int, default=3)
    given = parser.parse_args(arguments)
    cases = [(way, int(n)) for n in given.cores.split(",") for way in WAYS if int(n) > 1 or way == "threads"]
    rounds = [[served(way, n, lambda t: prepared(given.layers, given.width, given.rows, t), given.seconds) for way, n in cases]
              for _ in range(given.rounds)]
    print("| | requests/s | median | 99 % | memory |\n| --- | ---: | ---: | ---: | ---: |")
    for (way, n), *measured in zip(cases, *rounds, strict=True):
        rate, median, late, memory = map(statistics.median, zip(*measured, strict=True))
        print(f"| {n} {way if n > 1 else way[:-1]} | {rate:.0f} | {1e3 * median:.3f} ms | {1e3 * late:.3f} ms | {memory:.0f} MB |")


if __name__ == "__main__":
    main()
