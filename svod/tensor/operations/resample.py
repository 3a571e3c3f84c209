"""Resampling: transposed convolution, interpolation, pixel shuffle. Names and signatures are those of torch.nn.functional."""
from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Self

import numpy as np

from svod.core.graph import graph
from svod.core.ir.dtype import dtypes, promote, to_numpy
from svod.errors import ShapeError, UnsupportedError
from svod.tensor.operations.elementwise import Operand
from svod.tensor.operations.nn import IntOrInts, NeuralNetwork, per_axis
from svod.tensor.precision import rounds_once

Numbers = np.ndarray[Any, np.dtype[Any]]
_SMALL_IMAGE = 128      # height + width in pixels up to which PyTorch has a separate 'nearest' kernel


class Resample(NeuralNetwork):
    """Operations that change the number of positions."""

    __slots__ = ()

    # -- transposed convolution --------------------------------------------------------------------
    def conv_transpose1d(self, weight: Operand, bias: Operand | None = None, stride: IntOrInts = 1, padding: IntOrInts = 0,
                         output_padding: IntOrInts = 0, groups: int = 1, dilation: IntOrInts = 1) -> Self:
        """A transposed convolution over one axis, as `conv_transpose2d`: (N, C, L) with a weight (C, O/groups, K)."""
        return self._transposed("conv_transpose1d", 1, weight, bias, stride, padding, output_padding, groups, dilation)

    def conv_transpose2d(self, weight: Operand, bias: Operand | None = None, stride: IntOrInts = 1, padding: IntOrInts = 0,
                         output_padding: IntOrInts = 0, groups: int = 1, dilation: IntOrInts = 1) -> Self:
        """The transpose of `conv2d`: (N, C, H, W), or (C, H, W), with a weight (C, O/groups, KH, KW) and a bias (O,) gives (N, O, OH, OW)
        with OH = (H-1)·stride - 2·padding + dilation·(KH-1) + output_padding + 1. Raises ShapeError.

        It is computed as one convolution: output positions with the same remainder modulo the stride form a channel, with the taps that
        reach them. So no inserted zeros are multiplied, except along an axis with both stride and dilation, where zeros are inserted into
        the weight."""
        return self._transposed("conv_transpose2d", 2, weight, bias, stride, padding, output_padding, groups, dilation)

    def conv_transpose3d(self, weight: Operand, bias: Operand | None = None, stride: IntOrInts = 1, padding: IntOrInts = 0,
                         output_padding: IntOrInts = 0, groups: int = 1, dilation: IntOrInts = 1) -> Self:
        """A transposed convolution over three axes, as `conv_transpose2d`: (N, C, D, H, W) with a weight (C, O/groups, KD, KH, KW)."""
        return self._transposed("conv_transpose3d", 3, weight, bias, stride, padding, output_padding, groups, dilation)

    @rounds_once
    def _transposed(self, name: str, spatial: int, weight: Operand, bias: Operand | None, stride: IntOrInts, padding: IntOrInts,
                    output_padding: IntOrInts, groups: int, dilation: IntOrInts) -> Self:
        given = w = self._as_tensor(weight)
        if self.ndim == spatial + 1:
            return self.unsqueeze(0)._transposed(name, spatial, w, bias, stride, padding, output_padding, groups, dilation).squeeze(0)
        if self.ndim != spatial + 2 or w.ndim != spatial + 2 or groups < 1 or w.shape[0] != self.shape[1] or w.shape[0] % groups:
            raise ShapeError(f"{name} of {self.shape} with a weight of {w.shape} in {groups} group(s): the input is (N, C, …) with "
                             f"{spatial} more axes, the weight (C, O/groups, …), and groups divides C")
        steps, dilations = per_axis(name, "stride", stride, spatial), per_axis(name, "dilation", dilation, spatial)
        pads, extra = per_axis(name, "padding", padding, spatial), per_axis(name, "output_padding", output_padding, spatial)
        _check_transposed(name, steps, dilations, pads, extra)
        if any(s > 1 and d > 1 for s, d in zip(steps, dilations, strict=True)):
            w, dilations = _spread_out(w, dilations, steps)
        kernel = w.shape[2:]
        # zeros before the taps move the beginning of the result to that of a block, if they need no further block
        before = [-p % s if -(-(k + -p % s) // s) == -(-k // s) else 0 for p, s, k in zip(pads, steps, kernel, strict=True)]
        begins = [p + b for p, b in zip(pads, before, strict=True)]
        full = self._all_positions(name, w.pad([(0, 0), (0, 0), *((b, 0) for b in before)]), steps, dilations, groups)
        sizes = [(n - 1) * s - 2 * p + d * (k - 1) + e + 1 for n, s, p, d, k, e in
                 zip(self.shape[2:], steps, pads, dilations, kernel, extra, strict=True)]
        if min(sizes) < 1:
            raise ShapeError(f"{name} of {self.shape} with a weight of {given.shape} and padding {pads}: nothing is left")
        blocks = [(b // s * s, -(-(b + n) // s) * s) for b, n, s in zip(begins, sizes, steps, strict=True)]
        behind = [max(0, end - m) for (_, end), m in zip(blocks, full.shape[2:], strict=True)]
        result = full.pad([(0, 0), (0, 0), *((0, b) for b in behind)]).shrink([None, None, *blocks])
        if result.shape[2:] != tuple(sizes):
            # Whole blocks of `stride` positions are stored first, so that neighbouring lanes of one kernel use equal taps.
            result = result.from_uop(graph.contiguous(result.uop))
            result = result.shrink([None, None, *((b % s, b % s + n) for b, n, s in zip(begins, sizes, steps, strict=True))])
        return result._with_bias(name, bias)

    def _all_positions(self, name: str, weight: Self, steps: Sequence[int], dilations: Sequence[int], groups: int) -> Self:
        """The transposed convolution before padding cuts it. Taps j·stride + r reach the output positions with remainder r modulo the
        stride, which are channels of one convolution."""
        spatial, kernel = len(steps), weight.shape[2:]
        w = weight
        taps = [-(-k // s) for k, s in zip(kernel, steps, strict=True)]
        w = w.pad([(0, 0), (0, 0), *((0, t * s - k) for t, s, k in zip(taps, steps, kernel, strict=True))])
        c, o = w.shape[0] // groups, w.shape[1]
        w = w.reshape(groups, c, o, *(x for t, s in zip(taps, steps, strict=True) for x in (t, s)))
        tap_axes, step_axes = [3 + 2 * i for i in range(spatial)], [4 + 2 * i for i in range(spatial)]
        w = w.permute(0, 2, *step_axes, 1, *tap_axes).reshape(groups * o * math.prod(steps), c, *taps).flip(*range(2, 2 + spatial))
        reach = [d * (t - 1) for d, t in zip(dilations, taps, strict=True)]
        wide = self.pad([(0, 0), (0, 0), *((r, r) for r in reach)]).cast(promote(self.dtype, w.dtype))
        blocked = wide._convolve(name, spatial, w, None, 1, 0, dilations, groups)
        # (N, O, steps…, positions…) → (N, O, positions × steps)
        blocks = blocked.shape[2:]
        blocked = blocked.reshape(blocked.shape[0], groups * o, *steps, *blocks)
        order = [x for i in range(spatial) for x in (2 + spatial + i, 2 + i)]
        return blocked.permute(0, 1, *order).reshape(blocked.shape[0], groups * o, *(b * s for b, s in zip(blocks, steps, strict=True)))

    # -- interpolation -----------------------------------------------------------------------------
    def interpolate(self, size: IntOrInts | None = None, scale_factor: float | Sequence[float] | None = None, mode: str = "nearest",
                    align_corners: bool | None = None) -> Self:
        """Resize (N, C, …): the axes after the channels get the extents `size`, or their own times `scale_factor`, rounded down.

        `mode`: 'nearest', 'nearest-exact', 'linear' (3 axes), 'bilinear' (4), 'trilinear' (5), 'bicubic' (4; Keys' kernel with a = -0.75),
        or 'area' (means, as `adaptive_avg_pool2d`). Positions are PyTorch's: with `align_corners` the centres of the corner elements
        coincide, otherwise their edges. Axes are resized one after the other, from the last to the first, so that the largest arrays are
        sums of whole rows; axes that shrink come before the last axis, which then has fewer rows. Each is resized by a few gathers at
        positions known when the graph is built. Raises ShapeError and UnsupportedError."""
        spatial = self.ndim - 2
        wanted = {"linear": 1, "bilinear": 2, "trilinear": 3, "bicubic": 2}.get(mode, spatial)
        if spatial < 1 or spatial > 3 or wanted != spatial:
            raise ShapeError(f"interpolate of {self.shape} with mode {mode!r}: the input is (N, C, …) with {max(1, wanted)} more axes")
        if (size is None) == (scale_factor is None):
            raise ShapeError(f"interpolate of {self.shape}: give size or scale_factor")
        factors: tuple[float | None, ...] = (None,) * spatial
        if scale_factor is not None:
            factors = tuple([scale_factor] * spatial if isinstance(scale_factor, (int, float)) else scale_factor)
        sizes = (per_axis("interpolate", "size", size, spatial) if size is not None
                 else tuple(math.floor(n * f) for n, f in zip(self.shape[2:], factors, strict=True) if f is not None))
        if len(factors) != spatial or min(sizes) < 1:
            raise ShapeError(f"interpolate of {self.shape} to {sizes}: give a positive extent for each of {spatial} axes")
        if align_corners is not None and mode in ("nearest", "nearest-exact", "area"):
            raise UnsupportedError(f"interpolate with mode {mode!r}: align_corners is for the linear modes and bicubic")
        if mode == "area":
            return self._adaptive_average("interpolate with mode 'area'", spatial, sizes)
        if mode in ("nearest", "nearest-exact"):
            result, exact = self, mode == "nearest-exact"
            is_small = spatial == 2 and sum(sizes) <= _SMALL_IMAGE
            for axis, (n, f) in enumerate(zip(sizes, factors, strict=True), 2):
                result = result._nearest(axis, n, f, exact, is_small)
            return result
        if mode not in ("linear", "bilinear", "trilinear", "bicubic"):
            raise UnsupportedError(f"interpolate with mode {mode!r}: use 'nearest', 'nearest-exact', 'linear', 'bilinear', 'trilinear', "
                                   "'bicubic' or 'area'")
        return self._interpolated(sizes, factors, mode, bool(align_corners))

    @rounds_once
    def _interpolated(self, sizes: Sequence[int], factors: Sequence[float | None], mode: str, align_corners: bool) -> Self:
        """Resize by the linear modes and bicubic."""
        result = self._float()
        *others, last = zip(range(2, self.ndim), sizes, factors, strict=True)
        shrinking = [(axis, n, f) for axis, n, f in others if n < self.shape[axis]]
        for axis, n, f in (*shrinking, last, *reversed([step for step in others if step not in shrinking])):
            if n == self.shape[axis] and mode != "bicubic":
                continue        # PyTorch ignores the factor if the extent does not change
            if shrinking and axis == self.ndim - 1:     # whole rows are sums of rows; at single positions they would be gathered
                result = result.from_uop(graph.contiguous(result.uop))
            if self.shape[axis] == 1:       # all taps read the only element, and their weights add up to 1
                result = result.expand(*result.shape[:axis], n, *result.shape[axis + 1:])
                continue
            positions = _source_positions(self.shape[axis], n, f, align_corners, mode != "bicubic", to_numpy(result.dtype))
            result = result._weighted(axis, *(_cubic_taps if mode == "bicubic" else _linear_taps)(positions, self.shape[axis]))
        return result

    def _nearest(self, axis: int, n: int, factor: float | None, exact: bool, is_small: bool) -> Self:
        """Resize an axis by repeating or skipping elements. If each element is repeated the same number of times, it is a view."""
        old = self.shape[axis]
        positions = _nearest_positions(old, n, factor, exact, is_small, self.dtype == dtypes.float64)
        if n % old == 0 and np.array_equal(positions, np.arange(n) // (n // old)):
            return self.repeat_interleave(n // old, axis)
        return self.take(positions, axis)

    def _weighted(self, axis: int, positions: Numbers, weights: Numbers) -> Self:
        """The sum of weight · element over the taps. `positions` along the axis and `weights` are (taps, n)."""
        shape = tuple(-1 if i == axis else 1 for i in range(self.ndim))
        total: Self | None = None
        for at, weight in zip(positions, weights, strict=True):
            part = self.take(np.ascontiguousarray(at), axis).mul(self._beside(np.ascontiguousarray(weight)).cast(self.dtype).reshape(shape))
            total = part if total is None else total.add(part)
        assert total is not None
        return total

    # -- pixels and channels -----------------------------------------------------------------------
    def pixel_shuffle(self, upscale_factor: int) -> Self:
        """Rearrange (…, C·r², H, W) as (…, C, H·r, W·r): r² channels become a block of positions. A view."""
        r = upscale_factor
        if self.ndim < 3 or r < 1 or self.shape[-3] % (r * r):
            raise ShapeError(f"pixel_shuffle of {self.shape} by {r}: the channels (axis -3) must be a multiple of {r}²")
        *lead, c, h, w = self.shape
        k = len(lead)
        blocks = self.reshape(*lead, c // (r * r), r, r, h, w)
        return blocks.permute(*range(k), k, k + 3, k + 1, k + 4, k + 2).reshape(*lead, c // (r * r), h * r, w * r)

    def pixel_unshuffle(self, downscale_factor: int) -> Self:
        """Rearrange (…, C, H·r, W·r) as (…, C·r², H, W): the inverse of `pixel_shuffle`. A view."""
        r = downscale_factor
        if self.ndim < 3 or r < 1 or self.shape[-1] % r or self.shape[-2] % r:
            raise ShapeError(f"pixel_unshuffle of {self.shape} by {r}: the last two extents must be multiples of {r}")
        *lead, c, h, w = self.shape
        k = len(lead)
        blocks = self.reshape(*lead, c, h // r, r, w // r, r)
        return blocks.permute(*range(k), k, k + 2, k + 4, k + 1, k + 3).reshape(*lead, c * r * r, h // r, w // r)


def _spread_out(w: Any, dilations: Sequence[int], steps: Sequence[int]) -> tuple[Any, tuple[int, ...]]:
    """(the weight with zeros between its taps along axes with both stride and dilation, the remaining dilations)."""
    left = []
    for axis, (d, s) in enumerate(zip(dilations, steps, strict=True), 2):
        if s == 1 or d == 1:
            left.append(d)
            continue
        k = w.shape[axis]
        apart = w.unsqueeze(axis + 1).pad([(0, d - 1) if i == axis + 1 else (0, 0) for i in range(w.ndim + 1)])
        w = apart.flatten(axis, axis + 1).narrow(axis, 0, d * (k - 1) + 1)
        left.append(1)
    return w, tuple(left)


def _nearest_positions(old: int, new: int, factor: float | None, exact: bool, is_small: bool, is_double: bool) -> Numbers:
    """The source position of each element of a result by 'nearest' or 'nearest-exact' (`exact`), computed like PyTorch's kernels for
    CPUs: in float32; for double values (`is_double`) in float64 with a last rounding to float32; for small images (`is_small`) always in
    float32, where 'nearest' ignores the factor if the extent stays or doubles."""
    if is_small and not exact and new in (old, 2 * old):
        return np.arange(new, dtype=np.int32) // (new // old)
    kind: np.dtype[Any] = np.dtype(np.float64 if is_double and not is_small else np.float32)
    step = kind.type(1 / factor) if factor is not None else kind.type(old) / kind.type(new)
    index: Numbers = np.arange(new, dtype=kind) + kind.type(0.5 if exact else 0)
    return np.asarray(np.minimum(np.floor((index * step).astype(np.float32)).astype(np.int32), old - 1))


def _source_positions(old: int, new: int, factor: float | None, align_corners: bool, clip: bool, kind: np.dtype[Any]) -> Numbers:
    """The source position of each element of the result, computed in the dtype of the values, as in PyTorch."""
    index: Numbers = np.arange(new, dtype=kind)
    if align_corners:
        return np.asarray(index * kind.type((old - 1) / (new - 1) if new > 1 else 0.0))
    step = kind.type(1 / factor if factor is not None else old / new)
    positions = np.asarray(step * (index + kind.type(0.5)) - kind.type(0.5))
    return np.maximum(positions, kind.type(0)) if clip else positions


def _linear_taps(positions: Numbers, old: int) -> tuple[Numbers, Numbers]:
    low = np.minimum(np.floor(positions).astype(np.int32), old - 1)
    part = np.clip(positions - low, 0, 1).astype(positions.dtype)
    return np.stack([low, np.minimum(low + 1, old - 1)]), np.stack([1 - part, part])


def keys_near(d: Any, a: float) -> Any:
    """Keys' kernel with the parameter `a` at distances `d` of up to one element; `d` is an array or a tensor, and so is the result."""
    return (d * (a + 2) - (a + 3)) * d * d + 1


def keys_far(d: Any, a: float) -> Any:
    """Keys' kernel with the parameter `a` at distances `d` of one to two elements; `d` is an array or a tensor, and so is the result."""
    return ((d * a - 5 * a) * d + 8 * a) * d - 4 * a


def _cubic_taps(positions: Numbers, old: int) -> tuple[Numbers, Numbers]:
    """Positions and weights of the four taps of cubic interpolation (Keys, "Cubic convolution interpolation for digital image
    processing", 1981)."""
    a = -0.75
    low = np.floor(positions).astype(np.int32)
    t = (positions - low).astype(positions.dtype)
    weights = np.stack([keys_far(t + 1, a), keys_near(t, a), keys_near(1 - t, a), keys_far(2 - t, a)]).astype(positions.dtype)
    return np.clip(np.stack([low - 1, low, low + 1, low + 2]), 0, old - 1), weights


def _check_transposed(name: str, steps: Sequence[int], dilations: Sequence[int], pads: Sequence[int], extra: Sequence[int]) -> None:
    fits = all(0 <= e < max(s, d) for e, s, d in zip(extra, steps, dilations, strict=True))
    if min(steps) < 1 or min(dilations) < 1 or min(pads) < 0 or not fits:
        raise ShapeError(f"{name} with stride {steps}, dilation {dilations}, padding {pads} and output_padding {extra}: strides and "
                         "dilations are positive, padding is not negative, output padding is less than the stride or the dilation")
