"""Architectures that people have, run by torch.compile(backend="svod") and by PyTorch: are the numbers the same, in how many graphs, with
how many operations that PyTorch runs, and how long is a call.

    python -m experiments.torch_models                       every model of torchvision, transformers, and some of its own
    python -m experiments.torch_models resnet18 gpt2         some
    python -m experiments.torch_models --beam 4 --budget 60  kernels are searched first

The table is that of the benchmarks (`svod/bench/suites/torch_modules.py`), at a small scale: all run in minutes. Times are medians
of a few calls, both in one process, and say little on a busy machine.
"""
from __future__ import annotations

import argparse
import gc
import json
import logging
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

import torch

from svod.bench.suites.torch_modules import MODULE_MAKERS, SMALL, compiled, leaves, make

# -- one model ------------------------------------------------------------------------------------------

def measure(name: str, options: dict[str, Any], calls: int) -> dict[str, Any]:
    """The row of a model."""
    import svod.torch
    from svod.torch.functions import functions

    torch._dynamo.reset()
    torch.manual_seed(0)
    gc.collect()
    before = set(functions)
    module, args, kwargs = make(name, SMALL)
    torch._dynamo.utils.counters.clear()
    fast = compiled(module, backend="svod", options=options)
    with torch.inference_mode():
        expected = module(*args, **kwargs)
        start = time.perf_counter()
        got = fast(*args, **kwargs)
        first = time.perf_counter() - start
        error = difference(got, expected)
        svod.complete()
        error = max(error, difference(fast(*args, **kwargs), expected))
        eager, mine = (seconds_of(lambda f=f: f(*args, **kwargs), calls) for f in (module, fast))
    graphs = [g for g in svod.torch.report().graphs if g.function not in before]
    return {"model": name, "error": error, "graphs": len(graphs), "operations": sum(g.operations for g in graphs),
            "in PyTorch": sorted({m.name for g in graphs for m in g.missing}) + sorted({r for g in graphs for r in g.refused}),
            "breaks": sum(torch._dynamo.utils.counters["graph_break"].values()),
            "plans": sum(g.plans for g in graphs), "first": first, "eager": eager, "svod": mine}


def difference(got: Any, expected: Any) -> float:
    """The largest difference of any output, relative to its largest element."""
    worst = 0.0
    for a, b in zip(leaves(got), leaves(expected), strict=True):
        assert a.shape == b.shape and a.dtype == b.dtype
        if b.numel():
            worst = max(worst, ((a.double() - b.double()).abs().max() / b.double().abs().max().clamp(min=1e-30)).item())
    return worst


def seconds_of(call: Callable[[], Any], calls: int) -> float:
    """Median seconds of a call."""
    times = []
    for _ in range(calls):
        start = time.perf_counter()
        call()
        times.append(time.perf_counter() - start)
    return statistics.median(times)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="*", metavar="MODEL", help=", ".join(MODULE_MAKERS))
    parser.add_argument("--beam", type=int, default=0)
    parser.add_argument("--budget", type=float, default=60)
    parser.add_argument("--calls", type=int, default=9)
    parser.add_argument("--json")
    given = parser.parse_args()
    logging.getLogger("svod.torch").setLevel(logging.ERROR)
    options = {"beam": given.beam, "budget": given.budget} if given.beam else {}
    rows, failed = [], 0
    print("| model | difference | graphs | operations | in PyTorch | plans | first call s | eager ms | svod ms |\n"
          "| --- | --- | --- | --- | --- | --- | --- | --- | --- |")
    for name in given.models or MODULE_MAKERS:
        try:
            row = measure(name, options, given.calls)
        except Exception as error:      # a model that does not run is a row too
            print(f"| {name} | {type(error).__name__}: {str(error).splitlines()[0][:100]} | | | | | | | |", flush=True)
            failed += 1
            continue
        rows.append(row)
        failed += row["error"] > 1e-3
        print(f"| {name} | {row['error']:.0e} | {row['graphs']} | {row['operations']} | {', '.join(row['in PyTorch']) or '-'} | "
              f"{row['plans']} | {row['first']:.1f} | {1e3 * row['eager']:.1f} | {1e3 * row['svod']:.1f} |", flush=True)
    print(f"\n{len(rows)} models, {sum(r['error'] <= 1e-3 for r in rows)} with the numbers of PyTorch, "
          f"{sum(not r['in PyTorch'] for r in rows)} without an operation that PyTorch runs")
    if given.json:
        with open(given.json, "w", encoding="utf-8") as file:
            json.dump(rows, file, indent=1)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
