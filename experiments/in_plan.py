"""Kernels of a PyTorch model timed in their plan, where other kernels use the caches between two runs, under other chains.

    python experiments/in_plan.py resnet50                                  # the kernels that take longest
    python experiments/in_plan.py resnet50 --without PREFETCH               # the heuristic's chains against the same without an opt
    python experiments/in_plan.py resnet50 --chain 'conv_15=UPCAST(o0, 14) UPCAST(o2, 28) LANES(o2.in)'

Models are those of the suite `torch`. Both plans run in turns in one process, each once unmeasured before it is measured. Per kernel the
first quartile in microseconds, of the heuristic and of the other chains, and the ratio.
"""
from __future__ import annotations

import argparse
import time
from typing import Any

import numpy as np

from svod.compile.plan.execution_plan import ExecutionPlan


def plan_of(model: str, threads: int, opts: dict[str, str]) -> tuple[ExecutionPlan, Any]:
    """The largest plan of a model under these chains by kernel name, and what keeps it alive."""
    import torch

    import svod.torch
    from svod.bench.suites.torch_modules import REAL, make

    torch.manual_seed(0)
    module, args, _ = make(model, REAL)
    compiled = svod.torch.compile(module, *args, options={"threads": threads, **({"opts": opts} if opts else {})})
    with torch.inference_mode():
        compiled(*args)
    return max(compiled.plans, key=lambda p: len(p.kernels)), compiled


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--without", default="", metavar="OPT", help="the heuristic's chains without this opt")
    parser.add_argument("--chain", action="append", default=[], metavar="KERNEL=CHAIN")
    args = parser.parse_args()
    first, kept = plan_of(args.model, args.threads, {})
    opts = dict(c.split("=", 1) for c in args.chain)
    if args.without:
        opts |= {k.name: " ".join(str(o) for o in k.form.chain if o.op != args.without) for k in first.kernels
                 if any(o.op == args.without for o in k.form.chain)}
    plans = [first]
    if opts:
        second, kept_too = plan_of(args.model, args.threads, opts)
        plans.append(second)
        kept = kept, kept_too
    for plan in plans:
        plan.complete()
    kernels: list[list[Any]] = [[] for _ in plans]
    whole: list[list[float]] = [[] for _ in plans]
    for _ in range(args.rounds):
        for i, plan in enumerate(plans):
            plan.execute()
            start = time.perf_counter()
            plan.execute()
            whole[i].append(time.perf_counter() - start)
            plan.profile(1)
            kernels[i].append(plan.profile(1))
    quartiles = [np.percentile(np.array(k), 25, axis=0) * 1e6 for k in kernels]
    shown = ([i for i, k in enumerate(first.kernels) if k.name in opts] if opts
             else sorted(range(len(first.kernels)), key=lambda i: -quartiles[0][i])[:20])
    for i in shown:
        times = "  ".join(f"{q[i]:8.1f}" for q in quartiles)
        print(f"{first.kernels[i].name:16} {times}  {quartiles[-1][i] / quartiles[0][i]:5.2f}  {plans[-1].kernels[i].chain}")
    print(f"{'the plan':16} " + "  ".join(f"{np.percentile(w, 25) * 1e6:8.1f}" for w in whole))
    del kept


if __name__ == "__main__":
    main()
