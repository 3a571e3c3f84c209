"""Plans on the adapter: weights packed once, inputs bound later, arguments at unaligned addresses."""
from __future__ import annotations

import os
import re
import signal
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import svod
from svod import Tensor
from svod.compile.backend import COLD_RUNS, backend_named
from svod.compile.webgpu.backend import BACKEND
from svod.compile.webgpu.device import MOST_BEGUN, GpuMemory, WebGpuDevice
from svod.compile.webgpu.queue import PassClock, WebGpuQueue
from svod.config import PrepareConfig
from svod.core.graph.buffer import Array, buffer_of
from svod.core.graph.storage import base_of
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


@pytest.mark.slow
def test_weights_are_packed_before_there_are_inputs(webgpu: Target) -> None:
    config = PrepareConfig(device="WEBGPU", db=":none:", opts={"": (("STAGE", "s0", "root"), ("LOCAL", "o0", 8))})
    f = svod.jit(lambda x: x.conv2d(Tensor(W), padding=1), config=config)
    for x in (X, X[:, :, ::-1].copy()):
        np.testing.assert_allclose(np.asarray(f(x)), convolution(x, W), rtol=1e-4, atol=1e-5)
    assert [p.once for p in f.plans[0].kernels[0].spec.phases] == [True, False]
    needs, = f.plans[0].analyze().kernels[0].resources
    assert (needs.threads, needs.shared, needs.registers, needs.occupancy) == (8, 0, None, None)


def test_what_a_block_has_read_is_not_read_again(webgpu: Target) -> None:
    """Four positions of the sum are read as one vector of the left operand, and no element is read twice in a block of code."""
    a, b = (RNG.standard_normal(shape).astype(np.float32) for shape in ((24, 32), (32, 16)))
    k = svod.kernel(Tensor(a) @ Tensor(b), config=CONFIG).apply("UPCAST(o0, 4) UPCAST(o1, 4) LANES(o1.in) LOCAL(o0, 6) UNROLL(r0, 4)")
    wgsl = k.llvm()
    assert all(f"var<storage, read_write> arg{n}: array<vec4<f32>>" in wgsl for n in (1, 2))
    body = wgsl[wgsl.rindex("for ("):]
    reads = re.findall(r"= (arg[12]\[[^]]*\]);", body)
    assert len(reads) == len(set(reads)) == 4 + 4
    assert k.check()


def test_arguments_that_begin_anywhere(webgpu: Target) -> None:
    """For arguments that are unaligned views of one array, the second form of a module reads element by element."""
    memory = RNG.standard_normal(1 + 24 * 32).astype(np.float32)
    a, b = memory[1:].reshape(24, 32), RNG.standard_normal((32, 16)).astype(np.float32)
    np.testing.assert_allclose((Tensor(a) @ Tensor(b)).realize(CONFIG).numpy(), a @ b, rtol=1e-4, atol=1e-5)
    padded = Tensor(memory)[1:23].reshape(11, 2)[:, :1].pad(((0, 0), (0, 1)), value=1)
    np.testing.assert_allclose(padded.sin().realize(CONFIG).numpy(), np.sin([[x, 1] for x in memory[1:23:2]]), rtol=1e-5)


def test_results_stay_on_the_adapter(webgpu: Target) -> None:
    """Results stay on the adapter: tests copies to and from it, a state that is assigned to, and a plan that continues on the CPU."""
    a, b = (RNG.standard_normal(shape).astype(np.float32) for shape in ((24, 31), (31, 17)))
    x, w = Tensor(a).to("webgpu").realize(), Tensor(b).to("WEBGPU")
    y = (x @ w).realize()
    assert y.device == "WEBGPU" and buffer_of(base_of(y.uop)).host is None
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
    """Profiles use the timestamps around each pass; an empty call has no passes and no time."""
    plan = (Tensor(X[0, 0]) @ Tensor(X[0, 1])).softmax(-1).prepare(CONFIG)
    if not BACKEND.gpu.has_timestamps:
        pytest.skip("the adapter has no timestamp queries")
    assert all(0 < seconds < 60 for seconds in plan.profile(1))
    monkeypatch.setattr(PassClock, "seconds", lambda self: 0.125 * self.passes)
    assert plan.profile(1) == [k.seconds for k in svod.profile(plan, seconds=0.0, ceilings=CEILINGS).kernels] == [0.125] * len(plan.kernels)


class Recorded:
    """A wrapper of a wgpu object that records its calls, the calls of objects that it makes, and readings of the clock."""

    def __init__(self, real: Any, calls: list[Any]) -> None:
        self.real, self.calls = real, calls

    def __getattr__(self, name: str) -> Any:
        def call(*args: Any, **more: Any) -> Any:
            self.calls.append((name, *(a.size if hasattr(a, "size") else a for a in args), *more))
            made = getattr(self.real, name)(*args, **more)
            return Recorded(made, self.calls) if name in ("create_command_encoder", "begin_compute_pass") else made
        return call


@pytest.fixture
def calls(webgpu: Target, monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Record the calls of encoders and passes, and readings of the host's clock."""
    made: list[Any] = []

    def clock() -> float:
        made.append(("clock",))
        return 0.25 * len(made)
    real = Recorded(SimpleNamespace(create_command_encoder=BACKEND.gpu.wgpu.create_command_encoder), made)
    monkeypatch.setattr(BACKEND.gpu.wgpu, "create_command_encoder", real.create_command_encoder)
    monkeypatch.setattr("svod.compile.webgpu.queue.time", SimpleNamespace(perf_counter=clock))
    return made


IN_ORDER = ("clear_buffer", "begin_compute_pass", "dispatch_workgroups", "end", "clock")


@pytest.mark.parametrize("runs", [1, 3, 40 * COLD_RUNS])
def test_each_run_of_a_sample_begins_with_a_cache_that_was_filled(calls: list[Any], runs: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Before each timed pass, twice the size of the L2 cache is written. The pass waits for that, because one word of it is copied into the
    buffer of the launch's numbers. Of many runs only the first ones are timed."""
    if not BACKEND.gpu.has_timestamps:
        pytest.skip("the adapter has no timestamp queries")
    plan = (Tensor(X[0, 0]) * 2).prepare(CONFIG)
    plan.execute()
    calls.clear()
    monkeypatch.setattr(PassClock, "seconds", lambda self: 0.125 * self.passes)
    assert plan.repeat_timed(runs, cold=True) == 0.125 * runs
    found = [c for c in calls if c[0] in IN_ORDER]
    size = 2 * backend_named("WEBGPU").target().l2
    assert [c[0] for c in found] == [*IN_ORDER[:4]] * min(runs, COLD_RUNS) and {c for c in found if c[0] == "clear_buffer"} == {
        ("clear_buffer", size)}
    assert {c for c in found if c[0] == "begin_compute_pass"} == {("begin_compute_pass", "timestamp_writes")}
    copies = {c for c in calls if c[0] == "copy_buffer_to_buffer"}
    queue = plan._devices.queue
    assert isinstance(queue, WebGpuQueue) and copies == {("copy_buffer_to_buffer", size, 0, queue._uniforms.size, queue._end, 16)}
    plan.execute()
    np.testing.assert_array_equal(plan.outputs[0].reshape(14, 14), X[0, 0] * 2)


@pytest.mark.parametrize("has_clock", [True, False])
def test_a_device_that_does_not_count(calls: list[Any], has_clock: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a device without timestamps the host's clock starts after the cache was filled. For warm caches nothing is filled."""
    monkeypatch.setattr(BACKEND.gpu, "has_timestamps", has_clock and BACKEND.gpu.has_timestamps)
    monkeypatch.setattr(PassClock, "seconds", lambda self: None)
    plan = (Tensor(X[0, 0]) * 2).prepare(CONFIG)
    plan.execute()
    calls.clear()
    seconds = plan.repeat_timed(3, cold=True)
    found = [c[0] for c in calls if c[0] in IN_ORDER]
    assert found[-8:] == ["clear_buffer", "clock", "begin_compute_pass", *["dispatch_workgroups"] * 3, "end", "clock"]
    begin, end = [n for n, c in enumerate(calls) if c == ("clock",)]
    assert seconds == 0.25 * (end - begin) and calls[begin - 1][0] == "finish"
    calls.clear()
    assert plan.repeat_timed(3) is None
    assert not {"clear_buffer", "clock"} & {c[0] for c in calls}


def test_odd_sizes_and_types_are_copied(webgpu: Target) -> None:
    for values in (np.arange(7, dtype=np.int8), np.array([True, False, True]), np.float16([1.5]), np.arange(5, dtype=np.uint16)):
        there = Tensor(values).to("WEBGPU").realize()
        np.testing.assert_array_equal(there.numpy(), values)
        np.testing.assert_array_equal(there.flip(0).to("CPU").numpy(), values[::-1])


@pytest.mark.parametrize("n", [1, 7, 64])
def test_copies_on_the_adapter(webgpu: Target, n: int) -> None:
    """Copies of complete words are done on the adapter, others through the host."""
    for dtype in (np.float32, np.int8):
        x = np.arange(n).astype(dtype)
        plan = (Tensor(x).to("WEBGPU") + Tensor(x[::-1].copy()).to("WEBGPU")).prepare(CONFIG)
        plan.execute()
        np.testing.assert_array_equal(plan.outputs[0], x + x[::-1])


def test_a_device_that_is_lost(webgpu: Target, caplog: pytest.LogCaptureFixture) -> None:
    """If a device is lost, only values in its memory are lost, and using them is an error. Everything else is computed on the next device,
    which reuses no address."""
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


def test_calls_return_before_the_adapter_is_done(webgpu: Target, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each result is the input of the next call, and arrays may be changed when the call returns. Only reading a result waits, or having
    many unfinished submissions."""
    waits: list[str] = []
    for name in ("wait", "_read_part"):
        real = getattr(WebGpuDevice, name)

        def noted(made: WebGpuDevice, *args: Any, name: str = name, real: Any = real) -> None:
            waits.append(name)
            real(made, *args)
        monkeypatch.setattr(WebGpuDevice, name, noted)
    a = RNG.standard_normal((8, 8)).astype(np.float32)
    given = a.copy()
    w = Tensor(a / 4).to("WEBGPU").realize()
    f = svod.jit(lambda x: (x.to("WEBGPU") @ w).relu() + 1)
    for _ in range(2):
        want, y = a, f(given)
        given[:] = np.nan
        waits.clear()
        for turn in range(5):
            want = np.maximum(want @ (a / 4), 0) + 1
            y = f(y) if turn else y
        assert waits == []
        np.testing.assert_allclose(y.numpy(), want, rtol=1e-3)
        assert waits == ["_read_part"]
        given[:] = a
    plan = (Tensor(a) * 2).prepare(CONFIG)
    waits.clear()
    for _ in range(2 * MOST_BEGUN + 3):
        plan.execute()
    assert waits == ["wait"] * 2
    plan.wait()
    assert waits == ["wait"] * 3
    np.testing.assert_array_equal(plan.outputs[0].reshape(8, 8), 2 * a)


def test_an_error_names_the_kernels_that_were_begun(webgpu: Target) -> None:
    there = Tensor(np.ones((3, 4), np.float32)).to("WEBGPU").realize()
    first, second = (there * 2).prepare(CONFIG), (there @ Tensor(np.ones((4, 5), np.float32)).to("WEBGPU")).prepare(CONFIG)
    for plan in (first, second):
        plan.execute()
    BACKEND.gpu.wgpu.destroy()
    said = r"WEBGPU failed while values were copied from it, after elementwise_\d+, gemm_\d+ had begun: .*lost"
    with pytest.raises(LaunchError, match=said):
        second.output_buffer()


def test_memory_comes_back_inside_a_collection(webgpu: Target) -> None:
    """The garbage collector may return memory while the same thread allocates; the memory is freed later then."""
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
    """In a fork of a process that used the device svod raises an error: drivers would wait for threads that do not exist there."""
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
