"""Common parts of the model scripts beside this file: prepare the model, check its output, time it, say where its kernels came from.

Importing this module makes `svod` importable in a checkout that is not installed; where a dependency is missing it ends the process
with the line to paste.
"""
from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections import Counter
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
INSTALL_LINE = f"{sys.executable} -m pip install {ROOT}"
TOLERANCE = 1e-4        # relative to the largest output; float32 over these depths stays below 1e-5
LEAST_RUNS, SECONDS = 20, 1.0

if find_spec("svod") is None:
    sys.path.insert(0, str(ROOT))
_needed = ("numpy", "llvmlite", "sqlite_utils", "platformdirs", "rich", "jinja2", "msgspec", "click")
_missing = [name for name in _needed if find_spec(name) is None]
if _missing:
    sys.exit(f"svod needs {', '.join(_missing)}, which {sys.executable} does not have. Paste this:\n\n    {INSTALL_LINE}\n")

import numpy as np  # noqa: E402  # after the check above

import svod  # noqa: E402
from svod.compile.plan.execution_plan import ExecutionPlan  # noqa: E402

Array = np.ndarray[Any, Any]


def run_model(about: str | None, model: Callable[[svod.Tensor], svod.Tensor], x: Array, reference: Callable[[Array], Array],
              tokens: int | None = None) -> None:
    """Prepare `model` for the input `x`, check it against `reference`, time it, and print what came out. `tokens`: the axis of `x` whose
    extent may be a variable (`--symbolic`).

    Ends the process with status 1 where the largest difference exceeds `TOLERANCE` times the largest output."""
    parser = argparse.ArgumentParser(description=about, formatter_class=argparse.RawDescriptionHelpFormatter)
    if tokens is not None:
        parser.add_argument("--symbolic", action="store_true", help="one plan for every number of tokens, run at several of them")
        parser.add_argument("--buckets", type=_numbers, default=(), metavar="N,N,…",
                            help="with --symbolic: kernels of their own up to each of these numbers of tokens")
    parser.add_argument("--check", action=argparse.BooleanOptionalAction, default=True, help="compare the output with NumPy's (default)")
    parser.add_argument("--runs", type=_positive, help=f"timed runs (default: at least {LEAST_RUNS}, for about {SECONDS:g} s)")
    args = parser.parse_args()
    if tokens is not None and args.symbolic:
        run_at_lengths(model, x, reference, tokens, args)
        return
    if tokens is not None and args.buckets:
        parser.error("--buckets says nothing without --symbolic")
    f = svod.jit(model)
    given = svod.Tensor(x)
    start = time.perf_counter()
    y = f(given)
    print(f"prepared in {time.perf_counter() - start:.2f} s")
    svod.complete()
    print(_kernels(f.plans[0]))
    if args.check:
        print(f"largest difference to NumPy: {_checked(y, reference(x)):.1e} of the largest output")
    times = time_runs(lambda: f(given), args.runs)
    print(f"latency: {1e3 * statistics.median(times):.3f} ms (median of {len(times)} runs, least {1e3 * min(times):.3f} ms)")


def run_at_lengths(model: Callable[[svod.Tensor], svod.Tensor], x: Array, reference: Callable[[Array], Array], axis: int,
                   args: argparse.Namespace) -> None:
    """`run_model` with a variable for the extent of an axis: one plan, checked and timed at several values, each after the other."""
    most = x.shape[axis]
    n = svod.Variable("n", 1, most, buckets=args.buckets)
    before = (slice(None),) * axis
    f = svod.jit(lambda x, n: model(x[(*before, slice(n))]))
    given = svod.Tensor(x)
    start = time.perf_counter()
    f(given, n.bind(most))
    print(f"prepared in {time.perf_counter() - start:.2f} s for 1 to {most} tokens")
    svod.complete()
    for length in sorted({1, most // 8, most // 4 + 1, most // 2, most - 1, most} - {0}):
        bound = n.bind(length)
        y = f(given, bound)
        told = f"{length:5} tokens: "
        if args.check:
            told += f"largest difference to NumPy {_checked(y, reference(x[(*before, slice(length))])):.1e}, "
        times = time_runs(lambda bound=bound: f(given, bound), args.runs)      # type: ignore[misc]
        print(f"{told}latency {1e3 * statistics.median(times):.3f} ms; {_kernels(f.plans[0])}")
    print(f"plans: {len(f.plans)}")


def _kernels(plan: ExecutionPlan) -> str:
    sources = Counter(k.opts_source for k in plan.kernels)
    return f"{len(plan.kernels)} kernels: " + ", ".join(f"{n} {source}" for source, n in sorted(sources.items()))


def _checked(y: svod.Tensor, wanted: Array) -> float:
    """The largest error; ends the process where it is too large."""
    error = largest_error(y.numpy(), wanted)
    if not error <= TOLERANCE:  # also where it is not a number
        sys.exit(f"the output is wrong: {error:.1e} is above {TOLERANCE:g}")
    return error


def _numbers(text: str) -> tuple[int, ...]:
    return tuple(int(n) for n in text.split(","))


def _positive(text: str) -> int:
    n = int(text)
    if n < 1:
        raise argparse.ArgumentTypeError("at least one run")
    return n


def largest_error(got: Array, wanted: Array) -> float:
    """max |got - wanted| / max |wanted|, in float64."""
    if got.shape != wanted.shape:
        raise ValueError(f"the model gives {got.shape}, the reference {wanted.shape}")
    return float(np.abs(got.astype(np.float64) - wanted).max() / np.abs(wanted).max())


def time_runs(run: Callable[[], object], runs: int | None) -> list[float]:
    """Seconds of each of `runs` calls, after one that does not count; None: at least `LEAST_RUNS`, for about `SECONDS`."""
    run()
    times: list[float] = []
    end = time.perf_counter() + SECONDS
    while len(times) < (runs or LEAST_RUNS) or (runs is None and time.perf_counter() < end):
        start = time.perf_counter()
        run()
        times.append(time.perf_counter() - start)
    return times


def glorot(rng: np.random.Generator, *shape: int, gain: float = 1.0) -> Array:
    """Normal float32 weights of variance gain² / (product of all extents but the first), so that activations keep their size."""
    fan_in = int(np.prod(shape[1:]))
    return rng.standard_normal(shape, dtype=np.float32) * np.float32(gain / np.sqrt(fan_in))
