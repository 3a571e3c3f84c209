"""A convolution as products of Fourier transforms of overlapping blocks (overlap-save).

    y = conv(x, w), n positions of a block, k taps          y[i] = Σ j of x[i + j] · w[j]

    blocks      WINDOW(x, n, stride n - k + 1)              n positions each, of which the next block shares k - 1
    X           FOURIER(blocks 0, 1, … + i · blocks b, b + 1, …)
    W           inverse FOURIER(w / n), n positions: the conjugate of its transform
    Y           Σ over input channels of X · W
    y           the first n - k + 1 positions of inverse FOURIER(Y), block after block

Taps are real, so two blocks are one block of complex numbers: its real and its imaginary part. With several window axes, n and k are those
of each, and a transform goes along all of them. Where channels are summed, frequencies are the outermost axes, so that transforms run along
columns and each frequency has a matrix product, with the parts of complex numbers as further channels:

    (Y.real, Y.imag) = (X.real, X.imag) · ((W.real, W.imag), (-W.imag, W.real))

Otherwise they are the innermost axes, so that transforms run along rows, and FILTER does all of it where there is one axis. Weights that
are constants are transformed once, at prepare.
"""
from __future__ import annotations

from functools import cache
from math import prod
from typing import NamedTuple

import numpy as np

from svod.core.graph.buffer import buffer_of
from svod.core.graph.channels import Convolution
from svod.core.graph.graph import (
    alu,
    broadcast,
    buffer,
    cat,
    contiguous,
    full,
    library_kernel,
    pad,
    permute,
    reduce_axis,
    reshape,
    shrink,
    window,
)
from svod.core.graph.library_kernel import fourier_passes, fourier_table
from svod.core.graph.shapes import shape_of
from svod.core.ir.dtype import DType, dtypes, to_numpy
from svod.core.ir.uop import Ops, UOp
from svod.core.ir.variable import is_symbolic

Lengths = tuple[int, ...]       # positions of a block along each window axis


class ConvolutionSizes(NamedTuple):
    """The sizes of a convolution. `images`: N; `groups`, `inputs`, `outputs`: channels of a group; `taps`, `results`: along each window
    axis."""

    images: int
    groups: int
    inputs: int
    outputs: int
    taps: tuple[int, ...]
    results: tuple[int, ...]

    @property
    def sums_channels(self) -> bool:
        """Whether a transform of one channel is used for several channels."""
        return self.inputs * self.outputs > 1

    def steps(self, lengths: Lengths) -> tuple[int, ...]:
        """Results of a block along each window axis."""
        return tuple([n - k + 1 for n, k in zip(lengths, self.taps, strict=True)])

    def counts(self, lengths: Lengths) -> tuple[int, ...]:
        """Blocks along each window axis."""
        return tuple([-(-y // step) for y, step in zip(self.results, self.steps(lengths), strict=True)])

    def is_filter(self, lengths: Lengths) -> bool:
        """Whether FILTER computes it: along rows, without sums over channels, in blocks of several passes."""
        return not self.sums_channels and len(lengths) == 1 and len(fourier_passes(lengths[0])) > 1

    def pairs(self, lengths: Lengths) -> int:
        """Blocks of complex numbers of a channel; FILTER pairs those of a row."""
        blocks = prod(self.counts(lengths))
        return self.images * -(-blocks // 2) if self.is_filter(lengths) else -(-self.images * blocks // 2)


class Transformed(NamedTuple):
    """A convolution by transforms: its value, and the node that holds the transformed weights."""

    value: UOp
    weights: UOp


def sizes_of(u: UOp, c: Convolution) -> ConvolutionSizes | None:
    """The sizes of the convolution `c` that the node `u` sums; None if it has another form than one by transforms: strides, dilation,
    extents that are not constant, numbers that are no float32 or float64."""
    shape, kernel, spatial = shape_of(u), shape_of(c.weight), len(c.windows.arg)
    summed = {c.channel_axis, *range(len(shape) - spatial, len(shape))}
    factors = shape_of(u.src[0])
    if is_symbolic(shape) or is_symbolic(kernel) or {a for a in u.arg[1] if factors[a] > 1} != {a for a in summed if factors[a] > 1}:
        return None
    if any(stride != 1 or dilation != 1 for _, _, stride, dilation in c.windows.arg) or len(c.windows.arg) > 3:
        return None
    if u.dtype not in (dtypes.float32, dtypes.float64) or not u.dtype == c.image.dtype == c.weight.dtype:
        return None
    groups = kernel[1] if len(kernel) == 2 * spatial + 4 else 1
    results = tuple([int(n) for n in shape[c.channel_axis + 1:c.channel_axis + 1 + spatial]])
    taps = tuple([size for _, size, _, _ in c.windows.arg])
    return ConvolutionSizes(int(shape[0]), groups, kernel[c.channel_axis], kernel[c.channel_axis - 1], taps, results)


@cache
def table_of(n: int, inverse: bool, dtype: DType) -> UOp:
    """The BUFFER with the roots of unity of FOURIER."""
    roots = np.asarray(fourier_table(n, inverse), to_numpy(dtype))
    node = buffer(dtype, roots.size)
    buffer_of(node).bind(roots)
    return node


def by_fourier(u: UOp, c: Convolution, sizes: ConvolutionSizes, lengths: Lengths) -> Transformed:
    """The value of `u`, the convolution `c`, by transforms of blocks of `lengths` positions."""
    made = _made(c, sizes, lengths)
    return Transformed(reshape(made.value, shape_of(u)), made.weights)


def _made(c: Convolution, z: ConvolutionSizes, lengths: Lengths) -> Transformed:
    weights = contiguous(_matrices(c, z, lengths) if z.sums_channels else _spectrum(c, z, lengths))
    if z.is_filter(lengths):
        return Transformed(_filtered(c, z, lengths[0], weights), weights)
    first = 1 if z.sums_channels else 3      # the first axis of frequencies; axis 0 has the real and the imaginary parts
    numbers = _blocks(c.windows.src[0], z, lengths)
    for a in range(first, first + len(lengths)):
        numbers = _transform(numbers, a, False)
    numbers = _summed(numbers, weights, z, lengths) if z.sums_channels else _multiplied(numbers, weights)
    for a, step in enumerate(z.steps(lengths), first):
        numbers = _transform(numbers, a, True)
        if a == 1:      # Only on the outermost axis are the first positions a contiguous part of memory, which needs no copy.
            numbers = _first(numbers, a, step)
    return Transformed(_results(numbers, z, lengths), weights)


def _first(x: UOp, axis: int, n: int) -> UOp:
    """The first n positions of an axis."""
    return shrink(x, [(0, n if a == axis else size) for a, size in enumerate(shape_of(x))])


def _padded(x: UOp, axis: int, n: int) -> UOp:
    """An axis with zeros at its end, n positions in all."""
    return pad(x, [(0, n - size if a == axis else 0) for a, size in enumerate(shape_of(x))])


def _part(numbers: UOp, part: int, shape: tuple[int, ...]) -> UOp:
    """The real (0) or the imaginary parts (1) of complex numbers, in `shape`."""
    bounds = [(0, n) for n in shape_of(numbers)[1:]]
    return reshape(shrink(numbers, [(part, part + 1), *bounds]), shape)


def _transform(numbers: UOp, axis: int, inverse: bool) -> UOp:
    """FOURIER of complex numbers along an axis. That of one position is the number there."""
    shape, dtype = shape_of(numbers), numbers.dtype
    if shape[axis] == 1:
        return numbers
    box = prod(shape[1:axis]), shape[axis], prod(shape[axis + 1:])
    parts = [_part(numbers, i, box) for i in (0, 1)]
    return reshape(library_kernel("FOURIER", (inverse, False, False), dtype, *parts, table_of(shape[axis], inverse, dtype)), shape)


def _blocks(x: UOp, z: ConvolutionSizes, lengths: Lengths) -> UOp:
    """The blocks of padded images (N, C, …) as complex numbers: (2, n…, pairs, C), or (2, pairs, C, n…)."""
    counts, steps, rank = z.counts(lengths), z.steps(lengths), len(lengths)
    for a, (n, step, count) in enumerate(zip(lengths, steps, counts, strict=True), 2):
        x = _padded(x, a, max((count - 1) * step + n, shape_of(x)[a]))
    made = window(x, [(a, n, step, 1) for a, (n, step) in enumerate(zip(lengths, steps, strict=True), 2)])
    number, channels, pairs = z.images * prod(counts), z.groups * z.inputs, z.pairs(lengths)
    made = permute(made, [0, *range(2, 2 + rank), 1, *range(2 + rank, 2 + 2 * rank)])
    made = reshape(_padded(reshape(made, (number, channels, *lengths)), 0, 2 * pairs), (2, pairs, channels, *lengths))
    return contiguous(permute(made, [0, *range(3, 3 + rank), 1, 2]) if z.sums_channels else made)


def _spectrum(c: Convolution, z: ConvolutionSizes, lengths: Lengths) -> UOp:
    """The conjugate transform of the taps, scaled for the inverse one: (2, n…, G, I, O), or (2, G, n…) without sums over channels."""
    rank, count = len(lengths), prod(lengths)
    w = reshape(c.weight, (z.groups, z.outputs, z.inputs, *z.taps))
    w = alu(Ops.MUL, w, full(shape_of(w), 1 / count, w.dtype))
    for a, n in enumerate(lengths, 3):
        w = _padded(w, a, n)
    w = permute(w, [*range(3, 3 + rank), 0, 2, 1]) if z.sums_channels else reshape(w, (z.groups, *lengths))
    numbers = contiguous(pad(reshape(w, (1, *shape_of(w))), [(0, 1), *[(0, 0) for _ in shape_of(w)]]))
    first = 1 if z.sums_channels else 2
    for a in range(first, first + rank):
        numbers = _transform(numbers, a, True)
    return numbers


def _matrices(c: Convolution, z: ConvolutionSizes, lengths: Lengths) -> UOp:
    """The matrices by which the parts of each frequency are multiplied: (F, G, 2, I, 2, O)."""
    shape = prod(lengths), z.groups, 1, z.inputs, 1, z.outputs
    numbers = _spectrum(c, z, lengths)
    real, imag = _part(numbers, 0, shape), _part(numbers, 1, shape)
    turned = alu(Ops.MUL, imag, full(shape, -1, imag.dtype))
    return cat([cat([real, imag], 4), cat([turned, real], 4)], 2)


def _summed(numbers: UOp, weights: UOp, z: ConvolutionSizes, lengths: Lengths) -> UOp:
    """The products of each frequency, summed over input channels: (2, n…, pairs, C) to (2, n…, pairs, channels of results)."""
    frequencies, pairs = prod(lengths), z.pairs(lengths)
    x = permute(reshape(numbers, (2, 1, frequencies, pairs, z.groups, 1, z.inputs)), [1, 2, 3, 4, 5, 0, 6])
    w = reshape(permute(weights, [4, 0, 1, 5, 2, 3]), (2, frequencies, 1, z.groups, z.outputs, 2, z.inputs))
    shape = 2, frequencies, pairs, z.groups, z.outputs, 2, z.inputs
    made = reduce_axis(alu(Ops.MUL, broadcast(x, shape), broadcast(w, shape)), "ADD", (5, 6))
    return contiguous(reshape(made, (2, *lengths, pairs, z.groups * z.outputs)))


def _filtered(c: Convolution, z: ConvolutionSizes, n: int, weights: UOp) -> UOp:
    """The results (N, C, …) of rows by FILTER, which reads the image without its zeros around it."""
    padded, before = c.windows.src[0], 0
    if padded.op is Ops.PAD and padded.arg[1] == 0:
        padded, before = c.image, padded.arg[0][2][0]
    factors = [_part(weights, i, (z.groups, n)) for i in (0, 1)]
    tables = [table_of(n, inverse, padded.dtype) for inverse in (False, True)]
    return library_kernel("FILTER", (before, n - z.taps[0] + 1, z.results[0]), padded.dtype, padded, *tables, *factors)


def _multiplied(numbers: UOp, weights: UOp) -> UOp:
    """The products of each frequency of (2, pairs, C, n…) with those of its channel's taps."""
    shape = shape_of(numbers)[1:]
    x, y = (_part(numbers, i, shape) for i in (0, 1))
    real, imag = (broadcast(_part(weights, i, (1, *shape[1:])), shape) for i in (0, 1))
    back = alu(Ops.MUL, alu(Ops.MUL, y, imag), full(shape, -1, imag.dtype))
    made = alu(Ops.ADD, alu(Ops.MUL, x, real), back), alu(Ops.ADD, alu(Ops.MUL, x, imag), alu(Ops.MUL, y, real))
    return contiguous(cat([reshape(part, (1, *shape)) for part in made], 0))


def _results(numbers: UOp, z: ConvolutionSizes, lengths: Lengths) -> UOp:
    """The valid positions of all blocks put together: (N, O, …)."""
    rank, counts, steps, channels = len(lengths), z.counts(lengths), z.steps(lengths), z.groups * z.outputs
    for a, step in enumerate(steps, 1 if z.sums_channels else 3):
        numbers = _first(numbers, a, step)
    if z.sums_channels:
        numbers = permute(numbers, [0, 1 + rank, 2 + rank, *range(1, 1 + rank)])
    made = _first(reshape(numbers, (2 * z.pairs(lengths), channels, *steps)), 0, z.images * prod(counts))
    made = reshape(made, (z.images, *counts, channels, *steps))
    made = permute(made, [0, rank + 1, *[a for i in range(rank) for a in (1 + i, rank + 2 + i)]])
    whole = reshape(made, (z.images, channels, *[t * step for t, step in zip(counts, steps, strict=True)]))
    return shrink(whole, [(0, z.images), (0, channels), *[(0, y) for y in z.results]])
