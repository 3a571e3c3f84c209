"""ONNX models in float32 and under the policy "fast": milliseconds, medians of interleaved runs, and the errors on other inputs.

    python experiments/fast_models.py model.onnx … [--max-error 1e-2] [--seconds 10] [--size NAME=N …]

The kernels to round are chosen by the first input; the errors are those of `UNSEEN` others, each the largest difference to the plan in
float32 over the largest value of the output. Inputs are random: numbers of a normal distribution, positions of a vocabulary, masks of
ones. Weights of a file are as it has them. OpenVINO runs the same models, with its hints f32 and bf16, after svod; it is left out where it
is not installed.
"""
from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

import svod.onnx
from svod import PrepareConfig
from svod.bench.timer import SPIN_DOWN_SECONDS
from svod.compile.cpu.host import host_target
from svod.onnx.model import Model
from svod.tune.fast.trial import relative_error

Array = np.ndarray[Any, Any]
Run = Callable[[Mapping[str, Array]], Sequence[Array]]
UNSEEN = 7              # inputs by which no kernel was chosen
VOCABULARY = 1000       # positions are below this


def made_up(model: Model, sizes: Mapping[str, int], seed: int) -> dict[str, Array]:
    """Random inputs; a free dimension that `sizes` does not name has one element."""
    rng = np.random.default_rng(seed)

    def one(name: str, dtype: str, shape: Sequence[int | str | None]) -> Array:
        own = [n if isinstance(n, int) else sizes.get(str(n), 1) for n in shape]
        if "mask" in name:
            return np.ones(own, dtype)
        return rng.standard_normal(own).astype(dtype) if dtype.startswith("float") else rng.integers(0, VOCABULARY, own).astype(dtype)
    return {i.name: one(i.name, i.dtype, i.shape or ()) for i in model.inputs}


def svod_runs(file: str, most: float) -> tuple[Model, dict[str, Run]]:
    own = PrepareConfig.from_env()
    models = {"float32": svod.onnx.load(file, config=replace(own, numerics="float32", max_error=None)),
              "fast": svod.onnx.load(file, config=replace(own, numerics="fast", max_error=most))}

    def run(model: Model) -> Run:
        def call(given: Mapping[str, Array]) -> Sequence[Array]:
            found = model(**given)
            return list(found) if isinstance(found, (list, tuple)) else [found]
        return call
    return models["float32"], {name: run(model) for name, model in models.items()}


def openvino_runs(file: str) -> dict[str, Run]:
    try:
        import openvino
    except ImportError:
        return {}
    core = openvino.Core()
    hints = {"INFERENCE_NUM_THREADS": host_target().threads, "PERFORMANCE_HINT": "LATENCY"}

    def run(precision: str) -> Run:
        request = core.compile_model(file, "CPU", {**hints, "INFERENCE_PRECISION_HINT": precision}).create_infer_request()
        return lambda given: [np.array(v) for v in request.infer(dict(given)).values()]
    return {"OpenVINO f32": run("f32"), "OpenVINO bf16": run("bf16")}


def race(runs: Mapping[str, Run], given: Mapping[str, Array], warm: float, seconds: float) -> dict[str, list[float]]:
    """The seconds of runs, in turns. The first `warm` seconds are not counted: kernels are replaced by their own forms after first runs."""
    found: dict[str, list[float]] = {name: [] for name in runs}
    start = time.perf_counter()
    while (now := time.perf_counter() - start) < warm + seconds:
        for name, run in runs.items():
            time.sleep(SPIN_DOWN_SECONDS)
            run(given)          # the caches hold what this one reads
            begin = time.perf_counter()
            run(given)
            if now >= warm:
                found[name].append(time.perf_counter() - begin)
    return found


def measure(file: str, options: argparse.Namespace) -> None:
    model, runs = svod_runs(file, options.max_error)
    given = made_up(model, dict(options.size), 0)
    times = race(runs, given, options.warm, options.seconds)
    peers = openvino_runs(file)
    times |= race(peers, given, 1.0, options.seconds / 2) if peers else {}
    errors = dict.fromkeys([*runs, *peers], 0.0)
    for seed in range(1, 1 + UNSEEN):
        unseen = made_up(model, dict(options.size), seed)
        exact = [np.array(y) for y in runs["float32"](unseen)]
        for name, run in {**runs, **peers}.items():
            errors[name] = max(errors[name], *map(relative_error, run(unseen), exact))
    each = [f"{name} {statistics.median(t) * 1e3:.2f} ({errors[name]:.1e})" for name, t in times.items()]
    ratio = statistics.median(a / b for a, b in zip(times["float32"], times["fast"], strict=True))
    print(f"{file}: {ratio:.2f}×; ms (largest error): {', '.join(each)}", flush=True)


def size(text: str) -> tuple[str, int]:
    name, _, number = text.partition("=")
    return name, int(number)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", nargs="+", help="ONNX files")
    parser.add_argument("--max-error", type=float, default=1e-2, help="as svod-tune's")
    parser.add_argument("--seconds", type=float, default=10.0, help="for timing svod; OpenVINO has half of it")
    parser.add_argument("--warm", type=float, default=20.0, help="seconds before it, in which kernels are chosen and compiled")
    parser.add_argument("--size", type=size, action="append", default=[], metavar="NAME=N", help="size of a free dimension")
    options = parser.parse_args()
    for file in options.files:
        measure(file, options)


if __name__ == "__main__":
    main()
