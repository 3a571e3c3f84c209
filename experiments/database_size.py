"""What a large tuning database costs: look-ups, `svod-db stats` and `list`, and a merge of two.

    python experiments/database_size.py --measurements 1000000

Makes two databases of so many made-up measurements of 1,000 kernels (half of them in both), times each step, and prints the peak memory of
the merge. Files are made in a temporary directory and removed. With `--directory` they stay there, and a later run uses them: what is
timed takes a minute, to make them takes several. `--only-make` times nothing.
"""
from __future__ import annotations

import argparse
import json
import random
import resource
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from svod.tune.db import KernelRecord, Measurement, Record, TuningDB, Verdict

TARGET = "x86_64/znver4/avx2/l1 32k/l2 1m/l3 16m/t2"
KERNELS = 1000
AT_ONCE = 20_000


def records(count: int, seed: int) -> Iterator[Record]:
    """Per kernel as many measurements as a search stores, of which one in fifty is confirmed."""
    rng = random.Random(seed)
    for n in range(KERNELS):
        kernel = f"{n:032x}"
        yield KernelRecord(kernel, name=f"kernel_{n}", flops=1e9, bytes=1e6)
        for i in range(count // KERNELS):
            shared, ratio = i % 2 == 0, rng.uniform(0.5, 2.0)
            linear = f"{n:06d}{i:06d}{0 if shared else seed:04d}"
            confirmed = i % 50 == 0
            times = {"ratio": ratio, "ratio_low": ratio * 0.99, "ratio_high": ratio * 1.01, "baseline": 1e-4} if confirmed else {}
            yield Measurement(kernel, TARGET, (("UPCAST", "o0", 8), ("TILE", "o1", i % 64)), linear, "ok", 1, "LLVM 20", 1,
                              step="confirm" if confirmed else "screen", time=1e-4 * ratio, samples=(1e-4 * ratio,) * 3,
                              host={"load": 0.5}, taken_at=1e9 + i + (0 if shared else seed), **times)
            if confirmed:
                yield Verdict(kernel, TARGET, linear, "verified", 1)


def fill(path: Path, count: int, seed: int) -> None:
    with TuningDB.open(path) as db:
        chunk: list[Record] = []
        for record in records(count, seed):
            chunk.append(record)
            if len(chunk) == AT_ONCE:
                db.record(chunk)
                chunk.clear()
        db.record(chunk)


def command(*words: str) -> float:
    """Seconds of an svod-db command."""
    started = time.perf_counter()
    subprocess.run([sys.executable, "-m", "svod.cli.db", *words], check=True, capture_output=True)
    return time.perf_counter() - started


def measure(a: Path, b: Path, merged: Path) -> dict[str, float]:
    """What the steps take. The database `a` is copied to `merged`, which `b` is merged into."""
    found: dict[str, float] = {"bytes": a.stat().st_size}
    with TuningDB.open(a, read_only=True) as db:
        db.winner("0" * 32, TARGET)
        lookups = []
        for n in range(1, 200):
            started = time.perf_counter()
            db.winner(f"{n:032x}", TARGET)
            lookups.append(time.perf_counter() - started)
    found["lookup_ms"] = 1e3 * statistics.median(lookups)
    found["stats_seconds"], found["list_seconds"] = command("--db", str(a), "stats"), command("--db", str(a), "list")
    shutil.copyfile(a, merged)
    started, processor = time.perf_counter(), time.process_time()
    with TuningDB.open(merged) as db:
        outcome = db.merge(b)
    found["merge_seconds"], found["merge_processor_seconds"] = time.perf_counter() - started, time.process_time() - processor
    found["merge_added"], found["merge_known"] = outcome.added, outcome.known
    found["peak_bytes"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    merged.unlink()
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--measurements", type=int, default=100_000)
    parser.add_argument("--directory", type=Path)
    parser.add_argument("--only-make", action="store_true")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        directory = args.directory or Path(temporary)
        directory.mkdir(exist_ok=True)
        a, b = (directory / f"{name}_{args.measurements}.db" for name in "ab")
        for seed, path in enumerate((a, b), 1):
            if not path.exists():
                made = path.with_suffix(".made")
                fill(made, args.measurements, seed)
                made.rename(path)
        if not args.only_make:
            print(json.dumps({"measurements": args.measurements, **measure(a, b, directory / "merged.db")}, indent=1))


if __name__ == "__main__":
    main()
