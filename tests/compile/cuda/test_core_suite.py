"""The core benchmark suite at small sizes: the heuristic's plans for NVIDIA's GPUs give right numbers in the emulator."""
from __future__ import annotations

import pytest

from svod.bench.suites import cases
from svod.bench.suites.cases import Case
from svod.bench.suites.reference import difference, reference
from svod.bench.suites.suites import CORE_CASES
from svod.cli.bench.contestants import SvodContestant
from svod.config import PrepareConfig
from tests.compile.cuda.fake_driver import FakeDriver, stand_in

H100 = {"group_threads": 256, "unit_threads": 2048, "unit_groups": 32, "unit_shared": 228 << 10, "group_shared": 227 << 10}
A100 = {**H100, "major": 8, "unit_shared": 164 << 10, "group_shared": 163 << 10}
SMALL = {c.name: c for c in (
    *(cases.matmul(f"gemm_{n}", "", (m, m), (m, m)) for n, m in ((256, 17), (512, 32), (1024, 64), (2048, 96))),
    *(cases.matmul(f"gemm_1024_{dtype}", "", (80, 96), (96, 136), dtype) for dtype in ("float16", "bfloat16", "int8")),
    cases.linear_gelu("gemm_bias_gelu", "", 24, 40, 56), cases.matmul("bmm_12", "", (3, 32, 16), (3, 16, 32)),
    cases.matmul("gemv_4096", "", (200, 96), (96,)), cases.conv2d("conv3x3_64_56", "", 8, 8, 3, 9),
    cases.conv2d("conv1x1_256_56", "", 16, 8, 1, 7), cases.conv2d("conv7x7_s2_224", "", 3, 8, 7, 19, 2),
    cases.conv2d("conv_depthwise_112", "", 6, 6, 3, 11, groups=6), cases.softmax("softmax_4096x1024", "", 9, 300),
    cases.layer_norm("layer_norm_4096x768", "", 7, 96), cases.attention("attention_12x512x64", "", 2, 40, 16),
    cases.reduction("sum_16m", "", "sum", (5003,), 0), cases.reduction("row_sum_4096", "", "sum", (20, 333), 1),
    cases.reduction("column_sum_4096", "", "sum", (333, 20), 0), cases.max_pool2d("max_pool_64_112", "", 3, 13),
    cases.gelu("gelu_4m", "", 1001),    cases.axpy("axpy_16m", "", 3001), cases.transpose("transpose_4096", "", 37, 66))}
NARROW = [name for name in SMALL if name.startswith("gemm_1024_")]


def test_each_case_of_the_suite_has_a_small_one() -> None:
    assert [(c.name, c.op) for c in CORE_CASES] == [(c.name, SMALL[c.name].op) for c in CORE_CASES] and len(SMALL) == len(CORE_CASES)


def check_case(case: Case) -> str:
    """Run a case on CUDA and check its result; returns the chains of its kernels."""
    operands = case.draw()
    prepared = SvodContestant("heuristic", PrepareConfig(device="CUDA", object_cache=":none:", db=":none:")).prepare(case, operands)
    error = difference(prepared.output(), reference(case, operands), case.out_dtype)
    assert error <= case.tolerance, f"off by {error:.2g} of the largest: {[k.chain for k in prepared.kernels]}"
    return str([k.chain for k in prepared.kernels])


@pytest.mark.slow
@pytest.mark.parametrize("name", SMALL)
def test_the_heuristic_is_right(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    stand_in(FakeDriver(sizes=H100), monkeypatch)
    chains = check_case(SMALL[name])
    assert ("'TC'" in chains) == (name in NARROW) and ("wgmma" in chains or "float16" not in name), chains


@pytest.mark.slow
@pytest.mark.parametrize("name", NARROW)
def test_the_heuristic_is_right_on_ampere(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    stand_in(FakeDriver(sizes=A100), monkeypatch)
    assert "mma_" in check_case(SMALL[name])
