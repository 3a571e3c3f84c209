"""Convolution and pooling with pads on both sides, `auto_pad`, dilation, and positions of maxima."""
from __future__ import annotations

import math
from collections.abc import Sequence
from functools import reduce

import numpy as np

from svod.errors import ShapeError, UnsupportedError
from svod.onnx.operators.products import shifted
from svod.onnx.operators.resample import Taps, weighted_samples
from svod.onnx.registry import Array, OnnxNode, operator
from svod.tensor import Tensor

Pairs = list[tuple[int, int]]


def pads_of(node: OnnxNode, sizes: Sequence[int], kernel: Sequence[int], strides: Sequence[int], dilations: Sequence[int]) -> Pairs:
    """The padding (before, after) of each axis, from `pads` or `auto_pad`."""
    rank, auto = len(sizes), node.get("auto_pad", "NOTSET")
    if auto == "VALID":
        return [(0, 0)] * rank
    if auto in ("SAME_UPPER", "SAME_LOWER"):
        pairs = []
        for n, k, s, d in zip(sizes, kernel, strides, dilations, strict=True):
            total = max(0, (-(-n // s) - 1) * s + d * (k - 1) + 1 - n)
            less, more = total // 2, total - total // 2
            pairs.append((less, more) if auto == "SAME_UPPER" else (more, less))
        return pairs
    pads = node.get("pads") or [0] * 2 * rank
    return [(pads[i], pads[i + rank]) for i in range(rank)]


def geometry(node: OnnxNode, rank: int) -> tuple[list[int], list[int]]:
    return list(node.get("strides") or [1] * rank), list(node.get("dilations") or [1] * rank)


def convolve(node: OnnxNode, x: Tensor, w: Tensor, bias: Tensor | None) -> Tensor:
    rank = x.ndim - 2
    if rank < 1 or w.ndim != x.ndim:
        raise ShapeError("x and the weight both need a batch or an output, channels, and the same axes behind")
    strides, dilations = geometry(node, rank)
    pairs = pads_of(node, x.shape[2:], w.shape[2:], strides, dilations)
    if all(a == b for a, b in pairs):
        padding: int | list[int] = [a for a, _ in pairs]
    else:
        x, padding = x.pad([(0, 0), (0, 0), *pairs]), 0
    convolution = {1: Tensor.conv1d, 2: Tensor.conv2d, 3: Tensor.conv3d}.get(rank)
    if convolution is None:
        raise UnsupportedError(f"{node} over {rank} axes; svod convolves over 1 to 3")
    return convolution(x, w, bias, strides, padding, dilations, node.get("group", 1))


@operator("Conv")
def conv(node: OnnxNode, x: Tensor, w: Tensor, bias: Tensor | None = None) -> Tensor:
    return convolve(node, x, w, bias)


@operator("ConvInteger", 10)
def conv_integer(node: OnnxNode, x: Tensor, w: Tensor, x_zero: Tensor | None = None, w_zero: Tensor | None = None) -> Tensor:
    zero = w_zero.reshape(-1, *(1,) * (w.ndim - 1)) if w_zero is not None and w_zero.ndim == 1 else w_zero
    return convolve(node, shifted(x, x_zero, 0), shifted(w, zero, 0), None)


@operator("ConvTranspose")
def conv_transpose(node: OnnxNode, x: Tensor, w: Tensor, bias: Tensor | None = None) -> Tensor:
    rank, groups = x.ndim - 2, node.get("group", 1)
    strides, dilations = geometry(node, rank)
    extra, kernel = list(node.get("output_padding") or [0] * rank), w.shape[2:]
    full = [(n - 1) * s + d * (k - 1) + 1 for n, s, d, k in zip(x.shape[2:], strides, dilations, kernel, strict=True)]
    wanted, auto = node.get("output_shape"), node.get("auto_pad", "NOTSET")
    pads = node.get("pads") or [0] * 2 * rank
    pairs = [(pads[i], pads[i + rank]) for i in range(rank)]
    if wanted is None and auto in ("SAME_UPPER", "SAME_LOWER"):
        wanted = [n * s for n, s in zip(x.shape[2:], strides, strict=True)]
    if wanted is not None:
        pairs = []
        for f, e, n in zip(full, extra, wanted[-rank:], strict=True):
            total = f + e - n
            half = total // 2
            more = total - half
            pairs.append((half, more) if auto == "SAME_UPPER" else (more, half))
    function = {1: Tensor.conv_transpose1d, 2: Tensor.conv_transpose2d, 3: Tensor.conv_transpose3d}.get(rank)
    if function is None:
        raise UnsupportedError(f"{node} over {rank} axes; svod convolves over 1 to 3")
    whole = function(x, w, None, strides, 0, 0, groups, dilations)
    # positions to which no element contributes are zero before the bias is added
    out = whole.pad([(0, 0), (0, 0), *((max(0, -a), max(0, e - b)) for e, (a, b) in zip(extra, pairs, strict=True))])
    bounds: list[tuple[int, int] | None] = [None, None]
    for f, e, (a, b) in zip(full, extra, pairs, strict=True):
        bounds.append((max(0, a), max(0, a) + f + e - a - b))
    out = out.shrink(bounds)
    return out if bias is None else out.add(bias.reshape(-1, *(1,) * rank))


# -- pooling -------------------------------------------------------------------------------------------------------------------
def pool_geometry(node: OnnxNode, x: Tensor) -> tuple[list[int], list[int], list[int], Pairs, Pairs]:
    """Kernel, strides, dilations, pads, and the extra padding at the end for ceil_mode, as pairs for each axis."""
    kernel = list(node.need("kernel_shape"))
    strides, dilations = geometry(node, len(kernel))
    sizes = x.shape[2:]
    pairs = pads_of(node, sizes, kernel, strides, dilations)
    more: Pairs = []
    for n, k, s, d, (a, b) in zip(sizes, kernel, strides, dilations, pairs, strict=True):
        span = n + a + b - d * (k - 1) - 1
        count = (-(-span // s) if node.get("ceil_mode", 0) else span // s) + 1
        if node.get("ceil_mode", 0) and (count - 1) * s >= n + a:      # a window that starts in the padding at the end is left out
            count -= 1
        more.append((0, max(0, (count - 1) * s + d * (k - 1) + 1 - (n + a + b))))
    return kernel, strides, dilations, pairs, more


def windows(node: OnnxNode, x: Tensor, fill: float | int, pairs: Pairs, more: Pairs, kernel: Sequence[int], strides: Sequence[int],
            dilations: Sequence[int]) -> Tensor:
    sides = [(a, b + e) for (a, b), (_, e) in zip(pairs, more, strict=True)]
    return x._windows(str(node), sides, fill, kernel, strides, dilations)


@operator("MaxPool", exact=True)
def max_pool(node: OnnxNode, x: Tensor) -> Tensor | tuple[Tensor, Tensor]:
    kernel, strides, dilations, pairs, more = pool_geometry(node, x)
    rank = len(kernel)
    largest = windows(node, x, x.dtype.min, pairs, more, kernel, strides, dilations).max(tuple(range(-rank, 0)))
    if len(node.asked) < 2 or not node.asked[1]:
        return largest
    sides = [(a, b + e) for (a, b), (_, e) in zip(pairs, more, strict=True)]
    places = x._places_of_largest(str(node), sides, kernel, strides, dilations)
    at = Tensor.zeros(1, dtype="int64")
    for i in range(rank) if node.get("storage_order", 0) == 0 else reversed(range(rank)):
        at = at.mul(x.shape[2 + i]).add(places[i])
    lead = np.arange(x.shape[0] * x.shape[1]).reshape(x.shape[0], x.shape[1], *(1,) * rank) * math.prod(x.shape[2:])
    return largest, at.add(Tensor(lead))


@operator("AveragePool")
def average_pool(node: OnnxNode, x: Tensor) -> Tensor:
    kernel, strides, dilations, pairs, more = pool_geometry(node, x)
    axes = tuple(range(-len(kernel), 0))
    total = windows(node, x, 0, pairs, more, kernel, strides, dilations).sum(axes)
    ones = Tensor.ones(1, 1, *x.shape[2:], dtype=total.dtype)
    if node.get("count_include_pad", 0):
        ones = ones.pad([(0, 0), (0, 0), *pairs], "constant", 1.0)
        counted = windows(node, ones, 0, [(0, 0)] * len(kernel), more, kernel, strides, dilations).sum(axes)
    else:
        counted = windows(node, ones, 0, pairs, more, kernel, strides, dilations).sum(axes)
    return total.div(counted).cast(x.dtype)


@operator("LpPool")
def lp_pool(node: OnnxNode, x: Tensor) -> Tensor:
    kernel, strides, dilations, pairs, more = pool_geometry(node, x)
    p = float(node.get("p", 2))
    taken = windows(node, x, 0, pairs, more, kernel, strides, dilations)
    return taken.abs().pow(p).sum(tuple(range(-len(kernel), 0))).pow(1.0 / p).cast(x.dtype)


@operator("MaxUnpool", 9, known=("wanted",), exact=True)
def max_unpool(node: OnnxNode, x: Tensor, at: Tensor, wanted: Array | None = None) -> Tensor:
    kernel = list(node.need("kernel_shape"))
    strides = list(node.get("strides") or [1] * len(kernel))
    pads = node.get("pads") or [0] * 2 * len(kernel)
    spatial = zip(x.shape[2:], strides, kernel, strict=True)
    natural = [(n - 1) * s + k - pads[i] - pads[i + len(kernel)] for i, (n, s, k) in enumerate(spatial)]
    small = (*x.shape[:2], *natural)
    whole = Tensor.zeros(math.prod(small), dtype=x.dtype).scatter(0, at.reshape(-1), x.reshape(-1)).reshape(small)
    return whole if wanted is None else whole.pad([(0, int(n) - m) for n, m in zip(wanted, small, strict=True)])


@operator("LRN")
def lrn(node: OnnxNode, x: Tensor) -> Tensor:
    size, alpha, beta, bias = node.need("size"), node.get("alpha", 1e-4), node.get("beta", 0.75), node.get("bias", 1.0)
    c, flat = x.shape[1], x.reshape(x.shape[0], x.shape[1], -1)
    before, after = (size - 1) // 2, size - 1 - (size - 1) // 2
    squares = flat.mul(flat).pad([(0, 0), (before, after), (0, 0)])
    near = squares.transpose(1, 2)._windows(str(node), [(0, 0)], 0, [size], [1], [1]).sum(-1).transpose(1, 2)
    assert near.shape[1] == c
    return flat.div(near.mul(alpha / size).add(bias).pow(beta)).reshape(x.shape).cast(x.dtype)


@operator("CausalConvWithState", 27)
def causal_conv(node: OnnxNode, x: Tensor, w: Tensor, bias: Tensor | None = None, past: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """A causal depthwise convolution over time: (N, C, L) with a weight (C, 1, K)."""
    k = w.shape[-1]
    state = Tensor.zeros(x.shape[0], x.shape[1], k - 1, dtype=x.dtype) if past is None else past
    whole = Tensor.cat([state, x], 2)
    out = whole.conv1d(w, bias, groups=x.shape[1])
    if node.get("activation", "none") in ("silu", "swish"):
        out = out.silu()
    return out, whole.shrink([None, None, (whole.shape[2] - (k - 1), whole.shape[2])])


@operator("DeformConv", 19)
def deform_conv(node: OnnxNode, x: Tensor, w: Tensor, offset: Tensor, bias: Tensor | None = None, mask: Tensor | None = None) -> Tensor:
    """A convolution of images whose taps are displaced: `offset` (N, groups · taps · 2, height, width) has a row and a column offset for
    each tap and output position."""
    if x.ndim != 4 or w.ndim != 4:
        raise UnsupportedError(f"{node} of {x.ndim - 2} axes; svod has it for images")
    n, channels, height, width = x.shape
    kernel, group, apart = w.shape[2:], node.get("group", 1), node.get("offset_group", 1)
    taps, places = math.prod(kernel), offset.shape[2] * offset.shape[3]
    strides, dilations = geometry(node, 2)
    pairs = pads_of(node, (height, width), kernel, strides, dilations)
    moved = offset.reshape(n, apart, taps, 2, places)
    grid = np.indices((*kernel, *offset.shape[2:])).reshape(4, taps, places)      # tap row, tap column, output row, output column
    rows, columns = (moved[:, :, :, i].add(Tensor((grid[i] * dilations[i] + grid[2 + i] * strides[i] - pairs[i][0]).astype(np.float32)))
                     for i in range(2))
    image = x.reshape(n * apart, channels // apart, height, width)
    around = [neighbours(at.reshape(n * apart, taps * places), size) for at, size in ((rows, height), (columns, width))]
    out = reduce(Tensor.add, weighted_samples(image, around))
    out = out if mask is None else out.mul(mask.reshape(n * apart, 1, taps * places))
    samples = out.reshape(n, group, channels // group * taps, places)
    result = w.reshape(group, w.shape[0] // group, -1).matmul(samples).reshape(n, w.shape[0], *offset.shape[2:])
    return result if bias is None else result.add(bias.reshape(1, -1, 1, 1))


def neighbours(at: Tensor, n: int) -> Taps:
    """The two elements around each position along an axis of extent n, and their weights for linear interpolation. Elements outside the
    axis have the weight 0."""
    first = at.floor()
    share = at.sub(first)
    return [(place.clamp(0, n - 1).cast("int64"), part.mul(place.ge(0).logical_and(place.lt(n)).cast(part.dtype)))
            for place, part in ((first, share.neg().add(1)), (first.add(1), share))]
