"""Views and copies: reshape, transpose, slices, concatenation, padding."""
from __future__ import annotations

import math
from typing import Any

import numpy as np

from svod.core.graph.shapes import broadcast_shapes
from svod.core.ir.dtype import dtypes
from svod.errors import ShapeError, UnsupportedError
from svod.onnx.registry import Array, OnnxNode, axes_in, operator
from svod.onnx.values import Value, shape_of, size, value_of_sizes
from svod.tensor import Tensor, where


@operator("Identity", raw=True)
def identity(node: OnnxNode, x: Value) -> Value:
    return x


@operator("Shape", raw=True)
def shape(node: OnnxNode, x: Value) -> Value:
    return value_of_sizes(shape_of(x)[slice(node.get("start", 0), node.get("end"))])


@operator("Size", raw=True)
def count(node: OnnxNode, x: Value) -> Value:
    return value_of_sizes(math.prod(shape_of(x)))


def ints(node: OnnxNode, name: str, given: Array | None) -> list[int] | None:
    """The integers of `given`, or of the attribute `name` that older versions have instead; None if both are absent."""
    value = node.get(name) if given is None else given
    return None if value is None else [size(n) for n in np.atleast_1d(np.asarray(value))]


@operator("Reshape", known=("shape",), exact=True, narrow=True)
def reshape(node: OnnxNode, x: Tensor, shape: Array | None = None) -> Tensor:
    wanted = ints(node, "shape", shape)
    if wanted is None:
        raise ShapeError("it has no shape")
    return x.reshape([x.shape[i] if n == 0 and not node.get("allowzero", 0) else n for i, n in enumerate(wanted)])


@operator("Flatten", exact=True)
def flatten(node: OnnxNode, x: Tensor) -> Tensor:
    axis = node.get("axis", 1)
    axis = axis + x.ndim if axis < 0 else axis
    return x.reshape(math.prod(x.shape[:axis]), math.prod(x.shape[axis:]))


@operator("Transpose", exact=True, narrow=True)
def transpose(node: OnnxNode, x: Tensor) -> Tensor:
    return x.permute(node.get("perm") or tuple(reversed(range(x.ndim))))


@operator("Squeeze", known=("axes",), exact=True)
def squeeze(node: OnnxNode, x: Tensor, axes: Array | None = None) -> Tensor:
    wanted = ints(node, "axes", axes)
    if wanted is None:
        return x.squeeze()
    places = axes_in(wanted, x.ndim)
    if any(x.shape[a] != 1 for a in places):
        raise ShapeError(f"squeeze of {x.shape} over the axes {wanted}: their extents must be 1")
    return x.reshape([n for i, n in enumerate(x.shape) if i not in places])


@operator("Unsqueeze", known=("axes",), exact=True)
def unsqueeze(node: OnnxNode, x: Tensor, axes: Array | None = None) -> Tensor:
    wanted = ints(node, "axes", axes) or []
    rank = x.ndim + len(wanted)
    places, sizes = axes_in(wanted, rank), iter(x.shape)
    return x.reshape([1 if i in places else next(sizes) for i in range(rank)])


@operator("Expand", 8, known=("shape",), exact=True)
def expand(node: OnnxNode, x: Tensor, shape: Array) -> Tensor:
    return x.broadcast_to(broadcast_shapes("expand", x.shape, tuple(map(size, shape))))


@operator("Tile", 6, known=("repeats",), exact=True)
def tile(node: OnnxNode, x: Tensor, repeats: Array) -> Tensor:
    return x.repeat([size(n) for n in repeats])


@operator("Concat", exact=True)
def concat(node: OnnxNode, *xs: Tensor) -> Tensor:
    return Tensor.cat(list(xs), node.get("axis", 1))


@operator("Split", known=("sizes",), exact=True)
def split(node: OnnxNode, x: Tensor, sizes: Array | None = None) -> tuple[Tensor, ...]:
    axis, wanted, count = node.get("axis", 0), ints(node, "split", sizes), node.get("num_outputs", len(node.asked))
    n = x.shape[axis]
    if wanted is None:
        part = -(-n // count)
        wanted = [max(0, min(part, n - i * part)) for i in range(count)]
    return tuple(x.split(wanted, axis))


@operator("Slice", 1, exact=True)
def slice_old(node: OnnxNode, x: Tensor) -> Tensor:
    return sliced(x, node.need("starts"), node.need("ends"), node.get("axes"), None)


@operator("Slice", 10, known=("starts", "ends", "axes", "steps"), exact=True)
def slice_new(node: OnnxNode, x: Tensor, starts: Array, ends: Array, axes: Array | None = None, steps: Array | None = None) -> Tensor:
    return sliced(x, starts, ends, axes, steps)


def sliced(x: Tensor, starts: Any, ends: Any, axes: Any, steps: Any) -> Tensor:
    index: list[slice] = [slice(None)] * x.ndim
    places = axes_in(range(len(starts)) if axes is None else axes, x.ndim)
    if not len(starts) == len(ends) == len(places) == len(places if steps is None else steps):
        raise ShapeError(f"{len(starts)} starts, {len(ends)} ends, {len(places)} axes and {len(places if steps is None else steps)} steps")
    for i, axis in enumerate(places):
        index[axis] = part_of(x.shape[axis], size(starts[i]), size(ends[i]), 1 if steps is None else int(steps[i]))
    return x[tuple(index)]


def part_of(n: Any, start: Any, end: Any, step: int) -> slice:
    """The positions along an axis of extent n that Slice selects. With a negative step, `start` is clamped to the elements of the
    axis; with Python's slices, a start before the first element selects nothing. Raises ShapeError for a step of 0."""
    if step == 0:
        raise ShapeError("a step of 0")
    if step > 0:
        return slice(start, end, step)
    first = min(max(start + n if start < 0 else start, 0), n - 1)
    last = min(max(end + n if end < 0 else end, -1), n - 1)
    return slice(0, 0) if n == 0 else slice(first, last if last >= 0 else None, step)


@operator("Pad", 1, exact=True)
def pad_old(node: OnnxNode, x: Tensor) -> Tensor:
    pads = node.get("pads") or node.need("paddings")
    return padded(node, x, pads, node.get("value", 0.0), list(range(x.ndim)))


@operator("Pad", 11, known=("pads", "value", "axes"), exact=True)
def pad_new(node: OnnxNode, x: Tensor, pads: Array, value: Array | None = None, axes: Array | None = None) -> Tensor:
    places = list(range(x.ndim)) if axes is None else axes_in(axes, x.ndim)
    return padded(node, x, pads, 0 if value is None or not value.size else value.item(), places)


def padded(node: OnnxNode, x: Tensor, pads: Any, value: Any, axes: list[int]) -> Tensor:
    if len(pads) != 2 * len(axes):
        raise ShapeError(f"{len(pads)} pads for {len(axes)} axes, each of which has 2")
    pairs = [(0, 0)] * x.ndim
    for i, axis in enumerate(axes):
        pairs[axis] = int(pads[i]), int(pads[i + len(axes)])
    mode: Any = node.get("mode", "constant")
    if mode not in ("constant", "reflect", "edge", "wrap"):
        raise UnsupportedError(f"{node} with the mode {mode!r}")
    if mode == "constant":
        return x.pad(pairs, mode, float(value) if x.dtype.is_float else bool(value) if x.dtype.kind == "b" else int(value))
    # the other modes only pad, so negative pads are cut off first
    cut = x.shrink([(max(0, -a), n - max(0, -b)) for (a, b), n in zip(pairs, x.shape, strict=True)])
    for axis, (before, after) in enumerate(pairs):
        if before > 0 or after > 0:
            cut = cut.take(np.pad(np.arange(cut.shape[axis]), (max(0, before), max(0, after)), mode).tolist(), axis)
    return cut


@operator("DepthToSpace", exact=True)
def depth_to_space(node: OnnxNode, x: Tensor) -> Tensor:
    n, c, h, w = x.shape
    b = node.need("blocksize")
    if node.get("mode", "DCR") == "CRD":
        return x.pixel_shuffle(b)
    return x.reshape(n, b, b, c // (b * b), h, w).permute(0, 3, 4, 1, 5, 2).reshape(n, c // (b * b), h * b, w * b)


@operator("SpaceToDepth", exact=True)
def space_to_depth(node: OnnxNode, x: Tensor) -> Tensor:
    n, c, h, w = x.shape
    b = node.need("blocksize")
    if node.get("mode", "DCR") == "CRD":
        return x.pixel_unshuffle(b)
    return x.reshape(n, c, h // b, b, w // b, b).permute(0, 3, 5, 1, 2, 4).reshape(n, c * b * b, h // b, w // b)


@operator("Trilu", 14, known=("k",), exact=True)
def trilu(node: OnnxNode, x: Tensor, k: Array | None = None) -> Tensor:
    diagonal = 0 if k is None else int(k.reshape(-1)[0])
    return x.triu(diagonal) if node.get("upper", 1) else x.tril(diagonal)


@operator("ReverseSequence", 10, exact=True)
def reverse_sequence(node: OnnxNode, x: Tensor, lengths: Tensor) -> Tensor:
    along, batch = node.get("time_axis", 0), node.get("batch_axis", 1)
    n = x.shape[along]
    places = Tensor.arange(n, dtype="int64").reshape(*(-1 if i == along else 1 for i in range(x.ndim)))
    count = lengths.reshape(*(-1 if i == batch else 1 for i in range(x.ndim)))
    source = where(places.lt(count), count.sub(1).sub(places), places).broadcast_to(x.shape)
    return x.gather(along, source)


@operator("Compress", 9, known=("condition",), exact=True)
def compress(node: OnnxNode, x: Tensor, condition: Array) -> Tensor:
    at = [int(i) for i in np.flatnonzero(condition)]
    axis = node.get("axis")
    return x.flatten().index_select(0, at) if axis is None else x.index_select(axis, at)


@operator("Col2Im", 18, known=("image", "block"))
def col2im(node: OnnxNode, x: Tensor, image: Array, block: Array) -> Tensor:
    """Sum columns of blocks into images, where blocks may overlap: the transpose of im2col."""
    sizes, kernel = [int(n) for n in image], [int(n) for n in block]
    rank = len(sizes)
    dilations, strides = node.get("dilations", [1] * rank), node.get("strides", [1] * rank)
    pads = node.get("pads", [0] * 2 * rank)
    n, c = x.shape[0], x.shape[1] // int(np.prod(kernel))
    wide = [s + pads[i] + pads[i + rank] for i, s in enumerate(sizes)]
    counts = [(w - d * (k - 1) - 1) // s + 1 for w, d, k, s in zip(wide, dilations, kernel, strides, strict=True)]
    taps = x.reshape(n, c, *kernel, *counts)
    # position of each element in the flattened, padded image
    at = np.zeros([*kernel, *counts], np.int64)
    for i in range(rank):
        along = dilations[i] * np.arange(kernel[i]).reshape(-1, *[1] * (2 * rank - i - 1)) + (
            strides[i] * np.arange(counts[i]).reshape(-1, *[1] * (rank - i - 1)))
        at = at * wide[i] + along
    flat = np.broadcast_to(at.reshape(-1), (n, c, at.size))
    empty = Tensor.zeros(n, c, int(np.prod(wide)), dtype=x.dtype)
    how = "amax" if x.dtype is dtypes.bool else "sum"
    out = empty.scatter_reduce(2, Tensor(np.ascontiguousarray(flat)), taps.reshape(n, c, -1), how)
    return out.reshape(n, c, *wide).shrink([None, None, *((pads[i], pads[i] + s) for i, s in enumerate(sizes))])


