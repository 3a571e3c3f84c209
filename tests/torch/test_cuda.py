"""Graphs of PyTorch tensors on CUDA: on a GPU (`pytest -m gpu`), and without one on a stand-in for NVIDIA's driver. The stand-in uses
the host's memory, so tensors of PyTorch's CPU are declared to be on a GPU, also by DLPack."""
from __future__ import annotations

import ctypes
import sys
import types
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="the package torch is not installed")

import svod.torch  # noqa: E402
from svod import Tensor  # noqa: E402
from svod.compile.backend import BACKENDS, backend_named  # noqa: E402
from svod.compile.cuda.device import GpuDevice  # noqa: E402
from svod.compile.cuda.queue import CudaQueue  # noqa: E402
from svod.errors import DeviceError, UnsupportedError  # noqa: E402
from svod.tensor import dlpack  # noqa: E402
from svod.torch import memory, watch  # noqa: E402
from tests.compile.cuda.fake_driver import FakeDriver, fake_backend  # noqa: E402


class OnGpu:
    """A tensor whose memory is declared to be a GPU's."""

    def __init__(self, t: Any) -> None:
        self.t = t

    def __dlpack_device__(self) -> tuple[int, int]:
        return 2, 0

    def __dlpack__(self, *, stream: Any) -> Any:
        t, dtype = self.t, memory.svod_dtype(self.t.dtype)
        return dlpack.capsule_over(dlpack.Shared(t.data_ptr(), dtype, tuple(t.shape), tuple(t.stride()), t), (2, 0))


def over_device_memory(t: Tensor) -> Any:
    """Stand-in for torch.from_dlpack of a tensor on a GPU: a view of the host's memory at the address in the capsule."""
    assert t.__dlpack_device__()[0] == 2
    capsule = t.__dlpack__()
    found = ctypes.cast(dlpack._pointer_of(capsule, b"dltensor"), ctypes.POINTER(dlpack._DLManagedTensor)).contents.tensor
    raw: Any = (ctypes.c_uint8 * t.nbytes).from_address(found.data)
    raw.owner = capsule, dlpack._exported[ctypes.cast(dlpack._pointer_of(capsule, b"dltensor"), ctypes.c_void_p).value or 0]
    return torch.frombuffer(raw, dtype=memory.TORCH_DTYPES[t.dtype]).reshape(t.shape)


class Gpu:
    """A GPU. `where`: its name in PyTorch, "cpu" for the stand-in; `svod`: its name in svod; `calls`: copies between the host and the
    device, runs, and waits of the host, since `calls` was last read."""

    def __init__(self, where: str, svod: str, patch: pytest.MonkeyPatch) -> None:
        self.where, self.svod, self.calls = where, svod, list[str]()
        for owner, name in ((GpuDevice, "copy_in"), (GpuDevice, "copy_out"), (GpuDevice, "wait"), (CudaQueue, "run")):
            patch.setattr(owner, name, self._noted(name, getattr(owner, name)))

    def _noted(self, name: str, own: Any) -> Any:
        def noted(*args: Any) -> Any:
            self.calls.append(name)
            return own(*args)
        return noted

    def stream(self) -> AbstractContextManager[Any]:
        """Put PyTorch's work in the block on a separate stream."""
        if self.where == "cpu":
            return nullcontext()
        fresh = torch.cuda.Stream(self.where)
        fresh.wait_stream(torch.cuda.current_stream(self.where))
        return torch.cuda.stream(fresh)     # type: ignore[no-any-return]

    def wait(self) -> None:
        """Wait for PyTorch's work: svod does not know about work after it got a tensor."""
        if self.where != "cpu":
            torch.cuda.synchronize(self.where)


def real(number: int, patch: pytest.MonkeyPatch) -> Gpu:
    """A GPU of this machine. Skips the test if there is none."""
    name = f"CUDA:{number}" if number else "CUDA"
    try:
        backend_named(name).target()
    except DeviceError as e:
        pytest.skip(str(e))
    if torch.cuda.device_count() <= number:
        pytest.skip(f"PyTorch {torch.__version__} finds {torch.cuda.device_count()} GPUs where svod finds {name}: install one for CUDA")
    return Gpu(f"cuda:{number}", name, patch)


def stand_in(patch: pytest.MonkeyPatch) -> Gpu:
    """The stand-in. PyTorch's work on it is synchronous, so PyTorch's stream has reached svod's events at once."""
    module, driver, lead = types.ModuleType("svod_fake_cuda"), FakeDriver(), GpuDevice.lead
    module.BACKEND = fake_backend(driver)       # type: ignore[attr-defined]

    def led(device: GpuDevice, stream: int) -> None:
        lead(device, stream)
        driver.wait(stream)
    patch.setattr(GpuDevice, "lead", led)
    patch.setitem(sys.modules, module.__name__, module)
    patch.setitem(BACKENDS, "CUDA", module.__name__)
    patch.setattr("svod.compile.plan.compiler._compilers", {})
    from_dlpack = Tensor.from_dlpack
    on_gpu: Callable[[Any], str] = lambda t: "CUDA:0" if t.ndim else ""        # noqa: E731
    for place in (memory, watch):
        patch.setattr(place, "gpu_of", on_gpu)
    patch.setattr(Tensor, "from_dlpack", lambda t, **options: from_dlpack(OnGpu(t) if isinstance(t, torch.Tensor) else t, **options))
    patch.setattr(torch, "from_dlpack", over_device_memory)
    return Gpu("cpu", "CUDA", patch)


@pytest.fixture(params=["stand-in", pytest.param("GPU", marks=pytest.mark.gpu)])
def gpu(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Gpu:
    """A GPU, or the stand-in for one."""
    monkeypatch.setenv("SVOD_OBJECT_CACHE", ":none:")
    torch._dynamo.reset()
    return stand_in(monkeypatch) if request.param == "stand-in" else real(int(request.param == "second GPU"), monkeypatch)


ON_TWO = pytest.mark.parametrize("gpu", ["stand-in", pytest.param("GPU", marks=pytest.mark.gpu),
                                         pytest.param("second GPU", marks=pytest.mark.gpu)], indirect=True)


class Net(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = torch.nn.Linear(18, 13), torch.nn.Linear(13, 7)

    def forward(self, x: Any) -> Any:
        return self.second(self.first(x).relu()).softmax(-1)


@ON_TWO
@pytest.mark.parametrize("way", ["torch.compile", "svod.torch.compile"])
def test_a_module_reads_and_makes_memory_of_the_gpu(gpu: Gpu, way: str) -> None:
    model, x = Net().eval().to(gpu.where), torch.randn(11, 18).to(gpu.where)
    wanted, again = model(x), model(x * 2)
    options = {"strict": True}
    compiled = svod.torch.compile(model, x, options=options) if way != "torch.compile" else \
        torch.compile(model, backend="svod", options=options)
    torch.testing.assert_close(compiled(x), wanted, rtol=1e-4, atol=1e-5)
    gpu.calls.clear()
    with gpu.stream():
        got = compiled(x * 2)
        torch.testing.assert_close(got, again, rtol=1e-4, atol=1e-5)
    assert got.device == x.device and gpu.calls and set(gpu.calls) == {"run"}


def test_weights_that_change_are_seen(gpu: Gpu) -> None:
    model, x = Net().eval().to(gpu.where), torch.randn(3, 18).to(gpu.where)
    compiled = torch.compile(model, backend="svod", options={"strict": True})
    compiled(x)
    model.first.weight.mul_(3)
    torch.testing.assert_close(compiled(x), model(x), rtol=1e-4, atol=1e-5)


def test_layouts_numbers_and_constants(gpu: Gpu) -> None:
    """Arguments with permuted axes and with gaps, a number on the CPU, an output that depends on nothing."""
    def f(a: Any, b: Any, scale: Any) -> Any:
        return (a.T + b) * scale, torch.ones(3, 2, device=a.device), (a * 2).T
    a, b, scale = torch.randn(5, 8).to(gpu.where).T, torch.randn(10, 8).to(gpu.where)[::2], torch.tensor(1.5)
    got, wanted = torch.compile(f, backend="svod", options={"strict": True})(a, b, scale), f(a, b, scale)
    for g, w in zip(got, wanted, strict=True):
        torch.testing.assert_close(g, w)
        assert g.stride() == w.stride()


def test_arguments_are_written_in_place(gpu: Gpu) -> None:
    def step(state: Any, x: Any) -> Any:
        state.mul_(0.5).add_(x)
        return state.sum()
    state, x = torch.zeros(6, 4, device=gpu.where), torch.randn(6, 4).to(gpu.where)
    reference = state.clone()
    run = torch.compile(step, backend="svod", options={"strict": True})
    for _ in range(3):
        torch.testing.assert_close(run(state, x), step(reference, x), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(state, reference)


def test_half_precision(gpu: Gpu) -> None:
    x = torch.randn(4, 9).bfloat16().to(gpu.where)
    got = torch.compile(lambda t: (t * 2).relu(), backend="svod", options={"strict": True})(x)
    assert got.dtype == torch.bfloat16
    np.testing.assert_array_equal(got.float().cpu().numpy(), (x * 2).relu().float().cpu().numpy())


# -- DLPack ----------------------------------------------------------------------------------------------------
@ON_TWO
@pytest.mark.parametrize("own", [False, True], ids=["default stream", "stream of its own"])
def test_pytorch_and_svod_work_in_turns(gpu: Gpu, own: bool) -> None:
    """Each reads a tensor that the other is still writing, and releases it at once: without waiting, the numbers would be wrong."""
    model = Net().eval().to(gpu.where)
    compiled = torch.compile(model, backend="svod", options={"strict": True})
    x, padding = torch.randn(300, 18).to(gpu.where), torch.zeros(300, 11).to(gpu.where)
    first = x
    with gpu.stream() if own else nullcontext():
        for turn in range(30):
            if turn == 2:
                gpu.calls.clear()
            x = torch.cat([compiled(x * 2), padding], 1).roll(1, 1)
    assert set(gpu.calls) == {"run"} or own, gpu.calls
    for _ in range(30):
        first = torch.cat([model(first * 2), padding], 1).roll(1, 1)
    gpu.wait()
    torch.testing.assert_close(x, first, rtol=1e-4, atol=1e-5)


@ON_TWO
def test_svod_reads_and_writes_memory_of_pytorch(gpu: Gpu) -> None:
    """Nothing is copied; earlier work on PyTorch's stream is waited for. svod does not know the stream, so the host waits for the run."""
    first = np.arange(30, dtype=np.float32).reshape(2, 5, 3)
    with gpu.stream():
        theirs = torch.from_numpy(first.copy()).to(gpu.where)
        for _ in range(50):
            theirs += 1
        ours = Tensor.from_dlpack(theirs)
        gpu.calls.clear()
        doubled = (ours * 2).realize()
    assert (ours.device, doubled.device, set(gpu.calls)) == (gpu.svod, gpu.svod, {"run", "wait"})
    np.testing.assert_array_equal(doubled.numpy(), (first + 50) * 2)
    theirs += 1
    gpu.wait()
    np.testing.assert_array_equal((ours * 2).numpy(), (first + 51) * 2)
    ours[0] = 3.0
    ours.realize()
    np.testing.assert_array_equal(theirs.cpu().numpy(), np.concatenate([np.full_like(first[:1], 3), first[1:] + 51]))


@ON_TWO
def test_pytorch_reads_and_writes_memory_of_svod(gpu: Gpu) -> None:
    x = np.arange(24, dtype=np.float32).reshape(4, 6)
    ours = (Tensor(x).to(gpu.svod) * 2).realize()
    gpu.calls.clear()
    theirs = torch.from_dlpack(ours)
    assert not gpu.calls and theirs.device == torch.device(gpu.where) and tuple(theirs.shape) == x.shape
    np.testing.assert_array_equal((theirs + 1).cpu().numpy(), 2 * x + 1)
    theirs[1:] = 5
    gpu.wait()
    np.testing.assert_array_equal(ours.numpy(), np.concatenate([2 * x[:1], np.full_like(x[1:], 5)]))
    np.testing.assert_array_equal((ours.T.contiguous() + 1).numpy(), np.concatenate([2 * x[:1], np.full_like(x[1:], 5)]).T + 1)
    del ours        # the memory lives as long as either tensor
    (Tensor(x).to(gpu.svod) * 7).realize()
    np.testing.assert_array_equal(theirs.cpu().numpy()[0], 2 * x[0])


def test_types_and_layouts_go_both_ways(gpu: Gpu) -> None:
    for dtype, ours in memory.DTYPES.items():
        theirs = torch.tensor([0, 1, 1, 0, 1, 0]).to(dtype).to(gpu.where)
        t = Tensor.from_dlpack(theirs)
        assert t.dtype == ours
        np.testing.assert_array_equal(t.cast("float32").numpy(), [0, 1, 1, 0, 1, 0])
        back = torch.from_dlpack(t.reshape(2, 3).contiguous().realize())
        assert back.dtype == dtype and back.cpu().to(torch.float32).tolist() == [[0, 1, 1], [0, 1, 0]]
    array = np.arange(30, dtype=np.int32).reshape(2, 5, 3)
    theirs = torch.from_numpy(array).to(gpu.where)
    np.testing.assert_array_equal((Tensor.from_dlpack(theirs.permute(2, 0, 1)) + 1).numpy(), array.transpose(2, 0, 1) + 1)
    # its address is no multiple of 16 bytes
    np.testing.assert_array_equal((Tensor.from_dlpack(theirs[1:, 1:2]) + 1).numpy(), array[1:, 1:2] + 1)
    with pytest.raises(DeviceError, match="make it contiguous first"):
        Tensor.from_dlpack(theirs[:, ::2])


def test_tensors_of_two_gpus_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "gpu_of", lambda t: f"CUDA:{len(t)}")
    with pytest.raises(UnsupportedError, match="tensors on CUDA:2 and CUDA:3 in one graph"):
        memory.gpu_among([torch.zeros(2), 3, torch.zeros(3)])


def test_the_device_argument_is_the_option() -> None:
    model, x = Net().eval(), torch.randn(2, 18)
    compiled = svod.torch.compile(model, x, device="CPU:interpreter", options={"strict": True})
    torch.testing.assert_close(compiled(x), model(x), rtol=1e-4, atol=1e-5)
    with pytest.raises(UnsupportedError, match="nowhere"):
        svod.torch.compile(model, x, device="nowhere")
