"""bfloat16 over random shapes and views. The reference computes in float64 and rounds once: bfloat16 is a storage format, not one to
compute in.

If sums cancel, the bound consists of the roundings that occur: half a unit in the last place of bfloat16 for each stored value, and
float32's roundings for the sums between them.
"""
from __future__ import annotations

import math
import operator
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from svod.tensor import Tensor, where
from tests.draws import a_quarter, draws
from tests.tensor.checking import check, evaluate
from tests.tensor.operations.test_elementwise import FUNCTIONS, POSITIVE, quiet
from tests.tensor.operations.test_nn import Pair, conv_loop, pool_loop
from tests.tensor.strategies import INTS, NUMPY_FLOATS, Array, make, rounded_to_bfloat16, seeds, shapes, views

few = draws(6)
bfloat16_views = views("bfloat16")
EXACT = 0.0


def same(tensor: Tensor, expected: Any, tolerance: float = EXACT) -> None:
    """Check that `tensor` is bfloat16 and equals `expected` rounded to it, within `tolerance` times the dtype's tolerance."""
    check(tensor, rounded_to_bfloat16(expected), tolerance, "bfloat16")


@few
@given(x=views("bfloat16", special=True), data=st.data())
def test_movement_keeps_the_bits(x: tuple[Tensor, Array], data: st.DataObject) -> None:
    t, a = x
    same(t, a)
    same(t.ravel(), a.ravel())
    same(t.broadcast_to((2, *a.shape)), np.broadcast_to(a, (2, *a.shape)))
    if a.ndim:
        axis = data.draw(st.integers(0, a.ndim - 1))
        same(t.flip(axis), np.flip(a, axis))
        same(t.roll(2, axis), np.roll(a, 2, axis))
        same(Tensor.cat([t, t.flip(axis)], axis), np.concatenate([a, np.flip(a, axis)], axis))
        same(t.repeat_interleave(2, axis), np.repeat(a, 2, axis))
    if a.ndim >= 2:
        same(t.tril(), np.tril(a))


@few
@given(shape=shapes(1, 3, zero=False), seed=seeds, data=st.data())
def test_indexing_keeps_the_bits(shape: tuple[int, ...], seed: int, data: st.DataObject) -> None:
    axis = data.draw(st.integers(0, len(shape) - 1))
    a = make(shape, "bfloat16", seed, special=True)
    index = np.random.default_rng(seed).integers(-shape[axis], shape[axis], 4)
    t = Tensor(a, dtype="bfloat16")
    same(t.take(Tensor(index), axis), np.take(a, index, axis))
    same(t[::-2], a[::-2])


@pytest.mark.parametrize("op", [operator.add, operator.sub, operator.mul, operator.truediv])
@few
@given(x=bfloat16_views, seed=seeds)
def test_arithmetic(op: Callable[[Any, Any], Any], x: tuple[Tensor, Array], seed: int) -> None:
    t, a = x
    b = make(a.shape, "bfloat16", seed)
    wide = quiet(op, a.astype(np.float64), b.astype(np.float64))
    # a quotient is computed as a product with a reciprocal
    same(op(t, Tensor(b, dtype="bfloat16")), wide, 1 if op is operator.truediv else EXACT)
    same(op(t, 3), quiet(op, a.astype(np.float64), 3.0), 1 if op is operator.truediv else EXACT)
    # promotion
    check(t + Tensor(b), a + b)
    same(t * Tensor(np.full(a.shape, 3, np.int32)), a * np.float32(3))


@pytest.mark.slow
@few
@given(x=views("bfloat16", special=True), seed=seeds)
def test_choices_and_comparisons(x: tuple[Tensor, Array], seed: int) -> None:
    t, a = x
    b, mask = make(a.shape, "bfloat16", seed, special=True), make(a.shape, "bool", seed)
    u = Tensor(b, dtype="bfloat16")
    for op in (operator.eq, operator.ne, operator.lt, operator.le, operator.gt, operator.ge):
        check(op(t, u), op(a, b))
    same(t.maximum(u), np.maximum(a, b))
    same(t.minimum(u), np.minimum(a, b))
    same(where(Tensor(mask), t, u), np.where(mask, a, b))
    same(t.clamp(-1, 1), np.clip(a, -1, 1))
    same(t.abs(), np.abs(a))
    same(-t, -a)
    same(t.sign(), quiet(np.sign, a))
    check(t.isnan(), np.isnan(a))
    for name, f in (("floor", np.floor), ("ceil", np.ceil), ("trunc", np.trunc), ("round", np.rint)):
        same(getattr(t, name)(), f(a))


@pytest.mark.parametrize("name", a_quarter(FUNCTIONS))
@draws(3)
@given(x=bfloat16_views)
def test_functions(name: str, x: tuple[Tensor, Array]) -> None:
    ours, numpy, tolerance = FUNCTIONS[name]
    t, a = x
    same(ours(t), quiet(numpy, a.astype(np.float64)), tolerance)


@pytest.mark.parametrize("name", POSITIVE)
@draws(3)
@given(x=bfloat16_views)
def test_functions_of_positive_numbers(name: str, x: tuple[Tensor, Array]) -> None:
    ours, numpy = POSITIVE[name]
    t, a = x
    positive = rounded_to_bfloat16(np.abs(a) + np.float32(0.125))
    same(ours(t.abs() + 0.125), quiet(numpy, positive.astype(np.float64)), 1)


@few
@given(x=views("bfloat16", zero=False, least=1), data=st.data())
def test_reductions(x: tuple[Tensor, Array], data: st.DataObject) -> None:
    t, a = x
    axis = data.draw(st.none() | st.integers(0, a.ndim - 1))
    wide = a.astype(np.float64)
    same(t.sum(axis), wide.sum(axis), 1)
    same(t.prod(axis), wide.prod(axis), 1)
    same(t.mean(axis), wide.mean(axis), 1)
    same(t.var(axis, correction=0), wide.var(axis), 1)
    same(t.logsumexp(axis), np.log(np.exp(wide).sum(axis)), 1)
    same(t.max(axis), a.max(axis))
    same(t.min(axis), a.min(axis))
    check(t.argmax(axis), np.argmax(a, axis))
    last = np.exp(wide - wide.max(-1, keepdims=True))
    same(t.softmax(-1), last / last.sum(-1, keepdims=True), 1)


@few
@given(m=st.sampled_from([1, 3, 7]), k=st.sampled_from([1, 5, 16]), n=st.sampled_from([1, 2, 11]), seed=seeds)
def test_contractions_accumulate_in_float32(m: int, k: int, n: int, seed: int) -> None:
    a, b = make((m, k), "bfloat16", seed), make((k, n), "bfloat16", seed + 1)
    product = a.astype(np.float64) @ b.astype(np.float64)
    same(Tensor(a, dtype="bfloat16") @ Tensor(b, dtype="bfloat16"), product, 1)


@few
@given(x=bfloat16_views, target=st.sampled_from(["bool", *INTS, *NUMPY_FLOATS]), seed=seeds)
def test_casts(x: tuple[Tensor, Array], target: str, seed: int) -> None:
    t, a = x
    if target.startswith("u"):
        t, a = t.abs(), np.abs(a)  # a negative float has no unsigned value
    check(t.cast(target), quiet(a.astype, target))
    other = make(a.shape, target, seed)
    same(Tensor(other).cast("bfloat16"), other.astype(np.float32))


# -- networks: what is held is rounded once, what is between is float32 ---------------------------------------------------------
networks = draws(3)
ROUNDED, SINGLE = 2.0**-8, 2.0**-24      # the unit roundoff of bfloat16 and of float32


def within(tensor: Tensor, exact: Any, held: Any = 0.0, between: Any = 0.0) -> None:
    """Check that `tensor` is bfloat16 and differs from `exact` at most by its own rounding, those of the stored values `held`, and
    `between` roundings of float32 (magnitudes times their number)."""
    wanted = np.asarray(exact, np.float64)
    got = evaluate(tensor)
    assert (tensor.dtype.name, tensor.shape) == ("bfloat16", wanted.shape)
    # the value that is rounded last already has the earlier errors
    before = ROUNDED * np.asarray(held) + SINGLE * np.asarray(between)
    bound = before + ROUNDED * (np.abs(wanted) + before) + 2.0**-126
    worst = np.abs(got.astype(np.float64) - wanted) - bound
    assert np.all(worst <= 0), f"{np.max(worst)} beyond {bound.flat[np.argmax(worst)]} at {np.argmax(worst)}"


def pair(shape: tuple[int, ...], seed: int) -> tuple[Tensor, Array]:
    """Random numbers as a bfloat16 tensor and as float64."""
    a = make(shape, "bfloat16", seed)
    return Tensor(a, dtype="bfloat16"), a.astype(np.float64)


@networks
@given(groups=st.sampled_from([1, 2]), cg=st.sampled_from([1, 3, 8]), og=st.integers(1, 3),
       image=st.tuples(st.integers(5, 8), st.integers(5, 7)), kernel=st.tuples(st.integers(1, 3), st.integers(1, 3)),
       stride=st.tuples(st.integers(1, 2), st.integers(1, 2)), seed=seeds, padding=st.tuples(st.integers(0, 2), st.integers(0, 1)),
       dilation=st.tuples(st.integers(1, 2), st.integers(1, 2)))
def test_convolutions(groups: int, cg: int, og: int, image: Pair, kernel: Pair, stride: Pair, padding: Pair, dilation: Pair,
                      seed: int) -> None:
    (x, a), (w, b) = pair((1, cg * groups, *image), seed), pair((og * groups, cg, *kernel), seed + 1)
    t, bias = pair((og * groups,), seed + 2)
    exact, size = (conv_loop(f(a), f(b), stride, padding, dilation, groups) for f in (np.asarray, np.abs))
    terms = (b[0].size + 1) * size
    within(x.conv2d(w, None, stride, padding, dilation, groups), exact, between=terms)
    # the bias is added to the stored result
    within(x.conv2d(w, t, stride, padding, dilation, groups), exact + bias[:, None, None], np.abs(exact) + SINGLE * terms, terms)


@networks
@given(image=st.tuples(st.integers(4, 9), st.integers(4, 9)), kernel=st.tuples(st.integers(1, 3), st.integers(2, 4)),
       stride=st.tuples(st.integers(1, 3), st.integers(1, 3)), pad=st.booleans(), seed=seeds)
def test_pools(image: Pair, kernel: Pair, stride: Pair, pad: bool, seed: int) -> None:
    x, a = pair((2, 3, *image), seed)
    padding = (kernel[0] // 2, kernel[1] // 2) if pad else (0, 0)
    same(x.max_pool2d(kernel, stride, padding), pool_loop(a, kernel, stride, padding, False, lambda v: v.max((2, 3))))
    exact, size = (pool_loop(f(a), kernel, stride, padding, False, lambda v: v.mean((2, 3))) for f in (np.asarray, np.abs))
    within(x.avg_pool2d(kernel, stride, padding, count_include_pad=False), exact, between=(kernel[0] * kernel[1] + 2) * size)


@networks
@given(x=views("bfloat16", least=1, zero=False), data=st.data())
def test_rows(x: tuple[Tensor, Array], data: st.DataObject) -> None:
    t, a = x[0], x[1].astype(np.float64)
    axis = data.draw(st.integers(-a.ndim, a.ndim - 1))
    shifted = a - a.max(axis, keepdims=True)
    exps = np.exp(shifted)
    soft = exps / exps.sum(axis, keepdims=True)
    n = a.shape[axis]
    # a rounding of the shifted number has the same absolute size in the logarithm
    off = n + 12 + np.abs(shifted)
    within(t.softmax(axis), soft, between=2 * off * soft)
    within(t.log_softmax(axis), np.log(soft), between=2 * off + 4 * np.abs(np.log(soft)))


@networks
@given(x=views("bfloat16", least=1, zero=False), data=st.data(), seed=seeds)
def test_norms(x: tuple[Tensor, Array], data: st.DataObject, seed: int) -> None:
    t, a = x[0], x[1].astype(np.float64)
    k = data.draw(st.integers(1, a.ndim))
    axes, n = tuple(range(a.ndim - k, a.ndim)), math.prod(a.shape[-k:])
    (g, gain), (s, shift) = pair(a.shape[-k:], seed), pair(a.shape[-k:], seed + 1)
    largest = np.abs(a).max(axes, keepdims=True)
    deviation = np.sqrt(a.var(axes, keepdims=True) + 1e-2)
    normal = (a - a.mean(axes, keepdims=True)) / deviation
    # the mean has an error of n roundings of the largest number; so has each difference, and through them the deviation
    off = (n + 4) * largest / deviation * (1 + np.abs(normal)) + (n + 8) * np.abs(normal)
    within(t.layer_norm(a.shape[-k:], eps=1e-2), normal, between=2 * off)
    within(t.layer_norm(a.shape[-k:], g, s, eps=1e-2), normal * gain + shift, between=2 * off * np.abs(gain) + 4 * np.abs(shift))
    rms = a / np.sqrt((a ** 2).mean(axes, keepdims=True) + 1e-2) * gain
    within(t.rms_norm(a.shape[-k:], g, eps=1e-2), rms, between=(n + 8) * np.abs(rms))


def test_norms_of_channels() -> None:
    x, a = pair((2, 6, 3, 4), 0)
    (m, mean), (v, var), (g, gain), (s, shift) = (pair((6,), i) for i in range(1, 5))
    v, var = v.abs(), np.abs(var)
    column = (slice(None), None, None)
    scale = (gain / np.sqrt(var + 1e-5))[column]
    exact = (a - mean[column]) * scale + shift[column]
    within(x.batch_norm(m, v, g, s), exact, between=12 * (np.abs(a * scale) + np.abs(mean[column] * scale) + np.abs(shift[column])))
    grouped = a.reshape(2, 3, -1)
    deviation = np.sqrt(grouped.var(-1, keepdims=True) + 1e-5)
    normal = ((grouped - grouped.mean(-1, keepdims=True)) / deviation).reshape(a.shape)
    exact = normal * gain[column] + shift[column]
    n = grouped.shape[-1]
    ratio = np.broadcast_to(np.abs(grouped).max(-1, keepdims=True) / deviation, grouped.shape).reshape(a.shape)
    off = 2 * ((n + 4) * ratio * (1 + np.abs(normal)) + (n + 8) * np.abs(normal)) * np.abs(gain[column]) + 4 * np.abs(shift[column])
    within(x.group_norm(3, g, s), exact, between=off)


@networks
@given(batch=st.sampled_from([(), (2,)]), rows=st.integers(1, 5), columns=st.integers(1, 7), width=st.sampled_from([1, 4, 7]),
       out=st.integers(1, 4), causal=st.booleans(), seed=seeds)
def test_attention(batch: tuple[int, ...], rows: int, columns: int, width: int, out: int, causal: bool, seed: int) -> None:
    (q, a), (k, b), (v, c) = (pair((*batch, *shape), seed + i) for i, shape in enumerate(((rows, width), (columns, width), (columns, out))))
    turned = np.swapaxes(b, -1, -2)
    scores, size = a @ turned / math.sqrt(width), np.abs(a) @ np.abs(turned) / math.sqrt(width)
    if causal:
        scores = np.where(np.tril(np.ones((rows, columns), bool)), scores, -np.inf)
    exps = np.exp(scores - scores.max(-1, keepdims=True))
    weights = exps / exps.sum(-1, keepdims=True)
    # scores are stored; their error is the relative error of a weight, twice: in the weight and in the sum
    kept = np.isfinite(scores)
    off = np.where(kept, ROUNDED * np.abs(np.where(kept, scores, 0)) + SINGLE * (width + 2) * size, 0).max(-1, keepdims=True)
    relative = np.expm1(2 * off) + ROUNDED * np.exp(2 * off) + SINGLE * (2 * columns + 40)
    largest = (weights * relative) @ np.abs(c)
    within(q.scaled_dot_product_attention(k, v, is_causal=causal), weights @ c, largest / ROUNDED, columns * (weights @ np.abs(c)))


def test_later_operations_keep_bfloat16_and_numbers_do_not_widen_it() -> None:
    a = make((3, 40), "bfloat16", 0)
    t = Tensor(a, dtype="bfloat16")
    check(t.cumsum(1), rounded_to_bfloat16(np.cumsum(a.astype(np.float64), 1)), dtype="bfloat16")
    check(t.sort(1).values, np.sort(a, 1), dtype="bfloat16")
    zeros = Tensor.zeros(3, 2, dtype="bfloat16")
    sums = np.stack([a.astype(np.float64).sum(1), np.zeros(3)], 1)
    check(zeros.scatter_add(1, Tensor(np.zeros((3, 40), np.int64)), t), rounded_to_bfloat16(sums), dtype="bfloat16")
    check(t.lerp(t.neg(), 0.25), rounded_to_bfloat16(a * 0.5), 2, dtype="bfloat16")
    for found in (t.hypot(1.0), t.fmod(0.5), t.heaviside(0.5), t.copysign(-1.0), t.logaddexp(0), t.addcmul(t, 2.0), t.atan2(1.0)):
        assert found.dtype.name == "bfloat16"
