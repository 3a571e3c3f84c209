"""Operations of neural networks: convolution, pooling, normalisation, softmax, embedding, attention.

Names and signatures are those of torch.nn.functional, with the first operand as self. Convolution and pooling read WINDOW views inside one
REDUCE, so no tensor of windows is stored.
"""
from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Self

import numpy as np

from svod.core.graph import graph
from svod.core.graph.shapes import broadcast_shapes, can_broadcast
from svod.core.ir.dtype import dtypes, promote, to_numpy
from svod.core.ir.uop import Ops
from svod.core.ir.variable import Dim
from svod.errors import ShapeError, UnsupportedError
from svod.tensor.creation import coordinates
from svod.tensor.operations.activations import Activations
from svod.tensor.operations.elementwise import Operand
from svod.tensor.precision import rounds_once, rounds_to_self, widened

IntOrInts = int | Sequence[int]
OutputSize = int | None | Sequence[int | None]


class NeuralNetwork(Activations):
    """The functions of torch.nn.functional as methods."""

    __slots__ = ()

    # -- rows ------------------------------------------------------------------------------------
    @rounds_once
    def softmax(self, dim: int = -1, *, axis: int | None = None) -> Self:
        """Softmax exp(x - max) / sum along one axis."""
        at, shifted = self._shifted("softmax", dim if axis is None else axis)
        exps = shifted.exp()
        return exps.mul(exps.sum(at, keepdim=True).reciprocal())

    @rounds_once
    def log_softmax(self, dim: int = -1, *, axis: int | None = None) -> Self:
        """The logarithm of softmax, computed as x - max - log(sum)."""
        at, shifted = self._shifted("log_softmax", dim if axis is None else axis)
        return shifted.sub(shifted.exp().sum(at, keepdim=True).log())

    def _shifted(self, name: str, dim: int) -> tuple[int, Self]:
        """(the axis, x - max along it)."""
        at, x = self._axis(name, dim), self._float()
        return at, x if 0 in x.shape else x.sub(x.max(at, keepdim=True))

    @rounds_to_self
    def layer_norm(self, normalized_shape: IntOrInts, weight: Operand | None = None, bias: Operand | None = None,
                   eps: float = 1e-5) -> Self:
        """Layer norm (x - mean) / sqrt(var + eps) · weight + bias, with mean and var over the last axes, whose extents are
        `normalized_shape`."""
        axes = self._last_axes("layer_norm", normalized_shape)
        weight, bias = self._affine_operand("layer_norm", "weight", weight, axes), self._affine_operand("layer_norm", "bias", bias, axes)
        x = self._float()
        centred = x.sub(x.mean(axes, keepdim=True))
        scale = centred.square().mean(axes, keepdim=True).add(eps).rsqrt()
        return self._affine(centred.mul(scale), weight, bias)

    @rounds_to_self
    def rms_norm(self, normalized_shape: IntOrInts, weight: Operand | None = None, eps: float | None = None) -> Self:
        """RMS norm x / sqrt(mean(x²) + eps) · weight, with the mean over the last axes. `eps` defaults to the machine epsilon of
        float32, or of float64 for float64."""
        axes = self._last_axes("rms_norm", normalized_shape)
        weight = self._affine_operand("rms_norm", "weight", weight, axes)
        x = self._float()
        scale = x.square().mean(axes, keepdim=True).add(float(np.finfo(to_numpy(x.dtype)).eps) if eps is None else eps).rsqrt()
        return self._affine(x.mul(scale), weight, None)

    def _affine_operand(self, name: str, what: str, given: Operand | None, axes: Sequence[int]) -> Self | None:
        """Convert a weight or bias for the normalised axes to a tensor. Raises ShapeError."""
        t = None if given is None else self._as_tensor(given)
        if t is not None and not can_broadcast(t.shape, self.shape):
            raise ShapeError(f"{name} of {self.shape} with a {what} of {t.shape}: it must be {self.shape[-len(axes):]}")
        return t

    def _affine(self, normalised: Self, weight: Self | None, bias: Self | None) -> Self:
        scaled = normalised if weight is None else normalised.mul(weight)
        return scaled if bias is None else scaled.add(bias)

    def _last_axes(self, name: str, normalized_shape: IntOrInts) -> tuple[int, ...]:
        wanted = (normalized_shape,) if isinstance(normalized_shape, int) else tuple(normalized_shape)
        if not wanted or self.shape[-len(wanted):] != wanted:
            raise ShapeError(f"{name} of {self.shape} over {wanted}: these must be its last extents")
        return tuple(range(self.ndim - len(wanted), self.ndim))

    @rounds_to_self
    def batch_norm(self, running_mean: Operand, running_var: Operand, weight: Operand | None = None, bias: Operand | None = None,
                   training: bool = False, momentum: float = 0.1, eps: float = 1e-5) -> Self:
        """Batch norm (x - mean) / sqrt(var + eps) · weight + bias per channel (axis 1) with the given statistics, computed as x · scale +
        shift.

        Raises UnsupportedError for training, because svod only runs models."""
        if training:
            raise UnsupportedError(f"batch_norm with training=True (momentum {momentum}): only the given statistics can be used")
        if self.ndim < 2:
            raise ShapeError(f"batch_norm of {self.shape}: it needs a channel axis 1")
        channels = self.shape[1]
        given = [None if v is None else self._as_tensor(v)._float() for v in (running_mean, running_var, weight, bias)]
        for v in given:
            if v is not None and v.shape != (channels,):
                raise ShapeError(f"batch_norm of {self.shape} with a vector of {v.shape}: it must be ({channels},)")
        mean, var, gain, offset = given
        assert mean is not None and var is not None
        scale = var.add(eps).rsqrt()
        scale = scale if gain is None else scale.mul(gain)
        shift = mean.mul(scale).neg() if offset is None else offset.sub(mean.mul(scale))
        per_channel = (channels,) + (1,) * (self.ndim - 2)
        return self._float().mul(scale.reshape(per_channel)).add(shift.reshape(per_channel))

    @rounds_to_self
    def group_norm(self, num_groups: int, weight: Operand | None = None, bias: Operand | None = None, eps: float = 1e-5) -> Self:
        """Layer norm over each of `num_groups` groups of channels (axis 1) and all later axes, then · weight + bias per channel."""
        if self.ndim < 2 or num_groups < 1 or self.shape[1] % num_groups:
            raise ShapeError(f"group_norm of {self.shape} in {num_groups} groups: the channels (axis 1) must divide evenly")
        grouped = self._float().reshape(self.shape[0], num_groups, -1)
        normalised = grouped.layer_norm(grouped.shape[-1], eps=eps).reshape(self.shape)
        per_channel = (self.shape[1],) + (1,) * (self.ndim - 2)
        given = [None if v is None else self._as_tensor(v).reshape(per_channel) for v in (weight, bias)]
        return self._affine(normalised, *given)

    @rounds_to_self
    def instance_norm(self, running_mean: Operand | None = None, running_var: Operand | None = None, weight: Operand | None = None,
                      bias: Operand | None = None, use_input_stats: bool = True, momentum: float = 0.1, eps: float = 1e-5) -> Self:
        """Layer norm of each channel (axis 1) over the axes after it, then · weight + bias per channel. Without `use_input_stats` it is
        `batch_norm` with the given statistics."""
        if not use_input_stats:
            return self.batch_norm(running_mean, running_var, weight, bias, False, momentum, eps)
        if self.ndim < 3:
            raise ShapeError(f"instance_norm of {self.shape}: it needs axes after the channels (axis 1)")
        return self.group_norm(self.shape[1], weight, bias, eps)

    # -- convolution and pooling -----------------------------------------------------------------
    def conv1d(self, weight: Operand, bias: Operand | None = None, stride: IntOrInts = 1, padding: IntOrInts | str = 0,
               dilation: IntOrInts = 1, groups: int = 1) -> Self:
        """A convolution over one axis, as `conv2d`: (N, C, L) with a weight (O, C/groups, K)."""
        return self._convolve("conv1d", 1, weight, bias, stride, padding, dilation, groups)

    def conv2d(self, weight: Operand, bias: Operand | None = None, stride: IntOrInts = 1, padding: IntOrInts | str = 0,
               dilation: IntOrInts = 1, groups: int = 1) -> Self:
        """The cross-correlation of (N, C, H, W), or (C, H, W), with a weight (O, C/groups, KH, KW) and a bias (O,).

        `padding` is an int, one int per axis, 'valid', or 'same' with stride 1. The result is (N, O, OH, OW) with OH = (H + 2·padding -
        dilation·(KH-1) - 1) // stride + 1. Raises ShapeError."""
        return self._convolve("conv2d", 2, weight, bias, stride, padding, dilation, groups)

    def conv3d(self, weight: Operand, bias: Operand | None = None, stride: IntOrInts = 1, padding: IntOrInts | str = 0,
               dilation: IntOrInts = 1, groups: int = 1) -> Self:
        """A convolution over three axes, as `conv2d`: (N, C, D, H, W) with a weight (O, C/groups, KD, KH, KW)."""
        return self._convolve("conv3d", 3, weight, bias, stride, padding, dilation, groups)

    @rounds_once
    def _convolve(self, name: str, spatial: int, weight: Operand, bias: Operand | None, stride: IntOrInts,
                  padding: IntOrInts | str, dilation: IntOrInts, groups: int) -> Self:
        w = self._as_tensor(weight)
        if self.ndim == spatial + 1:
            return self.unsqueeze(0)._convolve(name, spatial, w, bias, stride, padding, dilation, groups).squeeze(0)
        if self.ndim != spatial + 2 or w.ndim != spatial + 2 or groups < 1 or w.shape[0] % groups or w.shape[1] * groups != self.shape[1]:
            raise ShapeError(f"{name} of {self.shape} with a weight of {w.shape} in {groups} group(s): the input is (N, C, …) with "
                             f"{spatial} more axes, the weight (O, C/groups, …), and groups divides O")
        strides, dilations = per_axis(name, "stride", stride, spatial), per_axis(name, "dilation", dilation, spatial)
        kernel = w.shape[2:]
        pads = _conv_padding(name, padding, kernel, strides, dilations)
        n, c, o = self.shape[0], self.shape[1], w.shape[0]
        source, w, pads = self._without_idle_taps(w, pads, strides, dilations)
        kernel = w.shape[2:]
        windows = source._windows(name, pads, 0, kernel, strides, dilations)
        out, ones = windows.shape[2:2 + spatial], (1,) * spatial
        # an additional axis only if there are several groups: fewer axes make shorter addresses
        group = () if groups == 1 else (groups,)
        x = windows.reshape(n, *group, 1, c // groups, *out, *kernel)
        k = w.reshape(1, *group, o // groups, c // groups, *ones, *kernel)
        rank = len(x.shape)
        common = (n, *group, o // groups, c // groups, *out, *kernel)
        summed = (len(group) + 2, *range(rank - spatial, rank))
        result = x._contract(k, common, summed, promote(self.dtype, w.dtype)).reshape(n, o, *out)
        return result._with_bias(name, bias)

    def _without_idle_taps(self, w: Self, pads: list[tuple[int, int]], strides: Sequence[int],
                           dilations: Sequence[int]) -> tuple[Self, Self, list[tuple[int, int]]]:
        """The input, weight and padding of the same convolution without leading and trailing taps that only read padding. A dilation
        larger than the image makes most taps idle. Infinite weights of idle taps have no effect, because they are not multiplied by
        zeros."""
        taps: list[tuple[int, int] | None] = []
        kept: list[tuple[int, int] | None] = []
        around: list[tuple[int, int]] = []
        for size, k, (before, behind), step, d in zip(self.shape[2:], w.shape[2:], pads, strides, dilations, strict=True):
            first, last = _used_taps(size, k, before, behind, step, d) or (0, k - 1)
            if (first, last) == (0, k - 1):
                taps.append(None)
                kept.append(None)
                around.append((before, behind))
                continue
            count = (size + before + behind - d * (k - 1) - 1) // step + 1
            before -= first * d
            behind = (count - 1) * step + 1 + d * (last - first) - size - before
            taps.append((first, last + 1))
            kept.append((max(0, -before), size - max(0, -behind)))
            around.append((max(0, before), max(0, behind)))
        if not any(taps):
            return self, w, pads
        return self.shrink([None, None, *kept]), w.shrink([None, None, *taps]), around

    def _windows(self, name: str, pads: Sequence[tuple[int, int]], fill: int | float, kernel: Sequence[int], strides: Sequence[int],
                 dilations: Sequence[int]) -> Self:
        """Windows over the last axes, padded: (N, C, out…, kernel…). A view."""
        first = self.ndim - len(kernel)
        padded = self.from_uop(graph.pad(self.uop, ((0, 0),) * first + tuple(pads), fill))
        entries = [(axis, *window) for axis, window in enumerate(zip(kernel, strides, dilations, strict=True), first)]
        for axis, size, step, d in entries:
            if size < 1 or step < 1 or d < 1 or d * (size - 1) + 1 > padded.shape[axis]:
                raise ShapeError(f"{name} of {self.shape}: a window of {size} (dilation {d}, stride {step}) does not fit axis {axis}, "
                                 f"which has {padded.shape[axis]} positions with its padding")
        return self.from_uop(graph.window(padded.uop, entries))

    def max_pool1d(self, kernel_size: IntOrInts, stride: IntOrInts | None = None, padding: IntOrInts = 0, dilation: IntOrInts = 1,
                   ceil_mode: bool = False) -> Self:
        """Max pooling over the last axis, as `max_pool2d`."""
        return self._max_pool("max_pool1d", 1, kernel_size, stride, padding, dilation, ceil_mode)

    def max_pool2d(self, kernel_size: IntOrInts, stride: IntOrInts | None = None, padding: IntOrInts = 0, dilation: IntOrInts = 1,
                   ceil_mode: bool = False) -> Self:
        """Max pooling: the largest value of each window of the last two axes. Padding is never the largest. `stride` defaults to the
        kernel size."""
        return self._max_pool("max_pool2d", 2, kernel_size, stride, padding, dilation, ceil_mode)

    def max_pool3d(self, kernel_size: IntOrInts, stride: IntOrInts | None = None, padding: IntOrInts = 0, dilation: IntOrInts = 1,
                   ceil_mode: bool = False) -> Self:
        """Max pooling over the last three axes, as `max_pool2d`."""
        return self._max_pool("max_pool3d", 3, kernel_size, stride, padding, dilation, ceil_mode)

    def _max_pool(self, name: str, spatial: int, kernel_size: IntOrInts, stride: IntOrInts | None, padding: IntOrInts,
                  dilation: IntOrInts, ceil_mode: bool) -> Self:
        kernel, strides, pads, extra = self._pool_geometry(name, spatial, kernel_size, stride, padding, dilation, ceil_mode)
        sides = [(p, p + e) for p, e in zip(pads, extra, strict=True)]
        windows = self._windows(name, sides, self.dtype.min, kernel, strides, per_axis(name, "dilation", dilation, spatial))
        return windows.max(tuple(range(-spatial, 0)))

    def _places_of_largest(self, name: str, sides: Sequence[tuple[int, int]], kernel: Sequence[int], strides: Sequence[int],
                           dilations: Sequence[int]) -> list[Self]:
        """The position of the largest element of each window of the last axes, padded by `sides`: int64 positions along each of these
        axes, (N, C, out…). The first of equal elements and the last of several NaN are chosen, as in PyTorch. A position is never in the
        padding, even if the padding's elements equal the largest."""
        spatial = len(kernel)
        windows = self._windows(name, sides, self.dtype.min, kernel, strides, dilations)
        out, axes = windows.shape[-2 * spatial:-spatial], tuple(range(-spatial, 0))
        taps = self.arange(math.prod(kernel)).reshape(kernel)
        order = windows.eq(windows.max(axes, keepdim=True)).cast(dtypes.int32)
        if self.dtype.is_float:
            order = order.where(windows.isnan().logical_not(), taps.add(2))
        if any(map(any, sides)):
            inside = self.full(self.shape[-spatial:], True)._windows(name, sides, False, kernel, strides, dilations)
            order = order.where(inside, -1)
        left, places = order.reshape(*order.shape[:-spatial], -1).argmax(-1), []
        for i in reversed(range(spatial)):
            start = self.arange(out[i], dtype=dtypes.int64).mul(strides[i]).sub(sides[i][0]).reshape(-1, *(1,) * (spatial - 1 - i))
            places.append(left.remainder(kernel[i]).mul(dilations[i]).add(start))
            left = left.floor_divide(kernel[i])
        return places[::-1]

    def avg_pool1d(self, kernel_size: IntOrInts, stride: IntOrInts | None = None, padding: IntOrInts = 0, ceil_mode: bool = False,
                   count_include_pad: bool = True) -> Self:
        """Average pooling over the last axis, as `avg_pool2d`."""
        return self._avg_pool("avg_pool1d", 1, kernel_size, stride, padding, ceil_mode, count_include_pad)

    def avg_pool2d(self, kernel_size: IntOrInts, stride: IntOrInts | None = None, padding: IntOrInts = 0, ceil_mode: bool = False,
                   count_include_pad: bool = True) -> Self:
        """Average pooling: the mean of each window of the last two axes. With `count_include_pad`, padding counts as zeros."""
        return self._avg_pool("avg_pool2d", 2, kernel_size, stride, padding, ceil_mode, count_include_pad)

    def avg_pool3d(self, kernel_size: IntOrInts, stride: IntOrInts | None = None, padding: IntOrInts = 0, ceil_mode: bool = False,
                   count_include_pad: bool = True) -> Self:
        """Average pooling over the last three axes, as `avg_pool2d`."""
        return self._avg_pool("avg_pool3d", 3, kernel_size, stride, padding, ceil_mode, count_include_pad)

    @rounds_once
    def _avg_pool(self, name: str, spatial: int, kernel_size: IntOrInts, stride: IntOrInts | None, padding: IntOrInts, ceil_mode: bool,
                  count_include_pad: bool) -> Self:
        kernel, strides, pads, extra = self._pool_geometry(name, spatial, kernel_size, stride, padding, 1, ceil_mode)
        sides = [(p, p + e) for p, e in zip(pads, extra, strict=True)]
        windows = self._float()._windows(name, sides, 0, kernel, strides, (1,) * spatial)
        total = windows.sum(tuple(range(-spatial, 0)))
        if not any(extra) and (count_include_pad or not any(pads)):
            return total.div(float(math.prod(kernel)))
        extents = zip(self.shape[-spatial:], total.shape[-spatial:], kernel, strides, pads, strict=True)
        counts = [self._window_counts(*numbers, count_include_pad) for numbers in extents]
        count = counts[0]
        for along in counts[1:]:
            count = count.unsqueeze(-1).mul(along)
        return total.div(count)

    def _window_counts(self, n: int, out: int, size: int, step: int, pad: int, include_pad: bool) -> Self:
        """The number of elements that count in each window along one axis, as float32."""
        start = self.arange(out).mul(step).sub(pad)
        low, high = (-pad, n + pad) if include_pad else (0, n)
        return start.add(size).minimum(high).sub(start.maximum(low)).cast(dtypes.float32)

    def _pool_geometry(self, name: str, spatial: int, kernel_size: IntOrInts, stride: IntOrInts | None, padding: IntOrInts,
                       dilation: IntOrInts, ceil_mode: bool) -> tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...], tuple[int, ...]]:
        """Kernel, strides, padding, and the padding that ceil_mode adds at the end of each axis."""
        if self.ndim not in (spatial + 1, spatial + 2):
            axes = ", ".join("DHW"[-spatial:] if spatial > 1 else "L")
            raise ShapeError(f"{name} of {self.shape}: the input is (N, C, {axes}) or (C, {axes})")
        kernel = per_axis(name, "kernel_size", kernel_size, spatial)
        strides = kernel if stride is None else per_axis(name, "stride", stride, spatial)
        pads, dilations = per_axis(name, "padding", padding, spatial), per_axis(name, "dilation", dilation, spatial)
        if any(2 * p > k or p < 0 for p, k in zip(pads, kernel, strict=True)):
            raise ShapeError(f"{name} with kernel {kernel} and padding {pads}: the padding must be at most half the kernel")
        extra = [0] * spatial
        if ceil_mode:
            for i, n in enumerate(self.shape[-spatial:]):
                room = n + 2 * pads[i] - dilations[i] * (kernel[i] - 1) - 1
                # the last window must start inside the input or the padding before it
                count = -(-room // strides[i]) + 1
                if (count - 1) * strides[i] >= n + pads[i]:
                    count -= 1
                extra[i] = max(0, (count - 1) * strides[i] - room)
        return kernel, strides, pads, tuple(extra)

    def adaptive_avg_pool1d(self, output_size: OutputSize) -> Self:
        """Adaptive average pooling over the last axis, as `adaptive_avg_pool2d`."""
        return self._adaptive_average("adaptive_avg_pool1d", 1, output_size)

    def adaptive_avg_pool2d(self, output_size: OutputSize) -> Self:
        """Average pooling of the last two axes to the extents `output_size`; None keeps an extent. Element i of o is the mean of the
        positions ⌊i·n/o⌋ … ⌈(i+1)·n/o⌉ - 1 of n."""
        return self._adaptive_average("adaptive_avg_pool2d", 2, output_size)

    @rounds_once
    def _adaptive_average(self, name: str, spatial: int, output_size: OutputSize) -> Self:
        given = (output_size,) * spatial if output_size is None or isinstance(output_size, int) else tuple(output_size)
        old = self.shape[-spatial:]
        if self.ndim < spatial or len(given) != spatial or any(o is not None and o < 1 for o in given) or 0 in old:
            raise ShapeError(f"{name} of {self.shape} to {given}: give a positive extent, or None, for each of the last {spatial} axes, "
                             "none of which may be empty")
        wanted = tuple(n if o is None else o for n, o in zip(old, given, strict=True))
        if not any(n % o for n, o in zip(old, wanted, strict=True)):
            parts = [x for n, o in zip(old, wanted, strict=True) for x in (o, n // o)]
            return self.reshape(*self.shape[:-spatial], *parts).mean(tuple(range(-2 * spatial + 1, 0, 2)))
        result = self._float()
        for axis, o in enumerate(wanted, self.ndim - spatial):
            result = result._averaged(axis, o)
        return result

    def _averaged(self, axis: int, parts: int) -> Self:
        """The means of `parts` ranges of an axis. The ranges overlap if their number does not divide the extent."""
        n, after = self.shape[axis], (1,) * (self.ndim - axis - 1)
        first = np.arange(parts) * n // parts
        last = -(-np.arange(1, parts + 1) * n // parts)
        positions = first[:, None] + np.arange((last - first).max())
        inside = self._beside(positions < last[:, None]).reshape(parts, -1, *after)
        taken = self.take(np.minimum(positions, n - 1).astype(np.int32), axis).where(inside, 0)
        return taken.sum(axis + 1).div(self._beside((last - first).astype(np.float32)).reshape(parts, *after))

    # -- lookup and attention --------------------------------------------------------------------
    def embedding(self, weight: Operand) -> Self:
        """Look up rows of the table `weight` (entries, features) at the integer positions in self: (…, features). A gather."""
        table = self._as_tensor(weight)
        if table.ndim != 2:
            raise ShapeError(f"embedding of {self.shape} in a table of {table.shape}: the table is (entries, features)")
        return table.take(self, 0)

    def scaled_dot_product_attention(self, key: Operand, value: Operand, attn_mask: Operand | None = None, dropout_p: float = 0.0,
                                     is_causal: bool = False, scale: float | None = None) -> Self:
        """Attention softmax(query @ keyᵀ · scale + mask) @ value with self as the query: (…, L, E), key (…, S, E), value (…, S, V) → (…, L,
        V).

        A bool mask keeps a score if it is True; a mask of numbers is added to the scores. A row without any kept score gives zeros. `scale`
        defaults to 1/sqrt(E). With 16-bit floats, the probabilities are rounded as well, before their product with the values, so that
        matrix instructions can compute it. Raises UnsupportedError for dropout."""
        k, v = self._as_tensor(key), self._as_tensor(value)
        if dropout_p:
            raise UnsupportedError(f"scaled_dot_product_attention with dropout_p={dropout_p}: svod runs models and does not train them")
        if is_causal and attn_mask is not None:
            raise UnsupportedError("scaled_dot_product_attention with attn_mask and is_causal: give one of them")
        if min(self.ndim, k.ndim, v.ndim) < 2 or self.shape[-1] != k.shape[-1] or k.shape[-2] != v.shape[-2]:
            raise ShapeError(f"scaled_dot_product_attention of query {self.shape}, key {k.shape} and value {v.shape}: they are (…, L, E), "
                             "(…, S, E) and (…, S, V)")
        broadcast_shapes("scaled_dot_product_attention", self.shape[:-2], k.shape[:-2], v.shape[:-2],
                               given=(self.shape, k.shape, v.shape))
        scores = widened(self).matmul(widened(k).transpose(-2, -1))._float().mul(1 / math.sqrt(self.shape[-1]) if scale is None else scale)
        if is_causal:
            row, column = coordinates(*scores.shape[-2:])
            scores = scores.where(self.from_uop(graph.alu(Ops.CMPLE, column, row)), -math.inf)
        elif attn_mask is not None:
            mask = self._as_tensor(attn_mask)
            if not can_broadcast(mask.shape, scores.shape):
                raise ShapeError(f"scaled_dot_product_attention of query {self.shape} and key {k.shape} with a mask of {mask.shape}: it "
                                 f"must broadcast to the scores, {scores.shape}")
            is_bool = mask.dtype.kind == "b"
            scores = scores.where(mask, -math.inf) if is_bool else scores.add(mask)
            kept = (mask if is_bool else mask.ne(-math.inf)).any(-1, keepdim=True)
        result = scores.softmax(-1).cast(promote(self.dtype, v.dtype)).matmul(v)
        return result if attn_mask is None else result.where(kept, 0)


def per_axis(name: str, what: str, value: IntOrInts, axes: int) -> tuple[int, ...]:
    """One number for each of `axes` axes. Raises ShapeError, which names `name` and `what`."""
    sizes = (value,) * axes if isinstance(value, int) else tuple(value)
    if len(sizes) != axes:
        raise ShapeError(f"{name} with {what} {sizes}: give one number, or one for each of {axes} axes")
    return sizes


def _used_taps(size: int, taps: int, before: int, behind: int, step: int, dilation: int) -> tuple[int, int] | None:
    """(first tap, last tap) along an axis that read an element for some output position; None if no tap does, or if the extent depends
    on a variable."""
    if isinstance(size, Dim) or min(size, taps, step, dilation) < 1:
        return None
    count = (size + before + behind - dilation * (taps - 1) - 1) // step + 1
    used = []
    for k in range(taps):
        at = k * dilation - before                  # the position that the first output position reads
        position = max(0, -(at // step))            # the first output position for which the tap does not read before the axis
        if position < count and position * step + at < size:
            used.append(k)
    return (used[0], used[-1]) if used else None


def _conv_padding(name: str, padding: IntOrInts | str, kernel: Sequence[int], strides: Sequence[int],
                  dilations: Sequence[int]) -> list[tuple[int, int]]:
    """Padding before and after each axis."""
    if isinstance(padding, str):
        if padding == "valid":
            return [(0, 0)] * len(kernel)
        if padding != "same" or any(s != 1 for s in strides):
            raise ShapeError(f"{name} with padding {padding!r} and stride {tuple(strides)}: use numbers, 'valid', or 'same' with stride 1")
        spans = [d * (k - 1) for k, d in zip(kernel, dilations, strict=True)]
        return [(s // 2, s - s // 2) for s in spans]
    pads = per_axis(name, "padding", padding, len(kernel))
    if any(p < 0 for p in pads):
        raise ShapeError(f"{name} with padding {pads}: it cannot be negative")
    return [(p, p) for p in pads]
