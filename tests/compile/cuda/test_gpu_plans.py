"""Tests of plans on an NVIDIA GPU: `pytest -m gpu`. Tests with the fixture `cuda` also run without a GPU, with `FakeDriver`."""
from __future__ import annotations

import sqlite3
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from svod import Tensor, Variable, jit
from svod.bench.suites.suites import CORE_CASES
from svod.compile.backend import Device, backend_named
from svod.compile.cuda.backend import Cuda
from svod.compile.cuda.code import CudaCode
from svod.compile.cuda.device import GpuDevice
from svod.compile.cuda.targets import ARCHITECTURES, runs
from svod.config import BeamConfig, PrepareConfig
from svod.errors import DeviceError
from svod.nn.state import load, save
from tests.compile.cuda.test_core_suite import check_case
from tests.draws import an_eighth

CONFIG = PrepareConfig(device="CUDA", object_cache=":none:", db=":none:")


@pytest.fixture
def copies(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, int]]:
    """Record the copies of devices from now on, with their bytes: "in", "out", and between two devices "direct" or "refused"."""
    done: list[tuple[str, int]] = []
    own_in, own_out, own_from = GpuDevice.copy_in, GpuDevice.copy_out, GpuDevice.copy_from

    def copy_in(self: GpuDevice, device: int, host: int, nbytes: int) -> None:
        done.append(("in", nbytes))
        own_in(self, device, host, nbytes)

    def copy_out(self: GpuDevice, host: int, device: int, nbytes: int) -> None:
        done.append(("out", nbytes))
        own_out(self, host, device, nbytes)

    def copy_from(self: GpuDevice, address: int, other: GpuDevice, source: int, nbytes: int) -> bool:
        reached = own_from(self, address, other, source, nbytes)
        done.append(("direct" if reached else "refused", nbytes))
        return reached
    for method in (copy_in, copy_out, copy_from):
        monkeypatch.setattr(GpuDevice, method.__name__, method)
    return done


@pytest.mark.gpu
@pytest.mark.parametrize("case", CORE_CASES, ids=lambda c: c.name)
def test_the_core_suite(case: object, gpu: Device) -> None:
    check_case(case)        # type: ignore[arg-type]


def test_a_plan_is_a_graph_from_its_second_run_on(cuda: Any) -> None:
    """A plan runs as a graph from its second run on, also if inputs change, other arrays are bound, or other plans run between."""
    rng = np.random.default_rng(0)
    x, w, v = (rng.standard_normal(shape).astype(np.float32) for shape in ((64, 96), (96, 80), (80, 10)))
    given = Tensor(x)
    plan = ((given @ Tensor(w)).relu() @ Tensor(v)).softmax(-1).prepare(CONFIG)
    for run in range(4):
        x[:] = rng.standard_normal(x.shape)
        plan.execute()
        logits = np.maximum(x @ w, 0) @ v
        want = np.exp(logits - logits.max(-1, keepdims=True))
        want /= want.sum(-1, keepdims=True)
        np.testing.assert_allclose(plan.outputs[0].reshape(64, 10), want, rtol=1e-4, atol=1e-6, err_msg=f"run {run}")


@pytest.mark.slow
def test_scans_sorts_and_scatter(cuda: Any) -> None:
    rng = np.random.default_rng(0)
    n = 300 if cuda is not None else 1_000_003          # an emulator takes its time
    x, y = rng.standard_normal((2, n)).astype(np.float32), rng.integers(-9, 9, (n // 10, 3)).astype(np.int32)
    index = rng.permutation(n)[:n // 2]
    a, b = Tensor(x).to("CUDA"), Tensor(y).to("CUDA")
    sums, columns = a.cumsum(1).numpy(), b.cumsum(0).numpy()
    want = x.astype(np.float64).cumsum(1)
    np.testing.assert_allclose(sums, want, atol=2e-6 * np.abs(want).max())
    np.testing.assert_array_equal(columns, y.cumsum(0))
    highest, where = a.cummax(1)
    np.testing.assert_array_equal(highest.numpy(), np.maximum.accumulate(x, 1))
    np.testing.assert_array_equal(np.take_along_axis(x, where.numpy(), 1), np.maximum.accumulate(x, 1))
    np.testing.assert_array_equal(a.argsort(1).numpy(), np.argsort(x, 1, kind="stable"))
    np.testing.assert_array_equal(a.topk(7, 1)[0].numpy(), -np.sort(-x, 1)[:, :7])
    put = Tensor.zeros(n).to("CUDA").scatter_add(0, Tensor(index).to("CUDA"), a[0, :len(index)])
    expected = np.zeros(n, np.float32)
    expected[index] = x[0, :len(index)]
    np.testing.assert_array_equal(put.numpy(), expected)


def test_variables(cuda: Any) -> None:
    n = Variable("n", 1, 40)
    x = np.arange(40 * 8, dtype=np.float32).reshape(40, 8)
    plan = (Tensor(x)[:n] * 2).sum(0).prepare(CONFIG)
    for value in (1, 7, 40, 7):
        plan.execute(n=value)
        np.testing.assert_array_equal(plan.outputs[0], 2 * x[:value].sum(0))


# -- memory ----------------------------------------------------------------------------------------------------
def test_a_mapped_file_is_copied_in_pieces(cuda: Any, copies: list[tuple[str, int]], tmp_path: Path,
                                           monkeypatch: pytest.MonkeyPatch) -> None:
    """Each piece is copied through pinned memory in chunks and a remainder; the last piece is too small for that. The file's values are not
    aligned for float32."""
    piece = 5 << 20
    for place in ("svod.compile.plan.part.PIECE", "svod.core.graph.buffer.PIECE"):
        monkeypatch.setattr(place, piece)
    values = np.random.default_rng(0).standard_normal((2 * piece + 4096) // 4).astype(np.float32)
    pieces = [("in", piece), ("in", piece), ("in", 4096)]
    path = tmp_path / "values.bin"
    path.write_bytes(b"header" + values.tobytes())
    there = Tensor.from_file(path, "float32", values.shape, 6).to("CUDA").realize()
    assert copies == pieces
    np.testing.assert_array_equal(there.numpy(), values)
    np.testing.assert_array_equal((there[-7:] * 2).numpy(), values[-7:] * 2)
    save({"w": Tensor(values)}, tmp_path / "weights.safetensors")
    loaded = load(tmp_path / "weights.safetensors")["w"]
    copies.clear()
    plan = (loaded[-1500:] + 1).prepare(CONFIG)
    plan.execute()
    np.testing.assert_array_equal(plan.outputs[0], values[-1500:] + 1)
    assert [c for c in copies if c[0] == "in"] == pieces


@pytest.mark.parametrize("large", [False, True])
def test_copies_between_two_gpus(cuda_pair: Any, copies: list[tuple[str, int]], large: bool) -> None:
    """Copies are direct if one GPU can access the other's memory, otherwise through the host; repeated, as access is enabled only once."""
    x = np.arange((3 << 20 if cuda_pair is None else 5003) if large else 3, dtype=np.float32)     # an emulator takes its time
    plan = (((Tensor(x).to("CUDA") * 2).to("CUDA:1") + 1).to("CUDA") * 3).prepare(CONFIG)
    for _ in range(2):
        copies.clear()
        plan.execute()
        np.testing.assert_array_equal(plan.outputs[0], (2 * x + 1) * 3)
        between = [c for c in copies if c[0] in ("direct", "refused") and c[1] == x.nbytes]
        assert len(between) >= 2
        by_the_host = sum(c == ("out", x.nbytes) for c in copies)
        assert by_the_host >= 2 if ("refused", x.nbytes) in between else by_the_host <= 1, copies


def test_the_second_gpu_computes(cuda_pair: Any) -> None:
    """The second GPU uses separate memory, modules and streams, also if the first one is used in between."""
    rng = np.random.default_rng(1)
    x, w = (rng.standard_normal(shape).astype(np.float32) for shape in ((9, 40), (40, 7)))
    plans = [(Tensor(x) @ Tensor(w)).relu().prepare(replace(CONFIG, device=d)) for d in ("CUDA", "CUDA:1", "CUDA")]
    for _ in range(3):
        for plan in plans:
            plan.execute()
            np.testing.assert_allclose(plan.outputs[0].reshape(9, 7), np.maximum(x @ w, 0), rtol=1e-4, atol=1e-5)


@pytest.mark.gpu
def test_memory_is_given_back(gpu: Device) -> None:
    for size in (1 << 20, 1 << 22, 1 << 20) * 3:
        x = np.ones(size, np.float32)
        assert float(jit(lambda t: (t + 1).sum(), config=CONFIG)(Tensor(x)).numpy()) == 2.0 * size


# -- code of older architectures -------------------------------------------------------------------------------
@pytest.mark.parametrize("arch", an_eighth(ARCHITECTURES))
def test_code_of_older_architectures(cuda: Any, arch: str) -> None:
    """Code for an older architecture of the same major capability is machine code if ptxas exists; for others it is PTX, which the driver
    compiles."""
    backend = backend_named("CUDA")
    assert isinstance(backend, Cuda)
    if not runs(ARCHITECTURES[arch], backend.gpu.capability):
        with pytest.raises(DeviceError, match=f"does not run code for {arch}"):
            backend_named(f"CUDA:0:{arch}").target()
        return
    rng = np.random.default_rng(0)
    x, w = (rng.standard_normal(shape).astype(np.float16) for shape in ((16, 32), (32, 24)))
    plan = (Tensor(x) @ Tensor(w)).relu().prepare(replace(CONFIG, device=f"CUDA:0:{arch}"))
    for _ in range(2):
        plan.execute()
        wanted = np.maximum(x.astype(np.float64) @ w, 0)
        np.testing.assert_allclose(plan.outputs[0].reshape(wanted.shape), wanted, rtol=1e-2, atol=2e-2)
    code = plan.kernels[0].loaded
    assert isinstance(code, CudaCode) and code.arch == arch


# -- time ----------------------------------------------------------------------------------------------------
@pytest.mark.gpu
def test_the_device_times_by_its_own_clock(gpu: Device) -> None:
    """By the device's clock, ten runs take longer than one."""
    x = Tensor(np.ones((2048, 2048), np.float32))
    plan = (x @ x).prepare(CONFIG)
    plan.execute()
    plan.repeat(3)
    one, many = plan.repeat_timed(1), plan.repeat_timed(20)
    assert one is not None and many is not None and 0 < one < many


@pytest.mark.gpu
def test_a_search_finds_a_right_kernel(gpu: Device, tmp_path: Path) -> None:
    """Candidates are compiled in workers, one of which uses the device. The kernel found is right, and the next plan uses it."""
    rng, db = np.random.default_rng(0), tmp_path / "tune.db"
    a, b = (rng.standard_normal((192, 192)).astype(np.float32) for _ in range(2))
    config = replace(CONFIG, db=str(db))
    (Tensor(a) @ Tensor(b)).prepare(replace(config, beam=BeamConfig(width=2, budget=30.0)))
    with sqlite3.connect(db) as found:
        statuses = Counter(status for status, in found.execute("SELECT status FROM measurements"))
    assert statuses["ok"] > 3 and not statuses.keys() & {"wrong", "crash", "timeout", "lost", "error"}, statuses
    plan = (Tensor(a) @ Tensor(b)).prepare(config)
    plan.execute()
    np.testing.assert_allclose(plan.outputs[0].reshape(192, 192), a @ b, rtol=1e-4, atol=1e-3)
    assert plan.kernels[0].opts_source == "database"
