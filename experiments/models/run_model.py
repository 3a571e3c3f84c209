"""What the model scripts beside this file share: prepare the model, check its output, time it, say where its kernels came from.

Importing this module makes `svod` importable in a checkout that is not installed; where a dependency is missing it ends the process
with the line to paste.
"""
from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
INSTALL_LINE = f"{sys.executable} -m pip install {ROOT}"
TOLERANCE = 1e-4        # of the largest output; float32 over these depths stays below 1e-5
LEAST_RUNS, SECONDS = 20, 1.0

if find_spec("svod") is None:
    sys.path.insert(0, str(ROOT))
_missing = [name for name in ("numpy", "llvmlite", "sqlite_utils", "platformdirs") if find_spec(name) is None]
if _missing:
    sys.exit(f"svod needs {', '.join(_missing)}, which {sys.executable} does not have. Paste this:\n\n    {INSTALL_LINE}\n")

import numpy as np  # noqa: E402  # after the check above

import svod  # noqa: E402
from svod.prepare import sources_of  # noqa: E402

Array = np.ndarray[Any, Any]


def run_model(about: str | None, model: Callable[[svod.Tensor], svod.Tensor], x: Array, reference: Callable[[Array], Array]) -> None:
    """Prepare `model` for the input `x`, check it against `reference`, time it, and print what came out.

    Ends the process with status 1 where the largest difference exceeds `TOLERANCE` times the largest output."""
    parser = argparse.ArgumentParser(description=about, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action=argparse.BooleanOptionalAction, default=True, help="compare the output with NumPy's (default)")
    parser.add_argument("--runs", type=_positive, help=f"timed runs (default: at least {LEAST_RUNS}, for about {SECONDS:g} s)")
    args = parser.parse_args()

    f = svod.jit(model)
    given = svod.Tensor(x)
    start = time.perf_counter()
    y = f(given)
    print(f"prepared in {time.perf_counter() - start:.2f} s")
    plan = f.plans[0]
    print(f"{len(plan.kernels)} kernels: " + ", ".join(f"{n} {source}" for source, n in sorted(sources_of(plan).items())))
    if args.check:
        error = largest_error(y.numpy(), reference(x))
        print(f"largest difference to NumPy: {error:.1e} of the largest output")
        if not error <= TOLERANCE:  # also where it is not a number
            sys.exit(f"the output is wrong: {error:.1e} is above {TOLERANCE:g}")
    times = time_runs(lambda: f(given), args.runs)
    print(f"latency: {1e3 * statistics.median(times):.3f} ms (median of {len(times)} runs, least {1e3 * min(times):.3f} ms)")


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
