"""Reductions and contractions against NumPy."""
from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from svod.core.graph.shapes import shape_of
from svod.core.ir.uop import Ops
from svod.errors import DTypeError, ShapeError
from svod.tensor import Tensor
from tests.draws import draws
from tests.tensor.checking import Cases, check
from tests.tensor.strategies import Array, any_dtype, float_result, int_dtype, make, seeds, shapes, views

few = draws(12)


@st.composite
def reductions(draw: st.DrawFn, dtype: st.SearchStrategy[str] = any_dtype, special: bool = False,
               zero: bool = True) -> tuple[Tensor, Array, int | tuple[int, ...] | None, bool]:
    t, a = draw(views(dtype, zero=zero, special=special))
    axes: int | tuple[int, ...] | None = None
    if a.ndim and draw(st.booleans()):
        chosen = draw(st.lists(st.integers(0, a.ndim - 1), min_size=1, unique=True))
        signed = tuple(i - a.ndim if draw(st.booleans()) else i for i in chosen)
        axes = signed[0] if len(signed) == 1 else signed
    return t, a, axes, draw(st.booleans())


@pytest.mark.slow
@few
@given(case=reductions())
def test_sums(case: tuple[Tensor, Array, int | tuple[int, ...] | None, bool]) -> None:
    t, a, axes, keep = case
    if a.dtype.kind == "f":
        wide = a.astype(np.float64)
        check(t.sum(axes, keep), np.asarray(wide.sum(axes, keepdims=keep)).astype(a.dtype), 4)
        check(t.prod(axis=axes, keepdims=keep), np.asarray(wide.prod(axes, keepdims=keep)).astype(a.dtype), 8)
    else:
        check(t.sum(dim=axes, keepdim=keep), a.sum(axes, keepdims=keep))
        check(t.prod(axes, keep), a.prod(axes, keepdims=keep))
    check(t.any(axes, keep), a.any(axes, keepdims=keep))
    check(t.all(axis=axes, keepdims=keep), a.all(axes, keepdims=keep))
    check(t.sum(axes, dtype="float32"), a.astype(np.float32).sum(axes), 8)


@pytest.mark.slow
@few
@given(case=reductions(st.sampled_from(["float16", "float32", "float64", "int32", "uint8", "bool"]), zero=False))
def test_moments(case: tuple[Tensor, Array, int | tuple[int, ...] | None, bool]) -> None:
    t, a, axes, keep = case
    kind = float_result(a.dtype.name)
    wide = a.astype(np.float64)
    check(t.mean(axes, keep), np.asarray(wide.mean(axes, keepdims=keep)).astype(kind), 4)
    check(t.var(axes, correction=0, keepdim=keep), np.asarray(wide.var(axes, keepdims=keep)).astype(kind), 8)
    with np.errstate(all="ignore"):
        check(t.std(axes, unbiased=False), np.asarray(wide.std(axes)).astype(kind), 40)
        count = a.size // max(1, np.asarray(wide.sum(axes)).size)
        if count > 1:
            check(t.var(axes), np.asarray(wide.var(axes, ddof=1)).astype(kind), 8)
        for pair, second in ((t.var_mean(axes, 0, keep), t.var(axes, 0, keep)), (t.std_mean(axes, 0, keep), t.std(axes, 0, keep))):
            assert pair[0].uop is second.uop and pair[1].uop is t.mean(axes, keep).uop
        check(t.logsumexp(axes, keep), np.asarray(np.log(np.exp(wide).sum(axes, keepdims=keep))).astype(kind), 8)


@few
@given(case=reductions(special=True))
def test_extrema(case: tuple[Tensor, Array, int | tuple[int, ...] | None, bool]) -> None:
    t, a, axes, keep = case
    try:
        largest, smallest = a.max(axes, keepdims=keep), a.min(axes, keepdims=keep)
    except ValueError:
        with pytest.raises(ShapeError, match="no element"):
            t.max(axes, keep)
        return
    check(t.max(axes, keep), largest)
    check(t.min(axis=axes, keepdims=keep), smallest)


@pytest.mark.slow
@few
@given(x=views(any_dtype, special=True, zero=False), data=st.data())
def test_positions_of_extrema(x: tuple[Tensor, Array], data: st.DataObject) -> None:
    t, a = x
    check(t.argmax(), np.argmax(a))
    check(t.argmin(), np.argmin(a))
    if a.ndim:
        axis = data.draw(st.integers(-a.ndim, a.ndim - 1))
        check(t.argmax(axis), np.argmax(a, axis))
        check(t.argmin(axis=axis, keepdims=True), np.argmin(a, axis, keepdims=True))


def test_sixteen_bit_sums_are_accumulated_in_float32() -> None:
    ones = np.full(4096, 1.0, np.float16)
    check(Tensor(ones).sum(), np.array(4096, np.float16))
    check(Tensor(np.full(300, 1.0, np.float32)).bfloat16().sum(), np.array(300, np.float32), dtype="bfloat16")
    check(Tensor(np.full(70000, 1.0, np.float16)).mean(), np.array(1, np.float16))


def test_a_number_is_reduced_along_its_only_axis() -> None:
    a = np.array(2.5, np.float32)
    for name in ("sum", "prod", "mean", "max", "min", "any", "all", "argmax", "argmin"):
        for axis in (0, -1):
            for keep in (False, True):
                check(getattr(Tensor(a), name)(axis, keep), np.asarray(getattr(np, name)(a)))
    check(Tensor(a).logsumexp(0), a, 1)
    with pytest.raises(ShapeError, match="sum: axis 1 of a tensor with 0 axes"):
        Tensor(a).sum(1)


def test_no_elements() -> None:
    t = Tensor.zeros(0, 3)
    check(t.sum(0), np.zeros(3, np.float32))
    check(t.prod(0), np.ones(3, np.float32))
    check(t.sum(1), np.zeros(0, np.float32))
    check(t.max(1), np.zeros(0, np.float32))
    check(t.mean(0), np.full(3, np.nan, np.float32))
    with pytest.raises(ShapeError, match="max of"):
        t.max(0)
    with pytest.raises(ShapeError, match="argmax"):
        t.argmax(0)


@draws(18)
@given(m=shapes(0, 1), n=shapes(0, 1), k=st.sampled_from([0, 1, 3, 7]), batch=shapes(0, 2), drop=st.integers(0, 2), ones=st.booleans(),
       dtypes=st.sampled_from([("float32", "float32"), ("float64", "float64"), ("int8", "int8"), ("int32", "float32"),
       ("float16", "float16"),
                               ("bool", "bool"), ("uint8", "int32"), ("int64", "int64")]), seed=seeds)
def test_matmul(m: tuple[int, ...], n: tuple[int, ...], k: int, batch: tuple[int, ...], drop: int, ones: bool, dtypes: tuple[str, str],
                seed: int) -> None:
    left = (*batch, *m, k) if m else (k,)
    other = tuple(1 if ones else b for b in batch)[drop:]
    right = (*other, k, *n) if n else (k,)
    a, b = make(left, dtypes[0], seed), make(right, dtypes[1], seed + 1)
    # svod's promotion, not NumPy's: an int with a float keeps the float's dtype
    kind = np.dtype(np.float32) if dtypes == ("int32", "float32") else np.result_type(a, b)
    wide = np.float64 if kind.kind == "f" else kind
    expected = np.asarray(np.matmul(a.astype(wide), b.astype(wide))).astype(kind)
    result = Tensor(a) @ Tensor(b)
    check(result, expected, 8)
    for reduce in result.uop.walk(Ops.REDUCE_AXIS):
        assert reduce.arg[1] == (len(shape_of(reduce)) - 1,), "the reduce axis comes last"


def test_integer_matmul_is_accumulated_wide() -> None:
    a = np.full((2, 300), 100, np.int8)
    with np.errstate(all="ignore"):
        check(Tensor(a) @ Tensor(a.T), a @ a.T)
        check(Tensor(a).int() @ Tensor(a.T).int(), a.astype(np.int32) @ a.T.astype(np.int32))


@draws(12)
@given(x=views(least=1, most=3, zero=False), out=st.sampled_from([1, 3, 5]), seed=seeds, bias=st.booleans())
def test_linear(x: tuple[Tensor, Array], out: int, seed: int, bias: bool) -> None:
    t, a = x
    w, b = make((out, a.shape[-1]), "float32", seed), make((out,), "float32", seed + 1)
    check(t.linear(Tensor(w), Tensor(b) if bias else None), a @ w.T + (b if bias else np.float32(0)), 8)


def test_errors_of_reductions_and_contractions() -> None:
    t = Tensor.zeros(2, 3)
    cases: Cases = ((lambda: t.sum(2), "sum: axis 2"), (lambda: t.sum((0, 0)), "twice"), (lambda: t.sum(0, axis=1),
             "give the axes once"),
             (lambda: t @ t, r"matmul of shapes \(2, 3\) and \(2, 3\)"), (lambda: t @ Tensor(1.0), "at least one axis"),
             (lambda: Tensor.zeros(2, 2, 3) @ Tensor.zeros(3, 3, 2), "matmul of shapes"),
             (lambda: t.linear(Tensor.zeros(4, 4)), "linear of"),
             (lambda: t.linear(Tensor.zeros(4, 3), Tensor.zeros(3)), r"linear of .* and a bias of \(3,\): .* here \(4,\)"),
             (lambda: Tensor.zeros(3, 4) @ Tensor.zeros(5, 6), r"\(3, 4\) and \(5, 6\): axis -1 .* extent 4, axis -2 of the second 5"),
             (lambda: Tensor.zeros(2, 3, 4) @ Tensor.zeros(3, 4, 5), r"\(2, 3, 4\) and \(3, 4, 5\): axis -3 has extents 2 and 3"),
             (lambda: t.argmax(3), "argmax"))
    for act, match in cases:
        with pytest.raises(ShapeError, match=match):
            act()
    with pytest.raises(DTypeError, match="any or all"):
        t.sum(dtype="bool")


@few
@given(x=views(int_dtype))
def test_count_nonzero(x: tuple[Tensor, Array]) -> None:
    t, a = x
    check(t.count_nonzero(), np.array(np.count_nonzero(a)))
