"""Kernels for which the heuristic may be poor, found by predictions alone: nothing is compiled or timed, so a busy machine is no matter.

    SVOD_CAPTURE=kernels python model.py; python experiments/predicted_gaps.py --capture kernels
    python experiments/predicted_gaps.py --suite core,odd,models --show 10
    python experiments/predicted_gaps.py --capture kernels --beam 3        # a minute for a hundred kernels

`bound` is the heuristic's predicted cycles over the least that the kernel's operations and bytes need. A large one shows what no sketch
does: scalar code, or values computed many times. With `--beam`, `found` is the heuristic's cycles over those of the best chain that a beam
over predictions finds from the sketches; it shows what sketches lack, or where the cost model is wrong. Both are questions, not answers: a
measurement decides (`heuristics.py --capture`).
"""
from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "experiments")]

from heuristics import captured_kernels, kernels_of  # noqa: E402

# isort: split
from svod.bench.suites.suites import select_cases  # noqa: E402
from svod.compile.backend import Backend, backend_named  # noqa: E402
from svod.core.cost.op_count import count_operations  # noqa: E402
from svod.core.kernel.apply import apply_opt  # noqa: E402
from svod.core.kernel.kernel import Kernel  # noqa: E402
from svod.core.kernel.scheduler import Scheduler  # noqa: E402
from svod.core.machine.target import HOST, Target  # noqa: E402
from svod.errors import KernelOptError  # noqa: E402
from svod.tune.search.actions import default_actions, lanes_of, mutations  # noqa: E402

FLOPS_PER_CYCLE = 64.0      # most operations of a core in a cycle: two multiply-adds of 16 lanes
BYTES_PER_CYCLE = 32.0      # most bytes that a core reads from a near cache in a cycle: half a cache line
LEAST_CYCLES = 300.0    # no kernel takes fewer
DEEPEST = 5             # opts that the beam adds to a chain
MUTATED = 2             # first steps of the beam in which opts of the chain may be replaced too


class Gap(NamedTuple):
    """A kernel, the heuristic's state, and the best state of a beam over predictions (the heuristic's without a beam)."""

    name: str
    kernel: Kernel
    heuristic: Scheduler
    best: Scheduler
    bound: float
    found: float


def kernels(args: argparse.Namespace) -> Iterator[tuple[str, Kernel]]:
    """The distinct kernels of a capture, or of suites."""
    seen: set[str] = set()
    every = captured_kernels(args.capture, "*") if args.capture else (
        named for suite in args.suite.split(",") for case in select_cases(suite) for named in kernels_of(case))
    for name, kernel in every:
        if kernel.key not in seen and kernel.library_kernel is None:
            seen.add(kernel.key)
            yield name, kernel


def neighbours(base: Scheduler, state: Scheduler, with_mutations: bool) -> Iterator[Scheduler]:
    """States one opt away from a state, or with one of its opts replaced or left out."""
    lanes = lanes_of(base.kernel, base.target)
    for opt in default_actions(state, lanes):
        try:
            yield apply_opt(state, opt)
        except KernelOptError:
            continue
    if with_mutations:
        yield from mutations(base, state.applied_opts, lanes)


def beam(backend: Backend, base: Scheduler, start: Scheduler, width: int) -> Scheduler:
    """The best state by prediction that a beam of `width` states finds from the sketches and the heuristic."""
    def cycles(state: Scheduler) -> float:
        try:
            return backend.cost(state).cycles
        except KernelOptError:          # its placements contradict each other
            return float("inf")
    states = [*sorted([start, *backend.sketches(base)], key=cycles)[:width], base]
    best, seen = start, set[bytes]()
    for depth in range(DEEPEST):
        found: dict[bytes, Scheduler] = {}
        for state in states:
            for after in neighbours(base, state, depth < MUTATED):
                if after.digest not in seen:
                    seen.add(after.digest)
                    found[after.digest] = after
        states = sorted(found.values(), key=cycles)[:width]
        best = min([best, *states], key=cycles)
    return best


def gap_of(backend: Backend, target: Target, name: str, kernel: Kernel, width: int) -> Gap:
    base, work = Scheduler(kernel, target), count_operations(kernel.ast)
    heuristic = backend.heuristic(base)
    best = beam(backend, base, heuristic, width) if width else heuristic
    cycles, cores = backend.cost(heuristic).cycles, heuristic.thread.cores if heuristic.thread else 1
    least = max(work.flops / FLOPS_PER_CYCLE / cores, work.bytes_moved / BYTES_PER_CYCLE, LEAST_CYCLES)
    return Gap(name, kernel, heuristic, best, cycles / least, cycles / backend.cost(best).cycles)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--capture", default="", metavar="FOLDER", help="The kernels of this capture instead of the suites'.")
    parser.add_argument("--suite", default="core,odd,models")
    parser.add_argument("--beam", type=int, default=0, metavar="WIDTH", help="Also search by predictions, with a beam of this width.")
    parser.add_argument("--show", type=int, default=20, metavar="N", help="The N kernels with the largest gaps.")
    args = parser.parse_args()
    backend = backend_named(HOST)
    gaps = [gap_of(backend, backend.target(), name, kernel, args.beam) for name, kernel in kernels(args)]
    for gap in sorted(gaps, key=lambda g: -(g.found if args.beam else g.bound))[:args.show]:
        found = f"  found {gap.found:5.2f}" if args.beam else ""
        print(f"{gap.name:28} {gap.kernel.key[:12]}  bound {gap.bound:6.1f}{found}")
        for what, state in (("heuristic", gap.heuristic), ("beam", gap.best))[:2 if args.beam else 1]:
            print(f"    {what:9} {backend.cost(state).cycles / 1e3:10.1f} kcycles  {' '.join(map(str, state.applied_opts)) or 'untouched'}")
    print(f"{len(gaps)} kernels")


if __name__ == "__main__":
    main()
