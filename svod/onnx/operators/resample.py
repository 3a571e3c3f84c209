"""Resizing. Sizes are known, so positions and weights are computed in NumPy; the elements are gathered and summed."""
from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from functools import reduce
from typing import Any

import numpy as np

from svod.core.ir.dtype import to_numpy
from svod.errors import UnsupportedError
from svod.onnx.registry import Array, OnnxNode, axes_in, operator
from svod.tensor import Tensor, where
from svod.tensor.operations.resample import keys_far, keys_near
from svod.tensor.precision import widened

Taps = list[tuple[Tensor, Tensor]]      # positions along an axis, and their weights
MIDDLE_DISTANCE = 1e-6      # distance up to which onnxruntime treats a position as the middle of two elements


@operator("Upsample", 7)
def upsample_old(node: OnnxNode, x: Tensor) -> Tensor:
    return resized(node, x, None, list(node.need("scales")), None, "asymmetric", "simple")


@operator("Upsample", 9, known=("scales",))
@operator("Resize", 10, known=("scales",))
def resize_old(node: OnnxNode, x: Tensor, scales: Array) -> Tensor:
    return resized(node, x, None, [float(s) for s in scales], None, "asymmetric", "simple")


@operator("Resize", 11, known=("roi", "scales", "sizes"))
def resize(node: OnnxNode, x: Tensor, roi: Array | None = None, scales: Array | None = None, sizes: Array | None = None) -> Tensor:
    axes = axes_in(node.get("axes") or range(x.ndim), x.ndim)
    scale: list[float] | None = None
    size: list[int] | None = None
    if sizes is not None and sizes.size:
        size = [x.shape[i] for i in range(x.ndim)]
        given = [int(n) for n in sizes]
        policy = node.get("keep_aspect_ratio_policy", "stretch")
        if policy != "stretch":
            choose = min if policy == "not_larger" else max
            one = choose(n / x.shape[a] for n, a in zip(given, axes, strict=True))
            given = [math.floor(one * x.shape[a] + 0.5) for a in axes]
            scale = [one if i in axes else 1.0 for i in range(x.ndim)]
        for n, a in zip(given, axes, strict=True):
            size[a] = n
    else:
        assert scales is not None
        scale = [1.0] * x.ndim
        for s, a in zip(scales, axes, strict=True):
            scale[a] = float(s)
    region = None
    if roi is not None and roi.size:
        region = [(0.0, 1.0)] * x.ndim
        for i, a in enumerate(axes):
            region[a] = float(roi[i]), float(roi[i + len(axes)])
    return resized(node, x, size, scale, region, node.get("coordinate_transformation_mode", "half_pixel"),
                   node.get("nearest_mode", "round_prefer_floor"))


def resized(node: OnnxNode, x: Tensor, sizes: Sequence[int] | None, scales: Sequence[float] | None,
            region: Sequence[tuple[float, float]] | None, positions: str, nearest: str) -> Tensor:
    """Resize one axis after the other. In mode nearest, positions are computed in float32 like onnxruntime's, because rounding decides
    which element is nearest to a position between two."""
    mode, out = node.get("mode", "nearest"), x._float() if node.get("mode", "nearest") != "nearest" else x
    kind: Any = np.float32 if mode == "nearest" else np.float64
    outside: Tensor | None = None
    for axis, n in enumerate(x.shape):
        scale = float(kind(scales[axis] if scales is not None else sizes[axis] / n if sizes is not None and n else 1.0))
        new = sizes[axis] if sizes is not None else math.floor(np.float32(n) * np.float32(scale))
        area = region[axis] if region is not None else (0.0, 1.0)
        if new == n and scale == 1.0 and positions != "tf_crop_and_resize":
            continue
        # onnxruntime aligns the corners by the rounded length; the standard's examples of other modes use the length before rounding
        length = float(new) if mode == "nearest" else scale * n
        at = source_positions(positions, n, np.arange(new, dtype=kind), scale, length, area)
        if mode == "nearest":
            out = out.index_select(axis, [int(i) for i in nearest_of(at, nearest, scale).clip(0, n - 1)])
        else:
            taps, weights = taps_of(node, mode, at, n, scale)
            out = out._weighted(axis, taps, weights.astype(to_numpy(out.dtype)))
        if positions == "tf_crop_and_resize":
            beyond = Tensor((at < 0) | (at > n - 1)).reshape(*(-1 if i == axis else 1 for i in range(x.ndim)))
            outside = beyond if outside is None else outside.logical_or(beyond)
    if outside is not None:
        out = out.masked_fill(outside, node.get("extrapolation_value", 0.0))
    if x.dtype.is_int and out.dtype.is_float:
        out = out.round().clamp(float(x.dtype.min), float(x.dtype.max))
    return out.cast(x.dtype)


def source_positions(mode: str, old: int, at: Array, scale: float, length: float, area: tuple[float, float]) -> Any:
    """The positions (new,) in an operand of `old` elements that correspond to the elements `at` of the result, in the dtype of `at`.
    `length`: the extent of the result by which corners are aligned."""
    kind: Any = at.dtype.type
    new = len(at)
    factor = kind(scale)
    match mode:
        case "half_pixel":
            return (at + kind(0.5)) / factor - kind(0.5)
        case "half_pixel_symmetric":
            # the middle of the operand maps to the middle of the result, although its length was rounded
            adjustment = float(kind(new) / (factor * kind(old)))
            offset = float(kind(old / 2 * (1 - adjustment)))
            return (offset + (at.astype(np.float64) + 0.5) / scale - 0.5).astype(kind)
        case "pytorch_half_pixel":
            return (at + kind(0.5)) / factor - kind(0.5) if new > 1 else np.zeros_like(at)
        case "align_corners":
            return at * kind(old - 1) / kind(length - 1) if new > 1 else np.zeros_like(at)
        case "asymmetric":
            return at / factor
        case "tf_half_pixel_for_nn":
            return (at + kind(0.5)) / factor
        case "tf_crop_and_resize":
            first, last = (kind(v) for v in area)
            if new > 1:
                return first * kind(old - 1) + at * (last - first) * kind(old - 1) / kind(new - 1)
            return np.full_like(at, 0.5 * float(first + last) * (old - 1))
    raise UnsupportedError(f"resizing with the positions {mode!r}")


def nearest_of(at: Array, mode: str, scale: float) -> Array:
    """The element nearest to each position, by the rule `mode`."""
    low = np.floor(at)
    part = at - low
    match mode:
        case "round_prefer_floor":
            return np.asarray(low + (part >= 0.5 + MIDDLE_DISTANCE))
        case "round_prefer_ceil":
            return np.asarray(low + (part > 0.5 - MIDDLE_DISTANCE))
        case "floor":
            return np.asarray(low)
        case "ceil":
            return np.asarray(np.ceil(at))
        case "simple":      # the rule of operator sets before 11
            return np.asarray(np.ceil(at) if scale < 1 else low)
    raise UnsupportedError(f"resizing to the nearest by {mode!r}")


def taps_of(node: OnnxNode, mode: str, at: Array, n: int, scale: float) -> tuple[Array, Array]:
    """The source positions for each element of the result, (taps, new), and their weights."""
    reach = 1.0 if mode == "linear" else 2.0
    if mode not in ("linear", "cubic"):
        raise UnsupportedError(f"{node} with the mode {mode!r}")
    stretch = max(1.0, 1.0 / scale) if node.get("antialias", 0) else 1.0
    first = np.floor(at - reach * stretch).astype(np.int64) + 1
    count = math.ceil(2 * reach * stretch) + (1 if stretch > 1.0 else 0)
    taps = first + np.arange(count).reshape(-1, 1)
    distance = np.abs(taps - at) / stretch
    weights = np.clip(1 - distance, 0, None) if mode == "linear" else cubic(distance, node.get("cubic_coeff_a", -0.75))
    if node.get("exclude_outside", 0):
        weights = np.where((taps < 0) | (taps >= n), 0.0, weights)
    if node.get("exclude_outside", 0) or stretch > 1.0:
        weights = weights / weights.sum(0)
    return taps.clip(0, n - 1), weights


def cubic(d: Array, a: float) -> Array:
    """Keys' cubic kernel at distances of up to 2 elements."""
    return np.where(d <= 1, keys_near(d, a), np.where(d < 2, keys_far(d, a), 0.0))


# -- grids ---------------------------------------------------------------------------------------------------------------------
@operator("AffineGrid", 20, known=("size",))
def affine_grid(node: OnnxNode, theta: Tensor, size: Array) -> Tensor:
    sizes = [int(n) for n in size]
    spatial = sizes[2:]
    axes = []
    for n in spatial:
        if node.get("align_corners", 0):
            axes.append(np.linspace(-1, 1, n) if n > 1 else np.zeros(n))
        else:
            axes.append((2 * np.arange(n) + 1) / n - 1)
    mesh: Any = np.meshgrid(*axes, indexing="ij")
    points = np.stack([*reversed(mesh), np.ones(spatial)], -1).reshape(-1, len(spatial) + 1).astype(to_numpy(theta.dtype))
    out = Tensor(points).matmul(theta.transpose(1, 2))
    return out.reshape(sizes[0], *spatial, len(spatial))


@operator("GridSample", 16)
def grid_sample(node: OnnxNode, x: Tensor, grid: Tensor) -> Tensor:
    mode = {"bilinear": "linear", "bicubic": "cubic"}.get(node.get("mode", "linear"), node.get("mode", "linear"))
    padding, corners = node.get("padding_mode", "zeros"), bool(node.get("align_corners", 0))
    rank = x.ndim - 2
    positions = []
    for i in range(rank):
        size = x.shape[2 + i]
        g = grid[..., rank - 1 - i]
        at = g.add(1).mul((size - 1) / 2) if corners else g.add(1).mul(size).sub(1).mul(0.5)
        if mode != "cubic":     # ties are decided before positions are mirrored
            at = _bordered(at.round() if mode == "nearest" else at, size, padding, corners)
        positions.append(at)
    along: list[Taps] = []
    for at, size in zip(positions, x.shape[2:], strict=True):
        taps = []
        for place, w in _grid_taps(mode, at):
            place = _bordered(place, size, padding, corners) if mode == "cubic" else place
            inside = place.ge(0).logical_and(place.le(size - 1))
            taps.append((place.clamp(0, size - 1), w.mul(inside.cast(w.dtype)) if padding == "zeros" else w))
        along.append(taps)
    return reduce(Tensor.add, weighted_samples(x, along)).cast(x.dtype)


def weighted_samples(x: Tensor, along: Sequence[Taps]) -> Iterator[Tensor]:
    """The elements of x (N, C, …) for each combination of taps along its axes, multiplied by their weights: (N, C, positions…) each. A
    tap of an axis consists of positions (N, positions…) and their weights."""
    n, c = x.shape[:2]
    flat = x.reshape(n, c, math.prod(x.shape[2:]))
    for tap in itertools.product(*along):
        index = Tensor.zeros(1, dtype="int64")
        for (at, _), size in zip(tap, x.shape[2:], strict=True):
            index = index.mul(size).add(at.cast("int64"))
        places = math.prod(index.shape[1:])
        chosen = flat.gather(2, index.reshape(n, 1, places).broadcast_to((n, c, places)))
        yield chosen.reshape(n, c, *index.shape[1:]).mul(reduce(Tensor.mul, [w for _, w in tap]).unsqueeze(1))


def _bordered(at: Tensor, size: int, padding: str, corners: bool) -> Tensor:
    """Move positions outside the axis inside by the padding mode; in mode zeros they stay unchanged."""
    if padding == "border":
        return at.clamp(0.0, float(size - 1))
    if padding == "reflection":
        low, high = (0.0, float(size - 1)) if corners else (-0.5, size - 0.5)
        span = high - low
        if span <= 0:
            return at.mul(0.0)
        away = at.sub(low).abs()
        turns = away.div(span).floor()
        rest = away.sub(turns.mul(span))
        even = turns.sub(turns.div(2.0).floor().mul(2.0)).eq(0)
        return rest.add(low).where(even, rest.neg().add(high)).clamp(0.0, float(size - 1))
    return at


KEYS_PARAMETER = -0.75    # the parameter of Keys' kernel


def _grid_taps(mode: str, at: Tensor) -> Taps:
    """The elements around each position along an axis, and their weights."""
    if mode == "nearest":
        return [(at, at.mul(0.0).add(1.0))]
    low = at.floor()
    part = at.sub(low)
    if mode == "linear":
        return [(low, part.neg().add(1.0)), (low.add(1.0), part)]
    if mode == "cubic":
        rest = part.neg()
        return [(low.sub(1.0), keys_far(part.add(1.0), KEYS_PARAMETER)), (low, keys_near(part, KEYS_PARAMETER)),
                (low.add(1.0), keys_near(rest.add(1.0), KEYS_PARAMETER)), (low.add(2.0), keys_far(rest.add(2.0), KEYS_PARAMETER))]
    raise UnsupportedError(f"GridSample with the mode {mode!r}")


@operator("MaxRoiPool", exact=True)
def max_roi_pool(node: OnnxNode, x: Tensor, rois: Tensor) -> Tensor:
    """The largest element of each part of regions (image, first column, first row, last column, last row); 0 for a part outside the
    image."""
    sizes, scale = node.need("pooled_shape"), node.get("spatial_scale", 1.0)
    scaled = widened(rois[:, 1:]).mul(scale)
    corners = where(scaled.lt(0), scaled.sub(0.5).ceil(), scaled.add(0.5).floor())

    def seen(first: Tensor, last: Tensor, parts: int, n: int) -> Tensor:
        """A mask of the elements along an axis that belong to each part: (regions, parts, n)."""
        size = last.sub(first).add(1).maximum(1.0).reshape(-1, 1).div(float(parts))
        begin, end = (size.mul(Tensor(np.arange(parts) + i).cast(size.dtype)) for i in range(2))
        at = Tensor.arange(n).cast(size.dtype).sub(first.reshape(-1, 1)).unsqueeze(1)
        return at.ge(begin.floor().unsqueeze(2)).logical_and(at.lt(end.ceil().unsqueeze(2)))
    rows = seen(corners[:, 1], corners[:, 3], sizes[0], x.shape[2]).unsqueeze(1)
    columns = seen(corners[:, 0], corners[:, 2], sizes[1], x.shape[3]).unsqueeze(1)
    images = x.take(rois[:, 0].cast("int64"), 0)                                                    # (regions, C, H, W)
    across = where(columns.unsqueeze(2), images.unsqueeze(3), x.dtype.min).max(-1)                  # (regions, C, H, parts)
    largest = where(rows.unsqueeze(-1), across.unsqueeze(2), x.dtype.min).max(3)
    return where(rows.any(-1).unsqueeze(-1).logical_and(columns.any(-1).unsqueeze(-2)), largest, 0).cast(x.dtype)


@operator("RoiAlign", 10)
def roi_align(node: OnnxNode, x: Tensor, rois: Tensor, batch: Tensor) -> Tensor:
    height, width = node.get("output_height", 1), node.get("output_width", 1)
    ratio, scale = node.get("sampling_ratio", 0), node.get("spatial_scale", 1.0)
    mode = node.get("coordinate_transformation_mode", "half_pixel" if node.version >= 16 else "output_half_pixel")
    offset = 0.5 if mode == "half_pixel" else 0.0
    if ratio <= 0:
        raise UnsupportedError(f"{node} whose number of samples depends on the sizes of the regions (sampling_ratio 0)")
    c, h, w = x.shape[1:]
    count = rois.shape[0]
    join = Tensor.maximum if node.get("mode", "avg") == "max" else Tensor.add
    first_x, first_y, last_x, last_y = (rois[:, i].mul(scale).sub(offset) for i in range(4))
    size_x, size_y = last_x.sub(first_x), last_y.sub(first_y)
    if not offset:
        size_x, size_y = size_x.maximum(1.0), size_y.maximum(1.0)

    def samples(first: Tensor, size: Tensor, bins: int) -> Tensor:
        at = Tensor(((np.arange(bins * ratio) + 0.5) / (bins * ratio)).astype(to_numpy(size.dtype)))
        return first.reshape(-1, 1).add(size.reshape(-1, 1).mul(at))                                # (regions, bins · ratio)
    ys, xs = samples(first_y, size_y, height), samples(first_x, size_x, width)
    inside = ys.ge(-1.0).logical_and(ys.le(float(h))).unsqueeze(2).logical_and(xs.ge(-1.0).logical_and(xs.le(float(w))).unsqueeze(1))
    vertical = [(y.unsqueeze(2), share.unsqueeze(2).mul(inside.cast(x.dtype))) for y, share in _edge_taps(ys, h)]
    horizontal = [(at.unsqueeze(1), share.unsqueeze(1)) for at, share in _edge_taps(xs, w)]
    images = x.take(batch.cast("int64"), 0)                                                         # (regions, C, H, W)
    blocks = reduce(join, weighted_samples(images, [vertical, horizontal])).reshape(count, c, height, ratio, width, ratio)
    return (blocks.max((3, 5)) if join is Tensor.maximum else blocks.mean((3, 5))).cast(x.dtype)


def _edge_taps(at: Tensor, n: int) -> Taps:
    """The two elements around each position, which is first clamped to the axis, and their weights for linear interpolation."""
    held = at.clamp(0.0, float(n - 1))
    low = held.floor()
    part = held.sub(low)
    return [(low, part.neg().add(1.0)), (low.add(1.0).clamp(0.0, float(n - 1)), part)]


@operator("CenterCropPad", 18, known=("shape",), exact=True)
def center_crop_pad(node: OnnxNode, x: Tensor, shape: Array) -> Tensor:
    axes = axes_in(node.get("axes") or range(x.ndim), x.ndim)
    for axis, wanted in zip(axes, (int(n) for n in shape), strict=True):
        n = x.shape[axis]
        if n > wanted:
            first = (n - wanted) // 2
            x = x.shrink([(first, first + wanted) if i == axis else None for i in range(x.ndim)])
        elif n < wanted:
            before = (wanted - n) // 2
            x = x.pad([(before, wanted - n - before) if i == axis else (0, 0) for i in range(x.ndim)])
    return x
