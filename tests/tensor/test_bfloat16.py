"""bfloat16 over random shapes and views. The reference computes in float64 and rounds once: bfloat16 is held, not computed in."""
from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from svod.tensor import Tensor, where
from tests.tensor.checking import check
from tests.tensor.strategies import INTS, NUMPY_FLOATS, Array, make, rounded_to_bfloat16, seeds, shapes, views
from tests.tensor.test_elementwise import FUNCTIONS, POSITIVE, quiet

few = settings(max_examples=8, deadline=None)
bfloat16_views = views("bfloat16")
EXACT = 0.0


def same(tensor: Tensor, expected: Any, tolerance: float = EXACT) -> None:
    """`tensor` is bfloat16 and holds `expected` rounded to it; `tolerance` times the dtype's where that is not exact."""
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
    # a quotient is a product with a reciprocal
    same(op(t, Tensor(b, dtype="bfloat16")), wide, 1 if op is operator.truediv else EXACT)
    same(op(t, 3), quiet(op, a.astype(np.float64), 3.0), 1 if op is operator.truediv else EXACT)
    # promotion
    check(t + Tensor(b), a + b)
    same(t * Tensor(np.full(a.shape, 3, np.int32)), a * np.float32(3))


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


@pytest.mark.parametrize("name", FUNCTIONS)
@settings(max_examples=2, deadline=None)
@given(x=bfloat16_views)
def test_functions(name: str, x: tuple[Tensor, Array]) -> None:
    ours, numpy, tolerance = FUNCTIONS[name]
    t, a = x
    same(ours(t), quiet(numpy, a.astype(np.float64)), tolerance)


@pytest.mark.parametrize("name", POSITIVE)
@settings(max_examples=2, deadline=None)
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
