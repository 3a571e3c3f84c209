"""Plans on CUDA: compiled without a device, and run with `FakeDriver`, which executes kernels on the CPU and records all calls."""
from __future__ import annotations

import ctypes
import gc
import io
import json
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import svod
from svod import Tensor, Variable
from svod.bench.timer import take_sample
from svod.compile.backend import COLD_RUNS, backend_named, device_named
from svod.compile.cuda import driver as driver_module
from svod.compile.cuda import ptxas
from svod.compile.cuda.code import CudaCode, Nvptx
from svod.compile.cuda.device import DeviceMemory
from svod.compile.cuda.queue import CudaQueue, NoDeviceQueue
from svod.compile.cuda.targets import ARCHITECTURES, architecture_of
from svod.compile.lower.lower import lower
from svod.compile.lower.program import PhaseSpec, ProgramSpec
from svod.compile.plan.execution_plan import ExecutionPlan
from svod.compile.plan.plan_parts import PreparedKernel
from svod.compile.plan.run_log import RunLog
from svod.compile.resources import PhaseResources, resources_of
from svod.config import PrepareConfig
from svod.core.graph.buffer import Array
from svod.core.ir.dtype import dtypes
from svod.core.ir.serialize import ast_to_data
from svod.core.kernel.apply import apply_opts
from svod.core.kernel.chain_text import parse_chain
from svod.core.kernel.scheduler import Opt, Scheduler
from svod.errors import CompileError, DeviceError, DeviceLost, LaunchError, UnsupportedError
from svod.tune.measure.context import KernelContext, Setup
from svod.tune.measure.work import compile_candidate
from tests.bench.example_run import CEILINGS
from tests.chain_runs import case_of
from tests.compile.cuda.fake_driver import FakeDriver, stand_in
from tests.draws import a_half
from tests.patience import NEVER

RNG = np.random.default_rng(0)
X, W, V = (RNG.standard_normal(shape).astype(np.float32) for shape in ((11, 18), (18, 13), (13, 7)))
CONFIG = PrepareConfig(device="CUDA", object_cache=":none:", db=":none:")
ONLY = replace(CONFIG, device="CUDA:sm_90")


def softmax(x: Array) -> Array:
    e: Array = np.exp(x - x.max(-1, keepdims=True))
    rows: Array = e / e.sum(-1, keepdims=True)
    return rows


def network() -> Tensor:
    return ((Tensor(X) @ Tensor(W)).relu() @ Tensor(V)).softmax(-1)


EXPECTED = softmax(np.maximum(X @ W, 0) @ V)


# -- without a device --------------------------------------------------------------------------------------
def test_the_ir_after_llvms_passes() -> None:
    k = svod.kernel(Tensor(X) @ Tensor(W), config=ONLY).heuristic()
    before, after = k.llvm(), k.llvm(optimized=True)
    assert "define" in before and "define" in after and before != after


def test_a_plan_is_compiled_where_there_is_no_device() -> None:
    plan = network().prepare(ONLY)
    assert isinstance(plan._devices.queue, NoDeviceQueue)
    code = plan.kernels[0].loaded
    assert isinstance(code, CudaCode) and code.arch == "sm_90"
    if ptxas.ptxas_version() is not None:
        assert code.kind == "cubin" and code.image[:4] == b"\x7fELF" and all(r.registers > 0 for r in code.reports)
    there = Tensor(X).to("CUDA:sm_90")
    k = svod.kernel((there @ W).relu())
    assert k.state.target.cpu == "sm_90", "the device of the tensor"
    for asked in (plan.execute, there.numpy, k.time, k.check, lambda: k.search(2, 1.0)):
        with pytest.raises(DeviceError, match=r"compiles for CUDA:sm_90, which is no device.*SVOD_DEVICE=CUDA"):
            asked()


def test_what_is_compiled_for_is_another_target_than_a_device() -> None:
    keys = {backend_named(f"CUDA:{arch}").target().key for arch in ARCHITECTURES}
    assert len(keys) == len(ARCHITECTURES) and all("device=CUDA:sm_" in key for key in keys)


def test_a_kernel_shows_its_ptx() -> None:
    kernel = svod.kernel(Tensor(X) + 1, config=replace(CONFIG, device="CUDA:sm_80"))
    assert ".target sm_80" in kernel.asm() and ".entry svod_p0" in kernel.asm()
    assert "ptx_kernel" in kernel.llvm()


def by_nvidia(threads: int, registers: int, shared: int) -> int:
    """Return the number of blocks that an SM of an H100 runs at a time, by the rules of NVIDIA's occupancy calculator: registers are
    allocated to warps in units of 256, from one of four partitions; shared memory is allocated to blocks in units of 128 bytes, plus 1
    KB."""
    warps = -(-threads // 32)
    of_registers = 4 * (16384 // (-(-registers * 32 // 256) * 256)) // warps
    of_shared = (228 << 10) // (-(-(shared + 1024) // 128) * 128)
    return min(32, 64 // warps, of_registers, of_shared)


def test_an_analysis_says_what_groups_need() -> None:
    """The analysis reports the resources of the groups of a product and of a softmax, which reduces through shared memory."""
    a = Tensor(RNG.standard_normal((96, 64)).astype(np.float32))
    w = Tensor(RNG.standard_normal((64, 2000)).astype(np.float32))
    found = ((a @ w).softmax(-1) + 1).prepare(ONLY).analyze()
    tiles = svod.kernel(a @ w, config=ONLY)
    assert [k.name.split("_")[0] for k in found.kernels] == ["gemm", "softmax"]
    phases = [*(p for k in found.kernels for p in k.resources or ()), *tiles.heuristic().resources()]
    assert len(phases) == 3 and any(p.shared for p in phases) and all(p.threads > 1 for p in phases)
    as_data = json.loads(json.dumps(found.to_json()))["kernels"][1]["resources"]
    assert [PhaseResources(**p) for p in as_data] == list(found.kernels[1].resources or ())
    table = [line for line in str(found).split("\n") if line.startswith(("groups", "1 softmax"))]
    assert table[1].split() == ["groups", "threads", "registers", "shared", "spilled", "of", "a", "unit", "occupancy"]
    if ptxas.ptxas_version() is None:
        assert all(p.registers is p.occupancy is None for p in phases) and table[2].endswith("–")
        pytest.skip("there is no ptxas on PATH: the CUDA toolkit has it")
    for p in phases:
        assert p.registers and p.resident == by_nvidia(p.threads, p.registers, p.shared) and p.spill_stores == p.stack == 0
        assert p.occupancy == p.resident * -(-p.threads // 32) / 64
    assert table[2].endswith(f"{100 * (phases[1].occupancy or 0):.0f} %")


def test_shared_memory_that_a_launch_asks_for_counts() -> None:
    """64 KB of dynamic shared memory, which ptxas does not report, limit a unit of 228 KB to three groups."""
    phase = PhaseSpec("svod_p0", 8, 1, 0, block=128, shared_bytes=64 << 10)
    found = resources_of(backend_named("CUDA:sm_90").target(), phase, 128, 32, 0, 0, 0)
    assert (found.resident, found.shared, found.occupancy) == (3, 64 << 10, 3 * 128 / 2048)
    assert by_nvidia(128, 32, 64 << 10) == 3


@pytest.mark.parametrize("threads", [1, 32, 33, 96, 128, 250, 256, 1024])
def test_residency_is_that_of_nvidias_calculator(threads: int) -> None:
    target = backend_named("CUDA:sm_90").target()
    for registers in (1, 24, 33, 40, 64, 65, 80, 104, 128, 168, 255):
        for shared in (0, 128, 1024, 8192, 37 << 7, 48 << 10, 99 << 10, 113 << 10, 227 << 10):
            found = resources_of(target, PhaseSpec("p", 8, 1, 0, block=threads, shared_bytes=shared), threads, registers)
            assert found.resident == max(1, by_nvidia(threads, registers, shared)), (registers, shared)


@pytest.mark.parametrize("name", ["CUDA:sm_10", "CUDA:x", "CUDA:sm_90:x", "CUDA:0:sm_10", "CUDA:x:sm_90", "CUDA:0:"])
def test_a_device_that_there_is_not(name: str) -> None:
    with pytest.raises(UnsupportedError, match=r"CUDA:sm_90"):
        device_named(name)


def test_without_a_driver_one_sentence_says_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> None:
        raise OSError(name)
    monkeypatch.setattr(ctypes, "CDLL", missing)
    with pytest.raises(DeviceError, match=r"no NVIDIA driver.*install it.*SVOD_DEVICE=CUDA:sm_90"):
        driver_module.library_of_driver()


def test_what_the_driver_says_is_in_the_error() -> None:
    class Library:
        def cuInit(self, flags: object) -> int:
            return 100

        def cuGetErrorString(self, code: object, out: object) -> int:
            out._obj.value = b"no CUDA-capable device is detected"      # type: ignore[attr-defined]
            return 0
    with pytest.raises(DeviceError, match=r"cuInit: no CUDA-capable device is detected \(code 100\)"):
        driver_module.Driver(Library())
    Library.cuInit = lambda self, flags: 0      # type: ignore[method-assign]
    driver = driver_module.Driver(Library())
    kinds = {code: type(driver._error("cuLaunchKernel", code)) for code in (2, 701, 700, 719)}
    assert kinds == {2: driver_module.OutOfMemory, 701: DeviceError, 700: DeviceLost, 719: DeviceLost}


def test_architectures_of_devices() -> None:
    assert architecture_of(9, 0).name == "sm_90a" and architecture_of(8, 7).name == "sm_86"
    assert architecture_of(10, 3).name == "sm_100" and architecture_of(12, 1).name == "sm_120" == architecture_of(13, 0).name
    with pytest.raises(DeviceError, match=r"7\.0.*needs 7\.5"):
        architecture_of(7, 0)


def test_a_device_of_a_later_capability_gets_ptx() -> None:
    """A cubin runs only on devices of its major capability, so a later device gets PTX."""
    pair = device_named("CUDA:sm_120").pair
    assert isinstance(pair, Nvptx)
    code = svod.kernel(Tensor(X) + 1, config=replace(CONFIG, device="CUDA:sm_120")).apply("UPCAST(o0, 2)")._form
    binary = CudaCode.unpack(pair.compile(code.source, code.target))
    assert pair.image_for(binary, plain=False, major=12) == binary.image
    later = pair.image_for(binary, plain=False, major=13)
    assert b".target sm_90\n" in later and later.endswith(b"\0") and b".v2." in later
    assert b".v2." not in pair.image_for(binary, plain=True, major=13)


@pytest.mark.parametrize("old", [False, True], ids=["none", "too old"])
def test_without_a_ptxas_that_knows_the_gpu_the_driver_gets_ptx(old: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    script = tmp_path / "ptxas"
    script.write_text("#!/bin/sh\n[ $1 = --version ] && echo 'release 11.5, V11.5.119' && exit\n"
                      "echo \"ptxas fatal: Value 'sm_90' is not defined for option 'gpu-name'\" >&2; exit 255\n")
    script.chmod(0o755)
    monkeypatch.setattr(ptxas, "tool", lambda name: str(script) if old else None)
    for cached in ("ptxas_version", "assembles"):
        monkeypatch.setattr(ptxas, cached, getattr(ptxas, cached).__wrapped__)
    monkeypatch.setattr("svod.compile.plan.compiler._compilers", {})
    assert ptxas.ptxas_version() == ("11.5.119" if old else None)
    code = (Tensor(X) * 3).prepare(ONLY).kernels[0].loaded
    assert isinstance(code, CudaCode) and code.kind == "ptx" and code.image.endswith(b"\0") and b".entry svod_p0" in code.image


def test_the_report_of_ptxas_is_read() -> None:
    said = ("ptxas info    : 0 bytes gmem\nptxas info    : Compiling entry function 'svod_p0' for 'sm_90'\n"
            "ptxas info    : Function properties for svod_p0\n    16 bytes stack frame, 8 bytes spill stores, 12 bytes spill loads\n"
            "ptxas info    : Used 103 registers, used 1 barriers, 16384 bytes smem, 16 bytes cmem[0]\n")
    report, = ptxas.read_report(said)
    assert report == ptxas.PtxasReport("svod_p0", 103, 16384, 16, 8, 12)


def test_code_is_read_back_and_refused_where_it_is_damaged() -> None:
    code = CudaCode("sm_90", "cubin", b"image", (ptxas.PtxasReport("k", 1, 2, 3, 4, 5),), "the source")
    assert CudaCode.unpack(code.pack()) == code
    for damaged in (b"", b"other" + code.pack(), code.pack()[:-3]):
        with pytest.raises(CompileError, match="not the code"):
            CudaCode.unpack(damaged)


# -- with a driver that runs kernels on the CPU ----------------------------------------------------------------
def test_a_network_of_several_kernels_becomes_a_graph(fake: FakeDriver) -> None:
    plan = network().prepare(CONFIG)
    assert isinstance(plan._devices.queue, CudaQueue) and len(plan.kernels) > 1
    for run in range(3):
        before = len(fake.calls)
        plan.execute()
        np.testing.assert_allclose(plan.outputs[0].reshape(11, 7), EXPECTED, rtol=1e-4, atol=1e-6)
        names = [n for n in fake.names()[before:] if n in ("launch", "begin_capture", "end_capture", "launch_graph")]
        launches = sum(len(k.spec.phases) for k in plan.kernels)
        assert names == [["launch"] * launches, ["begin_capture", "end_capture", "launch_graph"], ["launch_graph"]][run]


def test_a_graph_is_made_anew_where_arguments_change(fake: FakeDriver) -> None:
    n = Variable("n", 1, 11)
    plan = (Tensor(X)[:n] @ Tensor(W)).relu().sum(1).prepare(CONFIG)
    for rows in (3, 3, 11, 11, 5):      # a graph of fewer rows leaves what it does not compute
        plan.execute(n=rows)
        np.testing.assert_allclose(plan.outputs[0][:rows], np.maximum(X[:rows] @ W, 0).sum(1), rtol=1e-4, atol=1e-5)


def test_a_recording_that_is_interrupted(fake: FakeDriver, monkeypatch: pytest.MonkeyPatch) -> None:
    plan = network().prepare(CONFIG)
    plan.execute()

    def interrupted(*args: Any) -> None:
        raise KeyboardInterrupt
    with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
        patched.setattr(fake, "launch", interrupted)
        plan.execute()
    assert "begin_capture" in fake.names() and fake.names()[-1] == "abandon_capture" and fake.capturing is None
    plan.execute()
    np.testing.assert_allclose(plan.outputs[0].reshape(EXPECTED.shape), EXPECTED, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", a_half(["begin_capture", "launch", "end_capture"]))
def test_a_recording_ends_wherever_it_is_interrupted(fake: FakeDriver, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    plan, call = network().prepare(CONFIG), getattr(fake, name)
    plan.execute()

    def interrupted(*args: Any) -> None:
        if name == "begin_capture":
            call(*args)
        raise KeyboardInterrupt
    with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
        patched.setattr(fake, name, interrupted)
        plan.execute()
    assert fake.capturing is None
    plan.execute()
    np.testing.assert_allclose(plan.outputs[0].reshape(EXPECTED.shape), EXPECTED, rtol=1e-4, atol=1e-5)


def test_a_graph_goes_with_its_plan(fake: FakeDriver) -> None:
    plan = network().prepare(CONFIG)
    for _ in range(2):
        plan.execute()
    assert "launch_graph" in fake.names() and "free_graph" not in fake.names()
    del plan
    gc.collect()
    assert "free_graph" not in fake.names()     # it may still run
    backend_named("CUDA").wait()
    assert fake.names().count("free_graph") == 1


@pytest.mark.slow
def test_a_plan_that_is_collected_leaves_the_thread_on_its_device(fake: FakeDriver) -> None:
    """The garbage collector may run at any allocation, also before a call for another device, so it must not change the current device."""
    plan = network().prepare(CONFIG)
    for _ in range(2):
        plan.execute()
    other = backend_named("CUDA:1").gpu     # type: ignore[attr-defined]
    with other.working():
        assert fake.context == other.context
        del plan
        gc.collect()
        assert fake.context == other.context


def test_memory_that_runs_out_waits_for_who_records_a_graph(fake: FakeDriver, monkeypatch: pytest.MonkeyPatch) -> None:
    """No thread waits for a stream while it records a graph, because that would invalidate the recording."""
    plan, device, launch = network().prepare(CONFIG), backend_named("CUDA"), fake.launch
    plan.execute()
    first = device.allocate(1 << 16)
    del first
    fake.room = sum(m.nbytes for m in fake.memory.values()) + (1 << 17)
    threads, got = list[threading.Thread](), list[Any]()

    def beside(*args: Any) -> None:
        if fake.capturing is not None and not threads:
            threads.append(threading.Thread(target=lambda: got.append(device.allocate(3 << 16)), daemon=True))
            threads[0].start()
            threads[0].join(0.2)
        launch(*args)
    with monkeypatch.context() as patched:
        patched.setattr(fake, "launch", beside)
        plan.execute()
    threads[0].join(NEVER)
    assert not threads[0].is_alive() and got
    np.testing.assert_allclose(plan.outputs[0].reshape(EXPECTED.shape), EXPECTED, rtol=1e-4, atol=1e-5)


def test_a_fork_of_a_process_that_was_busy_is_told_so(fake: FakeDriver) -> None:
    """A thread held the locks when the process was forked, and does not exist in the child; the child gets an error and does not hang."""
    device = backend_named("CUDA").gpu      # type: ignore[attr-defined]
    said: list[str] = []

    def asked() -> None:
        for call in (device.wait, lambda: device.pool.take(512)):
            with pytest.raises(DeviceError, match="before this process was forked") as error:
                call()
            said.append(str(error.value))
    with device.lock, device.pool.lock:
        device.process = -1
        thread = threading.Thread(target=asked, daemon=True)
        thread.start()
        thread.join(NEVER)
    assert len(said) == 2


def test_each_run_of_a_sample_begins_with_a_cache_that_was_filled(fake: FakeDriver) -> None:
    """Before each timed run, twice the size of the L2 cache is written, and then the begin event is recorded. Each run has two events; of
    many runs only the first ones are timed."""
    plan = (Tensor(X) * 2).prepare(CONFIG)
    plan.execute()
    for times, runs in ((3, 3), (1, 1), (0, 0), (40 * COLD_RUNS, COLD_RUNS)):
        before = len(fake.calls)
        assert plan.repeat_timed(times, cold=True) == 0.25 * times
        calls = [c for c in fake.calls[before:] if c[0] in ("fill", "record", "launch", "wait")]
        assert [c[0] for c in calls] == ["fill", "record", "launch", "record"] * runs + ["wait"]
        assert len({c for c in calls if c[0] == "record"}) == 2 * runs and {c for c in calls if c[0] == "fill"} <= {("fill", 2 << 20)}
    before = len(fake.calls)
    assert plan.repeat_timed(3) == 0.25, "by itself a plan runs with caches as they are, between two events"
    assert [n for n in fake.names()[before:] if n != "create_event"] == ["record", "launch", "launch", "launch", "record", "wait"]


def test_runs_as_a_graph_begin_so_too(fake: FakeDriver) -> None:
    plan = network().prepare(CONFIG)
    plan.load_inputs()
    before = len(fake.calls)
    assert plan._devices.queue.run_timed(plan.segments[0].launches, 3) == 0.75
    names = [n for n in fake.names()[before:] if n in ("fill", "record", "launch", "launch_graph", "begin_capture")]
    launches = sum(len(k.spec.phases) for k in plan.kernels)
    assert names == ["fill", "record", *["launch"] * launches, "record", "begin_capture", *["fill", "record", "launch_graph", "record"] * 2]


def test_a_search_times_such_runs(fake: FakeDriver) -> None:
    """A search flushes the cache before each sample, also before a repeated one and before the untimed run."""
    kernel = svod.kernel(Tensor(X) * 2, config=CONFIG).state
    context = KernelContext(Setup(ast_to_data(kernel.kernel.ast), kernel.target))
    runner, = context.ready_for_timing([compile_candidate(((), True), context)])
    before = len(fake.calls)
    assert take_sample(runner.contestant(), 2, 0.0) == 0.25
    names = fake.names()[before:]
    copied = {i + 1 for i, name in enumerate(names) if name in ("copy_in", "copy_out")}     # the event of a copy is none of the clock's
    found = [n for i, n in enumerate(names) if n in ("fill", "record", "launch") and i not in copied]
    assert found == ["fill", "record", "launch", "record"] * 3


class Clocked(FakeDriver):
    """A driver whose clock reports a quarter of a second for an empty interval, plus half a second for each launch between two events."""

    def seconds_between(self, first: int, second: int) -> float:
        names = self.names()
        begin, end = [i for i, name in enumerate(names) if name == "record"][-2:]
        return 0.25 + 0.5 * sum(name in ("launch", "launch_graph") for name in names[begin:end])


def test_profiles_are_of_the_devices_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    """Profiles do not flush the L2 cache between kernels, and subtract the time of an empty call, measured by the same clock."""
    driver = Clocked()
    stand_in(driver, monkeypatch)
    plan = (Tensor(X[:2, :3].copy()) @ Tensor(W[:3, :2].copy())).softmax(-1).prepare(CONFIG)
    phases = [len(k.spec.phases) for k in plan.kernels]
    assert plan.profile(1) == [0.25 + 0.5 * n for n in phases]
    profiled = svod.profile(plan, seconds=0.0, ceilings=CEILINGS)
    assert [k.seconds for k in profiled.kernels] == [0.5] * len(phases), "several phases that ran before are one graph"
    assert plan.repeat_kernel(0, 0) == 0.25
    log = RunLog(1, True, io.StringIO())
    plan.log_runs(log)
    plan.execute()
    events = [e for e in json.loads(log.trace_json())["traceEvents"] if e.get("cat") == "kernel"]
    assert [e["dur"] for e in events] == [0.75e6] * len(phases)
    assert "fill" not in driver.names()


def test_copies_between_devices_are_in_the_trace(fake: FakeDriver) -> None:
    plan = ((Tensor(X).to("CUDA") * 2).to("CUDA:1") + 1).prepare(CONFIG)
    log = RunLog(0, True)
    plan.log_runs(log)
    plan.execute()
    events = json.loads(log.trace_json())["traceEvents"]
    track = {e["args"]["name"]: e["tid"] for e in events if e["ph"] == "M"}
    assert [e["tid"] for e in events if e["name"] == "CUDA → CUDA:1" and e["args"]["bytes"] == X.nbytes] == [track["CUDA:1"]]
    assert {e["tid"] for e in events if e["ph"] == "X" and e["cat"] == "kernel"} == {track["CUDA"], track["CUDA:1"]}


def test_what_is_done_once_is_not_timed(fake: FakeDriver) -> None:
    """The first run of a queue loads modules and the second records a graph, both before the clock starts."""
    plan = (Tensor(X[:2, :3].copy()) @ Tensor(W[:3, :2].copy())).softmax(-1).prepare(CONFIG)
    plan.load_inputs()
    for once in ("load_module", "begin_capture"):
        before = len(fake.calls)
        plan._devices.queue.run_timed(plan.segments[0].launches, 1)
        names = fake.names()[before:]
        assert names.index(once) < names.index("record") and once not in names[names.index("record"):]


@pytest.mark.slow
def test_a_run_of_many_repetitions(fake: FakeDriver) -> None:
    plan = network().prepare(CONFIG)
    plan.execute()
    plan.repeat(5)
    assert fake.names().count("launch_graph") == 5


def test_what_a_plan_changes_is_copied_back(fake: FakeDriver) -> None:
    """The kernel reads and writes one buffer, through arguments that are not aligned for wide accesses."""
    x = Tensor(X.copy()).realize()
    x[2:4] = Tensor(X[:2]) * 3
    plan = x.prepare(CONFIG)
    plan.execute()
    expected = X.copy()
    expected[2:4] = X[:2] * 3
    np.testing.assert_array_equal(plan.outputs[0].reshape(X.shape), expected)


def test_arguments_that_are_not_aligned_get_code_without_assumptions(fake: FakeDriver) -> None:
    x = Tensor(np.arange(64, dtype=np.float32)).realize()
    plan = (x * 2).prepare(CONFIG)
    plan.execute()
    queue = plan._devices.queue
    assert isinstance(queue, CudaQueue)
    kernel = plan.kernels[0]
    memory = plan.parts["CUDA"].held[kernel.buffers[1 - kernel.spec.outs[0]]].memory_on(plan.parts["CUDA"].backend)
    loads = fake.names().count("load_module")
    queue.bind(kernel.buffers[1 - kernel.spec.outs[0]], memory.address + 4)
    plan.repeat(1)
    assert fake.names().count("load_module") == loads + 1
    np.testing.assert_array_equal(plan.outputs[0][:60], 2 * np.arange(1, 61))


@pytest.mark.parametrize(("addresses", "plain"), [
    ((0, 256, 512), False), ((0, 128, 512), True), ((128, 0, 512), True), ((0, 512, 640), False), ((0, 512, 512), False),
    ((0, 0, 512), True), ((0, 264, 512), True), ((4, 264, 520), True)])
def test_code_that_assumes_nothing_runs_where_memory_is_shared(addresses: tuple[int, int, int], plain: bool) -> None:
    """Code without assumptions runs if a written argument overlaps another one, or if an argument is not aligned for wide accesses.
    Arguments that are only read may share memory."""
    spec = ProgramSpec("k", ((dtypes.float32, 64),) * 3, (0,), (), ())
    kernel = PreparedKernel(spec, CudaCode("sm_90", "ir", b"", (), ""), (0, 1, 2))
    assert CudaQueue._is_plain(kernel, addresses) == plain


def test_a_function_of_python_has_copies_of_what_lies_on_the_device(fake: FakeDriver) -> None:
    half = svod.custom_function(lambda m: m / 2, Tensor(X) @ Tensor(W), shape=(11, 13), dtype="float32")
    plan = (half + 1).prepare(CONFIG)
    plan.execute()
    np.testing.assert_allclose(plan.outputs[0].reshape(11, 13), X @ W / 2 + 1, rtol=1e-4, atol=1e-5)


def test_large_copies_go_through_pinned_memory(fake: FakeDriver) -> None:
    data = np.arange(3 << 20, dtype=np.float32)
    device = backend_named("CUDA")
    memory = device.allocate(data.nbytes)
    device.copy_in(memory.address, data.ctypes.data, data.nbytes)
    back = np.zeros_like(data)
    device.copy_out(back.ctypes.data, memory.address, data.nbytes)
    np.testing.assert_array_equal(back, data)
    assert fake.names().count("allocate_pinned") == 1 and fake.names().count("copy_in") == fake.names().count("copy_out") == 3


def test_memory_is_used_again_and_given_back_where_it_runs_out(fake: FakeDriver) -> None:
    fake.room = 1 << 16
    device = backend_named("CUDA")
    first = device.allocate(30_000)
    address = first.address
    del first
    again = device.allocate(30_000)
    assert again.address == address and fake.names().count("allocate") == 1
    del again
    whole = device.allocate(50_000)
    assert "free" in fake.names()
    with pytest.raises(DeviceError, match=r"fake GPU 0 has no .* bytes of memory left; this process holds"):
        device.allocate(50_000)
    assert whole.address


def test_memory_comes_back_inside_a_collection(fake: FakeDriver) -> None:
    """The garbage collector may return memory while the same thread allocates."""
    pool = backend_named("CUDA").allocate(100).pool     # type: ignore[attr-defined]
    memory = [DeviceMemory(pool, 30_000)]
    address = memory[0].address

    def collected() -> None:
        with pool.lock:
            memory.clear()
    thread = threading.Thread(target=collected, daemon=True)
    thread.start()
    thread.join(NEVER)
    assert not thread.is_alive() and DeviceMemory(pool, 30_000).address == address


def test_an_error_in_a_kernel_names_it(fake: FakeDriver) -> None:
    plan = (Tensor(X) * 2).prepare(CONFIG)
    plan.execute()
    fake.failing = "svod_p0"
    said = r"illegal memory access.*in a run of elementwise_\d+ on fake GPU 0\. After .* cannot use the GPU any more$"
    plan.execute()
    for read in (plan.wait, lambda: plan.outputs, plan.execute, lambda: (Tensor(X) + 1).prepare(CONFIG)):
        with pytest.raises(DeviceLost, match=said):
            read()


def test_calls_return_before_the_device_is_done(fake: FakeDriver) -> None:
    """Each result is the input of the next call. Only reading a result waits."""
    w = Tensor(W[:, :13] @ V @ V.T / 10).to("CUDA").realize()
    f = svod.jit(lambda x: (x @ w.T).relu() + 1)
    g = svod.jit(lambda x: (x.to("CUDA") @ w).to("CUDA"))
    for call in (g, f):
        call(g(X) if call is f else X)
    want = X @ (W @ V @ V.T / 10)
    before = len(fake.calls)
    y = g(X)
    for _ in range(3):
        y = g(f(y))
        want = np.maximum(want @ (W @ V @ V.T / 10).T, 0) + 1
        want = want @ (W @ V @ V.T / 10)
    assert not {"wait", "wait_event", "copy_out"} & set(fake.names()[before:]) and not fake.is_idle
    np.testing.assert_allclose(y.numpy(), want, rtol=1e-3)
    assert fake.is_idle and fake.names()[before:].count("wait") == 1


def test_what_a_run_reads_may_be_changed_when_the_call_returns(fake: FakeDriver) -> None:
    x = X.copy()
    state = Tensor(np.zeros_like(X)).to("CUDA").realize()
    step = svod.jit(lambda a: state.assign(state * 2 + a.to("CUDA")))
    want = np.zeros_like(X)
    for n in range(5):
        x[:] = X + n
        want = want * 2 + x
        step(x)
        x[:] = np.nan
    assert not fake.is_idle
    np.testing.assert_allclose(state.numpy(), want, rtol=1e-5)


def test_copies_of_any_size_pass_through_the_ring(fake: FakeDriver) -> None:
    """Copies of any size pass through the ring of pinned memory; the host's array may be reused as soon as the call returns."""
    rng, device = np.random.default_rng(3), backend_named("CUDA")
    array = np.empty(9 << 20, np.uint8)
    copies = []
    for n in [*(10 ** rng.uniform(0, 6.9, 12)).astype(int).tolist(), *[1] * 300, 4 << 20, 9 << 20]:
        memory, value = device.allocate(n), int(rng.integers(1, 255))
        array[:n], array[n - 1] = value, 255 - value
        device.copy_in(memory.address, array.ctypes.data, n)
        array[:n] = 0
        copies.append((memory, n, value))
    assert not fake.is_idle
    for memory, n, value in copies:
        device.copy_out(array.ctypes.data, memory.address, n)
        assert array[n - 1] == 255 - value and (array[:n - 1] == value).all()
    assert fake.names().count("allocate_pinned") == 1


def test_an_error_names_the_kernels_that_were_running(fake: FakeDriver) -> None:
    """The error names the kernels of all runs since the last wait, in order, because the driver does not report the failing one. It is
    raised once."""
    there = Tensor(X).to("CUDA").realize()
    first, second = ((there * 2).prepare(CONFIG), (there @ Tensor(W).to("CUDA")).prepare(CONFIG))
    for plan in (first, second):
        plan.execute()
        plan.wait()
    fake.failing = "svod_p0"
    for plan in (second, first, second):
        plan.execute()
    with pytest.raises(DeviceLost, match=r"in a run of gemm_\d+, elementwise_\d+ on fake GPU 0\. After"):
        second.wait()


@pytest.mark.slow
def test_memory_and_code_are_used_until_the_device_is_done(fake: FakeDriver) -> None:
    """A plan is deleted before its kernels have run, and the next plan gets its memory; both results are right."""
    results = []
    for n in range(12):
        f = svod.jit(lambda x, n=n: ((x.to("CUDA") * (n + 2)).sum(1) + n).relu())
        results.append(f(X + n))
        del f
        gc.collect()
    assert not fake.is_idle and "unload_module" not in fake.names()
    for n, y in enumerate(results):
        np.testing.assert_allclose(y.numpy(), np.maximum(((X + n) * (n + 2)).sum(1) + n, 0), rtol=1e-4, atol=1e-3)
    assert fake.names().count("unload_module") > 5


def test_the_second_device_shares_the_code_of_the_first(fake: FakeDriver) -> None:
    first, second = backend_named("CUDA").target(), backend_named("CUDA:1").target()
    assert first.key == second.key and second.device == "CUDA:1"
    plan = (Tensor(X) * 2).prepare(replace(CONFIG, device="CUDA:1"))
    plan.execute()
    np.testing.assert_array_equal(plan.outputs[0].reshape(X.shape), X * 2)
    with pytest.raises(DeviceError, match=r"CUDA:5: this machine has 2 GPUs"):
        backend_named("CUDA:5").target()


def test_a_device_runs_the_code_of_an_older_one(fake: FakeDriver) -> None:
    """A device with code of an older architecture has a separate target, but the memory of the device."""
    own, older = (backend_named(name).target() for name in ("CUDA", "CUDA:1:sm_80"))
    assert (own.cpu, older.cpu, older.device) == ("sm_90a", "sm_80", "CUDA:1:sm_80") and "wgmma" not in older.features
    assert older.key != own.key and older.units == own.units
    plan = network().prepare(replace(CONFIG, device="CUDA:0:sm_80"))
    plan.execute()
    np.testing.assert_allclose(plan.outputs[0].reshape(EXPECTED.shape), EXPECTED, rtol=1e-4, atol=1e-6)
    code = plan.kernels[0].loaded
    assert isinstance(code, CudaCode) and code.arch == "sm_80"
    moved = (Tensor(X).to("CUDA") * 2).to("CUDA:0:sm_90")
    before = len(fake.calls)
    np.testing.assert_array_equal((moved + 1).numpy(), 2 * X + 1)
    assert "copy" in fake.names()[before:] and "copy_peer" not in fake.names()
    with pytest.raises(DeviceError, match=r"CUDA:0:sm_120: fake GPU 0 has compute capability 9\.0 and does not run code for sm_120"):
        backend_named("CUDA:0:sm_120").target()
    fake.sizes["major"] = 10
    with pytest.raises(DeviceError, match=r"10\.0 and does not run code for sm_90a"):
        backend_named("CUDA:1:sm_90a").target()


@pytest.mark.slow
@pytest.mark.parametrize("reached", [True, False])
def test_copies_between_devices(fake: FakeDriver, reached: bool) -> None:
    """Copies are direct if the devices can access each other's memory, otherwise through the host. Each device asks for access once and
    enables it once. A CPU tensor whose content is on a device is copied on that device to a tensor of it."""
    fake.reached = reached
    for n in (3, 1 << 20):
        x = np.arange(n, dtype=np.float32)
        there = (Tensor(x).to("CUDA") * 2).to("CUDA:1")
        plan = ((there + 1).to("CUDA") * 3).prepare(CONFIG)
        for _ in range(2):
            before = len(fake.calls)
            plan.execute()
            np.testing.assert_array_equal(plan.outputs[0], (2 * x + 1) * 3)
            between = [c for c in fake.calls[before:] if c[0] in ("copy", "copy_peer", "copy_out")][:3]
            assert between == [("copy", x.nbytes), *[("copy_peer" if reached else "copy_out", x.nbytes)] * 2]
    assert sorted(c for c in fake.calls if c[0] == "reaches") == [("reaches", 0, 1), ("reaches", 1, 0)]
    assert fake.opened == ({(100, 101), (101, 100)} if reached else set())


def test_memory_that_is_open_already_may_be_opened() -> None:
    class Library:
        code = 704

        def cuInit(self, flags: Any) -> int:
            return 0

        def cuCtxEnablePeerAccess(self, context: Any, flags: Any) -> int:
            return self.code

        def cuGetErrorString(self, code: Any, out: Any) -> int:
            return 1
    driver = driver_module.Driver(Library())
    driver.open_peer(7)
    Library.code = 217
    with pytest.raises(DeviceError, match=r"cuCtxEnablePeerAccess: an error \(code 217\)"):
        driver.open_peer(7)


def test_weights_are_arranged_once(fake: FakeDriver) -> None:
    w = Tensor(W)
    key = (Tensor(X) @ w).prepare(CONFIG, constants=[w]).kernels[0].key
    plan = (Tensor(X) @ w).prepare(replace(CONFIG, opts={key: (("STAGE", "s1", "root"), ("LOCAL", "o1", 4))}), constants=[w])
    assert [p.once for p in plan.kernels[0].spec.phases] == [True, False]
    plan.execute()
    np.testing.assert_allclose(plan.outputs[0].reshape(11, 13), X @ W, rtol=1e-4, atol=1e-5)


def test_weights_of_a_convolution_are_transformed_once(fake: FakeDriver) -> None:
    """A plan runs the phase of the transformed weights when it is made; two of its runs give the numbers of NumPy."""
    rng = np.random.default_rng(5)
    x, w = rng.standard_normal((2, 5, 9, 7)).astype(np.float32), rng.standard_normal((3, 5, 3, 3)).astype(np.float32)
    image, taps = Tensor(x), Tensor(w)
    key = image.conv2d(taps, padding=1).prepare(CONFIG, constants=[taps]).kernels[0].key
    chain = parse_chain("WINOGRAD(out, 4) FLATTEN(s8) STAGE(s8, root) STAGE(s2, root) STAGE(s6, root) UPCAST(o2, 4) UPCAST(o3, 4) "
                        "UPCAST(s8.o3, 4) LOCAL(s8.o3, 3) LOCAL(s8.o2, 3) TILE(s8.r0, 2) "
                        "STAGE(s3, s8.r0) STAGE(s7, s8.r0) PIPELINE(s8.r0, 2)")
    plan = image.conv2d(taps, padding=1).prepare(replace(CONFIG, opts={key: chain}), constants=[taps])
    assert [p.once for p in plan.kernels[0].spec.phases] == [True, False, False, False]
    padded = np.pad(x.astype(np.float64), ((0, 0), (0, 0), (1, 1), (1, 1)))
    want = np.einsum("ncyxij,ocij->noyx", np.lib.stride_tricks.sliding_window_view(padded, (3, 3), (2, 3)), w)
    for _ in range(2):
        plan.execute()
        np.testing.assert_allclose(plan.outputs[0].reshape(want.shape), want, atol=2e-4)


def test_compiled_code_is_found_again(fake: FakeDriver, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = replace(CONFIG, object_cache=str(tmp_path))
    (Tensor(X) * 2).prepare(config)
    monkeypatch.setattr("svod.compile.plan.compiler._compilers", {})
    monkeypatch.setattr("svod.compile.cuda.code.render", lambda *a: pytest.fail("compiled again"))
    plan: ExecutionPlan = (Tensor(X) * 2).prepare(config)
    plan.execute()
    np.testing.assert_array_equal(plan.outputs[0].reshape(X.shape), X * 2)


# -- constants ------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("made", [
    lambda x: Tensor.zeros(11).scatter_add(0, Tensor(np.arange(11)).to(x.device), x),       # the base reads no memory
    lambda x: Tensor.ones(11).cumsum(0) + x, lambda x: Tensor.arange(11).flip(0).sort()[0] + x,
], ids=["scatter", "scan", "sort"])
def test_what_reads_no_memory_is_computed_where_it_is_read(made: Any, fake: FakeDriver) -> None:
    """A value that reads no memory is computed on the device of its reader, also in a plan of several devices."""
    x = Tensor(X[:, 0].copy())
    np.testing.assert_allclose(made(x.to("CUDA")).numpy(), made(x).numpy(), rtol=1e-6)


def test_what_reads_no_memory_and_is_read_on_two_devices_is_refused(fake: FakeDriver) -> None:
    x, rows = Tensor(X[:, :11].copy()), (Tensor.arange(121).reshape(11, 11) / 10).softmax(-1)
    with pytest.raises(DeviceError, match=r"shape \(11, 11\) made of constants alone is read on CPU and on CUDA: realize\(\) it, and copy"):
        ((x.to("CUDA") @ rows).to("CPU") + x @ rows).realize()
    rows = rows.realize()
    got = ((x.to("CUDA") @ rows.to("CUDA")).to("CPU") + x @ rows).numpy()
    np.testing.assert_allclose(got, 2 * (x @ rows).numpy(), rtol=1e-5)


# -- one kernel -------------------------------------------------------------------------------------------
def test_a_plan_of_one_kernel_is_told_what_is_constant(fake: FakeDriver) -> None:
    """Phases that run once read constants while the plan is made; other inputs are not on the device at that time."""
    case, device = case_of("constants_only"), device_named("CUDA")
    state = apply_opts(Scheduler(case.kernel, device.backend.target()), [Opt("STAGE", "s1", "root"), Opt("GROUPTOP", "s3.r0", 8)])
    program = lower(state)
    code = device.pair.load(device.pair.binary_of(program, state.target), program.spec)
    assert [p.once for p in program.spec.phases] == [True, False]
    with pytest.raises(LaunchError, match="run once, when the plan is made; tell of_kernel which slots are constants"):
        ExecutionPlan.of_kernel(program.spec, code, case.fresh(), device="CUDA")
    constants = [p.arg.slot for p in case.kernel.params if p.arg.constant]
    for _ in range(2):
        args = case.fresh()
        ExecutionPlan.of_kernel(program.spec, code, args, constants=constants, device="CUDA").execute()
        case.check(args, "a plan of one kernel")
