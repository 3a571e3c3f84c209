"""The warm-up of a machine after a pause: time of a run over the time since the pause ended.

    python experiments/warm_up.py                                   # a sum and a product: memory and arithmetic
    python experiments/warm_up.py --kernels gemv_4096 --pauses 12 --peers numpy

Each kernel runs by the hand-written chain of `chains/`, by the heuristic's, and by the libraries that are asked for, back to back
after each pause, all in random order.
"""
from __future__ import annotations

import argparse
import random
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parent / "chains"))
from run_chains import contestants_of

# isort: split
from svod.bench.peers import Peer, PreparedPeer, load_peers, parse_peers
from svod.bench.placing import placed
from svod.bench.suites.suites import select_cases
from svod.bench.timer import SPIN_DOWN_SECONDS, Contestant
from svod.compile.backend import backend_named
from svod.core.machine.target import HOST
from svod.errors import ConfigError
from svod.system.quantities import seconds

# seconds after a pause: each column is from here to the next, the last one to UNTIL
SINCE = (0.0, 2e-3, 4e-3, 8e-3, 12e-3, 16e-3, 20e-3, 30e-3, 50e-3, 80e-3)
UNTIL = 120e-3


def contestants(pattern: str, peers: list[Peer]) -> Iterator[tuple[PreparedPeer, Contestant]]:
    """Each kernel of the core suite that fits, by everyone. What was prepared owns the buffers and has to stay alive."""
    target = backend_named(HOST).target()
    for case in select_cases("core", pattern):
        for who in (*contestants_of(case, target), *peers):
            name = {"tuned": "hand-written"}.get(who.name, who.name)
            prepared = who.prepare(case, case.draw(0))
            yield prepared, Contestant(prepared.run, f"{case.name}, {name}")


def after_a_pause(run: Callable[[int], None], pause: float) -> Iterator[tuple[int, float]]:
    """(column, seconds) of runs back to back, from the end of a pause on."""
    time.sleep(pause)
    begin = start = time.perf_counter()
    while start - begin < UNTIL:
        run(1)
        end = time.perf_counter()
        yield max(i for i, s in enumerate(SINCE) if s <= start - begin), end - start
        start = end


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--kernels", default="sum_16m,gemm_512", metavar="PATTERNS", help="cases of the core suite (default: %(default)s)")
    parser.add_argument("--pauses", default="1,12,30", help="milliseconds, joined by commas (default: %(default)s)")
    parser.add_argument("--peers", default="none", help="libraries joined by commas, all, or none (default: none)")
    parser.add_argument("--rounds", type=int, default=30, help="pauses of each length before each contestant (default: %(default)s)")
    args = parser.parse_args(arguments)
    try:
        cases = list(contestants(args.kernels, load_peers(parse_peers(args.peers), backend_named(HOST).target().threads)[0]))
    except ConfigError as e:
        parser.error(str(e))
    everyone = [contestant for _, contestant in cases]
    pauses = [float(p) * 1e-3 for p in args.pauses.split(",")]
    seen: list[tuple[Contestant, float, list[list[float]]]] = [(c, p, [[] for _ in SINCE]) for c in everyone for p in pauses]
    with placed(everyone, lambda: time.sleep(SPIN_DOWN_SECONDS)):
        for _ in range(args.rounds):
            for contestant, pause, columns in random.sample(seen, len(seen)):
                for column, taken in after_a_pause(contestant.run, pause):
                    columns[column].append(taken)
    print("| kernel | pause | " + " | ".join(f"{s * 1e3:g} ms" for s in SINCE) + " |")
    print("| --- | ---: |" + " ---: |" * len(SINCE))
    for contestant, pause, columns in seen:
        cells = (seconds(statistics.median(c)) if c else "–" for c in columns)
        print(f"| {contestant.name} | {pause * 1e3:g} ms | " + " | ".join(cells) + " |")


if __name__ == "__main__":
    main()
