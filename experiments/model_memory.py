"""The memory that a model of 1 GB takes: an ONNX file, with its data in the file or beside it, or a PyTorch module.

    python -m experiments.model_memory onnx                    data in the file
    python -m experiments.model_memory onnx-external           data beside the file
    python -m experiments.model_memory torch                   torch.compile(model, backend="svod")
    python -m experiments.model_memory torch-export            svod.torch.compile(model, x)
    python -m experiments.model_memory onnxruntime             the same file by onnxruntime

The model is a chain of square layers of 16 MB each. A child process loads and runs it. It prints the largest resident memory of the
process above that of its imports, split as Linux does: pages of the file, which the system takes back when it needs them, and memory of
the process's own. `log`: what svod says about it.
"""
from __future__ import annotations

import argparse
import logging
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np

SIDE = 2048             # side of a layer's square float32 matrix of 16 MB
MB = 2 ** 20
DOORS = ("onnx", "onnx-external", "torch", "torch-export", "onnxruntime")


def write_model(path: Path, layers: int, external: bool) -> None:
    """A file with layers of random weights."""
    import onnx
    from onnx import helper, numpy_helper

    rng, nodes, weights = np.random.default_rng(0), [], []
    for i in range(layers):
        w = rng.standard_normal((SIDE, SIDE), np.float32) / np.float32(SIDE ** 0.5)
        weights.append(numpy_helper.from_array(w, f"w{i}"))
        nodes += [helper.make_node("MatMul", [f"x{i}", f"w{i}"], [f"h{i}"], f"/layer{i}/MatMul"),
                  helper.make_node("Relu", [f"h{i}"], [f"x{i + 1}"], f"/layer{i}/Relu")]
    info = [helper.make_tensor_value_info(n, 1, ["n", SIDE]) for n in ("x0", f"x{layers}")]
    graph = helper.make_graph(nodes, "chain", info[:1], info[1:], weights)
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=10)
    onnx.save_model(model, str(path), save_as_external_data=external, location="weights.bin" if external else None)


def resident() -> dict[str, float]:
    """MB resident now, by kind, and the most so far."""
    fields = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text(encoding="ascii").splitlines() if ":" in line)
    return {name: int(fields[key].split()[0]) / 1024 for name, key in (("own", "RssAnon"), ("file", "RssFile"), ("most", "VmHWM"))}


def say(what: str, base: dict[str, float]) -> None:
    now = resident()
    print(f"{what:26} own {now['own'] - base['own']:7.0f} MB   pages of files {now['file'] - base['file']:7.0f} MB   "
          f"most together {now['most'] - base['most']:7.0f} MB", flush=True)


def run_onnx(path: Path, rows: int) -> None:
    import svod.onnx

    base = resident()
    start = time.perf_counter()
    model = svod.onnx.load(path)
    say("loaded", base)
    for _ in range(3):
        y = model(np.ones((rows, SIDE), np.float32))
        say(f"run, {time.perf_counter() - start:.1f} s", base)
    print(f"{len(model.plans[0].kernels)} kernels, mean {y.mean():.4f}")


def run_onnxruntime(path: Path, rows: int) -> None:
    import onnxruntime

    base = resident()
    start = time.perf_counter()
    session = onnxruntime.InferenceSession(str(path), providers=["CPUExecutionProvider"])
    say("loaded", base)
    for _ in range(3):
        [y] = session.run(None, {"x0": np.ones((rows, SIDE), np.float32)})
        say(f"run, {time.perf_counter() - start:.1f} s", base)
    print(f"mean {y.mean():.4f}")


def run_torch(layers: int, rows: int, export: bool) -> None:
    import torch

    import svod.torch.backend

    torch.compile(torch.nn.Linear(4, 4).eval(), backend="svod")(torch.ones(1, 4))
    base = resident()
    start = time.perf_counter()
    made = [torch.nn.Linear(SIDE, SIDE, bias=False) for _ in range(layers)]
    model = torch.nn.Sequential(*[m for layer in made for m in (layer, torch.nn.ReLU())]).eval().requires_grad_(False)
    say("module made", base)
    x = torch.ones(rows, SIDE)
    run: Any = svod.torch.compile(model, x) if export else torch.compile(model, backend="svod")
    say("compiled", base)
    with torch.inference_mode():
        for _ in range(3):
            y = run(x)
            say(f"run, {time.perf_counter() - start:.1f} s", base)
        print(f"largest difference to PyTorch: {(y - model(x)).abs().max() / y.abs().max():.1e}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("door", choices=DOORS)
    parser.add_argument("--layers", type=int, default=64, help="of 16 MB each")
    parser.add_argument("--rows", type=int, default=1, help="the batch: one reads weights as they are, many pack them")
    parser.add_argument("--file", help=argparse.SUPPRESS)       # the child's
    args = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="log: %(message)s")
    if args.door.startswith("torch"):
        return run_torch(args.layers, args.rows, args.door == "torch-export")
    if args.file:
        return (run_onnxruntime if args.door == "onnxruntime" else run_onnx)(Path(args.file), args.rows)
    with tempfile.TemporaryDirectory(dir=".") as folder:
        path = Path(folder) / "model.onnx"
        write_model(path, args.layers, args.door == "onnx-external")
        words = [sys.executable, "-m", "experiments.model_memory", args.door, "--rows", str(args.rows), "--file", str(path)]
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        sys.exit(subprocess.run(words, check=False).returncode)


if __name__ == "__main__":
    main()
