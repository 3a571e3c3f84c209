"""NumPy in its fastest form: with `out=`, and without temporaries if possible."""
from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from importlib.util import find_spec
from typing import Any

import numpy as np

from svod.bench.peers import Array, PreparedPeer, calls
from svod.bench.suites.cases import Case
from svod.errors import UnsupportedError

Step = Callable[[], object]


class NumpyPeer:
    """NumPy as a peer. `threads` limits the threads of its BLAS; everything else in NumPy is single-threaded."""

    name = "numpy"
    version = np.__version__
    outputs = "preallocated where the function takes out="

    def __init__(self, threads: int) -> None:
        if find_spec("threadpoolctl") is not None:      # without this package, BLAS uses all threads that the system allows
            from threadpoolctl import threadpool_limits

            self._limits = threadpool_limits(threads, "blas")

    def prepare(self, case: Case, operands: Sequence[Array]) -> PreparedPeer:
        build = OPERATIONS.get(case.op)
        if build is None:
            raise UnsupportedError(WHY_NOT.get(case.op, f"{case.op} is not written for NumPy"))
        if case.dtype == "bfloat16":
            raise UnsupportedError("NumPy has no bfloat16")
        out = np.zeros(case.out_shape, case.out_dtype)
        through = case.dtype == "float16" and case.op != "matmul"
        step, remark = _through_float32(build, case.options, out, operands) if through else build(case.options, out, *operands)
        return PreparedPeer(calls(step), lambda: out, True, remark)


def _matmul(options: Mapping[str, Any], out: Array, a: Array, b: Array) -> tuple[Step, str]:
    if out.dtype == np.float32:
        return lambda: np.matmul(a, b, out=out), ""
    # in float32: NumPy has no fast product of these types, and sums of 1024 products of int8 are exact in float32
    product = np.zeros(out.shape, np.float32)

    def step() -> None:
        np.matmul(a.astype(np.float32), b.astype(np.float32), out=product)
        np.copyto(out, product, casting="unsafe")
    return step, "converted to float32 and back: NumPy has no fast product of this type"


def _through_float32(build: Callable[..., tuple[Step, str]], options: Mapping[str, Any], out: Array, operands: Sequence[Array]) -> tuple[
        Step, str]:
    """Build an operation that works on float32 copies of its operands and casts the result."""
    wide, result = [np.zeros(a.shape, np.float32) for a in operands], np.zeros(out.shape, np.float32)
    inner, _ = build(options, result, *wide)

    def step() -> None:
        for w, a in zip(wide, operands, strict=True):
            np.copyto(w, a)
        inner()
        np.copyto(out, result, casting="same_kind")
    return step, "converted to float32 and back: NumPy has no fast arithmetic of this type"


def _conv2d(options: Mapping[str, Any], out: Array, x: Array, w: Array) -> tuple[Step, str]:
    p, s, groups, k = options["padding"], options["stride"], options["groups"], w.shape[-1]
    padded = np.zeros((*x.shape[:2], x.shape[2] + 2 * p, x.shape[3] + 2 * p), np.float32)
    inner = padded[:, :, p:p + x.shape[2], p:p + x.shape[3]]
    height, width = out.shape[2:]
    if groups == 1:
        windows = np.lib.stride_tricks.sliding_window_view(padded[0], (k, k), axis=(1, 2))[:, ::s, ::s].transpose(0, 3, 4, 1, 2)
        columns = np.empty((x.shape[1] * k * k, height * width), np.float32)
        weight, flat, target = w.reshape(w.shape[0], -1), out.reshape(out.shape[1], -1), columns.reshape(windows.shape)

        def step() -> None:
            inner[...] = x
            target[...] = windows
            np.matmul(weight, columns, out=flat)
        return step, "im2col and one product"
    product = np.empty(out.shape, np.float32)

    def taps() -> None:
        inner[...] = x
        out.fill(0)
        for i in range(k):
            for j in range(k):
                np.multiply(padded[:, :, i:i + s * height:s, j:j + s * width:s], w[:, 0, i, j][:, None, None], out=product)
                np.add(out, product, out=out)
    return taps, "a product and a sum for each tap"


def _softmax_into(x: Array, out: Array) -> None:
    np.subtract(x, x.max(-1, keepdims=True), out=out)
    np.exp(out, out=out)
    np.divide(out, out.sum(-1, keepdims=True), out=out)


def _layer_norm(options: Mapping[str, Any], out: Array, x: Array, gain: Array, offset: Array) -> tuple[Step, str]:
    square = np.empty_like(out)

    def step() -> None:
        np.subtract(x, x.mean(-1, keepdims=True), out=out)
        np.square(out, out=square)
        np.divide(out, np.sqrt(square.mean(-1, keepdims=True) + np.float32(options["eps"])), out=out)
        np.multiply(out, gain, out=out)
        np.add(out, offset, out=out)
    return step, ""


def _rms_norm(options: Mapping[str, Any], out: Array, x: Array, gain: Array) -> tuple[Step, str]:
    def step() -> None:
        np.square(x, out=out)
        scale = np.sqrt(out.mean(-1, keepdims=True) + np.float32(options["eps"]))
        np.divide(x, scale, out=out)
        np.multiply(out, gain, out=out)
    return step, ""


def _attention(options: Mapping[str, Any], out: Array, q: Array, k: Array, v: Array) -> tuple[Step, str]:
    scores = np.empty((*q.shape[:-1], k.shape[-2]), np.float32)
    scale = np.float32(1.0 / math.sqrt(q.shape[-1]))

    def step() -> None:
        np.matmul(q, k.swapaxes(-1, -2), out=scores)
        np.multiply(scores, scale, out=scores)
        _softmax_into(scores, scores)
        np.matmul(scores, v, out=out)
    return step, ""


def _max_pool2d(options: Mapping[str, Any], out: Array, x: Array) -> tuple[Step, str]:
    p, s, k = options["padding"], options["stride"], options["kernel"]
    padded = np.full((*x.shape[:2], x.shape[2] + 2 * p, x.shape[3] + 2 * p), -np.inf, np.float32)
    inner = padded[:, :, p:p + x.shape[2], p:p + x.shape[3]]
    height, width = out.shape[2:]

    def step() -> None:
        inner[...] = x
        out.fill(-np.inf)
        for i in range(k):
            for j in range(k):
                np.maximum(out, padded[:, :, i:i + s * height:s, j:j + s * width:s], out=out)
    return step, "a maximum for each tap"


def _axpy(options: Mapping[str, Any], out: Array, x: Array, y: Array) -> tuple[Step, str]:
    a = np.float32(options["a"])

    def step() -> None:
        np.multiply(x, a, out=out)
        np.add(out, y, out=out)
    return step, ""


WHY_NOT = {"gelu": "NumPy has no erf", "linear_gelu": "NumPy has no erf",
           "model": "the models have no NumPy version, as NumPy computes their reference"}
OPERATIONS: Mapping[str, Callable[..., tuple[Step, str]]] = {
    "matmul": _matmul,
    "conv2d": _conv2d,
    "softmax": lambda options, out, x: (lambda: _softmax_into(x, out), ""),
    "layer_norm": _layer_norm,
    "rms_norm": _rms_norm,
    "attention": _attention,
    "sum": lambda options, out, x: (lambda: np.sum(x, axis=options["axis"], out=out), ""),
    "max": lambda options, out, x: (lambda: np.max(x, axis=options["axis"], out=out), ""),
    "max_pool2d": _max_pool2d,
    "axpy": _axpy,
    "transpose": lambda options, out, x: (lambda: np.copyto(out, x.T), ""),
    "heads_first": lambda options, out, x: (lambda: np.copyto(out, x.swapaxes(0, 1)), ""),
    "cast": lambda options, out, x: (lambda: np.copyto(out, x, casting="same_kind"), ""),
}
