"""Operations composed of others, against NumPy: stacks, tiles, sums without NaNs, masked replacement."""
from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from svod.errors import DTypeError, ShapeError
from svod.tensor import Tensor
from tests.draws import draws
from tests.tensor.checking import check
from tests.tensor.strategies import make, seeds, shapes

few = draws(6)


@few
@given(shape=shapes(1, 3), seed=seeds, data=st.data())
def test_stacks_and_tiles(shape: tuple[int, ...], seed: int, data: st.DataObject) -> None:
    a, b = make(shape, "float32", seed), make(shape, "int32", seed + 1)
    wide = a.astype(np.float32), b.astype(np.float32)
    check(Tensor.vstack([Tensor(a), Tensor(b)]), np.vstack(wide))
    check(Tensor.hstack([Tensor(a), Tensor(b)]), np.hstack(wide))
    counts = tuple(data.draw(st.lists(st.integers(0, 3), min_size=1, max_size=4)))
    check(Tensor(a).tile(counts), np.tile(a, counts))
    axes = tuple(data.draw(st.sets(st.integers(0, len(shape) - 1))))
    check(Tensor(a).flip(dims=axes), np.flip(a, axes))
    check(Tensor(a).flip(*axes), np.flip(a, axes))


@few
@given(shape=shapes(1, 3, zero=False), seed=seeds, data=st.data())
def test_sums_without_nans(shape: tuple[int, ...], seed: int, data: st.DataObject) -> None:
    a = make(shape, "float32", seed)
    a[make(shape, "bool", seed + 1)] = np.nan
    axis, keep = data.draw(st.integers(0, len(shape) - 1)), data.draw(st.booleans())
    check(Tensor(a).nansum(axis, keep), np.nansum(a, axis, keepdims=keep), 8)
    count = (~np.isnan(a)).sum(axis, keepdims=keep)
    with np.errstate(all="ignore"):
        check(Tensor(a).nanmean(axis, keep), (np.nansum(a, axis, keepdims=keep) / count).astype(np.float32), 8)


@few
@given(shape=shapes(1, 3), seed=seeds)
def test_values_in_the_place_of_a_mask(shape: tuple[int, ...], seed: int) -> None:
    a, mask, values = make(shape, "int32", seed), make(shape[-1:], "bool", seed + 1), make(shape, "int32", seed + 2)
    want = a.copy()
    whole = np.broadcast_to(mask, shape)
    want[whole] = values.ravel()[:whole.sum()]
    check(Tensor(a).masked_scatter(Tensor(mask), Tensor(values)), want)
    if whole.sum() > 1:
        want[whole] = [*values.ravel()[:1], *[0] * (int(whole.sum()) - 1)]
        check(Tensor(a).masked_scatter(Tensor(mask), Tensor(values.ravel()[:1])), want)
    with pytest.raises(DTypeError, match="cast the values first"):
        Tensor(a).masked_scatter(Tensor(mask), Tensor([1.5]))


def test_functions_of_elements_and_answers() -> None:
    p = np.array([0.01, 0.3, 0.5, 0.999], np.float32)
    check(Tensor(p).logit(), np.log(p / (1 - p)), 8)
    check(Tensor([0.0, 1.0], dtype="float32").logit(0.25), np.log(np.array([1 / 3, 3], np.float32)), 8)
    x = np.array([-2.5, -0.5, 0, 0.25, 3.5], np.float32)
    check(Tensor(x).sinc(), np.sinc(x), 16)
    check(Tensor(x.reshape(5, 1)).t(), x.reshape(1, 5))
    with pytest.raises(ShapeError, match="at most two axes"):
        Tensor.zeros(2, 2, 2).t()


def test_whether_tensors_are_equal() -> None:
    t = Tensor([1.0, 2.0])
    assert t.equal(np.array([1.0, 2.0])) and not t.equal([1.0, 3.0]) and not t.equal([[1.0, 2.0]])
    assert t.allclose([1.0, 2.00001]) and not t.allclose([1.0, 2.1]) and t.allclose(1.5, atol=0.6)
    assert Tensor([np.nan]).allclose([np.nan], equal_nan=True) and not Tensor([np.nan]).allclose([np.nan])


def test_a_dtype_of_pytorch_is_the_one_of_its_name() -> None:
    torch = pytest.importorskip("torch", reason="torch is not installed")
    for name in ("float16", "bfloat16", "float32", "int8", "bool"):
        assert Tensor([1.0]).to(getattr(torch, name)).dtype.name == name
    with pytest.raises(DTypeError, match="complex64"):
        Tensor([1.0]).cast(torch.complex64)


def test_a_dtype_is_known_by_the_module_and_the_name_it_has(monkeypatch: pytest.MonkeyPatch) -> None:
    """A dtype of PyTorch is recognised by its module, torch, and its text, torch.NAME."""
    kind = type("dtype", (), {"__module__": "torch", "__repr__": lambda self: "torch.float16"})
    assert Tensor([1.0]).cast(kind()).dtype.name == "float16"
