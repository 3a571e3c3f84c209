"""The cost of a candidate before its first run: a step of its chain, lowering, LLVM's text, machine code.

    python experiments/candidate_costs.py                                   # 8 sketches of each kernel of the core suite
    python experiments/candidate_costs.py --kernels 'gemm_*' --states 16

Per kernel, medians: of every action of every state one `apply_opt` with the digest of the new state, and the features that rank it; of the
sketches themselves the time to lower, to render and to compile as the search does, and how many LINEAR instructions they have. Lowered
is an equal state again, as a search lowers thousands of one kernel. The last line has the most per 1,000 instructions.
"""
from __future__ import annotations

import argparse
import random
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import TypeVar

from heuristics import kernels_of

# isort: split
from svod.bench.suites.suites import select_cases
from svod.compile.backend import backend_named
from svod.compile.llvm.codegen import compile_object
from svod.compile.llvm.render import render
from svod.compile.lower.lower import lower
from svod.core.cost.cpu import cost_of
from svod.core.cost.sketch import sketches
from svod.core.kernel.apply import apply_opt, apply_opts
from svod.core.kernel.kernel import Kernel
from svod.core.kernel.scheduler import Scheduler
from svod.core.machine.target import HOST, Target
from svod.errors import KernelOptError
from svod.tune.search.actions import default_actions, lanes_of

T = TypeVar("T")


@dataclass(frozen=True)
class Costs:
    """Of one kernel, medians: seconds, and the LINEAR instructions of a program."""

    step: float
    features: float
    lowering: float
    rendering: float
    compiling: float
    instructions: float
    lowering_per_instruction: float


def timed(call: Callable[[], T]) -> tuple[float, T]:
    start = time.process_time()
    result = call()
    return time.process_time() - start, result


def step_costs(state: Scheduler) -> list[tuple[float, float]]:
    """Of every action on `state` that no limit refuses: seconds of the step, and of the cost of what it leads to."""
    found = []
    for opt in default_actions(state, lanes_of(state.kernel, state.target)):
        start = time.process_time()
        try:
            child = apply_opt(state, opt)
        except KernelOptError:
            continue
        _ = child.digest
        seconds = time.process_time() - start
        found.append((seconds, timed(lambda child=child: cost_of(child))[0]))
    return found


def costs_of(kernel: Kernel, target: Target, count: int, rng: random.Random) -> Costs:
    """Costs of `count` of a kernel's sketches and of the steps that lead away from them."""
    states = list(sketches(Scheduler(kernel, target)))
    states = states if len(states) <= count else rng.sample(states, count)
    steps = [s for state in [Scheduler(kernel, target), *states] for s in step_costs(state)]
    lowering, rendering, compiling, instructions = [], [], [], []
    for state in states:
        lower(state)
        equal = apply_opts(Scheduler(kernel, target), state.applied_opts)
        seconds, program = timed(lambda equal=equal: lower(equal))  # type: ignore[misc]
        lowering.append(seconds)
        seconds, ir = timed(lambda program=program: render(program, target, aligned=True))  # type: ignore[misc]
        rendering.append(seconds)
        compiling.append(timed(lambda ir=ir: compile_object(ir, target, final=False))[0])  # type: ignore[misc]
        instructions.append(sum(len(code) for code in program.code))
    each = [s / n for s, n in zip(lowering, instructions, strict=True)]
    return Costs(*map(statistics.median, (
        [s for s, _ in steps], [f for _, f in steps], lowering, rendering, compiling, instructions, each)))


def cells(c: Costs) -> list[str]:
    return [f"{c.step * 1e6:.0f} µs", f"{c.features * 1e6:.0f} µs", f"{c.lowering * 1e3:.2f} ms", f"{c.rendering * 1e3:.2f} ms",
            f"{c.compiling * 1e3:.1f} ms", f"{c.instructions:.0f}", f"{c.lowering_per_instruction * 1e6:.2f} ms"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kernels", default="*", metavar="PATTERNS", help="cases of the core suite, joined by commas")
    parser.add_argument("--states", type=int, default=8, help="sketches of each kernel")
    args = parser.parse_args()
    target, rng = backend_named(HOST).target(), random.Random(0)
    print("| kernel | a step | features | lowering | rendering | compiling | instructions | lowering of 1,000 |")
    print("| --- |" + " ---: |" * 7)
    rows: list[Costs] = []
    for case in select_cases("core", args.kernels):
        for name, kernel in kernels_of(case):
            rows.append(costs_of(kernel, target, args.states, rng))
            print("| " + " | ".join([name, *cells(rows[-1])]) + " |", flush=True)
    medians = Costs(*(statistics.median(getattr(c, f.name) for c in rows) for f in fields(Costs)))
    print("| median | " + " | ".join(cells(medians)) + " |")
    print(f"\nlowering of 1,000 instructions: {max(c.lowering_per_instruction for c in rows) * 1e6:.2f} ms at most")


if __name__ == "__main__":
    main()
