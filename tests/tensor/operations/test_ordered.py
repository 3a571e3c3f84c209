"""Scans, sorts, scatter and masks against NumPy, with PyTorch's rules where NumPy has none."""
from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from svod.config import PrepareConfig
from svod.errors import DTypeError, KernelOptError, ShapeError, TensorIndexError, UnsupportedError
from svod.prepare import prepare_tensors
from svod.tensor import Tensor
from tests.draws import draws
from tests.tensor import checking
from tests.tensor.checking import Cases, check
from tests.tensor.strategies import Array, any_dtype, make, seeds, shapes, views

few = draws(8)


@pytest.fixture(scope="module", autouse=True)
def evaluator() -> Iterator[None]:
    """Evaluate kernel by kernel in NumPy: the code of library kernels is tested in tests/compile/lower/test_library.py, and their place
    in plans in `test_they_compile`."""
    checking.active = "scheduled"
    yield
    checking.active = "reference"


def sum_type(a: Array) -> np.dtype[Any]:
    return a.dtype if a.dtype.kind == "f" else np.dtype(np.uint64 if a.dtype.kind == "u" else np.int64)


@few
@given(x=views(any_dtype, least=1, most=3), data=st.data())
def test_scans(x: tuple[Tensor, Array], data: st.DataObject) -> None:
    t, a = x
    axis = data.draw(st.integers(-a.ndim, a.ndim - 1))
    kind = sum_type(a)
    wide = a.astype(np.float64 if kind.kind == "f" else kind)
    check(t.cumsum(axis), np.cumsum(wide, axis).astype(kind), 8)
    check(t.cumprod(axis=axis), np.cumprod(wide, axis).astype(kind), 8)
    check(t.cumsum(axis, dtype="float32"), np.cumsum(a.astype(np.float32).astype(np.float64), axis).astype(np.float32), 8)
    check(t.diff(2, axis), np.diff(a, 2, axis), 4)
    with np.errstate(all="ignore"):
        logs = np.logaddexp.accumulate(a.astype(np.float64), axis)
    check(t.logcumsumexp(axis), logs.astype(a.dtype if a.dtype.kind == "f" else np.float32), 8)


@pytest.mark.slow
@few
@given(x=views(any_dtype, least=1, most=3, special=True), data=st.data())
def test_running_extrema(x: tuple[Tensor, Array], data: st.DataObject) -> None:
    t, a = x
    axis = data.draw(st.integers(0, a.ndim - 1))
    for found, ufunc in ((t.cummax(axis), np.maximum), (t.cummin(axis), np.minimum)):
        values = ufunc.accumulate(a, axis)
        check(found.values, values)
        positions = evaluated(found.indices)
        if a.size:
            # the value is at the position, which is the last of equal elements so far
            np.testing.assert_array_equal(np.take_along_axis(a, positions, axis), values)
            same = np.equal(a, values) | (np.isnan(a.astype(np.float64)) & np.isnan(values.astype(np.float64)))
            along = np.arange(a.shape[axis]).reshape([-1 if i == axis else 1 for i in range(a.ndim)])
            np.testing.assert_array_equal(positions, np.maximum.accumulate(np.where(same, along, 0), axis))


def evaluated(t: Any) -> Array:
    return checking.evaluate(t)


@few
@given(x=views(any_dtype, least=1, most=3, special=True), descending=st.booleans(), data=st.data())
def test_order(x: tuple[Tensor, Array], descending: bool, data: st.DataObject) -> None:
    t, a = x
    axis = data.draw(st.integers(0, a.ndim - 1))
    n = a.shape[axis]
    order = np.argsort(np.flip(a, axis) if descending else a, axis, kind="stable")
    if descending:
        order = n - 1 - np.flip(order, axis)
    found = t.sort(axis, descending)
    check(found.indices, order)
    check(found.values, np.take_along_axis(a, order, axis))
    k = data.draw(st.integers(0, n))
    best = t.topk(k, axis, largest=descending)
    first = np.take(order, range(k), axis)
    check(best.indices, first)
    check(best.values, np.take_along_axis(a, first, axis))
    if n:
        middle = np.take(np.sort(a, axis), (n - 1) // 2, axis)
        if a.dtype.kind == "f":
            middle = np.where(np.isnan(a).any(axis), np.nan, middle).astype(a.dtype)
        check(t.median(axis), middle)
        check(t.kthvalue(1, axis).values, np.take(np.sort(a, axis), 0, axis))


@pytest.mark.parametrize("n, k, by_passes", [(41, 3, True), (41, 5, False), (1 << 15, 1, True), (1 << 15, 2, False)])
def test_topk_of_few_elements_makes_a_pass_for_each(n: int, k: int, by_passes: bool) -> None:
    a = make((2, n), "float32", 1)
    found = Tensor(a).topk(k)
    check(found.values, -np.sort(-a)[:, :k])
    kernels = [u.arg[0] for u in found.values.uop.toposort() if u.op.value == "CUSTOM_FUNCTION"]
    assert kernels == ([] if by_passes else ["TOPK"])


@pytest.mark.parametrize("largest", [True, False])
def test_topk_by_passes_chooses_each_element_once(largest: bool) -> None:
    worst = -np.inf if largest else np.inf
    for row in ([worst, worst, worst, 1.0], [np.nan, worst, np.nan, worst], [np.nan] * 4, [0.0, -0.0, 0.0, 1.0]):
        a = np.array([row, row[::-1]], np.float32)
        last_first = np.argsort(np.flip(a, 1), 1, kind="stable")
        order = 3 - np.flip(last_first, 1) if largest else np.argsort(a, 1, kind="stable")
        check(Tensor(a).topk(4, 1, largest).indices, order)


def scattered(a: Array, axis: int, index: Array, values: Array, reduce: str, include_self: bool = True) -> Array:
    """Scatter by its definition, position by position."""
    out = a.astype(np.float64) if a.dtype.kind == "f" else a.copy()
    counts = np.full(a.shape, int(include_self))
    for at in np.ndindex(*index.shape):
        to = (*at[:axis], index[at], *at[axis + 1:])
        first = counts[to] == 0
        counts[to] += 1
        old, new = out[to], values[at]
        out[to] = new if first or reduce == "set" else {"sum": old + new, "mean": old + new, "prod": old * new, "amax": max(old, new),
                                                       "amin": min(old, new)}[reduce]
    if reduce == "mean":
        counts = np.maximum(counts, 1)
        out = out / counts if a.dtype.kind == "f" else out // counts
    return out.astype(a.dtype)


@few
@given(shape=shapes(1, 3, zero=False), seed=seeds, dtype=st.sampled_from(["float32", "float16", "int32"]), data=st.data())
def test_scatter(shape: tuple[int, ...], seed: int, dtype: str, data: st.DataObject) -> None:
    axis = data.draw(st.integers(0, len(shape) - 1))
    smaller = tuple(4 if i == axis else data.draw(st.integers(1, n)) for i, n in enumerate(shape))
    a, values = make(shape, dtype, seed), make(tuple(n + 1 for n in smaller), dtype, seed + 1)
    index = np.random.default_rng(seed).integers(0, shape[axis], smaller)
    t, i, v = Tensor(a), Tensor(index), Tensor(values)
    check(t.scatter(axis, i, v), scattered(a, axis, index, values, "set"))
    check(t.scatter_add(axis, i, v), scattered(a, axis, index, values, "sum"), 2)
    reduce, include = data.draw(st.sampled_from(["sum", "prod", "mean", "amax", "amin"])), data.draw(st.booleans())
    check(t.scatter_reduce(axis, i, v, reduce, include_self=include), scattered(a, axis, index, values, reduce, include), 4)


def test_rows_by_a_list() -> None:
    a, values = make((5, 3), "float32", 0), make((4, 3), "float32", 1)
    where = np.array([1, -1, 1, 0])
    added, copied, filled = a.copy(), a.copy(), a.copy()
    np.add.at(added, where, 2 * values)
    copied[where], filled[where] = values, 9      # NumPy, too, writes the values in order
    check(Tensor(a).index_add(0, Tensor(where), Tensor(values), alpha=2), added, 2)
    check(Tensor(a).index_copy(0, Tensor(where), Tensor(values)), copied)
    check(Tensor(a).index_fill(0, Tensor(where), 9), filled)
    places = np.broadcast_to(where[:, None] % 5, values.shape)
    for reduce in ("sum", "prod", "mean", "amax"):
        check(Tensor(a).index_reduce(0, Tensor(where), Tensor(values), reduce), scattered(a, 0, places, values, reduce), 4)
    check(Tensor(a).scatter(1, Tensor([[7], [-4]]), 1.0), a)      # out of range: skipped


@few
@given(shape=shapes(2, 3, zero=False), seed=seeds, data=st.data())
def test_scatter_of_expanded_operands(shape: tuple[int, ...], seed: int, data: st.DataObject) -> None:
    axis = data.draw(st.integers(0, len(shape) - 1))
    single, given = (tuple(data.draw(st.sampled_from([1, n])) for n in shape) for _ in range(2))
    a, values = make(shape, "float32", seed), make(given, "float32", seed + 1)
    index = np.random.default_rng(seed).integers(0, shape[axis], single)
    t, i, v = Tensor(a), Tensor(index).expand(shape), Tensor(values).expand(shape)
    where, placed = np.broadcast_to(index, shape), np.broadcast_to(values, shape)
    check(t.scatter_add(axis, i, v), scattered(a, axis, where, placed, "sum"), 2)
    check(t.scatter(axis, i, 2.0), scattered(a, axis, where, np.full(shape, 2, np.float32), "set"))
    check(t.scatter_add(axis, i, 2.0), scattered(a, axis, where, np.full(shape, 2, np.float32), "sum"), 2)
    reduce, include = data.draw(st.sampled_from(["sum", "prod", "mean", "amax"])), data.draw(st.booleans())
    check(t.scatter_reduce(axis, i, v, reduce, include_self=include), scattered(a, axis, where, placed, reduce, include), 4)


@few
@given(x=views("int8", least=0, most=3), extra=st.integers(-2, 3))
def test_nonzero_and_masked_select(x: tuple[Tensor, Array], extra: int) -> None:
    t, a = x
    rows = np.argwhere(a)
    size = max(0, len(rows) + extra)
    filled = np.full((size, a.ndim), -5, np.int64)
    filled[:len(rows)] = rows[:size]
    check(t.nonzero(size=size, fill_value=-5), filled)
    chosen = np.full(size, 7, np.int8)
    chosen[:len(rows)] = a[a != 0][:size]
    check(t.masked_select(t.ne(0), size=size, fill_value=7), chosen)


@few
@given(shape=shapes(1, 3), seed=seeds, data=st.data())
def test_masks_of_known_values_in_an_index(shape: tuple[int, ...], seed: int, data: st.DataObject) -> None:
    a = make(shape, "float32", seed)
    first = data.draw(st.integers(0, len(shape) - 1))
    last = data.draw(st.integers(first + 1, len(shape)))
    mask = np.random.default_rng(seed).random(shape[first:last]) < 0.5
    index: tuple[Any, ...] = (*[slice(None)] * first, mask)
    check(Tensor(a)[index], a[index])


def test_masks_in_an_index_beside_others() -> None:
    a = make((4, 3, 5), "float32", 0)
    rows = [True, False, True, True]
    check(Tensor(a)[rows, 1:, ::-2], a[rows, 1:, ::-2])
    check(Tensor(a)[:, None, [True, False, True]], a[:, None, [True, False, True]])
    check(Tensor(a)[rows, [0, 2, 1]], a[rows, [0, 2, 1]])


def test_they_compile() -> None:
    """LibraryKernels between kernels, through the compiler, twice from one plan."""
    a = make((3, 40, 5), "float32", 2)
    t = Tensor(a)
    y = t.mul(2).cumsum(1).sort(1, descending=True).values.add(1)
    z = Tensor.zeros(3, 2, 5).scatter_add(1, t.gt(0).long(), y)
    expected = 1 - np.sort(-np.cumsum(2 * a.astype(np.float64), 1), 1)
    plan = z.prepare()
    plan.execute()
    plan.execute()
    in_order = [k for k in plan.kernels if k.opts_source == "library"]
    assert [k.name.partition("_")[0] for k in in_order] == ["scan", "sort", "scatter"] and not any(k.opts for k in in_order)
    with pytest.raises(KernelOptError, match="UPCAST on a scan: a library kernel has one form"):
        t.cumsum(1).prepare(PrepareConfig(opts={in_order[0].key: [["UPCAST", "o0", 4]]}))
    expected = scattered(np.zeros((3, 2, 5)), 1, (a > 0).astype(np.int64), expected, "sum")
    np.testing.assert_allclose(z.numpy(), expected, rtol=1e-4, atol=1e-4)      # sums of hundreds of terms that cancel
    np.testing.assert_array_equal(Tensor(np.arange(50) % 3 == 0).nonzero(size=20).numpy()[:, 0][:17], np.arange(0, 50, 3))


def test_values_and_positions_are_of_one_sort() -> None:
    x = make((40, 300), "float32", 1).round(1)
    assert [k.name.partition("_")[0] for k in Tensor(x).sort(1).values.prepare().kernels] == ["sort"]
    values, positions = Tensor(x).sort(1)
    plan = prepare_tensors([values, positions], None)
    assert [k.name.partition("_")[0] for k in plan.kernels if "sort" in k.name] == ["argsort"]
    plan.execute()
    np.testing.assert_array_equal(positions.numpy(), np.argsort(x, 1, kind="stable"))
    np.testing.assert_array_equal(values.numpy(), np.sort(x, 1))


def test_errors() -> None:
    t, i = Tensor.zeros(2, 3), Tensor([[0]])
    cases: Cases = (
        (lambda: t.cumsum(), "cumsum of .*name one axis"), (lambda: t.cumsum(0, axis=1), "name one axis"),
        (lambda: t.cumsum(5), "cumsum: axis 5"), (lambda: t.topk(4), r"topk of \(2, 3\) along axis 1 with k=4: there are 3"),
        (lambda: t.kthvalue(0), "counted from 1 to 3"), (lambda: t.diff(-1), "cannot be negative"),
        (lambda: t.scatter(0, i, Tensor.zeros(2)), r"scatter into \(2, 3\) along 0 at \(1, 1\) of \(2,\)"),
        (lambda: t.scatter_add(0, Tensor.zeros(3, 4, dtype="int32"), Tensor.zeros(3, 4)), "no larger extents"),
        (lambda: t.index_add(0, Tensor([0]), Tensor.zeros(2, 3)), r"index_add into \(2, 3\) .* the values \(1, 3\)"),
        (lambda: t.nonzero(size=-1), "cannot be negative"))
    for act, match in cases:
        with pytest.raises(ShapeError, match=match):
            act()
    for act, match in ((lambda: t.nonzero(), "give size="), (lambda: t.masked_select(t.gt(0)), "give size="),
                       (lambda: t.scatter(0, i, 1.0, reduce="max"), "scatter_reduce"), (lambda: t[t.gt(0)], "masked_select"),
                       (lambda: t.scatter_reduce(0, i, t, "max"), "'amax'")):
        with pytest.raises(UnsupportedError, match=match):
            act()
    for act, match in ((lambda: t.scatter(0, t, t), "give integers"), (lambda: t.scatter(0, i, Tensor([[1]])), "cast the values"),
                       (lambda: t.cumsum(0, "bool"), "cummax"), (lambda: t.bool().scatter_add(0, i, Tensor([[True]])), "of bools")):
        with pytest.raises(DTypeError, match=match):
            act()
    for index in (np.zeros((3, 2), bool), (..., [True] * 4), np.array(True)):
        with pytest.raises(TensorIndexError, match=r"a mask of shape|cannot index"):
            t[index]
