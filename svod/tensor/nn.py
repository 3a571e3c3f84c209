"""What neural networks are made of: activations, convolution, pooling, normalisation, softmax, embedding, attention.

Names and signatures are those of torch.nn.functional, with the first operand as self. Functions made of several steps are
computed in float32 at least and rounded once to the operand's dtype. Convolution and pooling read WINDOW views inside one
REDUCE: no tensor of windows is made.
"""
from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Self

from svod.core import graph
from svod.core.dtype import dtypes, promote
from svod.core.uop import Ops
from svod.errors import ShapeError, UnsupportedError
from svod.tensor.creation import coordinates
from svod.tensor.elementwise import Operand
from svod.tensor.linalg import Linalg

IntOrInts = int | Sequence[int]


class NeuralNetwork(Linalg):
    """torch.nn.functional, as methods."""

    __slots__ = ()

    # -- activations -----------------------------------------------------------------------------
    def relu(self) -> Self:
        """max(x, 0)."""
        return self.maximum(0)

    def relu6(self) -> Self:
        """min(max(x, 0), 6)."""
        return self.clamp(0, 6)

    def leaky_relu(self, negative_slope: float = 0.01) -> Self:
        """x where positive, negative_slope · x elsewhere."""
        x = self._float()
        return x.where(x.gt(0), x.mul(negative_slope))

    def elu(self, alpha: float = 1.0) -> Self:
        """x where positive, alpha · (exp(x) - 1) elsewhere."""
        x = self._wide_float()
        return x.where(x.gt(0), x.expm1().mul(alpha)).cast(self._float_dtype())

    def sigmoid(self) -> Self:
        """1 / (1 + exp(-x))."""
        return self._wide_float().neg().exp().add(1).reciprocal().cast(self._float_dtype())

    def logsigmoid(self) -> Self:
        """log(sigmoid(x))."""
        return self._wide_float().neg().softplus().neg().cast(self._float_dtype())

    def silu(self) -> Self:
        """x · sigmoid(x)."""
        x = self._wide_float()
        return x.mul(x.sigmoid()).cast(self._float_dtype())

    def gelu(self, approximate: str = "none") -> Self:
        """x · Φ(x) with the error function ('none') or its tanh approximation ('tanh'; Hendrycks and Gimpel, 2016)."""
        x = self._wide_float()
        if approximate == "none":
            bell = x.mul(math.sqrt(0.5)).erf()
        elif approximate == "tanh":
            bell = x.add(x.mul(x).mul(x).mul(0.044715)).mul(math.sqrt(2 / math.pi)).tanh()
        else:
            raise UnsupportedError(f"gelu with approximate={approximate!r}: use 'none' or 'tanh'")
        return x.mul(0.5).mul(bell.add(1)).cast(self._float_dtype())

    def softplus(self, beta: float = 1.0, threshold: float = 20.0) -> Self:
        """log(1 + exp(beta · x)) / beta; x itself where beta · x is above the threshold."""
        x = self._wide_float()
        scaled = x.mul(beta)
        # max(s, 0) + log1p(exp(-|s|)) does not overflow
        smooth = scaled.maximum(0).add(scaled.abs().neg().exp().log1p()).div(beta)
        return x.where(scaled.gt(threshold), smooth).cast(self._float_dtype())

    def hardsigmoid(self) -> Self:
        """min(max(x + 3, 0), 6) / 6."""
        return self._wide_float().add(3).clamp(0, 6).div(6).cast(self._float_dtype())

    def hardswish(self) -> Self:
        """x · hardsigmoid(x)."""
        x = self._wide_float()
        return x.mul(x.add(3).clamp(0, 6)).div(6).cast(self._float_dtype())

    def hardtanh(self, min_val: float = -1.0, max_val: float = 1.0) -> Self:
        """x between two bounds."""
        return self.clamp(min_val, max_val)

    def mish(self) -> Self:
        """x · tanh(softplus(x))."""
        x = self._wide_float()
        return x.mul(x.softplus().tanh()).cast(self._float_dtype())

    # -- rows ------------------------------------------------------------------------------------
    def softmax(self, dim: int = -1, *, axis: int | None = None) -> Self:
        """exp(x - max) / sum along one axis."""
        exps, total = self._shifted_exps(dim if axis is None else axis)
        return exps.mul(total.reciprocal()).cast(self._float_dtype())

    def log_softmax(self, dim: int = -1, *, axis: int | None = None) -> Self:
        """log(softmax(x)), computed as x - max - log(sum)."""
        at = self._axis("log_softmax", dim if axis is None else axis)
        x = self._wide_float()
        shifted = x.sub(x.max(at, keepdim=True))
        return shifted.sub(shifted.exp().sum(at, keepdim=True).log()).cast(self._float_dtype())

    def _shifted_exps(self, dim: int) -> tuple[Self, Self]:
        at = self._axis("softmax", dim)
        x = self._wide_float()
        if 0 in x.shape:
            return x, x
        exps = x.sub(x.max(at, keepdim=True)).exp()
        return exps, exps.sum(at, keepdim=True)

    def layer_norm(self, normalized_shape: IntOrInts, weight: Operand | None = None, bias: Operand | None = None,
                   eps: float = 1e-5) -> Self:
        """(x - mean) / sqrt(var + eps) over the last axes, whose extents are `normalized_shape`; then · weight + bias."""
        axes = self._last_axes("layer_norm", normalized_shape)
        x = self._wide_float()
        centred = x.sub(x.mean(axes, keepdim=True))
        scale = centred.square().mean(axes, keepdim=True).add(eps).rsqrt()
        return self._affine(centred.mul(scale), weight, bias)

    def rms_norm(self, normalized_shape: IntOrInts, weight: Operand | None = None, eps: float | None = None) -> Self:
        """x / sqrt(mean(x²) + eps) over the last axes; then · weight. eps defaults to that of float32."""
        axes = self._last_axes("rms_norm", normalized_shape)
        x = self._wide_float()
        scale = x.square().mean(axes, keepdim=True).add(1.1920928955078125e-07 if eps is None else eps).rsqrt()
        return self._affine(x.mul(scale), weight, None)

    def _affine(self, normalised: Self, weight: Operand | None, bias: Operand | None) -> Self:
        if weight is not None:
            normalised = normalised.mul(self._as_tensor(weight)._wide_float())
        if bias is not None:
            normalised = normalised.add(self._as_tensor(bias)._wide_float())
        return normalised.cast(self._float_dtype())

    def _last_axes(self, name: str, normalized_shape: IntOrInts) -> tuple[int, ...]:
        wanted = (normalized_shape,) if isinstance(normalized_shape, int) else tuple(normalized_shape)
        if not wanted or self.shape[-len(wanted):] != wanted:
            raise ShapeError(f"{name} of {self.shape} over {wanted}: these must be its last extents")
        return tuple(range(self.ndim - len(wanted), self.ndim))

    def batch_norm(self, running_mean: Operand, running_var: Operand, weight: Operand | None = None, bias: Operand | None = None,
                   training: bool = False, momentum: float = 0.1, eps: float = 1e-5) -> Self:
        """(x - mean) / sqrt(var + eps) · weight + bias per channel (axis 1) with the given statistics, as one x · scale + shift.

        Raises UnsupportedError for training: svod runs models, it does not train them."""
        if training:
            raise UnsupportedError(f"batch_norm with training=True (momentum {momentum}): only the given statistics can be used")
        if self.ndim < 2:
            raise ShapeError(f"batch_norm of {self.shape}: it needs a channel axis 1")
        channels = self.shape[1]
        given = [None if v is None else self._as_tensor(v)._wide_float() for v in (running_mean, running_var, weight, bias)]
        for v in given:
            if v is not None and v.shape != (channels,):
                raise ShapeError(f"batch_norm of {self.shape} with a vector of {v.shape}: it must be ({channels},)")
        mean, var, gain, offset = given
        assert mean is not None and var is not None
        scale = var.add(eps).rsqrt()
        scale = scale if gain is None else scale.mul(gain)
        shift = mean.mul(scale).neg() if offset is None else offset.sub(mean.mul(scale))
        per_channel = (channels,) + (1,) * (self.ndim - 2)
        return self._wide_float().mul(scale.reshape(per_channel)).add(shift.reshape(per_channel)).cast(self._float_dtype())

    def group_norm(self, num_groups: int, weight: Operand | None = None, bias: Operand | None = None, eps: float = 1e-5) -> Self:
        """Layer norm over each of `num_groups` groups of channels (axis 1) and all later axes; then · weight + bias per channel."""
        if self.ndim < 2 or num_groups < 1 or self.shape[1] % num_groups:
            raise ShapeError(f"group_norm of {self.shape} in {num_groups} groups: the channels (axis 1) must divide evenly")
        grouped = self._wide_float().reshape(self.shape[0], num_groups, -1)
        normalised = grouped.layer_norm(grouped.shape[-1], eps=eps).reshape(self.shape)
        per_channel = (self.shape[1],) + (1,) * (self.ndim - 2)
        given = [None if v is None else self._as_tensor(v).reshape(per_channel) for v in (weight, bias)]
        return self._affine(normalised, *given)

    # -- convolution and pooling -----------------------------------------------------------------
    def conv1d(self, weight: Operand, bias: Operand | None = None, stride: IntOrInts = 1, padding: IntOrInts | str = 0,
               dilation: IntOrInts = 1, groups: int = 1) -> Self:
        """(N, C, L) with (O, C/groups, K): as `conv2d`, over one axis."""
        return self._convolve("conv1d", 1, weight, bias, stride, padding, dilation, groups)

    def conv2d(self, weight: Operand, bias: Operand | None = None, stride: IntOrInts = 1, padding: IntOrInts | str = 0,
               dilation: IntOrInts = 1, groups: int = 1) -> Self:
        """Cross-correlation of (N, C, H, W), or (C, H, W), with a weight (O, C/groups, KH, KW) and a bias (O,).

        `padding` is an int, one per axis, 'valid' or 'same' (stride 1). Result (N, O, OH, OW),
        OH = (H + 2·padding - dilation·(KH-1) - 1) // stride + 1. Raises ShapeError."""
        return self._convolve("conv2d", 2, weight, bias, stride, padding, dilation, groups)

    def conv3d(self, weight: Operand, bias: Operand | None = None, stride: IntOrInts = 1, padding: IntOrInts | str = 0,
               dilation: IntOrInts = 1, groups: int = 1) -> Self:
        """(N, C, D, H, W) with (O, C/groups, KD, KH, KW): as `conv2d`, over three axes."""
        return self._convolve("conv3d", 3, weight, bias, stride, padding, dilation, groups)

    def _convolve(self, name: str, spatial: int, weight: Operand, bias: Operand | None, stride: IntOrInts,
                  padding: IntOrInts | str, dilation: IntOrInts, groups: int) -> Self:
        w = self._as_tensor(weight)
        if self.ndim == spatial + 1:
            return self.unsqueeze(0)._convolve(name, spatial, w, bias, stride, padding, dilation, groups).squeeze(0)
        if self.ndim != spatial + 2 or w.ndim != spatial + 2 or groups < 1 or w.shape[0] % groups or w.shape[1] * groups != self.shape[1]:
            raise ShapeError(f"{name} of {self.shape} with a weight of {w.shape} in {groups} group(s): the input is (N, C, …) with "
                             f"{spatial} more axes, the weight (O, C/groups, …), and groups divides O")
        strides, dilations = _per_axis(name, "stride", stride, spatial), _per_axis(name, "dilation", dilation, spatial)
        kernel = w.shape[2:]
        pads = _conv_padding(name, padding, kernel, strides, dilations)
        n, c, o = self.shape[0], self.shape[1], w.shape[0]
        windows = self._windows(name, pads, 0, kernel, strides, dilations)
        out, ones = windows.shape[2:2 + spatial], (1,) * spatial
        # the group axis only where there are groups: fewer axes, fewer terms in every address
        group = () if groups == 1 else (groups,)
        x = windows.reshape(n, *group, 1, c // groups, *out, *kernel)
        k = w.reshape(1, *group, o // groups, c // groups, *ones, *kernel)
        rank = len(x.shape)
        common = (n, *group, o // groups, c // groups, *out, *kernel)
        summed = (len(group) + 2, *range(rank - spatial, rank))
        result = x._contract(k, common, summed, promote(self.dtype, w.dtype)).reshape(n, o, *out)
        if bias is None:
            return result
        b = self._as_tensor(bias)
        if b.shape != (o,):
            raise ShapeError(f"{name} with a weight of {w.shape} and a bias of {b.shape}: the bias must be ({o},)")
        return result.add(b.reshape(o, *ones))

    def _windows(self, name: str, pads: Sequence[tuple[int, int]], fill: int | float, kernel: Sequence[int], strides: Sequence[int],
                 dilations: Sequence[int]) -> Self:
        """The padded last axes as windows: (N, C, out…, kernel…). A view."""
        first = self.ndim - len(kernel)
        padded = self.from_uop(graph.pad(self.uop, ((0, 0),) * first + tuple(pads), fill))
        for axis, (size, step, d) in enumerate(zip(kernel, strides, dilations, strict=True), first):
            if size < 1 or step < 1 or d < 1 or d * (size - 1) + 1 > padded.shape[axis]:
                raise ShapeError(f"{name} of {self.shape}: a window of {size} (dilation {d}, stride {step}) does not fit axis {axis}, "
                                 f"which has {padded.shape[axis]} positions with its padding")
        entries = [(axis, size, step, d) for axis, (size, step, d) in enumerate(zip(kernel, strides, dilations, strict=True), first)]
        return self.from_uop(graph.window(padded.uop, entries))

    def max_pool2d(self, kernel_size: IntOrInts, stride: IntOrInts | None = None, padding: IntOrInts = 0, dilation: IntOrInts = 1,
                   ceil_mode: bool = False) -> Self:
        """Largest value of each window of the last two axes; padding never wins. `stride` defaults to the kernel's size."""
        kernel, strides, pads, extra = self._pool_geometry("max_pool2d", kernel_size, stride, padding, dilation, ceil_mode)
        sides = [(p, p + e) for p, e in zip(pads, extra, strict=True)]
        windows = self._windows("max_pool2d", sides, self.dtype.min, kernel, strides, _per_axis("max_pool2d", "dilation", dilation, 2))
        return windows.max((-2, -1))

    def avg_pool2d(self, kernel_size: IntOrInts, stride: IntOrInts | None = None, padding: IntOrInts = 0, ceil_mode: bool = False,
                   count_include_pad: bool = True) -> Self:
        """Mean of each window of the last two axes. `count_include_pad` counts padding as elements (zeros)."""
        kernel, strides, pads, extra = self._pool_geometry("avg_pool2d", kernel_size, stride, padding, 1, ceil_mode)
        sides = [(p, p + e) for p, e in zip(pads, extra, strict=True)]
        total = self._wide_float()._windows("avg_pool2d", sides, 0, kernel, strides, (1, 1)).sum((-2, -1))
        if not any(extra) and (count_include_pad or not any(pads)):
            return total.div(float(math.prod(kernel))).cast(self._float_dtype())
        extents = zip(self.shape[-2:], total.shape[-2:], kernel, strides, pads, strict=True)
        counts = [self._window_counts(*numbers, count_include_pad) for numbers in extents]
        return total.div(counts[0].unsqueeze(-1).mul(counts[1])).cast(self._float_dtype())

    def _window_counts(self, n: int, out: int, size: int, step: int, pad: int, include_pad: bool) -> Self:
        """float32 number of elements of each window along one axis that count."""
        start = self.arange(out).mul(step).sub(pad)
        low, high = (-pad, n + pad) if include_pad else (0, n)
        return start.add(size).minimum(high).sub(start.maximum(low)).cast(dtypes.float32)

    def _pool_geometry(self, name: str, kernel_size: IntOrInts, stride: IntOrInts | None, padding: IntOrInts, dilation: IntOrInts,
                       ceil_mode: bool) -> tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...], tuple[int, ...]]:
        """Kernel, strides, padding, and what ceil_mode adds behind each of the two axes."""
        if self.ndim not in (3, 4):
            raise ShapeError(f"{name} of {self.shape}: the input is (N, C, H, W) or (C, H, W)")
        kernel = _per_axis(name, "kernel_size", kernel_size, 2)
        strides = kernel if stride is None else _per_axis(name, "stride", stride, 2)
        pads, dilations = _per_axis(name, "padding", padding, 2), _per_axis(name, "dilation", dilation, 2)
        if any(2 * p > k or p < 0 for p, k in zip(pads, kernel, strict=True)):
            raise ShapeError(f"{name} with kernel {kernel} and padding {pads}: the padding is at most half the kernel")
        extra = [0, 0]
        if ceil_mode:
            for i, n in enumerate(self.shape[-2:]):
                room = n + 2 * pads[i] - dilations[i] * (kernel[i] - 1) - 1
                # the last window must begin inside the input or the padding before it
                count = -(-room // strides[i]) + 1
                if (count - 1) * strides[i] >= n + pads[i]:
                    count -= 1
                extra[i] = max(0, (count - 1) * strides[i] - room)
        return kernel, strides, pads, tuple(extra)

    def adaptive_avg_pool2d(self, output_size: IntOrInts) -> Self:
        """The last two axes averaged down to `output_size`, whose extents must divide theirs. Raises UnsupportedError."""
        wanted = _per_axis("adaptive_avg_pool2d", "output_size", output_size, 2)
        if self.ndim < 2 or any(o < 1 or n % o for n, o in zip(self.shape[-2:], wanted, strict=True)):
            raise UnsupportedError(f"adaptive_avg_pool2d of {self.shape} to {wanted}: the new extents must divide the last two")
        rows, columns = self.shape[-2] // wanted[0], self.shape[-1] // wanted[1]
        blocks = self.reshape(*self.shape[:-2], wanted[0], rows, wanted[1], columns)
        return blocks.mean((-3, -1))

    # -- lookup and attention --------------------------------------------------------------------
    def embedding(self, weight: Operand) -> Self:
        """Rows of `weight` (entries, features) at these integer positions: (…, features). A gather."""
        table = self._as_tensor(weight)
        if table.ndim != 2:
            raise ShapeError(f"embedding of {self.shape} in a table of {table.shape}: the table is (entries, features)")
        return table.take(self, 0)

    def scaled_dot_product_attention(self, key: Operand, value: Operand, attn_mask: Operand | None = None, dropout_p: float = 0.0,
                                     is_causal: bool = False, scale: float | None = None) -> Self:
        """softmax(self @ keyᵀ · scale + mask) @ value, self being the query: (…, L, E), key (…, S, E), value (…, S, V) → (…, L, V).

        A bool mask keeps where it is true, another is added. `scale` defaults to 1/sqrt(E). Raises UnsupportedError for dropout."""
        k, v = self._as_tensor(key), self._as_tensor(value)
        if dropout_p:
            raise UnsupportedError(f"scaled_dot_product_attention with dropout_p={dropout_p}: svod runs models, it does not train them")
        if is_causal and attn_mask is not None:
            raise UnsupportedError("scaled_dot_product_attention with attn_mask and is_causal: give one of them")
        if min(self.ndim, k.ndim, v.ndim) < 2 or self.shape[-1] != k.shape[-1] or k.shape[-2] != v.shape[-2]:
            raise ShapeError(f"scaled_dot_product_attention of query {self.shape}, key {k.shape} and value {v.shape}: they are (…, L, E), "
                             "(…, S, E) and (…, S, V)")
        scores = self.matmul(k.transpose(-2, -1))._wide_float().mul(1 / math.sqrt(self.shape[-1]) if scale is None else scale)
        if is_causal:
            row, column = coordinates(*scores.shape[-2:])
            scores = scores.where(self.from_uop(graph.alu(Ops.CMPLE, column, row)), -math.inf)
        elif attn_mask is not None:
            mask = self._as_tensor(attn_mask)
            scores = scores.where(mask, -math.inf) if mask.dtype.kind == "b" else scores.add(mask)
        return scores.softmax(-1).cast(promote(self.dtype, v.dtype)).matmul(v)


def _per_axis(name: str, what: str, value: IntOrInts, axes: int) -> tuple[int, ...]:
    """One number for each of `axes` axes."""
    found = (value,) * axes if isinstance(value, int) else tuple(value)
    if len(found) != axes:
        raise ShapeError(f"{name} with {what} {found}: give one number, or one for each of {axes} axes")
    return found


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
    pads = _per_axis(name, "padding", padding, len(kernel))
    if any(p < 0 for p in pads):
        raise ShapeError(f"{name} with padding {pads}: it cannot be negative")
    return [(p, p) for p in pads]
