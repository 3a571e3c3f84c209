"""Window functions and Fourier transforms."""
from __future__ import annotations

import math

import numpy as np

from svod.onnx.operators.elementwise import svod_type
from svod.onnx.registry import Array, OnnxNode, axis_in, operator
from svod.onnx.values import tensor_as
from svod.tensor import Tensor, fft


def window(name: str, weights: tuple[float, ...]) -> None:
    @operator(name, 17, known=("size",))
    def compute(node: OnnxNode, size: Array) -> Tensor:
        n = int(np.asarray(size).reshape(-1)[0])
        kind = svod_type(node.get("output_datatype", 1), node)
        steps = n if node.get("periodic", 1) else n - 1
        angle = 2 * math.pi * np.arange(n) / max(1, steps)
        values = sum((-1) ** k * w * np.cos(k * angle) for k, w in enumerate(weights))
        return tensor_as(np.asarray(values), kind)


window("HannWindow", (0.5, 0.5))
window("HammingWindow", (25 / 46, 21 / 46))
window("BlackmanWindow", (0.42, 0.5, 0.08))


def transformed(x: Tensor, axis: int, n: int, inverse: bool, onesided: bool) -> Tensor:
    """A DFT along an axis of (…, parts), where parts are 1 (real) or 2 (real and imaginary). The result is (…, 2), or (…, 1) for the
    real inverse of a half spectrum."""
    if onesided and inverse:
        return fft.irfft(x, n, axis).unsqueeze(-1).cast(x.dtype)
    if onesided:
        return fft.rfft(x[..., 0], n, axis).cast(x.dtype)
    whole = x if x.shape[-1] == 2 else x.pad([(0, 0)] * (x.ndim - 1) + [(0, 1)])
    # for inverses, the backend tests expect NumPy's rounding errors, up to 1e-7, where the exact result is 0
    return (fft.ifft(whole, n, axis, host=True) if inverse else fft.fft(whole, n, axis)).cast(x.dtype)


@operator("DFT", 17, known=("length",))
def dft_old(node: OnnxNode, x: Tensor, length: Array | None = None) -> Tensor:
    return transform(node, x, axis_in(node.get("axis", 1), x.ndim), length)


@operator("DFT", 20, known=("length", "axis"))
def dft(node: OnnxNode, x: Tensor, length: Array | None = None, axis: Array | None = None) -> Tensor:
    return transform(node, x, axis_in(-2 if axis is None else int(np.asarray(axis).reshape(-1)[0]), x.ndim), length)


def transform(node: OnnxNode, x: Tensor, axis: int, length: Array | None) -> Tensor:
    inverse, onesided = bool(node.get("inverse", 0)), bool(node.get("onesided", 0))
    have = x.shape[axis]
    n = int(np.asarray(length).reshape(-1)[0]) if length is not None else 2 * (have - 1) if inverse and onesided else have
    return transformed(x, axis, n, inverse, onesided)


@operator("STFT", 17, known=("step", "length"))
def stft(node: OnnxNode, x: Tensor, step: Array, window: Tensor | None = None, length: Array | None = None) -> Tensor:
    hop = int(np.asarray(step).reshape(-1)[0])
    n = int(np.asarray(length).reshape(-1)[0]) if length is not None else window.shape[0] if window is not None else x.shape[1]
    frames = x.movedim(1, -1).unfold(-1, n, hop)                         # (batch, parts, frames, n)
    if window is not None:
        frames = frames.mul(window)
    return transformed(frames.permute(0, 2, 3, 1), 2, n, False, bool(node.get("onesided", 1)))


@operator("MelWeightMatrix", 17, known=("bins", "length", "rate", "low", "high"))
def mel_weights(node: OnnxNode, bins: Array, length: Array, rate: Array, low: Array, high: Array) -> Tensor:
    count, n, samples = int(bins), int(length), int(rate)
    spectrum = n // 2 + 1

    def mel(hertz: float) -> float: return 2595 * math.log10(1 + hertz / 700)
    first, last = mel(float(low)), mel(float(high))
    edges = first + np.arange(count + 2) * (last - first) / (count + 2)
    places = np.floor((n + 1) * 700 * (10 ** (edges / 2595) - 1) / samples).astype(np.int64)
    out = np.zeros((spectrum, count))
    for i in range(count):
        lower, centre, upper = places[i:i + 3]
        if centre == lower:
            out[centre, i] = 1
        for j in range(lower, centre + 1):
            out[j, i] = 1 if centre == lower else (j - lower) / (centre - lower)
        for j in range(centre, upper):
            out[j, i] = (upper - j) / (upper - centre)
    return tensor_as(out, svod_type(node.get("output_datatype", 1), node))
