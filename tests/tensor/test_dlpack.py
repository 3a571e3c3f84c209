"""Sharing memory through DLPack in both directions, with NumPy and, if installed, PyTorch."""
from __future__ import annotations

import ctypes
import gc
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

import svod
from svod.errors import DeviceError, DTypeError
from svod.tensor import Tensor, dlpack
from tests.tensor.strategies import make


@pytest.fixture(scope="module", autouse=True)
def evaluator() -> Iterator[None]:
    """Run once only, because values come from memory."""
    yield


@pytest.mark.parametrize("dtype", ["float32", "int8", "uint64", "float16", "bool"])
def test_numpy_both_ways(dtype: str) -> None:
    a = make((3, 4), dtype, 0)
    t = Tensor.from_dlpack(a)
    a[0, 0] = 1
    assert t.numpy()[0, 0] == a[0, 0], "the same memory"
    back = np.from_dlpack(t)  # type: ignore[arg-type]
    assert back.ctypes.data == a.ctypes.data and back.dtype == a.dtype
    np.testing.assert_array_equal(np.from_dlpack(t.flip(0)), a[::-1])  # type: ignore[arg-type]
    np.testing.assert_array_equal(Tensor.from_dlpack(a.T).numpy(), a.T)


def test_bfloat16_through_the_structure() -> None:
    """NumPy has no bfloat16, so svod is the consumer as well; the array lives until the capsule is released."""
    t = Tensor(np.arange(6, dtype=np.float32).reshape(2, 3)).bfloat16().realize()
    u = Tensor.from_dlpack(t)
    assert u.dtype.name == "bfloat16" and u.shape == (2, 3)
    address = t._values().ctypes.data
    assert u._values().ctypes.data == address
    np.testing.assert_array_equal(u.numpy(), t.numpy())

    class Turned:
        """The same memory with columns as rows."""

        def __dlpack_device__(self) -> tuple[int, int]: return t.__dlpack_device__()

        def __dlpack__(self) -> Any: return dlpack.bfloat16_capsule(t._values().T)
    np.testing.assert_array_equal(Tensor.from_dlpack(Turned()).numpy(), t.numpy().T)

    known = set(dlpack._exported)
    capsule = t.__dlpack__()
    handed_out, = set(dlpack._exported) - known
    managed = ctypes.cast(dlpack._pointer_of(capsule, b"dltensor"), ctypes.POINTER(dlpack._DLManagedTensor)).contents
    managed.deleter(ctypes.pointer(managed))        # the consumer calls this at the end
    assert handed_out not in dlpack._exported


def test_pytorch_both_ways() -> None:
    torch = pytest.importorskip("torch")
    for dtype in (torch.float32, torch.bfloat16, torch.int64):
        a = torch.arange(6).reshape(2, 3).to(dtype)
        t = Tensor.from_dlpack(a)
        a[0, 0] = 7
        assert t.numpy()[0, 0] == 7
        back = torch.from_dlpack(t)
        assert back.dtype == dtype and back.data_ptr() == a.data_ptr()
        del back
        gc.collect()


def test_bfloat16_of_pytorch_wherever_arrays_are_taken() -> None:
    torch = pytest.importorskip("torch")
    a = torch.arange(6.0).reshape(2, 3).bfloat16()
    want = a.float().numpy()
    for given in (a, a.t().contiguous().t(), a[:, 1:], a[0, 0], torch.zeros(0, 3).bfloat16()):
        t = Tensor(given)
        assert t.dtype.name == "bfloat16" and t.shape == tuple(given.shape)
        np.testing.assert_array_equal(t.numpy(), given.float().numpy())
    assert Tensor(a, dtype="float64").numpy().tolist() == want.tolist()
    np.testing.assert_array_equal((Tensor(want) + a).numpy(), 2 * want)
    np.testing.assert_array_equal(svod.where(Tensor(want) > 2, a, 0.0).numpy(), np.where(want > 2, want, 0))
    np.testing.assert_array_equal(svod.jit(lambda x: x * 2)(a).numpy(), 2 * want)
    x = Tensor.zeros(2, 3).contiguous()
    x[1] = a[1]
    np.testing.assert_array_equal(x.numpy(), want * [[0], [1]])
    layer = torch.nn.Linear(4, 3).bfloat16()
    for state in (layer.state_dict(), dict(layer.named_parameters())):
        weight = svod.nn.Linear(4, 3).load_state_dict(state).weight
        assert weight.dtype.name == "bfloat16"
        np.testing.assert_array_equal(weight.numpy(), layer.weight.detach().float().numpy())


def test_types_of_other_libraries_that_svod_has_not() -> None:
    torch = pytest.importorskip("torch")
    eight = torch.ones(3).to(torch.float8_e4m3fn)
    for take in (Tensor, Tensor.from_dlpack, svod.jit(lambda x: x + 1)):
        with pytest.raises(DTypeError, match="svod has no float8_e4m3fn, convert the values to one of bool, int8, "):
            take(eight)
    with pytest.raises(DTypeError, match="svod has no float8_e4m3fn"):
        svod.nn.Linear(1, 3, bias=False).load_state_dict({"weight": eight.reshape(3, 1)})
    with pytest.raises(DTypeError, match="complex64"):
        Tensor(torch.ones(2, dtype=torch.complex64))
    with pytest.raises(DTypeError, match=r"use tensor\.detach"):
        Tensor(torch.nn.Parameter(torch.ones(2)))
    with pytest.raises(DTypeError, match=r"Tensor\.stack"):
        Tensor([torch.ones(2).bfloat16()])
    with pytest.raises(DeviceError, match="meta"):
        Tensor(torch.ones(2, device="meta"))


def test_errors_of_dlpack() -> None:
    class Elsewhere:
        def __dlpack__(self) -> Any: raise AssertionError("is not asked")

        def __dlpack_device__(self) -> tuple[int, int]: return 10, 0
    with pytest.raises(DeviceError, match=r"DLPack device \(10, 0\)"):
        Tensor.from_dlpack(Elsewhere())
    with pytest.raises(DTypeError, match="list: it has no __dlpack__"):
        Tensor.from_dlpack([1])
    with pytest.raises(DTypeError, match="from_dlpack of ndarray"):
        Tensor.from_dlpack(np.zeros(3, "U4"))
    with pytest.raises(DeviceError, match="the tensor is on CPU"):
        Tensor([1]).__dlpack__(dl_device=(2, 0))
