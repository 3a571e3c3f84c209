"""LibraryKernels against NumPy and PyTorch: scans, sorts, the k best, scatter. Milliseconds, least of many runs, interleaved.

    python experiments/library_kernels.py [--seconds 1.0]

PyTorch is left out where it is not installed; it runs with as many threads as svod.
"""
from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import numpy as np

from svod import Tensor
from svod.compile.cpu.host import host_target

Run = Callable[[], Any]


def best_of(a: Any, k: int) -> Any:
    """NumPy's nearest: the k largest, in no order."""
    return np.argpartition(a, -k)[:, -k:]


def added(base: Any, index: Any, values: Any) -> Any:
    out = base.copy()
    np.add.at(out, index, values)
    return out


def cases(torch: Any) -> Iterator[tuple[str, Tensor, Run, Run | None]]:
    """(name, svod's lazy result, NumPy's run, PyTorch's run)."""
    rng = np.random.default_rng(0)
    flat = rng.standard_normal(1_000_000).astype(np.float32)
    square = flat.reshape(1000, 1000)

    def peer(name: str, *args: Any, **options: Any) -> Run | None:
        return None if torch is None else partial(getattr(torch, name), *args, **options)
    as_torch = (lambda a: a) if torch is None else torch.from_numpy
    for shape, a, axis in (("1 row of 1M", flat, 0), ("1000 rows", square, 1), ("1000 columns", square, 0)):
        x = as_torch(a)
        yield f"cumsum, {shape}", Tensor(a).cumsum(axis), partial(np.cumsum, a, axis), peer("cumsum", x, axis)
        yield (f"logcumsumexp, {shape}", Tensor(a).logcumsumexp(axis), partial(np.logaddexp.accumulate, a, axis),
               peer("logcumsumexp", x, axis))
    for shape, a in (("1 row of 1M", flat[None]), ("1000 rows", square)):
        x = as_torch(a)
        yield f"sort, {shape}", Tensor(a).sort(1).values, partial(np.sort, a), peer("sort", x)
        yield f"argsort, {shape}", Tensor(a).argsort(), partial(np.argsort, a, kind="stable"), peer("argsort", x, stable=True)
        yield f"topk 10, {shape}", Tensor(a).topk(10).indices, partial(best_of, a, 10), peer("topk", x, 10)
    index, zeros = rng.integers(0, 10_000, flat.size), np.zeros(10_000, np.float32)
    yield ("scatter_add, 1M into 10k", Tensor(zeros).scatter_add(0, Tensor(index), Tensor(flat)), partial(added, zeros, index, flat),
           peer("scatter_add", as_torch(zeros), 0, as_torch(index), as_torch(flat)))


def best(runs: list[Run], seconds: float) -> list[float]:
    """Least milliseconds of each, one after the other in turn."""
    least = [float("inf")] * len(runs)
    for run in runs:
        run()
    end = time.perf_counter() + seconds
    while time.perf_counter() < end:
        for i, run in enumerate(runs):
            start = time.perf_counter()
            run()
            least[i] = min(least[i], 1e3 * (time.perf_counter() - start))
    return least


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--seconds", type=float, default=1.0, help="time per case")
    seconds = parser.parse_args().seconds
    try:
        import torch
        torch.set_num_threads(host_target().threads)
    except ImportError:
        torch = None
    print(f"{'':28}{'svod':>9}{'NumPy':>9}{'PyTorch':>9}")
    for name, tensor, with_numpy, with_torch in cases(torch):
        runs = [tensor.prepare().execute, with_numpy, *([with_torch] if with_torch is not None else [])]
        print(f"{name:28}" + "".join(f"{t:9.2f}" for t in best(runs, seconds)), flush=True)


if __name__ == "__main__":
    main()
