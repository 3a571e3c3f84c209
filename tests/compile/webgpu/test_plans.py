"""Plans on the adapter: weights packed once, inputs bound later, arguments at odd places."""
from __future__ import annotations

import os
import re
import signal

import numpy as np
import pytest

import svod
from svod import Tensor
from svod.compile.webgpu.backend import BACKEND
from svod.compile.webgpu.device import GpuMemory
from svod.compile.webgpu.queue import PassClock
from svod.config import PrepareConfig
from svod.core.graph import graph
from svod.core.graph.buffer import Array, buffer_of
from svod.core.machine.target import Target
from svod.errors import DeviceError, LaunchError
from tests.bench.example_run import CEILINGS

CONFIG = PrepareConfig(device="WEBGPU", db=":none:")
RNG = np.random.default_rng(0)
X = RNG.standard_normal((1, 16, 14, 14)).astype(np.float32)
W = (RNG.standard_normal((32, 16, 3, 3)) / 12).astype(np.float32)


def convolution(x: Array, w: Array) -> Array:
    windows = np.lib.stride_tricks.sliding_window_view(np.pad(x, ((0, 0), (0, 0), (1, 1), (1, 1))), (3, 3), axis=(2, 3))
    return np.einsum("nchwij,ocij->nohw", windows, w)


def test_weights_are_packed_before_there_are_inputs(webgpu: Target) -> None:
    config = PrepareConfig(device="WEBGPU", db=":none:", opts={"": (("STAGE", "s0", "root"), ("LOCAL", "o0", 8))})
    f = svod.jit(lambda x: x.conv2d(Tensor(W), padding=1), config=config)
    for x in (X, X[:, :, ::-1].copy()):
        np.testing.assert_allclose(np.asarray(f(x)), convolution(x, W), rtol=1e-4, atol=1e-5)
    assert [p.once for p in f.plans[0].kernels[0].spec.phases] == [True, False]
    needs, = f.plans[0].analyze().kernels[0].resources
    assert (needs.threads, needs.shared, needs.registers, needs.occupancy) == (8, 0, None, None)


def test_what_a_block_has_read_is_not_read_again(webgpu: Target) -> None:
    """Four positions of the sum come as one vector of the left operand, and no place is read twice in a block."""
    a, b = (RNG.standard_normal(shape).astype(np.float32) for shape in ((24, 32), (32, 16)))
    k = svod.kernel(Tensor(a) @ Tensor(b), config=CONFIG).apply("UPCAST(o0, 4) UPCAST(o1, 4) LANES(o1.in) LOCAL(o0, 6) UNROLL(r0, 4)")
    wgsl = k.llvm(True)
    assert all(f"var<storage, read_write> arg{n}: array<vec4<f32>>" in wgsl for n in (1, 2))
    body = wgsl[wgsl.rindex("for ("):]
    reads = re.findall(r"= (arg[12]\[[^]]*\]);", body)
    assert len(reads) == len(set(reads)) == 4 + 4
    assert k.check()


def test_arguments_that_begin_anywhere(webgpu: Target) -> None:
    """Views into one array: the other form of a module reads element by element."""
    memory = RNG.standard_normal(1 + 24 * 32).astype(np.float32)
    a, b = memory[1:].reshape(24, 32), RNG.standard_normal((32, 16)).astype(np.float32)
    np.testing.assert_allclose((Tensor(a) @ Tensor(b)).realize(CONFIG).numpy(), a @ b, rtol=1e-4, atol=1e-5)
    padded = Tensor(memory)[1:23].reshape(11, 2)[:, :1].pad(((0, 0), (0, 1)), value=1)
    np.testing.assert_allclose(padded.sin().realize(CONFIG).numpy(), np.sin([[x, 1] for x in memory[1:23:2]]), rtol=1e-5)


def test_results_stay_on_the_adapter(webgpu: Target) -> None:
    """Copies to and from it, state that is assigned to, and a plan that goes on on the CPU."""
    a, b = (RNG.standard_normal(shape).astype(np.float32) for shape in ((24, 31), (31, 17)))
    x, w = Tensor(a).to("webgpu").realize(), Tensor(b).to("WEBGPU")
    y = (x @ w).realize()
    assert y.device == "WEBGPU" and buffer_of(graph.base_of(y.uop)).host is None
    state = Tensor(np.zeros(17, np.float32)).to("WEBGPU").realize()
    step = svod.jit(lambda v: state.assign(state * 0.5 + v.sum(0)))
    for _ in range(3):
        step(y)
    f = svod.jit(lambda v: (v.to("WEBGPU") @ w).relu().to("CPU") + 1)
    np.testing.assert_allclose(y.numpy(), a @ b, rtol=1e-4, atol=1e-4)
    np.testing.assert_allclose(state.numpy(), 1.75 * (a @ b).sum(0), rtol=1e-4, atol=1e-3)
    for given in (a, -a):
        np.testing.assert_allclose(f(given).numpy(), np.maximum(given @ b, 0) + 1, rtol=1e-4, atol=1e-4)


def test_profiles_are_of_the_adapters_clock(webgpu: Target, monkeypatch: pytest.MonkeyPatch) -> None:
    """Timestamps around each pass; an empty call has none."""
    plan = (Tensor(X[0, 0]) @ Tensor(X[0, 1])).softmax(-1).prepare(CONFIG)
    if not BACKEND.gpu.has_timestamps:
        pytest.skip("the adapter has no timestamp queries")
    assert all(0 < seconds < 60 for seconds in plan.profile(1))
    monkeypatch.setattr(PassClock, "seconds", lambda self: 0.125 * self.passes)
    assert plan.profile(1) == [k.seconds for k in svod.profile(plan, seconds=0.0, ceilings=CEILINGS).kernels] == [0.125] * len(plan.kernels)


def test_odd_sizes_and_types_are_copied(webgpu: Target) -> None:
    for values in (np.arange(7, dtype=np.int8), np.array([True, False, True]), np.float16([1.5]), np.arange(5, dtype=np.uint16)):
        there = Tensor(values).to("WEBGPU").realize()
        np.testing.assert_array_equal(there.numpy(), values)
        np.testing.assert_array_equal(there.flip(0).to("CPU").numpy(), values[::-1])


def test_a_device_that_is_lost(webgpu: Target, caplog: pytest.LogCaptureFixture) -> None:
    """What lay on it alone is gone, and says so. All else is computed on the next one, which takes no address of the old one for its."""
    a = RNG.standard_normal((3, 4)).astype(np.float32)
    x = Tensor(a)
    there, kept = (x.to("WEBGPU") * 2).realize(), x.to("WEBGPU")
    f = svod.jit(lambda v: (v.to("WEBGPU") @ Tensor(a.T).to("WEBGPU")).to("CPU"))
    plan = (there + 1).prepare(CONFIG)
    for run in (plan.execute, lambda: (kept + 1).numpy(), lambda: f(a)):
        run()
    lost = BACKEND.gpu
    lost.wgpu.destroy()
    with pytest.raises(LaunchError, match=r"WEBGPU failed while .* ran: .*lost.*; prepare the plan again"):
        plan.execute()
    np.testing.assert_array_equal((kept + 1).numpy(), a + 1)
    assert BACKEND.gpu is not lost and BACKEND.gpu.first > lost.next - 1
    for gone in (there.numpy, lambda: (there + 1).numpy(), plan.execute):
        with pytest.raises(LaunchError, match="gone"):
            gone()
    with pytest.raises(LaunchError, match="gone"):
        f(a)
    np.testing.assert_allclose(f(a).numpy(), a @ a.T, rtol=1e-5)
    np.testing.assert_array_equal((Tensor(a) + 2).realize(CONFIG).numpy(), a + 2)


def test_memory_comes_back_inside_a_collection(webgpu: Target) -> None:
    """The collector runs also in the thread that asks for memory: it is given back later."""
    made = BACKEND.gpu
    memory = [GpuMemory(made, 100)]
    address = memory[0].address
    with made._table:
        memory.clear()
    again = GpuMemory(made, 100)
    with pytest.raises(LaunchError, match="is no memory"):
        made.find(address)
    assert made.find(again.address)[1:] == (0, 112)


@pytest.mark.filterwarnings("ignore:.*multi-threaded, use of fork:DeprecationWarning")
def test_a_fork_of_a_process_that_used_it(webgpu: Target) -> None:
    """Drivers wait there for threads that are gone."""
    there = (Tensor(np.ones(4, np.float32)).to("WEBGPU") + 1).realize()
    child = os.fork()
    if not child:
        signal.alarm(60)
        said = []
        for compute in (there.numpy, (there + 1).realize, (Tensor(np.ones(3, np.float32)).to("WEBGPU") * 2).realize):
            try:
                compute()
            except DeviceError as error:
                said.append("before this process was forked" in str(error))
        os._exit(0 if said == [True] * 3 else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    np.testing.assert_array_equal(there.numpy(), np.full(4, 2, np.float32))
