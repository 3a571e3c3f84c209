"""The cost of the policy "same" (docs/numerics.md): the heuristic's chains of each kernel under both policies, timed in turns.

    python experiments/numerics.py                          # the core suite
    python experiments/numerics.py --suite core,odd,models --kernels 'conv*,softmax*' --rounds 15

A line per kernel: the times under `float32` and under `same`, and the ratio of the least samples. The last lines have the geometric mean,
and the share of kernels that lose at most 5 %."""
from __future__ import annotations

import argparse
import math
import statistics
from dataclasses import replace

from heuristics import Entry, Machine, kernels_of, time_entries

# isort: split
from svod.bench.suites.suites import select_cases
from svod.compile.backend import backend_named
from svod.core.cost.cpu import cost_of
from svod.core.cost.sketch import heuristic
from svod.core.kernel.kernel import Kernel
from svod.core.kernel.scheduler import Scheduler
from svod.core.machine.target import HOST, SAME, Target

LITTLE = 1.05       # a kernel that takes at most so many times as long loses little


def ratio_of(kernel: Kernel, target: Target, rounds: int) -> tuple[float, float, str]:
    """(seconds under float32, seconds under same, the chain of the latter)."""
    entries = []
    for policy in (target, replace(target, numerics=SAME)):
        state = heuristic(Scheduler(kernel, policy))
        entries.append(Entry(state, cost_of(state).cycles, Machine(kernel, policy).contestant(state)))
    time_entries(entries, rounds, math.inf)
    return entries[0].seconds, entries[1].seconds, " ".join(map(str, entries[1].state.applied_opts))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--suite", default="core")
    parser.add_argument("--kernels", default="*")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--threads", type=int, default=None)
    parser.add_argument("--chains", action="store_true", help="print the chains under same, too")
    args = parser.parse_args()
    target, ratios = backend_named(HOST).target(args.threads), list[float]()
    for case in select_cases(args.suite, args.kernels):
        for name, kernel in kernels_of(case):
            if kernel.library_kernel is not None:
                continue
            free, same, chain = ratio_of(kernel, target, args.rounds)
            ratios.append(same / free)
            line = f"{name:28} {free * 1e6:10.1f} µs {same * 1e6:10.1f} µs  {same / free:6.3f}"
            print(f"{line}  {chain}" if args.chains else line, flush=True)
    print(f"{len(ratios)} kernels: geometric mean {math.exp(statistics.fmean(map(math.log, ratios))):.3f}, "
          f"{sum(r <= LITTLE for r in ratios)} take at most {LITTLE} times as long")


if __name__ == "__main__":
    main()
