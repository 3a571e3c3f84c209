"""Arrays of pycuda, Numba and CuPy: memory shared through `__cuda_array_interface__`, and the program's contexts and streams, with
`FakeDriver`. The driver's calls, through ctypes and through pycuda, are tested with a C library that has one device and runs no kernels."""
from __future__ import annotations

import ctypes
import importlib.util
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import svod
from svod import Tensor
from svod.compile.backend import backend_named
from svod.compile.cuda.backend import Cuda
from svod.compile.cuda.device import DEFAULT_STREAM
from svod.core.graph.buffer import Array
from svod.core.ir.dtype import STORABLE, dtypes
from svod.errors import DeviceError, DTypeError, SvodError
from svod.tensor import cuda_arrays
from tests.compile.cuda.fake_driver import FakeDriver
from tests.compile.cuda.test_dlpack import reading, writing

X = np.random.default_rng(0).standard_normal((11, 18)).astype(np.float32)


class GpuArray:
    """An array with the interface of pycuda's GPUArray; `about`: fields of the interface that differ."""

    def __init__(self, array: Array, **about: Any) -> None:
        self.array, self.about = array, about

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        a = self.array
        return {"version": 3, "shape": a.shape, "typestr": a.dtype.str, "strides": a.strides, "data": (a.ctypes.data, False),
                "stream": None, **self.about}


def gpu() -> Any:
    backend = backend_named("CUDA")
    assert isinstance(backend, Cuda)
    return backend.gpu


def test_an_array_is_used_where_it_is(fake: FakeDriver) -> None:
    theirs = GpuArray(X.copy())
    for t in (Tensor(theirs), Tensor.from_dlpack(theirs)):
        assert (t.device, t.shape, t.dtype) == ("CUDA", X.shape, dtypes.float32)
        before = len(fake.calls)
        doubled = (t * 2).realize()
        assert "copy_in" not in fake.names()[before:] and doubled.device == "CUDA"
        np.testing.assert_array_equal(doubled.numpy(), X * 2)
    np.testing.assert_array_equal(svod.jit(lambda a: a + 1)(theirs).numpy(), X + 1)
    assert Tensor(theirs, dtype="float64").dtype == dtypes.float64
    fake.theirs[theirs.array.ctypes.data] = 1
    assert Tensor(theirs).device == "CUDA:1", "the driver knows the device of an address"


def test_types_and_orders_of_axes(fake: FakeDriver) -> None:
    for dtype in STORABLE:
        t = Tensor([0, 1, 1, 0]).cast(dtype).to("CUDA").realize()
        back = Tensor(GpuArray(np.zeros(4), **t.__cuda_array_interface__))
        assert back.dtype == dtype
        np.testing.assert_array_equal(back.numpy(), t.numpy())
    for axes in ((0, 1, 2), (2, 0, 1), (1, 0, 2)):
        array = np.arange(30, dtype=np.int32).reshape(2, 5, 3).transpose(axes)
        np.testing.assert_array_equal((Tensor(GpuArray(array)) + 1).numpy(), array + 1)
    assert Tensor(GpuArray(X[:0], data=(0, False))).shape == (0, 18)
    assert Tensor(GpuArray(X[:1, :1].copy(), strides=None)).numpy().item() == X[0, 0]


@pytest.mark.parametrize(("array", "about", "error", "words"), [
    (X[::2, ::2], {}, DeviceError, "make it contiguous first"), (X, {"strides": (74, 4)}, DeviceError, "make it contiguous first"),
    (X.astype(np.complex64), {}, DTypeError, "no dtype for complex64"), (X.astype(">f4"), {}, DTypeError, "no dtype for >f4"),
    (X, {"mask": GpuArray(X)}, DTypeError, "has a mask")], ids=["gaps", "odd strides", "complex", "big-endian", "masked"])
def test_memory_that_svod_cannot_use(fake: FakeDriver, array: Array, about: dict[str, Any], error: type[SvodError], words: str) -> None:
    with pytest.raises(error, match=words):
        Tensor(GpuArray(array, **about))


def test_read_only_memory_is_not_written(fake: FakeDriver) -> None:
    array = X.copy()
    t = Tensor(GpuArray(array, data=(array.ctypes.data, True)))
    t[0] = 3.0
    assert t.numpy()[0, 0] == 3.0
    np.testing.assert_array_equal(array, X)


# -- what svod offers --------------------------------------------------------------------------------------
def test_a_tensor_describes_its_memory(fake: FakeDriver) -> None:
    t = (Tensor(X).to("CUDA:1") * 2).realize()
    about = t.__cuda_array_interface__
    assert {k: about[k] for k in ("shape", "typestr", "strides", "stream", "version")} == {
        "shape": X.shape, "typestr": "<f4", "strides": None, "stream": DEFAULT_STREAM, "version": 3}
    seen: list[Array] = []
    theirs = np.ctypeslib.as_array((ctypes.c_float * X.size).from_address(about["data"][0])).reshape(X.shape)
    fake.begin(DEFAULT_STREAM, reading(theirs, seen))
    fake.begin(DEFAULT_STREAM, writing(theirs, 5))
    np.testing.assert_array_equal((t + 1).numpy(), np.full_like(X, 6), err_msg="svod's later runs come after what the consumer has begun")
    np.testing.assert_array_equal(seen[0], X * 2, err_msg="the consumer's work comes after svod's")
    assert not hasattr(Tensor(X), "__cuda_array_interface__"), "a tensor on the host has none"
    assert not cuda_arrays.is_cuda_array(t), "DLPack says more"


# -- the program's streams ---------------------------------------------------------------------------------
class PycudaStream:
    handle = DEFAULT_STREAM


class TorchStream:
    cuda_stream = 0


class CupyStream:
    ptr = DEFAULT_STREAM


class CudaCoreStream:
    def __cuda_stream__(self) -> tuple[int, int]:
        return 0, DEFAULT_STREAM


@pytest.mark.parametrize("stream", [0, DEFAULT_STREAM, PycudaStream(), TorchStream(), CupyStream(), CudaCoreStream()],
                         ids=lambda s: type(s).__name__)
def test_runs_come_after_what_is_on_the_programs_stream(fake: FakeDriver, stream: Any) -> None:
    theirs = GpuArray(np.full_like(X, np.nan))
    t, double = Tensor.from_dlpack(theirs, stream=stream), svod.jit(lambda a: a * 2)
    for n in range(3):
        fake.begin(DEFAULT_STREAM, writing(theirs.array, X + n))
        y = double(t)
        fake.begin(DEFAULT_STREAM, writing(theirs.array, np.nan))
        assert not fake.is_idle, "the host does not wait"
        np.testing.assert_array_equal(y.numpy(), (X + n) * 2)


@pytest.mark.parametrize("stream", [None, 9])
def test_what_an_array_was_last_written_by_comes_first(fake: FakeDriver, stream: int | None) -> None:
    """svod waits for the last write to the array, which is on the stream that the interface names, or on the default stream."""
    assert gpu().stream == 7
    while fake.create_stream() < 9:
        pass
    theirs = GpuArray(np.full_like(X, np.nan), stream=stream)
    fake.begin(stream or DEFAULT_STREAM, writing(theirs.array, X))
    np.testing.assert_array_equal((Tensor(theirs) * 2).numpy(), X * 2)


def test_what_is_no_stream(fake: FakeDriver) -> None:
    with pytest.raises(DTypeError, match=r"stream='x': give a stream's number"):
        Tensor.from_dlpack(GpuArray(X), stream="x")


# -- the program's context ---------------------------------------------------------------------------------
def test_svod_works_in_the_context_that_the_program_has_made(fake: FakeDriver) -> None:
    fake.enter_context(300)
    t = (Tensor(X).to("CUDA") * 2).realize()
    assert fake.contexts == [300] and gpu().context == 300
    np.testing.assert_array_equal(t.numpy(), X * 2)
    fake.leave_context()
    np.testing.assert_array_equal((t + 1).numpy(), X * 2 + 1)
    assert fake.contexts == [], "the thread has no context, as before"


def test_the_programs_context_is_current_after_each_use(fake: FakeDriver) -> None:
    double = svod.jit(lambda a: (a.to("CUDA") * 2).sum(0))
    double(X)
    assert gpu().context == 100 and fake.contexts == []
    fake.enter_context(300)
    for n in range(3):
        y = double(X + n)
        assert fake.contexts == [300]
        np.testing.assert_allclose(y.numpy(), ((X + n) * 2).sum(0), rtol=1e-5)
        y.__dlpack__(stream=1)
        assert fake.contexts == [300] and y.__cuda_array_interface__["version"] == 3
    fake.failing = next(symbol for _, symbol in fake.functions)
    with pytest.raises(DeviceError):
        double(X).numpy()
    assert fake.contexts == [300], "after an error too"


def test_a_context_of_another_device_is_left_alone(fake: FakeDriver) -> None:
    fake.enter_context(301)
    assert gpu().context == 100 and backend_named("CUDA:1").gpu.context == 301     # type: ignore[attr-defined]
    assert fake.contexts == [301]


def test_memory_of_another_context_is_refused_with_what_to_do(fake: FakeDriver) -> None:
    assert gpu().context == 100
    theirs = GpuArray(X.copy())
    fake.theirs[theirs.array.ctypes.data] = 300
    with pytest.raises(DeviceError, match=r"another context of fake GPU 0.*autoprimaryctx"):
        Tensor(theirs)


# -- NVIDIA's calls ----------------------------------------------------------------------------------------
CTYPES = """
import ctypes
lib, own = ctypes.CDLL("libcuda.so.1"), ctypes.c_void_p()
lib.cuInit(0)
lib.cuCtxCreate_v4(ctypes.byref(own), None, 0, 0)
def current():
    out = ctypes.c_void_p()
    lib.cuCtxGetCurrent(ctypes.byref(out))
    return out.value
"""
PYCUDA = """
import os, sys
sys.setdlopenflags(os.RTLD_LAZY)        # the library has the calls that are needed
import numpy as np, pycuda.autoinit, pycuda.driver as cuda, pycuda.gpuarray as gpuarray
current = lambda: cuda.Context.get_current().handle
"""
COMMON = """
import threading, numpy as np, svod
from svod import Tensor
from svod.compile.backend import backend_named
before, x = current(), np.arange(12, dtype=np.float32).reshape(3, 4)
t = (Tensor(x).to("CUDA") + 1).realize()
assert before and current() == before == backend_named("CUDA").gpu.context
worker = threading.Thread(target=lambda: done.append((Tensor(x).to("CUDA").T.contiguous() + 1).realize()))
done = []
worker.start(); worker.join()
assert len(done) == 1 and current() == before
u = Tensor.from_dlpack(Tensor(x).to("CUDA").realize())
assert (u.numpy() == x).all() and current() == before
del t, u, done
try:
    Tensor.empty(1 << 27).to("CUDA").realize()
except svod.errors.DeviceError as error:
    assert "has no 536,870,912 bytes of memory left" in str(error), error
else:
    raise AssertionError("the device has not so much memory")
assert current() == before
"""
WITH_PYCUDA = """
assert type(backend_named("CUDA").gpu.driver).__name__ == "PycudaDriver"
theirs = gpuarray.to_gpu(x)
for stream in (None, 0, cuda.Stream()):
    assert (Tensor.from_dlpack(theirs, stream=stream).numpy() == x).all()
svod.jit(lambda a: a + 1)(theirs)
ours = Tensor(x).to("CUDA").realize()
copied = np.empty_like(x)
cuda.memcpy_dtoh(copied, ours.__cuda_array_interface__["data"][0])
assert (copied == x).all() and current() == before
"""


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with a libcuda.so.1 compiled from libcuda.c."""
    compiler = shutil.which("cc") or shutil.which("gcc")
    if compiler is None:
        pytest.skip("no C compiler, which makes the stand-in of NVIDIA's library")
    folder = tmp_path_factory.mktemp("libcuda")
    source = Path(__file__).with_name("libcuda.c")
    subprocess.run([compiler, "-shared", "-fPIC", "-o", folder / "libcuda.so.1", source, "-lpthread"], check=True)
    return folder


@pytest.mark.slow
@pytest.mark.parametrize("through", ["ctypes", "pycuda"])
def test_a_program_with_a_context_of_its_own(library: Path, through: str) -> None:
    if through == "pycuda" and importlib.util.find_spec("pycuda") is None:
        pytest.skip("pycuda is not installed: it is compiled with NVIDIA's toolkit")
    script = CTYPES + COMMON if through == "ctypes" else PYCUDA + COMMON + WITH_PYCUDA
    env = {**os.environ, "LD_LIBRARY_PATH": str(library), "LD_PRELOAD": str(library / "libcuda.so.1"), "SVOD_OBJECT_CACHE": ":none:",
           "SVOD_TUNE_DB": ":none:"}
    done = subprocess.run([sys.executable, "-c", script], env=env, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
