"""The errors of PyTorch's modules in float32: the largest difference to the module in float64, as a share of the output's largest value.

    python experiments/accuracy.py                          # the suite torch
    python experiments/accuracy.py resnet18 vgg11           # some of its models
    SVOD_TRANSFORMED_MB=0 python experiments/accuracy.py    # without transformed weights, so convolutions are computed directly

A line per model: svod's error, PyTorch's own in float32, and the algorithms of svod's kernels. Inputs and weights are random; each model
runs in a process of its own, by the heuristic's chains or by what the tuning database has.
"""
from __future__ import annotations

import argparse
import subprocess
import sys
from collections import Counter
from typing import Any

from svod.bench.suites.torch_modules import MODULE_MAKERS, REAL, compiled, leaves, make
from svod.core.kernel.apply import algorithm_of

LARGEST = 1e-5      # share of the largest output that an error of a model in float32 may be


def error(found: Any, exact: Any) -> float:
    """The largest difference of any output, as a share of that output's largest value."""
    shares = [0.0]
    for a, b in zip(leaves(found), leaves(exact), strict=True):
        if b.is_floating_point() and b.numel():
            shares.append(float((a.double() - b).abs().max() / b.abs().max().clamp(min=1e-30)))
    return max(shares)


def measure(name: str) -> str:
    """The line of a model."""
    import torch

    from svod.torch.functions import functions

    def double(value: Any) -> Any:
        return value.double() if isinstance(value, torch.Tensor) and value.is_floating_point() else value

    torch.manual_seed(0)
    module, args, kwargs = make(name, REAL)
    with torch.inference_mode():
        plain = module(*args, **kwargs)
        fast = compiled(module, backend="svod")
        fast(*args, **kwargs)
        for plan in [p for f in functions for p in f.plans]:
            plan.complete()         # kernels have their chains, and not the ones of the first call
        found = fast(*args, **kwargs)
        exact = module.double()(*map(double, args), **{k: double(v) for k, v in kwargs.items()})
    chains = [algorithm_of(k.form.chain) for f in functions for p in f.plans if p.captured is not None
              for k in p.captured.plan.kernels]
    count, mine = Counter(str(opt) for chain in chains for opt in chain), error(found, exact)
    algorithms = ", ".join(f"{opt} {n}" for opt, n in count.items())
    return f"{name:22} {mine:9.2e} {error(plain, exact):9.2e}  {'' if mine <= LARGEST else 'above the limit':16} {algorithms}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="*", help="models of the suite torch; none: all")
    parser.add_argument("--here", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    for name in args.models or MODULE_MAKERS:
        if args.here:
            print(measure(name), flush=True)
            continue
        done = subprocess.run([sys.executable, __file__, "--here", name], capture_output=True, text=True, check=False)
        lines = (done.stdout if not done.returncode else done.stderr).strip().splitlines()
        print(lines[-1] if not done.returncode else f"{name:22} {lines[-1]:.120}", flush=True)


if __name__ == "__main__":
    main()
