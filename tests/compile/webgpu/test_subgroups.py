"""Exchanges of registers between the threads of a subgroup: the adapters that use them, the code, and right numbers."""
from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import svod
from svod import Tensor
from svod.compile.backend import device_named
from svod.compile.lower.lower import lower
from svod.compile.webgpu import adapter
from svod.compile.webgpu.backend import BACKEND
from svod.config import PrepareConfig
from svod.core.kernel.apply import apply_opts
from svod.core.kernel.chain_text import parse_chain
from svod.core.kernel.kernel import Kernel
from svod.core.kernel.scheduler import Scheduler
from svod.core.machine.target import Target
from svod.errors import CompileError
from tests.core.corpus import kernel_of

CONFIG = PrepareConfig(device="WEBGPU", db=":none:")
RNG = np.random.default_rng(0)
ROWS = Tensor(np.zeros((4, 512), np.float32)).sum(1)


@pytest.mark.parametrize("name, kind, vendor, sizes, features, expected", [
    ("llvmpipe (LLVM 15.0.6, 256 bits)", "CPU", 0x10005, (0, 0), ("subgroup",), 8),
    ("llvmpipe (LLVM 19.1.0, 128 bits)", "CPU", 0x10005, (0, 0), ("subgroup",), 4),
    ("llvmpipe (LLVM 15.0.6, 256 bits)", "CPU", 0x10005, (0, 0), (), 0),
    ("SwiftShader Device", "CPU", 0x1AE0, (0, 0), ("subgroup",), 0),
    ("NVIDIA H100", "DiscreteGPU", 0x10DE, (0, 0), ("subgroup",), 32),
    ("Radeon Pro W5700", "DiscreteGPU", 0x1002, (64, 64), ("subgroup",), 64),
    ("Radeon RX 7600", "DiscreteGPU", 0x1002, (32, 64), ("subgroup",), 0),
    ("Iris Xe of 256 bits", "IntegratedGPU", 0x8086, (0, 0), ("subgroup",), 0),
    ("of one thread", "DiscreteGPU", 0x13B5, (1, 1), ("subgroup",), 0),
    ("of no power of two", "DiscreteGPU", 0x13B5, (24, 24), ("subgroup",), 0),
])
def test_subgroups_count_where_all_have_one_size(name: str, kind: str, vendor: int, sizes: tuple[int, int], features: tuple[str, ...],
                                                 expected: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(adapter, "subgroup_sizes", lambda found: sizes)
    found: Any = SimpleNamespace(info={"device": name, "adapter_type": kind, "vendor_id": vendor}, features=set(features))
    assert adapter.subgroup_of(found) == expected


@pytest.fixture
def lanes(webgpu: Target) -> int:
    """Number of threads of a subgroup."""
    if not webgpu.subgroup:
        pytest.skip(f"the adapter {webgpu.cpu} has no subgroups of one size")
    return webgpu.subgroup


def test_the_sizes_that_wgpu_says_are_none_or_that_of_the_target(lanes: int) -> None:
    assert adapter.subgroup_sizes(BACKEND.gpu.adapter) in ((0, 0), (lanes, lanes))


@pytest.mark.parametrize("threads, beside, shuffles, barriers", [
    (1, 1, 3, 0), (1, 3, 3, 0), (3, 1, 3, 1), (4, 2, 3, 1), (16, 1, 3, 1), (0.5, 2, 2, 0), (0.5, 6, 2, 0), (0.5, 3, 0, 1), (1.5, 1, 0, 1),
    (2.5, 2, 2, 1),
])
def test_neighbours_exchange_registers(lanes: int, threads: float, beside: int, shuffles: int, barriers: int) -> None:
    """A sum is split into parts, one for each of `threads` × `lanes` threads, for `beside` rows at a time. Registers are exchanged if the
    parts of a row are a power of two of neighbouring threads in complete subgroups."""
    parts = int(threads * lanes)
    chain = f"GROUP(r0, {parts})" + (f" LOCAL(o0, {beside})" if beside > 1 else "")
    rows = Tensor(RNG.standard_normal((7, 509)).astype(np.float32)).sum(1)
    k = svod.kernel(rows, config=CONFIG).apply(f"PADTO(r0, {parts}) {chain}")
    text = k.llvm()
    more = (lanes // 8).bit_length() - 1
    assert text.count("subgroupShuffleXor") == (shuffles + more if shuffles else 0) and text.count("workgroupBarrier") == barriers
    assert k.check()


@pytest.mark.parametrize("dtype", ["float32", "float64", "float16", "bfloat16", "int8", "uint16", "int32", "uint32", "int64", "uint64",
                                   "bool"])
@pytest.mark.parametrize("vector", [1, 3])
def test_of_all_types(lanes: int, dtype: str, vector: int) -> None:
    """Values of all types are exchanged: single ones, and vectors of three rows per thread."""
    x = Tensor(RNG.integers(0, 2, (12, 8 * lanes)) if dtype == "bool" else RNG.integers(0, 99, (12, 8 * lanes))).cast(dtype).realize()
    chain = f"GROUP(r0, {2 * lanes})" + (f" UPCAST(o0, {vector})" if vector > 1 else "")
    y = x.any(1) if dtype == "bool" else x.max(1)
    k = svod.kernel(y, config=CONFIG).apply(chain)
    assert "subgroupShuffleXor" in k.llvm() and k.check()


def test_pairs_of_values_and_exchanges_inside_of_loops(lanes: int) -> None:
    """Exchanges of a maximum with its position, in a loop over the rows of an inner sum, and in two stages, one after the other."""
    x = RNG.standard_normal((3, 5, 4 * lanes)).astype(np.float32)
    for y, chain in ((Tensor(x[0]).argmax(1), f"GROUP(r0, {lanes})"),
                     (Tensor(x[0]).softmax(-1), f"GROUP(s1.r0, {lanes}) GROUP(s3.r0, {2 * lanes})"),
                     ((Tensor(x).sum(2).exp() * 2).sum(1), f"GROUP(s1.r0, {lanes})")):
        k = svod.kernel(y, config=CONFIG).apply(chain)
        assert k.llvm().count("subgroupShuffleXor") >= lanes.bit_length() - 1 and k.check()


def test_a_driver_with_other_subgroups_is_noticed(webgpu: Target, lanes: int) -> None:
    """A driver that uses another subgroup size is detected when a program is loaded, before it computes anything."""
    kernel, pair = Kernel(kernel_of(ROWS)), device_named("WEBGPU").pair
    for size in (2 * lanes, lanes):
        target = replace(webgpu, subgroup=size)
        program = lower(apply_opts(Scheduler(kernel, target), parse_chain("GROUP(r0, 64)")))
        code = pair.binary_of(program, target)
        if size == lanes:
            pair.load(code, program.spec)
        else:
            with pytest.raises(CompileError, match="in subgroups of another size than the adapter's"):
                pair.load(code, program.spec)


def test_without_subgroups_nothing_of_them_is_asked_for(webgpu: Target) -> None:
    target = replace(webgpu, subgroup=0)
    program = lower(apply_opts(Scheduler(Kernel(kernel_of(ROWS)), target), parse_chain("GROUP(r0, 64)")))
    assert "subgroup" not in device_named("WEBGPU").pair.render(program, target)
