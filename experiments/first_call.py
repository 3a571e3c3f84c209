"""Seconds of the first call of a model in a new process, part by part: imports, reading the file or tracing, walking the graph, preparing.

    SVOD_TUNE_DB=t.db python experiments/first_call.py model.onnx [--dim sequence=128]
    SVOD_TUNE_DB=t.db python experiments/first_call.py --torch resnet18

Run it twice: the first run searches nothing, and leaves compiled kernels in the object cache; the second shows a start from warm caches.
Tune in between to start from a warm database. `--torch` takes the models of `experiments/torch_models.py`.
"""
from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))


class Parts:
    """Seconds by name, in the order of the names' first use."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}

    def timed(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """The function, whose time is counted under `name`."""
        def call(*args: Any, **kwargs: Any) -> Any:
            start = time.perf_counter()
            try:
                return function(*args, **kwargs)
            finally:
                self.seconds[name] = self.seconds.get(name, 0.0) + time.perf_counter() - start
        return call

    def rest(self, name: str, whole: str, *parts: str) -> None:
        """Count what is in `whole` and in none of `parts` under `name`."""
        self.seconds[name] = self.seconds.pop(whole) - sum(self.seconds.get(p, 0.0) for p in parts)

    def show(self, title: str) -> None:
        print(title)
        for name, seconds in self.seconds.items():
            print(f"  {name:44} {seconds * 1e3:10.1f} ms")


def of_file(path: str, dims: list[str]) -> None:
    parts = Parts()

    def imports() -> Any:
        import svod.onnx
        import svod.onnx.run
        return svod.onnx
    onnx = parts.timed("import svod.onnx", imports)()
    from svod.onnx.run import dimensions, make_feed
    from svod.onnx.walk import Walk
    model = parts.timed("read and check the file", onnx.load)(path, dims=dimensions(dims))
    feed = make_feed(model, {}, {}, ["svod-tune", path])
    Walk.run = parts.timed("walk the graph", Walk.run)      # type: ignore[method-assign]
    parts.timed("first call", model)(feed)
    parts.timed("second call", model)(feed)
    parts.rest("prepare the plan and run it", "first call", "walk the graph")
    parts.show(f"{path}: {sum(len(p.kernels) for p in model.plans)} kernels")


def of_module(name: str) -> None:
    parts = Parts()

    def imports() -> Any:
        import torch
        return torch
    torch = parts.timed("import torch", imports)()

    def more() -> Any:
        import svod.torch.backend
        return svod.torch
    backend = parts.timed("import svod.torch", more)()
    import svod.torch.functions as functions
    from svod.bench.suites.torch_modules import SMALL, make
    module, args, kwargs = make(name, SMALL)
    functions.make_plan = parts.timed("translate the graph, prepare the plan", functions.make_plan)     # type: ignore[assignment]
    fast = torch.compile(module, backend="svod")
    with torch.inference_mode():
        parts.timed("first call", fast)(*args, **kwargs)
        parts.timed("second call", fast)(*args, **kwargs)
    parts.rest("trace by Dynamo and AOT autograd, and run", "first call", "translate the graph, prepare the plan")
    parts.show(f"{name}: {sum(g.kernels for g in backend.report().graphs)} kernels")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", help="an ONNX file, or with --torch the name of a model")
    parser.add_argument("--torch", action="store_true")
    parser.add_argument("--dim", action="append", default=[], metavar="NAME=SIZE")
    args = parser.parse_args()
    if args.torch:
        of_module(args.model)
    else:
        of_file(args.model, args.dim)


if __name__ == "__main__":
    main()
