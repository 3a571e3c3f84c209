"""The ceilings that svod measures against those of a C program, on this machine, interleaved, with a control.

    python experiments/ceilings_c/compare.py [--rounds 9] [--cc gcc] [--only GLOB] [--threads N] [--markdown]

Builds `ceilings.c` beside it (the flags stand in that file), then measures each figure in rounds: svod, C, and C once more, in random
order, each in memory that is mapped anew; figures of one thread on one core, the next round on the next: cores of a shared machine differ
by what their neighbours do. Reads are with eight loads a turn, with four, or with four of half a vector, the best, in both. Both
take the same working sets; nothing else is shared. Printed are the medians, and two ratios paired by round, each with its 95 %
interval (from six rounds on): svod over C (the geometric mean of the two), and C over C. The second is the control: how far two
measurements of the same thing lie apart. A figure disagrees where the interval of svod over C lies outside of ±5 %, and is open where it
reaches beyond ±5 %, or where there is none; exit status 1 for the first.
"""
from __future__ import annotations

import argparse
import fnmatch
import math
import os
import random
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from svod.bench.ceiling_loops import FMA_DTYPES, MEMORY_LEVELS, SAMPLES, CeilingLoops, HugePages, kinds_of, working_set
from svod.bench.race import Ratio, paired_ratio
from svod.compile.cpu.host import host_target
from svod.core.machine.target import Target

SOURCE = Path(__file__).with_name("ceilings.c")
FLAGS = ("-O3", "-march=native", "-fno-tree-loop-distribute-patterns", "-pthread")
AGREE = 0.05


@dataclass(frozen=True)
class Figure:
    """`name` is "multiply-add float32" or "l3 copy"; `arguments` are those of the C program after the number of samples."""

    name: str
    threads: int
    unit: str
    arguments: tuple[str, ...]
    measure: Callable[[], float]


@dataclass(frozen=True)
class Rounds:
    """Rates per second, round by round: of svod, and of the C program twice."""

    svod: list[float]
    first: list[float]
    second: list[float]

    @property
    def ratio(self) -> Ratio:
        """svod over C."""
        return paired_ratio(self.svod, [math.sqrt(a * b) for a, b in zip(self.first, self.second, strict=True)])

    @property
    def control(self) -> Ratio:
        """C over C."""
        return paired_ratio(self.first, self.second)

    @property
    def verdict(self) -> str:
        """Empty where they agree."""
        if self.ratio.low > 1.0 + AGREE or self.ratio.high < 1.0 - AGREE:
            return "disagrees"
        return "open" if self.ratio.low < 1.0 - AGREE or self.ratio.high > 1.0 + AGREE else ""


def figures(target: Target, counts: Sequence[int]) -> Iterator[Figure]:
    """Every figure, level by level: the memory of one level is freed before the next."""
    loops = CeilingLoops(target)
    for dtype in FMA_DTYPES:
        for n in counts:
            yield Figure(f"multiply-add {dtype.name}", n, "GFLOP/s", (f"fma{dtype.bits}",),
                         lambda dtype=dtype, n=n: loops.fma_round(dtype, n).rate(SAMPLES))  # type: ignore[misc]
    for level in MEMORY_LEVELS:
        for kind in kinds_of(level):
            for n in counts:
                size = working_set(target, level, n)
                if size:
                    yield Figure(f"{level} {kind}", n, "GB/s", (kind, str(size)),
                                 lambda kind=kind, n=n, size=size: _memory_rate(loops, kind, n, size))  # type: ignore[misc]


def measure_rounds(figure: Figure, program: str, rounds: int, rng: random.Random) -> Rounds:
    """Rates of `rounds` rounds, in random order within each."""
    kind, *size = figure.arguments

    def run_c() -> float:
        kinds = (kind, "read4", "read_half") if kind == "read" else (kind,)
        calls = ([program, str(figure.threads), str(SAMPLES), k, *size] for k in kinds)
        return max(float(subprocess.run(call, check=True, capture_output=True, text=True).stdout) for call in calls)
    found, cores = Rounds([], [], []), sorted(os.sched_getaffinity(0))
    try:
        for n in range(rounds):
            os.sched_setaffinity(0, cores if figure.threads > 1 else [cores[n % len(cores)]])
            turns = [(found.svod, figure.measure), (found.first, run_c), (found.second, run_c)]
            rng.shuffle(turns)
            for rates, measure in turns:
                rates.append(measure())
    finally:
        os.sched_setaffinity(0, cores)
    return found


def _memory_rate(loops: CeilingLoops, kind: str, threads: int, size: int) -> float:
    memory = HugePages(threads * size, threads)
    loops.fill(memory, threads)
    return loops.memory_rate(kind, threads, size, memory, SAMPLES)


def _shown(ratio: Ratio) -> str:
    return f"{ratio.median:.2f}" + (f" ({ratio.low:.2f}-{ratio.high:.2f})" if ratio.low > 0.0 else "")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--cc", default="gcc")
    parser.add_argument("--only", default="*", help="names to measure, as in a shell: 'l3 *'")
    parser.add_argument("--threads", type=int, help="only with so many threads; default: with one, and with all")
    parser.add_argument("--markdown", action="store_true")
    options = parser.parse_args()
    target, rng, wrong = host_target(), random.Random(0), 0
    with tempfile.TemporaryDirectory() as folder:
        program = str(Path(folder) / "ceilings")
        subprocess.run([options.cc, *FLAGS, str(SOURCE), "-o", program], check=True)
        row = "| {} | {} | {} | {} | {} | {} | {} |" if options.markdown else "{:22} {:>7} {:>13} {:>8} {:>17} {:>17}  {}"
        print(row.format("figure", "threads", "svod", "C", "svod / C", "C / C", ""))
        if options.markdown:
            print("| --- " + "| ---: " * 5 + "| --- |")
        for figure in figures(target, sorted({1, target.threads}) if options.threads is None else [options.threads]):
            if not fnmatch.fnmatchcase(figure.name, options.only):
                continue
            found = measure_rounds(figure, program, options.rounds, rng)
            wrong += found.verdict == "disagrees"
            own, other = (f"{statistics.median(rates) / 1e9:.1f}" for rates in (found.svod, found.first + found.second))
            print(row.format(figure.name, figure.threads, f"{own} {figure.unit}", other, _shown(found.ratio), _shown(found.control),
                             found.verdict), flush=True)
    sys.exit(1 if wrong else 0)


if __name__ == "__main__":
    main()
