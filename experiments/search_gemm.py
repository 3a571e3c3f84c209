"""Results of the search of one f32 GEMM from nothing: candidates per second, the winner's share of the ceiling, and what slices bring.

    python experiments/search_gemm.py 512                       # width 4, local workers
    python experiments/search_gemm.py 512 --workers local:1
    python experiments/search_gemm.py 2048 --compare-slices     # the same search with and without slices, winners timed against each other

A candidate counts when its LINEAR is new, was compiled, ran, and has a sample; the rate is over the wall time of the search, the start
of the workers included.
"""
from __future__ import annotations

import argparse
import random
import time

import numpy as np

from svod import Tensor
from svod.bench.race import confirm
from svod.bench.roofline import measure_ceilings
from svod.bench.timer import Contestant
from svod.compile.backend import backend_named
from svod.config import BeamConfig, PrepareConfig
from svod.core.graph import graph
from svod.core.ir.dtype import dtypes
from svod.core.kernel.kernel import Kernel
from svod.core.machine.target import HOST
from svod.core.schedule.schedule import create_schedule
from svod.tune.db import TuningDB
from svod.tune.search.budget import ModelBudget
from svod.tune.search.confirmation import Finding
from svod.tune.session import KernelTask, TuneSession
from svod.tune.workers.start import make_executor


def search(kernel: Kernel, args: argparse.Namespace, shrink: bool) -> tuple[Finding, float]:
    """Search a kernel from nothing until it ends by itself or the budget does; what was found, and seconds."""
    target = backend_named(HOST).target()
    ceilings = measure_ceilings(target, target.threads, quick=True)
    start = time.perf_counter()
    with make_executor(args.workers) as executor, TuningDB.open(":none:") as db:
        session = TuneSession([KernelTask(kernel, name="gemm")], target, executor=executor, db=db, config=BeamConfig(width=args.beam),
                              budget=ModelBudget(args.budget, per_kernel=args.budget), ceilings=ceilings, shrink=shrink)
        result = session.run()
    seconds = time.perf_counter() - start
    finding = result.findings[kernel.key]
    rate, ceiling = estimate_flops(kernel) / finding.seconds, ceilings.flops_per_second(dtypes.float32)
    print(f"{'with' if shrink else 'without'} slices: {result.candidates} candidates in {seconds:.1f} s, "
          f"{result.candidates / seconds:.1f} per second; {finding.why}\n"
          f"  {finding.seconds * 1e3:.3f} ms, {rate / 1e9:.0f} GFLOP/s = {rate / ceiling:.1%} of {ceiling / 1e9:.0f} "
          f"({target.threads} cores), {finding.speedup.median:.2f}× the heuristic\n  {' '.join(map(str, finding.chain))}")
    return finding, seconds


def estimate_flops(kernel: Kernel) -> float:
    m, n = (kernel.axes[a].extent for a in kernel.stages[kernel.output].outs)
    return 2.0 * m * n * kernel.axes[kernel.stages[kernel.output].reds[0]].extent


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("size", type=int)
    parser.add_argument("--beam", type=int, default=4)
    parser.add_argument("--budget", type=float, default=60.0)
    parser.add_argument("--workers", default="local")
    parser.add_argument("--compare-slices", action="store_true")
    args = parser.parse_args()
    rng = np.random.default_rng(0)
    x, w = (rng.standard_normal((args.size, args.size), dtype=np.float32) for _ in range(2))
    product = Tensor(x) @ Tensor(w)
    kernel = Kernel(create_schedule(graph.sink(product.uop)).calls[0].ast)
    sliced, with_slices = search(kernel, args, True)
    if not args.compare_slices:
        return
    whole, without = search(kernel, args, False)
    plans = []
    for finding in (whole, sliced):
        chain = tuple(finding.chain)
        plans.append((Tensor(x) @ Tensor(w)).prepare(PrepareConfig(opts={kernel.key: chain}, db=":none:")))
    result = confirm([Contestant(p.repeat) for p in plans], rng=random.Random(0), budget_seconds=10.0)
    r = result.ratios[1]
    print(f"slices: {without / with_slices:.1f}× faster; their winner takes {r.median:.3f}× the time of the other "
          f"({r.low:.3f}–{r.high:.3f})")


if __name__ == "__main__":
    main()
