"""How much faster models are by WINOGRAD and Fourier transforms: PyTorch's modules with direct convolutions alone, and with all algorithms.

    python experiments/algorithms_beside.py                     # the suite torch
    python experiments/algorithms_beside.py resnet18 vgg11      # some of its models

A line per model: milliseconds with direct convolutions (SVOD_TRANSFORMED_MB=0) and with all algorithms, of interleaved rounds in one
process, their ratio with its 95 % interval, and the algorithms of its kernels. Chains are the heuristic's or what the tuning database has.
The geometric mean is over all models, those without convolutions too. A model whose code is the same both ways counts as 1.
"""
from __future__ import annotations

import argparse
import json
import math
import random
import subprocess
import sys
from collections import Counter
from typing import Any

from svod.bench.race import confirm
from svod.bench.suites.torch_modules import MODULE_MAKERS, REAL, compiled, make
from svod.bench.timer import Contestant
from svod.core.kernel.apply import algorithm_of

SECONDS = 4.0       # for the rounds of one model


def measure(name: str) -> dict[str, Any]:
    """The row of a model."""
    import torch

    import svod
    from svod.torch.functions import functions

    torch.manual_seed(0)
    module, args, kwargs = make(name, REAL)
    ways, chains = [], []
    with torch.inference_mode():
        for options in ({"transformed_mb": 0}, {}):
            before = set(functions)
            fast = compiled(module, backend="svod", options=options)
            fast(*args, **kwargs)
            svod.complete()         # kernels have their chains, and not the ones of the first call
            fast(*args, **kwargs)
            ways.append(fast)
            plans = [p for f in functions if f not in before for p in f.plans if p.captured is not None]
            chains.append([(k.name, k.form.chain) for p in plans for k in p.captured.plan.kernels])
        row: dict[str, Any] = {"model": name, "kernels": len(chains[1])}
        row["algorithms"] = Counter(str(opt) for _, chain in chains[1] for opt in algorithm_of(chain))
        if chains[0] == chains[1]:
            return row | {"ratio": 1.0}

        def repeat(fast: Any) -> Any:
            def run(n: int) -> None:
                for _ in range(n):
                    fast(*args, **kwargs)
            return run
        race = confirm([Contestant(repeat(f), way) for f, way in zip(ways, ("direct", "all"), strict=True)], budget_seconds=SECONDS,
                       rng=random.Random(0))
    gain = race.ratios[1].inverse
    return row | {"direct": race.seconds(0), "all": race.seconds(1), "ratio": gain.median, "low": gain.low, "high": gain.high}


def line(row: dict[str, Any]) -> str:
    algorithms = ", ".join(f"{opt} {n}" for opt, n in row["algorithms"].items())
    if "low" not in row:
        return f"{row['model']:22} the same code both ways  {algorithms}"
    return (f"{row['model']:22} {row['direct'] * 1e3:9.2f} {row['all'] * 1e3:9.2f}  {row['ratio']:.2f}× "
            f"({row['low']:.2f}–{row['high']:.2f})  {algorithms}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="*", help="models of the suite torch; none: all")
    parser.add_argument("--here", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.here:
        print(json.dumps(measure(args.models[0])))
        return
    ratios = []
    for name in args.models or MODULE_MAKERS:
        done = subprocess.run([sys.executable, __file__, "--here", name], capture_output=True, text=True, check=False)
        lines = (done.stdout if not done.returncode else done.stderr).strip().splitlines()
        if done.returncode:
            print(f"{name:22} {lines[-1]:.120}", flush=True)
            continue
        row = json.loads(lines[-1])
        ratios.append(row["ratio"])
        print(line(row), flush=True)
    if ratios:
        print(f"geometric mean of {len(ratios)}: {math.exp(sum(map(math.log, ratios)) / len(ratios)):.3f}×")


if __name__ == "__main__":
    main()
