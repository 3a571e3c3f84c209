"""Reference implementations in NumPy of the library kernels (`svod.core.graph.library_kernel`)."""
from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from svod.core.graph.callback import is_callback
from svod.core.graph.library_kernel import scan_accumulator, scattered_shape
from svod.core.ir.dtype import DType
from svod.core.ir.uop import UOp
from svod.core.spec.values import Array, cast, held_dtype, round_to
from svod.errors import UnsupportedError


def reference(u: UOp, operands: Sequence[Array], exact: bool) -> Array:
    """Compute the flat result of a kernel-level library kernel from flat operands, all in held form (`svod.core.spec.values`). `exact`:
    sums and products of floats are accumulated in float64. Raises UnsupportedError for a call of a Python function."""
    if is_callback(u):
        raise UnsupportedError(f"{u.arg[1][1]}, a function of Python, is called by the plan that it is in; it has no value outside of one")
    name, options, shapes = u.arg
    arrays = [np.asarray(a)[:math.prod(s)].reshape(s) for a, s in zip(operands, shapes, strict=True)]
    return apply_library_kernel(name, options, arrays, [p.dtype for p in u.src], u.dtype, exact)


def apply_library_kernel(name: str, options: tuple[Any, ...], arrays: Sequence[Array], types: Sequence[DType], dtype: DType,
                         exact: bool) -> Array:
    """Compute the flat result of a library kernel. `arrays`: the operands in their shapes; `types`: their dtypes; `dtype`: the dtype of the
    result. All arrays are in held form. `exact` as in `reference`."""
    if name == "SCAN":
        result = _scan(options[0], arrays[0], types[0], dtype, exact)
    elif name == "SCATTER":
        result = _scatter(options[0], arrays[0], arrays[1], arrays[2], dtype, exact)
    elif name == "SORT":
        result = np.take_along_axis(arrays[0], sorted_positions(arrays[0], options[0]), axis=1)
    elif name == "ARGSORT":
        result = sorted_positions(arrays[0], options[0])
    elif name == "FOURIER":
        result = _transformed([*np.moveaxis(arrays[0], -1, 0)] if options[1] else arrays[:2], options[0], options[2])
    elif name == "TURNED_FOURIER":
        real, imag, _, *factors = [a.astype(np.float64) for a in arrays]
        products = (real + 1j * imag) * (factors[0] + 1j * factors[1])
        result = _transformed([np.swapaxes(part, 1, 2) for part in (products.real, products.imag)], *options)
    elif name == "UNPAIRED":
        real, imag, cosines, sines = [a.astype(np.float64) for a in arrays]
        z = np.concatenate([real, real[:, :1]], 1) + 1j * np.concatenate([imag, imag[:, :1]], 1)
        mirrored = z[:, ::-1].conj()
        made = 0.5 * (z + mirrored) - 0.5j * (z - mirrored) * (cosines + 1j * sines)
        result = np.stack([made.real, made.imag], -1 if options[0] else 0)
    elif name == "FILTER":
        result = _filtered(arrays[0], arrays[3], arrays[4], *options)
    else:
        result = sorted_positions(arrays[0], options[1])[:, :options[0]]
    return np.asarray(result).astype(held_dtype(dtype), copy=False).reshape(-1)


def sorted_positions(rows: Array, descending: bool) -> Array:
    """Return for each row the positions of its elements in sorted order. The sort is stable; a NaN counts as the largest."""
    if not descending:
        return np.asarray(np.argsort(rows, axis=-1, kind="stable"))
    # Sorting the reversed row in ascending order and reading the result backwards keeps equal elements in their original order.
    return np.asarray(rows.shape[-1] - 1 - np.argsort(rows[:, ::-1], axis=-1, kind="stable")[:, ::-1])


def _transformed(parts: Sequence[Array], inverse: bool, pairs_out: bool) -> Array:
    """Return the unscaled transforms of real and imaginary parts along axis 1, computed in float64."""
    real, imag = [part.astype(np.float64) for part in parts]
    made = np.fft.ifft(real + 1j * imag, axis=1, norm="forward") if inverse else np.fft.fft(real + 1j * imag, axis=1)
    return np.stack([made.real, made.imag], -1 if pairs_out else 0)


def _filtered(x: Array, real: Array, imag: Array, before: int, step: int, results: int) -> Array:
    """Return rows (o, c, m) filtered block by block, computed in float64."""
    n, blocks = real.shape[1], -(-results // step)
    rows = np.pad(x.astype(np.float64), [(0, 0), (0, 0), (before, blocks * step + n)])
    factors = real.astype(np.float64) + 1j * imag
    found = [np.fft.ifft(np.fft.fft(rows[:, :, t * step:t * step + n]) * factors, norm="forward").real[:, :, :step] for t in range(blocks)]
    return np.concatenate(found, 2)[:, :, :results]


_UFUNCS: dict[str, Any] = {"ADD": np.add, "MUL": np.multiply, "MAX": np.maximum, "MIN": np.minimum, "LOGADDEXP": np.logaddexp}


def _scan(combiner: str, x: Array, source: DType, dtype: DType, exact: bool) -> Array:
    if combiner in ("ARGMAX", "ARGMIN"):
        best, at = x[:, 0].copy(), np.zeros((x.shape[0], x.shape[2]), np.int64)
        result = np.zeros(x.shape, np.int64)
        for i in range(1, x.shape[1]):
            wins = (x[:, i] >= best if combiner == "ARGMAX" else x[:, i] <= best) | (x[:, i] != x[:, i])
            best, at = np.where(wins, x[:, i], best), np.where(wins, i, at)
            result[:, i] = at
        return result
    acc = scan_accumulator(combiner, dtype)
    wide = cast(x, source, acc)
    if exact and acc.is_float:
        wide = wide.astype(np.float64)
    total = _UFUNCS[combiner].accumulate(wide, axis=1)
    return cast(round_to(total, acc) if acc.is_float else total, acc, dtype)


def _scatter(reduction: str, base: Array, index: Array, value: Array, dtype: DType, exact: bool) -> Array:
    n = base.shape[1]
    whole = scattered_shape((base.shape, index.shape, value.shape))
    index, value = np.broadcast_to(index.astype(np.int64), whole), np.broadcast_to(value, whole)
    index = np.where(index < 0, index + n, index)
    inside = (index >= 0) & (index < n)
    rows, _, columns = np.nonzero(inside)
    where = (rows, index[inside], columns)
    if reduction == "SET":
        out = base.copy()
        # one by one: NumPy does not define which of several assignments to one element by an index array wins
        for at, v in zip(np.transpose(where), value[inside], strict=True):
            out[tuple(at)] = v
        return out
    wide = exact and dtype.is_float and reduction in ("ADD", "MUL")
    out = base.astype(np.float64) if wide else base.copy()
    _UFUNCS[reduction].at(out, where, value[inside])
    return round_to(out, dtype) if wide else out
