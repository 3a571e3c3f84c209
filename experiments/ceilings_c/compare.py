"""The ceilings that svod measures against those of a C program, on this machine, interleaved.

    python experiments/ceilings_c/compare.py [--rounds 5] [--cc gcc] [--only GLOB] [--markdown]

Builds `ceilings.c` beside it (the flags stand in that file), then measures each figure `rounds` times with both, in turns; prints the
medians and their ratio, svod over C. Both take the same working sets; nothing else is shared. Exit status 1 when a ratio is off by more
than 5 %.
"""
from __future__ import annotations

import argparse
import fnmatch
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from svod.bench.ceiling_loops import FMA_DTYPES, LEVELS, SAMPLES, Loops, Memory, kinds_of, working_set
from svod.compile.host import host_target
from svod.core.target import Target

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


def figures(target: Target) -> Iterator[Figure]:
    """Every figure, level by level: the memory of one level is freed before the next."""
    loops = Loops(target)
    counts = sorted({1, target.threads})
    for dtype in FMA_DTYPES:
        for n in counts:
            yield Figure(f"multiply-add {dtype.name}", n, "GFLOP/s", (f"fma{dtype.bits}",),
                         lambda dtype=dtype, n=n: loops.fma_rate(dtype, n, SAMPLES))  # type: ignore[misc]
    for level in LEVELS:
        sizes = {n: working_set(target, level, n) for n in counts}
        if not all(sizes.values()):
            continue
        for kind in kinds_of(level):
            for n in counts:
                yield Figure(f"{level} {kind}", n, "GB/s", (kind, str(sizes[n])),
                             lambda kind=kind, n=n, sizes=sizes: _memory_rate(loops, kind, n, sizes[n], target.threads))  # type: ignore[misc]


def _memory_rate(loops: Loops, kind: str, threads: int, size: int, most: int) -> float:
    memory = Memory(threads * size, threads)
    loops.fill(memory, most)
    return loops.memory_rate(kind, threads, size, memory, SAMPLES)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--cc", default="gcc")
    parser.add_argument("--only", default="*", help="names to measure, as in a shell: 'l3 *'")
    parser.add_argument("--markdown", action="store_true")
    options = parser.parse_args()
    off = []
    with tempfile.TemporaryDirectory() as folder:
        program = str(Path(folder) / "ceilings")
        subprocess.run([options.cc, *FLAGS, str(SOURCE), "-o", program], check=True)
        row = "| {} | {} | {} | {} | {} |" if options.markdown else "{:24} {:>7} {:>14} {:>14} {:>7}"
        print(row.format("figure", "threads", "svod", "C", "ratio"))
        if options.markdown:
            print("| --- | --- | --- | --- | --- |")
        for figure in figures(host_target()):
            if not fnmatch.fnmatchcase(figure.name, options.only):
                continue
            own, other = [], []
            for _ in range(options.rounds):
                own.append(figure.measure())
                call = [program, str(figure.threads), str(SAMPLES), *figure.arguments]
                other.append(float(subprocess.run(call, check=True, capture_output=True, text=True).stdout))
            a, b = statistics.median(own), statistics.median(other)
            mark = "" if abs(a / b - 1.0) <= AGREE else " *"
            off += [figure.name] if mark else []
            values = f"{a / 1e9:.1f} {figure.unit}", f"{b / 1e9:.1f} {figure.unit}"
            print(row.format(figure.name, figure.threads, *values, f"{a / b:.3f}{mark}"), flush=True)
    sys.exit(1 if off else 0)


if __name__ == "__main__":
    main()
