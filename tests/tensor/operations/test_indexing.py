"""Indexing against NumPy: basic, by integer tensors, mixed, take and gather."""
from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from svod.core.ir.uop import Ops
from svod.errors import DTypeError, ShapeError, TensorIndexError, UnsupportedError
from svod.nn import Embedding
from svod.tensor import Tensor
from tests.draws import draws
from tests.tensor.checking import check
from tests.tensor.strategies import Array, any_dtype, make, seeds, shapes, views

few = draws(18)


@st.composite
def basic_indices(draw: st.DrawFn, shape: tuple[int, ...]) -> Any:
    """A basic index that fits `shape`."""
    entries: list[Any] = []
    for n in shape[:draw(st.integers(0, len(shape)))]:
        if n and draw(st.booleans()):
            entries.append(draw(st.integers(-n, n - 1)))
        else:
            bound = st.none() | st.integers(-n - 2, n + 2)
            entries.append(slice(draw(bound), draw(bound), draw(st.none() | st.sampled_from([1, 2, 3, -1, -2, -3]))))
    if draw(st.booleans()):
        missing = len(shape) - len(entries)
        at = draw(st.integers(0, len(entries)))
        # entries after the dots refer to the last axes: only whole slices are kept there, unless no axis is missing
        entries = entries[:at] + [...] + ([slice(None)] * (len(entries) - at) if missing else entries[at:])
    for _ in range(draw(st.integers(0, 2))):
        entries.insert(draw(st.integers(0, len(entries))), None)
    return tuple(entries)


@few
@given(x=views(any_dtype), data=st.data())
def test_basic_indexing(x: tuple[Tensor, Array], data: st.DataObject) -> None:
    t, a = x
    index = data.draw(basic_indices(a.shape))
    view = t[index]
    check(view, a[index])
    assert not list(view.uop.walk(Ops.GATHER))


def test_single_indices() -> None:
    a = make((5, 7), "float32", 0)
    t = Tensor(a)
    check(t[2], a[2])
    check(t[-1], a[-1])
    check(t[1:4], a[1:4])
    check(t[...], a)
    check(t[None], a[None])
    check(t[np.int64(3)], a[3])
    assert len(t) == 5
    for row, expected in zip(t, a, strict=True):
        check(row, expected)


@few
@given(shape=shapes(1, 3, zero=False), index_shape=shapes(0, 2), dtype=any_dtype, kind=st.sampled_from(["int8", "int32", "int64", "uint8"]),
       seed=seeds, data=st.data())
def test_take(shape: tuple[int, ...], index_shape: tuple[int, ...], dtype: str, kind: str, seed: int, data: st.DataObject) -> None:
    axis = data.draw(st.integers(-len(shape), len(shape) - 1))
    n = shape[axis]
    a = make(shape, dtype, seed)
    index = np.random.default_rng(seed).integers(0 if kind == "uint8" else -n, n, index_shape).astype(kind)
    check(Tensor(a).take(Tensor(index), axis), np.take(a, index, axis))
    before: tuple[Any, ...] = (slice(None),) * (axis % len(shape))
    check(Tensor(a)[(*before, Tensor(index))], a[(*before, index)])
    check(Tensor(a).take(Tensor(index)), np.take(a, index))


@few
@given(groups=st.sampled_from([1, 2, 3]), channels=st.sampled_from([1, 4, 5]), height=st.sampled_from([1, 3, 7]),
       width=st.sampled_from([1, 2, 6]), seed=seeds)
def test_taking_what_groups_of_a_merged_axis_scale(groups: int, channels: int, height: int, width: int, seed: int) -> None:
    a, scales = make((groups * channels, height, width), "float32", seed), make((groups, 1), "float32", seed + 1)
    rows, columns = (np.random.default_rng(seed).integers(-2, n + 2, 5) for n in (height, width))
    scaled = (Tensor(a).reshape(groups, -1) * Tensor(scales)).reshape(*a.shape)
    expected = (a.reshape(groups, -1) * scales).reshape(a.shape)[:, rows % height][:, :, columns % width]
    expected[:, (rows < -height) | (rows >= height)] = 0
    expected[:, :, (columns < -width) | (columns >= width)] = 0
    check(scaled.take(Tensor(rows), 1).take(Tensor(columns), 2), expected)


def test_an_index_outside_reads_zero() -> None:
    t = Tensor(np.arange(1, 6))
    check(t.take(Tensor([0, 5, -6, 4, 1000])), np.array([1, 0, 0, 5, 0]))
    check(Tensor(np.arange(1, 7).reshape(2, 3))[Tensor([0, 2, 1]), Tensor([3, 0, -1])], np.array([0, 0, 6]))


def test_known_positions_outside_are_errors() -> None:
    a = np.arange(6, dtype=np.float32).reshape(2, 3)
    t = Tensor(a)
    outside: list[tuple[Callable[[], Tensor], int, int]] = [
        (lambda: t[[0, 2]], 2, 2), (lambda: t[:, np.array([1, -4])], -4, 3), (lambda: t[[0, 1], [1, 3]], 3, 3), (lambda: t.take(6), 6, 6),
        (lambda: t.take([-7]), -7, 6), (lambda: t.take(np.uint64(2**64 - 1), 0), 2**64 - 1, 2), (lambda: t.index_select(1, [3]), 3, 3),
        (lambda: t.gather(1, [[0], [3]]), 3, 3), (lambda: t.take_along_dim([[0], [-4]], 1), -4, 3),
        (lambda: t.scatter(1, [[3], [0]], 1.0), 3, 3), (lambda: t.index_add(0, [2], [[1.0, 1.0, 1.0]]), 2, 2),
        (lambda: t.index_fill(0, np.array([-3]), 1.0), -3, 2), (lambda: Embedding(2, 3)(np.array([0, 2])), 2, 2)]
    for make_it, position, extent in outside:
        with pytest.raises(TensorIndexError, match=rf"position {position} is out of range for an axis of extent {extent},"):
            make_it()
    check(t[[1, -2]], a[[1, -2]])
    check(t[:, np.array([-3, 2])], a[:, [-3, 2]])
    check(t[[]], a[[]])
    check(t[np.array(1)], a[1])


@few
@given(seed=seeds, which=st.sets(st.integers(0, 3), min_size=1, max_size=3), index_shape=shapes(0, 2), reverse=st.booleans())
def test_several_tensors_mixed_with_slices(seed: int, which: set[int], index_shape: tuple[int, ...], reverse: bool) -> None:
    shape = (3, 5, 2, 4)
    a = make(shape, "float32", seed)
    rng = np.random.default_rng(seed)
    index: list[Any] = [slice(None, None, -1) if reverse else slice(1, None) for _ in shape]
    for i in which:
        index[i] = rng.integers(-shape[i], shape[i], index_shape if i % 2 else index_shape[-1:])
    ours = tuple(Tensor(e) if isinstance(e, np.ndarray) else e for e in index)
    check(Tensor(a)[ours], a[tuple(index)])


def test_lists_arrays_and_new_axes_in_an_index() -> None:
    a = make((4, 5), "float32", 0)
    check(Tensor(a)[[0, 2]], a[[0, 2]])
    check(Tensor(a)[:, np.array([1, -1])], a[:, [1, -1]])
    check(Tensor(a)[None, [0, 2], 1:3], a[None, [0, 2], 1:3])
    # ints are applied first, as in PyTorch
    check(Tensor(a)[1, [0, 2]], a[1][[0, 2]])
    empty = make((3, 4, 0), "float32", 0)
    check(Tensor(empty)[[0, 2], [1, 3]], empty[[0, 2], [1, 3]])


@pytest.mark.slow
@few
@given(shape=shapes(1, 3, zero=False), seed=seeds, data=st.data())
def test_gather(shape: tuple[int, ...], seed: int, data: st.DataObject) -> None:
    axis = data.draw(st.integers(0, len(shape) - 1))
    a = make(shape, "float32", seed)
    index = np.random.default_rng(seed).integers(-shape[axis], shape[axis], (*shape[:axis], 4, *shape[axis + 1:]))
    check(Tensor(a).gather(axis, Tensor(index)), np.take_along_axis(a, index, axis))
    smaller = index[tuple(slice(0, max(1, n - 1)) for n in index.shape)]
    whole = a[tuple(slice(0, n) if i != axis else slice(None) for i, n in enumerate(smaller.shape))]
    check(Tensor(a).gather(axis, Tensor(smaller)), np.take_along_axis(whole, smaller, axis))
    check(Tensor(a).take_along_dim(Tensor(index), axis), np.take_along_axis(a, index, axis))
    line = index[tuple(slice(None) if i == axis else slice(0, 1) for i in range(a.ndim))]
    check(Tensor(a).take_along_dim(Tensor(line), axis), np.take_along_axis(a, line, axis))


def test_one_hot() -> None:
    check(Tensor([[0, 2], [1, 5]]).one_hot(3), np.array([[[1, 0, 0], [0, 0, 1]], [[0, 1, 0], [0, 0, 0]]], np.int32))


def test_errors_of_indexing() -> None:
    t = Tensor.zeros(2, 3)
    for index, match in (((0, 0, 0), "3 indices"), (5, "out of range"), ((..., ...), "one '...'"), ("a", "cannot index"),
                         (True, "cannot index"),
                         (slice(None, None, 0), "slice")):
        with pytest.raises(TensorIndexError, match=match):
            t[index]
    with pytest.raises(UnsupportedError, match="where"):
        t[t > 0]
    with pytest.raises(DTypeError, match="take"):
        t.take(t, 0)
    with pytest.raises(ShapeError, match=r"gather from \(2, 3\)"):
        t.gather(0, Tensor([0]))
    with pytest.raises(ShapeError):
        len(Tensor(1.0))
