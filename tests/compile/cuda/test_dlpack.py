"""Memory that svod and other libraries share on a GPU through DLPack: the order of their work, tested with `FakeDriver`, which executes
work as late as allowed. The other library's work is on the default stream."""
from __future__ import annotations

import ctypes
import gc
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import svod
from svod import Tensor
from svod.compile.backend import backend_named
from svod.compile.cuda.backend import Cuda
from svod.compile.cuda.device import DEFAULT_STREAM, DeviceMemory
from svod.core.graph.buffer import Array
from svod.core.ir.dtype import STORABLE, dtypes
from svod.errors import DeviceError
from svod.tensor import dlpack
from tests.compile.cuda.fake_driver import FakeDriver

RNG = np.random.default_rng(0)
X, W = (RNG.standard_normal(shape).astype(np.float32) for shape in ((11, 18), (18, 13)))


class Theirs:
    """An array of another library on GPU `number`, with the DLPack methods of PyTorch's CUDA tensors."""

    def __init__(self, array: Array, number: int = 0) -> None:
        self.array, self.number, self.streams = array, number, list[Any]()

    def __dlpack_device__(self) -> tuple[int, int]:
        return 2, self.number

    def __dlpack__(self, *, stream: Any = None) -> Any:
        self.streams.append(stream)
        a = self.array
        dtype = Tensor(a).dtype
        strides = tuple(s // a.itemsize for s in a.strides)
        return dlpack.capsule_over(dlpack.Shared(a.ctypes.data, dtype, a.shape, strides, a), (2, self.number))


def test_memory_of_another_library_is_used_where_it_is(fake: FakeDriver) -> None:
    theirs = Theirs(X.copy(), 1)
    t = Tensor.from_dlpack(theirs)
    assert (t.device, t.shape, theirs.streams) == ("CUDA:1", X.shape, [7]), "their work waits for nothing of ours"
    doubled = t * 2
    theirs.array += 1
    before = len(fake.calls)
    doubled.realize()
    assert "copy_in" not in fake.names()[before:] and doubled.device == "CUDA:1"
    np.testing.assert_array_equal(doubled.numpy(), (X + 1) * 2)
    t[0] = 3.0
    t.realize()
    assert fake.is_idle, "another library does not wait for svod"
    assert (theirs.array[0] == 3).all(), "svod writes their memory"


@pytest.mark.parametrize("axes", [(0, 1, 2), (2, 0, 1), (1, 0, 2)])
def test_axes_of_another_library_in_any_order(fake: FakeDriver, axes: tuple[int, ...]) -> None:
    array = np.arange(30, dtype=np.int32).reshape(2, 5, 3).transpose(axes)
    np.testing.assert_array_equal((Tensor.from_dlpack(Theirs(array)) + 1).numpy(), array + 1)
    with pytest.raises(DeviceError, match="make it contiguous first"):
        Tensor.from_dlpack(Theirs(array[::2, :, ::2]))
    assert Tensor.from_dlpack(Theirs(array[:0])).shape == array[:0].shape


def test_a_tensor_on_a_gpu_is_shared(fake: FakeDriver) -> None:
    t = Tensor(X).to("CUDA:1").realize()
    assert t.__dlpack_device__() == (2, 1) and not fake.is_idle
    view = Tensor.from_dlpack(t)        # there and back
    assert view.device == "CUDA:1" and not fake.is_idle, "both are on one stream"
    capsule = t.__dlpack__(stream=-1)
    managed = ctypes.cast(dlpack._pointer_of(capsule, b"dltensor"), ctypes.POINTER(dlpack._DLManagedTensor)).contents.tensor
    assert (managed.device_type, managed.device_id, managed.ndim, managed.code, managed.bits) == (2, 1, 2, 2, 32)
    assert [managed.shape[i] for i in range(2)] == list(X.shape) and [managed.strides[i] for i in range(2)] == [X.shape[1], 1]
    theirs = np.ctypeslib.as_array((ctypes.c_float * X.size).from_address(managed.data)).reshape(X.shape)
    np.testing.assert_array_equal(theirs, X)
    theirs[:] = 5       # another library writes; svod reads
    np.testing.assert_array_equal(t.numpy(), np.full_like(X, 5))
    np.testing.assert_array_equal((t.T.contiguous() * 2).numpy(), np.full_like(X.T, 10))
    host = np.from_dlpack(_OnHost(t))
    np.testing.assert_array_equal(host, theirs)
    with pytest.raises(DeviceError, match=r"DLPack device \(2, 0\): the tensor is on CUDA:1"):
        t.__dlpack__(dl_device=(2, 0))


class _OnHost:
    """A tensor whose DLPack export is requested as NumPy does for a copy to the host."""

    def __init__(self, t: Tensor) -> None:
        self.t = t

    def __dlpack_device__(self) -> tuple[int, int]:
        return dlpack.CPU_DEVICE

    def __dlpack__(self, **options: Any) -> Any:
        return self.t.__dlpack__(dl_device=dlpack.CPU_DEVICE)


def test_all_types_are_shared(fake: FakeDriver) -> None:
    for dtype in STORABLE:
        t = Tensor([0, 1, 1, 0]).cast(dtype).to("CUDA").realize()
        back = Tensor.from_dlpack(t)
        assert back.dtype == t.dtype and back.device == "CUDA"
        np.testing.assert_array_equal(back.numpy(), t.numpy())


# -- the order of streams ----------------------------------------------------------------------------------
def array_of(capsule: Any, shape: tuple[int, ...]) -> Array:
    """Return the memory of a DLPack capsule as a float32 array."""
    managed = ctypes.cast(dlpack._pointer_of(capsule, b"dltensor"), ctypes.POINTER(dlpack._DLManagedTensor)).contents.tensor
    found: Array = np.ctypeslib.as_array((ctypes.c_float * int(np.prod(shape))).from_address(managed.data)).reshape(shape)
    return found


def release(capsule: Any) -> None:
    """Release the memory of a capsule as a consumer does."""
    managed = ctypes.cast(dlpack._pointer_of(capsule, b"dltensor"), ctypes.POINTER(dlpack._DLManagedTensor)).contents
    managed.deleter(ctypes.addressof(managed))
    gc.collect()


def reading(array: Array, seen: list[Array]) -> Callable[[], None]:
    return lambda: seen.append(array.copy())


def writing(array: Array, value: Any) -> Callable[[], None]:
    return lambda: array.__setitem__(..., value)


@pytest.mark.parametrize("stream", [0, 1])
def test_runs_come_after_what_is_on_a_known_stream_and_before_what_is_put_there_later(fake: FakeDriver, stream: int) -> None:
    theirs = Theirs(np.full_like(X, np.nan))
    t = Tensor.from_dlpack(theirs, stream=stream)
    assert theirs.streams == [-1], "no stream waits when memory is taken"
    double = svod.jit(lambda a: a * 2)
    for n in range(4):
        fake.begin(DEFAULT_STREAM, writing(theirs.array, X + n))
        before = len(fake.calls)
        y = double(t)
        fake.begin(DEFAULT_STREAM, writing(theirs.array, np.nan))
        assert not {"wait", "wait_event", "wait_for_all"} & set(fake.names()[before:]) and not fake.is_idle
        if n % 2:
            fake.wait(DEFAULT_STREAM)       # svod's run has to come first
        np.testing.assert_array_equal(y.numpy(), (X + n) * 2)


def test_copies_to_the_host_come_after_what_is_on_the_stream(fake: FakeDriver) -> None:
    theirs = Theirs(np.full_like(X, np.nan))
    t = Tensor.from_dlpack(theirs, stream=DEFAULT_STREAM)
    fake.begin(DEFAULT_STREAM, writing(theirs.array, X))
    np.testing.assert_array_equal(t.numpy(), X)


def test_what_svod_writes_is_there_for_what_is_put_on_the_stream_later(fake: FakeDriver) -> None:
    theirs, seen = Theirs(X.copy()), list[Array]()
    t = Tensor.from_dlpack(theirs, stream=DEFAULT_STREAM)
    t.assign(t * 3).realize()
    fake.begin(DEFAULT_STREAM, reading(theirs.array, seen))
    assert not fake.is_idle
    fake.wait(DEFAULT_STREAM)
    np.testing.assert_array_equal(seen[0], X * 3)


def test_without_a_stream_the_host_waits_for_each_run(fake: FakeDriver) -> None:
    theirs = Theirs(X.copy())
    y = (Tensor.from_dlpack(theirs) * 2).realize()
    assert theirs.streams == [backend_named("CUDA").dlpack_stream] and fake.is_idle
    np.testing.assert_array_equal(y.numpy(), X * 2)


@pytest.mark.parametrize("stream", [None, 1, 8, -1])
def test_what_a_consumer_puts_on_its_stream_comes_after_svods_work(fake: FakeDriver, stream: int | None) -> None:
    assert backend_named("CUDA").dlpack_stream == 7 and fake.create_stream() == 8
    t = (Tensor(X).to("CUDA") * 2).realize()
    before = len(fake.calls)
    capsule, seen = t.__dlpack__(stream=stream), list[Array]()
    assert ("wait" in fake.names()[before:]) is (stream == -1), "the host waits where it cannot be told who comes after svod"
    fake.begin(max(stream or 1, 1), reading(array_of(capsule, X.shape), seen))
    fake.wait(max(stream or 1, 1))
    np.testing.assert_array_equal(seen[0], X * 2)


@pytest.mark.slow
@pytest.mark.parametrize("stream", [1, 8])
def test_memory_that_was_lent_is_used_again_after_what_its_borrower_did(fake: FakeDriver, stream: int) -> None:
    """The borrower releases a result before its kernels that read it have run; the next result gets the same memory, after those
    kernels."""
    assert backend_named("CUDA").dlpack_stream == 7 and fake.create_stream() == 8
    f = svod.jit(lambda a: (a.to("CUDA") @ Tensor(W).to("CUDA")))
    f(X)
    f(X)
    seen, places = list[Array](), list[int]()
    for n in range(4):
        y = f(X + n)
        capsule = y.__dlpack__(stream=stream)
        memory = array_of(capsule, (11, 13))
        places.append(memory.ctypes.data)
        fake.begin(stream, reading(memory, seen))
        release(capsule)
        del y, capsule
        if stream != DEFAULT_STREAM and n == 3:
            fake.gone.add(stream)
    last = f(X - 1).numpy()         # waits for svod's stream alone
    for n, got in enumerate(seen):
        np.testing.assert_allclose(got, (X + n) @ W, rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(last, (X - 1) @ W, rtol=1e-4, atol=1e-5)
    assert len(set(places)) < 4 and len(seen) >= 3, "memory is used again"


class OnDevice:
    """An int32 array of another library in the first GPU's memory."""

    def __init__(self, memory: DeviceMemory) -> None:
        self.memory = memory

    def __dlpack_device__(self) -> tuple[int, int]:
        return 2, 0

    def __dlpack__(self, *, stream: Any) -> Any:
        assert stream == -1
        return dlpack.capsule_over(dlpack.Shared(self.memory.address, dtypes.int32, (self.memory.nbytes // 4,), (1,), self.memory), (2, 0))


def test_the_default_stream_and_svods_work_in_turns(cuda: Any) -> None:
    """Long fills on the default stream alternate with svod's runs, also on a GPU: each reads the result of the one before."""
    device = backend_named("CUDA")
    assert isinstance(device, Cuda)
    size = 1 << (12 if cuda is not None else 28)
    memory = DeviceMemory(device.gpu.pool, size)
    t = Tensor.from_dlpack(OnDevice(memory), stream=0)
    add = svod.jit(lambda a: a + 1)
    made = []
    for n in range(12):
        with device.gpu.current() as driver:
            for value in (0, n):
                driver.fill(memory.address, value, size, DEFAULT_STREAM)
        made.append(add(t))
        with device.gpu.current() as driver:
            driver.fill(memory.address, 0xEE, size, DEFAULT_STREAM)
        if n == 7:
            t.assign(t * 0 - 5).realize()
            copied = DeviceMemory(device.gpu.pool, size)
            with device.gpu.working() as driver:
                driver.copy(copied.address, memory.address, size, DEFAULT_STREAM)
            device.follow(DEFAULT_STREAM)
            back = np.empty(size // 4, np.int32)
            device.copy_out(back.ctypes.data, copied.address, size)
            assert (back == -5).all()
    for n, y in enumerate(made):
        found = y.numpy()
        assert found.min() == found.max() == n * 0x01010101 + 1, n
