"""Seconds from the start of the imports to the first result, nothing kept: svod and other libraries in turns.

    python experiments/first_call_beside.py resnet50.onnx bert.onnx
    python experiments/first_call_beside.py --libraries svod-torch,inductor resnet50
    OTHER/bin/python experiments/first_call_beside.py --libraries onnxruntime,openvino resnet50.onnx

Each call has a process and empty caches of its own. Libraries `svod`, `onnxruntime` and `openvino` take ONNX files; `svod-torch` and
`inductor` take models of the suite torch, whose making does not count. Inputs are zeros; a dimension without a number is 1. A library is
imported from the Python that runs this file.
"""
from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

CACHES = {"SVOD_OBJECT_CACHE": "objects", "SVOD_TUNE_DB": "tune.db", "TORCHINDUCTOR_CACHE_DIR": "inductor", "TRITON_CACHE_DIR": "triton"}


def with_onnxruntime(path: str) -> None:
    import numpy as np
    import onnxruntime
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = len(os.sched_getaffinity(0))
    session = onnxruntime.InferenceSession(path, options, providers=["CPUExecutionProvider"])
    types = {"tensor(float)": np.float32, "tensor(int64)": np.int64, "tensor(int32)": np.int32, "tensor(bool)": np.bool_}
    session.run(None, {i.name: np.zeros([d if isinstance(d, int) else 1 for d in i.shape], types[i.type]) for i in session.get_inputs()})


def with_openvino(path: str) -> None:
    import numpy as np
    import openvino
    compiled: Any = openvino.Core().compile_model(path, "CPU")
    shapes = [[d.get_length() if d.is_static else 1 for d in i.partial_shape] for i in compiled.inputs]
    compiled([np.zeros(s, i.element_type.to_dtype()) for s, i in zip(shapes, compiled.inputs, strict=True)])


def with_svod(path: str) -> None:
    import svod.onnx
    from svod.onnx.run import make_feed
    model = svod.onnx.load(path)
    model(make_feed(model, {}, {}, ["svod-tune", path]))


def with_torch(name: str, backend: str) -> float:
    """Compile and call a model; returns the seconds in which it was made."""
    import torch

    from svod.bench.suites.torch_modules import REAL, make
    begun = time.perf_counter()
    module, args, kwargs = make(name, REAL)
    made = time.perf_counter() - begun
    with torch.inference_mode():
        if backend == "svod":
            import svod.torch
            svod.torch.compile(module, *args, **kwargs)(*args, **kwargs)
        else:
            torch.compile(module, backend=backend)(*args, **kwargs)
    return made


LIBRARIES = {"svod": with_svod, "onnxruntime": with_onnxruntime, "openvino": with_openvino,
             "svod-torch": lambda name: with_torch(name, "svod"), "inductor": lambda name: with_torch(name, "inductor")}


def first_call(library: str, model: str) -> float:
    """Seconds of a first call in a process of its own."""
    with tempfile.TemporaryDirectory() as folder:
        env = {**os.environ, **{name: f"{folder}/{path}" for name, path in CACHES.items()}}
        done = subprocess.run([sys.executable, __file__, "--libraries", library, "--here", model], env=env, check=True, capture_output=True,
                              text=True)
    return float(done.stdout.split()[-1])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="+", metavar="MODEL")
    parser.add_argument("--libraries", default="svod,onnxruntime")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--here", action="store_true", help="one call of one library in this process")
    args = parser.parse_args()
    names = args.libraries.split(",")
    if args.here:
        begun = time.perf_counter()
        made = LIBRARIES[names[0]](args.models[0]) or 0.0
        print(time.perf_counter() - begun - made)
        return
    for model in args.models:
        times: dict[str, list[float]] = {name: [] for name in names}
        for _ in range(args.rounds):
            for name in names:
                times[name].append(first_call(name, model))
        found = [f"{name} {statistics.median(s):.2f} s (least {min(s):.2f})" for name, s in times.items()]
        print(f"{Path(model).stem:20} {'   '.join(found)}", flush=True)


if __name__ == "__main__":
    main()
