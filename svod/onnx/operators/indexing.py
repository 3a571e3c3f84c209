"""Gathers, scatters, positions of extrema, and sorting."""
from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from svod.core.ir.dtype import dtypes
from svod.core.ir.variable import Dim
from svod.errors import ShapeError, UnsupportedError
from svod.onnx.registry import Array, OnnxNode, axis_in, operator
from svod.onnx.values import Value
from svod.tensor import Tensor, where


def wrapped(index: Tensor, n: int) -> Tensor:
    """Convert negative positions, which count from the end, to positions from the beginning."""
    return where(index.lt(0), index.add(n), index) if index.dtype.is_signed else index


def checked(node: OnnxNode, index: Tensor, n: Any) -> Tensor:
    """Return `index`. Raises ShapeError if its values are known and one is out of range for an axis of extent n."""
    known = node.walk.known(index)
    if known is not None and not isinstance(n, Dim) and (outside := known[(known < -n) | (known >= n)]).size:
        raise ShapeError(f"the index {outside[0]} is outside of an axis of {n}")
    return index


@operator("Gather", exact=True)
def gather(node: OnnxNode, x: Tensor, index: Tensor) -> Tensor:
    axis = axis_in(node.get("axis", 0), x.ndim)
    return x.take(checked(node, index, x.shape[axis]), axis)


@operator("GatherElements", 11, exact=True)
def gather_elements(node: OnnxNode, x: Tensor, index: Tensor) -> Tensor:
    axis = axis_in(node.get("axis", 0), x.ndim)
    return x.gather(axis, checked(node, index, x.shape[axis]))


@operator("GatherND", 11, exact=True)
def gather_nd(node: OnnxNode, x: Tensor, index: Tensor) -> Tensor:
    batch = node.get("batch_dims", 0)
    chosen = batch + index.shape[-1]
    if chosen > x.ndim:
        raise ShapeError(f"tuples of {index.shape[-1]} positions in {x.ndim - batch} axes")
    # an axis whose extent depends on a variable can be merged only as the outermost one
    order = sorted(range(chosen), key=lambda a: not isinstance(x.shape[a], Dim))
    sizes, rest = [x.shape[a] for a in order], x.shape[chosen:]
    rows = x.permute(*order, *range(chosen, x.ndim)).reshape(math.prod(sizes), *rest)
    return rows.take(flat_positions(node, index, sizes, batch, order), 0)


def flat_positions(node: OnnxNode, index: Tensor, sizes: Sequence[int], batch: int = 0, order: Sequence[int] | None = None) -> Tensor:
    """Convert tuples of positions (last axis of `index`) to positions in flattened axes of extents `sizes`. The tuple's elements are
    positions along axes 0, 1, …, or along `order`. The first `batch` axes are also axes of `index`: a tuple has no elements for them."""
    places = index.shape[:-1]
    flat = Tensor.zeros(*places, dtype="int64")
    for a, n in zip(range(len(sizes)) if order is None else order, sizes, strict=True):
        if a < batch:
            at = Tensor.arange(n).reshape(*(n if place == a else 1 for place in range(len(places))))
        else:
            at = wrapped(checked(node, index[..., a - batch].cast("int64"), n), n)
        flat = flat.mul(n).add(at)
    return flat


@operator("Scatter", exact=True)
@operator("ScatterElements", 11, exact=True)
def scatter_elements(node: OnnxNode, x: Tensor, index: Tensor, updates: Tensor) -> Tensor:
    axis = axis_in(node.get("axis", 0), x.ndim)
    return put(node, x, axis, wrapped(checked(node, index, x.shape[axis]), x.shape[axis]).cast("int64"), updates)


_SCATTER_REDUCTIONS = {"add": "sum", "mul": "prod", "max": "amax", "min": "amin"}


def put(node: OnnxNode, x: Tensor, axis: int, at: Tensor, updates: Tensor) -> Tensor:
    """Write updates to x along an axis, or combine them with the old values by the attribute `reduction`. The sum of bools is their
    disjunction, the product their conjunction."""
    reduction = node.get("reduction", "none")
    if reduction == "none":
        return x.scatter(axis, at, updates)
    if x.dtype is dtypes.bool:
        reduction = {"add": "max", "mul": "min"}.get(reduction, reduction)
    return x.scatter_reduce(axis, at, updates, _SCATTER_REDUCTIONS[reduction])


@operator("ScatterND", 11, exact=True)
def scatter_nd(node: OnnxNode, x: Tensor, index: Tensor, updates: Tensor) -> Tensor:
    depth = index.shape[-1]
    rest, inner = x.shape[depth:], int(np.prod(x.shape[:depth], dtype=np.int64))
    width = int(np.prod(rest, dtype=np.int64))
    flat = flat_positions(node, index, x.shape[:depth]).reshape(-1, 1).broadcast_to((int(np.prod(index.shape[:-1], dtype=np.int64)), width))
    rows, values = x.reshape(inner, width), updates.reshape(-1, width)
    return put(node, rows, 0, flat, values).reshape(x.shape)


@operator("TensorScatter", 24, exact=True)
def tensor_scatter(node: OnnxNode, past: Tensor, update: Tensor, at: Tensor | None = None) -> Tensor:
    """Write values into a cache along an axis, from each batch element's own position on."""
    axis, n = axis_in(node.get("axis", -2), past.ndim), update.shape[node.get("axis", -2)]
    most = past.shape[axis]
    start = Tensor.zeros(past.shape[0], dtype="int64") if at is None else at.cast("int64")
    places = start.reshape(-1, 1).add(Tensor.arange(n, dtype="int64"))
    if node.get("mode", "linear") == "circular":
        places = places.remainder(most)
    shape = [past.shape[0] if i == 0 else n if i == axis else 1 for i in range(past.ndim)]
    return past.scatter(axis, places.reshape(shape).broadcast_to(update.shape), update)


@operator("OneHot", 9, known=("depth",), exact=True)
def one_hot(node: OnnxNode, index: Tensor, depth: Array, values: Tensor) -> Tensor:
    n, axis = int(depth.reshape(-1)[0]), node.get("axis", -1)
    if n < 1:
        raise ShapeError(f"a depth of {n}")
    at = axis_in(axis, index.ndim + 1)
    whole = wrapped(index.cast("int64"), n).unsqueeze(at)
    places = Tensor.arange(n, dtype="int64").reshape(*(-1 if i == at else 1 for i in range(index.ndim + 1)))
    return where(whole.eq(places), values[1], values[0])


# -- order ---------------------------------------------------------------------------------------------------------------------
def arg_extreme(name: str) -> None:
    @operator(name, exact=True)
    def compute(node: OnnxNode, x: Tensor) -> Tensor:
        axis, keep = axis_in(node.get("axis", 0), x.ndim), bool(node.get("keepdims", 1))
        find = Tensor.argmax if name == "ArgMax" else Tensor.argmin
        if not node.get("select_last_index", 0):
            return find(x, axis, keepdim=keep)
        return find(x.flip(axis), axis, keepdim=keep).neg().add(x.shape[axis] - 1)


arg_extreme("ArgMax")
arg_extreme("ArgMin")


@operator("TopK", 1, exact=True)
def top_k_old(node: OnnxNode, x: Tensor) -> tuple[Tensor, Tensor]:
    found = x.topk(node.need("k"), node.get("axis", -1))
    return found.values, found.indices


@operator("TopK", 10, known=("k",), exact=True)
def top_k(node: OnnxNode, x: Tensor, k: Array) -> tuple[Tensor, Tensor]:
    found = x.topk(int(k.reshape(-1)[0]), node.get("axis", -1), bool(node.get("largest", 1)))
    return found.values, found.indices.cast("int64")


@operator("NonZero", 9, raw=True)
def non_zero(node: OnnxNode, x: Value) -> Array:
    """The positions of the elements that are not 0, with shape (axes, elements)."""
    known = node.walk.known(x)
    if known is None:
        raise UnsupportedError(f"{node}: the shape of its result depends on values that are not known while the "
                               "model is loaded; fallback=\"onnxruntime\" runs it and the nodes that depend on it on the host")
    return np.array(np.nonzero(np.atleast_1d(known)))[:known.ndim]
