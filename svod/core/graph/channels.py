"""Convolutions with channels last in memory: matrix instructions load rows along the summed axis, which is the channels.

    conv(x, w), x (N, C, Y, X), w (O, C, I, J)          conv(x', w')
                                                        x' = PERMUTE(CONTIGUOUS(PERMUTE(x)))      in memory (N, Y, X, C)
                                                        w' = PERMUTE(CONTIGUOUS(PERMUTE(w)))      in memory (O, I, J, C)

An image that a kernel computes is stored in this order, also if a pooling reads it, so that nothing is copied between two convolutions.
Arguments are copied once. If a row of channels is not a multiple of 16 bytes, a convolution with several taps reads a copy whose rows are
padded with zeros.
"""
from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from math import prod
from typing import NamedTuple

from svod.core.graph.graph import alu, broadcast, cast, contiguous, pad, permute, reduce_axis, reshape, window
from svod.core.graph.shapes import broadcast_shapes, shape_of
from svod.core.graph.storage import base_of
from svod.core.graph.widening import widened_last
from svod.core.ir.origin import inherit_origin
from svod.core.ir.uop import ELEMENTWISE, MOVEMENT, Ops, UOp
from svod.core.ir.variable import is_symbolic

VECTOR_BYTES = 16    # bytes
_AROUND = Ops.CAST, Ops.EXPAND
_OF_IMAGES = Ops.PAD, Ops.WINDOW, Ops.CAST, Ops.EXPAND      # readers that take the rearranged copy of an argument


class Convolution(NamedTuple):
    """A sum of products of windows and weights. `image`: the value under the windows and their padding, of shape (N, C, …); `windows`: the
    WINDOW node; `weight`: shape (1, groups if there are some, O, C, 1…, taps…)."""

    image: UOp
    windows: UOp
    weight: UOp

    @property
    def channel_axis(self) -> int:
        """The axis of the weight that runs along the input channels."""
        return len(shape_of(self.weight)) - 2 * len(self.windows.arg) - 1

    @property
    def last_axis(self) -> int:
        """The axis of the weight that should be last in memory: its channels, or its groups if each has one channel."""
        return self.channel_axis if shape_of(self.weight)[self.channel_axis] > 1 else 1

    @property
    def taps(self) -> int:
        """Positions of a window."""
        return prod(size for _, size, _, _ in self.windows.arg)

    @property
    def fill(self) -> int:
        """The number of zero channels that pad a row to a multiple of 16 bytes; 0 for one tap or with groups."""
        channels, line = shape_of(self.weight)[self.channel_axis], VECTOR_BYTES // self.image.dtype.itemsize
        return -channels % line if self.taps > 1 and channels == shape_of(self.image)[1] else 0


def convolutions(sink: UOp) -> Iterator[tuple[UOp, Convolution]]:
    """Find the REDUCE_AXIS nodes of a graph that are convolutions; yields each with its operands."""
    for u in sink.toposort():
        found = convolution_of(u)
        if found is not None:
            yield u, found


def convolution_of(u: UOp) -> Convolution | None:
    """The operands of a node that is a convolution; None for any other node."""
    if u.op is not Ops.REDUCE_AXIS or u.arg[0] != "ADD" or u.src[0].op is not Ops.MUL:
        return None
    for one, other in (u.src[0].src, u.src[0].src[::-1]):
        found = _convolution(_below(one, _AROUND), _below(other, _AROUND))
        if found is not None and found.channel_axis in u.arg[1]:
            return found
    return None


def _below(u: UOp, ops: tuple[Ops, ...]) -> UOp:
    while u.op in ops:
        u = u.src[0]
    return u


def _image_of(windows: UOp) -> UOp | None:
    """Return the image under a WINDOW over all axes after (N, C), and under its PAD if there is one; None for any other node."""
    if windows.op is not Ops.WINDOW:
        return None
    padded = windows.src[0]
    image = padded.src[0] if padded.op is Ops.PAD else padded
    shape = shape_of(image)
    return None if is_symbolic(shape[1:]) or [axis for axis, *_ in windows.arg] != list(range(2, len(shape))) else image


def _convolution(factor: UOp, weight: UOp) -> Convolution | None:
    """Return the convolution of two factors of a product; None if they form none. `factor`: the windows, of shape (N, groups if there are
    some, 1, C, …), in which the 1 is the axis of the output channels."""
    windows = _below(factor, (Ops.CAST, Ops.RESHAPE))
    image = _image_of(windows)
    if image is None:
        return None
    axes, shape, kernel = [axis for axis, *_ in windows.arg], shape_of(image), shape_of(weight)
    groups = len(kernel) - 2 * len(axes) - 3
    if groups not in (0, 1) or kernel[0] != 1:
        return None
    sizes = tuple([size for _, size, _, _ in windows.arg])
    count, _, *rest = shape_of(windows)
    if kernel[-len(axes):] != sizes or prod(kernel[1:1 + groups]) * kernel[2 + groups] != shape[1] \
            or shape_of(factor) != (count, *kernel[1:1 + groups], 1, kernel[2 + groups], *rest):
        return None
    return Convolution(image, windows, weight)


def with_values(sink: UOp, values: Mapping[UOp, UOp]) -> UOp:
    """Replace the nodes that `values` names by their values there; nodes that are rebuilt keep their origin."""
    done: dict[UOp, UOp] = {}
    for u in sink.toposort(gate=lambda n: n not in values):
        src = () if u in values else tuple([done[s] for s in u.src])
        done[u] = values[u] if u in values else u if src == u.src else u.replace(src=src)
        if u not in values and done[u] is not u:
            inherit_origin(done[u], u)
    return done[sink]


def channels_last(sink: UOp, wanted: Callable[[UOp], bool]) -> UOp:
    """Store the images and weights of convolutions with their channels last, for each convolution with `wanted(image)` true."""
    sink = widened_last(sink)       # the image of a convolution is then the 16-bit value in memory, not its float32 copy
    found = {u: c for u, c in convolutions(sink) if wanted(c.image)}
    if not found:
        return sink
    convolved = {c.windows for c in found.values()}
    pooled = [_image_of(u) for u in sink.toposort() if u not in convolved]
    last = {image: 1 for image in (*pooled, *[c.image for c in found.values() if not c.fill]) if image is not None and wanted(image)}
    last.update({c.weight: c.last_axis for c in found.values() if not c.fill and c.taps > 1})
    plain: dict[UOp, UOp] = {}
    arranged: dict[UOp, UOp] = {}
    for u in sink.toposort():
        readable = u.op in MOVEMENT or u.op in ELEMENTWISE or u.op is Ops.REDUCE_AXIS

        def source(s: UOp, user: UOp = u, readable: bool = readable) -> UOp:
            in_memory = base_of(s).op in (Ops.BUFFER, Ops.AFTER)
            return arranged[s] if s in arranged and readable and (not in_memory or user.op in _OF_IMAGES) else plain[s]
        src = tuple([source(s) for s in u.src])
        node = u if src == u.src else u.replace(src=src)
        if u in found and found[u].fill:
            node = _filled(u, found[u], plain)
        if node is not u:
            inherit_origin(node, u)
        plain[u] = node
        if u in last:
            arranged[u] = _last(node, last[u])
    return plain[sink]


def _last(u: UOp, axis: int, fill: int = 0) -> UOp:
    """Return a value equal to u that is stored with `axis` last and padded with `fill` zeros at the end of `axis`."""
    shape, inner = shape_of(u), shape_of(u.src[0]) if u.op is Ops.RESHAPE else ()
    if shape[axis] > 1 and [n for n in shape if n != 1] == [n for n in inner if n != 1]:
        place = [a for a, n in enumerate(inner) if n != 1][sum(n != 1 for n in shape[:axis])]
        return reshape(_last(u.src[0], place, fill), [*shape[:axis], shape[axis] + fill, *shape[axis + 1:]])
    rank = len(shape)
    order = [*[a for a in range(rank) if a != axis], axis]
    rows = pad(permute(u, order), [(0, 0)] * (rank - 1) + [(0, fill)])
    return permute(contiguous(rows), [order.index(a) for a in range(rank)])


def _filled(u: UOp, c: Convolution, plain: dict[UOp, UOp]) -> UOp:
    """Pad the channels of the convolution `u` with zeros at the end."""
    x, w = _last(plain[c.image], 1, c.fill), _last(plain[c.weight], c.channel_axis, c.fill)
    padded = c.windows.src[0]
    if padded is not c.image:
        x = pad(x, *padded.arg)
    shape = shape_of(x)
    windows = window(x, c.windows.arg)
    factors = reshape(windows, (shape[0], 1, *shape_of(windows)[1:])), w
    wide = [cast(f, u.dtype) for f in factors]
    common = broadcast_shapes("convolution", *[shape_of(f) for f in wide])
    return reduce_axis(alu(Ops.MUL, *[broadcast(f, common) for f in wide]), *u.arg)
