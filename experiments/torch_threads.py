"""The cost of running svod and PyTorch on the same cores in turns: parts of a model alone, and in turns, as around a graph break.

    python -m experiments.torch_threads [--size 512] [--rounds 60]

Both run the same products of matrices, with threads. "in turns" is one call of each; "together" is the sum of both alone. The three are
interleaved in blocks of calls, so that a busy machine is as busy for each. The ratio is a median over blocks.
"""
from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable

import torch

import svod.torch


def seconds_of(call: Callable[[], object], times: int) -> float:
    """Seconds of one call, the mean of some in a row after one that is not counted."""
    call()
    start = time.perf_counter()
    for _ in range(times):
        call()
    return (time.perf_counter() - start) / times


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", type=int, default=512)
    parser.add_argument("--rounds", type=int, default=60)
    parser.add_argument("--times", type=int, default=8)
    given = parser.parse_args()
    torch.set_grad_enabled(False)
    n = given.size
    layers = torch.nn.Sequential(*[layer for _ in range(4) for layer in (torch.nn.Linear(n, n), torch.nn.ReLU())]).eval()
    x = torch.randn(n, n)
    mine = svod.torch.compile(layers, x)
    cases = {"svod alone": lambda: mine(x), "PyTorch alone": lambda: layers(x), "in turns": lambda: layers(mine(x))}
    samples: dict[str, list[float]] = {name: [] for name in cases}
    for _ in range(given.rounds):
        for name, call in cases.items():
            samples[name].append(seconds_of(call, given.times))
    for name, values in samples.items():
        print(f"{name:14} {1e3 * statistics.median(values):8.3f} ms   least {1e3 * min(values):8.3f} ms")
    ratios = sorted(t / (a + b) for a, b, t in zip(*samples.values(), strict=True))
    least = min(samples["in turns"]) / (min(samples["svod alone"]) + min(samples["PyTorch alone"]))
    print(f"in turns / together: median {statistics.median(ratios):.3f}, of the least times {least:.3f}; "
          f"{torch.get_num_threads()} threads of PyTorch")


if __name__ == "__main__":
    main()
