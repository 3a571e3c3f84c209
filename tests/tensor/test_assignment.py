"""`t[…] = x` and `t[…].assign(x)` act like NumPy's assignment to a part, in the tensor's own memory."""
from __future__ import annotations

import copy
import pickle
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from svod.core.graph.buffer import buffer_of
from svod.core.graph.storage import base_of, storage_of
from svod.core.ir.variable import Variable
from svod.errors import DTypeError, ShapeError, TensorIndexError, UnsupportedError
from svod.tensor import Tensor
from tests.draws import draws
from tests.tensor import checking
from tests.tensor.checking import check, evaluate
from tests.tensor.strategies import Array, any_dtype, make, seeds, shapes

few = draws(8)


@st.composite
def indices(draw: st.DrawFn, shape: tuple[int, ...]) -> tuple[object, ...]:
    """An int, a slice of any step, or no entry for each axis; sometimes a None and an Ellipsis."""
    found: list[object] = []
    for n in shape[:draw(st.integers(0, len(shape)))]:
        if n and draw(st.booleans()):
            found.append(draw(st.integers(-n, n - 1)))
        else:
            step = draw(st.sampled_from([None, 1, 2, 3, -1, -2]))
            found.append(slice(draw(st.none() | st.integers(-n, n)), draw(st.none() | st.integers(-n, n)), step))
    if draw(st.integers(0, 3)) == 0:
        found.insert(draw(st.integers(0, len(found))), None)
    return tuple(found)


def broadcastable(data: st.DataObject, shape: tuple[int, ...]) -> tuple[int, ...]:
    """A shape that broadcasts to `shape` in an assignment: some extents 1, leading axes dropped, or leading ones too many."""
    ones = [1 if data.draw(st.integers(0, 3)) == 0 else n for n in shape]
    return (*(1,) * data.draw(st.integers(0, 1)), *ones) if data.draw(st.booleans()) else tuple(ones[data.draw(st.integers(0, len(ones))):])


@few
@given(shape=shapes(1, 3), dtype=any_dtype, value_dtype=any_dtype, seed=seeds, data=st.data())
def test_parts_are_written_as_in_numpy(shape: tuple[int, ...], dtype: str, value_dtype: str, seed: int, data: st.DataObject) -> None:
    a = make(shape, dtype, seed)
    t = Tensor(a.copy()) if data.draw(st.booleans()) else Tensor(a.copy()) * np.ones((), dtype)
    for i in range(data.draw(st.integers(1, 3))):
        index = (*data.draw(indices(shape)), ...)     # NumPy writes a single element by other rules
        value = make(broadcastable(data, a[index].shape), value_dtype, seed + 1 + i)
        if np.dtype(dtype).kind == "u":
            value = abs(value) if value.dtype.kind != "b" else value     # a negative float has no unsigned value
        a[index] = value
        t[index] = value
    check(t, a)


@few
@given(shape=shapes(1, 3, zero=False), seed=seeds, data=st.data())
def test_parts_that_overlap_what_is_read(shape: tuple[int, ...], seed: int, data: st.DataObject) -> None:
    """The value is read completely before anything is written."""
    a = make(shape, "int32", seed)
    t = Tensor(a.copy())
    axis = data.draw(st.integers(0, len(shape) - 1))
    n = shape[axis]
    count = data.draw(st.integers(1, n))
    step = data.draw(st.sampled_from([1, -1]))
    first, second = (data.draw(st.integers(0, n - count)) for _ in range(2))
    target = (slice(None),) * axis + (slice(first, first + count),)
    source = (slice(None),) * axis + (slice(second, second + count),)
    flipped = (slice(None),) * axis + (slice(None, None, step),)
    a[target] = a[source][flipped] + 1
    t[target] = t[source][flipped] + 1
    check(t, a)
    a[target] += 3
    t[target] += 3
    check(t, a)


def test_a_row_shifted_over_itself() -> None:
    for case in (lambda t: t.__setitem__(slice(1, None), t[:-1]), lambda t: t.__setitem__(slice(None, -1), t[1:]),
                 lambda t: t.__setitem__(slice(None), t[::-1]), lambda t: t.__setitem__(slice(None, None, 2), t[1::2])):
        a = np.arange(10, dtype=np.float32)
        t = Tensor(a.copy())
        case(a)
        case(t)
        check(t, a)


def memory_of(t: Tensor) -> Array:
    return buffer_of(storage_of(base_of(t.uop))).array


def test_a_part_is_written_in_the_memory_of_its_tensor() -> None:
    a = np.arange(12, dtype=np.float32).reshape(3, 4)
    t = Tensor(a)
    rows, before = t.reshape(12), t + 0
    part = t[1:3, ::2]
    part.assign(Tensor([[-1.0], [-2.0]]))
    expected = np.array([[0, 1, 2, 3], [-1, 5, -1, 7], [-2, 9, -2, 11]], np.float32)
    check(part, expected[1:3, ::2])
    check(rows, expected.ravel())
    check(before, np.arange(12, dtype=np.float32).reshape(3, 4))
    check(t, expected)
    assert memory_of(t) is memory_of(rows) and np.shares_memory(memory_of(t), a)
    if checking.active == "compiled":
        np.testing.assert_array_equal(a, expected)


def test_parts_written_down_earlier() -> None:
    """A part keeps the values from the time it was made. An assignment to it writes the memory that it views."""
    t = Tensor(np.zeros(6, np.int32))
    old, again = t[1:4], t[2:5]
    t[:] = 1
    again.assign(2)
    check(old, np.zeros(3, np.int32))
    check(again, np.full(3, 2, np.int32))
    check(t, np.array([1, 1, 2, 2, 2, 1], np.int32))


@pytest.mark.slow
def test_many_rows_one_by_one() -> None:
    t, a = Tensor.zeros(40, 3), np.zeros((40, 3), np.float32)
    for i in range(40):
        a[i] = i
        t[i] = i
    check(t, a)


def test_what_has_no_memory_gets_its_own() -> None:
    a = np.arange(4, dtype=np.float32)
    a.flags.writeable = False
    frozen, computed, constant = Tensor(a), Tensor(a) + 1, Tensor.ones(4)
    same = computed.detach()
    for t in (frozen, computed, constant):
        t[1] = 9
        t[1:3] = t[2:4]
    for t, expected in ((frozen, [0, 2, 3, 3]), (computed, [1, 3, 4, 4]), (constant, [1, 1, 1, 1]), (same, [1, 2, 3, 4])):
        assert evaluate(t).tolist() == expected
    assert a.tolist() == [0, 1, 2, 3]
    with pytest.raises(UnsupportedError, match="read-only array"):
        Tensor(a)[1:3].assign(0)


def test_an_assignment_runs_once() -> None:
    t = Tensor(np.zeros(4, np.float32))
    t[1:3] += 5
    later = t * 2
    other = t.clone()
    assert evaluate(later).tolist() == [0, 10, 10, 0] and evaluate(t).tolist() == [0, 5, 5, 0]
    t[0] = 1
    assert evaluate(t).tolist() == [1, 5, 5, 0] and evaluate(other).tolist() == [0, 5, 5, 0]


def test_a_clone_is_another_memory() -> None:
    t = Tensor(np.zeros(4, np.float32))
    copy = t.clone().realize() if checking.active == "compiled" else t.clone()
    lazy = t + 1
    both = lazy.clone()
    t[0] = 1
    lazy[0] = 7
    assert [evaluate(x).tolist() for x in (copy, t, lazy, both)] == [[0] * 4, [1, 0, 0, 0], [7, 1, 1, 1], [1] * 4]


def test_errors_of_assignment() -> None:
    t = Tensor(np.zeros((2, 3), np.float32))
    with pytest.raises(ShapeError, match=r"t\[…\] = value.*\(4,\).*\(3,\)"):
        t[1] = np.zeros(4)
    with pytest.raises(ShapeError, match=r"t\[…\] = value.*\(4,\).*\(2, 3\)"):
        t[[0, 1]] = np.zeros(4)
    with pytest.raises(TensorIndexError, match=r"position 2 is out of range for an axis of extent 2"):
        t[[0, 2]] = 1
    with pytest.raises(UnsupportedError, match=r"a mask of known values, mask\.numpy\(\)"):
        t[Tensor([True, False]), 0] = 1
    with pytest.raises(ShapeError, match=r"a value for each element chosen needs a mask of known values, mask\.numpy\(\)"):
        t[Tensor([True, False])] = np.ones((1, 2, 3))[:, :1].repeat(2, 0)
    assert t.is_realized


@few
@given(shape=shapes(1, 3, zero=False), dtype=any_dtype, seed=seeds, data=st.data())
def test_positions_are_written_as_in_numpy(shape: tuple[int, ...], dtype: str, seed: int, data: st.DataObject) -> None:
    """Lists, arrays, tensors and known masks among slices; the last of several values is kept, and positions out of range are skipped."""
    a, rng = make(shape, dtype, seed), np.random.default_rng(seed)
    t = Tensor(a.copy()) if data.draw(st.booleans()) else Tensor(a.copy()) * np.ones((), dtype)
    flat = t.reshape(-1) if t.is_realized else None
    together = data.draw(st.sampled_from([(), (3,), (2, 1), (0,)]))
    index: list[Any] = [slice(None, None, data.draw(st.sampled_from([None, 2, -1]))) for _ in shape]
    for axis in data.draw(st.sets(st.integers(0, len(shape) - 1), min_size=1)):
        n = shape[axis]
        index[axis] = rng.integers(-n, n, together[data.draw(st.integers(0, len(together))):])
    if data.draw(st.integers(0, 3)) == 0:
        index = [rng.integers(0, 2, shape[:data.draw(st.integers(1, len(shape)))]).astype(bool)]
    value = make(broadcastable(data, a[tuple(index)].shape), dtype, seed + 1)
    given: list[object] = []
    for e in index:
        known = not isinstance(e, np.ndarray) or e.dtype == bool or data.draw(st.booleans())
        given.append(e if known else Tensor(e))
    t[given[0] if len(given) == 1 else tuple(given)] = value
    a[(*index, ...)] = value     # NumPy writes a single element by other rules
    check(t, a)
    if flat is not None:
        check(flat, a.reshape(-1))
    t[Tensor([shape[0] + 1, -1 - shape[0]])] = value.dtype.type(1)
    check(t, a)


def test_positions_along_an_extent_that_depends_on_a_variable() -> None:
    """Position -1 is the last one of the run's real extent; positions out of range are skipped."""
    a, n = np.arange(39, dtype=np.float32).reshape(13, 3), Variable("n", 1, 13)
    chosen = np.array([0, 2, -1])
    for size in (1, 2, 7, 13):
        t, want = Tensor(a)[:n.bind(size)] * 1, a[:size].copy()
        t[Tensor(chosen)] = 7.0
        want[chosen[chosen < size]] = 7.0
        np.testing.assert_array_equal(t.numpy(), want)


@few
@given(shape=shapes(1, 3), dtype=any_dtype, known=st.booleans(), seed=seeds, data=st.data())
def test_masks_choose_what_is_written(shape: tuple[int, ...], dtype: str, known: bool, seed: int, data: st.DataObject) -> None:
    a, axes = make(shape, dtype, seed), data.draw(st.integers(1, len(shape)))
    mask = np.random.default_rng(seed).integers(0, 2, shape[:axes]).astype(bool)
    value = make(broadcastable(data, shape[axes:]), dtype, seed + 1)
    t, expected = Tensor(a.copy()), a.copy()
    expected[mask] = value
    memory = buffer_of(base_of(t.uop)) if a.size else None
    t[mask if known else Tensor(mask)] = value
    check(t, expected)
    if memory is not None and checking.active == "compiled":
        assert buffer_of(base_of(t.uop)) is memory
    for bad_mask, bad_value in ((np.ones(shape[0] + 1, bool), 1), (Tensor(mask), np.ones((2, *shape[axes:])))):
        with pytest.raises(ShapeError, match=r"t\[mask\] = value"):
            t[bad_mask] = bad_value


def test_copies_and_pickles_hold_the_values_they_had() -> None:
    for dtype in ("float32", "bfloat16", "int8"):
        t = Tensor([[1, 2, 3]], dtype=dtype).contiguous().realize()
        copies = [copy.deepcopy(t), pickle.loads(pickle.dumps(t)), copy.deepcopy({"t": [t, t]})["t"][1], pickle.loads(pickle.dumps(t + 0))]
        shared = copy.copy(t)
        t[0, 0] = 9
        assert shared.tolist() == [[9, 2, 3]]
        for other in copies:
            assert other.tolist() == [[1, 2, 3]] and other.dtype == t.dtype and other.shape == t.shape
            other[0, 1] = 7
        assert t.tolist() == [[9, 2, 3]]
    assert len(pickle.dumps(Tensor.zeros(1 << 20))) < 1000 and pickle.loads(pickle.dumps(Tensor.zeros(2, 0))).shape == (2, 0)


def test_numbers_are_rounded_once() -> None:
    for dtype, value in (("float64", 0.1), ("int64", 2.0**53 - 1), ("int32", -16777217.5), ("float16", 1.0004883), ("bool", 0.5)):
        a = np.zeros(4, dtype)
        t, u = Tensor(a.copy()), Tensor(a.copy())
        a[1:3] = np.float64(value).astype(dtype)
        t[1:3] = value
        check(t, a)
        check(u.assign(value), np.full(4, a[1]))


@pytest.mark.parametrize("first", ["part", "whole"])
def test_a_part_that_was_read_and_then_written(first: str) -> None:
    """The view that is read and the part that is written are the same node: the old value must not replace the written memory."""
    a = np.arange(6, dtype=np.float32).reshape(2, 3)
    t = Tensor(a.copy())
    part = t[:1]
    t[0] = 9
    t[0, 1:] = t[0, :2] + 1
    after = np.array([[9, 10, 10], [3, 4, 5]], np.float32)
    for which in (first, "part", "whole"):
        if which == "part":
            check(part, a[:1])
            part.realize()
        else:
            np.testing.assert_array_equal(t.numpy(), after)


def test_who_reads_old_content_may_write_and_others_read_what_was_before_that() -> None:
    a = np.arange(9, dtype=np.float32).reshape(3, 3)
    t = Tensor(a.copy())
    first = t[1:]
    t[1, 0] = first.sum()
    column, row = t[:, 0], t[2]
    t[:, :2] = 4
    t[1, 2] = first.sum()
    # values that read the row's memory before the assignment, including the whole tensor, are computed before it
    np.testing.assert_array_equal(row.numpy(), [6, 7, 8])
    np.testing.assert_array_equal(column.numpy(), [0, 33, 6])
    np.testing.assert_array_equal(t.numpy(), [[4, 4, 2], [4, 4, 33], [4, 4, 8]])


def test_who_reads_old_content_is_computed_before_a_plan_overwrites_it() -> None:
    t = Tensor(np.array([1, 2], dtype=np.float32))
    once = t + 1
    t.assign(t + 1)
    between = t * 10
    t.assign(t * 2)
    plan = t.prepare()
    for times in (1, 2):
        plan.execute()
        np.testing.assert_array_equal(once.numpy(), [2, 3])
        np.testing.assert_array_equal(between.numpy(), [20, 30])
        np.testing.assert_array_equal(t.numpy(), np.array([4, 6]) * 2.0 ** (times - 1))


@pytest.mark.parametrize("value", [300, -1, [300], [[1], [256]], (3, -200)])
def test_integers_that_do_not_fit_are_refused(value: Any) -> None:
    """NumPy raises OverflowError; the number does not wrap, and the old content stays. Arrays and tensors are cast, as in NumPy."""
    t = Tensor(np.zeros((2, 2), np.uint8))
    for write in (lambda: t.__setitem__(0, value), lambda: t.assign(value), lambda: Tensor(value, dtype="uint8")):
        with pytest.raises(DTypeError, match=r"does not fit uint8 \(0 … 255\)"):
            write()
    t[0] = np.array([300, 255])
    t[1] = [True, 7]
    assert t.tolist() == [[44, 255], [1, 7]]
