"""Graphs of PyTorch tensors on CUDA, without a GPU: the stand-in for NVIDIA's driver has the host's memory, so tensors of PyTorch's CPU are
said to be on a GPU, and DLPack says the same of their memory."""
from __future__ import annotations

import ctypes
import sys
import types
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="the package torch is not installed")

import svod.torch  # noqa: E402
from svod import Tensor  # noqa: E402
from svod.compile.backend import BACKENDS  # noqa: E402
from svod.errors import UnsupportedError  # noqa: E402
from svod.tensor import dlpack  # noqa: E402
from svod.torch import memory, watch  # noqa: E402
from tests.compile.cuda.fake_driver import FakeDriver, fake_backend  # noqa: E402


class OnGpu:
    """A tensor whose memory is said to be a GPU's."""

    def __init__(self, t: Any) -> None:
        self.t = t

    def __dlpack_device__(self) -> tuple[int, int]:
        return 2, 0

    def __dlpack__(self, *, stream: Any = None) -> Any:
        t, dtype = self.t, memory.svod_dtype(self.t.dtype)
        return dlpack.capsule_over(dlpack.Shared(t.data_ptr(), dtype, tuple(t.shape), tuple(t.stride()), t), (2, 0))


def over_device_memory(t: Tensor) -> Any:
    """What torch.from_dlpack makes of a tensor on a GPU: here of the host's memory at the address that the capsule says."""
    assert t.__dlpack_device__()[0] == 2
    capsule = t.__dlpack__()
    found = ctypes.cast(dlpack._pointer_of(capsule, b"dltensor"), ctypes.POINTER(dlpack._DLManagedTensor)).contents.tensor
    raw: Any = (ctypes.c_uint8 * t.nbytes).from_address(found.data)
    raw.owner = capsule, dlpack._exported[ctypes.cast(dlpack._pointer_of(capsule, b"dltensor"), ctypes.c_void_p).value or 0]
    return torch.frombuffer(raw, dtype=memory.TORCH_DTYPES[t.dtype]).reshape(t.shape)


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeDriver]:
    driver = FakeDriver()
    module = types.ModuleType("svod_fake_cuda")
    module.BACKEND = fake_backend(driver)       # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, module.__name__, module)
    monkeypatch.setitem(BACKENDS, "CUDA", module.__name__)
    monkeypatch.setenv("SVOD_OBJECT_CACHE", ":none:")
    monkeypatch.setattr("svod.compile.plan.compiler._compilers", {})
    from_dlpack = Tensor.from_dlpack
    on_gpu: Callable[[Any], str] = lambda t: "CUDA:0" if t.ndim else ""        # noqa: E731
    for place in (memory, watch):
        monkeypatch.setattr(place, "gpu_of", on_gpu)
    monkeypatch.setattr(Tensor, "from_dlpack", lambda t: from_dlpack(OnGpu(t) if isinstance(t, torch.Tensor) else t))
    monkeypatch.setattr(torch, "from_dlpack", over_device_memory)
    torch._dynamo.reset()
    yield driver


class Net(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = torch.nn.Linear(18, 13), torch.nn.Linear(13, 7)

    def forward(self, x: Any) -> Any:
        return self.second(self.first(x).relu()).softmax(-1)


@pytest.mark.parametrize("way", ["torch.compile", "svod.torch.compile"])
def test_a_module_reads_and_makes_memory_of_the_gpu(gpu: FakeDriver, way: str) -> None:
    model, x = Net().eval(), torch.randn(11, 18)
    wanted, again = model(x), model(x * 2)
    options = {"strict": True}
    compiled = svod.torch.compile(model, x, options=options) if way != "torch.compile" else \
        torch.compile(model, backend="svod", options=options)
    torch.testing.assert_close(compiled(x), wanted, rtol=1e-4, atol=1e-5)
    before = len(gpu.calls)
    torch.testing.assert_close(compiled(x * 2), again, rtol=1e-4, atol=1e-5)
    assert not {"copy_in", "copy_out"} & set(gpu.names()[before:]) and "launch" in " ".join(gpu.names()[before:])


def test_weights_that_change_are_seen(gpu: FakeDriver) -> None:
    model, x = Net().eval(), torch.randn(3, 18)
    compiled = torch.compile(model, backend="svod", options={"strict": True})
    compiled(x)
    model.first.weight.mul_(3)
    torch.testing.assert_close(compiled(x), model(x), rtol=1e-4, atol=1e-5)


def test_layouts_numbers_and_constants(gpu: FakeDriver) -> None:
    """Arguments with permuted axes and with gaps, a number on the CPU, an output that depends on nothing."""
    def f(a: Any, b: Any, scale: Any) -> Any:
        return (a.T + b) * scale, torch.ones(3, 2), (a * 2).T
    a, b, scale = torch.randn(5, 8).T, torch.randn(10, 8)[::2], torch.tensor(1.5)
    got, wanted = torch.compile(f, backend="svod", options={"strict": True})(a, b, scale), f(a, b, scale)
    for g, w in zip(got, wanted, strict=True):
        torch.testing.assert_close(g, w)
        assert g.stride() == w.stride()


def test_arguments_are_written_in_place(gpu: FakeDriver) -> None:
    def step(state: Any, x: Any) -> Any:
        state.mul_(0.5).add_(x)
        return state.sum()
    state, x = torch.zeros(6, 4), torch.randn(6, 4)
    reference = state.clone()
    run = torch.compile(step, backend="svod", options={"strict": True})
    for _ in range(3):
        torch.testing.assert_close(run(state, x), step(reference, x), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(state, reference)


def test_half_precision(gpu: FakeDriver) -> None:
    x = torch.randn(4, 9).bfloat16()
    got = torch.compile(lambda t: (t * 2).relu(), backend="svod", options={"strict": True})(x)
    assert got.dtype == torch.bfloat16
    np.testing.assert_array_equal(got.float().numpy(), (x * 2).relu().float().numpy())


def test_tensors_of_two_gpus_are_refused(gpu: FakeDriver, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "gpu_of", lambda t: f"CUDA:{len(t)}")
    with pytest.raises(UnsupportedError, match="tensors on CUDA:2 and CUDA:3 in one graph"):
        memory.gpu_among([torch.zeros(2), 3, torch.zeros(3)])


def test_the_device_argument_is_the_option() -> None:
    model, x = Net().eval(), torch.randn(2, 18)
    compiled = svod.torch.compile(model, x, device="CPU:interpreter", options={"strict": True})
    torch.testing.assert_close(compiled(x), model(x), rtol=1e-4, atol=1e-5)
    with pytest.raises(UnsupportedError, match="nowhere"):
        svod.torch.compile(model, x, device="nowhere")
