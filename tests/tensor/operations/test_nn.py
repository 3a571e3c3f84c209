"""Building blocks of neural networks against direct NumPy loops."""
from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from svod.core.graph.shapes import shape_of, size_of
from svod.core.ir.uop import Ops
from svod.errors import ShapeError, UnsupportedError
from svod.tensor import Tensor
from tests.draws import draws
from tests.tensor.checking import Cases, check
from tests.tensor.strategies import Array, make, seeds, views

few = draws(8)
Pair = tuple[int, int]


def conv_loop(x: Array, w: Array, stride: Pair, padding: Pair, dilation: Pair, groups: int) -> Array:
    """A cross-correlation in float64, one output position at a time."""
    (n, c, _, _), (o, cg, kh, kw) = x.shape, w.shape
    p = np.pad(x.astype(np.float64), ((0, 0), (0, 0), (padding[0],) * 2, (padding[1],) * 2))
    oh = (p.shape[2] - dilation[0] * (kh - 1) - 1) // stride[0] + 1
    ow = (p.shape[3] - dilation[1] * (kw - 1) - 1) // stride[1] + 1
    out = np.zeros((n, o, oh, ow))
    for i in range(o):
        first = (i // (o // groups)) * cg
        for y in range(oh):
            for z in range(ow):
                rows = slice(y * stride[0], y * stride[0] + dilation[0] * (kh - 1) + 1, dilation[0])
                columns = slice(z * stride[1], z * stride[1] + dilation[1] * (kw - 1) + 1, dilation[1])
                out[:, i, y, z] = (p[:, first:first + cg, rows, columns] * w[i]).sum((1, 2, 3))
    assert c == cg * groups
    return out



@few
@given(n=st.integers(1, 2), groups=st.sampled_from([1, 1, 2, 3]), cg=st.integers(1, 3), og=st.integers(1, 3),
       image=st.tuples(st.integers(5, 8), st.integers(5, 8)),
       kernel=st.tuples(st.integers(1, 3), st.integers(1, 3)), stride=st.tuples(st.integers(1, 3), st.integers(1, 2)),
       padding=st.tuples(st.integers(0, 2), st.integers(0, 1)), dilation=st.tuples(st.integers(1, 2), st.integers(1, 2)), seed=seeds,
       bias=st.booleans())
def test_conv2d(n: int, groups: int, cg: int, og: int, image: Pair, kernel: Pair, stride: Pair, padding: Pair, dilation: Pair, seed: int,
                bias: bool) -> None:
    x, w = make((n, cg * groups, *image), "float32", seed), make((og * groups, cg, *kernel), "float32", seed + 1)
    b = make((og * groups,), "float32", seed + 2)
    expected = conv_loop(x, w, stride, padding, dilation, groups) + (b[:, None, None] if bias else 0)
    check(Tensor(x).conv2d(Tensor(w), Tensor(b) if bias else None, stride, padding, dilation, groups), expected.astype(np.float32), 8)


@pytest.mark.parametrize(("image", "kernel", "stride", "padding", "dilation", "taps"), [
    ((5, 7), (3, 3), (1, 1), (12, 12), (12, 12), (1, 1)),           # only the middle tap overlaps the image
    ((5, 7), (3, 3), (1, 1), (6, 6), (6, 6), (1, 3)),               # all taps overlap it along the second axis
    ((3, 1), (5, 3), (1, 1), (4, 2), (2, 2), (3, 1)),
    ((7, 5), (2, 3), (1, 5), (3, 2), (12, 4), (2, 1)),          # one output position: the image is cut to the elements that it reads
    ((2, 11), (4, 3), (3, 2), (6, 1), (3, 1), (2, 3)),
    ((1, 1), (1, 1), (4, 4), (3, 3), (1, 1), (1, 1)),               # no position reads the image
])
def test_taps_that_meet_padding_alone_are_not_multiplied(image: Pair, kernel: Pair, stride: Pair, padding: Pair, dilation: Pair,
                                                         taps: Pair) -> None:
    x, w = make((2, 4, *image), "float32", 0), make((6, 2, *kernel), "float32", 1)
    expected = conv_loop(x, w, stride, padding, dilation, 2).astype(np.float32)
    check(Tensor(x).conv2d(Tensor(w), None, stride, padding, dilation, 2), expected, 8)
    pads = [(p, p) for p in padding]
    assert Tensor(x)._without_idle_taps(Tensor(w), pads, stride, dilation)[1].shape[2:] == taps


def test_conv_of_other_ranks_and_paddings() -> None:
    x, w = make((2, 3, 8, 7), "float32", 0), make((4, 3, 3, 2), "float32", 1)
    one = conv_loop(x, w, (1, 1), (0, 0), (1, 1), 1).astype(np.float32)
    check(Tensor(x).conv2d(Tensor(w), padding="valid"), one, 8)
    check(Tensor(x[0]).conv2d(Tensor(w)), one[0], 8)
    row = conv_loop(x[:, :, :1], w[:, :, :1], (1, 1), (0, 0), (1, 1), 1)[:, :, 0]
    check(Tensor(x[:, :, 0]).conv1d(Tensor(w[:, :, 0])), row.astype(np.float32), 8)
    same = np.pad(x, ((0, 0), (0, 0), (1, 1), (0, 1)))
    check(Tensor(x).conv2d(Tensor(w), padding="same"), conv_loop(same, w, (1, 1), (0, 0), (1, 1), 1).astype(np.float32), 8)
    cube, k = make((1, 2, 4, 5, 3), "float32", 2), make((3, 2, 2, 1, 3), "float32", 3)
    expected = np.zeros((1, 3, 3, 5, 1))
    for d in range(2):
        # each depth of the result is computed as a separate image
        images = cube[:, :, d:d + 3].transpose(0, 2, 1, 3, 4).reshape(3, 2, 5, 3)
        expected += conv_loop(images, k[:, :, d], (1, 1), (0, 0), (1, 1), 1).transpose(1, 0, 2, 3)[None]
    check(Tensor(cube).conv3d(Tensor(k)), expected.astype(np.float32), 16)


def test_convolution_is_one_product_and_one_reduction_without_a_window_tensor() -> None:
    x, w = Tensor.empty(1, 8, 14, 14), Tensor.empty(16, 8, 3, 3)
    y = x.conv2d(w, padding=1)
    assert not list(y.uop.walk(Ops.CONTIGUOUS, Ops.GATHER))
    (reduce,) = y.uop.walk(Ops.REDUCE_AXIS)
    (product,) = y.uop.walk(Ops.MUL)
    assert reduce.src == (product,)
    assert shape_of(product) == (1, 16, 8, 14, 14, 3, 3)
    assert size_of(product) == 16 * 8 * 14 * 14 * 9
    depthwise = x.conv2d(Tensor.empty(8, 1, 3, 3), groups=8)
    assert size_of(next(depthwise.uop.walk(Ops.MUL))) == 8 * 12 * 12 * 9


def pool_loop(x: Array, kernel: Pair, stride: Pair, padding: Pair, ceil: bool, f: Callable[[Array], Array]) -> Array:
    """Pooling by its definition: f of the elements of each window that are inside the image."""
    sizes = []
    for i in (0, 1):
        room = x.shape[2 + i] + 2 * padding[i] - kernel[i]
        count = (-(-room // stride[i]) if ceil else room // stride[i]) + 1
        sizes.append(count - 1 if ceil and (count - 1) * stride[i] >= x.shape[2 + i] + padding[i] else count)
    out = np.zeros((*x.shape[:2], *sizes))
    for y in range(sizes[0]):
        for z in range(sizes[1]):
            top, left = y * stride[0] - padding[0], z * stride[1] - padding[1]
            out[:, :, y, z] = f(x[:, :, max(0, top):top + kernel[0], max(0, left):left + kernel[1]])
    return out


@few
@given(image=st.tuples(st.integers(4, 9), st.integers(4, 9)), kernel=st.tuples(st.integers(1, 3), st.integers(2, 4)),
       stride=st.tuples(st.integers(1, 3), st.integers(1, 3)), pad=st.booleans(), ceil=st.booleans(), seed=seeds)
def test_pools(image: Pair, kernel: Pair, stride: Pair, pad: bool, ceil: bool, seed: int) -> None:
    x = make((2, 3, *image), "float32", seed)
    padding = (kernel[0] // 2, kernel[1] // 2) if pad else (0, 0)
    check(Tensor(x).max_pool2d(kernel, stride, padding, ceil_mode=ceil),
          pool_loop(x, kernel, stride, padding, ceil, lambda a: a.max((2, 3))).astype(np.float32))
    check(Tensor(x).avg_pool2d(kernel, stride, padding, ceil_mode=ceil, count_include_pad=False),
          pool_loop(x, kernel, stride, padding, ceil, lambda a: a.mean((2, 3), dtype=np.float64)).astype(np.float32), 4)
    padded = np.pad(x, ((0, 0), (0, 0), (padding[0],) * 2, (padding[1],) * 2))
    if not ceil:
        check(Tensor(x).avg_pool2d(kernel, stride, padding),
              pool_loop(padded, kernel, stride, (0, 0), ceil, lambda a: a.mean((2, 3), dtype=np.float64)).astype(np.float32), 4)


def test_pools_of_other_kinds() -> None:
    x = make((1, 2, 6, 6), "int8", 0)
    check(Tensor(x).max_pool2d(2), x.reshape(1, 2, 3, 2, 3, 2).max((3, 5)))
    check(Tensor(x - 100).max_pool2d(3, 2, 1), pool_loop(x - 100, (3, 3), (2, 2), (1, 1), False, lambda a: a.max((2, 3))).astype(np.int8))
    f = make((2, 3, 6, 4), "float32", 1)
    check(Tensor(f).adaptive_avg_pool2d(1), f.mean((2, 3), keepdims=True), 4)
    check(Tensor(f).adaptive_avg_pool2d((3, 2)), f.reshape(2, 3, 3, 2, 2, 2).mean((3, 5)), 4)
    check(Tensor(f).max_pool2d(2, 1, dilation=2), np.maximum.reduce([f[:, :, a:a + 4, b:b + 2] for a in (0, 2) for b in (0, 2)]))


@pytest.mark.slow
@few
@given(x=views(st.sampled_from(["float16", "float32", "float64"]), least=1, zero=False), data=st.data())
def test_rows(x: tuple[Tensor, Array], data: st.DataObject) -> None:
    t, a = x
    axis = data.draw(st.integers(-a.ndim, a.ndim - 1))
    wide = a.astype(np.float64)
    exps = np.exp(wide - wide.max(axis, keepdims=True))
    soft = exps / exps.sum(axis, keepdims=True)
    check(t.softmax(axis), soft.astype(a.dtype), 4)
    check(t.log_softmax(dim=axis), np.log(soft).astype(a.dtype), 8)
    k = data.draw(st.integers(1, a.ndim))
    axes = tuple(range(a.ndim - k, a.ndim))
    gain, shift = make(a.shape[-k:], a.dtype.name, 1), make(a.shape[-k:], a.dtype.name, 2)
    normal = (wide - wide.mean(axes, keepdims=True)) / np.sqrt(wide.var(axes, keepdims=True) + 1e-2)
    check(t.layer_norm(a.shape[-k:], eps=1e-2), normal.astype(a.dtype), 32)
    check(t.layer_norm(a.shape[-k:], Tensor(gain), Tensor(shift), eps=1e-2), (normal * gain + shift).astype(a.dtype), 64)
    rms = wide / np.sqrt((wide ** 2).mean(axes, keepdims=True) + 1e-2) * gain
    check(t.rms_norm(a.shape[-k:], Tensor(gain), eps=1e-2), rms.astype(a.dtype), 8)


def test_softmax_of_large_and_masked_values() -> None:
    expected = np.array([[1 / (1 + math.e), math.e / (1 + math.e)], [0, 1]], np.float32)
    check(Tensor([[1000.0, 1001.0], [-math.inf, 0.0]]).softmax(), expected, 2)
    check(Tensor([[-math.inf, 0.0]]).logsumexp(1), np.zeros(1, np.float32))
    check(Tensor([-math.inf, -math.inf]).logsumexp(0), np.array(-math.inf, np.float32))
    check(Tensor.zeros(2, 0).softmax(-1), np.zeros((2, 0), np.float32))
    check(Tensor.zeros(2, 0).log_softmax(-1), np.zeros((2, 0), np.float32))
    check(Tensor([math.nan, 0.0, 0.1]).threshold(0.0, 7.0), np.array([math.nan, 7.0, 0.1], np.float32))
    check(Tensor.zeros(2, 0).logsumexp(-1), np.full(2, -np.inf, np.float32))
    check(Tensor.zeros(0, 3, dtype="float16").logsumexp(0, keepdim=True), np.full((1, 3), -np.inf, np.float16))


def test_batch_and_group_norm() -> None:
    x = make((2, 6, 3, 4), "float32", 0)
    mean, var, gain, shift = (make((6,), "float32", i) for i in range(1, 5))
    var = np.abs(var)
    column = (slice(None), None, None)
    expected = (x - mean[column]) / np.sqrt(var[column] + 1e-5) * gain[column] + shift[column]
    check(Tensor(x).batch_norm(Tensor(mean), Tensor(var), Tensor(gain), Tensor(shift)), expected, 64)
    check(Tensor(x).batch_norm(Tensor(mean), Tensor(var)), (x - mean[column]) / np.sqrt(var[column] + 1e-5), 64)
    grouped = x.reshape(2, 3, -1).astype(np.float64)
    normal = ((grouped - grouped.mean(-1, keepdims=True)) / np.sqrt(grouped.var(-1, keepdims=True) + 1e-5)).reshape(x.shape)
    check(Tensor(x).group_norm(3, Tensor(gain), Tensor(shift)), (normal * gain[column] + shift[column]).astype(np.float32), 16)


def test_embedding_is_a_gather() -> None:
    table, index = make((11, 5), "float32", 0), np.array([[0, 10, 3], [7, 7, 1]])
    y = Tensor(index).embedding(Tensor(table))
    assert len(list(y.uop.walk(Ops.GATHER))) == 1
    check(y, table[index])


@pytest.mark.slow
@few
@given(batch=st.sampled_from([(), (2,), (2, 3)]), rows=st.integers(1, 5), columns=st.integers(1, 5), width=st.sampled_from([1, 4, 7]),
       out=st.integers(1, 4), mode=st.sampled_from(["plain", "causal", "bool", "float"]), seed=seeds)
def test_attention(batch: tuple[int, ...], rows: int, columns: int, width: int, out: int, mode: str, seed: int) -> None:
    q, k = make((*batch, rows, width), "float32", seed), make((*batch, columns, width), "float32", seed + 1)
    v = make((*batch, columns, out), "float32", seed + 2)
    scores = q.astype(np.float64) @ np.swapaxes(k, -1, -2) / math.sqrt(width)
    mask: Array | None = None
    if mode == "causal":
        scores = np.where(np.tril(np.ones((rows, columns), bool)), scores, -np.inf)
    elif mode == "bool":
        mask = make((rows, columns), "bool", seed)
        scores = np.where(mask, scores, -np.inf)
    elif mode == "float":
        mask = make((rows, columns), "float32", seed)
        mask[rows // 2] = -np.inf
        scores = scores + mask
    exps = np.exp(scores - np.maximum(scores.max(-1, keepdims=True), -1e300))
    # rows without any score are zeros, as in PyTorch
    expected = (exps / np.maximum(exps.sum(-1, keepdims=True), 1e-300)) @ v
    attn_mask = None if mask is None else Tensor(mask)
    result = Tensor(q).scaled_dot_product_attention(Tensor(k), Tensor(v), attn_mask, is_causal=mode == "causal")
    check(result, expected.astype(np.float32), 8)


def test_errors_of_networks() -> None:
    x, w = Tensor.zeros(1, 3, 5, 5), Tensor.zeros(4, 3, 3, 3)
    cases: Cases = ((lambda: x.conv2d(Tensor.zeros(4, 2, 3, 3)), r"conv2d of \(1, 3, 5, 5\) with a weight of \(4, 2, 3, 3\)"),
             (lambda: x.conv2d(w, Tensor.zeros(3)), "bias"), (lambda: x.conv2d(w, padding=(1, 2, 3)), "padding"),
             (lambda: x.conv2d(w, padding="same", stride=2), "same"), (lambda: x.conv2d(w, dilation=3), "does not fit"),
             (lambda: x.conv2d(w, stride=0), "does not fit"), (lambda: x.max_pool2d(2, padding=2), "half the kernel"),
             (lambda: x.max_pool2d(7), "does not fit"), (lambda: x.layer_norm(4), "last extents"),
             (lambda: x.batch_norm(Tensor.zeros(4), Tensor.zeros(4)), "batch_norm"), (lambda: x.group_norm(2), "divide evenly"),
             (lambda: x.scaled_dot_product_attention(w, w), "query"),
             (lambda: x.scaled_dot_product_attention(Tensor.zeros(2, 1, 4, 5), Tensor.zeros(2, 2, 4, 7)),
              r"attention of shapes \(1, 3, 5, 5\) and \(2, 1, 4, 5\) and \(2, 2, 4, 7\): axis -3 has extents 3 and 2"),
             (lambda: x.scaled_dot_product_attention(x, x, Tensor.zeros(4, 5)), r"with a mask of \(4, 5\): it must broadcast"),
             (lambda: x.layer_norm(5, weight=Tensor.zeros(4)), r"layer_norm of \(1, 3, 5, 5\) with a weight of \(4,\): it must be \(5,\)"),
             (lambda: Tensor([1]).embedding(x), "embedding"))
    for act, match in cases:
        with pytest.raises(ShapeError, match=match):
            act()
    unsupported: Cases = ((lambda: x.gelu("fast"), "gelu"),
             (lambda: x.batch_norm(Tensor.zeros(3), Tensor.zeros(3), training=True), "training"),
             (lambda: x.scaled_dot_product_attention(x, x, dropout_p=0.1), "dropout"))
    for act, match in unsupported:
        with pytest.raises(UnsupportedError, match=match):
            act()
