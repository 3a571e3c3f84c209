"""The state of the caches between two timed runs is made without changing any data."""
from __future__ import annotations

import mmap
import resource
from dataclasses import replace

import numpy as np
import pytest

from svod.compile.cpu.between_runs import between_runs, between_runs_ir
from svod.compile.cpu.host import host_target
from svod.compile.llvm.codegen import compile_object


@pytest.mark.parametrize("threads", [1, 2])
def test_data_stay_as_they_are(threads: int) -> None:
    rng = np.random.default_rng(0)
    arrays = [rng.standard_normal(n).astype(np.float32) for n in (1, 15, 16, 17, 1003, 50_021)]
    beside = np.concatenate(arrays)
    pieces = np.split(beside, np.cumsum([a.size for a in arrays])[:-1])     # most pieces begin inside a cache line
    plan = between_runs(arrays[::2], [*arrays[1::2], *pieces], threads)
    plan.repeat(3)
    assert len(plan.kernels) == 12 and all(np.array_equal(a, p) for a, p in zip(arrays, pieces, strict=True))
    assert np.array_equal(beside, np.concatenate(arrays))
    assert np.array_equal(arrays[-1], np.random.default_rng(0).standard_normal(51_073).astype(np.float32)[-50_021:])


@pytest.mark.parametrize("is_constant", [
    pytest.param(True, marks=pytest.mark.skipif(host_target().arch != "x86_64", reason="constants stay in the caches there")), False])
def test_it_reaches_all_memory(is_constant: bool) -> None:
    """Each page that no one has touched costs a page fault when it is flushed, or written."""
    pages, size = 2048, mmap.PAGESIZE
    with mmap.mmap(-1, pages * size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS) as memory:
        memory.madvise(mmap.MADV_NOHUGEPAGE)
        array = np.frombuffer(memory, np.uint8)
        plan = between_runs([array], [], 2) if is_constant else between_runs([], [array], 2)
        before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
        plan.execute()
        assert resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before >= pages
        assert not array.any()
        del plan, array


def test_other_architectures_compile() -> None:
    for arch in ("x86_64", "aarch64"):
        assert compile_object(between_runs_ir(arch), replace(host_target(), arch=arch, features=()), True)
    assert "clflush" in between_runs_ir("x86_64") and "clflush" not in between_runs_ir("aarch64")
