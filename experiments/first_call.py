"""Seconds of the first call of a model in a new process, part by part: imports, reading or exporting, schedule, chains, code, the run.

    python experiments/first_call.py --cold --torch resnet50 densenet121 efficientnet_b0 bert
    python experiments/first_call.py --cold model.onnx [--dim sequence=128]
    SVOD_TUNE_DB=t.db python experiments/first_call.py model.onnx

Each model has a process of its own. With `--cold`, its object cache and its database are empty; without, the first run leaves compiled
kernels in the object cache, and the second shows a start from warm caches. Tune in between to start from a warm database. `--torch` takes
models of the suite torch.

A part counts its own seconds, without those of parts inside it: of wall time in the thread that calls the model, and of processor time in
all threads.
"""
from __future__ import annotations

import argparse
import functools
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections import defaultdict
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

# function → the part that counts its time
PARTS = {
    "svod.torch.functions.make_plan": "translate the graph",
    "svod.onnx.walk.Walk.run": "walk the graph",
    "svod.prepare.with_constants_turned": "compute rearranged constants",
    "svod.prepare.schedule_of": "schedule",
    "svod.prepare.make_unbound_plan": "kernels of the schedule",
    "svod.tune.plan_chains.choose_each": "choose chains",
    "svod.tune.first_forms.FirstForms.choose": "choose chains",
    "svod.compile.plan.compiler.Compiler.heuristic_choice": "choose chains",
    "svod.compile.plan.compiler.lower_kernel": "lower",
    "svod.compile.plan.stages.spec_of": "check LINEAR",
    "svod.compile.cpu.backend.render": "render LLVM IR",
    "svod.compile.cpu.backend.compile_object": "LLVM",
    "svod.compile.llvm.loaded._Batch.load": "load code",
    "svod.prepare.build_plan": "build the plan",
    "svod.compile.plan.execution_plan.ExecutionPlan.execute": "run",
}


class Parts:
    """Own wall and processor seconds by name, in the order of the names' first use."""

    def __init__(self) -> None:
        self.wall: dict[str, float] = defaultdict(float)
        self.processor: dict[str, float] = defaultdict(float)
        self._frames = threading.local()
        self._caller = threading.get_ident()

    def timed(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """The function, whose time is counted under `name`."""
        @functools.wraps(function, updated=())
        def call(*args: Any, **kwargs: Any) -> Any:
            frames = self._frames.__dict__.setdefault("open", [])
            frames.append([0.0, 0.0])
            self.processor[name] += 0.0         # parts are shown in the order in which they begin
            wall, processor = time.perf_counter(), time.thread_time()
            try:
                return function(*args, **kwargs)
            finally:
                wall, processor = time.perf_counter() - wall, time.thread_time() - processor
                inner_wall, inner_processor = frames.pop()
                self.processor[name] += processor - inner_processor
                if threading.get_ident() == self._caller:
                    self.wall[name] += wall - inner_wall
                if frames:
                    frames[-1][0] += wall
                    frames[-1][1] += processor
        return call

    def watch(self, path: str, name: str) -> None:
        """Count the time of a function of svod under `name`."""
        *names, last = path.split(".")
        owner: Any = None
        for at in range(len(names), 0, -1):
            try:
                owner = functools.reduce(getattr, names[at:], import_module(".".join(names[:at])))
                break
            except ModuleNotFoundError:
                continue
        setattr(owner, last, self.timed(name, getattr(owner, last)))

    def show(self, title: str, begun: float) -> None:
        print(f"{title}\n  {'':44} {'wall':>10}    {'processor':>10}")
        for name, processor in self.processor.items():
            print(f"  {name:44} {self.wall[name] * 1e3:10.1f} ms {processor * 1e3:10.1f} ms")
        print(f"  {'all, since the imports began':44} {(time.perf_counter() - begun) * 1e3:10.1f} ms {time.process_time() * 1e3:10.1f} ms")


def of_file(path: str, dims: list[str]) -> None:
    begun, parts = time.perf_counter(), Parts()
    onnx = parts.timed("import svod.onnx", import_module)("svod.onnx")
    from svod.onnx.run import dimensions, make_feed
    model = parts.timed("read and check the file", onnx.load)(path, dims=dimensions(dims))
    feed = make_feed(model, {}, {}, ["svod-tune", path])
    for function, name in PARTS.items():
        if not function.startswith("svod.torch."):
            parts.watch(function, name)
    parts.timed("rest of the first call", model)(feed)
    parts.show(f"{path}: {sum(len(p.kernels) for p in model.plans)} kernels", begun)


def of_module(name: str) -> None:
    begun, parts = time.perf_counter(), Parts()
    torch = parts.timed("import torch", import_module)("torch")
    backend = parts.timed("import svod.torch", import_module)("svod.torch")
    from svod.bench.suites.torch_modules import REAL, make
    module, args, kwargs = parts.timed("make the model", make)(name, REAL)
    for function, part in PARTS.items():
        if not function.startswith("svod.onnx."):
            parts.watch(function, part)
    with torch.inference_mode():
        fast = parts.timed("export by PyTorch", backend.compile)(module, *args, **kwargs)
        parts.timed("rest of the first call", fast)(*args, **kwargs)
    parts.show(f"{name}: {sum(g.kernels for g in backend.report().graphs)} kernels", begun)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="+", metavar="MODEL", help="ONNX files, or with --torch names of models")
    parser.add_argument("--torch", action="store_true")
    parser.add_argument("--cold", action="store_true", help="nothing is kept from an earlier run")
    parser.add_argument("--dim", action="append", default=[], metavar="NAME=SIZE")
    args = parser.parse_args()
    if len(args.models) == 1 and not args.cold:
        of_module(args.models[0]) if args.torch else of_file(args.models[0], args.dim)
        return
    given = [*["--torch"] * args.torch, *[x for d in args.dim for x in ("--dim", d)]]
    for model in args.models:
        with tempfile.TemporaryDirectory() as folder:
            kept = {"SVOD_TUNE_DB": f"{folder}/tune.db", "SVOD_OBJECT_CACHE": f"{folder}/objects"} if args.cold else {}
            subprocess.run([sys.executable, __file__, *given, model], env={**os.environ, **kept}, check=True)


if __name__ == "__main__":
    main()
