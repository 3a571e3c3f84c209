"""Several adapters: their order and names, and two of them in use in one process. If the machine has only one, the second is another wgpu
device on it, with separate buffers, pipelines and queue."""
from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import svod
from svod import Tensor
from svod.compile.backend import backend_named, device_named, target_with
from svod.compile.webgpu import adapter
from svod.compile.webgpu.backend import BACKEND, WebGpu
from svod.config import PrepareConfig
from svod.core.machine.target import Target
from svod.errors import DeviceError, LaunchError, UnsupportedError

RNG = np.random.default_rng(0)
A, B = (RNG.standard_normal(shape).astype(np.float32) for shape in ((5, 7), (7, 3)))


def card(name: str, backend: str, kind: str, vendor: int = 0, device: int = 0) -> Any:
    return SimpleNamespace(info={"device": name, "vendor": "", "backend_type": backend, "adapter_type": kind, "vendor_id": vendor,
                                 "device_id": device})


RADEON, ARC = ("Radeon RX 7600", "DiscreteGPU", 0x1002, 0x7480), ("Arc A380", "DiscreteGPU", 0x8086, 0x56a5)
INSIDE, MESA = ("Iris Xe", "IntegratedGPU", 0x8086, 0x9a49), ("llvmpipe (LLVM 15.0.6, 256 bits)", "CPU", 0x10005, 0)


def by(backend: str, which: tuple[str, str, int, int]) -> Any:
    name, kind, vendor, device = which
    return card(name, backend, kind, vendor, 0 if backend == "OpenGL" else device)


@pytest.mark.parametrize("found, order", [
    ([by("Vulkan", MESA), by("Vulkan", INSIDE), by("Vulkan", ARC), by("Vulkan", ARC), by("Vulkan", RADEON)], [2, 3, 4, 1, 0]),
    ([by("D3D12", ARC), by("Vulkan", ARC), by("D3D12", INSIDE), by("Vulkan", INSIDE)], [1, 3, 0, 2]),
    ([by("OpenGL", RADEON), by("Vulkan", MESA)], [0, 1]),
    ([by("OpenGL", MESA), by("Vulkan", MESA)], [1, 0]),
    ([card("a browser's", "WebGPU", "DiscreteGPU")], []),
    ([], []),
])
def test_cards_stand_before_software_and_each_once_before_all_other_ways_to_it(found: list[Any], order: list[int]) -> None:
    assert adapter.in_order(found) == [found[n] for n in order]


def test_equal_adapters_share_and_other_interfaces_do_not() -> None:
    assert [adapter.adapter_name(by(b, MESA).info) for b in ("Vulkan", "OpenGL")] == ["llvmpipe", "llvmpipe-opengl"]
    assert [adapter.adapter_name(by(b, RADEON).info) for b in ("Vulkan", "Metal", "D3D12")] == [
        "radeon-rx-7600", "radeon-rx-7600", "radeon-rx-7600-d3d12"]


def test_an_adapter_that_there_is_not(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(adapter, "_adapters", lambda process: [by("Vulkan", ARC), by("OpenGL", MESA)])
    with pytest.raises(DeviceError) as raised:
        Tensor(A).to("WEBGPU:2").realize()
    assert str(raised.value) == ("there is no adapter WEBGPU:2: WEBGPU is Arc A380 (Vulkan, DiscreteGPU); "
                                 "WEBGPU:1 is llvmpipe (LLVM 15.0.6, 256 bits) (OpenGL, CPU)")


def test_names() -> None:
    assert device_named("webgpu:0") == device_named("WEBGPU:wgsl") == device_named("WEBGPU")
    second = device_named("webgpu:1:wgsl")
    assert second == device_named("WEBGPU:1") and second.backend.label == "WEBGPU:1"
    assert second.pair is second.backend.compilers[0] and second.pair is not device_named("WEBGPU").pair, "code is loaded on its device"
    with pytest.raises(UnsupportedError, match="use WEBGPU, WEBGPU:1, … for the adapters"):
        device_named("WEBGPU:first")


@pytest.fixture
def second(webgpu: Target, monkeypatch: pytest.MonkeyPatch) -> Iterator[WebGpu]:
    """The device WEBGPU:1: the machine's second adapter, or another wgpu device on the first."""
    found = adapter.adapters()
    with monkeypatch.context() as patch:
        patch.setattr(adapter, "_adapters", lambda process: found if len(found) > 1 else [*found, *found])
        patch.setattr(BACKEND, "_others", {})
        patch.setattr("svod.compile.plan.compiler._compilers", {})
        backend = backend_named("WEBGPU:1")
        assert isinstance(backend, WebGpu)
        yield backend
    adapter._target.cache_clear()


@pytest.mark.slow
def test_two_at_once(second: WebGpu) -> None:
    """Two devices have separate memory, pipelines and queues. Values are copied from one to the other; an operation on values of both is an
    error."""
    x, w = Tensor(A).to("WEBGPU").realize(), Tensor(B).to("WEBGPU:1").realize()
    assert (x.device, w.device) == ("WEBGPU", "WEBGPU:1") and BACKEND.gpu.wgpu is not second.gpu.wgpu
    with pytest.raises(DeviceError, match=r"values on WEBGPU and on WEBGPU:1: .*\.to\('WEBGPU'\) or \.to\('WEBGPU:1'\)"):
        x @ w
    there = (x.to("WEBGPU:1") @ w).softmax(-1).realize()
    here = (x @ w.to("WEBGPU")).softmax(-1)
    expected = np.exp(A @ B) / np.exp(A @ B).sum(-1, keepdims=True)
    for y, device in ((there, "WEBGPU:1"), (here, "WEBGPU")):
        assert y.device == device
        np.testing.assert_allclose(y.numpy(), expected, rtol=1e-4, atol=1e-5)


def test_one_plan_on_two(second: WebGpu) -> None:
    f = svod.jit(lambda a: ((a.to("WEBGPU") * 2).to("WEBGPU:1") @ Tensor(B).to("WEBGPU:1")).to("CPU"))
    for a in (A, -A):
        np.testing.assert_allclose(f(a).numpy(), 2 * a @ B, rtol=1e-4, atol=1e-5)
    plan = (Tensor(A) @ Tensor(B)).prepare(PrepareConfig(device="WEBGPU:1", db=":none:"))
    plan.execute()
    np.testing.assert_allclose(plan.outputs[0].reshape(5, 3), A @ B, rtol=1e-4, atol=1e-5)
    assert {k.device or plan.device for k in plan.kernels} == {"WEBGPU:1"}


def test_a_lost_device_is_not_the_others_loss(second: WebGpu) -> None:
    here, there = (Tensor(A).to(name).realize() for name in ("WEBGPU", "WEBGPU:1"))
    two = (there * 2).realize()
    second.gpu.wgpu.destroy()
    with pytest.raises(LaunchError, match=r"WEBGPU:1 failed while .*lost"):
        two.numpy()
    with pytest.raises(LaunchError, match="values on WEBGPU:1 are gone"):
        two.numpy()
    np.testing.assert_array_equal((here + 1).numpy(), A + 1)
    np.testing.assert_array_equal((Tensor(A).to("WEBGPU:1") + 1).numpy(), A + 1)


def test_a_key_finds_the_device_that_it_is_of(second: WebGpu) -> None:
    """Equal adapters have the same key, and the device found for that key is the first of them."""
    assert BACKEND.count() > 1
    for name in ("WEBGPU", "WEBGPU:1"):
        target = backend_named(name).target()
        assert target.device == name
        found = target_with(target.key)
        assert found is not None and found.key == target.key
        assert found.device == ("WEBGPU" if target.key == backend_named("WEBGPU").target().key else name)
    assert target_with("wgsl/none/device=WEBGPU,groups=7,shared=1k/l1 16k/l2 1m/l3 0k/t1") is None
