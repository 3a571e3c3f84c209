"""The reference results of the cases in NumPy, computed in float64 or int64 directly from the formulas.

    reference(case, operands) → the array that all results are compared with
"""
from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from svod.bench.suites.cases import Array, Case, load_model
from svod.core.graph.buffer import bfloat16_bits_to_float32

Result = Array | list[Array]        # the result of a kernel, or the outputs of a whole model


def reference(case: Case, operands: Sequence[Array]) -> Array:
    """The result of a case for operands drawn by `Case.draw`."""
    wide = [widen(a, o.dtype) for a, o in zip(operands, case.operands, strict=True)]
    return np.asarray(REFERENCES[case.op](case.options, *wide)).reshape(case.out_shape)


def widen(array: Array, dtype: str) -> Array:
    """Convert an operand or a result of `dtype` to float64 or int64. A bfloat16 `array` is uint16 with its bits, or float32."""
    if dtype == "bfloat16" and array.dtype == np.uint16:
        array = bfloat16_bits_to_float32(array)
    return array.astype(np.float64 if array.dtype.kind == "f" else np.int64)


def largest_error(got: Array, wanted: Array) -> float:
    """The error max |got - wanted| / max |wanted|; infinite if the shapes differ or a value is NaN."""
    if got.shape != wanted.shape:
        return math.inf
    if not got.size:
        return 0.0
    with np.errstate(invalid="ignore"):
        difference = float(np.abs(got - wanted).max())
    scale = float(np.abs(wanted).max())
    return math.inf if math.isnan(difference) else difference / scale if scale else difference


def difference(got: Result, wanted: Result, dtype: str) -> float:
    """The `largest_error` of a result of `dtype`; for a whole model, the largest over all outputs, each compared in its own dtype."""
    if isinstance(got, list) != isinstance(wanted, list) or (isinstance(got, list) and len(got) != len(wanted)):
        return math.inf
    if isinstance(got, list):
        return max((largest_error(widen(g, g.dtype.name), widen(w, w.dtype.name)) for g, w in zip(got, wanted, strict=True)), default=0.0)
    assert not isinstance(wanted, list)
    return largest_error(widen(got, dtype), wanted)


def _matmul(options: Mapping[str, Any], a: Array, b: Array) -> Array:
    if a.dtype.kind == "i":     # products of int8 are exact in float64, and a hundred times faster
        return np.asarray(np.matmul(a.astype(np.float64), b.astype(np.float64)).astype(np.int64))
    return np.asarray(np.matmul(a, b))


def _erf(x: Array) -> Array:
    """The error function with an error below 1.2e-7 (Numerical Recipes, 6.2.2: a Chebyshev fit of log(erfc(z)·exp(z²)) in t = 2/(2+z))."""
    t = 2.0 / (2.0 + np.abs(x))
    terms = (-1.26551223, 1.00002368, 0.37409196, 0.09678418, -0.18628806, 0.27886807, -1.13520398, 1.48851587, -0.82215223, 0.17087277)
    total = np.full_like(t, terms[-1])
    for c in terms[-2::-1]:
        total = total * t + c
    rest = t * np.exp(-x * x + total)
    return np.asarray(np.where(x >= 0, 1.0 - rest, rest - 1.0))


def _gelu(options: Mapping[str, Any], x: Array) -> Array:
    return 0.5 * x * (1.0 + _erf(x / math.sqrt(2.0)))


def _conv2d(options: Mapping[str, Any], x: Array, w: Array) -> Array:
    p, s, groups, k = options["padding"], options["stride"], options["groups"], w.shape[-1]
    padded = np.pad(x, ((0, 0), (0, 0), (p, p), (p, p)))
    # axes: image, channel, output row and column, kernel row and column
    windows = np.lib.stride_tricks.sliding_window_view(padded, (k, k), axis=(2, 3))[:, :, ::s, ::s]
    parts = []
    for window, weight in zip(np.split(windows, groups, axis=1), np.split(w, groups), strict=True):
        parts.append(np.tensordot(window, weight, ((1, 4, 5), (1, 2, 3))).transpose(0, 3, 1, 2))
    return np.concatenate(parts, axis=1)


def _softmax(options: Mapping[str, Any], x: Array) -> Array:
    e = np.exp(x - x.max(-1, keepdims=True))
    return np.asarray(e / e.sum(-1, keepdims=True))


def _layer_norm(options: Mapping[str, Any], x: Array, gain: Array, offset: Array) -> Array:
    return np.asarray((x - x.mean(-1, keepdims=True)) / np.sqrt(x.var(-1, keepdims=True) + options["eps"]) * gain + offset)


def _rms_norm(options: Mapping[str, Any], x: Array, gain: Array) -> Array:
    return np.asarray(x / np.sqrt(np.square(x).mean(-1, keepdims=True) + options["eps"]) * gain)


def _attention(options: Mapping[str, Any], q: Array, k: Array, v: Array) -> Array:
    return np.asarray(_softmax(options, q @ k.swapaxes(-1, -2) / math.sqrt(q.shape[-1])) @ v)


def _max_pool2d(options: Mapping[str, Any], x: Array) -> Array:
    p, s, k = options["padding"], options["stride"], options["kernel"]
    padded = np.pad(x, ((0, 0), (0, 0), (p, p), (p, p)), constant_values=-np.inf)
    windows = np.lib.stride_tricks.sliding_window_view(padded, (k, k), axis=(2, 3))[:, :, ::s, ::s]
    return np.asarray(windows.max((4, 5)))


REFERENCES: Mapping[str, Callable[..., Any]] = {
    "matmul": _matmul,
    "linear_gelu": lambda options, x, w, b: _gelu(options, x @ w.T + b),
    "conv2d": _conv2d,
    "softmax": _softmax,
    "layer_norm": _layer_norm,
    "rms_norm": _rms_norm,
    "attention": _attention,
    "sum": lambda options, x: x.sum(options["axis"]),
    "max": lambda options, x: x.max(options["axis"]),
    "max_pool2d": _max_pool2d,
    "gelu": _gelu,
    "axpy": lambda options, x, y: options["a"] * x + y,
    "transpose": lambda options, x: x.T,
    "heads_first": lambda options, x: x.swapaxes(0, 1),
    "cast": lambda options, x: x,
    "model": lambda options, x: load_model(options["script"], options["kind"]).reference(x),
}
