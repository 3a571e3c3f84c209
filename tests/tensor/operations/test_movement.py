"""Views, concatenation, splitting and creation against NumPy."""
from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from svod.errors import DTypeError, ShapeError, UnsupportedError
from svod.tensor import Tensor
from tests.draws import draws
from tests.tensor.checking import Cases, check
from tests.tensor.strategies import Array, any_dtype, make, seeds, shapes, views

few = draws(8)


@pytest.mark.slow
@few
@given(x=views(any_dtype), data=st.data())
def test_order_and_repetition(x: tuple[Tensor, Array], data: st.DataObject) -> None:
    t, a = x
    order = data.draw(st.permutations(range(a.ndim)))
    check(t.permute(*order) if order else t, a.transpose(order))
    check(t.T, a.T)
    check(t.ravel(), a.ravel())
    check(t.flatten(), a.reshape(-1))
    check(t.reshape(-1, *a.shape[1:]) if a.size and a.ndim else t, a)
    check(t.squeeze(), a.squeeze())
    check(t.unsqueeze(-1), a[..., None])
    check(t.broadcast_to((2, *a.shape)), np.broadcast_to(a, (2, *a.shape)))
    counts = data.draw(st.lists(st.integers(0, 2), min_size=a.ndim, max_size=a.ndim + 1))
    if counts:
        check(t.repeat(*counts), np.tile(a, counts))
    if a.ndim:
        axis = data.draw(st.integers(-a.ndim, a.ndim - 1))
        check(t.flip(axis), np.flip(a, axis))
        check(t.repeat_interleave(2, axis), np.repeat(a, 2, axis))
        check(t.transpose(0, axis), np.swapaxes(a, 0, axis))
        check(t.movedim(0, axis), np.moveaxis(a, 0, axis))
        several = list(data.draw(st.permutations(range(a.ndim))))[:2]
        check(t.movedim(several, several[::-1]), np.moveaxis(a, several, several[::-1]))
        check(t.roll(3, axis), np.roll(a, 3, axis))
        check(t.unflatten(axis, (1, -1)) if a.size else t, a.reshape(_unflattened(a, axis)) if a.size else a)


def _unflattened(a: Array, axis: int) -> list[int]:
    at = axis % a.ndim
    return [*a.shape[:at], 1, a.shape[at], *a.shape[at + 1:]]


@few
@given(x=views(any_dtype, least=1), data=st.data())
def test_edges(x: tuple[Tensor, Array], data: st.DataObject) -> None:
    t, a = x
    pads = data.draw(st.lists(st.tuples(st.integers(0, 3), st.integers(0, 3)), min_size=a.ndim, max_size=a.ndim))
    fill = data.draw(st.sampled_from([0, 1]))
    expected = np.pad(a, pads, constant_values=np.asarray(fill, a.dtype))
    check(t.pad(pads, value=fill), expected)
    check(t.pad([n for pair in reversed(pads) for n in pair], value=fill), expected)
    check(t.pad(pads).pad([(-lo, -hi) for lo, hi in pads]), a)
    pairs = [sorted(data.draw(st.tuples(st.integers(0, n), st.integers(0, n)))) for n in a.shape]
    bounds = [(b, e) for b, e in pairs]
    check(t.shrink(bounds), a[tuple(slice(b, e) for b, e in bounds)])
    if a.ndim >= 2:
        k = data.draw(st.integers(-2, 2))
        check(t.tril(k), np.tril(a, k))
        check(t.triu(k), np.triu(a, k))
    if a.shape[0] >= 3:
        check(t.unfold(0, 3, 2), np.moveaxis(np.lib.stride_tricks.sliding_window_view(a, 3, 0)[::2], -1, -1))


@few
@given(shape=shapes(1, 3, zero=False), seed=seeds, data=st.data())
def test_pads_of_expressions(shape: tuple[int, ...], seed: int, data: st.DataObject) -> None:
    """What an expression reads for positions outside, a factor that is the same along a padded axis too, does not reach the result; then a
    stencil reads across the border."""
    pairs = st.lists(st.tuples(st.integers(0, 3), st.integers(0, 3)), min_size=len(shape), max_size=len(shape))
    alike, pads = data.draw(st.lists(st.booleans(), min_size=len(shape), max_size=len(shape))), data.draw(pairs)
    fill = data.draw(st.sampled_from([0.0, 1.5, float("-inf")]))
    x = make(shape, "float32", seed)
    factor = make(tuple([1 if one else n for one, n in zip(alike, shape, strict=True)]), "float32", seed + 1)
    factor.flat[0] = np.inf         # infinite times a fill of 0 would be a NaN
    with np.errstate(invalid="ignore"):
        wide = np.pad(np.maximum(x * factor, -4), pads, constant_values=fill)
        padded = (Tensor(x) * Tensor(factor)).maximum(-4).pad(pads, value=fill)
        check(padded, wide)
        check((padded[..., 1:] + padded[..., :-1]).pad([(1, 1)] * len(shape)), np.pad(wide[..., 1:] + wide[..., :-1], 1))


@few
@given(base=shapes(1, 3), axis=st.integers(0, 2), extents=st.lists(st.sampled_from([0, 1, 2, 3]), min_size=1, max_size=4),
       dtype=any_dtype, seed=seeds)
def test_cat_and_stack(base: tuple[int, ...], axis: int, extents: list[int], dtype: str, seed: int) -> None:
    axis %= len(base)
    arrays = [make((*base[:axis], n, *base[axis + 1:]), dtype, seed + i, special=True) for i, n in enumerate(extents)]
    check(Tensor.cat([Tensor(a) for a in arrays], axis), np.concatenate(arrays, axis))
    check(Tensor.cat([Tensor(a) for a in arrays], axis - len(base)), np.concatenate(arrays, axis))
    same = [make(base, dtype, seed + i) for i in range(len(extents))]
    check(Tensor.stack([Tensor(a) for a in same], axis), np.stack(same, axis))
    check(Tensor.stack([Tensor(a) for a in same], -1), np.stack(same, -1))


def test_cat_promotes() -> None:
    check(Tensor.cat([Tensor([1, 2]), Tensor([0.5]), Tensor([True])]), np.array([1, 2, 0.5, 1], np.float32))


@few
@given(x=views(least=1), size=st.integers(1, 4), data=st.data())
def test_splits(x: tuple[Tensor, Array], size: int, data: st.DataObject) -> None:
    t, a = x
    axis = data.draw(st.integers(0, a.ndim - 1))
    n = a.shape[axis]
    parts = t.split(size, axis)
    for part, expected in zip(parts, np.split(a, range(size, n, size), axis), strict=True):
        check(part, expected)
    assert len(t.chunk(size, axis)) == (-(-n // -(-n // size)) if n else size)
    check(Tensor.cat(list(t.chunk(size, axis)), axis), a)
    for part, expected in zip(t.unbind(axis), np.moveaxis(a, axis, 0), strict=True):
        check(part, expected)


def test_creation() -> None:
    check(Tensor.zeros(2, 3), np.zeros((2, 3), np.float32))
    check(Tensor.ones((0, 2), dtype="int8"), np.ones((0, 2), np.int8))
    check(Tensor.full((2,), 7), np.full(2, 7, np.int32))
    check(Tensor.full((), 2.5), np.array(2.5, np.float32))
    check(Tensor.full((3,), 2 ** 40), np.full(3, 2 ** 40, np.int64))
    check(Tensor.zeros(2).full_like(3), np.full(2, 3, np.float32))
    check(Tensor([[1, 2], [3, 4]]).ones_like(), np.ones((2, 2), np.int32))
    check(Tensor.eye(3), np.eye(3, dtype=np.float32))
    check(Tensor.eye(2, 5, dtype="bool"), np.eye(2, 5, dtype=bool))
    check(Tensor.arange(7), np.arange(7, dtype=np.int32))
    check(Tensor.arange(3, -8, -2), np.arange(3, -8, -2, dtype=np.int32))
    check(Tensor.arange(0, 1, 0.125), np.arange(0, 1, 0.125, dtype=np.float32))
    check(Tensor.arange(2 ** 33, 2 ** 33 + 3), np.arange(2 ** 33, 2 ** 33 + 3))
    check(Tensor.arange(5, 5), np.arange(0, dtype=np.int32))
    check(Tensor.linspace(-1, 1, 5), np.linspace(-1, 1, 5, dtype=np.float32))
    assert Tensor.empty(3, 5).shape == (3, 5)


def test_data_keeps_or_gets_its_dtype() -> None:
    check(Tensor(3), np.array(3, np.int32))
    check(Tensor(True), np.array(True))
    check(Tensor(1.5), np.array(1.5, np.float32))
    check(Tensor([1, 2]), np.array([1, 2], np.int32))
    check(Tensor([1, 2 ** 40]), np.array([1, 2 ** 40]))
    check(Tensor([[0.5, 1]]), np.array([[0.5, 1]], np.float32))
    check(Tensor([]), np.zeros(0, np.float32))
    check(Tensor(np.arange(3.0)), np.arange(3.0))
    check(Tensor(np.float64(2)), np.array(2.0))
    check(Tensor(np.arange(6).reshape(2, 3).T, dtype="float16"), np.arange(6).reshape(2, 3).T.astype(np.float16))
    check(Tensor(np.arange(3, dtype=">i4")), np.arange(3, dtype=np.int32))
    check(Tensor(Tensor([1, 2]), dtype="int8"), np.array([1, 2], np.int8))


def test_errors_of_movement() -> None:
    t = Tensor.zeros(2, 3)
    nonsense: Any = "ab"
    cases: Cases = ((lambda: t.reshape(4, 2), r"reshape of shape \(2, 3\) to \(4, 2\): 6"), (lambda: t.reshape(-1, -1), "work out the -1"),
             (lambda: t.permute(0, 0), r"permute of shape \(2, 3\)"),
             (lambda: t.expand(4, 3), r"\(2, 3\) to \(4, 3\): axis -2 has extents 2 and 4"),
             (lambda: t.shrink([(0, 5), None]), "shrink of"), (lambda: t.unsqueeze(4), "unsqueeze"), (lambda: t.flip(2), "flip"),
             (lambda: Tensor.cat([t, Tensor.zeros(3, 2)]), r"cat of shapes \(2, 3\) and \(3, 2\)"),
             (lambda: Tensor.cat([]), "cat of no"),
             (lambda: t.cat(t), r"cat of one tensor of shape \(2, 3\): give a list"), (lambda: Tensor.stack(t), "stack of one tensor"),
             (lambda: Tensor.stack([t, t.T]), "stack of shapes"), (lambda: t.split([1, 2]), "add up to 2"),
             (lambda: t.pad((1, 2, 3)), "pad of"), (lambda: t.reshape(nonsense), "not a shape"),
             (lambda: Tensor([[1], [1, 2]]), "rectangular"),
             (lambda: Tensor.arange(0, 4, 0), "step 0"), (lambda: Tensor.full((-1,), 0), "negative"))
    for act, match in cases:
        with pytest.raises(ShapeError, match=match):
            act()
    with pytest.raises(UnsupportedError, match="mirror"):
        t.pad((1, 1), mode="mirror")
    with pytest.raises(DTypeError, match="Tensor from dict"):
        Tensor({})
    with pytest.raises(DTypeError, match="not a dtype"):
        Tensor.zeros(2, dtype="float8")
    with pytest.raises(DTypeError, match="None is not a dtype"):
        t.to(None)  # type: ignore[arg-type]
