"""The worth of exchanging registers in subgroups on a WebGPU adapter: kernels for its target, and for the same without subgroups, in
turns.

    python experiments/subgroups.py                     # the heuristic's chain of each target
    python experiments/subgroups.py --chains "GROUP(r0, 8)" "GROUP(r0, 64)" --cases sum

Each row has the medians and the ratio with its 95 % interval: above 1 the kernel with subgroups is faster. It is for a machine that does
nothing else."""
from __future__ import annotations

import argparse
import random
import statistics
from collections.abc import Callable
from dataclasses import replace
from functools import partial

import numpy as np

from svod import Tensor
from svod.bench.race import confirm, paired_ratio
from svod.bench.timer import Contestant
from svod.compile.backend import device_named
from svod.compile.lower.lower import lower
from svod.compile.plan.execution_plan import ExecutionPlan
from svod.core.graph.graph import sink
from svod.core.ir.dtype import to_numpy
from svod.core.kernel.apply import apply_opts
from svod.core.kernel.chain_text import parse_chain
from svod.core.kernel.kernel import Kernel
from svod.core.kernel.scheduler import Scheduler
from svod.core.machine.target import Target
from svod.core.schedule.schedule import create_schedule

CASES: dict[str, Callable[[Tensor], Tensor]] = {
    "sum": lambda x: x.sum(-1), "max": lambda x: x.max(-1), "softmax": lambda x: x.softmax(-1),
    "layer norm": lambda x: (x - x.mean(-1, keepdim=True)) / ((x - x.mean(-1, keepdim=True)) ** 2).mean(-1, keepdim=True).sqrt(),
}


def plan_of(kernel: Kernel, target: Target, chain: str | None) -> tuple[ExecutionPlan, str]:
    """A kernel under a chain, or the heuristic's, and the chain in words."""
    backend, pair = device_named(target.device)
    base = Scheduler(kernel, target)
    state = backend.heuristic(base) if chain is None else apply_opts(base, parse_chain(chain))
    program = lower(state)
    arrays = [np.random.default_rng(p.arg.slot).standard_normal(p.arg.size).astype(to_numpy(p.dtype)) for p in kernel.params]
    plan = ExecutionPlan.of_kernel(program.spec, pair.load(pair.binary_of(program, target), program.spec), arrays, device=target.device)
    plan.load_inputs()
    return plan, " ".join(str(o) for o in state.applied_opts)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="WEBGPU")
    parser.add_argument("--cases", nargs="+", default=list(CASES), choices=CASES)
    parser.add_argument("--chains", nargs="+", default=[None], help="chains for both, instead of the heuristic's")
    parser.add_argument("--shapes", nargs="+", default=["512x1024", "64x4096", "4096x64"])
    parser.add_argument("--seconds", type=float, default=4.0, help="for each row")
    args = parser.parse_args()
    with_subgroups = device_named(args.device).backend.target()
    print(with_subgroups.key)
    for name in args.cases:
        for shape in args.shapes:
            x = Tensor(np.zeros(tuple(map(int, shape.split("x"))), np.float32))
            calls = create_schedule(sink(CASES[name](x).uop)).calls
            for chain in args.chains:
                plans = [plan_of(Kernel(call.ast), target, chain) for call in calls
                         for target in (replace(with_subgroups, subgroup=0), with_subgroups)]
                for (before, without), (after, chosen) in zip(plans[::2], plans[1::2], strict=True):
                    found = confirm([Contestant(partial(p.repeat_timed, cold=True)) for p in (before, after)], rng=random.Random(0),
                                    budget_seconds=args.seconds)
                    columns = list(zip(*found.rounds, strict=True))
                    ratio = paired_ratio(columns[0], columns[1])
                    was, now = (1e6 * statistics.median(c) for c in columns)
                    print(f"{name:<11} {shape:<9} {was:9.1f} µs → {now:9.1f} µs  {ratio.median:5.2f}× ({ratio.low:.2f}–{ratio.high:.2f})  "
                          f"{without}{' → ' + chosen if chosen != without else ''}", flush=True)


if __name__ == "__main__":
    main()
