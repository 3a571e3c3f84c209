"""Routines: loops that carry something from one position to the next, which no nest of independent iterations is. Scans, sorting, scatter.

    CUSTOM_FUNCTION(x, …)   arg = (name, options)                          graph: operands and result have the shapes below
    CUSTOM_FUNCTION(PARAM, …)   arg = (name, options, operand shapes)      kernel: the value of its only STORE, which has no ranges

| name | options | operands | result |
| --- | --- | --- | --- |
| SCAN | combiner | x (o, n, k) | (o, n, k): along n, what the positions up to each one combine to |
| ARGSORT | descending | x (r, n) | (r, n): positions in order; equal elements keep theirs, a NaN is the largest |
| TOPK | k, largest | x (r, n) | (r, k): positions of the k first in that order |
| SCATTER | reduction | base (o, n, k), index (o, m, k), value (o, m, k) | base with the values put in: y[o, index[o, j, k], k] |

A CUSTOM_FUNCTION may also be a function of Python (`svod.core.callback`).

A routine is a kernel of its own with one form: operands are buffers, nothing is fused into it, there are no opts and nothing to search
(`svod.compile.routines` writes its loops down). SCAN costs one combination per element, ARGSORT n·log2(n) comparisons per row (merge
sort), TOPK n·log2(k), SCATTER one combination per value. This file says what they mean, in NumPy, and what they cost.

Combiners of SCAN: ADD, MUL, MAX, MIN, LOGADDEXP; ARGMAX and ARGMIN give the position of the running extremum, the last of equals; a
NaN is one. Reductions of SCATTER: SET (the last wins), ADD, MUL, MAX, MIN. A negative index counts from the end; what is still outside
is left out.
"""
from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from svod.core.callback import callback_shape, is_callback
from svod.core.dtype import DType, accumulator
from svod.core.uop import Ops, UOp
from svod.core.values import Array, cast, held_dtype, round_to
from svod.errors import DTypeError, ShapeError, UnsupportedError

Shape = tuple[int, ...]
Options = tuple[Any, ...]

SCANS = ("ADD", "MUL", "MAX", "MIN", "LOGADDEXP", "ARGMAX", "ARGMIN")
SCATTERS = ("SET", "ADD", "MUL", "MAX", "MIN")
MOST_ROW = 2 ** 31 - 1     # positions within a row are kept as int32 while it is sorted

_RANKS: dict[str, tuple[int, ...]] = {"SCAN": (3,), "ARGSORT": (2,), "TOPK": (2,), "SCATTER": (3, 3, 3)}


def result_shape(name: str, options: Options, shapes: Sequence[Shape], types: Sequence[DType]) -> Shape:
    """The shape of a routine's result. Raises ShapeError, DTypeError and UnsupportedError for what there is no such routine for."""
    if name not in _RANKS:
        raise UnsupportedError(f"CUSTOM_FUNCTION {name!r}: svod knows {', '.join(_RANKS)}")
    if tuple(len(s) for s in shapes) != _RANKS[name] or any(0 in s for s in shapes):
        raise ShapeError(f"{name} of {' and '.join(map(str, shapes))}: it takes operands with {_RANKS[name]} axes that have elements")
    if name == "SCAN":
        _known(name, options[0], SCANS)
        return shapes[0]
    if name == "SCATTER":
        base, index, value = shapes
        _known(name, options[0], SCATTERS)
        if index != value or (base[0], base[2]) != (index[0], index[2]):
            raise ShapeError(f"SCATTER into {base} at {index} of {value}: (o, n, k) and twice (o, m, k) are needed")
        if not types[1].is_int or types[0] != types[2]:
            raise DTypeError(f"SCATTER of {types[2].name} into {types[0].name} at {types[1].name}: one dtype, and integers as positions")
        return base
    rows, n = shapes[0]
    if n > MOST_ROW:
        raise ShapeError(f"{name} of {shapes[0]}: rows have at most {MOST_ROW} elements")
    if name == "ARGSORT":
        return shapes[0]
    k = options[0]
    if not 1 <= k <= n:
        raise ShapeError(f"TOPK of {shapes[0]} with k={k}: rows have {n} elements")
    return rows, k


def _known(name: str, option: str, options: Sequence[str]) -> None:
    if option not in options:
        raise UnsupportedError(f"{name} with {option!r}: svod knows {', '.join(options)}")


def shape_of_routine(u: UOp, shapes: Sequence[Shape]) -> Shape:
    """The shape of a CUSTOM_FUNCTION of the graph level, whose operands have `shapes`."""
    if is_callback(u):
        return callback_shape(u, shapes)
    name, options = u.arg
    return result_shape(name, options, shapes, [s.dtype for s in u.src])


def routine_of(ast: UOp) -> UOp | None:
    """The CUSTOM_FUNCTION that a kernel is; None for a kernel that is a nest of loops."""
    value = ast.src[0].src[1] if ast.op is Ops.SINK and len(ast.src) == 1 and ast.src[0].op is Ops.STORE else None
    return value if value is not None and value.op is Ops.CUSTOM_FUNCTION else None


# -- what they mean -----------------------------------------------------------------------------------
def reference(u: UOp, operands: Sequence[Array], exact: bool) -> Array:
    """The flat result of a routine of the kernel level over flat operands, all in held form (`svod.core.values`). `exact`: sums and
    products of floats are accumulated in float64. Raises UnsupportedError for a function of Python."""
    if is_callback(u):
        raise UnsupportedError(f"{u.arg[1][1]}, a function of Python, is called by the plan that it is in; it has no value outside of one")
    name, options, shapes = u.arg
    arrays = [np.asarray(a)[:math.prod(s)].reshape(s) for a, s in zip(operands, shapes, strict=True)]
    types = [p.dtype for p in u.src]
    if name == "SCAN":
        result = _scan(options[0], arrays[0], types[0], u.dtype, exact)
    elif name == "SCATTER":
        result = _scatter(options[0], arrays[0], arrays[1], arrays[2], u.dtype, exact)
    elif name == "ARGSORT":
        result = sorted_positions(arrays[0], options[0])
    else:
        result = sorted_positions(arrays[0], options[1])[:, :options[0]]
    return np.asarray(result).astype(held_dtype(u.dtype), copy=False).reshape(-1)


def sorted_positions(rows: Array, descending: bool) -> Array:
    """Stable positions of each row's elements in order, a NaN as the largest."""
    if not descending:
        return np.asarray(np.argsort(rows, axis=-1, kind="stable"))
    # of the reversed row the ascending order, read backwards, keeps the first of equals first
    return np.asarray(rows.shape[-1] - 1 - np.argsort(rows[:, ::-1], axis=-1, kind="stable")[:, ::-1])


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


def scan_accumulator(combiner: str, dtype: DType) -> DType:
    """The type a scan with a result of `dtype` is computed in."""
    return dtype if combiner in ("MAX", "MIN") else accumulator(dtype)


def _scatter(reduction: str, base: Array, index: Array, value: Array, dtype: DType, exact: bool) -> Array:
    n = base.shape[1]
    index = index.astype(np.int64)
    index = np.where(index < 0, index + n, index)
    inside = (index >= 0) & (index < n)
    rows, _, columns = np.nonzero(inside)
    where = (rows, index[inside], columns)
    if reduction == "SET":
        out = base.copy()
        # NumPy leaves open which of several assignments to one element wins
        for i, v in enumerate(value[inside]):
            out[where[0][i], where[1][i], where[2][i]] = v
        return out
    wide = exact and dtype.is_float and reduction in ("ADD", "MUL")
    out = base.astype(np.float64) if wide else base.copy()
    _UFUNCS[reduction].at(out, where, value[inside])
    return round_to(out, dtype) if wide else out


# -- what they cost -----------------------------------------------------------------------------------
def operations(u: UOp) -> tuple[int, int]:
    """(operations, those of them that are transcendental functions) of a routine of the kernel level."""
    name, options, shapes = u.arg
    elements = math.prod(shapes[0])
    if name == "SCAN":
        pair = options[0] == "LOGADDEXP"
        return elements * (4 if pair else 1), elements * 2 if pair else 0
    if name == "SCATTER":
        return math.prod(shapes[1]), 0
    rows, n = shapes[0]
    if name == "ARGSORT":
        return rows * n * merge_passes(n), 0
    k = options[0]
    return rows * (n * max(1, merge_passes(k)) + 2 * k * merge_passes(k)), 0


def merge_passes(n: int) -> int:
    """How often a merge sort of n elements goes over them: ⌈log2 n⌉."""
    return (n - 1).bit_length()

