"""Transposed convolution, interpolation and losses against their definitions in NumPy (PyTorch's documentation), written as loops."""
from __future__ import annotations

import itertools
import math
from collections.abc import Iterator

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from svod.errors import ShapeError, UnsupportedError
from svod.tensor import Tensor
from tests.draws import draws
from tests.tensor import checking
from tests.tensor.checking import Cases, check
from tests.tensor.strategies import Array, make, seeds

few = draws(8)
extents = st.integers(1, 9)


@pytest.fixture(scope="module", autouse=True)
def evaluator() -> Iterator[None]:
    """Evaluate node by node in NumPy, because the functions consist of operations that are tested with all evaluators."""
    checking.active = "reference"
    yield


def transposed(x: Array, w: Array, stride: list[int], padding: list[int], extra: list[int], dilation: list[int], groups: int) -> Array:
    """A transposed convolution: each input element times the weight, added to the output."""
    n, c, *sizes = x.shape
    outs, kernel = w.shape[1], w.shape[2:]
    full = [(s - 1) * t + d * (k - 1) + 1 + e for s, t, d, k, e in zip(sizes, stride, dilation, kernel, extra, strict=True)]
    y = np.zeros((n, outs * groups, *full))
    for i in range(c):
        group = i // (c // groups)
        for at in itertools.product(*map(range, sizes)):
            for k in itertools.product(*map(range, kernel)):
                to = tuple(a * t + b * d for a, t, b, d in zip(at, stride, k, dilation, strict=True))
                part = np.outer(x[(slice(None), i, *at)], w[(i, slice(None), *k)])
                y[(slice(None), slice(group * outs, (group + 1) * outs), *to)] += part
    return y[(..., *(slice(p, f - p) for p, f in zip(padding, full, strict=True)))]


@few
@given(data=st.data(), spatial=st.integers(1, 2), groups=st.sampled_from([1, 2]), seed=seeds)
def test_conv_transpose(data: st.DataObject, spatial: int, groups: int, seed: int) -> None:
    def draw(low: int, high: int) -> list[int]:
        return [data.draw(st.integers(low, high)) for _ in range(spatial)]
    sizes, kernel, stride, dilation = draw(1, 4), draw(1, 4), draw(1, 3), draw(1, 2)
    padding = [data.draw(st.integers(0, max(0, (d * (k - 1)) // 2))) for d, k in zip(dilation, kernel, strict=True)]
    extra = [data.draw(st.integers(0, max(s, d) - 1)) for s, d in zip(stride, dilation, strict=True)]
    x, w, b = make((2, 4, *sizes), "float32", seed), make((4, 3, *kernel), "float32", seed + 1), make((3 * groups,), "float32", seed + 2)
    expected = transposed(x.astype(np.float64), w.astype(np.float64), stride, padding, extra, dilation, groups)
    method = getattr(Tensor(x), f"conv_transpose{spatial}d")
    found = method(Tensor(w), Tensor(b), stride, padding, extra, groups, dilation)
    check(found, (expected + b.reshape(-1, *(1,) * spatial)).astype(np.float32), 20)


def resampled(x: Array, axis: int, new: int, factor: float | None, mode: str, corners: bool) -> Array:
    """Resize one axis of an image of less than 64 pixels per side, element by element. Positions are computed in float32 like PyTorch's,
    which copies an axis whose extent does not change, except for cubic resizing."""
    old = x.shape[axis]
    if mode != "cubic" and old == new:
        return x
    if mode == "nearest" and new == 2 * old:
        return x.repeat(2, axis)
    step = np.float32((old - 1) / max(1, new - 1) if corners else 1 / factor if factor else old / new)
    rows = []
    for i in range(new):
        at = np.float32(i) * step if corners else step * (np.float32(i) + np.float32(0.5)) - np.float32(0.5)

        def element(k: int) -> Array:
            return np.take(x, min(max(k, 0), old - 1), axis).astype(np.float64)
        if mode == "nearest":
            rows.append(element(math.floor(np.float32(i) * step)))
        elif mode == "linear":
            at = max(at, np.float32(0))
            t = float(at - math.floor(at))
            rows.append((1 - t) * element(math.floor(at)) + t * element(math.floor(at) + 1))
        else:
            total = np.zeros(element(0).shape)
            for k in range(math.floor(at) - 1, math.floor(at) + 3):
                d = abs(float(at) - k)
                total += element(k) * (1.25 * d ** 3 - 2.25 * d ** 2 + 1 if d <= 1 else -0.75 * (d ** 3 - 5 * d ** 2 + 8 * d - 4))
            rows.append(total)
    return np.stack(rows, axis)


@few
@given(data=st.data(), mode=st.sampled_from(["nearest", "bilinear", "bicubic"]), corners=st.booleans(), seed=seeds)
def test_interpolate(data: st.DataObject, mode: str, corners: bool, seed: int) -> None:
    old = [data.draw(st.integers(1, 6)) for _ in range(2)]
    x = make((1, 2, *old), "float32", seed)
    corners = corners and mode != "nearest"
    factor = data.draw(st.sampled_from([None, None, 1.3, 1.5, 2.0, 2.4, 2.6]))
    new = [math.floor(n * factor) for n in old] if factor else [data.draw(st.integers(1, 9) | st.integers(20, 37)) for _ in range(2)]
    expected = x
    for axis in range(2):
        expected = resampled(expected, axis + 2, new[axis], factor, mode.removeprefix("bi"), corners)
    options = {} if mode == "nearest" else {"align_corners": corners}
    found = Tensor(x).interpolate(None if factor else new, factor, mode, **options)  # type: ignore[arg-type]
    check(found, expected.astype(np.float32), 30)


def test_double_precision_stays() -> None:
    x = make((1, 2, 7), "float64", 3)
    at = np.clip((np.arange(11) + 0.5) * (7 / 11) - 0.5, 0, 6)
    check(Tensor(x).interpolate(size=11, mode="linear"), np.array([[np.interp(at, np.arange(7), row) for row in x[0]]]), 30)


def test_nearest_of_images_where_an_axis_stays_or_doubles_ignores_its_factor() -> None:
    """As in PyTorch if height and width of the result add up to 128 at most."""
    x = make((1, 2, 7, 6), "float32", 0)
    check(Tensor(x).interpolate(scale_factor=1.05), x)
    check(Tensor(x).interpolate(scale_factor=(1.1, 2.1)), x.repeat(2, 3))
    check(Tensor(x[..., :2]).interpolate(scale_factor=(1.05, 1.3)), x[..., :2])
    wide = make((1, 1, 1, 120), "float32", 0)
    at = [math.floor(np.float32(i) * np.float32(1 / 1.003)) for i in range(120)]
    check(Tensor(wide).interpolate(scale_factor=(9.0, 1.003)), wide[..., at].repeat(9, 2))
    check(Tensor(wide).interpolate(scale_factor=(8.0, 1.003)), wide.repeat(8, 2))


@pytest.mark.parametrize("factor", [1.3, 2.4])
def test_nearest_by_a_factor_that_is_not_whole(factor: float) -> None:
    """The extent may still be a whole multiple."""
    x = make((1, 1, 3 if factor < 2 else 2), "float32", 0)
    n = x.shape[-1]
    check(Tensor(x).interpolate(scale_factor=factor), x[..., [math.floor(i / factor) for i in range(math.floor(n * factor))]])


@few
@given(sizes=st.tuples(extents, extents), wanted=st.tuples(extents, st.none() | extents), seed=seeds)
def test_adaptive_average(sizes: tuple[int, int], wanted: tuple[int, int | None], seed: int) -> None:
    """Any extents; an infinity affects only its own windows."""
    x = make((2, *sizes), "float32", seed)
    x[0, 0, 0] = np.inf
    rows, columns = wanted[0], wanted[1] or sizes[1]

    def part(i: int, n: int, o: int) -> slice:
        return slice(i * n // o, -(-(i + 1) * n // o))
    expected = np.array([[[x[b, part(i, sizes[0], rows), part(j, sizes[1], columns)].mean(dtype=np.float64) for j in range(columns)]
                          for i in range(rows)] for b in range(2)])
    check(Tensor(x).adaptive_avg_pool2d(wanted), expected.astype(np.float32), 8)


def test_other_sizes() -> None:
    x = make((1, 8, 4, 6), "float32", 0)
    t = Tensor(x)
    check(t.interpolate(size=(2, 3), mode="area"), x.reshape(1, 8, 2, 2, 3, 2).mean((3, 5)).astype(np.float32), 4)
    check(Tensor(x[0]).interpolate(size=4, mode="nearest-exact"), x[0][..., [0, 2, 3, 5]])
    check(t.pixel_shuffle(2), x.reshape(1, 2, 2, 2, 4, 6).transpose(0, 1, 4, 2, 5, 3).reshape(1, 2, 8, 12))
    check(t.pixel_shuffle(2).pixel_unshuffle(2), x)
    check(Tensor(x[0]).max_pool1d(3, 2, 1), np.stack([x[0][..., max(0, 2 * i - 1):2 * i + 2].max(-1) for i in range(3)], -1))
    check(t.avg_pool3d((2, 2, 2)), x.reshape(1, 4, 2, 2, 2, 3, 2).mean((2, 4, 6)).astype(np.float32), 4)
    check(Tensor(x[0]).adaptive_avg_pool1d(3), x[0].reshape(8, 4, 3, 2).mean(-1).astype(np.float32), 4)
    wide = x.astype(np.float64)
    spread = (wide - wide.mean((2, 3), keepdims=True)) / np.sqrt(wide.var((2, 3), keepdims=True) + 1e-5)
    check(t.instance_norm(), spread.astype(np.float32), 8)


def test_rotary_embedding() -> None:
    x = make((2, 5, 8), "float32", 0)
    angles = np.arange(3, 8)[:, None] * 10000.0 ** (-np.arange(4) / 4)
    cos, sin = Tensor.rotary_angles(5, 8, start=3)
    check(cos, np.cos(angles).astype(np.float32), 4)
    pairs = x[..., :4] + 1j * x[..., 4:]
    turned = pairs * np.exp(1j * angles)
    check(Tensor(x).rotary_embedding(cos, sin), np.concatenate([turned.real, turned.imag], -1).astype(np.float32), 4)
    turned = (x[..., ::2] + 1j * x[..., 1::2]) * np.exp(1j * angles)
    expected = np.stack([turned.real, turned.imag], -1).reshape(x.shape).astype(np.float32)
    check(Tensor(x).rotary_embedding(cos, sin, interleaved=True), expected, 4)


# -- losses ---------------------------------------------------------------------------------------------
def reduced(losses: Array, reduction: str) -> Array:
    return np.asarray(losses if reduction == "none" else losses.mean() if reduction == "mean" else losses.sum(), np.float32)


@few
@given(reduction=st.sampled_from(["mean", "sum", "none"]), seed=seeds)
def test_losses_of_pairs(reduction: str, seed: int) -> None:
    a, b = make((3, 5), "float32", seed), make((3, 5), "float32", seed + 1)
    x, y = a.astype(np.float64), b.astype(np.float64)
    d = abs(x - y)
    p, q = 1 / (1 + np.exp(-x)), 1 / (1 + np.exp(-y))
    t, u = Tensor(a), Tensor(b)
    check(t.mse_loss(u, reduction), reduced(d ** 2, reduction), 8)
    check(t.l1_loss(u, reduction), reduced(d, reduction), 8)
    check(t.huber_loss(u, reduction, 0.7), reduced(np.where(d <= 0.7, d * d / 2, 0.7 * (d - 0.35)), reduction), 8)
    check(t.smooth_l1_loss(u, reduction, 0.7), reduced(np.where(d < 0.7, d * d / 1.4, d - 0.35), reduction), 8)
    cross = -(q * np.log(p) + (1 - q) * np.log(1 - p))
    check(t.sigmoid().binary_cross_entropy(u.sigmoid(), reduction=reduction), reduced(cross, reduction), 40)
    check(t.binary_cross_entropy_with_logits(u.sigmoid(), reduction=reduction), reduced(cross, reduction), 16)
    check(t.kl_div(u.sigmoid(), reduction), reduced(q * (np.log(q) - x), reduction), 16)


@few
@given(reduction=st.sampled_from(["mean", "sum", "none"]), smoothing=st.sampled_from([0.0, 0.2]), weighted=st.booleans(), seed=seeds)
def test_cross_entropy(reduction: str, smoothing: float, weighted: bool, seed: int) -> None:
    """Class numbers, one of which is ignored, and probabilities."""
    a = make((4, 3, 2), "float32", seed)
    rng = np.random.default_rng(seed)
    target = rng.integers(0, 3, (4, 2))
    target[1, 0] = -100
    weight = rng.random(3).astype(np.float32) + 0.5 if weighted else np.ones(3, np.float32)
    x = a.astype(np.float64)
    logs = x - np.log(np.exp(x).sum(1, keepdims=True))
    losses, scale = np.zeros((4, 2)), np.zeros((4, 2))
    for i, j in np.ndindex(4, 2):
        if target[i, j] >= 0:
            scale[i, j] = weight[target[i, j]]
            losses[i, j] = -(1 - smoothing) * scale[i, j] * logs[i, target[i, j], j] - smoothing / 3 * (weight * logs[i, :, j]).sum()
    expected = losses.sum() / scale.sum() if reduction == "mean" else reduced(losses, reduction)
    w = Tensor(weight) if weighted else None
    check(Tensor(a).cross_entropy(Tensor(target), w, reduction=reduction, label_smoothing=smoothing), np.asarray(expected, np.float32), 16)
    p = rng.random((4, 3, 2)).astype(np.float32)
    soft = p * (1 - smoothing) + smoothing / 3
    losses = -(soft * weight[:, None] * logs).sum(1)
    check(Tensor(a).cross_entropy(Tensor(p), w, reduction=reduction, label_smoothing=smoothing), reduced(losses, reduction), 16)


def test_errors_of_resampling_and_losses() -> None:
    x = Tensor.zeros(1, 4, 5, 5)
    cases: Cases = (
        (lambda: x.conv_transpose2d(Tensor.zeros(3, 2, 3, 3)), r"conv_transpose2d of \(1, 4, 5, 5\) with a weight of \(3, 2, 3, 3\)"),
        (lambda: x.conv_transpose2d(Tensor.zeros(4, 2, 3, 3), output_padding=1), "output padding is less"),
        (lambda: x.conv_transpose2d(Tensor.zeros(4, 2, 1, 1), padding=3), "nothing is left"),
        (lambda: x.interpolate(), "size or scale_factor"), (lambda: x.interpolate(size=(2, 2, 2)), "one for each of 2 axes"),
        (lambda: x.interpolate(size=2, mode="linear"), "1 more axes"), (lambda: x.adaptive_avg_pool2d((0, 2)), "positive extent"),
        (lambda: x.pixel_shuffle(3), "multiple of 3"),
        (lambda: x.pixel_unshuffle(2), "multiples of 2"), (lambda: x.mse_loss(Tensor.zeros(4)), r"mse_loss of .* with a target of \(4,\)"),
        (lambda: x.nll_loss(Tensor.zeros(1, 5, 5)), "nll_loss of"), (lambda: x.cross_entropy(Tensor.zeros(1, 5, 5)), "probabilities"),
        (lambda: x.max_pool3d(2, padding=2), "max_pool3d"), (lambda: Tensor.rotary_angles(3, 5), "even"),
        (lambda: x.rotary_embedding(Tensor.zeros(5, 2), Tensor.zeros(5, 2)), "rotary_embedding of"),
        (lambda: Tensor.zeros(2, 3).instance_norm(), "instance_norm of"))
    for act, match in cases:
        with pytest.raises(ShapeError, match=match):
            act()
    for act, match in ((lambda: x.interpolate(size=3, mode="cubic"), "'bicubic'"), (lambda: x.mse_loss(x, "max"), "reduction='max'"),
                       (lambda: x.interpolate(size=3, align_corners=True), "align_corners")):
        with pytest.raises(UnsupportedError, match=match):
            act()
