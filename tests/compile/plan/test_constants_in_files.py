"""Constants at any address, as weights lie in files: kernels read them there, whatever they compute, and nothing keeps a copy."""
from __future__ import annotations

import gc
import os
import re
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

import svod
from svod import Tensor
from svod.compile.llvm.render import render
from svod.compile.lower.lower import lower
from svod.compile.plan.execution_plan import ExecutionPlan
from svod.core.cost.sketch import sketches
from svod.core.graph import graph
from svod.core.graph.allocator import LARGE_ARRAYS
from svod.core.graph.buffer import Buffer, bfloat16_bits_to_float32, buffer_from_bytes, buffer_of, float32_to_bfloat16_bits
from svod.core.ir.dtype import DType, dtypes, to_numpy
from svod.core.kernel.kernel import Kernel
from svod.core.kernel.scheduler import Scheduler
from svod.core.machine.target import Target
from svod.prepare import prepare_tensors
from tests.compile.llvm.test_codegen import NEON
from tests.compile.native import AVX2, AVX512
from tests.core.corpus import data, kernel_of

RNG = np.random.default_rng(45)
SHAPES = [(1, 1), (7, 13), (64, 96), (61, 127), (1, 300), (257, 3), (128, 256)]

Make = Callable[[Tensor, Tensor], Tensor]
KINDS: dict[str, Make] = {
    "product": lambda x, w: x @ w,
    "product with rows": lambda x, w: w @ x.transpose(0, 1),
    "gather": lambda x, w: w.index_select(0, (x[:, 0].abs() * 5).cast(dtypes.int32) % w.shape[0]),
    "elementwise": lambda x, w: (w * 2 + x[0, 0]).transpose(0, 1),
    "sums": lambda x, w: w.sum(1) + w.max(1) + x[0, 0],
    "reversed and padded": lambda x, w: w.flip(1).pad(((1, 2), (3, 0))) + x[0, 0],
    "strided": lambda x, w: w[::2, ::3] - x[0, 0],
    "softmax": lambda x, w: (w + x[0, 0]).softmax(0),
}


def waiting(values: np.ndarray, dtype: DType, shift: int) -> Tensor:
    """A tensor whose content lies `shift` bytes after a multiple of 64; bfloat16 as its bits."""
    raw = np.empty(values.nbytes + 128, np.uint8)
    start = -raw.ctypes.data % 64 + shift
    part = raw[start:start + values.nbytes]
    part[:] = values.reshape(-1).view(np.uint8)
    part.flags.writeable = False
    return Tensor.from_uop(graph.reshape(buffer_from_bytes(part, 0, dtype, values.size), values.shape))


def numbers(shape: tuple[int, ...], dtype: DType) -> np.ndarray:
    if dtype.is_int:
        return RNG.integers(-9, 9, shape).astype(to_numpy(dtype))
    values = RNG.standard_normal(shape).astype(np.float32)
    return float32_to_bfloat16_bits(values) if dtype == dtypes.bfloat16 else values.astype(to_numpy(dtype))


def plans_of() -> set[ExecutionPlan]:
    return {p for p in gc.get_objects() if type(p) is ExecutionPlan}


@pytest.mark.parametrize("dtype", [dtypes.float32, dtypes.float64, dtypes.float16, dtypes.bfloat16, dtypes.int32])
@pytest.mark.parametrize("kind", KINDS)
def test_kernels_read_constants_at_any_address(kind: str, dtype: DType) -> None:
    """The same kernels over aligned memory are the reference: results are equal to the last bit."""
    for rows, columns in SHAPES:
        values, other = numbers((rows, columns), dtype), numbers((3, rows if kind != "product with rows" else columns), dtype)
        x = Tensor(bfloat16_bits_to_float32(other)).cast(dtype) if dtype == dtypes.bfloat16 else Tensor(other)
        results = []
        for shift in sorted({0, 1, dtype.itemsize - 1}):
            w = waiting(values, dtype, shift)
            buffer = buffer_of(w.uop.src[0])
            assert (buffer.host is None) == bool(shift)
            results.append(svod.jit(lambda t, w=w: KINDS[kind](t, w).cast(dtypes.float32))(x).numpy())
            assert (buffer.host is None) == bool(shift), "the content was copied"
        for result in results[1:]:
            np.testing.assert_array_equal(result, results[0])


def test_python_functions_and_users_get_aligned_memory() -> None:
    values = numbers((40, 50), dtypes.float32)
    w = waiting(values, dtypes.float32, 1)
    np.testing.assert_array_equal(svod.jit(lambda t: w * t)(Tensor(np.float32(2))).numpy(), 2 * values)
    assert buffer_of(w.uop.src[0]).host is None
    seen = []

    def doubled(a: np.ndarray) -> np.ndarray:
        seen.append(a.flags.aligned)
        return 2 * a
    twice = svod.jit(lambda t: svod.custom_function(doubled, w, shape=w.shape, dtype="float32") * t)
    np.testing.assert_array_equal(twice(Tensor(np.float32(3))).numpy(), 6 * values)
    assert seen and all(seen)
    read = w.numpy()
    assert read.flags.aligned and (read == values).all()


@pytest.mark.parametrize("shift", [0, 1])
def test_an_output_may_be_a_constant(shift: int) -> None:
    values = numbers((3, 4), dtypes.float32)
    w = waiting(values, dtypes.float32, shift)
    plan = prepare_tensors([w, w + 1, w.reshape(12)], None)
    plan.execute()
    for output, expected in zip(plan.outputs, (values, values + 1, values), strict=True):
        np.testing.assert_array_equal(output.reshape(-1), expected.reshape(-1))


def test_threads_that_ask_for_the_array_get_one() -> None:
    for _ in range(50):
        buffer, barrier = buffer_of(waiting(numbers((64, 64), dtypes.float32), dtypes.float32, 1).uop.src[0]), threading.Barrier(4)

        def ask(_: int, buffer: Buffer = buffer, barrier: threading.Barrier = barrier) -> np.ndarray:
            barrier.wait()
            return buffer.array
        with ThreadPoolExecutor(4) as threads:
            first, *others = threads.map(ask, range(4))
        assert all(other is first for other in others)


LOADS = re.compile(r"load (?:float|<\d+ x float>|i32|<\d+ x i32>), ptr \S+ align (\d+)|@llvm\.masked\.(?:load|gather)[^,]*, i32 (\d+)")


@pytest.mark.parametrize("target", [AVX2, AVX512, NEON], ids=lambda t: t.key)
@pytest.mark.parametrize("kind", KINDS)
def test_loads_of_parameters_promise_no_alignment(kind: str, target: Target) -> None:
    """The machine at hand may not need it: the LLVM IR tells, of kernels in which all loads are of parameters."""
    kernel = Kernel(kernel_of(KINDS[kind](data(3, 37 if kind != "product with rows" else 70), data(37, 70))))
    found = []
    for state in (Scheduler(kernel, target), *sketches(Scheduler(kernel, target))):
        program = lower(state)
        if not any(i.op in ("TEMP", "SCRATCH") for code in program.code for i in code):
            found += [int(plain or masked) for plain, masked in LOADS.findall(render(program, target))]
    assert found and set(found) == {1}


@pytest.mark.parametrize("device", ["CPU", "CPU:interpreter"])
def test_replicas_read_the_same_bytes(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SVOD_DEVICE", device)
    values, x = numbers((9, 5), dtypes.float32), numbers((3, 9), dtypes.float32)
    w = waiting(values, dtypes.float32, 3)
    f = svod.jit(lambda t: t @ w)
    before = plans_of()
    np.testing.assert_allclose(f(Tensor(x)).numpy(), x @ values, rtol=1e-5)
    (plan,) = plans_of() - before
    replica = plan.replicate()
    gc.collect()
    (number,) = [i for i, b in enumerate(replica.buffers) if b.kind == "input"]
    replica.bind_array(number, np.ascontiguousarray(2 * x).reshape(-1))
    replica.execute()
    np.testing.assert_allclose(replica.outputs[0].reshape(3, 5), 2 * x @ values, rtol=1e-5)


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="resident memory is read from /proc")
def test_packing_leaves_one_copy_of_the_weights() -> None:
    """A product of many rows packs its weights; a copy at aligned addresses would be a second one."""
    def resident() -> int:
        return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    x, small = numbers((64, 2048), dtypes.float32), numbers((64, 64), dtypes.float32)
    svod.jit(lambda t: t @ waiting(small, dtypes.float32, 1))(Tensor(small)).numpy()
    values = numbers((2048, 4096), dtypes.float32)
    w = waiting(values, dtypes.float32, 1)
    LARGE_ARRAYS.release()
    gc.collect()
    before = resident()
    f = svod.jit(lambda t: t @ w)
    np.testing.assert_allclose(f(Tensor(x)).numpy(), x @ values, rtol=1e-3, atol=1e-3)
    assert resident() - before < 1.6 * values.nbytes
