"""Memory shared through DLPack, both ways, with NumPy and, where it is installed, PyTorch."""
from __future__ import annotations

import ctypes
import gc
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from svod.errors import DeviceError, DTypeError
from svod.tensor import Tensor, dlpack
from tests.tensor.strategies import make


@pytest.fixture(scope="module", autouse=True)
def evaluator() -> Iterator[None]:
    """Once: values come from memory."""
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
    """NumPy has no bfloat16: svod to svod, the array kept until the capsule is given back."""
    t = Tensor(np.arange(6, dtype=np.float32).reshape(2, 3)).bfloat16().realize()
    u = Tensor.from_dlpack(t)
    assert u.dtype.name == "bfloat16" and u.shape == (2, 3)
    address = t._values().ctypes.data
    assert u._values().ctypes.data == address
    np.testing.assert_array_equal(u.numpy(), t.numpy())

    class Turned:
        """The same memory read by columns."""

        def __dlpack_device__(self) -> tuple[int, int]: return t.__dlpack_device__()

        def __dlpack__(self) -> Any: return dlpack.bfloat16_capsule(t._values().T)
    np.testing.assert_array_equal(Tensor.from_dlpack(Turned()).numpy(), t.numpy().T)

    known = set(dlpack._exported)
    capsule = t.__dlpack__()
    handed_out, = set(dlpack._exported) - known
    managed = ctypes.cast(dlpack._pointer_of(capsule, b"dltensor"), ctypes.POINTER(dlpack._DLManagedTensor)).contents
    managed.deleter(ctypes.pointer(managed))        # as who took it does in the end
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
