"""Hand-written chains for f32 GEMM, timed against the machine's multiply-add ceiling, measured in the same run.

    python experiments/chains/gemm.py [SIZE …]        # 512 1024 2048 if none is given

The chains are unknown to the search; they show what the compiler can do.
"""
from __future__ import annotations

import sys

import numpy as np

import svod
from svod import Tensor
from svod.bench.ceilings import measure_ceilings
from svod.bench.timer import Contestant, measure
from svod.compile.host import host_target
from svod.core.dtype import dtypes

CHAIN = [["ORDER", "out", ["o1", "o0"]], ["UPCAST", "o0", 8], ["UPCAST", "o1", 32], ["STAGE", "s1", "o1"]]


def main(sizes: list[int]) -> None:
    target = host_target()
    chain = [*CHAIN, ["THREAD", "o1", target.threads]] if target.threads > 1 else CHAIN
    rng = np.random.default_rng(0)
    for n in sizes:
        x, w = (rng.standard_normal((n, n), dtype=np.float32) for _ in range(2))
        y = Tensor(x) @ Tensor(w)
        plan = y.prepare(svod.PrepareConfig(opts={"": chain}, db=":none:"))
        plan.execute()
        error = float(np.abs(y.numpy() - x @ w).max())
        before = measure_ceilings(target, target.threads, quick=True).flops_per_second(dtypes.float32)
        samples = measure(Contestant(plan.repeat), 15)
        after = measure_ceilings(target, target.threads, quick=True).flops_per_second(dtypes.float32)
        rate, ceiling = 2 * n**3 / samples.median, max(before, after)
        print(f"GEMM {n}: {samples.median * 1e3:8.3f} ms  {rate / 1e9:6.1f} GFLOP/s = {rate / ceiling:5.1%} of {ceiling / 1e9:.0f} "
              f"({target.threads} cores), fastest {2 * n**3 / min(samples.seconds) / 1e9:.1f}, largest error {error:.1e}")


if __name__ == "__main__":
    main([int(a) for a in sys.argv[1:]] or [512, 1024, 2048])
