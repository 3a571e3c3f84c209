"""What PREFETCH gains or loses on kernels that stream through their arguments: chains with it against themselves without, interleaved.

    python experiments/prefetches.py --threads 1
    python experiments/prefetches.py --kernels 'rows' --seconds 20

The same chain a second time says what differences mean nothing.
"""
from __future__ import annotations

import argparse
import random
from collections.abc import Callable
from typing import Any

import numpy as np

from svod.bench.race import confirm
from svod.bench.timer import Contestant
from svod.compile.cpu.host import host_target
from svod.compile.llvm.codegen import LoadedProgram, compile_object
from svod.compile.llvm.render import render
from svod.compile.lower.linear import validate
from svod.compile.lower.lower import lower
from svod.compile.plan.execution_plan import ExecutionPlan
from svod.core.graph import graph
from svod.core.kernel.apply import apply_opt, apply_opts
from svod.core.kernel.kernel import Kernel
from svod.core.kernel.scheduler import Opt, Scheduler
from svod.core.schedule.schedule import create_schedule
from svod.tensor import Tensor

AHEAD = (2, 4, 8, 16)
Array = np.ndarray[Any, np.dtype[np.float32]]

# name → (shape of the argument, what is computed, its chain)
KERNELS: dict[str, tuple[tuple[int, ...], Callable[[Any], Any], tuple[Opt, ...]]] = {
    "x + 1": ((1 << 25,), lambda x: x + 1, (Opt("UPCAST", "o0", 64),)),
    "rows": ((8192, 4096), lambda x: x.sum(1), (Opt("UPCAST", "r0", 64),)),
    "columns": ((4096, 8192), lambda x: x.sum(0), (Opt("UPCAST", "o0", 128),)),
    "small columns": ((512, 512), lambda x: x.sum(0), (Opt("UPCAST", "o0", 16), Opt("UNROLL", "r0", 2))),
}


def states(x: Array, compute: Callable[[Any], Any], chain: tuple[Opt, ...], threads: int) -> dict[str, Scheduler]:
    """The chain, the same again, and with the argument prefetched."""
    kernel = Kernel(create_schedule(graph.sink(compute(Tensor(x)).uop)).calls[0].ast)
    state = apply_opts(Scheduler(kernel, host_target()), chain)
    if threads > 1:
        state = apply_opt(state, Opt("THREAD", "o0", threads))
    return {"chain": state, "again": state, **{f"{n} ahead": apply_opt(state, Opt("PREFETCH", "p1", n)) for n in AHEAD}}


def plan_of(state: Scheduler, arrays: list[Array]) -> ExecutionPlan:
    program = lower(state)
    validate(program)
    loaded = LoadedProgram(compile_object(render(program, state.target), state.target), [p.symbol for p in program.spec.phases])
    return ExecutionPlan.of_kernel(program.spec, loaded, arrays)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kernels", default=",".join(KERNELS), help="names, separated by commas")
    parser.add_argument("--threads", type=int, default=host_target().threads)
    parser.add_argument("--seconds", type=float, default=8.0, help="for each kernel")
    args = parser.parse_args()
    for name in args.kernels.split(","):
        shape, compute, chain = KERNELS[name]
        x = np.random.default_rng(0).integers(-4, 5, shape).astype(np.float32)
        want = compute(x)
        y = np.zeros(want.size, np.float32)
        plans = {label: plan_of(state, [y, x.ravel()]) for label, state in states(x, compute, chain, args.threads).items()}
        for plan in plans.values():
            y[:] = 0
            plan.execute()
            np.testing.assert_array_equal(y, want.ravel())
        found = confirm([Contestant(p.repeat, label) for label, p in plans.items()], rng=random.Random(0), budget_seconds=args.seconds)
        print(f"{name:16s} {found.seconds(0) * 1e3:7.3f} ms  " + "  ".join(f"{label}: {1 / ratio.median:.3f}" for label, ratio in
                                                                       list(zip(plans, found.ratios, strict=True))[1:])
              + (f"  noisy: {found.noisy}" if found.noisy else ""), flush=True)


if __name__ == "__main__":
    main()
