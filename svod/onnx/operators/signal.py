"""Windows and Fourier transforms, as products with matrices of sines and cosines that are known."""
from __future__ import annotations

import math

import numpy as np

from svod.core.ir.dtype import dtypes
from svod.onnx.operators.elementwise import svod_type
from svod.onnx.registry import Array, Node, operator
from svod.onnx.values import numpy_dtype
from svod.tensor import Tensor


def window(name: str, weights: tuple[float, ...]) -> None:
    @operator(name, 17, known=("size",))
    def compute(node: Node, size: Array) -> Tensor:
        n = int(np.asarray(size).reshape(-1)[0])
        kind = svod_type(node.get("output_datatype", 1), node)
        steps = n if node.get("periodic", 1) else n - 1
        angle = 2 * math.pi * np.arange(n) / max(1, steps)
        values = sum((-1) ** k * w * np.cos(k * angle) for k, w in enumerate(weights))
        return Tensor(np.asarray(values).astype(numpy_dtype(kind)))


window("HannWindow", (0.5, 0.5))
window("HammingWindow", (25 / 46, 21 / 46))
window("BlackmanWindow", (0.42, 0.5, 0.08))


def transform(x: Tensor, axis: int, n: int, inverse: bool, onesided: bool) -> Tensor:
    """A DFT along an axis of (…, parts), where parts are the real or the real and the imaginary ones: (…, 2)."""
    t = x.movedim(axis, -2)
    have = t.shape[-2]
    if have > n:
        t = t.narrow(-2, 0, n)
    elif have < n:
        t = t.pad([(0, 0)] * (t.ndim - 2) + [(0, n - have), (0, 0)])
    bins = n // 2 + 1 if onesided else n
    angle = 2 * math.pi * np.outer(np.arange(n), np.arange(bins)) / n * (1 if inverse else -1)
    kind = numpy_dtype(x.dtype if x.dtype is not dtypes.bfloat16 else dtypes.float32)
    cos, sin = Tensor(np.cos(angle).astype(kind)), Tensor(np.sin(angle).astype(kind))
    real = t[..., 0]
    re, im = real.matmul(cos), real.matmul(sin)
    if t.shape[-1] == 2:
        imaginary = t[..., 1]
        re, im = re.sub(imaginary.matmul(sin)), im.add(imaginary.matmul(cos))
    out = Tensor.stack([re, im], -1)
    if inverse:
        out = out.div(float(n))
    return out.movedim(-2, axis).cast(x.dtype)


@operator("DFT", 17, known=("length",))
def dft_old(node: Node, x: Tensor, length: Array | None = None) -> Tensor:
    axis = node.get("axis", 1) % x.ndim
    return _dft(node, x, axis, length)


@operator("DFT", 20, known=("length", "axis"))
def dft(node: Node, x: Tensor, length: Array | None = None, axis: Array | None = None) -> Tensor:
    return _dft(node, x, (-2 if axis is None else int(np.asarray(axis).reshape(-1)[0])) % x.ndim, length)


def _dft(node: Node, x: Tensor, axis: int, length: Array | None) -> Tensor:
    inverse, onesided = bool(node.get("inverse", 0)), bool(node.get("onesided", 0))
    if inverse and onesided:
        half = x.shape[axis]
        n = 2 * (half - 1) if length is None else int(np.asarray(length).reshape(-1)[0])
        t = x.movedim(axis, -2).narrow(-2, 0, n // 2 + 1)
        mirrored = t.narrow(-2, 1, (n - 1) // 2).flip(t.ndim - 2)
        mirrored = mirrored.mul(Tensor(np.array([1, -1], numpy_dtype(x.dtype))))
        whole = Tensor.cat([t, mirrored], -2)
        return transform(whole, whole.ndim - 2, n, True, False)[..., :1].movedim(-2, axis)
    n = x.shape[axis] if length is None else int(np.asarray(length).reshape(-1)[0])
    return transform(x, axis, n, inverse, onesided)


@operator("STFT", 17, known=("step", "length"))
def stft(node: Node, x: Tensor, step: Array, window: Tensor | None = None, length: Array | None = None) -> Tensor:
    hop = int(np.asarray(step).reshape(-1)[0])
    n = int(np.asarray(length).reshape(-1)[0]) if length is not None else window.shape[0] if window is not None else x.shape[1]
    frames = x.movedim(1, -1).unfold(-1, n, hop)                         # (batch, parts, frames, n)
    if window is not None:
        frames = frames.mul(window)
    parts = frames.permute(0, 2, 3, 1)                                   # (batch, frames, n, parts)
    return transform(parts, 2, n, False, bool(node.get("onesided", 1)))


@operator("MelWeightMatrix", 17, known=("bins", "length", "rate", "low", "high"))
def mel_weights(node: Node, bins: Array, length: Array, rate: Array, low: Array, high: Array) -> Tensor:
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
    return Tensor(out.astype(numpy_dtype(svod_type(node.get("output_datatype", 1), node))))
